//! What becomes of the product of a query and a key before the softmax.
//!
//! A rule turns products into scores in units of log2, so that one `ex2` is an
//! exponential. To add one: a field of [`Decode`], its parameters here, and a
//! line in [`Rule::apply`].

use ptx::{Builder, Expression, F32, GlobalAddress, Reg, S32, U32, U64};

use super::{Decode, Numbers};
use crate::parameter::{List, Number, Scale};

/// How products become scores.
pub(super) struct Rule {
    scale: Factor,
    alibi: Option<Alibi>,
}

enum Factor {
    /// The scale times log2(e).
    Plain(Reg<F32>),
    /// `cap * tanh(scale / cap * s)`, all times log2(e).
    Capped { inner: Reg<F32>, outer: Reg<F32> },
}

struct Alibi {
    slopes: Reg<GlobalAddress>,
    /// From the slopes of a sequence to the next's.
    stride: Reg<U32>,
}

/// What a rule needs to know of a row.
pub(super) struct RowRule {
    /// The slope times log2(e), and the row's position less the thread's first key in a tile.
    alibi: Option<(Reg<F32>, Reg<S32>)>,
}

impl Rule {
    pub(super) fn parameters(k: &mut Builder, decode: &Decode) -> Self {
        let scale = if decode.softcap {
            Factor::Capped { inner: Scale::OverSoftcap.read(k), outer: Scale::SoftcapLog2.read(k) }
        } else {
            Factor::Plain(Scale::Log2.read(k))
        };
        let alibi = decode.alibi.then(|| Alibi {
            slopes: List::Slopes.address(k),
            stride: Number::SlopesStride.read(k),
        });
        Rule { scale, alibi }
    }

    /// The rule of a query head's row at a position among the keys.
    pub(super) fn row(
        &self,
        k: &mut Builder,
        numbers: &Numbers,
        sequence: Reg<U32>,
        head: Reg<U32>,
        position: Reg<S32>,
    ) -> RowRule {
        let alibi = self.alibi.as_ref().map(|Alibi { slopes, stride }| {
            let index = k.eval(sequence * *stride + head);
            let slope = k.load::<F32, _>(*slopes + index.convert::<U64>() * 4);
            let slope = k.eval(slope * std::f32::consts::LOG2_E);
            let column = k.eval(numbers.lane % 4 * 2);
            (slope, k.eval(position - column.reinterpret::<S32>()))
        });
        RowRule { alibi }
    }

    /// Turns a row's products with the keys from `first_key` on into scores; the thread has two
    /// neighbours of each eight.
    pub(super) fn apply(
        &self,
        k: &mut Builder,
        row: &RowRule,
        products: &[[Reg<F32>; 2]],
        first_key: Reg<U32>,
    ) {
        for &product in products.iter().flatten() {
            match self.scale {
                Factor::Plain(scale) => k.set(product, product * scale),
                Factor::Capped { inner, outer } => {
                    // tanh(x) = 1 - 2 / (e^2x + 1): the hardware's own is good to 11 bits only.
                    let double = product * inner * (2.0 * std::f32::consts::LOG2_E);
                    let power = k.exp2(double);
                    let fraction = k.reciprocal(power + 1.0);
                    let tanh = k.fma(fraction, -2.0, 1.0);
                    k.set(product, tanh * outer);
                }
            }
        }
        if let Some((slope, position)) = row.alibi {
            let distance = k.eval((position - first_key.reinterpret::<S32>()).convert::<F32>());
            for (eight, pair) in products.iter().enumerate() {
                for (index, &score) in pair.iter().enumerate() {
                    let from = k.absolute(distance - (8 * eight + index) as f32);
                    k.set(score, score - from * slope);
                }
            }
        }
    }
}
