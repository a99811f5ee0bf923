//! Which configuration serves which problem: tables of measured choices.
//!
//! A rule names the widest head dimensions it serves, and the first rule that fits a problem is
//! taken. Narrower head dimensions are built as they are, with the rule's tiles. Register use
//! depends on the tiles and the value dimension alone, and shared memory on dimensions rounded up
//! to whole panels, so what fits at a rule's own dimensions fits at every narrower one.

use ptx::Element;

use super::{Form, Forward, Prefill};
use crate::attention::{MaskKind, Rules};
use crate::product::Source;

/// What the choice of a configuration depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Workload {
    /// The element of the inputs.
    pub element: Element,
    /// The head dimension of queries and keys.
    pub head_dim: u32,
    /// The head dimension of values and outputs.
    pub value_head_dim: u32,
    /// The mask and the score rules.
    pub rules: Rules,
    /// Queries per sequence.
    pub query_length: u64,
    /// Keys per sequence.
    pub key_length: u64,
    /// Query heads over all sequences.
    pub heads: u64,
    /// Multiprocessors of the GPU.
    pub multiprocessors: u32,
}

impl Workload {
    /// Returns the sequence length that rules compare with: the shorter of queries and keys. Long
    /// sequences get tiles of 192 rows, which leave no registers for more than a mask; and the
    /// taller a tile, the more of it lies beyond the edges of a window. So problems with more than
    /// a causal mask count as short. With 8-bit inputs, problems with score rules count as even
    /// shorter, because large tiles begin at shorter lengths there.
    fn counted_length(&self) -> u64 {
        let length = self.query_length.min(self.key_length);
        match self.rules.is_plain() {
            true => length,
            false if self.element == Element::E4M3 && self.rules.changes_scores() => {
                length.min(1024)
            }
            false => length.min(SHORT),
        }
    }

    /// Returns whether tiles of 128 rows would leave half of the GPU's multiprocessors or more
    /// without work.
    pub fn is_small(&self) -> bool {
        let tiles = self.query_length.div_ceil(128).saturating_mul(self.heads);
        tiles.saturating_mul(2) <= self.multiprocessors as u64
    }
}

/// A configuration and the reason for choosing it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuned {
    /// The configuration to build.
    pub configuration: Forward,
    /// The reason, in a few words.
    pub reason: &'static str,
}

/// One row of a table.
struct TileRule {
    /// The largest head dimensions of queries and of values that it serves.
    dims: (u32, u32),
    masks: Masks,
    /// The longest sequences it serves, as [`Workload::counted_length`] counts them.
    length: u64,
    /// Whether it serves only problems too small to fill half of the GPU with tiles of 128 rows
    /// ([`Workload::is_small`]).
    few: bool,
    tile: Tile,
    reason: &'static str,
}

/// The fields of a configuration that a rule sets.
#[derive(Clone, Copy)]
struct Tile {
    warpgroups: u32,
    key_block: u32,
    stages: u32,
    query_buffers: u32,
    query_source: Source,
    ping_pong: bool,
    form: Form,
}

/// The masks and score functions that a rule serves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Masks {
    /// No mask: all tiles of equal length.
    Dense,
    /// A causal mask, a window or a mask function: tiles of unequal length, with some key blocks
    /// masked.
    Uneven,
    /// Any mask, or none.
    Any,
    /// Any mask or none, with a score function that loads something for each score.
    Loads,
}

const ANY_LENGTH: u64 = u64::MAX;
/// The longest sequences for which tiles of 192 rows do not pay.
const SHORT: u64 = 2047;

const TILE_64X128: Tile =
    Tile { warpgroups: 1, query_buffers: 1, ping_pong: false, ..TILE_128X128 };
const TILE_128X128: Tile = Tile {
    warpgroups: 2,
    key_block: 128,
    stages: 2,
    query_buffers: 2,
    query_source: Source::Shared,
    ping_pong: true,
    form: Form::FULL,
};
const TILE_128X128_WITHOUT_TURNS: Tile = Tile { ping_pong: false, ..TILE_128X128 };
const TILE_128X128_REGISTERS: Tile =
    Tile { query_buffers: 1, query_source: Source::Registers, stages: 3, ..TILE_128X128 };
const TILE_128X128_DEEP: Tile = Tile { stages: 4, ..TILE_128X128_REGISTERS };
const TILE_192X96: Tile = Tile { warpgroups: 3, key_block: 96, stages: 3, ..TILE_128X128 };
const TILE_192X80_REGISTERS: Tile =
    Tile { key_block: 80, query_source: Source::Registers, ..TILE_192X96 };
const TILE_128X128_LOADS: Tile = Tile { stages: 3, ..TILE_128X128 };
// A second query buffer does not fit into shared memory beside keys and values this wide.
const TILE_128X96: Tile = Tile { key_block: 96, query_buffers: 1, ..TILE_128X128 };
// The tensor cores are the limit here: all forms are within 1 %, and the compact one compiles
// fastest.
const TILE_128X64: Tile =
    Tile { key_block: 64, query_buffers: 1, form: Form::COMPACT, ..TILE_128X128 };
const TILE_128X64_OVERLAPPED: Tile =
    Tile { form: Form { overlap_tiles: true, ..Form::COMPACT }, ..TILE_128X64 };

// Rules of both `RULES` and `PREFILL_RULES`.
const FEW_ROWS: TileRule = rule((128, 128), Masks::Any, ANY_LENGTH, TILE_64X128)
    .few()
    .because("64 x 128 tiles keep more of the GPU busy where 128 rows would fill less than half");
const UP_TO_192: TileRule = rule((192, 192), Masks::Any, ANY_LENGTH, TILE_128X96)
    .because("128 x 96 tiles are fastest up to head dim 192");

/// The rules of 16-bit inputs, measured on an H200 in bf16; docs/performance/forward.md has the
/// numbers. Narrow head dimensions come before wide ones, short sequences before long ones.
const RULES: &[TileRule] = &[
    FEW_ROWS,
    rule((64, 64), Masks::Loads, ANY_LENGTH, TILE_128X128_LOADS).because(
        "128 x 128 tiles with queries in shared memory have registers for what a score function \
         loads",
    ),
    rule((64, 64), Masks::Dense, SHORT, TILE_128X128_DEEP)
        .because("128 x 128 tiles with four stages are fastest below 2048 positions"),
    rule((64, 64), Masks::Dense, ANY_LENGTH, TILE_192X80_REGISTERS)
        .because("192 x 80 tiles with queries in registers are fastest from 2048 positions on"),
    rule((64, 64), Masks::Uneven, 512, TILE_128X128)
        .because("128 x 128 tiles are fastest up to 512 positions under a causal mask"),
    rule((64, 64), Masks::Uneven, SHORT, TILE_128X128_REGISTERS).because(
        "128 x 128 tiles with queries in registers are fastest below 2048 positions under \
         a causal mask",
    ),
    rule((64, 64), Masks::Uneven, ANY_LENGTH, TILE_192X96)
        .because("192 x 96 tiles are fastest from 2048 positions on under a causal mask"),
    rule((96, 96), Masks::Any, ANY_LENGTH, TILE_128X128)
        .because("128 x 128 tiles are fastest up to head dim 96"),
    rule((128, 128), Masks::Dense, 2048, TILE_128X128)
        .because("128 x 128 tiles in turns are fastest up to 2048 positions"),
    rule((128, 128), Masks::Dense, ANY_LENGTH, TILE_128X128_WITHOUT_TURNS)
        .because("128 x 128 tiles are fastest up to head dim 128, and turns no longer pay"),
    rule((128, 128), Masks::Uneven, ANY_LENGTH, TILE_128X128)
        .because("128 x 128 tiles in turns are fastest up to head dim 128 under a causal mask"),
    rule((192, 128), Masks::Any, ANY_LENGTH, TILE_128X96)
        .because("128 x 96 tiles fit beside queries of up to 192"),
    UP_TO_192,
    rule((256, 256), Masks::Any, ANY_LENGTH, TILE_128X64)
        .because("128 x 64 tiles are the largest whose output fits the registers at head dim 256"),
];

// Rules of ragged batches under any mask.
const RAGGED_UP_TO_64: TileRule = rule((64, 64), Masks::Any, ANY_LENGTH, TILE_128X128_REGISTERS)
    .because("128 x 128 tiles with queries in registers are fastest up to head dim 64");
const RAGGED_UP_TO_128: TileRule = rule((128, 128), Masks::Any, ANY_LENGTH, TILE_128X128)
    .because("128 x 128 tiles in turns are fastest up to head dim 128");

/// The longest packed sequences, in the mean, for which tiles of 192 rows do not pay under a causal
/// mask: a taller tile wastes more at the end of each sequence.
const RAGGED_SHORT: u64 = 4095;

/// The rules of ragged batches with 16-bit inputs, by their mean length. Producers need more
/// registers there, which leaves enough for tiles of 192 rows only without pages, and with no more
/// than a causal mask.
const PREFILL_RULES: &[TileRule] = &[
    FEW_ROWS,
    TileRule { masks: Masks::Dense, length: SHORT, ..RAGGED_UP_TO_64 },
    rule((64, 64), Masks::Dense, ANY_LENGTH, TILE_192X80_REGISTERS)
        .because("192 x 80 tiles with queries in registers are fastest from 2048 positions on"),
    TileRule { length: RAGGED_SHORT, ..RAGGED_UP_TO_64 },
    rule((64, 64), Masks::Uneven, ANY_LENGTH, TILE_192X96)
        .because("192 x 96 tiles are fastest from 4096 positions on under a causal mask"),
    TileRule { masks: Masks::Dense, length: 1024, ..RAGGED_UP_TO_128 },
    rule((128, 128), Masks::Dense, ANY_LENGTH, TILE_128X128_WITHOUT_TURNS)
        .because("128 x 128 tiles are fastest up to head dim 128, and turns no longer pay"),
    RAGGED_UP_TO_128,
    UP_TO_192,
    rule((256, 256), Masks::Any, ANY_LENGTH, TILE_128X64_OVERLAPPED).because(
        "128 x 64 tiles are the largest whose output fits the registers at head dim 256; many are \
         short, and the next begins while one is stored",
    ),
];

// With a second accumulator and P in 8 bits, other tiles fit: see docs/fp8-forward.md.
const FP8_64X128: Tile = Tile { form: Form::COMPACT, ..TILE_64X128 };
const FP8_192X128: Tile = Tile { warpgroups: 3, form: Form::COMPACT, ..TILE_128X128 };
const FP8_192X160: Tile = Tile { key_block: 160, ..FP8_192X128 };
const FP8_128X128: Tile = Tile { form: Form::COMPACT, ..TILE_128X128 };
const FP8_128X128_ONE_BUFFER: Tile = Tile { query_buffers: 1, ..FP8_128X128 };
const FP8_128X192: Tile = Tile { key_block: 192, ..FP8_128X128 };
const FP8_128X224: Tile = Tile { key_block: 224, ..FP8_128X128_ONE_BUFFER };

// Rules of both `FP8_RULES` and `FP8_PREFILL_RULES`.
const FP8_FEW_ROWS: TileRule = TileRule { tile: FP8_64X128, ..FEW_ROWS };
const FP8_UP_TO_64: TileRule = rule((64, 64), Masks::Any, 1024, FP8_192X128)
    .because("192 x 128 tiles in e4m3 keep the exponentials of three warpgroups going");
const FP8_UP_TO_64_LONG: TileRule = rule((64, 64), Masks::Any, ANY_LENGTH, FP8_192X160)
    .because("192 x 160 tiles in e4m3 are ahead where keys are many");
const FP8_UP_TO_128: TileRule = rule((128, 128), Masks::Any, ANY_LENGTH, FP8_128X128)
    .because("128 x 128 tiles in e4m3 waste little beyond an edge");

/// The rules of inputs in e4m3.
const FP8_RULES: &[TileRule] = &[
    FP8_FEW_ROWS,
    FP8_UP_TO_64,
    FP8_UP_TO_64_LONG,
    TileRule { masks: Masks::Dense, length: 1024, ..FP8_UP_TO_128 },
    rule((128, 128), Masks::Dense, 4096, FP8_128X192)
        .because("128 x 192 tiles in e4m3 leave room for the next tile's queries"),
    rule((128, 128), Masks::Dense, ANY_LENGTH, FP8_128X224)
        .because("128 x 224 tiles in e4m3 add sums less often where keys are many"),
    TileRule { length: 2048, ..FP8_UP_TO_128 },
    rule((128, 128), Masks::Uneven, 4096, FP8_128X192)
        .because("128 x 192 tiles in e4m3 add sums less often where a mask's edge is a small part"),
    rule((128, 128), Masks::Uneven, ANY_LENGTH, FP8_128X224)
        .because("128 x 224 tiles in e4m3 are ahead where a mask's edge is a very small part"),
    rule((256, 256), Masks::Any, ANY_LENGTH, FP8_128X128_ONE_BUFFER)
        .because("128 x 128 tiles in e4m3 are the largest whose output fits the registers"),
];

/// The rules of ragged batches with inputs in e4m3, whose producers need more registers.
const FP8_PREFILL_RULES: &[TileRule] = &[
    FP8_FEW_ROWS,
    FP8_UP_TO_64,
    FP8_UP_TO_64_LONG,
    FP8_UP_TO_128,
    rule((256, 256), Masks::Any, ANY_LENGTH, FP8_64X128)
        .because("64 x 128 tiles in e4m3 are the largest that fit beside ragged batches"),
];

/// Returns the tiles for a ragged batch, or `None` where the kernel does not serve it. The
/// workload's queries and heads say how much work there is in total, its keys how long sequences
/// are; with keys in pages the mask is a window. The configuration has a window where the workload
/// has a causal mask.
pub fn tuned_prefill(workload: &Workload) -> Option<Tuned> {
    let table = if workload.element == Element::E4M3 { FP8_PREFILL_RULES } else { PREFILL_RULES };
    let mut tuned = choose(table, workload)?;
    let mask = &mut tuned.configuration.rules.mask;
    if *mask == MaskKind::Causal {
        *mask = MaskKind::Local;
    }
    Some(tuned)
}

/// Returns every rule of the ragged table at its own head dimensions: plain, and under a mask also
/// with pages and with all score rules, in alternating elements. The plain ones come also in the
/// compact form and with a single tile per thread block. Finally, for each head dimension, what is
/// chosen without a mask and with all score rules, and with capped scores alone.
pub fn every_prefill() -> Vec<Prefill> {
    let mut all = Vec::new();
    for rule in PREFILL_RULES {
        let tile = |element, rules| rule.configuration(element, rule.dims, rules);
        let masks: &[Rules] = match rule.masks {
            Masks::Dense => &[Rules::DENSE],
            Masks::Uneven => &[Rules::LOCAL],
            _ => &[Rules::LOCAL, Rules::DENSE],
        };
        for rules in masks {
            let bf16 = tile(Element::BF16, *rules);
            let plain = Prefill { tile: bf16, page_rows: None, single_tile: false };
            let compact = Forward { form: Form::COMPACT, ..plain.tile };
            all.push(plain);
            if compact != plain.tile {
                all.push(Prefill { tile: compact, ..plain });
            }
            if *rules == Rules::DENSE {
                let tile = tile(Element::F16, *rules);
                all.push(Prefill { tile, single_tile: true, ..plain });
            } else {
                all.push(Prefill { single_tile: true, ..plain });
                // Tall tiles serve a causal mask alone.
                if plain.tile.warpgroups < 3 {
                    all.push(Prefill { page_rows: Some(16), ..plain });
                    all.push(Prefill { tile: tile(Element::F16, Rules::EVERY), ..plain });
                }
            }
        }
    }
    for dim in [64, 128, 192, 256] {
        let every = Rules { mask: MaskKind::Dense, ..Rules::EVERY };
        for rules in [every, Rules::DENSE.capped(), Rules::LOCAL.capped()] {
            let workload = Workload { rules, ..long_workload(dim) };
            let tiles = tuned_prefill(&workload).map(|it| it.configuration);
            all.extend(tiles.map(|tile| Prefill { tile, page_rows: None, single_tile: false }));
        }
    }
    // Rules for other lengths may have the same tiles.
    let mut seen = std::collections::HashSet::new();
    all.retain(|it| seen.insert(*it));
    all
}

/// Returns the configuration for a workload, or `None` where the kernel does not serve it. The
/// element must be `F16` or `BF16`, with head dimensions that are multiples of 8 up to 256, or
/// `E4M3`, with multiples of 16. With `E4M3` the output is `BF16`; the caller may set it to `F16`.
///
/// ```
/// use flashcore_kernels::Rules;
/// use flashcore_kernels::forward::{Workload, tuned};
/// use flashcore_kernels::ptx::Element;
///
/// let workload = Workload {
///     element: Element::BF16,
///     head_dim: 128,
///     value_head_dim: 128,
///     rules: Rules::CAUSAL,
///     query_length: 4096,
///     key_length: 4096,
///     heads: 64,
///     multiprocessors: 132,
/// };
/// let choice = tuned(&workload).expect("128 is a multiple of 8");
/// assert_eq!(choice.configuration.query_rows(), 128);
/// println!("{}: {}", choice.configuration.name(), choice.reason);
/// ```
pub fn tuned(workload: &Workload) -> Option<Tuned> {
    choose(if workload.element == Element::E4M3 { FP8_RULES } else { RULES }, workload)
}

fn choose(rules: &[TileRule], workload: &Workload) -> Option<Tuned> {
    let least = match workload.element {
        Element::F16 | Element::BF16 => 8,
        Element::E4M3 => 16,
        _ => return None,
    };
    let served = |dim: u32| dim > 0 && dim.is_multiple_of(least);
    if !served(workload.head_dim) || !served(workload.value_head_dim) {
        return None;
    }
    let rule = rules.iter().find(|rule| rule.serves(workload))?;
    let configuration = rule.configuration(
        workload.element,
        (workload.head_dim, workload.value_head_dim),
        workload.rules,
    );
    Some(Tuned { configuration, reason: rule.reason })
}

/// Returns every rule of the 16-bit table at its own head dimensions, in both elements, and without
/// and with a causal mask where it serves them.
pub fn every_tuned() -> Vec<Forward> {
    let mut all = Vec::new();
    for rule in RULES {
        for element in [Element::F16, Element::BF16] {
            for rules in [Rules::DENSE, Rules::CAUSAL] {
                if rule.masks.include(&rules) {
                    all.push(rule.configuration(element, rule.dims, rules));
                }
            }
        }
    }
    all
}

/// Returns every rule of the 8-bit table at its own head dimensions: dense, causal, and with a
/// window and sinks, where it serves them. Then, for each head dimension, what is chosen with all
/// score rules.
pub fn every_fp8() -> Vec<Forward> {
    let sinks = Rules { sinks: true, ..Rules::LOCAL };
    let mut all = Vec::new();
    for rule in FP8_RULES {
        for rules in [Rules::DENSE, Rules::CAUSAL, sinks] {
            let configuration = rule.configuration(Element::E4M3, rule.dims, rules);
            // Rules for other lengths may have the same tiles.
            if rule.masks.include(&rules) && !all.contains(&configuration) {
                all.push(configuration);
            }
        }
    }
    for dim in [64, 128, 256] {
        let workload = Workload { element: Element::E4M3, ..long_workload(dim) };
        all.extend(tuned(&workload).map(|tuned| tuned.configuration));
    }
    all
}

/// Returns a workload of long sequences with a window and all score rules.
fn long_workload(dim: u32) -> Workload {
    Workload {
        element: Element::F16,
        head_dim: dim,
        value_head_dim: dim,
        rules: Rules::EVERY,
        query_length: 8192,
        key_length: 8192,
        heads: 64,
        multiprocessors: 132,
    }
}

/// Returns every rule of the ragged 8-bit table at its own head dimensions, with f16 outputs:
/// plain, and with pages and sinks.
pub fn every_fp8_prefill() -> Vec<Prefill> {
    let mut all = Vec::new();
    for rule in FP8_PREFILL_RULES {
        for (sinks, page_rows) in [(false, None), (true, Some(16))] {
            let rules = Rules { sinks, ..Rules::LOCAL };
            let tile = rule.configuration(Element::E4M3, rule.dims, rules);
            let tile = Forward { output: Element::F16, ..tile };
            all.push(Prefill { tile, page_rows, single_tile: false });
        }
    }
    all
}

/// Returns the row for head dimensions of queries and of values up to `dims`, and for sequences up
/// to a length.
const fn rule(dims: (u32, u32), masks: Masks, length: u64, tile: Tile) -> TileRule {
    TileRule { dims, masks, length, few: false, tile, reason: "" }
}

impl TileRule {
    const fn because(self, reason: &'static str) -> TileRule {
        TileRule { reason, ..self }
    }

    /// Leaves problems that fill half of the GPU to other rows.
    const fn few(self) -> TileRule {
        TileRule { few: true, ..self }
    }

    fn serves(&self, workload: &Workload) -> bool {
        workload.head_dim <= self.dims.0
            && workload.value_head_dim <= self.dims.1
            && self.masks.include(&workload.rules)
            && workload.counted_length() <= self.length
            && (!self.few || workload.is_small())
    }

    /// Returns the configuration of this rule. This is the one place that names every field.
    fn configuration(&self, element: Element, dims: (u32, u32), rules: Rules) -> Forward {
        Forward {
            element,
            output: if element == Element::E4M3 { Element::BF16 } else { element },
            head_dim: dims.0,
            value_head_dim: dims.1,
            rules,
            warpgroups: self.tile.warpgroups,
            key_block: self.tile.key_block,
            stages: self.tile.stages,
            query_buffers: self.tile.query_buffers,
            query_source: self.tile.query_source,
            ping_pong: self.tile.ping_pong,
            form: self.tile.form,
            stream_k: false,
        }
    }
}

impl Masks {
    /// Returns whether these rules are among the masks. A mask function counts as a mask that hides
    /// keys; where it hides few, little speed is lost by that.
    fn include(self, rules: &Rules) -> bool {
        let dense = rules.mask == MaskKind::Dense && rules.mask_function.is_none();
        match self {
            Masks::Dense => dense,
            Masks::Uneven => !dense,
            Masks::Any => true,
            Masks::Loads => rules.score_function.is_some_and(|it| it.loads_each_score()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(head_dim: u32, value_head_dim: u32, causal: bool, length: u64) -> Workload {
        Workload {
            element: Element::BF16,
            head_dim,
            value_head_dim,
            rules: if causal { Rules::CAUSAL } else { Rules::DENSE },
            query_length: length,
            key_length: length,
            heads: 16,
            multiprocessors: 132,
        }
    }

    /// Building a program checks, among other things, that it fits into shared memory.
    #[test]
    fn every_pair_of_dimensions_is_served() {
        for head_dim in (8..=256).step_by(8) {
            for value_head_dim in (8..=256).step_by(8) {
                // The diagonal and a few value dimensions: the rest lies between them.
                if value_head_dim != head_dim && ![8, 64, 128, 200, 256].contains(&value_head_dim) {
                    continue;
                }
                for (causal, length) in [(false, 1), (true, 1), (false, 8192), (true, 8192)] {
                    let workload = workload(head_dim, value_head_dim, causal, length);
                    let chosen = tuned(&workload).expect("a multiple of 8 up to 256");
                    let configuration = chosen.configuration;
                    assert_eq!(configuration.head_dim, head_dim);
                    assert_eq!(configuration.value_head_dim, value_head_dim);
                    assert_eq!(configuration.rules, workload.rules);
                    let built = configuration.program();
                    assert!(built.is_ok(), "{}: {built:?}", configuration.name());
                }
            }
        }
    }

    #[test]
    fn what_is_not_served_has_no_configuration() {
        for (head_dim, value_head_dim) in [(0, 64), (4, 64), (64, 100), (264, 64), (64, 512)] {
            assert_eq!(tuned(&workload(head_dim, value_head_dim, false, 100)), None);
        }
        let single = Workload { element: Element::F32, ..workload(64, 64, false, 100) };
        assert_eq!(tuned(&single), None);
    }

    #[test]
    fn the_first_rule_that_fits_is_taken() {
        let rows = |workload| tuned(&workload).unwrap().configuration.query_rows();
        assert_eq!(rows(workload(64, 64, false, 2047)), 128);
        assert_eq!(rows(workload(64, 64, false, 2048)), 192);
        assert_eq!(rows(workload(64, 64, true, 2047)), 128);
        assert_eq!(rows(workload(64, 64, true, 2048)), 192);
        // A few queries over many keys do not fill a tall tile.
        let decode = Workload { query_length: 1, ..workload(64, 64, false, 100_000) };
        assert_eq!(rows(Workload { heads: 1000, ..decode }), 128);
        // Few tiles do not fill the GPU: 16 heads of four tiles do not fill half of it, of five
        // they do.
        assert_eq!(rows(workload(64, 64, false, 512)), 64);
        assert_eq!(rows(workload(128, 128, true, 513)), 128);
        assert_eq!(rows(decode), 64);
        assert_eq!(rows(workload(64, 128, false, 100_000)), 128);
    }
}
