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
    /// Tiles and heads of a group, whose longest tiles come first under a causal mask.
    pub(super) per_group: Divisor,
    pub(super) heads_of_group: Divisor,
    pub(super) heads: Divisor,
    pub(super) group: Divisor,
}

impl Geometry {
    /// Cuts a problem up, or says what cannot be counted.
    pub fn new(
        configuration: &Mma,
        splits: u32,
        problem: &Problem,
        chip: &Chip,
    ) -> Result<Self, GpuError> {
        let query_rows = configuration.query_rows();
        let Counts { key_length, heads, key_heads, tiles_per_head, tiles, .. } =
            Counts::new(query_rows, problem)?;
        let blocks = tiles
            .checked_mul(splits)
            .filter(|blocks| *blocks < 1 << 31)
            .ok_or(GpuError::TooLarge { what: "the number of tiles" })?;
        let heads_of_group = heads_of_group(problem, chip);
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
            // Not more than all tiles, which were counted.
            per_group: Divisor::new(tiles_per_head * heads_of_group),
            heads_of_group: Divisor::new(heads_of_group),
            heads: Divisor::new(heads),
            group: Divisor::new(heads / key_heads.max(1)),
        })
    }

    /// How many blocks there are for each multiprocessor.
    pub fn waves(&self, chip: &Chip) -> f64 {
        f64::from(self.blocks) / f64::from(chip.multiprocessors.max(1))
    }
}

/// Heads, of all sequences, whose keys and values half of the second-level cache holds: queries
/// and outputs go through it too. A divisor of the number there is, so that groups are alike.
fn heads_of_group(problem: &Problem, chip: &Chip) -> u32 {
    let heads = (problem.batch * problem.query_heads).max(1);
    let row_bytes = (problem.head_dim + problem.value_head_dim) * problem.dtype.bytes();
    let head_bytes = problem.key_length * row_bytes / problem.group_size().max(1);
    let most = (chip.l2_bytes as usize / 2 / head_bytes.max(1)).max(1);
    let low = (1..).take_while(|it| it * it <= heads).filter(|it| heads.is_multiple_of(*it));
    let divisors = low.flat_map(|it| [it, heads / it]);
    divisors.filter(|it| *it <= most).max().unwrap_or(1) as u32
}

#[cfg(test)]
mod tests {
    use ptx::Target;

    use super::*;
    use crate::dtype::DType;
    use crate::gpu::mma::{Sums, choose};

    fn cut(problem: &Problem) -> Result<Geometry, GpuError> {
        let chosen = choose(&Chip::typical(Target::SM_80), problem, Sums::F32).unwrap();
        Geometry::new(&chosen.configuration, chosen.splits, problem, &Chip::typical(Target::SM_80))
    }

    #[test]
    fn groups_of_heads_fit_the_cache_and_are_alike() {
        let group = |problem: &Problem| heads_of_group(problem, &Chip::H200);
        let problem = |batch, heads, length| Problem::new(batch, heads, length, 128);
        // 8 MB of keys and values a head, in f32 16, and 25 MB of room.
        assert_eq!(group(&problem(1, 16, 16_384).with_dtype(DType::BF16)), 2);
        assert_eq!(group(&problem(1, 16, 16_384).with_dtype(DType::F32)), 1);
        assert_eq!(group(&problem(1, 15, 16_384).with_dtype(DType::BF16)), 3);
        // Eight query heads share them.
        assert_eq!(group(&problem(1, 16, 16_384).with_dtype(DType::BF16).with_kv_heads(2)), 16);
        assert_eq!(group(&problem(32, 16, 512).with_dtype(DType::BF16)), 64);
        // Larger than the cache, none at all, and a prime number of them.
        assert_eq!(group(&problem(1, 16, 1 << 20)), 1);
        assert_eq!(group(&problem(3, 7, 0)), 21);
        assert_eq!(group(&problem(1, 71, 4096).with_dtype(DType::BF16)), 1);
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
