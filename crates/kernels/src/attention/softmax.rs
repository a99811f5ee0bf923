//! The guarded softmax of a thread's rows.
//!
//! The row maximum only keeps the exponentials in range, and `f32` and `bf16` have range to spare.
//! So the exact maximum of a row is taken in its first block and stays its *reference*; later
//! blocks compute `2^(s - reference)` right away, with no maximum, no exchange between lanes and no
//! rescaling. The sum of a block, which is needed anyway, is the guard: if it exceeds a bound in
//! any row of the warp, the block is done again relative to a new, exact maximum, and sum and
//! output are rescaled.
//!
//! Four neighbouring lanes share a row. Scores are left unchanged, since the slow path needs them
//! again: probabilities go into registers of their own.

use ptx::{Builder, Element, Expression, F32, Pred, Reg, Value};

use super::Score;
use super::rows::{Finished, Reference, finish};
use super::scores::CappedExponents;

/// The softmax state of a thread's rows.
pub(crate) struct Softmax {
    scale_log2: Reg<F32>,
    /// The reference of a row that has seen no key, and the least one of any row.
    least: Value<F32>,
    /// Binary logarithm of a factor on all probabilities and sums, for an element of P that has
    /// more range above one than below it.
    max_offset: f32,
    /// Reference of each row, in units of unscaled scores.
    reference: Vec<Reg<F32>>,
    /// The thread's part of each row's sum.
    sum: Vec<Reg<F32>>,
}

/// Returns the guard: the largest sum of a block for which probabilities are safe in this element.
pub(crate) fn bound(element: Element) -> f32 {
    match element {
        // The sum bounds each element, and 2^15 leaves f16 a margin of two.
        Element::F16 => 32_768.0,
        _ => (1u32 << 30) as f32,
    }
}

impl Softmax {
    /// Reserves registers for `rows` rows; [`begin`](Softmax::begin) and [`start`](Softmax::start)
    /// set them.
    pub(crate) fn new(
        k: &mut Builder,
        rows: usize,
        scale_log2: Reg<F32>,
        least: Value<F32>,
    ) -> Self {
        let reference = (0..rows).map(|_| k.register()).collect();
        let sum = (0..rows).map(|_| k.register()).collect();
        Softmax { scale_log2, least, max_offset: 0.0, reference, sum }
    }

    /// Multiplies all probabilities and sums by `2^max_offset`.
    pub(crate) fn with_max_offset(self, max_offset: f32) -> Self {
        Softmax { max_offset, ..self }
    }

    /// Resets the rows to having seen no key.
    pub(crate) fn clear(&self, k: &mut Builder) {
        for (reference, sum) in self.reference.iter().zip(&self.sum) {
            k.set(*reference, self.least.clone());
            k.set(*sum, 0.0);
        }
    }

    /// Sets the rows' references to their exact maxima in a first block.
    pub(crate) fn begin(&self, k: &mut Builder, scores: &[Score]) {
        for (row, reference) in self.reference.iter().enumerate() {
            let maximum = row_maximum(k, scores, row);
            k.set(*reference, maximum.maximum(self.least.clone()));
        }
    }

    /// Sets the rows' sums to those of a first block.
    pub(crate) fn start(&self, k: &mut Builder, sums: &[Reg<F32>]) {
        for (sum, first) in self.sum.iter().zip(sums) {
            k.set(*sum, *first);
        }
    }

    /// Adds a block's sums to the rows'.
    pub(crate) fn add(&self, k: &mut Builder, sums: &[Reg<F32>]) {
        for (sum, part) in self.sum.iter().zip(sums) {
            k.set(*sum, *sum + *part);
        }
    }

    /// Computes `2^((s - reference) * scale)` of every score. Passes them to `store` as pairs of
    /// neighbouring columns, in the order of the scores, and returns the thread's sums of each row.
    /// A row's sum has two dependency chains, so that additions overlap.
    pub(crate) fn exponentials(
        &self,
        k: &mut Builder,
        scores: &[Score],
        store: impl FnMut(&mut Builder, usize, [Reg<F32>; 2]),
    ) -> Vec<Reg<F32>> {
        self.powers(k, scores, |k, score, offset| k.fma(score, self.scale_log2, offset), store)
    }

    /// Does the same as [`exponentials`](Softmax::exponentials) for products that are not
    /// capped yet.
    pub(crate) fn capped_exponentials(
        &self,
        k: &mut Builder,
        products: &[Score],
        exponents: &CappedExponents,
        store: impl FnMut(&mut Builder, usize, [Reg<F32>; 2]),
    ) -> Vec<Reg<F32>> {
        self.powers(k, products, |k, it, offset| exponents.exponent(k, it, offset), store)
    }

    /// Computes two to the power of `exponent(score, offset)`, where `offset` is the row's.
    fn powers(
        &self,
        k: &mut Builder,
        scores: &[Score],
        exponent: impl Fn(&mut Builder, Reg<F32>, Reg<F32>) -> Reg<F32>,
        mut store: impl FnMut(&mut Builder, usize, [Reg<F32>; 2]),
    ) -> Vec<Reg<F32>> {
        let offset: Vec<Reg<F32>> = (self.reference.iter())
            .map(|reference| {
                let offset = -(*reference * self.scale_log2);
                if self.max_offset == 0.0 {
                    k.eval(offset)
                } else {
                    k.eval(offset + self.max_offset)
                }
            })
            .collect();
        let mut chains: Vec<[Option<Reg<F32>>; 2]> = vec![[None; 2]; offset.len()];
        for (index, pair) in scores.chunks_exact(2).enumerate() {
            let row = pair[0].row;
            let mut weights = [pair[0].register, pair[1].register];
            for (weight, chain) in weights.iter_mut().zip(&mut chains[row]) {
                let power = exponent(k, *weight, offset[row]);
                *weight = k.exp2(power);
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

    /// Returns whether the sum of any row of the warp exceeds the bound. A NaN does not: its row is
    /// lost, and no reference would save it.
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

    /// Raises each row's reference to a block's exact maximum and rescales the rows' sums.
    /// `factors` receive the rescaling factors, by which the caller must multiply the outputs.
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

    /// Returns the references of all rows, then the thread's parts of their sums.
    pub(crate) fn state(&self) -> Vec<Reg<F32>> {
        [&self.reference[..], &self.sum].concat()
    }

    /// Merges a row with its partial result over other keys, given as reference and part of a sum.
    /// Returns the factors by which the row's output and the other output must be multiplied.
    pub(crate) fn merge_partial(
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

    /// Finishes the rows, with a sink in units of log2 where there is one.
    pub(crate) fn finish(&self, k: &mut Builder, sink: Option<Reg<F32>>) -> Vec<Finished> {
        let rows = self.sum.iter().zip(&self.reference);
        rows.map(|(sum, reference)| {
            let sum = k.reduce_lanes(*sum, 4, |a, b| a + b);
            let (reference, scale_log2) = (*reference, self.scale_log2);
            if self.max_offset == 0.0 {
                return finish(k, Reference::Guarded { reference, scale_log2 }, sum, sink);
            }
            // Multiplying by a power of two is exact.
            let lower = (-self.max_offset).exp2();
            let sum = k.eval(sum * lower);
            let row = finish(k, Reference::Guarded { reference, scale_log2 }, sum, sink);
            Finished { factor: k.eval(row.factor * lower), ..row }
        })
        .collect()
    }
}

/// Returns the largest score of a row, over the four lanes that share it. Four dependency chains
/// let comparisons overlap.
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
