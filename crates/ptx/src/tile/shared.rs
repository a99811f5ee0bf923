//! Tiles in shared memory: allocation, views of rows and panels, element addresses, and TMA loads.

use super::{Matrix, TileLayout};
use crate::{
    Address, Builder, CopyHint, Expression, Reg, S32, SharedAddress, TensorMap, U32, Value,
};

/// Shared memory for several tiles of one layout: the stages of a pipeline.
#[derive(Clone, Debug)]
pub struct SharedTiles {
    layout: TileLayout,
    offset: u32,
    stages: u32,
}

/// A view of one tile in shared memory, or of some of its rows and columns.
#[derive(Clone, Copy, Debug)]
pub struct SharedTile {
    /// The layout of the whole tile, also for a view of a part.
    pub(crate) layout: TileLayout,
    pub(crate) address: Reg<SharedAddress>,
    pub(crate) rows: u32,
    pub(crate) columns: u32,
}

impl SharedTiles {
    /// Reserves shared memory for `stages` tiles.
    #[track_caller]
    pub fn new(k: &mut Builder, name: &str, layout: TileLayout, stages: u32) -> Self {
        let layout = checked_layout(k, name, layout);
        let offset = k.shared(name, stride(layout).saturating_mul(stages), layout.alignment());
        SharedTiles { layout, offset, stages }
    }

    /// Returns the same memory as one tile of another layout, which must fit.
    #[track_caller]
    pub fn reused_as(&self, k: &mut Builder, layout: TileLayout) -> Self {
        let bytes = stride(self.layout).saturating_mul(self.stages);
        let (alignment, offset) = (layout.alignment(), self.offset);
        if layout.bytes() > bytes || !offset.is_multiple_of(alignment) {
            k.misuse(format!(
                "a tile of {} bytes (aligned to {alignment}) in {bytes} from {offset} on",
                layout.bytes()
            ));
        }
        SharedTiles { layout, offset: self.offset, stages: 1 }
    }

    /// Returns the layout of each tile.
    pub fn layout(&self) -> TileLayout {
        self.layout
    }

    /// Returns the tile of a stage.
    #[track_caller]
    pub fn at(&self, k: &mut Builder, stage: impl Into<Value<U32>>) -> SharedTile {
        let base = k.shared_address(self.offset);
        let stride = stride(self.layout);
        let address = if self.stages == 1 { base } else { k.eval(base + stage.into() * stride) };
        let TileLayout { rows, columns, .. } = self.layout;
        SharedTile { layout: self.layout, address, rows, columns }
    }
}

/// Returns the distance in bytes from one stage's tile to the next.
fn stride(layout: TileLayout) -> u32 {
    layout.bytes().next_multiple_of(layout.alignment())
}

/// Returns the layout, or reports a misuse and returns the smallest layout if shared memory has no
/// room for it: what is built from there on is refused anyway and should stay small.
#[track_caller]
pub(super) fn checked_layout(k: &mut Builder, name: &str, layout: TileLayout) -> TileLayout {
    let TileLayout { rows, columns, .. } = layout;
    if (1..=k.target().shared_memory_limit()).contains(&layout.bytes()) {
        return layout;
    }
    k.misuse(format!(
        "{name}: a tile of {rows} x {columns} is nothing, or no shared memory has it"
    ));
    TileLayout { rows: 8, columns: layout.panel_columns(), ..layout }
}

impl SharedTile {
    /// Returns the layout of the whole tile.
    pub fn layout(&self) -> TileLayout {
        self.layout
    }

    /// Returns the address of the first byte.
    pub fn address(&self) -> Reg<SharedAddress> {
        self.address
    }

    /// Returns a view of `count` rows from `start` on. Both are multiples of 8, the period of the
    /// swizzle.
    #[track_caller]
    pub fn rows(&self, k: &mut Builder, start: impl Into<Value<U32>>, count: u32) -> SharedTile {
        if !count.is_multiple_of(8) || count > self.rows {
            k.misuse(format!("{count} rows of a tile with {} (in eights)", self.rows));
        }
        let address = k.eval(self.address + start.into() * self.layout.swizzle.width());
        SharedTile { address, rows: count.min(self.rows), ..*self }
    }

    /// Returns a view of one panel: as many columns as the swizzle is wide.
    #[track_caller]
    pub fn panel(&self, k: &mut Builder, index: impl Into<Value<U32>>) -> SharedTile {
        let address = k.eval(self.address + index.into() * self.layout.panel_bytes());
        SharedTile { address, columns: self.layout.panel_columns(), ..*self }
    }

    /// Returns the tile as a matrix operand, not transposed: rows by columns.
    pub fn matrix(&self) -> Matrix {
        Matrix { tile: *self, transposed: false }
    }

    /// Returns the tile as a matrix operand, transposed: columns by rows.
    pub fn transposed(&self) -> Matrix {
        Matrix { tile: *self, transposed: true }
    }

    /// Returns the address of an element, with the swizzle applied.
    #[track_caller]
    pub fn element_address(
        &self,
        k: &mut Builder,
        row: impl Into<Value<U32>>,
        column: impl Into<Value<U32>>,
    ) -> Reg<SharedAddress> {
        let layout = self.layout;
        let row = k.eval(row);
        let column = k.eval(column);
        let panel = column / layout.panel_columns();
        let within = column % layout.panel_columns() * layout.element.bytes();
        let linear = k.eval(panel * layout.panel_bytes() + row * layout.swizzle.width() + within);
        let swizzled = k.eval(linear ^ ((linear >> 3) & layout.swizzle.chunk_mask()));
        k.eval(self.address + swizzled)
    }

    /// Issues the TMA loads of the tile from a tensor, one per panel, completing on `barrier`.
    /// `corner` is the position of the tile in the tensor: its column, its row, then the tensor's
    /// further coordinates. One thread calls this.
    #[track_caller]
    pub fn load(
        &self,
        k: &mut Builder,
        map: TensorMap,
        corner: &[Value<S32>],
        barrier: impl Into<Value<SharedAddress>>,
        hint: CopyHint,
    ) {
        let barrier = k.eval(barrier);
        let corner: Vec<Reg<S32>> = corner.iter().map(|c| k.eval(c.clone())).collect();
        let Some((column, further)) = corner.split_first() else {
            return k.misuse("a tile is loaded from a corner of at least one coordinate");
        };
        for panel in 0..self.layout.panels() {
            let first = (panel * self.layout.panel_columns()) as i32;
            let mut coordinates = vec![*column + first];
            coordinates.extend(further.iter().map(|c| Value::from(*c)));
            let dst = self.address + panel * self.layout.panel_bytes();
            k.tensor_load(dst, map, &coordinates, barrier, hint);
        }
    }

    /// Returns the addresses that each lane passes to `ldmatrix` or `stmatrix` for the 16 rows from
    /// `row` on (a warp-uniform value), one for each step of 16 columns of 16-bit elements.
    #[track_caller]
    pub(crate) fn fragment_addresses(
        &self,
        k: &mut Builder,
        row: impl Into<Value<U32>>,
        steps: usize,
    ) -> Vec<Address> {
        // The order of the matrices is rows 0..8, rows 8..16, then the same for columns 8..16: lane
        // l addresses row l % 16, columns from 8 * (l / 16) on.
        const COLUMNS: u32 = 16;
        let lane = k.lane();
        let row = k.eval(row.into() + lane % 16);
        let column = k.eval(lane / 16 * 8);
        let panel = self.layout.panel_columns();
        if panel < COLUMNS {
            let step = |step: usize| {
                let address = self.element_address(k, row, column + COLUMNS * step as u32);
                Address { base: address.register, offset: 0 }
            };
            return (0..steps).map(step).collect();
        }
        // Inside a panel, the swizzle and a step of 16 columns are both exclusive ors of address
        // bits; further panels are at a constant distance.
        let first = self.element_address(k, row, column);
        let bits = first.reinterpret::<U32>();
        let within: Vec<Reg<SharedAddress>> = (0..(panel / COLUMNS).min(steps as u32))
            .map(|step| match step {
                0 => first,
                _ => k.eval((bits.clone() ^ (step * 2 * COLUMNS)).reinterpret()),
            })
            .collect();
        let step = |step: usize| {
            let offset = (step / within.len()) as u32 * self.layout.panel_bytes();
            let base = within[step % within.len()].register;
            Address { base, offset: offset as i32 }
        };
        (0..steps).map(step).collect()
    }
}
