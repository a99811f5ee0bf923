//! PyTorch's tensors through the stable interface: reading them and allocating others like them.

use std::ffi::{CStr, c_void};
use std::ptr::{NonNull, null, null_mut};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{Ask, Handle, Stable, VERSION, done, no_memory};
use crate::view::{MOST_DIMENSIONS, Memory, Place};

/// An owned reference to a PyTorch tensor.
pub(crate) struct Tensor {
    pub(super) handle: NonNull<c_void>,
    pub(super) torch: &'static Stable,
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: ours, and given back once.
        let _ = unsafe { (self.torch.drop_tensor)(self.handle.as_ptr()) };
    }
}

impl Tensor {
    fn ask<T: Copy>(&self, name: &str, ask: Ask<T>, mut answer: T) -> PyResult<T> {
        // SAFETY: a tensor, and a question that is answered with this type.
        let asked = unsafe { ask(self.handle.as_ptr(), &mut answer) };
        done(asked, || format!("say what {name} is"))?;
        Ok(answer)
    }

    /// Reads the memory of the tensor.
    pub(crate) fn read(&self, name: &str) -> PyResult<Memory> {
        let torch = self.torch;
        let dimensions = self.ask(name, torch.dimensions, 0)?.max(0) as usize;
        if dimensions > MOST_DIMENSIONS {
            return Err(PyValueError::new_err(format!(
                "{name} has {dimensions} dimensions, expected {MOST_DIMENSIONS} at most"
            )));
        }
        let (mut sizes, mut strides) = ([1; MOST_DIMENSIONS], [0; MOST_DIMENSIONS]);
        for (to, ask) in [(&mut sizes, torch.sizes), (&mut strides, torch.strides)] {
            let from = self.ask(name, ask, null())?;
            if dimensions > 0 {
                // SAFETY: as many numbers as dimensions, which the tensor keeps.
                let from = unsafe { std::slice::from_raw_parts(from, dimensions) };
                to[..dimensions].copy_from_slice(from);
            }
        }
        let dtype = self.ask(name, torch.dtype, 0)?;
        let place = match self.ask(name, torch.device_type, 0)? {
            kind if kind == torch.cpu => Place::Host,
            kind if kind == torch.cuda => {
                Place::Cuda(self.ask(name, torch.device_index, 0)?.max(0) as u32)
            }
            kind => {
                return Err(PyValueError::new_err(format!(
                    "{name} is on a device of PyTorch's kind {kind}, expected the CPU or a CUDA device"
                )));
            }
        };
        let address = torch.unless_freed(self.handle.as_ptr(), self.address()?);
        let element = torch.element_of(dtype);
        let memory = Memory { address, dimensions, sizes, strides, element, place };
        memory.exists(name)?;
        Ok(memory)
    }

    /// Returns the address of its elements.
    pub(crate) fn address(&self) -> PyResult<u64> {
        Ok(self.ask("a tensor", self.torch.data, null())? as u64)
    }

    /// Returns the tensor as a Python object.
    pub(crate) fn object<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: a tensor; the answer is an object that is ours, or null with an exception set.
        unsafe { Bound::from_owned_ptr_or_err(py, (self.torch.wrap)(self.handle.as_ptr())) }
    }

    /// Fills the tensor with zeros.
    pub(crate) fn clear(&self, name: &str) -> PyResult<()> {
        // SAFETY: a tensor of ours.
        done(unsafe { (self.torch.zero)(self.handle.as_ptr()) }, || format!("clear {name}"))
    }

    /// Allocates a tensor like PyTorch's `empty_like`: with the same layout if it is dense,
    /// otherwise without gaps.
    pub(crate) fn like(&self, memory: &Memory) -> PyResult<Tensor> {
        match memory.is_dense() {
            true => {
                let Memory { element, place, .. } = *memory;
                self.torch.make(memory.sizes(), memory.strides(), element, place)
            }
            // Slower, through the dispatcher, which knows the order of dimensions that `empty_like`
            // promises.
            false => self.call(c"aten::empty_like", memory, [0; 5]),
        }
    }

    /// Returns a contiguous copy.
    pub(crate) fn contiguous(&self, memory: &Memory) -> PyResult<Tensor> {
        if memory.is_contiguous() {
            // `contiguous` would give back the tensor itself.
            return self.call(c"aten::clone", memory, [0]);
        }
        self.call(c"aten::contiguous", memory, [self.torch.contiguous as u32 as u64])
    }

    /// Calls an operator on this tensor and further arguments; its result has the same sizes.
    fn call<const OTHERS: usize>(
        &self,
        name: &CStr,
        memory: &Memory,
        others: [u64; OTHERS],
    ) -> PyResult<Tensor> {
        const SLOTS: usize = 8;
        // The dispatcher takes ownership of its arguments.
        let handle = self.ask("a tensor", self.torch.copy_handle, null_mut())?;
        let mut slots = [0; SLOTS];
        slots[0] = handle as u64;
        slots[1..=OTHERS].copy_from_slice(&others);
        // SAFETY: the schemas of the operators above.
        let called =
            unsafe { (self.torch.call)(name.as_ptr(), c"".as_ptr(), slots.as_mut_ptr(), VERSION) };
        match called {
            0 => self.torch.tensor(slots[0] as Handle),
            _ => Err(no_memory(memory.sizes(), memory.place)),
        }
    }
}
