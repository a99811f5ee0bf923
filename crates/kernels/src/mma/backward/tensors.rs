//! Addresses and strides of the tensors and workspaces of a launch.

use ptx::{Builder, GlobalAddress, Reg, U32};

use super::BackwardMma;
use crate::attention::Batch;
use crate::backward::row_blocks::Vectors;
use crate::backward::tile_scheduler::TileScheduler;
use crate::mma::work_tile::HeadRows;
use crate::parameter::{Tensor, Workspace};

/// The tensors and workspaces of the kernel.
pub(super) struct Tensors {
    pub(super) queries: Positions,
    pub(super) keys: Positions,
    pub(super) values: Positions,
    pub(super) output_gradients: Positions,
    pub(super) key_gradients: Positions,
    pub(super) value_gradients: Positions,
    pub(super) statistics: Reg<GlobalAddress>,
    pub(super) sums: Reg<GlobalAddress>,
    /// The turn counters of the deterministic mode.
    pub(super) turns: Option<Reg<GlobalAddress>>,
}

/// A tensor with a vector for each position and head.
pub(super) struct Positions {
    vectors: Vectors,
    side: Side,
}

/// Whether the positions of a tensor are those of queries or of keys.
#[derive(Clone, Copy)]
enum Side {
    Queries,
    Keys,
}

impl Tensors {
    pub(super) fn parameters(k: &mut Builder, backward: &BackwardMma) -> Self {
        let mut of = |tensor, side| Positions::parameters(k, tensor, side, backward.batch);
        Tensors {
            queries: of(Tensor::Query, Side::Queries),
            keys: of(Tensor::Key, Side::Keys),
            values: of(Tensor::Value, Side::Keys),
            output_gradients: of(Tensor::OutputGradient, Side::Queries),
            key_gradients: of(Tensor::KeyGradient, Side::Keys),
            value_gradients: of(Tensor::ValueGradient, Side::Keys),
            statistics: Workspace::RowStatistics.address(k),
            sums: Workspace::QueryGradientSums.address(k),
            turns: backward.deterministic.then(|| Workspace::Turns.address(k)),
        }
    }
}

impl Positions {
    fn parameters(k: &mut Builder, tensor: Tensor, side: Side, batch: Batch) -> Self {
        Positions { vectors: Vectors::parameters(k, tensor, batch), side }
    }

    /// Returns the rows of a head in the tile's sequence. The sequence is looked up again rather
    /// than kept in registers.
    pub(super) fn of_head(
        &self,
        k: &mut Builder,
        backward: &BackwardMma,
        scheduler: &TileScheduler,
        head: Reg<U32>,
    ) -> HeadRows {
        let none = k.eval(0);
        match &self.vectors {
            Vectors::Strided(tensor) => {
                let batch = scheduler.find(k).batch;
                let first = tensor.row(k, backward.element, [batch, none, head]);
                HeadRows { first, start: None, stride: tensor.strides.row }
            }
            Vectors::Rows(tensor) => HeadRows {
                first: tensor.row_address(k, backward.element, none, head),
                start: scheduler.starts(k).map(|starts| starts[self.side as usize]),
                stride: tensor.row,
            },
        }
    }
}
