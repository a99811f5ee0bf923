//! Scenes: kernels with inputs in memory, arguments, and expected results.
//!
//! A [`Scene`] is made once for a kernel and a size, then run under any number of schedules. Of the
//! simulator it holds only [`Memory`] and [`Argument`]s, so that the same scene can run on a GPU.
//!
//! Attention scenes come from a [`Call`]: what the library would launch for a problem, with the
//! same arguments and workspaces, but with buffers of the simulator in place of the device's.
//! Results are judged by the rule of [`mod@crate::verdict`] against [`mod@crate::reference`];
//! matrix products by the roundings they go through.
//!
//! | file | its subject |
//! | --- | --- |
//! | `call` | attention calls of any kernel over any storage |
//! | `backward` | the gradients of attention |
//! | `companion` | the main kernels beside which those of a backward pass run |
//! | `ragged` | ragged batches and their placement in memory |
//! | `kernel` | what a kernel is built for, and the smallest call that exercises it |
//! | `sequencer`, `append`, `combine`, `widen` | the kernels that run besides attention |
//! | `matrix`, `banks` | the matrix kernels, and bank conflicts |
//! | `adversarial` | the adversarial scenes of a kernel, in which its mutants must be noticed |
//! | `sweep` | one scene under many schedules |

mod adversarial;
mod append;
mod backward;
mod banks;
mod call;
mod combine;
mod companion;
mod kernel;
mod matrix;
mod ragged;
mod sequencer;
mod sweep;
mod widen;

use std::fmt;

use flashcore::random::uniform;
use flashcore::{Problem, Shape, Storage};
use kernels::{Batch, Configuration};
use ptx::{Element, Int8, Program};

pub use append::AppendSize;
pub(crate) use call::of_sequences;
pub use call::{Call, KeyMagnitudes};
use companion::main_kernel;
use kernel::Kernel;
pub use ragged::{PlacementKind, Ragged};
pub use sweep::{MAX_SEEDS, Outcome, schedules};

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
    /// The kernel under test.
    pub program: Program,
    /// The number of blocks in its grid.
    pub grid: u32,
    /// The arguments, one for each of its parameters.
    pub arguments: Vec<Argument>,
    /// The launches before the kernel under test, over the same memory.
    pub before: Vec<KernelLaunch>,
    /// The launches after the kernel under test.
    pub after: Vec<KernelLaunch>,
    /// The memory before the first launch, with inputs in place and outputs unwritten.
    pub memory: Memory,
    /// The expected results.
    pub results: Vec<Expected>,
    /// The results of which no byte may be written twice.
    pub written_once: Vec<BufferId>,
    /// The buffers that the kernel must leave as it found them.
    pub restored: Vec<BufferId>,
    /// A description of the problem's size.
    pub size: String,
}

/// A launch before or after the kernel under test.
#[derive(Clone, Debug)]
pub struct KernelLaunch {
    /// The kernel.
    pub program: Program,
    /// The number of blocks in the grid.
    pub grid: u32,
    /// The arguments, one for each parameter.
    pub arguments: Vec<Argument>,
}

impl KernelLaunch {
    /// Returns the launch in the form that the simulator takes.
    pub fn launch(&self) -> Launch<'_> {
        let KernelLaunch { program, grid, arguments } = self;
        Launch { program, grid: *grid, arguments: arguments.clone() }
    }
}

/// An expected result.
#[derive(Clone, Debug)]
pub struct Expected {
    /// The name of the result, for messages.
    pub name: &'static str,
    /// The buffer that holds the result, whole.
    pub buffer: BufferId,
    /// The element type.
    pub element: Element,
    /// The exact values.
    pub exact: Vec<f64>,
    /// For each value, the sum of the magnitudes of its terms.
    pub magnitude: Vec<f64>,
    /// For each value, the largest error that passes.
    pub tolerance: Vec<f64>,
}

impl Expected {
    /// Returns a result whose values may all be wrong by as much, each the sum of one term.
    fn within(
        tolerance: f64,
        name: &'static str,
        buffer: BufferId,
        element: Element,
        exact: Vec<f64>,
    ) -> Self {
        let magnitude = exact.iter().map(|value| value.abs()).collect();
        Expected {
            name,
            buffer,
            element,
            magnitude,
            tolerance: vec![tolerance; exact.len()],
            exact,
        }
    }
}

/// The reason why a scene cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum SceneError {
    /// The kernel cannot be built.
    #[error(transparent)]
    Kernel(#[from] kernels::Error),
    /// The kernel does not support this size.
    #[error("{0}")]
    Size(String),
}

/// Refuses tensors of more elements than [`MAX_ELEMENTS`], or of more than can be counted.
fn admit(counts: impl IntoIterator<Item = Option<usize>>) -> Result<(), SceneError> {
    if counts.into_iter().any(|count| count.is_none_or(|count| count > MAX_ELEMENTS)) {
        return Err(SceneError::Size("the problem is too large to simulate".to_owned()));
    }
    Ok(())
}

/// The accuracy of the results of a run.
#[derive(Clone, Debug, Default)]
pub struct Accuracy {
    /// The largest error of a value.
    pub max_error: f64,
    /// The largest fraction of a value's tolerance that was used up.
    pub tolerance_used: f64,
    /// A description of the first mistake.
    pub complaint: Option<String>,
}

impl Accuracy {
    /// Returns whether every value is within its tolerance.
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

/// The most elements of a tensor of a scene. The reference and the simulator's shadow of the memory
/// take several times the bytes.
const MAX_ELEMENTS: usize = 1 << 28;

impl Scene {
    /// Refuses a problem that is too large to simulate, before anything is allocated for it. A
    /// sequence counts as one row at least, since lists have an entry for it.
    pub fn admit(problem: &Problem) -> Result<(), SceneError> {
        let Problem { batch, query_heads, head_dim, .. } = *problem;
        let sequences = Shape::new(batch, 1, query_heads, head_dim);
        let shapes = [sequences, problem.query_shape(), problem.key_shape()];
        let table = match problem.keys {
            Storage::Paged { columns, .. } => batch.checked_mul(columns),
            _ => Some(0),
        };
        admit(shapes.into_iter().map(Shape::elements).chain([table]))
    }

    /// Creates a scene of a shipped kernel on the smallest problem that takes it around its loops
    /// and has partial tiles at the ends.
    pub fn small(kernel: &Configuration) -> Result<Self, SceneError> {
        match kernel {
            Configuration::Combine(combine) => {
                Scene::combine(*combine, [1, 11, 2], Scene::COMBINE_PARTS)
            }
            Configuration::Sequencer(sequencer) => {
                Scene::sequencer(*sequencer, &Scene::sequencer_batch(), 64)
            }
            Configuration::Append(append) => Scene::append(*append, &AppendSize::small()),
            // Launch 0 of this call is the sequencer, which orders the tiles.
            Configuration::Widen(widen) => Call::widened(widen)?.scene_of(1),
            Configuration::Single(single) => Scene::single(*single),
            Configuration::Product(product) => {
                let (rows, inner) = Scene::PRODUCT;
                Scene::product(*product, rows, inner)
            }
            // The companion kernels of the backward pass run in their place before or after it.
            Configuration::RowSums(it) => {
                let call =
                    Call::for_companion(main_kernel(kernel), it.sums.query_block as usize + 5);
                call.with_lse_gradient(it.lse_gradient).scene_of(backward_launch(it.batch, 0))
            }
            Configuration::Rounding(it) => {
                let call =
                    Call::for_companion(main_kernel(kernel), it.sums.query_block as usize + 5);
                call.scene_of(backward_launch(it.batch, 2))
            }
            Configuration::SinkGradients(it) => {
                let call = Call::small(main_kernel(kernel));
                call.with_lse_gradient(it.lse_gradient).scene_of(backward_launch(it.batch, 3))
            }
            attention => Call::small(*attention).scene(),
        }
    }

    /// Creates a scene of a kernel without other launches.
    pub fn single_launch(
        step: KernelLaunch,
        memory: Memory,
        results: Vec<Expected>,
        size: String,
    ) -> Self {
        let KernelLaunch { program, grid, arguments } = step;
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

    /// Returns the scene with the launches before the kernel already done.
    pub fn prepared(&self, options: &Options) -> Result<Self, Failure> {
        let mut memory = self.memory.clone();
        for step in &self.before {
            sim::run(&step.launch(), &mut memory, options)?;
        }
        Ok(Scene { memory, before: Vec::new(), ..self.clone() })
    }

    /// Returns the scene over the memory that a run of it left behind, with the results restored to
    /// unwritten, so that no result passes because an earlier run wrote it.
    pub fn after_run(&self, left: &Memory) -> Self {
        let mut memory = left.clone();
        for result in &self.results {
            memory.restore(result.buffer, &self.memory);
        }
        Scene { memory, before: Vec::new(), ..self.clone() }
    }

    /// Returns the launch of the kernel.
    pub fn launch(&self) -> Launch<'_> {
        self.launch_of(&self.program)
    }

    /// Returns the launch of a changed program with the same parameters.
    fn launch_of<'a>(&self, program: &'a Program) -> Launch<'a> {
        Launch { program, grid: self.grid, arguments: self.arguments.clone() }
    }

    /// Runs the scene once, with the launches before and after the kernel. Returns the memory
    /// afterwards and the report of the kernel itself.
    pub fn run(&self, options: &Options) -> Result<(Memory, Report), Failure> {
        self.run_program(&self.program, options)
    }

    /// Runs the scene once with a changed program in place of the kernel.
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

    /// Compares the results of a run with the expected ones, and checks that the `restored` buffers
    /// are unchanged, unless a launch before the kernel writes them.
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
                // Infinities and NaN pass only where they are expected.
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

/// Returns the index of a launch of the backward pass in its plan: a ragged batch has a launch of
/// its own before all others, which orders the tiles.
fn backward_launch(batch: Batch, index: usize) -> usize {
    index + usize::from(batch != Batch::Equal)
}

/// Returns `count` numbers up to a magnitude, determined by a seed and rounded to an element type.
fn numbers(seed: u64, element: Element, count: usize, magnitude: f32) -> Vec<f64> {
    let number = |index| f64::from(magnitude * uniform(seed, index));
    (0..count as u64).map(|index| round(element, number(index))).collect()
}

/// Rounds a value to an element type.
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

/// Encodes values as bytes of an element type.
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

/// Decodes bytes as values of an element type.
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
