//! What a launch of the append kernel reads and writes.

use cuda::DeviceAddress;

use super::AppendSize;
use crate::gpu::serving::{Known, List};
use crate::gpu::{DeviceTensor, GpuError};

/// What one launch reads and writes. Lists have a 32-bit number for each sequence, starts one more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AppendTensors {
    /// The new keys, (sequences, new tokens, key heads, dim), or packed into one batch entry.
    pub new_key: DeviceTensor,
    /// The new values.
    pub new_value: DeviceTensor,
    /// The cache of keys, (batch entries or pages, positions, key heads, dim).
    pub key: DeviceTensor,
    /// The cache of values.
    pub value: DeviceTensor,
    /// Keys of each sequence before, left padding included; none without.
    pub lengths: Option<DeviceAddress>,
    /// Where the lengths with the new tokens go: what the attention that follows takes. Not the
    /// memory of `lengths`.
    pub lengths_after: Option<DeviceAddress>,
    /// Where each sequence's new tokens begin, and where the last end: packed.
    pub new_starts: Option<DeviceAddress>,
    /// New tokens of each sequence; without, as many as its place has.
    pub new_lengths: Option<DeviceAddress>,
    /// The batch entry of each sequence; its index without. Not with pages.
    pub entries: Option<DeviceAddress>,
    /// The pages of each sequence, row after row.
    pub block_table: Option<DeviceAddress>,
    /// The angles of positions.
    pub rotary: Option<RotaryTables>,
    /// Queries to be turned.
    pub queries: Option<TurnedQueries>,
}

/// Tables of angles, `dim / 2` for each position, in the element of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RotaryTables {
    /// The cosines.
    pub cosines: DeviceAddress,
    /// The sines.
    pub sines: DeviceAddress,
    /// The position of each sequence's first new token for its angle; its length before, without.
    pub starts: Option<DeviceAddress>,
}

/// Queries of the shape that the attention plan has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TurnedQueries {
    /// The queries.
    pub from: DeviceTensor,
    /// Where they go; may be where they are.
    pub to: DeviceTensor,
    /// Where each sequence's queries begin, and where the last end: packed queries.
    pub starts: Option<DeviceAddress>,
    /// Queries of each sequence; without, as many as its place has.
    pub lengths: Option<DeviceAddress>,
}

impl TurnedQueries {
    /// Queries without lists.
    pub fn new(from: DeviceTensor, to: DeviceTensor) -> Self {
        TurnedQueries { from, to, starts: None, lengths: None }
    }
}

/// The roles of tensors, in the order of [`AppendTensors::strided`].
const ROLES: [&str; 6] = ["new key", "new value", "key", "value", "query", "turned query"];

impl AppendTensors {
    /// Tensors without lists.
    pub fn new(
        new_key: DeviceTensor,
        new_value: DeviceTensor,
        key: DeviceTensor,
        value: DeviceTensor,
    ) -> Self {
        AppendTensors {
            new_key,
            new_value,
            key,
            value,
            lengths: None,
            lengths_after: None,
            new_starts: None,
            new_lengths: None,
            entries: None,
            block_table: None,
            rotary: None,
            queries: None,
        }
    }

    /// The same with a list of lengths.
    pub fn with_lengths(self, lengths: DeviceAddress) -> Self {
        AppendTensors { lengths: Some(lengths), ..self }
    }

    /// The same with a place for the lengths afterwards.
    pub fn with_lengths_after(self, lengths_after: DeviceAddress) -> Self {
        AppendTensors { lengths_after: Some(lengths_after), ..self }
    }

    /// The same with packed new tokens that begin there.
    pub fn with_new_starts(self, new_starts: DeviceAddress) -> Self {
        AppendTensors { new_starts: Some(new_starts), ..self }
    }

    /// The same with a list of how many new tokens each sequence has.
    pub fn with_new_lengths(self, new_lengths: DeviceAddress) -> Self {
        AppendTensors { new_lengths: Some(new_lengths), ..self }
    }

    /// The same with a list of batch entries.
    pub fn with_entries(self, entries: DeviceAddress) -> Self {
        AppendTensors { entries: Some(entries), ..self }
    }

    /// The same with a block table.
    pub fn with_block_table(self, block_table: DeviceAddress) -> Self {
        AppendTensors { block_table: Some(block_table), ..self }
    }

    /// The same with tables of angles.
    pub fn with_rotary(self, rotary: RotaryTables) -> Self {
        AppendTensors { rotary: Some(rotary), ..self }
    }

    /// The same with queries.
    pub fn with_queries(self, queries: TurnedQueries) -> Self {
        AppendTensors { queries: Some(queries), ..self }
    }

    /// All tensors; where no queries are turned, something in their place.
    pub(super) fn strided(&self, size: &AppendSize) -> [DeviceTensor; 6] {
        let packed_queries = size.serving.packed_queries;
        let [from, to] = self.queries.map_or([self.new_key; 2], |queries| {
            [queries.from, queries.to].map(|tensor| tensor.packed(packed_queries))
        });
        let [new_key, new_value] =
            [self.new_key, self.new_value].map(|tensor| tensor.packed(size.packed_new));
        [new_key, new_value, self.key, self.value, from, to]
    }

    /// Refuses what can be seen from the host.
    pub(super) fn validate(&self, size: &AppendSize) -> Result<(), GpuError> {
        let refuse =
            |tensor, reason: &str| Err(GpuError::Tensor { tensor, reason: reason.to_owned() });
        for (role, tensor) in ROLES.into_iter().zip(self.strided(size)) {
            // Two elements are copied at a time.
            tensor.aligned(role, size.serving.problem.dtype.bytes(), 4)?;
        }
        match (self.rotary, size.rotary) {
            (None, Some(_)) => return refuse("table of angles", "it is missing"),
            (Some(_), None) => return refuse("table of angles", "the plan knows of none"),
            _ => {}
        }
        match (self.queries, size.turned_queries) {
            (None, true) => return refuse("query", "it is missing"),
            (Some(_), false) => return refuse("query", "the plan turns none"),
            _ => {}
        }
        if self.lengths_after.is_some() && self.lengths_after == self.lengths {
            return refuse("list of lengths after", "it is the list of lengths before");
        }
        let rotary_starts = self.rotary.and_then(|rotary| rotary.starts);
        let query_starts = self.queries.and_then(|queries| queries.starts);
        let query_lengths = self.queries.and_then(|queries| queries.lengths);
        let paged = size.serving.pages.is_some();
        let packed_queries = size.turned_queries && size.serving.packed_queries;
        let lists = [
            List("list of lengths", self.lengths, Known::Optional),
            List("list of lengths after", self.lengths_after, Known::Optional),
            List("list of new starts", self.new_starts, Known::needed_if(size.packed_new)),
            List("list of new lengths", self.new_lengths, Known::Optional),
            List("list of batch entries", self.entries, Known::optional_if(!paged)),
            List("block table", self.block_table, Known::needed_if(paged)),
            List("list of rotary starts", rotary_starts, Known::Optional),
            List("list of query starts", query_starts, Known::needed_if(packed_queries)),
            List("list of query lengths", query_lengths, Known::Optional),
        ];
        lists.into_iter().try_for_each(List::validate)
    }
}
