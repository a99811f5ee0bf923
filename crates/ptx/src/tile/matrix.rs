//! Products on the tensor cores of a warpgroup.

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
    /// Rows of the operand.
    pub fn rows(&self) -> u32 {
        if self.transposed { self.tile.columns } else { self.tile.rows }
    }

    /// Columns of the operand.
    pub fn columns(&self) -> u32 {
        if self.transposed { self.tile.rows } else { self.tile.columns }
    }
}

/// The first operand of a product: 64 rows in shared memory or in registers.
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

/// A product that the tensor cores are working on.
///
/// The accumulator is inside (or borrowed), so it cannot be touched until
/// [`wait`](InFlight::wait) gives it back.
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

/// A product that can be started without computing anything ([`Builder::prepare_product`]).
#[derive(Debug)]
pub struct Prepared {
    a: MatrixA,
    b: Matrix,
    /// The descriptors of the first step.
    first_a: Option<crate::Register>,
    first_b: crate::Register,
}

impl Builder {
    /// Starts `a * b`: 64 rows of `a` times all columns of `b`.
    ///
    /// All 128 threads of a warpgroup call this. Products finish in the order
    /// they were started. The handle counts the products started after it, so
    /// it is waited for in the same pass of the same loop.
    #[track_caller]
    pub fn wgmma(&mut self, a: impl Into<MatrixA>, b: Matrix) -> InFlight<Accumulator> {
        let accumulator = Accumulator::new(self, b.columns());
        self.push(Instruction::WgmmaFence);
        self.issue_product(&accumulator, Accumulate::No, &a.into(), b);
        InFlight { group: self.commit_products(), accumulator }
    }

    /// Starts `accumulator = a * b`, or `+=` by `accumulate`.
    #[track_caller]
    pub fn wgmma_into<'a>(
        &mut self,
        accumulator: &'a mut Accumulator,
        accumulate: Accumulate,
        a: impl Into<MatrixA>,
        b: Matrix,
    ) -> InFlight<&'a mut Accumulator> {
        self.wgmma_chain(accumulator, accumulate, &[(a.into(), b)])
    }

    /// Starts several products into one accumulator, one after the other, as
    /// one group.
    #[track_caller]
    pub fn wgmma_chain<'a>(
        &mut self,
        accumulator: &'a mut Accumulator,
        accumulate: Accumulate,
        operands: &[(MatrixA, Matrix)],
    ) -> InFlight<&'a mut Accumulator> {
        self.push(Instruction::WgmmaFence);
        for (index, (a, b)) in operands.iter().enumerate() {
            let accumulate = if index == 0 { accumulate } else { Accumulate::Yes };
            self.issue_product(accumulator, accumulate, a, *b);
        }
        InFlight { group: self.commit_products(), accumulator }
    }

    /// Starts a product whose wait is [`wait_products`](Builder::wait_products):
    /// for loops that leave one in flight around their end, where no handle
    /// can follow. The validator still sees to it that nothing is touched
    /// before it has landed.
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

    /// Waits until at most the `pending` latest products are in flight.
    #[track_caller]
    pub fn wait_products(&mut self, pending: u32) {
        self.push(Instruction::WgmmaWait { pending });
    }

    /// Computes where the operands of a product lie, so that nothing is left to compute when it
    /// is started. What they hold may come later.
    #[track_caller]
    pub fn prepare_product(&mut self, a: impl Into<MatrixA>, b: Matrix) -> Prepared {
        let mut first = |matrix: &Matrix, side| {
            let encoded = self.encode_address(matrix.tile.address);
            Descriptor::of(matrix, side).at_step(self, encoded, 0)
        };
        let a = a.into();
        let first_a = match &a {
            MatrixA::Shared(matrix) => Some(first(matrix, Side::A)),
            MatrixA::Registers(_) => None,
        };
        Prepared { first_b: first(&b, Side::B), a, b, first_a }
    }

    /// Starts a product that was prepared.
    #[track_caller]
    pub fn wgmma_prepared(&mut self, prepared: &Prepared) -> InFlight<Accumulator> {
        let accumulator = Accumulator::new(self, prepared.b.columns());
        self.issue_prepared(&accumulator, Accumulate::No, prepared);
        InFlight { group: self.commit_products(), accumulator }
    }

    /// The same into an accumulator, or added to it.
    #[track_caller]
    pub fn wgmma_prepared_into<'a>(
        &mut self,
        accumulator: &'a mut Accumulator,
        accumulate: Accumulate,
        prepared: &Prepared,
    ) -> InFlight<&'a mut Accumulator> {
        self.issue_prepared(accumulator, accumulate, prepared);
        InFlight { group: self.commit_products(), accumulator }
    }

    #[track_caller]
    fn issue_prepared(
        &mut self,
        accumulator: &Accumulator,
        accumulate: Accumulate,
        prepared: &Prepared,
    ) {
        let Prepared { a, b, first_a, first_b } = prepared;
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

    /// Issues one instruction for each 32 bytes of the inner extent.
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

    /// The same with descriptors from elsewhere.
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
                // The hardware calls the operand transposed when its inner
                // extent is not the contiguous one: as `b` lies by nature.
                b_transpose: !b.transposed,
                negate_a: false,
                negate_b: false,
            });
        }
    }

    /// The address field of a descriptor: bits 4 to 17 of the address. In a
    /// cluster the upper bits say whose shared memory it is and must go; a
    /// block by itself has none.
    #[track_caller]
    fn encode_address(&mut self, address: Reg<SharedAddress>) -> Reg<U64> {
        let mut bits: Value<U32> = address.reinterpret();
        if self.cluster_size() > 1 {
            bits = bits & 0x3_FFFF;
        }
        self.eval((bits >> 4).convert::<U64>())
    }
}

/// Which operand a matrix is: the left one is contiguous along the inner
/// extent as it lies, the right one when it is transposed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    A,
    B,
}

/// The constant part of a shared-memory descriptor and its step along the
/// inner extent of the product.
///
/// The two strides mean different things by layout. With the inner extent
/// contiguous and swizzled, the stride offset is the pattern of eight rows and
/// the leading offset is ignored; unswizzled, the leading offset is the
/// distance of 16-byte columns. With the outer extent contiguous and
/// swizzled, the leading offset is the distance of panels and the stride
/// offset that of groups of eight inner rows; unswizzled, they change places.
struct Descriptor {
    constant: u64,
    /// Bytes from one 32-byte step of the inner extent to the next, by step.
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

    /// That of a step from that of the first.
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

/// The inner extent runs along the rows of the tile: through the panel, then
/// on to the next one.
fn step_along_row(tile: &SharedTile, step: u32) -> u32 {
    let bytes = step * 32;
    let width = tile.layout.swizzle.width();
    bytes / width * tile.layout.panel_bytes() + bytes % width
}

/// The inner extent runs down the columns of the tile.
fn step_along_column(tile: &SharedTile, step: u32) -> u32 {
    step * (32 / tile.layout.element.bytes()) * tile.layout.swizzle.width()
}
