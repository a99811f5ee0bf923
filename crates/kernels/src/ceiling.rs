//! Measures the peak of the tensor cores: `wgmma` m64n256k16 in a loop, and nothing else.
//!
//! One or two warpgroups multiply the same tiles over and over, with all operands in shared memory.
//! The throughput of this loop is the ceiling of every kernel here. It does no useful work, but its
//! result is known and checked.

use ptx::{
    Accumulate, Accumulator, Builder, CopyHint, Element, Expression, GlobalAddress, Mbarriers,
    Program, Reg, Scope, SharedTiles, Swizzle, Target, TileLayout, U32,
};

use crate::Error;
use crate::single::store_rows;

/// The configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ceiling {
    /// The element of both operands: `F16` or `BF16`.
    pub element: Element,
    /// The number of 64 x 256 x 64 products in the body of the loop.
    pub unroll: u32,
    /// Warpgroups per thread block: 1 or 2.
    pub warpgroups: u32,
}

/// Columns of the product.
pub const COLUMNS: u32 = 256;

/// The inner extent of one product.
pub const INNER: u32 = 64;

impl Ceiling {
    /// The configuration that is measured.
    pub const PLAIN: Ceiling = Ceiling { element: Element::BF16, unroll: 4, warpgroups: 2 };

    /// Returns the name of this configuration.
    pub fn name(&self) -> String {
        let Ceiling { element, unroll, warpgroups } = self;
        format!("ceiling_{element}_u{unroll}_w{warpgroups}")
    }

    /// Returns the rows of `a`, and of the result of one thread block.
    pub fn rows(&self) -> u32 {
        64 * self.warpgroups
    }

    /// Returns the floating-point operations of one thread block in `rounds` rounds of the loop.
    pub fn flop(&self, rounds: u32) -> f64 {
        2.0 * (self.rows() * COLUMNS * INNER * self.unroll) as f64 * rounds as f64
    }

    /// Returns the layout of the tile of `a`.
    pub fn a_layout(&self) -> TileLayout {
        let (element, swizzle) = (self.element, Swizzle::B128);
        TileLayout { element, rows: self.rows(), columns: INNER, swizzle }
    }

    /// Returns the layout of the tile of `b`.
    pub fn b_layout(&self) -> TileLayout {
        TileLayout { rows: COLUMNS, ..self.a_layout() }
    }

    /// Builds the kernel.
    ///
    /// Parameters: the tensor maps of `a` (`rows()` x 64) and `b` (256 x 64); the address
    /// of `d` (`rows()` x 256 of `f32` for each thread block); the number of rounds of the loop.
    /// The result of every thread block is `rounds * unroll * a * b^T`.
    pub fn program(&self) -> Result<Program, Error> {
        let refuse = |reason| Err(Error::configuration(self.name(), reason));
        if !matches!(self.element, Element::F16 | Element::BF16) {
            return refuse("the element is not f16 or bf16");
        }
        if self.unroll == 0 || !(1..=2).contains(&self.warpgroups) {
            return refuse("at least one product, one warpgroup or two");
        }
        let threads = 128 * self.warpgroups;
        let mut k = Builder::new(self.name(), Target::SM_90A, threads).blocks_per_multiprocessor(1);
        self.write(&mut k);
        Ok(k.finish()?)
    }

    fn write(&self, k: &mut Builder) {
        let a_map = k.tensor_map("a", self.a_layout().tensor_box(2));
        let b_map = k.tensor_map("b", self.b_layout().tensor_box(2));
        let d: Reg<GlobalAddress> = k.parameter("d");
        let rounds: Reg<U32> = k.parameter("rounds");

        let a = SharedTiles::new(k, "a", self.a_layout(), 1).at(k, 0);
        let b = SharedTiles::new(k, "b", self.b_layout(), 1).at(k, 0);
        let loaded = Mbarriers::new(k, "loaded", 1, 1);
        let thread = k.thread_index();
        k.if_(thread.equals(0), |k| loaded.init(k));
        k.barriers_ready();
        let barrier = loaded.at(k, 0);
        k.if_(thread.equals(0), |k| {
            k.mbarrier_arrive_expect(barrier, self.a_layout().bytes() + self.b_layout().bytes());
            a.load(k, a_map, &[0.into(), 0.into()], barrier, CopyHint::default());
            b.load(k, b_map, &[0.into(), 0.into()], barrier, CopyHint::default());
        });
        k.mbarrier_wait(barrier, 0, Scope::Block);

        let warpgroup = k.eval(thread / 128);
        let mine = a.rows(k, warpgroup * 64, 64);
        let mut product = Accumulator::zeros(k, COLUMNS);
        k.for_range(0, rounds, 1, |k, _| {
            let operands: Vec<_> =
                (0..self.unroll).map(|_| (mine.matrix().into(), b.transposed())).collect();
            k.wgmma_chain(&mut product, Accumulate::Yes, &operands).wait(k);
        });

        let block = k.block_index();
        let first = k.eval(block * self.rows() + warpgroup * 64);
        let to = k.eval(d + first.convert::<ptx::U64>() * (4 * COLUMNS));
        let thread = k.eval(thread % 128);
        store_rows(k, &product, thread, to, COLUMNS);
    }
}
