//! A cost model from the simulator's counts: good enough to discard hopeless configurations before
//! they are compiled, not to tell good ones from the best.
//!
//! The simulator runs one tile over two key blocks and over four; the difference is the cost of a
//! block in the steady state of the loop. A Hopper multiprocessor does 4096 tensor-core operations,
//! 16 exponentials and 4 instructions in a cycle; products and softmax overlap, more so where
//! warpgroups take turns (ping-pong).

use flashcore::Problem;
use flashcore::family::Choice;
use flashcore::gpu::Chip;
use kernels::forward::TileLists;
use kernels::{Configuration, Forward, MaskKind, Rules};
use sim::{Measure, Options, Policy};
use testing::scene::Call;

/// What a key block costs a multiprocessor, in cycles.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockCost {
    /// Cycles of the tensor cores.
    pub tensor: f64,
    /// Cycles of the special-function unit, for exponentials.
    pub exponentials: f64,
    /// Cycles to issue instructions.
    pub issue: f64,
}

impl BlockCost {
    /// Counts the cost of a configuration in the simulator.
    pub fn count(forward: &Forward) -> Result<Self, String> {
        // A mask costs nothing in most blocks.
        let dense = Forward { rules: Rules::DENSE, stream_k: false, ..*forward };
        let count = |blocks: u32| {
            let lengths = [dense.query_rows(), blocks * dense.key_block].map(|it| it as usize);
            let call = Call::new(Configuration::Forward(dense), 1, lengths, [1, 1]);
            let scene = call.without_expected().map_err(|error| error.to_string())?;
            let options = Options::values(Policy::Earliest, 0);
            let (_, report) = scene.run(&options).map_err(|failure| failure.to_string())?;
            Ok::<_, String>(report.counts)
        };
        let (few, many) = (count(2)?, count(4)?);
        let each = |measure| (many.get(measure) - few.get(measure)) as f64 / 2.0;
        Ok(BlockCost {
            tensor: each(Measure::TensorOperations) / 4096.0,
            exponentials: each(Measure::Exponentials) / 16.0,
            issue: each(Measure::WarpInstructions) / 4.0,
        })
    }

    /// Cycles of a block in the loop of a configuration.
    fn cycles(&self, forward: &Forward) -> f64 {
        let softmax = self.exponentials.max(self.issue);
        let overlap = match (forward.warpgroups, forward.ping_pong) {
            (1, _) => 0.6,
            (_, false) => 0.75,
            (_, true) => 0.9,
        };
        let both = self.tensor.max(softmax) + (1.0 - overlap) * self.tensor.min(softmax);
        // Barriers; and with one stage every block waits for its copy.
        both + 60.0 + if forward.stages == 1 { 700.0 } else { 0.0 }
    }
}

/// Milliseconds that a configuration should take for a problem.
pub fn predict(
    forward: &Forward,
    cost: &BlockCost,
    problem: &Problem,
    chip: &Chip,
    clock_megahertz: f64,
) -> Result<f64, String> {
    // Stream-K affects all configurations alike.
    let forward = &Forward { stream_k: false, ..*forward };
    let choice = Choice::for_kernel(chip, problem, Configuration::Forward(*forward), None)?;
    let tiling = choice.tiling.ok_or("it has no tiles")?;
    let blocks = choice.launches[choice.main].blocks.max(1);
    let each = cost.cycles(forward);
    let begin = if forward.query_buffers > 1 { 1200.0 } else { 1800.0 }
        + if forward.form.overlap_tiles { 0.0 } else { 600.0 };
    let tile = |number: u32| {
        let row_tile = number % tiling.tiles_per_head.max(1);
        key_blocks(forward, row_tile, problem) * each + begin
    };
    let cycles = match choice.lists_over(&[]).tiles {
        None => f64::from(tiling.tiles.div_ceil(blocks)) * tile(0),
        Some(words) => (0..blocks as usize)
            .map(|block| {
                let list = words[words[block] as usize..].iter();
                let list = list.take_while(|it| **it != TileLists::END);
                list.map(|number| tile(*number)).sum::<f64>()
            })
            .fold(0.0, f64::max),
    };
    Ok(cycles / clock_megahertz / 1e3)
}

/// Key blocks that a row tile takes.
fn key_blocks(forward: &Forward, row_tile: u32, problem: &Problem) -> f64 {
    let all = problem.key_length.div_ceil(forward.key_block as usize) as i64;
    if forward.rules.mask == MaskKind::Dense {
        return all as f64;
    }
    let end = (i64::from(row_tile) + 1) * i64::from(forward.query_rows());
    let seen = (end + problem.key_length as i64 - problem.query_length as i64).max(0);
    let blocks = (seen as u64).div_ceil(u64::from(forward.key_block)) as i64;
    blocks.clamp(1, all.max(1)) as f64
}

#[cfg(test)]
mod tests {
    use super::super::space::Genome;
    use super::*;

    /// What is known to be good is predicted to be far better than the poor start, and not far
    /// from what was measured.
    #[test]
    fn the_poor_are_told_from_the_good() {
        for text in ["b=2,h=32,s=8192,d=64,bf16", "b=2,h=16,s=8192,d=128,bf16,causal"] {
            let problem: Problem = text.parse().unwrap();
            let chip = Chip::H200;
            let good = super::super::space::chosen(text);
            let poor = Genome::POOR.configuration(&good);
            let time = |forward: &Forward| {
                let cost = BlockCost::count(forward).unwrap();
                predict(forward, &cost, &problem, &chip, 1750.0).unwrap()
            };
            let (good, poor) = (time(&good), time(&poor));
            assert!(poor > 3.0 * good, "{text}: {poor} against {good}");
            let tflops = problem.flops() / good / 1e9;
            assert!((400.0..1100.0).contains(&tflops), "{text}: {tflops} TFLOP/s");
        }
    }
}
