//! Room for a result between guard zones.

use cuda::{Buffer, DeviceAddress, Plain};

use super::{Gpu, GpuError};

/// Device memory for a result. Its contents and the guard zones on both sides
/// are poisoned: an element that a kernel forgets to write is NaN in every
/// float format, and a write beyond the result shows.
#[derive(Debug)]
pub(crate) struct Room {
    buffer: Buffer,
    bytes: u64,
}

/// Bytes on each side that no kernel may touch: more than a tile's row.
const GUARD: u64 = 4096;

const POISON: u8 = 0xFF;

impl Room {
    pub(crate) fn new(gpu: &Gpu, bytes: usize) -> Result<Self, GpuError> {
        let bytes = bytes as u64;
        let buffer = Buffer::new(gpu.device(), bytes + 2 * GUARD)?;
        gpu.stream().fill(buffer.all(), POISON)?;
        Ok(Room { buffer, bytes })
    }

    /// Room that holds something already, between the same guard zones.
    pub(crate) fn of(gpu: &Gpu, bytes: &[u8]) -> Result<Self, GpuError> {
        let room = Room::new(gpu, bytes.len())?;
        gpu.stream().upload(bytes, room.buffer.slice(GUARD..GUARD + room.bytes)?)?;
        Ok(room)
    }

    /// Where the result goes; a multiple of 256.
    pub(crate) fn address(&self) -> DeviceAddress {
        self.buffer.address().offset(GUARD)
    }

    /// Copies the result.
    pub(crate) fn read<T: Plain>(&self, gpu: &Gpu, values: &mut [T]) -> Result<(), GpuError> {
        let result = self.buffer.slice(GUARD..GUARD + self.bytes)?;
        Ok(gpu.stream().download(result, values)?)
    }

    /// Whether both guard zones are as they were.
    pub(crate) fn is_intact(&self, gpu: &Gpu) -> Result<bool, GpuError> {
        let end = GUARD + self.bytes;
        for zone in [0..GUARD, end..end + GUARD] {
            let bytes = gpu.stream().download_vec::<u8>(self.buffer.slice(zone)?)?;
            if bytes.iter().any(|byte| *byte != POISON) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
