//! Prediction of attention over many GPUs, from kernel times of one GPU and the speeds of links.
//!
//! | file | its subject |
//! | --- | --- |
//! | [`times`] | kernel times on one GPU: measured, and interpolated |
//! | [`links`] | transfer times over links |
//! | [`overlap`] | overlap of communication and computation |
//! | `work` | the computation, transfers and memory of a rank |
//! | `plot` | predictions as a drawing |
//! | this one | predictions, and which variant to use |
//!
//! Which rank computes and sends what is decided by [`flashcore::distributed`], as in a real run.

pub mod links;
pub mod overlap;
mod plot;
pub mod times;
mod work;

pub use plot::plot;

use std::fmt;
use std::str::FromStr;

use flashcore::distributed::{self, Distribution, Heads, Order, Sequences};
use flashcore::{Mask, Pass, Problem, Storage};
use serde::{Serialize, Serializer};

use crate::Error;
use links::Cluster;
use overlap::PassTime;
use times::Times;
use work::RankWork;

/// The longest sequence.
pub const LONGEST: usize = 10 << 20;
/// The most ranks.
const MOST_RANKS: usize = 1024;
/// Variants whose times differ by less are as good as each other.
const TIE_TOLERANCE: f64 = 0.02;
/// The number of ranks that are simulated. With a causal mask in zig-zag order all ranks have the
/// same work, and under a window those in the middle do.
const SIMULATED_RANKS: usize = 6;

/// The assumptions of a prediction.
#[derive(Debug, Clone)]
pub struct Setting {
    /// Kernel times.
    pub times: Times,
    /// The links.
    pub cluster: Cluster,
    /// Bytes of a GPU's memory.
    pub memory_bytes: u64,
    /// Whether gradients are computed too.
    pub backward: bool,
}

/// How attention is distributed over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// Keys and values are passed around a ring.
    Ring,
    /// Every rank gathers all keys and values.
    AllGather,
    /// An all-to-all exchanges heads for rows (Ulysses).
    AllToAll,
    /// All-to-all between nodes, ring within a node.
    Hybrid,
}

impl Variant {
    /// All of them.
    pub const ALL: [Variant; 4] =
        [Variant::Ring, Variant::AllGather, Variant::AllToAll, Variant::Hybrid];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Variant::Ring => "ring",
            Variant::AllGather => "all-gather",
            Variant::AllToAll => "all-to-all",
            Variant::Hybrid => "hybrid",
        }
    }
}

impl FromStr for Variant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Variant::ALL.into_iter().find(|it| it.name() == text);
        let names = Variant::ALL.map(Variant::name).join(", ");
        found.ok_or_else(|| format!("`{text}` is no variant: expected {names}"))
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Variant {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// The prediction for a variant, of the slowest rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prediction {
    /// The problem, over all ranks.
    pub problem: String,
    /// How many ranks there are.
    pub ranks: usize,
    /// How the work is spread.
    pub variant: Variant,
    /// The number of groups of ranks that exchange heads; keys are exchanged within a group.
    pub groups: usize,
    /// The forward pass.
    pub forward: PassTime,
    /// The backward pass, if it is predicted.
    pub backward: Option<PassTime>,
    /// Both.
    #[serde(rename = "total_ms")]
    pub total: f64,
    /// The share of transfers that kernels hide.
    pub overlap: f64,
    /// One GPU's time over that of all ranks together.
    pub efficiency: f64,
    /// Bytes that a rank sends.
    pub sent_bytes: u64,
    /// Peak memory of a rank, in bytes.
    pub memory_bytes: u64,
    /// Whether that fits into a GPU's memory.
    pub fits: bool,
}

impl Prediction {
    /// Milliseconds of kernels in both passes.
    fn compute(&self) -> f64 {
        self.forward.compute + self.backward.map_or(0.0, |it| it.compute)
    }
}

/// A variant that is not possible, and why.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Refusal {
    /// The problem.
    pub problem: String,
    /// How many ranks there are.
    pub ranks: usize,
    /// The variant.
    pub variant: Variant,
    /// Why not.
    pub reason: String,
}

/// Which variant to use.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Choice {
    /// The problem.
    pub problem: String,
    /// How many ranks there are.
    pub ranks: usize,
    /// The variant; None if none is possible.
    pub variant: Option<Variant>,
    /// Why.
    pub reason: String,
}

/// Checks that a problem can be distributed over ranks.
pub fn check(problem: &Problem, ranks: usize) -> Result<(), Error> {
    let refuse = |reason: String| Err(Error::Impossible(reason));
    problem.validate().map_err(flashcore::Error::from)?;
    let Problem { query_length, key_length, batch, .. } = *problem;
    if ranks == 0 || ranks > MOST_RANKS {
        return refuse(format!("{ranks} ranks cannot be predicted: expected 1 to {MOST_RANKS}"));
    }
    if query_length == 0 || batch == 0 {
        return refuse("there are no tokens".to_owned());
    }
    if query_length > LONGEST {
        return refuse(format!(
            "{query_length} tokens are more than {LONGEST}, the longest sequence"
        ));
    }
    if query_length != key_length {
        return refuse(format!(
            "{query_length} queries over {key_length} keys are not spread over ranks: expected as many"
        ));
    }
    let plain = [Storage::Padded; 2] == [problem.queries, problem.keys];
    if !plain || problem.scores.has_rules() {
        return refuse(
            "sequences of equal lengths and plain scores alone are predicted".to_owned(),
        );
    }
    Ok(())
}

/// Returns the distribution of a problem over ranks by a variant.
fn distribute(
    problem: &Problem,
    ranks: usize,
    variant: Variant,
    node: usize,
) -> Result<Distribution, String> {
    let heads = Heads {
        query: problem.query_heads,
        key: problem.kv_heads,
        dim: problem.head_dim,
        value_dim: problem.value_head_dim,
        element_bytes: problem.dtype().bytes(),
    };
    let sequences = Sequences::Batch { count: problem.batch, length: problem.query_length };
    let spread = match variant {
        Variant::Ring => distributed::Variant::Ring,
        Variant::AllGather => distributed::Variant::AllGather,
        Variant::AllToAll => distributed::Variant::AllToAll,
        Variant::Hybrid => {
            distributed::Variant::Hybrid { nodes: groups(heads.query, ranks, node)? }
        }
    };
    // Zig-zag order balances the work of a causal mask; without one it is balanced anyway.
    let order = if problem.mask == Mask::CAUSAL { Order::ZigZag } else { Order::Contiguous };
    Distribution::new(ranks, sequences, problem.mask, spread, order, heads)
        .map_err(|error| error.to_string())
}

/// The number of groups of whole nodes that exchange heads: the largest one that divides both the
/// nodes and the heads.
fn groups(heads: usize, ranks: usize, node: usize) -> Result<usize, String> {
    let nodes = ranks / node;
    if nodes < 2 || !ranks.is_multiple_of(node) {
        return Err(format!("{ranks} GPUs are not several whole nodes of {node}"));
    }
    let fits = |groups: &usize| nodes.is_multiple_of(*groups) && heads.is_multiple_of(*groups);
    let most = (2..=nodes).rev().find(fits);
    most.ok_or_else(|| format!("{heads} heads cannot be shared out to some of {nodes} nodes"))
}

/// Predicts one variant, or returns why it is not possible.
pub fn predict(
    setting: &Setting,
    problem: &Problem,
    ranks: usize,
    variant: Variant,
) -> Result<Result<Prediction, Refusal>, Error> {
    check(problem, ranks)?;
    let distribution = match distribute(problem, ranks, variant, setting.cluster.node) {
        Ok(distribution) => distribution,
        Err(reason) => {
            return Ok(Err(Refusal { problem: problem.text(), ranks, variant, reason }));
        }
    };
    let passes =
        if setting.backward { &[Pass::Forward, Pass::Backward][..] } else { &[Pass::Forward] };
    let works: Vec<RankWork> =
        simulated_ranks(ranks).map(|rank| RankWork::new(problem, &distribution, rank)).collect();
    let (mut alone, mut slowest) = (0.0, Vec::new());
    for pass in passes {
        let mut whole = problem.clone();
        whole.pass = *pass;
        alone += setting.times.milliseconds(&whole)?;
        let mut span = PassTime::default();
        for work in &works {
            let found = PassTime::of(&work.stages(setting, *pass)?);
            if found.total > span.total {
                span = found;
            }
        }
        slowest.push(span);
    }
    let total: f64 = slowest.iter().map(|it| it.total).sum();
    let transfer: f64 = slowest.iter().map(|it| it.transfer).sum();
    let compute: f64 = slowest.iter().map(|it| it.compute).sum();
    let memory = |work: &RankWork| work.memory(setting.backward);
    let memory_bytes = works.iter().map(memory).max().unwrap_or(0);
    let sent = distribution.sent(0);
    Ok(Ok(Prediction {
        problem: problem.text(),
        ranks,
        variant,
        groups: distribution.nodes(),
        forward: slowest[0],
        backward: slowest.get(1).copied(),
        total,
        overlap: PassTime { total, compute, transfer }.overlap(),
        efficiency: alone / ranks as f64 / total,
        sent_bytes: sent.forward + if setting.backward { sent.backward } else { 0 },
        memory_bytes,
        fits: memory_bytes <= setting.memory_bytes,
    }))
}

/// Evenly spaced ranks, with the first and the last.
fn simulated_ranks(ranks: usize) -> impl Iterator<Item = usize> {
    let count = ranks.min(SIMULATED_RANKS);
    (0..count).map(move |index| index * (ranks - 1) / (count - 1).max(1))
}

/// Chooses one of the variants of a problem over a number of ranks.
pub fn choose(problem: &Problem, ranks: usize, predictions: &[Prediction]) -> Choice {
    let choice = |variant, reason| Choice { problem: problem.text(), ranks, variant, reason };
    let mut fitting: Vec<&Prediction> = predictions.iter().filter(|it| it.fits).collect();
    fitting.sort_by(|a, b| a.total.total_cmp(&b.total));
    let Some(fastest) = fitting.first() else {
        let reason = "none of them fits into the memory of a GPU";
        return choice(None, reason.to_owned());
    };
    let alike = fitting.iter().filter(|it| it.total <= (1.0 + TIE_TOLERANCE) * fastest.total);
    let best = alike.min_by_key(|it| it.memory_bytes).unwrap_or(fastest);
    let others = fitting.iter().filter(|it| it.variant != best.variant);
    let next = others.min_by(|a, b| a.total.total_cmp(&b.total));
    let exposed = (best.total / best.compute() - 1.0).max(0.0);
    let why = match best.overlap {
        _ if best.sent_bytes == 0 => "nothing is sent".to_owned(),
        0.95.. => "kernels hide what is sent".to_owned(),
        _ => format!("links add {:.1} % to its kernels", 100.0 * exposed),
    };
    let beside = match next {
        None => "the only one that is possible".to_owned(),
        Some(next) => match next.total / best.total - 1.0 {
            more if more.abs() <= TIE_TOLERANCE => {
                format!("as fast as {}, with less memory", next.variant)
            }
            more => format!("{} takes {:.0} % longer", next.variant, 100.0 * more),
        },
    };
    choice(Some(best.variant), format!("{why}; {beside}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting() -> Setting {
        Setting {
            times: Times::embedded(),
            cluster: Cluster {
                node: 8,
                inside: "nvlink4".parse().unwrap(),
                between: "ndr".parse().unwrap(),
            },
            memory_bytes: 141_000_000_000,
            backward: true,
        }
    }

    fn of(text: &str, ranks: usize, variant: Variant) -> Result<Prediction, Refusal> {
        predict(&setting(), &text.parse().unwrap(), ranks, variant).unwrap()
    }

    const LONG: &str = "b=1,h=32,hk=8,s=1048576,d=128,bf16,causal";

    /// One rank does what one GPU does: its times are those that were measured.
    #[test]
    fn one_rank_takes_what_the_kernels_take() {
        let Setting { times, .. } = setting();
        let measured = |problem: &Problem| {
            let found = times.measured.iter().find(|it| it.problem == *problem);
            found.unwrap_or_else(|| panic!("{problem} was not measured")).milliseconds
        };
        for times::Measured { problem, .. } in &times.measured {
            if problem.query_length != problem.key_length {
                continue;
            }
            let forward = problem.clone().forward();
            let [one, other] = [measured(&forward), measured(&forward.clone().backward())];
            for variant in [Variant::Ring, Variant::AllGather, Variant::AllToAll] {
                let found = of(&forward.text(), 1, variant).unwrap();
                let spans = [found.forward.total, found.backward.unwrap().total];
                assert_eq!(spans, [one, other], "{forward}");
                assert_eq!((found.sent_bytes, found.overlap, found.efficiency), (0, 1.0, 1.0));
            }
        }
    }

    #[test]
    fn every_size_is_predicted() {
        let setting = Setting { backward: false, ..setting() };
        for length in [1, 1000, 131_071, LONGEST] {
            for ranks in [2, 3, 1024] {
                for mask in ["", ",causal", ",window=4096:0"] {
                    for variant in Variant::ALL {
                        let text = format!("b=1,h=32,hk=8,s={length},d=128,bf16{mask}");
                        let found =
                            predict(&setting, &text.parse().unwrap(), ranks, variant).unwrap();
                        let Ok(found) = found else { continue };
                        assert!(found.total > 0.0 && found.total.is_finite(), "{found:?}");
                        assert!((0.0..=1.0).contains(&found.overlap), "{found:?}");
                        assert!(found.memory_bytes > 0, "{found:?}");
                    }
                }
            }
        }
    }

    /// More GPUs need less memory each, faster links are no slower, and nothing is faster than its kernels.
    #[test]
    fn predictions_are_plausible() {
        for variant in Variant::ALL {
            let few = of(LONG, 16, variant).unwrap();
            if variant != Variant::AllToAll {
                assert!(
                    of(LONG, 64, variant).unwrap().memory_bytes < few.memory_bytes,
                    "{variant}"
                );
            }
            let mut slow = setting();
            slow.cluster.between = "10:50".parse().unwrap();
            let slow = predict(&slow, &LONG.parse().unwrap(), 16, variant).unwrap().unwrap();
            assert!(slow.total > few.total && few.total >= few.compute(), "{variant}");
            assert!((0.5..1.05).contains(&few.efficiency), "{few:?}");
        }
        // A ring hides what it sends; heads that are exchanged are waited for.
        assert!(of(LONG, 16, Variant::Ring).unwrap().overlap > 0.9);
        assert!(of(LONG, 16, Variant::AllToAll).unwrap().overlap < 1e-9);
    }

    /// Under a window far ranks exchange nothing, so that more of them send no more.
    #[test]
    fn windows_send_little() {
        let window = "b=1,h=32,hk=8,s=1048576,d=128,bf16,window=4096:0";
        let sent = |text, ranks| of(text, ranks, Variant::Ring).unwrap().sent_bytes;
        assert!(sent(window, 64) < sent(LONG, 64) / 20);
        assert_eq!(sent(window, 64), sent(window, 16));
    }

    #[test]
    fn variants_that_cannot_be_say_why() {
        for (ranks, variant, said) in [
            (64, Variant::AllToAll, "32 heads cannot be spread over 64 ranks"),
            (8, Variant::Hybrid, "8 GPUs are not several whole nodes of 8"),
            (12, Variant::Hybrid, "12 GPUs are not several whole nodes of 8"),
        ] {
            let reason = of(LONG, ranks, variant).unwrap_err().reason;
            assert!(reason.contains(said), "{reason}");
        }
        let odd = "b=1,h=7,s=65536,d=128,bf16,causal";
        let reason = of(odd, 16, Variant::Hybrid).unwrap_err().reason;
        assert!(reason.contains("7 heads cannot be shared out to some of 2 nodes"), "{reason}");
        assert_eq!(of(LONG, 1024, Variant::Hybrid).unwrap().groups, 32);
    }

    #[test]
    fn what_cannot_be_predicted_is_refused() {
        let refused = |text: &str, ranks| {
            let problem = text.parse().unwrap();
            predict(&setting(), &problem, ranks, Variant::Ring).unwrap_err().to_string()
        };
        for (text, ranks, said) in [
            (LONG, 0, "0 ranks cannot be predicted: expected 1 to 1024"),
            (LONG, 1025, "1025 ranks cannot be predicted"),
            ("b=1,h=32,s=10485761,d=128,bf16", 8, "10485761 tokens are more than 10485760"),
            ("b=1,h=32,s=0,d=128,bf16", 8, "there are no tokens"),
            ("b=0,h=32,s=8,d=128,bf16", 8, "there are no tokens"),
            ("b=1,h=32,s=8,sk=16,d=128,bf16", 8, "8 queries over 16 keys"),
            ("b=1,h=32,s=8,d=128,bf16,sinks", 8, "plain scores alone"),
            ("b=1,h=32,s=4096,d=80,bf16", 8, "no forward times like those of"),
        ] {
            assert!(refused(text, ranks).contains(said), "{text}: {}", refused(text, ranks));
        }
        let unheard = "rings".parse::<Variant>().unwrap_err();
        assert!(unheard.contains("expected ring, all-gather, all-to-all, hybrid"), "{unheard}");
    }

    #[test]
    fn the_fastest_that_fits_is_chosen() {
        let problem: Problem = LONG.parse().unwrap();
        let mut all = Variant::ALL.map(|variant| of(LONG, 16, variant).unwrap());
        for (it, total) in all.iter_mut().zip([10.0, 9.0, 12.0, 9.1]) {
            (it.total, it.memory_bytes, it.fits) = (total, 1 << 30, true);
        }
        let choice = |all: &[Prediction]| choose(&problem, 16, all);
        assert_eq!(choice(&all).variant, Some(Variant::AllGather));
        // What is as fast with less memory is better.
        all[3].memory_bytes /= 2;
        assert_eq!(choice(&all).variant, Some(Variant::Hybrid));
        assert!(choice(&all).reason.contains("as fast as all-gather, with less memory"));
        (all[1].fits, all[3].fits) = (false, false);
        let ring = choice(&all);
        assert_eq!(ring.variant, Some(Variant::Ring));
        assert!(ring.reason.contains("all-to-all takes 20 % longer"), "{ring:?}");
        assert!(choice(&all[..1]).reason.contains("the only one that is possible"));
        let none = choice(&all[1..2]);
        assert_eq!(none.variant, None);
        assert!(none.reason.contains("none of them fits"), "{none:?}");
    }

    #[test]
    fn every_variant_is_drawn() {
        let all = Variant::ALL.map(|variant| of(LONG, 16, variant).unwrap());
        let drawing = plot(&all);
        assert!(drawing.starts_with("<svg ") && drawing.ends_with("</svg>\n"));
        assert!(!drawing.contains("NaN") && !drawing.contains("inf"), "{drawing}");
        for variant in Variant::ALL {
            assert!(drawing.contains(&format!("{variant}, 16 GPUs: ")), "{variant}");
        }
    }
}
