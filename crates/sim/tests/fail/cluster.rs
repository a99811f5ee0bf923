//! Hazards of clusters: accesses to the shared memory of other blocks.

use flashcore_sim::HazardKind as H;
use ptx::{Barriers, Builder, Expression, Target};

use crate::{fails, hazard, passes};

#[test]
fn no_such_rank() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32).cluster(2);
    let offset = k.shared("tile", 64, 16);
    let tile = k.shared_address(offset);
    let rank = k.cluster_rank();
    k.map_shared(tile, rank + 1);
    fails("no_such_rank", H::ClusterRank, &k.finish().unwrap());
}

/// Returns a kernel in which each block arrives at the mbarrier of the other.
fn neighbours(sync_at_end: bool) -> ptx::Program {
    let mut k = Builder::new("kernel", Target::SM_90A, 32).cluster(2);
    let barriers = Barriers::new(&mut k, "barrier", 1, 1);
    let thread = k.thread_index();
    k.if_(thread.equals(0), |k| barriers.init(k));
    k.barriers_ready();
    let barrier = barriers.at(&mut k, 0);
    let rank = k.cluster_rank();
    k.if_((thread + rank).equals(0), |k| {
        let remote = k.map_shared(barrier, 1);
        k.mbarrier_arrive_remote(remote);
    });
    if sync_at_end {
        k.cluster_sync();
    }
    k.finish().unwrap()
}

#[test]
fn block_has_exited() {
    passes(&neighbours(true));
    let program = neighbours(false);
    fails("block_has_exited", H::ExitedBlock, &program);
    let options = flashcore_sim::Options::values(flashcore_sim::Policy::Latest, 0);
    assert_eq!(hazard(&program, &options).kind, H::ExitedBlock);
}
