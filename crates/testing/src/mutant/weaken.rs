//! Mutations of synchronisation: another parity, one more group pending, counts and bytes off by
//! one step, another barrier, a narrower scope, a weaker order.

use ptx::{
    AtomicOrder, ClusterOrder, Fence, Instruction, LoadCache, LoadOrder, Operand, Scope,
    StoreOrder, Type,
};

use super::generate::{Mutations, OperandChange, name};

/// The smallest unit of a bulk copy in bytes.
const CHUNK: i64 = 16;
/// The number of threads of a warp.
const WARP: i64 = 32;

/// Adds the ways in which an instruction can be weakened.
pub(super) fn add(to: &mut Mutations<'_>, instruction: &Instruction) {
    use Instruction as I;
    let text = name(instruction);
    match instruction {
        I::WgmmaWait { .. } | I::CopyAsyncWait { .. } | I::BulkWait { .. } => {
            to.edit("one more pending", text.clone(), instruction, |it| {
                if let I::WgmmaWait { pending }
                | I::CopyAsyncWait { pending }
                | I::BulkWait { pending, .. } = it
                {
                    *pending += 1;
                }
            });
            to.edit("reads waited for only", text, instruction, |it| {
                if let I::BulkWait { read_only, .. } = it {
                    *read_only = true;
                }
            });
        }
        I::MbarrierWait { parity, .. } | I::MbarrierTryWait { parity, .. } => {
            let (operand, by) = ((Type::U32, *parity), OperandChange::Xor(1));
            to.operand("other parity", text, instruction, operand, by, |it, changed| {
                if let I::MbarrierWait { parity, .. } | I::MbarrierTryWait { parity, .. } = it {
                    *parity = changed;
                }
            });
        }
        I::MbarrierArriveExpect { space, address, bytes } => {
            expected_bytes(to, instruction, *bytes);
            let count = None;
            let arrive = I::MbarrierArrive { space: *space, address: *address, count };
            to.replace_with("arrival without bytes", text.clone(), arrive);
            let expect = I::MbarrierExpect { address: *address, bytes: *bytes };
            to.replace_with("bytes without arrival", text, expect);
        }
        I::MbarrierExpect { bytes, .. } => expected_bytes(to, instruction, *bytes),
        I::MbarrierInit { count, .. } => {
            for by in [1, -1] {
                let (detail, operand) = (format!("{text} {by:+}"), (Type::U32, *count));
                let by = OperandChange::Add(by);
                to.operand("arrivals", detail, instruction, operand, by, |it, changed| {
                    if let I::MbarrierInit { count, .. } = it {
                        *count = changed;
                    }
                });
            }
        }
        I::MbarrierArrive { count, .. } => {
            let operand = (Type::U32, count.unwrap_or(Operand::u32(1)));
            let (detail, by) = (format!("{text} +1"), OperandChange::Add(1));
            to.operand("arrivals", detail, instruction, operand, by, |it, changed| {
                if let I::MbarrierArrive { count, .. } = it {
                    *count = Some(changed);
                }
            });
        }
        I::BarrierSync { barrier, threads } => {
            let all = Operand::u32(to.program().threads);
            // Where the whole block synchronises at one statement, any barrier number works.
            let of_some = threads.is_some().then_some(*barrier);
            named(to, instruction, of_some, threads.unwrap_or(all));
            let threads = threads.unwrap_or(all);
            to.replace_with("arrival only", text, I::BarrierArrive { barrier: *barrier, threads });
        }
        I::BarrierArrive { barrier, threads } => named(to, instruction, Some(*barrier), *threads),
        I::ClusterArrive { .. } => to.edit("order", text, instruction, |it| {
            *it = I::ClusterArrive { order: ClusterOrder::Relaxed };
        }),
        I::Fence(fence) => {
            for weaker in weaker_fences(*fence) {
                let detail = format!("{fence:?} to {weaker:?}");
                to.replace_with("another fence", detail, I::Fence(weaker));
            }
        }
        I::Atomic { order, scope, .. }
        | I::Reduce { order, scope, .. }
        | I::CompareAndSwap { order, scope, .. } => {
            for weaker in weaker_orders(*order) {
                let detail = format!("{text} {order:?} to {weaker:?}");
                to.edit("order", detail, instruction, |it| set_atomic(it, weaker, *scope));
            }
            if *scope == Scope::Gpu {
                let detail = format!("{text} Gpu to Block");
                to.edit("scope", detail, instruction, |it| set_atomic(it, *order, Scope::Block));
            }
        }
        I::Load { order, .. } => {
            for weaker in weaker_loads(*order) {
                let detail = format!("{text} {order:?} to {weaker:?}");
                to.edit("order", detail, instruction, |it| {
                    if let I::Load { order, .. } = it {
                        *order = weaker;
                    }
                });
            }
            to.edit("read-only", text, instruction, |it| {
                if let I::Load { cache: cache @ LoadCache::L2Only, .. } = it {
                    *cache = LoadCache::ReadOnly;
                }
            });
        }
        I::Store { order: StoreOrder::Release(scope), .. } => {
            for weaker in [StoreOrder::Relaxed(*scope), StoreOrder::Weak] {
                to.edit("order", format!("{text} to {weaker:?}"), instruction, |it| {
                    if let I::Store { order, .. } = it {
                        *order = weaker;
                    }
                });
            }
        }
        _ => {}
    }
}

fn expected_bytes(to: &mut Mutations<'_>, instruction: &Instruction, bytes: Operand) {
    use Instruction as I;
    for by in [CHUNK, -CHUNK] {
        let (detail, by) = (format!("{} {by:+}", name(instruction)), OperandChange::Add(by));
        to.operand("bytes", detail, instruction, (Type::U32, bytes), by, |it, changed| {
            if let I::MbarrierArriveExpect { bytes, .. } | I::MbarrierExpect { bytes, .. } = it {
                *bytes = changed;
            }
        });
    }
}

fn named(to: &mut Mutations<'_>, instruction: &Instruction, id: Option<Operand>, count: Operand) {
    use Instruction as I;
    let text = name(instruction);
    if let Some(id) = id {
        let (detail, by) = (format!("{text} +1"), OperandChange::Add(1));
        to.operand("other barrier", detail, instruction, (Type::U32, id), by, |it, changed| {
            if let I::BarrierSync { barrier, .. } | I::BarrierArrive { barrier, .. } = it {
                *barrier = changed;
            }
        });
    }
    for by in [WARP, -WARP] {
        let (detail, by) = (format!("{text} {by:+}"), OperandChange::Add(by));
        to.operand(
            "threads",
            detail,
            instruction,
            (Type::U32, count),
            by,
            |it, changed| match it {
                I::BarrierSync { threads, .. } => *threads = Some(changed),
                I::BarrierArrive { threads, .. } => *threads = changed,
                _ => {}
            },
        );
    }
}

fn weaker_fences(fence: Fence) -> Vec<Fence> {
    match fence {
        Fence::AcquireRelease(Scope::Gpu) => vec![Fence::AcquireRelease(Scope::Block)],
        Fence::SequentiallyConsistent(Scope::Gpu) => {
            vec![Fence::SequentiallyConsistent(Scope::Block)]
        }
        Fence::ProxyAsync => vec![Fence::ProxyAsyncShared, Fence::ProxyAsyncGlobal],
        Fence::ProxyAsyncShared => {
            vec![Fence::ProxyAsyncGlobal, Fence::AcquireRelease(Scope::Block)]
        }
        Fence::MbarrierInit => vec![Fence::AcquireRelease(Scope::Block)],
        Fence::AcquireRelease(_) | Fence::SequentiallyConsistent(_) | Fence::ProxyAsyncGlobal => {
            Vec::new()
        }
    }
}

fn weaker_orders(order: AtomicOrder) -> Vec<AtomicOrder> {
    use AtomicOrder as O;
    match order {
        O::AcquireRelease => vec![O::Acquire, O::Release, O::Relaxed],
        O::Acquire | O::Release => vec![O::Relaxed],
        O::Relaxed => Vec::new(),
    }
}

fn weaker_loads(order: LoadOrder) -> Vec<LoadOrder> {
    match order {
        LoadOrder::Acquire(scope) => vec![LoadOrder::Relaxed(scope), LoadOrder::Weak],
        LoadOrder::Relaxed(_) => vec![LoadOrder::Weak],
        LoadOrder::Weak => Vec::new(),
    }
}

fn set_atomic(instruction: &mut Instruction, to: AtomicOrder, reach: Scope) {
    if let Instruction::Atomic { order, scope, .. }
    | Instruction::Reduce { order, scope, .. }
    | Instruction::CompareAndSwap { order, scope, .. } = instruction
    {
        (*order, *scope) = (to, reach);
    }
}
