//! Ragged batches: sequences of unequal lengths and their placement in memory, with rows between
//! them that belong to no sequence.

use std::fmt;

use flashcore::serving::{Pages, Placement};
use flashcore::{Error, Problem, Shape};

use crate::rng::Rng;

/// A ragged batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ragged {
    /// The number of queries of each sequence.
    pub queries: Vec<usize>,
    /// The number of keys of each sequence.
    pub keys: Vec<usize>,
    /// The left padding of each sequence: positions before its keys that are not part of it. Empty
    /// for none.
    pub padding: Vec<usize>,
    /// The placement of the queries: padded or packed.
    pub query_place: PlacementKind,
    /// The placement of the keys.
    pub key_place: PlacementKind,
}

/// The placement of sequences in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementKind {
    /// A batch entry for each sequence, as long as the longest.
    Padded,
    /// Batch entries in random order; one entry belongs to no sequence.
    Entries,
    /// Packed one after the other.
    Packed,
    /// Packed, with a row after each sequence that belongs to none.
    PackedWithGaps,
    /// Pages of this many positions in random order; some pages belong to no sequence.
    Paged(usize),
    /// The first and the last of five pages of this many positions, by turns, so that sequences
    /// share pages.
    SharedPages(usize),
}

type Placed = (Placement, Shape);

impl Ragged {
    /// Creates a batch of padded queries over keys in batch entries in random order.
    pub fn new(queries: Vec<usize>, keys: Vec<usize>) -> Self {
        let (query_place, key_place) = (PlacementKind::Padded, PlacementKind::Entries);
        Ragged { queries, keys, padding: Vec::new(), query_place, key_place }
    }

    /// Returns the batch with another placement of its keys.
    pub fn over(&self, key_place: PlacementKind) -> Self {
        Ragged { key_place, ..self.clone() }
    }

    /// Returns the placements of queries and keys with the shapes of their tensors.
    pub(super) fn placements(&self, problem: &Problem) -> Result<(Placed, Placed), Error> {
        let (heads, key_heads) = (problem.query_heads, problem.kv_heads);
        let queries = place(self.query_place, &self.queries, heads, problem.head_dim)?;
        let padding = |sequence: usize| self.padding.get(sequence).copied().unwrap_or(0);
        let ends = self.keys.iter().enumerate().map(|(index, keys)| keys + padding(index));
        let ends: Vec<usize> = ends.collect();
        let (keys, shape) = place(self.key_place, &ends, key_heads, problem.head_dim)?;
        Ok((queries, (keys.with_left_padding(self.padding.clone()), shape)))
    }
}

fn place(
    place: PlacementKind,
    lengths: &[usize],
    heads: usize,
    dim: usize,
) -> Result<Placed, Error> {
    let mut rng = Rng::new(5);
    let packed = |gap: usize| {
        let start = |count: usize| lengths[..count].iter().sum::<usize>() + gap * count;
        let starts: Vec<usize> = (0..=lengths.len()).map(start).collect();
        let rows = starts[lengths.len()].max(1);
        let placement = Placement::packed(starts).with_lengths(lengths.to_vec());
        (placement, Shape::new(1, rows, heads, dim))
    };
    let room = lengths.iter().copied().max().unwrap_or(0).max(1);
    Ok(match place {
        PlacementKind::Padded => {
            let shape = Shape::new(lengths.len(), room, heads, dim);
            (Placement::padded(lengths.to_vec()), shape)
        }
        PlacementKind::Entries => rng.entries(lengths.to_vec(), room, heads, dim),
        PlacementKind::Packed => packed(0),
        PlacementKind::PackedWithGaps => packed(1),
        PlacementKind::Paged(size) => rng.paged(lengths.to_vec(), size, room, heads, dim)?,
        PlacementKind::SharedPages(size) => {
            let (columns, last) = (room.div_ceil(size), 4);
            let table = (0..lengths.len() * columns).map(|index| index as u32 % 2 * last);
            let pages = Pages::new(size, columns, table.collect())?;
            let shape = Shape::new(last as usize + 1, size, heads, dim);
            (Placement::paged(lengths.to_vec(), pages), shape)
        }
    })
}

impl fmt::Display for Ragged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ragged { queries, keys, padding, query_place, key_place } = self;
        write!(f, "{query_place:?} queries {queries:?}, {key_place:?} keys {keys:?}")?;
        if !padding.is_empty() {
            write!(f, " behind {padding:?}")?;
        }
        Ok(())
    }
}
