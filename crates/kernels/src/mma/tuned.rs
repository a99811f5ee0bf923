//! Chooses the configuration for a problem.
//!
//! A rule of the table names the widest head dimensions and the most queries that it serves. The
//! first rule that serves the workload and whose shared memory fits the target, as many times as
//! thread blocks are to be resident, is taken. So one table serves the 99 KB of an Ada, the 163 KB
//! of an A100 and the 227 KB of a Hopper.

use ptx::{Element, Target};

use super::Mma;
use crate::attention::{Batch, Rules};
use crate::fits_shared_memory;
pub use crate::forward::Workload;
use crate::product::Source;

/// A configuration and why it was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuned {
    /// The configuration to build.
    pub configuration: Mma,
    /// The number of thread blocks over which the keys of a tile are split. It is more than one
    /// exactly where the configuration is a split one.
    pub splits: u32,
    /// Why it was chosen, in a few words.
    pub reason: &'static str,
}

/// A row of the table.
struct TileRule {
    /// The widest queries and the widest values that it serves.
    dims: (u32, u32),
    /// The most queries of a sequence that it serves.
    queries: u64,
    /// Whether there are registers for `f16` accumulators beside the output.
    half_sums: bool,
    /// Which kinds of rows it has registers for.
    rows: RowsServed,
    tile: Tile,
    reason: &'static str,
}

/// What must fit in registers beside scores and output.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RowsServed {
    /// Nothing: equal lengths under a plain mask.
    Plain,
    /// Windows, score rules, and the row positions of a ragged batch; but not windows over pages.
    Ruled,
    /// All of these.
    All,
}

/// The part of a configuration that a rule determines.
#[derive(Clone, Copy)]
struct Tile {
    warps: u32,
    row_tiles: u32,
    key_block: u32,
    query_source: Source,
    residents: u32,
}

const ANY_LENGTH: u64 = u64::MAX;

/// 32 rows for each of four warps: each fragment of keys or values is used twice, which matters
/// where the tensor cores are fast relative to shared memory.
const TILE_128X64: Tile =
    Tile { warps: 4, row_tiles: 2, key_block: 64, query_source: Source::Shared, residents: 2 };
const TILE_128X64_REGISTERS: Tile = Tile { query_source: Source::Registers, ..TILE_128X64 };
/// Fewer scores, which frees registers: 128 x 64 takes all 255.
const TILE_128X48: Tile = Tile { key_block: 48, ..TILE_128X64 };
const TILE_128X32: Tile = Tile { key_block: 32, ..TILE_128X64 };
/// 16 rows for each of eight warps: as many warps as two thread blocks of the other tiles have,
/// where only one fits, and half the registers for a wide output.
const TILE_128X64_NARROW: Tile = Tile { warps: 8, row_tiles: 1, residents: 1, ..TILE_128X64 };
const TILE_128X32_NARROW: Tile = Tile { key_block: 32, ..TILE_128X64_NARROW };
/// For few queries: half the rows, and so half the work wasted on rows that do not exist.
const TILE_64X64: Tile = Tile { row_tiles: 1, ..TILE_128X64 };
const TILE_64X32: Tile = Tile { row_tiles: 1, ..TILE_128X32 };

/// The fallback for the widest heads, where nothing larger fits.
const LAST: TileRule =
    rule((256, 256), ANY_LENGTH, RowsServed::All, Tile { residents: 1, ..TILE_64X32 })
        .because("64 x 32 tiles are the largest that fit");

/// Measured on an H200 in bf16 (docs/performance/mma.md). The rules for targets with less shared
/// memory follow from the same reasoning with their budgets. The order is few queries before many,
/// narrow heads before wide ones, large tiles before small ones.
const RULES: &[TileRule] = &[
    rule((128, 128), 64, RowsServed::All, TILE_64X64)
        .half_sums()
        .because("64 x 64 tiles waste the least on up to 64 queries"),
    rule((128, 128), 64, RowsServed::All, TILE_64X32)
        .half_sums()
        .because("64 x 32 tiles waste the least on up to 64 queries and fit twice"),
    rule((64, 64), ANY_LENGTH, RowsServed::All, TILE_128X64_REGISTERS)
        .half_sums()
        .because("128 x 64 tiles with queries in registers are fastest up to head dim 64"),
    rule((128, 128), ANY_LENGTH, RowsServed::Plain, TILE_128X64)
        .because("128 x 64 tiles are fastest up to head dim 128"),
    rule((128, 128), ANY_LENGTH, RowsServed::Ruled, TILE_128X48)
        .because("128 x 48 tiles leave registers for windows, rules and ragged batches"),
    rule((128, 128), ANY_LENGTH, RowsServed::All, TILE_128X32)
        .because("128 x 32 tiles are the largest that fit twice up to head dim 128"),
    rule((128, 128), ANY_LENGTH, RowsServed::All, TILE_128X64_NARROW)
        .half_sums()
        .because("128 x 64 tiles, 16 rows of each of eight warps, are the largest that fit"),
    rule((256, 256), ANY_LENGTH, RowsServed::Plain, TILE_128X64_NARROW)
        .because("128 x 64 tiles, 16 rows of each of eight warps, are the largest that fit"),
    rule((256, 256), ANY_LENGTH, RowsServed::All, TILE_128X32_NARROW)
        .because("128 x 32 tiles, 16 rows of each of eight warps, are the largest that fit"),
    LAST,
];

/// The fewest key blocks of a split: fewer would not pay for writing and reading partial results.
const LEAST_OF_A_SPLIT: u64 = 4;

/// Returns the row for head dimensions of queries and of values up to `dims`, and for so many queries
/// at most.
const fn rule(dims: (u32, u32), queries: u64, rows: RowsServed, tile: Tile) -> TileRule {
    TileRule { dims, queries, half_sums: false, rows, tile, reason: "" }
}

impl TileRule {
    const fn because(self, reason: &'static str) -> TileRule {
        TileRule { reason, ..self }
    }

    const fn half_sums(self) -> TileRule {
        TileRule { half_sums: true, ..self }
    }

    fn configuration(
        &self,
        target: Target,
        workload: &Workload,
        sums: Element,
        batch: Batch,
    ) -> Mma {
        Mma {
            target,
            element: workload.element,
            head_dim: workload.head_dim,
            value_head_dim: workload.value_head_dim,
            rules: workload.rules,
            batch,
            warps: self.tile.warps,
            row_tiles: self.tile.row_tiles,
            key_block: self.tile.key_block,
            query_source: self.tile.query_source,
            residents: self.tile.residents,
            accumulate: sums,
            split: false,
        }
    }

    fn serves(&self, target: Target, workload: &Workload, sums: Element, batch: Batch) -> bool {
        let mask = workload.rules.mask;
        let plain = batch == Batch::Equal && workload.rules.is_plain();
        workload.head_dim <= self.dims.0
            && workload.value_head_dim <= self.dims.1
            && workload.query_length <= self.queries
            && (self.half_sums || sums == Element::F32)
            && match self.rows {
                RowsServed::All => true,
                RowsServed::Plain => plain,
                RowsServed::Ruled => !(plain || batch == Batch::Paged && mask.is_window()),
            }
            && self.configuration(target, workload, sums, batch).fits()
    }
}

impl Mma {
    /// Returns whether shared memory holds as many thread blocks as are to be resident.
    fn fits(&self) -> bool {
        fits_shared_memory(self.target, self.shared_bytes(), self.residents)
    }

    /// Returns over how many thread blocks the keys of a tile should be split: as many as fill the
    /// GPU, where tiles alone fill at most half of it.
    fn splits(&self, workload: &Workload) -> u32 {
        let tiles = workload.query_length.div_ceil(self.query_rows() as u64) * workload.heads;
        let places = workload.multiprocessors as u64 * self.residents as u64;
        let whole = self.rules.mask.is_window() || self.batch != Batch::Equal;
        if tiles == 0 || 2 * tiles > places || whole {
            return 1;
        }
        let key_blocks = workload.key_length.div_ceil(self.key_block as u64);
        let wanted = (places / tiles).min(key_blocks / LEAST_OF_A_SPLIT).max(1);
        // All splits take the same number of key blocks, rounded up, so fewer splits may suffice.
        key_blocks.max(1).div_ceil(key_blocks.max(1).div_ceil(wanted)) as u32
    }
}

/// Returns the configuration for a workload with accumulators of type `sums`, or `None` if the
/// kernel does not support it: the element type must be `F16` or `BF16`, and head dimensions
/// multiples of 8 up to 256. `sums` is `F32`, or `F16` for elements of `F16` and dimensions up to
/// 128.
///
/// ```
/// use flashcore_kernels::Rules;
/// use flashcore_kernels::mma::{Workload, tuned};
/// use flashcore_kernels::ptx::{Element, Target};
///
/// let workload = Workload {
///     element: Element::BF16,
///     head_dim: 128,
///     value_head_dim: 128,
///     rules: Rules::CAUSAL,
///     query_length: 4096,
///     key_length: 4096,
///     heads: 64,
///     multiprocessors: 108,
/// };
/// let choice = tuned(Target::SM_80, &workload, Element::F32).expect("128 is a multiple of 8");
/// assert_eq!((choice.configuration.query_rows(), choice.splits), (128, 1));
/// ```
pub fn tuned(target: Target, workload: &Workload, sums: Element) -> Option<Tuned> {
    tuned_batch(target, workload, sums, Batch::Equal)
}

/// Returns the configuration for sequences that are stored as `batch` says. The workload's lengths
/// are then those of the longest sequence.
pub fn tuned_batch(
    target: Target,
    workload: &Workload,
    sums: Element,
    batch: Batch,
) -> Option<Tuned> {
    let rule = RULES.iter().find(|rule| rule.serves(target, workload, sums, batch))?;
    let configuration = rule.configuration(target, workload, sums, batch);
    let splits = configuration.splits(workload);
    let configuration = Mma { split: splits > 1, ..configuration };
    configuration.fault().is_none().then_some(Tuned { configuration, splits, reason: rule.reason })
}

/// Returns the configurations of a target at the dimensions of each rule of the table, for both
/// element types, dense and causal masks, many queries and few.
pub fn every_tuned(target: Target) -> Vec<Mma> {
    let mut all: Vec<Mma> = Vec::new();
    for rule in RULES {
        for element in [Element::F16, Element::BF16] {
            for rules in [Rules::DENSE, Rules::CAUSAL] {
                let workload = Workload {
                    element,
                    head_dim: rule.dims.0,
                    value_head_dim: rule.dims.1,
                    rules,
                    query_length: rule.queries.min(4096),
                    key_length: 4096,
                    heads: 1024,
                    multiprocessors: 128,
                };
                let chosen =
                    tuned(target, &workload, Element::F32).map(|tuned| tuned.configuration);
                all.extend(chosen.filter(|configuration| !all.contains(configuration)));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use Element::{F16, F32};

    use super::*;

    const TARGETS: [Target; 5] =
        [Target::SM_80, Target::SM_86, Target::SM_89, Target::SM_90, Target::SM_120];

    fn workload(dims: (u32, u32), queries: u64, heads: u64) -> Workload {
        Workload {
            element: Element::BF16,
            head_dim: dims.0,
            value_head_dim: dims.1,
            rules: Rules::CAUSAL,
            query_length: queries,
            key_length: 4096,
            heads,
            multiprocessors: 100,
        }
    }

    /// Building a program checks its shared memory, among other things.
    #[test]
    fn every_pair_of_dimensions_is_served_on_every_target() {
        for target in TARGETS {
            for head_dim in (8..=256).step_by(8) {
                for value_head_dim in [head_dim, 8, 64, 128, 200, 256] {
                    // Building a few programs stands for the rest; asking whether there is one is
                    // cheap.
                    let dims = (head_dim, value_head_dim);
                    for queries in [1, 4096] {
                        let chosen = tuned(target, &workload(dims, queries, 100), F32).unwrap();
                        assert!(chosen.configuration.fits(), "{}", chosen.configuration.name());
                        if target == Target::SM_86 && queries == 4096 {
                            let built = chosen.configuration.program();
                            assert!(built.is_ok(), "{}: {built:?}", chosen.configuration.name());
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_not_served_has_no_configuration() {
        for dims in [(0, 64), (4, 64), (64, 100), (264, 64), (64, 512)] {
            assert_eq!(tuned(Target::SM_80, &workload(dims, 100, 1), F32), None);
        }
        let single = Workload { element: Element::F32, ..workload((64, 64), 100, 1) };
        assert_eq!(tuned(Target::SM_80, &single, F32), None);
        assert_eq!(tuned(Target::SM_75, &workload((64, 64), 100, 1), F32), None);
    }

    #[test]
    fn sums_in_f16_are_for_f16_up_to_128() {
        let halves = |dims| Workload { element: F16, ..workload(dims, 4096, 100) };
        for target in TARGETS {
            for dims in [(8, 8), (64, 64), (128, 128), (40, 128)] {
                let chosen = tuned(target, &halves(dims), F16).unwrap().configuration;
                assert_eq!((chosen.accumulate, chosen.head_dim), (F16, dims.0));
            }
            assert_eq!(tuned(target, &halves((136, 64)), F16), None);
            assert_eq!(tuned(target, &workload((64, 64), 4096, 100), F16), None);
        }
    }

    /// Few tiles over many keys are split; many tiles, or few keys, are not.
    #[test]
    fn splits_fill_the_gpu() {
        let splits = |queries, keys, heads| {
            let workload = Workload { key_length: keys, ..workload((128, 128), queries, heads) };
            tuned(Target::SM_90, &workload, F32).unwrap().splits
        };
        // 100 multiprocessors with two resident thread blocks: room for 200.
        assert_eq!(splits(1, 64 * 800, 1), 200);
        assert_eq!(splits(1, 64 * 400, 8), 25);
        assert_eq!(splits(1, 64 * 400, 101), 1);
        assert_eq!(splits(1, 64 * 400, 100), 2);
        assert_eq!(splits(4096, 4096, 16), 1);
        assert_eq!(splits(128, 64 * 8, 1), 2);
        assert_eq!(splits(128, 64 * 7, 1), 1);
        assert_eq!(splits(128, 0, 1), 1);
        // 10 blocks in two splits of five, not in three of four and two left over.
        assert_eq!(splits(1, 64 * 10, 1), 2);
    }
}
