//! The scheduler: chooses the next warp, copy or product by the policy and the seed, and explains
//! deadlocks.

use std::mem::take;

use crate::Policy;
use crate::hazard::{Hazard, HazardKind};
use crate::machine::{Cluster, Executed, Executor, GridState, OperationKind};
use crate::warp::{State, Wait, Warp};

/// A warp, an operation or a product that can run now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Warp { cluster: usize, warp: usize },
    Operation { cluster: usize, id: u64 },
    Product { cluster: usize, group: usize },
}

/// The number of consecutive unsuccessful polls after which the run counts as deadlocked.
const MAX_IDLE_POLLS: u32 = 256;
/// The number of consecutive turns of warps after which [`Policy::Latest`] completes an operation,
/// in case a warp is spinning on it.
const LATEST_TURNS: u32 = 64;
/// The number of consecutive turns of others after which [`Policy::Random`] gives the starved warp
/// a turn, in case a warp is spinning on it.
const STARVATION_TURNS: u32 = 1024;

/// Runs all clusters of the grid to their end.
pub(crate) fn run(grid_state: &mut GridState<'_>) -> Executed<()> {
    let per_cluster = grid_state.program.cluster.max(1);
    let total = grid_state.grid / per_cluster;
    let mut clusters: Vec<Cluster<'_>> = Vec::new();
    let mut launched = 0;
    let mut schedule = Schedule {
        idle_polls: 0,
        spins: 0,
        turn: grid_state.options.seed as usize,
        starved_turns: 0,
        warps: Vec::new(),
        others: Vec::new(),
    };
    loop {
        clusters.retain(|cluster| !(cluster.is_done() && cluster.operations.is_empty()));
        while launched < total && clusters.len() < grid_state.options.resident.max(1) as usize {
            clusters.push(Cluster::new(grid_state, launched));
            launched += 1;
        }
        if clusters.is_empty() {
            return Ok(());
        }
        if grid_state.steps > grid_state.options.step_limit {
            let text = format!("after {} steps the run is not over", grid_state.steps);
            return Err(grid_state.hazard(HazardKind::Runaway, text));
        }
        schedule.step(grid_state, &mut clusters)?;
    }
}

struct Schedule {
    idle_polls: u32,
    spins: u32,
    /// A counter that rotates among the ready warps.
    turn: usize,
    /// The number of turns of others since the starved warp had one.
    starved_turns: u32,
    /// The warps that can run, found anew for each turn; kept to reuse the allocation.
    warps: Vec<Choice>,
    /// The operations and products that can complete; kept like `warps`.
    others: Vec<Choice>,
}

impl Schedule {
    fn step<'a>(
        &mut self,
        grid_state: &mut GridState<'a>,
        clusters: &mut [Cluster<'a>],
    ) -> Executed<()> {
        let (mut warps, mut others) = (take(&mut self.warps), take(&mut self.others));
        find_candidates(grid_state, clusters, &mut warps, &mut others);
        let choice = self.choose(grid_state, clusters, &warps, &others);
        (self.warps, self.others) = (warps, others);
        let choice = match choice {
            Some(choice) => {
                self.idle_polls = 0;
                choice
            }
            None => {
                // At most polling warps are left.
                let polling = pollers(clusters);
                self.idle_polls += 1;
                if polling.is_empty() || self.idle_polls > MAX_IDLE_POLLS {
                    return Err(deadlock(grid_state, clusters));
                }
                polling[self.idle_polls as usize % polling.len()]
            }
        };
        match choice {
            Choice::Operation { cluster, id } => {
                Executor { grid_state, cluster: &mut clusters[cluster] }.complete(id)
            }
            Choice::Product { cluster, group } => {
                Executor { grid_state, cluster: &mut clusters[cluster] }.finish_product(group)
            }
            Choice::Warp { cluster, warp } => {
                let quantum = match grid_state.options.policy {
                    Policy::Earliest => 32,
                    Policy::Latest => 4096,
                    Policy::Random => 1 + grid_state.random.below(48) as u32,
                    Policy::Modelled => 4,
                };
                let cluster = &mut clusters[cluster];
                cluster.current = warp;
                let mut taken = cluster.warps[warp].take().expect("warps are in their place");
                let mut executor = Executor { grid_state, cluster };
                let mut quantum = quantum;
                match std::mem::replace(&mut taken.state, State::Ready) {
                    State::Blocked(wait) => executor.finish_wait(&mut taken, wait),
                    // Long enough to poll again; otherwise the turn would count as progress.
                    State::Polling(_) => quantum = quantum.max(256),
                    State::Ready | State::Done => {}
                }
                // The cost model has four schedulers per block, which issue one instruction per
                // cycle each.
                let modelled = executor.grid_state.options.policy == Policy::Modelled;
                let scheduler = 4 * taken.block + taken.in_block as usize % 4;
                if modelled {
                    taken.time = taken.time.max(executor.cluster.issue_free[scheduler]);
                }
                let before = taken.time;
                let first = taken.pc;
                let result = executor.turn(&mut taken, quantum);
                if modelled {
                    executor.cluster.issue_free[scheduler] = taken.time;
                }
                let block = executor.cluster.blocks[taken.block].index;
                if let Some(trace) = &mut grid_state.trace
                    && taken.time > before
                {
                    let place = taken.code.places[first];
                    let name = place.map(|p| format!("run from {p}")).unwrap_or_default();
                    let track = crate::Track::Warp(taken.in_block);
                    let (start, end) = (before, taken.time);
                    trace.push(crate::trace::Span { block, track, name, start, end, runs: true });
                }
                cluster.warps[warp] = Some(taken);
                result
            }
        }
    }

    fn choose(
        &mut self,
        grid_state: &mut GridState<'_>,
        clusters: &[Cluster<'_>],
        warps: &[Choice],
        others: &[Choice],
    ) -> Option<Choice> {
        match grid_state.options.policy {
            Policy::Earliest => {
                if let Some(first) = others.first() {
                    return Some(*first);
                }
                self.turn = self.turn.wrapping_add(1);
                (!warps.is_empty()).then(|| warps[self.turn % warps.len()])
            }
            Policy::Latest => {
                let same = |choice: &&Choice| match choice {
                    Choice::Warp { cluster, warp } => clusters[*cluster].current == *warp,
                    Choice::Operation { .. } | Choice::Product { .. } => false,
                };
                self.spins += 1;
                if !warps.is_empty() && (self.spins < LATEST_TURNS || others.is_empty()) {
                    // A warp that has used up its turns is rotated out.
                    let next = self.turn % warps.len();
                    self.turn = self.turn.wrapping_add(1);
                    let spinning = self.spins > 8;
                    let current = warps.iter().find(same).filter(|_| !spinning);
                    return Some(*current.unwrap_or(&warps[next]));
                }
                self.spins = 0;
                if others.is_empty() {
                    return None;
                }
                let products: Vec<_> =
                    others.iter().filter(|c| matches!(c, Choice::Product { .. })).collect();
                if !products.is_empty() && grid_state.random.below(2) == 0 {
                    return Some(
                        *products[grid_state.random.below(products.len() as u64) as usize],
                    );
                }
                others.last().copied()
            }
            Policy::Random => {
                // Some seeds delay operations, some delay warps, and some starve one warp.
                let (warp_weight, other_weight) = match grid_state.options.seed % 4 {
                    0 => (1, 1),
                    1 => (12, 1),
                    2 => (1, 12),
                    _ => (3, 1),
                };
                let (seed, leaves_behind) =
                    (grid_state.options.seed, grid_state.options.seed % 4 == 3);
                let is_behind = |choice: &Choice| match choice {
                    Choice::Warp { cluster, warp } => {
                        leaves_behind
                            && *warp as u64 == seed / 4 % clusters[*cluster].warps.len() as u64
                    }
                    Choice::Operation { .. } | Choice::Product { .. } => false,
                };
                let behind = warps.iter().copied().find(is_behind);
                let ahead = || warps.iter().copied().filter(|choice| !is_behind(choice));
                let count = ahead().count() as u64;
                let alone = count == 0 && others.is_empty();
                self.starved_turns = if behind.is_none() || alone {
                    0
                } else {
                    (self.starved_turns + 1) % STARVATION_TURNS
                };
                if self.starved_turns == 0 && behind.is_some() {
                    return behind;
                }
                let total = count * warp_weight + others.len() as u64 * other_weight;
                if total == 0 {
                    return None;
                }
                let at = grid_state.random.below(total);
                let boundary = count * warp_weight;
                if at < boundary {
                    return ahead().nth((at / warp_weight) as usize);
                }
                Some(others[((at - boundary) / other_weight) as usize])
            }
            Policy::Modelled => {
                let time = |choice: &Choice| match choice {
                    Choice::Warp { cluster, warp } => {
                        clusters[*cluster].warps[*warp].as_ref().map_or(0, |w| w.time)
                    }
                    Choice::Operation { cluster, id } => clusters[*cluster].operations[id].ready_at,
                    Choice::Product { cluster, group } => {
                        let product = clusters[*cluster].groups[*group].queue.front();
                        product.map_or(0, |p| p.issued_at)
                    }
                };
                warps.iter().chain(others).min_by_key(|c| time(c)).copied()
            }
        }
    }
}

/// Finds the warps that can run, and the operations and products that can complete, operations in
/// the order of their issue.
fn find_candidates<'a>(
    grid_state: &mut GridState<'a>,
    clusters: &mut [Cluster<'a>],
    warps: &mut Vec<Choice>,
    others: &mut Vec<Choice>,
) {
    warps.clear();
    others.clear();
    for (index, cluster) in clusters.iter_mut().enumerate() {
        let executor = Executor { grid_state, cluster };
        for (number, warp) in executor.cluster.warps.iter().enumerate() {
            let warp = warp.as_ref().expect("warps are in their place");
            let ready = match &warp.state {
                State::Ready => true,
                State::Polling(progress) => executor.grid_state.progress > *progress,
                State::Blocked(wait) => executor.is_over(warp, wait),
                State::Done => false,
            };
            if ready {
                warps.push(Choice::Warp { cluster: index, warp: number });
            }
        }
        for (id, operation) in &executor.cluster.operations {
            let ready = match &operation.kind {
                OperationKind::ArriveOnCopies { after, .. } => {
                    after.iter().all(|id| !executor.cluster.operations.contains_key(id))
                }
                OperationKind::CopyAsync(_)
                | OperationKind::Load { .. }
                | OperationKind::Store { .. } => true,
            };
            if ready {
                others.push(Choice::Operation { cluster: index, id: *id });
            }
        }
        for (group, state) in executor.cluster.groups.iter().enumerate() {
            if state.queue.front().is_some_and(|product| product.issued == 0xF) {
                others.push(Choice::Product { cluster: index, group });
            }
        }
    }
}

fn pollers(clusters: &[Cluster<'_>]) -> Vec<Choice> {
    let mut polling = Vec::new();
    for (cluster, state) in clusters.iter().enumerate() {
        for (warp, state) in state.warps.iter().enumerate() {
            if matches!(state.as_ref().map(|w| &w.state), Some(State::Polling(_))) {
                polling.push(Choice::Warp { cluster, warp });
            }
        }
    }
    polling
}

// ---- deadlocks ---------------------------------------------------------------------------

/// Returns the hazard of a run that cannot make progress.
fn deadlock<'a>(grid_state: &mut GridState<'a>, clusters: &mut [Cluster<'a>]) -> Box<Hazard> {
    for cluster in clusters.iter_mut() {
        let executor = Executor { grid_state, cluster };
        if let Some(hazard) = executor.deadlock() {
            return hazard;
        }
    }
    grid_state.hazard(HazardKind::Deadlock, "nothing can go on")
}

impl<'a> Executor<'_, 'a> {
    fn deadlock(&self) -> Option<Box<Hazard>> {
        let blocked: Vec<&Warp<'a>> = (self.cluster.warps.iter().flatten())
            .filter(|w| matches!(w.state, State::Blocked(_) | State::Polling(_)))
            .map(|w| &**w)
            .collect();
        let first = *blocked.first()?;
        if let Some(hazard) = self.deadlock_cause(&blocked) {
            return Some(hazard);
        }
        let mut lines = Vec::new();
        let mut shown = Vec::new();
        for warp in &blocked {
            let (text, _) = self.waiting_for(warp);
            let place = self.grid_state.code.places[warp.pc];
            // Warps that wait for the same thing in the same place share a line.
            if shown.contains(&(warp.block, warp.pc, text.clone())) {
                continue;
            }
            let place = place.map(|p| format!(" at {p}")).unwrap_or_default();
            lines.push(format!("{} waits for {text}{place}", self.actor(warp, None)));
            shown.push((warp.block, warp.pc, text));
        }
        if let Some(cycle) = self.cycle(first) {
            lines.push(format!("the cycle: {cycle}"));
        }
        let text = format!("nobody can go on:\n{}", lines.join("\n"));
        let hazard = self.hazard(first, None, HazardKind::Deadlock, text);
        let other = blocked.iter().find(|w| w.pc != first.pc);
        Some(hazard.with_other(other.and_then(|w| self.grid_state.code.places[w.pc])))
    }

    /// Returns a more specific hazard than a deadlock, where the cause is known.
    fn deadlock_cause(&self, blocked: &[&Warp<'a>]) -> Option<Box<Hazard>> {
        for warp in blocked {
            let State::Blocked(wait) = &warp.state else { continue };
            match wait {
                Wait::Mbarrier(waits) => {
                    for (address, _, _) in waits {
                        let mbarriers = &self.cluster.blocks[warp.block].mbarriers;
                        let Some(barrier) = mbarriers.get(address) else { continue };
                        let bytes = barrier.transactions;
                        let name = self.shared_name(*address);
                        let text = if bytes < 0 {
                            format!(
                                "the phase of {name} cannot end: {} bytes came that nobody \
                                 expected",
                                -bytes
                            )
                        } else if bytes > 0 && barrier.pending == 0 {
                            format!(
                                "the phase of {name} cannot end: {bytes} expected bytes never came"
                            )
                        } else {
                            continue;
                        };
                        let kind = HazardKind::TransactionCount;
                        let hazard = self.hazard(warp, None, kind, text);
                        let other = barrier.expected_at.or(barrier.initialised_at);
                        return Some(hazard.with_other(other));
                    }
                }
                Wait::Registers { count } => {
                    let pool = self.cluster.blocks[warp.block].register_pool;
                    let need = 32 * (count - warp.registers);
                    let text = format!(
                        "the warp waits for {need} registers, {pool} are free and nobody will \
                         give any back"
                    );
                    return Some(self.hazard(warp, None, HazardKind::RegisterBudget, text));
                }
                Wait::Products { .. } => {
                    let queue = &self.cluster.groups[warp.group].queue;
                    let Some(product) = queue.front() else { continue };
                    let missing: Vec<u32> =
                        (0..4).filter(|m| product.issued >> m & 1 == 0).collect();
                    let text = format!(
                        "the warp waits for a product that warps {missing:?} of its warpgroup \
                         never issue"
                    );
                    let kind = HazardKind::WarpgroupMismatch;
                    let hazard = self.hazard(warp, None, kind, text);
                    return Some(hazard.with_other(self.grid_state.code.places[product.step]));
                }
                Wait::Named { barrier, .. } => {
                    let others_done = (self.cluster.warps.iter().flatten())
                        .filter(|w| w.block == warp.block)
                        .all(|w| {
                            matches!(w.state, State::Done | State::Blocked(Wait::Named { .. }))
                        });
                    if others_done {
                        let named =
                            &self.cluster.blocks[warp.block].named_barriers[*barrier as usize];
                        let text = format!(
                            "{} of {} threads have arrived at barrier {barrier}, and no others \
                             will",
                            32 * named.arrived.len(),
                            named.expected
                        );
                        return Some(self.hazard(warp, None, HazardKind::BarrierCount, text));
                    }
                }
                Wait::Cluster { .. } | Wait::Copies { .. } | Wait::Stores { .. } => {}
            }
        }
        None
    }

    /// Describes what a warp waits for, and returns the warps that it may be waiting for.
    fn waiting_for(&self, warp: &Warp<'a>) -> (String, Vec<usize>) {
        let State::Blocked(wait) = &warp.state else {
            return ("a memory barrier it asks again and again".to_owned(), Vec::new());
        };
        match wait {
            Wait::Mbarrier(waits) => {
                let (address, parity, _) = waits[0];
                let name = self.shared_name(address);
                let Some(barrier) = self.cluster.blocks[warp.block].mbarriers.get(&address) else {
                    return (format!("{name}, which is no memory barrier any more"), Vec::new());
                };
                let mut text = format!(
                    "parity {parity} of {name} (in phase {}, {} of {} arrivals missing",
                    barrier.phase, barrier.pending, barrier.expected
                );
                if barrier.transactions != 0 {
                    text += &format!(", {} bytes", barrier.transactions);
                }
                text += ")";
                let arrivers: Vec<usize> = barrier.arrivers.iter().map(|(w, _)| *w).collect();
                match barrier.arrivers.last() {
                    Some((_, place)) => text += &format!(", last arrived at from {place}"),
                    None => text += ", where nobody ever arrived",
                }
                (text, arrivers)
            }
            Wait::Named { barrier, .. } => {
                let named = &self.cluster.blocks[warp.block].named_barriers[*barrier as usize];
                let missing = (self.cluster.warps.iter().flatten())
                    .filter(|w| w.block == warp.block && !named.arrived.contains(&w.index))
                    .map(|w| w.index)
                    .collect();
                let arrived = 32 * named.arrived.len();
                (format!("barrier {barrier} ({arrived} of {} threads)", named.expected), missing)
            }
            Wait::Cluster { generation } => {
                let missing = (self.cluster.warps.iter().flatten())
                    .filter(|w| w.cluster_arrived != Some(*generation))
                    .filter(|w| !matches!(w.state, State::Blocked(Wait::Cluster { .. })))
                    .map(|w| w.index)
                    .collect();
                ("the cluster's barrier".to_owned(), missing)
            }
            Wait::Products { until } => (format!("its product {until}"), Vec::new()),
            Wait::Copies { .. } => ("asynchronous copies".to_owned(), Vec::new()),
            Wait::Stores { .. } => ("bulk stores".to_owned(), Vec::new()),
            Wait::Registers { count } => (format!("{count} registers"), Vec::new()),
        }
    }

    /// Follows the waits-for relation from a warp until it closes a cycle, and describes the cycle.
    fn cycle(&self, first: &Warp<'a>) -> Option<String> {
        let mut path = vec![first.index];
        loop {
            let last = self.warp(*path.last()?);
            let (_, for_whom) = self.waiting_for(last);
            let next = for_whom
                .into_iter()
                .rev()
                .find(|w| matches!(self.warp(*w).state, State::Blocked(_) | State::Polling(_)))?;
            let seen = path.iter().position(|w| *w == next);
            path.push(next);
            if let Some(seen) = seen {
                let names: Vec<String> = path[seen..]
                    .iter()
                    .map(|w| self.actor(self.warp(*w), None).to_string())
                    .collect();
                return Some(names.join(" waits for "));
            }
        }
    }
}
