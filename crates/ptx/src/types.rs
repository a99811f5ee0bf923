//! The types that registers and tensors hold: register types, tensor elements, and the marker types
//! that make register handles typed in Rust.

/// The element of a tensor or of a shared-memory tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Element {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 half precision: 5 exponent bits, 10 of mantissa.
    F16,
    /// bfloat16: the upper half of an `f32`.
    BF16,
    /// 8-bit float, 4 exponent bits and 3 of mantissa, no infinities.
    E4M3,
    /// 8-bit float, 5 exponent bits and 2 of mantissa.
    E5M2,
    /// Signed 8-bit integer.
    Int8,
}

impl Element {
    /// Returns the size in bytes.
    pub const fn bytes(self) -> u32 {
        match self {
            Element::F32 => 4,
            Element::F16 | Element::BF16 => 2,
            Element::E4M3 | Element::E5M2 | Element::Int8 => 1,
        }
    }

    /// Returns the type of a register that holds elements of a matrix operand, packed to 32 bits.
    pub const fn packed(self) -> Type {
        match self {
            Element::F32 => Type::F32,
            Element::F16 => Type::F16x2,
            Element::BF16 => Type::BF16x2,
            Element::E4M3 | Element::E5M2 | Element::Int8 => Type::U32,
        }
    }

    /// Returns the name used on command lines and in kernel names.
    pub const fn name(self) -> &'static str {
        match self {
            Element::F32 => "f32",
            Element::F16 => "f16",
            Element::BF16 => "bf16",
            Element::E4M3 => "e4m3",
            Element::E5M2 => "e5m2",
            Element::Int8 => "int8",
        }
    }
}

impl std::fmt::Display for Element {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The type of a register, and of the operation that works on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Type {
    /// One truth value.
    Pred,
    /// One half-precision float.
    F16,
    /// One bfloat16.
    BF16,
    /// Two `e4m3` floats in 16 bits.
    E4M3x2,
    /// Two `e5m2` floats in 16 bits.
    E5M2x2,
    /// A 32-bit unsigned integer, or 32 plain bits.
    U32,
    /// A 32-bit signed integer.
    S32,
    /// A single-precision float.
    F32,
    /// Two half-precision floats in 32 bits, the lower-indexed one low.
    F16x2,
    /// Two bfloat16 in 32 bits, the lower-indexed one low.
    BF16x2,
    /// A 64-bit unsigned integer, or 64 plain bits.
    U64,
    /// A 64-bit signed integer.
    S64,
}

impl Type {
    /// Every register type.
    pub const ALL: [Type; 12] = [
        Type::Pred,
        Type::F16,
        Type::BF16,
        Type::E4M3x2,
        Type::E5M2x2,
        Type::U32,
        Type::S32,
        Type::F32,
        Type::F16x2,
        Type::BF16x2,
        Type::U64,
        Type::S64,
    ];

    /// Returns the width in bits; a predicate counts as one.
    pub const fn bits(self) -> u32 {
        match self {
            Type::Pred => 1,
            Type::F16 | Type::BF16 | Type::E4M3x2 | Type::E5M2x2 => 16,
            Type::U32 | Type::S32 | Type::F32 | Type::F16x2 | Type::BF16x2 => 32,
            Type::U64 | Type::S64 => 64,
        }
    }

    /// Returns whether this is an integer type.
    pub const fn is_integer(self) -> bool {
        matches!(self, Type::U32 | Type::S32 | Type::U64 | Type::S64)
    }

    /// Returns whether this is two 16-bit floats side by side.
    pub const fn is_packed_half(self) -> bool {
        matches!(self, Type::F16x2 | Type::BF16x2)
    }

    /// Returns whether this is two 8-bit floats side by side.
    pub const fn is_packed_fp8(self) -> bool {
        matches!(self, Type::E4M3x2 | Type::E5M2x2)
    }

    /// Returns whether an instruction may take a constant of this type as an operand.
    pub const fn has_immediates(self) -> bool {
        self.is_integer() || matches!(self, Type::F32)
    }
}

/// A marker for the type of a [`Reg`](crate::Reg) or a [`Value`](crate::Value).
pub trait Scalar: Copy + 'static {
    /// The type a register of this marker has in the program.
    const TYPE: Type;
}

/// Scalars with addition, subtraction, multiplication, division and an order.
pub trait Number: Scalar {}

/// Scalars with remainder and shifts as well: the integers.
pub trait Integer: Number {}

/// Two elements side by side in one 32-bit register.
pub trait PackedHalf: Scalar {
    /// The element each half holds.
    const ELEMENT: Element;
}

/// A marker for addresses, on which the only arithmetic is adding a displacement.
pub trait AddressOf: Scalar {
    /// The state space that the address points into.
    const SPACE: crate::Space;
    /// The integer type of a displacement.
    type Displacement: Integer;
}

macro_rules! scalars {
    ($($(#[$doc:meta])* $name:ident: $ty:ident $(, $class:ident)*;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub enum $name {}
        impl Scalar for $name {
            const TYPE: Type = Type::$ty;
        }
        $(impl $class for $name {})*
    )*};
}

scalars! {
    /// Marks a predicate.
    Pred: Pred;
    /// Marks one half-precision float.
    F16: F16;
    /// Marks one bfloat16.
    BF16: BF16;
    /// Marks two `e4m3` floats.
    E4M3x2: E4M3x2;
    /// Marks two `e5m2` floats.
    E5M2x2: E5M2x2;
    /// Marks an unsigned 32-bit integer.
    U32: U32, Number, Integer;
    /// Marks a signed 32-bit integer.
    S32: S32, Number, Integer;
    /// Marks a single-precision float.
    F32: F32, Number;
    /// Marks two half-precision floats.
    F16x2: F16x2;
    /// Marks two bfloat16.
    BF16x2: BF16x2;
    /// Marks an unsigned 64-bit integer.
    U64: U64, Number, Integer;
    /// Marks a signed 64-bit integer.
    S64: S64, Number, Integer;
    /// Marks an address in this block's shared memory.
    SharedAddress: U32;
    /// Marks an address in the shared memory of any block of the cluster.
    ClusterAddress: U32;
    /// Marks an address in global memory.
    GlobalAddress: U64;
}

impl PackedHalf for F16x2 {
    const ELEMENT: Element = Element::F16;
}

impl PackedHalf for BF16x2 {
    const ELEMENT: Element = Element::BF16;
}

/// Two 8-bit elements side by side in one 16-bit register.
pub trait PackedFp8: Scalar {
    /// The element each half holds.
    const ELEMENT: Element;
}

impl PackedFp8 for E4M3x2 {
    const ELEMENT: Element = Element::E4M3;
}

impl PackedFp8 for E5M2x2 {
    const ELEMENT: Element = Element::E5M2;
}

impl AddressOf for SharedAddress {
    const SPACE: crate::Space = crate::Space::Shared;
    type Displacement = U32;
}

impl AddressOf for ClusterAddress {
    const SPACE: crate::Space = crate::Space::Cluster;
    type Displacement = U32;
}

impl AddressOf for GlobalAddress {
    const SPACE: crate::Space = crate::Space::Global;
    type Displacement = U64;
}
