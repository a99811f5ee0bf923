//! `flashcore warm`: kernels compiled ahead of time, so that the first call of a deployment is as
//! fast as the second.

use std::error::Error;

use clap::Args;
use flashcore::gpu::{Gpu, Warmed};
use flashcore::plan::Arrangement;
use flashcore::{Plan, Preference, Problem};
use harness::bench::families;
use kernels::{Configuration, shipped};
use serde::Serialize;

use crate::preference::Preferred;
use crate::progress::Bar;
use crate::{Answer, terminal};

/// Compile kernels into the cache ahead of time
#[derive(Args)]
#[group(required = true, multiple = false)]
pub(crate) struct What {
    /// The kernel for a problem, such as b=1,h=16,s=4096,d=128,bf16,causal; may be given many times
    #[arg(long, value_name = "PROBLEM")]
    problem: Vec<Problem>,
    /// Every tuned configuration that this GPU can run
    #[arg(long)]
    all: bool,
}

/// Compile kernels into the cache ahead of time
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    what: What,
    #[command(flatten)]
    preferred: Preferred,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Json {
    cache: Option<String>,
    kernels: Vec<Warmed>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<Answer, Box<dyn Error>> {
    let gpu = Gpu::open(0).map_err(|error| format!("there is no GPU to compile for: {error}"))?;
    let Some(cache) = gpu.cache().directory().map(|path| path.display().to_string()) else {
        return Err("the cache is off ($FLASHCORE_CACHE): nothing would be kept".into());
    };
    let configurations = configurations(&gpu, &arguments.what, &arguments.preferred.preference())?;
    let kernels = {
        let bar = Bar::new("compiling");
        gpu.warm(&configurations, &bar)?
    };
    let passed = kernels.iter().all(|kernel| kernel.warnings.is_empty());
    if arguments.json {
        return Answer::json(&Json { cache: Some(cache), kernels }, passed);
    }
    Ok(Answer { text: describe(&cache, &kernels), passed })
}

/// What is to be compiled, each once.
fn configurations(
    gpu: &Gpu,
    what: &What,
    preference: &Preference,
) -> Result<Vec<Configuration>, Box<dyn Error>> {
    let chip = gpu.chip();
    let mut all: Vec<Configuration> = Vec::new();
    if what.all {
        let families = families();
        all.extend(shipped(chip.target).into_iter().filter(|it| families.contains(&it.family())));
    }
    for problem in &what.problem {
        let plan = Plan::on_gpu(&chip, problem, &Arrangement::contiguous(problem)?, preference)?;
        let launches = plan.chosen.choice.into_iter().flat_map(|choice| choice.launches);
        all.extend(launches.map(|launch| launch.kernel));
    }
    let mut seen = std::collections::HashSet::new();
    all.retain(|configuration| seen.insert(*configuration));
    Ok(all)
}

fn describe(cache: &str, kernels: &[Warmed]) -> String {
    let rows: Vec<_> = kernels
        .iter()
        .map(|kernel| {
            let (style, state) = match (kernel.warnings.is_empty(), kernel.cached) {
                (false, _) => (terminal::BAD, "not kept"),
                (true, true) => (terminal::PLAIN, "there already"),
                (true, false) => (terminal::GOOD, "compiled"),
            };
            vec![
                terminal::plain(kernel.name.clone()),
                terminal::plain(format!("{:.0} ms", kernel.milliseconds)),
                terminal::plain(terminal::bytes(kernel.bytes as u128)),
                (style, state.to_owned()),
            ]
        })
        .collect();
    let mut text = terminal::table(&["configuration", "time", "size", "state"], &rows);
    let compiled = kernels.iter().filter(|kernel| !kernel.cached).count();
    text += &format!("{} kernels in {cache}, {compiled} of them new\n", kernels.len());
    let warnings = kernels.iter().flat_map(|kernel| &kernel.warnings);
    text + &warnings.map(|warning| format!("{warning}\n")).collect::<String>()
}
