//! What a row sees of the keys, and what its products with them become: by the definition.

use std::ops::Range;

use flashcore::Mask;

/// The rule of one row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rule {
    pub(super) scale: f64,
    pub(super) softcap: Option<f64>,
    /// ALiBi's; zero without.
    pub(super) slope: f64,
    /// Where the query stands among the keys; before the first, where there are more queries.
    pub(super) position: i64,
}

impl Rule {
    /// The keys that are seen, which follow each other.
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

    /// A product of the query with a key as a score.
    pub(super) fn score(&self, product: f64, key: usize) -> f64 {
        let scaled = self.scale * product;
        let capped = self.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh());
        // Without slopes also where the score is infinite.
        match self.slope == 0.0 {
            true => capped,
            false => capped - self.slope * (self.position - key as i64).abs() as f64,
        }
    }

    /// The score before ALiBi as a part of the softcap; zero without.
    pub(super) fn part_of_cap(&self, product: f64) -> f64 {
        self.softcap.map_or(0.0, |cap| (self.scale * product / cap).tanh())
    }
}
