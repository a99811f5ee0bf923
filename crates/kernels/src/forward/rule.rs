//! What happens between `Q K^T` and the softmax: the score rules, score functions and the mask.

use ptx::{Accumulator, Builder, Expression, Reg, S32, U32, Value};

use super::Forward;
use super::scheduler::ConsumerScheduler;
use super::warpgroup::Warpgroup;
use crate::attention::function::lists::{block_of, needs_function};
use crate::attention::function::lower::{FunctionRegisters, Functions, ScoreCoordinates};
use crate::attention::scores::{CappedExponents, ScoreRule, alibi};
use crate::attention::{ACCUMULATOR_ROWS, Score};

/// Which of a tile's key blocks the scores belong to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// The block that is walked first.
    First,
    /// Any other block.
    Later,
    /// Not known when the code is emitted: the loop has one copy for all blocks.
    Any,
}

/// The mask and score rules, and the position of a thread's scores.
pub(super) struct Rule {
    scores: ScoreRule,
    key_block: u32,
    /// The thread's first row inside a tile; `column` is its first column inside a key block.
    row: Reg<U32>,
    column: Reg<U32>,
    functions: Functions,
    /// Whether a mask may hide keys of blocks after the one that is walked first. Without a mask
    /// only keys beyond the end of the sequence are hidden, and these are all in that block.
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

    /// Turns the products of a key block into scores, in place; the scores of keys that a row does
    /// not see become minus infinity. `block` is the block's place in the walk, `entry` its entry
    /// in the tile's list of key blocks, if there is one.
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
            let coordinates = tiles.coordinates(k, current);
            let first_column = self.first_column(k, block);
            let distance = coordinates.position(self.row) - first_column;
            alibi(k, scores, &ACCUMULATOR_ROWS, distance, slope);
        }
        if let Some(function) = &self.functions.score {
            self.call(k, function, tiles, current, block, scores);
        }
        if hides {
            k.if_(tiles.needs_mask(current, block), |k| {
                let coordinates = tiles.coordinates(k, current);
                let first_column = self.first_column(k, block);
                let position = coordinates.position(self.row);
                let rows = &ACCUMULATOR_ROWS;
                tiles
                    .visibility()
                    .seen(k, rows, position, first_column, coordinates.key_length)
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

    /// Returns how the softmax takes the exponents of a later key block straight from its products,
    /// where the kernel and this block allow it: the block must hide no key.
    pub(super) fn capped_exponents<T: ConsumerScheduler>(
        &self,
        k: &mut Builder,
        tiles: &T,
        current: &T::Current,
        (block, entry): (Reg<U32>, Option<Reg<U32>>),
        products: &[Score],
    ) -> Option<CappedExponents> {
        // Without a list of key blocks, a mask function may hide keys of any block.
        let needs_function = match &self.functions.mask {
            None => None,
            Some(_) => Some(needs_function(entry?)),
        };
        let mut exponents = self.scores.capped_exponents(k, products)?;
        let mut served = Value::from(exponents.served);
        if self.hides_later {
            let block = entry.map_or(block, |entry| k.eval(block_of(entry)));
            served = served & !tiles.needs_mask(current, block);
        }
        if let Some(needed) = needs_function {
            served = served & !needed;
        }
        exponents.served = k.eval(served);
        Some(exponents)
    }

    /// Applies a score function or a mask function to the scores.
    fn call<T: ConsumerScheduler>(
        &self,
        k: &mut Builder,
        function: &FunctionRegisters,
        tiles: &T,
        current: &T::Current,
        block: Reg<U32>,
        scores: &[Score],
    ) {
        let tile = tiles.coordinates(k, current);
        let coordinates = ScoreCoordinates {
            batch: tiles.sequence(k, current),
            head: tile.head,
            first_query: k.eval((tile.first_row + self.row).reinterpret::<S32>()),
            rows: &ACCUMULATOR_ROWS,
            first_key: self.first_column(k, block),
            query_length: tile.query_length,
            key_length: tile.key_length,
        };
        function.apply(k, scores, &coordinates);
    }

    /// Returns the index of the key in the thread's first column.
    fn first_column(&self, k: &mut Builder, block: Reg<U32>) -> Reg<S32> {
        k.eval((block * self.key_block + self.column).reinterpret::<S32>())
    }
}
