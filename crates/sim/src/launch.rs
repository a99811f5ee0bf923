//! What a run is given and what it gives back.

use std::fmt;

use ptx::{Program, TensorBox};

use crate::{Budget, BufferId, Counts, Hazard, Trace};

/// A kernel launch.
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    /// The kernel.
    pub program: &'a Program,
    /// Blocks in the grid, along x; a multiple of the cluster's size.
    pub grid: u32,
    /// One for each parameter of the program.
    pub arguments: Vec<Argument>,
}

/// What is passed for a parameter.
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
    /// Where in it the tensor starts, in bytes.
    pub offset: u64,
    /// The extents in elements, fastest-moving first.
    pub dimensions: Vec<u64>,
    /// Bytes between neighbours in each dimension but the first.
    pub strides: Vec<u64>,
    /// The box of one copy; must be the one the kernel was built for.
    pub tensor_box: TensorBox,
}

/// In which order things happen that have no order of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Copies and products complete the moment they are issued; warps take turns.
    Earliest,
    /// Copies and products complete when nothing else can go on, the newest
    /// copies first; a warp runs until it must wait.
    Latest,
    /// Everything is interleaved at random. Every fourth seed, from 3 on, leaves one warp behind: it
    /// goes on when nothing else can.
    Random,
    /// By a simple model of what things cost: for timelines.
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

/// How much is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// The numbers, deadlocks, bounds, alignment, divergence and barrier counts.
    Values,
    /// Also happens-before, proxies, and what is initialised: everything in
    /// [`HazardKind`](crate::HazardKind).
    Checked,
}

/// How `wgmma` adds products of 8-bit numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EightBitSums {
    /// Like those of 16 bits: exact products, sums in `f32`.
    #[default]
    Exact,
    /// As on Hopper: the 32 products of an instruction and the accumulator are aligned to the
    /// largest exponent among them, each loses what lies more than 13 bits below it, and so does
    /// their sum. See [`narrow_sum`](crate::narrow_sum) for where that is from.
    Narrow,
}

/// How a launch is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The order of things.
    pub policy: Policy,
    /// Chooses among the orders that the policy allows.
    pub seed: u64,
    /// How much is watched.
    pub mode: Mode,
    /// How many clusters run at once; the others follow as these end.
    pub resident: u32,
    /// The most steps (instructions and branches of a warp) a run may take.
    pub step_limit: u64,
    /// Bounds on what the run may cost.
    pub budget: Budget,
    /// Whether to record a timeline.
    pub trace: bool,
    /// How the tensor cores add products of 8-bit numbers.
    pub eight_bit_sums: EightBitSums,
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
            eight_bit_sums: EightBitSums::Exact,
        }
    }
}

impl Options {
    /// Values only, under a policy and a seed.
    pub fn values(policy: Policy, seed: u64) -> Self {
        Options { policy, seed, mode: Mode::Values, ..Options::default() }
    }

    /// Everything checked, under a policy and a seed.
    pub fn checked(policy: Policy, seed: u64) -> Self {
        Options { policy, seed, mode: Mode::Checked, ..Options::default() }
    }
}

/// What a run that found nothing wrong tells.
#[derive(Clone, Debug)]
pub struct Report {
    /// What was executed and moved.
    pub counts: Counts,
    /// The timeline, if it was asked for.
    pub trace: Option<Trace>,
    /// Of each instruction, in the order of the program, whether any warp came to it.
    pub reached: Vec<bool>,
}

/// Why a run gave no report.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The launch itself cannot be made.
    #[error("launch: {0}")]
    Launch(String),
    /// The kernel made a mistake.
    #[error("{0}")]
    Hazard(Box<Hazard>),
    /// The kernel did more of something than it was allowed.
    #[error("over budget: {measure} is {found}, at most {limit} allowed")]
    OverBudget {
        /// What was counted.
        measure: crate::Measure,
        /// What it came to.
        found: u64,
        /// What it may come to.
        limit: u64,
    },
}

impl Failure {
    /// The hazard, if it is one.
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
