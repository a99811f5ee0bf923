//! Loads, stores and atomics.

use super::Builder;
use crate::{
    AddressOf, AtomicOperation, AtomicOrder, Eviction, GlobalAddress, Instruction, LoadCache,
    LoadOrder, Reg, Scalar, Scope, SharedAddress, StoreCache, StoreOrder, U32, U64, Value,
};

/// How a load treats order and caches.
#[derive(Clone, Copy, Debug)]
pub struct LoadHint {
    /// The ordering.
    pub order: LoadOrder,
    /// What stays in the first-level cache.
    pub cache: LoadCache,
    /// A policy for the second-level cache.
    pub policy: Option<Reg<U64>>,
}

impl Default for LoadHint {
    fn default() -> Self {
        LoadHint { order: LoadOrder::Weak, cache: LoadCache::Default, policy: None }
    }
}

/// How a store treats order and caches.
#[derive(Clone, Copy, Debug)]
pub struct StoreHint {
    /// The ordering.
    pub order: StoreOrder,
    /// What stays in the first-level cache.
    pub cache: StoreCache,
    /// A policy for the second-level cache.
    pub policy: Option<Reg<U64>>,
}

impl Default for StoreHint {
    fn default() -> Self {
        StoreHint { order: StoreOrder::Weak, cache: StoreCache::Default, policy: None }
    }
}

impl Builder {
    /// Loads one register.
    #[track_caller]
    pub fn load<T: Scalar, A: AddressOf>(&mut self, address: impl Into<Value<A>>) -> Reg<T> {
        self.load_vector::<T, A, 1>(address, LoadHint::default())[0]
    }

    /// Loads one byte, with zeros above it.
    #[track_caller]
    pub fn load_byte(&mut self, address: impl Into<Value<GlobalAddress>>) -> Reg<U32> {
        let address = self.address(address);
        let dst: Reg<U32> = self.register();
        self.push(Instruction::LoadByte { dst: dst.register, address });
        dst
    }

    /// Loads one, two or four registers.
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
            policy: hint.policy.map(|r| r.register),
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

    /// Stores one, two or four registers.
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
            policy: hint.policy.map(|r| r.register),
        });
    }

    /// Makes a policy for the second-level cache.
    #[track_caller]
    pub fn cache_policy(&mut self, eviction: Eviction) -> Reg<U64> {
        let dst = self.register();
        self.push(Instruction::CreatePolicy { dst: dst.register, eviction });
        dst
    }

    /// Adds to a number in memory and gives what it was before.
    #[track_caller]
    pub fn atomic_add<T: Scalar, A: AddressOf>(
        &mut self,
        address: impl Into<Value<A>>,
        value: impl Into<Value<T>>,
        scope: Scope,
    ) -> Reg<T> {
        self.atomic_add_ordered(address, value, scope, AtomicOrder::Relaxed)
    }

    /// The same, ordered with other accesses.
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

    /// Adds to a number in memory.
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

    /// Adds to one, two or four numbers in memory, each by itself.
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

    /// Loads 8x8 matrices of 16-bit elements, one register of `T` each.
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

    /// Stores 8x8 matrices of 16-bit elements, one register of `T` each.
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
