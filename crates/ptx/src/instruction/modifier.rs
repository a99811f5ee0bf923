//! The modifiers of instructions: small enums that choose between forms of an instruction.

use crate::Element;

/// Operations on one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnaryOperation {
    /// `-a`.
    Negate,
    /// `|a|`.
    Absolute,
    /// Every bit inverted; of a predicate, its negation.
    Not,
    /// `2^a`, approximate: at most 2 units in the last place off for `f32`.
    Exp2,
    /// The binary logarithm, approximate.
    Log2,
    /// `1 / a`, approximate: at most 1 unit in the last place off.
    Reciprocal,
    /// `1 / sqrt(a)`, approximate.
    ReciprocalSqrt,
    /// `sqrt(a)`, approximate.
    Sqrt,
    /// The hyperbolic tangent, approximate.
    Tanh,
    /// The number of bits that are set.
    PopulationCount,
    /// The number of leading zero bits.
    LeadingZeros,
}

impl UnaryOperation {
    /// Every operation.
    pub const ALL: [Self; 11] = [
        Self::Negate,
        Self::Absolute,
        Self::Not,
        Self::Exp2,
        Self::Log2,
        Self::Reciprocal,
        Self::ReciprocalSqrt,
        Self::Sqrt,
        Self::Tanh,
        Self::PopulationCount,
        Self::LeadingZeros,
    ];
}

/// Operations on two values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BinaryOperation {
    /// `a + b`.
    Add,
    /// `a - b`.
    Subtract,
    /// `a * b`, the low half for integers.
    Multiply,
    /// The high half of the integer product.
    MultiplyHigh,
    /// `a / b`; for floats the approximate division.
    Divide,
    /// `a / b` of floats, rounded to nearest even.
    DivideRounded,
    /// The remainder of the integer division.
    Remainder,
    /// The smaller operand; of a number and a NaN, the number.
    Minimum,
    /// The larger operand; of a number and a NaN, the number.
    Maximum,
    /// `a & b`: bitwise for integers, logical for predicates.
    And,
    /// `a | b`: bitwise for integers, logical for predicates.
    Or,
    /// `a ^ b`: bitwise for integers, logical for predicates.
    Xor,
    /// Left shift; amounts at or beyond the width give 0.
    ShiftLeft,
    /// Right shift, arithmetic for signed integers.
    ShiftRight,
}

impl BinaryOperation {
    /// Every operation.
    pub const ALL: [Self; 14] = [
        Self::Add,
        Self::Subtract,
        Self::Multiply,
        Self::MultiplyHigh,
        Self::Divide,
        Self::DivideRounded,
        Self::Remainder,
        Self::Minimum,
        Self::Maximum,
        Self::And,
        Self::Or,
        Self::Xor,
        Self::ShiftLeft,
        Self::ShiftRight,
    ];
}

/// A comparison of two values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Comparison {
    /// `a == b`.
    Equal,
    /// `a != b`; true on NaN.
    NotEqual,
    /// `a < b`.
    Less,
    /// `a <= b`.
    LessOrEqual,
    /// `a > b`.
    Greater,
    /// `a >= b`.
    GreaterOrEqual,
    /// `a > b`, or either is NaN. Floats only.
    GreaterOrUnordered,
    /// Either is NaN. Floats only.
    Unordered,
}

impl Comparison {
    /// Every comparison.
    pub const ALL: [Self; 8] = [
        Self::Equal,
        Self::NotEqual,
        Self::Less,
        Self::LessOrEqual,
        Self::Greater,
        Self::GreaterOrEqual,
        Self::GreaterOrUnordered,
        Self::Unordered,
    ];
}

/// A special register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SpecialRegister {
    /// The thread's index in its block, along x, y or z.
    Thread(Axis),
    /// The block's extent in threads.
    BlockExtent(Axis),
    /// The block's index in the grid.
    Block(Axis),
    /// The grid's extent in blocks.
    GridExtent(Axis),
    /// The cluster's index in the grid.
    Cluster(Axis),
    /// The grid's extent in clusters.
    ClusterGridExtent(Axis),
    /// The block's rank in its cluster.
    ClusterRank,
    /// The number of blocks in the cluster.
    ClusterSize,
    /// The thread's lane in its warp.
    Lane,
    /// A mask of the lanes before this one.
    LanesBefore,
    /// The multiprocessor that executes the block.
    Multiprocessor,
    /// The number of multiprocessors.
    MultiprocessorCount,
    /// A cycle counter of the multiprocessor, 32 bits.
    Clock,
    /// A cycle counter of the multiprocessor, 64 bits.
    Clock64,
    /// A coarse clock in nanoseconds that all multiprocessors of the GPU share.
    GlobalTimer,
}

impl SpecialRegister {
    /// Returns every special register.
    pub fn all() -> impl Iterator<Item = Self> {
        let along = [
            Self::Thread,
            Self::BlockExtent,
            Self::Block,
            Self::GridExtent,
            Self::Cluster,
            Self::ClusterGridExtent,
        ];
        let along = along.into_iter().flat_map(|it| [Axis::X, Axis::Y, Axis::Z].map(it));
        along.chain([
            Self::ClusterRank,
            Self::ClusterSize,
            Self::Lane,
            Self::LanesBefore,
            Self::Multiprocessor,
            Self::MultiprocessorCount,
            Self::Clock,
            Self::Clock64,
            Self::GlobalTimer,
        ])
    }

    /// Returns whether the register is 64 bits wide.
    pub const fn is_wide(self) -> bool {
        matches!(self, SpecialRegister::Clock64 | SpecialRegister::GlobalTimer)
    }
}

/// An axis of a grid or block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// The fastest moving.
    X,
    /// The middle one.
    Y,
    /// The slowest moving.
    Z,
}

/// The set of threads among which an ordering or an atomic operation takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// The block.
    Block,
    /// The cluster.
    Cluster,
    /// The GPU.
    Gpu,
    /// The whole system, including other GPUs and the host.
    System,
}

impl Scope {
    /// Every scope.
    pub const ALL: [Self; 4] = [Self::Block, Self::Cluster, Self::Gpu, Self::System];
}

/// The ordering of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LoadOrder {
    /// An ordinary load.
    Weak,
    /// Sees other threads' writes, but orders nothing.
    Relaxed(Scope),
    /// Later accesses stay after it.
    Acquire(Scope),
}

/// The ordering of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreOrder {
    /// An ordinary store.
    Weak,
    /// Becomes visible to other threads, but orders nothing.
    Relaxed(Scope),
    /// Earlier accesses stay before it.
    Release(Scope),
}

/// The caching of a load from global memory. Only for [`LoadOrder::Weak`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LoadCache {
    /// The hardware's choice.
    Default,
    /// Loaded through the read-only path: nothing writes the data while the kernel runs.
    ReadOnly,
    /// Loaded through the read-only path and not kept in L1.
    ReadOnlyOnce,
    /// Cached in L2 only.
    L2Only,
    /// Likely not used again.
    Streaming,
    /// Evicted from L1 before other lines.
    EvictFirst,
    /// Kept in L1 longer than other lines.
    EvictLast,
}

impl LoadCache {
    /// Every kind of caching.
    pub const ALL: [Self; 7] = [
        Self::Default,
        Self::ReadOnly,
        Self::ReadOnlyOnce,
        Self::L2Only,
        Self::Streaming,
        Self::EvictFirst,
        Self::EvictLast,
    ];
}

/// The caching of a store to global memory. Only for [`StoreOrder::Weak`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreCache {
    /// The hardware's choice.
    Default,
    /// Cached in L2 only.
    L2Only,
    /// Likely not used again.
    Streaming,
    /// Not kept in L1.
    NoAllocate,
}

impl StoreCache {
    /// Every kind of caching.
    pub const ALL: [Self; 4] = [Self::Default, Self::L2Only, Self::Streaming, Self::NoAllocate];
}

/// The caching of an [`Instruction::CopyAsync`](super::Instruction::CopyAsync).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CopyCache {
    /// Cached at every level.
    All,
    /// Cached in L2 only; for copies of 16 bytes.
    L2Only,
}

/// Atomic operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AtomicOperation {
    /// Adds.
    Add,
    /// Keeps the smaller.
    Minimum,
    /// Keeps the larger.
    Maximum,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise exclusive or.
    Xor,
    /// Stores the new value. [`Instruction::Atomic`](super::Instruction::Atomic) only.
    Exchange,
}

impl AtomicOperation {
    /// Every operation.
    pub const ALL: [Self; 7] =
        [Self::Add, Self::Minimum, Self::Maximum, Self::And, Self::Or, Self::Xor, Self::Exchange];
}

/// The ordering of an atomic operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AtomicOrder {
    /// Orders nothing else.
    Relaxed,
    /// Later accesses stay after it. Not for reductions.
    Acquire,
    /// Earlier accesses stay before it.
    Release,
    /// Both acquire and release. Not for reductions.
    AcquireRelease,
}

impl AtomicOrder {
    /// Every order.
    pub const ALL: [Self; 4] = [Self::Relaxed, Self::Acquire, Self::Release, Self::AcquireRelease];
}

/// The lane that a shuffle reads from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ShuffleMode {
    /// The lane with this index.
    Index,
    /// This lane minus the distance.
    Up,
    /// This lane plus the distance.
    Down,
    /// This lane exclusive-ored with the distance.
    Butterfly,
}

impl ShuffleMode {
    /// Every mode.
    pub const ALL: [Self; 4] = [Self::Index, Self::Up, Self::Down, Self::Butterfly];
}

/// The condition that a vote evaluates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VoteMode {
    /// The predicate is true in every lane.
    All,
    /// The predicate is true in at least one lane.
    Any,
}

/// Shapes of the warp-level matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MmaShape {
    /// 16 x 8 x 8, 16-bit elements.
    M16N8K8,
    /// 16 x 8 x 16, 16-bit elements.
    M16N8K16,
    /// 16 x 8 x 32, 8-bit elements.
    M16N8K32,
}

impl MmaShape {
    /// Every shape.
    pub const ALL: [Self; 3] = [Self::M16N8K8, Self::M16N8K16, Self::M16N8K32];
}

/// The memory order of an arrival at the cluster barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClusterOrder {
    /// Earlier accesses are visible to the threads that wait.
    Release,
    /// Synchronises execution only, without ordering memory.
    Relaxed,
}

/// Elements a bulk copy can add into global memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BulkElement {
    /// A float element: `f32`, `f16` or `bf16`.
    Float(Element),
    /// An unsigned 32-bit integer.
    U32,
}

/// Fences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fence {
    /// Acquire and release among the threads of the scope.
    AcquireRelease(Scope),
    /// Sequential consistency among the threads of the scope.
    SequentiallyConsistent(Scope),
    /// Makes initialised mbarriers visible to the cluster and to the async proxy.
    MbarrierInit,
    /// Orders ordinary accesses of this block's shared memory with those of
    /// the tensor cores and the copy engine (the async proxy).
    ProxyAsyncShared,
    /// Orders ordinary accesses of global memory with those of the async proxy.
    ProxyAsyncGlobal,
    /// Orders ordinary accesses of all memory with those of the async proxy.
    ProxyAsync,
}

/// A change of a warpgroup's register budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RegisterChange {
    /// Acquires registers, waiting until they are free.
    Increase,
    /// Releases registers.
    Decrease,
}
