//! Gradients over tensors in host memory, on a GPU: they are copied to the device and back.

use std::time::{Duration, Instant};

use super::tensors::{DeviceTensor, Gradients as DeviceGradients, Tensors};
use super::{AttentionPlan, DeviceLists, GpuBackend, GpuError, GuardedBuffer};
use crate::backend::{Report, RunOptions};
use crate::error::Error;
use crate::gradients::{Backward, Gradients};
use crate::plan::{GPU, Plan};
use crate::problem::Problem;
use crate::tensor::Tensor;

impl GpuBackend {
    /// Computes the gradients of a problem by what a plan chose.
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
        if options.guard {
            operands.look_for_trespasses(self)?;
        }
        let [query, key, value] = results;
        let report = Report {
            backend: GPU,
            kernel: plan.chosen.kernel,
            configuration: plan.chosen.configuration.clone(),
            reason: plan.chosen.reason.clone(),
            kernel_time: Duration::from_secs_f64(milliseconds / 1e3),
            first_result_time,
            total_time: begun.elapsed(),
            notes: Vec::new(),
        };
        Ok(Gradients { query, key, value, sinks: None, report })
    }
}

/// The device memory of one call.
struct Operands {
    /// Query, key, value, output, log-sum-exps and output gradient: nobody writes to them.
    given: Vec<(&'static str, GuardedBuffer, Vec<u8>)>,
    /// The gradients of query, key and value.
    results: [GuardedBuffer; 3],
    tensors: Tensors,
    /// What the tensors point to.
    _lists: Vec<cuda::Buffer>,
}

impl Operands {
    fn new(
        backend: &GpuBackend,
        problem: &Problem,
        backward: Backward<'_>,
        results: &[Tensor; 3],
    ) -> Result<Self, GpuError> {
        let (gpu, inputs) = (backend.gpu(), backward.inputs);
        let lse: Vec<u8> = backward.lse.iter().flat_map(|it| it.to_le_bytes()).collect();
        let bytes = [
            ("query", inputs.query.bytes()),
            ("key", inputs.key.bytes()),
            ("value", inputs.value.bytes()),
            ("output", backward.output.bytes()),
            ("output gradient", backward.output_gradient.bytes()),
            ("log-sum-exp", &lse[..]),
        ];
        let mut given = Vec::new();
        for (name, bytes) in bytes {
            given.push((name, GuardedBuffer::of(gpu, bytes)?, bytes.to_vec()));
        }
        let [query, key, value] = results;
        let results = [query, key, value].map(|it| GuardedBuffer::new(gpu, it.bytes().len()));
        let [query_gradient, key_gradient, value_gradient] = results;
        let results = [query_gradient?, key_gradient?, value_gradient?];
        let at = |buffer: &GuardedBuffer, like: &Tensor| DeviceTensor {
            address: buffer.address(),
            strides: like.layout().strides(),
        };
        let of = |index: usize, like| at(&given[index].1, like);
        let mut tensors = Tensors::new(
            [of(0, inputs.query), of(1, inputs.key), of(2, inputs.value), of(3, backward.output)],
            Some(given[5].1.address()),
        );
        tensors.gradients = Some(DeviceGradients {
            output: of(4, backward.output_gradient),
            query: at(&results[0], query),
            key: at(&results[1], key),
            value: at(&results[2], value),
        });
        let mut lists = DeviceLists::new(gpu);
        lists.of_call(problem, inputs, &mut tensors)?;
        let _lists = lists.into_buffers();
        Ok(Operands { given, results, tensors, _lists })
    }

    /// An error if something other than the results was written.
    fn look_for_trespasses(&self, backend: &GpuBackend) -> Result<(), GpuError> {
        let gpu = backend.gpu();
        let names = ["query gradient", "key gradient", "value gradient"];
        for (name, buffer) in names.into_iter().zip(&self.results) {
            buffer.look_for_trespasses(gpu, name)?;
        }
        for (name, buffer, bytes) in &self.given {
            buffer.look_for_trespasses(gpu, name)?;
            let mut found = vec![0u8; bytes.len()];
            buffer.read(gpu, &mut found)?;
            if found != *bytes {
                return Err(GpuError::Trespass { place: format!("to the {name}") });
            }
        }
        Ok(())
    }
}
