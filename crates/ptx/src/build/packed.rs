//! Pairs of 16-bit elements side by side in one register, where the element is
//! only known when the kernel is built.

use super::Builder;
use crate::{
    AddressOf, Element, F32, Instruction, LoadCache, LoadOrder, Operand, Register, SharedAddress,
    StoreCache, StoreOrder, Value,
};

/// Two neighbouring elements in one register, the lower-indexed one low.
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

    /// An 8x8 matrix of 16-bit elements, two neighbours of a row in each lane, transposed.
    #[track_caller]
    pub fn transpose_packed(&mut self, rows: Packed) -> Packed {
        let dst = self.packed(rows.element);
        self.push(Instruction::TransposeMatrix { dst: dst.register, src: rows.register });
        dst
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
