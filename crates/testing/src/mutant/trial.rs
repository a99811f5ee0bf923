//! One mutant against the scenes of its kernel.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kernels::Configuration;
use ptx::Program;
use sim::{Failure, HazardKind, Measure, Mode, Options, Policy};

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
}

impl fmt::Display for Killer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Killer::Validator => f.write_str("validator"),
            Killer::Hazard(kind) => write!(f, "hazard: {kind}"),
            Killer::Refused => f.write_str("refused"),
            Killer::WrongNumbers => f.write_str("wrong numbers"),
        }
    }
}

/// The first schedule, which nearly all that can be noticed falls under, and the others.
const FIRST: (Policy, u64) = (Policy::Latest, 0);
const OTHERS: [(Policy, u64); 4] =
    [(Policy::Random, 0), (Policy::Earliest, 0), (Policy::Random, 1), (Policy::Random, 2)];

/// How many times as long as the original a mutant may run.
const PATIENCE: u64 = 4;

/// A kernel with the scenes that its mutants are shown.
pub struct Trial {
    program: Program,
    /// Each with the steps that a run may take.
    scenes: Vec<(Scene, u64)>,
    /// The instructions that some scene comes to.
    reached: Vec<bool>,
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
            let steps = PATIENCE * report.counts.get(Measure::WarpInstructions) + 50_000;
            scenes.push((scene, steps));
        }
        Ok(Trial { program, scenes, reached })
    }

    /// The kernel's program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Shows a mutant to everyone until somebody notices.
    pub fn judge(&self, mutant: &Mutant) -> Verdict {
        let unreached = mutant.instruction.is_some_and(|index| !self.reached[index]);
        if unreached && mutant.kind == Kind::Value {
            return Verdict::Unreached;
        }
        let program = mutant.apply(&self.program);
        if !matches!(catch_unwind(AssertUnwindSafe(|| ptx::validate(&program))), Ok(Ok(()))) {
            return Verdict::Killed(Killer::Validator);
        }
        let found = match mutant.kind {
            // Numbers tell nearly all of it, and several times as fast.
            Kind::Value => self
                .under(&program, Mode::Values, &[FIRST])
                .or_else(|| self.under(&program, Mode::Checked, &OTHERS[..1])),
            Kind::Delete | Kind::Weaken => self
                .under(&program, Mode::Checked, &[FIRST])
                .or_else(|| self.under(&program, Mode::Checked, &OTHERS)),
        };
        match (found, equivalent::find(&self.program.name, mutant)) {
            (Some(killer), _) => Verdict::Killed(killer),
            (None, Some(known)) => Verdict::Equivalent(known),
            (None, None) => Verdict::Survived,
        }
    }

    fn under(&self, program: &Program, mode: Mode, schedules: &[(Policy, u64)]) -> Option<Killer> {
        self.scenes.iter().find_map(|(scene, step_limit)| {
            schedules.iter().find_map(|&(policy, seed)| {
                let step_limit = *step_limit;
                let options = Options { policy, seed, mode, step_limit, ..Options::default() };
                notice(scene, program, &options)
            })
        })
    }
}

/// Who notices a program in a scene under a schedule.
fn notice(scene: &Scene, program: &Program, options: &Options) -> Option<Killer> {
    let run = catch_unwind(AssertUnwindSafe(|| scene.run_program(program, options)));
    match run {
        Err(_) | Ok(Err(Failure::Launch(_) | Failure::OverBudget { .. })) => Some(Killer::Refused),
        Ok(Err(Failure::Hazard(hazard))) => Some(Killer::Hazard(hazard.kind)),
        Ok(Ok((memory, _))) => scene.judge(&memory).complaint.map(|_| Killer::WrongNumbers),
    }
}
