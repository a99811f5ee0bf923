//! The online softmax of one warp's tiles, with an exact maximum for each row.

use ptx::{Builder, Expression, F32, Packed, Pred, Reg, Value};

use super::products::Output;
use super::{Decode, Numbers};
use crate::attention::Score;
use crate::attention::rows::reference;

/// How far the reference lies below the row maximum, in units of log2, where probabilities are
/// `f16` because the cache has 8 bits. Probabilities then reach 2^14: an `f16` loses precision
/// below 2^-14, and its largest exponent is 15.
const HEADROOM: f32 = 14.0;

/// The softmax state of the thread's row in each group of eight query rows: the maximum of the
/// scores so far, in units of log2 and less [`HEADROOM`] with 8-bit caches, and the thread's share
/// of the sum of exponentials relative to it.
pub(super) struct Softmax {
    pub(super) maximum: Vec<Reg<F32>>,
    pub(super) sum: Vec<Reg<F32>>,
}

impl Softmax {
    pub(super) fn new(k: &mut Builder, decode: &Decode) -> Self {
        let eights = 0..decode.rows / 8;
        Softmax {
            maximum: eights.clone().map(|_| k.variable(f32::NEG_INFINITY)).collect(),
            sum: eights.map(|_| k.variable(0.0)).collect(),
        }
    }

    /// Resets the rows to having seen no key.
    pub(super) fn reset(&self, k: &mut Builder) {
        for (maximum, sum) in self.maximum.iter().zip(&self.sum) {
            k.set(*maximum, f32::NEG_INFINITY);
            k.set(*sum, 0.0);
        }
    }

    /// Takes in the scores of a row's tile; returns the rounded probabilities, and the factor by
    /// which earlier sums and outputs shrink. `scales` are value scales, one for each score, which
    /// multiply the probabilities but not the sum.
    pub(super) fn row(
        &self,
        k: &mut Builder,
        decode: &Decode,
        eight: usize,
        scores: &[Score],
        scales: Option<&[Reg<F32>]>,
    ) -> (Vec<Packed>, Reg<F32>) {
        let (maximum, sum) = (self.maximum[eight], self.sum[eight]);
        let mut top = scores[0].register;
        for score in &scores[1..] {
            top = k.eval(top.maximum(score.register));
        }
        // Four neighbouring lanes share a row.
        let mut top = k.reduce_lanes(top, 4, |a, b| a.maximum(b));
        if decode.cache.is_8_bit() {
            top = k.eval(top - HEADROOM);
        }
        let new = k.eval(maximum.maximum(top));
        let reference = reference(k, new);
        let shrink = k.exp2(maximum - reference);
        k.set(maximum, new);
        let mut total = sum;
        let mut probabilities = Vec::new();
        for (index, pair) in scores.chunks_exact(2).enumerate() {
            let mut weights = [pair[0], pair[1]].map(|score| k.exp2(score.register - reference));
            let added = k.eval(weights[0] + weights[1]);
            total = match index {
                // An explicit fused multiply-add, so that the assembler does not choose whether to
                // contract.
                0 => k.fma(sum, shrink, added),
                _ => k.eval(total + added),
            };
            if let Some(scales) = scales {
                weights = [0, 1].map(|one| k.eval(weights[one] * scales[2 * index + one]));
            }
            probabilities.push(k.pack_as(decode.operand(), weights[0], weights[1]));
        }
        k.set(sum, total);
        (probabilities, shrink)
    }

    /// Rescales the output if any row of the warp has a new maximum. A thread's output elements
    /// belong to rows `2 * (lane % 4)` and the next, whose factors are in other lanes.
    pub(super) fn rescale(
        &self,
        k: &mut Builder,
        numbers: &Numbers,
        output: &Output,
        shrinks: &[Reg<F32>],
    ) {
        let changed = shrinks
            .iter()
            .map(|shrink| shrink.differs(1.0))
            .reduce(|a: Value<Pred>, b| a | b)
            .expect("there are rows");
        let changed = k.any(changed);
        k.if_(changed, |k| {
            let source = k.eval(numbers.lane % 4 * 8);
            for (eight, shrink) in shrinks.iter().enumerate() {
                let even = k.shuffle_index(*shrink, source);
                let odd = k.shuffle_index(*shrink, source + 4);
                for (_, _, cell) in output.eight(eight).cells() {
                    for (index, element) in cell.registers().into_iter().enumerate() {
                        let factor = if index % 2 == 0 { even } else { odd };
                        k.set(element, element * factor);
                    }
                }
            }
        });
    }
}
