//! The gate's `correct` step: are a kernel's results right on the device?
//!
//! The expected output is computed on the host, so that no device memory ever holds it. Outputs are
//! poisoned before every call and lie between guard zones. A copy of them is queued right behind the
//! call: anything written after that copy is late, whoever writes it.

use std::collections::HashSet;

use flashcore::{InputTensors, Lists, Problem, Storage};
use testing::check::cases::standard;
use testing::check::{Case, Contents};
use testing::scene::{Call, PlacementKind};

use super::{Outcome, Rejection, Rule, failed};
use crate::Error;
use crate::auxiliary_inputs::{AuxiliaryInputs, tensor_bytes};
use crate::bench::families;
use crate::subject::{Memory, Subject, TensorRole, Tensors};
use crate::verify::{ExpectedOutput, OutputError, POISON};

/// The range of problems that a kernel claims to serve.
#[derive(Debug, Clone, PartialEq)]
pub struct Contract {
    /// Element, head dims, mask and scores; lengths and heads are chosen by the gate.
    pub model: Problem,
    /// The storages of sequences that the kernel serves.
    pub storage: ServedStorage,
    /// Whether the kernel is meant for one or a few queries of each sequence (decode).
    pub few_queries: bool,
    /// Whether there are no more tiles than fit in one wave.
    pub few_tiles: bool,
    /// Lengths are multiples of this.
    pub length_step: usize,
    /// Whether queries and keys may differ in number.
    pub unequal_lengths: bool,
    /// Whether query heads may share key heads.
    pub grouped: bool,
    /// Whether it writes the log-sum-exps.
    pub lse: bool,
}

impl Contract {
    /// Returns the contract of a kernel that serves everything over sequences of equal lengths, for
    /// the element type, head dims, mask and scores of a problem.
    pub fn whole(model: Problem) -> Self {
        Contract {
            model,
            storage: ServedStorage::Equal,
            few_queries: false,
            few_tiles: false,
            length_step: 1,
            unequal_lengths: true,
            grouped: true,
            lse: true,
        }
    }

    /// Returns the problems that the kernel is tested on, with their contents: lengths around the
    /// edges of tiles, primes, more queries than keys, rows that see no key, odd numbers of heads.
    pub fn cases(&self) -> Vec<Case> {
        let problem = |batch, heads, kv_heads, queries, keys| {
            let round = |length: usize| length.next_multiple_of(self.length_step.max(1));
            let keys = if self.unequal_lengths { keys } else { queries };
            let mut problem = self.model.clone();
            (problem.batch, problem.query_heads) = (batch, heads);
            problem.kv_heads = if self.grouped { kv_heads } else { heads };
            (problem.query_length, problem.key_length) = (round(queries), round(keys));
            problem
        };
        let mut cases: Vec<Case> = [
            (1, 1, 1, 1, 1),
            (1, 2, 2, 63, 63),
            (2, 3, 1, 65, 65),
            (1, 2, 2, 127, 129),
            (3, 1, 1, 129, 127),
            (1, 4, 2, 193, 257),
            (1, 1, 1, 7, 401),
            (1, 2, 2, 300, 31),
            (2, 6, 3, 331, 331),
        ]
        .into_iter()
        .enumerate()
        .flat_map(|(index, (batch, heads, kv_heads, queries, keys))| {
            let plain = problem(batch, heads, kv_heads, queries, keys);
            self.in_storages(plain, index).into_iter().map(Case::new)
        })
        .collect();
        // Every content that `flashcore check` knows.
        let mut seen = HashSet::from([Contents::Normal]);
        let standard = standard(self.model.dtype()).into_iter().map(|case| case.contents);
        for contents in standard.filter(|it| it.is_finite() && seen.insert(*it)) {
            let problem = self.in_storages(problem(1, 2, 1, 200, 200), 0);
            cases.extend(problem.into_iter().map(|it| Case::new(it).with_contents(contents)));
        }
        cases.dedup();
        cases
            .into_iter()
            .enumerate()
            .map(|(index, case)| case.with_seed(index as u64 + 1))
            .collect()
    }

    /// Returns a problem as it is, and in one of the storages that the contract allows, by turns.
    fn in_storages(&self, plain: Problem, turn: usize) -> Vec<Problem> {
        let Problem { batch, query_length, key_length, .. } = plain;
        let rows = |length: usize| Storage::Packed((batch * length).div_ceil(2).max(length));
        let lists = |turn: usize| Lists {
            query_lengths: turn.is_multiple_of(3),
            key_lengths: true,
            left_padding: false,
            batch_index: false,
        };
        let packed = match turn % 2 {
            0 => rows(query_length),
            _ => Storage::Padded,
        };
        match self.storage {
            ServedStorage::Equal => vec![plain],
            ServedStorage::Ragged => {
                let ragged = match turn % 3 {
                    0 => plain.clone().with_storage(rows(query_length), rows(key_length)),
                    1 => {
                        let left_padding = true;
                        let lists = Lists { left_padding, ..lists(turn) };
                        plain.clone().with_storage(packed, Storage::Padded).with_lists(lists)
                    }
                    _ => {
                        let entries = Storage::Entries(batch + 2);
                        let lists = Lists { batch_index: true, ..lists(turn) };
                        plain.clone().with_storage(packed, entries).with_lists(lists)
                    }
                };
                vec![plain, ragged]
            }
            ServedStorage::Pages(step) => {
                let size = step * [1, 2, 4][turn % 3];
                let columns = key_length.div_ceil(size).max(1);
                let pages = Storage::Paged { size, columns, pages: batch * columns + 1 };
                vec![plain.with_storage(packed, pages).with_lists(lists(turn))]
            }
        }
    }

    /// Returns the contract of one of our kernels; None if it is no attention by itself, is less
    /// exact by design, or computes gradients of ragged batches, which `check` tests.
    pub fn of(kernel: &kernels::Configuration) -> Option<Self> {
        if matches!(kernel, kernels::Configuration::Mma(it) if it.accumulate != ptx::Element::F32) {
            return None;
        }
        if !families().contains(&kernel.family()) {
            return None;
        }
        // Gradients are tested over equal lengths only.
        let batch = match kernel {
            kernels::Configuration::Backward(it) => it.batch,
            kernels::Configuration::BackwardMma(it) => it.batch,
            _ => kernels::Batch::Equal,
        };
        if batch != kernels::Batch::Equal {
            return None;
        }
        let Call { problem, ragged, .. } = Call::small(*kernel);
        let storage = match ragged.map(|it| it.key_place) {
            None => ServedStorage::Equal,
            Some(PlacementKind::Paged(size)) => ServedStorage::Pages(size),
            Some(_) => ServedStorage::Ragged,
        };
        let few_queries = kernel.family() == "decode";
        let few_tiles = matches!(kernel, kernels::Configuration::Prefill(it) if it.single_tile);
        Some(Contract { storage, few_queries, few_tiles, ..Contract::whole(problem) })
    }

    /// Returns the default problem to time: 4096 positions, and as many heads as make a hidden size
    /// of 2048; for few queries, one query for each of 16 sequences over 8192 keys.
    pub fn timed(&self) -> Problem {
        let mut problem = self.model.clone();
        let heads = (2048 / problem.head_dim.max(1)).clamp(1, 64);
        (problem.query_heads, problem.kv_heads) = (heads, heads);
        let (batch, queries, keys) = match (self.few_queries, self.storage) {
            (true, _) => (16, 1, 8192),
            // Few enough tiles for one wave.
            _ if self.few_tiles => (1, 64, 1024),
            (false, ServedStorage::Equal) => (1, 4096, 4096),
            (false, _) => (4, 1024, 1024),
        };
        let round = |length: usize| length.next_multiple_of(self.length_step.max(1));
        problem.batch = batch;
        (problem.query_length, problem.key_length) = (round(queries), round(keys));
        self.in_storages(problem.clone(), 0).pop().unwrap_or(problem)
    }
}

/// Storages of sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServedStorage {
    /// Padded: a batch entry for each, all of the same length.
    Equal,
    /// Any storage but pages.
    Ragged,
    /// Pages whose sizes are multiples of this, and no other storage.
    Pages(usize),
}

/// Bytes of the guard zone on each side of a tensor.
const GUARD: usize = 4096;

/// Runs every case of a contract. `salt` makes the contents new from run to run.
pub fn correct(subject: &mut dyn Subject, contract: &Contract, salt: u64) -> Outcome {
    let cases = contract.cases();
    let mut used = 0f64;
    for case in &cases {
        let case = case.clone().with_seed(case.seed ^ salt);
        match run(subject, contract, &case) {
            Ok(share) => used = used.max(share),
            Err((rule, reason)) => return Outcome::reject(rule, format!("{case}: {reason}")),
        }
    }
    Outcome::accept(format!(
        "{} problems, outputs poisoned and guarded, inputs unchanged, repeats bit for bit, {:.0} % \
         of the tolerance used",
        cases.len(),
        100.0 * used
    ))
}

/// The memory of a call's tensors.
pub(super) struct CallMemory {
    pub(super) tensors: Tensors,
    /// Copies of output and log-sum-exp, taken behind a call.
    shadows: [Memory; 2],
    bytes: [usize; 5],
}

/// The tensors that a call writes.
const WRITTEN: [TensorRole; 2] = [TensorRole::Output, TensorRole::Lse];

impl CallMemory {
    pub(super) fn new(subject: &mut dyn Subject, problem: &Problem) -> Result<Self, Error> {
        subject.release();
        let endless = || Error::Impossible(format!("{problem} is too large"));
        let bytes = tensor_bytes(problem).ok_or_else(endless)?;
        let mut memory = [Memory(0); 5];
        for (memory, bytes) in memory.iter_mut().zip(bytes) {
            *memory = subject.allocate(bytes + 2 * GUARD)?;
        }
        let shadows =
            [subject.allocate(bytes[3] + 2 * GUARD)?, subject.allocate(bytes[4] + 2 * GUARD)?];
        Ok(CallMemory { tensors: Tensors { memory, offset: GUARD }, shadows, bytes })
    }

    /// Poisons all memory but the inputs.
    pub(super) fn poison(&self, subject: &mut dyn Subject) -> Result<(), Error> {
        for role in WRITTEN {
            subject.fill(self.tensors.at(role), POISON)?;
        }
        for shadow in self.shadows {
            subject.fill(shadow, POISON)?;
        }
        Ok(())
    }

    /// Writes the inputs between their guard zones.
    pub(super) fn write(&self, subject: &mut dyn Subject, inputs: [&[u8]; 3]) -> Result<(), Error> {
        for (memory, bytes) in self.tensors.memory.into_iter().zip(inputs) {
            subject.fill(memory, POISON)?;
            subject.write(memory, GUARD, bytes)?;
        }
        Ok(())
    }

    /// Queues the copies of the results behind the call.
    pub(super) fn shadow(&self, subject: &mut dyn Subject) -> Result<(), Error> {
        for (role, shadow) in WRITTEN.into_iter().zip(self.shadows) {
            subject.copy(self.tensors.at(role), shadow)?;
        }
        Ok(())
    }

    /// Returns the results as they were right behind the call, if they have not changed since.
    pub(super) fn results(
        &self,
        subject: &mut dyn Subject,
        problem: &Problem,
    ) -> Result<[Vec<u8>; 2], Rejection> {
        // A result that is computed only when it is read is computed here, and then differs from
        // its copy.
        let settled: Vec<Vec<u8>> = WRITTEN
            .into_iter()
            .map(|role| subject.read(self.tensors.at(role)))
            .collect::<Result<_, _>>()
            .map_err(failed)?;
        let mut results = [Vec::new(), Vec::new()];
        for (index, role) in WRITTEN.into_iter().enumerate() {
            let then = subject.read(self.shadows[index]).map_err(failed)?;
            if then != settled[index] {
                let changed = then.iter().zip(&settled[index]).filter(|(a, b)| a != b).count();
                let of = settled[index].len() - 2 * GUARD;
                let reason = format!(
                    "{changed} of {of} bytes of the {role:?} were written after the call was over"
                );
                return Err((Rule::Late, reason.to_lowercase()));
            }
            let bytes = self.bytes[3 + index];
            let guards = [&then[..GUARD], &then[GUARD + bytes..]].concat();
            if guards.iter().any(|byte| *byte != POISON) {
                let reason = format!("memory beside the {role:?} was written").to_lowercase();
                return Err((Rule::Trespass, format!("{reason} ({problem})")));
            }
            results[index] = then[GUARD..GUARD + bytes].to_vec();
        }
        Ok(results)
    }

    /// Checks that the inputs and their guard zones are unchanged.
    fn check_inputs(&self, subject: &mut dyn Subject, inputs: [&[u8]; 3]) -> Result<(), Rejection> {
        for (role, bytes) in TensorRole::ALL.into_iter().zip(inputs) {
            let found = subject.read(self.tensors.at(role)).map_err(failed)?;
            let guard = [POISON; GUARD];
            let expected = [&guard[..], bytes, &guard[..]].concat();
            if found != expected {
                let reason = format!("the {role:?} or memory beside it was written");
                return Err((Rule::InputChanged, reason.to_lowercase()));
            }
        }
        Ok(())
    }
}

/// The bytes of a problem's tensors.
pub(super) fn bytes_of(tensors: &InputTensors) -> [&[u8]; 3] {
    [tensors.query.bytes(), tensors.key.bytes(), tensors.value.bytes()]
}

/// Runs one case twice, then with other contents in the same memory. Returns the share of the
/// tolerance that was used.
fn run(subject: &mut dyn Subject, contract: &Contract, case: &Case) -> Result<f64, Rejection> {
    let problem = &case.problem;
    subject.prepare(problem).map_err(failed)?;
    let memory = CallMemory::new(subject, problem).map_err(failed)?;
    let library = |error: flashcore::Error| failed(error.into());
    let first = case.tensors().map_err(library)?;
    let second = case.clone().with_seed(case.seed ^ 0x5EED).tensors().map_err(library)?;
    let mut call = |tensors: &InputTensors, fresh: bool| -> Result<[Vec<u8>; 2], Rejection> {
        if fresh {
            memory.write(subject, bytes_of(tensors)).map_err(failed)?;
        }
        memory.poison(subject).map_err(failed)?;
        subject.call(&memory.tensors).map_err(failed)?;
        memory.shadow(subject).map_err(failed)?;
        subject.settle().map_err(failed)?;
        let results = memory.results(subject, problem)?;
        memory.check_inputs(subject, bytes_of(tensors))?;
        Ok(results)
    };
    let results = call(&first, true)?;
    let share = judge(contract, problem, &first, &results, case.seed, None)?;
    let again = call(&first, false)?;
    if again != results {
        // The results differ between runs; they may also be wrong, which is the worse finding.
        judge(contract, problem, &first, &again, case.seed, None)?;
        return Err((
            Rule::Unrepeatable,
            "a second run of the same call gave other bits".to_owned(),
        ));
    }
    let others = call(&second, true)?;
    let other_share = judge(contract, problem, &second, &others, case.seed, Some(&results))?;
    Ok(share.max(other_share))
}

/// Judges results; `before` are the results of other contents in the same memory.
pub(super) fn judge(
    contract: &Contract,
    problem: &Problem,
    tensors: &InputTensors,
    results: &[Vec<u8>; 2],
    seed: u64,
    before: Option<&[Vec<u8>; 2]>,
) -> Result<f64, Rejection> {
    let auxiliary = AuxiliaryInputs::of(problem).map_err(failed)?;
    let expected = ExpectedOutput::of(problem, auxiliary.inputs(tensors), seed).map_err(failed)?;
    let [output, lse] = results;
    // Without log-sum-exps of its own, a kernel is judged with the true ones.
    let known = expected.expected_lse(lse.len());
    let lse = if contract.lse { lse } else { &known };
    match expected.judge(output, lse) {
        Ok(verdict) => Ok(verdict.output.tolerance_used()),
        Err(OutputError::Unwritten { unwritten, values }) => Err((
            Rule::Unwritten,
            format!("{unwritten} of {values} values were never written or are NaN"),
        )),
        Err(_) if before.is_some_and(|before| before[0] == *output) => Err((
            Rule::Remembered,
            "new contents in the same memory gave the result of the old ones".to_owned(),
        )),
        Err(wrong) => Err((Rule::Wrong, wrong.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use flashcore::gpu::Chip;

    use super::*;
    use crate::bench::Candidate;

    /// Every attention kernel that ships can be launched on all that its contract names.
    #[test]
    fn contracts_are_served() {
        let mut judged = std::collections::BTreeMap::new();
        for kernel in kernels::shipped(ptx::Target::SM_90A) {
            let Some(contract) = Contract::of(&kernel) else { continue };
            let cases = contract.cases().into_iter().map(|case| case.problem);
            for problem in cases.chain([contract.timed()]) {
                let plan = Candidate::of(kernel).plan(&Chip::H200, &problem);
                let (plan, _) =
                    plan.unwrap_or_else(|it| panic!("{}, {problem}: {it}", kernel.name()));
                assert_eq!(plan.chosen.configuration, Some(kernel.name()));
            }
            *judged.entry(kernel.family()).or_insert(0) += 1;
        }
        let families: Vec<&str> = judged.into_keys().collect();
        assert_eq!(
            families,
            ["backward", "backward-mma", "decode", "forward", "mma", "prefill", "scalar"]
        );
    }
}
