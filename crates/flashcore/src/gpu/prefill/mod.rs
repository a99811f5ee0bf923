//! Launching the prefill kernel on tensors that are on the device.
//!
//! | file | its subject |
//! | --- | --- |
//! | `support` | what the kernel serves, in which configuration |
//! | `rows` | tensors as long lists of rows |
//! | `outline` | how large a launch is |
//! | `binding` | which argument goes to which parameter |
//! | this one | the plan that ties them together |

mod binding;
mod outline;
mod rows;
mod support;

pub(super) use binding::Slot;
pub(super) use outline::Outline;
pub(crate) use support::has_many_queries;
pub use support::{Choice, choose};

use std::sync::Arc;

use cuda::{Arguments, Buffer, Stream, TensorMap};
use kernels::forward::Form;
use kernels::{Forward, Prefill, Sequencer};

use self::binding::{Launch, Numbers};
use self::rows::{Extents, Rows};
use super::{DeviceTensor, Gpu, GpuError, Kernel, ServingSize, ServingTensors};
use crate::tensor::Strides;

/// Everything about attention over a ragged batch on Hopper that does not depend on where its
/// tensors are and how long sequences have become.
///
/// A launch is two kernels: one that puts the tiles of the batch in order from the lengths on the
/// device, and one that computes them. Layers with the same lengths need the first only once:
/// [`schedule`](PrefillPlan::schedule), then [`attend`](PrefillPlan::attend) for each layer.
///
/// A launch has the same shape whatever the lengths are, allocates nothing and waits for nothing.
/// Launches of one plan share its schedule: they must follow each other, on one stream. The plan
/// must outlive them, and graphs that captured them.
///
/// ```no_run
/// use flashcore::gpu::{Gpu, PrefillPlan, ServingSize};
/// use flashcore::{DType, Mask, Problem};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let gpu = Gpu::open(0)?;
/// // Up to 64 sequences of up to 8192 tokens, 32768 in all.
/// let problem = Problem::new(64, 32, 8192, 128)
///     .with_kv_heads(8)
///     .with_dtype(DType::BF16)
///     .with_mask(Mask::Causal);
/// let size = ServingSize::new(problem).with_packed_queries(32_768).with_packed_keys(32_768);
/// let plan = PrefillPlan::new(&gpu, &size)?;
/// println!("{}: {}", plan.configuration().name(), plan.reason());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PrefillPlan {
    size: ServingSize,
    configuration: Prefill,
    reason: &'static str,
    blocks: u32,
    kernel: Arc<Kernel>,
    sequencer: Arc<Kernel>,
    schedule: Buffer,
    slots: Vec<Slot>,
    sequencer_slots: Vec<Slot>,
    arguments: Arguments,
    bound: Option<Bound>,
}

/// The tensor maps of the last launch, and what they were made from.
#[derive(Debug, Clone, Copy)]
struct Bound {
    tensors: [DeviceTensor; 4],
    rows: [Rows; 4],
    maps: [TensorMap; 4],
}

/// The roles of the four tensors, for errors.
const ROLES: [&str; 4] = ["query", "key", "value", "output"];

impl PrefillPlan {
    /// A plan in the configuration that is best for the size.
    pub fn new(gpu: &Gpu, size: &ServingSize) -> Result<Self, GpuError> {
        let chosen = choose(&gpu.chip(), size).map_err(unsupported)?;
        PrefillPlan::with_configuration(gpu, size, chosen.configuration, chosen.reason)
    }

    /// A plan in a given configuration, which must be one for the size's element, dims, scores and
    /// pages.
    pub fn with_configuration(
        gpu: &Gpu,
        size: &ServingSize,
        configuration: Prefill,
        reason: &'static str,
    ) -> Result<Self, GpuError> {
        size.validate("prefill")?;
        let chip = gpu.chip();
        let tuned = choose(&chip, size).map_err(unsupported)?.configuration;
        let fits = |it: &Prefill| {
            let scores = (it.softcap, it.alibi, it.sinks, it.page_rows.is_some());
            (it.tile.element, it.tile.head_dim, it.tile.value_head_dim, scores)
        };
        if fits(&configuration) != fits(&tuned) {
            let name = configuration.name();
            return Err(unsupported(format!("{name} is for another element, dim or score")));
        }
        let outline = Outline::new(&chip, &configuration, size)?;
        let name = configuration.name();
        let compact_tile = Forward { form: Form::COMPACT, ..configuration.tile };
        let compact = Prefill { tile: compact_tile, ..configuration };
        let full = || configuration.program();
        let kernel = if compact == configuration {
            gpu.kernel(&name, full)?
        } else {
            gpu.kernel_of_two_forms(&name, full, || compact.program())?
        };
        let first = Sequencer { target: chip.target };
        let sequencer = gpu.kernel(&first.name(), || first.program())?;
        let schedule = Buffer::new(gpu.device(), outline.schedule_bytes())?;
        let numbers = outline.numbers(size, schedule.address());
        let unknown = |kernel: String| move |parameter| GpuError::Parameter { kernel, parameter };
        let slots = Numbers::slots(kernel.parameters(), |name| numbers.of_kernel(name))
            .map_err(unknown(name))?;
        let sequencer_slots =
            Numbers::slots(sequencer.parameters(), |name| numbers.of_sequencer(name))
                .map_err(unknown(first.name()))?;
        Ok(PrefillPlan {
            blocks: outline.blocks,
            size: size.clone(),
            configuration,
            reason,
            kernel,
            sequencer,
            schedule,
            slots,
            sequencer_slots,
            arguments: Arguments::new(),
            bound: None,
        })
    }

    /// Puts attention on a stream of the plan's device, with its tiles put in order before. Neither
    /// allocates nor waits.
    ///
    /// That the addresses are right is the caller's business: what goes wrong on the device is
    /// reported by the stream, when it is next waited for.
    pub fn launch(&mut self, stream: &Stream, tensors: &ServingTensors) -> Result<(), GpuError> {
        self.schedule(stream, tensors)?;
        self.attend(stream, tensors)
    }

    /// Puts the tiles of a batch in order: needed before [`attend`](PrefillPlan::attend) whenever
    /// lengths, their lists or the order of the tensors in memory have changed.
    pub fn schedule(&mut self, stream: &Stream, tensors: &ServingTensors) -> Result<(), GpuError> {
        let bound = self.bind(stream, tensors)?;
        self.fill(&bound, tensors, |plan| &plan.sequencer_slots);
        Ok(self.sequencer.launch(stream, 1, &self.arguments)?)
    }

    /// Computes the tiles of the batch that was last put in order.
    pub fn attend(&mut self, stream: &Stream, tensors: &ServingTensors) -> Result<(), GpuError> {
        let bound = self.bind(stream, tensors)?;
        self.fill(&bound, tensors, |plan| &plan.slots);
        Ok(self.kernel.launch(stream, self.blocks, &self.arguments)?)
    }

    /// The room for arguments stays from launch to launch.
    fn fill(&mut self, bound: &Bound, tensors: &ServingTensors, slots: fn(&Self) -> &Vec<Slot>) {
        let launch = Launch { tensors, rows: &bound.rows, maps: &bound.maps };
        let mut arguments = std::mem::take(&mut self.arguments);
        arguments.clear();
        for slot in slots(self) {
            arguments.push(slot.argument(&launch));
        }
        self.arguments = arguments;
    }

    /// The tensor maps, made anew where tensors are not where they were.
    fn bind(&mut self, stream: &Stream, tensors: &ServingTensors) -> Result<Bound, GpuError> {
        tensors.validate(&self.size)?;
        check_lists(&self.size, tensors)?;
        let all = [tensors.query, tensors.key, tensors.value, tensors.output];
        if let Some(bound) = self.bound.filter(|bound| bound.tensors == all) {
            return Ok(bound);
        }
        let rows = rows(&self.size, all.map(|tensor| tensor.strides))?;
        let maps = [0, 1, 2, 3].map(|role| self.encode(stream, role, all[role], &rows[role]));
        let [query, key, value, output] = maps;
        let bound = Bound { tensors: all, rows, maps: [query?, key?, value?, output?] };
        self.bound = Some(bound);
        Ok(bound)
    }

    fn encode(
        &self,
        stream: &Stream,
        role: usize,
        tensor: DeviceTensor,
        rows: &Rows,
    ) -> Result<TensorMap, GpuError> {
        let (dimensions, strides) = map(&self.size, role, rows);
        let tensor_box = &self.configuration.boxes()[role];
        TensorMap::encode(stream.device(), tensor_box, tensor.address, &dimensions, &strides)
            .map_err(|error| GpuError::Tensor { tensor: ROLES[role], reason: error.to_string() })
    }

    /// What it was made for.
    pub fn size(&self) -> &ServingSize {
        &self.size
    }

    /// What the kernel was built for.
    pub fn configuration(&self) -> &Prefill {
        &self.configuration
    }

    /// Why this configuration.
    pub fn reason(&self) -> &'static str {
        self.reason
    }

    /// The compiled kernel.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Device memory that the plan holds besides the kernels.
    pub fn device_bytes(&self) -> u64 {
        self.schedule.bytes()
    }
}

/// Whether the kernel serves a launch on these tensors: the copy engine can walk them.
pub fn check_tensors(size: &ServingSize, tensors: &ServingTensors) -> Result<(), GpuError> {
    check_lists(size, tensors)?;
    let ServingTensors { query, key, value, .. } = tensors;
    check_strides(size, [query.strides, key.strides, value.strides])
}

fn check_lists(size: &ServingSize, tensors: &ServingTensors) -> Result<(), GpuError> {
    if size.pages.is_some() && tensors.left_padding.is_some() {
        let reason = "prefill serves no left padding in pages".to_owned();
        return Err(GpuError::Tensor { tensor: "list of left paddings", reason });
    }
    Ok(())
}

/// Whether the copy engine can walk tensors with the strides of query, key and value.
pub fn check_strides(size: &ServingSize, strides: [Strides; 3]) -> Result<(), GpuError> {
    rows_of_inputs(size, strides).map(|_| ())
}

fn rows_of_inputs(size: &ServingSize, strides: [Strides; 3]) -> Result<[Rows; 3], GpuError> {
    let [query, key, value] = [0, 1, 2].map(|role: usize| rows_of(size, role, strides[role]));
    let (query, key, value) = (query?, key?, value?);
    if key.entry_rows != value.entry_rows {
        let reason = format!(
            "a batch entry is {} rows from the next, and {} in the key tensor: prefill wants both \
             alike",
            value.entry_rows, key.entry_rows
        );
        return Err(GpuError::Tensor { tensor: "value", reason });
    }
    Ok([query, key, value])
}

/// The rows of query, key, value and output.
pub(super) fn rows(size: &ServingSize, strides: [Strides; 4]) -> Result<[Rows; 4], GpuError> {
    let [query, key, value, output] = strides;
    let [query, key, value] = rows_of_inputs(size, [query, key, value])?;
    Ok([query, key, value, rows_of(size, 3, output)?])
}

/// The dimensions and strides of a tensor map over rows.
pub(super) fn map(size: &ServingSize, role: usize, rows: &Rows) -> ([u64; 5], [u64; 4]) {
    let problem = &size.problem;
    let dim = if role < 2 { problem.head_dim } else { problem.value_head_dim };
    let heads = extents(size, role).heads;
    let (dimensions, strides) = Prefill::slices(dim as u64, heads as u64, rows.row_bytes);
    let [inside, end, back] = strides;
    (dimensions, [inside, end, back, rows.head_bytes])
}

fn rows_of(size: &ServingSize, role: usize, strides: Strides) -> Result<Rows, GpuError> {
    Rows::new(ROLES[role], strides, size.problem.dtype, extents(size, role))
}

/// The extents of query, key, value or output.
fn extents(size: &ServingSize, role: usize) -> Extents {
    let ServingSize { problem, entries, query_rows, key_rows, .. } = size;
    match role {
        0 | 3 => Extents {
            entries: if size.packed_queries { 1 } else { problem.batch },
            rows: *query_rows,
            heads: problem.query_heads,
        },
        _ => Extents { entries: *entries, rows: *key_rows, heads: problem.kv_heads },
    }
}

fn unsupported(reason: String) -> GpuError {
    GpuError::Unsupported { kernel: "prefill", reason }
}
