//! Modules and the kernels in them.

use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};

use crate::error::{check, code, number};
use crate::{Device, Driver, DriverVersion, Error, Parameter, Result};

/// Machine code loaded on a device. Cheap to clone.
///
/// It stays loaded for as long as the context exists, and is not unloaded with the last clone: a
/// kernel may still run or be part of a graph that someone else captured, and waiting for the
/// device would invalidate a capture on another thread. A cubin takes some ten kilobytes.
#[derive(Clone, Debug)]
pub struct Module {
    device: Device,
    handle: sys::CUmodule,
}

// SAFETY: a module's handle may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: nothing here changes after construction.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a cubin, which takes about 0.1 ms, or a NUL-terminated PTX text, which the driver then
    /// compiles while other calls wait.
    ///
    /// The code is trusted: it may do anything that device code can.
    pub fn load(device: &Device, image: &[u8]) -> Result<Module> {
        // The driver finds the end of an image by itself and is not told its length. So the header
        // of a cubin must be complete and must stay within the bytes, and a text must be
        // terminated.
        let sound = elf_bytes(image).is_some_and(|bytes| bytes <= image.len() as u64);
        if !sound && !is_ptx(image) {
            return Err(Error::InvalidCubin);
        }
        let _bound = device.bind()?;
        let mut handle = null_mut();
        // SAFETY: a context is bound, and all that the driver will read is
        // within the bytes.
        let result = unsafe { sys::cuModuleLoadData(&mut handle, image.as_ptr().cast()) };
        check("cuModuleLoadData", result)?;
        Ok(Module { device: device.clone(), handle })
    }

    /// Returns the kernel of this name, with the parameters that the caller declares.
    ///
    /// Drivers since CUDA 12.4 report the parameters of a kernel, and the declared ones are
    /// compared with them; with older drivers the declaration is trusted. Parameters that are not
    /// declared are zero in every launch.
    pub fn function(&self, name: &str, parameters: &[Parameter]) -> Result<Function> {
        let text = CString::new(name).map_err(|_| Error::Nul { what: "the kernel's name" })?;
        let _bound = self.device().bind()?;
        let mut handle = null_mut();
        // SAFETY: the module is alive and the name ends in a NUL.
        let result = unsafe { sys::cuModuleGetFunction(&mut handle, self.handle, text.as_ptr()) };
        if number(result) == code::NOT_FOUND {
            return Err(Error::NoFunction { name: name.to_owned() });
        }
        check("cuModuleGetFunction", result)?;
        compare_parameters(name, handle, parameters)?;
        let attributes = FunctionAttributes::query(handle)?;
        let dynamic_shared =
            attribute(handle, Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)?;
        Ok(Function {
            shared: Arc::new(SharedFunction {
                device: self.device.clone(),
                handle,
                name: name.to_owned(),
                parameters: parameters.to_vec(),
                attributes,
                dynamic_shared: AtomicU32::new(dynamic_shared),
            }),
        })
    }

    /// Returns its device.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

/// Returns the size of a 64-bit little-endian ELF file according to its header.
fn elf_bytes(file: &[u8]) -> Option<u64> {
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let header = file.get(..64)?;
    let half = |at: usize| u64::from(u16::from_le_bytes([header[at], header[at + 1]]));
    let word = |at: usize| {
        let bytes = header[at..at + 8].try_into().unwrap_or_default();
        u64::from_le_bytes(bytes)
    };
    let programs = word(32).checked_add(half(54) * half(56))?;
    let sections = word(40).checked_add(half(58) * half(60))?;
    Some(programs.max(sections).max(64))
}

/// Tells whether an image is a NUL-terminated PTX text.
fn is_ptx(image: &[u8]) -> bool {
    image.starts_with(b".version") && image.last() == Some(&0)
}

/// A kernel. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Function {
    pub(crate) shared: Arc<SharedFunction>,
}

#[derive(Debug)]
pub(crate) struct SharedFunction {
    device: Device,
    pub(crate) handle: sys::CUfunction,
    pub(crate) name: String,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) attributes: FunctionAttributes,
    /// Maximum dynamic shared memory of a launch in bytes.
    pub(crate) dynamic_shared: AtomicU32,
}

// SAFETY: a function's handle may be used from any thread, and lives as long
// as the context, which the device holds.
unsafe impl Send for SharedFunction {}
// SAFETY: what changes is atomic.
unsafe impl Sync for SharedFunction {}

/// Resource usage of a compiled kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FunctionAttributes {
    /// Registers per thread.
    pub registers: u32,
    /// Local memory per thread in bytes. Anything but zero means spilled registers or a stack, and
    /// a slow kernel.
    pub local_bytes: u32,
    /// Static shared memory per block in bytes.
    pub static_shared_bytes: u32,
    /// Maximum number of threads per block, given the registers.
    pub max_threads_per_block: u32,
}

impl FunctionAttributes {
    fn query(handle: sys::CUfunction) -> Result<FunctionAttributes> {
        Ok(FunctionAttributes {
            registers: attribute(handle, Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: attribute(handle, Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            static_shared_bytes: attribute(handle, Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            max_threads_per_block: attribute(
                handle,
                Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
            )?,
        })
    }
}

/// Reads an attribute of a live function whose context is bound.
fn attribute(handle: sys::CUfunction, attribute: Attribute) -> Result<u32> {
    let mut value = 0;
    // SAFETY: functions live as long as their context, which is bound; writes
    // one number.
    let result = unsafe { sys::cuFuncGetAttribute(&mut value, attribute, handle) };
    check("cuFuncGetAttribute", result)?;
    Ok(value.max(0) as u32)
}

impl Function {
    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Returns its declared parameters.
    pub fn parameters(&self) -> &[Parameter] {
        &self.shared.parameters
    }

    /// Returns its resource usage.
    pub fn attributes(&self) -> FunctionAttributes {
        self.shared.attributes
    }

    /// Returns its device.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Allows launches with up to this much dynamic shared memory. Without it the limit is 48 KiB.
    pub fn set_dynamic_shared(&self, bytes: u32) -> Result<()> {
        let limit = self.device().info().shared_bytes_per_block;
        let fixed = self.shared.attributes.static_shared_bytes;
        if u64::from(bytes) + u64::from(fixed) > limit.into() {
            return Err(self.launch_error(format!(
                "{bytes} bytes of dynamic and {fixed} of static shared memory are more than the {limit} of a block"
            )));
        }
        self.set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes)?;
        self.shared.dynamic_shared.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn set(&self, attribute: Attribute, value: u32) -> Result<()> {
        let _bound = self.device().bind()?;
        let value = i32::try_from(value).unwrap_or(i32::MAX);
        // SAFETY: the function lives as long as the context, which is held.
        let result = unsafe { sys::cuFuncSetAttribute(self.shared.handle, attribute, value) };
        check("cuFuncSetAttribute", result)
    }

    pub(crate) fn launch_error(&self, reason: String) -> Error {
        Error::Launch { function: self.name().to_owned(), reason }
    }
}

/// `cuFuncGetParamInfo`, which came with CUDA 12.4 and so is not in the
/// bindings of 12.0: function, index, offset, size.
type ParameterInformation =
    unsafe extern "C" fn(sys::CUfunction, usize, *mut usize, *mut usize) -> u32;

fn parameter_information() -> Option<ParameterInformation> {
    static FOUND: OnceLock<Option<ParameterInformation>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let since = DriverVersion { major: 12, minor: 4 };
        if Driver::probe().ok()?.version < since {
            return None;
        }
        let mut found: *mut c_void = null_mut();
        // SAFETY: the name ends in a NUL; writes one pointer; the status is
        // optional.
        let result = unsafe {
            sys::cuGetProcAddress_v2(
                c"cuFuncGetParamInfo".as_ptr(),
                &mut found,
                12040,
                0,
                null_mut(),
            )
        };
        if number(result) != 0 || found.is_null() {
            return None;
        }
        // SAFETY: the driver gives this function for this name and version,
        // and CUresult is a u32.
        Some(unsafe { std::mem::transmute::<*mut c_void, ParameterInformation>(found) })
    })
}

/// Returns an error if the kernel's code has other parameters than were declared.
fn compare_parameters(name: &str, handle: sys::CUfunction, parameters: &[Parameter]) -> Result<()> {
    let Some(information) = parameter_information() else {
        return Ok(());
    };
    let signature = |reason| Error::Signature { function: name.to_owned(), reason };
    // Asking for one parameter more would reveal undeclared ones, but compute-sanitizer reports the
    // driver's refusal as an error. A launch passes zeros for such parameters (`launch::nothing`).
    for (index, parameter) in parameters.iter().enumerate() {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function is alive; an index that is too large is an
        // error of its own.
        let result = unsafe { information(handle, index, &mut offset, &mut size) };
        match result {
            0 if parameter.bytes() == size => {}
            0 => {
                return Err(signature(format!(
                    "parameter {index} has {size} bytes, and is declared {parameter}"
                )));
            }
            code::INVALID_VALUE => {
                return Err(signature(format!(
                    "it has {index} parameters, and {} are declared",
                    parameters.len()
                )));
            }
            // The driver cannot report parameters.
            _ => return Ok(()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF header with one program header and three section headers.
    fn elf() -> Vec<u8> {
        let mut file = vec![0; 64 + 56 + 3 * 64];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[32..40].copy_from_slice(&64u64.to_le_bytes());
        file[40..48].copy_from_slice(&120u64.to_le_bytes());
        file[54..56].copy_from_slice(&56u16.to_le_bytes());
        file[56..58].copy_from_slice(&1u16.to_le_bytes());
        file[58..60].copy_from_slice(&64u16.to_le_bytes());
        file[60..62].copy_from_slice(&3u16.to_le_bytes());
        file
    }

    #[test]
    fn an_elf_file_tells_its_length() {
        let mut file = elf();
        assert_eq!(elf_bytes(&file), Some(file.len() as u64));
        file[40..48].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(elf_bytes(&file), None);
        assert_eq!(elf_bytes(b"\x7fELF\x02\x01"), None);
        assert_eq!(elf_bytes(b".version 8.0"), None);
        assert_eq!(elf_bytes(b""), None);
        assert!(is_ptx(b".version 8.0\n\0"));
        assert!(!is_ptx(b".version 8.0\n") && !is_ptx(b"\0") && !is_ptx(b""));
    }

    #[test]
    fn handles_cross_threads() {
        fn crosses<T: Send + Sync + Clone>() {}
        crosses::<Module>();
        crosses::<Function>();
    }
}
