//! Argument binding: the value that is passed for each parameter that a kernel declares.
//!
//! Everything that does not depend on addresses is a number here. Addresses stay symbolic
//! ([`Source`]): a launch on a GPU substitutes device addresses, the simulator its buffers.

use kernels::attention::Window;
use kernels::attention::function::Kind;
use kernels::parameter::{
    Axis, Captured, CapturedPart, List, Number, Parameter, Reach, Tensor, Workspace,
};
use kernels::{Configuration, Divisor, Prefill};
use ptx::{ParameterKind, TensorBox, Type};
use serde::{Serialize, Serializer};

use super::arrangement::{self, Arrangement};
use super::rows::Rows;
use super::widened;
use crate::problem::{Alibi, Descale, Problem, Storage};

/// One launch of one kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Launch {
    /// The kernel.
    #[serde(serialize_with = "by_name")]
    pub kernel: Configuration,
    /// Number of thread blocks of the grid.
    pub blocks: u32,
    /// Numbers that depend on the tiling of this launch; all other numbers follow from the problem.
    #[serde(skip)]
    pub numbers: Vec<(Number, u32)>,
    /// Whether the launch reads keys and values that an earlier launch widened to 16 bits.
    #[serde(skip)]
    pub widened: bool,
}

impl Launch {
    /// Returns a launch over the keys and values of the call.
    pub(crate) fn new(
        kernel: Configuration,
        blocks: u32,
        numbers: impl IntoIterator<Item = (Number, u32)>,
    ) -> Self {
        Launch { kernel, blocks, numbers: numbers.into_iter().collect(), widened: false }
    }
}

fn by_name<S: Serializer>(kernel: &Configuration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&kernel.name())
}

/// Where an address comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// A tensor of the call.
    Tensor(Tensor),
    /// A list of the call; a null address where the call does not have it.
    List(List),
    /// Scratch memory of the plan.
    Workspace(Workspace),
    /// A null address: a list of the call that this launch must not see.
    Nothing,
    /// A tensor that a function loads from, by its index among the tensors of that function.
    Captured(Kind, u8),
}

impl From<Tensor> for Source {
    fn from(tensor: Tensor) -> Self {
        Source::Tensor(tensor)
    }
}

impl From<Workspace> for Source {
    fn from(workspace: Workspace) -> Self {
        Source::Workspace(workspace)
    }
}

/// The argument that is passed for a parameter.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// An unsigned 32-bit number.
    U32(u32),
    /// A signed 32-bit number.
    I32(i32),
    /// An unsigned 64-bit number.
    U64(u64),
    /// A single-precision number.
    F32(f32),
    /// An address.
    Address(Source),
    /// A tensor map.
    Map(Map),
    /// An extent (32 bits) or a stride (64 bits) of a tensor that a function loads from. It is
    /// known only when the call is made.
    Captured(Captured),
}

/// A tensor map (TMA descriptor) over a tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Map {
    /// The tensor that it describes.
    pub tensor: Tensor,
    /// Extents in elements, fastest dimension first.
    pub dimensions: Vec<u64>,
    /// Strides in bytes, of all dimensions but the first.
    pub strides: Vec<u64>,
    /// The box of one copy.
    pub tensor_box: TensorBox,
}

/// Strides of tensors other than those of attention: of appended rows, or of parts to be combined.
pub(crate) type OtherStrides<'a> = &'a dyn Fn(Tensor, Axis) -> Option<u64>;

/// Returns the argument of each declared parameter of a launch, in order, or why one has none.
pub fn bind(
    launch: &Launch,
    declared: &[ptx::Parameter],
    problem: &Problem,
    arrangement: &Arrangement,
) -> Result<Vec<Value>, String> {
    bind_with(launch, declared, problem, arrangement, &|_, _| None)
}

/// Like [`bind`], for launches with tensors other than those of attention.
pub(crate) fn bind_with(
    launch: &Launch,
    declared: &[ptx::Parameter],
    problem: &Problem,
    arrangement: &Arrangement,
    others: OtherStrides<'_>,
) -> Result<Vec<Value>, String> {
    let wide;
    let (problem, arrangement) = match launch.widened {
        true => {
            wide = (widened::problem(problem), widened::arrangement(problem, arrangement)?);
            (&wide.0, &wide.1)
        }
        false => (problem, arrangement),
    };
    let binding = Binding { launch, problem, arrangement, others };
    let name = launch.kernel.name();
    let parameters = Parameter::of(declared).map_err(|error| format!("{name}: {error}"))?;
    let bound = parameters.iter().zip(declared).map(|(parameter, declared)| {
        let value = binding.value(*parameter, &declared.kind)?;
        match fits(&value, &declared.kind) {
            true => Ok(value),
            false => Err(format!("{name} takes no {value:?} for {parameter}")),
        }
    });
    bound.collect()
}

/// Tells whether a value has the type that a parameter takes.
fn fits(value: &Value, kind: &ParameterKind) -> bool {
    matches!(
        (value, kind),
        (Value::U32(_), ParameterKind::Scalar(Type::U32))
            | (Value::I32(_), ParameterKind::Scalar(Type::S32))
            | (Value::U64(_), ParameterKind::Scalar(Type::U64))
            | (Value::F32(_), ParameterKind::Scalar(Type::F32))
            | (Value::Address(_), ParameterKind::Address)
            | (Value::Map(_), ParameterKind::TensorMap(_))
    ) || match value {
        Value::Captured(captured) => {
            let ty = match captured.part {
                CapturedPart::Extent(_) => Type::U32,
                _ => Type::U64,
            };
            *kind == ParameterKind::Scalar(ty)
        }
        _ => false,
    }
}

struct Binding<'a> {
    launch: &'a Launch,
    problem: &'a Problem,
    arrangement: &'a Arrangement,
    others: OtherStrides<'a>,
}

impl Binding<'_> {
    fn value(&self, parameter: Parameter, kind: &ParameterKind) -> Result<Value, String> {
        Ok(match (parameter, kind) {
            (Parameter::Tensor(tensor), ParameterKind::TensorMap(tensor_box)) => {
                Value::Map(self.map(tensor, tensor_box)?)
            }
            (Parameter::Tensor(tensor), _) => Value::Address(Source::Tensor(self.given(tensor))),
            // Widened keys and values are stored per sequence, not in batch entries of the cache.
            (Parameter::List(List::BatchIndex), _) if self.launch.widened => {
                Value::Address(Source::Nothing)
            }
            (Parameter::List(list), _) => Value::Address(Source::List(list)),
            (Parameter::Workspace(memory), _) => Value::Address(Source::Workspace(memory)),
            (Parameter::Stride(tensor, axis), _) => Value::U64(self.stride(tensor, axis)?),
            (Parameter::Number(number), _) => Value::U32(self.number(number)?),
            (Parameter::Multiplier(number), _) => Value::U32(self.divisor(number)?.multiplier),
            (Parameter::Shift(number), _) => Value::U32(self.divisor(number)?.shift),
            (Parameter::Scale(scale), _) => Value::F32(self.problem.factor(scale)),
            (Parameter::Captured(captured), _) => match captured.part {
                CapturedPart::Address => {
                    Value::Address(Source::Captured(captured.kind, captured.index))
                }
                _ => Value::Captured(captured),
            },
            (Parameter::Reach(reach), _) => {
                let window = window(self.problem);
                Value::I32(match reach {
                    Reach::Left => window.left,
                    Reach::Right => window.right,
                })
            }
            // Paged keys are located through the block table only: their sequences have no row
            // offset.
            (Parameter::Rows(Tensor::Key), _) if self.problem.keys.is_paged() => {
                Value::U32(self.problem.key_length as u32)
            }
            (Parameter::SequenceRows(Tensor::Key), _) if self.problem.keys.is_paged() => {
                Value::U32(0)
            }
            (Parameter::Rows(tensor), _) => Value::U32(self.rows(tensor)?.count),
            (Parameter::EntryRows(tensor) | Parameter::SequenceRows(tensor), _) => {
                Value::U32(self.rows(tensor)?.entry_rows)
            }
        })
    }

    /// Returns the tensor to pass for a parameter: the widened one where the launch reads widened
    /// keys.
    fn given(&self, tensor: Tensor) -> Tensor {
        if self.launch.widened { widened::tensor(tensor) } else { tensor }
    }

    fn divisor(&self, number: Number) -> Result<Divisor, String> {
        Ok(Divisor::new(self.number(number)?))
    }

    fn number(&self, number: Number) -> Result<u32, String> {
        let of_launch = self.launch.numbers.iter().find(|(it, _)| *it == number);
        if let Some((_, value)) = of_launch {
            return Ok(*value);
        }
        let value = of_problem(self.problem, number)
            .ok_or_else(|| format!("nobody sets {number:?} of {}", self.launch.kernel.name()))?;
        u32::try_from(value).map_err(|_| format!("{number:?} is beyond 32 bits"))
    }

    fn stride(&self, tensor: Tensor, axis: Axis) -> Result<u64, String> {
        if let Some(stride) = (self.others)(tensor, axis) {
            return Ok(stride);
        }
        let problem = self.problem;
        let (rows, heads) = (problem.query_shape().length as u64, problem.query_heads as u64);
        // The layout is (part, batch, head, row), with one more dimension for outputs.
        let flat = |width: u64| match axis {
            Axis::Part => problem.rows() as u64 * width,
            Axis::Batch if problem.queries.is_packed() => 0,
            Axis::Batch => heads * rows * width,
            Axis::Head => rows * width,
            Axis::Row | Axis::FlatRow => width,
        };
        let strides = match tensor {
            Tensor::Lse | Tensor::PartialLse => return Ok(flat(1)),
            Tensor::PartialOutput => return Ok(flat(problem.value_head_dim as u64)),
            Tensor::Query
            | Tensor::Key
            | Tensor::Value
            | Tensor::Output
            | Tensor::QueryGradient
            | Tensor::KeyGradient
            | Tensor::ValueGradient
            | Tensor::OutputGradient
            | Tensor::QueryDescale
            | Tensor::KeyDescale
            | Tensor::ValueDescale => self.arrangement.strides(tensor),
            Tensor::WideKey | Tensor::WideValue => widened::strides(problem, tensor)?,
            other => return Err(format!("nobody knows the strides of {other:?}")),
        };
        let descale = match tensor {
            Tensor::QueryDescale => Some(problem.descales.query),
            Tensor::KeyDescale => Some(problem.descales.key),
            Tensor::ValueDescale => Some(problem.descales.value),
            _ => None,
        };
        let packed = match tensor {
            Tensor::Query | Tensor::Output | Tensor::QueryGradient | Tensor::OutputGradient => {
                problem.queries.is_packed()
            }
            // Factors per head are indexed by sequence and head even where keys are packed.
            _ if descale == Some(Descale::PerHead) => false,
            _ => problem.keys.is_packed(),
        };
        Ok(match axis {
            // Packed sequences share one batch entry.
            Axis::Batch if packed => 0,
            Axis::Batch => strides.batch as u64,
            // All rows of a head share one factor.
            Axis::Row | Axis::FlatRow if descale == Some(Descale::PerHead) => 0,
            Axis::Row => strides.length as u64,
            Axis::FlatRow => {
                let bytes = arrangement::element_bytes(problem, tensor) as u64;
                self.rows(tensor)?.row_bytes / bytes
            }
            Axis::Head => strides.heads as u64,
            Axis::Part => return Err(format!("{tensor:?} has no parts")),
        })
    }

    fn rows(&self, tensor: Tensor) -> Result<Rows, String> {
        Rows::of(self.problem, self.arrangement, tensor)
    }

    /// Returns the tensor map of a parameter. Maps of rank 4 are over (dim, length, heads, batch);
    /// those over ragged batches are slices of one list of rows ([`Prefill::slices`]).
    fn map(&self, tensor: Tensor, tensor_box: &TensorBox) -> Result<Map, String> {
        let shape = arrangement::shape(self.problem, tensor);
        let tensor_box = tensor_box.clone();
        if tensor_box.extent.len() == 4 {
            let strides = map_strides(self.problem, self.arrangement, tensor)?;
            let dimensions = [shape.dim, shape.length, shape.heads, shape.batch];
            let dimensions = dimensions.map(|extent| extent as u64).to_vec();
            let (tensor, strides) = (self.given(tensor), strides.to_vec());
            return Ok(Map { tensor, dimensions, strides, tensor_box });
        }
        let rows = self.rows(tensor)?;
        let (dimensions, strides) =
            Prefill::slices(shape.dim as u64, shape.heads as u64, rows.row_bytes);
        let strides = [&strides[..], &[rows.head_bytes]].concat();
        let (tensor, dimensions) = (self.given(tensor), dimensions.to_vec());
        Ok(Map { tensor, dimensions, strides, tensor_box })
    }
}

/// Returns the strides in bytes of a tensor map over (dim, length, heads, batch), or why there is
/// none.
pub(crate) fn map_strides(
    problem: &Problem,
    arrangement: &Arrangement,
    tensor: Tensor,
) -> Result<[u64; 3], String> {
    let refuse =
        |reason: String| Err(format!("the {} tensor: {reason}", arrangement::name(tensor)));
    let shape = arrangement::shape(problem, tensor);
    let row = (shape.dim * arrangement::element_bytes(problem, tensor)) as u64;
    let mut strides = [row; 3];
    let sizes = [shape.length, shape.heads, shape.batch];
    for ((stride, size), (axis, bytes)) in
        strides.iter_mut().zip(sizes).zip(arrangement.steps(problem, tensor))
    {
        if size <= 1 {
            continue;
        }
        if bytes == 0 || bytes >= 1 << 40 {
            return refuse(format!("its {axis} stride of {bytes} bytes cannot be walked"));
        }
        *stride = bytes;
    }
    Ok(strides)
}

/// Returns the window and chunk size of a problem's mask as kernels take them.
pub(crate) fn window(problem: &Problem) -> Window {
    let reach = |keys: Option<usize>| {
        keys.map_or(Window::OPEN, |keys| i32::try_from(keys).unwrap_or(Window::OPEN))
            .min(Window::OPEN)
    };
    let mask = problem.mask;
    let chunk = mask.chunk.map(|chunk| u32::try_from(chunk.get()).unwrap_or(1 << 30).min(1 << 30));
    Window { left: reach(mask.left), right: reach(mask.right), chunk }
}

/// Returns a number that follows from the problem.
fn of_problem(problem: &Problem, number: Number) -> Option<usize> {
    let query_rows = problem.query_shape().length;
    Some(match number {
        Number::Batch => problem.batch,
        Number::QueryLength => problem.query_length,
        // A cache without batch entries or pages has no keys, whatever lengths say.
        Number::KeyLength if problem.entries() == 0 => 0,
        Number::KeyLength => problem.key_length,
        Number::QueryHeads => problem.query_heads,
        Number::KeyHeads => problem.kv_heads,
        Number::GroupSize => problem.group_size(),
        Number::QueryRows => query_rows,
        Number::KeyRows => match problem.keys {
            Storage::Packed(rows) => rows,
            _ => problem.key_length,
        },
        Number::Entries => problem.entries().max(1),
        Number::PageSize => match problem.keys {
            Storage::Paged { size, .. } => size,
            _ => return None,
        },
        Number::PageColumns => match problem.keys {
            Storage::Paged { columns, .. } => columns,
            _ => return None,
        },
        Number::LseHeadStride => query_rows,
        Number::LseBatchStride if problem.queries.is_packed() => 0,
        Number::LseBatchStride => problem.query_heads * query_rows,
        Number::SlopesStride => match problem.scores.alibi {
            Alibi::PerSequence => problem.query_heads,
            _ => 0,
        },
        Number::Chunk => window(problem).chunk.unwrap_or(1) as usize,
        Number::AllRows => problem.rows(),
        _ => return None,
    })
}

/// Returns the stride of an axis, for tensors other than those of attention.
#[cfg(feature = "cuda")]
pub(crate) fn axis_of(strides: crate::tensor::Strides, axis: Axis) -> u64 {
    let stride = match axis {
        Axis::Batch => strides.batch,
        Axis::Row | Axis::FlatRow => strides.length,
        Axis::Head => strides.heads,
        Axis::Part => 0,
    };
    stride as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_without_pages_or_entries_have_no_keys() {
        let keys = |storage| {
            let problem = Problem::new(1, 1, 1, 64).with_key_length(32);
            of_problem(&problem.with_storage(Storage::Padded, storage), Number::KeyLength)
        };
        let paged = |pages| Storage::Paged { size: 16, columns: 2, pages };
        assert_eq!([paged(3), Storage::Entries(2), Storage::Padded].map(keys), [Some(32); 3]);
        assert_eq!([paged(0), Storage::Entries(0)].map(keys), [Some(0); 2]);
    }
}
