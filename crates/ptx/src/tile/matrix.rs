//! Warpgroup products (`wgmma`): operands, shared-memory descriptors, and products in flight.

use super::{Accumulator, Fragment, SharedTile, Swizzle};
use crate::{
    Accumulate, Builder, Element, Expression, Instruction, Operand, Reg, SharedAddress, U32, U64,
    Value, WgmmaA,
};

/// A tile in shared memory as an operand of a product, transposed or not.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    pub(crate) tile: SharedTile,
    pub(crate) transposed: bool,
}

impl Matrix {
    /// Returns the number of rows of the operand.
    pub fn rows(&self) -> u32 {
        if self.transposed { self.tile.columns } else { self.tile.rows }
    }

    /// Returns the number of columns of the operand.
    pub fn columns(&self) -> u32 {
        if self.transposed { self.tile.rows } else { self.tile.columns }
    }
}

/// The `A` operand of a product: 64 rows in shared memory or in registers.
#[derive(Clone, Debug)]
pub enum MatrixA {
    /// In shared memory.
    Shared(Matrix),
    /// In registers.
    Registers(Fragment),
}

impl From<Matrix> for MatrixA {
    fn from(matrix: Matrix) -> Self {
        MatrixA::Shared(matrix)
    }
}

impl From<&Fragment> for MatrixA {
    fn from(fragment: &Fragment) -> Self {
        MatrixA::Registers(fragment.clone())
    }
}

/// A product that has been started and not yet waited for.
///
/// The accumulator is inside (or borrowed), so it cannot be touched until [`wait`](InFlight::wait)
/// returns it.
#[must_use = "a product must be waited for"]
#[derive(Debug)]
pub struct InFlight<T> {
    accumulator: T,
    group: u32,
}

impl<T> InFlight<T> {
    /// Waits for this product and all before it; later ones may still run.
    #[track_caller]
    pub fn wait(self, k: &mut Builder) -> T {
        match k.wgmma_groups.checked_sub(self.group) {
            Some(pending) => k.push(Instruction::WgmmaWait { pending }),
            None => k.misuse("a product of another kernel is waited for"),
        }
        self.accumulator
    }
}

/// A product whose descriptors are already computed ([`Builder::prepare_product`]), so that
/// starting it takes no address arithmetic.
#[derive(Debug)]
pub struct PreparedProduct {
    a: MatrixA,
    b: Matrix,
    /// The descriptors of the first 32-byte step along the inner extent; `first_a` is `None` for an
    /// `A` operand in registers.
    first_a: Option<crate::Register>,
    first_b: crate::Register,
}

impl Builder {
    /// Starts `a * b`: 64 rows of `a` times all columns of `b`.
    ///
    /// All 128 threads of a warpgroup call this. Products finish in the order in which they were
    /// started. The handle knows how many products were started after it when the program is built,
    /// so it must be waited for in the same iteration of the same loop.
    #[track_caller]
    pub fn wgmma(&mut self, a: impl Into<MatrixA>, b: Matrix) -> InFlight<Accumulator> {
        let accumulator = Accumulator::new(self, b.columns());
        self.push(Instruction::WgmmaFence);
        self.issue_product(&accumulator, Accumulate::No, &a.into(), b);
        InFlight { group: self.commit_products(), accumulator }
    }

    /// Starts `accumulator = a * b`, or `+=` as `accumulate` says.
    #[track_caller]
    pub fn wgmma_into<'a>(
        &mut self,
        accumulator: &'a mut Accumulator,
        accumulate: Accumulate,
        a: impl Into<MatrixA>,
        b: Matrix,
    ) -> InFlight<&'a mut Accumulator> {
        self.push(Instruction::WgmmaFence);
        self.issue_product(accumulator, accumulate, &a.into(), b);
        InFlight { group: self.commit_products(), accumulator }
    }

    /// Starts a product that is waited for with [`wait_products`](Builder::wait_products) instead
    /// of a handle: for software-pipelined loops that keep a product in flight across the loop's
    /// back edge. The validator still ensures that none of its registers is touched before the
    /// wait.
    #[track_caller]
    pub fn start_product(
        &mut self,
        accumulator: &Accumulator,
        accumulate: Accumulate,
        a: impl Into<MatrixA>,
        b: Matrix,
    ) {
        self.push(Instruction::WgmmaFence);
        self.issue_product(accumulator, accumulate, &a.into(), b);
        self.commit_products();
    }

    /// Waits until at most the latest `pending` products are in flight.
    #[track_caller]
    pub fn wait_products(&mut self, pending: u32) {
        self.push(Instruction::WgmmaWait { pending });
    }

    /// Computes the descriptors of a product's operands ahead of its start. The operands' data need
    /// not be in place yet.
    #[track_caller]
    pub fn prepare_product(&mut self, a: impl Into<MatrixA>, b: Matrix) -> PreparedProduct {
        let mut first = |matrix: &Matrix, side| {
            let encoded = self.encode_address(matrix.tile.address);
            Descriptor::of(matrix, side).at_step(self, encoded, 0)
        };
        let a = a.into();
        let first_a = match &a {
            MatrixA::Shared(matrix) => Some(first(matrix, Side::A)),
            MatrixA::Registers(_) => None,
        };
        PreparedProduct { first_b: first(&b, Side::B), a, b, first_a }
    }

    /// Starts a prepared product into a new accumulator.
    #[track_caller]
    pub fn wgmma_prepared(&mut self, prepared: &PreparedProduct) -> InFlight<Accumulator> {
        let accumulator = Accumulator::new(self, prepared.b.columns());
        self.issue_prepared(&accumulator, Accumulate::No, prepared);
        InFlight { group: self.commit_products(), accumulator }
    }

    /// Starts a prepared product into an accumulator, overwriting or adding to it as `accumulate`
    /// says.
    #[track_caller]
    pub fn wgmma_prepared_into<'a>(
        &mut self,
        accumulator: &'a mut Accumulator,
        accumulate: Accumulate,
        prepared: &PreparedProduct,
    ) -> InFlight<&'a mut Accumulator> {
        self.issue_prepared(accumulator, accumulate, prepared);
        InFlight { group: self.commit_products(), accumulator }
    }

    #[track_caller]
    fn issue_prepared(
        &mut self,
        accumulator: &Accumulator,
        accumulate: Accumulate,
        prepared: &PreparedProduct,
    ) {
        let PreparedProduct { a, b, first_a, first_b } = prepared;
        self.push(Instruction::WgmmaFence);
        self.issue_steps(accumulator, accumulate, a, *b, |k, matrix, side, step| {
            let first = match side {
                Side::A => first_a.expect("computed for one in shared memory"),
                Side::B => *first_b,
            };
            Descriptor::of(matrix, side).after(k, first, step)
        });
    }

    #[track_caller]
    fn commit_products(&mut self) -> u32 {
        self.push(Instruction::WgmmaCommit);
        self.wgmma_groups += 1;
        self.wgmma_groups
    }

    /// Issues one `wgmma` for each 32 bytes of the inner extent.
    #[track_caller]
    fn issue_product(
        &mut self,
        accumulator: &Accumulator,
        accumulate: Accumulate,
        a: &MatrixA,
        b: Matrix,
    ) {
        let encoded_a = match a {
            MatrixA::Shared(matrix) => Some(self.encode_address(matrix.tile.address)),
            MatrixA::Registers(_) => None,
        };
        let encoded_b = self.encode_address(b.tile.address);
        self.issue_steps(accumulator, accumulate, a, b, |k, matrix, side, step| {
            let encoded = match side {
                Side::A => encoded_a.expect("encoded above"),
                Side::B => encoded_b,
            };
            Descriptor::of(matrix, side).at_step(k, encoded, step)
        });
    }

    /// Issues one `wgmma` for each 32 bytes of the inner extent, with the descriptors that
    /// `descriptor` returns for an operand and a step.
    #[track_caller]
    fn issue_steps(
        &mut self,
        accumulator: &Accumulator,
        accumulate: Accumulate,
        a: &MatrixA,
        b: Matrix,
        descriptor: impl Fn(&mut Builder, &Matrix, Side, u32) -> crate::Register,
    ) {
        let (a_element, inner) = match a {
            MatrixA::Shared(matrix) => (matrix.tile.layout.element, matrix.columns()),
            MatrixA::Registers(fragment) => (fragment.element, fragment.columns()),
        };
        if inner != b.rows() {
            let rows = b.rows();
            self.misuse(format!("a product of {inner} columns with {rows} rows"));
        }
        if accumulator.columns() != b.columns() {
            let (columns, wanted) = (b.columns(), accumulator.columns());
            self.misuse(format!("{columns} columns for an accumulator of {wanted}"));
        }
        if let MatrixA::Shared(matrix) = a
            && matrix.rows() != 64
        {
            self.misuse(format!("the first operand has {} rows, not 64", matrix.rows()));
        }
        let step_columns = 32 / a_element.bytes();
        for step in 0..inner / step_columns {
            let a = match a {
                MatrixA::Shared(matrix) => WgmmaA::Shared {
                    descriptor: descriptor(self, matrix, Side::A, step),
                    transpose: matrix.transposed,
                },
                MatrixA::Registers(fragment) => {
                    let first = 4 * step as usize;
                    let registers = fragment.registers[first..first + 4].try_into();
                    WgmmaA::Registers(registers.expect("four registers a step"))
                }
            };
            let b_descriptor = descriptor(self, &b, Side::B, step);
            self.push(Instruction::Wgmma {
                n: b.columns(),
                a_element,
                b_element: b.tile.layout.element,
                accumulator: Element::F32,
                d: accumulator.registers.iter().map(|r| r.register).collect(),
                accumulate: if step == 0 { accumulate } else { Accumulate::Yes },
                a,
                b: b_descriptor,
                // The hardware calls an operand transposed when it is not K-major. `B` as it lies
                // (K rows by N columns) is contiguous along N.
                b_transpose: !b.transposed,
                negate_a: false,
                negate_b: false,
            });
        }
    }

    /// Returns the address field of a descriptor: bits 4 to 17 of the address. In a cluster the
    /// bits above encode the rank of the block and are masked off; without a cluster they are zero.
    #[track_caller]
    fn encode_address(&mut self, address: Reg<SharedAddress>) -> Reg<U64> {
        let mut bits: Value<U32> = address.reinterpret();
        if self.cluster_size() > 1 {
            bits = bits & 0x3_FFFF;
        }
        self.eval((bits >> 4).convert::<U64>())
    }
}

/// The side of the product that a matrix is on. As it lies, `A` is contiguous along the inner (K)
/// extent; `B` is when it is transposed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    A,
    B,
}

/// The constant fields of a shared-memory descriptor, and its increments along the inner (K) extent
/// of the product.
///
/// The meaning of the two strides depends on the layout. K-major and swizzled: the stride offset is
/// the size of the eight-row swizzle pattern and the leading offset is ignored; unswizzled, the
/// leading offset is the distance between 16-byte columns. MN-major and swizzled: the leading
/// offset is the distance between panels and the stride offset that between groups of eight rows
/// along K; unswizzled, the two change places.
struct Descriptor {
    constant: u64,
    /// The offset in bytes of a 32-byte step along the inner extent, by its index.
    step_bytes: fn(&SharedTile, u32) -> u32,
    tile: SharedTile,
}

impl Descriptor {
    fn of(matrix: &Matrix, side: Side) -> Self {
        let layout = matrix.tile.layout;
        let inner_contiguous = matrix.transposed == (side == Side::B);
        let pattern = 8 * layout.swizzle.width();
        let panel = layout.panel_bytes();
        let (leading, stride) = match (inner_contiguous, layout.swizzle) {
            (true, Swizzle::None) => (panel, pattern),
            (true, _) => (16, pattern),
            (false, Swizzle::None) => (pattern, panel),
            (false, _) => (panel, pattern),
        };
        let field = |bytes: u32| (bytes as u64 >> 4) & 0x3FFF;
        let constant =
            field(leading) << 16 | field(stride) << 32 | layout.swizzle.descriptor_code() << 62;
        let step_bytes = if inner_contiguous { step_along_row } else { step_along_column };
        Descriptor { constant, step_bytes, tile: matrix.tile }
    }

    #[track_caller]
    fn at_step(&self, k: &mut Builder, encoded: Reg<U64>, step: u32) -> crate::Register {
        let offset = (self.step_bytes)(&self.tile, step) as u64 >> 4;
        add(k, encoded.into(), self.constant + offset)
    }

    /// Returns the descriptor of a step, given that of the first step.
    #[track_caller]
    fn after(&self, k: &mut Builder, first: crate::Register, step: u32) -> crate::Register {
        match (self.step_bytes)(&self.tile, step) as u64 >> 4 {
            0 => first,
            offset => add(k, Operand::Register(first), offset),
        }
    }
}

#[track_caller]
fn add(k: &mut Builder, a: Operand, b: u64) -> crate::Register {
    let dst = k.register::<U64>();
    k.push(Instruction::Binary {
        operation: crate::BinaryOperation::Add,
        ty: crate::Type::U64,
        dst: dst.register,
        a,
        b: Operand::Immediate(b),
    });
    dst.register
}

/// Returns the offset of a step where the inner extent runs along the rows of the tile: through one
/// panel, then on to the next.
fn step_along_row(tile: &SharedTile, step: u32) -> u32 {
    let bytes = step * 32;
    let width = tile.layout.swizzle.width();
    bytes / width * tile.layout.panel_bytes() + bytes % width
}

/// Returns the offset of a step where the inner extent runs down the columns of the tile.
fn step_along_column(tile: &SharedTile, step: u32) -> u32 {
    step * (32 / tile.layout.element.bytes()) * tile.layout.swizzle.width()
}
