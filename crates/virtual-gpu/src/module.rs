//! Modules: PTX texts, each with one kernel.

use ptx::{Parameter, ParameterKind, Program, Type};

use crate::error::{Error, Result, explain};
use crate::gpu::{Gpu, Handle};

/// A kernel, and the limits that were set for its launches.
pub(crate) struct Kernel {
    pub(crate) program: Program,
    pub(crate) dynamic_shared: u32,
    pub(crate) large_clusters: bool,
}

/// Numbers of `CUfunction_attribute`.
mod attribute {
    pub(super) const MAX_THREADS_PER_BLOCK: u32 = 0;
    pub(super) const REGISTERS: u32 = 4;
    pub(super) const PTX_VERSION: u32 = 5;
    pub(super) const BINARY_VERSION: u32 = 6;
    pub(super) const MAX_DYNAMIC_SHARED_SIZE_BYTES: u32 = 8;
    pub(super) const NON_PORTABLE_CLUSTER_SIZE_ALLOWED: u32 = 14;
    pub(super) const LAST: u32 = 15;
}

/// Dynamic shared memory that needs no permission.
const SHARED_BYTES: u32 = 48 << 10;

impl Gpu {
    /// Loads a PTX text. The handle of its kernel is that of the module.
    pub(crate) fn load(&mut self, text: &str) -> Result<Handle> {
        self.unsafe_call()?;
        let program = program(text).map_err(|reason| explain(Error::InvalidPtx, reason))?;
        let (wanted, target) = (program.target, self.options.target);
        let runs = if wanted.specific {
            wanted == target
        } else {
            wanted.architecture <= target.architecture
        };
        if !runs {
            let reason = format!("PTX for {wanted} on a device with {target}");
            return Err(explain(Error::NoBinaryForGpu, reason));
        }
        let handle = self.handle();
        let kernel = Kernel { program, dynamic_shared: SHARED_BYTES, large_clusters: false };
        self.kernels.insert(handle, kernel);
        Ok(handle)
    }

    pub(crate) fn kernel(&mut self, handle: Handle) -> Result<&mut Kernel> {
        self.kernels.get_mut(&handle).ok_or(Error::InvalidHandle)
    }
}

impl Kernel {
    /// Returns an attribute of the kernel. Its registers are as many as its threads can have, since
    /// no compiler says how many it needs.
    pub(crate) fn attribute(&self, number: u32) -> Result<i32> {
        let (program, version) = (&self.program, self.program.version());
        let value = match number {
            attribute::MAX_THREADS_PER_BLOCK => program.threads,
            attribute::REGISTERS => program.registers_at_entry(),
            attribute::PTX_VERSION => u32::from(version.major) * 10 + u32::from(version.minor),
            attribute::BINARY_VERSION => program.target.architecture,
            attribute::MAX_DYNAMIC_SHARED_SIZE_BYTES => self.dynamic_shared,
            attribute::NON_PORTABLE_CLUSTER_SIZE_ALLOWED => self.large_clusters.into(),
            // Shared, constant and local memory, caches and the like: none.
            number if number <= attribute::LAST => 0,
            _ => return Err(Error::InvalidValue),
        };
        Ok(value as i32)
    }

    pub(crate) fn set(&mut self, number: u32, value: i32) -> Result {
        match number {
            attribute::MAX_DYNAMIC_SHARED_SIZE_BYTES => {
                let limit = self.program.target.shared_memory_limit();
                let bytes = u32::try_from(value).map_err(|_| Error::InvalidValue)?;
                if bytes > limit {
                    let reason = format!("{bytes} bytes of shared memory for a block of {limit}");
                    return Err(explain(Error::InvalidValue, reason));
                }
                self.dynamic_shared = bytes;
            }
            attribute::NON_PORTABLE_CLUSTER_SIZE_ALLOWED => self.large_clusters = value != 0,
            number if number <= attribute::LAST => {}
            _ => return Err(Error::InvalidValue),
        }
        Ok(())
    }

    /// Returns the offset and the size of a parameter among all of them.
    pub(crate) fn parameter(&self, index: usize) -> Result<(usize, usize)> {
        let mut end = 0usize;
        for (at, parameter) in self.program.parameters.iter().enumerate() {
            let (bytes, alignment) = layout(parameter);
            let offset = end.next_multiple_of(alignment);
            if at == index {
                return Ok((offset, bytes));
            }
            end = offset + bytes;
        }
        Err(Error::InvalidValue)
    }
}

/// Returns the size and the alignment of a parameter.
fn layout(parameter: &Parameter) -> (usize, usize) {
    match parameter.kind {
        ParameterKind::Scalar(Type::U64 | Type::S64) | ParameterKind::Address => (8, 8),
        ParameterKind::Scalar(_) => (4, 4),
        ParameterKind::TensorMap(_) => (128, 64),
    }
}

/// Returns the program of a PTX text.
fn program(text: &str) -> std::result::Result<Program, String> {
    ptx::parse(text).map_err(|error| format!("PTX that FlashCore did not print, {error}"))
}
