//! Attention of few queries for each sequence over caches of any memory order, on Ampere and later.

use cuda::{Buffer, Stream};
use kernels::Decode;

use super::{Candidate, Launch, Operands};
use crate::error::Error;
use crate::gpu::decode::choose;
use crate::gpu::{
    Chip, Compilation, DecodePlan, DeviceAddress, DeviceTensor, Gpu, GpuError, Lists, ServingSize,
    ServingTensors,
};
use crate::inputs::{InputLayouts, Inputs};
use crate::problem::Problem;
use crate::serving::{Placement, Sequences};
use crate::tensor::{Layout, Shape, Strides, Tensor};

/// The kernel's name.
pub(crate) const NAME: &str = "decode";

/// Query rows for which it comes before kernels that read keys once for every tile of queries.
const FEW_ROWS: usize = 16;

pub(super) fn candidate(chip: &Chip, problem: &Problem, layouts: &InputLayouts) -> Candidate {
    let served = choose(chip, problem, false).and_then(|chosen| {
        aligned_inputs(problem, layouts)?;
        Ok(chosen)
    });
    super::candidate(
        NAME,
        served.map(|chosen| (chosen.configuration.name(), chosen.reason.to_owned())),
    )
}

/// The kernel for sequences of unequal lengths.
pub(super) fn candidate_of_sequences(
    chip: &Chip,
    sequences: &Sequences,
    layouts: &InputLayouts,
) -> Candidate {
    let problem = sequences.problem();
    let paged = sequences.keys().pages().is_some();
    let served = choose(chip, problem, paged).and_then(|chosen| {
        aligned_inputs(problem, layouts)?;
        regular(sequences.queries())?;
        Ok(chosen)
    });
    super::candidate(
        NAME,
        served.map(|chosen| (chosen.configuration.name(), chosen.reason.to_owned())),
    )
}

/// Whether it is the best kernel for a problem that it serves.
pub(super) fn comes_first(problem: &Problem) -> bool {
    let group = problem.query_heads / problem.kv_heads.max(1);
    problem.query_length.saturating_mul(group) <= FEW_ROWS
}

pub(super) fn configuration(chip: &Chip, problem: &Problem) -> Option<Decode> {
    choose(chip, problem, false).ok().map(|chosen| chosen.configuration)
}

fn aligned_inputs(problem: &Problem, layouts: &InputLayouts) -> Result<(), String> {
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

/// The kernel with its plan and its lists.
pub(super) struct Prepared {
    plan: DecodePlan,
    tensors: ServingTensors,
    /// What the tensors point to.
    _lists: Vec<Buffer>,
}

/// Prepares a launch over sequences, with a given number of teams or with as many as fill the GPU.
pub(super) fn prepare(
    gpu: &Gpu,
    sequences: &Sequences,
    inputs: Inputs<'_>,
    operands: &Operands,
    teams: Option<u32>,
) -> Result<Prepared, Error> {
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
    let longest = keys.ends().iter().copied().max().unwrap_or(0);
    let mut size = ServingSize::new(Problem { key_length: longest, ..problem.clone() });
    size.query_rows = query.length;
    if let Some(starts) = queries.starts() {
        size = size.with_packed_queries(query.length);
        tensors.query_starts = Some(lists.numbers(starts)?);
    }
    if !full(queries, query.length) {
        tensors.query_lengths = Some(lists.numbers(queries.ends())?);
    }
    if let Some(pages) = keys.pages() {
        size = size.with_pages(pages.size(), pages.columns(), inputs.key.shape().batch);
        let table: Vec<usize> = pages.table().iter().map(|page| *page as usize).collect();
        tensors.block_table = Some(lists.numbers(&table)?);
    } else if let Some(starts) = keys.starts() {
        size = size.with_packed_keys(inputs.key.shape().length);
        tensors.key_starts = Some(lists.numbers(starts)?);
    } else {
        let entries: Vec<usize> =
            (0..sequences.len()).filter_map(|sequence| keys.entry(sequence)).collect();
        size = size.with_entries(inputs.key.shape().batch);
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
    let chosen = choose(&gpu.chip(), problem, size.pages.is_some())
        .map_err(|reason| GpuError::Unsupported { kernel: NAME, reason })?;
    let plan =
        DecodePlan::with_configuration(gpu, &size, chosen.configuration, teams, chosen.reason)?;
    Ok(Prepared { plan, tensors, _lists: lists.into_buffers() })
}

/// A dimension of one has no stride to speak of.
fn unit_strides(shape: Shape, strides: Strides) -> Strides {
    Strides {
        batch: if shape.batch == 1 { 0 } else { strides.batch },
        length: if shape.length == 1 { 0 } else { strides.length },
        heads: if shape.heads == 1 { 0 } else { strides.heads },
    }
}

impl Launch for Prepared {
    fn launch(&mut self, stream: &Stream) -> Result<(), GpuError> {
        self.plan.launch(stream, &self.tensors)
    }

    fn compilation(&self) -> &Compilation {
        self.plan.kernel().compilation()
    }
}
