//! The kernel after the products: scales the `f32` sums of `dQ`, rounds them and writes them to the
//! tensor of query gradients.
//!
//! A thread block takes one part of the sums of a query block ([`SumsLayout`]). Its threads read
//! whole cache lines of sums in the accumulator layout, and transpose them into rows through shared
//! memory.

use ptx::{
    Builder, Capability, Element, Expression, F32, GlobalAddress, LoadHint, Program, Reg,
    SharedAddress, StoreHint, Target, U32, U64, Value,
};

use super::ragged::DividedShares;
use super::row_blocks::{RowBlock, RowBlocks, Vectors, index_from_last};
use super::{SumsLayout, shares_suffix};
use crate::attention::Batch;
use crate::element::store_from_f32;
use crate::parameter::{Number, Scale, Tensor, Workspace};
use crate::{Error, build, first_fault, is_16_bit};

/// Threads of a thread block: as many as a warpgroup has.
const THREADS: u32 = 128;

/// Columns of a part, which are the rows of its `dQ^T` accumulator.
const COLUMNS: u32 = 64;

/// Columns that a thread stores at a time: 16 bytes.
const CHUNK: u32 = 8;

/// Rows that a thread block stores at a time.
const ROWS: u32 = THREADS * CHUNK / COLUMNS;

/// Configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rounding {
    /// The target architecture.
    pub target: Target,
    /// The element type of the gradient.
    pub element: Element,
    /// The width of queries: a multiple of 8 up to 256.
    pub head_dim: u32,
    /// The layout of the sums.
    pub sums: SumsLayout,
    /// The keys of a tile, where tiles of a ragged batch round shares of the sums: then this kernel
    /// rounds only those of the last tiles.
    pub shares: Option<u32>,
    /// How sequences are stored.
    pub batch: Batch,
}

/// The query blocks that are rounded.
enum Blocks {
    /// All that the main kernel has not rounded.
    All(RowBlocks),
    /// Those of the last tiles' shares.
    LastShares(DividedShares),
}

impl Rounding {
    /// Returns the name of this configuration.
    pub fn name(&self) -> String {
        let Rounding { target, element, head_dim, sums, shares, batch } = self;
        let SumsLayout { query_block, columns, part_queries } = sums;
        let (sums, batch) = (format!("{query_block}x{columns}_{part_queries}"), batch.suffix());
        let shares = shares_suffix(*shares);
        format!("rounding_{target}_{element}_d{head_dim}_{sums}{batch}{shares}")
    }

    /// Returns the number of thread blocks for this many query blocks.
    pub const fn blocks(&self, query_blocks: u32) -> u32 {
        self.sums.parts() * query_blocks
    }

    /// Builds the kernel. The grid has one thread block for each part of each query block; where
    /// tiles have shares, several for each part of each of the last tiles' shares.
    pub fn program(&self) -> Result<Program, Error> {
        let fault = first_fault([
            (!is_16_bit(self.element), "the element is not f16 or bf16"),
            (
                !self.sums.part_queries.is_multiple_of(ROWS),
                "a part of a block of query rows is not a multiple of 16",
            ),
        ]);
        let builder = |name| Builder::new(name, self.target, THREADS);
        build(self.name(), fault, builder, |k| self.write(k))
    }

    /// Returns the bytes from one thread's sums to the next thread's.
    fn thread_bytes(&self) -> u32 {
        if self.target.has(Capability::VectorReductions) { 16 } else { 4 }
    }

    /// Loads four sums of a thread.
    fn load(&self, k: &mut Builder, address: Value<GlobalAddress>) -> [Reg<F32>; 4] {
        if self.thread_bytes() == 16 {
            return k.load_vector(address, LoadHint::default());
        }
        let address = k.eval(address);
        [0, 1, 2, 3].map(|register| k.load(address + 4 * THREADS * register))
    }

    fn write(&self, k: &mut Builder) {
        let gradient = Vectors::parameters(k, Tensor::QueryGradient, self.batch);
        let sums = Workspace::QueryGradientSums.address(k);
        let scale = Scale::Natural.read(k);
        let blocks = match self.shares {
            None => Blocks::All(RowBlocks::parameters(k, &self.sums, self.batch)),
            Some(keys) => {
                let shares = DividedShares::parameters(k, self.sums.query_block, keys);
                Blocks::LastShares(shares)
            }
        };
        let queries = self.sums.part_queries;
        // Rows of 64 columns are padded, so that neighbours in a column are in different banks.
        let row_bytes = (COLUMNS + CHUNK) * 2;
        let shared = k.shared("rows", queries * row_bytes, 16);
        let shared = k.shared_address(shared);

        let parts = self.sums.parts();
        let rounded = self.shares.is_none().then(|| Number::RoundedBlocks.read(k));
        let (index, thread) = (index_from_last(k), k.thread_index());
        let first = index / parts;
        let first = if let Some(rounded) = rounded { first + rounded } else { first };
        let (index, part) = (k.eval(first), k.eval(index % parts));
        // In a ragged batch only rows that exist are read (`rows`).
        let stage = |k: &mut Builder, number: Reg<U32>, rows: Option<Reg<U32>>| {
            let offset = number.convert::<U64>() * self.sums.block_bytes()
                + (part * self.sums.part_bytes() + thread * self.thread_bytes()).convert::<U64>();
            let mine = k.eval(sums + offset);
            // Accumulators are transposed: their rows are columns of the gradient.
            let lane = k.eval(thread % 32);
            let column = k.eval(thread / 32 * 16 + lane / 4);
            let query = k.eval(lane % 4 * 2);
            let corner = k.eval(shared + query * row_bytes + column * 2);
            for group in 0..queries / 8 {
                let address = mine + group * SumsLayout::REGISTERS_BYTES;
                let values = match rows {
                    None => self.load(k, address),
                    Some(rows) => {
                        let values = [(); 4].map(|()| k.variable::<F32>(0.0));
                        k.if_(rows.greater(8 * group), |k| {
                            let loaded = self.load(k, address);
                            values.into_iter().zip(loaded).for_each(|(to, from)| k.set(to, from));
                        });
                        values
                    }
                };
                for (register, value) in values.into_iter().enumerate() {
                    let (right, down) = (register as u32 / 2 * 8, register as u32 % 2);
                    let at = corner + ((8 * group + down) * row_bytes + right * 2);
                    let value = k.eval(value * scale);
                    store_from_f32(k, self.element, at, value);
                }
            }
            k.block_sync();
        };
        let wide = self.sums.by_columns();
        let first_row = |k: &mut Builder, block: &RowBlock| {
            let first_row = k.eval(block.first_row(self.sums.query_block));
            if wide { first_row } else { k.eval(first_row + part * queries) }
        };
        let store = |k: &mut Builder, block: &RowBlock, first_row: Reg<U32>| {
            let first_column = if wide { k.eval(part * COLUMNS) } else { k.eval(0u32) };
            let column = k.eval(thread % (COLUMNS / CHUNK) * CHUNK);
            let to_column = k.eval(first_column + column);
            for first in (0..queries).step_by(ROWS as usize) {
                let within = k.eval(thread / (COLUMNS / CHUNK) + first);
                let row = k.eval(first_row + within);
                k.if_(row.less(block.query_length) & to_column.less(self.head_dim), |k| {
                    let from = shared + within * row_bytes + column * 2;
                    let chunk = k.load_vector::<U32, SharedAddress, 4>(from, LoadHint::default());
                    let to = gradient.row(k, self.element, block, row);
                    let to = to + to_column.convert::<U64>() * 2;
                    k.store_vector(to, &chunk, StoreHint::default());
                });
            }
        };
        // Query blocks without rows have no sums to read: nothing cleared them or added to them.
        let round_rows = |k: &mut Builder, block: &RowBlock| {
            let first_row = first_row(k, block);
            k.if_(first_row.less(block.query_length), |k| {
                let rows = k.eval(block.query_length - first_row);
                stage(k, block.number, Some(rows));
                store(k, block, first_row);
            });
        };
        match blocks {
            Blocks::All(blocks) if self.batch == Batch::Equal => {
                stage(k, index, None);
                let block = blocks.find(k, index);
                let first_row = first_row(k, &block);
                store(k, &block, first_row);
            }
            Blocks::All(blocks) => {
                let block = blocks.find(k, index);
                round_rows(k, &block);
            }
            Blocks::LastShares(shares) => {
                let after = Number::RoundedAfter.read(k);
                let [from_last, turn] = shares.locate(k, index);
                let tiles = shares.tiles(k);
                k.if_(from_last.less(after.minimum(tiles)), |k| {
                    let tile = k.eval(tiles - 1 - from_last);
                    shares.every_block(k, [tile, turn], |k, block| {
                        round_rows(k, block);
                        // All threads have read the staged rows before the next ones replace them.
                        k.block_sync();
                    });
                });
            }
        }
    }
}
