//! The state of a run: the world all blocks share, and each cluster in it.

use std::collections::{BTreeMap, HashMap, VecDeque};

use ptx::{Place, Program, Scope};

use crate::clock::{Entry, Knowledge, WarpClock, copies_of};
use crate::hazard::{Actor, Hazard, HazardKind};
use crate::lower::Code;
use crate::memory::Memory;
use crate::shadow::{Cells, Event, Proxy, Shadow, Source};
use crate::warp::Warp;
use crate::{Counts, Launch, Mode, Options, TensorMapArgument, Trace};

/// Where dynamic shared memory starts: Hopper keeps the first KiB for itself.
pub(crate) const SHARED_BASE: u32 = 1024;
/// The size of each block's window in the addresses of a cluster.
pub(crate) const CLUSTER_WINDOW: u32 = 1 << 24;
/// Where the addresses of tensor maps start.
pub(crate) const TENSOR_MAPS: u64 = 1 << 62;

/// A boxed hazard is the error of everything that executes.
pub(crate) type Step<T> = Result<T, Box<Hazard>>;

/// What all blocks share.
pub(crate) struct World<'a> {
    pub(crate) program: &'a Program,
    pub(crate) code: &'a Code,
    pub(crate) options: &'a Options,
    pub(crate) grid: u32,
    pub(crate) checked: bool,
    pub(crate) memory: &'a mut Memory,
    pub(crate) parameters: Vec<u64>,
    pub(crate) maps: Vec<Option<TensorMapArgument>>,
    pub(crate) random: Random,
    pub(crate) counts: Counts,
    /// Steps of all warps so far, control flow included.
    pub(crate) steps: u64,
    /// Grows whenever something happens that a poll might see.
    pub(crate) progress: u64,
    pub(crate) trace: Option<Trace>,
    /// Steps that a warp has come to.
    pub(crate) reached: Vec<bool>,
    pub(crate) shadow: Shadow,
    pub(crate) global: Vec<Cells>,
    /// What was released at addresses, by ordered stores and atomics.
    pub(crate) releases: HashMap<u64, Vec<Release>>,
    pub(crate) small: [[f32; 256]; 2],
}

/// What a thread released at an address, and how far it reaches.
#[derive(Clone, Debug)]
pub(crate) struct Release {
    pub(crate) cluster: u32,
    pub(crate) block: u32,
    pub(crate) scope: Scope,
    pub(crate) knowledge: Knowledge,
}

impl Release {
    /// Whether it reaches a thread of this cluster and block, and `scope` from there reaches it.
    pub(crate) fn reaches(&self, cluster: u32, block: u32, scope: Scope) -> bool {
        [self.scope, scope].into_iter().all(|scope| match scope {
            Scope::Block => self.block == block,
            Scope::Cluster => self.cluster == cluster,
            Scope::Gpu | Scope::System => true,
        })
    }
}

impl<'a> World<'a> {
    pub(crate) fn new(
        launch: &Launch<'a>,
        code: &'a Code,
        memory: &'a mut Memory,
        options: &'a Options,
        parameters: Vec<u64>,
        maps: Vec<Option<TensorMapArgument>>,
    ) -> Self {
        let checked = options.mode == Mode::Checked;
        let global = (0..memory.count())
            .map(|buffer| Cells::new(memory.buffer(buffer).bytes.len(), true))
            .collect();
        World {
            program: launch.program,
            code,
            options,
            grid: launch.grid,
            checked,
            memory,
            parameters,
            maps,
            random: Random::new(options.seed),
            counts: Counts::default(),
            steps: 0,
            progress: 0,
            trace: options.trace.then(Trace::default),
            reached: vec![false; code.steps.len()],
            shadow: Shadow::new(),
            global,
            releases: HashMap::new(),
            small: [ptx::Element::E4M3, ptx::Element::E5M2].map(crate::float::small_table),
        }
    }

    pub(crate) fn hazard(&self, kind: HazardKind, message: impl Into<String>) -> Box<Hazard> {
        Box::new(Hazard {
            kind,
            message: message.into(),
            place: None,
            other: None,
            actor: None,
            policy: self.options.policy,
            seed: self.options.seed,
        })
    }
}

/// A cluster of blocks, or a block alone.
pub(crate) struct Cluster<'a> {
    /// Its index in the grid.
    pub(crate) index: u32,
    pub(crate) blocks: Vec<Block>,
    pub(crate) warps: Vec<Option<Box<Warp<'a>>>>,
    pub(crate) groups: Vec<Warpgroup>,
    pub(crate) operations: BTreeMap<u64, Operation>,
    pub(crate) next_operation: u64,
    pub(crate) barrier: ClusterBarrier,
    /// Bulk loads in flight take one of these each.
    slots: Vec<Slot>,
    /// The warp that ran last.
    pub(crate) current: usize,
    /// When the tensor cores of each block are free again.
    pub(crate) tensor_free: Vec<u64>,
    pub(crate) copy_free: Vec<u64>,
    /// When each of the four schedulers of each block is free again.
    pub(crate) issue_free: Vec<u64>,
}

#[derive(Clone, Copy)]
struct Slot {
    clock: u32,
}

/// The components of a warp in the clocks.
const WARP_COMPONENTS: u32 = 4;

impl<'a> Cluster<'a> {
    pub(crate) fn new(world: &World<'a>, index: u32) -> Self {
        let program = world.program;
        let blocks = program.cluster.max(1);
        let warps_per_block = program.threads / 32;
        let mut warps = Vec::new();
        for block in 0..blocks {
            for in_block in 0..warps_per_block {
                let number = warps.len();
                let mut warp = Warp::new(world.code, number, block as usize, in_block);
                warp.registers = program.registers_at_entry();
                let groups_per_block = warps_per_block.div_ceil(4);
                warp.group = (block * groups_per_block + in_block / 4) as usize;
                if world.checked {
                    warp.clock = WarpClock::new(number as u32 * WARP_COMPONENTS);
                    let count = program.registers.len();
                    warp.shadow.written = vec![0; count];
                    warp.shadow.accumulating = vec![0; count];
                    warp.shadow.operand = vec![0; count];
                    warp.shadow.touched = vec![(0, 0); count];
                }
                warps.push(Some(Box::new(warp)));
            }
        }
        let groups = blocks * warps_per_block.div_ceil(4);
        Cluster {
            index,
            blocks: (0..blocks).map(|rank| Block::new(world, index * blocks + rank)).collect(),
            warps,
            groups: (0..groups).map(|_| Warpgroup::default()).collect(),
            operations: BTreeMap::new(),
            next_operation: 1,
            barrier: ClusterBarrier::default(),
            slots: Vec::new(),
            current: 0,
            tensor_free: vec![0; blocks as usize],
            copy_free: vec![0; blocks as usize],
            issue_free: vec![0; 4 * blocks as usize],
        }
    }

    /// The component of a warpgroup's stream of products.
    pub(crate) fn product_component(&self, group: usize) -> u32 {
        self.warps.len() as u32 * WARP_COMPONENTS + group as u32
    }

    fn slot_component(&self, slot: usize) -> u32 {
        self.product_component(self.groups.len()) + slot as u32
    }

    /// A component and clock for a bulk load that `issuer` starts.
    pub(crate) fn take_slot(&mut self, issuer: &Knowledge) -> (u32, u32) {
        for slot in 0..self.slots.len() {
            let component = self.slot_component(slot);
            if issuer.known.get(component).all >= self.slots[slot].clock {
                self.slots[slot].clock += 1;
                return (component, self.slots[slot].clock);
            }
        }
        self.slots.push(Slot { clock: 1 });
        (self.slot_component(self.slots.len() - 1), 1)
    }

    pub(crate) fn is_done(&self) -> bool {
        self.blocks.iter().all(|block| block.live_warps == 0)
    }
}

/// The components of a warp's streams.
pub(crate) fn copy_component(warp: usize) -> u32 {
    copies_of(warp as u32 * WARP_COMPONENTS)
}

pub(crate) fn store_read_component(warp: usize) -> u32 {
    warp as u32 * WARP_COMPONENTS + 2
}

pub(crate) fn store_write_component(warp: usize) -> u32 {
    warp as u32 * WARP_COMPONENTS + 3
}

/// What a stream up to a clock is worth in a vector.
pub(crate) fn stream_entry(clock: u32) -> Entry {
    Entry::of(u32::MAX, clock, 0)
}

/// A block.
pub(crate) struct Block {
    /// Its index in the grid.
    pub(crate) index: u32,
    pub(crate) shared: Vec<u8>,
    pub(crate) cells: Cells,
    /// By four bytes: copies that will write them, operations that will read them.
    pub(crate) arriving: Vec<u16>,
    pub(crate) departing: Vec<u16>,
    pub(crate) mbarriers: BTreeMap<u32, Mbarrier>,
    pub(crate) named: Vec<Named>,
    pub(crate) live_warps: u32,
    /// By component: the last access of another block to this one's shared
    /// memory, which must come before this block's end.
    pub(crate) visitors: BTreeMap<u32, Visit>,
    /// Registers that nobody holds.
    pub(crate) register_pool: u32,
}

impl Block {
    fn new(world: &World<'_>, index: u32) -> Self {
        let program = world.program;
        let bytes = program.shared_bytes() as usize;
        let shadow = if world.checked { bytes } else { 0 };
        Block {
            index,
            // Whatever was there before: NaN in every float format.
            shared: vec![0xFF; bytes],
            cells: Cells::new(shadow, false),
            arriving: vec![0; shadow.div_ceil(4)],
            departing: vec![0; shadow.div_ceil(4)],
            mbarriers: BTreeMap::new(),
            named: vec![Named::default(); 16],
            live_warps: program.threads / 32,
            visitors: BTreeMap::new(),
            // Its threads hold all it has.
            register_pool: 0,
        }
    }
}

/// An access from another block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Visit {
    pub(crate) clock: u32,
    pub(crate) lanes: u32,
    pub(crate) place: Option<Place>,
    pub(crate) actor: Actor,
}

/// A memory barrier.
#[derive(Clone, Debug)]
pub(crate) struct Mbarrier {
    pub(crate) expected: u32,
    pub(crate) pending: u32,
    pub(crate) transactions: i64,
    pub(crate) phase: u64,
    pub(crate) initialised_at: Option<Place>,
    pub(crate) component: u32,
    pub(crate) clock: u32,
    pub(crate) lane: u32,
    /// A fence has made the initialisation visible beyond the block's threads.
    pub(crate) published: bool,
    pub(crate) gather: Knowledge,
    pub(crate) released: Knowledge,
    /// Copies in flight that will report here.
    pub(crate) in_flight: u32,
    /// The warps that arrived, latest last, for the deadlock's message.
    pub(crate) arrivers: Vec<(usize, Place)>,
    pub(crate) expected_at: Option<Place>,
    pub(crate) completed_at: u64,
    /// How many phases had ended when somebody last waited.
    pub(crate) waited: u64,
}

/// A named barrier.
#[derive(Clone, Debug, Default)]
pub(crate) struct Named {
    pub(crate) expected: u32,
    pub(crate) arrived: Vec<usize>,
    pub(crate) generation: u64,
    pub(crate) gather: Knowledge,
    pub(crate) released: Knowledge,
    pub(crate) first_at: Option<Place>,
    pub(crate) completed_at: u64,
}

/// The barrier of the cluster.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClusterBarrier {
    pub(crate) generation: u64,
    pub(crate) gather: Knowledge,
    pub(crate) released: Knowledge,
    pub(crate) completed_at: u64,
}

/// The products of four warps.
#[derive(Default)]
pub(crate) struct Warpgroup {
    pub(crate) queue: VecDeque<Product>,
    /// How many have finished.
    pub(crate) done: u64,
    /// When the last finished.
    pub(crate) finished_at: u64,
}

/// A product that some or all warps of a warpgroup have issued.
pub(crate) struct Product {
    pub(crate) number: u64,
    /// The step that issued it.
    pub(crate) step: usize,
    /// Warps that have issued it, a bit each.
    pub(crate) issued: u8,
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) accumulate: bool,
    /// How many copies were issued before it.
    pub(crate) after: u64,
    pub(crate) since: u32,
    pub(crate) start: Knowledge,
    pub(crate) issued_at: u64,
}

/// An asynchronous operation in flight.
pub(crate) struct Operation {
    pub(crate) kind: OperationKind,
    /// The step that issued it.
    pub(crate) step: usize,
    /// How many were issued before it, and how many accesses there were.
    pub(crate) issued: u64,
    pub(crate) since: u32,
    /// The issuing warp and lane.
    pub(crate) warp: usize,
    pub(crate) lane: u32,
    pub(crate) block: usize,
    /// What the issuer knew.
    pub(crate) start: Knowledge,
    pub(crate) component: u32,
    pub(crate) clock: u32,
    pub(crate) issued_at: u64,
    pub(crate) ready_at: u64,
}

/// What an operation does.
pub(crate) enum OperationKind {
    /// `cp.async` of a warp's lanes.
    CopyAsync(Vec<LaneCopy>),
    /// An arrival for each lane once these operations are over.
    ArriveOnCopies { lanes: Vec<(u32, u32)>, after: Vec<u64> },
    /// A bulk load into one block's shared memory.
    Load { to: usize, dst: u32, source: LoadSource, bytes: u32, barrier: u32 },
    /// A bulk store or reduction; `staged` once the source has been read.
    Store { src: u32, bytes: u32, target: StoreTarget, staged: Option<Vec<u8>> },
}

/// One lane of a `cp.async`.
#[derive(Clone, Copy)]
pub(crate) struct LaneCopy {
    pub(crate) lane: u32,
    /// How far the lane had waited for its earlier ones.
    pub(crate) waited: u32,
    pub(crate) dst: u32,
    pub(crate) src: u64,
    pub(crate) bytes: u32,
    pub(crate) source_bytes: u32,
}

/// Where a bulk load reads.
#[derive(Clone, Copy)]
pub(crate) enum LoadSource {
    Bytes(u64),
    Tensor { map: usize, corner: [i32; 5] },
}

/// Where a bulk store writes.
#[derive(Clone, Copy)]
pub(crate) enum StoreTarget {
    Bytes { dst: u64, add: Option<ptx::BulkElement> },
    Tensor { map: usize, corner: [i32; 5], add: bool },
}

/// What executes: a cluster in the world.
pub(crate) struct Executor<'w, 'a> {
    pub(crate) world: &'w mut World<'a>,
    pub(crate) cluster: &'w mut Cluster<'a>,
}

impl<'a> Executor<'_, 'a> {
    pub(crate) fn actor(&self, warp: &Warp<'_>, lane: Option<u32>) -> Actor {
        Actor { block: self.cluster.blocks[warp.block].index, warp: warp.in_block, lane }
    }

    /// A hazard at the warp's current instruction.
    pub(crate) fn hazard(
        &self,
        warp: &Warp<'_>,
        lane: Option<u32>,
        kind: HazardKind,
        message: impl Into<String>,
    ) -> Box<Hazard> {
        let mut hazard = self.world.hazard(kind, message);
        hazard.place = self.world.code.places[warp.pc];
        hazard.actor = Some(self.actor(warp, lane));
        hazard
    }

    /// A hazard of an operation, at the instruction that issued it.
    pub(crate) fn operation_hazard(
        &self,
        operation: &Operation,
        kind: HazardKind,
        message: impl Into<String>,
    ) -> Box<Hazard> {
        let mut hazard = self.world.hazard(kind, message);
        hazard.place = self.world.code.places[operation.step];
        hazard.actor = Some(self.operation_actor(operation));
        hazard
    }

    pub(crate) fn operation_actor(&self, operation: &Operation) -> Actor {
        let warps_per_block = self.world.program.threads / 32;
        Actor {
            block: self.cluster.blocks[operation.block].index,
            warp: operation.warp as u32 % warps_per_block,
            lane: Some(operation.lane),
        }
    }

    /// Records the accesses that the warp's current instruction is about to make.
    pub(crate) fn thread_event(
        &mut self,
        warp: &Warp<'_>,
        source: Source,
        what: &'static str,
    ) -> u32 {
        let event = Event {
            cluster: self.cluster.index,
            component: warp.clock.component,
            clock: warp.clock.now,
            proxy: Proxy::Generic,
            source,
            place: self.world.code.places[warp.pc],
            actor: self.actor(warp, None),
            what,
            since: u32::MAX,
        };
        self.world.shadow.event(event)
    }

    /// The region of shared memory that an address lies in, for messages.
    pub(crate) fn shared_name(&self, address: u32) -> String {
        let offset = address.wrapping_sub(SHARED_BASE);
        let regions = &self.world.program.shared;
        let region = regions.iter().find(|r| offset >= r.offset && offset - r.offset < r.bytes);
        match region {
            Some(region) => format!("byte {} of {:?}", offset - region.offset, region.name),
            None => format!("shared address {address:#x}"),
        }
    }

    /// The warp at an index; none is taken out while this is called.
    pub(crate) fn warp(&self, index: usize) -> &Warp<'a> {
        self.cluster.warps[index].as_ref().expect("warps are put back after each turn")
    }
}

/// A small generator (SplitMix64), so that seeds mean the same everywhere.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 11) % bound.max(1)
    }
}
