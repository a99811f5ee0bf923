//! Attention forward with `mma.sync`, on Ampere and everything after it.
//!
//! A block of threads takes some query rows of one head; each of its warps has
//! 16 or 32 of them to itself and walks the key blocks from the last to the
//! first. Keys and values come by `cp.async`, some blocks ahead:
//!
//! ```text
//! for j = n-1 down to 0:
//!     wait for K(j), V(j); send for K(j - ahead), V(j - ahead)
//!     S = Q K(j)^T;  P = softmax(S);  O += P V(j)
//! normalise; store
//! ```
//!
//! A warp does one step after the other: while it computes exponentials, the
//! tensor cores have the products of another warp, of this block of threads or
//! of a second one on the same multiprocessor. Probabilities stay in registers.
//!
//! The parts have a file each: `place` says which rows and keys, `ragged` the
//! same of sequences that have lengths of their own, `copies` brings tiles,
//! `products` multiplies them, `rule` caps, biases and masks scores, `softmax`
//! does what its name says, `walk` is the loop above, `epilogue` stores, and
//! `tuned` says what serves which problem.

mod backward;
mod copies;
mod epilogue;
mod place;
mod products;
mod ragged;
mod rule;
mod softmax;
mod tuned;
mod walk;

pub use backward::{BackwardMma, every_tuned_backward, tuned_backward};
pub use tuned::{Tuned, Workload, every_tuned, tuned, tuned_batch};

use ptx::{Builder, Capability, Element, Program, Swizzle, Target, TileLayout, TileRing};

use crate::attention::{Batch, Rules};
use crate::product::Source;
use crate::{Error, build};
use copies::{Blocks, KeyBlocks};
use place::{Equal, Place};
use ragged::Ragged;
use rule::RuleParameters;
use walk::Warp;

/// What the kernel is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mma {
    /// The architecture: Ampere or later.
    pub target: Target,
    /// The element of all four tensors: `F16` or `BF16`.
    pub element: Element,
    /// The width of queries and keys: a multiple of 8 up to 256.
    pub head_dim: u32,
    /// The width of values and outputs: a multiple of 8 up to 256.
    pub value_head_dim: u32,
    /// The mask, and what changes scores.
    pub rules: Rules,
    /// How sequences lie in their tensors.
    pub batch: Batch,
    /// Warps of a block: 2, 4 or 8.
    pub warps: u32,
    /// Tiles of 16 query rows that each warp takes: 1 or 2. With two, what is
    /// loaded of keys and values serves twice.
    pub row_tiles: u32,
    /// Keys that are copied and multiplied at a time: a multiple of 16.
    pub key_block: u32,
    /// How many key blocks copies run ahead.
    pub ahead: u32,
    /// Where the tensor cores take queries from.
    pub query_source: Source,
    /// Blocks of threads that shall fit on a multiprocessor: bounds registers.
    pub residents: u32,
    /// What products are added up in: `F32`, or `F16` for elements of `F16`.
    pub accumulate: Element,
    /// Whether keys are split over blocks of threads: outputs are then partial,
    /// in `f32`, for the combining kernel to put together.
    pub split: bool,
}

impl Mma {
    /// The name of this configuration.
    pub fn name(&self) -> String {
        let Mma { element, head_dim, value_head_dim, key_block, ahead, .. } = self;
        let rules = self.rules.name();
        let (rows, warps, residents) = (self.query_rows(), self.warps, self.residents);
        let source = match self.query_source {
            Source::Shared => "",
            Source::Registers => "q",
        };
        let half = if self.accumulate == Element::F16 { "_half" } else { "" };
        let split = if self.split { "_split" } else { "" };
        let batch = match self.batch {
            Batch::Equal => String::new(),
            batch => format!("_{}", batch.name()),
        };
        format!(
            "mma_{element}_d{head_dim}x{value_head_dim}_{rules}_{rows}x{key_block}_w{warps}a{ahead}r{residents}{source}{half}{split}{batch}"
        )
    }

    /// Query rows of a block of threads.
    pub fn query_rows(&self) -> u32 {
        self.warps * self.warp_rows()
    }

    /// Blocks of threads of a ragged batch, for a schedule with room for so many
    /// [records](crate::Sequencer::records).
    pub fn ragged_blocks(records: u64, query_heads: u64) -> u64 {
        records * query_heads
    }

    /// Whether its tiles take key blocks from lists: where a mask is a function, and all sequences
    /// have one length.
    pub fn takes_block_lists(&self) -> bool {
        self.rules.mask_function.is_some() && self.batch == Batch::Equal
    }

    /// Query rows of a warp.
    fn warp_rows(&self) -> u32 {
        16 * self.row_tiles
    }

    /// Rows that each thread has elements of.
    fn thread_rows(&self) -> usize {
        2 * self.row_tiles as usize
    }

    fn threads(&self) -> u32 {
        32 * self.warps
    }

    /// Key blocks in shared memory: the one that is read, and those under way.
    fn slots(&self) -> u32 {
        self.ahead + 1
    }

    /// The width of queries and keys in whole steps of the tensor cores.
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

    /// The shared memory of a block of threads.
    pub fn shared_bytes(&self) -> u32 {
        self.query_layout().bytes()
            + self.slots() * (self.key_layout().bytes() + self.value_layout().bytes())
    }

    /// Why there is no such kernel, if so.
    fn fault(&self) -> Option<&'static str> {
        if !(self.target.has(Capability::Mma) && self.target.has(Capability::AsyncCopies)) {
            return Some("the target has no mma.sync on 16-bit floats or no cp.async");
        }
        if !matches!(self.element, Element::F16 | Element::BF16) {
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
        // Each pass of the copying threads takes as many rows as there are
        // groups of eight threads.
        if !self.key_block.is_multiple_of(4 * self.warps) {
            return Some("the key block is not a multiple of four rows a warp");
        }
        if self.ahead == 0 || self.residents == 0 {
            return Some("copies run at least one block ahead, and one block is resident");
        }
        if self.split && (self.batch != Batch::Equal || self.rules.mask.is_window()) {
            return Some("only sequences of one length and without a window are split");
        }
        // One lane of the warp looks up each.
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
    /// | `Query`, `Key`, `Value`, `Output` | addresses, with row and head strides in elements; of an equal batch also batch strides |
    /// | `Lse` | the address of the log-sum-exps, `f32` |
    /// | `ScaleLog2`, positive, or `ScaleInner` and `ScaleOuter` | |
    /// | `ReachLeft`, `ReachRight` | of a window |
    /// | `Chunk` | a [`Divisor`](crate::Divisor), where attention is chunked |
    /// | `Slopes`, `SlopesStride`, `Sinks` | `f32` for each (sequence and) query head |
    /// | `QueryHeads`, `GroupSize` | divisors |
    ///
    /// Addresses and strides are multiples of 16 bytes.
    ///
    /// An equal batch has one block of threads for each tile of query rows, and
    ///
    /// | parameters | |
    /// | --- | --- |
    /// | `QueryLength`, `KeyLength` | |
    /// | `TilesPerHead` | query tiles of a head: a divisor, but under a causal mask |
    /// | `TilesPerGroup`, `HeadsPerGroup` | divisors, under a causal mask |
    ///
    /// Its log-sum-exps are (batch, head, query). Split, there are as many blocks
    /// of threads for each tile as `Splits`, a divisor, of `BlocksPerSplit` key
    /// blocks each, and `Batch`; the outputs are `PartialOutput`, (split, batch,
    /// head, query, dimension) in `f32`, and `PartialLse`, (split, batch, head,
    /// query), both without gaps and the output's strides unused.
    ///
    /// A ragged batch has [`ragged_blocks`](Mma::ragged_blocks) blocks of threads,
    /// and
    ///
    /// | parameters | |
    /// | --- | --- |
    /// | `Schedule` | what the [`Sequencer`](crate::Sequencer) wrote for tiles of [`query_rows`](Mma::query_rows) |
    /// | `LseHeadStride` | from one head's log-sum-exps to the next's |
    /// | `Key batch stride`, `Value batch stride` | from page to page, with pages |
    /// | `Entries`, `BlockTable`, `PageColumns`, `PageSize` | with pages; the size is a divisor |
    pub fn program(&self) -> Result<Program, Error> {
        let block = (self.target, self.threads(), self.residents);
        build(self.name(), self.fault(), block, |k| self.write(k))
    }

    fn write(&self, k: &mut Builder) {
        match self.batch {
            Batch::Equal => {
                let batch = Equal::parameters(k, self.split);
                let rules = RuleParameters::parameters(k, &self.rules);
                let place = batch.place(k, self, &rules.visibility);
                self.attend(k, &rules, &place);
            }
            Batch::Ragged | Batch::Paged => {
                let batch = Ragged::parameters(k, self.batch);
                let rules = RuleParameters::parameters(k, &self.rules);
                batch.with_tile(k, self, &rules.visibility, |k, place| {
                    self.attend(k, &rules, &place);
                });
            }
        }
    }

    /// All of one tile.
    fn attend(&self, k: &mut Builder, rules: &RuleParameters, place: &Place) {
        let query_room = TileRing::new(k, "queries", self.query_layout(), 1);
        let key_ring = TileRing::new(k, "keys", self.key_layout(), self.slots());
        let value_ring = TileRing::new(k, "values", self.value_layout(), self.slots());

        let key_blocks = KeyBlocks::new(k, self, place);
        let queries =
            Blocks::new(k, self.threads(), self.query_layout(), self.head_dim, place.queries);
        queries.clear_padding(k, query_room.slots());
        key_blocks.clear_padding(k, &key_ring);
        let rows = k.eval(place.query_length - place.first_row);
        queries.copy(k, query_room.at(0), place.first_row, Some(rows));

        let mut warp = Warp::new(k, self, rules, place, query_room, key_ring, value_ring);
        warp.walk(k, place, &key_blocks);
        epilogue::store(k, self, rules, place, &warp);
    }
}
