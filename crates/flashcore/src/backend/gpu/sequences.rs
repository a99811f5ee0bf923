//! Sequences in host memory put on the device, for the kernels that serve them.

use cuda::Buffer;

use super::Operands;
use crate::error::Error;
use crate::gpu::{DeviceAddress, DeviceTensor, Gpu, Lists, ServingSize, ServingTensors};
use crate::inputs::{InputLayouts, Inputs};
use crate::problem::Problem;
use crate::serving::{Placement, Sequences};
use crate::tensor::{Layout, Shape, Strides, Tensor};

/// Whether queries and tensors lie as all kernels over sequences want them.
pub(super) fn check(sequences: &Sequences, layouts: &InputLayouts) -> Result<(), String> {
    aligned_inputs(sequences.problem(), layouts)?;
    regular(sequences.queries())
}

/// What a plan is made for, for tensors of these layouts.
pub(super) fn size(sequences: &Sequences, layouts: &InputLayouts) -> ServingSize {
    let problem = sequences.problem();
    let (queries, keys) = (sequences.queries(), sequences.keys());
    let (query, key) = (layouts.query.shape(), layouts.key.shape());
    let longest = keys.ends().iter().copied().max().unwrap_or(0);
    let mut size = ServingSize::new(Problem { key_length: longest, ..problem.clone() });
    size.query_rows = query.length;
    if queries.starts().is_some() {
        size = size.with_packed_queries(query.length);
    }
    if let Some(pages) = keys.pages() {
        size.with_pages(pages.size(), pages.columns(), key.batch)
    } else if keys.starts().is_some() {
        size.with_packed_keys(key.length)
    } else {
        size.key_rows = key.length;
        size.with_entries(key.batch)
    }
}

pub(super) fn aligned_inputs(problem: &Problem, layouts: &InputLayouts) -> Result<(), String> {
    let tensors = [("query", layouts.query), ("key", layouts.key), ("value", layouts.value)];
    for (name, layout) in tensors {
        aligned(problem, layout.shape(), layout.strides())
            .map_err(|reason| format!("the {name} tensor: {reason}"))?;
    }
    Ok(())
}

/// Copies are of 16 bytes.
fn aligned(problem: &Problem, shape: Shape, strides: Strides) -> Result<(), String> {
    let dimensions = [
        ("length", shape.length, strides.length),
        ("heads", shape.heads, strides.heads),
        ("batch", shape.batch, strides.batch),
    ];
    for (name, size, stride) in dimensions {
        let bytes = stride.saturating_mul(problem.dtype.bytes());
        if size > 1 && !bytes.is_multiple_of(16) {
            return Err(format!("its {name} stride of {bytes} bytes is not a multiple of 16"));
        }
    }
    Ok(())
}

/// Queries are packed, or each sequence has the batch entry of its index.
fn regular(queries: &Placement) -> Result<(), String> {
    if !queries.left_padding().is_empty() {
        return Err("queries with left padding are not served".to_owned());
    }
    let in_order =
        (0..queries.sequences()).all(|sequence| queries.entry(sequence) == Some(sequence));
    match queries.starts().is_some() || in_order {
        true => Ok(()),
        false => Err("queries in batch entries of another order are not served".to_owned()),
    }
}

/// Whether each sequence has as many queries as its place has room for.
fn full(queries: &Placement, rows: usize) -> bool {
    match queries.starts() {
        Some(starts) => {
            let places = starts.windows(2).map(|pair| pair[1] - pair[0]);
            places.eq(queries.ends().iter().copied())
        }
        None => queries.ends().iter().all(|length| *length == rows),
    }
}

/// Sequences on the device.
pub(super) struct Placed {
    pub(super) size: ServingSize,
    pub(super) tensors: ServingTensors,
    /// What the tensors point to.
    pub(super) _lists: Vec<Buffer>,
}

/// Puts lists beside the tensors that are on the device already.
pub(super) fn place(
    gpu: &Gpu,
    sequences: &Sequences,
    inputs: Inputs<'_>,
    operands: &Operands,
) -> Result<Placed, Error> {
    let problem = sequences.problem();
    let (queries, keys) = (sequences.queries(), sequences.keys());
    let query = inputs.query.shape();
    let tensor = |address: DeviceAddress, tensor: &Tensor| DeviceTensor {
        address,
        strides: unit_strides(tensor.shape(), tensor.layout().strides()),
    };
    let output = Layout::contiguous(sequences.output_shape(query))?;
    let mut tensors = ServingTensors::new(
        tensor(operands.query.address(), inputs.query),
        tensor(operands.key.address(), inputs.key),
        tensor(operands.value.address(), inputs.value),
        DeviceTensor { address: operands.output.address(), strides: output.strides() },
        operands.lse.address(),
    );
    let mut lists = Lists::new(gpu);
    let mut size = size(sequences, &inputs.layouts());
    if let Some(starts) = queries.starts() {
        tensors.query_starts = Some(lists.numbers(starts)?);
    }
    if !full(queries, query.length) {
        tensors.query_lengths = Some(lists.numbers(queries.ends())?);
    }
    if let Some(pages) = keys.pages() {
        let table: Vec<usize> = pages.table().iter().map(|page| *page as usize).collect();
        tensors.block_table = Some(lists.numbers(&table)?);
    } else if let Some(starts) = keys.starts() {
        tensors.key_starts = Some(lists.numbers(starts)?);
    } else {
        let entries: Vec<usize> =
            (0..sequences.len()).filter_map(|sequence| keys.entry(sequence)).collect();
        tensors.entries = Some(lists.numbers(&entries)?);
    }
    tensors.lengths = Some(lists.numbers(keys.ends())?);
    if !keys.left_padding().is_empty() {
        tensors.left_padding = Some(lists.numbers(keys.left_padding())?);
    }
    if let Some(slopes) = inputs.slopes {
        size.slopes_of_sequences = slopes.len() > problem.query_heads;
        tensors.slopes = Some(lists.floats(slopes)?);
    }
    if let Some(sinks) = inputs.sinks {
        tensors.sinks = Some(lists.floats(sinks)?);
    }
    Ok(Placed { size, tensors, _lists: lists.into_buffers() })
}

/// A dimension of one has no stride to speak of.
fn unit_strides(shape: Shape, strides: Strides) -> Strides {
    Strides {
        batch: if shape.batch == 1 { 0 } else { strides.batch },
        length: if shape.length == 1 { 0 } else { strides.length },
        heads: if shape.heads == 1 { 0 } else { strides.heads },
    }
}
