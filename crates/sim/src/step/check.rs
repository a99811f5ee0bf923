//! The checks of an access in checked mode: that the memory is initialised, that no copy or product
//! in flight uses it, and that the access is ordered with all conflicting ones; and the hazards
//! that report failures.

use super::Target;
use crate::hazard::{Hazard, HazardKind};
use crate::machine::{Executed, Executor, OperationKind, RemoteAccess, SHARED_BASE};
use crate::shadow::{CELL, Cell, Conflict, NO_LANE, Observer, Source};
use crate::warp::Warp;

impl<'a> Executor<'_, 'a> {
    /// Checks and records one lane's access through the generic proxy.
    pub(super) fn check_thread(
        &mut self,
        warp: &Warp<'a>,
        lane: u32,
        target: Target,
        bytes: u32,
        event: u32,
        write: bool,
    ) -> Executed<()> {
        if let Target::Shared { block, .. } = target {
            self.note_remote_access(warp, lane, block, warp.clock.now);
        }
        let observer = Observer {
            lane: lane as u8,
            copies: warp.clock.copies_of(lane),
            ..Observer::operation(warp.clock.view(1 << lane), event)
        };
        self.check_access(observer, target, bytes, write, u64::MAX)
    }

    /// Records an access to another block's shared memory, which must be over before that block
    /// ends.
    pub(super) fn note_remote_access(
        &mut self,
        warp: &Warp<'a>,
        lane: u32,
        block: usize,
        clock: u32,
    ) {
        if block == warp.block || !self.grid_state.checked {
            return;
        }
        let place = self.grid_state.code.places[warp.pc];
        let access = RemoteAccess { clock, place, actor: self.actor(warp, Some(lane)) };
        self.cluster.blocks[block]
            .remote_accesses
            .insert((warp.clock.component, 1 << lane), access);
    }

    /// Checks and records an access by a thread, a copy or a product: a hazard if an asynchronous
    /// operation in flight uses the memory, if it was never initialised, or if a conflicting access
    /// is not ordered before this one. `issued` is the number of operations that were issued before
    /// the access.
    pub(crate) fn check_access(
        &mut self,
        observer: Observer<'_>,
        target: Target,
        bytes: u32,
        write: bool,
        issued: u64,
    ) -> Executed<()> {
        let Observer { event, lane, .. } = observer;
        let grid_state = &mut *self.grid_state;
        let (cells, offset) = match target {
            Target::Shared { block, offset } => {
                let there = &self.cluster.blocks[block];
                let words = offset / 4..(offset + bytes as usize).div_ceil(4);
                for word in words {
                    if there.pending_writes[word] != 0 {
                        return Err(self.pending_write_hazard(
                            block,
                            4 * word,
                            event,
                            lane,
                            write,
                            issued,
                        ));
                    }
                    if write && there.pending_reads[word] != 0 {
                        return Err(self.pending_read_hazard(block, 4 * word, event, lane));
                    }
                }
                (&mut self.cluster.blocks[block].cells, offset)
            }
            Target::Global { buffer, offset } => {
                if !write
                    && let Some(at) =
                        grid_state.memory.first_unwritten(buffer, offset, bytes as usize)
                {
                    let name = &grid_state.memory.buffer(buffer).name;
                    let text = format!("byte {at} of buffer {name:?} was never written");
                    return Err(self.event_hazard(
                        event,
                        lane,
                        HazardKind::UninitialisedMemory,
                        text,
                    ));
                }
                (&mut grid_state.global[buffer], offset)
            }
        };
        let observer = Observer { global: matches!(target, Target::Global { .. }), ..observer };
        let (mut byte, end) = (offset, offset + bytes as usize);
        // The last cell without a hazard, before and after the access: neighbouring cells often
        // have the same state, and then need no check of their own.
        let mut known: Option<(Cell, Cell)> = None;
        while byte < end {
            for cell in cells.from(byte).iter_mut().take((end - byte).div_ceil(CELL)) {
                match known {
                    Some((before, after)) if *cell == before => *cell = after,
                    _ => {
                        let before = *cell;
                        if cell.barrier {
                            let here = self.shared_name((byte as u32) + SHARED_BASE);
                            let verb = if write { "written" } else { "read" };
                            let text = format!("{here} is a memory barrier and is {verb} as data");
                            let kind = HazardKind::MbarrierTouched;
                            let hazard = self.event_hazard(event, lane, kind, text);
                            return Err(hazard.with_other(self.mbarrier_place(target, byte)));
                        }
                        if !write && !cell.initialised {
                            let here = self.shared_name((byte as u32) + SHARED_BASE);
                            let text = format!("{here} was never written");
                            let kind = HazardKind::UninitialisedMemory;
                            return Err(self.event_hazard(event, lane, kind, text));
                        }
                        if let Some(conflict) = grid_state.shadow.access(cell, &observer, write) {
                            let at = match target {
                                Target::Shared { block, .. } => {
                                    Target::Shared { block, offset: byte }
                                }
                                Target::Global { buffer, .. } => {
                                    Target::Global { buffer, offset: byte }
                                }
                            };
                            return Err(self.conflict_hazard(conflict, event, lane, at, write));
                        }
                        known = Some((before, *cell));
                    }
                }
                byte += CELL;
            }
        }
        Ok(())
    }

    /// Returns where in the kernel's source the mbarrier at a byte was initialised.
    fn mbarrier_place(&self, target: Target, byte: usize) -> Option<ptx::SourceLocation> {
        let Target::Shared { block, .. } = target else { return None };
        let address = byte as u32 / 8 * 8 + SHARED_BASE;
        self.cluster.blocks[block].mbarriers.get(&address)?.initialised_at
    }

    /// Returns a hazard at the place and by the actor of a recorded access.
    pub(crate) fn event_hazard(
        &self,
        event: u32,
        lane: u8,
        kind: HazardKind,
        text: String,
    ) -> Box<Hazard> {
        let event = self.grid_state.shadow.get(event);
        let mut hazard = self.grid_state.hazard(kind, text);
        hazard.place = event.place;
        let mut actor = event.actor;
        if lane != NO_LANE {
            actor.lane = Some(lane as u32);
        }
        hazard.actor = Some(actor);
        hazard
    }

    /// Returns the hazard of an access to memory that an asynchronous copy in flight will write.
    fn pending_write_hazard(
        &self,
        block: usize,
        offset: usize,
        event: u32,
        lane: u8,
        write: bool,
        issued: u64,
    ) -> Box<Hazard> {
        let address = offset as u32 + SHARED_BASE;
        let here = self.shared_name(address);
        let what = self.grid_state.shadow.get(event).what;
        let covers = |dst: u32, bytes: u32| dst < address + 4 && address < dst + bytes;
        let copy = self.cluster.operations.iter().find(|(_, operation)| match &operation.kind {
            OperationKind::Load { to, dst, bytes, .. } => *to == block && covers(*dst, *bytes),
            OperationKind::CopyAsync(lanes) => {
                operation.block == block && lanes.iter().any(|l| covers(l.dst, l.bytes))
            }
            OperationKind::ArriveOnCopies { .. } | OperationKind::Store { .. } => false,
        });
        let (kind, text) = if copy.is_some_and(|(id, _)| *id >= issued) {
            // The accessing operation was issued first, and the copy while it was in flight.
            let text =
                format!("a copy is to overwrite {here}, which {what} in flight is yet to read");
            (HazardKind::OverwrittenInFlight, text)
        } else {
            let verb = if write { "writes" } else { "reads" };
            let text = format!(
                "{what} {verb} {here}, where a copy is to arrive that nobody can have waited for \
                 yet"
            );
            (HazardKind::TouchedBeforeArrival, text)
        };
        let hazard = self.event_hazard(event, lane, kind, text);
        hazard.with_other(copy.and_then(|(_, o)| self.grid_state.code.places[o.step]))
    }

    /// Returns the hazard of a write to memory that a bulk store or product in flight will read.
    fn pending_read_hazard(
        &self,
        block: usize,
        offset: usize,
        event: u32,
        lane: u8,
    ) -> Box<Hazard> {
        let here = self.shared_name(offset as u32 + SHARED_BASE);
        let what = self.grid_state.shadow.get(event).what;
        let address = offset as u32 + SHARED_BASE;
        let store = self.cluster.operations.values().find(|operation| match &operation.kind {
            OperationKind::Store { src, bytes, staged, .. } => {
                operation.block == block
                    && staged.is_none()
                    && *src < address + 4
                    && address < src + bytes
            }
            OperationKind::Load { .. }
            | OperationKind::CopyAsync(_)
            | OperationKind::ArriveOnCopies { .. } => false,
        });
        let (reader, step) = match store {
            Some(operation) => ("a bulk store", Some(operation.step)),
            None => ("a product", self.product_reading(block, address)),
        };
        let text = format!("{what} overwrites {here}, which {reader} in flight is yet to read");
        let hazard = self.event_hazard(event, lane, HazardKind::OverwrittenInFlight, text);
        hazard.with_other(step.and_then(|step| self.grid_state.code.places[step]))
    }

    /// Returns the hazard of an access that conflicts with an earlier one.
    fn conflict_hazard(
        &self,
        conflict: Conflict,
        event: u32,
        lane: u8,
        target: Target,
        write: bool,
    ) -> Box<Hazard> {
        let own = self.grid_state.shadow.get(event);
        let other = &conflict.other;
        let in_thread = |source| matches!(source, Source::Thread | Source::Atomic(_));
        let kind = if conflict.unfenced {
            HazardKind::MissingProxyFence
        } else if !in_thread(own.source) && conflict.other_id >= own.since {
            // The other access came while this operation was in flight.
            if write { HazardKind::TouchedBeforeArrival } else { HazardKind::OverwrittenInFlight }
        } else {
            match (other.source, conflict.other_reads) {
                (Source::Load | Source::Store, false) => HazardKind::TouchedBeforeArrival,
                (Source::Load | Source::Store | Source::Product, true) => {
                    HazardKind::OverwrittenInFlight
                }
                (_, true) if !in_thread(own.source) => HazardKind::OverwrittenInFlight,
                _ if (other.cluster, other.component) == (own.cluster, own.component) => {
                    HazardKind::LaneRace
                }
                _ => HazardKind::DataRace,
            }
        };
        let here = self.target_name(target);
        let verb = if write { "writes" } else { "reads" };
        let did = if conflict.other_reads { "read" } else { "wrote" };
        let mut actor = other.actor;
        actor.lane = match in_thread(other.source) {
            true => conflict.other_lane,
            false => conflict.other_lane.or(actor.lane),
        };
        let missing = if conflict.unfenced {
            "with no proxy fence in between"
        } else {
            match other.source {
                Source::Thread | Source::Atomic(_) => "and nothing orders the two",
                Source::Load => "and nobody here has waited for its arrival",
                Source::Store | Source::Product => "and nobody here has waited for it",
            }
        };
        let (what, before) = (own.what, other.what);
        let text = format!("{what} {verb} {here}, which {before} ({actor}) {did}, {missing}");
        let hazard = self.event_hazard(event, lane, kind, text);
        hazard.with_other(other.place)
    }

    /// Returns a hazard if another lane of the same instruction stored a different value to the
    /// same place.
    pub(super) fn check_collision(
        &mut self,
        warp: &Warp<'a>,
        lane: u32,
        target: Target,
        value: &[u8],
        event: u32,
    ) -> Executed<()> {
        let (cells, offset, old) = match target {
            Target::Shared { block, offset } => {
                let block = &mut self.cluster.blocks[block];
                (&mut block.cells, offset, &block.shared[offset..offset + value.len()])
            }
            Target::Global { buffer, offset } => {
                let bytes = &self.grid_state.memory.buffer(buffer).bytes;
                (&mut self.grid_state.global[buffer], offset, &bytes[offset..offset + value.len()])
            }
        };
        if cells.at(offset).written_by() == event && old != value {
            let here = self.target_name(target);
            let text =
                format!("another lane of this instruction stores a different value to {here}");
            return Err(self.hazard(warp, Some(lane), HazardKind::LaneCollision, text));
        }
        Ok(())
    }

    /// Returns a hazard if memory that is loaded as read-only was written by the running kernel.
    pub(super) fn check_read_only(
        &mut self,
        warp: &Warp<'a>,
        lane: u32,
        target: Target,
    ) -> Executed<()> {
        if let Target::Global { buffer, offset } = target {
            let cell = *self.grid_state.global[buffer].at(offset);
            if cell.is_written() {
                let here = self.target_name(target);
                let text = format!("{here} is loaded as read-only, but the kernel wrote it");
                let kind = HazardKind::ReadOnlyViolated;
                let hazard = self.hazard(warp, Some(lane), kind, text);
                return Err(hazard.with_other(self.grid_state.shadow.get(cell.written_by()).place));
            }
        }
        Ok(())
    }
}
