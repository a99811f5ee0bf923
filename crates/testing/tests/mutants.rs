//! Mutation tests: mistakes in the kernels of every family must be detected. A fixed sample is
//! tried of mutants without or with weaker synchronisation, and of mutants with wrong values. With
//! `FLASHCORE_MUTANTS=all` all synchronisation and many values are tried; `flashcore mutate KERNEL`
//! tries the mutants of one kernel.

use std::collections::BTreeMap;

use flashcore_testing::mutant::{
    Equivalent, Kind, KnownEquivalents, Score, Survey, Verdict, equivalents, every, families,
    subjects, survey,
};
use kernels::{shipped, with_functions};
use ptx::Target;
use rayon::prelude::*;

/// Returns whether all synchronisation is tried.
fn everything() -> bool {
    std::env::var("FLASHCORE_MUTANTS").is_ok_and(|it| it == "all")
}

/// Returns how many mutants of a kind are tried of each configuration.
fn count(kind: Kind) -> usize {
    match (kind, everything()) {
        (Kind::Value, false) => 15,
        (Kind::Value, true) => 150,
        (Kind::Delete | Kind::Weaken, false) => 12,
        (Kind::Delete | Kind::Weaken, true) => usize::MAX,
    }
}

/// The smallest share of value mutants that must be detected.
const NOTICED: f64 = 0.95;
/// The allowance for a small sample, which changes with every change of a kernel and may be
/// unlucky.
const LUCK: f64 = 0.10;

#[test]
fn mistakes_are_noticed_in_every_family() {
    let mut survivors = Vec::new();
    let mut scores: BTreeMap<(&str, Kind), Score> = BTreeMap::new();
    let mut listed: Vec<&Equivalent> = Vec::new();
    let listed_are = if everything() { KnownEquivalents::Run } else { KnownEquivalents::Skip };
    // Kernels are surveyed in parallel, so that one uses the cores that another leaves idle.
    let surveys: Vec<Survey> = (subjects().into_par_iter())
        .map(|kernel| survey(&kernel, (count, 1), "", listed_are, |_| (), || ()).unwrap())
        .collect();
    for found in &surveys {
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
    let luck = if everything() { 0.0 } else { LUCK };
    for family in families() {
        let score = &scores[&(family, Kind::Value)];
        assert!(
            score.tried >= 15 && score.share().is_some_and(|it| it >= NOTICED - luck),
            "{family}: {score:?}\n{survivors:?}"
        );
    }
    if everything() {
        let stale =
            equivalents().iter().filter(|it| it.kind != Kind::Value && !listed.contains(it));
        let stale: Vec<_> = stale.collect();
        assert!(stale.is_empty(), "nobody is on the list for {stale:#?}");
    }
}

/// Every shipped family is a subject of mutation, or has no synchronisation. The kernel that
/// distributes tiles (`tile_sharer`) has a test of its own in `kernels/finder.rs`; products
/// exist for measurements only.
#[test]
fn whatever_orders_is_tried() {
    let elsewhere = ["tile_sharer", "single", "product"];
    let tried = families();
    let all = shipped(Target::SM_90A).into_iter().chain(with_functions());
    let mut others = BTreeMap::new();
    for kernel in all.filter(|it| !tried.contains(&it.family())) {
        others.entry(kernel.family()).or_insert(kernel);
    }
    assert!(others.contains_key("scalar"), "{:?}", others.keys());
    for (family, kernel) in others.into_iter().filter(|(family, _)| !elsewhere.contains(family)) {
        let orders = every(&kernel.program().unwrap());
        let orders = orders.iter().find(|it| it.kind != Kind::Value);
        assert!(orders.is_none(), "{family} is no subject: {}", orders.unwrap());
    }
}

/// The sample of mutants is the same every time, and it is complete when all are requested.
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
