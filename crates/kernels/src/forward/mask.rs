//! Masks: which keys a row does not see.

use ptx::{Accumulator, Builder, Choose, Expression, F32, Reg, S32, U32, Value};

use super::Forward;
use super::schedule::{Current, Schedule};
use super::warpgroup::Warpgroup;

/// The mask of one thread's elements.
pub(super) struct Mask {
    causal: bool,
    key_block: u32,
    /// The thread's first row inside a tile, and its first column inside a block.
    row: Reg<U32>,
    column: Reg<U32>,
    key_length: Reg<U32>,
    query_length: Reg<U32>,
}

impl Mask {
    pub(super) fn new(
        k: &mut Builder,
        forward: &Forward,
        schedule: &Schedule,
        group: &Warpgroup<'_>,
    ) -> Self {
        let position = Accumulator::position(k, group.thread);
        Mask {
            causal: forward.causal,
            key_block: forward.key_block,
            row: k.eval(group.index * 64 + position.row),
            column: position.column,
            key_length: schedule.key_length,
            query_length: schedule.query_length,
        }
    }

    /// Sets the scores of unseen keys to minus infinity, if the block has any.
    pub(super) fn apply(
        &self,
        k: &mut Builder,
        tile: &Current,
        block: Reg<U32>,
        scores: &Accumulator,
    ) {
        k.if_(block.at_least(tile.first_masked), |k| {
            let last = self.last_seen_columns(k, tile, block);
            for (index, score) in scores.registers().iter().enumerate() {
                let column = Accumulator::column_of(index) as i32;
                let seen = last[Accumulator::row_of(index)].at_least(column);
                k.set(*score, seen.choose::<F32>(*score, f32::NEG_INFINITY));
            }
        });
    }

    /// For each of the thread's two rows, the last column of the block that it
    /// sees, counted from the thread's first column; negative if there is none.
    fn last_seen_columns(&self, k: &mut Builder, tile: &Current, block: Reg<U32>) -> [Reg<S32>; 2] {
        let signed = |value: Value<U32>| value.reinterpret::<S32>();
        let first_column = k.eval(signed(block * self.key_block + self.column));
        let end = k.eval(signed(self.key_length - 1) - first_column);
        if !self.causal {
            return [end; 2];
        }
        let diagonal = k.eval(
            signed(tile.first_row + self.row) + signed(self.key_length - self.query_length)
                - first_column,
        );
        [k.eval(diagonal.minimum(end)), k.eval((diagonal + 8).minimum(end))]
    }
}
