//! The producer: one thread that brings keys and values, then queries and output gradients, in the
//! order they are needed.

use ptx::{Builder, CopyHint, Expression, Reg, S32, SharedTiles, TensorMap, U32, U64, Value};

use super::place::{Place, Tile, Walk};
use super::{Backward, Shared, Tensors};

pub(super) fn produce(
    k: &mut Builder,
    backward: &Backward,
    shared: &Shared,
    tensors: &Tensors,
    place: &Place,
    tile: &Tile,
    walk: &Walk,
) {
    let queries = shared.query_pipeline.producer(k);
    let output_gradients = shared.output_gradient_pipeline.producer(k);
    let statistics_bytes = backward.statistics_bytes();
    let corner = |k: &mut Builder| {
        let row = k.eval(walk.block * backward.query_block);
        let [row, head, batch] = [row, walk.head, tile.batch].map(signed);
        [0.into(), row, head, batch]
    };
    let load_queries = |k: &mut Builder| {
        let stage = queries.acquire(k);
        if let Some(exchange) = &shared.exchange {
            let number = exchange.number(k, stage);
            k.store(number, walk.number);
        }
        let full = queries.expect(k, shared.queries.layout().bytes() + statistics_bytes);
        let corner = corner(k);
        shared.queries.at(k, stage).load(k, tensors.queries, &corner, full, CopyHint::default());
        let from = tensors.statistics + walk.number.convert::<U64>() * statistics_bytes;
        let to = shared.statistics(k, backward, stage);
        k.bulk_load(to, from, statistics_bytes, full);
        queries.advance(k);
    };
    let load_output_gradients = |k: &mut Builder| {
        let stage = output_gradients.acquire(k);
        let tiles = &shared.output_gradients;
        let full = output_gradients.expect(k, tiles.layout().bytes());
        let corner = corner(k);
        tiles.at(k, stage).load(k, tensors.output_gradients, &corner, full, CopyHint::default());
        output_gradients.advance(k);
    };
    let key_corner = [tile.first_key, tile.key_head, tile.batch].map(signed);
    let load_once = |k: &mut Builder, index: u32, tiles: &SharedTiles, map: TensorMap| {
        let loaded = shared.loaded.at(k, index);
        k.mbarrier_arrive_expect(loaded, tiles.layout().bytes());
        let [row, head, batch] = key_corner.clone();
        tiles.at(k, 0).load(k, map, &[0.into(), row, head, batch], loaded, CopyHint::default());
    };
    k.if_(walk.left.greater(0), |k| {
        load_once(k, 0, &shared.keys, tensors.keys);
        load_queries(k);
        load_once(k, 1, &shared.values, tensors.values);
        load_output_gradients(k);
        k.loop_(|k| {
            walk.advance(k, place, tile);
            k.break_if(walk.left.equals(0));
            load_queries(k);
            load_output_gradients(k);
        });
    });
}

fn signed(coordinate: Reg<U32>) -> Value<S32> {
    coordinate.reinterpret()
}
