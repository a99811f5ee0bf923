//! Atomics: how they change memory, what they acquire and release, and whether they are checked as
//! atomic or as ordinary accesses.

use ptx::{Address, AtomicOperation, AtomicOrder, Operand, Register, Scope, Space, Type};

use crate::Measure;
use crate::float;
use crate::machine::{Executed, Executor};
use crate::shadow::Source;
use crate::warp::{Warp, lanes_of};

/// The change that an atomic makes to memory.
#[derive(Clone, Copy)]
pub(super) enum Change {
    Operation(AtomicOperation, Operand),
    /// Compare-and-swap: the expected value and the new one.
    Swap(Operand, Operand),
}

impl<'a> Executor<'_, 'a> {
    #[allow(clippy::too_many_arguments)] // the fields of the instruction
    pub(super) fn atomic(
        &mut self,
        warp: &mut Warp<'a>,
        dst: Option<Register>,
        ty: Type,
        space: Space,
        address: Address,
        change: Change,
        scope: Scope,
        order: AtomicOrder,
    ) -> Executed<()> {
        let bytes = ty.bits() / 8;
        let addresses = self.addresses(warp, space, address);
        self.grid_state.counts.add(Measure::Atomics, warp.active.count_ones() as u64);
        let (acquires, releases) = match order {
            AtomicOrder::Relaxed => (false, false),
            AtomicOrder::Acquire => (true, false),
            AtomicOrder::Release => (false, true),
            AtomicOrder::AcquireRelease => (true, true),
        };
        if self.grid_state.checked {
            for lane in lanes_of(warp.active) {
                self.acquire_at(warp, lane, space, addresses[lane as usize], scope, acquires);
            }
            self.release_at(warp, space, &addresses, scope, releases);
        }
        let source = match self.adds_in_order(warp, ty, space, &addresses) {
            true => Source::Thread,
            false => Source::Atomic(scope),
        };
        let event =
            if self.grid_state.checked { self.thread_event(warp, source, "atom") } else { 0 };
        let operand = |warp: &Warp<'_>, operand: Operand, lane: usize| match bytes {
            8 => warp.wide(operand)[lane],
            _ => warp.word(operand)[lane] as u64,
        };
        let mut old_values = [0u64; 32];
        for lane in lanes_of(warp.active) {
            let at = lane as usize;
            let target = self.target(warp, lane, space, addresses[at], bytes)?;
            if self.grid_state.checked {
                self.check_thread(warp, lane, target, bytes, event, false)?;
                self.check_thread(warp, lane, target, bytes, event, true)?;
            }
            let mut raw = [0u8; 8];
            raw[..bytes as usize]
                .copy_from_slice(&self.bytes_at(target, bytes as usize)[..bytes as usize]);
            let old = u64::from_le_bytes(raw);
            old_values[at] = old;
            let new = match change {
                Change::Operation(operation, value) => {
                    combine(operation, ty, old, operand(warp, value, at))
                }
                Change::Swap(expected, value) => {
                    if old == operand(warp, expected, at) {
                        operand(warp, value, at)
                    } else {
                        old
                    }
                }
            };
            self.put(target, &new.to_le_bytes()[..bytes as usize]);
        }
        if let Some(dst) = dst {
            match bytes {
                8 => warp.set_wide(dst, &old_values),
                _ => warp.set_word(dst, &old_values.map(|v| v as u32)),
            }
        }
        Ok(())
    }

    /// Returns whether the atomic adds floats to a buffer whose additions must be ordered
    /// ([`Memory::adds_in_order`](crate::Memory::adds_in_order)). Such an atomic is checked like an
    /// ordinary access, so that two unordered ones are a race.
    fn adds_in_order(
        &self,
        warp: &Warp<'a>,
        ty: Type,
        space: Space,
        addresses: &[u64; 32],
    ) -> bool {
        let floats = matches!(ty, Type::F16x2 | Type::BF16x2 | Type::F32);
        let first = lanes_of(warp.active).next().filter(|_| floats && space == Space::Global);
        let memory = &self.grid_state.memory;
        let at = first.and_then(|lane| memory.locate(addresses[lane as usize], 1).ok());
        at.is_some_and(|(buffer, _)| memory.buffer(buffer).in_order)
    }
}

/// Returns the value in memory after an atomic operation.
fn combine(operation: AtomicOperation, ty: Type, old: u64, value: u64) -> u64 {
    use AtomicOperation as A;
    let signed = matches!(ty, Type::S32 | Type::S64);
    let wide = ty.bits() == 64;
    let extend = |x: u64| if wide { x as i64 } else { x as u32 as i32 as i64 };
    match operation {
        A::Add => match ty {
            Type::F32 => {
                let sum = f32::from_bits(old as u32) + f32::from_bits(value as u32);
                float::bits(sum) as u64
            }
            Type::F16x2 | Type::BF16x2 => add_packed(ty, old as u32, value as u32) as u64,
            _ if wide => old.wrapping_add(value),
            _ => (old as u32).wrapping_add(value as u32) as u64,
        },
        A::Minimum if signed => extend(old).min(extend(value)) as u64,
        A::Maximum if signed => extend(old).max(extend(value)) as u64,
        A::Minimum => old.min(value),
        A::Maximum => old.max(value),
        A::And => old & value,
        A::Or => old | value,
        A::Xor => old ^ value,
        A::Exchange => value,
    }
}

pub(crate) fn add_packed(ty: Type, a: u32, b: u32) -> u32 {
    let half = |a: u16, b: u16| {
        if ty == Type::F16x2 {
            float::f16_bits(float::from_f16(a) + float::from_f16(b))
        } else {
            float::bf16_bits(float::from_bf16(a) + float::from_bf16(b))
        }
    };
    half(a as u16, b as u16) as u32 | (half((a >> 16) as u16, (b >> 16) as u16) as u32) << 16
}
