//! Attention forward with `mma.sync`, on Ampere and everything after it.
//!
//! A thread block takes a tile of query rows of one head. Each of its warps owns 16 or 32 of these
//! rows and walks the key blocks from the last to the first. Keys and values are loaded by
//! `cp.async`, one key block in advance:
//!
//! ```text
//! for j = n-1 down to 0:
//!     wait for K(j), V(j);  issue the copies of K(j - 1), V(j - 1)
//!     S = Q K(j)^T;  P = softmax(S);  O += P V(j)
//! normalise; store
//! ```
//!
//! A warp does not overlap its own steps: while it computes exponentials, the tensor cores run the
//! products of another warp, of this thread block or of a second one on the same multiprocessor.
//! Probabilities stay in registers.
//!
//! Each stage of the kernel has its file: `work_tile` assigns rows and keys to thread blocks,
//! `ragged` does so for variable-length batches, `copies` loads tiles, `products` has the matrix
//! products, `rule` the score rules and masks, `softmax` the online softmax, `walk` the loop above,
//! `epilogue` stores, and `tuned` chooses the configuration for a problem. `backward` is the kernel
//! for gradients.

mod backward;
mod copies;
mod epilogue;
mod products;
mod ragged;
mod rule;
mod softmax;
mod tuned;
mod walk;
mod work_tile;

pub(crate) use backward::every_tuned_backward;
pub use backward::{BackwardMma, tuned_backward};
pub use tuned::{Tuned, Workload, every_tuned, tuned, tuned_batch};

use ptx::{Builder, Capability, Element, Program, Swizzle, Target, TileLayout, TileRing};

use crate::attention::{Batch, Rules};
use crate::product::Source;
use crate::{Error, build, is_16_bit, resident_blocks};
use copies::{Blocks, KeyBlocks};
use ragged::Ragged;
use rule::RuleParameters;
use walk::Warp;
use work_tile::{Equal, WorkTile};

/// How many key blocks the copies run ahead of the products.
const AHEAD: u32 = 1;

/// The key blocks in shared memory: the one being read, and those in flight.
const SLOTS: u32 = AHEAD + 1;

/// Configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mma {
    /// The target architecture: Ampere or later.
    pub target: Target,
    /// The element type of all four tensors: `F16` or `BF16`.
    pub element: Element,
    /// The width of queries and keys: a multiple of 8 up to 256.
    pub head_dim: u32,
    /// The width of values and outputs: a multiple of 8 up to 256.
    pub value_head_dim: u32,
    /// The mask, and the rules that change scores.
    pub rules: Rules,
    /// How sequences are stored in their tensors.
    pub batch: Batch,
    /// Warps of a thread block: 2, 4 or 8.
    pub warps: u32,
    /// Tiles of 16 query rows for each warp: 1 or 2. With two, each fragment of keys or values that
    /// is loaded is used twice.
    pub row_tiles: u32,
    /// Keys that are copied and multiplied at a time: a multiple of 16.
    pub key_block: u32,
    /// Where the tensor cores take queries from.
    pub query_source: Source,
    /// Thread blocks that are to be resident on a multiprocessor, which bounds their registers.
    pub residents: u32,
    /// The type of the accumulators: `F32`, or `F16` for elements of `F16`.
    pub accumulate: Element,
    /// Whether keys are split over thread blocks (split-KV). Outputs are then partial, in `f32`,
    /// and a second kernel combines them.
    pub split: bool,
}

impl Mma {
    /// Returns the name of this configuration.
    pub fn name(&self) -> String {
        let Mma { element, head_dim, value_head_dim, key_block, .. } = self;
        let rules = self.rules.name();
        let (rows, warps, residents) = (self.query_rows(), self.warps, self.residents);
        let source = match self.query_source {
            Source::Shared => "",
            Source::Registers => "q",
        };
        let half = if self.accumulate == Element::F16 { "_half" } else { "" };
        let split = if self.split { "_split" } else { "" };
        let batch = self.batch.suffix();
        format!(
            "mma_{element}_d{head_dim}x{value_head_dim}_{rules}_{rows}x{key_block}_w{warps}a{AHEAD}r{residents}{source}{half}{split}{batch}"
        )
    }

    /// Returns the number of query rows of a thread block.
    pub fn query_rows(&self) -> u32 {
        self.warps * self.warp_rows()
    }

    /// Returns whether tiles take their key blocks from lists: where the mask is a function and all
    /// sequences have the same length.
    pub fn takes_block_lists(&self) -> bool {
        self.rules.mask_function.is_some() && self.batch == Batch::Equal
    }

    /// Returns the number of query rows of a warp.
    fn warp_rows(&self) -> u32 {
        16 * self.row_tiles
    }

    /// Returns the number of rows of which a thread holds elements.
    fn thread_rows(&self) -> usize {
        2 * self.row_tiles as usize
    }

    fn threads(&self) -> u32 {
        32 * self.warps
    }

    /// Returns the width of queries and keys, rounded up to whole `mma` steps of 16.
    fn padded_dim(&self) -> u32 {
        self.head_dim.next_multiple_of(16)
    }

    fn layout(&self, rows: u32, columns: u32) -> TileLayout {
        TileLayout { element: self.element, rows, columns, swizzle: Swizzle::B128 }
    }

    fn query_layout(&self) -> TileLayout {
        self.layout(self.query_rows(), self.padded_dim())
    }

    fn key_layout(&self) -> TileLayout {
        self.layout(self.key_block, self.padded_dim())
    }

    fn value_layout(&self) -> TileLayout {
        self.layout(self.key_block, self.value_head_dim)
    }

    /// Returns the bytes of shared memory of a thread block.
    pub fn shared_bytes(&self) -> u32 {
        self.query_layout().bytes()
            + SLOTS * (self.key_layout().bytes() + self.value_layout().bytes())
    }

    /// Returns why this configuration is not supported, or `None` if it is.
    fn fault(&self) -> Option<&'static str> {
        if !(self.target.has(Capability::Mma) && self.target.has(Capability::AsyncCopies)) {
            return Some("the target has no mma.sync on 16-bit floats or no cp.async");
        }
        if !is_16_bit(self.element) {
            return Some("the element is not f16 or bf16");
        }
        for dim in [self.head_dim, self.value_head_dim] {
            if dim == 0 || dim > 256 || !dim.is_multiple_of(8) {
                return Some("a head dimension is not a multiple of 8 up to 256");
            }
        }
        if ![2, 4, 8].contains(&self.warps) {
            return Some("there are two, four or eight warps");
        }
        if ![1, 2].contains(&self.row_tiles) {
            return Some("a warp takes one or two tiles of 16 rows");
        }
        if self.key_block == 0 || !self.key_block.is_multiple_of(16) {
            return Some("the key block is not a multiple of 16");
        }
        // A pass of the copying threads covers one row for every eight threads: four rows a warp.
        if !self.key_block.is_multiple_of(4 * self.warps) {
            return Some("the key block is not a multiple of four rows a warp");
        }
        if self.residents == 0 {
            return Some("at least one block is resident");
        }
        if self.split && (self.batch != Batch::Equal || self.rules.mask.is_window()) {
            return Some("only sequences of one length and without a window are split");
        }
        // Each lane of a warp looks up the page of one row.
        if self.batch == Batch::Paged && self.warp_copies() > 32 {
            return Some("a warp copies more than 32 rows of a key block in pages");
        }
        match (self.accumulate, self.element) {
            (Element::F32, _) | (Element::F16, Element::F16) => None,
            _ => Some("products are added up in f32, or in f16 if the element is f16"),
        }
    }

    /// Builds the kernel.
    ///
    /// Parameters by name:
    ///
    /// | parameters | |
    /// | --- | --- |
    /// | `Query`, `Key`, `Value`, `Output` | addresses, with row and head strides in elements, and batch strides for equal lengths |
    /// | `Lse` | the address of the log-sum-exps, `f32` |
    /// | `ScaleLog2`, positive, or the factors of capped scores | see [`Scale`](crate::parameter::Scale) |
    /// | `ReachLeft`, `ReachRight` | of a window |
    /// | `Chunk` | a [`Divisor`](crate::Divisor), where attention is chunked |
    /// | `Slopes`, `SlopesStride`, `Sinks` | `f32` for each (sequence and) query head |
    /// | `QueryHeads`, `GroupSize` | divisors |
    ///
    /// Addresses and strides are multiples of 16 bytes.
    ///
    /// For equal lengths the grid has one thread block for each tile of query rows, and there are
    ///
    /// | parameters | |
    /// | --- | --- |
    /// | `QueryLength`, `KeyLength` | |
    /// | `TilesPerHead` | query tiles of a head: a divisor, except under a causal mask |
    /// | `TilesPerGroup`, `HeadsPerGroup` | divisors, under a causal mask |
    ///
    /// Log-sum-exps are laid out as (batch, head, query). With `split`, each tile has `Splits` (a
    /// divisor) thread blocks of `BlocksPerSplit` key blocks each, and there is `Batch`. The
    /// results are then `PartialOutput`, (split, batch, head, query, dimension) in `f32`, and
    /// `PartialLse`, (split, batch, head, query), both contiguous; the strides of `Output` are
    /// unused.
    ///
    /// For a ragged batch the grid has one thread block for each query head and
    /// [record](crate::Sequencer::records) that the schedule has room for, and there are
    ///
    /// | parameters | |
    /// | --- | --- |
    /// | `Schedule` | the schedule that the [`Sequencer`](crate::Sequencer) wrote for tiles of [`query_rows`](Mma::query_rows) |
    /// | `LseHeadStride` | elements from one head's log-sum-exps to the next's |
    /// | `Key batch stride`, `Value batch stride` | from page to page, with a page table |
    /// | `Entries`, `BlockTable`, `PageColumns`, `PageSize` | with a page table; the size is a divisor |
    pub fn program(&self) -> Result<Program, Error> {
        let builder = |name| resident_blocks(name, self.target, self.threads(), self.residents);
        build(self.name(), self.fault(), builder, |k| self.write(k))
    }

    fn write(&self, k: &mut Builder) {
        match self.batch {
            Batch::Equal => {
                let batch = Equal::parameters(k, self.split);
                let rules = RuleParameters::parameters(k, &self.rules);
                let tile = batch.tile(k, self, &rules.visibility);
                self.attend(k, &rules, &tile);
            }
            Batch::Ragged | Batch::Paged => {
                let batch = Ragged::parameters(k, self.batch);
                let rules = RuleParameters::parameters(k, &self.rules);
                batch.with_tile(k, self, &rules.visibility, |k, tile| {
                    self.attend(k, &rules, &tile);
                });
            }
        }
    }

    /// Emits all of the work on one tile.
    fn attend(&self, k: &mut Builder, rules: &RuleParameters, tile: &WorkTile) {
        let query_room = TileRing::new(k, "queries", self.query_layout(), 1);
        let key_ring = TileRing::new(k, "keys", self.key_layout(), SLOTS);
        let value_ring = TileRing::new(k, "values", self.value_layout(), SLOTS);

        let key_blocks = KeyBlocks::new(k, self, tile);
        let queries =
            Blocks::new(k, self.threads(), self.query_layout(), self.head_dim, tile.queries);
        queries.clear_padding(k, query_room.slots());
        key_blocks.clear_padding(k, &key_ring);
        let rows = k.eval(tile.query_length - tile.first_row);
        queries.copy(k, query_room.at(0), tile.first_row, Some(rows));

        let mut warp = Warp::new(k, self, rules, tile, query_room, key_ring, value_ring);
        warp.walk(k, tile, &key_blocks);
        epilogue::store(k, self, rules, tile, &warp);
    }
}
