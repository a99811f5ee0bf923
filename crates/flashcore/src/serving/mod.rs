//! Sequences of unequal lengths, and where their queries and keys lie: ragged batches, caches and
//! paged caches.
//!
//! A [`Problem`] describes heads, dims, mask and scores, which are the same for the whole batch. A
//! [`Placement`] says for one tensor how long each sequence is and where its rows are. The two
//! together are [`Sequences`]:
//!
//! ```
//! use flashcore::serving::{Pages, Placement, Sequences};
//! use flashcore::{Mask, Problem};
//!
//! // Decode: one query for each of two sequences, over a cache in pages of 16 positions.
//! let table = Pages::new(16, 3, vec![7, 0, 2, 5, 1, 1])?;
//! let sequences = Sequences::new(
//!     Problem::new(2, 32, 1, 128).with_kv_heads(8).with_mask(Mask::Causal),
//!     Placement::padded(vec![1, 1]),
//!     Placement::paged(vec![40, 25], table),
//! )?;
//! // Position 20 of the first sequence is row 4 of page 0.
//! assert_eq!(sequences.keys().locate(0, 20), (0, 4));
//! # Ok::<(), flashcore::serving::ServingError>(())
//! ```
//!
//! Masks are aligned for each sequence: its last query stands at its last key.

mod append;
mod merge;
mod placement;

pub use append::{Rotary, append};
pub use merge::merge;
pub use placement::{Pages, Placement};

use std::ops::Range;

use crate::error::Error;
use crate::inputs::{InputError, InputTensors, Inputs};
use crate::problem::{Problem, ProblemError, Scores};
use crate::tensor::{Layout, Shape, Tensor};

/// Attention over sequences that each have lengths of their own.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequences {
    problem: Problem,
    queries: Placement,
    keys: Placement,
}

/// Why sequences make no sense.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ServingError {
    /// What all sequences share makes no sense.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// Two lists that have an entry for each sequence differ in length.
    #[error("{list} has {given} entries, expected {expected}")]
    Entries {
        /// The list.
        list: &'static str,
        /// How many entries it has.
        given: usize,
        /// How many it should have.
        expected: usize,
    },
    /// Cumulative lengths fall.
    #[error("cumulative lengths fall from {from} to {to} after sequence {sequence}")]
    Falling {
        /// The sequence.
        sequence: usize,
        /// Where it begins.
        from: usize,
        /// Where the next begins.
        to: usize,
    },
    /// A sequence is longer than its place.
    #[error("sequence {sequence} has {length} positions, and there is room for {room}")]
    TooLong {
        /// The sequence.
        sequence: usize,
        /// Its length.
        length: usize,
        /// The length of its place.
        room: usize,
    },
    /// A sequence begins after its end.
    #[error("sequence {sequence} has {length} positions, of which {skipped} are padding")]
    Padding {
        /// The sequence.
        sequence: usize,
        /// Its length with padding.
        length: usize,
        /// Its padding.
        skipped: usize,
    },
    /// A batch index or a page is outside the tensor.
    #[error("sequence {sequence} is in {what} {given}, and there are {existing}")]
    Outside {
        /// The sequence.
        sequence: usize,
        /// A batch entry or a page.
        what: &'static str,
        /// The one named.
        given: usize,
        /// How many there are.
        existing: usize,
    },
    /// A page without positions.
    #[error("a page must have at least 1 position")]
    PageSize,
    /// Pages of the cache have another size.
    #[error("pages have {given} positions in the cache and {expected} in the block table")]
    PageMismatch {
        /// The tensor's.
        given: usize,
        /// The table's.
        expected: usize,
    },
    /// A rotary embedding of another width.
    #[error("a rotary dim of {given} is not even, or not from 2 to the head dim {head_dim}")]
    RotaryDim {
        /// The embedding's.
        given: usize,
        /// The keys'.
        head_dim: usize,
    },
    /// Queries cannot be in pages.
    #[error("queries are padded or packed, not paged")]
    PagedQueries,
}

impl Sequences {
    /// Sequences whose queries and keys are placed as described. Batch and lengths of the problem
    /// become the number of sequences and the longest lengths.
    pub fn new(
        problem: Problem,
        queries: Placement,
        keys: Placement,
    ) -> Result<Self, ServingError> {
        queries.validate()?;
        keys.validate()?;
        if queries.pages().is_some() {
            return Err(ServingError::PagedQueries);
        }
        if keys.sequences() != queries.sequences() {
            return Err(ServingError::Entries {
                list: "the placement of keys",
                given: keys.sequences(),
                expected: queries.sequences(),
            });
        }
        let problem = Problem {
            batch: queries.sequences(),
            query_length: queries.longest(),
            key_length: keys.longest(),
            ..problem
        };
        problem.validate()?;
        Ok(Sequences { problem, queries, keys })
    }

    /// A plain problem: every sequence has the problem's lengths.
    pub(crate) fn plain(problem: &Problem) -> Self {
        Sequences {
            problem: problem.clone(),
            queries: Placement::padded(vec![problem.query_length; problem.batch]),
            keys: Placement::padded(vec![problem.key_length; problem.batch]),
        }
    }

    /// What all sequences share; its lengths are the longest.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Where the queries, and with them the outputs, lie.
    pub fn queries(&self) -> &Placement {
        &self.queries
    }

    /// Where the keys and values lie.
    pub fn keys(&self) -> &Placement {
        &self.keys
    }

    /// How many sequences there are.
    pub fn len(&self) -> usize {
        self.problem.batch
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.problem.batch == 0
    }

    /// Rows of the softmax: one per query and query head.
    pub fn rows(&self) -> usize {
        let queries: usize = (0..self.len()).map(|sequence| self.queries.length(sequence)).sum();
        queries * self.problem.query_heads
    }

    /// The keys of a sequence that `query` sees.
    pub fn visible_keys(&self, sequence: usize, query: usize) -> Range<usize> {
        let (queries, keys) = (self.queries.length(sequence), self.keys.length(sequence));
        self.problem.mask.visible_keys(query, queries, keys)
    }

    /// What becomes of a query's products with keys.
    pub(crate) fn scores(&self, sequence: usize, query: usize, slope: f32) -> Scores {
        let (queries, keys) = (self.queries.length(sequence), self.keys.length(sequence));
        Scores::of(&self.problem, query, queries, keys, slope)
    }

    /// The plain problem that a sequence is by itself.
    pub fn alone(&self, sequence: usize) -> Problem {
        Problem {
            batch: 1,
            query_length: self.queries.length(sequence),
            key_length: self.keys.length(sequence),
            ..self.problem.clone()
        }
    }

    /// A sequence's rows of the tensors, and the slopes that are its own.
    pub fn gather(&self, inputs: Inputs<'_>, sequence: usize) -> Result<InputTensors, Error> {
        let heads = self.problem.query_heads;
        let slopes = inputs.slopes.map(|slopes| match slopes.len() > heads {
            true => slopes[sequence * heads..][..heads].to_vec(),
            false => slopes.to_vec(),
        });
        Ok(InputTensors {
            query: self.queries.gather(inputs.query, sequence)?,
            key: self.keys.gather(inputs.key, sequence)?,
            value: self.keys.gather(inputs.value, sequence)?,
            slopes,
            sinks: inputs.sinks.map(<[f32]>::to_vec),
        })
    }

    /// The shape of the output over a query tensor.
    pub fn output_shape(&self, query: Shape) -> Shape {
        Shape { dim: self.problem.value_head_dim, ..query }
    }

    /// Where a row's log-sum-exp is, in the order (batch, heads, length) of the query tensor.
    pub fn lse_index(&self, query: Shape, sequence: usize, head: usize, position: usize) -> usize {
        let (entry, row) = self.queries.locate(sequence, position);
        (entry * query.heads + head) * query.length + row
    }

    /// Refuse tensors that are not large enough for the placements or are not the problem's.
    pub fn validate_inputs(&self, inputs: Inputs<'_>) -> Result<(), Error> {
        let tensors = [
            ("query", inputs.query, &self.queries, self.problem.query_shape()),
            ("key", inputs.key, &self.keys, self.problem.key_shape()),
            ("value", inputs.value, &self.keys, self.problem.value_shape()),
        ];
        for (name, tensor, placement, shape) in tensors {
            let given = tensor.shape();
            if (given.heads, given.dim) != (shape.heads, shape.dim) {
                let expected = Shape { heads: shape.heads, dim: shape.dim, ..given };
                return Err(InputError::Shape { tensor: name, given, expected }.into());
            }
            placement.fits(given)?;
        }
        Ok(inputs.validate_elements(&self.problem)?)
    }
}

impl Placement {
    /// One sequence's rows as a contiguous tensor of batch 1.
    fn gather(&self, tensor: &Tensor, sequence: usize) -> Result<Tensor, Error> {
        let shape = Shape { batch: 1, length: self.length(sequence), ..tensor.shape() };
        let mut gathered = Tensor::filled(tensor.dtype(), Layout::contiguous(shape)?, 0.0)?;
        for position in 0..shape.length {
            let (entry, row) = self.locate(sequence, position);
            for head in 0..shape.heads {
                gathered.copy_row([0, position, head], tensor, [entry, row, head]);
            }
        }
        Ok(gathered)
    }
}
