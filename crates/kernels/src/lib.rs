//! The kernels of FlashCore, each a function from its configuration to a
//! [`Program`](ptx::Program).
//!
//! | module | what it computes |
//! | --- | --- |
//! | [`attention`] | what attention means: rules that the kernels share |
//! | [`scalar`] | attention on any GPU, with ordinary arithmetic |
//! | [`mma`] | attention and its gradients on Ampere and later, with mma.sync and cp.async |
//! | [`decode`] | attention of few queries over long, maybe paged, caches |
//! | [`cache`] | what a cache is made of, and the scales of one of 8 bits |
//! | [`append`] | new keys and values into a cache, with rotary embeddings |
//! | [`widen`] | keys and values of 8 bits as numbers of 16 |
//! | [`forward`] | attention on Hopper, with wgmma and TMA |
//! | [`backward`] | the gradients of attention on Hopper, with wgmma and TMA |
//! | [`sequencer`] | the tiles of a ragged batch in the order in which `forward` takes them |
//! | [`combine`] | partial attention over parts of the keys, put together |
//! | [`single`] | one `wgmma` |
//! | [`product`] | a matrix product: TMA, pipelines, swizzles, clusters |
//! | [`ceiling`] | the loop that says how fast the tensor cores are |
//!
//! A configuration is plain data: print it, hash it, search over it. Building
//! the same configuration twice gives the same program.

pub mod append;
pub mod attention;
pub mod backward;
pub mod cache;
pub mod ceiling;
pub mod combine;
pub mod decode;
mod divisor;
mod element;
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

/// The language that the kernels are written in.
pub use ptx;

pub use append::Append;
pub use attention::{Batch, MaskKind, Rules, Window};
pub use backward::Backward;
pub use cache::{Cache, Scales};
pub use ceiling::Ceiling;
pub use combine::Combine;
pub use decode::Decode;
pub use divisor::Divisor;
pub use finder::{BlockFinder, BlockLister, TileSharer};
pub use forward::{Forward, Prefill};
pub use mma::Mma;
pub use parameter::Parameter;
pub use product::Product;
pub use scalar::Scalar;
pub use sequencer::Sequencer;
pub use shipped::{Configuration, shipped, with_functions};
pub use single::Single;
pub use widen::Widen;

use ptx::{Builder, Invalid, Program, Target};

/// Why there is no program for a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration is not one the kernel can be built for.
    #[error("{kernel}: {reason}")]
    Configuration {
        /// The configuration, by name.
        kernel: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The kernel wrote a program that is not valid: a bug of the kernel.
    #[error(transparent)]
    Invalid(#[from] Invalid),
}

impl Error {
    fn configuration(kernel: String, reason: &str) -> Self {
        Error::Configuration { kernel, reason: reason.to_owned() }
    }
}

/// Builds the kernel of a configuration, unless there is a fault in that: for blocks of so many threads,
/// so many of which a multiprocessor has.
fn build(
    name: String,
    fault: Option<&str>,
    (target, threads, residents): (Target, u32, u32),
    write: impl FnOnce(&mut Builder),
) -> Result<Program, Error> {
    if let Some(reason) = fault {
        return Err(Error::configuration(name, reason));
    }
    let mut k = Builder::new(name, target, threads).blocks_per_multiprocessor(residents);
    write(&mut k);
    Ok(k.finish()?)
}
