//! Which keys a query sees.

use std::fmt;
use std::ops::Range;

use serde::Serialize;

/// Which keys a query may see. A masked key contributes nothing, even if it holds NaN.
///
/// Queries are aligned to the end of the keys: query `i` stands at position
/// `i + key_length - query_length`, so the last query stands at the last key, whatever the lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Mask {
    /// Every query sees every key.
    #[default]
    None,
    /// A query sees the keys up to its own position.
    Causal,
    /// A query at position `p` sees the keys from `p - left` to `p + right`, both included. Make
    /// it with [`Mask::window`], which knows the windows that have a name of their own.
    Window {
        /// Keys before the query's position; all of them when `None`.
        left: Option<usize>,
        /// Keys after the query's position; all of them when `None`.
        right: Option<usize>,
    },
}

impl Mask {
    /// A sliding window; a causal one has `right` zero.
    ///
    /// ```
    /// use flashcore::Mask;
    ///
    /// let window = Mask::window(Some(2), Some(0));
    /// assert_eq!(window.visible_keys(4, 10, 10), 2..5);
    /// assert_eq!(Mask::window(None, Some(0)), Mask::Causal);
    /// assert_eq!(Mask::window(None, None), Mask::None);
    /// ```
    pub fn window(left: Option<usize>, right: Option<usize>) -> Self {
        match (left, right) {
            (None, None) => Mask::None,
            (None, Some(0)) => Mask::Causal,
            (left, right) => Mask::Window { left, right },
        }
    }

    /// How many keys before and after its own position a query sees; all when `None`.
    pub fn reach(self) -> (Option<usize>, Option<usize>) {
        match self {
            Mask::None => (None, None),
            Mask::Causal => (None, Some(0)),
            Mask::Window { left, right } => (left, right),
        }
    }

    /// The keys that `query` sees, as one range; empty for a fully masked row.
    ///
    /// ```
    /// use flashcore::Mask;
    ///
    /// assert_eq!(Mask::Causal.visible_keys(0, 2, 5), 0..4);
    /// assert_eq!(Mask::Causal.visible_keys(0, 5, 2), 0..0);
    /// ```
    pub fn visible_keys(
        self,
        query: usize,
        query_length: usize,
        key_length: usize,
    ) -> Range<usize> {
        let (left, right) = self.reach();
        // Positions may be negative: both ends are kept `query_length` too large until the end.
        let position = query + key_length;
        let begin = left.map_or(0, |left| {
            position.saturating_sub(query_length.saturating_add(left)).min(key_length)
        });
        let end = right.map_or(key_length, |right| {
            position.saturating_add(right).saturating_add(1).saturating_sub(query_length)
        });
        let end = end.min(key_length);
        if begin < end { begin..end } else { 0..0 }
    }

    /// How many (query, key) pairs one head of one sequence computes.
    pub(super) fn visible_pairs(self, query_length: usize, key_length: usize) -> u128 {
        let (queries, keys) = (query_length as i128, key_length as i128);
        // Keys before the bound that a query at position p has at p + shift, over all queries.
        let before = |shift: i128| {
            let first = keys - queries + shift;
            clamped_sum(first + queries - 1, keys) - clamped_sum(first - 1, keys)
        };
        let (left, right) = self.reach();
        let end = right.map_or(queries.saturating_mul(keys), |right| before(right as i128 + 1));
        let begin = left.map_or(0, |left| before(-(left as i128)));
        u128::try_from(end - begin).unwrap_or(0)
    }
}

/// The sum of min(x, most) over the positive x up to `last`.
fn clamped_sum(last: i128, most: i128) -> i128 {
    let rising = last.clamp(0, most);
    let flat = (last - most).max(0);
    (rising.saturating_mul(rising + 1) / 2).saturating_add(flat.saturating_mul(most))
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mask::None => f.pad("none"),
            Mask::Causal => f.pad("causal"),
            Mask::Window { left, right } => {
                let side = |keys: &Option<usize>| keys.map_or(String::new(), |it| it.to_string());
                f.pad(&format!("window {}:{}", side(left), side(right)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_window_moves_with_the_query() {
        let window = Mask::window(Some(3), Some(1));
        let ranges = |queries: usize, keys: usize| -> Vec<Range<usize>> {
            (0..queries).map(|query| window.visible_keys(query, queries, keys)).collect()
        };
        assert_eq!(ranges(3, 6), [0..5, 1..6, 2..6]);
        assert_eq!(ranges(6, 2), [0..0, 0..0, 0..0, 0..1, 0..2, 0..2]);
        assert_eq!(Mask::window(Some(0), Some(0)).visible_keys(3, 5, 5), 3..4);
        assert_eq!(Mask::window(Some(usize::MAX), Some(usize::MAX)).visible_keys(0, 5, 5), 0..5);
    }

    proptest! {
        #[test]
        fn the_pair_count_is_the_sum_over_rows(
            queries in 0usize..40,
            keys in 0usize..40,
            left in prop::option::of(0usize..50),
            right in prop::option::of(0usize..50),
        ) {
            let mask = Mask::window(left, right);
            let sum: usize = (0..queries)
                .map(|query| mask.visible_keys(query, queries, keys).len())
                .sum();
            prop_assert_eq!(mask.visible_pairs(queries, keys), sum as u128);
        }

        #[test]
        fn a_key_is_visible_when_it_is_near_enough(
            queries in 1usize..20,
            keys in 1usize..20,
            left in prop::option::of(0usize..25),
            right in prop::option::of(0usize..25),
        ) {
            let mask = Mask::window(left, right);
            for query in 0..queries {
                let position = query as isize + keys as isize - queries as isize;
                let near = |key: usize| {
                    let distance = key as isize - position;
                    left.is_none_or(|left| distance >= -(left as isize))
                        && right.is_none_or(|right| distance <= right as isize)
                };
                let expected: Vec<usize> = (0..keys).filter(|key| near(*key)).collect();
                let found: Vec<usize> = mask.visible_keys(query, queries, keys).collect();
                prop_assert_eq!(found, expected);
            }
        }
    }
}
