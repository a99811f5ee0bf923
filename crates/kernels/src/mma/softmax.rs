//! The guarded softmax of a warp's rows.
//!
//! As in the Hopper kernel, the reference of a row is the exact maximum of its first key block, and
//! later blocks compute `2^(s - reference)` without a new maximum. A block whose sum exceeds a
//! bound in any row of the warp is recomputed with a new, exact maximum. Scores are not kept for
//! that: recomputing `QK^T` is cheaper than holding their registers in every other block.

use ptx::{Builder, Element, Expression, F32, Pred, Reg, WarpAccumulator, WarpFragment};

use super::Mma;
use crate::attention::rows::{Finished, Reference, finish};
use crate::attention::scores::ScoreRule;
use crate::attention::softmax::bound;

/// The softmax state of a thread's rows: two rows for each tile.
pub(super) struct Softmax {
    /// The largest allowed sum of a block's exponentials.
    bound: f32,
    scale_log2: Reg<F32>,
    /// The reference of a row that has seen no key, and the least one of any row.
    least: f32,
    /// The negated reference of each row, scaled: added to its scaled scores.
    offset: Vec<Reg<F32>>,
    /// The thread's part of each row's sum of exponentials.
    sum: Vec<Reg<F32>>,
}

impl Softmax {
    pub(super) fn new(k: &mut Builder, mma: &Mma, scores: &ScoreRule) -> Self {
        let bound = match mma.accumulate {
            // f16 accumulators of `PV` must not overflow either: with this bound, values may be as
            // large as a thousand.
            Element::F16 => 64.0,
            _ => bound(mma.element),
        };
        let rows = mma.thread_rows();
        let (scale_log2, least) = (scores.scale_log2, scores.least_scaled_reference());
        let nothing = k.eval(scale_log2 * -least);
        Softmax {
            bound,
            scale_log2,
            least,
            offset: (0..rows).map(|_| k.variable(nothing)).collect(),
            sum: (0..rows).map(|_| k.variable(0.0)).collect(),
        }
    }

    /// Sets the reference of each row to the exact maximum of its first block.
    pub(super) fn begin(&self, k: &mut Builder, scores: &WarpAccumulator) {
        for (row, offset) in self.offset.iter().enumerate() {
            let maximum = row_maximum(k, scores, row);
            k.set(*offset, -(maximum.maximum(self.least) * self.scale_log2));
        }
    }

    /// Computes `2^((s - reference) * scale)` of every score, rounds it into `p`, and leaves the
    /// thread's sums in `sums`.
    pub(super) fn exponentials(
        &self,
        k: &mut Builder,
        scores: &WarpAccumulator,
        p: &WarpFragment,
        sums: &[Reg<F32>],
    ) {
        let mut begun = vec![false; sums.len()];
        for (tile, group, cell) in scores.cells() {
            for half in 0..2 {
                let row = 2 * tile + half;
                let exponents =
                    cell.pair(half).map(|score| k.fma(score, self.scale_log2, self.offset[row]));
                let weights = exponents.map(|exponent| k.exp2(exponent));
                p.set_pair(k, row, group, weights);
                if begun[row] {
                    k.set(sums[row], sums[row] + weights[0]);
                    k.set(sums[row], sums[row] + weights[1]);
                } else {
                    k.set(sums[row], weights[0] + weights[1]);
                    begun[row] = true;
                }
            }
        }
    }

    /// Returns whether some row's sum, in any lane, exceeds the bound. NaN does not: its row is NaN
    /// anyway.
    pub(super) fn exceeds(&self, k: &mut Builder, sums: &[Reg<F32>]) -> Reg<Pred> {
        let mut largest = sums[0];
        for sum in &sums[1..] {
            largest = k.eval(largest.maximum(*sum));
        }
        k.any(largest.greater(self.bound))
    }

    /// Raises the reference of each row to the block's exact maximum, and rescales sums and output.
    pub(super) fn raise(
        &self,
        k: &mut Builder,
        scores: &WarpAccumulator,
        output: &WarpAccumulator,
    ) {
        for row in 0..self.offset.len() {
            let maximum = row_maximum(k, scores, row);
            let offset = k.eval(self.offset[row].minimum(-(maximum * self.scale_log2)));
            let factor = k.exp2(offset - self.offset[row]);
            k.set(self.offset[row], offset);
            k.set(self.sum[row], self.sum[row] * factor);
            for element in output.row(row) {
                k.set(element, element * factor);
            }
        }
    }

    /// Adds a block's sums to those of the rows.
    pub(super) fn add(&self, k: &mut Builder, sums: &[Reg<F32>]) {
        for (sum, part) in self.sum.iter().zip(sums) {
            k.set(*sum, *sum + *part);
        }
    }

    /// Finishes the rows, with a sink in units of log2 where there is one.
    pub(super) fn finish(&self, k: &mut Builder, sink: Option<Reg<F32>>) -> Vec<Finished> {
        let rows = self.sum.iter().zip(&self.offset);
        rows.map(|(sum, offset)| {
            let sum = k.reduce_lanes(*sum, 4, |a, b| a + b);
            let reference = k.eval(-*offset);
            finish(k, Reference::Maximum(reference), sum, sink)
        })
        .collect()
    }
}

/// Returns the largest score of a row, over the four lanes that share it.
fn row_maximum(k: &mut Builder, scores: &WarpAccumulator, row: usize) -> Reg<F32> {
    let mut chains: [Option<Reg<F32>>; 2] = [None; 2];
    for (index, element) in scores.row(row).enumerate() {
        let chain = &mut chains[index % 2];
        *chain = Some(match *chain {
            Some(largest) => k.eval(largest.maximum(element)),
            None => element,
        });
    }
    let [first, second] = chains.map(|chain| chain.expect("a cell has two columns"));
    let maximum = k.eval(first.maximum(second));
    k.reduce_lanes(maximum, 4, |a, b| a.maximum(b))
}
