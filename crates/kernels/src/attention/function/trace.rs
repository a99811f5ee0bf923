//! Tracing: a closure is called with values that record how they were made, as nodes.

use std::cell::RefCell;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::ops::{Add, BitAnd, BitOr, BitXor, Div, Mul, Neg, Not, Rem, Shl, Shr, Sub};

use super::node::{
    Binary, Comparison, Constant, Id, Kind, Node, Stored, Symbol, TensorSpec, Unary,
};
use super::{Function, text};

/// The nodes and tensors that have been traced so far.
#[derive(Default)]
struct Trace {
    nodes: RefCell<Vec<Node>>,
    known: RefCell<HashMap<Node, Id>>,
    tensors: RefCell<Vec<TensorSpec>>,
}

impl Trace {
    fn push(&self, node: Node) -> Id {
        *self.known.borrow_mut().entry(node).or_insert_with_key(|node| {
            let mut nodes = self.nodes.borrow_mut();
            nodes.push(node.clone());
            nodes.len() as Id - 1
        })
    }
}

/// A value of a function that is being traced: of type `f32`, `i32` or `bool`.
///
/// Operators and methods make further values. Where one of two operands is a constant, it can be a
/// Rust number.
pub struct Traced<'t, T> {
    trace: &'t Trace,
    id: Id,
    marker: PhantomData<T>,
}

impl<T> Clone for Traced<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Traced<'_, T> {}

impl<T> std::fmt::Debug for Traced<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (nodes, tensors) = (self.trace.nodes.borrow(), self.trace.tensors.borrow());
        f.write_str(&text::expression(&tensors, &nodes, self.id))
    }
}

/// An operand beside a [`Traced`] value: another such value, or a constant.
pub trait TracedOperand<'t, T> {
    /// Returns the operand as a value of the same trace as `beside`.
    fn in_trace(self, beside: Traced<'t, T>) -> Traced<'t, T>;
}

impl<'t, T> TracedOperand<'t, T> for Traced<'t, T> {
    fn in_trace(self, _: Traced<'t, T>) -> Traced<'t, T> {
        self
    }
}

macro_rules! constants {
    ($($ty:ident => |$value:ident| $constant:expr;)*) => {$(
        impl<'t> TracedOperand<'t, $ty> for $ty {
            fn in_trace(self, beside: Traced<'t, $ty>) -> Traced<'t, $ty> {
                let $value = self;
                beside.make(Node::Constant($constant))
            }
        }
    )*};
}

constants! {
    f32 => |value| Constant::F32(value.to_bits());
    i32 => |value| Constant::I32(value);
    bool => |value| Constant::Bool(value);
}

impl<'t, T> Traced<'t, T> {
    fn make<U>(self, node: Node) -> Traced<'t, U> {
        Traced { trace: self.trace, id: self.trace.push(node), marker: PhantomData }
    }

    fn unary<U>(self, operation: Unary) -> Traced<'t, U> {
        self.make(Node::Unary(operation, self.id))
    }

    fn binary(self, operation: Binary, other: impl TracedOperand<'t, T>) -> Self {
        self.make(Node::Binary(operation, self.id, other.in_trace(self).id))
    }

    fn compare(self, comparison: Comparison, other: impl TracedOperand<'t, T>) -> Traced<'t, bool> {
        self.make(Node::Compare(comparison, self.id, other.in_trace(self).id))
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident $operation:ident [$($ty:ident)*];)*) => {$($(
        impl<'t, R: TracedOperand<'t, $ty>> $trait<R> for Traced<'t, $ty> {
            type Output = Traced<'t, $ty>;
            fn $method(self, other: R) -> Traced<'t, $ty> {
                self.binary(Binary::$operation, other)
            }
        }

        impl<'t> $trait<Traced<'t, $ty>> for $ty {
            type Output = Traced<'t, $ty>;
            fn $method(self, other: Traced<'t, $ty>) -> Traced<'t, $ty> {
                self.in_trace(other).$method(other)
            }
        }
    )*)*};
}

operators! {
    Add add Add [f32 i32];
    Sub sub Subtract [f32 i32];
    Mul mul Multiply [f32 i32];
    Div div Divide [f32 i32];
    Rem rem Remainder [i32];
    BitAnd bitand And [i32 bool];
    BitOr bitor Or [i32 bool];
    BitXor bitxor Xor [i32 bool];
    Shl shl ShiftLeft [i32];
    Shr shr ShiftRight [i32];
}

macro_rules! numbers {
    ($($ty:ident)*) => {$(
        impl<'t> Traced<'t, $ty> {
            /// `self == other`.
            pub fn eq(self, other: impl TracedOperand<'t, $ty>) -> Traced<'t, bool> {
                self.compare(Comparison::Equal, other)
            }

            /// `self != other`.
            pub fn ne(self, other: impl TracedOperand<'t, $ty>) -> Traced<'t, bool> {
                self.compare(Comparison::NotEqual, other)
            }

            /// `self < other`.
            pub fn lt(self, other: impl TracedOperand<'t, $ty>) -> Traced<'t, bool> {
                self.compare(Comparison::Less, other)
            }

            /// `self <= other`.
            pub fn le(self, other: impl TracedOperand<'t, $ty>) -> Traced<'t, bool> {
                self.compare(Comparison::AtMost, other)
            }

            /// `self > other`.
            pub fn gt(self, other: impl TracedOperand<'t, $ty>) -> Traced<'t, bool> {
                self.compare(Comparison::Greater, other)
            }

            /// `self >= other`.
            pub fn ge(self, other: impl TracedOperand<'t, $ty>) -> Traced<'t, bool> {
                self.compare(Comparison::AtLeast, other)
            }

            /// The smaller of the two.
            pub fn min(self, other: impl TracedOperand<'t, $ty>) -> Self {
                self.binary(Binary::Minimum, other)
            }

            /// The larger of the two.
            pub fn max(self, other: impl TracedOperand<'t, $ty>) -> Self {
                self.binary(Binary::Maximum, other)
            }

            /// The absolute value.
            pub fn abs(self) -> Self {
                self.unary(Unary::Absolute)
            }
        }

        impl<'t> Neg for Traced<'t, $ty> {
            type Output = Self;
            fn neg(self) -> Self {
                self.unary(Unary::Negate)
            }
        }
    )*};
}

numbers! { f32 i32 }

impl Not for Traced<'_, bool> {
    type Output = Self;
    fn not(self) -> Self {
        self.unary(Unary::Not)
    }
}

impl Not for Traced<'_, i32> {
    type Output = Self;
    fn not(self) -> Self {
        self.unary(Unary::Not)
    }
}

impl<'t> Traced<'t, f32> {
    /// The hyperbolic tangent.
    pub fn tanh(self) -> Self {
        self.unary(Unary::Tanh)
    }

    /// Two to the power of this value.
    pub fn exp2(self) -> Self {
        self.unary(Unary::Exp2)
    }

    /// The logarithm to base two.
    pub fn log2(self) -> Self {
        self.unary(Unary::Log2)
    }

    /// The exponential.
    pub fn exp(self) -> Self {
        (self * std::f32::consts::LOG2_E).exp2()
    }

    /// The natural logarithm.
    pub fn ln(self) -> Self {
        self.log2() * std::f32::consts::LN_2
    }

    /// The integer part, rounded towards zero.
    pub fn to_i32(self) -> Traced<'t, i32> {
        self.unary(Unary::ToInteger)
    }
}

impl<'t> Traced<'t, i32> {
    /// The nearest float.
    pub fn to_f32(self) -> Traced<'t, f32> {
        self.unary(Unary::ToFloat)
    }
}

impl<'t> Traced<'t, bool> {
    /// `yes` where the condition holds, otherwise `no`.
    pub fn select<T>(self, yes: Traced<'t, T>, no: impl TracedOperand<'t, T>) -> Traced<'t, T> {
        self.make(Node::Select(self.id, yes.id, no.in_trace(yes).id))
    }

    /// 1 where the condition holds, otherwise 0.
    pub fn to_i32(self) -> Traced<'t, i32> {
        let one: Traced<'t, i32> = self.make(Node::Constant(Constant::I32(1)));
        self.select(one, 0)
    }
}

/// The place of a score: sequence, head, query and key, each counted from zero.
#[derive(Clone, Copy)]
pub struct At<'t>(&'t Trace);

impl std::fmt::Debug for At<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("At")
    }
}

impl<'t> At<'t> {
    fn node<T>(self, node: Node) -> Traced<'t, T> {
        Traced { trace: self.0, id: self.0.push(node), marker: PhantomData }
    }

    fn symbol(self, symbol: Symbol) -> Traced<'t, i32> {
        self.node(Node::Symbol(symbol))
    }

    /// The index of the sequence.
    pub fn batch(self) -> Traced<'t, i32> {
        self.symbol(Symbol::Batch)
    }

    /// The index of the query head.
    pub fn head(self) -> Traced<'t, i32> {
        self.symbol(Symbol::Head)
    }

    /// The index of the query in its sequence.
    pub fn query(self) -> Traced<'t, i32> {
        self.symbol(Symbol::Query)
    }

    /// The index of the key in its sequence.
    pub fn key(self) -> Traced<'t, i32> {
        self.symbol(Symbol::Key)
    }

    /// The number of queries of the sequence.
    pub fn query_length(self) -> Traced<'t, i32> {
        self.symbol(Symbol::QueryLength)
    }

    /// The number of keys of the sequence.
    pub fn key_length(self) -> Traced<'t, i32> {
        self.symbol(Symbol::KeyLength)
    }

    /// The query's position among the keys, the last query at the last key: what masks by name
    /// refer to. It equals [`query`](At::query) where there are as many queries as keys.
    pub fn position(self) -> Traced<'t, i32> {
        self.query() + (self.key_length() - self.query_length())
    }

    /// A float constant, for expressions in which no operand is a traced value.
    pub fn float(self, value: f32) -> Traced<'t, f32> {
        self.node(Node::Constant(Constant::F32(value.to_bits())))
    }

    /// An integer constant, likewise.
    pub fn integer(self, value: i32) -> Traced<'t, i32> {
        self.node(Node::Constant(Constant::I32(value)))
    }

    /// A boolean constant, likewise.
    pub fn boolean(self, value: bool) -> Traced<'t, bool> {
        self.node(Node::Constant(Constant::Bool(value)))
    }

    /// A tensor of floats that the caller passes by this name: `f32`, unless
    /// [`stored`](CapturedTensor::stored) says otherwise.
    pub fn floats(self, name: &str) -> CapturedTensor<'t, f32> {
        self.tensor(name, Stored::F32)
    }

    /// A tensor of integers that the caller passes by this name: `i32`, unless
    /// [`stored`](CapturedTensor::stored) says otherwise.
    pub fn integers(self, name: &str) -> CapturedTensor<'t, i32> {
        self.tensor(name, Stored::I32)
    }

    /// A tensor of booleans, a byte each, that the caller passes by this name.
    pub fn truths(self, name: &str) -> CapturedTensor<'t, bool> {
        self.tensor(name, Stored::Bool)
    }

    fn tensor<T>(self, name: &str, stored: Stored) -> CapturedTensor<'t, T> {
        CapturedTensor { at: self, name: name.to_owned(), stored, marker: PhantomData }
    }
}

/// A tensor that a function loads from.
#[derive(Clone, Debug)]
pub struct CapturedTensor<'t, T> {
    at: At<'t>,
    name: String,
    stored: Stored,
    marker: PhantomData<T>,
}

impl<'t> CapturedTensor<'t, f32> {
    /// Returns the same tensor with another element type.
    ///
    /// # Panics
    ///
    /// If `stored` is not a float type.
    #[track_caller]
    pub fn stored(self, stored: Stored) -> Self {
        assert_eq!(stored.loads(), super::Type::F32, "{} are no floats", stored.name());
        CapturedTensor { stored, ..self }
    }
}

impl<'t> CapturedTensor<'t, i32> {
    /// Returns the same tensor with another element type.
    ///
    /// # Panics
    ///
    /// If `stored` is not an integer type.
    #[track_caller]
    pub fn stored(self, stored: Stored) -> Self {
        assert_eq!(stored.loads(), super::Type::I32, "{} are no integers", stored.name());
        CapturedTensor { stored, ..self }
    }
}

impl<'t, T> CapturedTensor<'t, T> {
    /// Loads an element; zero where an index is outside of the tensor. The tensor has as many
    /// dimensions as there are indices, the same in every load.
    ///
    /// # Panics
    ///
    /// If a tensor of this name was loaded with another element type or number of dimensions, if
    /// its name is not a word, or if there are more than four indices or eight tensors. The author
    /// of the function sees it when it is first traced.
    #[track_caller]
    pub fn load<const RANK: usize>(&self, indices: [Traced<'t, i32>; RANK]) -> Traced<'t, T> {
        let spec = TensorSpec { name: self.name.clone(), stored: self.stored, rank: RANK };
        let declared = declare(&mut self.at.0.tensors.borrow_mut(), spec);
        let tensor = declared.unwrap_or_else(|error| panic!("{error}"));
        self.at.node(Node::Load(tensor, indices.iter().map(|index| index.id).collect()))
    }
}

/// Returns the number of a tensor in the list, to which it is added unless it is already there.
pub(super) fn declare(tensors: &mut Vec<TensorSpec>, spec: TensorSpec) -> Result<u32, String> {
    let TensorSpec { name, rank, .. } = &spec;
    if !text::is_word(name) {
        return Err(format!("`{name}` is no name of a tensor"));
    }
    if !(1..=TensorSpec::MOST_DIMENSIONS).contains(rank) {
        return Err(format!("tensor {name} has {rank} dimensions, and may have 1 to 4"));
    }
    match tensors.iter().position(|it| it.name == *name) {
        Some(index) if tensors[index] == spec => Ok(index as u32),
        Some(_) => Err(format!("there are two different tensors {name}")),
        None if tensors.len() == TensorSpec::MOST_TENSORS => {
            Err("a function loads from eight tensors at most".to_owned())
        }
        None => {
            tensors.push(spec);
            Ok(tensors.len() as u32 - 1)
        }
    }
}

impl Function {
    /// Traces a mask: whether a query sees a key.
    ///
    /// # Panics
    ///
    /// If the closure panics, or if the name is not a word of letters, digits, `_`, `-` and `.`.
    #[track_caller]
    pub fn mask(name: &str, seen: impl for<'t> FnOnce(At<'t>) -> Traced<'t, bool>) -> Self {
        Function::traced(Kind::Mask, name, |at| seen(at).id)
    }

    /// Traces a score function: what a score becomes. The score is given after scale, cap and
    /// ALiBi, and the result is what the softmax takes the exponential of.
    ///
    /// # Panics
    ///
    /// As [`Function::mask`].
    #[track_caller]
    pub fn score(
        name: &str,
        score: impl for<'t> FnOnce(Traced<'t, f32>, At<'t>) -> Traced<'t, f32>,
    ) -> Self {
        Function::traced(Kind::Score, name, |at| score(at.node(Node::Symbol(Symbol::Score)), at).id)
    }

    #[track_caller]
    fn traced(kind: Kind, name: &str, body: impl for<'t> FnOnce(At<'t>) -> Id) -> Self {
        assert!(text::is_word(name), "`{name}` is no name of a function");
        let trace = Trace::default();
        let root = body(At(&trace));
        let (nodes, tensors) = (trace.nodes.take(), trace.tensors.take());
        Function::intern(kind, name.to_owned(), tensors, &nodes, root)
    }
}
