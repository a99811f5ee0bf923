//! FlashCore's attention under the name that candle-transformers calls.
//!
//! In the workspace of a program that uses candle-transformers with its feature `flash-attn`:
//!
//! ```toml
//! [patch.crates-io]
//! candle-flash-attn = { path = "flashcore/crates/candle/candle-flash-attn" }
//! ```
//!
//! It has the functions of candle's crate, and none of its types.

pub use flashcore_candle::candle_flash_attn::*;
