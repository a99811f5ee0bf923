//! The effect of each parameter on speed, from pairs of measured configurations that differ in that
//! parameter only.

use std::collections::BTreeMap;

use serde::Serialize;

use super::log::Record;
use super::space::{Gene, Genome};
use crate::statistics::median;

/// The effect of changing one parameter.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Effect {
    /// The parameter that was changed.
    pub gene: Gene,
    /// From which value to which.
    pub change: [u32; 2],
    /// The speed after over the speed before, in the median of all pairs.
    pub speedup: f64,
    /// The largest and the smallest speedup of any pair.
    pub range: [f64; 2],
    /// The number of pairs.
    pub pairs: usize,
}

/// The effects of going from one value to the next one that was measured, the largest first.
pub fn effects(records: &[Record]) -> Vec<Effect> {
    let mut times: BTreeMap<Genome, f64> = BTreeMap::new();
    for record in records {
        if let Some(milliseconds) = record.milliseconds() {
            times.insert(record.genome, milliseconds);
        }
    }
    let mut ratios: BTreeMap<(Gene, u32, u32), Vec<f64>> = BTreeMap::new();
    for (genome, before) in &times {
        for gene in Gene::ALL {
            let here = genome.get(gene);
            let larger = gene.values().into_iter().filter(|value| *value > here);
            // To the next larger value that was measured with all other parameters equal.
            let next = larger.map(|value| (value, genome.with(gene, value)));
            let mut next = next.filter(|(value, other)| other.get(gene) == *value);
            let found = next.find_map(|(value, other)| Some((value, times.get(&other)?)));
            if let Some((value, after)) = found {
                ratios.entry((gene, here, value)).or_default().push(before / after);
            }
        }
    }
    let mut effects: Vec<Effect> = ratios
        .into_iter()
        .map(|((gene, from, to), ratios)| Effect {
            gene,
            change: [from, to],
            speedup: median(&ratios),
            range: [
                ratios.iter().copied().fold(f64::INFINITY, f64::min),
                ratios.iter().copied().fold(0.0, f64::max),
            ],
            pairs: ratios.len(),
        })
        .collect();
    effects.sort_by(|a, b| b.speedup.ln().abs().total_cmp(&a.speedup.ln().abs()));
    effects
}

#[cfg(test)]
mod tests {
    use super::super::log::TrialOutcome;
    use super::*;

    #[test]
    fn pairs_that_differ_in_one_thing_tell_its_effect() {
        let record = |genome, milliseconds| Record {
            problem: String::new(),
            machine: String::new(),
            genome,
            kernel: None,
            generation: 0,
            predicted: None,
            fate: TrialOutcome::Measured { milliseconds, rounds: 1 },
        };
        let two = Genome::POOR.with(Gene::Warpgroups, 2);
        let records = [
            record(Genome::POOR, 4.0),
            record(two, 2.0),
            record(two.with(Gene::PingPong, 1), 1.0),
            record(two.with(Gene::KeyBlock, 64), 1.6),
        ];
        let effects = effects(&records);
        let of = |gene| effects.iter().find(|it| it.gene == gene).unwrap();
        assert_eq!((of(Gene::PingPong).speedup, of(Gene::PingPong).pairs), (2.0, 1));
        assert_eq!(of(Gene::KeyBlock).change, [16, 64]);
        assert_eq!(of(Gene::KeyBlock).speedup, 1.25);
        assert_eq!(of(Gene::Warpgroups).change, [1, 2]);
    }
}
