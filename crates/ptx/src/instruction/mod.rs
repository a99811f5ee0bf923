//! The instructions, as data.
//!
//! One variant is one PTX instruction family; its fields are the modifiers and operands.
//! [`Instruction::operands`] lists what each instruction reads and writes and of which type, once,
//! for the validator and the simulator. [`Instruction::requirement`] says which hardware feature
//! and which PTX version it needs. Only the printer turns instructions into text.

mod modifier;
mod operands;
mod requirement;

pub use modifier::*;
pub use operands::{Access, Expected};
pub use requirement::Requirement;

use crate::{Address, Element, Operand, ParameterId, Register, Space, Type};

/// One instruction of a kernel.
///
/// Convention of the field names: `dst` is written, everything else is read
/// (the accumulators of [`Mma`](Instruction::Mma) and
/// [`Wgmma`](Instruction::Wgmma) are named where they stand). Where the
/// operand's type does not follow from the variant, it is the `ty` field or
/// the type of the `dst` register.
///
/// The enum is exhaustive on purpose: a reader of programs (the printer, the
/// simulator) that does not give a new instruction a meaning must not compile.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the variants speak for their fields
pub enum Instruction {
    // ---- values ------------------------------------------------------------
    /// Copies bits between registers of equal width, or a constant into one.
    Move { dst: Register, src: Operand },
    /// An operation on one operand, with a result of the same type.
    Unary { operation: UnaryOperation, ty: Type, dst: Register, a: Operand },
    /// An operation on two operands, with a result of the same type. For shifts `b` is a `U32`.
    Binary { operation: BinaryOperation, ty: Type, dst: Register, a: Operand, b: Operand },
    /// `dst = a * b + c`, rounded once for floats; the low half for integers.
    MultiplyAdd { ty: Type, dst: Register, a: Operand, b: Operand, c: Operand },
    /// The full 64-bit product of two 32-bit integers; `ty` is `U32` or `S32`.
    MultiplyWide { ty: Type, dst: Register, a: Operand, b: Operand },
    /// Compares `a` with `b`. Float comparisons are false on NaN unless the comparison is one of
    /// the unordered ones or [`Comparison::NotEqual`].
    Compare { comparison: Comparison, ty: Type, dst: Register, a: Operand, b: Operand },
    /// `dst = condition ? a : b`.
    Select { ty: Type, dst: Register, condition: Register, a: Operand, b: Operand },
    /// Picks four of the eight bytes of `a` (0..4) and `b` (4..8), each by one nibble of the
    /// selector, the lowest first.
    PermuteBytes { dst: Register, a: Operand, b: Operand, selector: Operand },
    /// Shifts `high:low` by `amount` modulo 32; gives the upper word of a `left` shift, the lower
    /// word of a right shift.
    FunnelShift { left: bool, dst: Register, low: Operand, high: Operand, amount: Operand },
    /// Any bitwise function of three words (`lop3`); `table` is its truth table, the result of the
    /// function on 0xF0, 0xCC and 0xAA.
    Logic3 { dst: Register, a: Operand, b: Operand, c: Operand, table: u8 },
    /// Converts between the register types of `src` and `dst`: between integers of any width and
    /// sign (extending or truncating), between integers and `f32`, and between `f32` and `f16` or
    /// `bf16`. Conversions to a float round to nearest even, those to an integer toward zero.
    Convert { dst: Register, src: Register },
    /// Rounds two `f32` to nearest even into one packed register (`F16x2`, `BF16x2`, `E4M3x2`,
    /// `E5M2x2`). The 8-bit types saturate to their largest finite value.
    ConvertPair { dst: Register, high: Operand, low: Operand },
    /// Converts between `F16x2` and `E4M3x2` or `E5M2x2`, in either direction.
    ConvertPacked { dst: Register, src: Register },
    /// Splits a 32- or 64-bit register into halves.
    Split { low: Register, high: Register, src: Register },
    /// Joins two halves into a 32- or 64-bit register.
    Join { dst: Register, low: Operand, high: Operand },
    /// Reads a special register.
    ReadSpecial { dst: Register, special: SpecialRegister },
    /// Reads a scalar kernel parameter.
    ReadParameter { dst: Register, parameter: ParameterId },
    /// Gives the generic address of a tensor map that is a kernel parameter.
    TensorMapAddress { dst: Register, parameter: ParameterId },
    /// Gives the address of a byte of this block's dynamic shared memory.
    SharedBase { dst: Register, offset: u32 },

    // ---- memory ------------------------------------------------------------
    /// Loads one, two or four registers from consecutive addresses.
    Load { dst: Vec<Register>, space: Space, address: Address, order: LoadOrder, cache: LoadCache },
    /// Loads one byte of global memory into a 32-bit register, zero-extended.
    LoadByte { dst: Register, address: Address },
    /// Stores one, two or four registers to consecutive addresses.
    Store {
        src: Vec<Register>,
        space: Space,
        address: Address,
        order: StoreOrder,
        cache: StoreCache,
    },
    /// Prefetches the cache line of a global address into L2.
    PrefetchL2 { address: Address },
    /// Atomically updates the value at `address` and gives the old one.
    Atomic {
        operation: AtomicOperation,
        ty: Type,
        dst: Register,
        space: Space,
        address: Address,
        value: Operand,
        scope: Scope,
        order: AtomicOrder,
    },
    /// Atomically stores `value` if the old value equals `expected`; gives the old value.
    CompareAndSwap {
        ty: Type,
        dst: Register,
        space: Space,
        address: Address,
        expected: Operand,
        value: Operand,
        scope: Scope,
        order: AtomicOrder,
    },
    /// Like [`Atomic`](Instruction::Atomic) without a result. Takes one register, or adds two or
    /// four `f32` to consecutive global addresses.
    Reduce {
        operation: AtomicOperation,
        ty: Type,
        src: Vec<Register>,
        space: Space,
        address: Address,
        scope: Scope,
        order: AtomicOrder,
    },
    /// Loads one, two or four 8x8 matrices of 16-bit elements from shared
    /// memory; lane `8i + r` gives the address of row `r` of matrix `i`.
    LoadMatrix { dst: Vec<Register>, address: Address, transpose: bool },
    /// Stores matrices as [`LoadMatrix`](Instruction::LoadMatrix) loads them.
    StoreMatrix { src: Vec<Register>, address: Address, transpose: bool },

    // ---- across the lanes of a warp ----------------------------------------
    /// Gives each lane the 32-bit value of another lane. `clamp` packs the segment mask and the
    /// bound as PTX defines them; 31 exchanges over the whole warp (0 for [`ShuffleMode::Up`]).
    /// `valid` receives whether the source lane was in range.
    Shuffle {
        mode: ShuffleMode,
        dst: Register,
        valid: Option<Register>,
        src: Register,
        lane: Operand,
        clamp: u32,
    },
    /// Gives whether the predicate is true in all lanes, or in any.
    Vote { mode: VoteMode, dst: Register, predicate: Register },
    /// Gives a mask of the lanes whose predicate is true.
    Ballot { dst: Register, predicate: Register },
    /// Gives a predicate that is true in exactly one lane of the warp, always the same one.
    Elect { dst: Register },
    /// Waits for all lanes of the warp, which then see each other's writes.
    WarpSync,

    // ---- tensor cores -------------------------------------------------------
    /// `d = a * b + c` on a warp: `a` row-major, `b` column-major.
    Mma {
        shape: MmaShape,
        element: Element,
        accumulator: Element,
        d: Vec<Register>,
        a: Vec<Register>,
        b: Vec<Register>,
        c: Vec<Register>,
    },
    /// `d = a * b (+ d)` on a warpgroup, asynchronously: M is 64, K is 32 bytes. The registers may
    /// not be touched until the group of this instruction has been waited for.
    ///
    /// There is one accumulator, `d`, read and written in place. A second
    /// list of accumulators, which PTX does not have, cannot be written:
    ///
    /// ```compile_fail,E0559
    /// # use flashcore_ptx::{Accumulate, Element, Instruction, Register, WgmmaA};
    /// # let (a, b, out) = (Register(0), Register(1), vec![Register(2)]);
    /// Instruction::Wgmma {
    ///     c: out.clone(), // no such field
    ///     d: out,
    ///     n: 8,
    ///     a_element: Element::F16,
    ///     b_element: Element::F16,
    ///     accumulator: Element::F32,
    ///     accumulate: Accumulate::Yes,
    ///     a: WgmmaA::Shared { descriptor: a, transpose: false },
    ///     b,
    ///     b_transpose: false,
    ///     negate_a: false,
    ///     negate_b: false,
    /// };
    /// ```
    Wgmma {
        n: u32,
        a_element: Element,
        b_element: Element,
        accumulator: Element,
        d: Vec<Register>,
        accumulate: Accumulate,
        a: WgmmaA,
        b: Register,
        b_transpose: bool,
        negate_a: bool,
        negate_b: bool,
    },
    /// Orders earlier register accesses before the [`Wgmma`](Instruction::Wgmma)s that follow.
    WgmmaFence,
    /// Commits the [`Wgmma`](Instruction::Wgmma)s since the last commit as a group.
    WgmmaCommit,
    /// Waits until at most `pending` of the latest groups are unfinished.
    WgmmaWait { pending: u32 },

    // ---- barriers ------------------------------------------------------------
    /// Arrives at a named barrier of the block (0 to 15) and waits for `threads` threads, or for
    /// all threads of the block if absent.
    BarrierSync { barrier: Operand, threads: Option<Operand> },
    /// Arrives at a named barrier without waiting.
    BarrierArrive { barrier: Operand, threads: Operand },
    /// Arrives at the barrier of the whole cluster.
    ClusterArrive { order: ClusterOrder },
    /// Waits for all threads of the cluster to have arrived.
    ClusterWait,
    /// Initialises an mbarrier for `count` arrivals per phase.
    MbarrierInit { address: Address, count: Operand },
    /// Invalidates an mbarrier, so that its 8 bytes can be used as ordinary memory.
    MbarrierInvalidate { address: Address },
    /// Arrives `count` times, once if absent. In [`Space::Cluster`] the mbarrier may be another
    /// block's.
    MbarrierArrive { space: Space, address: Address, count: Option<Operand> },
    /// Adds `bytes` to the transaction count of this phase, then arrives once.
    MbarrierArriveExpect { space: Space, address: Address, bytes: Operand },
    /// Adds `bytes` to the transaction count of this phase.
    MbarrierExpect { address: Address, bytes: Operand },
    /// Tests whether the phase with this parity has ended, after a
    /// hardware-dependent short wait.
    MbarrierTryWait { dst: Register, address: Address, parity: Operand, scope: Scope },
    /// Waits until the phase with this parity has ended.
    MbarrierWait { address: Address, parity: Operand, scope: Scope },
    /// Arrives when the earlier [`CopyAsync`](Instruction::CopyAsync)s of this thread are done, as
    /// one of the arrivals that the mbarrier was initialised for
    /// (`cp.async.mbarrier.arrive.noinc`).
    MbarrierArriveOnCopies { address: Address },

    // ---- asynchronous copies -------------------------------------------------
    /// Copies 4, 8 or 16 bytes from global to shared memory. With `source_bytes`, only so many
    /// bytes are read and the rest become zeros.
    CopyAsync {
        dst: Address,
        src: Address,
        bytes: u32,
        source_bytes: Option<Operand>,
        cache: CopyCache,
    },
    /// Commits the [`CopyAsync`](Instruction::CopyAsync)s of this thread since the last commit as a
    /// group.
    CopyAsyncCommit,
    /// Waits until at most `pending` of the latest groups are unfinished.
    CopyAsyncWait { pending: u32 },
    /// Copies `bytes` (a multiple of 16) from global to shared memory and reports them to an
    /// mbarrier. With `multicast`, a mask of blocks, the data goes to several blocks of the
    /// cluster.
    BulkLoad {
        dst: Address,
        src: Address,
        bytes: Operand,
        barrier: Address,
        multicast: Option<Register>,
    },
    /// Copies `bytes` (a multiple of 16) from shared to global memory.
    BulkStore { dst: Address, src: Address, bytes: Operand },
    /// Adds `bytes` bytes of elements in shared memory to global memory.
    BulkReduceAdd { ty: BulkElement, dst: Address, src: Address, bytes: Operand },
    /// Copies a box of a tensor into shared memory and reports its bytes to an mbarrier. With
    /// `multicast`, a mask of blocks, the data goes to several blocks of the cluster.
    TensorLoad {
        dst: Address,
        map: Register,
        coordinates: Vec<Operand>,
        barrier: Address,
        multicast: Option<Register>,
    },
    /// Copies a box from shared memory into a tensor.
    TensorStore { map: Register, coordinates: Vec<Operand>, src: Address },
    /// Adds a box of shared memory to a tensor.
    TensorReduceAdd { map: Register, coordinates: Vec<Operand>, src: Address },
    /// Commits this thread's bulk stores since the last commit as a group.
    BulkCommit,
    /// Waits until at most `pending` of this thread's latest groups of bulk
    /// stores are unfinished, or, with `read_only`, have yet to read their source.
    BulkWait { pending: u32, read_only: bool },
    /// Prefetches a tensor map into the descriptor cache.
    TensorMapPrefetch { map: Register },

    // ---- order and control ---------------------------------------------------
    /// Orders memory accesses.
    Fence(Fence),
    /// Changes the number of registers of each thread of this warpgroup (`setmaxnreg`).
    SetMaxRegisters { change: RegisterChange, count: u32 },
    /// Gives the address in the shared memory of block `rank` of the cluster that corresponds to a
    /// shared address of this block.
    MapShared { dst: Register, address: Register, rank: Operand },
    /// Waits for the grids that this one depends on to finish.
    GridDependencyWait,
    /// Allows dependent grids to launch.
    GridDependencyLaunch,
    /// Suspends the thread for about this long.
    Sleep { nanoseconds: Operand },
    /// Ends the kernel with an error.
    Trap,
}

/// The `A` operand of a [`Instruction::Wgmma`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the variants speak for their fields
pub enum WgmmaA {
    /// A tile in shared memory, given by its descriptor.
    Shared { descriptor: Register, transpose: bool },
    /// Four registers of packed elements in each thread.
    Registers([Register; 4]),
}

/// Whether a [`Instruction::Wgmma`] adds to its accumulator or overwrites it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulate {
    /// `d = a * b`; the old value is not read.
    No,
    /// `d = a * b + d`.
    Yes,
    /// Adds where the predicate is true, else overwrites.
    If(Register),
}
