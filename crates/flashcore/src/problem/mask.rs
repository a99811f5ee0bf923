//! Which keys a query sees.

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;

use kernels::attention::function::{At, Function, Traced};
use serde::Serialize;

use super::function;

/// Which keys a query may see: those in one interval around its position, less those that a
/// function hides. A masked key contributes nothing; on the CPU not even if it holds NaN. On a GPU,
/// as in FlashAttention, a block of keys of which a row sees some is multiplied whole, and zero times
/// NaN or infinity is NaN.
///
/// Queries are aligned to the end of the keys: query `i` has the position
/// `i + key_length - query_length`, so the last query is at the last key, whatever the lengths.
///
/// ```
/// use flashcore::Mask;
///
/// let window = Mask::window(Some(2), Some(0));
/// assert_eq!(window.visible_keys(4, 10, 10), 2..5);
/// assert_eq!(Mask::window(None, Some(0)), Mask::CAUSAL);
/// assert_eq!(window.with_chunk(4).visible_keys(5, 10, 10), 4..6);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[non_exhaustive]
pub struct Mask {
    /// Number of keys before the query's position that it sees; all of them when `None`.
    pub left: Option<usize>,
    /// Number of keys after the query's position that it sees; all of them when `None`.
    pub right: Option<usize>,
    /// Size of the chunks into which positions are divided; a query sees only keys of its own chunk
    /// (`attention_chunk`). No chunks when `None`.
    pub chunk: Option<NonZeroUsize>,
    /// A function that hides further keys within the interval.
    #[serde(serialize_with = "function::as_text", skip_serializing_if = "Option::is_none")]
    pub function: Option<Function>,
}

impl Mask {
    /// Every query sees every key.
    pub const NONE: Mask = Mask { left: None, right: None, chunk: None, function: None };
    /// A query sees the keys up to its own position.
    pub const CAUSAL: Mask = Mask { right: Some(0), ..Mask::NONE };

    /// Returns a sliding window; a causal one has `right` zero.
    pub const fn window(left: Option<usize>, right: Option<usize>) -> Self {
        Mask { left, right, ..Mask::NONE }
    }

    /// Returns a mask given by a function of the query and key positions, under a name that the
    /// caller chooses.
    ///
    /// ```
    /// use flashcore::{Mask, Problem};
    ///
    /// let prefix = Mask::from_fn("prefix", |at| at.key().lt(128) | at.key().le(at.query()));
    /// let problem = Problem::new(1, 8, 512, 64).with_mask(prefix);
    /// assert_eq!(problem.text().parse::<Problem>()?, problem);
    /// # Ok::<(), flashcore::ProblemTextError>(())
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if the closure does, or if `name` is not a word of letters, digits, `_`, `-` and `.`.
    #[track_caller]
    pub fn from_fn(name: &str, seen: impl for<'t> FnOnce(At<'t>) -> Traced<'t, bool>) -> Self {
        Mask::NONE.with_function(Function::mask(name, seen))
    }

    /// Adds a function that hides further keys.
    pub const fn with_function(self, function: Function) -> Self {
        Mask { function: Some(function), ..self }
    }

    /// Removes the function.
    pub const fn without_function(self) -> Self {
        Mask { function: None, ..self }
    }

    /// Restricts queries to the keys of their own chunk of `positions` positions; zero means no
    /// chunks.
    pub const fn with_chunk(self, positions: usize) -> Self {
        Mask { chunk: NonZeroUsize::new(positions), ..self }
    }

    /// Returns the range of keys that `query` sees, without regard to the function; empty for a
    /// fully masked row.
    ///
    /// ```
    /// use flashcore::Mask;
    ///
    /// assert_eq!(Mask::CAUSAL.visible_keys(0, 2, 5), 0..4);
    /// assert_eq!(Mask::CAUSAL.visible_keys(0, 5, 2), 0..0);
    /// ```
    pub fn visible_keys(
        self,
        query: usize,
        query_length: usize,
        key_length: usize,
    ) -> Range<usize> {
        let position = query as i128 + key_length as i128 - query_length as i128;
        let mut begin = self.left.map_or(0, |left| position - left as i128);
        let mut end = self.right.map_or(key_length as i128, |right| position + right as i128 + 1);
        if let Some(chunk) = self.chunk {
            let chunk = chunk.get() as i128;
            let first = position.div_euclid(chunk) * chunk;
            (begin, end) = (begin.max(first), end.min(first + chunk));
        }
        let (begin, end) = (begin.max(0), end.min(key_length as i128));
        if begin < end { begin as usize..end as usize } else { 0..0 }
    }

    /// Counts the (query, key) pairs that one head of one sequence computes.
    pub(super) fn visible_pairs(self, query_length: usize, key_length: usize) -> u128 {
        let (queries, keys) = (query_length as i128, key_length as i128);
        let Some(chunk) = self.chunk.map(|chunk| chunk.get() as i128) else {
            return self.pairs_between(keys - queries, queries, keys);
        };
        // Only positions from 0 on see anything. All chunks but the first and the last have the
        // same number of pairs: the same queries over the same keys.
        let first = (keys - queries).max(0);
        let in_chunk = |begin: i128, end: i128| {
            let within = begin.rem_euclid(chunk);
            let keys = chunk.min(keys - (begin - within));
            self.pairs_between(within, end - begin, keys)
        };
        let (head, tail) = ((first / chunk + 1) * chunk, keys / chunk * chunk);
        if head >= keys {
            return if first < keys { in_chunk(first, keys) } else { 0 };
        }
        let whole = ((tail - head) / chunk) as u128;
        let whole = if whole == 0 { 0 } else { whole.saturating_mul(in_chunk(head, head + chunk)) };
        let last = if tail < keys { in_chunk(tail, keys) } else { 0 };
        in_chunk(first, head).saturating_add(whole).saturating_add(last)
    }

    /// Counts the pairs of `queries` queries, from `position` on, with `keys` keys, by the window
    /// alone.
    fn pairs_between(self, position: i128, queries: i128, keys: i128) -> u128 {
        // Sum over all queries of the number of keys before `p + shift`, for a query at position p.
        let before = |shift: i128| {
            let first = position + shift;
            clamped_sum(first + queries - 1, keys) - clamped_sum(first - 1, keys)
        };
        let all = queries.saturating_mul(keys);
        let end = self.right.map_or(all, |right| before(right as i128 + 1));
        let begin = self.left.map_or(0, |left| before(-(left as i128)));
        u128::try_from(end - begin).unwrap_or(0)
    }
}

/// Returns the sum of min(x, most) over the positive integers x up to `last`.
fn clamped_sum(last: i128, most: i128) -> i128 {
    let rising = last.clamp(0, most);
    let flat = (last - most).max(0);
    (rising.saturating_mul(rising + 1) / 2).saturating_add(flat.saturating_mul(most))
}

impl fmt::Display for Mask {
    /// Writes the mask as in the text of a problem: `causal`, `window=4096:0`,
    /// `window=:,chunk=8192`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |keys: Option<usize>| keys.map_or(String::new(), |it| it.to_string());
        let mut words = Vec::new();
        match (self.left, self.right) {
            (None, None) => {}
            (None, Some(0)) => words.push("causal".to_owned()),
            (left, right) => words.push(format!("window={}:{}", side(left), side(right))),
        }
        words.extend(self.chunk.map(|chunk| format!("chunk={chunk}")));
        words.extend(self.function.map(|function| format!("mask={function}")));
        f.pad(&if words.is_empty() { "none".to_owned() } else { words.join(",") })
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
            chunk in 0usize..12,
        ) {
            let mask = Mask::window(left, right).with_chunk(chunk);
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
            chunk in 0usize..12,
        ) {
            let mask = Mask::window(left, right).with_chunk(chunk);
            for query in 0..queries {
                let position = query as isize + keys as isize - queries as isize;
                let near = |key: usize| {
                    let distance = key as isize - position;
                    let of_chunk = |at: isize| at.div_euclid(chunk.max(1) as isize);
                    left.is_none_or(|left| distance >= -(left as isize))
                        && right.is_none_or(|right| distance <= right as isize)
                        && (chunk == 0 || of_chunk(key as isize) == of_chunk(position))
                };
                let expected: Vec<usize> = (0..keys).filter(|key| near(*key)).collect();
                let found: Vec<usize> = mask.visible_keys(query, queries, keys).collect();
                prop_assert_eq!(found, expected);
            }
        }
    }
}
