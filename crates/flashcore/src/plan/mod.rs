//! Planning: from a problem to the kernel that runs, with its configuration, launches and memory,
//! and the reasons why the other kernels were not chosen.
//!
//! | file | its subject |
//! | --- | --- |
//! | `arrangement` | strides and alignment of a call's tensors |
//! | `rows` | tensors as one list of rows, for ragged batches |
//! | `widened` | a call over an 8-bit cache as one over 16 bits |
//! | `binding` | the value of each parameter of a kernel |
//! | this one | the choice, with its reasons |

pub(crate) mod arrangement;
mod binding;
pub(crate) mod rows;
pub(crate) mod widened;

pub use arrangement::{Arrangement, GradientStrides};
pub use binding::{Launch, Map, Source, Value, bind};
#[cfg(feature = "cuda")]
pub(crate) use binding::{axis_of, bind_with};
pub(crate) use binding::{map_strides, window};
pub use kernels::parameter::Workspace;

pub use crate::chip::{Chip, target_of};

use std::fmt;

use ptx::Version;
use serde::Serialize;

use crate::backend::{Backend, BackendError};
use crate::cpu::{self, CpuBackend};
use crate::error::Error;
use crate::family::{self, Asked, Choice, FAMILIES, Family};
use crate::problem::{Pass, Problem};

/// The back end and kernel that the caller insists on. The default leaves the choice open.
///
/// ```
/// use flashcore::Preference;
///
/// let preference = Preference { backend: Some("cpu".into()), ..Preference::default() };
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Preference {
    /// The back end to use; any when `None`.
    pub backend: Option<String>,
    /// The kernel to use; the best that accepts the problem when `None`.
    pub kernel: Option<String>,
}

impl Preference {
    /// Returns the preference that the environment sets for a pass: `FLASHCORE_KERNEL` may name a
    /// kernel (`forward`) or a back end and a kernel (`gpu/forward`). The name of a kernel of the
    /// other pass has no effect, so that a training step can force the kernel of one pass only.
    pub fn from_environment(pass: Pass) -> Self {
        std::env::var("FLASHCORE_KERNEL")
            .map_or_else(|_| Preference::default(), |name| Preference::named(&name).of_pass(pass))
    }

    /// Returns no preference where the kernel belongs to the other pass only.
    fn of_pass(self, pass: Pass) -> Self {
        let serves = |kernel: &str, pass: Pass| {
            let mut families = FAMILIES.iter().filter(|it| it.pass() == pass);
            families.any(|it| it.name() == kernel) || cpu::kernel_of(pass) == kernel
        };
        let other = match pass {
            Pass::Forward => Pass::Backward,
            Pass::Backward => Pass::Forward,
        };
        match &self.kernel {
            Some(kernel) if serves(kernel, other) && !serves(kernel, pass) => Preference::default(),
            _ => self,
        }
    }

    /// Parses the name of a kernel, with or without its back end; no preference where the name is
    /// empty.
    pub fn named(name: &str) -> Self {
        let of = |text: &str| Some(text.trim().to_owned()).filter(|text| !text.is_empty());
        match name.split_once('/') {
            Some((backend, kernel)) => Preference { backend: of(backend), kernel: of(kernel) },
            None => Preference { backend: None, kernel: of(name) },
        }
    }
}

/// A back end that this machine or this build does not have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// Name of the back end.
    pub backend: &'static str,
    /// Why it is not available.
    pub reason: String,
}

/// A kernel, and whether it can serve a problem.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Candidate {
    /// Name of the back end.
    pub backend: &'static str,
    /// Name of the kernel, unique within the back end.
    pub kernel: &'static str,
    /// Whether it can serve the problem.
    pub accepted: bool,
    /// Whether it is used only when requested by name.
    pub on_request: bool,
    /// The configuration that would run, where the kernel has several.
    pub configuration: Option<String>,
    /// Why the problem is accepted or refused, in one line.
    pub reason: String,
    /// The launches, for kernels of a GPU that accept the problem.
    #[serde(rename = "launch")]
    pub choice: Option<Choice>,
}

impl Candidate {
    /// Returns the names of back end and kernel: `gpu/forward`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.backend, self.kernel)
    }

    fn of(family: &dyn Family, asked: &Asked<'_>) -> Self {
        let chosen = match (asked.problem.pass, asked.problem.scores.without_gradients()) {
            (Pass::Backward, Some(reason)) => Err(reason),
            _ if asked.problem.batch_invariant && !family.is_batch_invariant() => {
                Err("the bits of its results depend on the batch".to_owned())
            }
            _ => family.choose(asked).and_then(|choice| assembled(asked.chip, choice)),
        };
        let choice = chosen.as_ref().ok().cloned();
        Candidate {
            backend: GPU,
            kernel: family.name(),
            accepted: chosen.is_ok(),
            on_request: family.only_on_request(),
            configuration: choice.as_ref().map(|choice| choice.kernel().name()),
            reason: chosen.map_or_else(|reason| reason, |choice| choice.reason),
            choice,
        }
    }
}

/// The PTX version that suffices for every kernel: that of CUDA 12.1.
const WHOLE: Version = Version::of_cuda(12, 1);

/// Returns the choice, unless the driver's compiler is too old for one of its kernels.
fn assembled(chip: &Chip, choice: Choice) -> Result<Choice, String> {
    if chip.ptx >= WHOLE {
        return Ok(choice);
    }
    for launch in &choice.launches {
        let program = launch.kernel.program().map_err(|error| error.to_string())?;
        let needed = program.version();
        if needed > chip.ptx {
            return Err(format!(
                "{} is written in PTX {needed}, and this driver's compiler knows {} at most: a \
                 driver of CUDA 12.1 or later takes it",
                launch.kernel.family(),
                chip.ptx
            ));
        }
    }
    Ok(choice)
}

/// Name of the GPU back end.
pub(crate) const GPU: &str = "gpu";

/// Returns every family of GPU kernels for a problem, best first, each accepted or refused with a
/// reason. The GPU need not be present.
///
/// ```
/// use flashcore::gpu::Chip;
/// use flashcore::plan::{Arrangement, candidates};
/// use flashcore::{DType, Problem};
///
/// let problem = Problem::new(1, 8, 512, 64).with_dtype(DType::F32);
/// let arrangement = Arrangement::contiguous(&problem)?;
/// for candidate in candidates(&Chip::H200, &problem, &arrangement) {
///     println!("{}: {}", candidate.full_name(), candidate.reason);
/// }
/// # Ok::<(), flashcore::Error>(())
/// ```
pub fn candidates(chip: &Chip, problem: &Problem, arrangement: &Arrangement) -> Vec<Candidate> {
    let problem = &problem.with_rules_by_name();
    let asked = Asked { chip, problem, arrangement };
    family::in_order(problem).into_iter().map(|family| Candidate::of(family, &asked)).collect()
}

/// The kernel that serves a problem, and why the others do not.
///
/// ```
/// use flashcore::{Machine, Preference, Problem};
///
/// let machine = Machine::discover();
/// let plan = machine.plan(&Problem::new(1, 8, 512, 64), &Preference::default())?;
/// println!("{plan}");
/// # Ok::<(), flashcore::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// What is computed, serialized as its text. Rules with a name that were written as
    /// functions, such as windows, have been replaced by fields of its mask and scores.
    #[serde(serialize_with = "as_text")]
    pub problem: Problem,
    /// The kernel that will run.
    pub chosen: Candidate,
    /// Every kernel that was considered, in order of preference; `chosen` is among them.
    pub candidates: Vec<Candidate>,
    /// Back ends that are not available.
    pub missing: Vec<Missing>,
}

impl Plan {
    /// Chooses between a GPU that need not be present and the CPU of this machine, for contiguous
    /// tensors. See [`Chip`] for an example.
    pub fn on_chip(chip: &Chip, problem: &Problem, preference: &Preference) -> Result<Plan, Error> {
        problem.validate()?;
        let arrangement = Arrangement::contiguous(problem)?;
        let cpu = CpuBackend::new();
        let all = vec![
            (GPU, candidates(chip, problem, &arrangement)),
            (cpu.name(), cpu.candidates(problem, &arrangement)),
        ];
        Ok(Plan::choose(problem, all, &[], preference)?)
    }

    /// Chooses among the GPU kernels, for tensors with these strides and alignments.
    pub fn on_gpu(
        chip: &Chip,
        problem: &Problem,
        arrangement: &Arrangement,
        preference: &Preference,
    ) -> Result<Plan, Error> {
        problem.validate()?;
        let all = vec![(GPU, candidates(chip, problem, arrangement))];
        Ok(Plan::choose(problem, all, &[], preference)?)
    }

    /// Chooses among the kernels of these back ends, given in order of preference.
    ///
    /// ```
    /// use flashcore::plan::Arrangement;
    /// use flashcore::{CpuBackend, Plan, Preference, Problem};
    ///
    /// let problem = Problem::new(1, 8, 512, 64);
    /// let arrangement = Arrangement::contiguous(&problem)?;
    /// let cpu = CpuBackend::new();
    /// let plan = Plan::among(&[&cpu], &problem, &arrangement, &Preference::default())?;
    /// assert_eq!(plan.chosen.full_name(), "cpu/blocked");
    /// # Ok::<(), flashcore::Error>(())
    /// ```
    pub fn among(
        backends: &[&dyn Backend],
        problem: &Problem,
        arrangement: &Arrangement,
        preference: &Preference,
    ) -> Result<Plan, Error> {
        problem.validate()?;
        let candidates = backends.iter().map(|it| (it.name(), it.candidates(problem, arrangement)));
        Ok(Plan::choose(problem, candidates.collect(), &[], preference)?)
    }

    /// Chooses among the candidates of back ends given in order of preference: the first accepted
    /// one that the caller's preference allows.
    pub(crate) fn choose(
        problem: &Problem,
        backends: Vec<(&'static str, Vec<Candidate>)>,
        missing: &[Missing],
        preference: &Preference,
    ) -> Result<Plan, BackendError> {
        let (backend, kernel) = (preference.backend.as_deref(), preference.kernel.as_deref());
        if let Some(name) = backend
            && !backends.iter().any(|(backend, _)| *backend == name)
        {
            let absent = missing.iter().find(|missing| missing.backend == name);
            return Err(BackendError::Unavailable {
                backend: name.to_owned(),
                reason: absent.map_or_else(
                    || "no such back end exists".to_owned(),
                    |missing| missing.reason.clone(),
                ),
            });
        }
        let mut candidates: Vec<Candidate> =
            backends.into_iter().flat_map(|(_, candidates)| candidates).collect();
        let of_backend =
            |candidate: &Candidate| backend.is_none_or(|name| name == candidate.backend);
        let asked_for = |candidate: &Candidate| {
            let named = kernel.map(|name| name == candidate.kernel);
            of_backend(candidate) && named.unwrap_or(!candidate.on_request)
        };
        if let Some(kernel) = kernel
            && !candidates.iter().any(asked_for)
        {
            let known = names(candidates.iter().filter(|candidate| of_backend(candidate)));
            return Err(BackendError::UnknownKernel { kernel: kernel.to_owned(), known });
        }
        if !candidates.iter().any(|candidate| candidate.accepted && asked_for(candidate)) {
            return Err(refusal(&candidates, asked_for));
        }
        for candidate in &mut candidates {
            if !asked_for(candidate) {
                let reason = match candidate.on_request {
                    true => "only when asked for by name",
                    false => "not asked for",
                };
                candidate.accepted = false;
                candidate.choice = None;
                candidate.reason = reason.to_owned();
            }
        }
        let chosen = candidates.iter().find(|candidate| candidate.accepted);
        let chosen = chosen.expect("one is accepted and asked for").clone();
        let problem = problem.with_rules_by_name();
        Ok(Plan { problem, chosen, candidates, missing: missing.to_vec() })
    }

    /// Says in one line why the chosen kernel was chosen, and why nothing before it was.
    pub fn reason(&self) -> String {
        let mut reason = self.chosen.reason.clone();
        for missing in &self.missing {
            reason += &format!("; no {}: {}", missing.backend, missing.reason);
        }
        let before = self.candidates.iter().take_while(|candidate| **candidate != self.chosen);
        for candidate in before {
            reason += &format!("; not {}: {}", candidate.full_name(), candidate.reason);
        }
        reason
    }
}

fn as_text<S: serde::Serializer>(problem: &Problem, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&problem.text())
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.problem)?;
        for missing in &self.missing {
            write!(f, "\n  {}: absent, {}", missing.backend, missing.reason)?;
        }
        for candidate in &self.candidates {
            let verdict = match candidate.accepted {
                true if *candidate == self.chosen => "chosen",
                true => "possible",
                false => "refused",
            };
            write!(f, "\n  {}: {verdict}, {}", candidate.full_name(), candidate.reason)?;
        }
        Ok(())
    }
}

/// Explains why none of the requested kernels can serve a problem, and which others can.
fn refusal(candidates: &[Candidate], asked_for: impl Fn(&Candidate) -> bool) -> BackendError {
    let (asked_for, others): (Vec<&Candidate>, Vec<&Candidate>) =
        candidates.iter().partition(|candidate| asked_for(candidate));
    let able: Vec<&Candidate> = others.into_iter().filter(|candidate| candidate.accepted).collect();
    if able.is_empty() {
        let reasons: Vec<String> = candidates
            .iter()
            .map(|candidate| format!("{} ({})", candidate.full_name(), candidate.reason))
            .collect();
        return BackendError::Unsupported { reasons: reasons.join(", ") };
    }
    let reasons: Vec<String> = asked_for
        .into_iter()
        .map(|candidate| {
            format!("{} cannot serve this problem: {}", candidate.full_name(), candidate.reason)
        })
        .collect();
    BackendError::Refused { reasons: reasons.join(", "), instead: names(able) }
}

fn names<'a>(candidates: impl IntoIterator<Item = &'a Candidate>) -> String {
    let names: Vec<String> = candidates.into_iter().map(Candidate::full_name).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use kernels::parameter::{Axis, Parameter, Tensor};
    use kernels::{Configuration, Scalar};
    use ptx::Target;

    use super::*;
    use crate::dtype::DType;
    use crate::problem::{Lists, Mask, Scores, Storage};
    use crate::tensor::{Layout, Strides};

    fn plan(chip: &Chip, problem: &Problem, kernel: Option<&str>) -> Result<Plan, Error> {
        let preference = Preference { backend: None, kernel: kernel.map(str::to_owned) };
        Plan::on_chip(chip, problem, &preference)
    }

    fn chosen(chip: &Chip, problem: &Problem) -> String {
        plan(chip, problem, None).unwrap().chosen.full_name()
    }

    #[test]
    fn hopper_runs_the_forward_kernel_and_says_which() {
        let problem =
            Problem::new(1, 16, 4096, 128).with_dtype(DType::BF16).with_mask(Mask::CAUSAL);
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

    /// The compiler in a driver of CUDA 12.0 knows PTX 8.0: kernels that need more are refused with
    /// a reason, and the kernel chosen instead compiles.
    #[test]
    fn what_an_old_driver_cannot_compile_is_not_chosen() {
        let old = Chip { ptx: Version::of_cuda(12, 0), ..Chip::H200 };
        let problem = Problem::new(1, 2, 256, 64).with_dtype(DType::BF16);
        assert_eq!(chosen(&old, &problem), "gpu/forward");
        let gradients = problem.backward();
        assert_eq!(chosen(&Chip::H200, &gradients), "gpu/backward");
        let ragged = gradients.clone().with_storage(Storage::Packed(256), Storage::Packed(256));
        for problem in [gradients.clone(), gradients.deterministic(), ragged] {
            let plan = plan(&old, &problem, None).unwrap();
            assert_eq!(plan.chosen.full_name(), "gpu/backward-mma", "{problem}");
            assert_eq!(
                plan.candidates[0].reason,
                "backward is written in PTX 8.1, and this driver's compiler knows 8.0 at most: a \
                 driver of CUDA 12.1 or later takes it"
            );
            for launch in plan.chosen.choice.unwrap().launches {
                assert!(launch.kernel.program().unwrap().version() <= old.ptx, "{problem}");
            }
        }
    }

    /// No shipped kernel needs more than `WHOLE`, except on targets that need a newer version
    /// themselves.
    #[test]
    fn drivers_from_12_1_on_compile_everything() {
        for kernel in kernels::shipped(Target::SM_90A).iter().step_by(16) {
            let program = kernel.program().unwrap();
            assert!(program.version() <= WHOLE.max(program.target.version()), "{}", program.name);
        }
    }

    #[test]
    fn what_the_forward_kernel_refuses_goes_to_the_next_with_the_reason() {
        let ampere = Chip::typical(Target::SM_80);
        let small = Problem::new(1, 2, 64, 64);
        for (kernel, chip, problem, reason) in [
            ("gpu/mma", ampere, small.clone(), "sm_80 has no wgmma"),
            (
                "gpu/scalar",
                Chip::H200,
                Problem::new(1, 2, 64, 20),
                "head dim 20 is not a multiple of 8 up to 256",
            ),
            (
                "gpu/scalar",
                Chip::H200,
                small.clone().with_dtype(DType::F32),
                "the tensor cores take f16 and bf16, not f32",
            ),
            ("gpu/prefill", Chip::H200, small.with_key_length(0), "there are no keys"),
        ] {
            let plan = plan(&chip, &problem, None).unwrap();
            assert_eq!(plan.chosen.full_name(), kernel);
            assert_eq!(plan.candidates[0].reason, reason);
            assert!(plan.reason().contains(&format!("not gpu/forward: {reason}")));
        }
    }

    /// Windows and score rules do not change the family: `forward` serves them too.
    #[test]
    fn the_storage_and_the_number_of_queries_choose_the_family() {
        let few = Problem::new(4, 32, 1, 128).with_kv_heads(8).with_key_length(4096);
        assert_eq!(chosen(&Chip::H200, &few), "gpu/decode");
        let window = Problem::new(1, 4, 300, 64)
            .with_mask(Mask::window(Some(40), Some(0)).with_chunk(100))
            .with_scores(Scores::EVERY_RULE);
        assert_eq!(chosen(&Chip::H200, &window), "gpu/forward");
        let packed = window.clone().with_storage(Storage::Packed(300), Storage::Packed(300));
        assert_eq!(chosen(&Chip::H200, &packed), "gpu/prefill");
        assert_eq!(chosen(&Chip::typical(Target::SM_80), &packed), "gpu/mma");
        let lengths = Lists { key_lengths: true, ..Lists::default() };
        assert_eq!(chosen(&Chip::H200, &window.with_lists(lengths)), "gpu/prefill");
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
        for kernel in ["forward", "prefill", "decode", "mma", "mma-half", "scalar"] {
            assert_eq!(plan(&Chip::H200, &even, Some(kernel)).unwrap().chosen.kernel, kernel);
        }
        assert_eq!(
            plan(&Chip::typical(Target::SM_89), &even, Some("forward")).unwrap_err().to_string(),
            "gpu/forward cannot serve this problem: sm_89 has no wgmma; gpu/mma, gpu/decode, \
             gpu/scalar, gpu/mma-half, cpu/blocked can"
        );
    }

    /// `mma-half`, which accumulates in f16, is not chosen even where it is the only candidate.
    #[test]
    fn sums_in_f16_are_never_chosen_unless_asked_for() {
        let problem = Problem::new(1, 2, 64, 64);
        for target in [Target::SM_80, Target::SM_86, Target::SM_89, Target::SM_90A, Target::SM_120]
        {
            let plan = plan(&Chip::typical(target), &problem, None).unwrap();
            let half = plan.candidates.iter().find(|it| it.kernel == "mma-half").unwrap();
            assert!(!half.accepted && half.reason == "only when asked for by name");
        }
        let arrangement = Arrangement::contiguous(&problem).unwrap();
        let mut only = candidates(&Chip::H200, &problem, &arrangement);
        only.retain(|candidate| candidate.on_request);
        assert_eq!(only.len(), 1);
        let refused = Plan::choose(&problem, vec![(GPU, only)], &[], &Preference::default());
        assert!(refused.is_err());
    }

    #[test]
    fn tensors_that_the_copy_engine_cannot_read_are_refused() {
        let problem = Problem::new(1, 2, 64, 64);
        let mut arrangement = Arrangement::contiguous(&problem).unwrap();
        arrangement.key = Strides { batch: 64 * 140, length: 140, heads: 68 };
        let refused = candidates(&Chip::H200, &problem, &arrangement);
        for candidate in refused {
            if candidate.kernel == "scalar" {
                assert!(candidate.accepted);
                continue;
            }
            assert_eq!(
                candidate.reason,
                "the key tensor: its length stride of 280 bytes is not a multiple of 16"
            );
        }
        arrangement.key = Layout::heads_first(problem.key_shape()).unwrap().strides();
        assert!(candidates(&Chip::H200, &problem, &arrangement)[0].accepted);
    }

    /// Factors per head are indexed by sequence even where keys are packed; factors per token have
    /// the layout of the keys.
    #[test]
    fn descale_factors_are_walked_like_what_they_are_of() {
        let strides = |text: &str| {
            let problem: Problem = text.parse().unwrap();
            let arrangement = Arrangement::contiguous(&problem).unwrap();
            let launch = Choice::for_kernel(
                &Chip::H200,
                &Problem::new(1, 1, 8, 8),
                Configuration::Scalar(Scalar {
                    target: Target::SM_80,
                    element: ptx::Element::F16,
                    head_dim: 8,
                    value_head_dim: 8,
                    rules: kernels::Rules::DENSE,
                }),
                None,
            );
            let launch = &launch.unwrap().launches[0];
            let declared = |axis| ptx::Parameter {
                name: Parameter::Stride(Tensor::KeyDescale, axis).to_string(),
                kind: ptx::ParameterKind::Scalar(ptx::Type::U64),
            };
            let declared = [Axis::Batch, Axis::Row, Axis::Head].map(declared);
            bind(launch, &declared, &problem, &arrangement).unwrap()
        };
        let numbers = |all: [u64; 3]| all.map(Value::U64).to_vec();
        let eight = "b=3,h=6,hk=2,s=100,d=64,k=e4m3,v=e4m3";
        let packed = format!("{eight},queries=packed:250,keys=packed:260");
        assert_eq!(strides(&format!("{eight},k_descale=head")), numbers([2, 0, 1]));
        assert_eq!(strides(&format!("{eight},k_descale=token")), numbers([200, 2, 1]));
        assert_eq!(strides(&format!("{packed},k_descale=head")), numbers([2, 0, 1]));
        assert_eq!(strides(&format!("{packed},k_descale=token")), numbers([0, 2, 1]));
        let paged = format!("{eight},keys=pages:16:40:90");
        assert_eq!(strides(&format!("{paged},k_descale=token")), numbers([32, 2, 1]));
        assert_eq!(strides(eight), numbers([0, 0, 0]));
    }

    /// Every parameter of every launch of every family gets an argument of its type, whatever the
    /// problem.
    #[test]
    fn every_parameter_is_bound() {
        let texts = [
            "b=2,h=6,hk=2,s=300,d=64",
            "b=2,h=6,hk=2,s=300,d=256,window=40:3,chunk=100,alibi=sequences",
            "b=2,h=8,s=1,sk=9000,d=128",
            "b=3,h=6,hk=2,s=100,d=64,causal,queries=packed:250,keys=packed:260,key_lengths",
            "b=3,h=6,hk=2,s=5,sk=640,d=64,chunk=64,sinks,keys=pages:16:40:90,key_lengths",
            "b=3,h=6,hk=2,s=99,sk=640,d=64,window=9:9,keys=entries:7,batch_index,left_padding",
        ];
        let ruled: Problem = "b=2,h=6,hk=2,s=300,d=128,dv=64,f16,causal".parse().unwrap();
        let ruled = ruled.with_scores(Scores::EVERY_RULE);
        let mut bound = 0;
        for problem in texts.into_iter().map(|text| text.parse().unwrap()).chain([ruled]) {
            let arrangement = Arrangement::contiguous(&problem).unwrap();
            for chip in [Chip::H200, Chip::typical(Target::SM_80), Chip::typical(Target::SM_75)] {
                for candidate in candidates(&chip, &problem, &arrangement) {
                    let launches = candidate.choice.map(|choice| choice.launches);
                    for launch in launches.into_iter().flatten() {
                        let declared = launch.kernel.program().unwrap().parameters;
                        #[cfg(feature = "cuda")]
                        assert!(declared.len() <= cuda::MAX_ARGUMENTS, "{}", launch.kernel.name());
                        let values = bind(&launch, &declared, &problem, &arrangement);
                        assert_eq!(values.unwrap().len(), declared.len());
                        bound += 1;
                    }
                }
            }
        }
        assert!(bound > 40, "{bound}");
    }
}
