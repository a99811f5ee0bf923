//! Launches: checked against the kernel, and run in the simulator.

use std::borrow::Cow;
use std::ffi::c_void;

use ptx::{ParameterKind, Program, Type};
use sim::{Argument, Failure};

use crate::error::{Error, Result, explain};
use crate::gpu::{Gpu, Handle};
use crate::module::Kernel;
use crate::tensor_map;

/// Steps that a launch may take before it counts as one that never ends.
const STEP_LIMIT: u64 = 20_000_000_000;

/// The dimensions of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dimensions {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) cluster: Option<[u32; 3]>,
    pub(crate) shared_bytes: u32,
}

/// A launch, ready to be run, once or from a graph.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    kernel: Handle,
    grid: u32,
    cluster: u32,
    /// The number of clusters that the device holds at a time.
    resident: u32,
    arguments: Vec<Argument>,
}

impl Gpu {
    /// Checks a launch and copies its arguments.
    ///
    /// # Safety
    /// There must be a pointer for each of the kernel's parameters, to a value of its size.
    pub(crate) unsafe fn prepare(
        &mut self,
        handle: Handle,
        dimensions: &Dimensions,
        pointers: *const *const c_void,
    ) -> Result<Launch> {
        let cluster = self.kernel(handle)?.check(dimensions)?;
        let resident = self.resident_clusters(handle, dimensions)?;
        if resident == 0 {
            let reason = format!("the device does not hold one cluster of {dimensions:?}");
            return Err(explain(Error::InvalidClusterSize, reason));
        }
        let program = &self.kernel(handle)?.program;
        // SAFETY: the caller's promise.
        let arguments = unsafe { arguments(program, pointers) }?;
        Ok(Launch { kernel: handle, grid: dimensions.grid[0], cluster, resident, arguments })
    }

    /// Runs a launch. After a failure every call fails, as on a GPU.
    pub(crate) fn run(&mut self, launch: &Launch) -> Result {
        let kernel = self.kernels.get(&launch.kernel).ok_or(Error::InvalidHandle)?;
        let mut program = Cow::Borrowed(&*kernel.program);
        // PTX does not say with which box a map is encoded, nor, for some kernels, in which
        // clusters a grid is launched.
        for (index, argument) in launch.arguments.iter().enumerate() {
            if let Argument::TensorMap(map) = argument {
                let kind = ParameterKind::TensorMap(map.tensor_box.clone());
                program.to_mut().parameters[index].kind = kind;
            }
        }
        if program.cluster != launch.cluster {
            program.to_mut().cluster = launch.cluster;
        }
        let options = sim::Options {
            policy: self.options.policy,
            seed: self.options.seed.wrapping_add(self.launches),
            mode: self.options.mode,
            resident: launch.resident,
            step_limit: STEP_LIMIT,
            ..sim::Options::default()
        };
        self.launches += 1;
        let (program, arguments) = (&*program, launch.arguments.clone());
        let run = sim::Launch { program, grid: launch.grid, arguments };
        let result = sim::run(&run, &mut self.memory, &options);
        result.map(drop).map_err(|failure| {
            self.failed = true;
            let (name, number) = (&kernel.program.name, self.launches);
            let text = kernel.describe(failure);
            explain(Error::LaunchFailed, format!("launch {number}, {name}: {text}"))
        })
    }

    // ---- occupancy ------------------------------------------------------------

    /// Returns how many blocks of a kernel a multiprocessor holds at a time.
    pub(crate) fn resident_blocks(
        &mut self,
        kernel: Handle,
        threads: u32,
        shared: u32,
    ) -> Result<u32> {
        let shared_bytes = self.shared_bytes_per_multiprocessor();
        let reserved = shared_bytes - self.options.target.shared_memory_limit();
        let threads_limit = self.threads_per_multiprocessor();
        let kernel = self.kernel(kernel)?;
        if threads == 0 || threads > kernel.program.threads {
            return Ok(0);
        }
        let registers = kernel.registers().next_multiple_of(8) * threads;
        let fits = [
            threads_limit / threads,
            ptx::MULTIPROCESSOR_REGISTERS / registers,
            shared_bytes.checked_div(shared + reserved).unwrap_or(u32::MAX),
        ];
        // No multiprocessor holds more than 32 blocks.
        Ok(fits.into_iter().fold(32, u32::min))
    }

    /// Returns how many clusters of a launch the device holds at a time. The blocks of a cluster
    /// may be on any of its multiprocessors.
    pub(crate) fn resident_clusters(&mut self, handle: Handle, launch: &Dimensions) -> Result<u32> {
        let cluster = self.kernel(handle)?.check(launch)?;
        let blocks = self.resident_blocks(handle, launch.block[0], launch.shared_bytes)?;
        Ok(blocks * self.options.multiprocessors / cluster)
    }
}

impl Kernel {
    /// Returns the text of a failure, with statements of the program for lines of its source.
    fn describe(&self, failure: Failure) -> String {
        let Failure::Hazard(mut hazard) = failure else { return failure.to_string() };
        let mut lines = Vec::new();
        for place in [hazard.place.take(), hazard.other.take()].into_iter().flatten() {
            lines.extend(self.statement(place).map(|text| format!("\n  at {text}")));
        }
        let actor = hazard.actor.map(|actor| format!("\n  in {actor}")).unwrap_or_default();
        let (text, policy, seed) = (hazard.describe(), hazard.policy, hazard.seed);
        format!("{text}{actor}{}\n  with policy={policy},seed={seed}", lines.concat())
    }

    /// Checks the dimensions of a launch; returns the number of blocks in a cluster.
    fn check(&self, launch: &Dimensions) -> Result<u32> {
        let Program { name, threads, cluster: compiled, .. } = &*self.program;
        let wrong = |error, reason: String| Err(explain(error, format!("{name}: {reason}")));
        let Dimensions { grid, block, cluster, shared_bytes } = *launch;
        if grid[1..] != [1, 1] || block[1..] != [1, 1] || grid[0] == 0 {
            return wrong(Error::InvalidValue, format!("grid {grid:?} of blocks {block:?}"));
        }
        if block[0] > *threads {
            let reason = format!("{} threads, it has .maxntid {threads}", block[0]);
            return wrong(Error::InvalidValue, reason);
        }
        if block[0] != *threads {
            let reason = format!("blocks of {} threads instead of {threads}", block[0]);
            return wrong(Error::NotSupported, reason);
        }
        if shared_bytes > self.dynamic_shared {
            let reason = format!("{shared_bytes} bytes of shared memory without permission");
            return wrong(Error::InvalidValue, reason);
        }
        if shared_bytes < self.program.shared_bytes() {
            let wanted = self.program.shared_bytes();
            let reason = format!("{shared_bytes} bytes of shared memory, it uses {wanted}");
            return wrong(Error::InvalidValue, reason);
        }
        let [size, rest @ ..] = cluster.unwrap_or([*compiled, 1, 1]);
        let differs = *compiled > 1 && size != *compiled;
        if rest != [1, 1] || !(1..=8).contains(&size) || differs {
            let reason = format!("clusters {cluster:?}, it is compiled for {compiled}");
            return wrong(Error::InvalidClusterSize, reason);
        }
        if !grid[0].is_multiple_of(size) {
            return wrong(Error::InvalidValue, format!("grid {grid:?} in clusters of {size}"));
        }
        Ok(size)
    }
}

/// Copies the arguments of a launch.
///
/// # Safety
/// As for [`Gpu::prepare`].
unsafe fn arguments(program: &Program, pointers: *const *const c_void) -> Result<Vec<Argument>> {
    if pointers.is_null() && !program.parameters.is_empty() {
        return Err(Error::InvalidValue);
    }
    let mut arguments = Vec::new();
    for (index, parameter) in program.parameters.iter().enumerate() {
        // SAFETY: there is a pointer for each parameter.
        let pointer = unsafe { *pointers.add(index) };
        if pointer.is_null() {
            return Err(explain(Error::InvalidValue, format!("argument {index} is null")));
        }
        // SAFETY: it points to a value of the parameter's size.
        arguments.push(unsafe { argument(&parameter.kind, pointer) }?);
    }
    Ok(arguments)
}

/// # Safety
/// The pointer must point to a value of the parameter's size.
unsafe fn argument(kind: &ParameterKind, pointer: *const c_void) -> Result<Argument> {
    // SAFETY: the caller's promise, as each type is as large as its parameter.
    unsafe {
        Ok(match kind {
            ParameterKind::Scalar(Type::S32) => Argument::S32(read(pointer)),
            ParameterKind::Scalar(Type::F32) => Argument::F32(read(pointer)),
            ParameterKind::Scalar(Type::S64) => Argument::S64(read(pointer)),
            ParameterKind::Scalar(Type::U64) | ParameterKind::Address => {
                Argument::U64(read(pointer))
            }
            ParameterKind::Scalar(_) => Argument::U32(read(pointer)),
            ParameterKind::TensorMap(_) => Argument::TensorMap(tensor_map::decode(&read(pointer))?),
        })
    }
}

/// # Safety
/// The pointer must point to a value of this type; a caller need not have aligned it.
unsafe fn read<T: Copy>(pointer: *const c_void) -> T {
    // SAFETY: the caller's promise.
    unsafe { pointer.cast::<T>().read_unaligned() }
}
