//! Attention without tensor cores: the fallback on any GPU.
//!
//! One warp computes one query row. Its lanes share the head dimension, so that a score is a sum
//! over lanes, and keys go one after the other through the online softmax. This kernel favours
//! coverage over speed: it serves every head dimension, length and rule, in `f32`, `f16` and
//! `bf16`.
//!
//! For each key, with scores in units of log2 so that an exponential is one `ex2`:
//!
//! ```text
//! s     = (q . k) * scale * log2(e)
//! m'    = max(m, s)
//! l     = l * 2^(m - m') + 2^(s - m')
//! o     = o * 2^(m - m') + 2^(s - m') * v
//! ```

use ptx::{Builder, Element, Expression, F32, GlobalAddress, Program, Reg, S32, Target, U32, U64};

use crate::attention::function::lower::{Functions, ScoreCoordinates};
use crate::attention::rows::{Reference, Sinks, finish, reference};
use crate::attention::scores::{ScoreRule, Slopes, alibi, hide_least};
use crate::attention::visibility::Visibility;
use crate::attention::{Rules, Score};
use crate::element::{load_as_f32, store_from_f32};
use crate::parameter::{Number, Tensor};
use crate::strides::Strides;
use crate::{Error, build, first_fault, is_16_bit};

/// Query rows per thread block, one for each warp.
const ROWS_PER_BLOCK: u32 = 8;

/// The configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scalar {
    /// The target architecture.
    pub target: Target,
    /// The element of all four tensors: `F32`, `F16` or `BF16`.
    pub element: Element,
    /// The head dimension of queries and keys.
    pub head_dim: u32,
    /// The head dimension of values and outputs.
    pub value_head_dim: u32,
    /// The mask and the score rules.
    pub rules: Rules,
}

impl Scalar {
    /// Returns the name of this configuration.
    pub fn name(&self) -> String {
        let Scalar { element, head_dim, value_head_dim, rules, .. } = self;
        format!("scalar_{element}_d{head_dim}x{value_head_dim}_{}", rules.name())
    }

    /// Returns the number of row blocks of a problem, which is the largest useful grid: the thread
    /// blocks of a smaller grid loop over the row blocks.
    pub fn blocks(query_length: u32, heads: u32, batch: u32) -> u64 {
        query_length.div_ceil(ROWS_PER_BLOCK) as u64 * heads as u64 * batch as u64
    }

    /// Builds the kernel.
    ///
    /// Parameters: the addresses of queries, keys, values, output
    /// and log-sum-exp; the batch, row and head strides in elements of
    /// queries, keys, values and output; query length, key length, query heads, query heads per key
    /// head, batch; the softmax scale, or the factors of capped scores
    /// ([`Scale`](crate::parameter::Scale)); then, as far as the rules need them, the window's
    /// reach to the left and right, the divisor of the chunk, the ALiBi slopes with their stride
    /// from sequence to sequence, the sinks, and the tensors that functions load from. Log-sum-exps
    /// are stored as (batch, head, query) in `f32`.
    pub fn program(&self) -> Result<Program, Error> {
        let fault = first_fault([
            (self.head_dim == 0 || self.value_head_dim == 0, "a head dimension is zero"),
            (
                self.element != Element::F32 && !is_16_bit(self.element),
                "the element is not f32, f16 or bf16",
            ),
        ]);
        let builder = |name| Builder::new(name, self.target, 32 * ROWS_PER_BLOCK);
        build(self.name(), fault, builder, |k| self.write(k))
    }

    fn write(&self, k: &mut Builder) {
        let [queries, keys, values, output, lse] =
            [Tensor::Query, Tensor::Key, Tensor::Value, Tensor::Output, Tensor::Lse]
                .map(|tensor| tensor.address(k));
        let [query_strides, key_strides, value_strides, output_strides] =
            [Tensor::Query, Tensor::Key, Tensor::Value, Tensor::Output]
                .map(|tensor| Strides::parameters(k, tensor));
        let query_length: Reg<U32> = Number::QueryLength.read(k);
        let key_length: Reg<U32> = Number::KeyLength.read(k);
        let heads: Reg<U32> = Number::QueryHeads.read(k);
        let group: Reg<U32> = Number::GroupSize.read(k);
        let batches: Reg<U32> = Number::Batch.read(k);
        let score_rule = ScoreRule::parameters(k, &self.rules).with_small_tanh();
        let visibility = Visibility::parameters(k, self.rules.mask);
        let slopes = self.rules.alibi.then(|| Slopes::parameters(k));
        let sinks = self.rules.sinks.then(|| Sinks::parameters(k));
        let functions = Functions::parameters(k, &self.rules);

        let thread = k.thread_index();
        let warp = k.eval(thread / 32);
        let lane = k.lane();
        let row_blocks = k.eval((query_length + (ROWS_PER_BLOCK - 1)) / ROWS_PER_BLOCK);
        let work = k.eval(row_blocks * heads * batches);
        let first = k.block_index();
        let stride = k.special(ptx::SpecialRegister::GridExtent(ptx::Axis::X));
        k.for_range(first, work, stride, |k, item| {
            let row = k.eval(item % row_blocks * ROWS_PER_BLOCK + warp);
            let head = k.eval(item / row_blocks % heads);
            let batch = k.eval(item / row_blocks / heads);
            let key_head = k.eval(head / group);
            k.if_(row.less(query_length), |k| {
                let q = {
                    let at = [batch, row, head];
                    let address = query_strides.row_address(k, queries, self.element, at);
                    self.load_row(k, address, lane, self.head_dim)
                };
                let position = {
                    let [row, queries, keys] =
                        [row, query_length, key_length].map(|r| r.reinterpret::<S32>());
                    k.eval(row + keys - queries)
                };
                let [begin, end] = visibility.keys(k, position, key_length).map(|edge| {
                    let edge = k.eval(edge.maximum(0));
                    k.eval(edge.reinterpret::<U32>())
                });
                let slope = slopes.map(|slopes| match functions.score {
                    None => slopes.log2(k, batch, head),
                    Some(_) => slopes.unscaled(k, batch, head, score_rule.scale_log2),
                });
                let mut state = Online::new(k, self.value_head_dim);
                k.for_range(begin, end, 1, |k, key| {
                    let at = [batch, key, key_head];
                    let address = key_strides.row_address(k, keys, self.element, at);
                    let score = {
                        let key_row = self.load_row(k, address, lane, self.head_dim);
                        dot(k, &q, &key_row)
                    };
                    let scores = [Score { row: 0, column: 0, register: score }];
                    let coordinates = |k: &mut Builder| ScoreCoordinates {
                        batch,
                        head,
                        first_query: k.eval(row.reinterpret::<S32>()),
                        rows: &[0],
                        first_key: k.eval(key.reinterpret::<S32>()),
                        query_length,
                        key_length,
                    };
                    score_rule.cap(k, &scores);
                    score_rule.in_natural_units(k, &scores);
                    if functions.score.is_none() {
                        score_rule.scale(k, &scores);
                    }
                    if let Some(slope) = slope {
                        let distance = position - key.reinterpret::<S32>();
                        alibi(k, &scores, &[0], distance, slope);
                    }
                    if let Some(function) = &functions.score {
                        let coordinates = coordinates(k);
                        function.apply(k, &scores, &coordinates);
                        hide_least(k, &scores);
                        score_rule.scale(k, &scores);
                    }
                    if let Some(function) = &functions.mask {
                        let coordinates = coordinates(k);
                        function.apply(k, &scores, &coordinates);
                    }
                    let address = value_strides.row_address(k, values, self.element, at);
                    let value_row = self.load_row(k, address, lane, self.value_head_dim);
                    state.add(k, score, &value_row);
                });
                let sink = sinks.map(|sinks| sinks.of(k, head));
                let (result, log_sum) = state.finish(k, sink);
                let at = [batch, row, head];
                let address = output_strides.row_address(k, output, self.element, at);
                self.store_row(k, address, lane, &result);
                k.if_(lane.equals(0), |k| {
                    let index = (batch * heads + head).convert::<U64>()
                        * query_length.convert::<U64>()
                        + row.convert::<U64>();
                    k.store(lse + index * 4, log_sum);
                });
            });
        });
    }

    /// Loads the lane's elements of a row: `lane`, `lane + 32`, ...; zero beyond the end.
    fn load_row(
        &self,
        k: &mut Builder,
        row: Reg<GlobalAddress>,
        lane: Reg<U32>,
        width: u32,
    ) -> Vec<Reg<F32>> {
        let bytes = self.element.bytes();
        let mine = k.eval(row + lane.convert::<U64>() * bytes);
        let mut elements = Vec::new();
        for start in (0..width).step_by(32) {
            let address = mine + start * bytes;
            elements.push(if start + 32 <= width {
                load_as_f32(k, self.element, address)
            } else {
                let element = k.variable(0.0);
                k.if_(lane.less(width - start), |k| {
                    let loaded = load_as_f32(k, self.element, address);
                    k.set(element, loaded);
                });
                element
            });
        }
        elements
    }

    /// Rounds and stores the lane's elements of an output row.
    fn store_row(
        &self,
        k: &mut Builder,
        row: Reg<GlobalAddress>,
        lane: Reg<U32>,
        elements: &[Reg<F32>],
    ) {
        let bytes = self.element.bytes();
        let mine = k.eval(row + lane.convert::<U64>() * bytes);
        for (index, element) in elements.iter().enumerate() {
            let start = 32 * index as u32;
            k.if_(lane.less(self.value_head_dim - start), |k| {
                store_from_f32(k, self.element, mine + start * bytes, *element);
            });
        }
    }
}

/// Returns, in every lane, the dot product of two rows that the lanes of a warp share.
fn dot(k: &mut Builder, a: &[Reg<F32>], b: &[Reg<F32>]) -> Reg<F32> {
    let mut sum = k.eval(a[0] * b[0]);
    for (a, b) in a.iter().zip(b).skip(1) {
        sum = k.fma(*a, *b, sum);
    }
    k.reduce_lanes(sum, 32, |a, b| a + b)
}

/// The online softmax of one row: running maximum, sum, and weighted sum of values.
struct Online {
    maximum: Reg<F32>,
    sum: Reg<F32>,
    output: Vec<Reg<F32>>,
}

impl Online {
    fn new(k: &mut Builder, value_head_dim: u32) -> Self {
        Online {
            maximum: k.variable(f32::NEG_INFINITY),
            sum: k.variable(0.0),
            output: (0..value_head_dim.div_ceil(32)).map(|_| k.variable(0.0)).collect(),
        }
    }

    fn add(&mut self, k: &mut Builder, score: Reg<F32>, value_row: &[Reg<F32>]) {
        let maximum = k.eval(self.maximum.maximum(score));
        let reference = reference(k, maximum);
        let rescale = k.exp2(self.maximum - reference);
        let weight = k.exp2(score - reference);
        k.set(self.maximum, maximum);
        let sum = k.fma(self.sum, rescale, weight);
        k.set(self.sum, sum);
        for (output, value) in self.output.iter().zip(value_row) {
            let kept = k.eval(*output * rescale);
            let sum = k.fma(weight, *value, kept);
            k.set(*output, sum);
        }
    }

    /// Returns the normalised output and the natural log-sum-exp.
    fn finish(&self, k: &mut Builder, sink: Option<Reg<F32>>) -> (Vec<Reg<F32>>, Reg<F32>) {
        let row = finish(k, Reference::Maximum(self.maximum), self.sum, sink);
        (self.output.iter().map(|output| k.eval(*output * row.factor)).collect(), row.log_sum)
    }
}
