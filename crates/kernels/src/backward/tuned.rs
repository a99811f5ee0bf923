//! Chooses the configuration for a problem.

use ptx::Element;

use super::{Backward, Shape};
use crate::attention::{Batch, Rules};

/// Returns the fastest configuration for these tensors, or `None` for head dimensions above 256.
pub fn tuned_backward(
    element: Element,
    head_dim: u32,
    value_head_dim: u32,
    rules: Rules,
) -> Option<Backward> {
    if head_dim > 256 || value_head_dim > 256 {
        return None;
    }
    let query_block = if head_dim <= 64 && value_head_dim <= 128 { 128 } else { 64 };
    let tuned = Backward {
        element,
        head_dim,
        value_head_dim,
        rules,
        query_block,
        deterministic: false,
        batch: Batch::Equal,
        persistent: false,
        split: false,
        shares: false,
    };
    Some(tuned)
}

/// Returns the variant with twice as many keys to a thread block, where there is one. It adds half
/// as much to `dQ`, and is faster where there are still enough thread blocks. Masks and score rules
/// leave it too few registers.
pub fn tall_backward(tuned: Backward) -> Option<Backward> {
    let plain = tuned.rules == Rules::DENSE && !tuned.deterministic;
    let tall = Backward { query_block: 64, ..tuned };
    (plain && tall.shape() == Shape::Tall).then_some(tall)
}

/// Returns the persistent variant, where there is one: faster where tiles are short. Only narrow
/// heads have registers for it; other rules have not been measured.
pub fn persistent_backward(tuned: Backward) -> Option<Backward> {
    let measured = [Rules::CAUSAL, Rules::LOCAL].contains(&Rules { sinks: false, ..tuned.rules });
    let narrow = tuned.shape() == Shape::Square && tuned.is_narrow();
    let persistent = Backward { persistent: true, ..tuned };
    (measured && narrow && tuned.may_be_persistent()).then_some(persistent)
}

/// Returns the variant that splits the tiles of the last wave, where there is one.
pub fn split_backward(tuned: Backward) -> Option<Backward> {
    let measured = (tuned.head_dim, tuned.value_head_dim) == (128, 128);
    let plain = tuned.rules == Rules::DENSE && tuned.may_be_persistent();
    (measured && plain).then_some(Backward { split: true, ..tuned })
}

/// Returns the variant over ragged batches whose tiles clear and round shares of the `dQ`
/// workspace, where there is one. It is faster where each query head has keys of its own. Rules that
/// change scores, and functions, have not been measured with it.
pub fn sharing_backward(tuned: Backward) -> Option<Backward> {
    let Rules { mask, sinks, .. } = tuned.rules;
    let measured = tuned.rules == Rules { mask, sinks, ..Rules::DENSE };
    (measured && tuned.may_have_shares()).then_some(Backward { shares: true, ..tuned })
}

/// Returns every configuration that the functions above choose for an element type and rules, at
/// representative head dimensions and with equal lengths.
pub(crate) fn every_backward(element: Element, rules: Rules) -> impl Iterator<Item = Backward> {
    [(64, 64), (128, 128), (40, 72), (80, 80), (96, 96), (128, 64), (256, 256), (192, 128)]
        .into_iter()
        .filter_map(move |(head_dim, value)| tuned_backward(element, head_dim, value, rules))
        .flat_map(|tuned| {
            let others = [tall_backward, persistent_backward, split_backward].map(|it| it(tuned));
            [Some(tuned)].into_iter().chain(others)
        })
        .flatten()
}
