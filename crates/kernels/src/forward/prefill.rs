//! Attention forward over ragged batches on Hopper: the forward kernel's loops, with tiles that are
//! scheduled on the device (`dynamic_scheduler`, `single_tile`), and keys and values that may be in
//! pages.
//!
//! Sequences are slices of one long tensor of rows, packed or in batch entries, and a TMA copy must
//! not cross the end of a slice: the keys after it belong to another sequence, and so do the
//! outputs. TMA's own bounds check sees to that. The tensor maps have the dimensions (dim, inside,
//! end, back, head), where `inside`, `end` and `back` all move along the rows:
//!
//! ```text
//! inside = 2^30 - length + row      ends at 2^30: rows beyond the slice are outside
//! end    = start + length
//! back   = 2^30                     with a stride of 2^34 bytes less a row
//! ```
//!
//! Addresses are 64 bits wide and wrap around, so that the three together address the row
//! `start + row`.

use ptx::{
    Builder, Expression, GlobalAddress, Program, Reg, S32, TensorBox, TileLayout, U32, Value,
};

use super::consumer::{self, Consumers};
use super::dynamic_scheduler::{
    Batch, DynamicConsumer, DynamicProducer, DynamicScheduler, WorkSlots,
};
use super::epilogue::Results;
use super::{Forward, Maps, producer};
use crate::attention::MaskKind;
use crate::attention::function::lower::Functions;
use crate::dependent_launch::wait_for_earlier_grids;
use crate::parameter::Tensor;
use crate::product::Source;
use crate::{Error, first_fault};

/// The extent of the dimension `inside` of a tensor map of slices.
pub const SLICE_EXTENT: u32 = 1 << 30;

/// The configuration of the forward kernel over ragged batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prefill {
    /// Elements, head dimensions, tiles and rules. The mask is none or a window, with or without
    /// chunks; a causal mask is passed as a window.
    pub tile: Forward,
    /// With pages, the rows of one TMA copy: a multiple of 8 that divides the page size and the key
    /// block.
    pub page_rows: Option<u32>,
    /// Whether each thread block has one tile, which it finds by itself, instead of tiles from a
    /// list: for batches whose tiles all run at once.
    pub single_tile: bool,
}

/// Returns the tensor-map coordinates of row `row` of the slice that has `length` rows and ends
/// before row `end` of the tensor.
pub(super) fn slice_corner(
    k: &mut Builder,
    row: Reg<U32>,
    length: Reg<U32>,
    end: Reg<U32>,
    head: Reg<U32>,
) -> [Value<S32>; 5] {
    let inside = k.eval(slice_row(row, length));
    let [end, back, head] = slice_rest(end, head);
    [0.into(), inside.reinterpret(), end, back, head]
}

/// Returns the coordinate `inside` of row `row` of a slice of `length` rows.
pub(crate) fn slice_row(row: impl Into<Value<U32>>, length: Reg<U32>) -> Value<U32> {
    row.into() + (Value::<U32>::from(SLICE_EXTENT) - length)
}

/// Returns the coordinates after `inside`: `end`, `back` and the head.
pub(crate) fn slice_rest(end: Reg<U32>, head: Reg<U32>) -> [Value<S32>; 3] {
    [end.reinterpret(), (SLICE_EXTENT as i32).into(), head.reinterpret()]
}

/// Returns the rows of one copy into a stage of `stage_rows` rows, with copies of up to `page_rows`
/// rows: the greatest common divisor of the two.
pub(super) fn copied_rows(page_rows: u32, stage_rows: u32) -> u32 {
    let (mut a, mut b) = (page_rows, stage_rows);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// The rank of the tensor maps.
const RANK: usize = 5;

impl Prefill {
    /// Returns the name of this configuration, which is also the kernel's entry point.
    pub fn name(&self) -> String {
        let pages = self.page_rows.map_or_else(String::new, |rows| format!("_pages{rows}"));
        let mask = match self.tile.rules.mask {
            MaskKind::Dense => "_dense",
            MaskKind::Chunked => "_chunked",
            _ => "",
        };
        let single = if self.single_tile { "_single" } else { "" };
        self.tile.named("prefill", mask) + &self.tile.rules.extras() + &pages + single
    }

    /// Returns the TMA boxes of queries, keys, values and outputs.
    pub fn boxes(&self) -> [TensorBox; 4] {
        let part = |layout: TileLayout| match self.page_rows {
            Some(rows) => TileLayout { rows: copied_rows(rows, layout.rows), ..layout },
            None => layout,
        };
        [
            self.tile.query_layout(),
            part(self.tile.key_layout()),
            part(self.tile.value_layout()),
            self.tile.output_layout(),
        ]
        .map(|layout| layout.tensor_box(RANK))
    }

    /// Returns the extents of a tensor map of slices over `heads` heads, whose rows are
    /// `row_stride` bytes apart, and its strides in bytes but for that of the heads.
    pub fn slices(dim: u64, heads: u64, row_stride: u64) -> ([u64; RANK], [u64; 3]) {
        let far = 1 << 31;
        let back = (1u64 << 34).wrapping_sub(row_stride);
        ([dim, SLICE_EXTENT.into(), far, far, heads], [row_stride, row_stride, back])
    }

    /// Returns the register budgets (`setmaxnreg`) of a producer thread and of a consumer thread.
    /// Claiming tiles and addressing slices takes the producer more registers than a batch of equal
    /// lengths does.
    fn register_budgets(&self) -> Option<(u32, u32)> {
        match self.tile.warpgroups {
            1 => None,
            2 => Some((56, 224)),
            3 if !self.tile.is_fp8() => Some((32, 160)),
            _ => Some((56, 152)),
        }
    }

    /// Returns whether a warpgroup's index is broadcast from one lane
    /// ([`Warpgroup::new`](super::warpgroup::Warpgroup::new)): it gains 1 to 3 %, with and without
    /// turns. With queries in registers it costs up to 0.8 %, and 16 bytes are spilled; with capped
    /// exponents 4 to 160 bytes are.
    pub(super) fn index_from_one_lane(&self) -> bool {
        self.tile.query_source == Source::Shared && !self.takes_capped_exponents()
    }

    /// Returns whether the exponents of capped scores come straight from the products. With 192
    /// value columns there is one register too few. A mask function, which has no lists of key blocks
    /// here, may hide keys of any block.
    fn takes_capped_exponents(&self) -> bool {
        let Forward { rules, value_head_dim, key_block, .. } = &self.tile;
        let has_registers = *value_head_dim <= 128 || *key_block <= 64;
        let may_see_all = rules.mask_function.is_none();
        rules.caps_last() && !self.tile.is_fp8() && has_registers && may_see_all
    }

    /// Returns why this configuration cannot be built, if it cannot.
    fn fault(&self) -> Option<&'static str> {
        let divides = |rows: u32| {
            rows > 0 && rows.is_multiple_of(8) && self.tile.key_block.is_multiple_of(rows)
        };
        let fault = first_fault([
            (
                self.tile.rules.mask == MaskKind::Causal,
                "the mask of a ragged batch is a window, or none",
            ),
            (
                self.page_rows.is_some_and(|rows| !divides(rows)),
                "the rows of a copy are no multiple of 8 that divides the key block",
            ),
        ]);
        fault.or_else(|| self.tile.fault())
    }

    /// Builds the kernel.
    ///
    /// The grid may have any number of thread blocks; with `single_tile`, one for each tile of each
    /// head. Parameters by name:
    ///
    /// | parameters | |
    /// | --- | --- |
    /// | `Query`, `Key`, `Value`, `Output` | tensor maps of [`slices`](Prefill::slices) |
    /// | `Lse`, `LseHeadStride` | the address of the log-sum-exps, and the elements from one head to the next |
    /// | `ScaleLog2`, positive, or the factors of capped scores | see [`Scale`](crate::parameter::Scale) |
    /// | `Schedule`, `HeadsPerGroup`, `LastHeads` | what the [`Sequencer`](crate::Sequencer) wrote; the heads of a group, which divides `LastHeads`; the first head of the last group |
    /// | `Batch` and all that says where sequences are | with `single_tile`, instead of those three: see [`Sequencer::program`](crate::Sequencer::program) |
    /// | `QueryHeads` | |
    /// | `GroupSize` | query heads per key head: a [`Divisor`](crate::Divisor) |
    /// | `ReachLeft`, `ReachRight` | with a window: the keys before and after its position that a query sees |
    /// | `Chunk` | with chunks: a divisor |
    /// | `Slopes`, `SlopesStride`, `Sinks` | `f32` for each (sequence and) query head |
    /// | `QueryDescale`, `KeyDescale`, `ValueDescale` | with 8-bit inputs: addresses, with batch and head strides |
    /// | `BlockTable`, `PageColumns`, `Entries`, `PageSize`, `Key rows of an entry` | with pages; `PageSize` is a divisor |
    pub fn program(&self) -> Result<Program, Error> {
        self.tile.build_with(self.name(), self.fault(), |k| self.write(k))
    }

    fn write(&self, k: &mut Builder) {
        let maps = Maps::parameters(k, self.boxes());
        let lse: Reg<GlobalAddress> = Tensor::Lse.address(k);
        let scores = self.tile.score_rule(k, self.takes_capped_exponents());
        let batch = Batch::parameters(k, self, scores.scale_log2);
        let rules = &self.tile.rules;
        let functions = Functions::parameters(k, rules).unscaled(rules, scores.inverse).in_pairs();
        let shared = self.tile.shared(k);
        let slots = WorkSlots::new(k, 4 * self.tile.warpgroups);
        let thread = k.thread_index();
        k.if_(thread.equals(0), |k| {
            maps.prefetch(k);
            shared.init(k);
            slots.pipeline.init(k);
        });
        wait_for_earlier_grids(k);
        batch.find_tile(k, self.tile.query_rows(), &slots);
        k.barriers_ready();
        let scheduler = DynamicScheduler { prefill: self, slots: &slots, batch: &batch };
        self.tile.roles(
            k,
            &shared,
            self.register_budgets(),
            |k| {
                let claims = DynamicProducer::new(k, &scheduler);
                producer::produce(k, &self.tile, &shared, &maps, &claims);
            },
            |k| {
                let posted = DynamicConsumer::new(k, &scheduler);
                let given = Consumers {
                    forward: &self.tile,
                    shared: &shared,
                    tiles: &posted,
                    scores,
                    functions,
                    results: Results { output: maps.output, lse, partials: None },
                    probe: None,
                    index_from_one_lane: self.index_from_one_lane(),
                };
                consumer::consume(k, given);
            },
        );
    }
}
