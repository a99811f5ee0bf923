//! Which keys a block takes, and which queries see them.

use ptx::{Builder, Choose, Expression, Reg, U32, Value};

use super::order::{Order, Turn};
use crate::attention::MaskKind;
use crate::attention::visibility::{KeyTile, QueryBlocks, Visibility};
use crate::divisor::DivisorRegisters;
use crate::parameter::Number;

/// The numbers of a launch that say so.
pub(crate) struct Place {
    query_block: u32,
    pub(super) key_block: u32,
    pub(crate) lengths: [Reg<U32>; 2],
    key_blocks: DivisorRegisters,
    key_heads: DivisorRegisters,
    /// Query heads that share a key head.
    group: Reg<U32>,
    pub(crate) visibility: Visibility,
    /// Where additions come in one order.
    order: Option<Order>,
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
    path: Path,
}

/// How a walk goes on.
#[derive(Clone, Copy)]
enum Path {
    /// Head after head, each from a block of query rows on and around.
    Around(Reg<U32>),
    /// A block of query rows of so many heads, and on by a step.
    Step { step: Reg<U32>, heads: Reg<U32> },
}

impl Place {
    /// Of blocks of so many queries and of so many keys, where `dQ` is added in one order or not.
    pub(crate) fn parameters(
        k: &mut Builder,
        [query_block, key_block]: [u32; 2],
        mask: MaskKind,
        deterministic: bool,
    ) -> Self {
        Place {
            query_block,
            key_block,
            lengths: [Number::QueryLength.read(k), Number::KeyLength.read(k)],
            key_blocks: DivisorRegisters::parameters(k, Number::KeyBlocks),
            key_heads: DivisorRegisters::parameters(k, Number::KeyHeads),
            group: Number::GroupSize.read(k),
            visibility: Visibility::parameters(k, mask),
            order: deterministic.then(|| Order::parameters(k)),
        }
    }

    /// The head of this block, among those of all sequences, and which of its key blocks.
    fn key_block(&self, k: &mut Builder) -> (Reg<U32>, Reg<U32>) {
        if let Some(order) = &self.order {
            let Turn { head, key_block, .. } = order.turn(k, &self.key_blocks);
            return (head, key_block);
        }
        let index = k.block_index();
        self.key_blocks.divide(k, index)
    }

    /// This block's turn, where there is an order.
    pub(super) fn turn(&self, k: &mut Builder) -> Option<Turn> {
        Some(self.order.as_ref()?.turn(k, &self.key_blocks))
    }

    /// The first key of this block.
    pub(crate) fn first_key(&self, k: &mut Builder) -> Reg<U32> {
        let (_, key_block) = self.key_block(k);
        k.eval(key_block * self.key_block)
    }

    /// The tile of this block. Blocks that run at the same time have the same few heads, so that
    /// their sums of `dQ` stay in the second-level cache; under a causal mask a head's longest
    /// walks come first.
    pub(crate) fn find(&self, k: &mut Builder) -> Tile {
        let (head_and_batch, key_block) = self.key_block(k);
        let (batch, key_head) = self.key_heads.divide(k, head_and_batch);
        let first_key = k.eval(key_block * self.key_block);
        let query_blocks = self.query_blocks_of(k, first_key);
        Tile { batch, key_head, first_key, query_blocks }
    }

    /// The query blocks that see a block of keys.
    pub(super) fn query_blocks_of(&self, k: &mut Builder, first_key: Reg<U32>) -> QueryBlocks {
        let [query_length, key_length] = self.lengths;
        let keys = KeyTile {
            first_key,
            keys: self.key_block,
            query_block: self.query_block,
            query_length,
            key_length,
        };
        self.visibility.query_blocks(k, &keys)
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
        let (start, path) = match self.turn(k) {
            Some(turn) => {
                let path = Path::Step { step: turn.step(k), heads: self.group };
                (turn.start(k, &tile.query_blocks), path)
            }
            None => {
                // Blocks of one head that begin at the same time begin at different queries: what
                // they load and add to is spread over the second-level cache.
                let start = k.variable(first);
                k.if_(first.less(end), |k| {
                    let ahead = tile.first_key / self.query_block % (end - first);
                    k.set(start, first + ahead);
                });
                (start, Path::Around(start))
            }
        };
        Walk {
            head,
            block: k.variable(start),
            left: k.variable((end - first) * self.group),
            number: k.variable((tile.batch * heads + head) * blocks + start),
            path,
        }
    }

    /// Does something at every step of a walk.
    pub(super) fn every_step(
        &self,
        k: &mut Builder,
        tile: &Tile,
        walk: &Walk,
        body: impl FnOnce(&mut Builder),
    ) {
        k.loop_(|k| {
            k.break_if(walk.left.equals(0));
            body(k);
            walk.advance(k, self, tile);
        });
    }
}

impl Walk {
    /// The walk a step further on, in registers of its own.
    pub(crate) fn ahead(&self, k: &mut Builder, place: &Place, tile: &Tile) -> Walk {
        let Walk { head, block, left, number, path } = *self;
        let [head, block, left, number] = [head, block, left, number].map(|it| k.variable(it));
        let next = Walk { head, block, left, number, path };
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
        match self.path {
            Path::Around(start) => {
                let next = k.eval(self.block + 1);
                let next = k.eval(next.equals(end).choose::<U32>(first, next));
                let around = next.equals(start);
                k.set(self.head, around.choose::<U32>(self.head + 1, self.head));
                k.set(self.block, next);
            }
            Path::Step { step, heads } => {
                let first_head = k.eval(tile.key_head * heads);
                let next = k.eval(self.head + 1);
                let around = k.eval(next.equals(first_head + heads));
                k.set(self.head, around.choose::<U32>(first_head, next));
                k.set(self.block, around.choose::<U32>(self.block + step, self.block));
            }
        }
        k.set(self.left, self.left - 1);
    }

    /// Follows with the number.
    pub(crate) fn advance_number(&self, k: &mut Builder, place: &Place, tile: &Tile) {
        let QueryBlocks { first, end, .. } = tile.query_blocks;
        match self.path {
            Path::Around(start) => {
                let back = k.eval(self.block.equals(first));
                let step = k.eval(back.choose::<U32>(first + 1 - end, 1u32));
                k.set(self.number, self.number + step);
                k.if_(self.block.equals(start), |k| {
                    k.set(self.number, self.number + place.query_blocks());
                });
            }
            Path::Step { step, heads } => {
                let blocks = k.eval(place.query_blocks());
                k.set(self.number, self.number + blocks);
                // From the last head back to the first, and on.
                k.if_(self.head.equals(tile.key_head * heads), |k| {
                    k.set(self.number, self.number + step - heads * blocks);
                });
            }
        }
    }
}
