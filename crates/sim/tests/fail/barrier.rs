//! Hazards of named barriers and mbarriers.

use flashcore_sim::HazardKind as H;
use flashcore_sim::{Options, Policy, mutate};
use ptx::{
    Builder, Expression, Instruction, Mbarriers, Operand, Reg, Role, Scope, SharedAddress,
    StatementKind, Target, U32,
};

use crate::{fails, hazard, passes};

#[test]
fn barrier_counts_differ() {
    let mut k = Builder::new("kernel", Target::SM_90A, 64);
    k.role(Role::warps("first", 0..1), |k| k.barrier_sync(1, 64));
    k.role(Role::warps("second", 1..2), |k| k.barrier_sync(1, 96));
    fails("barrier_counts_differ", H::BarrierCount, &k.finish().unwrap());
}

#[test]
fn barrier_with_too_few() {
    let mut k = Builder::new("kernel", Target::SM_90A, 64);
    k.role(Role::warps("first", 0..1), |k| k.barrier_sync(1, 64));
    fails("barrier_with_too_few", H::BarrierCount, &k.finish().unwrap());
}

/// Two pairs of warps that nothing orders, at one barrier or at one each.
#[test]
fn pairs_at_one_barrier() {
    let kernel = |other: u32| {
        let mut k = Builder::new("kernel", Target::SM_90A, 128);
        k.role(Role::warps("first", 0..2), |k| k.barrier_sync(1, 64));
        k.role(Role::warps("second", 2..4), |k| k.barrier_sync(other, 64));
        k.finish().unwrap()
    };
    passes(&kernel(2));
    fails("unordered_pairs", H::UnorderedArrival, &kernel(1));
}

/// A warp that only arrives at a barrier may arrive again when it knows that the others have
/// passed; a barrier of one warp is complete when that warp arrives.
#[test]
fn arrivals_by_turns() {
    let kernel = |answers: bool| {
        let mut k = Builder::new("kernel", Target::SM_90A, 64);
        k.role(Role::warps("giver", 0..1), |k| {
            for _ in 0..3 {
                k.barrier_arrive(1, 64);
                if answers {
                    k.barrier_sync(2, 64);
                }
            }
            k.barrier_sync(3, 32);
        });
        k.role(Role::warps("taker", 1..2), |k| {
            for _ in 0..3 {
                k.barrier_sync(1, 64);
                if answers {
                    k.barrier_arrive(2, 64);
                }
            }
            k.barrier_sync(3, 32);
        });
        k.finish().unwrap()
    };
    passes(&kernel(true));
    // If the taker is there first, the arrivals come one by one; else the giver arrives twice.
    for policy in Policy::HOSTILE {
        for seed in 0..8 {
            let found = hazard(&kernel(false), &Options::checked(policy, seed));
            assert!(matches!(found.kind, H::UnorderedArrival | H::BarrierCount), "{found}");
        }
    }
}

/// A warp that arrives at an mbarrier for the second phase must know that the first is over.
#[test]
fn arrivals_for_another_phase() {
    let kernel = |waits: bool| {
        with_barrier(96, 32, |k, barrier| {
            k.role(Role::warps("first", 0..1), |k| k.mbarrier_arrive(barrier));
            k.role(Role::warps("second", 1..2), |k| {
                if waits {
                    k.mbarrier_wait(barrier, 0, Scope::Block);
                }
                k.mbarrier_arrive(barrier);
            });
        })
    };
    passes(&kernel(true));
    fails("unordered_phases", H::UnorderedArrival, &kernel(false));
}

/// A wait for the parity of the phase before the current one is over at once.
#[test]
fn wait_for_the_other_parity() {
    let kernel = |parity: u32| {
        let mut k = Builder::new("kernel", Target::SM_90A, 64);
        let barriers = Mbarriers::new(&mut k, "ready", 1, 32);
        let offset = k.shared("tile", 128, 16);
        let (tile, lane, thread) = (k.shared_address(offset), k.lane(), k.thread_index());
        k.if_(thread.equals(0), |k| barriers.init(k));
        k.if_(thread.less(32), |k| k.store(tile + lane * 4, 0.0));
        k.barriers_ready();
        let barrier = barriers.at(&mut k, 0);
        k.role(Role::warps("writer", 0..1), |k| {
            k.store(tile + lane * 4, lane);
            k.mbarrier_arrive(barrier);
        });
        k.role(Role::warps("reader", 1..2), |k| {
            k.mbarrier_wait(barrier, parity, Scope::Block);
            k.load::<U32, _>(tile + lane * 4);
        });
        k.finish().unwrap()
    };
    passes(&kernel(0));
    // If the reader comes late, the phase is over, and it waits for one that never ends.
    let mut kinds = Vec::new();
    for policy in Policy::HOSTILE {
        for seed in 0..8 {
            kinds.push(hazard(&kernel(1), &Options::checked(policy, seed)).kind);
        }
    }
    assert!(kinds.iter().all(|it| matches!(it, H::DataRace | H::Deadlock)), "{kinds:?}");
    assert!(kinds.contains(&H::DataRace), "{kinds:?}");
}

/// A pair of warps that arrives late at the barrier of another pair, or at one of its own. Most
/// schedules let the first pair through before: there the missing order is the hazard. One that
/// starves a warp shows what comes of it.
#[test]
fn late_warps_at_the_barrier_of_others() {
    let program = |barrier: u32| {
        let mut k = Builder::new("kernel", Target::SM_90A, 128);
        let word = k.shared("word", 128, 4);
        let lane = k.lane();
        let word = k.shared_address(word);
        let word = k.eval(word + lane * 4);
        k.role(Role::warps("writer", 0..1), |k| {
            k.store(word, lane);
            k.barrier_sync(1, 64);
        });
        k.role(Role::warps("reader", 1..2), |k| {
            k.barrier_sync(1, 64);
            k.load::<U32, _>(word);
        });
        k.role(Role::warps("late", 2..4), |k| {
            k.for_range(0, 500, 1, |k, _| k.warp_sync());
            k.barrier_sync(barrier, 64);
        });
        k.finish().unwrap()
    };
    passes(&program(2));
    for seed in 0..3 {
        let found = hazard(&program(1), &Options::checked(Policy::Random, seed));
        assert_eq!(found.kind, H::UnorderedArrival, "{found}");
    }
    let found = hazard(&program(1), &Options::checked(Policy::Random, 3));
    assert_eq!(found.kind, H::UninitialisedMemory, "{found}");
}

/// Returns a kernel with one initialised mbarrier for `arrivals` arrivals.
fn with_barrier(
    threads: u32,
    arrivals: u32,
    body: impl FnOnce(&mut Builder, Reg<SharedAddress>),
) -> ptx::Program {
    let mut k = Builder::new("kernel", Target::SM_90A, threads);
    let barriers = Mbarriers::new(&mut k, "barrier", 1, arrivals);
    let thread = k.thread_index();
    k.if_(thread.equals(0), |k| barriers.init(k));
    k.barriers_ready();
    let barrier = barriers.at(&mut k, 0);
    body(&mut k, barrier);
    k.finish().unwrap()
}

#[test]
fn mbarrier_not_initialised() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let offset = k.shared("barrier", 8, 8);
    let barrier = k.shared_address(offset);
    k.mbarrier_wait(barrier, 1, Scope::Block);
    fails("mbarrier_not_initialised", H::MbarrierUninitialised, &k.finish().unwrap());
}

#[test]
fn mbarrier_initialised_twice() {
    let program = with_barrier(32, 1, |k, barrier| {
        let thread = k.thread_index();
        k.if_(thread.equals(0), |k| {
            let address = ptx::Address { base: barrier.register(), offset: 0 };
            k.push(Instruction::MbarrierInit { address, count: Operand::u32(1) });
        });
    });
    fails("mbarrier_initialised_twice", H::MbarrierReinitialised, &program);
}

#[test]
fn mbarrier_initialisation_not_visible() {
    let kernel = |sync: bool| {
        let mut k = Builder::new("kernel", Target::SM_90A, 64);
        let barriers = Mbarriers::new(&mut k, "barrier", 1, 64);
        let thread = k.thread_index();
        k.if_(thread.equals(0), |k| barriers.init(k));
        if sync {
            k.block_sync();
        } else {
            // The initialisation is visible to this warp, but not to the other.
            k.push(Instruction::WarpSync);
        }
        let barrier = barriers.at(&mut k, 0);
        k.if_(thread.less(32), |k| k.mbarrier_arrive(barrier));
        k.if_(thread.at_least(32), |k| {
            k.push(Instruction::Sleep { nanoseconds: Operand::u32(1000) });
            k.mbarrier_arrive(barrier);
        });
        k.finish().unwrap()
    };
    passes(&kernel(true));
    let program = kernel(false);
    let found =
        crate::hazard(&program, &flashcore_sim::Options::checked(flashcore_sim::Policy::Latest, 0));
    assert_eq!(found.kind, H::MbarrierInitNotVisible);
    insta::assert_snapshot!("mbarrier_not_visible", crate::show(&found.to_string()));
}

#[test]
fn too_many_arrivals() {
    let program = with_barrier(32, 1, |k, barrier| {
        let thread = k.thread_index();
        k.if_(thread.equals(0), |k| {
            let address = ptx::Address { base: barrier.register(), offset: 0 };
            let count = Some(Operand::u32(2));
            k.push(Instruction::MbarrierArrive { space: ptx::Space::Shared, address, count });
        });
    });
    fails("too_many_arrivals", H::MbarrierOverArrived, &program);
}

/// Two phases complete without a wait, so that the parity is the same again.
#[test]
fn phase_overrun() {
    let kernel = |waits: bool| {
        with_barrier(32, 32, |k, barrier| {
            for phase in 0..2 {
                k.mbarrier_arrive(barrier);
                if waits {
                    k.mbarrier_wait(barrier, phase, Scope::Block);
                }
            }
        })
    };
    passes(&kernel(true));
    fails("phase_overrun", H::MbarrierOverrun, &kernel(false));
}

/// The second phase has one arrival too few, which would hang only in a third round.
#[test]
fn phase_left_unfinished() {
    let program = with_barrier(32, 32, |k, barrier| {
        k.mbarrier_arrive(barrier);
        k.mbarrier_wait(barrier, 0, Scope::Block);
        let thread = k.thread_index();
        k.if_(thread.less(31), |k| k.mbarrier_arrive(barrier));
    });
    fails("phase_left_unfinished", H::MbarrierUnfinished, &program);
}

#[test]
fn mbarrier_memory_touched() {
    let program = with_barrier(32, 1, |k, barrier| {
        let thread = k.thread_index();
        k.if_(thread.equals(3), |k| k.store(barrier, 1.0));
    });
    fails("mbarrier_memory_touched", H::MbarrierTouched, &program);
}

#[test]
fn deadlock_of_two_warps() {
    let mut k = Builder::new("kernel", Target::SM_90A, 64);
    let barriers = Mbarriers::new(&mut k, "turn", 2, 1);
    let thread = k.thread_index();
    k.if_(thread.equals(0), |k| barriers.init(k));
    k.barriers_ready();
    let (first, second) = (barriers.at(&mut k, 0), barriers.at(&mut k, 1));
    // Each warp lets the other go once, then both wait for a second turn.
    k.role(Role::warps("left", 0..1), |k| {
        let leader = k.elect();
        k.if_(leader, |k| k.mbarrier_arrive(second));
        k.mbarrier_wait(first, 0, Scope::Block);
        k.mbarrier_wait(first, 1, Scope::Block);
        k.if_(leader, |k| k.mbarrier_arrive(second));
    });
    k.role(Role::warps("right", 1..2), |k| {
        let leader = k.elect();
        k.if_(leader, |k| k.mbarrier_arrive(first));
        k.mbarrier_wait(second, 0, Scope::Block);
        k.mbarrier_wait(second, 1, Scope::Block);
        k.if_(leader, |k| k.mbarrier_arrive(first));
    });
    fails("deadlock", H::Deadlock, &k.finish().unwrap());
}

#[test]
fn polling_forever() {
    let program = with_barrier(32, 1, |k, barrier| {
        k.loop_(|k| {
            let done = k.register::<ptx::Pred>();
            let address = ptx::Address { base: barrier.register(), offset: 0 };
            k.push(Instruction::MbarrierTryWait {
                dst: done.register(),
                address,
                parity: Operand::u32(0),
                scope: Scope::Block,
            });
            k.break_if(done);
        });
    });
    fails("polling_forever", H::Deadlock, &program);
}

#[test]
fn cluster_barrier_order() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32).cluster(2);
    k.cluster_sync();
    let program = k.finish().unwrap();
    passes(&program);
    let without = |wanted: fn(&Instruction) -> bool| {
        mutate::edit(
            &program,
            &mut |statement| !matches!(&statement.kind, StatementKind::Instruction(i) if wanted(i)),
        )
    };
    let program = without(|i| matches!(i, Instruction::ClusterArrive { .. }));
    fails("cluster_wait_without_arrival", H::ClusterBarrierOrder, &program);
}
