//! Descale factors: what the numbers of 8-bit tensors are multiplied with to be what they stand for.
//!
//! Factors are in f32. Scores take the softmax scale times the query's and the key's factor, the
//! output the value's, so that kernels multiply products and never single numbers where one factor
//! serves a whole head.

use serde::Serialize;

use super::{Pass, Problem};
use crate::dtype::DType;
use crate::tensor::Shape;

/// Over what the descale factors of a tensor range.
///
/// | | the factors' tensor | in FlashAttention |
/// | --- | --- | --- |
/// | `PerHead` | (sequences, key heads), any strides, also of zero: one number for all, one for each head, or one for each sequence and head | `q_descale`, `k_descale`, `v_descale` |
/// | `PerToken` | (batch entries or pages, positions, key heads): lies like the tensor that it belongs to, without its last dimension | |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Descale {
    /// There are none: every factor is 1.
    #[default]
    None,
    /// One for each sequence and key head.
    PerHead,
    /// One for each row of the tensor and key head.
    PerToken,
}

/// Something for the queries, the keys and the values each: which descale factors there are, or the
/// factors themselves.
///
/// ```
/// use flashcore::{DType, Descale, Descales, Problem};
///
/// let problem = Problem::new(4, 32, 1, 128)
///     .with_dtype(DType::BF16)
///     .with_kv_heads(8)
///     .with_key_length(8192)
///     .with_kv_dtype(DType::E4M3)
///     .with_descales(Descales::of_cache(Descale::PerHead));
/// problem.validate()?;
/// assert!(problem.text().ends_with("k_descale=head,v_descale=head"));
/// # Ok::<(), flashcore::ProblemError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
pub struct Descales<T = Descale> {
    /// Of the queries. Their factors are of key heads too: the query heads that share one share it.
    pub query: T,
    /// Of the keys.
    pub key: T,
    /// Of the values.
    pub value: T,
}

impl Descales {
    /// None at all.
    pub const NONE: Descales =
        Descales { query: Descale::None, key: Descale::None, value: Descale::None };

    /// The same for keys and values, and none for queries.
    pub const fn of_cache(descale: Descale) -> Self {
        Descales { query: Descale::None, key: descale, value: descale }
    }
}

impl<T> Descales<T> {
    /// The same of another kind.
    pub fn map<U>(self, mut of: impl FnMut(T) -> U) -> Descales<U> {
        Descales { query: of(self.query), key: of(self.key), value: of(self.value) }
    }

    /// The same of another kind, if there is one for each.
    pub fn try_map<U, E>(self, mut of: impl FnMut(T) -> Result<U, E>) -> Result<Descales<U>, E> {
        Ok(Descales { query: of(self.query)?, key: of(self.key)?, value: of(self.value)? })
    }

    /// The three of them, to be looked at.
    pub fn each_ref(&self) -> Descales<&T> {
        Descales { query: &self.query, key: &self.key, value: &self.value }
    }

    /// The three of them in their usual order.
    pub fn into_array(self) -> [T; 3] {
        [self.query, self.key, self.value]
    }

    /// Each beside another.
    pub fn zip<U>(self, other: Descales<U>) -> Descales<(T, U)> {
        Descales {
            query: (self.query, other.query),
            key: (self.key, other.key),
            value: (self.value, other.value),
        }
    }
}

/// The words of a problem's text, in the order of [`Descales`].
const NAMES: Descales<&str> = Descales { query: "q_descale", key: "k_descale", value: "v_descale" };

impl Descale {
    /// What stands behind the name in a problem's text.
    fn word(self) -> Option<&'static str> {
        match self {
            Descale::None => None,
            Descale::PerHead => Some("head"),
            Descale::PerToken => Some("token"),
        }
    }

    fn of_word(word: &str) -> Result<Self, ()> {
        let known = [Descale::PerHead, Descale::PerToken];
        known.into_iter().find(|it| it.word() == Some(word)).ok_or(())
    }
}

impl Descales {
    /// Takes a word of a problem's text, if it is one of these.
    pub(super) fn take(&mut self, name: &str, value: &str) -> Option<Result<(), ()>> {
        let fields = [&mut self.query, &mut self.key, &mut self.value];
        let (field, _) = fields.into_iter().zip(NAMES.into_array()).find(|(_, it)| *it == name)?;
        Some(Descale::of_word(value).map(|descale| *field = descale))
    }

    /// What is not none, for people and in the text of a problem.
    pub(super) fn words(self) -> Vec<String> {
        let words = NAMES.zip(self).into_array().into_iter();
        words.filter_map(|(name, it)| Some(format!("{name}={}", it.word()?))).collect()
    }
}

impl Problem {
    /// The shape of the descale factors of the queries, keys and values, where there are any; the
    /// last dimension is 1.
    pub fn descale_shapes(&self) -> Descales<Option<Shape>> {
        self.descale_shapes_over(self.key_shape())
    }

    /// The same for keys and values in tensors of another shape than the problem says, but for the
    /// dim: that of a cache, where sequences are not placed yet.
    pub fn descale_shapes_over(&self, cache: Shape) -> Descales<Option<Shape>> {
        self.descales.map(|descale| match descale {
            Descale::None => None,
            Descale::PerHead => Some(Shape::new(self.batch, 1, self.kv_heads, 1)),
            Descale::PerToken => Some(Shape { dim: 1, ..cache }),
        })
    }

    /// Refuses element types and descale factors that nobody can serve.
    pub(super) fn validate_elements(&self) -> Result<(), ElementError> {
        let dtypes = self.dtypes;
        if dtypes.output.is_8_bit() {
            return Err(ElementError::Output(dtypes.output));
        }
        if dtypes.query == DType::Int8 {
            return Err(ElementError::Query);
        }
        let of = Descales { query: dtypes.query, key: dtypes.key, value: dtypes.value };
        let names = Descales { query: "query", key: "key", value: "value" };
        for ((tensor, dtype), descale) in names.zip(of).zip(self.descales).into_array() {
            if self.pass == Pass::Backward && dtype.is_8_bit() {
                return Err(ElementError::Backward { tensor, dtype });
            }
            if descale != Descale::None && !dtype.is_8_bit() {
                return Err(ElementError::Wide { tensor, dtype });
            }
        }
        match self.descales.query {
            Descale::PerToken => Err(ElementError::QueryTokens),
            _ => Ok(()),
        }
    }
}

/// Why element types and descale factors make no sense.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ElementError {
    /// Outputs are not rounded to 8 bits.
    #[error("the output cannot be {0}: it is f32, f16 or bf16")]
    Output(DType),
    /// Integers are for caches.
    #[error("the query cannot be int8: keys and values alone may be")]
    Query,
    /// Gradients of 8-bit tensors.
    #[error("there are no gradients of 8-bit tensors, and the {tensor} tensor is {dtype}")]
    Backward {
        /// The tensor.
        tensor: &'static str,
        /// Its element type.
        dtype: DType,
    },
    /// Factors of a tensor whose numbers are what they stand for.
    #[error("descale factors are of 8-bit tensors, and the {tensor} tensor is {dtype}")]
    Wide {
        /// The tensor.
        tensor: &'static str,
        /// Its element type.
        dtype: DType,
    },
    /// Factors of single queries.
    #[error("descale factors of queries are per sequence and key head, not per token")]
    QueryTokens,
}
