//! The producer: one thread that issues the TMA loads of keys and values, and of each step's
//! queries, row statistics and output gradients, in the order in which consumers need them.

use ptx::{Builder, CopyHint, Expression, Producer, S32, SharedTiles, TensorMap, U64, Value};

use super::Block;
use super::persistent::{Claims, Handover};
use super::tile_scheduler::{Tile, Walk};

/// Loads the single tile of a block.
pub(super) fn produce(k: &mut Builder, block: &Block<'_>, tile: &Tile, walk: &Walk) {
    let Block { shared, tensors, .. } = *block;
    let loader = Loader::new(k, block);
    k.if_(walk.left.greater(0), |k| {
        loader.load_once(k, tile, 0, &shared.keys, tensors.keys);
        loader.load_queries(k, tile, walk);
        loader.load_once(k, tile, 1, &shared.values, tensors.values);
        loader.load_output_gradients(k, tile, walk);
        loader.load_rest(k, tile, walk);
    });
}

/// Claims and loads one tile after another, in persistent kernels.
pub(super) fn produce_all(
    k: &mut Builder,
    block: &Block<'_>,
    handover: &Handover,
    claims: &Claims,
) {
    let Block { shared, tensors, scheduler, .. } = *block;
    let loader = Loader::new(k, block);
    let tiles = handover.tiles.producer(k);
    let first = k.block_index();
    let number = k.variable(first);
    k.loop_(|k| {
        let tile = scheduler.find_numbered(k, number);
        let walk = scheduler.walk(k, &tile);
        k.if_(walk.left.greater(0), |k| {
            loader.load_queries(k, &tile, &walk);
            loader.load_output_gradients(k, &tile, &walk);
        });
        tiles.acquire(k);
        handover.posted.write(k, number);
        tiles.commit(k);
        loader.load_once(k, &tile, 0, &shared.keys, tensors.keys);
        handover.wait_until_stored(k, tiles.phase());
        tiles.advance(k);
        loader.load_once(k, &tile, 1, &shared.values, tensors.values);
        k.if_(walk.left.greater(0), |k| loader.load_rest(k, &tile, &walk));
        loader.skip_to_first_stage(k);
        let next = claims.claim(k);
        k.set(number, next);
        k.break_if(!claims.is_tile(number));
    });
    tiles.acquire(k);
    handover.posted.write(k, number);
    tiles.commit(k);
}

/// The producer's position in its pipelines.
struct Loader<'a> {
    block: Block<'a>,
    queries: Producer,
    output_gradients: Producer,
}

impl<'a> Loader<'a> {
    fn new(k: &mut Builder, block: &Block<'a>) -> Self {
        let Block { shared, .. } = *block;
        let queries = shared.query_pipeline.producer(k);
        let output_gradients = shared.output_gradient_pipeline.producer_sharing_state(&queries);
        Loader { block: *block, queries, output_gradients }
    }

    /// Advances to stage 0, publishing the stages on the way empty: the consumers' loop is unrolled
    /// over constant stages, so each tile must begin at stage 0.
    fn skip_to_first_stage(&self, k: &mut Builder) {
        k.loop_(|k| {
            k.break_if(self.queries.stage().equals(0));
            for producer in [&self.queries, &self.output_gradients] {
                producer.acquire(k);
                producer.commit(k);
            }
            self.queries.advance(k);
        });
    }

    /// Loads the queries of a step and their statistics. `load_output_gradients` must follow.
    fn load_queries(&self, k: &mut Builder, tile: &Tile, walk: &Walk) {
        let Block { backward, shared, tensors, .. } = self.block;
        let queries = &self.queries;
        let statistics_bytes = backward.pass().statistics_bytes();
        let stage = queries.acquire(k);
        if let Some(exchange) = &shared.exchange {
            let number = exchange.number(k, stage);
            k.store(number, walk.number);
        }
        if let Some(published) = &shared.published_steps {
            published.write(k, stage, walk);
        }
        let full = queries.expect(k, shared.queries.layout().bytes() + statistics_bytes);
        let corner = self.corner(k, tile, walk);
        shared.queries.at(k, stage).load(k, tensors.queries, &corner, full, CopyHint::default());
        let from = tensors.statistics + walk.number.convert::<U64>() * statistics_bytes;
        let to = shared.statistics(k, backward, stage);
        k.bulk_load(to, from, statistics_bytes, full);
    }

    /// Loads the output gradients of a step, and advances both pipelines.
    fn load_output_gradients(&self, k: &mut Builder, tile: &Tile, walk: &Walk) {
        let Block { shared, tensors, .. } = self.block;
        let stage = self.output_gradients.acquire(k);
        let tiles = &shared.output_gradients;
        let full = self.output_gradients.expect(k, tiles.layout().bytes());
        let corner = self.corner(k, tile, walk);
        tiles.at(k, stage).load(k, tensors.output_gradients, &corner, full, CopyHint::default());
        self.queries.advance(k);
    }

    /// Loads queries and output gradients of all steps after the current one.
    fn load_rest(&self, k: &mut Builder, tile: &Tile, walk: &Walk) {
        k.loop_(|k| {
            walk.advance(k, self.block.scheduler, tile);
            k.break_if(walk.left.equals(0));
            self.load_queries(k, tile, walk);
            self.load_output_gradients(k, tile, walk);
        });
    }

    /// Loads the keys (`index` 0) or the values (1) of a tile.
    fn load_once(
        &self,
        k: &mut Builder,
        tile: &Tile,
        index: u32,
        tiles: &SharedTiles,
        map: TensorMap,
    ) {
        let loaded = self.block.shared.loaded.at(k, index);
        k.mbarrier_arrive_expect(loaded, tiles.layout().bytes());
        let corner = [tile.key_row(tile.first_key)].into_iter().chain(tile.key_rest());
        let corner = with_column(corner.collect());
        tiles.at(k, 0).load(k, map, &corner, loaded, CopyHint::default());
    }

    /// Returns the TMA coordinates at which the query rows of a step begin.
    fn corner(&self, k: &mut Builder, tile: &Tile, walk: &Walk) -> Vec<Value<S32>> {
        let row = k.eval(walk.block * self.block.backward.query_block);
        with_column(tile.query_corner(k, row, walk.head))
    }
}

/// Prepends the coordinate of the first column.
fn with_column(mut corner: Vec<Value<S32>>) -> Vec<Value<S32>> {
    corner.insert(0, 0.into());
    corner
}
