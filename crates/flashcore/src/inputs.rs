//! The tensors that attention reads, and the check that they match a problem.

use kernels::attention::function::HostTensor;
use kernels::parameter::List;

use crate::dtype::DType;
use crate::error::Error;
use crate::plan::Arrangement;
use crate::problem::{Alibi, DTypes, Descale, Descales, Problem, Scores};
use crate::serving::Placement;
use crate::tensor::{Shape, Strides, Tensor, TensorError, TensorView, random};

/// The tensors of a call: query, key and value, and whatever else the problem has (ALiBi slopes,
/// sinks, descale factors, placements of sequences, tensors of functions).
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
    pub query: TensorView<'a>,
    /// The key tensor, (batch, key length, key/value heads, head dim).
    pub key: TensorView<'a>,
    /// The value tensor, (batch, key length, key/value heads, value head dim).
    pub value: TensorView<'a>,
    /// ALiBi slopes: one per query head, or one per batch entry and query head.
    pub slopes: Option<&'a [f32]>,
    /// Sinks: one per query head.
    pub sinks: Option<&'a [f32]>,
    /// Descale factors of 8-bit tensors, in f32, with the shapes of [`Problem::descale_shapes`] and
    /// any strides.
    pub descales: Descales<Option<TensorView<'a>>>,
    /// Where the queries of each sequence are, for problems with sequences of unequal lengths.
    pub queries: Option<&'a Placement>,
    /// Where the keys and values of each sequence are, for problems with sequences of unequal
    /// lengths.
    pub keys: Option<&'a Placement>,
    /// The tensors that the problem's functions load from, in any order.
    pub captured: &'a [HostTensor],
    /// Batch index that functions see for the first of these sequences: non-zero where the tensors
    /// hold a part of a batch.
    pub first_sequence: usize,
}

/// The tensors that [`Inputs`] borrow, owned.
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
    /// ALiBi slopes, where the problem has them.
    pub slopes: Option<Vec<f32>>,
    /// Sinks, where the problem has them.
    pub sinks: Option<Vec<f32>>,
    /// Descale factors, where the problem has them.
    pub descales: Descales<Option<Tensor>>,
}

impl InputTensors {
    /// Returns inputs without slopes, sinks and descale factors.
    pub fn new(query: Tensor, key: Tensor, value: Tensor) -> Self {
        let (slopes, sinks, descales) = (None, None, Descales::default());
        InputTensors { query, key, value, slopes, sinks, descales }
    }

    /// Returns standard normal tensors for a problem; the same seed gives the same tensors
    /// everywhere. ALiBi slopes are those of the paper, falling from head to head by a constant
    /// factor.
    pub fn random(problem: &Problem, seed: u64) -> Result<Self, Error> {
        problem.validate()?;
        let tensor = |dtype, shape, stream| {
            Tensor::random(dtype, shape, seed.wrapping_mul(3).wrapping_add(stream))
        };
        let DTypes { query, key, value, .. } = problem.dtypes;
        Ok(InputTensors {
            query: tensor(query, problem.query_shape(), 0)?,
            key: tensor(key, problem.key_shape(), 1)?,
            value: tensor(value, problem.value_shape(), 2)?,
            slopes: match problem.scores.alibi {
                Alibi::None => None,
                Alibi::PerHead => Some(alibi_slopes(problem.query_heads)),
                Alibi::PerSequence => Some(alibi_slopes(problem.query_heads).repeat(problem.batch)),
            },
            sinks: problem.scores.sinks.then(|| {
                (0..problem.query_heads as u64).map(|head| random::normal(!seed, head)).collect()
            }),
            descales: random_descales(problem.descale_shapes(), seed)?,
        })
    }

    /// Borrows the tensors as a back end takes them.
    pub fn inputs(&self) -> Inputs<'_> {
        Inputs {
            slopes: self.slopes.as_deref(),
            sinks: self.sinks.as_deref(),
            descales: self.descales.each_ref().map(|it| it.as_ref().map(Tensor::view)),
            ..Inputs::new(&self.query, &self.key, &self.value)
        }
    }
}

/// Returns random descale factors of these shapes, between 0.5 and 1.5.
pub fn random_descales(
    shapes: Descales<Option<Shape>>,
    seed: u64,
) -> Result<Descales<Option<Tensor>>, TensorError> {
    let mut stream = !seed.wrapping_mul(3);
    shapes.try_map(|shape| {
        stream = stream.wrapping_add(1);
        let Some(shape) = shape else { return Ok(None) };
        let factor = |[batch, position, head, _]: [usize; 4]| {
            let index = (batch * shape.length + position) * shape.heads + head;
            1.0 + 0.5 * random::uniform(stream, index as u64)
        };
        Tensor::from_fn(DType::F32, shape, factor).map(Some)
    })
}

/// Returns the slopes of the ALiBi paper: 2^(-8 / heads), its square, and so on.
fn alibi_slopes(heads: usize) -> Vec<f32> {
    (1..=heads).map(|head| (-8.0 * head as f32 / heads as f32).exp2()).collect()
}

/// Why tensors do not match a problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum InputError {
    /// A tensor has another shape than expected.
    #[error("{tensor} has shape {given}, expected {expected}")]
    Shape {
        /// Role of the tensor.
        tensor: &'static str,
        /// Its shape.
        given: Shape,
        /// The shape that the problem or the other tensors imply.
        expected: Shape,
    },
    /// A tensor has another element type than expected.
    #[error("{tensor} has element type {given}, expected {expected}")]
    DType {
        /// Role of the tensor.
        tensor: &'static str,
        /// Its element type.
        given: DType,
        /// The element type that the problem or the other tensors imply.
        expected: DType,
    },
    /// A list has another length than expected.
    #[error("{tensor} has length {given}, expected {expected}")]
    Length {
        /// Name of the list.
        tensor: &'static str,
        /// Its length.
        given: usize,
        /// The length that the problem or the reference implies.
        expected: usize,
    },
    /// Something that the problem needs was not given.
    #[error("the problem has {tensor}, and none were given")]
    Missing {
        /// What is missing.
        tensor: &'static str,
    },
    /// Gradients need a result that the forward pass did not save.
    #[error("gradients need the {what} of the forward pass, which was not saved")]
    NotSaved {
        /// The missing result.
        what: &'static str,
    },
    /// A row that sees no key has a log-sum-exp other than minus infinity.
    #[error(
        "the log-sum-exp belongs to another problem: it is {lse} at batch {batch}, head {head}, \
         query {query}, which sees no key"
    )]
    ForeignLse {
        /// Index of the sequence.
        batch: usize,
        /// Index of the query head.
        head: usize,
        /// Index of the query.
        query: usize,
        /// The log-sum-exp that was given for this row.
        lse: f32,
    },
    /// A descale factor per head is not a positive finite number.
    #[error(
        "{tensor} is {factor} at batch {batch}, head {head}, expected a finite number above zero"
    )]
    Factor {
        /// Name of the factors.
        tensor: &'static str,
        /// The factor that was given.
        factor: f32,
        /// Index of the sequence.
        batch: usize,
        /// Index of the key head.
        head: usize,
    },
    /// A captured tensor is missing, superfluous or not of the type and rank that the function
    /// loads.
    #[error("{reason}")]
    Captured {
        /// What is wrong with it.
        reason: String,
    },
    /// Something was given that the problem does not have.
    #[error("{tensor} were given, and the problem has none")]
    Unexpected {
        /// What was given.
        tensor: &'static str,
    },
}

impl<'a> Inputs<'a> {
    /// Takes query, key and value, each a [`Tensor`] or a view of somebody else's memory, and nothing
    /// else.
    pub fn new(
        query: impl Into<TensorView<'a>>,
        key: impl Into<TensorView<'a>>,
        value: impl Into<TensorView<'a>>,
    ) -> Self {
        Inputs {
            query: query.into(),
            key: key.into(),
            value: value.into(),
            slopes: None,
            sinks: None,
            descales: Descales::default(),
            queries: None,
            keys: None,
            captured: &[],
            first_sequence: 0,
        }
    }

    /// Sets the tensors that functions load from.
    pub fn with_captured(self, captured: &'a [HostTensor]) -> Self {
        Inputs { captured, ..self }
    }

    /// Sets the ALiBi slopes.
    pub fn with_slopes(self, slopes: &'a [f32]) -> Self {
        Inputs { slopes: Some(slopes), ..self }
    }

    /// Sets the sinks.
    pub fn with_sinks(self, sinks: &'a [f32]) -> Self {
        Inputs { sinks: Some(sinks), ..self }
    }

    /// Sets the descale factors.
    pub fn with_descales(self, descales: Descales<Option<impl Into<TensorView<'a>>>>) -> Self {
        Inputs { descales: descales.map(|factors| factors.map(Into::into)), ..self }
    }

    /// Returns the ALiBi slope of a query head; zero without ALiBi.
    pub fn slope(&self, problem: &Problem, batch: usize, head: usize) -> f32 {
        let of_head = |slopes: &[f32]| match slopes.len() > problem.query_heads {
            true => slopes[batch * problem.query_heads + head],
            false => slopes[head],
        };
        self.slopes.map_or(0.0, of_head)
    }

    /// Returns the 32-bit words of a list as a kernel reads it on the device; `None` where the call
    /// does not have it.
    pub fn list(&self, problem: &Problem, list: List) -> Option<Vec<u32>> {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect();
        let words = |values: &[usize]| values.iter().map(|value| *value as u32).collect();
        let Problem { lists, batch, .. } = problem;
        let ragged = !problem.has_equal_lengths();
        let (queries, keys) = (self.queries.filter(|_| ragged), self.keys.filter(|_| ragged));
        match list {
            List::Slopes => self.slopes.map(bits),
            List::Sinks => self.sinks.map(bits),
            List::QueryStarts => queries?.starts().map(words),
            List::KeyStarts => keys?.starts().map(words),
            List::BlockTable => keys?.pages().map(|pages| pages.table().to_vec()),
            List::QueryLengths if lists.query_lengths => Some(words(queries?.ends())),
            List::KeyLengths if lists.key_lengths => Some(words(keys?.ends())),
            List::LeftPadding if lists.left_padding => Some(words(keys?.left_padding())),
            List::BatchIndex if lists.batch_index => {
                (0..*batch).map(|sequence| keys?.entry(sequence).map(|it| it as u32)).collect()
            }
            _ => None,
        }
    }

    /// Returns the strides and alignments of the tensors; the output is contiguous.
    pub fn arrangement(&self, problem: &Problem) -> Result<Arrangement, TensorError> {
        Ok(Arrangement {
            query: self.query.layout().strides(),
            key: self.key.layout().strides(),
            value: self.value.layout().strides(),
            descales: self
                .descales
                .map(|it| it.map_or_else(Strides::default, |it| it.layout().strides())),
            ..Arrangement::contiguous(problem)?
        })
    }

    /// Returns the unmasked problem with the sizes and element types of these tensors, and with the
    /// slopes, sinks and descale factors that are given. The output has the type of the queries, or
    /// bf16 where they have 8 bits.
    pub fn problem(&self) -> Result<Problem, InputError> {
        let (query, key, value) = (self.query.shape(), self.key.shape(), self.value.shape());
        let problem = Problem::new(query.batch, query.heads, query.length, query.dim)
            .with_kv_heads(key.heads)
            .with_key_length(key.length)
            .with_value_head_dim(value.dim)
            .with_dtype(self.query.dtype());
        let DTypes { output, .. } = problem.dtypes;
        let dtypes = [self.query, self.key, self.value].map(|tensor| tensor.dtype());
        let [of_query, of_key, of_value] = dtypes;
        let descales = Descales {
            query: self.descales.query.map_or(Descale::None, |_| Descale::PerHead),
            ..self.descales.map(|factors| match factors {
                None => Descale::None,
                // With a single key per sequence, both granularities mean the same factors.
                Some(factors) if factors.shape().length == key.length => Descale::PerToken,
                Some(_) => Descale::PerHead,
            })
        };
        let problem = Problem {
            dtypes: DTypes { query: of_query, key: of_key, value: of_value, output },
            descales,
            ..problem
        };
        let of_each = |slopes: &[f32]| match slopes.len() > query.heads {
            true => Alibi::PerSequence,
            false => Alibi::PerHead,
        };
        let scores = Scores::default().with_alibi(self.slopes.map_or(Alibi::None, of_each));
        let scores = if self.sinks.is_some() { scores.with_sinks() } else { scores };
        let problem = problem.with_scores(scores);
        self.validate(&problem)?;
        Ok(problem)
    }

    /// Refuses tensors whose shape or element type is not the problem's, and lists that are
    /// missing.
    pub fn validate(&self, problem: &Problem) -> Result<(), InputError> {
        let DTypes { query, key, value, .. } = problem.dtypes;
        let tensors = [
            ("query", self.query, problem.query_shape(), query),
            ("key", self.key, problem.key_shape(), key),
            ("value", self.value, problem.value_shape(), value),
        ];
        for (tensor, given, expected, _) in tensors {
            if given.shape() != expected {
                return Err(InputError::Shape { tensor, given: given.shape(), expected });
            }
        }
        for (tensor, given, _, expected) in tensors {
            let given = given.dtype();
            if given != expected {
                return Err(InputError::DType { tensor, given, expected });
            }
        }
        if !problem.has_equal_lengths() && (self.queries.is_none() || self.keys.is_none()) {
            return Err(InputError::Missing { tensor: "placements of sequences" });
        }
        self.validate_captured(problem)?;
        self.validate_descales(problem)?;
        self.validate_vectors(problem)
    }

    /// Refuses captured tensors that are missing, superfluous or not what the functions load from.
    fn validate_captured(&self, problem: &Problem) -> Result<(), InputError> {
        let expected = problem.captured();
        for spec in &expected {
            let mut given = self.captured.iter().filter(|tensor| tensor.name == spec.name);
            let fault = match (given.next(), given.next()) {
                (None, _) => Some(format!("tensor {} of a function is missing", spec.name)),
                (_, Some(_)) => Some(format!("there are two tensors {}", spec.name)),
                (Some(tensor), None) => tensor.fault(spec),
            };
            if let Some(reason) = fault {
                return Err(InputError::Captured { reason });
            }
        }
        let known = |tensor: &&HostTensor| expected.iter().any(|spec| spec.name == tensor.name);
        match self.captured.iter().find(|tensor| !known(tensor)) {
            None => Ok(()),
            Some(tensor) => {
                let reason = format!("no function loads from tensor {}", tensor.name);
                Err(InputError::Captured { reason })
            }
        }
    }

    /// Refuses descale factors that do not match the problem.
    fn validate_descales(&self, problem: &Problem) -> Result<(), InputError> {
        let names = Descales {
            query: ("q_descale", "q_descale factors"),
            key: ("k_descale", "k_descale factors"),
            value: ("v_descale", "v_descale factors"),
        };
        let given = names.zip(self.descales).zip(problem.descale_shapes()).zip(problem.descales);
        for ((((tensor, all), given), expected), descale) in given.into_array() {
            let (given, expected) = match (given, expected) {
                (None, None) => continue,
                (None, Some(_)) => return Err(InputError::Missing { tensor: all }),
                (Some(_), None) => return Err(InputError::Unexpected { tensor: all }),
                (Some(given), Some(expected)) => (given, expected),
            };
            if given.shape() != expected {
                return Err(InputError::Shape { tensor, given: given.shape(), expected });
            }
            if given.dtype() != DType::F32 {
                let (given, expected) = (given.dtype(), DType::F32);
                return Err(InputError::DType { tensor, given, expected });
            }
            // Factors of tokens that belong to no sequence may be anything, so tokens are not
            // checked.
            if descale == Descale::PerHead {
                check_factors(tensor, given)?;
            }
        }
        Ok(())
    }

    /// Refuses slopes and sinks that do not match the problem.
    fn validate_vectors(&self, problem: &Problem) -> Result<(), InputError> {
        let heads = problem.query_heads;
        let slopes = match problem.scores.alibi {
            Alibi::PerSequence => [problem.batch.saturating_mul(heads); 2],
            _ => [heads; 2],
        };
        let vectors = [
            ("slopes", self.slopes, problem.scores.has_alibi(), slopes),
            ("sinks", self.sinks, problem.scores.sinks, [heads, heads]),
        ];
        for (tensor, given, expected, lengths) in vectors {
            match given {
                None if expected => return Err(InputError::Missing { tensor }),
                Some(_) if !expected => return Err(InputError::Unexpected { tensor }),
                Some(given) if !lengths.contains(&given.len()) => {
                    let (given, expected) = (given.len(), lengths[0]);
                    return Err(InputError::Length { tensor, given, expected });
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Refuses descale factors per head that are not positive and finite.
pub(crate) fn check_factors(
    tensor: &'static str,
    factors: TensorView<'_>,
) -> Result<(), InputError> {
    for [batch, _, head] in factors.shape().vectors() {
        let factor = factors.head(batch, head).row(0)[0];
        if !factor.is_finite() || factor <= 0.0 {
            return Err(InputError::Factor { tensor, factor, batch, head });
        }
    }
    Ok(())
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
        // Each tensor may have its own element type.
        let [small, factors] =
            [(DType::E4M3, [2, 5, 2, 8]), (DType::F32, [2, 5, 2, 1])].map(|(a, b)| tensor(a, b));
        let inputs = Inputs::new(&query, &small, &value);
        let inputs = inputs.with_descales(Descales { key: Some(&factors), ..Descales::default() });
        let problem = inputs.problem().unwrap();
        assert_eq!(problem.dtypes.to_string(), "q=f16,k=e4m3,v=f16,o=f16");
        assert_eq!(problem.descales.key, Descale::PerToken);
        let refusal = |problem: Problem| inputs.validate(&problem).unwrap_err().to_string();
        assert_eq!(
            refusal(Problem { dtypes: DTypes::all(DType::F16), ..problem.clone() }),
            "key has element type e4m3, expected f16"
        );
        let per_head = Descales { key: Descale::PerHead, ..Descales::NONE };
        assert_eq!(
            refusal(problem.clone().with_descales(per_head)),
            "k_descale has shape [2, 5, 2, 1], expected [2, 1, 2, 1]"
        );
        assert_eq!(
            refusal(problem.clone().with_descales(Descales::NONE)),
            "k_descale factors were given, and the problem has none"
        );
        let values = Descales { value: Descale::PerHead, ..problem.descales };
        assert_eq!(
            refusal(problem.with_descales(values)),
            "the problem has v_descale factors, and none were given"
        );
    }

    #[test]
    fn factors_of_heads_are_above_zero() {
        let small = tensor(DType::E4M3, [2, 5, 2, 16]);
        for wrong in [0.0, -0.0, -2.0, f32::INFINITY, f32::NAN] {
            let shape = [2, 1, 2, 1].into();
            let factors = Tensor::from_fn(DType::F32, shape, |[batch, _, head, _]| {
                if (batch, head) == (1, 0) { wrong } else { 0.5 }
            });
            let factors = factors.unwrap();
            let descales = Descales { query: Some(&factors), ..Descales::default() };
            let inputs = Inputs::new(&small, &small, &small).with_descales(descales);
            assert_eq!(
                inputs.problem().unwrap_err().to_string(),
                format!(
                    "q_descale is {wrong} at batch 1, head 0, expected a finite number above zero"
                )
            );
        }
    }
}
