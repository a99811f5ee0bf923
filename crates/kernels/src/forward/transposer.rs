//! Values of 8 bits, transposed on the way through shared memory.
//!
//! The tensor cores take 8-bit operands with the inner extent contiguous only: of `P V` those are
//! keys, and values come with their columns contiguous. Three warps beside the producer read
//! every block of values as it came and write it transposed, through a pipeline of its own to the
//! consumers.
//!
//! # The order of keys
//!
//! A thread of a consumer holds the scores of keys `2q` and `2q + 1` of each group of eight,
//! where `q` is its lane modulo 4; as the first operand of the next product it must hold four
//! neighbours. So keys trade places inside each sixteen: position `4q + i` has the key
//! `8 (i / 2) + 2q + i % 2`, of weights and of transposed values alike, and no register moves
//! between threads. It is also the order that falls out of the transposing: `ldmatrix` takes
//! bytes in pairs and gives a thread, of each eight keys, keys `2q` and `2q + 1` at two columns;
//! picking the bytes of one column out of two such registers gives those four keys.
//!
//! # Banks
//!
//! A register with the even and one with the odd of two columns leave as matrices of eight rows.
//! All even rows would meet in half of the banks, since swizzles go by eight rows; so threads of
//! the upper eight columns have the odd one first.

use ptx::{
    Builder, Expression, Fence, Pipeline, Producer, Reg, SharedAddress, SharedTiles, TileLayout,
    U32, Value,
};

use super::{Forward, Shared};

/// Warps that transpose: the producer's warpgroup less the warp of the producer.
pub(super) const WARPS: u32 = 3;

/// Columns of values, and keys, that a warp transposes at once.
const COLUMNS: u32 = 16;
const KEYS: u32 = 32;

/// Transposed values.
pub(super) struct Transposed {
    pub(super) tiles: SharedTiles,
    pub(super) pipeline: Pipeline,
    /// Where in shared memory a word for each stage of values says whether there are any.
    any: u32,
    value_stages: u32,
}

impl Transposed {
    /// Reserves the shared memory; `readers` arrivals empty a stage.
    pub(super) fn new(k: &mut Builder, forward: &Forward, value_stages: u32, readers: u32) -> Self {
        let name = "transposed values";
        Transposed {
            tiles: SharedTiles::new(k, name, forward.transposed_layout(), forward.stages),
            pipeline: Pipeline::of_producers(k, name, forward.stages, WARPS, readers),
            any: k.shared("any values", 4 * value_stages, 4),
            value_stages,
        }
    }

    /// One thread makes barriers and words ready.
    pub(super) fn init(&self, k: &mut Builder) {
        self.pipeline.init(k);
        for stage in 0..self.value_stages {
            let any = k.shared_address(self.any + 4 * stage);
            k.store(any, Value::<U32>::from(1));
        }
    }

    /// The producer has no more values.
    pub(super) fn stop(&self, k: &mut Builder, values: &Producer) {
        let stage = values.acquire(k);
        let any = self.any_at(k, stage);
        k.store(any, Value::<U32>::from(0));
        values.publish(k);
    }

    fn any_at(&self, k: &mut Builder, stage: Reg<U32>) -> Reg<SharedAddress> {
        let first = k.shared_address(self.any);
        k.eval(first + stage * 4)
    }

    /// What the warps behind the producer's do: block after block, until there are none. They load
    /// so often before they store.
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
                // What was read is overwritten, and what was written is read, by other engines.
                k.fence(Fence::ProxyAsyncShared);
                k.warp_sync();
                read.release(k, leader);
            }
            write.publish_if(k, leader);
            write.advance(k);
        });
    }

    /// Sixteen columns of all keys that a stage has; `first` is its first key's place in a block.
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
        // Inside a panel the swizzle only flips bits, and so do further columns.
        let column = k.eval(group * COLUMNS);
        let width = read.panel_columns();
        let mut from = k.eval((from.reinterpret::<U32>() ^ (column % width)).reinterpret());
        if read.columns > width {
            from = k.eval(from + column / width * read.panel_bytes());
        }
        let to = k.eval(*to + column * written.swizzle.width());
        let steps: Vec<u32> = (0..read.rows).step_by(KEYS as usize).collect();
        // Loads wait for shared memory: several are under way at once. The assembler cannot move
        // one before a store that may be to the same place.
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
                // Inside a panel the swizzle only flips bits, and so do further keys.
                let panel = written.panel_columns();
                let keys = first + keys;
                let (far, near) = (keys / panel * written.panel_bytes(), keys % panel);
                let at = k.eval((to.reinterpret::<U32>() ^ near).reinterpret::<SharedAddress>());
                k.store_matrix(at + far, &turned, false);
            }
        }
    }
}

/// Where a lane reads and writes.
struct Place {
    lane: Reg<U32>,
    /// The column of values, of sixteen, whose keys it gives the address of, and the first of
    /// those keys.
    column: Reg<U32>,
    key: Reg<U32>,
    /// Which bytes go into the first and the second of two registers.
    first: Reg<U32>,
    second: Reg<U32>,
}

impl Place {
    /// Where it reads and writes in two stages, of the first columns.
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
        // Even bytes in the lower half of the warp, odd ones in the upper; then the others.
        let even = 0x6420u32;
        let odd = 0x1111u32;
        let first = k.eval(lane / 16 * odd + even);
        let second = k.eval(first ^ odd);
        // Matrix i of four has the first or the second of sixteen keys, by its lowest bit.
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
