//! The element of a cache of keys and values, and the scales of an 8-bit cache.
//!
//! An 8-bit number stands for its value times its scale, an `f32`.

use ptx::{Builder, Capability, Element, Expression, F32, GlobalAddress, Reg, Target, U32, U64};

use crate::parameter::{Axis, Tensor};
use crate::strides::Strided;

/// The element and scales of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cache {
    /// The element of both.
    pub element: Element,
    /// The scales of keys: [`Scales::One`] where the element has more than 8 bits.
    pub key_scales: Scales,
    /// The scales of values, likewise.
    pub value_scales: Scales,
}

/// Which numbers of a tensor share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scales {
    /// No scales: every scale is 1.
    One,
    /// One scale for each sequence and key head.
    PerHead,
    /// One scale for each token and key head, stored like the cache without its last dimension.
    PerToken,
}

impl Cache {
    /// Returns a cache without scales.
    pub const fn plain(element: Element) -> Self {
        Cache { element, key_scales: Scales::One, value_scales: Scales::One }
    }

    /// Returns whether the element has 8 bits, so that it is widened to `f16` for products.
    pub const fn is_8_bit(&self) -> bool {
        self.element.bytes() == 1
    }

    /// Returns whether a target can convert the element to and from 16 bits. `int8` needs no
    /// special instruction.
    pub fn is_converted_by(&self, target: Target) -> bool {
        match self.element {
            Element::E4M3 | Element::E5M2 => target.has(Capability::Fp8Conversion),
            _ => true,
        }
    }

    /// Returns the cache's part of the name of a kernel whose other tensors have this element.
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

/// Lower bound of the magnitude from which a scale is computed, so that a scale is never zero and
/// has a reciprocal.
pub const LEAST_MAGNITUDE: f32 = 1e-12;

/// The scales of a tensor, as launch parameters.
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

    /// Loads the scale of a sequence and key head, with per-head scales.
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

/// The launch parameters of per-head scales.
#[derive(Clone, Copy)]
pub(crate) struct HeadScales {
    pub(crate) address: Reg<GlobalAddress>,
    batch: Reg<U64>,
    head: Reg<U64>,
}

impl HeadScales {
    pub(crate) fn parameters(k: &mut Builder, tensor: Tensor) -> Self {
        HeadScales {
            address: tensor.address(k),
            batch: tensor.stride(k, Axis::Batch),
            head: tensor.stride(k, Axis::Head),
        }
    }

    /// Loads the scale of a sequence and key head.
    pub(crate) fn of(&self, k: &mut Builder, sequence: Reg<U32>, head: Reg<U32>) -> Reg<F32> {
        let index = sequence.convert::<U64>() * self.batch + head.convert::<U64>() * self.head;
        k.load(self.address + index * 4)
    }
}
