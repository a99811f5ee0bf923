//! The builder, with which a kernel function writes its program.
//!
//! A kernel is ordinary Rust that calls the builder. Rust's `for` and `if` run
//! while the program is built (unrolling, configuration); the builder's own
//! [`if_`](Builder::if_), [`loop_`](Builder::loop_) and
//! [`role`](Builder::role) become control flow of the program.

mod arithmetic;
mod barrier;
mod copy;
mod memory;
mod packed;
mod role;

pub use arithmetic::{Fused, Pair, SplitHalves};
pub use copy::CopyHint;
pub use memory::{LoadHint, StoreHint};
pub use packed::Packed;
pub use role::Role;

use std::panic::Location;

use crate::value::{Node, Value, peel_offset};
use crate::{
    Address, AddressOf, Axis, BinaryOperation, Block, GlobalAddress, Instruction, Operand,
    Parameter, ParameterId, ParameterKind, Pred, Program, Reg, Register, Scalar, SharedAddress,
    SharedRegion, SourceLocation, SpecialRegister, Statement, StatementKind, Target, TensorBox,
    Type, U32, U64, ValidationError,
};

/// The writer of one kernel: its methods append instructions and control flow to a [`Program`].
///
/// ```
/// use flashcore_ptx::{Builder, Expression, F32, GlobalAddress, Target, U32};
///
/// // out[i] = 2 * in[i] for the first `count` elements.
/// let mut k = Builder::new("double", Target::SM_75, 128);
/// let input = k.parameter::<GlobalAddress>("input");
/// let output = k.parameter::<GlobalAddress>("output");
/// let count = k.parameter::<U32>("count");
/// let block = k.block_index();
/// let thread = k.thread_index();
/// let index = k.eval(block * 128 + thread);
/// k.if_(index.less(count), |k| {
///     let offset = k.eval(index.convert() * 4);
///     let x = k.load::<F32, _>(input + offset);
///     k.store(output + offset, x * 2.0);
/// });
/// let program = k.finish().unwrap();
/// assert!(flashcore_ptx::print(&program).contains(".entry double"));
/// ```
#[derive(Debug)]
pub struct Builder {
    program: Program,
    /// The statement blocks that are still open, innermost last.
    open: Vec<Block>,
    /// The number of groups of [`Instruction::Wgmma`]s committed so far.
    pub(crate) wgmma_groups: u32,
    /// The first misuse of the builder or of the tile types, which [`Builder::finish`] returns.
    misuse: Option<ValidationError>,
}

impl Builder {
    /// Creates a builder for a kernel with this entry name and blocks of `threads` threads.
    pub fn new(name: impl Into<String>, target: Target, threads: u32) -> Self {
        Builder {
            program: Program {
                name: name.into(),
                target,
                parameters: Vec::new(),
                registers: Vec::new(),
                shared: Vec::new(),
                threads,
                blocks_per_multiprocessor: None,
                cluster: 1,
                body: Vec::new(),
            },
            open: vec![Vec::new()],
            wgmma_groups: 0,
            misuse: None,
        }
    }

    /// Bounds the registers of a thread so that this many blocks fit on a multiprocessor. Required
    /// by roles with register budgets.
    pub fn blocks_per_multiprocessor(mut self, blocks: u32) -> Self {
        self.program.blocks_per_multiprocessor = Some(blocks);
        self
    }

    /// Sets the number of blocks in a cluster, along x.
    pub fn cluster(mut self, blocks: u32) -> Self {
        self.program.cluster = blocks;
        self
    }

    /// Returns the target architecture, for example to ask for its capabilities.
    pub fn target(&self) -> Target {
        self.program.target
    }

    /// Returns the number of threads in a block.
    pub fn threads(&self) -> u32 {
        self.program.threads
    }

    /// Returns the number of blocks in a cluster.
    pub fn cluster_size(&self) -> u32 {
        self.program.cluster
    }

    /// Returns the number of registers that each thread has at entry; see
    /// [`Program::registers_at_entry`].
    pub fn registers_at_entry(&self) -> u32 {
        self.program.registers_at_entry()
    }

    /// Finishes the kernel and validates it.
    pub fn finish(mut self) -> Result<Program, ValidationError> {
        if let Some(misuse) = self.misuse {
            return Err(misuse);
        }
        self.program.body = self.open.pop().expect("the body is always open");
        crate::validate(&self.program)?;
        Ok(self.program)
    }

    /// Records a misuse of the builder or of the tile types; [`finish`](Builder::finish) returns
    /// the first one. Kernel functions never panic for a bad configuration.
    #[track_caller]
    pub(crate) fn misuse(&mut self, text: impl Into<String>) {
        let place = Location::caller();
        self.misuse.get_or_insert_with(|| ValidationError::misuse(text.into(), place));
    }

    // ---- parameters and shared memory ------------------------------------

    /// Declares the next kernel parameter, a number or a global address, and reads it.
    #[track_caller]
    pub fn parameter<T: Scalar + ParameterType>(&mut self, name: &str) -> Reg<T> {
        let parameter = self.declare(name, T::KIND);
        let dst = self.register::<T>();
        self.push(Instruction::ReadParameter { dst: dst.register, parameter });
        dst
    }

    /// Declares the next kernel parameter, a tensor map that must be encoded with this box.
    #[track_caller]
    pub fn tensor_map(&mut self, name: &str, tensor_box: TensorBox) -> TensorMap {
        let parameter = self.declare(name, ParameterKind::TensorMap(tensor_box));
        let address = self.register::<U64>();
        self.push(Instruction::TensorMapAddress { dst: address.register, parameter });
        TensorMap { address }
    }

    fn declare(&mut self, name: &str, kind: ParameterKind) -> ParameterId {
        let id = ParameterId(self.program.parameters.len() as u32);
        self.program.parameters.push(Parameter { name: name.to_owned(), kind });
        id
    }

    /// Reserves `bytes` of shared memory and returns their offset, a multiple of `alignment`.
    #[track_caller]
    pub fn shared(&mut self, name: &str, bytes: u32, alignment: u32) -> u32 {
        let Some(offset) = self.program.shared_bytes().checked_next_multiple_of(alignment) else {
            self.misuse(format!("{name}: {bytes} bytes of shared memory aligned to {alignment}"));
            return 0;
        };
        let name = name.to_owned();
        self.program.shared.push(SharedRegion { name, offset, bytes, alignment });
        offset
    }

    /// Returns the address of the byte at `offset` in dynamic shared memory.
    #[track_caller]
    pub fn shared_address(&mut self, offset: u32) -> Reg<SharedAddress> {
        let dst = self.register();
        self.push(Instruction::SharedBase { dst: dst.register, offset });
        dst
    }

    // ---- registers and instructions --------------------------------------

    /// Creates a register, not yet written.
    pub fn register<T: Scalar>(&mut self) -> Reg<T> {
        Reg::new(self.register_of(T::TYPE))
    }

    /// Creates a register of a type that is only known when the kernel is built.
    pub fn register_of(&mut self, ty: Type) -> Register {
        self.program.registers.push(ty);
        Register(self.program.registers.len() as u32 - 1)
    }

    /// Appends an instruction.
    #[track_caller]
    pub fn push(&mut self, instruction: Instruction) {
        self.append(StatementKind::Instruction(instruction), Location::caller());
    }

    fn append(&mut self, kind: StatementKind, place: SourceLocation) {
        let block = self.open.last_mut().expect("the body is always open");
        block.push(Statement { kind, place });
    }

    /// Emits the instructions that compute a value and returns the register with the result.
    #[track_caller]
    pub fn eval<T: Scalar>(&mut self, value: impl Into<Value<T>>) -> Reg<T> {
        match self.emit(value.into().node) {
            Operand::Register(register) => Reg::new(register),
            constant => {
                let dst = self.register::<T>();
                self.push(Instruction::Move { dst: dst.register, src: constant });
                dst
            }
        }
    }

    /// Creates a register with this initial value, to be changed by [`set`](Builder::set).
    #[track_caller]
    pub fn variable<T: Scalar>(&mut self, value: impl Into<Value<T>>) -> Reg<T> {
        let dst = self.register::<T>();
        self.set(dst, value);
        dst
    }

    /// Assigns a value to a register.
    #[track_caller]
    pub fn set<T: Scalar>(&mut self, dst: Reg<T>, value: impl Into<Value<T>>) {
        self.emit_into(dst.register, value.into().node);
    }

    /// Computes a value and returns it as an operand; a plain register or constant emits no
    /// instruction.
    #[track_caller]
    pub(crate) fn operand<T: Scalar>(&mut self, value: impl Into<Value<T>>) -> Operand {
        self.emit(value.into().node)
    }

    /// Computes an address value; constant displacements become the offset of the returned
    /// [`Address`].
    #[track_caller]
    pub(crate) fn address<A: AddressOf>(&mut self, value: impl Into<Value<A>>) -> Address {
        let (node, offset) = peel_offset(value.into());
        let base = self.eval(Value::<A>::new(node)).register;
        Address { base, offset }
    }

    #[track_caller]
    fn emit(&mut self, node: Node) -> Operand {
        let ty = match &node {
            Node::Operand(operand) => return *operand,
            Node::Misuse(text) => {
                self.misuse(text);
                return Operand::Immediate(0);
            }
            Node::Reinterpret(_, inner) => match **inner {
                // A constant has no type of its own.
                Node::Operand(Operand::Immediate(bits)) => return Operand::Immediate(bits),
                _ => node.ty(),
            },
            _ => node.ty(),
        };
        let dst = self.register_of(ty);
        self.emit_into(dst, node);
        Operand::Register(dst)
    }

    /// Emits the root of an expression into a given register.
    #[track_caller]
    fn emit_into(&mut self, dst: Register, node: Node) {
        let instruction = match node {
            Node::Operand(_) | Node::Misuse(_) => Instruction::Move { dst, src: self.emit(node) },
            Node::Reinterpret(_, inner) => Instruction::Move { dst, src: self.emit(*inner) },
            Node::Unary(operation, ty, a) => {
                Instruction::Unary { operation, ty, dst, a: self.emit(*a) }
            }
            Node::Binary(operation, ty, a, b) => {
                let a = self.emit(*a);
                let b = self.emit(*b);
                let (operation, b) = reduce_strength(operation, ty, b);
                Instruction::Binary { operation, ty, dst, a, b }
            }
            Node::Compare(comparison, ty, a, b) => {
                let a = self.emit(*a);
                Instruction::Compare { comparison, ty, dst, a, b: self.emit(*b) }
            }
            Node::Select(ty, condition, a, b) => {
                let condition = self.emit(*condition);
                let condition = self.in_register(condition, Type::Pred);
                let a = self.emit(*a);
                Instruction::Select { ty, dst, condition, a, b: self.emit(*b) }
            }
            Node::Convert(from, _, inner) => {
                let src = self.emit(*inner);
                Instruction::Convert { dst, src: self.in_register(src, from) }
            }
        };
        self.push(instruction);
    }

    /// Returns a register that holds the operand, moving a constant into a new one.
    #[track_caller]
    fn in_register(&mut self, operand: Operand, ty: Type) -> Register {
        match operand {
            Operand::Register(register) => register,
            constant => {
                let dst = self.register_of(ty);
                self.push(Instruction::Move { dst, src: constant });
                dst
            }
        }
    }

    // ---- thread, block and cluster indices -----------------------------------

    /// Reads a 32-bit special register.
    #[track_caller]
    pub fn special(&mut self, special: SpecialRegister) -> Reg<U32> {
        let dst = self.register();
        self.push(Instruction::ReadSpecial { dst: dst.register, special });
        dst
    }

    /// Reads a 64-bit special register.
    #[track_caller]
    pub fn special_wide(&mut self, special: SpecialRegister) -> Reg<U64> {
        let dst = self.register();
        self.push(Instruction::ReadSpecial { dst: dst.register, special });
        dst
    }

    /// Returns the thread's index in its block.
    #[track_caller]
    pub fn thread_index(&mut self) -> Reg<U32> {
        self.special(SpecialRegister::Thread(Axis::X))
    }

    /// Returns the block's index in the grid, along x.
    #[track_caller]
    pub fn block_index(&mut self) -> Reg<U32> {
        self.special(SpecialRegister::Block(Axis::X))
    }

    /// Returns the thread's lane in its warp.
    #[track_caller]
    pub fn lane(&mut self) -> Reg<U32> {
        self.special(SpecialRegister::Lane)
    }

    /// Returns the block's rank in its cluster.
    #[track_caller]
    pub fn cluster_rank(&mut self) -> Reg<U32> {
        self.special(SpecialRegister::ClusterRank)
    }

    // ---- control flow --------------------------------------------------------

    /// Executes `then` in the threads where `condition` holds.
    #[track_caller]
    pub fn if_(&mut self, condition: impl Into<Value<Pred>>, then: impl FnOnce(&mut Self)) {
        self.branch(condition.into(), then, |_| {}, Location::caller());
    }

    /// Executes one instruction in the threads where `condition` holds. Its place is the caller's.
    #[track_caller]
    pub(crate) fn if_one(&mut self, condition: impl Into<Value<Pred>>, instruction: Instruction) {
        let place = Location::caller();
        let condition = self.eval(condition).register;
        let then = vec![Statement { kind: StatementKind::Instruction(instruction), place }];
        self.append(StatementKind::If { condition, then, otherwise: Vec::new() }, place);
    }

    /// Executes `then` in the threads where `condition` holds and `otherwise` in the others.
    #[track_caller]
    pub fn if_else(
        &mut self,
        condition: impl Into<Value<Pred>>,
        then: impl FnOnce(&mut Self),
        otherwise: impl FnOnce(&mut Self),
    ) {
        self.branch(condition.into(), then, otherwise, Location::caller());
    }

    #[track_caller]
    fn branch(
        &mut self,
        condition: Value<Pred>,
        then: impl FnOnce(&mut Self),
        otherwise: impl FnOnce(&mut Self),
        place: SourceLocation,
    ) {
        let condition = self.eval(condition).register;
        let then = self.block(then);
        let otherwise = self.block(otherwise);
        self.append(StatementKind::If { condition, then, otherwise }, place);
    }

    /// Repeats `body` until a [`break_if`](Builder::break_if) in it.
    #[track_caller]
    pub fn loop_(&mut self, body: impl FnOnce(&mut Self)) {
        let place = Location::caller();
        let body = self.block(body);
        self.append(StatementKind::Loop { body }, place);
    }

    /// Leaves the innermost loop in the threads where `condition` holds.
    #[track_caller]
    pub fn break_if(&mut self, condition: impl Into<Value<Pred>>) {
        let condition = self.eval(condition).register;
        self.append(StatementKind::Break { condition }, Location::caller());
    }

    /// Repeats `body` for the indices `start`, `start + step`, ... below `end`.
    #[track_caller]
    pub fn for_range(
        &mut self,
        start: impl Into<Value<U32>>,
        end: impl Into<Value<U32>>,
        step: impl Into<Value<U32>>,
        body: impl FnOnce(&mut Self, Reg<U32>),
    ) {
        let place = Location::caller();
        let index = self.variable(start);
        let end = self.eval(end);
        let step = step.into();
        use crate::Expression;
        let block = self.block(|k| {
            k.break_if(index.at_least(end));
            body(k, index);
            k.set(index, index + step);
        });
        self.append(StatementKind::Loop { body: block }, place);
    }

    fn block(&mut self, body: impl FnOnce(&mut Self)) -> Block {
        self.open.push(Vec::new());
        body(self);
        self.open.pop().expect("blocks are closed in order")
    }
}

/// Turns unsigned division by a constant power of two into a shift and the remainder into a mask:
/// the assembler would compute them with a reciprocal.
fn reduce_strength(operation: BinaryOperation, ty: Type, b: Operand) -> (BinaryOperation, Operand) {
    match (operation, ty, b) {
        (BinaryOperation::Divide, Type::U32 | Type::U64, Operand::Immediate(divisor))
            if divisor.is_power_of_two() =>
        {
            (BinaryOperation::ShiftRight, Operand::u32(divisor.trailing_zeros()))
        }
        (BinaryOperation::Remainder, Type::U32 | Type::U64, Operand::Immediate(divisor))
            if divisor.is_power_of_two() =>
        {
            (BinaryOperation::And, Operand::Immediate(divisor - 1))
        }
        _ => (operation, b),
    }
}

impl Node {
    /// Returns the type of an operator's result; a bare constant has no type of its own.
    fn ty(&self) -> Type {
        match self {
            Node::Operand(_) | Node::Misuse(_) => unreachable!("asked of operators only"),
            Node::Unary(_, ty, _) | Node::Binary(_, ty, _, _) => *ty,
            Node::Compare(..) => Type::Pred,
            Node::Select(ty, ..) | Node::Reinterpret(ty, _) | Node::Convert(_, ty, _) => *ty,
        }
    }
}

/// A tensor map among the kernel's parameters.
#[derive(Clone, Copy, Debug)]
pub struct TensorMap {
    /// The generic address of the tensor map.
    pub address: Reg<U64>,
}

/// Types of values that can be passed as a kernel parameter.
pub trait ParameterType {
    /// The kind of parameter.
    const KIND: ParameterKind;
}

macro_rules! passed {
    ($($marker:ident),*) => {$(
        impl ParameterType for crate::$marker {
            const KIND: ParameterKind = ParameterKind::Scalar(Type::$marker);
        }
    )*};
}

passed!(U32, S32, U64, S64, F32);

impl ParameterType for GlobalAddress {
    const KIND: ParameterKind = ParameterKind::Address;
}
