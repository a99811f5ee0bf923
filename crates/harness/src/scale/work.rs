//! What a rank computes, sends and keeps, as stages of time.

use flashcore::distributed::{Distribution, Rows, Step};
use flashcore::{Pass, Problem};

use super::Setting;
use super::links::Traffic;
use super::overlap::Stage;
use crate::Error;

/// GB/s at which tensors are copied, summed and merged: most of what the memory of an H200 gives.
const MEMORY: f64 = 3600.0;
/// Parts of the output that are kept until they are put together, as `flashcore.distributed` does.
const PARTS: usize = 16;

/// Milliseconds in which so many bytes are read or written.
fn moved(bytes: usize) -> f64 {
    bytes as f64 / MEMORY / 1e6
}

/// What a rank does in a pass, one after the other.
///
/// In the forward pass a step computes while the keys of the next one are under way. In the backward
/// pass the gradients of the keys of the step before go back to their owner at the same time. Exchanging heads
/// for rows, and what an all-gather gets and gives back, is waited for.
pub(super) fn stages(
    setting: &Setting,
    problem: &Problem,
    of: &Distribution,
    rank: usize,
    pass: Pass,
) -> Result<Vec<Stage>, Error> {
    let steps = of.steps(rank);
    let mut compute = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let sums = match pass {
            Pass::Backward if index > 0 => sums(problem, of, rank, step),
            _ => 0.0,
        };
        compute.push(kernels(setting, problem, of, rank, step, pass)? + sums);
    }
    if pass == Pass::Forward {
        compute.push(merges(problem, of, rank, &steps));
    }
    let keys = |index: usize| {
        let step = steps.get(index);
        step.map_or(0.0, |step| exchange_keys(setting, problem, of, rank, step))
    };
    let [to_heads, to_rows] = exchanges(setting, problem, of, rank, pass);
    let mut stages = vec![Stage::transfer(to_heads)];
    // What the first step needs is there, but in an all-gather.
    stages.push(Stage::transfer(match of.gathers_all() {
        true => gathers(setting, problem, of, rank, &steps),
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
    }
    stages.push(Stage::transfer(to_rows));
    stages.retain(|it| *it != Stage::default());
    Ok(stages)
}

/// Milliseconds of a step's kernels.
fn kernels(
    setting: &Setting,
    problem: &Problem,
    of: &Distribution,
    rank: usize,
    step: &Step,
    pass: Pass,
) -> Result<f64, Error> {
    let heads = of.head_share(of.place(rank).0);
    let mut milliseconds = 0.0;
    for launch in &step.launches {
        for block in &launch.blocks {
            let mut part = problem.clone().with_mask(launch.mask);
            (part.query_heads, part.kv_heads) = (heads.query.len(), heads.key.len());
            (part.query_length, part.key_length) = (block.queries.len(), block.keys.len());
            part.pass = pass;
            milliseconds += setting.times.milliseconds(&part)?;
        }
    }
    Ok(milliseconds)
}

/// Rows that a rank computes with, of all heads and sequences that it has them of.
fn held_rows(problem: &Problem, of: &Distribution, rank: usize) -> usize {
    let (node, member) = of.place(rank);
    let rows: usize = of.held(member).iter().map(|piece| piece.rows.len()).sum();
    problem.batch * rows * of.head_share(node).query.len()
}

/// Milliseconds in which parts of the output are put together: all are read, and what comes out is written; where
/// they are many, some at a time, into sums in f32.
fn merges(problem: &Problem, of: &Distribution, rank: usize, steps: &[Step]) -> f64 {
    let parts: usize = steps.iter().map(|step| step.launches.len()).sum();
    if parts < 2 {
        return 0.0;
    }
    let element = problem.dtype().bytes();
    let folds = if parts > PARTS { parts.div_ceil(PARTS) } else { 0 };
    let values = held_rows(problem, of, rank) * problem.value_head_dim;
    moved(values * (parts * element + element + folds * (4 + 3 * 4)))
}

/// Milliseconds in which a later step's gradients are added to sums in f32, which are read and written: those
/// of queries here, and those of keys with their owner, as many as are computed here.
fn sums(problem: &Problem, of: &Distribution, rank: usize, step: &Step) -> f64 {
    let heads = of.head_share(of.place(rank).0);
    let blocks = step.launches.iter().flat_map(|it| &it.blocks);
    let queries = blocks.map(|it| it.queries.len()).sum::<usize>() * heads.query.len();
    let keys = step.receive.iter().map(Rows::count).sum::<usize>() * heads.key.len();
    let (dim, value_dim) = (problem.head_dim, problem.value_head_dim);
    let numbers = problem.batch * (queries * dim + keys * (dim + value_dim));
    moved(numbers * (problem.dtype().bytes() + 2 * 4))
}

/// Milliseconds of an all-gather, which is put in the order of positions.
fn gathers(
    setting: &Setting,
    problem: &Problem,
    of: &Distribution,
    rank: usize,
    steps: &[Step],
) -> f64 {
    let received = steps.iter().flat_map(|it| &it.receive);
    let received: u64 = received.map(|it| bytes(problem, of, rank, it)).sum();
    setting.cluster.collective(of.ranks(), received) + moved(2 * received as usize)
}

/// Bytes of some rows of keys and values.
fn bytes(problem: &Problem, of: &Distribution, rank: usize, rows: &Rows) -> u64 {
    (problem.batch * rows.count()) as u64 * of.key_bytes(of.place(rank).0)
}

/// Milliseconds in which a step's keys are put into messages, come, and go to others.
fn exchange_keys(
    setting: &Setting,
    problem: &Problem,
    of: &Distribution,
    rank: usize,
    step: &Step,
) -> f64 {
    let one_way = |messages: &[Rows]| {
        let mut traffic = Traffic::default();
        for rows in messages {
            setting.cluster.add(&mut traffic, [rank, rows.rank], bytes(problem, of, rank, rows));
        }
        setting.cluster.milliseconds(&traffic)
    };
    let sent: u64 = step.send.iter().map(|rows| bytes(problem, of, rank, rows)).sum();
    one_way(&step.receive).max(one_way(&step.send)) + moved(2 * sent as usize)
}

/// Milliseconds in which heads are exchanged for rows, and rows for heads again: forward, queries, keys and
/// values go and outputs come back; backward, gradients of outputs go and those of the others come back.
fn exchanges(
    setting: &Setting,
    problem: &Problem,
    of: &Distribution,
    rank: usize,
    pass: Pass,
) -> [f64; 2] {
    let (node, member) = of.place(rank);
    // Rows of one rank, with the heads of another's node: all that goes is of this form.
    let one_way = |from_here: bool, wide: bool| {
        let (mut traffic, mut copied) = (Traffic::default(), 0);
        for other in (0..of.nodes()).filter(|it| *it != node) {
            let (there, heads) = (of.rank_at(other, member), if from_here { other } else { node });
            let rows = of.owned_rows(if from_here { rank } else { there });
            let heads = of.head_share(heads);
            let (dim, value_dim) = (problem.head_dim, problem.value_head_dim);
            let numbers = match wide {
                true => heads.query.len() * dim + heads.key.len() * (dim + value_dim),
                false => heads.query.len() * value_dim,
            };
            let bytes = problem.batch * rows * numbers * problem.dtype().bytes();
            setting.cluster.add(&mut traffic, [rank, there], bytes as u64);
            copied += 2 * bytes;
        }
        [setting.cluster.milliseconds(&traffic), moved(copied)]
    };
    // Messages are put together before, and taken apart after.
    let both = |wide| {
        let ([sent, packed], [received, unpacked]) = (one_way(true, wide), one_way(false, wide));
        sent.max(received) + packed + unpacked
    };
    match pass {
        Pass::Forward => [both(true), both(false)],
        Pass::Backward => [both(false), both(true)],
    }
}

/// Bytes that a rank needs at its peak: its tensors, and what `flashcore.distributed` adds.
pub(super) fn memory(problem: &Problem, of: &Distribution, rank: usize, backward: bool) -> u64 {
    let (node, member) = of.place(rank);
    let Problem { batch, query_heads, kv_heads, head_dim, value_head_dim, .. } = *problem;
    let element = problem.dtype().bytes();
    let (dims, heads) = (head_dim + value_head_dim, of.head_share(node));
    // Query and output, key and value, log-sum-exp; and the gradients of the first four.
    let tensors = |rows: usize, heads: usize, kv_heads: usize| {
        let values = rows * (heads + kv_heads) * dims * element;
        batch * (values * if backward { 2 } else { 1 } + rows * heads * 4)
    };
    let mut bytes = tensors(of.owned_rows(rank), query_heads, kv_heads);
    let held: usize = of.held(member).iter().map(|piece| piece.rows.len()).sum();
    if of.nodes() > 1 {
        bytes += tensors(held, heads.query.len(), heads.key.len());
    }
    let steps = of.steps(rank);
    let received =
        |step: &Step| step.receive.iter().map(|it| self::bytes(problem, of, rank, it)).sum();
    let most: u64 = steps.iter().map(received).max().unwrap_or(0);
    // Keys that are used, those that come, and those that go; then as much for their gradients. What an
    // all-gather gets is put in order beside it, and gradients leave from a copy.
    let messages = match (of.gathers_all(), backward) {
        (true, false) => 2,
        (true, true) => 4,
        (false, false) => 3,
        (false, true) => 6,
    };
    bytes += messages * most as usize;
    let rows = held_rows(problem, of, rank);
    let parts: usize = steps.iter().map(|step| step.launches.len()).sum();
    let in_parts = rows * (value_head_dim * element + 4) * parts.min(PARTS);
    // Of one part the output is the part.
    let in_parts = if parts > 1 { in_parts } else { 0 };
    let in_sums = rows * value_head_dim * if parts > PARTS { 2 * 4 } else { 0 };
    let forward = in_parts + in_sums;
    // Sums in f32: those of all steps, and those that the kernel has of a step's queries.
    let keys = batch * held * heads.key.len() * dims;
    let gradients = 4 * (2 * rows * head_dim + keys);
    bytes += if backward { forward.max(gradients) } else { forward };
    bytes as u64
}

#[cfg(test)]
mod tests {
    use flashcore::Mask;

    use super::super::links::{Cluster, Link};
    use super::super::overlap::{Span, events};
    use super::super::times::Times;
    use super::super::{Variant, distribution};
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

    fn spans(setting: &Setting, problem: &Problem, ranks: usize, variant: Variant) -> [Span; 2] {
        let of = distribution(problem, ranks, variant, setting.cluster.node).unwrap();
        [Pass::Forward, Pass::Backward]
            .map(|pass| Span::of(&stages(setting, problem, &of, 1, pass).unwrap()))
    }

    /// Two ranks and no mask, by hand: the keys of the other come while a rank computes with its own.
    #[test]
    fn a_ring_of_two() {
        let (setting, problem) = (setting(8, 100.0, 5.0), problem(32_768, Mask::NONE));
        let half = setting.times.milliseconds(&self::problem(16_384, Mask::NONE)).unwrap();
        // Keys and values of 16,384 rows, 8 heads of 128 numbers of 2 bytes, in 2 sequences.
        let bytes = 2 * 16_384 * 8 * 256 * 2;
        let sent = bytes as f64 / 100.0 / 1e6 + 5e-3 + moved(2 * bytes);
        // Two parts are read, and their sum is written.
        let merged = moved(2 * 16_384 * 16 * 128 * 2 * 3);
        let [forward, backward] = spans(&setting, &problem, 2, Variant::Ring);
        assert!((forward.total - (half.max(sent) + half + merged)).abs() < 1e-9, "{forward:?}");
        assert!((forward.transfer - sent).abs() < 1e-9, "{forward:?}");
        // Backward, they come again, and their gradients go back at the end.
        assert!((backward.transfer - 2.0 * sent).abs() < 1e-9, "{backward:?}");
        assert!((backward.total - backward.compute - sent).abs() < 1e-9, "{backward:?}");
    }

    /// What links carry is what the decomposition says that a rank sends.
    #[test]
    fn links_carry_what_is_sent() {
        // So slow that copies take no time beside it.
        let setting = setting(4, 1.0, 0.0);
        for mask in [Mask::NONE, Mask::CAUSAL] {
            for variant in Variant::ALL {
                let problem = problem(65_536, mask);
                let of = distribution(&problem, 8, variant, 4).unwrap();
                let sent = of.sent(1);
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
            let of = distribution(&problem, 8, Variant::Ring, 8).unwrap();
            for pass in [Pass::Forward, Pass::Backward] {
                let all = |rank| stages(&setting, &problem, &of, rank, pass).unwrap();
                let ranks: Vec<Vec<Stage>> = (0..8).map(all).collect();
                let slowest = ranks.iter().map(|it| Span::of(it).total).fold(0.0, f64::max);
                let simulated = events::simulate(&ranks);
                let off = simulated / slowest - 1.0;
                assert!((-1e-6..0.03).contains(&off), "{speed} GB/s: {slowest}, not {simulated}");
            }
        }
    }
}
