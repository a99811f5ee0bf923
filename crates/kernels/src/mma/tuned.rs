//! Which configuration serves which problem.
//!
//! A rule names the widest head dimensions it serves. The first whose shared
//! memory fits the target, as often as it wants to be resident, is taken; so
//! the same table serves 99 KB of an Ada and 227 KB of a Hopper.

use ptx::{Element, Target};

use super::{Mma, Weave};
pub use crate::forward::Workload;
use crate::product::Source;

/// A configuration and why it was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuned {
    /// What to build.
    pub configuration: Mma,
    /// Why, in a few words.
    pub reason: &'static str,
}

/// One line of the table.
struct Rule {
    /// The widest queries and the widest values it serves.
    dims: (u32, u32),
    tile: Tile,
    reason: &'static str,
}

/// What a rule sets.
#[derive(Clone, Copy)]
struct Tile {
    warps: u32,
    row_tiles: u32,
    key_block: u32,
    strip: u32,
    ahead: u32,
    query_source: Source,
    weave: Weave,
    residents: u32,
}

/// 128 rows, 32 of each warp.
const TILE_128X64: Tile = Tile {
    warps: 4,
    row_tiles: 2,
    key_block: 64,
    strip: 32,
    ahead: 1,
    query_source: Source::Shared,
    weave: Weave::Scores,
    residents: 2,
};
const TILE_128X128: Tile = Tile {
    key_block: 128,
    query_source: Source::Registers,
    weave: Weave::Products,
    ..TILE_128X64
};

/// Narrow before wide, large before small.
const RULES: &[Rule] = &[
    Rule {
        dims: (64, 64),
        tile: TILE_128X128,
        reason: "128 x 128 tiles are fastest up to head dim 64",
    },
    Rule {
        dims: (64, 64),
        tile: Tile { key_block: 64, ..TILE_128X128 },
        reason: "128 x 64 tiles are the largest that fit twice up to head dim 64",
    },
    Rule {
        dims: (128, 128),
        tile: TILE_128X64,
        reason: "128 x 64 tiles are fastest up to head dim 128",
    },
    Rule {
        dims: (128, 128),
        tile: Tile { key_block: 32, strip: 16, ..TILE_128X64 },
        reason: "128 x 32 tiles are the largest that fit twice up to head dim 128",
    },
    Rule {
        dims: (128, 128),
        tile: Tile { key_block: 32, strip: 16, residents: 1, ..TILE_128X64 },
        reason: "128 x 32 tiles are the largest that fit up to head dim 128",
    },
    Rule {
        dims: (256, 256),
        tile: Tile { warps: 8, row_tiles: 1, residents: 1, ..TILE_128X64 },
        reason: "128 x 64 tiles, 16 rows of each warp, are the largest that fit head dim 256",
    },
    Rule {
        dims: (256, 256),
        tile: Tile { warps: 8, row_tiles: 1, key_block: 32, strip: 16, residents: 1, ..TILE_128X64 },
        reason: "128 x 32 tiles, 16 rows of each warp, are the largest that fit head dim 256",
    },
    Rule {
        dims: (256, 256),
        tile: Tile { row_tiles: 1, key_block: 32, strip: 32, residents: 1, ..TILE_128X64 },
        reason: "64 x 32 tiles are the largest that fit head dim 256",
    },
];

impl Rule {
    fn configuration(&self, target: Target, workload: &Workload) -> Mma {
        Mma {
            target,
            element: workload.element,
            head_dim: workload.head_dim,
            value_head_dim: workload.value_head_dim,
            causal: workload.causal,
            warps: self.tile.warps,
            row_tiles: self.tile.row_tiles,
            key_block: self.tile.key_block,
            strip: self.tile.strip,
            ahead: self.tile.ahead,
            query_source: self.tile.query_source,
            weave: self.tile.weave,
            residents: self.tile.residents,
            accumulate: Element::F32,
            split: false,
        }
    }

    fn serves(&self, target: Target, workload: &Workload) -> bool {
        workload.head_dim <= self.dims.0
            && workload.value_head_dim <= self.dims.1
            && self.configuration(target, workload).fits()
    }
}

impl Mma {
    /// Whether shared memory holds as many blocks of threads as shall be resident.
    fn fits(&self) -> bool {
        // The system keeps 1 KB of the multiprocessor's for each block.
        let each = self.shared_bytes() + 1024;
        each * self.residents <= self.target.shared_memory_limit() + 1024
    }
}

/// The configuration for a workload, or nothing where the kernel does not
/// serve it: the element must be `F16` or `BF16`, the dimensions multiples of
/// 8 up to 256.
pub fn tuned(target: Target, workload: &Workload) -> Option<Tuned> {
    let rule = RULES.iter().find(|rule| rule.serves(target, workload))?;
    let configuration = rule.configuration(target, workload);
    configuration.fault().is_none().then_some(Tuned { configuration, reason: rule.reason })
}

/// Every line of the table that a target can have, at its own dimensions, for
/// both elements and masks.
pub fn every_tuned(target: Target) -> Vec<Mma> {
    let mut all = Vec::new();
    for rule in RULES {
        for element in [Element::F16, Element::BF16] {
            for causal in [false, true] {
                let workload = Workload {
                    element,
                    head_dim: rule.dims.0,
                    value_head_dim: rule.dims.1,
                    causal,
                    query_length: 4096,
                    key_length: 4096,
                    heads: 64,
                    multiprocessors: 108,
                };
                all.extend(tuned(target, &workload).map(|tuned| tuned.configuration));
            }
        }
    }
    all.dedup();
    all
}

/// Configurations worth timing against the tuned one.
pub fn variants(tuned: &Mma) -> Vec<Mma> {
    vec![*tuned]
}
