//! The main kernels beside which the companion kernels of a backward pass run.

use kernels::backward::{BackwardPass, Rounding, RowSums, SinkGradients};
use kernels::mma::{BackwardMma, tuned_backward};
use kernels::{Backward, Configuration, Rules};
use ptx::Element;

/// Returns a main kernel whose pass has this companion kernel. A kernel of no pass stands for itself.
pub(super) fn main_kernel(kernel: &Configuration) -> Configuration {
    let found = match kernel {
        Configuration::RowSums(it) => of_row_sums(it),
        Configuration::Rounding(it) => of_rounding(it),
        Configuration::SinkGradients(it) => of_sink_gradients(it),
        _ => None,
    };
    found.unwrap_or(*kernel)
}

fn of_row_sums(kernel: &RowSums) -> Option<Configuration> {
    let RowSums { target, element, value_head_dim: value, sums, counters, batch, .. } = *kernel;
    let plain = RowSums { lse_gradient: false, ..*kernel };
    let hopper = Backward {
        element,
        head_dim: sums.columns,
        value_head_dim: value,
        rules: Rules::CAUSAL,
        query_block: sums.query_block,
        deterministic: counters,
        batch,
        persistent: false,
        split: false,
        shares: kernel.shares.is_some(),
    };
    // More rules may need smaller query blocks.
    let others = [Rules::CAUSAL, Rules::EVERY].into_iter().filter_map(|rules| {
        tuned_backward(target, element, sums.columns, value, rules, counters, batch)
    });
    first(hopper, others, |pass| pass.row_sums() == plain)
}

fn of_rounding(kernel: &Rounding) -> Option<Configuration> {
    let Rounding { target, element, head_dim, sums, batch, .. } = *kernel;
    // A single part of 64 columns is what narrow queries with values wider than 128 have.
    let wide = sums.columns == 64 && sums.part_queries == sums.query_block;
    let hopper = Backward {
        element,
        head_dim,
        value_head_dim: if wide { 256 } else { 64 },
        rules: Rules::CAUSAL,
        query_block: sums.query_block,
        deterministic: false,
        batch,
        persistent: false,
        split: false,
        shares: kernel.shares.is_some(),
    };
    // Wider values and more rules may need smaller query blocks.
    let cases = [64, 128, 256].map(|value| [Rules::CAUSAL, Rules::EVERY].map(|it| (value, it)));
    let others = cases.into_iter().flatten().filter_map(|(value, rules)| {
        tuned_backward(target, element, head_dim, value, rules, false, batch)
    });
    first(hopper, others, |pass| pass.rounding() == *kernel)
}

fn of_sink_gradients(kernel: &SinkGradients) -> Option<Configuration> {
    let SinkGradients { target, mask, query_block, batch, .. } = *kernel;
    let plain = Some(SinkGradients { lse_gradient: false, ..*kernel });
    let element = Element::BF16;
    let head_dim = if query_block > 64 { 64 } else { 128 };
    let rules = Rules { mask, sinks: true, ..Rules::DENSE };
    let hopper = Backward {
        element,
        head_dim,
        value_head_dim: head_dim,
        rules,
        query_block,
        deterministic: false,
        batch,
        persistent: false,
        split: false,
        shares: false,
    };
    // Wider heads and more rules may need smaller query blocks.
    let cases = [64, 128, 256].map(|dim| [rules, rules.capped()].map(|rules| (dim, rules)));
    let others = cases
        .into_iter()
        .flatten()
        .filter_map(|(dim, rules)| tuned_backward(target, element, dim, dim, rules, false, batch));
    first(hopper, others, |pass| pass.sink_gradients() == plain)
}

/// Returns the kernel for Hopper, or else the first other one, that can be built and whose pass `has`
/// the companion.
fn first(
    hopper: Backward,
    mut others: impl Iterator<Item = BackwardMma>,
    has: impl Fn(&BackwardPass) -> bool,
) -> Option<Configuration> {
    if has(&hopper.pass()) && hopper.program().is_ok() {
        return Some(Configuration::Backward(hopper));
    }
    others.find(|it| has(&it.pass())).map(Configuration::BackwardMma)
}
