//! Launching the forward kernel on tensors that are on the device.
//!
//! | file | its subject |
//! | --- | --- |
//! | `support` | what the kernel serves, and in which configuration |
//! | `geometry` | tiles, blocks and the numbers that find them |
//! | `tuning` | what a search found better, from files |
//! | `binding` | which argument goes to which parameter |
//! | this one | the plan that ties them together |

mod binding;
mod geometry;
mod support;
mod tuning;

pub(super) use geometry::Counts;
pub use geometry::Geometry;
pub(super) use support::{COPY_BYTES, check_scale, tensor_core_element, tensor_core_workload};
pub use support::{check_layouts, check_tensors, choose, workload};
pub use tuning::{Choice, Entry, Tuning, TuningFile, Variant, bucket, fingerprint};

use std::borrow::Cow;
use std::sync::Arc;

use cuda::{Arguments, Buffer, DeviceAddress, Stream, TensorMap};
use kernels::Forward;
use kernels::forward::Form;
use ptx::{Program, TensorBox};

use self::binding::{Number, Slot};
use super::{Gpu, GpuError, Kernel, Passed};
use crate::dtype::DType;
use crate::problem::Problem;
use crate::tensor::{Layout, Shape, Strides};

/// Everything about a forward pass that does not depend on where its tensors are.
///
/// Making one chooses the configuration, compiles the kernel where neither this process nor the
/// cache has it (first in its compact form: see [`Policy`](super::Policy)), and shares out the tiles. Launching one encodes the tensor maps of those tensors
/// that are not where they were in the last launch, and nothing else: it neither allocates nor
/// compiles nor waits.
///
/// Keep one for each shape, and for each thread that launches: a clone shares what is on the
/// device. One of them must outlive the launches they made, and a graph that captured them: the
/// kernel reads the tile lists that they hold.
///
/// ```no_run
/// use flashcore::gpu::{Buffer, ForwardPlan, ForwardTensors, Gpu, GpuError, Stream};
/// use flashcore::{DType, Mask, Problem, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let gpu = Gpu::open(0)?;
/// let problem =
///     Problem::new(1, 16, 4096, 128).with_dtype(DType::BF16).with_mask(Mask::Causal);
/// let mut plan = match ForwardPlan::new(&gpu, &problem) {
///     Ok(plan) => plan,
///     Err(GpuError::Unsupported { reason, .. }) => {
///         println!("something else must do it: {reason}");
///         return Ok(());
///     }
///     Err(error) => return Err(error.into()),
/// };
///
/// // Tensors on the device: here ours, as well PyTorch's.
/// let stream = Stream::new(gpu.device())?;
/// let upload = |shape, seed| -> Result<Buffer, Box<dyn std::error::Error>> {
///     let tensor = Tensor::random(problem.dtype, shape, seed)?;
///     Ok(Buffer::from_slice(&stream, tensor.bytes())?)
/// };
/// let query = upload(problem.query_shape(), 0)?;
/// let key = upload(problem.key_shape(), 1)?;
/// let value = upload(problem.value_shape(), 2)?;
/// let output = Buffer::new(gpu.device(), query.bytes())?;
/// let lse = Buffer::new(gpu.device(), 4 * problem.rows() as u64)?;
///
/// let addresses = [&query, &key, &value, &output].map(|buffer| buffer.address());
/// let tensors = ForwardTensors::contiguous(&problem, addresses, lse.address())?;
/// plan.launch(&stream, &tensors)?;
///
/// // (batch, heads, queries) in f32. Copying waits, and reports what went wrong on the device.
/// let lse: Vec<f32> = stream.download_vec(lse.all())?;
/// println!("{}: the first row's log-sum-exp is {}", plan.configuration().name(), lse[0]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct ForwardPlan {
    problem: Problem,
    configuration: Forward,
    reason: Cow<'static, str>,
    geometry: Geometry,
    kernel: Arc<Kernel>,
    /// The memory of the tile lists.
    lists: Option<Arc<Buffer>>,
    /// The boxes in which queries, keys, values and outputs are copied.
    boxes: [TensorBox; 4],
    /// Where each of them and the log-sum-exp is among the arguments.
    slots: Vec<Slot>,
    bound: Option<Bound>,
}

/// The arguments of the last launch, and what they were made from.
#[derive(Debug, Clone)]
struct Bound {
    tensors: ForwardTensors,
    arguments: Arguments,
}

/// A tensor on the device, logically (batch, length, heads, dim). The dim is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceTensor {
    /// Its first element; a multiple of 16.
    pub address: DeviceAddress,
    /// Distances in elements. In bytes they are multiples of 16.
    pub strides: Strides,
}

/// What one launch reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ForwardTensors {
    /// The queries.
    pub query: DeviceTensor,
    /// The keys.
    pub key: DeviceTensor,
    /// The values.
    pub value: DeviceTensor,
    /// Where the output goes; must not overlap the others.
    pub output: DeviceTensor,
    /// Where the log-sum-exps go: (batch, query heads, query length) in f32, without gaps.
    pub lse: DeviceAddress,
}

impl ForwardTensors {
    /// Query, key, value and output without gaps in the order (batch, length, heads, dim).
    pub fn contiguous(
        problem: &Problem,
        addresses: [DeviceAddress; 4],
        lse: DeviceAddress,
    ) -> Result<Self, crate::TensorError> {
        let tensor = |index: usize, shape: Shape| {
            let strides = Layout::contiguous(shape)?.strides();
            Ok(DeviceTensor { address: addresses[index], strides })
        };
        Ok(ForwardTensors {
            query: tensor(0, problem.query_shape())?,
            key: tensor(1, problem.key_shape())?,
            value: tensor(2, problem.value_shape())?,
            output: tensor(3, problem.output_shape())?,
            lse,
        })
    }

    pub(super) fn tensors(&self) -> [DeviceTensor; 4] {
        [self.query, self.key, self.value, self.output]
    }
}

/// The roles of the four tensors, for errors.
pub(super) const ROLES: [&str; 4] = ["query", "key", "value", "output"];

impl ForwardPlan {
    /// A plan in the configuration that is best for the problem.
    pub fn new(gpu: &Gpu, problem: &Problem) -> Result<Self, GpuError> {
        let unsupported = |reason| GpuError::Unsupported { kernel: "forward", reason };
        problem.validate().map_err(|error| unsupported(error.to_string()))?;
        let chosen = choose(&gpu.chip(), problem).map_err(unsupported)?;
        ForwardPlan::with_configuration(gpu, problem, chosen.configuration, chosen.reason)
    }

    /// A plan in a given configuration, which must be one for the problem's element, dims and
    /// mask.
    pub fn with_configuration(
        gpu: &Gpu,
        problem: &Problem,
        configuration: Forward,
        reason: impl Into<Cow<'static, str>>,
    ) -> Result<Self, GpuError> {
        let chip = gpu.chip();
        let unsupported = |reason: String| GpuError::Unsupported { kernel: "forward", reason };
        let tuned = choose(&chip, problem).map_err(unsupported)?.configuration;
        let fits = |it: &Forward| (it.element, it.head_dim, it.value_head_dim, it.causal);
        if fits(&configuration) != fits(&tuned) {
            let reason = format!("{} is for another element, dim or mask", configuration.name());
            return Err(unsupported(reason));
        }
        let geometry = Geometry::new(&configuration, problem, &chip)?;
        let name = configuration.name();
        let compact = Forward { form: Form::COMPACT, ..configuration };
        let full = || configuration.program();
        let kernel = if compact == configuration {
            gpu.kernel(&name, full)?
        } else {
            gpu.kernel_of_two_forms(&name, full, || compact.program())?
        };
        let lists = match &geometry.lists {
            Some(lists) => Some(Arc::new(Buffer::from_slice(gpu.stream(), &lists.words)?)),
            None => None,
        };
        let address = lists.as_ref().map(|lists| lists.address());
        let slots = binding::slots(kernel.parameters(), problem, &geometry, address)
            .map_err(|parameter| GpuError::Parameter { kernel: configuration.name(), parameter })?;
        Ok(ForwardPlan {
            problem: problem.clone(),
            configuration,
            reason: reason.into(),
            geometry,
            kernel,
            lists,
            boxes: boxes(&configuration),
            slots,
            bound: None,
        })
    }

    /// Puts the forward pass on a stream of the plan's device. Does not wait.
    ///
    /// That the addresses are right is the caller's business: what goes wrong on the device is
    /// reported by the stream, when it is next waited for.
    pub fn launch(&mut self, stream: &Stream, tensors: &ForwardTensors) -> Result<(), GpuError> {
        self.bind(stream, tensors)?;
        let bound = self.bound.as_ref().expect("bound just now");
        Ok(self.kernel.launch(stream, self.geometry.blocks, &bound.arguments)?)
    }

    /// Makes the arguments, or changes those whose tensor has moved.
    fn bind(&mut self, stream: &Stream, tensors: &ForwardTensors) -> Result<(), GpuError> {
        let Some(mut bound) = self.bound.take() else {
            let mut arguments = Arguments::new();
            for slot in &self.slots {
                match *slot {
                    Slot::Tensor(role) => {
                        arguments.push(self.encode(stream, role, tensors.tensors()[role])?);
                    }
                    Slot::Lse => {
                        arguments.push(tensors.lse);
                    }
                    Slot::Number(number) => {
                        arguments.push(number);
                    }
                }
            }
            self.bound = Some(Bound { tensors: *tensors, arguments });
            return Ok(());
        };
        if bound.tensors != *tensors {
            let old = bound.tensors.tensors();
            // On an error the arguments are half changed: they are made anew next time.
            for (index, slot) in self.slots.iter().enumerate() {
                match *slot {
                    Slot::Tensor(role) if old[role] != tensors.tensors()[role] => {
                        let map = self.encode(stream, role, tensors.tensors()[role])?;
                        bound.arguments.set(index, map)?;
                    }
                    Slot::Lse => bound.arguments.set(index, tensors.lse)?,
                    _ => {}
                }
            }
            bound.tensors = *tensors;
        }
        self.bound = Some(bound);
        Ok(())
    }

    fn encode(
        &self,
        stream: &Stream,
        role: usize,
        tensor: DeviceTensor,
    ) -> Result<TensorMap, GpuError> {
        let of_role = |reason| GpuError::Tensor { tensor: ROLES[role], reason };
        let shape = self.shape(role);
        let strides = support::map_strides(self.problem.dtype, shape, tensor.strides)
            .map_err(|reason| of_role(reason.to_owned()))?;
        let dimensions = [shape.dim, shape.length, shape.heads, shape.batch].map(|n| n as u64);
        let tensor_box = &self.boxes[role];
        TensorMap::encode(stream.device(), tensor_box, tensor.address, &dimensions, &strides)
            .map_err(|error| of_role(error.to_string()))
    }

    fn shape(&self, role: usize) -> Shape {
        match role {
            0 => self.problem.query_shape(),
            1 => self.problem.key_shape(),
            2 => self.problem.value_shape(),
            _ => self.problem.output_shape(),
        }
    }

    /// What it computes.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// What the kernel was built for.
    pub fn configuration(&self) -> &Forward {
        &self.configuration
    }

    /// Why this configuration.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// Tiles and blocks.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The compiled kernel.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Device memory that the plan holds besides the kernel.
    pub fn device_bytes(&self) -> u64 {
        self.lists.as_ref().map_or(0, |lists| lists.bytes())
    }

    /// The element type of all tensors.
    pub fn dtype(&self) -> DType {
        self.problem.dtype
    }
}

/// For each parameter of the kernel, the number that is passed; nothing for tensors and lists.
pub(super) fn numbers(
    program: &Program,
    problem: &Problem,
    geometry: &Geometry,
) -> Result<Vec<Option<Passed>>, GpuError> {
    let names: Vec<String> = program.parameters.iter().map(|it| it.name.clone()).collect();
    let lists = geometry.lists.as_ref().map(|_| DeviceAddress(0));
    let slots = binding::slots(&names, problem, geometry, lists)
        .map_err(|parameter| GpuError::Parameter { kernel: program.name.clone(), parameter })?;
    let number = |slot: Slot| match slot {
        Slot::Number(Number::U32(value)) => Some(Passed::U32 { value }),
        Slot::Number(Number::F32(value)) => Some(Passed::F32 { value }),
        _ => None,
    };
    Ok(slots.into_iter().map(number).collect())
}

/// The boxes of queries, keys, values and outputs.
fn boxes(configuration: &Forward) -> [TensorBox; 4] {
    [
        configuration.query_layout(),
        configuration.key_layout(),
        configuration.value_layout(),
        configuration.output_layout(),
    ]
    .map(|layout| layout.tensor_box(4))
}
