//! Benchmarks of our own kernels in this process: plans of the library, launched as its users do.

use cuda::{Buffer, DeviceAddress, Event, ExecutableGraph, Stream};
use flashcore::family::tuning::fingerprint;
use flashcore::gpu::Gpu;
use flashcore::{DTypes, Problem};
use testing::Verdict;

use super::{Candidate, Observer, Options, Pool};
use crate::Error;
use crate::auxiliary_inputs::{AuxiliaryInputs, nonzero_tensor_bytes};
use crate::report::{Cache, Cell, Measurement, Results};
use crate::statistics::Random;
use crate::subject::{Addresses, Call, Flush, Planned, TensorRole};
use crate::verify::{ExpectedOutput, POISON, inputs};

/// Warm-up rounds, which do not count.
const WARM_UP: usize = 2;

pub(super) fn run(
    gpu: &Gpu,
    options: &Options,
    results: &mut Results,
    observer: &mut dyn Observer,
) -> Result<(), Error> {
    compile_ahead(gpu, options);
    let mut random = Random::new(options.seed);
    let mut pool = Pool::new(options.seed);
    for problem in &options.set.problems {
        let mut timer = CandidateTimer::new(gpu, problem, pool)?;
        let cell = measure(gpu, options, problem, &mut timer, &mut random)?;
        observer.cell(results, &cell);
        results.cells.push(cell);
        pool = timer.pool;
    }
    Ok(())
}

/// Compiles all kernels into the cache, on all cores. A failure here occurs again, and is reported,
/// when the kernel is measured.
fn compile_ahead(gpu: &Gpu, options: &Options) {
    if gpu.cache().directory().is_none() {
        return;
    }
    let chip = gpu.chip();
    let plans = options.set.problems.iter().flat_map(|problem| {
        options.candidates.iter().filter_map(move |it| it.plan(&chip, problem).ok())
    });
    let launches = plans
        .flat_map(|(plan, _)| plan.chosen.choice.into_iter())
        .flat_map(|choice| choice.launches.into_iter().map(|launch| launch.kernel));
    let all: std::collections::HashSet<_> = launches.collect();
    let _ = gpu.warm(&all.into_iter().collect::<Vec<_>>(), &());
}

/// A candidate compiled for a problem, with its results and events.
#[derive(Debug)]
struct PreparedCandidate {
    plan: Planned,
    graph: Option<ExecutableGraph>,
    output: Buffer,
    lse: Buffer,
    addresses: Addresses,
    marks: [Event; 2],
}

impl PreparedCandidate {
    fn new(
        gpu: &Gpu,
        calls: usize,
        candidate: &Candidate,
        problem: &Problem,
        inputs: &[Buffer; 3],
    ) -> Result<Self, Error> {
        let mut plan = candidate.ready(gpu, problem)?;
        let [.., output, lse] = nonzero_tensor_bytes(problem)?;
        let buffer = |bytes: usize| Buffer::new(gpu.device(), bytes as u64);
        let (output, lse) = (buffer(output)?, buffer(lse)?);
        let [query, key, value] = inputs.each_ref().map(Buffer::address);
        let mut addresses = [DeviceAddress(0); TensorRole::COUNT];
        addresses[..5].copy_from_slice(&[query, key, value, output.address(), lse.address()]);
        let graph = match calls {
            1 => None,
            calls => {
                let graph = gpu.stream().capture(|stream| {
                    (0..calls).try_for_each(|_| plan.launch(stream, &addresses))
                })?;
                Some(graph.instantiate()?)
            }
        };
        let marks = [Event::new(gpu.device())?, Event::new(gpu.device())?];
        Ok(PreparedCandidate { plan, graph, output, lse, addresses, marks })
    }

    fn call(&mut self, stream: &Stream) -> Result<(), Error> {
        match &mut self.graph {
            Some(graph) => Ok(graph.launch(stream)?),
            None => self.plan.launch(stream, &self.addresses),
        }
    }

    /// Takes one sample: milliseconds of a call.
    fn sample(
        &mut self,
        stream: &Stream,
        cache: Cache,
        flush: &Flush,
        calls: usize,
    ) -> Result<f64, Error> {
        stream.fill(self.output.all(), POISON)?;
        stream.fill(self.lse.all(), POISON)?;
        // Either work keeps the GPU busy while the host records the events around the call.
        match cache {
            Cache::Cold => flush.run(stream)?,
            Cache::Hot => self.call(stream)?,
        }
        self.marks[0].record(stream)?;
        self.call(stream)?;
        self.marks[1].record(stream)?;
        self.marks[1].synchronize()?;
        Ok(self.marks[1].milliseconds_since(&self.marks[0])? / calls as f64)
    }
}

/// Times candidates on a problem: its inputs on the device, and what changes and flushes them.
#[derive(Debug)]
pub struct CandidateTimer {
    inputs: [Buffer; 3],
    flush: Flush,
    pool: Pool,
}

/// A round whose outputs are compared with the expected ones, and the seed of the rows that are.
type CheckedRound = Option<(usize, u64)>;

/// A candidate's samples, and whether its output was right.
type CandidateSamples = (Vec<f64>, Option<Result<Verdict, String>>);

impl CandidateTimer {
    /// For a problem.
    pub fn new(gpu: &Gpu, problem: &Problem, pool: Pool) -> Result<Self, Error> {
        let [query, key, value, ..] = nonzero_tensor_bytes(problem)?;
        let buffer = |bytes: usize| Buffer::new(gpu.device(), bytes as u64);
        Ok(CandidateTimer {
            inputs: [buffer(query)?, buffer(key)?, buffer(value)?],
            flush: Flush::new(gpu)?,
            pool,
        })
    }

    /// Milliseconds of candidates, all of which must serve the problem, round by round.
    pub fn time(
        &mut self,
        gpu: &Gpu,
        problem: &Problem,
        candidates: &[Candidate],
        rounds: usize,
    ) -> Result<Vec<Vec<f64>>, Error> {
        let mut prepared = Vec::new();
        for candidate in candidates {
            prepared.push(PreparedCandidate::new(gpu, 1, candidate, problem, &self.inputs)?);
        }
        let mut all: Vec<&mut PreparedCandidate> = prepared.iter_mut().collect();
        let times = self.rounds(gpu, problem, &mut all, Cache::Cold, 1, rounds, None)?;
        Ok(times.into_iter().map(|(samples, _)| samples).collect())
    }

    /// An error if a candidate's output is wrong.
    pub fn validate(
        &mut self,
        gpu: &Gpu,
        problem: &Problem,
        candidate: &Candidate,
        seed: u64,
    ) -> Result<(), Error> {
        let mut prepared = PreparedCandidate::new(gpu, 1, candidate, problem, &self.inputs)?;
        let checked = Some((0, seed));
        let all = &mut [&mut prepared];
        let mut rounds = self.rounds(gpu, problem, all, Cache::Cold, 1, 1, checked)?;
        match rounds.pop().and_then(|(_, verdict)| verdict) {
            Some(Err(wrong)) => Err(Error::Impossible(format!("{}: {wrong}", candidate.name))),
            _ => Ok(()),
        }
    }

    /// The rounds of a measurement, after those that warm up.
    #[allow(clippy::too_many_arguments)]
    fn rounds(
        &mut self,
        gpu: &Gpu,
        problem: &Problem,
        prepared: &mut [&mut PreparedCandidate],
        cache: Cache,
        calls: usize,
        rounds: usize,
        checked: CheckedRound,
    ) -> Result<Vec<CandidateSamples>, Error> {
        let count = prepared.len();
        let mut results: Vec<CandidateSamples> = vec![(Vec::new(), None); count];
        let saved = match checked {
            Some(_) => Some(SavedRound::new(gpu, &self.inputs, prepared)?),
            None => None,
        };
        for round in 0..WARM_UP + rounds {
            let DTypes { query, key, value, .. } = problem.dtypes;
            for (tensor, dtype) in self.inputs.iter().zip([query, key, value]) {
                self.pool.fill(gpu, dtype, tensor.all())?;
            }
            for place in 0..count {
                let index = if round % 2 == 0 { place } else { count - 1 - place };
                let time = prepared[index].sample(gpu.stream(), cache, &self.flush, calls)?;
                if round >= WARM_UP {
                    results[index].0.push(time);
                }
            }
            if let (Some((checked, _)), Some(saved)) = (checked, &saved)
                && round == WARM_UP + checked
            {
                saved.take(gpu.stream(), &self.inputs, prepared)?;
            }
        }
        if let (Some((_, seed)), Some(saved)) = (checked, saved) {
            let verdicts = saved.judge(gpu.stream(), problem, seed)?;
            for ((_, verdict), judged) in results.iter_mut().zip(verdicts) {
                *verdict = Some(judged);
            }
        }
        Ok(results)
    }
}

/// The inputs and results of one round, set aside on the device. Comparing them on the host
/// takes longer than a round takes on the GPU, which would cool down if it waited.
struct SavedRound {
    inputs: [Buffer; 3],
    /// Output and log-sum-exps of every candidate.
    results: Vec<[Buffer; 2]>,
}

impl SavedRound {
    /// Allocates memory for a round.
    fn new(
        gpu: &Gpu,
        inputs: &[Buffer; 3],
        prepared: &[&mut PreparedCandidate],
    ) -> Result<Self, Error> {
        let like = |buffer: &Buffer| Buffer::new(gpu.device(), buffer.bytes());
        let [query, key, value] = inputs.each_ref().map(like);
        let mut results = Vec::new();
        for prepared in prepared {
            results.push([like(&prepared.output)?, like(&prepared.lse)?]);
        }
        Ok(SavedRound { inputs: [query?, key?, value?], results })
    }

    /// Copies the current inputs and results, in stream order.
    fn take(
        &self,
        stream: &Stream,
        inputs: &[Buffer; 3],
        prepared: &[&mut PreparedCandidate],
    ) -> Result<(), Error> {
        for (from, to) in inputs.iter().zip(&self.inputs) {
            stream.copy(from.all(), to.all())?;
        }
        for (prepared, [output, lse]) in prepared.iter().zip(&self.results) {
            stream.copy(prepared.output.all(), output.all())?;
            stream.copy(prepared.lse.all(), lse.all())?;
        }
        Ok(())
    }

    /// Compares every candidate's results with the expected ones.
    fn judge(
        &self,
        stream: &Stream,
        problem: &Problem,
        seed: u64,
    ) -> Result<Vec<Result<Verdict, String>>, Error> {
        let read = |buffer: &Buffer| stream.download_vec::<u8>(buffer.all());
        let [query, key, value] = self.inputs.each_ref().map(read);
        let host = inputs(problem, [&query?, &key?, &value?])?;
        let auxiliary = AuxiliaryInputs::of(problem)?;
        let expected = ExpectedOutput::of(problem, auxiliary.inputs(&host), seed)?;
        let mut verdicts = Vec::new();
        for [output, lse] in &self.results {
            let judged = expected.judge(&read(output)?, &read(lse)?);
            verdicts.push(judged.map_err(|wrong| wrong.to_string()));
        }
        Ok(verdicts)
    }
}

fn measure(
    gpu: &Gpu,
    options: &Options,
    problem: &Problem,
    timer: &mut CandidateTimer,
    random: &mut Random,
) -> Result<Cell, Error> {
    let mut cell = Cell::new(problem)?;
    let mut all_prepared = Vec::new();
    for candidate in &options.candidates {
        match PreparedCandidate::new(gpu, options.calls, candidate, problem, &timer.inputs) {
            Ok(prepared) => all_prepared.push((candidate.name.as_str(), prepared)),
            Err(Error::Impossible(reason)) => {
                let mut refused = Measurement::new(&candidate.name, options.caches[0], Vec::new());
                refused.note = Some(reason);
                cell.measurements.push(refused);
            }
            Err(error) => return Err(error),
        }
    }
    for &cache in &options.caches {
        let checked = Some((random.below(options.rounds), random.bits()));
        let mut all: Vec<&mut PreparedCandidate> =
            all_prepared.iter_mut().map(|(_, prepared)| prepared).collect();
        let (calls, rounds) = (options.calls, options.rounds);
        let found = timer.rounds(gpu, problem, &mut all, cache, calls, rounds, checked)?;
        for ((name, prepared), (samples, verdict)) in all_prepared.iter().zip(found) {
            let mut measurement = Measurement::new(name, cache, samples);
            if let Some(choice) = &prepared.plan.plan().chosen.choice {
                measurement.kernel = Some(choice.kernel().name());
                measurement.ptx = Some(fingerprint(&ptx::print(&choice.kernel().program()?)));
            }
            match verdict {
                Some(Ok(verdict)) => {
                    measurement.right = Some(true);
                    measurement.error = Some([verdict.output.max_error, verdict.output.tolerance]);
                }
                Some(Err(wrong)) => {
                    measurement.right = Some(false);
                    measurement.note = Some(wrong);
                }
                None => {}
            }
            cell.measurements.push(measurement);
        }
    }
    Ok(cell)
}
