//! Masks: which keys a row does not see.

use ptx::{Builder, Choose, Expression, F32, Reg, S32, U32, Value};

use super::products::Cells;
use super::{Mma, Numbers};

/// The mask of a warp's elements. Where a thread stands is found anew in each
/// masked block: there are few of them, and registers are dear in all others.
pub(super) struct Mask {
    causal: bool,
    /// The warp's first row.
    first_row: Reg<U32>,
    query_length: Reg<U32>,
    key_length: Reg<U32>,
}

impl Mask {
    pub(super) fn new(mma: &Mma, numbers: &Numbers, first_row: Reg<U32>) -> Self {
        let Numbers { query_length, key_length, .. } = *numbers;
        Mask { causal: mma.causal, first_row, query_length, key_length }
    }

    /// Sets the scores of unseen keys to minus infinity; `first_key` is the
    /// block's first.
    pub(super) fn apply(&self, k: &mut Builder, scores: &Cells, first_key: impl Into<Value<U32>>) {
        let signed = |value: Value<U32>| value.reinterpret::<S32>();
        let lane = k.lane();
        let first_column = k.eval(signed(first_key.into() + lane % 4 * 2));
        // The last column that there is, and the last that the first row sees.
        let end = k.eval(signed(self.key_length - 1) - first_column);
        let offset = self.key_length - self.query_length;
        let diagonal = k.eval(signed(self.first_row + lane / 4 + offset) - first_column);
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
