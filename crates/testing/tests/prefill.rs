//! Tests of prefill that need a GPU. Each skips itself where there is none.

mod device;

use cuda::{Buffer, DeviceAddress};
use flashcore::gpu::{AttentionPlan, DeviceTensor, Gpu, GpuError, Tensors};
use flashcore::plan::Arrangement;
use flashcore::serving::{Placement, Sequences};
use flashcore::{
    Backend, DType, GpuBackend, Inputs, Layout, Mask, Preference, Problem, Storage, Tensor,
};
use flashcore_testing::check;

use device::{HALVES, all_pass, hopper, is_right};

#[test]
fn prefill_is_right_about_random_sequences() {
    let Some(gpu) = hopper() else { return };
    let backend = GpuBackend::new(gpu.into());
    let backends: [&dyn Backend; 1] = [&backend];
    let run = |dtype| check::run_sequences(&backends, Some("prefill"), dtype, 2_500, &());
    all_pass(HALVES.into_iter().flat_map(run), 3_000);
}

/// Random sequences with all inputs in e4m3, and 8-bit caches that are widened before.
#[test]
fn prefill_is_right_about_random_sequences_in_e4m3() {
    let Some(gpu) = hopper() else { return };
    let backend = GpuBackend::new(gpu.into());
    let backends: [&dyn Backend; 1] = [&backend];
    let checked = check::run_sequences(&backends, Some("prefill"), DType::E4M3, 7_500, &());
    let narrow = checked.iter().filter(|it| it.case.contains("q=e4m3")).count();
    println!("{narrow} of them with queries in e4m3");
    assert!(narrow >= 300, "{narrow}");
    all_pass(checked, 1_000);
}

#[test]
fn prefill_is_right_about_plain_problems() {
    let Some(gpu) = hopper() else { return };
    device::is_right_about_plain_problems(gpu, "prefill");
}

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const ROWS: usize = 900;
const BATCH: usize = 5;

fn problem(mask: Mask) -> Problem {
    Problem::new(BATCH, HEADS, 400, DIM)
        .with_kv_heads(KV_HEADS)
        .with_dtype(DType::BF16)
        .with_mask(mask)
        .with_storage(Storage::Packed(ROWS), Storage::Packed(ROWS))
}

fn plan(gpu: &Gpu, problem: &Problem) -> Result<AttentionPlan, flashcore::Error> {
    let arrangement = Arrangement::contiguous(problem)?;
    AttentionPlan::new(gpu, problem, &arrangement, &Preference::named("prefill"))
}

/// Packed sequences on the device, and a plan for them.
struct Packed {
    plan: AttentionPlan,
    tensors: Tensors,
    host: [Tensor; 3],
    query_starts: Buffer,
    key_starts: Buffer,
    output: Buffer,
    lse: Buffer,
    _held: Vec<Buffer>,
}

impl Packed {
    fn new(gpu: &Gpu, mask: Mask) -> Self {
        let problem = problem(mask);
        let plan = plan(gpu, &problem).unwrap();
        let random = |shape, seed: u64| Tensor::random(DType::BF16, shape, seed).unwrap();
        let host = [
            random(problem.query_shape(), 1),
            random(problem.key_shape(), 2),
            random(problem.value_shape(), 3),
        ];
        let stream = gpu.stream();
        let held: Vec<Buffer> =
            host.iter().map(|tensor| Buffer::from_slice(stream, tensor.bytes()).unwrap()).collect();
        let output = Buffer::new(gpu.device(), held[0].bytes()).unwrap();
        let lse = Buffer::new(gpu.device(), 4 * (ROWS * HEADS) as u64).unwrap();
        let starts = || Buffer::from_slice(stream, &[0u32; BATCH + 1]).unwrap();
        let (query_starts, key_starts) = (starts(), starts());
        let addresses = [&held[0], &held[1], &held[2], &output].map(Buffer::address);
        let mut tensors = Tensors::contiguous(&problem, addresses, Some(lse.address())).unwrap();
        tensors.query_starts = Some(query_starts.address());
        tensors.key_starts = Some(key_starts.address());
        Packed { plan, tensors, host, query_starts, key_starts, output, lse, _held: held }
    }

    /// Writes the lists of starts, and clears the results.
    fn set(&self, gpu: &Gpu, query_starts: &[u32], key_starts: &[u32]) {
        let stream = gpu.stream();
        stream.upload(query_starts, self.query_starts.all()).unwrap();
        stream.upload(key_starts, self.key_starts.all()).unwrap();
        stream.fill(self.output.all(), 0).unwrap();
        stream.fill(self.lse.all(), 0).unwrap();
    }

    fn read(&self, gpu: &Gpu) -> (Tensor, Vec<f32>) {
        let bytes: Vec<u8> = gpu.stream().download_vec(self.output.all()).unwrap();
        let layout = Layout::contiguous(self.host[0].shape()).unwrap();
        let output = Tensor::from_bytes(DType::BF16, layout, &bytes).unwrap();
        (output, gpu.stream().download_vec(self.lse.all()).unwrap())
    }
}

fn starts_of(lengths: &[usize; BATCH]) -> Vec<usize> {
    (0..=BATCH).map(|sequence| lengths[..sequence].iter().sum()).collect()
}

fn words(starts: &[usize]) -> Vec<u32> {
    starts.iter().map(|start| *start as u32).collect()
}

/// A captured graph is right for every batch that fits the plan.
#[test]
fn a_graph_is_right_for_other_lengths() {
    let Some(gpu) = hopper() else { return };
    let mask = Mask::window(Some(150), Some(0));
    let packed = Packed::new(&gpu, mask);
    let stream = gpu.stream();
    let tensors = packed.tensors;
    let graph = stream.capture::<GpuError>(|stream| packed.plan.launch(stream, &tensors)).unwrap();
    let mut graph = graph.instantiate().unwrap();
    for step in 0..60usize {
        let queries = [step * 5, 1, 400 - step, step % 3, 70 + step];
        let keys = [step * 5, 100, 400 - step, 0, 100 + step];
        let (query_starts, key_starts) = (starts_of(&queries), starts_of(&keys));
        packed.set(&gpu, &words(&query_starts), &words(&key_starts));
        graph.launch(stream).unwrap();
        let (output, lse) = packed.read(&gpu);
        let sequences = Sequences::new(
            problem(mask),
            Placement::packed(query_starts),
            Placement::packed(key_starts),
        )
        .unwrap();
        let [query, key, value] = &packed.host;
        is_right(&sequences, Inputs::new(query, key, value), output, lse);
    }
}

/// Launches with the same lengths share one schedule of tiles.
#[test]
fn layers_share_a_schedule() {
    let Some(gpu) = hopper() else { return };
    let packed = Packed::new(&gpu, Mask::CAUSAL);
    let starts = words(&starts_of(&[300, 0, 129, 64, 400]));
    let (stream, tensors) = (gpu.stream(), packed.tensors);
    packed.set(&gpu, &starts, &starts);
    packed.plan.launch(stream, &tensors).unwrap();
    let (output, lse) = packed.read(&gpu);
    packed.plan.prepare(stream, &tensors).unwrap();
    for _ in 0..3 {
        packed.set(&gpu, &starts, &starts);
        packed.plan.attend(stream, &tensors).unwrap();
        let (again, lse_again) = packed.read(&gpu);
        assert_eq!(output.bytes(), again.bytes());
        assert_eq!(lse, lse_again);
    }
}

/// Lists that the host cannot check may hold anything: nothing outside the tensors is read or
/// written (run under `compute-sanitizer` to verify), and the plan works afterwards.
#[test]
fn hostile_lists_stay_inside() {
    let Some(gpu) = hopper() else { return };
    let packed = Packed::new(&gpu, Mask::CAUSAL);
    let good = words(&starts_of(&[300, 0, 129, 64, 400]));
    let (stream, tensors) = (gpu.stream(), packed.tensors);
    let run = |query_starts: &[u32], key_starts: &[u32]| {
        packed.set(&gpu, query_starts, key_starts);
        packed.plan.launch(stream, &tensors).unwrap();
        packed.read(&gpu)
    };
    let (output, lse) = run(&good, &good);
    let (rows, far) = (ROWS as u32, i32::MAX as u32);
    for hostile in [
        [far, u32::MAX, 1 << 31, 0, far, u32::MAX],
        [0, far, 0, far, 0, far],
        [rows - 1, rows + 1, 3, 2, 1, 0],
        // As many tiles as there can be, and more: every sequence has all rows.
        [0, rows, 0, rows, 0, rows],
    ] {
        run(&hostile, &good);
        run(&good, &hostile);
        run(&hostile, &hostile);
    }
    let (again, lse_again) = run(&good, &good);
    assert_eq!(output.bytes(), again.bytes());
    assert_eq!(lse, lse_again);
}

#[test]
fn what_the_host_can_see_is_refused() {
    let Some(gpu) = hopper() else { return };
    let packed = Packed::new(&gpu, Mask::CAUSAL);
    let good = packed.tensors;
    let refusal =
        |tensors: Tensors| packed.plan.launch(gpu.stream(), &tensors).unwrap_err().to_string();
    assert_eq!(
        refusal(Tensors { key_starts: None, ..good }),
        "the list of key starts tensor: it is missing"
    );
    let key = DeviceTensor { address: DeviceAddress(good.key.address.0 + 8), ..good.key };
    let reason = refusal(Tensors { key, ..good });
    assert!(reason.ends_with("do not lie as those that the plan was made for"), "{reason}");
    let mut strided = good;
    strided.value.strides.length = 0;
    let reason = refusal(strided);
    assert!(reason.ends_with("do not lie as those that the plan was made for"), "{reason}");
    let arrangement = strided.arrangement();
    let candidates = flashcore::plan::candidates(&gpu.chip(), &problem(Mask::CAUSAL), &arrangement);
    let prefill = candidates.into_iter().find(|it| it.kernel == "prefill").unwrap();
    assert_eq!(prefill.reason, "the value tensor: its length stride of 0 bytes cannot be walked");
    let of = |keys| problem(Mask::CAUSAL).with_storage(Storage::Packed(ROWS), keys);
    for problem in [
        of(Storage::Paged { size: 4, columns: 100, pages: 4 }),
        problem(Mask::CAUSAL).with_dtype(DType::F32),
    ] {
        assert!(matches!(plan(&gpu, &problem), Err(flashcore::Error::Backend(_))));
    }
}
