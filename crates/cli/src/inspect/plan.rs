//! What would run for a problem, and in which shape.

use std::error::Error;

use cuda::DeviceInfo;
use flashcore::family::{Choice, Tiling};
use flashcore::gpu::Chip;
use flashcore::plan::{Candidate, Source};
use flashcore::{Plan, Preference, Problem};
use kernels::Configuration;
use ptx::Target;
use serde::Serialize;

use super::assembly::Assembly;
use crate::{Answer, terminal};

#[derive(Serialize)]
struct Found {
    #[serde(rename = "chip")]
    gpu: ChipFound,
    /// The scale in force, also when the problem leaves it to the default.
    scale: f32,
    #[serde(flatten)]
    plan: Plan,
    /// What the chosen kernel would launch, one after the other; nothing on a CPU.
    launches: Vec<Launch>,
    memory: Vec<Memory>,
    /// Of the attention kernel.
    assembly: Option<Assembly>,
}

#[derive(Serialize)]
struct ChipFound {
    target: String,
    multiprocessors: u32,
    /// Whether it is a typical one because none is here, or another target was asked for.
    assumed: bool,
}

#[derive(Serialize)]
struct Launch {
    configuration: String,
    /// Whether it depends on lengths alone, and serves all layers that share them.
    prepares: bool,
    blocks: u32,
    /// Threads in a block.
    threads: u32,
    /// Shared memory of a block.
    shared_bytes: u32,
    /// What a block may have.
    shared_limit: u32,
}

#[derive(Serialize)]
struct Memory {
    name: String,
    bytes: u64,
}

/// A plan for this machine's GPU, or for a typical one.
fn plan_for(
    problem: &Problem,
    target: Option<Target>,
    preference: &Preference,
) -> Result<(Chip, bool, Plan), Box<dyn Error>> {
    let here = DeviceInfo::query(0).ok().map(|info| Chip::of(&info));
    let here = here.filter(|chip| target.is_none_or(|target| target == chip.target));
    let chip = here.unwrap_or_else(|| Chip::typical(target.unwrap_or(Target::SM_90A)));
    Ok((chip, here.is_none(), Plan::on_chip(&chip, problem, preference)?))
}

/// The kernel that a plan chooses, and what it is built for.
pub(super) fn chosen(
    problem: &Problem,
    target: Option<Target>,
    preference: &Preference,
) -> Result<(Configuration, Target), Box<dyn Error>> {
    let (chip, _, plan) = plan_for(problem, target, preference)?;
    let name = plan.chosen.full_name();
    let choice = plan.chosen.choice.ok_or_else(|| format!("{name} is no kernel of a GPU"))?;
    Ok((*choice.kernel(), chip.target))
}

pub(super) fn run(
    problem: &Problem,
    target: Option<Target>,
    preference: &Preference,
    json: bool,
) -> Result<Answer, Box<dyn Error>> {
    let (chip, assumed, plan) = plan_for(problem, target, preference)?;
    let (mut launches, mut memory, mut assembly) = (Vec::new(), Vec::new(), None);
    if let Some(choice) = &plan.chosen.choice {
        for (index, launch) in choice.launches.iter().enumerate() {
            let program = launch.kernel.program()?;
            launches.push(Launch {
                configuration: launch.kernel.name(),
                prepares: index < choice.prepared,
                blocks: launch.blocks,
                threads: program.threads,
                shared_bytes: program.shared_bytes(),
                shared_limit: program.target.shared_memory_limit(),
            });
        }
        let name = |source| match source {
            Source::Workspace(workspace) => terminal::words(&format!("{workspace:?}")),
            Source::Tensor(tensor) => terminal::words(&format!("{tensor:?}")),
            Source::List(list) => terminal::words(&format!("{list:?}")),
            Source::Captured(kind, index) => {
                format!("tensor {index} of the {}", terminal::words(&format!("{kind:?}")))
            }
            Source::Nothing => "nothing".to_owned(),
        };
        let named = choice.memory.iter().map(|it| (name(it.source), it.bytes));
        memory.extend(named.map(|(name, bytes)| Memory { name, bytes }));
        assembly = Some(Assembly::of(&choice.kernel().program()?, chip.target));
    }
    let (target, multiprocessors) = (chip.target.to_string(), chip.multiprocessors);
    let gpu = ChipFound { target, multiprocessors, assumed };
    let found = Found { gpu, scale: problem.scale(), plan, launches, memory, assembly };
    Answer::of(json, &found, true, || describe(&found))
}

fn describe(found: &Found) -> String {
    let ChipFound { target, multiprocessors, assumed } = &found.gpu;
    let assumed = if *assumed { ", a typical one: not this machine's" } else { "" };
    let mut text = terminal::fields(&[
        ("problem", found.plan.problem.to_string()),
        ("scale", found.scale.to_string()),
        ("gpu", format!("{target}, {multiprocessors} multiprocessors{assumed}")),
    ]);
    text += &format!("\n{}\n", terminal::paint(terminal::HEADING, "candidates"));
    let names: Vec<String> = found.plan.candidates.iter().map(Candidate::full_name).collect();
    let candidates: Vec<_> = (found.plan.candidates.iter().zip(&names))
        .map(|(candidate, name)| {
            let verdict = match candidate.accepted {
                true if *candidate == found.plan.chosen => {
                    terminal::paint(terminal::GOOD, "chosen")
                }
                true => "possible".to_owned(),
                false => "refused".to_owned(),
            };
            (name.as_str(), format!("{verdict}: {}", candidate.reason))
        })
        .collect();
    text += &terminal::fields(&candidates);
    if let Some(choice) = &found.plan.chosen.choice {
        text += &format!("\n{}\n", terminal::paint(terminal::HEADING, "launches"));
        text += &terminal::fields(&found.launches(choice));
    }
    if let Some(assembly) = &found.assembly {
        text += &assembly.describe();
    }
    text
}

impl Found {
    fn launches(&self, choice: &Choice) -> Vec<(&'static str, String)> {
        let mut fields = Vec::new();
        for launch in &self.launches {
            let Launch { configuration, blocks, threads, shared_bytes, shared_limit, .. } = launch;
            let what = if launch.prepares { "prepares" } else { "launches" };
            fields.push((what, configuration.clone()));
            fields.push(("grid", format!("{blocks} blocks of {threads} threads")));
            fields.push(("shared memory", format!("{shared_bytes} of {shared_limit} bytes")));
        }
        if let Some(tiling) = choice.tiling {
            let Tiling { query_rows, key_block, tiles_per_head, tiles, splits, waves } = tiling;
            fields.extend([
                ("tile", format!("{query_rows} queries, {key_block} keys at a time")),
                ("tiles", format!("{tiles}, {tiles_per_head} for each head")),
                ("waves", format!("{waves:.2} tiles for each multiprocessor")),
            ]);
            if splits > 1 {
                fields.push(("splits", format!("{splits} for each tile, put together afterwards")));
            }
        }
        for Memory { name, bytes } in &self.memory {
            fields.push((
                "device memory",
                format!("{} for {name}", terminal::bytes((*bytes).into())),
            ));
        }
        fields
    }
}
