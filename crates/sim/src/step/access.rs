//! Loads and stores of threads, and of matrices (`ldmatrix`, `stmatrix`): they resolve addresses to
//! memory, count the traffic, have the accesses checked (`check`), and move the bytes.

use ptx::{Address, LoadCache, LoadOrder, Register, Scope, Space, StoreOrder};

use crate::Measure;
use crate::count::wavefronts;
use crate::hazard::HazardKind;
use crate::machine::{CLUSTER_WINDOW, Executed, Executor, SHARED_BASE};
use crate::shadow::{Observer, Source};
use crate::warp::{Warp, lanes_of};

/// A resolved address: an offset in a block's shared memory or in a buffer of global memory.
#[derive(Clone, Copy)]
pub(crate) enum Target {
    Shared { block: usize, offset: usize },
    Global { buffer: usize, offset: usize },
}

impl<'a> Executor<'_, 'a> {
    // ---- ranges -----------------------------------------------------------------

    /// Returns the block of the cluster and the offset of a range of shared memory; a hazard if the
    /// range is misaligned, out of bounds or in a block that does not exist or has ended.
    pub(crate) fn shared_range(
        &self,
        warp: &Warp<'_>,
        lane: u32,
        space: Space,
        address: u32,
        bytes: u32,
        alignment: u32,
    ) -> Executed<(usize, usize)> {
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
        let length = self.grid_state.program.shared_bytes();
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

    /// Returns the buffer and offset of a range of global memory; a hazard if the range is
    /// misaligned or out of bounds.
    pub(crate) fn global_range(
        &self,
        warp: &Warp<'_>,
        lane: u32,
        address: u64,
        bytes: u64,
        alignment: u64,
    ) -> Executed<(usize, usize)> {
        self.check_after_grids(warp, lane)?;
        if !address.is_multiple_of(alignment) {
            let text = format!("global address {address:#x} is not a multiple of {alignment}");
            return Err(self.hazard(warp, Some(lane), HazardKind::Misaligned, text));
        }
        self.grid_state
            .memory
            .locate(address, bytes)
            .map_err(|text| self.hazard(warp, Some(lane), HazardKind::OutOfBounds, text))
    }

    pub(super) fn target(
        &self,
        warp: &Warp<'_>,
        lane: u32,
        space: Space,
        address: u64,
        bytes: u32,
    ) -> Executed<Target> {
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

    pub(super) fn addresses(&self, warp: &Warp<'_>, space: Space, address: Address) -> [u64; 32] {
        match space {
            Space::Global => warp.global_addresses(address),
            Space::Shared | Space::Cluster => warp.shared_addresses(address).map(|a| a as u64),
        }
    }

    pub(super) fn bytes_at(&self, target: Target, bytes: usize) -> [u8; 16] {
        let mut result = [0; 16];
        let source = match target {
            Target::Shared { block, offset } => {
                &self.cluster.blocks[block].shared[offset..offset + bytes]
            }
            Target::Global { buffer, offset } => {
                &self.grid_state.memory.buffer(buffer).bytes[offset..offset + bytes]
            }
        };
        result[..bytes].copy_from_slice(source);
        result
    }

    pub(super) fn put(&mut self, target: Target, bytes: &[u8]) {
        match target {
            Target::Shared { block, offset } => {
                self.cluster.blocks[block].shared[offset..offset + bytes.len()]
                    .copy_from_slice(bytes);
            }
            Target::Global { buffer, offset } => {
                self.grid_state.memory.write(buffer, offset, bytes)
            }
        }
    }

    pub(crate) fn target_name(&self, target: Target) -> String {
        match target {
            Target::Shared { offset, .. } => self.shared_name(offset as u32 + SHARED_BASE),
            Target::Global { buffer, offset } => {
                format!("byte {offset} of buffer {:?}", self.grid_state.memory.buffer(buffer).name)
            }
        }
    }

    // ---- loads and stores ---------------------------------------------------------

    pub(super) fn load_byte(
        &mut self,
        warp: &mut Warp<'a>,
        dst: Register,
        address: Address,
    ) -> Executed<()> {
        let addresses = self.addresses(warp, Space::Global, address);
        self.count_access(warp, Space::Global, &addresses, 1, false);
        let checked = self.grid_state.checked;
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
    ) -> Executed<()> {
        let width = warp.code.slots[dst[0].0 as usize].0.bits() / 8;
        let bytes = width * dst.len() as u32;
        let addresses = self.addresses(warp, space, address);
        self.count_access(warp, space, &addresses, bytes, false);
        let what = if space == Space::Global { "ld.global" } else { "ld.shared" };
        let source = match order {
            LoadOrder::Weak => Source::Thread,
            LoadOrder::Relaxed(scope) | LoadOrder::Acquire(scope) => Source::Atomic(scope),
        };
        let event = if self.grid_state.checked { self.thread_event(warp, source, what) } else { 0 };
        let read_only = matches!(cache, LoadCache::ReadOnly | LoadCache::ReadOnlyOnce);
        let mut values = [[0u8; 16]; 32];
        for lane in lanes_of(warp.active) {
            let target = self.target(warp, lane, space, addresses[lane as usize], bytes)?;
            if self.grid_state.checked {
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
        if self.grid_state.checked {
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
    ) -> Executed<()> {
        let width = warp.code.slots[src[0].0 as usize].0.bits() / 8;
        let bytes = width * src.len() as u32;
        let addresses = self.addresses(warp, space, address);
        self.count_access(warp, space, &addresses, bytes, true);
        if self.grid_state.checked {
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
        let event = if self.grid_state.checked { self.thread_event(warp, source, what) } else { 0 };
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
            if self.grid_state.checked {
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
        let counts = &mut self.grid_state.counts;
        match space {
            Space::Global => {
                let measure =
                    if write { Measure::GlobalBytesWritten } else { Measure::GlobalBytesRead };
                counts.add(measure, total);
                counts.add(Measure::GlobalSectors, sectors(warp.active, addresses));
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

    // ---- matrices ---------------------------------------------------------------------

    pub(super) fn load_matrix(
        &mut self,
        warp: &mut Warp<'a>,
        dst: &[Register],
        address: Address,
        transpose: bool,
    ) -> Executed<()> {
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
    ) -> Executed<()> {
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

    /// Returns the block and offset of each row that `ldmatrix` or `stmatrix` accesses, and counts
    /// and checks the accesses.
    fn matrix_rows(
        &mut self,
        warp: &mut Warp<'a>,
        address: Address,
        matrices: usize,
        what: &'static str,
        write: bool,
    ) -> Executed<Vec<(usize, usize)>> {
        let addresses = warp.shared_addresses(address);
        let lanes = 8 * matrices as u32;
        let used = if lanes == 32 { u32::MAX } else { (1 << lanes) - 1 };
        let measure = if write { Measure::SharedBytesWritten } else { Measure::SharedBytesRead };
        self.grid_state.counts.add(measure, 128 * matrices as u64);
        let (passes, ideal) = wavefronts(&addresses, used, 16);
        self.grid_state.counts.banks(warp.pc, warp.code.places[warp.pc], passes, ideal);
        warp.time += passes;
        let event =
            if self.grid_state.checked { self.thread_event(warp, Source::Thread, what) } else { 0 };
        let mut rows = Vec::with_capacity(lanes as usize);
        for lane in 0..lanes {
            let address = addresses[lane as usize];
            let (block, offset) = self.shared_range(warp, lane, Space::Shared, address, 16, 16)?;
            if self.grid_state.checked {
                // The whole warp makes this access, not a single lane.
                let target = Target::Shared { block, offset };
                let observer = Observer::operation(warp.clock.view(u32::MAX), event);
                self.check_access(observer, target, 16, write, u64::MAX)?;
            }
            rows.push((block, offset));
        }
        Ok(rows)
    }
}

/// Returns the number of distinct 32-byte sectors of global memory that the addresses of the active
/// lanes are in.
fn sectors(active: u32, addresses: &[u64; 32]) -> u64 {
    let (mut found, mut count) = ([0; 32], 0);
    for lane in lanes_of(active) {
        found[count] = addresses[lane as usize] / 32;
        count += 1;
    }
    let found = &mut found[..count];
    found.sort_unstable();
    found.chunk_by(|a, b| a == b).count() as u64
}
