//! The configuration of any kernel.

use ptx::Program;

use crate::append::Append;
use crate::backward::{Rounding, RowSums, SinkGradients};
use crate::forward::Form;
use crate::mma::BackwardMma;
use crate::{
    Backward, BlockFinder, BlockLister, Combine, Decode, Error, Forward, Mma, Prefill, Product,
    Scalar, Sequencer, Single, TileSharer, Widen,
};

/// Declares [`Configuration`] from its kinds, each with the name of the kernel family and what the
/// kernel computes.
macro_rules! kinds {
    ($($kind:ident $family:literal $summary:literal)*) => {
        /// A configuration of any kernel.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Configuration {
            $(#[doc = concat!("`", $family, "`: ", $summary, ".")] $kind($kind),)*
        }

        impl Configuration {
            /// Returns the name of the kernel family, without the configuration.
            pub fn family(&self) -> &'static str {
                match self { $(Configuration::$kind(_) => $family,)* }
            }

            /// Returns what the kernel computes, in a few words.
            pub fn summary(&self) -> &'static str {
                match self { $(Configuration::$kind(_) => $summary,)* }
            }

            /// Returns the name of the configuration, which is also that of the kernel's entry point.
            pub fn name(&self) -> String {
                match self { $(Configuration::$kind(it) => it.name(),)* }
            }

            /// Builds the program of this configuration.
            pub fn program(&self) -> Result<Program, Error> {
                match self { $(Configuration::$kind(it) => it.program(),)* }
            }
        }
    };
}

kinds! {
    Scalar "scalar" "attention with ordinary arithmetic, on any GPU"
    Mma "mma" "attention with mma.sync and cp.async, on Ampere and later"
    Forward "forward" "attention with wgmma and TMA, on Hopper"
    Prefill "prefill" "attention over ragged batches, with windows, on Hopper"
    Sequencer "sequencer" "the tiles of a ragged batch in the order they are taken"
    BlockFinder "block_finder" "which blocks a mask leaves, by what its tensors hold"
    BlockLister "block_lister" "lists of the blocks that a mask leaves"
    TileSharer "tile_sharer" "tiles of unequal length, shared out over blocks"
    Combine "combine" "partial attention over parts of the keys, put together"
    Decode "decode" "attention of few queries over a long cache, Ampere and later"
    Append "append" "new keys and values into a cache, keys and queries rotated"
    Widen "widen" "keys and values of 8 bits as numbers of 16"
    Backward "backward" "the gradients of attention, with wgmma and TMA, on Hopper"
    BackwardMma "backward-mma" "the gradients of attention, with mma.sync and cp.async, Ampere and later"
    RowSums "row_sums" "row sums of output gradients times outputs"
    Rounding "rounding" "sums of the queries' gradient, rounded and in order"
    SinkGradients "sink_gradients" "the gradients of sinks, from row sums"
    Single "single" "one 64x64x16 wgmma"
    Product "product" "a matrix product with TMA, a pipeline and wgmma"
}

impl Configuration {
    /// Returns the compact form, which compiles fastest, if this is not already it.
    pub fn compact(&self) -> Option<Configuration> {
        let compact = match *self {
            Configuration::Forward(it) => {
                Configuration::Forward(Forward { form: Form::COMPACT, ..it })
            }
            Configuration::Prefill(it) => {
                let tile = Forward { form: Form::COMPACT, ..it.tile };
                Configuration::Prefill(Prefill { tile, ..it })
            }
            _ => return None,
        };
        Some(compact).filter(|compact| compact != self)
    }
}
