//! Mask and score functions: expressions of the places of a query and a key, FlexAttention's
//! `mask_mod` and `score_mod`.
//!
//! A function is traced once, from a closure over [`Traced`] values or from a text, into a list of
//! nodes. The list is data: it is printed, hashed, evaluated on the host, analysed block by block,
//! and lowered into kernels.
//!
//! | file | its subject |
//! | --- | --- |
//! | `node` | the language: types, operations and type rules |
//! | `trace` | tracing of closures into nodes |
//! | `compose` | conjunction, disjunction and chaining of functions |
//! | `rules` | ready-made functions |
//! | `text` | nodes as text, and back |
//! | `evaluate` | evaluation on the host, for one query and one key |
//! | `derivative` | the derivative of a score function |
//! | `interval` | the possible results over ranges of queries and keys |
//! | `window` | extraction of the part of a mask that is a window by name |
//! | `cap` | extraction of the part of a score function that caps scores |
//! | `pattern` | block-sparse patterns that the caller has |
//! | `blocks` | which key blocks tiles of queries see, and which of them need the function |
//! | `lists` | the lists of such blocks inside a kernel |
//! | `scale` | score functions that only add, applied before the scale |
//! | `lower` | a function inside a kernel, over a thread's scores |
//! | `probabilities` | a score function in the backward pass |
//! | `table` | a kernel that applies a function and does nothing else |
//!
//! The result of an operation is defined for every input, and is the same on the host and in
//! kernels, up to the rounding of floats:
//!
//! | operation | |
//! | --- | --- |
//! | sums, differences, products of integers | wrap around at 32 bits |
//! | division of integers | rounds down; division by zero is zero |
//! | remainder | has the sign of the divisor; by zero it is the dividend |
//! | shifts | by the amount modulo 32; right shifts are arithmetic |
//! | floats | as in IEEE 754, but subnormal numbers may be flushed to zero; the minimum and the maximum of a number and NaN are the number |
//! | float to integer | rounds towards zero and saturates; NaN is zero |
//! | a load outside of its tensor | is zero, whichever index is outside |

pub(crate) mod lists;
pub(crate) mod lower;
pub mod rules;

mod blocks;
mod cap;
mod compose;
mod derivative;
mod evaluate;
mod interval;
mod node;
mod pattern;
mod probabilities;
mod scale;
mod table;
mod text;
mod trace;
mod window;

pub use blocks::{BlockCount, BlockCounts, BlockMask, ListsOf};
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

/// A mask or score function. It is a handle, as cheap to copy as a number; handles are equal where
/// the functions are.
///
/// Functions are interned and kept as long as the process runs: what differs from call to call
/// belongs in a tensor that the function loads from, not in its constants.
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

/// The interned contents of a function.
pub(crate) struct Body {
    pub(crate) kind: Kind,
    pub(crate) name: String,
    pub(crate) tensors: Vec<TensorSpec>,
    /// The nodes, each after its operands.
    pub(crate) nodes: Vec<Node>,
    /// The type of each node.
    types: Vec<Type>,
    pub(crate) root: Id,
    text: String,
    hash: u64,
}

/// All functions of the process, by their text.
static FUNCTIONS: LazyLock<Mutex<HashMap<String, &'static Body>>> = LazyLock::new(Mutex::default);

impl Function {
    /// Returns the function of these nodes, interned.
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

    /// Returns whether the function is a mask or a score.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// Returns the name that its author gave it.
    pub fn name(&self) -> &'static str {
        &self.0.name
    }

    /// Returns the function's text, which parses to the same function and contains no comma.
    pub fn text(&self) -> &'static str {
        &self.0.text
    }

    /// Returns the tensors that the function loads from.
    pub fn tensors(&self) -> &'static [TensorSpec] {
        &self.0.tensors
    }

    /// Returns whether some load depends on both query and key, so that it is done for each score.
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

    /// Returns whether the result depends on the sequence, and on the query head.
    pub fn depends(&self) -> Depends {
        let on = |symbol: node::Symbol| self.0.nodes.contains(&Node::Symbol(symbol));
        Depends { batch: on(node::Symbol::Batch), head: on(node::Symbol::Head) }
    }

    /// Returns the function's part of kernel names: its name and 32 bits of its hash.
    pub(crate) fn label(&self) -> String {
        let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '_' };
        let name: String = self.0.name.chars().take(24).map(plain).collect();
        format!("{name}_{:08x}", self.0.hash as u32)
    }
}

/// What a function depends on, besides the places of query and key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depends {
    /// Whether it depends on the sequence.
    pub batch: bool,
    /// Whether it depends on the query head.
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

/// The 64-bit FNV-1a hash (Fowler, Noll and Vo).
fn fnv1a(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}
