//! Warp specialisation: roles, which run different code in different warps of a block.

use std::ops::Range;
use std::panic::Location;

use super::Builder;
use crate::{Expression, Instruction, RegisterChange, StatementKind};

/// The number of warps in a warpgroup, the unit of `wgmma` and of register budgets.
const WARPGROUP_WARPS: u32 = 4;

/// A role: whole warps of the block that run code of their own, with an optional register budget.
#[derive(Clone, Debug)]
pub struct Role {
    name: String,
    warps: Range<u32>,
    registers: Option<u32>,
}

impl Role {
    /// Creates a role for the warpgroups with these indices in the block.
    pub fn warpgroups(name: &str, warpgroups: Range<u32>) -> Self {
        let warp = |group: u32| group.saturating_mul(WARPGROUP_WARPS);
        let warps = warp(warpgroups.start)..warp(warpgroups.end);
        Role { name: name.to_owned(), warps, registers: None }
    }

    /// Creates a role for the warps with these indices in the block.
    pub fn warps(name: &str, warps: Range<u32>) -> Self {
        Role { name: name.to_owned(), warps, registers: None }
    }

    /// Sets the number of registers of each thread of the role (`setmaxnreg`).
    pub fn registers(mut self, count: u32) -> Self {
        self.registers = Some(count);
        self
    }
}

impl Builder {
    /// Executes `body` in the warps of `role`; all other warps skip it.
    ///
    /// A register budget is applied first. Whether it increases or decreases the registers is
    /// relative to those at entry, see [`registers_at_entry`](Builder::registers_at_entry).
    #[track_caller]
    pub fn role(&mut self, role: Role, body: impl FnOnce(&mut Self)) {
        let place = Location::caller();
        let Role { name, warps, registers } = role;
        let thread = self.thread_index();
        let (first, last) = (warps.start.saturating_mul(32), warps.end.saturating_mul(32));
        let member = if warps.start == 0 {
            self.eval(thread.less(last))
        } else if last >= self.threads() {
            self.eval(thread.at_least(first))
        } else {
            self.eval(thread.at_least(first) & thread.less(last))
        };
        let entry = self.registers_at_entry();
        let body = self.block(|k| {
            if let Some(count) = registers.filter(|count| *count != entry) {
                let change =
                    if count > entry { RegisterChange::Increase } else { RegisterChange::Decrease };
                k.push(Instruction::SetMaxRegisters { change, count });
            }
            body(k);
        });
        let member = member.register;
        self.append(StatementKind::Role { name, warps, member, body }, place);
    }
}
