//! The consumers' side of the dynamic scheduler: reads tiles from the slots in which the producer
//! posted them, and gives the slots back when the tiles are done.

use ptx::{Builder, Consumer, Expression, F32, Pred, Reg, S32, U32, U64, Value};

use super::{Batch, DynamicScheduler, WorkSlots, offset};
use crate::attention::descale::Product;
use crate::attention::visibility::Visibility;
use crate::forward::prefill::slice_corner;
use crate::forward::scheduler::{
    ConsumerScheduler, TileCoordinates, TileScheduler, first_block, set_each,
};
use crate::forward::walk::{TileBlocks, Walks, WholeWalk};

/// The consumers' side of the dynamic scheduler.
pub(in crate::forward) struct DynamicConsumer<'a> {
    slots: &'a WorkSlots,
    batch: &'a Batch,
    reads: Consumer,
    /// True in lane 0, which gives slots back for its warp.
    leader: Reg<Pred>,
    walks: Option<Walks>,
}

/// The registers of a tile that was read from its slot.
pub(in crate::forward) struct WorkTile {
    /// The end (exclusive) of the tile's key blocks; 0 if there are no more tiles.
    blocks: Reg<U32>,
    current: Current,
}

/// The registers of the tile being computed, which outlive the read of the next tile.
pub(in crate::forward) struct Current {
    slot: Reg<U32>,
    /// Key blocks from this one on need masking.
    masked_from: Reg<U32>,
    /// With a window, the first key block, and the block before which masking is needed.
    window: Option<[Reg<U32>; 2]>,
}

impl<'a> DynamicConsumer<'a> {
    pub(in crate::forward) fn new(k: &mut Builder, scheduler: &DynamicScheduler<'a>) -> Self {
        let DynamicScheduler { prefill, slots, batch } = *scheduler;
        let lane = k.lane();
        DynamicConsumer {
            slots,
            batch,
            reads: slots.pipeline.consumer(k),
            leader: k.eval(lane.equals(0)),
            walks: Walks::new(&prefill.tile, prefill.index_from_one_lane()),
        }
    }
}

impl TileScheduler for DynamicConsumer<'_> {
    type Tile = WorkTile;

    fn first_tile(&self, k: &mut Builder) -> WorkTile {
        let is_window = self.batch.visibility.is_window();
        let current = Current {
            slot: k.register(),
            masked_from: k.register(),
            window: is_window.then(|| [k.register(), k.register()]),
        };
        let tile = WorkTile { blocks: k.register(), current };
        self.next_tile(k, &tile);
        tile
    }

    fn next_tile(&self, k: &mut Builder, tile: &WorkTile) {
        let WorkTile { blocks, current } = tile;
        let slot = self.reads.wait(k);
        k.set(current.slot, slot);
        match current.window {
            Some([first_block, whole_from]) => {
                let words = self.slots.read_four(k, current.slot, offset::BLOCKS);
                set_each(k, [*blocks, first_block, current.masked_from, whole_from], words);
            }
            None => {
                let slot = self.slots.slot(k, current.slot);
                let words = [k.load::<U32, _>(slot), k.load(slot + offset::MASKED)];
                set_each(k, [*blocks, current.masked_from], words);
            }
        }
        self.reads.advance(k);
    }

    fn has_tile(&self, tile: &WorkTile) -> Value<Pred> {
        tile.blocks.differs(0)
    }

    fn last_block(&self, tile: &WorkTile) -> Value<U32> {
        tile.blocks - 1
    }
}

impl ConsumerScheduler for DynamicConsumer<'_> {
    type Current = Current;

    fn registers<'t>(&self, tile: &'t WorkTile) -> &'t Current {
        &tile.current
    }

    fn hold(&self, k: &mut Builder, tile: &WorkTile) -> Current {
        let Current { slot, masked_from, window } = tile.current;
        Current {
            slot: k.variable(slot),
            masked_from: k.variable(masked_from),
            window: window.map(|words| words.map(|word| k.variable(word))),
        }
    }

    fn take(&self, k: &mut Builder, current: &Current, tile: &WorkTile) {
        self.reads.release_stage(k, current.slot, self.leader);
        let words = |it: &Current| {
            [it.slot, it.masked_from].into_iter().chain(it.window.into_iter().flatten())
        };
        set_each(k, words(current), words(&tile.current));
    }

    fn narrow(&self, k: &mut Builder, tile: &WorkTile, group: Reg<U32>) {
        let Some(walks) = &self.walks else { return };
        let WorkTile { blocks, current } = tile;
        k.if_(self.has_tile(tile), |k| {
            let [first_row, query_length, key_length, _] =
                self.slots.read_four(k, current.slot, offset::ROWS);
            let rows = Walks::rows_of(k, group, first_row, [query_length, key_length]);
            let blocks = TileBlocks {
                first: current.window.map(|[first, _]| first),
                end: *blocks,
                masked_from: current.masked_from,
                whole_from: current.window.map(|[_, whole_from]| whole_from),
            };
            walks.narrow(k, &self.batch.visibility, &rows, &blocks);
        });
    }

    fn whole_walk(&self, k: &mut Builder, current: &Current) -> Option<WholeWalk> {
        self.walks.map(|_| {
            let slot = self.slots.slot(k, current.slot);
            let [blocks, first] = k.load_vector::<U32, _, 2>(slot, Default::default());
            WholeWalk { first: current.window.map(|_| first), last: k.eval(blocks - 1) }
        })
    }

    fn is_first_block(&self, current: &Current, block: Reg<U32>) -> Value<Pred> {
        block.equals(first_block(current.window.map(|[first, _]| first)))
    }

    fn needs_mask(&self, current: &Current, block: Reg<U32>) -> Value<Pred> {
        let masked = block.at_least(current.masked_from);
        match current.window {
            Some([_, whole_from]) => masked | block.less(whole_from),
            None => masked,
        }
    }

    fn coordinates(&self, k: &mut Builder, current: &Current) -> TileCoordinates {
        let [first_row, query_length, key_length, head] =
            self.slots.read_four(k, current.slot, offset::ROWS);
        TileCoordinates { first_row, query_length, key_length, head }
    }

    fn sequence(&self, k: &mut Builder, current: &Current) -> Reg<U32> {
        self.slots.read(k, current.slot, offset::SEQUENCE)
    }

    fn visibility(&self) -> &Visibility {
        &self.batch.visibility
    }

    fn first_log_sum(
        &self,
        k: &mut Builder,
        current: &Current,
        coordinates: &TileCoordinates,
    ) -> Value<U64> {
        let start = self.slots.read::<U32>(k, current.slot, offset::LSE_START);
        coordinates.head.convert::<U64>() * self.batch.lse_head_stride.convert::<U64>()
            + start.convert::<U64>()
    }

    fn output_corner(
        &self,
        k: &mut Builder,
        current: &Current,
        coordinates: &TileCoordinates,
        row: Reg<U32>,
    ) -> Vec<Value<S32>> {
        let end = self.slots.read(k, current.slot, offset::OUTPUT_END);
        slice_corner(k, row, coordinates.query_length, end, coordinates.head)[1..].to_vec()
    }

    fn slope(&self, k: &mut Builder, current: &Current) -> Option<Reg<F32>> {
        self.batch.slopes.as_ref().map(|_| self.slots.read(k, current.slot, offset::SLOPE))
    }

    fn descale(&self, k: &mut Builder, current: &Current, product: Product) -> Reg<F32> {
        match self.batch.descales {
            None => k.eval(1.0),
            Some(_) => self.slots.read(k, current.slot, offset::DESCALES[product as usize]),
        }
    }

    fn sink(&self, k: &mut Builder, current: &Current) -> Option<Reg<F32>> {
        self.batch.sinks.as_ref().map(|_| self.slots.read(k, current.slot, offset::SINK))
    }
}
