//! Comparison of two runs: which differences exceed the noise.
//!
//! Clocks and power drift from run to run. If the same peers took part in both runs, their change
//! is taken as the drift of everything, and is removed before anything is called a change.

use serde::Serialize;

use super::{Cache, Results};
use crate::statistics::median;

/// How one candidate changed on one problem.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// The problem.
    pub problem: String,
    /// The candidate.
    pub candidate: String,
    /// The state of the caches.
    pub cache: Cache,
    /// Milliseconds in the first run and in the second.
    pub milliseconds: [f64; 2],
    /// The speed of the second over that of the first, without the drift.
    pub speedup: f64,
    /// The noise of the ratio.
    pub noise: f64,
    /// Whether it is more than noise.
    pub real: bool,
}

/// The comparison of two runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// How much slower the peers of both runs were in the second; 1 where there are none.
    pub drift: f64,
    /// How many measurements of peers that is the median of.
    pub anchors: usize,
    /// Every measurement that both runs have, except those of the peers that define the drift.
    pub changes: Vec<Change>,
    /// Why the two runs should not be compared lightly.
    pub warnings: Vec<String>,
}

/// Compares two runs.
pub fn compare(first: &Results, second: &Results) -> Comparison {
    let mut pairs = Vec::new();
    for before in &first.cells {
        let Some(after) = second.cells.iter().find(|it| it.problem == before.problem) else {
            continue;
        };
        for one in &before.measurements {
            let (Some(old), Some(two)) = (one.summary, after.find(&one.candidate, one.cache))
            else {
                continue;
            };
            let Some(new) = two.summary else { continue };
            pairs.push((before.problem.clone(), one, old, new));
        }
    }
    let is_peer = |name: &str| {
        let peer =
            |results: &Results| results.candidates.iter().any(|it| it.peer && it.name == name);
        peer(first) && peer(second)
    };
    let moved: Vec<f64> = pairs
        .iter()
        .filter(|(_, one, ..)| is_peer(&one.candidate))
        .map(|(_, _, old, new)| new.median / old.median)
        .collect();
    let has_others = pairs.iter().any(|(_, one, ..)| !is_peer(&one.candidate));
    let anchors = if has_others { moved.len() } else { 0 };
    let drift = if anchors > 0 { median(&moved) } else { 1.0 };
    // The spread of the peers' changes around the drift is noise between runs.
    let between = if anchors > 1 {
        let off: Vec<f64> = moved.iter().map(|it| (it / drift).ln().abs()).collect();
        median(&off) * 1.4826 * 2.0
    } else {
        0.0
    };
    let changes = pairs
        .into_iter()
        .filter(|(_, one, ..)| anchors == 0 || !is_peer(&one.candidate))
        .map(|(problem, one, old, new)| {
            let speedup = old.median / new.median * drift;
            // Each noise is that of a difference of two equal measurements; half of its square
            // belongs to one.
            let squares = (old.noise.powi(2) + new.noise.powi(2)) / 2.0 + between.powi(2);
            let noise = squares.sqrt();
            Change {
                problem,
                candidate: one.candidate.clone(),
                cache: one.cache,
                milliseconds: [old.median, new.median],
                speedup,
                noise,
                real: speedup.ln().abs() > noise,
            }
        })
        .collect();
    Comparison { drift, anchors, changes, warnings: warnings(first, second) }
}

fn warnings(first: &Results, second: &Results) -> Vec<String> {
    let mut warnings = Vec::new();
    let gpus = [first, second].map(|it| it.provenance.gpu.as_ref());
    if let [Some(one), Some(two)] = gpus {
        if one.name != two.name {
            warnings.push(format!("the GPUs differ: {} and {}", one.name, two.name));
        } else if one.uuid != two.uuid {
            warnings.push(format!("two different GPUs of the kind {}", one.name));
        }
        if one.driver != two.driver {
            warnings.push(format!("the drivers differ: {} and {}", one.driver, two.driver));
        }
    }
    if first.method.calls != second.method.calls {
        let [one, two] = [first, second].map(|it| it.method.calls);
        warnings.push(format!("samples are of {one} and of {two} calls"));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::super::tests::results;
    use super::*;

    #[test]
    fn noise_is_not_a_change_and_a_change_is_not_noise() {
        let first = results(&[("flashcore", 1.0), ("cudnn", 1.3)], 1);
        let again = results(&[("flashcore", 1.0), ("cudnn", 1.3)], 2);
        let comparison = compare(&first, &again);
        assert_eq!(comparison.anchors, 36);
        assert_eq!(comparison.changes.len(), 36);
        let alarms = comparison.changes.iter().filter(|it| it.real).count();
        assert!(alarms <= 2, "{alarms}: {comparison:?}");
        let faster = results(&[("flashcore", 0.95), ("cudnn", 1.3)], 3);
        let comparison = compare(&first, &faster);
        assert!(comparison.changes.iter().all(|it| it.real && it.speedup > 1.03));
    }

    /// Everything 4 % slower, peers as well: the GPU ran at another clock.
    #[test]
    fn what_moves_everyone_is_drift() {
        let first = results(&[("flashcore", 1.0), ("cudnn", 1.3)], 1);
        let hot = results(&[("flashcore", 1.04), ("cudnn", 1.352)], 2);
        let comparison = compare(&first, &hot);
        assert!((comparison.drift - 1.04).abs() < 0.003, "{}", comparison.drift);
        assert!(comparison.changes.iter().filter(|it| it.real).count() <= 2);
        // With nobody to measure by, it is a change.
        let alone = |factor, seed| results(&[("flashcore", factor)], seed);
        let comparison = compare(&alone(1.0, 1), &alone(1.04, 2));
        assert!(comparison.changes.iter().all(|it| it.real));
    }

    #[test]
    fn runs_that_differ_in_more_are_warned_about() {
        let first = results(&[("flashcore", 1.0)], 1);
        let mut second = first.clone();
        second.method.calls = 20;
        second.provenance.gpu.as_mut().unwrap().name = "another".to_owned();
        let warnings = compare(&first, &second).warnings;
        assert_eq!(warnings.len(), 2, "{warnings:?}");
    }
}
