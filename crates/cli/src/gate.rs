//! `flashcore gate`: accept or reject a kernel, with the reasons.

use std::error::Error;
use std::path::PathBuf;

use clap::{Args, value_parser};
use flashcore::gpu::Gpu;
use flashcore::{Pass, Problem, Progress};
use harness::auxiliary_inputs::tensor_bytes;
use harness::bench::{Candidate, configuration};
use harness::gate::{
    self, Contract, ForeignKernel, Judgement, Outcome, OwnKernel, SpeedRequirement, Step,
    Thresholds, ncu_command,
};
use harness::provenance::GpuFound;
use harness::subject::{GpuSubject, Source, Subject, Tensors};
use kernels::{Configuration, shipped};
use ptx::Target;
use serde::Serialize;
use testing::check::matrix;
use testing::scene::MAX_SEEDS;

use crate::inspect::choose;
use crate::{Answer, terminal};

/// Accept or reject a kernel: validate, assemble, simulate, check, time, count
#[derive(Args)]
pub(crate) struct Arguments {
    /// A configuration or a family by name, or a PTX file
    #[arg(required_unless_present = "all")]
    kernel: Option<String>,
    /// Every shipped configuration
    #[arg(long, conflicts_with_all = ["kernel", "description"])]
    all: bool,
    /// How the kernel of a PTX file is launched [default: the file's name with .json]
    #[arg(long, value_name = "FILE")]
    description: Option<PathBuf>,
    /// Who it must be as fast as: a candidate as `bench` knows them [default: scalar, the kernel
    /// with ordinary arithmetic; where that does not serve the problem (ragged batches, gradients,
    /// tensors of different element types) what the planner chooses]
    #[arg(long, value_name = "CANDIDATE", value_parser = Candidate::parse)]
    baseline: Option<Candidate>,
    /// The least share of the baseline's speed
    #[arg(long, value_name = "SHARE", default_value_t = 0.95, value_parser = share)]
    at_least: f64,
    /// What is timed [default: 4096 positions of the kernel's own dims, or one query over 8192]
    #[arg(long)]
    problem: Option<Problem>,
    /// Samples of each when it is timed
    #[arg(long, default_value_t = 7, value_parser = value_parser!(u32).range(1..=MOST_ROUNDS))]
    rounds: u32,
    /// Seeds of every hostile policy of the simulator
    #[arg(long, default_value_t = 3, value_parser = value_parser!(u64).range(1..=MAX_SEEDS))]
    seeds: u64,
    /// Makes the inputs new; a run without it takes the time
    #[arg(long)]
    salt: Option<u64>,
    /// Bounds of hardware counters, as JSON [default: those that ship]
    #[arg(long, value_name = "FILE")]
    thresholds: Option<PathBuf>,
    /// Leave these steps out
    #[arg(long, value_delimiter = ',', value_parser = step)]
    without: Vec<Step>,
    /// Run the kernel once on the timed problem and nothing else: for profilers
    #[arg(long, hide = true)]
    once: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Arguments {
    fn timed(&self, contract: &Contract) -> Problem {
        self.problem.clone().unwrap_or_else(|| contract.timed())
    }
}

/// More samples would take days.
const MOST_ROUNDS: i64 = 100_000;

/// A share of a speed: anything that can be compared.
fn share(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|_| "it is no number".to_owned())?;
    match share.is_finite() && share >= 0.0 {
        true => Ok(share),
        false => Err("a share of a speed is a number from 0 on".to_owned()),
    }
}

fn step(name: &str) -> Result<Step, String> {
    Step::ALL.into_iter().find(|step| step.name() == name).ok_or_else(|| {
        let known = Step::ALL.map(Step::name).join(", ");
        format!("there is no step `{name}`; there are {known}")
    })
}

#[derive(Serialize)]
struct Json<'a> {
    accepted: bool,
    kernels: &'a [Judgement],
}

/// The kernel that the gate judges.
enum KernelUnderTest {
    Own(Box<OwnKernel>),
    Foreign(Box<ForeignKernel>),
}

impl KernelUnderTest {
    fn find(arguments: &Arguments, name: &str) -> Result<Self, Box<dyn Error>> {
        if name.ends_with(".ptx") {
            let ptx = PathBuf::from(name);
            let beside = ptx.with_extension("json");
            let description = arguments.description.as_ref().unwrap_or(&beside);
            return Ok(KernelUnderTest::Foreign(Box::new(ForeignKernel::read(&ptx, description)?)));
        }
        if arguments.description.is_some() {
            return Err(format!("--description is for a PTX file, and `{name}` is none").into());
        }
        let kernel = choose::kernel(name, Target::SM_90A);
        let kernel = kernel.or_else(|error| configuration(name).map_err(|_| error))?;
        Ok(KernelUnderTest::Own(Box::new(OwnKernel::new(kernel)?)))
    }

    fn name(&self) -> String {
        match self {
            KernelUnderTest::Own(own) => own.kernel.name(),
            KernelUnderTest::Foreign(foreign) => foreign.description.entry.clone(),
        }
    }

    fn text(&self) -> String {
        match self {
            KernelUnderTest::Own(own) => ptx::print(&own.program),
            KernelUnderTest::Foreign(foreign) => foreign.ptx.clone(),
        }
    }

    fn contract(&self) -> Option<Contract> {
        match self {
            KernelUnderTest::Own(own) => Contract::of(&own.kernel),
            KernelUnderTest::Foreign(foreign) => Some(foreign.contract.clone()),
        }
    }

    /// What launches it; nothing where it is no attention.
    fn source(&self) -> Option<Box<dyn Source>> {
        match self {
            KernelUnderTest::Own(own) => {
                Contract::of(&own.kernel)?;
                Some(Box::new(Candidate::of(own.kernel)))
            }
            KernelUnderTest::Foreign(foreign) => Some(Box::new((**foreign).clone())),
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<Answer, Box<dyn Error>> {
    if Step::ALL.iter().all(|step| arguments.without.contains(step)) {
        return Err("no step is left to judge by: `--without` names every one".into());
    }
    let gpu = harness::open_gpu().map_err(|error| error.to_string());
    if arguments.once {
        let name = arguments.kernel.as_deref().unwrap_or_default();
        return once(arguments, &KernelUnderTest::find(arguments, name)?, gpu.as_ref());
    }
    let thresholds = match &arguments.thresholds {
        Some(path) => Thresholds::read(path)?,
        None => Thresholds::default(),
    };
    let names: Vec<String> = match &arguments.kernel {
        Some(name) => vec![name.clone()],
        None => shipped(Target::SM_90A).iter().map(Configuration::name).collect(),
    };
    let mut judgements = Vec::new();
    {
        let bar = crate::progress::Bar::new("judging");
        bar.begin(names.len() as u64);
        for name in &names {
            let kernel = KernelUnderTest::find(arguments, name)?;
            judgements.push(judge(arguments, name, &kernel, gpu.as_ref(), &thresholds));
            bar.advance(1);
        }
    }
    let accepted = judgements.iter().all(|it| it.accepted);
    let found = Json { accepted, kernels: &judgements };
    Answer::of(arguments.json, &found, accepted, || match &judgements[..] {
        [judgement] => describe(judgement),
        all => summary(all),
    })
}

fn judge(
    arguments: &Arguments,
    typed: &str,
    kernel: &KernelUnderTest,
    gpu: Result<&Gpu, &String>,
    thresholds: &Thresholds,
) -> Judgement {
    let salt = arguments.salt.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(1, |now| now.as_nanos() as u64)
    });
    let no_gpu = |error: &String| Outcome::skip(format!("there is no GPU: {error}"));
    let all: Vec<(Step, Box<dyn FnOnce() -> Outcome + '_>)> = vec![
        (
            Step::Validate,
            Box::new(|| match kernel {
                KernelUnderTest::Own(own) => gate::validate(own),
                KernelUnderTest::Foreign(foreign) => foreign.validate(),
            }),
        ),
        (Step::Assemble, Box::new(|| gate::assemble(&kernel.text()))),
        (
            Step::Simulate,
            Box::new(|| match kernel {
                KernelUnderTest::Own(own) => gate::simulate(own, arguments.seeds),
                KernelUnderTest::Foreign(_) => {
                    Outcome::skip("the simulator runs programs of our language, and this is PTX")
                }
            }),
        ),
        (
            Step::Correct,
            Box::new(move || match gpu {
                Ok(gpu) => correct(gpu, kernel, salt),
                Err(error) => no_gpu(error),
            }),
        ),
        (
            Step::Fast,
            Box::new(move || match gpu {
                Ok(gpu) => fast(arguments, gpu, kernel, salt),
                Err(error) => no_gpu(error),
            }),
        ),
        (
            Step::Counters,
            Box::new(move || match gpu {
                Ok(_) => count(arguments, typed, kernel, thresholds),
                Err(error) => no_gpu(error),
            }),
        ),
    ];
    let asked = all.into_iter().filter(|(step, _)| !arguments.without.contains(step));
    Judgement::of(&kernel.name(), asked)
}

fn correct(gpu: &Gpu, kernel: &KernelUnderTest, salt: u64) -> Outcome {
    if let (KernelUnderTest::Own(own), None) = (kernel, kernel.contract()) {
        return check_matrix_kernel(gpu, own);
    }
    let (Some(contract), Some(source)) = (kernel.contract(), kernel.source()) else {
        return Outcome::skip("it does not compute attention");
    };
    if let (KernelUnderTest::Own(own), Pass::Backward) = (kernel, contract.model.pass) {
        return gate::correct_gradients(&own.kernel, &contract, salt);
    }
    match GpuSubject::new(gpu, source.as_ref()) {
        Ok(mut subject) => gate::correct(&mut subject, &contract, salt),
        Err(error) => Outcome::skip(error.to_string()),
    }
}

/// A matrix kernel, by the checks that it has.
fn check_matrix_kernel(gpu: &Gpu, own: &OwnKernel) -> Outcome {
    match matrix::run(gpu, &[own.kernel], &()) {
        Ok(outcomes) if outcomes.is_empty() => Outcome::skip("`flashcore check` has this kernel"),
        Ok(outcomes) if outcomes.iter().all(|outcome| outcome.passed) => {
            let used = outcomes.iter().map(|outcome| outcome.tolerance_used).fold(0.0, f64::max);
            Outcome::Accept { found: format!("{:.0} % of the tolerance used", 100.0 * used) }
        }
        Ok(outcomes) => {
            let complaint = outcomes.into_iter().find_map(|outcome| outcome.complaint);
            let reason = complaint.unwrap_or_else(|| "an element is wrong".to_owned());
            Outcome::Reject { rule: gate::Rule::Wrong, reason }
        }
        Err(error) => Outcome::Reject { rule: gate::Rule::Failed, reason: error.to_string() },
    }
}

fn fast(arguments: &Arguments, gpu: &Gpu, kernel: &KernelUnderTest, salt: u64) -> Outcome {
    let (Some(contract), Some(source)) = (kernel.contract(), kernel.source()) else {
        return Outcome::skip("it does not compute attention");
    };
    let problem = arguments.timed(&contract);
    let usual = || gate::default_baseline(&gpu.chip(), &problem);
    let baseline = arguments.baseline.clone().unwrap_or_else(usual);
    if let Some(peer) = baseline.peer() {
        let peer = peer.name;
        return Outcome::skip(format!("{peer} lives in another process: `flashcore bench` has it"));
    }
    let peak = GpuFound::of(gpu.info()).peak_tflops(problem.dtype());
    let requirement = SpeedRequirement {
        problem,
        rounds: arguments.rounds as usize,
        at_least: arguments.at_least,
        peak_tflops: Some(peak),
    };
    if let (KernelUnderTest::Own(own), Pass::Backward) = (kernel, contract.model.pass) {
        return gate::fast_gradients(gpu, &Candidate::of(own.kernel), &baseline, &requirement);
    }
    let subjects = (GpuSubject::new(gpu, source.as_ref()), GpuSubject::new(gpu, &baseline));
    match subjects {
        (Ok(mut subject), Ok(mut baseline)) => {
            gate::fast(&mut subject, &mut baseline, &contract, &requirement, salt)
        }
        (Err(error), _) | (_, Err(error)) => Outcome::skip(error.to_string()),
    }
}

/// The command that runs the kernel once.
fn once_command(typed: &str, arguments: &Arguments) -> Vec<String> {
    let own = std::env::current_exe().map(|path| path.display().to_string());
    let mut command = vec![own.unwrap_or_else(|_| "flashcore".to_owned())];
    command.extend(["gate", typed, "--once"].map(str::to_owned));
    if let Some(problem) = &arguments.problem {
        command.extend(["--problem".to_owned(), problem.text()]);
    }
    if let Some(description) = &arguments.description {
        command.extend(["--description".to_owned(), description.display().to_string()]);
    }
    command
}

fn count(
    arguments: &Arguments,
    typed: &str,
    kernel: &KernelUnderTest,
    thresholds: &Thresholds,
) -> Outcome {
    if kernel.contract().is_none() {
        return Outcome::skip("it does not compute attention");
    }
    let name = kernel.name();
    gate::counters(&name, &name, &once_command(typed, arguments), thresholds)
}

fn once(
    arguments: &Arguments,
    kernel: &KernelUnderTest,
    gpu: Result<&Gpu, &String>,
) -> Result<Answer, Box<dyn Error>> {
    let gpu = gpu.map_err(|error| format!("there is no GPU to run on: {error}"))?;
    let (Some(contract), Some(source)) = (kernel.contract(), kernel.source()) else {
        return Err("it does not compute attention".into());
    };
    let problem = arguments.timed(&contract);
    if let (KernelUnderTest::Own(own), Pass::Backward) = (kernel, problem.pass) {
        gate::once_gradients(gpu, &Candidate::of(own.kernel), &problem)?;
        return Ok(Answer { text: String::new(), passed: true });
    }
    let mut subject = GpuSubject::new(gpu, source.as_ref())?;
    subject.prepare(&problem)?;
    let tensors = flashcore::InputTensors::random(&problem, 0)?;
    let mut memory = Vec::new();
    for bytes in tensor_bytes(&problem).ok_or("the problem is too large")? {
        memory.push(subject.allocate(bytes)?);
    }
    for (memory, tensor) in memory.iter().zip([&tensors.query, &tensors.key, &tensors.value]) {
        subject.write(*memory, 0, tensor.bytes())?;
    }
    let memory = memory.try_into().expect("as many as roles");
    subject.call(&Tensors { memory, offset: 0 })?;
    subject.settle()?;
    Ok(Answer { text: String::new(), passed: true })
}

fn describe(judgement: &Judgement) -> String {
    let mut text = format!("{}\n", terminal::paint(terminal::HEADING, &judgement.kernel));
    let lines: Vec<(&str, String)> = judgement
        .findings
        .iter()
        .map(|finding| {
            let line = match &finding.outcome {
                Outcome::Accept { found } => {
                    format!("{}: {found}", terminal::paint(terminal::GOOD, "accepted"))
                }
                Outcome::Reject { rule, reason } => {
                    let rule = serde_json::to_value(rule).unwrap_or_default();
                    let rule = rule.as_str().unwrap_or_default().replace('_', " ");
                    format!("{} ({rule}): {reason}", terminal::paint(terminal::BAD, "rejected"))
                }
                Outcome::Skip { reason } => format!("skipped: {reason}"),
            };
            (finding.step.name(), line)
        })
        .collect();
    text += &terminal::fields(&lines);
    text + &format!("\n{}", verdict(judgement))
}

fn verdict(judgement: &Judgement) -> String {
    let skipped: Vec<&str> = judgement
        .findings
        .iter()
        .filter(|it| matches!(it.outcome, Outcome::Skip { .. }))
        .map(|it| it.step.name())
        .collect();
    match (judgement.accepted, skipped.is_empty()) {
        (true, true) => format!("{}\n", terminal::paint(terminal::GOOD, "accepted")),
        (true, false) => format!(
            "{}, as far as could be asked (not {})\n",
            terminal::paint(terminal::GOOD, "accepted"),
            skipped.join(", ")
        ),
        (false, _) if judgement.broken().is_none() => {
            format!("{}: no step could be asked\n", terminal::paint(terminal::BAD, "not judged"))
        }
        (false, _) => format!("{}\n", terminal::paint(terminal::BAD, "rejected")),
    }
}

fn summary(judgements: &[Judgement]) -> String {
    let mut text = String::new();
    for judgement in judgements.iter().filter(|it| !it.accepted) {
        text += &format!("{}\n", describe(judgement));
    }
    let rows: Vec<_> = Step::ALL
        .into_iter()
        .map(|step| {
            let outcomes = judgements.iter().flat_map(|it| &it.findings);
            let outcomes: Vec<&Outcome> =
                outcomes.filter(|it| it.step == step).map(|it| &it.outcome).collect();
            let count = |is: fn(&Outcome) -> bool| outcomes.iter().filter(|it| is(it)).count();
            let numbers = [
                count(|it| matches!(it, Outcome::Accept { .. })),
                count(|it| matches!(it, Outcome::Reject { .. })),
                count(|it| matches!(it, Outcome::Skip { .. })),
            ];
            let mut row = vec![terminal::plain(step.name())];
            row.extend(numbers.map(terminal::plain));
            row
        })
        .collect();
    text += &terminal::table(&["step", "accepted", "rejected", "skipped"], &rows);
    let accepted = judgements.iter().filter(|it| it.accepted).count();
    text + &format!("{accepted} of {} kernels accepted\n", judgements.len())
}

/// The command line for Nsight Compute, for a kernel by name.
pub(crate) fn ncu_line(kernel: &str, entry: &str, problem: Option<&Problem>) -> String {
    let mut command = vec!["flashcore".to_owned(), "gate".to_owned(), kernel.to_owned()];
    command.push("--once".to_owned());
    if let Some(problem) = problem {
        command.extend(["--problem".to_owned(), problem.text()]);
    }
    ncu_command(entry, &command).join(" ")
}
