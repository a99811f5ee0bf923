//! The gradients of attention on Hopper: wgmma and TMA. Ragged batches have a file of their own.

use kernels::Configuration;
use kernels::attention::Batch;
use kernels::backward::{tall_backward, tuned_backward};
use kernels::parameter::{Number, Workspace};

use super::forward::workload;
use super::{Asked, Choice, Contents, Counts, Family, Memory, Tiling, ragged_backward};
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
        launch(chip, problem, backward, "gradients in one pass over the scores".to_owned())
    }
}

/// The launches of a configuration, tuned or not.
pub(super) fn launch(
    chip: &Chip,
    problem: &Problem,
    backward: kernels::Backward,
    reason: String,
) -> Result<Choice, String> {
    if backward.batch != Batch::Equal {
        return ragged_backward::launch(chip, problem, backward, reason);
    }
    // Blocks of query rows, of every query head; and blocks of keys, of every key head.
    let counts = Counts::new(backward.query_block, problem)?;
    let key_blocks_per_head = counts.key_length.div_ceil(backward.key_block());
    let key_blocks = u64::from(counts.key_heads) * u64::from(counts.batch);
    let key_blocks = u32::try_from(key_blocks * u64::from(key_blocks_per_head))
        .ok()
        .filter(|blocks| *blocks < 1 << 31)
        .ok_or_else(|| "the number of key blocks is too large for the GPU kernel".to_owned())?;

    let mut choice = Choice::of(Configuration::Backward(backward), key_blocks, reason);
    choice.launches[0].numbers = vec![(Number::KeyBlocks, key_blocks_per_head)];
    let ring = Ring::new(chip, &backward, &counts, key_blocks_per_head);
    if backward.has_ring() {
        choice.launches[0].numbers.extend([
            (Number::RingHeads, ring.heads),
            (Number::RoundingLag, ring.lag),
            (Number::QueryBlocks, counts.tiles_per_head),
        ]);
    }
    if backward.deterministic {
        let steps = steps(problem, [backward.query_block, backward.key_block()], key_blocks);
        let heads = counts.key_heads * counts.batch;
        choice.launches[0].numbers.extend(order(chip, heads, steps));
    }
    let of_ring = counts.tiles.checked_div(counts.batch * counts.key_heads).unwrap_or(0);
    let rows = RowBlocks {
        per_head: counts.tiles_per_head,
        all: counts.tiles,
        room: of_ring * ring.heads,
        last: of_ring * ring.lag.min(counts.batch * counts.key_heads),
    };
    beside(&mut choice, &backward, counts.heads, rows);
    choice.tiling = Some(Tiling {
        query_rows: backward.query_block,
        key_block: backward.key_block(),
        tiles_per_head: key_blocks_per_head,
        tiles: key_blocks,
        splits: 1,
        waves: f64::from(key_blocks) / f64::from(chip.multiprocessors.max(1)),
    });
    Ok(choice)
}

/// Blocks of query rows.
#[derive(Clone, Copy)]
pub(super) struct RowBlocks {
    /// Of a query head.
    pub(super) per_head: u32,
    /// Of all heads and sequences.
    pub(super) all: u32,
    /// Those whose sums there is room for at a time.
    pub(super) room: u32,
    /// The last ones, which are rounded after all products.
    pub(super) last: u32,
}

/// Puts what comes before and after the products around them, with the workspace.
pub(super) fn beside(
    choice: &mut Choice,
    backward: &kernels::Backward,
    heads: u32,
    rows: RowBlocks,
) {
    let numbers = vec![
        (Number::QueryBlocks, rows.per_head),
        (Number::RingBlocks, rows.room),
        (Number::FirstBlock, rows.all - rows.last),
    ];
    let row_sums = Configuration::RowSums(backward.row_sums());
    let rounding = Configuration::Rounding(backward.rounding());
    let beside = |kernel, blocks| Launch { kernel, blocks, numbers: numbers.clone() };
    choice.launches.insert(0, beside(row_sums, rows.all));
    choice.launches.push(beside(rounding, backward.rounding().blocks(rows.last)));
    let sinks = backward.sink_gradients().map(Configuration::SinkGradients);
    choice.launches.extend(sinks.map(|kernel| beside(kernel, heads)));
    choice.main = 1;
    let memory = [
        Some((Workspace::RowStatistics, backward.statistics_bytes(), rows.all)),
        Some((Workspace::QueryGradientSums, backward.sums_layout().block_bytes(), rows.room)),
        backward.deterministic.then_some((Workspace::Turns, 4, rows.all)),
        backward.has_ring().then_some((Workspace::Progress, 8, rows.all)),
    ];
    for (workspace, bytes, blocks) in memory.into_iter().flatten() {
        choice.memory.push(Memory {
            source: Source::Workspace(workspace),
            bytes: u64::from(bytes) * u64::from(blocks),
            contents: Contents::Anything,
        });
    }
}

/// How many key heads' sums of `dQ` there is room for at a time, and how many heads later they are
/// rounded.
struct Ring {
    heads: u32,
    lag: u32,
}

impl Ring {
    /// Where heads are few, all have room.
    fn new(
        chip: &Chip,
        backward: &kernels::Backward,
        counts: &Counts,
        key_blocks_per_head: u32,
    ) -> Self {
        let all = counts.batch * counts.key_heads;
        let heads_of = |blocks: u32| blocks.div_ceil(key_blocks_per_head.max(1));
        // While a block with a long walk runs, others go through twice as many short ones. A head that
        // many blocks behind is done, and is cleared when those that look back to it have begun.
        let lag = heads_of(2 * chip.multiprocessors).max(1);
        let heads = lag + heads_of(chip.multiprocessors / 2).max(1);
        if backward.has_ring() && heads <= all / 2 {
            Ring { heads, lag }
        } else {
            Ring { heads: all.max(1), lag: kernels::backward::NO_LAG }
        }
    }
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

/// In the deterministic mode a block of the grid adds to a block of query rows after the one before it
/// of the same head. Heads are taken together so that the two begin two steps apart, where one step is
/// enough if nobody is ever late: then nobody waits but for the begin.
fn order(chip: &Chip, heads: u32, steps: f64) -> [(Number, u32); 3] {
    let together = (2.0 * f64::from(chip.multiprocessors) / steps).ceil();
    let together = (together as u32).clamp(1, heads.max(1));
    let first = (heads.max(1) - 1) % together + 1;
    [
        (Number::HeadsPerGroup, together),
        (Number::FirstHeads, first),
        (Number::LastHeads, heads.max(1) - together),
    ]
}
