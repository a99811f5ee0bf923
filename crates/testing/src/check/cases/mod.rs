//! Adversarial problems, with the contents and memory orders of their tensors.

mod gradients;
mod thorough;

pub use gradients::{gradients, thorough_gradients};
pub use thorough::thorough;

use flashcore::plan::Arrangement;
use flashcore::{
    DType, DTypes, Descale, Descales, Error, InputTensors, Layout, Mask, Problem, Shape, Strides,
    Tensor, TensorError,
};

/// A problem with its inputs, described rather than stored.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Case {
    /// The problem.
    pub problem: Problem,
    /// The contents of the tensors.
    pub contents: Contents,
    /// The memory order of the tensors.
    pub order: Order,
    /// The seed of the random contents.
    pub seed: u64,
}

/// The contents of the tensors of a [`Case`]: standard normal numbers, changed as described.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Contents {
    /// Unchanged.
    Normal,
    /// Queries times 200, so that the softmax picks single keys.
    HugeLogits,
    /// Queries divided by 1000, so that all keys weigh the same.
    TinyLogits,
    /// Keys grow with their position, so that every block has a new maximum.
    GrowingLogits,
    /// Keys shrink with their position: a kernel that begins at the last key sees growing ones.
    FallingLogits,
    /// The last key is 30 times as large.
    LateHugeKey,
    /// The first key is 30 times as large.
    EarlyHugeKey,
    /// Every 97th element of every tensor is 50 times as large.
    Outliers,
    /// One element of the middle key is NaN.
    NanKey,
    /// One element of the middle value is infinite.
    InfiniteValue,
}

impl Contents {
    /// The contents that change something and keep every element finite.
    const FINITE: [Contents; 7] = [
        Contents::HugeLogits,
        Contents::TinyLogits,
        Contents::GrowingLogits,
        Contents::FallingLogits,
        Contents::LateHugeKey,
        Contents::EarlyHugeKey,
        Contents::Outliers,
    ];

    /// Returns whether every element is finite.
    pub fn is_finite(self) -> bool {
        !matches!(self, Contents::NanKey | Contents::InfiniteValue)
    }
}

/// The memory order of the tensors of a [`Case`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Order {
    /// (batch, length, heads, dim) without gaps.
    Contiguous,
    /// (batch, heads, length, dim) without gaps.
    HeadsFirst,
    /// (batch, length, heads, dim) with gaps after every vector, position and sequence. The gaps
    /// hold NaN, and strides are multiples of 16 elements, so that 16-byte accesses of any element
    /// type are aligned.
    Padded,
}

impl Case {
    /// Creates a case with normal contents in contiguous memory.
    pub fn new(problem: Problem) -> Self {
        Case { problem, contents: Contents::Normal, order: Order::Contiguous, seed: 0 }
    }

    /// Returns the case with other contents.
    pub fn with_contents(self, contents: Contents) -> Self {
        Case { contents, ..self }
    }

    /// Returns the case in another memory order.
    pub fn with_order(self, order: Order) -> Self {
        Case { order, ..self }
    }

    /// Returns the case with another seed.
    pub fn with_seed(self, seed: u64) -> Self {
        Case { seed, ..self }
    }

    /// Creates the tensors.
    pub fn tensors(&self) -> Result<InputTensors, Error> {
        let random = InputTensors::random(&self.problem, self.seed)?;
        Ok(InputTensors {
            query: self.order.arrange(self.fill(&random.query, Role::Query)?)?,
            key: self.order.arrange(self.fill(&random.key, Role::Key)?)?,
            value: self.order.arrange(self.fill(&random.value, Role::Value)?)?,
            ..random
        })
    }

    fn fill(&self, random: &Tensor, role: Role) -> Result<Tensor, Error> {
        let (contents, keys) = (self.contents, self.problem.key_length);
        if contents == Contents::Normal {
            return Ok(random.clone());
        }
        let shape = random.shape();
        let values = random.to_f32();
        let changed =
            Tensor::from_fn(random.dtype(), shape, |[batch, position, head, element]| {
                let vector = (batch * shape.length + position) * shape.heads + head;
                let index = vector * shape.dim + element;
                let value = values[index];
                match (contents, role) {
                    (Contents::HugeLogits, Role::Query) => value * 200.0,
                    (Contents::TinyLogits, Role::Query) => value / 1000.0,
                    // With positive queries, larger keys have larger scores.
                    (Contents::GrowingLogits | Contents::FallingLogits, Role::Query) => value.abs(),
                    (Contents::GrowingLogits, Role::Key) => {
                        value.abs() * 20.0 * (position + 1) as f32 / keys as f32
                    }
                    (Contents::FallingLogits, Role::Key) => {
                        value.abs() * 20.0 * (keys - position) as f32 / keys as f32
                    }
                    (Contents::LateHugeKey, Role::Key) if position + 1 == keys => value * 30.0,
                    (Contents::EarlyHugeKey, Role::Key) if position == 0 => value * 30.0,
                    (Contents::Outliers, _) if index.is_multiple_of(97) => value * 50.0,
                    (Contents::NanKey, Role::Key) if position == keys / 2 && element == 0 => {
                        f32::NAN
                    }
                    (Contents::InfiniteValue, Role::Value)
                        if position == keys / 2 && element == 0 =>
                    {
                        f32::INFINITY
                    }
                    _ => value,
                }
            })?;
        Ok(changed)
    }

    /// Returns the strides and alignment that the tensors will have.
    pub fn arrangement(&self) -> Result<Arrangement, Error> {
        self.problem.validate()?;
        let strides = |shape| Ok::<_, TensorError>(self.order.layout(shape)?.strides());
        Ok(Arrangement {
            query: strides(self.problem.query_shape())?,
            key: strides(self.problem.key_shape())?,
            value: strides(self.problem.value_shape())?,
            ..Arrangement::contiguous(&self.problem)?
        })
    }
}

impl Order {
    /// Returns the layout of a shape in this order.
    pub fn layout(self, shape: Shape) -> Result<Layout, TensorError> {
        match self {
            Order::Contiguous => Layout::contiguous(shape),
            Order::HeadsFirst => Layout::heads_first(shape),
            Order::Padded => {
                // Multiples of 16 bytes, for 8-bit tensors as well.
                let heads = shape.dim.next_multiple_of(16) + 16;
                let length = heads * shape.heads + 32;
                let batch = length * shape.length + 16;
                Layout::strided(shape, Strides { batch, length, heads })
            }
        }
    }

    /// Returns a tensor in this order, with NaN in the gaps.
    pub(crate) fn arrange(self, tensor: Tensor) -> Result<Tensor, Error> {
        match self {
            Order::Contiguous => Ok(tensor),
            _ => Ok(tensor.to_layout(self.layout(tensor.shape())?, f32::NAN)?),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Query,
    Key,
    Value,
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.problem)?;
        match self.contents {
            Contents::Normal => {}
            Contents::HugeLogits => f.write_str(", huge logits")?,
            Contents::TinyLogits => f.write_str(", tiny logits")?,
            Contents::GrowingLogits => f.write_str(", growing logits")?,
            Contents::FallingLogits => f.write_str(", falling logits")?,
            Contents::LateHugeKey => f.write_str(", a huge last key")?,
            Contents::EarlyHugeKey => f.write_str(", a huge first key")?,
            Contents::Outliers => f.write_str(", outliers")?,
            Contents::NanKey => f.write_str(", a NaN in a key")?,
            Contents::InfiniteValue => f.write_str(", an infinite value")?,
        }
        match self.order {
            Order::Contiguous => {}
            Order::HeadsFirst => f.write_str(", heads first")?,
            Order::Padded => f.write_str(", padded")?,
        }
        if self.seed != 0 {
            write!(f, ", seed {}", self.seed)?;
        }
        Ok(())
    }
}

/// Returns the standard set of cases for one element type: every head dim that kernels are tuned
/// for and odd ones, lengths around the edges of tiles, unequal and zero lengths, grouped heads,
/// both masks, windows, chunks, softcaps, slopes and sinks, all contents and memory orders; for an
/// 8-bit type, mixed with wider queries and with every kind of descale factors. Each case is small:
/// the set is meant to be run often.
///
/// ```
/// use flashcore::DType;
/// use flashcore_testing::check::cases;
///
/// for case in cases::standard(DType::BF16) {
///     println!("{case}");
/// }
/// ```
pub fn standard(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for mask in [Mask::NONE, Mask::CAUSAL] {
        let problem = |batch, heads, length, dim| {
            Problem::new(batch, heads, length, dim).with_dtype(dtype).with_mask(mask)
        };
        // Head dims, and value head dims that differ.
        for dim in [1, 8, 40, 64, 96, 128, 192, 256] {
            cases.push(Case::new(problem(1, 2, 150, dim)));
        }
        cases.push(Case::new(problem(1, 2, 150, 192).with_value_head_dim(128)));
        cases.push(Case::new(problem(1, 2, 33, 64).with_value_head_dim(24)));
        // Lengths: one, primes, around 64 and 128.
        for length in [1, 2, 17, 63, 64, 65, 127, 128, 129, 257] {
            cases.push(Case::new(problem(1, 3, length, 64)));
        }
        // Unequal numbers of queries and keys, down to rows that see nothing.
        for (queries, keys) in [(1, 300), (5, 64), (64, 65), (100, 31), (300, 1), (7, 0), (0, 7)] {
            cases.push(Case::new(problem(2, 2, queries, 64).with_key_length(keys)));
        }
        // Shared key/value heads.
        for (heads, kv_heads) in [(8, 2), (6, 3), (5, 1)] {
            cases.push(Case::new(problem(2, heads, 70, 64).with_kv_heads(kv_heads)));
        }
        // Scales.
        for scale in [0.0, 1.0, -0.125] {
            cases.push(Case::new(problem(1, 1, 70, 64).with_scale(scale)));
        }
        for contents in Contents::FINITE {
            cases.push(Case::new(problem(1, 2, 200, 64)).with_contents(contents));
        }
        for order in [Order::HeadsFirst, Order::Padded] {
            cases.push(Case::new(problem(2, 4, 90, 64).with_kv_heads(2)).with_order(order));
        }
    }
    // Windows and score rules, alone and together.
    let plain = |queries, keys| {
        Problem::new(2, 4, queries, 64).with_kv_heads(2).with_key_length(keys).with_dtype(dtype)
    };
    for (queries, keys) in [(1, 130), (100, 100), (70, 200), (90, 40)] {
        for (left, right) in
            [(Some(20), Some(0)), (Some(33), Some(7)), (None, Some(5)), (Some(0), None)]
        {
            let window = Mask::window(left, right);
            cases.push(Case::new(plain(queries, keys).with_mask(window)));
        }
        for (mask, chunk) in
            [(Mask::NONE, 32), (Mask::CAUSAL, 33), (Mask::window(Some(20), Some(3)), 64)]
        {
            cases.push(Case::new(plain(queries, keys).with_mask(mask.with_chunk(chunk))));
        }
        for softcap in [2.0, 40.0] {
            cases.push(Case::new(plain(queries, keys).with_softcap(softcap)));
        }
        cases.push(Case::new(plain(queries, keys).with_alibi()));
        cases.push(Case::new(plain(queries, keys).with_sinks().with_mask(Mask::CAUSAL)));
        let together = plain(queries, keys).with_softcap(5.0).with_alibi().with_sinks();
        let window = Mask::window(Some(40), Some(0));
        cases.push(Case::new(together.clone().with_mask(window)));
        cases.push(Case::new(together.with_mask(window.with_chunk(48))));
    }
    // Without a mask: whether a masked NaN is read is up to the kernel.
    let unmasked = Problem::new(1, 2, 100, 64).with_dtype(dtype);
    for contents in [Contents::NanKey, Contents::InfiniteValue] {
        cases.push(Case::new(unmasked.clone()).with_contents(contents));
    }
    each_mixture(cases, dtype)
}

/// Assigns the possible mixtures of an element type to the cases, in turn.
fn each_mixture(mut cases: Vec<Case>, dtype: DType) -> Vec<Case> {
    let mixtures = mixtures(dtype);
    for (index, case) in cases.iter_mut().enumerate() {
        (case.problem.dtypes, case.problem.descales) = mixtures[index % mixtures.len()];
    }
    cases
}

/// Returns the mixtures of element types of queries, keys, values and output, and of descale
/// factors, that are tested for an element type: for 8 bits, both with 8-bit queries and as a cache
/// under wider queries.
pub(crate) fn mixtures(dtype: DType) -> Vec<(DTypes, Descales)> {
    if !dtype.is_8_bit() {
        return vec![(DTypes::all(dtype), Descales::NONE)];
    }
    let same = DTypes::inputs(dtype);
    let cache = |wide: DType| DTypes { query: wide, output: wide, ..same };
    let other = if dtype == DType::E4M3 { DType::E5M2 } else { DType::E4M3 };
    let (heads, tokens) =
        (Descales::of_cache(Descale::PerHead), Descales::of_cache(Descale::PerToken));
    let mut mixtures = vec![
        (same, Descales { query: Descale::PerHead, ..heads }),
        (cache(DType::BF16), heads),
        (cache(DType::F16), tokens),
        (DTypes { output: DType::F16, ..same }, Descales::NONE),
        (cache(DType::BF16), tokens),
        (cache(DType::F16), Descales::NONE),
        (DTypes { value: other, ..cache(DType::BF16) }, Descales { key: Descale::None, ..tokens }),
        (cache(DType::F16), Descales { value: Descale::PerHead, ..tokens }),
    ];
    // Queries are always floats.
    mixtures.retain(|(dtypes, _)| dtypes.query != DType::Int8);
    mixtures
}
