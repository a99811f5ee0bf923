//! Random numbers as functions of a seed and an index.
//!
//! Counter-based: an element's value is a function of the seed and its index alone, so the same
//! seed gives the same tensor whatever the number of threads, the strides or the version of a
//! dependency. The mixing function is SplitMix64 (Steele, Lea and Flood, "Fast splittable
//! pseudorandom number generators", 2014), the transform is Box and Muller's.

/// Returns the standard normal deviate with this seed and index. Its magnitude is at most 6.7.
pub fn normal(seed: u64, index: u64) -> f32 {
    let bits = bits(seed, index);
    let high = (bits >> 32) as f64;
    let low = (bits & 0xffff_ffff) as f64;
    const STEP: f64 = 1.0 / (1u64 << 32) as f64;
    // high + 1 keeps the argument of the logarithm in (0, 1].
    let radius = (-2.0 * ((high + 1.0) * STEP).ln()).sqrt();
    (radius * (std::f64::consts::TAU * low * STEP).cos()) as f32
}

/// Returns a number with this seed and index, uniformly distributed between -1 and 1.
pub fn uniform(seed: u64, index: u64) -> f32 {
    let bits = bits(seed, index) >> 40;
    bits as f32 / (1u32 << 23) as f32 - 1.0
}

/// Returns 64 random bits.
fn bits(seed: u64, index: u64) -> u64 {
    mix(mix(seed).wrapping_add(index.wrapping_mul(GOLDEN)))
}

/// 2^64 divided by the golden ratio, the increment of SplitMix64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Performs one step of SplitMix64.
pub fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(GOLDEN);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixing_agrees_with_the_published_sequence() {
        // The first two outputs of SplitMix64 seeded with 0.
        assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(mix(GOLDEN), 0x6e78_9e6a_a1b9_65f4);
    }

    #[test]
    #[cfg_attr(miri, ignore = "draws a hundred thousand numbers")]
    fn moments_are_those_of_the_normal_distribution() {
        let count = 100_000;
        for seed in 0..4 {
            let values: Vec<f64> = (0..count).map(|i| f64::from(normal(seed, i))).collect();
            let moment = |power: i32| values.iter().map(|x| x.powi(power)).sum::<f64>() / 1e5;
            assert!(moment(1).abs() < 0.015, "mean {}", moment(1));
            assert!((moment(2) - 1.0).abs() < 0.03, "variance {}", moment(2));
            assert!(moment(3).abs() < 0.06, "skew {}", moment(3));
            assert!((moment(4) - 3.0).abs() < 0.2, "kurtosis {}", moment(4));
        }
    }

    #[test]
    fn seeds_give_unrelated_values() {
        let correlation: f64 =
            (0..10_000).map(|i| f64::from(normal(1, i)) * f64::from(normal(2, i))).sum::<f64>()
                / 10_000.0;
        assert!(correlation.abs() < 0.05, "{correlation}");
    }
}
