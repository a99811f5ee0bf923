//! What is remembered of each piece of memory: who wrote it last, who has
//! read it since, through which proxy, in which swizzle.
//!
//! The unit is two bytes, the smallest access the language has. As in
//! FastTrack, a read that happened before the next one is forgotten; only
//! reads that are concurrent are kept side by side, in sets that cells share.

use std::collections::HashMap;

use ptx::{Place, Swizzle};

use crate::clock::Knowledge;
use crate::hazard::Actor;

/// Bytes of one cell.
pub(crate) const CELL: usize = 2;

/// Through which path memory is accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proxy {
    /// Ordinary instructions.
    Generic,
    /// The copy engine and the tensor cores.
    Async,
}

/// What made an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// An ordinary instruction of a thread.
    Thread,
    /// An atomic or ordered access of a thread.
    Atomic,
    /// An asynchronous copy into shared memory.
    Load,
    /// An asynchronous copy out of shared memory.
    Store,
    /// A product on the tensor cores.
    Product,
}

/// One instruction's or operation's accesses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) cluster: u32,
    pub(crate) component: u32,
    pub(crate) clock: u32,
    pub(crate) proxy: Proxy,
    pub(crate) source: Source,
    pub(crate) place: Option<Place>,
    pub(crate) actor: Actor,
    /// The instruction, in words.
    pub(crate) what: &'static str,
    /// Of an operation: the number of accesses before it was issued.
    pub(crate) since: u32,
}

impl Event {
    fn of_thread(&self) -> bool {
        matches!(self.source, Source::Thread | Source::Atomic)
    }
}

/// The shadow of two bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cell {
    /// The last write: an event, or 0.
    write: u32,
    /// Reads since: an event, a set with [`SET`], or 0.
    reads: u32,
    write_lane: u8,
    read_lane: u8,
    pub(crate) initialised: bool,
    /// The bytes belong to a memory barrier.
    pub(crate) barrier: bool,
    /// The swizzle of a tensor copy that wrote it: 0 for other writers.
    swizzle: u8,
}

/// Marks that [`Cell::reads`] is a set.
const SET: u32 = 1 << 31;
/// The lane of accesses that no lane made.
pub(crate) const NO_LANE: u8 = 0xFF;

impl Cell {
    pub(crate) fn new(initialised: bool) -> Self {
        Cell {
            write: 0,
            reads: 0,
            write_lane: NO_LANE,
            read_lane: NO_LANE,
            initialised,
            barrier: false,
            swizzle: 0,
        }
    }

    /// Whether the running kernel has written it.
    pub(crate) fn is_written(&self) -> bool {
        self.write != 0
    }

    pub(crate) fn written_by(&self) -> u32 {
        self.write
    }

    pub(crate) fn set_swizzle(&mut self, swizzle: Swizzle) {
        self.swizzle = 1 + swizzle as u8;
    }

    /// The swizzle a tensor copy wrote it in.
    pub(crate) fn swizzle(&self) -> Option<Swizzle> {
        Swizzle::ALL.into_iter().find(|s| 1 + *s as u8 == self.swizzle)
    }
}

fn lane_mask(lane: u8) -> u32 {
    if lane == NO_LANE { 0 } else { 1 << lane }
}

/// Who accesses memory now.
pub(crate) struct Observer<'a> {
    pub(crate) knowledge: &'a Knowledge,
    /// The access, recorded with [`Shadow::event`].
    pub(crate) event: u32,
}

/// Two accesses that nothing puts in order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conflict {
    /// The earlier access.
    pub(crate) other: Event,
    pub(crate) other_id: u32,
    pub(crate) other_lane: Option<u32>,
    /// Whether the earlier access was a read.
    pub(crate) other_reads: bool,
    /// They are ordered, but no proxy fence stands between them.
    pub(crate) unfenced: bool,
}

/// The access histories of a run.
#[derive(Debug)]
pub(crate) struct Shadow {
    events: Vec<Event>,
    sets: Vec<Vec<(u32, u32)>>,
    unions: HashMap<(u32, u32, u32), u32>,
    /// The last answer of `order`: bulk accesses ask the same again and again.
    last: Option<((u32, u32, u32, u32), Order)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Before,
    Unordered,
    Unfenced,
}

impl Shadow {
    pub(crate) fn new() -> Self {
        let actor = Actor { block: 0, warp: 0, lane: None };
        let none = Event {
            cluster: 0,
            component: 0,
            clock: 0,
            proxy: Proxy::Generic,
            source: Source::Thread,
            place: None,
            actor,
            what: "nothing",
            since: u32::MAX,
        };
        Shadow { events: vec![none], sets: vec![Vec::new()], unions: HashMap::new(), last: None }
    }

    pub(crate) fn event(&mut self, event: Event) -> u32 {
        self.events.push(event);
        self.events.len() as u32 - 1
    }

    /// How many accesses there were so far.
    pub(crate) fn count(&self) -> u32 {
        self.events.len() as u32
    }

    pub(crate) fn get(&self, event: u32) -> &Event {
        &self.events[event as usize]
    }

    fn order(&mut self, observer: &Observer<'_>, id: u32, lanes: u32, own_lanes: u32) -> Order {
        if id == observer.event {
            return Order::Before;
        }
        let key = (observer.event, id, lanes, own_lanes);
        if let Some((last, order)) = self.last
            && last == key
        {
            return order;
        }
        let order = self.compute_order(observer, id, lanes, own_lanes);
        self.last = Some((key, order));
        order
    }

    fn compute_order(&self, observer: &Observer<'_>, id: u32, lanes: u32, own: u32) -> Order {
        let (e, o) = (&self.events[id as usize], &self.events[observer.event as usize]);
        if e.source == Source::Atomic && o.source == Source::Atomic {
            return Order::Before;
        }
        if (e.cluster, e.component) == (o.cluster, o.component) {
            // Program order of one thread; one operation with itself.
            let same = if e.of_thread() { lanes & !own == 0 } else { e.clock == o.clock };
            if same {
                return Order::Before;
            }
        }
        let Knowledge { known, flushed } = observer.knowledge;
        if !known.covers(o.cluster, e.cluster, e.component, e.clock, lanes) {
            return Order::Unordered;
        }
        if e.proxy == Proxy::Generic
            && o.proxy == Proxy::Async
            && !flushed.covers(o.cluster, e.cluster, e.component, e.clock, lanes)
        {
            return Order::Unfenced;
        }
        Order::Before
    }

    /// The conflict of an access with an earlier one, unless that is ordered before.
    fn conflict(
        &mut self,
        observer: &Observer<'_>,
        own: u32,
        (id, lanes): (u32, u32),
        other_reads: bool,
    ) -> Option<Conflict> {
        let order = self.order(observer, id, lanes, own);
        (order != Order::Before).then(|| Conflict {
            other: self.events[id as usize],
            other_id: id,
            other_lane: (lanes != 0).then(|| lanes.trailing_zeros()),
            other_reads,
            unfenced: order == Order::Unfenced,
        })
    }

    /// The conflict with the last write, if there is one.
    fn with_write(&mut self, cell: &Cell, observer: &Observer<'_>, own: u32) -> Option<Conflict> {
        match cell.write {
            0 => None,
            write => self.conflict(observer, own, (write, lane_mask(cell.write_lane)), false),
        }
    }

    /// The conflict with a read since the last write, if there is one.
    fn with_reads(&mut self, cell: &Cell, observer: &Observer<'_>, own: u32) -> Option<Conflict> {
        match cell.reads {
            0 => None,
            read if read & SET == 0 => {
                self.conflict(observer, own, (read, lane_mask(cell.read_lane)), true)
            }
            reads => {
                let set = (reads & !SET) as usize;
                (0..self.sets[set].len())
                    .find_map(|index| self.conflict(observer, own, self.sets[set][index], true))
            }
        }
    }

    /// Records an access; the conflict with the last write, or of a write with a read, if there is
    /// one.
    pub(crate) fn access(
        &mut self,
        cell: &mut Cell,
        observer: &Observer<'_>,
        lane: u8,
        write: bool,
    ) -> Option<Conflict> {
        let own = lane_mask(lane);
        let conflict = self.with_write(cell, observer, own);
        if !write {
            self.read(cell, observer, lane);
            return conflict;
        }
        let conflict = conflict.or_else(|| self.with_reads(cell, observer, own));
        (cell.write, cell.write_lane) = (observer.event, lane);
        (cell.reads, cell.swizzle, cell.initialised) = (0, 0, true);
        conflict
    }

    /// Remembers a read, in the place of those that are ordered before it.
    fn read(&mut self, cell: &mut Cell, observer: &Observer<'_>, lane: u8) {
        let own = lane_mask(lane);
        if cell.reads == 0 {
            (cell.reads, cell.read_lane) = (observer.event, lane);
        } else if cell.reads & SET == 0 {
            let lanes = lane_mask(cell.read_lane);
            let forgotten = if cell.reads == observer.event {
                lanes == own
            } else {
                self.order(observer, cell.reads, lanes, own) == Order::Before
            };
            if forgotten {
                (cell.reads, cell.read_lane) = (observer.event, lane);
            } else {
                let first = self.union(0, cell.reads, lanes);
                cell.reads = SET | self.union(first, observer.event, own);
            }
        } else {
            cell.reads = SET | self.union(cell.reads & !SET, observer.event, own);
        }
    }

    /// The set with one more read.
    fn union(&mut self, set: u32, event: u32, lanes: u32) -> u32 {
        if let Some(known) = self.unions.get(&(set, event, lanes)) {
            return *known;
        }
        let mut reads = self.sets[set as usize].clone();
        let new = self.events[event as usize];
        match reads.iter_mut().find(|(id, _)| *id == event) {
            Some((_, own)) => *own |= lanes,
            None => {
                // A later read of the same lanes stands for the earlier one.
                reads.retain(|(id, old)| {
                    let e = &self.events[*id as usize];
                    (e.cluster, e.component) != (new.cluster, new.component) || old & !lanes != 0
                });
                reads.push((event, lanes));
            }
        }
        self.sets.push(reads);
        let id = self.sets.len() as u32 - 1;
        self.unions.insert((set, event, lanes), id);
        id
    }
}

/// Cells of a stretch of memory, made when first touched.
#[derive(Debug, Default)]
pub(crate) struct Cells {
    pages: Vec<Option<Box<[Cell]>>>,
    initialised: bool,
}

/// Cells of a page.
const PAGE: usize = 2048;

impl Cells {
    pub(crate) fn new(bytes: usize, initialised: bool) -> Self {
        let pages = bytes.div_ceil(CELL).div_ceil(PAGE);
        Cells { pages: (0..pages).map(|_| None).collect(), initialised }
    }

    /// The cell of a byte.
    pub(crate) fn at(&mut self, byte: usize) -> &mut Cell {
        let (cell, initialised) = (byte / CELL, self.initialised);
        let page = self.pages[cell / PAGE]
            .get_or_insert_with(|| vec![Cell::new(initialised); PAGE].into_boxed_slice());
        &mut page[cell % PAGE]
    }
}
