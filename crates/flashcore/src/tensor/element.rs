//! Conversion between the stored element types and f32, a slice at a time.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::float8::{E4M3, E5M2, Int8};

/// An element type that tensors store.
pub(crate) trait Element: Copy + Send + Sync {
    /// Converts to f32, exactly: f32 holds every value of every stored type.
    fn widen(from: &[Self], to: &mut [f32]);
    /// Rounds to nearest, ties to even; 8-bit types saturate.
    fn narrow(from: &[f32], to: &mut [Self]);
}

impl Element for f32 {
    fn widen(from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn narrow(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }
}

impl Element for f16 {
    fn widen(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    fn narrow(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

impl Element for bf16 {
    fn widen(from: &[Self], to: &mut [f32]) {
        // A shift in a plain loop, which compilers vectorize.
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    }

    fn narrow(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

/// Implements [`Element`] for 8-bit types, which convert one by one.
macro_rules! small {
    ($($name:ident),*) => {$(
        impl Element for $name {
            fn widen(from: &[Self], to: &mut [f32]) {
                for (to, from) in to.iter_mut().zip(from) {
                    *to = from.to_f32();
                }
            }

            fn narrow(from: &[f32], to: &mut [Self]) {
                for (to, from) in to.iter_mut().zip(from) {
                    *to = $name::from_f32(*from);
                }
            }
        }
    )*};
}

small!(E4M3, E5M2, Int8);
