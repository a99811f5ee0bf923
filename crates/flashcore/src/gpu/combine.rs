//! Combining attention over parts of the keys on the device, weighted by the log-sum-exps of the
//! parts.

use std::sync::Arc;

use cuda::{DeviceAddress, Stream};
use kernels::parameter::{Axis, Number, Tensor};
use kernels::{Combine, Configuration};
use ptx::Capability;

use super::executable::{Addresses, Executable, Part};
use super::plans::Kept;
use super::{Chip, DeviceTensor, Gpu, GpuError};
use crate::dtype::DType;
use crate::family::Choice;
use crate::plan::{Arrangement, Launch, Source, Value, axis_of, bind_with};
use crate::problem::{MOST_HEAD_DIM, Problem};
use crate::tensor::{Layout, Shape, Strides, TensorError};

/// Description of what is combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CombineProblem {
    /// Number of parts.
    pub parts: usize,
    /// Shape of the output and of every part, with the value head dim. Packed sequences count as
    /// one batch entry.
    pub shape: Shape,
    /// Element type of the parts' outputs.
    pub partial: DType,
    /// Element type of the combined output.
    pub output: DType,
}

impl CombineProblem {
    /// Describes `parts` parts of this shape, all in one element type.
    pub fn new(parts: usize, shape: Shape, dtype: DType) -> Self {
        CombineProblem { parts, shape, partial: dtype, output: dtype }
    }

    /// Sets the element type of the parts, which is usually `F32`.
    pub fn with_partial(self, partial: DType) -> Self {
        CombineProblem { partial, ..self }
    }

    /// Returns the launch, or why there is none.
    pub fn choose(&self, chip: &Chip) -> Result<Choice, GpuError> {
        let refuse = |reason: String| Err(GpuError::Unsupported { kernel: "combine", reason });
        let Shape { batch, length, heads, dim } = self.shape;
        if dim == 0 || !dim.is_multiple_of(2) || dim > MOST_HEAD_DIM {
            return refuse(format!("head dim {dim} is not even or beyond {MOST_HEAD_DIM}"));
        }
        if self.parts == 0 {
            return refuse("there are no parts".to_owned());
        }
        let halves = [self.partial, self.output].contains(&DType::BF16);
        if halves && !chip.target.has(Capability::AsyncCopies) {
            return refuse(format!("{} is older than bf16", chip.target));
        }
        let too_large = |what| GpuError::TooLarge { what };
        let parts = u32::try_from(self.parts).map_err(|_| too_large("the number of parts"))?;
        // Numbers of threads and of rows have 32 bits.
        let rows = batch.checked_mul(length).and_then(|rows| rows.checked_mul(heads));
        let rows =
            rows.filter(|rows| rows.checked_mul(dim / 2).is_some_and(|it| it <= u32::MAX as usize));
        let rows = rows.ok_or(too_large("the number of rows"))?;
        let combine = Combine {
            target: chip.target,
            partial: self.partial.element(),
            element: self.output.element(),
            value_head_dim: dim as u32,
        };
        let blocks = combine.blocks(rows as u64) as u32;
        let mut choice = Choice::of(Configuration::Combine(combine), blocks, "");
        choice.launches[0].numbers = vec![
            (Number::Parts, parts),
            (Number::AllRows, rows as u32),
            (Number::QueryLength, length as u32),
            (Number::QueryHeads, heads as u32),
        ];
        Ok(choice)
    }
}

/// A result of attention: an output with its log-sum-exps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionState {
    /// The output, (batch, length, heads, dim).
    pub output: DeviceTensor,
    /// The log-sum-exps, (batch, length, heads) in f32, with any strides.
    pub lse: DeviceTensor,
}

/// The tensors of one launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CombineTensors {
    /// The first part.
    pub first: AttentionState,
    /// Distance in elements between the outputs of successive parts.
    pub output_step: isize,
    /// Distance in elements between the log-sum-exps of successive parts.
    pub lse_step: isize,
    /// Receives the result. The output may be in the place of a part of the same element type;
    /// log-sum-exps must not overlap those of parts.
    pub result: AttentionState,
}

impl CombineTensors {
    /// Describes contiguous parts in one tensor, (parts, batch, length, heads, dim), and their
    /// log-sum-exps in another, (parts, batch, heads, length): the layout in which attention plans
    /// write them. The result has the same layout, without the parts.
    pub fn stacked(
        problem: &CombineProblem,
        [partial_output, partial_lse]: [DeviceAddress; 2],
        [output, lse]: [DeviceAddress; 2],
    ) -> Result<Self, TensorError> {
        let layout = Layout::contiguous(problem.shape)?;
        let Shape { batch, length, heads, .. } = problem.shape;
        let lse_strides = Strides { batch: heads * length, length: 1, heads: length };
        let state = |output, lse| AttentionState {
            output: DeviceTensor { address: output, strides: layout.strides() },
            lse: DeviceTensor { address: lse, strides: lse_strides },
        };
        Ok(CombineTensors {
            first: state(partial_output, partial_lse),
            output_step: (batch * length * heads * problem.shape.dim) as isize,
            lse_step: (batch * length * heads) as isize,
            result: state(output, lse),
        })
    }

    /// Describes two parts at arbitrary addresses, with the same strides: a shared prefix and what
    /// follows it, or one device's slice of a context and that of the next.
    pub fn pair(
        problem: &CombineProblem,
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
        let bytes = problem.partial.bytes();
        Ok(CombineTensors {
            first,
            output_step: step("second output", first.output, second.output, bytes)?,
            lse_step: step("second log-sum-exp", first.lse, second.lse, 4)?,
            result,
        })
    }

    fn tensor(&self, tensor: Tensor) -> Option<DeviceTensor> {
        match tensor {
            Tensor::PartialOutput => Some(self.first.output),
            Tensor::PartialLse => Some(self.first.lse),
            Tensor::Output => Some(self.result.output),
            Tensor::Lse => Some(self.result.lse),
            _ => None,
        }
    }

    /// Returns the arguments of a launch, with symbolic addresses.
    pub fn bind(&self, launch: &Launch, declared: &[ptx::Parameter]) -> Result<Vec<Value>, String> {
        bind_combine(launch, declared, &self.steps())
    }

    /// Returns everything but addresses, on which a plan depends besides the problem.
    fn steps(&self) -> Steps {
        let CombineTensors { first, result, output_step, lse_step } = self;
        let strides = [first.output, first.lse, result.output, result.lse];
        Steps {
            strides: strides.map(|tensor| tensor.strides),
            output: *output_step,
            lse: *lse_step,
        }
    }

    fn validate(&self, problem: &CombineProblem) -> Result<(), GpuError> {
        let (partial, output) = (problem.partial.bytes(), problem.output.bytes());
        // The kernel reads and writes two adjacent elements at a time.
        for (role, tensor, bytes, together) in [
            ("partial output", self.first.output, partial, 2 * partial),
            ("partial log-sum-exp", self.first.lse, 4, 4),
            ("output", self.result.output, output, 2 * output),
            ("log-sum-exp", self.result.lse, 4, 4),
        ] {
            tensor.aligned(role, bytes, together)?;
        }
        let step = self.output_step;
        if problem.parts > 1 && step % 2 != 0 {
            let reason = format!("{step} elements from part to part are not even");
            return Err(GpuError::Tensor { tensor: "partial output", reason });
        }
        Ok(())
    }
}

impl Addresses for CombineTensors {
    fn address(&self, source: Source) -> Option<DeviceAddress> {
        match source {
            Source::Tensor(tensor) => self.tensor(tensor).map(|tensor| tensor.address),
            _ => None,
        }
    }
}

/// The distances in elements that a plan depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Steps {
    /// Strides of partial outputs, partial log-sum-exps, output and log-sum-exps.
    strides: [Strides; 4],
    output: isize,
    lse: isize,
}

/// What a plan depends on: two calls with the same key differ only in addresses.
pub(super) type Key = (CombineProblem, Steps);

/// A plan for combining attention over parts of the keys by their log-sum-exps: a shared prefix and
/// what follows it, levels of a cascade, slices of a context on several devices. It does on the
/// device what [`serving::combine`](crate::serving::combine) does in host memory.
///
/// A part whose log-sum-exp of a row is minus infinity saw no key for that row: its output is not
/// read. A row that no part saw has an output of zeros and a log-sum-exp of minus infinity. A
/// log-sum-exp of plus infinity or NaN makes the row NaN, so that the error is visible.
///
/// A launch neither allocates nor synchronizes. [`Gpu::combine`] keeps plans for as long as they
/// are needed.
///
/// ```no_run
/// use flashcore::gpu::{Buffer, CombineProblem, CombineTensors, Gpu};
/// use flashcore::{DType, Shape};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let gpu = Gpu::open(0)?;
/// // Eight parts in f32, one query for each of four sequences.
/// let shape = Shape::new(4, 1, 32, 128);
/// let problem = CombineProblem::new(8, shape, DType::BF16).with_partial(DType::F32);
/// let buffer = |bytes: usize| Buffer::new(gpu.device(), bytes as u64);
/// let rows = 4 * 32;
/// let (parts, part_lse) = (buffer(8 * rows * 128 * 4)?, buffer(8 * rows * 4)?);
/// let (output, lse) = (buffer(rows * 128 * 2)?, buffer(rows * 4)?);
/// let address = |[a, b]: [&Buffer; 2]| [a.address(), b.address()];
/// let partial = address([&parts, &part_lse]);
/// let tensors = CombineTensors::stacked(&problem, partial, address([&output, &lse]))?;
/// gpu.combine(gpu.stream(), &problem, &tensors)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct CombinePlan {
    problem: CombineProblem,
    /// `None` where there are no rows.
    executable: Option<Executable>,
}

impl CombinePlan {
    fn new(gpu: &Gpu, (problem, steps): &Key) -> Result<Self, GpuError> {
        let choice = problem.choose(&gpu.chip())?;
        let executable = match choice.launches[0].blocks {
            0 => None,
            _ => Some(Executable::new(gpu, &choice, |launch, declared| {
                bind_combine(launch, declared, steps)
            })?),
        };
        Ok(CombinePlan { problem: *problem, executable })
    }

    /// Enqueues the combination on a stream of the plan's device. Neither allocates nor
    /// synchronizes.
    ///
    /// The caller is responsible for valid addresses: a fault on the device is reported by the
    /// stream when it is next waited for.
    pub fn launch(&self, stream: &Stream, tensors: &CombineTensors) -> Result<(), GpuError> {
        tensors.validate(&self.problem)?;
        match &self.executable {
            Some(executable) => executable.launch(stream, Part::All, tensors),
            None => Ok(()),
        }
    }
}

fn bind_combine(
    launch: &Launch,
    declared: &[ptx::Parameter],
    steps: &Steps,
) -> Result<Vec<Value>, String> {
    let others = |tensor: Tensor, axis: Axis| {
        let (index, step) = match tensor {
            Tensor::PartialOutput => (0, steps.output),
            Tensor::PartialLse => (1, steps.lse),
            Tensor::Output => (2, 0),
            Tensor::Lse => (3, 0),
            _ => return None,
        };
        Some(match axis {
            Axis::Part => step as u64,
            axis => axis_of(steps.strides[index], axis),
        })
    };
    let nothing = Problem::new(1, 1, 1, 2);
    bind_with(launch, declared, &nothing, &Arrangement::default(), &others)
}

impl Kept for CombinePlan {
    fn device_bytes(&self) -> u64 {
        0
    }

    fn is_captured(&self) -> bool {
        self.executable.as_ref().is_some_and(Executable::is_captured)
    }
}

impl Gpu {
    /// Enqueues a combination on a stream, with the cached plan for such calls.
    pub fn combine(
        &self,
        stream: &Stream,
        problem: &CombineProblem,
        tensors: &CombineTensors,
    ) -> Result<Arc<CombinePlan>, GpuError> {
        let key = (*problem, tensors.steps());
        let plan = self.combining.find_or_make(key, |key| CombinePlan::new(self, key))?;
        plan.launch(stream, tensors)?;
        Ok(plan)
    }
}

#[cfg(test)]
mod tests {
    use ptx::Target;

    use super::*;

    /// A million tokens of 32 heads of 128 are 2^31 threads.
    #[test]
    fn threads_have_32_bits() {
        let blocks = |tokens| {
            let problem = CombineProblem::new(2, Shape::new(1, tokens, 32, 128), DType::BF16);
            problem.choose(&Chip::H200).map(|choice| choice.launches[0].blocks)
        };
        assert_eq!(blocks(1 << 20).unwrap(), 1 << 23);
        assert!(matches!(blocks(1 << 21), Err(GpuError::TooLarge { .. })));
    }

    #[test]
    fn every_parameter_is_known() {
        for partial in DType::WIDE {
            let problem = CombineProblem::new(3, Shape::new(2, 5, 3, 64), DType::BF16);
            let choice = problem.with_partial(partial).choose(&Chip::H200).unwrap();
            let declared = choice.kernel().program().unwrap().parameters;
            let steps = Steps { strides: [Strides::default(); 4], output: -6, lse: 7 };
            bind_combine(&choice.launches[0], &declared, &steps).unwrap();
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_the_reason() {
        let good = CombineProblem::new(3, Shape::new(2, 5, 3, 64), DType::BF16);
        let refusal =
            |chip, problem: CombineProblem| problem.choose(&chip).unwrap_err().to_string();
        let prefix = "the combine kernel does not serve this problem: ";
        let with = |shape| CombineProblem { shape, ..good };
        for (problem, reason) in [
            (CombineProblem { parts: 0, ..good }, "there are no parts"),
            (with(Shape::new(2, 5, 3, 7)), "head dim 7 is not even or beyond 65536"),
        ] {
            assert_eq!(refusal(Chip::H200, problem), format!("{prefix}{reason}"));
        }
        let old = Chip::typical(Target::SM_75);
        assert_eq!(refusal(old, good), format!("{prefix}sm_75 is older than bf16"));
        let many = with(Shape::new(1 << 20, 1 << 20, 3, 64));
        assert_eq!(refusal(Chip::H200, many), "the number of rows is too large for the GPU kernel");
        let none = with(Shape::new(2, 0, 3, 64)).choose(&Chip::H200).unwrap();
        assert_eq!(none.launches[0].blocks, 0);
    }

    #[test]
    fn two_parts_may_lie_anywhere() {
        let problem = CombineProblem::new(2, Shape::new(1, 1, 1, 8), DType::F16);
        let strides = Strides { batch: 8, length: 8, heads: 8 };
        let state = |output, lse| AttentionState {
            output: DeviceTensor { address: DeviceAddress(output), strides },
            lse: DeviceTensor { address: DeviceAddress(lse), strides },
        };
        let result = state(0x9000, 0xa000);
        let pair = |second| CombineTensors::pair(&problem, [state(0x2000, 0x400), second], result);
        let tensors = pair(state(0x1000, 0x800)).unwrap();
        assert_eq!((tensors.output_step, tensors.lse_step), (-0x800, 0x100));
        let odd = pair(state(0x1001, 0x800)).unwrap_err().to_string();
        assert!(odd.contains("whole number of elements"), "{odd}");
        let mut other = state(0x1000, 0x800);
        other.lse.strides.heads = 1;
        assert!(pair(other).unwrap_err().to_string().contains("strides"));
    }
}
