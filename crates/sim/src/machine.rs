//! The state of a run: the [`GridState`] that all blocks share, and each resident [`Cluster`] with
//! its blocks, warps, barriers and asynchronous operations.

use std::collections::{BTreeMap, HashMap, VecDeque};

use ptx::{Program, Scope, SourceLocation};

use crate::clock::{ClockSet, Entry, VectorClock, WarpClock, copies_of};
use crate::hazard::{Actor, Hazard, HazardKind};
use crate::lower::Code;
use crate::memory::Memory;
use crate::shadow::{Cells, Event, Proxy, Shadow, Source};
use crate::warp::Warp;
use crate::{Counts, Launch, Mode, Options, TensorMapArgument, Trace};

/// The address at which dynamic shared memory starts: Hopper reserves the first KiB.
pub(crate) const SHARED_BASE: u32 = 1024;
/// The size of each block's window in the shared-memory addresses of a cluster.
pub(crate) const CLUSTER_WINDOW: u32 = 1 << 24;
/// The first address of tensor maps, which are 128 bytes apart.
pub(crate) const TENSOR_MAPS: u64 = 1 << 62;

/// The result of everything that executes; its error is a boxed hazard.
pub(crate) type Executed<T> = Result<T, Box<Hazard>>;

/// The state that all blocks share.
pub(crate) struct GridState<'a> {
    pub(crate) program: &'a Program,
    pub(crate) code: &'a Code,
    pub(crate) options: &'a Options,
    pub(crate) grid: u32,
    pub(crate) checked: bool,
    /// Whether blocks wait for earlier grids before they access global memory.
    pub(crate) waits_for_grids: bool,
    pub(crate) memory: &'a mut Memory,
    pub(crate) parameters: Vec<u64>,
    pub(crate) maps: Vec<Option<TensorMapArgument>>,
    pub(crate) random: Random,
    pub(crate) counts: Counts,
    /// The number of steps of all warps so far, control flow included.
    pub(crate) steps: u64,
    /// A counter that grows whenever something happens that a polling warp might observe.
    pub(crate) progress: u64,
    pub(crate) trace: Option<Trace>,
    /// Whether any warp has reached each step.
    pub(crate) reached: Vec<bool>,
    pub(crate) shadow: Shadow,
    pub(crate) global: Vec<Cells>,
    /// The releases at each address, by ordered stores and atomics.
    pub(crate) releases: HashMap<u64, Vec<Release>>,
    /// The values of `e4m3` and `e5m2`, indexed by their bits.
    pub(crate) small: [[f32; 256]; 2],
}

/// What a thread knew when it released at an address, and the scope of the release.
#[derive(Clone, Debug)]
pub(crate) struct Release {
    pub(crate) cluster: u32,
    pub(crate) block: u32,
    pub(crate) scope: Scope,
    pub(crate) knowledge: ClockSet,
}

impl Release {
    /// Returns whether the release and an acquire of `scope` in this cluster and block synchronise:
    /// each must be within the scope of the other.
    pub(crate) fn reaches(&self, cluster: u32, block: u32, scope: Scope) -> bool {
        [self.scope, scope].into_iter().all(|scope| match scope {
            Scope::Block => self.block == block,
            Scope::Cluster => self.cluster == cluster,
            Scope::Gpu | Scope::System => true,
        })
    }
}

impl<'a> GridState<'a> {
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
        GridState {
            program: launch.program,
            code,
            options,
            grid: launch.grid,
            checked,
            waits_for_grids: launch.program.waits_for_grids(),
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
    /// The cluster's index in the grid.
    pub(crate) index: u32,
    pub(crate) blocks: Vec<Block>,
    pub(crate) warps: Vec<Option<Box<Warp<'a>>>>,
    pub(crate) groups: Vec<Warpgroup>,
    pub(crate) operations: BTreeMap<u64, Operation>,
    pub(crate) next_operation: u64,
    pub(crate) barrier: ClusterBarrier,
    /// The clocks of the components of bulk loads in flight, one each.
    slots: Vec<u32>,
    /// The index of the warp that ran last.
    pub(crate) current: usize,
    /// The cycle from which the tensor cores of each block are free, in the cost model.
    pub(crate) tensor_free: Vec<u64>,
    /// The cycle from which the copy engine of each block is free, in the cost model.
    pub(crate) copy_free: Vec<u64>,
    /// The cycle from which each of the four warp schedulers of each block is free, in the cost
    /// model.
    pub(crate) issue_free: Vec<u64>,
}

/// The number of clock components of a warp: its threads, its `cp.async`s, and the reads and the
/// writes of its bulk stores.
const WARP_COMPONENTS: u32 = 4;

impl<'a> Cluster<'a> {
    pub(crate) fn new(grid_state: &GridState<'a>, index: u32) -> Self {
        let program = grid_state.program;
        let blocks = program.cluster.max(1);
        let warps_per_block = program.threads / 32;
        let mut warps = Vec::new();
        for block in 0..blocks {
            for in_block in 0..warps_per_block {
                let number = warps.len();
                let mut warp = Warp::new(grid_state.code, number, block as usize, in_block);
                warp.registers = program.registers_at_entry();
                let groups_per_block = warps_per_block.div_ceil(4);
                warp.group = (block * groups_per_block + in_block / 4) as usize;
                if grid_state.checked {
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
            blocks: (0..blocks).map(|rank| Block::new(grid_state, index * blocks + rank)).collect(),
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

    /// Returns the clock component of a warpgroup's stream of products.
    pub(crate) fn product_component(&self, group: usize) -> u32 {
        self.warps.len() as u32 * WARP_COMPONENTS + group as u32
    }

    fn slot_component(&self, slot: usize) -> u32 {
        self.product_component(self.groups.len()) + slot as u32
    }

    /// Returns a clock component and a clock for a bulk load. A slot is reused once the issuer
    /// knows that its earlier load is over.
    pub(crate) fn take_slot(&mut self, issuer: &ClockSet) -> (u32, u32) {
        for slot in 0..self.slots.len() {
            let component = self.slot_component(slot);
            if issuer.known.get(component).all >= self.slots[slot] {
                self.slots[slot] += 1;
                return (component, self.slots[slot]);
            }
        }
        self.slots.push(1);
        (self.slot_component(self.slots.len() - 1), 1)
    }

    pub(crate) fn is_done(&self) -> bool {
        self.blocks.iter().all(|block| block.live_warps == 0)
    }
}

/// Returns the clock component of a warp's stream of `cp.async`s.
pub(crate) fn copy_component(warp: usize) -> u32 {
    copies_of(warp as u32 * WARP_COMPONENTS)
}

pub(crate) fn store_read_component(warp: usize) -> u32 {
    warp as u32 * WARP_COMPONENTS + 2
}

pub(crate) fn store_write_component(warp: usize) -> u32 {
    warp as u32 * WARP_COMPONENTS + 3
}

/// Returns the clock entry of a stream whose operations up to `clock` are over.
pub(crate) fn stream_entry(clock: u32) -> Entry {
    Entry::of(u32::MAX, clock, 0)
}

/// A block of the cluster.
pub(crate) struct Block {
    /// The block's index in the grid.
    pub(crate) index: u32,
    pub(crate) shared: Vec<u8>,
    pub(crate) cells: Cells,
    /// For each four bytes of shared memory, the number of copies in flight that will write them,
    /// and below the number of operations in flight that will read them.
    pub(crate) pending_writes: Vec<u16>,
    pub(crate) pending_reads: Vec<u16>,
    pub(crate) mbarriers: BTreeMap<u32, Mbarrier>,
    pub(crate) named_barriers: Vec<NamedBarrier>,
    pub(crate) live_warps: u32,
    /// The waits of threads of the block for earlier grids.
    pub(crate) grid_waits: Vec<GridWait>,
    /// The last access of each thread, and of each stream of copies, of another block to this
    /// block's shared memory, by clock component and lanes. It must happen before this block ends.
    pub(crate) remote_accesses: BTreeMap<(u32, u32), RemoteAccess>,
    /// The number of free registers, which no warp holds.
    pub(crate) register_pool: u32,
}

impl Block {
    fn new(grid_state: &GridState<'_>, index: u32) -> Self {
        let program = grid_state.program;
        let bytes = program.shared_bytes() as usize;
        let shadow = if grid_state.checked { bytes } else { 0 };
        Block {
            index,
            // Uninitialised shared memory: all ones, which is NaN in every float format.
            shared: vec![0xFF; bytes],
            cells: Cells::new(shadow, false),
            pending_writes: vec![0; shadow.div_ceil(4)],
            pending_reads: vec![0; shadow.div_ceil(4)],
            mbarriers: BTreeMap::new(),
            named_barriers: vec![NamedBarrier::default(); 16],
            live_warps: program.threads / 32,
            grid_waits: Vec::new(),
            remote_accesses: BTreeMap::new(),
            // At entry the threads hold all registers of the block.
            register_pool: 0,
        }
    }
}

/// A wait for earlier grids: the lanes of a warp that have waited, and when.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GridWait {
    pub(crate) component: u32,
    pub(crate) clock: u32,
    pub(crate) lanes: u32,
}

/// An access to a block's shared memory from another block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteAccess {
    pub(crate) clock: u32,
    pub(crate) place: Option<SourceLocation>,
    pub(crate) actor: Actor,
}

/// The state of an mbarrier.
#[derive(Clone, Debug)]
pub(crate) struct Mbarrier {
    /// The arrivals of a phase, and those still missing in the current one.
    pub(crate) expected: u32,
    pub(crate) pending: u32,
    /// The bytes expected in the current phase less those that have arrived.
    pub(crate) transactions: i64,
    pub(crate) phase: u64,
    pub(crate) initialised_at: Option<SourceLocation>,
    /// The epoch and the lane of the initialisation.
    pub(crate) component: u32,
    pub(crate) clock: u32,
    pub(crate) lane: u32,
    /// Whether a fence has made the initialisation visible beyond the threads of the block.
    pub(crate) published: bool,
    pub(crate) releases: PhaseReleases,
    /// The number of copies in flight that will report to this mbarrier.
    pub(crate) in_flight: u32,
    /// The warps that have arrived, latest last, for messages about deadlocks.
    pub(crate) arrivers: Vec<(usize, SourceLocation)>,
    pub(crate) expected_at: Option<SourceLocation>,
    /// The number of phases that had ended when a thread last waited.
    pub(crate) waited: u64,
    /// The arrivals of threads in the current phase and in the one before.
    pub(crate) arrivals: PhaseArrivals,
}

/// The arrivals of threads at a barrier in the current phase and in the one before, in checked
/// mode.
#[derive(Clone, Debug, Default)]
pub(crate) struct PhaseArrivals {
    current: Vec<Arrival>,
    previous: Vec<Arrival>,
}

/// An arrival at a barrier: its epoch, and where it is in the source.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) component: u32,
    pub(crate) clock: u32,
    /// The lanes that arrived; none if the warp arrived as a whole, which each of its lanes knows.
    pub(crate) lanes: u32,
    pub(crate) actor: Actor,
    pub(crate) place: Option<SourceLocation>,
}

impl PhaseArrivals {
    /// Records an arrival. Returns an arrival of the previous phase that does not happen before it
    /// although another warp made it: under another schedule the new arrival comes first, and
    /// counts for that phase. `known` is what happened before the new arrival.
    pub(crate) fn add(&mut self, arrival: Arrival, known: &VectorClock) -> Option<Arrival> {
        match self.current.last_mut() {
            Some(last) if (last.component, last.clock) == (arrival.component, arrival.clock) => {
                last.lanes |= arrival.lanes;
            }
            _ => self.current.push(arrival),
        }
        let is_unordered = |it: &&Arrival| {
            let of_another = it.component != arrival.component;
            of_another && !known.get(it.component).covers(it.clock, it.lanes)
        };
        self.previous.iter().find(is_unordered).copied()
    }

    /// Ends the phase.
    pub(crate) fn advance(&mut self) {
        self.previous = std::mem::take(&mut self.current);
    }
}

/// What arrivals at a barrier release.
#[derive(Clone, Debug, Default)]
pub(crate) struct PhaseReleases {
    /// What the arrivals of the current phase release.
    pub(crate) current: ClockSet,
    /// What those of all completed phases released, which a wait acquires.
    pub(crate) completed: ClockSet,
    /// The cycle at which the last phase was completed, in the cost model.
    pub(crate) completed_at: u64,
}

impl PhaseReleases {
    /// Ends the phase.
    pub(crate) fn advance(&mut self, time: u64) {
        self.completed.join(&std::mem::take(&mut self.current));
        self.completed_at = self.completed_at.max(time);
    }
}

/// The state of a named barrier.
#[derive(Clone, Debug, Default)]
pub(crate) struct NamedBarrier {
    pub(crate) expected: u32,
    pub(crate) arrived: Vec<usize>,
    pub(crate) generation: u64,
    pub(crate) releases: PhaseReleases,
    pub(crate) first_at: Option<SourceLocation>,
    /// The arrivals for the current generation and for the one before.
    pub(crate) arrivals: PhaseArrivals,
}

/// The state of the cluster barrier.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClusterBarrier {
    pub(crate) generation: u64,
    pub(crate) releases: PhaseReleases,
}

/// The queue of products of a warpgroup.
#[derive(Default)]
pub(crate) struct Warpgroup {
    pub(crate) queue: VecDeque<Product>,
    /// The number of products that have finished.
    pub(crate) done: u64,
    /// The cycle at which the last one finished, in the cost model.
    pub(crate) finished_at: u64,
}

/// A product that some or all warps of a warpgroup have issued.
pub(crate) struct Product {
    pub(crate) number: u64,
    /// The index of the `wgmma` step that issued it.
    pub(crate) step: usize,
    /// A mask of the warps of the warpgroup that have issued it.
    pub(crate) issued: u8,
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) accumulate: bool,
    /// The identifier of the next operation when it was issued: operations from this one on came
    /// later.
    pub(crate) after: u64,
    pub(crate) since: u32,
    pub(crate) start: ClockSet,
    pub(crate) issued_at: u64,
}

/// An asynchronous operation in flight.
pub(crate) struct Operation {
    pub(crate) kind: OperationKind,
    /// The index of the step that issued it.
    pub(crate) step: usize,
    /// The identifier of the operation, and the number of access events recorded before it was
    /// issued.
    pub(crate) issued: u64,
    pub(crate) since: u32,
    /// The issuing warp and lane.
    pub(crate) warp: usize,
    pub(crate) lane: u32,
    pub(crate) block: usize,
    /// What the issuer knew at the issue.
    pub(crate) start: ClockSet,
    pub(crate) component: u32,
    pub(crate) clock: u32,
    pub(crate) issued_at: u64,
    pub(crate) ready_at: u64,
}

/// The kind of an asynchronous operation.
pub(crate) enum OperationKind {
    /// A `cp.async` of the active lanes of a warp.
    CopyAsync(Vec<LaneCopy>),
    /// An arrival of each lane at an mbarrier once the operations `after` are over.
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
    /// The clock up to which the lane had waited for its earlier `cp.async`s.
    pub(crate) waited: u32,
    pub(crate) dst: u32,
    pub(crate) src: u64,
    pub(crate) bytes: u32,
    pub(crate) source_bytes: u32,
}

/// The source of a bulk load.
#[derive(Clone, Copy)]
pub(crate) enum LoadSource {
    Bytes(u64),
    Tensor { map: usize, corner: [i32; 5] },
}

/// The destination of a bulk store.
#[derive(Clone, Copy)]
pub(crate) enum StoreTarget {
    Bytes { dst: u64, add: Option<ptx::BulkElement> },
    Tensor { map: usize, corner: [i32; 5], add: bool },
}

/// The executor: a cluster together with the state that all clusters share.
pub(crate) struct Executor<'w, 'a> {
    pub(crate) grid_state: &'w mut GridState<'a>,
    pub(crate) cluster: &'w mut Cluster<'a>,
}

impl<'a> Executor<'_, 'a> {
    pub(crate) fn actor(&self, warp: &Warp<'_>, lane: Option<u32>) -> Actor {
        Actor { block: self.cluster.blocks[warp.block].index, warp: warp.in_block, lane }
    }

    /// Creates a hazard at the warp's current instruction.
    pub(crate) fn hazard(
        &self,
        warp: &Warp<'_>,
        lane: Option<u32>,
        kind: HazardKind,
        message: impl Into<String>,
    ) -> Box<Hazard> {
        let mut hazard = self.grid_state.hazard(kind, message);
        hazard.place = self.grid_state.code.places[warp.pc];
        hazard.actor = Some(self.actor(warp, lane));
        hazard
    }

    /// Creates a hazard of an operation, at the instruction that issued it.
    pub(crate) fn operation_hazard(
        &self,
        operation: &Operation,
        kind: HazardKind,
        message: impl Into<String>,
    ) -> Box<Hazard> {
        let mut hazard = self.grid_state.hazard(kind, message);
        hazard.place = self.grid_state.code.places[operation.step];
        hazard.actor = Some(self.operation_actor(operation));
        hazard
    }

    pub(crate) fn operation_actor(&self, operation: &Operation) -> Actor {
        let warps_per_block = self.grid_state.program.threads / 32;
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
            place: self.grid_state.code.places[warp.pc],
            actor: self.actor(warp, None),
            what,
            since: u32::MAX,
        };
        self.grid_state.shadow.event(event)
    }

    /// Returns a description of a shared address for messages: its region and the byte in it.
    pub(crate) fn shared_name(&self, address: u32) -> String {
        let offset = address.wrapping_sub(SHARED_BASE);
        let regions = &self.grid_state.program.shared;
        let region = regions.iter().find(|r| offset >= r.offset && offset - r.offset < r.bytes);
        match region {
            Some(region) => format!("byte {} of {:?}", offset - region.offset, region.name),
            None => format!("shared address {address:#x}"),
        }
    }

    /// Returns the warp at an index. Must not be called while a warp is taken out for its turn.
    pub(crate) fn warp(&self, index: usize) -> &Warp<'a> {
        self.cluster.warps[index].as_ref().expect("warps are put back after each turn")
    }
}

/// A small random generator (SplitMix64), so that a seed gives the same run on every machine.
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

    /// Returns a number below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 11) % bound.max(1)
    }
}
