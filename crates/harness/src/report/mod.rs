//! Results of benchmarks: as data, as an HTML page with plots, and the comparison of two runs.

pub mod chart;
pub mod compare;
pub mod html;
pub(crate) mod svg;

use std::path::Path;

use flashcore::{DType, Problem};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::auxiliary_inputs::AuxiliaryInputs;
use crate::provenance::Provenance;
use crate::statistics::{Difference, Summary};

/// The suffix of a problem's text if it was measured as a step of forward and backward pass.
const STEP: &str = ",step";

/// The results of a run of `flashcore bench`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// The form of this file; see [`Results::FORM`].
    pub form: u32,
    /// Machine, versions and date.
    pub provenance: Provenance,
    /// How it was measured.
    pub method: Method,
    /// Every candidate, in the order in which they are shown.
    pub candidates: Vec<CandidateNote>,
    /// What was measured, problem by problem.
    pub cells: Vec<Cell>,
}

/// How samples were taken.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Method {
    /// The set of problems.
    pub set: String,
    /// Samples of each candidate, one to a round.
    pub rounds: usize,
    /// Calls of each sample: one, or the calls of a captured graph.
    pub calls: usize,
    /// The process that took the samples.
    pub process: String,
    /// How long it all took, in seconds.
    pub seconds: f64,
}

/// A candidate of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CandidateNote {
    /// Its name.
    pub name: String,
    /// Whether it is a peer's, not ours.
    pub peer: bool,
    /// What it is.
    pub about: String,
}

/// One problem, and the measurements of all candidates.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// The problem as its text.
    pub problem: String,
    /// Floating-point operations by the published convention.
    pub flops: f64,
    /// Bytes that must cross the memory bus.
    pub bytes: f64,
    /// One for each candidate and state of the caches.
    pub measurements: Vec<Measurement>,
}

/// The measurement of one candidate on one problem.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// The candidate's name.
    pub candidate: String,
    /// Whether the second-level cache was flushed before each call.
    pub cache: Cache,
    /// Which configuration ran, where it is ours.
    pub kernel: Option<String>,
    /// The hash of its PTX.
    pub ptx: Option<String>,
    /// Milliseconds of one call, by round; empty if it was refused.
    pub samples: Vec<f64>,
    /// The summary of the samples.
    pub summary: Option<Summary>,
    /// Whether the output of a timed call, chosen at random, was right.
    pub right: Option<bool>,
    /// Its largest error, and the largest that passes.
    pub error: Option<[f64; 2]>,
    /// Why there are no samples, or what else there is to say.
    pub note: Option<String>,
}

/// The state of the second-level cache before a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// Flushed.
    Cold,
    /// As the same call before left it.
    Hot,
}

impl Cache {
    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Cache::Cold => "cold",
            Cache::Hot => "hot",
        }
    }
}

impl Results {
    /// The form that this version reads and writes.
    pub const FORM: u32 = 1;

    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let what = path.display().to_string();
        let text =
            std::fs::read_to_string(path).map_err(Error::io(format!("cannot read {what}")))?;
        let results: Results = serde_json::from_str(&text).map_err(|error| Error::Malformed {
            what: what.clone(),
            reason: format!("these are no results of flashcore bench: {error}"),
        })?;
        if results.form != Results::FORM {
            let reason = format!("results of form {}, not {}", results.form, Results::FORM);
            return Err(Error::Malformed { what, reason });
        }
        Ok(results)
    }

    /// The state of the caches that tables and plots show: cold where it was measured.
    pub(crate) fn shown_cache(&self) -> Cache {
        let all = self.cells.iter().flat_map(|cell| &cell.measurements);
        all.map(|it| it.cache).min().unwrap_or(Cache::Cold)
    }

    /// Our first candidate.
    pub fn our_candidate(&self) -> Option<&str> {
        self.candidates.iter().find(|it| !it.peer).map(|it| it.name.as_str())
    }

    /// Measurements that no hardware could have made: above the roofline.
    pub fn above_roofline(&self) -> Vec<String> {
        let Some(gpu) = &self.provenance.gpu else { return Vec::new() };
        let mut found = Vec::new();
        for cell in &self.cells {
            let peak = gpu.peak_tflops(cell.parsed().map_or(DType::BF16, |it| it.dtype()));
            for it in &cell.measurements {
                let speed = it.tflops(cell).filter(|speed| *speed > peak);
                found.extend(speed.map(|speed| {
                    let Measurement { candidate, .. } = it;
                    let problem = &cell.problem;
                    format!("{candidate} on {problem}: {speed:.0} TFLOP/s, and {peak:.0} is all there is")
                }));
            }
        }
        found
    }

    /// Measurements whose output was wrong.
    pub fn wrong_outputs(&self) -> Vec<String> {
        let of = |cell: &Cell| {
            let wrong = cell.measurements.iter().filter(|it| it.right == Some(false));
            let text = |it: &Measurement| format!("{} on {}", it.candidate, cell.problem);
            wrong.map(text).collect::<Vec<_>>()
        };
        self.cells.iter().flat_map(of).collect()
    }

    /// The ratios of our first candidate to the best peer, cell by cell.
    pub fn ratios(&self) -> Vec<(&Cell, Ratio)> {
        let cache = self.shown_cache();
        let our_candidate = self.our_candidate().unwrap_or_default();
        let of = |cell| Some((cell, self.ratio(cell, our_candidate, cache)?));
        self.cells.iter().filter_map(of).collect()
    }

    /// How much faster than the best peer a candidate is on a problem.
    pub fn ratio(&self, cell: &Cell, candidate: &str, cache: Cache) -> Option<Ratio> {
        let own = cell.find(candidate, cache)?;
        let peers = self.candidates.iter().filter(|it| it.peer && it.name != candidate);
        let peers = peers.filter_map(|it| cell.find(&it.name, cache));
        let best = peers.min_by(|a, b| a.median().total_cmp(&b.median()))?;
        let difference = Difference::between(&own.samples, &best.samples);
        Some(Ratio {
            peer: best.candidate.clone(),
            ratio: difference.ratio,
            noise: difference.noise,
        })
    }
}

/// A candidate against the best peer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ratio {
    /// The best peer.
    pub peer: String,
    /// Its time over ours.
    pub ratio: f64,
    /// The noise of the ratio.
    pub noise: f64,
}

impl Cell {
    /// An empty cell.
    pub fn new(problem: &Problem) -> Result<Self, Error> {
        let auxiliary = AuxiliaryInputs::of(problem)?;
        Ok(Cell {
            problem: problem.text(),
            flops: auxiliary.flops(problem, Problem::flops),
            bytes: auxiliary.least_bytes(problem),
            measurements: Vec::new(),
        })
    }

    /// The gradients of a problem together with the forward pass before them, without measurements.
    pub(crate) fn of_step(problem: &Problem) -> Result<Self, Error> {
        let forward = problem.clone().forward();
        let (before, backward) = (Cell::new(&forward)?, Cell::new(&forward.backward())?);
        Ok(Cell {
            problem: before.problem + STEP,
            flops: before.flops + backward.flops,
            bytes: before.bytes + backward.bytes,
            measurements: Vec::new(),
        })
    }

    /// The problem itself; of a step, the one of its gradients.
    pub fn parsed(&self) -> Option<Problem> {
        match self.problem.strip_suffix(STEP) {
            Some(forward) => forward.parse().ok().map(Problem::backward),
            None => self.problem.parse().ok(),
        }
    }

    /// The measurement of a candidate, if there is one with samples.
    pub fn find(&self, candidate: &str, cache: Cache) -> Option<&Measurement> {
        let is_it = |it: &&Measurement| it.candidate == candidate && it.cache == cache;
        self.measurements.iter().find(is_it).filter(|it| !it.samples.is_empty())
    }
}

impl Measurement {
    /// A measurement from samples.
    pub fn new(candidate: &str, cache: Cache, samples: Vec<f64>) -> Self {
        Measurement {
            candidate: candidate.to_owned(),
            cache,
            kernel: None,
            ptx: None,
            summary: (!samples.is_empty()).then(|| Summary::of(&samples)),
            samples,
            right: None,
            error: None,
            note: None,
        }
    }

    /// The median in milliseconds; infinite if there is none.
    pub fn median(&self) -> f64 {
        self.summary.map_or(f64::INFINITY, |summary| summary.median)
    }

    /// The speed, by the published count of operations.
    pub fn tflops(&self, cell: &Cell) -> Option<f64> {
        self.summary.map(|summary| cell.flops / summary.median / 1e9)
    }
}

/// Writes a file atomically, and leaves nothing behind where that fails. A link, a device or a pipe is
/// written to, not replaced.
pub fn write(path: &Path, text: &str) -> Result<(), Error> {
    let what = || format!("cannot write {}", path.display());
    if path.symlink_metadata().is_ok_and(|found| !found.is_file()) {
        return std::fs::write(path, text).map_err(Error::io(what()));
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}", std::process::id()));
    let written = std::fs::write(&beside, text).and_then(|()| std::fs::rename(&beside, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&beside);
    }
    written.map_err(Error::io(what()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problems::ProblemSet;
    use crate::provenance::GpuFound;
    use crate::statistics::Random;

    /// Results that look like those of a GPU: each candidate by its time relative to ours.
    pub(super) fn results(candidates: &[(&str, f64)], seed: u64) -> Results {
        let mut random = Random::new(seed);
        let cell = |problem: &Problem| {
            let mut cell = Cell::new(problem).unwrap();
            let base = problem.flops() / 600e9 + 0.004;
            for (name, factor) in candidates {
                let sample = |random: &mut Random| base * factor * (1.0 + 0.005 * random.normal());
                let samples = (0..11).map(|_| sample(&mut random)).collect();
                let mut measurement = Measurement::new(name, Cache::Cold, samples);
                measurement.right = Some(true);
                cell.measurements.push(measurement);
            }
            cell
        };
        let set = ProblemSet::find("paper").unwrap();
        let gpu = GpuFound {
            name: "NVIDIA H200".to_owned(),
            uuid: "GPU-0".to_owned(),
            driver: "CUDA 13.0, release 580.159.04".to_owned(),
            multiprocessors: 132,
            clock_megahertz: 1980.0,
            l2_bytes: 50 << 20,
        };
        Results {
            form: Results::FORM,
            provenance: Provenance { gpu: Some(gpu), ..Provenance::default() },
            method: Method {
                set: set.name,
                rounds: 11,
                calls: 1,
                process: "a test".to_owned(),
                seconds: 1.0,
            },
            candidates: candidates
                .iter()
                .map(|(name, _)| CandidateNote {
                    name: (*name).to_owned(),
                    peer: *name != "flashcore",
                    about: String::new(),
                })
                .collect(),
            cells: set.problems.iter().map(cell).collect(),
        }
    }

    #[test]
    fn ratios_are_to_the_best_peer() {
        let results = results(&[("flashcore", 1.0), ("cudnn", 1.3), ("fa3", 1.1)], 5);
        let ratios = results.ratios();
        assert_eq!(ratios.len(), 36);
        for (_, ratio) in ratios {
            assert_eq!(ratio.peer, "fa3");
            assert!((ratio.ratio - 1.1).abs() < 0.02 && ratio.noise < 0.02, "{ratio:?}");
        }
    }

    #[test]
    fn nothing_above_the_roofline_is_believed() {
        let mut results = results(&[("flashcore", 1.0)], 5);
        assert_eq!(results.above_roofline(), Vec::<String>::new());
        let cell = &mut results.cells[35];
        let impossible = cell.flops / 1200e9;
        cell.measurements[0] = Measurement::new("flashcore", Cache::Cold, vec![impossible; 5]);
        assert!(results.above_roofline()[0].contains("1200 TFLOP/s"));
        // Twice as much is possible with 8-bit queries, but not with an 8-bit cache alone.
        for (types, tflops, believed) in [
            ("e4m3", 1200.0, true),
            ("e4m3", 2200.0, false),
            ("q=bf16,k=e4m3,v=e4m3,o=bf16", 1200.0, false),
        ] {
            let problem = format!("b=2,h=16,s=8192,d=128,{types}").parse().unwrap();
            let mut cell = Cell::new(&problem).unwrap();
            let samples = vec![cell.flops / (tflops * 1e9); 5];
            cell.measurements = vec![Measurement::new("flashcore", Cache::Cold, samples)];
            results.cells = vec![cell];
            assert_eq!(results.above_roofline().is_empty(), believed, "{types} {tflops}");
        }
    }

    #[test]
    fn files_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.json");
        let written = results(&[("flashcore", 1.0)], 5);
        write(&path, &serde_json::to_string(&written).unwrap()).unwrap();
        assert_eq!(Results::read(&path).unwrap(), written);
        write(&path, "{}").unwrap();
        let message = Results::read(&path).unwrap_err().to_string();
        assert!(message.contains("these are no results of flashcore bench"), "{message}");
    }

    #[cfg(unix)]
    #[test]
    fn a_link_is_followed_when_a_file_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let (plain, link) = (folder.path().join("plain"), folder.path().join("link"));
        std::os::unix::fs::symlink(&plain, &link).unwrap();
        for text in ["new", "again"] {
            write(&link, text).unwrap();
            assert!(link.is_symlink());
            assert_eq!(std::fs::read_to_string(&plain).unwrap(), text);
        }
    }
}
