//! Known ways to cheat a harness, each of which happened to a published system, and planted
//! defects: the gate must refuse every one, with the right rule.
//!
//! The cheats live on a host that plays GPU: memory, a queue, and a clock of its own on which
//! honest work takes time. No GPU is needed.

use std::collections::HashMap;

use flashcore::{
    Backend, CpuBackend, DType, DTypes, InputTensors, Mask, Problem, RunOptions, Tensor,
};
use flashcore_harness as harness;
use harness::Error;
use harness::auxiliary_inputs::{AuxiliaryInputs, tensor_bytes};
use harness::gate::{
    self, Contract, ForeignKernel, Judgement, Outcome, OwnKernel, Rule, SpeedRequirement, Step,
};
use harness::subject::{Memory, Subject, Tensors};
use harness::verify;
use kernels::{Configuration, Product, Rules, Scalar};
use ptx::{Element, Target};

/// Milliseconds that honest work takes on the host's clock, and that a cheat takes.
const HONEST: f64 = 1.0;
const QUICK: f64 = 0.05;

/// What a subject does with a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Behaviour {
    Honest,
    /// Honest, and takes three times as long.
    Slow,
    /// Leaves the output as it is: where an allocator hands out the memory that held the reference
    /// the answer is already there.
    ReusesMemory,
    /// Keeps the result for these addresses.
    CachesByPointer,
    /// Keeps the result for these contents.
    CachesByContent,
    /// Computes on a thread that goes on when the call is over.
    OutlivesTheCall,
    /// Computes when somebody reads.
    Lazy,
    /// Sees that inputs are all the same and takes a short cut.
    SkipsConstants,
    /// Rounds its inputs to eight bits.
    LowPrecision,
    /// Does the work of ten calls in one and nothing in the other nine, as a graph that is timed
    /// and divided by ten.
    DividesAGraph,
    /// Right, in no time.
    Impossible,
    WrongMask,
    WritesInput,
    WritesBeside,
    Unrepeatable,
}

struct Host {
    behaviour: Behaviour,
    problem: Option<Problem>,
    memory: Vec<Vec<u8>>,
    released: Vec<Vec<u8>>,
    clock: f64,
    marks: [f64; 2],
    calls: usize,
    by_pointer: HashMap<(String, usize), [Vec<u8>; 2]>,
    by_content: HashMap<Vec<u8>, [Vec<u8>; 2]>,
    /// Results that are written later.
    pending: Option<(Tensors, [Vec<u8>; 2])>,
}

impl Host {
    fn new(behaviour: Behaviour) -> Self {
        Host {
            behaviour,
            problem: None,
            memory: Vec::new(),
            released: Vec::new(),
            clock: 0.0,
            marks: [0.0; 2],
            calls: 0,
            by_pointer: HashMap::new(),
            by_content: HashMap::new(),
            pending: None,
        }
    }

    fn inputs(&self, tensors: &Tensors) -> InputTensors {
        let problem = self.problem.as_ref().unwrap();
        let mut slices: Vec<&[u8]> = Vec::new();
        for (memory, bytes) in tensors.memory.iter().zip(tensor_bytes(problem).unwrap()) {
            slices.push(&self.memory[memory.0][tensors.offset..tensors.offset + bytes]);
        }
        verify::inputs(problem, [slices[0], slices[1], slices[2]]).unwrap()
    }

    fn attend(&self, problem: &Problem, inputs: &InputTensors) -> [Vec<u8>; 2] {
        let backend = CpuBackend::new();
        let auxiliary = AuxiliaryInputs::of(problem).unwrap();
        let output =
            backend.run(problem, auxiliary.inputs(inputs), &RunOptions::default()).unwrap();
        let lse = output.lse.iter().flat_map(|value| value.to_le_bytes()).collect();
        [output.output.bytes().to_vec(), lse]
    }

    fn store(&mut self, tensors: &Tensors, results: &[Vec<u8>; 2]) {
        for (memory, bytes) in tensors.memory[3..].iter().zip(results) {
            self.memory[memory.0][tensors.offset..tensors.offset + bytes.len()]
                .copy_from_slice(bytes);
        }
    }

    fn catch_up(&mut self) {
        if let Some((tensors, results)) = self.pending.take() {
            self.store(&tensors, &results);
        }
    }
}

fn rounded(tensor: &Tensor) -> Tensor {
    let values: Vec<f32> =
        tensor.to_f32().iter().map(|value| DType::BF16.round(f64::from(*value)) as f32).collect();
    Tensor::from_f32(tensor.dtype(), tensor.shape(), &values).unwrap()
}

impl Subject for Host {
    fn name(&self) -> String {
        format!("{:?}", self.behaviour)
    }

    fn prepare(&mut self, problem: &Problem) -> Result<(), Error> {
        self.problem = Some(problem.clone());
        self.calls = 0;
        Ok(())
    }

    fn allocate(&mut self, bytes: usize) -> Result<Memory, Error> {
        let old = self.released.iter().position(|it| it.len() == bytes);
        let memory = old.map_or_else(|| vec![0; bytes], |index| self.released.swap_remove(index));
        self.memory.push(memory);
        Ok(Memory(self.memory.len() - 1))
    }

    fn release(&mut self) {
        self.released.append(&mut self.memory);
    }

    fn write(&mut self, memory: Memory, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        self.memory[memory.0][offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn fill(&mut self, memory: Memory, byte: u8) -> Result<(), Error> {
        self.memory[memory.0].fill(byte);
        Ok(())
    }

    fn copy(&mut self, from: Memory, to: Memory) -> Result<(), Error> {
        self.memory[to.0] = self.memory[from.0].clone();
        Ok(())
    }

    fn read(&mut self, memory: Memory) -> Result<Vec<u8>, Error> {
        if self.behaviour == Behaviour::Lazy {
            self.catch_up();
        }
        Ok(self.memory[memory.0].clone())
    }

    fn flush(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn mark(&mut self, which: usize) -> Result<(), Error> {
        self.marks[which] = self.clock;
        Ok(())
    }

    fn elapsed(&mut self) -> Result<f64, Error> {
        Ok(self.marks[1] - self.marks[0])
    }

    fn settle(&mut self) -> Result<(), Error> {
        if self.behaviour == Behaviour::OutlivesTheCall {
            self.catch_up();
        }
        Ok(())
    }

    fn call(&mut self, tensors: &Tensors) -> Result<(), Error> {
        let problem = self.problem.clone().unwrap();
        let inputs = self.inputs(tensors);
        self.calls += 1;
        let mut cost = HONEST;
        let honest = |host: &Host| host.attend(&problem, &inputs);
        let results = match self.behaviour {
            Behaviour::Honest => honest(self),
            Behaviour::Slow => {
                cost = 3.0 * HONEST;
                honest(self)
            }
            Behaviour::Impossible => {
                cost = 1e-9;
                honest(self)
            }
            Behaviour::ReusesMemory => {
                self.clock += QUICK;
                return Ok(());
            }
            Behaviour::CachesByPointer => {
                let key = (problem.to_string(), tensors.memory[0].0);
                match self.by_pointer.get(&key) {
                    Some(results) => {
                        cost = QUICK;
                        results.clone()
                    }
                    None => {
                        let results = honest(self);
                        self.by_pointer.insert(key, results.clone());
                        results
                    }
                }
            }
            Behaviour::CachesByContent => {
                let tensors = [&inputs.query, &inputs.key, &inputs.value];
                let mut key = problem.to_string().into_bytes();
                key.extend(tensors.iter().flat_map(|tensor| tensor.bytes()));
                match self.by_content.get(&key) {
                    Some(results) => {
                        cost = QUICK;
                        results.clone()
                    }
                    None => {
                        let results = honest(self);
                        self.by_content.insert(key, results.clone());
                        results
                    }
                }
            }
            Behaviour::OutlivesTheCall | Behaviour::Lazy => {
                self.pending = Some((*tensors, honest(self)));
                self.clock += QUICK;
                return Ok(());
            }
            Behaviour::SkipsConstants => {
                let first = inputs.value.to_f32()[0];
                if inputs.value.to_f32().iter().all(|value| *value == first) {
                    cost = QUICK;
                }
                honest(self)
            }
            Behaviour::LowPrecision => {
                cost = QUICK;
                let [query, key, value] = [&inputs.query, &inputs.key, &inputs.value].map(rounded);
                self.attend(&problem, &InputTensors::new(query, key, value))
            }
            Behaviour::DividesAGraph => {
                if self.calls % 10 != 1 {
                    return Ok(());
                }
                honest(self)
            }
            Behaviour::WrongMask => {
                let shifted = match problem.mask {
                    Mask::CAUSAL => problem.clone().with_mask(Mask::NONE),
                    _ => problem.clone().with_mask(Mask::CAUSAL),
                };
                self.attend(&shifted, &inputs)
            }
            Behaviour::WritesInput => {
                self.memory[tensors.memory[1].0][tensors.offset] ^= 1;
                honest(self)
            }
            Behaviour::WritesBeside => {
                self.memory[tensors.memory[3].0][tensors.offset - 2] = 0;
                honest(self)
            }
            Behaviour::Unrepeatable => {
                let mut results = honest(self);
                results[0][0] ^= self.calls as u8 & 1;
                results
            }
        };
        self.store(tensors, &results);
        self.clock += cost;
        Ok(())
    }
}

fn model(mask: Mask) -> Problem {
    Problem::new(1, 1, 1, 24).with_dtype(DType::F16).with_mask(mask)
}

/// The steps that run a kernel, as the command has them.
fn judge(behaviour: Behaviour, mask: Mask) -> Judgement {
    let contract = Contract::whole(model(mask));
    let requirement = SpeedRequirement {
        problem: Problem::new(1, 2, 150, 24).with_dtype(DType::F16).with_mask(mask),
        rounds: 5,
        at_least: 0.9,
        peak_tflops: Some(1000.0),
    };
    let mut subject = Host::new(behaviour);
    let found = gate::correct(&mut subject, &contract, 1);
    let mut subject = Host::new(behaviour);
    let mut baseline = Host::new(Behaviour::Honest);
    let steps: Vec<(Step, Box<dyn FnOnce() -> Outcome>)> = vec![
        (Step::Correct, Box::new(move || found)),
        (
            Step::Fast,
            Box::new(|| gate::fast(&mut subject, &mut baseline, &contract, &requirement, 2)),
        ),
    ];
    Judgement::of(&format!("{behaviour:?}"), steps)
}

#[test]
fn an_honest_kernel_is_accepted() {
    for mask in [Mask::NONE, Mask::CAUSAL] {
        let judgement = judge(Behaviour::Honest, mask);
        assert!(judgement.accepted, "{judgement:?}");
        assert_eq!(judgement.findings.len(), 2);
    }
}

/// 8-bit inputs with 16-bit outputs, and 16-bit queries over an 8-bit cache.
#[test]
fn element_types_may_differ() {
    let narrow = DTypes::inputs(DType::E4M3);
    for dtypes in [narrow, DTypes { query: DType::BF16, ..narrow }] {
        let mut problem = Problem::new(1, 2, 150, 32);
        problem.dtypes = dtypes;
        let contract = Contract::whole(problem.clone());
        let requirement = SpeedRequirement { problem, rounds: 5, at_least: 0.9, peak_tflops: None };
        let [mut subject, mut baseline] = [Behaviour::Honest; 2].map(Host::new);
        let outcome = gate::fast(&mut subject, &mut baseline, &contract, &requirement, 3);
        assert!(matches!(outcome, Outcome::Accept { .. }), "{dtypes}: {outcome:?}");
        let mut subject = Host::new(Behaviour::ReusesMemory);
        let outcome = gate::fast(&mut subject, &mut baseline, &contract, &requirement, 3);
        assert_eq!(rule_of(&outcome), Some(Rule::Unwritten), "{dtypes}: {outcome:?}");
    }
}

#[test]
fn every_cheat_breaks_its_rule() {
    for (behaviour, step, rule) in [
        (Behaviour::ReusesMemory, Step::Correct, Rule::Unwritten),
        (Behaviour::CachesByPointer, Step::Correct, Rule::Remembered),
        (Behaviour::CachesByContent, Step::Fast, Rule::RemembersContents),
        (Behaviour::OutlivesTheCall, Step::Correct, Rule::Late),
        (Behaviour::Lazy, Step::Correct, Rule::Late),
        (Behaviour::SkipsConstants, Step::Fast, Rule::SkipsConstants),
        (Behaviour::LowPrecision, Step::Correct, Rule::Wrong),
        (Behaviour::DividesAGraph, Step::Correct, Rule::Unwritten),
        (Behaviour::Impossible, Step::Fast, Rule::AboveRoofline),
    ] {
        let judgement = judge(behaviour, Mask::NONE);
        assert_eq!(judgement.broken(), Some(rule), "{judgement:?}");
        assert_eq!(judgement.findings.last().unwrap().step, step, "{judgement:?}");
    }
}

/// Cheats that are careful while they are checked are caught while they are timed.
#[test]
fn timed_calls_are_looked_at() {
    for (behaviour, rule) in [
        (Behaviour::OutlivesTheCall, Rule::Late),
        (Behaviour::Lazy, Rule::Late),
        (Behaviour::DividesAGraph, Rule::Unwritten),
        (Behaviour::ReusesMemory, Rule::Unwritten),
        (Behaviour::LowPrecision, Rule::Wrong),
        (Behaviour::CachesByPointer, Rule::Wrong),
    ] {
        let requirement = SpeedRequirement {
            problem: Problem::new(1, 2, 150, 24).with_dtype(DType::F16),
            rounds: 5,
            at_least: 0.9,
            peak_tflops: None,
        };
        let contract = Contract::whole(model(Mask::NONE));
        let (mut subject, mut baseline) = (Host::new(behaviour), Host::new(Behaviour::Honest));
        let outcome = gate::fast(&mut subject, &mut baseline, &contract, &requirement, 3);
        let Outcome::Reject { rule: broken, reason } = outcome else { panic!("{behaviour:?}") };
        assert_eq!(broken, rule, "{behaviour:?}: {reason}");
    }
}

#[test]
fn every_planted_defect_breaks_its_rule() {
    for (behaviour, mask, rule) in [
        (Behaviour::WrongMask, Mask::CAUSAL, Rule::Wrong),
        (Behaviour::WrongMask, Mask::NONE, Rule::Wrong),
        (Behaviour::WritesInput, Mask::NONE, Rule::InputChanged),
        (Behaviour::WritesBeside, Mask::NONE, Rule::Trespass),
        (Behaviour::Unrepeatable, Mask::NONE, Rule::Unrepeatable),
        (Behaviour::Slow, Mask::NONE, Rule::Slow),
    ] {
        let judgement = judge(behaviour, mask);
        assert_eq!(judgement.broken(), Some(rule), "{judgement:?}");
    }
}

fn rule_of(outcome: &Outcome) -> Option<Rule> {
    match outcome {
        Outcome::Reject { rule, .. } => Some(*rule),
        _ => None,
    }
}

/// A fence or a wait less, and the simulator names what is missing.
#[test]
fn a_race_is_a_hazard() {
    let kernel = Configuration::Product(Product { columns: 16, stages: 2, ..Product::PLAIN });
    let own = OwnKernel::new(kernel).unwrap();
    let accepted = gate::simulate(&own, 2);
    assert!(matches!(accepted, Outcome::Accept { .. }), "{accepted:?}");
    let waits = sim::mutate::sites(&own.program)
        .into_iter()
        .filter(|site| matches!(site.instruction, ptx::Instruction::MbarrierWait { .. }));
    for site in waits {
        let program = sim::mutate::without(&own.program, site.index);
        let outcome = gate::simulate(&OwnKernel { kernel, program }, 2);
        assert_eq!(rule_of(&outcome), Some(Rule::Hazard), "{outcome:?}");
    }
}

/// The dense kernel where the causal one is asked for.
#[test]
fn a_wrong_mask_is_wrong_in_the_simulator() {
    let scalar = |rules| Scalar {
        target: Target::SM_90A,
        element: Element::F16,
        head_dim: 7,
        value_head_dim: 33,
        rules,
    };
    let kernel = Configuration::Scalar(scalar(Rules::CAUSAL));
    let program = scalar(Rules::DENSE).program().unwrap();
    let outcome = gate::simulate(&OwnKernel { kernel, program }, 1);
    assert_eq!(rule_of(&outcome), Some(Rule::Wrong), "{outcome:?}");
}

#[test]
fn a_spill_is_slow_code() {
    if cuda::toolkit::Toolkit::for_tests().is_none() {
        return;
    }
    let scalar = Scalar {
        target: Target::SM_90A,
        element: Element::F32,
        head_dim: 128,
        value_head_dim: 128,
        rules: Rules::DENSE,
    };
    let text = ptx::print(&scalar.program().unwrap());
    let outcome = gate::assemble(&text);
    assert!(matches!(outcome, Outcome::Accept { .. }), "{outcome:?}");
    // Too few registers for what it holds.
    let body = text.find("\n{").unwrap();
    let starved = format!("{}\n.maxnreg 16{}", &text[..body], &text[body..]);
    let outcome = gate::assemble(&starved);
    assert_eq!(rule_of(&outcome), Some(Rule::SlowCode), "{outcome:?}");
    let outcome = gate::assemble(&text.replace("ld.param", "ld.parameter"));
    assert_eq!(rule_of(&outcome), Some(Rule::Refused), "{outcome:?}");
}

const DESCRIPTION: &str = r#"{
    "entry": "mine",
    "problem": "d=64,f16",
    "grid": ["ceil(query_length, 64)", "heads", "batch"],
    "threads": 128,
    "shared_bytes": SHARED,
    "arguments": [{ "tensor": "query" }, { "tensor": "output" }, { "f32": "scale * log2e" }]
}"#;

fn foreign(shared: &str, ptx: &str) -> ForeignKernel {
    let description = serde_json::from_str(&DESCRIPTION.replace("SHARED", shared)).unwrap();
    ForeignKernel::new(ptx.to_owned(), description).unwrap()
}

/// Shared memory over the limit makes a launch fail, and what was there is read as the result.
#[test]
fn shared_memory_over_the_limit_is_refused() {
    let ptx = ".visible .entry mine(.param .u64 q, .param .u64 o, .param .f32 s) { ret; }";
    assert!(matches!(foreign("4096", ptx).validate(), Outcome::Accept { .. }));
    assert_eq!(rule_of(&foreign("300000", ptx).validate()), Some(Rule::SharedMemory));
    let declared = format!(".shared .align 16 .b8 tile[230000];\n{ptx}");
    assert_eq!(rule_of(&foreign("4096", &declared).validate()), Some(Rule::SharedMemory));
}

#[test]
fn a_description_must_be_that_of_its_text() {
    let other = ".visible .entry mine(.param .u64 q, .param .u32 o, .param .f32 s) { ret; }";
    let outcome = foreign("0", other).validate();
    assert_eq!(rule_of(&outcome), Some(Rule::Invalid), "{outcome:?}");
    let missing = ".visible .entry yours(.param .u64 q) { ret; }";
    assert_eq!(rule_of(&foreign("0", missing).validate()), Some(Rule::Invalid));
    let description = DESCRIPTION.replace("SHARED", "\"shared\"");
    let description = serde_json::from_str(&description).unwrap();
    let message = ForeignKernel::new(String::new(), description).unwrap_err();
    assert!(message.contains("`shared_bytes`: there is no `shared`"), "{message}");
}
