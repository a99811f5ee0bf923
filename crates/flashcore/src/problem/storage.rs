//! How the rows of sequences are stored in a tensor, and the lists that say where each sequence is.

use serde::Serialize;

use super::Problem;
use crate::tensor::Shape;

/// How the rows of sequences are stored in a tensor (batch, length, heads, dim).
///
/// | | location of position `p` of sequence `i` | the tensor |
/// | --- | --- | --- |
/// | `Padded` | batch entry `i`, row `p` | (sequences, length, heads, dim) |
/// | `Entries` | batch entry `batch_index[i]`, row `p` | (entries, length, heads, dim) |
/// | `Packed` | row `starts[i] + p` | (1, rows, heads, dim) |
/// | `Paged` | page `block_table[i][p / size]`, row `p % size` | (pages, size, heads, dim) |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Storage {
    /// One batch entry per sequence.
    #[default]
    Padded,
    /// A cache of this many batch entries. A list names the entry of each sequence
    /// (`cache_batch_idx`); without it, sequence `i` has entry `i`.
    Entries(usize),
    /// All sequences one after the other in this many rows, with a list of their starts
    /// (`cu_seqlens`).
    Packed(usize),
    /// Pages of a cache, located through a block table.
    Paged {
        /// Positions per page.
        size: usize,
        /// Columns of the block table: the most pages that one sequence can have.
        columns: usize,
        /// Pages in the cache.
        pages: usize,
    },
}

/// Which lists are passed besides those that the storage itself needs (starts, block table). Each
/// holds one number per sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
pub struct Lists {
    /// Number of queries of each sequence that are used (`seqused_q`).
    pub query_lengths: bool,
    /// Number of keys of each sequence that are used, left padding included (`seqused_k`,
    /// `cache_seqlens`).
    pub key_lengths: bool,
    /// Number of positions at the start of each sequence that are skipped (`leftpad_k`).
    pub left_padding: bool,
    /// Batch entry of each sequence (`cache_batch_idx`).
    pub batch_index: bool,
}

impl Storage {
    /// Returns the shape of a tensor with this storage, for `batch` sequences of up to `length`
    /// rows.
    pub(super) fn shape(self, batch: usize, length: usize, heads: usize, dim: usize) -> Shape {
        let (batch, length) = match self {
            Storage::Padded => (batch, length),
            Storage::Entries(entries) => (entries, length),
            Storage::Packed(rows) => (1, rows),
            Storage::Paged { size, pages, .. } => (pages, size),
        };
        Shape::new(batch, length, heads, dim)
    }

    /// Tells whether sequences follow one another in one list of rows.
    pub fn is_packed(self) -> bool {
        matches!(self, Storage::Packed(_))
    }

    /// Tells whether rows are located through a block table.
    pub fn is_paged(self) -> bool {
        matches!(self, Storage::Paged { .. })
    }
}

impl Problem {
    /// Tells whether every sequence has the problem's lengths and a batch entry of its own.
    pub fn has_equal_lengths(&self) -> bool {
        (self.queries, self.keys) == (Storage::Padded, Storage::Padded)
            && self.lists == Lists::default()
    }

    /// Returns the number of batch entries or pages of the key tensor.
    pub fn entries(&self) -> usize {
        self.key_shape().batch
    }

    pub(super) fn validate_storage(&self) -> Result<(), &'static str> {
        let padded = !(self.keys.is_packed() || self.keys.is_paged());
        let faults = [
            (
                self.queries.is_paged() || matches!(self.queries, Storage::Entries(_)),
                "queries are padded or packed, not in a cache",
            ),
            (
                matches!(self.keys, Storage::Paged { size, columns, .. } if size == 0 || columns == 0),
                "pages and the rows of the block table must not be empty",
            ),
            (
                matches!(self.keys, Storage::Paged { size, columns, .. }
                    if size.saturating_mul(columns) < self.key_length),
                "the block table has no room for the longest sequence",
            ),
            (
                self.lists.batch_index && !padded,
                "a batch index is for keys that are neither packed nor in pages",
            ),
        ];
        faults.into_iter().find(|(fault, _)| *fault).map_or(Ok(()), |(_, fault)| Err(fault))
    }

    /// Returns the words of a problem's text for storage and lists that differ from the defaults.
    pub(super) fn storage_words(&self) -> Vec<String> {
        let mut words = Vec::new();
        for (name, storage) in [("queries", self.queries), ("keys", self.keys)] {
            words.extend(match storage {
                Storage::Padded => None,
                Storage::Entries(entries) => Some(format!("{name}=entries:{entries}")),
                Storage::Packed(rows) => Some(format!("{name}=packed:{rows}")),
                Storage::Paged { size, columns, pages } => {
                    Some(format!("{name}=pages:{size}:{columns}:{pages}"))
                }
            });
        }
        let mut lists = self.lists;
        let given = lists.named().into_iter().filter(|(_, given)| **given);
        words.extend(given.map(|(name, _)| name.to_owned()));
        words
    }
}

impl Lists {
    /// Returns the lists, each with its name in a problem's text.
    fn named(&mut self) -> [(&'static str, &mut bool); 4] {
        [
            ("query_lengths", &mut self.query_lengths),
            ("key_lengths", &mut self.key_lengths),
            ("left_padding", &mut self.left_padding),
            ("batch_index", &mut self.batch_index),
        ]
    }

    /// Adds the list of this name. Returns false if there is no such list.
    pub(super) fn insert(&mut self, name: &str) -> bool {
        let list = self.named().into_iter().find(|(known, _)| *known == name);
        list.map(|(_, given)| *given = true).is_some()
    }
}

impl std::str::FromStr for Storage {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (kind, numbers) = text.split_once(':').unwrap_or((text, ""));
        let numbers: Result<Vec<usize>, _> =
            numbers.split(':').filter(|it| !it.is_empty()).map(str::parse).collect();
        match (kind, &numbers.map_err(|_| ())?[..]) {
            ("padded", []) => Ok(Storage::Padded),
            ("entries", [entries]) => Ok(Storage::Entries(*entries)),
            ("packed", [rows]) => Ok(Storage::Packed(*rows)),
            ("pages", [size, columns, pages]) => {
                Ok(Storage::Paged { size: *size, columns: *columns, pages: *pages })
            }
            _ => Err(()),
        }
    }
}
