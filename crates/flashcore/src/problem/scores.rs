//! What becomes of the product of a query and a key before the softmax.

use super::Problem;

/// The scores of one row: the product of query and key is scaled, capped and biased, in this order.
///
/// ```text
/// s = scale * (q . k)
/// s = softcap * tanh(s / softcap)       with a softcap
/// s = s - slope * |position - key|      with ALiBi
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Scores {
    scale: f64,
    softcap: Option<f64>,
    /// ALiBi's; zero without.
    slope: f64,
    /// The position of the query among the keys; negative where there are more queries.
    position: i64,
}

impl Scores {
    /// The scores of `query` in a sequence of these lengths, under a head's ALiBi slope.
    pub(crate) fn of(
        problem: &Problem,
        query: usize,
        query_length: usize,
        key_length: usize,
        slope: f32,
    ) -> Self {
        Scores {
            scale: f64::from(problem.scale()),
            softcap: problem.softcap.map(f64::from),
            slope: f64::from(slope),
            position: query as i64 + key_length as i64 - query_length as i64,
        }
    }

    /// The cap, if there is one.
    pub(crate) fn softcap(&self) -> Option<f32> {
        self.softcap.map(|cap| cap as f32)
    }

    /// ALiBi's slope; zero without.
    pub(crate) fn slope(&self) -> f32 {
        self.slope as f32
    }

    /// Where the query stands among the keys.
    pub(crate) fn position(&self) -> f32 {
        self.position as f32
    }

    /// The score of a key from its product with the query.
    pub(crate) fn score(&self, product: f64, key: usize) -> f64 {
        self.adjust(self.scale * product, key)
    }

    /// The score of a key from its scaled product with the query.
    pub(crate) fn adjust(&self, scaled: f64, key: usize) -> f64 {
        let capped = self.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh());
        if self.slope == 0.0 {
            return capped;
        }
        capped - self.slope * (self.position - key as i64).unsigned_abs() as f64
    }
}
