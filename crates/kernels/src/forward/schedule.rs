//! Which tiles a block takes, and in which order.
//!
//! A tile is some query rows of one head. Tiles are numbered with the rows
//! moving fastest, so that blocks running at the same time share the keys and
//! values of few heads in the second-level cache. Block `b` of `g` takes tiles
//! `b`, `b + g`, ...
//!
//! With a causal mask, tiles differ in length. Number `2p` and `2p + 1` are then
//! the `p`-th longest and the `p`-th shortest tile of a head, and a block takes
//! both: every such pair is the same work.

use ptx::{Builder, Choose, Expression, Pred, Reg, S32, U32, Value};

use super::Forward;
use super::divisor::DivisorRegisters;

/// The numbering of tiles.
pub(super) struct Schedule {
    causal: bool,
    query_rows: u32,
    key_block: u32,
    pub(super) query_length: Reg<U32>,
    pub(super) key_length: Reg<U32>,
    /// Tiles in all; with a causal mask an even number for each head.
    tiles: Reg<U32>,
    /// Tiles of a head; with a causal mask, pairs of tiles.
    per_head: DivisorRegisters,
    heads: DivisorRegisters,
    group: DivisorRegisters,
    /// Blocks of the grid.
    blocks: Reg<U32>,
}

/// Where a block stands: its tile, in registers that change from tile to tile.
pub(super) struct Tile {
    number: Reg<U32>,
    pub(super) first_row: Reg<U32>,
    pub(super) head: Reg<U32>,
    pub(super) key_head: Reg<U32>,
    pub(super) batch: Reg<U32>,
    /// Key blocks that some row of the tile sees; at least one, so that a tile
    /// of rows that see nothing is written too.
    pub(super) blocks: Reg<U32>,
    /// The first of them that some row does not see whole.
    pub(super) first_masked: Reg<U32>,
}

/// What is needed to store a tile when the block has gone on to the next, in
/// registers that change from tile to tile.
pub(super) struct Finished {
    pub(super) first_row: Reg<U32>,
    pub(super) head: Reg<U32>,
    pub(super) batch: Reg<U32>,
    pub(super) heads: Reg<U32>,
}

impl Schedule {
    pub(super) fn parameters(
        k: &mut Builder,
        forward: &Forward,
        query_length: Reg<U32>,
        key_length: Reg<U32>,
    ) -> Self {
        Schedule {
            causal: forward.causal,
            query_rows: forward.query_rows(),
            key_block: forward.key_block,
            query_length,
            key_length,
            tiles: k.parameter("tiles"),
            per_head: DivisorRegisters::parameters(k, "tiles of a head"),
            heads: DivisorRegisters::parameters(k, "query heads"),
            group: DivisorRegisters::parameters(k, "query heads per key head"),
            blocks: k.special(ptx::Special::GridExtent(ptx::Axis::X)),
        }
    }

    /// Every tile of this block, one after the other.
    pub(super) fn for_each_tile(&self, k: &mut Builder, body: impl FnOnce(&mut Builder, &Tile)) {
        let tile = self.first_tile(k);
        k.loop_(|k| {
            k.break_if(!self.has_tile(&tile));
            body(k, &tile);
            self.next_tile(k, &tile);
        });
    }

    /// The block's first tile; there may be none.
    pub(super) fn first_tile(&self, k: &mut Builder) -> Tile {
        let block = k.block_index();
        let number = k.variable(if self.causal { block * 2 } else { block.into() });
        let tile = Tile {
            number,
            first_row: k.register(),
            head: k.register(),
            key_head: k.register(),
            batch: k.register(),
            blocks: k.register(),
            first_masked: k.register(),
        };
        self.locate(k, &tile);
        tile
    }

    /// Goes on to the block's next tile; there may be none.
    pub(super) fn next_tile(&self, k: &mut Builder, tile: &Tile) {
        if self.causal {
            // From the long tile of a pair to its short one, then to the next pair.
            let long = k.eval((tile.number & 1).equals(0));
            let further = k.eval(tile.number + (self.blocks * 2 - 1));
            k.set(tile.number, long.choose::<U32>(tile.number + 1, further));
        } else {
            k.set(tile.number, tile.number + self.blocks);
        }
        self.locate(k, tile);
    }

    pub(super) fn has_tile(&self, tile: &Tile) -> Value<Pred> {
        tile.number.less(self.tiles)
    }

    pub(super) fn finished(&self, k: &mut Builder, tile: &Tile) -> Finished {
        Finished {
            first_row: k.variable(tile.first_row),
            head: k.variable(tile.head),
            batch: k.variable(tile.batch),
            heads: self.heads.number,
        }
    }

    /// Finds the coordinates of a tile by its number.
    fn locate(&self, k: &mut Builder, tile: &Tile) {
        let row_tile = if self.causal {
            let pair = k.eval(tile.number >> 1);
            let (head_and_batch, pair) = self.per_head.divide(k, pair);
            self.place_head(k, tile, head_and_batch);
            let last = (self.query_length + (self.query_rows - 1)) / self.query_rows - 1;
            let long = (tile.number & 1).equals(0);
            // Of an odd number of tiles the middle one is its own pair; the
            // second time it is put behind the end, where there is nothing to do.
            let last = k.eval(last);
            let long_tile = k.eval(last - pair);
            let middle = k.eval(long_tile.equals(pair));
            let short_tile = k.eval(middle.choose::<U32>(last + 1, pair));
            k.eval(long.choose::<U32>(long_tile, short_tile))
        } else {
            let (head_and_batch, row_tile) = self.per_head.divide(k, tile.number);
            self.place_head(k, tile, head_and_batch);
            row_tile
        };
        k.set(tile.first_row, row_tile * self.query_rows);
        self.find_blocks(k, tile);
    }

    fn place_head(&self, k: &mut Builder, tile: &Tile, head_and_batch: Reg<U32>) {
        let (batch, head) = self.heads.divide(k, head_and_batch);
        let (key_head, _) = self.group.divide(k, head);
        k.set(tile.batch, batch);
        k.set(tile.head, head);
        k.set(tile.key_head, key_head);
    }

    /// Which key blocks the tile needs, and which of them need no mask.
    fn find_blocks(&self, k: &mut Builder, tile: &Tile) {
        let size = self.key_block;
        let all = k.eval((self.key_length + (size - 1)) / size);
        let whole = k.eval(self.key_length / size);
        if !self.causal {
            k.set(tile.blocks, all);
            k.set(tile.first_masked, whole);
            return;
        }
        let signed = |value: Value<U32>| value.reinterpret::<S32>();
        // Keys that the first row sees, and the last of the tile.
        let offset = k.eval(signed(self.key_length - self.query_length));
        let first_sees = k.eval((signed(tile.first_row + 1) + offset).maximum(0));
        let last_sees = (signed(tile.first_row + self.query_rows) + offset).maximum(0);
        let needed = (last_sees.reinterpret::<U32>() + (size - 1)) / size;
        let needed = k.eval(needed.minimum(all).maximum(1));
        // The second half of a middle pair lies behind the end: next to nothing.
        let behind = tile.first_row.at_least(self.query_length);
        k.set(tile.blocks, behind.choose::<U32>(1, needed));
        k.set(tile.first_masked, (first_sees.reinterpret::<U32>() / size).minimum(whole));
    }
}

impl Finished {
    /// Takes the place of a tile that is done.
    pub(super) fn take(&self, k: &mut Builder, tile: &Tile) {
        k.set(self.first_row, tile.first_row);
        k.set(self.head, tile.head);
        k.set(self.batch, tile.batch);
    }
}
