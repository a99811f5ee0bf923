//! `flashcore sim`: a kernel on the simulator, under hostile schedules.

mod report;
mod size;

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use ::sim::{Budget, Measure, Mode, Options, Policy};
use clap::{Args, ValueEnum};
use flashcore::{Problem, Progress};
use ptx::Target;
use testing::scene::{MAX_SEEDS, Scene, schedules};

use self::report::{Report, Timeline};
use self::size::SizeArguments;
use crate::Answer;
use crate::inspect::choose;
use crate::progress::Bar;

/// Simulate a kernel on the CPU: values, hazards, counts and a timeline, no GPU needed
#[derive(Args)]
pub(crate) struct Arguments {
    /// A configuration or a family by name, as `flashcore inspect` lists them; with --problem a
    /// family, or nothing for what the planner chooses
    #[arg(required_unless_present = "problem")]
    kernel: Option<String>,
    /// What is computed, such as h=2,s=100,d=64,bf16,causal [default: something small that suits the
    /// kernel]
    #[arg(long, value_name = "PROBLEM")]
    problem: Option<Problem>,
    /// In which order things happen that have no order of their own
    #[arg(long, value_enum, default_value_t = PolicyChoice::All)]
    policy: PolicyChoice,
    /// How many seeds to run under each policy
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=MAX_SEEDS))]
    seeds: u64,
    /// Run this seed only: replays a failure
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Look for every kind of hazard [default]
    #[arg(long, conflicts_with = "values")]
    checked: bool,
    /// Values only: faster, and blind to races, proxies and what is initialised
    #[arg(long)]
    values: bool,
    /// Fail if more is counted, such as bank-conflicts=0; may be repeated
    #[arg(long = "budget", value_name = "MEASURE=NUMBER", value_parser = parse_limit)]
    budgets: Vec<(Measure, u64)>,
    /// Write a timeline for Perfetto, by a simple model of costs
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    // Last, for its heading takes in what follows.
    #[command(flatten)]
    size: SizeArguments,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PolicyChoice {
    /// Copies and products complete the moment they are issued
    Earliest,
    /// They complete when nothing else can go on
    Latest,
    /// Everything is interleaved at random
    Random,
    /// Each of these
    All,
}

impl PolicyChoice {
    fn policies(self) -> Vec<Policy> {
        match self {
            PolicyChoice::Earliest => vec![Policy::Earliest],
            PolicyChoice::Latest => vec![Policy::Latest],
            PolicyChoice::Random => vec![Policy::Random],
            PolicyChoice::All => Policy::HOSTILE.to_vec(),
        }
    }
}

/// A measure as it is written in a command.
fn hyphenated(measure: Measure) -> String {
    measure.name().replace(' ', "-")
}

fn parse_limit(text: &str) -> Result<(Measure, u64), String> {
    let Some((name, limit)) = text.split_once('=') else {
        return Err(format!("`{text}` is not of the form MEASURE=NUMBER"));
    };
    let measure = Measure::ALL.into_iter().find(|measure| hyphenated(*measure) == name);
    let measure = measure.ok_or_else(|| {
        let known = Measure::ALL.map(hyphenated).join(", ");
        format!("`{name}` is not counted; counted are {known}")
    })?;
    let limit = limit.parse().map_err(|_| format!("`{limit}` is not a whole number"))?;
    Ok((measure, limit))
}

pub(crate) fn run(arguments: &Arguments) -> Result<Answer, Box<dyn Error>> {
    let bar = Bar::new("simulating");
    let (kernel, scene) = match (&arguments.problem, &arguments.kernel) {
        (Some(problem), family) => arguments.size.of_problem(problem, family.as_deref())?,
        (None, name) => {
            let kernel = choose::kernel(name.as_deref().unwrap_or_default(), Target::SM_90A)?;
            (kernel, arguments.size.scene(&kernel)?)
        }
    };
    let mode = if arguments.values { Mode::Values } else { Mode::Checked };
    let budget = (arguments.budgets.iter())
        .fold(Budget::default(), |budget, (measure, limit)| budget.at_most(*measure, *limit));
    let policies = arguments.policy.policies();
    let seeds = arguments.seed.map_or(0..arguments.seeds, |seed| seed..seed.saturating_add(1));
    let schedules = schedules(&policies, seeds);

    // First, since whether the file can be written does not depend on what is found.
    let timeline = match &arguments.trace {
        Some(path) => Some(draw(&scene, path)?),
        None => None,
    };
    bar.begin(schedules.len() as u64);
    let options = Options { mode, budget, ..Options::default() };
    let outcomes = scene.sweep(&schedules, &options, || bar.advance(1));
    drop(bar);

    let replay = |policy: Policy, seed: u64| {
        let size = arguments.size.describe();
        let values = if arguments.values { " --values" } else { "" };
        let limits: String = (arguments.budgets.iter())
            .map(|(measure, limit)| format!(" --budget {}={limit}", hyphenated(*measure)))
            .collect();
        let name = match &arguments.problem {
            Some(problem) => format!("{} --problem {}", kernel.family(), quoted(&problem.text())),
            None => kernel.name(),
        };
        format!("flashcore sim {name} --policy {policy} --seed {seed}{size}{values}{limits}")
    };
    let report = Report::new(&kernel, &scene, mode, &policies, &outcomes, timeline, replay);
    let passed = report.passed;
    Answer::of(arguments.json, &report, passed, || report.describe())
}

/// A word as a shell takes it: functions have spaces, brackets and dollars.
fn quoted(word: &str) -> String {
    let plain = |it: char| it.is_ascii_alphanumeric() || "=:,._-".contains(it);
    if word.chars().all(plain) { word.to_owned() } else { format!("'{word}'") }
}

/// Writes the timeline of a run under the model of costs.
fn draw(scene: &Scene, path: &std::path::Path) -> Result<Timeline, Box<dyn Error>> {
    let options = Options { trace: true, ..Options::values(Policy::Modelled, 0) };
    let (_, run) = scene.run(&options).map_err(|failure| format!("no timeline: {failure}"))?;
    let trace = run.trace.unwrap_or_default();
    fs::write(path, trace.to_json())
        .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    let cycles = run.counts.get(Measure::Cycles);
    Ok(Timeline { file: path.display().to_string(), spans: trace.spans().len(), cycles })
}
