//! Chooses the configuration of the decode kernel for a workload.
//!
//! Memory bandwidth is the limit, so what counts is how many bytes are in flight on each
//! multiprocessor: the first shape of the table whose tiles fit in shared memory is taken. The same
//! table serves the 99 KB of Ada and the 227 KB of Hopper.

use ptx::{Element, Target};

use super::{Decode, Splits};
use crate::attention::{MaskKind, Rules};
use crate::cache::{Cache, Scales};

/// The workload that a configuration is chosen for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DecodeWorkload {
    /// The element of queries and outputs.
    pub element: Element,
    /// The element and scales of keys and values.
    pub cache: Cache,
    /// Head dim of queries and keys.
    pub head_dim: u32,
    /// Head dim of values and outputs.
    pub value_head_dim: u32,
    /// Query rows of a sequence and key head: queries times query heads per key head.
    pub query_rows: u32,
    /// [`Decode::page_rows`].
    pub page_rows: Option<u32>,
    /// The mask, which must be a window (chunked or not), and the score rules.
    pub rules: Rules,
    /// Whether the bits of a query's result must not depend on what else is computed with it.
    pub batch_invariant: bool,
}

/// Returns [`Decode::page_rows`] for pages of `size` rows. Left padding shifts the rows of sequences in
/// their pages.
pub fn rows_in_one_page(size: usize, left_padding: bool) -> u32 {
    if size.is_multiple_of(16) && !left_padding { 16 } else { 1 }
}

/// A configuration and why it was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuned {
    /// The configuration to build.
    pub configuration: Decode,
    /// The reason for the choice, in a few words.
    pub reason: &'static str,
}

/// Warps per block, keys per tile, stages per warp, and the reason that is reported.
struct Shape(u32, u32, u32, &'static str);

/// Shapes in order of preference, the most bytes in flight first. One block fills a multiprocessor:
/// two blocks of half the size were as fast on long sequences and slower on short ones, which then
/// have twice as many parts. Copies by tensor maps (TMA) lost up to 7 % to `cp.async`, row by row,
/// wherever memory was busy.
const SHAPES: &[Shape] = &[
    Shape(8, 32, 3, "8 warps with 3 tiles of 32 keys each are the most that fit"),
    Shape(8, 16, 3, "8 warps with 3 tiles of 16 keys each are the most that fit"),
    Shape(6, 16, 3, "6 warps with 3 tiles of 16 keys each are the most that fit"),
    Shape(4, 16, 4, "4 warps with 4 tiles of 16 keys each are the most that fit"),
    Shape(4, 16, 3, "4 warps with 3 tiles of 16 keys each are the most that fit"),
    Shape(4, 16, 2, "4 warps with 2 tiles of 16 keys each are the most that fit"),
    Shape(2, 16, 3, "2 warps with 3 tiles of 16 keys each are the most that fit"),
    Shape(2, 16, 2, "2 warps with 2 tiles of 16 keys each are the most that fit"),
];

/// Shapes that are tried first for 8-bit caches, whose tiles hold twice the keys in the same bytes.
const NARROW_SHAPES: &[Shape] = &[
    Shape(8, 32, 3, "8 warps with 3 tiles of 32 keys each are the most that fit"),
    Shape(6, 32, 3, "6 warps with 3 tiles of 32 keys each are the most that fit"),
    Shape(4, 32, 4, "4 warps with 4 tiles of 32 keys each are the most that fit"),
    Shape(4, 32, 3, "4 warps with 3 tiles of 32 keys each are the most that fit"),
    Shape(4, 32, 2, "4 warps with 2 tiles of 32 keys each are the most that fit"),
];

/// Keys of a fixed-size split, up to rounding to whole tiles of all warps. With 512, one sequence
/// of 8192 keys with 8 key heads has 128 splits, for the 132 multiprocessors of an H200; a split is
/// read in 7 us at a multiprocessor's share of the bandwidth, and its partial result has 1/64 of
/// its bytes.
const SPLIT_KEYS: u32 = 512;

/// Returns the configuration for a workload, or `None` where the kernel does not serve it: the
/// element must be `F16` or `BF16`, and the head dims multiples of 8, or of 16 over 8-bit caches,
/// up to 256.
pub fn tuned(target: Target, workload: &DecodeWorkload) -> Option<Tuned> {
    // Sixteen rows of the widest heads would exceed the registers.
    let wide = workload.head_dim + workload.value_head_dim > 384;
    let rows = if workload.query_rows <= 8 || wide { 8 } else { 16 };
    let first = if workload.cache.is_8_bit() { NARROW_SHAPES } else { &[] };
    let shapes = first.iter().chain(SHAPES);
    let fits = |tuned: &Tuned| tuned.configuration.fault().is_none();
    if !workload.batch_invariant {
        return shapes.map(|shape| with_shape(target, workload, rows, shape)).find(fits);
    }
    // A row's bits depend on `warps` and `tile_keys`, which are therefore chosen for 8 rows and
    // kept for 16; only the number of stages, which does not change bits, may shrink.
    let few = shapes.map(|shape| fixed(with_shape(target, workload, 8, shape))).find(fits)?;
    let many = (1..=few.configuration.stages).rev().map(|stages| {
        let configuration = Decode { rows, stages, ..few.configuration };
        Tuned { configuration, ..few }
    });
    many.into_iter().find(fits).or(Some(few))
}

/// Returns the same configuration with fixed-size splits of about [`SPLIT_KEYS`] keys.
fn fixed(tuned: Tuned) -> Tuned {
    let Decode { warps, tile_keys, .. } = tuned.configuration;
    let round = warps * tile_keys;
    let tiles_per_warp = ((SPLIT_KEYS + round / 2) / round).max(1);
    let configuration = Decode { splits: Splits::Fixed { tiles_per_warp }, ..tuned.configuration };
    Tuned { configuration, ..tuned }
}

fn with_shape(
    target: Target,
    workload: &DecodeWorkload,
    rows: u32,
    Shape(warps, tile_keys, stages, reason): &Shape,
) -> Tuned {
    Tuned {
        configuration: Decode {
            target,
            element: workload.element,
            cache: workload.cache,
            head_dim: workload.head_dim,
            value_head_dim: workload.value_head_dim,
            rows,
            page_rows: workload.page_rows,
            rules: workload.rules,
            warps: *warps,
            tile_keys: *tile_keys,
            stages: *stages,
            blocks: 1,
            splits: Splits::Balanced,
        },
        reason,
    }
}

/// Returns configurations that represent all others on a target: each head dim that has a shape of
/// its own, both numbers of rows, contiguous and paged caches, each score rule, and both kinds of
/// splits.
pub fn every_tuned(target: Target) -> Vec<Decode> {
    let mut all = Vec::new();
    for (index, dim) in [64, 96, 128, 192, 256, 40, 72].into_iter().enumerate() {
        for query_rows in [8, 16] {
            let page_rows = (index + query_rows as usize / 16).is_multiple_of(2).then_some(16);
            let element = if index % 2 == 0 { Element::BF16 } else { Element::F16 };
            let workload = DecodeWorkload {
                element,
                cache: Cache::plain(element),
                head_dim: dim,
                value_head_dim: if dim == 192 { 128 } else { dim },
                query_rows,
                page_rows,
                rules: match index {
                    4 => Rules::LOCAL.capped(),
                    5 => Rules { alibi: true, ..Rules::LOCAL },
                    6 => Rules { sinks: true, ..Rules::LOCAL },
                    _ => Rules::LOCAL,
                },
                batch_invariant: false,
            };
            all.extend(tuned(target, &workload).map(|tuned| tuned.configuration));
            if [64, 128, 256].contains(&dim) {
                let fixed = DecodeWorkload { batch_invariant: true, ..workload };
                all.extend(tuned(target, &fixed).map(|tuned| tuned.configuration));
            }
        }
    }
    // The most used head dim in every kind of cache, and chunked masks.
    let chunked = Rules { mask: MaskKind::Chunked, ..Rules::LOCAL };
    for (rules, page_rows) in [
        (Rules::LOCAL, None),
        (Rules::LOCAL, Some(1)),
        (chunked, None),
        (chunked, Some(1)),
        (chunked, Some(16)),
    ] {
        let element = Element::BF16;
        let (head_dim, value_head_dim, query_rows) = (128, 128, 8);
        let cache = Cache::plain(element);
        let batch_invariant = false;
        let workload = DecodeWorkload {
            element,
            cache,
            head_dim,
            value_head_dim,
            query_rows,
            page_rows,
            rules,
            batch_invariant,
        };
        all.extend(tuned(target, &workload).map(|tuned| tuned.configuration));
    }
    all.extend(narrow(target));
    all.dedup();
    all
}

/// Returns configurations with 8-bit caches that cover each element, kind of scales, storage, head
/// dim and rule.
fn narrow(target: Target) -> Vec<Decode> {
    use Element::{BF16, E4M3, E5M2, F16, Int8};
    let cases = [
        (BF16, E4M3, 128, 8, None, Scales::PerHead, Rules::LOCAL),
        (BF16, E4M3, 128, 8, Some(16), Scales::PerHead, Rules::LOCAL),
        (F16, E5M2, 128, 16, Some(1), Scales::One, Rules::LOCAL),
        (BF16, E4M3, 128, 8, Some(16), Scales::PerToken, Rules::LOCAL),
        (F16, E4M3, 64, 8, None, Scales::PerToken, Rules::LOCAL),
        (BF16, E5M2, 64, 16, None, Scales::PerHead, Rules::EVERY),
        (BF16, E4M3, 256, 8, Some(1), Scales::PerHead, Rules::LOCAL),
        (F16, E5M2, 80, 16, None, Scales::PerToken, Rules::EVERY),
        (BF16, E4M3, 192, 16, None, Scales::PerHead, Rules::LOCAL),
        (BF16, E4M3, 256, 8, Some(16), Scales::PerHead, Rules::LOCAL),
        (BF16, Int8, 128, 8, Some(1), Scales::PerToken, Rules::LOCAL),
        (F16, Int8, 64, 16, None, Scales::PerHead, Rules::EVERY),
    ];
    let of = |(element, narrow, dim, query_rows, page_rows, scales, rules)| {
        let workload = DecodeWorkload {
            element,
            cache: Cache { element: narrow, key_scales: scales, value_scales: scales },
            head_dim: dim,
            value_head_dim: if dim == 192 { 128 } else { dim },
            query_rows,
            page_rows,
            rules,
            batch_invariant: false,
        };
        tuned(target, &workload).map(|tuned| tuned.configuration)
    };
    cases.into_iter().filter_map(of).collect()
}
