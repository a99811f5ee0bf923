//! The steps of the gate that need no GPU: validate, assemble and simulate.

use cuda::toolkit::{self, Options as AssemblerOptions, Toolkit};
use kernels::Configuration;
use ptx::{Program, Target};
use sim::{Counts, Measure, Mode, Options, Policy};
use testing::scene::{MAX_SEEDS, Scene, schedules};

use super::{Outcome, Rule};

/// A kernel of ours: a configuration and its program.
#[derive(Debug, Clone)]
pub struct OwnKernel {
    /// The configuration that the program implements, or claims to.
    pub kernel: Configuration,
    /// Its program.
    pub program: Program,
}

impl OwnKernel {
    /// Builds the program of a configuration.
    pub fn new(kernel: Configuration) -> Result<Self, kernels::Error> {
        Ok(OwnKernel { kernel, program: kernel.program()? })
    }
}

/// Validates the program.
pub fn validate(own: &OwnKernel) -> Outcome {
    let limit = own.program.target.shared_memory_limit();
    let bytes = own.program.shared_bytes();
    if bytes > limit {
        return too_much_shared(bytes, limit);
    }
    match ptx::validate(&own.program) {
        Ok(()) => Outcome::accept(format!(
            "{} instructions, {bytes} of {limit} bytes of shared memory",
            own.program.instruction_count()
        )),
        Err(invalid) => Outcome::reject(Rule::Invalid, invalid.to_string()),
    }
}

pub(super) fn too_much_shared(bytes: u32, limit: u32) -> Outcome {
    let reason = format!("a block asks for {bytes} bytes of shared memory, and may have {limit}");
    Outcome::reject(Rule::SharedMemory, reason)
}

/// Assembles with the newest `ptxas`; rejects spills, stack frames and serialised tensor-core code.
pub fn assemble(text: &str) -> Outcome {
    let toolkit = Toolkit::find();
    let ptxas = match toolkit.assemblers.iter().max_by_key(|ptxas| ptxas.version) {
        Some(ptxas) => ptxas,
        None => return Outcome::skip("there is no ptxas here (`cargo xtask tools` brings it)"),
    };
    let version = ptxas.version;
    match ptxas.assemble(text, &AssemblerOptions::default()) {
        Ok(assembled) => {
            let faults = assembled.faults();
            if faults.is_empty() {
                let registers = assembled.registers;
                return Outcome::accept(format!(
                    "{registers} registers, no spill, no stack frame, no note (ptxas {version})"
                ));
            }
            Outcome::reject(Rule::SlowCode, format!("{} (ptxas {version})", faults.join("; ")))
        }
        Err(toolkit::Error::Failed { log, .. }) => {
            let first = log.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
            Outcome::reject(Rule::Refused, format!("ptxas {version}: {first}"))
        }
        Err(error) => Outcome::skip(error.to_string()),
    }
}

/// The mean bank conflicts that are allowed for each wavefront of shared memory. Whole tiles are
/// swizzled and have none; what remains are single values at odd addresses.
const CONFLICTS_PER_WAVEFRONT: f64 = 0.5;

/// Simulates under hostile schedules, and counts bank conflicts. Each scheduling policy gets from
/// one to [`MAX_SEEDS`] seeds.
pub fn simulate(own: &OwnKernel, seeds: u64) -> Outcome {
    if own.program.target != Target::SM_90A && !matches!(own.kernel, Configuration::Scalar(_)) {
        return Outcome::skip(format!("nothing is known to do for {}", own.program.target));
    }
    let scene = match Scene::small(&own.kernel) {
        Ok(scene) => Scene { program: own.program.clone(), ..scene },
        Err(error) => return Outcome::reject(Rule::Invalid, error.to_string()),
    };
    let schedules = schedules(&Policy::HOSTILE, 0..seeds.clamp(1, MAX_SEEDS));
    let options = Options { mode: Mode::Checked, ..Options::default() };
    let outcomes = scene.sweep(&schedules, &options, || {});
    for outcome in &outcomes {
        let Some(complaint) = outcome.complaint() else { continue };
        let rule = match &outcome.result {
            Err(failure) if failure.hazard().is_some() => Rule::Hazard,
            Err(_) => Rule::Failed,
            Ok(_) => Rule::Wrong,
        };
        let (policy, seed) = (outcome.policy, outcome.seed);
        return Outcome::reject(rule, format!("policy {policy}, seed {seed}: {complaint}"));
    }
    let counts: Vec<&Counts> = outcomes
        .iter()
        .filter_map(|it| it.result.as_ref().ok())
        .map(|(counts, _)| counts)
        .collect();
    let most = |measure| counts.iter().map(|counts| counts.get(measure)).max().unwrap_or(0);
    let conflicts = most(Measure::BankConflicts);
    let wavefronts = most(Measure::SharedWavefronts);
    if conflicts as f64 > CONFLICTS_PER_WAVEFRONT * wavefronts as f64 {
        let reason =
            format!("{conflicts} bank conflicts in {wavefronts} passes over shared memory");
        return Outcome::reject(Rule::BankConflicts, reason);
    }
    let runs = outcomes.len();
    Outcome::accept(format!(
        "right and without hazards under {runs} schedules, {conflicts} bank conflicts in \
         {wavefronts} passes ({})",
        scene.size
    ))
}
