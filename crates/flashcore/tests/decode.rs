//! Decode on a GPU: what only a GPU can show. Each test passes over itself where there is none.

mod device;

use cuda::{Buffer, DeviceAddress};
use flashcore::check::{self, CheckedSequences, cases};
use flashcore::gpu::{DecodePlan, DeviceTensor, Gpu, GpuError, ServingSize, ServingTensors};
use flashcore::reference::{self, Rows};
use flashcore::serving::{Pages, Placement, Sequences};
use flashcore::{
    Backend, DType, GpuBackend, Inputs, Layout, Mask, Output, Problem, Shape, Tensor,
    compare_sequences,
};

use device::{Silent, gpu};

#[test]
fn decode_is_right_about_random_sequences() {
    let Some(gpu) = gpu() else { return };
    let backend = GpuBackend::new(gpu.into());
    let backends: [&dyn Backend; 1] = [&backend];
    let mut count = 0;
    let mut complaints = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for checked in check::run_sequences(&backends, Some("decode"), dtype, 1_650, &Silent) {
            let CheckedSequences { case, outcome, .. } = checked;
            count += 1;
            match outcome {
                Ok(outcome) if outcome.passed => {}
                Ok(outcome) => complaints.push(format!("{case}: {outcome}")),
                Err(error) => complaints.push(format!("{case}: {error}")),
            }
        }
    }
    println!("{count} cases");
    let wrong = complaints.len();
    assert!(wrong == 0, "{wrong} of {count} failed:\n{}", complaints.join("\n"));
    assert!(count >= 3_000, "{count}");
}

#[test]
fn decode_is_right_about_plain_problems() {
    let Some(gpu) = gpu() else { return };
    let backend = GpuBackend::new(gpu.into());
    let backends: [&dyn Backend; 1] = [&backend];
    for dtype in [DType::F16, DType::BF16] {
        let cases = cases::standard(dtype);
        let checked = check::run_all(&backends, Some("decode"), &cases, &Silent);
        assert!(checked.len() > 80, "{}", checked.len());
        for it in checked {
            let outcome = it.outcome.unwrap_or_else(|error| panic!("{}: {error}", it.case));
            assert!(outcome.passed, "{}: {outcome}", it.case);
        }
    }
}

/// A paged cache on the device, and a plan over it.
struct Served {
    plan: DecodePlan,
    tensors: ServingTensors,
    lengths: Buffer,
    table: Buffer,
    output: Buffer,
    lse: Buffer,
    _held: Vec<Buffer>,
}

const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 128;
const PAGE: usize = 16;
const COLUMNS: usize = 70;

fn problem(batch: usize) -> Problem {
    Problem::new(batch, HEADS, 1, DIM)
        .with_kv_heads(KV_HEADS)
        .with_dtype(DType::BF16)
        .with_mask(Mask::Causal)
}

impl Served {
    fn new(gpu: &Gpu, query: &Tensor, key: &Tensor, value: &Tensor, table: &[u32]) -> Self {
        let batch = query.shape().batch;
        let size = ServingSize::new(problem(batch)).with_pages(PAGE, COLUMNS, key.shape().batch);
        let plan = DecodePlan::new(gpu, &size).unwrap();
        let upload = |tensor: &Tensor| {
            let buffer = Buffer::from_slice(gpu.stream(), tensor.bytes()).unwrap();
            let strides = tensor.layout().strides();
            (DeviceTensor { address: buffer.address(), strides }, buffer)
        };
        let (q, k, v) = (upload(query), upload(key), upload(value));
        let output = Buffer::from_slice(gpu.stream(), &vec![0u8; query.bytes().len()]).unwrap();
        let lse = Buffer::from_slice(gpu.stream(), &vec![0f32; batch * HEADS]).unwrap();
        let lengths = Buffer::from_slice(gpu.stream(), &vec![0u32; batch]).unwrap();
        let table = Buffer::from_slice(gpu.stream(), table).unwrap();
        let strides = query.layout().strides();
        let out = DeviceTensor { address: output.address(), strides };
        let mut tensors = ServingTensors::new(q.0, k.0, v.0, out, lse.address());
        tensors.lengths = Some(lengths.address());
        tensors.block_table = Some(table.address());
        Served { plan, tensors, lengths, table, output, lse, _held: vec![q.1, k.1, v.1] }
    }

    fn read(&self, gpu: &Gpu, shape: Shape) -> (Tensor, Vec<f32>) {
        let bytes: Vec<u8> = gpu.stream().download_vec(self.output.all()).unwrap();
        let layout = Layout::contiguous(shape).unwrap();
        let output = Tensor::from_bytes(DType::BF16, layout, &bytes).unwrap();
        (output, gpu.stream().download_vec(self.lse.all()).unwrap())
    }
}

fn shuffled(count: usize) -> Vec<u32> {
    (0..count as u32).map(|page| (page * 37 + 11) % count as u32).collect()
}

/// One graph, captured when the sequences were short, is right at every length.
#[test]
fn a_graph_is_right_for_growing_lengths() {
    let Some(gpu) = gpu() else { return };
    let batch = 3;
    let pages = batch * COLUMNS;
    let query = Tensor::random(DType::BF16, Shape::new(batch, 1, HEADS, DIM), 1).unwrap();
    let cache = Shape::new(pages, PAGE, KV_HEADS, DIM);
    let key = Tensor::random(DType::BF16, cache, 2).unwrap();
    let value = Tensor::random(DType::BF16, cache, 3).unwrap();
    let table = shuffled(pages);
    let mut served = Served::new(&gpu, &query, &key, &value, &table);
    let stream = gpu.stream();
    let tensors = served.tensors;
    let graph = stream.capture::<GpuError>(|stream| served.plan.launch(stream, &tensors)).unwrap();
    let mut graph = graph.instantiate().unwrap();
    let mut seen = Vec::new();
    for step in 0..1000usize {
        let lengths = [step + 1, step / 3, 1000 - step];
        let words = lengths.map(|length| length as u32);
        stream.upload(&words, served.lengths.all()).unwrap();
        graph.launch(stream).unwrap();
        seen.push((lengths, served.read(&gpu, query.shape())));
    }
    let inputs = Inputs::new(&query, &key, &value);
    for (lengths, (output, lse)) in seen {
        let pages = Pages::new(PAGE, COLUMNS, table.clone()).unwrap();
        let sequences = Sequences::new(
            problem(batch),
            Placement::padded(vec![1; batch]),
            Placement::paged(lengths.to_vec(), pages),
        )
        .unwrap();
        let rows = Rows::of(&sequences);
        let reference = reference::attention_of_sequences(&sequences, inputs, &rows).unwrap();
        let baseline = reference::baseline_of_sequences(&sequences, inputs, &rows).unwrap();
        let result = Output { output, lse, report: device::report("decode") };
        let verdict = compare_sequences(&sequences, &result, &reference, &baseline).unwrap();
        assert!(verdict.passed, "{lengths:?}: {verdict}");
    }
}

/// Tables and lengths that the host cannot see may be anything: nothing outside the tensors is
/// read or written (`compute-sanitizer` looks on), and what is right stays right.
#[test]
fn hostile_tables_and_lengths_stay_inside() {
    let Some(gpu) = gpu() else { return };
    let batch = 5;
    let pages = batch * COLUMNS;
    let query = Tensor::random(DType::BF16, Shape::new(batch, 1, HEADS, DIM), 1).unwrap();
    let cache = Shape::new(pages, PAGE, KV_HEADS, DIM);
    let key = Tensor::random(DType::BF16, cache, 2).unwrap();
    let value = Tensor::random(DType::BF16, cache, 3).unwrap();
    let table = shuffled(pages);
    let mut served = Served::new(&gpu, &query, &key, &value, &table);
    let stream = gpu.stream();
    let mut run = |lengths: [i32; 5], table: &[u32]| {
        stream.upload(&lengths.map(|length| length as u32), served.lengths.all()).unwrap();
        stream.upload(table, served.table.all()).unwrap();
        let tensors = served.tensors;
        served.plan.launch(stream, &tensors).unwrap();
        served.read(&gpu, query.shape())
    };
    let most = (PAGE * COLUMNS) as i32;
    let good = run([7, most, 0, 1, 900], &table);
    // A length beyond the cache is the whole cache, a negative one is none.
    let beyond = run([7, i32::MAX, i32::MIN, 1, 900], &table);
    assert_eq!((good.0.bytes(), &good.1), (beyond.0.bytes(), &beyond.1));
    let mut hostile = table.clone();
    for (index, page) in hostile.iter_mut().enumerate() {
        *page = [u32::MAX, i32::MAX as u32, 1 << 31, pages as u32][index % 4];
    }
    let nonsense = run([i32::MAX, -1, most, 5, 123_456], &hostile);
    assert!(nonsense.1[HEADS..2 * HEADS].iter().all(|lse| *lse == f32::NEG_INFINITY));
    // Nothing was left behind.
    let again = run([7, most, 0, 1, 900], &table);
    assert_eq!((good.0.bytes(), &good.1), (again.0.bytes(), &again.1));
}

#[test]
fn what_the_host_can_see_is_refused() {
    let Some(gpu) = gpu() else { return };
    let query = Tensor::zeros(DType::BF16, Shape::new(1, 1, HEADS, DIM)).unwrap();
    let cache = Tensor::zeros(DType::BF16, Shape::new(COLUMNS, PAGE, KV_HEADS, DIM)).unwrap();
    let mut served = Served::new(&gpu, &query, &cache, &cache, &shuffled(COLUMNS));
    let good = served.tensors;
    let mut refusal = |tensors: ServingTensors| {
        served.plan.launch(gpu.stream(), &tensors).unwrap_err().to_string()
    };
    assert_eq!(
        refusal(ServingTensors { block_table: None, ..good }),
        "the block table tensor: it is missing"
    );
    assert_eq!(
        refusal(ServingTensors { sinks: good.lengths, ..good }),
        "the list of sinks tensor: the plan knows of none"
    );
    let key = DeviceTensor { address: DeviceAddress(good.key.address.0 + 8), ..good.key };
    let reason = refusal(ServingTensors { key, ..good });
    assert!(reason.ends_with("is not a multiple of 16"), "{reason}");
    for size in [
        ServingSize::new(problem(1)).with_pages(0, 4, 4),
        ServingSize::new(problem(1)).with_pages(16, 0, 4),
        ServingSize::new(problem(1)).with_entries(0),
    ] {
        assert!(matches!(DecodePlan::new(&gpu, &size), Err(GpuError::Unsupported { .. })));
    }
}

/// Microseconds of the plan itself, caches cold: run with `--ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn how_long_decode_takes() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream();
    let flush = Buffer::new(gpu.device(), 256 << 20).unwrap();
    let cells = [(1, 32, 8192), (1, 64, 131_072), (16, 32, 8192), (64, 64, 8192), (128, 32, 4096)];
    for (batch, heads, keys) in cells {
        let problem = Problem::new(batch, heads, 1, 128)
            .with_kv_heads(8)
            .with_key_length(keys)
            .with_dtype(DType::BF16);
        for page in [0, 1, 16, 64] {
            let rows = if page > 0 { page } else { keys };
            let entries = batch * keys / rows;
            let mut size = ServingSize::new(problem.clone());
            if page > 0 {
                size = size.with_pages(page, keys / page, entries);
            }
            let mut plan = DecodePlan::new(&gpu, &size).unwrap();
            let cache = Layout::contiguous(Shape::new(entries, rows, 8, 128)).unwrap().strides();
            let one = Layout::contiguous(problem.query_shape()).unwrap().strides();
            let room = |bytes: usize| {
                let buffer = Buffer::new(gpu.device(), bytes as u64).unwrap();
                stream.fill_words(buffer.all(), 0x3f00_3e80).unwrap();
                buffer
            };
            let bytes = 2 * batch * keys * 8 * 128;
            let (key, value) = (room(bytes), room(bytes));
            let (query, output) = (room(2 * batch * heads * 128), room(2 * batch * heads * 128));
            let lse = room(4 * batch * heads);
            let lengths = Buffer::from_slice(stream, &vec![keys as u32; batch]).unwrap();
            let table = Buffer::from_slice(stream, &shuffled(entries)).unwrap();
            let at = |buffer: &Buffer, strides| DeviceTensor { address: buffer.address(), strides };
            let mut tensors = ServingTensors::new(
                at(&query, one),
                at(&key, cache),
                at(&value, cache),
                at(&output, one),
                lse.address(),
            );
            tensors.lengths = Some(lengths.address());
            tensors.block_table = (page > 0).then(|| table.address());
            let mut times: Vec<f64> = (0..13)
                .map(|_| {
                    stream.fill(flush.all(), 1).unwrap();
                    let (start, end) = (event(&gpu), event(&gpu));
                    start.record(stream).unwrap();
                    plan.launch(stream, &tensors).unwrap();
                    end.record(stream).unwrap();
                    end.synchronize().unwrap();
                    end.milliseconds_since(&start).unwrap()
                })
                .collect();
            times.sort_by(f64::total_cmp);
            let microseconds = 1e3 * times[times.len() / 2];
            println!(
                "B{batch} H{heads}/8 {keys} page {page}: {microseconds:.1} us, {:.0} GB/s, {} teams, {}",
                2.0 * bytes as f64 / microseconds / 1e3,
                plan.teams(),
                plan.configuration().name()
            );
        }
    }
}

fn event(gpu: &Gpu) -> cuda::Event {
    cuda::Event::new(gpu.device()).unwrap()
}
