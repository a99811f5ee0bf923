//! A call over an 8-bit cache as one over 16 bits, which a launch makes of it in memory of the plan.
//!
//! Sequences leave their pages and batch entries: each lies in a batch entry of its own, or packed as
//! it was. Lists of lengths, starts and paddings mean what they meant.

use kernels::parameter::Tensor;

use super::Arrangement;
use super::arrangement::shape;
use crate::problem::{DTypes, Descales, Problem, Storage};
use crate::tensor::{Layout, Strides};

/// The problem over what was widened.
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

/// How its tensors lie: the widened ones without gaps.
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

/// The widened tensor that stands for another.
pub(crate) fn tensor(tensor: Tensor) -> Tensor {
    match tensor {
        Tensor::Key => Tensor::WideKey,
        Tensor::Value => Tensor::WideValue,
        other => other,
    }
}

/// How one of the two lies.
pub(crate) fn strides(narrow: &Problem, tensor: Tensor) -> Result<Strides, String> {
    let layout = Layout::contiguous(shape(&problem(narrow), tensor));
    Ok(layout.map_err(|error| error.to_string())?.strides())
}

/// How large one of the two is.
pub(crate) fn bytes(narrow: &Problem, tensor: Tensor) -> Result<u64, String> {
    let wide = problem(narrow);
    let elements = shape(&wide, tensor).elements().map(|elements| elements as u64);
    let bytes = elements.and_then(|elements| elements.checked_mul(wide.dtypes.key.bytes() as u64));
    bytes.ok_or_else(|| "the cache is too large to be widened".to_owned())
}
