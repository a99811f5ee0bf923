//! The contents of `flashcore.info()`: version, devices, and the last call.

use std::sync::Arc;

use cuda::DeviceInfo;
use flashcore::gpu::AttentionPlan;
use flashcore::{Backend, CpuBackend, Problem, Report};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::process::{lock, process};

/// The version of the package.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The last call.
pub(crate) enum Last {
    Gpu { ordinal: u32, plan: Arc<AttentionPlan> },
    Cpu { problem: Box<Problem>, report: Box<Report> },
}

/// Remembers a call as the last one.
pub(crate) fn remember(last: impl FnOnce() -> Last) {
    // Dropped without the lock: with the last reference to a plan the driver frees its memory.
    let before = lock(&process().last).replace(last());
    drop(before);
}

/// `flashcore.info()` as a dictionary.
pub(crate) fn info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = PyDict::new(py);
    info.set_item("version", VERSION)?;
    info.set_item("cpu", CpuBackend::new().describe())?;
    let devices = PyList::empty(py);
    let count = process().call_driver().map_err(|error| error.value(py).to_string());
    match count.and_then(|()| cuda::Device::count().map_err(|error| error.to_string())) {
        Ok(count) => {
            for ordinal in 0..count {
                devices.append(device(py, ordinal)?)?;
            }
            info.set_item("no_gpu", py.None())?;
        }
        Err(reason) => info.set_item("no_gpu", reason)?,
    }
    info.set_item("gpus", devices)?;
    info.set_item("last", last(py)?)?;
    Ok(info)
}

fn device(py: Python<'_>, ordinal: u32) -> PyResult<Bound<'_, PyDict>> {
    let info = DeviceInfo::query(ordinal).map_err(crate::error::runtime)?;
    let device = PyDict::new(py);
    device.set_item("device", format!("cuda:{ordinal}"))?;
    device.set_item("name", info.name)?;
    device.set_item("compute_capability", info.compute_capability.to_string())?;
    device.set_item("multiprocessors", info.multiprocessors)?;
    device.set_item("memory_bytes", info.memory_bytes)?;
    device.set_item("driver", info.driver.version.to_string())?;
    Ok(device)
}

fn last(py: Python<'_>) -> PyResult<Option<Bound<'_, PyDict>>> {
    // Copied, since the lock must not be held while Python allocates: that may start its garbage
    // collector, which runs any code, here or in another thread.
    let (device, problem, kernel, configuration, reason) = match &*lock(&process().last) {
        None => return Ok(None),
        Some(Last::Gpu { ordinal, plan }) => {
            let plan = plan.plan();
            let (device, chosen) = (format!("cuda:{ordinal}"), &plan.chosen);
            let configuration = chosen.configuration.clone();
            let problem = plan.problem.to_string();
            (device, problem, chosen.full_name(), configuration, plan.reason())
        }
        Some(Last::Cpu { problem, report }) => {
            let kernel = format!("{}/{}", report.backend, report.kernel);
            let configuration = report.configuration.clone();
            ("cpu".to_owned(), problem.to_string(), kernel, configuration, report.reason.clone())
        }
    };
    let described = PyDict::new(py);
    described.set_item("device", device)?;
    described.set_item("problem", problem)?;
    described.set_item("kernel", kernel)?;
    described.set_item("configuration", configuration)?;
    described.set_item("reason", reason)?;
    Ok(Some(described))
}
