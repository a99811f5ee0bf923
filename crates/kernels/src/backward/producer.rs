//! The producer: one thread that brings keys and values, then queries and output gradients, in the
//! order they are needed.

use ptx::{Builder, CopyHint, Expression, S32, SharedTiles, TensorMap, U64, Value};

use super::Block;
use super::place::{Tile, Walk};

pub(super) fn produce(k: &mut Builder, block: &Block<'_>, tile: &Tile, walk: &Walk) {
    let Block { backward, shared, tensors, place } = *block;
    let queries = shared.query_pipeline.producer(k);
    let output_gradients = shared.output_gradient_pipeline.producer(k);
    let statistics_bytes = backward.pass().statistics_bytes();
    let corner = |k: &mut Builder| {
        let row = k.eval(walk.block * backward.query_block);
        with_column(tile.query_corner(k, row, walk.head))
    };
    let load_queries = |k: &mut Builder| {
        let stage = queries.acquire(k);
        if let Some(exchange) = &shared.exchange {
            let number = exchange.number(k, stage);
            k.store(number, walk.number);
        }
        if let Some(told) = &shared.told {
            told.tell(k, stage, walk);
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
    let load_once = |k: &mut Builder, index: u32, tiles: &SharedTiles, map: TensorMap| {
        let loaded = shared.loaded.at(k, index);
        k.mbarrier_arrive_expect(loaded, tiles.layout().bytes());
        let corner = [tile.key_row(tile.first_key)].into_iter().chain(tile.key_rest());
        let corner = with_column(corner.collect());
        tiles.at(k, 0).load(k, map, &corner, loaded, CopyHint::default());
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

/// The corner of a row's first column.
fn with_column(mut corner: Vec<Value<S32>>) -> Vec<Value<S32>> {
    corner.insert(0, 0.into());
    corner
}
