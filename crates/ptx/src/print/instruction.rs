//! The PTX spelling of each instruction.

use super::{Printer, bits_type, scalar_type};
use crate::*;

impl Printer<'_> {
    /// Returns the lines of one instruction; most have one.
    pub(super) fn instruction(&mut self, instruction: &Instruction) -> Vec<String> {
        use Instruction as I;
        let line = match instruction {
            I::Move { dst, src } => {
                let ty = self.program.type_of(*dst);
                // `mov.f32` takes float registers on both sides.
                let source = src.register().map(|r| self.program.type_of(r)).unwrap_or(ty);
                let suffix = match ty.bits() {
                    32 if source != ty => "b32",
                    _ => bits_type(ty),
                };
                format!("mov.{suffix} {}, {};", self.name(*dst), self.operand(*src, ty))
            }
            I::Unary { operation, ty, dst, a } => {
                let (dst, a) = (self.name(*dst), self.operand(*a, *ty));
                format!("{} {dst}, {a};", unary(*operation, *ty))
            }
            I::Binary { operation, ty, dst, a, b } => {
                let shift =
                    matches!(operation, BinaryOperation::ShiftLeft | BinaryOperation::ShiftRight);
                let dst = self.name(*dst);
                let a = self.operand(*a, *ty);
                let b = self.operand(*b, if shift { Type::U32 } else { *ty });
                format!("{} {dst}, {a}, {b};", binary(*operation, *ty))
            }
            I::MultiplyAdd { ty, dst, a, b, c } => {
                let [a, b, c] = [a, b, c].map(|operand| self.operand(*operand, *ty));
                format!("{} {}, {a}, {b}, {c};", multiply_add(*ty), self.name(*dst))
            }
            I::MultiplyWide { ty, dst, a, b } => {
                let [a, b] = [a, b].map(|operand| self.operand(*operand, *ty));
                format!("mul.wide.{} {}, {a}, {b};", scalar_type(*ty), self.name(*dst))
            }
            I::Compare { comparison, ty, dst, a, b } => {
                let [a, b] = [a, b].map(|operand| self.operand(*operand, *ty));
                let mnemonic = compare(*comparison, *ty);
                format!("setp.{mnemonic}.{} {}, {a}, {b};", scalar_type(*ty), self.name(*dst))
            }
            I::Select { ty, dst, condition, a, b } => {
                let [a, b] = [a, b].map(|operand| self.operand(*operand, *ty));
                let (dst, condition) = (self.name(*dst), self.name(*condition));
                format!("selp.{} {dst}, {a}, {b}, {condition};", bits_type(*ty))
            }
            I::PermuteBytes { dst, a, b, selector } => {
                let [a, b, s] = [a, b, selector].map(|o| self.operand(*o, Type::U32));
                format!("prmt.b32 {}, {a}, {b}, {s};", self.name(*dst))
            }
            I::FunnelShift { left, dst, low, high, amount } => {
                let side = if *left { "l" } else { "r" };
                let [low, high, n] = [low, high, amount].map(|o| self.operand(*o, Type::U32));
                format!("shf.{side}.wrap.b32 {}, {low}, {high}, {n};", self.name(*dst))
            }
            I::Logic3 { dst, a, b, c, table } => {
                let [a, b, c] = [a, b, c].map(|o| self.operand(*o, Type::U32));
                format!("lop3.b32 {}, {a}, {b}, {c}, {table};", self.name(*dst))
            }
            I::Convert { dst, src } => return self.convert(*dst, *src),
            I::ConvertPair { dst, high, low } => {
                let ty = self.program.type_of(*dst);
                let saturate = if ty.is_packed_fp8() { ".satfinite" } else { "" };
                let [high, low] = [high, low].map(|o| self.operand(*o, Type::F32));
                let (ty, dst) = (scalar_type(ty), self.name(*dst));
                format!("cvt.rn{saturate}.{ty}.f32 {dst}, {high}, {low};")
            }
            I::ConvertPacked { dst, src } => {
                let (to, from) = (self.program.type_of(*dst), self.program.type_of(*src));
                let saturate = if to.is_packed_fp8() { ".satfinite" } else { "" };
                let (dst, src) = (self.name(*dst), self.name(*src));
                format!("cvt.rn{saturate}.{}.{} {dst}, {src};", scalar_type(to), scalar_type(from))
            }
            I::Split { low, high, src } => {
                let bits = self.program.type_of(*src).bits();
                format!("mov.b{bits} {}, {};", self.list(&[*low, *high]), self.name(*src))
            }
            I::Join { dst, low, high } => {
                let bits = self.program.type_of(*dst).bits();
                let [low, high] = [low, high].map(|o| self.operand(*o, Type::U32));
                format!("mov.b{bits} {}, {{{low}, {high}}};", self.name(*dst))
            }
            I::ReadSpecial { dst, special } => {
                let width = if special.is_wide() { "u64" } else { "u32" };
                format!("mov.{width} {}, {};", self.name(*dst), special_name(*special))
            }
            I::ReadParameter { dst, parameter } => {
                let (dst, index) = (self.name(*dst), parameter.0);
                match self.program.parameters[index as usize].kind {
                    ParameterKind::Scalar(ty) => {
                        format!("ld.param.{} {dst}, [p{index}];", scalar_type(ty))
                    }
                    ParameterKind::Address | ParameterKind::TensorMap(_) => {
                        return vec![
                            format!("ld.param.u64 {dst}, [p{index}];"),
                            format!("cvta.to.global.u64 {dst}, {dst};"),
                        ];
                    }
                }
            }
            I::TensorMapAddress { dst, parameter } => {
                // TMA takes a generic address, and parameters are in a state space of their own.
                let (dst, index) = (self.name(*dst), parameter.0);
                return vec![
                    format!("mov.b64 {dst}, p{index};"),
                    format!("cvta.param.u64 {dst}, {dst};"),
                ];
            }
            I::SharedBase { dst, offset } => {
                let dst = self.name(*dst);
                match offset {
                    0 => format!("mov.u32 {dst}, shared;"),
                    offset => {
                        return vec![
                            format!("mov.u32 {dst}, shared;"),
                            format!("add.u32 {dst}, {dst}, {offset};"),
                        ];
                    }
                }
            }

            I::Load { dst, space, address, order, cache } => {
                let ty = bits_type(self.program.type_of(dst[0]));
                let (list, vector) = self.vector(dst);
                let space = space_name(*space);
                let prefix = match (order, cache) {
                    (LoadOrder::Relaxed(scope), _) => {
                        format!(".relaxed.{}{space}", scope_name(*scope))
                    }
                    (LoadOrder::Acquire(scope), _) => {
                        format!(".acquire.{}{space}", scope_name(*scope))
                    }
                    (LoadOrder::Weak, cache) => format!("{space}{}", load_cache(*cache)),
                };
                let address = self.address(*address);
                format!("ld{prefix}{vector}.{ty} {list}, {address};")
            }
            I::Store { src, space, address, order, cache } => {
                let ty = bits_type(self.program.type_of(src[0]));
                let (list, vector) = self.vector(src);
                let space = space_name(*space);
                let prefix = match (order, cache) {
                    (StoreOrder::Relaxed(scope), _) => {
                        format!(".relaxed.{}{space}", scope_name(*scope))
                    }
                    (StoreOrder::Release(scope), _) => {
                        format!(".release.{}{space}", scope_name(*scope))
                    }
                    (StoreOrder::Weak, cache) => format!("{space}{}", store_cache(*cache)),
                };
                let address = self.address(*address);
                format!("st{prefix}{vector}.{ty} {address}, {list};")
            }
            I::LoadByte { dst, address } => {
                format!("ld.global.u8 {}, {};", self.name(*dst), self.address(*address))
            }
            I::PrefetchL2 { address } => format!("prefetch.global.L2 {};", self.address(*address)),
            I::Atomic { operation, ty, dst, space, address, value, scope, order } => {
                let form = self.atomic_form(*order, *scope, *space, *operation, *ty);
                let (dst, address) = (self.name(*dst), self.address(*address));
                format!("atom{form} {dst}, {address}, {};", self.operand(*value, *ty))
            }
            I::CompareAndSwap { ty, dst, space, address, expected, value, scope, order } => {
                let (order, scope) = (order_name(*order), scope_name(*scope));
                let (space, bits) = (space_name(*space), ty.bits());
                let (dst, address) = (self.name(*dst), self.address(*address));
                let [expected, value] = [expected, value].map(|o| self.operand(*o, *ty));
                format!(
                    "atom.{order}.{scope}{space}.cas.b{bits} {dst}, {address}, {expected}, {value};"
                )
            }
            I::Reduce { operation, ty, src, space, address, scope, order } => {
                let address = self.address(*address);
                if src.len() == 1 {
                    let form = self.atomic_form(*order, *scope, *space, *operation, *ty);
                    format!("red{form} {address}, {};", self.name(src[0]))
                } else {
                    let (list, vector) = self.vector(src);
                    let (order, scope) = (order_name(*order), scope_name(*scope));
                    format!("red.{order}.{scope}.global.add{vector}.f32 {address}, {list};")
                }
            }
            I::LoadMatrix { dst, address, transpose } => {
                let (count, trans) = (dst.len(), if *transpose { ".trans" } else { "" });
                let (list, address) = (self.list(dst), self.address(*address));
                format!("ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {list}, {address};")
            }
            I::StoreMatrix { src, address, transpose } => {
                let (count, trans) = (src.len(), if *transpose { ".trans" } else { "" });
                let (list, address) = (self.list(src), self.address(*address));
                format!("stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {address}, {list};")
            }

            I::Shuffle { mode, dst, valid, src, lane, clamp } => {
                let mode = shuffle_mode(*mode);
                let valid = valid.map(|p| format!("|{}", self.name(p))).unwrap_or_default();
                let (dst, src) = (self.name(*dst), self.name(*src));
                let lane = self.operand(*lane, Type::U32);
                format!("shfl.sync.{mode}.b32 {dst}{valid}, {src}, {lane}, {clamp}, 0xFFFFFFFF;")
            }
            I::Vote { mode, dst, predicate } => {
                let mode = match mode {
                    VoteMode::All => "all",
                    VoteMode::Any => "any",
                };
                let (dst, predicate) = (self.name(*dst), self.name(*predicate));
                format!("vote.sync.{mode}.pred {dst}, {predicate}, 0xFFFFFFFF;")
            }
            I::Ballot { dst, predicate } => {
                let (dst, predicate) = (self.name(*dst), self.name(*predicate));
                format!("vote.sync.ballot.b32 {dst}, {predicate}, 0xFFFFFFFF;")
            }
            I::Elect { dst } => format!("elect.sync _|{}, 0xFFFFFFFF;", self.name(*dst)),
            I::WarpSync => "bar.warp.sync 0xFFFFFFFF;".to_owned(),

            I::Mma { shape, element, accumulator, d, a, b, c } => {
                let shape = mma_shape(*shape);
                let [d, a, b, c] = [d, a, b, c].map(|registers| self.list(registers));
                format!(
                    "mma.sync.aligned.{shape}.row.col.{accumulator}.{element}.{element}.{accumulator} {d}, {a}, {b}, {c};"
                )
            }
            I::Wgmma {
                n,
                a_element,
                b_element,
                accumulator,
                d,
                accumulate,
                a,
                b,
                b_transpose,
                negate_a,
                negate_b,
            } => {
                let inner = 32 / a_element.bytes();
                let scale_d = match accumulate {
                    Accumulate::No => "%false".to_owned(),
                    Accumulate::Yes => "%true".to_owned(),
                    Accumulate::If(predicate) => self.name(*predicate),
                };
                let sign = |negate: bool| if negate { -1 } else { 1 };
                let mut tail = format!("{scale_d}, {}, {}", sign(*negate_a), sign(*negate_b));
                let (a, a_transpose) = match a {
                    WgmmaA::Shared { descriptor, transpose } => {
                        (self.name(*descriptor), Some(*transpose))
                    }
                    WgmmaA::Registers(registers) => (self.list(registers), None),
                };
                // Only the 16-bit forms have transpose operands.
                if a_element.bytes() == 2 {
                    if let Some(transpose) = a_transpose {
                        tail += &format!(", {}", transpose as u32);
                    }
                    tail += &format!(", {}", *b_transpose as u32);
                }
                let (d, b) = (self.list(d), self.name(*b));
                format!(
                    "wgmma.mma_async.sync.aligned.m64n{n}k{inner}.{accumulator}.{a_element}.{b_element} {d}, {a}, {b}, {tail};"
                )
            }
            I::WgmmaFence => "wgmma.fence.sync.aligned;".to_owned(),
            I::WgmmaCommit => "wgmma.commit_group.sync.aligned;".to_owned(),
            I::WgmmaWait { pending } => format!("wgmma.wait_group.sync.aligned {pending};"),

            I::BarrierSync { barrier, threads } => {
                let barrier = self.operand(*barrier, Type::U32);
                match threads {
                    None => format!("bar.sync {barrier};"),
                    Some(threads) => {
                        format!("bar.sync {barrier}, {};", self.operand(*threads, Type::U32))
                    }
                }
            }
            I::BarrierArrive { barrier, threads } => {
                let [barrier, threads] = [barrier, threads].map(|o| self.operand(*o, Type::U32));
                format!("bar.arrive {barrier}, {threads};")
            }
            I::ClusterArrive { order } => match order {
                ClusterOrder::Release => "barrier.cluster.arrive.release.aligned;".to_owned(),
                ClusterOrder::Relaxed => "barrier.cluster.arrive.relaxed.aligned;".to_owned(),
            },
            I::ClusterWait => "barrier.cluster.wait.acquire.aligned;".to_owned(),
            I::MbarrierInit { address, count } => {
                let (address, count) = (self.address(*address), self.operand(*count, Type::U32));
                format!("mbarrier.init.shared::cta.b64 {address}, {count};")
            }
            I::MbarrierInvalidate { address } => {
                format!("mbarrier.inval.shared::cta.b64 {};", self.address(*address))
            }
            I::MbarrierArrive { space, address, count } => {
                let address = self.address(*address);
                let count = count.map(|c| format!(", {}", self.operand(c, Type::U32)));
                let count = count.unwrap_or_default();
                format!("mbarrier.arrive{}.b64 _, {address}{count};", arrive_space(*space))
            }
            I::MbarrierArriveExpect { space, address, bytes } => {
                let (address, bytes) = (self.address(*address), self.operand(*bytes, Type::U32));
                let space = arrive_space(*space);
                format!("mbarrier.arrive.expect_tx{space}.b64 _, {address}, {bytes};")
            }
            I::MbarrierExpect { address, bytes } => {
                let (address, bytes) = (self.address(*address), self.operand(*bytes, Type::U32));
                format!("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 {address}, {bytes};")
            }
            I::MbarrierTryWait { dst, address, parity, scope } => {
                self.try_wait(&self.name(*dst), *address, *parity, *scope)
            }
            I::MbarrierWait { address, parity, scope } => {
                let label = self.label();
                return vec![
                    "{".to_owned(),
                    ".reg .pred %done;".to_owned(),
                    format!("$wait_{label}:"),
                    self.try_wait("%done", *address, *parity, *scope),
                    format!("@!%done bra $wait_{label};"),
                    "}".to_owned(),
                ];
            }
            I::MbarrierArriveOnCopies { address } => {
                let address = self.address(*address);
                format!("cp.async.mbarrier.arrive.noinc.shared::cta.b64 {address};")
            }

            I::CopyAsync { dst, src, bytes, source_bytes, cache } => {
                let cache = match cache {
                    CopyCache::All => "ca",
                    CopyCache::L2Only => "cg",
                };
                let (dst, src) = (self.address(*dst), self.address(*src));
                let source = source_bytes.map(|o| format!(", {}", self.operand(o, Type::U32)));
                let source = source.unwrap_or_default();
                format!("cp.async.{cache}.shared::cta.global {dst}, {src}, {bytes}{source};")
            }
            I::CopyAsyncCommit => "cp.async.commit_group;".to_owned(),
            I::CopyAsyncWait { pending } => format!("cp.async.wait_group {pending};"),
            I::BulkLoad { dst, src, bytes, barrier, multicast } => {
                let (cast, mask) = self.multicast(*multicast);
                let [dst, src, barrier] = [dst, src, barrier].map(|a| self.address(*a));
                let bytes = self.operand(*bytes, Type::U32);
                return self.with_mask(*multicast, format!(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{cast} {dst}, {src}, {bytes}, {barrier}{mask};"
                ));
            }
            I::BulkStore { dst, src, bytes } => {
                let [dst, src] = [dst, src].map(|a| self.address(*a));
                let bytes = self.operand(*bytes, Type::U32);
                format!("cp.async.bulk.global.shared::cta.bulk_group {dst}, {src}, {bytes};")
            }
            I::BulkReduceAdd { ty, dst, src, bytes } => {
                let [dst, src] = [dst, src].map(|a| self.address(*a));
                let bytes = self.operand(*bytes, Type::U32);
                let ty = bulk_addition(*ty);
                format!(
                    "cp.reduce.async.bulk.global.shared::cta.bulk_group.{ty} {dst}, {src}, {bytes};"
                )
            }
            I::TensorLoad { dst, map, coordinates, barrier, multicast } => {
                let (cast, mask) = self.multicast(*multicast);
                let (rank, place) = self.tensor(*map, coordinates);
                let [dst, barrier] = [dst, barrier].map(|a| self.address(*a));
                return self.with_mask(*multicast, format!(
                    "cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{cast} {dst}, {place}, {barrier}{mask};"
                ));
            }
            I::TensorStore { map, coordinates, src } => {
                let (rank, place) = self.tensor(*map, coordinates);
                let src = self.address(*src);
                format!(
                    "cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group {place}, {src};"
                )
            }
            I::TensorReduceAdd { map, coordinates, src } => {
                let (rank, place) = self.tensor(*map, coordinates);
                let src = self.address(*src);
                format!(
                    "cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.add.tile.bulk_group {place}, {src};"
                )
            }
            I::BulkCommit => "cp.async.bulk.commit_group;".to_owned(),
            I::BulkWait { pending, read_only } => {
                let read = if *read_only { ".read" } else { "" };
                format!("cp.async.bulk.wait_group{read} {pending};")
            }
            I::TensorMapPrefetch { map } => format!("prefetch.tensormap [{}];", self.name(*map)),

            I::Fence(kind) => format!("fence{};", fence_kind(*kind)),
            I::SetMaxRegisters { change, count } => {
                let change = match change {
                    RegisterChange::Increase => "inc",
                    RegisterChange::Decrease => "dec",
                };
                format!("setmaxnreg.{change}.sync.aligned.u32 {count};")
            }
            I::MapShared { dst, address, rank } => {
                let (dst, address) = (self.name(*dst), self.name(*address));
                let rank = self.operand(*rank, Type::U32);
                format!("mapa.shared::cluster.u32 {dst}, {address}, {rank};")
            }
            I::GridDependencyWait => "griddepcontrol.wait;".to_owned(),
            I::GridDependencyLaunch => "griddepcontrol.launch_dependents;".to_owned(),
            I::Sleep { nanoseconds } => {
                format!("nanosleep.u32 {};", self.operand(*nanoseconds, Type::U32))
            }
            I::Trap => "trap;".to_owned(),
        };
        vec![line]
    }

    fn convert(&self, dst: Register, src: Register) -> Vec<String> {
        let (to, from) = (self.program.type_of(dst), self.program.type_of(src));
        let (d, s) = (self.name(dst), self.name(src));
        // A bfloat16 is the upper half of an f32: a shift, on every target.
        if (to, from) == (Type::F32, Type::BF16) {
            return vec![
                "{".to_owned(),
                ".reg .b32 %wide;".to_owned(),
                format!("cvt.u32.u16 %wide, {s};"),
                "shl.b32 %wide, %wide, 16;".to_owned(),
                format!("mov.b32 {d}, %wide;"),
                "}".to_owned(),
            ];
        }
        let rounding = match (to, from) {
            (Type::F16 | Type::BF16, Type::F32) => ".rn",
            (Type::F32, from) if from.is_integer() => ".rn",
            (to, Type::F32) if to.is_integer() => ".rzi",
            _ => "",
        };
        vec![format!("cvt{rounding}.{}.{} {d}, {s};", scalar_type(to), scalar_type(from))]
    }

    fn try_wait(&self, done: &str, address: Address, parity: Operand, scope: Scope) -> String {
        let scope = match scope {
            Scope::Block => "",
            _ => ".acquire.cluster",
        };
        let (address, parity) = (self.address(address), self.operand(parity, Type::U32));
        format!("mbarrier.try_wait.parity{scope}.shared::cta.b64 {done}, {address}, {parity};")
    }

    fn atomic_form(
        &self,
        order: AtomicOrder,
        scope: Scope,
        space: Space,
        operation: AtomicOperation,
        ty: Type,
    ) -> String {
        let (order, scope) = (order_name(order), scope_name(scope));
        let space = space_name(space);
        format!(".{order}.{scope}{space}{}", atomic_operation(operation, ty))
    }

    fn tensor(&self, map: Register, coordinates: &[Operand]) -> (usize, String) {
        let list: Vec<_> = coordinates.iter().map(|c| self.operand(*c, Type::S32)).collect();
        (coordinates.len(), format!("[{}, {{{}}}]", self.name(map), list.join(", ")))
    }

    fn multicast(&self, mask: Option<Register>) -> (&'static str, &'static str) {
        match mask {
            Some(_) => (".multicast::cluster", ", %mask"),
            None => ("", ""),
        }
    }

    /// Returns the lines of an instruction with a multicast mask, which is moved from its 32-bit
    /// register to a 16-bit operand.
    fn with_mask(&self, mask: Option<Register>, line: String) -> Vec<String> {
        match mask {
            None => vec![line],
            Some(mask) => vec![
                "{".to_owned(),
                ".reg .b16 %mask;".to_owned(),
                format!("cvt.u16.u32 %mask, {};", self.name(mask)),
                line,
                "}".to_owned(),
            ],
        }
    }
}

pub(crate) fn atomic_operation(operation: AtomicOperation, ty: Type) -> String {
    let name = match operation {
        AtomicOperation::Add => "add",
        AtomicOperation::Minimum => "min",
        AtomicOperation::Maximum => "max",
        AtomicOperation::And => "and",
        AtomicOperation::Or => "or",
        AtomicOperation::Xor => "xor",
        AtomicOperation::Exchange => "exch",
    };
    let suffix = match operation {
        AtomicOperation::And
        | AtomicOperation::Or
        | AtomicOperation::Xor
        | AtomicOperation::Exchange => format!("b{}", ty.bits()),
        _ if ty.is_packed_half() => format!("noftz.{}", scalar_type(ty)),
        // Two's complement addition is the same for both signs, and only the unsigned form exists
        // at 64 bits.
        AtomicOperation::Add if ty == Type::S64 => "u64".to_owned(),
        _ => scalar_type(ty).to_owned(),
    };
    format!(".{name}.{suffix}")
}

pub(crate) fn multiply_add(ty: Type) -> String {
    let mnemonic = if ty.is_integer() { "mad.lo" } else { "fma.rn" };
    format!("{mnemonic}.{}", scalar_type(ty))
}

pub(crate) fn unary(operation: UnaryOperation, ty: Type) -> String {
    let name = match operation {
        UnaryOperation::Negate => "neg",
        UnaryOperation::Absolute => "abs",
        UnaryOperation::Not if ty == Type::Pred => return "not.pred".to_owned(),
        UnaryOperation::Not => return format!("not.b{}", ty.bits()),
        UnaryOperation::PopulationCount => return format!("popc.b{}", ty.bits()),
        UnaryOperation::LeadingZeros => return format!("clz.b{}", ty.bits()),
        UnaryOperation::Exp2 => match ty {
            Type::F32 => return "ex2.approx.ftz.f32".to_owned(),
            Type::BF16 | Type::BF16x2 => "ex2.approx.ftz",
            _ => "ex2.approx",
        },
        UnaryOperation::Log2 => return "lg2.approx.ftz.f32".to_owned(),
        UnaryOperation::Reciprocal => return "rcp.approx.ftz.f32".to_owned(),
        UnaryOperation::ReciprocalSqrt => return "rsqrt.approx.ftz.f32".to_owned(),
        UnaryOperation::Sqrt => return "sqrt.approx.ftz.f32".to_owned(),
        UnaryOperation::Tanh => "tanh.approx",
    };
    // Negation and absolute value exist only in the signed spelling.
    let ty = match ty {
        Type::U32 => Type::S32,
        Type::U64 => Type::S64,
        other => other,
    };
    format!("{name}.{}", scalar_type(ty))
}

pub(crate) fn binary(operation: BinaryOperation, ty: Type) -> String {
    let scalar = scalar_type(ty);
    let bits = if ty == Type::Pred { "pred".to_owned() } else { format!("b{}", ty.bits()) };
    match operation {
        BinaryOperation::Add => format!("add.{scalar}"),
        BinaryOperation::Subtract => format!("sub.{scalar}"),
        BinaryOperation::Multiply if ty.is_integer() => format!("mul.lo.{scalar}"),
        BinaryOperation::Multiply => format!("mul.{scalar}"),
        BinaryOperation::MultiplyHigh => format!("mul.hi.{scalar}"),
        BinaryOperation::Divide if ty == Type::F32 => "div.approx.ftz.f32".to_owned(),
        BinaryOperation::Divide => format!("div.{scalar}"),
        BinaryOperation::DivideRounded => format!("div.rn.{scalar}"),
        BinaryOperation::Remainder => format!("rem.{scalar}"),
        BinaryOperation::Minimum => format!("min.{scalar}"),
        BinaryOperation::Maximum => format!("max.{scalar}"),
        BinaryOperation::And => format!("and.{bits}"),
        BinaryOperation::Or => format!("or.{bits}"),
        BinaryOperation::Xor => format!("xor.{bits}"),
        BinaryOperation::ShiftLeft => format!("shl.{bits}"),
        BinaryOperation::ShiftRight => format!("shr.{scalar}"),
    }
}

pub(crate) fn compare(comparison: Comparison, ty: Type) -> &'static str {
    match comparison {
        Comparison::Equal => "eq",
        // For floats, `ne` is false if an operand is NaN.
        Comparison::NotEqual if ty.is_integer() || ty == Type::Pred => "ne",
        Comparison::NotEqual => "neu",
        Comparison::Less => "lt",
        Comparison::LessOrEqual => "le",
        Comparison::Greater => "gt",
        Comparison::GreaterOrEqual => "ge",
        Comparison::GreaterOrUnordered => "gtu",
        Comparison::Unordered => "nan",
    }
}

pub(crate) fn special_name(special: SpecialRegister) -> String {
    let along = |name: &str, axis: Axis| {
        let axis = match axis {
            Axis::X => "x",
            Axis::Y => "y",
            Axis::Z => "z",
        };
        format!("%{name}.{axis}")
    };
    match special {
        SpecialRegister::Thread(axis) => along("tid", axis),
        SpecialRegister::BlockExtent(axis) => along("ntid", axis),
        SpecialRegister::Block(axis) => along("ctaid", axis),
        SpecialRegister::GridExtent(axis) => along("nctaid", axis),
        SpecialRegister::Cluster(axis) => along("clusterid", axis),
        SpecialRegister::ClusterGridExtent(axis) => along("nclusterid", axis),
        SpecialRegister::ClusterRank => "%cluster_ctarank".to_owned(),
        SpecialRegister::ClusterSize => "%cluster_nctarank".to_owned(),
        SpecialRegister::Lane => "%laneid".to_owned(),
        SpecialRegister::LanesBefore => "%lanemask_lt".to_owned(),
        SpecialRegister::Multiprocessor => "%smid".to_owned(),
        SpecialRegister::MultiprocessorCount => "%nsmid".to_owned(),
        SpecialRegister::Clock => "%clock".to_owned(),
        SpecialRegister::Clock64 => "%clock64".to_owned(),
        SpecialRegister::GlobalTimer => "%globaltimer".to_owned(),
    }
}

pub(crate) fn space_name(space: Space) -> &'static str {
    match space {
        Space::Shared => ".shared",
        Space::Cluster => ".shared::cluster",
        Space::Global => ".global",
    }
}

/// Arrivals at another block's barrier need an explicit scope.
pub(crate) fn arrive_space(space: Space) -> &'static str {
    match space {
        Space::Cluster => ".release.cluster.shared::cluster",
        _ => ".shared::cta",
    }
}

pub(crate) fn scope_name(scope: Scope) -> &'static str {
    match scope {
        Scope::Block => "cta",
        Scope::Cluster => "cluster",
        Scope::Gpu => "gpu",
        Scope::System => "sys",
    }
}

pub(crate) fn order_name(order: AtomicOrder) -> &'static str {
    match order {
        AtomicOrder::Relaxed => "relaxed",
        AtomicOrder::Acquire => "acquire",
        AtomicOrder::Release => "release",
        AtomicOrder::AcquireRelease => "acq_rel",
    }
}

pub(crate) fn load_cache(cache: LoadCache) -> &'static str {
    match cache {
        LoadCache::Default => "",
        LoadCache::ReadOnly => ".nc",
        LoadCache::ReadOnlyOnce => ".nc.L1::no_allocate",
        LoadCache::L2Only => ".cg",
        LoadCache::Streaming => ".cs",
        LoadCache::EvictFirst => ".L1::evict_first",
        LoadCache::EvictLast => ".L1::evict_last",
    }
}

pub(crate) fn store_cache(cache: StoreCache) -> &'static str {
    match cache {
        StoreCache::Default => "",
        StoreCache::L2Only => ".cg",
        StoreCache::Streaming => ".cs",
        StoreCache::NoAllocate => ".L1::no_allocate",
    }
}

pub(crate) fn shuffle_mode(mode: ShuffleMode) -> &'static str {
    match mode {
        ShuffleMode::Index => "idx",
        ShuffleMode::Up => "up",
        ShuffleMode::Down => "down",
        ShuffleMode::Butterfly => "bfly",
    }
}

pub(crate) fn mma_shape(shape: MmaShape) -> &'static str {
    match shape {
        MmaShape::M16N8K8 => "m16n8k8",
        MmaShape::M16N8K16 => "m16n8k16",
        MmaShape::M16N8K32 => "m16n8k32",
    }
}

pub(crate) fn bulk_addition(ty: BulkElement) -> String {
    match ty {
        BulkElement::Float(Element::F32) => "add.f32".to_owned(),
        BulkElement::Float(element) => format!("add.noftz.{element}"),
        BulkElement::U32 => "add.u32".to_owned(),
    }
}

pub(crate) fn fence_kind(fence: Fence) -> String {
    match fence {
        Fence::AcquireRelease(scope) => format!(".acq_rel.{}", scope_name(scope)),
        Fence::SequentiallyConsistent(scope) => format!(".sc.{}", scope_name(scope)),
        Fence::MbarrierInit => ".mbarrier_init.release.cluster".to_owned(),
        Fence::ProxyAsyncShared => ".proxy.async.shared::cta".to_owned(),
        Fence::ProxyAsyncGlobal => ".proxy.async.global".to_owned(),
        Fence::ProxyAsync => ".proxy.async".to_owned(),
    }
}
