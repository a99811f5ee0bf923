//! Lists of numbers on the device.

use cuda::{Buffer, DeviceAddress};

use super::{Gpu, GpuError};

/// Lists that were copied to the device, and stay there as long as this.
#[derive(Debug)]
pub(crate) struct Lists<'a> {
    gpu: &'a Gpu,
    buffers: Vec<Buffer>,
}

impl<'a> Lists<'a> {
    pub(crate) fn new(gpu: &'a Gpu) -> Self {
        Lists { gpu, buffers: Vec::new() }
    }

    /// Whole numbers, of 32 bits each.
    pub(crate) fn numbers(&mut self, values: &[usize]) -> Result<DeviceAddress, GpuError> {
        let words: Vec<u8> =
            values.iter().flat_map(|value| (*value as u32).to_le_bytes()).collect();
        self.bytes(&words)
    }

    pub(crate) fn floats(&mut self, values: &[f32]) -> Result<DeviceAddress, GpuError> {
        let words: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.bytes(&words)
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> Result<DeviceAddress, GpuError> {
        let buffer = self.gpu.upload(bytes)?;
        let address = buffer.address();
        self.buffers.push(buffer);
        Ok(address)
    }

    /// The memory itself.
    pub(crate) fn into_buffers(self) -> Vec<Buffer> {
        self.buffers
    }
}
