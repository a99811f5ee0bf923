//! Tiles of keys and values, copied some tiles ahead by `cp.async`.
//!
//! Each warp has a ring of stages of its own and refills a stage when it has
//! read it. Lanes of a warp are ordered by warp barriers; nobody else is waited for.

use ptx::{
    Builder, Choose, Element, Expression, GlobalAddress, Instruction, Reg, SharedAddress,
    TileLayout, U32, U64, Value,
};

use super::place::Places;
use super::schedule::Cursor;
use super::{Decode, Numbers};
use crate::parameter::Tensor;
use crate::strides::Strided;

/// Bytes of a panel's row, and of a chunk.
const ROW: u32 = 128;
const CHUNK: u32 = 16;

/// Rows of a tile that a warp copies at a time, eight lanes to each.
const ROWS: u32 = 4;

/// Where keys and values come from.
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

    /// Reserves the ring and gets it ready.
    pub(super) fn prepare(self, k: &mut Builder, decode: &Decode, numbers: &Numbers) -> Ring {
        let (keys, values) = (decode.key_layout(), decode.value_layout());
        let bytes = keys.bytes() + values.bytes();
        let offset = k.shared("tiles", decode.warps * decode.stages * bytes, keys.alignment());
        let base = k.shared_address(offset);
        let base = k.eval(base + numbers.warp * (decode.stages * bytes));
        let gather = Gather::new(k, decode, numbers, self);
        gather.clear_padding(k, decode, base, bytes);
        let (entry, row) = (k.variable(0), k.variable(0));
        let stage = k.variable(0);
        Ring { gather, base, bytes, stage, entry, row, lane: numbers.lane, warp: numbers.warp }
    }
}

/// The ring of one warp.
pub(super) struct Ring {
    gather: Gather,
    base: Reg<SharedAddress>,
    /// Of a stage: a tile of keys, then one of values.
    bytes: u32,
    /// The stage that is read next.
    stage: Reg<U32>,
    /// Where the tile to be copied next is: with pages, the lane's row of it, else its first.
    entry: Reg<U32>,
    row: Reg<U32>,
    lane: Reg<U32>,
    warp: Reg<U32>,
}

impl Ring {
    /// Begins with a sequence: looks up the first tile and copies as many as there is room for.
    pub(super) fn begin(
        &self,
        k: &mut Builder,
        decode: &Decode,
        cursor: &Cursor,
        places: &Places,
        numbers: &Numbers,
    ) {
        self.look_up(k, decode, cursor, places, numbers.warp);
        let stage = k.variable(self.stage);
        for ahead in 0..decode.stages {
            let tile = k.eval(numbers.warp + ahead * decode.warps);
            self.copy(k, decode, cursor, places, tile, stage);
            self.next(k, decode, stage);
        }
    }

    /// Finds a tile: with pages each lane its row, else all the first.
    fn look_up(
        &self,
        k: &mut Builder,
        decode: &Decode,
        cursor: &Cursor,
        places: &Places,
        tile: Reg<U32>,
    ) {
        let mine: Value<U32> = match decode.paged {
            true => self.lane % decode.tile_keys,
            false => Value::from(0),
        };
        let row = k.eval(cursor.first_row + cursor.first_key + tile * decode.tile_keys + mine);
        let (entry, row) = places.locate(k, cursor.entry, row);
        k.set(self.entry, entry);
        k.set(self.row, row);
    }

    /// Copies a tile of the sequence, if there is such a one, and looks up the warp's next.
    fn copy(
        &self,
        k: &mut Builder,
        decode: &Decode,
        cursor: &Cursor,
        places: &Places,
        tile: Reg<U32>,
        stage: Reg<U32>,
    ) {
        k.if_(tile.less(cursor.count), |k| {
            let target = k.eval(self.base + stage * self.bytes);
            let first = k.eval(cursor.first_key + tile * decode.tile_keys);
            let valid = k.eval(cursor.keys - first.minimum(cursor.keys));
            self.gather.copy(k, decode, target, [self.entry, self.row], valid);
            let next = k.eval(tile + decode.warps);
            self.look_up(k, decode, cursor, places, next);
        });
        k.push(Instruction::CopyAsyncCommit);
    }

    /// Waits for the next tile and gives its address: keys, then values.
    pub(super) fn wait(&self, k: &mut Builder, decode: &Decode) -> Reg<SharedAddress> {
        k.push(Instruction::CopyAsyncWait { pending: decode.stages - 1 });
        k.push(Instruction::WarpSync);
        k.eval(self.base + self.stage * self.bytes)
    }

    /// Gives the tile back, which is the warp's `tile`, fills its stage again and goes on.
    pub(super) fn release(
        &self,
        k: &mut Builder,
        decode: &Decode,
        cursor: &Cursor,
        places: &Places,
        tile: Reg<U32>,
    ) {
        k.push(Instruction::WarpSync);
        let next = k.eval(tile + decode.stages * decode.warps);
        self.copy(k, decode, cursor, places, next, self.stage);
        self.next(k, decode, self.stage);
    }

    fn next(&self, k: &mut Builder, decode: &Decode, stage: Reg<U32>) {
        let next = k.eval(stage + 1);
        let around = k.eval(next.equals(decode.stages));
        k.set(stage, around.choose::<U32>(0, next));
    }

    /// The warp whose ring it is.
    pub(super) fn warp(&self) -> Reg<U32> {
        self.warp
    }
}

/// How lanes share a tile: eight neighbours copy one row of a panel, 128 bytes, chunks of 16
/// permuted as the swizzle says.
struct Gather {
    keys: GatherSource,
    values: GatherSource,
    /// The lane's row among four, and its chunk.
    row: Reg<U32>,
    chunk: Reg<U32>,
    /// Where the lane's chunk lies in a tile, in the first four rows of eight and in the others.
    inside: [Reg<U32>; 2],
}

/// A tensor, from the block's head and the lane's chunk on.
struct GatherSource {
    address: Reg<GlobalAddress>,
    /// Bytes from one batch entry or page, and from one row, to the next.
    entry_bytes: Reg<U64>,
    row_bytes: Reg<U64>,
    columns: u32,
}

impl GatherSource {
    fn new(
        k: &mut Builder,
        element: Element,
        columns: u32,
        source: Strided,
        head: Reg<U32>,
        chunk: Reg<U32>,
    ) -> Self {
        let bytes = element.bytes();
        let Strided { address, strides } = source;
        let head = head.convert::<U64>() * strides.head * bytes;
        GatherSource {
            address: k.eval(address + head + (chunk * CHUNK).convert::<U64>()),
            entry_bytes: k.eval(strides.batch * bytes),
            row_bytes: k.eval(strides.row * bytes),
            columns,
        }
    }

    fn row(&self, k: &mut Builder, entry: Reg<U32>, row: Reg<U32>) -> Reg<U64> {
        let entry = entry.convert::<U64>() * self.entry_bytes;
        k.eval(entry + row.convert::<U64>() * self.row_bytes)
    }
}

impl Gather {
    fn new(k: &mut Builder, decode: &Decode, numbers: &Numbers, copies: Copies) -> Self {
        let row = k.eval(numbers.lane / 8);
        let chunk = k.eval(numbers.lane % 8);
        let first = k.eval(row * ROW + (chunk ^ row) * CHUNK);
        // Four rows on, the bit of 4 in the row flips that of the chunk.
        let second = k.eval(first ^ (4 * CHUNK));
        let (element, head) = (decode.element, numbers.key_head);
        let Copies { keys, values } = copies;
        Gather {
            keys: GatherSource::new(k, element, decode.head_dim, keys, head, chunk),
            values: GatherSource::new(k, element, decode.value_head_dim, values, head, chunk),
            row,
            chunk,
            inside: [first, second],
        }
    }

    /// Fills the chunks beyond the tensors' columns with zeros, in every stage: copies leave them
    /// alone and products read them.
    fn clear_padding(
        &self,
        k: &mut Builder,
        decode: &Decode,
        base: Reg<SharedAddress>,
        stage_bytes: u32,
    ) {
        let (keys, values) = (decode.key_layout(), decode.value_layout());
        let tiles = [(keys, decode.head_dim, 0), (values, decode.value_head_dim, keys.bytes())];
        for (layout, columns, offset) in tiles {
            if columns == layout.columns {
                continue;
            }
            let zero = [0; 4].map(|zero| k.eval::<U32>(zero));
            let chunk = columns / 8;
            let lane = k.lane();
            for stage in 0..decode.stages {
                k.if_(lane.less(layout.rows), |k| {
                    let within = lane * ROW + ((lane % 8) ^ (chunk % 8)) * CHUNK;
                    let panel = stage * stage_bytes + offset + chunk / 8 * layout.panel_bytes();
                    k.store_vector(base + within + panel, &zero, Default::default());
                });
            }
        }
        k.push(Instruction::WarpSync);
    }

    /// Copies a tile of which the first `valid` rows exist; the others become zeros.
    fn copy(
        &self,
        k: &mut Builder,
        decode: &Decode,
        target: Reg<SharedAddress>,
        place: [Reg<U32>; 2],
        valid: Reg<U32>,
    ) {
        let (keys, values) = (decode.key_layout(), decode.value_layout());
        let sizes: Vec<Reg<U32>> = (0..decode.tile_keys / ROWS)
            .map(|pass| k.eval((self.row + ROWS * pass).less(valid).choose::<U32>(CHUNK, 0)))
            .collect();
        for (source, layout, offset) in
            [(&self.keys, keys, 0), (&self.values, values, keys.bytes())]
        {
            let to = self.inside.map(|inside| k.eval(target + inside + offset));
            let rows = self.rows(k, decode, source, place);
            for (pass, (from, bytes)) in rows.into_iter().zip(&sizes).enumerate() {
                self.copy_row(k, source, layout, to[pass % 2], pass as u32, from, *bytes);
            }
        }
    }

    /// Where the rows are that the lane copies chunks of. Rows of a page may be anywhere, and each
    /// lane knows where one is; others are neighbours.
    fn rows(
        &self,
        k: &mut Builder,
        decode: &Decode,
        source: &GatherSource,
        [entry, row]: [Reg<U32>; 2],
    ) -> Vec<Reg<GlobalAddress>> {
        let passes = 0..decode.tile_keys / ROWS;
        if decode.paged {
            let mine = source.row(k, entry, row);
            let from = |pass| {
                let index = k.eval(self.row + ROWS * pass);
                let other = shuffle_wide(k, mine, index);
                k.eval(source.address + other)
            };
            return passes.map(from).collect();
        }
        let row = k.eval(row + self.row);
        let offset = source.row(k, entry, row);
        let mut from = k.eval(source.address + offset);
        let step = k.eval(source.row_bytes * ROWS);
        passes
            .map(|pass| {
                if pass > 0 {
                    from = k.eval(from + step);
                }
                from
            })
            .collect()
    }

    #[allow(clippy::too_many_arguments)] // one row of what `copy` has in hand
    fn copy_row(
        &self,
        k: &mut Builder,
        source: &GatherSource,
        layout: TileLayout,
        to: Reg<SharedAddress>,
        pass: u32,
        from: Reg<GlobalAddress>,
        bytes: Reg<U32>,
    ) {
        for panel in 0..layout.panels() {
            let to = to + (panel * layout.panel_bytes() + ROWS * pass * ROW);
            let from = from + panel * ROW;
            match source.columns / 8 - 8 * panel {
                8.. => k.copy_async(to, from, Some(bytes)),
                rest => {
                    k.if_(self.chunk.less(rest), |k| k.copy_async(to, from, Some(bytes)));
                }
            }
        }
    }
}

/// The 64-bit value of another lane.
fn shuffle_wide(k: &mut Builder, value: Reg<U64>, lane: Reg<U32>) -> Reg<U64> {
    let (low, high) = (k.register::<U32>(), k.register::<U32>());
    let (low_half, high_half) = (low.register(), high.register());
    k.push(Instruction::Split { low: low_half, high: high_half, src: value.register() });
    let (low, high) = (k.shuffle_index(low, lane), k.shuffle_index(high, lane));
    let whole = k.register::<U64>();
    k.push(Instruction::Join { dst: whole.register(), low: low.into(), high: high.into() });
    whole
}
