//! What would run for a problem, and in which shape.

use std::error::Error;

use cuda::DeviceInfo;
use flashcore::backend::{Candidate, gpu};
use flashcore::gpu::{Chip, forward, mma};
use flashcore::{Plan, Preference, Problem};
use kernels::Shipped;
use ptx::Target;
use serde::Serialize;

use super::assembly::Assembly;
use crate::{Answer, terminal};

#[derive(Serialize)]
struct Found {
    gpu: ChipFound,
    /// The scale in force, also when the problem leaves it to the default.
    scale: f32,
    #[serde(flatten)]
    plan: Plan,
    /// How the chosen kernel would be launched, where it is one of a GPU.
    launch: Option<Launch>,
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
    /// Threads in a block.
    threads: u32,
    /// Shared memory of a block.
    shared_bytes: u32,
    /// What a block may have.
    shared_limit: u32,
    #[serde(flatten)]
    tiles: Option<Tiles>,
}

#[derive(Serialize)]
struct Tiles {
    query_rows: u32,
    key_block: u32,
    tiles_per_head: u32,
    tiles: u32,
    /// Over how many blocks the keys of a tile are split, where the kernel can do that.
    splits: Option<u32>,
    blocks: u32,
    /// Tiles and splits for each multiprocessor.
    waves: f64,
    /// What the device is told of which block takes which tiles.
    lists: Option<Vec<u32>>,
}

/// A plan for this machine's GPU, or for a typical one.
struct Planned {
    chip: Chip,
    assumed: bool,
    plan: Plan,
    /// The chosen kernel, where it is one of a GPU.
    chosen: Option<Shipped>,
}

impl Planned {
    fn new(problem: &Problem, target: Option<Target>) -> Result<Self, Box<dyn Error>> {
        let here = DeviceInfo::query(0).ok().map(|info| Chip::of(&info));
        let here = here.filter(|chip| target.is_none_or(|target| target == chip.target));
        let assumed = here.is_none();
        let chip = here.unwrap_or_else(|| Chip::typical(target.unwrap_or(Target::SM_90A)));
        let preference = Preference::from_environment();
        let plan = Plan::on_chip(&chip, problem, &preference)?;
        let chosen = match plan.chosen.backend {
            "gpu" => gpu::configuration(&chip, problem, &plan.chosen.kernel),
            _ => None,
        };
        Ok(Planned { chip, assumed, plan, chosen })
    }
}

/// The kernel that a plan chooses, and what it is built for.
pub(super) fn chosen(
    problem: &Problem,
    target: Option<Target>,
) -> Result<(Shipped, Target), Box<dyn Error>> {
    let Planned { chip, plan, chosen, .. } = Planned::new(problem, target)?;
    let shipped = chosen.ok_or_else(|| {
        format!("{} would run, which is no kernel of a GPU", plan.chosen.full_name())
    })?;
    Ok((shipped, chip.target))
}

pub(super) fn run(
    problem: &Problem,
    target: Option<Target>,
    json: bool,
) -> Result<Answer, Box<dyn Error>> {
    let Planned { chip, assumed, plan, chosen } = Planned::new(problem, target)?;
    let (mut launch, mut assembly) = (None, None);
    if let Some(shipped) = chosen {
        let program = shipped.program()?;
        launch = Some(Launch {
            configuration: shipped.name(),
            threads: program.threads,
            shared_bytes: program.shared_bytes(),
            shared_limit: program.target.shared_memory_limit(),
            tiles: Tiles::of(&shipped, problem, &chip)?,
        });
        assembly = Some(Assembly::of(&ptx::print(&program), chip.target));
    }
    let (target, multiprocessors) = (chip.target.to_string(), chip.multiprocessors);
    let gpu = ChipFound { target, multiprocessors, assumed };
    let found = Found { gpu, scale: problem.scale(), plan, launch, assembly };
    if json {
        return Answer::json(&found, true);
    }
    Ok(Answer { text: describe(&found), passed: true })
}

impl Tiles {
    fn of(
        shipped: &Shipped,
        problem: &Problem,
        chip: &Chip,
    ) -> Result<Option<Self>, Box<dyn Error>> {
        Ok(match shipped {
            Shipped::Forward(configuration) => {
                let geometry = forward::Geometry::new(configuration, problem, chip)?;
                Some(Tiles {
                    query_rows: geometry.query_rows,
                    key_block: geometry.key_block,
                    tiles_per_head: geometry.tiles_per_head,
                    tiles: geometry.tiles,
                    splits: None,
                    blocks: geometry.blocks,
                    waves: geometry.waves(chip),
                    lists: geometry.lists.map(|lists| lists.words),
                })
            }
            Shipped::Mma(configuration) => {
                let splits = mma::choose(chip, problem, mma::Sums::F32)?.splits;
                let geometry = mma::Geometry::new(configuration, splits, problem, chip)?;
                Some(Tiles {
                    query_rows: geometry.query_rows,
                    key_block: geometry.key_block,
                    tiles_per_head: geometry.tiles_per_head,
                    tiles: geometry.tiles,
                    splits: Some(geometry.splits),
                    blocks: geometry.blocks,
                    waves: geometry.waves(chip),
                    lists: None,
                })
            }
            _ => None,
        })
    }
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
    if let Some(launch) = &found.launch {
        text += &format!("\n{}\n", terminal::paint(terminal::HEADING, "launch"));
        text += &terminal::fields(&launch.fields());
    }
    if let Some(assembly) = &found.assembly {
        text += &assembly.describe();
    }
    text
}

impl Launch {
    fn fields(&self) -> Vec<(&'static str, String)> {
        let mut fields = vec![("configuration", self.configuration.clone())];
        if let Some(tiles) = &self.tiles {
            let Tiles { query_rows, key_block, tiles_per_head, .. } = tiles;
            let Tiles { tiles: count, splits, blocks, waves, lists, .. } = tiles;
            fields.extend([
                ("tile", format!("{query_rows} queries, {key_block} keys at a time")),
                ("tiles", format!("{count}, {tiles_per_head} for each head")),
                ("grid", format!("{blocks} blocks of {} threads", self.threads)),
                ("waves", format!("{waves:.2} tiles for each multiprocessor")),
            ]);
            if let Some(splits) = splits.filter(|splits| *splits > 1) {
                fields.push(("splits", format!("{splits} for each tile, put together afterwards")));
            }
            if let Some(lists) = lists {
                let bytes = terminal::bytes(4 * lists.len() as u128);
                fields.push(("tile lists", format!("{bytes} of device memory")));
            }
        } else {
            fields.push(("block", format!("{} threads", self.threads)));
        }
        let shared = format!("{} of {} bytes", self.shared_bytes, self.shared_limit);
        fields.push(("shared memory", shared));
        fields
    }
}
