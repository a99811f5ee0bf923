//! The launches of a plan, compiled and bound, for every family.
//!
//! Arguments that do not depend on addresses are bound once. A launch sets the addresses of its
//! tensors, lists and workspace, but only those that changed since the last launch.

use std::sync::{Arc, Mutex, MutexGuard};

use cuda::{Arguments, Buffer, DeviceAddress, Stream, TensorMap};
use kernels::Configuration;
use kernels::parameter::{Captured, CapturedPart, Workspace};

use super::workspace::{Held, Need};
use super::{Compilation, Gpu, GpuError, Kernel, lock};
use crate::family::{Choice, Memory};
use crate::plan::{Launch, Map, Source, Value};

/// The addresses of a call's sources.
pub(super) trait Addresses {
    /// Returns the address of a source; `None` where the call does not have it.
    fn address(&self, source: Source) -> Option<DeviceAddress>;

    /// Returns an extent or a stride of a captured tensor; zero where there is none.
    fn captured(&self, _: Captured) -> u64 {
        0
    }
}

#[derive(Debug)]
pub(super) struct Executable {
    steps: Vec<Step>,
    prepared: usize,
    main: usize,
    /// Memory of the plan that no launch writes to.
    constant: Vec<(Source, Buffer)>,
    /// Workspaces that belong to this plan, and those shared by all plans of the GPU.
    own: Need,
    shared: Need,
    /// Arguments of earlier launches, for reuse by the next one. There are as many sets as threads
    /// have launched at the same time.
    idle: Mutex<Vec<Vec<Option<Bound>>>>,
    /// Cloned by every graph that captures a launch, so that the count tells whether one exists.
    graph: Arc<()>,
}

/// A compiled kernel and its arguments.
#[derive(Debug)]
struct Step {
    kernel: Arc<Kernel>,
    blocks: u32,
    values: Vec<Value>,
    /// The lists that this step writes, where the caller may pass them instead.
    makes: Option<Source>,
    /// Indices of the parameters that are addresses or tensor maps, with their sources.
    moving: Vec<(usize, Source)>,
    /// Indices of the parameters that are extents and strides of captured tensors.
    captured: Vec<(usize, Captured)>,
}

/// The arguments of a step's last launch, and the addresses they were made from.
#[derive(Debug, Clone)]
struct Bound {
    arguments: Arguments,
    addresses: Vec<DeviceAddress>,
}

/// Which launches of a plan are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// All launches.
    All,
    /// The launches that depend on lengths and masks only.
    Preparation,
    /// The remaining launches.
    Computation,
}

impl Executable {
    /// Compiles the kernels of a choice and binds every argument that is not an address.
    pub(super) fn new(
        gpu: &Gpu,
        choice: &Choice,
        bind: impl Fn(&Launch, &[ptx::Parameter]) -> Result<Vec<Value>, String>,
    ) -> Result<Self, GpuError> {
        let mut steps = Vec::new();
        for launch in &choice.launches {
            let kernel = gpu.compiled(&launch.kernel)?;
            let values = bind(launch, kernel.parameters()).map_err(GpuError::Binding)?;
            let moving = |(index, value): (usize, &Value)| match value {
                Value::Address(source) => Some((index, *source)),
                Value::Map(map) => Some((index, Source::Tensor(map.tensor))),
                _ => None,
            };
            let moving = values.iter().enumerate().filter_map(moving).collect();
            let captured = |(index, value): (usize, &Value)| match value {
                Value::Captured(captured) => Some((index, *captured)),
                _ => None,
            };
            let captured = values.iter().enumerate().filter_map(captured).collect();
            let makes = made_by(&launch.kernel);
            steps.push(Step { kernel, blocks: launch.blocks, values, makes, moving, captured });
        }
        let mut constant = Vec::new();
        let is_constant = |memory: &&Memory| memory.contents.is_constant();
        let memory: Vec<&Memory> = choice.memory.iter().filter(is_constant).collect();
        if !memory.is_empty() {
            let lists = choice.lists_over(&[]);
            // Not on the GPU's own stream, which may be under capture.
            let stream = Stream::new(gpu.device())?;
            for Memory { source, .. } in memory {
                if let Some(words) = lists.of(*source) {
                    constant.push((*source, Buffer::from_slice(&stream, words)?));
                }
            }
        }
        let (own, shared) = Need::of(&choice.memory, &gpu.workspaces);
        Ok(Executable {
            steps,
            prepared: choice.prepared,
            main: choice.main,
            constant,
            own,
            shared,
            idle: Mutex::default(),
            graph: Arc::new(()),
        })
    }

    /// Enqueues launches on a stream. Does not synchronize; the first launch on a stream allocates
    /// its workspace, where there is one.
    pub(super) fn launch(
        &self,
        stream: &Stream,
        part: Part,
        addresses: &impl Addresses,
    ) -> Result<(), GpuError> {
        let recording = stream.recording()?;
        if let Some(recording) = &recording {
            recording.give(self.graph.clone())?;
        }
        let own = self.own.on(stream, recording.as_ref())?;
        let shared = self.shared.on(stream, recording.as_ref())?;
        // The locks keep launches that share a workspace together on the stream.
        let held = [own.as_deref().map(lock), shared.as_deref().map(lock)];
        let idle = lock(&self.idle).pop();
        let mut bound = idle.unwrap_or_else(|| vec![None; self.steps.len()]);
        let steps = match part {
            Part::All => 0..self.steps.len(),
            Part::Preparation => 0..self.prepared,
            Part::Computation => self.prepared..self.steps.len(),
        };
        for index in steps {
            let step = &self.steps[index];
            if step.makes.is_some_and(|made| !self.is_made(made, part, addresses)) {
                continue;
            }
            let find = |source| self.find(source, &held, addresses);
            // After an error all of `bound` is dropped, since some of its arguments may have changed.
            let last = match &mut bound[index] {
                Some(last) => {
                    step.rebind(stream, last, find)?;
                    last
                }
                none => none.insert(step.bind(stream, find)?),
            };
            step.bind_captured(last, addresses)?;
            step.kernel.launch(stream, step.blocks, &last.arguments)?;
        }
        lock(&self.idle).push(bound);
        Ok(())
    }

    /// Tells whether a step that writes lists runs. In a preparation it does where the caller
    /// brings memory for the lists, or the plan has no constant lists; otherwise it does where
    /// neither the caller nor the plan has lists.
    fn is_made(&self, source: Source, part: Part, addresses: &impl Addresses) -> bool {
        let brought = addresses.address(source).is_some();
        let constant = self.constant.iter().any(|(of, _)| *of == source);
        if part == Part::Preparation { brought || !constant } else { !brought && !constant }
    }

    fn find(
        &self,
        source: Source,
        held: &[Option<MutexGuard<'_, Held>>; 2],
        addresses: &impl Addresses,
    ) -> DeviceAddress {
        if let Some(address) = addresses.address(source) {
            return address;
        }
        let constant = self.constant.iter().find(|(of, _)| *of == source);
        let own = constant.map(|(_, buffer)| buffer.address());
        let written = || held.iter().flatten().find_map(|held| held.address(source));
        own.or_else(written).unwrap_or(DeviceAddress(0))
    }

    /// Returns how the attention kernel's binary was obtained.
    pub(super) fn compilation(&self) -> &Compilation {
        self.kernel().compilation()
    }

    /// Returns the compiled attention kernel.
    pub(super) fn kernel(&self) -> &Kernel {
        &self.steps[self.main].kernel
    }

    /// Returns the device memory besides the kernels and the workspaces that plans share.
    pub(super) fn device_bytes(&self) -> u64 {
        let constant: u64 = self.constant.iter().map(|(_, buffer)| buffer.bytes()).sum();
        constant + self.own.device_bytes()
    }

    /// Tells whether a graph holds a launch of this plan.
    pub(super) fn is_captured(&self) -> bool {
        Arc::strong_count(&self.graph) > 1
    }
}

impl Step {
    /// Binds all arguments, except the extents and strides of captured tensors.
    fn bind(
        &self,
        stream: &Stream,
        find: impl Fn(Source) -> DeviceAddress,
    ) -> Result<Bound, GpuError> {
        let mut arguments = Arguments::new();
        for value in &self.values {
            match value {
                Value::U32(value) => arguments.push(*value),
                Value::I32(value) => arguments.push(*value),
                Value::U64(value) => arguments.push(*value),
                Value::F32(value) => arguments.push(*value),
                Value::Captured(captured) => match captured.part {
                    CapturedPart::Extent(_) => arguments.push(0u32),
                    _ => arguments.push(0u64),
                },
                Value::Address(source) => arguments.push(find(*source)),
                Value::Map(map) => {
                    let address = find(Source::Tensor(map.tensor));
                    arguments.push(encode(stream, map, address)?)
                }
            };
        }
        let addresses = self.moving.iter().map(|(_, source)| find(*source)).collect();
        Ok(Bound { arguments, addresses })
    }

    /// Sets the extents and strides of this call's captured tensors.
    fn bind_captured(&self, bound: &mut Bound, addresses: &impl Addresses) -> Result<(), GpuError> {
        for (index, captured) in &self.captured {
            let number = addresses.captured(*captured);
            match captured.part {
                // Extents beyond 32 bits were refused.
                CapturedPart::Extent(_) => bound.arguments.set(*index, number as u32)?,
                _ => bound.arguments.set(*index, number)?,
            }
        }
        Ok(())
    }

    /// Replaces the arguments whose address has changed since the last launch.
    fn rebind(
        &self,
        stream: &Stream,
        bound: &mut Bound,
        find: impl Fn(Source) -> DeviceAddress,
    ) -> Result<(), GpuError> {
        for ((index, source), last) in self.moving.iter().zip(&mut bound.addresses) {
            let address = find(*source);
            if *last == address {
                continue;
            }
            match &self.values[*index] {
                Value::Map(map) => bound.arguments.set(*index, encode(stream, map, address)?)?,
                _ => bound.arguments.set(*index, address)?,
            }
            *last = address;
        }
        Ok(())
    }
}

fn encode(stream: &Stream, map: &Map, address: DeviceAddress) -> Result<TensorMap, GpuError> {
    TensorMap::encode(stream.device(), &map.tensor_box, address, &map.dimensions, &map.strides)
        .map_err(|error| GpuError::Tensor {
            tensor: crate::plan::arrangement::name(map.tensor),
            reason: error.to_string(),
        })
}

/// Returns the lists that a kernel writes, where the caller may pass them instead.
fn made_by(kernel: &Configuration) -> Option<Source> {
    match kernel {
        Configuration::BlockFinder(_) | Configuration::BlockLister(_) => {
            Some(Source::Workspace(Workspace::BlockLists))
        }
        Configuration::TileSharer(_) => Some(Source::Workspace(Workspace::TileLists)),
        _ => None,
    }
}
