//! Addresses and loads of elements of captured tensors, the tensors that a function loads from.
//!
//! An address is built up as the indices become known, level by level (`run`). An index out of
//! bounds does not branch: element 0 of that dimension is loaded and replaced by zero.

use ptx::{
    Builder, Element, Expression, F32, GlobalAddress, LoadHint, Pred, Reg, S32, Select, U32, U64,
    Value,
};

use super::Computed;
use crate::attention::function::node::Stored;
use crate::element::{load_as_f32, load_pair_as_f32};

/// The launch parameters of a captured tensor; strides are in elements.
#[derive(Clone)]
pub(super) struct TensorRegisters {
    pub(super) stored: Stored,
    pub(super) address: Reg<GlobalAddress>,
    pub(super) extents: Vec<Reg<U32>>,
    pub(super) strides: Vec<Reg<U64>>,
}

/// The address of an element as far as some of its indices determine it.
#[derive(Clone)]
pub(super) struct ElementAddress {
    /// The address that `offset` counts from. `None` for the part of the address that the column's
    /// indices contribute, which is added to the part of each row.
    pub(super) address: Option<Reg<GlobalAddress>>,
    /// Bytes from `address`.
    pub(super) offset: Option<Value<U64>>,
    /// Whether these indices are all within the tensor's extents.
    pub(super) within: Option<Value<Pred>>,
}

impl ElementAddress {
    /// Adds the index of one more dimension.
    pub(super) fn step(
        &mut self,
        k: &mut Builder,
        tensor: &TensorRegisters,
        dimension: usize,
        index: Value<S32>,
    ) {
        // As unsigned numbers, negative indices are beyond every extent.
        let index = k.eval(index.reinterpret::<U32>());
        let inside = k.eval(index.less(tensor.extents[dimension]));
        // Index 0 is loaded instead of one out of bounds, which saves a branch.
        let near = k.eval(inside.select::<U32>(index, 0u32));
        let stride = tensor.strides[dimension] * tensor.stored.bytes();
        let step = k.eval(near.convert::<U64>() * stride);
        let step = ElementAddress {
            address: None,
            offset: Some(step.into()),
            within: Some(inside.into()),
        };
        *self = self.clone().and(step);
    }

    /// Combines two places that were determined by different indices.
    pub(super) fn and(self, other: ElementAddress) -> ElementAddress {
        let both = |a: Option<Value<U64>>, b: Option<Value<U64>>| match (a, b) {
            (Some(a), Some(b)) => Some(a + b),
            (a, b) => a.or(b),
        };
        ElementAddress {
            address: self.address.or(other.address),
            offset: both(self.offset, other.offset),
            within: match (self.within, other.within) {
                (Some(a), Some(b)) => Some(a & b),
                (a, b) => a.or(b),
            },
        }
    }

    /// Evaluates the address into as few registers as possible.
    pub(super) fn computed(self, k: &mut Builder) -> ElementAddress {
        let (address, offset) = match (self.address, self.offset) {
            (Some(address), Some(offset)) => (Some(k.eval(address + offset)), None),
            (address, offset) => (address, offset.map(|offset| k.eval(offset).into())),
        };
        ElementAddress { address, offset, within: self.within.map(|within| k.eval(within).into()) }
    }

    /// Returns the element's address, and whether all indices are within the tensor.
    fn found(self, k: &mut Builder) -> (Value<GlobalAddress>, Reg<Pred>) {
        let ElementAddress { address, offset, within } = self;
        let address = address.expect("a tensor lies somewhere");
        let place: Value<GlobalAddress> = match offset {
            Some(offset) => address + offset,
            None => address.into(),
        };
        (place, k.eval(within.expect("a tensor has dimensions")))
    }

    /// Loads the element; zero (or false) if an index is out of bounds.
    pub(super) fn load(self, k: &mut Builder, tensor: &TensorRegisters) -> Computed {
        let (place, within) = self.found(k);
        match tensor.stored {
            Stored::I32 | Stored::I64 => {
                let loaded = k.load::<S32, _>(place);
                Computed::Integer(k.eval(within.select::<S32>(loaded, 0)).into())
            }
            Stored::U8 => {
                let loaded = k.load_byte(place).reinterpret::<S32>();
                Computed::Integer(k.eval(within.select::<S32>(loaded, 0)).into())
            }
            Stored::Bool => {
                let loaded = k.load_byte(place);
                Computed::Bool(k.eval(within & loaded.differs(0)).into())
            }
            floats => {
                let loaded = load_as_f32(k, float_of(floats), place);
                Computed::Float(k.eval(within.select::<F32>(loaded, 0.0)).into())
            }
        }
    }
}

/// Loads two neighbouring elements with one instruction, `column` elements after the address
/// `first`.
pub(super) fn load_pair(
    k: &mut Builder,
    stored: Stored,
    first: Reg<GlobalAddress>,
    column: u32,
) -> [Computed; 2] {
    let place = first + column * stored.bytes() as u32;
    match stored {
        Stored::F16 | Stored::BF16 | Stored::F32 => {
            let pair = load_pair_as_f32(k, float_of(stored), place);
            pair.map(|it| Computed::Float(it.into()))
        }
        _ => {
            let pair = k.load_vector::<S32, _, 2>(place, LoadHint::default());
            pair.map(|it| Computed::Integer(it.into()))
        }
    }
}

/// Returns the element of a tensor of floats.
fn float_of(stored: Stored) -> Element {
    match stored {
        Stored::F16 => Element::F16,
        Stored::BF16 => Element::BF16,
        _ => Element::F32,
    }
}
