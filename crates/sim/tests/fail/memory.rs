//! Hazards of memory: bounds, alignment, initialisation.

use flashcore_sim::HazardKind as H;
use flashcore_sim::{Measure, Options, Policy};
use ptx::{Builder, Expression, F32, GlobalAddress, LoadCache, LoadHint, Reg, Target, U32, U64};

use crate::{fails, hazard, passes, run, show};

#[test]
fn global_out_of_bounds() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let out = k.parameter::<GlobalAddress>("out");
    let thread = k.thread_index();
    k.store(out + thread.convert::<U64>() * 256, 1.0);
    fails("global_out_of_bounds", H::OutOfBounds, &k.finish().unwrap());
}

#[test]
fn shared_out_of_bounds() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let offset = k.shared("tile", 64, 16);
    let tile = k.shared_address(offset);
    let thread = k.thread_index();
    k.store(tile + thread * 4, 1.0);
    fails("shared_out_of_bounds", H::OutOfBounds, &k.finish().unwrap());
}

#[test]
fn misaligned() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let input = k.parameter::<GlobalAddress>("input");
    k.load::<F32, _>(input + 2);
    fails("misaligned", H::Misaligned, &k.finish().unwrap());
}

/// Each row of a matrix is 16 bytes, aligned as such, and within shared memory.
#[test]
fn rows_of_a_matrix() {
    let kernel = |first: u32| {
        let mut k = Builder::new("kernel", Target::SM_90A, 32);
        let offset = k.shared("tile", 512, 128);
        let tile = k.shared_address(offset);
        let thread = k.thread_index();
        let words = [thread; 4];
        k.store_vector(tile + thread * 16, &words, Default::default());
        k.warp_sync();
        let row = k.eval(tile + thread * 16 + first);
        k.load_matrix::<U32, 4>(row, false);
        k.finish().unwrap()
    };
    passes(&kernel(0));
    fails("matrix_misaligned", H::Misaligned, &kernel(8));
    fails("matrix_out_of_bounds", H::OutOfBounds, &kernel(16));
}

#[test]
fn matrix_of_uninitialised_memory() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let offset = k.shared("tile", 512, 128);
    let tile = k.shared_address(offset);
    let thread = k.thread_index();
    let row = k.eval(tile + thread * 16);
    k.load_matrix::<U32, 4>(row, false);
    fails("matrix_of_uninitialised_memory", H::UninitialisedMemory, &k.finish().unwrap());
}

#[test]
fn uninitialised_shared_memory() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let offset = k.shared("tile", 128, 16);
    let tile = k.shared_address(offset);
    let thread = k.thread_index();
    k.if_(thread.less(31), |k| k.store(tile + thread * 4, 1.0));
    k.block_sync();
    k.load::<F32, _>(tile + thread * 4);
    fails("uninitialised_shared_memory", H::UninitialisedMemory, &k.finish().unwrap());
}

#[test]
fn lanes_store_to_one_place() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let out = k.parameter::<GlobalAddress>("out");
    let thread = k.thread_index();
    k.store(out, thread);
    fails("lanes_store_to_one_place", H::LaneCollision, &k.finish().unwrap());
    // Lanes that store the same value are no hazard.
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let out = k.parameter::<GlobalAddress>("out");
    k.store::<U32, _>(out, 7);
    passes(&k.finish().unwrap());
}

#[test]
fn read_only_load_of_written_memory() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let data = k.parameter::<GlobalAddress>("data");
    let thread = k.thread_index();
    let mine = k.eval(data + thread.convert::<U64>() * 4);
    k.store(mine, 1.0);
    let hint = LoadHint { cache: LoadCache::ReadOnly, ..LoadHint::default() };
    k.load_vector::<F32, _, 1>(mine, hint);
    fails("read_only_load", H::ReadOnlyViolated, &k.finish().unwrap());
}

#[test]
fn shared_memory_limit() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    k.shared("tile", 1024, 16);
    let mut program = k.finish().unwrap();
    program.shared[0].bytes = 300 * 1024;
    fails("shared_memory_limit", H::SharedMemoryLimit, &program);
}

#[test]
fn trap() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let thread = k.thread_index();
    k.if_(thread.equals(5), |k| k.push(ptx::Instruction::Trap));
    fails("trap", H::Trap, &k.finish().unwrap());
}

#[test]
fn runaway() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let counter = k.variable::<U32>(0);
    k.loop_(|k| {
        k.set(counter, counter + 1);
        k.break_if(counter.equals(0));
    });
    let program = k.finish().unwrap();
    let options = Options { step_limit: 10_000, ..Options::checked(Policy::Earliest, 0) };
    let found = hazard(&program, &options);
    assert_eq!(found.kind, H::Runaway);
    let text = show(&found.to_string());
    assert!(text.starts_with("hazard: step limit"), "{text}");
}

#[test]
fn a_loop_of_nothing_ends_too() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    k.loop_(|_| {});
    let program = k.finish().unwrap();
    for policy in Policy::HOSTILE {
        let options = Options { step_limit: 10_000, ..Options::checked(policy, 0) };
        assert_eq!(hazard(&program, &options).kind, H::Runaway);
    }
}

#[test]
fn over_budget() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let offset = k.shared("tile", 4096, 16);
    let tile = k.shared_address(offset);
    let thread = k.thread_index();
    k.store(tile + thread * 128, 1.0);
    let program = k.finish().unwrap();
    let report = run(&program, &Options::default()).unwrap();
    assert_eq!(report.counts.get(Measure::BankConflicts), 31);
    let budget = flashcore_sim::Budget::default().at_most(Measure::BankConflicts, 0);
    let failure = run(&program, &Options { budget, ..Options::default() }).unwrap_err();
    assert_eq!(failure.to_string(), "over budget: bank conflicts is 31, at most 0 allowed");
}

/// In a kernel that waits for earlier grids, global memory is theirs until a thread of the block has
/// waited.
#[test]
fn before_earlier_grids() {
    let kernel = |before: fn(&mut Builder, Reg<GlobalAddress>), wait: fn(&mut Builder)| {
        let mut k = Builder::new("kernel", Target::SM_90A, 64);
        let data = k.parameter::<GlobalAddress>("data");
        before(&mut k, data);
        wait(&mut k);
        k.launch_dependents();
        let thread = k.thread_index();
        k.store(data + thread.convert::<U64>() * 4, 1.0);
        k.finish().unwrap()
    };
    let waits = Builder::wait_for_grids;
    passes(&kernel(|_, _| {}, waits));
    fails(
        "global_before_earlier_grids",
        H::BeforeEarlierGrids,
        &kernel(
            |k, data| {
                k.load::<F32, _>(data);
            },
            waits,
        ),
    );
    // One thread may wait for all of the block, if the others wait for it.
    fn one_waits(k: &mut Builder) {
        let thread = k.thread_index();
        k.if_(thread.equals(0), Builder::wait_for_grids);
    }
    let all_wait_for_it = |k: &mut Builder| {
        one_waits(k);
        k.block_sync();
    };
    passes(&kernel(|_, _| {}, all_wait_for_it));
    let unordered = kernel(|_, _| {}, one_waits);
    fails("other_threads_before_earlier_grids", H::BeforeEarlierGrids, &unordered);
    // The grids after this one wait for its end alone.
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let block = k.block_index();
    k.if_(block.equals(1), Builder::wait_for_grids);
    fails("end_before_earlier_grids", H::BeforeEarlierGrids, &k.finish().unwrap());
}
