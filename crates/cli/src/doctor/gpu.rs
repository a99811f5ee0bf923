//! The GPU side of the machine.

use cuda::{DeviceInfo, Driver, DriverVersion};
use flashcore::Machine;
use flashcore::gpu::target_of;
use ptx::Capability;
use serde::Serialize;

use crate::terminal;

/// The compute capability whose kernels depend on the compiler's version.
const WGMMA: &str = Capability::Wgmma.name();

/// Driver and devices.
#[derive(Serialize)]
pub(super) struct Gpu {
    /// Absent where there is none that can be used.
    driver: Option<DriverFound>,
    devices: Vec<Device>,
    /// Why there is no GPU back end, if there is none.
    missing: Option<String>,
}

#[derive(Serialize)]
struct DriverFound {
    /// The CUDA version that it supports.
    cuda: String,
    /// The release of the kernel module.
    release: Option<String>,
    /// A note on how the driver's compiler handles `wgmma` kernels, if not at its best.
    slower: Option<&'static str>,
}

/// Returns how a driver's compiler handles the Hopper kernels, if not at its best: judged by the
/// assembler of the same release (docs/architectures.md has the table).
fn slower(version: DriverVersion) -> Option<&'static str> {
    match (version.major, version.minor) {
        (12, 0) => Some(
            "its compiler takes no backward kernels, and spills registers in some forward and \
             prefill kernels: CUDA 12.4 or later does not",
        ),
        (12, 1..=3) => Some(
            "its compiler spills registers in some forward, prefill and backward kernels: CUDA 12.4 \
             or later does not",
        ),
        (12, 5) => Some(
            "its compiler waits for products that others overlap with the softmax, in every \
             forward, prefill and backward kernel: CUDA 12.4, and 12.6 or later, do not",
        ),
        _ => None,
    }
}

#[derive(Serialize)]
struct Device {
    ordinal: u32,
    name: String,
    uuid: String,
    compute_capability: String,
    /// What kernels are built for.
    target: String,
    multiprocessors: u32,
    clock_kilohertz: u32,
    memory_bytes: u64,
    l2_bytes: u64,
    shared_bytes_per_block: u32,
    shared_bytes_per_multiprocessor: u32,
    /// The features that kernels ask for and that it has.
    capabilities: Vec<&'static str>,
    /// The features that it lacks.
    lacking: Vec<&'static str>,
}

impl Gpu {
    pub(super) fn look(machine: &Machine) -> Self {
        let missing = machine.missing().iter().find(|missing| missing.backend == "gpu");
        let mut missing = missing.map(|missing| missing.reason.clone());
        let driver = Driver::probe().ok().map(|driver| DriverFound {
            cuda: driver.version.to_string(),
            release: driver.release.clone(),
            slower: slower(driver.version),
        });
        let mut devices = Vec::new();
        for ordinal in 0..cuda::Device::count().unwrap_or(0) {
            match DeviceInfo::query(ordinal) {
                Ok(info) => devices.push(Device::from(info)),
                Err(error) => {
                    let reason = format!("device {ordinal} gives no answer: {error}");
                    missing.get_or_insert(reason);
                }
            }
        }
        Gpu { driver, devices, missing }
    }

    pub(super) fn fields(&self) -> Vec<(&'static str, String)> {
        let mut fields = Vec::new();
        if let Some(driver) = &self.driver {
            let release = driver.release.as_ref();
            let release =
                release.map_or_else(String::new, |release| format!(", release {release}"));
            fields.push(("driver", format!("CUDA {}{release}", driver.cuda)));
            let concerned = self.devices.iter().any(|it| it.capabilities.contains(&WGMMA));
            let slower = driver.slower.filter(|_| concerned);
            fields.extend(slower.map(|text| ("warning", text.to_owned())));
        }
        fields.extend(self.devices.iter().flat_map(Device::fields));
        if let Some(reason) = &self.missing {
            let state = if self.devices.is_empty() { "none" } else { "not usable" };
            fields.push(("gpu", format!("{state}: {reason}")));
        }
        fields
    }
}

impl From<DeviceInfo> for Device {
    fn from(info: DeviceInfo) -> Self {
        let capability = info.compute_capability;
        let target = target_of(capability.major * 10 + capability.minor);
        let named = |present: bool| {
            let found = Capability::ALL.into_iter().filter(|it| target.has(*it) == present);
            found.map(Capability::name).collect()
        };
        Device {
            ordinal: info.ordinal,
            name: info.name,
            uuid: info.uuid.to_string(),
            compute_capability: capability.to_string(),
            target: target.to_string(),
            multiprocessors: info.multiprocessors,
            clock_kilohertz: info.clock_kilohertz,
            memory_bytes: info.memory_bytes,
            l2_bytes: info.l2_bytes,
            shared_bytes_per_block: info.shared_bytes_per_block,
            shared_bytes_per_multiprocessor: info.shared_bytes_per_multiprocessor,
            capabilities: named(true),
            lacking: named(false),
        }
    }
}

impl Device {
    fn fields(&self) -> Vec<(&'static str, String)> {
        let bytes = |bytes: u64| terminal::bytes(bytes.into());
        let mut fields = vec![
            (
                "gpu",
                format!(
                    "{}: {}, compute capability {} ({}), {} multiprocessors at {:.2} GHz",
                    self.ordinal,
                    self.name,
                    self.compute_capability,
                    self.target,
                    self.multiprocessors,
                    f64::from(self.clock_kilohertz) / 1e6
                ),
            ),
            (
                "gpu memory",
                format!(
                    "{}, {} of L2, {} shared in a block",
                    bytes(self.memory_bytes),
                    bytes(self.l2_bytes),
                    bytes(self.shared_bytes_per_block.into())
                ),
            ),
            ("gpu has", self.capabilities.join(", ")),
        ];
        if !self.lacking.is_empty() {
            fields.push(("gpu lacks", self.lacking.join(", ")));
        }
        fields
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_that_compile_worse_are_named() {
        let of = |major, minor| slower(DriverVersion { major, minor });
        for (major, minor) in [(12, 4), (12, 6), (12, 8), (12, 9), (13, 0)] {
            assert_eq!(of(major, minor), None, "{major}.{minor}");
        }
        assert!(of(12, 0).is_some_and(|text| text.contains("spills")));
        assert!(of(12, 5).is_some_and(|text| text.contains("waits")));
    }
}
