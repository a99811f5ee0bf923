//! Fresh contents for device tensors, without a copy from the host each time.

use cuda::{Buffer, DeviceSlice};
use flashcore::DType;
use flashcore::gpu::Gpu;

use crate::Error;
use crate::statistics::Random;
use crate::verify;

/// A pool of normal numbers on the device. Tensors are filled with pieces that begin at random
/// offsets in it: no two fillings are alike, and none costs more than a copy.
#[derive(Debug)]
pub struct Pool {
    /// One buffer for each element type used so far.
    buffers: Vec<(DType, Buffer)>,
    seed: u64,
    random: Random,
}

/// The numbers of each element type in the pool; pieces are half as long.
const NUMBERS: usize = 1 << 22;

impl Pool {
    /// Returns an empty pool.
    pub fn new(seed: u64) -> Self {
        Pool { buffers: Vec::new(), seed, random: Random::new(seed) }
    }

    /// Returns the index of an element type's buffer, making it if needed.
    fn place(&mut self, gpu: &Gpu, dtype: DType) -> Result<usize, Error> {
        if let Some(place) = self.buffers.iter().position(|(it, _)| *it == dtype) {
            return Ok(place);
        }
        let bytes = verify::normal(dtype, NUMBERS, self.seed)?;
        self.buffers.push((dtype, Buffer::from_slice(gpu.stream(), &bytes)?));
        Ok(self.buffers.len() - 1)
    }

    /// Fills a tensor, in the order of the GPU's stream.
    pub fn fill(&mut self, gpu: &Gpu, dtype: DType, tensor: DeviceSlice<'_>) -> Result<(), Error> {
        let place = self.place(gpu, dtype)?;
        let buffer = &self.buffers[place].1;
        let piece = buffer.bytes() / 2;
        let mut done = 0;
        while done < tensor.bytes() {
            let length = piece.min(tensor.bytes() - done);
            // Starts on a multiple of 16 elements keep elements whole.
            let step = 16 * dtype.bytes() as u64;
            let start = self.random.below((piece / step) as usize) as u64 * step;
            let from = buffer.slice(start..start + length)?;
            gpu.stream().copy(from, tensor.slice(done..done + length)?)?;
            done += length;
        }
        Ok(())
    }
}
