//! Plans over sequences on devices: made at the first call of a kind, found again at the next.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use cuda::{DeviceAddress, RelaxedCapture, Stream};
use flashcore::gpu::{DeviceTensor, GpuError, ServingPlan, ServingSize, ServingTensors};
use flashcore::{DType, Mask, Problem};
use pyo3::PyErr;
use pyo3::PyResult;
use pyo3::exceptions::{PyNotImplementedError, PyValueError};

use super::parts::Parts;
use super::request::Request;
use super::update::Update;
use crate::error;
use crate::gpu::{Device, Mixer, lock};
use crate::view::{self, Memory, View};

/// The plans of a device.
#[derive(Default)]
pub(crate) struct Plans {
    attention: Mutex<HashMap<Key, Arc<Entry>, BuildHasherDefault<Mixer>>>,
    /// Counts calls, to tell which plans were not used for long.
    clock: AtomicU64,
}

/// The plans that a device keeps at most, but for those that a graph has captured. Each holds
/// some megabytes of the device.
const CAPACITY: usize = 128;

/// What a plan depends on, and who may use it: launches of one plan share its workspace, so that a
/// stream has plans of its own, and so has a capture, whose graph may run beside any stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    numbers: [usize; 12],
    dtype: DType,
    mask: Mask,
    scale: u32,
    softcap: Option<u32>,
    flags: [bool; 5],
    stream: u64,
    capture: Option<u64>,
}

impl Key {
    fn new(size: &ServingSize, stream: u64, capture: Option<u64>) -> Self {
        let problem = &size.problem;
        let pages = size.pages.map_or((0, 0), |pages| (pages.size, pages.columns));
        Key {
            numbers: [
                problem.batch,
                problem.query_heads,
                problem.kv_heads,
                problem.query_length,
                problem.key_length,
                problem.head_dim,
                problem.value_head_dim,
                pages.0,
                pages.1,
                size.entries,
                size.query_rows,
                size.key_rows,
            ],
            dtype: problem.dtype,
            mask: problem.mask,
            scale: problem.scale().to_bits(),
            softcap: problem.softcap.map(f32::to_bits),
            flags: [
                problem.alibi,
                problem.sinks,
                size.packed_queries,
                size.packed_keys,
                size.slopes_of_sequences,
            ],
            stream,
            capture,
        }
    }
}

/// A plan of attention.
pub(crate) struct Entry {
    pub(crate) problem: Problem,
    pub(crate) configuration: String,
    pub(crate) reason: String,
    plan: Mutex<ServingPlan>,
    /// Where log-sum-exps go that nobody asked for.
    unread: DeviceAddress,
    used: AtomicU64,
}

impl Entry {
    /// The kernel's name, with which that of its configuration begins.
    pub(crate) fn kernel(&self) -> &str {
        self.configuration.split('_').next().unwrap_or_default()
    }
}

/// Puts attention over sequences on a stream; log-sum-exps go to `lse`, or nowhere.
pub(crate) fn attend(
    device: &'static Device,
    request: &Request,
    mut size: ServingSize,
    stream: &Stream,
    output: u64,
    lse: Option<u64>,
) -> PyResult<Arc<Entry>> {
    // Lists bound the sequences, so that a plan for longer ones serves as well.
    if request.query_starts.is_some() {
        size.problem.query_length = rounded(size.problem.query_length).min(size.query_rows);
    }
    if request.key_starts.is_some() {
        size.problem.key_length = rounded(size.problem.key_length).min(size.key_rows);
    }
    // A tensor without elements is never read, and still has to be somewhere.
    size.entries = size.entries.max(1);
    let tensors = tensors(request, output);
    let entry = device.serving.find(device, size, stream)?;
    let lse = lse.map_or(entry.unread, DeviceAddress);
    let tensors = ServingTensors { lse, ..tensors };
    lock(&entry.plan).launch(stream, &tensors).map_err(|error| named(error, request))?;
    Ok(entry)
}

/// Puts appending on a stream.
pub(crate) fn append(
    _device: &'static Device,
    _update: &Update,
    _stream: &Stream,
    _turned: Option<u64>,
    _lengths: u64,
) -> PyResult<()> {
    Err(PyNotImplementedError::new_err("k and v were given, expected None on a GPU"))
}

/// Puts merging on a stream.
pub(crate) fn merge(
    _device: &'static Device,
    _parts: &Parts,
    _stream: &Stream,
    _output: &View,
    _lse: u64,
) -> PyResult<()> {
    Err(PyNotImplementedError::new_err("parts are put together on the CPU alone"))
}

impl Plans {
    fn find(
        &self,
        device: &'static Device,
        size: ServingSize,
        stream: &Stream,
    ) -> PyResult<Arc<Entry>> {
        let failed = |error: cuda::Error| error::library(error.into());
        let key = Key::new(&size, stream.handle(), stream.capture_id().map_err(failed)?);
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        if let Some(entry) = lock(&self.attention).get(&key) {
            entry.used.store(now, Ordering::Relaxed);
            return Ok(entry.clone());
        }
        let _relaxed = RelaxedCapture::begin().map_err(failed)?;
        let rows = size.query_rows * size.problem.query_heads;
        let rows = if size.packed_queries { rows } else { rows * size.problem.batch };
        let plan = ServingPlan::new(&device.gpu, &size).map_err(refused)?;
        let entry = Arc::new(Entry {
            configuration: plan.kernel_name(),
            reason: plan.reason().to_owned(),
            plan: Mutex::new(plan),
            unread: device.unread(4 * rows as u64).map_err(error::library)?,
            problem: size.problem,
            used: AtomicU64::new(now),
        });
        let mut plans = lock(&self.attention);
        let mut old = Vec::new();
        let free = |key: &Key| key.capture.is_none();
        if plans.keys().filter(|key| free(key)).count() >= CAPACITY {
            // A quarter at a time: what is freed makes the host wait for the device.
            let mut ages: Vec<(u64, Key)> = plans
                .iter()
                .filter(|(key, _)| free(key))
                .map(|(key, entry)| (entry.used.load(Ordering::Relaxed), *key))
                .collect();
            ages.sort_by_key(|(used, _)| *used);
            let oldest = ages.into_iter().take(CAPACITY / 4);
            old.extend(oldest.filter_map(|(_, key)| plans.remove(&key)));
        }
        let entry = plans.entry(key).or_insert(entry).clone();
        drop(plans);
        // Under the relaxed mode, and not under the lock.
        drop(old);
        Ok(entry)
    }
}

/// The next number of three binary digits and zeros: few plans for lengths that change from call
/// to call, and little beyond what is asked.
fn rounded(length: usize) -> usize {
    let zeros = length.max(1).ilog2().saturating_sub(2);
    length.next_multiple_of(1 << zeros)
}

fn tensors(request: &Request, output: u64) -> ServingTensors {
    let query = tensor(&request.query, request.query.address);
    let mut written = request.query;
    let (sizes, _) = request.results();
    (written.address, written.form.sizes) = (output, sizes);
    written.form.strides = view::contiguous(view::Convention::FlashAttention, sizes);
    let list = |list: &Option<Memory>| list.as_ref().map(|list| DeviceAddress(list.address));
    ServingTensors {
        lengths: list(&request.key_lengths),
        left_padding: list(&request.left_padding),
        entries: list(&request.entries),
        query_starts: list(&request.query_starts),
        query_lengths: list(&request.query_lengths),
        key_starts: list(&request.key_starts),
        block_table: list(&request.pages),
        slopes: list(&request.slopes),
        sinks: list(&request.sinks),
        ..ServingTensors::new(
            query,
            tensor(&request.key, request.query.address),
            tensor(&request.value, request.query.address),
            tensor(&written, output),
            DeviceAddress(0),
        )
    }
}

/// A view as the library takes it. One without elements is never read, and is somewhere else.
fn tensor(view: &View, somewhere: u64) -> DeviceTensor {
    let empty = view.form.sizes.contains(&0);
    let address = DeviceAddress(if empty { somewhere } else { view.address });
    let mut strides = view.form.strides;
    for (stride, size) in strides.iter_mut().zip(view.form.sizes) {
        // The step to a second of what there is one of means nothing.
        if size <= 1 {
            *stride = 0;
        }
    }
    DeviceTensor { address, strides: view::strides(strides) }
}

/// An error about a tensor under the name that the caller gave it.
fn named(error: GpuError, request: &Request) -> PyErr {
    match error {
        GpuError::Tensor { tensor, reason } => {
            let name = ["query", "key", "value"].iter().position(|role| *role == tensor);
            let name = name.map_or(tensor, |at| request.names[at]);
            PyValueError::new_err(format!("{name} is not served on a GPU: {reason}"))
        }
        other => refused(other),
    }
}

/// What no kernel serves is no failure of the machine.
fn refused(error: GpuError) -> PyErr {
    match error {
        GpuError::Unsupported { .. } | GpuError::TooLarge { .. } => {
            PyNotImplementedError::new_err(error.to_string())
        }
        other => error::library(other.into()),
    }
}
