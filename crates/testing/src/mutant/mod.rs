//! What the tests and the simulator would notice: kernels with one statement changed.
//!
//! A [`Mutant`] is a [`Program`] with one change: a piece of synchronisation taken out or made
//! weaker, or a value made wrong. A [`Trial`] runs it on the unkind scenes of its kernel, and
//! somebody must notice: the validator, a hazard, or wrong numbers. One that nobody notices is a
//! hole in the scenes or in the simulator, or it changes nothing that matters: then it stands on
//! the list of equivalents, with the reason.
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
//! | `weaken`, `value` | what may become of an instruction |
//! | `trial` | one mutant against the scenes of its kernel |
//! | `survey` | many mutants of a kernel, and the score |
//! | `subject` | the configurations that stand for a family |
//! | `idle` | mutants that compute the same, as the program itself shows |
//! | `equivalent` | mutants that are as good as the original, and why |

mod equivalent;
mod generate;
mod idle;
mod subject;
mod survey;
mod trial;
mod value;
mod weaken;

use std::fmt;

use ptx::{Block, Instruction, Place, Program, Statement, StatementKind, Type};

pub use equivalent::{Equivalent, equivalents};
pub use generate::every;
pub use subject::{families, subjects};
pub use survey::{Listed, Outcome, Score, Survey, sample, survey};
pub use trial::{Killer, Trial, Verdict};

/// What kind of change it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A statement that orders or waits is taken out.
    Delete,
    /// A statement that orders or waits does less, or something near.
    Weaken,
    /// A comparison, constant, address, coordinate or store is wrong.
    Value,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 3] = [Kind::Delete, Kind::Weaken, Kind::Value];

    /// Its name in tables.
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
    /// What kind of change it is.
    pub kind: Kind,
    /// What is done, in a few words that are the same wherever it is done.
    pub operator: &'static str,
    /// What becomes of what.
    pub detail: String,
    /// Where the kernel's source says what is changed.
    pub place: Place,
    /// The statement, in the order of [`Program::visit`].
    pub site: usize,
    /// The instruction among the program's that it is about; of a branch that is left out, the first
    /// inside.
    instruction: Option<usize>,
    change: Change,
}

/// What stands in the place of a statement.
#[derive(Clone, Debug, Default)]
pub(crate) struct Change {
    statements: Vec<StatementKind>,
    /// Registers that it needs beyond the program's.
    registers: Vec<Type>,
}

impl Change {
    fn to(instruction: Instruction) -> Self {
        Change { statements: vec![StatementKind::Instruction(instruction)], ..Change::default() }
    }
}

impl Mutant {
    /// The changed program.
    pub fn apply(&self, program: &Program) -> Program {
        let mut changed = program.clone();
        changed.registers.extend(&self.change.registers);
        replace(&mut changed.body, &mut 0, self.site, &self.change.statements);
        changed
    }
}

/// Replaces the statement of a number, outer ones counted before inner ones; gives whether it was
/// found.
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
