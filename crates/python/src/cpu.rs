//! Calls on tensors in host memory, by the library's CPU back end.

use flashcore::backend::Report;
use flashcore::{Backend, CpuBackend, Error, Inputs, Problem, RunOptions, Shape, Tensor};

use crate::view::{self, Form, View};

/// Attention over host memory; waits for the answer.
///
/// # Safety
///
/// The views must be of this problem and of memory that stays as it is meanwhile; `output` must be
/// memory for the form and `lse`, if any, for the problem's rows. Nobody else may use those two.
pub(crate) unsafe fn attend(
    problem: &Problem,
    views: &[View; 3],
    output: (u64, &Form),
    lse: Option<u64>,
) -> Result<Report, Error> {
    let shapes = [problem.query_shape(), problem.key_shape(), problem.value_shape()];
    let read = |index: usize| -> Result<Tensor, Error> {
        // SAFETY: the caller's promise.
        unsafe { copy(shapes[index], &views[index]) }
    };
    let (query, key, value) = (read(0)?, read(1)?, read(2)?);
    let inputs = Inputs::new(&query, &key, &value);
    let result = CpuBackend::new().run(problem, inputs, &RunOptions::default())?;
    let (address, form) = output;
    // SAFETY: the caller's promise.
    unsafe { write(&result.output, address, form) };
    if let Some(lse) = lse {
        // SAFETY: the caller's promise; the two do not overlap, since one was made here.
        unsafe {
            std::ptr::copy_nonoverlapping(
                result.lse.as_ptr().cast::<u8>(),
                lse as *mut u8,
                4 * result.lse.len(),
            );
        }
    }
    Ok(result.report)
}

/// A tensor with the contents of a view, gaps included.
///
/// # Safety
///
/// As for [`attend`].
pub(crate) unsafe fn copy(shape: Shape, view: &View) -> Result<Tensor, Error> {
    let layout = flashcore::Layout::strided(shape, view::strides(view.form.strides))?;
    let bytes = layout.span() * view.form.dtype.bytes();
    let memory = if bytes == 0 {
        &[][..]
    } else {
        // SAFETY: the layout's span is what its last element needs.
        unsafe { std::slice::from_raw_parts(view.address as *const u8, bytes) }
    };
    Ok(Tensor::from_bytes(view.form.dtype, layout, memory)?)
}

/// Copies a contiguous result row by row.
///
/// # Safety
///
/// As for [`attend`].
pub(crate) unsafe fn write(result: &Tensor, address: u64, form: &Form) {
    let [batch, length, heads, dim] = form.sizes.map(|size| size as usize);
    let size = result.dtype().bytes();
    let row = dim * size;
    let mut rows = result.bytes().chunks_exact(row.max(1));
    for b in 0..batch {
        for s in 0..length {
            for h in 0..heads {
                let Some(row) = rows.next() else { return };
                let strides = view::strides(form.strides);
                let offset = b * strides.batch + s * strides.length + h * strides.heads;
                // SAFETY: inside of the form, and apart from the result.
                unsafe {
                    let to = (address as *mut u8).add(offset * size);
                    std::ptr::copy_nonoverlapping(row.as_ptr(), to, row.len());
                }
            }
        }
    }
}
