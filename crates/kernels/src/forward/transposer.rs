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
    Builder, Expression, Fence, Pipeline, Producer, Reg, SharedAddress, SharedTiles, U32, Value,
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

    /// What the warps behind the producer's do: block after block, until there are none.
    pub(super) fn transpose(&self, k: &mut Builder, shared: &Shared) {
        let (thread, lane) = (k.thread_index(), k.lane());
        let warp = k.eval(thread / 32 - 1);
        let leader = k.eval(lane.equals(0));
        let read = shared.value_pipeline.consumer(k);
        let write = self.pipeline.producer(k);
        let place = Place::new(k, lane);
        let groups = shared.values.layout().columns / COLUMNS;
        k.loop_(|k| {
            let stage = read.wait(k);
            let any = self.any_at(k, stage);
            let any = k.load::<U32, _>(any);
            k.break_if(any.equals(0));
            let room = write.acquire(k);
            k.for_range(warp, groups, WARPS, |k, group| {
                self.columns(k, shared, &place, [stage, room], group);
            });
            // What was read is overwritten, and what was written is read, by other engines.
            k.fence(Fence::ProxyAsyncShared);
            k.warp_sync();
            write.publish_if(k, leader);
            write.advance(k);
            read.release(k, leader);
        });
    }

    /// Sixteen columns of all keys.
    fn columns(
        &self,
        k: &mut Builder,
        shared: &Shared,
        place: &Place,
        [stage, room]: [Reg<U32>; 2],
        group: Reg<U32>,
    ) {
        let values = shared.values.at(k, stage);
        let from = values.element_address(k, place.lane, group * COLUMNS);
        let target = self.tiles.at(k, room);
        let row = k.eval(group * COLUMNS + place.column);
        let to = target.element_address(k, row, place.key);
        let (read, written) = (values.layout(), target.layout());
        for keys in (0..read.rows).step_by(KEYS as usize) {
            let four = k.load_matrix::<U32, 4>(from + keys * read.swizzle.width(), true);
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
            let (far, near) = (keys / panel * written.panel_bytes(), keys % panel);
            let at = k.eval((to.reinterpret::<U32>() ^ near).reinterpret::<SharedAddress>());
            k.store_matrix(at + far, &turned, false);
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
