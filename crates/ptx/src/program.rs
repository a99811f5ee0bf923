//! A program: one kernel, as a tree of statements over typed registers.

use std::ops::Range;
use std::panic::Location;

use crate::{Instruction, Register, Target, TensorBox, Type, Version};

/// The place in the kernel's Rust source where a statement was written.
pub type SourceLocation = &'static Location<'static>;

/// The number of 32-bit registers of a multiprocessor, the same on every supported architecture.
pub const MULTIPROCESSOR_REGISTERS: u32 = 65536;

/// One kernel, ready to be validated, printed or simulated.
#[derive(Clone, Debug)]
pub struct Program {
    /// The name of the entry point.
    pub name: String,
    /// The architecture that the program is compiled for.
    pub target: Target,
    /// The kernel parameters, in the order in which the launch passes them.
    pub parameters: Vec<Parameter>,
    /// The type of each [`Register`], by index.
    pub registers: Vec<Type>,
    /// The named parts of dynamic shared memory, in order of their offsets.
    pub shared: Vec<SharedRegion>,
    /// The number of threads in a block, all along x.
    pub threads: u32,
    /// The number of blocks that must fit on one multiprocessor (`.minnctapersm`), which bounds the
    /// registers of a thread.
    pub blocks_per_multiprocessor: Option<u32>,
    /// The number of blocks in a cluster, all along x; 1 means no cluster.
    pub cluster: u32,
    /// The statements that every thread executes.
    pub body: Block,
}

impl Program {
    /// Returns the bytes of dynamic shared memory that a launch must request.
    pub fn shared_bytes(&self) -> u32 {
        let end = |region: &SharedRegion| region.offset.saturating_add(region.bytes);
        self.shared.iter().map(end).max().unwrap_or(0)
    }

    /// Returns the lowest PTX version that has every feature the program uses.
    pub fn version(&self) -> Version {
        let mut version = Version::LOWEST.max(self.target.version());
        if self.cluster > 1 {
            version = version.max(Version { major: 7, minor: 8 });
        }
        let type_of = |register| self.type_of(register);
        self.visit(&mut |statement| {
            if let StatementKind::Instruction(instruction) = &statement.kind {
                version = version.max(instruction.requirement(&type_of).version);
            }
        });
        version
    }

    /// Returns the number of registers that each thread has at entry: the multiprocessor's
    /// registers divided among the threads of all blocks that must fit on it, rounded down to a
    /// multiple of 8 and at most 255.
    pub fn registers_at_entry(&self) -> u32 {
        let blocks = self.blocks_per_multiprocessor.unwrap_or(1).max(1);
        let threads = self.threads.max(1).saturating_mul(blocks);
        let each = MULTIPROCESSOR_REGISTERS / threads / 8 * 8;
        each.min(255)
    }

    /// Returns the number of registers of a block, which its roles redistribute with `setmaxnreg`:
    /// what its threads have at entry together. Registers are allocated in multiples of 8 per
    /// thread; what the multiprocessor has beyond that stays unused.
    pub fn block_registers(&self) -> u32 {
        self.registers_at_entry().next_multiple_of(8) * self.threads
    }

    /// Returns the type of a register.
    ///
    /// # Panics
    /// If the register is not one of this program's.
    pub fn type_of(&self, register: Register) -> Type {
        self.registers[register.0 as usize]
    }

    /// Calls `visit` for every statement, outer before inner, in source order.
    pub fn visit(&self, visit: &mut dyn FnMut(&Statement)) {
        fn walk(block: &Block, visit: &mut dyn FnMut(&Statement)) {
            for statement in block {
                visit(statement);
                for inner in statement.kind.blocks() {
                    walk(inner, visit);
                }
            }
        }
        walk(&self.body, visit);
    }

    /// Returns whether the kernel waits for earlier grids on its stream, so that it may be launched
    /// before they have ended (programmatic dependent launch).
    pub fn waits_for_grids(&self) -> bool {
        let mut waits = false;
        self.visit(&mut |statement| {
            use StatementKind::Instruction as Is;
            waits |= matches!(statement.kind, Is(Instruction::GridDependencyWait));
        });
        waits
    }

    /// Returns the number of instructions in the program text; an instruction inside a loop counts
    /// once.
    pub fn instruction_count(&self) -> usize {
        let mut count = 0;
        self.visit(&mut |statement| {
            count += matches!(statement.kind, StatementKind::Instruction(_)) as usize;
        });
        count
    }
}

/// A kernel parameter, by its index in [`Program::parameters`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParameterId(pub u32);

/// A kernel parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// The name that appears in messages and in comments of the printed PTX.
    pub name: String,
    /// The kind of argument that the launch passes.
    pub kind: ParameterKind,
}

/// The kind of argument that a kernel parameter takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParameterKind {
    /// A number: `U32`, `S32`, `U64`, `S64` or `F32`.
    Scalar(Type),
    /// The address of global memory, 64 bits.
    Address,
    /// A tensor map (128 bytes) that was encoded with this box.
    TensorMap(TensorBox),
}

/// A named part of dynamic shared memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedRegion {
    /// The name that appears in messages and in comments of the printed PTX.
    pub name: String,
    /// Offset in bytes from the start of dynamic shared memory.
    pub offset: u32,
    /// Length in bytes.
    pub bytes: u32,
    /// Alignment in bytes; the offset is a multiple of it.
    pub alignment: u32,
}

/// Statements executed one after another.
pub type Block = Vec<Statement>;

/// A statement and the place where it was written.
#[derive(Clone, Debug)]
pub struct Statement {
    /// The instruction or control-flow construct.
    pub kind: StatementKind,
    /// The line of the kernel's Rust source that wrote the statement.
    pub place: SourceLocation,
}

/// Structured control flow over instructions.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // the variants speak for their fields
pub enum StatementKind {
    /// One instruction.
    Instruction(Instruction),
    /// Threads where `condition` is true execute `then`, the others `otherwise`; they reconverge
    /// afterwards.
    If { condition: Register, then: Block, otherwise: Block },
    /// Repeats `body` until a [`Break`](StatementKind::Break) in it. Threads that left the loop
    /// wait after it for the other threads of their warp.
    Loop { body: Block },
    /// Leaves the innermost loop where `condition` is true.
    Break { condition: Register },
    /// Only these warps of the block execute `body`; `member` is true exactly in their threads. A
    /// role carries more information than an `If`: which whole warps take it is known when the
    /// kernel is built, so register budgets and barrier counts can be checked.
    Role { name: String, warps: Range<u32>, member: Register, body: Block },
}

impl StatementKind {
    /// Returns the blocks nested directly inside this statement.
    pub fn blocks(&self) -> impl Iterator<Item = &Block> {
        let (first, second) = match self {
            StatementKind::Instruction(_) | StatementKind::Break { .. } => (None, None),
            StatementKind::If { then, otherwise, .. } => (Some(then), Some(otherwise)),
            StatementKind::Loop { body } | StatementKind::Role { body, .. } => (Some(body), None),
        };
        first.into_iter().chain(second)
    }
}
