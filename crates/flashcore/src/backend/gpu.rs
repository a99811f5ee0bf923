//! The GPU back end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda::{Arguments, Buffer};
use kernels::Scalar;
use ptx::Element;

use super::{Backend, BackendError, Candidate, Output, Report, RunOptions};
use crate::dtype::DType;
use crate::error::Error;
use crate::gpu::{Gpu, GpuError};
use crate::inputs::Inputs;
use crate::problem::{Mask, Problem};
use crate::tensor::{Layout, Tensor};

/// Attention on an NVIDIA GPU.
#[derive(Debug)]
pub struct GpuBackend {
    gpu: Arc<Gpu>,
}

/// The name of the kernel that serves every problem.
const SCALAR: &str = "scalar";

/// Runs shorter than this are timed again, and the median is reported.
const SHORT: Duration = Duration::from_millis(50);

impl GpuBackend {
    /// The back end on a GPU.
    pub fn new(gpu: Arc<Gpu>) -> Self {
        GpuBackend { gpu }
    }

    fn scalar(&self, problem: &Problem) -> Scalar {
        Scalar {
            target: self.gpu.target(),
            element: element(problem.dtype),
            head_dim: problem.head_dim as u32,
            value_head_dim: problem.value_head_dim as u32,
            causal: problem.mask == Mask::Causal,
        }
    }

    fn attend(&self, problem: &Problem, inputs: Inputs<'_>) -> Result<Output, Error> {
        let begun = Instant::now();
        let layout = Layout::contiguous(problem.output_shape())?;
        let mut output = Tensor::filled(problem.dtype, layout, 0.0)?;
        let mut lse = Vec::new();
        lse.try_reserve_exact(problem.rows()).map_err(|_| BackendError::OutOfMemory)?;
        lse.resize(problem.rows(), f32::NEG_INFINITY);

        let configuration = self.scalar(problem);
        let kernel = self.gpu.kernel(&configuration.name(), || configuration.program())?;
        let mut notes = kernel.compilation().warnings.clone();
        let mut milliseconds = 0.0;
        if problem.rows() > 0 {
            let [query, key, value] = [inputs.query, inputs.key, inputs.value]
                .map(|tensor| self.gpu.upload(tensor.bytes()));
            let device = Operands {
                query: query?,
                key: key?,
                value: value?,
                output: self.gpu.room(output.bytes().len())?,
                lse: self.gpu.room(4 * lse.len())?,
            };
            let arguments = scalar_arguments(problem, inputs, &output, &device);
            let blocks = scalar_blocks(problem)?;
            let stream = self.gpu.stream();
            let run = || self.gpu.time(|| Ok(kernel.launch(stream, blocks, &arguments)?));
            milliseconds = run()?;
            if milliseconds < SHORT.as_secs_f64() * 1e3 {
                let mut times: Vec<f64> = (0..5).map(|_| run()).collect::<Result<_, _>>()?;
                times.sort_by(f64::total_cmp);
                milliseconds = times[times.len() / 2];
                notes.push(format!("kernel time is the median of {} runs", times.len()));
            }
            let bytes = output.bytes().len() as u64;
            stream.download(device.output.slice(0..bytes)?, output.bytes_mut())?;
            stream.download(device.lse.slice(0..4 * lse.len() as u64)?, &mut lse)?;
        }
        let compilation = kernel.compilation();
        notes.push(format!(
            "{} in {:.0} ms",
            if compilation.cached { "taken from the cache" } else { "compiled" },
            compilation.milliseconds
        ));
        let report = Report {
            backend: self.name(),
            kernel: SCALAR.to_owned(),
            reason: String::new(),
            kernel_time: Duration::from_secs_f64(milliseconds / 1e3),
            total_time: begun.elapsed(),
            notes,
        };
        Ok(Output { output, lse, report })
    }
}

impl Backend for GpuBackend {
    fn name(&self) -> &'static str {
        "gpu"
    }

    fn describe(&self) -> String {
        let info = self.gpu.info();
        let (name, count) = (&info.name, info.multiprocessors);
        format!("{name}, compute capability {}, {count} multiprocessors", info.compute_capability)
    }

    fn candidates(&self, problem: &Problem) -> Vec<Candidate> {
        let (accepted, reason) = match scalar_blocks(problem) {
            Ok(_) => (true, "serves every head dim, length, mask and type".to_owned()),
            Err(error) => (false, error.to_string()),
        };
        vec![Candidate { backend: self.name(), kernel: SCALAR.to_owned(), accepted, reason }]
    }

    fn run(
        &self,
        problem: &Problem,
        inputs: Inputs<'_>,
        _options: &RunOptions<'_>,
    ) -> Result<Output, Error> {
        problem.validate()?;
        inputs.validate(problem)?;
        self.attend(problem, inputs)
    }
}

/// The device memory of one call.
struct Operands {
    query: Buffer,
    key: Buffer,
    value: Buffer,
    output: Buffer,
    lse: Buffer,
}

/// The arguments in the order of [`Scalar::program`].
fn scalar_arguments(
    problem: &Problem,
    inputs: Inputs<'_>,
    output: &Tensor,
    device: &Operands,
) -> Arguments {
    let mut arguments = Arguments::new();
    for buffer in [&device.query, &device.key, &device.value, &device.output, &device.lse] {
        arguments.push(buffer.address());
    }
    for tensor in [inputs.query, inputs.key, inputs.value, output] {
        let strides = tensor.layout().strides();
        for stride in [strides.batch, strides.length, strides.heads] {
            arguments.push(stride as u64);
        }
    }
    for size in [
        problem.query_length,
        problem.key_length,
        problem.query_heads,
        problem.group_size(),
        problem.batch,
    ] {
        arguments.push(size as u32);
    }
    arguments.push(problem.scale() * std::f32::consts::LOG2_E);
    arguments
}

/// How many blocks to launch, or that the kernel's counters cannot count so far.
fn scalar_blocks(problem: &Problem) -> Result<u32, GpuError> {
    let counts = [problem.query_length, problem.key_length, problem.query_heads, problem.batch];
    let [queries, keys, heads, batch] = counts.map(u32::try_from);
    let (Ok(queries), Ok(keys), Ok(heads), Ok(batch)) = (queries, keys, heads, batch) else {
        return Err(GpuError::TooLarge { what: "a length, head count or batch" });
    };
    // Positions are compared as signed numbers.
    if queries.checked_add(keys).is_none_or(|sum| sum > i32::MAX as u32) {
        return Err(GpuError::TooLarge { what: "the lengths" });
    }
    let blocks = Scalar::blocks(queries, heads, batch);
    let Ok(blocks) = u32::try_from(blocks) else {
        return Err(GpuError::TooLarge { what: "the number of rows" });
    };
    // Further blocks are taken in turn; a margin keeps the loop's counter from wrapping.
    let largest = 1 << 24;
    if blocks > u32::MAX - largest {
        return Err(GpuError::TooLarge { what: "the number of rows" });
    }
    Ok(blocks.min(largest))
}

fn element(dtype: DType) -> Element {
    match dtype {
        DType::F32 => Element::F32,
        DType::F16 => Element::F16,
        DType::BF16 => Element::BF16,
    }
}
