//! What becomes of the product of a query and a key before the softmax.

use ptx::{Accumulator, Builder, F32, Reg, U32};

use super::mask::Mask;
use super::tiles::Consume;
use crate::parameter::Scale;

/// How products become scores. What depends on the distance between query and
/// key is the mask's business, which knows where they are.
#[derive(Clone, Copy)]
pub(super) struct Scores {
    /// What the softmax multiplies scores with, so that `ex2` is an exponential.
    pub(super) scale_log2: Reg<F32>,
    /// Twice log2(e) times the scale over the cap, where there is a cap; the
    /// softmax's scale is the cap then.
    cap: Option<Reg<F32>>,
}

impl Scores {
    pub(super) fn parameters(k: &mut Builder, softcap: bool) -> Self {
        if !softcap {
            return Scores { scale_log2: Scale::Log2.read(k), cap: None };
        }
        let inner: Reg<F32> = Scale::OverSoftcap.read(k);
        let cap = Some(k.eval(inner * (2.0 * std::f32::consts::LOG2_E)));
        Scores { scale_log2: Scale::SoftcapLog2.read(k), cap }
    }

    /// Caps scores: `tanh(x) = 1 - 2 / (e^2x + 1)`, for the hardware's own is good
    /// to 11 bits only.
    pub(super) fn cap(&self, k: &mut Builder, scores: &Accumulator) {
        let Some(cap) = self.cap else { return };
        for score in scores.registers() {
            let power = k.exp2(*score * cap);
            let fraction = k.reciprocal(power + 1.0);
            let tanh = k.fma(fraction, -2.0, 1.0);
            k.set(*score, tanh);
        }
    }
}

/// All that comes between the products and the softmax.
pub(super) struct Rule {
    pub(super) scores: Scores,
    pub(super) mask: Mask,
}

impl Rule {
    pub(super) fn apply<T: Consume>(
        &self,
        k: &mut Builder,
        tiles: &T,
        current: &T::Current,
        block: Reg<U32>,
        scores: &Accumulator,
    ) {
        self.scores.cap(k, scores);
        self.mask.slope(k, tiles, current, block, scores);
        self.mask.apply(k, tiles, current, block, scores);
    }
}
