//! What a launch over sequences reads and writes.

use cuda::DeviceAddress;

use super::ServingSize;
use crate::gpu::{DeviceTensor, GpuError};

/// What one launch reads and writes.
///
/// Lists have a 32-bit number for each sequence, starts one more. They are read on the device when
/// the launch runs, and whatever they hold is cut there to what the plan was made for.
///
/// | here | in FlashAttention |
/// | --- | --- |
/// | `query_starts`, `key_starts` | `cu_seqlens_q`, `cu_seqlens_k` |
/// | `query_lengths`, `lengths` | `seqused_q`, `seqused_k` or `cache_seqlens` |
/// | `left_padding` | `leftpad_k` |
/// | `entries` | `cache_batch_idx` |
/// | `block_table` | `block_table` or `page_table` |
///
/// ```
/// use flashcore::gpu::{DeviceAddress, DeviceTensor, ServingTensors};
///
/// # fn describe(tensor: DeviceTensor, lse: DeviceAddress, lengths: DeviceAddress, table: DeviceAddress) {
/// let tensors = ServingTensors::new(tensor, tensor, tensor, tensor, lse)
///     .with_lengths(lengths)
///     .with_block_table(table);
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ServingTensors {
    /// The queries, (sequences, queries, heads, dim), or packed into one batch entry.
    pub query: DeviceTensor,
    /// The keys, (batch entries or pages, positions, key heads, dim), or packed into one batch
    /// entry.
    pub key: DeviceTensor,
    /// The values, of the keys' shape but for the dim.
    pub value: DeviceTensor,
    /// Where the output goes, of the queries' shape; must not overlap the others. Rows that are no
    /// query of a sequence are not written.
    pub output: DeviceTensor,
    /// Where the log-sum-exps go, in f32 without gaps: (sequences, query heads, queries), and for
    /// packed queries (query heads, rows), as FlashAttention has them.
    pub lse: DeviceAddress,
    /// Keys of each sequence, left padding included; without, as many as its place has: the plan's
    /// most, or the packed rows.
    pub lengths: Option<DeviceAddress>,
    /// Positions of each sequence that are no part of it.
    pub left_padding: Option<DeviceAddress>,
    /// The batch entry of each sequence; its index without. Neither with pages nor packed keys.
    pub entries: Option<DeviceAddress>,
    /// Where each sequence's queries begin, and where the last end: packed queries.
    pub query_starts: Option<DeviceAddress>,
    /// Queries of each sequence; without, as many as its place has. The last one stands at the
    /// last key.
    pub query_lengths: Option<DeviceAddress>,
    /// Where each sequence's keys begin, and where the last end: packed keys.
    pub key_starts: Option<DeviceAddress>,
    /// The pages of each sequence, row after row.
    pub block_table: Option<DeviceAddress>,
    /// ALiBi slopes in f32: of each query head, or of each sequence and query head.
    pub slopes: Option<DeviceAddress>,
    /// Sinks in f32, one for each query head.
    pub sinks: Option<DeviceAddress>,
}

/// The roles of the four tensors, for errors.
const ROLES: [&str; 4] = ["query", "key", "value", "output"];

impl ServingTensors {
    /// Tensors without lists.
    pub fn new(
        query: DeviceTensor,
        key: DeviceTensor,
        value: DeviceTensor,
        output: DeviceTensor,
        lse: DeviceAddress,
    ) -> Self {
        ServingTensors {
            query,
            key,
            value,
            output,
            lse,
            lengths: None,
            left_padding: None,
            entries: None,
            query_starts: None,
            query_lengths: None,
            key_starts: None,
            block_table: None,
            slopes: None,
            sinks: None,
        }
    }

    /// The same with a list of lengths.
    pub fn with_lengths(self, lengths: DeviceAddress) -> Self {
        ServingTensors { lengths: Some(lengths), ..self }
    }

    /// The same with a list of left paddings.
    pub fn with_left_padding(self, left_padding: DeviceAddress) -> Self {
        ServingTensors { left_padding: Some(left_padding), ..self }
    }

    /// The same with a list of batch entries.
    pub fn with_entries(self, entries: DeviceAddress) -> Self {
        ServingTensors { entries: Some(entries), ..self }
    }

    /// The same with packed queries that begin there.
    pub fn with_query_starts(self, query_starts: DeviceAddress) -> Self {
        ServingTensors { query_starts: Some(query_starts), ..self }
    }

    /// The same with a list of how many queries each sequence has.
    pub fn with_query_lengths(self, query_lengths: DeviceAddress) -> Self {
        ServingTensors { query_lengths: Some(query_lengths), ..self }
    }

    /// The same with packed keys that begin there.
    pub fn with_key_starts(self, key_starts: DeviceAddress) -> Self {
        ServingTensors { key_starts: Some(key_starts), ..self }
    }

    /// The same with a block table.
    pub fn with_block_table(self, block_table: DeviceAddress) -> Self {
        ServingTensors { block_table: Some(block_table), ..self }
    }

    /// The same with slopes.
    pub fn with_slopes(self, slopes: DeviceAddress) -> Self {
        ServingTensors { slopes: Some(slopes), ..self }
    }

    /// The same with sinks.
    pub fn with_sinks(self, sinks: DeviceAddress) -> Self {
        ServingTensors { sinks: Some(sinks), ..self }
    }

    /// Refuses what can be seen from the host.
    pub(in crate::gpu) fn validate(&self, size: &ServingSize) -> Result<(), GpuError> {
        for (role, tensor) in ROLES.into_iter().zip(self.strided(size)) {
            tensor.aligned(role, size.problem.dtype.bytes(), 16)?;
        }
        let problem = &size.problem;
        let needed = Known::needed_if;
        let padded = size.pages.is_none() && !size.packed_keys;
        let lists = [
            List("block table", self.block_table, needed(size.pages.is_some())),
            List("list of query starts", self.query_starts, needed(size.packed_queries)),
            List("list of key starts", self.key_starts, needed(size.packed_keys)),
            List("list of slopes", self.slopes, needed(problem.alibi)),
            List("list of sinks", self.sinks, needed(problem.sinks)),
            List("list of batch entries", self.entries, Known::optional_if(padded)),
            List("list of lengths", self.lengths, Known::Optional),
            List("list of query lengths", self.query_lengths, Known::Optional),
            List("list of left paddings", self.left_padding, Known::Optional),
        ];
        lists.into_iter().try_for_each(List::validate)
    }

    /// Query, key, value and output, packed ones with one batch entry for all sequences.
    pub(in crate::gpu) fn strided(&self, size: &ServingSize) -> [DeviceTensor; 4] {
        [
            self.query.packed(size.packed_queries),
            self.key.packed(size.packed_keys),
            self.value.packed(size.packed_keys),
            self.output.packed(size.packed_queries),
        ]
    }
}

/// A list that a launch was given or not: its name, whether the plan knows of it, and whether it
/// cannot do without.
pub(in crate::gpu) struct List(
    pub(in crate::gpu) &'static str,
    pub(in crate::gpu) Option<DeviceAddress>,
    pub(in crate::gpu) Known,
);

/// What a plan makes of a list.
#[derive(Clone, Copy, PartialEq)]
pub(in crate::gpu) enum Known {
    Needed,
    Optional,
    No,
}

impl List {
    /// Refuses a list that is missing, not expected or not aligned.
    pub(in crate::gpu) fn validate(self) -> Result<(), GpuError> {
        let List(tensor, given, known) = self;
        let reason = match given {
            None if known == Known::Needed => "it is missing".to_owned(),
            Some(_) if known == Known::No => "the plan knows of none".to_owned(),
            Some(address) if !address.0.is_multiple_of(4) => {
                format!("its address {address} is not a multiple of 4")
            }
            _ => return Ok(()),
        };
        Err(GpuError::Tensor { tensor, reason })
    }
}

impl Known {
    /// Needed if the plan has it, else unknown.
    pub(in crate::gpu) fn needed_if(it: bool) -> Self {
        if it { Known::Needed } else { Known::No }
    }

    /// Optional if the plan could use it, else unknown.
    pub(in crate::gpu) fn optional_if(it: bool) -> Self {
        if it { Known::Optional } else { Known::No }
    }
}
