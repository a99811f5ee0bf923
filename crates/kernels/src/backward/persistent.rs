//! Persistent thread blocks: the loads of one tile overlap with the epilogue of the tile before.
//!
//! The prologue and epilogue of a tile together take as long as two steps. So the grid has one
//! thread block for each multiprocessor, and its producer claims the next tile when it has issued
//! all loads of the current one. The next tile's first queries and output gradients load while the
//! last products of the current tile run, its keys once these have completed, and its values once
//! `dV` has been stored from their memory. `dK` is stored through the memory of `dS`, so that the
//! keys need not wait for it.
//!
//! Tiles are claimed in the order of their numbers, as the hardware would start thread blocks.

use ptx::{
    Builder, Expression, GlobalAddress, Mbarriers, Pipeline, Pred, Reg, Scope, SharedAddress,
    SpecialRegister, U32, Value,
};

use super::WARPGROUPS;
use crate::exchange::reset;
use crate::parameter::{Number, Workspace};

/// The shared-memory word with the number of the block's current tile.
#[derive(Clone, Copy)]
pub(super) struct Posted {
    offset: u32,
}

impl Posted {
    fn address(self, k: &mut Builder) -> Reg<SharedAddress> {
        k.shared_address(self.offset)
    }

    /// Reads the number, in whole warps; the shuffle shows ptxas that it is uniform.
    pub(super) fn read(self, k: &mut Builder) -> Reg<U32> {
        let address = self.address(k);
        let number = k.load(address);
        k.shuffle_index(number, 0)
    }

    pub(super) fn write(self, k: &mut Builder, number: Reg<U32>) {
        let address = self.address(k);
        k.store(address, number);
    }
}

/// How tiles pass from the producer to the other warps.
pub(super) struct Handover {
    pub(super) posted: Posted,
    /// A pipeline of one stage: the tile's number, and with it the memory of its keys.
    pub(super) tiles: Pipeline,
    /// Signals that the gradients of both warpgroups have left shared memory.
    stored: Mbarriers,
}

impl Handover {
    /// Reserves the shared memory; `warps` warps release each tile.
    pub(super) fn new(k: &mut Builder, warps: u32) -> Self {
        Handover {
            posted: Posted { offset: k.shared("number of the tile", 4, 4) },
            tiles: Pipeline::new(k, "tiles", 1, warps),
            stored: Mbarriers::new(k, "gradients stored", 1, WARPGROUPS),
        }
    }

    pub(super) fn init(&self, k: &mut Builder) {
        self.tiles.init(k);
        self.stored.init(k);
    }

    /// Signals that a warpgroup's gradients have left shared memory, or that it stores none; called
    /// by one thread of the warpgroup.
    pub(super) fn stored(&self, k: &mut Builder) {
        let stored = self.stored.at(k, 0);
        k.mbarrier_arrive(stored);
    }

    /// Waits, in the producer, until the gradients of the previous tile have left shared memory.
    pub(super) fn wait_until_stored(&self, k: &mut Builder, phase: Reg<U32>) {
        let stored = self.stored.at(k, 0);
        k.mbarrier_wait(stored, phase, Scope::Block);
    }
}

/// The tile scheduler: a global counter from which thread blocks claim tiles.
pub(super) struct Claims {
    /// Counts claims, beyond each block's first tile, which is its block index; zero between
    /// launches.
    counter: Reg<GlobalAddress>,
    tiles: Reg<U32>,
    blocks: Reg<U32>,
}

impl Claims {
    pub(super) fn parameters(k: &mut Builder) -> Self {
        Claims {
            counter: Workspace::Counters.address(k),
            tiles: Number::Tiles.read(k),
            blocks: k.special(SpecialRegister::GridExtent(ptx::Axis::X)),
        }
    }

    /// Claims the next tile and returns its number, which is no tile's if none is left.
    pub(super) fn claim(&self, k: &mut Builder) -> Reg<U32> {
        let before = k.atomic_add::<U32, _>(self.counter, 1, Scope::Gpu);
        // Each block's last claim fails, so a launch makes as many claims as there are tiles. The
        // last one resets the counter for the next launch.
        k.if_((before + 1).equals(self.tiles), |k| {
            reset(k, self.counter);
        });
        k.eval(before + self.blocks)
    }

    pub(super) fn is_tile(&self, number: Reg<U32>) -> Value<Pred> {
        number.less(self.tiles)
    }
}
