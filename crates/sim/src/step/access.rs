//! Loads, stores, atomics and matrices, and what the checked mode asks of them.

use ptx::{
    Address, AtomicOperation, AtomicOrder, Fence, LoadCache, LoadOrder, Operand, Register, Scope,
    Space, StoreOrder, Type,
};

use crate::Measure;
use crate::clock::{Fenced, Knowledge};
use crate::count::wavefronts;
use crate::float;
use crate::hazard::{Hazard, HazardKind};
use crate::machine::{CLUSTER_WINDOW, Executor, OperationKind, Release, SHARED_BASE, Step, Visit};
use crate::shadow::{CELL, Conflict, NO_LANE, Observer, Source};
use crate::warp::{Warp, lanes_of};

/// A place in memory that a lane accesses.
#[derive(Clone, Copy)]
pub(crate) enum Target {
    Shared { block: usize, offset: usize },
    Global { buffer: usize, offset: usize },
}

/// How an atomic changes what is there.
#[derive(Clone, Copy)]
pub(super) enum Change {
    Operation(AtomicOperation, Operand),
    Swap(Operand, Operand),
}

impl<'a> Executor<'_, 'a> {
    // ---- ranges -----------------------------------------------------------------

    /// The block and offset of a range of shared memory.
    pub(crate) fn shared_range(
        &self,
        warp: &Warp<'_>,
        lane: u32,
        space: Space,
        address: u32,
        bytes: u32,
        alignment: u32,
    ) -> Step<(usize, usize)> {
        let (block, local) = match space {
            Space::Cluster if address >= CLUSTER_WINDOW => {
                ((address / CLUSTER_WINDOW - 1) as usize, address % CLUSTER_WINDOW)
            }
            Space::Shared | Space::Cluster | Space::Global => (warp.block, address),
        };
        if !address.is_multiple_of(alignment) {
            let text = format!("shared address {address:#x} is not a multiple of {alignment}");
            return Err(self.hazard(warp, Some(lane), HazardKind::Misaligned, text));
        }
        let length = self.world.program.shared_bytes();
        let offset = local.wrapping_sub(SHARED_BASE);
        if offset > length || bytes > length - offset {
            let text = format!(
                "{bytes} bytes at shared address {local:#x}, byte {} of {length}",
                offset as i32
            );
            return Err(self.hazard(warp, Some(lane), HazardKind::OutOfBounds, text));
        }
        let Some(there) = self.cluster.blocks.get(block) else {
            let text = format!("shared address {address:#x} is of block {block} of the cluster");
            return Err(self.hazard(warp, Some(lane), HazardKind::ClusterRank, text));
        };
        if block != warp.block && there.live_warps == 0 {
            let text = format!(
                "the shared memory of block {} is accessed, all of whose warps have ended",
                there.index
            );
            return Err(self.hazard(warp, Some(lane), HazardKind::ExitedBlock, text));
        }
        Ok((block, offset as usize))
    }

    /// The buffer and offset of a range of global memory.
    pub(crate) fn global_range(
        &self,
        warp: &Warp<'_>,
        lane: u32,
        address: u64,
        bytes: u64,
        alignment: u64,
    ) -> Step<(usize, usize)> {
        if !address.is_multiple_of(alignment) {
            let text = format!("global address {address:#x} is not a multiple of {alignment}");
            return Err(self.hazard(warp, Some(lane), HazardKind::Misaligned, text));
        }
        self.world
            .memory
            .locate(address, bytes)
            .map_err(|text| self.hazard(warp, Some(lane), HazardKind::OutOfBounds, text))
    }

    fn target(
        &self,
        warp: &Warp<'_>,
        lane: u32,
        space: Space,
        address: u64,
        bytes: u32,
    ) -> Step<Target> {
        Ok(match space {
            Space::Global => {
                let (buffer, offset) =
                    self.global_range(warp, lane, address, bytes as u64, bytes as u64)?;
                Target::Global { buffer, offset }
            }
            Space::Shared | Space::Cluster => {
                let (block, offset) =
                    self.shared_range(warp, lane, space, address as u32, bytes, bytes)?;
                Target::Shared { block, offset }
            }
        })
    }

    fn addresses(&self, warp: &Warp<'_>, space: Space, address: Address) -> [u64; 32] {
        match space {
            Space::Global => warp.global_addresses(address),
            Space::Shared | Space::Cluster => warp.shared_addresses(address).map(|a| a as u64),
        }
    }

    fn bytes_at(&self, target: Target, bytes: usize) -> [u8; 16] {
        let mut result = [0; 16];
        let source = match target {
            Target::Shared { block, offset } => {
                &self.cluster.blocks[block].shared[offset..offset + bytes]
            }
            Target::Global { buffer, offset } => {
                &self.world.memory.buffer(buffer).bytes[offset..offset + bytes]
            }
        };
        result[..bytes].copy_from_slice(source);
        result
    }

    fn put(&mut self, target: Target, bytes: &[u8]) {
        match target {
            Target::Shared { block, offset } => {
                self.cluster.blocks[block].shared[offset..offset + bytes.len()]
                    .copy_from_slice(bytes);
            }
            Target::Global { buffer, offset } => self.world.memory.write(buffer, offset, bytes),
        }
    }

    pub(crate) fn target_name(&self, target: Target) -> String {
        match target {
            Target::Shared { offset, .. } => self.shared_name(offset as u32 + SHARED_BASE),
            Target::Global { buffer, offset } => {
                format!("byte {offset} of buffer {:?}", self.world.memory.buffer(buffer).name)
            }
        }
    }

    // ---- loads and stores ---------------------------------------------------------

    pub(super) fn load_byte(
        &mut self,
        warp: &mut Warp<'a>,
        dst: Register,
        address: Address,
    ) -> Step<()> {
        let addresses = self.addresses(warp, Space::Global, address);
        self.count_access(warp, Space::Global, &addresses, 1, false);
        let checked = self.world.checked;
        let event = if checked { self.thread_event(warp, Source::Thread, "ld.global") } else { 0 };
        let mut values = [0; 32];
        for lane in lanes_of(warp.active) {
            let target = self.target(warp, lane, Space::Global, addresses[lane as usize], 1)?;
            if checked {
                self.check_thread(warp, lane, target, 1, event, false)?;
            }
            values[lane as usize] = self.bytes_at(target, 1)[0].into();
        }
        warp.set_word(dst, &values);
        Ok(())
    }

    pub(super) fn load(
        &mut self,
        warp: &mut Warp<'a>,
        dst: &[Register],
        space: Space,
        address: Address,
        order: LoadOrder,
        cache: LoadCache,
    ) -> Step<()> {
        let width = warp.code.slots[dst[0].0 as usize].0.bits() / 8;
        let bytes = width * dst.len() as u32;
        let addresses = self.addresses(warp, space, address);
        self.count_access(warp, space, &addresses, bytes, false);
        let what = if space == Space::Global { "ld.global" } else { "ld.shared" };
        let source = match order {
            LoadOrder::Weak => Source::Thread,
            LoadOrder::Relaxed(scope) | LoadOrder::Acquire(scope) => Source::Atomic(scope),
        };
        let event = if self.world.checked { self.thread_event(warp, source, what) } else { 0 };
        let read_only = matches!(cache, LoadCache::ReadOnly | LoadCache::ReadOnlyOnce);
        let mut values = [[0u8; 16]; 32];
        for lane in lanes_of(warp.active) {
            let target = self.target(warp, lane, space, addresses[lane as usize], bytes)?;
            if self.world.checked {
                if read_only {
                    self.check_read_only(warp, lane, target)?;
                }
                self.check_thread(warp, lane, target, bytes, event, false)?;
            }
            values[lane as usize] = self.bytes_at(target, bytes as usize);
        }
        for (index, register) in dst.iter().enumerate() {
            let at = index * width as usize;
            match width {
                8 => {
                    let value: [u64; 32] = std::array::from_fn(|lane| {
                        u64::from_le_bytes(values[lane][at..at + 8].try_into().expect("8 bytes"))
                    });
                    warp.set_wide(*register, &value);
                }
                4 => {
                    let value: [u32; 32] = std::array::from_fn(|lane| {
                        u32::from_le_bytes(values[lane][at..at + 4].try_into().expect("4 bytes"))
                    });
                    warp.set_word(*register, &value);
                }
                _ => {
                    let value: [u32; 32] = std::array::from_fn(|lane| {
                        u16::from_le_bytes([values[lane][at], values[lane][at + 1]]) as u32
                    });
                    warp.set_word(*register, &value);
                }
            }
        }
        if self.world.checked {
            let (scope, acquires) = match order {
                LoadOrder::Weak => return Ok(()),
                LoadOrder::Relaxed(scope) => (scope, false),
                LoadOrder::Acquire(scope) => (scope, true),
            };
            for lane in lanes_of(warp.active) {
                self.acquire_at(warp, lane, space, addresses[lane as usize], scope, acquires);
            }
        }
        Ok(())
    }

    pub(super) fn store(
        &mut self,
        warp: &mut Warp<'a>,
        src: &[Register],
        space: Space,
        address: Address,
        order: StoreOrder,
    ) -> Step<()> {
        let width = warp.code.slots[src[0].0 as usize].0.bits() / 8;
        let bytes = width * src.len() as u32;
        let addresses = self.addresses(warp, space, address);
        self.count_access(warp, space, &addresses, bytes, true);
        if self.world.checked {
            let (scope, releases) = match order {
                StoreOrder::Weak => (Scope::Block, None),
                StoreOrder::Relaxed(scope) => (scope, Some(false)),
                StoreOrder::Release(scope) => (scope, Some(true)),
            };
            if let Some(releases) = releases {
                self.release_at(warp, space, &addresses, scope, releases);
            }
        }
        let what = if space == Space::Global { "st.global" } else { "st.shared" };
        let source = match order {
            StoreOrder::Weak => Source::Thread,
            StoreOrder::Relaxed(scope) | StoreOrder::Release(scope) => Source::Atomic(scope),
        };
        let event = if self.world.checked { self.thread_event(warp, source, what) } else { 0 };
        for lane in lanes_of(warp.active) {
            let at = lane as usize;
            let mut value = [0u8; 16];
            for (index, register) in src.iter().enumerate() {
                let start = index * width as usize;
                match width {
                    8 => value[start..start + 8]
                        .copy_from_slice(&warp.wide_of(*register)[at].to_le_bytes()),
                    4 => value[start..start + 4]
                        .copy_from_slice(&warp.word_of(*register)[at].to_le_bytes()),
                    _ => value[start..start + 2]
                        .copy_from_slice(&(warp.word_of(*register)[at] as u16).to_le_bytes()),
                }
            }
            let value = &value[..bytes as usize];
            let target = self.target(warp, lane, space, addresses[at], bytes)?;
            if self.world.checked {
                self.check_collision(warp, lane, target, value, event)?;
                self.check_thread(warp, lane, target, bytes, event, true)?;
            }
            self.put(target, value);
        }
        Ok(())
    }

    fn count_access(
        &mut self,
        warp: &mut Warp<'_>,
        space: Space,
        addresses: &[u64; 32],
        bytes: u32,
        write: bool,
    ) {
        let total = bytes as u64 * warp.active.count_ones() as u64;
        let counts = &mut self.world.counts;
        match space {
            Space::Global => {
                let measure =
                    if write { Measure::GlobalBytesWritten } else { Measure::GlobalBytesRead };
                counts.add(measure, total);
                let mut sectors: Vec<u64> =
                    lanes_of(warp.active).map(|lane| addresses[lane as usize] / 32).collect();
                sectors.sort_unstable();
                sectors.dedup();
                counts.add(Measure::GlobalSectors, sectors.len() as u64);
            }
            Space::Shared | Space::Cluster => {
                let measure =
                    if write { Measure::SharedBytesWritten } else { Measure::SharedBytesRead };
                counts.add(measure, total);
                let words = addresses.map(|a| a as u32);
                let (passes, ideal) = wavefronts(&words, warp.active, bytes);
                counts.banks(warp.pc, warp.code.places[warp.pc], passes, ideal);
                warp.time += passes;
            }
        }
    }

    // ---- atomics --------------------------------------------------------------------

    #[allow(clippy::too_many_arguments)] // the fields of the instruction
    pub(super) fn atomic(
        &mut self,
        warp: &mut Warp<'a>,
        dst: Option<Register>,
        ty: Type,
        space: Space,
        address: Address,
        change: Change,
        scope: Scope,
        order: AtomicOrder,
    ) -> Step<()> {
        let bytes = ty.bits() / 8;
        let addresses = self.addresses(warp, space, address);
        self.world.counts.add(Measure::Atomics, warp.active.count_ones() as u64);
        let (acquires, releases) = match order {
            AtomicOrder::Relaxed => (false, false),
            AtomicOrder::Acquire => (true, false),
            AtomicOrder::Release => (false, true),
            AtomicOrder::AcquireRelease => (true, true),
        };
        if self.world.checked {
            for lane in lanes_of(warp.active) {
                self.acquire_at(warp, lane, space, addresses[lane as usize], scope, acquires);
            }
            self.release_at(warp, space, &addresses, scope, releases);
        }
        let source = match self.adds_in_order(warp, ty, space, &addresses) {
            true => Source::Thread,
            false => Source::Atomic(scope),
        };
        let event = if self.world.checked { self.thread_event(warp, source, "atom") } else { 0 };
        let operand = |warp: &Warp<'_>, operand: Operand, lane: usize| match bytes {
            8 => warp.wide(operand)[lane],
            _ => warp.word(operand)[lane] as u64,
        };
        let mut old_values = [0u64; 32];
        for lane in lanes_of(warp.active) {
            let at = lane as usize;
            let target = self.target(warp, lane, space, addresses[at], bytes)?;
            if self.world.checked {
                self.check_thread(warp, lane, target, bytes, event, false)?;
                self.check_thread(warp, lane, target, bytes, event, true)?;
            }
            let mut raw = [0u8; 8];
            raw[..bytes as usize]
                .copy_from_slice(&self.bytes_at(target, bytes as usize)[..bytes as usize]);
            let old = u64::from_le_bytes(raw);
            old_values[at] = old;
            let new = match change {
                Change::Operation(operation, value) => {
                    combine(operation, ty, old, operand(warp, value, at))
                }
                Change::Swap(expected, value) => {
                    if old == operand(warp, expected, at) {
                        operand(warp, value, at)
                    } else {
                        old
                    }
                }
            };
            self.put(target, &new.to_le_bytes()[..bytes as usize]);
        }
        if let Some(dst) = dst {
            match bytes {
                8 => warp.set_wide(dst, &old_values),
                _ => warp.set_word(dst, &old_values.map(|v| v as u32)),
            }
        }
        Ok(())
    }

    // ---- matrices ---------------------------------------------------------------------

    pub(super) fn load_matrix(
        &mut self,
        warp: &mut Warp<'a>,
        dst: &[Register],
        address: Address,
        transpose: bool,
    ) -> Step<()> {
        self.aligned(warp, "ldmatrix")?;
        let rows = self.matrix_rows(warp, address, dst.len(), "ldmatrix", false)?;
        for (matrix, register) in dst.iter().enumerate() {
            let element = |row: usize, column: usize| {
                let (block, offset) = rows[8 * matrix + row];
                let at = offset + 2 * column;
                let shared = &self.cluster.blocks[block].shared;
                u16::from_le_bytes([shared[at], shared[at + 1]]) as u32
            };
            let value: [u32; 32] = std::array::from_fn(|lane| {
                let (outer, inner) = (lane / 4, 2 * (lane % 4));
                if transpose {
                    element(inner, outer) | element(inner + 1, outer) << 16
                } else {
                    element(outer, inner) | element(outer, inner + 1) << 16
                }
            });
            warp.set_word(*register, &value);
        }
        Ok(())
    }

    pub(super) fn store_matrix(
        &mut self,
        warp: &mut Warp<'a>,
        src: &[Register],
        address: Address,
        transpose: bool,
    ) -> Step<()> {
        self.aligned(warp, "stmatrix")?;
        let rows = self.matrix_rows(warp, address, src.len(), "stmatrix", true)?;
        for (matrix, register) in src.iter().enumerate() {
            let value = *warp.word_of(*register);
            for (lane, pair) in value.into_iter().enumerate() {
                let (outer, inner) = (lane / 4, 2 * (lane % 4));
                for half in 0..2 {
                    let (row, column) =
                        if transpose { (inner + half, outer) } else { (outer, inner + half) };
                    let (block, offset) = rows[8 * matrix + row];
                    let at = offset + 2 * column;
                    let bytes = ((pair >> (16 * half)) as u16).to_le_bytes();
                    self.cluster.blocks[block].shared[at..at + 2].copy_from_slice(&bytes);
                }
            }
        }
        Ok(())
    }

    /// The rows that `ldmatrix` and `stmatrix` access, counted and checked.
    fn matrix_rows(
        &mut self,
        warp: &mut Warp<'a>,
        address: Address,
        matrices: usize,
        what: &'static str,
        write: bool,
    ) -> Step<Vec<(usize, usize)>> {
        let addresses = warp.shared_addresses(address);
        let lanes = 8 * matrices as u32;
        let used = if lanes == 32 { u32::MAX } else { (1 << lanes) - 1 };
        let measure = if write { Measure::SharedBytesWritten } else { Measure::SharedBytesRead };
        self.world.counts.add(measure, 128 * matrices as u64);
        let (passes, ideal) = wavefronts(&addresses, used, 16);
        self.world.counts.banks(warp.pc, warp.code.places[warp.pc], passes, ideal);
        warp.time += passes;
        let event =
            if self.world.checked { self.thread_event(warp, Source::Thread, what) } else { 0 };
        let mut rows = Vec::with_capacity(lanes as usize);
        for lane in 0..lanes {
            let address = addresses[lane as usize];
            let (block, offset) = self.shared_range(warp, lane, Space::Shared, address, 16, 16)?;
            if self.world.checked {
                // The warp does this as one: no lane's access stands alone.
                let target = Target::Shared { block, offset };
                let observer = Observer::operation(warp.clock.view(u32::MAX), event);
                self.check_access(observer, target, 16, write, u64::MAX)?;
            }
            rows.push((block, offset));
        }
        Ok(rows)
    }

    // ---- order ------------------------------------------------------------------------

    fn key(&self, warp: &Warp<'_>, space: Space, address: u64) -> u64 {
        match space {
            Space::Global => address,
            Space::Shared => {
                1 << 63 | (self.cluster.blocks[warp.block].index as u64) << 32 | address
            }
            Space::Cluster if address as u32 >= CLUSTER_WINDOW => {
                let rank = address as u32 / CLUSTER_WINDOW - 1;
                let first = self.cluster.blocks[0].index;
                let local = address % CLUSTER_WINDOW as u64;
                1 << 63 | ((first + rank) as u64) << 32 | local
            }
            Space::Cluster => self.key(warp, Space::Shared, address),
        }
    }

    /// A lane sees what was released at an address: now, or at its next fence.
    fn acquire_at(
        &mut self,
        warp: &mut Warp<'a>,
        lane: u32,
        space: Space,
        address: u64,
        scope: Scope,
        acquires: bool,
    ) {
        let key = self.key(warp, space, address);
        let Some(releases) = self.world.releases.get(&key) else { return };
        if acquires {
            self.learn(warp, 1 << lane, releases, scope);
        } else {
            // A fence takes up what this load, with its scope, could see.
            let here = self.cluster.blocks[warp.block].index;
            let seen = releases.iter().filter(|it| it.reaches(self.cluster.index, here, scope));
            warp.unfenced.push((1 << lane, seen.cloned().collect()));
        }
    }

    /// Lanes learn what was released, of what reaches them and they reach.
    fn learn(&self, warp: &mut Warp<'a>, lanes: u32, releases: &[Release], scope: Scope) {
        let (cluster, block) = (self.cluster.index, self.cluster.blocks[warp.block].index);
        let mut learned = Knowledge::default();
        for release in releases.iter().filter(|it| it.reaches(cluster, block, scope)) {
            if release.cluster == cluster {
                learned.join(&release.knowledge);
            } else {
                learned.join_foreign(cluster, release.cluster, &release.knowledge);
            }
        }
        warp.clock.acquire(lanes, |k| k.join(&learned));
    }

    /// The active lanes release at their addresses: all they know, or what
    /// they knew at their last fence.
    fn release_at(
        &mut self,
        warp: &mut Warp<'a>,
        space: Space,
        addresses: &[u64; 32],
        scope: Scope,
        releases: bool,
    ) {
        // A fence hands on no further than its own scope.
        let (knowledge, scope) = if releases {
            (warp.clock.release(warp.active), scope)
        } else if let Some((fenced, reach)) = &warp.fenced {
            (fenced.clone(), narrower(*reach, scope))
        } else {
            return;
        };
        let (cluster, block) = (self.cluster.index, self.cluster.blocks[warp.block].index);
        let mut keys: Vec<u64> = lanes_of(warp.active)
            .map(|lane| self.key(warp, space, addresses[lane as usize]))
            .collect();
        keys.sort_unstable();
        keys.dedup();
        for key in keys {
            let list = self.world.releases.entry(key).or_default();
            let same = list
                .iter_mut()
                .find(|r| r.cluster == cluster && r.block == block && r.scope == scope);
            match same {
                Some(release) => release.knowledge.join(&knowledge),
                None => {
                    let knowledge = knowledge.clone();
                    list.push(Release { cluster, block, scope, knowledge });
                }
            }
        }
    }

    pub(super) fn fence(&mut self, warp: &mut Warp<'a>, fence: Fence) {
        if matches!(fence, Fence::MbarrierInit | Fence::ProxyAsyncShared | Fence::ProxyAsync) {
            // The barriers these lanes initialised may now be used by all.
            let component = warp.clock.component;
            let active = warp.active;
            let own = |lane: u32| active >> lane & 1 == 1;
            for barrier in self.cluster.blocks[warp.block].mbarriers.values_mut() {
                barrier.published |= barrier.component == component && own(barrier.lane);
            }
        }
        if !self.world.checked {
            return;
        }
        match fence {
            Fence::AcquireRelease(scope) | Fence::SequentiallyConsistent(scope) => {
                for (lanes, seen) in std::mem::take(&mut warp.unfenced) {
                    self.learn(warp, lanes, &seen, scope);
                }
                warp.fenced = Some((warp.clock.release(warp.active), scope));
            }
            Fence::MbarrierInit => {}
            Fence::ProxyAsyncShared => warp.clock.flush(warp.active, Fenced::Shared),
            Fence::ProxyAsyncGlobal => warp.clock.flush(warp.active, Fenced::Global),
            Fence::ProxyAsync => warp.clock.flush(warp.active, Fenced::Both),
        }
    }

    // ---- checks -----------------------------------------------------------------------

    /// One lane's access through the generic proxy.
    pub(super) fn check_thread(
        &mut self,
        warp: &Warp<'a>,
        lane: u32,
        target: Target,
        bytes: u32,
        event: u32,
        write: bool,
    ) -> Step<()> {
        if let Target::Shared { block, .. } = target {
            self.note_visit(warp, lane, block, warp.clock.now);
        }
        let observer = Observer {
            lane: lane as u8,
            copies: warp.clock.copies_of(lane),
            ..Observer::operation(warp.clock.view(1 << lane), event)
        };
        self.check_access(observer, target, bytes, write, u64::MAX)
    }

    /// Notes an access to another block's shared memory.
    pub(super) fn note_visit(&mut self, warp: &Warp<'a>, lane: u32, block: usize, clock: u32) {
        if block == warp.block || !self.world.checked {
            return;
        }
        let place = self.world.code.places[warp.pc];
        let visit = Visit { clock, lanes: 1 << lane, place, actor: self.actor(warp, Some(lane)) };
        self.cluster.blocks[block].visitors.insert(warp.clock.component, visit);
    }

    /// An access by anyone: of memory in flight, uninitialised, or unordered.
    /// `issued` is the number of operations that were issued before it was.
    pub(crate) fn check_access(
        &mut self,
        observer: Observer<'_>,
        target: Target,
        bytes: u32,
        write: bool,
        issued: u64,
    ) -> Step<()> {
        let Observer { event, lane, .. } = observer;
        let world = &mut *self.world;
        let (cells, offset) = match target {
            Target::Shared { block, offset } => {
                let there = &self.cluster.blocks[block];
                let words = offset / 4..(offset + bytes as usize).div_ceil(4);
                for word in words {
                    if there.arriving[word] != 0 {
                        return Err(self.arriving_hazard(
                            block,
                            4 * word,
                            event,
                            lane,
                            write,
                            issued,
                        ));
                    }
                    if write && there.departing[word] != 0 {
                        return Err(self.departing_hazard(block, 4 * word, event, lane));
                    }
                }
                (&mut self.cluster.blocks[block].cells, offset)
            }
            Target::Global { buffer, offset } => {
                if !write
                    && let Some(at) = world.memory.first_unwritten(buffer, offset, bytes as usize)
                {
                    let name = &world.memory.buffer(buffer).name;
                    let text = format!("byte {at} of buffer {name:?} was never written");
                    return Err(self.event_hazard(
                        event,
                        lane,
                        HazardKind::UninitialisedMemory,
                        text,
                    ));
                }
                (&mut world.global[buffer], offset)
            }
        };
        let observer = Observer { global: matches!(target, Target::Global { .. }), ..observer };
        let mut byte = offset;
        while byte < offset + bytes as usize {
            let cell = cells.at(byte);
            if cell.barrier {
                let here = self.shared_name((byte as u32) + SHARED_BASE);
                let verb = if write { "written" } else { "read" };
                let text = format!("{here} is a memory barrier and is {verb} as data");
                let mut hazard = self.event_hazard(event, lane, HazardKind::MbarrierTouched, text);
                hazard.other = self.mbarrier_place(target, byte);
                return Err(hazard);
            }
            if !write && !cell.initialised {
                let here = self.shared_name((byte as u32) + SHARED_BASE);
                let text = format!("{here} was never written");
                return Err(self.event_hazard(event, lane, HazardKind::UninitialisedMemory, text));
            }
            if let Some(conflict) = world.shadow.access(cell, &observer, write) {
                let at = match target {
                    Target::Shared { block, .. } => Target::Shared { block, offset: byte },
                    Target::Global { buffer, .. } => Target::Global { buffer, offset: byte },
                };
                return Err(self.conflict_hazard(conflict, event, lane, at, write));
            }
            byte += CELL;
        }
        Ok(())
    }

    /// Where the memory barrier at a byte was initialised.
    fn mbarrier_place(&self, target: Target, byte: usize) -> Option<ptx::Place> {
        let Target::Shared { block, .. } = target else { return None };
        let address = byte as u32 / 8 * 8 + SHARED_BASE;
        self.cluster.blocks[block].mbarriers.get(&address)?.initialised_at
    }

    /// A hazard of a recorded access.
    pub(crate) fn event_hazard(
        &self,
        event: u32,
        lane: u8,
        kind: HazardKind,
        text: String,
    ) -> Box<Hazard> {
        let event = self.world.shadow.get(event);
        let mut hazard = self.world.hazard(kind, text);
        hazard.place = event.place;
        let mut actor = event.actor;
        if lane != NO_LANE {
            actor.lane = Some(lane as u32);
        }
        hazard.actor = Some(actor);
        hazard
    }

    fn arriving_hazard(
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
        let what = self.world.shadow.get(event).what;
        let covers = |dst: u32, bytes: u32| dst < address + 4 && address < dst + bytes;
        let copy = self.cluster.operations.iter().find(|(_, operation)| match &operation.kind {
            OperationKind::Load { to, dst, bytes, .. } => *to == block && covers(*dst, *bytes),
            OperationKind::CopyAsync(lanes) => {
                operation.block == block && lanes.iter().any(|l| covers(l.dst, l.bytes))
            }
            OperationKind::ArriveOnCopies { .. } | OperationKind::Store { .. } => false,
        });
        let (kind, text) = if copy.is_some_and(|(id, _)| *id >= issued) {
            // The access was there first; the copy came while it was in flight.
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
        let mut hazard = self.event_hazard(event, lane, kind, text);
        hazard.other = copy.and_then(|(_, o)| self.world.code.places[o.step]);
        hazard
    }

    fn departing_hazard(&self, block: usize, offset: usize, event: u32, lane: u8) -> Box<Hazard> {
        let here = self.shared_name(offset as u32 + SHARED_BASE);
        let what = self.world.shadow.get(event).what;
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
        let mut hazard = self.event_hazard(event, lane, HazardKind::OverwrittenInFlight, text);
        hazard.other = step.and_then(|step| self.world.code.places[step]);
        hazard
    }

    fn conflict_hazard(
        &self,
        conflict: Conflict,
        event: u32,
        lane: u8,
        target: Target,
        write: bool,
    ) -> Box<Hazard> {
        let own = self.world.shadow.get(event);
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
        let mut hazard = self.event_hazard(event, lane, kind, text);
        hazard.other = other.place;
        hazard
    }

    /// Whether an atomic is to memory that floats must be added to in one order.
    fn adds_in_order(
        &self,
        warp: &Warp<'a>,
        ty: Type,
        space: Space,
        addresses: &[u64; 32],
    ) -> bool {
        let floats = matches!(ty, Type::F16 | Type::BF16 | Type::F32);
        let first = lanes_of(warp.active).next().filter(|_| floats && space == Space::Global);
        let memory = &self.world.memory;
        let at = first.and_then(|lane| memory.locate(addresses[lane as usize], 1).ok());
        at.is_some_and(|(buffer, _)| memory.buffer(buffer).in_order)
    }

    fn check_collision(
        &mut self,
        warp: &Warp<'a>,
        lane: u32,
        target: Target,
        value: &[u8],
        event: u32,
    ) -> Step<()> {
        let (cells, offset, old) = match target {
            Target::Shared { block, offset } => {
                let block = &mut self.cluster.blocks[block];
                (&mut block.cells, offset, &block.shared[offset..offset + value.len()])
            }
            Target::Global { buffer, offset } => {
                let bytes = &self.world.memory.buffer(buffer).bytes;
                (&mut self.world.global[buffer], offset, &bytes[offset..offset + value.len()])
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

    fn check_read_only(&mut self, warp: &Warp<'a>, lane: u32, target: Target) -> Step<()> {
        if let Target::Global { buffer, offset } = target {
            let cell = *self.world.global[buffer].at(offset);
            if cell.is_written() {
                let here = self.target_name(target);
                let text = format!("{here} is loaded as read-only, but the kernel wrote it");
                let kind = HazardKind::ReadOnlyViolated;
                let mut hazard = self.hazard(warp, Some(lane), kind, text);
                hazard.other = self.world.shadow.get(cell.written_by()).place;
                return Err(hazard);
            }
        }
        Ok(())
    }
}

/// The scope that two scopes both reach.
fn narrower(a: Scope, b: Scope) -> Scope {
    match (a, b) {
        (Scope::Block, _) | (_, Scope::Block) => Scope::Block,
        (Scope::Cluster, _) | (_, Scope::Cluster) => Scope::Cluster,
        (Scope::Gpu, _) | (_, Scope::Gpu) => Scope::Gpu,
        (Scope::System, Scope::System) => Scope::System,
    }
}

/// The value after an atomic operation.
fn combine(operation: AtomicOperation, ty: Type, old: u64, value: u64) -> u64 {
    use AtomicOperation as A;
    let signed = matches!(ty, Type::S32 | Type::S64);
    let wide = ty.bits() == 64;
    let extend = |x: u64| if wide { x as i64 } else { x as u32 as i32 as i64 };
    match operation {
        A::Add => match ty {
            Type::F32 => {
                let sum = f32::from_bits(old as u32) + f32::from_bits(value as u32);
                float::bits(sum) as u64
            }
            Type::F16x2 | Type::BF16x2 => add_packed(ty, old as u32, value as u32) as u64,
            _ if wide => old.wrapping_add(value),
            _ => (old as u32).wrapping_add(value as u32) as u64,
        },
        A::Minimum if signed => extend(old).min(extend(value)) as u64,
        A::Maximum if signed => extend(old).max(extend(value)) as u64,
        A::Minimum => old.min(value),
        A::Maximum => old.max(value),
        A::And => old & value,
        A::Or => old | value,
        A::Xor => old ^ value,
        A::Exchange => value,
    }
}

pub(crate) fn add_packed(ty: Type, a: u32, b: u32) -> u32 {
    let half = |a: u16, b: u16| {
        if ty == Type::F16x2 {
            float::f16_bits(float::from_f16(a) + float::from_f16(b))
        } else {
            float::bf16_bits(float::from_bf16(a) + float::from_bf16(b))
        }
    };
    half(a as u16, b as u16) as u32 | (half((a >> 16) as u16, (b >> 16) as u16) as u32) << 16
}
