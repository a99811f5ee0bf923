//! The description of an attention call without its tensors: sizes, element types, mask, scores,
//! storage of the sequences and which results are wanted.
//!
//! | file | its subject |
//! | --- | --- |
//! | `descale` | scale factors of 8-bit tensors |
//! | `mask` | which keys a query sees |
//! | `scores` | how the product of a query and a key becomes a score |
//! | `function` | masks and scores as functions, and the tensors that they load from |
//! | `storage` | how the rows of sequences are stored in tensors |
//! | `text` | problems as short texts |

mod descale;
mod function;
mod mask;
mod scores;
mod storage;
mod text;

pub use descale::{Descale, Descales, ElementError};
pub use function::RowFunctions;
pub use mask::Mask;
pub(crate) use scores::RowScores;
pub use scores::{Alibi, Scores};
pub use storage::{Lists, Storage};
pub use text::ProblemTextError;

use std::fmt;
use std::ops::Range;

use serde::Serialize;

use crate::dtype::DType;
use crate::tensor::Shape;

/// The largest head dim of any kernel and of the CPU, each thread of which holds blocks of about 450
/// vectors as f32, 120 MB at this dim. Head dims in use are below a hundredth of it.
pub(crate) const MOST_HEAD_DIM: usize = 1 << 16;

/// One attention problem: `softmax(scale * Q K^T + mask) V` over every sequence and query head.
///
/// Tensors have the layout (batch, length, heads, dim). With fewer key/value heads than query
/// heads (grouped-query attention), query head `h` reads key/value head
/// `h / (query_heads / kv_heads)`.
///
/// Start from [`Problem::new`], which describes plain self-attention, and change what differs:
///
/// ```
/// use flashcore::{DType, Mask, Problem};
///
/// let problem = Problem::new(2, 32, 4096, 128)
///     .with_kv_heads(8)
///     .with_dtype(DType::BF16)
///     .with_mask(Mask::CAUSAL);
/// problem.validate()?;
/// assert_eq!(problem.scale(), 128f32.powf(-0.5));
/// # Ok::<(), flashcore::ProblemError>(())
/// ```
///
/// Batches of sequences of unequal lengths are the same problem with another [`Storage`] of queries
/// and keys: `query_length` and `key_length` are then upper bounds, and lists on the host or on the
/// device hold the actual lengths.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct Problem {
    /// Number of sequences in the batch.
    pub batch: usize,
    /// Number of heads of the query and of the output.
    pub query_heads: usize,
    /// Number of heads of key and value; divides `query_heads`.
    pub kv_heads: usize,
    /// Queries per sequence; the maximum over the batch where lengths differ.
    pub query_length: usize,
    /// Keys (and values) per sequence; the maximum over the batch where lengths differ.
    pub key_length: usize,
    /// Elements of one query or key vector.
    pub head_dim: usize,
    /// Elements of one value or output vector.
    pub value_head_dim: usize,
    /// The element type of each tensor. The log-sum-exp is always f32.
    pub dtypes: DTypes,
    /// Which 8-bit tensors come with descale factors, and at which granularity.
    pub descales: Descales,
    /// Which keys a query may see.
    pub mask: Mask,
    /// How the product of a query and a key becomes a score: scale, cap, ALiBi, sinks,
    /// function.
    pub scores: Scores,
    /// Storage of the queries and of the outputs.
    pub queries: Storage,
    /// Storage of the keys and values.
    pub keys: Storage,
    /// Which per-sequence lists (lengths, padding, batch index) are passed beside the tensors.
    pub lists: Lists,
    /// Whether the log-sum-exp is wanted in addition to the output.
    pub lse: bool,
    /// Whether the output or the gradients are computed.
    pub pass: Pass,
    /// Whether the log-sum-exp has a gradient too, in the backward pass.
    pub lse_gradient: bool,
    /// Whether gradients must be bitwise identical from run to run.
    pub deterministic: bool,
    /// Whether the output of a query must be bitwise identical whatever else is in the batch.
    pub batch_invariant: bool,
}

/// Direction of the computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// The output, from queries, keys and values.
    #[default]
    Forward,
    /// The gradients of queries, keys and values, from the inputs, the output, its log-sum-exp and
    /// the gradient of the output.
    Backward,
}

/// The element type of each tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct DTypes {
    /// Element type of the queries.
    pub query: DType,
    /// Element type of the keys.
    pub key: DType,
    /// Element type of the values.
    pub value: DType,
    /// Element type of the output.
    pub output: DType,
}

impl DTypes {
    /// Uses one type for all tensors.
    pub const fn all(dtype: DType) -> Self {
        DTypes { query: dtype, key: dtype, value: dtype, output: dtype }
    }

    /// Uses one type for queries, keys and values, and for the output as well unless the type has 8
    /// bits: the output is then bf16.
    pub const fn inputs(dtype: DType) -> Self {
        let output = match dtype {
            DType::E4M3 | DType::E5M2 | DType::Int8 => DType::BF16,
            wide => wide,
        };
        DTypes { output, ..DTypes::all(dtype) }
    }

    /// Returns the type that all four tensors share, or a message that they differ.
    pub fn uniform(&self) -> Result<DType, String> {
        match *self == DTypes::all(self.query) {
            true => Ok(self.query),
            false => Err(format!("tensors of different element types ({self})")),
        }
    }
}

impl fmt::Display for DTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DTypes { query, key, value, output } = self;
        match *self == DTypes::all(*query) {
            true => write!(f, "{query}"),
            false => write!(f, "q={query},k={key},v={value},o={output}"),
        }
    }
}

/// Why a [`Problem`] is invalid.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ProblemError {
    /// A size that must be positive is zero.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// The query heads are not a multiple of the key/value heads.
    #[error("{query_heads} query heads cannot be divided among {kv_heads} key/value heads")]
    Heads {
        /// The problem's query heads.
        query_heads: usize,
        /// The problem's key/value heads.
        kv_heads: usize,
    },
    /// The softmax scale is infinite or not a number.
    #[error("the softmax scale must be finite, not {0}")]
    Scale(f32),
    /// A score rule is invalid.
    #[error(transparent)]
    Scores(#[from] scores::ScoreError),
    /// The element types or descale factors are invalid.
    #[error(transparent)]
    Elements(#[from] ElementError),
    /// A mask function is given as a score function or the other way round, or both load from a
    /// tensor of the same name with different types or ranks.
    #[error("{0}")]
    Function(String),
    /// The storage of queries or keys is invalid.
    #[error("{0}")]
    Storage(&'static str),
    /// `lse_gradient` is set on a forward problem.
    #[error("lse_gradient is said of gradients alone, and outputs are asked for")]
    LseGradient,
    /// `deterministic` is set on a forward problem.
    #[error("deterministic is said of gradients alone, and outputs are asked for")]
    Deterministic,
    /// `batch_invariant` is set on a backward problem.
    #[error("batch_invariant is said of outputs alone, and gradients are asked for")]
    BatchInvariant,
    /// A tensor of this problem would be too large to address.
    #[error("the {0} tensor would be larger than the address space")]
    TooLarge(&'static str),
}

impl Problem {
    /// Describes self-attention over `batch` sequences: as many key/value heads as query heads, as
    /// many keys as queries, equal head dims, f16, no mask, the default scale.
    pub fn new(batch: usize, heads: usize, length: usize, head_dim: usize) -> Self {
        Problem {
            batch,
            query_heads: heads,
            kv_heads: heads,
            query_length: length,
            key_length: length,
            head_dim,
            value_head_dim: head_dim,
            dtypes: DTypes::all(DType::F16),
            descales: Descales::NONE,
            mask: Mask::NONE,
            scores: Scores::default(),
            queries: Storage::Padded,
            keys: Storage::Padded,
            lists: Lists::default(),
            lse: true,
            pass: Pass::Forward,
            lse_gradient: false,
            deterministic: false,
            batch_invariant: false,
        }
    }

    /// Asks for the gradients of this problem. Clears `batch_invariant`, which gradients
    /// do not support.
    ///
    /// ```
    /// use flashcore::{Pass, Problem};
    ///
    /// let problem = Problem::new(1, 8, 512, 64).backward();
    /// assert_eq!(problem.pass, Pass::Backward);
    /// assert_eq!(problem.flops(), 2.5 * Problem::new(1, 8, 512, 64).flops());
    /// ```
    pub fn backward(self) -> Self {
        Problem { pass: Pass::Backward, batch_invariant: false, ..self }
    }

    /// Asks for the output of this problem. Clears `lse_gradient` and `deterministic`, which only
    /// gradients have.
    pub fn forward(self) -> Self {
        Problem { pass: Pass::Forward, lse_gradient: false, deterministic: false, ..self }
    }

    /// Says that the log-sum-exp has a gradient as well as the output: the gradients are then those
    /// of a sum over both.
    ///
    /// ```
    /// use flashcore::Problem;
    ///
    /// let problem = Problem::new(1, 8, 512, 64).backward().with_lse_gradient();
    /// assert!(problem.text().ends_with("backward,lse_gradient"));
    /// assert!(Problem::new(1, 8, 512, 64).with_lse_gradient().validate().is_err());
    /// ```
    pub fn with_lse_gradient(self) -> Self {
        Problem { lse_gradient: true, ..self }
    }

    /// Asks for gradients that are bitwise identical from run to run, whatever else the GPU is
    /// doing.
    ///
    /// ```
    /// use flashcore::Problem;
    ///
    /// let problem = Problem::new(1, 8, 512, 64).backward().deterministic();
    /// assert!(problem.text().ends_with("backward,deterministic"));
    /// assert!(Problem::new(1, 8, 512, 64).deterministic().validate().is_err());
    /// ```
    pub fn deterministic(self) -> Self {
        Problem { deterministic: true, ..self }
    }

    /// Asks for an output and a log-sum-exp of each query that are bitwise identical whatever else
    /// is in the batch, however many queries of its sequence come in one call, and wherever its
    /// keys are stored: they depend only on the query, on the keys and values that it sees, and on
    /// its position among them. The guarantee holds on one kind of GPU and for finite values;
    /// docs/serving.md describes how it works and what it costs.
    ///
    /// ```
    /// use flashcore::gpu::Chip;
    /// use flashcore::{Plan, Preference, Problem};
    ///
    /// let problem = Problem::new(16, 32, 1, 128).with_kv_heads(8).with_key_length(8192);
    /// let plan = Plan::on_chip(&Chip::H200, &problem.batch_invariant(), &Preference::default())?;
    /// assert!(plan.chosen.configuration.unwrap().ends_with("_fixed4"));
    /// # Ok::<(), flashcore::Error>(())
    /// ```
    pub fn batch_invariant(self) -> Self {
        Problem { batch_invariant: true, ..self }
    }

    /// Shares each key/value head among `query_heads / kv_heads` query heads (grouped-query
    /// attention).
    pub fn with_kv_heads(self, kv_heads: usize) -> Self {
        Problem { kv_heads, ..self }
    }

    /// Sets the number of keys where it differs from the number of queries, as with a cache or an
    /// encoder.
    pub fn with_key_length(self, key_length: usize) -> Self {
        Problem { key_length, ..self }
    }

    /// Sets the head dim of values and output where it differs from that of queries and keys.
    pub fn with_value_head_dim(self, value_head_dim: usize) -> Self {
        Problem { value_head_dim, ..self }
    }

    /// Sets the element type of all tensors; the output of 8-bit inputs is bf16.
    pub fn with_dtype(self, dtype: DType) -> Self {
        Problem { dtypes: DTypes::inputs(dtype), ..self }
    }

    /// Sets the element type of keys and values, as for an 8-bit cache.
    pub fn with_kv_dtype(self, dtype: DType) -> Self {
        Problem { dtypes: DTypes { key: dtype, value: dtype, ..self.dtypes }, ..self }
    }

    /// Sets the element type of the output.
    pub fn with_output_dtype(self, dtype: DType) -> Self {
        Problem { dtypes: DTypes { output: dtype, ..self.dtypes }, ..self }
    }

    /// Sets which descale factors there are.
    pub fn with_descales(self, descales: Descales) -> Self {
        Problem { descales, ..self }
    }

    /// Sets the mask.
    pub fn with_mask(self, mask: Mask) -> Self {
        Problem { mask, ..self }
    }

    /// Sets the softmax scale.
    pub fn with_scale(self, scale: f32) -> Self {
        Problem { scores: self.scores.with_scale(scale), ..self }
    }

    /// Sets how the product of a query and a key becomes a score.
    pub fn with_scores(self, scores: Scores) -> Self {
        Problem { scores, ..self }
    }

    /// Sets the storage of queries and keys.
    pub fn with_storage(self, queries: Storage, keys: Storage) -> Self {
        Problem { queries, keys, ..self }
    }

    /// Sets which per-sequence lists are passed beside the tensors.
    pub fn with_lists(self, lists: Lists) -> Self {
        Problem { lists, ..self }
    }

    /// Checks that the problem is consistent. Lengths and batch may be zero: a row without keys
    /// gives output 0 and a log-sum-exp of minus infinity, no queries give an empty output.
    pub fn validate(&self) -> Result<(), ProblemError> {
        let positive = [
            ("head dim", self.head_dim),
            ("value head dim", self.value_head_dim),
            ("the number of query heads", self.query_heads),
            ("the number of key/value heads", self.kv_heads),
        ];
        if let Some((name, _)) = positive.into_iter().find(|(_, size)| *size == 0) {
            return Err(ProblemError::Zero(name));
        }
        if !self.query_heads.is_multiple_of(self.kv_heads) {
            return Err(ProblemError::Heads {
                query_heads: self.query_heads,
                kv_heads: self.kv_heads,
            });
        }
        if !self.scale().is_finite() {
            return Err(ProblemError::Scale(self.scale()));
        }
        if self.lse_gradient && self.pass == Pass::Forward {
            return Err(ProblemError::LseGradient);
        }
        if self.deterministic && self.pass == Pass::Forward {
            return Err(ProblemError::Deterministic);
        }
        if self.batch_invariant && self.pass == Pass::Backward {
            return Err(ProblemError::BatchInvariant);
        }
        self.scores.validate()?;
        self.validate_elements()?;
        self.validate_functions().map_err(ProblemError::Function)?;
        self.validate_storage().map_err(ProblemError::Storage)?;
        let tensors = [
            ("query", self.query_shape()),
            ("key", self.key_shape()),
            ("value", self.value_shape()),
            ("output", self.output_shape()),
        ];
        for (name, shape) in tensors {
            // Four bytes per element whatever the type: back ends hold f32 copies.
            shape
                .elements()
                .and_then(|elements| elements.checked_mul(4))
                .filter(|bytes| isize::try_from(*bytes).is_ok())
                .ok_or(ProblemError::TooLarge(name))?;
        }
        // Evaluating a mask adds query and key positions: the sum must not overflow.
        let positions = self.query_length.checked_add(self.key_length);
        if positions.is_none_or(|sum| sum > isize::MAX as usize) {
            return Err(ProblemError::TooLarge("key"));
        }
        Ok(())
    }

    /// Returns the softmax scale: the one that was set, or `1 / sqrt(head_dim)`.
    pub fn scale(&self) -> f32 {
        self.scores.scale.unwrap_or_else(|| (1.0 / (self.head_dim as f64).sqrt()) as f32)
    }

    /// Returns the number of query heads per key/value head.
    pub fn group_size(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// Returns the key/value head that `query_head` reads.
    pub fn kv_head(&self, query_head: usize) -> usize {
        query_head / self.group_size()
    }

    /// Returns the keys of sequence `batch` that `query` sees. A mask function may hide some of
    /// them.
    pub fn visible_keys(&self, batch: usize, query: usize) -> Range<usize> {
        debug_assert!(batch < self.batch && query < self.query_length);
        self.mask.visible_keys(query, self.query_length, self.key_length)
    }

    /// Returns the element type of the queries, which is usually that of all tensors.
    pub fn dtype(&self) -> DType {
        self.dtypes.query
    }

    /// Returns the shape of the query tensor.
    pub fn query_shape(&self) -> Shape {
        self.queries.shape(self.batch, self.query_length, self.query_heads, self.head_dim)
    }

    /// Returns the shape of the key tensor.
    pub fn key_shape(&self) -> Shape {
        self.keys.shape(self.batch, self.key_length, self.kv_heads, self.head_dim)
    }

    /// Returns the shape of the value tensor.
    pub fn value_shape(&self) -> Shape {
        Shape { dim: self.value_head_dim, ..self.key_shape() }
    }

    /// Returns the shape of the output tensor.
    pub fn output_shape(&self) -> Shape {
        Shape { dim: self.value_head_dim, ..self.query_shape() }
    }

    /// Returns the number of softmax rows, which is also the number of log-sum-exps: one per query
    /// head and row of the query tensor.
    pub fn rows(&self) -> usize {
        let Shape { batch, length, heads, .. } = self.query_shape();
        batch * length * heads
    }

    /// Counts the (query, key) pairs that the mask leaves visible, over all heads and the whole
    /// batch, as if every sequence had the maximum lengths.
    pub fn visible_pairs(&self) -> u128 {
        if let Some(function) = self.mask.function {
            return self.pairs_by_function(function);
        }
        let heads = (self.batch as u128).saturating_mul(self.query_heads as u128);
        self.mask.visible_pairs(self.query_length, self.key_length).saturating_mul(heads)
    }

    /// Counts floating-point operations by the published convention: two matrix products over every
    /// (query, key) pair, halved for a causal mask; under any other mask, over the visible pairs.
    /// TFLOP/s are quoted with this count.
    ///
    /// ```
    /// use flashcore::{Mask, Problem};
    ///
    /// let problem = Problem::new(1, 8, 512, 64);
    /// assert_eq!(problem.flops(), 4.0 * 8.0 * 512.0 * 512.0 * 64.0);
    /// assert_eq!(problem.clone().with_mask(Mask::CAUSAL).flops(), problem.flops() / 2.0);
    /// ```
    pub fn flops(&self) -> f64 {
        let pairs = self.batch as f64
            * self.query_heads as f64
            * self.query_length as f64
            * self.key_length as f64;
        let share = match self.mask {
            Mask::NONE => 1.0,
            Mask::CAUSAL => 0.5,
            _ => return self.visible_flops(),
        };
        share * pairs * self.flops_per_pair()
    }

    /// Counts floating-point operations over exactly the (query, key) pairs that the mask leaves
    /// visible.
    pub fn visible_flops(&self) -> f64 {
        self.visible_pairs() as f64 * self.flops_per_pair()
    }

    /// Forward: a multiplication and an addition per element of the query (S = QK^T) and of the
    /// value (O = PV). Backward: three products over `head_dim` (S, dQ, dK) and two over
    /// `value_head_dim` (dP, dV).
    fn flops_per_pair(&self) -> f64 {
        let (dim, value_dim) = (self.head_dim as f64, self.value_head_dim as f64);
        match self.pass {
            Pass::Forward => 2.0 * (dim + value_dim),
            Pass::Backward => 2.0 * (3.0 * dim + 2.0 * value_dim),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "batch {}, heads {}", self.batch, self.query_heads)?;
        if self.kv_heads != self.query_heads {
            write!(f, "/{}", self.kv_heads)?;
        }
        write!(f, ", length {}", self.query_length)?;
        if self.key_length != self.query_length {
            write!(f, "x{}", self.key_length)?;
        }
        write!(f, ", head dim {}", self.head_dim)?;
        if self.value_head_dim != self.head_dim {
            write!(f, "/{}", self.value_head_dim)?;
        }
        write!(f, ", {}", self.dtypes)?;
        if self.mask != Mask::NONE {
            write!(f, ", {}", self.mask)?;
        }
        self.words().iter().try_for_each(|word| write!(f, ", {word}"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn refuses_what_has_no_meaning() {
        let good = Problem::new(1, 8, 16, 64);
        assert_eq!(good.validate(), Ok(()));
        let refusal = |problem: Problem| problem.validate().unwrap_err().to_string();
        assert_eq!(refusal(Problem::new(1, 8, 16, 0)), "head dim must be at least 1");
        assert_eq!(
            refusal(good.clone().with_value_head_dim(0)),
            "value head dim must be at least 1"
        );
        assert_eq!(
            refusal(good.clone().with_kv_heads(3)),
            "8 query heads cannot be divided among 3 key/value heads"
        );
        assert_eq!(
            refusal(good.clone().with_kv_heads(0)),
            "the number of key/value heads must be at least 1"
        );
        assert_eq!(
            refusal(good.clone().with_scale(f32::NAN)),
            "the softmax scale must be finite, not NaN"
        );
        assert_eq!(
            refusal(good.clone().with_key_length(usize::MAX)),
            "the key tensor would be larger than the address space"
        );
        assert_eq!(
            refusal(Problem::new(usize::MAX, 8, 16, 64)),
            "the query tensor would be larger than the address space"
        );
    }

    #[test]
    fn element_types_that_nobody_serves_are_refused() {
        let eight = Problem::new(2, 8, 16, 64).with_dtype(DType::E4M3);
        let every = Descales { query: Descale::PerHead, ..Descales::of_cache(Descale::PerToken) };
        assert_eq!(eight.clone().with_descales(every).validate(), Ok(()));
        let refusal = |problem: Problem| problem.validate().unwrap_err().to_string();
        assert_eq!(
            refusal(eight.clone().with_output_dtype(DType::E5M2)),
            "the output cannot be e5m2: it is f32, f16 or bf16"
        );
        assert_eq!(
            refusal(eight.clone().with_dtype(DType::Int8)),
            "the query cannot be int8: keys and values alone may be"
        );
        assert_eq!(eight.clone().with_kv_dtype(DType::Int8).validate(), Ok(()));
        assert_eq!(
            refusal(eight.clone().backward()),
            "there are no gradients of 8-bit tensors, and the query tensor is e4m3"
        );
        assert_eq!(
            refusal(eight.clone().with_kv_dtype(DType::F16).with_descales(every)),
            "descale factors are of 8-bit tensors, and the key tensor is f16"
        );
        let tokens = Descales { query: Descale::PerToken, ..Descales::NONE };
        assert_eq!(
            refusal(eight.with_descales(tokens)),
            "descale factors of queries are per sequence and key head, not per token"
        );
    }

    #[test]
    fn lengths_and_batch_may_be_zero() {
        assert_eq!(Problem::new(1, 2, 0, 8).validate(), Ok(()));
        assert_eq!(Problem::new(1, 2, 4, 8).with_key_length(0).validate(), Ok(()));
        assert_eq!(Problem::new(0, 2, 4, 8).validate(), Ok(()));
    }

    #[test]
    fn a_description_names_only_what_differs() {
        assert_eq!(
            Problem::new(1, 8, 512, 64).to_string(),
            "batch 1, heads 8, length 512, head dim 64, f16"
        );
        let problem = Problem::new(2, 8, 5, 192)
            .with_kv_heads(2)
            .with_key_length(7)
            .with_value_head_dim(128)
            .with_dtype(DType::BF16)
            .with_mask(Mask::CAUSAL)
            .with_scale(0.5);
        assert_eq!(
            problem.to_string(),
            "batch 2, heads 8/2, length 5x7, head dim 192/128, bf16, causal, scale=0.5"
        );
    }

    proptest! {
        #[test]
        fn validation_never_overflows(
            sizes in prop::array::uniform7(prop_oneof![0usize..9, any::<usize>()]),
        ) {
            let [batch, heads, kv_heads, queries, keys, dim, value_dim] = sizes;
            let problem = Problem::new(batch, heads, queries, dim)
                .with_kv_heads(kv_heads)
                .with_key_length(keys)
                .with_value_head_dim(value_dim)
                .with_mask(Mask::window(Some(queries), Some(keys)));
            let _ = problem.validate();
            let _ = problem.flops();
        }
    }
}
