//! Launching the decode kernel on tensors that are on the device.
//!
//! | file | its subject |
//! | --- | --- |
//! | `support` | what the kernel serves, in which configuration, with how many teams |
//! | `binding` | which argument goes to which parameter |
//! | this one | the plan that ties them together |

mod binding;
mod support;

pub use support::choose;

use std::sync::Arc;

use cuda::{Arguments, Buffer, DeviceAddress, Stream};
use kernels::Decode;

use self::binding::{Launch, Slot};
use super::{DeviceTensor, Gpu, GpuError, Kernel};
use crate::problem::Problem;

/// What a plan is made for: the most that a launch will ask for. Lengths are on the device and may
/// be anything up to it.
#[derive(Debug, Clone, PartialEq)]
pub struct DecodeSize {
    /// Heads, dims, mask and scores; the number of sequences, and the most queries and keys of one.
    pub problem: Problem,
    /// The block table, where the cache is in pages.
    pub pages: Option<DecodePages>,
    /// Batch entries or pages of the cache.
    pub entries: usize,
    /// Rows of a batch entry of the query tensor: all rows, where queries are packed.
    pub query_rows: usize,
    /// Whether queries are packed: sequence after sequence in one batch entry.
    pub packed_queries: bool,
    /// Whether each sequence has slopes of its own.
    pub slopes_of_sequences: bool,
}

/// The shape of a block table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DecodePages {
    /// Positions of a page.
    pub size: usize,
    /// Pages of a sequence in the table.
    pub columns: usize,
}

impl DecodeSize {
    /// A contiguous cache with a batch entry for each sequence, and as many queries for each.
    pub fn new(problem: Problem) -> Self {
        DecodeSize {
            entries: problem.batch,
            query_rows: problem.query_length,
            problem,
            pages: None,
            packed_queries: false,
            slopes_of_sequences: false,
        }
    }

    /// The same with another number of batch entries, which the sequences name.
    pub fn with_entries(self, entries: usize) -> Self {
        DecodeSize { entries, ..self }
    }

    /// The same with a cache of `entries` pages. The problem's longest length becomes what the
    /// table has room for.
    pub fn with_pages(mut self, size: usize, columns: usize, entries: usize) -> Self {
        self.problem.key_length = size.saturating_mul(columns);
        DecodeSize { pages: Some(DecodePages { size, columns }), entries, ..self }
    }

    /// The same with queries packed into so many rows.
    pub fn with_packed_queries(self, rows: usize) -> Self {
        DecodeSize { packed_queries: true, query_rows: rows, ..self }
    }
}

/// What one launch reads and writes. Lists have a 32-bit number for each sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DecodeTensors {
    /// The queries, (sequences, queries, heads, dim), or packed into one batch entry.
    pub query: DeviceTensor,
    /// The cache of keys, (batch entries or pages, positions, key heads, dim).
    pub key: DeviceTensor,
    /// The cache of values.
    pub value: DeviceTensor,
    /// Where the output goes, of the queries' shape; must not overlap the others.
    pub output: DeviceTensor,
    /// Where the log-sum-exps go: (batch, query heads, length) of the query tensor in f32.
    pub lse: DeviceAddress,
    /// Keys of each sequence, left padding included; the plan's most without.
    pub lengths: Option<DeviceAddress>,
    /// Positions of each sequence that are no part of it.
    pub left_padding: Option<DeviceAddress>,
    /// The batch entry of each sequence; its index without. Not with pages.
    pub entries: Option<DeviceAddress>,
    /// Where each sequence's queries begin, and where the last end: packed queries.
    pub query_starts: Option<DeviceAddress>,
    /// The pages of each sequence, row after row.
    pub block_table: Option<DeviceAddress>,
    /// ALiBi slopes in f32: of each query head, or of each sequence and query head.
    pub slopes: Option<DeviceAddress>,
    /// Sinks in f32, one for each query head.
    pub sinks: Option<DeviceAddress>,
}

impl DecodeTensors {
    /// Tensors without lists.
    pub fn new(
        query: DeviceTensor,
        key: DeviceTensor,
        value: DeviceTensor,
        output: DeviceTensor,
        lse: DeviceAddress,
    ) -> Self {
        DecodeTensors {
            query,
            key,
            value,
            output,
            lse,
            lengths: None,
            left_padding: None,
            entries: None,
            query_starts: None,
            block_table: None,
            slopes: None,
            sinks: None,
        }
    }
}

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
/// use flashcore::gpu::{DecodePlan, DecodeSize, Gpu};
/// use flashcore::{DType, Mask, Problem};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let gpu = Gpu::open(0)?;
/// // One query for each of 64 sequences, over 4096 pages of 64 positions, 128 at most for each.
/// let problem = Problem::new(64, 32, 1, 128)
///     .with_kv_heads(8)
///     .with_dtype(DType::BF16)
///     .with_mask(Mask::Causal);
/// let plan = DecodePlan::new(&gpu, &DecodeSize::new(problem).with_pages(64, 128, 4096))?;
/// println!("{}: {}", plan.configuration().name(), plan.reason());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DecodePlan {
    size: DecodeSize,
    configuration: Decode,
    reason: &'static str,
    teams: u32,
    blocks: u32,
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

/// The roles of the four tensors, for errors.
const ROLES: [&str; 4] = ["query", "key", "value", "output"];

impl DecodePlan {
    /// A plan in the configuration that is best for the size.
    pub fn new(gpu: &Gpu, size: &DecodeSize) -> Result<Self, GpuError> {
        let chosen = choose(&gpu.chip(), &size.problem, size.pages.is_some())
            .map_err(|reason| GpuError::Unsupported { kernel: "decode", reason })?;
        DecodePlan::with_configuration(gpu, size, chosen.configuration, None, chosen.reason)
    }

    /// A plan in a given configuration, which must be one for the size's element, dims and scores,
    /// with a given number of teams of blocks, or with as many as fill the GPU.
    pub fn with_configuration(
        gpu: &Gpu,
        size: &DecodeSize,
        configuration: Decode,
        teams: Option<u32>,
        reason: &'static str,
    ) -> Result<Self, GpuError> {
        let unsupported = |reason: String| GpuError::Unsupported { kernel: "decode", reason };
        let problem = &size.problem;
        problem.validate().map_err(|error| unsupported(error.to_string()))?;
        if let Some(pages) = size.pages
            && (pages.size == 0 || pages.columns == 0)
        {
            return Err(unsupported(
                "pages and the rows of the block table must not be empty".into(),
            ));
        }
        if size.entries == 0 {
            return Err(unsupported("the cache has no batch entries".to_owned()));
        }
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
        let rows = support::query_rows(problem).unwrap_or(0);
        let members = configuration.team(problem.kv_heads as u32, rows);
        let fill = support::teams(&chip, &configuration, size, members);
        let teams = teams.unwrap_or(fill).clamp(1, configuration.most_teams());
        let blocks = teams.checked_mul(members).filter(|blocks| *blocks <= i32::MAX as u32);
        let blocks = blocks.ok_or(GpuError::TooLarge { what: "the number of query rows" })?;
        // Tiles are counted in 31 bits, at least one for each sequence.
        let tiles = problem.key_length / configuration.tile_keys as usize + 2;
        if problem.batch.checked_mul(tiles).is_none_or(|tiles| tiles > i32::MAX as usize) {
            return Err(GpuError::TooLarge { what: "the number of keys of all sequences" });
        }
        let kernel = gpu.kernel(&configuration.name(), || configuration.program())?;
        let workspace = match teams {
            1 => Workspace::nowhere(),
            _ => {
                let counters = 4 * problem.batch as u64 * u64::from(members);
                Workspace::new(gpu, configuration.workspace_bytes(blocks), counters)?
            }
        };
        let least_tiles = configuration.warps;
        let launch = Launch { size, teams, members, least_tiles, workspace: &workspace };
        let slots = binding::slots(kernel.parameters(), &launch)
            .map_err(|parameter| GpuError::Parameter { kernel: configuration.name(), parameter })?;
        Ok(DecodePlan {
            size: size.clone(),
            configuration,
            reason,
            teams,
            blocks,
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
    pub fn launch(&mut self, stream: &Stream, tensors: &DecodeTensors) -> Result<(), GpuError> {
        self.check(tensors)?;
        // The room for arguments stays from launch to launch.
        self.arguments.clear();
        for slot in &self.slots {
            self.arguments.push(slot.argument(tensors, self.size.packed_queries));
        }
        Ok(self.kernel.launch(stream, self.blocks, &self.arguments)?)
    }

    /// Refuses what can be seen from here.
    fn check(&self, tensors: &DecodeTensors) -> Result<(), GpuError> {
        let all = [tensors.query, tensors.key, tensors.value, tensors.output];
        for (tensor, DeviceTensor { address, strides }) in ROLES.into_iter().zip(all) {
            let refuse = |reason: String| Err(GpuError::Tensor { tensor, reason });
            if address.0 == 0 || !address.0.is_multiple_of(16) {
                return refuse(format!("its address {address} is not a multiple of 16"));
            }
            for (name, stride) in
                [("batch", strides.batch), ("length", strides.length), ("heads", strides.heads)]
            {
                if !(stride * self.size.problem.dtype.bytes()).is_multiple_of(16) {
                    let bytes = stride * self.size.problem.dtype.bytes();
                    return refuse(format!(
                        "its {name} stride of {bytes} bytes is not a multiple of 16"
                    ));
                }
            }
        }
        let problem = &self.size.problem;
        let lists = [
            ("block table", tensors.block_table, self.size.pages.is_some(), true),
            ("list of query starts", tensors.query_starts, self.size.packed_queries, true),
            ("list of slopes", tensors.slopes, problem.alibi, true),
            ("list of sinks", tensors.sinks, problem.sinks, true),
            ("list of batch entries", tensors.entries, self.size.pages.is_none(), false),
        ];
        for (tensor, given, known, needed) in lists {
            let reason = match given {
                None if known && needed => "it is missing".to_owned(),
                Some(_) if !known => "the plan knows of none".to_owned(),
                Some(address) if !address.0.is_multiple_of(4) => {
                    format!("its address {address} is not a multiple of 4")
                }
                _ => continue,
            };
            return Err(GpuError::Tensor { tensor, reason });
        }
        Ok(())
    }

    /// What it was made for.
    pub fn size(&self) -> &DecodeSize {
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
        self.teams
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
