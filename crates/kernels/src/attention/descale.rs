//! Descale factors of FP8 attention: one for each sequence and key head, of queries, keys and
//! values.

use ptx::{Builder, Expression, F32, GlobalAddress, Pred, Reg, U32, U64};

use crate::parameter::{Axis, Tensor};

/// A product whose operands have descale factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Product {
    /// QK^T, with the product of the factors of queries and keys.
    Scores,
    /// PV, with the factor of the values.
    Output,
}

/// The descale factors by (sequence, key head). A tensor without factors has the address 0, and
/// factors of 1.
#[derive(Clone, Copy)]
pub(crate) struct Descales {
    query: Factors,
    key: Factors,
    value: Factors,
}

#[derive(Clone, Copy)]
struct Factors {
    address: Reg<GlobalAddress>,
    batch: Reg<U64>,
    head: Reg<U64>,
}

impl Descales {
    pub(crate) fn parameters(k: &mut Builder) -> Self {
        let mut factors = |tensor: Tensor| Factors {
            address: tensor.address(k),
            batch: tensor.stride(k, Axis::Batch),
            head: tensor.stride(k, Axis::Head),
        };
        Descales {
            query: factors(Tensor::QueryDescale),
            key: factors(Tensor::KeyDescale),
            value: factors(Tensor::ValueDescale),
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
                let query = self.query.load(k, sequence, key_head);
                let key = self.key.load(k, sequence, key_head);
                k.eval(query * key)
            }
            Product::Output => self.value.load(k, sequence, key_head),
        }
    }
}

impl Factors {
    fn load(&self, k: &mut Builder, sequence: Reg<U32>, key_head: Reg<U32>) -> Reg<F32> {
        let factor = k.variable::<F32>(1.0);
        let given: Reg<Pred> = k.eval(self.address.reinterpret::<U64>().differs(0));
        k.if_(given, |k| {
            let index =
                sequence.convert::<U64>() * self.batch + key_head.convert::<U64>() * self.head;
            let loaded = k.load::<F32, _>(self.address + index * 4);
            k.set(factor, loaded);
        });
        factor
    }
}
