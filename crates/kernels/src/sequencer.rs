//! Puts the tiles of a ragged batch in order, on the device.
//!
//! A tile is some query rows of one sequence, and costs what its rows see of the
//! keys. The list goes from much to little, so that blocks that take from it one
//! by one end together.
//!
//! For the backward pass, which adds to sums of queries from every tile of keys
//! that they see, tiles are of keys and those of a sequence stay together: what
//! runs at the same time then adds to few sequences, whose sums stay in the
//! second-level cache. Sequences go from many queries to few ([`Tiles`]).
//!
//! One block does it, a thousand sequences at a time: threads read what is to be
//! known of them, tiles are counted by cost, a scan says where each cost begins
//! in the list, and warps write the records. Tiles of nearly the same cost come
//! in any order.

use ptx::{
    Builder, Choose, Expression, GlobalAddress, Program, Reg, S32, Scope, SharedAddress, Target,
    U32, U64, Value,
};

use crate::Error;
use crate::attention::sequences::{Span, clamp, entry_of, inclusive_sum};
use crate::attention::visibility::Visibility;
use crate::attention::{MaskKind, Window};
use crate::parameter::{List, Number, Tensor, Workspace};

/// What the kernel is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sequencer {
    /// The architecture.
    pub target: Target,
    /// Which tiles, and in which order.
    pub tiles: Tiles,
}

/// Which tiles a schedule has, and in which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tiles {
    /// Tiles of queries, those that see the most keys first. The mask is a window, with chunks or
    /// without.
    Queries(MaskKind),
    /// Tiles of keys from the first to the last, sequence after sequence, those with the most
    /// queries first.
    Keys,
}

/// Where a schedule has the number of its records, how many tiles were claimed
/// and how many blocks are done, and where its records begin.
pub(crate) const COUNT_BYTE: u32 = 0;
pub(crate) const CLAIMED_BYTE: u32 = 4;
pub(crate) const DONE_BYTE: u32 = 8;
pub(crate) const RECORDS_BYTE: u32 = 16;
/// A record: sequence, first row of the tile, where its queries start, how many; where its
/// keys start, how many; where its outputs and its log-sum-exps start.
pub(crate) const RECORD_BYTES: u32 = 32;

/// Where the rows of a sequence are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Its first query, in rows of the query tensor.
    pub query_start: u32,
    /// Its queries.
    pub queries: u32,
    /// Its first key, in rows of the key tensor.
    pub key_start: u32,
    /// Its keys.
    pub keys: u32,
    /// Its first output, in rows of the output tensor.
    pub output_start: u32,
    /// Its first query's log-sum-exp of the first head.
    pub lse_start: u32,
}

/// Sequences that are sorted together, one for each thread; and kinds of cost that are told apart.
const CHUNK: u32 = 1024;
const WARPS: u32 = CHUNK / 32;

impl Sequencer {
    /// Threads of the one block.
    pub const THREADS: u32 = CHUNK;

    /// The name of the kernel.
    pub fn name(&self) -> String {
        let tiles = match self.tiles {
            Tiles::Queries(MaskKind::Chunked) => "_chunked",
            Tiles::Queries(_) => "",
            Tiles::Keys => "_keys",
        };
        format!("sequencer_{}{tiles}", self.target)
    }

    /// The most records that a batch can have: sequences, rows of all their
    /// queries or keys, rows of a tile.
    pub fn records(batch: u64, rows: u64, tile_rows: u64) -> u64 {
        batch.saturating_add(rows / tile_rows)
    }

    /// Bytes of a schedule with room for so many records.
    pub fn bytes(records: u64) -> u64 {
        RECORDS_BYTE as u64 + RECORD_BYTES as u64 * records
    }

    /// What the kernel writes, in 32-bit words, worked out here, for tiles of `tile_rows` queries
    /// that see keys through a window.
    pub fn schedule(tile_rows: u32, window: &Window, sequences: &[Slice]) -> Vec<u32> {
        let mut records: Vec<[u32; 8]> = Vec::new();
        for (chunk, sequences) in sequences.chunks(CHUNK as usize).enumerate() {
            let top = sequences.iter().map(|slice| slice.keys).max().unwrap_or(0);
            let mut tiles = Vec::new();
            for (index, slice) in sequences.iter().enumerate() {
                let Slice { queries, keys, .. } = *slice;
                let sequence = chunk as u32 * CHUNK + index as u32;
                for first_row in (0..queries).step_by(tile_rows as usize) {
                    let offset = i64::from(keys) - i64::from(queries);
                    let last = i64::from((first_row + tile_rows).min(queries)) - 1 + offset;
                    let seen = window.tile_keys(i64::from(first_row) + offset, last, keys);
                    let kind = seen.len() as u32 / (top / CHUNK + 1);
                    tiles.push((kind, slice.record(sequence, first_row)));
                }
            }
            tiles.sort_by_key(|(kind, _)| std::cmp::Reverse(*kind));
            records.extend(tiles.into_iter().map(|(_, record)| record));
        }
        with_header(&records)
    }

    /// The same for tiles of `tile_rows` keys ([`Tiles::Keys`]).
    pub fn key_schedule(tile_rows: u32, sequences: &[Slice]) -> Vec<u32> {
        let mut records: Vec<[u32; 8]> = Vec::new();
        for (chunk, sequences) in sequences.chunks(CHUNK as usize).enumerate() {
            let top = sequences.iter().map(|slice| slice.queries).max().unwrap_or(0);
            let mut order: Vec<(u32, &Slice)> = (0..).zip(sequences).collect();
            order.sort_by_key(|(_, slice)| std::cmp::Reverse(slice.queries / (top / CHUNK + 1)));
            for (index, slice) in order {
                let sequence = chunk as u32 * CHUNK + index;
                let first_rows = (0..slice.keys).step_by(tile_rows as usize);
                records.extend(first_rows.map(|first_row| slice.record(sequence, first_row)));
            }
        }
        with_header(&records)
    }

    /// Builds the kernel.
    ///
    /// The grid is one block. Parameters by name:
    ///
    /// | parameters | |
    /// | --- | --- |
    /// | `schedule`, `records there is room for` | where it goes |
    /// | `rows of a tile` | queries or keys |
    /// | `window left`, `window right`, `chunk` | of tiles of queries: what its rows see says what a tile costs |
    /// | `batch`, `query length`, `key length` | sequences, and the longest lengths |
    /// | `query rows`, `key rows` | of the tensors in all: bound the starts |
    /// | `query starts`, `query lengths`, `key starts`, `lengths`, `left padding`, `batch entries` | addresses of 32-bit numbers for each sequence, or 0 |
    /// | `query rows of an entry`, `output rows of an entry`, `key rows of an entry` | from a batch entry to the next, where there are no starts |
    /// | `batch entries there are` | |
    /// | `lse rows of an entry` | the same for log-sum-exps; 0: they and outputs lie as packed queries do |
    pub fn program(&self) -> Result<Program, Error> {
        if let Tiles::Queries(mask) = self.tiles
            && !mask.is_window()
        {
            return Err(Error::configuration(
                self.name(),
                "the mask of a ragged batch is a window",
            ));
        }
        let mut k = Builder::new(self.name(), self.target, CHUNK).blocks_per_multiprocessor(1);
        write(&mut k, self.tiles);
        Ok(k.finish()?)
    }
}

impl Slice {
    /// The record of one of its tiles.
    fn record(&self, sequence: u32, first_row: u32) -> [u32; 8] {
        let Slice { query_start, queries, key_start, keys, output_start, lse_start } = *self;
        [sequence, first_row, query_start, queries, key_start, keys, output_start, lse_start]
    }
}

/// A schedule of these records, of which none was claimed.
fn with_header(records: &[[u32; 8]]) -> Vec<u32> {
    [vec![records.len() as u32, 0, 0, 0], records.concat()].concat()
}

/// What is known of the batch.
pub(crate) struct Batch {
    /// Sequences.
    pub(crate) batch: Reg<U32>,
    queries: Span,
    keys: Span,
    padding: Reg<GlobalAddress>,
    entries: Reg<GlobalAddress>,
    query_entry_rows: Reg<U32>,
    output_entry_rows: Reg<U32>,
    key_entry_rows: Reg<U32>,
    /// Batch entries or pages that there are.
    pub(crate) entry_count: Reg<U32>,
    lse_entry_rows: Reg<U32>,
}

/// What is known of a sequence.
pub(crate) struct Sequence {
    pub(crate) query_start: Reg<U32>,
    pub(crate) queries: Reg<U32>,
    key_start: Reg<U32>,
    pub(crate) keys: Reg<U32>,
    output_start: Reg<U32>,
    lse_start: Reg<U32>,
}

impl Sequence {
    /// The record of the tile from a row on, where the sequence has a number.
    pub(crate) fn record(&self, number: Reg<U32>, first_row: Reg<U32>) -> [[Reg<U32>; 4]; 2] {
        let Sequence { query_start, queries, key_start, keys, output_start, lse_start } = *self;
        [[number, first_row, query_start, queries], [key_start, keys, output_start, lse_start]]
    }
}

impl Batch {
    pub(crate) fn parameters(k: &mut Builder) -> Self {
        Batch {
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

    /// Whatever memory holds, what comes out is within the launch's bounds.
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
        // Where packed queries begin, their outputs and log-sum-exps do.
        let packed = k.eval(self.lse_entry_rows.equals(0));
        let of_entry = |entry_rows: Reg<U32>| packed.choose::<U32>(query_start, index * entry_rows);
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
    let schedule: Reg<GlobalAddress> = Workspace::Schedule.address(k);
    let room: Reg<U32> = Number::MaxTiles.read(k);
    let tiles = Cut::parameters(k, which);
    let batch = Batch::parameters(k);
    let known = Known::new(k);
    let tops = Words::new(k, "tops of warps", WARPS);
    let sums = Words::new(k, "sums of warps", WARPS);
    let kinds = Words::new(k, "kinds of cost", CHUNK);

    let thread = k.thread_index();
    let lane = k.lane();
    let warp = k.eval(thread / 32);
    // Records before this chunk.
    let before = k.variable(0);
    k.for_range(0, batch.batch, CHUNK, |k, first| {
        let here = k.eval((batch.batch - first).minimum(CHUNK));
        let most = k.variable(0);
        k.if_(thread.less(here), |k| {
            let index = k.eval(first + thread);
            let sequence = batch.sequence(k, index);
            known.set(k, thread, &sequence);
            k.set(most, tiles.most(&sequence));
        });
        let top = k.reduce_lanes(most, 32, |a, b| a.maximum(b));
        k.if_(lane.equals(0), |k| tops.set(k, warp, top));
        kinds.set(k, thread, 0);
        k.block_sync();

        // Costs fall into as many kinds as there are threads.
        let top = tops.get(k, lane);
        let top = k.reduce_lanes(top, 32, |a, b| a.maximum(b));
        let step = k.eval(top / CHUNK + 1);
        let each_sequence = |k: &mut Builder, body: &dyn Fn(&mut Builder, &Run<'_>)| {
            k.for_range(warp, here, WARPS, |k, index| {
                let sequence = known.get(k, index);
                let count = tiles.of(k, &sequence);
                body(k, &Run { sequence: &sequence, index, count });
            });
        };
        let kind =
            |k: &mut Builder, cost: Reg<U32>| k.eval(Value::<U32>::from(CHUNK - 1) - cost / step);
        let each_tile = |k: &mut Builder, body: &dyn Fn(&mut Builder, &Run<'_>, &Tile)| {
            each_sequence(k, &|k, run| {
                k.for_range(lane, run.count, 32, |k, number| {
                    let first_row = k.eval(number * tiles.rows);
                    let cost = tiles.cost(k, run.sequence, first_row);
                    let kind = kind(k, cost);
                    body(k, run, &Tile { first_row, kind });
                });
            });
        };
        match which {
            Tiles::Queries(_) => each_tile(k, &|k, _, tile| {
                kinds.add(k, tile.kind, 1);
            }),
            Tiles::Keys => each_sequence(k, &|k, run| {
                k.if_(lane.equals(0), |k| {
                    let kind = kind(k, tiles.most(run.sequence));
                    kinds.add(k, kind, run.count);
                });
            }),
        }
        k.block_sync();

        // Where each kind begins: a scan in each warp, and one over the warps.
        let mine = kinds.get(k, thread);
        let through = inclusive_sum(k, mine, lane);
        k.if_(lane.equals(31), |k| sums.set(k, warp, through));
        k.block_sync();
        let sum = sums.get(k, lane);
        let through_warps = inclusive_sum(k, sum, lane);
        let total = k.shuffle_index(through_warps, 31);
        let earlier = k.eval((warp + 31) % 32);
        let earlier = k.shuffle_index(through_warps, earlier);
        let earlier = k.eval(warp.equals(0).choose::<U32>(0, earlier));
        kinds.set(k, thread, before + earlier + through - mine);
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
                let number = kinds.add(k, tile.kind, 1);
                record(k, run, number, tile.first_row);
            }),
            Tiles::Keys => each_sequence(k, &|k, run| {
                let begin = k.variable::<U32>(0);
                k.if_(lane.equals(0), |k| {
                    let kind = kind(k, tiles.most(run.sequence));
                    let added = kinds.add(k, kind, run.count);
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

/// The tiles of a sequence.
struct Run<'a> {
    sequence: &'a Sequence,
    /// Which one it is of this chunk.
    index: Reg<U32>,
    /// How many there are.
    count: Reg<U32>,
}

/// Some rows of a sequence.
struct Tile {
    first_row: Reg<U32>,
    kind: Reg<U32>,
}

/// How sequences are cut into tiles, and what a row sees.
struct Cut {
    rows: Reg<U32>,
    /// Of tiles of queries.
    visibility: Option<Visibility>,
}

impl Cut {
    fn parameters(k: &mut Builder, which: Tiles) -> Self {
        let rows = Number::TileRows.read(k);
        let visibility = match which {
            Tiles::Queries(mask) => Some(Visibility::parameters(k, mask)),
            Tiles::Keys => None,
        };
        Cut { rows, visibility }
    }

    /// The tiles of a sequence.
    fn of(&self, k: &mut Builder, sequence: &Sequence) -> Reg<U32> {
        let rows = match self.visibility {
            Some(_) => sequence.queries,
            None => sequence.keys,
        };
        k.eval((rows + (self.rows - 1)) / self.rows)
    }

    /// The most that something of a sequence can cost.
    fn most(&self, sequence: &Sequence) -> Reg<U32> {
        match self.visibility {
            Some(_) => sequence.keys,
            None => sequence.queries,
        }
    }

    /// The keys that some row of a tile sees, or as much as there can be.
    fn cost(&self, k: &mut Builder, sequence: &Sequence, first_row: Reg<U32>) -> Reg<U32> {
        let Sequence { queries, keys, .. } = *sequence;
        let Some(visibility) = &self.visibility else { return self.most(sequence) };
        let end_row = (first_row + self.rows).minimum(queries);
        visibility.tile_keys(k, first_row, end_row, [queries, keys])
    }
}

/// What is known of the sequences of a chunk, in shared memory.
struct Known {
    words: [Words; 6],
}

impl Known {
    fn new(k: &mut Builder) -> Self {
        let names =
            ["query starts", "queries", "key starts", "keys", "output starts", "lse starts"];
        Known { words: names.map(|name| Words::new(k, name, CHUNK)) }
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

/// Words in shared memory.
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

    /// What a word was before something was added.
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
