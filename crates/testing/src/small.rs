//! Small configurations that have every feature of their family, for tests and mutants. The shipped
//! configurations have larger tiles.

use kernels::decode::Splits;
use kernels::forward::every_tuned;
use kernels::product::Source;
use kernels::{Batch, Cache, Decode, Forward, Mma, Rules};
use ptx::{Element, Target};

/// Returns a forward kernel for Hopper; fields not listed are as shipped.
pub fn forward() -> Forward {
    Forward {
        element: Element::BF16,
        output: Element::BF16,
        head_dim: 64,
        value_head_dim: 64,
        rules: Rules::DENSE,
        warpgroups: 2,
        key_block: 32,
        stages: 2,
        query_buffers: 1,
        ..every_tuned()[0]
    }
}

/// Returns an attention kernel that uses `mma.sync`.
pub fn mma() -> Mma {
    Mma {
        target: Target::SM_80,
        element: Element::BF16,
        head_dim: 64,
        value_head_dim: 64,
        rules: Rules::DENSE,
        batch: Batch::Equal,
        warps: 2,
        row_tiles: 2,
        key_block: 32,
        query_source: Source::Shared,
        residents: 1,
        accumulate: Element::F32,
        split: false,
    }
}

/// Returns a decode kernel: few queries over a cache.
pub fn decode() -> Decode {
    Decode {
        target: Target::SM_80,
        element: Element::BF16,
        cache: Cache::plain(Element::BF16),
        head_dim: 64,
        value_head_dim: 64,
        rows: 8,
        page_rows: None,
        rules: Rules::LOCAL,
        warps: 2,
        tile_keys: 16,
        stages: 2,
        blocks: 1,
        splits: Splits::Balanced,
    }
}
