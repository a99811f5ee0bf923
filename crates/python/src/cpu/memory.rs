//! Access to callers' host memory: views of it for the library, copies into tensors, and writes
//! back.

use flashcore::serving::Placement;
use flashcore::{Cancellation, DType, Layout, Shape, Tensor, TensorView};
use pyo3::prelude::*;

use crate::boundary::{collect, room_for};
use crate::error;
use crate::view::{self, Form, Memory, View, contiguous};

/// A view of the caller's tensor, or a copy if its elements are not aligned.
pub(super) enum Lent<'a> {
    View(TensorView<'a>),
    Copy(Tensor),
}

impl Lent<'_> {
    pub(super) fn view(&self) -> TensorView<'_> {
        match self {
            Lent::View(view) => *view,
            Lent::Copy(tensor) => tensor.view(),
        }
    }
}

/// Returns the memory of a view as a tensor.
///
/// # Safety
///
/// The view must be of memory that stays as it is while it is lent.
pub(super) unsafe fn lend<'a>(shape: Shape, view: &View) -> PyResult<Lent<'a>> {
    let wrong = |error: flashcore::TensorError| error::library(error.into());
    let layout = Layout::strided(shape, view::strides(view.form.strides)).map_err(wrong)?;
    // SAFETY: the layout's span is what its last element needs; it is in memory, so that its bytes
    // can be counted.
    let memory = unsafe { slice(view.address, layout.span() * view.form.dtype.bytes()) };
    match TensorView::of_bytes(view.form.dtype, layout, memory) {
        Some(view) => view.map(Lent::View).map_err(wrong),
        None => Tensor::from_bytes(view.form.dtype, layout, memory).map(Lent::Copy).map_err(wrong),
    }
}

/// Copies the rows of a placement to a tensor, sequence after sequence.
///
/// # Safety
///
/// The placement must be inside of the view, and the view of memory that stays as it is.
pub(super) unsafe fn gather(
    view: &View,
    placement: &Placement,
    cancellation: &Cancellation,
) -> PyResult<Tensor> {
    let Form { sizes: [_, _, heads, dim], dtype, .. } = view.form;
    let rows = (0..placement.sequences()).map(|sequence| placement.length(sequence)).sum();
    let shape = Shape::new(1, rows, heads as usize, dim as usize);
    let mut tensor = Tensor::zeros(dtype, shape).map_err(|error| error::library(error.into()))?;
    let bytes = (dim as usize * dtype.bytes()).max(1);
    let mut to = tensor.bytes_mut().chunks_exact_mut(bytes);
    for sequence in 0..placement.sequences() {
        for position in 0..placement.length(sequence) {
            cancellation.check().map_err(|error| error::library(error.into()))?;
            let place = placement.locate(sequence, position);
            for (head, to) in (0..heads as usize).zip(&mut to) {
                let from = vector(view, place, head) as *const u8;
                // SAFETY: the caller's promise.
                unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), bytes) };
            }
        }
    }
    Ok(tensor)
}

/// Writes rows, in the order of [`gather`], to the places that [`gather`] would read them from.
///
/// # Safety
///
/// As for [`gather`]; nobody else may use the memory.
pub(super) unsafe fn scatter(tensor: &Tensor, view: &View, placement: &Placement) {
    let mut from = vectors(tensor);
    for sequence in 0..placement.sequences() {
        for position in 0..placement.length(sequence) {
            // SAFETY: the caller's promise.
            unsafe { copy_row(&mut from, view, placement.locate(sequence, position)) };
        }
    }
}

/// Writes those rows of a contiguous tensor that belong to some sequence.
///
/// # Safety
///
/// The placement must be inside of the view and the tensor, and the view of memory that nobody else
/// uses.
pub(super) unsafe fn write_placed(tensor: &Tensor, to: &View, placement: &Placement) {
    let Shape { length, heads, dim, .. } = tensor.shape();
    let bytes = (dim * tensor.dtype().bytes()).max(1);
    for sequence in 0..placement.sequences() {
        for position in 0..placement.length(sequence) {
            let (entry, row) = placement.locate(sequence, position);
            let first = (entry * length + row) * heads * bytes;
            let mut from = tensor.bytes()[first..].chunks_exact(bytes);
            // SAFETY: the caller's promise.
            unsafe { copy_row(&mut from, to, (entry, row)) };
        }
    }
}

/// Writes a contiguous tensor to a view.
///
/// # Safety
///
/// The view must be of memory that nobody else uses.
pub(super) unsafe fn write(tensor: &Tensor, to: &View) {
    let Shape { batch, length, .. } = tensor.shape();
    let mut from = vectors(tensor);
    for place in (0..batch).flat_map(|entry| (0..length).map(move |row| (entry, row))) {
        // SAFETY: the caller's promise.
        unsafe { copy_row(&mut from, to, place) };
    }
}

/// Returns the head vectors of a contiguous tensor, as bytes.
pub(super) fn vectors(tensor: &Tensor) -> std::slice::ChunksExact<'_, u8> {
    let bytes = tensor.shape().dim * tensor.dtype().bytes();
    tensor.bytes().chunks_exact(bytes.max(1))
}

/// Writes the next vectors, one for each head, to one row of a view.
///
/// # Safety
///
/// The row must be inside of the view.
pub(super) unsafe fn copy_row(
    from: &mut std::slice::ChunksExact<'_, u8>,
    view: &View,
    place: (usize, usize),
) {
    for (head, from) in (0..view.form.sizes[2] as usize).zip(from) {
        let to = vector(view, place, head) as *mut u8;
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
    }
}

/// Returns the address of one head vector.
pub(super) fn vector(view: &View, (entry, row): (usize, usize), head: usize) -> u64 {
    let [by_entry, by_row, by_head, _] = view.form.strides.map(|stride| stride as usize);
    let offset = entry * by_entry + row * by_row + head * by_head;
    view.address + (offset * view.form.dtype.bytes()) as u64
}

/// Copies the numbers of a list.
///
/// # Safety
///
/// It must be a list of such elements without gaps in host memory.
pub(super) unsafe fn list<T: Copy>(list: &Memory) -> PyResult<Vec<T>> {
    let count = list.sizes().iter().product::<i64>() as usize;
    // SAFETY: the caller's promise. A list need not be aligned: some libraries' are not.
    let at = |index| unsafe { (list.address as *const T).add(index).read_unaligned() };
    collect((0..count).map(|index| Ok(at(index))))
}

/// Copies the numbers of an optional list.
///
/// # Safety
///
/// As for [`list`].
pub(super) unsafe fn optional<T: Copy>(memory: Option<&Memory>) -> PyResult<Option<Vec<T>>> {
    // SAFETY: the caller's promise.
    memory.map(|memory| unsafe { list(memory) }).transpose()
}

/// Returns all values of a tensor in the order of its shape.
pub(super) fn contents(tensor: TensorView<'_>) -> PyResult<Vec<f32>> {
    let Shape { batch, length, heads, dim } = tensor.shape();
    let vectors = batch.saturating_mul(length).saturating_mul(heads);
    let count = vectors.saturating_mul(dim);
    let mut values = room_for(count)?;
    values.resize(count, 0.0);
    for (index, to) in values.chunks_exact_mut(dim.max(1)).enumerate() {
        let (entry, row, head) = (index / heads / length, index / heads % length, index % heads);
        tensor.head(entry, head).read(row, to);
    }
    Ok(values)
}

/// Converts a tensor to a contiguous one in f32.
pub(super) fn wide(tensor: &Tensor) -> PyResult<Tensor> {
    Tensor::from_f32(DType::F32, tensor.shape(), &contents(tensor.view())?)
        .map_err(|error| error::library(error.into()))
}

/// Reads a contiguous two-dimensional table of any floating-point type as f32.
///
/// # Safety
///
/// It must be in host memory.
pub(super) unsafe fn floats(table: &Memory, dtype: DType) -> PyResult<Vec<f32>> {
    let sizes = [1, table.sizes[0], 1, table.sizes[1]];
    let form = Form { sizes, strides: contiguous(sizes), dtype, place: table.place };
    let shape = Shape::from(sizes.map(|size| size as usize));
    // SAFETY: the caller's promise.
    contents(unsafe { lend(shape, &View { address: table.address, form }) }?.view())
}

/// Returns memory as a slice; the address may be anything if `count` is 0.
///
/// # Safety
///
/// It must be memory of so many elements that stays as it is.
unsafe fn slice<'a, T>(address: u64, count: usize) -> &'a [T] {
    match count {
        0 => &[],
        // SAFETY: the caller's promise.
        _ => unsafe { std::slice::from_raw_parts(address as *const T, count) },
    }
}

/// Run by Miri, for which nothing is linked (`cargo xtask miri`): nothing here may call Python.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::{MOST_DIMENSIONS, Place};

    /// Two entries of three rows of two heads of two numbers, with gaps.
    fn view(numbers: &mut [f32]) -> View {
        let (sizes, strides) = ([2, 3, 2, 2], [20, 6, 3, 1]);
        let form = Form { sizes, strides, dtype: DType::F32, place: Place::Host };
        View { address: numbers.as_mut_ptr() as u64, form }
    }

    /// No byte before, between or behind what a view spans is touched, and none of it twice.
    #[test]
    fn rows_are_taken_and_put_where_a_view_says() {
        // As long as its last element needs, and no longer.
        let mut numbers: Vec<f32> = (0..20 + 12 + 3 + 2).map(|it| it as f32).collect();
        let from = view(&mut numbers);
        let placement = Placement::entries(vec![1, 3], vec![1, 0]);
        let cancellation = Cancellation::default();
        // SAFETY: of memory that is there, and of nobody else's.
        let (gathered, lent) = unsafe {
            (gather(&from, &placement, &cancellation).unwrap(), lend(Shape::new(2, 3, 2, 2), &from))
        };
        let wanted = [20, 23, 0, 3, 6, 9, 12, 15].map(|it| [it as f32, it as f32 + 1.0]);
        assert_eq!(gathered.to_f32(), wanted.concat());
        assert_eq!(lent.unwrap().view().head(1, 1).row(2), [35.0, 36.0]);
        let mut other = vec![-1.0; numbers.len()];
        let to = view(&mut other);
        // SAFETY: as above.
        unsafe { scatter(&gathered, &to, &placement) };
        for (index, (number, before)) in other.iter().zip(&numbers).enumerate() {
            let taken = wanted.iter().flatten().any(|it| *it == index as f32);
            assert_eq!(*number, if taken { *before } else { -1.0 }, "{index}");
        }
    }

    #[test]
    fn a_list_need_not_be_aligned() {
        let bytes: Vec<u8> = (0..13).collect();
        let mut memory = Memory {
            address: bytes.as_ptr() as u64 + 1,
            dimensions: 1,
            sizes: [1; MOST_DIMENSIONS],
            strides: [1; MOST_DIMENSIONS],
            element: crate::view::Element::I32,
            place: Place::Host,
        };
        memory.sizes[0] = 3;
        // SAFETY: twelve bytes behind the first.
        let list: Vec<i32> = unsafe { list(&memory) }.unwrap();
        assert_eq!(list, [0x0403_0201, 0x0807_0605, 0x0C0B_0A09]);
    }
}
