//! Shadow memory: for each piece of memory, who wrote it last and who has read it since, through
//! which proxy, in which swizzle.
//!
//! The unit is two bytes, the smallest store that the language has; a load of one byte counts as a
//! read of both. As in FastTrack, a read is forgotten when a later read is ordered after it; only
//! concurrent reads are kept side by side, in sets that cells share.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use ptx::{Scope, SourceLocation, Swizzle};

use crate::clock::{ClockSet, copies_of};
use crate::hazard::Actor;

/// The number of bytes of one cell.
pub(crate) const CELL: usize = 2;

/// The proxy through which memory is accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proxy {
    /// Ordinary instructions.
    Generic,
    /// The copy engine and the tensor cores.
    Async,
}

/// The source of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// An ordinary instruction of a thread.
    Thread,
    /// An atomic or ordered access of a thread, or an addition of the copy engine. Two of these
    /// never conflict if each is within the scope of the other.
    Atomic(Scope),
    /// An asynchronous copy into shared memory.
    Load,
    /// An asynchronous copy out of shared memory.
    Store,
    /// A product on the tensor cores.
    Product,
}

/// The accesses of one instruction or operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) cluster: u32,
    pub(crate) component: u32,
    pub(crate) clock: u32,
    pub(crate) proxy: Proxy,
    pub(crate) source: Source,
    pub(crate) place: Option<SourceLocation>,
    pub(crate) actor: Actor,
    /// The name of the instruction, for messages.
    pub(crate) what: &'static str,
    /// For an operation, the number of events that were recorded before it was issued; `u32::MAX`
    /// for an instruction of a thread.
    pub(crate) since: u32,
}

impl Event {
    fn of_thread(&self) -> bool {
        matches!(self.source, Source::Thread | Source::Atomic(_))
    }

    /// Returns whether this is a `cp.async`, the only load through the generic proxy.
    fn is_lane_copy(&self) -> bool {
        self.source == Source::Load && self.proxy == Proxy::Generic
    }

    /// Returns whether an atomic with this scope reaches the thread of the other event.
    fn reaches(&self, scope: Scope, other: &Event) -> bool {
        match scope {
            Scope::Block => self.actor.block == other.actor.block,
            Scope::Cluster => self.cluster == other.cluster,
            Scope::Gpu | Scope::System => true,
        }
    }
}

/// The shadow of two bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    /// The event of the last write, or 0.
    write: u32,
    /// The reads since the last write: an event, a set marked with [`SET`], or 0.
    reads: u32,
    write_lane: u8,
    read_lane: u8,
    pub(crate) initialised: bool,
    /// Whether the bytes belong to an mbarrier.
    pub(crate) barrier: bool,
    /// The swizzle of the tensor copy that wrote the cell, plus 1; 0 for other writers.
    swizzle: u8,
}

/// The bit that marks [`Cell::reads`] as a set.
const SET: u32 = 1 << 31;
/// The lane of accesses that no single lane made: those of operations, and those of a whole warp.
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

    /// Returns whether the running kernel has written the cell.
    pub(crate) fn is_written(&self) -> bool {
        self.write != 0
    }

    pub(crate) fn written_by(&self) -> u32 {
        self.write
    }

    pub(crate) fn set_swizzle(&mut self, swizzle: Swizzle) {
        self.swizzle = 1 + swizzle as u8;
    }

    /// Returns the swizzle in which a tensor copy wrote the cell.
    pub(crate) fn swizzle(&self) -> Option<Swizzle> {
        Swizzle::ALL.into_iter().find(|s| 1 + *s as u8 == self.swizzle)
    }
}

fn lane_mask(lane: u8) -> u32 {
    if lane == NO_LANE { 0 } else { 1 << lane }
}

/// The thread or operation that accesses memory now.
#[derive(Clone, Copy)]
pub(crate) struct Observer<'a> {
    pub(crate) knowledge: &'a ClockSet,
    /// The event of the access, recorded with [`Shadow::event`].
    pub(crate) event: u32,
    /// The lane, or [`NO_LANE`].
    pub(crate) lane: u8,
    /// The clock up to which the lane has waited for its own `cp.async`s.
    pub(crate) copies: u32,
    /// Whether the access is to global memory.
    pub(crate) global: bool,
}

impl<'a> Observer<'a> {
    /// Creates an observer for an operation, which no lane executes.
    pub(crate) fn operation(knowledge: &'a ClockSet, event: u32) -> Self {
        Observer { knowledge, event, lane: NO_LANE, copies: 0, global: false }
    }

    /// Creates an observer for a bulk store, whose group belongs to the lane that issued it.
    pub(crate) fn store(knowledge: &'a ClockSet, event: u32, lane: u32) -> Self {
        Observer { lane: lane as u8, ..Observer::operation(knowledge, event) }
    }

    /// Returns whether the event `e` of these lanes happened before the observer's own event `o`.
    fn knows(&self, e: &Event, o: &Event, lanes: u32) -> bool {
        let known = &self.knowledge.known;
        let own = lanes & !lane_mask(self.lane) == 0;
        if e.cluster == o.cluster {
            // A lane's copy comes after what that lane did itself, and after what all lanes did
            // before they last synchronised. An access of the whole warp is in part every lane's,
            // so it must be among the latter.
            if o.is_lane_copy() && e.of_thread() && copies_of(e.component) == o.component {
                let entry = known.get(e.component);
                let mine = own && lanes != 0 && entry.covers(e.clock, lanes);
                return e.clock <= entry.all || mine;
            }
            // A lane knows its own copies once it has waited for them, without synchronising with
            // the others.
            let of_warp = [o.component, copies_of(o.component)].contains(&e.component);
            if own && of_warp && e.is_lane_copy() && e.clock <= self.copies {
                return true;
            }
        }
        known.covers(o.cluster, e.cluster, e.component, e.clock, lanes)
    }
}

/// Two conflicting accesses that nothing orders.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conflict {
    /// The earlier access.
    pub(crate) other: Event,
    pub(crate) other_id: u32,
    pub(crate) other_lane: Option<u32>,
    /// Whether the earlier access was a read.
    pub(crate) other_reads: bool,
    /// Whether they are ordered, but no proxy fence stands between them.
    pub(crate) unfenced: bool,
}

/// The access histories of a run.
#[derive(Debug)]
pub(crate) struct Shadow {
    events: Vec<Event>,
    /// The sets of reads, as linked lists: each entry is one read and the index of the rest of the
    /// set. Sets share common tails, since thousands of blocks may read one word.
    sets: Vec<Reads>,
    unions: HashMap<(u32, u32, u32), u32, BuildHasherDefault<Multiplier>>,
    /// The first event of each cluster: no read of the cluster is older.
    begun: Vec<u32>,
    /// The last access without a conflict and the cell after it, as a cache: consecutive cells
    /// often have the same history.
    last: Option<(Access, Cell)>,
}

/// The key of an access of a cell: the observer's event, its lane, whether the memory is global,
/// whether it writes, and the cell before it.
type Access = (u32, u8, bool, bool, Cell);

/// A non-empty set of reads: the newest, with its lanes, and the index of the rest.
#[derive(Clone, Copy, Debug)]
struct Reads {
    event: u32,
    lanes: u32,
    others: u32,
    /// The largest event of all reads of the set.
    last: u32,
    /// The bits from [`Shadow::mark`] of all reads of the set. If the bit of a new read is missing,
    /// the set has no read that the new one makes redundant.
    marks: u64,
}

/// The index of the empty set.
const EMPTY: u32 = 0;

/// A fast hash for keys that are not adversarial.
#[derive(Debug, Default)]
struct Multiplier(u64);

impl Hasher for Multiplier {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }

    fn write_u32(&mut self, number: u32) {
        // An odd constant with bits throughout, since hash tables use both high and low bits.
        self.0 = (self.0.rotate_left(26) ^ u64::from(number)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
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
        // A placeholder at the index of the empty set, never read.
        let nothing = Reads { event: 0, lanes: 0, others: EMPTY, last: 0, marks: 0 };
        Shadow {
            events: vec![none],
            sets: vec![nothing],
            unions: HashMap::default(),
            begun: Vec::new(),
            last: None,
        }
    }

    pub(crate) fn event(&mut self, event: Event) -> u32 {
        let (id, cluster) = (self.events.len() as u32, event.cluster as usize);
        if self.begun.len() <= cluster {
            // Clusters up to this one without an event so far will have none older than this.
            self.begun.resize(cluster + 1, id);
        }
        self.events.push(event);
        id
    }

    /// Returns the number of events recorded so far.
    pub(crate) fn count(&self) -> u32 {
        self.events.len() as u32
    }

    pub(crate) fn get(&self, event: u32) -> &Event {
        &self.events[event as usize]
    }

    fn order(&self, observer: &Observer<'_>, id: u32, lanes: u32) -> Order {
        if id == observer.event {
            return Order::Before;
        }
        let (e, o) = (&self.events[id as usize], &self.events[observer.event as usize]);
        if let (Source::Atomic(theirs), Source::Atomic(ours)) = (e.source, o.source)
            && e.reaches(theirs, o)
            && o.reaches(ours, e)
        {
            return Order::Before;
        }
        if (e.cluster, e.component) == (o.cluster, o.component) {
            // Program order of one thread; accesses of a whole warp after other accesses of the
            // whole warp, but not accesses of a single lane after them; and an operation with
            // itself.
            let same = match (e.of_thread(), lanes) {
                (true, 0) => observer.lane == NO_LANE,
                (true, lanes) => lanes & !lane_mask(observer.lane) == 0,
                (false, _) => e.clock == o.clock,
            };
            if same {
                return Order::Before;
            }
        }
        if !observer.knows(e, o, lanes) {
            return Order::Unordered;
        }
        let ClockSet { flushed_shared, flushed_global, .. } = observer.knowledge;
        let flushed = if observer.global { flushed_global } else { flushed_shared };
        if e.proxy == Proxy::Generic
            && o.proxy == Proxy::Async
            && !flushed.covers(o.cluster, e.cluster, e.component, e.clock, lanes)
        {
            return Order::Unfenced;
        }
        Order::Before
    }

    /// Returns the conflict of an access with an earlier one, unless the earlier one is ordered
    /// before it.
    fn conflict(
        &self,
        observer: &Observer<'_>,
        (id, lanes): (u32, u32),
        other_reads: bool,
    ) -> Option<Conflict> {
        let order = self.order(observer, id, lanes);
        (order != Order::Before).then(|| Conflict {
            other: self.events[id as usize],
            other_id: id,
            other_lane: (lanes != 0).then(|| lanes.trailing_zeros()),
            other_reads,
            unfenced: order == Order::Unfenced,
        })
    }

    /// Returns the conflict with the last write, if there is one.
    fn with_write(&self, cell: &Cell, observer: &Observer<'_>) -> Option<Conflict> {
        match cell.write {
            0 => None,
            write => self.conflict(observer, (write, lane_mask(cell.write_lane)), false),
        }
    }

    /// Returns the conflict with a read since the last write, if there is one.
    fn with_reads(&self, cell: &Cell, observer: &Observer<'_>) -> Option<Conflict> {
        match cell.reads {
            0 => None,
            read if read & SET == 0 => {
                self.conflict(observer, (read, lane_mask(cell.read_lane)), true)
            }
            reads => {
                let conflict = |it: Reads| self.conflict(observer, (it.event, it.lanes), true);
                // The oldest conflicting read is reported.
                self.reads(reads & !SET).filter_map(conflict).last()
            }
        }
    }

    /// Records an access and returns its conflict with the last write, or of a write with an
    /// earlier read, if there is one.
    pub(crate) fn access(
        &mut self,
        cell: &mut Cell,
        observer: &Observer<'_>,
        write: bool,
    ) -> Option<Conflict> {
        let access = (observer.event, observer.lane, observer.global, write, *cell);
        if let Some((last, after)) = &self.last
            && *last == access
        {
            *cell = *after;
            return None;
        }
        let mut conflict = self.with_write(cell, observer);
        if write {
            conflict = conflict.or_else(|| self.with_reads(cell, observer));
            (cell.write, cell.write_lane) = (observer.event, observer.lane);
            (cell.reads, cell.swizzle, cell.initialised) = (0, 0, true);
        } else {
            self.read(cell, observer);
        }
        if conflict.is_none() {
            self.last = Some((access, *cell));
        }
        conflict
    }

    /// Records a read, in place of those that are ordered before it.
    fn read(&mut self, cell: &mut Cell, observer: &Observer<'_>) {
        let own = lane_mask(observer.lane);
        if cell.reads == 0 {
            (cell.reads, cell.read_lane) = (observer.event, observer.lane);
        } else if cell.reads & SET == 0 {
            let lanes = lane_mask(cell.read_lane);
            let forgotten = if cell.reads == observer.event {
                lanes == own
            } else {
                self.stands_for(observer.event, own, cell.reads, lanes)
                    || self.order(observer, cell.reads, lanes) == Order::Before
            };
            if forgotten {
                (cell.reads, cell.read_lane) = (observer.event, observer.lane);
            } else {
                let first = self.union(EMPTY, cell.reads, lanes);
                cell.reads = SET | self.union(first, observer.event, own);
            }
        } else {
            cell.reads = SET | self.union(cell.reads & !SET, observer.event, own);
        }
    }

    /// Returns the reads of a set, the newest first.
    fn reads(&self, set: u32) -> impl Iterator<Item = Reads> {
        let at = |set: u32| (set != EMPTY).then(|| self.sets[set as usize]);
        std::iter::successors(at(set), move |read| at(read.others))
    }

    /// Returns whether the new read makes the old one redundant: it is a later read of the same
    /// component by at least the same lanes.
    fn stands_for(&self, new: u32, own: u32, old: u32, lanes: u32) -> bool {
        let (new, old) = (&self.events[new as usize], &self.events[old as usize]);
        let whole = lanes == 0 && own != 0;
        (old.cluster, old.component) == (new.cluster, new.component) && lanes & !own == 0 && !whole
    }

    /// Returns the set with one more read, by one lane or by none.
    fn union(&mut self, set: u32, event: u32, lanes: u32) -> u32 {
        if let Some(known) = self.unions.get(&(set, event, lanes)) {
            return *known;
        }
        let begun = self.begun[self.events[event as usize].cluster as usize];
        let wanted = self.mark(event, lanes);
        // Reads that the new one makes redundant are left out; the tail older than all of them is
        // shared.
        let (mut newer, mut kept, mut shared, mut own) = (Vec::new(), Vec::new(), set, lanes);
        let mut next = set;
        while next != EMPTY {
            let Reads { event: old, lanes: its, others, last, marks } = self.sets[next as usize];
            // None of the remaining reads, of which there may be thousands, is of this event or is
            // made redundant by it.
            if last < begun || (last < event && marks & wanted == 0) {
                break;
            }
            next = others;
            if old == event {
                own |= its;
            } else if !self.stands_for(event, lanes, old, its) {
                newer.push((old, its));
                continue;
            }
            kept.append(&mut newer);
            shared = others;
        }
        let mut id = shared;
        for (event, lanes) in kept.into_iter().rev().chain([(event, own)]) {
            id = self.push(event, lanes, id);
        }
        self.unions.insert((set, event, lanes), id);
        id
    }

    /// Adds a set that consists of one read and the set `others`; returns its index.
    fn push(&mut self, event: u32, lanes: u32, others: u32) -> u32 {
        let Reads { last, marks, .. } = self.sets[others as usize];
        let marks = marks | self.mark(event, lanes);
        self.sets.push(Reads { event, lanes, others, last: last.max(event), marks });
        self.sets.len() as u32 - 1
    }

    /// Returns a bit hashed from the component and the lane of a read, or from the component alone
    /// for a read of the whole warp: a later read that makes this one redundant has the same bit.
    /// Returns 0 for reads of several lanes, which no read of one lane makes redundant.
    fn mark(&self, event: u32, lanes: u32) -> u64 {
        if lanes.count_ones() > 1 {
            return 0;
        }
        let Event { cluster, component, .. } = self.events[event as usize];
        let mut hash = Multiplier::default();
        [cluster, component, lanes].into_iter().for_each(|number| hash.write_u32(number));
        1 << (hash.finish() >> 58)
    }
}

/// The cells of a range of memory, allocated by page when first touched.
#[derive(Debug, Default)]
pub(crate) struct Cells {
    pages: Vec<Option<Box<[Cell]>>>,
    initialised: bool,
}

/// The number of cells of a page.
const PAGE: usize = 2048;

impl Cells {
    pub(crate) fn new(bytes: usize, initialised: bool) -> Self {
        let pages = bytes.div_ceil(CELL).div_ceil(PAGE);
        Cells { pages: (0..pages).map(|_| None).collect(), initialised }
    }

    /// Returns the cell of a byte.
    pub(crate) fn at(&mut self, byte: usize) -> &mut Cell {
        &mut self.from(byte)[0]
    }

    /// Returns the cells from that of `byte` to the end of its page.
    pub(crate) fn from(&mut self, byte: usize) -> &mut [Cell] {
        let (cell, initialised) = (byte / CELL, self.initialised);
        let page = self.pages[cell / PAGE]
            .get_or_insert_with(|| vec![Cell::new(initialised); PAGE].into_boxed_slice());
        &mut page[cell % PAGE..]
    }
}
