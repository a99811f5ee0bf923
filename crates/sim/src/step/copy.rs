//! The issue of asynchronous copies. Their execution is in `crate::copy`.

use ptx::{Address, BulkElement, Operand, Register, Space};

use crate::clock::ClockSet;
use crate::count::wavefronts;
use crate::hazard::HazardKind;
use crate::machine::{
    Executed, Executor, LaneCopy, LoadSource, Operation, OperationKind, SHARED_BASE, StoreTarget,
    TENSOR_MAPS, copy_component, store_read_component,
};
use crate::warp::{Warp, lanes_of};

/// The cycles from the issue of a bulk copy to its first byte, in the cost model.
const COPY_LATENCY: u64 = 600;
/// The bytes that a multiprocessor receives per cycle, in the cost model.
const COPY_BYTES_PER_CYCLE: u64 = 24;

impl<'a> Executor<'_, 'a> {
    fn start_operation(
        &mut self,
        warp: &mut Warp<'a>,
        lane: u32,
        kind: OperationKind,
        start: ClockSet,
        (component, clock): (u32, u32),
    ) -> u64 {
        let id = self.cluster.next_operation;
        self.cluster.next_operation += 1;
        let bytes: u64 = match &kind {
            OperationKind::CopyAsync(lanes) => lanes.iter().map(|l| l.bytes as u64).sum(),
            OperationKind::ArriveOnCopies { .. } => 0,
            OperationKind::Load { bytes, .. } | OperationKind::Store { bytes, .. } => *bytes as u64,
        };
        if self.grid_state.checked {
            self.mark(warp.block, &kind, 1);
        }
        let free = &mut self.cluster.copy_free[warp.block];
        *free = (*free).max(warp.time) + bytes / COPY_BYTES_PER_CYCLE;
        let ready_at = *free + COPY_LATENCY;
        let operation = Operation {
            kind,
            step: warp.pc,
            issued: id,
            since: self.grid_state.shadow.count(),
            warp: warp.index,
            lane,
            block: warp.block,
            start,
            component,
            clock,
            issued_at: warp.time,
            ready_at,
        };
        self.cluster.operations.insert(id, operation);
        id
    }

    /// Adds `change` to the number of operations in flight that will write or read each word of
    /// shared memory that the operation touches.
    pub(crate) fn mark(&mut self, block: usize, kind: &OperationKind, change: i32) {
        let mut span = |block: usize, address: u32, bytes: u32, writes: bool| {
            let there = &mut self.cluster.blocks[block];
            let words = if writes { &mut there.pending_writes } else { &mut there.pending_reads };
            let first = (address - SHARED_BASE) as usize / 4;
            for word in &mut words[first..first + bytes as usize / 4] {
                *word = (*word as i32 + change) as u16;
            }
        };
        match kind {
            OperationKind::CopyAsync(lanes) => {
                for copy in lanes {
                    span(block, copy.dst, copy.bytes, true);
                }
            }
            OperationKind::ArriveOnCopies { .. } => {}
            OperationKind::Load { to, dst, bytes, .. } => span(*to, *dst, *bytes, true),
            OperationKind::Store { src, bytes, .. } => span(block, *src, *bytes, false),
        }
    }

    fn issue_knowledge(&mut self, warp: &mut Warp<'a>, lanes: u32) -> ClockSet {
        if self.grid_state.checked { warp.clock.release(lanes) } else { ClockSet::default() }
    }

    // ---- cp.async -----------------------------------------------------------------

    pub(super) fn issue_copy(
        &mut self,
        warp: &mut Warp<'a>,
        dst: Address,
        src: Address,
        bytes: u32,
        source_bytes: Option<Operand>,
    ) -> Executed<()> {
        let (to, from) = (warp.shared_addresses(dst), warp.global_addresses(src));
        let valid = source_bytes.map(|s| warp.word(s)).unwrap_or([bytes; 32]);
        let mut lanes = Vec::new();
        for lane in lanes_of(warp.active) {
            let at = lane as usize;
            self.shared_range(warp, lane, Space::Shared, to[at], bytes, bytes)?;
            let source_bytes = valid[at].min(bytes);
            if source_bytes > 0 {
                self.global_range(warp, lane, from[at], source_bytes as u64, bytes as u64)?;
            }
            let (dst, src, waited) = (to[at], from[at], warp.clock.copies_of(lane));
            lanes.push(LaneCopy { lane, waited, dst, src, bytes, source_bytes });
        }
        let (passes, ideal) = wavefronts(&to, warp.active, bytes);
        self.grid_state.counts.banks(warp.pc, warp.code.places[warp.pc], passes, ideal);
        let start = match self.grid_state.checked {
            true => warp.clock.issue(warp.active),
            false => ClockSet::default(),
        };
        let id = self.cluster.next_operation;
        let clock = warp.copies.issue(id, warp.active);
        let stream = (copy_component(warp.index), clock);
        let first = warp.active.trailing_zeros();
        self.start_operation(warp, first, OperationKind::CopyAsync(lanes), start, stream);
        Ok(())
    }

    pub(super) fn arrive_on_copies(
        &mut self,
        warp: &mut Warp<'a>,
        address: Address,
    ) -> Executed<()> {
        let addresses = warp.shared_addresses(address);
        let (mut lanes, mut after) = (Vec::new(), Vec::new());
        for lane in lanes_of(warp.active) {
            let address = addresses[lane as usize];
            self.usable_mbarrier(warp, lane, Space::Shared, address, false)?;
            lanes.push((lane, address));
            after.extend(warp.copies.of_lane(lane));
        }
        after.sort_unstable();
        after.dedup();
        let start = self.issue_knowledge(warp, warp.active);
        let stream = (copy_component(warp.index), warp.copies.clock);
        let first = warp.active.trailing_zeros();
        self.start_operation(
            warp,
            first,
            OperationKind::ArriveOnCopies { lanes, after },
            start,
            stream,
        );
        Ok(())
    }

    // ---- bulk loads -----------------------------------------------------------------

    pub(super) fn issue_bulk_load(
        &mut self,
        warp: &mut Warp<'a>,
        dst: Address,
        src: Address,
        bytes: Operand,
        barrier: Address,
        multicast: Option<Register>,
    ) -> Executed<()> {
        let (to, from) = (warp.shared_addresses(dst), warp.global_addresses(src));
        let bytes = warp.word(bytes);
        for lane in lanes_of(warp.active) {
            let at = lane as usize;
            self.bulk_size(warp, lane, bytes[at])?;
            self.global_range(warp, lane, from[at], bytes[at] as u64, 16)?;
            let source = LoadSource::Bytes(from[at]);
            self.issue_load(warp, lane, to[at], 16, source, bytes[at], barrier, multicast)?;
        }
        Ok(())
    }

    pub(super) fn issue_tensor_load(
        &mut self,
        warp: &mut Warp<'a>,
        dst: Address,
        map: Register,
        coordinates: &[Operand],
        barrier: Address,
        multicast: Option<Register>,
    ) -> Executed<()> {
        let to = warp.shared_addresses(dst);
        let maps = *warp.wide_of(map);
        for lane in lanes_of(warp.active) {
            let at = lane as usize;
            self.check_after_grids(warp, lane)?;
            let map = self.tensor_map(warp, lane, maps[at], Some(coordinates.len()))?;
            let bytes = self.box_bytes(map);
            let corner = corner(warp, coordinates, at);
            let source = LoadSource::Tensor { map, corner };
            self.issue_load(warp, lane, to[at], 128, source, bytes, barrier, multicast)?;
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)] // the fields of the instruction
    fn issue_load(
        &mut self,
        warp: &mut Warp<'a>,
        lane: u32,
        dst: u32,
        alignment: u32,
        source: LoadSource,
        bytes: u32,
        barrier: Address,
        multicast: Option<Register>,
    ) -> Executed<()> {
        let at = lane as usize;
        let barrier = warp.shared_addresses(barrier)[at];
        self.shared_range(warp, lane, Space::Shared, dst, bytes, alignment)?;
        let blocks = self.cluster.blocks.len() as u32;
        let targets = match multicast {
            Some(mask) => warp.word_of(mask)[at] & 0xFFFF,
            None => 1 << warp.block,
        };
        if targets == 0 || targets >> blocks != 0 {
            let text = format!("a multicast to blocks {targets:#06b} of a cluster of {blocks}");
            return Err(self.hazard(warp, Some(lane), HazardKind::ClusterRank, text));
        }
        for to in lanes_of(targets) {
            let to = to as usize;
            if to == warp.block {
                self.usable_mbarrier(warp, lane, Space::Shared, barrier, true)?;
            } else {
                let remote = barrier + crate::machine::CLUSTER_WINDOW * (to as u32 + 1);
                self.usable_mbarrier(warp, lane, Space::Cluster, remote, true)?;
            }
            let start = self.issue_knowledge(warp, 1 << lane);
            let slot =
                if self.grid_state.checked { self.cluster.take_slot(&start) } else { (0, 0) };
            let there = self.cluster.blocks[to].mbarriers.get_mut(&barrier);
            there.expect("found above").in_flight += 1;
            let kind = OperationKind::Load { to, dst, source, bytes, barrier };
            self.start_operation(warp, lane, kind, start, slot);
        }
        Ok(())
    }

    // ---- bulk stores -------------------------------------------------------------------

    pub(super) fn issue_bulk_store(
        &mut self,
        warp: &mut Warp<'a>,
        dst: Address,
        src: Address,
        bytes: Operand,
        add: Option<BulkElement>,
    ) -> Executed<()> {
        let (to, from) = (warp.global_addresses(dst), warp.shared_addresses(src));
        let bytes = warp.word(bytes);
        for lane in lanes_of(warp.active) {
            let at = lane as usize;
            self.bulk_size(warp, lane, bytes[at])?;
            self.global_range(warp, lane, to[at], bytes[at] as u64, 16)?;
            let target = StoreTarget::Bytes { dst: to[at], add };
            self.issue_store(warp, lane, from[at], 16, bytes[at], target)?;
        }
        Ok(())
    }

    pub(super) fn issue_tensor_store(
        &mut self,
        warp: &mut Warp<'a>,
        map: Register,
        coordinates: &[Operand],
        src: Address,
        add: bool,
    ) -> Executed<()> {
        let from = warp.shared_addresses(src);
        let maps = *warp.wide_of(map);
        for lane in lanes_of(warp.active) {
            let at = lane as usize;
            self.check_after_grids(warp, lane)?;
            let map = self.tensor_map(warp, lane, maps[at], Some(coordinates.len()))?;
            let bytes = self.box_bytes(map);
            let target = StoreTarget::Tensor { map, corner: corner(warp, coordinates, at), add };
            self.issue_store(warp, lane, from[at], 128, bytes, target)?;
        }
        Ok(())
    }

    fn issue_store(
        &mut self,
        warp: &mut Warp<'a>,
        lane: u32,
        src: u32,
        alignment: u32,
        bytes: u32,
        target: StoreTarget,
    ) -> Executed<()> {
        self.shared_range(warp, lane, Space::Shared, src, bytes, alignment)?;
        let start = self.issue_knowledge(warp, 1 << lane);
        let id = self.cluster.next_operation;
        let clock = warp.stores.issue(id, 1 << lane);
        let kind = OperationKind::Store { src, bytes, target, staged: None };
        let stream = (store_read_component(warp.index), clock);
        self.start_operation(warp, lane, kind, start, stream);
        Ok(())
    }

    // ---- operands of copies ---------------------------------------------------------------

    fn bulk_size(&self, warp: &Warp<'a>, lane: u32, bytes: u32) -> Executed<()> {
        if bytes.is_multiple_of(16) && bytes > 0 {
            return Ok(());
        }
        let text = format!("a bulk copy of {bytes} bytes: not a multiple of 16");
        Err(self.hazard(warp, Some(lane), HazardKind::BadCopySize, text))
    }

    /// Returns the index of the tensor map at an address, after checking its number of dimensions.
    pub(super) fn tensor_map(
        &self,
        warp: &Warp<'a>,
        lane: u32,
        address: u64,
        dimensions: Option<usize>,
    ) -> Executed<usize> {
        let index = address.wrapping_sub(TENSOR_MAPS) / 128;
        let map = self.grid_state.maps.get(index as usize).and_then(|map| map.as_ref());
        let Some(map) = map.filter(|_| address.is_multiple_of(128)) else {
            let text = format!("{address:#x} is not the address of a tensor map");
            return Err(self.hazard(warp, Some(lane), HazardKind::TensorMapMismatch, text));
        };
        let rank = map.dimensions.len();
        if dimensions.is_some_and(|given| given != rank) {
            let given = dimensions.unwrap_or_default();
            let text = format!("{given} coordinates for a tensor of {rank} dimensions");
            return Err(self.hazard(warp, Some(lane), HazardKind::TensorMapMismatch, text));
        }
        Ok(index as usize)
    }

    fn box_bytes(&self, map: usize) -> u32 {
        let tensor_box = &self.grid_state.maps[map].as_ref().expect("looked up before").tensor_box;
        tensor_box.extent.iter().product::<u32>() * tensor_box.element.bytes()
    }
}

fn corner(warp: &Warp<'_>, coordinates: &[Operand], lane: usize) -> [i32; 5] {
    let mut corner = [0; 5];
    for (slot, coordinate) in corner.iter_mut().zip(coordinates) {
        *slot = warp.word(*coordinate)[lane] as i32;
    }
    corner
}
