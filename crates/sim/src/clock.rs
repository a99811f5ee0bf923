//! Vector clocks: which accesses happened before which.
//!
//! The algorithm follows FastTrack (Flanagan and Freund, PLDI 2009): an access is an *epoch*, the
//! name of one component and its clock, and it happened before an observer if the observer's vector
//! has reached that clock. The components of a cluster are: each warp, the stream of its
//! `cp.async`s, the streams of its bulk stores (reading and writing), each warpgroup's stream of
//! products, and a slot for each bulk load in flight. A stream completes in order, so one clock
//! says how far it has come.
//!
//! The threads of a warp share a component. An [`Entry`] distinguishes what *all* lanes did up to
//! some clock from what *some* lanes did up to a later one: an elected lane that arrives at a
//! barrier releases its own accesses, not those of lanes that it did not meet at a `bar.warp.sync`.
//!
//! A `cp.async` belongs to its lane, too: a lane that has waited for its copies knows of its own
//! and of no other lane's, until the lanes synchronise. So does a bulk store: a wait covers the
//! stores of the lanes that wait.
//!
//! What this may miss: where two different subsets of a warp's lanes acted alone and both are
//! known, the later clock is taken for the union of both; and lanes that waited alone in different
//! subsets are merged. Both can only hide a race, never invent one. Slots of bulk loads are reused
//! only when the issuer knows that the earlier load is over, which loses nothing.

use std::collections::BTreeMap;

/// The mask of all 32 lanes.
pub(crate) const FULL: u32 = u32::MAX;

/// What an observer knows of one component.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The clock up to which the accesses of every lane are known.
    pub(crate) all: u32,
    /// The clock up to which the accesses of `lanes` are known.
    some: u32,
    lanes: u32,
}

impl Entry {
    pub(crate) fn of(lanes: u32, clock: u32, synced: u32) -> Self {
        if lanes == FULL {
            Entry { all: clock, some: 0, lanes: 0 }
        } else {
            Entry { all: synced, some: clock, lanes }
        }
    }

    /// Creates an entry of `lanes` as individual lanes: even a full mask does not count as all
    /// lanes having synchronised.
    pub(crate) fn of_each(lanes: u32, clock: u32, synced: u32) -> Self {
        Entry { all: synced, some: clock, lanes }
    }

    pub(crate) fn covers(self, clock: u32, lanes: u32) -> bool {
        clock <= self.all || (clock <= self.some && lanes & !self.lanes == 0)
    }

    pub(crate) fn join(&mut self, other: Entry) {
        self.all = self.all.max(other.all);
        let mine = self.some > self.all;
        let theirs = other.some > self.all;
        (self.some, self.lanes) = match (mine, theirs) {
            (true, true) => (self.some.max(other.some), self.lanes | other.lanes),
            (true, false) => (self.some, self.lanes),
            (false, true) => (other.some, other.lanes),
            (false, false) => (0, 0),
        };
    }

    /// Reduces the entry to what both know. Among lanes that are known individually, it may forget
    /// some that are known up to a later clock than others.
    fn meet(&mut self, other: Entry) {
        let (less, more) = if self.all <= other.all { (*self, other) } else { (other, *self) };
        let known_alone = (less.some.min(more.some), less.lanes & more.lanes);
        let known_of_all = (less.some.min(more.all), less.lanes);
        let alone = known_alone.1 != 0 && known_alone.0 > known_of_all.0;
        let (some, lanes) = if alone { known_alone } else { known_of_all };
        let (some, lanes) = if some > less.all { (some, lanes) } else { (0, 0) };
        *self = Entry { all: less.all, some, lanes };
    }
}

/// What an observer knows of each component of its cluster, and of the components of other
/// clusters.
#[derive(Clone, Debug, Default)]
pub(crate) struct VectorClock {
    entries: Vec<Entry>,
    foreign: BTreeMap<(u32, u32), Entry>,
}

impl VectorClock {
    pub(crate) fn get(&self, component: u32) -> Entry {
        self.entries.get(component as usize).copied().unwrap_or_default()
    }

    pub(crate) fn raise(&mut self, component: u32, entry: Entry) {
        let component = component as usize;
        if self.entries.len() <= component {
            self.entries.resize(component + 1, Entry::default());
        }
        self.entries[component].join(entry);
    }

    pub(crate) fn join(&mut self, other: &VectorClock) {
        if self.entries.len() < other.entries.len() {
            self.entries.resize(other.entries.len(), Entry::default());
        }
        for (mine, theirs) in self.entries.iter_mut().zip(&other.entries) {
            mine.join(*theirs);
        }
        for (key, entry) in &other.foreign {
            self.foreign.entry(*key).or_default().join(*entry);
        }
    }

    fn meet(&mut self, other: &VectorClock) {
        self.entries.truncate(other.entries.len());
        for (mine, theirs) in self.entries.iter_mut().zip(&other.entries) {
            mine.meet(*theirs);
        }
        self.foreign.retain(|key, entry| match other.foreign.get(key) {
            Some(theirs) => {
                entry.meet(*theirs);
                true
            }
            None => false,
        });
    }

    /// Joins the knowledge of a thread of another cluster.
    fn join_foreign(&mut self, home: u32, cluster: u32, other: &VectorClock) {
        for (component, entry) in other.entries.iter().enumerate() {
            if *entry != Entry::default() {
                self.foreign.entry((cluster, component as u32)).or_default().join(*entry);
            }
        }
        for ((of, component), entry) in &other.foreign {
            if *of == home {
                self.raise(*component, *entry);
            } else {
                self.foreign.entry((*of, *component)).or_default().join(*entry);
            }
        }
    }

    pub(crate) fn covers(
        &self,
        home: u32,
        cluster: u32,
        component: u32,
        clock: u32,
        lanes: u32,
    ) -> bool {
        if home == cluster {
            return self.get(component).covers(clock, lanes);
        }
        self.foreign.get(&(cluster, component)).is_some_and(|entry| entry.covers(clock, lanes))
    }
}

/// The accesses known to an observer, and those of them that a proxy fence has covered.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClockSet {
    /// The accesses that happened before.
    pub(crate) known: VectorClock,
    /// The known accesses to shared memory that the async proxy (the copy engine and the tensor
    /// cores) may rely on.
    pub(crate) flushed_shared: VectorClock,
    /// The known accesses to global memory that the async proxy may rely on.
    pub(crate) flushed_global: VectorClock,
}

impl ClockSet {
    pub(crate) fn join(&mut self, other: &ClockSet) {
        self.known.join(&other.known);
        self.flushed_shared.join(&other.flushed_shared);
        self.flushed_global.join(&other.flushed_global);
    }

    /// Reduces the knowledge to what another has as well.
    pub(crate) fn meet(&mut self, other: &ClockSet) {
        self.known.meet(&other.known);
        self.flushed_shared.meet(&other.flushed_shared);
        self.flushed_global.meet(&other.flushed_global);
    }

    pub(crate) fn join_foreign(&mut self, home: u32, cluster: u32, other: &ClockSet) {
        self.known.join_foreign(home, cluster, &other.known);
        self.flushed_shared.join_foreign(home, cluster, &other.flushed_shared);
        self.flushed_global.join_foreign(home, cluster, &other.flushed_global);
    }
}

/// The memory that a proxy fence applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fenced {
    Shared,
    Global,
    Both,
}

/// The clocks of one warp.
#[derive(Clone, Debug, Default)]
pub(crate) struct WarpClock {
    /// The component of the warp.
    pub(crate) component: u32,
    /// The current clock of the warp.
    pub(crate) now: u32,
    /// The knowledge of every lane.
    pub(crate) all: ClockSet,
    /// The knowledge of `lanes`, which includes that of all lanes.
    some: ClockSet,
    lanes: u32,
    /// The clock up to which each lane has waited for its own `cp.async`s.
    copies: [u32; 32],
}

impl WarpClock {
    pub(crate) fn new(component: u32) -> Self {
        WarpClock { component, now: 1, ..WarpClock::default() }
    }

    /// Returns the knowledge of these lanes.
    pub(crate) fn view(&self, lanes: u32) -> &ClockSet {
        if lanes & !self.lanes == 0 { &self.some } else { &self.all }
    }

    fn own(&self, lanes: u32) -> Entry {
        Entry::of(lanes, self.now, self.all.known.get(self.component).all)
    }

    /// Returns what these lanes release: their knowledge and their own accesses so far. Later
    /// accesses are not included.
    pub(crate) fn release(&mut self, lanes: u32) -> ClockSet {
        let view = if lanes & self.lanes != 0 { &self.some } else { &self.all };
        let mut released = view.clone();
        released.known.raise(self.component, self.own(lanes));
        raise_copies(&mut released, self.component, &self.copies, lanes);
        self.now += 1;
        released
    }

    /// Returns what each of these lanes knows as it issues a copy of its own.
    pub(crate) fn issue(&mut self, lanes: u32) -> ClockSet {
        let view = if lanes & self.lanes != 0 { &self.some } else { &self.all };
        let mut known = view.clone();
        let synced = self.all.known.get(self.component).all;
        known.known.raise(self.component, Entry::of_each(lanes, self.now, synced));
        self.now += 1;
        known
    }

    /// Returns the clock up to which a lane has waited for its own copies.
    pub(crate) fn copies_of(&self, lane: u32) -> u32 {
        self.copies[lane as usize]
    }

    /// Records that lanes have waited for their own copies, each up to a clock.
    pub(crate) fn wait_for_copies(&mut self, waited: &[(u32, u32)]) {
        for (lane, clock) in waited {
            let mine = &mut self.copies[*lane as usize];
            *mine = (*mine).max(*clock);
        }
    }

    /// Adds to the knowledge of these lanes.
    pub(crate) fn acquire(&mut self, lanes: u32, learn: impl Fn(&mut ClockSet)) {
        if lanes == FULL {
            learn(&mut self.all);
            if self.lanes != 0 {
                learn(&mut self.some);
            }
        } else {
            self.separate(lanes);
            learn(&mut self.some);
        }
    }

    fn separate(&mut self, lanes: u32) {
        if self.lanes == 0 {
            self.some = self.all.clone();
        }
        self.lanes |= lanes;
    }

    /// Synchronises all lanes: each then knows what any of them knew and did.
    pub(crate) fn synchronise(&mut self) {
        if self.lanes != 0 {
            self.all = std::mem::take(&mut self.some);
            self.lanes = 0;
        }
        let (component, entry) = (self.component, Entry::of(FULL, self.now, 0));
        self.all.known.raise(component, entry);
        raise_copies(&mut self.all, component, &self.copies, FULL);
        self.now += 1;
    }

    /// Executes a proxy fence in these lanes: what they know is now visible to the async proxy.
    pub(crate) fn flush(&mut self, lanes: u32, fenced: Fenced) {
        let (component, own, copies) = (self.component, self.own(lanes), self.copies);
        self.acquire(lanes, |knowledge| {
            let mut now = knowledge.clone();
            now.known.raise(component, own);
            raise_copies(&mut now, component, &copies, lanes);
            if fenced != Fenced::Global {
                knowledge.flushed_shared.join(&now.known);
            }
            if fenced != Fenced::Shared {
                knowledge.flushed_global.join(&now.known);
            }
        });
        self.now += 1;
    }
}

/// Adds the copies that each of these lanes has waited for.
fn raise_copies(knowledge: &mut ClockSet, component: u32, copies: &[u32; 32], lanes: u32) {
    let of = |lane: &u32| lanes >> lane & 1 == 1;
    let waited = || (0..32).filter(of).map(|lane| copies[lane as usize]);
    let (least, most) = (waited().min().unwrap_or(0), waited().max().unwrap_or(0));
    if most == 0 {
        return;
    }
    let all = if lanes == FULL { least } else { 0 };
    let ahead = (0..32).filter(|lane| of(lane) && copies[*lane as usize] > all);
    let ahead = ahead.fold(0, |mask, lane| mask | 1 << lane);
    knowledge.known.raise(copies_of(component), Entry::of_each(ahead, most, all));
}

/// Returns the component of the stream of `cp.async`s of the warp with this component.
pub(crate) fn copies_of(component: u32) -> u32 {
    component + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_speaks_for_itself() {
        let mut warp = WarpClock::new(0);
        let released = warp.release(1);
        assert!(released.known.get(0).covers(1, 1));
        assert!(!released.known.get(0).covers(1, 2));
        warp.synchronise();
        let released = warp.release(1);
        assert!(released.known.get(0).covers(1, 2));
    }

    #[test]
    fn a_fence_flushes_what_is_known() {
        let mut writer = WarpClock::new(0);
        let mut reader = WarpClock::new(1);
        let released = writer.release(FULL);
        reader.acquire(FULL, |k| k.join(&released));
        assert!(reader.all.known.get(0).covers(1, FULL));
        assert!(!reader.all.flushed_shared.get(0).covers(1, FULL));
        reader.flush(FULL, Fenced::Shared);
        assert!(reader.all.flushed_shared.get(0).covers(1, FULL));
        assert!(!reader.all.flushed_global.get(0).covers(1, FULL));
        reader.flush(FULL, Fenced::Both);
        assert!(reader.all.flushed_global.get(0).covers(1, FULL));
    }

    #[test]
    fn a_lane_waits_for_its_own_copies() {
        let mut warp = WarpClock::new(0);
        warp.wait_for_copies(&[(3, 5)]);
        assert!(!warp.all.known.get(1).covers(5, 1 << 3));
        let released = warp.release(1 << 3);
        assert!(released.known.get(1).covers(5, 1 << 3));
        assert!(!released.known.get(1).covers(5, 1 << 4));
        warp.synchronise();
        assert!(warp.all.known.get(1).covers(5, 1 << 3));
        assert!(!warp.all.known.get(1).covers(5, 1 << 4));
    }
}
