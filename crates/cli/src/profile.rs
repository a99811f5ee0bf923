//! `flashcore profile`: where the time goes inside the forward kernel.

use std::error::Error;
use std::path::PathBuf;

use clap::Args;
use flashcore::Problem;
use flashcore::gpu::forward::choose;
use flashcore::gpu::{Chip, Gpu};
use harness::profile::{self, Line};
use harness::report::write;
use kernels::Shipped;
use serde::Serialize;

use crate::{Answer, gate, terminal};

/// Show where the time goes inside the forward kernel
#[derive(Args)]
pub(crate) struct Arguments {
    /// What is computed, such as b=2,h=16,s=8192,d=128,bf16,causal
    #[arg(long, default_value = "b=2,h=16,s=8192,d=128,bf16")]
    problem: Problem,
    /// A configuration by name [default: what the planner chooses]
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
    /// Write a timeline that opens in ui.perfetto.dev, the GPU's beside the simulator's
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// How many blocks the timeline shows
    #[arg(long, default_value_t = 4)]
    blocks: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    problem: String,
    kernel: String,
    /// Absent where there is no GPU.
    gpu: Option<Measured>,
    /// Why there is none.
    missing: Option<String>,
    /// The same stamps in the simulator, whose clock is a simple model.
    simulator: Vec<Line>,
    timeline: Option<String>,
    /// What counts the rest.
    ncu: String,
}

#[derive(Serialize)]
struct Measured {
    phases: Vec<Line>,
    /// Milliseconds without timestamps, and with them.
    milliseconds: [f64; 2],
}

pub(crate) fn run(arguments: &Arguments) -> Result<Answer, Box<dyn Error>> {
    let problem = &arguments.problem;
    let gpu = Gpu::open(0);
    let chip = gpu.as_ref().map_or(Chip::H200, Gpu::chip);
    let forward = match &arguments.kernel {
        Some(name) => match harness::bench::configuration(name)? {
            Shipped::Forward(forward) => forward,
            other => return Err(format!("{} takes no timestamps", other.name()).into()),
        },
        None => choose(&chip, problem)?.configuration,
    };
    if !harness::bench::serves(&Shipped::Forward(forward), problem) {
        return Err(format!("{} is for another element, dim or mask", forward.name()).into());
    }
    let (simulated, trace) = profile::in_simulator(&forward)?;
    let (recording, missing) = match &gpu {
        Ok(gpu) => (Some(profile::on_gpu(gpu, &forward, problem)?), None),
        Err(error) => (None, Some(error.to_string())),
    };
    let spans = recording.as_ref().map_or(&[][..], |recording| &recording.spans);
    let timeline = match &arguments.trace {
        Some(path) => {
            let text = profile::timeline(spans, arguments.blocks, Some((&simulated, &trace)));
            write(path, &text)?;
            Some(path.display().to_string())
        }
        None => None,
    };
    let name = forward.name();
    let report = Report {
        problem: harness::problems::text(problem),
        gpu: recording.as_ref().map(|recording| Measured {
            phases: profile::summarise(&recording.spans),
            milliseconds: recording.milliseconds,
        }),
        missing,
        simulator: profile::summarise(&simulated),
        timeline,
        ncu: gate::ncu_line(&name, &name, Some(problem)),
        kernel: name,
    };
    if arguments.json {
        return Answer::json(&report, true);
    }
    Ok(Answer { text: describe(&report), passed: true })
}

fn describe(report: &Report) -> String {
    let mut text = terminal::fields(&[
        ("problem", report.problem.clone()),
        ("kernel", terminal::paint(terminal::HEADING, &report.kernel)),
    ]);
    match (&report.gpu, &report.missing) {
        (Some(measured), _) => {
            let [without, with] = measured.milliseconds;
            let slower = 100.0 * (with / without - 1.0);
            text += &format!("\n{}\n", terminal::paint(terminal::HEADING, "on the GPU"));
            text += &table(&measured.phases);
            text += &format!(
                "{without:.4} ms without timestamps, {with:.4} ms with them ({slower:+.1} %)\n"
            );
        }
        (None, missing) => {
            let reason = missing.as_deref().unwrap_or_default();
            text += &format!("\nno times from a GPU: {reason}\n");
        }
    }
    let heading = "in the simulator (a small problem, a simple model of costs)";
    text += &format!("\n{}\n", terminal::paint(terminal::HEADING, heading));
    text += &table(&report.simulator);
    if let Some(file) = &report.timeline {
        text += &format!("\ntimeline in {file}; open it in ui.perfetto.dev\n");
    }
    text + &format!("\nhardware counters:\n  {}\n", report.ncu)
}

fn table(lines: &[Line]) -> String {
    let plain = |text: String| (terminal::PLAIN, text);
    let rows: Vec<_> = lines
        .iter()
        .map(|line| {
            vec![
                plain(line.phase.to_owned()),
                plain(format!("{:.1} %", 100.0 * line.share)),
                plain(format!("{:.0}", line.cycles)),
                plain(line.count.to_string()),
            ]
        })
        .collect();
    terminal::table(&["phase", "share", "cycles", "times"], &rows)
}
