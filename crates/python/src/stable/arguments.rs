//! The arguments and results of a dispatcher kernel: slots of 64 bits.

use std::ffi::c_void;
use std::ptr::{NonNull, null};

use pyo3::prelude::*;

use super::{Handle, Stable, Tensor, done};
use crate::error;

/// A result of a kernel.
pub(crate) enum Value {
    Tensor(Tensor),
    Whole(i64),
    /// From [`Stable::list`].
    List(*mut c_void),
}

impl Value {
    pub(super) fn slot(self) -> u64 {
        match self {
            // Ownership passes to PyTorch.
            Value::Tensor(tensor) => std::mem::ManuallyDrop::new(tensor).handle.as_ptr() as u64,
            Value::Whole(number) => number as u64,
            Value::List(list) => list as u64,
        }
    }
}

/// A kernel's arguments, taken one after the other in the order of the schema.
pub(crate) struct Arguments<'a> {
    pub(super) slots: std::slice::Iter<'a, u64>,
    pub(super) torch: &'static Stable,
}

impl Arguments<'_> {
    fn slot(&mut self) -> u64 {
        self.slots.next().copied().unwrap_or_default()
    }

    /// `Tensor`
    pub(crate) fn tensor(&mut self) -> PyResult<Tensor> {
        let handle = self.slot() as Handle;
        self.torch.tensor(handle)
    }

    /// `Tensor?`
    pub(crate) fn optional_tensor(&mut self) -> PyResult<Option<Tensor>> {
        let torch = self.torch;
        self.optional().map(|slot| torch.tensor(slot as Handle)).transpose()
    }

    /// `float`
    pub(crate) fn number(&mut self) -> f64 {
        f64::from_bits(self.slot())
    }

    /// `float?`
    pub(crate) fn optional_number(&mut self) -> Option<f64> {
        self.optional().map(f64::from_bits)
    }

    /// `int` and `SymInt`
    pub(crate) fn whole(&mut self) -> i64 {
        self.slot() as i64
    }

    /// `int?` and `SymInt?`
    pub(crate) fn optional_whole(&mut self) -> Option<i64> {
        self.optional().map(|slot| slot as i64)
    }

    /// `bool`
    pub(crate) fn flag(&mut self) -> bool {
        self.slot() as u8 != 0
    }

    /// `str`
    pub(crate) fn text(&mut self) -> PyResult<String> {
        let (handle, torch) = (self.slot() as Handle, self.torch);
        let (mut bytes, mut length) = (null(), 0);
        // SAFETY: a text of PyTorch's, which is ours and is given back after it was copied.
        unsafe {
            let asked = (torch.text)(handle, &mut bytes) | (torch.text_length)(handle, &mut length);
            let text = match asked {
                0 => std::slice::from_raw_parts(bytes.cast::<u8>(), length).to_vec(),
                _ => Vec::new(),
            };
            let _ = (torch.drop_text)(handle);
            String::from_utf8(text).map_err(error::value)
        }
    }

    /// `bool[]`
    pub(crate) fn flags(&mut self) -> PyResult<Vec<bool>> {
        let (handle, torch) = (self.slot() as Handle, self.torch);
        let mut size = 0;
        // SAFETY: a list of PyTorch's, which is ours and is given back after it was read.
        unsafe {
            let mut code = (torch.list_size)(handle, &mut size);
            let mut flags = Vec::new();
            for at in 0..size {
                let mut item = 0;
                code |= (torch.list_item)(handle, at, &mut item);
                flags.push(item as u8 != 0);
            }
            let _ = (torch.drop_list)(handle);
            done(code, || "say what is in a list".to_owned()).map(|()| flags)
        }
    }

    /// Reads an optional argument, which is a pointer to a heap-allocated slot, or null.
    fn optional(&mut self) -> Option<u64> {
        let slot = NonNull::new(self.slot() as *mut u64)?;
        // SAFETY: one number, made by C++'s `new` for us.
        unsafe {
            let found = slot.read();
            (self.torch.cxx.delete)(slot.as_ptr().cast());
            Some(found)
        }
    }
}
