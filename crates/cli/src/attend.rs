//! `flashcore attend`: attention over given or generated tensors.

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use flashcore::file::{self, Names};
use flashcore::{
    DType, DTypes, Descale, Descales, InputTensors, Inputs, Machine, Mask, Output, Pass, Problem,
};
use harness::auxiliary_inputs::AuxiliaryInputs;
use harness::verify::ExpectedOutput;
use serde::Serialize;
use testing::Verdict;

use crate::progress::Bar;
use crate::{Answer, Preferred, destination, memory, terminal};

/// Compute attention on the best back end there is, and check it
#[derive(Args)]
pub(crate) struct Arguments {
    /// What is computed, such as b=2,h=16,s=4096,d=128,bf16,causal or
    /// b=4,s=900,queries=packed:2000,keys=packed:2000; options beside it change it
    #[arg(long, value_name = "PROBLEM", conflicts_with = "input")]
    problem: Option<Problem>,
    /// Sequences [default: 1]
    #[arg(long, conflicts_with = "input")]
    batch: Option<usize>,
    /// Queries per sequence [default: 1024]
    #[arg(long, conflicts_with = "input")]
    seq: Option<usize>,
    /// Keys per sequence [default: as many as queries]
    #[arg(long, conflicts_with = "input")]
    kv_seq: Option<usize>,
    /// Query heads [default: 8]
    #[arg(long, conflicts_with = "input")]
    heads: Option<usize>,
    /// Key/value heads [default: as many as query heads]
    #[arg(long, conflicts_with = "input")]
    kv_heads: Option<usize>,
    /// Elements of a query or key vector [default: 128]
    #[arg(long, conflicts_with = "input")]
    head_dim: Option<usize>,
    /// Elements of a value or output vector [default: the head dim]
    #[arg(long, conflicts_with = "input")]
    value_head_dim: Option<usize>,
    /// Element type: f32, f16, bf16, e4m3 or e5m2 [default: bf16]
    #[arg(long, conflicts_with = "input")]
    dtype: Option<DType>,
    /// Element type of keys and values, as of an 8-bit cache, also int8 [default: that of all]
    #[arg(long, value_name = "DTYPE", conflicts_with = "input")]
    kv_dtype: Option<DType>,
    /// Give 8-bit tensors descale factors: for each head, or of keys and values for each token
    #[arg(long, value_name = "PER", value_parser = ["head", "token"], conflicts_with = "input")]
    descale: Option<String>,
    /// Mask the keys after each query, aligned to the last query and key
    #[arg(long)]
    causal: bool,
    /// Mask keys further than this before and after each query; a side left out is open
    #[arg(long, value_name = "LEFT:RIGHT", value_parser = window, conflicts_with = "causal")]
    window: Option<Mask>,
    /// Mask the keys of other chunks of so many positions
    #[arg(long, value_name = "POSITIONS")]
    chunk: Option<usize>,
    /// Softmax scale [default: 1 / sqrt(head dim)]
    #[arg(long, allow_hyphen_values = true)]
    scale: Option<f32>,
    /// Cap scaled scores: softcap * tanh(score / softcap)
    #[arg(long, allow_hyphen_values = true)]
    softcap: Option<f32>,
    /// Let scores fall with the distance between query and key, by ALiBi's slopes
    #[arg(long, conflicts_with = "input")]
    alibi: bool,
    /// Give each query head a sink
    #[arg(long, conflicts_with = "input")]
    sinks: bool,
    /// Seed of the generated tensors [default: 0]
    #[arg(long, conflicts_with = "input")]
    seed: Option<u64>,
    /// Take tensors `q`, `k` and `v`, each [batch, length, heads, dim], from a safetensors file, and
    /// `q_descale`, `k_descale`, `v_descale` where they have 8 bits
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// Write `output` and `lse` to a safetensors file
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    preferred: Preferred,
    /// Skip the comparison with the reference
    #[arg(long)]
    no_check: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn window(text: &str) -> Result<Mask, String> {
    let problem: Problem = format!("window={text}")
        .parse()
        .map_err(|_| format!("`{text}` is not of the form LEFT:RIGHT, such as 4096:0 or :7"))?;
    Ok(problem.mask)
}

/// Floating-point operations that a check may take: about a second on two cores.
pub(crate) const CHECK_OPERATIONS: f64 = 5e9;

pub(crate) fn run(arguments: &Arguments) -> Result<Answer, Box<dyn Error>> {
    if let Some(path) = &arguments.output {
        destination::admit(path)?;
    }
    let started = Instant::now();
    // Opening a GPU takes as long as making up large tensors: both at once.
    let (prepared, machine) = std::thread::scope(|scope| {
        let machine = scope.spawn(Machine::discover);
        let prepared = prepare(arguments).map_err(|error| error.to_string());
        (prepared, machine.join())
    });
    let (problem, tensors, auxiliary) = prepared?;
    if problem.pass == Pass::Backward {
        let problem = problem.text();
        return Err(format!(
            "attend computes outputs, and this problem asks for gradients: `flashcore check --problem {problem}` \
             computes and checks them"
        )
        .into());
    }
    let inputs =
        auxiliary.as_ref().map_or_else(|| tensors.inputs(), |auxiliary| auxiliary.inputs(&tensors));
    let machine = machine.map_err(|_| "looking for GPUs panicked")?;
    let preference = arguments.preferred.preference(problem.pass);
    let before = started.elapsed();
    let result = {
        let bar = Bar::new("attention");
        machine.attend(&problem, inputs, &preference, Some(&bar))?
    };
    if let Some(path) = &arguments.output {
        file::write_output(path, &problem, &result)?;
    }
    let verdict = if arguments.no_check { None } else { Some(judge(&problem, inputs, &result)?) };
    let passed = verdict.as_ref().is_none_or(|verdict| verdict.passed);
    if arguments.json {
        let json = Json {
            problem: problem.text(),
            scale: problem.scale(),
            description: &problem,
            report: &result.report,
            tflops: result.report.tflops(&problem),
            since_start_ms: 1e3 * (before + result.report.first_result_time).as_secs_f64(),
            flops: problem.flops(),
            visible_flops: problem.visible_flops(),
            verdict: verdict.as_ref(),
            output: arguments.output.as_ref().map(|path| path.display().to_string()),
        };
        return Answer::json(&json, passed);
    }
    let text = describe(arguments, &machine, &problem, &result, verdict.as_ref(), before);
    Ok(Answer { text, passed })
}

#[derive(Serialize)]
struct Json<'a> {
    problem: String,
    /// The problem, field by field.
    description: &'a Problem,
    /// The scale in force, also when the problem leaves it to the default.
    scale: f32,
    report: &'a flashcore::Report,
    tflops: f64,
    /// From the start of the process to the first result.
    since_start_ms: f64,
    flops: f64,
    visible_flops: f64,
    verdict: Option<&'a Verdict>,
    output: Option<String>,
}

/// The problem and its tensors, from the file or generated: then with lengths and tables too.
fn prepare(
    arguments: &Arguments,
) -> Result<(Problem, InputTensors, Option<AuxiliaryInputs>), Box<dyn Error>> {
    if let Some(path) = &arguments.input {
        let tensors = file::read_inputs(path, &Names::default())?;
        let problem = arguments.changed(tensors.inputs().problem()?);
        problem.validate()?;
        return Ok((problem, tensors, None));
    }
    let usual = || "".parse::<Problem>();
    let problem = arguments.changed(arguments.problem.clone().map_or_else(usual, Ok)?);
    problem.validate()?;
    if arguments.descale.is_some() && problem.descales == Descales::default() {
        return Err("--descale is for tensors of 8 bits, and none has so few".into());
    }
    memory::admit(&problem)?;
    let _bar = Bar::new("making tensors");
    let auxiliary = AuxiliaryInputs::of(&problem)?;
    let tensors = InputTensors::random(&problem, arguments.seed.unwrap_or(0))?;
    Ok((problem, tensors, Some(auxiliary)))
}

impl Arguments {
    /// A problem with what the options say. Sizes that follow others by default do so here too.
    fn changed(&self, mut problem: Problem) -> Problem {
        problem.batch = self.batch.unwrap_or(problem.batch);
        let follow =
            |size: &mut usize, given: Option<usize>| given.into_iter().for_each(|it| *size = it);
        for (size, other, given, own) in [
            (&mut problem.query_heads, &mut problem.kv_heads, self.heads, self.kv_heads),
            (&mut problem.query_length, &mut problem.key_length, self.seq, self.kv_seq),
            (
                &mut problem.head_dim,
                &mut problem.value_head_dim,
                self.head_dim,
                self.value_head_dim,
            ),
        ] {
            follow(size, given);
            follow(other, own.or(given));
        }
        if let Some(dtype) = self.dtype {
            problem = problem.with_dtype(dtype);
        }
        if let Some(dtype) = self.kv_dtype {
            problem = problem.with_kv_dtype(dtype);
        }
        if let Some(per) = &self.descale {
            let DTypes { query, key, value, .. } = problem.dtypes;
            let tokens = if per == "token" { Descale::PerToken } else { Descale::PerHead };
            let of = |dtype: DType, descale| if dtype.is_8_bit() { descale } else { Descale::None };
            problem.descales = Descales {
                query: of(query, Descale::PerHead),
                key: of(key, tokens),
                value: of(value, tokens),
            };
        }
        if self.causal {
            problem.mask.right = Some(0);
        }
        if let Some(Mask { left, right, .. }) = self.window {
            (problem.mask.left, problem.mask.right) = (left, right);
        }
        if let Some(chunk) = self.chunk {
            problem.mask = problem.mask.with_chunk(chunk);
        }
        problem.scores.scale = self.scale.or(problem.scores.scale);
        problem.scores.softcap = self.softcap.or(problem.scores.softcap);
        problem.scores.sinks |= self.sinks;
        if self.alibi { problem.with_alibi() } else { problem }
    }
}

/// Compare with the reference, over as many rows as there is time for.
fn judge(
    problem: &Problem,
    inputs: Inputs<'_>,
    result: &Output,
) -> Result<Verdict, Box<dyn Error>> {
    let bar = Bar::new("reference");
    let expected = ExpectedOutput::within(CHECK_OPERATIONS, problem, inputs, 0, Some(&bar))?;
    Ok(expected.verdict(&result.output, &result.lse)?)
}

fn describe(
    arguments: &Arguments,
    machine: &Machine,
    problem: &Problem,
    result: &Output,
    verdict: Option<&Verdict>,
    before: Duration,
) -> String {
    let report = &result.report;
    let backend = machine.backends().iter().find(|backend| backend.name() == report.backend);
    let source = match &arguments.input {
        Some(path) => path.display().to_string(),
        None => format!("standard normal, seed {}", arguments.seed.unwrap_or(0)),
    };
    let mut fields = vec![
        ("problem", problem.to_string()),
        ("tensors", source),
        (
            "back end",
            format!(
                "{}: {}",
                report.backend,
                backend.map_or_else(String::new, |backend| backend.describe())
            ),
        ),
        (
            "kernel",
            format!("{} ({})", terminal::paint(terminal::HEADING, report.kernel), report.reason),
        ),
        (
            "time",
            format!(
                "{} ({} with preparation)",
                terminal::paint(terminal::HEADING, &terminal::duration(report.kernel_time)),
                terminal::duration(report.total_time)
            ),
        ),
        ("rate", format!("{:.4} TFLOP/s", report.tflops(problem))),
        (
            "first result",
            format!(
                "{} after the start of the process",
                terminal::duration(before + report.first_result_time)
            ),
        ),
    ];
    if let Some(configuration) = &report.configuration {
        fields.insert(4, ("configuration", configuration.clone()));
    }
    fields.extend(report.notes.iter().map(|note| ("note", note.clone())));
    if let Some(verdict) = verdict {
        fields.push(("output", verdict.output.to_string()));
        fields.push(("lse", verdict.lse.to_string()));
        let rows = if verdict.rows == verdict.total_rows {
            format!("all {} rows", verdict.rows)
        } else {
            format!("a sample of {} of {} rows", verdict.rows, verdict.total_rows)
        };
        fields.push((
            "verdict",
            format!("{} ({rows} against f64)", terminal::verdict(verdict.passed)),
        ));
    } else {
        fields.push(("verdict", "not checked".to_owned()));
    }
    if let Some(path) = &arguments.output {
        fields.push(("written", path.display().to_string()));
    }
    terminal::fields(&fields)
}
