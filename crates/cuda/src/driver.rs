//! Detection and initialization of the CUDA driver, on which everything else depends.

use std::fmt;
use std::sync::OnceLock;

use cudarc::driver::sys;

use crate::error::{check, code, failed, number};
use crate::{Error, Result};

/// The CUDA version that a driver supports, as in "12.4".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DriverVersion {
    /// 12 in "12.4".
    pub major: u32,
    /// 4 in "12.4".
    pub minor: u32,
}

impl DriverVersion {
    /// The oldest driver that has tensor maps and cluster launches.
    pub const OLDEST: DriverVersion = DriverVersion { major: 12, minor: 0 };

    /// Decodes the driver's version number, 12040 for "12.4".
    fn from_number(number: i32) -> DriverVersion {
        let number = number.max(0) as u32;
        DriverVersion { major: number / 1000, minor: number % 1000 / 10 }
    }
}

impl fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The CUDA driver of this machine, loaded and initialized.
///
/// Everything else in this crate calls [`Driver::probe`] first, so that a machine without a driver
/// gets an [`Error`] and never a panic.
///
/// ```
/// match flashcore_cuda::Driver::probe() {
///     Ok(driver) => println!("CUDA {}", driver.version),
///     Err(error) => println!("{error}"),
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// The CUDA version that the driver supports.
    pub version: DriverVersion,
    /// Release of the kernel module, as in "580.65.06", where the system reports it: two releases
    /// of one CUDA version may compile differently.
    pub release: Option<String>,
}

impl Driver {
    /// Loads and initializes the driver, or says why that is not possible.
    ///
    /// Success is remembered, failure is not, so that a driver that is installed later is found.
    pub fn probe() -> Result<&'static Driver> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        let version = library_version()?;
        if version < DriverVersion::OLDEST {
            return Err(Error::DriverTooOld { found: version, needed: DriverVersion::OLDEST });
        }
        // SAFETY: the library is there and new enough to have every function
        // that this crate calls; initialising twice does nothing.
        let result = unsafe { sys::cuInit(0) };
        match number(result) {
            0 => {}
            code::NO_DEVICE => return Err(Error::NoDevice),
            _ => {
                let reason = failed("cuInit", result).to_string();
                return Err(Error::NoDriver { reason });
            }
        }
        Ok(DRIVER.get_or_init(|| Driver { version, release: release() }))
    }

    /// Returns the number of devices that the driver sees.
    pub(crate) fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: a `Driver` exists only after cuInit succeeded.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        Ok(count.max(0) as u32)
    }
}

/// Returns the message of the error's source, where libloading keeps the loader's own words.
fn words(error: &libloading::Error) -> String {
    let source = std::error::Error::source(error);
    source.map_or_else(|| error.to_string(), ToString::to_string)
}

/// Opens the driver library and asks for its version.
///
/// `cudarc` panics where the library or a function in it is missing, so the library is opened here
/// first. `cudarc` has a check of its own, but only in builds that load dynamically, and another
/// crate in a user's build may select linking.
fn library_version() -> Result<DriverVersion> {
    #[cfg(windows)]
    const NAMES: [&str; 1] = ["nvcuda.dll"];
    #[cfg(not(windows))]
    const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

    static LIBRARY: OnceLock<libloading::Library> = OnceLock::new();
    let mut reason = String::new();
    if LIBRARY.get().is_none() {
        for name in NAMES {
            // SAFETY: the initialisers of a driver library have no conditions;
            // this is how every CUDA program loads it.
            match unsafe { libloading::Library::new(name) } {
                Ok(library) => {
                    // Kept open: a driver must not be unloaded and loaded again.
                    let _ = LIBRARY.set(library);
                    break;
                }
                Err(error) if reason.is_empty() => reason = words(&error),
                Err(_) => {}
            }
        }
    }
    let Some(library) = LIBRARY.get() else {
        return Err(Error::NoDriver { reason });
    };

    type GetVersion = unsafe extern "C" fn(*mut i32) -> u32;
    // SAFETY: the signature is the documented one, and CUresult is a u32.
    let get_version = unsafe { library.get::<GetVersion>(b"cuDriverGetVersion\0") };
    let get_version = get_version.map_err(|error| Error::NoDriver { reason: words(&error) })?;
    let mut version = 0;
    // SAFETY: writes one number; needs no initialisation.
    let result = unsafe { get_version(&mut version) };
    if result != 0 {
        let reason = format!("cuDriverGetVersion failed ({result})");
        return Err(Error::NoDriver { reason });
    }
    Ok(DriverVersion::from_number(version))
}

/// Returns the release of the kernel module, where Linux reports it.
fn release() -> Option<String> {
    let text = std::fs::read_to_string("/sys/module/nvidia/version").ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_ordered() {
        let version = DriverVersion::from_number(12040);
        assert_eq!(version, DriverVersion { major: 12, minor: 4 });
        assert_eq!(version.to_string(), "12.4");
        assert!(version > DriverVersion::OLDEST);
        assert!(DriverVersion::from_number(11080) < DriverVersion::OLDEST);
        assert_eq!(DriverVersion::from_number(13000).to_string(), "13.0");
    }

    #[test]
    fn probing_never_panics() {
        match Driver::probe() {
            Ok(driver) => assert!(driver.version >= DriverVersion::OLDEST),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
}
