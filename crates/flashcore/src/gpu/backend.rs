//! Attention over tensors in host memory, on a GPU: the tensors are copied to the device, and the
//! results back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda::Buffer;
use kernels::Configuration;

use super::tensors::{DeviceTensor, Tensors};
use super::{AttentionPlan, Compilation, DeviceLists, Gpu, GpuError, GuardedBuffer};
use crate::backend::{Backend, Output, Report, RunOptions, unseen};
use crate::error::Error;
use crate::family::teams;
use crate::gradients::{Backward, Gradients};
use crate::inputs::Inputs;
use crate::plan::{Arrangement, Candidate, GPU, Plan, candidates};
use crate::problem::Problem;
use crate::tensor::Tensor;

/// The back end on an NVIDIA GPU.
#[derive(Debug)]
pub struct GpuBackend {
    gpu: Arc<Gpu>,
}

/// Runs shorter than this are repeated, and the median time is reported.
const SHORT: Duration = Duration::from_millis(50);

impl GpuBackend {
    /// Creates the back end of a GPU.
    pub fn new(gpu: Arc<Gpu>) -> Self {
        GpuBackend { gpu }
    }

    /// Returns the GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Returns the milliseconds of a launch: the median of several if the first was short. Where a
    /// compact form gave the first result, the time is that of the full form.
    fn time(
        &self,
        plan: &AttentionPlan,
        tensors: &Tensors,
        mut first: f64,
        notes: &mut Vec<String>,
    ) -> Result<f64, GpuError> {
        let run = || self.gpu.time(|| plan.launch(self.gpu.stream(), tensors));
        if plan.compilation().compact {
            notes.push(
                "the first result is of the compact form, which compiles faster; the time is the \
                 full form's"
                    .to_owned(),
            );
            self.gpu.finish_compiling();
            first = run()?;
        }
        if first >= SHORT.as_secs_f64() * 1e3 {
            return Ok(first);
        }
        let mut times: Vec<f64> = (0..5).map(|_| run()).collect::<Result<_, _>>()?;
        times.sort_by(f64::total_cmp);
        notes.push(format!("kernel time is the median of {} runs", times.len()));
        Ok(times[times.len() / 2])
    }
}

impl Backend for GpuBackend {
    fn name(&self) -> &'static str {
        GPU
    }

    fn describe(&self) -> String {
        let info = self.gpu.info();
        let (name, count) = (&info.name, info.multiprocessors);
        format!("{name}, compute capability {}, {count} multiprocessors", info.compute_capability)
    }

    fn candidates(&self, problem: &Problem, arrangement: &Arrangement) -> Vec<Candidate> {
        candidates(&self.gpu.chip(), problem, arrangement)
    }

    fn execute_backward(
        &self,
        plan: &Plan,
        backward: Backward<'_>,
        options: &RunOptions<'_>,
    ) -> Result<Gradients, Error> {
        self.differentiate(plan, backward, options)
    }

    /// Rows that belong to no sequence are not written.
    fn execute(
        &self,
        plan: &Plan,
        inputs: Inputs<'_>,
        options: &RunOptions<'_>,
    ) -> Result<Output, Error> {
        let begun = Instant::now();
        let problem = &plan.problem;
        let (mut output, mut lse) = unseen(problem)?;

        let mut notes = Vec::new();
        let mut milliseconds = 0.0;
        let mut first_result_time = Duration::ZERO;
        if !lse.is_empty() {
            let gpu = &self.gpu;
            let operands = Operands::new(gpu, problem, inputs, &output, 4 * lse.len())?;
            let plan = with_splits(gpu, plan.clone(), options.splits)?;
            let plan = AttentionPlan::of(gpu, plan, inputs.arrangement(problem)?)?;
            let tensors = &operands.tensors;
            if options.guard {
                // Check the form of the kernel that later launches use.
                gpu.finish_compiling();
                plan.launch(gpu.stream(), tensors)?;
            } else {
                let first = gpu.time(|| plan.launch(gpu.stream(), tensors))?;
                first_result_time = begun.elapsed();
                milliseconds = self.time(&plan, tensors, first, &mut notes)?;
            }
            operands.output.read(gpu, output.bytes_mut())?;
            operands.lse.read(gpu, &mut lse)?;
            if options.guard {
                operands.look_for_trespasses(gpu, inputs)?;
            }
            describe(plan.compilation(), &mut notes);
        }
        let kernel_time = Duration::from_secs_f64(milliseconds / 1e3);
        let report = Report::of(plan, begun, kernel_time, first_result_time, notes);
        Ok(Output { output, lse, report })
    }
}

/// Returns an error if an uploaded input has been written to.
pub(super) fn look_for_changes(
    gpu: &Gpu,
    name: &str,
    buffer: &Buffer,
    bytes: &[u8],
) -> Result<(), GpuError> {
    let found = buffer.slice(0..bytes.len() as u64)?;
    match gpu.stream().download_vec::<u8>(found)? == bytes {
        true => Ok(()),
        false => Err(GpuError::Trespass { place: format!("to the {name}") }),
    }
}

/// Returns the plan with the keys of `decode` cut into a given number of parts.
fn with_splits(gpu: &Gpu, mut plan: Plan, splits: Option<u32>) -> Result<Plan, GpuError> {
    if let (Some(splits), Some(choice)) = (splits, &plan.chosen.choice)
        && let Configuration::Decode(decode) = *choice.kernel()
    {
        let reason = choice.reason.clone();
        let split = teams(&gpu.chip(), &plan.problem, decode, Some(splits), reason);
        plan.chosen.choice = Some(split.map_err(GpuError::Binding)?);
    }
    Ok(plan)
}

/// The device memory of one call.
struct Operands {
    query: Buffer,
    key: Buffer,
    value: Buffer,
    output: GuardedBuffer,
    lse: GuardedBuffer,
    tensors: Tensors,
    /// Owns the lists that `tensors` points to.
    _lists: Vec<Buffer>,
}

impl Operands {
    fn new(
        gpu: &Gpu,
        problem: &Problem,
        inputs: Inputs<'_>,
        result: &Tensor,
        lse_bytes: usize,
    ) -> Result<Self, GpuError> {
        let query = gpu.upload(inputs.query.bytes())?;
        let key = gpu.upload(inputs.key.bytes())?;
        let value = gpu.upload(inputs.value.bytes())?;
        let output = GuardedBuffer::new(gpu, result.bytes().len())?;
        let lse = GuardedBuffer::new(gpu, lse_bytes)?;
        let mut tensors = Tensors::new(
            [
                DeviceTensor::like(query.address(), inputs.query),
                DeviceTensor::like(key.address(), inputs.key),
                DeviceTensor::like(value.address(), inputs.value),
                DeviceTensor::like(output.address(), result.view()),
            ],
            Some(lse.address()),
        );
        let mut lists = DeviceLists::new(gpu);
        lists.of_call(problem, inputs, &mut tensors)?;
        let _lists = lists.into_buffers();
        Ok(Operands { query, key, value, output, lse, tensors, _lists })
    }

    /// Returns an error if anything other than the results was written.
    fn look_for_trespasses(&self, gpu: &Gpu, inputs: Inputs<'_>) -> Result<(), GpuError> {
        for (name, buffer) in [("output", &self.output), ("log-sum-exp", &self.lse)] {
            buffer.look_for_trespasses(gpu, name)?;
        }
        for (name, buffer, tensor) in [
            ("query", &self.query, inputs.query),
            ("key", &self.key, inputs.key),
            ("value", &self.value, inputs.value),
        ] {
            look_for_changes(gpu, name, buffer, tensor.bytes())?;
        }
        Ok(())
    }
}

fn describe(compilation: &Compilation, notes: &mut Vec<String>) {
    notes.extend(compilation.warnings.iter().cloned());
    notes.push(format!(
        "{} in {:.0} ms",
        if compilation.cached { "taken from the cache" } else { "compiled" },
        compilation.milliseconds
    ));
}
