//! The language of functions: types and operations, and the type rules of each operation.

use std::collections::HashMap;
use std::fmt;

/// The kind of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A mask: whether a query sees a key.
    Mask,
    /// A score: what a score becomes.
    Score,
}

impl Kind {
    /// Both kinds.
    pub const ALL: [Kind; 2] = [Kind::Mask, Kind::Score];

    /// Returns the kind's name in texts.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Mask => "mask",
            Kind::Score => "score",
        }
    }

    /// Returns the type of such a function's result.
    pub(super) const fn result(self) -> Type {
        match self {
            Kind::Mask => Type::Bool,
            Kind::Score => Type::F32,
        }
    }
}

/// The type of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Type {
    /// A single-precision float.
    F32,
    /// A signed 32-bit integer.
    I32,
    /// A boolean.
    Bool,
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Type::F32 => "f32",
            Type::I32 => "i32",
            Type::Bool => "bool",
        })
    }
}

/// A tensor that a function loads from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorSpec {
    /// The name by which the caller passes it.
    pub name: String,
    /// The element type.
    pub stored: Stored,
    /// Number of dimensions: 1 to [`TensorSpec::MOST_DIMENSIONS`].
    pub rank: usize,
}

impl TensorSpec {
    /// The most dimensions of a tensor.
    pub const MOST_DIMENSIONS: usize = 4;
    /// The most tensors that a function loads from.
    pub const MOST_TENSORS: usize = 8;
}

/// The element type of a tensor that a function loads from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stored {
    /// Single-precision floats.
    F32,
    /// Half-precision floats.
    F16,
    /// bfloat16: the upper half of a single-precision float.
    BF16,
    /// Signed 32-bit integers.
    I32,
    /// Signed 64-bit integers, of which the lower 32 bits are used.
    I64,
    /// Unsigned 8-bit integers.
    U8,
    /// Booleans of a byte each: zero is false.
    Bool,
}

impl Stored {
    /// All element types.
    pub const ALL: [Stored; 7] = [
        Stored::F32,
        Stored::F16,
        Stored::BF16,
        Stored::I32,
        Stored::I64,
        Stored::U8,
        Stored::Bool,
    ];

    /// Returns the element type's name in texts.
    pub const fn name(self) -> &'static str {
        match self {
            Stored::F32 => "f32",
            Stored::F16 => "f16",
            Stored::BF16 => "bf16",
            Stored::I32 => "i32",
            Stored::I64 => "i64",
            Stored::U8 => "u8",
            Stored::Bool => "bool",
        }
    }

    /// Returns the bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Stored::U8 | Stored::Bool => 1,
            Stored::F16 | Stored::BF16 => 2,
            Stored::F32 | Stored::I32 => 4,
            Stored::I64 => 8,
        }
    }

    /// Returns the type of a load's result.
    pub const fn loads(self) -> Type {
        match self {
            Stored::F32 | Stored::F16 | Stored::BF16 => Type::F32,
            Stored::I32 | Stored::I64 | Stored::U8 => Type::I32,
            Stored::Bool => Type::Bool,
        }
    }
}

/// The index of a node in its function.
pub(crate) type Id = u32;

/// An expression, whose operands are indices of other nodes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Node {
    Symbol(Symbol),
    Constant(Constant),
    Unary(Unary, Id),
    Binary(Binary, Id, Id),
    Compare(Comparison, Id, Id),
    /// `Select(condition, a, b)`: `a` where the condition holds, otherwise `b`.
    Select(Id, Id, Id),
    /// An element of a tensor, by the tensor's number and the indices.
    Load(u32, Vec<Id>),
}

/// Defines enumerations whose variants have names in texts.
macro_rules! named {
    ($($(#[$of_enum:meta])* enum $name:ident { $($(#[$of_one:meta])* $one:ident = $text:literal,)* })*) => {$(
        $(#[$of_enum])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(crate) enum $name {
            $($(#[$of_one])* $one,)*
        }

        impl $name {
            pub(super) const ALL: &[$name] = &[$($name::$one),*];

            pub(super) const fn name(self) -> &'static str {
                match self {
                    $($name::$one => $text,)*
                }
            }
        }
    )*};
}

named! {
    /// The inputs of a function.
    enum Symbol {
        Batch = "batch",
        Head = "head",
        /// The index of the query in its sequence.
        Query = "query",
        /// The index of the key in its sequence.
        Key = "key",
        QueryLength = "query_length",
        KeyLength = "key_length",
        /// The score so far; only in score functions.
        Score = "score",
    }

    enum Unary {
        Negate = "neg",
        Absolute = "abs",
        Not = "not",
        Tanh = "tanh",
        Exp2 = "exp2",
        Log2 = "log2",
        ToFloat = "f32",
        ToInteger = "i32",
    }

    enum Binary {
        Add = "add",
        Subtract = "sub",
        Multiply = "mul",
        Divide = "div",
        Remainder = "rem",
        Minimum = "min",
        Maximum = "max",
        And = "and",
        Or = "or",
        Xor = "xor",
        ShiftLeft = "shl",
        ShiftRight = "shr",
    }

    enum Comparison {
        Equal = "eq",
        NotEqual = "ne",
        Less = "lt",
        AtMost = "le",
        Greater = "gt",
        AtLeast = "ge",
    }
}

impl Symbol {
    const fn ty(self) -> Type {
        match self {
            Symbol::Score => Type::F32,
            _ => Type::I32,
        }
    }
}

/// A constant. Floats are stored as bits, so that nodes can be compared and hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Constant {
    F32(u32),
    I32(i32),
    Bool(bool),
}

impl Constant {
    const fn ty(self) -> Type {
        match self {
            Constant::F32(_) => Type::F32,
            Constant::I32(_) => Type::I32,
            Constant::Bool(_) => Type::Bool,
        }
    }
}

impl Node {
    /// Returns the node's operands.
    pub(crate) fn inputs(&self) -> Vec<Id> {
        match self {
            Node::Symbol(_) | Node::Constant(_) => Vec::new(),
            Node::Unary(_, a) => vec![*a],
            Node::Binary(_, a, b) | Node::Compare(_, a, b) => vec![*a, *b],
            Node::Select(a, b, c) => vec![*a, *b, *c],
            Node::Load(_, indices) => indices.clone(),
        }
    }

    /// Returns the same node with its operands replaced.
    pub(super) fn map(&self, to: impl Fn(Id) -> Id) -> Node {
        match self {
            Node::Symbol(_) | Node::Constant(_) => self.clone(),
            Node::Unary(operation, a) => Node::Unary(*operation, to(*a)),
            Node::Binary(operation, a, b) => Node::Binary(*operation, to(*a), to(*b)),
            Node::Compare(comparison, a, b) => Node::Compare(*comparison, to(*a), to(*b)),
            Node::Select(a, b, c) => Node::Select(to(*a), to(*b), to(*c)),
            Node::Load(tensor, indices) => {
                Node::Load(*tensor, indices.iter().map(|it| to(*it)).collect())
            }
        }
    }

    /// Returns the node's type from those of its operands; an error says which types do not go
    /// together.
    pub(crate) fn ty(
        &self,
        tensors: &[TensorSpec],
        of: impl Fn(Id) -> Type,
    ) -> Result<Type, String> {
        use Type::{Bool, F32, I32};
        let wrong = |name: &str, given: &[Type]| {
            let given: Vec<String> = given.iter().map(Type::to_string).collect();
            Err(format!("there is no {name} of {}", given.join(" and ")))
        };
        match self {
            Node::Symbol(symbol) => Ok(symbol.ty()),
            Node::Constant(constant) => Ok(constant.ty()),
            Node::Unary(operation, a) => match (operation, of(*a)) {
                (Unary::Negate | Unary::Absolute, ty @ (F32 | I32)) => Ok(ty),
                (Unary::Not, ty @ (I32 | Bool)) => Ok(ty),
                (Unary::Tanh | Unary::Exp2 | Unary::Log2, F32) => Ok(F32),
                (Unary::ToFloat, I32) => Ok(F32),
                (Unary::ToInteger, F32) => Ok(I32),
                (_, a) => wrong(operation.name(), &[a]),
            },
            Node::Binary(operation, a, b) => {
                use Binary::{And, Or, Remainder, ShiftLeft, ShiftRight, Xor};
                match (operation, of(*a), of(*b)) {
                    (And | Or | Xor, Bool, Bool) => Ok(Bool),
                    (_, I32, I32) => Ok(I32),
                    (And | Or | Xor | ShiftLeft | ShiftRight | Remainder, a, b) => {
                        wrong(operation.name(), &[a, b])
                    }
                    (_, F32, F32) => Ok(F32),
                    (_, a, b) => wrong(operation.name(), &[a, b]),
                }
            }
            Node::Compare(comparison, a, b) => match (of(*a), of(*b)) {
                (F32, F32) | (I32, I32) => Ok(Bool),
                (a, b) => wrong(comparison.name(), &[a, b]),
            },
            Node::Select(a, b, c) => match (of(*a), of(*b), of(*c)) {
                (Bool, F32, F32) => Ok(F32),
                (Bool, I32, I32) => Ok(I32),
                (a, b, c) => wrong("select", &[a, b, c]),
            },
            Node::Load(tensor, indices) => {
                let spec = &tensors[*tensor as usize];
                if indices.len() != spec.rank {
                    let (name, rank, given) = (&spec.name, spec.rank, indices.len());
                    return Err(format!("tensor {name} takes {rank} indices, not {given}"));
                }
                match indices.iter().map(|it| of(*it)).find(|ty| *ty != I32) {
                    None => Ok(spec.stored.loads()),
                    Some(ty) => wrong("index", &[ty]),
                }
            }
        }
    }
}

/// Returns the types of nodes, which must be well typed.
pub(crate) fn types(tensors: &[TensorSpec], nodes: &[Node]) -> Vec<Type> {
    let mut types: Vec<Type> = Vec::new();
    for node in nodes {
        let ty = node.ty(tensors, |id| types[id as usize]);
        types.push(ty.expect("it was checked when it came to be"));
    }
    types
}

/// Returns the nodes that the roots depend on, without duplicates, in the order in which a text
/// names them; and the roots' new indices.
pub(super) fn canonical(nodes: &[Node], roots: &[Id]) -> (Vec<Node>, Vec<Id>) {
    let mut kept: Vec<Node> = Vec::new();
    let mut known: HashMap<Node, Id> = HashMap::new();
    let mut renamed: HashMap<Id, Id> = HashMap::new();
    // Iterative instead of recursive, since a function may be deep.
    let mut open: Vec<(Id, bool)> = roots.iter().rev().map(|root| (*root, false)).collect();
    while let Some((id, ready)) = open.pop() {
        if renamed.contains_key(&id) {
            continue;
        }
        let node = &nodes[id as usize];
        if !ready {
            open.push((id, true));
            open.extend(node.inputs().into_iter().rev().map(|input| (input, false)));
            continue;
        }
        let node = node.map(|input| renamed[&input]);
        let new = *known.entry(node).or_insert_with_key(|node| {
            kept.push(node.clone());
            kept.len() as Id - 1
        });
        renamed.insert(id, new);
    }
    (kept, roots.iter().map(|root| renamed[root]).collect())
}
