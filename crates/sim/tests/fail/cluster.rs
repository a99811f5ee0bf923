//! Hazards of clusters: accesses to the shared memory of other blocks.

use flashcore_sim::HazardKind as H;
use ptx::{Builder, ClusterOrder, Expression, Instruction, Mbarriers, Scope, Target};

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
    let barriers = Mbarriers::new(&mut k, "barrier", 1, 1);
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

/// Returns a kernel in which two lanes of block 0 arrive at mbarriers of block 1, which waits only
/// for the second arrival before it ends.
fn two_lanes(synced: bool) -> ptx::Program {
    let mut k = Builder::new("kernel", Target::SM_90A, 32).cluster(2);
    let barriers = Mbarriers::new(&mut k, "barrier", 2, 1);
    let thread = k.thread_index();
    k.if_(thread.equals(0), |k| barriers.init(k));
    k.barriers_ready();
    let rank = k.cluster_rank();
    let [unwaited, waited] = [0, 1].map(|index| barriers.at(&mut k, index));
    k.if_((thread + rank * 32).equals(0), |k| {
        let remote = k.map_shared(unwaited, 1);
        k.mbarrier_arrive_remote(remote);
    });
    if synced {
        k.warp_sync();
    }
    k.if_((thread + rank * 32).equals(5), |k| {
        let remote = k.map_shared(waited, 1);
        k.mbarrier_arrive_remote(remote);
    });
    k.if_(rank.equals(1), |k| k.mbarrier_wait(waited, 0, Scope::Cluster));
    k.finish().unwrap()
}

/// A later access of another lane of the warp does not hide the first one.
#[test]
fn block_has_exited_for_one_lane() {
    passes(&two_lanes(true));
    fails("block_has_exited_for_one_lane", H::ExitedBlock, &two_lanes(false));
}

/// A warp that has ended counts as arrived at the cluster's barrier, also where it ends between the
/// arrival and the wait of another.
#[test]
fn a_warp_that_has_ended_is_not_waited_for() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32).cluster(2);
    let rank = k.cluster_rank();
    k.if_(rank.equals(0), |k| {
        k.push(Instruction::ClusterArrive { order: ClusterOrder::Release });
        (0..60).for_each(|_| k.warp_sync());
        k.push(Instruction::ClusterWait);
    });
    passes(&k.finish().unwrap());
}
