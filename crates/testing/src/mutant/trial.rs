//! One mutant against the scenes of its kernel.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kernels::Configuration;
use ptx::Program;
use sim::{Failure, HazardKind, Measure, Mode, Options, Policy, Report};

use super::idle::Idle;
use super::{Equivalent, Kind, Mutant, equivalent};
use crate::scene::{Scene, SceneError};

/// What became of a mutant.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// Somebody noticed.
    Killed(Killer),
    /// Nobody noticed, and nobody needs to.
    Equivalent(&'static Equivalent),
    /// Of a value that no scene needs: no warp comes to where it is computed.
    Unreached,
    /// Nobody noticed.
    Survived,
}

/// Who noticed a mutant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Killer {
    /// The program is no program any more.
    Validator,
    /// The simulator stopped.
    Hazard(HazardKind),
    /// The simulator could not go on at all.
    Refused,
    /// A result is wrong, or written twice, or a counter is not left as it was.
    WrongNumbers,
    /// The results are right, and took more or fewer products, exponentials or bytes.
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

/// The first schedule, which nearly all that can be noticed falls under, and the others. The last two
/// leave a warp behind: one of the first two warpgroups that multiply.
const FIRST: (Policy, u64) = (Policy::Latest, 0);
const OTHERS: [(Policy, u64); 6] = [
    (Policy::Random, 0),
    (Policy::Earliest, 0),
    (Policy::Random, 1),
    (Policy::Random, 2),
    (Policy::Random, 19),
    (Policy::Random, 35),
];

/// What a kernel is there to spare: of each, a scene takes so much and no more.
const WORK: [Measure; 5] = [
    Measure::TensorOperations,
    Measure::Exponentials,
    Measure::CopyBytesDelivered,
    Measure::GlobalBytesRead,
    Measure::GlobalBytesWritten,
];

/// How many times as long as the original a mutant may run.
const PATIENCE: u64 = 4;

/// A kernel with the scenes that its mutants are shown.
pub struct Trial {
    program: Program,
    /// What it shows without being run.
    idle: Idle,
    scenes: Vec<Shown>,
    /// The instructions that some scene comes to.
    reached: Vec<bool>,
}

/// A scene that mutants are shown.
struct Shown {
    scene: Scene,
    /// Warp instructions of the kernel itself.
    instructions: u64,
    /// What it takes of each of [`WORK`].
    work: [u64; 5],
}

/// What came of a mutant in all scenes.
enum Seen {
    Noticed(Killer),
    /// Nobody noticed; whether it took more instructions than the kernel in some scene, and fewer in
    /// none.
    Unnoticed {
        slower: bool,
    },
}

impl Trial {
    /// Makes the scenes, and sees that the kernel itself passes them.
    pub fn new(kernel: &Configuration) -> Result<Self, SceneError> {
        let program = kernel.program()?;
        let mut reached = vec![false; program.instruction_count()];
        let mut scenes = Vec::new();
        for scene in Scene::unkind(kernel)? {
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
            scenes.push(Shown { scene, instructions, work });
        }
        let idle = Idle::of(&program);
        Ok(Trial { program, idle, scenes, reached })
    }

    /// The kernel's program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// What the list of equivalents says of a mutant that nobody noticed.
    pub fn listed(&self, mutant: &Mutant) -> Option<&'static Equivalent> {
        equivalent::find(&self.program.name, mutant, false)
    }

    /// Shows a mutant to everyone until somebody notices.
    pub fn judge(&self, mutant: &Mutant) -> Verdict {
        let unreached = mutant.instruction.is_some_and(|index| !self.reached[index]);
        if unreached && mutant.kind == Kind::Value {
            return Verdict::Unreached;
        }
        if let Some(known) = self.idle.reason(mutant) {
            return Verdict::Equivalent(known);
        }
        let program = mutant.apply(&self.program);
        if !matches!(catch_unwind(AssertUnwindSafe(|| ptx::validate(&program))), Ok(Ok(()))) {
            return Verdict::Killed(Killer::Validator);
        }
        let seen = match mutant.kind {
            // Numbers tell nearly all of it, and several times as fast.
            Kind::Value => match self.under(&program, Mode::Values, &[FIRST]) {
                Seen::Unnoticed { slower } => {
                    match self.under(&program, Mode::Checked, &OTHERS[..1]) {
                        Seen::Unnoticed { .. } => Seen::Unnoticed { slower },
                        noticed => noticed,
                    }
                }
                noticed => noticed,
            },
            Kind::Delete | Kind::Weaken => match self.under(&program, Mode::Checked, &[FIRST]) {
                Seen::Unnoticed { .. } => self.under(&program, Mode::Checked, &OTHERS),
                noticed => noticed,
            },
        };
        let slower = match seen {
            Seen::Noticed(killer) => return Verdict::Killed(killer),
            Seen::Unnoticed { slower } => slower,
        };
        match equivalent::find(&self.program.name, mutant, slower) {
            Some(known) => Verdict::Equivalent(known),
            None => Verdict::Survived,
        }
    }

    fn under(&self, program: &Program, mode: Mode, schedules: &[(Policy, u64)]) -> Seen {
        let (mut more, mut less) = (false, false);
        for Shown { scene, instructions, work } in &self.scenes {
            for &(policy, seed) in schedules {
                let step_limit = PATIENCE * instructions + 50_000;
                let options = Options { policy, seed, mode, step_limit, ..Options::default() };
                let report = match notice(scene, program, &options) {
                    Ok(report) => report,
                    Err(killer) => return Seen::Noticed(killer),
                };
                // Under another schedule other blocks of threads may take the work.
                if (policy, seed) == FIRST {
                    if WORK.map(|measure| report.counts.get(measure)) != *work {
                        return Seen::Noticed(Killer::Work);
                    }
                    let taken = report.counts.get(Measure::WarpInstructions);
                    more |= taken > *instructions;
                    less |= taken < *instructions;
                }
            }
        }
        Seen::Unnoticed { slower: more && !less }
    }
}

/// Who notices a program in a scene under a schedule, or what the run tells.
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
