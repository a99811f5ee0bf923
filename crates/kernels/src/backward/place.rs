//! Which keys a block takes, and which queries see them.

use ptx::{Builder, Choose, Expression, Reg, U32, Value};

use crate::attention::MaskKind;
use crate::attention::visibility::{KeyTile, QueryBlocks, Visibility};
use crate::divisor::DivisorRegisters;
use crate::parameter::Number;

/// The numbers of a launch that say so.
pub(crate) struct Place {
    query_block: u32,
    key_block: u32,
    pub(crate) lengths: [Reg<U32>; 2],
    key_blocks: DivisorRegisters,
    key_heads: DivisorRegisters,
    /// Query heads that share a key head.
    group: Reg<U32>,
    pub(crate) visibility: Visibility,
}

/// The tile of a block, and its walk: query block after query block of query head after query
/// head.
pub(crate) struct Tile {
    pub(crate) batch: Reg<U32>,
    pub(crate) key_head: Reg<U32>,
    pub(crate) first_key: Reg<U32>,
    pub(crate) query_blocks: QueryBlocks,
}

/// Where a walk stands.
pub(crate) struct Walk {
    pub(crate) head: Reg<U32>,
    pub(crate) block: Reg<U32>,
    /// Steps that are left, this one included.
    pub(crate) left: Reg<U32>,
    /// The number of the block of query rows, among those of all heads and sequences.
    pub(crate) number: Reg<U32>,
    /// Where the walk of each head begins.
    start: Reg<U32>,
}

impl Place {
    /// Of blocks of so many queries and of so many keys.
    pub(crate) fn parameters(
        k: &mut Builder,
        query_block: u32,
        key_block: u32,
        mask: MaskKind,
    ) -> Self {
        Place {
            query_block,
            key_block,
            lengths: [Number::QueryLength.read(k), Number::KeyLength.read(k)],
            key_blocks: DivisorRegisters::parameters(k, Number::KeyBlocks),
            key_heads: DivisorRegisters::parameters(k, Number::KeyHeads),
            group: Number::GroupSize.read(k),
            visibility: Visibility::parameters(k, mask),
        }
    }

    /// The first key of this block.
    pub(crate) fn first_key(&self, k: &mut Builder) -> Reg<U32> {
        let index = k.block_index();
        let (_, key_block) = self.key_blocks.divide(k, index);
        k.eval(key_block * self.key_block)
    }

    /// The tile of this block. Blocks that run at the same time have the same few heads, so that
    /// their sums of `dQ` stay in the second-level cache; under a causal mask a head's longest
    /// walks come first.
    pub(crate) fn find(&self, k: &mut Builder) -> Tile {
        let index = k.block_index();
        let (head_and_batch, key_block) = self.key_blocks.divide(k, index);
        let (batch, key_head) = self.key_heads.divide(k, head_and_batch);
        let first_key = k.eval(key_block * self.key_block);
        let [query_length, key_length] = self.lengths;
        let keys = KeyTile {
            first_key,
            keys: self.key_block,
            query_block: self.query_block,
            query_length,
            key_length,
        };
        let query_blocks = self.visibility.query_blocks(k, &keys);
        Tile { batch, key_head, first_key, query_blocks }
    }

    /// Blocks of query rows of a head.
    fn query_blocks(&self) -> Value<U32> {
        (self.lengths[0] + (self.query_block - 1)) / self.query_block
    }

    /// The begin of a tile's walk.
    pub(crate) fn walk(&self, k: &mut Builder, tile: &Tile) -> Walk {
        let QueryBlocks { first, end, .. } = tile.query_blocks;
        let blocks = k.eval(self.query_blocks());
        let head = k.variable(tile.key_head * self.group);
        let heads = self.key_heads.number * self.group;
        // Blocks of one head that begin at the same time begin at different queries: what they load
        // and add to is spread over the second-level cache.
        let start = k.variable(first);
        k.if_(first.less(end), |k| {
            let ahead = tile.first_key / self.query_block % (end - first);
            k.set(start, first + ahead);
        });
        Walk {
            head,
            block: k.variable(start),
            left: k.variable((end - first) * self.group),
            number: k.variable((tile.batch * heads + head) * blocks + start),
            start,
        }
    }
}

impl Walk {
    /// The walk a step further on, in registers of its own.
    pub(crate) fn ahead(&self, k: &mut Builder, place: &Place, tile: &Tile) -> Walk {
        let Walk { head, block, left, number, start } = *self;
        let [head, block, left, number] = [head, block, left, number].map(|it| k.variable(it));
        let next = Walk { head, block, left, number, start };
        next.advance(k, place, tile);
        next
    }

    /// Goes on to the next step.
    pub(crate) fn advance(&self, k: &mut Builder, place: &Place, tile: &Tile) {
        self.advance_block(k, tile);
        self.advance_number(k, place, tile);
    }

    /// Goes on but for the number, which still is the one before.
    pub(crate) fn advance_block(&self, k: &mut Builder, tile: &Tile) {
        let QueryBlocks { first, end, .. } = tile.query_blocks;
        let next = k.eval(self.block + 1);
        let next = k.eval(next.equals(end).choose::<U32>(first, next));
        let around = next.equals(self.start);
        k.set(self.head, around.choose::<U32>(self.head + 1, self.head));
        k.set(self.block, next);
        k.set(self.left, self.left - 1);
    }

    /// Follows with the number.
    pub(crate) fn advance_number(&self, k: &mut Builder, place: &Place, tile: &Tile) {
        let QueryBlocks { first, end, .. } = tile.query_blocks;
        let back = k.eval(self.block.equals(first));
        let step = k.eval(back.choose::<U32>(first + 1 - end, 1u32));
        k.set(self.number, self.number + step);
        k.if_(self.block.equals(self.start), |k| {
            k.set(self.number, self.number + place.query_blocks());
        });
    }
}
