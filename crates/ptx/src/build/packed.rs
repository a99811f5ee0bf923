//! Pairs of 16-bit elements, or four of 8 bits, side by side in one register,
//! where the element is only known when the kernel is built.

use super::Builder;
use crate::{
    AddressOf, BF16x2, Element, F16x2, F32, Instruction, LoadCache, LoadOrder, Operand, Reg,
    Register, SharedAddress, StoreCache, StoreOrder, Type, U32, Value,
};

/// Two neighbouring elements of 16 bits or four of 8 in one register, lower-indexed ones low.
#[derive(Clone, Copy, Debug)]
pub struct Packed {
    element: Element,
    register: Register,
}

impl Packed {
    /// The element.
    pub fn element(self) -> Element {
        self.element
    }

    /// The bare register, to build an [`Instruction`] by hand.
    pub fn register(self) -> Register {
        self.register
    }
}

impl Builder {
    /// A register for two elements, not yet written.
    pub fn packed(&mut self, element: Element) -> Packed {
        Packed { element, register: self.register_of(element.packed()) }
    }

    /// Two zeros.
    #[track_caller]
    pub fn packed_zero(&mut self, element: Element) -> Packed {
        let dst = self.packed(element);
        self.push(Instruction::Move { dst: dst.register, src: Operand::Immediate(0) });
        dst
    }

    /// Two numbers rounded into one register.
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

    /// Two numbers rounded into a register that there is.
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

    /// The two numbers of a register, exactly.
    #[track_caller]
    pub fn unpack_as_f32(&mut self, pair: Packed) -> [Reg<F32>; 2] {
        match pair.element {
            Element::BF16 => self.unpack(Reg::<BF16x2>::new(pair.register)),
            _ => self.unpack(Reg::<F16x2>::new(pair.register)),
        }
    }

    /// Four numbers of 8 bits as two pairs of `f16`, exactly: of each number, which one it was.
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

    /// The same of integers: `x + 128` in the lowest bits of 1024, whose neighbours in `f16` are 1
    /// away, is `x + 1152`.
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

    /// The four bytes of a register in another order: of each, which one it was.
    #[track_caller]
    fn permute_bytes_packed(&mut self, four: Packed, order: [u32; 4]) -> Packed {
        let dst = self.packed(four.element);
        let selector = (0..).zip(order).map(|(place, byte)| (byte % 4) << (4 * place)).sum();
        let (a, selector) = (four.register.into(), Operand::u32(selector));
        self.push(Instruction::PermuteBytes { dst: dst.register, a, b: a, selector });
        dst
    }

    /// Loads two neighbours.
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

    /// Loads one, two or four registers of neighbours.
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
            policy: None,
        });
        dst
    }

    /// Loads two neighbours into a register that there is.
    #[track_caller]
    pub fn load_packed_into<A: AddressOf>(&mut self, dst: Packed, address: impl Into<Value<A>>) {
        let address = self.address(address);
        self.push(Instruction::Load {
            dst: vec![dst.register],
            space: A::SPACE,
            address,
            order: LoadOrder::Weak,
            cache: LoadCache::Default,
            policy: None,
        });
    }

    /// Stores one, two or four pairs to consecutive addresses.
    #[track_caller]
    pub fn store_packed<A: AddressOf>(&mut self, address: impl Into<Value<A>>, pairs: &[Packed]) {
        let address = self.address(address);
        self.push(Instruction::Store {
            src: pairs.iter().map(|pair| pair.register).collect(),
            space: A::SPACE,
            address,
            order: StoreOrder::Weak,
            cache: StoreCache::Default,
            policy: None,
        });
    }

    /// Loads one, two or four 8x8 matrices by `ldmatrix`: of lane `8i + r`,
    /// `address` is that of row `r` of matrix `i`.
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
