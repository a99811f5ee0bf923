//! `flashcore tune`: search for the best configurations, and the tuning file that the planner reads.

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use flashcore::family::tuning::TuningFile;
use flashcore::gpu::Chip;
use flashcore::{Pass, Problem, Progress};
use harness::bench::{Candidate, CandidateKind};
use harness::problems::ProblemSet;
use harness::tune::cost::{BlockCost, predict};
use harness::tune::effects::{Effect, effects};
use harness::tune::log::Log;
use harness::tune::search::{SearchOptions, SearchResult, Start, search, sweep};
use harness::tune::space::{Gene, Genome, neighbours, possible};
use harness::tune::{GpuMeter, entry, save};
use kernels::Configuration;
use serde::Serialize;

use crate::progress::Bar;
use crate::{Answer, KernelChoice, destination, terminal};

/// Search for the best configurations of the kernels that serve problems
#[derive(Args)]
pub(crate) struct Arguments {
    /// What to tune for, such as b=2,h=32,s=8192,d=64,bf16; may be given many times
    #[arg(long, value_name = "PROBLEM", required_unless_present = "set")]
    problem: Vec<Problem>,
    /// A set of problems, as `bench` knows them
    #[arg(long, conflicts_with = "problem")]
    set: Option<String>,
    #[command(flatten)]
    kernel: KernelChoice,
    /// Seconds in all, shared by the problems
    #[arg(long, default_value_t = 240)]
    seconds: u64,
    /// How the search begins
    #[arg(long, value_enum, default_value_t = StartChoice::Rules)]
    start: StartChoice,
    /// Makes it the same search again, but for the times
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Where every configuration is noted; a search with the same log goes on where it was
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Where the result goes [default: $FLASHCORE_TUNING, or tuning.json in the cache]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Rank configurations by the cost model alone, without a GPU
    #[arg(long, conflicts_with_all = ["seconds", "start", "seed", "log", "output"])]
    model: bool,
    /// How many of the best the model shows
    #[arg(long, default_value_t = 10, requires = "model")]
    show: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum StartChoice {
    /// From the rules' choice and a few at random
    Rules,
    /// From the poorest configuration alone, to see that the search works
    Poor,
}

/// What was found, problem by problem.
#[derive(Serialize)]
struct Tuned<'a, T> {
    problems: &'a [T],
}

#[derive(Serialize)]
struct Line {
    problem: String,
    #[serde(flatten)]
    found: SearchResult,
    effects: Vec<Effect>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<Answer, Box<dyn Error>> {
    let problems = match &arguments.set {
        Some(name) => ProblemSet::find(name)?.problems,
        None => arguments.problem.clone(),
    };
    for problem in problems.iter().filter(|it| it.pass == Pass::Backward) {
        refuse_backward(&arguments.kernel.candidate(problem.pass)?, problem)?;
    }
    if arguments.model {
        return model(arguments, &problems);
    }
    let gpu = harness::open_gpu().map_err(|error| {
        format!(
            "there is no GPU to tune for: {error}; `--model` ranks configurations by the cost \
             model alone"
        )
    })?;
    let output = arguments.output.clone().or_else(TuningFile::location);
    let output = output.ok_or("there is no place for the result: give --output")?;
    destination::admit_with_folder(&output)?;
    TuningFile::read(&output).map_err(|reason| format!("{}: {reason}", output.display()))?;
    let mut log = match &arguments.log {
        Some(path) => Log::open(path)?,
        None => Log::new(),
    };
    let chip = gpu.chip();
    let (mut lines, mut kept, mut told_only) = (Vec::new(), 0, 0);
    let (begun, seconds) = (Instant::now(), Duration::from_secs(arguments.seconds));
    for (index, problem) in problems.iter().enumerate() {
        // What one problem takes beyond its share is taken from those behind it.
        let left = seconds.saturating_sub(begun.elapsed());
        if left.is_zero() {
            break;
        }
        let budget = left / (problems.len() - index) as u32;
        let rules = chosen(&arguments.kernel.candidate(problem.pass)?, &chip, problem)?;
        let name = problem.text();
        let options = SearchOptions {
            start: match arguments.start {
                StartChoice::Rules => Start::Rules,
                StartChoice::Poor => Start::Poor,
            },
            budget,
            seed: arguments.seed,
            ..SearchOptions::default()
        };
        let mut meter = GpuMeter::new(&gpu, problem, arguments.seed)?;
        let bar = Bar::new("tuning");
        let mut told = |text: &str| bar.note(text);
        let found = match rules {
            Configuration::Forward(rules) => {
                search(&name, rules, &options, &mut meter, &mut log, &mut told)?
            }
            other => sweep(&name, other, &mut meter, &mut told)?,
        };
        drop(bar);
        // At once: a search that is cut short keeps what it has found.
        let entry = entry(&found, problem, &chip).filter(|_| found.better);
        kept += usize::from(entry.is_some());
        told_only += usize::from(found.better && entry.is_none());
        if let Some(entry) = entry {
            save(&output, &gpu, vec![entry])?;
        }
        let its: Vec<_> = log.records().iter().filter(|it| it.problem == name).cloned().collect();
        lines.push(Line { problem: name, found, effects: effects(&its) });
    }
    if arguments.json {
        return Answer::json(&Tuned { problems: &lines }, true);
    }
    let mut answer = describe(&lines);
    answer += &match kept {
        0 if told_only > 0 => String::new(),
        0 => "nothing is better than the rules by more than noise: no file is written\n".to_owned(),
        kept => format!("{kept} entries written to {}\n", output.display()),
    };
    if told_only > 0 {
        answer += &format!(
            "{told_only} found for kernels that the tuning file cannot express yet: not written\n"
        );
    }
    if lines.len() < problems.len() {
        let missed: Vec<String> = problems[lines.len()..].iter().map(Problem::text).collect();
        answer += &format!("no time was left for {}\n", missed.join(", "));
    }
    Ok(Answer { text: answer, passed: true })
}

/// Refuses backward problems: most have a single configuration, and the others cannot be timed here
/// yet.
fn refuse_backward(candidate: &Candidate, problem: &Problem) -> Result<(), Box<dyn Error>> {
    let kernel = chosen(candidate, &Chip::H200, problem)?;
    let name = kernel.name();
    Err(match neighbours(&kernel).len() {
        0 => format!(
            "there is nothing to tune for {problem}: {name} is the only configuration for its head \
             dims that registers and shared memory hold"
        ),
        count => format!(
            "{count} configurations are beside {name}, and gradients are not timed by `tune` yet: \
             `bench --backward --candidates` takes them by name"
        ),
    }
    .into())
}

/// The configuration that a candidate runs for a problem.
fn chosen(
    candidate: &Candidate,
    chip: &Chip,
    problem: &Problem,
) -> Result<Configuration, Box<dyn Error>> {
    let (plan, _) = candidate.plan(chip, problem)?;
    let choice = plan.chosen.choice.ok_or("it is no kernel of a GPU")?;
    Ok(*choice.kernel())
}

fn describe(lines: &[Line]) -> String {
    let rows: Vec<_> = lines
        .iter()
        .map(|Line { problem, found, .. }| {
            let (style, verdict) = match (found.better, found.speedup.ln() < -found.noise) {
                (true, _) => (terminal::GOOD, "better"),
                (false, true) => (terminal::BAD, "worse"),
                (false, false) => (terminal::PLAIN, "as good"),
            };
            vec![
                terminal::plain(problem),
                terminal::plain(format!("{:.3}", found.speedup)),
                terminal::plain(format!("{:.1} %", 100.0 * found.noise)),
                (style, verdict.to_owned()),
                terminal::plain(format!("{} of {}", found.measured, found.seen)),
                terminal::plain(format!("{:.0} s", found.seconds)),
                terminal::plain(found.best.name()),
            ]
        })
        .collect();
    let heading =
        ["problem", "of the rules' speed", "noise", "verdict", "measured", "time", "best found"];
    let mut text = terminal::table(&heading, &rows);
    for line in lines {
        text += &format!("\n{}\n", terminal::paint(terminal::HEADING, &line.problem));
        let shown: Vec<_> = line.effects.iter().filter(|it| it.pairs > 1).take(8).collect();
        let rows: Vec<_> = shown
            .into_iter()
            .map(|effect| {
                let [from, to] = effect.change;
                let [least, most] = effect.range.map(|it| 100.0 * (it - 1.0));
                vec![
                    terminal::plain(format!("{}: {from} to {to}", effect.gene.name())),
                    terminal::plain(format!("{:+.1} %", 100.0 * (effect.speedup - 1.0))),
                    terminal::plain(format!("{least:+.1} to {most:+.1} %")),
                    terminal::plain(effect.pairs),
                ]
            })
            .collect();
        text += &terminal::table(&["what helped", "speed", "range", "pairs"], &rows);
    }
    text
}

#[derive(Serialize)]
struct Ranked {
    problem: String,
    possible: usize,
    of: usize,
    best: Vec<Prediction>,
}

#[derive(Serialize)]
struct Prediction {
    configuration: String,
    milliseconds: f64,
    chosen_by_rules: bool,
}

/// The cost model's ranking, for an H200 or the GPU that is here.
fn model(arguments: &Arguments, problems: &[Problem]) -> Result<Answer, Box<dyn Error>> {
    let info = cuda::DeviceInfo::query(0).ok();
    let chip = info.as_ref().map_or(Chip::H200, Chip::of);
    let clock = info.map_or(1980.0, |info| f64::from(info.clock_kilohertz) / 1e3);
    let mut all = Vec::new();
    for problem in problems {
        let bar = Bar::new("simulating");
        let mut candidate = arguments.kernel.candidate(problem.pass)?;
        // The planner may choose another kernel, which is not what it was asked for here.
        if candidate.kind == CandidateKind::Planned {
            candidate = Candidate::parse("forward")?;
        }
        let kernel = chosen(&candidate, &chip, problem)?;
        let Configuration::Forward(rules) = kernel else {
            let family = kernel.family();
            return Err(format!("the model knows the forward kernel alone, not {family}").into());
        };
        // The model knows nothing about how code is laid out.
        let like_rules = Genome::of(&rules);
        let mut genomes = Genome::all();
        genomes.retain(|it| it.same_form(&like_rules));
        let forwards: Vec<_> = (genomes.iter().map(|it| it.configuration(&rules)))
            .filter(|forward| possible(forward).is_ok())
            .collect();
        bar.begin(forwards.len() as u64);
        // What a block costs does not depend on buffers and stages: each is counted once.
        let mut costs = std::collections::HashMap::new();
        let mut best = Vec::new();
        for forward in &forwards {
            let plain = Genome::of(forward).with(Gene::Stages, 2).with(Gene::QueryBuffers, 1);
            let cost = match costs.get(&plain) {
                Some(cost) => *cost,
                None => *costs.entry(plain).or_insert(BlockCost::count(forward)?),
            };
            let milliseconds = predict(forward, &cost, problem, &chip, clock)?;
            let chosen_by_rules = *forward == rules;
            best.push(Prediction { configuration: forward.name(), milliseconds, chosen_by_rules });
            bar.advance(1);
        }
        best.sort_by(|a, b| a.milliseconds.total_cmp(&b.milliseconds));
        best.truncate(arguments.show);
        let (possible, of) = (forwards.len(), genomes.len());
        all.push(Ranked { problem: problem.text(), possible, of, best });
    }
    if arguments.json {
        return Answer::json(&Tuned { problems: &all }, true);
    }
    let mut answer = String::new();
    for ranked in &all {
        let Ranked { problem, possible, of, best } = ranked;
        answer += &format!("{}\n", terminal::paint(terminal::HEADING, problem));
        answer += &format!("{possible} of {of} configurations are possible; by the model:\n");
        let rows: Vec<_> = best
            .iter()
            .map(|it| {
                let chosen = if it.chosen_by_rules { "the rules' choice" } else { "" };
                vec![
                    terminal::plain(&it.configuration),
                    terminal::plain(format!("{:.4}", it.milliseconds)),
                    (terminal::NAME, chosen.to_owned()),
                ]
            })
            .collect();
        answer += &terminal::table(&["configuration", "ms", ""], &rows);
    }
    Ok(Answer { text: answer, passed: true })
}
