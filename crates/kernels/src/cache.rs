//! What a cache of keys and values is made of: its element, and the scales of one of 8 bits.
//!
//! An 8-bit number stands for itself times its scale, an `f32`.

use ptx::{Builder, Capability, Element, Expression, F32, GlobalAddress, Reg, Target, U32, U64};

use crate::parameter::{Axis, Tensor};
use crate::strides::Strided;

/// What keys and values are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cache {
    /// Their element.
    pub element: Element,
    /// The scales of keys: none where the element has more than 8 bits.
    pub key_scales: Scales,
    /// The scales of values.
    pub value_scales: Scales,
}

/// Which numbers share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scales {
    /// All, and it is 1.
    One,
    /// Those of a sequence and key head.
    PerHead,
    /// Those of a token and key head: scales lie as the cache does without its last dimension.
    PerToken,
}

impl Cache {
    /// Numbers that stand for themselves.
    pub const fn plain(element: Element) -> Self {
        Cache { element, key_scales: Scales::One, value_scales: Scales::One }
    }

    /// Whether its numbers have 8 bits, and are widened to `f16` for products.
    pub const fn is_narrow(&self) -> bool {
        self.element.bytes() == 1
    }

    /// Whether a target makes 16 bits of its numbers, and they of 16: `int8` takes no instruction of
    /// its own.
    pub fn is_converted_by(&self, target: Target) -> bool {
        match self.element {
            Element::E4M3 | Element::E5M2 => target.has(Capability::Fp8Conversion),
            _ => true,
        }
    }

    /// Its part in the name of a kernel whose other tensors have this element.
    pub(crate) fn suffix(&self, element: Element) -> String {
        let of = |side: &str, scales| match scales {
            Scales::One => String::new(),
            Scales::PerHead => format!("_{side}head"),
            Scales::PerToken => format!("_{side}token"),
        };
        let scales = of("k", self.key_scales) + &of("v", self.value_scales);
        if self.element == element { scales } else { format!("_{}{scales}", self.element) }
    }
}

/// Rows of numbers below this are scaled as if this were their largest, so that a scale that is
/// found is never zero and has a reciprocal.
pub const LEAST_MAGNITUDE: f32 = 1e-12;

/// The scales of a tensor, as a kernel is passed them.
pub(crate) enum ScaleSource {
    One,
    PerHead(HeadScales),
    PerToken(Strided),
}

impl ScaleSource {
    pub(crate) fn parameters(k: &mut Builder, scales: Scales, tensor: Tensor) -> Self {
        match scales {
            Scales::One => ScaleSource::One,
            Scales::PerHead => ScaleSource::PerHead(HeadScales::parameters(k, tensor)),
            Scales::PerToken => ScaleSource::PerToken(Strided::parameters(k, tensor)),
        }
    }

    /// The one scale of a sequence and key head, where there is one.
    pub(crate) fn of_head(
        &self,
        k: &mut Builder,
        sequence: Reg<U32>,
        head: Reg<U32>,
    ) -> Option<Reg<F32>> {
        match self {
            ScaleSource::PerHead(scales) => Some(scales.of(k, sequence, head)),
            ScaleSource::One | ScaleSource::PerToken(_) => None,
        }
    }
}

/// A scale for each sequence and key head.
pub(crate) struct HeadScales {
    address: Reg<GlobalAddress>,
    batch: Reg<U64>,
    head: Reg<U64>,
}

impl HeadScales {
    fn parameters(k: &mut Builder, tensor: Tensor) -> Self {
        HeadScales {
            address: tensor.address(k),
            batch: tensor.stride(k, Axis::Batch),
            head: tensor.stride(k, Axis::Head),
        }
    }

    fn of(&self, k: &mut Builder, sequence: Reg<U32>, head: Reg<U32>) -> Reg<F32> {
        let index = sequence.convert::<U64>() * self.batch + head.convert::<U64>() * self.head;
        k.load(self.address + index * 4)
    }
}
