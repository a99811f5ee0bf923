//! What thread blocks exchange through global memory: loads of what others have written, and waits
//! for their counters and flags.

use ptx::{
    Builder, GlobalAddress, Instruction, LoadCache, LoadHint, LoadOrder, Operand, Pred, Reg, Scope,
    U32, Value,
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
