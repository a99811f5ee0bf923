//! The semantics of attention, shared by all kernel families.
//!
//! | module | its subject |
//! | --- | --- |
//! | [`rules`] | the mask kind, score rules and sinks that a kernel is built for; the numbers of a mask on the host |
//! | [`function`] | mask and score functions that a caller writes |
//! | `visibility` | which keys a row sees, which key blocks a tile needs, and masking of the rest |
//! | `scores` | the score rules, between QK^T and the softmax |
//! | `softmax` | the guarded softmax of a thread's rows |
//! | `rows` | the end of a row: the factor of its output and its log-sum-exp |
//! | `descale` | the descale factors of FP8 products |
//! | `sequences` | where sequences begin and end, in batch entries, packed or in pages |
//!
//! A family decides where a thread's scores are (`Score`) and in which order tiles and keys come.
//!
//! Queries are aligned with the end of the keys: query `i` of `queries` has the *position*
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

pub use rows::LEAST_SCORE;
pub use rules::{Batch, MaskKind, Rules, Window};
pub use scores::CapPolynomial;

/// One of a thread's scores, with its place among the thread's rows and columns.
#[derive(Clone, Copy)]
pub(crate) struct Score {
    /// Index of the score's row among the thread's rows.
    pub(crate) row: usize,
    /// Column, counted from the thread's first column.
    pub(crate) column: u32,
    pub(crate) register: Reg<F32>,
}

/// Offsets of a thread's rows from its first row in a `wgmma` accumulator.
pub(crate) const ACCUMULATOR_ROWS: [u32; 2] = [0, 8];

impl Score {
    /// Returns a thread's scores in a `wgmma` accumulator.
    pub(crate) fn of(accumulator: &Accumulator) -> Vec<Score> {
        let score = |(index, register): (usize, &Reg<F32>)| Score {
            row: Accumulator::row_of(index),
            column: Accumulator::column_of(index),
            register: *register,
        };
        accumulator.registers().iter().enumerate().map(score).collect()
    }

    /// Returns the scores of one of a thread's rows in `mma.sync` accumulators, as row 0.
    pub(crate) fn of_warp_row(accumulator: &WarpAccumulator, row: usize) -> Vec<Score> {
        let score = |(index, register)| Score {
            row: 0,
            column: WarpAccumulator::column_of(index),
            register,
        };
        accumulator.row(row).enumerate().map(score).collect()
    }

    /// Returns a thread's scores in `mma.sync` accumulators, in the order of the accumulators'
    /// registers: two neighbouring columns of a row, then of the row 8 below, for each tile of 16
    /// rows and each 8 columns.
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
