//! Which argument goes to which parameter, as far as the kernels over sequences have the same ones.

use cuda::DeviceAddress;

use super::{ServingSize, ServingTensors};
use crate::gpu::binding::{self, Number};

/// What an argument depends on.
pub(in crate::gpu) type Slot = binding::Slot<List>;

/// Addresses that are no tensor's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::gpu) enum List {
    Lse,
    Lengths,
    LeftPadding,
    Entries,
    QueryStarts,
    QueryLengths,
    KeyStarts,
    BlockTable,
    Slopes,
    Sinks,
}

impl List {
    pub(in crate::gpu) fn of(self, tensors: &ServingTensors) -> Option<DeviceAddress> {
        match self {
            List::Lse => Some(tensors.lse),
            List::Lengths => tensors.lengths,
            List::LeftPadding => tensors.left_padding,
            List::Entries => tensors.entries,
            List::QueryStarts => tensors.query_starts,
            List::QueryLengths => tensors.query_lengths,
            List::KeyStarts => tensors.key_starts,
            List::BlockTable => tensors.block_table,
            List::Slopes => tensors.slopes,
            List::Sinks => tensors.sinks,
        }
    }
}

/// A window that hides nothing: beyond every position.
const OPEN: i32 = 1 << 29;

/// The slot of a parameter that several kernels over sequences have.
pub(in crate::gpu) fn shared_slot(size: &ServingSize, name: &str) -> Option<Slot> {
    let ServingSize { problem, pages, entries, .. } = size;
    let number = Slot::number;
    let float = |value: f32| Some(Slot::Fixed(Number::F32(value)));
    let log2e = std::f32::consts::LOG2_E;
    let (left, right) = problem.mask.reach();
    let reach = |keys: Option<usize>| {
        let keys = keys.map_or(OPEN, |keys| i32::try_from(keys).unwrap_or(OPEN).min(OPEN));
        Some(Slot::Fixed(Number::I32(keys)))
    };
    let list = |list: List| Some(Slot::List(list));
    match name {
        "Lse" => list(List::Lse),
        "Batch" => number(problem.batch),
        "QueryLength" => number(problem.query_length),
        "KeyLength" => number(problem.key_length),
        "KeyLengths" => list(List::Lengths),
        "LeftPadding" => list(List::LeftPadding),
        "BatchIndex" => list(List::Entries),
        "QueryStarts" => list(List::QueryStarts),
        "QueryLengths" => list(List::QueryLengths),
        "KeyStarts" => list(List::KeyStarts),
        "Entries" => number(*entries),
        "BlockTable" => list(List::BlockTable),
        "PageColumns" => number(pages.as_ref().map_or(0, |pages| pages.columns)),
        "ReachLeft" => reach(left),
        "ReachRight" => reach(right),
        "ScaleLog2" => float(problem.scale() * log2e),
        "ScaleOverSoftcap" => float(problem.scale() / problem.softcap?),
        "ScaleSoftcapLog2" => float(problem.softcap? * log2e),
        "Slopes" => list(List::Slopes),
        "SlopesStride" => number(if size.slopes_of_sequences { problem.query_heads } else { 0 }),
        "Sinks" => list(List::Sinks),
        _ => Slot::divisor(name, |name| match name {
            "GroupSize" => u32::try_from(problem.query_heads / problem.kv_heads).ok(),
            "PageSize" => u32::try_from(pages.as_ref()?.size).ok(),
            _ => None,
        }),
    }
}
