//! The kernel before the products: computes `delta`, the row sums of `dO * O`, converts the
//! log-sum-exps to units of log2, and clears the sums of `dQ`. It stores both statistics negated,
//! so that the main kernel adds them.
//!
//! A gradient of the log-sum-exps (dLSE) is subtracted from `delta`, and no other kernel knows of
//! it: the derivative of a row's log-sum-exp with respect to a score is `P`, so that
//! `dS = P (dP - delta) + P dLSE`.

use std::f32::consts::LOG2_E;

use ptx::{
    Axis, Builder, Element, Expression, F32, GlobalAddress, Program, Reg, Select, SpecialRegister,
    StoreHint, Target, U32, U64, Value,
};

use super::ragged::DividedShares;
use super::row_blocks::{LogSums, RowBlock, RowBlocks, Vectors, index_from_last};
use super::{SumsLayout, shares_suffix};
use crate::attention::Batch;
use crate::element::{eight_as_f32, load_eight};
use crate::parameter::{Number, Tensor, Workspace};
use crate::{Error, build, first_fault, is_16_bit};

/// Threads of a thread block.
const THREADS: u32 = 256;

/// Elements that a thread loads at a time: 16 bytes.
const CHUNK: u32 = 8;

/// Rows for which a thread has loads in flight at a time.
const STEPS_AT_ONCE: usize = 4;

/// Configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowSums {
    /// The target architecture.
    pub target: Target,
    /// The element type of the output and of its gradient.
    pub element: Element,
    /// Whether the log-sum-exps have a gradient.
    pub lse_gradient: bool,
    /// The width of outputs: a multiple of 8 up to 256.
    pub value_head_dim: u32,
    /// The layout of the `dQ` sums that it clears.
    pub sums: SumsLayout,
    /// Whether it also clears counters: two for each query block.
    pub counters: bool,
    /// The keys of a tile, where tiles of a ragged batch clear shares of the sums: then this kernel
    /// clears only those of the first tiles, and two counters for each tile.
    pub shares: Option<u32>,
    /// How sequences are stored.
    pub batch: Batch,
}

impl RowSums {
    /// Returns the name of this configuration.
    pub fn name(&self) -> String {
        let RowSums { target, element, value_head_dim, sums, counters, shares, batch, .. } = self;
        let SumsLayout { query_block, columns, .. } = sums;
        let lse = if self.lse_gradient { "_dlse" } else { "" };
        let (counters, batch) = (if *counters { "_counters" } else { "" }, batch.suffix());
        let (sums, shares) = (format!("{query_block}x{columns}"), shares_suffix(*shares));
        format!(
            "row_sums_{target}_{element}_d{value_head_dim}_{sums}{lse}{counters}{batch}{shares}"
        )
    }

    /// Builds the kernel. The grid has one thread block for each query block of the workspace.
    pub fn program(&self) -> Result<Program, Error> {
        let dim = self.value_head_dim;
        let fault = first_fault([
            (!is_16_bit(self.element), "the element is not f16 or bf16"),
            (
                dim == 0 || dim > 256 || !dim.is_multiple_of(CHUNK),
                "the head dimension is not a multiple of 8 up to 256",
            ),
        ]);
        let builder = |name| Builder::new(name, self.target, THREADS);
        build(self.name(), fault, builder, |k| self.write(k))
    }

    fn write(&self, k: &mut Builder) {
        let output = Vectors::parameters(k, Tensor::Output, self.batch);
        let gradient = Vectors::parameters(k, Tensor::OutputGradient, self.batch);
        let lse = LogSums::parameters(k, self.lse_gradient, self.batch);
        let statistics = Workspace::RowStatistics.address(k);
        let sums = Workspace::QueryGradientSums.address(k);
        let blocks = RowBlocks::parameters(k, &self.sums, self.batch);

        let cleared = self.shares.is_none().then(|| Number::ClearedBlocks.read(k));
        let counters = self.counters.then(|| Workspace::Turns.address(k));
        let (index, thread) = (index_from_last(k), k.thread_index());
        if let Some(key_block) = self.shares {
            self.clear_shares(k, key_block, sums, index, thread);
        }
        let empty = |k: &mut Builder, number: Reg<U32>| {
            if let Some(counters) = counters {
                let counter = k.eval(counters + number.convert::<U64>() * 8);
                let zero = k.eval::<U32>(0);
                k.if_(thread.equals(0), |k| {
                    k.store_vector(counter, &[zero; 2], StoreHint::default());
                });
            }
            if let Some(cleared) = cleared {
                k.if_(number.less(cleared), |k| self.clear(k, sums, number, thread));
            }
        };
        let compute = |k: &mut Builder, block: &RowBlock| {
            self.statistics(k, [&output, &gradient], &lse, block, thread, statistics);
        };
        if self.batch == Batch::Equal {
            empty(k, index);
            let block = blocks.find(k, index);
            compute(k, &block);
        } else {
            // The main kernel adds nothing to query blocks without rows.
            let block = blocks.find(k, index);
            let first_row = block.first_row(self.sums.query_block);
            k.if_(first_row.less(block.query_length), |k| {
                empty(k, block.number);
                compute(k, &block);
            });
        }
    }

    /// Computes the statistics of a query block's rows.
    fn statistics(
        &self,
        k: &mut Builder,
        tensors: [&Vectors; 2],
        lse: &LogSums,
        block: &RowBlock,
        thread: Reg<U32>,
        statistics: Reg<GlobalAddress>,
    ) {
        // The lanes that share a row: one for each chunk, rounded up to a power of two.
        let lanes = (self.value_head_dim / CHUNK).next_power_of_two();
        let column = k.eval(thread % lanes * CHUNK);
        let rows = THREADS / lanes;
        let first = k.eval(thread / lanes);
        let block_bytes = 2 * 4 * self.sums.query_block;
        let statistics = k.eval(statistics + block.number.convert::<U64>() * block_bytes);
        let steps: Vec<u32> = (0..self.sums.query_block.div_ceil(rows)).collect();
        // Out of bounds, the last row or the first column is loaded again instead. Without branches
        // the loads of several rows can be in flight at once.
        let has_column = k.eval(column.less(self.value_head_dim));
        let loaded_column = k.eval(has_column.select::<U32>(column, 0u32));
        for steps in steps.chunks(STEPS_AT_ONCE) {
            let loaded: Vec<_> = steps
                .iter()
                .map(|step| {
                    let within = k.eval(first + step * rows);
                    let row = k.eval(block.first_row(self.sums.query_block) + within);
                    let exists = k.eval(row.less(block.query_length));
                    let row = k.eval(row.minimum(block.query_length - 1));
                    let chunks = tensors.map(|tensor| {
                        let address = tensor.row(k, self.element, block, row);
                        let offset = loaded_column.convert::<U64>() * self.element.bytes();
                        load_eight(k, address + offset)
                    });
                    (within, exists, chunks, lse.load(k, block, row))
                })
                .collect();
            for (within, exists, chunks, (lse, lse_gradient)) in loaded {
                let [a, b] = chunks.map(|chunk| eight_as_f32(k, self.element, chunk));
                let sum = k.variable::<F32>(0.0);
                for (a, b) in a.into_iter().zip(b) {
                    let next = k.fma(a, b, sum);
                    k.set(sum, next);
                }
                let sum = k.eval((exists & has_column).select::<F32>(sum, 0.0));
                let sum = k.reduce_lanes(sum, lanes, |a, b| a + b);
                // A row that saw no key has P = 0: minus infinity, where negation would give plus
                // infinity.
                let nothing = k.eval(!exists | lse.equals(f32::NEG_INFINITY));
                let log_sum = k.eval(nothing.select::<F32>(f32::NEG_INFINITY, lse * -LOG2_E));
                // Zero times infinity or NaN would not be zero.
                let delta = lse_gradient.map_or(-sum, |it| nothing.select::<F32>(0.0, it - sum));
                let mine = column.equals(0) & within.less(self.sums.query_block);
                k.if_(mine, |k| {
                    let at = k.eval(statistics + within.convert::<U64>() * 4);
                    k.store(at, log_sum);
                    k.store(at + 4 * self.sums.query_block, delta);
                });
            }
        }
    }

    /// Clears the shares of the first tiles, and the counters of all tiles that there is room for.
    fn clear_shares(
        &self,
        k: &mut Builder,
        key_block: u32,
        sums: Reg<GlobalAddress>,
        index: Reg<U32>,
        thread: Reg<U32>,
    ) {
        let counters = Workspace::Turns.address(k);
        let (room, cleared) = (Number::KeyTiles.read(k), Number::ClearedTiles.read(k));
        let shares = DividedShares::parameters(k, self.sums.query_block, key_block);
        let blocks = k.special(SpecialRegister::GridExtent(Axis::X));
        let first = k.eval(index * THREADS + thread);
        k.for_range(first, room, blocks * THREADS, |k, tile| {
            let counter = k.eval(counters + tile.convert::<U64>() * 8);
            let zero = k.eval::<U32>(0);
            k.store_vector(counter, &[zero; 2], StoreHint::default());
        });
        let tiles = shares.tiles(k);
        let end = k.eval(cleared.minimum(tiles) * shares.blocks_per_share());
        k.for_range(index, end, blocks, |k, index| {
            let turn = shares.locate(k, index);
            shares.every_block(k, turn, |k, block| self.clear(k, sums, block.number, thread));
        });
    }

    /// Clears the sums of a query block.
    fn clear(&self, k: &mut Builder, sums: Reg<GlobalAddress>, number: Reg<U32>, thread: Reg<U32>) {
        let bytes = self.sums.block_bytes();
        let offset: Value<U64> = number.convert::<U64>() * bytes + (thread * 16).convert::<U64>();
        let mine = k.eval(sums + offset);
        let zero = k.eval::<F32>(0.0);
        for first in (0..bytes).step_by(16 * THREADS as usize) {
            k.store_vector(mine + first, &[zero; 4], StoreHint::default());
        }
    }
}
