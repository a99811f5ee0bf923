//! Which tiles of which sequences a team takes.
//!
//! The tiles that each sequence's queries see, at least one for each, are one
//! list in the order of sequences. A team takes as many as every other, from its
//! index times that number on. Every warp finds its own place in the list: it
//! needs the lengths and nothing else.

use ptx::{Builder, Choose, Expression, GlobalAddress, Pred, Reg, S32, U32, Value};

use super::{Decode, Numbers};
use crate::attention::MaskKind;
use crate::attention::sequences::{Places, Span, clamp, entry_of, inclusive_sum};
use crate::attention::visibility::Visibility;
use crate::divisor::DivisorRegisters;
use crate::parameter::{List, Number};

/// The lengths of sequences and the mask.
pub(super) struct Schedule {
    batch: Reg<U32>,
    /// The longest lengths.
    query_length: Reg<U32>,
    key_length: Reg<U32>,
    /// Of the query tensor.
    query_rows: Reg<U32>,
    /// Of the key tensor, where keys are packed.
    key_rows: Reg<U32>,
    lengths: Reg<GlobalAddress>,
    padding: Reg<GlobalAddress>,
    query_starts: Reg<GlobalAddress>,
    query_lengths: Reg<GlobalAddress>,
    key_starts: Reg<GlobalAddress>,
    teams: DivisorRegisters,
    least_tiles: Reg<U32>,
    pub(super) visibility: Visibility,
}

/// What is known of one sequence.
#[derive(Clone, Copy)]
struct Lengths {
    queries: Reg<U32>,
    first_query: Reg<U32>,
    keys: Reg<U32>,
    /// The row of the first key in the sequence's batch entry or pages.
    first_row: Reg<U32>,
    first_tile: Reg<U32>,
    tiles: Reg<U32>,
}

impl Schedule {
    pub(super) fn parameters(k: &mut Builder, mask: MaskKind) -> Self {
        Schedule {
            batch: Number::Batch.read(k),
            query_length: Number::QueryLength.read(k),
            key_length: Number::KeyLength.read(k),
            query_rows: Number::QueryRows.read(k),
            key_rows: Number::KeyRows.read(k),
            lengths: List::KeyLengths.address(k),
            padding: List::LeftPadding.address(k),
            query_starts: List::QueryStarts.address(k),
            query_lengths: List::QueryLengths.address(k),
            key_starts: List::KeyStarts.address(k),
            teams: DivisorRegisters::parameters(k, Number::Teams),
            least_tiles: Number::LeastTiles.read(k),
            visibility: Visibility::parameters(k, mask),
        }
    }

    /// Whatever memory holds, what comes out is within the launch's bounds.
    fn lengths(&self, k: &mut Builder, decode: &Decode, sequence: Reg<U32>) -> Lengths {
        let signed = |value: Reg<U32>| value.reinterpret::<S32>();
        let (first_key, end) = Span {
            starts: self.key_starts,
            rows: self.key_rows,
            most: self.key_length,
            lengths: self.lengths,
        }
        .of(k, sequence);
        let skipped = entry_of(k, self.padding, sequence, 0);
        let skipped = clamp(k, skipped, end);
        let keys = k.eval(end - skipped);
        let first_row = k.eval(first_key + skipped);

        let (first_query, queries) = Span {
            starts: self.query_starts,
            rows: self.query_rows,
            most: self.query_length,
            lengths: self.query_lengths,
        }
        .of(k, sequence);

        // The first query stands `queries` before the end.
        let first_position = k.eval(signed(keys) - signed(queries));
        let [begin, _] = self.visibility.keys(k, first_position, keys);
        let begin = k.eval(begin.reinterpret::<U32>());
        let first_tile = k.eval(begin / decode.tile_keys);
        let end_tile = (keys + (decode.tile_keys - 1)) / decode.tile_keys;
        let tiles = k.eval((end_tile.maximum(first_tile + 1)) - first_tile);
        Lengths { queries, first_query, keys, first_row, first_tile, tiles }
    }

    pub(super) fn sequences(&self) -> Reg<U32> {
        self.batch
    }

    /// The tiles of the sequence of each lane; zero beyond the last.
    fn tiles_of(&self, k: &mut Builder, decode: &Decode, sequence: Reg<U32>) -> Reg<U32> {
        let tiles = k.variable(0);
        k.if_(sequence.less(self.batch), |k| {
            let lengths = self.lengths(k, decode, sequence);
            k.set(tiles, lengths.tiles);
        });
        tiles
    }
}

/// Where a team stands in the list, and the sequence that is there.
pub(super) struct Cursor {
    /// Tiles of a team.
    quota: Reg<U32>,
    /// The tile it stands at, and the one it ends before.
    tile: Reg<U32>,
    end: Reg<U32>,
    sequence: Reg<U32>,
    /// Tiles before the sequence.
    before: Reg<U32>,
    visibility: Visibility,

    // What follows is of the sequence.
    pub(super) queries: Reg<U32>,
    pub(super) first_query: Reg<U32>,
    pub(super) keys: Reg<U32>,
    /// The row of the first key in the sequence's batch entry or pages.
    pub(super) first_row: Reg<U32>,
    /// The batch entry of the cache, without pages.
    pub(super) entry: Reg<U32>,
    tiles: Reg<U32>,
    /// The first key of the team's first tile of the sequence.
    pub(super) first_key: Reg<U32>,
    /// The team's tiles of the sequence.
    pub(super) count: Reg<U32>,
}

/// The part of a sequence that a team has done.
pub(super) struct Part {
    pub(super) sequence: Reg<U32>,
    pub(super) first_query: Reg<U32>,
    /// Query rows of this block.
    pub(super) rows: Reg<U32>,
    /// Whether the team has all tiles of the sequence.
    pub(super) whole: Reg<Pred>,
    /// Whether it has the first.
    pub(super) begins: Reg<Pred>,
    /// Tiles of a team, before the sequence and of it.
    quota: Reg<U32>,
    before: Reg<U32>,
    tiles: Reg<U32>,
}

impl Part {
    /// The teams that have parts of the sequence: the first, and how many.
    pub(super) fn teams(&self, k: &mut Builder) -> (Reg<U32>, Reg<U32>) {
        let first = k.eval(self.before / self.quota);
        let last = (self.before + self.tiles - 1) / self.quota;
        (first, k.eval(last - first + 1))
    }
}

impl Cursor {
    /// Finds the team's place in the list.
    pub(super) fn new(
        k: &mut Builder,
        decode: &Decode,
        schedule: &Schedule,
        numbers: &Numbers,
    ) -> Self {
        let (mine, longest) = (k.variable(0), k.variable(0));
        k.for_range(0, schedule.batch, 32, |k, first| {
            let sequence = k.eval(first + numbers.lane);
            let tiles = schedule.tiles_of(k, decode, sequence);
            k.set(mine, mine + tiles);
            k.set(longest, longest.maximum(tiles));
        });
        let total = k.reduce_lanes(mine, 32, |a, b| a + b);
        let longest = k.reduce_lanes(longest, 32, |a, b| a.maximum(b));
        let rounded = k.eval(total + (schedule.teams.number - 1));
        let (share, _) = schedule.teams.divide(k, rounded);
        // A part with less than a tile for each warp is not worth its merge. A whole sequence is:
        // many short ones would stand in line for a few teams else.
        let least = schedule.least_tiles.minimum(longest);
        let quota = k.eval(share.maximum(least).maximum(1));
        let tile = k.variable((numbers.team * quota).minimum(total));
        let end = k.eval((tile + quota).minimum(total));

        let sequence = k.variable(schedule.batch);
        let before = k.variable(0);
        let first = k.variable(0);
        k.loop_(|k| {
            k.break_if(first.at_least(schedule.batch));
            let mine = k.eval(first + numbers.lane);
            let tiles = schedule.tiles_of(k, decode, mine);
            let through = inclusive_sum(k, tiles, numbers.lane);
            let passed = k.eval((before + through).at_most(tile));
            let count = k.count_lanes(passed);
            // The tiles of the sequences that the team is past.
            let last = k.eval(count - 1);
            let last = k.shuffle_index(through, last % 32);
            let skipped = k.eval(count.equals(0).choose::<U32>(0, last));
            k.set(before, before + skipped);
            k.set(sequence, first + count);
            k.break_if(count.less(32));
            k.set(first, first + 32);
        });
        let zero = |k: &mut Builder| k.variable::<U32>(0);
        Cursor {
            quota,
            tile,
            end,
            sequence,
            before,
            visibility: schedule.visibility,
            queries: zero(k),
            first_query: zero(k),
            keys: zero(k),
            first_row: zero(k),
            entry: zero(k),
            tiles: zero(k),
            first_key: zero(k),
            count: zero(k),
        }
    }

    /// Whether there is a tile left.
    pub(super) fn has_more(&self) -> Value<Pred> {
        self.tile.less(self.end)
    }

    /// Reads what is to be known of the sequence.
    pub(super) fn load(
        &mut self,
        k: &mut Builder,
        decode: &Decode,
        schedule: &Schedule,
        places: &Places,
    ) {
        let lengths = schedule.lengths(k, decode, self.sequence);
        let inside = k.eval(self.tile - self.before);
        k.set(self.queries, lengths.queries);
        k.set(self.first_query, lengths.first_query);
        k.set(self.keys, lengths.keys);
        k.set(self.first_row, lengths.first_row);
        k.set(self.tiles, lengths.tiles);
        k.set(self.first_key, (lengths.first_tile + inside) * decode.tile_keys);
        k.set(self.count, (lengths.tiles - inside).minimum(self.end - self.tile));
        let entry = places.entry(k, self.sequence);
        k.set(self.entry, entry);
    }

    /// The part that the team has of the sequence.
    pub(super) fn part(&self, k: &mut Builder, numbers: &Numbers) -> Part {
        let all = self.queries * numbers.group.number;
        Part {
            sequence: k.variable(self.sequence),
            first_query: k.variable(self.first_query),
            rows: k.eval(all.maximum(numbers.first_row) - numbers.first_row),
            whole: k.eval(self.count.equals(self.tiles)),
            begins: k.eval(self.tile.equals(self.before)),
            quota: self.quota,
            before: k.variable(self.before),
            tiles: k.variable(self.tiles),
        }
    }

    /// Goes on to the next sequence.
    pub(super) fn advance(&self, k: &mut Builder) {
        k.set(self.tile, self.tile + self.count);
        k.set(self.before, self.before + self.tiles);
        k.set(self.sequence, self.sequence + 1);
    }

    /// The sequence it stands at.
    pub(super) fn sequence(&self) -> Reg<U32> {
        self.sequence
    }

    /// Where a query of the sequence stands among the keys: the last stands at the last.
    pub(super) fn position(&self, k: &mut Builder, query: Reg<U32>) -> Reg<S32> {
        let signed = |value: Reg<U32>| value.reinterpret::<S32>();
        k.eval(signed(self.keys) - signed(self.queries) + signed(query))
    }

    /// The keys that a query of the sequence sees, from the first to before the last; the query
    /// counts from the sequence's first.
    pub(super) fn visible(&self, k: &mut Builder, query: Reg<U32>) -> [Reg<S32>; 2] {
        let position = self.position(k, query);
        self.visibility.keys(k, position, self.keys)
    }
}
