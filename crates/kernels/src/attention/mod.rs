//! What attention means, once for every family of kernels.
//!
//! | module | what it says |
//! | --- | --- |
//! | [`rules`] | which mask, cap, slopes and sinks a kernel is built for; the numbers of a mask on the host |
//! | [`function`] | masks and scores that a caller writes as functions |
//! | `visibility` | which keys a row sees, which key blocks a tile needs, and hiding the rest |
//! | `scores` | what becomes of the product of a query and a key before the softmax |
//! | `softmax` | the guarded softmax of a thread's rows |
//! | `rows` | what a finished row comes to: the factor of its output and its log-sum-exp |
//! | `descale` | what products of 8-bit numbers are multiplied with |
//! | `sequences` | where sequences begin and end, in batch entries, packed or in pages |
//!
//! A family says how its hardware does it: where a thread's scores lie (`Score`), and in which
//! order tiles and keys come.
//!
//! Queries stand at the end of the keys: query `i` of `queries` has the *position*
//! `i + keys - queries` among them, which is negative where there are more queries than keys.

pub mod function;
pub mod rules;

pub(crate) mod descale;
pub(crate) mod rows;
pub(crate) mod scores;
pub(crate) mod sequences;
pub(crate) mod softmax;
pub(crate) mod visibility;

use ptx::{Accumulator, F32, Reg, WarpAccumulator};

pub use rules::{Batch, MaskKind, Rules, Window};

/// One of the scores that a thread has, of however many rows and columns.
#[derive(Clone, Copy)]
pub(crate) struct Score {
    /// Which of the thread's rows it is of.
    pub(crate) row: usize,
    /// How many columns right of the thread's first it is.
    pub(crate) column: u32,
    pub(crate) register: Reg<F32>,
}

/// How far below the thread's first row its rows lie in an accumulator of `wgmma`.
pub(crate) const ACCUMULATOR_ROWS: [u32; 2] = [0, 8];

impl Score {
    /// The scores of a thread in an accumulator of `wgmma`.
    pub(crate) fn of(accumulator: &Accumulator) -> Vec<Score> {
        let score = |(index, register): (usize, &Reg<F32>)| Score {
            row: Accumulator::row_of(index),
            column: Accumulator::column_of(index),
            register: *register,
        };
        accumulator.registers().iter().enumerate().map(score).collect()
    }

    /// The scores of one of a thread's rows in accumulators of `mma.sync`, by themselves.
    pub(crate) fn of_warp_row(accumulator: &WarpAccumulator, row: usize) -> Vec<Score> {
        let score = |(index, register)| Score {
            row: 0,
            column: WarpAccumulator::column_of(index),
            register,
        };
        accumulator.row(row).enumerate().map(score).collect()
    }

    /// The scores of a thread in accumulators of `mma.sync`, as products leave them: neighbours of
    /// a row, then of the row 8 below, then of the next 16 rows, then 8 columns on.
    pub(crate) fn of_warp(accumulator: &WarpAccumulator) -> Vec<Score> {
        let cells = accumulator.cells();
        cells
            .flat_map(|(tile, group, cell)| {
                let registers = cell.registers().into_iter().enumerate();
                registers.map(move |(index, register)| Score {
                    row: 2 * tile + index / 2,
                    column: (8 * group + index % 2) as u32,
                    register,
                })
            })
            .collect()
    }
}
