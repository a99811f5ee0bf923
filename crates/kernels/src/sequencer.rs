//! Puts the tiles of a ragged batch in order, on the device.
//!
//! A tile is some query rows of one sequence, and costs what the sequence has
//! keys. Long sequences come first, and of each sequence its last rows, which
//! see the most keys under a causal mask: the list ends in small work, so that
//! blocks that take from it one by one end together.
//!
//! One block does it. Sequences are taken a thousand at a time; each thread
//! counts how many of them come before its own, a scan over their tiles says
//! where each begins in the list, and warps write the records.

use ptx::{
    Builder, Choose, Expression, GlobalAddress, Program, Reg, S32, SharedAddress, Target, U32, U64,
};

use crate::Error;
use crate::decode::{clamp, entry_of, inclusive_sum};

/// The kernel; there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sequencer {
    /// The architecture.
    pub target: Target,
}

/// Where a schedule has the number of its records, how many tiles were claimed
/// and how many blocks are done, and where its records begin.
pub(crate) const COUNT_BYTE: u32 = 0;
pub(crate) const CLAIMED_BYTE: u32 = 4;
pub(crate) const DONE_BYTE: u32 = 8;
pub(crate) const RECORDS_BYTE: u32 = 16;
/// A record: sequence, first row, where its queries start, how many; where its
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

/// Sequences that are sorted together: one for each thread.
const CHUNK: u32 = 1024;
const WARPS: u32 = CHUNK / 32;

impl Sequencer {
    /// Threads of the one block.
    pub const THREADS: u32 = CHUNK;

    /// The name of the kernel.
    pub fn name(&self) -> String {
        format!("sequencer_{}", self.target)
    }

    /// The most records that a batch can have: sequences, rows of all their
    /// queries, rows of a tile.
    pub fn records(batch: u64, query_rows: u64, tile_rows: u64) -> u64 {
        batch + query_rows / tile_rows
    }

    /// Bytes of a schedule with room for so many records.
    pub fn bytes(records: u64) -> u64 {
        RECORDS_BYTE as u64 + RECORD_BYTES as u64 * records
    }

    /// What the kernel writes, in 32-bit words, worked out here.
    pub fn schedule(tile_rows: u32, sequences: &[Slice]) -> Vec<u32> {
        let mut records = Vec::new();
        for (chunk, sequences) in sequences.chunks(CHUNK as usize).enumerate() {
            let mut order: Vec<usize> = (0..sequences.len()).collect();
            order.sort_by_key(|index| std::cmp::Reverse(sequences[*index].keys));
            for index in order {
                let Slice { query_start, queries, key_start, keys, .. } = sequences[index];
                let Slice { output_start, lse_start, .. } = sequences[index];
                let sequence = chunk as u32 * CHUNK + index as u32;
                for tile in (0..queries.div_ceil(tile_rows)).rev() {
                    let first_row = tile * tile_rows;
                    records.extend([sequence, first_row, query_start, queries]);
                    records.extend([key_start, keys, output_start, lse_start]);
                }
            }
        }
        let count = records.len() as u32 * 4 / RECORD_BYTES;
        [vec![count, 0, 0, 0], records].concat()
    }

    /// Builds the kernel.
    ///
    /// The grid is one block. Parameters by name:
    ///
    /// | parameters | |
    /// | --- | --- |
    /// | `schedule`, `records there is room for` | where it goes |
    /// | `rows of a tile` | |
    /// | `batch`, `query length`, `key length` | sequences, and the longest lengths |
    /// | `query rows`, `key rows` | of the tensors in all: bound the starts |
    /// | `query starts`, `query lengths`, `key starts`, `lengths`, `left padding`, `batch entries` | addresses of 32-bit numbers for each sequence, or 0 |
    /// | `query rows of an entry`, `output rows of an entry`, `key rows of an entry` | from a batch entry to the next, where there are no starts |
    /// | `batch entries there are` | |
    /// | `lse rows of an entry` | the same for log-sum-exps; 0: they and outputs lie as packed queries do |
    pub fn program(&self) -> Result<Program, Error> {
        let mut k = Builder::new(self.name(), self.target, CHUNK).blocks_per_multiprocessor(1);
        write(&mut k);
        Ok(k.finish()?)
    }
}

/// What is known of the batch.
struct Batch {
    batch: Reg<U32>,
    query_length: Reg<U32>,
    key_length: Reg<U32>,
    query_rows: Reg<U32>,
    key_rows: Reg<U32>,
    query_starts: Reg<GlobalAddress>,
    query_lengths: Reg<GlobalAddress>,
    key_starts: Reg<GlobalAddress>,
    lengths: Reg<GlobalAddress>,
    padding: Reg<GlobalAddress>,
    entries: Reg<GlobalAddress>,
    query_entry_rows: Reg<U32>,
    output_entry_rows: Reg<U32>,
    key_entry_rows: Reg<U32>,
    entry_count: Reg<U32>,
    lse_entry_rows: Reg<U32>,
}

/// What is known of a sequence.
struct Sequence {
    query_start: Reg<U32>,
    queries: Reg<U32>,
    key_start: Reg<U32>,
    keys: Reg<U32>,
    output_start: Reg<U32>,
    lse_start: Reg<U32>,
}

impl Batch {
    fn parameters(k: &mut Builder) -> Self {
        Batch {
            batch: k.parameter("batch"),
            query_length: k.parameter("query length"),
            key_length: k.parameter("key length"),
            query_rows: k.parameter("query rows"),
            key_rows: k.parameter("key rows"),
            query_starts: k.parameter("query starts"),
            query_lengths: k.parameter("query lengths"),
            key_starts: k.parameter("key starts"),
            lengths: k.parameter("lengths"),
            padding: k.parameter("left padding"),
            entries: k.parameter("batch entries"),
            query_entry_rows: k.parameter("query rows of an entry"),
            output_entry_rows: k.parameter("output rows of an entry"),
            key_entry_rows: k.parameter("key rows of an entry"),
            entry_count: k.parameter("batch entries there are"),
            lse_entry_rows: k.parameter("lse rows of an entry"),
        }
    }

    /// Whatever memory holds, what comes out is within the launch's bounds.
    fn sequence(&self, k: &mut Builder, index: Reg<U32>) -> Sequence {
        let (query_start, queries) = self.slice(
            k,
            index,
            (self.query_starts, self.query_lengths),
            (index, self.query_entry_rows),
            (self.query_length, self.query_rows),
        );
        let entry = entry_of(k, self.entries, index, index.reinterpret::<S32>());
        let last = k.eval(self.entry_count - 1);
        let entry = clamp(k, entry, last);
        let (key_start, keys) = self.slice(
            k,
            index,
            (self.key_starts, self.lengths),
            (entry, self.key_entry_rows),
            (self.key_length, self.key_rows),
        );
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

    /// The rows of a sequence: from its start in a list, or the start of its
    /// entry, to the next one's start, or as many as there may be; fewer where
    /// its length is in a list.
    fn slice(
        &self,
        k: &mut Builder,
        index: Reg<U32>,
        (starts, lengths): (Reg<GlobalAddress>, Reg<GlobalAddress>),
        (entry, entry_rows): (Reg<U32>, Reg<U32>),
        (most, rows): (Reg<U32>, Reg<U32>),
    ) -> (Reg<U32>, Reg<U32>) {
        let signed = |value: Reg<U32>| value.reinterpret::<S32>();
        let of_entry = k.eval(entry * entry_rows);
        let start = entry_of(k, starts, index, signed(of_entry));
        let start = clamp(k, start, rows);
        let all = k.eval(start + most);
        let end = entry_of(k, starts, index + 1, signed(all));
        let end = clamp(k, end, rows);
        let there = k.eval(signed(end) - signed(start));
        let there = clamp(k, there, most);
        let length = entry_of(k, lengths, index, signed(there));
        (start, clamp(k, length, there))
    }
}

fn write(k: &mut Builder) {
    let schedule: Reg<GlobalAddress> = k.parameter("schedule");
    let room: Reg<U32> = k.parameter("records there is room for");
    let tile_rows: Reg<U32> = k.parameter("rows of a tile");
    let batch = Batch::parameters(k);
    let costs = Words::new(k, "costs", CHUNK);
    let tiles = Words::new(k, "tiles", CHUNK);
    let order = Words::new(k, "order", CHUNK);
    let sums = Words::new(k, "sums of warps", WARPS);

    let thread = k.thread_index();
    let lane = k.lane();
    let warp = k.eval(thread / 32);
    let tiles_of = |k: &mut Builder, sequence: &Sequence| {
        k.eval((sequence.queries + (tile_rows - 1)) / tile_rows)
    };
    // Records before this chunk.
    let before = k.variable(0);
    k.for_range(0, batch.batch, CHUNK, |k, first| {
        let here = k.eval((batch.batch - first).minimum(CHUNK));
        let takes_part = k.eval(thread.less(here));
        let cost = k.variable(0);
        let count = k.variable(0);
        k.if_(takes_part, |k| {
            let index = k.eval(first + thread);
            let sequence = batch.sequence(k, index);
            k.set(cost, sequence.keys);
            let tiles = tiles_of(k, &sequence);
            k.set(count, tiles);
        });
        costs.set(k, thread, cost);
        k.block_sync();

        // Its rank: how many cost more, or as much and come before. Threads without a sequence
        // stay where they are, with no tiles.
        let rank = k.variable(takes_part.choose::<U32>(0, thread));
        k.if_(takes_part, |k| {
            k.for_range(0, here, 1, |k, other| {
                let others = costs.get(k, other);
                let more = others.greater(cost) | (others.equals(cost) & other.less(thread));
                k.set(rank, rank + more.choose::<U32>(1, 0));
            });
        });
        tiles.set(k, rank, count);
        order.set(k, rank, thread);
        k.block_sync();

        // Where each rank begins: a scan in each warp, and one over the warps.
        let mine = tiles.get(k, thread);
        let through = inclusive_sum(k, mine, lane);
        k.if_(lane.equals(31), |k| sums.set(k, warp, through));
        k.block_sync();
        let sum = sums.get(k, lane);
        let through_warps = inclusive_sum(k, sum, lane);
        let total = k.shuffle_index(through_warps, 31);
        let earlier = k.eval((warp + 31) % 32);
        let earlier = k.shuffle_index(through_warps, earlier);
        let earlier = k.eval(warp.equals(0).choose::<U32>(0, earlier));
        tiles.set(k, thread, before + earlier + through - mine);
        k.block_sync();

        k.for_range(warp, here, WARPS, |k, rank| {
            let index = order.get(k, rank);
            let index = k.eval(first + index);
            let start = tiles.get(k, rank);
            let sequence = batch.sequence(k, index);
            let tiles = tiles_of(k, &sequence);
            k.for_range(lane, tiles, 32, |k, tile| {
                let number = k.eval(start + tile);
                k.if_(number.less(room), |k| {
                    let first_row = k.eval((tiles - 1 - tile) * tile_rows);
                    let at = k.eval(
                        schedule + RECORDS_BYTE + number.convert::<U64>() * RECORD_BYTES as u64,
                    );
                    let rows = [index, first_row, sequence.query_start, sequence.queries];
                    k.store_vector(at, &rows, Default::default());
                    let Sequence { key_start, keys, output_start, lse_start, .. } = sequence;
                    let rest = [key_start, keys, output_start, lse_start];
                    k.store_vector(at + 16, &rest, Default::default());
                });
            });
        });
        k.set(before, before + total);
        k.block_sync();
    });
    k.if_(thread.equals(0), |k| {
        let zero = k.eval::<U32>(0);
        let count = k.eval(before.minimum(room));
        k.store_vector(schedule + COUNT_BYTE, &[count, zero, zero, zero], Default::default());
    });
}

/// Words in shared memory.
struct Words {
    offset: u32,
}

impl Words {
    fn new(k: &mut Builder, name: &str, count: u32) -> Self {
        Words { offset: k.shared(name, 4 * count, 16) }
    }

    fn address(&self, k: &mut Builder, index: Reg<U32>) -> Reg<SharedAddress> {
        let base = k.shared_address(self.offset);
        k.eval(base + index * 4)
    }

    fn get(&self, k: &mut Builder, index: Reg<U32>) -> Reg<U32> {
        let address = self.address(k, index);
        k.load(address)
    }

    fn set(&self, k: &mut Builder, index: Reg<U32>, value: impl Into<ptx::Value<U32>>) {
        let address = self.address(k, index);
        k.store(address, value);
    }
}
