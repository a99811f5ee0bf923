//! Launching a PTX text by its description: a kernel from anywhere, or one of ours that was changed
//! to take timestamps.

use std::collections::HashMap;

use cuda::{
    Arguments, Buffer, DeviceAddress, Function, Launch, Module, Parameter, Stream, TensorMap,
};
use flashcore::gpu::Gpu;
use ptx::{Swizzle, TensorBox};

use super::{Addresses, Call, KernelArgument, LaunchDescription, TensorRole};
use crate::Error;

/// A compiled kernel with the launch for one problem.
#[derive(Debug)]
pub struct Launcher {
    description: LaunchDescription,
    function: Function,
    launch: Launch,
    /// What is behind [`KernelArgument::Words`], by argument, and behind
    /// [`KernelArgument::Memory`], by name.
    words: HashMap<usize, Buffer>,
    memory: HashMap<String, Buffer>,
    bound: Option<(Addresses, Arguments)>,
}

impl Launcher {
    /// Compiles a PTX text, or takes it from the cache, and gets ready to launch it.
    pub fn new(gpu: &Gpu, ptx: &str, description: LaunchDescription) -> Result<Self, Error> {
        let cubin = gpu.device().compile_cached(ptx, gpu.cache())?;
        let module = Module::load(gpu.device(), &cubin.bytes)?;
        let signature: Vec<Parameter> = description.arguments.iter().map(parameter).collect();
        let function = module.function(&description.entry, &signature)?;
        function.set_dynamic_shared(description.shared_bytes)?;
        let launch = Launch {
            grid: description.grid,
            block: [description.threads, 1, 1],
            cluster: [description.cluster, 1, 1],
            shared_bytes: description.shared_bytes,
            programmatic: description.programmatic && gpu.device().takes_programmatic_launches(),
        };
        let (mut words, mut memory) = (HashMap::new(), HashMap::new());
        for (index, argument) in description.arguments.iter().enumerate() {
            match argument {
                KernelArgument::Words { values } => {
                    let values = if values.is_empty() { &[0][..] } else { values };
                    words.insert(index, Buffer::from_slice(gpu.stream(), values)?);
                }
                KernelArgument::Memory { name, bytes } => {
                    let buffer = Buffer::new(gpu.device(), (*bytes).max(4))?;
                    gpu.stream().fill(buffer.all(), 0)?;
                    memory.insert(name.clone(), buffer);
                }
                _ => {}
            }
        }
        Ok(Launcher { description, function, launch, words, memory, bound: None })
    }

    /// What is in the memory of a name now. Waits.
    pub fn memory(&self, gpu: &Gpu, name: &str) -> Result<Vec<u64>, Error> {
        let missing = || Error::Impossible(format!("there is no memory {name}"));
        let buffer = self.memory.get(name).ok_or_else(missing)?;
        Ok(gpu.stream().download_vec(buffer.all())?)
    }

    fn arguments(&self, stream: &Stream, addresses: &Addresses) -> Result<Arguments, Error> {
        let address = |role: TensorRole| addresses[role as usize];
        let mut arguments = Arguments::new();
        for (index, argument) in self.description.arguments.iter().enumerate() {
            match argument {
                KernelArgument::Address { tensor } => arguments.push(address(*tensor)),
                KernelArgument::U32 { value } => arguments.push(*value),
                KernelArgument::I32 { value } => arguments.push(*value),
                KernelArgument::U64 { value } => arguments.push(*value),
                KernelArgument::F32 { value } => arguments.push(*value),
                KernelArgument::Words { .. } => arguments.push(self.words[&index].address()),
                KernelArgument::Memory { name, .. } => arguments.push(self.memory[name].address()),
                KernelArgument::TensorMap {
                    tensor,
                    element,
                    dimensions,
                    strides,
                    extent,
                    swizzle,
                } => {
                    let tensor_box = TensorBox {
                        element: *element,
                        extent: extent.clone(),
                        swizzle: self.swizzle(*swizzle)?,
                    };
                    let address: DeviceAddress = address(*tensor);
                    let device = stream.device();
                    arguments.push(TensorMap::encode(
                        device,
                        &tensor_box,
                        address,
                        dimensions,
                        strides,
                    )?)
                }
            };
        }
        Ok(arguments)
    }

    fn swizzle(&self, bytes: u32) -> Result<Swizzle, Error> {
        let swizzle = Swizzle::ALL.into_iter().find(|it| match it {
            Swizzle::None => bytes == 0,
            it => it.width() == bytes,
        });
        swizzle.ok_or_else(|| Error::Malformed {
            what: self.description.entry.clone(),
            reason: "a swizzle is over 0, 32, 64 or 128 bytes".to_owned(),
        })
    }
}

impl Call for Launcher {
    fn launch(&mut self, stream: &Stream, addresses: &Addresses) -> Result<(), Error> {
        if self.bound.as_ref().is_none_or(|(bound, _)| bound != addresses) {
            self.bound = Some((*addresses, self.arguments(stream, addresses)?));
        }
        let (_, arguments) = self.bound.as_ref().expect("bound just now");
        Ok(self.function.launch(stream, &self.launch, arguments)?)
    }
}

fn parameter(argument: &KernelArgument) -> Parameter {
    match argument {
        KernelArgument::TensorMap { .. } => Parameter::TensorMap,
        KernelArgument::U32 { .. } => Parameter::U32,
        KernelArgument::I32 { .. } => Parameter::I32,
        KernelArgument::U64 { .. } => Parameter::U64,
        KernelArgument::F32 { .. } => Parameter::F32,
        _ => Parameter::Address,
    }
}
