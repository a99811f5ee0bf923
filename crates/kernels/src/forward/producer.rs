//! The producer: one thread that brings tiles, in the order they are needed.

use ptx::{Builder, CopyHint, Expression, Producer, Reg, S32, SharedTiles, TensorMap, U32};

use super::schedule::{Schedule, Tile};
use super::{Forward, Maps, Shared};

pub(super) fn produce(
    k: &mut Builder,
    forward: &Forward,
    shared: &Shared,
    maps: &Maps,
    schedule: &Schedule,
) {
    let queries = shared.query_pipeline.producer(k);
    let keys = shared.key_pipeline.producer(k);
    let values = shared.value_pipeline.producer(k);
    schedule.for_each_tile(k, |k, tile| {
        let load_keys = |k: &mut Builder, block: Reg<U32>| {
            let row = k.eval(block * forward.key_block);
            load(k, &keys, &shared.keys, maps.keys, tile, row, tile.key_head);
        };
        let load_values = |k: &mut Builder, block: Reg<U32>| {
            let row = k.eval(block * forward.key_block);
            load(k, &values, &shared.values, maps.values, tile, row, tile.key_head);
        };
        let block = k.variable(tile.blocks - 1);
        load_keys(k, block);
        load(k, &queries, &shared.queries, maps.queries, tile, tile.first_row, tile.head);
        k.loop_(|k| {
            k.break_if(block.equals(0));
            let next = k.eval(block - 1);
            load_keys(k, next);
            load_values(k, block);
            k.set(block, next);
        });
        load_values(k, block);
    });
}

/// Fills the next stage of a pipeline from `row` on.
fn load(
    k: &mut Builder,
    producer: &Producer,
    tiles: &SharedTiles,
    map: TensorMap,
    tile: &Tile,
    row: Reg<U32>,
    head: Reg<U32>,
) {
    let stage = producer.acquire(k);
    let full = producer.expect(k, tiles.layout().bytes());
    let [row, head, batch] = [row, head, tile.batch].map(|r| r.reinterpret::<S32>());
    let corner = [0.into(), row, head, batch];
    tiles.at(k, stage).load(k, map, &corner, full, CopyHint::default());
    producer.advance(k);
}
