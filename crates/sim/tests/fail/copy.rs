//! Hazards of asynchronous copies.

use flashcore_sim::HazardKind as H;
use ptx::{
    Address, Builder, Expression, GlobalAddress, Instruction, Mbarriers, Operand, Reg, Scope,
    SharedAddress, StatementKind, Target, U32,
};

use crate::{fails, passes};

/// The registers of a kernel with one bulk load.
struct Load {
    input: Reg<GlobalAddress>,
    tile: Reg<SharedAddress>,
    barrier: Reg<SharedAddress>,
    thread: Reg<U32>,
}

fn at(base: ptx::Register) -> Address {
    Address { base, offset: 0 }
}

impl Load {
    fn issue(&self, k: &mut Builder, bytes: Operand) {
        k.push(Instruction::BulkLoad {
            dst: at(self.tile.register()),
            src: at(self.input.register()),
            bytes,
            barrier: at(self.barrier.register()),
            multicast: None,
        });
    }

    /// Lets one thread expect `expected` bytes and load 256.
    fn expect_and_issue(&self, k: &mut Builder, expected: u32) {
        k.if_(self.thread.equals(0), |k| {
            k.mbarrier_arrive_expect(self.barrier, expected);
            self.issue(k, Operand::u32(256));
        });
    }
}

fn with_load(body: impl FnOnce(&mut Builder, &Load)) -> ptx::Program {
    let mut k = Builder::new("kernel", Target::SM_90A, 64);
    let input = k.parameter::<GlobalAddress>("input");
    let offset = k.shared("tile", 256, 128);
    let barriers = Mbarriers::new(&mut k, "loaded", 1, 1);
    let tile = k.shared_address(offset);
    let thread = k.thread_index();
    k.if_(thread.equals(0), |k| barriers.init(k));
    k.barriers_ready();
    let barrier = barriers.at(&mut k, 0);
    body(&mut k, &Load { input, tile, barrier, thread });
    k.finish().unwrap()
}

#[test]
fn touched_before_arrival() {
    let kernel = |wait: bool| {
        with_load(|k, load| {
            load.expect_and_issue(k, 256);
            k.block_sync();
            if wait {
                k.mbarrier_wait(load.barrier, 0, Scope::Block);
            }
            k.load::<U32, _>(load.tile + load.thread * 4);
            k.mbarrier_wait(load.barrier, 0, Scope::Block);
        })
    };
    passes(&kernel(true));
    fails("touched_before_arrival", H::TouchedBeforeArrival, &kernel(false));
}

#[test]
fn too_few_bytes_expected() {
    let program = with_load(|k, load| {
        load.expect_and_issue(k, 128);
        k.mbarrier_wait(load.barrier, 0, Scope::Block);
    });
    fails("too_few_bytes_expected", H::TransactionCount, &program);
}

#[test]
fn no_bytes_expected() {
    let program = with_load(|k, load| {
        k.if_(load.thread.equals(0), |k| {
            load.issue(k, Operand::u32(256));
            k.mbarrier_arrive(load.barrier);
        });
        k.mbarrier_wait(load.barrier, 0, Scope::Block);
    });
    // If the bytes come before the arrival, they are more than expected.
    fails("no_bytes_expected", H::TransactionCount, &program);
}

#[test]
fn copy_in_flight_at_exit() {
    let program = with_load(|k, load| {
        load.expect_and_issue(k, 256);
    });
    let options = flashcore_sim::Options::checked(flashcore_sim::Policy::Latest, 0);
    let found = crate::hazard(&program, &options);
    assert_eq!(found.kind, H::CopyInFlightAtExit);
    insta::assert_snapshot!("copy_in_flight_at_exit", crate::show(&found.to_string()));
}

/// A proxy fence for global memory has no effect on a tile in shared memory.
#[test]
fn proxy_fence_for_other_memory() {
    let kernel = |fence| with_store(Some(fence), |k| wait(k, true), |_, _| {});
    passes(&kernel(ptx::Fence::ProxyAsync));
    let program = kernel(ptx::Fence::ProxyAsyncGlobal);
    fails("proxy_fence_for_other_memory", H::MissingProxyFence, &program);
}

/// A warp fills a tile twice, 16 bytes a lane, and reads it each time.
fn filled_twice(read: impl Fn(&mut Builder, Reg<SharedAddress>, Reg<U32>)) -> ptx::Program {
    let mut k = Builder::new("kernel", Target::SM_80, 32);
    let input = k.parameter::<GlobalAddress>("input");
    let offset = k.shared("tile", 512, 128);
    let tile = k.shared_address(offset);
    let thread = k.thread_index();
    let mine = k.eval(input + thread.convert::<ptx::U64>() * 16);
    for _ in 0..2 {
        k.copy_async(tile + thread * 16, mine, None);
        k.copy_async_commit();
        k.copy_async_wait(0);
        read(&mut k, tile, thread);
    }
    k.finish().unwrap()
}

/// After a read by the whole warp (`ldmatrix`), the lanes must synchronise before they fill the
/// tile again.
#[test]
fn copies_over_a_matrix() {
    let kernel = |meet: bool| {
        filled_twice(|k, tile, thread| {
            k.warp_sync();
            let row = k.eval(tile + thread * 16);
            k.load_matrix::<U32, 4>(row, false);
            if meet {
                k.warp_sync();
            }
        })
    };
    passes(&kernel(true));
    fails("copies_over_a_matrix", H::OverwrittenInFlight, &kernel(false));
}

#[test]
fn stores_over_a_matrix() {
    let kernel = |meet: bool| {
        let mut k = Builder::new("kernel", Target::SM_80, 32);
        let offset = k.shared("tile", 512, 128);
        let tile = k.shared_address(offset);
        let thread = k.thread_index();
        let row = k.eval(tile + thread * 16);
        let words = [thread; 4];
        k.store_vector(row, &words, Default::default());
        k.warp_sync();
        k.load_matrix::<U32, 4>(row, false);
        if meet {
            k.warp_sync();
        }
        k.store(tile + thread * 4, thread);
        k.finish().unwrap()
    };
    passes(&kernel(true));
    fails("stores_over_a_matrix", H::LaneRace, &kernel(false));
}

/// A wait for a lane's own copies does not cover the copies of other lanes.
#[test]
fn copies_of_other_lanes() {
    let kernel = |before_use: bool, before_reuse: bool| {
        filled_twice(|k, tile, thread| {
            if before_use {
                k.warp_sync();
            }
            k.load::<U32, _>(tile + (thread + 1) % 32 * 16);
            if before_reuse {
                k.warp_sync();
            }
        })
    };
    passes(&kernel(true, true));
    fails("copies_of_other_lanes", H::TouchedBeforeArrival, &kernel(false, true));
    fails("copies_over_other_lanes", H::OverwrittenInFlight, &kernel(true, false));
}

/// The registers of a kernel with one bulk store.
pub(crate) struct Store {
    pub(crate) out: Reg<GlobalAddress>,
    tile: Reg<SharedAddress>,
    pub(crate) thread: Reg<U32>,
}

/// The fence that a tile in shared memory needs.
pub(crate) const FENCED: Option<ptx::Fence> = Some(ptx::Fence::ProxyAsyncShared);

/// Returns a kernel in which threads write a tile, one of them issues a bulk store of it and
/// continues with `sent`, and then all of them with `after`.
pub(crate) fn with_store(
    fence: Option<ptx::Fence>,
    sent: impl FnOnce(&mut Builder),
    after: impl FnOnce(&mut Builder, &Store),
) -> ptx::Program {
    let mut k = Builder::new("kernel", Target::SM_90A, 64);
    let out = k.parameter::<GlobalAddress>("out");
    let offset = k.shared("tile", 256, 128);
    let tile = k.shared_address(offset);
    let thread = k.thread_index();
    k.store(tile + thread * 4, thread);
    if let Some(fence) = fence {
        k.fence(fence);
    }
    k.block_sync();
    k.if_(thread.equals(0), |k| {
        let (dst, src, bytes) = (at(out.register()), at(tile.register()), Operand::u32(256));
        k.push(Instruction::BulkStore { dst, src, bytes });
        k.push(Instruction::BulkCommit);
        sent(k);
    });
    after(&mut k, &Store { out, tile, thread });
    k.finish().unwrap()
}

/// Waits until the issued bulk stores have read their source, or, unless `read_only`, also written
/// their destination.
pub(crate) fn wait(k: &mut Builder, read_only: bool) {
    k.push(Instruction::BulkWait { pending: 0, read_only });
}

#[test]
fn store_in_flight_at_exit() {
    let program = with_store(FENCED, |_| {}, |_, _| {});
    fails("store_in_flight_at_exit", H::CopyInFlightAtExit, &program);
}

#[test]
fn operand_overwritten_in_flight() {
    let kernel = |waits: bool| {
        let sent = |k: &mut Builder| {
            if waits {
                wait(k, true);
            }
        };
        with_store(FENCED, sent, |k, store| {
            k.block_sync();
            k.store(store.tile + store.thread * 4, 0.0);
            wait(k, true);
        })
    };
    passes(&kernel(true));
    fails("operand_overwritten_in_flight", H::OverwrittenInFlight, &kernel(false));
}

/// Stores that are in no group are not waited for by any wait.
#[test]
fn store_not_committed() {
    let program = with_store(FENCED, |k| wait(k, true), |_, _| {});
    let program = flashcore_sim::mutate::edit(&program, &mut |statement| {
        !matches!(statement.kind, StatementKind::Instruction(Instruction::BulkCommit))
    });
    fails("store_not_committed", H::CopyInFlightAtExit, &program);
}

/// Groups of bulk stores belong to the thread that commits them.
#[test]
fn stores_of_another_lane() {
    let kernel = |waiting: u32| {
        let mut k = Builder::new("kernel", Target::SM_90A, 32);
        let out = k.parameter::<GlobalAddress>("out");
        let offset = k.shared("tiles", 512, 128);
        let tiles = k.shared_address(offset);
        let thread = k.thread_index();
        let words = [thread; 4];
        k.store_vector(tiles + thread * 16, &words, Default::default());
        k.fence(ptx::Fence::ProxyAsyncShared);
        k.warp_sync();
        for lane in 0..2u32 {
            k.if_(thread.equals(lane), |k| {
                let src = k.eval(tiles + 256 * lane);
                let dst = k.eval(out + u64::from(256 * lane));
                let (dst, src, bytes) = (at(dst.register()), at(src.register()), Operand::u32(256));
                k.push(Instruction::BulkStore { dst, src, bytes });
                k.push(Instruction::BulkCommit);
            });
        }
        k.if_(thread.less(2) & thread.at_least(2 - waiting), |k| wait(k, true));
        k.warp_sync();
        k.store_vector(tiles + thread * 16, &words, Default::default());
        k.if_(thread.less(2), |k| wait(k, true));
        k.finish().unwrap()
    };
    passes(&kernel(2));
    fails("stores_of_another_lane", H::OverwrittenInFlight, &kernel(1));
}

#[test]
fn store_of_uninitialised_memory() {
    let program = with_store(FENCED, |k| wait(k, true), |_, _| {});
    let program = flashcore_sim::mutate::edit(&program, &mut |statement| {
        !matches!(statement.kind, StatementKind::Instruction(Instruction::Store { .. }))
    });
    fails("store_of_uninitialised_memory", H::UninitialisedMemory, &program);
}

/// The tile of a load was read by threads before: through another proxy.
#[test]
fn load_over_what_threads_read() {
    let kernel = |fenced: bool| {
        with_load(|k, load| {
            load.expect_and_issue(k, 256);
            k.mbarrier_wait(load.barrier, 0, Scope::Block);
            k.load::<U32, _>(load.tile + load.thread * 4);
            if fenced {
                k.fence(ptx::Fence::ProxyAsyncShared);
            }
            k.block_sync();
            load.expect_and_issue(k, 256);
            k.mbarrier_wait(load.barrier, 1, Scope::Block);
        })
    };
    passes(&kernel(true));
    fails("load_over_what_threads_read", H::MissingProxyFence, &kernel(false));
}

/// The copy engine reads and writes past the end of a buffer or of shared memory.
#[test]
fn copies_out_of_bounds() {
    let issued = |issue: fn(&mut Builder, &Load)| {
        with_load(|k, load| {
            k.if_(load.thread.equals(0), |k| issue(k, load));
        })
    };
    let beyond_the_buffer = issued(|k, load| {
        let input = k.eval(load.input + 4000u64 / 16 * 16);
        Load { input, ..*load }.issue(k, Operand::u32(256));
    });
    fails("load_out_of_bounds", H::OutOfBounds, &beyond_the_buffer);
    let beyond_shared_memory = issued(|k, load| load.issue(k, Operand::u32(1024)));
    fails("load_past_shared_memory", H::OutOfBounds, &beyond_shared_memory);
    let asynchronous = issued(|k, load| k.copy_async(load.tile, load.input + 4096u64, None));
    fails("copy_out_of_bounds", H::OutOfBounds, &asynchronous);
}

/// A copy that is in no group is not waited for by a wait for groups.
#[test]
fn copy_not_committed() {
    let mut k = Builder::new("kernel", Target::SM_80, 32);
    let input = k.parameter::<GlobalAddress>("input");
    let offset = k.shared("tile", 512, 128);
    let (tile, thread) = (k.shared_address(offset), k.thread_index());
    k.copy_async(tile + thread * 16, input + thread.convert::<ptx::U64>() * 16, None);
    k.copy_async_commit();
    k.copy_async_wait(0);
    k.load::<U32, _>(tile + thread * 16);
    let program = k.finish().unwrap();
    passes(&program);
    let program = flashcore_sim::mutate::edit(&program, &mut |statement| {
        !matches!(statement.kind, StatementKind::Instruction(Instruction::CopyAsyncCommit))
    });
    fails("copy_not_committed", H::TouchedBeforeArrival, &program);
}

#[test]
fn bad_copy_size() {
    let program = with_load(|k, load| {
        k.if_(load.thread.equals(0), |k| {
            let bytes = k.eval(load.thread + 24);
            load.issue(k, bytes.into());
        });
    });
    fails("bad_copy_size", H::BadCopySize, &program);
}

#[test]
fn no_init_fence_before_a_copy() {
    let program = with_load(|k, load| {
        load.expect_and_issue(k, 256);
        k.mbarrier_wait(load.barrier, 0, Scope::Block);
    });
    passes(&program);
    let fences = flashcore_sim::mutate::sites(&program);
    let fence = fences.iter().find(|s| matches!(s.instruction, Instruction::Fence(_))).unwrap();
    let program = flashcore_sim::mutate::without(&program, fence.index);
    fails("no_init_fence", H::MbarrierInitNotVisible, &program);
}

#[test]
fn not_a_tensor_map() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let input = k.parameter::<GlobalAddress>("input");
    let address = k.eval(input.reinterpret::<ptx::U64>());
    k.push(Instruction::TensorMapPrefetch { map: address.register() });
    fails("not_a_tensor_map", H::TensorMapMismatch, &k.finish().unwrap());
}

#[test]
fn asynchronous_copies_in_groups() {
    // Two groups of cp.async; waiting for all but one is enough for the first.
    let kernel = |pending: u32, arrive: bool| {
        let mut k = Builder::new("kernel", Target::SM_90A, 32);
        let input = k.parameter::<GlobalAddress>("input");
        let offset = k.shared("tile", 1024, 128);
        let barriers = Mbarriers::new(&mut k, "copied", 1, 32);
        let tile = k.shared_address(offset);
        let thread = k.thread_index();
        k.if_(thread.equals(0), |k| barriers.init(k));
        k.barriers_ready();
        let barrier = barriers.at(&mut k, 0);
        let mine = k.eval(thread.convert::<ptx::U64>() * 16);
        for group in 0..2u32 {
            k.copy_async(tile + (thread * 16 + group * 512), input + (mine + group * 512), None);
            k.push(Instruction::CopyAsyncCommit);
        }
        if arrive {
            k.push(Instruction::MbarrierArriveOnCopies { address: at(barrier.register()) });
            k.mbarrier_wait(barrier, 0, Scope::Block);
        } else {
            k.push(Instruction::CopyAsyncWait { pending });
        }
        k.load::<U32, _>(tile + thread * 16);
        if arrive {
            k.load::<U32, _>(tile + ((thread + 1) % 32 * 16 + 512));
        }
        k.push(Instruction::CopyAsyncWait { pending: 0 });
        k.finish().unwrap()
    };
    passes(&kernel(1, false));
    passes(&kernel(0, true));
    fails("copy_group_not_waited", H::TouchedBeforeArrival, &kernel(2, false));
}
