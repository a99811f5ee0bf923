//! Arguments by the names of parameters: their order is the kernel's own business.

use std::collections::HashMap;

use kernels::Divisor;
use ptx::Program;

use super::SceneError;
use crate::{Argument, BufferId};

/// What is known of a launch.
#[derive(Default)]
pub(super) struct Arguments(HashMap<String, Argument>);

impl Arguments {
    pub(super) fn with(mut self, name: &str, argument: Argument) -> Self {
        self.0.insert(name.to_owned(), argument);
        self
    }

    pub(super) fn number(self, name: &str, number: usize) -> Self {
        self.with(name, Argument::U32(number as u32))
    }

    pub(super) fn address(self, name: &str, buffer: BufferId) -> Self {
        self.with(name, Argument::Address(buffer, 0))
    }

    /// A list that there is or is not.
    pub(super) fn list(self, name: &str, buffer: Option<BufferId>) -> Self {
        match buffer {
            Some(buffer) => self.address(name, buffer),
            None => self.with(name, Argument::U64(0)),
        }
    }

    /// A tensor with its strides from batch entry to batch entry, row to row and head to head.
    pub(super) fn tensor(self, name: &str, buffer: BufferId, strides: [usize; 3]) -> Self {
        let known = self.address(name, buffer);
        ["batch", "row", "head"].into_iter().zip(strides).fold(known, |known, (which, stride)| {
            known.with(&format!("{name} {which} stride"), Argument::U64(stride as u64))
        })
    }

    /// A number that the kernel divides by.
    pub(super) fn divisor(self, name: &str, number: usize) -> Self {
        let Divisor { number, multiplier, shift } = Divisor::new(number as u32);
        self.with(name, Argument::U32(number))
            .with(&format!("{name}, multiplier"), Argument::U32(multiplier))
            .with(&format!("{name}, shift"), Argument::U32(shift))
    }

    /// One for each parameter.
    pub(super) fn of(&self, program: &Program) -> Result<Vec<Argument>, SceneError> {
        let argument = |name: &String| {
            let unknown = || SceneError::Size(format!("nothing is known for `{name}`"));
            self.0.get(name).cloned().ok_or_else(unknown)
        };
        program.parameters.iter().map(|parameter| argument(&parameter.name)).collect()
    }
}
