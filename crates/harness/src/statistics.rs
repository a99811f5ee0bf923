//! Medians, spread, and when a difference is significant.
//!
//! Samples come one to a round, and in a round all candidates run one after the other, the order
//! reversed from round to round. What changes slowly (clocks, heat) is then common to a round and
//! falls out of the ratios of two candidates, which are what is compared.

use flashcore::random::mix;
use serde::{Deserialize, Serialize};

/// Returns the median; of an even number of samples, the mean of the two in the middle.
pub fn median(samples: &[f64]) -> f64 {
    quantile(samples, 0.5)
}

/// Returns a quantile, interpolated between neighbouring samples.
pub(crate) fn quantile(samples: &[f64], share: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let position = share * last as f64;
    let (below, above) = (sorted[position.floor() as usize], sorted[position.ceil() as usize]);
    below + (above - below) * position.fract()
}

/// Summary of the samples of one candidate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The median, in the samples' unit.
    pub median: f64,
    /// The fastest.
    pub least: f64,
    /// The slowest.
    pub most: f64,
    /// The share of the median by which two measurements like this one of the same thing differ
    /// in 1 of 20 cases.
    pub noise: f64,
}

impl Summary {
    /// Sums up samples in milliseconds.
    pub fn of(samples: &[f64]) -> Self {
        let least = samples.iter().copied().fold(f64::INFINITY, f64::min);
        let most = samples.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let median = median(samples);
        // The difference of two such medians spreads wider by the square root of two.
        let logs: Vec<f64> = samples.iter().map(|sample| sample.ln()).collect();
        let noise = spread_of_median(&logs) * std::f64::consts::SQRT_2;
        Summary { median, least, most, noise: noise.max(floor(median)) }
    }
}

/// The difference of two candidates measured in the same rounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// The time of the second over that of the first.
    pub ratio: f64,
    /// How far the ratio of a candidate to itself may be from 1.
    pub noise: f64,
}

impl Difference {
    /// Compares samples in milliseconds, round by round.
    pub fn between(first: &[f64], second: &[f64]) -> Self {
        let ratios: Vec<f64> = first.iter().zip(second).map(|(a, b)| (b / a).ln()).collect();
        let faster = median(first).min(median(second));
        let noise = spread_of_median(&ratios).max(floor(faster));
        Difference { ratio: median(&ratios).exp(), noise }
    }

    /// Returns whether the difference exceeds the noise.
    pub fn is_significant(&self) -> bool {
        self.ratio.ln().abs() > self.noise
    }
}

/// Returns the smallest relative difference that counts: the device's clock resolves half a
/// microsecond, and the placement of tensors alone makes a thousandth.
fn floor(milliseconds: f64) -> f64 {
    0.5e-3 / milliseconds + 1e-3
}

/// Returns half the width of the 95 % confidence interval of the median, for a few samples with
/// outliers: these widen the deviation but do not move the median, so the estimate errs on the side
/// of noise. A trend counts too: the interval is at least as wide as the difference between the
/// medians of the two halves.
fn spread_of_median(samples: &[f64]) -> f64 {
    let count = samples.len();
    if count < 2 {
        return f64::INFINITY;
    }
    let mean = samples.iter().sum::<f64>() / count as f64;
    let squares: f64 = samples.iter().map(|sample| (sample - mean).powi(2)).sum();
    let deviation = (squares / (count - 1) as f64).sqrt();
    // The median of normal samples spreads 1.2533 times as far as their mean.
    let by_deviation = student(count - 1) * 1.2533 * deviation / (count as f64).sqrt();
    let (early, late) = samples.split_at(count / 2);
    by_deviation.max((median(early) - median(late)).abs() / 2.0)
}

/// Returns the two-sided 95 % quantile of Student's t distribution.
fn student(freedom: usize) -> f64 {
    const TABLE: [f64; 15] =
        [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13];
    // Beyond the table it falls from 2.13 to 1.96.
    TABLE.get(freedom.saturating_sub(1)).copied().unwrap_or(2.12)
}

/// Returns the geometric mean; 1 if there are no numbers.
pub fn geometric_mean(numbers: impl IntoIterator<Item = f64>) -> f64 {
    let logs: Vec<f64> = numbers.into_iter().map(f64::ln).collect();
    if logs.is_empty() { 1.0 } else { (logs.iter().sum::<f64>() / logs.len() as f64).exp() }
}

/// A pseudo-random generator with a fixed sequence for each seed.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A sequence of its own for each seed.
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_add(0x9E37_79B9_7F4A_7C15))
    }

    /// The next 64 bits (splitmix64).
    pub fn bits(&mut self) -> u64 {
        let bits = mix(self.0);
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        bits
    }

    /// A number from 0 up to, not including, `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end.max(1) as u64) as usize
    }

    /// One of some values.
    pub fn choose<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    /// True once in so many draws.
    pub fn one_in(&mut self, chances: usize) -> bool {
        self.below(chances) == 0
    }

    /// A number from 0 up to 1.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Puts a list into a random order (Fisher and Yates).
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for index in (1..list.len()).rev() {
            list.swap(index, self.below(index + 1));
        }
    }

    /// A standard normal number (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_quantiles() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(quantile(&[0.0, 10.0], 0.25), 2.5);
        assert!(median(&[]).is_nan());
        assert!((geometric_mean([2.0, 8.0]) - 4.0).abs() < 1e-12);
        assert_eq!(geometric_mean([]), 1.0);
    }

    /// The same thing under two names, with the drift and the outliers of a GPU: in at least 19
    /// of 20 trials the difference is within the noise, and the noise is not so large as to hide
    /// one of 3 %.
    #[test]
    fn the_same_thing_twice_is_within_the_noise() {
        let trial = |random: &mut Random, slower: f64| {
            let (mut first, mut second) = (Vec::new(), Vec::new());
            for round in 0..11 {
                let drift = 1.0 + 0.02 * (round as f64 / 11.0) + 0.01 * random.normal();
                for (samples, factor) in [(&mut first, 1.0), (&mut second, slower)] {
                    let outlier = if random.below(20) == 0 { 1.05 } else { 1.0 };
                    samples.push(factor * drift * outlier * (1.0 + 0.004 * random.normal()));
                }
            }
            Difference::between(&first, &second).is_significant()
        };
        let mut random = Random::new(7);
        let false_alarms = (0..2000).filter(|_| trial(&mut random, 1.0)).count();
        assert!(false_alarms <= 100, "{false_alarms} of 2000");
        let found = (0..2000).filter(|_| trial(&mut random, 1.03)).count();
        assert!(found >= 1600, "{found} of 2000");
    }

    #[test]
    fn one_sample_says_nothing() {
        assert!(Summary::of(&[1.0]).noise.is_infinite());
        assert!(!Difference::between(&[1.0], &[2.0]).is_significant());
    }
}
