//! What the CPU back end reaches beside the matrix products of the crate `gemm` on the same cores.
//!
//! ```sh
//! cargo run --release -p flashcore --example cpu_speed
//! cargo run --release -p flashcore --example cpu_speed -- 1024 8 128   # length, heads, head dim
//! ```

use std::time::Instant;

use flashcore::{
    Backend, Backward, CpuBackend, DType, Error, InputTensors, Mask, Output, Problem, RunOptions,
    Tensor,
};

/// Rounds over everything. The best of each counts, and neighbours in time are compared: whatever
/// else the machine does can only make a run slower.
const ROUNDS: usize = 12;

/// The sides of the matrices that `gemm` multiplies.
const SIZE: usize = 2048;

fn main() -> Result<(), Error> {
    let mut sizes = std::env::args().skip(1).map(|argument| argument.parse::<usize>());
    let mut size = |default: usize| match sizes.next() {
        Some(given) => given.unwrap_or_else(|error| {
            eprintln!("length, heads and head dim are numbers: {error}");
            std::process::exit(2)
        }),
        None => default,
    };
    let (length, heads, head_dim) = (size(4096), size(8), size(128));
    let problems = DType::WIDE.into_iter().flat_map(|dtype| {
        let problem = Problem::new(1, heads, length, head_dim).with_dtype(dtype);
        [Mask::NONE, Mask::CAUSAL].map(|mask| problem.clone().with_mask(mask))
    });
    let (backend, options) = (CpuBackend::new(), RunOptions::default());
    let mut cases = Vec::new();
    for problem in problems {
        let tensors = InputTensors::random(&problem, 0)?;
        let saved = backend.run(&problem, tensors.inputs(), &options)?;
        let gradient = Tensor::random(problem.dtype(), problem.output_shape(), 1)?;
        cases.push(Case { problem, tensors, saved, gradient, best: [f64::INFINITY; 2] });
    }
    let (mut gemm, mut best) = (Gemm::new(), f64::INFINITY);
    for _ in 0..ROUNDS {
        for Case { problem, tensors, saved, gradient, best } in &mut cases {
            let begin = Instant::now();
            backend.run(problem, tensors.inputs(), &options)?;
            best[0] = best[0].min(begin.elapsed().as_secs_f64());
            let begin = Instant::now();
            let backward = Backward::new(tensors.inputs(), saved, &*gradient);
            backend.run_backward(problem, backward, &options)?;
            best[1] = best[1].min(begin.elapsed().as_secs_f64());
        }
        let begin = Instant::now();
        gemm.run();
        best = best.min(begin.elapsed().as_secs_f64());
    }

    println!("{}", backend.describe());
    let peak = 2.0 * (SIZE as f64).powi(3) / best / 1e9;
    println!("gemm, f32, {SIZE} x {SIZE} x {SIZE}: {peak:.1} GFLOP/s");
    println!("attention, 1 x {heads} heads x {length} x {head_dim}:");
    for Case { problem, best, .. } in &cases {
        // Two products forward, five backward.
        for (pass, seconds, factor) in [("forward", best[0], 1.0), ("backward", best[1], 2.5)] {
            let rate = factor * problem.visible_flops() / seconds / 1e9;
            let (dtype, mask, share) = (problem.dtype(), problem.mask, rate / peak);
            println!(
                "  {dtype} {mask}, {pass}: {seconds:.3} s, {rate:.1} GFLOP/s, {share:.2} of gemm"
            );
        }
        println!("    backward takes {:.2} of forward", best[1] / best[0]);
    }
    Ok(())
}

/// A problem with its tensors, and the best times forward and backward.
struct Case {
    problem: Problem,
    tensors: InputTensors,
    saved: Output,
    gradient: Tensor,
    best: [f64; 2],
}

/// A large square product over all threads.
struct Gemm {
    left: Vec<f32>,
    right: Vec<f32>,
    product: Vec<f32>,
}

impl Gemm {
    fn new() -> Self {
        let matrix = |seed: usize| -> Vec<f32> {
            (0..SIZE * SIZE).map(|i| ((i * 31 + seed) % 101) as f32 / 101.0 - 0.5).collect()
        };
        Gemm { left: matrix(1), right: matrix(2), product: matrix(3) }
    }

    #[allow(unsafe_code)]
    fn run(&mut self) {
        let (row, column) = (SIZE as isize, 1isize);
        // SAFETY: three matrices of this size, without gaps, row by row.
        unsafe {
            gemm::gemm(
                SIZE,
                SIZE,
                SIZE,
                self.product.as_mut_ptr(),
                column,
                row,
                false,
                self.left.as_ptr(),
                column,
                row,
                self.right.as_ptr(),
                column,
                row,
                0.0f32,
                1.0f32,
                false,
                false,
                false,
                gemm::Parallelism::Rayon(0),
            );
        }
    }
}
