//! The gradients of attention on Hopper: wgmma and TMA. Ragged batches have a file of their own.

use kernels::Configuration;
use kernels::attention::Batch;
use kernels::attention::function::ListsOf;
use kernels::backward::{BackwardPass, tall_backward, tuned_backward};
use kernels::parameter::{Number, Workspace};

use super::forward::workload;
use super::{Asked, Choice, Contents, Counts, Family, Memory, Tiling, block_mask, ragged_backward};
use crate::chip::Chip;
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
        if !problem.has_equal_lengths() {
            return ragged_backward::choose(asked);
        }
        let workload = workload(chip, problem)?;
        let (dim, value_dim) = (workload.head_dim, workload.value_head_dim);
        let backward = tuned_backward(workload.element, dim, value_dim, workload.rules)
            .ok_or_else(|| format!("head dims {dim} and {value_dim} are beyond 256"))?;
        let backward = kernels::Backward { deterministic: problem.deterministic, ..backward };
        let tall = tall_backward(backward).filter(|it| fills(chip, problem, it.key_block()));
        let backward = tall.unwrap_or(backward);
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
    pub(super) pass: BackwardPass,
}

impl Kernels {
    pub(super) fn hopper(backward: kernels::Backward) -> Self {
        Kernels { kernel: Configuration::Backward(backward), pass: backward.pass() }
    }

    /// Puts what comes before and after the products around them, with the workspace: so many blocks
    /// of query rows of a head and in all.
    pub(super) fn beside(
        &self,
        choice: &mut Choice,
        heads: u32,
        query_blocks_per_head: u32,
        query_blocks: u32,
    ) {
        let numbers = vec![(Number::QueryBlocks, query_blocks_per_head)];
        let beside =
            |kernel, blocks| Launch { kernel, blocks, numbers: numbers.clone(), widened: false };
        let row_sums = Configuration::RowSums(self.pass.row_sums());
        choice.launches.insert(0, beside(row_sums, query_blocks));
        let rounding = self.pass.rounding();
        let rounding_blocks = rounding.blocks(query_blocks);
        choice.launches.push(beside(Configuration::Rounding(rounding), rounding_blocks));
        let sinks = self.pass.sink_gradients().map(Configuration::SinkGradients);
        choice.launches.extend(sinks.map(|kernel| beside(kernel, heads)));
        choice.main = 1;
        let turns = self.pass.deterministic.then_some((Workspace::Turns, 4));
        for (workspace, bytes) in [
            (Workspace::RowStatistics, self.pass.statistics_bytes()),
            (Workspace::QueryGradientSums, self.pass.sums_layout().block_bytes()),
        ]
        .into_iter()
        .chain(turns)
        {
            choice.memory.push(Memory {
                source: Source::Workspace(workspace),
                bytes: u64::from(bytes) * u64::from(query_blocks),
                contents: Contents::Anything,
            });
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
    let BackwardPass { query_block, key_block, .. } = kernels.pass;
    if kernels.pass.batch != Batch::Equal {
        return ragged_backward::launch(chip, problem, kernels, reason);
    }
    // Blocks of query rows, of every query head; and blocks of keys, of every key head.
    let counts = Counts::new(query_block, problem)?;
    let key_blocks_per_head = counts.key_length.div_ceil(key_block);
    let key_blocks = u64::from(counts.key_heads) * u64::from(counts.batch);
    let key_blocks = u32::try_from(key_blocks * u64::from(key_blocks_per_head))
        .ok()
        .filter(|blocks| *blocks < 1 << 31)
        .ok_or_else(|| "the number of key blocks is too large for the GPU kernel".to_owned())?;

    let mut choice = Choice::of(kernels.kernel, key_blocks, reason);
    choice.launches[0].numbers = vec![(Number::KeyBlocks, key_blocks_per_head)];
    if kernels.pass.takes_heads_together() {
        let heads = (counts.key_heads * counts.batch).max(1);
        let order = if kernels.pass.deterministic {
            let steps = steps(problem, [query_block, key_block], key_blocks);
            let order = Order::of_turns(chip, heads, steps);
            // Lists count turns from the first key block on.
            if kernels.pass.takes_block_lists() { Order { last: 0, ..order } } else { order }
        } else {
            Order::longest_first(chip, heads, key_blocks_per_head)
        };
        choice.launches[0].numbers.extend(order.numbers(heads));
    }
    kernels.beside(&mut choice, counts.heads, counts.tiles_per_head, counts.tiles);
    let lists = ListsOf::Keys { turns: kernels.pass.deterministic };
    if let Some(mask) = block_mask(problem, [query_block, key_block], &counts, lists) {
        choice.with_blocks(kernels.pass.target, kernels.pass.rules.mask, mask)?;
    }
    choice.tiling = Some(Tiling {
        query_rows: query_block,
        key_block,
        tiles_per_head: key_blocks_per_head,
        tiles: key_blocks,
        splits: 1,
        waves: f64::from(key_blocks) / f64::from(chip.multiprocessors.max(1)),
    });
    Ok(choice)
}

/// Whether blocks of so many keys go around all multiprocessors a few times.
fn fills(chip: &Chip, problem: &Problem, key_block: u32) -> bool {
    let blocks = problem.key_length.div_ceil(key_block as usize);
    let blocks = blocks.saturating_mul(problem.kv_heads).saturating_mul(problem.batch);
    blocks as u64 >= 4 * u64::from(chip.multiprocessors)
}

/// Steps of the walk of a block of the grid, on average.
fn steps(problem: &Problem, [query_block, key_block]: [u32; 2], key_blocks: u32) -> f64 {
    let pairs = problem.visible_pairs() as f64 / (f64::from(query_block) * f64::from(key_block));
    (pairs / f64::from(key_blocks.max(1))).max(1.0)
}

/// Which key heads the grid takes together.
struct Order {
    together: u32,
    /// The first head whose key blocks come from the first on.
    last: u32,
}

impl Order {
    /// In the deterministic mode a block of the grid adds to a block of query rows after the one before
    /// it of the same head. Heads are taken together so that the two begin two steps apart, where one
    /// step is enough if nobody is ever late: then nobody waits but for the begin.
    fn of_turns(chip: &Chip, heads: u32, steps: f64) -> Self {
        let together = (2.0 * f64::from(chip.multiprocessors) / steps).ceil();
        let together = (together as u32).clamp(1, heads);
        Order { together, last: heads - together }
    }

    /// Under a causal mask a head's first key blocks have the longest walks. Were heads taken one by
    /// one, those of the last head would begin when all others are about to end. So many are taken
    /// together, evenly, that their blocks go around all multiprocessors; one where its own do. More
    /// would push each other's sums out of the second-level cache, as many short heads do.
    fn longest_first(chip: &Chip, heads: u32, key_blocks: u32) -> Self {
        let of_all = f64::from(key_blocks) / f64::from(chip.multiprocessors);
        if !(0.05..0.875).contains(&of_all) {
            return Order { together: 1, last: 0 };
        }
        let groups = (heads / chip.multiprocessors.div_ceil(key_blocks)).max(1);
        Order { together: heads.div_ceil(groups), last: 0 }
    }

    /// As the kernel takes it. What is left over comes first.
    fn numbers(&self, heads: u32) -> [(Number, u32); 3] {
        [
            (Number::HeadsPerGroup, self.together),
            (Number::FirstHeads, (heads - 1) % self.together + 1),
            (Number::LastHeads, self.last),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// When all blocks have ended, relative to an even share, where each multiprocessor takes the next
    /// one as soon as it can.
    fn makespan(order: &Order, heads: u32, key_blocks: u32, multiprocessors: u32) -> f64 {
        let first = (heads - 1) % order.together + 1;
        let groups = std::iter::once(first).chain(std::iter::repeat_n(
            order.together,
            ((heads - first) / order.together) as usize,
        ));
        let walks = |heads: u32| {
            (0..key_blocks)
                .flat_map(move |block| std::iter::repeat_n(key_blocks - block, heads as usize))
        };
        let mut ends = vec![0; multiprocessors as usize];
        for steps in groups.flat_map(walks) {
            *ends.iter_mut().min().unwrap() += steps;
        }
        let even = f64::from(ends.iter().sum::<u32>()) / f64::from(multiprocessors);
        f64::from(*ends.iter().max().unwrap()) / even
    }

    #[test]
    fn the_longest_walks_of_several_heads_end_evenly() {
        let chip = Chip::H200;
        for (heads, key_blocks) in [(8, 32), (8, 64), (16 * 4, 32), (16 * 8, 16), (16 * 2, 64)] {
            let order = Order::longest_first(&chip, heads, key_blocks);
            let even = makespan(&order, heads, key_blocks, chip.multiprocessors);
            let one_by_one = Order { together: 1, last: 0 };
            let before = makespan(&one_by_one, heads, key_blocks, chip.multiprocessors);
            assert!(even < 1.04, "{heads} heads of {key_blocks} blocks: {even}");
            assert!(before > 1.05, "{heads} heads of {key_blocks} blocks: {before}");
        }
    }
}
