//! Sequences of unequal lengths, and how they lie: with whatever is of nobody between them.

use std::fmt;

use flashcore::serving::{Pages, Placement};
use flashcore::{Error, Problem, Shape};

use crate::dice::Dice;

/// Sequences of unequal lengths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ragged {
    /// Queries of each.
    pub queries: Vec<usize>,
    /// Keys of each.
    pub keys: Vec<usize>,
    /// Positions before the keys of each that are no part of it; none when empty.
    pub padding: Vec<usize>,
    /// How queries lie: padded or packed.
    pub query_place: Place,
    /// How keys lie.
    pub key_place: Place,
}

/// How sequences lie in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a batch entry for each, as long as the longest.
    Padded,
    /// In batch entries of another order, with one of nobody.
    Entries,
    /// One after the other.
    Packed,
    /// The same with a row between them that is of nobody.
    Apart,
    /// In pages of so many positions, in an order of their own and with some of nobody.
    Paged(usize),
    /// In the first of several such pages and in the last, by turns: sequences share them.
    Shared(usize),
}

type Placed = (Placement, Shape);

impl Ragged {
    /// Padded queries over keys in batch entries of another order.
    pub fn new(queries: Vec<usize>, keys: Vec<usize>) -> Self {
        let (query_place, key_place) = (Place::Padded, Place::Entries);
        Ragged { queries, keys, padding: Vec::new(), query_place, key_place }
    }

    /// The same with keys elsewhere.
    pub fn over(&self, key_place: Place) -> Self {
        Ragged { key_place, ..self.clone() }
    }

    /// Where queries and keys are, and the shapes of their tensors.
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

fn place(place: Place, lengths: &[usize], heads: usize, dim: usize) -> Result<Placed, Error> {
    let mut dice = Dice::new(5);
    let packed = |gap: usize| {
        let start = |count: usize| lengths[..count].iter().sum::<usize>() + gap * count;
        let starts: Vec<usize> = (0..=lengths.len()).map(start).collect();
        let rows = starts[lengths.len()].max(1);
        let placement = Placement::packed(starts).with_lengths(lengths.to_vec());
        (placement, Shape::new(1, rows, heads, dim))
    };
    let room = lengths.iter().copied().max().unwrap_or(0).max(1);
    Ok(match place {
        Place::Padded => {
            let shape = Shape::new(lengths.len(), room, heads, dim);
            (Placement::padded(lengths.to_vec()), shape)
        }
        Place::Entries => dice.entries(lengths.to_vec(), room, heads, dim),
        Place::Packed => packed(0),
        Place::Apart => packed(1),
        Place::Paged(size) => dice.paged(lengths.to_vec(), size, room, heads, dim)?,
        Place::Shared(size) => {
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
