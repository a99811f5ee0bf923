//! Elements of the tensors that a function loads from.

use ptx::{
    BF16x2, Builder, Choose, Element, Expression, F16x2, F32, GlobalAddress, LoadHint, Pred, Reg,
    S32, U32, U64, Value,
};

use super::Computed;
use crate::attention::function::node::Stored;
use crate::element::load_as_f32;

/// A tensor that is loaded from.
#[derive(Clone)]
pub(super) struct TensorRegisters {
    pub(super) stored: Stored,
    pub(super) address: Reg<GlobalAddress>,
    pub(super) extents: Vec<Reg<U32>>,
    pub(super) strides: Vec<Reg<U64>>,
}

/// Where an element lies, as far as some of its indices say.
#[derive(Clone)]
pub(super) struct Place {
    /// From here on; of a column, which stands beside the row's, nowhere yet.
    pub(super) address: Option<Reg<GlobalAddress>>,
    /// Bytes on.
    pub(super) offset: Option<Value<U64>>,
    /// Whether these indices are inside.
    pub(super) within: Option<Value<Pred>>,
}

impl Place {
    /// One more index.
    pub(super) fn step(
        &mut self,
        k: &mut Builder,
        tensor: &TensorRegisters,
        dimension: usize,
        index: Value<S32>,
    ) {
        // Those below zero are beyond every extent.
        let index = k.eval(index.reinterpret::<U32>());
        let inside = k.eval(index.less(tensor.extents[dimension]));
        // There is an element to be loaded all the same: no branch.
        let near = k.eval(inside.choose::<U32>(index, 0u32));
        let stride = tensor.strides[dimension] * tensor.stored.bytes();
        let step = k.eval(near.convert::<U64>() * stride);
        let step = Place { address: None, offset: Some(step.into()), within: Some(inside.into()) };
        *self = self.clone().and(step);
    }

    /// With further indices.
    pub(super) fn and(self, other: Place) -> Place {
        let both = |a: Option<Value<U64>>, b: Option<Value<U64>>| match (a, b) {
            (Some(a), Some(b)) => Some(a + b),
            (a, b) => a.or(b),
        };
        Place {
            address: self.address.or(other.address),
            offset: both(self.offset, other.offset),
            within: match (self.within, other.within) {
                (Some(a), Some(b)) => Some(a & b),
                (a, b) => a.or(b),
            },
        }
    }

    /// The same in as few registers as can be.
    pub(super) fn computed(self, k: &mut Builder) -> Place {
        let (address, offset) = match (self.address, self.offset) {
            (Some(address), Some(offset)) => (Some(k.eval(address + offset)), None),
            (address, offset) => (address, offset.map(|offset| k.eval(offset).into())),
        };
        Place { address, offset, within: self.within.map(|within| k.eval(within).into()) }
    }

    /// Its address, and whether it is inside of its tensor.
    fn found(self, k: &mut Builder) -> (Value<GlobalAddress>, Reg<Pred>) {
        let Place { address, offset, within } = self;
        let address = address.expect("a tensor lies somewhere");
        let place: Value<GlobalAddress> = match offset {
            Some(offset) => address + offset,
            None => address.into(),
        };
        (place, k.eval(within.expect("a tensor has dimensions")))
    }

    /// The element, zero where an index is outside.
    pub(super) fn load(self, k: &mut Builder, tensor: &TensorRegisters) -> Computed {
        let (place, within) = self.found(k);
        match tensor.stored {
            Stored::I32 | Stored::I64 => {
                let loaded = k.load::<S32, _>(place);
                Computed::Integer(k.eval(within.choose::<S32>(loaded, 0)).into())
            }
            Stored::U8 => {
                let loaded = k.load_byte(place).reinterpret::<S32>();
                Computed::Integer(k.eval(within.choose::<S32>(loaded, 0)).into())
            }
            Stored::Bool => {
                let loaded = k.load_byte(place);
                Computed::Truth(k.eval(within & loaded.differs(0)).into())
            }
            floats => {
                let element = match floats {
                    Stored::F16 => Element::F16,
                    Stored::BF16 => Element::BF16,
                    _ => Element::F32,
                };
                let loaded = load_as_f32(k, element, place);
                Computed::Float(k.eval(within.choose::<F32>(loaded, 0.0)).into())
            }
        }
    }
}

/// Two neighbours, so many columns on.
pub(super) fn load_pair(
    k: &mut Builder,
    stored: Stored,
    first: Reg<GlobalAddress>,
    column: u32,
) -> [Computed; 2] {
    let place = first + column * stored.bytes() as u32;
    let floats = match stored {
        Stored::F16 => {
            let pair = k.load::<F16x2, _>(place);
            k.unpack(pair)
        }
        Stored::BF16 => {
            let pair = k.load::<BF16x2, _>(place);
            k.unpack(pair)
        }
        Stored::F32 => k.load_vector::<F32, _, 2>(place, LoadHint::default()),
        _ => {
            let pair = k.load_vector::<S32, _, 2>(place, LoadHint::default());
            return pair.map(|it| Computed::Integer(it.into()));
        }
    };
    floats.map(|it| Computed::Float(it.into()))
}
