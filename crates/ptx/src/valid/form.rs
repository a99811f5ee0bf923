//! Checks of single instructions: whether the combination of modifiers exists.

use super::error::Fault;
use crate::*;

/// Returns the fault in the form of an instruction whose operands have the right types.
pub(super) fn fault(program: &Program, instruction: &Instruction) -> Option<Fault> {
    use Instruction as I;
    let type_of = |register: &Register| program.type_of(*register);
    match instruction {
        I::Move { dst, src } => {
            let ty = type_of(dst);
            unless(src.register().is_some() || ty.has_immediates() || ty.bits() == 32, || {
                format!("a constant cannot be moved into {ty:?}")
            })
        }
        I::Unary { operation, ty, .. } => {
            unless(unary_exists(*operation, *ty), || format!("{operation:?} of {ty:?}"))
        }
        I::Binary { operation, ty, .. } => {
            unless(binary_exists(*operation, *ty), || format!("{operation:?} of {ty:?}"))
        }
        I::MultiplyAdd { ty, .. } => unless(
            matches!(
                ty,
                Type::F32
                    | Type::F16
                    | Type::BF16
                    | Type::F16x2
                    | Type::BF16x2
                    | Type::U32
                    | Type::S32
                    | Type::U64
                    | Type::S64
            ),
            || format!("multiply-add of {ty:?}"),
        ),
        I::MultiplyWide { ty, .. } => {
            unless(matches!(ty, Type::U32 | Type::S32), || format!("a wide product of {ty:?}"))
        }
        I::Compare { comparison, ty, .. } => {
            unless(comparison_exists(*comparison, *ty), || format!("{comparison:?} of {ty:?}"))
        }
        I::Select { ty, .. } => {
            unless(*ty != Type::Pred, || "a selection between predicates".to_owned())
        }
        I::Convert { dst, src } => {
            let (to, from) = (type_of(dst), type_of(src));
            unless(conversion_exists(to, from), || format!("conversion from {from:?} to {to:?}"))
        }
        I::ConvertPair { dst, .. } => {
            let ty = type_of(dst);
            unless(ty.is_packed_half() || ty.is_packed_fp8(), || format!("two f32 as {ty:?}"))
        }
        I::ConvertPacked { dst, src } => {
            let (to, from) = (type_of(dst), type_of(src));
            let exists = (to == Type::F16x2 && from.is_packed_fp8())
                || (from == Type::F16x2 && to.is_packed_fp8());
            unless(exists, || format!("conversion from {from:?} to {to:?}"))
        }
        I::Split { low, high, src } => {
            let (ty, halves) = (type_of(src), type_of(low).bits() + type_of(high).bits());
            unless(ty.bits() >= 32 && halves == ty.bits(), || format!("halves of {ty:?}"))
        }
        I::Join { dst, low, high } => {
            let ty = type_of(dst);
            let registers = low.register().is_some() && high.register().is_some();
            unless(ty.bits() == 64 || (ty.bits() == 32 && registers), || {
                format!("{ty:?} joined of constants or of nothing")
            })
        }
        I::ReadParameter { dst, parameter } => {
            let index = parameter.0;
            let wanted = match program.parameters.get(index as usize).map(|p| &p.kind) {
                Some(ParameterKind::Scalar(ty)) => *ty,
                Some(ParameterKind::Address) => Type::U64,
                _ => return Some(Fault::Parameter { index, wanted: "a number or an address" }),
            };
            unless(type_of(dst) == wanted, || {
                format!("parameter {index} is {wanted:?}, read as {:?}", type_of(dst))
            })
        }
        I::TensorMapAddress { parameter, .. } => {
            let index = parameter.0;
            match program.parameters.get(index as usize).map(|p| &p.kind) {
                Some(ParameterKind::TensorMap(_)) => None,
                _ => Some(Fault::Parameter { index, wanted: "a tensor map" }),
            }
        }
        I::SharedBase { offset, .. } => {
            let bytes = program.shared_bytes();
            unless(!program.shared.is_empty() && *offset <= bytes, || {
                format!("byte {offset} of {bytes} bytes of shared memory")
            })
        }

        I::Load { dst, space, order, cache, .. } => vector_fault(program, dst)
            .or_else(|| cached_fault(*space, *cache == LoadCache::Default))
            .or_else(|| {
                let plain = *cache == LoadCache::Default;
                unless(matches!(order, LoadOrder::Weak) || (plain && dst.len() == 1), || {
                    "an ordered load takes no cache hint and one register".to_owned()
                })
            }),
        I::Store { src, space, order, cache, .. } => vector_fault(program, src)
            .or_else(|| cached_fault(*space, *cache == StoreCache::Default))
            .or_else(|| {
                let plain = *cache == StoreCache::Default;
                unless(matches!(order, StoreOrder::Weak) || (plain && src.len() == 1), || {
                    "an ordered store takes no cache hint and one register".to_owned()
                })
            }),
        I::Atomic { operation, ty, space, .. } => {
            unless(atomic_exists(*operation, *ty, *space), || {
                format!("atomic {operation:?} of {ty:?} in {space:?} memory")
            })
        }
        I::CompareAndSwap { ty, .. } => {
            unless(matches!(ty, Type::U32 | Type::S32 | Type::U64 | Type::S64), || {
                format!("compare-and-swap of {ty:?}")
            })
        }
        I::Reduce { operation, ty, src, space, order, .. } => {
            let single = src.len() == 1
                && *operation != AtomicOperation::Exchange
                && atomic_exists(*operation, *ty, *space);
            let vector = matches!(src.len(), 2 | 4)
                && *operation == AtomicOperation::Add
                && *ty == Type::F32
                && *space == Space::Global;
            unless(single || vector, || {
                let count = src.len();
                format!("reduction {operation:?} of {count} {ty:?} in {space:?} memory")
            })
            .or_else(|| {
                unless(matches!(order, AtomicOrder::Relaxed | AtomicOrder::Release), || {
                    format!("a reduction with {order:?} order")
                })
            })
        }
        I::LoadMatrix { dst, .. } => matrices_fault(dst.len()),
        I::StoreMatrix { src, .. } => matrices_fault(src.len()),

        I::Shuffle { clamp, lane, .. } => unless(*clamp <= 0x1F1F, || {
            format!("a shuffle clamp of {clamp:#x}")
        })
        .or_else(|| match lane {
            Operand::Immediate(lane) => {
                unless(*lane < 32, || format!("lane or distance {lane} of a warp"))
            }
            Operand::Register(_) => None,
        }),
        I::Mma { shape, element, accumulator, d, a, b, c } => {
            let (inputs, outputs) = match (shape, element, accumulator) {
                (MmaShape::M16N8K8, Element::F16, Element::F32) => ((2, 1), 4),
                (MmaShape::M16N8K8, Element::F16, Element::F16) => ((2, 1), 2),
                (MmaShape::M16N8K8, Element::BF16, Element::F32) => ((2, 1), 4),
                (MmaShape::M16N8K16, Element::F16, Element::F16) => ((4, 2), 2),
                (MmaShape::M16N8K16, Element::F16 | Element::BF16, Element::F32) => ((4, 2), 4),
                (MmaShape::M16N8K32, Element::E4M3 | Element::E5M2, Element::F32) => ((4, 2), 4),
                _ => {
                    let text = format!("mma {shape:?} of {element} into {accumulator}");
                    return Some(Fault::Form { text });
                }
            };
            unless((a.len(), b.len()) == inputs && (c.len(), d.len()) == (outputs, outputs), || {
                format!("mma {shape:?} of {element}: wrong number of registers")
            })
        }
        I::Wgmma { n, a_element, b_element, accumulator, d, a, b_transpose, .. } => {
            wgmma_fault(*n, *a_element, *b_element, *accumulator, d.len(), a, *b_transpose)
        }
        I::WgmmaWait { pending } => unless(*pending < 8, || format!("{pending} groups in flight")),

        I::BarrierSync { barrier, threads } => {
            barrier_fault(*barrier).or_else(|| threads.and_then(thread_count_fault))
        }
        I::BarrierArrive { barrier, threads } => {
            barrier_fault(*barrier).or_else(|| thread_count_fault(*threads))
        }
        I::MbarrierInit { count, .. } => range_fault(*count, 1, (1 << 20) - 1, "arrivals"),
        I::MbarrierArrive { space, count, .. } => arrive_fault(*space)
            .or_else(|| count.and_then(|c| range_fault(c, 1, (1 << 20) - 1, "arrivals"))),
        I::MbarrierArriveExpect { space, bytes, .. } => {
            arrive_fault(*space).or_else(|| range_fault(*bytes, 0, (1 << 20) - 1, "expected bytes"))
        }
        I::MbarrierExpect { bytes, .. } => range_fault(*bytes, 0, (1 << 20) - 1, "expected bytes"),
        I::MbarrierTryWait { parity, scope, .. } | I::MbarrierWait { parity, scope, .. } => {
            range_fault(*parity, 0, 1, "parity").or_else(|| {
                unless(matches!(scope, Scope::Block | Scope::Cluster), || {
                    format!("waiting with {scope:?} scope")
                })
            })
        }

        I::CopyAsync { bytes, cache, source_bytes, .. } => {
            let exists = match cache {
                CopyCache::All => matches!(bytes, 4 | 8 | 16),
                CopyCache::L2Only => *bytes == 16,
            };
            unless(exists, || format!("an asynchronous copy of {bytes} bytes"))
                .or_else(|| source_bytes.and_then(|s| range_fault(s, 0, *bytes as u64, "bytes")))
        }
        I::CopyAsyncWait { .. } => None,
        I::BulkLoad { bytes, .. } | I::BulkStore { bytes, .. } => bulk_fault(*bytes),
        I::BulkReduceAdd { ty, bytes, .. } => {
            let exists = !matches!(ty, BulkElement::Float(element) if element.bytes() == 1);
            unless(exists, || format!("adding {ty:?} in bulk")).or_else(|| bulk_fault(*bytes))
        }
        I::TensorLoad { map, coordinates, .. } | I::TensorStore { map, coordinates, .. } => {
            tensor_fault(program, *map, coordinates.len())
        }
        I::TensorReduceAdd { map, coordinates, .. } => {
            tensor_fault(program, *map, coordinates.len()).or_else(|| {
                let element = tensor_box(program, *map)?.element;
                unless(element.bytes() > 1, || format!("adding {element} to a tensor"))
            })
        }
        I::BulkWait { .. } => None,
        I::SetMaxRegisters { count, .. } => {
            unless((24..=256).contains(count) && count % 8 == 0, || {
                format!("a budget of {count} registers: not 24 to 256 in eights")
            })
        }
        I::MapShared { rank, .. } => range_fault(*rank, 0, 15, "rank in the cluster"),

        I::PermuteBytes { .. }
        | I::FunnelShift { .. }
        | I::Logic3 { .. }
        | I::ReadSpecial { .. }
        | I::LoadByte { .. }
        | I::PrefetchL2 { .. }
        | I::Vote { .. }
        | I::Ballot { .. }
        | I::Elect { .. }
        | I::WarpSync
        | I::WgmmaFence
        | I::WgmmaCommit
        | I::ClusterArrive { .. }
        | I::ClusterWait
        | I::MbarrierInvalidate { .. }
        | I::MbarrierArriveOnCopies { .. }
        | I::CopyAsyncCommit
        | I::BulkCommit
        | I::TensorMapPrefetch { .. }
        | I::Fence(_)
        | I::GridDependencyWait
        | I::GridDependencyLaunch
        | I::Sleep { .. }
        | I::Trap => None,
    }
}

/// Returns a fault unless the form exists; the text names the form.
fn unless(exists: bool, text: impl FnOnce() -> String) -> Option<Fault> {
    (!exists).then(|| Fault::Form { text: format!("there is no such instruction: {}", text()) })
}

fn unary_exists(operation: UnaryOperation, ty: Type) -> bool {
    use UnaryOperation as U;
    match operation {
        U::Negate | U::Absolute => {
            matches!(ty, Type::S32 | Type::S64 | Type::F32 | Type::F16 | Type::BF16)
                || ty.is_packed_half()
        }
        U::Not => ty.is_integer() || ty == Type::Pred,
        U::Exp2 | U::Tanh => {
            matches!(ty, Type::F32 | Type::F16 | Type::BF16) || ty.is_packed_half()
        }
        U::Log2 | U::Reciprocal | U::ReciprocalSqrt | U::Sqrt => ty == Type::F32,
        U::PopulationCount | U::LeadingZeros => matches!(ty, Type::U32 | Type::S32),
    }
}

fn binary_exists(operation: BinaryOperation, ty: Type) -> bool {
    use BinaryOperation as B;
    let half = matches!(ty, Type::F16 | Type::BF16) || ty.is_packed_half();
    match operation {
        B::Add | B::Subtract | B::Multiply | B::Minimum | B::Maximum => {
            ty.is_integer() || ty == Type::F32 || half
        }
        B::Divide => ty.is_integer() || ty == Type::F32,
        B::DivideRounded => ty == Type::F32,
        B::MultiplyHigh | B::Remainder | B::ShiftLeft | B::ShiftRight => ty.is_integer(),
        B::And | B::Or | B::Xor => ty.is_integer() || ty == Type::Pred,
    }
}

fn comparison_exists(comparison: Comparison, ty: Type) -> bool {
    let float = matches!(ty, Type::F32 | Type::F16 | Type::BF16);
    match comparison {
        Comparison::GreaterOrUnordered | Comparison::Unordered => float,
        _ => float || ty.is_integer(),
    }
}

fn conversion_exists(to: Type, from: Type) -> bool {
    if to == from {
        return false;
    }
    match (to, from) {
        (Type::F32, Type::F16 | Type::BF16) | (Type::F16 | Type::BF16, Type::F32) => true,
        (Type::F32, from) => from.is_integer(),
        (to, Type::F32) => to.is_integer(),
        // Converting between signed and unsigned of one width keeps the bits, which is a move.
        (to, from) => to.is_integer() && from.is_integer() && to.bits() != from.bits(),
    }
}

fn atomic_exists(operation: AtomicOperation, ty: Type, space: Space) -> bool {
    use AtomicOperation as A;
    match operation {
        A::Add => match ty {
            Type::U32 | Type::S32 | Type::U64 | Type::S64 | Type::F32 => true,
            Type::F16x2 | Type::BF16x2 => space == Space::Global,
            _ => false,
        },
        A::Minimum | A::Maximum | A::And | A::Or | A::Xor | A::Exchange => ty.is_integer(),
    }
}

/// Checks that the registers form a vector: one, two or four of the same type, at most 16 bytes.
fn vector_fault(program: &Program, registers: &[Register]) -> Option<Fault> {
    let Some(first) = registers.first().map(|r| program.type_of(*r)) else {
        return Some(Fault::Form { text: "an access of no register".to_owned() });
    };
    let bits = first.bits() * registers.len() as u32;
    let same = registers.iter().all(|r| program.type_of(*r) == first);
    unless(
        first != Type::Pred && same && matches!(registers.len(), 1 | 2 | 4) && bits <= 128,
        || format!("an access of {} {first:?}", registers.len()),
    )
}

fn cached_fault(space: Space, default_cache: bool) -> Option<Fault> {
    unless(space == Space::Global || default_cache, || format!("a cache hint in {space:?} memory"))
}

fn matrices_fault(count: usize) -> Option<Fault> {
    unless(matches!(count, 1 | 2 | 4), || format!("{count} matrices at once"))
}

fn wgmma_fault(
    n: u32,
    a_element: Element,
    b_element: Element,
    accumulator: Element,
    registers: usize,
    a: &WgmmaA,
    b_transpose: bool,
) -> Option<Fault> {
    let fp8 = |element| matches!(element, Element::E4M3 | Element::E5M2);
    let elements = match (a_element, b_element) {
        (Element::F16, Element::F16) => true,
        (Element::BF16, Element::BF16) => accumulator == Element::F32,
        (a, b) => fp8(a) && fp8(b),
    };
    let per_register = match accumulator {
        Element::F32 => 2,
        Element::F16 => 4,
        _ => return Some(Fault::Form { text: format!("wgmma into {accumulator}") }),
    };
    let transposed = b_transpose || matches!(a, WgmmaA::Shared { transpose: true, .. });
    unless(elements, || format!("wgmma of {a_element} and {b_element} into {accumulator}"))
        .or_else(|| {
            unless(n.is_multiple_of(8) && (8..=256).contains(&n), || {
                format!("wgmma of {n} columns: not 8 to 256 in eights")
            })
        })
        .or_else(|| {
            unless(registers as u32 == n / per_register, || {
                format!("wgmma of {n} columns into {registers} registers")
            })
        })
        .or_else(|| {
            unless(a_element.bytes() == 2 || !transposed, || {
                format!("wgmma of a transposed operand of {a_element}")
            })
        })
}

fn barrier_fault(barrier: Operand) -> Option<Fault> {
    range_fault(barrier, 0, 15, "barrier")
}

fn thread_count_fault(threads: Operand) -> Option<Fault> {
    range_fault(threads, 32, 1024, "threads at a barrier").or_else(|| match threads {
        Operand::Immediate(count) => {
            unless(count % 32 == 0, || format!("{count} threads at a barrier: not whole warps"))
        }
        Operand::Register(_) => None,
    })
}

fn arrive_fault(space: Space) -> Option<Fault> {
    unless(space != Space::Global, || "a memory barrier in global memory".to_owned())
}

fn range_fault(operand: Operand, low: u64, high: u64, what: &str) -> Option<Fault> {
    match operand {
        Operand::Immediate(value) => {
            unless((low..=high).contains(&value), || format!("{what} {value}: not {low} to {high}"))
        }
        Operand::Register(_) => None,
    }
}

fn bulk_fault(bytes: Operand) -> Option<Fault> {
    match bytes {
        Operand::Immediate(bytes) => unless(bytes % 16 == 0 && bytes < 1 << 20, || {
            format!("a bulk copy of {bytes} bytes: not a multiple of 16 under a mebibyte")
        }),
        Operand::Register(_) => None,
    }
}

/// Returns the box of the tensor map whose address a register holds.
fn tensor_box(program: &Program, map: Register) -> Option<&TensorBox> {
    let mut found = None;
    program.visit(&mut |statement| {
        if let StatementKind::Instruction(Instruction::TensorMapAddress { dst, parameter }) =
            &statement.kind
            && *dst == map
        {
            found = Some(*parameter);
        }
    });
    match &program.parameters.get(found?.0 as usize)?.kind {
        ParameterKind::TensorMap(tensor_box) => Some(tensor_box),
        _ => None,
    }
}

/// Checks that the number of coordinates matches the rank of the tensor map. The rank is known
/// where the map's register is written by reading a parameter.
fn tensor_fault(program: &Program, map: Register, coordinates: usize) -> Option<Fault> {
    if !(1..=5).contains(&coordinates) {
        return Some(Fault::Form { text: format!("a tensor of {coordinates} dimensions") });
    }
    match tensor_box(program, map).map(|tensor_box| tensor_box.extent.len()) {
        Some(rank) if rank != coordinates => Some(Fault::Form {
            text: format!("{coordinates} coordinates for a tensor map of {rank} dimensions"),
        }),
        _ => None,
    }
}
