//! The vectors of a head as f32 numbers, with descale factors applied.

use crate::inputs::Inputs;
use crate::problem::{Descale, Problem};
use crate::tensor::{Head, Tensor};

/// One head of one sequence, with its descale factors.
#[derive(Clone, Copy)]
pub(super) struct Vectors<'a> {
    head: Head<'a>,
    factors: Factors<'a>,
}

#[derive(Clone, Copy)]
enum Factors<'a> {
    None,
    One(f32),
    PerToken(Head<'a>),
}

impl<'a> Vectors<'a> {
    /// Reads a head without factors.
    #[cfg(test)]
    pub(super) fn plain(head: Head<'a>) -> Self {
        Vectors { head, factors: Factors::None }
    }

    /// Reads a head of the queries.
    pub(super) fn query(problem: &Problem, inputs: Inputs<'a>, batch: usize, head: usize) -> Self {
        let factors = inputs.descales.query;
        let factors = Factors::of(problem.descales.query, factors, batch, problem.kv_head(head));
        Vectors { head: inputs.query.head(batch, head), factors }
    }

    /// Reads a head of the keys.
    pub(super) fn key(problem: &Problem, inputs: Inputs<'a>, batch: usize, head: usize) -> Self {
        let factors = Factors::of(problem.descales.key, inputs.descales.key, batch, head);
        Vectors { head: inputs.key.head(batch, head), factors }
    }

    /// Reads a head of the values.
    pub(super) fn value(problem: &Problem, inputs: Inputs<'a>, batch: usize, head: usize) -> Self {
        let factors = Factors::of(problem.descales.value, inputs.descales.value, batch, head);
        Vectors { head: inputs.value.head(batch, head), factors }
    }

    /// Writes the vector at a position into `row`.
    #[inline(always)]
    pub(super) fn read(&self, position: usize, row: &mut [f32]) {
        self.head.read(position, row);
        let factor = match &self.factors {
            Factors::None => return,
            Factors::One(factor) => *factor,
            Factors::PerToken(factors) => scalar(factors, position),
        };
        row.iter_mut().for_each(|value| *value *= factor);
    }
}

impl<'a> Factors<'a> {
    fn of(descale: Descale, factors: Option<&'a Tensor>, batch: usize, head: usize) -> Self {
        match (descale, factors.map(|factors| factors.head(batch, head))) {
            (_, None) | (Descale::None, _) => Factors::None,
            (Descale::PerHead, Some(factors)) => Factors::One(scalar(&factors, 0)),
            (Descale::PerToken, Some(factors)) => Factors::PerToken(factors),
        }
    }
}

fn scalar(factors: &Head<'_>, position: usize) -> f32 {
    let mut factor = [0.0];
    factors.read(position, &mut factor);
    factor[0]
}
