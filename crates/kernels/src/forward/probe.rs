//! Timestamps from inside the kernel. [`Forward::probed`](super::Forward::probed) builds the kernel
//! with them; without, none of this is in the program.
//!
//! One thread of each consumer warpgroup records the multiprocessor's clock whenever a phase of the
//! loop ends, until its buffer is full.

use crate::parameter::Workspace;
use ptx::{Builder, Expression, GlobalAddress, Reg, SpecialRegister, U32, U64};

/// What a consumer warpgroup is doing. A timestamp marks the end of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// Finding the first tile. Nothing marks the beginning of this phase.
    Begin = 0,
    /// Waiting for a tile's queries.
    Queries = 1,
    /// Waiting for keys.
    WaitForKeys = 2,
    /// Waiting for the turn at the tensor cores.
    Turn = 3,
    /// `Q K^T`, from its start until it has landed; includes the wait for values.
    Scores = 4,
    /// Mask, exponentials, sums.
    Softmax = 5,
    /// What remains of `O += P V` when the softmax is done.
    Update = 6,
    /// Normalising and storing a tile.
    Epilogue = 7,
}

impl Phase {
    /// Every phase.
    pub const ALL: [Phase; 8] = [
        Phase::Begin,
        Phase::Queries,
        Phase::WaitForKeys,
        Phase::Turn,
        Phase::Scores,
        Phase::Softmax,
        Phase::Update,
        Phase::Epilogue,
    ];

    /// Returns the phase's name in tables and timelines.
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Begin => "begin",
            Phase::Queries => "wait for Q",
            Phase::WaitForKeys => "wait for K",
            Phase::Turn => "wait for the turn",
            Phase::Scores => "QK",
            Phase::Softmax => "softmax",
            Phase::Update => "PV",
            Phase::Epilogue => "epilogue",
        }
    }
}

/// The timestamps that each consumer warpgroup of each thread block has room for, in 64-bit words.
/// A word is the clock times 256 plus the phase; words that were not written are zero.
pub const PROBE_WORDS: usize = 1 << 10;

/// The timestamps of a warpgroup; without probing, this emits no code.
pub(super) struct Probe {
    notes: Option<Notes>,
}

struct Notes {
    thread: Reg<U32>,
    /// The address of the next timestamp; `end` is the end of the warpgroup's buffer.
    next: Reg<GlobalAddress>,
    end: Reg<GlobalAddress>,
}

/// Declares the parameter of the buffer, before the thread block splits into roles.
pub(super) fn parameter(k: &mut Builder, probed: bool) -> Option<Reg<GlobalAddress>> {
    probed.then(|| Workspace::Probe.address(k))
}

impl Probe {
    pub(super) fn new(
        k: &mut Builder,
        parameter: Option<Reg<GlobalAddress>>,
        warpgroups: u32,
        index: Reg<U32>,
        thread: Reg<U32>,
    ) -> Self {
        let notes = parameter.map(|base| {
            let block = k.block_index();
            let region = k.eval(block * warpgroups + index);
            let bytes = 8 * PROBE_WORDS as u32;
            let next = k.variable(base + region.convert::<U64>() * bytes);
            let end = k.eval(next + bytes);
            Notes { thread, next, end }
        });
        Probe { notes }
    }

    /// Records that a phase has just ended.
    pub(super) fn stamp(&self, k: &mut Builder, phase: Phase) {
        let Some(Notes { thread, next, end }) = &self.notes else { return };
        let (next, room) = (*next, next.differs(*end));
        k.if_(thread.equals(0) & room, |k| {
            let clock = k.special_wide(SpecialRegister::Clock64);
            k.store(next, clock * 256u32 + u32::from(phase as u8));
            k.set(next, next + 8);
        });
    }
}
