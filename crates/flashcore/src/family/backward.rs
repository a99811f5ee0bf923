//! The gradients of attention on Hopper over sequences of equal lengths: wgmma and TMA.

use kernels::Configuration;
use kernels::backward::{KEY_BLOCK, Rounding, RowSums, tuned_backward};
use kernels::parameter::{Number, Workspace};

use super::forward::workload;
use super::{Asked, Choice, Contents, Counts, Family, Memory, Tiling};
use crate::gpu::Chip;
use crate::plan::arrangement::tensors;
use crate::plan::{Launch, Source, map_strides};
use crate::problem::{Pass, Problem};

/// The family.
pub(super) struct Backward;

impl Family for Backward {
    fn name(&self) -> &'static str {
        "backward"
    }

    fn pass(&self) -> Pass {
        Pass::Backward
    }

    fn choose(&self, asked: &Asked<'_>) -> Result<Choice, String> {
        let Asked { chip, problem, arrangement } = *asked;
        let workload = workload(chip, problem)?;
        if workload.rules.sinks {
            return Err("the gradient of sinks is not computed yet".to_owned());
        }
        let (dim, value_dim) = (workload.head_dim, workload.value_head_dim);
        let backward = tuned_backward(workload.element, dim, value_dim, workload.rules)
            .ok_or_else(|| format!("head dims {dim} and {value_dim} are beyond 128"))?;
        arrangement.check_copies(problem)?;
        for tensor in tensors(problem) {
            map_strides(problem, arrangement, tensor)?;
        }
        launch(chip, problem, &Kernels::hopper(backward), REASON.to_owned())
    }
}

/// Why such kernels serve.
pub(super) const REASON: &str = "gradients in one pass over the scores";

/// A kernel for gradients with what comes before and after it.
pub(super) struct Kernels {
    pub(super) kernel: Configuration,
    pub(super) row_sums: RowSums,
    pub(super) rounding: Rounding,
    pub(super) key_block: u32,
    /// Bytes of the statistics of a block of query rows.
    pub(super) statistics_bytes: u32,
}

impl Kernels {
    pub(super) fn hopper(backward: kernels::Backward) -> Self {
        Kernels {
            kernel: Configuration::Backward(backward),
            row_sums: backward.row_sums(),
            rounding: backward.rounding(),
            key_block: KEY_BLOCK,
            statistics_bytes: backward.statistics_bytes(),
        }
    }
}

/// The launches of a configuration, tuned or not.
pub(super) fn launch(
    chip: &Chip,
    problem: &Problem,
    kernels: &Kernels,
    reason: String,
) -> Result<Choice, String> {
    let Kernels { kernel, row_sums, rounding, key_block, statistics_bytes } = *kernels;
    let sums = row_sums.sums;
    // Blocks of query rows, of every query head; and blocks of keys, of every key head.
    let counts = Counts::new(sums.query_block, problem)?;
    let query_blocks = counts.tiles;
    let key_blocks_per_head = counts.key_length.div_ceil(key_block);
    let key_blocks = u64::from(counts.key_heads) * u64::from(counts.batch);
    let key_blocks = u32::try_from(key_blocks * u64::from(key_blocks_per_head))
        .ok()
        .filter(|blocks| *blocks < 1 << 31)
        .ok_or_else(|| "the number of key blocks is too large for the GPU kernel".to_owned())?;

    let mut choice = Choice::of(kernel, key_blocks, reason);
    choice.launches[0].numbers = vec![(Number::KeyBlocks, key_blocks_per_head)];
    let numbers = vec![(Number::QueryBlocks, counts.tiles_per_head)];
    let beside = |kernel, blocks| Launch { kernel, blocks, numbers: numbers.clone() };
    choice.launches.insert(0, beside(Configuration::RowSums(row_sums), query_blocks));
    let blocks = rounding.blocks(query_blocks);
    choice.launches.push(beside(Configuration::Rounding(rounding), blocks));
    choice.main = 1;
    for (workspace, bytes) in [
        (Workspace::RowStatistics, statistics_bytes),
        (Workspace::QueryGradientSums, sums.block_bytes()),
    ] {
        choice.memory.push(Memory {
            source: Source::Workspace(workspace),
            bytes: u64::from(bytes) * u64::from(query_blocks),
            contents: Contents::Anything,
        });
    }
    choice.tiling = Some(Tiling {
        query_rows: sums.query_block,
        key_block,
        tiles_per_head: key_blocks_per_head,
        tiles: key_blocks,
        splits: 1,
        waves: f64::from(key_blocks) / f64::from(chip.multiprocessors.max(1)),
    });
    Ok(choice)
}
