//! The state of one warp: its registers, its program counter, its active lanes, and what it waits
//! for.

use ptx::{Operand, Register};

use crate::clock::{ClockSet, FULL, WarpClock};
use crate::lower::Code;
use crate::machine::Release;

/// A 32-bit value in each lane.
pub(crate) type Word = [u32; 32];
/// A 64-bit value in each lane.
pub(crate) type Wide = [u64; 32];

/// A reconvergence point on a warp's stack.
#[derive(Clone, Debug)]
pub(crate) enum Frame {
    /// A branch; `waiting` is the side not yet executed, as its lanes and its first step.
    Branch { restore: u32, waiting: Option<(u32, usize)>, end: usize },
    /// A loop that lanes have left or will leave.
    Loop { restore: u32, end: usize },
}

/// The scheduling state of a warp.
#[derive(Clone, Debug)]
pub(crate) enum State {
    Ready,
    /// The warp polled for something that had not happened yet and will poll again; the number is
    /// [`GridState::progress`](crate::machine::GridState::progress) at that time.
    Polling(u64),
    Blocked(Wait),
    Done,
}

/// The condition that a blocked warp waits for.
#[derive(Clone, Debug)]
pub(crate) enum Wait {
    /// Phases of mbarriers: address, parity, lanes.
    Mbarrier(Vec<(u32, u32, u32)>),
    /// The next generation of a named barrier.
    Named { barrier: u32, generation: u64 },
    /// The next generation of the cluster barrier.
    Cluster { generation: u64 },
    /// The products up to this number.
    Products { until: u64 },
    /// `cp.async`s; `waited` is the clock up to which each lane waits for its own.
    Copies { operations: Vec<u64>, waited: Vec<(u32, u32)> },
    /// Bulk stores; with `read_only`, only until they have read their source.
    Stores { operations: Vec<u64>, clock: u32, read_only: bool },
    /// Free registers of the block.
    Registers { count: u32 },
}

/// Asynchronous operations in commit groups, which each lane commits by itself.
#[derive(Clone, Debug, Default)]
pub(crate) struct Groups {
    committed: Vec<u32>,
    entries: Vec<GroupEntry>,
    pub(crate) clock: u32,
}

#[derive(Clone, Debug)]
struct GroupEntry {
    operation: u64,
    clock: u32,
    /// The commit group of each lane that takes part in the operation.
    lanes: Vec<(u32, u32)>,
    read_waited: bool,
}

impl Groups {
    /// Adds an operation that these lanes issued and returns its clock.
    pub(crate) fn issue(&mut self, operation: u64, lanes: u32) -> u32 {
        self.committed.resize(32, 0);
        self.clock += 1;
        let lanes = lanes_of(lanes).map(|lane| (lane, self.committed[lane as usize])).collect();
        let clock = self.clock;
        self.entries.push(GroupEntry { operation, clock, lanes, read_waited: false });
        clock
    }

    pub(crate) fn commit(&mut self, lanes: u32) {
        self.committed.resize(32, 0);
        for lane in lanes_of(lanes) {
            self.committed[lane as usize] += 1;
        }
    }

    /// Returns the operations that these lanes wait for, and the clock up to which the stream is
    /// over then.
    pub(crate) fn wait(&mut self, lanes: u32, pending: u32, read_only: bool) -> (Vec<u64>, u32) {
        self.committed.resize(32, 0);
        let (mut operations, mut clock) = (Vec::new(), 0);
        let committed = &self.committed;
        self.entries.retain_mut(|entry| {
            let old = |&(lane, group): &(u32, u32)| {
                let limit = committed[lane as usize].saturating_sub(pending);
                lanes >> lane & 1 == 1 && group < limit
            };
            if !entry.lanes.iter().any(old) {
                return true;
            }
            operations.push(entry.operation);
            clock = clock.max(entry.clock);
            let over = entry.lanes.iter().all(old);
            entry.read_waited |= over;
            read_only || !over
        });
        (operations, clock)
    }

    /// Returns, for each of these lanes, the clock up to which its own operations are over after a
    /// wait.
    pub(crate) fn waited(&self, lanes: u32, pending: u32) -> Vec<(u32, u32)> {
        let reach = |lane: u32| {
            let committed = self.committed.get(lane as usize).copied().unwrap_or(0);
            let limit = committed.saturating_sub(pending);
            let open = |&(of, group): &(u32, u32)| of == lane && group >= limit;
            let next = self.entries.iter().find(|entry| entry.lanes.iter().any(open));
            (lane, next.map_or(self.clock, |entry| entry.clock - 1))
        };
        lanes_of(lanes).map(reach).collect()
    }

    /// Returns the operations that a lane takes part in and that not all of their lanes have waited
    /// for.
    pub(crate) fn of_lane(&self, lane: u32) -> Vec<u64> {
        let mine = self.entries.iter().filter(|e| e.lanes.iter().any(|(l, _)| *l == lane));
        mine.map(|e| e.operation).collect()
    }

    /// Returns whether there is an operation whose lanes have not all waited until it has read its
    /// source.
    pub(crate) fn never_waited(&self) -> bool {
        self.entries.iter().any(|entry| !entry.read_waited)
    }
}

/// The state of a warp's registers in checked mode.
#[derive(Clone, Debug, Default)]
pub(crate) struct RegisterShadow {
    /// For each register, the lanes that have written it.
    pub(crate) written: Vec<u32>,
    /// For each register, the number of the last product that accumulates into it, and of the last
    /// product that reads it as an operand.
    pub(crate) accumulating: Vec<u64>,
    pub(crate) operand: Vec<u64>,
    /// For each register, the number of `wgmma.fence`s before it was last touched, plus one, and
    /// the step that touched it.
    pub(crate) touched: Vec<(u32, u32)>,
    pub(crate) fences: u32,
    /// The step of each product issued so far.
    pub(crate) product_steps: Vec<usize>,
}

/// The state of a warp.
#[derive(Debug)]
pub(crate) struct Warp<'a> {
    pub(crate) code: &'a Code,
    /// The warp's index in the cluster.
    pub(crate) index: usize,
    /// The index of the warp's block in the cluster.
    pub(crate) block: usize,
    /// The warp's index in its block.
    pub(crate) in_block: u32,
    /// The index of the warp's warpgroup in the cluster.
    pub(crate) group: usize,
    pub(crate) pc: usize,
    pub(crate) active: u32,
    pub(crate) frames: Vec<Frame>,
    pub(crate) state: State,
    words: Vec<Word>,
    wides: Vec<Wide>,
    predicates: Vec<u32>,
    /// The cycles that the warp has taken, in the cost model.
    pub(crate) time: u64,
    /// The cycle at which it began to wait, for the timeline.
    pub(crate) waiting_since: u64,
    pub(crate) copies: Groups,
    pub(crate) stores: Groups,
    /// The number of products issued, and that number at each commit not yet waited for.
    pub(crate) products: u64,
    pub(crate) commits: Vec<u64>,
    /// The number of products that have been waited for.
    pub(crate) products_waited: u64,
    pub(crate) cluster_arrived: Option<u64>,
    pub(crate) registers: u32,
    pub(crate) budgets: Vec<u32>,
    pub(crate) clock: WarpClock,
    /// The lanes that have waited for earlier grids.
    pub(crate) waited_for_grids: u32,
    /// What was known at the last fence, and its scope: relaxed accesses after it release this.
    pub(crate) fenced: Option<(ClockSet, ptx::Scope)>,
    /// The lanes and releases of relaxed loads, which the next fence acquires.
    pub(crate) unfenced: Vec<(u32, Vec<Release>)>,
    pub(crate) shadow: RegisterShadow,
}

impl<'a> Warp<'a> {
    pub(crate) fn new(code: &'a Code, index: usize, block: usize, in_block: u32) -> Self {
        Warp {
            code,
            index,
            block,
            in_block,
            group: 0,
            pc: 0,
            active: FULL,
            frames: Vec::new(),
            state: State::Ready,
            words: vec![[0xFFFF_FFFF; 32]; code.words],
            wides: vec![[u64::MAX; 32]; code.wides],
            predicates: vec![0; code.predicates],
            time: 0,
            waiting_since: 0,
            copies: Groups::default(),
            stores: Groups::default(),
            products: 0,
            commits: Vec::new(),
            products_waited: 0,
            cluster_arrived: None,
            registers: 0,
            budgets: Vec::new(),
            clock: WarpClock::default(),
            waited_for_grids: 0,
            fenced: None,
            unfenced: Vec::new(),
            shadow: RegisterShadow::default(),
        }
    }

    // ---- registers --------------------------------------------------------------

    #[inline]
    fn slot(&self, register: Register) -> usize {
        self.code.slots[register.0 as usize].1 as usize
    }

    #[inline]
    pub(crate) fn word_of(&self, register: Register) -> &Word {
        &self.words[self.slot(register)]
    }

    #[inline]
    pub(crate) fn word(&self, operand: Operand) -> Word {
        match operand {
            Operand::Register(register) => *self.word_of(register),
            Operand::Immediate(bits) => [bits as u32; 32],
        }
    }

    #[inline]
    pub(crate) fn wide_of(&self, register: Register) -> &Wide {
        &self.wides[self.slot(register)]
    }

    #[inline]
    pub(crate) fn wide(&self, operand: Operand) -> Wide {
        match operand {
            Operand::Register(register) => *self.wide_of(register),
            Operand::Immediate(bits) => [bits; 32],
        }
    }

    #[inline]
    pub(crate) fn predicate(&self, register: Register) -> u32 {
        self.predicates[self.slot(register)]
    }

    #[inline]
    pub(crate) fn predicate_slot(&self, slot: u32) -> u32 {
        self.predicates[slot as usize]
    }

    #[inline]
    pub(crate) fn set_word(&mut self, register: Register, value: &Word) {
        let (slot, active) = (self.slot(register), self.active);
        let destination = &mut self.words[slot];
        if active == FULL {
            *destination = *value;
        } else {
            for lane in lanes_of(active) {
                destination[lane as usize] = value[lane as usize];
            }
        }
    }

    #[inline]
    pub(crate) fn set_wide(&mut self, register: Register, value: &Wide) {
        let (slot, active) = (self.slot(register), self.active);
        let destination = &mut self.wides[slot];
        for lane in lanes_of(active) {
            destination[lane as usize] = value[lane as usize];
        }
    }

    #[inline]
    pub(crate) fn set_predicate(&mut self, register: Register, value: u32) {
        let (slot, active) = (self.slot(register), self.active);
        let destination = &mut self.predicates[slot];
        *destination = (*destination & !active) | (value & active);
    }

    /// Returns all lanes of a register, whichever are active.
    pub(crate) fn word_mut(&mut self, register: Register) -> &mut Word {
        let slot = self.slot(register);
        &mut self.words[slot]
    }

    /// Returns the address that each lane gives.
    pub(crate) fn shared_addresses(&self, address: ptx::Address) -> Word {
        self.word_of(address.base).map(|base| base.wrapping_add(address.offset as u32))
    }

    pub(crate) fn global_addresses(&self, address: ptx::Address) -> Wide {
        self.wide_of(address.base).map(|base| base.wrapping_add(address.offset as i64 as u64))
    }

    // ---- control flow -------------------------------------------------------------

    /// Splits the active lanes at a branch. If both sides have lanes, `second_first` says which
    /// side runs first.
    pub(crate) fn branch(&mut self, taken: u32, otherwise: usize, end: usize, second_first: bool) {
        let restore = self.active;
        let (first, second) = (restore & taken, restore & !taken);
        let then = self.pc + 1;
        let (mask, pc, waiting) = match (first != 0, second != 0) {
            (true, false) => (first, then, None),
            (false, _) => (second, otherwise, None),
            (true, true) if second_first => (second, otherwise, Some((first, then))),
            (true, true) => (first, then, Some((second, otherwise))),
        };
        self.active = mask;
        self.pc = pc;
        self.frames.push(Frame::Branch { restore, waiting, end });
    }

    /// Removes lanes from the innermost loop.
    pub(crate) fn leave_loop(&mut self, leaving: u32) {
        self.active &= !leaving;
        for frame in self.frames.iter_mut().rev() {
            match frame {
                Frame::Branch { restore, .. } => *restore &= !leaving,
                Frame::Loop { .. } => break,
            }
        }
        if self.active == 0 {
            self.unwind();
        } else {
            self.pc += 1;
        }
    }

    /// Goes on to the next place with active lanes, at the end of a side or when no lane is left on
    /// it.
    pub(crate) fn unwind(&mut self) {
        while let Some(frame) = self.frames.last_mut() {
            match frame {
                Frame::Branch { restore, waiting, end } => {
                    if let Some((mask, pc)) = waiting.take() {
                        (self.active, self.pc) = (mask, pc);
                        return;
                    }
                    (self.active, self.pc) = (*restore, *end);
                }
                Frame::Loop { restore, end } => {
                    (self.active, self.pc) = (*restore, *end);
                }
            }
            self.frames.pop();
            if self.active != 0 {
                return;
            }
        }
    }

    /// Returns whether a product that accumulates into this register may be unfinished.
    pub(crate) fn is_accumulating(&self, register: Register) -> bool {
        self.shadow.accumulating[register.0 as usize] > self.products_waited
    }

    pub(crate) fn is_operand(&self, register: Register) -> bool {
        self.shadow.operand[register.0 as usize] > self.products_waited
    }
}

/// Returns the lanes of a mask, lowest first.
#[inline]
pub(crate) fn lanes_of(mut mask: u32) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        if mask == 0 {
            return None;
        }
        let lane = mask.trailing_zeros();
        mask &= mask - 1;
        Some(lane)
    })
}
