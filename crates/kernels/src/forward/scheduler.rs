//! Tile schedulers: what the loops must know of tiles, wherever tiles come from.
//!
//! Where all sequences have one length, tiles are numbered and found by
//! arithmetic (`static_scheduler`). Those of a ragged batch are claimed by the
//! producer, one after the other, and handed to the consumers
//! (`dynamic_scheduler`).

use ptx::{Builder, Expression, F32, Pred, Reg, S32, U32, U64, Value};

use super::producer::Loader;
use super::walk::WholeWalk;
use crate::attention::descale::Product;
use crate::attention::visibility::Visibility;

/// Goes from tile to tile.
pub(super) trait TileScheduler {
    /// The tile it has come to, in registers that change from tile to tile.
    type Tile;

    /// The block's first tile; there may be none.
    fn first_tile(&self, k: &mut Builder) -> Self::Tile;

    /// Goes on to the block's next tile; there may be none.
    fn next_tile(&self, k: &mut Builder, tile: &Self::Tile);

    fn has_tile(&self, tile: &Self::Tile) -> Value<Pred>;

    /// The key block that the tile begins with: it goes from there to its first.
    fn last_block(&self, tile: &Self::Tile) -> Value<U32>;
}

/// The producer's side.
pub(super) trait ProducerScheduler: TileScheduler {
    /// Where the keys and values of a tile lie, in registers that change.
    type Rows;

    fn rows<'a>(&self, tile: &'a Self::Tile) -> &'a Self::Rows;

    /// Registers of their own for a tile's rows, and its first key block.
    fn hold(&self, k: &mut Builder, tile: &Self::Tile) -> Self::Rows;

    /// What is held becomes this tile's.
    fn take(&self, k: &mut Builder, held: &Self::Rows, tile: &Self::Tile);

    /// Whether a key block is the last to be brought: the tile's first.
    fn is_first_block(&self, held: &Self::Rows, block: Reg<U32>) -> Value<Pred>;

    /// The number of a key block, from its place in the walk.
    fn key_block(&self, _: &mut Builder, _: &Self::Rows, place: Reg<U32>) -> Reg<U32> {
        place
    }

    /// Brings keys or values from a row on.
    fn load(&self, k: &mut Builder, loader: &Loader<'_>, rows: &Self::Rows, row: Reg<U32>);

    /// Brings a tile's queries.
    fn load_queries(&self, k: &mut Builder, loader: &Loader<'_>, tile: &Self::Tile);

    /// Looks ahead to the next tile: called before each key block of a tile.
    fn look_ahead(&self, _: &mut Builder, _: &Self::Tile, _: Reg<U32>) {}

    /// Called when there are no more tiles.
    fn finish(&self, k: &mut Builder);
}

/// The consumers' side.
pub(super) trait ConsumerScheduler: TileScheduler {
    /// The tile that is being computed, when the walk has already gone on: what
    /// is needed to mask and to store it, in registers that change.
    type Current;

    fn current(&self, k: &mut Builder, tile: &Self::Tile) -> Self::Current;

    /// The current tile is done, and becomes this one.
    fn take(&self, k: &mut Builder, current: &Self::Current, tile: &Self::Tile);

    /// Leaves of the tile's key blocks, if there is a tile, those that some row of a warpgroup sees
    /// ([`Walks`](super::walk::Walks)).
    fn narrow(&self, k: &mut Builder, tile: &Self::Tile, group: Reg<U32>);

    /// All blocks of the tile, where warpgroups may leave some of them out. Found anew whenever they are
    /// asked for, which is a few times a tile: registers are dearer.
    fn whole_walk(&self, k: &mut Builder, current: &Self::Current) -> Option<WholeWalk>;

    /// The same of a tile that is not yet the current one.
    fn whole_walk_ahead(&self, k: &mut Builder, tile: &Self::Tile) -> Option<WholeWalk>;

    /// Whether a key block is the tile's first: the last one to be walked.
    fn is_first_block(&self, current: &Self::Current, block: Reg<U32>) -> Value<Pred>;

    /// The entry of a tile's list of key blocks, where it has one, from its place in the walk. The
    /// number of the block is the place itself where there is none.
    fn entry(
        &self,
        _: &mut Builder,
        _: &Self::Current,
        _: impl FnOnce() -> Value<U32>,
    ) -> Option<Reg<U32>> {
        None
    }

    /// Whether some row of the tile does not see a key block whole.
    fn needs_mask(&self, current: &Self::Current, block: Reg<U32>) -> Value<Pred>;

    fn place(&self, k: &mut Builder, current: &Self::Current) -> Place;

    /// The tile's sequence.
    fn sequence(&self, k: &mut Builder, current: &Self::Current) -> Reg<U32>;

    /// Which keys rows see.
    fn visibility(&self) -> &Visibility;

    /// Where the tile's sequence and head begin among the log-sum-exps.
    fn first_log_sum(&self, k: &mut Builder, current: &Self::Current, place: &Place) -> Value<U64>;

    /// Where a row lies in the output tensor: all coordinates but the column.
    fn output_corner(
        &self,
        k: &mut Builder,
        current: &Self::Current,
        place: &Place,
        row: Reg<U32>,
    ) -> Vec<Value<S32>>;

    /// What a score loses for each position between query and key, in units of
    /// scores before the softmax's scale.
    fn slope(&self, k: &mut Builder, current: &Self::Current) -> Option<Reg<F32>>;

    /// What a product of the tile's 8-bit numbers is multiplied with; 1 where they have 16 bits.
    fn descale(&self, k: &mut Builder, current: &Self::Current, product: Product) -> Reg<F32>;

    /// What becomes of the tile, where keys are shared out ([`PartWord`]).
    ///
    /// [`PartWord`]: super::stream_k::PartWord
    fn part(&self, _: &Self::Current) -> Option<Reg<U32>> {
        None
    }

    /// The tile's sink, in units of log2.
    fn sink(&self, k: &mut Builder, current: &Self::Current) -> Option<Reg<F32>>;
}

/// Where a tile's rows stand.
pub(super) struct Place {
    /// The tile's first row in its sequence.
    pub(super) first_row: Reg<U32>,
    pub(super) query_length: Reg<U32>,
    pub(super) key_length: Reg<U32>,
    pub(super) head: Reg<U32>,
}

impl Place {
    /// The position of a row of the tile among the keys: the last query stands
    /// at the last key.
    pub(super) fn position(&self, row: Reg<U32>) -> Value<S32> {
        let offset = (self.key_length - self.query_length).reinterpret::<S32>();
        (self.first_row + row).reinterpret::<S32>() + offset
    }
}
