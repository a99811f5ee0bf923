//! Tensor maps: 128 bytes that hold the description which `cuTensorMapEncodeTiled` was given.

use ptx::{Element, Swizzle, TensorBox};
use sim::{Memory, TensorMapArgument};

use crate::error::{Error, Result, explain};

/// The bytes of a tensor map.
pub(crate) type Encoded = [u64; 16];

/// Marks the first word of a tensor map, so that other bytes are not taken for one.
const MARK: u64 = 0x7E45_0A00_0000_0000;

/// A tensor as the driver's function takes it.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) data_type: u32,
    pub(crate) address: u64,
    pub(crate) dimensions: Vec<u64>,
    /// In bytes, of all dimensions but the first.
    pub(crate) strides: Vec<u64>,
    pub(crate) extent: Vec<u32>,
    pub(crate) element_strides: Vec<u32>,
    pub(crate) interleave: u32,
    pub(crate) swizzle: u32,
    pub(crate) l2_promotion: u32,
    pub(crate) fill: u32,
}

impl Tensor {
    /// Makes the checks that the driver's documentation lists, and encodes the tensor.
    pub(crate) fn encode(&self) -> Result<Encoded> {
        let element = self.element()?;
        let wrong = |reason: String| Err(explain(Error::InvalidValue, reason));
        if self.interleave != 0 || self.element_strides.iter().any(|it| *it != 1) || self.fill != 0
        {
            let reason = "tensor maps with interleaving, element strides or NaN for zeros";
            return Err(explain(Error::NotSupported, reason));
        }
        if self.swizzle > 3 || self.l2_promotion > 3 {
            return wrong(format!("swizzle {} or promotion {}", self.swizzle, self.l2_promotion));
        }
        // Of null the driver's documentation says nothing: refused here, so that nobody relies on it.
        if self.address == 0 || !self.address.is_multiple_of(16) {
            return wrong(format!("a tensor at {:#x}: null, or no multiple of 16", self.address));
        }
        if let Some(extent) = self.dimensions.iter().find(|it| !(1..=1 << 32).contains(*it)) {
            return wrong(format!("a tensor with a dimension of {extent}"));
        }
        if let Some(stride) = self.strides.iter().find(|it| **it % 16 != 0 || **it >= 1 << 40) {
            return wrong(format!("a tensor with a stride of {stride} bytes"));
        }
        if let Some(extent) = self.extent.iter().find(|it| !(1..=256).contains(*it)) {
            return wrong(format!("a box of {extent} elements in a dimension"));
        }
        let row = self.extent[0] * element.bytes();
        let width = if self.swizzle == 0 { u32::MAX } else { 16 << self.swizzle };
        if !row.is_multiple_of(16) || row > width {
            return wrong(format!("a box with rows of {row} bytes for swizzle {}", self.swizzle));
        }
        let rank = self.dimensions.len();
        let mut words = [0; 16];
        words[0] = MARK | u64::from(self.swizzle) << 16 | u64::from(self.data_type) << 8;
        words[0] |= rank as u64;
        words[1] = self.address;
        words[2..2 + rank].copy_from_slice(&self.dimensions);
        words[7..6 + rank].copy_from_slice(&self.strides);
        // Extents of up to 256, less one to fit in a byte.
        let extents = self.extent.iter().enumerate();
        words[11] = extents.map(|(at, extent)| u64::from(extent - 1) << (8 * at)).sum();
        Ok(words)
    }

    /// Returns the element; that of bytes stands for all elements of 8 bits.
    fn element(&self) -> Result<Element> {
        match self.data_type {
            0 => Ok(Element::Int8),
            6 => Ok(Element::F16),
            7 => Ok(Element::F32),
            9 => Ok(Element::BF16),
            other => Err(explain(Error::NotSupported, format!("tensor maps of type {other}"))),
        }
    }
}

/// Returns the argument that a tensor map stands for.
pub(crate) fn decode(words: &Encoded) -> Result<TensorMapArgument> {
    let byte = |shift: u32| (words[0] >> shift & 0xFF) as u32;
    let rank = byte(0) as usize;
    if words[0] & !0xFF_FFFF != MARK || !(1..=5).contains(&rank) {
        return Err(explain(Error::InvalidValue, "an argument is not an encoded tensor map"));
    }
    let element = match byte(8) {
        6 => Element::F16,
        7 => Element::F32,
        9 => Element::BF16,
        _ => Element::Int8,
    };
    let swizzle = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128][byte(16) as usize & 3];
    let extent = (0..rank).map(|at| (words[11] >> (8 * at) & 0xFF) as u32 + 1).collect();
    let (buffer, offset) = Memory::place(words[1]);
    Ok(TensorMapArgument {
        buffer,
        offset,
        dimensions: words[2..2 + rank].to_vec(),
        strides: words[7..6 + rank].to_vec(),
        tensor_box: TensorBox { element, swizzle, extent },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 64 columns of bf16 by 128 rows, out of 4 heads of 1000 rows.
    fn right() -> Tensor {
        Tensor {
            data_type: 9,
            address: (1 << 36) + (1 << 20) + 256,
            dimensions: vec![128, 1000, 4],
            strides: vec![256, 256_000],
            extent: vec![64, 256, 1],
            element_strides: vec![1; 3],
            interleave: 0,
            swizzle: 3,
            l2_promotion: 3,
            fill: 0,
        }
    }

    #[test]
    fn a_tensor_map_holds_its_tensor() {
        let map = decode(&right().encode().unwrap()).unwrap();
        assert_eq!(Memory::address(map.buffer, map.offset), right().address);
        assert_eq!((map.dimensions, map.strides), (right().dimensions, right().strides));
        let extent = right().extent;
        let expected = TensorBox { element: Element::BF16, swizzle: Swizzle::B128, extent };
        assert_eq!(map.tensor_box, expected);
        assert_eq!(decode(&[0; 16]).unwrap_err(), Error::InvalidValue);
    }

    #[test]
    fn wrong_tensors_are_refused() {
        let with = |change: fn(&mut Tensor)| {
            let mut tensor = right();
            change(&mut tensor);
            tensor.encode().err()
        };
        assert_eq!(with(|_| {}), None);
        let invalid = Some(Error::InvalidValue);
        assert_eq!(with(|tensor| tensor.address += 8), invalid);
        assert_eq!(with(|tensor| tensor.dimensions[1] = 0), invalid);
        assert_eq!(with(|tensor| tensor.dimensions[1] = (1 << 32) + 1), invalid);
        assert_eq!(with(|tensor| tensor.strides[0] = 248), invalid);
        assert_eq!(with(|tensor| tensor.strides[1] = 1 << 40), invalid);
        assert_eq!(with(|tensor| tensor.extent[1] = 257), invalid);
        assert_eq!(with(|tensor| tensor.extent[0] = 12), invalid);
        assert_eq!(with(|tensor| tensor.extent[0] = 72), invalid);
        assert_eq!(with(|tensor| tensor.swizzle = 4), invalid);
        assert_eq!(with(|tensor| tensor.data_type = 8), Some(Error::NotSupported));
    }
}
