//! Timestamps from inside the kernel, for those who ask: [`Forward::probed`](super::Forward::probed)
//! builds the kernel with them. Without, not an instruction of this is in it.
//!
//! One thread of each consumer warpgroup notes the multiprocessor's clock whenever a phase ends.
//! Where the room for notes is full, it stops noting.

use crate::parameter::Workspace;
use ptx::{Builder, Expression, GlobalAddress, Reg, Special, U32, U64};

/// What a warpgroup is doing. A stamp says that this has just ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// Finding the first tile; it begins nowhere.
    Begin = 0,
    /// Waiting for a tile's queries.
    Queries = 1,
    /// Waiting for keys.
    WaitForKeys = 2,
    /// Waiting for the turn at the tensor cores.
    Turn = 3,
    /// Scores, from their start until they have landed; values are waited for in between.
    Scores = 4,
    /// Mask, exponentials, sums.
    Softmax = 5,
    /// What is left of the output's update when the softmax is done.
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

    /// Its name in tables and timelines.
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

/// How notes lie in memory: for each block, for each of its consumer warpgroups, this many words
/// of 64 bits. A word is the clock times 256 plus the phase; words that were not written are zero.
pub const PROBE_WORDS: usize = 1 << 10;

/// The notes of a warpgroup, if there are any.
pub(super) struct Probe {
    notes: Option<Notes>,
}

struct Notes {
    thread: Reg<U32>,
    /// Where the next one goes, and where there is no more room.
    next: Reg<GlobalAddress>,
    end: Reg<GlobalAddress>,
}

/// The parameter, read before the roles part.
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

    /// Notes that a phase has just ended.
    pub(super) fn stamp(&self, k: &mut Builder, phase: Phase) {
        let Some(Notes { thread, next, end }) = &self.notes else { return };
        let (next, room) = (*next, next.differs(*end));
        k.if_(thread.equals(0) & room, |k| {
            let clock = k.special_wide(Special::Clock64);
            k.store(next, clock * 256u32 + u32::from(phase as u8));
            k.set(next, next + 8);
        });
    }
}
