//! Which configuration serves which problem.
//!
//! A rule names the widest head dimensions that it serves. The first whose shared memory fits the
//! target is taken.

use ptx::{Element, Target};

use super::BackwardMma;
use crate::attention::{Batch, Rules};

/// One line of the table.
struct Rule {
    /// The widest queries and values it serves.
    dim: u32,
    /// Whether there are registers for what changes scores, for heads that fill no panels, for turns
    /// and for sequences that lie anywhere.
    spare: bool,
    /// Keys of a warp in sixteens, warps whose keys follow one another, warps that share theirs.
    warps: [u32; 3],
    query_block: u32,
    part: u32,
    ahead: u32,
}

/// Narrow before wide, large before small. A warp has 128 registers of gradients at most: 32 keys by
/// 64 columns of both.
const RULES: &[Rule] = &[
    Rule { dim: 128, spare: true, warps: [2, 4, 2], query_block: 64, part: 32, ahead: 1 },
    Rule { dim: 128, spare: true, warps: [2, 2, 2], query_block: 32, part: 16, ahead: 1 },
    Rule { dim: 256, spare: false, warps: [2, 2, 4], query_block: 64, part: 16, ahead: 1 },
    Rule { dim: 256, spare: true, warps: [2, 2, 4], query_block: 32, part: 8, ahead: 1 },
    // What is left for the widest heads where there is no room for a query block on its way.
    Rule { dim: 256, spare: true, warps: [2, 1, 4], query_block: 32, part: 8, ahead: 0 },
];

/// The configuration for these tensors, or nothing where the kernel does not serve them.
pub fn tuned_backward(
    target: Target,
    element: Element,
    head_dim: u32,
    value_head_dim: u32,
    rules: Rules,
    deterministic: bool,
    batch: Batch,
) -> Option<BackwardMma> {
    let configuration = |rule: &Rule| BackwardMma {
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
    let serves = |rule: &&Rule| head_dim.max(value_head_dim) <= rule.dim && (rule.spare || plain);
    let mut all = RULES.iter().filter(serves).map(configuration);
    all.find(|configuration| configuration.fault().is_none())
}

/// Every configuration that [`tuned_backward`] chooses, of one element and these rules, for head
/// dimensions that stand for the rest; in one order and over ragged batches for those and the rules
/// that ask for the most registers.
pub fn every_tuned_backward(
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
