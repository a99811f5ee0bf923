//! A call over an 8-bit cache as one over a 16-bit copy, which a launch makes in memory of the
//! plan.
//!
//! In the copy, sequences are no longer in pages or shared batch entries: each has a batch entry of
//! its own, or stays packed. Lists of lengths, starts and paddings keep their meaning.

use kernels::parameter::Tensor;

use super::Arrangement;
use super::arrangement::shape;
use crate::problem::{DTypes, Descales, Problem, Storage};
use crate::tensor::{Layout, Strides};

/// Returns the problem over the widened keys and values.
pub(crate) fn problem(problem: &Problem) -> Problem {
    let mut wide = problem.clone();
    wide.dtypes = DTypes { output: problem.dtypes.output, ..DTypes::all(problem.dtypes.query) };
    wide.descales = Descales::NONE;
    if !problem.keys.is_packed() {
        wide.keys = Storage::Padded;
        wide.lists.batch_index = false;
    }
    wide
}

/// Returns the arrangement of that problem; the widened tensors are contiguous.
pub(crate) fn arrangement(
    problem: &Problem,
    arrangement: &Arrangement,
) -> Result<Arrangement, String> {
    Ok(Arrangement {
        key: strides(problem, Tensor::WideKey)?,
        value: strides(problem, Tensor::WideValue)?,
        descales: Descales::default(),
        ..*arrangement
    })
}

/// Returns the widened tensor that replaces a tensor.
pub(crate) fn tensor(tensor: Tensor) -> Tensor {
    match tensor {
        Tensor::Key => Tensor::WideKey,
        Tensor::Value => Tensor::WideValue,
        other => other,
    }
}

/// Returns the strides of a widened tensor.
pub(crate) fn strides(narrow: &Problem, tensor: Tensor) -> Result<Strides, String> {
    let layout = Layout::contiguous(shape(&problem(narrow), tensor));
    Ok(layout.map_err(|error| error.to_string())?.strides())
}

/// Returns the size of a widened tensor in bytes.
pub(crate) fn bytes(narrow: &Problem, tensor: Tensor) -> Result<u64, String> {
    let wide = problem(narrow);
    let elements = shape(&wide, tensor).elements().map(|elements| elements as u64);
    let bytes = elements.and_then(|elements| elements.checked_mul(wide.dtypes.key.bytes() as u64));
    bytes.ok_or_else(|| "the cache is too large to be widened".to_owned())
}
