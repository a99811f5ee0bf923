//! How the product of a query and a key becomes the score that enters the softmax.
//!
//! ```text
//! s = scale * (q . k)
//! s = softcap * tanh(s / softcap)       with a softcap
//! s = s - slope * |position - key|      with ALiBi
//! s = function(s, where it stands)      with a function
//! ```
//!
//! A sink is one more score in every row, for which there is no value vector.

use std::hash::{Hash, Hasher};

use kernels::attention::function::{At, Capped, Function, Traced};
use serde::Serialize;

use super::{Pass, Problem, function};

/// The rules that turn the product of a query and a key into a score.
///
/// ```
/// use flashcore::{Alibi, Problem, Scores};
///
/// let scores = Scores::default().with_softcap(30.0).with_alibi(Alibi::PerHead);
/// let problem = Problem::new(1, 8, 512, 64).with_scores(scores);
/// assert_eq!(problem.to_string(), "batch 1, heads 8, length 512, head dim 64, f16, softcap=30, alibi");
/// ```
#[derive(Debug, Clone, Copy, Default, Serialize)]
#[non_exhaustive]
pub struct Scores {
    /// Factor of the scores before the softmax; `1 / sqrt(head_dim)` when `None`.
    pub scale: Option<f32>,
    /// Scaled scores `s` become `softcap * tanh(s / softcap)`.
    pub softcap: Option<f32>,
    /// Whether scores are lowered by a slope times the distance between query and key. The slopes
    /// themselves are among the inputs.
    pub alibi: Alibi,
    /// Whether each query head has a sink: one more score in every row, without a value vector. It
    /// takes its share of the softmax weights and counts in the log-sum-exp, which is the sink
    /// itself in a row that sees no key. The sinks themselves are among the inputs.
    pub sinks: bool,
    /// A function that is applied to scores after all other rules.
    #[serde(serialize_with = "function::as_text", skip_serializing_if = "Option::is_none")]
    pub function: Option<Function>,
}

/// Granularity of the ALiBi slopes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Alibi {
    /// No slopes.
    #[default]
    None,
    /// One slope per query head.
    PerHead,
    /// One slope per sequence and query head.
    PerSequence,
}

/// Why [`Scores`] are invalid.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ScoreError {
    /// The softcap is not a positive finite number.
    #[error("the softcap must be positive and finite, not {0}")]
    Softcap(f32),
}

/// The words of the score rules in a problem's text, for its errors.
pub(super) const SCORE_WORDS: &str = "softcap=, alibi, sinks";

impl Scores {
    const PLAIN: Scores =
        Scores { scale: None, softcap: None, alibi: Alibi::None, sinks: false, function: None };
    const CAPPED: Scores = Scores { softcap: Some(30.0), ..Scores::PLAIN };

    /// Each rule alone, for tests and measurements: a softcap of 30, a slope per head, sinks.
    pub const EACH_RULE: [Scores; 3] = [
        Scores::CAPPED,
        Scores { alibi: Alibi::PerHead, ..Scores::PLAIN },
        Scores { sinks: true, ..Scores::PLAIN },
    ];
    /// All rules together, with a softcap low enough to change most scores.
    pub const EVERY_RULE: Scores =
        Scores { softcap: Some(2.0), alibi: Alibi::PerHead, sinks: true, ..Scores::PLAIN };

    /// Sets the softmax scale.
    pub fn with_scale(self, scale: f32) -> Self {
        Scores { scale: Some(scale), ..self }
    }

    /// Sets the softcap.
    pub fn with_softcap(self, softcap: f32) -> Self {
        Scores { softcap: Some(softcap), ..self }
    }

    /// Sets the granularity of the ALiBi slopes.
    pub fn with_alibi(self, alibi: Alibi) -> Self {
        Scores { alibi, ..self }
    }

    /// Gives each query head a sink.
    pub fn with_sinks(self) -> Self {
        Scores { sinks: true, ..self }
    }

    /// Returns rules that consist of a function of the scaled score and of the query and key
    /// positions, under a name that the caller chooses.
    ///
    /// ```
    /// use flashcore::{Problem, Scores};
    ///
    /// let capped = Scores::from_fn("capped", |score, _| 30.0 * (score / 30.0).tanh());
    /// let problem = Problem::new(1, 8, 512, 64).with_scores(capped);
    /// assert_eq!(problem.text().parse::<Problem>()?, problem);
    /// # Ok::<(), flashcore::ProblemTextError>(())
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if the closure does, or if `name` is not a word of letters, digits, `_`, `-` and `.`.
    #[track_caller]
    pub fn from_fn(
        name: &str,
        score: impl for<'t> FnOnce(Traced<'t, f32>, At<'t>) -> Traced<'t, f32>,
    ) -> Self {
        Scores::PLAIN.with_function(Function::score(name, score))
    }

    /// Sets the function that is applied to scores last.
    pub fn with_function(self, function: Function) -> Self {
        Scores { function: Some(function), ..self }
    }

    /// Tells whether there are ALiBi slopes.
    pub fn has_alibi(&self) -> bool {
        self.alibi != Alibi::None
    }

    /// Tells whether there is any rule besides the scale.
    pub fn has_rules(&self) -> bool {
        Scores { scale: None, ..*self } != Scores::PLAIN
    }

    /// Returns why kernels cannot differentiate these scores, if they cannot.
    pub(crate) fn without_gradients(&self) -> Option<String> {
        let (Some(function), Some(_)) = (self.function, self.softcap) else { return None };
        let name = function.name();
        Some(format!("of capped scores the function {name} has no gradients: cap in it"))
    }

    pub(super) fn validate(&self) -> Result<(), ScoreError> {
        match self.softcap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
            Some(softcap) => Err(ScoreError::Softcap(softcap)),
            None => Ok(()),
        }
    }

    /// Returns the words of a problem's text for the rules that are set.
    pub(super) fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        words.extend(self.scale.map(|scale| format!("scale={scale}")));
        words.extend(self.softcap.map(|softcap| format!("softcap={softcap}")));
        match self.alibi {
            Alibi::None => {}
            Alibi::PerHead => words.push("alibi".to_owned()),
            Alibi::PerSequence => words.push("alibi=sequences".to_owned()),
        }
        words.extend(self.sinks.then(|| "sinks".to_owned()));
        words.extend(self.function.map(|function| format!("score={function}")));
        words
    }

    /// Parses one word of a problem's text. Returns `None` if it does not name a score rule.
    pub(super) fn take(&mut self, name: &str, value: Option<&str>) -> Option<Result<(), ()>> {
        let number = |value: Option<&str>| value.and_then(|it| it.parse::<f32>().ok()).ok_or(());
        match (name, value) {
            ("scale", value) => return Some(number(value).map(|it| self.scale = Some(it))),
            ("softcap", value) => return Some(number(value).map(|it| self.softcap = Some(it))),
            ("alibi", None) => self.alibi = Alibi::PerHead,
            ("alibi", Some("sequences")) => self.alibi = Alibi::PerSequence,
            ("sinks", None) => self.sinks = true,
            _ => return None,
        }
        Some(Ok(()))
    }
}

impl Problem {
    /// Returns the mask kind and the score rules that kernels of this problem are built for.
    pub(crate) fn rules(&self, mask: kernels::attention::MaskKind) -> kernels::attention::Rules {
        kernels::attention::Rules {
            mask,
            softcap: self.scores.softcap.is_some(),
            alibi: self.scores.has_alibi(),
            sinks: self.scores.sinks,
            mask_function: self.mask.function,
            score_function: self.scores.function,
        }
    }

    /// Sets the softcap.
    pub fn with_softcap(self, softcap: f32) -> Self {
        Problem { scores: self.scores.with_softcap(softcap), ..self }
    }

    /// Replaces a softcap at the start of the score function by [`Scores::softcap`], unless a
    /// softcap is set already or there are ALiBi slopes, whose bias is added before the function
    /// but after a named softcap. The backward kernels differentiate either a softcap or a
    /// function, not both, so in the backward pass the whole function must be the softcap.
    pub(super) fn with_caps_by_name(self) -> Problem {
        let function = self.scores.function.filter(|_| self.scores.softcap.is_none());
        let function = function.filter(|_| !self.scores.has_alibi());
        let capped = function.and_then(|function| function.capped());
        let capped = capped.filter(|it| it.rest.is_none() || self.pass == Pass::Forward);
        let Some(Capped { cap, rest }) = capped else { return self };
        let scores = Scores { softcap: Some(cap), function: rest, ..self.scores };
        Problem { scores, ..self }
    }

    /// Gives each query head an ALiBi slope.
    pub fn with_alibi(self) -> Self {
        Problem { scores: self.scores.with_alibi(Alibi::PerHead), ..self }
    }

    /// Gives each query head a sink.
    pub fn with_sinks(self) -> Self {
        Problem { scores: self.scores.with_sinks(), ..self }
    }

    /// Returns the value of a scale parameter of a kernel.
    pub(crate) fn factor(&self, factor: kernels::parameter::Scale) -> f32 {
        use kernels::attention::CapPolynomial;
        use kernels::parameter::Scale;
        let log2e = std::f32::consts::LOG2_E;
        // Scores below the lower bound are zero to an f32 next to 1, and none come near the upper
        // one; but with caps beyond them factors overflow or underflow, or slopes in units of the
        // cap do.
        let cap = self.scores.softcap.unwrap_or(1.0).clamp(1e-15, 1e25);
        let polynomial = || CapPolynomial::new(self.scale(), cap);
        match factor {
            Scale::Log2 => self.scale() * log2e,
            Scale::Inner => self.scale() / cap,
            Scale::Outer => cap * log2e,
            Scale::Natural => self.scale(),
            Scale::CapLinear => polynomial().coefficients[0],
            Scale::CapCubic => polynomial().coefficients[1],
            Scale::CapQuintic => polynomial().coefficients[2],
            Scale::CapSeptic => polynomial().coefficients[3],
            Scale::CapMost => polynomial().most,
        }
    }
}

impl Scores {
    fn bits(&self) -> (Option<u32>, Option<u32>, Alibi, bool, Option<Function>) {
        let Scores { scale, softcap, alibi, sinks, function } = *self;
        (scale.map(f32::to_bits), softcap.map(f32::to_bits), alibi, sinks, function)
    }
}

/// Compares numbers by their bits, so that a problem can be a key of a hash map.
impl PartialEq for Scores {
    fn eq(&self, other: &Self) -> bool {
        self.bits() == other.bits()
    }
}

impl Eq for Scores {}

impl Hash for Scores {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bits().hash(state);
    }
}

/// The score rules of one row (its score function apart), evaluated on the host.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RowScores {
    /// The softcap, if there is one.
    pub(crate) cap: Option<f32>,
    /// The ALiBi slope; zero without ALiBi.
    pub(crate) slope: f32,
    /// Position of the query among the keys; negative for the first queries where there are more
    /// queries than keys.
    pub(crate) position: f32,
}

impl RowScores {
    /// Returns the rules for `query` in a sequence of these lengths, with its head's ALiBi slope.
    pub(crate) fn of(
        problem: &Problem,
        query: usize,
        query_length: usize,
        key_length: usize,
        slope: f32,
    ) -> Self {
        RowScores {
            cap: problem.scores.softcap,
            slope,
            position: (query as i64 + key_length as i64 - query_length as i64) as f32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cap_is_positive_and_finite() {
        let good = Problem::new(1, 8, 16, 64);
        assert_eq!(good.clone().with_softcap(0.5).validate(), Ok(()));
        for bad in [0.0, -1.0, f32::INFINITY, f32::NAN] {
            assert_eq!(
                good.clone().with_softcap(bad).validate().unwrap_err().to_string(),
                format!("the softcap must be positive and finite, not {bad}")
            );
        }
    }

    #[test]
    fn a_scale_is_no_rule() {
        assert!(!Scores::default().with_scale(2.0).has_rules());
        assert!(Scores::EACH_RULE.iter().all(Scores::has_rules));
        assert!(Scores::EVERY_RULE.has_rules());
    }

    /// The factors of any cap, and what kernels make of them, are finite.
    #[test]
    fn factors_of_extreme_caps_are_finite() {
        use kernels::parameter::Scale::{CapLinear, Inner, Outer};
        for cap in [f32::from_bits(1), f32::MIN_POSITIVE, 1e-20, 1e20, 2.5e38, f32::MAX] {
            for scale in [1e-20, 1.0, 1e6] {
                let problem = Problem::new(1, 1, 1, 64).with_softcap(cap).with_scale(scale);
                let [inner, outer, linear] =
                    [Inner, Outer, CapLinear].map(|factor| problem.factor(factor));
                assert!((4.0 * inner).is_finite(), "{cap}, {scale}: {inner}");
                for made in [2.0 * outer, 1e4 / outer, linear] {
                    assert!(made.is_normal(), "{cap}, {scale}: {made}");
                }
            }
        }
    }

    #[test]
    fn caps_in_functions_are_caps_by_name() {
        let capped = Scores::from_fn("capped", |score, _| 30.0 * (score / 30.0).tanh());
        let problem = Problem::new(1, 2, 16, 64);
        let by_function = problem.clone().with_scores(capped);
        let by_name = problem.clone().with_scores(Scores::default().with_softcap(30.0));
        assert_eq!(by_function.with_rules_by_name(), by_name);
        assert_eq!(by_function.backward().with_rules_by_name(), by_name.backward());
        let moved = Function::score("moved", |score, at| score + at.key().to_f32());
        let moved = capped.function.unwrap().then(moved).unwrap();
        let moved = problem.clone().with_scores(Scores::default().with_function(moved));
        assert_eq!(moved.with_rules_by_name().scores.softcap, Some(30.0));
        for other in [
            moved.backward(),
            problem.clone().with_scores(capped.with_softcap(5.0)),
            // The function caps scores with their ALiBi bias; a named softcap comes before the bias.
            problem.with_scores(capped.with_alibi(Alibi::PerHead)),
        ] {
            assert_eq!(other.with_rules_by_name(), other);
        }
    }
}
