//! Attention over candle tensors in host memory.

use std::ops::Deref;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Storage};
use flashcore::serving;
use flashcore::{
    Backend, Backward, CpuBackend, Descales, E4M3, Elements, ElementsView, Inputs, Plan,
    Preference, RunOptions, Shape, Tensor, TensorView,
};

use crate::arguments::Call;
use crate::operation::Saved;
use crate::wrap;

/// Computes output and log-sum-exp.
pub(crate) fn attend(
    call: &Call,
    tensors: [(&CpuStorage, &Layout); 3],
) -> Result<(CpuStorage, Vec<f32>)> {
    let factors = factors(call);
    let given = Given::new(call, tensors, &factors)?;
    let (problem, inputs) = given.sequences.over(given.inputs()).map_err(wrap)?;
    let result = CpuBackend::new().run(&problem, inputs, &RunOptions::default()).map_err(wrap)?;
    Ok((storage(result.output)?, result.lse))
}

/// Computes the gradients of query, key and value.
pub(crate) fn differentiate(
    call: &Call,
    inputs: [&candle_core::Tensor; 3],
    saved: Saved<'_>,
) -> Result<[candle_core::Tensor; 3]> {
    let held = inputs.map(candle_core::Tensor::storage_and_layout);
    let [query, key, value] = held.each_ref().map(|(memory, of)| (host(memory), *of));
    let tensors = [(query.0?, query.1), (key.0?, key.1), (value.0?, value.1)];
    let factors = factors(call);
    let given = Given::new(call, tensors, &factors)?;
    let (problem, inputs_given) = given.sequences.over(given.inputs()).map_err(wrap)?;
    let layout = flashcore::Layout::contiguous(problem.output_shape()).map_err(wrap)?;
    let [output, output_gradient] =
        [saved.output, saved.output_gradient].map(candle_core::Tensor::storage_and_layout);
    let backward = Backward {
        inputs: inputs_given,
        output: view(host(&output.0)?, output.1, layout)?,
        lse: &numbers(saved.lse)?,
        output_gradient: view(host(&output_gradient.0)?, output_gradient.1, layout)?,
        lse_gradient: None,
    };
    let options = RunOptions::default();
    let gradients = CpuBackend::new().run_backward(&problem, backward, &options).map_err(wrap)?;
    let like = |gradient: Tensor, of: &candle_core::Tensor| -> Result<_> {
        Ok(crate::tensor(Storage::Cpu(storage(gradient)?), of.shape()))
    };
    let [query, key, value] = inputs;
    Ok([like(gradients.query, query)?, like(gradients.key, key)?, like(gradients.value, value)?])
}

/// Locks the memory of a call's descale factors, and returns it with candle's layout and ours.
fn factors(
    call: &Call,
) -> Descales<Option<(impl Deref<Target = Storage>, &Layout, flashcore::Layout)>> {
    call.descales.each_ref().map(|factors| {
        let (factors, layout) = factors.as_ref()?;
        let (memory, of) = factors.storage_and_layout();
        Some((memory, of, *layout))
    })
}

/// A call with its tensors, where they lie, and its lists.
struct Given<'a> {
    query: TensorView<'a>,
    key: TensorView<'a>,
    value: TensorView<'a>,
    slopes: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    descales: Descales<Option<TensorView<'a>>>,
    sequences: serving::Sequences,
}

impl<'a> Given<'a> {
    fn new(
        call: &Call,
        [query, key, value]: [(&'a CpuStorage, &Layout); 3],
        factors: &'a Descales<Option<(impl Deref<Target = Storage>, &Layout, flashcore::Layout)>>,
    ) -> Result<Self> {
        let Call { problem, layouts, sequences, .. } = call;
        let queries = sequences.queries.read(problem.batch, layouts[0].shape())?;
        let keys = sequences.keys.read(problem.batch, layouts[1].shape())?;
        let descales = factors.each_ref().try_map(|factors| {
            let Some((memory, of, layout)) = factors else { return Ok(None) };
            view(host(memory)?, of, *layout).map(Some)
        })?;
        Ok(Given {
            query: view(query.0, query.1, layouts[0])?,
            key: view(key.0, key.1, layouts[1])?,
            value: view(value.0, value.1, layouts[2])?,
            slopes: call.slopes.as_ref().map(numbers).transpose()?,
            sinks: call.sinks.as_ref().map(numbers).transpose()?,
            descales,
            sequences: serving::Sequences::new(problem.clone(), queries, keys).map_err(wrap)?,
        })
    }

    fn inputs(&self) -> Inputs<'_> {
        Inputs {
            slopes: self.slopes.as_deref(),
            sinks: self.sinks.as_deref(),
            descales: self.descales,
            ..Inputs::new(self.query, self.key, self.value)
        }
    }
}

/// Computes output and log-sum-exp of combined parts. Outputs must be contiguous.
pub(crate) fn combine(
    shape: Shape,
    outputs: &[&candle_core::Tensor],
    lses: &[&candle_core::Tensor],
) -> Result<(Storage, Storage)> {
    let layout = flashcore::Layout::contiguous(shape).map_err(wrap)?;
    let held: Vec<_> = outputs.iter().map(|output| output.storage_and_layout()).collect();
    let lses = lses.iter().map(|lse| numbers(lse)).collect::<Result<Vec<_>>>()?;
    let parts = held.iter().zip(&lses);
    let parts = parts.map(|((memory, of), lse)| Ok((view(host(memory)?, of, layout)?, &lse[..])));
    let (output, lse) = serving::combine(&parts.collect::<Result<Vec<_>>>()?).map_err(wrap)?;
    Ok((Storage::Cpu(storage(output)?), Storage::Cpu(CpuStorage::F32(lse))))
}

pub(crate) fn plan(call: &Call) -> Result<Plan> {
    let arrangement = call.arrangement()?;
    // The tensors are in host memory, so a preference for another back end cannot apply to them.
    let (cpu, preference) = (CpuBackend::new(), Preference::default());
    Plan::among(&[&cpu], &call.problem, &arrangement, &preference).map_err(wrap)
}

/// Returns the memory of a tensor, which must be on the host.
fn host(memory: &Storage) -> Result<&CpuStorage> {
    match memory {
        Storage::Cpu(memory) => Ok(memory),
        _ => candle_core::bail!("attention: a tensor is not in host memory"),
    }
}

fn numbers(tensor: &candle_core::Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

/// Converts the elements of a contiguous FlashCore tensor to candle's storage.
fn storage(tensor: Tensor) -> Result<CpuStorage> {
    Ok(match tensor.into_elements() {
        Elements::F32(elements) => CpuStorage::F32(elements),
        Elements::F16(elements) => CpuStorage::F16(elements),
        Elements::BF16(elements) => CpuStorage::BF16(elements),
        other => candle_core::bail!("candle has no storage for {} on the CPU", other.dtype()),
    })
}

/// Returns where a tensor begins in its memory. A slice of a tensor without elements would begin
/// behind the end.
pub(crate) fn begin(of: &Layout) -> usize {
    if of.shape().elem_count() == 0 { 0 } else { of.start_offset() }
}

/// Borrows a candle tensor as a view of ours.
fn view<'a>(
    storage: &'a CpuStorage,
    of: &Layout,
    layout: flashcore::Layout,
) -> Result<TensorView<'a>> {
    let begin = begin(of);
    let elements: ElementsView<'a> = match storage {
        CpuStorage::F32(all) => all[begin..].into(),
        CpuStorage::F16(all) => all[begin..].into(),
        CpuStorage::BF16(all) => all[begin..].into(),
        CpuStorage::F8E4M3(all) => bytemuck::cast_slice::<_, E4M3>(&all[begin..]).into(),
        other => candle_core::bail!("attention takes no {:?}", other.dtype()),
    };
    TensorView::new(layout, elements).map_err(wrap)
}
