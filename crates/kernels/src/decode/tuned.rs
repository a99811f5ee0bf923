//! Which configuration serves which decode.
//!
//! Memory is the limit, so what counts is how many bytes are under way on each
//! multiprocessor: the first shape of the table whose tiles fit is taken. The
//! same table serves 99 KB of an Ada and 227 KB of a Hopper.

use ptx::{Element, Target};

use super::{Decode, Splits};
use crate::attention::{MaskKind, Rules};
use crate::cache::{Cache, Scales};

/// What a configuration is chosen for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DecodeWorkload {
    /// The element of queries and outputs.
    pub element: Element,
    /// What keys and values are made of.
    pub cache: Cache,
    /// The width of queries and keys.
    pub head_dim: u32,
    /// The width of values and outputs.
    pub value_head_dim: u32,
    /// Query rows of a sequence and key head: queries times query heads of a key head.
    pub query_rows: u32,
    /// Whether keys and values lie in pages.
    pub paged: bool,
    /// The mask, a window with chunks or without, and what changes scores.
    pub rules: Rules,
    /// Whether a query's bits must not depend on what else is computed with it.
    pub batch_invariant: bool,
}

/// A configuration and why it was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuned {
    /// What to build.
    pub configuration: Decode,
    /// Why, in a few words.
    pub reason: &'static str,
}

/// Warps of a block, keys of a tile, tiles of a warp, and why.
struct Shape(u32, u32, u32, &'static str);

/// Most bytes first. One block fills a multiprocessor: two halves of it were as fast on long
/// sequences and slower on short ones, which have twice as many parts then. Copies by tensor maps
/// lost up to 7 % to `cp.async`, row by row, wherever memory was busy.
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

/// Tiles of 8 bits have half the bytes, and twice the keys at the same. Tried first.
const NARROW_SHAPES: &[Shape] = &[
    Shape(8, 32, 3, "8 warps with 3 tiles of 32 keys each are the most that fit"),
    Shape(6, 32, 3, "6 warps with 3 tiles of 32 keys each are the most that fit"),
    Shape(4, 32, 4, "4 warps with 4 tiles of 32 keys each are the most that fit"),
    Shape(4, 32, 3, "4 warps with 3 tiles of 32 keys each are the most that fit"),
    Shape(4, 32, 2, "4 warps with 2 tiles of 32 keys each are the most that fit"),
];

/// Keys of a split of fixed size, or as near to it as whole tiles of all warps are. One sequence of
/// 8192 keys with 8 key heads has 128 of them then, for the 132 multiprocessors of an H200; a split
/// is read in 7 us at a multiprocessor's share of the bandwidth, and what it comes to is 1/64 of
/// that.
const SPLIT_KEYS: u32 = 512;

/// The configuration for a workload, or nothing where the kernel does not serve it: the element
/// must be `F16` or `BF16`, the dimensions multiples of 8, or of 16 over caches of 8 bits, up to
/// 256.
pub fn tuned(target: Target, workload: &DecodeWorkload) -> Option<Tuned> {
    // Sixteen rows of the widest heads are more than registers hold.
    let wide = workload.head_dim + workload.value_head_dim > 384;
    let rows = if workload.query_rows <= 8 || wide { 8 } else { 16 };
    let first = if workload.cache.is_narrow() { NARROW_SHAPES } else { &[] };
    let shapes = first.iter().chain(SHAPES);
    let fits = |tuned: &Tuned| tuned.configuration.fault().is_none();
    if !workload.batch_invariant {
        return shapes.map(|shape| with_shape(target, workload, rows, shape)).find(fits);
    }
    // A row's bits depend on warps and tiles: these are the same however many rows there are.
    let few = shapes.map(|shape| fixed(with_shape(target, workload, 8, shape))).find(fits)?;
    let many = (1..=few.configuration.stages).rev().map(|stages| {
        let configuration = Decode { rows, stages, ..few.configuration };
        Tuned { configuration, ..few }
    });
    many.into_iter().find(fits).or(Some(few))
}

/// The same with splits of a fixed size.
fn fixed(tuned: Tuned) -> Tuned {
    let Decode { warps, tile_keys, .. } = tuned.configuration;
    let round = warps * tile_keys;
    let rounds = ((SPLIT_KEYS + round / 2) / round).max(1);
    let configuration = Decode { splits: Splits::Fixed { rounds }, ..tuned.configuration };
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
            paged: workload.paged,
            rules: workload.rules,
            warps: *warps,
            tile_keys: *tile_keys,
            stages: *stages,
            blocks: 1,
            splits: Splits::Shares,
        },
        reason,
    }
}

/// What stands for the rest on a target: each width that has a shape of its own, both numbers of
/// rows, both memory orders, and each rule of the scores, with splits of both kinds.
pub fn every_tuned(target: Target) -> Vec<Decode> {
    let mut all = Vec::new();
    for (index, dim) in [64, 96, 128, 192, 256, 40, 72].into_iter().enumerate() {
        for query_rows in [8, 16] {
            let paged = (index + query_rows as usize / 16).is_multiple_of(2);
            let element = if index % 2 == 0 { Element::BF16 } else { Element::F16 };
            let workload = DecodeWorkload {
                element,
                cache: Cache::plain(element),
                head_dim: dim,
                value_head_dim: if dim == 192 { 128 } else { dim },
                query_rows,
                paged,
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
    // Chunks, in both memory orders.
    let chunked = Rules { mask: MaskKind::Chunked, ..Rules::LOCAL };
    for paged in [false, true] {
        let (element, rules) = (Element::BF16, chunked);
        let (head_dim, value_head_dim, query_rows) = (128, 128, 8);
        let cache = Cache::plain(element);
        let batch_invariant = false;
        let workload = DecodeWorkload {
            element,
            cache,
            head_dim,
            value_head_dim,
            query_rows,
            paged,
            rules,
            batch_invariant,
        };
        all.extend(tuned(target, &workload).map(|tuned| tuned.configuration));
    }
    all.extend(narrow(target));
    all.dedup();
    all
}

/// Caches of 8 bits: each element, kind of scales, memory order and width, and every rule.
fn narrow(target: Target) -> Vec<Decode> {
    use Element::{BF16, E4M3, E5M2, F16, Int8};
    let cases = [
        (BF16, E4M3, 128, 8, false, Scales::PerHead, Rules::LOCAL),
        (BF16, E4M3, 128, 8, true, Scales::PerHead, Rules::LOCAL),
        (F16, E5M2, 128, 16, true, Scales::One, Rules::LOCAL),
        (BF16, E4M3, 128, 8, true, Scales::PerToken, Rules::LOCAL),
        (F16, E4M3, 64, 8, false, Scales::PerToken, Rules::LOCAL),
        (BF16, E5M2, 64, 16, false, Scales::PerHead, Rules::EVERY),
        (BF16, E4M3, 256, 8, true, Scales::PerHead, Rules::LOCAL),
        (F16, E5M2, 80, 16, false, Scales::PerToken, Rules::EVERY),
        (BF16, E4M3, 192, 16, false, Scales::PerHead, Rules::LOCAL),
        (BF16, Int8, 128, 8, true, Scales::PerToken, Rules::LOCAL),
        (F16, Int8, 64, 16, false, Scales::PerHead, Rules::EVERY),
    ];
    let of = |(element, narrow, dim, query_rows, paged, scales, rules)| {
        let workload = DecodeWorkload {
            element,
            cache: Cache { element: narrow, key_scales: scales, value_scales: scales },
            head_dim: dim,
            value_head_dim: if dim == 192 { 128 } else { dim },
            query_rows,
            paged,
            rules,
            batch_invariant: false,
        };
        tuned(target, &workload).map(|tuned| tuned.configuration)
    };
    cases.into_iter().filter_map(of).collect()
}
