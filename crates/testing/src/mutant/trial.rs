//! Trials: one mutant against the scenes of its kernel.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kernels::Configuration;
use ptx::Program;
use sim::{Failure, HazardKind, Measure, Mode, Options, Policy, Report};

use super::dataflow::Dataflow;
use super::{Equivalent, Kind, Mutant, equivalent};
use crate::scene::{Scene, SceneError};

/// The verdict on a mutant.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// The mutant was noticed.
    Killed(Killer),
    /// Nothing noticed it, and its change makes no difference.
    Equivalent(&'static Equivalent),
    /// A change of a value that no scene computes: no warp reaches the instruction.
    Unreached,
    /// Nothing noticed it.
    Survived,
}

/// What noticed a mutant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Killer {
    /// The validator refused the program.
    Validator,
    /// The simulator reported a hazard.
    Hazard(HazardKind),
    /// The simulator refused the launch or panicked.
    Refused,
    /// A result is wrong or written twice, or a counter is not restored.
    WrongNumbers,
    /// The results are right, but took more or fewer products, exponentials or bytes.
    Work,
}

impl fmt::Display for Killer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Killer::Validator => f.write_str("validator"),
            Killer::Hazard(kind) => write!(f, "hazard: {kind}"),
            Killer::Refused => f.write_str("refused"),
            Killer::WrongNumbers => f.write_str("wrong numbers"),
            Killer::Work => f.write_str("work"),
        }
    }
}

/// The schedules. Nearly all mutants that can be noticed are noticed under the first. The last two
/// starve a warp of one of the first two warpgroups that multiply.
const FIRST: (Policy, u64) = (Policy::Latest, 0);
const OTHERS: [(Policy, u64); 6] = [
    (Policy::Random, 0),
    (Policy::Earliest, 0),
    (Policy::Random, 1),
    (Policy::Random, 2),
    (Policy::Random, 19),
    (Policy::Random, 35),
];

/// The measures of a kernel's work, which must be the same in every run of a scene.
const WORK: [Measure; 5] = [
    Measure::TensorOperations,
    Measure::Exponentials,
    Measure::CopyBytesDelivered,
    Measure::GlobalBytesRead,
    Measure::GlobalBytesWritten,
];

/// The number of times as many steps as the original that a mutant may take.
const STEP_LIMIT_FACTOR: u64 = 4;

/// A kernel with the scenes that its mutants run on.
pub struct Trial {
    program: Program,
    /// The analysis of the program.
    dataflow: Dataflow,
    scenes: Vec<SceneBaseline>,
    /// Whether some scene reaches each instruction.
    reached: Vec<bool>,
}

/// A scene with the counts of the original kernel.
struct SceneBaseline {
    scene: Scene,
    /// The number of warp instructions of the kernel.
    instructions: u64,
    /// The amount of each of [`WORK`].
    work: [u64; 5],
}

/// The result of running a mutant in all scenes.
enum Detection {
    Noticed(Killer),
    /// Nothing noticed it. `slower` is whether it executed more instructions than the kernel in
    /// some scene and fewer in none.
    Unnoticed {
        slower: bool,
    },
}

impl Trial {
    /// Creates the scenes, and checks that the kernel itself passes them.
    pub fn new(kernel: &Configuration) -> Result<Self, SceneError> {
        let program = kernel.program()?;
        let mut reached = vec![false; program.instruction_count()];
        let mut scenes = Vec::new();
        for scene in Scene::adversarial(kernel)? {
            let refused = |failure: Failure| SceneError::Size(format!("{}: {failure}", scene.size));
            let options = Options::checked(FIRST.0, FIRST.1);
            let scene = scene.prepared(&options).map_err(refused)?;
            let (memory, report) = scene.run(&options).map_err(refused)?;
            if let Some(complaint) = scene.judge(&memory).complaint {
                return Err(SceneError::Size(format!("{}: {complaint}", scene.size)));
            }
            reached.iter_mut().zip(report.reached).for_each(|(all, here)| *all |= here);
            let instructions = report.counts.get(Measure::WarpInstructions);
            let work = WORK.map(|measure| report.counts.get(measure));
            scenes.push(SceneBaseline { scene, instructions, work });
        }
        let dataflow = Dataflow::of(&program);
        Ok(Trial { program, dataflow, scenes, reached })
    }

    /// Returns the program of the kernel.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Returns the entry of the list of equivalents that applies to a mutant.
    pub fn listed(&self, mutant: &Mutant) -> Option<&'static Equivalent> {
        equivalent::find(&self.program.name, mutant, false)
    }

    /// Runs a mutant through all checks until one notices it.
    pub fn judge(&self, mutant: &Mutant) -> Verdict {
        let unreached = mutant.instruction.is_some_and(|index| !self.reached[index]);
        if unreached && mutant.kind == Kind::Value {
            return Verdict::Unreached;
        }
        if let Some(known) = self.dataflow.reason(mutant) {
            return Verdict::Equivalent(known);
        }
        let program = mutant.apply(&self.program);
        if !matches!(catch_unwind(AssertUnwindSafe(|| ptx::validate(&program))), Ok(Ok(()))) {
            return Verdict::Killed(Killer::Validator);
        }
        let seen = match mutant.kind {
            // Values mode notices nearly all of them, and is several times faster.
            Kind::Value => match self.under(&program, Mode::Values, &[FIRST]) {
                Detection::Unnoticed { slower } => {
                    match self.under(&program, Mode::Checked, &OTHERS[..1]) {
                        Detection::Unnoticed { .. } => Detection::Unnoticed { slower },
                        noticed => noticed,
                    }
                }
                noticed => noticed,
            },
            Kind::Delete | Kind::Weaken => match self.under(&program, Mode::Checked, &[FIRST]) {
                Detection::Unnoticed { .. } => self.under(&program, Mode::Checked, &OTHERS),
                noticed => noticed,
            },
        };
        let slower = match seen {
            Detection::Noticed(killer) => return Verdict::Killed(killer),
            Detection::Unnoticed { slower } => slower,
        };
        match equivalent::find(&self.program.name, mutant, slower) {
            Some(known) => Verdict::Equivalent(known),
            None => Verdict::Survived,
        }
    }

    fn under(&self, program: &Program, mode: Mode, schedules: &[(Policy, u64)]) -> Detection {
        let (mut more, mut less) = (false, false);
        for SceneBaseline { scene, instructions, work } in &self.scenes {
            for &(policy, seed) in schedules {
                let step_limit = STEP_LIMIT_FACTOR * instructions + 50_000;
                let options = Options { policy, seed, mode, step_limit, ..Options::default() };
                let report = match notice(scene, program, &options) {
                    Ok(report) => report,
                    Err(killer) => return Detection::Noticed(killer),
                };
                // Under other schedules, other thread blocks may take the work.
                if (policy, seed) == FIRST {
                    if WORK.map(|measure| report.counts.get(measure)) != *work {
                        return Detection::Noticed(Killer::Work);
                    }
                    let taken = report.counts.get(Measure::WarpInstructions);
                    more |= taken > *instructions;
                    less |= taken < *instructions;
                }
            }
        }
        Detection::Unnoticed { slower: more && !less }
    }
}

/// Runs a program in a scene under a schedule; returns what noticed it, or the report.
fn notice(scene: &Scene, program: &Program, options: &Options) -> Result<Report, Killer> {
    let run = catch_unwind(AssertUnwindSafe(|| scene.run_program(program, options)));
    match run {
        Err(_) | Ok(Err(Failure::Launch(_) | Failure::OverBudget { .. })) => Err(Killer::Refused),
        Ok(Err(Failure::Hazard(hazard))) => Err(Killer::Hazard(hazard.kind)),
        Ok(Ok((memory, report))) => match scene.judge(&memory).complaint {
            Some(_) => Err(Killer::WrongNumbers),
            None => Ok(report),
        },
    }
}
