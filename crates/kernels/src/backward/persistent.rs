//! Blocks that take tile after tile, so that one begins while the one before is stored.
//!
//! What a block of the grid does before its first product and after its last one takes as long as two
//! steps. So there is one block for each multiprocessor, and its producer claims the next tile when
//! it has brought all of this one. Queries and output gradients of that come while the last products
//! run, keys when these have ended, values when the gradients of values have left their place.
//! Gradients of keys leave through the place of `dS`.
//!
//! Tiles are claimed in the order of their numbers, as the hardware would start blocks.

use ptx::{
    Barriers, Builder, Expression, GlobalAddress, Pipeline, Pred, Reg, Scope, SharedAddress,
    Special, StoreHint, StoreOrder, U32, Value,
};

use super::WARPGROUPS;
use crate::parameter::{Number, Workspace};

/// Where the number of a block's tile stands in shared memory.
#[derive(Clone, Copy)]
pub(super) struct Posted {
    offset: u32,
}

impl Posted {
    fn address(self, k: &mut Builder) -> Reg<SharedAddress> {
        k.shared_address(self.offset)
    }

    /// For whole warps, in which it is known to be the same in every lane.
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

/// How tiles go from the producer to the consumers.
pub(super) struct Handover {
    pub(super) posted: Posted,
    /// The number of the tile, and with it the memory of its keys.
    pub(super) tiles: Pipeline,
    /// Both warpgroups' gradients have left shared memory.
    stored: Barriers,
}

impl Handover {
    /// With so many warps that consume.
    pub(super) fn new(k: &mut Builder, warps: u32) -> Self {
        Handover {
            posted: Posted { offset: k.shared("number of the tile", 4, 4) },
            tiles: Pipeline::new(k, "tiles", 1, warps),
            stored: Barriers::new(k, "gradients stored", 1, WARPGROUPS),
        }
    }

    pub(super) fn init(&self, k: &mut Builder) {
        self.tiles.init(k);
        self.stored.init(k);
    }

    /// One thread of a warpgroup says that its gradients have left, or never come.
    pub(super) fn stored(&self, k: &mut Builder) {
        let stored = self.stored.at(k, 0);
        k.mbarrier_arrive(stored);
    }

    /// The producer waits until the gradients of the tile before have left.
    pub(super) fn wait_until_stored(&self, k: &mut Builder, phase: Reg<U32>) {
        let stored = self.stored.at(k, 0);
        k.mbarrier_wait(stored, phase, Scope::Block);
    }
}

/// Which tiles there are, and who has them.
pub(super) struct Claims {
    /// How many have been claimed beyond the first of each block; zero between launches.
    counter: Reg<GlobalAddress>,
    tiles: Reg<U32>,
    blocks: Reg<U32>,
}

impl Claims {
    pub(super) fn parameters(k: &mut Builder) -> Self {
        Claims {
            counter: Workspace::Counters.address(k),
            tiles: Number::Tiles.read(k),
            blocks: k.special(Special::GridExtent(ptx::Axis::X)),
        }
    }

    /// The number of a tile that nobody has, or one that is none.
    pub(super) fn claim(&self, k: &mut Builder) -> Reg<U32> {
        let before = k.atomic_add::<U32, _>(self.counter, 1, Scope::Gpu);
        // Each block claims once in vain, so there are as many claims as tiles: this is the last.
        k.if_((before + 1).equals(self.tiles), |k| {
            let none = k.eval::<U32>(0);
            let hint = StoreHint { order: StoreOrder::Relaxed(Scope::Gpu), ..Default::default() };
            k.store_vector(self.counter, &[none], hint);
        });
        k.eval(before + self.blocks)
    }

    pub(super) fn is_tile(&self, number: Reg<U32>) -> Value<Pred> {
        number.less(self.tiles)
    }
}
