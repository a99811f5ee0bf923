//! Launching the decode kernel on tensors that are on the device.
//!
//! | file | its subject |
//! | --- | --- |
//! | `support` | what the kernel serves, in which configuration, with how many teams |
//! | `binding` | which argument goes to which parameter |
//! | this one | the plan that ties them together |

mod binding;
mod support;

pub(super) use binding::describe;
pub(super) use support::Grid;
pub use support::choose;

use std::sync::Arc;

use cuda::{Arguments, Buffer, DeviceAddress, Stream};
use kernels::Decode;

use self::binding::Launch;
use super::serving::Slot;
use super::{Gpu, GpuError, Kernel, ServingSize, ServingTensors};

/// Everything about decode that does not depend on where its tensors are and how long sequences
/// have become.
///
/// A launch has the same shape whatever the lengths are, allocates nothing and waits for nothing:
/// a CUDA graph that captured it is right for every length up to the plan's, read when the graph
/// runs. Lengths and tables beyond their bounds are cut to them on the device, so that no launch
/// reads or writes outside its tensors.
///
/// Launches of one plan share its workspace: they must follow each other, on one stream. The plan
/// must outlive them, and graphs that captured them.
///
/// ```no_run
/// use flashcore::gpu::{DecodePlan, Gpu, ServingSize};
/// use flashcore::{DType, Mask, Problem};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let gpu = Gpu::open(0)?;
/// // One query for each of 64 sequences, over 4096 pages of 64 positions, 128 at most for each.
/// let problem = Problem::new(64, 32, 1, 128)
///     .with_kv_heads(8)
///     .with_dtype(DType::BF16)
///     .with_mask(Mask::Causal);
/// let plan = DecodePlan::new(&gpu, &ServingSize::new(problem).with_pages(64, 128, 4096))?;
/// println!("{}: {}", plan.configuration().name(), plan.reason());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DecodePlan {
    size: ServingSize,
    configuration: Decode,
    reason: &'static str,
    grid: Grid,
    kernel: Arc<Kernel>,
    workspace: Workspace,
    slots: Vec<Slot>,
    arguments: Arguments,
}

/// Parts of sequences that teams share, and how many of them are there.
#[derive(Debug)]
struct Workspace {
    parts: Option<Buffer>,
    counters: Option<Buffer>,
}

impl Workspace {
    fn new(gpu: &Gpu, parts: u64, counters: u64) -> Result<Self, GpuError> {
        let counters = Buffer::new(gpu.device(), counters)?;
        gpu.stream().fill(counters.all(), 0)?;
        gpu.stream().synchronize()?;
        let parts = Buffer::new(gpu.device(), parts)?;
        Ok(Workspace { parts: Some(parts), counters: Some(counters) })
    }

    /// Of a launch with one team, which has no parts.
    fn nowhere() -> Self {
        Workspace { parts: None, counters: None }
    }

    fn parts(&self) -> DeviceAddress {
        self.parts.as_ref().map_or(DeviceAddress(0), Buffer::address)
    }

    fn counters(&self) -> DeviceAddress {
        self.counters.as_ref().map_or(DeviceAddress(0), Buffer::address)
    }

    fn bytes(&self) -> u64 {
        [&self.parts, &self.counters].into_iter().flatten().map(Buffer::bytes).sum()
    }
}

impl DecodePlan {
    /// A plan in the configuration that is best for the size.
    pub fn new(gpu: &Gpu, size: &ServingSize) -> Result<Self, GpuError> {
        let chosen = choose(&gpu.chip(), &size.problem, size.pages.is_some())
            .map_err(|reason| GpuError::Unsupported { kernel: "decode", reason })?;
        DecodePlan::with_configuration(gpu, size, chosen.configuration, None, chosen.reason)
    }

    /// A plan in a given configuration, which must be one for the size's element, dims and scores,
    /// with a given number of teams of blocks, or with as many as fill the GPU.
    pub fn with_configuration(
        gpu: &Gpu,
        size: &ServingSize,
        configuration: Decode,
        teams: Option<u32>,
        reason: &'static str,
    ) -> Result<Self, GpuError> {
        let unsupported = |reason: String| GpuError::Unsupported { kernel: "decode", reason };
        let problem = &size.problem;
        size.validate("decode")?;
        let chip = gpu.chip();
        let tuned =
            choose(&chip, problem, size.pages.is_some()).map_err(unsupported)?.configuration;
        let fits = |it: &Decode| {
            let scores = (it.softcap, it.alibi, it.sinks, it.paged);
            (it.element, it.head_dim, it.value_head_dim, scores)
        };
        if fits(&configuration) != fits(&tuned) {
            let name = configuration.name();
            return Err(unsupported(format!("{name} is for another element, dim or score")));
        }
        let grid = Grid::new(&chip, &configuration, size, teams)?;
        let kernel = gpu.kernel(&configuration.name(), || configuration.program())?;
        let workspace = match grid.workspace {
            None => Workspace::nowhere(),
            Some([parts, counters]) => Workspace::new(gpu, parts, counters)?,
        };
        let addresses = [workspace.parts(), workspace.counters()];
        let launch = Launch { size, grid, configuration: &configuration, workspace: addresses };
        let slots = launch
            .slots(kernel.parameters())
            .map_err(|parameter| GpuError::Parameter { kernel: configuration.name(), parameter })?;
        Ok(DecodePlan {
            size: size.clone(),
            configuration,
            reason,
            grid,
            kernel,
            workspace,
            slots,
            arguments: Arguments::new(),
        })
    }

    /// Puts decode on a stream of the plan's device. Neither allocates nor waits.
    ///
    /// That the addresses are right is the caller's business: what goes wrong on the device is
    /// reported by the stream, when it is next waited for.
    pub fn launch(&mut self, stream: &Stream, tensors: &ServingTensors) -> Result<(), GpuError> {
        tensors.validate(&self.size)?;
        // The room for arguments stays from launch to launch.
        self.arguments.clear();
        let strided = tensors.strided(&self.size);
        for slot in &self.slots {
            self.arguments.push(slot.argument(&strided, |list| list.of(tensors)));
        }
        Ok(self.kernel.launch(stream, self.grid.blocks(), &self.arguments)?)
    }

    /// What it was made for.
    pub fn size(&self) -> &ServingSize {
        &self.size
    }

    /// What the kernel was built for.
    pub fn configuration(&self) -> &Decode {
        &self.configuration
    }

    /// Why this configuration.
    pub fn reason(&self) -> &'static str {
        self.reason
    }

    /// Teams of blocks: into how many parts the keys of the batch are cut at most.
    pub fn teams(&self) -> u32 {
        self.grid.teams
    }

    /// The compiled kernel.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Device memory that the plan holds besides the kernel.
    pub fn device_bytes(&self) -> u64 {
        self.workspace.bytes()
    }
}
