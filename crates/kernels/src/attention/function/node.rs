//! The language of functions: types, operations, and which go together.

use std::collections::HashMap;
use std::fmt;

/// What a function is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Whether a query sees a key.
    Mask,
    /// What a score becomes.
    Score,
}

impl Kind {
    /// Both.
    pub const ALL: [Kind; 2] = [Kind::Mask, Kind::Score];

    /// Its name in texts.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Mask => "mask",
            Kind::Score => "score",
        }
    }

    /// What such a function gives.
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
    /// A single-precision number.
    F32,
    /// A signed number of 32 bits.
    I32,
    /// A truth value.
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
    /// By which it is passed.
    pub name: String,
    /// What it is made of.
    pub stored: Stored,
    /// How many indices it takes: 1 to [`TensorSpec::MOST_DIMENSIONS`].
    pub rank: usize,
}

impl TensorSpec {
    /// The most indices that a tensor takes.
    pub const MOST_DIMENSIONS: usize = 4;
    /// The most tensors that a function loads from.
    pub const MOST_TENSORS: usize = 8;
}

/// The elements of a tensor that is loaded from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stored {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// The upper half of single precision.
    BF16,
    /// Signed numbers of 32 bits.
    I32,
    /// Signed numbers of 64 bits, of which the lower 32 count.
    I64,
    /// Unsigned numbers of 8 bits.
    U8,
    /// Truth values of a byte each: false is zero.
    Bool,
}

impl Stored {
    /// Each of them.
    pub const ALL: [Stored; 7] = [
        Stored::F32,
        Stored::F16,
        Stored::BF16,
        Stored::I32,
        Stored::I64,
        Stored::U8,
        Stored::Bool,
    ];

    /// Its name in texts.
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

    /// The size of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Stored::U8 | Stored::Bool => 1,
            Stored::F16 | Stored::BF16 => 2,
            Stored::F32 | Stored::I32 => 4,
            Stored::I64 => 8,
        }
    }

    /// What a load of it gives.
    pub const fn loads(self) -> Type {
        match self {
            Stored::F32 | Stored::F16 | Stored::BF16 => Type::F32,
            Stored::I32 | Stored::I64 | Stored::U8 => Type::I32,
            Stored::Bool => Type::Bool,
        }
    }
}

/// The index of a node.
pub(crate) type Id = u32;

/// An expression; those that it is made of by their index.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Node {
    Symbol(Symbol),
    Constant(Constant),
    Unary(Unary, Id),
    Binary(Binary, Id, Id),
    Compare(Comparison, Id, Id),
    /// The second where the first holds, else the third.
    Select(Id, Id, Id),
    /// An element of a tensor, by its number, and the indices.
    Load(u32, Vec<Id>),
}

/// Enumerations whose members have names in texts.
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
    /// What is given.
    enum Symbol {
        Batch = "batch",
        Head = "head",
        /// The query's place in its sequence.
        Query = "query",
        /// The key's place in its sequence.
        Key = "key",
        QueryLength = "query_length",
        KeyLength = "key_length",
        /// The score so far; of score functions alone.
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

/// A constant. Floats by their bits, so that nodes can be compared.
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
    /// Those that it is made of.
    pub(crate) fn inputs(&self) -> Vec<Id> {
        match self {
            Node::Symbol(_) | Node::Constant(_) => Vec::new(),
            Node::Unary(_, a) => vec![*a],
            Node::Binary(_, a, b) | Node::Compare(_, a, b) => vec![*a, *b],
            Node::Select(a, b, c) => vec![*a, *b, *c],
            Node::Load(_, indices) => indices.clone(),
        }
    }

    /// The same over others.
    fn map(&self, to: impl Fn(Id) -> Id) -> Node {
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

    /// Its type, from those of what it is made of; an error says what does not go together.
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

/// The types of nodes that go together.
pub(crate) fn types(tensors: &[TensorSpec], nodes: &[Node]) -> Vec<Type> {
    let mut types: Vec<Type> = Vec::new();
    for node in nodes {
        let ty = node.ty(tensors, |id| types[id as usize]);
        types.push(ty.expect("it was checked when it came to be"));
    }
    types
}

/// The nodes that the root is made of, each once, in the order in which a text names them.
pub(super) fn canonical(nodes: &[Node], root: Id) -> (Vec<Node>, Id) {
    let mut kept: Vec<Node> = Vec::new();
    let mut known: HashMap<Node, Id> = HashMap::new();
    let mut renamed: HashMap<Id, Id> = HashMap::new();
    // Not by recursion: a function may be deep.
    let mut open = vec![(root, false)];
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
    (kept, renamed[&root])
}
