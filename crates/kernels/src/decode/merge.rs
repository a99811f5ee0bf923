//! The epilogue of a part of a sequence: the results of the warps are merged and stored, as outputs
//! and log-sum-exps, or as a partial result in the workspace.

use ptx::{Builder, Expression, F32, GlobalAddress, Packed, Reg, Select, SharedAddress, U32, U64};

use super::combine::Combine;
use super::scales::Scaling;
use super::schedule::{Part, Rows};
use super::walk::Walk;
use super::{Decode, Numbers, Splits};
use crate::attention::rows::{Finished, Reference, Sinks, finish, reference};
use crate::parameter::{Axis, Tensor, Workspace};
use crate::strides::Strides;

/// The output tensors and the workspace, as launch parameters.
pub(super) struct Results {
    output: Reg<GlobalAddress>,
    strides: Strides,
    lse: Reg<GlobalAddress>,
    lse_batch: Reg<U64>,
    lse_head: Reg<U64>,
    pub(super) parts: Reg<GlobalAddress>,
    pub(super) counters: Reg<GlobalAddress>,
}

impl Results {
    pub(super) fn parameters(k: &mut Builder) -> Self {
        Results {
            output: Tensor::Output.address(k),
            strides: Strides::parameters(k, Tensor::Output),
            lse: Tensor::Lse.address(k),
            lse_batch: Tensor::Lse.stride(k, Axis::Batch),
            lse_head: Tensor::Lse.stride(k, Axis::Head),
            parts: Workspace::Partials.address(k),
            counters: Workspace::Counters.address(k),
        }
    }
}

/// Four neighbouring output columns of a query row: the granule that a thread merges and stores.
pub(super) struct Item {
    pub(super) row: Reg<U32>,
    pub(super) column: Reg<U32>,
}

/// The sums of an item: unnormalised outputs, and the maximum and sum of its row.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    pub(super) outputs: [Reg<F32>; 4],
    pub(super) maximum: Reg<F32>,
    pub(super) sum: Reg<F32>,
}

/// The shared memory and the parameters of the merge.
pub(super) struct Merge<'a> {
    pub(super) decode: &'a Decode,
    pub(super) numbers: &'a Numbers,
    pub(super) results: Results,
    sinks: Option<Sinks>,
    scaling: &'a Scaling,
    /// Outputs by warp, row and column, in `f32`; reused for the factors of parts when parts are
    /// combined.
    pub(super) outputs: Reg<SharedAddress>,
    /// Maximum and sum by warp and row, in `f32`.
    pub(super) rows: Reg<SharedAddress>,
    /// A flag that tells all threads whether this block was the last to arrive.
    pub(super) last: Reg<SharedAddress>,
    pub(super) thread: Reg<U32>,
}

impl<'a> Merge<'a> {
    pub(super) fn new(
        k: &mut Builder,
        decode: &'a Decode,
        numbers: &'a Numbers,
        results: Results,
        sinks: Option<Sinks>,
        scaling: &'a Scaling,
    ) -> Self {
        let rows = decode.warps * decode.rows;
        let outputs = k.shared("merged outputs", 4 * rows * decode.value_head_dim, 16);
        let statistics = k.shared("merged rows", 8 * rows, 8);
        let last = k.shared("last", 4, 4);
        Merge {
            decode,
            numbers,
            results,
            sinks,
            scaling,
            outputs: k.shared_address(outputs),
            rows: k.shared_address(statistics),
            last: k.shared_address(last),
            thread: k.thread_index(),
        }
    }

    /// Finishes a part. All warps of the block must call it.
    pub(super) fn finish(&self, k: &mut Builder, walk: &Walk<'_>, part: &Part) {
        self.collect(k, walk);
        self.each_item(k, &part.rows, |k, item| {
            let sums = self.merged(k, &item);
            k.if_else(
                part.whole,
                |k| self.store(k, &part.rows, &item, &sums),
                |k| self.store_part(k, part, &item, &sums),
            );
        });
        k.if_(!part.whole, |k| Combine::new(k, self, part).run(k));
    }

    /// Writes the results of all warps to shared memory, between two block barriers.
    pub(super) fn collect(&self, k: &mut Builder, walk: &Walk<'_>) {
        // Threads may still read the results of the part before.
        k.block_sync();
        self.deposit(k, walk);
        k.block_sync();
    }

    /// Returns the byte offset of an output in a warp's shared memory. Columns are XOR-swizzled in
    /// groups of eight by the pair of rows: a warp stores to four rows at a time, one of each pair,
    /// which would otherwise fall into the same banks.
    fn output_byte(&self, row: Reg<U32>, column: Reg<U32>) -> ptx::Value<U32> {
        let swizzle = row / 2 % 4 * 8;
        // The swizzle permutes groups of 32 columns, so other widths are left as they are.
        let permuted = match self.decode.value_head_dim % 32 {
            0 => column ^ swizzle,
            _ => column.into(),
        };
        (row * self.decode.value_head_dim + permuted) * 4
    }

    /// Writes the warp's results to shared memory.
    fn deposit(&self, k: &mut Builder, walk: &Walk<'_>) {
        let Numbers { warp, lane, .. } = *self.numbers;
        let decode = self.decode;
        let rows = k.eval(self.rows + warp * (8 * decode.rows));
        let outputs = k.eval(self.outputs + warp * (4 * decode.rows * decode.value_head_dim));
        if let Some(scale) = &walk.output_scale {
            let scale = scale.value(k);
            walk.output.scale(k, scale);
        }
        for eight in 0..decode.rows as usize / 8 {
            let sum = k.reduce_lanes(walk.softmax.sum[eight], 4, |a, b| a + b);
            k.if_((lane % 4).equals(0), |k| {
                let at = rows + lane / 4 * 8 + 64 * eight;
                k.store_vector(at, &[walk.softmax.maximum[eight], sum], Default::default());
            });
            for odd in 0..2 {
                let row = k.eval(lane % 4 * 2 + (8 * eight + odd));
                for (tile, _, cell) in walk.output.eight(eight).cells() {
                    if decode.cache.is_8_bit() {
                        // The thread's two columns are neighbours: see `Output`.
                        let column = k.eval(lane / 4 * 2 + 16 * tile);
                        let at = outputs + self.output_byte(row, column);
                        let pair = [0, 1].map(|half| cell.pair(half)[odd]);
                        k.store_vector(at, &pair, Default::default());
                        continue;
                    }
                    for half in 0..2 {
                        let first = (16 * tile + 8 * half) as u32;
                        if first >= decode.value_head_dim {
                            continue;
                        }
                        let column = k.eval(lane / 4 + first);
                        let at = outputs + self.output_byte(row, column);
                        k.store(at, cell.pair(half)[odd]);
                    }
                }
            }
        }
    }

    /// Runs `body` for every item of the part's rows, which the threads of the block share.
    pub(super) fn each_item(
        &self,
        k: &mut Builder,
        rows: &Rows,
        body: impl Fn(&mut Builder, Item),
    ) {
        let items = self.items(k, rows);
        k.for_range(self.thread, items, self.decode.threads(), |k, item| {
            let item = self.item(k, item);
            body(k, item);
        });
    }

    /// Returns the number of items of the rows.
    pub(super) fn items(&self, k: &mut Builder, rows: &Rows) -> Reg<U32> {
        let rows = k.eval(rows.count.minimum(self.decode.rows));
        k.eval(rows * (self.decode.value_head_dim / 4))
    }

    /// Returns the item with this number: items go through the columns of a row first.
    pub(super) fn item(&self, k: &mut Builder, number: Reg<U32>) -> Item {
        let width = self.decode.value_head_dim / 4;
        let row = k.eval(number / width);
        let column = k.eval((number - row * width) * 4);
        Item { row, column }
    }

    /// Loads the maximum and the sum of an item's row, for each warp.
    pub(super) fn statistics(&self, k: &mut Builder, item: &Item) -> Vec<[Reg<F32>; 2]> {
        let decode = self.decode;
        let warps = (0..decode.warps).map(|warp| {
            let at = self.rows + item.row * 8 + warp * 8 * decode.rows;
            k.load_vector(at, Default::default())
        });
        warps.collect()
    }

    /// Loads an item's outputs of one warp.
    pub(super) fn outputs(&self, k: &mut Builder, item: &Item, warp: u32) -> [Reg<F32>; 4] {
        let at = self.outputs
            + self.output_byte(item.row, item.column)
            + warp * 4 * self.decode.rows * self.decode.value_head_dim;
        k.load_vector(at, Default::default())
    }

    /// Returns an item's sums over the warps, relative to the largest maximum.
    fn merged(&self, k: &mut Builder, item: &Item) -> Sums {
        let statistics = self.statistics(k, item);
        let mut maximum = statistics[0][0];
        for [other, _] in &statistics[1..] {
            maximum = k.eval(maximum.maximum(*other));
        }
        let reference = reference(k, maximum);
        let mut sum = k.eval::<F32>(0.0);
        let mut outputs = [0.0f32; 4].map(|zero| k.eval(zero));
        for (warp, [warp_maximum, warp_sum]) in (0u32..).zip(statistics) {
            let factor = k.exp2(warp_maximum - reference);
            sum = k.fma(factor, warp_sum, sum);
            let values = self.outputs(k, item, warp);
            for (output, value) in outputs.iter_mut().zip(values) {
                *output = k.fma(factor, value, *output);
            }
        }
        Sums { outputs, maximum, sum }
    }

    /// Stores an item of a part into the workspace: slot 1 of the block for a sequence that begins
    /// in its share, slot 0 otherwise.
    fn store_part(&self, k: &mut Builder, part: &Part, item: &Item, sums: &Sums) {
        let block = k.block_index();
        let slot = k.eval(block * 2 + part.begins.select::<U32>(1, 0));
        self.store_at(k, slot, item, sums);
    }

    /// Stores an item into a workspace slot; the item of a row's first columns stores maximum and
    /// sum.
    pub(super) fn store_at(&self, k: &mut Builder, slot: Reg<U32>, item: &Item, sums: &Sums) {
        let address = self.part_address(k, slot);
        let place = item.row * self.decode.value_head_dim + item.column;
        k.store_vector(address + (place * 4).convert::<U64>(), &sums.outputs, Default::default());
        k.if_(item.column.equals(0), |k| {
            let place = item.row * 2 + self.decode.rows * self.decode.value_head_dim;
            let at = address + (place * 4).convert::<U64>();
            k.store_vector(at, &[sums.maximum, sums.sum], Default::default());
        });
    }

    /// Loads an item from a workspace slot that this block has stored.
    pub(super) fn load_from(&self, k: &mut Builder, slot: Reg<U32>, item: &Item) -> Sums {
        let address = self.part_address(k, slot);
        let place = item.row * self.decode.value_head_dim + item.column;
        let outputs = k.load_vector(address + (place * 4).convert::<U64>(), Default::default());
        let place = item.row * 2 + self.decode.rows * self.decode.value_head_dim;
        let at = address + (place * 4).convert::<U64>();
        let [maximum, sum] = k.load_vector(at, Default::default());
        Sums { outputs, maximum, sum }
    }

    /// Returns the address of a workspace slot.
    pub(super) fn part_address(&self, k: &mut Builder, slot: Reg<U32>) -> Reg<GlobalAddress> {
        let bytes = self.decode.part_bytes();
        k.eval(self.results.parts + slot.convert::<U64>() * bytes)
    }

    /// Normalises an item and stores it; the item of a row's first columns stores the log-sum-exp.
    pub(super) fn store(&self, k: &mut Builder, rows: &Rows, item: &Item, sums: &Sums) {
        let numbers = self.numbers;
        let row = k.eval(numbers.first_row + item.row);
        let (query, member) = numbers.group.divide(k, row);
        let head = k.eval(numbers.key_head * numbers.group.number + member);
        let place = k.eval(rows.first_query + query);
        let sink = self.sinks.map(|sinks| sinks.of(k, head));
        let Finished { mut factor, log_sum } =
            finish(k, Reference::Maximum(sums.maximum), sums.sum, sink);
        if let Some(scale) = self.scaling.values.of_head(k, rows.sequence, numbers.key_head) {
            factor = k.eval(factor * scale);
        }

        let at = [rows.sequence, place, head];
        let address =
            self.results.strides.row_address(k, self.results.output, self.decode.element, at);
        let bytes = (item.column * self.decode.element.bytes()).convert::<U64>();
        let address = k.eval(address + bytes);
        let outputs = match self.decode.splits {
            Splits::Balanced => sums.outputs.map(|output| k.eval(output * factor)),
            // Folding a split that the row sees nothing of may have turned a minus zero into a
            // zero: adding 0.0 makes every zero positive.
            Splits::Fixed { .. } => sums.outputs.map(|output| k.fma(output, factor, 0.0)),
        };
        let pairs: Vec<Packed> =
            outputs.chunks(2).map(|it| k.pack_as(self.decode.element, it[0], it[1])).collect();
        k.store_packed(address, &pairs);
        k.if_(item.column.equals(0), |k| {
            let index = rows.sequence.convert::<U64>() * self.results.lse_batch
                + head.convert::<U64>() * self.results.lse_head
                + place.convert::<U64>();
            k.store(self.results.lse + index * 4, log_sum);
        });
    }
}
