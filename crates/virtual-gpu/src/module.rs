//! Modules: PTX texts, each with one kernel.

use std::collections::HashMap;
use std::panic::Location;
use std::sync::Arc;

use ptx::{Block, Parameter, ParameterKind, Program, SourceLocation, StatementKind, Type};

use crate::error::{Error, Result, explain};
use crate::gpu::{Gpu, Handle};

/// A kernel, and the limits that were set for its launches.
pub(crate) struct Kernel {
    pub(crate) program: Arc<Program>,
    pub(crate) dynamic_shared: u32,
    /// The places of the program's statements, in its order.
    places: Places,
}

type Places = &'static [Location<'static>];

/// The programs of all texts so far: modules stay loaded, and a text is often loaded many times.
#[derive(Default)]
pub(crate) struct Programs(HashMap<String, (Arc<Program>, Places)>);

impl Programs {
    /// Returns the program of a text, and the places of its statements.
    fn get(&mut self, text: &str) -> Result<(Arc<Program>, Places)> {
        if let Some((program, places)) = self.0.get(text) {
            return Ok((program.clone(), places));
        }
        let mut program = program(text).map_err(|reason| explain(Error::InvalidPtx, reason))?;
        let places = number(&mut program);
        let program = Arc::new(program);
        self.0.insert(text.to_owned(), (program.clone(), places));
        Ok((program, places))
    }
}

/// Numbers of `CUfunction_attribute`.
mod attribute {
    pub(super) const MAX_THREADS_PER_BLOCK: u32 = 0;
    pub(super) const REGISTERS: u32 = 4;
    pub(super) const PTX_VERSION: u32 = 5;
    pub(super) const BINARY_VERSION: u32 = 6;
    pub(super) const MAX_DYNAMIC_SHARED_SIZE_BYTES: u32 = 8;
    pub(super) const LAST: u32 = 15;
}

/// Dynamic shared memory that needs no permission.
const SHARED_BYTES: u32 = 48 << 10;

impl Gpu {
    /// Loads a PTX text. The handle of its kernel is that of the module.
    pub(crate) fn load(&mut self, text: &str) -> Result<Handle> {
        self.unsafe_call()?;
        let (program, places) = self.programs.get(text)?;
        let (wanted, target) = (program.target, self.options.target);
        let runs = if wanted.specific {
            wanted == target
        } else {
            wanted.architecture <= target.architecture
        };
        if !runs {
            let reason = format!("PTX for {wanted} on a device with {target}");
            return Err(explain(Error::NoBinaryForGpu, reason));
        }
        let handle = self.handle();
        let kernel = Kernel { program, dynamic_shared: SHARED_BYTES, places };
        self.kernels.insert(handle, kernel);
        Ok(handle)
    }

    pub(crate) fn kernel(&mut self, handle: Handle) -> Result<&mut Kernel> {
        self.kernels.get_mut(&handle).ok_or(Error::InvalidHandle)
    }
}

impl Kernel {
    /// Returns an attribute of the kernel.
    pub(crate) fn attribute(&self, number: u32) -> Result<i32> {
        let (program, version) = (&self.program, self.program.version());
        let value = match number {
            attribute::MAX_THREADS_PER_BLOCK => program.threads,
            attribute::REGISTERS => self.registers(),
            attribute::PTX_VERSION => u32::from(version.major) * 10 + u32::from(version.minor),
            attribute::BINARY_VERSION => program.target.architecture,
            attribute::MAX_DYNAMIC_SHARED_SIZE_BYTES => self.dynamic_shared,
            // Shared, constant and local memory, large clusters and the like: none.
            number if number <= attribute::LAST => 0,
            _ => return Err(Error::InvalidValue),
        };
        Ok(value as i32)
    }

    /// Returns the number of registers of a thread. No compiler says how many it needs: at most all
    /// that the program names, and as many as there are.
    pub(crate) fn registers(&self) -> u32 {
        let named: u32 = self.program.registers.iter().map(|ty| ty.bits().div_ceil(32)).sum();
        named.next_multiple_of(8).clamp(16, self.program.registers_at_entry().max(16))
    }

    /// Sets an attribute; `limit` is the shared memory that a block can have.
    pub(crate) fn set(&mut self, number: u32, value: i32, limit: u32) -> Result {
        match number {
            attribute::MAX_DYNAMIC_SHARED_SIZE_BYTES => {
                let bytes = u32::try_from(value).map_err(|_| Error::InvalidValue)?;
                if bytes > limit {
                    let reason = format!("{bytes} bytes of shared memory for a block of {limit}");
                    return Err(explain(Error::InvalidValue, reason));
                }
                self.dynamic_shared = bytes;
            }
            number if number <= attribute::LAST => {}
            _ => return Err(Error::InvalidValue),
        }
        Ok(())
    }

    /// Returns the offset and the size of a parameter among all of them.
    pub(crate) fn parameter(&self, index: usize) -> Result<(usize, usize)> {
        let mut end = 0usize;
        for (at, parameter) in self.program.parameters.iter().enumerate() {
            let (bytes, alignment) = layout(parameter);
            let offset = end.next_multiple_of(alignment);
            if at == index {
                return Ok((offset, bytes));
            }
            end = offset + bytes;
        }
        Err(Error::InvalidValue)
    }
}

impl Kernel {
    /// Describes the statement at a place, by its number in the program and what it is.
    pub(crate) fn statement(&self, place: SourceLocation) -> Option<String> {
        let number = self.places.iter().position(|it| std::ptr::eq(it, place))?;
        let (mut at, mut found) = (0, None);
        self.program.visit(&mut |statement| {
            if at == number {
                found = Some(match &statement.kind {
                    StatementKind::Instruction(instruction) => format!("{instruction:?}"),
                    StatementKind::If { condition, .. } => format!("if {condition:?}"),
                    StatementKind::Loop { .. } => "loop".to_owned(),
                    StatementKind::Break { condition } => format!("break if {condition:?}"),
                    StatementKind::Role { name, .. } => format!("role {name}"),
                });
            }
            at += 1;
        });
        Some(format!("statement {number} of {at}: {}", found?))
    }
}

/// Gives each statement of a program a place of its own, since that of the kernel's source is not in
/// a text. The places are told apart by where they are in memory; they stay there, 24 bytes for each
/// statement of each text, whose program stays too.
fn number(program: &mut Program) -> Places {
    fn walk(block: &mut Block, places: &mut std::slice::Iter<'static, Location<'static>>) {
        for statement in block {
            if let Some(place) = places.next() {
                statement.place = place;
            }
            match &mut statement.kind {
                StatementKind::Instruction(_) | StatementKind::Break { .. } => {}
                StatementKind::If { then, otherwise, .. } => {
                    walk(then, places);
                    walk(otherwise, places);
                }
                StatementKind::Loop { body } | StatementKind::Role { body, .. } => {
                    walk(body, places);
                }
            }
        }
    }
    let mut count = 0;
    program.visit(&mut |_| count += 1);
    let places: Places = Vec::leak(vec![*Location::caller(); count]);
    walk(&mut program.body, &mut places.iter());
    places
}

/// Returns the size and the alignment of a parameter.
fn layout(parameter: &Parameter) -> (usize, usize) {
    match parameter.kind {
        ParameterKind::Scalar(Type::U64 | Type::S64) | ParameterKind::Address => (8, 8),
        ParameterKind::Scalar(_) => (4, 4),
        ParameterKind::TensorMap(_) => (128, 64),
    }
}

/// Returns the program of a PTX text.
fn program(text: &str) -> std::result::Result<Program, String> {
    ptx::parse(text).map_err(|error| format!("PTX that FlashCore did not print, {error}"))
}

#[cfg(test)]
mod tests {
    use ptx::{Builder, Expression, Target, U32};

    use super::*;

    #[test]
    fn statements_are_found_by_their_places() {
        let mut k = Builder::new("branches", Target::SM_75, 32);
        let thread = k.thread_index();
        k.if_(thread.equals(0), |k| {
            k.loop_(|k| {
                let lane = k.lane();
                k.break_if(lane.equals(1));
            });
        });
        k.variable::<U32>(7);
        let mut program = program(&ptx::print(&k.finish().unwrap())).unwrap();
        let places = number(&mut program);
        let program = Arc::new(program);
        let kernel = Kernel { program, dynamic_shared: 0, places };
        let mut texts = Vec::new();
        kernel.program.visit(&mut |statement| texts.push(kernel.statement(statement.place)));
        for (number, text) in texts.iter().enumerate() {
            let expected = format!("statement {number} of {}: ", texts.len());
            assert!(text.as_ref().unwrap().starts_with(&expected), "{text:?}");
        }
        assert!(texts.iter().flatten().any(|text| text.ends_with(": loop")), "{texts:?}");
        assert_eq!(kernel.statement(Location::caller()), None);
    }
}
