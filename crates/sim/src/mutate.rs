//! Mutants: programs with one statement removed, to check that the simulator or the tests notice.

use ptx::{Block, Fence, Instruction, Program, SourceLocation, Statement, StatementKind};

/// The role of a statement in synchronisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SynchronisationKind {
    /// A fence of any kind, `wgmma.fence` included.
    Fence,
    /// A wait: for products, copies, stores or barriers.
    Wait,
    /// An arrival at a barrier, or a commit of a group, that something waits for.
    Arrive,
    /// An expectation of bytes at an mbarrier, with or without an arrival.
    Expect,
}

/// A synchronisation statement that can be removed.
#[derive(Clone, Debug)]
pub struct Site {
    /// The index among the sites of the program.
    pub index: usize,
    /// The role of the statement.
    pub kind: SynchronisationKind,
    /// The place where the statement was written.
    pub place: SourceLocation,
    /// The instruction.
    pub instruction: Instruction,
}

/// The effect of an instruction beyond writing its registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// No other effect.
    None,
    /// The instruction has a role in synchronisation.
    Synchronisation(SynchronisationKind),
    /// Another effect, on memory or on other threads. Instructions that have not been classified
    /// count here, too.
    Other,
}

/// Returns the role of an instruction in synchronisation, if it has one.
pub fn synchronisation_kind(instruction: &Instruction) -> Option<SynchronisationKind> {
    match effect(instruction) {
        Effect::Synchronisation(kind) => Some(kind),
        Effect::None | Effect::Other => None,
    }
}

/// Returns the effect of an instruction beyond writing its registers.
pub fn effect(instruction: &Instruction) -> Effect {
    use Instruction as I;
    match instruction {
        I::WgmmaFence => Effect::Synchronisation(SynchronisationKind::Fence),
        I::Fence(
            Fence::AcquireRelease(_)
            | Fence::SequentiallyConsistent(_)
            | Fence::MbarrierInit
            | Fence::ProxyAsyncShared
            | Fence::ProxyAsyncGlobal
            | Fence::ProxyAsync,
        ) => Effect::Synchronisation(SynchronisationKind::Fence),
        I::WgmmaWait { .. }
        | I::BarrierSync { .. }
        | I::ClusterWait
        | I::MbarrierWait { .. }
        | I::MbarrierTryWait { .. }
        | I::CopyAsyncWait { .. }
        | I::BulkWait { .. }
        | I::WarpSync => Effect::Synchronisation(SynchronisationKind::Wait),
        I::WgmmaCommit
        | I::BarrierArrive { .. }
        | I::ClusterArrive { .. }
        | I::MbarrierArrive { .. }
        | I::MbarrierArriveOnCopies { .. }
        | I::CopyAsyncCommit
        | I::BulkCommit => Effect::Synchronisation(SynchronisationKind::Arrive),
        I::MbarrierArriveExpect { .. } | I::MbarrierExpect { .. } => {
            Effect::Synchronisation(SynchronisationKind::Expect)
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

/// Returns every statement of the program that has a role in synchronisation.
pub fn sites(program: &Program) -> Vec<Site> {
    let mut sites = Vec::new();
    program.visit(&mut |statement| {
        if let StatementKind::Instruction(instruction) = &statement.kind
            && let Some(kind) = synchronisation_kind(instruction)
        {
            let (index, place) = (sites.len(), statement.place);
            sites.push(Site { index, kind, place, instruction: instruction.clone() });
        }
    });
    sites
}

/// Returns the program with a site of [`sites`] removed.
pub fn without(program: &Program, site: usize) -> Program {
    let mut next = 0;
    edit(program, &mut |statement| {
        let StatementKind::Instruction(instruction) = &statement.kind else { return true };
        if synchronisation_kind(instruction).is_none() {
            return true;
        }
        next += 1;
        next - 1 != site
    })
}

/// Returns the program without the statements for which `keep` is false; `keep` may change the
/// others. Outer statements come before inner ones.
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
