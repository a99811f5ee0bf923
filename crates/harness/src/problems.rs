//! Sets of problems: by name, or a file with one problem on each line.

use std::path::Path;

use flashcore::{DType, Descale, Descales, Lists, Mask, Problem, Scores, Storage};

use crate::Error;

/// Problems that are measured together.
#[derive(Debug, Clone, PartialEq)]
pub struct ProblemSet {
    /// Its name, or the file it came from.
    pub name: String,
    /// The problems, in the order in which they are shown.
    pub problems: Vec<Problem>,
}

/// The named sets and what they are.
pub const NAMED: [(&str, &str); 16] = [
    ("paper", "head dims 64, 128, 256, dense and causal, 512 to 16k: 16,384 tokens of 2048"),
    ("fp8", "the problems of `paper` in e4m3, bf16 out"),
    ("grouped", "64 query and 8 key heads of 128, one sequence of 16k and 32k"),
    ("small", "a few heads and short sequences, where a launch is all there is"),
    ("llama", "prompts of Llama 3: 8B and 70B heads, 2k to 32k, causal"),
    ("gpt-oss", "prompts of gpt-oss: 64 query and 8 key heads of 64, 2k to 32k, causal"),
    (
        "decode",
        "one query, 8 key heads of 128, batch 1 to 128, 4k to 128k keys: memory is the limit",
    ),
    ("batches", "one query over 8k keys, 32 heads over 8 of 128: batch 1 to 128"),
    (
        "decode-fp8",
        "`decode` in bf16, and over caches in e4m3 with scales of heads and of tokens and in int8 with those",
    ),
    (
        "prefill",
        "32k tokens of 16 heads of 128, causal: 64 packed sequences, one, and one with a window",
    ),
    (
        "ragged",
        "32k tokens in 64 packed sequences, causal: 16 heads of 128, 8 key heads, heads of 64",
    ),
    ("serving", "ragged batches over caches in shuffled pages of 16: decode, drafts, a chunk"),
    ("rules", "16 heads of 128, 8k: a window, chunks, capped scores, slopes, sinks"),
    ("diffusion", "image transformers: 24 heads of 128 and 64, 1k to 4k positions, dense"),
    ("quick", "one length of each head dim and mask of `paper`"),
    (
        "scale",
        "both passes of what `flashcore scale` predicts from, and of what it is checked with",
    ),
];

impl ProblemSet {
    /// The set of this name; else the file of this name.
    pub fn find(name: &str) -> Result<Self, Error> {
        if let Some(problems) = named(name) {
            return Ok(ProblemSet { name: name.to_owned(), problems });
        }
        let path = Path::new(name);
        if !path.exists() {
            let names = NAMED.map(|(name, _)| name).join(", ");
            return Err(Error::Impossible(format!(
                "there is neither a set nor a file `{name}`; sets are {names}"
            )));
        }
        let text =
            std::fs::read_to_string(path).map_err(Error::io(format!("cannot read {name}")))?;
        let mut problems = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            problems.push(line.parse::<Problem>().map_err(|error| Error::Malformed {
                what: format!("{name}, line {}", number + 1),
                reason: error.to_string(),
            })?);
        }
        if problems.is_empty() {
            let reason = "it has no problems, one on each line".to_owned();
            return Err(Error::Malformed { what: name.to_owned(), reason });
        }
        Ok(ProblemSet { name: name.to_owned(), problems })
    }
}

fn named(name: &str) -> Option<Vec<Problem>> {
    const MASKS: [Mask; 2] = [Mask::NONE, Mask::CAUSAL];
    let new =
        |batch, heads, length, dim| Problem::new(batch, heads, length, dim).with_dtype(DType::BF16);
    let paper = |lengths: &[usize]| {
        let mut problems = Vec::new();
        for dim in [64, 128, 256] {
            for mask in MASKS {
                for length in lengths {
                    problems.push(new(16_384 / length, 2048 / dim, *length, dim).with_mask(mask));
                }
            }
        }
        problems
    };
    let causal = |shapes: &[(usize, usize, usize)], lengths: &[usize]| {
        let mut problems = Vec::new();
        for (heads, kv_heads, dim) in shapes {
            for length in lengths {
                let problem = new(1, *heads, *length, *dim).with_kv_heads(*kv_heads);
                problems.push(problem.with_mask(Mask::CAUSAL));
            }
        }
        problems
    };
    const LONG: [usize; 3] = [2048, 8192, 32_768];
    Some(match name {
        "paper" => paper(&[512, 1024, 2048, 4096, 8192, 16_384]),
        "quick" => paper(&[4096]),
        "fp8" => {
            let problems = paper(&[512, 1024, 2048, 4096, 8192, 16_384]);
            problems.into_iter().map(|it| it.with_dtype(DType::E4M3)).collect()
        }
        "grouped" => [16_384, 32_768]
            .into_iter()
            .flat_map(|length| {
                MASKS.map(|mask| new(1, 64, length, 128).with_kv_heads(8).with_mask(mask))
            })
            .collect(),
        "small" => [(1, 8, 512, 64), (1, 8, 1024, 64), (1, 32, 512, 128), (4, 16, 2048, 64)]
            .map(|(batch, heads, length, dim)| new(batch, heads, length, dim))
            .to_vec(),
        "llama" => causal(&[(32, 8, 128), (64, 8, 128)], &LONG),
        "gpt-oss" => causal(&[(64, 8, 64)], &LONG),
        "decode" => {
            [(1, 32, 8192), (1, 64, 131_072), (16, 32, 8192), (64, 64, 8192), (128, 32, 4096)]
                .map(|(batch, heads, keys)| {
                    new(batch, heads, 1, 128).with_kv_heads(8).with_key_length(keys)
                })
                .to_vec()
        }
        "batches" => [1, 2, 4, 8, 16, 32, 64, 128]
            .map(|batch| new(batch, 32, 1, 128).with_kv_heads(8).with_key_length(8192))
            .to_vec(),
        "decode-fp8" => {
            let caches = [
                (DType::E4M3, Descale::PerHead),
                (DType::E4M3, Descale::PerToken),
                (DType::Int8, Descale::PerToken),
            ];
            let each = |problem: Problem| {
                let [heads, tokens, integers] = caches.map(|(dtype, descale)| {
                    let narrow = problem.clone().with_kv_dtype(dtype);
                    narrow.with_descales(Descales::of_cache(descale))
                });
                [problem, heads, tokens, integers]
            };
            named("decode")?.into_iter().flat_map(each).collect()
        }
        "prefill" => {
            let (tokens, packed) = (new(1, 16, 32_768, 128), Storage::Packed(32_768));
            let sequences = new(64, 16, 4096, 128).with_storage(packed, packed);
            vec![
                sequences.with_mask(Mask::CAUSAL),
                tokens.clone().with_mask(Mask::CAUSAL),
                tokens.with_mask(Mask::window(Some(4096), Some(0))),
            ]
        }
        "ragged" => {
            let packed = Storage::Packed(32_768);
            let sequences = |heads, kv_heads, dim| {
                let problem = new(64, heads, 4096, dim).with_kv_heads(kv_heads);
                problem.with_storage(packed, packed).with_mask(Mask::CAUSAL)
            };
            vec![sequences(16, 16, 128), sequences(32, 8, 128), sequences(32, 32, 64)]
        }
        "serving" => {
            let pages = |size: usize, batch: usize, keys: usize| {
                let columns = keys.div_ceil(size);
                Storage::Paged { size, columns, pages: batch * columns }
            };
            let lists = Lists { key_lengths: true, ..Lists::default() };
            let cache = |batch, queries, keys| {
                let problem = new(batch, 32, queries, 128).with_kv_heads(8).with_key_length(keys);
                let problem = problem.with_mask(Mask::CAUSAL).with_lists(lists);
                problem.with_storage(Storage::Padded, pages(16, batch, keys))
            };
            let mut chunk = cache(8, 512, 8192);
            chunk.queries = Storage::Packed(2048);
            vec![cache(16, 1, 8192), cache(128, 1, 4096), cache(16, 4, 8192), chunk]
        }
        "rules" => {
            let tokens = new(1, 16, 8192, 128).with_mask(Mask::CAUSAL);
            let masks = [Mask::window(Some(1024), Some(0)), Mask::CAUSAL.with_chunk(2048)];
            let masked = masks.map(|mask| tokens.clone().with_mask(mask));
            let ruled = Scores::EACH_RULE.map(|scores| tokens.clone().with_scores(scores));
            masked.into_iter().chain(ruled).collect()
        }
        "diffusion" => [(24, 128), (24, 64)]
            .into_iter()
            .flat_map(|(heads, dim)| [1024, 4096].map(|length| new(2, heads, length, dim)))
            .chain([new(1, 24, 4608, 128)])
            .collect(),
        "scale" => scale(),
        _ => return None,
    })
}

/// First the curves: what the smallest call takes, then hidden size 2048, every head dim and mask, two lengths
/// to a power of two. Then what lies beside them: grouped heads, few heads, and as many keys as a step of
/// a ring has.
fn scale() -> Vec<Problem> {
    let new =
        |batch, heads, length, dim| Problem::new(batch, heads, length, dim).with_dtype(DType::BF16);
    let alone = |heads, kv_heads, length| new(1, heads, length, 128).with_kv_heads(kv_heads);
    let mut problems = Vec::new();
    for dim in [128, 64, 256] {
        problems.push(new(1, 1, 128, dim));
        let longest = if dim == 128 { 65_536 } else { 32_768 };
        let lengths = (9..=16).flat_map(|power| [1 << power, 3 << (power - 1)]);
        let lengths = lengths.filter(|length| *length <= longest);
        let full = |length| new(16_384usize.div_ceil(length), 2048 / dim, length, dim);
        problems.extend(lengths.map(full));
    }
    problems.extend([1024, 4096, 8192, 32_768].map(|length| alone(32, 8, length)));
    problems.extend([alone(4, 1, 32_768), alone(8, 2, 16_384), alone(16, 16, 3072)]);
    let mut both: Vec<Problem> =
        problems.into_iter().flat_map(|it| [it.clone(), it.with_mask(Mask::CAUSAL)]).collect();
    both.extend(
        [(2048, 1024), (1024, 2048), (16_384, 8192), (8192, 16_384), (4096, 65_536)]
            .map(|(queries, keys)| alone(32, 8, queries).with_key_length(keys)),
    );
    both.into_iter().flat_map(|it| [it.clone(), it.backward()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_sets_are_valid_and_their_texts_parse() {
        for (name, _) in NAMED {
            let set = ProblemSet::find(name).unwrap();
            assert!(!set.problems.is_empty(), "{name}");
            for problem in set.problems {
                problem.validate().unwrap();
                assert_eq!(problem.text().parse::<Problem>().unwrap(), problem);
            }
        }
        assert_eq!(ProblemSet::find("paper").unwrap().problems.len(), 36);
    }

    #[test]
    fn files_have_a_problem_on_each_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("own");
        let find = |text: &str| {
            std::fs::write(&path, text).unwrap();
            ProblemSet::find(path.to_str().unwrap())
        };
        let set =
            find("# two\nb=1,h=2,s=64,d=64\n\nb=1,h=2,s=64,d=128,causal # the second\n").unwrap();
        assert_eq!(set.problems.len(), 2);
        let message = find("b=1\nnonsense\n").unwrap_err().to_string();
        assert!(message.contains("line 2: `nonsense` means nothing"), "{message}");
        assert!(find("# nothing\n").unwrap_err().to_string().contains("it has no problems"));
        let message = ProblemSet::find("papers").unwrap_err().to_string();
        assert!(
            message.contains("neither a set nor a file `papers`; sets are paper,"),
            "{message}"
        );
    }
}
