//! Which tile a thread block takes, and the walk over the query blocks that see it.
//!
//! A [`Tile`] is one key block of one key head of one sequence. Its [`Walk`] visits every pair of a
//! query head of the group and a query block that sees some of the tile's keys; the producer, the
//! consumers and the threads that pass turns each keep a walk of their own. [`TileScheduler`] holds
//! the launch's numbers from which both are computed, for equal lengths (`order` says in which
//! order tiles come) or for ragged batches (`ragged`).

use ptx::{Builder, Expression, Pred, Reg, S32, Select, U32, Value};

use super::BackwardPass;
use super::lists::Listed;
use super::order::{AlternatingWaves, Direction, Order, Turn};
use super::persistent::Posted;
use super::ragged::{Ragged, ShareRows, Slice};
use super::split::Split;
use crate::attention::Batch;
use crate::attention::function::lists::{BlockLists, needs_function};
use crate::attention::visibility::{KeyTile, QueryBlocks, Visibility};
use crate::divisor::DivisorRegisters;
use crate::parameter::Number;

/// The numbers of a launch that map thread blocks to tiles and tiles to query blocks.
pub(crate) struct TileScheduler {
    query_block: u32,
    pub(super) key_block: u32,
    sequences: Sequences,
    key_heads: DivisorRegisters,
    /// The number of query heads that share a key head.
    group: Reg<U32>,
    pub(crate) visibility: Visibility,
    /// With a mask function: for each key block, the list of query blocks that see it.
    lists: Option<BlockLists>,
    /// The order in which tiles take heads and key blocks, where it is not head after head. Ragged
    /// batches have an order of their own.
    order: Option<Order>,
    /// Whether additions to `dQ` come in that order too: the deterministic mode.
    takes_turns: bool,
    /// In persistent kernels, where the number of the current tile is in shared memory.
    pub(super) posted: Option<Posted>,
    /// How the tiles of the last wave are split, if they are.
    pub(super) split: Option<Split>,
    /// In which direction each wave walks, where waves alternate.
    pub(super) waves: Option<AlternatingWaves>,
}

/// How many queries and keys sequences have, and where they are.
enum Sequences {
    Equal { lengths: [Reg<U32>; 2], key_blocks: DivisorRegisters },
    Ragged(Ragged),
}

/// The tile of a thread block: a key block of a key head, and the query blocks that see it.
pub(crate) struct Tile {
    pub(crate) batch: Reg<U32>,
    pub(crate) key_head: Reg<U32>,
    pub(crate) first_key: Reg<U32>,
    pub(super) query_blocks: QueryBlocks,
    /// In a ragged batch, where the rows of the tile's sequence are.
    slice: Option<Slice>,
    /// Where tiles are split, this part's steps of the walk: how many it skips, and how many it
    /// takes.
    steps: Option<[Reg<U32>; 2]>,
    /// The direction of the walk, where waves alternate.
    direction: Option<Direction>,
}

/// A tile's share of the query blocks of its key head, which it clears or rounds: those with
/// workspace indices from `first` to before `end`.
pub(super) struct Share {
    /// The index of the key head's counters.
    pub(super) counters: Reg<U32>,
    /// The number of tiles that have a share of the same key head's query blocks.
    pub(super) tiles: Reg<U32>,
    pub(super) first: Reg<U32>,
    pub(super) end: Reg<U32>,
    /// In a ragged batch, the rows of the share.
    pub(super) rows: Option<ShareRows>,
}

/// The current step of a tile's walk.
pub(crate) struct Walk {
    pub(crate) head: Reg<U32>,
    pub(crate) block: Reg<U32>,
    /// Steps that are left, including the current one.
    pub(crate) left: Reg<U32>,
    /// The index of the query block in the workspace, over all heads and sequences.
    pub(crate) number: Reg<U32>,
    pub(super) path: Path,
}

/// How a walk proceeds from step to step.
#[derive(Clone, Copy)]
pub(super) enum Path {
    /// Head after head; in each, from this query block to the last one and around to it again.
    Around(Reg<U32>),
    /// One query block for all `heads` query heads, then the query block `step` (1 or -1) further.
    Step { step: Reg<U32>, heads: Reg<U32> },
    /// One query block for all `heads` query heads, then the next entry of a list.
    Listed { listed: Listed, heads: Reg<U32> },
    /// Steps are read from shared memory: the producer, which walks the list, leaves them there.
    PublishedSteps,
}

impl TileScheduler {
    /// Returns the shared memory that a thread block needs to look up its tile.
    pub(crate) const fn shared_bytes(batch: Batch) -> u32 {
        match batch {
            Batch::Equal => 0,
            _ => Ragged::BYTES,
        }
    }

    pub(crate) fn parameters(k: &mut Builder, pass: &BackwardPass) -> Self {
        let sequences = match pass.batch {
            Batch::Equal => Sequences::Equal {
                lengths: [Number::QueryLength.read(k), Number::KeyLength.read(k)],
                key_blocks: DivisorRegisters::parameters(k, Number::KeyBlocks),
            },
            _ => Sequences::Ragged(Ragged::parameters(k, pass)),
        };
        TileScheduler {
            query_block: pass.query_block,
            key_block: pass.key_block,
            sequences,
            key_heads: DivisorRegisters::parameters(k, Number::KeyHeads),
            group: Number::GroupSize.read(k),
            visibility: Visibility::parameters(k, pass.rules.mask),
            lists: pass.takes_block_lists().then(|| BlockLists::parameters(k)),
            order: pass.takes_heads_together().then(|| Order::parameters(k)),
            takes_turns: pass.deterministic,
            posted: None,
            split: None,
            waves: None,
        }
    }

    /// Returns the number of this block's current tile, or of its part of a split tile.
    pub(super) fn number(&self, k: &mut Builder) -> Reg<U32> {
        match &self.posted {
            None => k.block_index(),
            Some(posted) => posted.read(k),
        }
    }

    /// Looks up the tile of this block and leaves it in shared memory for all other threads; called
    /// by one thread. Equal lengths need no lookup: each thread computes its tile.
    pub(crate) fn post(&self, k: &mut Builder) {
        if let Sequences::Ragged(ragged) = &self.sequences {
            ragged.post(k, &self.key_heads, &self.visibility);
        }
    }

    /// Emits `body` under the condition that there is a tile for this block.
    pub(crate) fn if_tile(&self, k: &mut Builder, body: impl FnOnce(&mut Builder)) {
        match &self.sequences {
            Sequences::Equal { .. } => body(k),
            Sequences::Ragged(ragged) => {
                let there_is = ragged.has_tile(k);
                k.if_(there_is, body);
            }
        }
    }

    /// Returns the numbers of queries and keys of the tile's sequence.
    pub(crate) fn lengths(&self, k: &mut Builder) -> [Reg<U32>; 2] {
        match &self.sequences {
            Sequences::Equal { lengths, .. } => *lengths,
            Sequences::Ragged(ragged) => ragged.lengths(k),
        }
    }

    /// Returns, for a ragged batch, the rows at which the queries and keys of the tile's sequence
    /// begin in their tensors.
    pub(crate) fn starts(&self, k: &mut Builder) -> Option<[Reg<U32>; 2]> {
        match &self.sequences {
            Sequences::Equal { .. } => None,
            Sequences::Ragged(ragged) => Some(ragged.starts(k)),
        }
    }

    /// Returns the tile's sequence. In a ragged batch it is read again rather than kept in a
    /// register.
    pub(crate) fn batch(&self, k: &mut Builder, tile: &Tile) -> Reg<U32> {
        match &self.sequences {
            Sequences::Equal { .. } => tile.batch,
            Sequences::Ragged(ragged) => ragged.sequence(k),
        }
    }

    /// Returns this block's turn to add to `dQ`, in the deterministic mode.
    pub(super) fn turn(&self, k: &mut Builder) -> Option<Turn> {
        if !self.takes_turns {
            return None;
        }
        match &self.sequences {
            Sequences::Equal { key_blocks, .. } => {
                let number = self.number(k);
                Some(self.order.as_ref()?.turn(k, number, key_blocks))
            }
            Sequences::Ragged(ragged) => ragged.turn(k),
        }
    }

    /// Returns the key head of a tile, counted over all sequences, and its key block.
    fn key_block(
        &self,
        k: &mut Builder,
        number: Reg<U32>,
        key_blocks: &DivisorRegisters,
    ) -> (Reg<U32>, Reg<U32>) {
        let (tile, _) = self.tile_and_part(k, number);
        self.key_block_of(k, tile, key_blocks)
    }

    /// Returns the tile that a number stands for, and which part of it.
    pub(super) fn tile_and_part(
        &self,
        k: &mut Builder,
        number: Reg<U32>,
    ) -> (Reg<U32>, Value<U32>) {
        match &self.split {
            None => (number, 0.into()),
            Some(split) => {
                let (tile, part) = split.locate(k, number);
                (tile, part.into())
            }
        }
    }

    fn key_block_of(
        &self,
        k: &mut Builder,
        tile: Reg<U32>,
        key_blocks: &DivisorRegisters,
    ) -> (Reg<U32>, Reg<U32>) {
        if let Some(order) = &self.order {
            let Turn { head, key_block, .. } = order.turn(k, tile, key_blocks);
            return (head, key_block);
        }
        key_blocks.divide(k, tile)
    }

    /// Returns the number of tiles of a ragged batch; the grid may have more blocks.
    pub(super) fn ragged_tiles(&self, k: &mut Builder) -> Reg<U32> {
        match &self.sequences {
            Sequences::Equal { .. } => unreachable!("the host knows the tiles of equal lengths"),
            Sequences::Ragged(ragged) => ragged.schedule.tiles(k, &self.key_heads),
        }
    }

    /// Returns a tile's share of the query blocks of its key head.
    pub(super) fn share(&self, k: &mut Builder, tile: Reg<U32>) -> Share {
        let key_blocks = match &self.sequences {
            Sequences::Equal { key_blocks, .. } => key_blocks,
            Sequences::Ragged(ragged) => return ragged.schedule.share(k, &self.key_heads, tile),
        };
        let (head, key_block) = self.key_block_of(k, tile, key_blocks);
        let blocks = k.eval(self.query_blocks() * self.group);
        let up = k.eval(blocks + key_blocks.number - 1);
        let (each, _) = key_blocks.divide(k, up);
        let first = k.eval((key_block * each).minimum(blocks));
        let end = k.eval((first + each).minimum(blocks));
        let begin = k.eval(head * blocks);
        let [first, end] = [first, end].map(|it| k.eval(begin + it));
        Share { counters: head, tiles: key_blocks.number, first, end, rows: None }
    }

    /// Returns the first key of this block's tile.
    pub(crate) fn first_key(&self, k: &mut Builder) -> Reg<U32> {
        match &self.sequences {
            Sequences::Equal { key_blocks, .. } => {
                let number = self.number(k);
                let (_, key_block) = self.key_block(k, number, key_blocks);
                k.eval(key_block * self.key_block)
            }
            Sequences::Ragged(ragged) => ragged.first_key(k),
        }
    }

    /// Returns the tile of this block. Blocks that run at the same time work on few heads, so that
    /// the `dQ` sums of those stay in L2; under a causal mask the longest walks of these heads come
    /// first.
    pub(crate) fn find(&self, k: &mut Builder) -> Tile {
        match &self.sequences {
            Sequences::Equal { .. } => {
                let number = self.number(k);
                self.find_numbered(k, number)
            }
            Sequences::Ragged(ragged) => {
                let ([batch, key_head, first_key], slice) = ragged.find(k);
                let query_blocks = ragged.seen_by(k);
                Tile {
                    batch,
                    key_head,
                    first_key,
                    query_blocks,
                    slice: Some(slice),
                    steps: None,
                    direction: None,
                }
            }
        }
    }

    /// Returns the tile with this number, or the part of a tile.
    pub(super) fn find_numbered(&self, k: &mut Builder, number: Reg<U32>) -> Tile {
        match &self.sequences {
            Sequences::Equal { key_blocks, .. } => {
                let (head_and_batch, key_block) = self.key_block(k, number, key_blocks);
                let (batch, key_head) = self.key_heads.divide(k, head_and_batch);
                let first_key = k.eval(key_block * self.key_block);
                let query_blocks = self.query_blocks_of(k, first_key);
                let steps = self.split.as_ref().map(|split| {
                    let QueryBlocks { first, end, .. } = query_blocks;
                    let steps = k.eval((end - first) * self.group);
                    split.steps(k, number, steps)
                });
                let direction = self.waves.as_ref().map(|waves| waves.direction(k, number));
                Tile { batch, key_head, first_key, query_blocks, slice: None, steps, direction }
            }
            Sequences::Ragged(_) => self.find(k),
        }
    }

    /// Returns the query blocks that see some key of a key block.
    pub(super) fn query_blocks_of(&self, k: &mut Builder, first_key: Reg<U32>) -> QueryBlocks {
        let [query_length, key_length] = self.lengths(k);
        let keys = KeyTile {
            first_key,
            keys: self.key_block,
            query_block: self.query_block,
            query_length,
            key_length,
        };
        self.visibility.query_blocks(k, &keys)
    }

    /// Returns whether some query of a query block does not see all keys of the tile.
    pub(crate) fn needs_mask(&self, k: &mut Builder, tile: &Tile, block: Reg<U32>) -> Value<Pred> {
        match &self.sequences {
            Sequences::Ragged(ragged) if ragged.reloads_query_blocks => {
                ragged.seen_by(k).needs_mask(block)
            }
            _ => tile.query_blocks.needs_mask(block),
        }
    }

    /// Returns the number of query blocks of a head in the workspace.
    fn query_blocks(&self) -> Value<U32> {
        match &self.sequences {
            Sequences::Equal { lengths, .. } => {
                (lengths[0] + (self.query_block - 1)) / self.query_block
            }
            Sequences::Ragged(ragged) => ragged.schedule.query_blocks.into(),
        }
    }

    /// Returns the walk of a tile, at its first step.
    pub(crate) fn walk(&self, k: &mut Builder, tile: &Tile) -> Walk {
        if let Some(lists) = &self.lists {
            return self.listed_walk(k, tile, lists);
        }
        let QueryBlocks { first, end, .. } = tile.query_blocks;
        let blocks = k.eval(self.query_blocks());
        let head = k.variable(tile.key_head * self.group);
        let heads = self.key_heads.number * self.group;
        let direction = self.turn(k).map(|turn| turn.direction).or(tile.direction);
        let (start, path) = match direction {
            Some(direction) => {
                let path = Path::Step { step: direction.step(k), heads: self.group };
                (direction.start(k, &tile.query_blocks), path)
            }
            None => {
                // Blocks of one head that start together start at different query blocks, which
                // spreads their loads and `dQ` additions over the L2.
                let start = k.variable(first);
                k.if_(first.less(end), |k| {
                    let ahead = tile.first_key / self.query_block % (end - first);
                    k.set(start, first + ahead);
                });
                (start, Path::Around(start))
            }
        };
        let mut block = start;
        let mut left = (end - first) * self.group;
        if let Some([skipped, count]) = tile.steps {
            let of_head = k.eval((end - first).maximum(1));
            let heads = k.eval(skipped / of_head);
            k.set(head, head + heads);
            let ahead = k.eval(start + skipped - heads * of_head);
            block = k.eval(ahead.less(end).select::<U32>(ahead, ahead - of_head));
            left = count.into();
        }
        Walk {
            head,
            block: k.variable(block),
            left: k.variable(left),
            number: k.variable(match &tile.slice {
                None => (tile.batch * heads + head) * blocks + block,
                Some(slice) => head * blocks + slice.first_block + block,
            }),
            path,
        }
    }

    /// Returns the walk of a tile by its list of query blocks, at its first step.
    fn listed_walk(&self, k: &mut Builder, tile: &Tile, lists: &BlockLists) -> Walk {
        let key_block = k.eval(tile.first_key / self.key_block);
        let ahead = k.eval(tile.first_key / self.query_block);
        let of_tile = [tile.batch, tile.key_head, key_block];
        let listed = Listed::begin(k, lists, of_tile, ahead, self.takes_turns);
        let walk = Walk {
            head: k.variable(tile.key_head * self.group),
            block: k.variable(listed.block()),
            left: k.variable(listed.count() * self.group),
            number: k.variable(0),
            path: Path::Listed { listed, heads: self.group },
        };
        walk.find_number(k, self, tile);
        walk
    }

    /// Returns the walk for consumers. Where the producer walks a list, the consumers read each
    /// step from shared memory instead.
    pub(super) fn follow(&self, k: &mut Builder, tile: &Tile) -> Walk {
        let walk = self.walk(k, tile);
        match walk.path {
            Path::Listed { .. } => Walk { path: Path::PublishedSteps, ..walk },
            _ => walk,
        }
    }

    /// Emits a loop that runs `body` at every step of a walk.
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

impl Tile {
    /// Returns the TMA coordinates of a query row of a head, without the column.
    pub(super) fn query_corner(
        &self,
        k: &mut Builder,
        row: Reg<U32>,
        head: Reg<U32>,
    ) -> Vec<Value<S32>> {
        match &self.slice {
            None => [row, head, self.batch].map(|it| it.reinterpret()).to_vec(),
            Some(slice) => slice.query_corner(k, [row, head]),
        }
    }

    /// Returns the TMA coordinate of a key row.
    pub(super) fn key_row(&self, row: impl Into<Value<U32>>) -> Value<S32> {
        match &self.slice {
            None => row.into().reinterpret(),
            Some(slice) => slice.key_row(row),
        }
    }

    /// Returns the TMA coordinates after that of the key row, for the tile's key head.
    pub(super) fn key_rest(&self) -> Vec<Value<S32>> {
        match &self.slice {
            None => [self.key_head, self.batch].map(|it| it.reinterpret()).to_vec(),
            Some(slice) => slice.key_rest(self.key_head),
        }
    }
}

impl Walk {
    /// Returns a copy of the walk, one step further.
    pub(crate) fn ahead(&self, k: &mut Builder, scheduler: &TileScheduler, tile: &Tile) -> Walk {
        let Walk { head, block, left, number, path } = *self;
        let path = match path {
            Path::Listed { listed, heads } => Path::Listed { listed: listed.copied(k), heads },
            other => other,
        };
        let [head, block, left, number] = [head, block, left, number].map(|it| k.variable(it));
        let next = Walk { head, block, left, number, path };
        next.advance(k, scheduler, tile);
        next
    }

    /// Advances to the next step.
    pub(crate) fn advance(&self, k: &mut Builder, scheduler: &TileScheduler, tile: &Tile) {
        self.advance_block(k, tile);
        self.advance_number(k, scheduler, tile);
    }

    /// Advances head and query block to the next step. `number` keeps the value of the step before
    /// until `advance_number`.
    pub(crate) fn advance_block(&self, k: &mut Builder, tile: &Tile) {
        let QueryBlocks { first, end, .. } = tile.query_blocks;
        match self.path {
            Path::Around(start) => {
                let next = k.eval(self.block + 1);
                let next = k.eval(next.equals(end).select::<U32>(first, next));
                let around = next.equals(start);
                k.set(self.head, around.select::<U32>(self.head + 1, self.head));
                k.set(self.block, next);
            }
            Path::Step { step, heads } => {
                let first_head = k.eval(tile.key_head * heads);
                let next = k.eval(self.head + 1);
                let around = k.eval(next.equals(first_head + heads));
                k.set(self.head, around.select::<U32>(first_head, next));
                k.set(self.block, around.select::<U32>(self.block + step, self.block));
            }
            Path::Listed { listed, heads } => {
                let first_head = k.eval(tile.key_head * heads);
                let next = k.eval(self.head + 1);
                let around = k.eval(next.equals(first_head + heads));
                k.set(self.head, around.select::<U32>(first_head, next));
                k.if_(around, |k| listed.advance(k));
                k.set(self.block, listed.block());
            }
            Path::PublishedSteps => {}
        }
        k.set(self.left, self.left - 1);
    }

    /// Updates `number` after `advance_block`.
    pub(crate) fn advance_number(&self, k: &mut Builder, scheduler: &TileScheduler, tile: &Tile) {
        let QueryBlocks { first, end, .. } = tile.query_blocks;
        match self.path {
            Path::Around(start) => {
                let back = k.eval(self.block.equals(first));
                let step = k.eval(back.select::<U32>(first + 1 - end, 1u32));
                k.set(self.number, self.number + step);
                k.if_(self.block.equals(start), |k| {
                    k.set(self.number, self.number + scheduler.query_blocks());
                });
            }
            Path::Step { step, heads } => {
                let blocks = k.eval(scheduler.query_blocks());
                k.set(self.number, self.number + blocks);
                // After the last head of the group: back to the first one, and on to the next query
                // block.
                k.if_(self.head.equals(tile.key_head * heads), |k| {
                    k.set(self.number, self.number + step - heads * blocks);
                });
            }
            Path::Listed { .. } | Path::PublishedSteps => self.find_number(k, scheduler, tile),
        }
    }

    /// Computes `number` from the current head and query block.
    pub(super) fn find_number(&self, k: &mut Builder, scheduler: &TileScheduler, tile: &Tile) {
        let heads = scheduler.key_heads.number * scheduler.group;
        let blocks = k.eval(scheduler.query_blocks());
        k.set(self.number, (tile.batch * heads + self.head) * blocks + self.block);
    }

    /// Returns the current entry of the list, if the walk follows one.
    pub(super) fn entry(&self) -> Option<Reg<U32>> {
        match self.path {
            Path::Listed { listed, .. } => Some(listed.entry),
            _ => None,
        }
    }

    /// Returns whether the current query block needs the mask function evaluated, if a list says
    /// so.
    pub(crate) fn needs_function(&self) -> Option<Value<Pred>> {
        self.entry().map(needs_function)
    }
}
