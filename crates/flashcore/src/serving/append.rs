//! Appending new keys and values to a cache in host memory, with rotary embeddings.

use super::{Placement, ServingError};
use crate::dtype::DType;
use crate::error::Error;
use crate::inputs::{InputError, check_factors};
use crate::quantize;
use crate::tensor::{Shape, Tensor};

/// A rotary embedding: pairs of columns of a query or key are rotated by angles that depend on its
/// position.
#[derive(Debug, Clone, Copy)]
pub struct Rotary<'a> {
    /// Number of leading columns that are rotated; the others are copied.
    pub dim: usize,
    /// Whether adjacent columns form a pair; otherwise columns `i` and `dim / 2 + i` do.
    pub interleaved: bool,
    /// `dim / 2` cosines per position.
    pub cosines: &'a [f32],
    /// `dim / 2` sines per position.
    pub sines: &'a [f32],
}

impl Rotary<'_> {
    /// Rotates queries or keys: row `i` of every batch entry has position `positions[i]`.
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

    /// Rotates one query or key at a position, in f32, so that the result is rounded once.
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

    /// Refuses an invalid rotary dim for vectors of `head_dim` elements, and tables that do not
    /// cover `positions` positions.
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

/// The descale factors of an 8-bit cache that is appended to, for keys and values.
#[derive(Debug, Default)]
pub enum CacheScales<'a> {
    /// No factors: values are rounded as they are.
    #[default]
    None,
    /// Given factors per (sequence, key head), of shape (sequences, 1, key heads, 1) with any
    /// strides.
    Given(&'a Tensor, &'a Tensor),
    /// Factors to be computed per token and head, and written here: of the caches' shapes with a
    /// dim of 1.
    Found(&'a mut Tensor, &'a mut Tensor),
}

/// Writes new keys and values behind the sequences of a cache, in place, and bit for bit unless
/// there are rotary embeddings. `place` says where the sequences are and how long they were, `new`
/// where the new rows are: row `i` of a sequence becomes its position `length + i`. An 8-bit cache
/// rounds wider rows: see [`append_scaled`].
pub fn append(
    caches: (&mut Tensor, &mut Tensor),
    place: &Placement,
    new_rows: (&Tensor, &Tensor),
    new: &Placement,
    rotary: Option<Rotary<'_>>,
) -> Result<(), Error> {
    append_scaled(caches, place, new_rows, new, rotary, CacheScales::None)
}

/// Like [`append`], for an 8-bit cache with descale factors: wider rows are divided by them and
/// rounded once ([`mod@crate::quantize`]).
///
/// ```
/// use flashcore::serving::{CacheScales, Placement, append_scaled};
/// use flashcore::{DType, Shape, Tensor};
///
/// let cache = Shape::new(1, 16, 2, 8);
/// let (mut key, mut value) = (Tensor::zeros(DType::E4M3, cache)?, Tensor::zeros(DType::E4M3, cache)?);
/// let factors = || Tensor::zeros(DType::F32, Shape { dim: 1, ..cache });
/// let (mut of_key, mut of_value) = (factors()?, factors()?);
///
/// let new = Tensor::random(DType::BF16, Shape::new(1, 3, 2, 8), 0)?;
/// let scales = CacheScales::Found(&mut of_key, &mut of_value);
/// let (place, rows) = (Placement::padded(vec![5]), Placement::padded(vec![3]));
/// append_scaled((&mut key, &mut value), &place, (&new, &new), &rows, None, scales)?;
///
/// let stored = key.head(0, 1).row(5)[0] * of_key.head(0, 1).row(5)[0];
/// assert!((stored - new.head(0, 1).row(0)[0]).abs() < 0.1);
/// # Ok::<(), flashcore::Error>(())
/// ```
pub fn append_scaled(
    (key, value): (&mut Tensor, &mut Tensor),
    place: &Placement,
    (new_key, new_value): (&Tensor, &Tensor),
    new: &Placement,
    rotary: Option<Rotary<'_>>,
    scales: CacheScales<'_>,
) -> Result<(), Error> {
    let count = new.sequences();
    if place.sequences() != count {
        let (list, given) = ("the placement of the cache", place.sequences());
        return Err(ServingError::Entries { list, given, expected: count }.into());
    }
    place.validate()?;
    new.validate()?;
    // A length that overflows saturates, and is refused below as too long.
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
        let rounded = cache.dtype().is_8_bit() && !added.dtype().is_8_bit();
        if added.dtype() != cache.dtype() && !rounded {
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
    let [of_key, of_value] = scales.each();
    of_key.validate(("k_descale", "k_descale factors"), (&*key, new_key), count)?;
    of_value.validate(("v_descale", "v_descale factors"), (&*value, new_value), count)?;
    for (cache, added, rotary, mut scale) in
        [(key, new_key, rotary, of_key), (value, new_value, None, of_value)]
    {
        let (dtype, rounded) = (cache.dtype(), cache.dtype() != added.dtype());
        let mut row = vec![0f32; cache.shape().dim];
        for sequence in 0..count {
            for index in 0..new.length(sequence) {
                let (entry, from) = new.locate(sequence, index);
                let (page, to) = grown.locate(sequence, place.length(sequence) + index);
                for head in 0..heads {
                    let to = [page, to, head];
                    if rotary.is_none() && !rounded {
                        cache.copy_row(to, added, [entry, from, head]);
                        continue;
                    }
                    added.head(entry, head).read(from, &mut row);
                    if let Some(rotary) = rotary {
                        rotary.turn(&mut row, place.ends()[sequence] + index);
                    }
                    if rounded {
                        scale.divide(&mut row, dtype, sequence, to);
                    }
                    cache.set_row(to, &row);
                }
            }
        }
    }
    Ok(())
}

/// The descale factors of keys or of values.
enum Scale<'a> {
    None,
    Given(&'a Tensor),
    Found(&'a mut Tensor),
}

impl<'a> CacheScales<'a> {
    fn each(self) -> [Scale<'a>; 2] {
        match self {
            CacheScales::None => [Scale::None, Scale::None],
            CacheScales::Given(key, value) => [key, value].map(Scale::Given),
            CacheScales::Found(key, value) => [key, value].map(Scale::Found),
        }
    }
}

impl Scale<'_> {
    /// Refuses factors of another type or shape, and factors where nothing is rounded.
    fn validate(
        &self,
        (tensor, all): (&'static str, &'static str),
        (cache, added): (&Tensor, &Tensor),
        sequences: usize,
    ) -> Result<(), InputError> {
        let shape = cache.shape();
        let (factors, expected): (&Tensor, Shape) = match self {
            Scale::None => return Ok(()),
            Scale::Given(factors) => (factors, Shape::new(sequences, 1, shape.heads, 1)),
            Scale::Found(factors) => (factors, Shape { dim: 1, ..shape }),
        };
        if added.dtype() == cache.dtype() {
            return Err(InputError::Unexpected { tensor: all });
        }
        if factors.shape() != expected {
            return Err(InputError::Shape { tensor, given: factors.shape(), expected });
        }
        match (factors.dtype(), self) {
            (DType::F32, Scale::Given(_)) => check_factors(tensor, factors.view()),
            (DType::F32, _) => Ok(()),
            (given, _) => Err(InputError::DType { tensor, given, expected: DType::F32 }),
        }
    }

    /// Divides a row by the factor of its place in the cache. A factor that is not given is
    /// computed and stored.
    fn divide(&mut self, row: &mut [f32], dtype: DType, sequence: usize, to: [usize; 3]) {
        let factor = match self {
            Scale::None => return,
            Scale::Given(factors) => factors.head(sequence, to[2]).row(0)[0],
            Scale::Found(factors) => {
                let found = quantize::row_factor(row, dtype);
                factors.set_row(to, &[found]);
                found
            }
        };
        quantize::divide(row, factor);
    }
}
