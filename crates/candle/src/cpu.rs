//! Attention on candle tensors in host memory.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result};
use flashcore::serving::{self, Placement};
use flashcore::{
    Backend, CpuBackend, Elements, Inputs, Plan, Preference, RunOptions, Shape, Tensor,
};

use crate::arguments::Call;
use crate::{Sequences, wrap};

/// Output and log-sum-exp.
pub(crate) fn attend(
    call: &Call,
    [query, key, value]: [(&CpuStorage, &Layout); 3],
) -> Result<(CpuStorage, Vec<f32>)> {
    let numbers = |tensor: &candle_core::Tensor| tensor.flatten_all()?.to_vec1::<f32>();
    let slopes = call.slopes.as_ref().map(numbers).transpose()?;
    let sinks = call.sinks.as_ref().map(numbers).transpose()?;
    let inputs = |query, key, value| Inputs {
        slopes: slopes.as_deref(),
        sinks: sinks.as_deref(),
        ..Inputs::new(query, key, value)
    };
    let (backend, options) = (CpuBackend::new(), RunOptions::default());
    let layouts = &call.layouts;
    let query = tensor(query, layouts.query)?;
    let result = match &call.sequences {
        None => {
            let (key, value) = (tensor(key, layouts.key)?, tensor(value, layouts.value)?);
            backend.run(&call.problem, inputs(&query, &key, &value), &options)
        }
        Some(Sequences { queries, keys }) => {
            let count = call.problem.batch;
            let queries = queries.read(count, layouts.query.shape())?;
            let keys = keys.read(count, layouts.key.shape())?;
            let key = gather(key, layouts.key, &keys)?;
            let value = gather(value, layouts.value, &keys)?;
            let keys = packed(&keys);
            let sequences = serving::Sequences::new(call.problem.clone(), queries, keys);
            let inputs = inputs(&query, &key, &value);
            backend.run_sequences(&sequences.map_err(wrap)?, inputs, &options)
        }
    };
    let result = result.map_err(wrap)?;
    let output = match result.output.into_elements() {
        Elements::F32(elements) => CpuStorage::F32(elements),
        Elements::F16(elements) => CpuStorage::F16(elements),
        Elements::BF16(elements) => CpuStorage::BF16(elements),
        other => candle_core::bail!("candle has no storage for {} on the CPU", other.dtype()),
    };
    Ok((output, result.lse))
}

pub(crate) fn plan(call: &Call) -> Result<Plan> {
    let Call { problem, layouts, .. } = call;
    // The tensors are here, so no preference for another back end can be meant for them.
    Plan::among(&[&CpuBackend::new()], problem, layouts, &Preference::default()).map_err(wrap)
}

/// A tensor of ours with the elements of one of candle's.
fn tensor((storage, of): (&CpuStorage, &Layout), layout: flashcore::Layout) -> Result<Tensor> {
    let elements = of.start_offset()..of.start_offset() + layout.span();
    let elements: Elements = match storage {
        CpuStorage::F32(all) => all[elements].to_vec().into(),
        CpuStorage::F16(all) => all[elements].to_vec().into(),
        CpuStorage::BF16(all) => all[elements].to_vec().into(),
        other => candle_core::bail!("attention takes no {:?}", other.dtype()),
    };
    Tensor::new(layout, elements).map_err(wrap)
}

/// The rows of all sequences, one after the other: a cache may be much larger than they are.
fn gather(
    (storage, of): (&CpuStorage, &Layout),
    layout: flashcore::Layout,
    placement: &Placement,
) -> Result<Tensor> {
    let begin = of.start_offset();
    let elements: Elements = match storage {
        CpuStorage::F32(all) => rows(&all[begin..], layout, placement).into(),
        CpuStorage::F16(all) => rows(&all[begin..], layout, placement).into(),
        CpuStorage::BF16(all) => rows(&all[begin..], layout, placement).into(),
        other => candle_core::bail!("attention takes no {:?}", other.dtype()),
    };
    let Shape { heads, dim, .. } = layout.shape();
    let rows = (0..placement.sequences()).map(|sequence| placement.length(sequence)).sum();
    let shape = Shape::new(1, rows, heads, dim);
    Tensor::new(flashcore::Layout::contiguous(shape).map_err(wrap)?, elements).map_err(wrap)
}

fn rows<T: Copy>(elements: &[T], layout: flashcore::Layout, placement: &Placement) -> Vec<T> {
    let Shape { heads, dim, .. } = layout.shape();
    let mut rows = Vec::new();
    for sequence in 0..placement.sequences() {
        for position in 0..placement.length(sequence) {
            let (entry, row) = placement.locate(sequence, position);
            for head in 0..heads {
                rows.extend_from_slice(&elements[layout.offset(entry, row, head)..][..dim]);
            }
        }
    }
    rows
}

/// Where the rows are that were gathered.
fn packed(placement: &Placement) -> Placement {
    let mut starts = vec![0];
    for sequence in 0..placement.sequences() {
        starts.push(starts[sequence] + placement.length(sequence));
    }
    Placement::packed(starts)
}
