//! The memory of a tensor, whichever library made it: address, shape, strides, element type and
//! device. [`Memory`] has the caller's dimensions; [`View`] is a floating-point tensor of rows in
//! the order (batch, length, heads, dim).

use std::fmt;

use cuda::DeviceAddress;
use flashcore::gpu::DeviceTensor;
use flashcore::{DType, Strides};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

/// The memory space of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    Host,
    Cuda(u32),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Host => f.write_str("the CPU"),
            Place::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl Place {
    /// Refuses a tensor that is not on the device of the first tensor.
    pub(crate) fn same(self, name: &str, place: Place, first: &str) -> PyResult<()> {
        if self == place { Ok(()) } else { Err(self.differs(name, place, first)) }
    }

    #[cold]
    fn differs(self, name: &str, place: Place, first: &str) -> PyErr {
        PyValueError::new_err(format!("{name} is on {self}, expected {place} like {first}"))
    }
}

/// The element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    Float(DType),
    I32,
    /// A type that no function here takes, by its name and its bits.
    Other(&'static str, u8),
}

impl Element {
    pub(crate) const F32: Element = Element::Float(DType::F32);

    pub(crate) fn bytes(self) -> u64 {
        match self {
            Element::Float(dtype) => dtype.bytes() as u64,
            Element::I32 => 4,
            Element::Other(_, bits) => u64::from(bits).div_ceil(8),
        }
    }

    #[cold]
    fn unusable(self, name: &str) -> PyErr {
        PyTypeError::new_err(format!(
            "{name} has element type {self}, expected float16, bfloat16, float32, float8_e4m3fn, \
             float8_e5m2, or int8 for keys and values"
        ))
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Element::Float(dtype) => dtype.fmt(f),
            Element::I32 => f.write_str("int32"),
            Element::Other(kind, bits) => write!(f, "{kind}{bits}"),
        }
    }
}

/// The maximum number of dimensions of a tensor argument.
pub(crate) const MOST_DIMENSIONS: usize = 5;

/// A tensor in the caller's dimensions. Strides are in elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) address: u64,
    pub(crate) dimensions: usize,
    pub(crate) sizes: [i64; MOST_DIMENSIONS],
    pub(crate) strides: [i64; MOST_DIMENSIONS],
    pub(crate) element: Element,
    pub(crate) place: Place,
}

/// Returns whether an address may be the offset of a tensor in storage that was freed, whose own
/// address is null then.
pub(crate) fn may_be_offset(address: u64) -> bool {
    // More than the memory of one device. Few systems give out lower addresses.
    address < 1 << 40
}

/// A tensor argument that may be missing. Boxed, since most are missing and moving a [`Memory`]
/// around for each would cost time.
pub(crate) type Optional = Option<Box<Memory>>;

impl Memory {
    /// Returns a tensor without an address, with sizes of one and strides of zero.
    pub(crate) fn nowhere(element: Element, place: Place, dimensions: usize) -> Memory {
        let (sizes, strides) = ([1; MOST_DIMENSIONS], [0; MOST_DIMENSIONS]);
        Memory { address: 0, dimensions, sizes, strides, element, place }
    }

    pub(crate) fn sizes(&self) -> &[i64] {
        &self.sizes[..self.dimensions]
    }

    pub(crate) fn strides(&self) -> &[i64] {
        &self.strides[..self.dimensions]
    }

    /// Refuses a tensor with elements but no memory: one whose storage was freed (its address is 0
    /// or a small offset), and one whose strides exceed the address space.
    #[inline]
    pub(crate) fn exists(&self, name: &str) -> PyResult<()> {
        /// No system maps the first page.
        const PAGE: u64 = 4096;
        match (self.address >= PAGE, self.reach()) {
            (true, Some(_)) => Ok(()),
            (there, _) => self.missing(name, there),
        }
    }

    /// Says why the elements of a tensor do not exist, if it has any.
    #[cold]
    fn missing(&self, name: &str, there: bool) -> PyResult<()> {
        match there {
            _ if self.sizes().contains(&0) => Ok(()),
            false => Err(PyTypeError::new_err(format!(
                "{name} has elements and no memory that they are in, expected a tensor whose memory was not \
                 given back"
            ))),
            true => Err(PyValueError::new_err(format!(
                "{name} has strides {:?} for sizes {:?}, expected elements that are all in memory",
                self.strides(),
                self.sizes()
            ))),
        }
    }

    /// Returns the bytes from the first element to the end of the last one, or None on overflow.
    /// Negative strides do not count.
    pub(crate) fn reach(&self) -> Option<i64> {
        // Sizes beyond the last dimension are one, and add nothing.
        let mut last = 0_i64;
        for (size, stride) in self.sizes.iter().zip(&self.strides) {
            last = last.checked_add((size - 1).checked_mul((*stride).max(0))?)?;
        }
        last.checked_add(1)?.checked_mul(self.element.bytes() as i64)
    }

    /// Returns a contiguous tensor with another last dimension and without an address: a result.
    pub(crate) fn like(&self, last: i64) -> Memory {
        let mut sizes = self.sizes;
        // Sizes beyond the last dimension are one.
        sizes[self.dimensions - 1] = last;
        Memory { address: 0, sizes, strides: contiguous(sizes), ..*self }
    }

    /// Returns whether the tensor is contiguous. Strides of dimensions of size one are ignored.
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut whole = 1_i64;
        // Sizes beyond the last dimension are one too.
        self.sizes.iter().zip(&self.strides).rev().all(|(size, stride)| {
            let fits = *size <= 1 || *stride == whole;
            whole = whole.saturating_mul(*size.max(&1));
            fits
        })
    }

    /// Returns whether the elements fill their memory without gaps, in any order of dimensions.
    pub(crate) fn is_dense(&self) -> bool {
        if self.is_contiguous() && !self.sizes().contains(&0) {
            return true;
        }
        let mut steps = [(0, 0); MOST_DIMENSIONS];
        for (step, axis) in steps.iter_mut().zip(0..self.dimensions) {
            *step = (self.strides[axis], self.sizes[axis]);
        }
        let steps = &mut steps[..self.dimensions];
        steps.sort_unstable();
        let mut whole = 1_i64;
        steps.iter().filter(|(_, size)| *size != 1).all(|(stride, size)| {
            let fits = *size > 0 && *stride == whole;
            whole = whole.saturating_mul(*size);
            fits
        })
    }

    /// Returns whether elements may overlap: some stride is smaller than the extent of the
    /// dimensions with smaller strides. Interleaved strides that never collide, which no slice of a
    /// tensor has, are reported as overlapping too.
    pub(crate) fn shares_elements(&self) -> bool {
        if self.sizes().contains(&0) {
            return false;
        }
        let mut steps = [(0, 1); MOST_DIMENSIONS];
        for (step, axis) in steps.iter_mut().zip(0..self.dimensions) {
            *step = (self.strides[axis].saturating_abs(), self.sizes[axis]);
        }
        steps.sort_unstable();
        let mut within = 1_i64;
        steps.iter().filter(|(_, size)| *size > 1).any(|(stride, size)| {
            let shares = *stride < within;
            within = within.saturating_add((size - 1).saturating_mul(*stride));
            shares
        })
    }

    /// Keeps the first `count` rows of a two-dimensional table, which may have more.
    pub(crate) fn first_rows(mut self, count: i64) -> Memory {
        if self.dimensions == 2 {
            self.sizes[0] = self.sizes[0].min(count.max(0));
        }
        self
    }

    /// Swaps the second and third dimensions.
    pub(crate) fn transposed(mut self) -> Memory {
        self.sizes.swap(1, 2);
        self.strides.swap(1, 2);
        self
    }

    /// Selects one of the tensors packed along the third dimension from the end.
    pub(crate) fn part(mut self, at: u64) -> Memory {
        let Some(axis) = self.dimensions.checked_sub(3) else { return self };
        let step = self.strides[axis].max(0) as u64 * self.element.bytes();
        self.address = self.address.wrapping_add(at * step);
        self.sizes.copy_within(axis + 1.., axis);
        self.strides.copy_within(axis + 1.., axis);
        self.dimensions -= 1;
        // Sizes beyond the last dimension are one.
        self.sizes[self.dimensions] = 1;
        self
    }

    /// Returns whether every kernel can read its rows: the last dimension has stride 1 and, on a
    /// GPU, no stride is zero and the address and all strides are multiples of 16 bytes.
    pub(crate) fn is_walkable(&self) -> bool {
        const COPY_BYTES: u64 = 16;
        let last = self.dimensions.saturating_sub(1);
        let bytes = self.element.bytes();
        let whole = |bytes: u64| self.place == Place::Host || bytes.is_multiple_of(COPY_BYTES);
        let steps = self.sizes().iter().zip(self.strides()).enumerate();
        let walkable = |(axis, (size, stride)): (usize, (&i64, &i64))| match axis == last {
            _ if *size <= 1 => true,
            true => *stride == 1,
            false => {
                let stride = stride.unsigned_abs();
                whole(stride * bytes) && (stride > 0 || self.place == Place::Host)
            }
        };
        self.sizes().contains(&0) || (whole(self.address) && steps.into_iter().all(walkable))
    }

    /// Refuses an integer list that does not have `expected` entries for the number of sequences
    /// that the tensor `first` determines.
    pub(crate) fn entries(
        &self,
        name: &str,
        expected: i64,
        sequences: i64,
        first: &str,
    ) -> PyResult<()> {
        match self.list(name)? {
            given if given == expected => Ok(()),
            given => Err(PyValueError::new_err(format!(
                "{name} has {given} entries, expected {expected} for {sequences} sequences as {first} \
                 has"
            ))),
        }
    }

    /// Returns the number of entries of an integer list.
    pub(crate) fn list(&self, name: &str) -> PyResult<i64> {
        self.whole(name, Element::I32, "int32")?;
        match self.sizes() {
            [entries] => Ok(*entries),
            other => Err(PyValueError::new_err(format!(
                "{name} has {} dimensions, expected 1",
                other.len()
            ))),
        }
    }

    /// Returns the number of sequences of a list of cumulative lengths: one less than its entries.
    pub(crate) fn starts(&self, name: &str) -> PyResult<i64> {
        match self.list(name)? {
            0 => Err(PyValueError::new_err(format!("{name} is empty, expected a start at least"))),
            entries => Ok(entries - 1),
        }
    }

    /// Returns the number of columns of a page table, which must have one row for each sequence.
    pub(crate) fn pages(
        &self,
        name: &str,
        sequences: i64,
        place: Place,
        first: &str,
    ) -> PyResult<i64> {
        self.whole(name, Element::I32, "int32")?;
        self.on(name, place, first)?;
        match *self.sizes() {
            [rows, columns] if rows == sequences => Ok(columns),
            [rows, _] => Err(PyValueError::new_err(format!(
                "{name} has {rows} rows, expected {sequences}, one for each sequence"
            ))),
            _ => Err(PyValueError::new_err(format!(
                "{name} has {} dimensions, expected 2",
                self.dimensions
            ))),
        }
    }

    /// Refuses anything but a contiguous f32 tensor on the device of the first tensor.
    pub(crate) fn floats(&self, name: &str, place: Place, first: &str) -> PyResult<()> {
        self.whole(name, Element::F32, "float32")?;
        self.on(name, place, first)
    }

    /// Refuses another element type.
    pub(crate) fn of_type(&self, name: &str, element: Element, expected: &str) -> PyResult<()> {
        match self.element == element {
            true => Ok(()),
            false => Err(PyTypeError::new_err(format!(
                "{name} has element type {}, expected {expected}",
                self.element
            ))),
        }
    }

    /// Refuses negative strides.
    pub(crate) fn forwards(&self, name: &str) -> PyResult<()> {
        match self.strides().iter().any(|stride| *stride < 0) {
            true => Err(backward(name)),
            false => Ok(()),
        }
    }

    /// Refuses another element type, and tensors that are not contiguous.
    pub(crate) fn whole(&self, name: &str, element: Element, expected: &str) -> PyResult<()> {
        self.of_type(name, element, expected)?;
        if !self.is_contiguous() {
            return Err(PyValueError::new_err(format!(
                "{name} has strides {:?}, expected no gaps between its elements",
                self.strides()
            )));
        }
        Ok(())
    }

    /// Refuses a tensor that is not on the device of the first tensor.
    pub(crate) fn on(&self, name: &str, place: Place, first: &str) -> PyResult<()> {
        self.place.same(name, place, first)
    }

    /// Returns the element type of a floating-point or int8 tensor, or an error.
    pub(crate) fn float(&self, name: &str) -> PyResult<DType> {
        match self.element {
            Element::Float(dtype) => Ok(dtype),
            other => Err(other.unusable(name)),
        }
    }
}

/// Everything about a tensor of rows but its address. Sizes and strides are those of (batch,
/// length, heads, dim), in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    pub(crate) sizes: [i64; 4],
    pub(crate) strides: [i64; 4],
    pub(crate) dtype: DType,
    pub(crate) place: Place,
}

impl Form {
    /// Refuses strides and head dims that no back end reads.
    pub(crate) fn usable(&self, name: &str) -> PyResult<()> {
        self.usable_strides(name)?;
        let dim = self.sizes[3];
        match (8..=256).contains(&dim) && dim % 8 == 0 {
            true => Ok(()),
            false => Err(unusable_dim(name, dim)),
        }
    }

    /// Refuses strides that no back end reads.
    pub(crate) fn usable_strides(&self, name: &str) -> PyResult<()> {
        if self.sizes[3] > 1 && self.strides[3] != 1 && !self.sizes.contains(&0) {
            return Err(apart(name, self.strides[3]));
        }
        match self.strides.iter().any(|stride| *stride < 0) {
            true => Err(backward(name)),
            false => Ok(()),
        }
    }

    /// Refuses int8 queries: only keys and values may be integers.
    pub(crate) fn query(&self, name: &str) -> PyResult<()> {
        match self.dtype {
            DType::Int8 => Err(PyTypeError::new_err(format!(
                "{name} has element type int8, expected a floating-point one: keys and values alone \
                 may be integers"
            ))),
            _ => Ok(()),
        }
    }

    /// Refuses another device than the first tensor's, and another element type unless it has 8
    /// bits.
    pub(crate) fn like_or_small(&self, name: &str, other: &Form, first: &str) -> PyResult<()> {
        match self.dtype.is_8_bit() {
            true => self.place.same(name, other.place, first),
            false => self.like(name, other, first),
        }
    }

    /// Refuses another element type or device than the first tensor's.
    pub(crate) fn like(&self, name: &str, other: &Form, first: &str) -> PyResult<()> {
        self.place.same(name, other.place, first)?;
        match self.dtype == other.dtype {
            true => Ok(()),
            false => Err(other_dtype(name, self.dtype, other.dtype, first)),
        }
    }
}

#[cold]
fn apart(name: &str, stride: i64) -> PyErr {
    PyValueError::new_err(format!(
        "{name} has stride {stride} in its last dimension, expected 1: call .contiguous() or copy it"
    ))
}

#[cold]
fn backward(name: &str) -> PyErr {
    PyValueError::new_err(format!("{name} has a negative stride, expected none: copy it"))
}

#[cold]
fn unusable_dim(name: &str, dim: i64) -> PyErr {
    PyValueError::new_err(format!("{name} has head dim {dim}, expected a multiple of 8 up to 256"))
}

#[cold]
fn other_dtype(name: &str, given: DType, expected: DType, first: &str) -> PyErr {
    PyTypeError::new_err(format!(
        "{name} has element type {given}, expected {expected} like {first}"
    ))
}

/// A tensor of rows, (batch, length, heads, dim), in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View {
    pub(crate) address: u64,
    pub(crate) form: Form,
}

impl View {
    /// Returns the tensor in the form that the GPU library takes. An empty tensor, which is never
    /// read, gets the address `somewhere`.
    pub(crate) fn on_device(&self, somewhere: u64) -> DeviceTensor {
        let empty = self.form.sizes.contains(&0);
        let address = DeviceAddress(if empty { somewhere } else { self.address });
        let mut strides = self.form.strides;
        for (stride, size) in strides.iter_mut().zip(self.form.sizes) {
            // The stride of a dimension of size one means nothing.
            if size <= 1 {
                *stride = 0;
            }
        }
        DeviceTensor { address, strides: self::strides(strides) }
    }

    /// Returns the same memory as words of 16 bits, which are said to be bf16; None if not all rows
    /// begin at one.
    pub(crate) fn in_words(&self) -> Option<View> {
        let bytes = self.form.dtype.bytes() as i64;
        let mut form = Form { dtype: DType::BF16, ..self.form };
        form.sizes[3] = form.sizes[3] * bytes / 2;
        for at in 0..3 {
            // The stride of a dimension of size one means nothing.
            let step = if form.sizes[at] > 1 { form.strides[at] * bytes } else { 0 };
            form.strides[at] = if step % 2 == 0 { step / 2 } else { return None };
        }
        Some(View { form, ..*self })
    }
}

/// The dimension order of a tensor of rows, as the caller has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// (batch, length, heads, head dim)
    Padded,
    /// (rows of all sequences, heads, head dim): one batch entry.
    Packed,
    /// (batch, heads, length, head dim)
    HeadsFirst,
}

impl Order {
    /// Returns [`Order::Packed`] or [`Order::Padded`].
    pub(crate) fn of(packed: bool) -> Self {
        if packed { Order::Packed } else { Order::Padded }
    }

    /// Returns a tensor of rows as (batch, length, heads, dim), or an error that names it.
    pub(crate) fn view(self, name: &str, memory: &Memory) -> PyResult<View> {
        let dtype = memory.float(name)?;
        let (sizes, strides) = match (self, memory.sizes(), memory.strides()) {
            (Order::Packed, &[a, b, c], &[x, y, z]) => ([1, a, b, c], [0, x, y, z]),
            (Order::Padded, &[a, b, c, d], &[x, y, z, w]) => ([a, b, c, d], [x, y, z, w]),
            (Order::HeadsFirst, &[a, b, c, d], &[x, y, z, w]) => ([a, c, b, d], [x, z, y, w]),
            _ => return Err(self.misfit(name, memory.dimensions)),
        };
        let form = Form { sizes, strides, dtype, place: memory.place };
        Ok(View { address: memory.address, form })
    }

    #[cold]
    fn misfit(self, name: &str, dimensions: usize) -> PyErr {
        let (count, expected) = match self {
            Order::Packed => (3, "(rows of all sequences, heads, head dim)"),
            Order::Padded => (4, "(batch, length, heads, head dim)"),
            Order::HeadsFirst => (4, "(batch, heads, length, head dim)"),
        };
        PyValueError::new_err(format!(
            "{name} has {dimensions} dimensions, expected {count}: {expected}"
        ))
    }

    /// Converts (batch, length, heads, dim) sizes to the caller's order.
    pub(crate) fn back(self, [batch, length, heads, dim]: [i64; 4]) -> [i64; 4] {
        match self {
            Order::HeadsFirst => [batch, heads, length, dim],
            _ => [batch, length, heads, dim],
        }
    }
}

/// Returns the strides of a contiguous tensor.
pub(crate) fn contiguous<const COUNT: usize>(sizes: [i64; COUNT]) -> [i64; COUNT] {
    let mut strides = [1_i64; COUNT];
    for index in (1..COUNT).rev() {
        strides[index - 1] = strides[index].saturating_mul(sizes[index].max(1));
    }
    strides
}

/// Converts checked (non-negative) strides to the library's type.
pub(crate) fn strides([batch, length, heads, _]: [i64; 4]) -> Strides {
    Strides { batch: batch as usize, length: length as usize, heads: heads as usize }
}
