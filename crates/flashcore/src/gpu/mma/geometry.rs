//! How a problem is cut into tiles and splits for the `mma.sync` kernel.

use kernels::{Divisor, Mma};

use crate::gpu::forward::Counts;
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
    /// Over how many blocks of threads the keys of a tile are split.
    pub splits: u32,
    /// Key blocks of a split.
    pub split_length: u32,
    /// Blocks of the grid: one for each tile and split.
    pub blocks: u32,
    pub(super) per_head: Divisor,
    pub(super) heads: Divisor,
    pub(super) group: Divisor,
}

impl Geometry {
    /// Cuts a problem up, or says what cannot be counted.
    pub fn new(configuration: &Mma, splits: u32, problem: &Problem) -> Result<Self, GpuError> {
        let query_rows = configuration.query_rows();
        let Counts { key_length, heads, key_heads, tiles_per_head, tiles, .. } =
            Counts::new(query_rows, problem)?;
        let blocks = tiles
            .checked_mul(splits)
            .filter(|blocks| *blocks < 1 << 31)
            .ok_or(GpuError::TooLarge { what: "the number of tiles" })?;
        let key_blocks = key_length.div_ceil(configuration.key_block);
        Ok(Geometry {
            query_rows,
            key_block: configuration.key_block,
            tiles_per_head,
            tiles,
            splits,
            split_length: key_blocks.div_ceil(splits),
            blocks,
            per_head: Divisor::new(tiles_per_head),
            heads: Divisor::new(heads),
            group: Divisor::new(heads / key_heads.max(1)),
        })
    }

    /// How many blocks there are for each multiprocessor.
    pub fn waves(&self, chip: &Chip) -> f64 {
        f64::from(self.blocks) / f64::from(chip.multiprocessors.max(1))
    }
}

#[cfg(test)]
mod tests {
    use ptx::Target;

    use super::*;
    use crate::gpu::mma::{Sums, choose};

    fn cut(problem: &Problem) -> Result<Geometry, GpuError> {
        let chosen = choose(&Chip::typical(Target::SM_80), problem, Sums::F32).unwrap();
        Geometry::new(&chosen.configuration, chosen.splits, problem)
    }

    #[test]
    fn every_row_and_every_key_is_in_a_block() {
        let geometry = cut(&Problem::new(4, 60, 300, 64).with_kv_heads(3)).unwrap();
        assert_eq!((geometry.query_rows, geometry.tiles_per_head, geometry.tiles), (128, 3, 720));
        assert_eq!((geometry.splits, geometry.blocks), (1, 720));
        let divisors = [geometry.per_head, geometry.heads, geometry.group];
        assert_eq!(divisors.map(|divisor| divisor.number), [3, 60, 20]);
        let decode = cut(&Problem::new(1, 8, 1, 128).with_key_length(10_000)).unwrap();
        assert!(decode.splits > 1);
        assert!(decode.splits * decode.split_length * decode.key_block >= 10_000);
        assert!((decode.splits - 1) * decode.split_length * decode.key_block < 10_000);
    }

    #[test]
    fn what_cannot_be_counted_is_refused() {
        let refusal = |problem: Problem| cut(&problem).unwrap_err().to_string();
        assert!(refusal(Problem::new(1 << 20, 1 << 12, 1, 8)).starts_with("the number of tiles"));
        assert!(refusal(Problem::new(1, 1, 1 << 31, 8)).starts_with("the lengths"));
    }
}
