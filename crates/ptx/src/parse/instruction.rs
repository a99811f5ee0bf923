//! The instruction of a line, by the spellings of the printer: memory, lanes, products, barriers and
//! copies.

use super::operand::split;
use super::{Parsed, Parser, number};
use crate::print::instruction::*;
use crate::print::scalar_type;
use crate::*;

/// A line: the mnemonic with its modifiers, and the operands.
pub(super) struct Line<'a> {
    pub(super) mnemonic: &'a str,
    pub(super) operands: Vec<&'a str>,
}

impl<'a> Line<'a> {
    pub(super) fn new(line: &'a str) -> Parsed<Self> {
        let line = line.strip_suffix(';').ok_or_else(|| format!("`{line}`, expected `;`"))?;
        let (mnemonic, operands) = line.split_once(' ').unwrap_or((line, ""));
        Ok(Line { mnemonic, operands: split(operands) })
    }

    /// Returns the operands, of which there must be `N`.
    pub(super) fn all<const N: usize>(&self) -> Parsed<[&'a str; N]> {
        let count = self.operands.len();
        let operands = self.operands.as_slice().try_into();
        operands.map_err(|_| format!("{count} operands, expected {N}"))
    }

    /// Returns the first `N` operands, and the next if there is one more.
    pub(super) fn all_and<const N: usize>(&self) -> Parsed<([&'a str; N], Option<&'a str>)> {
        let few = || format!("{} operands, expected {N} or more", self.operands.len());
        let (first, rest) = self.operands.split_first_chunk().ok_or_else(few)?;
        Ok((*first, rest.first().copied()))
    }

    /// Returns the type of an instruction whose spelling several types share: the one that it names,
    /// a signed one if a constant has a sign, or the first.
    pub(super) fn type_among(&self, types: &[Type]) -> Type {
        let is_signed = self.operands.iter().any(|it| it.starts_with('-'));
        let preferred = types.iter().min_by_key(|ty| {
            let is_named = self.mnemonic.ends_with(&dotted(scalar_type(**ty)));
            let has_sign = is_signed && matches!(ty, Type::S32 | Type::S64);
            !is_named && !has_sign
        });
        preferred.copied().unwrap_or(Type::U32)
    }

    pub(super) fn unknown<T>(&self) -> Parsed<T> {
        Err(format!("there is no instruction `{}`", self.mnemonic))
    }
}

/// The modifiers of a mnemonic, read from the left.
struct Modifiers<'a>(&'a str);

impl Modifiers<'_> {
    /// Takes modifiers, each with its dot, if they are next.
    fn take(&mut self, modifiers: &str) -> bool {
        match self.0.strip_prefix(modifiers) {
            Some(rest) if rest.is_empty() || rest.starts_with('.') => {
                self.0 = rest;
                true
            }
            _ => false,
        }
    }

    /// Takes the longest spelling that is next; an empty one matches where no other does.
    fn one_of<T: Copy>(&mut self, all: &[T], spelling: impl Fn(T) -> String) -> Parsed<T> {
        let mut all: Vec<(String, T)> = all.iter().map(|it| (spelling(*it), *it)).collect();
        all.sort_by_key(|(spelling, _)| std::cmp::Reverse(spelling.len()));
        let found = all.into_iter().find(|(spelling, _)| self.take(spelling));
        found.map(|(_, it)| it).ok_or_else(|| format!("unknown modifier `{}`", self.0))
    }

    fn scope(&mut self) -> Parsed<Scope> {
        self.one_of(&Scope::ALL, |it| dotted(scope_name(it)))
    }

    fn space(&mut self) -> Parsed<Space> {
        self.one_of(&SPACES, |it| space_name(it).to_owned())
    }

    fn element(&mut self) -> Parsed<Element> {
        self.one_of(&ELEMENTS, |it| dotted(it.name()))
    }

    /// Checks that nothing is left.
    fn end(&self) -> Parsed<()> {
        if self.0.is_empty() { Ok(()) } else { Err(format!("unknown modifier `{}`", self.0)) }
    }
}

fn dotted(name: &str) -> String {
    format!(".{name}")
}

const SPACES: [Space; 3] = [Space::Shared, Space::Cluster, Space::Global];
const ELEMENTS: [Element; 6] =
    [Element::F32, Element::F16, Element::BF16, Element::E4M3, Element::E5M2, Element::Int8];

impl Parser<'_> {
    /// Parses an instruction of one line.
    pub(super) fn instruction_on(&mut self, line: &Line<'_>) -> Parsed<Instruction> {
        let (head, _) = line.mnemonic.split_once('.').unwrap_or((line.mnemonic, ""));
        match head {
            "mov" => self.move_(line),
            "cvt" => self.convert(line),
            "ld" | "st" | "atom" | "red" | "ldmatrix" | "stmatrix" | "prefetch" => {
                self.access(line)
            }
            "shfl" | "vote" | "elect" => self.lanes(line),
            "mma" | "wgmma" => self.product(line),
            "bar" | "barrier" | "mbarrier" => self.barrier(line),
            "cp" => self.copy(line, None),
            "fence" | "setmaxnreg" | "mapa" | "griddepcontrol" | "nanosleep" | "trap" => {
                self.control(line)
            }
            _ => self.arithmetic(line),
        }
    }

    /// Parses an instruction that is printed in braces, with a register of its own.
    pub(super) fn braced(&mut self) -> Parsed<Instruction> {
        match self.next()? {
            ".reg .pred %done;" => {
                let label = self.next()?.trim_end_matches(':').to_owned();
                let line = Line::new(self.next()?)?;
                let mut modifiers = Modifiers(line.mnemonic);
                let [_, address, parity] = line.all()?;
                let scope = wait_scope(&mut modifiers)?;
                self.expect(&format!("@!%done bra {label};"))?;
                let parity = self.operand(parity, Type::U32)?;
                Ok(Instruction::MbarrierWait { address: self.address(address)?, parity, scope })
            }
            ".reg .b32 %wide;" => {
                let [_, src] = Line::new(self.next()?)?.all()?;
                self.expect("shl.b32 %wide, %wide, 16;")?;
                let [dst, _] = Line::new(self.next()?)?.all()?;
                let (dst, src) = (self.register(dst)?, self.register(src)?);
                self.typed(dst, Type::F32)?;
                self.typed(src, Type::BF16)?;
                Ok(Instruction::Convert { dst, src })
            }
            ".reg .b16 %mask;" => {
                let [_, mask] = Line::new(self.next()?)?.all()?;
                let mask = self.register(mask)?;
                let line = Line::new(self.next()?)?;
                self.copy(&line, Some(mask))
            }
            other => Err(format!("`{other}`, expected the register of an instruction")),
        }
    }

    fn access(&mut self, line: &Line<'_>) -> Parsed<Instruction> {
        let mut modifiers = Modifiers(line.mnemonic);
        if modifiers.take("ld.global.u8") {
            let [dst, address] = line.all()?;
            let (dst, address) = (self.register(dst)?, self.address(address)?);
            return Ok(Instruction::LoadByte { dst, address });
        }
        if modifiers.take("prefetch.global.L2") {
            let [address] = line.all()?;
            return Ok(Instruction::PrefetchL2 { address: self.address(address)? });
        }
        if modifiers.take("prefetch.tensormap") {
            let [map] = line.all()?;
            return Ok(Instruction::TensorMapPrefetch { map: self.address(map)?.base });
        }
        if modifiers.take("ld") {
            let [dst, address] = line.all()?;
            let order = if modifiers.take(".relaxed") {
                LoadOrder::Relaxed(modifiers.scope()?)
            } else if modifiers.take(".acquire") {
                LoadOrder::Acquire(modifiers.scope()?)
            } else {
                LoadOrder::Weak
            };
            let space = modifiers.space()?;
            let cache = modifiers.one_of(&LoadCache::ALL, |it| load_cache(it).to_owned())?;
            let (dst, address) = (self.list(dst)?, self.address(address)?);
            return Ok(Instruction::Load { dst, space, address, order, cache });
        }
        if modifiers.take("st") {
            let [address, src] = line.all()?;
            let order = if modifiers.take(".relaxed") {
                StoreOrder::Relaxed(modifiers.scope()?)
            } else if modifiers.take(".release") {
                StoreOrder::Release(modifiers.scope()?)
            } else {
                StoreOrder::Weak
            };
            let space = modifiers.space()?;
            let cache = modifiers.one_of(&StoreCache::ALL, |it| store_cache(it).to_owned())?;
            let (src, address) = (self.list(src)?, self.address(address)?);
            return Ok(Instruction::Store { src, space, address, order, cache });
        }
        if modifiers.take("ldmatrix.sync.aligned.m8n8") {
            let [dst, address] = line.all()?;
            let (dst, address) = (self.list(dst)?, self.address(address)?);
            let transpose = modifiers.0.contains(".trans.");
            return Ok(Instruction::LoadMatrix { dst, address, transpose });
        }
        if modifiers.take("stmatrix.sync.aligned.m8n8") {
            let [address, src] = line.all()?;
            let (src, address) = (self.list(src)?, self.address(address)?);
            let transpose = modifiers.0.contains(".trans.");
            return Ok(Instruction::StoreMatrix { src, address, transpose });
        }
        self.atomic(line)
    }

    fn atomic(&mut self, line: &Line<'_>) -> Parsed<Instruction> {
        let mut modifiers = Modifiers(line.mnemonic);
        let is_atomic = modifiers.take("atom");
        if !is_atomic && !modifiers.take("red") {
            return line.unknown();
        }
        let order = modifiers.one_of(&AtomicOrder::ALL, |it| dotted(order_name(it)))?;
        let scope = modifiers.scope()?;
        let space = modifiers.space()?;
        if modifiers.take(".cas") {
            let ty = if modifiers.take(".b64") { Type::U64 } else { Type::U32 };
            let [dst, address, expected, value] = line.all()?;
            let [expected, value] = self.operands([expected, value], ty)?;
            let (dst, address) = (self.register(dst)?, self.address(address)?);
            return Ok(Instruction::CompareAndSwap {
                ty,
                dst,
                space,
                address,
                expected,
                value,
                scope,
                order,
            });
        }
        if modifiers.take(".add.v2.f32") || modifiers.take(".add.v4.f32") {
            let [address, src] = line.all()?;
            let (operation, ty) = (AtomicOperation::Add, Type::F32);
            let (src, address) = (self.list(src)?, self.address(address)?);
            return Ok(Instruction::Reduce { operation, ty, src, space, address, scope, order });
        }
        let operation = AtomicOperation::ALL.into_iter().find_map(|operation| {
            let spelled = |ty: &Type| atomic_operation(operation, *ty) == modifiers.0;
            let types: Vec<Type> = Type::ALL.into_iter().filter(spelled).collect();
            (!types.is_empty()).then(|| (operation, line.type_among(&types)))
        });
        let Some((operation, ty)) = operation else { return line.unknown() };
        if is_atomic {
            let [dst, address, value] = line.all()?;
            let (dst, address) = (self.register(dst)?, self.address(address)?);
            let value = self.operand(value, ty)?;
            return Ok(Instruction::Atomic {
                operation,
                ty,
                dst,
                space,
                address,
                value,
                scope,
                order,
            });
        }
        let [address, src] = line.all()?;
        let (src, address) = (self.list(src)?, self.address(address)?);
        Ok(Instruction::Reduce { operation, ty, src, space, address, scope, order })
    }

    fn lanes(&mut self, line: &Line<'_>) -> Parsed<Instruction> {
        let mut modifiers = Modifiers(line.mnemonic);
        if modifiers.take("shfl.sync") {
            let mode = modifiers.one_of(&ShuffleMode::ALL, |it| dotted(shuffle_mode(it)))?;
            let [dst, src, lane, clamp, _] = line.all()?;
            let (dst, valid) = match dst.split_once('|') {
                Some((dst, valid)) => (dst, Some(self.register(valid)?)),
                None => (dst, None),
            };
            let (dst, src) = (self.register(dst)?, self.register(src)?);
            let (lane, clamp) = (self.operand(lane, Type::U32)?, number(clamp)?);
            return Ok(Instruction::Shuffle { mode, dst, valid, src, lane, clamp });
        }
        if modifiers.take("elect.sync") {
            let [dst, _] = line.all()?;
            let dst = dst.strip_prefix("_|").ok_or("expected a predicate")?;
            return Ok(Instruction::Elect { dst: self.register(dst)? });
        }
        let [dst, predicate, _] = line.all()?;
        let (dst, predicate) = (self.register(dst)?, self.register(predicate)?);
        match line.mnemonic {
            "vote.sync.all.pred" => Ok(Instruction::Vote { mode: VoteMode::All, dst, predicate }),
            "vote.sync.any.pred" => Ok(Instruction::Vote { mode: VoteMode::Any, dst, predicate }),
            "vote.sync.ballot.b32" => Ok(Instruction::Ballot { dst, predicate }),
            _ => line.unknown(),
        }
    }

    fn product(&mut self, line: &Line<'_>) -> Parsed<Instruction> {
        match line.mnemonic {
            "wgmma.fence.sync.aligned" => return Ok(Instruction::WgmmaFence),
            "wgmma.commit_group.sync.aligned" => return Ok(Instruction::WgmmaCommit),
            "wgmma.wait_group.sync.aligned" => {
                let [pending] = line.all()?;
                return Ok(Instruction::WgmmaWait { pending: number(pending)? });
            }
            _ => {}
        }
        let mut modifiers = Modifiers(line.mnemonic);
        if modifiers.take("mma.sync.aligned") {
            let shape = modifiers.one_of(&MmaShape::ALL, |it| dotted(mma_shape(it)))?;
            modifiers.take(".row.col");
            let accumulator = modifiers.element()?;
            let element = modifiers.element()?;
            let [d, a, b, c] = line.all()?;
            let (d, a, b, c) = (self.list(d)?, self.list(a)?, self.list(b)?, self.list(c)?);
            return Ok(Instruction::Mma { shape, element, accumulator, d, a, b, c });
        }
        if !modifiers.take("wgmma.mma_async.sync.aligned") {
            return line.unknown();
        }
        let shape = modifiers.0.strip_prefix(".m64n").and_then(|rest| rest.split_once('k'));
        let (n, rest) = shape.ok_or("expected a shape")?;
        let n = number(n)?;
        modifiers.0 = rest.trim_start_matches(|digit: char| digit.is_ascii_digit());
        let [accumulator, a_element, b_element] = [(); 3].map(|()| modifiers.element());
        let (accumulator, a_element, b_element) = (accumulator?, a_element?, b_element?);
        modifiers.end()?;
        let few = || "expected six operands or more".to_owned();
        let ([d, a, b, scale, sign_a, sign_b], transposes) =
            line.operands.split_first_chunk().ok_or_else(few)?;
        let mut transposes = transposes.iter().map(|it| *it == "1");
        let a = if a.starts_with('{') {
            let registers = self.list(a)?.try_into();
            WgmmaA::Registers(registers.map_err(|_| "expected four registers".to_owned())?)
        } else {
            let transpose = transposes.next().unwrap_or(false);
            WgmmaA::Shared { descriptor: self.register(a)?, transpose }
        };
        let accumulate = match *scale {
            "%false" => Accumulate::No,
            "%true" => Accumulate::Yes,
            predicate => Accumulate::If(self.register(predicate)?),
        };
        Ok(Instruction::Wgmma {
            n,
            a_element,
            b_element,
            accumulator,
            d: self.list(d)?,
            accumulate,
            a,
            b: self.register(b)?,
            b_transpose: transposes.next().unwrap_or(false),
            negate_a: *sign_a == "-1",
            negate_b: *sign_b == "-1",
        })
    }

    fn barrier(&mut self, line: &Line<'_>) -> Parsed<Instruction> {
        let mut modifiers = Modifiers(line.mnemonic);
        match line.mnemonic {
            "bar.warp.sync" => return Ok(Instruction::WarpSync),
            "bar.sync" => {
                let ([barrier], threads) = line.all_and()?;
                let threads = threads.map(|it| self.operand(it, Type::U32)).transpose()?;
                let barrier = self.operand(barrier, Type::U32)?;
                return Ok(Instruction::BarrierSync { barrier, threads });
            }
            "bar.arrive" => {
                let [barrier, threads] = self.operands(line.all()?, Type::U32)?;
                return Ok(Instruction::BarrierArrive { barrier, threads });
            }
            "barrier.cluster.arrive.release.aligned" => {
                return Ok(Instruction::ClusterArrive { order: ClusterOrder::Release });
            }
            "barrier.cluster.arrive.relaxed.aligned" => {
                return Ok(Instruction::ClusterArrive { order: ClusterOrder::Relaxed });
            }
            "barrier.cluster.wait.acquire.aligned" => return Ok(Instruction::ClusterWait),
            "mbarrier.init.shared::cta.b64" => {
                let [address, count] = line.all()?;
                let (address, count) = (self.address(address)?, self.operand(count, Type::U32)?);
                return Ok(Instruction::MbarrierInit { address, count });
            }
            "mbarrier.inval.shared::cta.b64" => {
                let [address] = line.all()?;
                return Ok(Instruction::MbarrierInvalidate { address: self.address(address)? });
            }
            "mbarrier.expect_tx.relaxed.cta.shared::cta.b64" => {
                let [address, bytes] = line.all()?;
                let (address, bytes) = (self.address(address)?, self.operand(bytes, Type::U32)?);
                return Ok(Instruction::MbarrierExpect { address, bytes });
            }
            _ => {}
        }
        let arrives = [Space::Shared, Space::Cluster];
        if modifiers.take("mbarrier.arrive.expect_tx") {
            let space = modifiers.one_of(&arrives, |it| arrive_space(it).to_owned())?;
            let [_, address, bytes] = line.all()?;
            let (address, bytes) = (self.address(address)?, self.operand(bytes, Type::U32)?);
            return Ok(Instruction::MbarrierArriveExpect { space, address, bytes });
        }
        if modifiers.take("mbarrier.arrive") {
            let space = modifiers.one_of(&arrives, |it| arrive_space(it).to_owned())?;
            let ([_, address], count) = line.all_and()?;
            let count = count.map(|it| self.operand(it, Type::U32)).transpose()?;
            return Ok(Instruction::MbarrierArrive {
                space,
                address: self.address(address)?,
                count,
            });
        }
        let scope = wait_scope(&mut modifiers)?;
        let [dst, address, parity] = line.all()?;
        let (dst, address) = (self.register(dst)?, self.address(address)?);
        let parity = self.operand(parity, Type::U32)?;
        Ok(Instruction::MbarrierTryWait { dst, address, parity, scope })
    }

    /// Parses a copy; `multicast` is the mask that stands before it.
    fn copy(&mut self, line: &Line<'_>, multicast: Option<Register>) -> Parsed<Instruction> {
        let mnemonic = line.mnemonic;
        match mnemonic {
            "cp.async.commit_group" => return Ok(Instruction::CopyAsyncCommit),
            "cp.async.bulk.commit_group" => return Ok(Instruction::BulkCommit),
            "cp.async.wait_group" => {
                let [pending] = line.all()?;
                return Ok(Instruction::CopyAsyncWait { pending: number(pending)? });
            }
            "cp.async.bulk.wait_group" | "cp.async.bulk.wait_group.read" => {
                let [pending] = line.all()?;
                let (pending, read_only) = (number(pending)?, mnemonic.ends_with(".read"));
                return Ok(Instruction::BulkWait { pending, read_only });
            }
            "cp.async.mbarrier.arrive.noinc.shared::cta.b64" => {
                let [address] = line.all()?;
                return Ok(Instruction::MbarrierArriveOnCopies { address: self.address(address)? });
            }
            "cp.async.ca.shared::cta.global" | "cp.async.cg.shared::cta.global" => {
                let ([dst, src, bytes], source_bytes) = line.all_and()?;
                let cache = match mnemonic.contains(".ca.") {
                    true => CopyCache::All,
                    false => CopyCache::L2Only,
                };
                let ([dst, src], bytes) = (self.addresses([dst, src])?, number(bytes)?);
                let source_bytes =
                    source_bytes.map(|it| self.operand(it, Type::U32)).transpose()?;
                return Ok(Instruction::CopyAsync { dst, src, bytes, source_bytes, cache });
            }
            _ => {}
        }
        // The mask is the last operand.
        let mut operands = line.operands.clone();
        if multicast.is_some() {
            operands.pop();
        }
        let line = Line { mnemonic, operands };
        let is_load = mnemonic.contains(".mbarrier::complete_tx::bytes");
        let is_reduction = mnemonic.starts_with("cp.reduce.");
        if mnemonic.contains(".bulk.tensor.") {
            if is_load {
                let [dst, tensor, barrier] = line.all()?;
                let (map, coordinates) = self.tensor(tensor)?;
                let [dst, barrier] = self.addresses([dst, barrier])?;
                return Ok(Instruction::TensorLoad { dst, map, coordinates, barrier, multicast });
            }
            let [tensor, src] = line.all()?;
            let (map, coordinates) = self.tensor(tensor)?;
            let src = self.address(src)?;
            return Ok(match is_reduction {
                true => Instruction::TensorReduceAdd { map, coordinates, src },
                false => Instruction::TensorStore { map, coordinates, src },
            });
        }
        if is_load {
            let [dst, src, bytes, barrier] = line.all()?;
            let [dst, src, barrier] = self.addresses([dst, src, barrier])?;
            let bytes = self.operand(bytes, Type::U32)?;
            return Ok(Instruction::BulkLoad { dst, src, bytes, barrier, multicast });
        }
        let [dst, src, bytes] = line.all()?;
        let ([dst, src], bytes) = (self.addresses([dst, src])?, self.operand(bytes, Type::U32)?);
        if !is_reduction {
            return Ok(Instruction::BulkStore { dst, src, bytes });
        }
        let floats = ELEMENTS.map(BulkElement::Float);
        let spelled = |ty: &BulkElement| mnemonic.ends_with(&dotted(&bulk_addition(*ty)));
        let ty = floats.into_iter().chain([BulkElement::U32]).find(spelled);
        let Some(ty) = ty else { return line.unknown() };
        Ok(Instruction::BulkReduceAdd { ty, dst, src, bytes })
    }

    fn control(&mut self, line: &Line<'_>) -> Parsed<Instruction> {
        let mut modifiers = Modifiers(line.mnemonic);
        if modifiers.take("fence") {
            let fences = Scope::ALL.map(Fence::AcquireRelease).into_iter();
            let fences = fences.chain(Scope::ALL.map(Fence::SequentiallyConsistent)).chain([
                Fence::MbarrierInit,
                Fence::ProxyAsyncShared,
                Fence::ProxyAsyncGlobal,
                Fence::ProxyAsync,
            ]);
            let fences: Vec<Fence> = fences.collect();
            return modifiers.one_of(&fences, fence_kind).map(Instruction::Fence);
        }
        if modifiers.take("setmaxnreg") {
            let change = match modifiers.take(".inc") {
                true => RegisterChange::Increase,
                false => RegisterChange::Decrease,
            };
            let [count] = line.all()?;
            return Ok(Instruction::SetMaxRegisters { change, count: number(count)? });
        }
        match line.mnemonic {
            "mapa.shared::cluster.u32" => {
                let [dst, address, rank] = line.all()?;
                let (dst, address) = (self.register(dst)?, self.register(address)?);
                let rank = self.operand(rank, Type::U32)?;
                Ok(Instruction::MapShared { dst, address, rank })
            }
            "griddepcontrol.wait" => Ok(Instruction::GridDependencyWait),
            "griddepcontrol.launch_dependents" => Ok(Instruction::GridDependencyLaunch),
            "nanosleep.u32" => {
                let [nanoseconds] = self.operands(line.all()?, Type::U32)?;
                Ok(Instruction::Sleep { nanoseconds })
            }
            "trap" => Ok(Instruction::Trap),
            _ => line.unknown(),
        }
    }
}

/// Takes the modifiers of a wait for a phase; returns its scope.
fn wait_scope(modifiers: &mut Modifiers<'_>) -> Parsed<Scope> {
    if !modifiers.take("mbarrier.try_wait.parity") {
        return Err(format!("there is no instruction `{}`", modifiers.0));
    }
    let is_cluster = modifiers.take(".acquire.cluster");
    Ok(if is_cluster { Scope::Cluster } else { Scope::Block })
}
