//! Problems as short texts: `b=1,h=16,s=4096,d=128,bf16,causal`.

use std::str::FromStr;

use kernels::attention::function::Function;

use super::scores::SCORE_WORDS;
use super::{DTypes, Descales, Lists, Mask, Pass, Problem, Scores, Storage};
use crate::dtype::DType;

/// Why a text does not describe a valid [`Problem`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{reason}; a problem is written like b=1,h=16,hk=4,s=4096,sk=8192,d=128,dv=64,bf16,causal,scale=0.1; \
     there are window=LEFT:RIGHT, chunk=, {SCORE_WORDS}, queries=packed:ROWS, \
     keys=packed:ROWS, keys=entries:COUNT, keys=pages:SIZE:COLUMNS:PAGES, query_lengths, \
     key_lengths, left_padding, batch_index, q_descale=head, k_descale=, v_descale=head or token, \
     mask=(mask ...), score=(score ...), batch_invariant, backward, lse_gradient and deterministic \
     too"
)]
pub struct ProblemTextError {
    reason: String,
}

/// Sizes that a text may give, with their short and long names.
const SIZES: [(&str, &str); 7] = [
    ("b", "batch"),
    ("h", "heads"),
    ("hk", "kv_heads"),
    ("s", "seq"),
    ("sk", "kv_seq"),
    ("d", "head_dim"),
    ("dv", "value_head_dim"),
];

impl FromStr for Problem {
    type Err = ProblemTextError;

    /// Parses words between commas, in any order:
    ///
    /// - sizes with their short or long names: `b` or `batch`, `h` or `heads`, `hk` or `kv_heads`,
    ///   `s` or `seq`, `sk` or `kv_seq`, `d` or `head_dim`, `dv` or `value_head_dim`
    /// - an element type, or `q=`, `k=`, `v=`, `o=` for a single tensor; the output of 8-bit inputs
    ///   is bf16
    /// - descale factors of 8-bit tensors: `q_descale=head`, `k_descale=token`
    /// - the mask: `causal`, `window=4096:0` (an omitted side is unbounded), `chunk=8192`
    /// - the rules of [`Scores`] by the names of their fields
    /// - `mask=` and `score=` with the text of a [`Function`]
    /// - storage: `queries=packed:ROWS`, `keys=packed:ROWS`, `keys=entries:COUNT`,
    ///   `keys=pages:SIZE:COLUMNS:PAGES`, with the names of [`Lists`]
    /// - `backward` for gradients, with `lse_gradient` where the log-sum-exp has one too, and
    ///   `deterministic` for the same bits from run to run
    /// - `batch_invariant` for outputs whose bits do not depend on the batch
    ///
    /// Defaults are those of `flashcore attend`: one sequence of 1024, 8 heads of dim 128, bf16,
    /// keys and values like the queries, no mask.
    ///
    /// ```
    /// use flashcore::{Mask, Problem};
    ///
    /// let problem: Problem = "b=2,h=16,hk=4,s=4096,d=64,f16,causal".parse()?;
    /// assert_eq!((problem.kv_heads, problem.value_head_dim), (4, 64));
    /// assert_eq!(problem.mask, Mask::CAUSAL);
    /// # Ok::<(), flashcore::ProblemTextError>(())
    /// ```
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = |reason: String| ProblemTextError { reason };
        let mut sizes = [None; SIZES.len()];
        // Words that meet others are put together at the end, so that their order means nothing.
        let (mut dtype_of_all, mut dtype_of_each) = (DType::BF16, [None; 4]);
        let mut causal = false;
        let mut descales = Descales::NONE;
        let (mut mask, mut scores) = (Mask::NONE, Scores::default());
        let (mut queries, mut keys, mut lists) =
            (Storage::Padded, Storage::Padded, Lists::default());
        let (mut pass, mut lse_gradient) = (Pass::Forward, false);
        let (mut deterministic, mut batch_invariant) = (false, false);
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name.trim(), Some(value.trim())),
                None => (word, None),
            };
            let means_nothing = || wrong(format!("`{word}` means nothing"));
            let no_number = || {
                let value = value.unwrap_or_default();
                wrong(format!("`{value}` is no number for `{name}`"))
            };
            if let Some(taken) = scores.take(name, value) {
                taken.map_err(|()| no_number())?;
                continue;
            }
            let Some(value) = value else {
                match word.parse() {
                    Ok(dtype) => dtype_of_all = dtype,
                    Err(_) if word == "causal" => causal = true,
                    Err(_) if word == "backward" => pass = Pass::Backward,
                    Err(_) if word == "lse_gradient" => lse_gradient = true,
                    Err(_) if word == "deterministic" => deterministic = true,
                    Err(_) if word == "batch_invariant" => batch_invariant = true,
                    Err(_) if lists.insert(word) => {}
                    Err(_) => return Err(means_nothing()),
                }
                continue;
            };
            if let Some(taken) = descales.take(name, value) {
                taken.map_err(|()| means_nothing())?;
                continue;
            }
            let function = || value.parse::<Function>().map_err(|error| wrong(error.to_string()));
            let storage = || value.parse::<Storage>().map_err(|()| means_nothing());
            let dtype = || value.parse::<DType>().map_err(|_| means_nothing());
            match name {
                "window" => {
                    let side = |text: &str| match text.trim() {
                        "" => Ok(None),
                        text => text.parse().map(Some).map_err(|_| no_number()),
                    };
                    let (left, right) = value.split_once(':').ok_or_else(no_number)?;
                    (mask.left, mask.right) = (side(left)?, side(right)?);
                }
                "chunk" => mask = mask.with_chunk(value.parse().map_err(|_| no_number())?),
                "mask" => mask.function = Some(function()?),
                "score" => scores.function = Some(function()?),
                "queries" => queries = storage()?,
                "keys" => keys = storage()?,
                "q" => dtype_of_each[0] = Some(dtype()?),
                "k" => dtype_of_each[1] = Some(dtype()?),
                "v" => dtype_of_each[2] = Some(dtype()?),
                "o" => dtype_of_each[3] = Some(dtype()?),
                _ => {
                    let known = |(short, long): &(&str, &str)| [*short, *long].contains(&name);
                    let index = SIZES.iter().position(known);
                    let index = index.ok_or_else(|| wrong(format!("there is no size `{name}`")))?;
                    sizes[index] = Some(value.parse().map_err(|_| no_number())?);
                }
            }
        }
        if causal {
            // As in FlashAttention: a causal window ends at the query.
            mask.right = Some(0);
        }
        let all = DTypes::inputs(dtype_of_all);
        let [query, key, value, output] = dtype_of_each;
        let dtypes = DTypes {
            query: query.unwrap_or(all.query),
            key: key.unwrap_or(all.key),
            value: value.unwrap_or(all.value),
            output: output.unwrap_or(all.output),
        };
        let [batch, heads, kv_heads, length, key_length, dim, value_dim] = sizes;
        let (heads, length) = (heads.unwrap_or(8), length.unwrap_or(1024));
        let dim = dim.unwrap_or(128);
        let problem = Problem::new(batch.unwrap_or(1), heads, length, dim)
            .with_kv_heads(kv_heads.unwrap_or(heads))
            .with_key_length(key_length.unwrap_or(length))
            .with_value_head_dim(value_dim.unwrap_or(dim))
            .with_mask(mask)
            .with_scores(scores)
            .with_storage(queries, keys)
            .with_lists(lists);
        let problem = Problem { dtypes, descales, pass, lse_gradient, ..problem };
        let problem = Problem { deterministic, batch_invariant, ..problem };
        problem.validate().map_err(|error| wrong(error.to_string()))?;
        Ok(problem)
    }
}

impl Problem {
    /// Writes the problem as a text that parses to the same problem.
    ///
    /// ```
    /// use flashcore::Problem;
    ///
    /// let text = "b=2,h=16,hk=4,s=4096,d=64,f16,window=128:0,chunk=256,sinks,queries=packed:8192";
    /// assert_eq!(text.parse::<Problem>()?.text(), text);
    /// # Ok::<(), flashcore::ProblemTextError>(())
    /// ```
    pub fn text(&self) -> String {
        let sizes = [
            ("b", self.batch, None),
            ("h", self.query_heads, None),
            ("hk", self.kv_heads, Some(self.query_heads)),
            ("s", self.query_length, None),
            ("sk", self.key_length, Some(self.query_length)),
            ("d", self.head_dim, None),
            ("dv", self.value_head_dim, Some(self.head_dim)),
        ];
        let mut words: Vec<String> = sizes
            .into_iter()
            .filter(|(_, size, default)| Some(*size) != *default)
            .map(|(name, size, _)| format!("{name}={size}"))
            .collect();
        words.push(self.dtypes.to_string());
        if self.mask != Mask::NONE {
            words.push(self.mask.to_string());
        }
        words.extend(self.words());
        words.join(",")
    }

    /// Returns the words for whatever else differs from the defaults.
    pub(super) fn words(&self) -> Vec<String> {
        let flags = [
            ("backward", self.pass == Pass::Backward),
            ("lse_gradient", self.lse_gradient),
            ("deterministic", self.deterministic),
            ("batch_invariant", self.batch_invariant),
        ];
        let flags = flags.into_iter().filter(|(_, on)| *on).map(|(name, _)| name.to_owned());
        let mut words = [self.descales.words(), self.scores.words(), self.storage_words()].concat();
        words.extend(flags);
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_in_any_order_and_may_be_left_out() {
        let parse = |text: &str| text.parse::<Problem>().map(|problem| problem.to_string());
        assert_eq!(
            parse("causal, f16, d=64, sk=7, b=3").unwrap(),
            "batch 3, heads 8, length 1024x7, head dim 64, f16, causal"
        );
        assert_eq!(parse("").unwrap(), "batch 1, heads 8, length 1024, head dim 128, bf16");
        assert_eq!(
            parse("heads=6,kv_heads=2,head_dim=192,value_head_dim=128,scale=0.5").unwrap(),
            "batch 1, heads 6/2, length 1024, head dim 192/128, bf16, scale=0.5"
        );
        assert_eq!(
            parse("window=4096:0,scale=2,sinks,alibi").unwrap(),
            "batch 1, heads 8, length 1024, head dim 128, bf16, window=4096:0, scale=2, \
             alibi, sinks"
        );
        assert_eq!(parse("window=:0").unwrap(), parse("causal").unwrap());
        let text = "b=1,h=8,s=64,d=64,f16,backward,lse_gradient,deterministic";
        let problem: Problem = text.parse().unwrap();
        let expected = Problem::new(1, 8, 64, 64).backward().with_lse_gradient();
        assert_eq!(problem, expected.deterministic());
        assert_eq!(problem.text(), text);
        assert!(problem.to_string().ends_with("f16, backward, lse_gradient, deterministic"));
        let text = "b=1,h=8,s=64,d=64,f16,batch_invariant";
        let problem: Problem = text.parse().unwrap();
        assert_eq!(problem, Problem::new(1, 8, 64, 64).batch_invariant());
        assert_eq!(problem.text(), text);
        assert!(problem.to_string().ends_with("f16, batch_invariant"));
    }

    #[test]
    fn tensors_have_element_types_and_descale_factors_of_their_own() {
        let text =
            "b=1,h=8,s=1,sk=64,d=64,q=bf16,k=int8,v=e5m2,o=bf16,k_descale=token,v_descale=head";
        let problem: Problem = text.parse().unwrap();
        assert_eq!(problem.text(), text);
        let DTypes { query, key, value, output } = problem.dtypes;
        assert_eq!([query, key, value, output].map(DType::bytes), [2, 1, 1, 2]);
        let eight: Problem = "e4m3,q_descale=head".parse().unwrap();
        assert_eq!(eight.dtypes.output, DType::BF16);
        assert_eq!(eight.text().parse(), Ok(eight));
    }

    #[test]
    fn words_that_meet_come_in_any_order_too() {
        let parse = |text: &str| text.parse::<Problem>().unwrap();
        for (one, other, means) in [
            ("k=int8,v=e4m3,f16", "f16,v=e4m3,k=int8", "q=f16,k=int8,v=e4m3,o=f16"),
            ("o=f32,e4m3", "e4m3,o=f32", "q=e4m3,k=e4m3,v=e4m3,o=f32"),
            ("causal,window=128:", "window=128:,causal", "bf16,window=128:0"),
            ("causal,window=:7", "window=:7,causal", "bf16,causal"),
            ("causal,chunk=64", "chunk=64,causal", "bf16,causal,chunk=64"),
        ] {
            assert_eq!(parse(one), parse(other), "{one}");
            let text = parse(one).text();
            assert!(text.ends_with(&format!("d=128,{means}")), "{one}: {text}");
        }
    }

    #[test]
    fn what_means_nothing_is_named() {
        let refusal = |text: &str| text.parse::<Problem>().unwrap_err().to_string();
        assert!(refusal("b=1,bf17").starts_with("`bf17` means nothing; a problem is written like"));
        assert!(refusal("x=1").starts_with("there is no size `x`"));
        assert!(refusal("s=-1").starts_with("`-1` is no number for `s`"));
        assert!(refusal("scale=big").starts_with("`big` is no number for `scale`"));
        assert!(refusal("lse_gradient").starts_with("lse_gradient is said of gradients"));
        assert!(refusal("deterministic").starts_with("deterministic is said of gradients"));
        let refused = refusal("batch_invariant,backward");
        assert!(refused.starts_with("batch_invariant is said of outputs alone"), "{refused}");
        assert!(refusal("k_descale=row").starts_with("`k_descale=row` means nothing"));
        assert!(refusal("h=8,hk=3").starts_with("8 query heads cannot be divided among 3"));
    }
}
