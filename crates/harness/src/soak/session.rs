//! Computes the answers of a soak: a GPU with its kernel cache, or the CPU while kernels are
//! planned, printed and cached as for a GPU.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuda::{Cache, CacheKey, ComputeCapability, Driver, DriverVersion};
use flashcore::gpu::Chip;
use flashcore::{Backend, Backward, CpuBackend, Inputs, Plan, Preference, RunOptions};
use kernels::Configuration;

use super::case::Case;
use super::device::DeviceSession;
use crate::Error;

/// The inputs of a problem: those of the forward or of the backward pass.
#[derive(Clone, Copy)]
pub(super) enum PassInputs<'a> {
    Forward(&'a Inputs<'a>),
    Backward(&'a Backward<'a>),
}

impl<'a> PassInputs<'a> {
    pub(super) fn inputs(self) -> Inputs<'a> {
        match self {
            PassInputs::Forward(inputs) => *inputs,
            PassInputs::Backward(backward) => backward.inputs,
        }
    }

    pub(super) fn backward(self) -> Option<Backward<'a>> {
        match self {
            PassInputs::Forward(_) => None,
            PassInputs::Backward(backward) => Some(*backward),
        }
    }
}

/// The answer to a problem.
#[derive(Debug)]
pub(super) struct Answer {
    /// Back end and kernel.
    pub(super) kernel: String,
    /// Output and log-sum-exps; or dQ, dK, dV, and the gradient of the sinks if there are any.
    pub(super) results: Vec<Vec<u8>>,
    /// What the cache complained about.
    pub(super) warnings: Vec<String>,
}

/// One use of the library over a cache on disk, from its opening to its end.
pub(super) enum Session<'a> {
    Host(Host<'a>),
    Device(Box<DeviceSession>),
}

impl<'a> Session<'a> {
    pub(super) fn open(cache: &Path, gpu: bool, texts: &'a Texts) -> Result<Self, Error> {
        let cache = Cache::at(cache);
        match gpu {
            true => Ok(Session::Device(Box::new(DeviceSession::open(cache)?))),
            false => Ok(Session::Host(Host { texts, cache, kept: Mutex::default() })),
        }
    }

    pub(super) fn answer(&self, case: &Case, inputs: PassInputs<'_>) -> Result<Answer, Error> {
        match self {
            Session::Host(host) => {
                let warnings = host.keep_kernels(case)?;
                Ok(Answer { warnings, ..on_the_cpu(case, inputs)? })
            }
            Session::Device(device) => device.answer(case, inputs),
        }
    }
}

impl Session<'_> {
    /// What goes with attention on a GPU, now and then.
    pub(super) fn check_append_or_combine(
        &self,
        case: &Case,
    ) -> Option<(&'static str, Result<(), String>)> {
        match self {
            Session::Host(_) => None,
            Session::Device(device) => device.check_append_or_combine(case),
        }
    }
}

/// The CPU's answer.
pub(super) fn on_the_cpu(case: &Case, inputs: PassInputs<'_>) -> Result<Answer, Error> {
    let (cpu, options) = (CpuBackend::new(), RunOptions::default());
    let floats = |of: &[f32]| of.iter().flat_map(|it| it.to_le_bytes()).collect::<Vec<u8>>();
    let (results, report) = match inputs {
        PassInputs::Forward(inputs) => {
            let found = cpu.run(&case.problem, *inputs, &options)?;
            (vec![found.output.bytes().to_vec(), floats(&found.lse)], found.report)
        }
        PassInputs::Backward(backward) => {
            let found = cpu.run_backward(&case.problem, *backward, &options)?;
            let tensors = [&found.query, &found.key, &found.value];
            let tensors = tensors.map(|it| it.bytes().to_vec()).into_iter();
            (tensors.chain(found.sinks.as_deref().map(floats)).collect(), found.report)
        }
    };
    let kernel = format!("{}/{}", report.backend, report.kernel);
    Ok(Answer { kernel, results, warnings: Vec::new() })
}

/// Plans, builds and prints kernels as for a GPU, and keeps them in the cache. The PTX text stands
/// in for the machine code.
pub(super) struct Host<'a> {
    texts: &'a Texts,
    cache: Cache,
    /// Kernels already loaded: like a GPU, a session looks for each in the cache once.
    kept: Mutex<HashSet<Configuration>>,
}

impl Host<'_> {
    fn keep_kernels(&self, case: &Case) -> Result<Vec<String>, Error> {
        let plan = Plan::on_chip(&Chip::H200, &case.problem, &Preference::default())?;
        let mut warnings = Vec::new();
        for launch in plan.chosen.choice.into_iter().flat_map(|choice| choice.launches) {
            if !lock(&self.kept).insert(launch.kernel) {
                continue;
            }
            let text = self.texts.of(&launch.kernel)?;
            let driver = Driver { version: DriverVersion::OLDEST, release: None };
            // Of no GPU, so that nobody takes the text for its machine code.
            let capability = ComputeCapability { major: 0, minor: 0 };
            let key = CacheKey::new(&text, &driver, capability);
            let compile = || Ok::<_, Infallible>(text.as_bytes().to_vec());
            let Ok(entry) = self.cache.get_or_compile(&key, compile);
            if entry.bytes != text.as_bytes() {
                let what = format!("the cached {}", launch.kernel.name());
                return Err(Error::Malformed { what, reason: "it is another text".to_owned() });
            }
            warnings.extend(entry.warnings.iter().map(ToString::to_string));
        }
        Ok(warnings)
    }
}

/// The texts of kernels, each printed once for all sessions.
#[derive(Default)]
pub(super) struct Texts {
    printed: Mutex<HashMap<Configuration, Arc<str>>>,
}

impl Texts {
    fn of(&self, configuration: &Configuration) -> Result<Arc<str>, Error> {
        if let Some(text) = lock(&self.printed).get(configuration) {
            return Ok(text.clone());
        }
        let text: Arc<str> = ptx::print(&configuration.program()?).into();
        lock(&self.printed).insert(*configuration, text.clone());
        Ok(text)
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
