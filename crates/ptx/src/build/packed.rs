//! Registers with two 16-bit or four 8-bit elements, where the element type is only known when the
//! kernel is built.

use super::Builder;
use crate::{
    AddressOf, BF16x2, Element, F16x2, F32, Instruction, LoadCache, LoadOrder, Operand, Reg,
    Register, SharedAddress, StoreCache, StoreOrder, Type, U32, Value,
};

/// A register with two neighbouring 16-bit or four neighbouring 8-bit elements, lower-indexed ones
/// in the lower bits.
#[derive(Clone, Copy, Debug)]
pub struct Packed {
    element: Element,
    register: Register,
}

impl Packed {
    /// Returns the element type.
    pub fn element(self) -> Element {
        self.element
    }

    /// Returns the untyped register, to build an [`Instruction`] by hand.
    pub fn register(self) -> Register {
        self.register
    }
}

impl Builder {
    /// Creates a packed register, not yet written.
    pub fn packed(&mut self, element: Element) -> Packed {
        Packed { element, register: self.register_of(element.packed()) }
    }

    /// Creates a packed register of zeros.
    #[track_caller]
    pub fn packed_zero(&mut self, element: Element) -> Packed {
        let dst = self.packed(element);
        self.clear_packed(dst);
        dst
    }

    /// Sets a packed register to zeros.
    #[track_caller]
    pub fn clear_packed(&mut self, dst: Packed) {
        self.push(Instruction::Move { dst: dst.register, src: Operand::Immediate(0) });
    }

    /// Returns the bits of a pair of 16-bit numbers as one word.
    #[track_caller]
    pub fn packed_bits(&mut self, pair: Packed) -> Reg<U32> {
        use crate::Expression;
        match pair.element {
            Element::BF16 => self.eval(Reg::<BF16x2>::new(pair.register).reinterpret::<U32>()),
            _ => self.eval(Reg::<F16x2>::new(pair.register).reinterpret::<U32>()),
        }
    }

    /// Rounds two numbers into a new packed register.
    #[track_caller]
    pub fn pack_as(
        &mut self,
        element: Element,
        low: impl Into<Value<F32>>,
        high: impl Into<Value<F32>>,
    ) -> Packed {
        let (low, high) = (self.operand(low), self.operand(high));
        let dst = self.packed(element);
        self.push(Instruction::ConvertPair { dst: dst.register, high, low });
        dst
    }

    /// Rounds two numbers into an existing packed register.
    #[track_caller]
    pub fn pack_into(
        &mut self,
        dst: Packed,
        low: impl Into<Value<F32>>,
        high: impl Into<Value<F32>>,
    ) {
        let (low, high) = (self.operand(low), self.operand(high));
        self.push(Instruction::ConvertPair { dst: dst.register, high, low });
    }

    /// Converts both 16-bit numbers of a register to `f32`, exactly.
    #[track_caller]
    pub fn unpack_as_f32(&mut self, pair: Packed) -> [Reg<F32>; 2] {
        match pair.element {
            Element::BF16 => self.unpack(Reg::<BF16x2>::new(pair.register)),
            _ => self.unpack(Reg::<F16x2>::new(pair.register)),
        }
    }

    /// Converts four 8-bit numbers to two pairs of `f16`, exactly. `order[i]` is the index of the
    /// input that becomes output `i`.
    #[track_caller]
    pub fn widen(&mut self, four: Packed, order: [u32; 4]) -> [Packed; 2] {
        if four.element == Element::Int8 {
            return self.widen_integers(four, order);
        }
        let four =
            if order == [0, 1, 2, 3] { four } else { self.permute_bytes_packed(four, order) };
        let ty = if four.element == Element::E5M2 { Type::E5M2x2 } else { Type::E4M3x2 };
        let [low, high] = [(); 2].map(|()| self.register_of(ty));
        self.push(Instruction::Split { low, high, src: four.register });
        [low, high].map(|src| {
            let dst = self.packed(Element::F16);
            self.push(Instruction::ConvertPacked { dst: dst.register, src });
            dst
        })
    }

    /// Converts four `int8` to two pairs of `f16`. Placing the byte `x + 128` into the low bits of
    /// the `f16` 1024, where neighbouring numbers are 1 apart, gives `x + 1152`; an addition then
    /// subtracts 1152.
    #[track_caller]
    fn widen_integers(&mut self, four: Packed, order: [u32; 4]) -> [Packed; 2] {
        use crate::Expression;
        let four = Reg::<U32>::new(four.register);
        let lifted = self.eval(four ^ 0x8080_8080u32);
        let exponents = self.eval::<U32>(0x6464_6464u32);
        let less = self.eval(Value::<U32>::from(0xE480_E480u32).reinterpret::<F16x2>());
        [[order[0], order[1]], [order[2], order[3]]].map(|[low, high]| {
            let selector = low | 4 << 4 | high << 8 | 4 << 12;
            let pair = self.permute_bytes(lifted, exponents, selector);
            let pair = self.eval(pair.reinterpret::<F16x2>());
            let pair = self.add_packed(pair, less);
            Packed { element: Element::F16, register: pair.register() }
        })
    }

    /// Permutes the four bytes of a register; `order[i]` is the index of the input that becomes
    /// byte `i`.
    #[track_caller]
    fn permute_bytes_packed(&mut self, four: Packed, order: [u32; 4]) -> Packed {
        let dst = self.packed(four.element);
        let selector = (0..).zip(order).map(|(place, byte)| (byte % 4) << (4 * place)).sum();
        let (a, selector) = (four.register.into(), Operand::u32(selector));
        self.push(Instruction::PermuteBytes { dst: dst.register, a, b: a, selector });
        dst
    }

    /// Loads one packed register.
    #[track_caller]
    pub fn load_packed<A: AddressOf>(
        &mut self,
        element: Element,
        address: impl Into<Value<A>>,
    ) -> Packed {
        let dst = self.packed(element);
        self.load_packed_into(dst, address);
        dst
    }

    /// Loads one, two or four packed registers from consecutive addresses.
    #[track_caller]
    pub fn load_packed_vector<A: AddressOf, const N: usize>(
        &mut self,
        element: Element,
        address: impl Into<Value<A>>,
    ) -> [Packed; N] {
        let dst: [Packed; N] = std::array::from_fn(|_| self.packed(element));
        let address = self.address(address);
        self.push(Instruction::Load {
            dst: dst.map(|pair| pair.register).to_vec(),
            space: A::SPACE,
            address,
            order: LoadOrder::Weak,
            cache: LoadCache::Default,
        });
        dst
    }

    /// Loads into an existing packed register.
    #[track_caller]
    pub fn load_packed_into<A: AddressOf>(&mut self, dst: Packed, address: impl Into<Value<A>>) {
        let address = self.address(address);
        self.push(Instruction::Load {
            dst: vec![dst.register],
            space: A::SPACE,
            address,
            order: LoadOrder::Weak,
            cache: LoadCache::Default,
        });
    }

    /// Stores one, two or four packed registers to consecutive addresses.
    #[track_caller]
    pub fn store_packed<A: AddressOf>(&mut self, address: impl Into<Value<A>>, pairs: &[Packed]) {
        let address = self.address(address);
        self.push(Instruction::Store {
            src: pairs.iter().map(|pair| pair.register).collect(),
            space: A::SPACE,
            address,
            order: StoreOrder::Weak,
            cache: StoreCache::Default,
        });
    }

    /// Loads one, two or four 8x8 matrices of 16-bit elements by `ldmatrix`, one register each.
    /// Lane `8i + r` gives the address of row `r` of matrix `i`.
    #[track_caller]
    pub fn load_matrix_packed<const N: usize>(
        &mut self,
        element: Element,
        address: impl Into<Value<SharedAddress>>,
        transpose: bool,
    ) -> [Packed; N] {
        let dst: [Packed; N] = std::array::from_fn(|_| self.packed(element));
        let address = self.address(address);
        let registers = dst.map(|pair| pair.register).to_vec();
        self.push(Instruction::LoadMatrix { dst: registers, address, transpose });
        dst
    }
}
