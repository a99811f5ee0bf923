//! Gradients over tensors in host memory, on a GPU: the tensors are copied to the device, and the
//! gradients back.

use std::time::{Duration, Instant};

use cuda::Buffer;

use super::backend::look_for_changes;
use super::tensors::{DeviceTensor, Gradients as DeviceGradients, Tensors};
use super::{AttentionPlan, DeviceLists, GpuBackend, GpuError, GuardedBuffer};
use crate::backend::{Report, RunOptions};
use crate::error::Error;
use crate::gradients::{Backward, Gradients};
use crate::plan::Plan;
use crate::problem::Problem;
use crate::tensor::Tensor;

impl GpuBackend {
    /// Computes the gradients of a problem with the kernel that a plan chose.
    pub(super) fn differentiate(
        &self,
        plan: &Plan,
        backward: Backward<'_>,
        options: &RunOptions<'_>,
    ) -> Result<Gradients, Error> {
        let begun = Instant::now();
        let problem = &plan.problem;
        let mut results = [
            Tensor::zeros(problem.dtypes.query, problem.query_shape())?,
            Tensor::zeros(problem.dtypes.key, problem.key_shape())?,
            Tensor::zeros(problem.dtypes.value, problem.value_shape())?,
        ];
        let gpu = self.gpu();
        let operands = Operands::new(self, problem, backward, &results)?;
        let executable = AttentionPlan::of(gpu, plan.clone(), backward.arrangement(problem)?)?;
        let launch = || executable.launch(gpu.stream(), &operands.tensors);
        let milliseconds = gpu.time(launch)?;
        let first_result_time = begun.elapsed();
        for (result, buffer) in results.iter_mut().zip(&operands.results) {
            buffer.read(gpu, result.bytes_mut())?;
        }
        let mut sinks = problem.scores.sinks.then(|| vec![0f32; problem.query_heads]);
        if let (Some(sinks), Some(buffer)) = (&mut sinks, &operands.sinks) {
            buffer.read(gpu, sinks)?;
        }
        if options.guard {
            operands.look_for_trespasses(self, backward)?;
        }
        let [query, key, value] = results;
        let kernel_time = Duration::from_secs_f64(milliseconds / 1e3);
        let report = Report::of(plan, begun, kernel_time, first_result_time, Vec::new());
        Ok(Gradients { query, key, value, sinks, report })
    }
}

/// The device memory of one call.
struct Operands {
    /// The inputs, in the order of [`given`]. Kernels only read them.
    given: Vec<Buffer>,
    /// The gradients of query, key and value.
    results: [GuardedBuffer; 3],
    /// The gradients of the sinks, where there are any.
    sinks: Option<GuardedBuffer>,
    tensors: Tensors,
    /// Owns the lists that `tensors` points to.
    _lists: Vec<Buffer>,
}

/// Returns the inputs of a backward pass, with their names.
fn given(backward: Backward<'_>) -> impl Iterator<Item = (&'static str, &[u8])> {
    let Backward { inputs, output, lse, output_gradient, lse_gradient } = backward;
    let always = [
        ("query", inputs.query.bytes()),
        ("key", inputs.key.bytes()),
        ("value", inputs.value.bytes()),
        ("output", output.bytes()),
        ("output gradient", output_gradient.bytes()),
        ("log-sum-exp", bytemuck::cast_slice(lse)),
    ];
    let lse_gradient = lse_gradient.map(bytemuck::cast_slice);
    always.into_iter().chain(lse_gradient.map(|bytes| ("gradient of the log-sum-exps", bytes)))
}

impl Operands {
    fn new(
        backend: &GpuBackend,
        problem: &Problem,
        backward: Backward<'_>,
        results: &[Tensor; 3],
    ) -> Result<Self, GpuError> {
        let (gpu, inputs) = (backend.gpu(), backward.inputs);
        let given = given(backward).map(|(_, bytes)| gpu.upload(bytes));
        let given = given.collect::<Result<Vec<_>, _>>()?;
        let [query, key, value] = results;
        // Kernels do not write the rows of a ragged batch that belong to no sequence: they start as
        // zeros.
        let results = [query, key, value].map(|it| match problem.has_equal_lengths() {
            true => GuardedBuffer::new(gpu, it.bytes().len()),
            false => GuardedBuffer::of(gpu, it.bytes()),
        });
        let [query_gradient, key_gradient, value_gradient] = results;
        let results = [query_gradient?, key_gradient?, value_gradient?];
        let sinks = problem.scores.sinks.then(|| GuardedBuffer::new(gpu, 4 * problem.query_heads));
        let sinks = sinks.transpose()?;
        let of = |index: usize, like| DeviceTensor::like(given[index].address(), like);
        let mut tensors = Tensors::new(
            [of(0, inputs.query), of(1, inputs.key), of(2, inputs.value), of(3, backward.output)],
            Some(given[5].address()),
        );
        tensors.gradients = Some(DeviceGradients {
            output: of(4, backward.output_gradient),
            query: DeviceTensor::like(results[0].address(), query.view()),
            key: DeviceTensor::like(results[1].address(), key.view()),
            value: DeviceTensor::like(results[2].address(), value.view()),
            sinks: sinks.as_ref().map(GuardedBuffer::address),
            lse: given.get(6).map(Buffer::address),
        });
        let mut lists = DeviceLists::new(gpu);
        lists.of_call(problem, inputs, &mut tensors)?;
        let _lists = lists.into_buffers();
        Ok(Operands { given, results, sinks, tensors, _lists })
    }

    /// Returns an error if anything other than the results was written.
    fn look_for_trespasses(
        &self,
        backend: &GpuBackend,
        backward: Backward<'_>,
    ) -> Result<(), GpuError> {
        let gpu = backend.gpu();
        let names = ["query gradient", "key gradient", "value gradient", "gradient of the sinks"];
        for (name, buffer) in names.into_iter().zip(self.results.iter().chain(&self.sinks)) {
            buffer.look_for_trespasses(gpu, name)?;
        }
        for ((name, bytes), buffer) in given(backward).zip(&self.given) {
            look_for_changes(gpu, name, buffer, bytes)?;
        }
        Ok(())
    }
}
