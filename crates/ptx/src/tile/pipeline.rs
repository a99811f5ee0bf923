//! Memory barriers, and pipelines of them that know their phase.
//!
//! A pipeline of some stages has two barriers a stage: *full*, which the copy
//! engine completes when the data is there, and *empty*, at which consumers
//! arrive when they have read it. Both sides walk the stages in a circle; a
//! barrier's parity flips each time around, so each side keeps a stage and a
//! phase and nothing else.

use crate::{
    Builder, Choose, Expression, Fence, Instruction, Operand, Reg, Scope, SharedAddress, U32, Value,
};

/// Some memory barriers, 8 bytes each.
#[derive(Clone, Debug)]
pub struct Barriers {
    offset: u32,
    count: u32,
    arrivals: u32,
}

impl Barriers {
    /// Reserves `count` barriers whose phases end after `arrivals` arrivals
    /// (and after all bytes that were expected have come).
    #[track_caller]
    pub fn new(k: &mut Builder, name: &str, mut count: u32, arrivals: u32) -> Self {
        if count > k.target().shared_memory_limit() / 8 {
            k.misuse(format!("{name}: {count} barriers are more than shared memory has room for"));
            count = 1;
        }
        let offset = k.shared(name, 8 * count, 8);
        Barriers { offset, count, arrivals }
    }

    /// Initialises them; one thread does this, then
    /// [`Builder::barriers_ready`] makes it known to the others.
    #[track_caller]
    pub fn init(&self, k: &mut Builder) {
        for index in 0..self.count {
            let address = k.shared_address(self.offset + 8 * index);
            let address = crate::Address { base: address.register, offset: 0 };
            let count = Operand::u32(self.arrivals);
            k.push(Instruction::MbarrierInit { address, count });
        }
    }

    /// The address of one.
    #[track_caller]
    pub fn at(&self, k: &mut Builder, index: impl Into<Value<U32>>) -> Reg<SharedAddress> {
        let base = k.shared_address(self.offset);
        if self.count == 1 { base } else { k.eval(base + index.into() * 8) }
    }
}

impl Builder {
    /// All threads wait here until initialised barriers can be used, by the
    /// whole cluster if there is one.
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

/// Stages that a producer fills and consumers drain.
#[derive(Clone, Debug)]
pub struct Pipeline {
    full: Barriers,
    empty: Barriers,
    stages: u32,
}

impl Pipeline {
    /// Reserves the barriers. `consumers` arrivals empty a stage.
    #[track_caller]
    pub fn new(k: &mut Builder, name: &str, stages: u32, consumers: u32) -> Self {
        Pipeline::of_producers(k, name, stages, 1, consumers)
    }

    /// The same where several threads fill a stage by ordinary stores: `producers` arrivals make it
    /// full.
    #[track_caller]
    pub fn of_producers(
        k: &mut Builder,
        name: &str,
        stages: u32,
        producers: u32,
        consumers: u32,
    ) -> Self {
        let full = Barriers::new(k, &format!("{name} full"), stages, producers);
        let empty = Barriers::new(k, &format!("{name} empty"), stages, consumers);
        Pipeline { full, empty, stages }
    }

    /// Initialises the barriers; one thread does this.
    #[track_caller]
    pub fn init(&self, k: &mut Builder) {
        self.full.init(k);
        self.empty.init(k);
    }

    /// The filling side. Its first time around no stage has been used yet,
    /// which the parity 1 of the phase before the first stands for.
    #[track_caller]
    pub fn producer(&self, k: &mut Builder) -> Producer {
        Producer { cursor: Cursor::new(k, self.clone(), 1) }
    }

    /// The filling side that stands where that of another pipeline with as many stages stands: it
    /// advances for both.
    pub fn producer_beside(&self, other: &Producer) -> Producer {
        let Cursor { stage, phase, .. } = other.cursor;
        Producer { cursor: Cursor { pipeline: self.clone(), stage, phase } }
    }

    /// Waits until a stage is full, for a consumer that counts stages and phases by itself: where
    /// the steps of a loop are unrolled, stages are constants.
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

    /// Gives a stage back by one arrival. Every thread calls this; those where `arrives` holds do
    /// the arriving.
    #[track_caller]
    pub fn give_back(
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

    /// The draining side.
    #[track_caller]
    pub fn consumer(&self, k: &mut Builder) -> Consumer {
        Consumer { cursor: Cursor::new(k, self.clone(), 0) }
    }
}

/// Where one side stands in the circle.
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
        k.set(self.stage, around.choose::<U32>(0, next));
        k.set(self.phase, around.choose::<U32>(self.phase ^ 1, self.phase));
    }
}

/// The filling side of a [`Pipeline`]: one thread.
#[derive(Debug)]
pub struct Producer {
    cursor: Cursor,
}

impl Producer {
    /// Waits until the next stage is empty and gives its index.
    #[track_caller]
    pub fn acquire(&self, k: &mut Builder) -> Reg<U32> {
        let empty = self.cursor.pipeline.empty.at(k, self.cursor.stage);
        k.mbarrier_wait(empty, self.cursor.phase, Scope::Block);
        self.cursor.stage
    }

    /// Announces `bytes` for the stage and gives the barrier that the copies
    /// complete on.
    #[track_caller]
    pub fn expect(&self, k: &mut Builder, bytes: u32) -> Reg<SharedAddress> {
        let full = self.cursor.pipeline.full.at(k, self.cursor.stage);
        k.mbarrier_arrive_expect(full, bytes);
        full
    }

    /// Announces that the stage is full, where ordinary stores filled it.
    #[track_caller]
    pub fn publish(&self, k: &mut Builder) {
        let full = self.cursor.pipeline.full.at(k, self.cursor.stage);
        k.mbarrier_arrive(full);
    }

    /// The same by one of several arrivals. Every thread calls this; those where `arrives` holds
    /// do the arriving.
    #[track_caller]
    pub fn publish_if(&self, k: &mut Builder, arrives: impl Into<Value<crate::Pred>>) {
        let full = self.cursor.pipeline.full.at(k, self.cursor.stage);
        let address = crate::Address { base: full.register, offset: 0 };
        let space = crate::Space::Shared;
        k.if_one(arrives, Instruction::MbarrierArrive { space, address, count: None });
    }

    /// Goes on to the next stage.
    #[track_caller]
    pub fn advance(&self, k: &mut Builder) {
        self.cursor.advance(k);
    }

    /// The phase that the stage is waited for with, for other barriers that come around alike.
    pub fn phase(&self) -> Reg<U32> {
        self.cursor.phase
    }

    /// The stage that is next.
    pub fn stage(&self) -> Reg<U32> {
        self.cursor.stage
    }
}

/// The draining side of a [`Pipeline`]: any number of threads, all walking alike.
#[derive(Debug)]
pub struct Consumer {
    cursor: Cursor,
}

impl Consumer {
    /// Waits until the next stage is full and gives its index.
    #[track_caller]
    pub fn wait(&self, k: &mut Builder) -> Reg<U32> {
        let full = self.cursor.pipeline.full.at(k, self.cursor.stage);
        k.mbarrier_wait(full, self.cursor.phase, Scope::Block);
        self.cursor.stage
    }

    /// The stage last waited for, until it is given back.
    pub fn stage(&self) -> Reg<U32> {
        self.cursor.stage
    }

    /// The phase that goes with it, for other barriers that come around alike.
    pub fn phase(&self) -> Reg<U32> {
        self.cursor.phase
    }

    /// Gives the stage back by one arrival and goes on to the next. Every
    /// thread calls this; those where `arrives` holds do the arriving.
    #[track_caller]
    pub fn release(&self, k: &mut Builder, arrives: impl Into<Value<crate::Pred>>) {
        self.give_back(k, self.cursor.stage, arrives);
        self.cursor.advance(k);
    }

    /// Goes on to the next stage and keeps this one, to be given back later.
    #[track_caller]
    pub fn keep(&self, k: &mut Builder) {
        self.cursor.advance(k);
    }

    /// Gives back a stage that was kept, as [`release`](Consumer::release) does.
    #[track_caller]
    pub fn give_back(
        &self,
        k: &mut Builder,
        stage: Reg<U32>,
        arrives: impl Into<Value<crate::Pred>>,
    ) {
        self.cursor.pipeline.give_back(k, stage, arrives);
    }

    /// The same for a stage that several blocks of the cluster fill by
    /// multicast: thread `r` below the cluster's size arrives at block `r`'s barrier.
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
