//! The GPU back end. Each kernel has a file that says whether it serves a problem; how it is
//! launched is in [`crate::gpu`].

pub(crate) mod decode;
pub(crate) mod forward;
pub(crate) mod mma;
pub(crate) mod prefill;
pub(crate) mod scalar;
mod sequences;

use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda::{Buffer, Stream};
use kernels::Shipped;

use super::{Backend, BackendError, Candidate, Output, Report, RunOptions};
use crate::error::Error;
use crate::gpu::mma::Sums;
use crate::gpu::{
    Chip, Compilation, DeviceKernel, DeviceTensor, ForwardTensors, Gpu, GpuError, Room,
};
use crate::inputs::{InputLayouts, Inputs};
use crate::plan::{Plan, Preference};
use crate::problem::Problem;
use crate::serving::Sequences;
use crate::tensor::{Layout, Shape, Tensor};

/// Attention on an NVIDIA GPU.
#[derive(Debug)]
pub struct GpuBackend {
    gpu: Arc<Gpu>,
}

/// The back end's name.
pub(crate) const NAME: &str = "gpu";

/// Runs shorter than this are timed again, and the median is reported.
const SHORT: Duration = Duration::from_millis(50);

/// Every kernel for a GPU, best first, each accepted or refused with a reason. The GPU need not be
/// there.
///
/// ```
/// use flashcore::backend::gpu;
/// use flashcore::gpu::Chip;
/// use flashcore::{DType, InputLayouts, Problem};
///
/// let problem = Problem::new(1, 8, 512, 64).with_dtype(DType::F32);
/// let layouts = InputLayouts::contiguous(&problem)?;
/// for candidate in gpu::candidates(&Chip::H200, &problem, &layouts) {
///     println!("{}: {}", candidate.full_name(), candidate.reason);
/// }
/// # Ok::<(), flashcore::Error>(())
/// ```
pub fn candidates(chip: &Chip, problem: &Problem, layouts: &InputLayouts) -> Vec<Candidate> {
    let mut all = vec![
        forward::candidate(chip, problem, layouts),
        prefill::candidate(chip, problem, layouts),
        mma::candidate(chip, problem, layouts, Sums::F32),
        scalar::candidate(chip, problem),
        mma::candidate(chip, problem, layouts, Sums::F16),
    ];
    // Before all that read keys once for every tile of queries, or after those that do it well.
    let place = if decode::comes_first(problem) { 0 } else { 3 };
    all.insert(place, decode::candidate(chip, problem, layouts));
    all
}

/// What a kernel of this name would be built as for a problem that it serves.
pub fn configuration(chip: &Chip, problem: &Problem, kernel: &str) -> Option<Shipped> {
    configurations(chip, problem, kernel).into_iter().next()
}

/// The same with what is launched after it.
pub fn configurations(chip: &Chip, problem: &Problem, kernel: &str) -> Vec<Shipped> {
    let mma = |sums| match mma::configurations(chip, problem, sums) {
        Some((mma, combine)) => {
            let combine = combine.map(Shipped::Combine);
            [Shipped::Mma(mma)].into_iter().chain(combine).collect()
        }
        None => Vec::new(),
    };
    match kernel {
        forward::NAME => {
            forward::configuration(chip, problem).map(Shipped::Forward).into_iter().collect()
        }
        decode::NAME => {
            decode::configuration(chip, problem).map(Shipped::Decode).into_iter().collect()
        }
        prefill::NAME => {
            let both = prefill::configurations(chip, problem);
            both.map(|(first, kernel)| vec![Shipped::Prefill(kernel), Shipped::Sequencer(first)])
                .unwrap_or_default()
        }
        mma::NAME => mma(Sums::F32),
        mma::HALF_NAME => mma(Sums::F16),
        scalar::NAME => {
            let target = chip.target;
            vec![Shipped::Scalar(crate::gpu::scalar::configuration(target, problem))]
        }
        _ => Vec::new(),
    }
}

/// A kernel with its configuration and the reason for it, or the reason why it cannot serve.
fn candidate(kernel: &str, served: Result<(String, String), String>) -> Candidate {
    let accepted = served.is_ok();
    let (configuration, reason) = match served {
        Ok((configuration, reason)) => (Some(configuration), reason),
        Err(reason) => (None, reason),
    };
    let kernel = kernel.to_owned();
    Candidate { backend: NAME, kernel, accepted, on_request: false, configuration, reason }
}

impl GpuBackend {
    /// The back end on a GPU.
    pub fn new(gpu: Arc<Gpu>) -> Self {
        GpuBackend { gpu }
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Runs what `prepare` makes of the device memory of the call.
    fn attend(
        &self,
        shape: Shape,
        inputs: Inputs<'_>,
        chosen: Candidate,
        guard: bool,
        prepare: impl FnOnce(&Operands, &Tensor) -> Result<Box<dyn Launch>, Error>,
    ) -> Result<Output, Error> {
        let begun = Instant::now();
        let mut output = Tensor::filled(inputs.query.dtype(), Layout::contiguous(shape)?, 0.0)?;
        let rows = shape.batch * shape.heads * shape.length;
        let mut lse = Vec::new();
        lse.try_reserve_exact(rows).map_err(|_| BackendError::OutOfMemory)?;
        lse.resize(rows, f32::NEG_INFINITY);

        let mut notes = Vec::new();
        let mut milliseconds = 0.0;
        let mut first_result_time = Duration::ZERO;
        if rows > 0 {
            let operands = Operands::new(&self.gpu, inputs, &output, 4 * lse.len())?;
            let mut kernel = prepare(&operands, &output)?;
            if guard {
                // What is checked is what will run in the end.
                self.gpu.finish_compiling();
                kernel.launch(self.gpu.stream())?;
            } else {
                let first = self.gpu.time(|| kernel.launch(self.gpu.stream()))?;
                first_result_time = begun.elapsed();
                milliseconds = self.time(kernel.as_mut(), first, &mut notes)?;
            }
            operands.output.read(&self.gpu, output.bytes_mut())?;
            operands.lse.read(&self.gpu, &mut lse)?;
            if guard {
                operands.look_for_trespasses(&self.gpu, inputs)?;
            }
            describe(kernel.compilation(), &mut notes);
        }
        let report = Report {
            backend: NAME,
            kernel: chosen.kernel,
            configuration: chosen.configuration,
            reason: chosen.reason,
            kernel_time: Duration::from_secs_f64(milliseconds / 1e3),
            first_result_time,
            total_time: begun.elapsed(),
            notes,
        };
        Ok(Output { output, lse, report })
    }

    /// Prepares a kernel over sequences.
    fn prepare(
        &self,
        name: &str,
        sequences: &Sequences,
        inputs: Inputs<'_>,
        operands: &Operands,
        options: &RunOptions<'_>,
    ) -> Result<Box<dyn Launch>, Error> {
        let placed = sequences::place(&self.gpu, sequences, inputs, operands)?;
        Ok(match name {
            prefill::NAME => Box::new(prefill::prepare(&self.gpu, placed)?),
            _ => Box::new(decode::prepare(&self.gpu, placed, options.splits)?),
        })
    }

    /// Milliseconds of a launch, the median of several if the first was short. Where a compact
    /// form gave the first result, the time is the full form's.
    fn time(
        &self,
        kernel: &mut dyn Launch,
        mut first: f64,
        notes: &mut Vec<String>,
    ) -> Result<f64, GpuError> {
        let compact = kernel.compilation().compact;
        let mut run = || self.gpu.time(|| kernel.launch(self.gpu.stream()));
        if compact {
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
        NAME
    }

    fn describe(&self) -> String {
        let info = self.gpu.info();
        let (name, count) = (&info.name, info.multiprocessors);
        format!("{name}, compute capability {}, {count} multiprocessors", info.compute_capability)
    }

    fn candidates(&self, problem: &Problem, layouts: &InputLayouts) -> Vec<Candidate> {
        candidates(&self.gpu.chip(), problem, layouts)
    }

    fn run(
        &self,
        problem: &Problem,
        inputs: Inputs<'_>,
        options: &RunOptions<'_>,
    ) -> Result<Output, Error> {
        problem.validate()?;
        inputs.validate(problem)?;
        let candidates = vec![(NAME, self.candidates(problem, &inputs.layouts()))];
        let preference = Preference { backend: None, kernel: options.kernel.clone() };
        let plan = Plan::choose(problem, candidates, &[], &preference)?;
        let (gpu, name) = (&self.gpu, plan.chosen.kernel.clone());
        self.attend(
            problem.output_shape(),
            inputs,
            plan.chosen,
            options.guard,
            |operands, output| {
                if [decode::NAME, prefill::NAME].contains(&name.as_str()) {
                    let sequences = Sequences::plain(problem);
                    return self.prepare(&name, &sequences, inputs, operands, options);
                }
                let kernel = DeviceKernel::new(gpu, problem, &name)?;
                Ok(Box::new(Prepared { kernel, tensors: operands.tensors(inputs, output) }))
            },
        )
    }

    fn candidates_of_sequences(
        &self,
        sequences: &Sequences,
        layouts: &InputLayouts,
    ) -> Vec<Candidate> {
        let chip = self.gpu.chip();
        let mut both = vec![
            prefill::candidate_of_sequences(&chip, sequences, layouts),
            decode::candidate_of_sequences(&chip, sequences, layouts),
        ];
        if !prefill::comes_first(sequences) {
            both.reverse();
        }
        both
    }

    /// Rows that belong to no sequence are not written.
    fn run_sequences(
        &self,
        sequences: &Sequences,
        inputs: Inputs<'_>,
        options: &RunOptions<'_>,
    ) -> Result<Output, Error> {
        sequences.validate_inputs(inputs)?;
        let candidates = self.candidates_of_sequences(sequences, &inputs.layouts());
        let preference = Preference { backend: None, kernel: options.kernel.clone() };
        let plan = Plan::choose(sequences.problem(), vec![(NAME, candidates)], &[], &preference)?;
        let shape = sequences.output_shape(inputs.query.shape());
        let name = plan.chosen.kernel.clone();
        self.attend(shape, inputs, plan.chosen, options.guard, |operands, _| {
            self.prepare(&name, sequences, inputs, operands, options)
        })
    }
}

/// A kernel with its arguments.
trait Launch {
    fn launch(&mut self, stream: &Stream) -> Result<(), GpuError>;
    fn compilation(&self) -> &Compilation;
}

/// A kernel for plain problems, with its tensors.
struct Prepared {
    kernel: DeviceKernel,
    tensors: ForwardTensors,
}

impl Launch for Prepared {
    fn launch(&mut self, stream: &Stream) -> Result<(), GpuError> {
        self.kernel.launch(stream, &self.tensors)
    }

    fn compilation(&self) -> &Compilation {
        self.kernel.compilation()
    }
}

/// The device memory of one call.
struct Operands {
    query: Buffer,
    key: Buffer,
    value: Buffer,
    output: Room,
    lse: Room,
}

impl Operands {
    fn new(
        gpu: &Gpu,
        inputs: Inputs<'_>,
        output: &Tensor,
        lse_bytes: usize,
    ) -> Result<Self, GpuError> {
        Ok(Operands {
            query: gpu.upload(inputs.query.bytes())?,
            key: gpu.upload(inputs.key.bytes())?,
            value: gpu.upload(inputs.value.bytes())?,
            output: Room::new(gpu, output.bytes().len())?,
            lse: Room::new(gpu, lse_bytes)?,
        })
    }

    /// Where everything is and how it lies there.
    fn tensors(&self, inputs: Inputs<'_>, output: &Tensor) -> ForwardTensors {
        let tensor =
            |address, of: &Tensor| DeviceTensor { address, strides: of.layout().strides() };
        ForwardTensors {
            query: tensor(self.query.address(), inputs.query),
            key: tensor(self.key.address(), inputs.key),
            value: tensor(self.value.address(), inputs.value),
            output: tensor(self.output.address(), output),
            lse: self.lse.address(),
        }
    }

    /// An error if something other than the results was written.
    fn look_for_trespasses(&self, gpu: &Gpu, inputs: Inputs<'_>) -> Result<(), GpuError> {
        let trespass = |place: String| Err(GpuError::Trespass { place });
        for (name, room) in [("output", &self.output), ("log-sum-exp", &self.lse)] {
            if !room.is_intact(gpu)? {
                return trespass(format!("beside the {name}"));
            }
        }
        for (name, buffer, tensor) in [
            ("query", &self.query, inputs.query),
            ("key", &self.key, inputs.key),
            ("value", &self.value, inputs.value),
        ] {
            let bytes = tensor.bytes();
            let found = buffer.slice(0..bytes.len() as u64)?;
            if gpu.stream().download_vec::<u8>(found)? != bytes {
                return trespass(format!("to the {name}"));
            }
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

#[cfg(test)]
mod tests {
    use ptx::Target;

    use super::*;
    use crate::dtype::DType;
    use crate::problem::Mask;
    use crate::tensor::Strides;

    fn plan(chip: &Chip, problem: &Problem, kernel: Option<&str>) -> Result<Plan, Error> {
        let preference = Preference { backend: None, kernel: kernel.map(str::to_owned) };
        Plan::on_chip(chip, problem, &preference)
    }

    #[test]
    fn hopper_runs_the_forward_kernel_and_says_which() {
        let problem =
            Problem::new(1, 16, 4096, 128).with_dtype(DType::BF16).with_mask(Mask::Causal);
        let plan = plan(&Chip::H200, &problem, None).unwrap();
        assert_eq!(plan.chosen.full_name(), "gpu/forward");
        let configuration = plan.chosen.configuration.as_deref().unwrap();
        assert!(configuration.starts_with("forward_bf16_d128x128_causal_"), "{configuration}");
        assert!(plan.chosen.reason.contains("tiles"), "{}", plan.chosen.reason);
        let names: Vec<String> = plan.candidates.iter().map(Candidate::full_name).collect();
        let gpu = ["forward", "prefill", "mma", "decode", "scalar", "mma-half"];
        assert_eq!(names[..6], gpu.map(|kernel| format!("gpu/{kernel}")));
        assert_eq!(names[6..], ["cpu/blocked"]);
    }

    #[test]
    fn what_the_forward_kernel_refuses_goes_to_the_next_with_the_reason() {
        let ampere = Chip::typical(Target::SM_80);
        for (kernel, chip, problem, reason) in [
            ("gpu/mma", ampere, Problem::new(1, 2, 64, 64), "sm_80 has no wgmma"),
            (
                "gpu/scalar",
                Chip::H200,
                Problem::new(1, 2, 64, 20),
                "head dim 20 is not a multiple of 8 up to 256",
            ),
            (
                "gpu/scalar",
                Chip::H200,
                Problem::new(1, 2, 64, 64).with_dtype(DType::F32),
                "the tensor cores take f16 and bf16, not f32",
            ),
            (
                "gpu/prefill",
                Chip::H200,
                Problem::new(1, 2, 64, 64).with_key_length(0),
                "there are no keys",
            ),
        ] {
            let plan = plan(&chip, &problem, None).unwrap();
            assert_eq!(plan.chosen.full_name(), kernel);
            assert_eq!(plan.candidates[0].reason, reason);
            assert!(plan.reason().contains(&format!("not gpu/forward: {reason}")));
        }
    }

    #[test]
    fn few_queries_go_to_decode_and_unusual_scores_to_prefill_or_decode() {
        let few = Problem::new(4, 32, 1, 128).with_kv_heads(8).with_key_length(4096);
        let chosen = plan(&Chip::H200, &few, None).unwrap().chosen;
        assert_eq!(chosen.full_name(), "gpu/decode");
        assert!(chosen.reason.contains("tiles of 16 keys"), "{}", chosen.reason);
        let window =
            Problem::new(1, 4, 300, 64).with_mask(Mask::window(Some(40), Some(0))).with_sinks();
        let chosen = |chip: &Chip| plan(chip, &window, None).unwrap().chosen.full_name();
        assert_eq!(chosen(&Chip::H200), "gpu/prefill");
        assert_eq!(chosen(&Chip::typical(Target::SM_80)), "gpu/decode");
    }

    #[test]
    fn a_kernel_that_cannot_serve_is_refused_with_those_that_can() {
        let odd = Problem::new(1, 2, 64, 20);
        assert_eq!(
            plan(&Chip::H200, &odd, Some("forward")).unwrap_err().to_string(),
            "gpu/forward cannot serve this problem: head dim 20 is not a multiple of 8 up to 256; \
             gpu/scalar, cpu/blocked can"
        );
        let even = Problem::new(1, 2, 64, 64);
        for kernel in ["forward", "mma", "mma-half", "scalar"] {
            assert_eq!(plan(&Chip::H200, &even, Some(kernel)).unwrap().chosen.kernel, kernel);
        }
        assert_eq!(
            plan(&Chip::typical(Target::SM_89), &even, Some("forward")).unwrap_err().to_string(),
            "gpu/forward cannot serve this problem: sm_89 has no wgmma; gpu/mma, gpu/decode, \
             gpu/scalar, gpu/mma-half, cpu/blocked can"
        );
    }

    /// Even where it is all there is: sums in f16 are for those who ask for them.
    #[test]
    fn sums_in_f16_are_never_chosen_unless_asked_for() {
        for target in [Target::SM_80, Target::SM_86, Target::SM_89, Target::SM_90A, Target::SM_120]
        {
            let problem = Problem::new(1, 2, 64, 64);
            let chosen = plan(&Chip::typical(target), &problem, None).unwrap();
            let half = chosen.candidates.iter().find(|it| it.kernel == "mma-half").unwrap();
            assert!(!half.accepted && half.reason == "only when asked for by name");
            assert_ne!(chosen.chosen.kernel, "mma-half");
        }
        let problem = Problem::new(1, 2, 64, 64);
        let layouts = InputLayouts::contiguous(&problem).unwrap();
        let mut only = candidates(&Chip::H200, &problem, &layouts);
        only.retain(|candidate| candidate.on_request);
        assert_eq!(only.len(), 1);
        let refused = Plan::choose(&problem, vec![(NAME, only)], &[], &Preference::default());
        assert!(refused.is_err());
    }

    /// What a launch needs is all there is to compile ahead of time.
    #[test]
    fn split_keys_bring_the_kernel_that_puts_parts_together() {
        let chip = Chip::typical(Target::SM_80);
        let decode = Problem::new(1, 8, 1, 128).with_key_length(8192);
        let families = |problem: &Problem| -> Vec<&str> {
            configurations(&chip, problem, "mma").iter().map(Shipped::family).collect()
        };
        assert_eq!(families(&decode), ["mma", "combine"]);
        assert_eq!(families(&Problem::new(8, 32, 4096, 128)), ["mma"]);
        let reason = plan(&chip, &decode, Some("mma")).unwrap().chosen.reason;
        assert!(reason.contains("keys split"), "{reason}");
    }

    #[test]
    fn tensors_that_the_copy_engine_cannot_read_are_refused() {
        let problem = Problem::new(1, 2, 64, 64);
        let mut layouts = InputLayouts::contiguous(&problem).unwrap();
        let strides = Strides { batch: 64 * 140, length: 140, heads: 68 };
        layouts.key = Layout::strided(problem.key_shape(), strides).unwrap();
        let candidates = candidates(&Chip::H200, &problem, &layouts);
        assert!(candidates[4].accepted);
        for candidate in &candidates[..4] {
            assert!(!candidate.accepted);
            assert_eq!(
                candidate.reason,
                "the key tensor: its length stride of 280 bytes is not a multiple of 16"
            );
        }
        layouts.key = Layout::heads_first(problem.key_shape()).unwrap();
        assert!(super::candidates(&Chip::H200, &problem, &layouts)[0].accepted);
    }
}
