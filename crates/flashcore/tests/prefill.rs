//! Prefill on a GPU: what only a GPU can show. Each test passes over itself where there is none.

mod device;

use cuda::{Buffer, DeviceAddress};
use flashcore::check;
use flashcore::gpu::{DeviceTensor, Gpu, GpuError, PrefillPlan, ServingSize, ServingTensors};
use flashcore::reference::{self, Rows};
use flashcore::serving::{Placement, Sequences};
use flashcore::{
    Backend, DType, GpuBackend, Inputs, Layout, Mask, Output, Problem, Shape, Tensor,
    compare_sequences,
};

use device::{HALVES, Silent, all_pass, hopper};

#[test]
fn prefill_is_right_about_random_sequences() {
    let Some(gpu) = hopper() else { return };
    let backend = GpuBackend::new(gpu.into());
    let backends: [&dyn Backend; 1] = [&backend];
    let run = |dtype| check::run_sequences(&backends, Some("prefill"), dtype, 2_500, &Silent);
    all_pass(HALVES.into_iter().flat_map(run), 3_000);
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
}

/// Packed sequences on the device, and a plan over them.
struct Packed {
    plan: PrefillPlan,
    tensors: ServingTensors,
    host: [Tensor; 3],
    query_starts: Buffer,
    key_starts: Buffer,
    output: Buffer,
    lse: Buffer,
    _held: Vec<Buffer>,
}

impl Packed {
    fn new(gpu: &Gpu, mask: Mask) -> Self {
        let size = ServingSize::new(problem(mask)).with_packed_queries(ROWS).with_packed_keys(ROWS);
        let plan = PrefillPlan::new(gpu, &size).unwrap();
        let random = |heads: usize, seed: u64| {
            Tensor::random(DType::BF16, Shape::new(1, ROWS, heads, DIM), seed).unwrap()
        };
        let host = [random(HEADS, 1), random(KV_HEADS, 2), random(KV_HEADS, 3)];
        let stream = gpu.stream();
        let held: Vec<Buffer> =
            host.iter().map(|tensor| Buffer::from_slice(stream, tensor.bytes()).unwrap()).collect();
        let output = Buffer::new(gpu.device(), held[0].bytes()).unwrap();
        let lse = Buffer::new(gpu.device(), 4 * (ROWS * HEADS) as u64).unwrap();
        let starts = || Buffer::from_slice(stream, &[0u32; BATCH + 1]).unwrap();
        let (query_starts, key_starts) = (starts(), starts());
        let at = |buffer: &Buffer, like: &Tensor| DeviceTensor {
            address: buffer.address(),
            strides: like.layout().strides(),
        };
        let tensors = ServingTensors::new(
            at(&held[0], &host[0]),
            at(&held[1], &host[1]),
            at(&held[2], &host[2]),
            at(&output, &host[0]),
            lse.address(),
        )
        .with_query_starts(query_starts.address())
        .with_key_starts(key_starts.address());
        Packed { plan, tensors, host, query_starts, key_starts, output, lse, _held: held }
    }

    /// Sets the lists, and empties the results.
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

/// One graph is right for every batch that fits the plan.
#[test]
fn a_graph_is_right_for_other_lengths() {
    let Some(gpu) = hopper() else { return };
    let mask = Mask::window(Some(150), Some(0));
    let mut packed = Packed::new(&gpu, mask);
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
        let inputs = Inputs::new(query, key, value);
        let rows = Rows::of(&sequences);
        let reference = reference::attention_of_sequences(&sequences, inputs, &rows).unwrap();
        let baseline = reference::baseline_of_sequences(&sequences, inputs, &rows).unwrap();
        let report = device::report("prefill");
        let result = Output { output, lse, report };
        let verdict = compare_sequences(&sequences, &result, &reference, &baseline).unwrap();
        assert!(verdict.passed, "{queries:?} over {keys:?}: {verdict}");
    }
}

/// A schedule that was made once serves every launch with the same lengths.
#[test]
fn layers_share_a_schedule() {
    let Some(gpu) = hopper() else { return };
    let mut packed = Packed::new(&gpu, Mask::Causal);
    let starts = words(&starts_of(&[300, 0, 129, 64, 400]));
    let (stream, tensors) = (gpu.stream(), packed.tensors);
    packed.set(&gpu, &starts, &starts);
    packed.plan.launch(stream, &tensors).unwrap();
    let (output, lse) = packed.read(&gpu);
    packed.plan.schedule(stream, &tensors).unwrap();
    for _ in 0..3 {
        packed.set(&gpu, &starts, &starts);
        packed.plan.attend(stream, &tensors).unwrap();
        let (again, lse_again) = packed.read(&gpu);
        assert_eq!(output.bytes(), again.bytes());
        assert_eq!(lse, lse_again);
    }
}

/// Lists that the host cannot see may hold anything: nothing outside the tensors is read or
/// written (`compute-sanitizer` looks on), and the plan works on afterwards.
#[test]
fn hostile_lists_stay_inside() {
    let Some(gpu) = hopper() else { return };
    let mut packed = Packed::new(&gpu, Mask::Causal);
    let good = words(&starts_of(&[300, 0, 129, 64, 400]));
    let (stream, tensors) = (gpu.stream(), packed.tensors);
    let mut run = |query_starts: &[u32], key_starts: &[u32]| {
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
    let mut packed = Packed::new(&gpu, Mask::Causal);
    let good = packed.tensors;
    let mut refusal = |tensors: ServingTensors| {
        packed.plan.launch(gpu.stream(), &tensors).unwrap_err().to_string()
    };
    assert_eq!(
        refusal(ServingTensors { key_starts: None, ..good }),
        "the list of key starts tensor: it is missing"
    );
    let key = DeviceTensor { address: DeviceAddress(good.key.address.0 + 8), ..good.key };
    let reason = refusal(ServingTensors { key, ..good });
    assert!(reason.ends_with("is not a multiple of 16"), "{reason}");
    let mut strided = good;
    strided.value.strides.length = 0;
    assert_eq!(refusal(strided), "the value tensor: its length stride of 0 bytes cannot be walked");
    for size in [
        ServingSize::new(problem(Mask::Causal)).with_pages(4, 40, 4),
        ServingSize::new(problem(Mask::Causal).with_dtype(DType::F32)),
        ServingSize::new(problem(Mask::Causal)).with_entries(0),
    ] {
        assert!(matches!(PrefillPlan::new(&gpu, &size), Err(GpuError::Unsupported { .. })));
    }
}
