//! The driver as its callers see it: through its functions.
// Every call in these tests passes null, or pointers to values of their own.
#![allow(clippy::undocumented_unsafe_blocks)]

use std::ffi::CString;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ptx::{
    Builder, CopyHint, Element, Expression, F32, GlobalAddress, Mbarriers, Scope, SharedTiles,
    Target, TileLayout, U64, print,
};
use sim::Mode;

use super::*;

/// The results that the tests expect.
const INVALID_VALUE: u32 = Error::InvalidValue as u32;
const FAILED: u32 = Error::LaunchFailed as u32;

/// A context for one test at a time, as there is one device in the process.
struct Context(#[allow(dead_code)] MutexGuard<'static, ()>); // held until the test ends

impl Context {
    fn new() -> Context {
        static ONE: Mutex<()> = Mutex::new(());
        let guard = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: each pointer is null or one of ours, here and wherever these tests call.
        let context = unsafe {
            assert_eq!(cuInit(0), 0);
            get(|out| cuDevicePrimaryCtxRetain(out, 0)).unwrap()
        };
        assert_eq!(unsafe { cuCtxSetCurrent(context) }, 0);
        Context(guard)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        assert_eq!(unsafe { cuDevicePrimaryCtxRelease_v2(0) }, 0);
        let _ = with(|gpu| {
            gpu.options = options::Options::default();
            Ok(())
        });
    }
}

/// Returns what a function writes, or its error.
fn get<T>(call: impl FnOnce(Out<'_, T>) -> u32) -> std::result::Result<T, u32> {
    let mut value = MaybeUninit::uninit();
    match call(Some(&mut value)) {
        // SAFETY: written, as the function succeeded.
        0 => Ok(unsafe { value.assume_init() }),
        error => Err(error),
    }
}

fn allocate(bytes: usize) -> std::result::Result<u64, u32> {
    get(|out| unsafe { cuMemAlloc_v2(out, bytes) })
}

fn upload(address: u64, values: &[f32]) -> u32 {
    unsafe { cuMemcpyHtoDAsync_v2(address, values.as_ptr().cast(), size_of_val(values), 0) }
}

fn download(address: u64, count: usize) -> std::result::Result<Vec<f32>, u32> {
    let mut values = vec![0f32; count];
    let to = values.as_mut_ptr().cast();
    match unsafe { cuMemcpyDtoHAsync_v2(to, address, 4 * count, 0) } {
        0 => Ok(values),
        error => Err(error),
    }
}

fn load(text: &str) -> std::result::Result<Handle, u32> {
    let text = CString::new(text).unwrap();
    get(|out| unsafe { cuModuleLoadData(out, text.as_ptr()) })
}

/// `data[thread] = 2 * data[thread]` in 64 threads of each block, which all do the same.
fn double() -> Handle {
    let mut k = Builder::new("double", Target::SM_75, 64);
    let data = k.parameter::<GlobalAddress>("data");
    let thread = k.thread_index();
    let mine = k.eval(data + thread.convert::<U64>() * 4);
    let value = k.load::<F32, _>(mine);
    k.store(mine, value * 2.0);
    let module = load(&print(&k.finish().unwrap())).unwrap();
    get(|out| unsafe { cuModuleGetFunction(out, module, c"double".as_ptr()) }).unwrap()
}

fn launch(kernel: Handle, grid: u32, block: u32, stream: Handle, address: u64) -> u32 {
    let argument: *const u64 = &address;
    let arguments = [argument.cast::<c_void>()];
    unsafe {
        let pointers = arguments.as_ptr();
        cuLaunchKernel(kernel, grid, 1, 1, block, 1, 1, 0, stream, pointers, null())
    }
}

fn new_stream() -> Handle {
    get(|out| unsafe { cuStreamCreate(out, 1) }).unwrap()
}

#[test]
fn memory_ends_where_it_ends() {
    let _context = Context::new();
    let (a, b) = (allocate(64).unwrap(), allocate(64).unwrap());
    let numbers: Vec<f32> = (0..16).map(|number| number as f32).collect();
    assert_eq!(upload(a, &numbers), 0);
    assert_eq!(unsafe { cuMemcpyDtoDAsync_v2(b, a + 32, 32, 0) }, 0);
    assert_eq!(unsafe { cuMemsetD8Async(b + 32, 0x3f, 32, 0) }, 0);
    let filled = f32::from_bits(0x3f3f_3f3f);
    assert_eq!(download(b, 9).unwrap(), [8., 9., 10., 11., 12., 13., 14., 15., filled]);
    assert_eq!(download(b + 32, 9), Err(INVALID_VALUE));
    assert_eq!(upload(a + 4, &numbers), INVALID_VALUE);
    assert_eq!(unsafe { cuMemsetD8Async(a - 1, 0, 1, 0) }, INVALID_VALUE);
    assert_eq!(unsafe { cuMemFree_v2(a + 4) }, INVALID_VALUE);
    assert_eq!(unsafe { cuMemFree_v2(a) }, 0);
    assert_eq!(unsafe { cuMemFree_v2(a) }, INVALID_VALUE);
    assert_eq!(download(a, 1), Err(INVALID_VALUE));
    assert_eq!(allocate(0), Err(INVALID_VALUE));
    assert_eq!(allocate(9 << 30), Err(Error::OutOfMemory as u32));
}

#[test]
fn kernels_are_loaded_and_run() {
    let _context = Context::new();
    let kernel = double();
    assert_eq!(get(|out| unsafe { cuFuncGetAttribute(out, 0, kernel) }), Ok(64));
    let second = get(|bytes| unsafe {
        cuFuncGetParamInfo(kernel, 0, Some(&mut MaybeUninit::uninit()), bytes)
    });
    assert_eq!(second, Ok(8));
    let none = unsafe { cuFuncGetParamInfo(kernel, 1, Some(&mut MaybeUninit::uninit()), None) };
    assert_eq!(none, INVALID_VALUE);
    let wrong = get(|out| unsafe { cuModuleGetFunction(out, kernel, c"halve".as_ptr()) });
    assert_eq!(wrong, Err(Error::NotFound as u32));
    let data = allocate(256).unwrap();
    assert_eq!(upload(data, &[1.5; 64]), 0);
    assert_eq!(launch(kernel, 1, 64, 0, data), 0);
    assert_eq!(download(data, 64).unwrap(), [3.0; 64]);
    assert_eq!(launch(kernel, 1, 65, 0, data), INVALID_VALUE);
    assert_eq!(launch(kernel, 0, 64, 0, data), INVALID_VALUE);
    assert_eq!(launch(kernel + 1, 1, 64, 0, data), Error::InvalidHandle as u32);
    // 2048 threads of a multiprocessor in blocks of 64.
    let blocks =
        get(|out| unsafe { cuOccupancyMaxActiveBlocksPerMultiprocessor(out, kernel, 64, 0) });
    assert_eq!(blocks, Ok(32));
}

#[test]
fn images_must_be_texts_for_this_device() {
    let _context = Context::new();
    assert_eq!(load("\x7fELF\x02\x01\x01"), Err(Error::NoBinaryForGpu as u32));
    assert_eq!(load(".version 8.0\n"), Err(Error::InvalidPtx as u32));
    let newer = Builder::new("nothing", Target::SM_120, 32).finish().unwrap();
    assert_eq!(load(&print(&newer)), Err(Error::NoBinaryForGpu as u32));
}

/// A fault is reported by its launch, and by every call until the context ends.
#[test]
fn faults_stay() {
    let context = Context::new();
    let kernel = double();
    let short = allocate(128).unwrap();
    assert_eq!(upload(short, &[1.0; 32]), 0);
    assert_eq!(launch(kernel, 1, 64, 0, short), FAILED);
    assert_eq!(allocate(16), Err(FAILED));
    assert_eq!(unsafe { cuStreamSynchronize(0) }, FAILED);
    drop(context);
    let _context = Context::new();
    let kernel = double();
    let data = allocate(256).unwrap();
    assert_eq!(upload(data, &[1.0; 64]), 0);
    assert_eq!(unsafe { cuMemFree_v2(data) }, 0);
    assert_eq!(launch(kernel, 1, 64, 0, data), FAILED);
}

/// What nobody wrote, and what nobody orders, is found where everything is checked.
#[test]
fn checks_can_be_asked_for() {
    for (grid, initialized) in [(1, true), (1, false), (2, true)] {
        for mode in [Mode::Values, Mode::Checked] {
            let _context = Context::new();
            let _ = with(|gpu| {
                gpu.options.mode = mode;
                Ok(())
            });
            let kernel = double();
            let data = allocate(256).unwrap();
            if initialized {
                assert_eq!(upload(data, &[1.0; 64]), 0);
            }
            let wrong = mode == Mode::Checked && (!initialized || grid > 1);
            assert_eq!(launch(kernel, grid, 64, 0, data), if wrong { FAILED } else { 0 });
        }
    }
}

#[test]
fn tensor_maps_lead_to_the_tensor() {
    let _context = Context::new();
    let mut k = Builder::new("tile", Target::SM_90A, 32);
    let layout = TileLayout::widest(Element::BF16, 8, 64);
    let map = k.tensor_map("map", layout.tensor_box(2));
    let out = k.parameter::<GlobalAddress>("out");
    let tile = SharedTiles::new(&mut k, "tile", layout, 1).at(&mut k, 0);
    let barriers = Mbarriers::new(&mut k, "loaded", 1, 1);
    let thread = k.thread_index();
    k.if_(thread.equals(0), |k| barriers.init(k));
    k.barriers_ready();
    let barrier = barriers.at(&mut k, 0);
    k.if_(thread.equals(0), |k| {
        k.mbarrier_arrive_expect(barrier, layout.bytes());
        tile.load(k, map, &[64.into(), 1.into()], barrier, CopyHint::default());
    });
    k.mbarrier_wait(barrier, 0, Scope::Block);
    // The first four bytes of the tile: the swizzle leaves its first row as it is.
    let start = k.shared_address(0);
    let first = k.load::<F32, _>(start + thread * 4);
    k.store(out + thread.convert::<U64>() * 4, first);
    let program = k.finish().unwrap();
    let shared_bytes = program.shared_bytes();
    let kernel = load(&print(&program)).unwrap();

    // 10 rows of 128 elements, two in each word.
    let words: Vec<f32> = (0..640).map(|word| word as f32).collect();
    let (tensor, out) = (allocate(2560).unwrap(), allocate(128).unwrap());
    assert_eq!(upload(tensor, &words), 0);
    #[repr(align(64))]
    struct Map(MaybeUninit<tensor_map::Encoded>);
    let mut map = Map(MaybeUninit::uninit());
    let mut encode = |extent: [u32; 2]| unsafe {
        let (dimensions, strides, ones) = ([128u64, 10], [256u64], [1u32; 2]);
        let (dimensions, strides) = (dimensions.as_ptr(), strides.as_ptr());
        let (extent, ones) = (extent.as_ptr(), ones.as_ptr());
        let map = &raw mut map.0;
        cuTensorMapEncodeTiled(map, 9, 2, tensor, dimensions, strides, extent, ones, 0, 3, 3, 0)
    };
    assert_eq!(encode([128, 8]), INVALID_VALUE);
    assert_eq!(encode([64, 8]), 0);
    let address: *const u64 = &out;
    let arguments = [(&raw const map).cast::<c_void>(), address.cast()];
    let configuration = LaunchConfiguration {
        grid: [1; 3],
        block: [32, 1, 1],
        shared_bytes,
        stream: 0,
        attributes: null(),
        attribute_count: 0,
    };
    let result =
        unsafe { cuLaunchKernelEx(Some(&configuration), kernel, arguments.as_ptr(), null()) };
    assert_eq!(result, 0);
    let expected: Vec<f32> = (0..32).map(|word| (64 + 32 + word) as f32).collect();
    assert_eq!(download(out, 32).unwrap(), expected);
}

#[test]
fn clusters_must_fit() {
    let _context = Context::new();
    let kernel = double();
    let data = allocate(256).unwrap();
    let size = |blocks| LaunchAttribute {
        id: 4,
        padding: 0,
        value: std::array::from_fn(|at| [blocks, 1, 1].get(at).copied().unwrap_or(0)),
    };
    let with_clusters = |grid, attribute: &LaunchAttribute| LaunchConfiguration {
        grid: [grid, 1, 1],
        block: [64, 1, 1],
        shared_bytes: 0,
        stream: 0,
        attributes: attribute,
        attribute_count: 1,
    };
    let argument: *const u64 = &data;
    let arguments = [argument.cast::<c_void>()];
    let run = |grid, blocks| unsafe {
        let attribute = size(blocks);
        let configuration = with_clusters(grid, &attribute);
        cuLaunchKernelEx(Some(&configuration), kernel, arguments.as_ptr(), null())
    };
    assert_eq!(run(4, 2), 0);
    assert_eq!(run(3, 2), INVALID_VALUE);
    assert_eq!(run(16, 16), Error::InvalidClusterSize as u32);
    let attribute = size(2);
    let configuration = with_clusters(4, &attribute);
    let dimensions = unsafe { configuration.dimensions() }.unwrap();
    let clusters = in_context(|gpu| gpu.resident_clusters(kernel, &dimensions));
    // 32 blocks on each of four multiprocessors.
    assert_eq!(clusters.unwrap(), 64);
}

// ---- captures -----------------------------------------------------------------

fn begin(stream: Handle, mode: u32) -> u32 {
    unsafe { cuStreamBeginCapture_v2(stream, mode) }
}

fn end(stream: Handle) -> std::result::Result<Handle, u32> {
    get(|out| unsafe { cuStreamEndCapture(stream, out) })
}

static DESTROYED: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn destroy(_: *mut c_void) {
    // The driver can be called, as no lock is held.
    assert_eq!(unsafe { cuInit(0) }, 0);
    DESTROYED.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn graphs_replay_what_was_captured() {
    let _context = Context::new();
    let (kernel, stream, data) = (double(), new_stream(), allocate(256).unwrap());
    assert_eq!(upload(data, &[1.0; 64]), 0);
    assert_eq!(begin(stream, 1), 0);
    assert_eq!(launch(kernel, 1, 64, stream, data), 0);
    assert_eq!(unsafe { cuMemcpyDtoDAsync_v2(data + 128, data, 128, stream) }, 0);
    let mut graph = MaybeUninit::uninit();
    let mut id = MaybeUninit::uninit();
    let status = get(|out| unsafe {
        let (id, graph) = (Some(&mut id), Some(&mut graph));
        cuStreamGetCaptureInfo_v2(stream, out, id, graph, None, None)
    });
    assert_eq!(status, Ok(1));
    let object = get(|out| unsafe { cuUserObjectCreate(out, null_mut(), Some(destroy), 1, 1) });
    // SAFETY: written, as the stream is captured.
    let captured = unsafe { graph.assume_init() };
    assert_eq!(unsafe { cuGraphRetainUserObject(captured, object.unwrap(), 1, 1) }, 0);
    let graph = end(stream).unwrap();
    assert_eq!(graph, captured);
    // Nothing has run yet.
    assert_eq!(download(data, 64).unwrap(), [1.0; 64]);
    let executable = get(|out| unsafe { cuGraphInstantiateWithFlags(out, graph, 0) }).unwrap();
    assert_eq!(unsafe { cuGraphDestroy(graph) }, 0);
    for expected in [2.0, 4.0] {
        assert_eq!(unsafe { cuGraphLaunch(executable, stream) }, 0);
        assert_eq!(download(data, 64).unwrap(), [expected; 64]);
    }
    assert_eq!(DESTROYED.load(Ordering::Relaxed), 0);
    assert_eq!(unsafe { cuGraphExecDestroy(executable) }, 0);
    assert_eq!(DESTROYED.load(Ordering::Relaxed), 1);
}

#[test]
fn captures_forbid_what_the_driver_forbids() {
    let _context = Context::new();
    let stream = new_stream();
    let unsupported = Error::CaptureUnsupported as u32;
    let invalidated = Error::CaptureInvalidated as u32;
    assert_eq!(begin(0, 1), unsupported);
    assert_eq!(end(stream), Err(Error::IllegalState as u32));
    // Allocating, waiting, and ending on another thread.
    assert_eq!(begin(stream, 1), 0);
    assert_eq!(begin(stream, 1), Error::IllegalState as u32);
    assert_eq!(allocate(16), Err(unsupported));
    let status =
        get(|out| unsafe { cuStreamGetCaptureInfo_v2(stream, out, None, None, None, None) });
    assert_eq!(status, Ok(2));
    assert_eq!(end(stream), Err(invalidated));
    assert_eq!(begin(stream, 1), 0);
    assert_eq!(unsafe { cuStreamSynchronize(stream) }, unsupported);
    assert_eq!(end(stream), Err(invalidated));
    // Another thread may allocate unless the capture is global.
    for (mode, expected) in [(1, true), (0, false)] {
        assert_eq!(begin(stream, mode), 0);
        let elsewhere = std::thread::spawn(|| {
            assert_eq!(unsafe { cuCtxSetCurrent(CONTEXT) }, 0);
            allocate(16).is_ok()
        });
        assert_eq!(elsewhere.join().unwrap(), expected);
        assert_eq!(end(stream).is_ok(), expected);
    }
    // In the relaxed mode everybody may.
    assert_eq!(begin(stream, 1), 0);
    let mut mode = 2;
    assert_eq!(unsafe { cuThreadExchangeStreamCaptureMode(Some(&mut mode)) }, 0);
    assert_eq!(mode, 0);
    assert!(allocate(16).is_ok());
    assert_eq!(unsafe { cuThreadExchangeStreamCaptureMode(Some(&mut mode)) }, 0);
    assert_eq!(mode, 2);
    assert!(end(stream).is_ok());
    // The legacy stream waits for streams that block it.
    let blocking = get(|out| unsafe { cuStreamCreate(out, 0) }).unwrap();
    assert_eq!(begin(blocking, 1), 0);
    assert_eq!(unsafe { cuStreamSynchronize(0) }, Error::CaptureImplicit as u32);
    assert_eq!(end(blocking), Err(invalidated));
}

/// Streams join a capture by waiting for its events, and must be joined before it ends.
#[test]
fn captures_fork_and_join() {
    let _context = Context::new();
    let (kernel, data) = (double(), allocate(256).unwrap());
    let (first, second) = (new_stream(), new_stream());
    let event = || get(|out| unsafe { cuEventCreate(out, 0) }).unwrap();
    let (fork, join, outside) = (event(), event(), event());
    assert_eq!(upload(data, &[1.0; 64]), 0);
    for joins in [true, false] {
        assert_eq!(begin(first, 1), 0);
        assert_eq!(unsafe { cuEventRecord(fork, first) }, 0);
        assert_eq!(unsafe { cuEventQuery(fork) }, Error::CapturedEvent as u32);
        assert_eq!(unsafe { cuStreamWaitEvent(second, fork, 0) }, 0);
        assert_eq!(launch(kernel, 1, 64, second, data), 0);
        if joins {
            assert_eq!(unsafe { cuEventRecord(join, second) }, 0);
            assert_eq!(unsafe { cuStreamWaitEvent(first, join, 0) }, 0);
        }
        assert_eq!(end(first).is_ok(), joins);
    }
    assert_eq!(unsafe { cuEventRecord(outside, second) }, 0);
    // Ended in another stream, and after work outside of it.
    assert_eq!(begin(first, 1), 0);
    assert_eq!(unsafe { cuEventRecord(fork, first) }, 0);
    assert_eq!(unsafe { cuStreamWaitEvent(second, fork, 0) }, 0);
    assert_eq!(end(second), Err(Error::CaptureUnmatched as u32));
    assert_eq!(end(first), Err(Error::CaptureInvalidated as u32));
    assert_eq!(begin(first, 1), 0);
    assert_eq!(unsafe { cuStreamWaitEvent(first, outside, 0) }, Error::CaptureIsolation as u32);
    assert_eq!(end(first), Err(Error::CaptureInvalidated as u32));
    assert_eq!(download(data, 64).unwrap(), [1.0; 64]);
}

#[test]
fn threads_need_a_context() {
    let _context = Context::new();
    let elsewhere = std::thread::spawn(|| {
        assert_eq!(allocate(16), Err(Error::InvalidContext as u32));
        assert_eq!(get(|out| unsafe { cuCtxGetCurrent(out) }), Ok(0));
        assert_eq!(unsafe { cuCtxPushCurrent_v2(CONTEXT) }, 0);
        assert!(allocate(16).is_ok());
        assert_eq!(get(|out| unsafe { cuCtxPopCurrent_v2(out) }), Ok(CONTEXT));
        assert_eq!(unsafe { cuCtxPopCurrent_v2(None) }, Error::InvalidContext as u32);
        assert_eq!(unsafe { cuCtxSetCurrent(1) }, Error::InvalidContext as u32);
    });
    elsewhere.join().unwrap();
}

#[test]
fn functions_are_found_by_name() {
    let _context = Context::new();
    let address =
        |name: &CStr| get(|out| unsafe { cuGetProcAddress_v2(name.as_ptr(), out, 12040, 0, None) });
    assert_eq!(address(c"cuFuncGetParamInfo"), Ok(cuFuncGetParamInfo as *const c_void));
    assert_eq!(address(c"cuMemAlloc"), Ok(cuMemAlloc_v2 as *const c_void));
    assert_eq!(address(c"cuMemAllocManaged"), Err(Error::NotFound as u32));
    let name = get(|out| unsafe { cuGetErrorName(719, out) }).unwrap();
    // SAFETY: a text of the driver's.
    assert_eq!(unsafe { text(name) }, Ok("CUDA_ERROR_LAUNCH_FAILED"));
    assert_eq!(get(|out| unsafe { cuGetErrorString(12345, out) }), Err(INVALID_VALUE));
}

#[test]
fn no_panic_leaves_the_driver() {
    assert_eq!(call(|| panic!("on purpose")), Error::Unknown as u32);
}
