//! The guarded softmax of a warp's rows.
//!
//! As in the Hopper kernel: a row's reference is the exact maximum of its first
//! key block, later blocks take `2^(s - reference)` straight away, and a block
//! whose sum exceeds a bound in any row of the warp is done again around an
//! exact maximum. Scores are not kept for that: the tensor cores make them
//! again, which is cheaper than the registers in every other block.

use ptx::{
    Builder, Choose, Comparison, Element, Expression, F32, Instruction, Operand, Pred, Reg, Type,
};

use super::Mma;
use super::products::{Cells, Probabilities};

/// The state of a thread's rows: two for each tile.
pub(super) struct Softmax {
    /// A block's sum beyond this is too large.
    bound: f32,
    scale_log2: Reg<F32>,
    /// The negative reference of each row, scaled: what is added to its scores.
    offset: Vec<Reg<F32>>,
    /// The thread's part of each row's sum.
    sum: Vec<Reg<F32>>,
}

/// A reference that is finite where a row has seen nothing: minus infinity
/// minus itself would not be a number.
const NOTHING_SEEN: f32 = -1e30;

impl Softmax {
    pub(super) fn new(k: &mut Builder, mma: &Mma, scale_log2: Reg<F32>) -> Self {
        let bound = match (mma.accumulate, mma.element) {
            // Sums of products with values must not overflow either: with as
            // little as this, values may be as large as a thousand.
            (Element::F16, _) => 64.0,
            // The sum bounds each element, and 2^15 leaves f16 a margin of two.
            (_, Element::F16) => 32_768.0,
            _ => (1u32 << 30) as f32,
        };
        let rows = 2 * mma.row_tiles;
        let nothing = k.eval(scale_log2 * -NOTHING_SEEN);
        Softmax {
            bound,
            scale_log2,
            offset: (0..rows).map(|_| k.variable(nothing)).collect(),
            sum: (0..rows).map(|_| k.variable(0.0)).collect(),
        }
    }

    /// Takes the exact maximum of the rows' first block as their reference.
    pub(super) fn begin(&self, k: &mut Builder, scores: &Cells) {
        for (row, offset) in self.offset.iter().enumerate() {
            let maximum = row_maximum(k, scores, row);
            k.set(*offset, -(maximum.maximum(NOTHING_SEEN) * self.scale_log2));
        }
    }

    /// `2^((s - reference) * scale)` of every score, rounded into `p`, and the
    /// thread's sums of them.
    pub(super) fn exponentials(
        &self,
        k: &mut Builder,
        scores: &Cells,
        p: &Probabilities,
        sums: &[Reg<F32>],
    ) {
        let mut begun = vec![false; sums.len()];
        for (tile, group, cell) in scores.each() {
            for half in 0..2 {
                let row = 2 * tile + half;
                let pair = [cell[2 * half], cell[2 * half + 1]];
                let exponents = pair.map(|score| k.fma(score, self.scale_log2, self.offset[row]));
                let weights = exponents.map(|exponent| k.exp2(exponent));
                let dst = p.pair(tile, group, half);
                let [low, high] = weights.map(Operand::from);
                k.push(Instruction::ConvertPair { dst, high, low });
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

    /// Whether the guard trips: some row's sum, in any lane, is too large.
    pub(super) fn exceeds(&self, k: &mut Builder, sums: &[Reg<F32>]) -> Reg<Pred> {
        let mut largest = sums[0];
        for sum in &sums[1..] {
            largest = k.eval(largest.maximum(*sum));
        }
        let beyond = k.register::<Pred>();
        k.push(Instruction::Compare {
            comparison: Comparison::GreaterOrUnordered,
            ty: Type::F32,
            dst: beyond.register(),
            a: largest.into(),
            b: Operand::f32(self.bound),
        });
        k.any(beyond)
    }

    /// Raises the references to a block's exact maximum; sums and output follow.
    pub(super) fn raise(&self, k: &mut Builder, scores: &Cells, output: &Cells) {
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

    /// Adds a block's sums.
    pub(super) fn add(&self, k: &mut Builder, sums: &[Reg<F32>]) {
        for (sum, part) in self.sum.iter().zip(sums) {
            k.set(*sum, *sum + *part);
        }
    }

    /// Ends the rows: for each the factor of its output, and its log-sum-exp.
    /// A row that saw nothing is zero, with log-sum-exp minus infinity.
    pub(super) fn finish(&self, k: &mut Builder) -> Vec<[Reg<F32>; 2]> {
        let mut rows = Vec::new();
        for (sum, offset) in self.sum.iter().zip(&self.offset) {
            let sum = k.reduce_lanes(*sum, 4, |a, b| a + b);
            let empty = k.eval(sum.equals(0.0));
            let reciprocal = k.reciprocal(sum);
            let factor = k.eval(empty.choose::<F32>(0.0, reciprocal));
            let log2 = k.log2(sum);
            let natural = k.eval((log2 - *offset) * std::f32::consts::LN_2);
            rows.push([factor, k.eval(empty.choose::<F32>(f32::NEG_INFINITY, natural))]);
        }
        rows
    }
}

/// The largest score of a row, over the four lanes that share it.
fn row_maximum(k: &mut Builder, scores: &Cells, row: usize) -> Reg<F32> {
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
