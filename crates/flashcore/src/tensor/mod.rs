//! Tensors in host memory: element type, shape, strides and the elements themselves.
//!
//! Every tensor is logically (batch, length, heads, dim); strides describe its layout in memory.

mod element;
mod float8;
mod layout;
pub mod random;
mod view;

use half::{bf16, f16};
use rayon::prelude::*;

pub(crate) use element::Element;
pub use float8::{E4M3, E5M2, Int8};
pub use layout::{Layout, Shape, Strides};
pub use view::{ElementsView, Head, TensorView};

use crate::dtype::DType;

/// Why a tensor cannot be created.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The number or the span of the elements exceeds the address space.
    #[error("a tensor of shape {0} is larger than the address space")]
    TooLarge(Shape),
    /// The given memory does not reach the last element.
    #[error("shape {shape} needs {needed} elements, {given} were given")]
    Length {
        /// The requested shape.
        shape: Shape,
        /// Number of elements from the first to the last under the strides.
        needed: usize,
        /// Number of elements that were given.
        given: usize,
    },
    /// The number of bytes is not a multiple of the element size.
    #[error("{bytes} bytes are no whole number of {dtype} elements")]
    Bytes {
        /// Number of bytes that were given.
        bytes: usize,
        /// The element type.
        dtype: DType,
    },
    /// The system has no memory for the tensor.
    #[error("no memory for a tensor of shape {shape} ({bytes} bytes)")]
    OutOfMemory {
        /// The requested shape.
        shape: Shape,
        /// Its size in bytes.
        bytes: usize,
    },
}

/// The memory of a [`Tensor`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Elements {
    /// Single precision.
    F32(Vec<f32>),
    /// Half precision.
    F16(Vec<f16>),
    /// Brain float.
    BF16(Vec<bf16>),
    /// 8-bit floats with 3 bits of mantissa.
    E4M3(Vec<E4M3>),
    /// 8-bit floats with 2 bits of mantissa.
    E5M2(Vec<E5M2>),
    /// 8-bit integers.
    Int8(Vec<Int8>),
}

/// Runs the same expression on whichever vector an [`Elements`] holds, or on the slice of an
/// [`ElementsView`].
macro_rules! with_elements {
    ($elements:expr, $vector:ident => $body:expr) => {
        with_elements!(Elements: $elements, $vector => $body)
    };
    ($kind:ident: $elements:expr, $vector:ident => $body:expr) => {
        match $elements {
            $crate::tensor::$kind::F32($vector) => $body,
            $crate::tensor::$kind::F16($vector) => $body,
            $crate::tensor::$kind::BF16($vector) => $body,
            $crate::tensor::$kind::E4M3($vector) => $body,
            $crate::tensor::$kind::E5M2($vector) => $body,
            $crate::tensor::$kind::Int8($vector) => $body,
        }
    };
}
pub(crate) use with_elements;

impl Elements {
    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        match self {
            Elements::F32(_) => DType::F32,
            Elements::F16(_) => DType::F16,
            Elements::BF16(_) => DType::BF16,
            Elements::E4M3(_) => DType::E4M3,
            Elements::E5M2(_) => DType::E5M2,
            Elements::Int8(_) => DType::Int8,
        }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        with_elements!(self, vector => vector.len())
    }

    /// How many are NaN. On all cores.
    pub fn nans(&self) -> usize {
        with_elements!(self, vector => vector.par_iter().filter(|value| value.is_nan()).count())
    }

    /// Tells whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Takes a vector of each element type as the elements of a tensor, and a slice as those of a view.
macro_rules! elements {
    ($($name:ident($element:ty)),*) => {$(
        impl From<Vec<$element>> for Elements {
            fn from(elements: Vec<$element>) -> Self {
                Elements::$name(elements)
            }
        }

        impl<'a> From<&'a [$element]> for ElementsView<'a> {
            fn from(elements: &'a [$element]) -> Self {
                ElementsView::$name(elements)
            }
        }
    )*};
}

elements!(F32(f32), F16(f16), BF16(bf16), E4M3(E4M3), E5M2(E5M2), Int8(Int8));

/// A tensor in host memory.
///
/// ```
/// use flashcore::{DType, Layout, Shape, Tensor};
///
/// let shape = Shape::new(1, 3, 2, 4);
/// let random = Tensor::random(DType::F16, shape, 7)?;
///
/// // Memory that already exists, here ordered (batch, heads, length, dim), is taken as it is.
/// let memory: Vec<f32> = (0..24).map(|i| i as f32).collect();
/// let strided = Tensor::new(Layout::heads_first(shape)?, memory)?;
/// assert_eq!(strided.head(0, 1).row(0), [12.0, 13.0, 14.0, 15.0]);
/// # Ok::<(), flashcore::TensorError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Tensor {
    layout: Layout,
    elements: Elements,
}

impl Tensor {
    /// Takes existing memory with a layout.
    pub fn new(layout: Layout, elements: impl Into<Elements>) -> Result<Self, TensorError> {
        let elements = elements.into();
        if elements.len() < layout.span() {
            return Err(TensorError::Length {
                shape: layout.shape(),
                needed: layout.span(),
                given: elements.len(),
            });
        }
        Ok(Tensor { layout, elements })
    }

    /// Creates a tensor whose memory, gaps between the strides included, holds one value.
    pub fn filled(dtype: DType, layout: Layout, value: f32) -> Result<Self, TensorError> {
        let elements = match dtype {
            DType::F32 => Elements::F32(filled(layout, value)?),
            DType::F16 => Elements::F16(filled(layout, f16::from_f32(value))?),
            DType::BF16 => Elements::BF16(filled(layout, bf16::from_f32(value))?),
            DType::E4M3 => Elements::E4M3(filled(layout, E4M3::from_f32(value))?),
            DType::E5M2 => Elements::E5M2(filled(layout, E5M2::from_f32(value))?),
            DType::Int8 => Elements::Int8(filled(layout, Int8::from_f32(value))?),
        };
        Ok(Tensor { layout, elements })
    }

    /// Creates a contiguous tensor of zeros.
    pub fn zeros(dtype: DType, shape: Shape) -> Result<Self, TensorError> {
        Tensor::filled(dtype, Layout::contiguous(shape)?, 0.0)
    }

    /// Creates a contiguous tensor from values in the order of the shape, rounded to `dtype`.
    pub fn from_f32(dtype: DType, shape: Shape, values: &[f32]) -> Result<Self, TensorError> {
        let layout = Layout::contiguous(shape)?;
        if values.len() != layout.span() {
            return Err(TensorError::Length { shape, needed: layout.span(), given: values.len() });
        }
        let mut tensor = Tensor::filled(dtype, layout, 0.0)?;
        with_elements!(&mut tensor.elements, vector => Element::narrow(values, vector));
        Ok(tensor)
    }

    /// Creates a tensor from its memory as little-endian bytes.
    pub fn from_bytes(dtype: DType, layout: Layout, bytes: &[u8]) -> Result<Self, TensorError> {
        if !bytes.len().is_multiple_of(dtype.bytes()) {
            return Err(TensorError::Bytes { bytes: bytes.len(), dtype });
        }
        let given = bytes.len() / dtype.bytes();
        if given < layout.span() {
            let (shape, needed) = (layout.shape(), layout.span());
            return Err(TensorError::Length { shape, needed, given });
        }
        let elements = match dtype {
            DType::F32 => Elements::F32(collected(layout, bytes)?),
            DType::F16 => Elements::F16(collected(layout, bytes)?),
            DType::BF16 => Elements::BF16(collected(layout, bytes)?),
            DType::E4M3 => Elements::E4M3(collected(layout, bytes)?),
            DType::E5M2 => Elements::E5M2(collected(layout, bytes)?),
            DType::Int8 => Elements::Int8(collected(layout, bytes)?),
        };
        Tensor::new(layout, elements)
    }

    /// Creates a contiguous tensor from a function of batch, position, head and element, rounded to
    /// `dtype`.
    pub fn from_fn(
        dtype: DType,
        shape: Shape,
        value: impl Fn([usize; 4]) -> f32,
    ) -> Result<Self, TensorError> {
        let mut tensor = Tensor::zeros(dtype, shape)?;
        let mut row = vec![0.0; shape.dim];
        for [batch, position, head] in shape.vectors() {
            for (element, to) in row.iter_mut().enumerate() {
                *to = value([batch, position, head, element]);
            }
            tensor.set_row([batch, position, head], &row);
        }
        Ok(tensor)
    }

    /// Creates a contiguous tensor of standard normal deviates, rounded to `dtype`. The same seed
    /// gives the same tensor on every machine.
    pub fn random(dtype: DType, shape: Shape, seed: u64) -> Result<Self, TensorError> {
        let mut tensor = Tensor::zeros(dtype, shape)?;
        with_elements!(&mut tensor.elements, vector => fill_random(vector, seed));
        Ok(tensor)
    }

    /// Copies the values into another layout; gaps between the strides hold `gap`.
    ///
    /// The layout must have this tensor's shape.
    pub fn to_layout(&self, layout: Layout, gap: f32) -> Result<Self, TensorError> {
        let shape = layout.shape();
        if shape != self.shape() {
            return Err(TensorError::Length {
                shape,
                needed: layout.span(),
                given: self.layout.span(),
            });
        }
        let mut tensor = Tensor::filled(self.dtype(), layout, gap)?;
        let mut row = vec![0.0; shape.dim];
        for [batch, position, head] in shape.vectors() {
            self.head(batch, head).read(position, &mut row);
            tensor.set_row([batch, position, head], &row);
        }
        Ok(tensor)
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.elements.dtype()
    }

    /// Returns the logical shape.
    pub fn shape(&self) -> Shape {
        self.layout.shape()
    }

    /// Returns shape and strides.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns the memory.
    pub fn elements(&self) -> &Elements {
        &self.elements
    }

    /// Returns the memory, consuming the tensor.
    pub fn into_elements(self) -> Elements {
        self.elements
    }

    /// Returns the memory as mutable. Its length must not change.
    pub(crate) fn elements_mut(&mut self) -> &mut Elements {
        &mut self.elements
    }

    /// Returns the memory as little-endian bytes.
    pub fn bytes(&self) -> &[u8] {
        with_elements!(&self.elements, vector => bytemuck::cast_slice(vector))
    }

    /// Returns the memory as mutable little-endian bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        with_elements!(&mut self.elements, vector => bytemuck::cast_slice_mut(vector))
    }

    /// Borrows the tensor.
    pub fn view(&self) -> TensorView<'_> {
        let elements = with_elements!(&self.elements, vector => vector.as_slice().into());
        TensorView { layout: self.layout, elements }
    }

    /// All values in the order of the shape.
    pub fn to_f32(&self) -> Vec<f32> {
        self.view().to_f32()
    }

    /// Returns one head of one sequence, the (length, dim) matrix that attention works on.
    ///
    /// # Panics
    ///
    /// If the batch entry or the head does not exist.
    pub fn head(&self, batch: usize, head: usize) -> Head<'_> {
        self.view().head(batch, head)
    }

    /// Copies the vector at `place` (batch entry, position, head) of a tensor with the same dim and
    /// element type to `to` of this tensor, bit for bit.
    ///
    /// # Panics
    ///
    /// If a vector lies outside of the memory.
    pub fn copy_row<'a>(
        &mut self,
        to: [usize; 3],
        from: impl Into<TensorView<'a>>,
        place: [usize; 3],
    ) {
        let from = from.into();
        let bytes = self.dtype().bytes();
        let [to, place] = [(self.layout, to), (from.layout(), place)]
            .map(|(layout, [batch, position, head])| layout.offset(batch, position, head) * bytes);
        let length = self.shape().dim * bytes;
        self.bytes_mut()[to..to + length].copy_from_slice(&from.bytes()[place..place + length]);
    }

    /// Rounds values to the element type and writes them to the vector at a batch entry, position
    /// and head.
    ///
    /// # Panics
    ///
    /// If the vector is outside of the memory.
    pub fn set_row(&mut self, [batch, position, head]: [usize; 3], values: &[f32]) {
        let start = self.layout.offset(batch, position, head);
        with_elements!(&mut self.elements, vector =>
            Element::narrow(values, &mut vector[start..start + values.len()]));
    }
}

/// Memory for a layout, allocated without aborting when there is none.
fn filled<T: Clone>(layout: Layout, value: T) -> Result<Vec<T>, TensorError> {
    let mut elements = room_for(layout, layout.span())?;
    elements.resize(layout.span(), value);
    Ok(elements)
}

/// Copies bytes that need not be aligned into memory of a layout.
fn collected<T: bytemuck::Pod>(layout: Layout, bytes: &[u8]) -> Result<Vec<T>, TensorError> {
    if let Ok(aligned) = bytemuck::try_cast_slice(bytes) {
        let mut elements = room_for(layout, aligned.len())?;
        elements.extend_from_slice(aligned);
        return Ok(elements);
    }
    let mut elements = room_for(layout, bytes.len() / size_of::<T>())?;
    elements.extend(bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned::<T>));
    Ok(elements)
}

fn room_for<T>(layout: Layout, elements: usize) -> Result<Vec<T>, TensorError> {
    let mut memory = Vec::new();
    memory.try_reserve_exact(elements).map_err(|_| TensorError::OutOfMemory {
        shape: layout.shape(),
        bytes: elements.saturating_mul(size_of::<T>()),
    })?;
    Ok(memory)
}

fn fill_random<T: Element>(elements: &mut [T], seed: u64) {
    const CHUNK: usize = 1024;
    let chunks = elements.par_chunks_mut(CHUNK).enumerate();
    chunks.for_each(|(chunk, elements)| {
        let mut values = [0.0; CHUNK];
        let values = &mut values[..elements.len()];
        for (offset, value) in values.iter_mut().enumerate() {
            *value = random::normal(seed, (chunk * CHUNK + offset) as u64);
        }
        T::narrow(values, elements);
    });
}

#[cfg(target_endian = "big")]
compile_error!("tensors are exchanged as little-endian bytes without conversion");

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn counting(shape: Shape) -> Tensor {
        Tensor::from_fn(DType::F32, shape, |[b, s, h, d]| {
            (((b * shape.length + s) * shape.heads + h) * shape.dim + d) as f32
        })
        .unwrap()
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes 2^56 bytes for an error of its own")]
    fn constructors_refuse_what_does_not_fit() {
        let shape = Shape::new(1, 2, 3, 4);
        let layout = Layout::contiguous(shape).unwrap();
        assert_eq!(
            Tensor::new(layout, vec![0.0f32; 23]).unwrap_err().to_string(),
            "shape [1, 2, 3, 4] needs 24 elements, 23 were given"
        );
        assert!(Tensor::from_f32(DType::F16, shape, &[0.0; 25]).is_err());
        assert!(Tensor::from_bytes(DType::F16, layout, &[0; 47]).is_err());
        assert!(Tensor::from_bytes(DType::F16, layout, &[0; 46]).is_err());
        assert!(Tensor::from_bytes(DType::F16, layout, &[0; 48]).is_ok());
        assert!(Layout::contiguous(Shape::new(usize::MAX, 2, 1, 1)).is_err());
        assert!(matches!(
            Tensor::zeros(DType::F32, Shape::new(1, 1 << 50, 8, 8)),
            Err(TensorError::OutOfMemory { .. })
        ));
    }

    #[test]
    fn empty_tensors_need_no_memory() {
        for shape in [[0, 2, 3, 4], [1, 0, 3, 4], [usize::MAX, 0, usize::MAX, 4]] {
            let layout = Layout::contiguous(shape.into()).unwrap();
            assert_eq!(layout.span(), 0);
            assert!(Tensor::new(layout, Vec::<f32>::new()).is_ok());
        }
    }

    #[test]
    fn random_is_the_same_under_one_seed() {
        // Miri draws slowly.
        let shape = Shape::new(1, if cfg!(miri) { 5 } else { 100 }, 3, 17);
        let random = |seed| Tensor::random(DType::BF16, shape, seed).unwrap();
        assert_eq!(random(1).bytes(), random(1).bytes());
        assert_ne!(random(1).bytes(), random(2).bytes());
        let wide = Tensor::random(DType::F32, shape, 1).unwrap().to_f32();
        let narrow = random(1).to_f32();
        assert!(
            wide.iter().zip(narrow).all(|(w, n)| DType::BF16.round(f64::from(*w)) == f64::from(n))
        );
    }

    proptest! {
        #[test]
        fn values_survive_any_layout(
            sizes in prop::array::uniform4(1usize..5),
            gaps in prop::array::uniform3(0usize..4),
            heads_first: bool,
        ) {
            let shape = Shape::from(sizes);
            let tensor = counting(shape);
            let strides = if heads_first {
                let length = shape.dim + gaps[0];
                let heads = length * shape.length + gaps[1];
                Strides { length, heads, batch: heads * shape.heads + gaps[2] }
            } else {
                let heads = shape.dim + gaps[0];
                let length = heads * shape.heads + gaps[1];
                Strides { length, heads, batch: length * shape.length + gaps[2] }
            };
            let layout = Layout::strided(shape, strides).unwrap();
            let strided = tensor.to_layout(layout, f32::NAN).unwrap();
            prop_assert_eq!(strided.to_f32(), tensor.to_f32());
            let copied = Tensor::from_bytes(DType::F32, layout, strided.bytes()).unwrap();
            prop_assert_eq!(copied.to_f32(), tensor.to_f32());
        }
    }
}
