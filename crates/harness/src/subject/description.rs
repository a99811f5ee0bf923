//! How a kernel is launched, as data: of somebody else's kernel from the file beside it, of ours
//! from what the library binds, for whoever launches it elsewhere.

use flashcore::plan::{Arrangement, Map, Source, Value, bind};
use flashcore::{Plan, Problem};
use kernels::parameter::{Tensor, Workspace};
use ptx::{Element, Program, Swizzle};
use serde::{Deserialize, Serialize};

use crate::auxiliary_inputs::AuxiliaryInputs;

/// The tensors of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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
    /// The log-sum-exps.
    Lse,
    /// The gradient of the output.
    OutputGradient,
    /// The gradient of the queries.
    QueryGradient,
    /// The gradient of the keys.
    KeyGradient,
    /// The gradient of the values.
    ValueGradient,
}

impl TensorRole {
    /// Every tensor of the forward pass, inputs first.
    pub const ALL: [TensorRole; 5] = [
        TensorRole::Query,
        TensorRole::Key,
        TensorRole::Value,
        TensorRole::Output,
        TensorRole::Lse,
    ];

    /// How many there are with those of the backward pass.
    pub const COUNT: usize = 9;

    fn of(tensor: Tensor) -> Option<TensorRole> {
        Some(match tensor {
            Tensor::Query => TensorRole::Query,
            Tensor::Key => TensorRole::Key,
            Tensor::Value => TensorRole::Value,
            Tensor::Output => TensorRole::Output,
            Tensor::Lse => TensorRole::Lse,
            Tensor::OutputGradient => TensorRole::OutputGradient,
            Tensor::QueryGradient => TensorRole::QueryGradient,
            Tensor::KeyGradient => TensorRole::KeyGradient,
            Tensor::ValueGradient => TensorRole::ValueGradient,
            _ => return None,
        })
    }
}

/// How a kernel is launched for a problem.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LaunchDescription {
    /// The entry point.
    pub entry: String,
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Blocks of a cluster.
    pub cluster: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Whether it may begin before earlier kernels on the stream have ended, which it waits for itself.
    pub programmatic: bool,
    /// One for each parameter.
    pub arguments: Vec<KernelArgument>,
}

/// The argument for one parameter of a kernel.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum KernelArgument {
    /// A tensor map.
    TensorMap {
        /// Over which tensor.
        tensor: TensorRole,
        /// Its elements.
        #[serde(skip)]
        element: Element,
        /// The dimensions in elements, fastest first.
        dimensions: Vec<u64>,
        /// The strides in bytes, of all but the first.
        strides: Vec<u64>,
        /// The box of one copy.
        extent: Vec<u32>,
        /// Over how many bytes it is swizzled: 0, 32, 64 or 128.
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
    /// A signed number of 32 bits.
    I32 {
        /// The number.
        value: i32,
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
    /// The address of words that are there before the launch.
    Words {
        /// The words.
        values: Vec<u32>,
    },
    /// The address of memory that is zero before the first launch, and the same for all launches
    /// that name it.
    Memory {
        /// Its name.
        name: String,
        /// How much it is.
        bytes: u64,
    },
}

/// Every launch of a plan over contiguous tensors, in order.
pub fn of_plan(
    plan: &Plan,
    auxiliary: &AuxiliaryInputs,
) -> Result<Vec<(Program, LaunchDescription)>, String> {
    let choice = plan.chosen.choice.as_ref();
    let launches = choice.map(|it| &it.launches[..]).unwrap_or_default().iter();
    launches
        .enumerate()
        .map(|(index, launch)| {
            let program = launch.kernel.program().map_err(|error| error.to_string())?;
            let description = of_program(plan, auxiliary, index, &program, 0)?;
            Ok((program, description))
        })
        .collect()
}

/// One launch of a plan, with a program in place of its kernel that may take timestamps: into so
/// many bytes.
pub(crate) fn of_program(
    plan: &Plan,
    auxiliary: &AuxiliaryInputs,
    index: usize,
    program: &Program,
    probe: u64,
) -> Result<LaunchDescription, String> {
    let Plan { problem, chosen, .. } = plan;
    let choice = chosen.choice.as_ref().ok_or("it is no kernel of a GPU")?;
    let launch = &choice.launches[index];
    let lists = choice.lists_over(&[]);
    let arrangement = Arrangement::contiguous(problem).map_err(|error| error.to_string())?;
    let values = bind(launch, &program.parameters, problem, &arrangement)?;
    let argument = |value: Value| match value {
        Value::U32(value) => Ok(KernelArgument::U32 { value }),
        Value::I32(value) => Ok(KernelArgument::I32 { value }),
        Value::U64(value) => Ok(KernelArgument::U64 { value }),
        Value::F32(value) => Ok(KernelArgument::F32 { value }),
        Value::Map(map) => tensor_map_argument(map),
        Value::Captured(_) => Err("tensors of functions are not described".to_owned()),
        Value::Address(Source::List(list)) => Ok(match auxiliary.list(problem, list) {
            Some(values) => KernelArgument::Words { values },
            None => KernelArgument::U64 { value: 0 },
        }),
        Value::Address(source) => {
            if let Source::Tensor(tensor) = source
                && let Some(tensor) = TensorRole::of(tensor)
            {
                return Ok(KernelArgument::Address { tensor });
            }
            let name = format!("{source:?}");
            let memory = choice.memory.iter().find(|memory| memory.source == source);
            if let Some(words) = lists.of(source) {
                return Ok(KernelArgument::Words { values: words.to_vec() });
            }
            Ok(match memory.map(|memory| memory.bytes) {
                Some(bytes) => KernelArgument::Memory { name, bytes },
                None if source == Source::Workspace(Workspace::Probe) => {
                    KernelArgument::Memory { name, bytes: probe }
                }
                None => KernelArgument::U64 { value: 0 },
            })
        }
    };
    Ok(LaunchDescription {
        entry: program.name.clone(),
        grid: [launch.blocks, 1, 1],
        threads: program.threads,
        cluster: program.cluster,
        shared_bytes: program.shared_bytes(),
        programmatic: program.waits_for_grids(),
        arguments: values.into_iter().map(argument).collect::<Result<_, String>>()?,
    })
}

fn tensor_map_argument(map: Map) -> Result<KernelArgument, String> {
    let unknown = || format!("nobody maps {:?}", map.tensor);
    Ok(KernelArgument::TensorMap {
        tensor: TensorRole::of(map.tensor).ok_or_else(unknown)?,
        element: map.tensor_box.element,
        dimensions: map.dimensions,
        strides: map.strides,
        extent: map.tensor_box.extent,
        swizzle: match map.tensor_box.swizzle {
            Swizzle::None => 0,
            swizzle => swizzle.width(),
        },
    })
}

/// A tensor map over (dim, length, heads, batch) of a contiguous tensor of a plain problem.
pub(crate) fn plain_map(
    problem: &Problem,
    tensor: TensorRole,
    extent: Vec<u32>,
    swizzle: u32,
) -> Result<KernelArgument, String> {
    let (shape, dtype) = match tensor {
        TensorRole::Query => (problem.query_shape(), problem.dtypes.query),
        TensorRole::Key => (problem.key_shape(), problem.dtypes.key),
        TensorRole::Value => (problem.value_shape(), problem.dtypes.value),
        TensorRole::Output => (problem.output_shape(), problem.dtypes.output),
        TensorRole::Lse => return Err("the log-sum-exps have no tensor map".to_owned()),
        _ => return Err("gradients are no part of somebody else's kernel yet".to_owned()),
    };
    let strides = flashcore::Layout::contiguous(shape).map_err(|it| it.to_string())?.strides();
    let bytes = dtype.bytes() as u64;
    Ok(KernelArgument::TensorMap {
        tensor,
        element: dtype.element(),
        dimensions: [shape.dim, shape.length, shape.heads, shape.batch].map(|n| n as u64).to_vec(),
        // A dimension of one is never stepped along, but its stride must be in order.
        strides: [strides.length, strides.heads, strides.batch].map(|n| n as u64 * bytes).to_vec(),
        extent,
        swizzle,
    })
}
