//! Attention over ragged batches on Hopper: the forward kernel's loops, with
//! tiles from a list on the device, windows, and rules of scores.
//!
//! Sequences are slices of one long tensor of rows, packed or in batch entries,
//! and a copy must not cross the end of one: keys behind it would be another
//! sequence's, and so would outputs. The copy engine checks that itself. A
//! tensor map has the dimensions (dim, inside, end, back, head), where `inside`,
//! `end` and `back` all move along the rows:
//!
//! ```text
//! inside = 2^30 - length + row      ends at 2^30: rows beyond the slice are outside
//! end    = start + length
//! back   = 2^30                     with a stride of 2^34 bytes less a row
//! ```
//!
//! Addresses are 64 bits wide and wrap around, so that the sum is `start + row`.

use ptx::{
    Builder, Expression, GlobalAddress, Program, Reg, S32, TensorBox, TileLayout, U32, Value,
};

use super::consumer::{self, Consumers};
use super::dynamic_scheduler::{Batch, DynamicScheduler, WorkSlots};
use super::epilogue::Epilogue;
use super::{Forward, Maps, producer};
use crate::Error;
use crate::attention::MaskKind;
use crate::attention::function::lower::Functions;
use crate::parameter::Tensor;
use crate::product::Source;

/// Where the dimension `inside` of a slice ends.
pub const SLICE_EXTENT: u32 = 1 << 30;

/// What the kernel is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prefill {
    /// Element, dims, tiles and rules; its mask is none, or a window with chunks or without.
    pub tile: Forward,
    /// With pages, how many of their rows are copied at a time: divides the page
    /// size and the key block, a multiple of 8.
    pub page_rows: Option<u32>,
    /// Whether each block has one tile, which it finds by itself, instead of tiles from a list: for
    /// batches whose tiles all run at once.
    pub single_tile: bool,
}

/// Where a row of a slice lies that ends at `end` and has `length` rows.
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

/// The coordinate `inside` of a row of a slice of so many rows,
pub(crate) fn slice_row(row: impl Into<Value<U32>>, length: Reg<U32>) -> Value<U32> {
    row.into() + (Value::<U32>::from(SLICE_EXTENT) - length)
}

/// and those behind it: `end`, `back` and the head.
pub(crate) fn slice_rest(end: Reg<U32>, head: Reg<U32>) -> [Value<S32>; 3] {
    [end.reinterpret(), (SLICE_EXTENT as i32).into(), head.reinterpret()]
}

/// Rows that are copied at once, where pages have so many together and a stage so many.
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
    /// The name of this configuration.
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

    /// The boxes in which queries, keys, values and outputs are copied.
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

    /// The dimensions of a tensor map over `heads` heads of rows that lie
    /// `row_stride` bytes apart, and all strides but that of the heads.
    pub fn slices(dim: u64, heads: u64, row_stride: u64) -> ([u64; RANK], [u64; 3]) {
        let far = 1 << 31;
        let back = (1u64 << 34).wrapping_sub(row_stride);
        ([dim, SLICE_EXTENT.into(), far, far, heads], [row_stride, row_stride, back])
    }

    /// Registers of a producer's and of a consumer's thread: claims and slices
    /// take more of the producer's than one tensor does.
    fn register_budgets(&self) -> Option<(u32, u32)> {
        match self.tile.warpgroups {
            1 => None,
            2 => Some((56, 224)),
            3 if self.tile.rules.mask == MaskKind::Dense => Some((32, 160)),
            _ => Some((56, 152)),
        }
    }

    /// Whether warpgroups take their index from one lane: worth 1 to 3 %, with turns and without; with
    /// queries in registers it costs up to 0.8 %, and 16 bytes are spilled.
    pub(super) fn index_from_one_lane(&self) -> bool {
        self.tile.query_source == Source::Shared
    }

    fn fault(&self) -> Option<&'static str> {
        if self.tile.rules.mask == MaskKind::Causal {
            return Some("the mask of a ragged batch is a window, or none");
        }
        let divides = |rows: u32| {
            rows > 0 && rows.is_multiple_of(8) && self.tile.key_block.is_multiple_of(rows)
        };
        match self.page_rows {
            Some(rows) if !divides(rows) => {
                Some("the rows of a copy are no multiple of 8 that divides the key block")
            }
            _ => None,
        }
    }

    /// Builds the kernel.
    ///
    /// Any number of blocks; where each has a single tile, one for each tile and head. Parameters
    /// by name:
    ///
    /// | parameters | |
    /// | --- | --- |
    /// | `queries`, `keys`, `values`, `output` | tensor maps of [`slices`](Prefill::slices) |
    /// | `lse`, `lse head stride` | the address of the log-sum-exps, and from one head to the next |
    /// | the scale, or the two of capped scores | see [`Scale`](crate::parameter::Scale) |
    /// | `schedule`, `heads together`, `last heads` | what the [`Sequencer`](crate::Sequencer) wrote; how many heads are a round: divides them; the first of the last round |
    /// | `batch` and all that says where sequences are | where blocks have a single tile, instead of those three: see [`Sequencer::program`](crate::Sequencer::program) |
    /// | `query heads` | |
    /// | `query heads per key head` | a [`Divisor`](crate::Divisor) |
    /// | `window left`, `window right` | keys before and after a query's position that it sees |
    /// | `chunk` | a divisor, where attention is chunked |
    /// | `slopes` and their `batch stride`, `sinks` | addresses of `f32` for each query head |
    /// | `block table`, `pages of a sequence`, `pages there are`, `page size`, `rows from page to page` | with pages; the size is a divisor |
    pub fn program(&self) -> Result<Program, Error> {
        if let Some(fault) = self.fault() {
            return Err(Error::configuration(self.name(), fault));
        }
        self.tile.build_with(self.name(), |k| self.write(k))
    }

    fn write(&self, k: &mut Builder) {
        let [queries, keys, values, output] = self.boxes();
        let maps = Maps {
            queries: Tensor::Query.map(k, queries),
            keys: Tensor::Key.map(k, keys),
            values: Tensor::Value.map(k, values),
            output: Tensor::Output.map(k, output),
        };
        let lse: Reg<GlobalAddress> = Tensor::Lse.address(k);
        let scores = self.tile.score_rule(k);
        let batch = Batch::parameters(k, self, scores.scale_log2);
        let rules = &self.tile.rules;
        let functions = Functions::parameters(k, rules).unscaled(rules, scores.inverse).in_pairs();
        let shared = self.tile.shared(k);
        let slots = WorkSlots::new(k, 4 * self.tile.warpgroups);
        let thread = k.thread_index();
        k.if_(thread.equals(0), |k| {
            shared.init(k);
            slots.pipeline.init(k);
        });
        batch.find_tile(k, self.tile.query_rows(), &slots);
        k.barriers_ready();
        let scheduler = DynamicScheduler { prefill: self, slots: &slots, batch: &batch };
        self.tile.roles(
            k,
            &shared,
            self.register_budgets(),
            |k| {
                let claims = scheduler.producer(k);
                producer::produce(k, &self.tile, &shared, &maps, &claims);
            },
            |k| {
                let posted = scheduler.consumer(k);
                let given = Consumers {
                    forward: &self.tile,
                    shared: &shared,
                    tiles: &posted,
                    scores,
                    functions,
                    epilogue: Epilogue { output: maps.output, lse, partials: None },
                    probe: None,
                    index_from_one_lane: self.index_from_one_lane(),
                };
                consumer::consume(k, given);
            },
        );
    }
}
