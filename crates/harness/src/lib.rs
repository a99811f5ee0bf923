//! The harness: benchmarks, acceptance tests, tuning and profiling of kernels.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`problems`] | sets of problems by name or from a file |
//! | [`auxiliary_inputs`] | lengths, tables, slopes and sinks of a problem |
//! | [`statistics`] | medians, spread, and what is noise |
//! | [`provenance`] | on what, with what and when something was measured |
//! | [`subject`] | a kernel in the place where it runs: memory, calls, a clock |
//! | [`verify`] | whether the bytes that a call left behind are right |
//! | [`mod@bench`] | candidates alternated in one process, ours and others' |
//! | [`report`] | results as data, as a page with plots, and two of them compared |
//! | [`gate`] | accept or reject a kernel, with reasons |
//! | [`ahead_of_time`] | kernels assembled for a GPU that is not there |
//! | [`tune`] | search for the best configuration |
//! | [`profile`] | where the time goes inside a kernel |
//! | [`scale`] | what attention over many GPUs would take |
//! | [`soak`] | random problems for a long time, while things go wrong |
//!
//! Nothing here prints: commands get data and progress, and show them.

pub mod ahead_of_time;
pub mod auxiliary_inputs;
pub mod bench;
pub mod gate;
pub mod problems;
pub mod profile;
pub mod provenance;
pub mod report;
pub mod scale;
pub mod soak;
pub mod statistics;
pub mod subject;
pub mod tune;
pub mod verify;

use cuda::Cache;
use flashcore::gpu::{Gpu, GpuError, Policy};

/// Opens the first GPU of this machine; kernels are compiled in full before their first use, so
/// that every launch runs the same machine code.
pub fn open_gpu() -> Result<Gpu, GpuError> {
    Gpu::with_policy(0, Cache::from_environment(), Policy::AtOnce)
}

/// An error that prevents a measurement or a judgement.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library refused or failed.
    #[error(transparent)]
    Library(#[from] flashcore::Error),
    /// The GPU refused or failed.
    #[error(transparent)]
    Gpu(#[from] flashcore::gpu::GpuError),
    /// There is no such kernel.
    #[error(transparent)]
    Kernel(#[from] kernels::Error),
    /// A file cannot be read or written, or another program cannot be run.
    #[error("{what}: {error}")]
    Io {
        /// What was tried.
        what: String,
        /// What went wrong.
        error: std::io::Error,
    },
    /// A file or an answer is not what it should be.
    #[error("{what}: {reason}")]
    Malformed {
        /// Which one.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The operation is not possible on this machine.
    #[error("{0}")]
    Impossible(String),
}

impl From<cuda::Error> for Error {
    fn from(error: cuda::Error) -> Self {
        Error::Gpu(error.into())
    }
}

impl Error {
    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
        let what = what.into();
        move |error| Error::Io { what, error }
    }
}
