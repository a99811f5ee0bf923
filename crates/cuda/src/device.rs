//! Devices: their properties, and the context that all calls on them share.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use crate::error::check;
use crate::{Driver, DriverVersion, Error, Result};

/// The compute capability, on which a device's instructions and limits depend, as in "9.0".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ComputeCapability {
    /// 9 in "9.0".
    pub major: u32,
    /// 0 in "9.0".
    pub minor: u32,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The UUID of a device, which stays the same across reboots and machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Uuid(pub [u8; 16]);

impl fmt::Display for Uuid {
    /// Prints the UUID like `nvidia-smi -L`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 0 | 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// The properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Index of the device in the driver, from 0.
    pub ordinal: u32,
    /// Product name.
    pub name: String,
    /// UUID of the device.
    pub uuid: Uuid,
    /// Compute capability.
    pub compute_capability: ComputeCapability,
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Size of device memory in bytes.
    pub memory_bytes: u64,
    /// Maximum shared memory per block in bytes, once the kernel opts in.
    pub shared_bytes_per_block: u32,
    /// Shared memory per multiprocessor in bytes.
    pub shared_bytes_per_multiprocessor: u32,
    /// Size of the L2 cache in bytes.
    pub l2_bytes: u64,
    /// Peak clock of the multiprocessors in kHz.
    pub clock_kilohertz: u32,
    /// The driver that reported the properties.
    pub driver: Driver,
}

impl DeviceInfo {
    /// Queries a device without opening it: no context is created, which would take a quarter of a
    /// second and some hundred megabytes.
    pub fn query(ordinal: u32) -> Result<DeviceInfo> {
        Ok(query(ordinal)?.1)
    }
}

fn query(ordinal: u32) -> Result<(sys::CUdevice, DeviceInfo)> {
    let driver = Driver::probe()?;
    let count = driver.device_count()?;
    if count == 0 {
        return Err(Error::NoDevice);
    }
    if ordinal >= count {
        return Err(Error::InvalidDevice { ordinal, count });
    }
    let mut device = 0;
    // SAFETY: the driver is initialised and the ordinal in range.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, ordinal as i32) })?;

    let attribute = |attribute: Attribute| -> Result<u32> {
        let mut value = 0;
        // SAFETY: writes one number about a valid device.
        let result = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
        check("cuDeviceGetAttribute", result)?;
        Ok(value.max(0) as u32)
    };

    let mut name = [0u8; 256];
    // SAFETY: writes at most 256 bytes, the last of them a NUL.
    let result =
        unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device) };
    check("cuDeviceGetName", result)?;
    let name = name.split(|&byte| byte == 0).next().unwrap_or_default();

    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: writes 16 bytes.
    check("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, device) })?;

    let mut memory_bytes = 0;
    // SAFETY: writes one number.
    let result = unsafe { sys::cuDeviceTotalMem_v2(&mut memory_bytes, device) };
    check("cuDeviceTotalMem", result)?;

    let info = DeviceInfo {
        ordinal,
        name: String::from_utf8_lossy(name).into_owned(),
        uuid: Uuid(uuid.bytes.map(|byte| byte as u8)),
        compute_capability: ComputeCapability {
            major: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        },
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory_bytes: memory_bytes as u64,
        shared_bytes_per_block: attribute(
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        )?,
        shared_bytes_per_multiprocessor: attribute(
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
        )?,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
        clock_kilohertz: attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?,
        driver: driver.clone(),
    };
    Ok((device, info))
}

/// A device with its primary context, which it shares with PyTorch and every other user of the CUDA
/// runtime in the process.
///
/// Cheap to clone; may be shared between threads.
#[derive(Clone)]
pub struct Device {
    shared: Arc<Shared>,
}

struct Shared {
    handle: sys::CUdevice,
    context: sys::CUcontext,
    info: DeviceInfo,
}

// SAFETY: the handles are names that the driver accepts from any thread; what
// belongs to a thread, the current context, is bound around each call.
unsafe impl Send for Shared {}
// SAFETY: as above; nothing here changes after construction.
unsafe impl Sync for Shared {}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: gives back exactly the reference that `open` took. An error
        // can only mean that the driver is shutting down.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.handle) };
    }
}

impl Device {
    /// Returns the number of devices.
    pub fn count() -> Result<u32> {
        Driver::probe()?.device_count()
    }

    /// Opens a device. The first time in a process this creates its context, which takes about 0.3
    /// s.
    pub fn open(ordinal: u32) -> Result<Device> {
        let (handle, info) = query(ordinal)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: a valid device; the reference is given back in `drop`.
        let result = unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, handle) };
        check("cuDevicePrimaryCtxRetain", result)?;
        Ok(Device { shared: Arc::new(Shared { handle, context, info }) })
    }

    /// Returns the properties of the device.
    pub fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    /// Returns the index of the device in the driver.
    pub fn ordinal(&self) -> u32 {
        self.shared.info.ordinal
    }

    /// Tells whether kernels may be launched programmatically ([`Launch::programmatic`](crate::Launch))
    /// wherever others may: before CUDA 12.3 graphs had no such launches.
    pub fn takes_programmatic_launches(&self) -> bool {
        self.info().driver.version >= DriverVersion { major: 12, minor: 3 }
    }

    /// Returns the free device memory in bytes.
    pub fn free_memory(&self) -> Result<u64> {
        let _bound = self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(free as u64)
    }

    /// Waits for all work on the device, on all streams of the process.
    pub fn synchronize(&self) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: a context is bound.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Makes the context current on this thread until the returned guard is dropped, which restores
    /// the context that was current before.
    ///
    /// Restoring matters inside PyTorch, where a thread's current context is its current device.
    /// Usually the context is current already, and this is one cheap call.
    pub(crate) fn bind(&self) -> Result<Bound> {
        let mut current = std::ptr::null_mut();
        // SAFETY: the driver is initialised, since there is a device.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut current) })?;
        if current.is_null() && self.ordinal() == 0 {
            // To the CUDA runtime a thread without a context is on device 0. So the context may stay
            // current, where the next call finds it.
            // SAFETY: as below.
            let result = unsafe { sys::cuCtxSetCurrent(self.shared.context) };
            check("cuCtxSetCurrent", result)?;
            return Ok(Bound { pushed: false, thread: PhantomData });
        }
        let pushed = current != self.shared.context;
        if pushed {
            // SAFETY: the context is retained for as long as `self` lives.
            let result = unsafe { sys::cuCtxPushCurrent_v2(self.shared.context) };
            check("cuCtxPushCurrent", result)?;
        }
        Ok(Bound { pushed, thread: PhantomData })
    }

    /// Returns an error unless `other` is this device.
    pub(crate) fn expect_same(&self, other: &Device, what: &'static str) -> Result<()> {
        if self.shared.context == other.shared.context {
            return Ok(());
        }
        Err(Error::WrongDevice { what, expected: self.ordinal(), found: other.ordinal() })
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        self.shared.context == other.shared.context
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.ordinal())
    }
}

/// Guard during whose life the device's context is current on this thread.
pub(crate) struct Bound {
    pushed: bool,
    /// Not `Send`: a current context belongs to one thread.
    thread: PhantomData<*const ()>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = self.thread;
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: takes off what `bind` put on this very thread.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_print_as_nvidia_smi_does() {
        let uuid = Uuid(std::array::from_fn(|index| index as u8));
        assert_eq!(uuid.to_string(), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
    }

    #[test]
    fn an_ordinal_that_is_too_large_is_an_error() {
        let error = Device::open(u32::MAX).unwrap_err();
        assert!(matches!(
            error,
            Error::InvalidDevice { .. } | Error::NoDriver { .. } | Error::NoDevice
        ));
    }

    #[test]
    fn devices_cross_threads() {
        fn crosses<T: Send + Sync + Clone>() {}
        crosses::<Device>();
    }
}
