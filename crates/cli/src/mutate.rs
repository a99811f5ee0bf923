//! `flashcore mutate`: mutation testing of a kernel, one mistake at a time, which some check must
//! detect.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write;

use clap::Args;
use flashcore::Progress;
use kernels::Configuration;
use ptx::Target;
use serde::Serialize;
use testing::mutant::{Kind, KnownEquivalents, Score, Survey, subjects, survey};

use crate::inspect::choose;
use crate::progress::Bar;
use crate::{Answer, terminal};

/// The share of value mutants that must be detected; of all other mutants, every one.
const VALUES_NOTICED: f64 = 0.95;

/// Put one mistake at a time into a kernel and see that it is noticed, no GPU needed
#[derive(Args)]
pub(crate) struct Arguments {
    /// A configuration as `flashcore inspect` lists them, or a family, for which small
    /// configurations stand that have all its parts
    kernel: String,
    /// Try so many deletions of fences, waits, arrivals and barriers [default: all]
    #[arg(long, value_name = "COUNT")]
    deleted: Option<usize>,
    /// Try so many that are weakened instead: another parity, a count off by one [default: all]
    #[arg(long, value_name = "COUNT")]
    weakened: Option<usize>,
    /// Try so many wrong comparisons, constants, addresses, coordinates and stores
    #[arg(long, value_name = "COUNT", default_value_t = 100)]
    values: usize,
    /// Try every mutant there is: hours
    #[arg(long, conflicts_with_all = ["deleted", "weakened", "values"])]
    all: bool,
    /// Only those of statements whose place in the source has this in it: `softmax.rs`, or a line
    #[arg(long, value_name = "PLACE", default_value = "")]
    at: String,
    /// Chooses the ones that are tried
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Arguments {
    fn count(&self, kind: Kind) -> usize {
        match kind {
            _ if self.all => usize::MAX,
            Kind::Delete => self.deleted.unwrap_or(usize::MAX),
            Kind::Weaken => self.weakened.unwrap_or(usize::MAX),
            Kind::Value => self.values,
        }
    }

    fn kernels(&self) -> Result<Vec<Configuration>, String> {
        let mut family = subjects();
        family.retain(|it| it.family() == self.kernel || it.name() == self.kernel);
        if !family.is_empty() {
            return Ok(family);
        }
        Ok(vec![choose::kernel(&self.kernel, Target::SM_90A)?])
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<Answer, Box<dyn Error>> {
    let kernels = arguments.kernels()?;
    let bar = Bar::new("mutating");
    let mut surveys = Vec::new();
    for kernel in &kernels {
        let begin = |count: usize| bar.begin(count as u64);
        let done = || bar.advance(1);
        let chosen = (|kind| arguments.count(kind), arguments.seed);
        let found = survey(kernel, chosen, &arguments.at, KnownEquivalents::Run, begin, done);
        surveys.push(found.map_err(|error| format!("{}: {error}", kernel.name()))?);
    }
    drop(bar);
    if surveys.iter().all(|survey| survey.outcomes.is_empty()) {
        let Arguments { kernel, at, .. } = arguments;
        let possible: usize = surveys.iter().flat_map(|survey| survey.possible.values()).sum();
        return Err(match possible {
            0 => format!("no statement of {kernel} at `{at}` can be changed"),
            _ => format!("none of the {possible} mutants of {kernel} would be tried"),
        }
        .into());
    }
    let reports: Vec<Report> = surveys.iter().map(Report::new).collect();
    let passed = reports.iter().all(|it| it.passed);
    let json = Reports { passed, kernels: &reports };
    Answer::of(arguments.json, &json, passed, || describe(&reports))
}

/// What became of the mutants of each kernel.
#[derive(Serialize)]
struct Reports<'a> {
    passed: bool,
    kernels: &'a [Report],
}

/// What became of the mutants of a kernel.
#[derive(Serialize)]
struct Report {
    family: &'static str,
    kernel: String,
    passed: bool,
    kinds: Vec<Line>,
    survivors: Vec<Survivor>,
}

/// What became of those of a kind.
#[derive(Serialize)]
struct Line {
    kind: &'static str,
    possible: usize,
    tried: usize,
    killed: usize,
    /// The number of mutants that each check detected.
    by: BTreeMap<String, usize>,
    equivalent: usize,
    unreached: usize,
    survived: usize,
    /// The fraction killed of those that are reached and not equivalent; absent if there are none.
    score: Option<f64>,
}

/// A mutant that nobody noticed.
#[derive(Serialize)]
struct Survivor {
    kind: &'static str,
    change: String,
    place: String,
    /// The statement, in the order of the program.
    statement: usize,
}

impl Report {
    fn new(survey: &Survey) -> Self {
        let line = |kind: Kind| {
            let score = survey.score(kind);
            Line {
                kind: kind.name(),
                possible: survey.possible.get(&kind).copied().unwrap_or(0),
                tried: score.tried,
                killed: score.noticed(),
                by: score.killed.iter().map(|(by, count)| (by.to_string(), *count)).collect(),
                equivalent: score.equivalent,
                unreached: score.unreached,
                survived: score.survived,
                score: score.share(),
            }
        };
        let survivors = survey.survivors().map(|mutant| Survivor {
            kind: mutant.kind.name(),
            change: format!("{}: {}", mutant.operator, mutant.detail),
            place: mutant.place.to_string(),
            statement: mutant.site,
        });
        let good = |kind: Kind| match (kind, survey.score(kind)) {
            (Kind::Value, score) => score.share().is_none_or(|it| it >= VALUES_NOTICED),
            (Kind::Delete | Kind::Weaken, Score { survived, .. }) => survived == 0,
        };
        Report {
            family: survey.family,
            kernel: survey.kernel.clone(),
            passed: Kind::ALL.into_iter().all(good),
            kinds: Kind::ALL.into_iter().map(line).collect(),
            survivors: survivors.collect(),
        }
    }
}

fn describe(reports: &[Report]) -> String {
    let mut text = String::new();
    for report in reports {
        let _ = writeln!(text, "{}", terminal::paint(terminal::HEADING, &report.kernel));
        let rows: Vec<_> = report.kinds.iter().map(Line::cells).collect();
        let heading = [
            "kind",
            "possible",
            "tried",
            "noticed",
            "equivalent",
            "unreached",
            "survived",
            "score",
        ];
        text += &terminal::table(&heading, &rows);
        let mut by: BTreeMap<&str, usize> = BTreeMap::new();
        for (killer, count) in report.kinds.iter().flat_map(|line| &line.by) {
            *by.entry(killer).or_default() += count;
        }
        let by: Vec<String> =
            by.iter().map(|(killer, count)| format!("{killer} {count}")).collect();
        let _ = writeln!(text, "noticed by {}", by.join(", "));
        for Survivor { kind, change, place, .. } in &report.survivors {
            let _ = writeln!(text, "survived: {kind}, {change}\n  at {place}");
        }
        let _ = writeln!(text, "{}\n", terminal::verdict(report.passed));
    }
    text
}

impl Line {
    fn cells(&self) -> Vec<(anstyle::Style, String)> {
        let share = self.score.map_or("-".to_owned(), |score| format!("{:.1} %", 100.0 * score));
        let style = if self.survived == 0 { terminal::GOOD } else { terminal::PLAIN };
        let numbers = [
            self.possible,
            self.tried,
            self.killed,
            self.equivalent,
            self.unreached,
            self.survived,
        ];
        let numbers = numbers.map(terminal::plain);
        [terminal::plain(self.kind)].into_iter().chain(numbers).chain([(style, share)]).collect()
    }
}
