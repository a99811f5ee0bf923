//! Data races: conflicting accesses that nothing orders.

use flashcore_sim::HazardKind as H;
use ptx::{
    AtomicOperation, AtomicOrder, BF16x2, Builder, Expression, F32, GlobalAddress, Instruction,
    LoadHint, LoadOrder, Reg, Scope, Space, StoreHint, StoreOrder, Target, U32, U64,
};

use crate::copy::{FENCED, Store, wait, with_store};
use crate::{Argument, Failure, Launch, Memory, Options, Policy, fails, passes, sim};

/// Returns a kernel in which every thread writes its word, then reads that of the thread `distance`
/// further on.
fn exchange(threads: u32, distance: u32, synchronise: impl Fn(&mut Builder)) -> ptx::Program {
    let mut k = Builder::new("kernel", Target::SM_90A, threads);
    let offset = k.shared("tile", 4 * threads, 16);
    let tile = k.shared_address(offset);
    let thread = k.thread_index();
    k.store(tile + thread * 4, 0.0);
    k.block_sync();
    k.store(tile + thread * 4, thread);
    synchronise(&mut k);
    let other = k.eval((thread + distance) % threads);
    k.load::<U32, _>(tile + other * 4);
    k.finish().unwrap()
}

#[test]
fn data_race() {
    fails("data_race", H::DataRace, &exchange(64, 32, |_| {}));
    passes(&exchange(64, 32, |k| k.block_sync()));
}

#[test]
fn race_between_lanes() {
    fails("race_between_lanes", H::LaneRace, &exchange(32, 1, |_| {}));
    passes(&exchange(32, 1, |k| k.push(Instruction::WarpSync)));
}

#[test]
fn a_lane_that_arrives_does_not_speak_for_the_others() {
    let kernel = |meet: bool| {
        let mut k = Builder::new("kernel", Target::SM_90A, 64);
        let tile = k.shared("tile", 128, 16);
        let barriers = ptx::Mbarriers::new(&mut k, "ready", 1, 1);
        let tile = k.shared_address(tile);
        let thread = k.thread_index();
        k.if_(thread.equals(0), |k| barriers.init(k));
        k.barriers_ready();
        let barrier = barriers.at(&mut k, 0);
        k.role(ptx::Role::warps("writer", 0..1), |k| {
            k.store(tile + thread * 4, thread);
            if meet {
                k.push(Instruction::WarpSync);
            }
            k.if_(thread.equals(0), |k| k.mbarrier_arrive(barrier));
        });
        k.role(ptx::Role::warps("reader", 1..2), |k| {
            k.mbarrier_wait(barrier, 0, Scope::Block);
            k.load::<U32, _>(tile + (thread - 32) * 4);
        });
        k.finish().unwrap()
    };
    fails("elected_lane", H::DataRace, &kernel(false));
    passes(&kernel(true));
}

/// Stores 1 to a flag.
fn raise(k: &mut Builder, flag: Reg<GlobalAddress>, order: StoreOrder) {
    let one = k.eval::<U32>(1);
    k.store_vector(flag, &[one], StoreHint { order, ..StoreHint::default() });
}

/// Polls a flag or counter until it has a value.
fn wait_for(k: &mut Builder, flag: Reg<GlobalAddress>, number: u32, order: LoadOrder) {
    k.loop_(|k| {
        let hint = LoadHint { order, ..LoadHint::default() };
        let [seen] = k.load_vector::<U32, _, 1>(flag, hint);
        k.break_if(seen.equals(number));
    });
}

/// Returns a kernel of two blocks: one runs `first` on its data and a flag, the other waits for the
/// flag and runs `second` on the data.
fn one_after_the_other(
    first: impl FnOnce(&mut Builder, Reg<GlobalAddress>, Reg<GlobalAddress>),
    second: impl FnOnce(&mut Builder, Reg<GlobalAddress>),
) -> ptx::Program {
    let mut k = Builder::new("kernel", Target::SM_90A, 32).cluster(2);
    let [data, flag] = ["data", "flag"].map(|name| k.parameter::<GlobalAddress>(name));
    let (thread, rank) = (k.thread_index(), k.cluster_rank());
    k.if_(thread.equals(0), |k| {
        k.if_else(
            rank.equals(0),
            |k| first(k, data, flag),
            |k| {
                wait_for(k, flag, 1, LoadOrder::Acquire(Scope::Gpu));
                second(k, data);
            },
        );
    });
    k.finish().unwrap()
}

/// Returns a kernel in which one warp writes data and sets a flag, and the other waits for the
/// flag.
fn flag(store: StoreOrder, load: LoadOrder) -> ptx::Program {
    let mut k = Builder::new("kernel", Target::SM_90A, 64);
    let data = k.parameter::<GlobalAddress>("data");
    let raised = k.parameter::<GlobalAddress>("flag");
    let thread = k.thread_index();
    k.if_else(
        thread.less(32),
        |k| {
            k.if_(thread.equals(0), |k| {
                k.store(data, 1.0);
                raise(k, raised, store);
            });
        },
        |k| {
            k.if_(thread.equals(32), |k| {
                wait_for(k, raised, 1, load);
                k.load::<F32, _>(data);
            });
        },
    );
    k.finish().unwrap()
}

#[test]
fn flags_order_by_release_and_acquire() {
    let (release, acquire) = (StoreOrder::Release(Scope::Gpu), LoadOrder::Acquire(Scope::Gpu));
    passes(&flag(release, acquire));
    let (relaxed_store, relaxed_load) =
        (StoreOrder::Relaxed(Scope::Gpu), LoadOrder::Relaxed(Scope::Gpu));
    fails("flag_relaxed", H::DataRace, &flag(relaxed_store, acquire));
    fails("flag_relaxed_load", H::DataRace, &flag(release, relaxed_load));
}

/// A release or an acquire of the block does not reach another block.
#[test]
fn flags_that_do_not_reach() {
    let kernel = |store: Scope| {
        one_after_the_other(
            move |k, data, flag| {
                k.store(data, 1.0);
                raise(k, flag, StoreOrder::Release(store));
            },
            |k, data| {
                k.load::<F32, _>(data);
            },
        )
    };
    passes(&kernel(Scope::Gpu));
    passes(&kernel(Scope::Cluster));
    fails("flag_of_the_block", H::DataRace, &kernel(Scope::Block));
}

#[test]
fn atomics_of_many_blocks_do_not_race() {
    let mut k = Builder::new("kernel", Target::SM_90A, 64).cluster(2);
    let sum = k.parameter::<GlobalAddress>("sum");
    k.reduce_add::<F32, _>(sum, 1.0, Scope::Gpu);
    let before = k.atomic_add::<U32, _>(sum + 4, 1, Scope::Gpu);
    let value = before.register();
    let address = ptx::Address { base: sum.register(), offset: 8 };
    k.push(Instruction::Reduce {
        operation: AtomicOperation::Maximum,
        ty: ptx::Type::U32,
        src: vec![value],
        space: Space::Global,
        address,
        scope: Scope::Gpu,
        order: AtomicOrder::Relaxed,
    });
    passes(&k.finish().unwrap());
}

/// Returns a kernel in which two blocks add to one sum, the second after the first has set a flag.
fn added_by_turns(store: StoreOrder, packed: bool) -> ptx::Program {
    let add = move |k: &mut Builder, sum: Reg<GlobalAddress>| match packed {
        true => {
            let pair = k.pack::<BF16x2>(1.0, 2.0);
            k.reduce_add::<BF16x2, _>(sum, pair, Scope::Gpu);
        }
        false => k.reduce_add::<F32, _>(sum, 1.0, Scope::Gpu),
    };
    one_after_the_other(
        |k, sum, flag| {
            add(k, sum);
            raise(k, flag, store);
        },
        add,
    )
}

#[test]
fn sums_in_one_order() {
    let run = |store: StoreOrder, in_order: bool, packed: bool| {
        let program = added_by_turns(store, packed);
        let mut memory = Memory::new();
        let (sum, raised) = (memory.input_f32("sum", &[0.0]), memory.input_u32("flag", &[0]));
        if in_order {
            memory.adds_in_order(sum);
        }
        let arguments = vec![Argument::Address(sum, 0), Argument::Address(raised, 0)];
        let launch = Launch { program: &program, grid: 2, arguments };
        match sim::run(&launch, &mut memory, &Options::checked(Policy::Latest, 0)) {
            Ok(_) => None,
            Err(Failure::Hazard(hazard)) => Some(hazard.kind),
            Err(other) => panic!("{other}"),
        }
    };
    let (release, relaxed) = (StoreOrder::Release(Scope::Gpu), StoreOrder::Relaxed(Scope::Gpu));
    for packed in [false, true] {
        assert_eq!(run(release, true, packed), None);
        assert_eq!(run(relaxed, true, packed), Some(H::DataRace));
        let open = run(relaxed, false, packed);
        assert_eq!(open, None, "the order of a sum is open where nobody asks for one");
    }
}

/// Two blocks increment a counter; the last one reads what the first wrote, which the atomics must
/// order.
#[test]
fn atomics_that_do_not_reach() {
    let kernel = |counter: Scope, acquire: Scope| {
        let mut k = Builder::new("kernel", Target::SM_90A, 32).cluster(2);
        let data = k.parameter::<GlobalAddress>("data");
        let count = k.parameter::<GlobalAddress>("count");
        let (thread, rank) = (k.thread_index(), k.cluster_rank());
        k.if_(thread.equals(0), |k| {
            k.store(data + rank.convert::<U64>() * 4, 1.0);
            let order = AtomicOrder::Release;
            let add = k.eval::<U32>(1);
            k.push(Instruction::Reduce {
                operation: AtomicOperation::Add,
                ty: ptx::Type::U32,
                src: vec![add.register()],
                space: Space::Global,
                address: ptx::Address { base: count.register(), offset: 0 },
                scope: counter,
                order,
            });
            wait_for(k, count, 2, LoadOrder::Acquire(acquire));
            k.load::<F32, _>(data);
            k.load::<F32, _>(data + 4);
        });
        k.finish().unwrap()
    };
    passes(&kernel(Scope::Gpu, Scope::Cluster));
    fails("atomic_of_the_block", H::DataRace, &kernel(Scope::Block, Scope::Gpu));
    fails("acquire_of_the_block", H::DataRace, &kernel(Scope::Gpu, Scope::Block));
}

/// A fence orders no further than its scope.
#[test]
fn fence_that_does_not_reach() {
    let kernel = |scope: Scope| {
        one_after_the_other(
            |k, data, flag| {
                k.store(data, 1.0);
                k.fence(ptx::Fence::AcquireRelease(scope));
                k.reduce_add::<U32, _>(flag, 1, Scope::Gpu);
            },
            |k, data| {
                k.load::<F32, _>(data);
            },
        )
    };
    passes(&kernel(Scope::Cluster));
    fails("fence_of_the_block", H::DataRace, &kernel(Scope::Block));
}

#[test]
fn missing_proxy_fence() {
    let kernel = |fence| with_store(fence, |k| wait(k, true), |_, _| {});
    fails("missing_proxy_fence", H::MissingProxyFence, &kernel(None));
    passes(&kernel(FENCED));
}

#[test]
fn global_memory_through_two_proxies() {
    let kernel = |wait_for_write: bool| {
        with_store(
            FENCED,
            |k| wait(k, !wait_for_write),
            |k, Store { out, thread, .. }| {
                k.block_sync();
                k.load::<U32, _>(*out + thread.convert::<U64>() * 4);
            },
        )
    };
    passes(&kernel(true));
    // Before the store has written, its destination holds old bytes; afterwards no thread has
    // waited for it. Either way it is a race.
    fails("store_not_visible", H::TouchedBeforeArrival, &kernel(false));
}
