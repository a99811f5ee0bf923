//! Tensor maps: descriptions of tensors for the copy engine (TMA).

use cudarc::driver::sys;
use ptx::{Element, Swizzle, TensorBox};

use crate::error::check;
use crate::{Device, DeviceAddress, Result};

/// Why a tensor cannot be described to the copy engine. Each variant is one of the documented
/// constraints of `cuTensorMapEncodeTiled`, checked here because the driver only says "invalid
/// argument".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorMapError {
    /// The box has no dimension, or more than five.
    #[error("the rank must be 1 to 5, and is {rank}")]
    Rank {
        /// The rank of the box.
        rank: usize,
    },
    /// The tensor has more or fewer dimensions than the box.
    #[error("the box has {rank} dimensions and the tensor {dimensions}")]
    Dimensions {
        /// The rank of the box.
        rank: usize,
        /// Number of dimensions that were given.
        dimensions: usize,
    },
    /// The number of strides is not one less than the rank.
    #[error("a tensor of rank {rank} needs {} strides, and {strides} were given", rank - 1)]
    Strides {
        /// The rank of the box.
        rank: usize,
        /// Number of strides that were given.
        strides: usize,
    },
    /// The address is not a multiple of 16.
    #[error("the address must be a multiple of 16, and is {address}")]
    Address {
        /// The address.
        address: DeviceAddress,
    },
    /// A dimension is empty or too large.
    #[error("dimension {index} must be 1 to 2^32, and is {extent}")]
    Extent {
        /// Index of the dimension, fastest first.
        index: usize,
        /// Its extent in elements.
        extent: u64,
    },
    /// A stride is not a multiple of 16 bytes, or too large.
    #[error(
        "the stride of dimension {index} must be a multiple of 16 bytes below 2^40, and is {bytes}"
    )]
    Stride {
        /// Index of the dimension, fastest first; 1 is the first with a stride.
        index: usize,
        /// The stride in bytes.
        bytes: u64,
    },
    /// The box is empty or too large in a dimension.
    #[error("the box must be 1 to 256 elements in dimension {index}, and is {extent}")]
    Box {
        /// Index of the dimension, fastest first.
        index: usize,
        /// The extent of the box in elements.
        extent: u32,
    },
    /// A row of the box is not a multiple of 16 bytes.
    #[error("a row of the box must be a multiple of 16 bytes, and is {bytes}")]
    RowMultiple {
        /// Bytes per row.
        bytes: u32,
    },
    /// A row of the box is wider than the swizzle.
    #[error(
        "a row of the box must be at most as wide as the swizzle, {width} bytes, and is {bytes}"
    )]
    RowWidth {
        /// Width of the swizzle in bytes.
        width: u32,
        /// Bytes per row.
        bytes: u32,
    },
}

/// A description of a tensor for the copy engine, passed to a kernel by value in
/// [`Arguments`](crate::Arguments).
///
/// Reads outside of the tensor give zero; writes there are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
// The driver of CUDA 12 requires 64, that of CUDA 13 specifies 128, and so does a kernel's
// parameter.
#[repr(C, align(128))]
pub struct TensorMap {
    pub(crate) opaque: [u64; 16],
}

/// Stands for the address of a tensor without elements: aligned, and not null.
const NO_ELEMENTS: u64 = 128;

// The cast in `encode` needs the size and at least the alignment of the bindings' tensor map.
const _: () = assert!(size_of::<TensorMap>() == size_of::<sys::CUtensorMap>());
const _: () = assert!(align_of::<TensorMap>() >= align_of::<sys::CUtensorMap>());

impl TensorMap {
    /// Describes a tensor at `address` with `dimensions` in elements, fastest
    /// first, and `strides` in bytes, for all dimensions but the first. Copies
    /// take one `tensor_box` of it.
    pub fn encode(
        device: &Device,
        tensor_box: &TensorBox,
        address: DeviceAddress,
        dimensions: &[u64],
        strides: &[u64],
    ) -> Result<TensorMap> {
        check_constraints(tensor_box, address, dimensions, strides)?;
        // Encoding is done on the host, but the driver requires a context.
        let _bound = device.bind()?;
        let mut map = TensorMap { opaque: [0; 16] };
        let element_strides = [1u32; 5];
        // The driver reads no strides at rank 1, but refuses a null pointer.
        let no_strides = [0u64; 1];
        let strides = if strides.is_empty() { &no_strides[..] } else { strides };
        // Frameworks give tensors without elements no address, and a kernel copies nothing of them.
        // Whether the driver takes a null address is not documented; it follows none.
        let address = if address.0 == 0 { NO_ELEMENTS } else { address.0 };
        // SAFETY: `map` is as large and as aligned as a CUtensorMap (asserted
        // above); each array has an entry per dimension (checked above), the
        // element strides more than enough. The address is not followed.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                (&raw mut map).cast::<sys::CUtensorMap>(),
                data_type(tensor_box.element),
                tensor_box.extent.len() as u32,
                address as *mut std::ffi::c_void,
                dimensions.as_ptr(),
                strides.as_ptr(),
                tensor_box.extent.as_ptr(),
                element_strides.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle(tensor_box.swizzle),
                // What a miss brings into L2.
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                // "None" means zeros; the alternative is NaN.
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check("cuTensorMapEncodeTiled", result)?;
        Ok(map)
    }
}

fn check_constraints(
    tensor_box: &TensorBox,
    address: DeviceAddress,
    dimensions: &[u64],
    strides: &[u64],
) -> Result<(), TensorMapError> {
    let rank = tensor_box.extent.len();
    if !(1..=5).contains(&rank) {
        return Err(TensorMapError::Rank { rank });
    }
    if dimensions.len() != rank {
        return Err(TensorMapError::Dimensions { rank, dimensions: dimensions.len() });
    }
    if strides.len() != rank - 1 {
        return Err(TensorMapError::Strides { rank, strides: strides.len() });
    }
    if !address.0.is_multiple_of(16) {
        return Err(TensorMapError::Address { address });
    }
    for (index, &extent) in dimensions.iter().enumerate() {
        if !(1..=1 << 32).contains(&extent) {
            return Err(TensorMapError::Extent { index, extent });
        }
    }
    for (index, &bytes) in strides.iter().enumerate() {
        if !bytes.is_multiple_of(16) || bytes >= 1 << 40 {
            return Err(TensorMapError::Stride { index: index + 1, bytes });
        }
    }
    for (index, &extent) in tensor_box.extent.iter().enumerate() {
        if !(1..=256).contains(&extent) {
            return Err(TensorMapError::Box { index, extent });
        }
    }
    let bytes = tensor_box.extent[0] * tensor_box.element.bytes();
    if !bytes.is_multiple_of(16) {
        return Err(TensorMapError::RowMultiple { bytes });
    }
    let width = match tensor_box.swizzle {
        Swizzle::None => u32::MAX,
        Swizzle::B32 => 32,
        Swizzle::B64 => 64,
        Swizzle::B128 => 128,
    };
    if bytes > width {
        return Err(TensorMapError::RowWidth { width, bytes });
    }
    Ok(())
}

fn data_type(element: Element) -> sys::CUtensorMapDataType {
    use sys::CUtensorMapDataType as DataType;
    match element {
        Element::F32 => DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        Element::F16 => DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        Element::BF16 => DataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        // The copy engine has no 8-bit floats, and needs none: it moves bytes.
        Element::E4M3 | Element::E5M2 | Element::Int8 => DataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }
}

fn swizzle(swizzle: Swizzle) -> sys::CUtensorMapSwizzle {
    match swizzle {
        Swizzle::None => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        Swizzle::B32 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
        Swizzle::B64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        Swizzle::B128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A valid tensor, to be made invalid in one way.
    struct Case {
        tensor_box: TensorBox,
        address: DeviceAddress,
        dimensions: Vec<u64>,
        strides: Vec<u64>,
    }

    /// 64 columns of bf16 by 128 rows, out of 4 heads of 1000 rows.
    fn right() -> Case {
        Case {
            tensor_box: TensorBox {
                element: Element::BF16,
                swizzle: Swizzle::B128,
                extent: vec![64, 128, 1],
            },
            address: DeviceAddress(0x7f00_0000_0000),
            dimensions: vec![128, 1000, 4],
            strides: vec![256, 256_000],
        }
    }

    fn with(change: impl FnOnce(&mut Case)) -> Result<(), TensorMapError> {
        let mut case = right();
        change(&mut case);
        check_constraints(&case.tensor_box, case.address, &case.dimensions, &case.strides)
    }

    #[test]
    fn a_right_tensor_is_accepted() {
        assert_eq!(with(|_| {}), Ok(()));
        assert_eq!(with(|case| case.dimensions[1] = 1 << 32), Ok(()));
        assert_eq!(with(|case| case.strides[1] = (1 << 40) - 16), Ok(()));
        assert_eq!(with(|case| case.tensor_box.extent[1] = 256), Ok(()));
    }

    #[test]
    fn every_constraint_has_its_error() {
        use TensorMapError as Wrong;
        let empty = with(|case| case.tensor_box.extent.clear());
        assert_eq!(empty, Err(Wrong::Rank { rank: 0 }));
        let six = with(|case| case.tensor_box.extent = vec![1; 6]);
        assert_eq!(six, Err(Wrong::Rank { rank: 6 }));
        let two = with(|case| case.dimensions.truncate(2));
        assert_eq!(two, Err(Wrong::Dimensions { rank: 3, dimensions: 2 }));
        let one = with(|case| case.strides.truncate(1));
        assert_eq!(one, Err(Wrong::Strides { rank: 3, strides: 1 }));
        let address = DeviceAddress(0x7f00_0000_0008);
        let unaligned = with(|case| case.address = address);
        assert_eq!(unaligned, Err(Wrong::Address { address }));
        let none = with(|case| case.dimensions[1] = 0);
        assert_eq!(none, Err(Wrong::Extent { index: 1, extent: 0 }));
        let large = with(|case| case.dimensions[2] = (1 << 32) + 1);
        assert_eq!(large, Err(Wrong::Extent { index: 2, extent: (1 << 32) + 1 }));
        let odd = with(|case| case.strides[0] = 248);
        assert_eq!(odd, Err(Wrong::Stride { index: 1, bytes: 248 }));
        let far = with(|case| case.strides[1] = 1 << 40);
        assert_eq!(far, Err(Wrong::Stride { index: 2, bytes: 1 << 40 }));
        let flat = with(|case| case.tensor_box.extent[1] = 0);
        assert_eq!(flat, Err(Wrong::Box { index: 1, extent: 0 }));
        let tall = with(|case| case.tensor_box.extent[1] = 257);
        assert_eq!(tall, Err(Wrong::Box { index: 1, extent: 257 }));
        let narrow = with(|case| case.tensor_box.extent[0] = 12);
        assert_eq!(narrow, Err(Wrong::RowMultiple { bytes: 24 }));
        let wide = with(|case| case.tensor_box.extent[0] = 72);
        assert_eq!(wide, Err(Wrong::RowWidth { width: 128, bytes: 144 }));
    }

    #[test]
    fn the_row_is_as_wide_as_the_swizzle_allows() {
        for (swizzle, elements) in [(Swizzle::B32, 16), (Swizzle::B64, 32), (Swizzle::B128, 64)] {
            let row = |extent| {
                with(|case| {
                    case.tensor_box.swizzle = swizzle;
                    case.tensor_box.extent[0] = extent;
                })
            };
            assert_eq!(row(elements), Ok(()));
            assert!(matches!(row(elements + 8), Err(TensorMapError::RowWidth { .. })));
        }
        let unswizzled = with(|case| {
            case.tensor_box.swizzle = Swizzle::None;
            case.tensor_box.extent[0] = 256;
        });
        assert_eq!(unswizzled, Ok(()));
    }

    #[test]
    fn errors_name_the_constraint() {
        let case = right();
        let error = check_constraints(&case.tensor_box, case.address, &[1], &[]).unwrap_err();
        assert_eq!(
            crate::Error::from(error).to_string(),
            "a tensor map cannot be made: the box has 3 dimensions and the tensor 1"
        );
    }

    #[test]
    fn a_tensor_map_is_what_a_kernel_wants() {
        assert_eq!(size_of::<TensorMap>(), 128);
        assert_eq!(align_of::<TensorMap>(), 128);
        // As in the CUDA 12 bindings; see `TensorMap`.
        assert_eq!(align_of::<sys::CUtensorMap>(), 64);
    }
}
