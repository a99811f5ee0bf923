//! The gradients of attention sinks: for each query head, minus the sum over its rows of `exp(sink
//! - lse) * delta`, where [`RowSums`](super::RowSums) has subtracted the gradient of the row's
//! log-sum-exp from `delta`.
//!
//! One thread block sums all rows of a head in a fixed order, so that results are bitwise
//! reproducible.

use ptx::{Builder, Expression, F32, LoadHint, Program, Reg, S32, Select, Target, U32, U64};

use crate::attention::rows::Sinks;
use crate::attention::visibility::Visibility;
use crate::attention::{Batch, MaskKind, Rules};
use crate::divisor::DivisorRegisters;
use crate::parameter::{Number, Tensor, Workspace};
use crate::sequencer::RaggedBatch;
use crate::{Error, build, first_fault};

/// Threads of a thread block.
const THREADS: u32 = 256;

/// Rows that a thread takes at a time.
const ROWS: u32 = 4;

/// Configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SinkGradients {
    /// The target architecture.
    pub target: Target,
    /// The mask. A row that sees no key contributes nothing to its sink's gradient but the gradient
    /// of its log-sum-exp, which is the sink.
    pub mask: MaskKind,
    /// Whether the log-sum-exps have a gradient. The outputs of rows that see no key must then be
    /// zero; otherwise they may be anything.
    pub lse_gradient: bool,
    /// Query rows of a query block of the statistics: a multiple of 4 that divides 1024.
    pub query_block: u32,
    /// How sequences are stored.
    pub batch: Batch,
}

/// The launch's parameters for the query rows of a head, over all sequences.
enum AllRows {
    Equal { lengths: [Reg<U32>; 2], batch: Reg<U32>, heads: Reg<U32> },
    Ragged(RaggedBatch),
}

impl SinkGradients {
    /// Returns the name of this configuration.
    pub fn name(&self) -> String {
        let SinkGradients { target, mask, lse_gradient, query_block, batch } = self;
        let mask = Rules { mask: *mask, ..Rules::DENSE }.name();
        let lse = if *lse_gradient { "_dlse" } else { "" };
        format!("sink_gradients_{target}_{mask}_{query_block}{lse}{}", batch.suffix())
    }

    /// Builds the kernel. The grid has one thread block for each query head.
    pub fn program(&self) -> Result<Program, Error> {
        let block = self.query_block;
        let fault = first_fault([(
            !block.is_multiple_of(ROWS) || !(ROWS * THREADS).is_multiple_of(block),
            "a block of query rows is not a multiple of 4 that divides 1024",
        )]);
        let builder = |name| Builder::new(name, self.target, THREADS);
        build(self.name(), fault, builder, |k| self.write(k))
    }

    fn write(&self, k: &mut Builder) {
        let statistics = Workspace::RowStatistics.address(k);
        let sinks = Sinks::parameters(k);
        let gradients = Tensor::SinkGradient.address(k);
        let rows = match self.batch {
            Batch::Equal => {
                let lengths = [Number::QueryLength.read(k), Number::KeyLength.read(k)];
                let (batch, heads) = (Number::Batch.read(k), Number::QueryHeads.read(k));
                AllRows::Equal { lengths, batch, heads }
            }
            _ => AllRows::Ragged(RaggedBatch::parameters(k)),
        };
        let query_blocks = DivisorRegisters::parameters(k, Number::QueryBlocks);
        let visibility = Visibility::parameters(k, self.mask);
        let of_warps = k.shared("sums of warps", THREADS / 32 * 4, 16);
        let of_warps = k.shared_address(of_warps);

        let (head, thread) = (k.block_index(), k.thread_index());
        let sink = sinks.of(k, head);
        // Threads that share a query block, four rows each.
        let threads = self.query_block / ROWS;
        let within = k.eval(thread % threads * ROWS);
        let sum = k.variable::<F32>(0.0);
        let bytes = 2 * 4 * self.query_block;
        // Adds four rows of a query block of a sequence to the thread's sum.
        let add = |k: &mut Builder,
                   number: Reg<U32>,
                   [block, within]: [Reg<U32>; 2],
                   lengths: [Reg<U32>; 2]| {
            let at = number.convert::<U64>() * bytes + (within * 4).convert::<U64>();
            let at = k.eval(statistics + at);
            let log_sums = k.load_vector::<F32, _, 4>(at, LoadHint::default());
            let row_sums = at + 4 * self.query_block;
            let row_sums = k.load_vector::<F32, _, 4>(row_sums, LoadHint::default());
            for row in 0..ROWS as usize {
                let query = k.eval(block * self.query_block + within + row as u32);
                let exists = log_sums[row].greater(f32::NEG_INFINITY);
                let counts = if self.lse_gradient {
                    exists
                } else {
                    // A row without keys or without probabilities contributes nothing, whatever its
                    // statistics hold.
                    let seen = self.keys(k, &visibility, query, lengths);
                    seen[0].less(seen[1]) & exists
                };
                let weight = k.exp2(sink + log_sums[row]);
                let part = counts.select::<F32>(weight * row_sums[row], 0.0);
                k.set(sum, sum + part);
            }
        };
        match &rows {
            AllRows::Equal { lengths, batch, heads } => {
                let number = k.variable(thread / threads);
                k.loop_(|k| {
                    k.break_if(number.at_least(*batch * query_blocks.number));
                    let (sequence, block) = query_blocks.divide(k, number);
                    let number_of_all = (sequence * *heads + head) * query_blocks.number + block;
                    let number_of_all = k.eval(number_of_all);
                    add(k, number_of_all, [block, within], *lengths);
                    k.set(number, number + THREADS / threads);
                });
            }
            // One warp for each sequence.
            AllRows::Ragged(sequences) => {
                let (warp, lane) = (k.eval(thread / 32), k.lane());
                k.for_range(warp, sequences.batch, THREADS / 32, |k, index| {
                    let sequence = sequences.sequence(k, index);
                    let first = k.eval(sequence.query_start / self.query_block + index);
                    let first = k.eval(head * query_blocks.number + first);
                    let lengths = [sequence.queries, sequence.keys];
                    k.for_range(lane * ROWS, sequence.queries, 32 * ROWS, |k, row| {
                        let block = k.eval(row / self.query_block);
                        let within = k.eval(row % self.query_block);
                        let number = k.eval(first + block);
                        add(k, number, [block, within], lengths);
                    });
                });
            }
        }
        let sum = k.reduce_lanes(sum, 32, |a, b| a + b);
        k.if_((thread % 32).equals(0), |k| k.store(of_warps + thread / 32 * 4, sum));
        k.block_sync();
        k.if_(thread.equals(0), |k| {
            let mut total = k.eval::<F32>(0.0);
            for warp in 0..THREADS / 32 {
                let sum = k.load::<F32, ptx::SharedAddress>(of_warps + warp * 4);
                total = k.eval(total + sum);
            }
            k.store(gradients + head.convert::<U64>() * 4, total);
        });
    }

    /// Returns the range of keys that a query sees.
    fn keys(
        &self,
        k: &mut Builder,
        visibility: &Visibility,
        query: Reg<U32>,
        [query_length, key_length]: [Reg<U32>; 2],
    ) -> [Reg<S32>; 2] {
        let position = k.eval((query + key_length - query_length).reinterpret::<S32>());
        visibility.keys(k, position, key_length)
    }
}
