//! The Rust examples in the pages of `docs/`, run as doc tests.

#[doc = include_str!("../../../docs/serving.md")]
struct Serving;
