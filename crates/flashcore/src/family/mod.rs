//! The families of attention kernels, one file each: which problems a family serves and why not
//! others, in which configuration, with which launches and which memory.
//!
//! A family is registered by its line in `FAMILIES`.

mod backward;
mod backward_mma;
mod decode;
mod forward;
mod mma;
mod prefill;
mod ragged_backward;
mod scalar;
mod schedule;
pub mod tuning;
mod widen;

#[cfg(feature = "cuda")]
pub(crate) use decode::launch as teams;
pub use forward::{TileOrder, workload};

use kernels::attention::function::{BlockMask, HostTensor, ListsOf};
use kernels::attention::{Batch, MaskKind, Window};
use kernels::parameter::Workspace;
use kernels::{BlockFinder, BlockLister, Cache, Configuration, Scales};
use ptx::{Element, Target};
use serde::Serialize;

use crate::chip::Chip;
use crate::plan::{Arrangement, Launch, Source, window};
use crate::problem::{DTypes, Descale, Mask, Pass, Problem};

/// What a plan is made for: a GPU, a problem, and the strides of its tensors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub(crate) chip: &'a Chip,
    pub(crate) problem: &'a Problem,
    pub(crate) arrangement: &'a Arrangement,
}

/// A family of kernels: one algorithm on one kind of hardware.
pub(crate) trait Family: Sync {
    /// Returns the name by which it can be requested.
    fn name(&self) -> &'static str;

    /// Tells whether it is used only when requested by name.
    fn only_on_request(&self) -> bool {
        false
    }

    /// Tells whether it computes outputs or gradients.
    fn pass(&self) -> Pass {
        Pass::Forward
    }

    /// Tells whether the bits of a query's output depend only on the query and on the keys that it
    /// sees, and not on what else is in the batch.
    fn is_batch_invariant(&self) -> bool {
        false
    }

    /// Tells whether the family is listed among the candidates for a problem: it has the right
    /// pass, and the problem has what the family exists for.
    fn concerns(&self, problem: &Problem) -> bool {
        self.pass() == problem.pass
    }

    /// Returns what it would launch, or why it does not serve the problem.
    fn choose(&self, asked: &Asked<'_>) -> Result<Choice, String>;
}

/// All families, the best for many queries first.
pub(crate) const FAMILIES: [&dyn Family; 9] = [
    &forward::Forward,
    &prefill::Prefill,
    &mma::Mma { sums: Element::F32 },
    &widen::Widen,
    &decode::Decode,
    &scalar::Scalar,
    &mma::Mma { sums: Element::F16 },
    &backward::Backward,
    &backward_mma::BackwardMma,
];

/// Number of queries per sequence from which tiles of queries are preferred over `decode`, which
/// reads each key for few queries.
const MANY_QUERIES: usize = 32;

/// Returns the families that concern a problem, in order of preference.
pub(crate) fn in_order(problem: &Problem) -> Vec<&'static dyn Family> {
    let mut families = FAMILIES.to_vec();
    families.retain(|family| family.concerns(problem));
    if problem.query_length < MANY_QUERIES {
        // Decode reads each key once for all query heads of a group.
        families.sort_by_key(|family| family.name() != decode::NAME);
    }
    families
}

/// What a family launches for a problem.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Choice {
    /// The launches, in order.
    pub launches: Vec<Launch>,
    /// Number of launches at the start that depend on lengths and masks only: layers that share
    /// these need them once.
    pub prepared: usize,
    /// Index of the attention kernel among the launches.
    pub main: usize,
    /// Memory that the launches share.
    #[serde(skip)]
    pub memory: Vec<Memory>,
    /// How the problem is cut into tiles.
    pub tiling: Option<Tiling>,
    /// Why this configuration was chosen.
    #[serde(skip)]
    pub reason: String,
}

/// Memory that belongs to a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Memory {
    /// The parameter source that it provides.
    pub source: Source,
    /// Its size.
    pub bytes: u64,
    /// What it holds before the first launch.
    pub contents: Contents,
}

/// What the memory of a plan holds before the first launch.
#[derive(Debug, Clone, PartialEq)]
pub enum Contents {
    /// Arbitrary contents. Concurrent launches must not share it.
    Anything,
    /// Zeros, restored by each launch. Concurrent launches must not share it.
    Zeros,
    /// The list of tiles of each thread block. Constant.
    Tiles(TileOrder),
    /// The list of key blocks of each tile, or of query blocks of each key block. Constant.
    Blocks(BlockMask),
    /// The same lists as `Blocks`, found by launches of the plan.
    FoundBlocks(BlockMask, Finding),
    /// The list of tiles of each thread block, computed by a launch of the plan.
    FoundTiles(TileOrder, Finding),
}

/// When launches of a plan find block and tile lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finding {
    /// In each call that does not bring its own.
    EachCall,
    /// Only into memory of the caller, for calls that bring it. A call without such lists uses
    /// those that interval arithmetic gives on the host: it finishes sooner than better lists could
    /// be found.
    Prepared,
}

/// Number of (tile, key block) pairs from which each call finds its lists. Walking that many takes
/// a tenth of a millisecond on an H200, against a few launches for finding the lists.
const LEAST_BLOCKS: u64 = 1 << 15;

impl Finding {
    fn of(mask: &BlockMask) -> Self {
        let heads = u64::from(mask.heads) * u64::from(mask.batch);
        let tiles = u64::from(mask.lengths[0].div_ceil(mask.query_rows));
        let blocks = u64::from(mask.lengths[1].div_ceil(mask.key_block));
        if heads * tiles * blocks < LEAST_BLOCKS { Finding::Prepared } else { Finding::EachCall }
    }
}

/// The contents of the constant memory of a plan, as 32-bit words.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Lists {
    /// The key blocks of each tile.
    pub blocks: Option<Vec<u32>>,
    /// The tiles of each thread block, balanced by the number of blocks in the lists above.
    pub tiles: Option<Vec<u32>>,
}

impl Lists {
    /// Returns the words of a source.
    pub fn of(&self, source: Source) -> Option<&[u32]> {
        match source {
            Source::Workspace(Workspace::BlockLists) => self.blocks.as_deref(),
            Source::Workspace(Workspace::TileLists) => self.tiles.as_deref(),
            _ => None,
        }
    }
}

impl Contents {
    /// Tells whether no launch writes to the memory.
    pub fn is_constant(&self) -> bool {
        use Contents::{Blocks, FoundBlocks, FoundTiles, Tiles};
        let prepared =
            matches!(self, FoundBlocks(_, Finding::Prepared) | FoundTiles(_, Finding::Prepared));
        prepared || matches!(self, Tiles(_) | Blocks(_))
    }
}

/// How a problem is cut into tiles.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Tiling {
    /// Query rows per tile.
    pub query_rows: u32,
    /// Keys per key block.
    pub key_block: u32,
    /// Tiles per query head; for a ragged batch, an upper bound over all sequences.
    pub tiles_per_head: u32,
    /// Total number of tiles.
    pub tiles: u32,
    /// Number of thread blocks over which the keys of a tile are split.
    pub splits: u32,
    /// Tiles times splits per multiprocessor: below 1, some multiprocessors are idle.
    pub waves: f64,
}

impl Tiling {
    /// Returns the tiling into tiles of `query_rows` by `key_block`, so many per head and in all.
    fn new(
        chip: &Chip,
        [query_rows, key_block]: [u32; 2],
        [tiles_per_head, tiles]: [u32; 2],
        splits: u32,
    ) -> Self {
        let waves = f64::from(tiles) * f64::from(splits) / f64::from(chip.multiprocessors.max(1));
        Tiling { query_rows, key_block, tiles_per_head, tiles, splits, waves }
    }
}

impl Choice {
    /// Returns a single launch without memory.
    pub(crate) fn of(kernel: Configuration, blocks: u32, reason: impl Into<String>) -> Self {
        Choice {
            launches: vec![Launch::new(kernel, blocks, [])],
            prepared: 0,
            main: 0,
            memory: Vec::new(),
            tiling: None,
            reason: reason.into(),
        }
    }

    /// Returns the launches of a given configuration, tuned or not, for a problem that it is built
    /// for; `splits` is the number of parts for kernels that split the keys. For measurements and
    /// tests.
    pub fn for_kernel(
        chip: &Chip,
        problem: &Problem,
        kernel: Configuration,
        splits: Option<u32>,
    ) -> Result<Self, String> {
        let reason = "asked for".to_owned();
        let few = matches!(kernel, Configuration::Decode(_) | Configuration::Scalar(_));
        if problem.dtypes.key.is_8_bit() && !problem.dtypes.query.is_8_bit() && !few {
            return widen::launch(chip, problem, |wide| {
                Choice::for_kernel(chip, wide, kernel, splits)
            });
        }
        match kernel {
            Configuration::Scalar(scalar) => scalar::launch(problem, scalar, reason),
            Configuration::Mma(mma) if mma.batch != Batch::Equal => {
                mma::launch_ragged(chip, problem, mma, reason)
            }
            Configuration::Mma(mma) => mma::launch(chip, problem, mma, splits.unwrap_or(1), reason),
            Configuration::Forward(forward) => forward::launch(chip, problem, forward, reason),
            Configuration::Prefill(prefill) => prefill::launch(chip, problem, prefill, reason),
            Configuration::Decode(decode) => decode::launch(chip, problem, decode, splits, reason),
            Configuration::Backward(backward) => {
                backward::launch(chip, problem, &backward::Kernels::hopper(backward), reason)
            }
            Configuration::BackwardMma(backward) => {
                backward::launch(chip, problem, &backward_mma::kernels(backward), reason)
            }
            other => Err(format!("{} is no attention by itself", other.name())),
        }
    }

    /// Adds the lists of key blocks that the attention kernel reads. Where captured tensors
    /// determine the lists, launches before the attention kernel find them; returns whether there
    /// are such launches.
    fn with_blocks(
        &mut self,
        target: Target,
        kind: MaskKind,
        mask: BlockMask,
    ) -> Result<bool, String> {
        let words = mask.size();
        if words > u64::from(u32::MAX) / 8 {
            return Err("the lists of key blocks are too large for the GPU kernel".to_owned());
        }
        let main = self.main;
        self.launches[main].numbers.extend(mask.numbers());
        let found = mask.finder(target, kind);
        let contents = match found {
            Some(_) => Contents::FoundBlocks(mask, Finding::of(&mask)),
            None => Contents::Blocks(mask),
        };
        self.add_memory(Workspace::BlockLists, 4 * words, contents);
        if let Some((finder, lister)) = found {
            self.add_memory(Workspace::FoundBlocks, 4 * mask.found_words(), Contents::Anything);
            let numbers = || mask.numbers().into_iter().chain(mask.finder_numbers());
            let blocks = BlockFinder::blocks(mask.pairs());
            self.prepare(Launch::new(Configuration::BlockFinder(finder), blocks, numbers()));
            let blocks = BlockLister::blocks(mask.lists());
            self.prepare(Launch::new(Configuration::BlockLister(lister), blocks, numbers()));
        }
        Ok(found.is_some())
    }

    /// Adds memory that the launches share.
    fn add_memory(&mut self, source: impl Into<Source>, bytes: u64, contents: Contents) {
        self.memory.push(Memory { source: source.into(), bytes, contents });
    }

    /// Inserts a launch after those that are already prepared.
    fn prepare(&mut self, launch: Launch) {
        self.launches.insert(self.prepared, launch);
        self.prepared += 1;
        self.main += 1;
    }

    /// Returns the size of a workspace that a launch fills with lists, where there is one.
    pub fn found_bytes(&self, workspace: Workspace) -> Option<u64> {
        let found = |contents: &Contents| {
            matches!(contents, Contents::FoundBlocks(..) | Contents::FoundTiles(..))
        };
        let mut memory = self.memory.iter().filter(|memory| found(&memory.contents));
        let found = memory.find(|memory| memory.source == Source::Workspace(workspace))?;
        Some(found.bytes)
    }

    /// Returns the contents of the constant memory, given the known contents of some captured
    /// tensors.
    pub fn lists_over(&self, contents: &[HostTensor]) -> Lists {
        let blocks = self.memory.iter().find_map(|memory| match &memory.contents {
            Contents::Blocks(mask) | Contents::FoundBlocks(mask, _) => {
                Some(mask.words_over(contents))
            }
            _ => None,
        });
        let tiles = self.memory.iter().find_map(|memory| match &memory.contents {
            Contents::Tiles(order) | Contents::FoundTiles(order, _) => {
                Some(order.words_over(blocks.as_deref().unwrap_or_default()))
            }
            _ => None,
        });
        Lists { blocks, tiles }
    }

    /// Returns the configuration of the attention kernel.
    pub fn kernel(&self) -> &Configuration {
        &self.launches[self.main].kernel
    }
}

/// Returns the mask kind for kernels that are specialised for dense and causal masks.
fn mask_kind(problem: &Problem) -> MaskKind {
    match effective_mask(problem) {
        Mask::NONE => MaskKind::Dense,
        Mask::CAUSAL => MaskKind::Causal,
        mask if mask.chunk.is_some() => MaskKind::Chunked,
        _ => MaskKind::Local,
    }
}

/// Returns the mask kind for kernels that treat every mask as a window.
fn window_kind(problem: &Problem) -> MaskKind {
    match problem.mask.chunk {
        Some(_) => MaskKind::Chunked,
        None => MaskKind::Local,
    }
}

/// Returns the mask without its function and without bounds that hide nothing at these lengths.
fn effective_mask(problem: &Problem) -> Mask {
    let (queries, keys) = (problem.query_length, problem.key_length);
    let mut mask = problem.mask.without_function();
    mask.left = mask.left.filter(|left| left.saturating_add(1) < keys);
    mask.right = mask.right.filter(|right| right.saturating_add(1) < queries || *right == 0);
    mask.chunk = mask.chunk.filter(|chunk| chunk.get() < keys || queries > keys);
    mask
}

/// Returns the window of the effective mask.
fn effective_window(problem: &Problem) -> Window {
    window(&Problem { mask: effective_mask(problem), ..problem.clone() })
}

/// Returns the description from which block lists are found, for tiles of `query_rows` by
/// `key_block`: key blocks of each query tile, or query blocks of each key block. `None` where the
/// mask has no function.
fn block_mask(
    problem: &Problem,
    [query_rows, key_block]: [u32; 2],
    counts: &Counts,
    lists: ListsOf,
) -> Option<BlockMask> {
    let window = effective_window(problem);
    let lengths = [counts.query_length, counts.key_length];
    let Counts { heads, key_heads, batch, .. } = *counts;
    let group = match lists {
        ListsOf::Queries => 1,
        ListsOf::Keys { .. } => heads / key_heads.max(1),
    };
    problem.mask.function.map(|function| BlockMask {
        function,
        window,
        lengths,
        heads,
        group,
        batch,
        query_rows,
        key_block,
        lists,
    })
}

/// Returns the element type where the tensor cores support it and the head dims, or why they do
/// not.
fn tensor_core_element(problem: &Problem) -> Result<Element, String> {
    let dtype = problem.dtypes.uniform()?;
    let element = dtype.element();
    if !matches!(element, Element::F16 | Element::BF16) {
        return Err(format!("the tensor cores take f16 and bf16, not {dtype}"));
    }
    check_head_dims(problem, 8)?;
    Ok(element)
}

/// Refuses head dims that are not a multiple of `step`, and problems without queries.
fn check_head_dims(problem: &Problem, step: usize) -> Result<(), String> {
    for (name, dim) in [("head dim", problem.head_dim), ("value head dim", problem.value_head_dim)]
    {
        if dim == 0 || dim > 256 || !dim.is_multiple_of(step) {
            return Err(format!("{name} {dim} is not a multiple of {step} up to 256"));
        }
    }
    match problem.rows() == 0 || problem.batch == 0 || problem.query_length == 0 {
        true => Err("there are no queries".to_owned()),
        false => Ok(()),
    }
}

/// Returns the element type of queries and outputs (16 bits) and the description of the 8-bit
/// cache, or why the tensor cores do not support the combination.
pub(crate) fn narrow_cache(problem: &Problem) -> Result<(Element, Cache), String> {
    let DTypes { query, key, value, output } = problem.dtypes;
    if !key.is_8_bit() || !value.is_8_bit() || key != value {
        return Err(format!("keys in {key} and values in {value} are no cache of 8 bits"));
    }
    let element = query.element();
    if !matches!(element, Element::F16 | Element::BF16) || query != output {
        let asked = format!("queries in {query} and outputs in {output}");
        return Err(format!("over an 8-bit cache both are f16 or both bf16, not {asked}"));
    }
    let scales = |descale| match descale {
        Descale::None => Scales::One,
        Descale::PerHead => Scales::PerHead,
        Descale::PerToken => Scales::PerToken,
    };
    let [key_scales, value_scales] = [problem.descales.key, problem.descales.value].map(scales);
    Ok((element, Cache { element: key.element(), key_scales, value_scales }))
}

/// Refuses scales that the guarded softmax cannot represent: its reference for a row that has seen
/// nothing is -1e30 before scaling, and must neither overflow nor vanish. Zero and negative scales
/// are refused too: the maximum of unscaled scores would not be the maximum of scaled ones.
fn check_scale(problem: &Problem) -> Result<(), String> {
    const LEAST: f32 = 1e-20;
    const MOST: f32 = 1e6;
    let scale = problem.scale();
    match (LEAST..=MOST).contains(&scale) {
        true => Ok(()),
        false => Err(format!("scale {scale} is not between {LEAST:e} and {MOST:e}")),
    }
}

/// Refuses sequences of unequal lengths.
fn check_equal_lengths(problem: &Problem) -> Result<(), String> {
    match problem.has_equal_lengths() {
        true => Ok(()),
        false => Err("sequences of unequal lengths are not served".to_owned()),
    }
}

/// Why a family refuses what it could serve otherwise.
const UNTUNED: &str = "no configuration is tuned for it";

/// The most positions of a sequence.
const MOST_POSITIONS: usize = Window::OPEN as usize;

/// Refuses sequences with more than [`MOST_POSITIONS`], and caches with more batch entries or pages
/// than signed numbers of 32 bits count, which is how kernels read them from lists.
pub(crate) fn check_positions(problem: &Problem) -> Result<(), String> {
    let Problem { query_length, key_length, .. } = *problem;
    let entries = problem.entries();
    if entries > i32::MAX as usize {
        return Err(format!("{entries} batch entries or pages are more than {}", i32::MAX));
    }
    match query_length.max(key_length) {
        length if length > MOST_POSITIONS => {
            Err(format!("a length of {length} is more than {MOST_POSITIONS}"))
        }
        _ => Ok(()),
    }
}

/// The sizes of a problem with equal lengths, as the 32-bit numbers that kernels take.
struct Counts {
    query_length: u32,
    key_length: u32,
    heads: u32,
    key_heads: u32,
    batch: u32,
    tiles_per_head: u32,
    tiles: u32,
}

impl Counts {
    fn new(query_rows: u32, problem: &Problem) -> Result<Self, String> {
        let too_large = |what: &str| format!("{what} is too large for the GPU kernel");
        let count = |size: usize| u32::try_from(size).map_err(|_| too_large("the problem"));
        let [query_length, key_length] = [count(problem.query_length)?, count(problem.key_length)?];
        let [heads, key_heads] = [count(problem.query_heads)?, count(problem.kv_heads)?];
        let batch = count(problem.batch)?;
        check_positions(problem)?;
        let tiles_per_head = query_length.div_ceil(query_rows);
        // Tile numbers are divided by multiplication with a reciprocal, which is exact below 2^31.
        let tiles = u64::from(heads)
            .checked_mul(batch.into())
            .and_then(|heads| heads.checked_mul(tiles_per_head.into()))
            .filter(|tiles| *tiles < 1 << 31)
            .ok_or_else(|| too_large("the number of tiles"))? as u32;
        Ok(Counts { query_length, key_length, heads, key_heads, batch, tiles_per_head, tiles })
    }
}
