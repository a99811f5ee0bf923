//! Tuning files: configurations that a search found to be faster than those of the rules, by shape.
//!
//! A file holds results from one or several GPUs. An entry is used where the GPU, the driver and
//! the kernel's PTX are those it was measured with and the problem falls into its bucket; otherwise
//! the rules of [`tuned`](kernels::forward::tuned) decide. The source of a choice is part of its
//! reason.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use kernels::Forward;
use kernels::forward::{Form, Tuned, Workload};
use kernels::product::Source;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::chip::Chip;

/// The environment variable that names a tuning file, or is `off`.
const VARIABLE: &str = "FLASHCORE_TUNING";

/// Name of the file in the kernel cache's folder, used where the variable is not set.
const FILE: &str = "tuning.json";

/// The tuning file that ships with the library, measured on an H200.
const SHIPPED: &str = include_str!("shipped_tuning.json");

/// A configuration and why it was chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The configuration to build.
    pub configuration: Forward,
    /// The reason, in a few words.
    pub reason: Cow<'static, str>,
}

impl From<Tuned> for Choice {
    fn from(tuned: Tuned) -> Self {
        Choice { configuration: tuned.configuration, reason: tuned.reason.into() }
    }
}

/// The contents of a tuning file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TuningFile {
    /// Version of the file format: [`TuningFile::FORM`].
    pub form: u32,
    /// The results, one item per GPU.
    pub tunings: Vec<Tuning>,
}

/// The results from one GPU with one driver.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuning {
    /// Name of the GPU, for readers.
    pub gpu: String,
    /// PTX target that its programs are built for.
    pub target: String,
    /// Number of its multiprocessors.
    pub multiprocessors: u32,
    /// Release of the driver; any when `None`.
    pub driver: Option<String>,
    /// The best configuration of each bucket.
    pub entries: Vec<Entry>,
}

/// The best configuration of a bucket.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The problems that it applies to: see [`bucket`].
    pub bucket: String,
    /// The configuration.
    pub variant: Variant,
    /// The [`fingerprint`] of the PTX that was measured.
    pub kernel: String,
    /// Speed relative to the configuration that the rules choose.
    pub speedup: f64,
    /// Uncertainty of the speedup.
    pub noise: f64,
}

/// The part of a configuration that a search may vary: everything that the problem does not
/// determine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variant {
    /// Number of consumer warpgroups.
    pub warpgroups: u32,
    /// Keys per key block.
    pub key_block: u32,
    /// Pipeline stages of keys and of values.
    pub stages: u32,
    /// Number of query tiles in shared memory.
    pub query_buffers: u32,
    /// Whether the query operand of the products is in registers.
    pub query_registers: bool,
    /// Whether warpgroups take turns at the tensor cores (ping-pong).
    pub turns: bool,
    /// Whether the first scores of a tile are computed while the previous tile is stored.
    pub overlap_tiles: bool,
    /// Whether the body of the main loop is two steps, which lets two sets of registers for
    /// probabilities alternate.
    pub two_steps: bool,
    /// Whether the guard's slow path has its own copy of the exponentials, instead of going back to
    /// those of the fast path.
    pub slow_path_apart: bool,
}

impl Variant {
    /// Returns the varied part of a configuration.
    pub fn of(forward: &Forward) -> Self {
        Variant {
            warpgroups: forward.warpgroups,
            key_block: forward.key_block,
            stages: forward.stages,
            query_buffers: forward.query_buffers,
            query_registers: forward.query_source == Source::Registers,
            turns: forward.ping_pong,
            overlap_tiles: forward.form.overlap_tiles,
            two_steps: forward.form.two_steps,
            slow_path_apart: forward.form.slow_path_apart,
        }
    }

    /// Returns a configuration with this variant, for the problem of `base`.
    pub fn configuration(&self, base: &Forward) -> Forward {
        Forward {
            warpgroups: self.warpgroups,
            key_block: self.key_block,
            stages: self.stages,
            query_buffers: self.query_buffers,
            query_source: if self.query_registers { Source::Registers } else { Source::Shared },
            ping_pong: self.turns,
            form: Form {
                overlap_tiles: self.overlap_tiles,
                two_steps: self.two_steps,
                slow_path_apart: self.slow_path_apart,
            },
            ..*base
        }
    }
}

impl Default for TuningFile {
    /// Returns a file without results.
    fn default() -> Self {
        TuningFile { form: TuningFile::FORM, tunings: Vec::new() }
    }
}

impl TuningFile {
    /// The format version that this crate reads and writes.
    pub const FORM: u32 = 2;

    /// Returns the path that the environment gives; `None` where tuning files are switched off or
    /// there is no cache.
    pub fn location() -> Option<PathBuf> {
        match std::env::var_os(VARIABLE) {
            Some(value) if value.is_empty() || value == "off" => None,
            Some(value) => Some(value.into()),
            None => cache_folder().map(|folder| folder.join(FILE)),
        }
    }

    /// Parses a file's text, or says what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let file: TuningFile = serde_json::from_str(text).map_err(|error| error.to_string())?;
        match file.form {
            TuningFile::FORM => Ok(file),
            form => Err(format!("it is of form {form}, not {}", TuningFile::FORM)),
        }
    }

    /// Reads a file; `None` where it does not exist.
    pub fn read(path: &Path) -> Result<Option<Self>, String> {
        match std::fs::read_to_string(path) {
            Ok(text) => TuningFile::parse(&text).map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Returns the entry for a workload, if there is one for this GPU and driver.
    fn find(&self, chip: &Chip, driver: Option<&str>, workload: &Workload) -> Option<&Entry> {
        let target = chip.target.to_string();
        let bucket = bucket(workload);
        let here = |tuning: &&Tuning| {
            tuning.target == target
                && tuning.multiprocessors == chip.multiprocessors
                // Without a driver, plans are only inspected, never run.
                && (driver.is_none() || tuning.driver.is_none() || tuning.driver.as_deref() == driver)
        };
        let mut entries = self.tunings.iter().filter(here).flat_map(|tuning| &tuning.entries);
        entries.find(|entry| entry.bucket == bucket)
    }
}

/// Returns the name of the group of problems that share an entry: element type, head dims, mask,
/// length up to a power of two (the shorter of queries and keys), and whether they leave most of
/// the GPU idle.
pub fn bucket(workload: &Workload) -> String {
    let Workload { element, head_dim, value_head_dim, rules, .. } = workload;
    let mask = rules.name();
    let length = workload.query_length.min(workload.key_length).max(1).next_power_of_two();
    let few = if workload.is_small() { ",few" } else { "" };
    format!("{element},d={head_dim},dv={value_head_dim},{mask},s<={length}{few}")
}

/// Returns a stable name of a PTX text: the first 8 bytes of its SHA-256.
pub fn fingerprint(ptx: &str) -> String {
    let digest = Sha256::digest(ptx.as_bytes());
    digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the folder of compiled kernels, if there is one.
#[cfg(feature = "cuda")]
fn cache_folder() -> Option<PathBuf> {
    cuda::Cache::from_environment().directory().map(Path::to_owned)
}

/// Returns the release of the driver, if there is one.
#[cfg(feature = "cuda")]
fn driver_release() -> Option<String> {
    cuda::Driver::probe().ok().and_then(|driver| driver.release.clone())
}

#[cfg(not(feature = "cuda"))]
fn cache_folder() -> Option<PathBuf> {
    None
}

#[cfg(not(feature = "cuda"))]
fn driver_release() -> Option<String> {
    None
}

/// The tuning files that this process uses.
#[derive(Debug)]
pub(super) struct Tunings {
    /// The files with the names that reasons call them by, in order of precedence.
    files: Vec<(String, TuningFile)>,
    /// Why a file that should be there cannot be read.
    complaint: Option<String>,
    driver: Option<String>,
    /// Whether an entry was measured with the current kernel, by configuration and fingerprint.
    current: Mutex<HashMap<(Forward, String), bool>>,
}

impl Tunings {
    fn new(files: Vec<(String, TuningFile)>, driver: Option<String>) -> Self {
        Tunings { files, complaint: None, driver, current: Mutex::default() }
    }

    /// Returns the files that the environment names and the shipped one, read once per process.
    pub(super) fn of_this_process() -> &'static Tunings {
        static TUNINGS: OnceLock<Tunings> = OnceLock::new();
        TUNINGS.get_or_init(|| {
            let mut files = Vec::new();
            let mut complaint = None;
            if let Some(path) = TuningFile::location() {
                match TuningFile::read(&path) {
                    Ok(found) => files.extend(found.map(|file| (path.display().to_string(), file))),
                    Err(error) => {
                        complaint = Some(format!("{} is ignored: {error}", path.display()));
                    }
                }
            }
            let shipped = TuningFile::parse(SHIPPED).unwrap_or_default();
            files.push(("the tuning that ships".to_owned(), shipped));
            Tunings { complaint, ..Tunings::new(files, driver_release()) }
        })
    }

    /// Returns the best known configuration for a workload.
    pub(super) fn choose(&self, chip: &Chip, workload: &Workload, rules: Tuned) -> Choice {
        let mut choice = Choice::from(rules);
        for (name, file) in &self.files {
            let Some(entry) = file.find(chip, self.driver.as_deref(), workload) else { continue };
            let configuration = entry.variant.configuration(&rules.configuration);
            if self.is_current(configuration, &entry.kernel) {
                let percent = 100.0 * (entry.speedup - 1.0);
                choice.configuration = configuration;
                choice.reason = format!(
                    "{name} has it for {}: {percent:.1} % faster than the rules' choice",
                    entry.bucket
                )
                .into();
                break;
            }
            let stale = format!("; {name} has an entry for another version of the kernel");
            choice.reason.to_mut().push_str(&stale);
        }
        if let Some(complaint) = &self.complaint {
            choice.reason.to_mut().push_str(&format!("; {complaint}"));
        }
        choice
    }

    /// Tells whether a configuration still prints the PTX that was measured.
    fn is_current(&self, configuration: Forward, kernel: &str) -> bool {
        let key = (configuration, kernel.to_owned());
        let mut known = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        *known.entry(key).or_insert_with(|| {
            let program = configuration.program();
            program.is_ok_and(|program| fingerprint(&ptx::print(&program)) == kernel)
        })
    }
}

#[cfg(test)]
mod tests {
    use kernels::Rules;
    use kernels::forward::tuned;
    use ptx::Element;

    use super::*;

    fn workload() -> Workload {
        Workload {
            element: Element::BF16,
            head_dim: 128,
            value_head_dim: 128,
            rules: Rules::DENSE,
            query_length: 8000,
            key_length: 8000,
            heads: 32,
            multiprocessors: 132,
        }
    }

    fn entry(rules: &Forward) -> Entry {
        let variant = Variant { key_block: 80, query_buffers: 1, ..Variant::of(rules) };
        let program = variant.configuration(rules).program().unwrap();
        Entry {
            bucket: "bf16,d=128,dv=128,dense,s<=8192".to_owned(),
            variant,
            kernel: fingerprint(&ptx::print(&program)),
            speedup: 1.02,
            noise: 0.005,
        }
    }

    fn file(entry: Entry, driver: Option<&str>) -> TuningFile {
        let tuning = Tuning {
            gpu: "NVIDIA H200".to_owned(),
            target: "sm_90a".to_owned(),
            multiprocessors: 132,
            driver: driver.map(str::to_owned),
            entries: vec![entry],
        };
        TuningFile { tunings: vec![tuning], ..TuningFile::default() }
    }

    fn choose(file: TuningFile, driver: Option<&str>, workload: &Workload) -> Choice {
        let tunings = Tunings::new(vec![("here".to_owned(), file)], driver.map(str::to_owned));
        tunings.choose(&Chip::H200, workload, tuned(workload).unwrap())
    }

    #[test]
    fn an_entry_overrides_the_rules_and_says_so() {
        let rules = tuned(&workload()).unwrap().configuration;
        let choice = choose(file(entry(&rules), Some("580.1")), Some("580.1"), &workload());
        assert_eq!(choice.configuration.key_block, 80);
        assert!(choice.reason.contains("here has it for bf16,d=128"), "{}", choice.reason);
        let longer = Workload { query_length: 8193, key_length: 8193, ..workload() };
        let other = choose(file(entry(&rules), None), None, &longer);
        assert_eq!(other, tuned(&longer).unwrap().into());
    }

    #[test]
    fn entries_of_another_gpu_driver_or_kernel_are_not_used() {
        let rules = tuned(&workload()).unwrap();
        let good = entry(&rules.configuration);
        let other_driver = file(good.clone(), Some("570.0"));
        assert_eq!(choose(other_driver, Some("580.1"), &workload()), rules.into());
        let mut other_gpu = file(good.clone(), None);
        other_gpu.tunings[0].multiprocessors = 114;
        assert_eq!(choose(other_gpu, None, &workload()), rules.into());
        let stale = file(Entry { kernel: "0".to_owned(), ..good }, None);
        let choice = choose(stale, None, &workload());
        assert_eq!(choice.configuration, rules.configuration);
        assert!(choice.reason.ends_with("an entry for another version of the kernel"));
    }

    #[test]
    fn files_are_read_as_they_are_written() {
        let rules = tuned(&workload()).unwrap().configuration;
        let file = file(entry(&rules), Some("580.1"));
        let text = serde_json::to_string(&file).unwrap();
        assert_eq!(TuningFile::parse(&text), Ok(file));
        assert!(
            TuningFile::parse("{\"form\": 9, \"tunings\": []}").unwrap_err().contains("form 9")
        );
        assert_eq!(TuningFile::read(Path::new("/nowhere/at/all")), Ok(None));
    }

    /// The shipped file parses, and every entry was measured with the current kernel.
    #[test]
    fn the_shipped_tuning_is_current() {
        let shipped = TuningFile::parse(SHIPPED).unwrap();
        let tunings = Tunings::new(Vec::new(), None);
        for entry in shipped.tunings.iter().flat_map(|tuning| &tuning.entries) {
            let text = entry.bucket.split(',').collect::<Vec<_>>();
            let number = |prefix: &str| -> u32 {
                let word = text.iter().find_map(|word| word.strip_prefix(prefix));
                word.unwrap().parse().unwrap()
            };
            let workload = Workload {
                element: if text[0] == "bf16" { Element::BF16 } else { Element::F16 },
                head_dim: number("d="),
                value_head_dim: number("dv="),
                rules: if text[3] == "causal" { Rules::CAUSAL } else { Rules::DENSE },
                query_length: number("s<=").into(),
                key_length: number("s<=").into(),
                ..workload()
            };
            let rules = tuned(&workload).unwrap().configuration;
            let configuration = entry.variant.configuration(&rules);
            assert!(tunings.is_current(configuration, &entry.kernel), "{}", entry.bucket);
        }
    }
}
