//! The part of a mask that applies between some queries and some keys of a sequence.

use std::ops::Range;

use crate::problem::Mask;

/// Returns those of the given queries and keys that see anything of each other, and the mask
/// between them, aligned to the end of these keys as everywhere. `None` where no query sees any
/// key.
///
/// Positions are those of the whole sequence. Queries and keys that see nothing are cut off at both
/// ends, so that the result is again a window with non-negative sides.
pub(super) fn between(
    mask: Mask,
    queries: Range<usize>,
    keys: Range<usize>,
) -> Option<(Range<usize>, Range<usize>, Mask)> {
    if queries.is_empty() || keys.is_empty() {
        return None;
    }
    let before = |position: usize| mask.left.map_or(0, |left| position.saturating_sub(left));
    let after =
        |position: usize| mask.right.map_or(usize::MAX, |right| position.saturating_add(right));
    let first = mask.right.map_or(0, |right| keys.start.saturating_sub(right));
    let last = mask.left.map_or(usize::MAX, |left| (keys.end - 1).saturating_add(left));
    let queries = queries.start.max(first)..queries.end.min(last.saturating_add(1));
    if queries.is_empty() {
        return None;
    }
    let end = queries.end - 1;
    let keys = keys.start.max(before(queries.start))..keys.end.min(after(end).saturating_add(1));
    // Distance by which the last query is behind the last key.
    let behind = end as i128 - (keys.end as i128 - 1);
    let right = mask.right.filter(|_| after(queries.start) < keys.end - 1);
    let left = mask.left.filter(|_| before(end) > keys.start);
    let shift = |side: usize, by: i128| usize::try_from(side as i128 + by).unwrap_or(0);
    let right = right.map(|right| shift(right, behind));
    let left = left.map(|left| shift(left, -behind));
    Some((queries, keys, Mask::window(left, right)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn shapes() {
        let causal = |queries, keys| between(Mask::CAUSAL, queries, keys);
        assert_eq!(causal(4..8, 4..8), Some((4..8, 4..8, Mask::CAUSAL)));
        assert_eq!(causal(4..8, 0..4), Some((4..8, 0..4, Mask::NONE)));
        assert_eq!(causal(0..4, 4..8), None);
        assert_eq!(causal(2..6, 4..8), Some((4..6, 4..6, Mask::CAUSAL)));
        assert_eq!(causal(4..6, 0..8), Some((4..6, 0..6, Mask::CAUSAL)));
        let window = Mask::window(Some(2), Some(0));
        assert_eq!(between(window, 8..16, 0..8), Some((8..10, 6..8, Mask::window(Some(0), None))));
        assert_eq!(between(window, 10..16, 0..8), None);
    }

    proptest! {
        #[test]
        fn what_is_left_is_what_the_whole_mask_shows(
            left in prop::option::of(0usize..12),
            right in prop::option::of(0usize..12),
            (query, queries) in (0usize..20, 0usize..10),
            (key, keys) in (0usize..20, 0usize..10),
        ) {
            let mask = Mask::window(left, right);
            let (queries, keys) = (query..query + queries, key..key + keys);
            let mut expected = Vec::new();
            for query in queries.clone() {
                let seen = mask.visible_keys(query, 40, 40);
                expected.extend(keys.clone().filter(|key| seen.contains(key)).map(|key| (query, key)));
            }
            let mut found = Vec::new();
            if let Some((queries, keys, mask)) = between(mask, queries, keys) {
                for query in queries.clone() {
                    let row = mask.visible_keys(query - queries.start, queries.len(), keys.len());
                    prop_assert!(!row.is_empty(), "a row without keys is left");
                    found.extend(row.map(|key| (query, keys.start + key)));
                }
            }
            prop_assert_eq!(found, expected);
        }
    }
}
