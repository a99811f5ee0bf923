//! Problems as short texts: `b=1,h=16,s=4096,d=128,bf16,causal`.

use std::str::FromStr;

use super::{Mask, Problem};
use crate::dtype::DType;

/// Why a text is no [`Problem`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{reason}; a problem is written like b=1,h=16,hk=4,s=4096,sk=8192,d=128,dv=64,bf16,causal,scale=0.1; \
     there are window=LEFT:RIGHT, softcap=, alibi and sinks too"
)]
pub struct ProblemTextError {
    reason: String,
}

/// Sizes that a text may give, under their short and their long names.
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

    /// Words between commas, in any order: sizes with their short or long names (`b` or `batch`,
    /// `h` or `heads`, `hk` or `kv_heads`, `s` or `seq`, `sk` or `kv_seq`, `d` or `head_dim`, `dv`
    /// or `value_head_dim`), `scale=`, `softcap=`, an element type, `causal` or `window=4096:0` (a
    /// side left out is open), `alibi`, `sinks`.
    ///
    /// What is left out is as for `flashcore attend`: one sequence of 1024, 8 heads of dim 128,
    /// bf16, keys and values like the queries, no mask.
    ///
    /// ```
    /// use flashcore::{Mask, Problem};
    ///
    /// let problem: Problem = "b=2,h=16,hk=4,s=4096,d=64,f16,causal".parse()?;
    /// assert_eq!((problem.kv_heads, problem.value_head_dim), (4, 64));
    /// assert_eq!(problem.mask, Mask::Causal);
    /// # Ok::<(), flashcore::ProblemTextError>(())
    /// ```
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = |reason: String| ProblemTextError { reason };
        let mut sizes = [None; SIZES.len()];
        let (mut dtype, mut mask) = (DType::BF16, Mask::None);
        let (mut scale, mut softcap, mut alibi, mut sinks) = (None, None, false, false);
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            let Some((name, value)) = word.split_once('=') else {
                match (word, word.parse()) {
                    ("causal", _) => mask = Mask::Causal,
                    ("alibi", _) => alibi = true,
                    ("sinks", _) => sinks = true,
                    (_, Ok(found)) => dtype = found,
                    _ => return Err(wrong(format!("`{word}` means nothing"))),
                }
                continue;
            };
            let value = value.trim();
            let no_number = || wrong(format!("`{value}` is no number for `{name}`"));
            match name {
                "scale" => scale = Some(value.parse().map_err(|_| no_number())?),
                "softcap" => softcap = Some(value.parse().map_err(|_| no_number())?),
                "window" => {
                    let side = |text: &str| match text.trim() {
                        "" => Ok(None),
                        text => text.parse().map(Some).map_err(|_| no_number()),
                    };
                    let (left, right) = value.split_once(':').ok_or_else(no_number)?;
                    mask = Mask::window(side(left)?, side(right)?);
                }
                _ => {}
            }
            if ["scale", "softcap", "window"].contains(&name) {
                continue;
            }
            let known = SIZES.iter().position(|(short, long)| [*short, *long].contains(&name));
            let index = known.ok_or_else(|| wrong(format!("there is no size `{name}`")))?;
            sizes[index] = Some(value.parse().map_err(|_| no_number())?);
        }
        let [batch, heads, kv_heads, length, key_length, dim, value_dim] = sizes;
        let (heads, length) = (heads.unwrap_or(8), length.unwrap_or(1024));
        let dim = dim.unwrap_or(128);
        let problem = Problem::new(batch.unwrap_or(1), heads, length, dim)
            .with_kv_heads(kv_heads.unwrap_or(heads))
            .with_key_length(key_length.unwrap_or(length))
            .with_value_head_dim(value_dim.unwrap_or(dim))
            .with_dtype(dtype)
            .with_mask(mask);
        let problem = Problem { softmax_scale: scale, softcap, alibi, sinks, ..problem };
        problem.validate().map_err(|error| wrong(error.to_string()))?;
        Ok(problem)
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
            "batch 1, heads 6/2, length 1024, head dim 192/128, bf16, scale 0.5"
        );
        assert_eq!(
            parse("window=4096:0,softcap=30,sinks,alibi").unwrap(),
            "batch 1, heads 8, length 1024, head dim 128, bf16, window 4096:0, softcap 30, alibi, \
             sinks"
        );
        assert_eq!(parse("window=:0").unwrap(), parse("causal").unwrap());
    }

    #[test]
    fn what_means_nothing_is_named() {
        let refusal = |text: &str| text.parse::<Problem>().unwrap_err().to_string();
        assert!(refusal("b=1,bf17").starts_with("`bf17` means nothing; a problem is written like"));
        assert!(refusal("x=1").starts_with("there is no size `x`"));
        assert!(refusal("s=-1").starts_with("`-1` is no number for `s`"));
        assert!(refusal("scale=big").starts_with("`big` is no number for `scale`"));
        assert!(refusal("h=8,hk=3").starts_with("8 query heads cannot be divided among 3"));
    }
}
