//! Is it right on the device?
//!
//! The truth is computed on the host, so no memory of the device ever holds it. Outputs are
//! poisoned before every call and lie between guard zones. A copy of them is taken behind the
//! call, in the order of the queue: what is written later is late, whoever writes it.

use flashcore::check::{Case, Contents};
use flashcore::gpu::TensorRole;
use flashcore::{InputTensors, Mask, Problem};

use super::{Broken, Outcome, Rule, failed};
use crate::Error;
use crate::subject::{Memory, Subject, Tensors};
use crate::verify::{POISON, Truth, Wrong};

/// What a kernel says it serves.
#[derive(Debug, Clone, PartialEq)]
pub struct Contract {
    /// Element, head dims and mask; lengths and heads are chosen by the gate.
    pub model: Problem,
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
    /// Everything, for the element, head dims and mask of a problem.
    pub fn whole(model: Problem) -> Self {
        Contract { model, length_step: 1, unequal_lengths: true, grouped: true, lse: true }
    }

    /// The problems that the kernel is asked, with their contents: lengths around the edges of
    /// tiles, primes, more queries than keys, rows that see nothing, odd numbers of heads.
    pub fn cases(&self) -> Vec<Case> {
        let problem = |batch, heads, kv_heads, queries, keys| {
            let round = |length: usize| length.next_multiple_of(self.length_step.max(1));
            let model = &self.model;
            let keys = if self.unequal_lengths { keys } else { queries };
            Problem::new(batch, heads, round(queries), model.head_dim)
                .with_kv_heads(if self.grouped { kv_heads } else { heads })
                .with_key_length(round(keys))
                .with_value_head_dim(model.value_head_dim)
                .with_dtype(model.dtype)
                .with_mask(model.mask)
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
        .map(|(batch, heads, kv_heads, queries, keys)| {
            Case::new(problem(batch, heads, kv_heads, queries, keys))
        })
        .collect();
        for contents in [
            Contents::HugeLogits,
            Contents::TinyLogits,
            Contents::GrowingLogits,
            Contents::FallingLogits,
            Contents::LateHugeKey,
            Contents::Outliers,
        ] {
            cases.push(Case::new(problem(1, 2, 1, 200, 200)).with_contents(contents));
        }
        cases.dedup();
        cases
            .into_iter()
            .enumerate()
            .map(|(index, case)| case.with_seed(index as u64 + 1))
            .collect()
    }

    /// What a kernel of ours serves; nothing where it is no attention, takes more than one launch,
    /// or is less exact by design.
    pub fn of(kernel: &kernels::Shipped) -> Option<Self> {
        let (element, dims, causal) = match kernel {
            kernels::Shipped::Forward(it) => {
                (it.element, (it.head_dim, it.value_head_dim), it.causal)
            }
            kernels::Shipped::Mma(it) if !it.split && it.accumulate == ptx::Element::F32 => {
                (it.element, (it.head_dim, it.value_head_dim), it.causal)
            }
            kernels::Shipped::Scalar(it) => {
                (it.element, (it.head_dim, it.value_head_dim), it.causal)
            }
            _ => return None,
        };
        let dtype = flashcore::DType::ALL.into_iter().find(|it| it.element() == element)?;
        let model = Problem::new(1, 1, 1, dims.0 as usize)
            .with_value_head_dim(dims.1 as usize)
            .with_dtype(dtype)
            .with_mask(if causal { Mask::Causal } else { Mask::None });
        Some(Contract::whole(model))
    }
}

/// Bytes on each side of a tensor that nobody may touch.
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

/// The memory of a call.
pub(super) struct Room {
    pub(super) tensors: Tensors,
    /// Copies of output and log-sum-exp, taken behind a call.
    shadows: [Memory; 2],
    bytes: [usize; 5],
}

/// The results.
const WRITTEN: [TensorRole; 2] = [TensorRole::Output, TensorRole::Lse];

impl Room {
    pub(super) fn new(subject: &mut dyn Subject, problem: &Problem) -> Result<Self, Error> {
        subject.release();
        let endless = || Error::Impossible(format!("{problem} is too large"));
        let mut bytes = [0; 5];
        for (bytes, role) in bytes.iter_mut().zip(TensorRole::ALL) {
            *bytes = role.bytes(problem).ok_or_else(endless)?;
        }
        let mut memory = [Memory(0); 5];
        for (memory, bytes) in memory.iter_mut().zip(bytes) {
            *memory = subject.allocate(bytes + 2 * GUARD)?;
        }
        let shadows =
            [subject.allocate(bytes[3] + 2 * GUARD)?, subject.allocate(bytes[4] + 2 * GUARD)?];
        Ok(Room { tensors: Tensors { memory, offset: GUARD }, shadows, bytes })
    }

    /// Everything that is not an input is poison.
    pub(super) fn poison(&self, subject: &mut dyn Subject) -> Result<(), Error> {
        for role in WRITTEN {
            subject.fill(self.tensors.at(role), POISON)?;
        }
        for shadow in self.shadows {
            subject.fill(shadow, POISON)?;
        }
        Ok(())
    }

    /// Puts inputs in place, between guard zones.
    pub(super) fn write(&self, subject: &mut dyn Subject, inputs: [&[u8]; 3]) -> Result<(), Error> {
        for (memory, bytes) in self.tensors.memory.into_iter().zip(inputs) {
            subject.fill(memory, POISON)?;
            subject.write(memory, GUARD, bytes)?;
        }
        Ok(())
    }

    /// Takes the copies, in the order of the queue.
    pub(super) fn shadow(&self, subject: &mut dyn Subject) -> Result<(), Error> {
        for (role, shadow) in WRITTEN.into_iter().zip(self.shadows) {
            subject.copy(self.tensors.at(role), shadow)?;
        }
        Ok(())
    }

    /// The results as they were when the call was over, if they are still the same.
    pub(super) fn results(
        &self,
        subject: &mut dyn Subject,
        problem: &Problem,
    ) -> Result<[Vec<u8>; 2], Broken> {
        // Whoever computes when somebody looks does so now.
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

    /// Whether the inputs are what they were, guard zones included.
    fn check_inputs(&self, subject: &mut dyn Subject, inputs: [&[u8]; 3]) -> Result<(), Broken> {
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

/// One case: run it, run it again, then with other contents in the same memory. The share of the
/// tolerance that was used.
fn run(subject: &mut dyn Subject, contract: &Contract, case: &Case) -> Result<f64, Broken> {
    let problem = &case.problem;
    subject.prepare(problem).map_err(failed)?;
    let room = Room::new(subject, problem).map_err(failed)?;
    let library = |error: flashcore::Error| failed(error.into());
    let first = case.tensors().map_err(library)?;
    let second = case.clone().with_seed(case.seed ^ 0x5EED).tensors().map_err(library)?;
    let mut call = |tensors: &InputTensors, fresh: bool| -> Result<[Vec<u8>; 2], Broken> {
        if fresh {
            room.write(subject, bytes_of(tensors)).map_err(failed)?;
        }
        room.poison(subject).map_err(failed)?;
        subject.call(&room.tensors).map_err(failed)?;
        room.shadow(subject).map_err(failed)?;
        subject.settle().map_err(failed)?;
        let results = room.results(subject, problem)?;
        room.check_inputs(subject, bytes_of(tensors))?;
        Ok(results)
    };
    let results = call(&first, true)?;
    let share = judge(contract, problem, &first, &results, case.seed, None)?;
    let again = call(&first, false)?;
    if again != results {
        // It may be worse than unrepeatable.
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

/// Judges results; `before` are those of other contents in the same memory.
pub(super) fn judge(
    contract: &Contract,
    problem: &Problem,
    tensors: &InputTensors,
    results: &[Vec<u8>; 2],
    seed: u64,
    before: Option<&[Vec<u8>; 2]>,
) -> Result<f64, Broken> {
    let truth = Truth::of(problem, tensors, seed).map_err(failed)?;
    let [output, lse] = results;
    // Without log-sum-exps of its own, a kernel is judged with the true ones.
    let known = truth.true_lse(lse.len());
    let lse = if contract.lse { lse } else { &known };
    match truth.judge(output, lse) {
        Ok(verdict) => {
            Ok(verdict.output.max_error / verdict.output.tolerance.max(f64::MIN_POSITIVE))
        }
        Err(Wrong::Holes { holes, values }) => Err((
            Rule::Unwritten,
            format!("{holes} of {values} values were never written or are NaN"),
        )),
        Err(_) if before.is_some_and(|before| before[0] == *output) => Err((
            Rule::Remembered,
            "new contents in the same memory gave the result of the old ones".to_owned(),
        )),
        Err(wrong) => Err((Rule::Wrong, wrong.to_string())),
    }
}
