//! Which tiles of which sequences a team takes.
//!
//! The tiles that each sequence's queries see, at least one for each, are one
//! list in the order of sequences. A team takes as many as every other, from its
//! index times that number on. Every warp finds its own place in the list: it
//! needs the lengths and nothing else.
//!
//! With splits of a fixed size the list is one of splits, and a block counts with what its own
//! query rows see: blocks of a team that have other rows may have other splits.

use ptx::{Builder, Choose, Expression, GlobalAddress, Pred, Reg, S32, U32, Value};

use super::{Decode, Numbers, Splits};
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
    /// With splits of fixed size a team takes one at least.
    least_tiles: Option<Reg<U32>>,
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
    /// The tile after the last, with splits of fixed size, and the first split.
    fixed: Option<[Reg<U32>; 2]>,
    /// Tiles, or splits of fixed size.
    units: Reg<U32>,
}

/// The first and the last query that a block counts with, of so many of a sequence: all of them,
/// or with splits of fixed size its own.
pub(super) fn own_queries(
    k: &mut Builder,
    decode: &Decode,
    numbers: &Numbers,
    queries: Reg<U32>,
) -> [Reg<U32>; 2] {
    match decode.splits {
        Splits::Shares => [k.eval::<U32>(0), k.eval(queries.maximum(1) - 1)],
        Splits::Fixed { .. } => {
            let (first, _) = numbers.group.divide(k, numbers.first_row);
            let last = k.eval(numbers.first_row + (decode.rows - 1));
            let (last, _) = numbers.group.divide(k, last);
            [first, k.eval(last.minimum(queries.maximum(1) - 1))]
        }
    }
}

impl Schedule {
    pub(super) fn parameters(k: &mut Builder, decode: &Decode) -> Self {
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
            least_tiles: match decode.splits {
                Splits::Shares => Some(Number::LeastTiles.read(k)),
                Splits::Fixed { .. } => None,
            },
            visibility: Visibility::parameters(k, decode.rules.mask),
        }
    }

    /// Whatever memory holds, what comes out is within the launch's bounds.
    fn lengths(
        &self,
        k: &mut Builder,
        decode: &Decode,
        numbers: &Numbers,
        sequence: Reg<U32>,
    ) -> Lengths {
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
        if decode.splits == Splits::Shares {
            let [begin, _] = self.visibility.keys(k, first_position, keys);
            let begin = k.eval(begin.reinterpret::<U32>());
            let first_tile = k.eval(begin / decode.tile_keys);
            let end_tile = (keys + (decode.tile_keys - 1)) / decode.tile_keys;
            let units = k.eval((end_tile.maximum(first_tile + 1)) - first_tile);
            let fixed = None;
            return Lengths { queries, first_query, keys, first_row, first_tile, fixed, units };
        }
        let [first, last] = own_queries(k, decode, numbers, queries);
        let [first_position, last_position] =
            [first, last].map(|query| k.eval(first_position + signed(query)));
        let [begin, _] = self.visibility.keys(k, first_position, keys);
        let [_, end] = self.visibility.keys(k, last_position, keys);
        let begin = k.eval(begin.reinterpret::<U32>());
        let end = k.eval(end.maximum(0));
        let end = k.eval(end.reinterpret::<U32>());
        // Of a split's tiles a warp has the same wherever the block begins.
        let first_tile = k.eval(begin / (decode.warps * decode.tile_keys) * decode.warps);
        let end_tile = k.eval((end + (decode.tile_keys - 1)) / decode.tile_keys);
        let first_split = k.eval(first_tile / decode.unit_tiles());
        let end_split = (end_tile + (decode.unit_tiles() - 1)) / decode.unit_tiles();
        let splits = end_split.maximum(first_split + 1) - first_split;
        let units = k.eval(first.less(queries).choose::<U32>(splits, 0));
        let fixed = Some([end_tile, first_split]);
        Lengths { queries, first_query, keys, first_row, first_tile, fixed, units }
    }

    pub(super) fn sequences(&self) -> Reg<U32> {
        self.batch
    }

    /// The tiles, or splits of fixed size, of the sequence of each lane; zero beyond the last.
    fn units_of(
        &self,
        k: &mut Builder,
        decode: &Decode,
        numbers: &Numbers,
        sequence: Reg<U32>,
    ) -> Reg<U32> {
        let units = k.variable(0);
        k.if_(sequence.less(self.batch), |k| {
            let lengths = self.lengths(k, decode, numbers, sequence);
            k.set(units, lengths.units);
        });
        units
    }
}

/// Where a team stands in the list, and the sequence that is there. Units of the list are tiles, or
/// splits of fixed size.
pub(super) struct Cursor {
    /// Units of a team.
    quota: Reg<U32>,
    /// The unit it stands at, and the one it ends before.
    unit: Reg<U32>,
    end: Reg<U32>,
    sequence: Reg<U32>,
    /// Units before the sequence.
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
    units: Reg<U32>,
    /// With splits of fixed size.
    fixed: Option<FixedUnits>,
    /// The first key of the team's first tile of the sequence.
    pub(super) first_key: Reg<U32>,
    /// The team's tiles of the sequence.
    pub(super) count: Reg<U32>,
}

/// The splits of a sequence, counted from that of its first key on.
struct FixedUnits {
    /// The first that the block's rows see.
    first: Reg<U32>,
    /// The first of the team's, and how many it has.
    own: Reg<U32>,
    count: Reg<U32>,
}

/// The query rows of a sequence that a block has.
pub(super) struct Rows {
    pub(super) sequence: Reg<U32>,
    pub(super) first_query: Reg<U32>,
    pub(super) count: Reg<U32>,
}

/// The splits of fixed size that a team has of a sequence. Splits are counted from that of the
/// sequence's first key on.
pub(super) struct Share {
    pub(super) rows: Rows,
    /// The team's: from the first to before the last.
    pub(super) first: Reg<U32>,
    pub(super) end: Reg<U32>,
    /// Those that the block's rows see.
    pub(super) begin_all: Reg<U32>,
    pub(super) end_all: Reg<U32>,
    /// Splits of a team, and before the sequence.
    quota: Reg<U32>,
    before: Reg<U32>,
}

impl Share {
    /// The team that has a split.
    pub(super) fn team(&self, k: &mut Builder, split: Reg<U32>) -> Reg<U32> {
        k.eval((self.before + split - self.begin_all) / self.quota)
    }
}

/// The part of a sequence that a team has done.
pub(super) struct Part {
    pub(super) rows: Rows,
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
            let units = schedule.units_of(k, decode, numbers, sequence);
            k.set(mine, mine + units);
            k.set(longest, longest.maximum(units));
        });
        let total = k.reduce_lanes(mine, 32, |a, b| a + b);
        let longest = k.reduce_lanes(longest, 32, |a, b| a.maximum(b));
        let rounded = k.eval(total + (schedule.teams.number - 1));
        let (share, _) = schedule.teams.divide(k, rounded);
        let quota = match schedule.least_tiles {
            // A part with less than a tile for each warp is not worth its merge. A whole sequence is:
            // many short ones would stand in line for a few teams else.
            Some(least) => {
                let least = least.minimum(longest);
                k.eval(share.maximum(least).maximum(1))
            }
            None => k.eval(share.maximum(1)),
        };
        let unit = k.variable((numbers.team * quota).minimum(total));
        let end = k.eval((unit + quota).minimum(total));

        let sequence = k.variable(schedule.batch);
        let before = k.variable(0);
        let first = k.variable(0);
        k.loop_(|k| {
            k.break_if(first.at_least(schedule.batch));
            let mine = k.eval(first + numbers.lane);
            let units = schedule.units_of(k, decode, numbers, mine);
            let through = inclusive_sum(k, units, numbers.lane);
            let passed = k.eval((before + through).at_most(unit));
            let count = k.count_lanes(passed);
            // The units of the sequences that the team is past.
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
            unit,
            end,
            sequence,
            before,
            visibility: schedule.visibility,
            queries: zero(k),
            first_query: zero(k),
            keys: zero(k),
            first_row: zero(k),
            entry: zero(k),
            units: zero(k),
            fixed: match decode.splits {
                Splits::Shares => None,
                Splits::Fixed { .. } => {
                    Some(FixedUnits { first: zero(k), own: zero(k), count: zero(k) })
                }
            },
            first_key: zero(k),
            count: zero(k),
        }
    }

    /// Whether there is a unit left.
    pub(super) fn has_more(&self) -> Value<Pred> {
        self.unit.less(self.end)
    }

    /// Reads what is to be known of the sequence.
    pub(super) fn load(
        &mut self,
        k: &mut Builder,
        decode: &Decode,
        schedule: &Schedule,
        places: &Places,
        numbers: &Numbers,
    ) {
        let lengths = schedule.lengths(k, decode, numbers, self.sequence);
        let inside = k.eval(self.unit - self.before);
        k.set(self.queries, lengths.queries);
        k.set(self.first_query, lengths.first_query);
        k.set(self.keys, lengths.keys);
        k.set(self.first_row, lengths.first_row);
        k.set(self.units, lengths.units);
        let units = (lengths.units - inside).minimum(self.end - self.unit);
        match (&self.fixed, lengths.fixed) {
            (Some(fixed), Some([end_tile, first_split])) => {
                k.set(fixed.first, first_split);
                k.set(fixed.own, first_split + inside);
                k.set(fixed.count, units);
                let first = k.eval(lengths.first_tile.maximum(fixed.own * decode.unit_tiles()));
                let end = end_tile.minimum((fixed.own + fixed.count) * decode.unit_tiles());
                k.set(self.first_key, first * decode.tile_keys);
                k.set(self.count, end.maximum(first) - first);
            }
            _ => {
                k.set(self.first_key, (lengths.first_tile + inside) * decode.tile_keys);
                k.set(self.count, units);
            }
        }
        let entry = places.entry(k, self.sequence);
        k.set(self.entry, entry);
    }

    /// The block's rows of the sequence.
    fn rows(&self, k: &mut Builder, numbers: &Numbers) -> Rows {
        let all = self.queries * numbers.group.number;
        Rows {
            sequence: k.variable(self.sequence),
            first_query: k.variable(self.first_query),
            count: k.eval(all.maximum(numbers.first_row) - numbers.first_row),
        }
    }

    /// The part that the team has of the sequence.
    pub(super) fn part(&self, k: &mut Builder, numbers: &Numbers) -> Part {
        Part {
            rows: self.rows(k, numbers),
            whole: k.eval(self.count.equals(self.units)),
            begins: k.eval(self.unit.equals(self.before)),
            quota: self.quota,
            before: k.variable(self.before),
            tiles: k.variable(self.units),
        }
    }

    fn fixed(&self) -> &FixedUnits {
        self.fixed.as_ref().expect("splits are of a fixed size")
    }

    /// The first split of fixed size that the team has of the sequence.
    pub(super) fn first_split(&self) -> Reg<U32> {
        self.fixed().own
    }

    /// Where the tiles of a split of fixed size end, counted from the team's first.
    pub(super) fn end_tile(&self, k: &mut Builder, decode: &Decode, split: Reg<U32>) -> Reg<U32> {
        let end = (split + 1) * decode.unit_tiles() - self.first_key / decode.tile_keys;
        k.eval(end.minimum(self.count))
    }

    /// The splits of fixed size that the team has of the sequence.
    pub(super) fn share(&self, k: &mut Builder, numbers: &Numbers) -> Share {
        let fixed = self.fixed();
        Share {
            rows: self.rows(k, numbers),
            first: k.variable(fixed.own),
            end: k.eval(fixed.own + fixed.count),
            begin_all: k.variable(fixed.first),
            end_all: k.eval(fixed.first + self.units),
            quota: self.quota,
            before: k.variable(self.before),
        }
    }

    /// Goes on to the next sequence.
    pub(super) fn advance(&self, k: &mut Builder) {
        let done = self.fixed.as_ref().map_or(self.count, |fixed| fixed.count);
        k.set(self.unit, self.unit + done);
        k.set(self.before, self.before + self.units);
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
