//! What needs a GPU: compile, cache, launch, copy, measure, capture, fail.
//! Every test prints "skipped" and passes where there is none.
#![allow(unsafe_code)] // `Stream::borrow`, and an allocator that counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use flashcore_cuda::{
    Arguments, Buffer, Cache, Device, DeviceAddress, DeviceInfo, DeviceSlice, Driver, Error, Event,
    Function, Launch, Module, Parameter, RelaxedCapture, Result, Stream, TensorMap,
};
use ptx::{
    Builder, CopyHint, Element, Expression, F32, GlobalAddress, Instruction, LoadHint, Mbarriers,
    S32, Scope, SpecialRegister, StoreHint, Swizzle, Target, TensorBox, U32, U64, print,
};

/// c[i] = a[i] + b[i], a thread for each.
fn add() -> String {
    let mut k = Builder::new("add", Target::SM_75, 128);
    let [a, b, c] = ["a", "b", "c"].map(|name| k.parameter::<GlobalAddress>(name));
    let count = k.parameter::<U32>("count");
    let (block, thread) = (k.block_index(), k.thread_index());
    let index = k.eval(block * 128 + thread);
    k.if_(index.less(count), |k| {
        let offset = k.eval(index.convert::<U64>() * 4);
        let [a, b] = [a, b].map(|address| k.load::<F32, _>(address + offset));
        k.store(c + offset, a + b);
    });
    print(&k.finish().unwrap())
}

/// out[block] = blocks in its cluster.
fn cluster() -> String {
    let mut k = Builder::new("cluster", Target::SM_90, 32);
    let out = k.parameter::<GlobalAddress>("out");
    let (block, thread) = (k.block_index(), k.thread_index());
    let size = k.special(SpecialRegister::ClusterSize);
    k.if_(thread.equals(0), |k| k.store(out + block.convert::<U64>() * 4, size));
    print(&k.finish().unwrap())
}

/// A box of 16 by 8 floats.
fn tile_box() -> TensorBox {
    TensorBox { element: Element::F32, swizzle: Swizzle::None, extent: vec![16, 8] }
}

/// Copies a box with the copy engine, then to `out`. Returns the shared memory that it uses, too.
fn tile() -> (String, u32) {
    let mut k = Builder::new("tile", Target::SM_90, 32);
    let map = k.tensor_map("map", tile_box());
    let out = k.parameter::<GlobalAddress>("out");
    let corner = ["column", "row"].map(|name| k.parameter::<S32>(name).into());
    let elements = k.shared("elements", 512, 128);
    let barriers = Mbarriers::new(&mut k, "barrier", 1, 1);
    let thread = k.thread_index();
    k.if_(thread.equals(0), |k| barriers.init(k));
    k.barriers_ready();
    let (elements, barrier) = (k.shared_address(elements), barriers.at(&mut k, 0));
    k.if_(thread.equals(0), |k| {
        k.mbarrier_arrive_expect(barrier, 512);
        k.tensor_load(elements, map, &corner, barrier, CopyHint::default());
    });
    k.mbarrier_wait(barrier, 0, Scope::Block);
    let four = k.load_vector::<F32, _, 4>(elements + thread * 16, LoadHint::default());
    k.store_vector(out + thread.convert::<U64>() * 16, &four, StoreHint::default());
    let program = k.finish().unwrap();
    (print(&program), program.shared_bytes())
}

/// Instructions that only `sm_90a` has.
fn accelerated() -> String {
    let mut k = Builder::new("accelerated", Target::SM_90A, 128);
    k.push(Instruction::WgmmaFence);
    k.push(Instruction::WgmmaCommit);
    k.push(Instruction::WgmmaWait { pending: 0 });
    print(&k.finish().unwrap())
}

const ADD_PARAMETERS: [Parameter; 4] =
    [Parameter::Address, Parameter::Address, Parameter::Address, Parameter::U32];

/// Counts what this thread allocates, to show that launches do not.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The first device, or none and a word about it.
fn device() -> Option<Device> {
    if let Err(error) = Driver::probe() {
        println!("skipped: no GPU ({error})");
        return None;
    }
    Some(Device::open(0).unwrap())
}

/// The first device, if it is a Hopper.
fn hopper() -> Option<Device> {
    let device = device()?;
    if device.info().compute_capability.major != 9 {
        println!("skipped: no Hopper GPU");
        return None;
    }
    Some(device)
}

/// The first device, if its driver has a compiler that can be called.
fn compiling() -> Option<Device> {
    let device = device()?;
    if !device.compiles_ahead() {
        println!("skipped: no compiler in the driver");
        return None;
    }
    Some(device)
}

fn function(device: &Device, ptx: &str, name: &str, parameters: &[Parameter]) -> Function {
    let cubin = device.compile(ptx).unwrap();
    Module::load(device, &cubin.bytes).unwrap().function(name, parameters).unwrap()
}

/// The default stream of a device.
fn default_stream(device: &Device) -> Stream {
    // SAFETY: 0 is the handle of a stream that lives as long as the context.
    unsafe { Stream::borrow(device, 0) }
}

/// Everything for additions of `COUNT` numbers.
struct Addition {
    stream: Stream,
    function: Function,
    b: Buffer,
    c: Buffer,
    arguments: Arguments,
    _a: Buffer,
}

const COUNT: u32 = 1000;
const LAUNCH: Launch = Launch {
    grid: [COUNT.div_ceil(128), 1, 1],
    block: [128, 1, 1],
    cluster: [1; 3],
    shared_bytes: 0,
    programmatic: false,
};

impl Addition {
    fn new(device: &Device) -> Addition {
        let stream = Stream::new(device).unwrap();
        let numbers: Vec<f32> = (0..COUNT).map(|index| index as f32).collect();
        let a = Buffer::from_slice(&stream, &numbers).unwrap();
        let b = Buffer::from_slice(&stream, &vec![0.5f32; COUNT as usize]).unwrap();
        let c = Buffer::new(device, a.bytes()).unwrap();
        stream.fill(c.all(), 0xff).unwrap();
        let mut arguments = Arguments::new();
        arguments.push(a.address()).push(b.address()).push(c.address()).push(COUNT);
        let function = function(device, &add(), "add", &ADD_PARAMETERS);
        Addition { stream, function, b, c, arguments, _a: a }
    }

    fn launch(&self) -> Result<()> {
        self.function.launch(&self.stream, &LAUNCH, &self.arguments)
    }

    fn expect(&self, addend: f32) {
        let sums = self.stream.download_vec::<f32>(self.c.all()).unwrap();
        for (index, sum) in sums.iter().enumerate() {
            assert_eq!(*sum, index as f32 + addend);
        }
    }
}

#[test]
fn a_device_describes_itself() {
    let Some(device) = device() else { return };
    let info = device.info();
    println!("{info:#?}");
    assert!(!info.name.is_empty());
    assert!(info.multiprocessors > 0 && info.memory_bytes > 1 << 28);
    assert!(info.shared_bytes_per_block >= 48 << 10);
    assert!(info.l2_bytes > 0 && info.clock_kilohertz > 0);
    assert_eq!(&DeviceInfo::query(0).unwrap(), info);
    assert!(device.free_memory().unwrap() <= info.memory_bytes);
    let count = Device::count().unwrap();
    let error = Device::open(count).unwrap_err();
    assert_eq!(error, Error::InvalidDevice { ordinal: count, count });
}

#[test]
fn a_kernel_runs() {
    let Some(device) = device() else { return };
    let cubin = device.compile(&add()).unwrap();
    println!("{:.1} ms\n{}", cubin.milliseconds, cubin.log);
    let addition = Addition::new(&device);
    let attributes = addition.function.attributes();
    assert!(attributes.registers > 0 && attributes.local_bytes == 0);
    assert!(attributes.max_threads_per_block >= 128);
    addition.launch().unwrap();
    addition.expect(0.5);
    // The verbose log says at least how many registers there are.
    if compiling().is_some() {
        assert!(cubin.log.contains("registers"), "{}", cubin.log);
    }
}

#[test]
fn the_cache_saves_a_compilation() {
    let Some(device) = compiling() else { return };
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::at(directory.path());
    let first = device.compile_cached(&add(), &cache).unwrap();
    let second = device.compile_cached(&add(), &cache).unwrap();
    println!("{:.2} ms, then {:.2} ms", first.milliseconds, second.milliseconds);
    assert!(!first.cached && second.cached);
    assert_eq!(first.bytes, second.bytes);
    Module::load(&device, &second.bytes).unwrap();

    // A damaged file is compiled again.
    let path = cache.path(&device.cache_key(&add())).unwrap();
    std::fs::write(&path, "no cubin").unwrap();
    let third = device.compile_cached(&add(), &cache).unwrap();
    assert!(!third.cached && third.warnings.len() == 1);
    assert!(device.compile_cached(&add(), &cache).unwrap().cached);
}

#[test]
fn bad_ptx_comes_back_with_the_compilers_words() {
    let Some(device) = compiling() else { return };
    let bad = add().replace("add.f32", "nonsense.f32");
    let error = device.compile(&bad).unwrap_err();
    let Error::Compile { log } = &error else { panic!("{error}") };
    println!("{log}");
    assert!(log.contains("nonsense"), "{log}");
    let cached = device.compile_cached(&bad, &Cache::disabled());
    assert_eq!(cached.unwrap_err(), error);
    let nul = device.compile("\0").unwrap_err();
    assert_eq!(nul, Error::Nul { what: "the PTX text" });
    assert!(matches!(device.compile(""), Err(Error::Compile { .. } | Error::Call { .. })));
}

#[test]
fn wrong_names_and_parameters_are_refused() {
    let Some(device) = device() else { return };
    let cubin = device.compile(&add()).unwrap();
    let short = &cubin.bytes[..cubin.bytes.len() / 2];
    assert_eq!(Module::load(&device, short).unwrap_err(), Error::InvalidCubin);
    assert_eq!(Module::load(&device, b"text").unwrap_err(), Error::InvalidCubin);

    let module = Module::load(&device, &cubin.bytes).unwrap();
    let error = module.function("subtract", &[]).unwrap_err();
    assert_eq!(error, Error::NoFunction { name: "subtract".to_owned() });
    let version = device.info().driver.version;
    if (version.major, version.minor) >= (12, 4) {
        use Parameter::{Address, TensorMap, U32};
        for wrong in [
            &[Address, Address, Address, U32, U32][..],
            &[Address, Address, Address, Address],
            &[Address, Address, TensorMap, U32],
        ] {
            let error = module.function("add", wrong).unwrap_err();
            assert!(matches!(error, Error::Signature { .. }), "{error}");
            println!("{error}");
        }
    }
}

#[test]
fn wrong_launches_are_refused() {
    let Some(device) = device() else { return };
    let addition = Addition::new(&device);
    let launch = |launch: Launch| {
        let result = addition.function.launch(&addition.stream, &launch, &addition.arguments);
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Launch { .. }), "{error}");
        println!("{error}");
    };
    launch(Launch { grid: [0, 1, 1], ..LAUNCH });
    launch(Launch { block: [2048, 1, 1], ..LAUNCH });
    launch(Launch { shared_bytes: 64 << 10, ..LAUNCH });
    let error = addition.function.set_dynamic_shared(1 << 30).unwrap_err();
    assert!(matches!(error, Error::Launch { .. }), "{error}");
    let none = Arguments::new();
    let error = addition.function.launch(&addition.stream, &LAUNCH, &none).unwrap_err();
    assert!(matches!(error, Error::Signature { .. }), "{error}");
}

#[test]
fn shared_memory_can_be_raised_to_the_limit() {
    let Some(device) = device() else { return };
    let addition = Addition::new(&device);
    let bytes = device.info().shared_bytes_per_block;
    addition.function.set_dynamic_shared(bytes).unwrap();
    let launch = Launch { shared_bytes: bytes, ..LAUNCH };
    addition.function.launch(&addition.stream, &launch, &addition.arguments).unwrap();
    addition.expect(0.5);
}

#[test]
fn memory_is_copied_and_filled() {
    let Some(device) = device() else { return };
    let stream = Stream::new(&device).unwrap();
    let buffer = Buffer::from_slice(&stream, &[1u32, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    assert!(buffer.address().0.is_multiple_of(256));
    stream.fill(buffer.slice(4..12).unwrap(), 9).unwrap();
    stream.fill(buffer.slice(28..32).unwrap(), 0xff).unwrap();
    stream.copy(buffer.slice(0..8).unwrap(), buffer.slice(16..24).unwrap()).unwrap();
    let words = stream.download_vec::<u32>(buffer.all()).unwrap();
    let nines = 0x0909_0909;
    assert_eq!(words, [1, nines, nines, 4, 1, nines, 7, u32::MAX]);
    // The same memory as someone else's.
    let foreign = DeviceSlice::foreign(buffer.address().offset(4), 4);
    assert_eq!(stream.download_vec::<u32>(foreign).unwrap(), [nines]);

    assert!(matches!(buffer.slice(0..33), Err(Error::OutOfRange { .. })));
    assert!(matches!(stream.upload(&[0u8; 3], buffer.all()), Err(Error::Size { .. })));
    let three = buffer.slice(0..3).unwrap();
    assert!(matches!(stream.download_vec::<u32>(three), Err(Error::Misaligned { .. })));

    let nothing = Buffer::new(&device, 0).unwrap();
    stream.upload::<u8>(&[], nothing.all()).unwrap();
    stream.fill(nothing.all(), 1).unwrap();
    let bytes = 1 << 50;
    assert_eq!(Buffer::new(&device, bytes).unwrap_err(), Error::OutOfMemory { bytes });
}

#[test]
fn streams_can_be_borrowed() {
    let Some(device) = device() else { return };
    let addition = Addition::new(&device);
    // SAFETY: both are handles of live streams on this device.
    let borrowed =
        unsafe { [Stream::borrow(&device, 0), Stream::borrow(&device, addition.stream.handle())] };
    // The filling of `c` must not come after the sum.
    addition.stream.synchronize().unwrap();
    for stream in &borrowed {
        addition.function.launch(stream, &LAUNCH, &addition.arguments).unwrap();
        stream.synchronize().unwrap();
    }
    drop(borrowed);
    addition.expect(0.5);
}

#[test]
fn threads_share_a_device() {
    let Some(device) = device() else { return };
    let addition = Addition::new(&device);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..100 {
                    addition.launch().unwrap();
                }
                let own = Addition::new(&device);
                own.launch().unwrap();
                own.expect(0.5);
            });
        }
    });
    addition.expect(0.5);
}

#[test]
fn events_measure_time() {
    let Some(device) = device() else { return };
    let addition = Addition::new(&device);
    let [start, end] = [(); 2].map(|()| Event::new(&device).unwrap());
    let begun = Instant::now();
    start.record(&addition.stream).unwrap();
    for _ in 0..100 {
        addition.launch().unwrap();
    }
    end.record(&addition.stream).unwrap();
    let other = Stream::new(&device).unwrap();
    other.wait(&end).unwrap();
    other.synchronize().unwrap();
    end.synchronize().unwrap();
    assert!(end.is_passed().unwrap());
    let milliseconds = end.milliseconds_since(&start).unwrap();
    println!("{:.2} us per launch", 10.0 * milliseconds);
    // Other tests may keep the GPU, and a virtual one its machine, for as long as they like.
    let by_the_host = begun.elapsed().as_secs_f64() * 1e3;
    assert!(milliseconds > 0.0 && milliseconds < 1.01 * by_the_host);
}

#[test]
fn launching_again_does_not_allocate() {
    let Some(device) = device() else { return };
    let mut addition = Addition::new(&device);
    addition.launch().unwrap();
    let (b, c) = (addition.b.address(), addition.c.address());
    let before = ALLOCATIONS.get();
    let start = std::time::Instant::now();
    for round in 0..1000 {
        addition.arguments.set(1, if round % 2 == 0 { c } else { b }).unwrap();
        addition.launch().unwrap();
    }
    let elapsed = start.elapsed();
    // The driver is C and has an allocator of its own.
    assert_eq!(ALLOCATIONS.get(), before);
    println!("{:.2} us per launch on the host", elapsed.as_secs_f64() * 1e3);
    addition.expect(0.5);
}

#[test]
fn graphs_repeat_what_was_captured() {
    let Some(device) = device() else { return };
    let addition = Addition::new(&device);
    let graph = addition
        .stream
        .capture(|stream| {
            assert!(stream.recording()?.is_some());
            addition.launch()?;
            stream.copy(addition.c.all(), addition.b.all())
        })
        .unwrap();
    // Nothing has run.
    let untouched = addition.stream.download_vec::<u32>(addition.c.all()).unwrap();
    assert!(untouched.iter().all(|&word| word == u32::MAX));

    // The kernel stays, though the function goes.
    let Addition { stream, function, b: _b, c, arguments: _, _a } = addition;
    drop(function);
    let mut graph = graph.instantiate().unwrap();
    graph.launch(&stream).unwrap();
    graph.launch(&stream).unwrap();
    let sums = stream.download_vec::<f32>(c.all()).unwrap();
    // First a + 0.5, then a + (a + 0.5).
    assert!(sums.iter().enumerate().all(|(index, &sum)| sum == 2.0 * index as f32 + 0.5));
}

/// What is given to a graph lives as long as the graph and what was made from it.
#[test]
fn graphs_keep_what_they_are_given() {
    let Some(device) = device() else { return };
    let stream = Stream::new(&device).unwrap();
    assert!(stream.recording().unwrap().is_none());
    assert!(default_stream(&device).recording().unwrap().is_none());
    let kept = Arc::new(());
    let mut ids = Vec::new();
    let addition = Addition::new(&device);
    let mut graphs = Vec::new();
    for _ in 0..2 {
        let graph = addition.stream.capture(|stream| {
            let recording = stream.recording()?.expect("a capture is under way");
            ids.push(recording.id());
            recording.give(kept.clone())?;
            addition.launch()
        });
        graphs.push(graph.unwrap());
    }
    assert_ne!(ids[0], ids[1]);
    assert_eq!(Arc::strong_count(&kept), 3);
    let mut executable = graphs.pop().unwrap().instantiate().unwrap();
    executable.launch(&addition.stream).unwrap();
    addition.stream.synchronize().unwrap();
    assert_eq!(Arc::strong_count(&kept), 3);
    drop((executable, graphs));
    addition.stream.synchronize().unwrap();
    // The driver may drop it a little later, on a thread of its own.
    for _ in 0..100 {
        if Arc::strong_count(&kept) == 1 {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("{} references are left", Arc::strong_count(&kept));
}

/// Allocation breaks a capture, except under the relaxed mode.
#[test]
fn a_relaxed_capture_may_allocate() {
    let Some(device) = device() else { return };
    let stream = Stream::new(&device).unwrap();
    let allocate = || Buffer::new(&device, 1 << 20).map(drop);
    assert!(stream.capture(|_| allocate()).is_err());
    let relaxed = stream.capture(|_| {
        let _relaxed = RelaxedCapture::begin()?;
        allocate()
    });
    relaxed.unwrap();
    // The mode is as it was.
    assert!(stream.capture(|_| allocate()).is_err());
}

/// Whoever drops the last reference to memory need not know of captures.
#[test]
fn memory_may_be_freed_during_a_capture() {
    let Some(device) = device() else { return };
    let stream = Stream::new(&device).unwrap();
    let before = Buffer::new(&device, 1 << 20).unwrap();
    let graph = stream.capture::<Error>(|_| {
        drop(before);
        Ok(())
    });
    graph.unwrap();
}

#[test]
fn a_failed_capture_leaves_the_stream_usable() {
    let Some(device) = device() else { return };
    let addition = Addition::new(&device);
    let refused = addition.stream.capture(|_| Err(Error::NoDevice));
    assert_eq!(refused.unwrap_err(), Error::NoDevice);
    // Waiting is not allowed, and breaks the capture.
    assert!(addition.stream.capture(|stream| stream.synchronize()).is_err());
    assert!(default_stream(&device).capture(|_| Ok::<_, Error>(())).is_err());
    assert!(addition.stream.recording().unwrap().is_none());
    addition.launch().unwrap();
    addition.expect(0.5);
}

#[test]
fn programmatic_launches_run() {
    let Some(device) = hopper() else { return };
    let addition = Addition::new(&device);
    let launch = Launch { programmatic: true, ..LAUNCH };
    for _ in 0..10 {
        addition.function.launch(&addition.stream, &launch, &addition.arguments).unwrap();
    }
    addition.expect(0.5);
}

#[test]
fn clusters_are_formed() {
    let Some(device) = hopper() else { return };
    let stream = Stream::new(&device).unwrap();
    let function = function(&device, &cluster(), "cluster", &[Parameter::Address]);
    let out = Buffer::new(&device, 4 * 16).unwrap();
    let mut arguments = Arguments::new();
    arguments.push(out.address());
    for size in [1, 2, 4, 8] {
        let (grid, block, cluster) = ([16, 1, 1], [32, 1, 1], [size, 1, 1]);
        let launch = Launch { grid, block, cluster, ..Launch::default() };
        function.launch(&stream, &launch, &arguments).unwrap();
        assert_eq!(stream.download_vec::<u32>(out.all()).unwrap(), [size; 16]);
    }
}

#[test]
fn tensor_maps_lead_to_the_tensor() {
    let Some(device) = hopper() else { return };
    let stream = Stream::new(&device).unwrap();
    let parameters = [Parameter::TensorMap, Parameter::Address, Parameter::I32, Parameter::I32];
    let (text, shared_bytes) = tile();
    let function = function(&device, &text, "tile", &parameters);
    // 20 rows of 40 floats, 48 apart.
    let (rows, columns, apart) = (20, 40, 48);
    let numbers: Vec<f32> = (0..rows * apart).map(|index| index as f32).collect();
    let tensor = Buffer::from_slice(&stream, &numbers).unwrap();
    let dimensions = [columns as u64, rows as u64];
    let map =
        TensorMap::encode(&device, &tile_box(), tensor.address(), &dimensions, &[apart as u64 * 4])
            .unwrap();
    let out = Buffer::new(&device, 512).unwrap();
    let mut arguments = Arguments::new();
    arguments.push(map).push(out.address()).push(0i32).push(0i32);
    let launch = Launch { block: [32, 1, 1], shared_bytes, ..Launch::default() };
    for (column, row) in [(0i32, 0i32), (8, 3), (32, 16), (-4, -2)] {
        arguments.set(2, column).unwrap();
        arguments.set(3, row).unwrap();
        function.launch(&stream, &launch, &arguments).unwrap();
        let tile = stream.download_vec::<f32>(out.all()).unwrap();
        for (index, &found) in tile.iter().enumerate() {
            let (x, y) = (column + index as i32 % 16, row + index as i32 / 16);
            let inside = (0..columns).contains(&x) && (0..rows).contains(&y);
            // Outside of the tensor there are zeros.
            let expected = if inside { (y * apart + x) as f32 } else { 0.0 };
            assert_eq!(found, expected, "at column {x}, row {y}");
        }
    }
}

#[test]
fn every_element_and_swizzle_makes_a_tensor_map() {
    let Some(device) = hopper() else { return };
    let elements = [Element::F32, Element::F16, Element::BF16, Element::E4M3, Element::E5M2];
    for element in elements {
        for (swizzle, width) in
            [(Swizzle::None, 16), (Swizzle::B32, 32), (Swizzle::B64, 64), (Swizzle::B128, 128)]
        {
            for rank in 1..=5 {
                let mut extent = vec![1; rank];
                extent[0] = width / element.bytes();
                let tensor_box = TensorBox { element, swizzle, extent };
                let (dimensions, strides) = (vec![64; rank], vec![4096; rank - 1]);
                let address = DeviceAddress(0x7f00_0000_0000);
                TensorMap::encode(&device, &tensor_box, address, &dimensions, &strides).unwrap();
            }
        }
    }
}

#[test]
fn architecture_specific_ptx_compiles() {
    let Some(device) = hopper() else { return };
    let function = function(&device, &accelerated(), "accelerated", &[]);
    let stream = Stream::new(&device).unwrap();
    let launch = Launch { block: [128, 1, 1], ..Launch::default() };
    function.launch(&stream, &launch, &Arguments::new()).unwrap();
    stream.synchronize().unwrap();
}
