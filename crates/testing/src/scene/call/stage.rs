//! Staging of a call: the library plans and binds it, and this file makes a simulator buffer for
//! each source of an address and turns the launches into steps of a scene.

use std::collections::BTreeMap;

use flashcore::family::{Choice, Contents};
use flashcore::function::Function;
use flashcore::gpu::Chip;
use flashcore::plan::{Launch, Source, Value, bind};
use flashcore::serving::Sequences;
use flashcore::{Inputs, Problem};
use kernels::Configuration;
use kernels::parameter::{Captured, CapturedPart, List, Tensor as Role, Workspace};
use ptx::{Element, Program};
use sim::{Argument, BufferId, Memory, TensorMapArgument};

use super::hostile::{cross, exceed, fill};
use super::inputs::CallInputs;
use super::{Call, UNTOUCHED, refused};
use crate::scene::{Kernel, KernelLaunch, Scene, SceneError, encode};

/// The buffers by source; absent tensors and lists have none.
pub(in crate::scene) type Buffers = BTreeMap<Source, BufferId>;

/// The copies of an 8-bit cache that are widened to 16 bits.
const WIDENED: [Source; 2] = [Source::Tensor(Role::WideKey), Source::Tensor(Role::WideValue)];

/// A call with its memory and launches.
pub(in crate::scene) struct Staged<'a> {
    pub(in crate::scene) problem: Problem,
    pub(in crate::scene) inputs: Inputs<'a>,
    pub(in crate::scene) memory: Memory,
    pub(in crate::scene) buffers: Buffers,
    pub(in crate::scene) steps: Vec<KernelLaunch>,
    /// Index of the main launch in `steps`.
    main: usize,
    /// Workspace that starts as zeros and that the main kernel must leave as it found it.
    restored: Vec<BufferId>,
}

impl Staged<'_> {
    pub(super) fn scene(self, size: String) -> Result<Scene, SceneError> {
        let Staged { memory, buffers, mut steps, main, restored, .. } = self;
        let after = steps.split_off(main + 1);
        let (Some(step), before) = (steps.pop(), steps) else {
            return Err(SceneError::Size("the plan has no launch".to_owned()));
        };
        // In a backward pass the first two are inputs, which no kernel writes.
        let results =
            [Role::Output, Role::Lse, Role::QueryGradient, Role::KeyGradient, Role::ValueGradient];
        let written_once =
            results.iter().filter_map(|it| buffers.get(&Source::Tensor(*it)).copied()).collect();
        let alone = Scene::single_launch(step, memory, Vec::new(), size);
        Ok(Scene { before, after, written_once, restored, ..alone })
    }
}

impl Call {
    /// Plans the call, makes a buffer for each source, and binds the launches to them.
    pub(in crate::scene) fn stage<'a>(
        &self,
        call_inputs: &'a CallInputs,
    ) -> Result<Staged<'a>, SceneError> {
        let (problem, inputs) = call_inputs.call().map_err(refused)?;
        let Kernel { target, .. } = Kernel::of(&self.kernel);
        let element = problem.dtypes.output.element();
        let chip =
            Chip { target, multiprocessors: self.multiprocessors, l2_bytes: 1 << 20, ..Chip::H200 };
        let choice = Choice::for_kernel(&chip, &problem, self.kernel, self.splits)
            .map_err(SceneError::Size)?;

        let sequences = Sequences::of(&problem, inputs);
        let (mut memory, mut buffers) = (Memory::new(), Buffers::new());
        for (role, tensor) in
            [(Role::Query, inputs.query), (Role::Key, inputs.key), (Role::Value, inputs.value)]
        {
            let buffer = memory.input(&format!("{role:?}"), tensor.bytes().to_vec());
            buffers.insert(Source::Tensor(role), buffer);
        }
        let descales = [Role::QueryDescale, Role::KeyDescale, Role::ValueDescale];
        for (role, factors) in descales.into_iter().zip(inputs.descales.into_array()) {
            if let Some(factors) = factors {
                let buffer = memory.input(&format!("{role:?}"), factors.bytes().to_vec());
                buffers.insert(Source::Tensor(role), buffer);
            }
        }
        for list in List::OF_ATTENTION {
            if let Some(mut words) = inputs.list(&problem, list) {
                if self.hostile {
                    fill(list, &mut words, |starts| inputs.list(&problem, starts));
                    exceed(list, &mut words, &problem, inputs.key.shape().batch);
                    cross(&mut words, list, |lengths| inputs.list(&problem, lengths));
                }
                let buffer = memory.input_u32(&format!("{list:?}"), &words);
                buffers.insert(Source::List(list), buffer);
            }
        }
        for function in problem.functions() {
            for (index, spec) in function.tensors().iter().enumerate() {
                let tensor = inputs.captured.iter().find(|it| it.name == spec.name);
                let tensor = tensor.ok_or_else(|| {
                    let (kind, name) = (function.kind().name(), function.name());
                    let missing = format!("tensor {}, which {kind} {name} loads from", spec.name);
                    SceneError::Size(format!("{missing}, is missing: Call::captured has them"))
                })?;
                let source = Source::Captured(function.kind(), index as u8);
                buffers.insert(source, memory.input(&spec.name, tensor.bytes.clone()));
            }
        }
        let outputs = problem.rows() * problem.value_head_dim;
        for (role, element, count) in
            [(Role::Output, element, outputs), (Role::Lse, Element::F32, problem.rows())]
        {
            let name = format!("{role:?}");
            let buffer = match &call_inputs.backward {
                Some(backward) => memory.input(&name, backward.bytes(role)),
                None if sequences.rows() == problem.rows() => {
                    memory.output(&name, element.bytes() as usize * count)
                }
                // Rows that are no query of a sequence must stay as they are.
                None => memory.result(&name, encode(element, &vec![UNTOUCHED; count])),
            };
            buffers.insert(Source::Tensor(role), buffer);
        }
        if let Some(backward) = &call_inputs.backward {
            backward.stage(&problem, &sequences, &mut memory, &mut buffers);
        }
        let lists = choice.lists_over(if self.contents_known { &self.captured } else { &[] });
        let mut restored = Vec::new();
        for it in &choice.memory {
            let (name, bytes) = (format!("{:?}", it.source), it.bytes.max(4) as usize);
            let buffer = match &it.contents {
                // Rows of a widened cache that no sequence uses are not written, so that they keep
                // NaN, which kernels must tolerate as in any cache.
                Contents::Anything if WIDENED.contains(&it.source) => {
                    memory.result(&name, vec![0xFF; bytes])
                }
                Contents::FoundBlocks(..) | Contents::FoundTiles(..) if self.contents_known => {
                    memory.input_u32(&name, lists.of(it.source).unwrap_or_default())
                }
                Contents::Anything | Contents::FoundBlocks(..) | Contents::FoundTiles(..) => {
                    memory.output(&name, bytes)
                }
                Contents::Zeros => memory.input(&name, vec![0; bytes]),
                Contents::Tiles(_) | Contents::Blocks(_) => {
                    memory.input_u32(&name, lists.of(it.source).unwrap_or_default())
                }
            };
            if it.contents == Contents::Zeros {
                restored.push(buffer);
            }
            if problem.deterministic && it.source == Source::Workspace(Workspace::QueryGradientSums)
            {
                memory.adds_in_order(buffer);
            }
            buffers.insert(it.source, buffer);
        }

        let mut arrangement =
            inputs.arrangement(&problem).map_err(|error| refused(error.into()))?;
        if let (Some(backward), Some(gradients)) =
            (&call_inputs.backward, &mut arrangement.gradients)
        {
            gradients.output = backward.output_gradient_strides();
        }
        let mut steps = Vec::new();
        // Lists that were made on the host need no launch that finds them.
        let found = |launch: &Launch| {
            use Configuration::{BlockFinder, BlockLister, TileSharer};
            let makes = matches!(launch.kernel, BlockFinder(_) | BlockLister(_) | TileSharer(_));
            self.contents_known && makes
        };
        for launch in choice.launches.iter().filter(|launch| !found(launch)) {
            let program = launch.kernel.program()?;
            let values = bind(launch, &program.parameters, &problem, &arrangement)
                .map_err(SceneError::Size)?;
            let values: Vec<Value> =
                values.into_iter().map(|value| measured(value, &problem, inputs)).collect();
            steps.push(KernelLaunch::bound(program, launch.blocks, &values, &buffers)?);
        }
        let main = choice.main - choice.launches.iter().filter(|launch| found(launch)).count();
        Ok(Staged { problem, inputs, memory, buffers, steps, main, restored })
    }
}

/// Returns the extent or stride of a captured tensor that `value` names; other values as they are.
fn measured(value: Value, problem: &Problem, inputs: Inputs<'_>) -> Value {
    let Value::Captured(captured) = value else { return value };
    let Captured { kind, index, part } = captured;
    let name = |function: Function| function.tensors().get(usize::from(index)).map(|it| &it.name);
    let name = problem.functions().find(|function| function.kind() == kind).and_then(name);
    let tensor = inputs.captured.iter().find(|tensor| Some(&tensor.name) == name);
    match (tensor, part) {
        (Some(tensor), CapturedPart::Extent(it)) => Value::U32(tensor.extents[it as usize] as u32),
        (Some(tensor), CapturedPart::Stride(it)) => Value::U64(tensor.strides[it as usize] as u64),
        _ => value,
    }
}

impl KernelLaunch {
    /// Creates the step of a launch, with buffers in place of the sources that its values name and
    /// a null address for absent ones.
    pub(in crate::scene) fn bound(
        program: Program,
        grid: u32,
        values: &[Value],
        buffers: &Buffers,
    ) -> Result<Self, SceneError> {
        let argument = |value: &Value| {
            Ok(match value {
                Value::U32(value) => Argument::U32(*value),
                Value::I32(value) => Argument::S32(*value),
                Value::U64(value) => Argument::U64(*value),
                Value::F32(value) => Argument::F32(*value),
                Value::Address(source) => match buffers.get(source) {
                    Some(buffer) => Argument::Address(*buffer, 0),
                    None => Argument::U64(0),
                },
                Value::Captured(captured) => {
                    return Err(SceneError::Size(format!("nobody passes {captured:?}")));
                }
                Value::Map(map) => {
                    let buffer = buffers.get(&Source::Tensor(map.tensor)).copied();
                    let none = || SceneError::Size(format!("there is no {:?}", map.tensor));
                    Argument::TensorMap(TensorMapArgument {
                        buffer: buffer.ok_or_else(none)?,
                        offset: 0,
                        dimensions: map.dimensions.clone(),
                        strides: map.strides.clone(),
                        tensor_box: map.tensor_box.clone(),
                    })
                }
            })
        };
        let arguments = values.iter().map(argument).collect::<Result<_, SceneError>>()?;
        Ok(KernelLaunch { program, grid, arguments })
    }
}
