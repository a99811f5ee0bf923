//! The tile scheduler: which tiles of which sequences a team takes.
//!
//! The key tiles that the queries of each sequence see, at least one per sequence, form one list in
//! the order of sequences. All teams take equal shares of it: team `t` takes `quota` tiles from
//! `t * quota` on. Every warp finds its own place in the list, from the lengths alone.
//!
//! With fixed-size splits, the list holds splits instead of tiles, and a block counts only what its
//! own query rows see: blocks of a team that have other rows may have other splits.

use ptx::{Builder, Expression, GlobalAddress, Pred, Reg, S32, Select, U32, Value};

use super::{Decode, Numbers, Splits};
use crate::attention::sequences::{Places, Span, clamp, entry_of, inclusive_sum};
use crate::attention::visibility::Visibility;
use crate::divisor::DivisorRegisters;
use crate::parameter::{List, Number};

/// The launch parameters that describe the sequences' lengths, the mask and the teams.
pub(super) struct Schedule {
    batch: Reg<U32>,
    queries: Span,
    keys: Span,
    padding: Reg<GlobalAddress>,
    teams: DivisorRegisters,
    /// The fewest tiles that a team takes, unless no sequence has as many. `None` with fixed-size
    /// splits, of which a team takes at least one.
    least_tiles: Option<Reg<U32>>,
    pub(super) visibility: Visibility,
}

/// The lengths of one sequence, and its units in the list.
#[derive(Clone, Copy)]
pub(super) struct Lengths {
    queries: Reg<U32>,
    first_query: Reg<U32>,
    keys: Reg<U32>,
    /// The row of the first key in the sequence's batch entry or pages.
    first_row: Reg<U32>,
    first_tile: Reg<U32>,
    /// With fixed-size splits: the tile after the last visible one, and the first split.
    fixed: Option<[Reg<U32>; 2]>,
    /// Units of the list that the sequence has: tiles, or fixed-size splits.
    units: Reg<U32>,
}

impl Lengths {
    fn zero(k: &mut Builder, decode: &Decode) -> Self {
        let mut zero = || k.variable(0);
        Lengths {
            queries: zero(),
            first_query: zero(),
            keys: zero(),
            first_row: zero(),
            first_tile: zero(),
            fixed: (decode.splits != Splits::Balanced).then(|| [zero(), zero()]),
            units: zero(),
        }
    }

    fn registers(&self) -> impl Iterator<Item = Reg<U32>> {
        let Lengths { queries, first_query, keys, first_row, first_tile, fixed, units } = *self;
        [queries, first_query, keys, first_row, first_tile, units]
            .into_iter()
            .chain(fixed.into_iter().flatten())
    }

    fn set(&self, k: &mut Builder, others: &Lengths) {
        self.registers().zip(others.registers()).for_each(|(mine, other)| k.set(mine, other));
    }

    /// Returns the lengths that a lane of the warp has, to all lanes.
    fn of_lane(&self, k: &mut Builder, lane: Reg<U32>) -> Self {
        let mut of_lane = |mine| k.shuffle_index(mine, lane);
        Lengths {
            queries: of_lane(self.queries),
            first_query: of_lane(self.first_query),
            keys: of_lane(self.keys),
            first_row: of_lane(self.first_row),
            first_tile: of_lane(self.first_tile),
            fixed: self.fixed.map(|fixed| fixed.map(&mut of_lane)),
            units: of_lane(self.units),
        }
    }
}

/// Returns the first and the last query that a block counts, of a sequence's `queries`: all of
/// them, or with fixed-size splits those of the block's own rows.
pub(super) fn own_queries(
    k: &mut Builder,
    decode: &Decode,
    numbers: &Numbers,
    queries: Reg<U32>,
) -> [Reg<U32>; 2] {
    match decode.splits {
        Splits::Balanced => [k.eval::<U32>(0), k.eval(queries.maximum(1) - 1)],
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
        let numbers = [Number::QueryLength, Number::KeyLength, Number::QueryRows, Number::KeyRows];
        let lists = [
            List::KeyLengths,
            List::LeftPadding,
            List::QueryStarts,
            List::QueryLengths,
            List::KeyStarts,
        ];
        let batch = Number::Batch.read(k);
        let [most_queries, most_keys, query_rows, key_rows] = numbers.map(|it| it.read(k));
        let [key_lengths, padding, query_starts, query_lengths, key_starts] =
            lists.map(|it| it.address(k));
        Schedule {
            batch,
            queries: Span {
                starts: query_starts,
                rows: query_rows,
                most: most_queries,
                lengths: query_lengths,
            },
            keys: Span {
                starts: key_starts,
                rows: key_rows,
                most: most_keys,
                lengths: key_lengths,
            },
            padding,
            teams: DivisorRegisters::parameters(k, Number::Teams),
            least_tiles: match decode.splits {
                Splits::Balanced => Some(Number::LeastTiles.read(k)),
                Splits::Fixed { .. } => None,
            },
            visibility: Visibility::parameters(k, decode.rules.mask),
        }
    }

    /// Reads the lengths of a sequence. They are clamped to the launch's bounds, whatever memory
    /// holds.
    pub(super) fn lengths(
        &self,
        k: &mut Builder,
        decode: &Decode,
        numbers: &Numbers,
        sequence: Reg<U32>,
    ) -> Lengths {
        let signed = |value: Reg<U32>| value.reinterpret::<S32>();
        let (first_key, end) = self.keys.of(k, sequence);
        let skipped = entry_of(k, self.padding, sequence, 0);
        let skipped = clamp(k, skipped, end);
        let keys = k.eval(end - skipped);
        let first_row = k.eval(first_key + skipped);
        let (first_query, queries) = self.queries.of(k, sequence);

        // Query 0 has position `keys - queries`.
        let first_position = k.eval(signed(keys) - signed(queries));
        if decode.splits == Splits::Balanced {
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
        // Rounded down to a multiple of `warps`, so that a warp has the same tiles of a split
        // wherever the block begins.
        let first_tile = k.eval(begin / (decode.warps * decode.tile_keys) * decode.warps);
        let end_tile = k.eval((end + (decode.tile_keys - 1)) / decode.tile_keys);
        let first_split = k.eval(first_tile / decode.unit_tiles());
        let end_split = (end_tile + (decode.unit_tiles() - 1)) / decode.unit_tiles();
        let splits = end_split.maximum(first_split + 1) - first_split;
        let units = k.eval(first.less(queries).select::<U32>(splits, 0));
        let fixed = Some([end_tile, first_split]);
        Lengths { queries, first_query, keys, first_row, first_tile, fixed, units }
    }

    /// Returns the number of sequences.
    pub(super) fn sequences(&self) -> Reg<U32> {
        self.batch
    }

    /// Reads the lengths of the lanes' sequences, which begin at `first`, and adds up their units
    /// over the lanes before and with each. Sequences beyond the last have no units.
    fn read_lanes(
        &self,
        k: &mut Builder,
        decode: &Decode,
        numbers: &Numbers,
        first: Reg<U32>,
        (lanes, through): (&Lengths, Reg<U32>),
    ) {
        let sequence = k.eval(first + numbers.lane);
        k.set(lanes.units, 0);
        k.if_(sequence.less(self.batch), |k| {
            let lengths = self.lengths(k, decode, numbers, sequence);
            lanes.set(k, &lengths);
        });
        let sum = inclusive_sum(k, lanes.units);
        k.set(through, sum);
    }
}

/// A team's position in the list, and the sequence at that position. The list's units are tiles, or
/// fixed-size splits.
pub(super) struct Cursor {
    /// Units per team.
    quota: Reg<U32>,
    /// The current unit, and the end of the team's share (exclusive).
    unit: Reg<U32>,
    end: Reg<U32>,
    sequence: Reg<U32>,
    /// Units of all sequences before the current one.
    before: Reg<U32>,
    visibility: Visibility,

    // The fields below describe the current sequence and are set by `load`.
    pub(super) queries: Reg<U32>,
    pub(super) first_query: Reg<U32>,
    pub(super) keys: Reg<U32>,
    /// The row of the first key in the sequence's batch entry or pages.
    pub(super) first_row: Reg<U32>,
    /// The sequence's batch entry in the cache; with pages, its row of the block table.
    pub(super) entry: Reg<U32>,
    units: Reg<U32>,
    /// The sequence's splits, with fixed-size splits.
    fixed: Option<FixedUnits>,
    /// First key of the team's first tile of the sequence.
    pub(super) first_key: Reg<U32>,
    /// Number of the team's tiles of the sequence.
    pub(super) count: Reg<U32>,
}

/// The fixed-size splits of a sequence, counted from that of its first key.
struct FixedUnits {
    /// The first split that the block's rows see.
    first: Reg<U32>,
    /// The team's first split, and how many it has.
    own: Reg<U32>,
    count: Reg<U32>,
}

/// The query rows of a sequence that a block has. `count` may exceed the rows of a block.
pub(super) struct Rows {
    pub(super) sequence: Reg<U32>,
    pub(super) first_query: Reg<U32>,
    pub(super) count: Reg<U32>,
}

/// The fixed-size splits that a team has of a sequence, counted from that of the sequence's first
/// key.
pub(super) struct Share {
    pub(super) rows: Rows,
    /// The team's splits, `first..end`.
    pub(super) first: Reg<U32>,
    pub(super) end: Reg<U32>,
    /// All splits that the block's rows see, `begin_all..end_all`.
    pub(super) begin_all: Reg<U32>,
    pub(super) end_all: Reg<U32>,
    /// Splits per team, and splits before the sequence in the list.
    quota: Reg<U32>,
    before: Reg<U32>,
}

impl Share {
    /// Returns the team that has a split.
    pub(super) fn team(&self, k: &mut Builder, split: Reg<U32>) -> Reg<U32> {
        k.eval((self.before + split - self.begin_all) / self.quota)
    }
}

/// The part of a sequence that a team has processed.
pub(super) struct Part {
    pub(super) rows: Rows,
    /// Whether the team has all tiles of the sequence.
    pub(super) whole: Reg<Pred>,
    /// Whether the team has the first tile of the sequence.
    pub(super) begins: Reg<Pred>,
    /// Tiles per team, tiles before the sequence in the list, and tiles of the sequence.
    quota: Reg<U32>,
    before: Reg<U32>,
    tiles: Reg<U32>,
}

impl Part {
    /// Returns the first team that has a part of the sequence, and how many teams have one.
    pub(super) fn teams(&self, k: &mut Builder) -> (Reg<U32>, Reg<U32>) {
        let first = k.eval(self.before / self.quota);
        let last = (self.before + self.tiles - 1) / self.quota;
        (first, k.eval(last - first + 1))
    }
}

impl Cursor {
    /// Finds the team's share of the list and the sequence at its beginning, and returns that
    /// sequence's lengths. Each warp does it on its own, 32 sequences at a time. The lengths of up to
    /// 32 sequences are read once: nothing is copied before they are known.
    pub(super) fn new(
        k: &mut Builder,
        decode: &Decode,
        schedule: &Schedule,
        numbers: &Numbers,
    ) -> (Self, Lengths) {
        let (total, longest) = (k.variable(0), k.variable(0));
        let (lanes, through) = (Lengths::zero(k, decode), k.variable(0));
        k.for_range(0, schedule.batch, 32, |k, first| {
            schedule.read_lanes(k, decode, numbers, first, (&lanes, through));
            let longest_of_lanes = k.reduce_lanes(lanes.units, 32, |a, b| a.maximum(b));
            k.set(longest, longest.maximum(longest_of_lanes));
            let all = k.shuffle_index(through, 31);
            k.set(total, total + all);
        });
        let rounded = k.eval(total + (schedule.teams.number - 1));
        let (share, _) = schedule.teams.divide(k, rounded);
        let quota = match schedule.least_tiles {
            // A part with less than a tile for each warp is not worth its merge. A whole sequence
            // is, however short: otherwise many short sequences would queue up at a few teams.
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
        let (first, lane) = (k.variable(0), k.variable(0));
        k.loop_(|k| {
            k.break_if(first.at_least(schedule.batch));
            k.if_(schedule.batch.at_least(33), |k| {
                schedule.read_lanes(k, decode, numbers, first, (&lanes, through));
            });
            let passed = k.eval((before + through).at_most(unit));
            let count = k.count_lanes(passed);
            // The units of those sequences of the 32 that end before the team's share.
            let last = k.eval(count - 1);
            let last = k.shuffle_index(through, last % 32);
            let skipped = k.eval(count.equals(0).select::<U32>(0, last));
            k.set(before, before + skipped);
            k.set(sequence, first + count);
            k.set(lane, count % 32);
            k.break_if(count.less(32));
            k.set(first, first + 32);
        });
        let lengths = lanes.of_lane(k, lane);
        let zero = |k: &mut Builder| k.variable::<U32>(0);
        let cursor = Cursor {
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
                Splits::Balanced => None,
                Splits::Fixed { .. } => {
                    Some(FixedUnits { first: zero(k), own: zero(k), count: zero(k) })
                }
            },
            first_key: zero(k),
            count: zero(k),
        };
        (cursor, lengths)
    }

    /// Returns whether the team has units left.
    pub(super) fn has_more(&self) -> Value<Pred> {
        self.unit.less(self.end)
    }

    /// Begins the current sequence, which has these lengths: finds the team's tiles of it.
    pub(super) fn load(
        &mut self,
        k: &mut Builder,
        decode: &Decode,
        lengths: &Lengths,
        places: &Places,
    ) {
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

    /// Returns the block's query rows of the sequence.
    fn rows(&self, k: &mut Builder, numbers: &Numbers) -> Rows {
        let all = self.queries * numbers.group.number;
        Rows {
            sequence: k.variable(self.sequence),
            first_query: k.variable(self.first_query),
            count: k.eval(all.maximum(numbers.first_row) - numbers.first_row),
        }
    }

    /// Returns the part that the team has of the sequence.
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

    /// Returns the first fixed-size split that the team has of the sequence.
    pub(super) fn first_split(&self) -> Reg<U32> {
        self.fixed().own
    }

    /// Returns where the tiles of a fixed-size split end, counted from the team's first tile.
    pub(super) fn end_tile(&self, k: &mut Builder, decode: &Decode, split: Reg<U32>) -> Reg<U32> {
        let end = (split + 1) * decode.unit_tiles() - self.first_key / decode.tile_keys;
        k.eval(end.minimum(self.count))
    }

    /// Returns the fixed-size splits that the team has of the sequence.
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

    /// Moves on to the next sequence; `load` must follow.
    pub(super) fn advance(&self, k: &mut Builder) {
        let done = self.fixed.as_ref().map_or(self.count, |fixed| fixed.count);
        k.set(self.unit, self.unit + done);
        k.set(self.before, self.before + self.units);
        k.set(self.sequence, self.sequence + 1);
    }

    /// Returns the current sequence.
    pub(super) fn sequence(&self) -> Reg<U32> {
        self.sequence
    }

    /// Returns the position of a query among the keys: the last query stands at the last key.
    pub(super) fn position(&self, k: &mut Builder, query: Reg<U32>) -> Reg<S32> {
        let signed = |value: Reg<U32>| value.reinterpret::<S32>();
        k.eval(signed(self.keys) - signed(self.queries) + signed(query))
    }

    /// Returns the keys that a query sees, as the first and the end (exclusive). Queries count from
    /// the sequence's first.
    pub(super) fn visible(&self, k: &mut Builder, query: Reg<U32>) -> [Reg<S32>; 2] {
        let position = self.position(k, query);
        self.visibility.keys(k, position, self.keys)
    }
}
