//! The results of a kernel's simulated runs, for people and for programs.

use std::collections::BTreeMap;

use ::sim::{Counts, Failure, Measure, Mode, Policy};
use kernels::Configuration;
use serde::Serialize;
use testing::scene::{Outcome, Scene};

use crate::terminal;

#[derive(Serialize)]
pub(super) struct Report {
    family: &'static str,
    kernel: String,
    size: String,
    blocks: u32,
    threads: u32,
    checked: bool,
    pub(super) passed: bool,
    policies: Vec<Line>,
    timeline: Option<Timeline>,
}

/// The results of one scheduling policy.
#[derive(Serialize)]
struct Line {
    policy: String,
    passed: usize,
    seeds: usize,
    /// Over all seeds that ran to their end, as is the rest.
    max_error: Option<f64>,
    tolerance_used: Option<f64>,
    /// The largest of any seed, by measure.
    counts: BTreeMap<&'static str, u64>,
    /// Shared-memory instructions with bank conflicts.
    bank_conflicts: Vec<Conflict>,
    failure: Option<FirstFailure>,
}

/// Bank conflicts of one instruction.
#[derive(Serialize)]
struct Conflict {
    place: String,
    executions: u64,
    conflicts: u64,
}

/// The first seed that failed.
#[derive(Serialize)]
struct FirstFailure {
    seed: u64,
    /// The hazard's kind, if it was one.
    hazard: Option<&'static str>,
    message: String,
    replay: String,
}

#[derive(Serialize)]
pub(super) struct Timeline {
    pub(super) file: String,
    pub(super) spans: usize,
    pub(super) cycles: u64,
}

impl Report {
    pub(super) fn new(
        kernel: &Configuration,
        scene: &Scene,
        mode: Mode,
        policies: &[Policy],
        outcomes: &[Outcome],
        timeline: Option<Timeline>,
        replay: impl Fn(Policy, u64) -> String,
    ) -> Self {
        let line = |policy: &Policy| {
            let its: Vec<&Outcome> = outcomes.iter().filter(|it| it.policy == *policy).collect();
            Line::new(*policy, &its, |seed| replay(*policy, seed))
        };
        Report {
            family: kernel.family(),
            kernel: kernel.name(),
            size: scene.size.clone(),
            blocks: scene.grid,
            threads: scene.program.threads,
            checked: mode == Mode::Checked,
            passed: outcomes.iter().all(Outcome::passed),
            policies: policies.iter().map(line).collect(),
            timeline,
        }
    }

    pub(super) fn describe(&self) -> String {
        let watched = match self.checked {
            true => "values and every kind of hazard",
            false => "values, without races, proxies and what is initialised",
        };
        let mut text = format!("{}\n", terminal::paint(terminal::HEADING, &self.kernel));
        text += &terminal::fields(&[
            ("problem", self.size.clone()),
            ("launch", format!("{} of {} threads", plural(self.blocks, "block"), self.threads)),
            ("checked", watched.to_owned()),
        ]);
        text += "\n";
        text += &self.describe_policies();
        let wrongs = self.policies.iter().filter_map(|line| Some((line, line.failure.as_ref()?)));
        for (line, wrong) in wrongs {
            let message = wrong.message.trim_end();
            let (policy, seed) = (&line.policy, wrong.seed);
            let head = format!("policy {policy}, seed {seed}");
            text += &format!("\n{}: {message}\n", terminal::paint(terminal::BAD, &head));
            text += &format!("  replay: {}\n", wrong.replay);
        }
        text += &self.describe_counts();
        if let Some(Timeline { file, spans, cycles }) = &self.timeline {
            let what =
                format!("{file}, {spans} spans over {cycles} cycles; open it in ui.perfetto.dev");
            text += &format!("\n{}", terminal::fields(&[("timeline", what)]));
        }
        text
    }

    fn describe_policies(&self) -> String {
        let rows: Vec<_> = (self.policies.iter())
            .map(|line| {
                let passed = line.passed == line.seeds;
                let style = if passed { terminal::GOOD } else { terminal::BAD };
                let number = |number: Option<String>| number.unwrap_or_else(|| "-".to_owned());
                let used = line.tolerance_used.map(|used| format!("{:.0} %", 100.0 * used));
                vec![
                    terminal::plain(&line.policy),
                    (style, format!("{} of {}", line.passed, line.seeds)),
                    (terminal::PLAIN, number(line.max_error.map(|error| format!("{error:.1e}")))),
                    (terminal::PLAIN, number(used)),
                ]
            })
            .collect();
        terminal::table(&["policy", "seeds passed", "max error", "of tolerance"], &rows)
    }

    /// A column for each policy with results.
    fn describe_counts(&self) -> String {
        let lines: Vec<&Line> =
            self.policies.iter().filter(|line| !line.counts.is_empty()).collect();
        if lines.is_empty() {
            return String::new();
        }
        let heading: Vec<&str> =
            [&["counted"], &lines.iter().map(|it| it.policy.as_str()).collect::<Vec<_>>()[..]]
                .concat();
        // Counts of zero are left out, except for bank conflicts, whose absence is worth showing.
        let is_shown = |measure: &&Measure| {
            **measure == Measure::BankConflicts
                || lines.iter().any(|line| line.counts[measure.name()] > 0)
        };
        let rows: Vec<_> = (Measure::ALL.iter())
            .filter(is_shown)
            .map(|measure| {
                let name = terminal::plain(measure.name());
                let counts =
                    lines.iter().map(|it| (terminal::PLAIN, it.counts[measure.name()].to_string()));
                [name].into_iter().chain(counts).collect()
            })
            .collect();
        let mut text = format!("\n{}", terminal::table(&heading, &rows));
        for Conflict { place, executions, conflicts } in &lines[0].bank_conflicts {
            text += &format!("{conflicts} bank conflicts in {executions} executions at {place}\n");
        }
        text
    }
}

impl Line {
    fn new(policy: Policy, outcomes: &[&Outcome], replay: impl Fn(u64) -> String) -> Self {
        let ended: Vec<_> = outcomes.iter().filter_map(|it| it.result.as_ref().ok()).collect();
        let mut counts = BTreeMap::new();
        for (found, _) in &ended {
            for measure in Measure::ALL {
                let count: &mut u64 = counts.entry(measure.name()).or_default();
                *count = (*count).max(found.get(measure));
            }
        }
        let largest = |number: fn(&testing::scene::Accuracy) -> f64| {
            ended.iter().map(|(_, accuracy)| number(accuracy)).reduce(f64::max)
        };
        let failure = outcomes.iter().find_map(|outcome| {
            let hazard = match &outcome.result {
                Err(failure) => failure.hazard(),
                Ok(_) => None,
            };
            Some(FirstFailure {
                seed: outcome.seed,
                hazard: hazard.map(|hazard| hazard.kind.name()),
                message: message(outcome)?,
                replay: replay(outcome.seed),
            })
        });
        Line {
            policy: policy.to_string(),
            passed: outcomes.iter().filter(|it| it.passed()).count(),
            seeds: outcomes.len(),
            max_error: largest(|accuracy| accuracy.max_error),
            tolerance_used: largest(|accuracy| accuracy.tolerance_used),
            counts,
            // Bank conflicts do not depend on the schedule.
            bank_conflicts: ended.first().map_or_else(Vec::new, |(counts, _)| conflicts(counts)),
            failure,
        }
    }
}

/// Returns what is wrong with a run. The command that replays it is printed beside it.
fn message(outcome: &Outcome) -> Option<String> {
    match &outcome.result {
        Err(Failure::Hazard(hazard)) => Some(hazard.describe()),
        _ => outcome.complaint(),
    }
}

fn conflicts(counts: &Counts) -> Vec<Conflict> {
    let traffic = counts.bank_traffic().filter(|(_, traffic)| traffic.conflicts() > 0);
    traffic
        .map(|(place, traffic)| Conflict {
            place: place.map(|place| place.to_string()).unwrap_or_default(),
            executions: traffic.executions,
            conflicts: traffic.conflicts(),
        })
        .collect()
}

fn plural(count: u32, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}
