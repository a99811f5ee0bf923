//! Opened devices, and the launches of checked calls on them: attention, its backward pass,
//! appending to a KV cache, and combining partial results.

use std::sync::Arc;

use cuda::{DeviceAddress, Stream};
use flashcore::gpu::{
    AppendProblem, AppendTensors, AttentionPlan, AttentionState, CombineProblem, CombineTensors,
    Gpu, RotaryTables, RotatedQueries, Tensors,
};
use flashcore::{DTypes, Descale, Descales, Error, Mask, Problem, Shape, Storage};
use pyo3::PyResult;
use pyo3::exceptions::PyValueError;

use crate::error::{is_of_device_memory, library, named};
use crate::gradient::Backward;
use crate::parts::Parts;
use crate::process::{lock, process};
use crate::request::{Request, address};
use crate::torch;
use crate::update::Update;
use crate::view::{Form, View, contiguous};

/// Waits for the kernels that are still being compiled: a thread inside the compiler while the
/// process ends would crash it.
pub(crate) fn finish_compiling() {
    let devices = lock(&process().devices).clone();
    for (_, gpu) in devices {
        gpu.finish_compiling();
    }
}

/// Returns the device of an ordinal, opening it at its first use.
pub(crate) fn device(ordinal: u32) -> PyResult<&'static Gpu> {
    let mut devices = lock(&process().devices);
    if let Some((_, gpu)) = devices.iter().find(|(found, _)| *found == ordinal) {
        return Ok(gpu);
    }
    process().call_driver()?;
    let gpu = Gpu::open(ordinal).map_err(|error| library(error.into()))?;
    let gpu: &'static Gpu = Box::leak(Box::new(gpu));
    devices.push((ordinal, gpu));
    Ok(gpu)
}

/// Launches attention on a stream; log-sum-exps are written to `lse` if it is given.
pub(crate) fn attend(
    gpu: &Gpu,
    stream: &Stream,
    request: &Request,
    problem: &Problem,
    output: &View,
    lse: Option<u64>,
) -> PyResult<Arc<AttentionPlan>> {
    let mut tensors = request.tensors(request.descales(problem)?, output, lse);
    with_lists(gpu, stream, request, problem, &mut tensors)?;
    let attended = with_room(|| gpu.attend(stream, problem, &tensors));
    let [query, key, value, ..] = *request.names();
    attended.map_err(|error| named(error, &[("query", query), ("key", key), ("value", value)]))
}

/// Adds the cached block lists of the call's mask function, if any, to its tensors.
fn with_lists(
    gpu: &Gpu,
    stream: &Stream,
    request: &Request,
    problem: &Problem,
    tensors: &mut Tensors,
) -> PyResult<()> {
    let Some(blocks) = request.captured.blocks() else { return Ok(()) };
    let plan = gpu.attention(problem, tensors).map_err(library)?;
    blocks.join(gpu, stream, &plan, tensors).map_err(library)
}

/// Launches the backward pass of attention on a stream.
pub(crate) fn differentiate(
    gpu: &Gpu,
    stream: &Stream,
    call: &Backward,
    problem: &Problem,
) -> PyResult<Arc<AttentionPlan>> {
    let mut tensors = call.tensors();
    with_lists(gpu, stream, &call.request, problem, &mut tensors)?;
    with_room(|| gpu.attend(stream, problem, &tensors)).map_err(library)
}

/// Launches a call: once more, if the device has no memory left for its workspace until PyTorch gives
/// back what it keeps for later tensors. Workspaces are allocated before anything is launched.
fn with_room<T>(launch: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
    match launch() {
        Err(error) if is_of_device_memory(&error) && torch::give_memory_back() => launch(),
        launched => launched,
    }
}

/// Launches an append to a KV cache on a stream: rotated queries are written to `rotated`, the new
/// lengths to `after`.
pub(crate) fn append(
    gpu: &Gpu,
    stream: &Stream,
    update: &Update,
    rotated: Option<u64>,
    after: u64,
) -> PyResult<()> {
    let all = appended(update)?;
    let problem = append_problem(update, &all);
    let on_device = |view: &View| view.on_device(update.key_cache.address);
    let tensors = AppendTensors {
        key_lengths: Some(DeviceAddress(update.lengths.address)),
        lengths_after: Some(DeviceAddress(after)),
        new_starts: address(update.key_starts.as_ref()),
        batch_index: address(update.entries.as_ref()),
        block_table: address(update.pages.as_ref()),
        key_descale: update.descales[0].as_ref().map(|(_, view)| on_device(view)),
        value_descale: update.descales[1].as_ref().map(|(_, view)| on_device(view)),
        rotary: update.rotary.as_ref().map(|rotary| RotaryTables {
            cosines: DeviceAddress(rotary.cosines.address),
            sines: DeviceAddress(rotary.sines.address),
            starts: address(rotary.positions.as_ref()),
        }),
        queries: rotated.filter(|_| problem.rotated_queries).map(|rotated| {
            let form = update.query.form;
            let form = Form { strides: contiguous(form.sizes), ..form };
            RotatedQueries {
                from: on_device(&update.query),
                to: on_device(&View { address: rotated, form }),
                starts: address(update.query_starts.as_ref()),
                lengths: None,
            }
        }),
        ..AppendTensors::new(all.each_ref().map(on_device))
    };
    let roles = [
        ("new key", "k"),
        ("new value", "v"),
        ("key", "k_cache"),
        ("value", "v_cache"),
        ("query", "q"),
        ("key descale", "k_descale"),
        ("value descale", "v_descale"),
    ];
    let appended = gpu.append(stream, &problem, &tensors);
    appended.map(drop).map_err(|error| named(error.into(), &roles))
}

/// Returns new keys, new values and their caches as the kernel takes them. It copies rows of f16 or
/// bf16 bit for bit, and rows of other types as words of 16 bits.
pub(crate) fn appended(update: &Update) -> PyResult<[View; 4]> {
    let all = [update.key, update.value, update.key_cache, update.value_cache];
    let dtype = update.key.form.dtype;
    let one_type = dtype.bytes() == 2 && all.iter().all(|view| view.form.dtype == dtype);
    if one_type || !update.is_copied() {
        return Ok(all);
    }
    let mut words = all;
    for (view, name) in words.iter_mut().zip(["k", "v", "k_cache", "v_cache"]) {
        *view = view.in_words().ok_or_else(|| {
            PyValueError::new_err(format!(
                "{name} has strides {:?}, expected even ones for 8 bits on a GPU",
                view.form.strides
            ))
        })?;
    }
    Ok(words)
}

/// Describes an append of [`appended`] tensors.
pub(crate) fn append_problem(
    update: &Update,
    [key, _, key_cache, value_cache]: &[View; 4],
) -> AppendProblem {
    let [entries, page, shared, dim] = key_cache.form.sizes.map(|size| size as usize);
    let [_, query_rows, heads, _] = update.query.form.sizes.map(|size| size as usize);
    let rotary = update.rotary.as_ref();
    // The kernel gives queries successive positions exactly where the mask hides something.
    let mask = if rotary.is_some_and(|it| it.advancing) { Mask::CAUSAL } else { Mask::NONE };
    let queries = match &update.query_starts {
        Some(_) => Storage::Packed(query_rows),
        None => Storage::Padded,
    };
    let keys = match &update.pages {
        Some(table) => {
            Storage::Paged { size: page, columns: table.sizes[1] as usize, pages: entries }
        }
        None => Storage::Entries(entries),
    };
    let mut cache = Problem::new(update.sequences, heads, update.most_queries, dim)
        .with_kv_heads(shared)
        .with_key_length(update.room)
        .with_value_head_dim(value_cache.form.sizes[3] as usize)
        .with_mask(mask)
        .with_storage(queries, keys);
    cache.dtypes = DTypes {
        key: key_cache.form.dtype,
        value: value_cache.form.dtype,
        ..DTypes::inputs(key.form.dtype)
    };
    let descale = |at: usize| update.descales[at].map_or(Descale::None, |(descale, _)| descale);
    cache.descales = Descales { query: Descale::None, key: descale(0), value: descale(1) };
    // No sequence gets more rows than it has room for.
    let mut problem = AppendProblem::new(cache, update.most_new.min(update.room).max(1));
    problem.new_rows = key.form.sizes[1] as usize;
    problem.packed_new = update.key_starts.is_some();
    if let Some(rotary) = rotary {
        let (positions, dim) = rotary.sizes();
        problem = problem.with_rotary(dim, rotary.interleaved, positions);
        // Without queries there is nothing to rotate.
        problem.rotated_queries = query_rows > 0;
    }
    problem
}

/// Launches the combination of partial results on a stream; `lse` is stored as (batch, heads,
/// length).
pub(crate) fn combine(
    gpu: &Gpu,
    stream: &Stream,
    parts: &Parts,
    output: &View,
    lse: &View,
) -> PyResult<()> {
    let form = &parts.outputs[0].form;
    let [batch, length, heads, dim] = form.sizes.map(|size| size as usize);
    let problem = CombineProblem {
        parts: parts.outputs.len(),
        shape: Shape::new(batch, length, heads, dim),
        partial: form.dtype,
        output: parts.dtype,
    };
    let state = |output: &View, lse: &View| AttentionState {
        output: output.on_device(output.address),
        lse: lse.on_device(lse.address),
    };
    let part = |at: usize| state(&parts.outputs[at], &parts.lses[at]);
    // All parts are equally far apart: the first two determine the stride between parts.
    let first = [part(0), part(usize::from(problem.parts > 1))];
    let roles = [
        ("partial output", parts.name),
        ("output", "out"),
        ("second output", "out_b"),
        ("second log-sum-exp", "lse_b"),
    ];
    CombineTensors::pair(&problem, first, state(output, lse))
        .and_then(|tensors| gpu.combine(stream, &problem, &tensors))
        .map(drop)
        .map_err(|error| named(error.into(), &roles))
}
