//! Masks and scores as functions: what a call gives of them, and the tensors that they load from.

use std::sync::{Arc, Mutex};

use cuda::{Buffer, DeviceAddress, Event, RelaxedCapture, Stream};
use flashcore::function::{Function, HostTensor, Kind, Stored, TensorSpec};
use flashcore::gpu::{AttentionPlan, CapturedTensor, CapturedTensors, Gpu, Tensors};
use flashcore::plan::Workspace;
use flashcore::{DType, Problem, family};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::error;
use crate::library::Named;
use crate::process::lock;
use crate::view::{Element, Memory, Place};

/// A mask or a score as a function, from its text.
#[pyclass(frozen, name = "Rule", module = "flashcore._flashcore")]
pub(crate) struct Rule(Function);

#[pymethods]
impl Rule {
    #[new]
    #[pyo3(signature = (text, /))]
    fn new(text: &str) -> PyResult<Self> {
        text.parse().map(Rule).map_err(error::value)
    }

    /// The text, which is the same for the same function.
    #[getter]
    fn text(&self) -> &'static str {
        self.0.text()
    }
}

/// Lists of the blocks that a mask leaves, found on the device at the first launch with it, from what its
/// tensors hold then.
#[pyclass(frozen, weakref, name = "Blocks", module = "flashcore._flashcore")]
#[derive(Default)]
pub(crate) struct Blocks {
    lists: Mutex<Vec<Lists>>,
}

/// Lists in the memory of a device.
struct Lists {
    ordinal: u32,
    /// What they were made for.
    launches: family::Choice,
    /// Of key blocks, and of tiles.
    buffers: [Option<Buffer>; 2],
    /// Passed when they are there.
    found: Event,
    /// A graph that captured a launch holds another one.
    graph: Arc<()>,
}

impl Drop for Lists {
    fn drop(&mut self) {
        // Somebody may still be writing or reading them: memory is given back when a device has done
        // what was asked of it, unless a graph may launch with them again at any time.
        if Arc::strong_count(&self.graph) > 1 {
            self.buffers.iter_mut().for_each(|buffer| std::mem::forget(buffer.take()));
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
    /// Gives a call the lists of key blocks and of tiles, found the first time. Where a graph is being
    /// captured and they are not there yet, the plan finds them by itself each time the graph runs.
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
        let index = match known {
            Some(index) => index,
            None if recording.is_some() => return Ok(()),
            None => {
                let buffers = [Workspace::BlockLists, Workspace::TileLists].map(|workspace| {
                    let bytes = launches.found_bytes(workspace)?;
                    Some(Buffer::new(gpu.device(), bytes))
                });
                let [blocks, tiles] = buffers.map(Option::transpose);
                let buffers = [blocks?, tiles?];
                let address = |it: &Option<Buffer>| it.as_ref().map(Buffer::address);
                [tensors.block_lists, tensors.tile_lists] = buffers.each_ref().map(address);
                plan.prepare(stream, tensors)?;
                let found = Event::new(gpu.device())?;
                found.record(stream)?;
                let (launches, graph) = (launches.clone(), Arc::new(()));
                lists.push(Lists { ordinal, launches, buffers, found, graph });
                lists.len() - 1
            }
        };
        let Lists { buffers, graph, found, .. } = &lists[index];
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

/// The functions of a call: a mask, a score, and the tensors of both, those of the mask first, each
/// in the order in which its function names them.
#[derive(Default)]
pub(crate) struct Rules<'py> {
    functions: [Option<Function>; 2],
    captured: Vec<Named<'py>>,
    blocks: Option<Bound<'py, Blocks>>,
}

/// The same as Python gives them.
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

    /// The tensors of a call and those of its functions.
    pub(crate) fn among(&self, tensors: &[Named<'py>]) -> Vec<Named<'py>> {
        tensors.iter().chain(&self.captured).cloned().collect()
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.functions == [None, None]
    }

    /// The functions with what their tensors are: `read` says it of one.
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

/// Functions with the tensors that they load from, in memory.
#[derive(Debug, Default)]
pub(crate) struct Captured {
    functions: [Option<Function>; 2],
    tensors: Vec<Memory>,
    blocks: Option<Py<Blocks>>,
}

impl Captured {
    /// Puts the functions into a problem whose first tensor is in this memory.
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

    /// Each tensor with what its function expects.
    fn each(&self) -> impl Iterator<Item = (&'static TensorSpec, &Memory)> {
        let specs = self.functions.into_iter().flatten().flat_map(|function| function.tensors());
        specs.zip(&self.tensors)
    }

    /// The tensors as a device takes them.
    pub(crate) fn on_device(&self) -> CapturedTensors {
        let mut captured = CapturedTensors::default();
        let of_mask = self.functions[0].map_or(0, |mask| mask.tensors().len());
        let places = captured.mask.iter_mut().take(of_mask).chain(&mut captured.score);
        for (to, memory) in places.zip(&self.tensors) {
            let (mut extents, mut strides) = ([1; TensorSpec::MOST_DIMENSIONS], [0; _]);
            for (index, (size, stride)) in dimensions(memory).enumerate() {
                // They were checked.
                (extents[index], strides[index]) = (size as u32, stride as u64);
            }
            *to = Some(CapturedTensor { address: DeviceAddress(memory.address), extents, strides });
        }
        captured
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// What is known of the blocks of the mask.
    pub(crate) fn blocks(&self) -> Option<&Blocks> {
        self.blocks.as_ref().map(Py::get)
    }

    /// Copies of the tensors, for the host.
    ///
    /// # Safety
    ///
    /// They must be in host memory that stays as it is meanwhile.
    pub(crate) unsafe fn on_host(&self) -> Vec<HostTensor> {
        // SAFETY: the caller's promise.
        self.each().map(|(spec, memory)| unsafe { copy(spec, memory) }).collect()
    }
}

/// A copy of a tensor that was checked.
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

/// The sizes and strides of a tensor that was checked; a single number has one dimension.
fn dimensions(memory: &Memory) -> impl Iterator<Item = (usize, usize)> {
    let count = memory.dimensions.max(1);
    let both = memory.sizes.into_iter().zip(memory.strides).take(count);
    both.map(|(size, stride)| (size as usize, if size > 1 { stride as usize } else { 0 }))
}

/// Refuses what is not what a function loads from.
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
    if memory.strides().iter().any(|stride| *stride < 0) {
        return Err(PyValueError::new_err(format!(
            "{name} has a negative stride, expected none: copy it"
        )));
    }
    Ok(())
}

/// What a function calls elements of this type.
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
