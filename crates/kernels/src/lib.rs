//! The GPU kernels of FlashCore. Each kernel is a function from its configuration to a
//! [`Program`](ptx::Program).
//!
//! | module | what it computes |
//! | --- | --- |
//! | [`attention`] | the semantics of attention that all kernels share: masks, scores, softmax |
//! | [`scalar`] | attention on any GPU, without tensor cores |
//! | [`mma`] | attention and its gradients on Ampere and later, with `mma.sync` and `cp.async` |
//! | [`decode`] | attention of few queries over long, possibly paged, caches |
//! | [`cache`] | the element of a key-value cache, and the scales of an 8-bit one |
//! | [`append`] | appends new keys and values to a cache, with rotary embeddings |
//! | [`widen`] | converts an 8-bit key-value cache to 16 bits |
//! | [`forward`] | attention on Hopper, with `wgmma` and TMA |
//! | [`backward`] | the gradients of attention on Hopper, with `wgmma` and TMA |
//! | [`sequencer`] | sorts the tiles of a ragged batch into the schedule that other kernels read |
//! | [`finder`] | finds the blocks that a mask function leaves visible, on the device |
//! | [`combine`] | combines partial results over parts of the keys (split-KV) |
//! | [`parameter`] | the kernel parameters, and what a launch passes for each |
//! | [`single`] | one `wgmma` |
//! | [`product`] | a matrix product: TMA, pipelines, swizzles, clusters |
//!
//! A configuration is plain data: it can be printed, hashed and searched over. Building the same
//! configuration twice gives the same program.

pub mod append;
pub mod attention;
pub mod backward;
pub mod cache;
pub mod combine;
mod configuration;
pub mod decode;
mod dependent_launch;
mod divisor;
mod element;
mod exchange;
pub mod finder;
pub mod forward;
pub mod mma;
pub mod parameter;
pub mod product;
pub mod scalar;
pub mod sequencer;
mod shipped;
pub mod single;
mod strides;
pub mod widen;

/// The kernel language: builder, validator and printer.
pub use ptx;

pub use append::Append;
pub use attention::{Batch, MaskKind, Rules, Window};
pub use backward::Backward;
pub use cache::{Cache, Scales};
pub use combine::Combine;
pub use configuration::Configuration;
pub use decode::Decode;
pub use divisor::Divisor;
pub use finder::{BlockFinder, BlockLister, TileSharer};
pub use forward::{Forward, Prefill};
pub use mma::Mma;
pub use parameter::Parameter;
pub use product::Product;
pub use scalar::Scalar;
pub use sequencer::Sequencer;
pub use shipped::{shipped, with_functions};
pub use single::Single;
pub use widen::Widen;

use ptx::{Builder, Element, Target, ValidationError};

/// Why no program could be built for a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel cannot be built for this configuration.
    #[error("{kernel}: {reason}")]
    Configuration {
        /// The name of the configuration.
        kernel: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The kernel emitted an invalid program, which is a bug in the kernel.
    #[error(transparent)]
    Invalid(#[from] ValidationError),
}

/// Builds the kernel of a configuration without a fault. `builder` is not called where there is a
/// fault, since numbers may then be too large to be multiplied.
fn build(
    name: String,
    fault: Option<&str>,
    builder: impl FnOnce(String) -> Builder,
    write: impl FnOnce(&mut Builder),
) -> Result<ptx::Program, Error> {
    if let Some(reason) = fault {
        return Err(Error::Configuration { kernel: name, reason: reason.to_owned() });
    }
    let mut k = builder(name);
    write(&mut k);
    Ok(k.finish()?)
}

/// Returns a builder for thread blocks of so many threads, so many of which are on a multiprocessor at
/// a time.
fn resident_blocks(name: String, target: Target, threads: u32, blocks: u32) -> Builder {
    Builder::new(name, target, threads).blocks_per_multiprocessor(blocks)
}

/// Returns what is said of the first fault that a configuration has.
fn first_fault<const N: usize>(faults: [(bool, &'static str); N]) -> Option<&'static str> {
    faults.into_iter().find(|(faulty, _)| *faulty).map(|(_, fault)| fault)
}

/// Returns whether a multiprocessor has shared memory for so many thread blocks of so many bytes each.
fn fits_shared_memory(target: Target, bytes: u32, blocks: u32) -> bool {
    // CUDA reserves 1 KB of the multiprocessor's shared memory for each thread block.
    (bytes + 1024) * blocks <= target.shared_memory_limit() + 1024
}

/// Returns whether an element is a float of 16 bits.
const fn is_16_bit(element: Element) -> bool {
    matches!(element, Element::F16 | Element::BF16)
}
