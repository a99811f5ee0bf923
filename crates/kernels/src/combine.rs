//! Combines partial results of attention over parts of the keys by their log-sum-exps.
//!
//! Attention over all keys is the average of attention over parts of them, each weighted by its sum
//! of exponentials: with `l(i)` the log-sum-exp of part `i` and `l` that of all keys,
//!
//! ```text
//! l = log(sum of exp(l(i)));   O = sum of exp(l(i) - l) O(i)
//! ```
//!
//! A thread takes two neighbouring columns of one row and goes through the parts twice: once for
//! the largest log-sum-exp, once for the sums.

use ptx::{Builder, Element, Expression, F32, GlobalAddress, Program, Reg, Target, U32, U64};

use crate::attention::rows::{Finished, Reference, finish, reference};
use crate::dependent_launch::wait_for_earlier_grids;
use crate::element::{load_pair_as_f32, store_pair_from_f32};
use crate::parameter::{Axis, Number, Tensor};
use crate::strides::Strides;
use crate::{Error, build, first_fault, is_16_bit};

/// Threads per block.
const THREADS: u32 = 256;

/// The configuration of the combine kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Combine {
    /// The target architecture: Ampere or later where an element is `BF16`.
    pub target: Target,
    /// The element of the partial outputs: `F32`, `F16` or `BF16`.
    pub partial: Element,
    /// The element of the output: `F32`, `F16` or `BF16`.
    pub element: Element,
    /// Head dim of outputs: even.
    pub value_head_dim: u32,
}

/// A tensor of partial results, with a stride from part to part.
struct Parts {
    base: Reg<GlobalAddress>,
    element: Element,
    strides: Strides,
    part: Reg<U64>,
}

impl Parts {
    fn parameters(k: &mut Builder, tensor: Tensor, element: Element) -> Self {
        Parts {
            base: tensor.address(k),
            element,
            part: tensor.stride(k, Axis::Part),
            strides: Strides::parameters(k, tensor),
        }
    }

    /// Returns the address of a row of the first part, and the bytes from part to part.
    fn row(&self, k: &mut Builder, at: [Reg<U32>; 3]) -> (Reg<GlobalAddress>, Reg<U64>) {
        let first = self.strides.row_address(k, self.base, self.element, at);
        (first, k.eval(self.part * self.element.bytes()))
    }
}

impl Combine {
    /// Returns the name of this configuration.
    pub fn name(&self) -> String {
        let Combine { partial, element, value_head_dim, .. } = self;
        format!("combine_{partial}_to_{element}_d{value_head_dim}")
    }

    /// Returns the blocks of the grid for `rows` rows, counted over all heads and sequences.
    pub fn blocks(&self, rows: u64) -> u64 {
        (rows * self.row_threads() as u64).div_ceil(THREADS as u64)
    }

    fn row_threads(&self) -> u32 {
        self.value_head_dim / 2
    }

    /// Builds the kernel.
    ///
    /// Parameters: the partial outputs' address, their stride from part to part, then
    /// their batch, row and head strides; the same for the partial log-sum-exps; the addresses of
    /// outputs and log-sum-exps, each with its batch, row and head strides; query length, query
    /// heads, rows of all heads and sequences, number of parts. Strides count elements,
    /// log-sum-exps are `f32`, and the address of every pair of neighbours is a multiple of its
    /// size. The grid has [`Combine::blocks`] blocks; the number of their threads must fit 32 bits.
    ///
    /// A part whose log-sum-exp is minus infinity saw no key and is not read, nor is one whose
    /// weight beside the largest is zero. A row without any other part is zero, and its log-sum-exp
    /// is minus infinity. A log-sum-exp of plus infinity or NaN makes the row NaN.
    pub fn program(&self) -> Result<Program, Error> {
        let served = |element| element == Element::F32 || is_16_bit(element);
        let fault = first_fault([
            (
                self.value_head_dim == 0 || !self.value_head_dim.is_multiple_of(2),
                "the head dimension is not even",
            ),
            (!served(self.partial) || !served(self.element), "an element is not f32, f16 or bf16"),
        ]);
        let builder = |name| Builder::new(name, self.target, THREADS);
        build(self.name(), fault, builder, |k| self.write(k))
    }

    fn write(&self, k: &mut Builder) {
        wait_for_earlier_grids(k);
        let partial_outputs = Parts::parameters(k, Tensor::PartialOutput, self.partial);
        let partial_lse = Parts::parameters(k, Tensor::PartialLse, Element::F32);
        let [(output, output_strides), (lse, lse_strides)] = [Tensor::Output, Tensor::Lse]
            .map(|tensor| (tensor.address(k), Strides::parameters(k, tensor)));
        let query_length: Reg<U32> = Number::QueryLength.read(k);
        let heads: Reg<U32> = Number::QueryHeads.read(k);
        let rows: Reg<U32> = Number::AllRows.read(k);
        let parts: Reg<U32> = Number::Parts.read(k);

        let (block, thread) = (k.block_index(), k.thread_index());
        let index = k.eval(block * THREADS + thread);
        let flat = k.eval(index / self.row_threads());
        let pair = k.eval(index % self.row_threads());
        k.if_(flat.less(rows), |k| {
            let row = k.eval(flat % query_length);
            let head = k.eval(flat / query_length % heads);
            let batch = k.eval(flat / query_length / heads);
            let at = [batch, row, head];

            let (first_lse, lse_step) = partial_lse.row(k, at);
            let largest = k.variable(f32::NEG_INFINITY);
            let address = k.variable(first_lse);
            k.for_range(0, parts, 1, |k, _| {
                let log_sum = k.load::<F32, _>(address);
                k.set(largest, largest.maximum(log_sum));
                k.set(address, address + lse_step);
            });
            // Where no part saw a key, minus infinity minus itself would be NaN.
            let reference = reference(k, largest);

            let (first, step) = partial_outputs.row(k, at);
            let mine = pair.convert::<U64>() * (2 * self.partial.bytes());
            let source = k.variable(first + mine);
            let sums: [Reg<F32>; 2] = std::array::from_fn(|_| k.variable(0.0));
            let weights = k.variable(0.0);
            k.set(address, first_lse);
            k.for_range(0, parts, 1, |k, _| {
                let log_sum = k.load::<F32, _>(address);
                let weight = k.exp2((log_sum - reference) * std::f32::consts::LOG2_E);
                // Not "greater than": a log-sum-exp of NaN must reach the result.
                k.if_(!weight.equals(0.0), |k| {
                    k.set(weights, weights + weight);
                    let values = load_pair_as_f32(k, self.partial, source.into());
                    for (sum, value) in sums.iter().zip(values) {
                        let next = k.fma(weight, value, *sum);
                        k.set(*sum, next);
                    }
                });
                k.set(address, address + lse_step);
                k.set(source, source + step);
            });

            let Finished { factor, log_sum } =
                finish(k, Reference::Natural(reference), weights, None);
            let target = output_strides.row_address(k, output, self.element, at);
            let mine = pair.convert::<U64>() * (2 * self.element.bytes());
            let result = sums.map(|sum| k.eval(sum * factor));
            store_pair_from_f32(k, self.element, target + mine, result);
            k.if_(pair.equals(0), |k| {
                let target = lse_strides.row_address(k, lse, Element::F32, at);
                k.store(target, log_sum);
            });
        });
    }
}
