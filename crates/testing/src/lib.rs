//! Correctness tests of FlashCore: on a GPU against a reference in `f64`, and without one in the
//! simulator.
//!
//! Users of the library do not depend on this crate. It builds on the library and the simulator,
//! and serves the tests, the commands `check`, `sim` and `gate`, and the harness.
//!
//! A fixed rule decides whether a result is right: see [`verdict`]. The rule needs the true answer
//! ([`mod@reference`]) and adversarial problems ([`check::cases`]):
//!
//! ```
//! use flashcore::{CpuBackend, DType};
//! use flashcore_testing::check;
//!
//! let backend = CpuBackend::new();
//! for case in check::cases::standard(DType::BF16).iter().take(3) {
//!     let outcome = check::run(&backend, "blocked", case)?;
//!     assert!(outcome.passed, "{case}: {outcome}");
//! }
//! # Ok::<(), flashcore::Error>(())
//! ```
//!
//! A [`scene`] needs no GPU: it is a kernel with its inputs and the expected results, which the
//! simulator can run under any number of hostile schedules.
//!
//! # Where to look
//!
//! | module | subject |
//! | --- | --- |
//! | [`mod@reference`] | the true answer in `f64`, and the plain algorithm in the problem's precision |
//! | [`verdict`] | the rule by which a result passes or fails |
//! | [`check`] | cases, and running every kernel of a back end on them |
//! | [`check::cases`] | adversarial problems |
//! | [`check::matrix`] | the matrix kernels on a GPU, each against a product in `f64` |
//! | [`scene`] | the kernels with inputs, for the simulator and for a GPU |
//! | [`small`] | small configurations of kernels, which simulate fast |
//! | [`composition`] | random compositions of the ready-made masks and scores |
//! | [`mutant`] | kernels with one deliberate mistake, which some check must notice |
//!
//! The tests themselves are in `tests`: `kernels` runs every kernel in the simulator,
//! `differential` the same scenes on a GPU too, the others run the library's back ends.

#![forbid(unsafe_code)]

pub mod check;
pub mod composition;
pub mod mutant;
#[cfg(doctest)]
mod pages;
pub mod reference;
mod rng;
pub mod scene;
pub mod small;
pub mod verdict;

pub use verdict::{Verdict, compare, compare_gradients, compare_sequences};
