//! A foreign kernel: PTX from any source, and a small JSON file that describes its launch.
//!
//! ```json
//! {
//!   "entry": "my_attention",
//!   "problem": "d=64,f16,causal",
//!   "length_step": 64,
//!   "unequal_lengths": false,
//!   "grouped": false,
//!   "lse": true,
//!   "grid": ["ceil(query_length, 64)", "heads", "batch"],
//!   "threads": 128,
//!   "shared_bytes": "4096 + 64 * head_dim * 2",
//!   "arguments": [
//!     { "tensor": "query" },
//!     { "tensor_map": "key", "box": [64, 64, 1, 1], "swizzle": 128 },
//!     { "u32": "query_length" },
//!     { "u64": "heads * head_dim" },
//!     { "f32": "scale * log2e" }
//!   ]
//! }
//! ```
//!
//! Numbers are expressions: `+ - * /`, parentheses, `ceil(a, b)` for a division rounded up,
//! `min`, `max`, and the names in [`names`].

use std::path::Path;

use flashcore::Problem;
use flashcore::gpu::Gpu;
use ptx::Target;
use serde::Deserialize;

use super::without_gpu::too_much_shared;
use super::{Contract, Outcome, Rule};
use crate::Error;
use crate::subject::{
    Call, KernelArgument, LaunchDescription, Launcher, Source, TensorRole, plain_map,
};

/// A foreign kernel.
#[derive(Debug, Clone)]
pub struct ForeignKernel {
    /// Its PTX.
    pub ptx: String,
    /// How it is launched.
    pub description: Description,
    /// What it serves.
    pub contract: Contract,
}

/// The description file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The entry point.
    pub entry: String,
    /// Element, head dims and mask, as the text of a problem.
    pub problem: String,
    /// Lengths are multiples of this.
    #[serde(default = "one")]
    pub length_step: usize,
    /// Whether queries and keys may differ in number.
    #[serde(default)]
    pub unequal_lengths: bool,
    /// Whether query heads may share key heads.
    #[serde(default)]
    pub grouped: bool,
    /// Whether it writes log-sum-exps.
    #[serde(default)]
    pub lse: bool,
    /// Blocks along x, y and z.
    pub grid: Vec<Number>,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks of a cluster.
    #[serde(default = "single")]
    pub cluster: u32,
    /// Dynamic shared memory of a block.
    #[serde(default)]
    pub shared_bytes: Number,
    /// One for each parameter.
    pub arguments: Vec<ArgumentText>,
}

/// The longest step of lengths: problems grow with it, and are computed on the host too.
const MOST_STEP: usize = 4096;

fn one() -> usize {
    1
}

fn single() -> u32 {
    1
}

/// A number, or an expression for one.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum Number {
    /// The number itself.
    Value(f64),
    /// An expression.
    Text(String),
}

impl Default for Number {
    fn default() -> Self {
        Number::Value(0.0)
    }
}

/// An argument as the file has it: one of these fields says what it is.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ArgumentText {
    /// The address of a tensor.
    pub tensor: Option<TensorRole>,
    /// A tensor map over (dim, length, heads, batch) of a tensor.
    pub tensor_map: Option<TensorRole>,
    /// The box of the tensor map.
    #[serde(rename = "box")]
    pub extent: Vec<u32>,
    /// Over how many bytes the tensor map is swizzled.
    pub swizzle: u32,
    /// A number of 32 bits.
    pub u32: Option<Number>,
    /// A number of 64 bits.
    pub u64: Option<Number>,
    /// A single-precision number.
    pub f32: Option<Number>,
}

/// The names that expressions may use, with their values for a problem. Tensors are contiguous
/// (batch, length, heads, dim), so strides are products of these.
pub fn names(problem: &Problem) -> Vec<(&'static str, f64)> {
    let number = |value: usize| value as f64;
    vec![
        ("batch", number(problem.batch)),
        ("heads", number(problem.query_heads)),
        ("kv_heads", number(problem.kv_heads)),
        ("group", number(problem.group_size())),
        ("query_length", number(problem.query_length)),
        ("key_length", number(problem.key_length)),
        ("head_dim", number(problem.head_dim)),
        ("value_head_dim", number(problem.value_head_dim)),
        ("element_bytes", number(problem.dtype().bytes())),
        ("scale", f64::from(problem.scale())),
        ("log2e", std::f64::consts::LOG2_E),
    ]
}

impl ForeignKernel {
    /// Reads PTX and its description.
    pub fn read(ptx: &Path, description: &Path) -> Result<Self, Error> {
        let what = description.display().to_string();
        let malformed = |reason: String| Error::Malformed { what: what.clone(), reason };
        let unreadable = Error::io(format!("cannot read {}", ptx.display()));
        let program = std::fs::read_to_string(ptx).map_err(unreadable)?;
        let text = std::fs::read_to_string(description).map_err(Error::io(format!(
            "cannot read {what}, which says how the kernel of {} is launched",
            ptx.display()
        )))?;
        let description: Description = serde_json::from_str(&text)
            .map_err(|error| malformed(format!("this describes no kernel: {error}")))?;
        ForeignKernel::new(program, description).map_err(malformed)
    }

    /// A kernel and its description.
    pub fn new(ptx: String, description: Description) -> Result<Self, String> {
        let model: Problem =
            description.problem.parse().map_err(|error| format!("`problem`: {error}"))?;
        let contract = Contract {
            length_step: description.length_step,
            unequal_lengths: description.unequal_lengths,
            grouped: description.grouped,
            lse: description.lse,
            ..Contract::whole(model)
        };
        if !(1..=MOST_STEP).contains(&contract.length_step) {
            return Err(format!("`length_step` is from 1 to {MOST_STEP}"));
        }
        let foreign = ForeignKernel { ptx, description, contract };
        // Every expression must evaluate before anything is launched.
        for case in foreign.contract.cases() {
            foreign.describe(&case.problem)?;
        }
        Ok(foreign)
    }

    /// The launch for a problem.
    pub fn describe(&self, problem: &Problem) -> Result<LaunchDescription, String> {
        let names = names(problem);
        let value = |what: &str, number: &Number| match number {
            Number::Value(value) => Ok(*value),
            Number::Text(text) => {
                evaluate(text, &names).map_err(|reason| format!("`{what}`: {reason}"))
            }
        };
        let whole = |what: &str, number: &Number, most: f64| {
            let value = value(what, number)?;
            if (0.0..=most).contains(&value) && value.fract() == 0.0 {
                Ok(value)
            } else {
                Err(format!("`{what}` is {value}, and must be a whole number up to {most}"))
            }
        };
        let mut grid = [1; 3];
        if self.description.grid.is_empty() || self.description.grid.len() > 3 {
            return Err("`grid` has one to three numbers".to_owned());
        }
        for (to, number) in grid.iter_mut().zip(&self.description.grid) {
            *to = whole("grid", number, f64::from(i32::MAX))? as u32;
        }
        let argument = |(index, text): (usize, &ArgumentText)| {
            let what = format!("argument {index}");
            let kinds = [text.tensor.is_some(), text.tensor_map.is_some(), text.u32.is_some()];
            let kinds = kinds.into_iter().chain([text.u64.is_some(), text.f32.is_some()]);
            if kinds.filter(|given| *given).count() != 1 {
                return Err(format!("{what} is one of tensor, tensor_map, u32, u64, f32"));
            }
            if let Some(role) = text.tensor {
                return Ok(KernelArgument::Address { tensor: role });
            }
            if let Some(role) = text.tensor_map {
                if text.extent.len() != 4 {
                    return Err(format!("{what}: the box of a tensor map has four extents"));
                }
                return plain_map(problem, role, text.extent.clone(), text.swizzle);
            }
            if let Some(number) = &text.u32 {
                let value = whole(&what, number, f64::from(u32::MAX))? as u32;
                return Ok(KernelArgument::U32 { value });
            }
            if let Some(number) = &text.u64 {
                return Ok(KernelArgument::U64 {
                    value: whole(&what, number, 2f64.powi(53))? as u64,
                });
            }
            let number = text.f32.as_ref().expect("counted above");
            Ok(KernelArgument::F32 { value: value(&what, number)? as f32 })
        };
        let arguments = self.description.arguments.iter().enumerate().map(argument);
        Ok(LaunchDescription {
            entry: self.description.entry.clone(),
            grid,
            threads: self.description.threads,
            cluster: self.description.cluster,
            shared_bytes: whole("shared_bytes", &self.description.shared_bytes, 1e9)? as u32,
            programmatic: false,
            arguments: arguments.collect::<Result<_, _>>()?,
        })
    }

    /// Checks the PTX against its description.
    pub fn validate(&self) -> Outcome {
        let invalid = |reason: String| Outcome::reject(Rule::Invalid, reason);
        let entry = &self.description.entry;
        let Some(parameters) = parameters(&self.ptx, entry) else {
            return invalid(format!("the PTX has no entry `{entry}`"));
        };
        let launch = match self.describe(&self.contract.cases()[0].problem) {
            Ok(launch) => launch,
            Err(reason) => return invalid(reason),
        };
        let sizes = launch.arguments.iter().map(|argument| match argument {
            KernelArgument::TensorMap { .. } => 128,
            KernelArgument::U32 { .. }
            | KernelArgument::I32 { .. }
            | KernelArgument::F32 { .. } => 4,
            _ => 8,
        });
        let described: Vec<u32> = sizes.collect();
        if described != parameters {
            return invalid(format!(
                "the entry has parameters of {parameters:?} bytes, the description arguments of \
                 {described:?}"
            ));
        }
        if !(1..=1024).contains(&launch.threads) {
            return invalid(format!("a block of {} threads", launch.threads));
        }
        let limit = Target::SM_90A.shared_memory_limit();
        let bytes = launch.shared_bytes.saturating_add(static_shared(&self.ptx));
        if bytes > limit {
            return too_much_shared(bytes, limit);
        }
        for external in [".extern .func", "call "] {
            let calls = |line: &&str| line.trim_start().starts_with(external);
            if let Some(line) = self.ptx.lines().find(calls) {
                return invalid(format!("it calls something that is not there: {}", line.trim()));
            }
        }
        Outcome::accept(format!(
            "entry `{entry}` with {} parameters, {bytes} of {limit} bytes of shared memory",
            parameters.len()
        ))
    }
}

impl Source for ForeignKernel {
    fn name(&self) -> String {
        self.description.entry.clone()
    }

    fn prepare(&self, gpu: &Gpu, problem: &Problem) -> Result<Box<dyn Call>, Error> {
        let launch = self.describe(problem).map_err(|reason| Error::Malformed {
            what: format!("the description of {}", self.description.entry),
            reason,
        })?;
        Ok(Box::new(Launcher::new(gpu, &self.ptx, launch)?))
    }
}

/// The bytes of each parameter of an entry.
fn parameters(ptx: &str, entry: &str) -> Option<Vec<u32>> {
    let start = ptx.match_indices(".entry").find_map(|(at, word)| {
        let rest = ptx[at + word.len()..].trim_start();
        let named = rest.strip_prefix(entry)?;
        named.trim_start().starts_with(['(', '{']).then_some(named.trim_start())
    })?;
    let Some(list) = start.strip_prefix('(') else { return Some(Vec::new()) };
    let list = &list[..list.find(')')?];
    let parameter = |text: &str| -> Option<u32> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let ty = words
            .iter()
            .find(|word| word.starts_with(['.']) && word[1..].starts_with(['b', 'u', 's', 'f']))?;
        let bits: u32 = ty[2..].parse().ok()?;
        let count = text.split_once('[').and_then(|(_, rest)| rest.split(']').next());
        let count: u32 = count.map_or(Some(1), |count| count.trim().parse().ok())?;
        (bits / 8).checked_mul(count)
    };
    list.split(',').map(str::trim).filter(|it| !it.is_empty()).map(parameter).collect()
}

/// Bytes of shared memory that the text declares.
fn static_shared(ptx: &str) -> u32 {
    let declared = |line: &str| -> Option<u32> {
        let line = line.trim_start();
        let rest = line.strip_prefix(".shared")?;
        let (name, count) = rest.split_once('[')?;
        let ty = name.split_whitespace().find(|word| word.starts_with(".b"))?;
        let bits: u32 = ty[2..].parse().ok()?;
        let count: u32 = count.split(']').next()?.trim().parse().ok()?;
        Some((bits / 8).saturating_mul(count))
    };
    ptx.lines().filter_map(declared).fold(0, u32::saturating_add)
}

/// The value of an expression.
pub fn evaluate(text: &str, names: &[(&str, f64)]) -> Result<f64, String> {
    let mut parser = Parser { rest: text.trim(), names, depth: 0 };
    let value = parser.sum()?;
    match parser.rest {
        "" => Ok(value),
        rest => Err(format!("`{rest}` is left over in `{text}`")),
    }
}

/// How deep expressions may nest: the parser calls itself.
const DEEPEST: u32 = 64;

struct Parser<'a> {
    rest: &'a str,
    names: &'a [(&'a str, f64)],
    /// How many signs and parentheses are open.
    depth: u32,
}

impl Parser<'_> {
    fn take(&mut self, symbol: char) -> bool {
        let found = self.rest.strip_prefix(symbol).map(str::trim_start);
        self.rest = found.unwrap_or(self.rest);
        found.is_some()
    }

    fn sum(&mut self) -> Result<f64, String> {
        let mut value = self.product()?;
        loop {
            if self.take('+') {
                value += self.product()?;
            } else if self.take('-') {
                value -= self.product()?;
            } else {
                return Ok(value);
            }
        }
    }

    fn product(&mut self) -> Result<f64, String> {
        let mut value = self.atom()?;
        loop {
            if self.take('*') {
                value *= self.atom()?;
            } else if self.take('/') {
                value /= self.atom()?;
            } else {
                return Ok(value);
            }
        }
    }

    fn atom(&mut self) -> Result<f64, String> {
        if self.depth == DEEPEST {
            return Err(format!("it nests deeper than {DEEPEST} signs and parentheses"));
        }
        self.depth += 1;
        let value = self.atom_inside();
        self.depth -= 1;
        value
    }

    fn atom_inside(&mut self) -> Result<f64, String> {
        if self.take('-') {
            return Ok(-self.atom()?);
        }
        if self.take('(') {
            let value = self.sum()?;
            return self.close(value);
        }
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
        let end = self.rest.find(|c| !is_word(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest.trim_start();
        if word.is_empty() {
            return Err(format!("a number or a name is expected at `{rest}`"));
        }
        if let Ok(number) = word.parse() {
            return Ok(number);
        }
        if self.take('(') {
            let first = self.sum()?;
            if !self.take(',') {
                return Err(format!("`{word}` takes two numbers"));
            }
            let second = self.sum()?;
            let value = match word {
                "ceil" => (first / second).ceil(),
                "min" => first.min(second),
                "max" => first.max(second),
                _ => return Err(format!("there is no `{word}(a, b)`, only ceil, min and max")),
            };
            return self.close(value);
        }
        let known = self.names.iter().find(|(name, _)| *name == word);
        known.map(|(_, value)| *value).ok_or_else(|| {
            let names: Vec<&str> = self.names.iter().map(|(name, _)| *name).collect();
            format!("there is no `{word}`; there are {}", names.join(", "))
        })
    }

    fn close(&mut self, value: f64) -> Result<f64, String> {
        if self.take(')') { Ok(value) } else { Err("a parenthesis is not closed".to_owned()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_have_their_values() {
        let names = [("heads", 6.0), ("length", 100.0)];
        let value = |text: &str| evaluate(text, &names);
        assert_eq!(value("1 + 2 * 3"), Ok(7.0));
        assert_eq!(value("(1 + 2) * heads"), Ok(18.0));
        assert_eq!(value("ceil(length, 64) * heads - 2"), Ok(10.0));
        assert_eq!(value("max(heads, -length / 4)"), Ok(6.0));
        assert!(value("lengths").unwrap_err().contains("there is no `lengths`; there are heads"));
        assert!(value("1 +").unwrap_err().contains("is expected at"));
        assert!(value("(1").unwrap_err().contains("not closed"));
        assert!(value("1 2").unwrap_err().contains("left over"));
        assert!(value("sin(1, 2)").unwrap_err().contains("only ceil"));
        let deep = |count: usize| format!("{}1{}", "(".repeat(count), ")".repeat(count));
        assert_eq!(value(&deep(60)), Ok(1.0));
        for text in [deep(25_000), "-".repeat(25_000), "min(1, ".repeat(25_000)] {
            assert!(value(&text).unwrap_err().contains("nests deeper"), "{}", &text[..20]);
        }
        // What is side by side does not nest.
        assert_eq!(value(&format!("{}1", "(1) + ".repeat(25_000))), Ok(25_001.0));
    }

    #[test]
    fn parameters_are_read_from_the_text() {
        let ptx = ".visible .entry other(.param .u32 a)\n.visible .entry mine(\n  .param .u64 q,\n\
                   .param .align 64 .b8 map[128],\n .param .f32 scale\n)\n{ }";
        assert_eq!(parameters(ptx, "mine"), Some(vec![8, 128, 4]));
        assert_eq!(parameters(ptx, "min"), None);
        assert_eq!(static_shared(".shared .align 16 .b8 tile[4096];\n.shared .b32 x[4];"), 4112);
        // Sizes that cannot be counted.
        assert_eq!(parameters(".entry e(.param .b64 x[4294967295])", "e"), None);
        let endless = ".shared .b64 x[4294967295];\n".repeat(2);
        assert_eq!(static_shared(&endless), u32::MAX);
    }
}
