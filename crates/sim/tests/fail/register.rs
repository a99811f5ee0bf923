//! Hazards of registers, warps and roles.

use flashcore_sim::HazardKind as H;
use flashcore_sim::mutate;
use ptx::{
    Builder, Expression, GlobalAddress, Instruction, RegisterChange, Role, StatementKind, Target,
    U64,
};

use crate::{fails, passes};

#[test]
fn uninitialised_register() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let out = k.parameter::<GlobalAddress>("out");
    let thread = k.thread_index();
    let value = k.variable(1.0);
    k.store(out + thread.convert::<U64>() * 4, value);
    let program = k.finish().unwrap();
    passes(&program);
    let program = mutate::edit(&program, &mut |statement| {
        !matches!(statement.kind, StatementKind::Instruction(Instruction::Move { .. }))
    });
    fails("uninitialised_register", H::UninitialisedRegister, &program);
}

#[test]
fn divergent_barrier() {
    let mut k = Builder::new("kernel", Target::SM_90A, 64);
    let lane = k.lane();
    k.if_(lane.less(16), |k| k.block_sync());
    fails("divergent_barrier", H::Divergent, &k.finish().unwrap());
}

#[test]
fn divergent_shuffle() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let lane = k.lane();
    k.if_(lane.differs(3), |k| {
        k.shuffle_butterfly(lane, 1);
    });
    fails("divergent_shuffle", H::Divergent, &k.finish().unwrap());
}

#[test]
fn divergent_matrix_load() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let offset = k.shared("tile", 512, 128);
    let tile = k.shared_address(offset);
    let lane = k.lane();
    let words = [lane; 4];
    k.store_vector(tile + lane * 16, &words, Default::default());
    k.warp_sync();
    let row = k.eval(tile + lane * 16);
    k.if_(lane.less(16), |k| {
        k.load_matrix::<ptx::U32, 4>(row, false);
    });
    fails("divergent_matrix_load", H::Divergent, &k.finish().unwrap());
}

#[test]
fn role_mismatch() {
    let mut k = Builder::new("kernel", Target::SM_90A, 128);
    let out = k.parameter::<GlobalAddress>("out");
    k.role(Role::warps("writer", 1..2), |k| k.store(out, 1.0));
    let program = k.finish().unwrap();
    passes(&program);
    let program = mutate::edit(&program, &mut |statement| {
        if let StatementKind::Role { warps, .. } = &mut statement.kind {
            *warps = 2..3;
        }
        true
    });
    fails("role_mismatch", H::RoleMismatch, &program);
}

#[test]
fn register_budget_that_nobody_frees() {
    let mut k = Builder::new("kernel", Target::SM_90A, 256).blocks_per_multiprocessor(1);
    k.role(Role::warpgroups("consumer", 0..1), |k| {
        k.push(Instruction::SetMaxRegisters { change: RegisterChange::Increase, count: 256 });
    });
    let program = k.finish().unwrap();
    let program = mutate::edit(&program, &mut |_| true);
    // 255 registers at entry, so the whole file is held: one more each is one
    // too many for a block of twice the threads.
    let mut more = program.clone();
    more.threads = 512;
    fails("register_budget", H::RegisterBudget, &more);
}

#[test]
fn register_budget_the_wrong_way() {
    let mut k = Builder::new("kernel", Target::SM_90A, 256).blocks_per_multiprocessor(1);
    k.role(Role::warpgroups("consumer", 0..1), |k| {
        k.push(Instruction::SetMaxRegisters { change: RegisterChange::Increase, count: 24 });
    });
    fails("register_budget_direction", H::RegisterBudget, &k.finish().unwrap());
}

#[test]
fn registers_move_between_roles() {
    let mut k = Builder::new("kernel", Target::SM_90A, 384).blocks_per_multiprocessor(1);
    k.role(Role::warpgroups("producer", 0..1).registers(24), |_| {});
    k.role(Role::warpgroups("consumer", 1..3).registers(240), |_| {});
    passes(&k.finish().unwrap());
}

#[test]
fn warps_of_a_warpgroup_disagree() {
    let mut k = Builder::new("kernel", Target::SM_90A, 128).blocks_per_multiprocessor(1);
    let thread = k.thread_index();
    let budget = |count| Instruction::SetMaxRegisters { change: RegisterChange::Decrease, count };
    k.if_else(thread.less(32), |k| k.push(budget(64)), |k| k.push(budget(128)));
    fails("budgets_disagree", H::WarpgroupMismatch, &k.finish().unwrap());
}

#[test]
fn both_sides_of_a_branch_and_breaks_out_of_it() {
    // Lanes leave a loop from inside a branch, in different iterations.
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let lane = k.lane();
    let count = k.variable::<ptx::U32>(0);
    k.loop_(|k| {
        k.set(count, count + 1);
        k.if_else(
            (lane % 2).equals(0),
            |k| k.break_if(count.at_least(lane + 1)),
            |k| k.break_if(count.equals(3)),
        );
    });
    let expected = k.eval(lane + 1);
    let odd = k.eval((lane % 2).equals(1));
    let expected = k.eval(ptx::Select::select::<ptx::U32>(odd, 3, expected));
    let all = k.all(count.equals(expected));
    let wrong = k.eval(!all);
    k.if_(wrong, |k| k.push(Instruction::Trap));
    passes(&k.finish().unwrap());
}
