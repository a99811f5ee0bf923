//! The forward kernel for Hopper, against attention in f64.

use flashcore_sim as sim;
use kernels::Forward;
use kernels::forward::{Divisor, TileLists};
use kernels::product::Source;
use ptx::{Element, Program, TileLayout};
use sim::{Argument, BufferId, Launch, Measure, Memory, Mode, Options, Policy, TensorMapArgument};

use crate::{Random, every_schedule, succeed};

/// A problem with its inputs in memory. Tensors are (batch, position, head,
/// dimension), contiguous.
struct Problem {
    forward: Forward,
    program: Program,
    grid: u32,
    batch: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    group: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    memory: Memory,
    output: BufferId,
    lse: BufferId,
    arguments: Vec<Argument>,
    scale: f32,
}

fn bits(element: Element, x: f32) -> u16 {
    match element {
        Element::F16 => sim::float::f16_bits(x),
        _ => sim::float::bf16_bits(x),
    }
}

fn number(element: Element, x: u16) -> f32 {
    match element {
        Element::F16 => sim::float::from_f16(x),
        _ => sim::float::from_bf16(x),
    }
}

impl Problem {
    fn new(forward: Forward, batch: usize, queries: usize, keys: usize, heads: usize) -> Self {
        let group = if heads.is_multiple_of(2) { 2 } else { 1 };
        let key_heads = heads / group;
        let element = forward.element;
        let (dim, value_dim) = (forward.head_dim as usize, forward.value_head_dim as usize);
        let mut random = Random::new(5);
        let mut memory = Memory::new();
        let mut tensor = |name: &str, rows: usize, heads: usize, dim: usize| {
            let raw: Vec<u16> = (0..batch * rows * heads * dim)
                .map(|_| bits(element, 2.0 * random.next()))
                .collect();
            let buffer = memory.input_u16(name, &raw);
            (buffer, raw.into_iter().map(|x| number(element, x)).collect::<Vec<f32>>())
        };
        let (q_buffer, q) = tensor("queries", queries, heads, dim);
        let (k_buffer, k) = tensor("keys", keys, key_heads, dim);
        let (v_buffer, v) = tensor("values", keys, key_heads, value_dim);
        let output = memory.output("output", 2 * batch * queries * heads * value_dim);
        let lse = memory.output("lse", 4 * batch * heads * queries);
        let map = |buffer, rows: usize, heads: usize, dim: usize, layout: TileLayout| {
            Argument::TensorMap(TensorMapArgument {
                buffer,
                offset: 0,
                dimensions: vec![dim as u64, rows as u64, heads as u64, batch as u64],
                strides: [heads * dim, dim, rows * heads * dim].map(|s| 2 * s as u64).to_vec(),
                tensor_box: layout.tensor_box(4),
            })
        };
        let scale = 1.0 / (dim as f32).sqrt();
        let row_tiles = (queries as u32).div_ceil(forward.query_rows());
        let lengths = [queries as u32, keys as u32];
        let counts = [heads, key_heads, batch].map(|n| n as u32);
        let lists = TileLists::new(&forward, lengths, counts, 2, 1 << 20);
        let list_buffer = memory.input_u32("tile lists", &lists.words);
        let program = forward.program().unwrap();
        // By name, so that their order is the kernel's own business.
        let arguments = (program.parameters.iter())
            .map(|parameter| {
                let (what, part) = match parameter.name.split_once(", ") {
                    Some((what, part)) => (what, part),
                    None => (parameter.name.as_str(), "number"),
                };
                let divisor = |number: u32| {
                    let Divisor { number, multiplier, shift } = Divisor::new(number);
                    Argument::U32(match part {
                        "multiplier" => multiplier,
                        "shift" => shift,
                        _ => number,
                    })
                };
                match what {
                    "queries" => map(q_buffer, queries, heads, dim, forward.query_layout()),
                    "keys" => map(k_buffer, keys, key_heads, dim, forward.key_layout()),
                    "values" => map(v_buffer, keys, key_heads, value_dim, forward.value_layout()),
                    "output" => map(output, queries, heads, value_dim, forward.output_layout()),
                    "lse" => Argument::Address(lse, 0),
                    "query length" => Argument::U32(queries as u32),
                    "key length" => Argument::U32(keys as u32),
                    "scale times log2(e)" => Argument::F32(scale * std::f32::consts::LOG2_E),
                    "tiles" => Argument::U32(row_tiles * (heads * batch) as u32),
                    "tile lists" => Argument::Address(list_buffer, 0),
                    "tiles of a head" => divisor(row_tiles),
                    "query heads" => divisor(heads as u32),
                    "query heads per key head" => divisor(group as u32),
                    other => panic!("no argument for {other}"),
                }
            })
            .collect();
        Problem {
            forward,
            program,
            grid: lists.blocks,
            batch,
            queries,
            keys,
            heads,
            group,
            q,
            k,
            v,
            memory,
            output,
            lse,
            arguments,
            scale,
        }
    }

    fn launch(&self) -> Launch<'_> {
        Launch { program: &self.program, grid: self.grid, arguments: self.arguments.clone() }
    }

    fn check(&self, memory: &Memory) {
        assert_eq!(memory.unwritten(self.output), 0, "output not written");
        assert_eq!(memory.unwritten(self.lse), 0, "log-sum-exp not written");
        let element = self.forward.element;
        let (dim, value_dim) =
            (self.forward.head_dim as usize, self.forward.value_head_dim as usize);
        let output = memory.u16(self.output);
        let lse = memory.f32(self.lse);
        let key_heads = self.heads / self.group;
        let tolerance = if element == Element::F16 { 2e-3 } else { 1.6e-2 };
        for b in 0..self.batch {
            for h in 0..self.heads {
                for i in 0..self.queries {
                    let q = &self.q[((b * self.queries + i) * self.heads + h) * dim..][..dim];
                    let visible = match self.forward.causal {
                        true => (i + 1 + self.keys).saturating_sub(self.queries).min(self.keys),
                        false => self.keys,
                    };
                    let row = |j: usize| (b * self.keys + j) * key_heads + h / self.group;
                    let scores: Vec<f64> = (0..visible)
                        .map(|j| {
                            let k = &self.k[row(j) * dim..][..dim];
                            let dot: f64 =
                                q.iter().zip(k).map(|(q, k)| *q as f64 * *k as f64).sum();
                            dot * self.scale as f64
                        })
                        .collect();
                    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    let found = lse[(b * self.heads + h) * self.queries + i] as f64;
                    let expected = if visible == 0 { f64::NEG_INFINITY } else { top + total.ln() };
                    assert!(
                        found == expected || (found - expected).abs() < 1e-3,
                        "log-sum-exp of row {i}: {found}, not {expected}"
                    );
                    for d in 0..value_dim {
                        let sum: f64 = (0..visible)
                            .map(|j| weights[j] * self.v[row(j) * value_dim + d] as f64)
                            .sum();
                        let expected = if visible == 0 { 0.0 } else { sum / total };
                        let at = ((b * self.queries + i) * self.heads + h) * value_dim + d;
                        let found = number(element, output[at]) as f64;
                        assert!(
                            (found - expected).abs() <= tolerance,
                            "{}: row {i}, column {d}: {found}, not {expected}",
                            self.forward.name()
                        );
                    }
                }
            }
        }
    }
}

/// A small configuration; what it does not name is as shipped.
fn small() -> Forward {
    Forward {
        element: Element::BF16,
        head_dim: 64,
        value_head_dim: 64,
        causal: false,
        warpgroups: 2,
        key_block: 32,
        stages: 2,
        query_buffers: 1,
        query_source: Source::Shared,
        ping_pong: true,
        ..kernels::forward::every_tuned()[0]
    }
}

#[test]
fn forward_is_attention() {
    for (forward, queries, keys) in [
        (small(), 130, 70),
        (Forward { causal: true, ..small() }, 150, 100),
        (Forward { causal: true, warpgroups: 1, query_buffers: 2, ..small() }, 200, 65),
        (Forward { element: Element::F16, head_dim: 40, value_head_dim: 72, ..small() }, 65, 97),
    ] {
        let problem = Problem::new(forward, 1, queries, keys, 2);
        for policy in Policy::HOSTILE {
            let mut memory = problem.memory.clone();
            let options = Options::checked(policy, 3);
            succeed(sim::run(&problem.launch(), &mut memory, &options));
            problem.check(&memory);
        }
    }
}

#[test]
fn forward_with_queries_in_registers() {
    let forward = Forward { query_source: Source::Registers, ..small() };
    let problem = Problem::new(forward, 1, 130, 70, 2);
    for policy in Policy::HOSTILE {
        let mut memory = problem.memory.clone();
        succeed(sim::run(&problem.launch(), &mut memory, &Options::checked(policy, 3)));
        problem.check(&memory);
    }
}

/// Every configuration that is shipped, on the smallest problem that takes it
/// around its loop, with ragged ends.
#[test]
fn every_tuned_forward() {
    let configurations = kernels::forward::every_tuned();
    let half = configurations.len().div_ceil(2);
    std::thread::scope(|scope| {
        for (part, configurations) in configurations.chunks(half).enumerate() {
            scope.spawn(move || {
                for (index, forward) in configurations.iter().enumerate() {
                    let queries = forward.query_rows() as usize - 3;
                    let keys = 2 * forward.key_block as usize + 5;
                    let problem = Problem::new(*forward, 1, queries, keys, 1);
                    let mut memory = problem.memory.clone();
                    let policy = Policy::HOSTILE[(index + part) % 3];
                    let options = Options::checked(policy, index as u64);
                    succeed(sim::run(&problem.launch(), &mut memory, &options));
                    problem.check(&memory);
                }
            });
        }
    });
}

#[test]
fn forward_under_many_schedules() {
    for causal in [false, true] {
        let problem = Problem::new(Forward { causal, ..small() }, 1, 129, 65, 1);
        let launch = problem.launch();
        every_schedule(&launch, &problem.memory, Mode::Values, 8, |m| problem.check(m));
    }
}

#[test]
fn forward_has_a_timeline() {
    let problem = Problem::new(small(), 1, 128, 128, 1);
    let mut memory = problem.memory.clone();
    let options = Options { trace: true, ..Options::values(Policy::Modelled, 0) };
    let report = succeed(sim::run(&problem.launch(), &mut memory, &options));
    problem.check(&memory);
    let trace = report.trace.expect("asked for");
    let json: serde_json::Value = serde_json::from_str(&trace.to_json()).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    let named = |name: &str| events.iter().any(|e| e["args"]["name"] == name);
    assert!(named("tensor cores") && named("copies") && named("warp 4"));
    assert!(report.counts.get(Measure::Cycles) > 1000);
    // 2 * rows * keys * (head dim + value head dim)
    assert_eq!(report.counts.get(Measure::TensorOperations), 2 * 128 * 128 * 128);
    assert_eq!(report.counts.get(Measure::BankConflicts), 0);
}
