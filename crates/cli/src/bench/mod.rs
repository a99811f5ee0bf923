//! `flashcore bench`: kernels against each other and against peers, in one process.

mod table;

use std::error::Error;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use flashcore::gpu::Chip;
use flashcore::{Problem, Progress};
use harness::bench::{Candidate, Observer, Options};
use harness::problems::{NAMED, ProblemSet};
use harness::report::compare::compare;
use harness::report::{Cache, Cell, Results, chart, html, write};
use harness::statistics::Difference;
use serde::Serialize;

use crate::progress::Bar;
use crate::{Answer, destination, terminal};

/// Measure kernels against each other and against peers
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    action: Option<Action>,
    #[command(flatten)]
    measure: Measure,
}

#[derive(Subcommand)]
enum Action {
    /// Say which differences between two runs are more than noise
    Compare(CompareArguments),
    /// Show results that were written before, or draw them anew
    Report(ReportArguments),
    /// List the sets of problems
    Sets,
}

/// Who is measured with gradients.
const WITH_GRADIENTS: &str = "flashcore,cudnn,fa4";

#[derive(Args)]
struct Measure {
    /// A set of problems by name (see `bench sets`), or a file with one on each line
    #[arg(long, default_value = "paper")]
    set: String,
    /// A problem instead, such as b=2,h=16,s=4096,d=128,bf16,causal; may be given many times
    #[arg(long, value_name = "PROBLEM", conflicts_with = "set")]
    problem: Vec<Problem>,
    /// Who is measured: flashcore, forward, prefill, decode, mma, mma-half, scalar, backward, configurations,
    /// pageN (one query over pages of N keys), invariant (bits that do not depend on the batch), cudnn, fa2, fa3, fa4, efficient, flex, jax;
    /// NAME=CANDIDATE gives one another name
    /// [default: flashcore,cudnn,fa3; flashcore,cudnn,fa4 with gradients, which fa3 does not have]
    #[arg(long, value_delimiter = ',', value_parser = Candidate::parse, hide_default_value = true,
          default_value = "flashcore,cudnn,fa3",
          default_value_ifs = [("backward", "true", WITH_GRADIENTS), ("step", "true", WITH_GRADIENTS)])]
    candidates: Vec<Candidate>,
    /// Measure the backward pass of the problems: from the gradient of the output to those of query,
    /// key and value (peers: cudnn, fa2, fa4, efficient)
    #[arg(long)]
    backward: bool,
    /// Measure the forward and the backward pass together, as one step of training has them; up to
    /// 2048 queries captured in a graph, so that nobody's host is measured (the same peers)
    #[arg(long, conflicts_with_all = ["backward", "same"])]
    step: bool,
    /// The same with gradients that are the same bit for bit from run to run
    #[arg(long, requires = "backward")]
    deterministic: bool,
    /// Samples of each candidate
    #[arg(long, default_value_t = 11)]
    rounds: usize,
    /// The second-level cache before each call
    #[arg(long, value_enum, default_value_t = Caches::Cold)]
    cache: Caches,
    /// Calls of a sample, captured in a graph: for problems that a launch takes longer than
    #[arg(long, value_name = "CALLS", default_value_t = 1)]
    graph: usize,
    /// Chooses contents and the calls whose output is validated
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// The Python that has the peers
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: PathBuf,
    /// Write PREFIX.json, PREFIX.html and the plots PREFIX-*.svg
    #[arg(long, value_name = "PREFIX")]
    output: Option<PathBuf>,
    /// Say what would be measured, without a GPU
    #[arg(long, conflicts_with = "output")]
    plan: bool,
    /// Measure the first candidate against itself so many times: how often is that within noise?
    #[arg(long, value_name = "TRIALS", conflicts_with_all = ["plan", "output"])]
    same: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Caches {
    Cold,
    Hot,
    Both,
}

#[derive(Args)]
struct CompareArguments {
    /// Results of `bench --output`
    first: PathBuf,
    /// Results of another run
    second: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct ReportArguments {
    /// Results of `bench --output`
    results: PathBuf,
    /// Write PREFIX.html and the plots PREFIX-*.svg
    #[arg(long, value_name = "PREFIX")]
    output: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<Answer, Box<dyn Error>> {
    match &arguments.action {
        Some(Action::Compare(files)) => {
            let [first, second] = [&files.first, &files.second].map(|path| Results::read(path));
            let comparison = compare(&first?, &second?);
            Answer::of(files.json, &comparison, true, || table::comparison(&comparison))
        }
        Some(Action::Report(files)) => {
            let results = Results::read(&files.results)?;
            let mut text = table::results(&results);
            if let Some(prefix) = &files.output {
                text += &draw(prefix, &results)?;
            }
            Ok(Answer { text, passed: true })
        }
        Some(Action::Sets) => {
            let fields = NAMED.map(|(name, about)| (name, about.to_owned()));
            Ok(Answer { text: terminal::fields(&fields), passed: true })
        }
        None => measure(&arguments.measure),
    }
}

impl Measure {
    fn options(&self) -> Result<Options, Box<dyn Error>> {
        let mut set = match &self.problem[..] {
            [] => ProblemSet::find(&self.set)?,
            problems => ProblemSet { name: "given".to_owned(), problems: problems.to_vec() },
        };
        if self.backward || self.step {
            set.problems = set.problems.into_iter().map(Problem::backward).collect();
        }
        if self.deterministic {
            set.problems = set.problems.into_iter().map(Problem::deterministic).collect();
        }
        Ok(Options {
            set,
            candidates: self.candidates.clone(),
            rounds: self.rounds,
            caches: match self.cache {
                Caches::Cold => vec![Cache::Cold],
                Caches::Hot => vec![Cache::Hot],
                Caches::Both => vec![Cache::Cold, Cache::Hot],
            },
            calls: self.graph,
            seed: self.seed,
            step: self.step,
            python: self.python.clone(),
        })
    }
}

/// Prints a line for each finished problem, above the bar.
impl Observer for Bar {
    fn begin(&mut self, cells: usize) {
        Progress::begin(self, cells as u64);
    }

    fn note(&mut self, text: &str) {
        self.warn(text);
    }

    fn cell(&mut self, results: &Results, cell: &Cell) {
        Bar::note(self, &table::line(results, cell));
        self.advance(1);
    }
}

fn measure(arguments: &Measure) -> Result<Answer, Box<dyn Error>> {
    let options = arguments.options()?;
    if arguments.plan {
        return plan(&options, arguments.json);
    }
    if let Some(trials) = arguments.same {
        return same(options, trials, arguments.json);
    }
    if let Some(prefix) = &arguments.output {
        destination::admit_with_folder(&with_suffix(prefix, ".json"))?;
    }
    let mut screen = Bar::new("measuring");
    let results = harness::bench::run(&options, &mut screen)?;
    drop(screen);
    if results.cells.is_empty() {
        return Err("nothing was measured: no candidate ran any of the problems".into());
    }
    let passed = results.wrong_outputs().is_empty() && results.above_roofline().is_empty();
    let mut written = String::new();
    if let Some(prefix) = &arguments.output {
        let path = with_suffix(prefix, ".json");
        write(&path, &serde_json::to_string(&results)?)?;
        written = format!("written {}\n", path.display()) + &draw(prefix, &results)?;
    }
    Answer::of(arguments.json, &results, passed, || table::results(&results) + &written)
}

/// Writes the page and the plots, and says where.
fn draw(prefix: &Path, results: &Results) -> Result<String, Box<dyn Error>> {
    let mut files = vec![
        (".html", html::page(results)),
        ("-speed.svg", chart::speed(results)),
        ("-spread.svg", chart::spread(results)),
    ];
    if !results.ratios().is_empty() {
        files.push(("-ratios.svg", chart::ratios(results)));
    }
    files.extend(chart::roofline(results).map(|drawing| ("-roofline.svg", drawing)));
    let mut text = String::new();
    for (suffix, contents) in files {
        let path = with_suffix(prefix, suffix);
        write(&path, &contents)?;
        text += &format!("written {}\n", path.display());
    }
    Ok(text)
}

fn with_suffix(prefix: &Path, suffix: &str) -> PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

#[derive(Serialize)]
struct PlanJson<'a> {
    planned: &'a [Planned],
}

#[derive(Serialize)]
struct Planned {
    problem: String,
    candidate: String,
    kernel: Option<String>,
    blocks: Option<u32>,
    note: Option<String>,
}

/// Shows what would be measured on an H200, or on the GPU of this machine.
fn plan(options: &Options, json: bool) -> Result<Answer, Box<dyn Error>> {
    let chip = cuda::DeviceInfo::query(0).map_or(Chip::H200, |info| Chip::of(&info));
    let mut lines = Vec::new();
    for problem in &options.set.problems {
        for candidate in &options.candidates {
            let mut line = Planned {
                problem: problem.text(),
                candidate: candidate.name.clone(),
                kernel: None,
                blocks: None,
                note: None,
            };
            // In a step, a candidate named for the forward pass gets the planner's choice for the
            // gradients.
            let ours = match options.step {
                true => candidate.of_pass(problem.pass),
                false => candidate.clone(),
            };
            match (candidate.peer(), ours.plan(&chip, problem)) {
                (Some(peer), _) => line.note = Some(peer.about.to_owned()),
                (None, Err(reason)) => line.note = Some(reason),
                (None, Ok((plan, _))) => {
                    let choice = plan.chosen.choice;
                    line.blocks = choice.map(|choice| choice.launches[choice.main].blocks);
                    line.kernel = plan.chosen.configuration;
                }
            }
            lines.push(line);
        }
    }
    if json {
        return Answer::json(&PlanJson { planned: &lines }, true);
    }
    let rows: Vec<_> = lines
        .into_iter()
        .map(|line| {
            let what = line.kernel.or(line.note).unwrap_or_default();
            let blocks = line.blocks.map_or("-".to_owned(), |blocks| blocks.to_string());
            vec![
                terminal::plain(line.problem),
                terminal::plain(line.candidate),
                terminal::plain(blocks),
                terminal::plain(what),
            ]
        })
        .collect();
    let text = terminal::table(&["problem", "candidate", "blocks", "what runs"], &rows);
    let rounds = options.rounds;
    Ok(Answer { text: format!("{text}{rounds} rounds in one process on a GPU\n"), passed: true })
}

#[derive(Serialize)]
struct Trials {
    trials: usize,
    within_noise: usize,
    /// The ratios and their noises, problem after problem.
    differences: Vec<Difference>,
}

/// Measures one kernel under two names.
fn same(mut options: Options, trials: usize, json: bool) -> Result<Answer, Box<dyn Error>> {
    let kind = options.candidates[0].kind.clone();
    let named = |name: &str| Candidate { name: name.to_owned(), kind: kind.clone() };
    options.candidates = vec![named("first"), named("second")];
    let mut differences = Vec::new();
    let mut screen = Bar::new("measuring");
    for trial in 0..trials.max(1) {
        options.seed = trial as u64;
        let results = harness::bench::run(&options, &mut screen)?;
        for cell in &results.cells {
            let pair = ["first", "second"].map(|name| cell.find(name, options.caches[0]));
            if let [Some(first), Some(second)] = pair {
                differences.push(Difference::between(&first.samples, &second.samples));
            }
        }
    }
    drop(screen);
    let within_noise = differences.iter().filter(|it| !it.is_significant()).count();
    let trials = differences.len();
    let passed = 20 * within_noise >= 19 * trials;
    let noises: Vec<f64> = differences.iter().map(|it| 100.0 * it.noise).collect();
    Answer::of(json, &Trials { trials, within_noise, differences }, passed, || {
        terminal::fields(&[
            ("trials", format!("{trials}, the same kernel under two names")),
            ("within noise", format!("{within_noise} ({})", terminal::verdict(passed))),
            ("noise", format!("{:.2} % in the median", harness::statistics::median(&noises))),
        ])
    })
}
