//! Profiling: where the time goes inside the forward kernel, from timestamps that it takes itself,
//! and between the launches of every family.
//!
//! [`Forward::probed`](kernels::Forward::probed) is the kernel with one thread of each consumer
//! warpgroup noting the clock when a phase ends. The same program runs on the GPU and in the
//! simulator, so the same table and the same timeline come from both. Stamps cost time: how much
//! is measured and told.

use std::collections::BTreeMap;

use flashcore::gpu::Gpu;
use flashcore::{DTypes, Pass, Plan, Problem};
use kernels::forward::{PROBE_WORDS, Phase};
use kernels::{Configuration, Forward};
use serde::Serialize;
use serde_json::{Value, json};
use sim::{Argument, Options, Policy, Trace};
use testing::scene::Call;

use crate::Error;
use crate::auxiliary_inputs::{AuxiliaryInputs, nonzero_tensor_bytes};
use crate::bench::{Candidate, Pool};
use crate::statistics::median;
use crate::subject::{
    self, Addresses, Call as _, Flush, Launcher, Planned, TensorRole, of_program,
};
use cuda::{Buffer, DeviceAddress, Event};

/// An interval of time that a warpgroup spent on one phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The block's index in the grid.
    pub block: u32,
    /// The consumer warpgroup.
    pub warpgroup: u32,
    /// What it was doing.
    pub phase: Phase,
    /// The first cycle, on the clock of its multiprocessor.
    pub start: u64,
    /// The cycle after the last.
    pub end: u64,
}

/// The time that all warpgroups together spent on a phase.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Line {
    /// The phase.
    pub phase: &'static str,
    /// Its share of all the time.
    pub share: f64,
    /// Cycles each time, in the median.
    pub cycles: f64,
    /// How many times.
    pub count: usize,
}

/// Decodes the timestamps of a run: regions of [`PROBE_WORDS`] words, for each block and warpgroup.
pub fn decode(words: &[u64], warpgroups: u32) -> Vec<Span> {
    let mut spans = Vec::new();
    for (region, notes) in words.chunks_exact(PROBE_WORDS).enumerate() {
        let (block, warpgroup) = (region as u32 / warpgroups, region as u32 % warpgroups);
        let mut last: Option<u64> = None;
        for word in notes.iter().take_while(|word| **word != 0) {
            let (clock, number) = (word / 256, (word % 256) as usize);
            let Some(phase) = Phase::ALL.get(number).copied() else { break };
            if let Some(start) = last.filter(|_| phase != Phase::Begin) {
                spans.push(Span { block, warpgroup, phase, start, end: clock });
            }
            last = Some(clock);
        }
    }
    spans
}

/// The phases and what they cost, the most first.
pub fn summarise(spans: &[Span]) -> Vec<Line> {
    let mut phases: BTreeMap<Phase, Vec<f64>> = BTreeMap::new();
    for span in spans {
        let cycles = span.end.saturating_sub(span.start) as f64;
        phases.entry(span.phase).or_default().push(cycles);
    }
    let all: f64 = phases.values().flatten().sum();
    let mut lines: Vec<Line> = phases
        .into_iter()
        .map(|(phase, cycles)| Line {
            phase: phase.name(),
            share: cycles.iter().sum::<f64>() / all.max(1.0),
            cycles: median(&cycles),
            count: cycles.len(),
        })
        .collect();
    lines.sort_by(|a, b| b.share.total_cmp(&a.share));
    lines
}

/// What was recorded on a GPU.
#[derive(Debug)]
pub struct Recording {
    /// Everything that was noted.
    pub spans: Vec<Span>,
    /// Milliseconds of the kernel without timestamps, and with them.
    pub milliseconds: [f64; 2],
}

/// What one launch of a plan takes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LaunchTime {
    /// The kernel.
    pub kernel: String,
    /// Milliseconds, from the beginning of the call to the end of this launch, less those of the
    /// launches before it.
    pub milliseconds: f64,
}

/// Runs the kernel of a plan with timestamps on a GPU.
pub fn on_gpu(
    gpu: &Gpu,
    forward: &Forward,
    plan: &Plan,
    auxiliary: &AuxiliaryInputs,
) -> Result<Recording, Error> {
    let impossible = || Error::Impossible("it is no kernel of a GPU".to_owned());
    let choice = plan.chosen.choice.as_ref().ok_or_else(impossible)?;
    let program = forward.probed()?;
    let words = choice.launches[0].blocks as usize * forward.warpgroups as usize * PROBE_WORDS;
    let probed = of_program(plan, auxiliary, 0, &program, 8 * words as u64)
        .map_err(|reason| Error::Malformed { what: program.name.clone(), reason })?;
    let timer = CallTimer::new(gpu, &plan.problem)?;
    let mut without = Planned::new(gpu, plan.clone(), auxiliary)?;
    let text = ptx::print_for(&program, gpu.compiler());
    let mut with = Launcher::new(gpu, &text, probed)?;
    let milliseconds = [timer.time(gpu, &mut without)?, timer.time(gpu, &mut with)?];
    // The notes are those of the last launch: each writes the same places.
    let words = with.memory(gpu, "Workspace(Probe)")?;
    Ok(Recording { spans: decode(&words, forward.warpgroups), milliseconds })
}

/// Times the launches of a plan one by one: the first alone, then with the second, and so on.
pub fn launches(
    gpu: &Gpu,
    plan: &Plan,
    auxiliary: &AuxiliaryInputs,
) -> Result<Vec<LaunchTime>, Error> {
    let timer = CallTimer::new(gpu, &plan.problem)?;
    let mut times = Vec::new();
    let mut before = 0.0;
    let all = plan.chosen.choice.as_ref().map_or(0, |choice| choice.launches.len());
    for count in 1..=all {
        let mut part = plan.clone();
        let Some(choice) = &mut part.chosen.choice else { break };
        choice.launches.truncate(count);
        choice.prepared = choice.prepared.min(count - 1);
        choice.main = choice.main.min(count - 1);
        let kernel = choice.launches[count - 1].kernel.name();
        let until = timer.time(gpu, &mut Planned::new(gpu, part, auxiliary)?)?;
        times.push(LaunchTime { kernel, milliseconds: until - before });
        before = until;
    }
    Ok(times)
}

/// Times calls of a problem: its tensors on the device, and two events.
pub(crate) struct CallTimer {
    /// By [`TensorRole`]: of the forward pass the first five.
    buffers: Vec<Buffer>,
    flush: Flush,
    marks: [Event; 2],
}

impl CallTimer {
    /// Random inputs; the output and log-sum-exps that a backward pass reads come from our forward
    /// pass.
    pub(crate) fn new(gpu: &Gpu, problem: &Problem) -> Result<Self, Error> {
        let mut pool = Pool::new(0);
        let mut bytes = nonzero_tensor_bytes(problem)?.to_vec();
        if problem.pass == Pass::Backward {
            bytes.extend([bytes[3], bytes[0], bytes[1], bytes[2]]);
        }
        let mut buffers = Vec::new();
        for bytes in bytes {
            buffers.push(Buffer::new(gpu.device(), bytes as u64)?);
        }
        let DTypes { query, key, value, output } = problem.dtypes;
        let gradient = buffers.get(TensorRole::OutputGradient as usize);
        let filled = buffers[..3].iter().chain(gradient);
        for (buffer, dtype) in filled.zip([query, key, value, output]) {
            pool.fill(gpu, dtype, buffer.all())?;
        }
        let flush = Flush::new(gpu)?;
        let marks = [Event::new(gpu.device())?, Event::new(gpu.device())?];
        let timer = CallTimer { buffers, flush, marks };
        if problem.pass == Pass::Backward {
            let forward = problem.clone().forward();
            let planned = Candidate::parse("flashcore").map_err(Error::Impossible)?;
            planned.ready(gpu, &forward)?.launch(gpu.stream(), &timer.addresses())?;
        }
        Ok(timer)
    }

    fn addresses(&self) -> Addresses {
        let mut addresses = [DeviceAddress(0); TensorRole::COUNT];
        for (address, buffer) in addresses.iter_mut().zip(&self.buffers) {
            *address = buffer.address();
        }
        addresses
    }

    /// Milliseconds of one call with cold caches.
    pub(crate) fn sample(&self, gpu: &Gpu, kernel: &mut dyn subject::Call) -> Result<f64, Error> {
        let [start, end] = &self.marks;
        self.flush.run(gpu.stream())?;
        start.record(gpu.stream())?;
        kernel.launch(gpu.stream(), &self.addresses())?;
        end.record(gpu.stream())?;
        end.synchronize()?;
        Ok(end.milliseconds_since(start)?)
    }

    /// The median of several.
    fn time(&self, gpu: &Gpu, kernel: &mut dyn subject::Call) -> Result<f64, Error> {
        let samples = (0..5).map(|_| self.sample(gpu, kernel)).collect::<Result<Vec<_>, _>>()?;
        Ok(median(&samples))
    }
}

/// Runs the kernel with timestamps in the simulator, on a problem that takes one block around its
/// loops: its spans, and the simulator's own timeline.
pub fn in_simulator(forward: &Forward) -> Result<(Vec<Span>, Trace), Error> {
    let what = || forward.name();
    let failed = |reason: String| Error::Malformed { what: what(), reason };
    let lengths = [2 * forward.query_rows(), 6 * forward.key_block].map(|it| it as usize);
    let call = Call::new(Configuration::Forward(*forward), 1, lengths, [2, 2]);
    let mut scene = call.scene().map_err(|error| failed(error.to_string()))?;
    scene.program = forward.probed()?;
    let bytes = 8 * scene.grid as usize * forward.warpgroups as usize * PROBE_WORDS;
    let buffer = scene.memory.input("probe", vec![0; bytes]);
    scene.arguments.push(Argument::Address(buffer, 0));
    let options = Options { trace: true, ..Options::values(Policy::Modelled, 0) };
    let (memory, report) = scene.run(&options).map_err(|failure| failed(failure.to_string()))?;
    let accuracy = scene.judge(&memory);
    if !accuracy.passed() {
        return Err(failed(accuracy.to_string()));
    }
    let words: Vec<u64> = (memory.bytes(buffer).chunks_exact(8))
        .map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
        .collect();
    Ok((decode(&words, forward.warpgroups), report.trace.unwrap_or_default()))
}

/// A timeline for Perfetto: blocks on the GPU, a row for each warpgroup; and the simulator's
/// beside it. A cycle is a microsecond there.
pub fn timeline(spans: &[Span], blocks: u32, simulated: Option<(&[Span], &Trace)>) -> String {
    let mut events: Vec<Value> = Vec::new();
    rows(&mut events, spans, blocks, 0, "GPU");
    if let Some((spans, trace)) = simulated {
        const SIMULATOR: u32 = 1 << 20;
        rows(&mut events, spans, u32::MAX, SIMULATOR, "simulator");
        let trace: Value = serde_json::from_str(&trace.to_json()).unwrap_or_default();
        for event in trace["traceEvents"].as_array().into_iter().flatten() {
            let mut event = event.clone();
            let process = event["pid"].as_u64().unwrap_or(0) + u64::from(SIMULATOR);
            event["pid"] = process.into();
            if event["name"] == "process_name" {
                let name = event["args"]["name"].as_str().unwrap_or_default();
                event["args"]["name"] = format!("simulator, {name}").into();
            }
            events.push(event);
        }
    }
    json!({ "traceEvents": events, "displayTimeUnit": "ns" }).to_string()
}

/// The spans of the first blocks, each block's clock set to zero at its beginning.
fn rows(events: &mut Vec<Value>, spans: &[Span], blocks: u32, offset: u32, place: &str) {
    let mut begins: BTreeMap<u32, u64> = BTreeMap::new();
    for span in spans {
        let begin = begins.entry(span.block).or_insert(span.start);
        *begin = span.start.min(*begin);
    }
    let mut named = std::collections::BTreeSet::new();
    for span in spans.iter().filter(|span| span.block < blocks) {
        let process = span.block + offset;
        // Above the simulator's own rows, which are numbered by warp.
        let thread = 2000 + span.warpgroup;
        if named.insert((process, thread)) {
            let block = json!({ "name": format!("{place}, block {}", span.block) });
            let row = json!({ "name": format!("phases of warpgroup {}", span.warpgroup) });
            events
                .push(json!({ "ph": "M", "pid": process, "name": "process_name", "args": block }));
            events.push(json!({
                "ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": row,
            }));
        }
        let begin = begins[&span.block];
        events.push(json!({
            "ph": "X", "pid": process, "tid": thread, "name": span.phase.name(),
            "ts": span.start - begin, "dur": (span.end - span.start).max(1),
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forward(text: &str) -> Forward {
        crate::tune::space::chosen(text)
    }

    #[test]
    fn notes_become_spans() {
        let mut words = vec![0; 2 * PROBE_WORDS];
        let note = |clock: u64, phase: Phase| clock * 256 + phase as u64;
        words[PROBE_WORDS] = note(1000, Phase::Begin);
        words[PROBE_WORDS + 1] = note(1400, Phase::WaitForKeys);
        words[PROBE_WORDS + 2] = note(1500, Phase::Scores);
        let spans = decode(&words, 2);
        assert_eq!(spans.len(), 2);
        assert_eq!((spans[0].block, spans[0].warpgroup), (0, 1));
        assert_eq!((spans[1].phase, spans[1].start, spans[1].end), (Phase::Scores, 1400, 1500));
        let lines = summarise(&spans);
        assert_eq!((lines[0].phase, lines[0].share), ("wait for K", 0.8));
    }

    /// The kernel with timestamps is right in the simulator, and its timeline has every phase.
    #[test]
    fn the_simulator_takes_the_same_stamps() {
        for text in ["b=1,h=2,s=4096,d=64,bf16", "b=1,h=2,s=256,d=64,bf16,causal"] {
            let forward = forward(text);
            let (spans, trace) = in_simulator(&forward).unwrap();
            let lines = summarise(&spans);
            for phase in [Phase::Queries, Phase::Scores, Phase::Softmax, Phase::Update] {
                assert!(lines.iter().any(|line| line.phase == phase.name()), "{lines:?}");
            }
            assert!((lines.iter().map(|line| line.share).sum::<f64>() - 1.0).abs() < 1e-9);
            let text = timeline(&[], 0, Some((&spans, &trace)));
            assert!(text.contains("phases of warpgroup 0") && text.contains("tensor cores"));
        }
    }

    /// Timestamps off, the text is what it was: nothing of them is in it.
    #[test]
    fn without_stamps_there_is_no_clock_in_the_kernel() {
        let forward = forward("b=1,h=2,s=4096,d=128,bf16");
        let plain = ptx::print(&forward.program().unwrap());
        let probed = ptx::print(&forward.probed().unwrap());
        assert!(!plain.contains("clock64") && probed.contains("clock64"));
    }

    /// A spill or serialised products would make the times those of another kernel.
    #[test]
    fn stamps_leave_the_products_alone() {
        let Some(toolkit) = cuda::toolkit::Toolkit::for_tests() else { return };
        let ptxas = toolkit.assemblers.iter().max_by_key(|ptxas| ptxas.version).unwrap();
        for text in ["b=2,h=32,s=8192,d=64,bf16", "b=2,h=16,s=8192,d=128,bf16,causal"] {
            let text = ptx::print(&forward(text).probed().unwrap());
            let assembled = ptxas.assemble(&text, &Default::default()).unwrap();
            assert_eq!(assembled.faults(), Vec::<String>::new());
        }
    }
}
