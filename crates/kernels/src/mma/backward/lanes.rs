//! Which part of each tile a warp reads, and how its lanes address it.
//!
//! Registers hold offsets within a tile rather than addresses: the tile's own offset is a constant
//! that the load instruction adds.

use ptx::{Builder, Reg, SteppedLanes, U32};

use super::BackwardMma;

/// The parts of the work that a warp takes.
#[derive(Clone, Copy)]
pub(super) struct WarpPartition {
    /// Which of the groups of warps with keys of their own it belongs to.
    pub(super) key_warp: Reg<U32>,
    /// Its index among the warps that share its keys.
    pub(super) column_warp: Reg<U32>,
    /// Its part of the columns of `dQ`, and its part of the queries of `dQ`.
    pub(super) query_gradient: [Reg<U32>; 2],
}

impl WarpPartition {
    pub(super) fn new(k: &mut Builder, backward: &BackwardMma) -> Self {
        let thread = k.thread_index();
        // Broadcast from lane 0, so that ptxas knows that the value is uniform in the warp.
        let warp = k.eval(thread / 32);
        let warp = k.shuffle_index(warp, 0);
        let [columns, _] = backward.query_gradient_warps();
        WarpPartition {
            key_warp: k.eval(warp / backward.column_warps),
            column_warp: k.eval(warp % backward.column_warps),
            query_gradient: [k.eval(warp % columns), k.eval(warp / columns)],
        }
    }
}

/// The lanes' offsets for the operands of every product but `dQ`.
pub(super) struct Lanes {
    /// The warp's keys as rows: the A operand `K` or `V` of scores, and `P^T` and `dS^T` where
    /// these go through shared memory.
    pub(super) keys: SteppedLanes,
    /// The warp's queries as rows: the B operand `Q^T` or `dO^T` of scores.
    pub(super) queries: SteppedLanes,
    /// The warp's columns of all queries: the B operand `Q` or `dO` of `dK` and `dV`.
    pub(super) columns: SteppedLanes,
}

impl Lanes {
    pub(super) fn new(k: &mut Builder, backward: &BackwardMma, partition: &WarpPartition) -> Self {
        let lane = k.lane();
        let rows_first = SteppedLanes::rows_first(k, lane);
        let columns_first = SteppedLanes::columns_first(k, lane);
        Lanes {
            keys: rows_first.rows_down(k, partition.key_warp * backward.warp_keys()),
            queries: columns_first.rows_down(k, partition.column_warp * backward.warp_queries()),
            columns: rows_first.steps_on(k, partition.column_warp),
        }
    }
}

/// Returns the lanes' offsets for the operands of `dQ`: the warp's columns of all keys, transposed,
/// and its queries of `dS`, as columns. They are recomputed in each step, to save registers during
/// the other products.
pub(super) fn query_gradient_lanes(k: &mut Builder, backward: &BackwardMma) -> [SteppedLanes; 2] {
    let (lane, partition) = (k.lane(), WarpPartition::new(k, backward));
    let [columns, queries] = partition.query_gradient;
    let keys = SteppedLanes::columns_first(k, lane).steps_on(k, columns);
    [keys, SteppedLanes::rows_first(k, lane).steps_on(k, queries)]
}
