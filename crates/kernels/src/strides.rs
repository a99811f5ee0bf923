//! Tensors that a kernel reads and writes by address and strides: (batch, row, head, dimension).

use ptx::{Builder, Element, Expression, GlobalAddress, Reg, U32, U64};

use crate::parameter::{Axis, Tensor};

/// The strides of a tensor, in elements; the last dimension is contiguous.
pub(crate) struct Strides {
    pub(crate) batch: Reg<U64>,
    pub(crate) row: Reg<U64>,
    pub(crate) head: Reg<U64>,
}

impl Strides {
    pub(crate) fn parameters(k: &mut Builder, tensor: Tensor) -> Self {
        Strides {
            batch: tensor.stride(k, Axis::Batch),
            row: tensor.stride(k, Axis::Row),
            head: tensor.stride(k, Axis::Head),
        }
    }

    /// Returns the address of the first element of a row of a head in a batch entry.
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

/// A tensor whose batch entries are taken as one list of rows.
pub(crate) struct Rows {
    address: Reg<GlobalAddress>,
    pub(crate) row: Reg<U64>,
    head: Reg<U64>,
}

impl Rows {
    pub(crate) fn parameters(k: &mut Builder, tensor: Tensor) -> Self {
        Rows {
            address: tensor.address(k),
            row: tensor.stride(k, Axis::FlatRow),
            head: tensor.stride(k, Axis::Head),
        }
    }

    /// Returns the address of the first element of a row of a head.
    pub(crate) fn row_address(
        &self,
        k: &mut Builder,
        element: Element,
        row: Reg<U32>,
        head: Reg<U32>,
    ) -> Reg<GlobalAddress> {
        let index = row.convert::<U64>() * self.row + head.convert::<U64>() * self.head;
        k.eval(self.address + index * element.bytes())
    }
}

/// A tensor with its strides.
pub(crate) struct Strided {
    pub(crate) address: Reg<GlobalAddress>,
    pub(crate) strides: Strides,
}

impl Strided {
    pub(crate) fn parameters(k: &mut Builder, tensor: Tensor) -> Self {
        Strided { address: tensor.address(k), strides: Strides::parameters(k, tensor) }
    }

    /// Returns the address of the first element of a row of a head in a batch entry.
    pub(crate) fn row(
        &self,
        k: &mut Builder,
        element: Element,
        at: [Reg<U32>; 3],
    ) -> Reg<GlobalAddress> {
        self.strides.row_address(k, self.address, element, at)
    }
}
