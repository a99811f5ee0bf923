//! Arrays of mbarriers, and multi-stage pipelines that keep track of their phases.
//!
//! A pipeline has two mbarriers per stage: *full*, which completes when the producer's data has
//! arrived, and *empty*, at which consumers arrive when they have read it. Both sides walk the
//! stages as a ring; the parity of a barrier flips on every round, so each side keeps only a stage
//! index and a phase.

use crate::{
    Builder, Expression, Fence, Instruction, Operand, Reg, Scope, Select, SharedAddress, U32, Value,
};

/// An array of mbarriers in shared memory, 8 bytes each.
#[derive(Clone, Debug)]
pub struct Mbarriers {
    offset: u32,
    count: u32,
    arrivals: u32,
}

impl Mbarriers {
    /// Reserves `count` mbarriers whose phases end after `arrivals` arrivals (and after all
    /// expected bytes have arrived).
    #[track_caller]
    pub fn new(k: &mut Builder, name: &str, mut count: u32, arrivals: u32) -> Self {
        if count > k.target().shared_memory_limit() / 8 {
            k.misuse(format!("{name}: {count} barriers are more than shared memory has room for"));
            count = 1;
        }
        let offset = k.shared(name, 8 * count, 8);
        Mbarriers { offset, count, arrivals }
    }

    /// Initialises the mbarriers. One thread calls this; [`Builder::barriers_ready`] then makes the
    /// initialisation visible to the others.
    #[track_caller]
    pub fn init(&self, k: &mut Builder) {
        for index in 0..self.count {
            let address = k.shared_address(self.offset + 8 * index);
            let address = crate::Address { base: address.register, offset: 0 };
            let count = Operand::u32(self.arrivals);
            k.push(Instruction::MbarrierInit { address, count });
        }
    }

    /// Returns the address of the mbarrier with this index.
    #[track_caller]
    pub fn at(&self, k: &mut Builder, index: impl Into<Value<U32>>) -> Reg<SharedAddress> {
        let base = k.shared_address(self.offset);
        if self.count == 1 { base } else { k.eval(base + index.into() * 8) }
    }
}

impl Builder {
    /// Waits until the initialised mbarriers can be used by all threads of the block, or of the
    /// cluster if there is one.
    #[track_caller]
    pub fn barriers_ready(&mut self) {
        self.fence(Fence::MbarrierInit);
        if self.cluster_size() > 1 {
            self.cluster_sync();
        } else {
            self.block_sync();
        }
    }
}

/// A ring of stages that a producer fills and consumers drain, as pairs of full and empty
/// mbarriers. The data itself lives elsewhere, for example in [`SharedTiles`](crate::SharedTiles).
#[derive(Clone, Debug)]
pub struct Pipeline {
    full: Mbarriers,
    empty: Mbarriers,
    stages: u32,
}

impl Pipeline {
    /// Reserves the mbarriers of a pipeline that one thread fills. `consumers` arrivals empty a
    /// stage.
    #[track_caller]
    pub fn new(k: &mut Builder, name: &str, stages: u32, consumers: u32) -> Self {
        Pipeline::of_producers(k, name, stages, 1, consumers)
    }

    /// Reserves the mbarriers of a pipeline whose stages are full after `producers` arrivals, for
    /// several threads that fill them with ordinary stores. `consumers` arrivals empty a stage.
    #[track_caller]
    pub fn of_producers(
        k: &mut Builder,
        name: &str,
        stages: u32,
        producers: u32,
        consumers: u32,
    ) -> Self {
        let full = Mbarriers::new(k, &format!("{name} full"), stages, producers);
        let empty = Mbarriers::new(k, &format!("{name} empty"), stages, consumers);
        Pipeline { full, empty, stages }
    }

    /// Initialises the mbarriers. One thread calls this.
    #[track_caller]
    pub fn init(&self, k: &mut Builder) {
        self.full.init(k);
        self.empty.init(k);
    }

    /// Creates the producer's side. Its phase begins at 1: a wait for the parity of the phase
    /// before the first returns at once, so all stages count as empty in the first round.
    #[track_caller]
    pub fn producer(&self, k: &mut Builder) -> Producer {
        Producer { cursor: Cursor::new(k, self.clone(), 1) }
    }

    /// Creates the producer's side of this pipeline on top of that of another pipeline with as many
    /// stages. Both share one stage index and phase; advancing either advances both.
    pub fn producer_sharing_state(&self, other: &Producer) -> Producer {
        let Cursor { stage, phase, .. } = other.cursor;
        Producer { cursor: Cursor { pipeline: self.clone(), stage, phase } }
    }

    /// Waits until a stage is full, for a consumer that keeps track of stages and phases itself: in
    /// an unrolled loop, stage indices are constants.
    #[track_caller]
    pub fn wait_full(
        &self,
        k: &mut Builder,
        stage: impl Into<Value<U32>>,
        phase: impl Into<Value<U32>>,
    ) {
        let full = self.full.at(k, stage);
        k.mbarrier_wait(full, phase, Scope::Block);
    }

    /// Releases a stage to the producer with one arrival. Every thread calls this; those where
    /// `arrives` holds arrive.
    #[track_caller]
    pub fn release_stage(
        &self,
        k: &mut Builder,
        stage: impl Into<Value<U32>>,
        arrives: impl Into<Value<crate::Pred>>,
    ) {
        let empty = self.empty.at(k, stage);
        let address = crate::Address { base: empty.register, offset: 0 };
        let space = crate::Space::Shared;
        k.if_one(arrives, Instruction::MbarrierArrive { space, address, count: None });
    }

    /// Creates a consumer's side.
    #[track_caller]
    pub fn consumer(&self, k: &mut Builder) -> Consumer {
        Consumer { cursor: Cursor::new(k, self.clone(), 0) }
    }
}

/// The position of one side in the ring: its current stage and the parity it waits for.
#[derive(Debug)]
struct Cursor {
    pipeline: Pipeline,
    stage: Reg<U32>,
    phase: Reg<U32>,
}

impl Cursor {
    #[track_caller]
    fn new(k: &mut Builder, pipeline: Pipeline, phase: u32) -> Self {
        Cursor { pipeline, stage: k.variable(0), phase: k.variable(phase) }
    }

    #[track_caller]
    fn advance(&self, k: &mut Builder) {
        if self.pipeline.stages == 1 {
            k.set(self.phase, self.phase ^ 1);
            return;
        }
        let next = k.eval(self.stage + 1);
        let around = k.eval(next.equals(self.pipeline.stages));
        k.set(self.stage, around.select::<U32>(0, next));
        k.set(self.phase, around.select::<U32>(self.phase ^ 1, self.phase));
    }
}

/// The producer's side of a [`Pipeline`]: one thread, or several that advance alike.
#[derive(Debug)]
pub struct Producer {
    cursor: Cursor,
}

impl Producer {
    /// Waits until the current stage is empty and returns its index.
    #[track_caller]
    pub fn acquire(&self, k: &mut Builder) -> Reg<U32> {
        let empty = self.cursor.pipeline.empty.at(k, self.cursor.stage);
        k.mbarrier_wait(empty, self.cursor.phase, Scope::Block);
        self.cursor.stage
    }

    /// Arrives at the stage's full barrier expecting `bytes`, and returns the barrier for the
    /// copies to complete on.
    #[track_caller]
    pub fn expect(&self, k: &mut Builder, bytes: u32) -> Reg<SharedAddress> {
        let full = self.cursor.pipeline.full.at(k, self.cursor.stage);
        k.mbarrier_arrive_expect(full, bytes);
        full
    }

    /// Arrives at the stage's full barrier, for a stage that ordinary stores filled.
    #[track_caller]
    pub fn commit(&self, k: &mut Builder) {
        let full = self.cursor.pipeline.full.at(k, self.cursor.stage);
        k.mbarrier_arrive(full);
    }

    /// Arrives at the stage's full barrier as one of several producers. Every thread calls this;
    /// those where `arrives` holds arrive.
    #[track_caller]
    pub fn commit_if(&self, k: &mut Builder, arrives: impl Into<Value<crate::Pred>>) {
        let full = self.cursor.pipeline.full.at(k, self.cursor.stage);
        let address = crate::Address { base: full.register, offset: 0 };
        let space = crate::Space::Shared;
        k.if_one(arrives, Instruction::MbarrierArrive { space, address, count: None });
    }

    /// Advances to the next stage.
    #[track_caller]
    pub fn advance(&self, k: &mut Builder) {
        self.cursor.advance(k);
    }

    /// Returns the parity with which the current stage is waited for, for other barriers that
    /// advance in step with this pipeline.
    pub fn phase(&self) -> Reg<U32> {
        self.cursor.phase
    }

    /// Returns the index of the current stage.
    pub fn stage(&self) -> Reg<U32> {
        self.cursor.stage
    }
}

/// A consumer's side of a [`Pipeline`]: any number of threads that advance alike.
#[derive(Debug)]
pub struct Consumer {
    cursor: Cursor,
}

impl Consumer {
    /// Waits until the current stage is full and returns its index.
    #[track_caller]
    pub fn wait(&self, k: &mut Builder) -> Reg<U32> {
        let full = self.cursor.pipeline.full.at(k, self.cursor.stage);
        k.mbarrier_wait(full, self.cursor.phase, Scope::Block);
        self.cursor.stage
    }

    /// Returns the index of the current stage: the one last waited for, until it is released.
    pub fn stage(&self) -> Reg<U32> {
        self.cursor.stage
    }

    /// Returns the parity of the current stage, for other barriers that advance in step with this
    /// pipeline.
    pub fn phase(&self) -> Reg<U32> {
        self.cursor.phase
    }

    /// Releases the current stage with one arrival and advances to the next. Every thread calls
    /// this; those where `arrives` holds arrive.
    #[track_caller]
    pub fn release(&self, k: &mut Builder, arrives: impl Into<Value<crate::Pred>>) {
        self.release_stage(k, self.cursor.stage, arrives);
        self.cursor.advance(k);
    }

    /// Advances to the next stage without releasing the current one, which
    /// [`release_stage`](Consumer::release_stage) releases later.
    #[track_caller]
    pub fn advance(&self, k: &mut Builder) {
        self.cursor.advance(k);
    }

    /// Releases a stage that [`advance`](Consumer::advance) passed over, as
    /// [`release`](Consumer::release) does.
    #[track_caller]
    pub fn release_stage(
        &self,
        k: &mut Builder,
        stage: Reg<U32>,
        arrives: impl Into<Value<crate::Pred>>,
    ) {
        self.cursor.pipeline.release_stage(k, stage, arrives);
    }

    /// Releases the current stage and advances, for a stage that several blocks of the cluster fill
    /// by multicast: the thread whose `arriving_rank` is `r`, below the cluster's size, arrives at
    /// the empty barrier of block `r`.
    #[track_caller]
    pub fn release_cluster(&self, k: &mut Builder, arriving_rank: Reg<U32>) {
        let blocks = k.cluster_size();
        let empty = self.cursor.pipeline.empty.at(k, self.cursor.stage);
        k.if_(arriving_rank.less(blocks), |k| {
            let remote = k.map_shared(empty, arriving_rank);
            k.mbarrier_arrive_remote(remote);
        });
        self.cursor.advance(k);
    }
}
