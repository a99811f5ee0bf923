//! A launch in words: everything that someone else needs to launch a kernel of ours, another
//! process or a harness that treats all kernels alike.

mod sequences;

pub use sequences::Order;

use kernels::{Forward, Mma, Scalar, Shipped};
use ptx::{ParameterKind, Program, TensorBox};
use serde::Serialize;

use super::forward::{self, Geometry};
use super::{Chip, GpuError, mma};
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
    /// A tensor map over dimensions that are not the tensor's own.
    Slices {
        /// Of which tensor.
        tensor: TensorRole,
        /// The dimensions in elements, fastest first.
        dimensions: Vec<u64>,
        /// The strides in bytes, of all dimensions but the first.
        strides: Vec<u64>,
        /// The extents of a copy, fastest first.
        extent: Vec<u32>,
        /// Over how many bytes it is swizzled; 0 is not at all.
        swizzle: u32,
    },
    /// The address of device memory, zero before the first launch. Launches that belong together
    /// share what they call by the same name.
    Memory {
        /// What it is called.
        name: &'static str,
        /// How much it is.
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
                sequences::decode(configuration, problem, chip, Order::Plain)
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
            ParameterKind::Address if parameter.name == "Lse" => {
                Some(Passed::Address { tensor: TensorRole::Lse })
            }
            ParameterKind::Address => Some(Passed::Words { values: words.to_vec() }),
            ParameterKind::Scalar(_) => numbers[index].clone(),
        };
        assemble(&program, geometry.blocks, argument)
    }

    fn scalar(configuration: &Scalar, problem: &Problem) -> Result<Self, GpuError> {
        let program = configuration.program()?;
        let blocks = super::scalar::blocks(problem)?;
        let argument = |(_, parameter): (usize, &ptx::Parameter)| {
            let name = parameter.name.as_str();
            let number = |value: usize| Some(Passed::U32 { value: value as u32 });
            match name {
                "QueryLength" => number(problem.query_length),
                "KeyLength" => number(problem.key_length),
                "QueryHeads" => number(problem.query_heads),
                "GroupSize" => number(problem.group_size()),
                "Batch" => number(problem.batch),
                "Lse" => Some(Passed::Address { tensor: TensorRole::Lse }),
                "ScaleLog2" => {
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
    let (extent, swizzle) = (tensor_box.extent.clone(), swizzled_bytes(tensor_box));
    Some(Passed::TensorMap { tensor: role(name)?, extent, swizzle })
}

/// Over how many bytes copies are swizzled; 0 is not at all.
fn swizzled_bytes(tensor_box: &TensorBox) -> u32 {
    match tensor_box.swizzle {
        ptx::Swizzle::None => 0,
        swizzle => swizzle.width(),
    }
}

/// The tensor of a parameter's name.
fn role(name: &str) -> Option<TensorRole> {
    match name {
        "Query" => Some(TensorRole::Query),
        "Key" => Some(TensorRole::Key),
        "Value" => Some(TensorRole::Value),
        "Output" => Some(TensorRole::Output),
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
