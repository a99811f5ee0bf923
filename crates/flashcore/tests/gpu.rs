//! What only a GPU can show. Each test passes over itself where there is none.

use cuda::{Arguments, Buffer, Cache, Launch, Module, OptimizationLevel, Parameter};
use flashcore::check::ladder;
use flashcore::gpu::Gpu;
use flashcore::{Progress, check, check::cases};
use kernels::Ceiling;
use ptx::Target;

/// The GPU, or a word on why not.
fn gpu() -> Option<Gpu> {
    match Gpu::with_cache(0, Cache::disabled()) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// The GPU, if it is one with `wgmma`.
fn hopper() -> Option<Gpu> {
    let gpu = gpu()?;
    let fits = gpu.target() == Target::SM_90A;
    if !fits {
        eprintln!("skipped: {} has no wgmma", gpu.info().name);
    }
    fits.then_some(gpu)
}

struct Silent;

impl Progress for Silent {
    fn begin(&self, _: u64) {}
    fn advance(&self, _: u64) {}
}

#[test]
fn scalar_attention_is_right() {
    let Some(gpu) = gpu() else { return };
    let backend = flashcore::GpuBackend::new(gpu.into());
    for dtype in flashcore::DType::ALL {
        for case in cases::standard(dtype) {
            let outcome = check::run(&backend, "scalar", &case).unwrap();
            assert!(outcome.passed, "{case}: {outcome}");
        }
    }
}

#[test]
fn every_matrix_kernel_is_right() {
    let Some(gpu) = hopper() else { return };
    let configurations = ladder::configurations(&gpu);
    for rung in ladder::run(&gpu, &configurations, &Silent).unwrap() {
        assert!(rung.passed, "{rung:?}");
        if rung.family == "single" {
            assert!(rung.max_error < 1e-5, "{rung:?}");
        }
    }
}

/// The language costs nothing: the ceiling loop is as fast as by hand.
#[test]
fn the_ceiling_loop_is_as_fast_as_by_hand() {
    let Some(gpu) = hopper() else { return };
    let mut ratios = Vec::new();
    for _ in 0..5 {
        let hand = by_hand(&gpu);
        let ours = ladder::measure_ceiling(&gpu, Ceiling::PLAIN).unwrap();
        println!("ceiling: {ours:.0} TFLOP/s, by hand {hand:.0}");
        ratios.push(ours / hand);
    }
    ratios.sort_by(f64::total_cmp);
    assert!(ratios[2] >= 0.95, "{ratios:?}");
}

/// TFLOP/s of the loop in `data/ceiling_by_hand.ptx`.
fn by_hand(gpu: &Gpu) -> f64 {
    let text = include_str!("data/ceiling_by_hand.ptx");
    let cubin = gpu.device().compile(text, OptimizationLevel::O3).unwrap();
    let module = Module::load(gpu.device(), &cubin.bytes).unwrap();
    let parameters = [Parameter::Address, Parameter::Address, Parameter::U32];
    let function = module.function("by_hand", &parameters).unwrap();
    let shared_bytes = 49_152;
    function.set_dynamic_shared(shared_bytes).unwrap();
    let blocks = gpu.info().multiprocessors;
    // Pseudo-random bits with the exponents of numbers between -1 and 1.
    let numbers: Vec<u16> = (0..shared_bytes / 2)
        .map(|index| {
            let bits = (index.wrapping_mul(2_654_435_761) >> 16) as u16;
            bits & 0x80FF | 0x3E00
        })
        .collect();
    let source = Buffer::from_slice(gpu.stream(), &numbers).unwrap();
    let target = Buffer::new(gpu.device(), blocks as u64 * 256 * 512).unwrap();
    let (block, grid) = ([256, 1, 1], [blocks, 1, 1]);
    let launch = Launch { grid, block, shared_bytes, ..Launch::default() };
    let mut best = 0f64;
    for rounds in [2_000, 20_000, 20_000, 20_000, 20_000, 20_000] {
        let mut arguments = Arguments::new();
        arguments.push(source.address()).push(target.address()).push(rounds);
        let start = cuda::Event::new(gpu.device()).unwrap();
        let end = cuda::Event::new(gpu.device()).unwrap();
        start.record(gpu.stream()).unwrap();
        function.launch(gpu.stream(), &launch, &arguments).unwrap();
        end.record(gpu.stream()).unwrap();
        end.synchronize().unwrap();
        let milliseconds = end.milliseconds_since(&start).unwrap();
        let flop = Ceiling::PLAIN.flop(rounds) * blocks as f64;
        best = best.max(flop / milliseconds / 1e9);
    }
    best
}
