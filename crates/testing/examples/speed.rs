//! How fast the simulator is: `cargo run --release -p flashcore-testing --example speed`.

use std::time::Instant;

use flashcore_testing::scene::Scene;
use kernels::Product;
use ptx::{Builder, Expression, F32, GlobalAddress, Program, Target, U64};
use sim::{Argument, Launch, Measure, Memory, Mode, Options, Policy, run};

fn main() {
    for mode in [Mode::Values, Mode::Checked] {
        arithmetic(mode);
        for policy in Policy::HOSTILE {
            product(mode, policy);
        }
    }
}

/// A loop of the arithmetic an attention kernel is made of.
fn arithmetic(mode: Mode) {
    let mut k = Builder::new("arithmetic", Target::SM_90A, 128);
    let data = k.parameter::<GlobalAddress>("data");
    let thread = k.thread_index();
    let offset = k.shared("tile", 512, 16);
    let tile = k.shared_address(offset);
    let mine = k.eval(data + thread.convert::<U64>() * 4);
    let value = k.load::<F32, _>(mine);
    let sum = k.variable(0.0);
    k.for_range(0, 20_000, 1, |k, _| {
        let scaled = k.fma(value, 0.5, sum);
        let weight = k.exp2(scaled * -1.0);
        let largest = k.eval(weight.maximum(scaled));
        let other = k.shuffle_butterfly(largest, 1);
        k.store(tile + thread * 4, other);
        let back = k.load::<F32, _>(tile + thread * 4);
        k.set(sum, back - largest);
    });
    k.store(mine, sum);
    let program = k.finish().expect("valid");
    let mut memory = Memory::new();
    let buffer = memory.input_f32("data", &[0.25; 128]);
    measure(
        "arithmetic",
        &program,
        1,
        vec![Argument::Address(buffer, 0)],
        memory,
        Policy::Earliest,
        mode,
        1,
    );
}

/// The multi-wgmma kernel, 32 seeds.
fn product(mode: Mode, policy: Policy) {
    let Scene { program, grid, arguments, memory, .. } =
        Scene::product(Product::PLAIN, 256, 512).expect("valid");
    measure("product", &program, grid, arguments, memory, policy, mode, 32);
}

#[allow(clippy::too_many_arguments)] // one line a measurement
fn measure(
    name: &str,
    program: &Program,
    grid: u32,
    arguments: Vec<Argument>,
    memory: Memory,
    policy: Policy,
    mode: Mode,
    seeds: u64,
) {
    let launch = Launch { program, grid, arguments };
    let start = Instant::now();
    let (mut lanes, mut tensor) = (0, 0);
    for seed in 0..seeds {
        let mut memory = memory.clone();
        let options = Options { policy, seed, mode, ..Options::default() };
        match run(&launch, &mut memory, &options) {
            Ok(report) => {
                lanes += report.counts.get(Measure::LaneInstructions);
                tensor += report.counts.get(Measure::TensorOperations);
            }
            Err(failure) => return println!("{failure}"),
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{name:<11} {mode:?} {policy}: {seeds} runs in {seconds:.2} s, {:.0} M lane instructions/s, \
         {:.2} G tensor operations/s",
        lanes as f64 / seconds / 1e6,
        tensor as f64 / seconds / 1e9
    );
}
