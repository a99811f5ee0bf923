//! The back ends of this machine, best first, and those that are missing.

use crate::backend::{Backend, Output, Progress, RunOptions, expect_pass};
use crate::cpu::CpuBackend;
use crate::error::Error;
use crate::gradients::{Backward, Gradients};
use crate::inputs::Inputs;
use crate::plan::{Arrangement, Missing, Plan, Preference};
use crate::problem::{Pass, Problem};
use crate::serving::Sequences;

/// The back ends of this machine.
///
/// ```
/// use flashcore::{Inputs, Machine, Preference, Problem, Tensor};
///
/// let problem = Problem::new(1, 4, 100, 32);
/// let query = Tensor::random(problem.dtype(), problem.query_shape(), 0)?;
/// let key = Tensor::random(problem.dtype(), problem.key_shape(), 1)?;
/// let value = Tensor::random(problem.dtype(), problem.value_shape(), 2)?;
///
/// let machine = Machine::discover();
/// let inputs = Inputs::new(&query, &key, &value);
/// let result = machine.attend(&problem, inputs, &Preference::default(), None)?;
/// println!("{}: {}", result.report.kernel, result.report.reason);
/// # Ok::<(), flashcore::Error>(())
/// ```
pub struct Machine {
    backends: Vec<Box<dyn Backend>>,
    missing: Vec<Missing>,
    #[cfg(feature = "cuda")]
    gpu: Option<std::sync::Arc<crate::gpu::Gpu>>,
}

impl Machine {
    /// Looks for every back end. Never fails: the CPU is always there.
    pub fn discover() -> Self {
        let mut machine = Machine::of(Vec::new(), Vec::new());
        machine.look_for_gpu();
        machine.backends.push(Box::new(CpuBackend::new()));
        machine
    }

    fn of(backends: Vec<Box<dyn Backend>>, missing: Vec<Missing>) -> Self {
        Machine {
            backends,
            missing,
            #[cfg(feature = "cuda")]
            gpu: None,
        }
    }

    #[cfg(feature = "cuda")]
    fn look_for_gpu(&mut self) {
        match crate::gpu::Gpu::open(0) {
            Ok(gpu) => {
                let gpu = std::sync::Arc::new(gpu);
                self.backends.push(Box::new(crate::gpu::GpuBackend::new(gpu.clone())));
                self.gpu = Some(gpu);
            }
            Err(error) => {
                self.missing.push(Missing { backend: "gpu", reason: error.to_string() });
            }
        }
    }

    #[cfg(not(feature = "cuda"))]
    fn look_for_gpu(&mut self) {
        let reason = "FlashCore was built without its feature `cuda`".to_owned();
        self.missing.push(Missing { backend: "gpu", reason });
    }

    /// Returns the back ends, best first.
    pub fn backends(&self) -> &[Box<dyn Backend>] {
        &self.backends
    }

    /// Returns the GPU, if there is one.
    #[cfg(feature = "cuda")]
    pub fn gpu(&self) -> Option<&crate::gpu::Gpu> {
        self.gpu.as_deref()
    }

    /// Returns the back ends that are not available, with the reasons.
    pub fn missing(&self) -> &[Missing] {
        &self.missing
    }

    /// Chooses a kernel for a problem whose tensors are contiguous.
    pub fn plan(&self, problem: &Problem, preference: &Preference) -> Result<Plan, Error> {
        problem.validate()?;
        self.plan_for(problem, &Arrangement::contiguous(problem)?, preference)
    }

    /// Chooses a kernel for a problem whose tensors have these strides and alignments.
    pub fn plan_for(
        &self,
        problem: &Problem,
        arrangement: &Arrangement,
        preference: &Preference,
    ) -> Result<Plan, Error> {
        problem.validate()?;
        let of = |backend: &dyn Backend| (backend.name(), backend.candidates(problem, arrangement));
        let candidates = self.backends.iter().map(|backend| of(backend.as_ref())).collect();
        Ok(Plan::choose(problem, candidates, &self.missing, preference)?)
    }

    /// Chooses a kernel and runs it. The report in the output says which one and why.
    pub fn attend(
        &self,
        problem: &Problem,
        inputs: Inputs<'_>,
        preference: &Preference,
        progress: Option<&dyn Progress>,
    ) -> Result<Output, Error> {
        expect_pass(problem, Pass::Forward)?;
        problem.validate()?;
        inputs.validate(problem)?;
        let plan = self.plan_for(problem, &inputs.arrangement(problem)?, preference)?;
        let options = RunOptions { progress, ..RunOptions::default() };
        let mut output = self.backend_of(&plan).execute(&plan, inputs, &options)?;
        output.report.reason = plan.reason();
        Ok(output)
    }

    /// Like [`Machine::attend`], for sequences of unequal lengths that placements locate in the
    /// tensors.
    pub fn attend_sequences(
        &self,
        sequences: &Sequences,
        inputs: Inputs<'_>,
        preference: &Preference,
    ) -> Result<Output, Error> {
        let (problem, inputs) = sequences.over(inputs)?;
        self.attend(&problem, inputs, preference, None)
    }

    /// Chooses a kernel for the gradients of a forward pass, and runs it.
    ///
    /// The gradients are those of `sum(output * output_gradient)` with respect to queries, keys,
    /// values and sinks. Rows that see no key, and keys that no row sees, have gradients of zero.
    ///
    /// ```
    /// use flashcore::{Backward, InputTensors, Machine, Mask, Preference, Problem, Tensor};
    ///
    /// let problem = Problem::new(1, 4, 100, 32).with_kv_heads(2).with_mask(Mask::CAUSAL);
    /// let tensors = InputTensors::random(&problem, 0)?;
    /// let (machine, preference) = (Machine::discover(), Preference::default());
    ///
    /// let forward = machine.attend(&problem, tensors.inputs(), &preference, None)?;
    /// let output_gradient = Tensor::random(problem.dtype(), problem.output_shape(), 1)?;
    /// let backward = Backward::new(tensors.inputs(), &forward, &output_gradient);
    /// let gradients = machine.attend_backward(&problem, backward, &preference, None)?;
    /// assert_eq!(gradients.key.shape(), problem.key_shape());
    /// # Ok::<(), flashcore::Error>(())
    /// ```
    pub fn attend_backward(
        &self,
        problem: &Problem,
        backward: Backward<'_>,
        preference: &Preference,
        progress: Option<&dyn Progress>,
    ) -> Result<Gradients, Error> {
        let problem = &problem.clone().backward();
        problem.validate()?;
        backward.validate(problem)?;
        let plan = self.plan_for(problem, &backward.arrangement(problem)?, preference)?;
        let options = RunOptions { progress, ..RunOptions::default() };
        let mut gradients = self.backend_of(&plan).execute_backward(&plan, backward, &options)?;
        gradients.report.reason = plan.reason();
        Ok(gradients)
    }

    fn backend_of(&self, plan: &Plan) -> &dyn Backend {
        let mut backends = self.backends.iter().map(AsRef::as_ref);
        let named = backends.find(|backend: &&dyn Backend| backend.name() == plan.chosen.backend);
        named.expect("a plan names one of the back ends it was made from")
    }
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.backends.iter().map(|backend| backend.name()).collect();
        f.debug_struct("Machine").field("backends", &names).field("missing", &self.missing).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Candidate;

    /// A back end with a given name and a given list of kernels, each accepted or refused.
    struct Fixed(&'static str, Vec<(&'static str, bool)>);

    impl Backend for Fixed {
        fn name(&self) -> &'static str {
            self.0
        }

        fn describe(&self) -> String {
            String::new()
        }

        fn candidates(&self, _: &Problem, _: &Arrangement) -> Vec<Candidate> {
            let candidate = |&(kernel, accepted): &(&'static str, bool)| Candidate {
                backend: self.0,
                kernel,
                accepted,
                on_request: false,
                configuration: None,
                choice: None,
                reason: if accepted { "fits" } else { "too small" }.to_owned(),
            };
            self.1.iter().map(candidate).collect()
        }

        fn execute(&self, _: &Plan, _: Inputs<'_>, _: &RunOptions<'_>) -> Result<Output, Error> {
            unreachable!("only planned, never run")
        }
    }

    fn machine() -> Machine {
        let backends: Vec<Box<dyn Backend>> = vec![
            Box::new(Fixed("gpu", vec![("fast", false), ("plain", true)])),
            Box::new(Fixed("cpu", vec![("blocked", true)])),
        ];
        let missing = vec![Missing { backend: "tpu", reason: "nobody wrote it".to_owned() }];
        Machine::of(backends, missing)
    }

    fn prefer(backend: Option<&str>, kernel: Option<&str>) -> Preference {
        Preference { backend: backend.map(str::to_owned), kernel: kernel.map(str::to_owned) }
    }

    #[test]
    fn the_first_accepted_candidate_is_chosen() {
        let problem = Problem::new(1, 1, 1, 1);
        let plan = machine().plan(&problem, &prefer(None, None)).unwrap();
        assert_eq!(plan.chosen.kernel, "plain");
        assert_eq!(plan.reason(), "fits; no tpu: nobody wrote it; not gpu/fast: too small");
        assert_eq!(
            plan.to_string(),
            "batch 1, heads 1, length 1, head dim 1, f16\n  \
             tpu: absent, nobody wrote it\n  \
             gpu/fast: refused, too small\n  \
             gpu/plain: chosen, fits\n  \
             cpu/blocked: possible, fits"
        );
    }

    #[test]
    fn a_preference_is_obeyed_or_refused_with_what_would_work() {
        let problem = Problem::new(1, 1, 1, 1);
        let plan = |backend, kernel| machine().plan(&problem, &prefer(backend, kernel));
        let refusal = |backend, kernel| plan(backend, kernel).unwrap_err().to_string();
        assert_eq!(plan(Some("cpu"), None).unwrap().chosen.kernel, "blocked");
        assert_eq!(refusal(Some("tpu"), None), "there is no tpu back end here: nobody wrote it");
        assert_eq!(
            refusal(Some("npu"), None),
            "there is no npu back end here: no such back end exists"
        );
        assert_eq!(
            refusal(None, Some("fastest")),
            "there is no kernel `fastest` here, only gpu/fast, gpu/plain, cpu/blocked"
        );
        assert_eq!(
            refusal(Some("cpu"), Some("plain")),
            "there is no kernel `plain` here, only cpu/blocked"
        );
        assert_eq!(
            refusal(None, Some("fast")),
            "gpu/fast cannot serve this problem: too small; gpu/plain, cpu/blocked can"
        );
    }
}
