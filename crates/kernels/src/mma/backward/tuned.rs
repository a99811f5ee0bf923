//! Chooses the configuration for a problem.
//!
//! A rule of the table names the widest head dimensions that it serves. The first rule that serves
//! the problem and whose shared memory fits the target is taken.

use ptx::{Element, Target};

use super::BackwardMma;
use crate::attention::{Batch, Rules};

/// A row of the table.
struct TileRule {
    /// The widest queries and values that it serves.
    dim: u32,
    /// Whether it has registers to spare for score rules, head dimensions that are not multiples of
    /// 64, turns and ragged batches.
    spare: bool,
    /// `key_tiles`, `key_warps` and `column_warps` of the configuration.
    warps: [u32; 3],
    query_block: u32,
    part: u32,
    ahead: u32,
}

/// Narrow heads before wide ones, large tiles before small ones. The `dK` and `dV` accumulators of
/// a thread take 128 registers at most: a warp has 32 keys by 64 columns of both.
const RULES: &[TileRule] = &[
    TileRule { dim: 128, spare: true, warps: [2, 4, 2], query_block: 64, part: 32, ahead: 1 },
    TileRule { dim: 128, spare: true, warps: [2, 2, 2], query_block: 32, part: 16, ahead: 1 },
    TileRule { dim: 256, spare: false, warps: [2, 2, 4], query_block: 64, part: 16, ahead: 1 },
    TileRule { dim: 256, spare: true, warps: [2, 2, 4], query_block: 32, part: 8, ahead: 1 },
    // For the widest heads, where there is no room for a second query block in flight.
    TileRule { dim: 256, spare: true, warps: [2, 1, 4], query_block: 32, part: 8, ahead: 0 },
];

/// Returns the configuration for these tensors, or `None` if the kernel does not support them.
pub fn tuned_backward(
    target: Target,
    element: Element,
    head_dim: u32,
    value_head_dim: u32,
    rules: Rules,
    deterministic: bool,
    batch: Batch,
) -> Option<BackwardMma> {
    let configuration = |rule: &TileRule| BackwardMma {
        target,
        element,
        head_dim,
        value_head_dim,
        rules,
        key_tiles: rule.warps[0],
        key_warps: rule.warps[1],
        column_warps: rule.warps[2],
        query_block: rule.query_block,
        part: rule.part,
        ahead: rule.ahead,
        residents: 1,
        deterministic,
        batch,
    };
    let whole = head_dim.is_multiple_of(64) && value_head_dim.is_multiple_of(64);
    let plain = whole && !rules.changes_scores() && !deterministic && batch == Batch::Equal;
    let serves =
        |rule: &&TileRule| head_dim.max(value_head_dim) <= rule.dim && (rule.spare || plain);
    let mut all = RULES.iter().filter(serves).map(configuration);
    all.find(|configuration| configuration.fault().is_none())
}

/// Returns every configuration that [`tuned_backward`] chooses for an element type and rules, at
/// representative head dimensions. The deterministic mode and ragged batches are included for a
/// causal mask and for all rules together, at head dimensions 128 and 256.
pub(crate) fn every_tuned_backward(
    target: Target,
    element: Element,
    rules: Rules,
) -> impl Iterator<Item = BackwardMma> {
    let dims = [(64, 64), (128, 128), (256, 256), (40, 72), (96, 96), (192, 128), (200, 136)];
    let plain = dims.map(|dims| (dims, false, Batch::Equal));
    let modes = [(true, Batch::Equal), (false, Batch::Ragged), (true, Batch::Ragged)];
    let most: &[(u32, u32)] = match rules {
        Rules::CAUSAL | Rules::EVERY => &[(128, 128), (256, 256)],
        _ => &[],
    };
    let others = modes.into_iter().flat_map(move |(deterministic, batch)| {
        most.iter().map(move |dims| (*dims, deterministic, batch))
    });
    plain.into_iter().chain(others).filter_map(move |((dim, value), deterministic, batch)| {
        tuned_backward(target, element, dim, value, rules, deterministic, batch)
    })
}
