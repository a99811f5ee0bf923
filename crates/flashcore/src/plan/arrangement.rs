//! Strides and alignment of a call's tensors: what a kernel may have to refuse before any address
//! is known.

use kernels::parameter::Tensor;

use crate::dtype::DType;
use crate::problem::{Descales, Pass, Problem};
use crate::tensor::{Layout, Shape, Strides, TensorError};

/// Size in bytes of the copies that kernels make: strides and addresses must be multiples of it.
pub(crate) const COPY_BYTES: u64 = 16;

/// The strides of a call's tensors, and whether all of them begin at a multiple of 16 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Arrangement {
    /// Strides of the query.
    pub query: Strides,
    /// Strides of the key.
    pub key: Strides,
    /// Strides of the value.
    pub value: Strides,
    /// Strides of the output.
    pub output: Strides,
    /// Strides of the gradients, in the backward pass.
    pub gradients: Option<GradientStrides>,
    /// Strides of the descale factors; zero where there are none.
    pub descales: Descales<Strides>,
    /// Whether every address is a multiple of 16 bytes.
    pub aligned: bool,
}

/// The strides of the gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GradientStrides {
    /// Strides of dQ.
    pub query: Strides,
    /// Strides of dK.
    pub key: Strides,
    /// Strides of dV.
    pub value: Strides,
    /// Strides of dO, the gradient of the output.
    pub output: Strides,
}

/// The tensors that a planner looks at in both passes.
pub(crate) const TENSORS: [Tensor; 4] = [Tensor::Query, Tensor::Key, Tensor::Value, Tensor::Output];

/// The tensors that it looks at in addition in the backward pass.
pub(crate) const GRADIENTS: [Tensor; 4] =
    [Tensor::QueryGradient, Tensor::KeyGradient, Tensor::ValueGradient, Tensor::OutputGradient];

/// Returns the tensors of a problem that a planner looks at.
pub(crate) fn tensors(problem: &Problem) -> impl Iterator<Item = Tensor> + use<> {
    let gradients = (problem.pass == Pass::Backward).then_some(GRADIENTS);
    TENSORS.into_iter().chain(gradients.into_iter().flatten())
}

/// Returns the tensor that a gradient belongs to, or the tensor itself.
fn differentiated(tensor: Tensor) -> Tensor {
    match tensor {
        Tensor::QueryGradient => Tensor::Query,
        Tensor::KeyGradient => Tensor::Key,
        Tensor::ValueGradient => Tensor::Value,
        Tensor::OutputGradient => Tensor::Output,
        other => other,
    }
}

/// Returns the name of a tensor in errors.
pub(crate) fn name(tensor: Tensor) -> &'static str {
    match tensor {
        Tensor::Query => "query",
        Tensor::Key => "key",
        Tensor::Value => "value",
        Tensor::Output => "output",
        Tensor::Lse => "log-sum-exp",
        Tensor::PartialOutput => "partial output",
        Tensor::PartialLse => "partial log-sum-exp",
        Tensor::NewKey => "new key",
        Tensor::NewValue => "new value",
        Tensor::RotatedQuery => "rotated query",
        Tensor::QueryGradient => "query gradient",
        Tensor::KeyGradient => "key gradient",
        Tensor::ValueGradient => "value gradient",
        Tensor::OutputGradient => "output gradient",
        Tensor::SinkGradient => "gradient of the sinks",
        Tensor::LseGradient => "gradient of the log-sum-exps",
        Tensor::QueryDescale => "query descale",
        Tensor::KeyDescale => "key descale",
        Tensor::ValueDescale => "value descale",
        Tensor::WideKey => "widened key",
        Tensor::WideValue => "widened value",
    }
}

impl Arrangement {
    /// Returns the arrangement of contiguous tensors in the order (batch, length, heads, dim).
    pub fn contiguous(problem: &Problem) -> Result<Self, TensorError> {
        let strides = |tensor| Ok(Layout::contiguous(shape(problem, tensor))?.strides());
        let [query, key, value, output] = [
            strides(Tensor::Query)?,
            strides(Tensor::Key)?,
            strides(Tensor::Value)?,
            strides(Tensor::Output)?,
        ];
        let gradients = match problem.pass {
            Pass::Forward => None,
            Pass::Backward => Some(GradientStrides { query, key, value, output }),
        };
        let descales = problem.descale_shapes().try_map(|shape| match shape {
            Some(shape) => Ok(Layout::contiguous(shape)?.strides()),
            None => Ok(Strides::default()),
        })?;
        Ok(Arrangement { query, key, value, output, gradients, descales, aligned: true })
    }

    /// Returns the strides of one of the four tensors, of its descale factors, or of its gradient,
    /// which has the tensor's strides unless they are given.
    pub(crate) fn strides(&self, tensor: Tensor) -> Strides {
        match (tensor, &self.gradients) {
            (Tensor::QueryGradient, Some(gradients)) => gradients.query,
            (Tensor::KeyGradient, Some(gradients)) => gradients.key,
            (Tensor::ValueGradient, Some(gradients)) => gradients.value,
            (Tensor::OutputGradient, Some(gradients)) => gradients.output,
            (Tensor::QueryDescale, _) => self.descales.query,
            (Tensor::KeyDescale, _) => self.descales.key,
            (Tensor::ValueDescale, _) => self.descales.value,
            (Tensor::Query | Tensor::QueryGradient, _) => self.query,
            (Tensor::Key | Tensor::KeyGradient, _) => self.key,
            (Tensor::Value | Tensor::ValueGradient, _) => self.value,
            _ => self.output,
        }
    }

    /// Refuses tensors that copies of 16 bytes cannot read or write.
    pub(crate) fn check_copies(&self, problem: &Problem) -> Result<(), String> {
        for tensor in tensors(problem) {
            let of = |reason: String| format!("the {} tensor: {reason}", name(tensor));
            for (axis, bytes) in self.steps(problem, tensor) {
                if !bytes.is_multiple_of(COPY_BYTES) {
                    return Err(of(format!(
                        "its {axis} stride of {bytes} bytes is not a multiple of {COPY_BYTES}"
                    )));
                }
            }
        }
        match self.aligned {
            true => Ok(()),
            false => Err(format!("a tensor's address is not a multiple of {COPY_BYTES}")),
        }
    }

    /// Returns the strides in bytes of the three outer dimensions; zero for a dimension of size 1,
    /// along which no step is taken and whose stride may be anything.
    pub(crate) fn steps(&self, problem: &Problem, tensor: Tensor) -> [(&'static str, u64); 3] {
        let (shape, strides) = (shape(problem, tensor), self.strides(tensor));
        let bytes = element_bytes(problem, tensor) as u64;
        [
            ("length", shape.length, strides.length),
            ("heads", shape.heads, strides.heads),
            ("batch", shape.batch, strides.batch),
        ]
        .map(|(axis, size, stride)| {
            (axis, if size <= 1 { 0 } else { (stride as u64).saturating_mul(bytes) })
        })
    }
}

/// Returns the shape of one of the four tensors, of its gradient or of its descale factors.
pub(crate) fn shape(problem: &Problem, tensor: Tensor) -> Shape {
    let nothing = Shape::new(0, 0, 0, 1);
    match differentiated(tensor) {
        Tensor::QueryDescale => problem.descale_shapes().query.unwrap_or(nothing),
        Tensor::KeyDescale => problem.descale_shapes().key.unwrap_or(nothing),
        Tensor::ValueDescale => problem.descale_shapes().value.unwrap_or(nothing),
        Tensor::Query => problem.query_shape(),
        Tensor::Key | Tensor::WideKey => problem.key_shape(),
        Tensor::Value | Tensor::WideValue => problem.value_shape(),
        _ => problem.output_shape(),
    }
}

/// Returns the bytes per element of one of the four tensors, of its gradient or of its descale
/// factors.
pub(crate) fn element_bytes(problem: &Problem, tensor: Tensor) -> usize {
    let dtypes = &problem.dtypes;
    let dtype = match differentiated(tensor) {
        Tensor::QueryDescale | Tensor::KeyDescale | Tensor::ValueDescale => DType::F32,
        Tensor::Query => dtypes.query,
        Tensor::Key => dtypes.key,
        Tensor::Value => dtypes.value,
        _ => dtypes.output,
    };
    dtype.bytes()
}
