//! The producer: one thread that issues the TMA loads of Q, K and V in the order in which the
//! consumers need them.
//!
//! Keys are loaded one key block ahead of values, since consumers start the scores of a block
//! before they use the values of the previous block. Where the next tile's queries have room to be
//! loaded early, this holds across tiles too: the next tile's first keys and its queries are loaded
//! before this tile's last values.

use ptx::{
    Builder, CopyHint, Producer, Reg, S32, SharedAddress, SharedTile, SharedTiles, TensorMap, U32,
    Value,
};

use super::scheduler::ProducerScheduler;
use super::{Forward, Maps, Shared};
use crate::product::Source;

/// Emits the producer thread's loop over the tiles of its thread block.
pub(super) fn produce<T: ProducerScheduler>(
    k: &mut Builder,
    forward: &Forward,
    shared: &Shared,
    maps: &Maps,
    tiles: &T,
) {
    let queries = Loader::new(shared.query_pipeline.producer(k), &shared.queries, maps.queries);
    let keys = Loader::new(shared.key_pipeline.producer(k), &shared.keys, maps.keys);
    let values = Loader::new(shared.value_pipeline.producer(k), &shared.values, maps.values);
    let early = forward.query_buffers > 1 || forward.query_source == Source::Registers;
    let row = |k: &mut Builder, rows: &T::Rows, place: Reg<U32>| {
        let block = tiles.key_block(k, rows, place);
        k.eval(block * forward.key_block)
    };

    // A value stage may hold only a part of a key block: one load for each part.
    let load_values = |k: &mut Builder, held: &T::Rows, first: Reg<U32>| {
        let part = shared.values.layout().rows;
        for further in (0..forward.key_block).step_by(part as usize) {
            let row = if further == 0 { first } else { k.eval(first + further) };
            tiles.load(k, &values, held, row);
        }
    };

    let tile = tiles.first_tile(k);
    let block = k.variable(tiles.last_block(&tile));
    let held = tiles.hold(k, &tile);
    let begin = |k: &mut Builder, tile: &T::Tile| {
        let last = k.eval(tiles.last_block(tile));
        let rows = tiles.rows(tile);
        let last_row = row(k, &rows, last);
        tiles.load(k, &keys, &rows, last_row);
        tiles.load_queries(k, &queries, tile);
    };
    k.if_(tiles.has_tile(&tile), |k| begin(k, &tile));
    k.loop_(|k| {
        k.break_if(!tiles.has_tile(&tile));
        k.loop_(|k| {
            tiles.look_ahead(k, &tile, block);
            k.break_if(tiles.is_first_block(&held, block));
            let next = k.eval(block - 1);
            let next_row = row(k, &held, next);
            tiles.load(k, &keys, &held, next_row);
            let this_row = row(k, &held, block);
            load_values(k, &held, this_row);
            k.set(block, next);
        });
        tiles.next_tile(k, &tile);
        let begin_next = |k: &mut Builder| {
            k.if_(tiles.has_tile(&tile), |k| begin(k, &tile));
        };
        if early {
            begin_next(k);
        }
        let first_row = row(k, &held, block);
        load_values(k, &held, first_row);
        if !early {
            begin_next(k);
        }
        k.set(block, tiles.last_block(&tile));
        tiles.take(k, &held, &tile);
    });
    if let Some(transposed) = &shared.transposed {
        transposed.stop(k, &values.producer);
    }
    tiles.finish(k);
}

/// Loads the tiles of one tensor into the stages of its pipeline, one after the other.
pub(super) struct Loader<'a> {
    producer: Producer,
    tiles: &'a SharedTiles,
    map: TensorMap,
}

impl<'a> Loader<'a> {
    fn new(producer: Producer, tiles: &'a SharedTiles, map: TensorMap) -> Self {
        Loader { producer, tiles, map }
    }

    /// Fills the next stage with the box of the tensor map at `corner`.
    pub(super) fn load(&self, k: &mut Builder, corner: &[Value<S32>]) {
        self.fill(k, |k, tile, full| tile.load(k, self.map, corner, full, CopyHint::default()));
    }

    /// Fills the next stage with the given copies, which complete on the mbarrier that they are
    /// passed.
    pub(super) fn fill(
        &self,
        k: &mut Builder,
        copies: impl FnOnce(&mut Builder, SharedTile, Reg<SharedAddress>),
    ) {
        let stage = self.producer.acquire(k);
        let full = self.producer.expect(k, self.tiles.layout().bytes());
        let tile = self.tiles.at(k, stage);
        copies(k, tile, full);
        self.producer.advance(k);
    }

    pub(super) fn map(&self) -> TensorMap {
        self.map
    }

    /// Returns the rows of a stage.
    pub(super) fn rows(&self) -> u32 {
        self.tiles.layout().rows
    }
}
