//! Device memory for a result between guard zones, for checks.

use cuda::{Buffer, DeviceAddress, Plain};

use super::{Gpu, GpuError};

/// Device memory for a result. Contents and the guard zones on both sides are poisoned with NaN
/// bytes: an element that a kernel forgets to write is NaN in every float format, and a write
/// outside of the result is detected.
#[derive(Debug)]
pub struct GuardedBuffer {
    buffer: Buffer,
    bytes: u64,
}

/// Size of the guard zone on each side in bytes: more than a row of a tile.
const GUARD: u64 = 4096;

const POISON: u8 = 0xFF;

impl GuardedBuffer {
    /// Allocates memory for a result of `bytes` bytes, poisoned throughout.
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<Self, GpuError> {
        let bytes = bytes as u64;
        let buffer = Buffer::new(gpu.device(), bytes + 2 * GUARD)?;
        gpu.stream().fill(buffer.all(), POISON)?;
        Ok(GuardedBuffer { buffer, bytes })
    }

    /// Allocates memory that holds `bytes`, between the same guard zones.
    pub fn of(gpu: &Gpu, bytes: &[u8]) -> Result<Self, GpuError> {
        let guarded = GuardedBuffer::new(gpu, bytes.len())?;
        gpu.stream().upload(bytes, guarded.buffer.slice(GUARD..GUARD + guarded.bytes)?)?;
        Ok(guarded)
    }

    /// Returns the address of the result, a multiple of 256.
    pub fn address(&self) -> DeviceAddress {
        self.buffer.address().offset(GUARD)
    }

    /// Copies the result to the host.
    pub fn read<T: Plain>(&self, gpu: &Gpu, values: &mut [T]) -> Result<(), GpuError> {
        let result = self.buffer.slice(GUARD..GUARD + self.bytes)?;
        Ok(gpu.stream().download(result, values)?)
    }

    /// Tells whether both guard zones are untouched.
    pub fn is_intact(&self, gpu: &Gpu) -> Result<bool, GpuError> {
        let end = GUARD + self.bytes;
        for zone in [0..GUARD, end..end + GUARD] {
            let bytes = gpu.stream().download_vec::<u8>(self.buffer.slice(zone)?)?;
            if bytes.iter().any(|byte| *byte != POISON) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns an error that names the result if a guard zone was written to.
    pub fn look_for_trespasses(&self, gpu: &Gpu, name: &str) -> Result<(), GpuError> {
        match self.is_intact(gpu)? {
            true => Ok(()),
            false => Err(GpuError::Trespass { place: format!("beside the {name}") }),
        }
    }
}
