//! The static tile scheduler, for batches of equal lengths: which tiles a thread block computes,
//! and in which order.
//!
//! A tile is a range of query rows of one head. Tiles are numbered with the row tiles fastest, so
//! that thread blocks that run at the same time share the keys and values of few heads in L2.
//! Without a mask all tiles are alike, and thread block `b` of `g` computes tiles `b`, `b + g`, ...
//! With a mask tiles differ in length, and each thread block has a list of tiles ([`TileLists`]),
//! read one entry ahead. With stream-K, list entries may be parts of tiles: a range of a tile's key
//! blocks.
//!
//! [`TileLists`]: super::TileLists

use ptx::{Builder, Expression, F32, GlobalAddress, Pred, Reg, S32, U32, U64, Value};

use super::producer::Loader;
use super::scheduler::{
    ConsumerScheduler, ProducerScheduler, TileCoordinates, TileScheduler, first_block, set_each,
};
use super::stream_k::PartWord;
use super::walk::{TileBlocks, Walks, WholeWalk};
use super::{Forward, TileLists};
use crate::attention::descale::{Descales, Product};
use crate::attention::function::lists::{BlockList, BlockLists, block_of, count, entry};
use crate::attention::rows::Sinks;
use crate::attention::scores::Slopes;
use crate::attention::visibility::{Blocks, Masked, RowTile, Visibility};
use crate::divisor::DivisorRegisters;
use crate::parameter::{Number, Workspace};

/// The static scheduler's launch parameters, in registers.
pub(super) struct StaticScheduler {
    query_rows: u32,
    key_block: u32,
    query_length: Reg<U32>,
    key_length: Reg<U32>,
    order: Order,
    /// Whether list entries may be parts of tiles.
    stream_k: bool,
    /// Whether the place in a list is kept as a word index ([`Next::Word`]) instead of an address.
    lists_by_words: bool,
    /// Query tiles per head.
    per_head: DivisorRegisters,
    heads: DivisorRegisters,
    group: DivisorRegisters,
    visibility: Visibility,
    walks: Option<Walks>,
    /// The lists of key blocks, with a mask function.
    lists: Option<BlockLists>,
    slopes: Option<Slopes>,
    sinks: Option<Sinks>,
    descales: Option<Descales>,
    scale_log2: Reg<F32>,
}

/// How a thread block goes from one tile to the next.
enum Order {
    /// In steps of the grid size, up to the total number of tiles.
    Strided { tiles: Reg<U32>, blocks: Reg<U32> },
    /// By the tile lists at this address.
    Listed(Reg<GlobalAddress>),
}

/// The place of the entry of a tile list that was read ahead.
#[derive(Clone, Copy)]
enum Next {
    /// Its address.
    Address(Reg<GlobalAddress>),
    /// Its index among the words of the lists, which takes one register less. On an H200 that gains
    /// 2.7 % with stream-K at head dim 64, where registers are scarce; under a causal mask it costs
    /// 1 to 2 % at that head dim.
    Word(Reg<U32>),
}

/// The registers of a thread block's tile, overwritten from tile to tile.
pub(super) struct Tile {
    number: Reg<U32>,
    /// With lists, the place of the next entry, and that entry.
    ahead: Option<(Next, Reg<U32>)>,
    key_head: Reg<U32>,
    /// One past the last key block that some row of the tile sees; at least 1, so that a tile whose
    /// rows see nothing is stored too. With a list of key blocks, the number of its entries.
    blocks: Reg<U32>,
    current: Current,
}

/// Where a tile's keys and values are.
pub(super) struct Rows {
    key_head: Reg<U32>,
    batch: Reg<U32>,
    /// See [`Current`].
    first_block: Option<Reg<U32>>,
    list: Option<BlockList>,
}

/// What is still needed of the tile being computed when `Tile` has already gone on to the next.
pub(super) struct Current {
    first_row: Reg<U32>,
    /// The first key block that some row does not see whole; it and later ones need the mask.
    first_masked: Reg<U32>,
    head: Reg<U32>,
    batch: Reg<U32>,
    /// The first key block, with a window or with stream-K; with a list of key blocks, its first
    /// place, 0.
    first_block: Option<Reg<U32>>,
    /// With a window, the first key block that the window's left edge cuts for no row; blocks
    /// before it need the mask too.
    whole_from: Option<Reg<U32>>,
    list: Option<BlockList>,
    /// With stream-K, whether the tile is stored or left as a partial tile ([`PartWord`]).
    part: Option<Reg<U32>>,
}

impl Current {
    /// Returns all registers but the list.
    fn words(&self) -> impl Iterator<Item = Reg<U32>> {
        let Current { first_row, first_masked, head, batch, first_block, whole_from, part, .. } =
            *self;
        let optional = [first_block, whole_from, part].into_iter().flatten();
        [first_row, first_masked, head, batch].into_iter().chain(optional)
    }
}

impl StaticScheduler {
    pub(super) fn parameters(
        k: &mut Builder,
        forward: &Forward,
        query_length: Reg<U32>,
        key_length: Reg<U32>,
        scale_log2: Reg<F32>,
    ) -> Self {
        let rules = forward.rules;
        StaticScheduler {
            query_rows: forward.query_rows(),
            key_block: forward.key_block,
            query_length,
            key_length,
            stream_k: forward.stream_k,
            lists_by_words: forward.stream_k && forward.value_head_dim <= 64,
            order: if forward.takes_tile_lists() {
                Order::Listed(Workspace::TileLists.address(k))
            } else {
                let tiles = Number::Tiles.read(k);
                let blocks = k.special(ptx::SpecialRegister::GridExtent(ptx::Axis::X));
                Order::Strided { tiles, blocks }
            },
            per_head: DivisorRegisters::parameters(k, Number::TilesPerHead),
            heads: DivisorRegisters::parameters(k, Number::QueryHeads),
            group: DivisorRegisters::parameters(k, Number::GroupSize),
            visibility: Visibility::parameters(k, rules.mask),
            walks: Walks::new(forward, forward.index_from_one_lane()),
            lists: forward.takes_block_lists().then(|| BlockLists::parameters(k)),
            slopes: rules.alibi.then(|| Slopes::parameters(k)),
            sinks: rules.sinks.then(|| Sinks::parameters(k)),
            descales: forward.is_fp8().then(|| Descales::parameters(k)),
            scale_log2,
        }
    }

    /// Computes a tile's coordinates and key blocks from its number.
    fn locate(&self, k: &mut Builder, tile: &Tile) {
        let end = self.find_part(k, tile);
        let (head_and_batch, row_tile) = self.per_head.divide(k, tile.number);
        let (batch, head) = self.heads.divide(k, head_and_batch);
        let (key_head, _) = self.group.divide(k, head);
        let current = &tile.current;
        k.set(current.batch, batch);
        k.set(current.head, head);
        k.set(tile.key_head, key_head);
        k.set(current.first_row, row_tile * self.query_rows);
        self.find_blocks(k, tile);
        if let Some(end) = end {
            k.set(tile.blocks, tile.blocks.minimum(end));
        }
        if let (Some(lists), Some(list)) = (&self.lists, current.list) {
            // After the last tile there is no list to read.
            k.if_(self.has_tile(tile), |k| {
                let found = lists.of(k, [batch, head, row_tile]);
                k.set(list, found);
                let blocks = count(k, list);
                k.set(tile.blocks, blocks.maximum(1));
            });
            if let Some(first) = current.first_block {
                k.set(first, 0u32);
            }
        }
    }

    /// With stream-K, resolves a list entry that is a part of a tile: sets the tile's number, its
    /// first key block and its [`PartWord`], and returns one past the last key block of the part.
    /// For a whole tile that is `u32::MAX`.
    fn find_part(&self, k: &mut Builder, tile: &Tile) -> Option<Reg<U32>> {
        let (Order::Listed(lists), Some(first), Some(part)) =
            (&self.order, tile.current.first_block, tile.current.part)
        else {
            return None;
        };
        k.set(first, 0u32);
        k.set(part, PartWord::WHOLE);
        let end = k.variable(u32::MAX);
        let is_part = tile.number.at_least(TileLists::PART) & tile.number.differs(TileLists::END);
        k.if_(is_part, |k| {
            let word = tile.number - TileLists::PART;
            let at = k.eval(*lists + word.convert::<U64>() * 4);
            let words = k.load_vector::<U32, _, 4>(at, Default::default());
            set_each(k, [tile.number, first, end, part], words);
        });
        Some(end)
    }

    /// Returns the rows of the tile that begins at `first_row`.
    fn rows_from(&self, first_row: Reg<U32>) -> RowTile {
        RowTile {
            first_row,
            rows: self.query_rows,
            query_length: self.query_length,
            key_length: self.key_length,
        }
    }

    /// Computes which key blocks the tile needs, and which of them need the mask.
    fn find_blocks(&self, k: &mut Builder, tile: &Tile) {
        let Current { first_row, first_block, first_masked, whole_from, .. } = tile.current;
        let blocks =
            Blocks { size: self.key_block, least: 1, first: first_block, end: tile.blocks };
        let rows = self.rows_from(first_row);
        let Masked { from, before } = self.visibility.find_blocks(k, &rows, blocks);
        k.set(first_masked, from);
        if let (Some(whole_from), Some(before)) = (whole_from, before) {
            k.set(whole_from, before);
        }
    }

    /// Returns whether a tile may begin at a later key block than the first.
    fn begins_later(&self) -> bool {
        self.visibility.is_window() || self.stream_k
    }
}

impl Next {
    fn advance(self, k: &mut Builder) {
        match self {
            Next::Address(next) => k.set(next, next + 4),
            Next::Word(next) => k.set(next, next + 1),
        }
    }

    fn entry(self, k: &mut Builder, lists: Reg<GlobalAddress>) -> Reg<U32> {
        match self {
            Next::Address(next) => k.load(next),
            Next::Word(next) => word(k, lists, next),
        }
    }
}

/// Loads a word of the tile lists.
fn word(k: &mut Builder, lists: Reg<GlobalAddress>, index: Reg<U32>) -> Reg<U32> {
    k.load(lists + index.convert::<U64>() * 4)
}

impl TileScheduler for StaticScheduler {
    type Tile = Tile;

    fn first_tile(&self, k: &mut Builder) -> Tile {
        let block = k.block_index();
        let (number, ahead) = match &self.order {
            Order::Strided { .. } => (k.variable(block), None),
            Order::Listed(lists) => {
                let start = word(k, *lists, block);
                let (number, next) = if self.lists_by_words {
                    (word(k, *lists, start), Next::Word(k.variable(start + 1)))
                } else {
                    let first = k.eval(*lists + start.convert::<U64>() * 4);
                    (k.load::<U32, _>(first), Next::Address(k.variable(first + 4)))
                };
                let entry = next.entry(k, *lists);
                (number, Some((next, entry)))
            }
        };
        let [first_row, head, key_head, batch] = [(); 4].map(|()| k.register());
        let first_block = self.begins_later().then(|| k.register());
        let list = self.lists.map(|lists| k.variable(lists.address()));
        let [blocks, first_masked] = [(); 2].map(|()| k.register());
        let whole_from = self.visibility.is_window().then(|| k.register());
        let part = self.stream_k.then(|| k.register());
        let current =
            Current { first_row, first_masked, head, batch, first_block, whole_from, list, part };
        let tile = Tile { number, ahead, key_head, blocks, current };
        self.locate(k, &tile);
        tile
    }

    fn next_tile(&self, k: &mut Builder, tile: &Tile) {
        match (&self.order, tile.ahead) {
            (Order::Listed(lists), Some((next, entry))) => {
                k.set(tile.number, entry);
                // Do not read past the end of the list.
                k.if_(entry.differs(TileLists::END), |k| {
                    next.advance(k);
                    let further = next.entry(k, *lists);
                    k.set(entry, further);
                });
            }
            (Order::Strided { blocks, .. }, _) => k.set(tile.number, tile.number + *blocks),
            (Order::Listed(_), None) => unreachable!("lists are read ahead"),
        }
        self.locate(k, tile);
    }

    fn has_tile(&self, tile: &Tile) -> Value<Pred> {
        match &self.order {
            Order::Strided { tiles, .. } => tile.number.less(*tiles),
            Order::Listed(_) => tile.number.differs(TileLists::END),
        }
    }

    fn last_block(&self, tile: &Tile) -> Value<U32> {
        tile.blocks - 1
    }
}

impl ProducerScheduler for StaticScheduler {
    type Rows = Rows;

    fn rows(&self, tile: &Tile) -> Rows {
        let Current { batch, first_block, list, .. } = tile.current;
        Rows { key_head: tile.key_head, batch, first_block, list }
    }

    fn hold(&self, k: &mut Builder, tile: &Tile) -> Rows {
        let Rows { key_head, batch, first_block, list } = self.rows(tile);
        Rows {
            key_head: k.variable(key_head),
            batch: k.variable(batch),
            first_block: first_block.map(|first| k.variable(first)),
            list: list.map(|list| k.variable(list)),
        }
    }

    fn key_block(&self, k: &mut Builder, rows: &Rows, place: Reg<U32>) -> Reg<U32> {
        let Some(list) = rows.list else { return place };
        let entry = entry(k, list, place.into());
        k.eval(block_of(entry))
    }

    fn take(&self, k: &mut Builder, held: &Rows, tile: &Tile) {
        let new = self.rows(tile);
        set_each(k, [held.key_head, held.batch], [new.key_head, new.batch]);
        set_each(k, held.first_block, new.first_block);
        set_each(k, held.list, new.list);
    }

    fn is_first_block(&self, held: &Rows, block: Reg<U32>) -> Value<Pred> {
        block.equals(first_block(held.first_block))
    }

    fn load(&self, k: &mut Builder, loader: &Loader<'_>, rows: &Rows, row: Reg<U32>) {
        loader.load(k, &corner(row, rows.key_head, rows.batch));
    }

    fn load_queries(&self, k: &mut Builder, loader: &Loader<'_>, tile: &Tile) {
        let Current { first_row, head, batch, .. } = tile.current;
        loader.load(k, &corner(first_row, head, batch));
    }

    fn finish(&self, _: &mut Builder) {}
}

impl ConsumerScheduler for StaticScheduler {
    type Current = Current;

    fn registers<'a>(&self, tile: &'a Tile) -> &'a Current {
        &tile.current
    }

    fn hold(&self, k: &mut Builder, tile: &Tile) -> Current {
        let new = &tile.current;
        Current {
            first_row: k.variable(new.first_row),
            first_masked: k.variable(new.first_masked),
            head: k.variable(new.head),
            batch: k.variable(new.batch),
            first_block: new.first_block.map(|first| k.variable(first)),
            whole_from: new.whole_from.map(|whole_from| k.variable(whole_from)),
            list: new.list.map(|list| k.variable(list)),
            part: new.part.map(|part| k.variable(part)),
        }
    }

    fn take(&self, k: &mut Builder, current: &Current, tile: &Tile) {
        set_each(k, current.words(), tile.current.words());
        set_each(k, current.list, tile.current.list);
    }

    fn narrow(&self, k: &mut Builder, tile: &Tile, group: Reg<U32>) {
        let Some(walks) = &self.walks else { return };
        let lengths = [self.query_length, self.key_length];
        let Current { first_row, first_block, first_masked, whole_from, .. } = tile.current;
        let rows = Walks::rows_of(k, group, first_row, lengths);
        let blocks = TileBlocks {
            first: first_block,
            end: tile.blocks,
            masked_from: first_masked,
            whole_from,
        };
        walks.narrow(k, &self.visibility, &rows, &blocks);
    }

    fn whole_walk(&self, k: &mut Builder, current: &Current) -> Option<WholeWalk> {
        self.walks?;
        let first = self.visibility.is_window().then(|| k.register());
        let end = k.register();
        let blocks = Blocks { size: self.key_block, least: 1, first, end };
        self.visibility.find_blocks(k, &self.rows_from(current.first_row), blocks);
        Some(WholeWalk { first, last: k.eval(end - 1) })
    }

    fn entry(
        &self,
        k: &mut Builder,
        current: &Current,
        place: impl FnOnce() -> Value<U32>,
    ) -> Option<Reg<U32>> {
        current.list.map(|list| entry(k, list, place()))
    }

    fn is_first_block(&self, current: &Current, block: Reg<U32>) -> Value<Pred> {
        block.equals(first_block(current.first_block))
    }

    fn needs_mask(&self, current: &Current, block: Reg<U32>) -> Value<Pred> {
        let behind = block.at_least(current.first_masked);
        match current.whole_from {
            Some(whole_from) => behind | block.less(whole_from),
            None => behind,
        }
    }

    fn coordinates(&self, _: &mut Builder, current: &Current) -> TileCoordinates {
        TileCoordinates {
            first_row: current.first_row,
            query_length: self.query_length,
            key_length: self.key_length,
            head: current.head,
        }
    }

    fn sequence(&self, _: &mut Builder, current: &Current) -> Reg<U32> {
        current.batch
    }

    fn visibility(&self) -> &Visibility {
        &self.visibility
    }

    fn first_log_sum(
        &self,
        k: &mut Builder,
        current: &Current,
        coordinates: &TileCoordinates,
    ) -> Value<U64> {
        let head = k.eval(current.batch * self.heads.number + coordinates.head);
        head.convert::<U64>() * self.query_length.convert::<U64>()
    }

    fn output_corner(
        &self,
        _: &mut Builder,
        current: &Current,
        coordinates: &TileCoordinates,
        row: Reg<U32>,
    ) -> Vec<Value<S32>> {
        [row, coordinates.head, current.batch].map(|r| r.reinterpret::<S32>()).to_vec()
    }

    fn slope(&self, k: &mut Builder, current: &Current) -> Option<Reg<F32>> {
        // Loaded anew for each key block: there are few slopes, and they stay in L1.
        let slopes = self.slopes?;
        Some(slopes.unscaled(k, current.batch, current.head, self.scale_log2))
    }

    fn descale(&self, k: &mut Builder, current: &Current, product: Product) -> Reg<F32> {
        let Some(descales) = &self.descales else { return k.eval(1.0) };
        let (key_head, _) = self.group.divide(k, current.head);
        descales.of(k, product, current.batch, key_head)
    }

    fn part(&self, current: &Current) -> Option<Reg<U32>> {
        current.part
    }

    fn sink(&self, k: &mut Builder, current: &Current) -> Option<Reg<F32>> {
        self.sinks.map(|sinks| sinks.of(k, current.head))
    }
}

fn corner(row: Reg<U32>, head: Reg<U32>, batch: Reg<U32>) -> [Value<S32>; 4] {
    let [row, head, batch] = [row, head, batch].map(|r| r.reinterpret::<S32>());
    [0.into(), row, head, batch]
}
