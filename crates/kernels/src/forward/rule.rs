//! All that comes between the products and the softmax: what changes scores, and the mask.

use ptx::{Accumulator, Builder, Expression, Reg, S32, U32};

use super::Forward;
use super::scheduler::ConsumerScheduler;
use super::warpgroup::Warpgroup;
use crate::attention::function::blocks::{block_of, needs_function};
use crate::attention::function::lower::{FunctionRegisters, Functions, Standing};
use crate::attention::scores::{ScoreRule, alibi};
use crate::attention::{ACCUMULATOR_ROWS, Score};

/// Which of a tile's key blocks scores are of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// The one that is walked first.
    First,
    /// Any other.
    Later,
    /// It is not known.
    Any,
}

/// The rule, and where a thread's scores stand.
pub(super) struct Rule {
    scores: ScoreRule,
    key_block: u32,
    /// The thread's first row inside a tile, and its first column inside a block.
    row: Reg<U32>,
    column: Reg<U32>,
    functions: Functions,
    /// Whether a mask may hide something in blocks behind a tile's first: without one, keys end in
    /// the block that is walked first.
    hides_later: bool,
}

impl Rule {
    pub(super) fn new(
        k: &mut Builder,
        forward: &Forward,
        group: &Warpgroup<'_>,
        scores: ScoreRule,
        functions: Functions,
    ) -> Self {
        let position = Accumulator::position(k, group.thread);
        Rule {
            scores,
            key_block: forward.key_block,
            row: k.eval(group.index * 64 + position.row),
            column: position.column,
            functions,
            hides_later: forward.is_uneven(),
        }
    }

    /// Turns the products of a key block into scores, minus infinity where a row does not see the
    /// key. `block` is the block's place in the walk, `entry` that of the tile's list, if it has one.
    pub(super) fn apply<T: ConsumerScheduler>(
        &self,
        k: &mut Builder,
        tiles: &T,
        current: &T::Current,
        (block, entry): (Reg<U32>, Option<Reg<U32>>),
        step: Step,
        scores: &[Score],
    ) {
        let hides = step != Step::Later || self.hides_later;
        let block = match entry {
            None => block,
            Some(entry) => k.eval(block_of(entry)),
        };
        self.scores.cap(k, scores);
        self.scores.in_natural_units(k, scores);
        if let Some(slope) = tiles.slope(k, current) {
            let place = tiles.place(k, current);
            let first_column = self.first_column(k, block);
            let distance = place.position(self.row) - first_column;
            alibi(k, scores, &ACCUMULATOR_ROWS, distance, slope);
        }
        if let Some(function) = &self.functions.score {
            self.call(k, function, tiles, current, block, scores);
        }
        if hides {
            k.if_(tiles.needs_mask(current, block), |k| {
                let place = tiles.place(k, current);
                let first_column = self.first_column(k, block);
                let position = place.position(self.row);
                let rows = &ACCUMULATOR_ROWS;
                tiles
                    .visibility()
                    .seen(k, rows, position, first_column, place.key_length)
                    .hide_others_by_bits(k, scores);
            });
        }
        if let Some(function) = &self.functions.mask {
            let call = |k: &mut Builder| self.call(k, function, tiles, current, block, scores);
            match entry {
                None => call(k),
                Some(entry) => k.if_(needs_function(entry), call),
            }
        }
    }

    /// Puts scores through a function.
    fn call<T: ConsumerScheduler>(
        &self,
        k: &mut Builder,
        function: &FunctionRegisters,
        tiles: &T,
        current: &T::Current,
        block: Reg<U32>,
        scores: &[Score],
    ) {
        let place = tiles.place(k, current);
        let standing = Standing {
            batch: tiles.sequence(k, current),
            head: place.head,
            first_query: k.eval((place.first_row + self.row).reinterpret::<S32>()),
            rows: &ACCUMULATOR_ROWS,
            first_key: self.first_column(k, block),
            query_length: place.query_length,
            key_length: place.key_length,
        };
        function.apply(k, scores, &standing);
    }

    /// The key of the thread's first column.
    fn first_column(&self, k: &mut Builder, block: Reg<U32>) -> Reg<S32> {
        k.eval((block * self.key_block + self.column).reinterpret::<S32>())
    }
}
