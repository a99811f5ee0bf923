//! Borrowed tensors: element type, shape, strides and a slice of somebody else's memory.

use half::{bf16, f16};
use rayon::prelude::*;

use super::{E4M3, E5M2, Element, Int8, Layout, Shape, Tensor, TensorError, with_elements};
use crate::dtype::DType;

/// The borrowed elements of a [`TensorView`].
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum ElementsView<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Half precision.
    F16(&'a [f16]),
    /// Brain float.
    BF16(&'a [bf16]),
    /// 8 bits with 3 of mantissa.
    E4M3(&'a [E4M3]),
    /// 8 bits with 2 of mantissa.
    E5M2(&'a [E5M2]),
    /// Integers of 8 bits.
    Int8(&'a [Int8]),
}

/// A borrowed tensor, read in place.
///
/// Attention takes its inputs as views, so a caller's tensors are not copied:
///
/// ```
/// use flashcore::{Inputs, Layout, Shape, Tensor, TensorView, DType};
///
/// // Two heads of a cache that has room for 512 positions, of which 3 are in use.
/// let cache = vec![0.5f32; 512 * 2 * 4];
/// let room = Layout::contiguous(Shape::new(1, 512, 2, 4))?;
/// let used = Layout::strided(Shape::new(1, 3, 2, 4), room.strides())?;
/// let keys = TensorView::new(used, cache.as_slice())?;
/// assert_eq!(keys.head(0, 1).row(2), [0.5; 4]);
///
/// let query = Tensor::random(DType::F32, Shape::new(1, 1, 2, 4), 0)?;
/// let problem = Inputs::new(&query, keys, keys).problem()?;
/// assert_eq!(problem.key_length, 3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    pub(super) layout: Layout,
    pub(super) elements: ElementsView<'a>,
}

impl<'a> TensorView<'a> {
    /// Borrows elements, which must reach to the last element of the layout.
    pub fn new(layout: Layout, elements: impl Into<ElementsView<'a>>) -> Result<Self, TensorError> {
        let elements = elements.into();
        let given = with_elements!(ElementsView: elements, slice => slice.len());
        if given < layout.span() {
            let (shape, needed) = (layout.shape(), layout.span());
            return Err(TensorError::Length { shape, needed, given });
        }
        Ok(TensorView { layout, elements })
    }

    /// Borrows elements given as little-endian bytes. Returns `None` if the bytes are not aligned for
    /// the element type, or are no whole number of elements.
    pub fn of_bytes(
        dtype: DType,
        layout: Layout,
        bytes: &'a [u8],
    ) -> Option<Result<Self, TensorError>> {
        fn cast<'a, T: bytemuck::Pod>(bytes: &'a [u8]) -> Option<ElementsView<'a>>
        where
            ElementsView<'a>: From<&'a [T]>,
        {
            bytemuck::try_cast_slice::<u8, T>(bytes).ok().map(ElementsView::from)
        }
        let elements = match dtype {
            DType::F32 => cast::<f32>(bytes),
            DType::F16 => cast::<f16>(bytes),
            DType::BF16 => cast::<bf16>(bytes),
            DType::E4M3 => cast::<E4M3>(bytes),
            DType::E5M2 => cast::<E5M2>(bytes),
            DType::Int8 => cast::<Int8>(bytes),
        };
        Some(TensorView::new(layout, elements?))
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self.elements {
            ElementsView::F32(_) => DType::F32,
            ElementsView::F16(_) => DType::F16,
            ElementsView::BF16(_) => DType::BF16,
            ElementsView::E4M3(_) => DType::E4M3,
            ElementsView::E5M2(_) => DType::E5M2,
            ElementsView::Int8(_) => DType::Int8,
        }
    }

    /// The logical shape.
    pub fn shape(&self) -> Shape {
        self.layout.shape()
    }

    /// Shape and strides.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The memory as little-endian bytes.
    pub fn bytes(&self) -> &'a [u8] {
        with_elements!(ElementsView: self.elements, slice => bytemuck::cast_slice(slice))
    }

    /// Whether no element is infinite or NaN. On all cores.
    pub fn is_finite(&self) -> bool {
        with_elements!(ElementsView: self.elements, slice =>
            slice.par_iter().all(|value| value.is_finite()))
    }

    /// All values in the order of the shape.
    pub fn to_f32(&self) -> Vec<f32> {
        let shape = self.shape();
        let mut values = vec![0.0; shape.elements().unwrap_or(0)];
        let rows = values.chunks_exact_mut(shape.dim.max(1));
        for (row, [batch, position, head]) in rows.zip(shape.vectors()) {
            self.read([batch, position, head], row);
        }
        values
    }

    /// One head of one sequence, the (length, dim) matrix that attention works on.
    ///
    /// # Panics
    ///
    /// If the batch entry or the head does not exist.
    pub fn head(&self, batch: usize, head: usize) -> Head<'a> {
        let shape = self.shape();
        assert!(
            batch < shape.batch && head < shape.heads,
            "no head {head} in batch entry {batch} of {shape}"
        );
        Head { tensor: *self, batch, head }
    }

    /// Writes the vector at a batch entry, position and head into `row`, as f32.
    #[inline(always)]
    pub(crate) fn read(&self, [batch, position, head]: [usize; 3], row: &mut [f32]) {
        let shape = self.layout.shape();
        assert!(position < shape.length && row.len() == shape.dim);
        let start = self.layout.offset(batch, position, head);
        with_elements!(ElementsView: self.elements, slice =>
            Element::widen(&slice[start..start + row.len()], row));
    }
}

impl<'a> From<&'a Tensor> for TensorView<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        tensor.view()
    }
}

/// One head of one sequence of a tensor, read through its strides.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    tensor: TensorView<'a>,
    batch: usize,
    head: usize,
}

impl Head<'_> {
    /// The vector at a position, as f32.
    ///
    /// # Panics
    ///
    /// If the position does not exist.
    pub fn row(&self, position: usize) -> Vec<f32> {
        let mut row = vec![0.0; self.tensor.shape().dim];
        self.read(position, &mut row);
        row
    }

    /// Writes the vector at a position into `row`, which has the length of the vector.
    ///
    /// # Panics
    ///
    /// If the position does not exist or `row` has another length.
    #[inline(always)]
    pub fn read(&self, position: usize, row: &mut [f32]) {
        self.tensor.read([self.batch, position, self.head], row);
    }
}
