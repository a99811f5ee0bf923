//! Loads, stores and atomics.

use super::Builder;
use crate::{
    AddressOf, AtomicOperation, AtomicOrder, GlobalAddress, Instruction, LoadCache, LoadOrder, Reg,
    Scalar, Scope, SharedAddress, StoreCache, StoreOrder, U32, Value,
};

/// Memory order and cache hints of a load.
#[derive(Clone, Copy, Debug)]
pub struct LoadHint {
    /// The memory order.
    pub order: LoadOrder,
    /// The cache hint.
    pub cache: LoadCache,
}

impl Default for LoadHint {
    fn default() -> Self {
        LoadHint { order: LoadOrder::Weak, cache: LoadCache::Default }
    }
}

/// Memory order and cache hints of a store.
#[derive(Clone, Copy, Debug)]
pub struct StoreHint {
    /// The memory order.
    pub order: StoreOrder,
    /// The cache hint.
    pub cache: StoreCache,
}

impl Default for StoreHint {
    fn default() -> Self {
        StoreHint { order: StoreOrder::Weak, cache: StoreCache::Default }
    }
}

impl Builder {
    /// Loads one register.
    #[track_caller]
    pub fn load<T: Scalar, A: AddressOf>(&mut self, address: impl Into<Value<A>>) -> Reg<T> {
        self.load_vector::<T, A, 1>(address, LoadHint::default())[0]
    }

    /// Loads one byte, zero-extended.
    #[track_caller]
    pub fn load_byte(&mut self, address: impl Into<Value<GlobalAddress>>) -> Reg<U32> {
        let address = self.address(address);
        let dst: Reg<U32> = self.register();
        self.push(Instruction::LoadByte { dst: dst.register, address });
        dst
    }

    /// Loads one, two or four registers from consecutive addresses.
    #[track_caller]
    pub fn load_vector<T: Scalar, A: AddressOf, const N: usize>(
        &mut self,
        address: impl Into<Value<A>>,
        hint: LoadHint,
    ) -> [Reg<T>; N] {
        let address = self.address(address);
        let dst: [Reg<T>; N] = std::array::from_fn(|_| self.register());
        self.push(Instruction::Load {
            dst: dst.iter().map(|r| r.register).collect(),
            space: A::SPACE,
            address,
            order: hint.order,
            cache: hint.cache,
        });
        dst
    }

    /// Stores one value.
    #[track_caller]
    pub fn store<T: Scalar, A: AddressOf>(
        &mut self,
        address: impl Into<Value<A>>,
        value: impl Into<Value<T>>,
    ) {
        let value = self.eval(value);
        self.store_vector(address, &[value], StoreHint::default());
    }

    /// Stores one, two or four registers to consecutive addresses.
    #[track_caller]
    pub fn store_vector<T: Scalar, A: AddressOf>(
        &mut self,
        address: impl Into<Value<A>>,
        values: &[Reg<T>],
        hint: StoreHint,
    ) {
        let address = self.address(address);
        self.push(Instruction::Store {
            src: values.iter().map(|r| r.register).collect(),
            space: A::SPACE,
            address,
            order: hint.order,
            cache: hint.cache,
        });
    }

    /// Atomically adds to a number in memory and returns its previous value, with relaxed order.
    #[track_caller]
    pub fn atomic_add<T: Scalar, A: AddressOf>(
        &mut self,
        address: impl Into<Value<A>>,
        value: impl Into<Value<T>>,
        scope: Scope,
    ) -> Reg<T> {
        self.atomic_add_ordered(address, value, scope, AtomicOrder::Relaxed)
    }

    /// Atomically adds to a number in memory and returns its previous value, with the given order.
    #[track_caller]
    pub fn atomic_add_ordered<T: Scalar, A: AddressOf>(
        &mut self,
        address: impl Into<Value<A>>,
        value: impl Into<Value<T>>,
        scope: Scope,
        order: AtomicOrder,
    ) -> Reg<T> {
        let address = self.address(address);
        let value = self.operand(value);
        let dst = self.register::<T>();
        self.push(Instruction::Atomic {
            operation: AtomicOperation::Add,
            ty: T::TYPE,
            dst: dst.register,
            space: A::SPACE,
            address,
            value,
            scope,
            order,
        });
        dst
    }

    /// Atomically adds to a number in memory, without a result.
    #[track_caller]
    pub fn reduce_add<T: Scalar, A: AddressOf>(
        &mut self,
        address: impl Into<Value<A>>,
        value: impl Into<Value<T>>,
        scope: Scope,
    ) {
        let value = self.eval(value);
        self.reduce_add_vector(address, &[value], scope);
    }

    /// Atomically adds to one, two or four consecutive numbers in memory, without a result. Each
    /// number is updated atomically by itself.
    #[track_caller]
    pub fn reduce_add_vector<T: Scalar, A: AddressOf>(
        &mut self,
        address: impl Into<Value<A>>,
        values: &[Reg<T>],
        scope: Scope,
    ) {
        let address = self.address(address);
        self.push(Instruction::Reduce {
            operation: AtomicOperation::Add,
            ty: T::TYPE,
            src: values.iter().map(|value| value.register).collect(),
            space: A::SPACE,
            address,
            scope,
            order: AtomicOrder::Relaxed,
        });
    }

    /// Loads one, two or four 8x8 matrices of 16-bit elements by `ldmatrix`, one register each.
    /// Lane `8i + r` gives the address of row `r` of matrix `i`.
    #[track_caller]
    pub fn load_matrix<T: Scalar, const N: usize>(
        &mut self,
        address: impl Into<Value<SharedAddress>>,
        transpose: bool,
    ) -> [Reg<T>; N] {
        let dst: [Reg<T>; N] = std::array::from_fn(|_| self.register());
        let address = self.address(address);
        let registers = dst.map(|r| r.register).to_vec();
        self.push(Instruction::LoadMatrix { dst: registers, address, transpose });
        dst
    }

    /// Stores one, two or four 8x8 matrices of 16-bit elements by `stmatrix`, one register each.
    /// Lane `8i + r` gives the address of row `r` of matrix `i`.
    #[track_caller]
    pub fn store_matrix<T: Scalar>(
        &mut self,
        address: impl Into<Value<SharedAddress>>,
        values: &[Reg<T>],
        transpose: bool,
    ) {
        let address = self.address(address);
        let src = values.iter().map(|r| r.register).collect();
        self.push(Instruction::StoreMatrix { src, address, transpose });
    }
}
