//! Simulates a kernel on the CPU, instruction by instruction, and reports what would go wrong on a
//! GPU.
//!
//! [`run`] takes the same [`Program`](ptx::Program) that the printer turns into PTX. It computes
//! the numbers a GPU would compute, under a schedule chosen by a [`Policy`] and a seed, and stops
//! at the first [`Hazard`]: a named kind of mistake, reported with both places in the kernel's
//! source and the seed that replays it.
//!
//! ```
//! use flashcore_sim::ptx::{Builder, Expression, F32, GlobalAddress, Target, U64};
//! use flashcore_sim::{Argument, Launch, Memory, Options, run};
//!
//! let mut k = Builder::new("double", Target::SM_90A, 32);
//! let data = k.parameter::<GlobalAddress>("data");
//! let thread = k.thread_index();
//! let mine = k.eval(data + thread.convert::<U64>() * 4);
//! let value = k.load::<F32, _>(mine);
//! k.store(mine, value * 2.0);
//! let program = k.finish()?;
//!
//! let mut memory = Memory::new();
//! let buffer = memory.input_f32("data", &[1.5; 32]);
//! let arguments = vec![Argument::Address(buffer, 0)];
//! let launch = Launch { program: &program, grid: 1, arguments };
//! run(&launch, &mut memory, &Options::default())?;
//! assert_eq!(memory.f32(buffer), [3.0; 32]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Time is hostile
//!
//! A GPU does not promise when anything happens, and neither does the simulator: a warp runs for as
//! long as the policy likes; a copy, a product or a store completes at any moment between its issue
//! and the wait that needs it. [`Policy::Earliest`] completes it at once, [`Policy::Latest`] when
//! nothing else can run, [`Policy::Random`] whenever the seed says. A missing wait therefore
//! already shows in the numbers. [`Policy::Modelled`] is the benign policy: it follows a simple
//! cost model and is meant for timelines.
//!
//! # What is modelled
//!
//! - *Warps* of 32 lanes in lockstep, with an active mask and a stack of branches and loops. The
//!   policy chooses which side of a branch runs first.
//! - *Memory*: global buffers separated by unmapped addresses, shared memory initially filled with
//!   NaN, and, in [`Mode::Checked`], a shadow of every two bytes: who wrote them, who read them
//!   since, through which proxy, in which swizzle.
//! - *Copies* ([`cp.async`, bulk and tensor copies](ptx::Instruction::TensorLoad)) with zero fill,
//!   swizzle and multicast, as actors of their own that report to mbarriers or belong to groups. A
//!   store reads its source at one time and writes at another.
//! - *Products*: `mma.sync` executes at once; `wgmma` executes when all four warps have issued it
//!   and the schedule chooses it. It finds its operands from the bits of the [`Descriptor`] alone.
//! - *Order*: vector clocks over warps, copies and products, after FastTrack; releases, acquires
//!   and fences with their scopes; the async proxy and its fences; barriers of every kind.
//! - *Counts* of instructions, bytes, bank conflicts and waits, which a
//!   [`Budget`] can bound, and a [`Trace`] for Perfetto.
//!
//! # Where to look
//!
//! | file | subject |
//! | --- | --- |
//! | `lower` | lowering of the statement tree to flat code |
//! | `machine`, `warp` | the state of a run |
//! | `schedule` | the scheduler, and the explanation of deadlocks |
//! | `step` | the meaning of each instruction, a file for each family |
//! | `copy`, `tensor` | the execution of copies and products |
//! | `clock`, `shadow` | happens-before, and the access history of memory |
//! | `float` | the small float formats |
//! | [`mutate`] | programs with one statement removed, to test the tests |
//!
//! # What the model cannot see
//!
//! - *Lanes that wait for each other inside a branch.* One side of a branch
//!   runs to its end before the other starts. A kernel whose lanes need the
//!   other side to make progress is reported as a deadlock, though hardware
//!   since Volta would run it.
//! - *Weak memory.* A load gives the last value written in the schedule. A race
//!   is found by its missing order, not by a stale value; with relaxed accesses
//!   alone, stale values that hardware may give are never seen.
//! - *Some lane subsets.* Where several subsets of a warp acted alone, they are merged (see
//!   `clock`), and a race between them may be missed. Groups of bulk stores are tracked per warp,
//!   not per lane.
//! - *Proxy fences in the wrong thread.* A fence anywhere on the path from the write to the copy is
//!   accepted, in the writing thread or later, as in the PTX memory model. The simulator also
//!   requires a fence between a generic read and the copy that overwrites what was read.
//! - *A product's end is one event* for all four warps of its warpgroup.
//! - *Parity.* A waiter that is two phases behind its barrier is detected by its consequences (a
//!   race, a deadlock), not directly.
//! - *Other blocks.* [`Options::resident`] clusters run at once, the others after them: a kernel
//!   whose blocks wait for later ones does not finish.
//! - *Physical registers*: spills, register bank conflicts, and what the assembler makes of the
//!   program.
//! - *The last bits* of `wgmma`, `mma.sync` and the approximate functions: they
//!   are within the documented error (about 1e-6 for sums), not bit for bit.
//! - *Caches*: hints and policies have no effect, and timers count the cycles of the cost model.
//! - *Earlier grids* have always ended: `griddepcontrol.wait` returns at once. What comes before it is
//!   checked.
//!
//! There should be no false alarms: a correct kernel that raises one has found a bug in the
//! simulator.

#![forbid(unsafe_code)]

mod clock;
mod copy;
mod count;
pub mod float;
mod hazard;
mod launch;
mod lower;
mod machine;
mod memory;
pub mod mutate;
mod run;
mod schedule;
mod shadow;
mod step;
mod tensor;
mod trace;
mod warp;

/// The kernel language in which programs are written.
pub use ptx;

pub use count::{BankTraffic, Budget, Counts, Measure};
pub use hazard::{Actor, Hazard, HazardKind};
pub use launch::{
    Argument, Failure, Fp8Accumulation, Launch, Mode, Options, Policy, Report, TensorMapArgument,
};
pub use memory::{BufferId, Memory};
pub use run::run;
pub use tensor::{Descriptor, fp8_accumulate};
pub use trace::{Span, Trace, Track};
