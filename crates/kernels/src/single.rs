//! One `wgmma` of 64 x 64 x 16: the smallest complete tensor-core kernel of Hopper.
//!
//! A warpgroup copies both operands into shared memory with ordinary stores, makes them visible to
//! the async proxy, multiplies once and stores the result: `d = a * b^T`, with `a` and `b` of 64
//! rows by 16 columns.

use ptx::{
    Accumulator, Builder, Element, Expression, Fence, GlobalAddress, LoadHint, Program, Reg,
    SharedTile, SharedTiles, StoreHint, Swizzle, Target, TileLayout, U32, U64,
};

use crate::{Error, build, first_fault, is_16_bit};

/// The configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Single {
    /// The element of `a` and `b`: `F16` or `BF16`.
    pub element: Element,
}

impl Single {
    /// Returns the name of this configuration.
    pub fn name(&self) -> String {
        format!("single_wgmma_{}", self.element)
    }

    /// Builds the kernel. The grid is one thread block. Parameters: the addresses of `a` and `b`
    /// (64 x 16, contiguous) and `d` (64 x 64 of `f32`, contiguous).
    pub fn program(&self) -> Result<Program, Error> {
        let fault = first_fault([(!is_16_bit(self.element), "the element is not f16 or bf16")]);
        let builder = |name| Builder::new(name, Target::SM_90A, 128);
        build(self.name(), fault, builder, |k| self.write(k))
    }

    fn write(&self, k: &mut Builder) {
        let [a, b, d] = ["a", "b", "d"].map(|name| k.parameter::<GlobalAddress>(name));
        let thread = k.thread_index();

        let layout =
            TileLayout { element: self.element, rows: 64, columns: 16, swizzle: Swizzle::None };
        let a_tile = SharedTiles::new(k, "a", layout, 1).at(k, 0);
        let b_tile = SharedTiles::new(k, "b", layout, 1).at(k, 0);
        copy_in(k, thread, a, &a_tile);
        copy_in(k, thread, b, &b_tile);
        // The tensor cores read through the async proxy: each thread makes its own stores visible
        // to it before the threads synchronise.
        k.fence(Fence::ProxyAsyncShared);
        k.block_sync();

        let product = k.wgmma(a_tile.matrix(), b_tile.transposed()).wait(k);

        store_rows(k, &product, thread, d, 64);
    }
}

/// Copies a 64 x 16 matrix: 128 threads, half a row (16 bytes) each.
fn copy_in(k: &mut Builder, thread: Reg<U32>, from: Reg<GlobalAddress>, tile: &SharedTile) {
    let source = from + thread.convert::<U64>() * 16;
    let chunk = k.load_vector::<U32, _, 4>(source, LoadHint::default());
    let target = tile.element_address(k, thread / 2, thread % 2 * 8);
    k.store_vector(target, &chunk, StoreHint::default());
}

/// Stores an accumulator as the rows of a matrix with `stride` columns.
fn store_rows(
    k: &mut Builder,
    accumulator: &Accumulator,
    thread: Reg<U32>,
    to: Reg<GlobalAddress>,
    stride: u32,
) {
    let position = Accumulator::position(k, thread);
    let index = k.eval(position.row * stride + position.column);
    let mine = k.eval(to + index.convert::<U64>() * 4);
    for (pair, registers) in accumulator.registers().chunks(2).enumerate() {
        let row = 8 * Accumulator::row_of(2 * pair) as u32;
        let offset = 4 * (row * stride + Accumulator::column_of(2 * pair));
        k.store_vector(mine + offset, registers, StoreHint::default());
    }
}
