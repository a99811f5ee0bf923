//! Kernels with something to do: inputs in memory, arguments, and what must
//! come out.
//!
//! A [`Scene`] is made once for a kernel and a size, then run under any number
//! of schedules. It holds nothing of the simulator but [`Memory`] and
//! [`Argument`]s, so that the same scene can be put on a GPU.
//!
//! Attention is a [`Call`]: what the library would launch for a problem, with the
//! arguments and the memory that it would pass, only that buffers of the simulator
//! are in the place of the device's. Results are judged by the rule of
//! [`mod@crate::verdict`] against [`mod@crate::reference`]; sums of products by the
//! roundings they go through.
//!
//! | file | its subject |
//! | --- | --- |
//! | `call` | attention of any kernel over any storage |
//! | `backward` | the gradients of attention |
//! | `ragged` | sequences of unequal lengths, and how they lie |
//! | `kernel` | what a kernel is built for, and the smallest call that shows it |
//! | `sequencer`, `append`, `combine`, `widen` | what goes with attention |
//! | `matrix`, `banks` | the matrix kernels, and bank conflicts |
//! | `unkind` | the scenes of a kernel that leave a mutant no place to hide |
//! | `sweep` | one scene under many schedules |

mod append;
mod backward;
mod banks;
mod call;
mod combine;
mod kernel;
mod matrix;
mod ragged;
mod sequencer;
mod sweep;
mod unkind;
mod widen;

use std::fmt;

use kernels::{Batch, Configuration};
use ptx::{Element, Int8, Program};

pub use append::AppendSize;
pub(crate) use call::of_sequences;
pub use call::{Call, Weights};
use kernel::Kernel;
pub use ragged::{Place, Ragged};
pub use sweep::{MOST_SEEDS, Outcome, schedules};

use sim::{Argument, BufferId, Failure, Launch, Memory, Options, Report, float};

/// A kernel with its inputs, ready to run.
///
/// ```
/// use flashcore_testing::scene::Scene;
/// use sim::Options;
/// use kernels::Single;
/// use ptx::Element;
///
/// let scene = Scene::single(Single { element: Element::F16 })?;
/// let (memory, _) = scene.run(&Options::default())?;
/// let accuracy = scene.judge(&memory);
/// assert!(accuracy.passed(), "{accuracy}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Scene {
    /// The kernel that is looked at.
    pub program: Program,
    /// Blocks of its grid.
    pub grid: u32,
    /// One for each of its parameters.
    pub arguments: Vec<Argument>,
    /// Launches before it, over the same memory.
    pub before: Vec<Step>,
    /// Launches after it.
    pub after: Vec<Step>,
    /// Inputs in place, outputs unwritten.
    pub memory: Memory,
    /// What must come out.
    pub results: Vec<Expected>,
    /// Results of which no byte may be written twice.
    pub written_once: Vec<BufferId>,
    /// Memory that the kernel must leave as it found it.
    pub restored: Vec<BufferId>,
    /// The size of the problem, in words.
    pub size: String,
}

/// A launch that goes with a kernel.
#[derive(Clone, Debug)]
pub struct Step {
    /// Its kernel.
    pub program: Program,
    /// Blocks of the grid.
    pub grid: u32,
    /// One for each parameter.
    pub arguments: Vec<Argument>,
}

impl Step {
    /// As the simulator takes it.
    pub fn launch(&self) -> Launch<'_> {
        let Step { program, grid, arguments } = self;
        Launch { program, grid: *grid, arguments: arguments.clone() }
    }
}

/// A result: where it lies and what must be there.
#[derive(Clone, Debug)]
pub struct Expected {
    /// What it is.
    pub name: &'static str,
    /// Where it lies: the whole buffer.
    pub buffer: BufferId,
    /// What it is made of.
    pub element: Element,
    /// The exact values.
    pub exact: Vec<f64>,
    /// For each, the sum of the magnitudes of what it is the sum of.
    pub magnitude: Vec<f64>,
    /// For each, the largest error that passes.
    pub tolerance: Vec<f64>,
}

/// Why there is no scene.
#[derive(Debug, thiserror::Error)]
pub enum SceneError {
    /// The kernel cannot be built.
    #[error(transparent)]
    Kernel(#[from] kernels::Error),
    /// The kernel does not serve this size.
    #[error("{0}")]
    Size(String),
}

/// How near the results of a run are to the exact ones.
#[derive(Clone, Debug, Default)]
pub struct Accuracy {
    /// The largest error.
    pub max_error: f64,
    /// The largest share of a value's tolerance that was used up.
    pub tolerance_used: f64,
    /// The first value that is wrong, in words.
    pub complaint: Option<String>,
}

impl Accuracy {
    /// Whether every value is within its tolerance.
    pub fn passed(&self) -> bool {
        self.complaint.is_none()
    }
}

impl fmt::Display for Accuracy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Accuracy { max_error, tolerance_used, complaint } = self;
        write!(
            f,
            "largest error {max_error:.1e}, {:.0} % of the tolerance",
            100.0 * tolerance_used
        )?;
        complaint.as_ref().map_or(Ok(()), |complaint| write!(f, "; {complaint}"))
    }
}

impl Scene {
    /// A shipped kernel on the smallest problem that takes it around its loops
    /// and has ragged ends.
    pub fn small(kernel: &Configuration) -> Result<Self, SceneError> {
        match kernel {
            Configuration::Combine(combine) => {
                Scene::combine(*combine, [1, 11, 2], Scene::COMBINE_PARTS)
            }
            Configuration::Sequencer(sequencer) => {
                Scene::sequencer(*sequencer, &Scene::sequencer_batch(), 64)
            }
            Configuration::Append(append) => Scene::append(*append, &AppendSize::small()),
            // After the tiles were put in order.
            Configuration::Widen(widen) => Call::widened(widen)?.scene_of(1),
            Configuration::Single(single) => Scene::single(*single),
            Configuration::Product(product) => {
                let (rows, inner) = Scene::PRODUCT;
                Scene::product(*product, rows, inner)
            }
            Configuration::Ceiling(ceiling) => Scene::ceiling(*ceiling, Scene::CEILING_ROUNDS),
            // What goes with the backward pass is looked at in its place before or after it.
            Configuration::RowSums(it) => {
                let ragged = usize::from(it.batch != Batch::Equal);
                let before = it.before().unwrap_or(*kernel);
                Call::beside(before, it.sums.query_block as usize + 5).scene_of(ragged)
            }
            Configuration::Rounding(it) => {
                let ragged = usize::from(it.batch != Batch::Equal);
                let after = it.after().unwrap_or(*kernel);
                Call::beside(after, it.sums.query_block as usize + 5).scene_of(2 + ragged)
            }
            Configuration::SinkGradients(it) => {
                let ragged = usize::from(it.batch != Batch::Equal);
                Call::small(it.after().unwrap_or(*kernel)).scene_of(3 + ragged)
            }
            attention => Call::small(*attention).scene(),
        }
    }

    /// A kernel by itself.
    pub fn alone(step: Step, memory: Memory, results: Vec<Expected>, size: String) -> Self {
        let Step { program, grid, arguments } = step;
        let (before, after) = (Vec::new(), Vec::new());
        let (written_once, restored) = (Vec::new(), Vec::new());
        Scene {
            program,
            grid,
            arguments,
            before,
            after,
            memory,
            results,
            written_once,
            restored,
            size,
        }
    }

    /// The same with the launches before it done.
    pub fn prepared(&self, options: &Options) -> Result<Self, Failure> {
        let mut memory = self.memory.clone();
        for step in &self.before {
            sim::run(&step.launch(), &mut memory, options)?;
        }
        Ok(Scene { memory, before: Vec::new(), ..self.clone() })
    }

    /// The same over what a run of it left behind: prepared, and with results unwritten, so that
    /// nothing is right because it was before.
    pub fn again(&self, left: &Memory) -> Self {
        let mut memory = left.clone();
        for result in &self.results {
            memory.restore(result.buffer, &self.memory);
        }
        Scene { memory, before: Vec::new(), ..self.clone() }
    }

    /// The kernel's launch.
    pub fn launch(&self) -> Launch<'_> {
        self.launch_of(&self.program)
    }

    /// The launch of a changed program with the same parameters.
    pub fn launch_of<'a>(&self, program: &'a Program) -> Launch<'a> {
        Launch { program, grid: self.grid, arguments: self.arguments.clone() }
    }

    /// Runs it once, with the launches before and after it: the memory afterwards, and what the
    /// run of the kernel itself tells.
    pub fn run(&self, options: &Options) -> Result<(Memory, Report), Failure> {
        self.run_program(&self.program, options)
    }

    /// The same with a changed program in the kernel's place.
    pub fn run_program(
        &self,
        program: &Program,
        options: &Options,
    ) -> Result<(Memory, Report), Failure> {
        let mut memory = self.memory.clone();
        let beside = Options { budget: Default::default(), trace: false, ..options.clone() };
        for step in &self.before {
            sim::run(&step.launch(), &mut memory, &beside)?;
        }
        let report = sim::run(&self.launch_of(program), &mut memory, options)?;
        for step in &self.after {
            sim::run(&step.launch(), &mut memory, &beside)?;
        }
        Ok((memory, report))
    }

    /// Compares the results of a run with the exact ones, and what was to be left alone with what
    /// it was, unless a launch before the kernel wrote it.
    pub fn judge(&self, memory: &Memory) -> Accuracy {
        let mut accuracy = Accuracy::default();
        let mut restored = self.restored.iter().filter(|_| self.before.is_empty());
        if restored.any(|id| memory.bytes(*id) != self.memory.bytes(*id)) {
            accuracy.complaint = Some("a counter is not left as it was found".to_owned());
        }
        for buffer in &self.written_once {
            let again = memory.rewritten(*buffer);
            if again > 0 {
                let text = format!("{again} bytes of a result were written twice");
                accuracy.complaint.get_or_insert(text);
            }
        }
        for result in &self.results {
            let unwritten = memory.unwritten(result.buffer);
            if unwritten > 0 {
                let text = format!("{unwritten} bytes of {} were never written", result.name);
                accuracy.complaint.get_or_insert(text);
            }
            let found = decode(result.element, memory.bytes(result.buffer));
            for (index, found) in found.into_iter().enumerate() {
                let (exact, tolerance) = (result.exact[index], result.tolerance[index]);
                // Infinities and NaN are right where they are expected, and nowhere else.
                let same = found == exact || found.is_nan() && exact.is_nan();
                let error = if same { 0.0 } else { (found - exact).abs() };
                if error.is_nan() || error > tolerance {
                    let name = result.name;
                    let text = format!(
                        "element {index} of {name} is {found}, not {exact} within {tolerance:.1e}"
                    );
                    accuracy.complaint.get_or_insert(text);
                }
                accuracy.max_error = accuracy.max_error.max(error);
                if error > 0.0 {
                    accuracy.tolerance_used = accuracy.tolerance_used.max(error / tolerance);
                }
            }
        }
        accuracy
    }
}

/// Numbers between -1 and 1, the same every time.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn number(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// So many, up to a magnitude, as an element has them.
    fn numbers(&mut self, element: Element, count: usize, magnitude: f32) -> Vec<f64> {
        (0..count).map(|_| round(element, (magnitude * self.number()) as f64)).collect()
    }
}

/// The nearest value that an element has.
fn round(element: Element, value: f64) -> f64 {
    match element {
        Element::F16 => float::from_f16(float::f16_bits(value as f32)) as f64,
        Element::BF16 => float::from_bf16(float::bf16_bits(value as f32)) as f64,
        Element::F32 => value as f32 as f64,
        Element::E4M3 => float::from_e4m3(float::e4m3_bits(value as f32)) as f64,
        Element::E5M2 => float::from_e5m2(float::e5m2_bits(value as f32)) as f64,
        Element::Int8 => Int8.decode(Int8.encode(value as f32)) as f64,
    }
}

/// Values as they lie in memory.
fn encode(element: Element, values: &[f64]) -> Vec<u8> {
    let values = values.iter().map(|value| *value as f32);
    match element {
        Element::F16 => values.flat_map(|x| float::f16_bits(x).to_le_bytes()).collect(),
        Element::BF16 => values.flat_map(|x| float::bf16_bits(x).to_le_bytes()).collect(),
        Element::F32 => values.flat_map(f32::to_le_bytes).collect(),
        Element::E4M3 => values.map(float::e4m3_bits).collect(),
        Element::E5M2 => values.map(float::e5m2_bits).collect(),
        Element::Int8 => values.map(|x| Int8.encode(x)).collect(),
    }
}

/// The values that bytes of memory are.
pub fn decode(element: Element, bytes: &[u8]) -> Vec<f64> {
    let half = |pair: &[u8]| u16::from_le_bytes([pair[0], pair[1]]);
    let word = |four: &[u8]| u32::from_le_bytes([four[0], four[1], four[2], four[3]]);
    match element {
        Element::F16 => bytes.chunks_exact(2).map(|x| float::from_f16(half(x)) as f64).collect(),
        Element::BF16 => bytes.chunks_exact(2).map(|x| float::from_bf16(half(x)) as f64).collect(),
        Element::F32 => bytes.chunks_exact(4).map(|x| f32::from_bits(word(x)) as f64).collect(),
        Element::E4M3 => bytes.iter().map(|x| float::from_e4m3(*x) as f64).collect(),
        Element::E5M2 => bytes.iter().map(|x| float::from_e5m2(*x) as f64).collect(),
        Element::Int8 => bytes.iter().map(|x| Int8.decode(*x) as f64).collect(),
    }
}
