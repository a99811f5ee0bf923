//! What a tensor is, whoever made it: where its elements are and how they lie there.

use std::fmt;

use cuda::DeviceAddress;
use flashcore::gpu::DeviceTensor;
use flashcore::{DType, Strides};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

/// Which memory.
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
    /// Refuses another place than the first tensor's.
    pub(crate) fn same(self, name: &str, place: Place, first: &str) -> PyResult<()> {
        match self == place {
            true => Ok(()),
            false => Err(PyValueError::new_err(format!(
                "{name} is on {self}, expected {place} like {first}"
            ))),
        }
    }
}

/// What the elements of a tensor are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    Float(DType),
    I32,
    /// A kind that nothing here takes, with its bits.
    Other(&'static str, u8),
}

impl Element {
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Element::Float(dtype) => dtype.bytes() as u64,
            Element::I32 => 4,
            Element::Other(_, bits) => u64::from(bits).div_ceil(8),
        }
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

/// The dimensions that a tensor of any function here can have.
pub(crate) const MOST_DIMENSIONS: usize = 5;

/// A tensor in memory, whatever it is for. Strides are in elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) address: u64,
    pub(crate) dimensions: usize,
    pub(crate) sizes: [i64; MOST_DIMENSIONS],
    pub(crate) strides: [i64; MOST_DIMENSIONS],
    pub(crate) element: Element,
    pub(crate) place: Place,
}

/// A tensor that a call may leave out. Most do, and what is not there is not to be moved around.
pub(crate) type Optional = Option<Box<Memory>>;

impl Memory {
    /// A tensor that is nowhere yet, with ones and no strides.
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

    /// Refuses elements that cannot be anywhere: those of a tensor whose memory was given back, whose
    /// address is 0 or an offset from there, and those further apart than addresses go.
    pub(crate) fn exists(&self, name: &str) -> PyResult<()> {
        /// No system has anything in the first page.
        const PAGE: u64 = 4096;
        if self.sizes().contains(&0) {
            return Ok(());
        }
        if self.address < PAGE {
            return Err(PyTypeError::new_err(format!(
                "{name} has elements and no memory that they are in, expected a tensor whose memory was not \
                 given back"
            )));
        }
        match self.reach() {
            Some(_) => Ok(()),
            None => Err(PyValueError::new_err(format!(
                "{name} has strides {:?} for sizes {:?}, expected elements that are all in memory",
                self.strides(),
                self.sizes()
            ))),
        }
    }

    /// Bytes from the first element to the end of the last one, if addresses go so far. Steps back are no
    /// part of it.
    pub(crate) fn reach(&self) -> Option<i64> {
        let steps = self.sizes().iter().zip(self.strides());
        let last = steps.map(|(size, stride)| (size - 1).checked_mul((*stride).max(0)));
        let last = last.into_iter().try_fold(0_i64, |all, it| all.checked_add(it?))?;
        last.checked_add(1)?.checked_mul(self.element.bytes() as i64)
    }

    /// The same without gaps and with another last dimension, nowhere yet: an answer.
    pub(crate) fn like(&self, last: i64) -> Memory {
        let mut sizes = self.sizes;
        // What is behind the last dimension counts one.
        sizes[self.dimensions - 1] = last;
        Memory { address: 0, sizes, strides: contiguous(sizes), ..*self }
    }

    /// Whether there are no gaps between elements. The stride of what there is one of means nothing.
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut whole = 1_i64;
        self.sizes().iter().zip(self.strides()).rev().all(|(size, stride)| {
            let fits = *size <= 1 || *stride == whole;
            whole = whole.saturating_mul(*size.max(&1));
            fits
        })
    }

    /// Whether its elements fill their memory, in whatever order the dimensions lie.
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

    /// Whether elements may share memory: a step is no longer than all that lies within it. Steps that
    /// pass each other without meeting, which no slice of a tensor has, are taken for such too.
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

    /// The first rows of a table, which may have more.
    pub(crate) fn first_rows(mut self, count: i64) -> Memory {
        if self.dimensions == 2 {
            self.sizes[0] = self.sizes[0].min(count.max(0));
        }
        self
    }

    /// The same with its second and third dimension exchanged.
    pub(crate) fn transposed(mut self) -> Memory {
        self.sizes.swap(1, 2);
        self.strides.swap(1, 2);
        self
    }

    /// One of the tensors that were packed into this one, along the third dimension from the end.
    pub(crate) fn part(mut self, at: u64) -> Memory {
        let Some(axis) = self.dimensions.checked_sub(3) else { return self };
        let step = self.strides[axis].max(0) as u64 * self.element.bytes();
        self.address = self.address.wrapping_add(at * step);
        self.sizes.copy_within(axis + 1.., axis);
        self.strides.copy_within(axis + 1.., axis);
        self.dimensions -= 1;
        // What is behind the last dimension counts one.
        self.sizes[self.dimensions] = 1;
        self
    }

    /// Whether every kernel can walk its rows: elements of the last dimension lie side by side, and
    /// on a GPU no step is zero, and all steps and the address are multiples of 16 bytes.
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

    /// Refuses a list of integers with another number of entries than there are sequences, or one
    /// more of starts; `first` says how many sequences there are.
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

    /// The entries of a list of integers.
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

    /// The sequences whose starts a list has, which has one more: where the last one ends.
    pub(crate) fn starts(&self, name: &str) -> PyResult<i64> {
        match self.list(name)? {
            0 => Err(PyValueError::new_err(format!("{name} is empty, expected a start at least"))),
            entries => Ok(entries - 1),
        }
    }

    /// The columns of a table of integers in the memory of the first tensor, which has a row for
    /// each sequence.
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

    /// Refuses what is no tensor of f32 without gaps in the memory of the first one.
    pub(crate) fn floats(&self, name: &str, place: Place, first: &str) -> PyResult<()> {
        self.whole(name, Element::Float(DType::F32), "float32")?;
        self.on(name, place, first)
    }

    /// Refuses other elements, and gaps between them.
    pub(crate) fn whole(&self, name: &str, element: Element, expected: &str) -> PyResult<()> {
        if self.element != element {
            return Err(PyTypeError::new_err(format!(
                "{name} has element type {}, expected {expected}",
                self.element
            )));
        }
        if !self.is_contiguous() {
            return Err(PyValueError::new_err(format!(
                "{name} has strides {:?}, expected no gaps between its elements",
                self.strides()
            )));
        }
        Ok(())
    }

    /// Refuses another memory than the first tensor's.
    pub(crate) fn on(&self, name: &str, place: Place, first: &str) -> PyResult<()> {
        self.place.same(name, place, first)
    }

    /// The element type of a tensor of numbers that attention takes.
    pub(crate) fn float(&self, name: &str) -> PyResult<DType> {
        match self.element {
            Element::Float(dtype) => Ok(dtype),
            other => Err(PyTypeError::new_err(format!(
                "{name} has element type {other}, expected float16, bfloat16, float32, \
                 float8_e4m3fn, float8_e5m2, or int8 for keys and values"
            ))),
        }
    }
}

/// Everything about a tensor but its address. Sizes and strides are those of
/// (batch, length, heads, dim), in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    pub(crate) sizes: [i64; 4],
    pub(crate) strides: [i64; 4],
    pub(crate) dtype: DType,
    pub(crate) place: Place,
}

impl Form {
    /// Refuses what no back end reads.
    pub(crate) fn usable(&self, name: &str) -> PyResult<()> {
        let empty = self.sizes.contains(&0);
        if !empty && self.sizes[3] > 1 && self.strides[3] != 1 {
            return Err(PyValueError::new_err(format!(
                "{name} has stride {} in its last dimension, expected 1: call .contiguous() or \
                 copy it",
                self.strides[3]
            )));
        }
        if self.strides.iter().any(|stride| *stride < 0) {
            return Err(PyValueError::new_err(format!(
                "{name} has a negative stride, expected none: copy it"
            )));
        }
        let dim = self.sizes[3];
        if !(8..=256).contains(&dim) || dim % 8 != 0 {
            return Err(PyValueError::new_err(format!(
                "{name} has head dim {dim}, expected a multiple of 8 up to 256"
            )));
        }
        Ok(())
    }

    /// Refuses integers, which keys and values alone may be.
    pub(crate) fn query(&self, name: &str) -> PyResult<()> {
        match self.dtype {
            DType::Int8 => Err(PyTypeError::new_err(format!(
                "{name} has element type int8, expected a floating-point one: keys and values alone \
                 may be integers"
            ))),
            _ => Ok(()),
        }
    }

    /// Refuses another memory than the first tensor has, and another element type unless it is one
    /// of 8 bits.
    pub(crate) fn like_or_small(&self, name: &str, other: &Form, first: &str) -> PyResult<()> {
        match self.dtype.is_8_bit() {
            true => self.place.same(name, other.place, first),
            false => self.like(name, other, first),
        }
    }

    /// Refuses another element type or memory than the first tensor has.
    pub(crate) fn like(&self, name: &str, other: &Form, first: &str) -> PyResult<()> {
        self.place.same(name, other.place, first)?;
        if self.dtype != other.dtype {
            return Err(PyTypeError::new_err(format!(
                "{name} has element type {}, expected {} like {first}",
                self.dtype, other.dtype
            )));
        }
        Ok(())
    }
}

/// A tensor in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View {
    pub(crate) address: u64,
    pub(crate) form: Form,
}

impl View {
    /// As the library takes it. One without elements is never read, and is somewhere else.
    pub(crate) fn on_device(&self, somewhere: u64) -> DeviceTensor {
        let empty = self.form.sizes.contains(&0);
        let address = DeviceAddress(if empty { somewhere } else { self.address });
        let mut strides = self.form.strides;
        for (stride, size) in strides.iter_mut().zip(self.form.sizes) {
            // The step to a second of what there is one of means nothing.
            if size <= 1 {
                *stride = 0;
            }
        }
        DeviceTensor { address, strides: self::strides(strides) }
    }
}

/// The dimensions of a tensor of rows, as the caller has them.
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
    /// Packed or padded.
    pub(crate) fn of(packed: bool) -> Self {
        if packed { Order::Packed } else { Order::Padded }
    }

    /// A tensor of rows in our order, or an error that names it.
    pub(crate) fn view(self, name: &str, memory: &Memory) -> PyResult<View> {
        let dtype = memory.float(name)?;
        let (sizes, strides) = match (self, memory.sizes(), memory.strides()) {
            (Order::Packed, &[a, b, c], &[x, y, z]) => ([1, a, b, c], [0, x, y, z]),
            (Order::Padded, &[a, b, c, d], &[x, y, z, w]) => ([a, b, c, d], [x, y, z, w]),
            (Order::HeadsFirst, &[a, b, c, d], &[x, y, z, w]) => ([a, c, b, d], [x, z, y, w]),
            _ => {
                let (count, expected) = match self {
                    Order::Packed => (3, "(rows of all sequences, heads, head dim)"),
                    Order::Padded => (4, "(batch, length, heads, head dim)"),
                    Order::HeadsFirst => (4, "(batch, heads, length, head dim)"),
                };
                return Err(PyValueError::new_err(format!(
                    "{name} has {} dimensions, expected {count}: {expected}",
                    memory.dimensions
                )));
            }
        };
        let form = Form { sizes, strides, dtype, place: memory.place };
        Ok(View { address: memory.address, form })
    }

    /// Sizes in the caller's order from those in ours.
    pub(crate) fn back(self, [batch, length, heads, dim]: [i64; 4]) -> [i64; 4] {
        match self {
            Order::HeadsFirst => [batch, heads, length, dim],
            _ => [batch, length, heads, dim],
        }
    }
}

/// Strides without gaps.
pub(crate) fn contiguous<const COUNT: usize>(sizes: [i64; COUNT]) -> [i64; COUNT] {
    let mut strides = [1_i64; COUNT];
    for index in (1..COUNT).rev() {
        strides[index - 1] = strides[index].saturating_mul(sizes[index].max(1));
    }
    strides
}

/// The library's words for strides that were checked.
pub(crate) fn strides([batch, length, heads, _]: [i64; 4]) -> Strides {
    Strides { batch: batch as usize, length: length as usize, heads: heads as usize }
}
