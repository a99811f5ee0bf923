//! Masks: which keys a row does not see.

use ptx::{Builder, Choose, Expression, F32, Reg, S32, U32, Value};

use super::products::Cells;
use super::{Mma, Numbers};

/// The mask of one thread's elements.
pub(super) struct Mask {
    causal: bool,
    /// The last key of all, seen from the thread's first column.
    end: Reg<S32>,
    /// The last key that the thread's first row sees, likewise.
    diagonal: Reg<S32>,
}

impl Mask {
    /// `row` is the thread's first row.
    pub(super) fn new(k: &mut Builder, mma: &Mma, numbers: &Numbers, row: Reg<U32>) -> Self {
        let lane = k.lane();
        let signed = |value: Value<U32>| value.reinterpret::<S32>();
        let column = k.eval(lane % 4 * 2);
        let end = k.eval(signed(numbers.key_length - 1) - signed(column.into()));
        let offset = signed(numbers.key_length - numbers.query_length);
        let diagonal = k.eval(signed(row.into()) + offset - signed(column.into()));
        Mask { causal: mma.causal, end, diagonal }
    }

    /// Sets the scores of unseen keys to minus infinity; `first_key` is the
    /// strip's first.
    pub(super) fn apply(&self, k: &mut Builder, scores: &Cells, first_key: impl Into<Value<U32>>) {
        let first = k.eval(first_key.into().reinterpret::<S32>());
        let end = k.eval(self.end - first);
        let diagonal = k.eval(self.diagonal - first);
        for (tile, group, cell) in scores.each() {
            for half in 0..2 {
                let last = if self.causal {
                    k.eval((diagonal + (16 * tile + 8 * half) as i32).minimum(end))
                } else {
                    end
                };
                for (index, score) in cell[2 * half..2 * half + 2].iter().enumerate() {
                    let seen = last.at_least((8 * group + index) as i32);
                    k.set(*score, seen.choose::<F32>(*score, f32::NEG_INFINITY));
                }
            }
        }
    }
}
