//! Masks and scores given as functions: their texts, the tensors that they load from, and the lists
//! of blocks that a mask function leaves visible.

use std::sync::{Arc, Mutex};

use cuda::{Buffer, DeviceAddress, Event, RelaxedCapture, Stream, StreamIdentity};
use flashcore::function::{Function, HostTensor, Kind, Stored, TensorSpec};
use flashcore::gpu::{AttentionPlan, CapturedTensor, CapturedTensors, Gpu, Tensors};
use flashcore::plan::Workspace;
use flashcore::{DType, Problem, family};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::error;
use crate::library::Named;
use crate::process::{lock, process};
use crate::view::{Element, Memory, Place};

/// A mask or score function, parsed from its text.
#[pyclass(frozen, name = "Rule", module = "flashcore._flashcore")]
pub(crate) struct Rule(Function);

#[pymethods]
impl Rule {
    #[new]
    #[pyo3(signature = (text, /))]
    fn new(text: &str) -> PyResult<Self> {
        text.parse().map(Rule).map_err(error::value)
    }

    /// Returns the canonical text, which is the same for the same function.
    #[getter]
    fn text(&self) -> &'static str {
        self.0.text()
    }
}

/// Lists of the blocks that a mask function leaves visible. They are computed on the device at the
/// first launch with the mask, from what its tensors hold then, and reused afterwards.
#[pyclass(frozen, weakref, name = "Blocks", module = "flashcore._flashcore")]
#[derive(Default)]
pub(crate) struct Blocks {
    lists: Mutex<Vec<Lists>>,
}

/// Block lists in the memory of one device.
struct Lists {
    ordinal: u32,
    /// The launches that the lists were computed for.
    launches: family::Choice,
    /// The lists of key blocks and of tiles.
    buffers: [Option<Buffer>; 2],
    /// Recorded behind the launch that computes the lists.
    found: Event,
    /// The stream of all launches that used the lists; None if there were several.
    used_on: Option<StreamIdentity>,
    /// Each CUDA graph that captured a launch with these lists holds another reference.
    graph: Arc<()>,
}

impl Drop for Lists {
    fn drop(&mut self) {
        // Kernels may still write or read the lists: freeing a buffer waits until the device has
        // done what was asked of it. A graph, however, may launch with them at any time, so its
        // buffers are leaked.
        let buffers = self.buffers.iter_mut().filter_map(Option::take);
        if Arc::strong_count(&self.graph) > 1 {
            buffers.for_each(std::mem::forget);
        } else if let Some(stream) = self.used_on {
            buffers.for_each(|buffer| Spare { ordinal: self.ordinal, stream, buffer }.keep());
        }
    }
}

/// Memory of block lists that are gone, for others on the same stream: these come behind all that
/// still uses it. A mask that changes in every step would otherwise wait for the device in each.
pub(crate) struct Spare {
    ordinal: u32,
    stream: StreamIdentity,
    buffer: Buffer,
}

impl Spare {
    /// The most memory that is kept.
    const MOST: u64 = 64 << 20;

    /// Keeps the memory, and frees the oldest where there is too much.
    fn keep(self) {
        let mut spare = lock(&process().spare);
        spare.push(self);
        let mut kept = 0;
        let newest = spare.iter().rev().take_while(|it| {
            kept += it.buffer.bytes();
            kept <= Spare::MOST
        });
        let oldest = spare.len() - newest.count();
        let freed: Vec<Spare> = spare.drain(..oldest).collect();
        // Others need not wait for the device as well.
        drop(spare);
        drop(freed);
    }

    /// Returns memory of a size for a stream: some that was kept, or else new memory.
    fn or_new(gpu: &Gpu, stream: StreamIdentity, bytes: u64) -> Result<Buffer, cuda::Error> {
        let ordinal = gpu.device().ordinal();
        let mut spare = lock(&process().spare);
        let fits =
            |it: &Spare| (it.ordinal, it.stream, it.buffer.bytes()) == (ordinal, stream, bytes);
        match spare.iter().position(fits) {
            Some(index) => Ok(spare.remove(index).buffer),
            None => Buffer::new(gpu.device(), bytes),
        }
    }
}

#[pymethods]
impl Blocks {
    #[new]
    fn new() -> Self {
        Blocks::default()
    }
}

impl Blocks {
    /// Adds the lists of key blocks and of tiles to a call, computing them the first time. If a
    /// graph is being captured and they are not there yet, the plan computes them each time the
    /// graph runs.
    pub(crate) fn join(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        plan: &AttentionPlan,
        tensors: &mut Tensors,
    ) -> Result<(), flashcore::Error> {
        let Some(launches) = plan.with_found_lists() else { return Ok(()) };
        let ordinal = gpu.device().ordinal();
        let recording = stream.recording()?;
        let mut lists = lock(&self.lists);
        let known = lists.iter().position(|it| it.ordinal == ordinal && it.launches == *launches);
        let _relaxed = RelaxedCapture::begin()?;
        let identity = stream.identity();
        let index = match known {
            Some(index) => index,
            None if recording.is_some() => return Ok(()),
            None => {
                let buffers = [Workspace::BlockLists, Workspace::TileLists].map(|workspace| {
                    let bytes = launches.found_bytes(workspace)?;
                    Some(Spare::or_new(gpu, identity, bytes))
                });
                let [blocks, tiles] = buffers.map(Option::transpose);
                let buffers = [blocks?, tiles?];
                let address = |it: &Option<Buffer>| it.as_ref().map(Buffer::address);
                [tensors.block_lists, tensors.tile_lists] = buffers.each_ref().map(address);
                plan.prepare(stream, tensors)?;
                let found = Event::new(gpu.device())?;
                found.record(stream)?;
                let (launches, graph, used_on) = (launches.clone(), Arc::new(()), Some(identity));
                lists.push(Lists { ordinal, launches, buffers, found, used_on, graph });
                lists.len() - 1
            }
        };
        let Lists { buffers, graph, found, used_on, .. } = &mut lists[index];
        *used_on = used_on.filter(|it| *it == identity);
        if !found.is_passed()? {
            match recording {
                // A graph cannot wait for what is outside of it.
                Some(_) => return Ok(()),
                None => stream.wait(found)?,
            }
        }
        if let Some(recording) = recording {
            recording.give(graph.clone())?;
        }
        let address = |it: &Option<Buffer>| it.as_ref().map(Buffer::address);
        [tensors.block_lists, tensors.tile_lists] = buffers.each_ref().map(address);
        Ok(())
    }
}

/// The functions of a call: a mask, a score, and the tensors of both; those of the mask come first,
/// each in the order in which its function names them.
#[derive(Default)]
pub(crate) struct Rules<'py> {
    functions: [Option<Function>; 2],
    captured: Vec<Named<'py>>,
    blocks: Option<Bound<'py, Blocks>>,
}

/// The tuple that Python passes for [`Rules`].
type Given<'py> = (
    Option<PyRef<'py, Rule>>,
    Option<PyRef<'py, Rule>>,
    Bound<'py, PyTuple>,
    Option<Bound<'py, Blocks>>,
);

impl<'py> Rules<'py> {
    /// Reads a mask or None, a score or None, a tuple of tensors, and the blocks of the mask or None.
    pub(crate) fn read(given: Option<&Bound<'py, PyTuple>>) -> PyResult<Self> {
        let Some(given) = given else { return Ok(Rules::default()) };
        let (mask, score, tensors, blocks) = given.extract::<Given<'py>>()?;
        let functions = [mask, score].map(|rule| rule.map(|rule| rule.0));
        for (function, kind) in functions.iter().zip(Kind::ALL) {
            if let Some(function) = function.filter(|function| function.kind() != kind) {
                let (name, expected) = (function.name(), kind.name());
                return Err(PyValueError::new_err(format!("{name} is no {expected}")));
            }
        }
        let specs: Vec<&TensorSpec> =
            functions.iter().flatten().flat_map(|function| function.tensors()).collect();
        if specs.len() != tensors.len() {
            let (given, expected) = (tensors.len(), specs.len());
            let text = format!("{given} tensors for functions, expected {expected}");
            return Err(PyValueError::new_err(text));
        }
        let captured = specs.into_iter().zip(tensors.iter());
        let captured = captured.map(|(spec, tensor)| (spec.name.as_str(), Some(tensor))).collect();
        Ok(Rules { functions, captured, blocks })
    }

    /// Returns the tensors of a call followed by those of its functions.
    pub(crate) fn among(&self, tensors: &[Named<'py>]) -> Vec<Named<'py>> {
        tensors.iter().chain(&self.captured).cloned().collect()
    }

    /// Returns whether the call has no functions.
    pub(crate) fn is_empty(&self) -> bool {
        self.functions == [None, None]
    }

    /// Reads the tensors of the functions with `read`.
    pub(crate) fn captured(
        &self,
        read: impl Fn(&Bound<'py, PyAny>, &str) -> PyResult<Memory>,
    ) -> PyResult<Captured> {
        let memory = |(name, tensor): &Named<'py>| match tensor {
            Some(tensor) => read(tensor, name),
            None => Err(PyTypeError::new_err(format!("{name} is missing"))),
        };
        let tensors = self.captured.iter().map(memory).collect::<PyResult<_>>()?;
        let blocks = self.blocks.clone().map(Bound::unbind);
        Ok(Captured { functions: self.functions, tensors, blocks })
    }
}

/// The functions of a call with the memory of the tensors that they load from.
#[derive(Debug, Default)]
pub(crate) struct Captured {
    functions: [Option<Function>; 2],
    tensors: Vec<Memory>,
    blocks: Option<Py<Blocks>>,
}

impl Captured {
    /// Checks the tensors and adds the functions to a problem whose first tensor is on `place`.
    pub(crate) fn join(&self, problem: &mut Problem, place: Place, first: &str) -> PyResult<()> {
        for (spec, memory) in self.each() {
            check(spec, memory)?;
            memory.on(&spec.name, place, first)?;
        }
        let [mask, score] = self.functions;
        problem.mask.function = mask;
        problem.scores.function = score;
        Ok(())
    }

    /// Pairs each tensor with what its function expects of it.
    fn each(&self) -> impl Iterator<Item = (&'static TensorSpec, &Memory)> {
        let specs = self.functions.into_iter().flatten().flat_map(|function| function.tensors());
        specs.zip(&self.tensors)
    }

    /// Returns the tensors in the form that the GPU library takes.
    pub(crate) fn on_device(&self) -> CapturedTensors {
        let mut captured = CapturedTensors::default();
        let of_mask = self.functions[0].map_or(0, |mask| mask.tensors().len());
        let places = captured.mask.iter_mut().take(of_mask).chain(&mut captured.score);
        for (to, memory) in places.zip(&self.tensors) {
            let (mut extents, mut strides) = ([1; TensorSpec::MOST_DIMENSIONS], [0; _]);
            for (index, (size, stride)) in dimensions(memory).enumerate() {
                // [`check`] has bounded the sizes and excluded negative strides.
                (extents[index], strides[index]) = (size as u32, stride as u64);
            }
            *to = Some(CapturedTensor { address: DeviceAddress(memory.address), extents, strides });
        }
        captured
    }

    /// Returns whether no function loads from a tensor.
    pub(crate) fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Returns the block lists of the mask, if the caller keeps them.
    pub(crate) fn blocks(&self) -> Option<&Blocks> {
        self.blocks.as_ref().map(Py::get)
    }

    /// Copies the tensors for the CPU back end.
    ///
    /// # Safety
    ///
    /// They must be in host memory that stays as it is meanwhile.
    pub(crate) unsafe fn on_host(&self) -> Vec<HostTensor> {
        // SAFETY: the caller's promise.
        self.each().map(|(spec, memory)| unsafe { copy(spec, memory) }).collect()
    }
}

/// Copies a checked tensor.
///
/// # Safety
///
/// It must be in host memory that stays as it is meanwhile.
unsafe fn copy(spec: &TensorSpec, memory: &Memory) -> HostTensor {
    let (extents, strides): (Vec<usize>, Vec<usize>) = dimensions(memory).unzip();
    let last: usize = extents.iter().zip(&strides).map(|(size, stride)| (size - 1) * stride).sum();
    let count = (last + 1) * spec.stored.bytes();
    // SAFETY: the caller's promise, up to the last element.
    let bytes = unsafe { std::slice::from_raw_parts(memory.address as *const u8, count) };
    HostTensor::new(&spec.name, spec.stored, &extents, bytes.to_vec()).with_strides(&strides)
}

/// Returns the sizes and strides of a checked tensor; a scalar has one dimension.
fn dimensions(memory: &Memory) -> impl Iterator<Item = (usize, usize)> {
    let count = memory.dimensions.max(1);
    let both = memory.sizes.into_iter().zip(memory.strides).take(count);
    both.map(|(size, stride)| (size as usize, if size > 1 { stride as usize } else { 0 }))
}

/// Refuses a tensor that does not match what its function declares.
fn check(spec: &TensorSpec, memory: &Memory) -> PyResult<()> {
    let TensorSpec { name, stored, rank } = spec;
    if stored_as(memory.element) != Some(*stored) {
        return Err(PyTypeError::new_err(format!(
            "{name} has element type {}, expected {}",
            memory.element,
            stored.name()
        )));
    }
    if memory.dimensions.max(1) != *rank {
        let given = memory.dimensions;
        return Err(PyValueError::new_err(format!(
            "{name} has {given} dimensions, expected {rank}"
        )));
    }
    let beyond = |size: &i64| !(1..=i64::from(i32::MAX)).contains(size);
    if memory.sizes().iter().any(beyond) {
        return Err(PyValueError::new_err(format!(
            "{name} has shape {:?}, expected sizes from 1 to {}",
            memory.sizes(),
            i32::MAX
        )));
    }
    memory.forwards(name)
}

/// Returns the name that functions use for this element type.
fn stored_as(element: Element) -> Option<Stored> {
    let name = match element {
        Element::Float(DType::F32) => "f32",
        Element::Float(DType::F16) => "f16",
        Element::Float(DType::BF16) => "bf16",
        Element::I32 => "i32",
        Element::Other("int", 64) => "i64",
        Element::Other("uint", 8) => "u8",
        Element::Other("bool", 8) => "bool",
        _ => return None,
    };
    Stored::ALL.into_iter().find(|stored| stored.name() == name)
}
