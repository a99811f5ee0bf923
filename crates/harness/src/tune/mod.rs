//! Search for the best configurations, problem by problem: of the forward kernel in generations, of
//! the others among all that are near what the rules choose.
//!
//! | file | its subject |
//! | --- | --- |
//! | `space` | the search space |
//! | `cost` | a cost model from the simulator's counts |
//! | `search` | generations, successive halving, the last duel with the rules' choice |
//! | `log` | the configurations that were tried, to resume from |
//! | `effects` | the effect of each parameter on speed |
//! | `gpu` | compiling and measuring on a GPU |
//!
//! What is found is the [`TuningFile`] that the planner reads.

pub mod cost;
pub mod effects;
mod gpu;
pub mod log;
pub mod search;
pub mod space;

pub use gpu::GpuMeter;

use std::path::Path;

use flashcore::Problem;
use flashcore::family::tuning::{Entry, Tuning, TuningFile, Variant, bucket};
use flashcore::family::workload;
use flashcore::gpu::{Chip, Gpu};

use kernels::Configuration;

use crate::Error;
use crate::report::write;
use search::SearchResult;

/// The entry of a tuning file for what a search found; the file knows the forward kernel alone.
pub fn entry(found: &SearchResult, problem: &Problem, chip: &Chip) -> Option<Entry> {
    let Configuration::Forward(best) = &found.best else { return None };
    let workload = workload(chip, problem).ok()?;
    Some(Entry {
        bucket: bucket(&workload),
        variant: Variant::of(best),
        kernel: found.kernel.clone(),
        speedup: found.speedup,
        noise: found.noise,
    })
}

/// Puts entries into a tuning file, in place of those of the same buckets. The file is replaced as
/// a whole.
pub fn save(path: &Path, gpu: &Gpu, entries: Vec<Entry>) -> Result<(), Error> {
    let malformed = |reason: String| Error::Malformed { what: path.display().to_string(), reason };
    let mut file = TuningFile::read(path).map_err(malformed)?.unwrap_or_default();
    let (info, chip) = (gpu.info(), gpu.chip());
    let target = chip.target.to_string();
    let driver = info.driver.release.clone();
    let is_here = |it: &Tuning| {
        it.target == target
            && it.multiprocessors == chip.multiprocessors
            && it.driver == driver
            && it.gpu == info.name
    };
    let index = file.tunings.iter().position(is_here).unwrap_or_else(|| {
        file.tunings.push(Tuning {
            gpu: info.name.clone(),
            target: target.clone(),
            multiprocessors: chip.multiprocessors,
            driver: driver.clone(),
            entries: Vec::new(),
        });
        file.tunings.len() - 1
    });
    let tuning = &mut file.tunings[index];
    for entry in entries {
        tuning.entries.retain(|it| it.bucket != entry.bucket);
        tuning.entries.push(entry);
    }
    tuning.entries.sort_by(|a, b| a.bucket.cmp(&b.bucket));
    let text = serde_json::to_string_pretty(&file).map_err(|error| malformed(error.to_string()))?;
    if let Some(folder) = path.parent().filter(|it| !it.as_os_str().is_empty()) {
        let what = format!("cannot make {}", folder.display());
        std::fs::create_dir_all(folder).map_err(Error::io(what))?;
    }
    write(path, &(text + "\n"))
}
