//! Masks and scores as functions: expressions of where a query and a key stand.
//!
//! A function is traced once, from a closure over [`Traced`] values or from a text, into a list of
//! nodes. The list is data: printed, hashed, evaluated on the host, reasoned about block by block,
//! and written into kernels by the builder.
//!
//! | file | its subject |
//! | --- | --- |
//! | `node` | the language: types, operations, and which go together |
//! | `trace` | closures become nodes |
//! | `compose` | functions made of functions |
//! | `rules` | ready-made ones |
//! | `text` | nodes as text, and back |
//! | `evaluate` | what a function gives for one query and one key |
//! | `slope` | the derivative of a score function |
//! | `interval` | what it can give for ranges of queries and keys |
//! | `window` | the part of a mask that is a window by name |
//! | `cap` | the part of a score that is a softcap by name |
//! | `pattern` | sparse patterns that the caller has, block by block |
//! | `blocks` | which key blocks tiles of queries see, and which of them need the function |
//! | `scale` | a score function that only adds, over scores before their scale |
//! | `lower` | a function in a kernel, over a thread's scores |
//! | `weigh` | a score function in gradients |
//! | `table` | a kernel that does nothing else |
//!
//! What an operation gives is defined for every input, and the same everywhere, up to the rounding
//! of floats:
//!
//! | operation | |
//! | --- | --- |
//! | sums, differences, products of integers | wrap around at 32 bits |
//! | division of integers | rounds down; by zero it is zero |
//! | remainder | has the sign of the divisor; by zero it is the dividend |
//! | shifts | by the amount modulo 32; to the right, the sign follows |
//! | floats | as IEEE has them, subnormal numbers may be zero; of a number and NaN, the minimum and the maximum are the number |
//! | float to integer | towards zero, at most as far as integers go; NaN is zero |
//! | a load outside of its tensor | zero, whichever index is outside |

pub(crate) mod blocks;
pub(crate) mod lower;
pub mod rules;

mod cap;
mod compose;
mod evaluate;
mod interval;
mod node;
mod pattern;
mod scale;
mod slope;
mod table;
mod text;
mod trace;
mod weigh;
mod window;

pub use blocks::{BlockCounts, BlockMask, ListsOf, Walked};
pub use cap::Capped;
pub use evaluate::{Here, HostTensor, Row};
pub use interval::{KnownContents, Region, Seen};
pub use node::{Kind, Stored, TensorSpec, Type};
pub use pattern::{BlockPattern, KeyBlocks};
pub use text::FunctionTextError;
pub use trace::{At, CapturedTensor, Traced, TracedOperand};
pub use window::Windowed;

use std::collections::HashMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{LazyLock, Mutex, PoisonError};

use node::{Id, Node, Symbol};

/// A mask or a score as a function. A handle: as cheap as a number, equal where the function is.
///
/// Functions are kept as long as the process runs, each once: what differs from call to call
/// belongs into a tensor that the function loads from, not into its constants.
///
/// ```
/// use flashcore_kernels::attention::function::Function;
///
/// let causal = Function::mask("causal", |at| at.query().ge(at.key()));
/// assert_eq!(causal.text(), "(mask causal (ge query key))");
/// assert_eq!(causal.text().parse::<Function>()?, causal);
///
/// let capped = Function::score("capped", |score, _| 30.0 * (score / 30.0).tanh());
/// assert_eq!(capped.name(), "capped");
///
/// let documents = Function::mask("documents", |at| {
///     let ids = at.integers("ids");
///     ids.load([at.query()]).eq(ids.load([at.key()]))
/// });
/// assert_eq!(
///     documents.text(),
///     "(mask documents (tensor ids i32 1) (eq (load ids query) (load ids key)))"
/// );
/// # Ok::<(), flashcore_kernels::attention::function::FunctionTextError>(())
/// ```
#[derive(Clone, Copy)]
pub struct Function(&'static Body);

/// What there is to know of a function.
pub(crate) struct Body {
    pub(crate) kind: Kind,
    pub(crate) name: String,
    pub(crate) tensors: Vec<TensorSpec>,
    /// Each after those that it is made of.
    pub(crate) nodes: Vec<Node>,
    /// The type of each.
    types: Vec<Type>,
    pub(crate) root: Id,
    text: String,
    hash: u64,
}

/// Every function that there is, by its text.
static FUNCTIONS: LazyLock<Mutex<HashMap<String, &'static Body>>> = LazyLock::new(Mutex::default);

impl Function {
    /// The function of these nodes.
    fn intern(
        kind: Kind,
        name: String,
        tensors: Vec<TensorSpec>,
        nodes: &[Node],
        root: Id,
    ) -> Self {
        let (nodes, roots) = node::canonical(nodes, &[root]);
        let root = roots[0];
        let text = text::print(kind, &name, &tensors, &nodes, root);
        let mut functions = FUNCTIONS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = functions.get(&text) {
            return Function(known);
        }
        let hash = fnv1a(text.as_bytes());
        let types = node::types(&tensors, &nodes);
        let body = Body { kind, name, tensors, nodes, types, root, text: text.clone(), hash };
        let body: &'static Body = Box::leak(Box::new(body));
        functions.insert(text, body);
        Function(body)
    }

    pub(crate) fn body(&self) -> &'static Body {
        self.0
    }

    /// Whether it is a mask or a score.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// What its author calls it.
    pub fn name(&self) -> &'static str {
        &self.0.name
    }

    /// The function as a text, which parses to the same function. There is no comma in it.
    pub fn text(&self) -> &'static str {
        &self.0.text
    }

    /// A hash of the text: the same in every process and version.
    pub fn stable_hash(&self) -> u64 {
        self.0.hash
    }

    /// The tensors that it loads from.
    pub fn tensors(&self) -> &'static [TensorSpec] {
        &self.0.tensors
    }

    /// Whether it loads something for each score: from where both query and key say.
    pub(crate) fn loads_each_score(&self) -> bool {
        let mut all: Vec<[bool; 2]> = Vec::new();
        for node in &self.0.nodes {
            let own = [Symbol::Query, Symbol::Key].map(|it| *node == Node::Symbol(it));
            let inputs = node.inputs();
            let of_inputs = |side: usize| inputs.iter().any(|input| all[*input as usize][side]);
            let both = [own[0] || of_inputs(0), own[1] || of_inputs(1)];
            all.push(both);
        }
        let loads = |(node, both): (&Node, &[bool; 2])| {
            matches!(node, Node::Load(..)) && *both == [true; 2]
        };
        self.0.nodes.iter().zip(&all).any(loads)
    }

    /// Whether it gives the same for every sequence, and for every head.
    pub fn depends(&self) -> Depends {
        let on = |symbol: node::Symbol| self.0.nodes.contains(&Node::Symbol(symbol));
        Depends { batch: on(node::Symbol::Batch), head: on(node::Symbol::Head) }
    }

    /// For names of kernels: its name, and enough of its hash.
    pub(crate) fn label(&self) -> String {
        let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '_' };
        let name: String = self.0.name.chars().take(24).map(plain).collect();
        format!("{name}_{:08x}", self.0.hash as u32)
    }
}

/// What a function depends on beside positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depends {
    /// On the sequence.
    pub batch: bool,
    /// On the query head.
    pub head: bool,
}

impl PartialEq for Function {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for Function {}

impl Hash for Function {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash.hash(state);
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// The 64-bit hash of Fowler, Noll and Vo.
fn fnv1a(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}
