//! Device memory: owned buffers, borrowed addresses, and copies.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use cudarc::driver::sys;
use half::{bf16, f16};

use crate::error::{check, code, number};
use crate::{Device, Error, RelaxedCapture, Result, Stream};

/// An address in device memory.
///
/// Like a raw pointer, it is only a number: creating one is harmless, it may point anywhere, and it
/// keeps nothing alive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DeviceAddress(pub u64);

impl DeviceAddress {
    /// Returns the address `bytes` bytes further on.
    pub const fn offset(self, bytes: u64) -> DeviceAddress {
        DeviceAddress(self.0.wrapping_add(bytes))
    }
}

impl fmt::Display for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Owned device memory, freed when dropped.
///
/// The driver waits for the device before it frees memory, so a buffer may be dropped while a
/// kernel that uses it still runs. It may also be dropped while a stream is being captured.
#[derive(Debug)]
pub struct Buffer {
    device: Device,
    address: DeviceAddress,
    bytes: u64,
}

impl Buffer {
    /// Allocates memory, aligned to 256 bytes and uninitialized.
    pub fn new(device: &Device, bytes: u64) -> Result<Buffer> {
        let mut address = 0;
        // The driver refuses empty allocations, and an empty buffer needs no address.
        if bytes > 0 {
            let _bound = device.bind()?;
            let size = usize::try_from(bytes).map_err(|_| Error::OutOfMemory { bytes })?;
            // SAFETY: a context is bound; writes one address.
            let result = unsafe { sys::cuMemAlloc_v2(&mut address, size) };
            if number(result) == code::OUT_OF_MEMORY {
                return Err(Error::OutOfMemory { bytes });
            }
            check("cuMemAlloc", result)?;
        }
        Ok(Buffer { device: device.clone(), address: DeviceAddress(address), bytes })
    }

    /// Allocates memory and copies values into it.
    pub fn from_slice<T: Plain>(stream: &Stream, values: &[T]) -> Result<Buffer> {
        let buffer = Buffer::new(stream.device(), size_of_val(values) as u64)?;
        stream.upload(values, buffer.all())?;
        Ok(buffer)
    }

    /// Returns the address of its first byte.
    pub fn address(&self) -> DeviceAddress {
        self.address
    }

    /// Returns its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the whole buffer, for copies and fills.
    pub fn all(&self) -> DeviceSlice<'_> {
        DeviceSlice { address: self.address, bytes: self.bytes, memory: PhantomData }
    }

    /// Returns a range of its bytes, for copies and fills.
    pub fn slice(&self, range: Range<u64>) -> Result<DeviceSlice<'_>> {
        self.all().slice(range)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let Ok(_bound) = self.device.bind() else {
            return;
        };
        // Otherwise memory would not be freed while a stream is captured in the global mode, by any
        // thread, and the capture would be lost.
        let _relaxed = RelaxedCapture::begin();
        // SAFETY: allocated in `new` on this context and freed once. An error
        // can only be that of an earlier kernel, which its own stream reports.
        let _ = unsafe { sys::cuMemFree_v2(self.address.0) };
    }
}

/// A range of device memory: borrowed from a [`Buffer`], or owned by someone else, such as a
/// PyTorch tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSlice<'memory> {
    address: DeviceAddress,
    bytes: u64,
    memory: PhantomData<&'memory Buffer>,
}

impl DeviceSlice<'static> {
    /// Describes memory for which the caller vouches: that it exists on the device of the streams
    /// it is used with, and lives until they are done with it.
    pub fn foreign(address: DeviceAddress, bytes: u64) -> DeviceSlice<'static> {
        DeviceSlice { address, bytes, memory: PhantomData }
    }
}

impl<'memory> DeviceSlice<'memory> {
    /// Returns the address of its first byte.
    pub fn address(&self) -> DeviceAddress {
        self.address
    }

    /// Returns its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns a range of its bytes.
    pub fn slice(&self, range: Range<u64>) -> Result<DeviceSlice<'memory>> {
        if range.start > range.end || range.end > self.bytes {
            let Range { start, end } = range;
            return Err(Error::OutOfRange { start, end, bytes: self.bytes });
        }
        Ok(DeviceSlice {
            address: self.address.offset(range.start),
            bytes: range.end - range.start,
            memory: PhantomData,
        })
    }
}

/// Types that consist of nothing but their bytes, and so can be copied to and from a device.
/// Implemented for the integers and floats of 8 to 64 bits.
pub trait Plain: Copy + sealed::Sealed {}

mod sealed {
    /// Only for types without padding for which every bit pattern is a value.
    pub trait Sealed {}
}

macro_rules! plain {
    ($($type:ty),*) => {$(
        impl Plain for $type {}
        impl sealed::Sealed for $type {}
    )*};
}

plain!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, f16, bf16);

/// Copies and fills, executed in the order of the stream.
impl Stream {
    /// Copies values to the device and waits until the copy is done.
    ///
    /// Waiting makes this sound: nothing can change or free `values` while the device still reads
    /// them.
    pub fn upload<T: Plain>(&self, values: &[T], to: DeviceSlice<'_>) -> Result<()> {
        let bytes = size_of_val(values);
        same_size("upload", to.bytes, bytes as u64)?;
        if bytes == 0 {
            return Ok(());
        }
        let _bound = self.device().bind()?;
        // SAFETY: the source is as large as the destination says it is, and is
        // borrowed until the copy is done.
        let result = unsafe {
            sys::cuMemcpyHtoDAsync_v2(to.address.0, values.as_ptr().cast(), bytes, self.raw())
        };
        check("cuMemcpyHtoDAsync", result)?;
        self.synchronize()
    }

    /// Copies from the device into `values` and waits until the copy is done.
    pub fn download<T: Plain>(&self, from: DeviceSlice<'_>, values: &mut [T]) -> Result<()> {
        let bytes = size_of_val(values);
        same_size("download", from.bytes, bytes as u64)?;
        if bytes == 0 {
            return Ok(());
        }
        let _bound = self.device().bind()?;
        // SAFETY: the destination is as large as the source says it is, is
        // borrowed until the copy is done, and may hold any bits.
        let result = unsafe {
            sys::cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), from.address.0, bytes, self.raw())
        };
        check("cuMemcpyDtoHAsync", result)?;
        self.synchronize()
    }

    /// Copies from the device into a new vector and waits until the copy is done.
    pub fn download_vec<T: Plain + Default>(&self, from: DeviceSlice<'_>) -> Result<Vec<T>> {
        let size = size_of::<T>() as u64;
        multiple_of("the size of a download", size, from.bytes)?;
        let mut values = vec![T::default(); (from.bytes / size) as usize];
        self.download(from, &mut values)?;
        Ok(values)
    }

    /// Copies within device memory. Does not wait.
    pub fn copy(&self, from: DeviceSlice<'_>, to: DeviceSlice<'_>) -> Result<()> {
        same_size("copy", to.bytes, from.bytes)?;
        if from.bytes == 0 {
            return Ok(());
        }
        let _bound = self.device().bind()?;
        let bytes = from.bytes as usize;
        // SAFETY: both ranges are device memory of this size: of buffers, or
        // of someone else's, which the caller vouched for. A freed buffer is
        // freed only after the device is idle.
        let result =
            unsafe { sys::cuMemcpyDtoDAsync_v2(to.address.0, from.address.0, bytes, self.raw()) };
        check("cuMemcpyDtoDAsync", result)
    }

    /// Sets every byte. Does not wait.
    pub fn fill(&self, memory: DeviceSlice<'_>, byte: u8) -> Result<()> {
        if memory.bytes == 0 {
            return Ok(());
        }
        let _bound = self.device().bind()?;
        let bytes = memory.bytes as usize;
        // SAFETY: as for `copy`.
        let result = unsafe { sys::cuMemsetD8Async(memory.address.0, byte, bytes, self.raw()) };
        check("cuMemsetD8Async", result)
    }
}

fn same_size(what: &'static str, expected: u64, found: u64) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::Size { what, expected, found }) }
}

fn multiple_of(what: &'static str, multiple: u64, found: u64) -> Result<()> {
    if found.is_multiple_of(multiple) {
        return Ok(());
    }
    Err(Error::Misaligned { what, multiple, found })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_stay_inside() {
        let memory = DeviceSlice::foreign(DeviceAddress(0x1000), 64);
        let middle = memory.slice(16..48).unwrap();
        assert_eq!(middle.address(), DeviceAddress(0x1010));
        assert_eq!(middle.bytes(), 32);
        assert_eq!(middle.slice(32..32).unwrap().bytes(), 0);
        assert_eq!(middle.slice(0..33), Err(Error::OutOfRange { start: 0, end: 33, bytes: 32 }));
        let (start, end) = (8, 4);
        assert!(middle.slice(start..end).is_err());
    }

    #[test]
    fn sizes_and_multiples_are_compared() {
        assert!(same_size("upload", 4, 4).is_ok());
        assert_eq!(
            same_size("upload", 4, 8).unwrap_err().to_string(),
            "upload: 4 bytes expected, 8 given"
        );
        assert!(multiple_of("a size", 4, 0).is_ok());
        assert!(multiple_of("a size", 4, 6).is_err());
    }

    #[test]
    fn addresses_print_in_hexadecimal() {
        assert_eq!(DeviceAddress(0x7f00).offset(0x10).to_string(), "0x7f10");
    }
}
