//! The work of a rank: what it computes, sends and keeps, as timed stages.

use flashcore::distributed::{Distribution, Rows, Step};
use flashcore::{Pass, Problem};

use super::Setting;
use super::links::Traffic;
use super::overlap::Stage;
use crate::Error;

/// GB/s at which tensors are copied, summed and merged: most of what the memory of an H200 gives.
const COPY_GIGABYTES_PER_SECOND: f64 = 3600.0;
/// The maximum number of partial outputs, and of partial dQ, that are kept until they are combined,
/// as in `flashcore.distributed`.
const PARTS: usize = 16;
/// The maximum number of partial dK and dV.
const KEY_PARTS: usize = 8;

/// Returns the milliseconds of reading or writing so many bytes.
fn copy_milliseconds(bytes: usize) -> f64 {
    bytes as f64 / COPY_GIGABYTES_PER_SECOND / 1e6
}

/// What a rank of a distributed problem has to do.
pub(super) struct RankWork<'a> {
    problem: &'a Problem,
    distribution: &'a Distribution,
    rank: usize,
    /// Its node, and its place among the ranks of the node.
    node: usize,
    member: usize,
    /// The rows of a sequence that it computes with.
    held: usize,
    steps: Vec<Step>,
}

impl<'a> RankWork<'a> {
    pub(super) fn new(problem: &'a Problem, distribution: &'a Distribution, rank: usize) -> Self {
        let (node, member) = distribution.place(rank);
        let held = distribution.held(member).iter().map(|piece| piece.rows.len()).sum();
        RankWork {
            problem,
            distribution,
            rank,
            node,
            member,
            held,
            steps: distribution.steps(rank),
        }
    }

    /// Returns the stages of a pass, one after the other.
    ///
    /// In the forward pass a step computes while the keys of the next one are transferred. In the
    /// backward pass the key gradients of the step before return to their owner at the same time.
    /// Exchanges of heads for rows, and the transfers of an all-gather, are not overlapped.
    pub(super) fn stages(&self, setting: &Setting, pass: Pass) -> Result<Vec<Stage>, Error> {
        let mut compute = Vec::new();
        for step in &self.steps {
            compute.push(self.kernels(setting, step, pass)?);
        }
        if pass == Pass::Forward {
            compute.push(copy_milliseconds(self.outputs().traffic()));
        }
        let keys = |index: usize| {
            self.steps.get(index).map_or(0.0, |step| self.exchange_keys(setting, step))
        };
        let [to_heads, to_rows] = self.exchanges(setting, pass);
        let mut stages = vec![Stage::transfer(to_heads)];
        // The first step needs no transfer, except in an all-gather.
        stages.push(Stage::transfer(match self.distribution.gathers_all() {
            true => self.gathers(setting),
            false => keys(0),
        }));
        for (index, compute) in compute.iter().enumerate() {
            let back = match pass {
                Pass::Backward if index > 0 => keys(index - 1),
                _ => 0.0,
            };
            stages.push(Stage { compute: *compute, transfer: keys(index + 1) + back });
        }
        if pass == Pass::Backward {
            stages.push(Stage::transfer(keys(compute.len().saturating_sub(1))));
            let sums = self.gradients().map(|it| it.traffic());
            stages.push(Stage::compute(copy_milliseconds(sums.iter().sum())));
        }
        stages.push(Stage::transfer(to_rows));
        stages.retain(|it| *it != Stage::default());
        Ok(stages)
    }

    /// Returns the bytes that are needed at the peak: the rank's tensors, and what
    /// `flashcore.distributed` adds.
    pub(super) fn memory(&self, backward: bool) -> u64 {
        let RankWork { problem, distribution, .. } = *self;
        let Problem { batch, query_heads, kv_heads, head_dim, value_head_dim, .. } = *problem;
        let element = problem.dtype().bytes();
        let (dims, heads) = (head_dim + value_head_dim, distribution.head_share(self.node));
        // Query and output, key and value, log-sum-exp; and the gradients of the first four.
        let tensors = |rows: usize, heads: usize, kv_heads: usize| {
            let values = rows * (heads + kv_heads) * dims * element;
            batch * (values * if backward { 2 } else { 1 } + rows * heads * 4)
        };
        let mut bytes = tensors(distribution.owned_rows(self.rank), query_heads, kv_heads);
        if distribution.nodes() > 1 {
            bytes += tensors(self.held, heads.query.len(), heads.key.len());
        }
        let received = |step: &Step| step.receive.iter().map(|it| self.bytes(it)).sum();
        let most: u64 = self.steps.iter().map(received).max().unwrap_or(0);
        // Buffers of a ring: keys in use, being received and being sent; in the backward pass also
        // gradients being computed and being sent, while received ones count as parts. An all-gather
        // reorders what it received into a second buffer, and sends gradients from a third.
        let messages = match (distribution.gathers_all(), backward) {
            (true, false) => 2,
            (true, true) => 3,
            (false, false) => 3,
            (false, true) => 5,
        };
        bytes += messages * most as usize;
        let (rows, outputs) = (self.query_rows(), self.outputs());
        // The log-sum-exps of the parts.
        let log_sum_exps = if outputs.count > 1 { outputs.count.min(PARTS) * rows * 4 } else { 0 };
        let forward = outputs.kept() + log_sum_exps;
        // The f32 accumulator of dQ of one step.
        let sums = self.gradients().map(|it| it.kept());
        let gradients = sums.iter().sum::<usize>() + 4 * rows * head_dim;
        bytes += if backward { forward.max(gradients) } else { forward };
        bytes as u64
    }

    /// Returns the milliseconds of a step's kernels.
    fn kernels(&self, setting: &Setting, step: &Step, pass: Pass) -> Result<f64, Error> {
        let heads = self.distribution.head_share(self.node);
        let mut milliseconds = 0.0;
        for launch in &step.launches {
            for block in &launch.blocks {
                let mut part = self.problem.clone().with_mask(launch.mask);
                (part.query_heads, part.kv_heads) = (heads.query.len(), heads.key.len());
                (part.query_length, part.key_length) = (block.queries.len(), block.keys.len());
                part.pass = pass;
                milliseconds += setting.times.milliseconds(&part)?;
            }
        }
        Ok(milliseconds)
    }

    /// Returns the query rows that the rank computes, over all of its heads and sequences.
    fn query_rows(&self) -> usize {
        self.problem.batch * self.held * self.distribution.head_share(self.node).query.len()
    }

    /// Returns the parts of the output.
    fn outputs(&self) -> Parts {
        Parts {
            count: self.steps.iter().map(|step| step.launches.len()).sum(),
            most: PARTS,
            numbers: self.query_rows() * self.problem.value_head_dim,
            element: self.problem.dtype().bytes(),
        }
    }

    /// Returns the partial dQ, and the partial dK and dV of own keys, which other ranks send.
    fn gradients(&self) -> [Parts; 2] {
        let RankWork { problem, distribution, steps, .. } = self;
        let queries = Parts { numbers: self.query_rows() * problem.head_dim, ..self.outputs() };
        let count = 1 + steps.iter().map(|step| step.send.len()).sum::<usize>();
        // The gradients of a single step arrive at once, as in an all-gather.
        let most = if steps.len() == 1 { count } else { KEY_PARTS };
        let rows = problem.batch * self.held * distribution.head_share(self.node).key.len();
        let numbers = rows * (problem.head_dim + problem.value_head_dim);
        [queries, Parts { count, most, numbers, element: problem.dtype().bytes() }]
    }

    /// Returns the bytes of some rows of keys and values.
    fn bytes(&self, rows: &Rows) -> u64 {
        (self.problem.batch * rows.count()) as u64 * self.distribution.key_bytes(self.node)
    }

    /// Returns the milliseconds of an all-gather, including the reordering by position.
    fn gathers(&self, setting: &Setting) -> f64 {
        let received = self.steps.iter().flat_map(|it| &it.receive);
        let received: u64 = received.map(|it| self.bytes(it)).sum();
        setting.cluster.collective(self.distribution.ranks(), received)
            + copy_milliseconds(2 * received as usize)
    }

    /// Returns the milliseconds of packing a step's keys into messages, receiving and sending them.
    fn exchange_keys(&self, setting: &Setting, step: &Step) -> f64 {
        let one_way = |messages: &[Rows]| {
            let mut traffic = Traffic::default();
            for rows in messages {
                setting.cluster.add(&mut traffic, [self.rank, rows.rank], self.bytes(rows));
            }
            setting.cluster.milliseconds(&traffic)
        };
        let sent: u64 = step.send.iter().map(|rows| self.bytes(rows)).sum();
        one_way(&step.receive).max(one_way(&step.send)) + copy_milliseconds(2 * sent as usize)
    }

    /// Returns the milliseconds of exchanging heads for rows and back: in the forward pass queries,
    /// keys and values go and outputs return; in the backward pass dO goes and dQ, dK and dV return.
    fn exchanges(&self, setting: &Setting, pass: Pass) -> [f64; 2] {
        let RankWork { problem, distribution, rank, node, member, .. } = *self;
        // Every message holds the rows of one rank and the heads of another's node.
        let one_way = |from_here: bool, wide: bool| {
            let (mut traffic, mut copied) = (Traffic::default(), 0);
            for other in (0..distribution.nodes()).filter(|it| *it != node) {
                let (there, heads) =
                    (distribution.rank_at(other, member), if from_here { other } else { node });
                let rows = distribution.owned_rows(if from_here { rank } else { there });
                let heads = distribution.head_share(heads);
                let (dim, value_dim) = (problem.head_dim, problem.value_head_dim);
                let numbers = match wide {
                    true => heads.query.len() * dim + heads.key.len() * (dim + value_dim),
                    false => heads.query.len() * value_dim,
                };
                let bytes = problem.batch * rows * numbers * problem.dtype().bytes();
                setting.cluster.add(&mut traffic, [rank, there], bytes as u64);
                copied += 2 * bytes;
            }
            [setting.cluster.milliseconds(&traffic), copy_milliseconds(copied)]
        };
        // Messages are packed before, and unpacked after.
        let both = |wide| {
            let ([sent, packed], [received, unpacked]) =
                (one_way(true, wide), one_way(false, wide));
            sent.max(received) + packed + unpacked
        };
        match pass {
            Pass::Forward => [both(true), both(false)],
            Pass::Backward => [both(false), both(true)],
        }
    }
}

/// Partial results of a tensor, of which at most so many are kept until they are combined.
struct Parts {
    count: usize,
    most: usize,
    numbers: usize,
    element: usize,
}

impl Parts {
    /// Returns the bytes read and written: all parts are read and the result is written; if there
    /// are too many parts, they are combined some at a time into f32 sums.
    fn traffic(&self) -> usize {
        let Parts { count, most, numbers, element } = *self;
        let folds = if count > most { count.div_ceil(most) } else { 0 };
        match count {
            // A single part is the tensor itself.
            0 | 1 => 0,
            _ => numbers * (count * element + element + folds * (4 + 3 * 4)),
        }
    }

    /// Returns the bytes of memory; with too many parts, including two f32 sums, one of all and one
    /// of the last.
    fn kept(&self) -> usize {
        let Parts { count, most, numbers, element } = *self;
        match count {
            0 | 1 => 0,
            _ if count > most => numbers * (most * element + 2 * 4),
            _ => numbers * count * element,
        }
    }
}

#[cfg(test)]
mod tests {
    use flashcore::Mask;

    use super::super::links::{Cluster, Link};
    use super::super::overlap::{PassTime, events};
    use super::super::times::Times;
    use super::super::{Variant, distribute};
    use super::*;

    fn setting(node: usize, gigabytes_per_second: f64, latency_microseconds: f64) -> Setting {
        let link = Link { gigabytes_per_second, latency_microseconds };
        Setting {
            times: Times::embedded(),
            cluster: Cluster { node, inside: link, between: link },
            memory_bytes: 141_000_000_000,
            backward: true,
        }
    }

    fn problem(length: usize, mask: Mask) -> Problem {
        let mut problem: Problem = "b=2,h=16,hk=8,d=128,bf16".parse().unwrap();
        (problem.query_length, problem.key_length) = (length, length);
        problem.with_mask(mask)
    }

    fn spans(
        setting: &Setting,
        problem: &Problem,
        ranks: usize,
        variant: Variant,
    ) -> [PassTime; 2] {
        let distribution = distribute(problem, ranks, variant, setting.cluster.node).unwrap();
        let work = RankWork::new(problem, &distribution, 1);
        [Pass::Forward, Pass::Backward]
            .map(|pass| PassTime::of(&work.stages(setting, pass).unwrap()))
    }

    /// Two ranks and no mask, by hand: the keys of the other come while a rank computes with its own.
    #[test]
    fn a_ring_of_two() {
        let (setting, problem) = (setting(8, 100.0, 5.0), problem(32_768, Mask::NONE));
        let half = setting.times.milliseconds(&self::problem(16_384, Mask::NONE)).unwrap();
        // Keys and values of 16,384 rows, 8 heads of 128 numbers of 2 bytes, in 2 sequences.
        let bytes = 2 * 16_384 * 8 * 256 * 2;
        let sent = bytes as f64 / 100.0 / 1e6 + 5e-3 + copy_milliseconds(2 * bytes);
        // Two parts are read, and their sum is written.
        let merged = copy_milliseconds(2 * 16_384 * 16 * 128 * 2 * 3);
        let [forward, backward] = spans(&setting, &problem, 2, Variant::Ring);
        assert!((forward.total - (half.max(sent) + half + merged)).abs() < 1e-9, "{forward:?}");
        assert!((forward.transfer - sent).abs() < 1e-9, "{forward:?}");
        // Backward, they come again, and their gradients go back at the end.
        assert!((backward.transfer - 2.0 * sent).abs() < 1e-9, "{backward:?}");
        let mut half = self::problem(16_384, Mask::NONE);
        half.pass = Pass::Backward;
        let half = setting.times.milliseconds(&half).unwrap();
        // Of queries, keys and values too, two parts are read and their sum is written.
        let summed = copy_milliseconds(2 * 16_384 * (16 + 2 * 8) * 128 * 2 * 3);
        assert!((backward.compute - (2.0 * half + summed)).abs() < 1e-9, "{backward:?}");
        assert!((backward.total - backward.compute - sent).abs() < 1e-9, "{backward:?}");
    }

    /// What is kept in parts does not grow with their number once there are many.
    #[test]
    fn many_parts_take_no_more_memory() {
        let parts = |count| Parts { count, most: 8, numbers: 10, element: 2 };
        assert_eq!([1, 2, 8, 9, 900].map(|it| parts(it).kept()), [0, 40, 160, 240, 240]);
        // Nine: each is read and the sum is written, and twice a sum in f32 comes between.
        assert_eq!(parts(9).traffic(), 10 * (9 * 2 + 2 + 2 * 16));
    }

    /// What links carry is what the decomposition says that a rank sends.
    #[test]
    fn links_carry_what_is_sent() {
        // So slow that copies take no time beside it.
        let setting = setting(4, 1.0, 0.0);
        for mask in [Mask::NONE, Mask::CAUSAL] {
            for variant in Variant::ALL {
                let problem = problem(65_536, mask);
                let distribution = distribute(&problem, 8, variant, 4).unwrap();
                let sent = distribution.sent(1);
                let spans = spans(&setting, &problem, 8, variant);
                let shares = [(spans[0], sent.forward), (spans[1], sent.backward)]
                    .map(|(span, sent)| span.transfer * 1e6 / sent as f64);
                let expected = match (variant, mask) {
                    // To three within the node, and at the same time to four beyond it.
                    (Variant::AllToAll, _) => [4.0 / 7.0; 2],
                    // A collective goes over four links at once; gradients come back like heads.
                    (Variant::AllGather, _) => [1.0, (1.0 + 4.0 / 7.0) / 2.0],
                    // A rank sends all of its keys where it gets half of another's, and the other way round.
                    (Variant::Ring | Variant::Hybrid, Mask::CAUSAL) => {
                        assert!(
                            shares.iter().all(|it| (1.0..2.0).contains(it)),
                            "{variant}: {shares:?}"
                        );
                        continue;
                    }
                    _ => [1.0; 2],
                };
                for (share, expected) in shares.into_iter().zip(expected) {
                    assert!((share - expected).abs() < 5e-3, "{variant}, {mask}: {shares:?}");
                }
            }
        }
    }

    /// The ranks of a causal ring, one event after the other, take what is predicted of the slowest.
    #[test]
    fn a_ring_in_events_takes_what_is_predicted() {
        for speed in [0.5, 2.0, 8.0, 400.0] {
            let (setting, problem) = (setting(8, speed, 5.0), problem(65_536, Mask::CAUSAL));
            let distribution = distribute(&problem, 8, Variant::Ring, 8).unwrap();
            for pass in [Pass::Forward, Pass::Backward] {
                let all = |rank| {
                    RankWork::new(&problem, &distribution, rank).stages(&setting, pass).unwrap()
                };
                let ranks: Vec<Vec<Stage>> = (0..8).map(all).collect();
                let slowest = ranks.iter().map(|it| PassTime::of(it).total).fold(0.0, f64::max);
                let simulated = events::simulate(&ranks);
                let off = simulated / slowest - 1.0;
                assert!((-1e-6..0.03).contains(&off), "{speed} GB/s: {slowest}, not {simulated}");
            }
        }
    }
}
