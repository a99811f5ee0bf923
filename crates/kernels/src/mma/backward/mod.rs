//! Attention backward with `mma.sync`, on Ampere and everything after it.
//!
//! The algorithm and the kernels before and after it are those of [`backward`](crate::backward);
//! this is the main kernel between them. A thread block owns a key block of one key head and walks
//! the query blocks that see it, for all query heads that share the key head. Queries and output
//! gradients are loaded by `cp.async`, one query block ahead:
//!
//! ```text
//! for each query block:
//!     wait for Q, dO;  issue the copies of the next ones
//!     S^T = K Q^T;  P = exp(S - lse);  dP^T = V dO^T;  dS = P * (dP - delta)
//!     dV += P^T dO;  dK += dS^T Q
//!     dS to shared memory;  synchronise all warps
//!     dQ^T = K^T dS^T, added to the f32 workspace
//! store dK, dV
//! ```
//!
//! Scores are computed *transposed*: a row of an accumulator is a key, so `P^T` and `dS^T` are in
//! registers as the A operand of the products for `dV` and `dK`. Where a warp holds all columns of
//! its keys' gradients, they stay there. Where heads are too wide for that, several warps share
//! their keys: each computes the scores of some queries and the gradients of some columns. `P` and
//! `dS` then both go through shared memory, and the products for `dV` and `dK` come after the
//! synchronisation.
//!
//! The mapping of thread blocks to key blocks, for equal lengths and ragged batches, and the order
//! of additions in the deterministic mode are shared with the Hopper kernel (`tile_scheduler` and
//! `order` of its module). No warp is reserved for turns: thread 0 waits for them and passes them
//! on.
//!
//! Each stage of the kernel has its file: `tensors` holds addresses, `lanes` the `ldmatrix`
//! addressing of each warp, `weights` turns scores into `P`, `step` is one query block, `walk` is
//! the loop above, `epilogue` stores, and `tuned` chooses the configuration for a problem.

mod epilogue;
mod lanes;
mod step;
mod tensors;
mod tuned;
mod walk;
mod weights;

pub(crate) use tuned::every_tuned_backward;
pub use tuned::tuned_backward;

use ptx::{
    Builder, Capability, Element, Expression, Program, Reg, SharedAddress, Swizzle, Target,
    TileLayout,
};

use crate::attention::{Batch, Rules};
use crate::backward::BackwardPass;
use crate::backward::tile_scheduler::TileScheduler;
use crate::{Error, build, first_fault, fits_shared_memory, is_16_bit, resident_blocks};
use tensors::Tensors;
use weights::WeightRule;

/// Configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardMma {
    /// The target architecture: Ampere or later.
    pub target: Target,
    /// The element type of all tensors: `F16` or `BF16`.
    pub element: Element,
    /// The width of queries and keys: a multiple of 8 up to 256.
    pub head_dim: u32,
    /// The width of values and outputs: a multiple of 8 up to 256.
    pub value_head_dim: u32,
    /// The mask, and the rules that change scores.
    pub rules: Rules,
    /// Tiles of 16 keys for each warp: 1 or 2. With two, each fragment of queries or output
    /// gradients that is loaded is used twice.
    pub key_tiles: u32,
    /// Warps, or groups of warps, with keys of their own.
    pub key_warps: u32,
    /// Warps that share the same keys: 1, 2 or 4. Each computes the scores of some queries of a
    /// query block, and some columns of the gradients.
    pub column_warps: u32,
    /// Queries of a query block.
    pub query_block: u32,
    /// Queries whose scores a warp holds in registers at a time.
    pub part: u32,
    /// How many query blocks the copies run ahead: 1, or 0 where shared memory has no room.
    pub ahead: u32,
    /// Thread blocks that are to be resident on a multiprocessor, which bounds their registers.
    pub residents: u32,
    /// Whether `dQ` is bitwise reproducible from run to run.
    pub deterministic: bool,
    /// How sequences are stored: with equal lengths, or ragged.
    pub batch: Batch,
}

/// Byte offsets of the tiles in shared memory.
#[derive(Clone, Copy)]
struct Shared {
    keys: u32,
    values: u32,
    queries: u32,
    output_gradients: u32,
    /// The tile of `P`, where warps share keys; else `P` stays in registers.
    weights: Option<u32>,
    score_gradients: u32,
    statistics: u32,
}

impl BackwardMma {
    /// Returns the name of this configuration.
    pub fn name(&self) -> String {
        let BackwardMma { element, head_dim, value_head_dim, query_block, .. } = self;
        let BackwardMma { key_tiles, key_warps, column_warps, part, ahead, residents, .. } = self;
        let (rules, keys) = (self.rules.name(), self.key_block());
        let mode = if self.deterministic { "_deterministic" } else { "" };
        let batch = self.batch.suffix();
        format!(
            "backward_mma_{element}_d{head_dim}x{value_head_dim}_{rules}_{query_block}x{keys}\
             _w{key_tiles}x{key_warps}x{column_warps}p{part}a{ahead}r{residents}{mode}{batch}"
        )
    }

    /// Returns the number of keys of a thread block.
    pub const fn key_block(&self) -> u32 {
        self.key_warps * self.warp_keys()
    }

    /// Returns the number of keys of a warp.
    const fn warp_keys(&self) -> u32 {
        16 * self.key_tiles
    }

    const fn warps(&self) -> u32 {
        self.key_warps * self.column_warps
    }

    const fn threads(&self) -> u32 {
        32 * self.warps()
    }

    /// Returns the number of queries of a query block whose scores one warp computes.
    const fn warp_queries(&self) -> u32 {
        self.query_block / self.column_warps
    }

    /// Returns the number of query blocks in shared memory: the one being read, and the one in
    /// flight.
    const fn slots(&self) -> u32 {
        self.ahead + 1
    }

    /// Returns how many steps of 16 columns of `dK` or `dV` a warp holds.
    const fn column_steps(&self, dim: u32) -> u32 {
        dim.div_ceil(16 * self.column_warps)
    }

    /// Returns over how many warps the columns of `dQ` are divided, and over how many its queries:
    /// the division with the fewest operand loads.
    fn query_gradient_warps(&self) -> [u32; 2] {
        let loaded = |columns: u32| {
            let queries = self.warps() / columns;
            16 * self.head_dim.div_ceil(16 * columns) + self.query_block / queries
        };
        let fits = |columns: &u32| {
            let queries = self.warps() / columns;
            queries <= 4 && self.query_block.is_multiple_of(16 * queries)
        };
        let columns = [4, 2, 1].into_iter().filter(|it| it <= &self.warps()).filter(fits);
        let columns = columns.min_by_key(|columns| loaded(*columns)).unwrap_or(4);
        [columns, self.warps() / columns]
    }

    fn layout(&self, rows: u32, columns: u32) -> TileLayout {
        // Whole panels: a partial one would take the same memory, and reads beyond the columns find
        // zeros.
        let columns = columns.next_multiple_of(64);
        TileLayout { element: self.element, rows, columns, swizzle: Swizzle::B128 }
    }

    fn query_layout(&self) -> TileLayout {
        self.layout(self.query_block, self.head_dim)
    }

    fn output_gradient_layout(&self) -> TileLayout {
        self.layout(self.query_block, self.value_head_dim)
    }

    fn key_layout(&self) -> TileLayout {
        self.layout(self.key_block(), self.head_dim)
    }

    fn value_layout(&self) -> TileLayout {
        self.layout(self.key_block(), self.value_head_dim)
    }

    /// Returns the layout of a tile of `P` or `dS`: a row for each key, a column for each query.
    fn score_layout(&self) -> TileLayout {
        self.layout(self.key_block(), self.query_block)
    }

    /// Returns the backward pass that this kernel is the main part of.
    pub fn pass(&self) -> BackwardPass {
        BackwardPass {
            target: self.target,
            element: self.element,
            head_dim: self.head_dim,
            value_head_dim: self.value_head_dim,
            rules: self.rules,
            query_block: self.query_block,
            key_block: self.key_block(),
            deterministic: self.deterministic,
            clear_and_round: false,
            batch: self.batch,
        }
    }

    /// Returns the bytes of shared memory of a thread block.
    pub fn shared_bytes(&self) -> u32 {
        let once = self.key_layout().bytes() + self.value_layout().bytes();
        let slot = self.query_layout().bytes() + self.output_gradient_layout().bytes();
        let scores = if self.column_warps > 1 { 2 } else { 1 };
        once + self.slots() * (slot + self.pass().statistics_bytes())
            + scores * self.score_layout().bytes()
            + TileScheduler::shared_bytes(self.batch)
    }

    /// Returns whether shared memory holds as many thread blocks as are to be resident.
    fn fits(&self) -> bool {
        fits_shared_memory(self.target, self.shared_bytes(), self.residents)
    }

    /// Returns why this configuration is not supported, or `None` if it is.
    fn fault(&self) -> Option<&'static str> {
        let wrong = |dim: u32| dim == 0 || dim > 256 || !dim.is_multiple_of(8);
        let powers = [self.key_tiles, self.key_warps, self.column_warps, self.query_block];
        first_fault([
            (
                !(self.target.has(Capability::Mma) && self.target.has(Capability::AsyncCopies)),
                "the target has no mma.sync on 16-bit floats or no cp.async",
            ),
            (!is_16_bit(self.element), "the element is not f16 or bf16"),
            (
                wrong(self.head_dim) || wrong(self.value_head_dim),
                "a head dimension is not a multiple of 8 up to 256",
            ),
            (
                powers.iter().any(|count| !count.is_power_of_two()),
                "tiles, warps and queries are not powers of two",
            ),
            (self.key_tiles > 2, "a warp has one or two tiles of 16 keys"),
            (self.column_warps > 4, "more than four warps share their keys"),
            (
                ![2, 4, 8].contains(&self.warps()) || self.warps() / 4 > self.query_block / 16,
                "there are two, four or eight warps, and work for each",
            ),
            (
                self.part < 8 || !self.warp_queries().is_multiple_of(self.part),
                "the queries of a warp are not a multiple of a part of them",
            ),
            (
                self.column_warps == 1 && !self.part.is_multiple_of(16),
                "operands have a multiple of 16 queries",
            ),
            (
                self.column_warps > 1
                    && (self.query_block > 64 || self.warp_queries() != self.part),
                "warps that share their keys have their scores at a time, of 64 queries at most",
            ),
            (
                // A pass of the copying threads covers one row for every eight threads.
                !self.query_block.is_multiple_of(self.threads() / 8)
                    || !self.key_block().is_multiple_of(self.threads() / 8),
                "a block is not a multiple of four rows a warp",
            ),
            (self.ahead > 1 || self.residents == 0, "copies run one block ahead, or none"),
            (self.batch == Batch::Paged, "gradients of keys in pages are not computed"),
            (
                !self.rules.has_gradients(),
                "capped scores that go through a function are not differentiated",
            ),
            (!self.fits(), "there is not enough shared memory"),
        ])
    }

    /// Builds the kernel.
    ///
    /// Parameters by name:
    ///
    /// | parameters | |
    /// | --- | --- |
    /// | `Query`, `Key`, `Value`, `OutputGradient`, `KeyGradient`, `ValueGradient` | addresses, with strides in elements |
    /// | `RowStatistics`, `QueryGradientSums` | the statistics that [`RowSums`](crate::backward::RowSums) wrote, and the `dQ` sums that it cleared |
    /// | `QueryLength`, `KeyLength`, `KeyBlocks`, or over ragged batches `Schedule` and `QueryBlocks` | |
    /// | `KeyHeads`, `GroupSize` | |
    /// | `Turns`, and the numbers of the tile order, in the deterministic mode | |
    /// | `ScaleLog2`, or the factors of capped scores; `ScaleNatural` | |
    /// | the parameters of the rules | |
    ///
    /// Addresses and strides are multiples of 16 bytes. The grid has one thread block for each key
    /// block of each key head and sequence or, over ragged batches, for each record that the
    /// schedule has room for and each key head.
    pub fn program(&self) -> Result<Program, Error> {
        let builder = |name| resident_blocks(name, self.target, self.threads(), self.residents);
        build(self.name(), self.fault(), builder, |k| self.write(k))
    }

    fn write(&self, k: &mut Builder) {
        let tensors = Tensors::parameters(k, self);
        let scheduler = TileScheduler::parameters(k, &self.pass());
        let rule = WeightRule::parameters(k, &self.rules);
        let shared = self.shared(k);
        if self.batch != Batch::Equal {
            let thread = k.thread_index();
            k.if_(thread.equals(0), |k| scheduler.post(k));
            k.block_sync();
        }
        scheduler.if_tile(k, |k| walk::walk(k, self, &tensors, &scheduler, &rule, &shared));
    }

    /// Reserves the shared memory.
    fn shared(&self, k: &mut Builder) -> Shared {
        let mut tiles = |name: &str, layout: TileLayout, count: u32| {
            k.shared(name, count * layout.bytes(), layout.alignment())
        };
        Shared {
            keys: tiles("keys", self.key_layout(), 1),
            values: tiles("values", self.value_layout(), 1),
            queries: tiles("queries", self.query_layout(), self.slots()),
            output_gradients: tiles(
                "output gradients",
                self.output_gradient_layout(),
                self.slots(),
            ),
            weights: (self.column_warps > 1).then(|| tiles("P", self.score_layout(), 1)),
            score_gradients: tiles("dS", self.score_layout(), 1),
            statistics: k.shared(
                "row statistics",
                self.slots() * self.pass().statistics_bytes(),
                16,
            ),
        }
    }
}

/// Returns the address of a slot of a ring of tiles.
fn slot(k: &mut Builder, first: u32, layout: TileLayout, slot: u32) -> Reg<SharedAddress> {
    k.shared_address(first + slot * layout.bytes())
}
