//! Descale factors of FP8 attention: one for each sequence and key head, of queries, keys and
//! values.

use ptx::{Builder, Expression, F32, Pred, Reg, U32, U64};

use crate::cache::HeadScales;
use crate::parameter::Tensor;

/// A product whose operands have descale factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Product {
    /// QK^T, with the product of the factors of queries and keys.
    Scores,
    /// PV, with the factor of the values.
    Output,
}

impl Product {
    pub(crate) const ALL: [Product; 2] = [Product::Scores, Product::Output];
}

/// The descale factors by (sequence, key head). A tensor without factors has the address 0, and
/// factors of 1.
#[derive(Clone, Copy)]
pub(crate) struct Descales {
    query: HeadScales,
    key: HeadScales,
    value: HeadScales,
}

impl Descales {
    pub(crate) fn parameters(k: &mut Builder) -> Self {
        Descales {
            query: HeadScales::parameters(k, Tensor::QueryDescale),
            key: HeadScales::parameters(k, Tensor::KeyDescale),
            value: HeadScales::parameters(k, Tensor::ValueDescale),
        }
    }

    /// Loads the factor of a product for a sequence and key head.
    pub(crate) fn of(
        &self,
        k: &mut Builder,
        product: Product,
        sequence: Reg<U32>,
        key_head: Reg<U32>,
    ) -> Reg<F32> {
        match product {
            Product::Scores => {
                let query = factor(k, &self.query, sequence, key_head);
                let key = factor(k, &self.key, sequence, key_head);
                k.eval(query * key)
            }
            Product::Output => factor(k, &self.value, sequence, key_head),
        }
    }
}

/// Loads a factor of a tensor, 1 where it has none.
fn factor(
    k: &mut Builder,
    scales: &HeadScales,
    sequence: Reg<U32>,
    key_head: Reg<U32>,
) -> Reg<F32> {
    let factor = k.variable::<F32>(1.0);
    let given: Reg<Pred> = k.eval(scales.address.reinterpret::<U64>().differs(0));
    k.if_(given, |k| {
        let loaded = scales.of(k, sequence, key_head);
        k.set(factor, loaded);
    });
    factor
}
