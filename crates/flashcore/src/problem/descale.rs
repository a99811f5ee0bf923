//! Descale factors: the f32 factors by which the elements of an 8-bit tensor are multiplied to give
//! the values that they represent.
//!
//! Scores are multiplied by the softmax scale times the factors of query and key, outputs by the
//! factor of the value. Where one factor serves a whole head, kernels therefore scale products and
//! never individual elements.

use serde::Serialize;

use super::{Pass, Problem};
use crate::dtype::DType;
use crate::tensor::{Shape, Strides};

/// Granularity of the descale factors of one tensor.
///
/// | | shape of the factors | in FlashAttention |
/// | --- | --- | --- |
/// | `PerHead` | (sequences, key heads), any strides, including zero: one factor for all, one per head, or one per sequence and head | `q_descale`, `k_descale`, `v_descale` |
/// | `PerToken` | (batch entries or pages, positions, key heads): laid out like the tensor that it scales, without its last dimension | |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Descale {
    /// No factors: every factor is 1.
    #[default]
    None,
    /// One factor per sequence and key head.
    PerHead,
    /// One factor per row of the tensor and key head.
    PerToken,
}

/// One item each for queries, keys and values: the granularity of their descale factors
/// ([`Descale`]), or the factors themselves.
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
    /// For the queries. Their factors are per key head as well: the query heads of a group share
    /// one.
    pub query: T,
    /// For the keys.
    pub key: T,
    /// For the values.
    pub value: T,
}

impl Descales {
    /// No descale factors at all.
    pub const NONE: Descales =
        Descales { query: Descale::None, key: Descale::None, value: Descale::None };

    /// Uses the same granularity for keys and values, and none for queries.
    pub const fn of_cache(descale: Descale) -> Self {
        Descales { query: Descale::None, key: descale, value: descale }
    }
}

impl<T> Descales<T> {
    /// Applies a function to each of the three items.
    pub fn map<U>(self, mut of: impl FnMut(T) -> U) -> Descales<U> {
        Descales { query: of(self.query), key: of(self.key), value: of(self.value) }
    }

    /// Applies a fallible function to each of the three items; returns the first error.
    pub fn try_map<U, E>(self, mut of: impl FnMut(T) -> Result<U, E>) -> Result<Descales<U>, E> {
        Ok(Descales { query: of(self.query)?, key: of(self.key)?, value: of(self.value)? })
    }

    /// Borrows each of the three items.
    pub fn each_ref(&self) -> Descales<&T> {
        Descales { query: &self.query, key: &self.key, value: &self.value }
    }

    /// Returns the three items in the order query, key, value.
    pub fn into_array(self) -> [T; 3] {
        [self.query, self.key, self.value]
    }

    /// Pairs each item with its counterpart in `other`.
    pub fn zip<U>(self, other: Descales<U>) -> Descales<(T, U)> {
        Descales {
            query: (self.query, other.query),
            key: (self.key, other.key),
            value: (self.value, other.value),
        }
    }
}

/// Names of the factors in a problem's text.
const NAMES: Descales<&str> = Descales { query: "q_descale", key: "k_descale", value: "v_descale" };

impl Descale {
    /// Returns the granularity as written after `name=` in a problem's text; `None` if nothing is
    /// written.
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

    /// Returns the granularity of factors as front ends take them, and their shape and strides as
    /// (batch, length, heads, 1): one number, one for each key head, one for each sequence and key
    /// head, or one for each token and key head. The last have the shape of `keys` without the dim;
    /// packed keys have no batch dimension either. `None` for factors of other sizes.
    pub fn of_factors(
        (sizes, strides): (&[usize], &[usize]),
        sequences: usize,
        keys: Shape,
        packed: bool,
    ) -> Option<(Self, Shape, Strides)> {
        let Shape { batch, length, heads, .. } = keys;
        let (of_heads, of_tokens) = (Shape::new(sequences, 1, heads, 1), Shape { dim: 1, ..keys });
        let strided = |batch, length, heads| Strides { batch, length, heads };
        let per_head = |batch, heads| (Descale::PerHead, of_heads, strided(batch, 0, heads));
        let per_token = |strides| (Descale::PerToken, of_tokens, strides);
        Some(match (sizes, strides) {
            ([] | [1], _) => per_head(0, 0),
            (&[all], &[step]) if all == heads => per_head(0, step),
            (&[each, all], &[by, step]) if [each, all] == [sequences, heads] => per_head(by, step),
            (&[rows, all], &[by, step]) if packed && [rows, all] == [length, heads] => {
                per_token(strided(0, by, step))
            }
            (&[a, b, c], &[x, y, z]) if !packed && [a, b, c] == [batch, length, heads] => {
                per_token(strided(x, y, z))
            }
            _ => return None,
        })
    }
}

impl Descales {
    /// Parses `name=value` of a problem's text. Returns `None` if the name is not one of a descale
    /// factor.
    pub(super) fn take(&mut self, name: &str, value: &str) -> Option<Result<(), ()>> {
        let fields = [&mut self.query, &mut self.key, &mut self.value];
        let (field, _) = fields.into_iter().zip(NAMES.into_array()).find(|(_, it)| *it == name)?;
        Some(Descale::of_word(value).map(|descale| *field = descale))
    }

    /// Returns the words of a problem's text for the factors that there are.
    pub(super) fn words(self) -> Vec<String> {
        let words = NAMES.zip(self).into_array().into_iter();
        words.filter_map(|(name, it)| Some(format!("{name}={}", it.word()?))).collect()
    }
}

impl Problem {
    /// Returns the shapes of the descale factors of queries, keys and values, where there are any;
    /// the last dimension is 1.
    pub fn descale_shapes(&self) -> Descales<Option<Shape>> {
        self.descale_shapes_over(self.key_shape())
    }

    /// Like [`Problem::descale_shapes`], for a key tensor of shape `cache` (apart from its dim)
    /// instead of the problem's: a cache in which sequences have no places yet.
    pub fn descale_shapes_over(&self, cache: Shape) -> Descales<Option<Shape>> {
        self.descales.map(|descale| match descale {
            Descale::None => None,
            Descale::PerHead => Some(Shape::new(self.batch, 1, self.kv_heads, 1)),
            Descale::PerToken => Some(Shape { dim: 1, ..cache }),
        })
    }

    /// Refuses combinations of element types and descale factors that no back end supports.
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

/// Why element types or descale factors are invalid.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ElementError {
    /// The output has an 8-bit type.
    #[error("the output cannot be {0}: it is f32, f16 or bf16")]
    Output(DType),
    /// The query is int8, which only keys and values may be.
    #[error("the query cannot be int8: keys and values alone may be")]
    Query,
    /// Gradients of an 8-bit tensor are asked for.
    #[error("there are no gradients of 8-bit tensors, and the {tensor} tensor is {dtype}")]
    Backward {
        /// Name of the 8-bit tensor.
        tensor: &'static str,
        /// Its element type.
        dtype: DType,
    },
    /// Descale factors are given for a tensor that is not 8-bit.
    #[error("descale factors are of 8-bit tensors, and the {tensor} tensor is {dtype}")]
    Wide {
        /// Name of the tensor.
        tensor: &'static str,
        /// Its element type.
        dtype: DType,
    },
    /// Descale factors per token are given for the queries.
    #[error("descale factors of queries are per sequence and key head, not per token")]
    QueryTokens,
}
