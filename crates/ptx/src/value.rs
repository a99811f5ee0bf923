//! Values: expressions over registers and constants.
//!
//! Index arithmetic written as one instruction per line is hard to read, so register handles have
//! operators: `row * 64 + lane / 4` is a [`Value`], a small expression tree that the builder turns
//! into instructions where it is used. No instruction is emitted before that, and a value used
//! twice is computed twice, so name it with [`Builder::eval`](crate::Builder::eval) first.

use std::marker::PhantomData;
use std::ops::{Add, BitAnd, BitOr, BitXor, Div, Mul, Neg, Not, Rem, Shl, Shr, Sub};

use crate::{
    AddressOf, BinaryOperation, ClusterAddress, Comparison, F32, GlobalAddress, Integer, Number,
    Operand, Pred, Reg, S32, S64, Scalar, SharedAddress, Type, U32, U64, UnaryOperation,
};

/// An expression of type `T`.
#[must_use = "a value is only computed where it is used"]
pub struct Value<T> {
    pub(crate) node: Node,
    /// The nesting depth of operators, bounded by [`DEEPEST`].
    depth: u32,
    marker: PhantomData<fn() -> T>,
}

/// The largest allowed nesting depth: the builder recurses once for each level of operators.
const DEEPEST: u32 = 256;

/// The expression tree behind a [`Value`].
#[derive(Clone, Debug)]
pub(crate) enum Node {
    Operand(Operand),
    Unary(UnaryOperation, Type, Box<Node>),
    Binary(BinaryOperation, Type, Box<Node>, Box<Node>),
    Compare(Comparison, Type, Box<Node>, Box<Node>),
    Select(Type, Box<Node>, Box<Node>, Box<Node>),
    /// The same bits reinterpreted as another type.
    Reinterpret(Type, Box<Node>),
    /// A conversion of the number to another type: source type, destination type, operand.
    Convert(Type, Type, Box<Node>),
    /// An invalid expression with the reason, which the builder reports as a misuse where the value
    /// is used.
    Misuse(String),
}

impl<T> Clone for Value<T> {
    fn clone(&self) -> Self {
        Value { node: self.node.clone(), depth: self.depth, marker: PhantomData }
    }
}

impl<T> std::fmt::Debug for Value<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.node.fmt(f)
    }
}

impl<T> Value<T> {
    pub(crate) fn new(node: Node) -> Self {
        Value { node, depth: 0, marker: PhantomData }
    }

    /// Creates an operator node whose deepest operand has this depth.
    fn over(depth: u32, node: Node) -> Self {
        if depth == DEEPEST {
            let text = format!("more than {DEEPEST} operators inside one another: eval some");
            return Value::new(Node::Misuse(text));
        }
        Value { node, depth: depth + 1, marker: PhantomData }
    }
}

impl<T> From<Reg<T>> for Value<T> {
    fn from(reg: Reg<T>) -> Self {
        Value::new(Node::Operand(reg.into()))
    }
}

impl<T> From<&Reg<T>> for Value<T> {
    fn from(reg: &Reg<T>) -> Self {
        (*reg).into()
    }
}

macro_rules! constants {
    ($($rust:ty => $marker:ident as $bits:ty;)*) => {$(
        impl From<$rust> for Value<$marker> {
            fn from(constant: $rust) -> Self {
                Value::new(match <$bits>::try_from(constant) {
                    Ok(bits) => Node::Operand(Operand::Immediate(bits as u64)),
                    Err(_) => {
                        let marker = stringify!($marker);
                        Node::Misuse(format!("the constant {constant} does not fit {marker}"))
                    }
                })
            }
        }
    )*};
}

constants! {
    i32 => U32 as u32;
    u32 => U32 as u32;
    usize => U32 as u32;
    i32 => U64 as u64;
    u32 => U64 as u64;
    u64 => U64 as u64;
    usize => U64 as u64;
}

impl From<i32> for Value<S32> {
    fn from(constant: i32) -> Self {
        Value::new(Node::Operand(Operand::Immediate(constant as u32 as u64)))
    }
}

impl From<i64> for Value<S64> {
    fn from(constant: i64) -> Self {
        Value::new(Node::Operand(Operand::Immediate(constant as u64)))
    }
}

impl From<bool> for Value<Pred> {
    /// Creates a comparison of two constants, which the assembler folds: predicates have no
    /// immediates.
    fn from(constant: bool) -> Self {
        let comparison = if constant { Comparison::Equal } else { Comparison::NotEqual };
        let zero = || Box::new(Node::Operand(Operand::u32(0)));
        Value::new(Node::Compare(comparison, Type::U32, zero(), zero()))
    }
}

impl From<f32> for Value<F32> {
    fn from(constant: f32) -> Self {
        Value::new(Node::Operand(Operand::f32(constant)))
    }
}

/// Scalars `T` to which something can be added to give a `T`.
pub trait Displace: Scalar {
    /// The type of the right-hand side.
    type By: Scalar;
}

macro_rules! displace {
    ($($t:ident by $by:ident),*) => {$(impl Displace for $t { type By = $by; })*};
}

displace! {
    U32 by U32, S32 by S32, U64 by U64, S64 by S64, F32 by F32,
    SharedAddress by U32, ClusterAddress by U32, GlobalAddress by U64
}

fn binary<T: Scalar, B>(operation: BinaryOperation, a: Value<T>, b: Value<B>) -> Value<T> {
    let depth = a.depth.max(b.depth);
    Value::over(depth, Node::Binary(operation, T::TYPE, Box::new(a.node), Box::new(b.node)))
}

fn unary<T: Scalar>(operation: UnaryOperation, a: Value<T>) -> Value<T> {
    Value::over(a.depth, Node::Unary(operation, T::TYPE, Box::new(a.node)))
}

macro_rules! operators {
    ($($trait:ident $method:ident $operation:ident [$bound:ident] $right:ty;)*) => {$(
        impl<T: $bound, R: Into<Value<$right>>> $trait<R> for Value<T> {
            type Output = Value<T>;
            fn $method(self, right: R) -> Value<T> {
                binary(BinaryOperation::$operation, self, right.into())
            }
        }
        impl<T: $bound, R: Into<Value<$right>>> $trait<R> for Reg<T> {
            type Output = Value<T>;
            fn $method(self, right: R) -> Value<T> {
                Value::from(self).$method(right)
            }
        }
    )*};
}

operators! {
    Add add Add [Displace] T::By;
    Sub sub Subtract [Number] T;
    Mul mul Multiply [Number] T;
    Div div Divide [Number] T;
    Rem rem Remainder [Integer] T;
    BitXor bitxor Xor [Bitwise] T;
    BitAnd bitand And [Bitwise] T;
    BitOr bitor Or [Bitwise] T;
    Shl shl ShiftLeft [Integer] U32;
    Shr shr ShiftRight [Integer] U32;
}

/// Scalars with bitwise operators: integers, and predicates.
pub trait Bitwise: Scalar {}
impl Bitwise for U32 {}
impl Bitwise for S32 {}
impl Bitwise for U64 {}
impl Bitwise for S64 {}
impl Bitwise for Pred {}

impl<T: Bitwise> Not for Value<T> {
    type Output = Value<T>;
    fn not(self) -> Value<T> {
        unary(UnaryOperation::Not, self)
    }
}

impl<T: Bitwise> Not for Reg<T> {
    type Output = Value<T>;
    fn not(self) -> Value<T> {
        !Value::from(self)
    }
}

/// Scalars that have a negative.
pub trait Signed: Number {}
impl Signed for S32 {}
impl Signed for S64 {}
impl Signed for F32 {}

impl<T: Signed> Neg for Value<T> {
    type Output = Value<T>;
    fn neg(self) -> Value<T> {
        unary(UnaryOperation::Negate, self)
    }
}

impl<T: Signed> Neg for Reg<T> {
    type Output = Value<T>;
    fn neg(self) -> Value<T> {
        -Value::from(self)
    }
}

/// The operations on registers and values that have no Rust operator.
pub trait Expression<T: Scalar>: Into<Value<T>> + Sized {
    /// `self == other`.
    fn equals(self, other: impl Into<Value<T>>) -> Value<Pred> {
        compare(Comparison::Equal, self, other)
    }

    /// `self != other`.
    fn differs(self, other: impl Into<Value<T>>) -> Value<Pred> {
        compare(Comparison::NotEqual, self, other)
    }

    /// `self < other`.
    fn less(self, other: impl Into<Value<T>>) -> Value<Pred>
    where
        T: Number,
    {
        compare(Comparison::Less, self, other)
    }

    /// `self <= other`.
    fn at_most(self, other: impl Into<Value<T>>) -> Value<Pred>
    where
        T: Number,
    {
        compare(Comparison::LessOrEqual, self, other)
    }

    /// `self > other`.
    fn greater(self, other: impl Into<Value<T>>) -> Value<Pred>
    where
        T: Number,
    {
        compare(Comparison::Greater, self, other)
    }

    /// `self >= other`.
    fn at_least(self, other: impl Into<Value<T>>) -> Value<Pred>
    where
        T: Number,
    {
        compare(Comparison::GreaterOrEqual, self, other)
    }

    /// Returns the smaller of the two.
    fn minimum(self, other: impl Into<Value<T>>) -> Value<T>
    where
        T: Number,
    {
        binary(BinaryOperation::Minimum, self.into(), other.into())
    }

    /// Returns the larger of the two.
    fn maximum(self, other: impl Into<Value<T>>) -> Value<T>
    where
        T: Number,
    {
        binary(BinaryOperation::Maximum, self.into(), other.into())
    }

    /// Reinterprets the bits as another type of the same width.
    fn reinterpret<U: Scalar>(self) -> Value<U> {
        let Value { node, depth, .. } = self.into();
        Value::over(depth, Node::Reinterpret(U::TYPE, Box::new(node)))
    }

    /// Converts the number to another type, rounding or truncating it where necessary.
    fn convert<U: Scalar>(self) -> Value<U> {
        let Value { node, depth, .. } = self.into();
        Value::over(depth, Node::Convert(T::TYPE, U::TYPE, Box::new(node)))
    }
}

impl<T: Scalar> Expression<T> for Reg<T> {}
impl<T: Scalar> Expression<T> for Value<T> {}

/// Selection between two values by a predicate.
pub trait Select: Into<Value<Pred>> + Sized {
    /// Selects `a` where the predicate is true and `b` elsewhere.
    fn select<T: Scalar>(self, a: impl Into<Value<T>>, b: impl Into<Value<T>>) -> Value<T> {
        let (condition, a, b) = (self.into(), a.into(), b.into());
        let depth = condition.depth.max(a.depth).max(b.depth);
        let [condition, a, b] = [condition.node, a.node, b.node].map(Box::new);
        Value::over(depth, Node::Select(T::TYPE, condition, a, b))
    }
}

impl Select for Reg<Pred> {}
impl Select for Value<Pred> {}

fn compare<T: Scalar>(
    comparison: Comparison,
    a: impl Into<Value<T>>,
    b: impl Into<Value<T>>,
) -> Value<Pred> {
    let (a, b) = (a.into(), b.into());
    let depth = a.depth.max(b.depth);
    Value::over(depth, Node::Compare(comparison, T::TYPE, Box::new(a.node), Box::new(b.node)))
}

/// Splits constant displacements off an address, so that they become the
/// offset of the instruction instead of an addition.
pub(crate) fn peel_offset<A: AddressOf>(address: Value<A>) -> (Node, i32) {
    let mut node = address.node;
    let mut offset = 0i32;
    loop {
        match node {
            Node::Binary(BinaryOperation::Add, ty, left, right) => match *right {
                Node::Operand(Operand::Immediate(constant)) => {
                    match i32::try_from(constant).ok().and_then(|c| offset.checked_add(c)) {
                        Some(sum) => {
                            offset = sum;
                            node = *left;
                        }
                        None => {
                            let right = Box::new(Node::Operand(Operand::Immediate(constant)));
                            return (Node::Binary(BinaryOperation::Add, ty, left, right), offset);
                        }
                    }
                }
                right => {
                    return (Node::Binary(BinaryOperation::Add, ty, left, Box::new(right)), offset);
                }
            },
            other => return (other, offset),
        }
    }
}
