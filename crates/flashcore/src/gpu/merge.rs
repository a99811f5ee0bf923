//! Launching the combine kernel: attention over parts of the keys, put together on the device.

use std::sync::Arc;

use cuda::{Argument, Arguments, DeviceAddress, Stream};
use kernels::Combine;
use ptx::{Capability, Element};

use super::{Chip, DeviceTensor, Gpu, GpuError, Kernel};
use crate::dtype::DType;
use crate::tensor::{Layout, Shape, Strides, TensorError};

/// What a plan is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MergeSize {
    /// How many parts there are.
    pub parts: usize,
    /// The shape of the output and of every part, with the value head dim. Packed sequences are
    /// one batch entry.
    pub shape: Shape,
    /// The element of the parts' outputs.
    pub partial: DType,
    /// The element of the output.
    pub output: DType,
}

impl MergeSize {
    /// So many parts of this shape, everything in one element type.
    pub fn new(parts: usize, shape: Shape, dtype: DType) -> Self {
        MergeSize { parts, shape, partial: dtype, output: dtype }
    }

    /// The same with parts of another element type: `F32`, as a rule.
    pub fn with_partial(self, partial: DType) -> Self {
        MergeSize { partial, ..self }
    }

    /// The kernel, or why there is none.
    fn configuration(&self, chip: &Chip) -> Result<Combine, GpuError> {
        let refuse = |reason: String| GpuError::Unsupported { kernel: NAME, reason };
        let element = |dtype| match dtype {
            DType::F32 => Element::F32,
            DType::F16 => Element::F16,
            DType::BF16 => Element::BF16,
        };
        let (partial, output) = (element(self.partial), element(self.output));
        let Shape { dim, .. } = self.shape;
        if dim == 0 || !dim.is_multiple_of(2) || dim > 1 << 16 {
            return Err(refuse(format!("head dim {dim} is not even or beyond 65536")));
        }
        if self.parts == 0 {
            return Err(refuse("there are no parts".to_owned()));
        }
        if [partial, output].contains(&Element::BF16) && !chip.target.has(Capability::AsyncCopies) {
            return Err(refuse(format!("{} is older than bf16", chip.target)));
        }
        let (target, value_head_dim) = (chip.target, dim as u32);
        Ok(Combine { target, partial, element: output, value_head_dim })
    }
}

/// The result of attention: an output with its log-sum-exps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionState {
    /// The output, (batch, length, heads, dim).
    pub output: DeviceTensor,
    /// The log-sum-exps, (batch, length, heads) in f32, whatever the strides.
    pub lse: DeviceTensor,
}

/// What one launch reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MergeTensors {
    /// The first part.
    pub first: AttentionState,
    /// Elements from the output of a part to that of the next.
    pub output_step: isize,
    /// Elements from the log-sum-exps of a part to those of the next.
    pub lse_step: isize,
    /// Where the result goes. The output may be where a part of the same element type is;
    /// log-sum-exps must not overlap those of parts.
    pub result: AttentionState,
}

impl MergeTensors {
    /// Parts in one tensor without gaps, (parts, batch, length, heads, dim), and their
    /// log-sum-exps in another, (parts, batch, heads, length): what attention plans write, one
    /// after the other. The result is in the same order.
    pub fn stacked(
        size: &MergeSize,
        [partial_output, partial_lse]: [DeviceAddress; 2],
        [output, lse]: [DeviceAddress; 2],
    ) -> Result<Self, TensorError> {
        let layout = Layout::contiguous(size.shape)?;
        let Shape { batch, length, heads, .. } = size.shape;
        let lse_strides = Strides { batch: heads * length, length: 1, heads: length };
        let state = |output, lse| AttentionState {
            output: DeviceTensor { address: output, strides: layout.strides() },
            lse: DeviceTensor { address: lse, strides: lse_strides },
        };
        Ok(MergeTensors {
            first: state(partial_output, partial_lse),
            output_step: (batch * length * heads * size.shape.dim) as isize,
            lse_step: (batch * length * heads) as isize,
            result: state(output, lse),
        })
    }

    /// Two parts that lie anywhere, with the same strides: a shared prefix and what follows it,
    /// this device's slice of a context and the next one's.
    pub fn pair(
        size: &MergeSize,
        [first, second]: [AttentionState; 2],
        result: AttentionState,
    ) -> Result<Self, GpuError> {
        let step = |tensor, from: DeviceTensor, to: DeviceTensor, bytes: usize| {
            let refuse = |reason: &str| GpuError::Tensor { tensor, reason: reason.to_owned() };
            if from.strides != to.strides {
                return Err(refuse("its strides are not those of the first part"));
            }
            let apart = to.address.0.wrapping_sub(from.address.0) as i64 as isize;
            match apart % bytes as isize == 0 {
                true => Ok(apart / bytes as isize),
                false => Err(refuse("it is no whole number of elements from the first part")),
            }
        };
        Ok(MergeTensors {
            first,
            output_step: step("second output", first.output, second.output, size.partial.bytes())?,
            lse_step: step("second log-sum-exp", first.lse, second.lse, 4)?,
            result,
        })
    }
}

/// The kernel's name in errors.
const NAME: &str = "combine";

/// The kernel's parameters, in the order in which [`MergePlan::launch`] has them.
const PARAMETERS: [&str; 22] = [
    "PartialOutput",
    "PartialOutput part stride",
    "PartialOutput batch stride",
    "PartialOutput row stride",
    "PartialOutput head stride",
    "PartialLse",
    "PartialLse part stride",
    "PartialLse batch stride",
    "PartialLse row stride",
    "PartialLse head stride",
    "Output",
    "Output batch stride",
    "Output row stride",
    "Output head stride",
    "Lse",
    "Lse batch stride",
    "Lse row stride",
    "Lse head stride",
    "QueryLength",
    "QueryHeads",
    "AllRows",
    "Parts",
];

/// Putting attention over parts of the keys together by the log-sum-exps of the parts: a shared
/// prefix and what follows it, levels of a cascade, slices of a context on several devices. What
/// [`serving::merge`](crate::serving::merge) does in host memory.
///
/// A part whose log-sum-exp of a row is minus infinity saw no key for it: its output is not read.
/// A row without any other is zero, its log-sum-exp minus infinity. A log-sum-exp that is plus
/// infinity or not a number makes the row not a number: it shows.
///
/// A launch neither allocates nor waits. The plan must outlive its launches.
///
/// ```no_run
/// use flashcore::gpu::{Buffer, Gpu, MergePlan, MergeSize, MergeTensors};
/// use flashcore::{DType, Shape};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let gpu = Gpu::open(0)?;
/// // Eight parts in f32, one query for each of four sequences.
/// let shape = Shape::new(4, 1, 32, 128);
/// let size = MergeSize::new(8, shape, DType::BF16).with_partial(DType::F32);
/// let room = |bytes: usize| Buffer::new(gpu.device(), bytes as u64);
/// let rows = 4 * 32;
/// let (parts, part_lse) = (room(8 * rows * 128 * 4)?, room(8 * rows * 4)?);
/// let (output, lse) = (room(rows * 128 * 2)?, room(rows * 4)?);
/// let address = |[a, b]: [&Buffer; 2]| [a.address(), b.address()];
/// let tensors =
///     MergeTensors::stacked(&size, address([&parts, &part_lse]), address([&output, &lse]))?;
/// MergePlan::new(&gpu, &size)?.launch(gpu.stream(), &tensors)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct MergePlan {
    size: MergeSize,
    configuration: Combine,
    /// None where there is nothing to do.
    blocks: Option<u32>,
    kernel: Arc<Kernel>,
    arguments: Arguments,
}

impl MergePlan {
    /// A plan for a size.
    pub fn new(gpu: &Gpu, size: &MergeSize) -> Result<Self, GpuError> {
        let configuration = size.configuration(&gpu.chip())?;
        let blocks = blocks(&configuration, size)?;
        let kernel = gpu.kernel(&configuration.name(), || configuration.program())?;
        let misplaced =
            |(index, name): &(usize, &String)| PARAMETERS.get(*index) != Some(&name.as_str());
        if let Some((_, parameter)) = kernel.parameters().iter().enumerate().find(misplaced) {
            let (kernel, parameter) = (configuration.name(), parameter.clone());
            return Err(GpuError::Parameter { kernel, parameter });
        }
        Ok(MergePlan { size: *size, configuration, blocks, kernel, arguments: Arguments::new() })
    }

    /// Puts the merge on a stream of the plan's device. Neither allocates nor waits.
    ///
    /// That the addresses are right is the caller's business: what goes wrong on the device is
    /// reported by the stream, when it is next waited for.
    pub fn launch(&mut self, stream: &Stream, tensors: &MergeTensors) -> Result<(), GpuError> {
        let Some(blocks) = self.blocks else { return Ok(()) };
        let MergeSize { parts, shape, partial, output } = self.size;
        let MergeTensors { first, output_step, lse_step, result } = tensors;
        // Two neighbours are read and written at a time.
        for (role, tensor, bytes, together) in [
            ("partial output", first.output, partial.bytes(), 2 * partial.bytes()),
            ("partial log-sum-exp", first.lse, 4, 4),
            ("Output", result.output, output.bytes(), 2 * output.bytes()),
            ("log-sum-exp", result.lse, 4, 4),
        ] {
            tensor.aligned(role, bytes, together)?;
        }
        if parts > 1 && output_step % 2 != 0 {
            let reason = format!("{output_step} elements from part to part are not even");
            return Err(GpuError::Tensor { tensor: "partial output", reason });
        }
        // The room for arguments stays from launch to launch.
        self.arguments.clear();
        let word = |value: usize| Argument::U64(value as u64);
        let mut push = |tensor: &DeviceTensor, step: Option<isize>| {
            self.arguments.push(tensor.address);
            if let Some(step) = step {
                self.arguments.push(Argument::U64(step as u64));
            }
            let Strides { batch, length, heads } = tensor.strides;
            for stride in [batch, length, heads] {
                self.arguments.push(word(stride));
            }
        };
        push(&first.output, Some(*output_step));
        push(&first.lse, Some(*lse_step));
        push(&result.output, None);
        push(&result.lse, None);
        let rows = shape.batch * shape.length * shape.heads;
        for number in [shape.length, shape.heads, rows, parts] {
            self.arguments.push(number as u32);
        }
        Ok(self.kernel.launch(stream, blocks, &self.arguments)?)
    }

    /// What it was made for.
    pub fn size(&self) -> &MergeSize {
        &self.size
    }

    /// What the kernel was built for.
    pub fn configuration(&self) -> &Combine {
        &self.configuration
    }
}

/// Blocks of a launch. Threads and parts are counted in 32 bits.
fn blocks(configuration: &Combine, size: &MergeSize) -> Result<Option<u32>, GpuError> {
    let Shape { batch, length, heads, dim } = size.shape;
    let too_large = |what| GpuError::TooLarge { what };
    u32::try_from(size.parts).map_err(|_| too_large("the number of parts"))?;
    let rows = batch.checked_mul(length).and_then(|rows| rows.checked_mul(heads));
    let rows = rows.filter(|rows| rows.checked_mul(dim / 2).is_some_and(|it| it < 1 << 31));
    let rows = rows.ok_or(too_large("the number of rows"))?;
    let blocks = configuration.blocks(rows as u64) as u32;
    Ok((blocks > 0).then_some(blocks))
}

#[cfg(test)]
mod tests {
    use ptx::Target;

    use super::*;

    #[test]
    fn every_parameter_has_its_place() {
        for partial in DType::ALL {
            let size = MergeSize::new(3, Shape::new(2, 5, 3, 64), DType::BF16);
            let size = size.with_partial(partial);
            let program = size.configuration(&Chip::H200).unwrap().program().unwrap();
            let names: Vec<&str> = program.parameters.iter().map(|it| it.name.as_str()).collect();
            assert_eq!(names, PARAMETERS);
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_the_reason() {
        let good = MergeSize::new(3, Shape::new(2, 5, 3, 64), DType::BF16);
        let refusal = |chip, size: MergeSize| {
            let made = size.configuration(&chip).and_then(|it| blocks(&it, &size));
            made.unwrap_err().to_string()
        };
        let prefix = "the combine kernel does not serve this problem: ";
        let with = |shape| MergeSize { shape, ..good };
        for (size, reason) in [
            (MergeSize { parts: 0, ..good }, "there are no parts"),
            (with(Shape::new(2, 5, 3, 7)), "head dim 7 is not even or beyond 65536"),
        ] {
            assert_eq!(refusal(Chip::H200, size), format!("{prefix}{reason}"));
        }
        let old = Chip::typical(Target::SM_75);
        assert_eq!(refusal(old, good), format!("{prefix}sm_75 is older than bf16"));
        let many = with(Shape::new(1 << 20, 1 << 20, 3, 64));
        assert_eq!(refusal(Chip::H200, many), "the number of rows is too large for the GPU kernel");
        let none = with(Shape::new(2, 0, 3, 64));
        assert_eq!(blocks(&none.configuration(&Chip::H200).unwrap(), &none).unwrap(), None);
    }

    #[test]
    fn two_parts_may_lie_anywhere() {
        let size = MergeSize::new(2, Shape::new(1, 1, 1, 8), DType::F16);
        let strides = Strides { batch: 8, length: 8, heads: 8 };
        let state = |output, lse| AttentionState {
            output: DeviceTensor { address: DeviceAddress(output), strides },
            lse: DeviceTensor { address: DeviceAddress(lse), strides },
        };
        let result = state(0x9000, 0xa000);
        let pair = |second| MergeTensors::pair(&size, [state(0x2000, 0x400), second], result);
        let tensors = pair(state(0x1000, 0x800)).unwrap();
        assert_eq!((tensors.output_step, tensors.lse_step), (-0x800, 0x100));
        let odd = pair(state(0x1001, 0x800)).unwrap_err().to_string();
        assert!(odd.contains("whole number of elements"), "{odd}");
        let mut other = state(0x1000, 0x800);
        other.lse.strides.heads = 1;
        assert!(pair(other).unwrap_err().to_string().contains("strides"));
    }
}
