//! How a problem is cut into tiles and blocks for the forward kernel.

use kernels::Forward;
use kernels::forward::{Divisor, TileLists};

use crate::gpu::{Chip, GpuError};
use crate::problem::Problem;

/// The tiles of a launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Query rows of a tile.
    pub query_rows: u32,
    /// Keys of a block.
    pub key_block: u32,
    /// Tiles of one query head.
    pub tiles_per_head: u32,
    /// Tiles in all.
    pub tiles: u32,
    /// Blocks of the grid. Each stays and takes tile after tile.
    pub blocks: u32,
    /// The tiles of each block, where the kernel takes lists.
    pub lists: Option<TileLists>,
    pub(super) query_length: u32,
    pub(super) key_length: u32,
    pub(super) per_head: Divisor,
    pub(super) heads: Divisor,
    pub(super) group: Divisor,
}

impl Geometry {
    /// Says what of a problem cannot be counted, if anything. Cheaper than cutting it up.
    pub fn countable(configuration: &Forward, problem: &Problem) -> Result<(), GpuError> {
        Counts::new(configuration.query_rows(), problem).map(|_| ())
    }

    /// Cuts a problem up, or says what cannot be counted.
    pub fn new(configuration: &Forward, problem: &Problem, chip: &Chip) -> Result<Self, GpuError> {
        let Counts { query_length, key_length, heads, key_heads, batch, tiles_per_head, tiles } =
            Counts::new(configuration.query_rows(), problem)?;
        let lists = configuration.causal.then(|| {
            // Something else wants a place in the cache too: queries, outputs, the other heads.
            let cache_bytes = chip.l2_bytes / 5 * 3;
            let heads = [heads, key_heads, batch];
            let lengths = [query_length, key_length];
            TileLists::new(configuration, lengths, heads, chip.multiprocessors, cache_bytes)
        });
        let blocks = lists
            .as_ref()
            .map_or_else(|| chip.multiprocessors.min(tiles).max(1), |lists| lists.blocks);
        Ok(Geometry {
            query_rows: configuration.query_rows(),
            key_block: configuration.key_block,
            tiles_per_head,
            tiles,
            blocks,
            lists,
            query_length,
            key_length,
            per_head: Divisor::new(tiles_per_head),
            heads: Divisor::new(heads),
            group: Divisor::new(heads / key_heads.max(1)),
        })
    }

    /// How many tiles there are for each multiprocessor: below 1 some have nothing to do, and a
    /// little above a whole number most wait for a few.
    pub fn waves(&self, chip: &Chip) -> f64 {
        f64::from(self.tiles) / f64::from(chip.multiprocessors.max(1))
    }
}

/// The sizes of a problem as the kernel counts them.
pub(in crate::gpu) struct Counts {
    query_length: u32,
    pub(in crate::gpu) key_length: u32,
    pub(in crate::gpu) heads: u32,
    pub(in crate::gpu) key_heads: u32,
    batch: u32,
    pub(in crate::gpu) tiles_per_head: u32,
    pub(in crate::gpu) tiles: u32,
}

impl Counts {
    pub(in crate::gpu) fn new(query_rows: u32, problem: &Problem) -> Result<Self, GpuError> {
        let too_large = |what| GpuError::TooLarge { what };
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::forward::choose;
    use crate::problem::Mask;

    fn cut(problem: &Problem) -> Result<Geometry, GpuError> {
        let chosen = choose(&Chip::H200, problem).unwrap();
        Geometry::new(&chosen.configuration, problem, &Chip::H200)
    }

    #[test]
    fn every_row_is_in_a_tile() {
        let geometry = cut(&Problem::new(4, 6, 300, 128).with_kv_heads(3)).unwrap();
        assert_eq!((geometry.query_rows, geometry.key_block), (128, 128));
        assert_eq!((geometry.tiles_per_head, geometry.tiles, geometry.blocks), (3, 72, 72));
        let divisors = [geometry.per_head, geometry.heads, geometry.group];
        assert_eq!(divisors.map(|divisor| divisor.number), [3, 6, 2]);
        assert!(geometry.waves(&Chip::H200) < 1.0);
        let large = cut(&Problem::new(16, 32, 4096, 128)).unwrap();
        assert_eq!((large.tiles, large.blocks), (16 * 32 * 32, 132));
        assert_eq!(large.lists, None);
        let causal = cut(&Problem::new(2, 4, 1000, 128).with_mask(Mask::Causal)).unwrap();
        assert_eq!(causal.lists.unwrap().blocks, causal.blocks);
    }

    #[test]
    fn what_cannot_be_counted_is_refused() {
        let refusal = |problem: Problem| cut(&problem).unwrap_err().to_string();
        assert!(refusal(Problem::new(1 << 20, 1 << 12, 1, 8)).starts_with("the number of tiles"));
        assert!(refusal(Problem::new(1, 1, 1 << 31, 8)).starts_with("the lengths"));
        assert!(refusal(Problem::new(1, 1, 1 << 33, 8)).starts_with("the problem"));
        // A batch of 65 thousand and more than 2^31 elements are no trouble.
        assert!(cut(&Problem::new(65_536, 32, 128, 128)).is_ok());
    }
}
