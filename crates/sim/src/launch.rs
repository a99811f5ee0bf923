//! The inputs and the result of a simulated launch.

use std::fmt;

use ptx::{Program, TensorBox};

use crate::{Budget, BufferId, Counts, Hazard, Trace};

/// A kernel launch.
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    /// The kernel.
    pub program: &'a Program,
    /// The number of blocks in the grid, along x; a multiple of the cluster size.
    pub grid: u32,
    /// The arguments, one for each parameter of the program.
    pub arguments: Vec<Argument>,
}

/// An argument for a kernel parameter.
#[derive(Clone, Debug)]
pub enum Argument {
    /// An unsigned 32-bit integer.
    U32(u32),
    /// A signed 32-bit integer.
    S32(i32),
    /// An unsigned 64-bit integer.
    U64(u64),
    /// A signed 64-bit integer.
    S64(i64),
    /// A single-precision float.
    F32(f32),
    /// The address of a byte of a buffer.
    Address(BufferId, u64),
    /// A tensor map.
    TensorMap(TensorMapArgument),
}

/// A tensor in a buffer, and the boxes it is copied in.
#[derive(Clone, Debug)]
pub struct TensorMapArgument {
    /// The buffer that holds the tensor.
    pub buffer: BufferId,
    /// The offset of the tensor in the buffer, in bytes.
    pub offset: u64,
    /// The extent of each dimension in elements, fastest-moving first.
    pub dimensions: Vec<u64>,
    /// The stride in bytes of each dimension but the first.
    pub strides: Vec<u64>,
    /// The box of one copy; it must be the one the kernel was built for.
    pub tensor_box: TensorBox,
}

/// The scheduling policy: the order of events that the program leaves unordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Copies and products complete the moment they are issued; warps take short turns.
    Earliest,
    /// Copies and products complete when nothing else can run, the newest copies first; a warp runs
    /// until it must wait.
    Latest,
    /// Everything is interleaved at random. Every fourth seed, from 3 on, starves one warp, which
    /// runs only when nothing else can or after many turns of the others.
    Random,
    /// Events follow a simple cost model: for timelines.
    Modelled,
}

impl Policy {
    /// The hostile policies: all but the modelled one.
    pub const HOSTILE: [Policy; 3] = [Policy::Earliest, Policy::Latest, Policy::Random];
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Policy::Earliest => "earliest",
            Policy::Latest => "latest",
            Policy::Random => "random",
            Policy::Modelled => "modelled",
        })
    }
}

/// The amount of checking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Checks deadlocks, bounds, alignment, divergence and barrier counts besides computing the
    /// numbers.
    Values,
    /// Also checks happens-before, proxies and initialisation: everything in
    /// [`HazardKind`](crate::HazardKind).
    Checked,
}

/// The accumulation of 8-bit products in `wgmma`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Fp8Accumulation {
    /// As for 16-bit elements: exact products, summed in `f32`.
    #[default]
    Exact,
    /// As on Hopper: the 32 products of an instruction and the accumulator are aligned to the
    /// largest exponent among them; each loses the bits more than 13 below it, and so does their
    /// sum. The sources are cited at [`fp8_accumulate`](crate::fp8_accumulate).
    Truncated,
}

/// The options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The scheduling policy.
    pub policy: Policy,
    /// The seed, which selects one of the schedules that the policy allows.
    pub seed: u64,
    /// The amount of checking.
    pub mode: Mode,
    /// The number of clusters that run at once; the others follow as these end.
    pub resident: u32,
    /// The largest number of steps (instructions and branches of a warp) that a run may take.
    pub step_limit: u64,
    /// Bounds on the counts of the run.
    pub budget: Budget,
    /// Whether to record a timeline.
    pub trace: bool,
    /// The accumulation of 8-bit products on the tensor cores.
    pub fp8_accumulation: Fp8Accumulation,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            policy: Policy::Earliest,
            seed: 0,
            mode: Mode::Checked,
            resident: 2,
            step_limit: 200_000_000,
            budget: Budget::default(),
            trace: false,
            fp8_accumulation: Fp8Accumulation::Exact,
        }
    }
}

impl Options {
    /// Returns options that compute values only, under a policy and a seed.
    pub fn values(policy: Policy, seed: u64) -> Self {
        Options { policy, seed, mode: Mode::Values, ..Options::default() }
    }

    /// Returns options that check everything, under a policy and a seed.
    pub fn checked(policy: Policy, seed: u64) -> Self {
        Options { policy, seed, mode: Mode::Checked, ..Options::default() }
    }
}

/// The result of a run without a hazard.
#[derive(Clone, Debug)]
pub struct Report {
    /// The counts of executed instructions and moved bytes.
    pub counts: Counts,
    /// The timeline, if it was requested.
    pub trace: Option<Trace>,
    /// Whether any warp reached each instruction, in program order.
    pub reached: Vec<bool>,
}

/// The reason why a run gave no report.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The launch is invalid.
    #[error("launch: {0}")]
    Launch(String),
    /// The kernel made a mistake.
    #[error("{0}")]
    Hazard(Box<Hazard>),
    /// A count exceeded its budget.
    #[error("over budget: {measure} is {found}, at most {limit} allowed")]
    OverBudget {
        /// The measure that was counted.
        measure: crate::Measure,
        /// The count of the run.
        found: u64,
        /// The largest count allowed.
        limit: u64,
    },
}

impl Failure {
    /// Returns the hazard, if the failure is one.
    pub fn hazard(&self) -> Option<&Hazard> {
        match self {
            Failure::Hazard(hazard) => Some(hazard),
            Failure::Launch(_) | Failure::OverBudget { .. } => None,
        }
    }
}

impl From<Box<Hazard>> for Failure {
    fn from(hazard: Box<Hazard>) -> Self {
        Failure::Hazard(hazard)
    }
}
