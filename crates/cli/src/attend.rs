//! `flashcore attend`: attention over given or generated tensors.

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use flashcore::file::{self, Names};
use flashcore::reference::{self, Rows};
use flashcore::{
    DType, InputTensors, Machine, Mask, Output, Preference, Problem, Verdict, compare,
};
use serde::Serialize;

use crate::progress::Bar;
use crate::{Answer, memory, terminal};

/// Compute attention on the best back end there is, and check it
#[derive(Args)]
pub(crate) struct Arguments {
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
    /// Element type: f32, f16 or bf16 [default: bf16]
    #[arg(long, conflicts_with = "input")]
    dtype: Option<DType>,
    /// Mask the keys after each query, aligned to the last query and key
    #[arg(long)]
    causal: bool,
    /// Softmax scale [default: 1 / sqrt(head dim)]
    #[arg(long, allow_hyphen_values = true)]
    scale: Option<f32>,
    /// Seed of the generated tensors [default: 0]
    #[arg(long, conflicts_with = "input")]
    seed: Option<u64>,
    /// Take tensors `q`, `k` and `v`, each [batch, length, heads, dim], from a safetensors file
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// Write `output` and `lse` to a safetensors file
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Back end to use
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    backend: BackendChoice,
    /// Kernel to use, such as `forward` or `gpu/scalar` [default: $FLASHCORE_KERNEL, or the best for
    /// the problem]
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
    /// Skip the comparison with the reference
    #[arg(long)]
    no_check: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendChoice {
    Auto,
    Cpu,
    Gpu,
}

impl BackendChoice {
    pub(crate) fn name(self) -> Option<String> {
        match self {
            BackendChoice::Auto => None,
            BackendChoice::Cpu => Some("cpu".to_owned()),
            BackendChoice::Gpu => Some("gpu".to_owned()),
        }
    }
}

/// Floating-point operations that a check may take: about a second on two cores.
const CHECK_OPERATIONS: f64 = 5e9;
/// Output elements that a check may hold: half a gigabyte of f64 for reference and baseline.
const CHECK_ELEMENTS: usize = 1 << 25;

pub(crate) fn run(arguments: &Arguments) -> Result<Answer, Box<dyn Error>> {
    let started = Instant::now();
    // Opening a GPU takes as long as making up large tensors: both at once.
    let (prepared, machine) = std::thread::scope(|scope| {
        let machine = scope.spawn(Machine::discover);
        let prepared = prepare(arguments).map_err(|error| error.to_string());
        (prepared, machine.join())
    });
    let (problem, tensors) = prepared?;
    let machine = machine.map_err(|_| "looking for GPUs panicked")?;
    let mut preference = match &arguments.kernel {
        Some(name) => Preference::named(name),
        None => Preference::from_environment(),
    };
    if let Some(backend) = arguments.backend.name() {
        preference.backend = Some(backend);
    }
    let before = started.elapsed();
    let result = {
        let bar = Bar::new("attention");
        machine.attend(&problem, tensors.inputs(), &preference, Some(&bar))?
    };
    if let Some(path) = &arguments.output {
        file::write_output(path, &problem, &result)?;
    }
    let verdict = if arguments.no_check { None } else { Some(judge(&problem, &tensors, &result)?) };
    let passed = verdict.as_ref().is_none_or(|verdict| verdict.passed);
    if arguments.json {
        let json = Json {
            scale: problem.scale(),
            problem: &problem,
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
    problem: &'a Problem,
    /// The scale in force, also when the problem leaves it to the default.
    scale: f32,
    report: &'a flashcore::backend::Report,
    tflops: f64,
    /// From the start of the process to the first result.
    since_start_ms: f64,
    flops: f64,
    visible_flops: f64,
    verdict: Option<&'a Verdict>,
    output: Option<String>,
}

/// The problem and its tensors, from the file or generated.
fn prepare(arguments: &Arguments) -> Result<(Problem, InputTensors), Box<dyn Error>> {
    let finish = |mut problem: Problem| -> Result<Problem, Box<dyn Error>> {
        problem.softmax_scale = arguments.scale;
        if arguments.causal {
            problem = problem.with_mask(Mask::Causal);
        }
        problem.validate()?;
        Ok(problem)
    };
    if let Some(path) = &arguments.input {
        let tensors = file::read_inputs(path, &Names::default())?;
        let problem = finish(tensors.inputs().problem()?)?;
        return Ok((problem, tensors));
    }
    let heads = arguments.heads.unwrap_or(8);
    let length = arguments.seq.unwrap_or(1024);
    let head_dim = arguments.head_dim.unwrap_or(128);
    let problem = finish(
        Problem::new(arguments.batch.unwrap_or(1), heads, length, head_dim)
            .with_kv_heads(arguments.kv_heads.unwrap_or(heads))
            .with_key_length(arguments.kv_seq.unwrap_or(length))
            .with_value_head_dim(arguments.value_head_dim.unwrap_or(head_dim))
            .with_dtype(arguments.dtype.unwrap_or(DType::BF16)),
    )?;
    memory::admit(&problem)?;
    let tensors = InputTensors::random(&problem, arguments.seed.unwrap_or(0))?;
    Ok((problem, tensors))
}

/// Compare with the reference, over as many rows as there is time for.
fn judge(
    problem: &Problem,
    tensors: &InputTensors,
    result: &Output,
) -> Result<Verdict, flashcore::Error> {
    let share = (CHECK_OPERATIONS / problem.visible_flops().max(1.0)).min(1.0);
    let affordable = (share * problem.rows() as f64) as usize;
    let count = affordable.min(CHECK_ELEMENTS / problem.value_head_dim);
    let rows = Rows::sample(problem, count.max(16), 0);
    let inputs = tensors.inputs();
    let bar = Bar::new("reference");
    let reference = reference::attention(problem, inputs, &rows, Some(&bar))?;
    drop(bar);
    let bar = Bar::new("baseline ");
    let baseline = reference::baseline(problem, inputs, &rows, Some(&bar))?;
    drop(bar);
    Ok(compare(problem, result, &reference, &baseline)?)
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
            format!("{} ({})", terminal::paint(terminal::HEADING, &report.kernel), report.reason),
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
