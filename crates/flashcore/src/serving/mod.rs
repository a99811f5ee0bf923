//! Ragged batches in host memory: sequences of unequal lengths, padded, packed or in a paged cache.
//!
//! A [`Problem`] describes heads, dims, mask and scores, which are the same for the whole batch. A
//! [`Placement`] says for one tensor how long each sequence is and where its rows are. Together
//! they are [`Sequences`]:
//!
//! ```
//! use flashcore::serving::{Pages, Placement, Sequences};
//! use flashcore::{Mask, Problem};
//!
//! // Decode: one query for each of two sequences, over a cache in pages of 16 positions.
//! let table = Pages::new(16, 3, vec![7, 0, 2, 5, 1, 1])?;
//! let sequences = Sequences::new(
//!     Problem::new(2, 32, 1, 128).with_kv_heads(8).with_mask(Mask::CAUSAL),
//!     Placement::padded(vec![1, 1]),
//!     Placement::paged(vec![40, 25], table),
//! )?;
//! // Position 20 of the first sequence is row 4 of page 0.
//! assert_eq!(sequences.keys().locate(0, 20), (0, 4));
//! # Ok::<(), flashcore::serving::ServingError>(())
//! ```
//!
//! Masks are aligned per sequence: its last query has the position of its last key.

mod append;
mod combine;
mod placement;

pub use append::{CacheScales, Rotary, append, append_scaled};
pub use combine::{combine, combine_until};
pub use placement::{Pages, Placement};

use std::ops::Range;

use crate::error::Error;
use crate::inputs::{InputTensors, Inputs};
use crate::problem::{Alibi, Descale, Descales, Lists, Problem, ProblemError, Storage};
use crate::tensor::{Layout, Shape, Tensor, TensorView};

/// Attention over sequences that each have their own lengths.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequences {
    problem: Problem,
    queries: Placement,
    keys: Placement,
}

/// Why sequences or their placements are invalid.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ServingError {
    /// The problem that all sequences share is invalid.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// A list has another number of entries than there are sequences.
    #[error("{list} has {given} entries, expected {expected}")]
    Entries {
        /// Name of the list.
        list: &'static str,
        /// Number of entries that were given.
        given: usize,
        /// Number of entries that were expected.
        expected: usize,
    },
    /// Cumulative lengths decrease.
    #[error("cumulative lengths fall from {from} to {to} after sequence {sequence}")]
    Falling {
        /// Index of the sequence.
        sequence: usize,
        /// Start of the sequence.
        from: usize,
        /// Start of the next sequence.
        to: usize,
    },
    /// A sequence is longer than its place.
    #[error("sequence {sequence} has {length} positions, and there is room for {room}")]
    TooLong {
        /// Index of the sequence.
        sequence: usize,
        /// Its length.
        length: usize,
        /// The room of its place.
        room: usize,
    },
    /// The left padding of a sequence exceeds its length.
    #[error("sequence {sequence} has {length} positions, of which {skipped} are padding")]
    Padding {
        /// Index of the sequence.
        sequence: usize,
        /// Its length with padding.
        length: usize,
        /// Its padding.
        skipped: usize,
    },
    /// A batch entry, row or page is outside of the tensor.
    #[error("sequence {sequence} is in {what} {given}, and there are {existing}")]
    Outside {
        /// Index of the sequence.
        sequence: usize,
        /// What is outside: a batch entry, a row or a page.
        what: &'static str,
        /// The index that was given.
        given: usize,
        /// How many there are.
        existing: usize,
    },
    /// Pages have no positions.
    #[error("a page must have at least 1 position")]
    PageSize,
    /// The cache has another page size than the block table.
    #[error("pages have {given} positions in the cache and {expected} in the block table")]
    PageMismatch {
        /// Page size of the cache.
        given: usize,
        /// Page size of the block table.
        expected: usize,
    },
    /// The rotary dim is odd, zero or larger than the head dim.
    #[error("a rotary dim of {given} is not even, or not from 2 to the head dim {head_dim}")]
    RotaryDim {
        /// The rotary dim.
        given: usize,
        /// The head dim of the keys.
        head_dim: usize,
    },
    /// Queries are placed in pages.
    #[error("queries are padded or packed, not paged")]
    PagedQueries,
}

impl Sequences {
    /// Combines a problem with placements of queries and keys. Batch and lengths of the problem
    /// become the number of sequences and the maximum lengths.
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

    /// Returns the sequences of a call, as the inputs' placements locate them; without placements,
    /// every sequence has the problem's lengths.
    pub fn of(problem: &Problem, inputs: Inputs<'_>) -> Self {
        let padded = |length: usize| Placement::padded(vec![length; problem.batch]);
        Sequences {
            problem: problem.clone(),
            queries: inputs.queries.cloned().unwrap_or_else(|| padded(problem.query_length)),
            keys: inputs.keys.cloned().unwrap_or_else(|| padded(problem.key_length)),
        }
    }

    /// Returns the problem of these sequences over given tensors (with their storage and lists),
    /// and the inputs with the placements set.
    pub fn over<'a>(&'a self, inputs: Inputs<'a>) -> Result<(Problem, Inputs<'a>), Error> {
        let (query, key) = (inputs.query.shape(), inputs.key.shape());
        let (queries, keys) = (&self.queries, &self.keys);
        for (placement, tensor) in [(queries, query), (keys, key), (keys, inputs.value.shape())] {
            placement.fits(tensor)?;
        }
        let mut problem = self.problem.clone();
        let in_order = |placement: &Placement, batch: usize| {
            let own = |sequence| placement.entry(sequence) == Some(sequence);
            batch == placement.sequences() && (0..batch).all(own)
        };
        problem.queries = match queries.starts() {
            Some(_) => Storage::Packed(query.length),
            None if in_order(queries, query.batch) => Storage::Padded,
            None => {
                let reason = "queries in batch entries of another order are not served";
                return Err(ProblemError::Storage(reason).into());
            }
        };
        if !queries.left_padding().is_empty() {
            let reason = "queries with left padding are not served";
            return Err(ProblemError::Storage(reason).into());
        }
        if problem.queries == Storage::Padded {
            problem.query_length = query.length;
        }
        problem.keys = match (keys.pages(), keys.starts()) {
            (Some(pages), _) => {
                let (size, columns) = (pages.size(), pages.columns());
                problem.key_length = size.saturating_mul(columns);
                Storage::Paged { size, columns, pages: key.batch }
            }
            (None, Some(_)) => {
                // Lists include padding, and the kernels clamp them to `key_length`.
                problem.key_length = keys.ends().iter().copied().max().unwrap_or(0);
                Storage::Packed(key.length)
            }
            (None, None) => {
                problem.key_length = key.length;
                match in_order(keys, key.batch) {
                    true => Storage::Padded,
                    false => Storage::Entries(key.batch),
                }
            }
        };
        problem.lists = Lists {
            query_lengths: !queries.is_full(query.length),
            key_lengths: keys.pages().is_some() || !keys.is_full(key.length),
            left_padding: !keys.left_padding().is_empty(),
            batch_index: matches!(problem.keys, Storage::Entries(_)),
        };
        problem.validate()?;
        let inputs = Inputs { queries: Some(queries), keys: Some(keys), ..inputs };
        inputs.validate(&problem)?;
        Ok((problem, inputs))
    }

    /// Returns the problem that all sequences share; its lengths are the maxima.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Returns where the queries and outputs are.
    pub fn queries(&self) -> &Placement {
        &self.queries
    }

    /// Returns where the keys and values are.
    pub fn keys(&self) -> &Placement {
        &self.keys
    }

    /// Returns the number of sequences.
    pub fn len(&self) -> usize {
        self.problem.batch
    }

    /// Tells whether there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.problem.batch == 0
    }

    /// Returns the number of softmax rows: one per query and query head.
    pub fn rows(&self) -> usize {
        let queries: usize = (0..self.len()).map(|sequence| self.queries.length(sequence)).sum();
        queries * self.problem.query_heads
    }

    /// Returns the keys of a sequence that `query` sees. A mask function may hide some of them.
    pub fn visible_keys(&self, sequence: usize, query: usize) -> Range<usize> {
        let (queries, keys) = (self.queries.length(sequence), self.keys.length(sequence));
        self.problem.mask.visible_keys(query, queries, keys)
    }

    /// Returns one sequence as a problem of its own, with a batch of 1 and equal lengths.
    pub fn alone(&self, sequence: usize) -> Problem {
        let scores = match self.problem.scores.alibi {
            Alibi::PerSequence => self.problem.scores.with_alibi(Alibi::PerHead),
            _ => self.problem.scores,
        };
        Problem {
            batch: 1,
            query_length: self.queries.length(sequence),
            key_length: self.keys.length(sequence),
            scores,
            queries: Storage::Padded,
            keys: Storage::Padded,
            lists: Lists::default(),
            ..self.problem.clone()
        }
    }

    /// Copies one sequence's rows of the tensors, with the slopes and descale factors that belong
    /// to it.
    pub fn gather(&self, inputs: Inputs<'_>, sequence: usize) -> Result<InputTensors, Error> {
        Ok(InputTensors {
            query: self.queries.gather(inputs.query, sequence)?,
            key: self.keys.gather(inputs.key, sequence)?,
            value: self.keys.gather(inputs.value, sequence)?,
            slopes: self.slopes(inputs, sequence).map(<[f32]>::to_vec),
            sinks: inputs.sinks.map(<[f32]>::to_vec),
            descales: self.gather_descales(inputs, sequence)?,
        })
    }

    /// Returns the ALiBi slopes of a sequence: its own, or those that all sequences share.
    pub(crate) fn slopes<'a>(&self, inputs: Inputs<'a>, sequence: usize) -> Option<&'a [f32]> {
        let heads = self.problem.query_heads;
        inputs.slopes.map(|slopes| match slopes.len() > heads {
            true => &slopes[sequence * heads..][..heads],
            false => slopes,
        })
    }

    /// Copies the descale factors of a sequence.
    fn gather_descales(
        &self,
        inputs: Inputs<'_>,
        sequence: usize,
    ) -> Result<Descales<Option<Tensor>>, Error> {
        self.problem.descales.zip(inputs.descales).try_map(|(descale, factors)| {
            let Some(factors) = factors else { return Ok(None) };
            Ok(Some(match descale {
                Descale::PerToken => self.keys.gather(factors, sequence)?,
                _ => {
                    let shape = Shape { batch: 1, ..factors.shape() };
                    Tensor::from_fn(factors.dtype(), shape, |[_, position, head, _]| {
                        factors.head(sequence, head).row(position)[0]
                    })?
                }
            }))
        })
    }

    /// Returns the index of a row's log-sum-exp, in the order (batch, heads, length) of the query
    /// tensor.
    pub fn lse_index(&self, query: Shape, sequence: usize, head: usize, position: usize) -> usize {
        let (entry, row) = self.queries.locate(sequence, position);
        (entry * query.heads + head) * query.length + row
    }
}

impl Placement {
    /// Copies one sequence's rows to a contiguous tensor of batch 1.
    pub(crate) fn gather<'a>(
        &self,
        tensor: impl Into<TensorView<'a>>,
        sequence: usize,
    ) -> Result<Tensor, Error> {
        let tensor = tensor.into();
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
