//! Soak tests: random problems for a long time, every answer checked, while faults are injected.
//!
//! | file | its subject |
//! | --- | --- |
//! | `case` | the random problems |
//! | `session` | computes the answers: on a GPU, or on the CPU while kernels are planned, printed and cached as for a GPU |
//! | `device` | problems on a GPU, reusing memory and plans |
//! | `fault` | the injected faults, and how each must be survived |
//! | `shortage` | periods without device memory |
//! | `leaks` | memory and handles over time |

mod case;
mod device;
mod fault;
mod leaks;
mod session;
mod shortage;

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use flashcore::serving::Sequences;
use flashcore::{Backward, DType, InputTensors, Inputs, Pass, Problem, Progress, Tensor};
use serde::Serialize;
use testing::compare_gradients;
use testing::reference::{self, Heads};
use testing::verdict::GradientsToJudge;

pub use fault::{Fault, FaultReport};
pub use leaks::{ResourceUsage, UsageReport};

use self::case::Case;
use self::device::is_out_of_memory;
use self::fault::FaultInjector;
use self::leaks::LeakDetector;
use self::session::{Answer as SessionAnswer, PassInputs, Session, Texts, lock};
use self::shortage::Shortage;
use crate::Error;
use crate::auxiliary_inputs::AuxiliaryInputs;
use crate::statistics::Random;
use crate::verify::{ExpectedOutput, floats, tensor};

/// Options of a soak.
#[derive(Debug, Clone)]
pub struct Options {
    /// Duration; unlimited if None and a number of problems is given.
    pub duration: Option<Duration>,
    /// How many problems at most.
    pub problems: Option<u64>,
    /// The number of the first problem.
    pub first: u64,
    /// Seed of the problems.
    pub seed: u64,
    /// On the GPU, or on the CPU.
    pub gpu: bool,
    /// The faults that are injected.
    pub faults: Vec<Fault>,
    /// The program whose `soak` can be run in processes beside this one.
    pub program: Option<PathBuf>,
    /// The cache's directory; None makes a temporary one.
    pub cache: Option<PathBuf>,
    /// Whether the device context is lost at the end, to see what happens then.
    pub lose_context: bool,
}

/// The result of a soak.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// Whether nothing was wrong, every fault survived, and nothing grew.
    pub passed: bool,
    /// The seed of its problems.
    pub seed: u64,
    /// Problems that were answered and checked.
    pub problems: u64,
    /// Rows of the softmax that were compared with the reference.
    pub rows: u64,
    /// How long it took.
    pub seconds: f64,
    /// The number of problems that each kernel served.
    pub kernels: BTreeMap<String, u64>,
    /// Problems whose answer was wrong, or that were not answered.
    pub failures: Vec<Failure>,
    /// The faults that were injected, and how they were survived.
    pub faults: Vec<FaultReport>,
    /// How often the cache complained.
    pub cache_warnings: u64,
    /// Answers that waited until there was device memory again.
    pub waited_for_memory: u64,
    /// Memory and handles; None if the system does not report them.
    pub held: Option<UsageReport>,
}

/// A problem with a wrong answer, or with none.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Failure {
    /// Its number in the soak.
    pub number: u64,
    /// Its text.
    pub problem: String,
    /// The seed of its tensors.
    pub seed: u64,
    /// Which kernel, where one answered.
    pub kernel: Option<String>,
    /// What is wrong.
    pub reason: String,
    /// The command that computes it again.
    pub replay: String,
}

/// Floating-point operations of a reference: more, and a sample of the rows is compared.
const OPERATIONS: f64 = 2e7;
/// The maximum number of failures that are recorded.
const MOST_FAILURES: usize = 20;
/// How often memory and handles are looked at.
const TICK: Duration = Duration::from_millis(100);
/// The pause between two faults.
const PAUSE_BETWEEN_FAULTS: Duration = Duration::from_millis(500);

/// Runs a soak. `note` is called with each failure as it occurs.
pub fn run(
    options: &Options,
    progress: &dyn Progress,
    note: &(dyn Fn(&str) + Sync),
) -> Result<Summary, Error> {
    let own = match &options.cache {
        Some(_) => None,
        None => Some(tempfile::tempdir().map_err(Error::io("cannot make a cache"))?),
    };
    let folder = own.as_ref().map(|it| it.path().join("cache"));
    let cache = options.cache.clone().or(folder).unwrap_or_default();
    let (texts, shortage) = (Texts::default(), Shortage::default());
    let injector = FaultInjector {
        cache: cache.clone(),
        gpu: options.gpu,
        seed: options.seed,
        texts: &texts,
        program: options.program.as_deref(),
        shortage: &shortage,
    };
    let session = Session::open(&cache, options.gpu, &texts)?;
    let soak = Soak {
        options,
        session: &session,
        begun: Instant::now(),
        next: AtomicU64::new(options.first),
        stop: AtomicBool::new(false),
        shortage: &shortage,
        tally: Mutex::default(),
        note,
    };
    let mut leaks = LeakDetector::default();
    let mut faults: Vec<FaultReport> = Vec::new();
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(|| soak.work())).collect();
        let injecting = scope.spawn(|| {
            let mut random = Random::new(options.seed);
            soak.inject_faults(|fault| injector.inject(fault, &mut random))
        });
        soak.monitor(&mut leaks, progress, || workers.iter().all(|it| it.is_finished()));
        soak.stop.store(true, Ordering::SeqCst);
        faults = injecting.join().unwrap_or_else(|panic| resume_unwind(panic));
    });
    let seconds = soak.begun.elapsed().as_secs_f64();
    if options.lose_context {
        lose_context(&session, options.seed)?;
    }
    let tally = lock(&soak.tally).clone();
    let held = leaks.report();
    let passed = tally.failures.is_empty()
        && faults.iter().all(|it| it.survived == it.times)
        && held.as_ref().is_none_or(|held| held.growth.is_empty());
    Ok(Summary {
        passed,
        seed: options.seed,
        problems: tally.problems,
        rows: tally.rows,
        seconds,
        kernels: tally.kernels,
        failures: tally.failures,
        faults,
        cache_warnings: tally.cache_warnings,
        waited_for_memory: tally.waited_for_memory,
        held,
    })
}

/// What all threads of a soak share.
struct Soak<'a> {
    options: &'a Options,
    session: &'a Session<'a>,
    begun: Instant,
    /// The number of the next problem.
    next: AtomicU64,
    stop: AtomicBool,
    shortage: &'a Shortage,
    tally: Mutex<Tally>,
    note: &'a (dyn Fn(&str) + Sync),
}

#[derive(Debug, Clone, Default)]
struct Tally {
    problems: u64,
    rows: u64,
    kernels: BTreeMap<String, u64>,
    failures: Vec<Failure>,
    cache_warnings: u64,
    waited_for_memory: u64,
}

impl Soak<'_> {
    fn is_over(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
            || self.options.duration.is_some_and(|duration| self.begun.elapsed() >= duration)
    }

    /// Answers problems one after the other. The reference and the CPU back end stay on this
    /// thread: many small problems in parallel take less time than each in turn on all cores.
    fn work(&self) {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build();
        while !self.is_over() {
            let number = self.next.fetch_add(1, Ordering::SeqCst);
            let end = self.options.problems.map(|problems| self.options.first + problems);
            if end.is_some_and(|end| number >= end) {
                break;
            }
            self.settle(&Case::of(self.options.seed, number));
        }
        drop(pool);
    }

    /// Answers a problem; waits for device memory while that is taken away.
    fn settle(&self, case: &Case) {
        let checked = loop {
            let before = self.shortage.moment();
            let checked = catch_unwind(AssertUnwindSafe(|| check(self.session, case)));
            match checked {
                Ok(Err(error)) if is_out_of_memory(&error) && self.shortage.since(before) => {
                    lock(&self.tally).waited_for_memory += 1;
                    self.shortage.wait();
                }
                Ok(checked) => break checked.map_err(|error| error.to_string()),
                Err(panic) => break Err(panic_reason(panic.as_ref())),
            }
        };
        let before = self.shortage.moment();
        let appended_or_combined =
            catch_unwind(AssertUnwindSafe(|| self.session.check_append_or_combine(case)));
        // A failure during a memory shortage is not judged.
        let excused = self.shortage.since(before);
        let appended_or_combined = appended_or_combined
            .unwrap_or_else(|panic| Some(("append or combine", Err(panic_reason(panic.as_ref())))));
        let mut tally = lock(&self.tally);
        tally.problems += 1;
        if let Some((kernel, verdict)) = appended_or_combined {
            *tally.kernels.entry(format!("gpu/{kernel}")).or_default() += 1;
            if let (Err(reason), false) = (verdict, excused) {
                let replay = case.replay_soaking(self.options.seed);
                self.fail(&mut tally, case, Some(format!("gpu/{kernel}")), reason, replay);
            }
        }
        let (kernel, wrong) = match checked {
            Ok(checked) => {
                tally.rows += checked.rows;
                tally.cache_warnings += checked.warnings.len() as u64;
                *tally.kernels.entry(checked.kernel.clone()).or_default() += 1;
                (Some(checked.kernel), checked.wrong)
            }
            Err(reason) => (None, Some(reason)),
        };
        let Some(reason) = wrong else { return };
        let replay = match &kernel {
            Some(kernel) if case.problem.pass == Pass::Forward => case.replay(kernel),
            _ => case.replay_soaking(self.options.seed),
        };
        self.fail(&mut tally, case, kernel, reason, replay);
    }

    /// Takes down a failure, and tells of it.
    fn fail(
        &self,
        tally: &mut Tally,
        case: &Case,
        kernel: Option<String>,
        reason: String,
        replay: String,
    ) {
        (self.note)(&format!("{}: {reason}\n  replay: {replay}", case.problem.text()));
        tally.failures.push(Failure {
            number: case.number,
            problem: case.problem.text(),
            seed: case.tensor_seed,
            kernel,
            reason,
            replay,
        });
        if tally.failures.len() >= MOST_FAILURES {
            self.stop.store(true, Ordering::SeqCst);
        }
    }

    /// Injects one fault after the other, each at least once, until one is not survived.
    fn inject_faults(
        &self,
        mut inject: impl FnMut(Fault) -> Result<String, String>,
    ) -> Vec<FaultReport> {
        let possible = |fault: &&Fault| {
            (self.options.gpu || !fault.needs_gpu())
                && (self.options.program.is_some() || !fault.needs_sibling())
        };
        let faults: Vec<Fault> = self.options.faults.iter().filter(possible).copied().collect();
        let new = |fault: &Fault| FaultReport {
            fault: *fault,
            times: 0,
            survived: 0,
            told: String::new(),
        };
        let mut all: Vec<FaultReport> = faults.iter().map(new).collect();
        for round in 0.. {
            for report in &mut all {
                if round > 0 && self.is_over() {
                    return all;
                }
                report.times += 1;
                let survived = catch_unwind(AssertUnwindSafe(|| inject(report.fault)));
                let panicked = |panic: Box<dyn Any + Send>| Err(panic_reason(panic.as_ref()));
                match survived.unwrap_or_else(panicked) {
                    Ok(told) => {
                        report.survived += 1;
                        report.told = told;
                    }
                    Err(told) => {
                        let fault = report.fault.name();
                        (self.note)(&format!("{fault}: {told}"));
                        report.told = told;
                        return all;
                    }
                }
                if !self.is_over() {
                    std::thread::sleep(PAUSE_BETWEEN_FAULTS);
                }
            }
            if all.is_empty() {
                break;
            }
        }
        all
    }

    /// Watches memory and reports progress until all workers have ended.
    fn monitor(&self, leaks: &mut LeakDetector, progress: &dyn Progress, ended: impl Fn() -> bool) {
        let total = match (self.options.duration, self.options.problems) {
            (Some(duration), None) => duration.as_millis() as u64,
            (_, problems) => problems.unwrap_or(0),
        };
        progress.begin(total);
        let mut told = 0;
        while !ended() {
            leaks.sample();
            let done = match self.options.problems {
                Some(_) => lock(&self.tally).problems,
                None => self.begun.elapsed().as_millis() as u64,
            };
            progress.advance(done.min(total).saturating_sub(told));
            told = told.max(done.min(total));
            std::thread::sleep(TICK);
        }
        leaks.sample();
    }
}

/// What came of one problem.
struct Checked {
    kernel: String,
    rows: u64,
    warnings: Vec<String>,
    wrong: Option<String>,
}

/// Answers a problem and compares it with the reference. Gradients are computed from the results of
/// the same session's forward pass, which are compared too.
fn check(session: &Session<'_>, case: &Case) -> Result<Checked, Error> {
    let problem = &case.problem;
    let auxiliary = AuxiliaryInputs::of(problem)?;
    let tensors = InputTensors::random(problem, case.tensor_seed)?;
    let inputs = auxiliary.inputs(&tensors);
    let forward = Case { problem: problem.clone().forward(), ..case.clone() };
    let answer = session.answer(&forward, PassInputs::Forward(&inputs))?;
    let checked = Checked::new(judge(&forward, inputs, &answer)?, &answer);
    if problem.pass == Pass::Forward || checked.wrong.is_some() {
        return Ok(checked);
    }
    let output = tensor(problem.dtypes.output, problem.output_shape(), &answer.results[0])?;
    let lse = floats(&answer.results[1]);
    let gradient = Tensor::random(problem.dtypes.output, problem.output_shape(), !case.tensor_seed);
    let gradient = gradient.map_err(flashcore::Error::from)?;
    let (output, output_gradient) = (output.view(), gradient.view());
    let backward = Backward { inputs, output, lse: &lse, output_gradient, lse_gradient: None };
    let mut answer = session.answer(case, PassInputs::Backward(&backward))?;
    answer.warnings.extend(checked.warnings);
    Ok(Checked::new(judge_gradients(case, backward, &answer)?, &answer))
}

impl Checked {
    fn new(judged: Result<u64, String>, answer: &SessionAnswer) -> Self {
        let (rows, wrong) = judged.map_or_else(|reason| (0, Some(reason)), |rows| (rows, None));
        let (kernel, warnings) = (answer.kernel.clone(), answer.warnings.clone());
        Checked { kernel, rows, warnings, wrong }
    }
}

/// Returns how many rows were compared with the reference, or what is wrong with them.
fn judge(
    case: &Case,
    inputs: Inputs<'_>,
    answer: &SessionAnswer,
) -> Result<Result<u64, String>, Error> {
    let problem = &case.problem;
    // Where no sequence has a query there is nothing to compare.
    if Sequences::of(problem, inputs).rows() == 0 {
        return Ok(Ok(0));
    }
    let expected = ExpectedOutput::within(OPERATIONS, problem, inputs, case.tensor_seed, None)?;
    let judged = expected.judge(&answer.results[0], &answer.results[1]);
    Ok(judged.map(|verdict| verdict.rows as u64).map_err(|wrong| wrong.to_string()))
}

/// Compares the gradients of all heads with the reference; their problems are small.
fn judge_gradients(
    case: &Case,
    backward: Backward<'_>,
    answer: &SessionAnswer,
) -> Result<Result<u64, String>, Error> {
    let (problem, inputs) = (&case.problem, backward.inputs);
    let rows = Sequences::of(problem, inputs).rows() as u64;
    if rows == 0 {
        return Ok(Ok(0));
    }
    let heads = Heads::all(problem);
    let exact = reference::gradients(problem, inputs, backward.output_gradient, &heads, None)?;
    let baseline = reference::gradients_baseline(problem, backward, &heads, None)?;
    let shapes = [problem.query_shape(), problem.key_shape(), problem.value_shape()];
    let found = shapes.into_iter().zip(&answer.results);
    let found = found.map(|(shape, bytes)| tensor(problem.dtype(), shape, bytes));
    let found = found.collect::<Result<Vec<Tensor>, Error>>()?;
    let sinks = answer.results.get(shapes.len()).map(|bytes| floats(bytes));
    let found = GradientsToJudge {
        query: found.first(),
        key: found.get(1),
        value: found.get(2),
        sinks: sinks.as_deref(),
        delta: None,
    };
    let verdict = compare_gradients(problem, inputs, found, &exact, &baseline);
    let verdict = verdict.map_err(flashcore::Error::from)?;
    Ok(if verdict.passed { Ok(rows) } else { Err(verdict.to_string()) })
}

/// Loses the device context and checks the error that every later use gets.
fn lose_context(session: &Session<'_>, seed: u64) -> Result<(), Error> {
    let Session::Device(device) = session else {
        return Err(Error::Impossible("there is no device context to lose".to_owned()));
    };
    // One that a kernel for the GPU serves, whatever its storage.
    let served = |it: &Case| {
        let Problem { pass, .. } = it.problem;
        it.problem.rows() > 0 && it.problem.dtype() != DType::F32 && pass == Pass::Forward
    };
    let case = (0..).map(|number| Case::of(seed, number)).find(served);
    let case = case.ok_or_else(|| Error::Impossible("there is no problem".to_owned()))?;
    let auxiliary = AuxiliaryInputs::of(&case.problem)?;
    let tensors = InputTensors::random(&case.problem, case.tensor_seed)?;
    let inputs = auxiliary.inputs(&tensors);
    let inputs = PassInputs::Forward(&inputs);
    let lost = device.lose_context(&case, inputs);
    // The next one must be told as well, and must not hang.
    let after = device.answer(&case, inputs);
    match (lost, after) {
        (Err(lost), Err(_)) => Err(lost),
        (lost, after) => {
            let told = [lost.err(), after.err()].map(|error| error.map(|it| it.to_string()));
            Err(Error::Impossible(format!("the context is not lost: {told:?}")))
        }
    }
}

/// A panic as the reason of a failure.
fn panic_reason(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("it panicked: {}", text.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::session::on_the_cpu;
    use super::*;

    fn options() -> Options {
        Options {
            duration: None,
            problems: Some(60),
            first: 0,
            seed: 3,
            gpu: false,
            faults: Vec::new(),
            program: None,
            cache: None,
            lose_context: false,
        }
    }

    #[test]
    fn the_cpu_is_right_and_nothing_is_left_out() {
        let summary = run(&options(), &(), &|_| {}).unwrap();
        assert!(summary.passed, "{summary:?}");
        let [forward, backward] = ["cpu/blocked", "cpu/backward"].map(|it| summary.kernels[it]);
        assert_eq!((summary.problems, forward + backward), (60, 60));
        assert!(backward > 5, "{summary:?}");
        assert!(summary.rows > 1000 && summary.failures.is_empty());
    }

    /// The faults that need neither a GPU nor a second process.
    #[test]
    fn a_cache_that_is_spoiled_does_no_harm() {
        let faults = vec![Fault::Corrupted, Fault::Deleted, Fault::ReadOnly];
        let summary = run(&Options { faults, ..options() }, &(), &|_| {}).unwrap();
        assert!(summary.passed, "{summary:?}");
        let warnings = |fault: Fault| {
            let report = summary.faults.iter().find(|it| it.fault == fault).unwrap();
            assert!(report.times >= 1 && report.survived == report.times, "{report:?}");
            report.told.clone()
        };
        for fault in [Fault::Corrupted, Fault::ReadOnly] {
            assert!(!warnings(fault).contains(" 0 warnings"), "{}", warnings(fault));
            assert!(!warnings(fault).starts_with("0 warnings"), "{}", warnings(fault));
        }
        assert!(warnings(Fault::Deleted).contains("files gone"));
    }

    /// A panic is reported of the fault that it came with, and the reports of the others are kept.
    #[test]
    fn a_panic_is_the_failure_of_its_fault() {
        let options = Options {
            faults: vec![Fault::Corrupted, Fault::Deleted, Fault::ReadOnly],
            duration: Some(Duration::ZERO),
            ..options()
        };
        let (texts, shortage) = (Texts::default(), Shortage::default());
        let folder = tempfile::tempdir().unwrap();
        let session = Session::open(folder.path(), false, &texts).unwrap();
        let notes = Mutex::new(Vec::new());
        let soak = Soak {
            options: &options,
            session: &session,
            begun: Instant::now(),
            next: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            shortage: &shortage,
            tally: Mutex::default(),
            note: &|text| lock(&notes).push(text.to_owned()),
        };
        let found = soak.inject_faults(|fault| match fault {
            Fault::Corrupted => Ok("two files".to_owned()),
            _ => panic!("a bug with {}", fault.name()),
        });
        let numbers: Vec<_> = found.iter().map(|it| (it.fault, it.times, it.survived)).collect();
        let expected = [(Fault::Corrupted, 1, 1), (Fault::Deleted, 1, 0), (Fault::ReadOnly, 0, 0)];
        assert_eq!(numbers, expected);
        assert_eq!(found[0].told, "two files");
        assert_eq!(found[1].told, "it panicked: a bug with deleted");
        assert_eq!(*lock(&notes), ["deleted: it panicked: a bug with deleted"]);
    }

    #[test]
    fn a_wrong_answer_is_found_with_the_command_that_shows_it() {
        let of = |pass: Pass| {
            let large = |it: &Case| it.problem.visible_pairs() > 100 && it.problem.pass == pass;
            (0..).map(|it| Case::of(3, it)).find(large).unwrap()
        };
        let case = of(Pass::Forward);
        let auxiliary = AuxiliaryInputs::of(&case.problem).unwrap();
        let tensors = InputTensors::random(&case.problem, case.tensor_seed).unwrap();
        let inputs = auxiliary.inputs(&tensors);
        let mut answer = on_the_cpu(&case, PassInputs::Forward(&inputs)).unwrap();
        assert!(judge(&case, inputs, &answer).unwrap().unwrap() > 0);
        answer.results[0].fill(0xFF);
        let reason = judge(&case, inputs, &answer).unwrap().unwrap_err();
        assert!(reason.contains("never written"), "{reason}");
        answer.results[0].fill(0);
        let reason = judge(&case, inputs, &answer).unwrap().unwrap_err();
        assert!(reason.contains("max error"), "{reason}");
        let replay = case.replay("cpu/blocked");
        let text = case.problem.text();
        assert!(replay.starts_with(&format!("flashcore attend --problem {text} --seed ")));

        let case = of(Pass::Backward);
        let auxiliary = AuxiliaryInputs::of(&case.problem).unwrap();
        let tensors = InputTensors::random(&case.problem, case.tensor_seed).unwrap();
        let inputs = auxiliary.inputs(&tensors);
        let (output, lse) = reference::saved(&case.problem, inputs).unwrap();
        let gradient =
            Tensor::random(case.problem.dtype(), case.problem.output_shape(), 1).unwrap();
        let (output, output_gradient) = (output.view(), gradient.view());
        let backward = Backward { inputs, output, lse: &lse, output_gradient, lse_gradient: None };
        let right = on_the_cpu(&case, PassInputs::Backward(&backward)).unwrap();
        assert!(judge_gradients(&case, backward, &right).unwrap().unwrap() > 0);
        for wrong in 0..3 {
            for byte in [0, 0xFF] {
                let mut results = right.results.clone();
                results[wrong].fill(byte);
                let (kernel, warnings) = (right.kernel.clone(), Vec::new());
                let answer = SessionAnswer { kernel, results, warnings };
                assert!(judge_gradients(&case, backward, &answer).unwrap().is_err(), "{wrong}");
            }
        }
    }
}
