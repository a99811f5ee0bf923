//! What a finished row comes to: the factor of its output, and its log-sum-exp.
//!
//! A row leaves its softmax with the sum of `2^(score - reference)` over the keys it saw, scores
//! in units of log2. One that saw no key is zero with log-sum-exp minus infinity, or its sink
//! where it has one.

use std::f32::consts::{LN_2, LOG2_E};

use ptx::{Builder, Choose, Expression, F32, GlobalAddress, Reg, U32, U64};

use crate::parameter::List;

/// A reference that is finite where a row has seen nothing: minus infinity
/// minus itself would not be a number.
pub(crate) const NOTHING_SEEN: f32 = -1e30;

/// What a row's exponentials were taken relative to.
#[derive(Clone, Copy)]
pub(crate) enum Reference {
    /// A number before the scale, never infinite: the guarded softmax's.
    Guarded { reference: Reg<F32>, scale_log2: Reg<F32> },
    /// The exact maximum in units of log2: minus infinity where nothing was seen.
    Maximum(Reg<F32>),
    /// A natural logarithm, never infinite: of sums that were put together.
    Natural(Reg<F32>),
}

/// A row when all its keys are done.
pub(crate) struct Finished {
    /// What its output is multiplied with.
    pub(crate) factor: Reg<F32>,
    /// The natural logarithm of its sum of exponentials.
    pub(crate) log_sum: Reg<F32>,
}

/// What there is to subtract from scores where the maximum is minus infinity.
pub(crate) fn reference(k: &mut Builder, maximum: Reg<F32>) -> Reg<F32> {
    k.eval(maximum.equals(f32::NEG_INFINITY).choose::<F32>(0.0, maximum))
}

/// Ends a row. A sink, in units of log2, takes its part of the sum and adds nothing to the output.
pub(crate) fn finish(
    k: &mut Builder,
    reference: Reference,
    sum: Reg<F32>,
    sink: Option<Reg<F32>>,
) -> Finished {
    if let Some(sink) = sink {
        return finish_beside(k, reference, sum, sink);
    }
    let empty = k.eval(sum.equals(0.0));
    let reciprocal = k.reciprocal(sum);
    let factor = k.eval(empty.choose::<F32>(0.0, reciprocal));
    let log2 = k.log2(sum);
    let natural = match reference {
        Reference::Guarded { reference, scale_log2 } => {
            let total = k.fma(reference, scale_log2, log2);
            k.eval(total * LN_2)
        }
        Reference::Maximum(maximum) => k.eval((maximum + log2) * LN_2),
        Reference::Natural(reference) => k.fma(log2, LN_2, reference),
    };
    Finished { factor, log_sum: k.eval(empty.choose::<F32>(f32::NEG_INFINITY, natural)) }
}

/// The same with a sink, which may be far above the row's reference or far below.
fn finish_beside(k: &mut Builder, reference: Reference, sum: Reg<F32>, sink: Reg<F32>) -> Finished {
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
    let factor = k.eval(empty.choose::<F32>(0.0, lowered * reciprocal));
    let log2 = k.log2(total);
    let natural = k.eval((top + log2) * LN_2);
    Finished { factor, log_sum: k.eval(empty.choose::<F32>(f32::NEG_INFINITY, natural)) }
}

/// The sinks of query heads.
#[derive(Clone, Copy)]
pub(crate) struct Sinks {
    address: Reg<GlobalAddress>,
}

impl Sinks {
    pub(crate) fn parameters(k: &mut Builder) -> Self {
        Sinks { address: List::Sinks.address(k) }
    }

    /// A head's, in units of log2.
    pub(crate) fn of(&self, k: &mut Builder, head: Reg<U32>) -> Reg<F32> {
        let sink = k.load::<F32, _>(self.address + head.convert::<U64>() * 4);
        k.eval(sink * LOG2_E)
    }
}
