//! The steps of a warp: control flow here, the meaning of each instruction in the file of its
//! family.

mod access;
mod arithmetic;
mod atomic;
mod barrier;
mod check;
mod convert;
mod copy;
mod grid;
mod lanes;
mod order;
mod product;

pub(crate) use access::Target;
pub(crate) use atomic::add_packed;

use ptx::{Instruction, SpecialRegister};

use crate::clock::FULL;
use crate::hazard::{Hazard, HazardKind};
use crate::lower;
use crate::machine::{Executed, Executor, SHARED_BASE, TENSOR_MAPS};
use crate::warp::{Frame, State, Wait, Warp, lanes_of};
use crate::{Measure, Policy};

/// The continuation of a warp after an instruction.
pub(crate) enum Flow {
    /// The warp goes on with the next instruction.
    Next,
    /// The warp goes on with the next instruction, but other actors may run first.
    Yield,
    /// The warp goes on with the next instruction once something has happened that it may observe.
    Poll,
    /// The warp waits for a condition; the instruction completes when it holds.
    Block(Wait),
}

impl<'a> Executor<'_, 'a> {
    /// Runs a warp for at most `quantum` steps or until it must wait.
    pub(crate) fn turn(&mut self, warp: &mut Warp<'a>, quantum: u32) -> Executed<()> {
        let code = self.grid_state.code;
        let mut instructions = 0;
        let mut lanes = 0;
        let mut left = quantum;
        let result = loop {
            if left == 0 {
                break Ok(());
            }
            left -= 1;
            match &code.steps[warp.pc] {
                lower::Step::Execute(instruction) => {
                    instructions += 1;
                    self.grid_state.reached[warp.pc] = true;
                    lanes += warp.active.count_ones() as u64;
                    if self.grid_state.checked
                        && let Err(hazard) = self.check_registers(warp, instruction)
                    {
                        break Err(hazard);
                    }
                    warp.time += cost(instruction);
                    match self.execute(warp, instruction) {
                        Ok(Flow::Next) => warp.pc += 1,
                        Ok(Flow::Yield) => {
                            warp.pc += 1;
                            break Ok(());
                        }
                        Ok(Flow::Poll) => {
                            warp.pc += 1;
                            warp.state = State::Polling(self.grid_state.progress);
                            break Ok(());
                        }
                        Ok(Flow::Block(wait)) => {
                            if !self.is_over(warp, &wait) {
                                self.grid_state.counts.add(Measure::BlockedWaits, 1);
                            }
                            // The instruction completes when the wait is over.
                            warp.state = State::Blocked(wait);
                            warp.waiting_since = warp.time;
                            break Ok(());
                        }
                        Err(hazard) => break Err(hazard),
                    }
                }
                lower::Step::Branch { condition, otherwise, end } => {
                    warp.time += 1;
                    let taken = warp.predicate_slot(*condition);
                    let second_first = match self.grid_state.options.policy {
                        Policy::Earliest | Policy::Modelled => false,
                        Policy::Latest => true,
                        Policy::Random => {
                            let both = warp.active & taken != 0 && warp.active & !taken != 0;
                            both && self.grid_state.random.below(2) == 1
                        }
                    };
                    warp.branch(taken, *otherwise, *end, second_first);
                }
                lower::Step::Role { member, first, last, end } => {
                    let taken = warp.predicate_slot(*member) & warp.active;
                    let belongs = (*first..*last).contains(&warp.in_block);
                    if taken != if belongs { warp.active } else { 0 } {
                        let text = format!(
                            "the role is for warps {first} to {last}, its predicate is true in \
                             lanes {taken:#010x} of warp {}",
                            warp.in_block
                        );
                        break Err(self.hazard(warp, None, HazardKind::RoleMismatch, text));
                    }
                    if belongs {
                        let restore = warp.active;
                        warp.frames.push(Frame::Branch { restore, waiting: None, end: *end });
                        warp.pc += 1;
                    } else {
                        warp.pc = *end;
                    }
                }
                lower::Step::SideEnd => warp.unwind(),
                lower::Step::LoopBegin { end } => {
                    warp.frames.push(Frame::Loop { restore: warp.active, end: *end });
                    warp.pc += 1;
                }
                lower::Step::LoopEnd { begin } => {
                    warp.time += 1;
                    warp.pc = *begin;
                }
                lower::Step::Break { condition } => {
                    let leaving = warp.predicate_slot(*condition) & warp.active;
                    warp.leave_loop(leaving);
                }
                lower::Step::Exit => break self.exit(warp),
            }
        };
        self.grid_state.steps += (quantum - left) as u64;
        self.grid_state.counts.add(Measure::WarpInstructions, instructions);
        self.grid_state.counts.add(Measure::LaneInstructions, lanes);
        self.grid_state.progress +=
            matches!(warp.state, State::Ready | State::Blocked(_) | State::Done) as u64;
        result
    }

    /// Ends a warp that has reached the end of the program.
    fn exit(&mut self, warp: &mut Warp<'a>) -> Executed<()> {
        warp.state = State::Done;
        let block = warp.block;
        self.cluster.blocks[block].live_warps -= 1;
        self.grid_state.counts.raise(Measure::Cycles, warp.time);
        if warp.products > warp.products_waited {
            let issued = self.cluster.groups[warp.group]
                .queue
                .front()
                .and_then(|product| self.grid_state.code.places[product.step]);
            let text = format!(
                "the warp ends with {} products it has not waited for",
                warp.products - warp.products_waited
            );
            let mut hazard = self.hazard(warp, None, HazardKind::NeverWaited, text);
            hazard.place = issued.or(hazard.place);
            return Err(hazard);
        }
        if warp.stores.never_waited() {
            let text = "the warp ends before a bulk store is known to have read its source";
            let mut hazard = self.hazard(warp, None, HazardKind::CopyInFlightAtExit, text);
            let mine = self.cluster.operations.values().find(|o| o.warp == warp.index);
            hazard.place = mine.and_then(|o| self.grid_state.code.places[o.step]);
            return Err(hazard);
        }
        if self.cluster.blocks[block].live_warps == 0 {
            let left = self.cluster.operations.values().find(|operation| {
                use crate::machine::OperationKind as K;
                match &operation.kind {
                    K::Load { to, .. } => *to == block,
                    K::CopyAsync(_) | K::ArriveOnCopies { .. } => operation.block == block,
                    K::Store { staged, .. } => operation.block == block && staged.is_none(),
                }
            });
            if let Some(operation) = left {
                let text = "all warps of the block have ended; nobody waited for the copy";
                return Err(self.operation_hazard(operation, HazardKind::CopyInFlightAtExit, text));
            }
            self.check_remote_accesses(warp)?;
            self.check_barriers(warp)?;
            self.check_grid_waits(warp)?;
        }
        self.settle_cluster_barrier(warp.time);
        Ok(())
    }

    /// Checks, at the end of a block, that no mbarrier is in the middle of a phase: missing
    /// arrivals or bytes would have blocked a further phase.
    fn check_barriers(&self, warp: &Warp<'a>) -> Executed<()> {
        let barriers = &self.cluster.blocks[warp.block].mbarriers;
        let mut barriers = barriers.iter();
        let left = barriers.find(|(_, it)| it.pending != it.expected || it.transactions != 0);
        let Some((address, barrier)) = left else { return Ok(()) };
        let name = self.shared_name(*address);
        let mut text = format!(
            "the block ends in the middle of a phase of {name}: {} of {} arrivals are missing",
            barrier.pending, barrier.expected
        );
        if barrier.transactions != 0 {
            text += &format!(", and {} bytes", barrier.transactions);
        }
        let mut hazard = self.hazard(warp, None, HazardKind::MbarrierUnfinished, text);
        hazard.place = barrier.arrivers.last().map(|(_, place)| *place).or(barrier.expected_at);
        hazard.other = barrier.initialised_at;
        Err(hazard)
    }

    /// Checks that a block ends only after every access of other blocks to its shared memory.
    fn check_remote_accesses(&self, warp: &Warp<'a>) -> Executed<()> {
        if !self.grid_state.checked || self.cluster.blocks[warp.block].remote_accesses.is_empty() {
            return Ok(());
        }
        let mut known = warp.clock.view(FULL).known.clone();
        for other in self.cluster.warps.iter().flatten().filter(|w| w.block == warp.block) {
            known.join(&other.clock.view(FULL).known);
        }
        for ((component, lanes), access) in &self.cluster.blocks[warp.block].remote_accesses {
            if !known.get(*component).covers(access.clock, *lanes) {
                let text = format!(
                    "the block ends, and nothing orders an access of {} to its shared memory \
                     before that",
                    access.actor
                );
                let mut hazard = self.hazard(warp, None, HazardKind::ExitedBlock, text);
                (hazard.place, hazard.other) = (access.place, None);
                return Err(hazard);
            }
        }
        Ok(())
    }

    /// Checks that registers are written before they are read, and that those of products in flight
    /// are left alone.
    fn check_registers(&self, warp: &mut Warp<'a>, instruction: &Instruction) -> Executed<()> {
        let touches = &warp.code.touches[warp.pc];
        let in_flight = warp.products > warp.products_waited;
        let is_product = matches!(instruction, Instruction::Wgmma { .. });
        for register in &touches.reads {
            let index = register.0 as usize;
            let missing = warp.active & !warp.shadow.written[index];
            if missing != 0 {
                let lane = missing.trailing_zeros();
                let ty = warp.code.slots[index].0;
                let text = format!("register {index} ({ty:?}) is read but was never written");
                let kind = HazardKind::UninitialisedRegister;
                return Err(self.hazard(warp, Some(lane), kind, text));
            }
            if in_flight && warp.is_accumulating(*register) {
                return Err(self.register_hazard(warp, *register, "read"));
            }
            if !is_product {
                warp.shadow.touched[index] = (warp.shadow.fences + 1, warp.pc as u32);
            }
        }
        for register in &touches.writes {
            let index = register.0 as usize;
            if in_flight && (warp.is_accumulating(*register) || warp.is_operand(*register)) {
                return Err(self.register_hazard(warp, *register, "written"));
            }
            warp.shadow.written[index] |= warp.active;
            warp.shadow.touched[index] = (warp.shadow.fences + 1, warp.pc as u32);
        }
        Ok(())
    }

    pub(crate) fn register_hazard(
        &self,
        warp: &Warp<'_>,
        register: ptx::Register,
        verb: &str,
    ) -> Box<Hazard> {
        let index = register.0 as usize;
        let accumulating = warp.is_accumulating(register);
        let number =
            if accumulating { warp.shadow.accumulating[index] } else { warp.shadow.operand[index] };
        let (kind, what) = if accumulating {
            (HazardKind::AccumulatorInFlight, "a product still writes it")
        } else {
            (HazardKind::OperandInFlight, "a product still reads it")
        };
        let text = format!("register {index} is {verb} while {what}");
        let step = warp.shadow.product_steps.get(number as usize - 1);
        let other = step.and_then(|step| self.grid_state.code.places[*step]);
        self.hazard(warp, None, kind, text).with_other(other)
    }

    /// Checks that all lanes of the warp reach an instruction together.
    pub(crate) fn aligned(&self, warp: &Warp<'_>, what: &str) -> Executed<()> {
        if warp.active == FULL {
            return Ok(());
        }
        let text = format!("{what} is reached by lanes {:#010x} only", warp.active);
        Err(self.hazard(warp, None, HazardKind::Divergent, text))
    }

    fn execute(&mut self, warp: &mut Warp<'a>, instruction: &Instruction) -> Executed<Flow> {
        use Instruction as I;
        match instruction {
            I::Move { .. }
            | I::Unary { .. }
            | I::Binary { .. }
            | I::MultiplyAdd { .. }
            | I::MultiplyWide { .. }
            | I::Compare { .. }
            | I::Select { .. }
            | I::PermuteBytes { .. }
            | I::FunnelShift { .. }
            | I::Logic3 { .. } => {
                if let I::Unary { operation: ptx::UnaryOperation::Exp2, ty, .. } = instruction {
                    let each = if ty.is_packed_half() { 2 } else { 1 };
                    let count = each * warp.active.count_ones() as u64;
                    self.grid_state.counts.add(Measure::Exponentials, count);
                }
                arithmetic::execute(warp, instruction);
            }
            I::Convert { .. }
            | I::ConvertPair { .. }
            | I::ConvertPacked { .. }
            | I::Split { .. }
            | I::Join { .. } => convert::execute(warp, instruction),

            I::ReadSpecial { dst, special } => self.read_special(warp, *dst, *special),
            I::ReadParameter { dst, parameter } => {
                let value = self.grid_state.parameters[parameter.0 as usize];
                match warp.code.slots[dst.0 as usize].0.bits() {
                    64 => warp.set_wide(*dst, &[value; 32]),
                    _ => warp.set_word(*dst, &[value as u32; 32]),
                }
            }
            I::TensorMapAddress { dst, parameter } => {
                warp.set_wide(*dst, &[TENSOR_MAPS + 128 * parameter.0 as u64; 32]);
            }
            I::SharedBase { dst, offset } => warp.set_word(*dst, &[SHARED_BASE + offset; 32]),

            I::Load { dst, space, address, order, cache } => {
                self.load(warp, dst, *space, *address, *order, *cache)?;
            }
            I::LoadByte { dst, address } => self.load_byte(warp, *dst, *address)?,
            I::Store { src, space, address, order, cache: _ } => {
                self.store(warp, src, *space, *address, *order)?;
            }
            I::PrefetchL2 { address } => {
                let addresses = warp.global_addresses(*address);
                for lane in lanes_of(warp.active) {
                    self.global_range(warp, lane, addresses[lane as usize], 1, 1)?;
                }
            }
            I::Atomic { operation, ty, dst, space, address, value, scope, order } => {
                let change = atomic::Change::Operation(*operation, *value);
                self.atomic(warp, Some(*dst), *ty, *space, *address, change, *scope, *order)?;
            }
            I::CompareAndSwap { ty, dst, space, address, expected, value, scope, order } => {
                let change = atomic::Change::Swap(*expected, *value);
                self.atomic(warp, Some(*dst), *ty, *space, *address, change, *scope, *order)?;
            }
            I::Reduce { operation, ty, src, space, address, scope, order } => {
                for (index, register) in src.iter().enumerate() {
                    let mut address = *address;
                    address.offset += index as i32 * ty.bits() as i32 / 8;
                    let change = atomic::Change::Operation(*operation, (*register).into());
                    self.atomic(warp, None, *ty, *space, address, change, *scope, *order)?;
                }
            }
            I::LoadMatrix { dst, address, transpose } => {
                self.load_matrix(warp, dst, *address, *transpose)?;
            }
            I::StoreMatrix { src, address, transpose } => {
                self.store_matrix(warp, src, *address, *transpose)?;
            }

            I::Shuffle { mode, dst, valid, src, lane, clamp } => {
                self.aligned(warp, "a shuffle")?;
                let (source, lane) = (warp.word_of(*src), warp.word(*lane));
                let (result, in_range) = lanes::shuffle(*mode, source, &lane, *clamp);
                warp.set_word(*dst, &result);
                if let Some(valid) = valid {
                    warp.set_predicate(*valid, in_range);
                }
            }
            I::Vote { mode, dst, predicate } => {
                self.aligned(warp, "a vote")?;
                lanes::vote(warp, *mode, *dst, *predicate);
            }
            I::Ballot { dst, predicate } => {
                self.aligned(warp, "a ballot")?;
                let ballot = warp.predicate(*predicate);
                warp.set_word(*dst, &[ballot; 32]);
            }
            I::Elect { dst } => {
                self.aligned(warp, "an election")?;
                warp.set_predicate(*dst, 1);
            }
            I::WarpSync => {
                self.aligned(warp, "a warp barrier")?;
                if self.grid_state.checked {
                    warp.clock.synchronise();
                }
            }

            I::Mma { shape, element, accumulator, d, a, b, c } => {
                self.aligned(warp, "mma.sync")?;
                self.mma(warp, *shape, *element, *accumulator, d, a, b, c);
            }
            I::Wgmma { .. } => {
                self.aligned(warp, "wgmma")?;
                self.issue_product(warp, instruction)?;
                return Ok(Flow::Yield);
            }
            I::WgmmaFence => {
                self.aligned(warp, "wgmma.fence")?;
                warp.shadow.fences += 1;
            }
            I::WgmmaCommit => {
                self.aligned(warp, "wgmma.commit_group")?;
                warp.commits.push(warp.products);
            }
            I::WgmmaWait { pending } => {
                self.aligned(warp, "wgmma.wait_group")?;
                return self.wait_products(warp, *pending);
            }

            I::BarrierSync { barrier, threads } => {
                self.aligned(warp, "bar.sync")?;
                let generation = self.named_arrive(warp, *barrier, *threads)?;
                let barrier = warp.word(*barrier)[0];
                self.grid_state.counts.add(Measure::BarrierWaits, 1);
                return Ok(Flow::Block(Wait::Named { barrier, generation }));
            }
            I::BarrierArrive { barrier, threads } => {
                self.aligned(warp, "bar.arrive")?;
                self.named_arrive(warp, *barrier, Some(*threads))?;
            }
            I::ClusterArrive { order } => {
                self.aligned(warp, "barrier.cluster.arrive")?;
                self.cluster_arrive(warp, *order)?;
            }
            I::ClusterWait => {
                self.aligned(warp, "barrier.cluster.wait")?;
                return self.cluster_wait(warp);
            }
            I::MbarrierInit { address, count } => self.mbarrier_init(warp, *address, *count)?,
            I::MbarrierInvalidate { address } => self.mbarrier_invalidate(warp, *address)?,
            I::MbarrierArrive { space, address, count } => {
                self.mbarrier_arrive(warp, *space, *address, *count, None)?;
            }
            I::MbarrierArriveExpect { space, address, bytes } => {
                self.mbarrier_arrive(warp, *space, *address, None, Some(*bytes))?;
            }
            I::MbarrierExpect { address, bytes } => self.mbarrier_expect(warp, *address, *bytes)?,
            I::MbarrierTryWait { dst, address, parity, scope: _ } => {
                return self.mbarrier_try_wait(warp, *dst, *address, *parity);
            }
            I::MbarrierWait { address, parity, scope: _ } => {
                return self.mbarrier_wait(warp, *address, *parity);
            }
            I::MbarrierArriveOnCopies { address } => {
                self.arrive_on_copies(warp, *address)?;
                return Ok(Flow::Yield);
            }

            I::CopyAsync { dst, src, bytes, source_bytes, cache: _ } => {
                self.issue_copy(warp, *dst, *src, *bytes, *source_bytes)?;
                return Ok(Flow::Yield);
            }
            I::CopyAsyncCommit => warp.copies.commit(warp.active),
            I::CopyAsyncWait { pending } => {
                let waited = warp.copies.waited(warp.active, *pending);
                let (operations, _) = warp.copies.wait(warp.active, *pending, false);
                return Ok(Flow::Block(Wait::Copies { operations, waited }));
            }
            I::BulkLoad { dst, src, bytes, barrier, multicast } => {
                self.issue_bulk_load(warp, *dst, *src, *bytes, *barrier, *multicast)?;
                return Ok(Flow::Yield);
            }
            I::TensorLoad { dst, map, coordinates, barrier, multicast } => {
                self.issue_tensor_load(warp, *dst, *map, coordinates, *barrier, *multicast)?;
                return Ok(Flow::Yield);
            }
            I::BulkStore { dst, src, bytes } => {
                self.issue_bulk_store(warp, *dst, *src, *bytes, None)?;
                return Ok(Flow::Yield);
            }
            I::BulkReduceAdd { ty, dst, src, bytes } => {
                self.issue_bulk_store(warp, *dst, *src, *bytes, Some(*ty))?;
                return Ok(Flow::Yield);
            }
            I::TensorStore { map, coordinates, src } => {
                self.issue_tensor_store(warp, *map, coordinates, *src, false)?;
                return Ok(Flow::Yield);
            }
            I::TensorReduceAdd { map, coordinates, src } => {
                self.issue_tensor_store(warp, *map, coordinates, *src, true)?;
                return Ok(Flow::Yield);
            }
            I::BulkCommit => warp.stores.commit(warp.active),
            I::BulkWait { pending, read_only } => {
                let (operations, clock) = warp.stores.wait(warp.active, *pending, *read_only);
                let read_only = *read_only;
                return Ok(Flow::Block(Wait::Stores { operations, clock, read_only }));
            }
            I::TensorMapPrefetch { map } => {
                let addresses = *warp.wide_of(*map);
                for lane in lanes_of(warp.active) {
                    self.tensor_map(warp, lane, addresses[lane as usize], None)?;
                }
            }

            I::Fence(fence) => self.fence(warp, *fence),
            I::SetMaxRegisters { change, count } => {
                self.aligned(warp, "setmaxnreg")?;
                return self.set_registers(warp, *change, *count);
            }
            I::MapShared { dst, address, rank } => self.map_shared(warp, *dst, *address, *rank)?,
            I::GridDependencyWait => self.wait_for_grids(warp),
            I::GridDependencyLaunch => {}
            I::Sleep { nanoseconds } => {
                warp.time += warp.word(*nanoseconds)[0] as u64;
                return Ok(Flow::Poll);
            }
            I::Trap => {
                let text = "the kernel executed a trap";
                return Err(self.hazard(warp, None, HazardKind::Trap, text));
            }
        }
        Ok(Flow::Next)
    }

    fn read_special(&mut self, warp: &mut Warp<'a>, dst: ptx::Register, special: SpecialRegister) {
        let program = self.grid_state.program;
        let along = |axis: ptx::Axis, x: u32, otherwise: u32| match axis {
            ptx::Axis::X => x,
            ptx::Axis::Y | ptx::Axis::Z => otherwise,
        };
        let block = self.cluster.blocks[warp.block].index;
        let cluster = program.cluster.max(1);
        let uniform = |value: u32| [value; 32];
        let word = match special {
            SpecialRegister::Thread(ptx::Axis::X) => {
                std::array::from_fn(|lane| 32 * warp.in_block + lane as u32)
            }
            SpecialRegister::Thread(ptx::Axis::Y | ptx::Axis::Z) => uniform(0),
            SpecialRegister::BlockExtent(axis) => uniform(along(axis, program.threads, 1)),
            SpecialRegister::Block(axis) => uniform(along(axis, block, 0)),
            SpecialRegister::GridExtent(axis) => uniform(along(axis, self.grid_state.grid, 1)),
            SpecialRegister::Cluster(axis) => uniform(along(axis, block / cluster, 0)),
            SpecialRegister::ClusterGridExtent(axis) => {
                uniform(along(axis, self.grid_state.grid / cluster, 1))
            }
            SpecialRegister::ClusterRank => uniform(block % cluster),
            SpecialRegister::ClusterSize => uniform(cluster),
            SpecialRegister::Lane => std::array::from_fn(|lane| lane as u32),
            SpecialRegister::LanesBefore => std::array::from_fn(|lane| (1u32 << lane) - 1),
            SpecialRegister::Multiprocessor => uniform(block % 132),
            SpecialRegister::MultiprocessorCount => uniform(132),
            SpecialRegister::Clock => uniform(warp.time as u32),
            SpecialRegister::Clock64 | SpecialRegister::GlobalTimer => {
                warp.set_wide(dst, &[warp.time; 32]);
                return;
            }
        };
        warp.set_word(dst, &word);
    }
}

/// Returns the cycles for which an instruction occupies its warp's scheduler, in the cost model.
fn cost(instruction: &Instruction) -> u64 {
    use Instruction as I;
    use ptx::UnaryOperation as U;
    match instruction {
        // 16 special functions per cycle and multiprocessor, 4 per scheduler: 8 cycles for a warp.
        I::Unary {
            operation: U::Exp2 | U::Log2 | U::Reciprocal | U::ReciprocalSqrt | U::Sqrt | U::Tanh,
            ..
        } => 8,
        I::Load { space: ptx::Space::Global, .. } | I::LoadByte { .. } => 16,
        I::Load { .. } | I::LoadMatrix { .. } | I::StoreMatrix { .. } => 4,
        I::Shuffle { .. } | I::Atomic { .. } | I::CompareAndSwap { .. } => 4,
        _ => 1,
    }
}
