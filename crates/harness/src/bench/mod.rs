//! Candidates measured against each other, in one process on one GPU.
//!
//! Rounds: in each, every candidate makes one call between two events on the stream, after a
//! flush of the second-level cache (or after the same call, for hot caches); the order is reversed
//! from round to round; inputs have fresh contents in every round. The output of every candidate
//! is compared with f64 in a round chosen at random.
//!
//! The backward pass is measured from the gradient of an output to those of its inputs: what the
//! forward pass leaves is made anew before each call, and not counted. Or both are measured as one
//! step; up to 2048 queries each captured in a graph, so that nobody's host is measured.
//!
//! Kernels of ours alone are measured by this process (`ours`), over every storage and rule
//! of scores. Peers live in Python: then one Python process measures everybody, ours from their
//! cubins, and streams what it finds.

mod candidate;
mod contents;
mod ours;
mod peers;

pub use candidate::{Candidate, CandidateKind, PEERS, Peer, configuration, families};
pub use contents::Pool;
pub use ours::CandidateTimer;

use std::path::PathBuf;
use std::time::Instant;

use flashcore::{Lists, Mask, Pass, Problem};

use crate::Error;
use crate::problems::ProblemSet;
use crate::provenance::Provenance;
use crate::report::{Cache, CandidateNote, Cell, Method, Results};

/// What to measure and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// The problems.
    pub set: ProblemSet,
    /// The candidates; the first that is ours is compared with the peers.
    pub candidates: Vec<Candidate>,
    /// Samples of each.
    pub rounds: usize,
    /// States of the caches to measure, apart.
    pub caches: Vec<Cache>,
    /// Calls of a sample: more than one are captured in a graph.
    pub calls: usize,
    /// Chooses contents and the calls that are validated.
    pub seed: u64,
    /// Whether gradients are measured together with the forward pass before them, as one step of
    /// training has them.
    pub step: bool,
    /// The Python that has the peers.
    pub python: PathBuf,
}

/// Is told how far a measurement has come.
pub trait Observer {
    /// So many problems are ahead.
    fn begin(&mut self, cells: usize);
    /// Something worth knowing.
    fn note(&mut self, text: &str);
    /// A problem is done.
    fn cell(&mut self, results: &Results, cell: &Cell);
}

/// Measures.
pub fn run(options: &Options, observer: &mut dyn Observer) -> Result<Results, Error> {
    check(options)?;
    let begun = Instant::now();
    // What the backward pass is given comes from PyTorch's forward pass.
    let backward = options.set.problems.iter().any(|it| it.pass == Pass::Backward);
    let in_python = backward || options.candidates.iter().any(|it| it.peer().is_some());
    let gpu = crate::open_gpu().map_err(|error| {
        Error::Impossible(format!(
            "there is no GPU to measure on: {error}; `--plan` says what would be measured, `bench \
             compare` and `bench report` need none"
        ))
    })?;
    let mut provenance = Provenance::of_this_process();
    provenance.note_conditions("before");
    let note = |it: &Candidate| CandidateNote {
        name: it.name.clone(),
        peer: it.peer().is_some(),
        about: it.about(),
    };
    let mut results = Results {
        form: Results::FORM,
        provenance,
        method: Method {
            set: options.set.name.clone(),
            rounds: options.rounds,
            calls: options.calls,
            process: "flashcore".to_owned(),
            seconds: 0.0,
        },
        candidates: options.candidates.iter().map(note).collect(),
        cells: Vec::new(),
    };
    observer.begin(options.set.problems.len());
    if in_python {
        peers::run(gpu, options, &mut results, observer)?;
    } else {
        ours::run(&gpu, options, &mut results, observer)?;
    }
    results.provenance.note_conditions("after");
    results.method.seconds = begun.elapsed().as_secs_f64();
    Ok(results)
}

/// Whether sequences are packed, each with as many keys as queries: what peers take.
fn packed_alike(problem: &Problem) -> bool {
    let Problem { queries, keys, lists, .. } = problem;
    queries.is_packed() && queries == keys && *lists == Lists::default()
}

fn check(options: &Options) -> Result<(), Error> {
    let refuse = |text: &str| Err(Error::Impossible(text.to_owned()));
    if options.candidates.is_empty() {
        return refuse("there is nobody to measure");
    }
    if options.rounds < 2 || options.calls == 0 {
        return refuse("two rounds of one call are the least: one sample says nothing about noise");
    }
    let has_peers = options.candidates.iter().any(|it| it.peer().is_some());
    let plain = |it: &Problem| [Mask::NONE, Mask::CAUSAL].contains(&it.mask);
    for problem in options.set.problems.iter().filter(|it| it.pass == Pass::Backward) {
        let served = problem.has_equal_lengths() || packed_alike(problem);
        if !plain(problem) || problem.scores.has_rules() || problem.lse_gradient || !served {
            let text = problem.text();
            return refuse(&format!(
                "{text}: gradients are measured of plain and packed problems alone yet"
            ));
        }
    }
    for problem in options.set.problems.iter().filter(|_| has_peers) {
        let text = problem.text();
        let Problem { scores, mask, .. } = problem;
        if scores.has_rules() || mask.chunk.is_some() {
            return refuse(&format!("{text}: rules of scores and chunks have no peers here yet"));
        }
        if !problem.has_equal_lengths() && !packed_alike(problem) {
            return refuse(&format!(
                "{text}: of ragged batches, peers here take packed ones alone"
            ));
        }
    }
    for (index, one) in options.candidates.iter().enumerate() {
        if options.candidates[..index].iter().any(|other| other.name == one.name) {
            let name = &one.name;
            return refuse(&format!(
                "two candidates are called `{name}`: give one another name, as in again={name}"
            ));
        }
    }
    Ok(())
}
