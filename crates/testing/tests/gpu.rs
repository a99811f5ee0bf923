//! Tests of the forward kernels that need a GPU. Each skips itself where there is none.

mod device;

use std::time::Instant;

use cuda::{Buffer, Cache};
use flashcore::family::Choice;
use flashcore::gpu::{AttentionPlan, Chip, DeviceTensor, Gpu, GpuError, Policy, Stream, Tensors};
use flashcore::plan::{Arrangement, candidates};
use flashcore::{
    Backend, DType, DTypes, Descale, Descales, GpuBackend, InputTensors, Machine, Mask, Plan,
    Preference, Problem, RunOptions, Strides, Tensor,
};
use flashcore_testing::check::{self, Checked, cases, matrix};
use kernels::forward::Form;
use kernels::{Configuration, Forward};
use ptx::Capability;

use device::{gpu, hopper};

/// Checks that every case that a kernel accepts passes; returns how many there are.
fn check_all(backend: &GpuBackend, kernel: &str, cases: &[check::Case]) -> usize {
    let backends: [&dyn Backend; 1] = [backend];
    let checked = check::run_all(&backends, Some(kernel), cases, &());
    let complaint = |Checked { case, outcome, .. }: &Checked| match outcome {
        Ok(outcome) if outcome.passed => None,
        Ok(outcome) => Some(format!("{case}: {outcome}")),
        Err(error) => Some(format!("{case}: {error}")),
    };
    let complaints: Vec<String> = checked.iter().filter_map(complaint).collect();
    let count = complaints.len();
    assert!(count == 0, "{count} of {} failed:\n{}", checked.len(), complaints.join("\n"));
    checked.len()
}

#[test]
fn scalar_attention_is_right() {
    let Some(gpu) = gpu() else { return };
    let backend = GpuBackend::new(gpu.into());
    for dtype in DType::WIDE {
        assert!(check_all(&backend, "scalar", &cases::standard(dtype)) > 80);
    }
}

#[test]
fn forward_attention_is_right() {
    let Some(gpu) = hopper() else { return };
    let backend = GpuBackend::new(gpu.into());
    let mut count = 0;
    for dtype in [DType::F16, DType::BF16] {
        count += check_all(&backend, "forward", &cases::standard(dtype));
        count += check_all(&backend, "forward", &cases::thorough(dtype));
    }
    println!("{count} cases");
    assert!(count >= 2000, "{count}");
}

/// Returns every case of both lists with all inputs in e4m3, under each kind of descale factors
/// that the kernel takes, with different contents.
fn all_in_e4m3() -> Vec<check::Case> {
    let inputs = DTypes::inputs(DType::E4M3);
    let heads = Descales { query: Descale::PerHead, ..Descales::of_cache(Descale::PerHead) };
    let keys = Descales { key: Descale::PerHead, ..Descales::NONE };
    let kinds = [(DType::BF16, heads), (DType::F16, Descales::NONE), (DType::BF16, keys)];
    let lists = [cases::standard(DType::E4M3), cases::thorough(DType::E4M3)].concat();
    let mut all = Vec::new();
    for (index, (output, descales)) in kinds.into_iter().enumerate() {
        for case in &lists {
            let mut case = case.clone();
            case.problem.dtypes = DTypes { output, ..inputs };
            case.problem.descales = descales;
            case.seed += 10_000 * index as u64;
            all.push(case);
        }
    }
    all
}

/// Checks without a GPU that the next test has as many cases as it should.
#[test]
fn forward_takes_thousands_of_cases_in_e4m3() {
    let takes = |case: &&check::Case| {
        let Ok(arrangement) = case.arrangement() else { return false };
        let candidates = candidates(&Chip::H200, &case.problem, &arrangement);
        candidates.iter().any(|it| it.kernel == "forward" && it.accepted)
    };
    let count = all_in_e4m3().iter().filter(takes).count();
    assert!(count >= 2000, "{count}");
}

#[test]
fn forward_attention_is_right_in_e4m3() {
    let Some(gpu) = hopper() else { return };
    let backend = GpuBackend::new(gpu.into());
    let count = check_all(&backend, "forward", &all_in_e4m3());
    println!("{count} cases");
    assert!(count >= 2000, "{count}");
}

#[test]
fn mma_attention_is_right() {
    let Some(gpu) = gpu() else { return };
    if !gpu.target().has(Capability::Mma) {
        return eprintln!("skipped: {} has no mma.sync", gpu.info().name);
    }
    let backend = GpuBackend::new(gpu.into());
    let mut count = 0;
    for dtype in [DType::F16, DType::BF16] {
        count += check_all(&backend, "mma", &cases::standard(dtype));
    }
    println!("{count} cases");
    assert!(count >= 100, "{count}");
}

/// Partial results of two concurrent streams do not mix, and an error names what the kernel cannot
/// read.
#[test]
fn split_keys_are_put_together_on_each_stream() {
    let Some(gpu) = gpu() else { return };
    if !gpu.target().has(Capability::Mma) {
        return eprintln!("skipped: {} has no mma.sync", gpu.info().name);
    }
    let problem = Problem::new(1, 4, 3, 128).with_key_length(20_000).with_dtype(DType::BF16);
    let plan = plan(&gpu, &problem, "mma");
    let tiling = plan.plan().chosen.choice.as_ref().and_then(|choice| choice.tiling).unwrap();
    assert!(tiling.splits > 4, "{tiling:?}");
    let streams = [Stream::new(gpu.device()).unwrap(), Stream::new(gpu.device()).unwrap()];
    let devices = [OnDevice::new(&gpu, &problem, 1), OnDevice::new(&gpu, &problem, 2)];
    let expected: Vec<_> = (devices.iter())
        .map(|device| {
            plan.launch(&streams[0], &device.tensors).unwrap();
            device.read(&streams[0])
        })
        .collect();
    assert_ne!(expected[0], expected[1]);
    for _ in 0..100 {
        for (stream, device) in streams.iter().zip(&devices) {
            device.poison(stream);
        }
        for (stream, device) in streams.iter().zip(&devices) {
            plan.launch(stream, &device.tensors).unwrap();
        }
        for ((stream, device), expected) in streams.iter().zip(&devices).zip(&expected) {
            assert!(device.read(stream) == *expected);
        }
    }
    let good = devices[0].tensors;
    let odd = Strides { heads: 129, ..good.key.strides };
    let wrong = Tensors { key: DeviceTensor { strides: odd, ..good.key }, ..good };
    let error = plan.launch(&streams[0], &wrong).unwrap_err();
    assert!(matches!(error, GpuError::Arrangement), "{error}");
    plan.launch(&streams[0], &good).unwrap();
    assert!(devices[0].read(&streams[0]) == expected[0]);
}

#[test]
fn hopper_runs_the_forward_kernel_and_says_so() {
    let Some(_) = hopper() else { return };
    let problem = Problem::new(1, 4, 300, 64).with_dtype(DType::BF16).with_mask(Mask::CAUSAL);
    let tensors = InputTensors::random(&problem, 0).unwrap();
    let machine = Machine::discover();
    let result = machine.attend(&problem, tensors.inputs(), &Preference::default(), None).unwrap();
    assert_eq!(result.report.kernel, "forward");
    let configuration = result.report.configuration.unwrap();
    assert!(configuration.starts_with("forward_bf16_d64x64_causal_"), "{configuration}");
    assert!(result.report.reason.contains("tiles"), "{}", result.report.reason);
}

/// Returns the plan of a kernel for tensors without gaps.
fn plan(gpu: &Gpu, problem: &Problem, kernel: &str) -> AttentionPlan {
    let arrangement = Arrangement::contiguous(problem).unwrap();
    AttentionPlan::new(gpu, problem, &arrangement, &Preference::named(kernel)).unwrap()
}

fn configuration(plan: &AttentionPlan) -> Configuration {
    *plan.plan().chosen.choice.as_ref().unwrap().kernel()
}

/// Returns the plan of a given configuration, which the planner would not choose.
fn asked_for(gpu: &Gpu, problem: &Problem, kernel: Configuration) -> AttentionPlan {
    let arrangement = Arrangement::contiguous(problem).unwrap();
    let preference = Preference::named(kernel.family());
    let mut plan = Plan::on_gpu(&gpu.chip(), problem, &arrangement, &preference).unwrap();
    let choice = Choice::for_kernel(&gpu.chip(), problem, kernel, None).unwrap();
    plan.chosen.choice = Some(choice);
    AttentionPlan::of(gpu, plan, arrangement).unwrap()
}

/// The tensors of a problem on the device, without gaps.
struct OnDevice {
    tensors: Tensors,
    output: Buffer,
    lse: Buffer,
    /// The inputs, kept alive for the addresses in `tensors`.
    _inputs: [Buffer; 3],
}

impl OnDevice {
    fn new(gpu: &Gpu, problem: &Problem, seed: u64) -> Self {
        let inputs = InputTensors::random(problem, seed).unwrap();
        let upload = |tensor: &Tensor| Buffer::from_slice(gpu.stream(), tensor.bytes()).unwrap();
        let inputs = [upload(&inputs.query), upload(&inputs.key), upload(&inputs.value)];
        let elements = problem.output_shape().elements().unwrap() as u64;
        let output = Buffer::new(gpu.device(), elements * problem.dtype().bytes() as u64).unwrap();
        let lse = Buffer::new(gpu.device(), 4 * problem.rows() as u64).unwrap();
        let addresses = [&inputs[0], &inputs[1], &inputs[2], &output].map(Buffer::address);
        let tensors = Tensors::contiguous(problem, addresses, Some(lse.address())).unwrap();
        OnDevice { tensors, output, lse, _inputs: inputs }
    }

    /// Returns the bits of the output and the log-sum-exps.
    fn read(&self, stream: &Stream) -> (Vec<u16>, Vec<u32>) {
        let output = stream.download_vec(self.output.all()).unwrap();
        (output, stream.download_vec(self.lse.all()).unwrap())
    }

    fn poison(&self, stream: &Stream) {
        stream.fill(self.output.all(), 0xFF).unwrap();
        stream.fill(self.lse.all(), 0xFF).unwrap();
    }
}

#[test]
fn a_thousand_runs_give_the_same_bits() {
    let Some(gpu) = hopper() else { return };
    for (dim, mask) in [(64, Mask::CAUSAL), (128, Mask::NONE), (256, Mask::CAUSAL)] {
        // More tiles than multiprocessors, and odd lengths.
        let problem = Problem::new(3, 10, 700, dim)
            .with_kv_heads(5)
            .with_key_length(901)
            .with_dtype(DType::BF16)
            .with_mask(mask);
        let device = OnDevice::new(&gpu, &problem, 7);
        let plan = plan(&gpu, &problem, "forward");
        let run = || {
            device.poison(gpu.stream());
            plan.launch(gpu.stream(), &device.tensors).unwrap();
            device.read(gpu.stream())
        };
        let first = run();
        for repeat in 1..1000 {
            assert!(run() == first, "{problem}: run {repeat} differs");
        }
    }
}

/// A plan on the caller's streams, with tensors that move, gives the same as the back end.
#[test]
fn a_plan_follows_its_tensors() {
    let Some(gpu) = hopper() else { return };
    let problem = Problem::new(2, 4, 200, 128).with_dtype(DType::F16).with_mask(Mask::CAUSAL);
    let backend = GpuBackend::new(Gpu::with_cache(0, Cache::disabled()).unwrap().into());
    let plan = plan(&gpu, &problem, "forward");
    let streams = [Stream::new(gpu.device()).unwrap(), Stream::new(gpu.device()).unwrap()];
    let devices = [OnDevice::new(&gpu, &problem, 1), OnDevice::new(&gpu, &problem, 2)];
    for round in 0..6 {
        let which = round % 3 % 2;
        let (stream, device) = (&streams[round % 2], &devices[which]);
        device.poison(stream);
        plan.launch(stream, &device.tensors).unwrap();
        let inputs = InputTensors::random(&problem, which as u64 + 1).unwrap();
        let expected = backend.run(&problem, inputs.inputs(), &RunOptions::default()).unwrap();
        let (output, lse) = device.read(stream);
        assert_eq!(output, half_bits(&expected.output), "round {round}");
        let bits: Vec<u32> = expected.lse.iter().map(|value| value.to_bits()).collect();
        assert_eq!(lse, bits, "round {round}");
    }
    // Strides other than the plan's are refused, and the plan works afterwards.
    let good = devices[0].tensors;
    let odd = Strides { heads: 129, ..good.key.strides };
    let wrong = Tensors { key: DeviceTensor { strides: odd, ..good.key }, ..good };
    let error = plan.launch(&streams[0], &wrong).unwrap_err();
    assert!(matches!(error, GpuError::Arrangement), "{error}");
    let address = good.output.address.offset(8);
    let wrong = Tensors { output: DeviceTensor { address, ..good.output }, ..good };
    let error = plan.launch(&streams[0], &wrong).unwrap_err().to_string();
    assert!(error.ends_with("do not lie as those that the plan was made for"), "{error}");
    plan.launch(&streams[0], &good).unwrap();
    streams[0].synchronize().unwrap();
}

/// Works like front ends do: results in new memory for every call, plans made and dropped, each
/// thread on its own stream.
#[test]
fn eight_threads_share_a_gpu_and_leak_nothing() {
    const THREADS: usize = 8;
    const CALLS: usize = 10_000;
    // Less than what any allocation of a call would add up to if it were leaked.
    const SLACK: u64 = 4 << 20;

    let Some(gpu) = hopper() else { return };
    let problems: Vec<Problem> = (0..THREADS)
        .map(|thread| {
            let mask = if thread % 3 == 0 { Mask::NONE } else { Mask::CAUSAL };
            Problem::new(1 + thread % 2, 4, 130 + 61 * thread, [64, 128, 256][thread % 3])
                .with_kv_heads(2)
                .with_dtype(if thread % 2 == 0 { DType::BF16 } else { DType::F16 })
                .with_mask(mask)
        })
        .collect();
    let devices: Vec<OnDevice> = problems
        .iter()
        .zip(0..)
        .map(|(problem, seed)| OnDevice::new(&gpu, problem, seed))
        .collect();
    let expected: Vec<_> = problems
        .iter()
        .zip(&devices)
        .map(|(problem, device)| {
            let plan = plan(&gpu, problem, "forward");
            plan.launch(gpu.stream(), &device.tensors).unwrap();
            device.read(gpu.stream())
        })
        .collect();

    let work = |thread: usize, calls: usize| {
        let (problem, device) = (&problems[thread], &devices[thread]);
        let stream = Stream::new(gpu.device()).unwrap();
        let mut forward = plan(&gpu, problem, "forward");
        for call in 0..calls {
            if call % 10 == 9 {
                forward = plan(&gpu, problem, "forward");
            }
            let [output, lse] = [&device.output, &device.lse]
                .map(|like| Buffer::new(gpu.device(), like.bytes()).unwrap());
            stream.fill(output.all(), 0xFF).unwrap();
            stream.fill(lse.all(), 0xFF).unwrap();
            let written = DeviceTensor { address: output.address(), ..device.tensors.output };
            let lse_address = Some(lse.address());
            let tensors = Tensors { output: written, lse: lse_address, ..device.tensors };
            forward.launch(&stream, &tensors).unwrap();
            let found: (Vec<u16>, Vec<u32>) = (
                stream.download_vec(output.all()).unwrap(),
                stream.download_vec(lse.all()).unwrap(),
            );
            assert!(found == expected[thread], "call {call} of {problem} differs");
        }
    };
    let on_all_threads = |calls: usize| {
        std::thread::scope(|scope| {
            let work = &work;
            for thread in 0..THREADS {
                scope.spawn(move || work(thread, calls));
            }
        });
        gpu.device().synchronize().unwrap();
        gpu.device().free_memory().unwrap()
    };
    // The driver keeps some memory that the first calls made it allocate.
    let before = on_all_threads(20);
    let begin = Instant::now();
    let after = on_all_threads(CALLS / THREADS);
    println!("{CALLS} calls in {:.2} s", begin.elapsed().as_secs_f64());
    assert!(after + SLACK >= before, "{} bytes were not given back", before - after);
}

fn half_bits(tensor: &Tensor) -> Vec<u16> {
    let pairs = tensor.bytes().chunks_exact(2);
    pairs.map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect()
}

/// Measures what a launch costs the host, with the same tensors and with four that moved.
#[test]
fn a_launch_costs_the_host_a_few_microseconds() {
    let Some(gpu) = hopper() else { return };
    let problem = Problem::new(1, 1, 64, 64).with_dtype(DType::BF16);
    let plan = plan(&gpu, &problem, "forward");
    let devices = [OnDevice::new(&gpu, &problem, 1), OnDevice::new(&gpu, &problem, 2)];
    for (what, period) in [("the same tensors", 1), ("tensors that move", 2)] {
        let mut costs = Vec::new();
        // Bursts are shorter than the driver's queue; when it is full, the host waits.
        for _ in 0..50 {
            gpu.stream().synchronize().unwrap();
            let begin = Instant::now();
            for launch in 0..200 {
                plan.launch(gpu.stream(), &devices[launch % period].tensors).unwrap();
            }
            costs.push(begin.elapsed().as_secs_f64() * 1e6 / 200.0);
        }
        gpu.stream().synchronize().unwrap();
        costs.sort_by(f64::total_cmp);
        println!("{what}: {:.2} us a launch (best {:.2})", costs[25], costs[0]);
        // 3.8 to 4.7 us were measured; an allocation or a compilation would show.
        assert!(costs[25] < 8.0, "{what}: {:.2} us a launch", costs[25]);
    }
}

/// The compact form of a kernel gives the same results as the full one, which then replaces it.
#[test]
fn the_full_form_takes_over_from_the_compact_one() {
    let Some(_) = hopper() else { return };
    let folder = tempfile::tempdir().unwrap();
    let open = || Gpu::with_cache(0, Cache::at(folder.path())).unwrap();
    for (heads, length, dim) in [(2, 300, 64), (40, 700, 128), (70, 1000, 64), (9, 2000, 192)] {
        let problem = Problem::new(2, heads, length, dim)
            .with_dtype(DType::BF16)
            .with_mask(flashcore::Mask::CAUSAL);
        let gpu = open();
        let device = OnDevice::new(&gpu, &problem, 3);
        let full = plan(&gpu, &problem, "forward");
        assert!(full.compilation().compact, "the cache was not empty");
        gpu.finish_compiling();
        assert!(!full.compilation().compact);
        let Configuration::Forward(forward) = configuration(&full) else { panic!() };
        let compact = Forward { form: Form::COMPACT, ..forward };
        let compact = asked_for(&gpu, &problem, Configuration::Forward(compact));
        let [late, early] = [full, compact].map(|plan| {
            device.poison(gpu.stream());
            plan.launch(gpu.stream(), &device.tensors).unwrap();
            device.read(gpu.stream())
        });
        assert!(early == late, "the two forms differ: {problem}");
        // The next process finds the full form in the cache.
        let next = plan(&open(), &problem, "forward");
        assert!(next.compilation().cached && !next.compilation().compact);
    }
}

/// The driver's compiler compiles kernels as cleanly as `ptxas` does in the tests of the assembler:
/// nothing in local memory, and no performance notes.
#[test]
fn the_driver_compiles_kernels_without_a_spill() {
    let Some(_) = hopper() else { return };
    let gpu = Gpu::with_policy(0, Cache::disabled(), Policy::AtOnce).unwrap();
    for configuration in kernels::forward::every_tuned() {
        let kernel = gpu.compiled(&Configuration::Forward(configuration)).unwrap();
        let (name, compilation) = (configuration.name(), kernel.compilation());
        assert_eq!(kernel.attributes().local_bytes, 0, "{name}");
        assert!(compilation.warnings.is_empty(), "{name}: {:?}", compilation.warnings);
    }
    for configuration in kernels::mma::every_tuned(gpu.target()) {
        let kernel = gpu.compiled(&Configuration::Mma(configuration)).unwrap();
        assert_eq!(kernel.attributes().local_bytes, 0, "{}", configuration.name());
    }
}

#[test]
fn every_matrix_kernel_is_right() {
    let Some(gpu) = hopper() else { return };
    let configurations = matrix::configurations(&gpu);
    for outcome in matrix::run(&gpu, &configurations, &()).unwrap() {
        assert!(outcome.passed, "{outcome:?}");
        if outcome.family == "single" {
            assert!(outcome.max_error < 1e-5, "{outcome:?}");
        }
    }
}

/// A measurement, not a check: how long each form takes to compile, and how fast it runs. Set
/// `CUDA_CACHE_DISABLE=1`, or the driver takes kernels from its own cache.
#[test]
#[ignore = "prints a table"]
fn forms() {
    let Some(_) = hopper() else { return };
    let forms: Vec<Form> = (0..8)
        .map(|bits| Form {
            overlap_tiles: bits & 1 == 0,
            two_steps: bits & 2 == 0,
            slow_path_apart: bits & 4 == 0,
        })
        .collect();
    let gpu = Gpu::with_policy(0, Cache::disabled(), Policy::AtOnce).unwrap();
    let shapes = [(32, 1, 64), (32, 8, 64), (16, 1, 128), (16, 8, 128), (8, 1, 256), (8, 8, 256)];
    for ((heads, thousands, dim), mask) in shapes.into_iter().flat_map(|shape| {
        [flashcore::Mask::NONE, flashcore::Mask::CAUSAL].map(|mask| (shape, mask))
    }) {
        let problem = Problem::new(16 / thousands, heads, 1024 * thousands, dim)
            .with_dtype(DType::BF16)
            .with_mask(mask);
        let device = OnDevice::new(&gpu, &problem, 1);
        let Configuration::Forward(chosen) = configuration(&plan(&gpu, &problem, "forward")) else {
            panic!()
        };
        let plans: Vec<AttentionPlan> = std::thread::scope(|scope| {
            let threads: Vec<_> = (forms.iter())
                .map(|&form| {
                    let (gpu, problem) = (&gpu, &problem);
                    let kernel = Configuration::Forward(Forward { form, ..chosen });
                    scope.spawn(move || asked_for(gpu, problem, kernel))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut times = vec![Vec::new(); plans.len()];
        for _ in 0..15 {
            for (plan, times) in plans.iter().zip(&mut times) {
                let [start, end] = [(); 2].map(|_| cuda::Event::new(gpu.device()).unwrap());
                plan.launch(gpu.stream(), &device.tensors).unwrap();
                start.record(gpu.stream()).unwrap();
                for _ in 0..3 {
                    plan.launch(gpu.stream(), &device.tensors).unwrap();
                }
                end.record(gpu.stream()).unwrap();
                end.synchronize().unwrap();
                times.push(end.milliseconds_since(&start).unwrap() / 3.0);
            }
        }
        let medians: Vec<f64> = (times.iter_mut())
            .map(|times| {
                times.sort_by(f64::total_cmp);
                times[times.len() / 2]
            })
            .collect();
        for (plan, median) in plans.iter().zip(&medians) {
            println!(
                "{:<70} compiled in {:5.0} ms, runs in {median:.4} ms, speed {:.3}",
                configuration(plan).name(),
                plan.compilation().milliseconds,
                medians[0] / median
            );
        }
    }
}
