//! The producer: one thread that brings tiles, in the order they are needed.
//!
//! Keys come a block before values, since scores are computed before
//! probabilities are used. Where queries have room to come early, that holds
//! across tiles as well: the next tile's first keys and its queries come before
//! this tile's last values.

use ptx::{
    Builder, CopyHint, Producer, Reg, S32, SharedAddress, SharedTile, SharedTiles, TensorMap, U32,
    Value,
};

use super::scheduler::ProducerScheduler;
use super::{Forward, Maps, Shared};
use crate::product::Source;

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

    // Values of a block come in as many parts as their tile says.
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
        let last_row = row(k, tiles.rows(tile), last);
        tiles.load(k, &keys, tiles.rows(tile), last_row);
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

/// Brings one tensor's tiles, stage after stage.
pub(super) struct Loader<'a> {
    producer: Producer,
    tiles: &'a SharedTiles,
    map: TensorMap,
}

impl<'a> Loader<'a> {
    fn new(producer: Producer, tiles: &'a SharedTiles, map: TensorMap) -> Self {
        Loader { producer, tiles, map }
    }

    /// Fills the next stage from a corner on.
    pub(super) fn load(&self, k: &mut Builder, corner: &[Value<S32>]) {
        self.fill(k, |k, tile, full| tile.load(k, self.map, corner, full, CopyHint::default()));
    }

    /// Fills the next stage by copies that complete on the barrier given.
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

    /// Rows of a stage.
    pub(super) fn rows(&self) -> u32 {
        self.tiles.layout().rows
    }
}
