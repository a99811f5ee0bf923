//! Bringing tiles by `cp.async`.
//!
//! Eight neighbouring threads copy one row of a panel, 128 bytes; the block of
//! threads takes some rows in each pass. Chunks of 16 bytes are permuted as the
//! swizzle says, so that neither these writes nor the reads of `ldmatrix`
//! have two lanes at one bank.

use ptx::{
    Builder, Choose, Expression, GlobalAddress, Instruction, Reg, SharedAddress, TileLayout, Type,
    U32, U64,
};

use super::Mma;

/// Bytes of a panel's row, and of a chunk.
const ROW: u32 = 128;
const CHUNK: u32 = 16;

/// Some tiles of shared memory that are filled and read in turn.
pub(super) struct Ring {
    layout: TileLayout,
    /// Their addresses, the one to be read now first.
    slots: Vec<Reg<SharedAddress>>,
}

impl Ring {
    pub(super) fn new(k: &mut Builder, name: &str, layout: TileLayout, count: u32) -> Self {
        let offset = k.shared(name, count * layout.bytes(), layout.alignment());
        let slots = (0..count)
            .map(|index| {
                let address = k.shared_address(offset + index * layout.bytes());
                k.variable(address)
            })
            .collect();
        Ring { layout, slots }
    }

    /// The slot of the block that is `index` blocks on from the one read now.
    pub(super) fn at(&self, index: u32) -> Reg<SharedAddress> {
        self.slots[index as usize]
    }

    /// Goes on to the next block.
    pub(super) fn rotate(&self, k: &mut Builder) {
        let first = k.variable(self.slots[0]);
        for pair in self.slots.windows(2) {
            k.set(pair[0], pair[1]);
        }
        k.set(self.slots[self.slots.len() - 1], first);
    }
}

/// The blocks of one head of a tensor.
pub(super) struct Blocks {
    layout: TileLayout,
    /// Columns that the tensor has.
    columns: u32,
    /// Rows that one pass of the block of threads copies.
    pass: u32,
    /// The head's first element, the same in all threads.
    source: Reg<GlobalAddress>,
    /// Bytes from row to row.
    row_bytes: Reg<U32>,
}

/// Where a thread stands in a pass.
struct Part {
    row: Reg<U32>,
    chunk: Reg<U32>,
}

impl Part {
    /// Found anew for each block: what depends on the thread would otherwise
    /// be kept in registers all along.
    fn new(k: &mut Builder) -> Self {
        let thread = k.thread_index();
        Part { row: k.eval(thread / 8), chunk: k.eval(thread % 8) }
    }
}

impl Blocks {
    pub(super) fn new(
        k: &mut Builder,
        mma: &Mma,
        layout: TileLayout,
        columns: u32,
        source: Reg<GlobalAddress>,
        row_stride: Reg<U64>,
    ) -> Self {
        let pass = mma.threads() / 8;
        let row_bytes = k.eval(row_stride.convert::<U32>() * layout.element.bytes());
        Blocks { layout, columns, pass, source, row_bytes }
    }

    /// Chunks of a row that the tensor has, and that the tensor cores read.
    fn chunks(&self) -> (u32, u32) {
        (self.columns / 8, self.layout.columns / 8)
    }

    /// Fills the chunks beyond the tensor's columns with zeros, in every slot:
    /// copies leave them alone.
    pub(super) fn clear_padding(&self, k: &mut Builder, ring: &Ring) {
        let (held, read) = self.chunks();
        let layout = ring.layout;
        for chunk in held..read {
            let panel = chunk / 8 * layout.panel_bytes();
            let zero = [0; 4].map(|zero| k.eval::<U32>(zero));
            for slot in &ring.slots {
                let threads = 8 * self.pass;
                for first in (0..layout.rows).step_by(threads as usize) {
                    let thread = k.thread_index();
                    let row = k.eval(thread + first);
                    k.if_(row.less(layout.rows), |k| {
                        let at = row * ROW + ((row % 8) ^ (chunk % 8)) * CHUNK;
                        k.store_vector(*slot + at + panel, &zero, Default::default());
                    });
                }
            }
        }
    }

    /// Copies the block of rows from `first_row` on. With `rows`, only so many
    /// exist, and the others become zeros.
    pub(super) fn copy(
        &self,
        k: &mut Builder,
        slot: Reg<SharedAddress>,
        first_row: Reg<U32>,
        rows: Option<Reg<U32>>,
    ) {
        let (held, _) = self.chunks();
        let Part { row, chunk } = Part::new(k);
        let target = k.eval(slot + row * ROW + (chunk ^ (row % 8)) * CHUNK);
        let column = k.eval(self.source + (chunk * CHUNK).convert::<U64>());
        for first in (0..self.layout.rows).step_by(self.pass as usize) {
            let valid = rows.map(|rows| {
                let row = k.eval(row + first);
                k.eval(row.less(rows).choose::<U32>(CHUNK, 0))
            });
            let source = {
                let row = k.eval(first_row + row + first);
                let offset = k.register::<U64>();
                k.push(Instruction::MultiplyWide {
                    ty: Type::U32,
                    dst: offset.register(),
                    a: row.into(),
                    b: self.row_bytes.into(),
                });
                k.eval(column + offset)
            };
            for panel in 0..self.layout.panels() {
                let to = target + first * ROW + panel * self.layout.panel_bytes();
                let from = source + panel * ROW;
                let copy = |k: &mut Builder| k.copy_async(to.clone(), from.clone(), valid);
                match held - 8 * panel {
                    8.. => copy(k),
                    rest => k.if_(chunk.less(rest), |k| copy(k)),
                }
            }
        }
    }
}

/// Closes the group of the copies issued since the last.
pub(super) fn commit(k: &mut Builder) {
    k.push(Instruction::CopyAsyncCommit);
}

/// Waits until at most `pending` groups are under way, in all threads.
pub(super) fn wait(k: &mut Builder, pending: u32) {
    k.push(Instruction::CopyAsyncWait { pending });
    k.block_sync();
}
