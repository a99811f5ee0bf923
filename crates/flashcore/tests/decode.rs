//! Sequences on a GPU: what only a GPU can show of attention over caches, of appending to them and
//! of merging parts. Each test passes over itself where there is none.

mod device;

use cuda::{Buffer, DeviceAddress};
use flashcore::check;
use flashcore::gpu::{
    AppendPlan, AppendSize, AppendTensors, DeviceTensor, Gpu, GpuError, MergePlan, MergeSize,
    MergeTensors, RotaryTables, ServingPlan, ServingSize, ServingTensors, TurnedQueries,
};
use flashcore::reference::{self, Rows};
use flashcore::serving::{Pages, Placement, Sequences};
use flashcore::{
    Backend, DType, GpuBackend, Inputs, Layout, Mask, Output, Problem, Shape, Tensor,
    compare_sequences,
};

use device::{HALVES, Silent, all_pass, gpu};

#[test]
fn decode_is_right_about_random_sequences() {
    let Some(gpu) = gpu() else { return };
    let backend = GpuBackend::new(gpu.into());
    let backends: [&dyn Backend; 1] = [&backend];
    let run = |dtype| check::run_sequences(&backends, Some("decode"), dtype, 1_650, &Silent);
    all_pass(HALVES.into_iter().flat_map(run), 3_000);
}

#[test]
fn decode_is_right_about_plain_problems() {
    let Some(gpu) = gpu() else { return };
    device::is_right_about_plain_problems(gpu, "decode");
}

#[test]
fn new_tokens_are_where_the_host_would_put_them() {
    let Some(gpu) = gpu() else { return };
    all_pass(HALVES.into_iter().flat_map(|it| check::run_appends(&gpu, it, 600, &Silent)), 1_200);
}

#[test]
fn parts_are_merged() {
    let Some(gpu) = gpu() else { return };
    let run = |dtype| check::run_merges(&gpu, dtype, 600, &Silent);
    all_pass(DType::ALL.into_iter().flat_map(run), 1_800);
}

const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 128;
const PAGE: usize = 16;
const COLUMNS: usize = 70;
/// Positions that a sequence has room for.
const MOST: usize = PAGE * COLUMNS;

fn problem(batch: usize) -> Problem {
    Problem::new(batch, HEADS, 1, DIM)
        .with_kv_heads(KV_HEADS)
        .with_key_length(MOST)
        .with_dtype(DType::BF16)
        .with_mask(Mask::Causal)
}

fn paged(batch: usize) -> ServingSize {
    ServingSize::new(problem(batch)).with_pages(PAGE, COLUMNS, batch * COLUMNS)
}

/// Random tensors of the shapes that a size has, on the device and in host memory.
struct Served {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Buffer,
    lse: Buffer,
    tensors: ServingTensors,
    _held: Vec<Buffer>,
}

/// A list on the device, whose numbers can be changed.
fn list(gpu: &Gpu, numbers: &[i32]) -> Buffer {
    Buffer::from_slice(gpu.stream(), numbers).unwrap()
}

impl Served {
    fn new(gpu: &Gpu, size: &ServingSize) -> Self {
        let problem = &size.problem;
        let queries = if size.packed_queries { 1 } else { problem.batch };
        let query = Shape::new(queries, size.query_rows, HEADS, DIM);
        let cache = Shape::new(size.entries, size.key_rows, KV_HEADS, DIM);
        let random = |shape, seed| Tensor::random(DType::BF16, shape, seed).unwrap();
        let (query, key, value) = (random(query, 1), random(cache, 2), random(cache, 3));
        let upload = |tensor: &Tensor| Buffer::from_slice(gpu.stream(), tensor.bytes()).unwrap();
        let held = vec![upload(&query), upload(&key), upload(&value)];
        let output = Buffer::from_slice(gpu.stream(), &vec![0u8; query.bytes().len()]).unwrap();
        let rows = queries * size.query_rows * HEADS;
        let lse = Buffer::from_slice(gpu.stream(), &vec![0f32; rows]).unwrap();
        let at = |buffer: &Buffer, tensor: &Tensor| DeviceTensor {
            address: buffer.address(),
            strides: tensor.layout().strides(),
        };
        let tensors = ServingTensors::new(
            at(&held[0], &query),
            at(&held[1], &key),
            at(&held[2], &value),
            at(&output, &query),
            lse.address(),
        );
        Served { query, key, value, output, lse, tensors, _held: held }
    }

    fn read(&self, gpu: &Gpu) -> (Tensor, Vec<f32>) {
        let bytes: Vec<u8> = gpu.stream().download_vec(self.output.all()).unwrap();
        let layout = Layout::contiguous(self.query.shape()).unwrap();
        let output = Tensor::from_bytes(DType::BF16, layout, &bytes).unwrap();
        (output, gpu.stream().download_vec(self.lse.all()).unwrap())
    }
}

fn shuffled(count: usize) -> Vec<i32> {
    (0..count).map(|page| ((page * 37 + 11) % count) as i32).collect()
}

/// One graph, captured when the sequences were short, is right at every length.
#[test]
fn a_graph_is_right_for_growing_lengths() {
    let Some(gpu) = gpu() else { return };
    let (batch, stream) = (3, gpu.stream());
    let size = paged(batch);
    let served = Served::new(&gpu, &size);
    let mut plan = ServingPlan::new(&gpu, &size).unwrap();
    let (lengths, table) = (list(&gpu, &[0; 3]), shuffled(size.entries));
    let table_list = list(&gpu, &table);
    let tensors =
        served.tensors.with_lengths(lengths.address()).with_block_table(table_list.address());
    let graph = stream.capture::<GpuError>(|stream| plan.launch(stream, &tensors)).unwrap();
    let mut graph = graph.instantiate().unwrap();
    let mut seen = Vec::new();
    for step in 0..1000usize {
        let now = [step + 1, step / 3, 1000 - step];
        stream.upload(&now.map(|length| length as u32), lengths.all()).unwrap();
        graph.launch(stream).unwrap();
        seen.push((now, served.read(&gpu)));
    }
    let inputs = Inputs::new(&served.query, &served.key, &served.value);
    let table: Vec<u32> = table.into_iter().map(|page| page as u32).collect();
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

/// Numbers that no list should hold, in turn.
fn nonsense(count: usize) -> Vec<i32> {
    let bad = [i32::MAX, -1, i32::MIN, 1 << 30, 5, -70_000, 123_456];
    (0..count).map(|index| bad[index % bad.len()]).collect()
}

/// Tables and lengths that the host cannot see may be anything: nothing outside the tensors is
/// read or written (`compute-sanitizer` looks on), and what is right stays right.
#[test]
fn hostile_tables_and_lengths_stay_inside() {
    let Some(gpu) = gpu() else { return };
    let (batch, stream) = (5, gpu.stream());
    let size = paged(batch);
    let served = Served::new(&gpu, &size);
    let mut plan = ServingPlan::new(&gpu, &size).unwrap();
    let table = shuffled(size.entries);
    let (lengths, table_list) = (list(&gpu, &[0; 5]), list(&gpu, &table));
    let tensors =
        served.tensors.with_lengths(lengths.address()).with_block_table(table_list.address());
    let mut run = |now: [i32; 5], table: &[i32]| {
        stream.upload(&now, lengths.all()).unwrap();
        stream.upload(table, table_list.all()).unwrap();
        plan.launch(stream, &tensors).unwrap();
        served.read(&gpu)
    };
    let most = MOST as i32;
    let good = run([7, most, 0, 1, 900], &table);
    // A length beyond the cache is the whole cache, a negative one is none.
    let beyond = run([7, i32::MAX, i32::MIN, 1, 900], &table);
    assert_eq!((good.0.bytes(), &good.1), (beyond.0.bytes(), &beyond.1));
    let lost = run([i32::MAX, -1, most, 5, 123_456], &nonsense(table.len()));
    assert!(lost.1[HEADS..2 * HEADS].iter().all(|lse| *lse == f32::NEG_INFINITY));
    // Nothing was left behind.
    let again = run([7, most, 0, 1, 900], &table);
    assert_eq!((good.0.bytes(), &good.1), (again.0.bytes(), &again.1));
}

/// The same for packed queries and keys with every list that there is.
#[test]
fn hostile_starts_stay_inside() {
    let Some(gpu) = gpu() else { return };
    let (batch, stream) = (5, gpu.stream());
    let (query_rows, key_rows) = (11, 700);
    let mut problem = problem(batch);
    problem.query_length = 4;
    problem.key_length = 400;
    let size = ServingSize::new(problem).with_packed_queries(query_rows).with_packed_keys(key_rows);
    let served = Served::new(&gpu, &size);
    let mut plan = ServingPlan::new(&gpu, &size).unwrap();
    let good = [
        vec![0, 4, 4, 7, 9, 11],
        vec![4, 0, 2, 2, 1],
        vec![0, 100, 100, 350, 351, 700],
        vec![100, 0, 250, 1, 300],
        vec![0, 0, 7, 1, 50],
    ];
    let lists = good.each_ref().map(|numbers| list(&gpu, numbers));
    let [query_starts, query_lengths, key_starts, lengths, padding] =
        lists.each_ref().map(Buffer::address);
    let tensors = served
        .tensors
        .with_query_starts(query_starts)
        .with_query_lengths(query_lengths)
        .with_key_starts(key_starts)
        .with_lengths(lengths)
        .with_left_padding(padding);
    let mut run = |numbers: &[Vec<i32>; 5]| {
        for (numbers, list) in numbers.iter().zip(&lists) {
            stream.upload(numbers, list.all()).unwrap();
        }
        stream.fill(served.output.all(), 0).unwrap();
        stream.fill(served.lse.all(), 0).unwrap();
        plan.launch(stream, &tensors).unwrap();
        served.read(&gpu)
    };
    let first = run(&good);
    for bad in 0..5 {
        let mut hostile = good.clone();
        hostile[bad] = nonsense(good[bad].len());
        run(&hostile);
        hostile[bad].reverse();
        run(&hostile);
    }
    run(&good.each_ref().map(|numbers| nonsense(numbers.len())));
    let again = run(&good);
    assert_eq!((first.0.bytes(), &first.1), (again.0.bytes(), &again.1));
}

/// The same for new tokens with rotary embeddings, into pages and into batch entries.
#[test]
fn hostile_appends_stay_inside() {
    let Some(gpu) = gpu() else { return };
    let (batch, stream) = (5, gpu.stream());
    for paged_cache in [true, false] {
        let cache = match paged_cache {
            true => paged(batch),
            false => ServingSize::new(problem(batch)),
        };
        let cache = cache.with_packed_queries(9);
        let served = Served::new(&gpu, &cache);
        let new_rows = 12;
        let size = AppendSize::new(cache.clone(), 4)
            .with_packed_new(new_rows)
            .with_rotary(64, true, 50)
            .with_turned_queries();
        let mut plan = AppendPlan::new(&gpu, &size).unwrap();
        let new = Shape::new(1, new_rows, KV_HEADS, DIM);
        let new = Tensor::random(DType::BF16, new, 7).unwrap();
        let new_buffer = Buffer::from_slice(stream, new.bytes()).unwrap();
        let new_tensor =
            DeviceTensor { address: new_buffer.address(), strides: new.layout().strides() };
        let angles = Tensor::random(DType::BF16, Shape::new(1, 50, 1, 32), 8).unwrap();
        let angles = Buffer::from_slice(stream, angles.bytes()).unwrap();
        let good = [
            vec![0, 16, 1117, 3, 900],
            vec![0, 4, 4, 7, 8, 12],
            vec![4, 0, 3, 1, 2],
            vec![0, 2, 3, 3, 8, 9],
            vec![2, 1, 0, 3, 1],
            vec![7, 0, 49, 50, 1],
            if paged_cache { shuffled(cache.entries) } else { vec![2, 0, 1, 4, 3] },
        ];
        let lists = good.each_ref().map(|numbers| list(&gpu, numbers));
        let [lengths, new_starts, new_lengths, query_starts, query_lengths, starts, places] =
            lists.each_ref().map(Buffer::address);
        let after = list(&gpu, &[0; 5]);
        let (cosines, sines) = (angles.address(), angles.address());
        let query = served.tensors.query;
        let tensors =
            AppendTensors::new(new_tensor, new_tensor, served.tensors.key, served.tensors.value)
                .with_lengths(lengths)
                .with_lengths_after(after.address())
                .with_new_starts(new_starts)
                .with_new_lengths(new_lengths)
                .with_rotary(RotaryTables { cosines, sines, starts: Some(starts) })
                .with_queries(TurnedQueries {
                    starts: Some(query_starts),
                    lengths: Some(query_lengths),
                    ..TurnedQueries::new(query, query)
                });
        let tensors = match paged_cache {
            true => tensors.with_block_table(places),
            false => tensors.with_entries(places),
        };
        let mut run = |numbers: &[Vec<i32>; 7]| -> Vec<u32> {
            for (numbers, list) in numbers.iter().zip(&lists) {
                stream.upload(numbers, list.all()).unwrap();
            }
            plan.launch(stream, &tensors).unwrap();
            stream.download_vec(after.all()).unwrap()
        };
        // What there is no room for is not there afterwards.
        assert_eq!(run(&good), [4, 16, 1120, 4, 902]);
        for bad in 0..7 {
            let mut hostile = good.clone();
            hostile[bad] = nonsense(good[bad].len());
            let lengths = run(&hostile);
            assert!(lengths.iter().all(|length| *length <= MOST as u32), "{lengths:?}");
        }
        run(&good.each_ref().map(|numbers| nonsense(numbers.len())));
        assert_eq!(run(&good), [4, 16, 1120, 4, 902]);
    }
}

#[test]
fn what_the_host_can_see_is_refused() {
    let Some(gpu) = gpu() else { return };
    let size = paged(1);
    let served = Served::new(&gpu, &size);
    let numbers = list(&gpu, &shuffled(COLUMNS));
    let mut plan = ServingPlan::new(&gpu, &size).unwrap();
    let good = served.tensors.with_block_table(numbers.address());
    plan.launch(gpu.stream(), &good).unwrap();
    let mut refusal =
        |tensors: ServingTensors| plan.launch(gpu.stream(), &tensors).unwrap_err().to_string();
    let missing = "the block table tensor: it is missing";
    assert_eq!(refusal(ServingTensors { block_table: None, ..good }), missing);
    let unknown = "the list of sinks tensor: the plan knows of none";
    assert_eq!(refusal(good.with_sinks(numbers.address())), unknown);
    let unknown = "the list of key starts tensor: the plan knows of none";
    assert_eq!(refusal(good.with_key_starts(numbers.address())), unknown);
    let off = DeviceAddress(good.key.address.0 + 8);
    let key = DeviceTensor { address: off, ..good.key };
    let reason = refusal(ServingTensors { key, ..good });
    assert!(reason.ends_with("is not a multiple of 16"), "{reason}");
    for size in [
        ServingSize::new(problem(1)).with_pages(0, 4, 4),
        ServingSize::new(problem(1)).with_pages(16, 0, 4),
        ServingSize::new(problem(1)).with_entries(0),
    ] {
        assert!(matches!(ServingPlan::new(&gpu, &size), Err(GpuError::Unsupported { .. })));
    }

    let mut append = AppendPlan::new(&gpu, &AppendSize::new(size, 1)).unwrap();
    let (key, value) = (served.tensors.key, served.tensors.value);
    let tensors = AppendTensors::new(key, value, key, value).with_lengths(numbers.address());
    let mut refusal =
        |tensors: AppendTensors| append.launch(gpu.stream(), &tensors).unwrap_err().to_string();
    assert_eq!(refusal(tensors), missing);
    let same = tensors.with_lengths_after(numbers.address());
    assert_eq!(refusal(same), "the list of lengths after tensor: it is the list of lengths before");
    let turned = tensors.with_queries(TurnedQueries::new(key, key));
    assert_eq!(refusal(turned), "the query tensor: the plan turns none");

    let size = MergeSize::new(2, Shape::new(1, 1, HEADS, DIM), DType::BF16);
    let mut merge = MergePlan::new(&gpu, &size).unwrap();
    let off = [off.offset(1), off];
    let tensors = MergeTensors::stacked(&size, off, off).unwrap();
    let reason = merge.launch(gpu.stream(), &tensors).unwrap_err().to_string();
    assert!(reason.ends_with("is not a multiple of 4"), "{reason}");
}
