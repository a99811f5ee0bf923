//! FlashCore's attention under the name that candle-transformers calls.
//!
//! In the workspace of a program that uses candle-transformers with its feature `flash-attn`:
//!
//! ```toml
//! [patch.crates-io]
//! candle-flash-attn = { path = "flashcore/crates/candle/candle-flash-attn" }
//! ```
//!
//! Of the functions in candle's crate this has the one that most models call.

pub use flashcore_candle::flash_attn;
