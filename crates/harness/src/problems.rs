//! Sets of problems: by name, or a file with one problem on each line.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use flashcore::{DType, Mask, Problem};

use crate::Error;
use crate::statistics::Random;

/// Problems that are measured together.
#[derive(Debug, Clone, PartialEq)]
pub struct ProblemSet {
    /// Its name, or the file it came from.
    pub name: String,
    /// The problems, in the order in which they are shown.
    pub workloads: Vec<Workload>,
}

/// A problem to be measured, alone or as a batch of sequences of unequal lengths.
///
/// ```
/// use flashcore_harness::problems::Workload;
///
/// let workload: Workload = "b=1,h=16,s=4096,d=128,bf16,causal,packed=20".parse()?;
/// assert_eq!(workload.lengths.len(), 20);
/// assert_eq!(workload.lengths.iter().sum::<usize>(), 4096);
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// The problem; of packed sequences, one batch entry with the rows of all.
    pub problem: Problem,
    /// The lengths of packed sequences, queries and keys alike; none where there is one problem.
    pub lengths: Vec<usize>,
}

impl From<Problem> for Workload {
    fn from(problem: Problem) -> Self {
        Workload { problem, lengths: Vec::new() }
    }
}

impl Workload {
    /// The rows of a problem as so many packed sequences, whose lengths are log-normal: many short
    /// ones and a few long. The same every time.
    pub fn packed(problem: Problem, sequences: usize) -> Result<Self, String> {
        let rows = problem.query_length;
        if problem.batch != 1 || problem.key_length != rows {
            return Err("packed sequences are one batch entry, as many keys as queries".to_owned());
        }
        if sequences == 0 || sequences > rows {
            return Err(format!("{rows} rows are no {sequences} sequences"));
        }
        let mut random = Random::new(0x5e90_e2ce);
        let weights: Vec<f64> = (0..sequences).map(|_| random.normal().exp()).collect();
        let scale = (rows - sequences) as f64 / weights.iter().sum::<f64>();
        let mut lengths: Vec<usize> = weights.iter().map(|it| 1 + (it * scale) as usize).collect();
        let rest = rows - lengths.iter().sum::<usize>();
        for length in lengths.iter_mut().take(rest) {
            *length += 1;
        }
        Ok(Workload { problem, lengths })
    }

    /// Whether it is sequences in one batch entry.
    pub fn is_packed(&self) -> bool {
        !self.lengths.is_empty()
    }

    /// Each sequence as a problem of its own.
    fn parts(&self) -> Vec<Problem> {
        let of = |length: &usize| {
            let mut problem = self.problem.clone();
            (problem.query_length, problem.key_length) = (*length, *length);
            problem
        };
        match self.is_packed() {
            true => self.lengths.iter().map(of).collect(),
            false => vec![self.problem.clone()],
        }
    }

    /// Floating-point operations by the published convention.
    pub fn flops(&self) -> f64 {
        self.parts().iter().map(Problem::flops).sum()
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&text(&self.problem))?;
        if self.is_packed() {
            write!(f, ",packed={}", self.lengths.len())?;
        }
        Ok(())
    }
}

impl FromStr for Workload {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (packed, plain): (Vec<&str>, Vec<&str>) =
            text.split(',').partition(|field| field.trim().starts_with("packed="));
        let problem = plain.join(",").parse::<Problem>().map_err(|error| error.to_string())?;
        let Some(field) = packed.first() else { return Ok(problem.into()) };
        let number = field.trim().trim_start_matches("packed=");
        let number = number.parse().map_err(|_| format!("`{field}` has no number of sequences"))?;
        Workload::packed(problem, number)
    }
}

/// The named sets and what they are.
pub const NAMED: [(&str, &str); 9] = [
    ("paper", "head dims 64, 128, 256, dense and causal, 512 to 16k: 16,384 tokens of 2048"),
    ("grouped", "64 query and 8 key heads of 128, one sequence of 16k and 32k"),
    ("small", "a few heads and short sequences, where a launch is all there is"),
    ("llama", "prompts of Llama 3: 8B and 70B heads, 2k to 32k, causal"),
    ("gpt-oss", "prompts of gpt-oss: 64 query and 8 key heads of 64, 2k to 32k, causal"),
    (
        "decode",
        "one query, 8 key heads of 128, batch 1 to 128, 4k to 128k keys: memory is the limit",
    ),
    (
        "prefill",
        "32k tokens of 16 heads of 128, causal: 64 packed sequences, one, and one with a window",
    ),
    ("diffusion", "image transformers: 24 heads of 128 and 64, 1k to 4k positions, dense"),
    ("quick", "one length of each head dim and mask of `paper`"),
];

impl ProblemSet {
    /// The set of this name; else the file of this name.
    pub fn find(name: &str) -> Result<Self, Error> {
        if let Some(workloads) = named(name) {
            return Ok(ProblemSet { name: name.to_owned(), workloads });
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
        let mut workloads = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            workloads.push(line.parse::<Workload>().map_err(|reason| Error::Malformed {
                what: format!("{name}, line {}", number + 1),
                reason,
            })?);
        }
        if workloads.is_empty() {
            let reason = "it has no problems, one on each line".to_owned();
            return Err(Error::Malformed { what: name.to_owned(), reason });
        }
        Ok(ProblemSet { name: name.to_owned(), workloads })
    }
}

fn named(name: &str) -> Option<Vec<Workload>> {
    const MASKS: [Mask; 2] = [Mask::None, Mask::Causal];
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
                problems.push(problem.with_mask(Mask::Causal));
            }
        }
        problems
    };
    const LONG: [usize; 3] = [2048, 8192, 32_768];
    if name == "prefill" {
        let tokens = new(1, 16, 32_768, 128);
        let causal = tokens.clone().with_mask(Mask::Causal);
        return Some(vec![
            Workload::packed(causal.clone(), 64).ok()?,
            causal.into(),
            tokens.with_mask(Mask::window(Some(4096), Some(0))).into(),
        ]);
    }
    let problems: Vec<Problem> = match name {
        "paper" => paper(&[512, 1024, 2048, 4096, 8192, 16_384]),
        "quick" => paper(&[4096]),
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
        "diffusion" => [(24, 128), (24, 64)]
            .into_iter()
            .flat_map(|(heads, dim)| [1024, 4096].map(|length| new(2, heads, length, dim)))
            .chain([new(1, 24, 4608, 128)])
            .collect(),
        _ => return None,
    };
    Some(problems.into_iter().map(Workload::from).collect())
}

/// A problem as its text, which parses again.
pub fn text(problem: &Problem) -> String {
    let Problem { batch, query_heads, kv_heads, query_length, key_length, .. } = problem;
    let mut text = format!("b={batch},h={query_heads}");
    if kv_heads != query_heads {
        text += &format!(",hk={kv_heads}");
    }
    text += &format!(",s={query_length}");
    if key_length != query_length {
        text += &format!(",sk={key_length}");
    }
    text += &format!(",d={}", problem.head_dim);
    if problem.value_head_dim != problem.head_dim {
        text += &format!(",dv={}", problem.value_head_dim);
    }
    text += &format!(",{}", problem.dtype);
    match problem.mask {
        Mask::Causal => text += ",causal",
        Mask::Window { left, right } => {
            let side = |side: Option<usize>| side.map_or_else(String::new, |keys| keys.to_string());
            text += &format!(",window={}:{}", side(left), side(right));
        }
        _ => {}
    }
    for (name, number) in [("scale", problem.softmax_scale), ("softcap", problem.softcap)] {
        text += &number.map_or_else(String::new, |number| format!(",{name}={number}"));
    }
    for (name, has) in [("alibi", problem.alibi), ("sinks", problem.sinks)] {
        if has {
            text += &format!(",{name}");
        }
    }
    text
}

/// Bytes that must cross the memory bus at least once.
pub fn least_bytes(problem: &Problem) -> f64 {
    flashcore::gpu::TensorRole::ALL
        .into_iter()
        .map(|role| role.bytes(problem).unwrap_or(usize::MAX) as f64)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_sets_are_valid_and_their_texts_parse() {
        for (name, _) in NAMED {
            let set = ProblemSet::find(name).unwrap();
            assert!(!set.workloads.is_empty(), "{name}");
            for workload in set.workloads {
                workload.problem.validate().unwrap();
                assert_eq!(workload.to_string().parse::<Workload>().unwrap(), workload);
            }
        }
        assert_eq!(ProblemSet::find("paper").unwrap().workloads.len(), 36);
        for odd in [
            "b=2,h=6,hk=2,s=5,sk=7,d=192,dv=128,f16,causal,scale=0.5",
            "b=1,h=8,s=1024,d=64,bf16,window=128:0,softcap=30,alibi,sinks",
            "b=1,h=8,s=1024,d=64,bf16,window=:7",
        ] {
            assert_eq!(text(&odd.parse().unwrap()), odd);
        }
    }

    #[test]
    fn packed_sequences_are_of_all_lengths() {
        let problem: Problem = "b=1,h=16,s=32768,d=128,bf16,causal".parse().unwrap();
        let packed = Workload::packed(problem.clone(), 64).unwrap();
        assert_eq!(packed.lengths.iter().sum::<usize>(), 32_768);
        let longest = packed.lengths.iter().max().unwrap();
        let shortest = packed.lengths.iter().min().unwrap();
        assert!(*longest > 1500 && *shortest < 150 && *shortest > 0, "{:?}", packed.lengths);
        assert!(packed.flops() < problem.flops() / 10.0);
        assert_eq!(
            Workload::packed(problem.clone(), 0).unwrap_err(),
            "32768 rows are no 0 sequences"
        );
        let refused = "b=2,h=1,s=64,d=64,packed=3".parse::<Workload>().unwrap_err();
        assert!(refused.contains("one batch entry"), "{refused}");
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
        assert_eq!(set.workloads.len(), 2);
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
