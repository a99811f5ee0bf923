//! `flashcore profile`: where the time goes, inside the forward kernel and between launches.

use std::error::Error;
use std::path::PathBuf;

use clap::Args;
use flashcore::Problem;
use flashcore::gpu::{Chip, Gpu};
use harness::profile::{self, LaunchTime, Line};
use harness::report::write;
use kernels::Configuration;
use serde::Serialize;

use crate::progress::Bar;
use crate::{Answer, KernelChoice, destination, gate, terminal};

/// Show where the time goes: inside the forward kernel, and between the launches of the others
#[derive(Args)]
pub(crate) struct Arguments {
    /// What is computed, such as b=2,h=16,s=8192,d=128,bf16,causal
    #[arg(long, default_value = "b=2,h=16,s=8192,d=128,bf16")]
    problem: Problem,
    #[command(flatten)]
    kernel: KernelChoice,
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
    /// Each launch of the plan on the GPU.
    launches: Vec<LaunchTime>,
    /// The same stamps in the simulator, whose clock is a simple model; none where the kernel takes
    /// none.
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
    let _bar = Bar::new("profiling");
    let gpu = harness::open_gpu();
    let chip = gpu.as_ref().map_or(Chip::H200, Gpu::chip);
    let (plan, auxiliary) = arguments.kernel.candidate(problem.pass)?.plan(&chip, problem)?;
    let choice = plan.chosen.choice.as_ref().ok_or("it is no kernel of a GPU")?;
    let name = choice.kernel().name();
    // Timestamps from inside are for the forward kernel alone.
    let forward = match choice.kernel() {
        Configuration::Forward(forward) => Some(forward),
        _ => None,
    };
    match &arguments.trace {
        Some(path) if forward.is_none() => {
            let path = path.display();
            return Err(format!(
                "{name} takes no timestamps, so there is no {path}: only the forward kernel does, \
                 where --kernel forward can serve the problem"
            )
            .into());
        }
        Some(path) => destination::admit(path)?,
        None => {}
    }
    let (simulated, trace) = forward.map(profile::in_simulator).transpose()?.unwrap_or_default();
    let mut recording = None;
    let mut launches = Vec::new();
    if let Ok(gpu) = &gpu {
        launches = profile::launches(gpu, &plan, &auxiliary)?;
        let probed = |forward| profile::on_gpu(gpu, forward, &plan, &auxiliary);
        recording = forward.map(probed).transpose()?;
    }
    let missing = gpu.as_ref().err().map(ToString::to_string);
    let spans = recording.as_ref().map_or(&[][..], |recording| &recording.spans);
    if let Some(path) = &arguments.trace {
        write(path, &profile::timeline(spans, arguments.blocks, Some((&simulated, &trace))))?;
    }
    let report = Report {
        problem: problem.text(),
        gpu: recording.as_ref().map(|recording| Measured {
            phases: profile::summarise(&recording.spans),
            milliseconds: recording.milliseconds,
        }),
        missing,
        launches,
        simulator: profile::summarise(&simulated),
        timeline: arguments.trace.as_ref().map(|path| path.display().to_string()),
        ncu: gate::ncu_line(&name, &name, Some(problem)),
        kernel: name,
    };
    Answer::of(arguments.json, &report, true, || describe(&report))
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
        (None, Some(reason)) => {
            text +=
                &format!("\n{}", terminal::paragraph(&format!("no times from a GPU: {reason}")));
        }
        (None, None) => {}
    }
    if !report.launches.is_empty() {
        text += &format!("\n{}\n", terminal::paint(terminal::HEADING, "launch by launch"));
        let row = |it: &LaunchTime| {
            vec![
                terminal::plain(&it.kernel),
                terminal::plain(format!("{:.2}", 1e3 * it.milliseconds)),
            ]
        };
        let rows: Vec<_> = report.launches.iter().map(row).collect();
        text += &terminal::table(&["kernel", "us"], &rows);
    }
    if report.simulator.is_empty() {
        let kernel = &report.kernel;
        text += &format!("\n{kernel} takes no timestamps: whole launches are what there is\n");
        return text + &format!("\nhardware counters:\n  {}\n", report.ncu);
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
    let rows: Vec<_> = lines
        .iter()
        .map(|line| {
            vec![
                terminal::plain(line.phase.to_owned()),
                terminal::plain(format!("{:.1} %", 100.0 * line.share)),
                terminal::plain(format!("{:.0}", line.cycles)),
                terminal::plain(line.count),
            ]
        })
        .collect();
    terminal::table(&["phase", "share", "cycles", "times"], &rows)
}
