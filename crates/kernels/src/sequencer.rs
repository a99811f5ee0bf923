//! Sorts the tiles of a ragged batch into a schedule, on the device.
//!
//! A tile is a range of query rows of one sequence, and costs as many keys as its rows see. The
//! schedule is ordered from the most expensive tile to the cheapest, so that thread blocks that
//! claim tiles from it one by one end together.
//!
//! For the backward pass, tiles are ranges of keys, and the tiles of a sequence stay together:
//! every key tile adds to the `dQ` of the queries that see it, so what runs at the same time adds
//! to few sequences, whose `dQ` sums stay in L2. Sequences are ordered from the most queries to the
//! fewest ([`Tiles`]).
//!
//! One thread block does a counting sort, 1024 sequences at a time: threads read where the
//! sequences lie, tiles are counted by cost bin, a prefix sum gives the place of each bin in
//! the schedule, and warps write the records. The order within a bin is not defined.

use ptx::{
    Builder, Expression, GlobalAddress, Program, Reg, S32, Scope, Select, SharedAddress, Target,
    U32, U64, Value,
};

use crate::attention::MaskKind;
use crate::attention::sequences::{Span, clamp, entry_of, inclusive_sum};
use crate::attention::visibility::Visibility;
use crate::dependent_launch::wait_for_earlier_grids;
use crate::parameter::{List, Number, Tensor, Workspace};
use crate::{Error, build, resident_blocks};

/// The configuration of the sequencer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sequencer {
    /// The target architecture.
    pub target: Target,
    /// Which tiles the schedule has, and in which order.
    pub tiles: Tiles,
}

/// Which tiles a schedule has, and in which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tiles {
    /// Tiles of queries, those that see the most keys first. The mask is a window, with or without
    /// chunks.
    Queries(MaskKind),
    /// Tiles of keys from the first to the last, sequence after sequence; sequences with the most
    /// queries come first.
    Keys,
    /// The same, where a sequence that has queries and no keys has a tile of no keys, so that every
    /// query belongs to a tile: where tiles clear and round shares of the `dQ` sums.
    KeysOrQueries,
}

/// The byte offset in a schedule of the number of its records.
pub(crate) const COUNT_BYTE: u32 = 0;
/// The byte offset of the number of tiles claimed so far.
pub(crate) const CLAIMED_BYTE: u32 = 4;
/// The byte offset of the number of thread blocks that are done.
pub(crate) const DONE_BYTE: u32 = 8;
/// The byte offset of the first record.
pub(crate) const RECORDS_BYTE: u32 = 16;
/// The bytes of a record, eight words: the sequence, the first row of the tile in it, and the fields of
/// [`Sequence`].
pub(crate) const RECORD_BYTES: u32 = 32;

/// The number of sequences that are sorted together, one for each thread, and of cost bins.
pub const CHUNK: u32 = 1024;
const WARPS: u32 = CHUNK / 32;

impl Sequencer {
    /// Returns the name of this configuration.
    pub fn name(&self) -> String {
        let tiles = match self.tiles {
            Tiles::Queries(MaskKind::Chunked) => "_chunked",
            Tiles::Queries(_) => "",
            Tiles::Keys => "_keys",
            Tiles::KeysOrQueries => "_keys_or_queries",
        };
        format!("sequencer_{}{tiles}", self.target)
    }

    /// Returns the most records that `batch` sequences can have whose queries (or keys) are `rows`
    /// rows in total, with tiles of `tile_rows` rows.
    pub fn records(batch: u64, rows: u64, tile_rows: u64) -> u64 {
        batch.saturating_add(rows / tile_rows)
    }

    /// Returns the bytes of a schedule with room for `records` records.
    pub fn bytes(records: u64) -> u64 {
        RECORDS_BYTE as u64 + RECORD_BYTES as u64 * records
    }

    /// Builds the kernel.
    ///
    /// The grid is one thread block. Parameters by name:
    ///
    /// | parameters | |
    /// | --- | --- |
    /// | `Schedule`, `MaxTiles` | where the schedule goes, and the records it has room for |
    /// | `TileRows` | rows of a tile: queries or keys |
    /// | `ReachLeft`, `ReachRight`, `Chunk` | for tiles of queries: what their rows see, and so what a tile costs |
    /// | `Batch`, `QueryLength`, `KeyLength` | the number of sequences, and the greatest lengths |
    /// | `Query rows`, `Key rows` | of the whole tensors: bound the starts |
    /// | `QueryStarts`, `QueryLengths`, `KeyStarts`, `KeyLengths`, `LeftPadding`, `BatchIndex` | addresses of 32-bit numbers for each sequence, or 0 |
    /// | `Query rows of a sequence`, `Output rows of a sequence`, `Key rows of a sequence` | from one sequence or batch entry to the next, where there are no starts |
    /// | `Entries` | the number of batch entries |
    /// | `LseBatchStride` | log-sum-exps from one sequence to the next; 0 where they and the outputs are packed like the queries |
    pub fn program(&self) -> Result<Program, Error> {
        let fault = match self.tiles {
            Tiles::Queries(mask) if !mask.is_window() => {
                Some("the mask of a ragged batch is a window")
            }
            _ => None,
        };
        let builder = |name| resident_blocks(name, self.target, CHUNK, 1);
        build(self.name(), fault, builder, |k| write(k, self.tiles))
    }
}

/// The launch parameters that say where the sequences of a ragged batch lie.
pub(crate) struct RaggedBatch {
    /// The number of sequences.
    pub(crate) batch: Reg<U32>,
    queries: Span,
    keys: Span,
    padding: Reg<GlobalAddress>,
    entries: Reg<GlobalAddress>,
    query_entry_rows: Reg<U32>,
    output_entry_rows: Reg<U32>,
    key_entry_rows: Reg<U32>,
    /// The number of batch entries or pages.
    pub(crate) entry_count: Reg<U32>,
    lse_entry_rows: Reg<U32>,
}

/// Where a sequence's rows lie.
pub(crate) struct Sequence {
    /// The sequence's first query, in rows of the query tensor.
    pub(crate) query_start: Reg<U32>,
    /// The number of queries.
    pub(crate) queries: Reg<U32>,
    /// The sequence's first key, in rows of the key tensor.
    key_start: Reg<U32>,
    /// The number of keys.
    pub(crate) keys: Reg<U32>,
    /// The sequence's first output, in rows of the output tensor.
    output_start: Reg<U32>,
    /// The index of the log-sum-exp of the sequence's first query, in head 0.
    lse_start: Reg<U32>,
}

impl Sequence {
    /// Returns the record of the tile that begins at `first_row`; `number` is the index of the
    /// sequence in the batch.
    pub(crate) fn record(&self, number: Reg<U32>, first_row: Reg<U32>) -> [[Reg<U32>; 4]; 2] {
        let Sequence { query_start, queries, key_start, keys, output_start, lse_start } = *self;
        [[number, first_row, query_start, queries], [key_start, keys, output_start, lse_start]]
    }
}

impl RaggedBatch {
    pub(crate) fn parameters(k: &mut Builder) -> Self {
        RaggedBatch {
            batch: Number::Batch.read(k),
            queries: Span::queries(k),
            keys: Span {
                starts: List::KeyStarts.address(k),
                rows: Tensor::Key.rows(k),
                most: Number::KeyLength.read(k),
                lengths: List::KeyLengths.address(k),
            },
            padding: List::LeftPadding.address(k),
            entries: List::BatchIndex.address(k),
            query_entry_rows: Tensor::Query.sequence_rows(k),
            output_entry_rows: Tensor::Output.sequence_rows(k),
            key_entry_rows: Tensor::Key.sequence_rows(k),
            entry_count: Number::Entries.read(k),
            lse_entry_rows: Number::LseBatchStride.read(k),
        }
    }

    /// Returns where the sequence `index` lies. Whatever the lists in memory hold, the result is
    /// within the launch's bounds.
    pub(crate) fn sequence(&self, k: &mut Builder, index: Reg<U32>) -> Sequence {
        let signed = |value: Reg<U32>| value.reinterpret::<S32>();
        let of_entry = k.eval(index * self.query_entry_rows);
        let (query_start, queries) = self.queries.from(k, index, signed(of_entry));
        let entry = entry_of(k, self.entries, index, signed(index));
        let last = k.eval(self.entry_count - 1);
        let entry = clamp(k, entry, last);
        let of_entry = k.eval(entry * self.key_entry_rows);
        let (key_start, keys) = self.keys.from(k, index, signed(of_entry));
        let skipped = entry_of(k, self.padding, index, 0);
        let skipped = clamp(k, skipped, keys);
        // With packed queries, outputs and log-sum-exps begin at the same rows as the queries.
        let packed = k.eval(self.lse_entry_rows.equals(0));
        let of_entry = |entry_rows: Reg<U32>| packed.select::<U32>(query_start, index * entry_rows);
        Sequence {
            query_start,
            queries,
            key_start: k.eval(key_start + skipped),
            keys: k.eval(keys - skipped),
            output_start: k.eval(of_entry(self.output_entry_rows)),
            lse_start: k.eval(of_entry(self.lse_entry_rows)),
        }
    }
}

fn write(k: &mut Builder, which: Tiles) {
    wait_for_earlier_grids(k);
    let schedule: Reg<GlobalAddress> = Workspace::Schedule.address(k);
    let room: Reg<U32> = Number::MaxTiles.read(k);
    let tiles = Tiling::parameters(k, which);
    let batch = RaggedBatch::parameters(k);
    let sequences = SharedSequences::new(k);
    let tops = Words::new(k, "tops of warps", WARPS);
    let sums = Words::new(k, "sums of warps", WARPS);
    let bins = Words::new(k, "kinds of cost", CHUNK);

    let thread = k.thread_index();
    let lane = k.lane();
    let warp = k.eval(thread / 32);
    // The number of records before this chunk.
    let before = k.variable(0);
    k.for_range(0, batch.batch, CHUNK, |k, first| {
        let here = k.eval((batch.batch - first).minimum(CHUNK));
        let most = k.variable(0);
        k.if_(thread.less(here), |k| {
            let index = k.eval(first + thread);
            let sequence = batch.sequence(k, index);
            sequences.set(k, thread, &sequence);
            k.set(most, tiles.most(&sequence));
        });
        let top = k.reduce_lanes(most, 32, |a, b| a.maximum(b));
        k.if_(lane.equals(0), |k| tops.set(k, warp, top));
        bins.set(k, thread, 0);
        k.block_sync();

        // Costs fall into as many bins as there are threads; bin 0 has the highest costs.
        let top = tops.get(k, lane);
        let top = k.reduce_lanes(top, 32, |a, b| a.maximum(b));
        let step = k.eval(top / CHUNK + 1);
        let each_sequence = |k: &mut Builder, body: &dyn Fn(&mut Builder, &Run<'_>)| {
            k.for_range(warp, here, WARPS, |k, index| {
                let sequence = sequences.get(k, index);
                let count = tiles.of(k, &sequence);
                body(k, &Run { sequence: &sequence, index, count });
            });
        };
        let bin =
            |k: &mut Builder, cost: Reg<U32>| k.eval(Value::<U32>::from(CHUNK - 1) - cost / step);
        let each_tile = |k: &mut Builder, body: &dyn Fn(&mut Builder, &Run<'_>, &Tile)| {
            each_sequence(k, &|k, run| {
                k.for_range(lane, run.count, 32, |k, number| {
                    let first_row = k.eval(number * tiles.rows);
                    let cost = tiles.cost(k, run.sequence, first_row);
                    let bin = bin(k, cost);
                    body(k, run, &Tile { first_row, bin });
                });
            });
        };
        match which {
            Tiles::Queries(_) => each_tile(k, &|k, _, tile| {
                bins.add(k, tile.bin, 1);
            }),
            Tiles::Keys | Tiles::KeysOrQueries => each_sequence(k, &|k, run| {
                k.if_(lane.equals(0), |k| {
                    let bin = bin(k, tiles.most(run.sequence));
                    bins.add(k, bin, run.count);
                });
            }),
        }
        k.block_sync();

        // Where each bin begins: a prefix sum in each warp, and one over the warps.
        let mine = bins.get(k, thread);
        let through = inclusive_sum(k, mine);
        k.if_(lane.equals(31), |k| sums.set(k, warp, through));
        k.block_sync();
        let sum = sums.get(k, lane);
        let through_warps = inclusive_sum(k, sum);
        let total = k.shuffle_index(through_warps, 31);
        let earlier = k.eval((warp + 31) % 32);
        let earlier = k.shuffle_index(through_warps, earlier);
        let earlier = k.eval(warp.equals(0).select::<U32>(0, earlier));
        bins.set(k, thread, before + earlier + through - mine);
        k.block_sync();

        let record = |k: &mut Builder, run: &Run<'_>, number: Reg<U32>, first_row: Reg<U32>| {
            let index = k.eval(first + run.index);
            k.if_(number.less(room), |k| {
                let at =
                    k.eval(schedule + RECORDS_BYTE + number.convert::<U64>() * RECORD_BYTES as u64);
                let [rows, rest] = run.sequence.record(index, first_row);
                k.store_vector(at, &rows, Default::default());
                k.store_vector(at + 16, &rest, Default::default());
            });
        };
        match which {
            Tiles::Queries(_) => each_tile(k, &|k, run, tile| {
                let number = bins.add(k, tile.bin, 1);
                record(k, run, number, tile.first_row);
            }),
            Tiles::Keys | Tiles::KeysOrQueries => each_sequence(k, &|k, run| {
                let begin = k.variable::<U32>(0);
                k.if_(lane.equals(0), |k| {
                    let bin = bin(k, tiles.most(run.sequence));
                    let added = bins.add(k, bin, run.count);
                    k.set(begin, added);
                });
                let begin = k.shuffle_index(begin, 0);
                k.for_range(lane, run.count, 32, |k, number| {
                    let first_row = k.eval(number * tiles.rows);
                    let number = k.eval(begin + number);
                    record(k, run, number, first_row);
                });
            }),
        }
        k.set(before, before + total);
        k.block_sync();
    });
    k.if_(thread.equals(0), |k| {
        let zero = k.eval::<U32>(0);
        let count = k.eval(before.minimum(room));
        k.store_vector(schedule + COUNT_BYTE, &[count, zero, zero, zero], Default::default());
    });
}

/// All tiles of one sequence.
struct Run<'a> {
    sequence: &'a Sequence,
    /// The index of the sequence in its chunk.
    index: Reg<U32>,
    /// The number of tiles.
    count: Reg<U32>,
}

/// A tile of a sequence: its first row, and the bin of its cost.
struct Tile {
    first_row: Reg<U32>,
    bin: Reg<U32>,
}

/// How sequences are cut into tiles, and what a tile costs.
struct Tiling {
    rows: Reg<U32>,
    /// The mask, for tiles of queries.
    visibility: Option<Visibility>,
    /// Whether queries without keys have a tile.
    or_queries: bool,
}

impl Tiling {
    fn parameters(k: &mut Builder, which: Tiles) -> Self {
        let rows = Number::TileRows.read(k);
        let visibility = match which {
            Tiles::Queries(mask) => Some(Visibility::parameters(k, mask)),
            Tiles::Keys | Tiles::KeysOrQueries => None,
        };
        Tiling { rows, visibility, or_queries: which == Tiles::KeysOrQueries }
    }

    /// Returns the number of tiles of a sequence.
    fn of(&self, k: &mut Builder, sequence: &Sequence) -> Reg<U32> {
        let rows: Value<U32> = match self.visibility {
            Some(_) => sequence.queries.into(),
            None if self.or_queries => sequence.keys.maximum(sequence.queries.minimum(1)),
            None => sequence.keys.into(),
        };
        k.eval((rows + (self.rows - 1)) / self.rows)
    }

    /// Returns an upper bound on the cost of a sequence's tiles: its keys for tiles of queries, its
    /// queries for tiles of keys.
    fn most(&self, sequence: &Sequence) -> Reg<U32> {
        match self.visibility {
            Some(_) => sequence.keys,
            None => sequence.queries,
        }
    }

    /// Returns the cost of a tile: the keys that some of its query rows sees; for tiles of keys,
    /// [`most`](Tiling::most).
    fn cost(&self, k: &mut Builder, sequence: &Sequence, first_row: Reg<U32>) -> Reg<U32> {
        let Sequence { queries, keys, .. } = *sequence;
        let Some(visibility) = &self.visibility else { return self.most(sequence) };
        let end_row = (first_row + self.rows).minimum(queries);
        visibility.tile_keys(k, first_row, end_row, [queries, keys])
    }
}

/// The [`Sequence`]s of a chunk, in shared memory.
struct SharedSequences {
    words: [Words; 6],
}

impl SharedSequences {
    fn new(k: &mut Builder) -> Self {
        let names =
            ["query starts", "queries", "key starts", "keys", "output starts", "lse starts"];
        SharedSequences { words: names.map(|name| Words::new(k, name, CHUNK)) }
    }

    fn set(&self, k: &mut Builder, index: Reg<U32>, sequence: &Sequence) {
        let Sequence { query_start, queries, key_start, keys, output_start, lse_start } = *sequence;
        let values = [query_start, queries, key_start, keys, output_start, lse_start];
        for (words, value) in self.words.iter().zip(values) {
            words.set(k, index, value);
        }
    }

    fn get(&self, k: &mut Builder, index: Reg<U32>) -> Sequence {
        let [query_start, queries, key_start, keys, output_start, lse_start] =
            std::array::from_fn(|at| self.words[at].get(k, index));
        Sequence { query_start, queries, key_start, keys, output_start, lse_start }
    }
}

/// An array of 32-bit words in shared memory.
pub(crate) struct Words {
    offset: u32,
}

impl Words {
    pub(crate) fn new(k: &mut Builder, name: &str, count: u32) -> Self {
        Words { offset: k.shared(name, 4 * count, 16) }
    }

    pub(crate) fn address(&self, k: &mut Builder, index: Reg<U32>) -> Reg<SharedAddress> {
        let base = k.shared_address(self.offset);
        k.eval(base + index * 4)
    }

    pub(crate) fn get(&self, k: &mut Builder, index: Reg<U32>) -> Reg<U32> {
        let address = self.address(k, index);
        k.load(address)
    }

    pub(crate) fn set(&self, k: &mut Builder, index: Reg<U32>, value: impl Into<Value<U32>>) {
        let address = self.address(k, index);
        k.store(address, value);
    }

    /// Adds to a word atomically and returns its previous value.
    pub(crate) fn add(
        &self,
        k: &mut Builder,
        index: Reg<U32>,
        more: impl Into<Value<U32>>,
    ) -> Reg<U32> {
        let address = self.address(k, index);
        k.atomic_add(address, more, Scope::Block)
    }
}
