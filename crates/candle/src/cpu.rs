//! Attention over candle tensors in host memory.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Storage};
use flashcore::serving::{self, Placement};
use flashcore::{
    Backend, Backward, CpuBackend, Descale, Descales, E4M3, Elements, Inputs, Plan, Preference,
    RunOptions, Shape, Tensor,
};

use crate::arguments::Call;
use crate::operation::Saved;
use crate::wrap;

/// Computes output and log-sum-exp.
pub(crate) fn attend(
    call: &Call,
    tensors: [(&CpuStorage, &Layout); 3],
) -> Result<(CpuStorage, Vec<f32>)> {
    // A cache may be much larger than the sequences in it: only their rows are copied.
    let in_cache = !call.problem.has_equal_lengths() && !call.problem.keys.is_packed();
    let given = Given::new(call, tensors, in_cache)?;
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
    let given = Given::new(call, tensors, false)?;
    let (problem, inputs_given) = given.sequences.over(given.inputs()).map_err(wrap)?;
    let layout = flashcore::Layout::contiguous(problem.output_shape()).map_err(wrap)?;
    let like_output = |of: &candle_core::Tensor| {
        let (memory, of) = of.storage_and_layout();
        tensor((host(&memory)?, of), layout, None)
    };
    let backward = Backward {
        inputs: inputs_given,
        output: &like_output(saved.output)?,
        lse: &numbers(saved.lse)?,
        output_gradient: &like_output(saved.output_gradient)?,
    };
    let options = RunOptions::default();
    let gradients = CpuBackend::new().run_backward(&problem, backward, &options).map_err(wrap)?;
    let like = |gradient: Tensor, of: &candle_core::Tensor| -> Result<_> {
        Ok(crate::tensor(Storage::Cpu(storage(gradient)?), of.shape()))
    };
    let [query, key, value] = inputs;
    Ok([like(gradients.query, query)?, like(gradients.key, key)?, like(gradients.value, value)?])
}

/// A call with its tensors and lists read.
struct Given {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    descales: Descales<Option<Tensor>>,
    sequences: serving::Sequences,
}

impl Given {
    /// Reads the tensors. With `gathered`, only the keys and values that belong to a sequence are
    /// read, into packed tensors.
    fn new(
        call: &Call,
        [query, key, value]: [(&CpuStorage, &Layout); 3],
        gathered: bool,
    ) -> Result<Self> {
        let Call { problem, layouts, sequences, .. } = call;
        let queries = sequences.queries.read(problem.batch, layouts[0].shape())?;
        let keys = sequences.keys.read(problem.batch, layouts[1].shape())?;
        let among = gathered.then_some(&keys);
        let factors = problem.descales.zip(call.descales.each_ref());
        let descales = factors.try_map(|(descale, factors)| {
            let Some((factors, layout)) = factors else { return Ok(None) };
            let (memory, of) = factors.storage_and_layout();
            let among = among.filter(|_| descale == Descale::PerToken);
            tensor((host(&memory)?, of), *layout, among).map(Some)
        })?;
        Ok(Given {
            query: tensor(query, layouts[0], None)?,
            key: tensor(key, layouts[1], among)?,
            value: tensor(value, layouts[2], among)?,
            slopes: call.slopes.as_ref().map(numbers).transpose()?,
            sinks: call.sinks.as_ref().map(numbers).transpose()?,
            descales,
            sequences: {
                let keys = if gathered { packed(&keys) } else { keys };
                serving::Sequences::new(problem.clone(), queries, keys).map_err(wrap)?
            },
        })
    }

    fn inputs(&self) -> Inputs<'_> {
        Inputs {
            slopes: self.slopes.as_deref(),
            sinks: self.sinks.as_deref(),
            descales: self.descales.each_ref().map(Option::as_ref),
            ..Inputs::new(&self.query, &self.key, &self.value)
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
    let mut parts = Vec::with_capacity(outputs.len());
    for (output, lse) in outputs.iter().zip(lses) {
        let (memory, of) = output.storage_and_layout();
        parts.push((tensor((host(&memory)?, of), layout, None)?, numbers(lse)?));
    }
    let parts: Vec<_> = parts.iter().map(|(output, lse)| (output, lse.as_slice())).collect();
    let (output, lse) = serving::combine(&parts).map_err(wrap)?;
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

/// Copies the elements of a candle tensor to a FlashCore tensor: all of them, or the rows of the
/// sequences placed in it, packed.
fn tensor(
    (storage, of): (&CpuStorage, &Layout),
    layout: flashcore::Layout,
    placement: Option<&Placement>,
) -> Result<Tensor> {
    let begin = of.start_offset();
    let elements: Elements = match storage {
        CpuStorage::F32(all) => copy(&all[begin..], layout, placement).into(),
        CpuStorage::F16(all) => copy(&all[begin..], layout, placement).into(),
        CpuStorage::BF16(all) => copy(&all[begin..], layout, placement).into(),
        CpuStorage::F8E4M3(all) => {
            let bits = copy(&all[begin..], layout, placement).into_iter();
            let all: Vec<E4M3> = bits.map(|it| E4M3::from_bits(it.to_bits())).collect();
            all.into()
        }
        other => candle_core::bail!("attention takes no {:?}", other.dtype()),
    };
    let layout = match placement {
        None => layout,
        Some(placement) => {
            let Shape { heads, dim, .. } = layout.shape();
            let length = lengths(placement).sum();
            flashcore::Layout::contiguous(Shape::new(1, length, heads, dim)).map_err(wrap)?
        }
    };
    Tensor::new(layout, elements).map_err(wrap)
}

fn copy<T: Copy>(
    elements: &[T],
    layout: flashcore::Layout,
    placement: Option<&Placement>,
) -> Vec<T> {
    let Some(placement) = placement else { return elements[..layout.span()].to_vec() };
    let Shape { heads, dim, .. } = layout.shape();
    let mut rows = Vec::new();
    for (sequence, length) in lengths(placement).enumerate() {
        for position in 0..length {
            let (entry, row) = placement.locate(sequence, position);
            for head in 0..heads {
                rows.extend_from_slice(&elements[layout.offset(entry, row, head)..][..dim]);
            }
        }
    }
    rows
}

/// Returns the placement of rows that were copied one sequence after the other.
fn packed(placement: &Placement) -> Placement {
    let mut starts = vec![0];
    for (sequence, length) in lengths(placement).enumerate() {
        starts.push(starts[sequence] + length);
    }
    Placement::packed(starts)
}

fn lengths(placement: &Placement) -> impl Iterator<Item = usize> {
    (0..placement.sequences()).map(|sequence| placement.length(sequence))
}
