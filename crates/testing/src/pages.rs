//! The Rust in the pages of `docs/`, as tests of documentation.

#[doc = include_str!("../../../docs/serving.md")]
struct Serving;
