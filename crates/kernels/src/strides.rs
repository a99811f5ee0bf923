//! Tensors that a kernel reads by address: (batch, position, head, dimension) with strides.

use ptx::{Builder, Element, Expression, GlobalAddress, Reg, U32, U64};

/// The strides of a tensor, in elements; the dimension is contiguous.
pub(crate) struct Strides {
    pub(crate) batch: Reg<U64>,
    pub(crate) row: Reg<U64>,
    pub(crate) head: Reg<U64>,
}

impl Strides {
    pub(crate) fn parameters(k: &mut Builder, tensor: &str) -> Self {
        Strides {
            batch: k.parameter(&format!("{tensor} batch stride")),
            row: k.parameter(&format!("{tensor} row stride")),
            head: k.parameter(&format!("{tensor} head stride")),
        }
    }

    /// The address of the first element of a row of a head.
    pub(crate) fn row_address(
        &self,
        k: &mut Builder,
        base: Reg<GlobalAddress>,
        element: Element,
        [batch, row, head]: [Reg<U32>; 3],
    ) -> Reg<GlobalAddress> {
        let index = batch.convert::<U64>() * self.batch
            + row.convert::<U64>() * self.row
            + head.convert::<U64>() * self.head;
        k.eval(base + index * element.bytes())
    }
}
