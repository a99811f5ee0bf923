//! Decode: attention of a few queries per sequence over a long KV cache, bound by memory bandwidth.
//!
//! The query heads that share a key head are packed into the rows of one tile (pack-GQA), so that
//! each key and value is read once. The key tiles of all sequences of the batch form one list,
//! which is cut into equal shares (split-KV), one for each *team* of thread blocks; a team has one
//! block for each key head and each tile of query rows. A sequence that several teams share is
//! combined by the block that finishes last. Lengths are read on the device, so that the launch has
//! the same shape whatever they are, and the result depends on the lengths and the number of teams
//! alone, to the last bit.
//!
//! ```text
//! for each sequence that the team has a part of:         mod.rs, schedule.rs
//!     for each tile of keys of a warp:                    walk.rs
//!         wait for the tile, copied some tiles ahead      copies.rs, look_up.rs
//!         S = Q K^T                                       products.rs
//!         S = rule(S), masked                             mask.rs, attention/
//!         P = 2^(S - m), l += row sums, rescale           softmax.rs
//!         O^T += V^T P^T                                  products.rs
//!     merge the warps                                     merge.rs
//!     the whole sequence?  O / l and log-sum-exp          merge.rs
//!     a part of it?        store it; the last combines    combine.rs
//! ```
//!
//! Such shares are best for speed, but the bits of a sequence's result then depend on the rest of
//! the batch, which decides where its keys are cut. With [`Splits::Fixed`] they do not: every
//! sequence is cut at the same keys whatever else is in the batch, the list holds splits of a fixed
//! number of tiles instead of single tiles, and partial results are folded in an order that is
//! independent of which block computed them (fixed.rs).
//!
//! Warps do not synchronise with each other until the merge: each copies its own tiles, waits for
//! its own copies and keeps its own row maxima.
//!
//! 8-bit caches halve the bytes read. Keys and values are widened to `f16` on the way from shared
//! memory to the tensor cores, two numbers per instruction; queries (queries.rs) and probabilities
//! are `f16` too. The scales of the cache are in scales.rs.

mod combine;
mod copies;
mod fixed;
mod look_up;
mod mask;
mod merge;
mod products;
mod queries;
mod scales;
mod schedule;
mod softmax;
mod tuned;
mod walk;

pub use tuned::{DecodeWorkload, Tuned, every_tuned, rows_in_one_page, tuned};

use ptx::{
    Builder, Capability, Element, Expression, Program, Reg, SteppedLanes, Swizzle, Target,
    TileLayout, U32,
};

use crate::attention::function::lower::Functions;
use crate::attention::rows::Sinks;
use crate::attention::scores::ScoreRule;
use crate::attention::sequences::Places;
use crate::attention::{MaskKind, Rules};
use crate::cache::{Cache, Scales};
use crate::dependent_launch::wait_for_earlier_grids;
use crate::divisor::DivisorRegisters;
use crate::parameter::Number;
use crate::{Error, build, first_fault, fits_shared_memory, is_16_bit, resident_blocks};
use copies::Copies;
use fixed::Fixed;
use look_up::{RUN, tiles_of_entries};
use merge::{Merge, Results};
use queries::Inputs;
use scales::Scaling;
use schedule::{Cursor, Lengths, Schedule};
use walk::Walk;

/// The configuration that a decode kernel is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Decode {
    /// The target architecture.
    pub target: Target,
    /// The element of queries and outputs: `F16` or `BF16`.
    pub element: Element,
    /// The element and scales of keys and values: the queries' element, or one of 8 bits.
    pub cache: Cache,
    /// Head dim of queries and keys: a multiple of 8 up to 256, or of 16 with an 8-bit cache.
    pub head_dim: u32,
    /// Head dim of values and outputs, with the same bounds.
    pub value_head_dim: u32,
    /// Query rows of a block: 8 or 16. A row is a pair of a query and a query head of the block's
    /// key head. Where a sequence has more rows, several blocks read the same keys.
    pub rows: u32,
    /// With pages, how many neighbouring rows of a tile surely lie in one page: 16 or 1
    /// ([`rows_in_one_page`]). `None` without pages.
    pub page_rows: Option<u32>,
    /// The mask, which must be a window (chunked or not), and the score rules.
    pub rules: Rules,
    /// Warps per block.
    pub warps: u32,
    /// Keys per tile: 16 or 32.
    pub tile_keys: u32,
    /// Stages of a warp's pipeline: tiles of keys and values that a warp has shared memory for.
    pub stages: u32,
    /// Resident blocks per multiprocessor.
    pub blocks: u32,
    /// Where the keys of a sequence are cut (split-KV).
    pub splits: Splits,
}

/// Where the keys of a sequence are cut into parts that are computed separately and then combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Splits {
    /// At the boundaries between the shares of teams, which depend on the whole batch.
    Balanced,
    /// Every `tiles_per_warp` tiles of each warp, counted from the sequence's first key: a query's
    /// result has the same bits whatever else is in the batch, and however many queries come with
    /// it.
    Fixed {
        /// Tiles of each warp in a split.
        tiles_per_warp: u32,
    },
}

/// Number of `f32` elements of a partial result in the workspace: unnormalised outputs, then the
/// maximum and the sum of each row.
const fn part_floats(rows: u32, value_head_dim: u32) -> u32 {
    rows * (value_head_dim + 2)
}

/// Indices of the block and the thread that every part of the kernel needs.
struct Numbers {
    /// Query heads per key head.
    group: DivisorRegisters,
    /// Key head of this block.
    key_head: Reg<U32>,
    /// First query row of this block, among the rows of a sequence and key head.
    first_row: Reg<U32>,
    /// Index of this block's team.
    team: Reg<U32>,
    /// Index of this block within its team: encodes key head and first row.
    member: Reg<U32>,
    /// Blocks per team.
    members: Reg<U32>,
    warp: Reg<U32>,
    lane: Reg<U32>,
}

impl Decode {
    /// Returns the name of this configuration.
    pub fn name(&self) -> String {
        let Decode { element, head_dim, value_head_dim, rows, warps, tile_keys, .. } = self;
        let Decode { stages, blocks, .. } = self;
        let paged = self.page_rows.map_or_else(String::new, |rows| format!("_pages{rows}"));
        let chunked = if self.rules.mask == MaskKind::Chunked { "_chunked" } else { "" };
        let extras = format!("{paged}{chunked}{}", self.rules.extras());
        let cache = self.cache.suffix(self.element);
        let fixed = match self.splits {
            Splits::Balanced => String::new(),
            Splits::Fixed { tiles_per_warp } => format!("_fixed{tiles_per_warp}"),
        };
        format!(
            "decode_{element}{cache}_d{head_dim}x{value_head_dim}_r{rows}{extras}_w{warps}x{tile_keys}_s{stages}b{blocks}{fixed}"
        )
    }

    /// Returns the tiles in one unit of the batch's list: 1, or the tiles of a split of fixed size.
    pub const fn unit_tiles(&self) -> u32 {
        match self.splits {
            Splits::Balanced => 1,
            Splits::Fixed { tiles_per_warp } => tiles_per_warp * self.warps,
        }
    }

    /// Returns the most groups of fixed-size splits that a sequence of up to `keys` keys has.
    pub const fn groups(&self, keys: u64) -> u64 {
        let split = self.unit_tiles() as u64 * self.tile_keys as u64;
        keys.div_ceil(split).div_ceil(fixed::GROUP as u64)
    }

    /// Returns the number of partial results that a block has workspace for, with sequences of up
    /// to `keys` keys.
    pub const fn parts_of_block(&self, keys: u64) -> u64 {
        match self.splits {
            // One sequence that began before the block's share, and one that goes on after it.
            Splits::Balanced => 2,
            // The splits of a group that is shared with other teams, and the groups of such a
            // sequence.
            Splits::Fixed { .. } => {
                fixed::GROUP as u64 + self.groups(keys) + self.running_parts() as u64
            }
        }
    }

    /// Returns how many items (four output columns of a row each) a thread finishes.
    const fn thread_items(&self) -> u32 {
        (self.rows * self.value_head_dim / 4).div_ceil(self.threads())
    }

    /// Returns how many running sums a block with fixed-size splits keeps in the workspace: two
    /// slots each for the group and the sequence that it is working on, where a thread has too many
    /// items for registers; otherwise none.
    pub const fn running_parts(&self) -> u32 {
        match self.splits {
            Splits::Fixed { .. } if self.thread_items() > 2 => 4,
            _ => 0,
        }
    }

    /// Returns the shared-memory layout of a warp's key tile.
    pub fn key_layout(&self) -> TileLayout {
        self.layout(self.head_dim)
    }

    /// Returns the shared-memory layout of a warp's value tile.
    pub fn value_layout(&self) -> TileLayout {
        self.layout(self.value_head_dim)
    }

    fn layout(&self, columns: u32) -> TileLayout {
        let (element, rows) = (self.cache.element, self.tile_keys);
        // `ldmatrix` reads 32 bytes of a row at a time.
        let columns = columns.next_multiple_of(32 / element.bytes());
        TileLayout { element, rows, columns, swizzle: Swizzle::B128 }
    }

    /// Returns the operand element of both products: of Q and K, and of P and V.
    const fn operand(&self) -> Element {
        if self.cache.is_8_bit() { Element::F16 } else { self.element }
    }

    /// Returns the bytes of the per-token scales of a tile.
    const fn token_bytes(&self) -> u32 {
        4 * self.tile_keys
    }

    /// Returns whether warps touch the block table before they need it. With wide heads the assembler
    /// would spill registers.
    const fn touches_block_table(&self) -> bool {
        self.page_rows.is_some() && self.head_dim + self.value_head_dim <= 384
    }

    /// Returns the bytes of the words of the block table that warps touch.
    const fn touched_bytes(&self) -> u32 {
        if self.touches_block_table() { 4 * self.warps } else { 0 }
    }

    /// Returns the threads per block.
    pub const fn threads(&self) -> u32 {
        32 * self.warps
    }

    /// Returns the blocks per team: one for each key head and each [`rows`](Decode::rows) of the
    /// `query_rows` of a sequence and key head.
    pub const fn team(&self, key_heads: u32, query_rows: u32) -> u32 {
        key_heads.saturating_mul(query_rows.div_ceil(self.rows))
    }

    /// Returns the most teams that a launch may have: the block that combines a sequence has shared
    /// memory for the factors of that many partial results.
    pub const fn most_teams(&self) -> u32 {
        self.factors_of_a_row() / combine::PARTS_IN_FLIGHT * combine::PARTS_IN_FLIGHT
    }

    /// Returns how many factors of partial results a row has shared memory for, in the space of the
    /// merged outputs.
    const fn factors_of_a_row(&self) -> u32 {
        self.warps * self.value_head_dim
    }

    /// Returns the bytes of a partial result in the workspace.
    pub const fn part_bytes(&self) -> u64 {
        4 * part_floats(self.rows, self.value_head_dim) as u64
    }

    /// Returns the bytes of shared memory per block.
    pub fn shared_bytes(&self) -> u32 {
        let tiles =
            self.warps * self.stages * (self.key_layout().bytes() + self.value_layout().bytes());
        let rows = self.warps * self.rows;
        let of_tokens = [self.cache.key_scales, self.cache.value_scales];
        let of_tokens = of_tokens.into_iter().filter(|it| *it == Scales::PerToken).count() as u32;
        let scales = of_tokens * self.warps * self.stages * self.token_bytes();
        tiles + scales + 4 * rows * self.value_head_dim + 8 * rows + 4 + self.touched_bytes()
    }

    /// Returns why this configuration cannot be built, if it cannot.
    fn fault(&self) -> Option<&'static str> {
        let narrow = self.cache.is_8_bit();
        let chunk = 16 / self.cache.element.bytes();
        let wide = |dim: u32| dim == 0 || dim > 256 || !dim.is_multiple_of(chunk);
        let fault = first_fault([
            (!is_16_bit(self.element), "the element is not f16 or bf16"),
            (
                !narrow && self.cache != Cache::plain(self.element),
                "the cache has an element or scales of its own, and not 8 bits",
            ),
            (
                wide(self.head_dim) || wide(self.value_head_dim),
                "a head dimension is not up to 256 and whole chunks of 16 bytes",
            ),
            (!self.rules.mask.is_window(), "the mask of a ragged batch is a window"),
            (![8, 16].contains(&self.rows), "a block has 8 or 16 query rows"),
            (
                !matches!(self.page_rows, None | Some(1 | 16)),
                "one row of a page is looked up, or 16 that lie in one",
            ),
            (![16, 32].contains(&self.tile_keys), "a tile has 16 or 32 keys"),
            (
                self.page_rows == Some(RUN) && self.stages >= tiles_of_entries(self.tile_keys),
                "the entries that a warp looks up at once are for more tiles than there are stages",
            ),
            (
                self.stages == 0 || !(1..=16).contains(&self.warps) || self.blocks == 0,
                "there are 1 to 16 warps and at least one stage and block",
            ),
            (self.most_teams() == 0, "there is no room for the factors of parts"),
            (
                self.splits == Splits::Fixed { tiles_per_warp: 0 },
                "a split of fixed size has at least a tile for each warp",
            ),
            (
                self.splits != Splits::Balanced && self.cache.value_scales == Scales::PerToken,
                "a row's rounding would depend on the scales of tokens that only others see",
            ),
            (
                !self.target.has(Capability::AsyncCopies) || !self.target.has(Capability::Mma),
                "the target has no cp.async or no mma.sync",
            ),
            (
                !self.cache.is_converted_by(self.target),
                "the target does not convert numbers of 8 bits",
            ),
        ]);
        let fits = || fits_shared_memory(self.target, self.shared_bytes(), self.blocks);
        fault.or_else(|| (!fits()).then_some("shared memory is too small for its tiles"))
    }

    /// Builds the kernel.
    ///
    /// The grid is a number of teams times the blocks of a [`team`](Decode::team). Parameters by
    /// name ([`Parameter`](crate::Parameter)), besides those of the tensors that functions load
    /// from:
    ///
    /// | parameters | |
    /// | --- | --- |
    /// | `Query`, `Output` | addresses, with batch, row and head strides in elements |
    /// | `Key`, `Value` | addresses and strides likewise; with pages the batch stride is from page to page |
    /// | `KeyDescale`, `ValueDescale` | scales of 8-bit caches, `f32`: with batch and head strides for each sequence and key head, or with those of the cache for each token |
    /// | `Lse` | the address of the log-sum-exps, `f32`, with batch and head strides in elements |
    /// | `Partials`, `Counters` | workspace; a counter for each sequence and block of a team, or with [`Splits::Fixed`] two for each block, zero before the first launch and after each |
    /// | `Batch`, `QueryLength`, `KeyLength` | the number of sequences, and the longest lengths |
    /// | `QueryRows`, `KeyRows` | rows of a batch entry of the query and key tensors, which bound the starts |
    /// | `QueryStarts`, `KeyStarts` | addresses of 32-bit numbers, where each sequence begins and the last ends, or 0: then each has a batch entry of its own |
    /// | `QueryLengths`, `KeyLengths`, `LeftPadding`, `BatchIndex` | addresses of a 32-bit number for each sequence, or 0 |
    /// | `Entries` | the number of batch entries or pages of the cache |
    /// | `BlockTable`, `PageColumns`, `PageSize` | only with pages; the size is a [`Divisor`](crate::Divisor) |
    /// | `KeyHeads`, `GroupSize`, `BlocksPerTeam`, `Teams` | [`Divisor`](crate::Divisor)s |
    /// | `LeastTiles` | the fewest tiles that a team takes; only with [`Splits::Balanced`] |
    /// | `PartsPerBlock` | [`Decode::parts_of_block`]; only with [`Splits::Fixed`] |
    /// | `ReachLeft`, `ReachRight` | keys before and after a query's position that it sees |
    /// | `Chunk` | a [`Divisor`](crate::Divisor), where attention is chunked |
    /// | `ScaleLog2`, or the factors of capped scores | see [`Scale`](crate::parameter::Scale) |
    /// | `Slopes` and `SlopesStride`, `Sinks` | ALiBi slopes and sinks: addresses of an `f32` for each query head |
    pub fn program(&self) -> Result<Program, Error> {
        let builder = |name| resident_blocks(name, self.target, self.threads(), self.blocks);
        build(self.name(), self.fault(), builder, |k| self.write(k))
    }

    fn write(&self, k: &mut Builder) {
        let results = Results::parameters(k);
        let schedule = Schedule::parameters(k, self);
        let copies = Copies::parameters(k);
        let scaling = Scaling::parameters(k, self);
        let inputs = Inputs::parameters(k, self, &scaling);
        let places = Places::parameters(k, self.page_rows.is_some());
        let scores = ScoreRule::parameters(k, &self.rules);
        let scores = match self.splits {
            Splits::Balanced => scores.with_small_tanh(),
            // The scores of a warp may be of other queries, or of keys that a query does not see.
            Splits::Fixed { .. } => scores.with_small_tanh_of_each(),
        };
        let functions = Functions::parameters(k, &self.rules);
        let numbers = self.numbers(k);
        let sinks = self.rules.sinks.then(|| Sinks::parameters(k));

        let ring = copies.prepare(k, self, &places, &numbers, &scaling);
        let merge = Merge::new(k, self, &numbers, results, sinks, &scaling);
        let lanes = SteppedLanes::columns_first(k, numbers.lane);

        wait_for_earlier_grids(k);
        if self.touches_block_table() {
            let (block, touched) = (k.block_index(), k.shared("touched", self.touched_bytes(), 4));
            let touched = k.shared_address(touched);
            k.if_(numbers.lane.equals(0), |k| {
                let line = block * self.warps + numbers.warp;
                let to = touched + numbers.warp * 4;
                places.touch_block_table(k, schedule.sequences(), line, to);
            });
        }
        let (mut cursor, first) = Cursor::new(k, self, &schedule, &numbers);
        let fixed = (self.splits != Splits::Balanced).then(|| Fixed::new(k, &merge));
        let begin = |k: &mut Builder, cursor: &mut Cursor, lengths: &Lengths| {
            cursor.load(k, self, lengths, &places);
            ring.begin(k, cursor, |k| inputs.request(k, self, &numbers, cursor));
        };
        let begin_next = |k: &mut Builder, cursor: &mut Cursor| {
            let lengths = schedule.lengths(k, self, &numbers, cursor.sequence());
            begin(k, cursor, &lengths);
        };
        inputs.clear(k);
        k.if_(cursor.has_more(), |k| {
            begin(k, &mut cursor, &first);
            k.loop_(|k| {
                let walk = Walk::new(k, self, &numbers, lanes, &inputs, (scores, &functions));
                let Some(fixed) = &fixed else {
                    walk.keys(k, &ring, &cursor);

                    // Issues the copies of the next sequence's first tiles before this sequence is
                    // merged.
                    let part = cursor.part(k, &numbers);
                    cursor.advance(k);
                    let more = k.eval(cursor.has_more());
                    inputs.clear(k);
                    k.if_(more, |k| begin_next(k, &mut cursor));
                    merge.finish(k, &walk, &part);
                    return k.break_if(!more);
                };
                let score_rows = walk.score_rows(k, &cursor);
                let tile = k.variable(ring.warp());
                let split = k.variable(cursor.first_split());
                k.loop_(|k| {
                    let end = cursor.end_tile(k, self, split);
                    walk.tiles(k, &ring, &cursor, &score_rows, (tile, end));
                    let share = cursor.share(k, &numbers);
                    let last = k.eval((split + 1).at_least(share.end));
                    k.if_(last, |k| {
                        cursor.advance(k);
                        inputs.clear(k);
                        k.if_(cursor.has_more(), |k| begin_next(k, &mut cursor));
                    });
                    fixed.finish(k, &walk, &share, split);
                    k.break_if(last);
                    walk.reset(k);
                    k.set(split, split + 1);
                });
                k.break_if(!cursor.has_more());
            });
        });
        if self.touches_block_table() {
            // A warp without tiles has not waited for what it touched.
            k.copy_async_commit();
            k.copy_async_wait(0);
        }
    }

    fn numbers(&self, k: &mut Builder) -> Numbers {
        let key_heads = DivisorRegisters::parameters(k, Number::KeyHeads);
        let group = DivisorRegisters::parameters(k, Number::GroupSize);
        let members = DivisorRegisters::parameters(k, Number::BlocksPerTeam);
        let block = k.block_index();
        let thread = k.thread_index();
        let (team, member) = members.divide(k, block);
        let (rows, key_head) = key_heads.divide(k, member);
        Numbers {
            group,
            key_head,
            first_row: k.eval(rows * self.rows),
            team,
            member,
            members: members.number,
            warp: k.eval(thread / 32),
            lane: k.lane(),
        }
    }
}
