//! What of each tile the lanes of a warp read, and where it stands among the warps of its block.
//!
//! Offsets are kept, not addresses: a tile's own place is a constant that the instruction adds.

use ptx::{Builder, Reg, SteppedLanes, U32};

use super::BackwardMma;

/// Where a warp stands.
#[derive(Clone, Copy)]
pub(super) struct Stand {
    /// Its keys among those of the block, in so many of a warp's.
    pub(super) key_warp: Reg<U32>,
    /// Which of the warps that share them it is.
    pub(super) column_warp: Reg<U32>,
    /// Its part of the columns of `dQ`, and of its queries.
    pub(super) query_gradient: [Reg<U32>; 2],
}

impl Stand {
    pub(super) fn new(k: &mut Builder, backward: &BackwardMma) -> Self {
        let thread = k.thread_index();
        // From one lane to all: so the assembler knows that the warp goes one way.
        let warp = k.eval(thread / 32);
        let warp = k.shuffle_index(warp, 0);
        let [columns, _] = backward.query_gradient_warps();
        Stand {
            key_warp: k.eval(warp / backward.column_warps),
            column_warp: k.eval(warp % backward.column_warps),
            query_gradient: [k.eval(warp % columns), k.eval(warp / columns)],
        }
    }
}

/// How the lanes address the operands of products that are made in a loop.
pub(super) struct Lanes {
    /// The warp's keys, in rows: what scores are made of, from the left, and `P` and `dS` where
    /// these go through shared memory.
    pub(super) keys: SteppedLanes,
    /// The warp's queries, in rows: what scores are made of, from the right.
    pub(super) queries: SteppedLanes,
    /// The warp's columns of all queries: what the gradients of keys and values are made of.
    pub(super) columns: SteppedLanes,
}

impl Lanes {
    pub(super) fn new(k: &mut Builder, backward: &BackwardMma, stand: &Stand) -> Self {
        let lane = k.lane();
        let rows_first = SteppedLanes::rows_first(k, lane);
        let columns_first = SteppedLanes::columns_first(k, lane);
        Lanes {
            keys: rows_first.rows_down(k, stand.key_warp * backward.warp_keys()),
            queries: columns_first.rows_down(k, stand.column_warp * backward.warp_queries()),
            columns: rows_first.steps_on(k, stand.column_warp),
        }
    }
}

/// How the lanes address what `dQ` is made of: the warp's columns of all keys, transposed, and its
/// queries of `dS`, in columns. Found in each step: registers are dear in the others.
pub(super) fn query_gradient_lanes(k: &mut Builder, backward: &BackwardMma) -> [SteppedLanes; 2] {
    let (lane, stand) = (k.lane(), Stand::new(k, backward));
    let [columns, queries] = stand.query_gradient;
    let keys = SteppedLanes::columns_first(k, lane).steps_on(k, columns);
    [keys, SteppedLanes::rows_first(k, lane).steps_on(k, queries)]
}
