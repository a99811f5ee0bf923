//! What a plan over sequences is made for.

use crate::gpu::GpuError;
use crate::problem::Problem;

/// Rows are counted in 31 bits, with room for a sequence behind the last.
const MOST_ROWS: usize = 1 << 29;

/// What a plan is made for: the most that a launch will ask for. Lengths are on the device and may
/// be anything up to it.
///
/// ```
/// use flashcore::gpu::ServingSize;
/// use flashcore::{Mask, Problem};
///
/// // Up to 64 sequences of up to 4096 queries, 32768 in all; as many new keys, packed as well.
/// let problem = Problem::new(64, 32, 4096, 128).with_kv_heads(8).with_mask(Mask::Causal);
/// let size = ServingSize::new(problem).with_packed_queries(32768).with_packed_keys(32768);
/// assert_eq!((size.query_rows, size.key_rows), (32768, 32768));
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ServingSize {
    /// Heads, dims, mask and scores; the number of sequences, and the most queries and keys of one.
    pub problem: Problem,
    /// The block table, where the cache is in pages.
    pub pages: Option<ServingPages>,
    /// Batch entries or pages of the cache; one, where keys are packed.
    pub entries: usize,
    /// Rows of a batch entry of the query tensor: all rows, where queries are packed.
    pub query_rows: usize,
    /// Whether queries are packed: sequence after sequence in one batch entry.
    pub packed_queries: bool,
    /// Rows of a batch entry or page of the key tensor: all rows, where keys are packed.
    pub key_rows: usize,
    /// Whether keys are packed: sequence after sequence in one batch entry.
    pub packed_keys: bool,
    /// Whether each sequence has slopes of its own.
    pub slopes_of_sequences: bool,
}

/// The shape of a block table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ServingPages {
    /// Positions of a page.
    pub size: usize,
    /// Pages of a sequence in the table.
    pub columns: usize,
}

impl ServingSize {
    /// A contiguous cache with a batch entry for each sequence, and as many queries for each.
    pub fn new(problem: Problem) -> Self {
        ServingSize {
            entries: problem.batch,
            query_rows: problem.query_length,
            key_rows: problem.key_length,
            problem,
            pages: None,
            packed_queries: false,
            packed_keys: false,
            slopes_of_sequences: false,
        }
    }

    /// The same with another number of batch entries, which the sequences name.
    pub fn with_entries(self, entries: usize) -> Self {
        ServingSize { entries, ..self }
    }

    /// The same with a cache of `entries` pages. The problem's longest length becomes what the
    /// table has room for.
    pub fn with_pages(mut self, size: usize, columns: usize, entries: usize) -> Self {
        self.problem.key_length = size.saturating_mul(columns);
        let pages = Some(ServingPages { size, columns });
        ServingSize { pages, entries, key_rows: size, packed_keys: false, ..self }
    }

    /// The same with queries packed into so many rows.
    pub fn with_packed_queries(self, rows: usize) -> Self {
        ServingSize { packed_queries: true, query_rows: rows, ..self }
    }

    /// The same with keys packed into so many rows.
    pub fn with_packed_keys(self, rows: usize) -> Self {
        ServingSize { packed_keys: true, key_rows: rows, entries: 1, pages: None, ..self }
    }

    /// The same with slopes for each sequence and query head.
    pub fn with_slopes_of_sequences(self) -> Self {
        ServingSize { slopes_of_sequences: true, ..self }
    }

    /// Refuses what no kernel could serve.
    pub(in crate::gpu) fn validate(&self, kernel: &'static str) -> Result<(), GpuError> {
        let refuse = |reason: String| Err(GpuError::Unsupported { kernel, reason });
        if let Err(error) = self.problem.validate() {
            return refuse(error.to_string());
        }
        if self.pages.is_some_and(|pages| pages.size == 0 || pages.columns == 0) {
            return refuse("pages and the rows of the block table must not be empty".to_owned());
        }
        if self.pages.is_some() && self.packed_keys {
            return refuse("keys are in pages or packed, not both".to_owned());
        }
        if self.query_rows.max(self.key_rows) > MOST_ROWS {
            return Err(GpuError::TooLarge { what: "the number of rows of a batch entry" });
        }
        if self.entries == 0 {
            return refuse("the cache has no batch entries".to_owned());
        }
        Ok(())
    }
}
