//! Mistakes in the kernels of every family are noticed: all of them where something orders or
//! waits, and of wrong values a fixed sample. `flashcore mutate KERNEL` tries the others.

use std::collections::BTreeMap;

use flashcore_testing::mutant::{
    EQUIVALENTS, Equivalent, Kind, Score, Verdict, every, families, subjects, survey,
};

/// How many wrong values are tried of each configuration.
const VALUES: usize = 30;

/// The share of these that is noticed, where it is not the 95 % that it should be: a little less than
/// what was reached, for the sample is another one whenever a kernel changes.
const NOTICED: [(&str, f64); 8] = [
    ("forward", 0.86),
    ("prefill", 0.89),
    ("mma", 0.81),
    ("decode", 0.76),
    ("append", 0.80),
    ("sequencer", 0.80),
    ("backward", 0.65),
    ("backward-mma", 0.55),
];

fn count(kind: Kind) -> usize {
    if kind == Kind::Value { VALUES } else { usize::MAX }
}

#[test]
fn mistakes_are_noticed_in_every_family() {
    let mut survivors = Vec::new();
    let mut scores: BTreeMap<(&str, Kind), Score> = BTreeMap::new();
    let mut listed: Vec<&Equivalent> = Vec::new();
    for kernel in subjects() {
        let found = survey(&kernel, count, 1, |_| (), || ()).unwrap();
        for kind in Kind::ALL {
            scores.entry((found.family, kind)).or_default().add(&found.score(kind));
        }
        listed.extend(found.outcomes.iter().filter_map(|it| match it.verdict {
            Verdict::Equivalent(known) => Some(known),
            _ => None,
        }));
        survivors.extend(found.survivors().map(|it| (it.kind, format!("{}: {it}", found.kernel))));
    }
    let missed: Vec<&str> = (survivors.iter())
        .filter(|(kind, _)| *kind != Kind::Value)
        .map(|(_, text)| text.as_str())
        .collect();
    assert!(missed.is_empty(), "not noticed:\n{}", missed.join("\n"));
    for family in families() {
        let score = &scores[&(family, Kind::Value)];
        let least =
            NOTICED.iter().find(|(name, _)| *name == family).map_or(0.95, |(_, share)| *share);
        assert!(
            score.tried >= VALUES && score.share() >= least,
            "{family}: {score:?}\n{survivors:?}"
        );
    }
    let stale = EQUIVALENTS.iter().filter(|it| it.kind != Kind::Value && !listed.contains(it));
    let stale: Vec<_> = stale.collect();
    assert!(stale.is_empty(), "nobody is on the list for {stale:#?}");
}

/// What is tried is the same every time, and all there is where all is asked for.
#[test]
fn mutants_are_listed_in_order() {
    use flashcore_testing::mutant::sample;
    let program = subjects()[0].program().unwrap();
    let all = every(&program);
    for kind in Kind::ALL {
        let of_kind = all.iter().filter(|it| it.kind == kind).count();
        assert!(of_kind > 50, "{kind:?}");
        assert_eq!(sample(&all, kind, usize::MAX, 3).len(), of_kind);
        let sites = |seed| -> Vec<usize> {
            sample(&all, kind, 20, seed).iter().map(|it| it.site).collect()
        };
        assert_eq!(sites(3), sites(3));
        assert_ne!(sites(3), sites(4));
        assert!(sites(3).is_sorted());
    }
}

/// A mutant differs from the original in one place.
#[test]
fn a_mutant_changes_one_statement() {
    let program = subjects()[0].program().unwrap();
    let count = program.instruction_count();
    for mutant in every(&program).iter().filter(|it| it.kind == Kind::Delete) {
        assert_eq!(mutant.apply(&program).instruction_count(), count - 1, "{mutant}");
    }
}
