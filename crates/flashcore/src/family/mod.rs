//! The families of attention kernels, a file each: what a family serves and why not, in which
//! configuration, with which launches and which memory.
//!
//! A family joins by its line in `FAMILIES`.

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

/// What a plan is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub(crate) chip: &'a Chip,
    pub(crate) problem: &'a Problem,
    pub(crate) arrangement: &'a Arrangement,
}

/// A family of kernels.
pub(crate) trait Family: Sync {
    /// Its name, by which it can be asked for.
    fn name(&self) -> &'static str;

    /// Whether it is taken only by those who ask for it by name.
    fn only_on_request(&self) -> bool {
        false
    }

    /// Whether it computes outputs or gradients.
    fn pass(&self) -> Pass {
        Pass::Forward
    }

    /// Whether the bits of a query's outputs depend on the query and on what it sees, and on nothing
    /// else that is computed with it.
    fn is_batch_invariant(&self) -> bool {
        false
    }

    /// Whether it is worth a word for a problem: of its pass, and with what it is there for.
    fn concerns(&self, problem: &Problem) -> bool {
        self.pass() == problem.pass
    }

    /// What it would run, or why it does not serve the problem.
    fn choose(&self, asked: &Asked<'_>) -> Result<Choice, String>;
}

/// Every family, the best for many queries first.
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

/// From how many queries of a sequence on a tile of queries is worth more than reading each key
/// for few of them.
const MANY_QUERIES: usize = 32;

/// The families in the order in which they are preferred for a problem.
pub(crate) fn in_order(problem: &Problem) -> Vec<&'static dyn Family> {
    let mut families = FAMILIES.to_vec();
    families.retain(|family| family.concerns(problem));
    if problem.query_length < MANY_QUERIES {
        // The one family that reads keys once for all query heads of a group comes first.
        families.sort_by_key(|family| family.name() != decode::NAME);
    }
    families
}

/// What a family runs for a problem.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Choice {
    /// The launches, one after the other.
    pub launches: Vec<Launch>,
    /// How many of them come first and depend on lengths and masks alone: layers with the same ones
    /// need them once.
    pub prepared: usize,
    /// Which of them is the attention kernel, that the others come before or after.
    pub main: usize,
    /// The memory that launches share.
    #[serde(skip)]
    pub memory: Vec<Memory>,
    /// How the problem is cut up.
    pub tiling: Option<Tiling>,
    /// Why this configuration.
    #[serde(skip)]
    pub reason: String,
}

/// Memory that belongs to a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Memory {
    /// What asks for it.
    pub source: Source,
    /// How much it is.
    pub bytes: u64,
    /// What is in it before the first launch.
    pub contents: Contents,
}

/// What is in the memory of a plan before the first launch.
#[derive(Debug, Clone, PartialEq)]
pub enum Contents {
    /// Anything. Launches on two streams must not share it.
    Anything,
    /// Zeros, and again after each launch. Launches on two streams must not share it.
    Zeros,
    /// The tiles of each block. Nobody writes to it.
    Tiles(TileOrder),
    /// The key blocks of each tile, or the query blocks of each key block. Nobody writes to it.
    Blocks(BlockMask),
    /// The same, found by a launch of the plan.
    FoundBlocks(BlockMask),
    /// The tiles of each block, shared out by a launch of the plan.
    FoundTiles(TileOrder),
}

/// The words of the memory that nobody writes to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Lists {
    /// The key blocks of each tile.
    pub blocks: Option<Vec<u32>>,
    /// The tiles of each block. They cost what is in the lists of key blocks.
    pub tiles: Option<Vec<u32>>,
}

impl Lists {
    /// Those that a source asks for.
    pub fn of(&self, source: Source) -> Option<&[u32]> {
        match source {
            Source::Workspace(Workspace::BlockLists) => self.blocks.as_deref(),
            Source::Workspace(Workspace::TileLists) => self.tiles.as_deref(),
            _ => None,
        }
    }
}

impl Contents {
    /// Whether nobody writes to it.
    pub fn is_constant(&self) -> bool {
        matches!(self, Contents::Tiles(_) | Contents::Blocks(_))
    }
}

/// How a problem is cut into tiles.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Tiling {
    /// Query rows of a tile.
    pub query_rows: u32,
    /// Keys of a block.
    pub key_block: u32,
    /// Tiles of one query head; of a ragged batch, of all sequences at most.
    pub tiles_per_head: u32,
    /// Tiles in all.
    pub tiles: u32,
    /// Over how many blocks of threads the keys of a tile are split.
    pub splits: u32,
    /// Tiles and splits for each multiprocessor: below 1 some have nothing to do.
    pub waves: f64,
}

impl Choice {
    /// One launch without memory.
    pub(crate) fn of(kernel: Configuration, blocks: u32, reason: impl Into<String>) -> Self {
        Choice {
            launches: vec![Launch { kernel, blocks, numbers: Vec::new(), widened: false }],
            prepared: 0,
            main: 0,
            memory: Vec::new(),
            tiling: None,
            reason: reason.into(),
        }
    }

    /// The launches of a configuration of the caller's own, tuned or not, on a problem that it is
    /// built for, with keys cut into so many parts where it cuts them: for measuring and for tests.
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

    /// Gives the attention kernel the key blocks of its tiles. Where tensors say which they are, a
    /// launch before it finds them; the answer is whether there is one.
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
        let source = Source::Workspace(Workspace::BlockLists);
        let found = mask.finder(target, kind);
        let contents = match found {
            Some(_) => Contents::FoundBlocks(mask),
            None => Contents::Blocks(mask),
        };
        self.memory.push(Memory { source, bytes: 4 * words, contents });
        if let Some((finder, lister)) = found {
            let source = Source::Workspace(Workspace::FoundBlocks);
            let (bytes, contents) = (4 * mask.found_words(), Contents::Anything);
            self.memory.push(Memory { source, bytes, contents });
            let numbers: Vec<_> = mask.numbers().into_iter().chain(mask.finder_numbers()).collect();
            let launch = |kernel, blocks| Launch {
                kernel,
                blocks,
                numbers: numbers.clone(),
                widened: false,
            };
            let blocks = BlockFinder::blocks(mask.pairs());
            self.prepare(launch(Configuration::BlockFinder(finder), blocks));
            let blocks = BlockLister::blocks(mask.lists());
            self.prepare(launch(Configuration::BlockLister(lister), blocks));
        }
        Ok(found.is_some())
    }

    /// Puts a launch behind those that come first.
    fn prepare(&mut self, launch: Launch) {
        self.launches.insert(self.prepared, launch);
        self.prepared += 1;
        self.main += 1;
    }

    /// Whether tiles take key blocks from lists.
    pub fn has_block_lists(&self) -> bool {
        let lists = |memory: &Memory| {
            matches!(memory.contents, Contents::Blocks(_) | Contents::FoundBlocks(_))
        };
        self.memory.iter().any(lists)
    }

    /// How much memory is filled by a launch that finds lists, where there is one.
    pub fn found_bytes(&self, workspace: Workspace) -> Option<u64> {
        let found = |contents: &Contents| {
            matches!(contents, Contents::FoundBlocks(_) | Contents::FoundTiles(_))
        };
        let mut memory = self.memory.iter().filter(|memory| found(&memory.contents));
        let found = memory.find(|memory| memory.source == Source::Workspace(workspace))?;
        Some(found.bytes)
    }

    /// The words of the memory that nobody writes to, where the contents of some tensors that
    /// functions load from are known.
    pub fn lists_over(&self, contents: &[HostTensor]) -> Lists {
        let blocks = self.memory.iter().find_map(|memory| match &memory.contents {
            Contents::Blocks(mask) | Contents::FoundBlocks(mask) => Some(mask.words_over(contents)),
            _ => None,
        });
        let tiles = self.memory.iter().find_map(|memory| match &memory.contents {
            Contents::Tiles(order) | Contents::FoundTiles(order) => {
                Some(order.words_over(blocks.as_deref().unwrap_or_default()))
            }
            _ => None,
        });
        Lists { blocks, tiles }
    }

    /// The attention kernel.
    pub fn kernel(&self) -> &Configuration {
        &self.launches[self.main].kernel
    }
}

/// The kind of mask that kernels are built for, where masks without a bound have kinds of their own.
fn mask_kind(problem: &Problem) -> MaskKind {
    match effective_mask(problem) {
        Mask::NONE => MaskKind::Dense,
        Mask::CAUSAL => MaskKind::Causal,
        mask if mask.chunk.is_some() => MaskKind::Chunked,
        _ => MaskKind::Local,
    }
}

/// The same where every mask is a window.
fn window_kind(problem: &Problem) -> MaskKind {
    match problem.mask.chunk {
        Some(_) => MaskKind::Chunked,
        None => MaskKind::Local,
    }
}

/// The mask without bounds that hide nothing, where all sequences have the same lengths.
fn effective_mask(problem: &Problem) -> Mask {
    let (queries, keys) = (problem.query_length, problem.key_length);
    let mut mask = problem.mask.without_function();
    mask.left = mask.left.filter(|left| left.saturating_add(1) < keys);
    mask.right = mask.right.filter(|right| right.saturating_add(1) < queries || *right == 0);
    mask.chunk = mask.chunk.filter(|chunk| chunk.get() < keys || queries > keys);
    mask
}

/// The window that is left of a mask then.
fn effective_window(problem: &Problem) -> Window {
    window(&Problem { mask: effective_mask(problem), ..problem.clone() })
}

/// What the key blocks of tiles, of so many rows and keys, are found from, or the query blocks of key
/// blocks; nothing where no mask is a function.
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

/// The element of a problem whose types and head dims the tensor cores take, or why they do not.
fn tensor_core_element(problem: &Problem) -> Result<Element, String> {
    let dtype = problem.dtypes.uniform()?;
    let element = dtype.element();
    if !matches!(element, Element::F16 | Element::BF16) {
        return Err(format!("the tensor cores take f16 and bf16, not {dtype}"));
    }
    check_head_dims(problem, 8)?;
    Ok(element)
}

/// Refuses head dims that are not whole copies of so many elements, and problems without queries.
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

/// The element of queries and outputs, and what keys and values are made of, where these have 8
/// bits and those have 16; or why the tensor cores do not take them so.
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

/// Refuses scales for which the guarded softmax's references leave the range of numbers: for
/// "nothing seen", -1e30, to stay finite and not to vanish. A scale of zero and negative scales are
/// outside: the maximum of unscaled scores would not be the maximum of scaled ones.
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

/// The sizes of a problem of equal lengths as kernels count them.
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
        // Positions are compared as signed numbers, some of them a tile behind the end.
        let margin = 1024;
        let positions = u64::from(query_length) + u64::from(key_length) + margin;
        if positions > i32::MAX as u64 {
            return Err(too_large("the lengths"));
        }
        let tiles_per_head = query_length.div_ceil(query_rows);
        // Numbers of tiles are divided by a product that is exact below 2^31.
        let tiles = u64::from(heads)
            .checked_mul(batch.into())
            .and_then(|heads| heads.checked_mul(tiles_per_head.into()))
            .filter(|tiles| *tiles < 1 << 31)
            .ok_or_else(|| too_large("the number of tiles"))? as u32;
        Ok(Counts { query_length, key_length, heads, key_heads, batch, tiles_per_head, tiles })
    }
}
