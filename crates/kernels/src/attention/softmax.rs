//! The guarded softmax of a thread's rows.
//!
//! The row maximum is only there to keep the exponentials in range, and `f32`
//! and `bf16` have range to spare. So the exact maximum of a row is taken in its
//! first block and stays its *reference*; later blocks take `2^(s - reference)`
//! straight away, with no maximum, no exchange between lanes and no rescaling.
//! The sum of a block, which is needed anyway, is the guard: if it exceeds a
//! bound in any row of the warp, the block is done again
//! around a new, exact reference, and sum and output are rescaled.
//!
//! Four neighbouring lanes share a row. Scores stay untouched, since the slow
//! path needs them again: probabilities go into registers of their own.

use ptx::{Builder, Element, Expression, F32, Pred, Reg, Value};

use super::Score;
use super::rows::{Finished, NOTHING_SEEN, Reference, finish};

/// The state of a thread's rows.
pub(crate) struct Softmax {
    scale_log2: Reg<F32>,
    /// The binary logarithm of what weights and sums are multiplied with, for an element that has
    /// more room above one than below it.
    lift: f32,
    /// What is subtracted from the scores of each row, before scaling.
    reference: Vec<Reg<F32>>,
    /// The thread's part of each row's sum.
    sum: Vec<Reg<F32>>,
}

/// A block's sum beyond this is too large for probabilities of an element.
pub(crate) fn bound(element: Element) -> f32 {
    match element {
        // The sum bounds each element, and 2^15 leaves f16 a margin of two.
        Element::F16 => 32_768.0,
        _ => (1u32 << 30) as f32,
    }
}

impl Softmax {
    /// Registers for so many rows; [`begin`](Softmax::begin) and [`start`](Softmax::start) give
    /// them values.
    pub(crate) fn new(k: &mut Builder, rows: usize, scale_log2: Reg<F32>) -> Self {
        let reference = (0..rows).map(|_| k.register()).collect();
        let sum = (0..rows).map(|_| k.register()).collect();
        Softmax { scale_log2, lift: 0.0, reference, sum }
    }

    /// The same with weights `2^lift` times as large.
    pub(crate) fn lifted(self, lift: f32) -> Self {
        Softmax { lift, ..self }
    }

    /// The rows have seen nothing.
    pub(crate) fn clear(&self, k: &mut Builder) {
        for (reference, sum) in self.reference.iter().zip(&self.sum) {
            k.set(*reference, NOTHING_SEEN);
            k.set(*sum, 0.0);
        }
    }

    /// The exact maximum of a first block becomes the rows' reference.
    pub(crate) fn begin(&self, k: &mut Builder, scores: &[Score]) {
        for (row, reference) in self.reference.iter().enumerate() {
            let maximum = row_maximum(k, scores, row);
            k.set(*reference, maximum.maximum(NOTHING_SEEN));
        }
    }

    /// The sums of a first block are the rows'.
    pub(crate) fn start(&self, k: &mut Builder, sums: &[Reg<F32>]) {
        for (sum, first) in self.sum.iter().zip(sums) {
            k.set(*sum, *first);
        }
    }

    /// Adds a block's sums.
    pub(crate) fn add(&self, k: &mut Builder, sums: &[Reg<F32>]) {
        for (sum, part) in self.sum.iter().zip(sums) {
            k.set(*sum, *sum + *part);
        }
    }

    /// `2^((s - reference) * scale)` of every score, given to `store` in pairs of neighbours of a
    /// row in the order of the scores, and the thread's sums of them: two chains a row, so that
    /// additions overlap.
    pub(crate) fn exponentials(
        &self,
        k: &mut Builder,
        scores: &[Score],
        mut store: impl FnMut(&mut Builder, usize, [Reg<F32>; 2]),
    ) -> Vec<Reg<F32>> {
        let offset: Vec<Reg<F32>> = (self.reference.iter())
            .map(|reference| {
                let offset = -(*reference * self.scale_log2);
                if self.lift == 0.0 { k.eval(offset) } else { k.eval(offset + self.lift) }
            })
            .collect();
        let mut chains: Vec<[Option<Reg<F32>>; 2]> = vec![[None; 2]; offset.len()];
        for (index, pair) in scores.chunks_exact(2).enumerate() {
            let row = pair[0].row;
            let mut weights = [pair[0].register, pair[1].register];
            for (weight, chain) in weights.iter_mut().zip(&mut chains[row]) {
                let exponent = k.fma(*weight, self.scale_log2, offset[row]);
                *weight = k.exp2(exponent);
                *chain = Some(match *chain {
                    Some(sum) => k.eval(sum + *weight),
                    None => *weight,
                });
            }
            store(k, index, weights);
        }
        let sum = |chain: [Option<Reg<F32>>; 2]| {
            let [first, second] = chain.map(|sum| sum.expect("every row has columns"));
            k.eval(first + second)
        };
        chains.into_iter().map(sum).collect()
    }

    /// Whether any row of the warp has a sum beyond a bound. A sum that is not
    /// a number is not: its row is lost, and no reference would save it.
    pub(crate) fn exceeds(
        &self,
        k: &mut Builder,
        sums: &[Reg<F32>],
        bound: impl Into<Value<F32>>,
    ) -> Reg<Pred> {
        let mut largest = sums[0];
        for sum in &sums[1..] {
            largest = k.eval(largest.maximum(*sum));
        }
        k.any(bound.into().less(largest))
    }

    /// Takes a block's exact maximum into each row's reference; `factors` become
    /// what the rows' sums were multiplied with, and their outputs must be.
    pub(crate) fn raise(&self, k: &mut Builder, scores: &[Score], factors: &[Reg<F32>]) {
        for (row, factor) in factors.iter().enumerate() {
            let maximum = row_maximum(k, scores, row);
            let reference = k.eval(self.reference[row].maximum(maximum));
            let lowered = k.exp2((self.reference[row] - reference) * self.scale_log2);
            k.set(*factor, lowered);
            k.set(self.reference[row], reference);
            k.set(self.sum[row], self.sum[row] * lowered);
        }
    }

    /// The references of all rows, and then the thread's parts of their sums.
    pub(crate) fn state(&self) -> Vec<Reg<F32>> {
        [&self.reference[..], &self.sum].concat()
    }

    /// Takes in a reference and a part of a sum of a row over other keys. Its output must be
    /// multiplied with the first factor, that over the other keys with the second.
    pub(crate) fn take_in(
        &self,
        k: &mut Builder,
        row: usize,
        [other, other_sum]: [Reg<F32>; 2],
    ) -> [Reg<F32>; 2] {
        let (reference, sum) = (self.reference[row], self.sum[row]);
        let higher = k.eval(reference.maximum(other));
        let lowered = k.exp2((reference - higher) * self.scale_log2);
        let other_lowered = k.exp2((other - higher) * self.scale_log2);
        let own = k.eval(sum * lowered);
        let total = k.fma(other_sum, other_lowered, own);
        k.set(sum, total);
        k.set(reference, higher);
        [lowered, other_lowered]
    }

    /// Ends the rows, with a sink in units of log2 where there is one.
    pub(crate) fn finish(&self, k: &mut Builder, sink: Option<Reg<F32>>) -> Vec<Finished> {
        let rows = self.sum.iter().zip(&self.reference);
        rows.map(|(sum, reference)| {
            let sum = k.reduce_lanes(*sum, 4, |a, b| a + b);
            let (reference, scale_log2) = (*reference, self.scale_log2);
            if self.lift == 0.0 {
                return finish(k, Reference::Guarded { reference, scale_log2 }, sum, sink);
            }
            // Powers of two: exact.
            let lower = (-self.lift).exp2();
            let sum = k.eval(sum * lower);
            let row = finish(k, Reference::Guarded { reference, scale_log2 }, sum, sink);
            Finished { factor: k.eval(row.factor * lower), ..row }
        })
        .collect()
    }
}

/// The largest score of a row, over the four lanes that share it: four chains,
/// so that comparisons overlap.
pub(crate) fn row_maximum(k: &mut Builder, scores: &[Score], row: usize) -> Reg<F32> {
    let mut elements = scores.iter().filter(|score| score.row == row).map(|score| score.register);
    let mut chains: Vec<Reg<F32>> = elements.by_ref().take(4).collect();
    let count = chains.len();
    for (index, element) in elements.enumerate() {
        let chain = &mut chains[index % count];
        *chain = k.eval(chain.maximum(element));
    }
    let mut maximum = chains[0];
    for chain in &chains[1..] {
        maximum = k.eval(maximum.maximum(*chain));
    }
    k.reduce_lanes(maximum, 4, |a, b| a.maximum(b))
}
