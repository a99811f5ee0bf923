//! What thread blocks exchange through global memory: loads of what others have written, counters and
//! flags, and waits for them.

use ptx::{
    Builder, GlobalAddress, Instruction, LoadCache, LoadHint, LoadOrder, Operand, Pred, Reg, Scope,
    StoreHint, StoreOrder, U32, Value,
};

/// The hint of loads of what other multiprocessors have written: they bypass the L1 cache of this
/// one.
pub(crate) const L2_ONLY: LoadHint = LoadHint { order: LoadOrder::Weak, cache: LoadCache::L2Only };

/// Polls a word with acquire loads, with a pause of `nanoseconds` between two, until `done` of its
/// value; called by one thread.
pub(crate) fn poll(
    k: &mut Builder,
    address: Reg<GlobalAddress>,
    nanoseconds: u32,
    done: impl FnOnce(Reg<U32>) -> Value<Pred>,
) {
    k.loop_(|k| {
        let order = LoadOrder::Acquire(Scope::Gpu);
        let hint = LoadHint { order, ..LoadHint::default() };
        let [word] = k.load_vector::<U32, _, 1>(address, hint);
        k.break_if(done(word));
        k.push(Instruction::Sleep { nanoseconds: Operand::u32(nanoseconds) });
    });
}

/// Stores a word that [`poll`] waits for, after all that this thread, and what synchronised with it, has
/// stored; called by one thread.
#[track_caller]
pub(crate) fn store_release(
    k: &mut Builder,
    address: Reg<GlobalAddress>,
    value: impl Into<Value<U32>>,
) {
    let value = k.eval(value);
    let hint = StoreHint { order: StoreOrder::Release(Scope::Gpu), ..StoreHint::default() };
    k.store_vector(address, &[value], hint);
}

/// Sets a word back to zero for the next launch; called by one thread.
#[track_caller]
pub(crate) fn reset(k: &mut Builder, address: Reg<GlobalAddress>) {
    let none = k.eval::<U32>(0);
    let hint = StoreHint { order: StoreOrder::Relaxed(Scope::Gpu), ..StoreHint::default() };
    k.store_vector(address, &[none], hint);
}
