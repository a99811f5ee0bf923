//! Arithmetic without a Rust operator: fused, packed and transcendental operations, conversions,
//! and exchanges between the lanes of a warp.

use super::Builder;
use crate::{
    BF16, BF16x2, BinaryOperation, E4M3x2, E5M2x2, Element, F16, F16x2, F32, Instruction, Operand,
    PackedHalf, Pred, Reg, S32, Scalar, ShuffleMode, Type, U32, U64, UnaryOperation, Value,
    VoteMode,
};

/// Scalars with a fused multiply-add.
pub trait Fused: Scalar {}
impl Fused for F32 {}
impl Fused for F16x2 {}
impl Fused for BF16x2 {}
impl Fused for U32 {}
impl Fused for S32 {}
impl Fused for U64 {}

/// Packed pair types into which two `f32` can be rounded.
pub trait Pair: Scalar {}
impl Pair for F16x2 {}
impl Pair for BF16x2 {}
impl Pair for E4M3x2 {}
impl Pair for E5M2x2 {}

/// Scalars made of two halves that are scalars too.
pub trait SplitHalves: Scalar {
    /// The type of each half.
    type Half: Scalar;
}
impl SplitHalves for U64 {
    type Half = U32;
}
impl SplitHalves for F16x2 {
    type Half = F16;
}
impl SplitHalves for BF16x2 {
    type Half = BF16;
}

impl Builder {
    #[track_caller]
    fn unary<T: Scalar>(&mut self, operation: UnaryOperation, a: impl Into<Value<T>>) -> Reg<T> {
        let a = self.operand(a);
        let dst = self.register::<T>();
        self.push(Instruction::Unary { operation, ty: T::TYPE, dst: dst.register, a });
        dst
    }

    #[track_caller]
    fn both_halves<T: PackedHalf>(
        &mut self,
        operation: BinaryOperation,
        a: Reg<T>,
        b: Reg<T>,
    ) -> Reg<T> {
        let dst = self.register::<T>();
        let (a, b) = (a.into(), b.into());
        self.push(Instruction::Binary { operation, ty: T::TYPE, dst: dst.register, a, b });
        dst
    }

    /// Computes `a * b + c`, rounded once.
    #[track_caller]
    pub fn fma<T: Fused>(
        &mut self,
        a: impl Into<Value<T>>,
        b: impl Into<Value<T>>,
        c: impl Into<Value<T>>,
    ) -> Reg<T> {
        let (a, b, c) = (self.operand(a), self.operand(b), self.operand(c));
        let dst = self.register::<T>();
        self.push(Instruction::MultiplyAdd { ty: T::TYPE, dst: dst.register, a, b, c });
        dst
    }

    /// Computes the upper 32 bits of the product of two 32-bit numbers.
    #[track_caller]
    pub fn multiply_high(
        &mut self,
        a: impl Into<Value<U32>>,
        b: impl Into<Value<U32>>,
    ) -> Reg<U32> {
        let (a, b) = (self.operand(a), self.operand(b));
        let dst = self.register::<U32>();
        let operation = BinaryOperation::MultiplyHigh;
        self.push(Instruction::Binary { operation, ty: Type::U32, dst: dst.register, a, b });
        dst
    }

    /// Computes the 64-bit product of two 32-bit numbers.
    #[track_caller]
    pub fn multiply_wide(
        &mut self,
        a: impl Into<Value<U32>>,
        b: impl Into<Value<U32>>,
    ) -> Reg<U64> {
        let (a, b) = (self.operand(a), self.operand(b));
        let dst = self.register::<U64>();
        self.push(Instruction::MultiplyWide { ty: Type::U32, dst: dst.register, a, b });
        dst
    }

    /// Counts the bits that are set.
    #[track_caller]
    pub fn population_count(&mut self, a: impl Into<Value<U32>>) -> Reg<U32> {
        self.unary(UnaryOperation::PopulationCount, a)
    }

    /// Splits a register into its lower and its upper half.
    #[track_caller]
    pub fn split<T: SplitHalves>(&mut self, whole: Reg<T>) -> [Reg<T::Half>; 2] {
        let (low, high) = (self.register::<T::Half>(), self.register::<T::Half>());
        self.push(Instruction::Split {
            low: low.register,
            high: high.register,
            src: whole.register,
        });
        [low, high]
    }

    /// Joins two halves, the lower one first, into one register.
    #[track_caller]
    pub fn join<T: SplitHalves>(&mut self, [low, high]: [Reg<T::Half>; 2]) -> Reg<T> {
        let whole = self.register::<T>();
        let (low, high) = (low.into(), high.into());
        self.push(Instruction::Join { dst: whole.register, low, high });
        whole
    }

    /// Picks four of the eight bytes of `a` (0 to 3) and `b` (4 to 7), each by one nibble of the
    /// selector, the lowest first.
    #[track_caller]
    pub fn permute_bytes(
        &mut self,
        a: Reg<U32>,
        b: Reg<U32>,
        selector: impl Into<Value<U32>>,
    ) -> Reg<U32> {
        let selector = self.operand(selector);
        let dst = self.register::<U32>();
        let (a, b) = (a.into(), b.into());
        self.push(Instruction::PermuteBytes { dst: dst.register, a, b, selector });
        dst
    }

    /// Computes `2^a`.
    #[track_caller]
    pub fn exp2(&mut self, a: impl Into<Value<F32>>) -> Reg<F32> {
        self.unary(UnaryOperation::Exp2, a)
    }

    /// Computes the binary logarithm.
    #[track_caller]
    pub fn log2(&mut self, a: impl Into<Value<F32>>) -> Reg<F32> {
        self.unary(UnaryOperation::Log2, a)
    }

    /// Computes `a / b`, rounded to nearest even; about ten instructions.
    #[track_caller]
    pub fn divide_rounded(&mut self, a: Reg<F32>, b: Reg<F32>) -> Reg<F32> {
        let dst = self.register::<F32>();
        let (operation, ty) = (BinaryOperation::DivideRounded, Type::F32);
        let (a, b) = (a.into(), b.into());
        self.push(Instruction::Binary { operation, ty, dst: dst.register, a, b });
        dst
    }

    /// Computes `1 / a`.
    #[track_caller]
    pub fn reciprocal(&mut self, a: impl Into<Value<F32>>) -> Reg<F32> {
        self.unary(UnaryOperation::Reciprocal, a)
    }

    /// Computes `|a|`.
    #[track_caller]
    pub fn absolute<T: Scalar>(&mut self, a: impl Into<Value<T>>) -> Reg<T> {
        self.unary(UnaryOperation::Absolute, a)
    }

    /// Adds both halves.
    #[track_caller]
    pub fn add_packed<T: PackedHalf>(&mut self, a: Reg<T>, b: Reg<T>) -> Reg<T> {
        self.both_halves(BinaryOperation::Add, a, b)
    }

    /// Multiplies both halves.
    #[track_caller]
    pub fn multiply_packed<T: PackedHalf>(&mut self, a: Reg<T>, b: Reg<T>) -> Reg<T> {
        self.both_halves(BinaryOperation::Multiply, a, b)
    }

    /// Rounds two numbers into one packed register.
    #[track_caller]
    pub fn pack<T: Pair>(
        &mut self,
        low: impl Into<Value<F32>>,
        high: impl Into<Value<F32>>,
    ) -> Reg<T> {
        let (low, high) = (self.operand(low), self.operand(high));
        let dst = self.register::<T>();
        self.push(Instruction::ConvertPair { dst: dst.register, high, low });
        dst
    }

    /// Converts both numbers of a packed register to `f32`, exactly.
    #[track_caller]
    pub fn unpack<T: PackedHalf>(&mut self, pair: Reg<T>) -> [Reg<F32>; 2] {
        use crate::Expression;
        match T::ELEMENT {
            // A bfloat16 is the upper half of an f32.
            Element::BF16 => {
                let bits = self.eval(pair.reinterpret::<U32>());
                let low = self.eval((bits << 16).reinterpret::<F32>());
                let high = self.eval((bits & 0xFFFF_0000u32).reinterpret::<F32>());
                [low, high]
            }
            _ => {
                let halves = Reg::<F16x2>::new(pair.register);
                let [low, high] = self.split(halves);
                [self.eval(low.convert::<F32>()), self.eval(high.convert::<F32>())]
            }
        }
    }

    /// Rounds an `f32` to `f16`.
    #[track_caller]
    pub fn round_to_f16(&mut self, a: impl Into<Value<F32>>) -> Reg<F16> {
        use crate::Expression;
        let a = self.eval(a);
        self.eval(a.convert::<F16>())
    }

    /// Rounds an `f32` to `bf16`, in software on targets without an instruction for it.
    #[track_caller]
    pub fn round_to_bf16(&mut self, a: impl Into<Value<F32>>) -> Reg<BF16> {
        use crate::{Capability, Expression, Select};
        let a = self.eval(a);
        if self.target().has(Capability::Bf16) {
            return self.eval(a.convert::<BF16>());
        }
        // Rounds to nearest even: adds half of the last kept place, less one unit if that place is
        // even. The carry would turn a NaN into an infinity, so NaN is handled separately.
        let bits = self.eval(a.reinterpret::<U32>());
        let last = self.eval((bits >> 16) & 1);
        let rounded = self.eval((bits + 0x7FFF + last) >> 16);
        let is_nan = self.eval(a.differs(a));
        let result = self.eval(is_nan.select::<U32>(0x7FFF, rounded));
        let (low, high) = (self.register::<BF16>(), self.register::<BF16>());
        self.push(Instruction::Split {
            low: low.register,
            high: high.register,
            src: result.register,
        });
        low
    }

    /// Rounds two numbers to `int8` as [`Int8`](crate::Int8) does and packs them into 16 bits. The
    /// register's type is `F16` only because no 16-bit integer type exists.
    #[track_caller]
    pub fn pack_int8(&mut self, low: Reg<F32>, high: Reg<F32>) -> Reg<F16> {
        use crate::float8::{Int8, ROUND_TO_INTEGER};
        use crate::{Expression, Select};
        let [low, high] = [low, high].map(|number| {
            // The bounds also keep the assembler from contracting the addition with a preceding
            // multiplication.
            let bounded = number.maximum(-Int8::LARGEST).minimum(Int8::LARGEST);
            let rounded = self.eval((bounded + ROUND_TO_INTEGER).reinterpret::<U32>());
            self.eval(number.differs(number).select::<U32>(0, rounded))
        });
        let bytes = self.permute_bytes(low, high, 0x40);
        let bytes = self.eval(bytes.reinterpret::<F16x2>());
        self.split(bytes)[0]
    }

    // ---- across the warp -------------------------------------------------------

    /// Returns the value of the lane whose index is this lane's exclusive-ored with `distance`.
    #[track_caller]
    pub fn shuffle_butterfly<T: Scalar>(&mut self, value: Reg<T>, distance: u32) -> Reg<T> {
        self.shuffle(ShuffleMode::Butterfly, value, Operand::u32(distance))
    }

    /// Returns the value of lane `lane`.
    #[track_caller]
    pub fn shuffle_index<T: Scalar>(
        &mut self,
        value: Reg<T>,
        lane: impl Into<Value<U32>>,
    ) -> Reg<T> {
        let lane = self.operand(lane);
        self.shuffle(ShuffleMode::Index, value, lane)
    }

    /// Returns the value of the lane `distance` below this one, and whether there is one; the lowest
    /// lanes get their own value.
    #[track_caller]
    pub fn shuffle_up<T: Scalar>(&mut self, value: Reg<T>, distance: u32) -> (Reg<T>, Reg<Pred>) {
        let (dst, valid) = (self.register::<T>(), self.register::<Pred>());
        self.push(Instruction::Shuffle {
            mode: ShuffleMode::Up,
            dst: dst.register,
            valid: Some(valid.register),
            src: value.register,
            lane: Operand::u32(distance),
            clamp: 0,
        });
        (dst, valid)
    }

    /// Returns the 64-bit value of lane `lane`, shuffled as two halves.
    #[track_caller]
    pub fn shuffle_index_wide(&mut self, value: Reg<U64>, lane: impl Into<Value<U32>>) -> Reg<U64> {
        let [low, high] = self.split(value);
        let lane = self.operand(lane);
        let low = self.shuffle(ShuffleMode::Index, low, lane);
        let high = self.shuffle(ShuffleMode::Index, high, lane);
        self.join([low, high])
    }

    #[track_caller]
    fn shuffle<T: Scalar>(&mut self, mode: ShuffleMode, value: Reg<T>, lane: Operand) -> Reg<T> {
        let dst = self.register::<T>();
        let (dst_register, src) = (dst.register, value.register);
        let valid = None;
        self.push(Instruction::Shuffle { mode, dst: dst_register, valid, src, lane, clamp: 31 });
        dst
    }

    /// Returns whether the predicate holds in any lane of the warp.
    #[track_caller]
    pub fn any(&mut self, predicate: impl Into<Value<Pred>>) -> Reg<Pred> {
        self.vote(VoteMode::Any, predicate)
    }

    /// Returns whether the predicate holds in all lanes of the warp.
    #[track_caller]
    pub fn all(&mut self, predicate: impl Into<Value<Pred>>) -> Reg<Pred> {
        self.vote(VoteMode::All, predicate)
    }

    #[track_caller]
    fn vote(&mut self, mode: VoteMode, predicate: impl Into<Value<Pred>>) -> Reg<Pred> {
        let predicate = self.eval(predicate).register;
        let dst = self.register();
        self.push(Instruction::Vote { mode, dst: dst.register, predicate });
        dst
    }

    /// Returns a mask of the lanes where the predicate holds.
    #[track_caller]
    pub fn ballot(&mut self, predicate: impl Into<Value<Pred>>) -> Reg<U32> {
        let predicate = self.eval(predicate).register;
        let dst = self.register();
        self.push(Instruction::Ballot { dst: dst.register, predicate });
        dst
    }

    /// Counts the lanes of the warp where the predicate holds.
    #[track_caller]
    pub fn count_lanes(&mut self, predicate: impl Into<Value<Pred>>) -> Reg<U32> {
        let lanes = self.ballot(predicate);
        self.population_count(lanes)
    }

    /// Returns a predicate that is true in exactly one lane of the warp.
    #[track_caller]
    pub fn elect(&mut self) -> Reg<Pred> {
        let dst = self.register();
        self.push(Instruction::Elect { dst: dst.register });
        dst
    }

    /// Reduces a value over groups of `lanes` neighbouring lanes (a power of two) with a butterfly;
    /// every lane of the group receives the result.
    #[track_caller]
    pub fn reduce_lanes<T: Scalar>(
        &mut self,
        mut value: Reg<T>,
        lanes: u32,
        combine: impl Fn(Reg<T>, Reg<T>) -> Value<T>,
    ) -> Reg<T> {
        if !lanes.is_power_of_two() || lanes > 32 {
            self.misuse(format!("a reduction over {lanes} lanes: not 1, 2, 4, 8, 16 or 32"));
            return value;
        }
        let mut distance = 1;
        while distance < lanes {
            let other = self.shuffle_butterfly(value, distance);
            value = self.eval(combine(value, other));
            distance *= 2;
        }
        value
    }
}
