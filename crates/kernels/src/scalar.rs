//! Attention with ordinary arithmetic: the fallback on any GPU.
//!
//! One warp takes one query row. Its lanes share the head dimension, so a
//! score is a sum over lanes; keys come one after the other through the online
//! softmax. Every head dimension, length, mask and element that FlashCore
//! knows is served; speed is not the point.
//!
//! Per key, with scores in units of log2 so that one `ex2` is an exponential:
//!
//! ```text
//! s     = (q . k) * scale * log2(e)
//! m'    = max(m, s)
//! l     = l * 2^(m - m') + 2^(s - m')
//! o     = o * 2^(m - m') + 2^(s - m') * v
//! ```

use ptx::{
    Builder, Choose, Element, Expression, F32, GlobalAddress, Pred, Program, Reg, S32, Target, U32,
    U64, Value,
};

use crate::Error;
use crate::element::{load_as_f32, store_from_f32};
use crate::parameter::{Number, Scale, Tensor};
use crate::strides::Strides;

/// Query rows that one block takes: a warp each.
pub const ROWS_PER_BLOCK: u32 = 8;

/// What the kernel is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scalar {
    /// The architecture.
    pub target: Target,
    /// The element of all four tensors: `F32`, `F16` or `BF16`.
    pub element: Element,
    /// The width of queries and keys.
    pub head_dim: u32,
    /// The width of values and outputs.
    pub value_head_dim: u32,
    /// Whether query `i` sees only keys up to `i + keys - queries`.
    pub causal: bool,
}

impl Scalar {
    /// The name of this configuration.
    pub fn name(&self) -> String {
        let Scalar { element, head_dim, value_head_dim, causal, .. } = self;
        let mask = if *causal { "causal" } else { "dense" };
        format!("scalar_{element}_d{head_dim}x{value_head_dim}_{mask}")
    }

    /// How many blocks cover the problem; each takes further ones as they come.
    pub fn blocks(query_length: u32, heads: u32, batch: u32) -> u64 {
        query_length.div_ceil(ROWS_PER_BLOCK) as u64 * heads as u64 * batch as u64
    }

    /// Builds the kernel.
    ///
    /// Parameters, in order: the addresses of queries, keys, values, output
    /// and log-sum-exp; the batch, row and head strides in elements of
    /// queries, keys, values and output; query length, key length, query
    /// heads, query heads per key head, batch; the scale times log2(e).
    /// Log-sum-exps are stored as (batch, head, query) in `f32`.
    pub fn program(&self) -> Result<Program, Error> {
        if self.head_dim == 0 || self.value_head_dim == 0 {
            return Err(Error::configuration(self.name(), "a head dimension is zero"));
        }
        if !matches!(self.element, Element::F32 | Element::F16 | Element::BF16) {
            return Err(Error::configuration(self.name(), "the element is not f32, f16 or bf16"));
        }
        let mut k = Builder::new(self.name(), self.target, 32 * ROWS_PER_BLOCK);
        self.write(&mut k);
        Ok(k.finish()?)
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
        let scale_log2: Reg<F32> = Scale::Log2.read(k);

        let thread = k.thread_index();
        let warp = k.eval(thread / 32);
        let lane = k.lane();
        let row_blocks = k.eval((query_length + (ROWS_PER_BLOCK - 1)) / ROWS_PER_BLOCK);
        let work = k.eval(row_blocks * heads * batches);
        let first = k.block_index();
        let stride = k.special(ptx::Special::GridExtent(ptx::Axis::X));
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
                let visible = self.visible_keys(k, row, query_length, key_length);
                let mut state = Online::new(k, self.value_head_dim);
                k.for_range(0, visible, 1, |k, key| {
                    let at = [batch, key, key_head];
                    let address = key_strides.row_address(k, keys, self.element, at);
                    let score = {
                        let key_row = self.load_row(k, address, lane, self.head_dim);
                        dot(k, &q, &key_row)
                    };
                    let address = value_strides.row_address(k, values, self.element, at);
                    let value_row = self.load_row(k, address, lane, self.value_head_dim);
                    state.add(k, score * scale_log2, &value_row);
                });
                let (result, log_sum) = state.finish(k);
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

    /// How many keys a query row sees.
    fn visible_keys(
        &self,
        k: &mut Builder,
        row: Reg<U32>,
        query_length: Reg<U32>,
        key_length: Reg<U32>,
    ) -> Reg<U32> {
        if !self.causal {
            return key_length;
        }
        let [row, queries, keys] = [row, query_length, key_length].map(|r| r.reinterpret::<S32>());
        let count = (row + 1 + keys - queries).maximum(0);
        k.eval(count.reinterpret::<U32>())
    }

    /// The lane's elements of a row: `lane`, `lane + 32`, ...; zero beyond the end.
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

/// The product of two rows that the lanes of a warp share, in every lane.
fn dot(k: &mut Builder, a: &[Reg<F32>], b: &[Reg<F32>]) -> Reg<F32> {
    let mut sum = k.eval(a[0] * b[0]);
    for (a, b) in a.iter().zip(b).skip(1) {
        sum = k.fma(*a, *b, sum);
    }
    k.reduce_lanes(sum, 32, |a, b| a + b)
}

/// The online softmax of one row: running maximum, sum and weighted values.
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

    fn add(&mut self, k: &mut Builder, score: Value<F32>, value_row: &[Reg<F32>]) {
        let score = k.eval(score);
        let maximum = k.eval(self.maximum.maximum(score));
        // While all scores are -inf, -inf minus -inf would be NaN: measure
        // from zero instead.
        let reference = k.eval(is_minus_infinity(maximum).choose::<F32>(0.0, maximum));
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

    /// The normalised output and the natural log-sum-exp. A row that saw no
    /// key is zero, with log-sum-exp -inf.
    fn finish(&self, k: &mut Builder) -> (Vec<Reg<F32>>, Reg<F32>) {
        let empty = k.eval(self.sum.equals(0.0));
        let reciprocal = k.reciprocal(self.sum);
        let factor = k.eval(empty.choose::<F32>(0.0, reciprocal));
        let output = self.output.iter().map(|output| k.eval(*output * factor)).collect();
        let log2 = k.log2(self.sum);
        let log_sum = k.eval((self.maximum + log2) * std::f32::consts::LN_2);
        let log_sum = k.eval(empty.choose::<F32>(f32::NEG_INFINITY, log_sum));
        (output, log_sum)
    }
}

fn is_minus_infinity(x: Reg<F32>) -> Value<Pred> {
    x.equals(f32::NEG_INFINITY)
}
