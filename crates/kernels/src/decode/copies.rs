//! Copies of key and value tiles into shared memory by `cp.async`, several tiles ahead.
//!
//! Each warp has its own ring of stages and refills a stage as soon as it has read it. The lanes of
//! a warp are ordered by warp barriers (`bar.warp.sync`); warps do not wait for each other.

use ptx::{
    Builder, ChunkPlace, Expression, GlobalAddress, Reg, RowCopies, Select, SharedAddress, U32, U64,
};

use super::look_up::{LookUp, TilePlace};
use super::scales::{Scaling, TokenScales};
use super::schedule::Cursor;
use super::{Decode, Numbers};
use crate::attention::sequences::Places;
use crate::parameter::Tensor;
use crate::strides::Strided;

/// Rows of a tile that a warp copies at a time, eight lanes to each.
const ROWS: u32 = 4;

/// The key and value tensors, as launch parameters.
pub(super) struct Copies {
    keys: Strided,
    values: Strided,
}

impl Copies {
    pub(super) fn parameters(k: &mut Builder) -> Self {
        Copies {
            keys: Strided::parameters(k, Tensor::Key),
            values: Strided::parameters(k, Tensor::Value),
        }
    }

    /// Reserves the shared memory of all warps' rings and prepares this warp's.
    pub(super) fn prepare<'a>(
        self,
        k: &mut Builder,
        decode: &'a Decode,
        places: &'a Places,
        numbers: &Numbers,
        scaling: &Scaling,
    ) -> Ring<'a> {
        let (keys, values) = (decode.key_layout(), decode.value_layout());
        let bytes = keys.bytes() + values.bytes();
        let offset = k.shared("tiles", decode.warps * decode.stages * bytes, keys.alignment());
        let base = k.shared_address(offset);
        let base = k.eval(base + numbers.warp * (decode.stages * bytes));
        let gather = Gather::new(k, decode, numbers, self);
        gather.clear_padding(k, decode, base, bytes);
        let scales = TokenScales::new(k, decode, numbers, scaling);
        let look_up = LookUp::new(k, decode, places, numbers.lane);
        let stage = k.variable(0);
        Ring { decode, places, gather, scales, look_up, base, bytes, stage, warp: numbers.warp }
    }
}

/// The ring of stages of one warp.
pub(super) struct Ring<'a> {
    decode: &'a Decode,
    places: &'a Places,
    gather: Gather,
    pub(super) scales: TokenScales,
    look_up: LookUp<'a>,
    base: Reg<SharedAddress>,
    /// Bytes of a stage: a tile of keys, then one of values.
    bytes: u32,
    /// Index of the stage that is read next.
    pub(super) stage: Reg<U32>,
    warp: Reg<U32>,
}

impl Ring<'_> {
    /// Begins a sequence: issues copies of as many tiles as there are stages. Their places are looked
    /// up first, so that the loads of the block table overlap. What `request` loads arrives before the
    /// second tile.
    pub(super) fn begin(&self, k: &mut Builder, cursor: &Cursor, request: impl Fn(&mut Builder)) {
        let Decode { stages, warps, .. } = *self.decode;
        let tiles = (0..stages).map(|ahead| k.eval(self.warp + ahead * warps));
        let tiles: Vec<Reg<U32>> = tiles.collect();
        let places = self.look_up.begin(k, cursor, &tiles);
        let stage = k.variable(self.stage);
        for (index, (tile, place)) in tiles.into_iter().zip(&places).enumerate() {
            self.copy(k, cursor, tile, place, stage);
            self.next(k, stage);
            if index == 0 {
                request(k);
            }
        }
    }

    /// Issues the copies of a tile into a stage, if the tile exists, and commits them as one group.
    /// The group is empty otherwise, so that groups can be counted by [`wait`](Ring::wait).
    fn copy(
        &self,
        k: &mut Builder,
        cursor: &Cursor,
        tile: Reg<U32>,
        place: &TilePlace,
        stage: Reg<U32>,
    ) {
        let decode = self.decode;
        k.if_(tile.less(cursor.count), |k| {
            let target = k.eval(self.base + stage * self.bytes);
            let first = k.eval(cursor.first_key + tile * decode.tile_keys);
            let valid = k.eval(cursor.keys - first.minimum(cursor.keys));
            let place = place.bounded(k, self.places);
            self.gather.copy(k, decode, target, &place, valid);
            self.scales.copy(k, stage, &place, valid);
        });
        k.copy_async_commit();
    }

    /// Waits for the next tile and returns its shared address: keys, then values.
    pub(super) fn wait(&self, k: &mut Builder) -> Reg<SharedAddress> {
        k.copy_async_wait(self.decode.stages - 1);
        k.warp_sync();
        k.eval(self.base + self.stage * self.bytes)
    }

    /// Releases the current stage, which held the warp's `tile`: issues the copies of the tile that
    /// takes its place, and moves on to the next stage.
    pub(super) fn release(&self, k: &mut Builder, cursor: &Cursor, tile: Reg<U32>) {
        k.warp_sync();
        let Decode { stages, warps, .. } = *self.decode;
        let next = k.eval(tile + stages * warps);
        let place = self.look_up.next(k, cursor, next);
        self.copy(k, cursor, next, &place, self.stage);
        self.next(k, self.stage);
    }

    /// Advances a stage index around the ring.
    fn next(&self, k: &mut Builder, stage: Reg<U32>) {
        let next = k.eval(stage + 1);
        let around = k.eval(next.equals(self.decode.stages));
        k.set(stage, around.select::<U32>(0, next));
    }

    /// Returns the index of the warp that owns the ring.
    pub(super) fn warp(&self) -> Reg<U32> {
        self.warp
    }
}

/// How the lanes of a warp share the copies of a tile: eight neighbouring lanes copy one row of a
/// panel.
struct Gather {
    keys: GatherSource,
    values: GatherSource,
    /// The lane's row among the four that are copied at a time, and its 16-byte chunk.
    place: ChunkPlace,
    /// Swizzled byte offset of the lane's chunk in a tile, for the first four rows of each eight
    /// and for the other four.
    inside: [Reg<U32>; 2],
}

/// A tensor offset to the block's key head.
pub(super) struct RowSource {
    pub(super) address: Reg<GlobalAddress>,
    /// Byte strides from one batch entry or page to the next, and from one row to the next.
    entry_bytes: Reg<U64>,
    row_bytes: Reg<U64>,
}

impl RowSource {
    /// Takes a tensor whose elements have `bytes` bytes.
    pub(super) fn new(k: &mut Builder, source: &Strided, bytes: u32, head: Reg<U32>) -> Self {
        let Strided { address, strides } = source;
        RowSource {
            address: k.eval(*address + head.convert::<U64>() * strides.head * bytes),
            entry_bytes: k.eval(strides.batch * bytes),
            row_bytes: k.eval(strides.row * bytes),
        }
    }

    /// Returns the byte offset of a row of a batch entry or page.
    pub(super) fn row(&self, k: &mut Builder, entry: Reg<U32>, row: Reg<U32>) -> Reg<U64> {
        let entry = entry.convert::<U64>() * self.entry_bytes;
        k.eval(entry + row.convert::<U64>() * self.row_bytes)
    }
}

/// A tensor offset to the block's key head and the lane's chunk.
struct GatherSource {
    rows: RowSource,
    copies: RowCopies,
}

impl GatherSource {
    fn new(
        k: &mut Builder,
        copies: RowCopies,
        source: &Strided,
        head: Reg<U32>,
        place: ChunkPlace,
    ) -> Self {
        let mut rows = RowSource::new(k, source, copies.layout().element.bytes(), head);
        rows.address = k.eval(rows.address + place.source_bytes().convert::<U64>());
        GatherSource { rows, copies }
    }
}

impl Gather {
    fn new(k: &mut Builder, decode: &Decode, numbers: &Numbers, copies: Copies) -> Self {
        let place = ChunkPlace::of(k, numbers.lane);
        let inside = place.swizzled_fours(k);
        let Copies { keys, values } = copies;
        let head = numbers.key_head;
        let rows = RowCopies::new(decode.key_layout(), decode.head_dim);
        let keys = GatherSource::new(k, rows, &keys, head, place);
        let rows = RowCopies::new(decode.value_layout(), decode.value_head_dim);
        let values = GatherSource::new(k, rows, &values, head, place);
        Gather { keys, values, place, inside }
    }

    /// Zeroes the chunks beyond the tensors' columns in every stage: copies do not write them, and
    /// products read them.
    fn clear_padding(
        &self,
        k: &mut Builder,
        decode: &Decode,
        base: Reg<SharedAddress>,
        stage_bytes: u32,
    ) {
        for (source, offset) in [(&self.keys, 0), (&self.values, decode.key_layout().bytes())] {
            for chunk in source.copies.padding() {
                let zero = [0; 4].map(|zero| k.eval::<U32>(zero));
                let lane = k.lane();
                for stage in 0..decode.stages {
                    k.if_(lane.less(decode.tile_keys), |k| {
                        let tile = (base, stage * stage_bytes + offset);
                        source.copies.clear(k, tile, lane, chunk, &zero);
                    });
                }
            }
        }
        k.warp_sync();
    }

    /// Issues the copies of a tile of which the first `valid` rows exist; the others are filled
    /// with zeros.
    fn copy(
        &self,
        k: &mut Builder,
        decode: &Decode,
        target: Reg<SharedAddress>,
        place: &TilePlace,
        valid: Reg<U32>,
    ) {
        let sizes: Vec<Reg<U32>> = (0..decode.tile_keys / ROWS)
            .map(|pass| self.keys.copies.valid_bytes(k, self.place.row + ROWS * pass, valid))
            .collect();
        // Both tensors' rows before any copy: shuffles would queue up behind copies.
        let sources = [&self.keys, &self.values];
        let rows = sources.map(|source| self.rows(k, decode, source, place));
        let targets = [target, k.eval(target + decode.key_layout().bytes())];
        for ((source, target), rows) in sources.into_iter().zip(targets).zip(rows) {
            let to = self.inside.map(|inside| k.eval(target + inside));
            for (pass, (from, bytes)) in (0u32..).zip(rows.into_iter().zip(&sizes)) {
                let to = (to[pass as usize % 2], ROWS * pass);
                source.copies.copy(k, self.place, to, from, Some(*bytes));
            }
        }
    }

    /// Returns the addresses of the rows that the lane copies chunks of. Where each lane knows the
    /// address of one row, it passes that to the others by shuffles; otherwise rows are neighbours.
    fn rows(
        &self,
        k: &mut Builder,
        decode: &Decode,
        source: &GatherSource,
        place: &TilePlace,
    ) -> Vec<Reg<GlobalAddress>> {
        let (passes, source) = (decode.tile_keys / ROWS, &source.rows);
        match place {
            TilePlace::OwnRow([entry, row]) => {
                let mine = source.row(k, *entry, *row);
                let from = |pass| {
                    let index = k.eval(self.place.row + ROWS * pass);
                    let other = k.shuffle_index_wide(mine, index);
                    k.eval(source.address + other)
                };
                (0..passes).map(from).collect()
            }
            TilePlace::Runs(runs) => {
                let step = k.eval(source.row_bytes * ROWS);
                let mut rows = Vec::new();
                for [entry, row] in runs {
                    let row = k.eval(*row + self.place.row);
                    let offset = source.row(k, *entry, row);
                    let mut from = k.eval(source.address + offset);
                    for pass in 0..passes / runs.len() as u32 {
                        if pass > 0 {
                            from = k.eval(from + step);
                        }
                        rows.push(from);
                    }
                }
                rows
            }
        }
    }
}
