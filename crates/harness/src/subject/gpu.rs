//! A kernel on a GPU.

use cuda::{Buffer, DeviceAddress, Event};
use flashcore::Problem;
use flashcore::gpu::Gpu;

use super::{Addresses, Call, Flush, Memory, Source, Subject, TensorRole, Tensors};
use crate::Error;

/// A kernel on a GPU.
pub struct GpuSubject<'a> {
    gpu: &'a Gpu,
    source: &'a dyn Source,
    kernel: Option<Box<dyn Call>>,
    memory: Vec<Buffer>,
    flush: Flush,
    marks: [Event; 2],
}

impl<'a> GpuSubject<'a> {
    /// Puts a kernel on a GPU.
    pub fn new(gpu: &'a Gpu, source: &'a dyn Source) -> Result<Self, Error> {
        let device = gpu.device();
        Ok(GpuSubject {
            gpu,
            source,
            kernel: None,
            memory: Vec::new(),
            flush: Flush::new(gpu)?,
            marks: [Event::new(device)?, Event::new(device)?],
        })
    }

    fn buffer(&self, memory: Memory) -> Result<&Buffer, Error> {
        let missing = || Error::Impossible(format!("there is no memory {}", memory.0));
        self.memory.get(memory.0).ok_or_else(missing)
    }
}

impl Subject for GpuSubject<'_> {
    fn name(&self) -> String {
        self.source.name()
    }

    fn prepare(&mut self, problem: &Problem) -> Result<(), Error> {
        self.kernel = Some(self.source.prepare(self.gpu, problem)?);
        Ok(())
    }

    fn allocate(&mut self, bytes: usize) -> Result<Memory, Error> {
        self.memory.push(Buffer::new(self.gpu.device(), (bytes as u64).max(16))?);
        Ok(Memory(self.memory.len() - 1))
    }

    fn release(&mut self) {
        self.memory.clear();
    }

    fn write(&mut self, memory: Memory, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let (start, end) = (offset as u64, (offset + bytes.len()) as u64);
        let to = self.buffer(memory)?.slice(start..end)?;
        Ok(self.gpu.stream().upload(bytes, to)?)
    }

    fn fill(&mut self, memory: Memory, byte: u8) -> Result<(), Error> {
        Ok(self.gpu.stream().fill(self.buffer(memory)?.all(), byte)?)
    }

    fn copy(&mut self, from: Memory, to: Memory) -> Result<(), Error> {
        Ok(self.gpu.stream().copy(self.buffer(from)?.all(), self.buffer(to)?.all())?)
    }

    fn read(&mut self, memory: Memory) -> Result<Vec<u8>, Error> {
        Ok(self.gpu.stream().download_vec(self.buffer(memory)?.all())?)
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.flush.run(self.gpu.stream())
    }

    fn mark(&mut self, which: usize) -> Result<(), Error> {
        Ok(self.marks[which.min(1)].record(self.gpu.stream())?)
    }

    fn call(&mut self, tensors: &Tensors) -> Result<(), Error> {
        let mut addresses: Addresses = [DeviceAddress(0); TensorRole::COUNT];
        for (address, memory) in addresses.iter_mut().zip(tensors.memory) {
            *address = self.buffer(memory)?.address().offset(tensors.offset as u64);
        }
        let unprepared = || Error::Impossible("no problem was prepared".to_owned());
        let kernel = self.kernel.as_mut().ok_or_else(unprepared)?;
        kernel.launch(self.gpu.stream(), &addresses)
    }

    fn elapsed(&mut self) -> Result<f64, Error> {
        let [start, end] = &self.marks;
        end.synchronize()?;
        Ok(end.milliseconds_since(start)?)
    }

    fn settle(&mut self) -> Result<(), Error> {
        Ok(self.gpu.device().synchronize()?)
    }
}
