//! Many mutants of a kernel, and the score.

use std::collections::{BTreeMap, HashMap};

use kernels::Configuration;
use rayon::prelude::*;

use super::{Equivalent, Killer, Kind, Mutant, Trial, Verdict, every};
use crate::dice::Dice;
use crate::scene::SceneError;

/// What became of one mutant.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The mutant.
    pub mutant: Mutant,
    /// What became of it.
    pub verdict: Verdict,
}

/// What became of the mutants of a kernel.
#[derive(Clone, Debug)]
pub struct Survey {
    /// The kernel's family.
    pub family: &'static str,
    /// The kernel.
    pub kernel: String,
    /// How many mutants of each kind there are, of which these are some or all.
    pub possible: BTreeMap<Kind, usize>,
    /// Those that were tried.
    pub outcomes: Vec<Outcome>,
}

/// How many of the mutants of a kind fell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Score {
    /// Tried.
    pub tried: usize,
    /// Noticed, by whom.
    pub killed: BTreeMap<Killer, usize>,
    /// On the list of equivalents.
    pub equivalent: usize,
    /// In a part of the kernel that no scene of this configuration comes to.
    pub unreached: usize,
    /// Noticed by nobody.
    pub survived: usize,
}

impl Score {
    /// How many were noticed.
    pub fn noticed(&self) -> usize {
        self.killed.values().sum()
    }

    /// The share that was noticed of those that are reached and no equivalents; all, where there
    /// are none.
    pub fn share(&self) -> f64 {
        let meant = self.noticed() + self.survived;
        if meant == 0 { 1.0 } else { self.noticed() as f64 / meant as f64 }
    }

    /// The two together.
    pub fn add(&mut self, other: &Score) {
        self.tried += other.tried;
        self.equivalent += other.equivalent;
        self.unreached += other.unreached;
        self.survived += other.survived;
        for (killer, count) in &other.killed {
            *self.killed.entry(*killer).or_default() += count;
        }
    }
}

impl Survey {
    /// The score of a kind.
    pub fn score(&self, kind: Kind) -> Score {
        let mut score = Score::default();
        for outcome in self.outcomes.iter().filter(|it| it.mutant.kind == kind) {
            score.tried += 1;
            match outcome.verdict {
                Verdict::Killed(killer) => *score.killed.entry(killer).or_default() += 1,
                Verdict::Equivalent(_) => score.equivalent += 1,
                Verdict::Unreached => score.unreached += 1,
                Verdict::Survived => score.survived += 1,
            }
        }
        score
    }

    /// The mutants that nobody noticed.
    pub fn survivors(&self) -> impl Iterator<Item = &Mutant> {
        let survived = self.outcomes.iter().filter(|it| matches!(it.verdict, Verdict::Survived));
        survived.map(|outcome| &outcome.mutant)
    }
}

/// So many of the mutants of a kind, chosen by a seed, in the order of the program; all, where
/// there are no more.
pub fn sample(mutants: &[Mutant], kind: Kind, count: usize, seed: u64) -> Vec<Mutant> {
    let of_kind: Vec<&Mutant> = mutants.iter().filter(|it| it.kind == kind).collect();
    let mut chosen = Dice::new(seed).shuffled(of_kind.len());
    chosen.truncate(count);
    chosen.sort_unstable();
    chosen.into_iter().map(|index| of_kind[index].clone()).collect()
}

/// Whether mutants are tried that the list of equivalents names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listed {
    /// Yes: at the same line others are noticed. Each of them takes long, for nobody stops it.
    Tried,
    /// The list is believed.
    Believed,
}

/// Tries so many mutants of each kind of a kernel, on all cores; calls `begin` with their number
/// and `done` after each. Of those only whose place in the source, `file.rs:line:column`, has this in it.
pub fn survey(
    kernel: &Configuration,
    (count, seed): (impl Fn(Kind) -> usize, u64),
    at: &str,
    listed: Listed,
    begin: impl FnOnce(usize),
    done: impl Fn() + Sync,
) -> Result<Survey, SceneError> {
    let trial = Trial::new(kernel)?;
    let mut all = every(trial.program());
    all.retain(|mutant| mutant.place.to_string().contains(at));
    let possible = |kind| (kind, all.iter().filter(|it| it.kind == kind).count());
    let chosen: Vec<Mutant> =
        Kind::ALL.into_iter().flat_map(|kind| sample(&all, kind, count(kind), seed)).collect();
    begin(chosen.len());
    let judge = |mutant: Mutant| {
        let known = trial.listed(&mutant).filter(|_| listed == Listed::Believed);
        let verdict = known.map_or_else(|| trial.judge(&mutant), Verdict::Equivalent);
        done();
        Outcome { mutant, verdict }
    };
    let mut outcomes: Vec<Outcome> = chosen.into_par_iter().map(judge).collect();
    if listed == Listed::Tried {
        no_more_than_listed(&mut outcomes);
    }
    Ok(Survey {
        family: kernel.family(),
        kernel: kernel.name(),
        possible: Kind::ALL.into_iter().map(possible).collect(),
        outcomes,
    })
}

/// Where more mutants are on an entry of the list than it speaks for, the last ones survived.
fn no_more_than_listed(outcomes: &mut [Outcome]) {
    let mut found: HashMap<*const Equivalent, usize> = HashMap::new();
    for outcome in outcomes {
        let Verdict::Equivalent(known) = outcome.verdict else { continue };
        let count = found.entry(known).or_default();
        *count += 1;
        if *count > known.at_most {
            outcome.verdict = Verdict::Survived;
        }
    }
}
