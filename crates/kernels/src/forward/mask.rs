//! Masks: which keys a row does not see.

use ptx::{Accumulator, Builder, Choose, Expression, F32, Reg, S32, U32};

use super::Forward;
use super::tiles::Consume;
use super::warpgroup::Warpgroup;

/// The mask of one thread's elements.
pub(super) struct Mask {
    key_block: u32,
    /// The thread's first row inside a tile, and its first column inside a block.
    row: Reg<U32>,
    column: Reg<U32>,
}

impl Mask {
    pub(super) fn new(k: &mut Builder, forward: &Forward, group: &Warpgroup<'_>) -> Self {
        let position = Accumulator::position(k, group.thread);
        Mask {
            key_block: forward.key_block,
            row: k.eval(group.index * 64 + position.row),
            column: position.column,
        }
    }

    /// Sets the scores of unseen keys to minus infinity, if the block has any.
    pub(super) fn apply<T: Consume>(
        &self,
        k: &mut Builder,
        tiles: &T,
        current: &T::Current,
        block: Reg<U32>,
        scores: &Accumulator,
    ) {
        k.if_(tiles.needs_mask(current, block), |k| {
            let place = tiles.place(k, current);
            let first_column = self.first_column(k, block);
            let sight = tiles.sight(k, &place, self.row, first_column);
            for (index, score) in scores.registers().iter().enumerate() {
                let (row, column) = (Accumulator::row_of(index), Accumulator::column_of(index));
                let mut seen = sight.last[row].at_least(column as i32);
                if let Some(first) = sight.first {
                    seen = seen & first[row].at_most(column as i32);
                }
                k.set(*score, seen.choose::<F32>(*score, f32::NEG_INFINITY));
            }
        });
    }

    /// Takes from each score what its distance costs, where the tile has a slope.
    pub(super) fn slope<T: Consume>(
        &self,
        k: &mut Builder,
        tiles: &T,
        current: &T::Current,
        block: Reg<U32>,
        scores: &Accumulator,
    ) {
        let Some(slope) = tiles.slope(k, current) else { return };
        let place = tiles.place(k, current);
        let first_column = self.first_column(k, block);
        let position = (place.first_row + self.row).reinterpret::<S32>() + place.offset();
        let distance = k.eval((position - first_column).convert::<F32>());
        let distances = [distance, k.eval(distance + 8.0)];
        let cost = k.eval(-slope);
        for (index, score) in scores.registers().iter().enumerate() {
            let (row, column) = (Accumulator::row_of(index), Accumulator::column_of(index));
            let apart = k.absolute(distances[row] - column as f32);
            let lowered = k.fma(apart, cost, *score);
            k.set(*score, lowered);
        }
    }

    /// The key of the thread's first column.
    fn first_column(&self, k: &mut Builder, block: Reg<U32>) -> Reg<S32> {
        k.eval((block * self.key_block + self.column).reinterpret::<S32>())
    }
}
