//! The kernel language of FlashCore (prose to come).

#![forbid(unsafe_code)]

mod build;
mod instruction;
mod print;
mod program;
mod register;
mod target;
mod tile;
mod types;
mod valid;
mod value;

pub use build::*;
pub use instruction::*;
pub use print::print;
pub use program::*;
pub use register::*;
pub use target::*;
pub use tile::*;
pub use types::*;
pub use valid::{Fault, Invalid, validate};
pub use value::*;
