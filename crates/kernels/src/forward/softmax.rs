//! The guarded softmax.
//!
//! The row maximum is only there to keep the exponentials in range, and `f32`
//! and `bf16` have range to spare. So the exact maximum of a row is taken in its
//! first block and stays its *reference*; later blocks take `2^(s - reference)`
//! straight away, with no maximum, no exchange between lanes and no rescaling.
//! The sum of a block, which is needed anyway, is the guard: if it exceeds a
//! bound in any row of the warp, the block is done again
//! around a new, exact reference, and sum and output are rescaled.
//!
//! Scores stay untouched until the guard has passed, since the slow path needs
//! them again: probabilities go into registers of their own.

use ptx::{Accumulator, Builder, Choose, Element, Expression, F32, Fragment, Pred, Reg, Value};

use super::Forward;

/// The state of a thread's two rows.
pub(super) struct Softmax {
    /// A block's sum beyond this is too large for the element.
    bound: f32,
    slow_path_apart: bool,
    scale_log2: Reg<F32>,
    /// What is subtracted from the scores of each row, before scaling.
    reference: [Reg<F32>; 2],
    /// The thread's part of each row's sum.
    sum: [Reg<F32>; 2],
}

/// How the output must be rescaled, where the guard tripped.
pub(super) struct Rescale {
    needed: Reg<Pred>,
    factor: [Reg<F32>; 2],
}

/// A reference that is finite where a row has seen nothing: minus infinity
/// minus itself would not be a number.
const NOTHING_SEEN: f32 = -1e30;

impl Softmax {
    pub(super) fn new(k: &mut Builder, forward: &Forward, scale_log2: Reg<F32>) -> Self {
        let bound = match forward.element {
            // The sum bounds each element, and 2^15 leaves f16 a margin of two.
            Element::F16 => 32_768.0,
            _ => (1u32 << 30) as f32,
        };
        let pair = |k: &mut Builder| [k.register(), k.register()];
        let slow_path_apart = forward.form.slow_path_apart;
        Softmax { bound, slow_path_apart, scale_log2, reference: pair(k), sum: pair(k) }
    }

    /// Starts a row: its exact maximum becomes its reference.
    pub(super) fn first_block(&mut self, k: &mut Builder, scores: &Accumulator, p: &Fragment) {
        for row in 0..2 {
            let maximum = row_maximum(k, scores, row);
            k.set(self.reference[row], maximum.maximum(NOTHING_SEEN));
        }
        let sums = self.exponentials(k, scores, p);
        for row in 0..2 {
            k.set(self.sum[row], sums[row]);
        }
    }

    /// Adds a block.
    pub(super) fn block(&mut self, k: &mut Builder, scores: &Accumulator, p: &Fragment) -> Rescale {
        let factor = [k.variable(1.0), k.variable(1.0)];
        let (sums, needed) = if self.slow_path_apart {
            let sums = self.exponentials(k, scores, p).map(|sum| k.variable(sum));
            let needed = self.beyond(k, sums, self.bound);
            k.if_(needed, |k| {
                self.raise(k, scores, factor);
                let again = self.exponentials(k, scores, p);
                for row in 0..2 {
                    k.set(sums[row], again[row]);
                }
            });
            (sums, needed)
        } else {
            let sums = [k.register::<F32>(), k.register()];
            let raised = k.variable(Value::<Pred>::from(false));
            let bound = k.variable(self.bound);
            // The exit stands last, or the assembler would copy what is before it.
            k.loop_(|k| {
                k.if_(raised, |k| {
                    self.raise(k, scores, factor);
                    // Once is enough: nothing is beyond infinity.
                    k.set(bound, f32::INFINITY);
                });
                let found = self.exponentials(k, scores, p);
                for row in 0..2 {
                    k.set(sums[row], found[row]);
                }
                let beyond = self.beyond(k, sums, bound);
                k.break_if(!beyond);
                k.set(raised, true);
            });
            (sums, raised)
        };
        for row in 0..2 {
            k.set(self.sum[row], self.sum[row] + sums[row]);
        }
        Rescale { needed, factor }
    }

    /// Whether any row of the warp has a sum beyond a bound. A sum that is not
    /// a number is not: its row is lost, and no reference would save it.
    fn beyond(
        &self,
        k: &mut Builder,
        sums: [Reg<F32>; 2],
        bound: impl Into<Value<F32>>,
    ) -> Reg<Pred> {
        let largest = k.eval(sums[0].maximum(sums[1]));
        k.any(bound.into().less(largest))
    }

    /// Takes the block's exact maximum into each row's reference; `factor` is
    /// what the row's sum was multiplied with, and its output must be.
    fn raise(&self, k: &mut Builder, scores: &Accumulator, factor: [Reg<F32>; 2]) {
        for row in 0..2 {
            let maximum = row_maximum(k, scores, row);
            let reference = k.eval(self.reference[row].maximum(maximum));
            let lowered = k.exp2((self.reference[row] - reference) * self.scale_log2);
            k.set(factor[row], lowered);
            k.set(self.reference[row], reference);
            k.set(self.sum[row], self.sum[row] * lowered);
        }
    }

    /// `2^((s - reference) * scale)` of every score, rounded into `p`, and the
    /// thread's sums of them: two chains a row, so that additions overlap.
    fn exponentials(&self, k: &mut Builder, scores: &Accumulator, p: &Fragment) -> [Reg<F32>; 2] {
        let offset = self.reference.map(|reference| k.eval(-(reference * self.scale_log2)));
        let mut chains: [[Option<Reg<F32>>; 2]; 2] = [[None; 2]; 2];
        for (pair, registers) in scores.registers().chunks(2).enumerate() {
            let row = Accumulator::row_of(2 * pair);
            let mut weights = Vec::new();
            for (score, chain) in registers.iter().zip(&mut chains[row]) {
                let exponent = k.fma(*score, self.scale_log2, offset[row]);
                let weight = k.exp2(exponent);
                *chain = Some(match *chain {
                    Some(sum) => k.eval(sum + weight),
                    None => weight,
                });
                weights.push(weight);
            }
            p.set_pair(k, pair, weights[0], weights[1]);
        }
        chains.map(|chain| {
            let [first, second] = chain.map(|sum| sum.expect("blocks have columns"));
            k.eval(first + second)
        })
    }

    /// Ends the rows: the factors of their outputs, and their log-sum-exps. A
    /// row that saw nothing is zero, with log-sum-exp minus infinity. A sink, in
    /// units of log2, takes its part of the sum and adds nothing to the output.
    pub(super) fn finish(&self, k: &mut Builder, sink: Option<Reg<F32>>) -> [[Reg<F32>; 2]; 2] {
        let mut factors = Vec::new();
        let mut log_sums = Vec::new();
        for row in 0..2 {
            let sum = k.reduce_lanes(self.sum[row], 4, |a, b| a + b);
            if let Some(sink) = sink {
                let (factor, log_sum) = self.finish_beside(k, row, sum, sink);
                factors.push(factor);
                log_sums.push(log_sum);
                continue;
            }
            let empty = k.eval(sum.equals(0.0));
            let reciprocal = k.reciprocal(sum);
            factors.push(k.eval(empty.choose::<F32>(0.0, reciprocal)));
            let log2 = k.log2(sum);
            let natural = k.fma(self.reference[row], self.scale_log2, log2);
            let natural = k.eval(natural * std::f32::consts::LN_2);
            log_sums.push(k.eval(empty.choose::<F32>(f32::NEG_INFINITY, natural)));
        }
        [[factors[0], factors[1]], [log_sums[0], log_sums[1]]]
    }

    /// The factor and the log-sum-exp of a row with a sink, which may be far above
    /// the row's reference or far below.
    fn finish_beside(
        &self,
        k: &mut Builder,
        row: usize,
        sum: Reg<F32>,
        sink: Reg<F32>,
    ) -> (Reg<F32>, Reg<F32>) {
        let reference = k.eval(self.reference[row] * self.scale_log2);
        let top = k.eval(reference.maximum(sink));
        let lowered = k.exp2(reference - top);
        let beside = k.exp2(sink - top);
        let total = k.fma(sum, lowered, beside);
        let empty = k.eval(total.equals(0.0));
        let reciprocal = k.reciprocal(total);
        let factor = k.eval(empty.choose::<F32>(0.0, lowered * reciprocal));
        let log2 = k.log2(total);
        let natural = k.eval((top + log2) * std::f32::consts::LN_2);
        (factor, k.eval(empty.choose::<F32>(f32::NEG_INFINITY, natural)))
    }
}

impl Rescale {
    /// Rescales the output, once the products that were in flight have landed.
    pub(super) fn apply(&self, k: &mut Builder, output: &Accumulator) {
        k.if_(self.needed, |k| {
            for (index, element) in output.registers().iter().enumerate() {
                k.set(*element, *element * self.factor[Accumulator::row_of(index)]);
            }
        });
    }
}

/// The largest score of a row, over the four lanes that share it: four chains,
/// so that comparisons overlap.
fn row_maximum(k: &mut Builder, scores: &Accumulator, row: usize) -> Reg<F32> {
    let elements: Vec<Reg<F32>> = (scores.registers().iter().enumerate())
        .filter(|(index, _)| Accumulator::row_of(*index) == row)
        .map(|(_, element)| *element)
        .collect();
    let mut level = elements;
    let mut chains: Vec<Reg<F32>> = level.drain(..4.min(level.len())).collect();
    for (index, element) in level.into_iter().enumerate() {
        let chain = &mut chains[index % 4];
        *chain = k.eval(chain.maximum(element));
    }
    let mut maximum = chains[0];
    for chain in &chains[1..] {
        maximum = k.eval(maximum.maximum(*chain));
    }
    k.reduce_lanes(maximum, 4, |a, b| a.maximum(b))
}
