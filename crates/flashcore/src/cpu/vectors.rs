//! The vectors of a head as f32 numbers, read in place, with descale factors applied.

use crate::inputs::Inputs;
use crate::problem::{Descale, Problem};
use crate::serving::Placement;
use crate::tensor::TensorView;

/// One head of one sequence, with its descale factors.
#[derive(Clone, Copy)]
pub(super) struct Vectors<'a> {
    rows: Rows<'a>,
    factors: Factors<'a>,
}

/// The rows of one head of one sequence of a tensor.
#[derive(Clone, Copy)]
struct Rows<'a> {
    tensor: TensorView<'a>,
    sequence: Sequence<'a>,
    head: usize,
}

/// Where the rows of a sequence are.
#[derive(Clone, Copy)]
enum Sequence<'a> {
    /// The positions of a batch entry.
    Entry(usize),
    /// The positions that a placement gives to the sequence with this index.
    Placed(&'a Placement, usize),
}

#[derive(Clone, Copy)]
enum Factors<'a> {
    None,
    One(f32),
    PerToken(Rows<'a>),
}

impl<'a> Vectors<'a> {
    /// Reads a head of a batch entry without factors.
    #[cfg(test)]
    pub(super) fn plain(tensor: TensorView<'a>, batch: usize, head: usize) -> Self {
        let rows = Rows { tensor, sequence: Sequence::Entry(batch), head };
        Vectors { rows, factors: Factors::None }
    }

    /// Reads a head of the queries.
    pub(super) fn query(problem: &Problem, inputs: Inputs<'a>, batch: usize, head: usize) -> Self {
        let sequence = Sequence::of(inputs, inputs.queries, batch);
        let factors = problem.descales.query;
        let of_head = Rows { tensor: inputs.query, sequence, head: problem.kv_head(head) };
        let factors = Factors::of(factors, inputs.descales.query, of_head);
        Vectors { rows: Rows { head, ..of_head }, factors }
    }

    /// Reads a head of the keys.
    pub(super) fn key(problem: &Problem, inputs: Inputs<'a>, batch: usize, head: usize) -> Self {
        let sequence = Sequence::of(inputs, inputs.keys, batch);
        let rows = Rows { tensor: inputs.key, sequence, head };
        Vectors { rows, factors: Factors::of(problem.descales.key, inputs.descales.key, rows) }
    }

    /// Reads a head of the values.
    pub(super) fn value(problem: &Problem, inputs: Inputs<'a>, batch: usize, head: usize) -> Self {
        let sequence = Sequence::of(inputs, inputs.keys, batch);
        let rows = Rows { tensor: inputs.value, sequence, head };
        Vectors { rows, factors: Factors::of(problem.descales.value, inputs.descales.value, rows) }
    }

    /// Writes the vector at a position into `row`.
    #[inline(always)]
    pub(super) fn read(&self, position: usize, row: &mut [f32]) {
        self.rows.read(position, row);
        let factor = match &self.factors {
            Factors::None => return,
            Factors::One(factor) => *factor,
            Factors::PerToken(factors) => factors.scalar(position),
        };
        row.iter_mut().for_each(|value| *value *= factor);
    }
}

impl<'a> Sequence<'a> {
    /// Returns where a batch index is: by the placement, if the call has one.
    fn of(inputs: Inputs<'a>, placement: Option<&'a Placement>, batch: usize) -> Self {
        match placement {
            None => Sequence::Entry(batch),
            Some(placement) => Sequence::Placed(placement, inputs.first_sequence + batch),
        }
    }
}

impl Rows<'_> {
    #[inline(always)]
    fn read(&self, position: usize, row: &mut [f32]) {
        let (entry, position) = match self.sequence {
            Sequence::Entry(entry) => (entry, position),
            Sequence::Placed(placement, sequence) => placement.locate(sequence, position),
        };
        self.tensor.read([entry, position, self.head], row);
    }

    fn scalar(&self, position: usize) -> f32 {
        let mut factor = [0.0];
        self.read(position, &mut factor);
        factor[0]
    }
}

impl<'a> Factors<'a> {
    /// Returns the factors of some rows. Factors per token are placed like the rows; factors per head
    /// are indexed by the sequence.
    fn of(descale: Descale, factors: Option<TensorView<'a>>, rows: Rows<'a>) -> Self {
        match (descale, factors) {
            (_, None) | (Descale::None, _) => Factors::None,
            (Descale::PerHead, Some(tensor)) => {
                let (Sequence::Entry(index) | Sequence::Placed(_, index)) = rows.sequence;
                let sequence = Sequence::Entry(index);
                Factors::One(Rows { tensor, sequence, ..rows }.scalar(0))
            }
            (Descale::PerToken, Some(tensor)) => Factors::PerToken(Rows { tensor, ..rows }),
        }
    }
}
