//! Lists and captured tensors of a call, copied to the device.

use cuda::{Buffer, DeviceAddress};
use kernels::attention::function::TensorSpec;
use kernels::parameter::List;

use super::{CapturedTensor, DeviceTensor, Gpu, GpuError, Tensors};
use crate::inputs::Inputs;
use crate::problem::Problem;

/// Lists on the device, freed when this is dropped.
#[derive(Debug)]
pub struct DeviceLists<'a> {
    gpu: &'a Gpu,
    buffers: Vec<Buffer>,
}

impl<'a> DeviceLists<'a> {
    /// Starts without any list.
    pub fn new(gpu: &'a Gpu) -> Self {
        DeviceLists { gpu, buffers: Vec::new() }
    }

    /// Copies integers, 32 bits each, and returns their address.
    pub fn numbers(&mut self, values: &[usize]) -> Result<DeviceAddress, GpuError> {
        let words: Vec<u8> =
            values.iter().flat_map(|value| (*value as u32).to_le_bytes()).collect();
        self.bytes(&words)
    }

    /// Copies f32 numbers and returns their address.
    pub fn floats(&mut self, values: &[f32]) -> Result<DeviceAddress, GpuError> {
        let words: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.bytes(&words)
    }

    /// Copies bytes and returns their address.
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<DeviceAddress, GpuError> {
        let buffer = self.gpu.upload(bytes)?;
        let address = buffer.address();
        self.buffers.push(buffer);
        Ok(address)
    }

    /// Copies everything that a call has beside its tensors (placements of sequences, slopes,
    /// sinks, captured tensors, descale factors) and sets the addresses in `tensors`.
    pub fn of_call(
        &mut self,
        problem: &Problem,
        inputs: Inputs<'_>,
        tensors: &mut Tensors,
    ) -> Result<(), GpuError> {
        for (list, address) in List::OF_ATTENTION.into_iter().zip(tensors.lists_mut()) {
            *address = match inputs.list(problem, list) {
                Some(words) => {
                    let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
                    Some(self.bytes(&bytes)?)
                }
                None => None,
            };
        }
        for tensor in inputs.captured {
            let mut extents = [1; TensorSpec::MOST_DIMENSIONS];
            let mut strides = [0; TensorSpec::MOST_DIMENSIONS];
            for (dimension, (extent, stride)) in
                tensor.extents.iter().zip(&tensor.strides).enumerate()
            {
                // Extents that do not fit were refused when the inputs were validated.
                extents[dimension] = *extent as u32;
                strides[dimension] = *stride as u64;
            }
            let address = self.bytes(&tensor.bytes)?;
            let captured = CapturedTensor { address, extents, strides };
            tensors.captured.insert(problem, &tensor.name, captured);
        }
        tensors.descales = inputs.descales.try_map(|factors| {
            let Some(factors) = factors else { return Ok::<_, GpuError>(None) };
            Ok(Some(DeviceTensor::like(self.bytes(factors.bytes())?, factors)))
        })?;
        Ok(())
    }

    /// Returns the buffers, so that they outlive this.
    pub fn into_buffers(self) -> Vec<Buffer> {
        self.buffers
    }
}
