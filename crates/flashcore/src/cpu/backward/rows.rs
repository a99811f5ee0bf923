//! A block of rows of the backward pass: packed Q and dO, and the statistics of the softmax.

use std::ops::Range;

use crate::backend::BackendError;
use crate::cpu::block::{Shape, all_finite};
use crate::cpu::softmax::{RowRule, Rows};
use crate::cpu::{here, rule};
use crate::gradients::Backward;
use crate::problem::Problem;
use crate::tensor::{Head, TensorView};

/// What is known of each row before any product: one entry per lane of each panel.
pub(super) struct RowNumbers<'a> {
    /// Index of the sequence.
    batch: usize,
    /// The query heads that read the key/value head.
    heads: Range<usize>,
    /// Which rows of the head these are.
    rows: Range<usize>,
    /// Visible keys and score rules of each row.
    pub(super) rules: Rows<'a>,
    /// Log-sum-exp of each row.
    pub(super) lse: Vec<f32>,
    /// delta = rowsum(dO * O) of each row, less the gradient of its log-sum-exp.
    pub(super) delta: Vec<f32>,
    /// Contribution of each row to the gradient of its head's sink.
    sinks: Vec<f64>,
}

impl<'a> RowNumbers<'a> {
    /// Computes the statistics of some rows. The heads of one query are adjacent, as in the forward
    /// pass.
    pub(super) fn new(
        shape: Shape,
        problem: &Problem,
        backward: Backward<'a>,
        batch: usize,
        kv_head: usize,
        rows: Range<usize>,
    ) -> Result<Self, BackendError> {
        let group = problem.group_size();
        let heads = kv_head * group..(kv_head + 1) * group;
        let lanes = rows.len().next_multiple_of(shape.lanes);
        let mut numbers = RowNumbers {
            batch,
            heads,
            rows,
            rules: Rows::new(lanes)?,
            lse: vec![0.0; lanes],
            delta: vec![0.0; lanes],
            sinks: vec![0.0; lanes],
        };
        let mut rules = Vec::with_capacity(lanes);
        let mut output = vec![0.0; problem.value_head_dim];
        let mut gradient = output.clone();
        for lane in 0..numbers.rows.len() {
            let (query, head) = numbers.place(lane);
            let inputs = backward.inputs;
            let functions = problem.functions().next().map(|_| {
                let here = here(problem, inputs, batch, head, query);
                problem.row_functions_with_slope(inputs.captured, here)
            });
            let row_rule = RowRule { functions, ..rule(problem, inputs, batch, head, query) };
            let row = (batch * problem.query_heads + head) * problem.query_length + query;
            let lse = backward.lse[row];
            let lse_gradient = backward.lse_gradient.map_or(0.0, |it| f64::from(it[row]));
            let share = |sink: f32| (f64::from(sink) - f64::from(lse)).exp();
            let share = row_rule.sink.map_or(0.0, share);
            // A row that saw no key has no gradients, whatever the tensors hold, but that of its
            // log-sum-exp, which is the sink.
            if lse == f32::NEG_INFINITY || row_rule.visible.is_empty() {
                if lse > f32::NEG_INFINITY {
                    numbers.sinks[lane] = share * lse_gradient;
                }
                rules.push(RowRule { visible: 0..0, ..row_rule });
                continue;
            }
            backward.output.head(batch, head).read(query, &mut output);
            backward.output_gradient.head(batch, head).read(query, &mut gradient);
            let products = output.iter().zip(&gradient).map(|(o, g)| f64::from(*o) * f64::from(*g));
            let delta = products.sum::<f64>() - lse_gradient;
            numbers.lse[lane] = lse;
            numbers.delta[lane] = delta as f32;
            numbers.sinks[lane] = -share * delta;
            rules.push(row_rule);
        }
        // Lanes without a row see nothing: zero times infinity or NaN would not be zero.
        let (query, head) = numbers.place(0);
        while rules.len() < lanes {
            let visible = 0..0;
            rules.push(RowRule { visible, ..rule(problem, backward.inputs, batch, head, query) });
        }
        numbers.rules.begin(problem.scale(), rules.into_iter());
        Ok(numbers)
    }

    /// Returns the query and the query head of a lane.
    fn place(&self, lane: usize) -> (usize, usize) {
        let row = self.rows.start + lane;
        (row / self.heads.len(), self.heads.start + row % self.heads.len())
    }

    /// Allocates zeroed sums of dQ: by panel, dim in whole tiles, and lane.
    pub(super) fn query_sums(&self, shape: Shape) -> Vec<f32> {
        vec![0.0; self.lse.len() * shape.dim_rows()]
    }

    /// Returns the part of a range of keys from the first to the last that some row sees.
    pub(super) fn seen_of(&self, keys: Range<usize>) -> Range<usize> {
        let seen = self.rules.seen(0..self.rules.count());
        seen.start.max(keys.start)..seen.end.min(keys.end)
    }

    /// Adds to the gradients of the sinks of a group's heads.
    pub(super) fn add_sinks(&self, sums: &mut [f64]) {
        for lane in 0..self.rows.len() {
            let (_, head) = self.place(lane);
            sums[head - self.heads.start] += self.sinks[lane];
        }
    }
}

/// Q and dO of a block of rows, in the layouts that the products of a task read.
pub(super) struct RowBlock {
    pub(super) queries: Packed,
    pub(super) gradients: Packed,
}

/// The vectors of a block of rows, in both orders.
pub(super) struct Packed {
    /// By panel, dim and lane: rows are columns.
    columns: Vec<f32>,
    /// Elements per panel of `columns`.
    panel: usize,
    /// By panel of dims, row and dim within the panel; zero in place of non-finite values.
    pub(super) rows: Vec<f32>,
    /// The non-finite values. Zero times these is NaN: they are added only for the keys that their
    /// rows see.
    pub(super) infinite: Vec<Infinite>,
}

/// A value that is NaN or infinite, at a row or a key.
pub(super) struct Infinite {
    pub(super) index: usize,
    pub(super) dim: usize,
    pub(super) value: f32,
}

/// Moves the non-finite values of a vector to a list, and leaves zeros.
pub(super) fn set_aside(vector: &mut [f32], index: usize, infinite: &mut Vec<Infinite>) {
    if !all_finite(vector) {
        for (dim, value) in vector.iter_mut().enumerate().filter(|it| !it.1.is_finite()) {
            infinite.push(Infinite { index, dim, value: *value });
            *value = 0.0;
        }
    }
}

impl RowBlock {
    pub(super) fn new(shape: Shape, backward: Backward<'_>, numbers: &RowNumbers<'_>) -> Self {
        let pack = |tensor: TensorView<'_>, dim: usize| {
            let head_of = |lane| {
                let (query, head) = numbers.place(lane);
                (tensor.head(numbers.batch, head), query)
            };
            Packed::new(shape.lanes, dim, (0..numbers.rows.len()).map(head_of))
        };
        RowBlock {
            queries: pack(backward.inputs.query, shape.head_dim),
            gradients: pack(backward.output_gradient, shape.value_head_dim),
        }
    }
}

/// Reads dQ of one row from the sums of its block.
pub(super) fn read_query(shape: Shape, sums: &[f32], row: usize, to: &mut [f32]) {
    let panel = &sums[row / shape.lanes * shape.dim_rows() * shape.lanes..];
    for (to, from) in to.iter_mut().zip(panel.chunks_exact(shape.lanes)) {
        *to = from[row % shape.lanes];
    }
}

impl Packed {
    /// Returns a panel by dim and lane: its columns are rows of the block.
    pub(super) fn panel(&self, panel: usize) -> &[f32] {
        &self.columns[panel * self.panel..][..self.panel]
    }

    fn new<'a>(
        lanes: usize,
        dim: usize,
        vectors: impl ExactSizeIterator<Item = (Head<'a>, usize)>,
    ) -> Self {
        let rows = vectors.len().next_multiple_of(lanes);
        let mut packed = Packed {
            columns: vec![0.0; rows * dim],
            panel: dim * lanes,
            rows: vec![0.0; rows * dim.next_multiple_of(lanes)],
            infinite: Vec::new(),
        };
        let mut vector = vec![0.0; dim];
        for (row, (head, position)) in vectors.enumerate() {
            head.read(position, &mut vector);
            let panel = &mut packed.columns[row / lanes * dim * lanes..];
            for (to, from) in panel.chunks_exact_mut(lanes).zip(&vector) {
                to[row % lanes] = *from;
            }
            set_aside(&mut vector, row, &mut packed.infinite);
            for (panel, from) in vector.chunks(lanes).enumerate() {
                packed.rows[(panel * rows + row) * lanes..][..from.len()].copy_from_slice(from);
            }
        }
        packed
    }
}
