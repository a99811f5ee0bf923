//! A virtual GPU: the CUDA driver's library, with FlashCore's simulator for a device.
//!
//! A program that loads this library as `libcuda.so.1` finds one device. Its kernels run in the
//! simulator, on its memory, at instruction level, so that everything above the driver (planning,
//! binding, arguments, tensor maps, workspaces, streams, graphs and front ends) can be run and
//! checked on a machine without a GPU:
//!
//! ```text
//! cargo build --release -p flashcore-virtual-gpu
//! mkdir driver && ln -s $PWD/target/release/libflashcore_virtual_gpu.so driver/libcuda.so.1
//! LD_LIBRARY_PATH=driver flashcore attend --seq 100 --heads 2 --head-dim 64
//! ```
//!
//! # Options
//!
//! `FLASHCORE_VIRTUAL_GPU` holds options, separated by commas; these are the defaults:
//!
//! | option | meaning |
//! | --- | --- |
//! | `sm=90a` | the architecture |
//! | `multiprocessors=4` | how many there are, and so how many blocks run at a time |
//! | `policy=earliest` | the order of what a kernel leaves unordered: or `latest`, or `random` |
//! | `seed=0` | the seed of the first launch; the next has the next seed |
//! | `values` | computes; `checked` also finds every [hazard](sim::HazardKind) |
//! | `driver=12.9` | the CUDA version that the driver says it has |
//! | `memory=2` | the memory of the device, in GiB; of the host, allocations take twice as much |
//!
//! # What it does
//!
//! - *Memory.* Each allocation has addresses of its own, uninitialised at first. An access outside
//!   of it, or after it was freed, is a hazard to a kernel and an error to a copy.
//! - *Modules* are PTX texts as [`ptx::print()`] writes them; nothing compiles them.
//! - *Launches* are checked against the kernel and run at once. A hazard is printed to the standard
//!   error stream, and the launch fails with `CUDA_ERROR_LAUNCH_FAILED`. As after any fault on a
//!   GPU, all further calls fail with it too, until the last reference to the context is given back.
//! - *Streams* execute work when it is enqueued: they are always idle and never race. Programmatic
//!   dependent launches are launches.
//! - *Captures* follow the driver's rules, also in what they forbid, and give graphs that are
//!   replayed in the order of the capture.
//! - *Events* measure time by the clock of this machine.
//!
//! What FlashCore does not call is missing.

// The interface of the driver is C. The rest of the workspace denies unsafe code.
#![allow(unsafe_code)]

mod error;
mod gpu;
mod graph;
mod launch;
mod module;
mod options;
mod stream;
mod tensor_map;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, c_char, c_void};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};

use error::{Error, Result, explain};
use gpu::{CONTEXT, Gpu, Handle, in_context, with};
use graph::Operation;
use launch::Dimensions;
use tensor_map::Tensor;

/// Where a function writes a result; null where the caller does not want it.
type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

fn set<T>(out: Out<'_, T>, value: T) -> Result {
    out.ok_or(Error::InvalidValue)?.write(value);
    Ok(())
}

/// Writes a result that the caller may not want.
fn offer<T>(out: Out<'_, T>, value: T) {
    if let Some(out) = out {
        out.write(value);
    }
}

/// Calls a function of the driver. No panic leaves it.
fn call(body: impl FnOnce() -> Result) -> u32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => error as u32,
        Err(_) => Error::Unknown as u32,
    }
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Debug)]
pub struct LaunchConfiguration {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: Handle,
    attributes: *const LaunchAttribute,
    attribute_count: u32,
}

/// `CUlaunchAttribute`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub struct LaunchAttribute {
    id: u32,
    padding: u32,
    value: [u32; 16],
}

impl LaunchConfiguration {
    /// # Safety
    /// There must be as many attributes as it says.
    unsafe fn dimensions(&self) -> Result<Dimensions> {
        let mut cluster = None;
        for index in 0..self.attribute_count as usize {
            // SAFETY: the caller's promise.
            let LaunchAttribute { id, value, .. } = unsafe { *self.attributes.add(index) };
            match id {
                // IGNORE, and PROGRAMMATIC_STREAM_SERIALIZATION
                0 | 6 => {}
                // CLUSTER_DIMENSION
                4 => cluster = Some([value[0], value[1], value[2]]),
                other => {
                    let reason = format!("launch attribute {other}");
                    return Err(explain(Error::NotSupported, reason));
                }
            }
        }
        let (grid, block, shared_bytes) = (self.grid, self.block, self.shared_bytes);
        Ok(Dimensions { grid, block, cluster, shared_bytes })
    }
}

/// Prepares a launch and enqueues it.
///
/// # Safety
/// As for [`Gpu::prepare`].
unsafe fn enqueue_launch(
    kernel: Handle,
    dimensions: &Dimensions,
    stream: Handle,
    pointers: *const *const c_void,
    extra: *const *const c_void,
) -> Result {
    if !extra.is_null() {
        return Err(Error::NotSupported);
    }
    in_context(|gpu| {
        // SAFETY: the caller's promise.
        let launch = unsafe { gpu.prepare(kernel, dimensions, pointers) }?;
        gpu.enqueue(stream, Operation::Launch(launch))
    })
}

/// Enqueues a copy or a fill of so many bytes.
fn enqueue(stream: Handle, bytes: usize, operation: Operation) -> Result {
    in_context(|gpu| if bytes == 0 { Ok(()) } else { gpu.enqueue(stream, operation) })
}

/// Calls a function about a device, of which there is one.
fn on_device<T>(device: i32, call: impl FnOnce(&mut Gpu) -> Result<T>) -> Result<T> {
    with(|gpu| if device == 0 { call(gpu) } else { Err(Error::InvalidDevice) })
}

/// # Safety
/// A text that ends in a NUL, or null.
unsafe fn text<'a>(pointer: *const c_char) -> Result<&'a str> {
    if pointer.is_null() {
        return Err(Error::InvalidValue);
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(pointer) }.to_str().map_err(|_| Error::InvalidValue)
}

/// Copies an array.
///
/// # Safety
/// There must be as many elements.
unsafe fn array<T: Copy>(pointer: *const T, count: usize) -> Result<Vec<T>> {
    if pointer.is_null() {
        return Err(Error::InvalidValue);
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) }.to_vec())
}

/// Defines functions of the driver, and finds them by name.
macro_rules! driver {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "` of the driver API.")]
            ///
            /// # Safety
            /// Pointers must be null or point to what the driver API says.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, clippy::too_many_arguments)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
                call(move || $body)
            }
        )*

        fn find(name: &str) -> Option<*const c_void> {
            match name {
                $(stringify!($name) => Some($name as *const c_void),)*
                _ => None,
            }
        }
    };
}

driver! {
    // ---- the driver and the device --------------------------------------------

    fn cuInit(flags: u32) {
        if flags == 0 { gpu::initialize() } else { Err(Error::InvalidValue) }
    }

    fn cuDriverGetVersion(version: Out<i32>) {
        // May be called before cuInit, and then the device may not exist yet.
        gpu::initialize()?;
        set(version, with(|gpu| Ok(gpu.options.driver as i32))?)
    }

    fn cuGetErrorName(result: u32, name: Out<*const c_char>) {
        let found = error::describe(result);
        set(name, found.map_or(std::ptr::null(), |(name, _)| name.as_ptr()))?;
        found.map(drop).ok_or(Error::InvalidValue)
    }

    fn cuGetErrorString(result: u32, name: Out<*const c_char>) {
        let found = error::describe(result);
        set(name, found.map_or(std::ptr::null(), |(_, text)| text.as_ptr()))?;
        found.map(drop).ok_or(Error::InvalidValue)
    }

    fn cuGetProcAddress_v2(
        symbol: *const c_char,
        function: Out<*const c_void>,
        version: i32,
        flags: u64,
        status: Out<u32>,
    ) {
        let _ = (version, flags);
        // SAFETY: a text, as the driver API says.
        let name = unsafe { text(symbol) }?;
        let found = ["_v2", ""].into_iter().find_map(|suffix| find(&format!("{name}{suffix}")));
        // SYMBOL_NOT_FOUND
        offer(status, found.is_none().into());
        set(function, found.unwrap_or(std::ptr::null()))?;
        found.map(drop).ok_or(Error::NotFound)
    }

    fn cuDeviceGetCount(count: Out<i32>) {
        set(count, with(|_| Ok(1))?)
    }

    fn cuDeviceGet(device: Out<i32>, ordinal: i32) {
        set(device, on_device(ordinal, |_| Ok(0))?)
    }

    fn cuDeviceGetName(name: *mut u8, bytes: i32, device: i32) {
        on_device(device, |_| Ok(()))?;
        let text = c"FlashCore virtual GPU".to_bytes_with_nul();
        if name.is_null() || (bytes as usize) < text.len() {
            return Err(Error::InvalidValue);
        }
        // SAFETY: the caller has so many bytes.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), name, text.len()) };
        Ok(())
    }

    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: i32) {
        set(uuid, on_device(device, |_| Ok(*b"flashcorevirtual"))?)
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: i32) {
        set(bytes, on_device(device, |gpu| Ok((gpu.options.memory << 30) as usize))?)
    }

    fn cuDeviceGetAttribute(value: Out<i32>, attribute: u32, device: i32) {
        set(value, on_device(device, |gpu| Ok(gpu.attribute(attribute)))?)
    }

    // ---- contexts -------------------------------------------------------------

    fn cuDevicePrimaryCtxRetain(context: Out<Handle>, device: i32) {
        on_device(device, |gpu| {
            gpu.retained += 1;
            set(context, CONTEXT)
        })
    }

    fn cuDevicePrimaryCtxRelease_v2(device: i32) {
        on_device(device, Gpu::release)
    }

    fn cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>) {
        set(flags, 0)?;
        set(active, on_device(device, |gpu| Ok((gpu.retained > 0).into()))?)
    }

    fn cuCtxGetCurrent(context: Out<Handle>) {
        with(|_| set(context, gpu::current()))
    }

    fn cuCtxSetCurrent(context: Handle) {
        with(|_| gpu::set_current(context))
    }

    fn cuCtxPushCurrent_v2(context: Handle) {
        with(|_| gpu::push(context))
    }

    fn cuCtxPopCurrent_v2(context: Out<Handle>) {
        let popped = with(|_| gpu::pop())?;
        offer(context, popped);
        Ok(())
    }

    fn cuCtxGetDevice(device: Out<i32>) {
        set(device, in_context(|_| Ok(0))?)
    }

    fn cuCtxSynchronize() {
        in_context(Gpu::unsafe_call)
    }

    // ---- memory ---------------------------------------------------------------

    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        in_context(|gpu| {
            set(free, gpu.free_bytes() as usize)?;
            set(total, (gpu.options.memory << 30) as usize)
        })
    }

    fn cuMemAlloc_v2(address: Out<u64>, bytes: usize) {
        set(address, in_context(|gpu| gpu.allocate(bytes as u64))?)
    }

    fn cuMemFree_v2(address: u64) {
        in_context(|gpu| gpu.free(address))
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: Handle) {
        enqueue(stream, bytes, Operation::Upload { from: from as usize, to, bytes })
    }

    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: Handle) {
        enqueue(stream, bytes, Operation::Download { from, to: to as usize, bytes })
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) {
        enqueue(stream, bytes, Operation::Copy { from, to, bytes })
    }

    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) {
        enqueue(0, bytes, Operation::Upload { from: from as usize, to, bytes })
    }

    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) {
        enqueue(0, bytes, Operation::Download { from, to: to as usize, bytes })
    }

    fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: Handle) {
        enqueue(stream, count, Operation::Fill { to, value, count })
    }

    // ---- modules and functions ------------------------------------------------

    fn cuModuleLoadData(module: Out<Handle>, image: *const c_char) {
        // SAFETY: an image; one that is no text is a binary, of which the first bytes are read.
        let text = unsafe { text(image) }.ok().filter(|text| !text.starts_with("\x7fELF"));
        let reason = "modules must be PTX, as nothing here runs machine code";
        let text = text.ok_or_else(|| explain(Error::NoBinaryForGpu, reason))?;
        set(module, in_context(|gpu| gpu.load(text))?)
    }

    fn cuModuleGetFunction(function: Out<Handle>, module: Handle, name: *const c_char) {
        // SAFETY: a text, as the driver API says.
        let name = unsafe { text(name) }?;
        in_context(|gpu| {
            let found = gpu.kernel(module)?.program.name == name;
            if found { set(function, module) } else { Err(Error::NotFound) }
        })
    }

    fn cuFuncGetAttribute(value: Out<i32>, attribute: u32, function: Handle) {
        set(value, in_context(|gpu| gpu.kernel(function)?.attribute(attribute))?)
    }

    fn cuFuncSetAttribute(function: Handle, attribute: u32, value: i32) {
        in_context(|gpu| {
            let limit = gpu.options.target.shared_memory_limit();
            gpu.kernel(function)?.set(attribute, value, limit)
        })
    }

    fn cuFuncGetParamInfo(
        function: Handle,
        index: usize,
        offset: Out<usize>,
        bytes: Out<usize>,
    ) {
        let (at, size) = in_context(|gpu| gpu.kernel(function)?.parameter(index))?;
        offer(bytes, size);
        set(offset, at)
    }

    // ---- launches -------------------------------------------------------------

    fn cuLaunchKernel(
        function: Handle,
        grid_x: u32,
        grid_y: u32,
        grid_z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        shared_bytes: u32,
        stream: Handle,
        arguments: *const *const c_void,
        extra: *const *const c_void,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let dimensions = Dimensions { grid, block, cluster: None, shared_bytes };
        // SAFETY: there is an argument for each parameter, as the driver API says.
        unsafe { enqueue_launch(function, &dimensions, stream, arguments, extra) }
    }

    fn cuLaunchKernelEx(
        configuration: Option<&LaunchConfiguration>,
        function: Handle,
        arguments: *const *const c_void,
        extra: *const *const c_void,
    ) {
        let configuration = configuration.ok_or(Error::InvalidValue)?;
        // SAFETY: as many attributes and arguments as there should be, as the driver API says.
        unsafe {
            let dimensions = configuration.dimensions()?;
            enqueue_launch(function, &dimensions, configuration.stream, arguments, extra)
        }
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: Out<i32>,
        function: Handle,
        threads: i32,
        shared_bytes: usize,
    ) {
        in_context(|gpu| {
            let shared_bytes = u32::try_from(shared_bytes).map_err(|_| Error::InvalidValue)?;
            let count = gpu.resident_blocks(function, threads.max(0) as u32, shared_bytes)?;
            set(blocks, count as i32)
        })
    }

    fn cuTensorMapEncodeTiled(
        map: *mut MaybeUninit<tensor_map::Encoded>,
        data_type: u32,
        rank: u32,
        address: u64,
        dimensions: *const u64,
        strides: *const u64,
        extent: *const u32,
        element_strides: *const u32,
        interleave: u32,
        swizzle: u32,
        l2_promotion: u32,
        fill: u32,
    ) {
        in_context(|_| Ok(()))?;
        // Newer drivers want 128, and so does a kernel's parameter.
        if map.is_null() || !map.addr().is_multiple_of(64) || !(1..=5).contains(&rank) {
            return Err(explain(Error::InvalidValue, "the tensor map's address or its rank"));
        }
        let rank = rank as usize;
        // SAFETY: the arrays have an element for each dimension, as the driver API says.
        let tensor = unsafe {
            Tensor {
                data_type,
                address,
                dimensions: array(dimensions, rank)?,
                strides: array(strides, rank - 1)?,
                extent: array(extent, rank)?,
                element_strides: array(element_strides, rank)?,
                interleave,
                swizzle,
                l2_promotion,
                fill,
            }
        };
        let encoded = tensor.encode()?;
        // SAFETY: the map has 128 bytes, as the driver API says, and is aligned.
        unsafe { (*map).write(encoded) };
        Ok(())
    }

    // ---- streams and events ---------------------------------------------------

    fn cuStreamCreate(stream: Out<Handle>, flags: u32) {
        // CU_STREAM_NON_BLOCKING
        let blocking = flags & 1 == 0;
        set(stream, in_context(|gpu| Ok(gpu.create_stream(blocking)))?)
    }

    fn cuStreamDestroy_v2(stream: Handle) {
        in_context(|gpu| gpu.destroy_stream(stream))
    }

    fn cuStreamSynchronize(stream: Handle) {
        in_context(|gpu| gpu.wait_for_stream(stream))
    }

    fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: u32) {
        let _ = flags;
        in_context(|gpu| gpu.wait_for_event(stream, event))
    }

    fn cuEventCreate(event: Out<Handle>, flags: u32) {
        let _ = flags;
        set(event, in_context(|gpu| Ok(gpu.create_event()))?)
    }

    fn cuEventDestroy_v2(event: Handle) {
        in_context(|gpu| gpu.events.remove(&event).map(drop).ok_or(Error::InvalidHandle))
    }

    fn cuEventRecord(event: Handle, stream: Handle) {
        in_context(|gpu| gpu.record(event, stream))
    }

    fn cuEventQuery(event: Handle) {
        in_context(|gpu| gpu.pass(event).map(drop))
    }

    fn cuEventSynchronize(event: Handle) {
        in_context(|gpu| gpu.pass(event).map(drop))
    }

    fn cuEventElapsedTime(milliseconds: Out<f32>, start: Handle, end: Handle) {
        set(milliseconds, in_context(|gpu| gpu.elapsed(start, end))?)
    }

    // ---- captures and graphs --------------------------------------------------

    fn cuStreamBeginCapture_v2(stream: Handle, mode: u32) {
        in_context(|gpu| gpu.begin_capture(stream, mode))
    }

    fn cuStreamEndCapture(stream: Handle, graph: Out<Handle>) {
        let (handle, discarded) = in_context(|gpu| gpu.end_capture(stream))?;
        set(graph, handle)?;
        // What is discarded may call its owner, so it is dropped here, outside of the lock.
        discarded.map_or(Ok(()), |(_, error)| Err(error))
    }

    fn cuStreamGetCaptureInfo_v2(
        stream: Handle,
        status: Out<u32>,
        id: Out<u64>,
        graph: Out<Handle>,
        dependencies: Out<*const Handle>,
        dependency_count: Out<usize>,
    ) {
        in_context(|gpu| {
            let capture = gpu.capture(stream)?;
            set(status, capture_status(capture.map(|it| it.1)))?;
            if let Some((number, capture)) = capture {
                offer(id, number);
                offer(graph, capture.graph);
                // Graphs here have no nodes to depend on.
                offer(dependencies, std::ptr::null());
                offer(dependency_count, 0);
            }
            Ok(())
        })
    }

    fn cuThreadExchangeStreamCaptureMode(mode: Option<&mut u32>) {
        let mode = mode.ok_or(Error::InvalidValue)?;
        *mode = stream::exchange_mode(*mode)?;
        Ok(())
    }

    fn cuGraphInstantiateWithFlags(executable: Out<Handle>, graph: Handle, flags: u64) {
        let _ = flags;
        set(executable, in_context(|gpu| gpu.instantiate(graph))?)
    }

    fn cuGraphLaunch(executable: Handle, stream: Handle) {
        in_context(|gpu| gpu.launch_graph(executable, stream))
    }

    fn cuGraphDestroy(graph: Handle) {
        // Dropped outside of the lock, as its objects may call their owners.
        let removed = in_context(|gpu| gpu.graphs.remove(&graph).ok_or(Error::InvalidHandle))?;
        drop(removed);
        Ok(())
    }

    fn cuGraphExecDestroy(executable: Handle) {
        let removed =
            in_context(|gpu| gpu.executables.remove(&executable).ok_or(Error::InvalidHandle))?;
        drop(removed);
        Ok(())
    }

    fn cuUserObjectCreate(
        handle: Out<Handle>,
        object: *mut c_void,
        destroy: Option<unsafe extern "C" fn(*mut c_void)>,
        references: u32,
        flags: u32,
    ) {
        // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, which is required.
        let destroy = destroy.filter(|_| flags == 1 && references > 0);
        let destroy = destroy.ok_or(Error::InvalidValue)?;
        let object = object as usize;
        set(handle, in_context(|gpu| gpu.create_object(object, destroy, references))?)
    }

    fn cuUserObjectRelease(object: Handle, references: u32) {
        let last = in_context(|gpu| gpu.release_object(object, references))?;
        drop(last);
        Ok(())
    }

    fn cuGraphRetainUserObject(graph: Handle, object: Handle, references: u32, flags: u32) {
        // CU_GRAPH_USER_OBJECT_MOVE
        let moved = flags & 1 != 0;
        in_context(|gpu| gpu.give_object(graph, object, references, moved))
    }
}

/// Returns the number of `CUstreamCaptureStatus`.
fn capture_status(capture: Option<&stream::Capture>) -> u32 {
    match capture {
        None => 0,
        Some(capture) if capture.valid => 1,
        Some(_) => 2,
    }
}
