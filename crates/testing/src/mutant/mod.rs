//! Mutation testing: kernels with one statement changed, which the tests and the simulator should
//! notice.
//!
//! A [`Mutant`] is a [`Program`] with one change: a piece of synchronisation deleted or weakened,
//! or a value made wrong. A [`Trial`] runs it on the adversarial scenes of its kernel, where the
//! validator, a hazard or wrong numbers must reveal it. A mutant that survives is a gap in the
//! scenes or in the simulator, or its change does not matter: then it is on the list of
//! equivalents, with the reason.
//!
//! ```
//! use flashcore_testing::mutant::{self, Kind, Trial, Verdict};
//! use kernels::{Configuration, Single};
//! use ptx::Element;
//!
//! let trial = Trial::new(&Configuration::Single(Single { element: Element::F16 }))?;
//! let all = mutant::every(trial.program());
//! let fence = all.iter().find(|it| it.kind == Kind::Delete).unwrap();
//! assert!(matches!(trial.judge(fence), Verdict::Killed(_)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | file | its subject |
//! | --- | --- |
//! | `generate` | every mutant of a program, in the order of its statements |
//! | `weaken`, `value` | the possible changes of an instruction |
//! | `trial` | one mutant against the scenes of its kernel |
//! | `survey` | many mutants of a kernel, and the score |
//! | `subject` | the configurations that stand for a family |
//! | `dataflow` | mutants that provably compute the same, by an analysis of the program |
//! | `equivalent` | the list of mutants that are equivalent to the original, and why |

mod dataflow;
mod equivalent;
mod generate;
mod subject;
mod survey;
mod trial;
mod value;
mod weaken;

use std::fmt;

use ptx::{Block, Instruction, Program, SourceLocation, Statement, StatementKind, Type};

pub use equivalent::{Equivalent, equivalents};
pub use generate::every;
pub use subject::{families, subjects};
pub use survey::{KnownEquivalents, Outcome, Score, Survey, sample, survey};
pub use trial::{Killer, Trial, Verdict};

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A synchronisation statement is deleted.
    Delete,
    /// A synchronisation statement is weakened or slightly changed.
    Weaken,
    /// A comparison, constant, address, coordinate or store is wrong.
    Value,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 3] = [Kind::Delete, Kind::Weaken, Kind::Value];

    /// Returns the name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Delete => "deleted",
            Kind::Weaken => "weakened",
            Kind::Value => "value",
        }
    }
}

/// One change of one statement.
#[derive(Clone, Debug)]
pub struct Mutant {
    /// The kind of the change.
    pub kind: Kind,
    /// The name of the mutation operator, the same wherever it is applied.
    pub operator: &'static str,
    /// What is changed to what.
    pub detail: String,
    /// The place of the changed statement in the kernel's source.
    pub place: SourceLocation,
    /// The index of the statement, in the order of [`Program::visit`].
    pub site: usize,
    /// The index of the changed instruction among the program's; for a branch that is never taken,
    /// of the first instruction inside.
    instruction: Option<usize>,
    change: Change,
}

/// The replacement of a statement.
#[derive(Clone, Debug, Default)]
pub(crate) struct Change {
    statements: Vec<StatementKind>,
    /// The types of additional registers, numbered after the program's.
    registers: Vec<Type>,
}

impl Change {
    fn to(instruction: Instruction) -> Self {
        Change { statements: vec![StatementKind::Instruction(instruction)], ..Change::default() }
    }
}

impl Mutant {
    /// Returns the changed program.
    pub fn apply(&self, program: &Program) -> Program {
        let mut changed = program.clone();
        changed.registers.extend(&self.change.registers);
        replace(&mut changed.body, &mut 0, self.site, &self.change.statements);
        changed
    }
}

/// Replaces the statement with the index `site`, counting outer statements before inner ones;
/// returns whether it was found.
fn replace(block: &mut Block, next: &mut usize, site: usize, with: &[StatementKind]) -> bool {
    for index in 0..block.len() {
        if *next == site {
            let place = block[index].place;
            let new = with.iter().map(|kind| Statement { kind: kind.clone(), place });
            block.splice(index..=index, new);
            return true;
        }
        *next += 1;
        let found = match &mut block[index].kind {
            StatementKind::Instruction(_) | StatementKind::Break { .. } => false,
            StatementKind::If { then, otherwise, .. } => {
                replace(then, next, site, with) || replace(otherwise, next, site, with)
            }
            StatementKind::Loop { body } | StatementKind::Role { body, .. } => {
                replace(body, next, site, with)
            }
        };
        if found {
            return true;
        }
    }
    false
}

impl fmt::Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}, at {}", self.operator, self.detail, self.place)
    }
}
