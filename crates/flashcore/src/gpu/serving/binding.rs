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
        "lse" => list(List::Lse),
        "batch" => number(problem.batch),
        "query length" => number(problem.query_length),
        "key length" => number(problem.key_length),
        "lengths" => list(List::Lengths),
        "left padding" => list(List::LeftPadding),
        "batch entries" => list(List::Entries),
        "query starts" => list(List::QueryStarts),
        "query lengths" => list(List::QueryLengths),
        "key starts" => list(List::KeyStarts),
        "batch entries there are" => number(*entries),
        "block table" => list(List::BlockTable),
        "pages of a sequence" => number(pages.as_ref().map_or(0, |pages| pages.columns)),
        "window left" => reach(left),
        "window right" => reach(right),
        "scale times log2(e)" => float(problem.scale() * log2e),
        "scale over softcap" => float(problem.scale() / problem.softcap?),
        "softcap times log2(e)" => float(problem.softcap? * log2e),
        "slopes" => list(List::Slopes),
        "slopes batch stride" => {
            number(if size.slopes_of_sequences { problem.query_heads } else { 0 })
        }
        "sinks" => list(List::Sinks),
        _ => Slot::divisor(name, |name| match name {
            "query heads per key head" => {
                u32::try_from(problem.query_heads / problem.kv_heads).ok()
            }
            "page size" => u32::try_from(pages.as_ref()?.size).ok(),
            _ => None,
        }),
    }
}
