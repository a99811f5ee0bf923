//! What comes after the products: the sums of `dQ`, scaled, rounded and in the order of the tensor.
//!
//! A block of the grid takes a part of the sums of a block of query rows. Threads read sums as they
//! were added, whole lines, and turn them into rows by transposing matrices across lanes.

use ptx::{
    Builder, Element, Expression, F32, GlobalAddress, LoadHint, Program, Reg, StoreHint, Target,
    U32, U64,
};

use super::row_blocks::{RowBlocks, Vectors};
use super::{Backward, SumsLayout, batch_name};
use crate::Error;
use crate::attention::{Batch, Rules};
use crate::divisor::DivisorRegisters;
use crate::parameter::{Number, Scale, Tensor, Workspace};

/// Threads of a block: those of a warpgroup.
const THREADS: u32 = 128;

/// Columns that a warpgroup has.
const COLUMNS: u32 = 64;

/// What the kernel is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rounding {
    /// The architecture.
    pub target: Target,
    /// The element of the gradient.
    pub element: Element,
    /// The width of queries: a multiple of 8 up to 256.
    pub head_dim: u32,
    /// Where the sums lie.
    pub sums: SumsLayout,
    /// How sequences lie.
    pub batch: Batch,
}

impl Rounding {
    /// The name of this configuration.
    pub fn name(&self) -> String {
        let Rounding { target, element, head_dim, sums, batch } = self;
        let SumsLayout { query_block, columns, part_queries } = sums;
        let (sums, batch) = (format!("{query_block}x{columns}_{part_queries}"), batch_name(*batch));
        format!("rounding_{target}_{element}_d{head_dim}_{sums}{batch}")
    }

    /// A kernel that it may come after.
    pub fn after(&self) -> Backward {
        // Few columns and few rows are those of narrow queries with wide values.
        let wide = self.sums.columns == COLUMNS && self.sums.by_columns();
        Backward {
            element: self.element,
            head_dim: self.head_dim,
            value_head_dim: if wide { 256 } else { 64 },
            rules: Rules::CAUSAL,
            query_block: self.sums.query_block,
            deterministic: false,
            batch: self.batch,
        }
    }

    /// Blocks of the grid for so many blocks of query rows.
    pub const fn blocks(&self, query_blocks: u32) -> u32 {
        self.sums.parts() * query_blocks
    }

    /// Builds the kernel: a block of the grid for each part of the sums of each block of query rows
    /// of each head and sequence.
    pub fn program(&self) -> Result<Program, Error> {
        if !matches!(self.element, Element::F16 | Element::BF16) {
            return Err(Error::configuration(self.name(), "the element is not f16 or bf16"));
        }
        let mut k = Builder::new(self.name(), self.target, THREADS);
        self.write(&mut k);
        Ok(k.finish()?)
    }

    fn write(&self, k: &mut Builder) {
        let gradient = Vectors::parameters(k, Tensor::QueryGradient, self.batch);
        let sums = Workspace::QueryGradientSums.address(k);
        let scale = Scale::Natural.read(k);
        let blocks = RowBlocks::parameters(k, &self.sums, self.batch);
        let ring = (self.batch == Batch::Equal).then(|| RingBlocks::parameters(k));

        let index = k.block_index();
        let parts = self.sums.parts();
        let (number, part) = (k.eval(index / parts), k.eval(index % parts));
        let number = match &ring {
            Some(ring) => k.eval(number + ring.first),
            None => number,
        };
        let block = blocks.find(k, number);
        block.if_exists(k, |k| {
            let number = match &ring {
                Some(ring) => ring.place(k, number),
                None => number,
            };
            let part = Part { layout: self.sums, number, part, clear: false };
            let rows = Rows { block: block.index(), query_length: block.query_length };
            part.round(k, self, sums, scale, &rows, |k, row| {
                gradient.row(k, self.element, &block, row)
            });
        });
    }
}

/// Blocks of query rows whose sums lie in a ring.
struct RingBlocks {
    /// The first that is rounded.
    first: Reg<U32>,
    /// As many as there is room for.
    room: DivisorRegisters,
}

impl RingBlocks {
    fn parameters(k: &mut Builder) -> Self {
        RingBlocks {
            first: Number::FirstBlock.read(k),
            room: DivisorRegisters::parameters(k, Number::RingBlocks),
        }
    }

    /// Where the sums of a block are.
    fn place(&self, k: &mut Builder, number: Reg<U32>) -> Reg<U32> {
        let (_, place) = self.room.divide(k, number);
        place
    }
}

/// The rows of a block.
pub(super) struct Rows {
    /// Which block of its head.
    pub(super) block: Reg<U32>,
    pub(super) query_length: Reg<U32>,
}

/// A part of the sums of a block of query rows, for the threads of a warpgroup.
pub(super) struct Part {
    pub(super) layout: SumsLayout,
    /// Which block of the workspace.
    pub(super) number: Reg<U32>,
    /// Which part of it.
    pub(super) part: Reg<U32>,
    /// Whether zeros are left behind.
    pub(super) clear: bool,
}

impl Part {
    /// Rounds it to the rows of the gradient, whose addresses `row_address` gives.
    pub(super) fn round(
        &self,
        k: &mut Builder,
        rounding: &Rounding,
        sums: Reg<GlobalAddress>,
        scale: Reg<F32>,
        rows: &Rows,
        row_address: impl Fn(&mut Builder, Reg<U32>) -> Reg<GlobalAddress>,
    ) {
        let Part { layout, number, part, clear } = self;
        let thread = k.thread_index();
        let thread = k.eval(thread % THREADS);
        let block = k.multiply_wide(*number, layout.block_bytes());
        let within = *part * layout.part_bytes() + thread * 16;
        let mine = k.eval(sums + block + within.convert::<U64>());
        let loaded: Vec<[Reg<F32>; 4]> = (0..layout.part_queries / 8)
            .map(|group| {
                let address = mine + group * SumsLayout::REGISTERS_BYTES;
                k.load_vector::<F32, _, 4>(address, LoadHint::default())
            })
            .collect();
        if *clear {
            let zero = k.eval::<F32>(0.0);
            for group in 0..layout.part_queries / 8 {
                let address = mine + group * SumsLayout::REGISTERS_BYTES;
                k.store_vector(address, &[zero; 4], StoreHint::default());
            }
        }
        // Accumulators are transposed: a thread has two queries of two columns that are eight apart.
        // Turned around, it has two columns of a query, twice.
        let lane = k.eval(thread % 32);
        let first_row = k.eval(rows.block * layout.query_block + lane / 4);
        let column = k.eval(thread / 32 * 16 + lane % 4 * 2);
        let (first_row, column) = if layout.by_columns() {
            (first_row, k.eval(column + *part * COLUMNS))
        } else {
            (k.eval(first_row + *part * layout.part_queries), column)
        };
        for (group, values) in loaded.into_iter().enumerate() {
            let values = values.map(|value| k.eval(value * scale));
            let pairs = [[values[0], values[1]], [values[2], values[3]]].map(|[low, high]| {
                let pair = k.pack_as(rounding.element, low, high);
                k.transpose_packed(pair)
            });
            let row = k.eval(first_row + 8 * group as u32);
            k.if_(row.less(rows.query_length), |k| {
                let to = row_address(k, row);
                for (pair, right) in pairs.into_iter().zip([0, 8]) {
                    let column = k.eval(column + right);
                    k.if_(column.less(rounding.head_dim), |k| {
                        k.store_packed(to + column.convert::<U64>() * 2, &[pair]);
                    });
                }
            });
        }
    }
}
