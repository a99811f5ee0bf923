//! The visible keys and the scores of a row, directly from the definition.

use std::ops::Range;

use flashcore::Mask;

/// The mask and score parameters of one row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rule {
    pub(super) scale: f64,
    pub(super) softcap: Option<f64>,
    /// The ALiBi slope; zero without ALiBi.
    pub(super) slope: f64,
    /// The position of the query among the keys; negative for the first queries where there are
    /// more queries than keys.
    pub(super) position: i64,
}

impl Rule {
    /// Returns the visible keys, which are contiguous.
    pub(super) fn visible(&self, mask: &Mask, keys: usize) -> Range<usize> {
        let sees = |key: &usize| self.sees(mask, *key as i64);
        let begin = (0..keys).find(sees).unwrap_or(keys);
        begin..(begin..keys).find(|key| !sees(key)).unwrap_or(keys)
    }

    fn sees(&self, mask: &Mask, key: i64) -> bool {
        let within = |reach: Option<usize>, distance: i64| {
            reach.is_none_or(|reach| distance <= i64::try_from(reach).unwrap_or(i64::MAX))
        };
        let chunk = |at: i64| mask.chunk.map(|chunk| at.div_euclid(chunk.get() as i64));
        within(mask.left, self.position - key)
            && within(mask.right, key - self.position)
            && chunk(key) == chunk(self.position)
    }

    /// Returns the score of a key, given its product with the query.
    pub(super) fn score(&self, product: f64, key: usize) -> f64 {
        let scaled = self.scale * product;
        let capped = self.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh());
        // Without ALiBi the score is the capped product as it is, even if it is infinite.
        match self.slope == 0.0 {
            true => capped,
            false => capped - self.slope * (self.position - key as i64).abs() as f64,
        }
    }

    /// Returns the capped score before ALiBi as a fraction of the cap: the tanh of
    /// `scale * product / cap`; zero without a softcap.
    pub(super) fn part_of_cap(&self, product: f64) -> f64 {
        self.softcap.map_or(0.0, |cap| (self.scale * product / cap).tanh())
    }
}
