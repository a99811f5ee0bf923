//! Taking one statement out of a program, to see that it is missed.

use ptx::{Block, Fence, Instruction, Place, Program, Statement, StatementKind};

/// What kind of statement is taken out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// A fence of any kind, `wgmma.fence` included.
    Fence,
    /// A wait: for products, copies, stores, barriers.
    Wait,
    /// An arrival at, or a commit to, something that is waited for.
    Arrive,
    /// An announcement of bytes, with or without an arrival.
    Expect,
}

/// A statement that could be taken out.
#[derive(Clone, Debug)]
pub struct Site {
    /// Its index among the sites of the program.
    pub index: usize,
    /// Its kind.
    pub role: Role,
    /// Where it was written.
    pub place: Place,
    /// The instruction.
    pub instruction: Instruction,
}

/// What an instruction does beyond writing its registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Nothing.
    None,
    /// It has a role in synchronisation.
    Synchronisation(Role),
    /// Something else, to memory or with other threads; or nobody has had to know.
    Other,
}

/// The role of an instruction in synchronisation, if it has one.
pub fn role(instruction: &Instruction) -> Option<Role> {
    match effect(instruction) {
        Effect::Synchronisation(role) => Some(role),
        Effect::None | Effect::Other => None,
    }
}

/// What an instruction does beyond writing its registers.
pub fn effect(instruction: &Instruction) -> Effect {
    use Instruction as I;
    match instruction {
        I::WgmmaFence => Effect::Synchronisation(Role::Fence),
        I::Fence(
            Fence::AcquireRelease(_)
            | Fence::SequentiallyConsistent(_)
            | Fence::MbarrierInit
            | Fence::ProxyAsyncShared
            | Fence::ProxyAsyncGlobal
            | Fence::ProxyAsync,
        ) => Effect::Synchronisation(Role::Fence),
        I::WgmmaWait { .. }
        | I::BarrierSync { .. }
        | I::ClusterWait
        | I::MbarrierWait { .. }
        | I::MbarrierTryWait { .. }
        | I::CopyAsyncWait { .. }
        | I::BulkWait { .. }
        | I::WarpSync => Effect::Synchronisation(Role::Wait),
        I::WgmmaCommit
        | I::BarrierArrive { .. }
        | I::ClusterArrive { .. }
        | I::MbarrierArrive { .. }
        | I::MbarrierArriveOnCopies { .. }
        | I::CopyAsyncCommit
        | I::BulkCommit => Effect::Synchronisation(Role::Arrive),
        I::MbarrierArriveExpect { .. } | I::MbarrierExpect { .. } => {
            Effect::Synchronisation(Role::Expect)
        }
        I::Move { .. }
        | I::Unary { .. }
        | I::Binary { .. }
        | I::MultiplyAdd { .. }
        | I::MultiplyWide { .. }
        | I::Compare { .. }
        | I::Select { .. }
        | I::PermuteBytes { .. }
        | I::FunnelShift { .. }
        | I::Logic3 { .. }
        | I::Convert { .. }
        | I::ConvertPair { .. }
        | I::ConvertPacked { .. }
        | I::Split { .. }
        | I::Join { .. }
        | I::ReadSpecial { .. }
        | I::ReadParameter { .. }
        | I::SharedBase { .. }
        | I::Shuffle { .. } => Effect::None,
        I::TensorMapAddress { .. }
        | I::Load { .. }
        | I::Store { .. }
        | I::LoadByte { .. }
        | I::PrefetchL2 { .. }
        | I::CreatePolicy { .. }
        | I::Atomic { .. }
        | I::CompareAndSwap { .. }
        | I::Reduce { .. }
        | I::LoadMatrix { .. }
        | I::StoreMatrix { .. }
        | I::Vote { .. }
        | I::Ballot { .. }
        | I::Elect { .. }
        | I::Mma { .. }
        | I::Wgmma { .. }
        | I::MbarrierInit { .. }
        | I::MbarrierInvalidate { .. }
        | I::CopyAsync { .. }
        | I::BulkLoad { .. }
        | I::BulkStore { .. }
        | I::BulkReduceAdd { .. }
        | I::TensorLoad { .. }
        | I::TensorStore { .. }
        | I::TensorReduceAdd { .. }
        | I::TensorMapPrefetch { .. }
        | I::SetMaxRegisters { .. }
        | I::MapShared { .. }
        | I::GridDependencyWait
        | I::GridDependencyLaunch
        | I::Sleep { .. }
        | I::Trap => Effect::Other,
    }
}

/// Every statement of the program that has a role in synchronisation.
pub fn sites(program: &Program) -> Vec<Site> {
    let mut sites = Vec::new();
    program.visit(&mut |statement| {
        if let StatementKind::Instruction(instruction) = &statement.kind
            && let Some(role) = role(instruction)
        {
            let (index, place) = (sites.len(), statement.place);
            sites.push(Site { index, role, place, instruction: instruction.clone() });
        }
    });
    sites
}

/// The program with a site of [`sites`] taken out.
pub fn without(program: &Program, site: usize) -> Program {
    let mut next = 0;
    edit(program, &mut |statement| {
        let StatementKind::Instruction(instruction) = &statement.kind else { return true };
        if role(instruction).is_none() {
            return true;
        }
        next += 1;
        next - 1 != site
    })
}

/// The program with the statements that `keep` refuses taken out; `keep` may
/// change the others. Outer statements come before inner ones.
pub fn edit(program: &Program, keep: &mut dyn FnMut(&mut Statement) -> bool) -> Program {
    fn walk(block: &mut Block, keep: &mut dyn FnMut(&mut Statement) -> bool) {
        block.retain_mut(|statement| {
            if !keep(statement) {
                return false;
            }
            match &mut statement.kind {
                StatementKind::Instruction(_) | StatementKind::Break { .. } => {}
                StatementKind::If { then, otherwise, .. } => {
                    walk(then, keep);
                    walk(otherwise, keep);
                }
                StatementKind::Loop { body } | StatementKind::Role { body, .. } => walk(body, keep),
            }
            true
        });
    }
    let mut program = program.clone();
    walk(&mut program.body, keep);
    program
}
