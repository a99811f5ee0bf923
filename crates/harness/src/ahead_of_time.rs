//! Ahead-of-time assembly of kernels for a GPU that is not present.

use cuda::toolkit::{Options, Ptxas, Toolkit};
use cuda::{Cache, CacheKey, ComputeCapability, Driver, DriverVersion};
use flashcore::Progress;
use flashcore::gpu::{Chip, Warmed};
use kernels::Configuration;
use rayon::prelude::*;

use crate::Error;

/// The driver of another machine, as `flashcore doctor` tells it there: "12.8/570.124.06".
pub fn parse_driver(text: &str) -> Result<Driver, String> {
    let wrong =
        || format!("`{text}` is no driver such as 12.8/570.124.06: `flashcore doctor` tells");
    let (version, release) = match text.split_once('/') {
        Some((version, release)) => (version, Some(release.to_owned())),
        None => (text, None),
    };
    let (major, minor) = version.split_once('.').ok_or_else(wrong)?;
    let number = |text: &str| text.parse::<u32>().map_err(|_| wrong());
    let version = DriverVersion { major: number(major)?, minor: number(minor)? };
    if release.as_ref().is_some_and(String::is_empty) {
        return Err(wrong());
    }
    Ok(Driver { version, release })
}

/// The newest assembler whose machine code a driver takes; the newest of all where no driver is named.
pub fn assembler(driver: Option<&Driver>) -> Result<Ptxas, Error> {
    let toolkit = Toolkit::find();
    let known = |ptxas: &&Ptxas| {
        let version = (ptxas.version.major, ptxas.version.minor);
        driver.is_none_or(|it| version <= (it.version.major, it.version.minor))
    };
    if let Some(ptxas) = toolkit.assemblers.iter().filter(known).max_by_key(|it| it.version) {
        return Ok(ptxas.clone());
    }
    let reason = match (toolkit.ptxas(), driver) {
        (Ok(ptxas), Some(driver)) => format!(
            "ptxas {} is newer than the driver's CUDA {}, which would refuse its machine code",
            ptxas.version, driver.version
        ),
        (Ok(_), None) => "no ptxas can be used".to_owned(),
        (Err(missing), _) => missing.to_string(),
    };
    Err(Error::Impossible(reason))
}

/// Assembles kernels on all cores. With a driver, they are put where its machine will look for them in
/// a cache; without, they are assembled and forgotten.
pub fn assemble(
    configurations: &[Configuration],
    chip: &Chip,
    ptxas: &Ptxas,
    keep: Option<(&Cache, &Driver)>,
    progress: &dyn Progress,
) -> Result<Vec<Warmed>, Error> {
    let architecture = chip.target.architecture;
    let capability = ComputeCapability { major: architecture / 10, minor: architecture % 10 };
    let options = Options { keep_cubin: true, ..Options::default() };
    progress.begin(configurations.len() as u64);
    let assemble = |configuration: &Configuration| -> Result<Warmed, Error> {
        let begun = std::time::Instant::now();
        let text = ptx::print(&configuration.program()?);
        let compile = || -> Result<Vec<u8>, Error> {
            let assembled = ptxas.assemble(&text, &options);
            let assembled = assembled.map_err(|error| Error::Impossible(error.to_string()))?;
            Ok(assembled.cubin.unwrap_or_default())
        };
        let (cached, bytes, warnings) = match keep {
            Some((cache, driver)) => {
                // As the library compiles, and so as it looks for it.
                let key = CacheKey::new(&text, driver, capability);
                let entry = cache.get_or_compile(&key, compile)?;
                let warnings = entry.warnings.iter().map(ToString::to_string).collect();
                (entry.cached, entry.bytes.len(), warnings)
            }
            None => (false, compile()?.len(), Vec::new()),
        };
        progress.advance(1);
        let milliseconds = begun.elapsed().as_secs_f64() * 1e3;
        Ok(Warmed { name: configuration.name(), cached, milliseconds, bytes, warnings })
    };
    configurations.par_iter().map(assemble).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_are_read_as_doctor_writes_them() {
        let found = parse_driver("12.8/570.124.06").unwrap();
        assert_eq!(found.version, DriverVersion { major: 12, minor: 8 });
        assert_eq!(found.release.as_deref(), Some("570.124.06"));
        assert_eq!(parse_driver("13.0").unwrap().release, None);
        for wrong in ["", "12", "12.x", "12.8/", "a.b/c"] {
            assert!(parse_driver(wrong).unwrap_err().contains("flashcore doctor"), "{wrong}");
        }
    }
}
