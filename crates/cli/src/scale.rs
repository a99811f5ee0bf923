//! `flashcore scale`: what attention over many GPUs would take.

use std::error::Error;
use std::path::PathBuf;

use clap::Args;
use flashcore::{Pass, Problem};
use harness::report::write;
use harness::scale::links::{Cluster, Link};
use harness::scale::times::Times;
use harness::scale::{self, Choice, Prediction, Refusal, Setting, Variant};
use serde::Serialize;

use crate::{Answer, terminal};

/// Predict attention over many GPUs, from kernel times of one and the speeds of links
#[derive(Args)]
pub(crate) struct Arguments {
    /// What all GPUs compute together
    #[arg(
        long,
        value_name = "PROBLEM",
        default_value = "b=1,h=32,hk=8,s=1048576,d=128,bf16,causal"
    )]
    problem: Problem,
    /// Lengths instead of the problem's own, such as 128k,1m,10m: powers of 1024
    #[arg(long, value_name = "LENGTHS", value_delimiter = ',', value_parser = length)]
    lengths: Vec<usize>,
    /// How many GPUs
    #[arg(long, value_delimiter = ',', default_value = "2,4,8,16,64,256,1024")]
    ranks: Vec<usize>,
    /// How the work is spread: ring, all-gather, all-to-all, hybrid (ring within a node, all-to-all
    /// between nodes)
    #[arg(long, value_delimiter = ',', default_value = "ring,all-gather,all-to-all,hybrid")]
    variants: Vec<Variant>,
    /// The forward pass alone, without gradients
    #[arg(long)]
    forward: bool,
    /// GPUs of a node
    #[arg(long, value_name = "GPUS", default_value_t = 8)]
    node: usize,
    /// The links within a node: nvlink4, nvlink5, pcie5, or GB/s in one direction and microseconds, as
    /// in 400:3
    #[arg(long, value_name = "LINK", default_value = "nvlink4")]
    inside: Link,
    /// The links between nodes, one for each GPU: hdr, ndr, xdr (InfiniBand of 200, 400 and 800 Gb/s),
    /// or numbers as above
    #[arg(long, value_name = "LINK", default_value = "ndr")]
    between: Link,
    /// GB of memory that a GPU has
    #[arg(long, value_name = "GB", default_value_t = 141.0)]
    memory: f64,
    /// Kernel times to predict from: results of `bench --set scale --json`, or a file of --save-times;
    /// of several runs, which may be given one by one, the geometric mean [default: those of two H200]
    #[arg(long, value_name = "FILE")]
    times: Vec<PathBuf>,
    /// Write the kernel times as a small file, and predict nothing
    #[arg(long, value_name = "FILE", conflicts_with_all = ["plot", "json"])]
    save_times: Option<PathBuf>,
    /// Draw the predictions
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Predicted<'a> {
    gpu: &'a str,
    source: &'a str,
    cluster: Cluster,
    memory_bytes: u64,
    predictions: &'a [Prediction],
    refusals: &'a [Refusal],
    choices: &'a [Choice],
    plot: Option<&'a PathBuf>,
}

/// A length in words: 4096, 128k, 10m.
fn length(text: &str) -> Result<usize, String> {
    let (number, unit) = match text.strip_suffix(['k', 'K']) {
        Some(number) => (number, 1 << 10),
        None => text.strip_suffix(['m', 'M']).map_or((text, 1), |number| (number, 1 << 20)),
    };
    let count = number.parse::<usize>().ok().and_then(|it| it.checked_mul(unit));
    count.ok_or_else(|| format!("`{text}` is no length: expected a number, 128k or 10m"))
}

pub(crate) fn run(arguments: &Arguments) -> Result<Answer, Box<dyn Error>> {
    let times = match &arguments.times[..] {
        [] => Times::embedded(),
        paths => {
            Times::mean(&paths.iter().map(|it| Times::read(it)).collect::<Result<Vec<_>, _>>()?)?
        }
    };
    if let Some(path) = &arguments.save_times {
        write(path, &times.text())?;
        let text = format!("{} times written to {}\n", times.measured.len(), path.display());
        return Ok(Answer { text, passed: true });
    }
    if !arguments.memory.is_finite() || arguments.memory <= 0.0 {
        return Err(format!("a GPU has no {} GB of memory", arguments.memory).into());
    }
    if arguments.problem.pass == Pass::Backward {
        return Err("both passes are predicted: leave `backward` out, or give --forward".into());
    }
    let setting = Setting {
        times,
        cluster: Cluster::new(arguments.node, arguments.inside, arguments.between)?,
        memory_bytes: (arguments.memory * 1e9) as u64,
        backward: !arguments.forward,
    };
    let (mut predictions, mut refusals, mut choices) = (Vec::new(), Vec::new(), Vec::new());
    for problem in problems(arguments) {
        for &ranks in &arguments.ranks {
            let begin = predictions.len();
            for &variant in &arguments.variants {
                match scale::predict(&setting, &problem, ranks, variant)? {
                    Ok(prediction) => predictions.push(prediction),
                    Err(refusal) => refusals.push(refusal),
                }
            }
            choices.push(scale::choose(&problem, ranks, &predictions[begin..]));
        }
    }
    if predictions.is_empty() {
        let first = refusals.first().map_or("there is no variant", |it| it.reason.as_str());
        return Err(format!("nothing can be predicted: {first}").into());
    }
    if let Some(path) = &arguments.plot {
        write(path, &scale::plot(&predictions))?;
    }
    let predicted = Predicted {
        gpu: &setting.times.gpu,
        source: &setting.times.source,
        cluster: setting.cluster,
        memory_bytes: setting.memory_bytes,
        predictions: &predictions,
        refusals: &refusals,
        choices: &choices,
        plot: arguments.plot.as_ref(),
    };
    Answer::of(arguments.json, &predicted, true, || text(arguments, &predicted))
}

/// The problem at every length that is asked for.
fn problems(arguments: &Arguments) -> Vec<Problem> {
    let at = |length: &usize| {
        let mut problem = arguments.problem.clone();
        (problem.query_length, problem.key_length) = (*length, *length);
        problem
    };
    match &arguments.lengths[..] {
        [] => vec![arguments.problem.clone()],
        lengths => lengths.iter().map(at).collect(),
    }
}

fn text(arguments: &Arguments, predicted: &Predicted<'_>) -> String {
    let Predicted { gpu, source, cluster, predictions, refusals, choices, plot, .. } = predicted;
    let mut text = terminal::fields(&[
        ("kernels", format!("{gpu}, {source}")),
        ("inside", format!("nodes of {}: {}", cluster.node, cluster.inside)),
        ("between", format!("nodes: {}", cluster.between)),
    ]);
    for problem in problems(arguments) {
        let problem = problem.text();
        text += &format!("\n{}\n", terminal::paint(terminal::HEADING, &problem));
        let its = predictions.iter().filter(|it| it.problem == problem);
        let rows: Vec<_> = its.map(|it| row(it, choices)).collect();
        let heading = [
            "GPUs",
            "variant",
            "forward ms",
            "backward ms",
            "hidden",
            "sent",
            "memory",
            "of ideal",
        ];
        text += &terminal::table(&heading, &rows);
        text += "\n";
        for choice in choices.iter().filter(|it| it.problem == problem) {
            let name = choice.variant.map_or("nothing", Variant::name);
            text +=
                &terminal::paragraph(&format!("{} GPUs: {name}; {}", choice.ranks, choice.reason));
        }
        for variant in &arguments.variants {
            let is_its = |it: &&Refusal| it.problem == problem && it.variant == *variant;
            let its: Vec<&Refusal> = refusals.iter().filter(is_its).collect();
            if let [first, ..] = its[..] {
                let ranks: Vec<String> = its.iter().map(|it| it.ranks.to_string()).collect();
                let (ranks, reason) = (ranks.join(", "), &first.reason);
                text +=
                    &terminal::paragraph(&format!("{ranks} GPUs: no {variant}, since {reason}"));
            }
        }
    }
    if let Some(path) = plot {
        text += &format!("\nwritten {}\n", path.display());
    }
    text
}

fn row(it: &Prediction, choices: &[Choice]) -> Vec<(anstyle::Style, String)> {
    let is_its = |choice: &&Choice| choice.problem == it.problem && choice.ranks == it.ranks;
    let chosen =
        choices.iter().find(is_its).is_some_and(|choice| choice.variant == Some(it.variant));
    let memory = if it.fits { terminal::PLAIN } else { terminal::BAD };
    let name = match it.groups {
        groups if it.variant == Variant::Hybrid => {
            format!("hybrid {groups} x {}", it.ranks / groups)
        }
        _ => it.variant.name().to_owned(),
    };
    vec![
        terminal::plain(it.ranks),
        (if chosen { terminal::GOOD } else { terminal::PLAIN }, name),
        terminal::plain(milliseconds(it.forward.total)),
        terminal::plain(it.backward.map_or("-".to_owned(), |it| milliseconds(it.total))),
        terminal::plain(format!("{:.0} %", 100.0 * it.overlap)),
        terminal::plain(terminal::bytes(it.sent_bytes.into())),
        (memory, terminal::bytes(it.memory_bytes.into()) + if it.fits { "" } else { "!" }),
        terminal::plain(format!("{:.0} %", 100.0 * it.efficiency)),
    ]
}

/// Three digits at least, and no more than are needed.
fn milliseconds(time: f64) -> String {
    match time {
        100.0.. => format!("{time:.0}"),
        10.0.. => format!("{time:.1}"),
        1.0.. => format!("{time:.2}"),
        _ => format!("{time:.3}"),
    }
}
