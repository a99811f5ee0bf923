//! A launch in words: everything that someone else needs to launch a kernel of ours, another
//! process or a harness that treats all kernels alike.

use kernels::{Decode, Forward, Mma, Scalar, Shipped};
use ptx::{ParameterKind, Program, TensorBox};
use serde::Serialize;

use super::binding::{Number, Slot, Stride};
use super::decode::{self, Grid};
use super::forward::{self, Geometry};
use super::serving::ListRole;
use super::{Chip, GpuError, ServingSize, mma};
use crate::problem::Problem;
use crate::tensor::{Layout, Shape};

/// One launch of one kernel on contiguous (batch, length, heads, dim) tensors.
///
/// ```
/// use flashcore::Problem;
/// use flashcore::gpu::{Chip, LaunchDescription, forward};
/// use kernels::Shipped;
///
/// let problem = Problem::new(1, 16, 4096, 128);
/// let chosen = forward::choose(&Chip::H200, &problem)?;
/// let kernel = Shipped::Forward(chosen.configuration);
/// let launch = LaunchDescription::of(&kernel, &problem, &Chip::H200)?;
/// println!("{} blocks of {} threads", launch.grid[0], launch.threads);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LaunchDescription {
    /// The entry point.
    pub entry: String,
    /// Blocks of the grid.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Blocks of a cluster.
    pub cluster: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// One for each parameter, in order.
    pub arguments: Vec<Passed>,
}

/// How the keys of a launch lie.
#[derive(Clone, Copy)]
enum Order<'a> {
    /// A batch entry for each sequence.
    Plain,
    /// Pages of so many positions.
    Pages(usize),
    /// Sequences of these lengths, one after the other.
    Packed(&'a [usize]),
}

/// What is passed for a parameter.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Passed {
    /// A tensor map over (dim, length, heads, batch).
    TensorMap {
        /// Of which tensor.
        tensor: TensorRole,
        /// The extents of a copy, fastest first.
        extent: Vec<u32>,
        /// Over how many bytes it is swizzled; 0 is not at all.
        swizzle: u32,
    },
    /// The address of a tensor.
    Address {
        /// Which one.
        tensor: TensorRole,
    },
    /// A number of 32 bits.
    U32 {
        /// The number.
        value: u32,
    },
    /// A number of 64 bits.
    U64 {
        /// The number.
        value: u64,
    },
    /// A single-precision number.
    F32 {
        /// The number.
        value: f32,
    },
    /// The address of so much device memory, zero before the first launch.
    Zeros {
        /// How much.
        bytes: u64,
    },
    /// The address of device memory with these words in it.
    Words {
        /// The words.
        values: Vec<u32>,
    },
}

/// The tensors of a forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorRole {
    /// The queries.
    Query,
    /// The keys.
    Key,
    /// The values.
    Value,
    /// The output.
    Output,
    /// The log-sum-exps: (batch, query heads, query length) in f32.
    Lse,
}

impl TensorRole {
    /// Every role.
    pub const ALL: [TensorRole; 5] = [
        TensorRole::Query,
        TensorRole::Key,
        TensorRole::Value,
        TensorRole::Output,
        TensorRole::Lse,
    ];

    /// The shape of this tensor; log-sum-exps are (batch, heads, 1, queries).
    pub fn shape(self, problem: &Problem) -> Shape {
        match self {
            TensorRole::Query => problem.query_shape(),
            TensorRole::Key => problem.key_shape(),
            TensorRole::Value => problem.value_shape(),
            TensorRole::Output => problem.output_shape(),
            TensorRole::Lse => {
                Shape::new(problem.batch, problem.query_heads, 1, problem.query_length)
            }
        }
    }

    /// Its bytes without gaps, if they can be counted.
    pub fn bytes(self, problem: &Problem) -> Option<usize> {
        let element = match self {
            TensorRole::Lse => 4,
            _ => problem.dtype.bytes(),
        };
        self.shape(problem).elements()?.checked_mul(element)
    }
}

impl LaunchDescription {
    /// The launch of an attention kernel for a problem: of one that needs no memory but its
    /// tensors.
    pub fn of(kernel: &Shipped, problem: &Problem, chip: &Chip) -> Result<Self, GpuError> {
        match kernel {
            Shipped::Forward(configuration) => {
                LaunchDescription::forward(configuration, problem, chip)
            }
            Shipped::Mma(configuration) if !configuration.split => {
                LaunchDescription::mma(configuration, problem, chip)
            }
            Shipped::Scalar(configuration) => LaunchDescription::scalar(configuration, problem),
            Shipped::Decode(configuration) if !configuration.paged => {
                LaunchDescription::decode(configuration, problem, chip, Order::Plain)
            }
            other => {
                let reason = match other {
                    Shipped::Mma(_) => "its keys are split, and their parts need a second launch",
                    Shipped::Decode(_) => "its keys are in pages",
                    Shipped::Prefill(_) => "its tiles are put in order by another launch",
                    _ => "it does not compute attention",
                };
                Err(GpuError::Unsupported { kernel: other.family(), reason: reason.to_owned() })
            }
        }
    }

    fn mma(configuration: &Mma, problem: &Problem, chip: &Chip) -> Result<Self, GpuError> {
        let geometry = mma::Geometry::new(configuration, 1, problem, chip)?;
        let program = configuration.program()?;
        let passed = mma::passed(&program, problem, &geometry)?;
        assemble(&program, geometry.blocks, |(index, _)| passed[index].clone())
    }

    fn forward(configuration: &Forward, problem: &Problem, chip: &Chip) -> Result<Self, GpuError> {
        let geometry = Geometry::new(configuration, problem, chip)?;
        let program = configuration.program()?;
        let numbers = forward::numbers(&program, problem, &geometry)?;
        let words = geometry.lists.as_ref().map_or(&[][..], |lists| &lists.words);
        let argument = |(index, parameter): (usize, &ptx::Parameter)| match &parameter.kind {
            ParameterKind::TensorMap(tensor_box) => map(&parameter.name, tensor_box),
            ParameterKind::Address if parameter.name == "lse" => {
                Some(Passed::Address { tensor: TensorRole::Lse })
            }
            ParameterKind::Address => Some(Passed::Words { values: words.to_vec() }),
            ParameterKind::Scalar(_) => numbers[index].clone(),
        };
        assemble(&program, geometry.blocks, argument)
    }

    /// The launch of decode over the same tensors in pages: each sequence's own, in an order that
    /// is not theirs. A query that sees every key of its sequence sees the same keys.
    pub fn in_pages(
        configuration: &Decode,
        problem: &Problem,
        chip: &Chip,
        page_size: usize,
    ) -> Result<Self, GpuError> {
        LaunchDescription::decode(configuration, problem, chip, Order::Pages(page_size))
    }

    /// The launch of decode over packed sequences of these lengths, queries and keys alike: the
    /// problem is one batch entry with the rows of all.
    pub fn packed(
        configuration: &Decode,
        problem: &Problem,
        chip: &Chip,
        lengths: &[usize],
    ) -> Result<Self, GpuError> {
        LaunchDescription::decode(configuration, problem, chip, Order::Packed(lengths))
    }

    fn decode(
        configuration: &Decode,
        problem: &Problem,
        chip: &Chip,
        order: Order<'_>,
    ) -> Result<Self, GpuError> {
        let unsupported = |reason: &str| {
            let reason = reason.to_owned();
            GpuError::Unsupported { kernel: "decode", reason }
        };
        let mut size = ServingSize::new(problem.clone());
        let (mut table, mut starts) = (Vec::new(), Vec::new());
        match order {
            Order::Plain => {}
            Order::Pages(page) => {
                if page == 0 || !problem.key_length.is_multiple_of(page) {
                    return Err(unsupported("keys are not a whole number of pages"));
                }
                let columns = problem.key_length / page;
                size = size.with_pages(page, columns, problem.batch * columns);
                let order = shuffled(columns);
                for sequence in 0..problem.batch {
                    table.extend(order.iter().map(|column| (sequence * columns + column) as u32));
                }
            }
            Order::Packed(lengths) => {
                let start = |count: usize| lengths[..count].iter().sum::<usize>();
                let rows = problem.query_length;
                if problem.batch != 1 || [start(lengths.len()), problem.key_length] != [rows; 2] {
                    return Err(unsupported("the rows are not those of all sequences"));
                }
                starts = (0..=lengths.len()).map(|count| start(count) as u32).collect();
                size.problem.batch = lengths.len();
                size.problem.query_length = lengths.iter().copied().max().unwrap_or(0);
                size.problem.key_length = size.problem.query_length;
                size = size.with_packed_queries(rows).with_packed_keys(rows);
            }
        }
        if configuration.paged != size.pages.is_some() || problem.alibi || problem.sinks {
            return Err(unsupported("pages, slopes and sinks are not the configuration's"));
        }
        size.validate("decode")?;
        let grid = Grid::new(chip, configuration, &size, None)?;
        let program = configuration.program()?;
        let tensors = [TensorRole::Query, TensorRole::Key, TensorRole::Value, TensorRole::Output];
        let argument = |(_, parameter): (usize, &ptx::Parameter)| {
            let workspace = |which: usize| match grid.workspace {
                Some(bytes) => Passed::Zeros { bytes: bytes[which] },
                None => Passed::U64 { value: 0 },
            };
            match parameter.name.as_str() {
                "parts" => return Some(workspace(0)),
                "counters" => return Some(workspace(1)),
                _ => {}
            }
            Some(match decode::describe(configuration, &size, grid, &parameter.name)? {
                Slot::Fixed(Number::U32(value)) => Passed::U32 { value },
                Slot::Fixed(Number::I32(value)) => Passed::U32 { value: value as u32 },
                Slot::Fixed(Number::U64(value)) => Passed::U64 { value },
                Slot::Fixed(Number::F32(value)) => Passed::F32 { value },
                Slot::Fixed(Number::Address(address)) => Passed::U64 { value: address.0 },
                Slot::Tensor(role) => Passed::Address { tensor: tensors[role] },
                Slot::Stride(role, stride) => {
                    let mut shape = tensors[role].shape(problem);
                    if let (Order::Pages(page), 1 | 2) = (order, role) {
                        shape = Shape { batch: size.entries, length: page, ..shape };
                    }
                    let strides = Layout::contiguous(shape).ok()?.strides();
                    let elements = match (stride, order) {
                        (Stride::Batch, Order::Packed(_)) => 0,
                        (Stride::Batch, _) => strides.batch,
                        (Stride::Row, _) => strides.length,
                        (Stride::Head, _) => strides.heads,
                    };
                    Passed::U64 { value: elements as u64 }
                }
                Slot::List(ListRole::Lse) => Passed::Address { tensor: TensorRole::Lse },
                Slot::List(ListRole::BlockTable) => Passed::Words { values: table.clone() },
                Slot::List(ListRole::QueryStarts | ListRole::KeyStarts) if !starts.is_empty() => {
                    Passed::Words { values: starts.clone() }
                }
                Slot::List(_) => Passed::U64 { value: 0 },
            })
        };
        assemble(&program, grid.blocks(), argument)
    }

    fn scalar(configuration: &Scalar, problem: &Problem) -> Result<Self, GpuError> {
        let program = configuration.program()?;
        let blocks = super::scalar::blocks(problem)?;
        let argument = |(_, parameter): (usize, &ptx::Parameter)| {
            let name = parameter.name.as_str();
            let number = |value: usize| Some(Passed::U32 { value: value as u32 });
            match name {
                "query length" => number(problem.query_length),
                "key length" => number(problem.key_length),
                "query heads" => number(problem.query_heads),
                "query heads per key head" => number(problem.group_size()),
                "batch" => number(problem.batch),
                "lse" => Some(Passed::Address { tensor: TensorRole::Lse }),
                "scale times log2(e)" => {
                    Some(Passed::F32 { value: problem.scale() * std::f32::consts::LOG2_E })
                }
                _ => match name.split_once(' ') {
                    None => Some(Passed::Address { tensor: role(name)? }),
                    Some((tensor, stride)) => {
                        let shape = role(tensor)?.shape(problem);
                        let strides = Layout::contiguous(shape).ok()?.strides();
                        let value = match stride {
                            "batch stride" => strides.batch,
                            "row stride" => strides.length,
                            "head stride" => strides.heads,
                            _ => return None,
                        };
                        Some(Passed::U64 { value: value as u64 })
                    }
                },
            }
        };
        assemble(&program, blocks, argument)
    }
}

/// The numbers below a count in another order, the same every time: steps of a prime that does not
/// divide it.
fn shuffled(count: usize) -> Vec<usize> {
    let step = [1_000_003, 999_983, 7_919].into_iter().find(|prime| !count.is_multiple_of(*prime));
    (0..count).map(|index| (index * step.unwrap_or(1) + count / 2) % count).collect()
}

/// A description of a program whose arguments are found one by one.
fn assemble(
    program: &Program,
    blocks: u32,
    argument: impl Fn((usize, &ptx::Parameter)) -> Option<Passed>,
) -> Result<LaunchDescription, GpuError> {
    let arguments = program.parameters.iter().enumerate().map(|(index, parameter)| {
        argument((index, parameter)).ok_or_else(|| GpuError::Parameter {
            kernel: program.name.clone(),
            parameter: parameter.name.clone(),
        })
    });
    Ok(LaunchDescription {
        entry: program.name.clone(),
        grid: [blocks, 1, 1],
        threads: program.threads,
        cluster: program.cluster,
        shared_bytes: program.shared_bytes(),
        arguments: arguments.collect::<Result<_, _>>()?,
    })
}

fn map(name: &str, tensor_box: &TensorBox) -> Option<Passed> {
    let swizzle = match tensor_box.swizzle {
        ptx::Swizzle::None => 0,
        swizzle => swizzle.width(),
    };
    Some(Passed::TensorMap { tensor: role(name)?, extent: tensor_box.extent.clone(), swizzle })
}

/// The tensor of a parameter's name.
fn role(name: &str) -> Option<TensorRole> {
    match name {
        "queries" => Some(TensorRole::Query),
        "keys" => Some(TensorRole::Key),
        "values" => Some(TensorRole::Value),
        "output" => Some(TensorRole::Output),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::problem::Mask;

    #[test]
    fn every_attention_kernel_can_be_described() {
        for shipped in kernels::shipped(ptx::Target::SM_90A) {
            let (element, dims, causal) = match &shipped {
                Shipped::Forward(it) => (it.element, (it.head_dim, it.value_head_dim), it.causal),
                Shipped::Scalar(it) => (it.element, (it.head_dim, it.value_head_dim), it.causal),
                Shipped::Mma(it) if !it.split => {
                    (it.element, (it.head_dim, it.value_head_dim), it.causal)
                }
                _ => continue,
            };
            let dtype = match element {
                ptx::Element::F16 => DType::F16,
                ptx::Element::BF16 => DType::BF16,
                _ => DType::F32,
            };
            let problem = Problem::new(2, 6, 300, dims.0 as usize)
                .with_kv_heads(3)
                .with_value_head_dim(dims.1 as usize)
                .with_dtype(dtype)
                .with_mask(if causal { Mask::Causal } else { Mask::None });
            let launch = LaunchDescription::of(&shipped, &problem, &Chip::H200).unwrap();
            let program = shipped.program().unwrap();
            assert_eq!(launch.arguments.len(), program.parameters.len(), "{}", shipped.name());
            let tensors = launch
                .arguments
                .iter()
                .filter(|it| matches!(it, Passed::TensorMap { .. } | Passed::Address { .. }));
            assert_eq!(tensors.count(), TensorRole::ALL.len(), "{}", shipped.name());
        }
        let problem = Problem::new(2, 8, 1, 128).with_kv_heads(2).with_key_length(640);
        for page in [None, Some(16)] {
            let chosen = decode::choose(&Chip::H200, &problem, page.is_some()).unwrap();
            let decode = chosen.configuration;
            let launch = match page {
                Some(page) => LaunchDescription::in_pages(&decode, &problem, &Chip::H200, page),
                None => LaunchDescription::of(&Shipped::Decode(decode), &problem, &Chip::H200),
            };
            let launch = launch.unwrap();
            let tensors = launch.arguments.iter().filter(|it| matches!(it, Passed::Address { .. }));
            assert_eq!(tensors.count(), TensorRole::ALL.len());
            let tables = launch.arguments.iter().filter_map(|it| match it {
                Passed::Words { values } => Some(values.clone()),
                _ => None,
            });
            for mut table in tables {
                assert!(page.is_some() && !table.is_sorted());
                table.sort_unstable();
                assert_eq!(table, (0..80).collect::<Vec<u32>>());
            }
        }
        let product = Shipped::Product(kernels::Product::PLAIN);
        let refusal = LaunchDescription::of(&product, &Problem::new(1, 1, 1, 8), &Chip::H200);
        assert!(refusal.unwrap_err().to_string().contains("does not compute attention"));
        let problem = Problem::new(1, 8, 16, 128).with_key_length(10_000).with_dtype(DType::BF16);
        let chosen = mma::choose(&Chip::H200, &problem, mma::Sums::F32).unwrap();
        let split = Shipped::Mma(chosen.configuration);
        let refusal = LaunchDescription::of(&split, &problem, &Chip::H200);
        assert!(refusal.unwrap_err().to_string().contains("need a second launch"));
    }
}
