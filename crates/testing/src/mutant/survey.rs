//! Surveys: many mutants of a kernel, and the mutation score.

use std::collections::{BTreeMap, HashMap};

use kernels::Configuration;
use rayon::prelude::*;

use super::{Equivalent, Killer, Kind, Mutant, Trial, Verdict, every};
use crate::rng::Rng;
use crate::scene::SceneError;

/// The outcome of one mutant.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The mutant.
    pub mutant: Mutant,
    /// The verdict on the mutant.
    pub verdict: Verdict,
}

/// The outcomes of the mutants of a kernel.
#[derive(Clone, Debug)]
pub struct Survey {
    /// The family of the kernel.
    pub family: &'static str,
    /// The name of the kernel.
    pub kernel: String,
    /// The number of mutants of each kind that exist.
    pub possible: BTreeMap<Kind, usize>,
    /// The outcomes of those that were tried.
    pub outcomes: Vec<Outcome>,
}

/// The mutation score of one kind of mutants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Score {
    /// The number of mutants tried.
    pub tried: usize,
    /// The number of noticed mutants, by what noticed them.
    pub killed: BTreeMap<Killer, usize>,
    /// The number of equivalent mutants.
    pub equivalent: usize,
    /// The number of mutants in parts of the kernel that no scene of this configuration reaches.
    pub unreached: usize,
    /// The number of mutants that nothing noticed.
    pub survived: usize,
}

impl Score {
    /// Returns the number of noticed mutants.
    pub fn noticed(&self) -> usize {
        self.killed.values().sum()
    }

    /// Returns the fraction noticed of the mutants that are reached and not equivalent; `None` if
    /// there are none.
    pub fn share(&self) -> Option<f64> {
        let meant = self.noticed() + self.survived;
        (meant > 0).then(|| self.noticed() as f64 / meant as f64)
    }

    /// Adds another score to this one.
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
    /// Returns the score of a kind.
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

    /// Returns the mutants that nothing noticed.
    pub fn survivors(&self) -> impl Iterator<Item = &Mutant> {
        let survived = self.outcomes.iter().filter(|it| matches!(it.verdict, Verdict::Survived));
        survived.map(|outcome| &outcome.mutant)
    }
}

/// Returns `count` of the mutants of a kind, chosen by a seed, in program order; all if there are
/// no more.
pub fn sample(mutants: &[Mutant], kind: Kind, count: usize, seed: u64) -> Vec<Mutant> {
    let of_kind: Vec<&Mutant> = mutants.iter().filter(|it| it.kind == kind).collect();
    let mut chosen = Rng::new(seed).shuffled(of_kind.len());
    chosen.truncate(count);
    chosen.sort_unstable();
    chosen.into_iter().map(|index| of_kind[index].clone()).collect()
}

/// Whether mutants that the list of equivalents names are tried as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KnownEquivalents {
    /// They are tried, because an entry may match other mutants of the same line, which are
    /// noticed. Those that are not noticed take long, since they run through every schedule.
    Run,
    /// They are skipped and counted as equivalent.
    Skip,
}

/// Tries up to `count(kind)` mutants of each kind of a kernel, on all cores, restricted to those
/// whose place in the source, `file.rs:line:column`, contains `at`. Calls `begin` with their number
/// and `done` after each.
pub fn survey(
    kernel: &Configuration,
    (count, seed): (impl Fn(Kind) -> usize, u64),
    at: &str,
    listed: KnownEquivalents,
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
        let known = trial.listed(&mutant).filter(|_| listed == KnownEquivalents::Skip);
        let verdict = known.map_or_else(|| trial.judge(&mutant), Verdict::Equivalent);
        done();
        Outcome { mutant, verdict }
    };
    let mut outcomes: Vec<Outcome> = chosen.into_par_iter().map(judge).collect();
    if listed == KnownEquivalents::Run {
        no_more_than_listed(&mut outcomes);
    }
    Ok(Survey {
        family: kernel.family(),
        kernel: kernel.name(),
        possible: Kind::ALL.into_iter().map(possible).collect(),
        outcomes,
    })
}

/// Counts the last mutants of an entry of the list as survivors where it matches more than it
/// allows.
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
