//! New keys and values into a cache that lies in host memory.

use super::{Placement, ServingError};
use crate::error::Error;
use crate::inputs::InputError;
use crate::tensor::{Shape, Tensor};

/// Rotary embedding: pairs of columns of a query or a key are rotated by an angle that its position
/// has.
#[derive(Debug, Clone, Copy)]
pub struct Rotary<'a> {
    /// The first so many columns are rotated, the others stay.
    pub dim: usize,
    /// Whether neighbours are pairs; else column `i` and column `dim / 2 + i`.
    pub interleaved: bool,
    /// `dim / 2` cosines for each position.
    pub cosines: &'a [f32],
    /// `dim / 2` sines for each position.
    pub sines: &'a [f32],
}

impl Rotary<'_> {
    /// Queries or keys, rotated: row `i` of every batch entry as one at position `positions[i]`.
    ///
    /// ```
    /// use flashcore::serving::Rotary;
    /// use flashcore::{DType, Shape, Tensor};
    ///
    /// // Two positions: no angle at the first, a quarter turn at the second.
    /// let rotary = Rotary { dim: 2, interleaved: true, cosines: &[1.0, 0.0], sines: &[0.0, 1.0] };
    /// let queries = Tensor::from_f32(DType::F32, Shape::new(1, 1, 1, 4), &[1.0, 2.0, 3.0, 4.0])?;
    /// assert_eq!(rotary.rotate(&queries, &[1])?.to_f32(), [-2.0, 1.0, 3.0, 4.0]);
    /// # Ok::<(), flashcore::Error>(())
    /// ```
    pub fn rotate(&self, tensor: &Tensor, positions: &[usize]) -> Result<Tensor, Error> {
        let shape = tensor.shape();
        if positions.len() != shape.length {
            let (list, given) = ("the list of positions", positions.len());
            return Err(ServingError::Entries { list, given, expected: shape.length }.into());
        }
        let last = positions.iter().max();
        self.validate(shape.dim, last.map_or(0, |last| last.saturating_add(1)))?;
        let mut rotated = Tensor::zeros(tensor.dtype(), shape)?;
        let mut row = vec![0f32; shape.dim];
        for [batch, index, head] in shape.vectors() {
            tensor.head(batch, head).read(index, &mut row);
            self.turn(&mut row, positions[index]);
            rotated.set_row([batch, index, head], &row);
        }
        Ok(rotated)
    }

    /// Turns a query or a key at a position: in f32, to be rounded once.
    ///
    /// # Panics
    ///
    /// If the row is narrower than `dim` or the tables end before the position.
    pub fn turn(&self, vector: &mut [f32], position: usize) {
        let half = self.dim / 2;
        for pair in 0..half {
            let (first, second) = match self.interleaved {
                true => (2 * pair, 2 * pair + 1),
                false => (pair, pair + half),
            };
            let (cosine, sine) =
                (self.cosines[position * half + pair], self.sines[position * half + pair]);
            let (x, y) = (vector[first], vector[second]);
            vector[first] = x * cosine - y * sine;
            vector[second] = x * sine + y * cosine;
        }
    }

    /// Refuse what is no embedding of vectors of this width up to a position.
    pub fn validate(&self, head_dim: usize, positions: usize) -> Result<(), ServingError> {
        let Rotary { dim, cosines, sines, .. } = *self;
        if dim == 0 || !dim.is_multiple_of(2) || dim > head_dim {
            return Err(ServingError::RotaryDim { given: dim, head_dim });
        }
        let expected = positions.saturating_mul(dim / 2);
        for (list, given) in
            [("the table of cosines", cosines.len()), ("the table of sines", sines.len())]
        {
            if given < expected {
                return Err(ServingError::Entries { list, given, expected });
            }
        }
        Ok(())
    }
}

/// Writes new keys and values behind the sequences of a cache, in place; without rotary embeddings
/// bit for bit. `place` says where the sequences are and how long they were, `new` where the new
/// rows are: row `i` of a sequence becomes its position `length + i`.
pub fn append(
    (key, value): (&mut Tensor, &mut Tensor),
    place: &Placement,
    (new_key, new_value): (&Tensor, &Tensor),
    new: &Placement,
    rotary: Option<Rotary<'_>>,
) -> Result<(), Error> {
    let count = new.sequences();
    if place.sequences() != count {
        let (list, given) = ("the placement of the cache", place.sequences());
        return Err(ServingError::Entries { list, given, expected: count }.into());
    }
    place.validate()?;
    new.validate()?;
    // A length that cannot be counted is longer than any place: refused as such below.
    let grown = |sequence: usize| place.ends()[sequence].saturating_add(new.length(sequence));
    let grown: Vec<usize> = (0..count).map(grown).collect();
    let longest = grown.iter().copied().max().unwrap_or(0);
    let grown = place.clone().with_lengths(grown);
    for (name, cache, added) in [("key", &*key, new_key), ("value", &*value, new_value)] {
        let (given, existing) = (added.shape(), cache.shape());
        if (given.heads, given.dim) != (existing.heads, existing.dim) {
            let expected = Shape { heads: existing.heads, dim: existing.dim, ..given };
            return Err(InputError::Shape { tensor: name, given, expected }.into());
        }
        if added.dtype() != cache.dtype() {
            let (given, expected) = (added.dtype(), cache.dtype());
            return Err(InputError::DType { tensor: name, given, expected }.into());
        }
        grown.fits(existing)?;
        new.fits(given)?;
    }
    let heads = key.shape().heads;
    for (name, tensor) in [("value", &*value), ("new value", new_value)] {
        let given = tensor.shape();
        if given.heads != heads {
            let expected = Shape { heads, ..given };
            return Err(InputError::Shape { tensor: name, given, expected }.into());
        }
    }
    if let Some(rotary) = rotary {
        rotary.validate(key.shape().dim, longest)?;
    }
    let mut row = vec![0f32; key.shape().dim];
    for sequence in 0..count {
        for index in 0..new.length(sequence) {
            let (entry, from) = new.locate(sequence, index);
            let position = place.length(sequence) + index;
            let (page, to) = grown.locate(sequence, position);
            for head in 0..heads {
                value.copy_row([page, to, head], new_value, [entry, from, head]);
                let Some(rotary) = rotary else {
                    key.copy_row([page, to, head], new_key, [entry, from, head]);
                    continue;
                };
                new_key.head(entry, head).read(from, &mut row);
                rotary.turn(&mut row, place.ends()[sequence] + index);
                key.set_row([page, to, head], &row);
            }
        }
    }
    Ok(())
}
