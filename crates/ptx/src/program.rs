//! A program: one kernel, as a tree of statements over typed registers.

use std::ops::Range;
use std::panic::Location;

use crate::{Instruction, Register, Target, TensorBox, Type, Version};

/// Where in the kernel's Rust source a statement was written.
pub type Place = &'static Location<'static>;

/// 32-bit registers of a multiprocessor, on every architecture so far.
pub const MULTIPROCESSOR_REGISTERS: u32 = 65536;

/// One kernel, ready to be validated, printed or simulated.
#[derive(Clone, Debug)]
pub struct Program {
    /// The name of the entry point.
    pub name: String,
    /// The architecture it is for.
    pub target: Target,
    /// What the launch passes in, in order.
    pub parameters: Vec<Parameter>,
    /// The type of each [`Register`], by index.
    pub registers: Vec<Type>,
    /// The named parts of dynamic shared memory, in order of their offsets.
    pub shared: Vec<SharedRegion>,
    /// Threads in a block, all along x.
    pub threads: u32,
    /// How many blocks should fit on one multiprocessor: an upper bound on registers.
    pub blocks_per_multiprocessor: Option<u32>,
    /// Blocks in a cluster, all along x; 1 means no cluster.
    pub cluster: u32,
    /// What a thread executes.
    pub body: Block,
}

impl Program {
    /// The dynamic shared memory a launch must ask for.
    pub fn shared_bytes(&self) -> u32 {
        let end = |region: &SharedRegion| region.offset.saturating_add(region.bytes);
        self.shared.iter().map(end).max().unwrap_or(0)
    }

    /// The lowest version of PTX that knows everything in it.
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

    /// Registers of a thread at entry: what those of the multiprocessor come to
    /// for the blocks that shall fit on it, in steps of 8 and at most 255.
    pub fn registers_at_entry(&self) -> u32 {
        let blocks = self.blocks_per_multiprocessor.unwrap_or(1).max(1);
        let threads = self.threads.max(1).saturating_mul(blocks);
        let each = MULTIPROCESSOR_REGISTERS / threads / 8 * 8;
        each.min(255)
    }

    /// The registers of a block, which its roles share out: what its threads have at entry. They come
    /// in eights, and what the multiprocessor has beyond that is nobody's.
    pub fn block_registers(&self) -> u32 {
        self.registers_at_entry().next_multiple_of(8) * self.threads
    }

    /// The type of a register.
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

    /// How many instructions the program has, written out once each.
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
    /// Its name, for people.
    pub name: String,
    /// What is passed.
    pub kind: ParameterKind,
}

/// What is passed in a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParameterKind {
    /// A number: `U32`, `S32`, `U64`, `S64` or `F32`.
    Scalar(Type),
    /// The address of global memory, 64 bits.
    Address,
    /// A tensor map made with this box, 128 bytes.
    TensorMap(TensorBox),
}

/// A named part of dynamic shared memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedRegion {
    /// Its name, for people.
    pub name: String,
    /// Bytes from the start of dynamic shared memory.
    pub offset: u32,
    /// Its length.
    pub bytes: u32,
    /// What its offset is a multiple of.
    pub alignment: u32,
}

/// Statements executed one after another.
pub type Block = Vec<Statement>;

/// A statement and where it was written.
#[derive(Clone, Debug)]
pub struct Statement {
    /// What is executed.
    pub kind: StatementKind,
    /// Where the kernel's source says so.
    pub place: Place,
}

/// Structured control flow over instructions.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // the variants speak for their fields
pub enum StatementKind {
    /// One instruction.
    Instruction(Instruction),
    /// Threads where `condition` is true take one block, the others the
    /// other; they are together again afterwards.
    If { condition: Register, then: Block, otherwise: Block },
    /// Repeats `body` until a [`Break`](StatementKind::Break) in it. Threads
    /// that left wait behind the loop for the others of their warp.
    Loop { body: Block },
    /// Leaves the innermost loop where `condition` is true.
    Break { condition: Register },
    /// Only these warps of the block take `body`; `member` is true in them.
    /// Says more than `If`: whole warps, known when the kernel is built, so
    /// register budgets and barrier counts can be checked.
    Role { name: String, warps: Range<u32>, member: Register, body: Block },
}

impl StatementKind {
    /// The blocks inside this statement.
    pub fn blocks(&self) -> impl Iterator<Item = &Block> {
        let (first, second) = match self {
            StatementKind::Instruction(_) | StatementKind::Break { .. } => (None, None),
            StatementKind::If { then, otherwise, .. } => (Some(then), Some(otherwise)),
            StatementKind::Loop { body } | StatementKind::Role { body, .. } => (Some(body), None),
        };
        first.into_iter().chain(second)
    }
}
