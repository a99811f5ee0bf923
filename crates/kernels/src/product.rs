//! A matrix product with everything that the attention kernels use: TMA, pipelines, swizzles,
//! clusters and `wgmma`.
//!
//! `d = a * b` for a tall `a`, with one thread block for each 64 rows. One warp loads tiles with
//! TMA through a pipeline of stages; a warpgroup multiplies them as they arrive:
//!
//! ```text
//! producer                          consumer
//!   for each step of the inner extent:
//!     wait until the stage is empty     wait until the stage is full
//!     copy a and b into the stage       d += a * b on the tensor cores
//!                                       release the stage
//!                                   store d
//! ```
//!
//! In a cluster of two, both thread blocks need the same `b`: each loads half of it and multicasts
//! it to both.

use ptx::{
    Accumulate, Accumulator, Builder, CopyHint, Element, Expression, Fence, Fragment,
    GlobalAddress, MatrixA, Pipeline, Program, Reg, Role, S32, SharedTiles, StoreHint, Swizzle,
    Target, TensorMap, TileLayout, U32, U64,
};

use crate::{Error, build, first_fault, is_16_bit};

/// The inner extent of one pipeline step: 64 elements, 128 bytes.
pub const STEP: u32 = 64;

/// Rows of `a` and `d` per thread block.
pub const ROWS: u32 = 64;

/// Which extent of an operand is contiguous in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Contiguous {
    /// The inner extent, over which the product sums ("K-major").
    Inner,
    /// The outer extent: rows of `a`, columns of `b` ("MN-major").
    Outer,
}

/// Where the tensor cores read the first operand (`a`) from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// Shared memory.
    Shared,
    /// Registers, which the consumer loads from shared memory first.
    Registers,
}

/// The configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// The element of `a` and `b`: `F16` or `BF16`.
    pub element: Element,
    /// Columns of `b` and `d`: a multiple of 8 up to 256.
    pub columns: u32,
    /// The swizzle of both operands in shared memory.
    pub swizzle: Swizzle,
    /// Which extent of `a` is contiguous.
    pub a: Contiguous,
    /// Which extent of `b` is contiguous.
    pub b: Contiguous,
    /// Where the tensor cores read `a` from.
    pub source: Source,
    /// Stages of the pipeline.
    pub stages: u32,
    /// Thread blocks in a cluster: 1, or 2 that share `b`.
    pub cluster: u32,
}

/// The tiles and the pipeline that producer and consumer share.
struct Shared {
    a: SharedTiles,
    b: SharedTiles,
    pipeline: Pipeline,
}

impl Product {
    /// A plain configuration, as a basis for others.
    pub const PLAIN: Product = Product {
        element: Element::BF16,
        columns: 128,
        swizzle: Swizzle::B128,
        a: Contiguous::Inner,
        b: Contiguous::Inner,
        source: Source::Shared,
        stages: 4,
        cluster: 1,
    };

    /// Returns the name of this configuration.
    pub fn name(&self) -> String {
        let Product { element, columns, swizzle, a, b, source, stages, cluster } = self;
        let swizzle = swizzle.width();
        let letter = |contiguous: &Contiguous| match contiguous {
            Contiguous::Inner => "k",
            Contiguous::Outer => "m",
        };
        let source = match source {
            Source::Shared => "s",
            Source::Registers => "r",
        };
        let (a, b) = (letter(a), letter(b));
        format!("product_{element}_n{columns}_w{swizzle}_{a}{b}{source}_s{stages}_c{cluster}")
    }

    /// Returns the layout of a tile of `a` as it lies in memory: the contiguous extent is that of
    /// the tile's columns.
    pub fn a_layout(&self) -> TileLayout {
        self.layout(self.a, ROWS)
    }

    /// Returns the layout of a tile of `b` as it lies in memory.
    fn b_layout(&self) -> TileLayout {
        self.layout(self.b, self.columns)
    }

    /// Returns the layout of the part of `b`'s tile that one thread block of the cluster loads.
    pub fn b_part_layout(&self) -> TileLayout {
        let layout = self.b_layout();
        TileLayout { rows: layout.rows / self.cluster, ..layout }
    }

    fn layout(&self, contiguous: Contiguous, outer: u32) -> TileLayout {
        let (element, swizzle) = (self.element, self.swizzle);
        match contiguous {
            Contiguous::Inner => TileLayout { element, rows: outer, columns: STEP, swizzle },
            Contiguous::Outer => TileLayout { element, rows: STEP, columns: outer, swizzle },
        }
    }

    /// Builds the kernel.
    ///
    /// Parameters: the tensor maps of `a` (with boxes of [`Product::a_layout`]) and of
    /// `b` ([`Product::b_part_layout`]) over the matrices as they lie in memory; the address of
    /// `d`, contiguous rows of `f32`; the number of its rows; the inner extent. The grid has one
    /// thread block for every 64 rows, in whole clusters.
    pub fn program(&self) -> Result<Program, Error> {
        let fault = first_fault([
            (!is_16_bit(self.element), "the element is not f16 or bf16"),
            (
                !(8..=256).contains(&self.columns) || !self.columns.is_multiple_of(8),
                "the columns are not 8 to 256 in eights",
            ),
            (
                self.source == Source::Registers && self.a == Contiguous::Outer,
                "registers are loaded from a contiguous inner extent only",
            ),
            (!(1..=2).contains(&self.cluster), "clusters have one block or two"),
            (
                !self.b_layout().rows.is_multiple_of(self.cluster.saturating_mul(8)),
                "the cluster does not divide b into eights of rows",
            ),
            (self.stages == 0, "a pipeline has at least one stage"),
        ]);
        let builder = |name| Builder::new(name, Target::SM_90A, 128 + 32).cluster(self.cluster);
        build(self.name(), fault, builder, |k| self.write(k))
    }

    fn write(&self, k: &mut Builder) {
        let a_map = k.tensor_map("a", self.a_layout().tensor_box(2));
        let b_map = k.tensor_map("b", self.b_part_layout().tensor_box(2));
        let d: Reg<GlobalAddress> = k.parameter("d");
        let rows: Reg<U32> = k.parameter("rows");
        let inner: Reg<U32> = k.parameter("inner extent");

        let shared = Shared {
            a: SharedTiles::new(k, "a", self.a_layout(), self.stages),
            b: SharedTiles::new(k, "b", self.b_layout(), self.stages),
            // A stage is empty when the warpgroup of every thread block that it was multicast to
            // has released it.
            pipeline: Pipeline::new(k, "stages", self.stages, self.cluster),
        };
        let thread = k.thread_index();
        k.if_(thread.equals(0), |k| shared.pipeline.init(k));
        k.barriers_ready();

        let block = k.block_index();
        let first_row = k.eval(block * ROWS);
        let steps = k.eval((inner + (STEP - 1)) / STEP);
        k.role(Role::warps("producer", 4..5), |k| {
            let leader = k.elect();
            k.if_(leader, |k| self.produce(k, &shared, a_map, b_map, first_row, steps));
        });
        k.role(Role::warpgroups("consumer", 0..1), |k| {
            let product = self.consume(k, &shared, thread, steps);
            self.store(k, &product, thread, d, first_row, rows);
        });
        if self.cluster > 1 {
            // A thread block must not exit while the other may still arrive at its mbarriers.
            k.cluster_sync();
        }
    }

    fn produce(
        &self,
        k: &mut Builder,
        shared: &Shared,
        a_map: TensorMap,
        b_map: TensorMap,
        first_row: Reg<U32>,
        steps: Reg<U32>,
    ) {
        let producer = shared.pipeline.producer(k);
        let part = self.b_part_layout().rows;
        let (first_part, everyone) = if self.cluster == 1 {
            (k.eval(0), None)
        } else {
            let rank = k.cluster_rank();
            (k.eval(rank * part), Some(k.eval((1u32 << self.cluster) - 1)))
        };
        k.for_range(0, steps, 1, |k, step| {
            let stage = producer.acquire(k);
            let bytes = self.a_layout().bytes() + self.b_layout().bytes();
            let full = producer.expect(k, bytes);
            let at = k.eval((step * STEP).reinterpret::<S32>());

            let a = shared.a.at(k, stage);
            let row = k.eval(first_row.reinterpret::<S32>());
            let corner = match self.a {
                Contiguous::Inner => [at.into(), row.into()],
                Contiguous::Outer => [row.into(), at.into()],
            };
            a.load(k, a_map, &corner, full, CopyHint::default());

            let b = shared.b.at(k, stage).rows(k, first_part, part);
            let offset = first_part.reinterpret::<S32>();
            let corner = match self.b {
                Contiguous::Inner => [at.into(), offset],
                Contiguous::Outer => [0.into(), at + offset],
            };
            b.load(k, b_map, &corner, full, CopyHint { multicast: everyone });
            producer.advance(k);
        });
    }

    fn consume(
        &self,
        k: &mut Builder,
        shared: &Shared,
        thread: Reg<U32>,
        steps: Reg<U32>,
    ) -> Accumulator {
        let consumer = shared.pipeline.consumer(k);
        let warp = k.eval(thread / 32);
        let mut product = Accumulator::zeros(k, self.columns);
        k.for_range(0, steps, 1, |k, _| {
            let stage = consumer.wait(k);
            let a = shared.a.at(k, stage);
            let a: MatrixA = match (self.source, self.a) {
                (Source::Registers, _) => (&Fragment::load(k, &a, warp)).into(),
                (Source::Shared, Contiguous::Inner) => a.matrix().into(),
                (Source::Shared, Contiguous::Outer) => a.transposed().into(),
            };
            let b = shared.b.at(k, stage);
            let b = match self.b {
                Contiguous::Inner => b.transposed(),
                Contiguous::Outer => b.matrix(),
            };
            k.wgmma_into(&mut product, Accumulate::Yes, a, b).wait(k);
            self.release(k, &consumer, thread);
        });
        product
    }

    /// Releases a stage to this thread block's producer, or in a cluster to those of both.
    fn release(&self, k: &mut Builder, consumer: &ptx::Consumer, thread: Reg<U32>) {
        if self.source == Source::Registers {
            // Orders these generic-proxy reads before the next TMA write to the stage.
            k.fence(Fence::ProxyAsyncShared);
        }
        // All four warps must be done with the stage before one thread arrives for them.
        k.barrier_sync(1, 128);
        if self.cluster == 1 {
            consumer.release(k, thread.equals(0));
        } else {
            consumer.release_cluster(k, thread);
        }
    }

    fn store(
        &self,
        k: &mut Builder,
        product: &Accumulator,
        thread: Reg<U32>,
        d: Reg<GlobalAddress>,
        first_row: Reg<U32>,
        rows: Reg<U32>,
    ) {
        let position = Accumulator::position(k, thread);
        for half in 0..2 {
            let row = k.eval(first_row + position.row + 8 * half);
            let index = row.convert::<U64>() * self.columns + position.column.convert::<U64>();
            let mine = k.eval(d + index * 4);
            k.if_(row.less(rows), |k| {
                for (pair, registers) in product.registers().chunks(2).enumerate() {
                    if Accumulator::row_of(2 * pair) == half as usize {
                        let offset = 4 * Accumulator::column_of(2 * pair);
                        k.store_vector(mine + offset, registers, StoreHint::default());
                    }
                }
            });
        }
    }
}
