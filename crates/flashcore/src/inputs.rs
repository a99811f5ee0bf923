//! The tensors that attention reads, and whether they answer a problem.

use crate::dtype::DType;
use crate::error::Error;
use crate::problem::Problem;
use crate::tensor::{Layout, Shape, Tensor, TensorError, random};

/// Query, key and value, with the slopes and sinks of problems that have them.
///
/// ```
/// use flashcore::{DType, Inputs, Shape, Tensor};
///
/// let query = Tensor::random(DType::F16, Shape::new(1, 16, 8, 64), 0)?;
/// let key = Tensor::random(DType::F16, Shape::new(1, 32, 2, 64), 1)?;
/// let value = Tensor::random(DType::F16, Shape::new(1, 32, 2, 64), 2)?;
/// let problem = Inputs::new(&query, &key, &value).problem()?;
/// assert_eq!((problem.key_length, problem.kv_heads), (32, 2));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// The query tensor, (batch, query length, query heads, head dim).
    pub query: &'a Tensor,
    /// The key tensor, (batch, key length, key/value heads, head dim).
    pub key: &'a Tensor,
    /// The value tensor, (batch, key length, key/value heads, value head dim).
    pub value: &'a Tensor,
    /// ALiBi slopes: one for each query head, or for each batch entry and query head.
    pub slopes: Option<&'a [f32]>,
    /// Sinks: one for each query head.
    pub sinks: Option<&'a [f32]>,
}

/// What [`Inputs`] borrow, with its memory.
///
/// ```
/// use flashcore::{InputTensors, Problem};
///
/// let problem = Problem::new(1, 8, 512, 64).with_kv_heads(2);
/// let tensors = InputTensors::random(&problem, 42)?;
/// assert_eq!(tensors.inputs().problem()?, problem);
/// # Ok::<(), flashcore::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct InputTensors {
    /// The query tensor.
    pub query: Tensor,
    /// The key tensor.
    pub key: Tensor,
    /// The value tensor.
    pub value: Tensor,
    /// ALiBi slopes.
    pub slopes: Option<Vec<f32>>,
    /// Sinks.
    pub sinks: Option<Vec<f32>>,
}

impl InputTensors {
    /// Standard normal tensors for a problem; the same seed gives the same tensors everywhere.
    /// ALiBi slopes are those of its authors, falling from head to head by a constant factor.
    pub fn random(problem: &Problem, seed: u64) -> Result<Self, Error> {
        problem.validate()?;
        let tensor = |shape, stream| {
            Tensor::random(problem.dtype, shape, seed.wrapping_mul(3).wrapping_add(stream))
        };
        Ok(InputTensors {
            query: tensor(problem.query_shape(), 0)?,
            key: tensor(problem.key_shape(), 1)?,
            value: tensor(problem.value_shape(), 2)?,
            slopes: problem.alibi.then(|| alibi_slopes(problem.query_heads)),
            sinks: problem.sinks.then(|| {
                (0..problem.query_heads as u64).map(|head| random::normal(!seed, head)).collect()
            }),
        })
    }

    /// The tensors as a back end takes them.
    pub fn inputs(&self) -> Inputs<'_> {
        Inputs {
            slopes: self.slopes.as_deref(),
            sinks: self.sinks.as_deref(),
            ..Inputs::new(&self.query, &self.key, &self.value)
        }
    }
}

/// The slopes of ALiBi's authors: 2^(-8 / heads), its square, and so on.
fn alibi_slopes(heads: usize) -> Vec<f32> {
    (1..=heads).map(|head| (-8.0 * head as f32 / heads as f32).exp2()).collect()
}

/// How query, key and value lie in memory: what a kernel may have to refuse before there is any
/// tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InputLayouts {
    /// The query's.
    pub query: Layout,
    /// The key's.
    pub key: Layout,
    /// The value's.
    pub value: Layout,
}

impl InputLayouts {
    /// Memory in the order (batch, length, heads, dim), without gaps.
    pub fn contiguous(problem: &Problem) -> Result<Self, TensorError> {
        Ok(InputLayouts {
            query: Layout::contiguous(problem.query_shape())?,
            key: Layout::contiguous(problem.key_shape())?,
            value: Layout::contiguous(problem.value_shape())?,
        })
    }
}

/// A tensor that does not belong to its problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum InputError {
    /// Its shape differs.
    #[error("{tensor} has shape {given}, expected {expected}")]
    Shape {
        /// The tensor's role.
        tensor: &'static str,
        /// Its shape.
        given: Shape,
        /// The shape that the problem or the other tensors ask for.
        expected: Shape,
    },
    /// Its element type differs.
    #[error("{tensor} has element type {given}, expected {expected}")]
    DType {
        /// The tensor's role.
        tensor: &'static str,
        /// Its element type.
        given: DType,
        /// The element type of the problem or the other tensors.
        expected: DType,
    },
    /// It has another number of elements or rows.
    #[error("{tensor} has length {given}, expected {expected}")]
    Length {
        /// What it is.
        tensor: &'static str,
        /// Its length.
        given: usize,
        /// The length that the problem or the reference asks for.
        expected: usize,
    },
    /// The problem needs it, and it was not given.
    #[error("the problem has {tensor}, and none were given")]
    Missing {
        /// What it is.
        tensor: &'static str,
    },
    /// It was given, and the problem knows nothing of it.
    #[error("{tensor} were given, and the problem has none")]
    Unexpected {
        /// What it is.
        tensor: &'static str,
    },
}

impl<'a> Inputs<'a> {
    /// The three tensors in their usual order.
    pub fn new(query: &'a Tensor, key: &'a Tensor, value: &'a Tensor) -> Self {
        Inputs { query, key, value, slopes: None, sinks: None }
    }

    /// The same with ALiBi slopes.
    pub fn with_slopes(self, slopes: &'a [f32]) -> Self {
        Inputs { slopes: Some(slopes), ..self }
    }

    /// The same with sinks.
    pub fn with_sinks(self, sinks: &'a [f32]) -> Self {
        Inputs { sinks: Some(sinks), ..self }
    }

    /// The ALiBi slope of a query head; zero without.
    pub(crate) fn slope(&self, problem: &Problem, batch: usize, head: usize) -> f32 {
        let of_head = |slopes: &[f32]| match slopes.len() > problem.query_heads {
            true => slopes[batch * problem.query_heads + head],
            false => slopes[head],
        };
        self.slopes.map_or(0.0, of_head)
    }

    /// How they lie in memory.
    pub fn layouts(&self) -> InputLayouts {
        InputLayouts {
            query: self.query.layout(),
            key: self.key.layout(),
            value: self.value.layout(),
        }
    }

    /// The unmasked problem with the sizes and the element type of these tensors, and with the
    /// slopes and sinks that are there.
    pub fn problem(&self) -> Result<Problem, InputError> {
        let (query, key, value) = (self.query.shape(), self.key.shape(), self.value.shape());
        let problem = Problem::new(query.batch, query.heads, query.length, query.dim)
            .with_kv_heads(key.heads)
            .with_key_length(key.length)
            .with_value_head_dim(value.dim)
            .with_dtype(self.query.dtype());
        let (alibi, sinks) = (self.slopes.is_some(), self.sinks.is_some());
        let problem = Problem { alibi, sinks, ..problem };
        self.validate(&problem)?;
        Ok(problem)
    }

    /// Refuse tensors whose shape or element type is not the problem's.
    pub fn validate(&self, problem: &Problem) -> Result<(), InputError> {
        let tensors = [
            ("query", self.query, problem.query_shape()),
            ("key", self.key, problem.key_shape()),
            ("value", self.value, problem.value_shape()),
        ];
        for (name, tensor, expected) in tensors {
            if tensor.shape() != expected {
                return Err(InputError::Shape { tensor: name, given: tensor.shape(), expected });
            }
        }
        self.validate_elements(problem)
    }

    /// Refuse element types, slopes and sinks that are not the problem's.
    pub(crate) fn validate_elements(&self, problem: &Problem) -> Result<(), InputError> {
        let tensors = [("query", self.query), ("key", self.key), ("value", self.value)];
        for (tensor, given) in tensors.map(|(name, tensor)| (name, tensor.dtype())) {
            if given != problem.dtype {
                return Err(InputError::DType { tensor, given, expected: problem.dtype });
            }
        }
        let heads = problem.query_heads;
        let vectors = [
            ("slopes", self.slopes, problem.alibi, [heads, problem.batch.saturating_mul(heads)]),
            ("sinks", self.sinks, problem.sinks, [heads, heads]),
        ];
        for (tensor, given, expected, lengths) in vectors {
            match given {
                None if expected => return Err(InputError::Missing { tensor }),
                Some(_) if !expected => return Err(InputError::Unexpected { tensor }),
                Some(given) if !lengths.contains(&given.len()) => {
                    let (given, expected) = (given.len(), heads);
                    return Err(InputError::Length { tensor, given, expected });
                }
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(dtype: DType, shape: [usize; 4]) -> Tensor {
        Tensor::zeros(dtype, shape.into()).unwrap()
    }

    #[test]
    fn mismatches_are_named() {
        let query = tensor(DType::F16, [2, 3, 4, 8]);
        let key = tensor(DType::F16, [2, 5, 2, 8]);
        let value = tensor(DType::F16, [2, 5, 2, 6]);
        let refusal = |query: &Tensor, key: &Tensor, value: &Tensor| {
            let inputs = Inputs::new(query, key, value);
            inputs.problem().unwrap_err().to_string()
        };
        assert!(Inputs::new(&query, &key, &value).problem().is_ok());
        assert_eq!(
            refusal(&query, &tensor(DType::F16, [2, 5, 2, 7]), &value),
            "key has shape [2, 5, 2, 7], expected [2, 5, 2, 8]"
        );
        assert_eq!(
            refusal(&query, &key, &tensor(DType::F16, [2, 4, 2, 6])),
            "value has shape [2, 4, 2, 6], expected [2, 5, 2, 6]"
        );
        assert_eq!(
            refusal(&query, &key, &tensor(DType::BF16, [2, 5, 2, 6])),
            "value has element type bf16, expected f16"
        );
    }
}
