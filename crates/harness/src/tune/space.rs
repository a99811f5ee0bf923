//! The search space: the parameters of configurations, and how they are varied.

use flashcore::family::tuning::Variant;
use kernels::forward::every_tuned;
use kernels::mma::BackwardMma;
use kernels::product::Source;
use kernels::{Backward, Configuration, Decode, Forward, Mma, Prefill, shipped};
use ptx::Target;
use serde::{Deserialize, Serialize};

use crate::statistics::Random;

/// A configuration as the search sees it: gene by gene.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Genome(pub Variant);

/// A parameter that can be varied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Gene {
    /// Consumer warpgroups.
    Warpgroups,
    /// Keys in a block.
    KeyBlock,
    /// Stages of keys and of values.
    Stages,
    /// Query tiles in shared memory.
    QueryBuffers,
    /// Whether queries are multiplied from registers.
    QueryRegisters,
    /// Whether warpgroups take turns at the tensor cores (ping-pong).
    #[serde(rename = "turns")]
    PingPong,
    /// Whether tiles overlap.
    OverlapTiles,
    /// Whether the loop body is unrolled to two steps.
    TwoSteps,
    /// Whether the guard's slow path is moved out of the loop.
    SlowPathApart,
}

impl Gene {
    /// Every gene.
    pub const ALL: [Gene; 9] = [
        Gene::Warpgroups,
        Gene::KeyBlock,
        Gene::Stages,
        Gene::QueryBuffers,
        Gene::QueryRegisters,
        Gene::PingPong,
        Gene::OverlapTiles,
        Gene::TwoSteps,
        Gene::SlowPathApart,
    ];

    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Gene::Warpgroups => "consumer warpgroups",
            Gene::KeyBlock => "keys in a block",
            Gene::Stages => "stages",
            Gene::QueryBuffers => "query buffers",
            Gene::QueryRegisters => "queries in registers",
            Gene::PingPong => "turns",
            Gene::OverlapTiles => "tiles overlap",
            Gene::TwoSteps => "two steps in the loop",
            Gene::SlowPathApart => "slow path apart",
        }
    }

    /// Every value it can have, in order.
    pub fn values(self) -> Vec<u32> {
        match self {
            Gene::Warpgroups => vec![1, 2, 3],
            Gene::KeyBlock => (16..=256).step_by(16).collect(),
            Gene::Stages => vec![1, 2, 3, 4],
            Gene::QueryBuffers => vec![1, 2],
            Gene::QueryRegisters
            | Gene::PingPong
            | Gene::OverlapTiles
            | Gene::TwoSteps
            | Gene::SlowPathApart => vec![0, 1],
        }
    }
}

impl Genome {
    /// A poor start: one warpgroup, one stage, small key blocks, no ping-pong.
    pub const POOR: Genome = Genome(Variant {
        warpgroups: 1,
        key_block: 16,
        stages: 1,
        query_buffers: 1,
        query_registers: false,
        turns: false,
        overlap_tiles: false,
        two_steps: false,
        slow_path_apart: false,
    });

    /// The genome of a configuration.
    pub fn of(forward: &Forward) -> Self {
        Genome(Variant::of(forward))
    }

    /// A configuration like `base` with these genes.
    pub fn configuration(&self, base: &Forward) -> Forward {
        self.0.configuration(base)
    }

    /// The value of a gene.
    pub fn get(&self, gene: Gene) -> u32 {
        let Genome(variant) = self;
        match gene {
            Gene::Warpgroups => variant.warpgroups,
            Gene::KeyBlock => variant.key_block,
            Gene::Stages => variant.stages,
            Gene::QueryBuffers => variant.query_buffers,
            Gene::QueryRegisters => u32::from(variant.query_registers),
            Gene::PingPong => u32::from(variant.turns),
            Gene::OverlapTiles => u32::from(variant.overlap_tiles),
            Gene::TwoSteps => u32::from(variant.two_steps),
            Gene::SlowPathApart => u32::from(variant.slow_path_apart),
        }
    }

    /// Sets a gene. A single warpgroup cannot ping-pong.
    pub fn with(mut self, gene: Gene, value: u32) -> Self {
        let variant = &mut self.0;
        match gene {
            Gene::Warpgroups => variant.warpgroups = value,
            Gene::KeyBlock => variant.key_block = value,
            Gene::Stages => variant.stages = value,
            Gene::QueryBuffers => variant.query_buffers = value,
            Gene::QueryRegisters => variant.query_registers = value != 0,
            Gene::PingPong => variant.turns = value != 0,
            Gene::OverlapTiles => variant.overlap_tiles = value != 0,
            Gene::TwoSteps => variant.two_steps = value != 0,
            Gene::SlowPathApart => variant.slow_path_apart = value != 0,
        }
        variant.turns &= variant.warpgroups > 1;
        self
    }

    /// A crossover of two genomes, gene by gene.
    pub fn cross(self, other: Genome, random: &mut Random) -> Genome {
        Gene::ALL.into_iter().fold(self, |child, gene| match random.below(2) {
            0 => child,
            _ => child.with(gene, other.get(gene)),
        })
    }

    /// Changes one or two genes; a gene with many values moves to a near one more often than to a
    /// far one.
    pub fn mutate(self, random: &mut Random) -> Genome {
        let mut child = self;
        for _ in 0..1 + random.below(2) {
            let gene = random.choose(&Gene::ALL);
            let values = gene.values();
            let here = values.iter().position(|value| *value == child.get(gene)).unwrap_or(0);
            let there = if values.len() > 4 && random.below(3) > 0 {
                let step = 1 + random.below(2) as isize;
                let signed = if random.below(2) == 0 { step } else { -step };
                (here as isize + signed).clamp(0, values.len() as isize - 1) as usize
            } else {
                random.below(values.len())
            };
            child = child.with(gene, values[there]);
        }
        child
    }

    /// Whether the code is laid out like another's.
    pub fn same_form(&self, other: &Genome) -> bool {
        let form = |Genome(it): &Genome| (it.overlap_tiles, it.two_steps, it.slow_path_apart);
        form(self) == form(other)
    }

    /// All genomes.
    pub fn all() -> Vec<Genome> {
        let mut all = vec![Genome::POOR];
        for gene in Gene::ALL {
            all = vary(all, &gene.values(), |genome, value| genome.with(gene, value));
        }
        all.sort();
        all.dedup();
        all
    }
}

/// Whether a configuration can be built and can hold its tiles in registers: nothing that fails
/// here is worth compiling.
pub fn possible(forward: &Forward) -> Result<(), String> {
    // Registers that are live at once: scores, the probabilities of two blocks, the output, queries.
    // With 8-bit elements, the probabilities of one block, and part of the output instead of scores.
    let (scores, probabilities) = match forward.is_fp8() {
        true => ((forward.key_block / 2).max(64), forward.key_block / 8),
        false => (forward.key_block / 2, 2 * forward.key_block / 4),
    };
    let output = forward.value_head_dim.next_multiple_of(8) / 2;
    let queries = match forward.query_source {
        Source::Registers => forward.head_dim.next_multiple_of(16) / 4,
        Source::Shared => 0,
    };
    let needed = scores + probabilities + output + queries + ADDRESSES;
    let available = match forward.warpgroups {
        1 => 255,
        2 => 240,
        _ => 160,
    };
    if needed > available {
        return Err(format!("about {needed} registers of a thread, and there are {available}"));
    }
    forward.program().map(|_| ()).map_err(|error| error.to_string())
}

/// Registers for addresses, counters and the state of the softmax. The shipped configurations,
/// of which none spills, leave no less.
const ADDRESSES: u32 = 16;

/// The configuration of a name, among all that the search could try for the head dims that are
/// shipped.
pub fn find(name: &str) -> Option<Forward> {
    if let Some(whole) = name.strip_suffix("_streamk") {
        let forward = Forward { stream_k: true, ..find(whole)? };
        return Some(forward).filter(|it| it.program().is_ok());
    }
    let mut bases: Vec<Forward> = every_tuned();
    bases.extend(shipped(Target::SM_90A).into_iter().filter_map(|it| match it {
        Configuration::Forward(forward) => Some(forward),
        _ => None,
    }));
    // Names begin with the head dims and the element type.
    let prefix = |forward: &Forward| {
        let name = forward.name();
        let rows = format!("_{}x{}_", forward.query_rows(), forward.key_block);
        name.split(&rows).next().unwrap_or_default().to_owned()
    };
    bases.retain(|base| name.starts_with(&prefix(base)));
    let genomes = if bases.is_empty() { Vec::new() } else { Genome::all() };
    bases.iter().find_map(|base| {
        let all = genomes.iter().map(|genome| genome.configuration(base));
        all.into_iter().find(|forward| forward.name() == name)
    })
}

/// Every shape of decode.
pub fn decodes(base: &Decode) -> Vec<Decode> {
    let shapes = (1..=16).flat_map(|warps| [(warps, 16), (warps, 32)]);
    let stages = |shape| (1..=8).flat_map(move |stages| (1..=4).map(move |it| (shape, stages, it)));
    let of =
        |((warps, tile_keys), stages, blocks)| Decode { warps, tile_keys, stages, blocks, ..*base };
    shapes.flat_map(stages).map(of).collect()
}

/// The configurations of other families than the forward one that differ from a configuration in
/// the dimensions of their tables, as far as they can be built.
pub fn neighbours(base: &Configuration) -> Vec<Configuration> {
    let all: Vec<Configuration> = match base {
        Configuration::Decode(base) => {
            let tried = |it: &Decode| it.warps.is_multiple_of(2) && it.warps <= 8 && it.blocks <= 2;
            let shapes = decodes(base).into_iter().filter(tried);
            shapes.filter(|it| (2..=4).contains(&it.stages)).map(Configuration::Decode).collect()
        }
        Configuration::Mma(base) => mmas(base).into_iter().map(Configuration::Mma).collect(),
        Configuration::Prefill(base) => {
            let tile = Genome::of(&base.tile);
            let near = Gene::ALL.into_iter().flat_map(|gene| {
                gene.values().into_iter().map(move |value| tile.with(gene, value))
            });
            let tiles = near.map(|genome| genome.configuration(&base.tile));
            tiles
                .filter(|tile| possible(tile).is_ok())
                .map(|tile| Configuration::Prefill(Prefill { tile, ..*base }))
                .collect()
        }
        Configuration::Backward(base) => [64, 128]
            .map(|query_block| Configuration::Backward(Backward { query_block, ..*base }))
            .to_vec(),
        Configuration::BackwardMma(base) => backward_mmas(base),
        _ => Vec::new(),
    };
    let mut seen = std::collections::HashSet::from([*base]);
    all.into_iter().filter(|it| seen.insert(*it) && it.program().is_ok()).collect()
}

/// Every one of some configurations with every value of a parameter.
fn vary<T: Copy, V: Copy>(all: Vec<T>, values: &[V], with: impl Fn(T, V) -> T) -> Vec<T> {
    all.into_iter()
        .flat_map(|it| values.iter().map(move |value| (it, *value)))
        .map(|(it, value)| with(it, value))
        .collect()
}

fn backward_mmas(base: &BackwardMma) -> Vec<Configuration> {
    let all = vec![*base];
    let all = vary(all, &[1, 2], |it, key_tiles| BackwardMma { key_tiles, ..it });
    let all = vary(all, &[2, 4, 8], |it, key_warps| BackwardMma { key_warps, ..it });
    let all = vary(all, &[1, 2, 4], |it, column_warps| BackwardMma { column_warps, ..it });
    let all = vary(all, &[32, 64], |it, query_block| BackwardMma { query_block, ..it });
    let all = vary(all, &[8, 16, 32, 64], |it, part| BackwardMma { part, ..it });
    let all = vary(all, &[1, 2], |it, residents| BackwardMma { residents, ..it });
    all.into_iter().map(Configuration::BackwardMma).collect()
}

fn mmas(base: &Mma) -> Vec<Mma> {
    let all = vary(vec![*base], &[4, 8], |it, warps| Mma { warps, ..it });
    let all = vary(all, &[1, 2], |it, row_tiles| Mma { row_tiles, ..it });
    let all = vary(all, &[32, 64, 128], |it, key_block| Mma { key_block, ..it });
    let all = vary(all, &[1, 2], |it, residents| Mma { residents, ..it });
    let sources = [Source::Shared, Source::Registers];
    vary(all, &sources, |it, query_source| Mma { query_source, ..it })
}

/// What the planner chooses of the forward kernel on an H200.
#[cfg(test)]
pub(crate) fn chosen(problem: &str) -> Forward {
    let forward = crate::bench::Candidate::parse("forward").unwrap();
    let (plan, _) = forward.plan(&flashcore::gpu::Chip::H200, &problem.parse().unwrap()).unwrap();
    match *plan.chosen.choice.unwrap().kernel() {
        Configuration::Forward(forward) => forward,
        other => panic!("{other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shipped_configuration_is_in_the_space() {
        let all = Genome::all();
        for forward in every_tuned() {
            let genome = Genome::of(&forward);
            assert!(all.contains(&genome), "{}", forward.name());
            assert_eq!(genome.configuration(&forward), forward);
            assert_eq!(possible(&forward), Ok(()), "{}", forward.name());
        }
    }

    #[test]
    fn names_find_configurations_that_are_not_shipped() {
        let base = every_tuned()[0];
        let odd = Variant { key_block: 48, stages: 3, ..Variant::of(&base) }.configuration(&base);
        assert_eq!(find(&odd.name()), Some(odd));
        assert_eq!(find("forward_bf16_d128x128_dense_1x1"), None);
        assert_eq!(find("nonsense"), None);
    }

    #[test]
    fn children_are_in_the_space_and_the_same_for_a_seed() {
        let all = Genome::all();
        let draw = |seed| {
            let mut random = Random::new(seed);
            let mut genome = Genome::POOR;
            let mut seen = Vec::new();
            for _ in 0..200 {
                let other = genome.mutate(&mut random);
                genome = genome.cross(other, &mut random).mutate(&mut random);
                assert!(all.contains(&genome), "{genome:?}");
                seen.push(genome);
            }
            seen
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    /// The others' tables are in their spaces too.
    #[test]
    fn other_families_have_neighbours() {
        let kernels = shipped(Target::SM_90A);
        for family in ["mma", "decode", "prefill", "backward-mma"] {
            let base = kernels.iter().find(|it| it.family() == family).unwrap();
            let near = neighbours(base);
            assert!(near.len() > 8 && !near.contains(base), "{family}: {}", near.len());
            assert!(near.iter().all(|it| it.family() == family));
        }
    }

    /// Under a mask, registers leave the backward kernel one tile for each head dim.
    #[test]
    fn the_backward_kernel_has_few_neighbours() {
        for kernel in shipped(Target::SM_90A) {
            assert!(kernel.family() != "backward" || neighbours(&kernel).len() < 2, "{kernel:?}");
        }
    }

    #[test]
    fn what_cannot_be_held_is_not_possible() {
        let base = every_tuned().into_iter().find(|it| it.head_dim == 128).unwrap();
        let wide = Variant { warpgroups: 3, key_block: 256, ..Variant::of(&base) };
        assert!(possible(&wide.configuration(&base)).unwrap_err().contains("registers"));
    }
}
