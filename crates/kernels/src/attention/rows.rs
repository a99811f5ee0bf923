//! The end of a row: the factor of its output, and its log-sum-exp.
//!
//! The softmax leaves a row with the sum of `2^(score - reference)` over the keys that it saw,
//! scores in units of log2. A row that saw no key has an output of zero and a log-sum-exp of minus
//! infinity, or that of its sink where it has one.

use std::f32::consts::{LN_2, LOG2_E};

use ptx::{Builder, Expression, F32, GlobalAddress, Reg, Select, U32, U64};

use crate::parameter::List;

/// The reference of a row that has seen no key. It is finite, because minus infinity minus itself
/// is NaN.
pub(crate) const NOTHING_SEEN: f32 = -1e30;

/// The same for capped scores before their last factor, a hyperbolic tangent less the bias of ALiBi.
/// Times the largest factor there is, 1e25 log2(e), it is finite.
pub(crate) const NOTHING_SEEN_CAPPED: f32 = -1e13;

/// A score function hides a key by a score below this, in natural units. Some add -1e9 or less, where
/// exponents, which multiply and add in one rounding, are off by up to 64: the weights of a block that
/// only has such keys could be infinite, and so could those that the backward pass takes of a row's
/// log-sum-exp. As the least reference of a row it gives them weights of zero.
pub const LEAST_SCORE: f32 = -33_554_432.0;

/// The value that a row's exponentials are relative to.
#[derive(Clone, Copy)]
pub(crate) enum Reference {
    /// A value in units of unscaled scores, never infinite: that of the guarded softmax.
    Guarded { reference: Reg<F32>, scale_log2: Reg<F32> },
    /// The exact maximum in units of log2: minus infinity where no key was seen.
    Maximum(Reg<F32>),
    /// A natural logarithm, never infinite: that of combined partial results.
    Natural(Reg<F32>),
}

/// The results of a row after all its keys.
pub(crate) struct Finished {
    /// Factor of the unnormalised output.
    pub(crate) factor: Reg<F32>,
    /// Log-sum-exp of the row, a natural logarithm.
    pub(crate) log_sum: Reg<F32>,
}

/// Returns what to subtract from scores: the maximum, or 0 where it is minus infinity.
pub(crate) fn reference(k: &mut Builder, maximum: Reg<F32>) -> Reg<F32> {
    k.eval(maximum.equals(f32::NEG_INFINITY).select::<F32>(0.0, maximum))
}

/// Finishes a row. A sink, a logit in units of log2, is added to the sum and not to the output.
pub(crate) fn finish(
    k: &mut Builder,
    reference: Reference,
    sum: Reg<F32>,
    sink: Option<Reg<F32>>,
) -> Finished {
    if let Some(sink) = sink {
        return finish_with_sink(k, reference, sum, sink);
    }
    let empty = k.eval(sum.equals(0.0));
    let reciprocal = k.reciprocal(sum);
    let factor = k.eval(empty.select::<F32>(0.0, reciprocal));
    let log2 = k.log2(sum);
    let natural = match reference {
        Reference::Guarded { reference, scale_log2 } => {
            let total = k.fma(reference, scale_log2, log2);
            k.eval(total * LN_2)
        }
        Reference::Maximum(maximum) => k.eval((maximum + log2) * LN_2),
        Reference::Natural(reference) => k.fma(log2, LN_2, reference),
    };
    Finished { factor, log_sum: k.eval(empty.select::<F32>(f32::NEG_INFINITY, natural)) }
}

/// Finishes a row with a sink, which may be far above or far below the row's reference.
fn finish_with_sink(
    k: &mut Builder,
    reference: Reference,
    sum: Reg<F32>,
    sink: Reg<F32>,
) -> Finished {
    let (from, top, measured) = match reference {
        Reference::Guarded { reference, scale_log2 } => {
            let from = k.eval(reference * scale_log2);
            let top = k.eval(from.maximum(sink));
            (from, top, top)
        }
        Reference::Maximum(from) => {
            let top = k.eval(from.maximum(sink));
            (from, top, self::reference(k, top))
        }
        Reference::Natural(reference) => {
            let from = k.eval(reference * LOG2_E);
            let top = k.eval(from.maximum(sink));
            (from, top, top)
        }
    };
    let lowered = k.exp2(from - measured);
    let beside = k.exp2(sink - measured);
    let total = k.fma(sum, lowered, beside);
    let empty = k.eval(total.equals(0.0));
    let reciprocal = k.reciprocal(total);
    let factor = k.eval(empty.select::<F32>(0.0, lowered * reciprocal));
    let log2 = k.log2(total);
    let natural = k.eval((top + log2) * LN_2);
    Finished { factor, log_sum: k.eval(empty.select::<F32>(f32::NEG_INFINITY, natural)) }
}

/// The attention sinks, one for each query head.
#[derive(Clone, Copy)]
pub(crate) struct Sinks {
    address: Reg<GlobalAddress>,
}

impl Sinks {
    pub(crate) fn parameters(k: &mut Builder) -> Self {
        Sinks { address: List::Sinks.address(k) }
    }

    /// Loads the sink of a head, in units of log2.
    pub(crate) fn of(&self, k: &mut Builder, head: Reg<U32>) -> Reg<F32> {
        let sink = k.load::<F32, _>(self.address + head.convert::<U64>() * 4);
        k.eval(sink * LOG2_E)
    }
}
