//! Sequences, caches and parts on devices: all that is asked of the library's GPU side for them.

use std::sync::{Arc, Mutex};

use cuda::{DeviceAddress, Recording, RelaxedCapture, Stream, StreamIdentity};
use flashcore::gpu::{
    AppendPlan, AppendSize, AppendTensors, AttentionState, DeviceTensor, GpuError, MergePlan,
    MergeSize, MergeTensors, RotarySize, RotaryTables, ServingPlan, ServingSize, ServingTensors,
    TurnedQueries, prefill,
};
use flashcore::{DType, Mask, Problem, Shape, Strides};
use pyo3::PyErr;
use pyo3::PyResult;
use pyo3::exceptions::{PyNotImplementedError, PyValueError};

use super::parts::Parts;
use super::request::Request;
use super::update::Update;
use crate::error;
use crate::gpu::{Device, lock};
use crate::plans::Plans;
use crate::view::{self, Convention, Form, Memory, View};

/// The plans of a device.
pub(crate) struct Served {
    attention: Plans<Key, Entry>,
    appending: Plans<AppendKey, Mutex<AppendPlan>>,
    merging: Plans<MergeSize, Mutex<MergePlan>>,
}

/// The plans of attention that a device keeps at most, but for those that a graph has captured:
/// each holds some megabytes of the device.
const ATTENTION: usize = 64;

/// The other plans hold nothing there.
const OTHERS: usize = 1024;

impl Served {
    pub(crate) fn new() -> Self {
        Served {
            attention: Plans::new(ATTENTION, |_, entry| Arc::strong_count(&entry.graph) > 1),
            appending: Plans::new(OTHERS, |_, _| false),
            merging: Plans::new(OTHERS, |_, _| false),
        }
    }
}

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
    /// Whether tensors lie as the prefill kernel wants them.
    walkable: bool,
    stream: Option<StreamIdentity>,
    capture: Option<u64>,
}

impl Key {
    /// The size alone.
    fn new(size: &ServingSize) -> Self {
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
            walkable: false,
            stream: None,
            capture: None,
        }
    }
}

/// What a plan of appending depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct AppendKey {
    serving: Key,
    new: [usize; 2],
    packed: bool,
    rotary: Option<RotarySize>,
}

/// A plan of attention.
pub(crate) struct Entry {
    pub(crate) problem: Problem,
    pub(crate) configuration: String,
    pub(crate) reason: String,
    plan: Mutex<ServingPlan>,
    /// Where log-sum-exps go that nobody asked for.
    unread: DeviceAddress,
    /// A graph that captured it holds another one.
    graph: Arc<()>,
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
        size.problem.query_length = rounded(size.problem.query_length.max(1)).min(size.query_rows);
    }
    if request.key_starts.is_some() {
        size.problem.key_length = rounded(size.problem.key_length).min(size.key_rows);
    }
    // A tensor without elements is never read, and still has to be somewhere.
    size.entries = size.entries.max(1);
    let mut tensors = tensors(request, output);
    let entry = plan(device, size, &tensors, stream)?;
    tensors.lse = lse.map_or(entry.unread, DeviceAddress);
    let launched = lock(&entry.plan).launch(stream, &tensors);
    let roles = ["query", "key", "value"].into_iter().zip(request.names);
    launched.map_err(|error| named(error, roles))?;
    Ok(entry)
}

/// The plan of attention for a size, made the first time.
fn plan(
    device: &'static Device,
    size: ServingSize,
    tensors: &ServingTensors,
    stream: &Stream,
) -> PyResult<Arc<Entry>> {
    let recording = stream.recording().map_err(driver)?;
    let key = Key {
        stream: Some(stream.identity()),
        capture: recording.as_ref().map(Recording::id),
        walkable: prefill::check_tensors(&size, tensors).is_ok(),
        ..Key::new(&size)
    };
    let plans = &device.serving.attention;
    if let Some(entry) = plans.find(&key) {
        return Ok(entry);
    }
    let _relaxed = RelaxedCapture::begin().map_err(driver)?;
    let batch = if size.packed_queries { 1 } else { size.problem.batch };
    let rows = batch * size.query_rows * size.problem.query_heads;
    let plan = ServingPlan::for_tensors(&device.gpu, &size, tensors).map_err(refused)?;
    let entry = Entry {
        configuration: plan.kernel_name(),
        reason: plan.reason().to_owned(),
        plan: Mutex::new(plan),
        unread: device.unread(4 * rows as u64).map_err(error::library)?,
        problem: size.problem,
        graph: Arc::new(()),
    };
    if let Some(recording) = recording {
        recording.give(entry.graph.clone()).map_err(driver)?;
    }
    // Old ones are dropped under the relaxed mode.
    let (entry, _old) = plans.keep(key, entry);
    Ok(entry)
}

/// Puts appending on a stream: queries go to `turned`, new lengths to `after`.
pub(crate) fn append(
    device: &'static Device,
    update: &Update,
    stream: &Stream,
    turned: Option<u64>,
    after: u64,
) -> PyResult<()> {
    let size = append_size(update);
    let key = AppendKey {
        serving: Key::new(&size.serving),
        new: [size.new_tokens, size.new_rows],
        packed: size.packed_new,
        rotary: size.rotary,
    };
    let plans = &device.serving.appending;
    let plan = match plans.find(&key) {
        Some(plan) => plan,
        None => {
            let _relaxed = RelaxedCapture::begin().map_err(driver)?;
            let plan = AppendPlan::new(&device.gpu, &size).map_err(refused)?;
            plans.keep(key, Mutex::new(plan)).0
        }
    };
    let somewhere = update.key_cache.address;
    let tensors = AppendTensors {
        lengths: Some(DeviceAddress(update.lengths.address)),
        lengths_after: Some(DeviceAddress(after)),
        new_starts: list(&update.key_starts),
        entries: list(&update.entries),
        block_table: list(&update.pages),
        rotary: update.rotary.as_ref().map(|rotary| RotaryTables {
            cosines: DeviceAddress(rotary.cosines.address),
            sines: DeviceAddress(rotary.sines.address),
            starts: list(&rotary.positions),
        }),
        queries: turned.filter(|_| size.turned_queries).map(|turned| TurnedQueries {
            starts: list(&update.query_starts),
            ..TurnedQueries::new(
                tensor(&update.query, somewhere),
                tensor(&whole(turned, &update.query.form), somewhere),
            )
        }),
        ..AppendTensors::new(
            tensor(&update.key, somewhere),
            tensor(&update.value, somewhere),
            tensor(&update.key_cache, somewhere),
            tensor(&update.value_cache, somewhere),
        )
    };
    let launched = lock(&plan).launch(stream, &tensors);
    let roles = [
        ("new key", "k"),
        ("new value", "v"),
        ("key", "k_cache"),
        ("value", "v_cache"),
        ("query", "q"),
    ];
    launched.map_err(|error| named(error, roles.into_iter()))
}

fn append_size(update: &Update) -> AppendSize {
    let [entries, page, shared, dim] = update.key_cache.form.sizes.map(|size| size as usize);
    let [_, query_rows, heads, _] = update.query.form.sizes.map(|size| size as usize);
    let rotary = update.rotary.as_ref();
    // Where queries advance, the mask hides something.
    let mask = if rotary.is_some_and(|it| it.advancing) { Mask::Causal } else { Mask::None };
    let problem = Problem::new(update.sequences, heads, update.most_queries, dim)
        .with_kv_heads(shared)
        .with_key_length(update.room)
        .with_value_head_dim(update.value_cache.form.sizes[3] as usize)
        .with_dtype(update.key_cache.form.dtype)
        .with_mask(mask);
    let mut serving = ServingSize::new(problem);
    serving = match &update.pages {
        Some(pages) => serving.with_pages(page, pages.sizes[1] as usize, entries),
        None => serving.with_entries(entries),
    };
    if update.query_starts.is_some() {
        serving = serving.with_packed_queries(query_rows);
    }
    let rows = update.key.form.sizes[1] as usize;
    // No sequence gets more than all of them, nor than it has room for.
    let mut size = AppendSize::new(serving, rows.min(update.room).max(1));
    size.new_rows = rows;
    if update.key_starts.is_some() {
        size = size.with_packed_new(rows);
    }
    match rotary {
        None => size,
        Some(rotary) => {
            let (positions, dim) = rotary.sizes();
            let size = size.with_rotary(dim, rotary.interleaved, positions);
            // Without queries there are none to be turned.
            if query_rows == 0 { size } else { size.with_turned_queries() }
        }
    }
}

/// Puts merging on a stream; log-sum-exps go to (batch, heads, length).
pub(crate) fn merge(
    device: &'static Device,
    parts: &Parts,
    stream: &Stream,
    output: &View,
    lse: u64,
) -> PyResult<()> {
    let form = &parts.outputs[0].form;
    let [batch, length, heads, dim] = form.sizes.map(|size| size as usize);
    let size = MergeSize {
        parts: parts.outputs.len(),
        shape: Shape::new(batch, length, heads, dim),
        partial: form.dtype,
        output: parts.dtype,
    };
    let plans = &device.serving.merging;
    let plan = match plans.find(&size) {
        Some(plan) => plan,
        None => {
            let _relaxed = RelaxedCapture::begin().map_err(driver)?;
            let plan = MergePlan::new(&device.gpu, &size).map_err(refused)?;
            plans.keep(size, Mutex::new(plan)).0
        }
    };
    let state = |part: usize| {
        let [batch, length, heads] = parts.lses[part].strides.map(|stride| stride as usize);
        let strides = Strides { batch, length, heads };
        AttentionState {
            output: tensor(&parts.outputs[part], output.address),
            lse: DeviceTensor { address: DeviceAddress(parts.lses[part].address), strides },
        }
    };
    let first = state(0);
    let apart = |first: DeviceTensor, second: DeviceTensor, bytes: i64| {
        (second.address.0.wrapping_sub(first.address.0) as i64 / bytes) as isize
    };
    let (mut output_step, mut lse_step) = (0, 0);
    if size.parts > 1 {
        let second = state(1);
        if (second.output.strides, second.lse.strides) != (first.output.strides, first.lse.strides)
        {
            return Err(PyValueError::new_err(
                "out_b and lse_b have other strides than out_a and lse_a, expected the same",
            ));
        }
        output_step = apart(first.output, second.output, form.dtype.bytes() as i64);
        lse_step = apart(first.lse, second.lse, 4);
    }
    let strides = Strides { batch: heads * length, length: 1, heads: length };
    let tensors = MergeTensors {
        first,
        output_step,
        lse_step,
        result: AttentionState {
            output: tensor(output, output.address),
            lse: DeviceTensor { address: DeviceAddress(lse), strides },
        },
    };
    let launched = lock(&plan).launch(stream, &tensors);
    let roles = [("partial output", parts.name), ("output", "out")];
    launched.map_err(|error| named(error, roles.into_iter()))
}

/// The next number of three binary digits and zeros: few plans for lengths that change from call
/// to call, and little beyond what is asked.
fn rounded(length: usize) -> usize {
    let zeros = length.max(1).ilog2().saturating_sub(2);
    length.next_multiple_of(1 << zeros)
}

fn tensors(request: &Request, output: u64) -> ServingTensors {
    let somewhere = request.query.address;
    let (sizes, _) = request.results();
    let output = whole(output, &Form { sizes, ..request.query.form });
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
            tensor(&request.query, somewhere),
            tensor(&request.key, somewhere),
            tensor(&request.value, somewhere),
            tensor(&output, somewhere),
            DeviceAddress(0),
        )
    }
}

fn list(list: &Option<Memory>) -> Option<DeviceAddress> {
    list.as_ref().map(|list| DeviceAddress(list.address))
}

/// A tensor without gaps.
fn whole(address: u64, form: &Form) -> View {
    let strides = view::contiguous(Convention::FlashAttention, form.sizes);
    View { address, form: Form { strides, ..*form } }
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
fn named(error: GpuError, mut roles: impl Iterator<Item = (&'static str, &'static str)>) -> PyErr {
    match error {
        GpuError::Tensor { tensor, reason } => {
            let name = roles.find(|(role, _)| *role == tensor).map_or(tensor, |(_, name)| name);
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

fn driver(error: cuda::Error) -> PyErr {
    error::library(error.into())
}
