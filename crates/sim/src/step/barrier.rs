//! Barriers: named barriers, the cluster barrier and mbarriers; `setmaxnreg` and the register pool;
//! and the end of every kind of wait.

use ptx::{Address, ClusterOrder, Operand, Register, RegisterChange, SourceLocation, Space};

use super::Flow;
use super::access::Target;
use crate::Measure;
use crate::hazard::{Actor, HazardKind};
use crate::machine::{Arrival, CLUSTER_WINDOW, Executed, Executor, Mbarrier, SHARED_BASE};
use crate::shadow::Source;
use crate::warp::{State, Wait, Warp, lanes_of};

/// The largest transaction count of an mbarrier.
const TRANSACTION_LIMIT: i64 = (1 << 20) - 1;

/// Returns the arrival that a warp is about to make as a whole.
fn arrival(warp: &Warp<'_>, actor: Actor, place: Option<SourceLocation>) -> Arrival {
    Arrival { component: warp.clock.component, clock: warp.clock.now, lanes: 0, actor, place }
}

impl<'a> Executor<'_, 'a> {
    // ---- named barriers ---------------------------------------------------------

    /// Arrives at a named barrier and returns the generation whose end a waiting warp waits for.
    pub(super) fn named_arrive(
        &mut self,
        warp: &mut Warp<'a>,
        barrier: Operand,
        threads: Option<Operand>,
    ) -> Executed<u64> {
        let barrier = warp.word(barrier)[0];
        let expected = match threads {
            Some(threads) => warp.word(threads)[0],
            None => self.grid_state.program.threads,
        };
        let place = self.grid_state.code.places[warp.pc];
        let actor = self.actor(warp, None);
        if barrier > 15 || expected == 0 || expected % 32 != 0 {
            let text = format!("barrier {barrier} for {expected} threads: there is no such");
            return Err(self.hazard(warp, None, HazardKind::BarrierCount, text));
        }
        let named = &mut self.cluster.blocks[warp.block].named_barriers[barrier as usize];
        let generation = named.generation;
        if named.arrived.is_empty() {
            named.expected = expected;
            named.first_at = place;
        } else if named.expected != expected {
            let (first, wanted) = (named.first_at, named.expected);
            let text = format!(
                "barrier {barrier} is used for {expected} threads while others wait there for \
                 {wanted}"
            );
            let hazard = self.hazard(warp, None, HazardKind::BarrierCount, text);
            return Err(hazard.with_other(first));
        }
        if named.arrived.contains(&warp.index) {
            let first = named.first_at;
            let text = format!(
                "the warp arrives at barrier {barrier} again before the {expected} threads of \
                 the last time are complete"
            );
            let hazard = self.hazard(warp, None, HazardKind::BarrierCount, text);
            return Err(hazard.with_other(first));
        }
        named.arrived.push(warp.index);
        if self.grid_state.checked {
            let arrival = arrival(warp, actor, place);
            let released = warp.clock.release(u32::MAX);
            let unordered = named.arrivals.add(arrival, &released.known);
            // A barrier of one warp is complete as soon as that warp arrives.
            if let Some(other) = unordered.filter(|_| expected > 32) {
                let text = format!(
                    "the warp arrives at barrier {barrier}, and nothing orders that after the last \
                     use of the barrier, by {}: the arrival may count for that one",
                    other.actor
                );
                let hazard = self.hazard(warp, None, HazardKind::UnorderedArrival, text);
                return Err(hazard.with_other(other.place));
            }
            named.releases.current.join(&released);
        }
        if named.arrived.len() as u32 * 32 == expected {
            named.arrived.clear();
            named.arrivals.advance();
            named.generation += 1;
            named.releases.advance(warp.time);
        }
        Ok(generation)
    }

    // ---- the cluster's barrier ------------------------------------------------------

    pub(super) fn cluster_arrive(
        &mut self,
        warp: &mut Warp<'a>,
        order: ClusterOrder,
    ) -> Executed<()> {
        if warp.cluster_arrived.is_some() {
            let text = "the warp arrives at the cluster's barrier again without having waited";
            return Err(self.hazard(warp, None, HazardKind::ClusterBarrierOrder, text));
        }
        warp.cluster_arrived = Some(self.cluster.barrier.generation);
        if self.grid_state.checked && order == ClusterOrder::Release {
            let released = warp.clock.release(u32::MAX);
            self.cluster.barrier.releases.current.join(&released);
        }
        self.settle_cluster_barrier(warp.time);
        Ok(())
    }

    pub(super) fn cluster_wait(&mut self, warp: &mut Warp<'a>) -> Executed<Flow> {
        let Some(generation) = warp.cluster_arrived.take() else {
            let text = "the warp waits at the cluster's barrier without having arrived";
            return Err(self.hazard(warp, None, HazardKind::ClusterBarrierOrder, text));
        };
        self.grid_state.counts.add(Measure::BarrierWaits, 1);
        Ok(Flow::Block(Wait::Cluster { generation }))
    }

    /// Completes the cluster barrier if no warp is missing. The executing one, which is taken out of
    /// the list, has arrived or ended; a warp that has ended counts as arrived.
    pub(super) fn settle_cluster_barrier(&mut self, time: u64) {
        let barrier = &mut self.cluster.barrier;
        let generation = barrier.generation;
        let arrived = |warp: &Warp<'_>| match &warp.state {
            State::Done => true,
            State::Blocked(Wait::Cluster { generation: waited }) => *waited == generation,
            _ => warp.cluster_arrived == Some(generation),
        };
        if self.cluster.warps.iter().flatten().all(|warp| arrived(warp)) {
            barrier.generation += 1;
            barrier.releases.advance(time);
        }
    }

    // ---- memory barriers --------------------------------------------------------------

    pub(super) fn mbarrier_init(
        &mut self,
        warp: &mut Warp<'a>,
        address: Address,
        count: Operand,
    ) -> Executed<()> {
        let addresses = warp.shared_addresses(address);
        let counts = warp.word(count);
        let event = if self.grid_state.checked {
            self.thread_event(warp, Source::Thread, "mbarrier.init")
        } else {
            0
        };
        for lane in lanes_of(warp.active) {
            let (address, count) = (addresses[lane as usize], counts[lane as usize]);
            let (block, offset) = self.shared_range(warp, lane, Space::Shared, address, 8, 8)?;
            if let Some(old) = self.cluster.blocks[block].mbarriers.get(&address) {
                let first = old.initialised_at;
                let name = self.shared_name(address);
                let text = format!("{name} is a memory barrier already");
                let kind = HazardKind::MbarrierReinitialised;
                let hazard = self.hazard(warp, Some(lane), kind, text);
                return Err(hazard.with_other(first));
            }
            if self.grid_state.checked {
                let target = Target::Shared { block, offset };
                self.check_thread(warp, lane, target, 8, event, true)?;
                for byte in (0..8).step_by(2) {
                    self.cluster.blocks[block].cells.at(offset + byte).barrier = true;
                }
            }
            let barrier = Mbarrier {
                expected: count,
                pending: count,
                transactions: 0,
                phase: 0,
                initialised_at: self.grid_state.code.places[warp.pc],
                component: warp.clock.component,
                clock: warp.clock.now,
                lane,
                published: false,
                releases: Default::default(),
                in_flight: 0,
                arrivers: Vec::new(),
                expected_at: None,
                waited: 0,
                arrivals: Default::default(),
            };
            self.cluster.blocks[block].mbarriers.insert(address, barrier);
        }
        Ok(())
    }

    pub(super) fn mbarrier_invalidate(
        &mut self,
        warp: &mut Warp<'a>,
        address: Address,
    ) -> Executed<()> {
        let addresses = warp.shared_addresses(address);
        for lane in lanes_of(warp.active) {
            let address = addresses[lane as usize];
            let (block, _) = self.usable_mbarrier(warp, lane, Space::Shared, address, false)?;
            self.cluster.blocks[block].mbarriers.remove(&address);
            if self.grid_state.checked {
                let offset = (address - SHARED_BASE) as usize;
                for byte in (0..8).step_by(2) {
                    self.cluster.blocks[block].cells.at(offset + byte).barrier = false;
                }
            }
        }
        Ok(())
    }

    /// Returns the block and the local address of an mbarrier, after checking that it is
    /// initialised and that this lane can see the initialisation.
    pub(crate) fn usable_mbarrier(
        &self,
        warp: &Warp<'a>,
        lane: u32,
        space: Space,
        address: u32,
        by_copy: bool,
    ) -> Executed<(usize, u32)> {
        let (block, offset) = self.shared_range(warp, lane, space, address, 8, 8)?;
        let local = offset as u32 + SHARED_BASE;
        let name = self.shared_name(local);
        let Some(barrier) = self.cluster.blocks[block].mbarriers.get(&local) else {
            let text = format!("{name} is not an initialised memory barrier");
            return Err(self.hazard(warp, Some(lane), HazardKind::MbarrierUninitialised, text));
        };
        if !self.grid_state.checked {
            return Ok((block, local));
        }
        let own = barrier.component == warp.clock.component && barrier.lane == lane;
        let known = &warp.clock.view(1 << lane).known;
        let visible = own || known.get(barrier.component).covers(barrier.clock, 1 << barrier.lane);
        let text = if !visible {
            format!("{name} was initialised by a thread that nothing orders before this one")
        } else if !barrier.published && (by_copy || block != warp.block) {
            let who = if by_copy { "the copy engine" } else { "another block" };
            format!("{name} is used by {who}, but no fence has published its initialisation")
        } else {
            return Ok((block, local));
        };
        let kind = HazardKind::MbarrierInitNotVisible;
        let hazard = self.hazard(warp, Some(lane), kind, text);
        Err(hazard.with_other(barrier.initialised_at))
    }

    pub(super) fn mbarrier_arrive(
        &mut self,
        warp: &mut Warp<'a>,
        space: Space,
        address: Address,
        count: Option<Operand>,
        bytes: Option<Operand>,
    ) -> Executed<()> {
        let addresses = warp.shared_addresses(address);
        let counts = count.map(|count| warp.word(count)).unwrap_or([1; 32]);
        let bytes = bytes.map(|bytes| warp.word(bytes));
        let place = self.grid_state.code.places[warp.pc];
        let arriving = arrival(warp, self.actor(warp, None), place);
        let released =
            if self.grid_state.checked { Some(warp.clock.release(warp.active)) } else { None };
        for lane in lanes_of(warp.active) {
            let at = lane as usize;
            let (block, local) = self.usable_mbarrier(warp, lane, space, addresses[at], false)?;
            self.note_remote_access(warp, lane, block, warp.clock.now.saturating_sub(1));
            if let Some(bytes) = &bytes {
                self.expect(warp, lane, block, local, bytes[at])?;
            }
            let barrier =
                self.cluster.blocks[block].mbarriers.get_mut(&local).expect("looked up above");
            if let Some(released) = &released {
                let arriving = Arrival { lanes: 1 << lane, ..arriving };
                if let Some(other) = barrier.arrivals.add(arriving, &released.known) {
                    let phase = barrier.phase;
                    let name = self.shared_name(local);
                    let text = format!(
                        "an arrival in phase {phase} of {name}, and nothing orders it after that \
                         of {} in phase {}: it may count for that one",
                        other.actor,
                        phase - 1
                    );
                    let kind = HazardKind::UnorderedArrival;
                    let hazard = self.hazard(warp, Some(lane), kind, text);
                    return Err(hazard.with_other(other.place));
                }
                barrier.releases.current.join(released);
            }
            if let Some(place) = place {
                barrier.arrivers.retain(|(w, _)| *w != warp.index);
                barrier.arrivers.push((warp.index, place));
            }
            if barrier.pending < counts[at] {
                let (pending, count) = (barrier.pending, counts[at]);
                let initialised_at = barrier.initialised_at;
                let name = self.shared_name(local);
                let text = format!("{count} arrivals at {name}, whose phase waits for {pending}");
                let kind = HazardKind::MbarrierOverArrived;
                let hazard = self.hazard(warp, Some(lane), kind, text);
                return Err(hazard.with_other(initialised_at));
            }
            barrier.pending -= counts[at];
            self.settle_mbarrier(block, local, warp.time)?;
        }
        Ok(())
    }

    pub(super) fn mbarrier_expect(
        &mut self,
        warp: &mut Warp<'a>,
        address: Address,
        bytes: Operand,
    ) -> Executed<()> {
        let addresses = warp.shared_addresses(address);
        let bytes = warp.word(bytes);
        for lane in lanes_of(warp.active) {
            let at = lane as usize;
            let (block, local) =
                self.usable_mbarrier(warp, lane, Space::Shared, addresses[at], false)?;
            self.expect(warp, lane, block, local, bytes[at])?;
            self.settle_mbarrier(block, local, warp.time)?;
        }
        Ok(())
    }

    fn expect(
        &mut self,
        warp: &Warp<'a>,
        lane: u32,
        block: usize,
        local: u32,
        bytes: u32,
    ) -> Executed<()> {
        let place = self.grid_state.code.places[warp.pc];
        let barrier =
            self.cluster.blocks[block].mbarriers.get_mut(&local).expect("looked up before");
        barrier.transactions += bytes as i64;
        barrier.expected_at = place;
        if barrier.transactions > TRANSACTION_LIMIT {
            let total = barrier.transactions;
            let text = format!("{total} bytes expected at once, a memory barrier counts 1048575");
            return Err(self.hazard(warp, Some(lane), HazardKind::TransactionCount, text));
        }
        Ok(())
    }

    /// Ends the phase of an mbarrier if no arrival and no byte is missing.
    pub(crate) fn settle_mbarrier(&mut self, block: usize, local: u32, time: u64) -> Executed<()> {
        let barrier =
            self.cluster.blocks[block].mbarriers.get_mut(&local).expect("looked up before");
        if barrier.pending != 0 || barrier.transactions != 0 {
            return Ok(());
        }
        if barrier.in_flight != 0 {
            let arrived_at = barrier.arrivers.last().map(|(_, place)| *place);
            let (expected_at, in_flight) = (barrier.expected_at.or(arrived_at), barrier.in_flight);
            let name = self.shared_name(local);
            let copy = self.cluster.operations.values().find(|operation| {
                matches!(operation.kind, crate::machine::OperationKind::Load { to, barrier, .. }
                    if to == block && barrier == local)
            });
            let text = format!(
                "the phase of {name} ends while {in_flight} copies that report to it are in \
                 flight: their bytes were not expected"
            );
            let mut hazard = self.grid_state.hazard(HazardKind::TransactionCount, text);
            if let Some(copy) = copy {
                hazard = self.operation_hazard(copy, HazardKind::TransactionCount, hazard.message);
            }
            hazard.other = expected_at;
            return Err(hazard);
        }
        if barrier.waited < barrier.phase {
            let (phase, arrived_at) = (barrier.phase, barrier.arrivers.last().copied());
            let (expected_at, initialised_at) = (barrier.expected_at, barrier.initialised_at);
            let name = self.shared_name(local);
            let text = format!(
                "phase {phase} of {name} ends before anyone has waited for phase {}: whoever waits \
                 for its parity now waits for another phase",
                phase - 1
            );
            let mut hazard = self.grid_state.hazard(HazardKind::MbarrierOverrun, text);
            hazard.place = arrived_at.map(|(_, place)| place).or(expected_at);
            hazard.other = initialised_at;
            return Err(hazard);
        }
        barrier.phase += 1;
        barrier.arrivals.advance();
        barrier.pending = barrier.expected;
        barrier.releases.advance(time);
        self.grid_state.progress += 1;
        Ok(())
    }

    pub(super) fn mbarrier_try_wait(
        &mut self,
        warp: &mut Warp<'a>,
        dst: Register,
        address: Address,
        parity: Operand,
    ) -> Executed<Flow> {
        let addresses = warp.shared_addresses(address);
        let parities = warp.word(parity);
        self.grid_state.counts.add(Measure::BarrierWaits, 1);
        let mut done = 0;
        for lane in lanes_of(warp.active) {
            let at = lane as usize;
            let (block, local) =
                self.usable_mbarrier(warp, lane, Space::Shared, addresses[at], false)?;
            let barrier =
                self.cluster.blocks[block].mbarriers.get_mut(&local).expect("looked up above");
            if barrier.phase as u32 & 1 != parities[at] & 1 {
                done |= 1 << lane;
                barrier.waited = barrier.phase;
                if self.grid_state.checked {
                    warp.clock.acquire(1 << lane, |k| k.join(&barrier.releases.completed));
                }
            }
        }
        warp.set_predicate(dst, done);
        if done == warp.active {
            return Ok(Flow::Next);
        }
        self.grid_state.counts.add(Measure::BlockedWaits, 1);
        Ok(Flow::Poll)
    }

    pub(super) fn mbarrier_wait(
        &mut self,
        warp: &mut Warp<'a>,
        address: Address,
        parity: Operand,
    ) -> Executed<Flow> {
        let addresses = warp.shared_addresses(address);
        let parities = warp.word(parity);
        let mut waits: Vec<(u32, u32, u32)> = Vec::new();
        for lane in lanes_of(warp.active) {
            let at = lane as usize;
            self.usable_mbarrier(warp, lane, Space::Shared, addresses[at], false)?;
            let key = (addresses[at], parities[at] & 1);
            match waits.iter_mut().find(|(address, parity, _)| (*address, *parity) == key) {
                Some((_, _, lanes)) => *lanes |= 1 << lane,
                None => waits.push((key.0, key.1, 1 << lane)),
            }
        }
        self.grid_state.counts.add(Measure::BarrierWaits, 1);
        Ok(Flow::Block(Wait::Mbarrier(waits)))
    }

    // ---- registers and ranks ------------------------------------------------------------

    pub(super) fn set_registers(
        &mut self,
        warp: &mut Warp<'a>,
        change: RegisterChange,
        count: u32,
    ) -> Executed<Flow> {
        warp.budgets.push(count);
        let nth = warp.budgets.len();
        let first = self.first_warp(warp.group);
        for other in (first..first + 4).filter(|w| *w != warp.index) {
            let Some(Some(other)) = self.cluster.warps.get(other) else { continue };
            if other.budgets.get(nth - 1).is_some_and(|theirs| *theirs != count) {
                let text = format!(
                    "a budget of {count} registers, but warp {} of the warpgroup \
                    takes {}",
                    other.in_block,
                    other.budgets[nth - 1]
                );
                let hazard = self.hazard(warp, None, HazardKind::WarpgroupMismatch, text);
                return Err(hazard.with_other(self.grid_state.code.places[other.pc]));
            }
        }
        let pool = &mut self.cluster.blocks[warp.block].register_pool;
        match change {
            RegisterChange::Decrease if count <= warp.registers => {
                *pool += 32 * (warp.registers - count);
                warp.registers = count;
                Ok(Flow::Next)
            }
            RegisterChange::Increase if count >= warp.registers => {
                Ok(Flow::Block(Wait::Registers { count }))
            }
            RegisterChange::Decrease | RegisterChange::Increase => {
                let held = warp.registers;
                let text = format!("{change:?} to {count} registers, the warp holds {held}");
                Err(self.hazard(warp, None, HazardKind::RegisterBudget, text))
            }
        }
    }

    pub(super) fn map_shared(
        &mut self,
        warp: &mut Warp<'a>,
        dst: Register,
        address: Register,
        rank: Operand,
    ) -> Executed<()> {
        let addresses = *warp.word_of(address);
        let ranks = warp.word(rank);
        let blocks = self.cluster.blocks.len() as u32;
        for lane in lanes_of(warp.active) {
            if ranks[lane as usize] >= blocks {
                let rank = ranks[lane as usize];
                let text = format!("rank {rank} in a cluster of {blocks} blocks");
                return Err(self.hazard(warp, Some(lane), HazardKind::ClusterRank, text));
            }
        }
        let mapped: [u32; 32] = std::array::from_fn(|i| {
            addresses[i].wrapping_add(CLUSTER_WINDOW.wrapping_mul(ranks[i].wrapping_add(1)))
        });
        warp.set_word(dst, &mapped);
        Ok(())
    }

    // ---- the end of waits -----------------------------------------------------------------

    /// Returns whether the condition that a blocked warp waits for holds.
    pub(crate) fn is_over(&self, warp: &Warp<'a>, wait: &Wait) -> bool {
        match wait {
            Wait::Mbarrier(waits) => waits.iter().all(|(address, parity, _)| {
                let barrier = self.cluster.blocks[warp.block].mbarriers.get(address);
                barrier.is_none_or(|barrier| barrier.phase as u32 & 1 != *parity)
            }),
            Wait::Named { barrier, generation } => {
                self.cluster.blocks[warp.block].named_barriers[*barrier as usize].generation
                    > *generation
            }
            Wait::Cluster { generation } => self.cluster.barrier.generation > *generation,
            Wait::Products { until } => self.cluster.groups[warp.group].done >= *until,
            Wait::Copies { operations, .. } => {
                operations.iter().all(|id| !self.cluster.operations.contains_key(id))
            }
            Wait::Stores { operations, read_only, .. } => operations.iter().all(|id| {
                use crate::machine::OperationKind as K;
                match self.cluster.operations.get(id).map(|operation| &operation.kind) {
                    None => true,
                    Some(K::Store { staged, .. }) => *read_only && staged.is_some(),
                    Some(K::CopyAsync(_) | K::ArriveOnCopies { .. } | K::Load { .. }) => false,
                }
            }),
            Wait::Registers { count } => {
                let need = 32 * (count - warp.registers);
                self.cluster.blocks[warp.block].register_pool >= need
            }
        }
    }

    /// Ends a wait that is over: the warp acquires what it waited for.
    pub(crate) fn finish_wait(&mut self, warp: &mut Warp<'a>, wait: Wait) {
        use crate::clock::Entry;
        use crate::machine::{store_read_component, store_write_component, stream_entry};
        let checked = self.grid_state.checked;
        let mut event_time = 0;
        match wait {
            Wait::Mbarrier(waits) => {
                for (address, _, lanes) in waits {
                    let block = &mut self.cluster.blocks[warp.block];
                    let Some(barrier) = block.mbarriers.get_mut(&address) else { continue };
                    barrier.waited = barrier.phase;
                    event_time = event_time.max(barrier.releases.completed_at);
                    if checked {
                        warp.clock.acquire(lanes, |k| k.join(&barrier.releases.completed));
                    }
                }
            }
            Wait::Named { barrier, .. } => {
                let named = &self.cluster.blocks[warp.block].named_barriers[barrier as usize];
                event_time = named.releases.completed_at;
                if checked {
                    warp.clock.synchronise();
                    warp.clock.acquire(u32::MAX, |k| k.join(&named.releases.completed));
                }
            }
            Wait::Cluster { .. } => {
                event_time = self.cluster.barrier.releases.completed_at;
                if checked {
                    warp.clock.synchronise();
                    warp.clock
                        .acquire(u32::MAX, |k| k.join(&self.cluster.barrier.releases.completed));
                }
            }
            Wait::Products { until } => {
                let group = warp.group;
                event_time = self.cluster.groups[group].finished_at;
                warp.products_waited = warp.products_waited.max(until);
                if checked {
                    let component = self.cluster.product_component(group);
                    let entry = stream_entry(until as u32);
                    warp.clock.acquire(u32::MAX, |k| k.known.raise(component, entry));
                }
            }
            Wait::Copies { waited, .. } => {
                if checked {
                    warp.clock.wait_for_copies(&waited);
                }
            }
            Wait::Stores { clock, read_only, .. } => {
                if checked && clock > 0 {
                    let (read, write) =
                        (store_read_component(warp.index), store_write_component(warp.index));
                    // Groups of stores belong to lanes: those that wait know of their own.
                    let entry = Entry::of_each(warp.active, clock, 0);
                    warp.clock.acquire(warp.active, |k| {
                        k.known.raise(read, entry);
                        if !read_only {
                            k.known.raise(write, entry);
                        }
                    });
                }
            }
            Wait::Registers { count } => {
                let need = 32 * (count - warp.registers);
                self.cluster.blocks[warp.block].register_pool -= need;
                warp.registers = count;
            }
        }
        let began = warp.waiting_since;
        if event_time > warp.time {
            warp.time = event_time;
        }
        if let Some(trace) = &mut self.grid_state.trace
            && warp.time > began
        {
            let place = warp.code.places[warp.pc].map(|p| format!(" at {p}")).unwrap_or_default();
            trace.push(crate::trace::Span {
                block: self.cluster.blocks[warp.block].index,
                track: crate::Track::Warp(warp.in_block),
                name: format!("wait{place}"),
                start: began,
                end: warp.time,
                runs: false,
            });
        }
        warp.state = State::Ready;
        warp.pc += 1;
    }
}
