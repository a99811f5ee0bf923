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
//!     Problem::new(2, 32, 1, 128).with_kv_heads(8).with_mask(Mask::CAUSAL),
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
mod combine;
mod placement;

pub use append::{CacheScales, Rotary, append, append_scaled};
pub use combine::{combine, combine_until};
pub use placement::{Pages, Placement};

use std::ops::Range;

use crate::error::Error;
use crate::inputs::{InputTensors, Inputs};
use crate::problem::{Alibi, Descale, Descales, Lists, Problem, ProblemError, RowScores, Storage};
use crate::tensor::{Layout, Shape, Tensor, TensorView};

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

    /// The sequences of a call, which lie in its tensors as the inputs' placements say; every
    /// sequence has the problem's lengths where they say nothing.
    pub fn of(problem: &Problem, inputs: Inputs<'_>) -> Self {
        let padded = |length: usize| Placement::padded(vec![length; problem.batch]);
        Sequences {
            problem: problem.clone(),
            queries: inputs.queries.cloned().unwrap_or_else(|| padded(problem.query_length)),
            keys: inputs.keys.cloned().unwrap_or_else(|| padded(problem.key_length)),
        }
    }

    /// The problem that these sequences pose in given tensors, and the tensors with the placements.
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
                // Lists count padding too, and are cut to the longest that there can be.
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
    pub fn scores(&self, sequence: usize, query: usize, slope: f32) -> RowScores {
        let (queries, keys) = (self.queries.length(sequence), self.keys.length(sequence));
        RowScores::of(&self.problem, query, queries, keys, slope)
    }

    /// The plain problem that a sequence is by itself.
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
            descales: self.gather_descales(inputs, sequence)?,
        })
    }

    /// The descale factors of a sequence.
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

    /// Where a row's log-sum-exp is, in the order (batch, heads, length) of the query tensor.
    pub fn lse_index(&self, query: Shape, sequence: usize, head: usize, position: usize) -> usize {
        let (entry, row) = self.queries.locate(sequence, position);
        (entry * query.heads + head) * query.length + row
    }
}

impl Placement {
    /// One sequence's rows as a contiguous tensor of batch 1.
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
