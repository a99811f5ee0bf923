//! Synchronisation: block, warp, named and cluster barriers, `mbarrier` operations, and fences.

use super::Builder;
use crate::{
    ClusterAddress, ClusterOrder, Fence, Instruction, Reg, Scope, SharedAddress, U32, Value,
};

impl Builder {
    /// Waits at barrier 0 for all threads of the block.
    #[track_caller]
    pub fn block_sync(&mut self) {
        self.push(Instruction::BarrierSync { barrier: crate::Operand::u32(0), threads: None });
    }

    /// Waits for all lanes of the warp, which then see each other's writes.
    #[track_caller]
    pub fn warp_sync(&mut self) {
        self.push(Instruction::WarpSync);
    }

    /// Waits at the named barrier `barrier` until `threads` threads have arrived.
    #[track_caller]
    pub fn barrier_sync(&mut self, barrier: impl Into<Value<U32>>, threads: u32) {
        let barrier = self.operand(barrier);
        let threads = Some(crate::Operand::u32(threads));
        self.push(Instruction::BarrierSync { barrier, threads });
    }

    /// Arrives at the named barrier `barrier` of `threads` threads without waiting.
    #[track_caller]
    pub fn barrier_arrive(&mut self, barrier: impl Into<Value<U32>>, threads: u32) {
        let barrier = self.operand(barrier);
        self.push(Instruction::BarrierArrive { barrier, threads: crate::Operand::u32(threads) });
    }

    /// Waits for all threads of the cluster, which then see each other's writes.
    #[track_caller]
    pub fn cluster_sync(&mut self) {
        self.push(Instruction::ClusterArrive { order: ClusterOrder::Release });
        self.push(Instruction::ClusterWait);
    }

    /// Allows the next grid on the stream to be launched once every block has come here: its blocks
    /// begin where there is room, up to their own [`wait_for_grids`](Builder::wait_for_grids).
    #[track_caller]
    pub fn launch_dependents(&mut self) {
        self.push(Instruction::GridDependencyLaunch);
    }

    /// Waits until the earlier grids on the stream have ended and their writes are visible. Does
    /// nothing where this grid was launched after their end.
    #[track_caller]
    pub fn wait_for_grids(&mut self) {
        self.push(Instruction::GridDependencyWait);
    }

    /// Issues a fence.
    #[track_caller]
    pub fn fence(&mut self, fence: Fence) {
        self.push(Instruction::Fence(fence));
    }

    /// Returns the address in block `rank` of the cluster that corresponds to a shared address of
    /// this block.
    #[track_caller]
    pub fn map_shared(
        &mut self,
        address: impl Into<Value<SharedAddress>>,
        rank: impl Into<Value<U32>>,
    ) -> Reg<ClusterAddress> {
        let address = self.eval(address).register;
        let rank = self.operand(rank);
        let dst = self.register();
        self.push(Instruction::MapShared { dst: dst.register, address, rank });
        dst
    }

    /// Waits until the phase with this parity of an mbarrier has ended.
    #[track_caller]
    pub fn mbarrier_wait(
        &mut self,
        barrier: impl Into<Value<SharedAddress>>,
        parity: impl Into<Value<U32>>,
        scope: Scope,
    ) {
        let address = self.address(barrier);
        let parity = self.operand(parity);
        self.push(Instruction::MbarrierWait { address, parity, scope });
    }

    /// Arrives once at an mbarrier of this block.
    #[track_caller]
    pub fn mbarrier_arrive(&mut self, barrier: impl Into<Value<SharedAddress>>) {
        let address = self.address(barrier);
        let space = crate::Space::Shared;
        self.push(Instruction::MbarrierArrive { space, address, count: None });
    }

    /// Arrives once at an mbarrier of any block of the cluster.
    #[track_caller]
    pub fn mbarrier_arrive_remote(&mut self, barrier: impl Into<Value<ClusterAddress>>) {
        let address = self.address(barrier);
        let space = crate::Space::Cluster;
        self.push(Instruction::MbarrierArrive { space, address, count: None });
    }

    /// Adds `bytes` to the transaction count of an mbarrier's current phase, then arrives once.
    #[track_caller]
    pub fn mbarrier_arrive_expect(
        &mut self,
        barrier: impl Into<Value<SharedAddress>>,
        bytes: impl Into<Value<U32>>,
    ) {
        let address = self.address(barrier);
        let bytes = self.operand(bytes);
        let space = crate::Space::Shared;
        self.push(Instruction::MbarrierArriveExpect { space, address, bytes });
    }
}
