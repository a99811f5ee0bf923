//! What a plan for new tokens is made for.

use super::NAME;
use crate::gpu::{GpuError, ServingSize};
use crate::serving::ServingError;

/// What a plan is made for: the most that a launch will ask for.
#[derive(Debug, Clone, PartialEq)]
pub struct AppendSize {
    /// The cache, and the queries that will look at it.
    pub serving: ServingSize,
    /// The most new tokens of a sequence.
    pub new_tokens: usize,
    /// Rows of a batch entry of the new keys and values: all rows, where they are packed.
    pub new_rows: usize,
    /// Whether new keys and values are packed: sequence after sequence in one batch entry.
    pub packed_new: bool,
    /// How new keys are turned.
    pub rotary: Option<RotarySize>,
    /// Whether queries are turned as well. Where the mask hides something, query `i` of a sequence
    /// stands at the position of its new key `i`; where it hides nothing, all stand at the first.
    pub turned_queries: bool,
}

/// Rotary embeddings, by tables on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RotarySize {
    /// The first so many columns are turned, the others stay.
    pub dim: usize,
    /// Whether neighbours are pairs; else column `i` and column `dim / 2 + i`.
    pub interleaved: bool,
    /// Positions of the tables. What stands beyond is turned as the last.
    pub positions: usize,
}

impl AppendSize {
    /// Up to so many new tokens for each sequence of a cache, in a batch entry for each.
    pub fn new(serving: ServingSize, new_tokens: usize) -> Self {
        AppendSize {
            serving,
            new_tokens,
            new_rows: new_tokens,
            packed_new: false,
            rotary: None,
            turned_queries: false,
        }
    }

    /// The same with new keys and values packed into so many rows.
    pub fn with_packed_new(self, rows: usize) -> Self {
        AppendSize { packed_new: true, new_rows: rows, ..self }
    }

    /// The same with new keys turned.
    pub fn with_rotary(self, dim: usize, interleaved: bool, positions: usize) -> Self {
        AppendSize { rotary: Some(RotarySize { dim, interleaved, positions }), ..self }
    }

    /// The same with queries turned as well.
    pub fn with_turned_queries(self) -> Self {
        AppendSize { turned_queries: true, ..self }
    }

    /// Refuses what makes no sense.
    pub(super) fn validate(&self) -> Result<(), GpuError> {
        self.serving.validate(NAME)?;
        let refuse = |reason: String| Err(GpuError::Unsupported { kernel: NAME, reason });
        if self.serving.packed_keys {
            return refuse("packed keys have no room for more".to_owned());
        }
        if self.new_tokens == 0 || self.serving.problem.batch == 0 {
            return refuse("there are no new tokens".to_owned());
        }
        if self.new_rows > i32::MAX as usize / 2 || self.new_tokens > i32::MAX as usize / 2 {
            return Err(GpuError::TooLarge { what: "the number of new tokens" });
        }
        let head_dim = self.serving.problem.head_dim;
        match self.rotary {
            None if self.turned_queries => {
                refuse("queries are turned by rotary embeddings, and there are none".to_owned())
            }
            Some(RotarySize { dim, .. }) if dim == 0 || dim % 2 != 0 || dim > head_dim => {
                refuse(ServingError::RotaryDim { given: dim, head_dim }.to_string())
            }
            Some(RotarySize { positions: 0, .. }) => {
                refuse("the rotary tables have no positions".to_owned())
            }
            Some(RotarySize { positions, .. }) if positions > i32::MAX as usize / 2 => {
                Err(GpuError::TooLarge { what: "the number of rotary positions" })
            }
            _ => Ok(()),
        }
    }
}
