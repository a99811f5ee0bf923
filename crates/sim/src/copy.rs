//! The execution of asynchronous copies when the schedule completes them: `cp.async`, bulk and
//! tensor copies, with zero fill, swizzle and completion. Their issue is in `step/copy.rs`.
//!
//! A tensor copy moves a box, dense and fastest dimension first. Elements outside of the tensor
//! arrive as zeros and are not written back, but count towards the bytes of the copy. In shared
//! memory the swizzle exclusive-ors the bits of the 16-byte chunk (4 to 6) with address bits 7 to
//! 9, as many of them as the swizzle is wide.

use ptx::{BulkElement, Element, Scope, Swizzle, Type};

use crate::Measure;
use crate::clock::Entry;
use crate::float;
use crate::hazard::HazardKind;
use crate::machine::{
    Executed, Executor, LaneCopy, LoadSource, Operation, OperationKind, RemoteAccess, SHARED_BASE,
    StoreTarget, store_write_component, stream_entry,
};
use crate::shadow::{Event, Observer, Proxy, Source};
use crate::step::Target;
use crate::trace::{Span, Track};

/// Returns the address with the swizzle applied.
pub(crate) fn swizzled(address: u32, swizzle: Swizzle) -> u32 {
    address ^ (address >> 3 & swizzle.chunk_mask())
}

impl<'a> Executor<'_, 'a> {
    /// Executes an operation, or the first half of a store, and removes it when it is over.
    pub(crate) fn complete(&mut self, id: u64) -> Executed<()> {
        let mut operation = self.cluster.operations.remove(&id).expect("scheduled from the map");
        self.grid_state.progress += 1;
        let over = self.perform(&mut operation)?;
        if over {
            self.trace_copy(&operation);
        } else {
            self.cluster.operations.insert(id, operation);
        }
        Ok(())
    }

    fn trace_copy(&mut self, operation: &Operation) {
        let name = match &operation.kind {
            OperationKind::CopyAsync(_) => "cp.async".to_owned(),
            OperationKind::ArriveOnCopies { .. } => return,
            OperationKind::Load { bytes, .. } => format!("load {bytes} bytes"),
            OperationKind::Store { bytes, .. } => format!("store {bytes} bytes"),
        };
        if let Some(trace) = &mut self.grid_state.trace {
            let block = self.cluster.blocks[operation.block].index;
            let (start, end) = (operation.issued_at, operation.ready_at);
            trace.push(Span { block, track: Track::Copies, name, start, end, runs: false });
        }
    }

    fn operation_event(
        &mut self,
        operation: &Operation,
        component: u32,
        proxy: Proxy,
        source: Source,
        what: &'static str,
    ) -> u32 {
        if !self.grid_state.checked {
            return 0;
        }
        let event = Event {
            cluster: self.cluster.index,
            component,
            clock: operation.clock,
            proxy,
            source,
            place: self.grid_state.code.places[operation.step],
            actor: self.operation_actor(operation),
            what,
            since: operation.since,
        };
        self.grid_state.shadow.event(event)
    }

    fn perform(&mut self, operation: &mut Operation) -> Executed<bool> {
        match &operation.kind {
            OperationKind::CopyAsync(lanes) => {
                if self.grid_state.checked {
                    self.mark(operation.block, &operation.kind, -1);
                }
                let component = operation.component;
                let event = self.operation_event(
                    operation,
                    component,
                    Proxy::Generic,
                    Source::Load,
                    "cp.async",
                );
                for copy in lanes {
                    self.copy_lane(operation, *copy, event)?;
                }
                Ok(true)
            }
            OperationKind::ArriveOnCopies { lanes, .. } => {
                let arrived = lanes.iter().fold(0, |mask, (lane, _)| mask | 1 << lane);
                for (_, address) in lanes {
                    self.arrive_of_copy(operation, *address, arrived)?;
                }
                Ok(true)
            }
            OperationKind::Load { .. } => {
                self.perform_load(operation)?;
                Ok(true)
            }
            OperationKind::Store { staged, .. } => {
                if staged.is_none() {
                    self.read_source(operation)?;
                    Ok(false)
                } else {
                    self.write_destination(operation)?;
                    Ok(true)
                }
            }
        }
    }

    fn copy_lane(&mut self, operation: &Operation, copy: LaneCopy, event: u32) -> Executed<()> {
        let mut bytes = [0u8; 16];
        let valid = copy.source_bytes as usize;
        let observer = Observer {
            lane: copy.lane as u8,
            copies: copy.waited,
            ..Observer::operation(&operation.start, event)
        };
        let source = self.global_row(operation, observer, copy.src, valid as u64, false)?;
        if let Some((buffer, offset)) = source {
            bytes[..valid].copy_from_slice(
                &self.grid_state.memory.buffer(buffer).bytes[offset..offset + valid],
            );
            self.grid_state.counts.add(Measure::CopyBytesRead, valid as u64);
        }
        let offset = (copy.dst - SHARED_BASE) as usize;
        if self.grid_state.checked {
            let target = Target::Shared { block: operation.block, offset };
            self.check_access(observer, target, copy.bytes, true, u64::MAX)?;
        }
        self.grid_state.counts.add(Measure::CopyBytesDelivered, copy.bytes as u64);
        let shared = &mut self.cluster.blocks[operation.block].shared;
        shared[offset..offset + copy.bytes as usize].copy_from_slice(&bytes[..copy.bytes as usize]);
        Ok(())
    }

    /// Makes one arrival of an operation at an mbarrier, which releases the copies of these lanes.
    fn arrive_of_copy(&mut self, operation: &Operation, address: u32, lanes: u32) -> Executed<()> {
        let block = operation.block;
        let Some(barrier) = self.cluster.blocks[block].mbarriers.get_mut(&address) else {
            let name = self.shared_name(address);
            let text = format!("{name} is no memory barrier any more");
            return Err(self.operation_hazard(operation, HazardKind::MbarrierUninitialised, text));
        };
        if self.grid_state.checked {
            barrier.releases.current.join(&operation.start);
            let copied = Entry::of(lanes, operation.clock, 0);
            barrier.releases.current.known.raise(operation.component, copied);
        }
        if barrier.pending == 0 {
            let name = self.shared_name(address);
            let text = format!("an arrival at {name}, whose phase waits for none");
            return Err(self.operation_hazard(operation, HazardKind::MbarrierOverArrived, text));
        }
        barrier.pending -= 1;
        if let Some(place) = self.grid_state.code.places[operation.step] {
            barrier.arrivers.retain(|(w, _)| *w != operation.warp);
            barrier.arrivers.push((operation.warp, place));
        }
        self.settle_mbarrier(block, address, operation.ready_at)
    }

    // ---- loads --------------------------------------------------------------------

    fn perform_load(&mut self, operation: &Operation) -> Executed<()> {
        let OperationKind::Load { to, dst, source, bytes, barrier } = operation.kind else {
            unreachable!("called for loads");
        };
        if self.grid_state.checked {
            self.mark(operation.block, &operation.kind, -1);
        }
        if self.cluster.blocks[to].live_warps == 0 {
            let index = self.cluster.blocks[to].index;
            let text = format!("a copy arrives in block {index}, all of whose warps have ended");
            return Err(self.operation_hazard(operation, HazardKind::ExitedBlock, text));
        }
        let what = match source {
            LoadSource::Bytes(_) => "a bulk load",
            LoadSource::Tensor { .. } => "a tensor load",
        };
        let component = operation.component;
        let event = self.operation_event(operation, component, Proxy::Async, Source::Load, what);
        let swizzle = match source {
            LoadSource::Bytes(address) => {
                let observer = Observer::operation(&operation.start, event);
                let row = self.global_row(operation, observer, address, bytes as u64, false)?;
                let data = match row {
                    Some((buffer, offset)) => {
                        let memory = self.grid_state.memory.buffer(buffer);
                        memory.bytes[offset..offset + bytes as usize].to_vec()
                    }
                    None => Vec::new(),
                };
                self.grid_state.counts.add(Measure::CopyBytesRead, bytes as u64);
                self.deliver(operation, to, dst, &data, Swizzle::None, event)?;
                None
            }
            LoadSource::Tensor { map, corner } => {
                let observer = Observer::operation(&operation.start, event);
                let rows = self.rows(map, corner);
                let swizzle = rows.swizzle;
                for index in 0..rows.count {
                    let mut data = vec![0u8; rows.bytes];
                    if let Some(part) = rows.part(index) {
                        let length = part.end - part.start;
                        let length = length as u64;
                        let row =
                            self.global_row(operation, observer, part.address, length, false)?;
                        let length = length as usize;
                        if let Some((buffer, offset)) = row {
                            let memory = self.grid_state.memory.buffer(buffer);
                            data[part.start..part.end]
                                .copy_from_slice(&memory.bytes[offset..offset + length]);
                        }
                        self.grid_state.counts.add(Measure::CopyBytesRead, length as u64);
                    }
                    let linear = dst + (index * rows.bytes) as u32;
                    self.deliver(operation, to, linear, &data, swizzle, event)?;
                }
                Some(swizzle)
            }
        };
        if self.grid_state.checked
            && let Some(swizzle) = swizzle
        {
            for offset in (0..bytes as usize).step_by(2) {
                let at = (dst - SHARED_BASE) as usize + offset;
                self.cluster.blocks[to].cells.at(at).set_swizzle(swizzle);
            }
        }
        if self.grid_state.checked && to != operation.block {
            let access = RemoteAccess {
                clock: operation.clock,
                place: self.grid_state.code.places[operation.step],
                actor: self.operation_actor(operation),
            };
            self.cluster.blocks[to].remote_accesses.insert((operation.component, 0), access);
        }
        self.grid_state.counts.add(Measure::CopyBytesDelivered, bytes as u64);
        self.report_bytes(operation, to, barrier, bytes)
    }

    /// Locates and checks a contiguous range of global memory that an operation accesses.
    fn global_row(
        &mut self,
        operation: &Operation,
        observer: Observer<'_>,
        address: u64,
        bytes: u64,
        write: bool,
    ) -> Executed<Option<(usize, usize)>> {
        if bytes == 0 {
            return Ok(None);
        }
        let located = self.grid_state.memory.locate(address, bytes);
        let (buffer, offset) = located
            .map_err(|text| self.operation_hazard(operation, HazardKind::OutOfBounds, text))?;
        if self.grid_state.checked {
            let target = Target::Global { buffer, offset };
            self.check_access(observer, target, bytes as u32, write, u64::MAX)?;
        }
        Ok(Some((buffer, offset)))
    }

    /// Writes data that arrived into shared memory, one swizzled chunk at a time.
    fn deliver(
        &mut self,
        operation: &Operation,
        to: usize,
        dst: u32,
        data: &[u8],
        swizzle: Swizzle,
        event: u32,
    ) -> Executed<()> {
        for (index, chunk) in data.chunks(16).enumerate() {
            let address = swizzled(dst + 16 * index as u32, swizzle);
            let offset = self.swizzled_offset(operation, address)?;
            if self.grid_state.checked {
                let target = Target::Shared { block: to, offset };
                let observer = Observer::operation(&operation.start, event);
                self.check_access(observer, target, chunk.len() as u32, true, u64::MAX)?;
            }
            let shared = &mut self.cluster.blocks[to].shared;
            shared[offset..offset + chunk.len()].copy_from_slice(chunk);
        }
        Ok(())
    }

    /// Returns the offset of a chunk in shared memory. The swizzle may lead out of a box that does
    /// not fill its pattern.
    fn swizzled_offset(&self, operation: &Operation, address: u32) -> Executed<usize> {
        let (offset, length) = (address - SHARED_BASE, self.grid_state.program.shared_bytes());
        if offset + 16 > length {
            let text = format!("the swizzle leads to byte {offset} of {length} of shared memory");
            return Err(self.operation_hazard(operation, HazardKind::OutOfBounds, text));
        }
        Ok(offset as usize)
    }

    /// Reports the bytes of a load to its mbarrier.
    fn report_bytes(
        &mut self,
        operation: &Operation,
        to: usize,
        barrier: u32,
        bytes: u32,
    ) -> Executed<()> {
        let checked = self.grid_state.checked;
        let Some(state) = self.cluster.blocks[to].mbarriers.get_mut(&barrier) else {
            let name = self.shared_name(barrier);
            let text = format!("{name} is no memory barrier any more");
            return Err(self.operation_hazard(operation, HazardKind::MbarrierUninitialised, text));
        };
        state.in_flight -= 1;
        state.transactions -= bytes as i64;
        if checked {
            state.releases.current.known.raise(operation.component, stream_entry(operation.clock));
        }
        self.settle_mbarrier(to, barrier, operation.ready_at)
    }

    // ---- stores ---------------------------------------------------------------------

    fn read_source(&mut self, operation: &mut Operation) -> Executed<()> {
        let OperationKind::Store { src, bytes, target, .. } = operation.kind else {
            unreachable!("called for stores");
        };
        if self.grid_state.checked {
            self.mark(operation.block, &operation.kind, -1);
        }
        let (component, what) = (operation.component, "a bulk store");
        let event = self.operation_event(operation, component, Proxy::Async, Source::Store, what);
        let rows = match target {
            StoreTarget::Bytes { .. } => None,
            StoreTarget::Tensor { map, corner, .. } => Some(self.rows(map, corner)),
        };
        let swizzle = rows.as_ref().map_or(Swizzle::None, |rows| rows.swizzle);
        let mut data = vec![0u8; bytes as usize];
        for (index, chunk) in data.chunks_mut(16).enumerate() {
            let address = swizzled(src + 16 * index as u32, swizzle);
            let offset = self.swizzled_offset(operation, address)?;
            // Bytes outside of the tensor are not stored, so they need not be initialised.
            let used = match &rows {
                Some(rows) => rows.used(16 * index),
                None => 0..chunk.len(),
            };
            if self.grid_state.checked && !used.is_empty() {
                let target = Target::Shared { block: operation.block, offset: offset + used.start };
                let observer = Observer::store(&operation.start, event, operation.lane);
                self.check_access(observer, target, used.len() as u32, false, operation.issued)?;
            }
            let shared = &self.cluster.blocks[operation.block].shared;
            chunk.copy_from_slice(&shared[offset..offset + chunk.len()]);
        }
        if let OperationKind::Store { staged, .. } = &mut operation.kind {
            *staged = Some(data);
        }
        Ok(())
    }

    fn write_destination(&mut self, operation: &mut Operation) -> Executed<()> {
        let OperationKind::Store { target, staged, .. } = &mut operation.kind else {
            unreachable!("called for stores");
        };
        let (target, data) = (*target, staged.take().unwrap_or_default());
        let component = store_write_component(operation.warp);
        // Additions of the copy engine do not conflict with each other.
        let (adds, what) = match target {
            StoreTarget::Bytes { add, .. } => (add.is_some(), "a bulk store"),
            StoreTarget::Tensor { add, .. } => (add, "a tensor store"),
        };
        let source = if adds { Source::Atomic(Scope::Gpu) } else { Source::Store };
        let event = self.operation_event(operation, component, Proxy::Async, source, what);
        let start = operation.start.clone();
        let observer = Observer::store(&start, event, operation.lane);
        match target {
            StoreTarget::Bytes { dst, add } => {
                let row = self.global_row(operation, observer, dst, data.len() as u64, true)?;
                if let Some((buffer, offset)) = row {
                    let old =
                        &self.grid_state.memory.buffer(buffer).bytes[offset..offset + data.len()];
                    let new = match add {
                        Some(element) => add_elements(element, old, &data),
                        None => data.clone(),
                    };
                    self.grid_state.memory.write(buffer, offset, &new);
                    self.grid_state.counts.add(Measure::CopyBytesWritten, data.len() as u64);
                }
            }
            StoreTarget::Tensor { map, corner, add } => {
                let rows = self.rows(map, corner);
                let element = rows.element;
                for index in 0..rows.count {
                    let Some(part) = rows.part(index) else { continue };
                    let first = index * rows.bytes;
                    let data = &data[first + part.start..first + part.end];
                    let length = data.len() as u64;
                    let row = self.global_row(operation, observer, part.address, length, true)?;
                    let Some((buffer, offset)) = row else { continue };
                    let old =
                        &self.grid_state.memory.buffer(buffer).bytes[offset..offset + data.len()];
                    let new = if add {
                        add_elements(BulkElement::Float(element), old, data)
                    } else {
                        data.to_vec()
                    };
                    self.grid_state.memory.write(buffer, offset, &new);
                    self.grid_state.counts.add(Measure::CopyBytesWritten, data.len() as u64);
                }
            }
        }
        Ok(())
    }

    /// Returns the rows of the box with this corner.
    fn rows(&self, map: usize, corner: [i32; 5]) -> Rows {
        let map = self.grid_state.maps[map].as_ref().expect("checked at issue");
        let tensor_box = &map.tensor_box;
        let width = tensor_box.element.bytes() as usize;
        Rows {
            base: crate::Memory::address(map.buffer, map.offset),
            element: tensor_box.element,
            swizzle: tensor_box.swizzle,
            bytes: tensor_box.extent[0] as usize * width,
            count: tensor_box.extent[1..].iter().product::<u32>() as usize,
            extent: tensor_box.extent.clone(),
            dimensions: map.dimensions.clone(),
            strides: map.strides.clone(),
            corner,
        }
    }
}

/// The rows of a box: contiguous ranges along the first dimension.
struct Rows {
    base: u64,
    element: Element,
    swizzle: Swizzle,
    bytes: usize,
    count: usize,
    extent: Vec<u32>,
    dimensions: Vec<u64>,
    strides: Vec<u64>,
    corner: [i32; 5],
}

/// The part of a row that lies inside of the tensor.
struct Part {
    address: u64,
    start: usize,
    end: usize,
}

impl Rows {
    /// Returns the part of the 16 bytes from a byte of the box on that lies inside of the tensor.
    fn used(&self, byte: usize) -> std::ops::Range<usize> {
        let (row, within) = (byte / self.bytes, byte % self.bytes);
        match self.part(row) {
            Some(part) => {
                let start = part.start.max(within) - within;
                let end = part.end.min(within + 16).saturating_sub(within);
                start.min(end)..end
            }
            None => 0..0,
        }
    }

    fn part(&self, index: usize) -> Option<Part> {
        // Addresses wrap around, as the hardware's do.
        let mut address = self.base;
        let mut rest = index;
        for dimension in 1..self.extent.len() {
            let extent = self.extent[dimension] as usize;
            let at = self.corner[dimension] as i64 + (rest % extent) as i64;
            rest /= extent;
            if at < 0 || at as u64 >= self.dimensions[dimension] {
                return None;
            }
            address = address.wrapping_add((at as u64).wrapping_mul(self.strides[dimension - 1]));
        }
        let width = self.element.bytes() as i64;
        let first = self.corner[0] as i64;
        let last = first + self.extent[0] as i64;
        let (begin, end) = (first.max(0), last.min(self.dimensions[0] as i64));
        if begin >= end {
            return None;
        }
        Some(Part {
            address: address.wrapping_add((begin * width) as u64),
            start: ((begin - first) * width) as usize,
            end: ((end - first) * width) as usize,
        })
    }
}

/// Returns the sums of the elements.
fn add_elements(element: BulkElement, old: &[u8], add: &[u8]) -> Vec<u8> {
    let words = |f: fn(u32, u32) -> u32| {
        let pairs = old.chunks_exact(4).zip(add.chunks_exact(4));
        pairs
            .flat_map(|(a, b)| {
                let word = |x: &[u8]| u32::from_le_bytes([x[0], x[1], x[2], x[3]]);
                f(word(a), word(b)).to_le_bytes()
            })
            .collect()
    };
    match element {
        BulkElement::U32 => words(u32::wrapping_add),
        BulkElement::Float(Element::F32) => {
            words(|a, b| float::bits(f32::from_bits(a) + f32::from_bits(b)))
        }
        BulkElement::Float(Element::F16) => {
            words(|a, b| crate::step::add_packed(Type::F16x2, a, b))
        }
        BulkElement::Float(Element::BF16 | Element::E4M3 | Element::E5M2 | Element::Int8) => {
            words(|a, b| crate::step::add_packed(Type::BF16x2, a, b))
        }
    }
}
