//! The gradients of one key/value head and of the query heads that read it.
//!
//! Rows come first, each with the keys that it sees: they give dQ, the log-sum-exp and delta. Then
//! come the keys, each with the rows that see it: they give dK and dV. Scores and probabilities are
//! recomputed for the second step, as fused kernels do.

use std::ops::Range;

use rayon::prelude::*;

use flashcore::function::Here;
use flashcore::serving::Sequences;
use flashcore::{Inputs, RowFunctions};

use super::number::{Number, Rounding, add_multiple, largest, norm};
use super::{HeadGradients, Noise, ResultGradients, SMALLEST_ROUNDED, Saved};
use crate::reference::rule::Rule;
use crate::reference::{dot, widen};

pub(super) struct Group<'a, T> {
    sequence: usize,
    kv_head: usize,
    dim: usize,
    value_dim: usize,
    rounding: Rounding,
    keys: Vec<T>,
    values: Vec<T>,
    /// The largest magnitude in each key vector.
    key_sizes: Vec<f64>,
    /// The norm of each value vector.
    value_norms: Vec<f64>,
    /// The rows of the query heads, one head after the other.
    rows: Vec<Row<'a, T>>,
    query_heads: usize,
}

/// The inputs of one row.
struct Row<'a, T> {
    query: Vec<T>,
    /// The gradient dO of the row's output.
    gradient: Vec<T>,
    /// The gradient dLSE of the row's log-sum-exp.
    lse_gradient: T,
    rule: Rule,
    visible: Range<usize>,
    /// The problem's mask and score functions, bound to the row.
    functions: RowFunctions<'a>,
    /// The sink of the head; minus infinity without one.
    sink: T,
    /// The norm of dO.
    gradient_norm: f64,
    /// The saved forward pass, or `None` to recompute it.
    forward: Option<Forward<T>>,
}

/// The result of the forward pass of a row.
#[derive(Clone)]
struct Forward<T> {
    lse: T,
    output: Vec<T>,
}

/// The result of the backward pass of a row.
struct RowGradients<T> {
    /// The log-sum-exp; `None` for a row without weight, whose gradients are zero whatever its
    /// inputs are.
    lse: Option<T>,
    delta: T,
    /// dQ.
    query: Vec<T>,
    /// The contribution of the row to the gradient of its head's sink.
    sink: T,
    /// |dO| times |O|, plus |dLSE|.
    size: f64,
    noise: Noise,
}

impl<T> Default for RowGradients<T>
where
    T: Number,
{
    fn default() -> Self {
        let (delta, sink) = (T::default(), T::default());
        RowGradients {
            lse: None,
            delta,
            query: Vec::new(),
            sink,
            size: 0.0,
            noise: Noise::default(),
        }
    }
}

/// The contribution of one key to a row that sees it.
struct Pair<T> {
    probability: T,
    /// The gradient dS of the product of query and key, without the scale.
    gradient: T,
    /// The size of the numbers whose difference gives the gradient.
    size: f64,
    /// The same size at a weight of [`SMALLEST_ROUNDED`].
    least: f64,
}

/// The gradients of one key and its value.
struct KeyGradients<T> {
    key: Vec<T>,
    value: Vec<T>,
    noise: Noise,
}

impl<T> Row<'_, T> {
    /// Returns the keys that the row sees.
    fn seen(&self) -> Vec<usize> {
        let mut functions = self.functions.clone();
        self.visible.clone().filter(|key| functions.sees(*key)).collect()
    }

    fn sees(&self, key: usize) -> bool {
        self.visible.contains(&key) && self.functions.clone().sees(key)
    }
}

impl<'a, T: Number> Group<'a, T> {
    pub(super) fn new(
        sequences: &Sequences,
        inputs: Inputs<'a>,
        results: ResultGradients<'_>,
        saved: Option<Saved<'_>>,
        (sequence, kv_head): (usize, usize),
        rounding: Rounding,
    ) -> Self {
        let problem = sequences.problem();
        let length = sequences.keys().length(sequence);
        let queries = sequences.queries();
        let first_head = kv_head * problem.group_size();
        let row = |(head, query): (usize, usize)| {
            let rule = Rule {
                scale: problem.scale().into(),
                softcap: problem.scores.softcap.map(f64::from),
                slope: inputs.slope(problem, sequence, head).into(),
                position: (query + length) as i64 - queries.length(sequence) as i64,
            };
            let here = Here {
                batch: sequence as i32,
                head: head as i32,
                query: query as i32,
                query_length: queries.length(sequence) as i32,
                key_length: length as i32,
            };
            let (entry, position) = queries.locate(sequence, query);
            let gradient = numbers(&results.output.head(entry, head).row(position));
            let at = sequences.lse_index(results.output.shape(), sequence, head, query);
            let forward = saved.map(|Saved { output, lse }| Forward {
                lse: lse[at].into(),
                output: numbers(&output.head(entry, head).row(position)),
            });
            Row {
                query: numbers(&inputs.query.head(entry, head).row(position)),
                gradient_norm: norm(&gradient),
                gradient,
                lse_gradient: results.lse.map_or(0.0, |lse| lse[at]).into(),
                visible: rule.visible(&problem.mask, length),
                rule,
                functions: problem.row_functions_with_slope(inputs.captured, here),
                sink: inputs.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[head]).into(),
                forward,
            }
        };
        let places = (first_head..first_head + problem.group_size())
            .flat_map(|head| (0..queries.length(sequence)).map(move |query| (head, query)));
        let places: Vec<_> = places.collect();
        let (dim, value_dim) = (problem.head_dim, problem.value_head_dim);
        let matrix = |tensor| numbers(&widen(tensor, sequences.keys(), sequence, kv_head));
        let (keys, values): (Vec<T>, Vec<T>) = (matrix(inputs.key), matrix(inputs.value));
        Group {
            sequence,
            kv_head,
            dim,
            value_dim,
            rounding,
            key_sizes: keys.chunks_exact(dim).map(largest).collect(),
            value_norms: values.chunks_exact(value_dim).map(norm).collect(),
            keys,
            values,
            rows: places.into_par_iter().map(row).collect(),
            query_heads: problem.group_size(),
        }
    }

    pub(super) fn gradients(&self) -> HeadGradients {
        let rows: Vec<RowGradients<T>> = self.rows.par_iter().map(|row| self.row(row)).collect();
        let keys = self.keys.len() / self.dim;
        let keys: Vec<KeyGradients<T>> =
            (0..keys).into_par_iter().map(|key| self.key(key, &rows)).collect();

        let noise = rows.iter().map(|row| row.noise).chain(keys.iter().map(|key| key.noise));
        let mut noise = noise.fold(Noise::default(), Noise::max);
        let of_heads = rows.chunks(rows.len().div_ceil(self.query_heads).max(1));
        let mut sinks = vec![0.0; self.query_heads];
        for (sink, rows) in sinks.iter_mut().zip(of_heads) {
            *sink = rows.iter().map(|row| row.sink).sum::<T>().into();
            let root = |part: fn(&Noise) -> f64| {
                rows.iter().map(|row| part(&row.noise).powi(2)).sum::<f64>().sqrt()
            };
            let sinks = root(|noise| noise.sinks);
            noise = noise.max(Noise { sinks, ..Noise::default() });
        }
        let lses = rows.iter().filter_map(|row| row.lse).map(|lse| lse.into().abs());
        HeadGradients {
            sequence: self.sequence,
            kv_head: self.kv_head,
            largest_lse: lses.filter(|lse| lse.is_finite()).fold(0.0, f64::max),
            query: self.stored(rows.iter().map(|row| &row.query)),
            key: self.stored(keys.iter().map(|key| &key.key)),
            value: self.stored(keys.iter().map(|key| &key.value)),
            sinks,
            delta: rows.iter().map(|row| row.delta.into()).collect(),
            noise,
        }
    }

    /// Returns the vectors one after the other, rounded as they are stored.
    fn stored<'v>(&self, vectors: impl Iterator<Item = &'v Vec<T>>) -> Vec<f64>
    where
        T: 'v,
    {
        vectors.flatten().map(|value| self.rounding.store(*value).into()).collect()
    }

    fn key_vector(&self, key: usize) -> &[T] {
        &self.keys[key * self.dim..][..self.dim]
    }

    fn value_vector(&self, key: usize) -> &[T] {
        &self.values[key * self.value_dim..][..self.value_dim]
    }

    /// Returns the product of a row's query with a key, and its score.
    fn score(&self, row: &Row<'_, T>, key: usize) -> (T, T) {
        let product = dot(&row.query, self.key_vector(key));
        let score = row.rule.score(product.into(), key);
        (product, T::nearest(row.functions.clone().score(key, score)))
    }

    /// Recomputes the forward pass of a row; `None` where no key has weight.
    fn forward(&self, row: &Row<'_, T>) -> Option<Forward<T>> {
        let seen = row.seen();
        let scores: Vec<T> = seen.iter().map(|key| self.score(row, *key).1).collect();
        let lse = log_sum_exp(&scores, row.sink)?;
        let mut output = vec![T::default(); self.value_dim];
        for (key, score) in seen.into_iter().zip(&scores) {
            add_multiple(&mut output, (*score - lse).exp(), self.value_vector(key));
        }
        Some(Forward { lse, output })
    }

    /// Computes the backward pass of a row: delta, dQ, and its part of the sink's gradient.
    fn row(&self, row: &Row<'_, T>) -> RowGradients<T> {
        let mut done =
            RowGradients { query: vec![T::default(); self.dim], ..RowGradients::default() };
        let forward = match &row.forward {
            // A sink alone gives an output of zero, which depends on nothing.
            _ if row.visible.is_empty() => None,
            Some(saved) => Some(saved.clone()).filter(|it| it.lse.into() != f64::NEG_INFINITY),
            None => self.forward(row),
        };
        let of_lse = row.lse_gradient.into().abs();
        let Some(Forward { lse, output }) = forward else {
            // The log-sum-exp of a row that sees no key is its sink.
            if row.sink.into() > f64::NEG_INFINITY {
                done.sink = row.lse_gradient;
                done.noise.sinks = of_lse;
            }
            return done;
        };
        done.lse = Some(lse);
        done.delta = dot(&row.gradient, &output) - row.lse_gradient;
        done.size = row.gradient_norm * norm(&output) + of_lse;
        let sink = (row.sink - lse).exp();
        done.sink = T::default() - sink * done.delta;
        let scale = T::nearest(row.rule.scale);
        let (mut squares, mut least_sum) = (0.0, 0.0);
        for key in row.seen() {
            let Pair { gradient, size, least, .. } = self.pair(row, &done, lse, key);
            let gradient = self.rounding.between(gradient);
            add_multiple(&mut done.query, gradient, self.key_vector(key));
            squares += (size * self.key_sizes[key]).powi(2);
            least_sum += least * self.key_sizes[key];
        }
        for value in &mut done.query {
            *value = *value * scale;
        }
        done.noise.query = row.rule.scale.abs() * (squares.sqrt() + least_sum);
        done.noise.sinks = (sink.into() + SMALLEST_ROUNDED) * done.size;
        done.noise.delta = done.size;
        done
    }

    /// Computes the probability and the gradient of a key that a row sees.
    fn pair(&self, row: &Row<'_, T>, done: &RowGradients<T>, lse: T, key: usize) -> Pair<T> {
        let (product, score) = self.score(row, key);
        let probability = (score - lse).exp();
        let difference = dot(&row.gradient, self.value_vector(key)) - done.delta;
        // The derivative of tanh is `1 - tanh^2`, which loses most of its bits in f32 near the cap.
        let part = T::nearest(row.rule.part_of_cap(product.into()));
        let of_function = {
            let before = row.rule.score(product.into(), key);
            T::nearest(row.functions.clone().slope(key, before))
        };
        let slope = (T::from(1.0) - part * part) * of_function;
        let lost = (part * part * difference).into().abs();
        // The derivative of a score function may cancel in the same way.
        let lost = lost + if of_function.into() == 1.0 { 0.0 } else { difference.into().abs() };
        let size = row.gradient_norm * self.value_norms[key] + done.size;
        let size = slope.into().abs() * size + lost;
        Pair {
            probability,
            gradient: probability * difference * slope,
            size: probability.into() * size,
            least: SMALLEST_ROUNDED * size,
        }
    }

    /// Computes the gradients of one key and its value, over every row that sees it.
    fn key(&self, key: usize, done: &[RowGradients<T>]) -> KeyGradients<T> {
        let mut sums = KeyGradients {
            key: vec![T::default(); self.dim],
            value: vec![T::default(); self.value_dim],
            noise: Noise::default(),
        };
        let (mut squares, mut least_sums) = ([0.0; 2], [0.0; 2]);
        let mut scale = 0.0;
        for (row, done) in self.rows.iter().zip(done) {
            let Some(lse) = done.lse.filter(|_| row.sees(key)) else {
                continue;
            };
            scale = row.rule.scale;
            let Pair { probability, gradient, size, least } = self.pair(row, done, lse, key);
            add_multiple(&mut sums.value, self.rounding.between(probability), &row.gradient);
            add_multiple(&mut sums.key, self.rounding.between(gradient), &row.query);
            let [query, gradient] = [largest(&row.query), largest(&row.gradient)];
            squares[0] += (size * query).powi(2);
            squares[1] += (probability.into() * gradient).powi(2);
            least_sums[0] += least * query;
            least_sums[1] += SMALLEST_ROUNDED * gradient;
        }
        for value in &mut sums.key {
            *value = *value * T::nearest(scale);
        }
        sums.noise.key = scale.abs() * (squares[0].sqrt() + least_sums[0]);
        sums.noise.value = squares[1].sqrt() + least_sums[1];
        sums
    }
}

/// Returns the log-sum-exp of the scores and the sink; `None` where none of them has weight.
fn log_sum_exp<T: Number>(scores: &[T], sink: T) -> Option<T> {
    let wide = scores.iter().map(|score| -> f64 { (*score).into() });
    let maximum = wide.fold(sink.into(), f64::max);
    let shift = T::nearest(if maximum == f64::NEG_INFINITY { 0.0 } else { maximum });
    let weights = scores.iter().map(|score| (*score - shift).exp());
    let sum: f64 = (weights.sum::<T>() + (sink - shift).exp()).into();
    (sum != 0.0).then(|| T::nearest(maximum + sum.ln()))
}

fn numbers<T: Number>(values: &[f32]) -> Vec<T> {
    values.iter().map(|value| T::from(*value)).collect()
}
