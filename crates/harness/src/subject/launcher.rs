//! Launching any kernel by its description: ours, or one from anywhere.

use cuda::{
    Arguments, Buffer, DeviceAddress, Function, Launch, Module, OptimizationLevel, Parameter,
    Stream, TensorMap,
};
use flashcore::gpu::{Gpu, LaunchDescription, Passed, TensorRole};
use flashcore::{Layout, Problem};
use ptx::{Swizzle, TensorBox};

use crate::Error;

/// Where tensors are on the device, in the order of [`TensorRole::ALL`].
pub type Addresses = [DeviceAddress; 5];

/// A compiled kernel with the launch for one problem.
#[derive(Debug)]
pub struct Launcher {
    problem: Problem,
    description: LaunchDescription,
    function: Function,
    launch: Launch,
    /// The memory behind [`Passed::Words`] and [`Passed::Memory`], by argument.
    words: Vec<Option<Buffer>>,
    bound: Option<(Addresses, Arguments)>,
}

impl Launcher {
    /// Compiles a PTX text, or takes it from the cache, and gets ready to launch it.
    pub fn new(
        gpu: &Gpu,
        ptx: &str,
        description: LaunchDescription,
        problem: &Problem,
    ) -> Result<Self, Error> {
        let cubin = gpu.device().compile_cached(ptx, OptimizationLevel::default(), gpu.cache())?;
        let module = Module::load(gpu.device(), &cubin.bytes)?;
        let signature: Vec<Parameter> = description.arguments.iter().map(parameter).collect();
        let function = module.function(&description.entry, &signature)?;
        function.set_dynamic_shared(description.shared_bytes)?;
        let launch = Launch {
            grid: description.grid,
            block: [description.threads, 1, 1],
            cluster: [description.cluster, 1, 1],
            shared_bytes: description.shared_bytes,
            ..Launch::default()
        };
        let mut words = Vec::new();
        for argument in &description.arguments {
            words.push(match argument {
                Passed::Words { values } if values.is_empty() => {
                    Some(Buffer::from_slice(gpu.stream(), &[0u32])?)
                }
                Passed::Words { values } => Some(Buffer::from_slice(gpu.stream(), values)?),
                Passed::Memory { bytes, .. } => {
                    let buffer = Buffer::new(gpu.device(), (*bytes).max(4))?;
                    gpu.stream().fill(buffer.all(), 0)?;
                    Some(buffer)
                }
                _ => None,
            });
        }
        let problem = problem.clone();
        Ok(Launcher { problem, description, function, launch, words, bound: None })
    }

    /// Puts the kernel on a stream, on tensors at these addresses.
    pub fn launch(&mut self, stream: &Stream, addresses: &Addresses) -> Result<(), Error> {
        if self.bound.as_ref().is_none_or(|(bound, _)| bound != addresses) {
            self.bound = Some((*addresses, self.arguments(stream, addresses)?));
        }
        let (_, arguments) = self.bound.as_ref().expect("bound just now");
        Ok(self.function.launch(stream, &self.launch, arguments)?)
    }

    /// The compiled function.
    pub fn function(&self) -> &Function {
        &self.function
    }

    /// What is launched.
    pub fn description(&self) -> &LaunchDescription {
        &self.description
    }

    /// The words behind an argument, as they are now. Waits.
    pub fn words(&self, gpu: &Gpu, argument: usize) -> Result<Vec<u32>, Error> {
        let buffer = self.words.get(argument).and_then(Option::as_ref);
        let missing = || Error::Impossible(format!("argument {argument} has no words"));
        Ok(gpu.stream().download_vec(buffer.ok_or_else(missing)?.all())?)
    }

    fn arguments(&self, stream: &Stream, addresses: &Addresses) -> Result<Arguments, Error> {
        let address = |role: TensorRole| {
            let index = TensorRole::ALL.iter().position(|it| *it == role);
            addresses[index.expect("every role is listed")]
        };
        let mut arguments = Arguments::new();
        for (argument, words) in self.description.arguments.iter().zip(&self.words) {
            match argument {
                Passed::TensorMap { tensor, extent, swizzle } => {
                    let map = self.map(stream, *tensor, address(*tensor), extent, *swizzle)?;
                    arguments.push(map);
                }
                Passed::Address { tensor } => {
                    arguments.push(address(*tensor));
                }
                Passed::U32 { value } => {
                    arguments.push(*value);
                }
                Passed::U64 { value } => {
                    arguments.push(*value);
                }
                Passed::F32 { value } => {
                    arguments.push(*value);
                }
                Passed::Words { .. } | Passed::Memory { .. } => {
                    let words = words.as_ref().expect("made with the launcher");
                    arguments.push(words.address());
                }
                other => {
                    let reason = format!("nobody knows how to pass {other:?}");
                    return Err(Error::Malformed { what: self.description.entry.clone(), reason });
                }
            }
        }
        Ok(arguments)
    }

    fn map(
        &self,
        stream: &Stream,
        role: TensorRole,
        address: DeviceAddress,
        extent: &[u32],
        swizzle: u32,
    ) -> Result<TensorMap, Error> {
        let swizzle = Swizzle::ALL.into_iter().find(|it| match it {
            Swizzle::None => swizzle == 0,
            it => it.width() == swizzle,
        });
        let swizzle = swizzle.ok_or_else(|| Error::Malformed {
            what: self.description.entry.clone(),
            reason: "a swizzle is over 0, 32, 64 or 128 bytes".to_owned(),
        })?;
        let shape = role.shape(&self.problem);
        let strides = Layout::contiguous(shape).map_err(flashcore::Error::from)?.strides();
        let bytes = self.problem.dtype.bytes() as u64;
        let dimensions = [shape.dim, shape.length, shape.heads, shape.batch].map(|n| n as u64);
        // A dimension of one is never stepped along, but its stride must be in order.
        let strides = [strides.length, strides.heads, strides.batch].map(|n| n as u64 * bytes);
        let element = self.problem.dtype.element();
        let tensor_box = TensorBox { element, extent: extent.to_vec(), swizzle };
        Ok(TensorMap::encode(stream.device(), &tensor_box, address, &dimensions, &strides)?)
    }
}

fn parameter(argument: &Passed) -> Parameter {
    match argument {
        Passed::TensorMap { .. } => Parameter::TensorMap,
        Passed::U32 { .. } => Parameter::U32,
        Passed::U64 { .. } => Parameter::U64,
        Passed::F32 { .. } => Parameter::F32,
        _ => Parameter::Address,
    }
}
