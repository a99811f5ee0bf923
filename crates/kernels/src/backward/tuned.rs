//! Which configuration serves which problem.

use ptx::Element;

use super::Backward;
use crate::attention::Rules;

/// The configuration that runs fastest for these tensors, where there is one.
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
    let deterministic = false;
    Some(Backward { element, head_dim, value_head_dim, rules, query_block, deterministic })
}

/// Every configuration that [`tuned_backward`] chooses, of one element and these rules, for head
/// dimensions that stand for the rest.
pub fn every_backward(element: Element, rules: Rules) -> impl Iterator<Item = Backward> {
    [(64, 64), (128, 128), (40, 72), (80, 80), (96, 96), (128, 64), (256, 256), (192, 128)]
        .into_iter()
        .filter_map(move |(head_dim, value)| tuned_backward(element, head_dim, value, rules))
}
