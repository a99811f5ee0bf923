//! Gradients of attention on Hopper (wgmma and TMA): the host side of the `backward` kernel and of
//! the launches around it. Ragged batches are in `ragged_backward`.
//!
//! A thread block computes dK and dV of one key block, called a tile here, in steps over the query
//! blocks that see it, and adds to f32 sums of dQ in a workspace. `RowSums` comes before it (delta
//! and cleared sums), `Rounding` after it (dQ from the sums).

use kernels::Configuration;
use kernels::attention::Batch;
use kernels::attention::function::ListsOf;
use kernels::backward::{
    BackwardPass, RowSums, SinkGradients, persistent_backward, split_backward, tall_backward,
    tuned_backward,
};
use kernels::parameter::{Number, Workspace};

use super::forward::workload;
use super::{Asked, Choice, Contents, Counts, Family, Tiling, block_mask, ragged_backward};
use crate::chip::Chip;
use crate::plan::arrangement::tensors;
use crate::plan::{Launch, map_strides};
use crate::problem::{Pass, Problem};

/// The `backward` family.
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
        let other = tall.or_else(|| persistent_backward(backward));
        let other =
            other.or_else(|| split_backward(backward).filter(|it| saves(chip, problem, it)));
        let backward = other.unwrap_or(backward);
        arrangement.check_copies(problem)?;
        for tensor in tensors(problem) {
            map_strides(problem, arrangement, tensor)?;
        }
        launch(chip, problem, &Kernels::hopper(backward), REASON.to_owned())
    }
}

/// The reason that a plan gives for these kernels.
pub(super) const REASON: &str = "gradients in one pass over the scores";

/// Counts of blocks of query rows: per head and in all, with the number of heads.
pub(super) struct RowBlocks {
    pub(super) heads: u32,
    pub(super) per_head: u32,
    pub(super) all: u32,
}

/// A kernel for gradients, with the pass that configures the launches before and after it.
pub(super) struct Kernels {
    pub(super) kernel: Configuration,
    pub(super) pass: BackwardPass,
}

impl Kernels {
    pub(super) fn hopper(backward: kernels::Backward) -> Self {
        Kernels { kernel: Configuration::Backward(backward), pass: backward.pass() }
    }

    /// Adds the launches before (`RowSums`) and after (`Rounding`, `SinkGradients`) the main
    /// kernel, and their workspace.
    pub(super) fn beside(
        &self,
        problem: &Problem,
        choice: &mut Choice,
        rows: &RowBlocks,
        sums: SumsBeside,
    ) {
        let beside = |kernel, blocks, numbers: Vec<(Number, u32)>| {
            let query_blocks = [(Number::QueryBlocks, rows.per_head)];
            Launch::new(kernel, blocks, query_blocks.into_iter().chain(numbers))
        };
        let row_sums = RowSums { lse_gradient: problem.lse_gradient, ..self.pass.row_sums() };
        let row_sums = Configuration::RowSums(row_sums);
        choice.launches.insert(0, beside(row_sums, rows.all, sums.cleared));
        let rounding = self.pass.rounding();
        let blocks = rounding.blocks(sums.rounding_blocks);
        let rounding = Configuration::Rounding(rounding);
        choice.launches.push(beside(rounding, blocks, sums.rounded));
        let sinks = self.pass.sink_gradients();
        let sinks = sinks.map(|it| SinkGradients { lse_gradient: problem.lse_gradient, ..it });
        let sinks = sinks.map(Configuration::SinkGradients);
        choice.launches.extend(sinks.map(|kernel| beside(kernel, rows.heads, Vec::new())));
        choice.main = 1;
        let has_counters = self.pass.deterministic || self.pass.clear_and_round;
        for (workspace, bytes, count) in [
            (Workspace::RowStatistics, self.pass.statistics_bytes(), rows.all),
            (Workspace::QueryGradientSums, self.pass.sums_layout().block_bytes(), rows.all),
        ]
        .into_iter()
        .chain(has_counters.then_some((Workspace::Turns, 8, sums.counters)))
        {
            let bytes = u64::from(bytes) * u64::from(count);
            choice.add_memory(workspace, bytes, Contents::Anything);
        }
    }
}

/// Which sums of dQ the launches beside the main kernel clear and round.
pub(super) struct SumsBeside {
    /// The numbers that tell `RowSums` which sums it clears.
    pub(super) cleared: Vec<(Number, u32)>,
    /// The numbers that tell `Rounding` which sums it rounds.
    pub(super) rounded: Vec<(Number, u32)>,
    /// Blocks of query rows, or parts of shares, that `Rounding` has thread blocks for.
    pub(super) rounding_blocks: u32,
    /// Pairs of counters.
    pub(super) counters: u32,
}

impl SumsBeside {
    /// Returns the sums of blocks of query rows: `RowSums` clears those of the first `cleared`, and
    /// the main kernel itself rounds those of the first `rounded`.
    pub(super) fn of_blocks(rows: &RowBlocks, [cleared, rounded]: [u32; 2]) -> Self {
        SumsBeside {
            cleared: vec![(Number::ClearedBlocks, cleared)],
            rounded: vec![(Number::RoundedBlocks, rounded)],
            rounding_blocks: rows.all - rounded,
            counters: rows.all,
        }
    }
}

/// Returns the launches of a configuration, tuned or not.
pub(super) fn launch(
    chip: &Chip,
    problem: &Problem,
    kernels: &Kernels,
    reason: String,
) -> Result<Choice, String> {
    let BackwardPass { query_block, key_block, .. } = kernels.pass;
    if kernels.pass.batch != Batch::Equal {
        return kernels.launch_ragged(chip, problem, reason);
    }
    // Query blocks are counted over query heads, key blocks over key heads.
    let counts = Counts::new(query_block, problem)?;
    // `Rounding` takes parts of query blocks.
    let parts = u64::from(counts.tiles) * u64::from(kernels.pass.rounding().blocks(1));
    if parts > i32::MAX as u64 {
        return Err("the number of query blocks is too large for the GPU kernel".to_owned());
    }
    let key_blocks_per_head = counts.key_length.div_ceil(key_block);
    let key_blocks = u64::from(counts.key_heads) * u64::from(counts.batch);
    let key_blocks = u32::try_from(key_blocks * u64::from(key_blocks_per_head))
        .ok()
        .filter(|blocks| *blocks < 1 << 31)
        .ok_or("the number of key blocks is too large for the GPU kernel")?;

    let mut choice = Choice::of(kernels.kernel, key_blocks, reason);
    choice.launches[0].numbers = vec![(Number::KeyBlocks, key_blocks_per_head)];
    if let Configuration::Backward(backward) = kernels.kernel {
        let group = problem.group_size() as u32;
        let waves = Waves::new(chip, key_blocks, counts.tiles_per_head.saturating_mul(group));
        waves.arrange(&backward, &mut choice);
        if backward.has_alternating_waves() {
            let tiles = chip.multiprocessors.max(1);
            choice.launches[0].numbers.push((Number::TilesOfRound, tiles));
        }
    }
    let heads = (counts.key_heads * counts.batch).max(1);
    let mut together = 1;
    if kernels.pass.takes_heads_together() {
        let order = if kernels.pass.deterministic {
            let steps = steps(problem, [query_block, key_block], key_blocks);
            let order = Order::of_turns(chip, heads, steps);
            // Block lists count turns from the first key block on, so all heads go from the first.
            if kernels.pass.takes_block_lists() { Order { last: 0, ..order } } else { order }
        } else {
            Order::longest_first(chip, heads, key_blocks_per_head)
        };
        choice.launches[0].numbers.extend(order.numbers(heads));
        together = order.together;
    }
    let rows =
        RowBlocks { heads: counts.heads, per_head: counts.tiles_per_head, all: counts.tiles };
    let mut shares = HeadCounts { cleared: heads, rounded: 0 };
    if kernels.pass.clear_and_round {
        if key_blocks > 0 && rows.all > 0 {
            shares = HeadCounts::new(chip, heads, key_blocks_per_head, together);
        }
        choice.launches[0].numbers.extend(shares.numbers(key_blocks, key_blocks_per_head));
        choice.launches[0].numbers.push((Number::QueryBlocks, counts.tiles_per_head));
    }
    let sums = SumsBeside::of_blocks(&rows, shares.row_blocks(&rows, heads));
    kernels.beside(problem, &mut choice, &rows, sums);
    let lists = ListsOf::Keys { turns: kernels.pass.deterministic };
    if let Some(mask) = block_mask(problem, [query_block, key_block], &counts, lists) {
        choice.with_blocks(kernels.pass.target, kernels.pass.rules.mask, mask)?;
    }
    let tiles = [key_blocks_per_head, key_blocks];
    choice.tiling = Some(Tiling::new(chip, [query_block, key_block], tiles, 1));
    Ok(choice)
}

/// How the dQ sums of key heads are cleared and rounded where the main kernel's idle warps help
/// (`clear_and_round`). Heads that are not counted here are cleared by the main kernel and rounded
/// after it.
struct HeadCounts {
    /// Number of key heads whose sums are cleared before the main kernel.
    cleared: u32,
    /// Number of key heads whose sums the main kernel rounds.
    rounded: u32,
}

impl HeadCounts {
    /// Keeps clearing and rounding far enough from the additions: between the tile that clears a
    /// share and the first tile of the group of heads that needs it there is at least one tile per
    /// multiprocessor, and likewise between the last tile of a group and the tile that rounds its
    /// share.
    fn new(chip: &Chip, heads: u32, key_blocks: u32, together: u32) -> Self {
        // The group itself, and the fewest groups that have a tile for each multiprocessor.
        let groups = 1 + chip.multiprocessors.div_ceil(together * key_blocks);
        let apart = groups.saturating_mul(together);
        // Where groups are uneven, the first one is smaller.
        let first = (heads - 1) % together + 1;
        let cleared = if first < together { apart.saturating_add(first) } else { apart };
        HeadCounts { cleared: cleared.min(heads), rounded: heads.saturating_sub(apart) }
    }

    /// Returns the numbers that the kernel takes.
    fn numbers(&self, tiles: u32, key_blocks: u32) -> [(Number, u32); 3] {
        [
            (Number::KeyTiles, tiles),
            (Number::ClearedTiles, self.cleared * key_blocks),
            (Number::RoundedTiles, self.rounded * key_blocks),
        ]
    }

    /// Returns the query blocks that are cleared before the main kernel, and those that it rounds.
    fn row_blocks(&self, rows: &RowBlocks, heads: u32) -> [u32; 2] {
        let of_head = rows.all / heads;
        [self.cleared * of_head, self.rounded * of_head]
    }
}

/// The waves in which tiles run on the multiprocessors.
struct Waves {
    multiprocessors: u32,
    tiles: u32,
    /// Steps (query blocks) of a tile, where all tiles have the same number.
    steps: u32,
}

/// Fixed cost of a tile beyond its steps, in steps.
const TILE_COST: f64 = 2.0;
/// Additional cost of each part of a tile that is cut, in steps.
const PART_COST: f64 = 1.0;

impl Waves {
    fn new(chip: &Chip, tiles: u32, steps: u32) -> Self {
        Waves { multiprocessors: chip.multiprocessors.max(1), tiles, steps }
    }

    /// Returns the number of tiles of the last wave, where they do not fill it.
    fn rest(&self) -> u32 {
        self.tiles % self.multiprocessors
    }

    /// Returns the duration of the last wave in steps, if its tiles are cut into `parts` parts.
    fn last(&self, parts: u32) -> f64 {
        let waves = (self.rest() * parts).div_ceil(self.multiprocessors);
        let adding = if parts > 1 { PART_COST } else { 0.0 };
        let part = f64::from(self.steps.div_ceil(parts)) + TILE_COST + adding;
        f64::from(waves) * part + adding * f64::from(parts) / 2.0
    }

    /// Returns the number of parts with the shortest predicted last wave.
    fn parts(&self) -> u32 {
        let most = (self.steps / 2).clamp(1, 8);
        (1..=most).min_by(|a, b| self.last(*a).total_cmp(&self.last(*b))).unwrap_or(1)
    }

    /// Returns the predicted saving of cutting the last wave, as a fraction of the total time.
    fn saved(&self) -> f64 {
        let tile = f64::from(self.steps) + TILE_COST;
        let all = f64::from(self.tiles.div_ceil(self.multiprocessors)) * tile;
        (self.last(1) - self.last(self.parts())) / all.max(1.0)
    }

    /// Sets the number of thread blocks, and adds the numbers and memory with which they share
    /// tiles.
    fn arrange(&self, backward: &kernels::Backward, choice: &mut Choice) {
        let rest = self.rest();
        if backward.split {
            // At least two: a single part would be a whole tile.
            let parts = self.parts().max(2);
            let launch = &mut choice.launches[0];
            let numbers = [(Number::WholeTiles, self.tiles - rest), (Number::Splits, parts)];
            launch.numbers.extend(numbers);
            launch.blocks = self.tiles - rest + rest * parts;
            let bytes = u64::from((rest * parts).max(1)) * u64::from(backward.partial_bytes());
            choice.add_memory(Workspace::Partials, bytes, Contents::Anything);
            choice.reason += &format!("; the last {rest} tiles in {parts} parts each");
        }
        if backward.persistent {
            let launch = &mut choice.launches[0];
            launch.numbers.push((Number::Tiles, launch.blocks));
            launch.blocks = launch.blocks.min(self.multiprocessors);
        }
        if backward.split || backward.persistent {
            let bytes = kernels::Backward::counter_bytes(rest);
            choice.add_memory(Workspace::Counters, bytes, Contents::Zeros);
        }
    }
}

/// The least predicted saving for which tiles are cut, as a fraction of the time. On an H200,
/// predictions of 1.5 to 2.3 % gave 0.8 to 3 %, a prediction of 0.8 % gave nothing.
const WORTH_CUTTING: f64 = 0.01;

/// Tells whether cutting the last wave into parts saves enough.
fn saves(chip: &Chip, problem: &Problem, backward: &kernels::Backward) -> bool {
    let tiles = key_tiles(problem, backward.key_block());
    let steps = problem.query_length.div_ceil(backward.query_block as usize);
    let steps = steps.saturating_mul(problem.group_size());
    let (Ok(tiles), Ok(steps)) = (u32::try_from(tiles), u32::try_from(steps)) else { return false };
    Waves::new(chip, tiles, steps).saved() >= WORTH_CUTTING
}

/// Tells whether key blocks of this size make at least four waves.
fn fills(chip: &Chip, problem: &Problem, key_block: u32) -> bool {
    key_tiles(problem, key_block) as u64 >= 4 * u64::from(chip.multiprocessors)
}

/// Returns the number of key blocks of all heads.
fn key_tiles(problem: &Problem, key_block: u32) -> usize {
    let blocks = problem.key_length.div_ceil(key_block as usize);
    blocks.saturating_mul(problem.kv_heads).saturating_mul(problem.batch)
}

/// Returns the average number of steps (query blocks) of a tile.
fn steps(problem: &Problem, [query_block, key_block]: [u32; 2], key_blocks: u32) -> f64 {
    let pairs = problem.visible_pairs() as f64 / (f64::from(query_block) * f64::from(key_block));
    (pairs / f64::from(key_blocks.max(1))).max(1.0)
}

/// The order in which the grid takes key heads.
struct Order {
    /// Number of key heads per group that is taken together.
    together: u32,
    /// The first head whose key blocks are taken from the first to the last.
    last: u32,
}

impl Order {
    /// Returns the order for the deterministic mode, in which a thread block adds to a query block
    /// only after the previous block of the same head has. Heads are taken together so that two
    /// successive blocks of a head begin two steps apart. One step would suffice if no block were
    /// ever late; with two, blocks wait only at the start.
    fn of_turns(chip: &Chip, heads: u32, steps: f64) -> Self {
        let together = (2.0 * f64::from(chip.multiprocessors) / steps).ceil();
        let together = (together as u32).clamp(1, heads);
        Order { together, last: heads - together }
    }

    /// Returns the order for causal masks, under which the first key blocks of a head have the
    /// longest walks. If heads were taken one by one, the longest tiles of the last head would
    /// begin when all others are about to end. So as many heads are taken together, in even groups,
    /// as give each multiprocessor a tile; a single one if its own tiles do. More heads would evict
    /// each other's dQ sums from L2. So would short heads, of which a group needs many: they are
    /// taken one by one.
    fn longest_first(chip: &Chip, heads: u32, key_blocks: u32) -> Self {
        let of_all = f64::from(key_blocks) / f64::from(chip.multiprocessors);
        if !(0.05..0.875).contains(&of_all) {
            return Order { together: 1, last: 0 };
        }
        let groups = (heads / chip.multiprocessors.div_ceil(key_blocks)).max(1);
        Order { together: heads.div_ceil(groups), last: 0 }
    }

    /// Returns the numbers that the kernel takes. The first group has the remainder.
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

    /// Returns when the last thread block ends, relative to an even distribution, if each
    /// multiprocessor takes the next block as soon as it is free.
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

    /// 2,048 tiles on 132 multiprocessors leave 68 for a last wave.
    #[test]
    fn a_last_round_is_cut_where_tiles_are_long() {
        let chip = Chip::H200;
        let of = |steps| Waves::new(&chip, 2048, steps);
        assert_eq!([8, 16, 32, 64, 128, 256].map(|steps| of(steps).parts()), [1, 1, 3, 5, 5, 7]);
        assert!(of(32).saved() < WORTH_CUTTING && of(64).saved() > WORTH_CUTTING);
        assert!(of(256).saved() > 0.02);
        assert_eq!(Waves::new(&chip, 132 * 4, 64).saved(), 0.0);
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
