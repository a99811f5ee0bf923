//! The modifiers of instructions: small enums that choose a form.

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
    /// How many bits are set.
    PopulationCount,
    /// How many of the highest bits are clear.
    LeadingZeros,
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
    /// The smaller; of a number and a NaN, the number.
    Minimum,
    /// The larger; of a number and a NaN, the number.
    Maximum,
    /// Bitwise, or of predicates.
    And,
    /// Bitwise, or of predicates.
    Or,
    /// Bitwise, or of predicates.
    Xor,
    /// Left shift; amounts beyond the width give 0.
    ShiftLeft,
    /// Right shift, arithmetic for signed integers.
    ShiftRight,
}

/// How two values are compared.
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

/// Special registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Special {
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
    /// How many blocks the cluster has.
    ClusterSize,
    /// The thread's lane in its warp.
    Lane,
    /// The lanes before this one, as bits.
    LanesBefore,
    /// The multiprocessor that executes the block.
    Multiprocessor,
    /// How many multiprocessors there are.
    MultiprocessorCount,
    /// A cycle counter of the multiprocessor, 32 bits.
    Clock,
    /// The same, 64 bits.
    Clock64,
    /// Nanoseconds on a clock common to the GPU, coarse.
    GlobalTimer,
}

impl Special {
    /// Whether it is 64 bits wide.
    pub const fn is_wide(self) -> bool {
        matches!(self, Special::Clock64 | Special::GlobalTimer)
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

/// The threads that an ordering or an atomic operation reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// The block.
    Block,
    /// The cluster.
    Cluster,
    /// The GPU.
    Gpu,
    /// Everything, other GPUs and the host included.
    System,
}

/// The ordering of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LoadOrder {
    /// An ordinary load.
    Weak,
    /// Sees other threads' writes, orders nothing.
    Relaxed(Scope),
    /// Later accesses stay after it.
    Acquire(Scope),
}

/// The ordering of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreOrder {
    /// An ordinary store.
    Weak,
    /// Seen by other threads, orders nothing.
    Relaxed(Scope),
    /// Earlier accesses stay before it.
    Release(Scope),
}

/// Where a load from global memory leaves its line. Only for [`LoadOrder::Weak`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LoadCache {
    /// The hardware's choice.
    Default,
    /// Through the read-only path: nobody writes it while the kernel runs.
    ReadOnly,
    /// Read-only, and not kept in the first-level cache.
    ReadOnlyOnce,
    /// In the second-level cache only.
    L2Only,
    /// Likely not used again.
    Streaming,
    /// Evicted from the first-level cache before others.
    EvictFirst,
    /// Kept in the first-level cache longer than others.
    EvictLast,
}

/// Where a store to global memory leaves its line. Only for [`StoreOrder::Weak`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreCache {
    /// The hardware's choice.
    Default,
    /// In the second-level cache only.
    L2Only,
    /// Likely not used again.
    Streaming,
    /// Not kept in the first-level cache.
    NoAllocate,
}

/// What [`Instruction::CopyAsync`](super::Instruction::CopyAsync) leaves in the caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CopyCache {
    /// At every level.
    All,
    /// In the second-level cache only; copies of 16 bytes.
    L2Only,
}

/// What a cache policy asks of the second-level cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Eviction {
    /// Goes first.
    First,
    /// Goes last.
    Last,
    /// The default.
    Normal,
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
    /// Bitwise.
    And,
    /// Bitwise.
    Or,
    /// Bitwise.
    Xor,
    /// Stores the new value. [`Instruction::Atomic`](super::Instruction::Atomic) only.
    Exchange,
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
    /// Both. Not for reductions.
    AcquireRelease,
}

/// Which lane a shuffle reads.
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

/// What a vote asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VoteMode {
    /// Is it true in every lane?
    All,
    /// Is it true in any lane?
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

/// How arriving at the cluster's barrier orders memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClusterOrder {
    /// Earlier accesses are seen by who waits.
    Release,
    /// No order: execution only.
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
    /// Makes initialised memory barriers visible to the cluster and the copy engine.
    MbarrierInit,
    /// Orders ordinary accesses of this block's shared memory with those of
    /// the tensor cores and the copy engine (the async proxy).
    ProxyAsyncShared,
    /// The same for global memory.
    ProxyAsyncGlobal,
    /// The same for all memory.
    ProxyAsync,
}

/// A change of a warpgroup's register budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RegisterChange {
    /// Takes registers, waiting until they are free.
    Increase,
    /// Gives registers back.
    Decrease,
}
