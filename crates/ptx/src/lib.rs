//! The kernel language of FlashCore.
//!
//! A kernel is a Rust function that writes a [`Program`] with a [`Builder`].
//! The program is data: [`validate`] checks it, [`print`](print()) turns it
//! into PTX for the driver to compile, and a simulator can run it.
//!
//! # What a program is
//!
//! A [`Program`] is one entry point: parameters, shared memory, a block size,
//! and a tree of [`Statement`]s that every thread of a block executes.
//!
//! - **Registers** are typed variables ([`Reg`]), as many as the kernel likes.
//!   An [`Instruction`] reads and writes registers when it executes, in the
//!   order of the statements. Nothing is evaluated lazily: a [`Value`] is an
//!   expression over registers that becomes instructions where it is used.
//! - **Control flow** is structured: [`StatementKind::If`], [`StatementKind::Loop`] with breaks,
//!   and [`StatementKind::Role`], an `if` that only whole warps take. Threads that diverge
//!   reconverge after the statement. There are no jumps.
//! - **Shared memory** is one dynamic allocation, divided into named regions.
//! - **Asynchrony** is explicit. A tensor-core product ([`Instruction::Wgmma`])
//!   or a bulk copy ([`Instruction::TensorLoad`]) only begins when it executes;
//!   its registers or bytes may not be touched until it has been waited for.
//!   [`InFlight`] and [`Pipeline`] hold the handles until then.
//! - **Places**: each statement records the line of Rust that wrote it, so messages point into the
//!   kernel's source.
//!
//! # How a kernel reads
//!
//! ```
//! use flashcore_ptx::*;
//!
//! /// d = a * b^T for two 64 x 64 tiles of bf16, brought in by TMA.
//! fn multiply() -> Result<Program, ValidationError> {
//!     let mut k = Builder::new("multiply", Target::SM_90A, 128);
//!     let layout = TileLayout::widest(Element::BF16, 64, 64);
//!     let a_map = k.tensor_map("a", layout.tensor_box(2));
//!     let b_map = k.tensor_map("b", layout.tensor_box(2));
//!     let d = k.parameter::<GlobalAddress>("d");
//!
//!     let a = SharedTiles::new(&mut k, "a", layout, 1).at(&mut k, 0);
//!     let b = SharedTiles::new(&mut k, "b", layout, 1).at(&mut k, 0);
//!     let loaded = Mbarriers::new(&mut k, "loaded", 1, 1);
//!     let thread = k.thread_index();
//!     k.if_(thread.equals(0), |k| loaded.init(k));
//!     k.barriers_ready();
//!
//!     let barrier = loaded.at(&mut k, 0);
//!     k.if_(thread.equals(0), |k| {
//!         k.mbarrier_arrive_expect(barrier, 2 * layout.bytes());
//!         a.load(k, a_map, &[0.into(), 0.into()], barrier, CopyHint::default());
//!         b.load(k, b_map, &[0.into(), 0.into()], barrier, CopyHint::default());
//!     });
//!     k.mbarrier_wait(barrier, 0, Scope::Block);
//!
//!     let product = k.wgmma(a.matrix(), b.transposed()).wait(&mut k);
//!     let first = product.registers()[0];
//!     k.store(d + thread.convert::<U64>() * 4, first);
//!     k.finish()
//! }
//!
//! let text = print(&multiply()?);
//! assert!(text.contains("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"));
//! # Ok::<(), ValidationError>(())
//! ```
//!
//! # Finding things
//!
//! | question | file |
//! | --- | --- |
//! | what can a kernel write? | `build/`, by subject |
//! | how do tiles, swizzles, descriptors, fragments and pipelines work? | `tile/` |
//! | how does one warp multiply tiles, with `mma.sync`? | `tile/warp/mod.rs`, with an example |
//! | which instructions are there? | `instruction/mod.rs` |
//! | what does an instruction read and write? | `instruction/operands.rs` |
//! | what hardware and PTX version does it need? | `instruction/requirement.rs`, `target.rs` |
//! | what makes a program valid? | the list that opens `valid/mod.rs` |
//! | how is it spelled in PTX? | `print/instruction.rs` |
//! | how is the text adapted to older compilers? | `print/compiler.rs` |
//! | how is PTX text read again? | `parse/` |
//! | how are 8-bit numbers encoded? | `float8.rs` |
//!
//! # The promise
//!
//! Every program that validates also assembles: `tests/assembles.rs` puts every form of every
//! instruction through two versions of NVIDIA's assembler. And nothing here panics for a bad
//! configuration: a misuse of the builder or of the tile types is recorded, and [`Builder::finish`]
//! returns it.

#![forbid(unsafe_code)]

mod build;
mod float8;
mod instruction;
mod parse;
mod print;
mod program;
mod register;
mod target;
mod tile;
mod types;
mod valid;
mod value;

pub use build::*;
pub use float8::{FLOAT8_NAN, Float8, Int8};
pub use instruction::*;
pub use parse::{ParseError, parse};
pub use print::{Compiler, print, print_for};
pub use program::*;
pub use register::*;
pub use target::*;
pub use tile::*;
pub use types::*;
pub use valid::{Fault, ValidationError, validate};
pub use value::*;
