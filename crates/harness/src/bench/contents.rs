//! Fresh contents for device tensors, without a copy from the host for each.

use cuda::{Buffer, DeviceSlice};
use flashcore::DType;
use flashcore::gpu::Gpu;

use crate::Error;
use crate::statistics::Random;
use crate::verify;

/// Normal numbers on the device. Tensors are put together from pieces that begin at random
/// places in it: no two fillings are alike, and none costs more than a copy.
#[derive(Debug)]
pub struct Pool {
    dtype: DType,
    buffer: Buffer,
    random: Random,
}

/// Numbers in the pool; pieces are half as long.
const NUMBERS: usize = 1 << 22;

impl Pool {
    /// A pool of an element type.
    pub fn new(gpu: &Gpu, dtype: DType, seed: u64) -> Result<Self, Error> {
        let bytes = verify::normal(dtype, NUMBERS, seed)?;
        let buffer = Buffer::from_slice(gpu.stream(), &bytes)?;
        Ok(Pool { dtype, buffer, random: Random::new(seed) })
    }

    /// The element type of its numbers.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Fills a tensor, in the order of the GPU's stream.
    pub fn fill(&mut self, gpu: &Gpu, tensor: DeviceSlice<'_>) -> Result<(), Error> {
        let piece = self.buffer.bytes() / 2;
        let mut done = 0;
        while done < tensor.bytes() {
            let length = piece.min(tensor.bytes() - done);
            // Starts on a multiple of 16 elements keep elements whole.
            let step = 16 * self.dtype.bytes() as u64;
            let start = self.random.below((piece / step) as usize) as u64 * step;
            let from = self.buffer.slice(start..start + length)?;
            gpu.stream().copy(from, tensor.slice(done..done + length)?)?;
            done += length;
        }
        Ok(())
    }
}
