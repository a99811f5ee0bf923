//! Memory order between threads: releases, acquires and fences.
//!
//! A release records at its address what the thread knows; an acquire of the same address learns
//! it, if each of the two is within the scope of the other. A fence gives relaxed accesses the same
//! effect: relaxed stores after it release, and what relaxed loads before it have seen is acquired.

use ptx::{Fence, Scope, Space};

use crate::clock::{ClockSet, Fenced};
use crate::machine::{CLUSTER_WINDOW, Executor, Release};
use crate::warp::{Warp, lanes_of};

impl<'a> Executor<'_, 'a> {
    /// Returns a key for an address that is unique among global memory and the shared memory of all
    /// blocks.
    fn key(&self, warp: &Warp<'_>, space: Space, address: u64) -> u64 {
        match space {
            Space::Global => address,
            Space::Shared => {
                1 << 63 | (self.cluster.blocks[warp.block].index as u64) << 32 | address
            }
            Space::Cluster if address as u32 >= CLUSTER_WINDOW => {
                let rank = address as u32 / CLUSTER_WINDOW - 1;
                let first = self.cluster.blocks[0].index;
                let local = address % CLUSTER_WINDOW as u64;
                1 << 63 | ((first + rank) as u64) << 32 | local
            }
            Space::Cluster => self.key(warp, Space::Shared, address),
        }
    }

    /// Acquires for one lane what was released at an address: now if the access `acquires`, else at
    /// the next fence.
    pub(super) fn acquire_at(
        &mut self,
        warp: &mut Warp<'a>,
        lane: u32,
        space: Space,
        address: u64,
        scope: Scope,
        acquires: bool,
    ) {
        let key = self.key(warp, space, address);
        let Some(releases) = self.grid_state.releases.get(&key) else { return };
        if acquires {
            self.learn(warp, 1 << lane, releases, scope);
        } else {
            // The next fence acquires only what is within the scope of this load.
            let here = self.cluster.blocks[warp.block].index;
            let seen = releases.iter().filter(|it| it.reaches(self.cluster.index, here, scope));
            warp.unfenced.push((1 << lane, seen.cloned().collect()));
        }
    }

    /// Adds what was released to the knowledge of `lanes`, from those releases that are within
    /// `scope` and whose own scope includes these lanes.
    fn learn(&self, warp: &mut Warp<'a>, lanes: u32, releases: &[Release], scope: Scope) {
        let (cluster, block) = (self.cluster.index, self.cluster.blocks[warp.block].index);
        let mut learned = ClockSet::default();
        for release in releases.iter().filter(|it| it.reaches(cluster, block, scope)) {
            if release.cluster == cluster {
                learned.join(&release.knowledge);
            } else {
                learned.join_foreign(cluster, release.cluster, &release.knowledge);
            }
        }
        warp.clock.acquire(lanes, |k| k.join(&learned));
    }

    /// Releases for the active lanes at their addresses: everything they know if the access
    /// `releases`, else what they knew at their last fence.
    pub(super) fn release_at(
        &mut self,
        warp: &mut Warp<'a>,
        space: Space,
        addresses: &[u64; 32],
        scope: Scope,
        releases: bool,
    ) {
        // A relaxed access after a fence releases no further than the scope of the fence.
        let (knowledge, scope) = if releases {
            (warp.clock.release(warp.active), scope)
        } else if let Some((fenced, reach)) = &warp.fenced {
            (fenced.clone(), narrower(*reach, scope))
        } else {
            return;
        };
        let (cluster, block) = (self.cluster.index, self.cluster.blocks[warp.block].index);
        let mut keys: Vec<u64> = lanes_of(warp.active)
            .map(|lane| self.key(warp, space, addresses[lane as usize]))
            .collect();
        keys.sort_unstable();
        keys.dedup();
        for key in keys {
            let list = self.grid_state.releases.entry(key).or_default();
            let same = list
                .iter_mut()
                .find(|r| r.cluster == cluster && r.block == block && r.scope == scope);
            match same {
                Some(release) => release.knowledge.join(&knowledge),
                None => {
                    let knowledge = knowledge.clone();
                    list.push(Release { cluster, block, scope, knowledge });
                }
            }
        }
    }

    pub(super) fn fence(&mut self, warp: &mut Warp<'a>, fence: Fence) {
        if matches!(fence, Fence::MbarrierInit | Fence::ProxyAsyncShared | Fence::ProxyAsync) {
            // Other threads may now use the mbarriers that these lanes initialised.
            let component = warp.clock.component;
            let active = warp.active;
            let own = |lane: u32| active >> lane & 1 == 1;
            for barrier in self.cluster.blocks[warp.block].mbarriers.values_mut() {
                barrier.published |= barrier.component == component && own(barrier.lane);
            }
        }
        if !self.grid_state.checked {
            return;
        }
        match fence {
            Fence::AcquireRelease(scope) | Fence::SequentiallyConsistent(scope) => {
                for (lanes, seen) in std::mem::take(&mut warp.unfenced) {
                    self.learn(warp, lanes, &seen, scope);
                }
                warp.fenced = Some((warp.clock.release(warp.active), scope));
            }
            Fence::MbarrierInit => {}
            Fence::ProxyAsyncShared => warp.clock.flush(warp.active, Fenced::Shared),
            Fence::ProxyAsyncGlobal => warp.clock.flush(warp.active, Fenced::Global),
            Fence::ProxyAsync => warp.clock.flush(warp.active, Fenced::Both),
        }
    }
}

/// Returns the narrower of two scopes.
fn narrower(a: Scope, b: Scope) -> Scope {
    match (a, b) {
        (Scope::Block, _) | (_, Scope::Block) => Scope::Block,
        (Scope::Cluster, _) | (_, Scope::Cluster) => Scope::Cluster,
        (Scope::Gpu, _) | (_, Scope::Gpu) => Scope::Gpu,
        (Scope::System, Scope::System) => Scope::System,
    }
}
