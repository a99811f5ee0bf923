//! The hazards: kinds of mistakes that a kernel can make, and the reports of them.

use std::fmt;

use ptx::SourceLocation;

use crate::Policy;

macro_rules! hazards {
    ($($(#[$doc:meta])* $kind:ident = $name:literal,)*) => {
        /// A kind of mistake that a kernel can make.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum HazardKind {
            $($(#[$doc])* $kind,)*
        }

        impl HazardKind {
            /// Every kind.
            pub const ALL: &[HazardKind] = &[$(HazardKind::$kind,)*];

            /// Returns the name in messages and tables.
            pub const fn name(self) -> &'static str {
                match self {
                    $(HazardKind::$kind => $name,)*
                }
            }
        }
    };
}

hazards! {
    /// An access outside of any buffer, or past the end of shared memory.
    OutOfBounds = "out of bounds",
    /// An address that is not aligned as the access requires.
    Misaligned = "misaligned address",
    /// Memory is read that nothing has written.
    UninitialisedMemory = "uninitialised memory",
    /// A lane reads a register that it has not written.
    UninitialisedRegister = "uninitialised register",
    /// Two threads of different warps touch the same memory, one writes, and
    /// nothing orders them.
    DataRace = "data race",
    /// Two lanes of one warp touch the same memory, one writes, and nothing orders them: lockstep
    /// execution is not an order.
    LaneRace = "race between lanes",
    /// Lanes of one instruction store different values to one place.
    LaneCollision = "lanes store to one place",
    /// Ordinary accesses and those of the async proxy (the copy engine and the tensor cores) touch
    /// the same memory without a proxy fence in between.
    MissingProxyFence = "missing proxy fence",
    /// The destination of an asynchronous copy is touched before its arrival
    /// has been waited for.
    TouchedBeforeArrival = "touched before arrival",
    /// Memory that an asynchronous copy or product still reads is overwritten.
    OverwrittenInFlight = "operand overwritten in flight",
    /// An accumulator is touched before its product has been waited for.
    AccumulatorInFlight = "accumulator in flight",
    /// A register operand of a product is overwritten before the product has
    /// been waited for.
    OperandInFlight = "operand register in flight",
    /// Registers of a product were touched since the last `wgmma.fence`.
    MissingWgmmaFence = "missing wgmma.fence",
    /// A product is never committed or never waited for.
    NeverWaited = "product never waited for",
    /// The four warps of a warpgroup do not issue the same product or budget.
    WarpgroupMismatch = "warpgroup out of step",
    /// A shared-memory descriptor that the tensor cores cannot use.
    BadDescriptor = "bad descriptor",
    /// Memory written in one swizzle is read in another.
    SwizzleMismatch = "swizzle mismatch",
    /// Only some lanes reach an instruction that all lanes of a warp must execute together.
    Divergent = "aligned instruction reached divergently",
    /// A role's warps are not the ones its predicate selects.
    RoleMismatch = "role predicate and warps differ",
    /// Participants of a named barrier disagree, or too many arrive.
    BarrierCount = "named barrier count",
    /// An arrival at a named barrier or an mbarrier that nothing orders after the arrivals of the
    /// previous phase, so that it may count for that phase.
    UnorderedArrival = "unordered arrival",
    /// The cluster's barrier is waited for before arriving, or arrived at twice.
    ClusterBarrierOrder = "cluster barrier order",
    /// Memory that is not an initialised mbarrier is used as one.
    MbarrierUninitialised = "mbarrier not initialised",
    /// An mbarrier is initialised again while it is in use as one.
    MbarrierReinitialised = "mbarrier initialised twice",
    /// An mbarrier is used where its initialisation is not yet visible.
    MbarrierInitNotVisible = "mbarrier initialisation not visible",
    /// More arrivals than the phase has pending.
    MbarrierOverArrived = "too many arrivals",
    /// A phase ends before any thread has waited for the previous one.
    MbarrierOverrun = "phase overrun",
    /// A block ends in the middle of a phase.
    MbarrierUnfinished = "phase left unfinished",
    /// Bytes expected and bytes copied in a phase differ.
    TransactionCount = "transaction count",
    /// The bytes of an mbarrier are accessed as data.
    MbarrierTouched = "mbarrier memory touched",
    /// No warp, copy or product can make progress.
    Deadlock = "deadlock",
    /// A register budget that cannot be satisfied, or that changes in the wrong direction.
    RegisterBudget = "register budget",
    /// More shared memory than the target has.
    SharedMemoryLimit = "shared memory limit",
    /// The shared memory of a block that has ended is accessed.
    ExitedBlock = "block has exited",
    /// A kernel that waits for earlier grids accesses global memory where no such wait is known to
    /// come first, or a block of it ends without having waited.
    BeforeEarlierGrids = "before earlier grids have ended",
    /// A copy is still in flight when its block ends.
    CopyInFlightAtExit = "copy in flight at exit",
    /// A copy is given an address that is not a matching tensor map.
    TensorMapMismatch = "tensor map mismatch",
    /// A rank or mask names a block that the cluster does not have.
    ClusterRank = "no such block in the cluster",
    /// Memory that the kernel writes is loaded as read-only.
    ReadOnlyViolated = "read-only load of written memory",
    /// A bulk copy of a size the copy engine does not take.
    BadCopySize = "bad copy size",
    /// The kernel executed a trap.
    Trap = "trap",
    /// The run took more steps than allowed.
    Runaway = "step limit",
}

impl fmt::Display for HazardKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The thread or warp that made an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Actor {
    /// The block's index in the grid.
    pub block: u32,
    /// The warp's index in the block.
    pub warp: u32,
    /// The lane in the warp, if a single one can be named.
    pub lane: Option<u32>,
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}, warp {}", self.block, self.warp)?;
        match self.lane {
            Some(lane) => write!(f, ", lane {lane}"),
            None => Ok(()),
        }
    }
}

/// A mistake that a run found.
///
/// Its text names the kind, what happened, both places in the kernel's source where two are
/// involved, and how to replay the run.
#[derive(Clone, Debug)]
pub struct Hazard {
    /// The kind of mistake.
    pub kind: HazardKind,
    /// A description of what happened.
    pub message: String,
    /// The place of the statement that detected it.
    pub place: Option<SourceLocation>,
    /// The place of the other statement involved.
    pub other: Option<SourceLocation>,
    /// The thread or warp that was executing.
    pub actor: Option<Actor>,
    /// The policy of the run.
    pub policy: Policy,
    /// The seed of the run.
    pub seed: u64,
}

impl Hazard {
    /// Returns the hazard with the place of the other statement involved.
    pub(crate) fn with_other(mut self: Box<Self>, other: Option<SourceLocation>) -> Box<Self> {
        self.other = other;
        self
    }

    /// Returns the text without the line that says how to replay the run.
    pub fn describe(&self) -> String {
        let mut text = format!("hazard: {}\n", self.kind);
        text += &format!("  {}", self.message.replace('\n', "\n  "));
        if let Some(place) = self.place {
            text += &format!("\n  at {place}");
            text += &self.actor.map(|actor| format!(" ({actor})")).unwrap_or_default();
        }
        if let Some(other) = self.other {
            text += &format!("\n  and {other}");
        }
        text
    }
}

impl fmt::Display for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.describe())?;
        write!(f, "  replay with policy {}, seed {}", self.policy, self.seed)
    }
}

impl std::error::Error for Hazard {}
