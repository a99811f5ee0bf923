//! Tests that need a GPU of attention over caches, of appending to caches and of combining parts.
//! Each test skips itself where there is no GPU.

mod device;

use cuda::{Buffer, DeviceAddress};
use flashcore::gpu::{
    AppendProblem, AppendTensors, AttentionPlan, CombineProblem, CombineTensors, DeviceTensor, Gpu,
    GpuError, RotaryTables, RotatedQueries, Tensors,
};
use flashcore::plan::Arrangement;
use flashcore::serving::{Pages, Placement, Sequences};
use flashcore::{
    Backend, DType, GpuBackend, Inputs, Layout, Lists, Mask, Preference, Problem, Shape, Storage,
    Tensor,
};
use flashcore_testing::check::{self, Invariance};

use device::{HALVES, all_pass, gpu, is_right};

/// The 8-bit element types.
const NARROW: [DType; 3] = [DType::E4M3, DType::E5M2, DType::Int8];

#[test]
fn decode_is_right_about_random_sequences() {
    let Some(gpu) = gpu() else { return };
    let backend = GpuBackend::new(gpu.into());
    let backends: [&dyn Backend; 1] = [&backend];
    let run = |dtype| check::run_sequences(&backends, Some("decode"), dtype, 1_650, &());
    all_pass(HALVES.into_iter().flat_map(run), 3_000);
}

/// Caches of 8 bits: read directly for few queries, and widened to 16 bits before for many.
#[test]
fn caches_of_8_bits_are_attended() {
    let Some(gpu) = gpu() else { return };
    let backend = GpuBackend::new(gpu.into());
    let backends: [&dyn Backend; 1] = [&backend];
    for kernel in ["decode", "widen"] {
        let run = |dtype| check::run_sequences(&backends, Some(kernel), dtype, 1_650, &());
        all_pass(NARROW.into_iter().flat_map(run), 1_400);
    }
}

#[test]
fn decode_is_right_about_plain_problems() {
    let Some(gpu) = gpu() else { return };
    device::is_right_about_plain_problems(gpu, "decode");
}

/// Each query of ten thousand random batches gives the same bits as alone.
#[test]
fn bits_do_not_depend_on_the_batch() {
    let Some(gpu) = gpu() else { return };
    let backend = GpuBackend::new(gpu.into());
    let compared = check::run_batches(&backend, 10_000, &()).unwrap();
    println!("{compared} queries compared");
    assert!(compared > 100_000, "{compared}");
}

/// Batch invariance of batches that fill an H200, up to 128 sequences of 8193 keys and 9 key heads:
/// several groups of splits, distributed over teams of thread blocks.
#[test]
fn bits_do_not_depend_on_a_large_batch() {
    let Some(gpu) = gpu() else { return };
    let backend = GpuBackend::new(gpu.into());
    let problem = Problem::new(1, 36, 1, 128).with_kv_heads(9).with_dtype(DType::BF16);
    let mut invariance = Invariance::new(problem.with_mask(Mask::CAUSAL), 2, 20_000).unwrap();
    let mut run = check::on_backend(&backend);
    invariance.alone(&mut run).unwrap();
    for (seed, sequences) in [(0, 128), (1, 3), (2, 64), (3, 1), (4, 17), (5, 2), (6, 32), (7, 5)] {
        invariance.batch(seed, [sequences, 300], &mut run).unwrap();
    }
    println!("{} queries compared", invariance.compared());
}

#[test]
fn new_tokens_are_where_the_host_would_put_them() {
    let Some(gpu) = gpu() else { return };
    all_pass(HALVES.into_iter().flat_map(|it| check::run_appends(&gpu, it, 600, &())), 1_200);
}

#[test]
fn new_tokens_are_rounded_to_8_bits_as_the_host_would() {
    let Some(gpu) = gpu() else { return };
    all_pass(NARROW.into_iter().flat_map(|it| check::run_appends(&gpu, it, 600, &())), 1_200);
}

#[test]
fn parts_are_combined() {
    let Some(gpu) = gpu() else { return };
    let run = |dtype| check::run_combines(&gpu, dtype, 600, &());
    all_pass(DType::WIDE.into_iter().flat_map(run), 1_800);
}

const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 128;
const PAGE: usize = 16;
const COLUMNS: usize = 70;
/// The most positions of a sequence.
const MOST: usize = PAGE * COLUMNS;

fn problem(batch: usize) -> Problem {
    Problem::new(batch, HEADS, 1, DIM)
        .with_kv_heads(KV_HEADS)
        .with_key_length(MOST)
        .with_dtype(DType::BF16)
        .with_mask(Mask::CAUSAL)
}

fn paged(batch: usize) -> Problem {
    let pages = Storage::Paged { size: PAGE, columns: COLUMNS, pages: batch * COLUMNS };
    problem(batch).with_storage(Storage::Padded, pages)
}

fn with_lists(problem: Problem) -> Problem {
    problem.with_lists(Lists { key_lengths: true, ..Lists::default() })
}

fn plan(gpu: &Gpu, problem: &Problem) -> Result<AttentionPlan, flashcore::Error> {
    let arrangement = Arrangement::contiguous(problem)?;
    AttentionPlan::new(gpu, problem, &arrangement, &Preference::named("decode"))
}

/// Random tensors of a problem, on the device and in host memory.
struct Served {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Buffer,
    lse: Buffer,
    tensors: Tensors,
    _held: Vec<Buffer>,
}

/// Creates a list on the device, whose numbers tests overwrite.
fn list(gpu: &Gpu, numbers: &[i32]) -> Buffer {
    Buffer::from_slice(gpu.stream(), numbers).unwrap()
}

impl Served {
    fn new(gpu: &Gpu, problem: &Problem) -> Self {
        let random = |shape, seed| Tensor::random(DType::BF16, shape, seed).unwrap();
        let query = random(problem.query_shape(), 1);
        let (key, value) = (random(problem.key_shape(), 2), random(problem.value_shape(), 3));
        let upload = |tensor: &Tensor| Buffer::from_slice(gpu.stream(), tensor.bytes()).unwrap();
        let held = vec![upload(&query), upload(&key), upload(&value)];
        let output = Buffer::from_slice(gpu.stream(), &vec![0u8; query.bytes().len()]).unwrap();
        let lse = Buffer::from_slice(gpu.stream(), &vec![0f32; problem.rows()]).unwrap();
        let addresses = [&held[0], &held[1], &held[2], &output].map(Buffer::address);
        let tensors = Tensors::contiguous(problem, addresses, Some(lse.address())).unwrap();
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

/// A graph that was captured when the sequences were short is right at every length.
#[test]
fn a_graph_is_right_for_growing_lengths() {
    let Some(gpu) = gpu() else { return };
    let (batch, stream) = (3, gpu.stream());
    let problem = with_lists(paged(batch));
    let served = Served::new(&gpu, &problem);
    let plan = plan(&gpu, &problem).unwrap();
    let (lengths, table) = (list(&gpu, &[0; 3]), shuffled(problem.entries()));
    let table_list = list(&gpu, &table);
    let mut tensors = served.tensors;
    tensors.key_lengths = Some(lengths.address());
    tensors.block_table = Some(table_list.address());
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
            self::problem(batch),
            Placement::padded(vec![1; batch]),
            Placement::paged(lengths.to_vec(), pages),
        )
        .unwrap();
        is_right(&sequences, inputs, output, lse);
    }
}

/// Returns numbers that no valid list holds.
fn nonsense(count: usize) -> Vec<i32> {
    let bad = [i32::MAX, -1, i32::MIN, 1 << 30, 5, -70_000, 123_456];
    (0..count).map(|index| bad[index % bad.len()]).collect()
}

/// Block tables and lengths that the host cannot check may hold anything: nothing outside the
/// tensors is read or written (run under `compute-sanitizer` to verify), and valid sequences stay
/// right.
#[test]
fn hostile_tables_and_lengths_stay_inside() {
    let Some(gpu) = gpu() else { return };
    let (batch, stream) = (5, gpu.stream());
    let problem = with_lists(paged(batch));
    let served = Served::new(&gpu, &problem);
    let plan = plan(&gpu, &problem).unwrap();
    let table = shuffled(problem.entries());
    let (lengths, table_list) = (list(&gpu, &[0; 5]), list(&gpu, &table));
    let mut tensors = served.tensors;
    tensors.key_lengths = Some(lengths.address());
    tensors.block_table = Some(table_list.address());
    let run = |now: [i32; 5], table: &[i32]| {
        stream.upload(&now, lengths.all()).unwrap();
        stream.upload(table, table_list.all()).unwrap();
        plan.launch(stream, &tensors).unwrap();
        served.read(&gpu)
    };
    let most = MOST as i32;
    let good = run([7, most, 0, 1, 900], &table);
    // A length beyond the cache counts as the whole cache, a negative one as zero.
    let beyond = run([7, i32::MAX, i32::MIN, 1, 900], &table);
    assert_eq!((good.0.bytes(), &good.1), (beyond.0.bytes(), &beyond.1));
    let lost = run([i32::MAX, -1, most, 5, 123_456], &nonsense(table.len()));
    assert!(lost.1[HEADS..2 * HEADS].iter().all(|lse| *lse == f32::NEG_INFINITY));
    // The hostile runs have no effect on later ones.
    let again = run([7, most, 0, 1, 900], &table);
    assert_eq!((good.0.bytes(), &good.1), (again.0.bytes(), &again.1));
}

/// Hostile numbers in every list of packed queries and keys.
#[test]
fn hostile_starts_stay_inside() {
    let Some(gpu) = gpu() else { return };
    let (batch, stream) = (5, gpu.stream());
    let (query_rows, key_rows) = (11, 700);
    let mut problem = problem(batch);
    problem.query_length = 4;
    problem.key_length = 400;
    let lists =
        Lists { query_lengths: true, key_lengths: true, left_padding: true, ..Lists::default() };
    let problem = problem
        .with_storage(Storage::Packed(query_rows), Storage::Packed(key_rows))
        .with_lists(lists);
    let served = Served::new(&gpu, &problem);
    let plan = plan(&gpu, &problem).unwrap();
    let good = [
        vec![0, 4, 4, 7, 9, 11],
        vec![4, 0, 2, 2, 1],
        vec![0, 100, 100, 350, 351, 700],
        vec![100, 0, 250, 1, 300],
        vec![0, 0, 7, 1, 50],
    ];
    let lists = good.each_ref().map(|numbers| list(&gpu, numbers));
    let [query_starts, query_lengths, key_starts, key_lengths, left_padding] =
        lists.each_ref().map(|list| Some(list.address()));
    let tensors = Tensors {
        query_starts,
        query_lengths,
        key_starts,
        key_lengths,
        left_padding,
        ..served.tensors
    };
    let run = |numbers: &[Vec<i32>; 5]| {
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

/// Hostile numbers in the lists of appends with rotary embeddings, to pages and to batch entries.
#[test]
fn hostile_appends_stay_inside() {
    let Some(gpu) = gpu() else { return };
    let (batch, stream) = (5, gpu.stream());
    for paged_cache in [true, false] {
        let cache = match paged_cache {
            true => paged(batch),
            false => problem(batch).with_storage(Storage::Padded, Storage::Entries(batch)),
        };
        let cache = cache.clone().with_storage(Storage::Packed(9), cache.keys);
        let entries = cache.entries();
        let served = Served::new(&gpu, &cache);
        let new_rows = 12;
        let append = AppendProblem::new(cache, 4)
            .with_packed_new(new_rows)
            .with_rotary(64, true, 50)
            .with_rotated_queries();
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
            if paged_cache { shuffled(entries) } else { vec![2, 0, 1, 4, 3] },
        ];
        let lists = good.each_ref().map(|numbers| list(&gpu, numbers));
        let after = list(&gpu, &[0; 5]);
        let (cosines, sines) = (angles.address(), angles.address());
        let query = served.tensors.query;
        let mut tensors =
            AppendTensors::new([new_tensor, new_tensor, served.tensors.key, served.tensors.value]);
        let [lengths, new_starts, new_lengths, query_starts, query_lengths, starts, places] =
            lists.each_ref().map(|list| Some(list.address()));
        tensors.key_lengths = lengths;
        tensors.lengths_after = Some(after.address());
        (tensors.new_starts, tensors.new_lengths) = (new_starts, new_lengths);
        tensors.rotary = Some(RotaryTables { cosines, sines, starts });
        tensors.queries = Some(RotatedQueries {
            from: query,
            to: query,
            starts: query_starts,
            lengths: query_lengths,
        });
        match paged_cache {
            true => tensors.block_table = places,
            false => tensors.batch_index = places,
        }
        let run = |numbers: &[Vec<i32>; 7]| -> Vec<u32> {
            for (numbers, list) in numbers.iter().zip(&lists) {
                stream.upload(numbers, list.all()).unwrap();
            }
            gpu.append(stream, &append, &tensors).unwrap();
            stream.download_vec(after.all()).unwrap()
        };
        // Tokens beyond the capacity do not count in the lengths afterwards.
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
    let problem = paged(1);
    let served = Served::new(&gpu, &problem);
    let numbers = list(&gpu, &shuffled(COLUMNS));
    let plan = self::plan(&gpu, &problem).unwrap();
    let good = Tensors { block_table: Some(numbers.address()), ..served.tensors };
    plan.launch(gpu.stream(), &good).unwrap();
    let refusal = |tensors: Tensors| plan.launch(gpu.stream(), &tensors).unwrap_err().to_string();
    let missing = "the block table tensor: it is missing";
    assert_eq!(refusal(Tensors { block_table: None, ..good }), missing);
    let given = Some(numbers.address());
    let unknown = "the list of sinks tensor: the problem has none";
    assert_eq!(refusal(Tensors { sinks: given, ..good }), unknown);
    let unknown = "the list of key starts tensor: the problem has none";
    assert_eq!(refusal(Tensors { key_starts: given, ..good }), unknown);
    let off = DeviceAddress(good.key.address.0 + 8);
    let key = DeviceTensor { address: off, ..good.key };
    let reason = refusal(Tensors { key, ..good });
    assert!(reason.ends_with("do not lie as those that the plan was made for"), "{reason}");
    for (size, columns) in [(0, 4), (16, 0)] {
        let keys = Storage::Paged { size, columns, pages: 4 };
        let problem = problem.clone().with_storage(Storage::Padded, keys);
        assert!(matches!(self::plan(&gpu, &problem), Err(flashcore::Error::Problem(_))));
    }

    let append = AppendProblem::new(problem, 1);
    let (key, value) = (served.tensors.key, served.tensors.value);
    let mut tensors = AppendTensors::new([key, value, key, value]);
    tensors.key_lengths = given;
    let refusal = |tensors: AppendTensors| {
        gpu.append(gpu.stream(), &append, &tensors).unwrap_err().to_string()
    };
    assert_eq!(refusal(tensors), missing);
    tensors.block_table = given;
    let same = AppendTensors { lengths_after: given, ..tensors };
    assert_eq!(refusal(same), "the list of lengths after tensor: it is the list of lengths before");
    let queries = RotatedQueries { from: key, to: key, starts: None, lengths: None };
    let rotated = AppendTensors { queries: Some(queries), ..tensors };
    assert_eq!(refusal(rotated), "the query tensor: the plan knows of none");

    let combine = CombineProblem::new(2, Shape::new(1, 1, HEADS, DIM), DType::BF16);
    let off = [off.offset(1), off];
    let tensors = CombineTensors::stacked(&combine, off, off).unwrap();
    let reason = gpu.combine(gpu.stream(), &combine, &tensors).unwrap_err().to_string();
    assert!(reason.ends_with("is not a multiple of 4"), "{reason}");
}
