//! The cubin cache: where it is, what it holds, whether it takes more.

use std::convert::Infallible;

use cuda::{Cache, CacheKey, ComputeCapability, Driver, DriverVersion};
use serde::Serialize;

use crate::terminal;

#[derive(Serialize)]
pub(super) struct CacheFound {
    /// Absent where the cache is switched off.
    directory: Option<String>,
    writable: bool,
    files: u64,
    bytes: u64,
    /// What is wrong with it.
    warnings: Vec<String>,
}

impl CacheFound {
    pub(super) fn look() -> Self {
        let cache = Cache::from_environment();
        let mut warnings = Vec::new();
        let size = cache.size().unwrap_or_else(|error| {
            warnings.push(error.to_string());
            Default::default()
        });
        let refusals = trial(&cache);
        let directory = cache.directory().map(|path| path.display().to_string());
        let writable = directory.is_some() && refusals.is_empty();
        warnings.extend(refusals);
        CacheFound { directory, writable, files: size.files, bytes: size.bytes, warnings }
    }

    pub(super) fn fields(&self) -> Vec<(&'static str, String)> {
        let Some(directory) = &self.directory else {
            return vec![("cache", "off: kernels are compiled in every process".to_owned())];
        };
        let state = if self.writable { "writable" } else { "not writable" };
        let held = match self.files {
            0 => "empty".to_owned(),
            1 => format!("1 cubin, {}", terminal::bytes(self.bytes.into())),
            files => format!("{files} cubins, {}", terminal::bytes(self.bytes.into())),
        };
        let mut fields = vec![("cache", format!("{directory}, {state}, {held}"))];
        fields.extend(self.warnings.iter().map(|warning| ("warning", warning.clone())));
        fields
    }
}

/// Stores an entry and removes it again: whatever would stop a cubin stops this too, be it a
/// permission, a full disk or a directory that others may write to.
fn trial(cache: &Cache) -> Vec<String> {
    // A text that no kernel has, so that no cubin is touched.
    let text = format!("flashcore doctor {}", std::process::id());
    let driver = Driver { version: DriverVersion::OLDEST, release: None };
    let capability = ComputeCapability { major: 0, minor: 0 };
    let key = CacheKey::new(&text, &driver, capability);
    let Ok(entry) = cache.get_or_compile(&key, || Ok::<_, Infallible>(text.into_bytes()));
    let mut refusals: Vec<String> = entry.warnings.iter().map(ToString::to_string).collect();
    if refusals.is_empty()
        && let Err(error) = cache.forget(&key)
    {
        refusals.push(error.to_string());
    }
    refusals
}
