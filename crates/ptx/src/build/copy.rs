//! Asynchronous copies: `cp.async`, bulk copies and tensor copies (TMA).

use super::{Builder, TensorMap};
use crate::{CopyCache, GlobalAddress, Instruction, Reg, S32, SharedAddress, U32, Value};

/// Optional operands of a tensor load.
#[derive(Clone, Copy, Debug, Default)]
pub struct CopyHint {
    /// A mask of the blocks of the cluster that receive the data.
    pub multicast: Option<Reg<U32>>,
}

impl Builder {
    /// Copies 16 bytes from global to shared memory. With `valid`, only so many bytes are read and
    /// the rest become zeros.
    #[track_caller]
    pub fn copy_async(
        &mut self,
        dst: impl Into<Value<SharedAddress>>,
        src: impl Into<Value<GlobalAddress>>,
        valid: Option<Reg<U32>>,
    ) {
        self.copy_async_bytes(dst.into(), src.into(), valid, 16, CopyCache::L2Only);
    }

    /// Copies 4 bytes from global to shared memory. With `valid`, only so many bytes are read and
    /// the rest become zeros.
    #[track_caller]
    pub fn copy_async_word(
        &mut self,
        dst: impl Into<Value<SharedAddress>>,
        src: impl Into<Value<GlobalAddress>>,
        valid: Option<Reg<U32>>,
    ) {
        self.copy_async_bytes(dst.into(), src.into(), valid, 4, CopyCache::All);
    }

    #[track_caller]
    fn copy_async_bytes(
        &mut self,
        dst: Value<SharedAddress>,
        src: Value<GlobalAddress>,
        valid: Option<Reg<U32>>,
        bytes: u32,
        cache: CopyCache,
    ) {
        let (dst, src) = (self.address(dst), self.address(src));
        let source_bytes = valid.map(Into::into);
        self.push(Instruction::CopyAsync { dst, src, bytes, source_bytes, cache });
    }

    /// Commits the thread's `copy_async`s since the last commit as a group.
    #[track_caller]
    pub fn copy_async_commit(&mut self) {
        self.push(Instruction::CopyAsyncCommit);
    }

    /// Waits until at most `pending` of the thread's latest groups are in flight. Data copied by
    /// other threads is only visible once those threads have waited too and a barrier orders them.
    #[track_caller]
    pub fn copy_async_wait(&mut self, pending: u32) {
        self.push(Instruction::CopyAsyncWait { pending });
    }

    /// Commits the thread's bulk and tensor stores since the last commit as a group.
    #[track_caller]
    pub fn bulk_commit(&mut self) {
        self.push(Instruction::BulkCommit);
    }

    /// Waits until at most `pending` of the thread's latest groups of bulk stores are unfinished.
    #[track_caller]
    pub fn bulk_wait(&mut self, pending: u32) {
        self.push(Instruction::BulkWait { pending, read_only: false });
    }

    /// Waits until at most `pending` of the thread's latest groups of bulk stores have yet to read
    /// shared memory, which can then be overwritten.
    #[track_caller]
    pub fn bulk_wait_read(&mut self, pending: u32) {
        self.push(Instruction::BulkWait { pending, read_only: true });
    }

    /// Copies `bytes`, a multiple of 16, from global to shared memory, completing on `barrier`.
    #[track_caller]
    pub fn bulk_load(
        &mut self,
        dst: impl Into<Value<SharedAddress>>,
        src: impl Into<Value<GlobalAddress>>,
        bytes: impl Into<Value<U32>>,
        barrier: impl Into<Value<SharedAddress>>,
    ) {
        let (dst, src) = (self.address(dst), self.address(src));
        let bytes = self.operand(bytes);
        let barrier = self.address(barrier);
        self.push(Instruction::BulkLoad { dst, src, bytes, barrier, multicast: None });
    }

    /// Copies a box of a tensor into shared memory, completing on `barrier`. Coordinates begin with
    /// the fastest-moving dimension.
    #[track_caller]
    pub fn tensor_load(
        &mut self,
        dst: impl Into<Value<SharedAddress>>,
        map: TensorMap,
        coordinates: &[Value<S32>],
        barrier: impl Into<Value<SharedAddress>>,
        hint: CopyHint,
    ) {
        let dst = self.address(dst);
        let coordinates = coordinates.iter().map(|c| self.operand(c.clone())).collect();
        let barrier = self.address(barrier);
        self.push(Instruction::TensorLoad {
            dst,
            map: map.address.register,
            coordinates,
            barrier,
            multicast: hint.multicast.map(|r| r.register),
        });
    }

    /// Brings a tensor map into the cache of the copy engine, so that the first copy does not wait
    /// for it.
    #[track_caller]
    pub fn prefetch_map(&mut self, map: TensorMap) {
        self.push(Instruction::TensorMapPrefetch { map: map.address.register });
    }

    /// Copies a box from shared memory into a tensor.
    #[track_caller]
    pub fn tensor_store(
        &mut self,
        map: TensorMap,
        coordinates: &[Value<S32>],
        src: impl Into<Value<SharedAddress>>,
    ) {
        let coordinates = coordinates.iter().map(|c| self.operand(c.clone())).collect();
        let src = self.address(src);
        let map = map.address.register;
        self.push(Instruction::TensorStore { map, coordinates, src });
    }
}
