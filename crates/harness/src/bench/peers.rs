//! Benchmarks of peers, with our kernels beside them, in one Python process.
//!
//! The process gets a job: our cubins with their launches, names of peers, and problems. It prints
//! one JSON object on each line; these become cells as they arrive.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use flashcore::family::tuning::fingerprint;
use flashcore::gpu::{Chip, Gpu};
use flashcore::{Mask, Pass, Plan, Problem};
use ptx::{Compiler, print_for};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{Candidate, Observer, Options};
use crate::Error;
use crate::auxiliary_inputs::AuxiliaryInputs;
use crate::report::{Cache, Cell, Measurement, Results};
use crate::subject::{LaunchDescription, flush_bytes, of_plan};

/// The program that the process runs.
const DRIVER: &str = include_str!("driver.py");

#[derive(Serialize)]
struct Job<'a> {
    rounds: usize,
    calls: usize,
    caches: &'a [Cache],
    seed: u64,
    flush_bytes: u64,
    /// Whether gradients are measured together with the forward pass before them.
    step: bool,
    /// Names in tables and the peers they mean.
    peers: BTreeMap<&'a str, &'static str>,
    /// Everyone, in the order of the first round.
    order: Vec<&'a str>,
    cells: Vec<CellJob>,
}

#[derive(Serialize)]
struct CellJob {
    problem: ProblemJob,
    ours: Vec<OursJob>,
}

#[derive(Serialize)]
struct ProblemJob {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    query_length: usize,
    key_length: usize,
    head_dim: usize,
    value_head_dim: usize,
    /// The element of the inputs, and that of the output.
    dtype: String,
    output: String,
    causal: bool,
    /// Keys before and after its position that a query sees, where there is a window; all of a
    /// side that has none.
    window: Option<[Option<usize>; 2]>,
    scale: f32,
    /// Where packed sequences begin, and the last ends.
    starts: Option<Vec<usize>>,
    /// Outputs, or gradients.
    pass: Pass,
}

#[derive(Serialize)]
struct OursJob {
    name: String,
    /// The kernel of attention among its launches.
    #[serde(skip)]
    kernel: String,
    /// One after the other.
    launches: Vec<LaunchJob>,
    /// Those of the forward pass, in a step.
    before: Vec<LaunchJob>,
}

#[derive(Serialize)]
struct LaunchJob {
    cubin: String,
    launch: LaunchDescription,
    #[serde(skip)]
    ptx: String,
}

/// An event that the process reports.
#[derive(Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Event {
    Begin {
        versions: BTreeMap<String, String>,
    },
    Cell {
        index: usize,
        cache: Cache,
        milliseconds: HashMap<String, Vec<f64>>,
        judged: HashMap<String, Judged>,
        refused: HashMap<String, String>,
    },
    Failed {
        index: usize,
        reason: String,
    },
    End,
}

#[derive(Deserialize)]
struct Judged {
    /// Absent where a value is not a number.
    error: Option<f64>,
    tolerance: f64,
    right: bool,
}

/// Measures. Takes the GPU by value, to release it before the other process needs its memory.
pub(super) fn run(
    gpu: Gpu,
    options: &Options,
    results: &mut Results,
    observer: &mut dyn Observer,
) -> Result<(), Error> {
    let folder = tempfile::tempdir().map_err(Error::io("cannot make a temporary folder"))?;
    let (cells, refusals) = compile(&gpu, options, folder.path())?;
    let names = |it: &'_ Candidate| Some((it.name.clone(), it.peer()?.name));
    let peers: Vec<(String, &'static str)> = options.candidates.iter().filter_map(names).collect();
    let job = Job {
        rounds: options.rounds,
        calls: options.calls,
        caches: &options.caches,
        seed: options.seed,
        flush_bytes: flush_bytes(&gpu),
        step: options.step,
        peers: peers.iter().map(|(name, peer)| (name.as_str(), *peer)).collect(),
        order: options.candidates.iter().map(|it| it.name.as_str()).collect(),
        cells,
    };
    drop(gpu);
    let write = |name: &str, text: &str| -> Result<std::path::PathBuf, Error> {
        let path = folder.path().join(name);
        std::fs::write(&path, text).map_err(Error::io("cannot write to a temporary folder"))?;
        Ok(path)
    };
    let driver = write("driver.py", DRIVER)?;
    let text = serde_json::to_string(&job).map_err(|error| Error::Malformed {
        what: "the job".to_owned(),
        reason: error.to_string(),
    })?;
    let job_file = write("job.json", &text)?;
    let mut process = Process::start(&options.python, &driver, &job_file)?;
    results.method.process = format!("{} with PyTorch", options.python.display());
    let cells = options.set.problems.iter().map(|it| match options.step {
        true => Cell::of_step(it),
        false => Cell::new(it),
    });
    let mut cells: Vec<Cell> = cells.collect::<Result<_, _>>()?;
    let mut missing = options.caches.len();
    while let Some(event) = process.next()? {
        match event {
            Event::Begin { versions } => results.provenance.versions.extend(versions),
            Event::Cell { index, cache, milliseconds, judged, refused } => {
                let Some(cell) = cells.get_mut(index) else { continue };
                take(cell, options, cache, milliseconds, &judged, &refused);
                label(cell, cache, &job.cells[index].ours, &refusals[index]);
                missing -= 1;
                if missing == 0 {
                    missing = options.caches.len();
                    observer.cell(results, cell);
                    results.cells.push(cell.clone());
                }
            }
            Event::Failed { index, reason } => {
                let problem = options.set.problems.get(index).map(Problem::text);
                let problem = problem.unwrap_or_default();
                observer.note(&format!("{problem}: {reason}"));
                missing = options.caches.len();
            }
            Event::End => return process.end(),
        }
    }
    Err(process.failure())
}

/// Our candidates that do not serve a problem, and why.
type Refusals = HashMap<String, String>;

/// Compiles what runs for every problem, on all cores, and writes the cubins. Beside the jobs,
/// for each problem: who of ours has no part in it, and why.
fn compile(
    gpu: &Gpu,
    options: &Options,
    folder: &Path,
) -> Result<(Vec<CellJob>, Vec<Refusals>), Error> {
    let chip = gpu.chip();
    // As the library launches, and `subject::launcher`.
    let programmatic = gpu.device().takes_programmatic_launches();
    let ours: Vec<&Candidate> =
        options.candidates.iter().filter(|it| it.peer().is_none()).collect();
    let mut texts: BTreeMap<String, String> = BTreeMap::new();
    let (mut cells, mut refusals) = (Vec::new(), Vec::new());
    for problem in &options.set.problems {
        let mut cell = CellJob { problem: ProblemJob::of(problem)?, ours: Vec::new() };
        let mut refused = HashMap::new();
        for candidate in &ours {
            let compiler = gpu.compiler();
            match describe(candidate, problem, options.step, &chip, compiler, folder) {
                Ok((mut job, its_texts)) => {
                    let launches = job.before.iter_mut().chain(&mut job.launches);
                    launches.for_each(|it| it.launch.programmatic &= programmatic);
                    texts.extend(its_texts);
                    cell.ours.push(job);
                }
                Err(reason) => {
                    refused.insert(candidate.name.clone(), reason);
                }
            }
        }
        cells.push(cell);
        refusals.push(refused);
    }
    let compile = |(path, text): (&String, &String)| -> Result<(), Error> {
        let cubin = gpu.device().compile_cached(text, gpu.cache())?;
        std::fs::write(path, &cubin.bytes).map_err(Error::io("cannot write to a temporary folder"))
    };
    texts.par_iter().map(compile).collect::<Result<(), _>>()?;
    Ok((cells, refusals))
}

/// The launches of a candidate for a problem, and the texts of its cubins.
fn describe(
    candidate: &Candidate,
    problem: &Problem,
    step: bool,
    chip: &Chip,
    compiler: Compiler,
    folder: &Path,
) -> Result<(OursJob, Vec<(String, String)>), String> {
    let mut texts = Vec::new();
    let mut launches = |plan: &Plan,
                        auxiliary: &AuxiliaryInputs|
     -> Result<Vec<LaunchJob>, String> {
        let mut jobs = Vec::new();
        for (program, launch) in of_plan(plan, auxiliary)? {
            let (ptx, text) = (fingerprint(&ptx::print(&program)), print_for(&program, compiler));
            let cubin = folder.join(format!("{}.cubin", program.name)).display().to_string();
            jobs.push(LaunchJob { cubin: cubin.clone(), launch, ptx });
            texts.push((cubin, text));
        }
        Ok(jobs)
    };
    let asked = if step { candidate.of_pass(problem.pass) } else { candidate.clone() };
    let (plan, auxiliary) = asked.plan(chip, problem)?;
    let before = match step {
        true => {
            let forward = problem.clone().forward();
            let (plan, auxiliary) = candidate.of_pass(Pass::Forward).plan(chip, &forward)?;
            launches(&plan, &auxiliary)?
        }
        false => Vec::new(),
    };
    let job = OursJob {
        name: candidate.name.clone(),
        kernel: plan.chosen.configuration.clone().unwrap_or_default(),
        launches: launches(&plan, &auxiliary)?,
        before,
    };
    Ok((job, texts))
}

impl ProblemJob {
    /// Packed sequences are one batch entry with the rows of all.
    fn of(problem: &Problem) -> Result<Self, Error> {
        let (query, key) = (problem.query_shape(), problem.key_shape());
        let queries = AuxiliaryInputs::of(problem)?.queries;
        let Mask { left, right, .. } = problem.mask;
        let plain = [Mask::NONE, Mask::CAUSAL].contains(&problem.mask);
        Ok(ProblemJob {
            batch: query.batch,
            heads: query.heads,
            kv_heads: key.heads,
            query_length: query.length,
            key_length: key.length,
            head_dim: problem.head_dim,
            value_head_dim: problem.value_head_dim,
            dtype: problem.dtype().to_string(),
            output: problem.dtypes.output.to_string(),
            causal: problem.mask == Mask::CAUSAL,
            window: (!plain).then_some([left, right]),
            scale: problem.scale(),
            starts: queries.and_then(|it| it.starts().map(<[usize]>::to_vec)),
            pass: problem.pass,
        })
    }
}

/// Turns what the process said of a problem into measurements.
fn take(
    cell: &mut Cell,
    options: &Options,
    cache: Cache,
    mut milliseconds: HashMap<String, Vec<f64>>,
    judged: &HashMap<String, Judged>,
    refused: &HashMap<String, String>,
) {
    for candidate in &options.candidates {
        let samples = milliseconds.remove(&candidate.name).unwrap_or_default();
        let mut measurement = Measurement::new(&candidate.name, cache, samples);
        if let Some(judged) = judged.get(&candidate.name) {
            measurement.right = Some(judged.right);
            measurement.error = judged.error.map(|error| [error, judged.tolerance]);
        }
        measurement.note = refused.get(&candidate.name).cloned();
        cell.measurements.push(measurement);
    }
}

/// Names the kernels of ours.
fn label(cell: &mut Cell, cache: Cache, ours: &[OursJob], refused: &HashMap<String, String>) {
    for measurement in cell.measurements.iter_mut().filter(|it| it.cache == cache) {
        let job = ours.iter().find(|job| job.name == measurement.candidate);
        if let Some(OursJob { kernel, launches, .. }) = job {
            let launch = launches.iter().find(|it| it.launch.entry == *kernel);
            measurement.kernel = Some(kernel.clone());
            measurement.ptx = launch.map(|it| it.ptx.clone());
        }
        if let Some(reason) = refused.get(&measurement.candidate) {
            measurement.note = Some(reason.clone());
        }
    }
}

/// The Python process.
struct Process {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    errors: Option<std::thread::JoinHandle<String>>,
}

impl Process {
    fn start(python: &Path, driver: &Path, job: &Path) -> Result<Self, Error> {
        let mut command = Command::new(python);
        command.arg(driver).arg(job).stdout(Stdio::piped()).stderr(Stdio::piped());
        let name = python.display();
        let mut child = command.spawn().map_err(Error::io(format!("cannot run {name}")))?;
        let output = child.stdout.take().expect("piped");
        let mut errors = child.stderr.take().expect("piped");
        let errors = std::thread::spawn(move || {
            let mut text = String::new();
            // What cannot be read is not worth an error of its own.
            let _ = errors.read_to_string(&mut text);
            text
        });
        Ok(Process { child, lines: BufReader::new(output).lines(), errors: Some(errors) })
    }

    /// Returns the next event, or None when the process has ended. Lines that are not JSON come
    /// from libraries and are skipped.
    fn next(&mut self) -> Result<Option<Event>, Error> {
        for line in self.lines.by_ref() {
            let line = line.map_err(Error::io("cannot read from Python"))?;
            if !line.starts_with('{') {
                continue;
            }
            let event = serde_json::from_str(&line).map_err(|error| Error::Malformed {
                what: "an answer of the Python process".to_owned(),
                reason: format!("{error} in {line}"),
            })?;
            return Ok(Some(event));
        }
        Ok(None)
    }

    fn end(mut self) -> Result<(), Error> {
        // The process reported that it was done: its exit status does not matter any more.
        let _ = self.child.wait();
        Ok(())
    }

    fn failure(mut self) -> Error {
        let status = self.child.wait();
        let errors = self.errors.take().and_then(|it| it.join().ok()).unwrap_or_default();
        let last = errors.lines().rev().find(|line| !line.trim().is_empty());
        let last = last.unwrap_or("it said nothing").to_owned();
        let status = status.map(|status| status.to_string()).unwrap_or_default();
        Error::Impossible(format!("the peers' Python process failed ({status}): {last}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_python_says_becomes_measurements() {
        let line = r#"{"event": "cell", "index": 0, "cache": "cold",
            "milliseconds": {"flashcore": [1.0, 1.1], "cudnn": [1.3, 1.3]},
            "judged": {"cudnn": {"error": 0.001, "tolerance": 0.01, "right": true}},
            "refused": {"fa3": "No module named 'fa3_fwd_interface'"}}"#;
        let event = serde_json::from_str(line).unwrap();
        let Event::Cell { cache, milliseconds, judged, refused, .. } = event else { panic!() };
        let options = Options {
            set: crate::problems::ProblemSet::find("small").unwrap(),
            candidates: ["flashcore", "cudnn", "fa3"]
                .map(|name| Candidate::parse(name).unwrap())
                .to_vec(),
            rounds: 2,
            caches: vec![Cache::Cold],
            calls: 1,
            seed: 0,
            step: false,
            python: "python3".into(),
        };
        let mut cell = Cell::new(&options.set.problems[0]).unwrap();
        take(&mut cell, &options, cache, milliseconds, &judged, &refused);
        assert_eq!(cell.measurements.len(), 3);
        assert_eq!(cell.find("cudnn", Cache::Cold).unwrap().right, Some(true));
        assert!(cell.find("fa3", Cache::Cold).is_none());
        assert!(cell.measurements[2].note.as_ref().unwrap().contains("fa3_fwd_interface"));
    }

    /// A step is the launches of both passes, whoever of ours is asked for.
    #[test]
    fn a_step_has_the_forward_pass_before_it() {
        let problem: Problem = "b=1,h=4,hk=2,s=512,d=128,bf16,causal,backward".parse().unwrap();
        for name in ["flashcore", "backward", "forward"] {
            let candidate = Candidate::parse(name).unwrap();
            let of = |step| {
                let compiler = ptx::Compiler::default();
                describe(&candidate, &problem, step, &Chip::H200, compiler, Path::new("/tmp"))
            };
            let (job, texts) = of(true).unwrap();
            let entries = |jobs: &[LaunchJob]| -> Vec<String> {
                jobs.iter().map(|it| it.launch.entry.clone()).collect()
            };
            let (before, launches) = (entries(&job.before), entries(&job.launches));
            assert!(before.len() == 1 && before[0].starts_with("forward_bf16_d128"), "{before:?}");
            assert!(launches.iter().any(|it| it.starts_with("backward_bf16_d128")), "{launches:?}");
            assert_eq!(texts.len(), before.len() + launches.len());
            let alone = of(false).map(|(job, _)| job.before.len());
            assert_eq!(alone.ok(), (name != "forward").then_some(0));
        }
        let cell = Cell::of_step(&problem).unwrap();
        assert_eq!(cell.problem, "b=1,h=4,hk=2,s=512,d=128,bf16,causal,step");
        assert_eq!(cell.parsed(), Some(problem.clone()));
        // Two products of the forward pass, five of the other.
        assert_eq!(cell.flops, 1.4 * Cell::new(&problem).unwrap().flops);
    }

    /// A process that dies is an error with its last words.
    #[test]
    fn the_last_words_of_a_process_are_told() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        std::fs::write(&script, "echo '{\"event\": \"end\"}'; echo no torch here >&2; exit 3")
            .unwrap();
        let mut process = Process::start(Path::new("sh"), &script, &script).unwrap();
        assert!(matches!(process.next().unwrap(), Some(Event::End)));
        assert!(process.next().unwrap().is_none());
        let message = process.failure().to_string();
        assert!(
            message.contains("exit status: 3") && message.ends_with("no torch here"),
            "{message}"
        );
    }
}
