//! `flashcore warm`: kernels compiled ahead of time, so that the first call of a deployment is as
//! fast as the second.

use std::error::Error;

use clap::Args;
use cuda::{Cache, Driver};
use flashcore::gpu::{Chip, Gpu, Warmed};
use flashcore::plan::Arrangement;
use flashcore::{Plan, Problem};
use harness::ahead_of_time;
use harness::bench::families;
use kernels::{Configuration, shipped};
use ptx::Target;
use serde::Serialize;

use crate::inspect::choose;
use crate::progress::Bar;
use crate::{Answer, Preferred, terminal};

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
#[command(mut_arg("preferred", |it| it.conflicts_with("all")))]
#[command(mut_arg("backend", |it| it.conflicts_with("all")))]
pub(crate) struct Arguments {
    #[command(flatten)]
    what: What,
    #[command(flatten)]
    preferred: Preferred,
    /// Compile for a GPU that is not here, such as sm_90a: with ptxas, and into the cache if its
    /// driver is named
    #[arg(long, value_name = "TARGET", value_parser = choose::parse_target)]
    chip: Option<Target>,
    /// The driver of that GPU's machine, as `flashcore doctor` tells it there, such as
    /// 12.8/570.124.06: the cache goes by it
    #[arg(long, value_name = "CUDA/RELEASE", requires = "chip", value_parser = ahead_of_time::parse_driver)]
    driver: Option<Driver>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Json<'a> {
    /// Where they are now; absent where none is kept.
    cache: Option<&'a str>,
    kernels: &'a [Warmed],
}

pub(crate) fn run(arguments: &Arguments) -> Result<Answer, Box<dyn Error>> {
    if let Some(target) = arguments.chip {
        return for_chip(arguments, &Chip::typical(target));
    }
    let gpu = Gpu::open(0).map_err(|error| {
        format!(
            "there is no GPU to compile for: {error}; `--chip sm_90a` compiles for one that is not \
             here"
        )
    })?;
    let Some(cache) = gpu.cache().directory().map(|path| path.display().to_string()) else {
        return Err("the cache is off ($FLASHCORE_CACHE): nothing would be kept".into());
    };
    let configurations = arguments.configurations(&gpu.chip())?;
    let kernels = {
        let bar = Bar::new("compiling");
        gpu.warm(&configurations, &bar)?
    };
    answer(arguments.json, Some(&cache), &kernels, || describe(&cache, &kernels))
}

/// For a GPU of another machine.
fn for_chip(arguments: &Arguments, chip: &Chip) -> Result<Answer, Box<dyn Error>> {
    let cache = Cache::from_environment();
    let place = cache.directory().map(|path| path.display().to_string());
    let keep = arguments.driver.as_ref().zip(place.as_ref());
    if arguments.driver.is_some() && keep.is_none() {
        return Err("the cache is off ($FLASHCORE_CACHE): nothing would be kept".into());
    }
    let ptxas = ahead_of_time::assembler(arguments.driver.as_ref())?;
    let configurations = arguments.configurations(chip)?;
    let kernels = {
        let bar = Bar::new("assembling");
        let keep = keep.map(|(driver, _)| (&cache, driver));
        ahead_of_time::assemble(&configurations, chip, &ptxas, keep, &bar)?
    };
    let place = keep.map(|(_, place)| place.as_str());
    answer(arguments.json, place, &kernels, || match place {
        Some(place) => describe(place, &kernels),
        None => {
            let (version, target) = (ptxas.version, chip.target);
            let told = format!(
                "assembled for {target} with ptxas {version} and not kept: the cache goes by the \
                 driver of that machine; `flashcore doctor` tells it there, and --driver \
                 CUDA/RELEASE keeps kernels for it here"
            );
            table(&kernels) + &terminal::paragraph(&told)
        }
    })
}

fn answer(
    json: bool,
    cache: Option<&str>,
    kernels: &[Warmed],
    text: impl FnOnce() -> String,
) -> Result<Answer, Box<dyn Error>> {
    let passed = kernels.iter().all(|kernel| kernel.warnings.is_empty());
    Answer::of(json, &Json { cache, kernels }, passed, text)
}

impl Arguments {
    /// What is to be compiled, each once.
    fn configurations(&self, chip: &Chip) -> Result<Vec<Configuration>, Box<dyn Error>> {
        let what = &self.what;
        let mut all: Vec<Configuration> = Vec::new();
        if what.all {
            let (families, shipped) = (families(), shipped(chip.target));
            all.extend(shipped.into_iter().filter(|it| families.contains(&it.family())));
        }
        for problem in &what.problem {
            let arrangement = Arrangement::contiguous(problem)?;
            let preference = self.preferred.preference(problem.pass);
            let plan = Plan::on_gpu(chip, problem, &arrangement, &preference)?;
            let launches = plan.chosen.choice.into_iter().flat_map(|choice| choice.launches);
            all.extend(launches.map(|launch| launch.kernel));
        }
        let mut seen = std::collections::HashSet::new();
        all.retain(|configuration| seen.insert(*configuration));
        Ok(all)
    }
}

fn describe(cache: &str, kernels: &[Warmed]) -> String {
    let kept = kernels.iter().filter(|kernel| kernel.warnings.is_empty());
    let new = kept.clone().filter(|kernel| !kernel.cached).count();
    let count = match kept.count() {
        1 => "1 kernel".to_owned(),
        count => format!("{count} kernels"),
    };
    let told = format!("{count} in {cache}, {new} of them new");
    let warnings = kernels.iter().flat_map(|kernel| &kernel.warnings);
    let warnings: String = warnings.map(|warning| terminal::paragraph(warning)).collect();
    table(kernels) + &terminal::paragraph(&told) + &warnings
}

fn table(kernels: &[Warmed]) -> String {
    let rows: Vec<_> = kernels
        .iter()
        .map(|kernel| {
            let (style, state) = match (kernel.warnings.is_empty(), kernel.cached) {
                (false, _) => (terminal::BAD, "not kept"),
                (true, true) => (terminal::PLAIN, "there already"),
                (true, false) => (terminal::GOOD, "compiled"),
            };
            vec![
                terminal::plain(&kernel.name),
                terminal::plain(format!("{:.0} ms", kernel.milliseconds)),
                terminal::plain(terminal::bytes(kernel.bytes as u128)),
                (style, state.to_owned()),
            ]
        })
        .collect();
    terminal::table(&["configuration", "time", "size", "state"], &rows)
}
