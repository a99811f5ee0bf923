//! The traits of the tile schedulers: what the producer's and the consumers' loops need to know
//! about tiles.
//!
//! Where all sequences have the same length, tiles are numbered and located by arithmetic
//! (`static_scheduler`). The tiles of a ragged batch are claimed by the producer, one after the
//! other, and handed to the consumers through shared memory (`dynamic_scheduler`).
//!
//! A tile's key blocks are walked from the last to the first. Where the tile has a list of key
//! blocks, because a mask is a function, a *place* in the walk is an index into that list;
//! otherwise it is the number of the key block itself.

use ptx::{Builder, Expression, F32, Pred, Reg, S32, Scalar, U32, U64, Value};

use super::producer::Loader;
use super::walk::WholeWalk;
use crate::attention::descale::Product;
use crate::attention::visibility::Visibility;

/// Iterates over the tiles of a thread block.
pub(super) trait TileScheduler {
    /// The registers of the scheduler's current tile, which [`next_tile`](TileScheduler::next_tile)
    /// overwrites.
    type Tile;

    /// Finds the thread block's first tile; there may be none
    /// ([`has_tile`](TileScheduler::has_tile)).
    fn first_tile(&self, k: &mut Builder) -> Self::Tile;

    /// Advances `tile` to the thread block's next tile; there may be none.
    fn next_tile(&self, k: &mut Builder, tile: &Self::Tile);

    /// Returns whether `tile` is a tile: false once the last one is done.
    fn has_tile(&self, tile: &Self::Tile) -> Value<Pred>;

    /// Returns the place of the tile's last key block, with which the walk begins.
    fn last_block(&self, tile: &Self::Tile) -> Value<U32>;
}

/// The producer's side of a tile scheduler.
pub(super) trait ProducerScheduler: TileScheduler {
    /// Registers that say where the keys and values of a tile lie, and its first key block.
    type Rows;

    /// Returns these registers of `tile`.
    fn rows(&self, tile: &Self::Tile) -> Self::Rows;

    /// Copies them to new registers, which stay valid when the scheduler goes on to the next tile.
    fn hold(&self, k: &mut Builder, tile: &Self::Tile) -> Self::Rows;

    /// Overwrites the registers from [`hold`](ProducerScheduler::hold) with those of `tile`.
    fn take(&self, k: &mut Builder, held: &Self::Rows, tile: &Self::Tile);

    /// Returns whether the block at a place is the tile's first key block, the last one to be
    /// loaded.
    fn is_first_block(&self, held: &Self::Rows, block: Reg<U32>) -> Value<Pred>;

    /// Returns the number of the key block at a place in the walk.
    fn key_block(&self, _: &mut Builder, _: &Self::Rows, place: Reg<U32>) -> Reg<U32> {
        place
    }

    /// Loads one stage of keys or values from row `row` of the sequence on.
    fn load(&self, k: &mut Builder, loader: &Loader<'_>, rows: &Self::Rows, row: Reg<U32>);

    /// Loads a tile's queries.
    fn load_queries(&self, k: &mut Builder, loader: &Loader<'_>, tile: &Self::Tile);

    /// Called before each key block of a tile, so that a scheduler can look up the next tile ahead
    /// of time.
    fn look_ahead(&self, _: &mut Builder, _: &Self::Tile, _: Reg<U32>) {}

    /// Called once when there are no more tiles.
    fn finish(&self, k: &mut Builder);
}

/// The consumers' side of a tile scheduler.
pub(super) trait ConsumerScheduler: TileScheduler {
    /// Registers of the tile that is being computed: what masking and storing it need.
    type Current;

    /// Returns these registers of `tile`.
    fn registers<'a>(&self, tile: &'a Self::Tile) -> &'a Self::Current;

    /// Copies them to new registers, which stay valid when the scheduler goes on to the next tile.
    fn hold(&self, k: &mut Builder, tile: &Self::Tile) -> Self::Current;

    /// Ends the current tile and makes `tile` the current one.
    fn take(&self, k: &mut Builder, current: &Self::Current, tile: &Self::Tile);

    /// Narrows the tile's key blocks, if there is a tile, to those that some row of warpgroup
    /// `group` sees ([`Walks`](super::walk::Walks)).
    fn narrow(&self, k: &mut Builder, tile: &Self::Tile, group: Reg<U32>);

    /// Returns the range of all key blocks of a tile, where warpgroups may skip some of them. It is
    /// recomputed at each call, a few times per tile, because that costs less than the registers to
    /// keep it.
    fn whole_walk(&self, k: &mut Builder, current: &Self::Current) -> Option<WholeWalk>;

    /// Returns whether the block at a place is the tile's first key block, the last one to be
    /// walked.
    fn is_first_block(&self, current: &Self::Current, block: Reg<U32>) -> Value<Pred>;

    /// Loads the entry at a place of the tile's list of key blocks. Without a list there is none,
    /// and the place is the number of the key block.
    fn entry(
        &self,
        _: &mut Builder,
        _: &Self::Current,
        _: impl FnOnce() -> Value<U32>,
    ) -> Option<Reg<U32>> {
        None
    }

    /// Returns whether some row of the tile does not see all of key block `block`.
    fn needs_mask(&self, current: &Self::Current, block: Reg<U32>) -> Value<Pred>;

    /// Returns where the tile's rows are in their sequence.
    fn coordinates(&self, k: &mut Builder, current: &Self::Current) -> TileCoordinates;

    /// Returns the index of the tile's sequence in the batch.
    fn sequence(&self, k: &mut Builder, current: &Self::Current) -> Reg<U32>;

    /// Returns the mask.
    fn visibility(&self) -> &Visibility;

    /// Returns the index of the log-sum-exp of the first query of the tile's sequence and head.
    fn first_log_sum(
        &self,
        k: &mut Builder,
        current: &Self::Current,
        coordinates: &TileCoordinates,
    ) -> Value<U64>;

    /// Returns the coordinates of a row in the output's tensor map, without the column.
    fn output_corner(
        &self,
        k: &mut Builder,
        current: &Self::Current,
        coordinates: &TileCoordinates,
        row: Reg<U32>,
    ) -> Vec<Value<S32>>;

    /// Returns the tile's ALiBi slope, which a score loses for each position between query and key,
    /// in units of scores before the softmax scale.
    fn slope(&self, k: &mut Builder, current: &Self::Current) -> Option<Reg<F32>>;

    /// Returns the descale factor of one of the tile's products of 8-bit inputs; 1 with 16-bit
    /// inputs.
    fn descale(&self, k: &mut Builder, current: &Self::Current, product: Product) -> Reg<F32>;

    /// With stream-K, returns whether the tile is stored or left as a partial tile, as a
    /// [`PartWord`].
    ///
    /// [`PartWord`]: super::stream_k::PartWord
    fn part(&self, _: &Self::Current) -> Option<Reg<U32>> {
        None
    }

    /// Returns the attention sink of the tile's head, in units of log2.
    fn sink(&self, k: &mut Builder, current: &Self::Current) -> Option<Reg<F32>>;
}

/// Returns the first block of a walk: block 0 where there is no register for it.
pub(super) fn first_block(first: Option<Reg<U32>>) -> Value<U32> {
    first.map_or_else(|| 0.into(), Into::into)
}

/// Sets registers, of which a kernel may have none, to others.
#[track_caller]
pub(super) fn set_each<T: Scalar>(
    k: &mut Builder,
    registers: impl IntoIterator<Item = Reg<T>>,
    values: impl IntoIterator<Item = Reg<T>>,
) {
    for (register, value) in registers.into_iter().zip(values) {
        k.set(register, value);
    }
}

/// Where a tile's rows are: sequence lengths, first row and query head.
pub(super) struct TileCoordinates {
    /// The tile's first query row, counted from the start of its sequence.
    pub(super) first_row: Reg<U32>,
    pub(super) query_length: Reg<U32>,
    pub(super) key_length: Reg<U32>,
    pub(super) head: Reg<U32>,
}

impl TileCoordinates {
    /// Returns the position of the tile's row `row` among the keys. The last query is at the
    /// position of the last key.
    pub(super) fn position(&self, row: Reg<U32>) -> Value<S32> {
        let offset = (self.key_length - self.query_length).reinterpret::<S32>();
        (self.first_row + row).reinterpret::<S32>() + offset
    }
}
