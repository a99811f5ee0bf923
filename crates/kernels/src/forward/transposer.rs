//! The transposition of 8-bit values in shared memory.
//!
//! `wgmma` takes 8-bit operands with the inner extent contiguous (K-major) only. For `P V` the
//! inner extent is the keys, but values are loaded with their columns contiguous. Three warps
//! beside the producer read every value stage and write it transposed to a second set of tiles,
//! which reach the consumers through a pipeline of their own.
//!
//! # The order of keys
//!
//! The accumulator of `Q K^T` gives a consumer thread the scores of keys `2q` and `2q + 1` of each
//! group of eight, where `q` is its lane modulo 4. As the first operand of `P V`, the thread must
//! hold four neighbouring keys. So keys are permuted inside each group of sixteen: position
//! `4q + i` holds the key `8 (i / 2) + 2q + i % 2`, both in P and in the transposed values, and no
//! register moves between threads. The transposition produces this order by itself: `ldmatrix`
//! moves bytes in pairs and gives a thread, for each eight keys, keys `2q` and `2q + 1` at two
//! columns; picking the bytes of one column out of two such registers gives those four keys.
//!
//! # Bank conflicts
//!
//! A thread writes two registers, of an even and of an odd column, each as part of an `stmatrix`
//! matrix of eight rows. If all rows of a matrix were even, they would fall into half of the banks,
//! since swizzles repeat every eight rows. So the threads of the upper eight columns write the odd
//! one first.

use ptx::{
    Builder, Expression, Fence, Pipeline, Producer, Reg, SharedAddress, SharedTiles, TileLayout,
    U32, Value,
};

use super::{Forward, Shared};

/// The number of warps that transpose: those of the producer's warpgroup but the producer's own.
pub(super) const WARPS: u32 = 3;

/// The value columns that a warp transposes with one `ldmatrix`, for [`KEYS`] keys.
const COLUMNS: u32 = 16;
const KEYS: u32 = 32;

/// The tiles of transposed values, their pipeline to the consumers, and the end marks of values.
pub(super) struct Transposed {
    pub(super) tiles: SharedTiles,
    pub(super) pipeline: Pipeline,
    /// The offset in shared memory of one word for each value stage, which is 0 where there are no
    /// more values.
    any: u32,
    value_stages: u32,
}

impl Transposed {
    /// Reserves shared memory; a stage is empty after `readers` arrivals.
    pub(super) fn new(k: &mut Builder, forward: &Forward, value_stages: u32, readers: u32) -> Self {
        let name = "transposed values";
        Transposed {
            tiles: SharedTiles::new(k, name, forward.transposed_layout(), forward.stages),
            pipeline: Pipeline::of_producers(k, name, forward.stages, WARPS, readers),
            any: k.shared("any values", 4 * value_stages, 4),
            value_stages,
        }
    }

    /// Initialises the mbarriers and the words of the value stages; called by one thread.
    pub(super) fn init(&self, k: &mut Builder) {
        self.pipeline.init(k);
        for stage in 0..self.value_stages {
            let any = k.shared_address(self.any + 4 * stage);
            k.store(any, Value::<U32>::from(1));
        }
    }

    /// Tells the transposing warps, through the next value stage, that there are no more values;
    /// called by the producer.
    pub(super) fn stop(&self, k: &mut Builder, values: &Producer) {
        let stage = values.acquire(k);
        let any = self.any_at(k, stage);
        k.store(any, Value::<U32>::from(0));
        values.commit(k);
    }

    fn any_at(&self, k: &mut Builder, stage: Reg<U32>) -> Reg<SharedAddress> {
        let first = k.shared_address(self.any);
        k.eval(first + stage * 4)
    }

    /// Emits the loop of the transposing warps: key block after key block, until there are no more.
    /// Each warp has up to `at_once` loads in flight before it stores.
    pub(super) fn transpose(&self, k: &mut Builder, shared: &Shared, at_once: usize) {
        let (thread, lane) = (k.thread_index(), k.lane());
        let warp = k.eval(thread / 32 - 1);
        let leader = k.eval(lane.equals(0));
        let read = shared.value_pipeline.consumer(k);
        let write = self.pipeline.producer(k);
        let place = Place::new(k, lane);
        let TileLayout { rows, columns, .. } = shared.values.layout();
        let keys = self.tiles.layout().columns;
        k.loop_(|k| {
            let stage = read.wait(k);
            let any = self.any_at(k, stage);
            let any = k.load::<U32, _>(any);
            k.break_if(any.equals(0));
            let room = write.acquire(k);
            for first in (0..keys).step_by(rows as usize) {
                let stage = if first == 0 { stage } else { read.wait(k) };
                let lane = place.at(k, shared, self, [stage, room]);
                k.for_range(warp, columns / COLUMNS, WARPS, |k, group| {
                    self.columns(k, shared, &place, &lane, (group, first), at_once);
                });
                // TMA overwrites what was read here, and the tensor cores read what was written.
                k.fence(Fence::ProxyAsyncShared);
                k.warp_sync();
                read.release(k, leader);
            }
            write.commit_if(k, leader);
            write.advance(k);
        });
    }

    /// Transposes sixteen columns, number `group`, of all keys of a value stage. `first` is the
    /// index of the stage's first key in its key block.
    fn columns(
        &self,
        k: &mut Builder,
        shared: &Shared,
        place: &Place,
        [from, to]: &[Reg<SharedAddress>; 2],
        (group, first): (Reg<U32>, u32),
        at_once: usize,
    ) {
        let (read, written) = (shared.values.layout(), self.tiles.layout());
        // Inside a panel the swizzle only flips address bits, and so does moving to other columns.
        let column = k.eval(group * COLUMNS);
        let width = read.panel_columns();
        let mut from = k.eval((from.reinterpret::<U32>() ^ (column % width)).reinterpret());
        if read.columns > width {
            from = k.eval(from + column / width * read.panel_bytes());
        }
        let to = k.eval(*to + column * written.swizzle.width());
        let steps: Vec<u32> = (0..read.rows).step_by(KEYS as usize).collect();
        // Several loads are issued before the first store to hide their latency. The assembler
        // cannot do that by itself: it must not move a load before a store that may be to the same
        // address.
        for batch in steps.chunks(at_once) {
            let load = |keys: &u32| {
                let address = from + keys * read.swizzle.width();
                (*keys, k.load_matrix::<U32, 4>(address, true))
            };
            let loaded: Vec<(u32, [Reg<U32>; 4])> = batch.iter().map(load).collect();
            for (keys, four) in loaded {
                let pick = |k: &mut Builder, half: usize, selector: Reg<U32>| {
                    k.permute_bytes(four[2 * half], four[2 * half + 1], selector)
                };
                let turned = [
                    pick(k, 0, place.first),
                    pick(k, 0, place.second),
                    pick(k, 1, place.first),
                    pick(k, 1, place.second),
                ];
                // Inside a panel the swizzle only flips address bits, and so does moving to other
                // keys.
                let panel = written.panel_columns();
                let keys = first + keys;
                let (far, near) = (keys / panel * written.panel_bytes(), keys % panel);
                let at = k.eval((to.reinterpret::<U32>() ^ near).reinterpret::<SharedAddress>());
                k.store_matrix(at + far, &turned, false);
            }
        }
    }
}

/// What and where a lane reads and writes.
struct Place {
    lane: Reg<U32>,
    /// The value column, of sixteen, whose row of transposed values this lane addresses for
    /// `stmatrix`; `key` is the first key of that row.
    column: Reg<U32>,
    key: Reg<U32>,
    /// The byte selectors (`prmt`) of the first and of the second register of a pair.
    first: Reg<U32>,
    second: Reg<U32>,
}

impl Place {
    /// Returns the addresses at which the lane reads in value stage `stage` and writes in
    /// transposed stage `room`, for the first sixteen columns.
    fn at(
        &self,
        k: &mut Builder,
        shared: &Shared,
        transposed: &Transposed,
        [stage, room]: [Reg<U32>; 2],
    ) -> [Reg<SharedAddress>; 2] {
        let zero = k.eval::<U32>(0);
        let from = shared.values.at(k, stage).element_address(k, self.lane, zero);
        let to = transposed.tiles.at(k, room).element_address(k, self.column, self.key);
        [from, to]
    }

    fn new(k: &mut Builder, lane: Reg<U32>) -> Self {
        // The first register takes the even bytes in the lower half of the warp and the odd ones in
        // the upper half; the second register takes the others.
        let even = 0x6420u32;
        let odd = 0x1111u32;
        let first = k.eval(lane / 16 * odd + even);
        let second = k.eval(first ^ odd);
        // Of the four matrices, those with an even index come from the first register of a pair,
        // the others from the second.
        let swapped = k.eval(((lane / 8) ^ (lane / 4)) & 1);
        Place {
            lane,
            column: k.eval(lane % 8 * 2 + swapped),
            key: k.eval(lane / 16 * 16),
            first,
            second,
        }
    }
}
