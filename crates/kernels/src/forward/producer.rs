//! The producer: one thread that brings tiles, in the order they are needed.
//!
//! Keys come a block before values, since scores are computed before
//! probabilities are used. Where queries have room to come early, that holds
//! across tiles as well: the next tile's first keys and its queries come before
//! this tile's last values.

use ptx::{Builder, CopyHint, Expression, Producer, Reg, S32, SharedTiles, TensorMap, U32};

use super::schedule::{Schedule, Tile};
use super::{Forward, Maps, Shared};
use crate::product::Source;

pub(super) fn produce(
    k: &mut Builder,
    forward: &Forward,
    shared: &Shared,
    maps: &Maps,
    schedule: &Schedule,
) {
    let queries = Loader::new(shared.query_pipeline.producer(k), &shared.queries, maps.queries);
    let keys = Loader::new(shared.key_pipeline.producer(k), &shared.keys, maps.keys);
    let values = Loader::new(shared.value_pipeline.producer(k), &shared.values, maps.values);
    let early = forward.query_buffers > 1 || forward.query_source == Source::Registers;
    let row = |k: &mut Builder, block: Reg<U32>| k.eval(block * forward.key_block);

    let tile = schedule.first_tile(k);
    let block = k.variable(tile.blocks - 1);
    let key_head = k.variable(tile.key_head);
    let batch = k.variable(tile.batch);
    let begin = |k: &mut Builder, tile: &Tile| {
        let last = k.eval(tile.blocks - 1);
        let last_row = row(k, last);
        keys.load(k, last_row, tile.key_head, tile.batch);
        queries.load(k, tile.first_row, tile.head, tile.batch);
    };
    k.if_(schedule.has_tile(&tile), |k| begin(k, &tile));
    k.loop_(|k| {
        k.break_if(!schedule.has_tile(&tile));
        k.loop_(|k| {
            k.break_if(block.equals(0));
            let next = k.eval(block - 1);
            let next_row = row(k, next);
            keys.load(k, next_row, key_head, batch);
            let this_row = row(k, block);
            values.load(k, this_row, key_head, batch);
            k.set(block, next);
        });
        schedule.next_tile(k, &tile);
        let begin_next = |k: &mut Builder| {
            k.if_(schedule.has_tile(&tile), |k| begin(k, &tile));
        };
        if early {
            begin_next(k);
        }
        values.load(k, block, key_head, batch);
        if !early {
            begin_next(k);
        }
        k.set(block, tile.blocks - 1);
        k.set(key_head, tile.key_head);
        k.set(batch, tile.batch);
    });
}

/// Brings one tensor's tiles, stage after stage.
struct Loader<'a> {
    producer: Producer,
    tiles: &'a SharedTiles,
    map: TensorMap,
}

impl<'a> Loader<'a> {
    fn new(producer: Producer, tiles: &'a SharedTiles, map: TensorMap) -> Self {
        Loader { producer, tiles, map }
    }

    /// Fills the next stage from `row` on.
    fn load(&self, k: &mut Builder, row: Reg<U32>, head: Reg<U32>, batch: Reg<U32>) {
        let stage = self.producer.acquire(k);
        let full = self.producer.expect(k, self.tiles.layout().bytes());
        let [row, head, batch] = [row, head, batch].map(|r| r.reinterpret::<S32>());
        let corner = [0.into(), row, head, batch];
        self.tiles.at(k, stage).load(k, self.map, &corner, full, CopyHint::default());
        self.producer.advance(k);
    }
}
