//! `flashcore check`: every kernel that this machine can run, over difficult problems.

use std::error::Error;

use clap::Args;
use flashcore::gpu::Gpu;
use flashcore::plan::Arrangement;
use flashcore::{
    Backend, DType, InputTensors, Machine, Pass, Preference, Problem, Progress, RunOptions,
};
use harness::auxiliary_inputs::AuxiliaryInputs;
use harness::verify::ExpectedOutput;
use serde::Serialize;
use testing::check::matrix::{self, MatrixOutcome};
use testing::check::{self, Checked, ExpectedGradients, GradientsOutcome, Outcome, cases};
use testing::verdict::Comparison;

use crate::attend::CHECK_OPERATIONS;
use crate::progress::Bar;
use crate::{Answer, BackendChoice, memory, terminal};

/// Check every kernel that this machine can run
#[derive(Args)]
pub(crate) struct Arguments {
    /// Check this back end only
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    backend: BackendChoice,
    /// Check every kernel on this problem instead, such as b=2,h=8,s=333,d=128,bf16,causal; may be
    /// given many times
    #[arg(long, value_name = "PROBLEM", conflicts_with_all = ["dtype", "thorough"])]
    problem: Vec<Problem>,
    /// Check this kernel only
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
    /// Check this element type only: f32, f16, bf16, e4m3, e5m2 or int8
    #[arg(long)]
    dtype: Option<DType>,
    /// A thousand problems for each element type instead of the usual hundred, and their gradients
    #[arg(long)]
    thorough: bool,
    /// Check instead that a query's bits do not depend on what is computed with it, over so many
    /// random batches of `batch_invariant` problems
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..),
          conflicts_with_all = ["problem", "kernel", "dtype", "thorough"])]
    batches: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The number of queries of a back end whose bits were compared with those of the query alone.
#[derive(Serialize)]
struct Batches {
    backend: &'static str,
    compared: usize,
    failure: Option<String>,
}

#[derive(Serialize)]
struct OfBatches<'a> {
    passed: bool,
    backends: &'a [Batches],
}

/// The results of one kernel with one element type.
#[derive(Serialize)]
struct Line {
    backend: &'static str,
    kernel: String,
    dtype: DType,
    /// Cases that it accepted.
    cases: usize,
    /// The largest error of any output or gradient.
    max_error: f64,
    /// The mean of the cases' mean errors.
    mean_error: f64,
    /// The largest error of any log-sum-exp; gradients have none.
    lse_max_error: Option<f64>,
    /// The largest share of a case's tolerance that was used up.
    tolerance_used: f64,
    failures: Vec<Failure>,
}

#[derive(Serialize)]
struct Failure {
    case: String,
    reason: String,
}

#[derive(Serialize)]
struct Json<'a> {
    passed: bool,
    kernels: &'a [Line],
    /// The matrix kernels, one entry per configuration.
    ladder: &'a [MatrixOutcome],
}

impl Arguments {
    /// The back end and the kernel that are named: a kernel's name may have its back end before it, as
    /// the tables print it.
    fn preference(&self) -> Preference {
        let named = self.kernel.as_deref().map(Preference::named).unwrap_or_default();
        Preference { backend: self.backend.name().map(str::to_owned).or(named.backend), ..named }
    }
}

/// What is checked, on which problems.
struct Wanted<'a> {
    backends: &'a [&'a dyn Backend],
    /// The kernel that is named; all where none is.
    kernel: Option<&'a str>,
    /// Whether the long lists of problems are meant.
    thorough: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<Answer, Box<dyn Error>> {
    let machine = Machine::discover();
    let dtypes = match arguments.dtype {
        Some(dtype) => vec![dtype],
        // The long list is meant for tensor-core kernels.
        None if arguments.thorough => vec![DType::F16, DType::BF16],
        None => DType::ALL.to_vec(),
    };
    let preference = arguments.preference();
    let named = preference.backend.as_deref();
    let backends: Vec<&dyn Backend> = machine
        .backends()
        .iter()
        .map(AsRef::as_ref)
        .filter(|backend| named.is_none_or(|name| name == backend.name()))
        .collect();
    if let Some(name) = named.filter(|_| backends.is_empty()) {
        let missing = machine.missing().iter().find(|it| it.backend == name);
        let reason = missing.map_or("no such back end exists", |it| &it.reason);
        return Err(format!("there is no {name} back end here: {reason}").into());
    }
    if let Some(batches) = arguments.batches {
        return check_batches(&backends, batches, arguments.json);
    }
    let gpu = machine.gpu().filter(|_| named.is_none_or(|it| it == "gpu"));
    let kernel = preference.kernel.as_deref();
    let wanted = Wanted { backends: &backends, kernel, thorough: arguments.thorough };
    let mut lines = Vec::new();
    for problem in &arguments.problem {
        let of_problem = wanted.problem(problem)?;
        if of_problem.is_empty() {
            // The planner says why, and what would work.
            machine.plan(problem, &preference)?;
        }
        lines.extend(of_problem);
    }
    for dtype in dtypes.into_iter().filter(|_| arguments.problem.is_empty()) {
        lines.extend(wanted.attention(dtype));
        lines.extend(wanted.sequences(dtype));
        // 8-bit tensors have no gradients.
        if !dtype.is_8_bit() {
            lines.extend(wanted.gradients(dtype));
        }
        if let Some(gpu) = gpu {
            lines.extend(wanted.caches(gpu, dtype));
        }
    }
    lines.sort_by_key(|line| {
        let place = backends.iter().position(|backend| backend.name() == line.backend);
        (place, line.kernel.clone())
    });
    let outcomes = match gpu {
        Some(gpu) if !arguments.thorough && arguments.problem.is_empty() => {
            wanted.matrix_kernels(gpu)?
        }
        _ => Vec::new(),
    };
    if lines.is_empty() && outcomes.is_empty() {
        return Err(match &arguments.kernel {
            Some(kernel) => {
                let known = known(&backends).join(", ");
                format!("there is no kernel `{kernel}` here, only {known}")
            }
            None => "there is nothing to check here".to_owned(),
        }
        .into());
    }
    let passed = lines.iter().all(|line| line.failures.is_empty())
        && outcomes.iter().all(|outcome| outcome.passed);
    let found = Json { passed, kernels: &lines, ladder: &outcomes };
    Answer::of(arguments.json, &found, passed, || {
        let parts = [describe(&machine, &lines), describe_matrix_kernels(&outcomes)];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n")
    })
}

/// Checks that bits do not depend on the batch.
fn check_batches(
    backends: &[&dyn Backend],
    batches: u64,
    json: bool,
) -> Result<Answer, Box<dyn Error>> {
    let mut all = Vec::new();
    for backend in backends {
        let bar = Bar::new("checking");
        let (compared, failure) = match check::run_batches(*backend, batches, &bar) {
            Ok(compared) => (compared, None),
            Err(failure) => (0, Some(failure)),
        };
        all.push(Batches { backend: backend.name(), compared, failure });
    }
    let passed = all.iter().all(|it| it.failure.is_none());
    let line = |it: &Batches| match &it.failure {
        None => format!(
            "{}: {batches} batches, {} queries compared, each with the bits it has alone\n",
            it.backend, it.compared
        ),
        Some(failure) => format!("{}: {failure}\n", it.backend),
    };
    let found = OfBatches { passed, backends: &all };
    Answer::of(json, &found, passed, || all.iter().map(line).collect())
}

/// The kernels of attention here.
fn known(backends: &[&dyn Backend]) -> Vec<String> {
    let usual = Problem::new(1, 1, 16, 64);
    let names = |problem: Problem| {
        let Ok(arrangement) = Arrangement::contiguous(&problem) else { return Vec::new() };
        let all = backends.iter().flat_map(|it| it.candidates(&problem, &arrangement));
        all.map(|candidate| candidate.full_name()).collect()
    };
    [names(usual.clone()), names(usual.backward())].concat()
}

/// Runs a kernel of a back end and judges it.
type Check<'a> = Box<dyn Fn(&dyn Backend, &str) -> Result<CaseResult, flashcore::Error> + 'a>;

impl Wanted<'_> {
    /// Every kernel that accepts a problem of the caller's, on tensors like `attend`'s.
    fn problem(&self, problem: &Problem) -> Result<Vec<Line>, Box<dyn Error>> {
        let bar = Bar::new("checking");
        memory::admit(problem)?;
        let auxiliary = AuxiliaryInputs::of(problem)?;
        let tensors = InputTensors::random(problem, 0)?;
        let inputs = auxiliary.inputs(&tensors);
        let arrangement = inputs.arrangement(problem)?;
        let kernels = check::accepting_kernels(self.backends, self.kernel, problem, &arrangement);
        if kernels.is_empty() {
            return Ok(Vec::new());
        }
        let check: Check<'_> = match problem.pass {
            Pass::Forward => {
                let expected =
                    ExpectedOutput::within(CHECK_OPERATIONS, problem, inputs, 0, Some(&bar))?;
                Box::new(move |backend, kernel| {
                    let kernel = Some(kernel.to_owned());
                    let options = RunOptions { kernel, guard: true, ..RunOptions::default() };
                    let outcome = expected.outcome(|| backend.run(problem, inputs, &options));
                    outcome.map(CaseResult::from)
                })
            }
            Pass::Backward => {
                let expected = ExpectedGradients::random(problem, inputs, 0)?;
                Box::new(move |backend, kernel| {
                    expected.check(backend, kernel).map(CaseResult::from)
                })
            }
        };
        let checked = kernels.into_iter().map(|(backend, kernel)| {
            let outcome = check(backend, kernel);
            Checked { case: problem.text(), backend: backend.name(), kernel, outcome }
        });
        Ok(lines(problem.dtype(), checked))
    }

    /// One line per kernel.
    fn attention(&self, dtype: DType) -> Vec<Line> {
        let cases = match self.thorough {
            true => cases::thorough(dtype),
            false => cases::standard(dtype),
        };
        let bar = Bar::new("checking");
        let checked = check::run_all(self.backends, self.kernel, &cases, &bar);
        lines(dtype, checked)
    }

    /// One line per kernel that computes gradients.
    fn gradients(&self, dtype: DType) -> Vec<Line> {
        let on_gpu = self.backends.iter().any(|backend| backend.name() == "gpu");
        let mut cases = match self.thorough {
            true => cases::thorough_gradients(dtype),
            false => cases::gradients(dtype),
        };
        // The long list is meant for a GPU. Without one, only its smaller problems are checked.
        cases.retain(|case| on_gpu || case.problem.visible_flops() < CPU_OPERATIONS);
        // With a GPU, only the GPU is checked by it.
        let mut asked = self.backends.to_vec();
        asked.retain(|it| !self.thorough || !on_gpu || it.name() == "gpu");
        let bar = Bar::new("checking");
        let checked = check::run_gradients(&asked, self.kernel, &cases, &bar);
        lines(dtype, checked)
    }

    /// One line per kernel that serves sequences of unequal lengths.
    fn sequences(&self, dtype: DType) -> Vec<Line> {
        let bar = Bar::new("checking");
        let checked = check::run_sequences(self.backends, self.kernel, dtype, self.seeds(), &bar);
        let mut lines = lines(dtype, checked);
        lines.iter_mut().for_each(|line| line.kernel += " of sequences");
        lines
    }

    /// One line for new keys and values into caches, and one for partial results put together.
    fn caches(&self, gpu: &Gpu, dtype: DType) -> Vec<Line> {
        let bar = Bar::new("checking");
        let wanted = |name: &str| self.kernel.is_none_or(|kernel| kernel == name);
        let mut checked = Vec::new();
        // Caches have 16 bits or 8.
        if wanted("append") && dtype != DType::F32 {
            checked.extend(check::run_appends(gpu, dtype, self.seeds(), &bar));
        }
        if wanted("combine") && !dtype.is_8_bit() {
            checked.extend(check::run_combines(gpu, dtype, self.seeds(), &bar));
        }
        lines(dtype, checked)
    }

    /// Random cases of sequences and caches.
    fn seeds(&self) -> u64 {
        if self.thorough { 1_600 } else { 60 }
    }

    /// Every matrix kernel that the GPU can run.
    fn matrix_kernels(&self, gpu: &Gpu) -> Result<Vec<MatrixOutcome>, Box<dyn Error>> {
        let mut configurations = matrix::configurations(gpu);
        configurations.retain(|it| self.kernel.is_none_or(|kernel| it.family() == kernel));
        let bar = Bar::new("checking");
        bar.begin(configurations.len() as u64);
        Ok(matrix::run(gpu, &configurations, &bar)?)
    }
}

/// Operations of a case whose gradients are checked on a CPU alone.
const CPU_OPERATIONS: f64 = 6e7;

/// The result of a case.
struct CaseResult {
    passed: bool,
    max_error: f64,
    mean_error: f64,
    lse_max_error: Option<f64>,
    tolerance_used: f64,
    /// The result as text.
    text: String,
}

impl CaseResult {
    fn of<'a>(passed: bool, text: String, all: impl Iterator<Item = &'a Comparison>) -> Self {
        let none = (0.0, 0.0, 0.0);
        let largest = |(max, mean, used): (f64, f64, f64), it: &Comparison| {
            let share = if it.tolerance > 0.0 { it.max_error / it.tolerance } else { 0.0 };
            (it.max_error.max(max), it.mean_error.max(mean), share.max(used))
        };
        let (max_error, mean_error, tolerance_used) = all.fold(none, largest);
        CaseResult { passed, max_error, mean_error, lse_max_error: None, tolerance_used, text }
    }
}

impl From<Outcome> for CaseResult {
    fn from(outcome: Outcome) -> Self {
        let text = outcome.to_string();
        let (output, lse) = (&outcome.verdict.output, &outcome.verdict.lse);
        let both = CaseResult::of(outcome.passed, text, [output, lse].into_iter());
        let (max_error, mean_error) = (output.max_error, output.mean_error);
        CaseResult { max_error, mean_error, lse_max_error: Some(lse.max_error), ..both }
    }
}

impl From<GradientsOutcome> for CaseResult {
    fn from(outcome: GradientsOutcome) -> Self {
        let all = outcome.verdict.comparisons.iter().map(|(_, it)| it);
        CaseResult::of(outcome.passed, outcome.to_string(), all)
    }
}

/// One line per kernel.
fn lines<O>(dtype: DType, checked: impl IntoIterator<Item = Checked<O>>) -> Vec<Line>
where
    CaseResult: From<O>,
{
    let mut lines: Vec<Line> = Vec::new();
    for Checked { case, backend, kernel, outcome } in checked {
        let is_its = |line: &Line| (line.backend, line.kernel.as_str()) == (backend, kernel);
        let index = lines.iter().position(is_its).unwrap_or_else(|| {
            lines.push(Line::new(backend, kernel.to_owned(), dtype));
            lines.len() - 1
        });
        lines[index].add(case, outcome.map(CaseResult::from));
    }
    for line in &mut lines {
        line.mean_error /= line.cases as f64;
    }
    lines
}

impl Line {
    fn new(backend: &'static str, kernel: String, dtype: DType) -> Self {
        Line {
            backend,
            kernel,
            dtype,
            cases: 0,
            max_error: 0.0,
            mean_error: 0.0,
            lse_max_error: None,
            tolerance_used: 0.0,
            failures: Vec::new(),
        }
    }

    fn add(&mut self, case: String, result: Result<CaseResult, flashcore::Error>) {
        self.cases += 1;
        let result = match result {
            Ok(result) => result,
            Err(error) => {
                let reason = error.to_string();
                self.failures.push(Failure { case, reason });
                return;
            }
        };
        self.max_error = self.max_error.max(result.max_error);
        self.mean_error += result.mean_error;
        let lse = result.lse_max_error.map(|error| error.max(self.lse_max_error.unwrap_or(0.0)));
        self.lse_max_error = lse.or(self.lse_max_error);
        self.tolerance_used = self.tolerance_used.max(result.tolerance_used);
        if !result.passed {
            self.failures.push(Failure { case, reason: result.text });
        }
    }
}

/// The last cell of a row, of whose cases so many failed.
fn verdict(failed: usize) -> (anstyle::Style, String) {
    match failed {
        0 => (terminal::GOOD, "passed".to_owned()),
        count => (terminal::BAD, format!("{count} failed")),
    }
}

/// One line per matrix kernel, its configurations together; failures one by one.
fn describe_matrix_kernels(outcomes: &[MatrixOutcome]) -> String {
    if outcomes.is_empty() {
        return String::new();
    }
    let mut families: Vec<&str> = outcomes.iter().map(|outcome| outcome.family).collect();
    families.dedup();
    let rows: Vec<_> = families
        .into_iter()
        .map(|family| {
            let of_family: Vec<&MatrixOutcome> =
                outcomes.iter().filter(|outcome| outcome.family == family).collect();
            let largest =
                |of: fn(&MatrixOutcome) -> f64| of_family.iter().map(|r| of(r)).fold(0.0, f64::max);
            let mean = of_family.iter().map(|outcome| outcome.mean_error).sum::<f64>();
            vec![
                terminal::plain(format!("gpu/{family}")),
                terminal::plain(of_family.len()),
                terminal::plain(format!("{:.2e}", largest(|outcome| outcome.max_error))),
                terminal::plain(format!("{:.2e}", mean / of_family.len() as f64)),
                terminal::plain(format!(
                    "{:.0} %",
                    largest(|outcome| outcome.tolerance_used) * 100.0
                )),
                verdict(of_family.iter().filter(|outcome| !outcome.passed).count()),
            ]
        })
        .collect();
    let heading =
        ["matrix kernel", "configurations", "max error", "mean error", "of allowed", "verdict"];
    let mut text = terminal::table(&heading, &rows);
    for outcome in outcomes.iter().filter(|outcome| !outcome.passed) {
        let complaint = outcome.complaint.clone();
        let complaint = complaint.unwrap_or_else(|| format!("max error {:.2e}", outcome.max_error));
        let failed = terminal::paint(terminal::BAD, "failed");
        text += &format!("{failed} {}: {complaint}\n", outcome.name);
    }
    text
}

fn describe(machine: &Machine, lines: &[Line]) -> String {
    let heading = [
        "kernel",
        "type",
        "cases",
        "max error",
        "mean error",
        "lse error",
        "of allowed",
        "verdict",
    ];
    let rows: Vec<_> = lines
        .iter()
        .map(|line| {
            vec![
                terminal::plain(format!("{}/{}", line.backend, line.kernel)),
                terminal::plain(line.dtype),
                terminal::plain(line.cases),
                terminal::plain(format!("{:.2e}", line.max_error)),
                terminal::plain(format!("{:.2e}", line.mean_error)),
                terminal::plain(
                    line.lse_max_error.map_or("-".to_owned(), |error| format!("{error:.2e}")),
                ),
                terminal::plain(format!("{:.0} %", line.tolerance_used * 100.0)),
                verdict(line.failures.len()),
            ]
        })
        .collect();
    let mut text = match rows.is_empty() {
        true => String::new(),
        false => terminal::table(&heading, &rows),
    };
    for missing in machine.missing() {
        let note = format!("not checked: {} ({})", missing.backend, missing.reason);
        text += &terminal::paragraph(&note);
    }
    for line in lines {
        for failure in &line.failures {
            text += &format!(
                "{} {}/{}: {}: {}\n",
                terminal::paint(terminal::BAD, "failed"),
                line.backend,
                line.kernel,
                failure.case,
                failure.reason
            );
        }
    }
    text
}
