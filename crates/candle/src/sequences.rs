//! Ragged batches of candle tensors: placements of queries and of keys.

use candle_core::Tensor;

use crate::Placement;

/// Where the queries of each sequence are, and where its keys and values.
///
/// Masks are aligned per sequence: its last query has the position of its last key. By default,
/// each sequence is all of a batch entry, as [`attend`](crate::attend) takes them.
#[derive(Debug, Clone, Default)]
pub struct Sequences {
    /// Placement in the query and in the output: padded or packed.
    pub queries: Placement,
    /// Placement in the key and the value.
    pub keys: Placement,
}

impl Sequences {
    /// Describes packed queries over packed keys: tensors (rows, heads, dim), with a list of
    /// cumulative lengths and the maximum length for each.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use flashcore_candle::{Mask, Options, Sequences, attend_sequences};
    ///
    /// # fn main() -> candle_core::Result<()> {
    /// let device = Device::Cpu;
    /// // Three sequences of 5, 0 and 7 tokens.
    /// let starts = Tensor::new(&[0u32, 5, 5, 12], &device)?;
    /// let query = Tensor::randn(0f32, 1., (12, 8, 64), &device)?;
    /// let key = Tensor::randn(0f32, 1., (12, 2, 64), &device)?;
    /// let value = Tensor::randn(0f32, 1., (12, 2, 64), &device)?;
    ///
    /// let sequences = Sequences::ragged((&starts, 7), (&starts, 7));
    /// let options = Options { mask: Mask::CAUSAL, ..Options::default() };
    /// let attention = attend_sequences(&query, &key, &value, &sequences, &options)?;
    /// assert_eq!(attention.output.dims(), [12, 8, 64]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn ragged(
        (query_starts, longest_query): (&Tensor, usize),
        (key_starts, longest_key): (&Tensor, usize),
    ) -> Self {
        Sequences {
            queries: Placement::packed(query_starts, longest_query),
            keys: Placement::packed(key_starts, longest_key),
        }
    }

    /// Describes decoding: padded queries over a paged cache. `lengths` is the number of keys of
    /// each sequence, those of its queries included.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use flashcore_candle::{Mask, Options, Sequences, attend_sequences};
    ///
    /// # fn main() -> candle_core::Result<()> {
    /// let device = Device::Cpu;
    /// // One query for each of two sequences, over ten pages of 16 positions.
    /// let lengths = Tensor::new(&[40u32, 25], &device)?;
    /// let table = Tensor::new(&[[7u32, 0, 2], [5, 1, 1]], &device)?;
    /// let query = Tensor::randn(0f32, 1., (2, 1, 8, 64), &device)?;
    /// let cache = Tensor::zeros((10, 16, 2, 64), DType::F32, &device)?;
    ///
    /// let sequences = Sequences::paged(&lengths, &table);
    /// let options = Options { mask: Mask::CAUSAL, ..Options::default() };
    /// let attention = attend_sequences(&query, &cache, &cache, &sequences, &options)?;
    /// assert_eq!(attention.output.dims(), [2, 1, 8, 64]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn paged(lengths: &Tensor, table: &Tensor) -> Self {
        Sequences { queries: Placement::padded(), keys: Placement::paged(lengths, table) }
    }
}
