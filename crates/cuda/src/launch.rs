//! Launches: grid dimensions, kernel arguments, and the call to the driver.

use std::ffi::c_void;
use std::fmt;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

use cudarc::driver::sys::{self, CUlaunchAttributeID as AttributeId};

use crate::error::check;
use crate::{DeviceAddress, Error, Function, Result, Stream, TensorMap};

/// The type of a kernel parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Parameter {
    /// `.u32` or `.b32` in PTX.
    U32,
    /// `.s32`.
    I32,
    /// `.u64` or `.b64`.
    U64,
    /// `.f32`.
    F32,
    /// A `.u64` that is an address in device memory.
    Address,
    /// `.align 64 .b8 name[128]` (or `.align 128`).
    TensorMap,
}

impl Parameter {
    /// Returns the size in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Parameter::U32 | Parameter::I32 | Parameter::F32 => 4,
            Parameter::U64 | Parameter::Address => 8,
            Parameter::TensorMap => 128,
        }
    }

    /// Tells whether it takes an argument of a kind: to the kernel, an address is a number.
    fn takes(self, given: Parameter) -> bool {
        (given == self) | ((given == Parameter::Address) & (self == Parameter::U64))
    }
}

impl fmt::Display for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Parameter::U32 => "u32",
            Parameter::I32 => "i32",
            Parameter::U64 => "u64",
            Parameter::F32 => "f32",
            Parameter::Address => "address",
            Parameter::TensorMap => "tensor map",
        })
    }
}

/// One kernel argument. Converts from the plain types by `From`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument {
    /// For [`Parameter::U32`].
    U32(u32),
    /// For [`Parameter::I32`].
    I32(i32),
    /// For [`Parameter::U64`].
    U64(u64),
    /// For [`Parameter::F32`].
    F32(f32),
    /// For [`Parameter::Address`].
    Address(DeviceAddress),
    /// For [`Parameter::TensorMap`].
    TensorMap(TensorMap),
}

macro_rules! from {
    ($($type:ty => $variant:ident),*) => {$(
        impl From<$type> for Argument {
            fn from(value: $type) -> Argument {
                Argument::$variant(value)
            }
        }
    )*};
}

from!(u32 => U32, i32 => I32, u64 => U64, f32 => F32, DeviceAddress => Address, TensorMap => TensorMap);

impl Argument {
    fn parameter(&self) -> Parameter {
        match self {
            Argument::U32(_) => Parameter::U32,
            Argument::I32(_) => Parameter::I32,
            Argument::U64(_) => Parameter::U64,
            Argument::F32(_) => Parameter::F32,
            Argument::Address(_) => Parameter::Address,
            Argument::TensorMap(_) => Parameter::TensorMap,
        }
    }
}

/// Maximum number of arguments of a launch. CUDA's own limit is in bytes; this one keeps launches off
/// the heap.
pub const MAX_ARGUMENTS: usize = 96;

/// CUDA's limit since 12.1 for all parameters of a kernel; before, it was 4096.
const MAX_PARAMETER_BYTES: usize = 32764;

/// The arguments of a kernel, in order.
///
/// They are built once and used for many launches: neither [`Arguments::set`] nor a launch
/// allocates.
///
/// ```
/// use flashcore_cuda::{Arguments, DeviceAddress};
///
/// let mut arguments = Arguments::new();
/// arguments.push(DeviceAddress(0x7f00)).push(1024u32).push(0.125f32);
/// arguments.set(1, 2048u32)?;
/// assert_eq!(arguments.len(), 3);
/// assert!(arguments.set(1, 0.5f32).is_err());
/// # Ok::<_, flashcore_cuda::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Arguments {
    /// Type of each argument.
    kinds: Vec<Parameter>,
    /// Index of the word of `blocks` at which each argument begins.
    places: Vec<usize>,
    /// Storage of the arguments, in one allocation so that a launch computes each address by an
    /// addition. A tensor map takes a whole block; every other argument takes one word, of which
    /// the first bytes count.
    blocks: Vec<Block>,
    /// Number of words of `blocks` in use.
    taken: usize,
}

/// A piece of storage with the size and alignment of a tensor map.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(align(128))]
struct Block([u64; BLOCK_WORDS]);

const BLOCK_WORDS: usize = 16;

impl Arguments {
    /// Creates an empty list of arguments.
    pub fn new() -> Arguments {
        Arguments::default()
    }

    /// Returns the number of arguments.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Tells whether there are no arguments.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// Removes all arguments, and keeps the allocation.
    pub fn clear(&mut self) {
        self.kinds.clear();
        self.places.clear();
        self.blocks.clear();
        self.taken = 0;
    }

    /// Appends an argument.
    pub fn push(&mut self, argument: impl Into<Argument>) -> &mut Arguments {
        let argument = argument.into();
        let is_map = matches!(argument, Argument::TensorMap(_));
        if is_map {
            self.taken = self.taken.next_multiple_of(BLOCK_WORDS);
        }
        let place = self.taken;
        self.taken += if is_map { BLOCK_WORDS } else { 1 };
        self.blocks.resize(self.taken.div_ceil(BLOCK_WORDS), Block::default());
        self.write(place, &argument);
        self.kinds.push(argument.parameter());
        self.places.push(place);
        self
    }

    fn write(&mut self, place: usize, argument: &Argument) {
        let Block(block) = &mut self.blocks[place / BLOCK_WORDS];
        match argument {
            Argument::TensorMap(map) => *block = map.opaque,
            _ => block[place % BLOCK_WORDS] = word(argument),
        }
    }

    /// Replaces an argument by another of the same type.
    pub fn set(&mut self, index: usize, argument: impl Into<Argument>) -> Result<()> {
        let argument = argument.into();
        let mismatch = |reason| Error::Signature { function: "(arguments)".to_owned(), reason };
        let (Some(&parameter), Some(&place)) = (self.kinds.get(index), self.places.get(index))
        else {
            let reason = format!("there is no argument {index} among {}", self.kinds.len());
            return Err(mismatch(reason));
        };
        if parameter != argument.parameter() {
            let reason =
                format!("argument {index} is of kind {parameter}, not {}", argument.parameter());
            return Err(mismatch(reason));
        }
        self.write(place, &argument);
        Ok(())
    }

    /// Returns an error unless the arguments match the parameters.
    fn check(&self, name: &str, parameters: &[Parameter]) -> Result<()> {
        // Not ended at the first misfit, which there hardly ever is, so that many are compared at once.
        let fits = |fits, (given, taken): (&Parameter, &Parameter)| fits & taken.takes(*given);
        if self.kinds.len() == parameters.len()
            && self.kinds.len() <= MAX_ARGUMENTS
            && self.kinds.iter().zip(parameters).fold(true, fits)
        {
            return Ok(());
        }
        Err(Error::Signature { function: name.to_owned(), reason: self.misfit(parameters) })
    }

    /// Says why the arguments do not match the parameters.
    #[cold]
    fn misfit(&self, parameters: &[Parameter]) -> String {
        if self.kinds.len() != parameters.len() {
            let (given, taken) = (self.kinds.len(), parameters.len());
            return format!("it takes {taken} arguments, and {given} were given");
        }
        let mut all = self.kinds.iter().zip(parameters).enumerate();
        match all.find(|(_, (given, taken))| !taken.takes(**given)) {
            Some((index, (given, taken))) => {
                format!("argument {index} must be of kind {taken}, and is of kind {given}")
            }
            None => format!("more than {MAX_ARGUMENTS} arguments"),
        }
    }

    /// Writes a pointer to each argument, which is valid while `self` is borrowed; the driver only
    /// reads through it.
    fn point(&self, pointers: &mut [*mut c_void; MAX_ARGUMENTS]) {
        let words: *const u64 = self.blocks.as_ptr().cast();
        for (pointer, place) in pointers.iter_mut().zip(&self.places) {
            *pointer = words.wrapping_add(*place).cast_mut().cast();
        }
    }
}

/// Returns pointers to zeros, for further parameters that a kernel may have.
fn nothing() -> [*mut c_void; MAX_ARGUMENTS] {
    let nothing: *const Nothing = &NOTHING;
    [nothing.cast_mut().cast(); MAX_ARGUMENTS]
}

/// Zeros for parameters that were not declared: as large as all parameters of a kernel may be.
#[repr(align(128))]
struct Nothing(#[allow(dead_code)] [u8; MAX_PARAMETER_BYTES]); // read by the driver

static NOTHING: Nothing = Nothing([0; MAX_PARAMETER_BYTES]);

/// Returns an argument other than a tensor map, in the first bytes of a word.
fn word(argument: &Argument) -> u64 {
    let low = |[a, b, c, d]: [u8; 4]| u64::from_ne_bytes([a, b, c, d, 0, 0, 0, 0]);
    match argument {
        Argument::U32(value) => low(value.to_ne_bytes()),
        Argument::I32(value) => low(value.to_ne_bytes()),
        Argument::F32(value) => low(value.to_ne_bytes()),
        Argument::U64(value) => *value,
        Argument::Address(value) => value.0,
        Argument::TensorMap(_) => 0,
    }
}

/// The dimensions of a launch.
///
/// ```
/// let launch = flashcore_cuda::Launch {
///     grid: [132, 1, 1],
///     block: [384, 1, 1],
///     cluster: [2, 1, 1],
///     shared_bytes: 200 << 10,
///     ..flashcore_cuda::Launch::default()
/// };
/// assert!(!launch.programmatic);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Launch {
    /// Number of blocks in the grid.
    pub grid: [u32; 3],
    /// Number of threads per block.
    pub block: [u32; 3],
    /// Number of blocks per cluster; all ones without clusters.
    pub cluster: [u32; 3],
    /// Dynamic shared memory per block in bytes.
    pub shared_bytes: u32,
    /// Whether the kernel may begin before the previous kernel on the stream has ended
    /// (programmatic dependent launch). It must then execute `griddepcontrol.wait` before it reads
    /// what that kernel writes.
    pub programmatic: bool,
}

impl Default for Launch {
    /// One block of one thread.
    fn default() -> Launch {
        Launch {
            grid: [1; 3],
            block: [1; 3],
            cluster: [1; 3],
            shared_bytes: 0,
            programmatic: false,
        }
    }
}

/// The most blocks of a cluster that every device with clusters supports.
const MAX_CLUSTER_BLOCKS: u32 = 8;

/// The limits of a function and its device.
struct Limits {
    threads: u32,
    shared_bytes: u32,
    has_clusters: bool,
}

impl Launch {
    /// Returns which limit the launch exceeds, if any.
    fn check(&self, limits: &Limits) -> Result<(), String> {
        let [grid, block, cluster] = [self.grid, self.block, self.cluster];
        if [grid, block, cluster].as_flattened().contains(&0) {
            return Err(format!("grid {grid:?}, block {block:?} or cluster {cluster:?} is empty"));
        }
        if grid[0] > i32::MAX as u32 || grid[1] > 65535 || grid[2] > 65535 {
            return Err(format!("grid {grid:?} exceeds [2147483647, 65535, 65535]"));
        }
        let product = |extent: [u32; 3]| -> u64 { extent.iter().map(|&n| u64::from(n)).product() };
        // The product of three 32-bit factors can overflow 64 bits, so each factor is checked
        // first.
        let threads = limits.threads;
        if block.iter().any(|&n| n > 1024) || product(block) > threads.into() {
            return Err(format!("block {block:?} has more than the {threads} threads it may have"));
        }
        if block[2] > 64 {
            return Err(format!("block {block:?} exceeds [1024, 1024, 64]"));
        }
        let limit = limits.shared_bytes;
        if self.shared_bytes > limit {
            let asked = self.shared_bytes;
            return Err(format!(
                "{asked} bytes of dynamic shared memory, where {limit} are set (`set_dynamic_shared`)"
            ));
        }
        if cluster == [1; 3] {
            return Ok(());
        }
        if !limits.has_clusters {
            return Err("clusters need a device of compute capability 9.0".to_owned());
        }
        let blocks = MAX_CLUSTER_BLOCKS;
        if cluster.iter().any(|&n| n > blocks) || product(cluster) > blocks.into() {
            return Err(format!("cluster {cluster:?} has more than {blocks} blocks"));
        }
        if grid.iter().zip(cluster).any(|(grid, cluster)| !grid.is_multiple_of(cluster)) {
            return Err(format!("grid {grid:?} is not a multiple of cluster {cluster:?}"));
        }
        Ok(())
    }

    /// Returns the launch attributes, and how many of them are set.
    fn attributes(&self) -> ([sys::CUlaunchAttribute; 2], usize) {
        let none = sys::CUlaunchAttribute {
            id: AttributeId::CU_LAUNCH_ATTRIBUTE_IGNORE,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { pad: [0; 64] },
        };
        let mut attributes = [none; 2];
        let mut count = 0;
        if self.cluster != [1; 3] {
            let [x, y, z] = self.cluster;
            attributes[count].id = AttributeId::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[count].value.clusterDim =
                sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
            count += 1;
        }
        if self.programmatic {
            attributes[count].id =
                AttributeId::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count].value.programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        (attributes, count)
    }

    /// Returns the driver's configuration, which points to the attributes.
    fn configuration(
        &self,
        stream: sys::CUstream,
        attributes: &mut [sys::CUlaunchAttribute],
    ) -> sys::CUlaunchConfig {
        sys::CUlaunchConfig {
            gridDimX: self.grid[0],
            gridDimY: self.grid[1],
            gridDimZ: self.grid[2],
            blockDimX: self.block[0],
            blockDimY: self.block[1],
            blockDimZ: self.block[2],
            sharedMemBytes: self.shared_bytes,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        }
    }
}

impl Function {
    /// Enqueues the kernel on a stream. Neither waits nor allocates.
    ///
    /// The dimensions are checked against the limits of kernel and device, and the arguments
    /// against the parameters. The caller is responsible for the addresses among them: a kernel
    /// that accesses an invalid one is reported when the stream is next synchronized.
    pub fn launch(&self, stream: &Stream, launch: &Launch, arguments: &Arguments) -> Result<()> {
        let shared = &*self.shared;
        self.device().expect_same(stream.device(), "the stream")?;
        launch.check(&self.limits()).map_err(|reason| self.launch_error(reason))?;
        arguments.check(&shared.name, &shared.parameters)?;
        let mut pointers = nothing();
        arguments.point(&mut pointers);
        let _bound = self.device().bind()?;
        let (mut attributes, count) = launch.attributes();
        if count == 0 {
            let ([x, y, z], [i, j, k]) = (launch.grid, launch.block);
            // SAFETY: function and stream are alive and of one context. There
            // is a pointer for every parameter, to a value of its size.
            let result = unsafe {
                sys::cuLaunchKernel(
                    shared.handle,
                    x,
                    y,
                    z,
                    i,
                    j,
                    k,
                    launch.shared_bytes,
                    stream.raw(),
                    pointers.as_mut_ptr(),
                    null_mut(),
                )
            };
            check("cuLaunchKernel", result)
        } else {
            let configuration = launch.configuration(stream.raw(), &mut attributes[..count]);
            // SAFETY: as above, and the attributes outlive the call.
            let result = unsafe {
                sys::cuLaunchKernelEx(
                    &configuration,
                    shared.handle,
                    pointers.as_mut_ptr(),
                    null_mut(),
                )
            };
            check("cuLaunchKernelEx", result)
        }
    }

    fn limits(&self) -> Limits {
        Limits {
            threads: self.shared.attributes.max_threads_per_block,
            shared_bytes: self.shared.dynamic_shared.load(Ordering::Relaxed),
            has_clusters: self.device().info().compute_capability.major >= 9,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { threads: 384, shared_bytes: 48 << 10, has_clusters: true };

    fn refused(launch: Launch, expected: &str) {
        let reason = launch.check(&LIMITS).unwrap_err();
        assert!(reason.contains(expected), "{reason}");
    }

    #[test]
    fn launches_stay_within_limits() {
        let right = Launch {
            grid: [132, 2, 1],
            block: [128, 3, 1],
            cluster: [2, 2, 1],
            shared_bytes: 48 << 10,
            programmatic: true,
        };
        assert_eq!(right.check(&LIMITS), Ok(()));
        assert_eq!(Launch::default().check(&LIMITS), Ok(()));
        refused(Launch { grid: [0, 1, 1], ..right }, "empty");
        refused(Launch { block: [1, 0, 1], ..right }, "empty");
        refused(Launch { cluster: [1, 1, 0], ..right }, "empty");
        refused(Launch { grid: [1, 65536, 1], ..right }, "exceeds");
        refused(Launch { grid: [u32::MAX, 1, 1], ..right }, "exceeds");
        refused(Launch { block: [385, 1, 1], ..right }, "384 threads");
        refused(Launch { block: [u32::MAX; 3], ..right }, "384 threads");
        refused(Launch { block: [1, 1, 65], ..right }, "exceeds");
        refused(Launch { shared_bytes: 49153, ..right }, "set_dynamic_shared");
        refused(Launch { cluster: [4, 4, 1], ..right }, "more than 8 blocks");
        refused(Launch { cluster: [u32::MAX; 3], ..right }, "more than 8 blocks");
        refused(Launch { cluster: [5, 1, 1], ..right }, "not a multiple");
        let ampere = Limits { has_clusters: false, ..LIMITS };
        assert!(right.check(&ampere).unwrap_err().contains("9.0"));
    }

    #[test]
    fn attributes_are_those_that_were_asked_for() {
        assert_eq!(Launch::default().attributes().1, 0);
        let launch = Launch { cluster: [2, 1, 1], programmatic: true, ..Launch::default() };
        let (attributes, count) = launch.attributes();
        assert_eq!(count, 2);
        assert_eq!(attributes[0].id, AttributeId::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
        // SAFETY: this field was written just now.
        let cluster = unsafe { attributes[0].value.clusterDim };
        assert_eq!([cluster.x, cluster.y, cluster.z], [2, 1, 1]);
        assert_eq!(
            attributes[1].id,
            AttributeId::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        );
    }

    #[test]
    fn arguments_must_be_what_the_parameters_take() {
        use Parameter::{Address, F32, I32, U32, U64};
        let mut arguments = Arguments::new();
        arguments.push(DeviceAddress(16)).push(7u32).push(-7i32).push(0.5f32).push(9u64);
        assert!(arguments.check("k", &[Address, U32, I32, F32, U64]).is_ok());
        assert!(arguments.check("k", &[U64, U32, I32, F32, U64]).is_ok());
        let error = arguments.check("k", &[Address, U32, I32, F32]).unwrap_err();
        assert_eq!(error.to_string(), "kernel `k`: it takes 4 arguments, and 5 were given");
        let error = arguments.check("k", &[Address, F32, I32, F32, U64]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "kernel `k`: argument 1 must be of kind f32, and is of kind u32"
        );
        assert!(arguments.check("k", &[Address, U32, I32, F32, Address]).is_err());
        let mut many = Arguments::new();
        for value in 0..=MAX_ARGUMENTS as u32 {
            many.push(value);
        }
        assert!(many.check("k", &[U32; MAX_ARGUMENTS + 1]).is_err());
    }

    fn pointers(arguments: &Arguments) -> [*mut c_void; MAX_ARGUMENTS] {
        let mut pointers = nothing();
        arguments.point(&mut pointers);
        pointers
    }

    #[test]
    fn pointers_lead_to_the_values() {
        let mut arguments = Arguments::new();
        arguments.push(0x0102_0304u32).push(-1i64 as u64).push(1.5f32);
        arguments.set(0, 5u32).unwrap();
        let moved = arguments;
        let pointers = pointers(&moved);
        // SAFETY: each points to a live, aligned value of at least that size.
        unsafe {
            assert_eq!(pointers[0].cast::<u32>().read(), 5);
            assert_eq!(pointers[1].cast::<u64>().read(), u64::MAX);
            assert_eq!(pointers[2].cast::<f32>().read(), 1.5);
        }
        // Parameters beyond the arguments read zeros.
        let zeros: *const Nothing = &NOTHING;
        assert!(pointers[3..].iter().all(|pointer| pointer.cast_const() == zeros.cast()));
    }

    #[test]
    fn clearing_keeps_the_room() {
        let mut arguments = Arguments::new();
        arguments.push(1u32).push(2u32);
        let room = arguments.blocks.capacity();
        arguments.clear();
        assert!(arguments.is_empty());
        assert_eq!(arguments.blocks.capacity(), room);
        arguments.push(3u32);
        // SAFETY: points to a live, aligned number.
        assert_eq!(unsafe { pointers(&arguments)[0].cast::<u32>().read() }, 3);
    }

    #[test]
    fn tensor_maps_and_numbers_do_not_overlap() {
        let map = |word: u64| TensorMap { opaque: [word; 16] };
        let mut arguments = Arguments::new();
        for index in 0..20 {
            arguments.push(index as u32);
            if index % 3 == 0 {
                arguments.push(map(100 + index));
            }
        }
        arguments.set(1, map(7)).unwrap();
        arguments.set(2, 8u32).unwrap();
        let (pointers, mut at) = (pointers(&arguments), 0);
        for index in 0..20 {
            let expected = if index == 1 { 8 } else { index as u32 };
            // SAFETY: each points to a live, aligned value of at least that size.
            assert_eq!(unsafe { pointers[at].cast::<u32>().read() }, expected);
            at += 1;
            if index % 3 == 0 {
                assert!(pointers[at].cast::<TensorMap>().is_aligned());
                let expected = map(if index == 0 { 7 } else { 100 + index });
                // SAFETY: as above.
                assert!(unsafe { pointers[at].cast::<TensorMap>().read() } == expected);
                at += 1;
            }
        }
        assert_eq!(at, arguments.len());
    }

    #[test]
    fn arguments_cross_threads() {
        fn crosses<T: Send + Sync + Clone>() {}
        crosses::<Arguments>();
    }
}
