//! Appending to a KV cache on the device: one launch writes new keys and values behind each
//! sequence, and rotates the new keys and the queries that will attend to them (rotary embedding).

use std::sync::Arc;

use cuda::{DeviceAddress, Stream};
use kernels::append::{Append, Rotary};
use kernels::parameter::{List, Number, Tensor};
use kernels::{Cache, Configuration};
use ptx::{Capability, Element};

use super::executable::{Addresses, Executable, Part};
use super::plans::Kept;
use super::{Chip, DeviceTensor, Gpu, GpuError};
use crate::family::{Choice, check_positions, narrow_cache};
use crate::plan::{Arrangement, Launch, Source, Value, arrangement, axis_of, bind_with};
use crate::problem::{Descale, MOST_HEAD_DIM, Mask, Problem};
use crate::serving::ServingError;
use crate::tensor::Strides;

/// Description of an append: the cache, and upper bounds on what a launch appends to it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AppendProblem {
    /// The cache, and the queries that will attend to it: heads, dims, storage and mask.
    pub cache: Problem,
    /// Maximum number of new tokens per sequence.
    pub new_tokens: usize,
    /// Rows of a batch entry of the new keys and values; all rows, where they are packed.
    pub new_rows: usize,
    /// Whether new keys and values are packed: all sequences one after the other in one batch
    /// entry.
    pub packed_new: bool,
    /// How new keys are rotated; not at all when `None`.
    pub rotary: Option<RotarySize>,
    /// Whether queries are rotated as well. Under a mask, query `i` of a sequence has the position
    /// of its new key `i`; without one, all queries have the position of the first new key.
    pub rotated_queries: bool,
}

/// A rotary embedding by tables on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RotarySize {
    /// Number of leading columns that are rotated; the others are copied.
    pub dim: usize,
    /// Whether adjacent columns form a pair; otherwise columns `i` and `dim / 2 + i` do.
    pub interleaved: bool,
    /// Number of positions in the tables. Later positions use the angles of the last one.
    pub positions: usize,
}

impl AppendProblem {
    /// Describes up to `new_tokens` new tokens for each sequence, each sequence in its own batch
    /// entry of the new keys and values.
    pub fn new(cache: Problem, new_tokens: usize) -> Self {
        AppendProblem {
            cache,
            new_tokens,
            new_rows: new_tokens,
            packed_new: false,
            rotary: None,
            rotated_queries: false,
        }
    }

    /// Packs the new keys and values of all sequences into `rows` rows.
    pub fn with_packed_new(self, rows: usize) -> Self {
        AppendProblem { packed_new: true, new_rows: rows, ..self }
    }

    /// Rotates new keys.
    pub fn with_rotary(self, dim: usize, interleaved: bool, positions: usize) -> Self {
        AppendProblem { rotary: Some(RotarySize { dim, interleaved, positions }), ..self }
    }

    /// Rotates queries as well.
    pub fn with_rotated_queries(self) -> Self {
        AppendProblem { rotated_queries: true, ..self }
    }

    /// Returns the element type of the new rows and the description of the cache's elements.
    fn elements(&self) -> Result<(Element, Cache), String> {
        let dtypes = self.cache.dtypes;
        if dtypes.key.is_8_bit() || dtypes.value.is_8_bit() {
            return narrow_cache(&self.cache);
        }
        let dtype = dtypes.uniform()?;
        match dtype.element() {
            element @ (Element::F16 | Element::BF16) => Ok((element, Cache::plain(element))),
            _ => Err(format!("caches are in f16 or bf16, not {dtype}")),
        }
    }

    /// Returns the launch, or why there is none.
    pub fn choose(&self, chip: &Chip) -> Result<Choice, GpuError> {
        const MOST: usize = i32::MAX as usize / 2;
        let refuse = |reason: String| Err(GpuError::Unsupported { kernel: "append", reason });
        let cache = &self.cache;
        if let Err(error) = cache.validate() {
            return refuse(error.to_string());
        }
        if !chip.target.has(Capability::AsyncCopies) {
            return refuse(format!("{} is older than sm_80", chip.target));
        }
        if cache.keys.is_packed() {
            return refuse("packed keys have no room for more".to_owned());
        }
        if self.new_tokens == 0 || cache.batch == 0 {
            return refuse("there are no new tokens".to_owned());
        }
        if cache.entries() == 0 {
            return refuse("the cache has no batch entries".to_owned());
        }
        let (element, made_of) = match check_positions(cache).and_then(|()| self.elements()) {
            Ok(elements) => elements,
            Err(reason) => return refuse(reason),
        };
        if !made_of.is_converted_by(chip.target) {
            return refuse(format!("{} does not convert {}", chip.target, made_of.element));
        }
        for dim in [cache.head_dim, cache.value_head_dim] {
            if !dim.is_multiple_of(2) || dim > MOST_HEAD_DIM {
                return refuse(format!("head dim {dim} is not even or beyond {MOST_HEAD_DIM}"));
            }
        }
        let head_dim = cache.head_dim;
        let positions = match self.rotary {
            None if self.rotated_queries => {
                return refuse("queries are rotated by embeddings, and there are none".to_owned());
            }
            None => 0,
            Some(RotarySize { dim, .. }) if dim == 0 || dim % 2 != 0 || dim > head_dim => {
                return refuse(ServingError::RotaryDim { given: dim, head_dim }.to_string());
            }
            Some(RotarySize { dim, interleaved: false, .. })
                if made_of.is_8_bit() && dim % 4 != 0 =>
            {
                return refuse(format!("halves of a rotary dim of {dim} are not even"));
            }
            Some(RotarySize { positions: 0, .. }) => {
                return refuse("the rotary tables have no positions".to_owned());
            }
            Some(RotarySize { positions, .. }) => positions,
        };
        let all_rows = |packed: Option<usize>, most: usize, heads: usize| {
            packed.or(cache.batch.checked_mul(most)).and_then(|rows| rows.checked_mul(heads))
        };
        let packed_new = self.packed_new.then_some(self.new_rows);
        // A warp of each sequence stores its length.
        let new = all_rows(packed_new, self.new_tokens, cache.kv_heads);
        let new = new.map(|rows| rows.max(cache.batch));
        let query_rows = cache.query_shape().length;
        let packed_queries = cache.queries.is_packed().then_some(query_rows);
        let rotated = match self.rotated_queries {
            true => all_rows(packed_queries, cache.query_length, cache.query_heads),
            false => Some(0),
        };
        // Packed sequences may be said to have more tokens than there are rows.
        let AppendProblem { new_tokens, new_rows, .. } = *self;
        let largest = new_tokens.max(new_rows).max(positions).max(query_rows);
        let [new, rotated] = [new, rotated].map(|rows| rows.filter(|rows| *rows <= MOST));
        let (Some(new), Some(rotated), 0..=MOST) = (new, rotated, largest) else {
            return Err(GpuError::TooLarge { what: "the number of new rows" });
        };
        let append = Append {
            target: chip.target,
            element,
            cache: made_of,
            head_dim: cache.head_dim as u32,
            value_head_dim: cache.value_head_dim as u32,
            paged: cache.keys.is_paged(),
            rotary: self
                .rotary
                .map(|RotarySize { dim, interleaved, .. }| Rotary { dim: dim as u32, interleaved }),
        };
        let numbers = [
            (Number::AllNewRows, new),
            (Number::AllRotatedRows, rotated),
            (Number::NewRows, new_rows),
            (Number::NewTokens, new_tokens),
            (Number::RotaryPositions, positions),
            (Number::QueryStep, usize::from(cache.mask != Mask::NONE)),
        ];
        let blocks = append.blocks((new + rotated) as u32);
        let mut choice = Choice::of(Configuration::Append(append), blocks, "");
        choice.launches[0].numbers = numbers.map(|(number, value)| (number, value as u32)).to_vec();
        Ok(choice)
    }
}

/// The tensors and lists of one append, on the device. Lists hold one 32-bit number per sequence,
/// lists of starts one more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct AppendTensors {
    /// New keys, (sequences, new tokens, key heads, dim), or packed into one batch entry.
    pub new_key: DeviceTensor,
    /// New values, stored like the new keys.
    pub new_value: DeviceTensor,
    /// Cache of keys, (batch entries or pages, positions, key heads, dim).
    pub key: DeviceTensor,
    /// Cache of values.
    pub value: DeviceTensor,
    /// Number of keys of each sequence before the append, left padding included; zero without the
    /// list.
    pub key_lengths: Option<DeviceAddress>,
    /// Receives the lengths with the new tokens, which the following attention reads. It must not
    /// be the memory of `key_lengths`.
    pub lengths_after: Option<DeviceAddress>,
    /// Start of each sequence's new tokens, and the end of the last, where they are packed. Starts
    /// must not decrease: each row looks for its sequence among them.
    pub new_starts: Option<DeviceAddress>,
    /// Number of new tokens of each sequence; without the list, all rows of the sequence are new.
    pub new_lengths: Option<DeviceAddress>,
    /// Batch entry of each sequence; without the list, sequence `i` has entry `i`. Not for pages.
    pub batch_index: Option<DeviceAddress>,
    /// Pages of each sequence, one row per sequence.
    pub block_table: Option<DeviceAddress>,
    /// Descale factors of an 8-bit cache of keys: read, where they are per sequence and key head;
    /// computed and written here, where they are per token.
    pub key_descale: Option<DeviceTensor>,
    /// Descale factors of the values, likewise.
    pub value_descale: Option<DeviceTensor>,
    /// Rotary tables, where new keys are rotated.
    pub rotary: Option<RotaryTables>,
    /// Queries to be rotated, where there are any.
    pub queries: Option<RotatedQueries>,
}

/// Rotary tables: `dim / 2` angles per position, in the element type of the keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RotaryTables {
    /// Cosines of the angles.
    pub cosines: DeviceAddress,
    /// Sines of the angles.
    pub sines: DeviceAddress,
    /// Position of each sequence's first new token, for its angle; without the list, its length
    /// before the append.
    pub starts: Option<DeviceAddress>,
}

/// Queries to be rotated, of the shape that the attention problem has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RotatedQueries {
    /// The queries.
    pub from: DeviceTensor,
    /// Receives the rotated queries; may be the same memory.
    pub to: DeviceTensor,
    /// Start of each sequence's queries, and the end of the last, where they are packed. They must
    /// not decrease either.
    pub starts: Option<DeviceAddress>,
    /// Number of queries of each sequence; without the list, all rows of the sequence are queries.
    pub lengths: Option<DeviceAddress>,
}

/// The tensors whose strides a plan depends on.
const TENSORS: [Tensor; 8] = [
    Tensor::NewKey,
    Tensor::NewValue,
    Tensor::Key,
    Tensor::Value,
    Tensor::Query,
    Tensor::RotatedQuery,
    Tensor::KeyDescale,
    Tensor::ValueDescale,
];

impl AppendTensors {
    /// Takes tensors, without any list.
    pub fn new([new_key, new_value, key, value]: [DeviceTensor; 4]) -> Self {
        AppendTensors { new_key, new_value, key, value, ..AppendTensors::default() }
    }

    /// Returns a tensor. Tensors that the call does not have are replaced by the new keys: their
    /// parameters need an address, but the kernel does not use it.
    fn tensor(&self, tensor: Tensor) -> DeviceTensor {
        match tensor {
            Tensor::NewKey => self.new_key,
            Tensor::NewValue => self.new_value,
            Tensor::Key => self.key,
            Tensor::Value => self.value,
            Tensor::KeyDescale => self.key_descale.unwrap_or(self.new_key),
            Tensor::ValueDescale => self.value_descale.unwrap_or(self.new_key),
            Tensor::Query => self.queries.map_or(self.new_key, |queries| queries.from),
            _ => self.queries.map_or(self.new_key, |queries| queries.to),
        }
    }

    /// Returns the arguments of a launch, with symbolic addresses.
    pub fn bind(
        &self,
        problem: &AppendProblem,
        launch: &Launch,
        declared: &[ptx::Parameter],
    ) -> Result<Vec<Value>, String> {
        bind_append(launch, declared, problem, &self.strides())
    }

    fn strides(&self) -> [Strides; 8] {
        TENSORS.map(|tensor| self.tensor(tensor).strides)
    }

    /// Refuses invalid addresses, strides and lists, as far as the host can tell.
    fn validate(&self, problem: &AppendProblem) -> Result<(), GpuError> {
        let refuse =
            |tensor, reason: &str| Err(GpuError::Tensor { tensor, reason: reason.to_owned() });
        let Problem { dtypes, descales, .. } = problem.cache;
        for tensor in TENSORS {
            // The kernel copies two elements, or one factor, at a time.
            let (bytes, together) = match tensor {
                Tensor::Key => (dtypes.key.bytes(), 2),
                Tensor::Value => (dtypes.value.bytes(), 2),
                Tensor::KeyDescale if self.key_descale.is_some() => (4, 1),
                Tensor::ValueDescale if self.value_descale.is_some() => (4, 1),
                _ => (dtypes.query.bytes(), 2),
            };
            self.tensor(tensor).aligned(arrangement::name(tensor), bytes, together * bytes)?;
        }
        let given = [
            ("table of angles", self.rotary.is_some(), problem.rotary.is_some()),
            ("query", self.queries.is_some(), problem.rotated_queries),
            ("list of new starts", self.new_starts.is_some(), problem.packed_new),
            ("block table", self.block_table.is_some(), problem.cache.keys.is_paged()),
            ("key descale", self.key_descale.is_some(), descales.key != Descale::None),
            ("value descale", self.value_descale.is_some(), descales.value != Descale::None),
        ];
        for (name, given, expected) in given {
            match (given, expected) {
                (false, true) => return refuse(name, "it is missing"),
                (true, false) => return refuse(name, "the plan knows of none"),
                _ => {}
            }
        }
        let starts = self.queries.and_then(|queries| queries.starts);
        if problem.rotated_queries && problem.cache.queries.is_packed() != starts.is_some() {
            return refuse("list of query starts", "it goes with packed queries");
        }
        if self.batch_index.is_some() && problem.cache.keys.is_paged() {
            return refuse("batch index", "the cache is in pages");
        }
        if self.lengths_after.is_some() && self.lengths_after == self.key_lengths {
            return refuse("list of lengths after", "it is the list of lengths before");
        }
        Ok(())
    }
}

impl Addresses for AppendTensors {
    fn address(&self, source: Source) -> Option<DeviceAddress> {
        let AppendTensors { rotary, queries, .. } = self;
        match source {
            Source::Tensor(tensor) => Some(self.tensor(tensor).address),
            Source::List(list) => match list {
                List::KeyLengths => self.key_lengths,
                List::LengthsAfter => self.lengths_after,
                List::NewStarts => self.new_starts,
                List::NewLengths => self.new_lengths,
                List::BatchIndex => self.batch_index,
                List::BlockTable => self.block_table,
                List::Cosines => rotary.map(|rotary| rotary.cosines),
                List::Sines => rotary.map(|rotary| rotary.sines),
                List::RotaryStarts => rotary.and_then(|rotary| rotary.starts),
                List::QueryStarts => queries.and_then(|queries| queries.starts),
                List::QueryLengths => queries.and_then(|queries| queries.lengths),
                _ => None,
            },
            Source::Workspace(_) | Source::Captured(..) | Source::Nothing => None,
        }
    }
}

/// A plan for appending new keys and values to the sequences of a cache: everything that depends
/// neither on addresses nor on the current lengths.
///
/// A launch neither allocates nor synchronizes, and its grid does not depend on the lengths, so a
/// captured CUDA graph stays valid as sequences grow. Rows for which a sequence has no room are not
/// written; invalid entries of lists and tables never reach outside of the cache. Without rotary
/// embeddings, and into a cache of the same element type, rows are copied bit for bit.
///
/// The plan must outlive its launches and the graphs that captured them; [`Gpu::append`] keeps
/// plans for that long.
///
/// ```no_run
/// use flashcore::gpu::{AppendProblem, AppendTensors, Gpu, Stream};
/// use flashcore::{DType, Error, Mask, Problem, Storage};
///
/// # fn step(gpu: &Gpu, stream: &Stream, tensors: AppendTensors) -> Result<(), Error> {
/// // A token for each of 64 sequences, into 4096 pages of 64 positions, 128 at most for each; keys
/// // and queries rotated by angles from tables for 8192 positions.
/// let pages = Storage::Paged { size: 64, columns: 128, pages: 4096 };
/// let cache = Problem::new(64, 32, 1, 128)
///     .with_kv_heads(8)
///     .with_key_length(64 * 128)
///     .with_dtype(DType::BF16)
///     .with_mask(Mask::CAUSAL)
///     .with_storage(Storage::Padded, pages);
/// let problem =
///     AppendProblem::new(cache, 1).with_rotary(128, false, 8192).with_rotated_queries();
/// gpu.append(stream, &problem, &tensors)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AppendPlan {
    problem: AppendProblem,
    executable: Executable,
}

/// What a plan depends on: two appends with the same key differ only in addresses.
pub(super) type Key = (AppendProblem, [Strides; 8]);

impl AppendPlan {
    fn new(gpu: &Gpu, (problem, strides): &Key) -> Result<Self, GpuError> {
        let choice = problem.choose(&gpu.chip())?;
        let executable = Executable::new(gpu, &choice, |launch, declared| {
            bind_append(launch, declared, problem, strides)
        })?;
        Ok(AppendPlan { problem: problem.clone(), executable })
    }

    /// Enqueues the append on a stream of the plan's device. Neither allocates nor synchronizes.
    ///
    /// The caller is responsible for valid addresses: a fault on the device is reported by the
    /// stream when it is next waited for.
    pub fn launch(&self, stream: &Stream, tensors: &AppendTensors) -> Result<(), GpuError> {
        tensors.validate(&self.problem)?;
        self.executable.launch(stream, Part::All, tensors)
    }
}

fn bind_append(
    launch: &Launch,
    declared: &[ptx::Parameter],
    problem: &AppendProblem,
    strides: &[Strides; 8],
) -> Result<Vec<Value>, String> {
    let others = |tensor: Tensor, axis| {
        let index = TENSORS.iter().position(|it| *it == tensor)?;
        let packed = match tensor {
            Tensor::NewKey | Tensor::NewValue => problem.packed_new,
            Tensor::Query | Tensor::RotatedQuery => problem.cache.queries.is_packed(),
            _ => false,
        };
        let batch = if packed { 0 } else { strides[index].batch };
        Some(axis_of(Strides { batch, ..strides[index] }, axis))
    };
    bind_with(launch, declared, &problem.cache, &Arrangement::default(), &others)
}

impl Kept for AppendPlan {
    fn device_bytes(&self) -> u64 {
        self.executable.device_bytes()
    }

    fn is_captured(&self) -> bool {
        self.executable.is_captured()
    }
}

impl Gpu {
    /// Enqueues an append on a stream, with the cached plan for such calls.
    pub fn append(
        &self,
        stream: &Stream,
        problem: &AppendProblem,
        tensors: &AppendTensors,
    ) -> Result<Arc<AppendPlan>, GpuError> {
        tensors.validate(problem)?;
        let key = (problem.clone(), tensors.strides());
        let plan = self.appending.find_or_make(key, |key| AppendPlan::new(self, key))?;
        plan.launch(stream, tensors)?;
        Ok(plan)
    }
}

#[cfg(test)]
mod tests {
    use kernels::append::ROWS;
    use ptx::Target;

    use super::*;
    use crate::dtype::DType;
    use crate::problem::{Descales, Storage};

    /// Packed rows are counted once, and not for each sequence; each sequence has a warp.
    #[test]
    fn packed_rows_are_as_many_as_there_are() {
        let cache = Problem::new(1024, 8, 1, 64).with_key_length(1 << 20);
        let blocks = |problem: AppendProblem| {
            problem.choose(&Chip::H200).map(|choice| choice.launches[0].blocks as usize)
        };
        let rows = 131_072;
        let packed = |rows| AppendProblem::new(cache.clone(), rows).with_packed_new(rows);
        assert_eq!(blocks(packed(rows)).unwrap(), rows * 8 / ROWS as usize);
        assert_eq!(blocks(packed(1)).unwrap(), 1024 / ROWS as usize);
        assert!(matches!(
            blocks(AppendProblem::new(cache.clone(), rows)),
            Err(GpuError::TooLarge { .. })
        ));
    }

    /// Lengths that kernels would read as negative numbers, or cut off, though few rows are packed.
    #[test]
    fn lengths_beyond_what_kernels_count_are_refused() {
        let cache = |keys| Problem::new(2, 8, 1, 64).with_key_length(keys);
        let choose = |cache: Problem, new_tokens| {
            AppendProblem::new(cache, new_tokens).with_packed_new(4).choose(&Chip::H200)
        };
        assert!(choose(cache(1 << 20), 1 << 20).is_ok());
        for new_tokens in [1 << 31, 1 << 32] {
            let refused = choose(cache(1 << 20), new_tokens);
            assert!(matches!(refused, Err(GpuError::TooLarge { .. })), "{new_tokens}");
        }
        let long = "the append kernel does not serve this problem: \
                    a length of 2147483648 is more than 536870912";
        assert_eq!(choose(cache(1 << 31), 1).unwrap_err().to_string(), long);
        let entries = cache(100).with_storage(Storage::Padded, Storage::Entries(1 << 31));
        let many = choose(entries, 1).unwrap_err().to_string();
        assert!(
            many.ends_with("2147483648 batch entries or pages are more than 2147483647"),
            "{many}"
        );
        let queries = Problem { query_length: 1 << 31, ..cache(1 << 20) };
        let queries = queries.with_storage(Storage::Packed(2), Storage::Padded);
        assert_eq!(choose(queries, 1).unwrap_err().to_string(), long);
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_the_reason() {
        let cache = || Problem::new(2, 4, 1, 64).with_key_length(100);
        let refusal =
            |problem: &AppendProblem| problem.choose(&Chip::H200).unwrap_err().to_string();
        let prefix = "the append kernel does not serve this problem: ";
        let one = || AppendProblem::new(cache(), 1);
        for (problem, reason) in [
            (AppendProblem::new(cache(), 0), "there are no new tokens"),
            (one().with_rotated_queries(), "queries are rotated by embeddings, and there are none"),
            (
                one().with_rotary(66, false, 9),
                "a rotary dim of 66 is not even, or not from 2 to the head dim 64",
            ),
            (one().with_rotary(64, false, 0), "the rotary tables have no positions"),
            (
                AppendProblem::new(cache().with_storage(Storage::Padded, Storage::Packed(100)), 1),
                "packed keys have no room for more",
            ),
            (
                AppendProblem::new(cache().with_storage(Storage::Padded, Storage::Entries(0)), 1),
                "the cache has no batch entries",
            ),
        ] {
            assert_eq!(refusal(&problem), format!("{prefix}{reason}"));
        }
        let old = one().choose(&Chip::typical(Target::SM_75)).unwrap_err().to_string();
        assert_eq!(old, format!("{prefix}sm_75 is older than sm_80"));
    }

    /// Every parameter of every variant of the kernel gets an argument of its type.
    #[test]
    fn every_parameter_is_known() {
        let cache = Problem::new(2, 6, 1, 64).with_kv_heads(2).with_key_length(640);
        let pages = Storage::Paged { size: 16, columns: 40, pages: 90 };
        let paged = cache.clone().with_storage(Storage::Padded, pages);
        let narrow = |descale| {
            let narrow = paged.clone().with_kv_dtype(DType::E4M3);
            narrow.with_descales(Descales::of_cache(descale))
        };
        let [of_heads, of_tokens] = [Descale::PerHead, Descale::PerToken].map(narrow);
        for cache in [cache, paged, of_heads, of_tokens] {
            let plain = AppendProblem::new(cache, 3);
            let rotated = plain.clone().with_rotary(32, true, 700).with_rotated_queries();
            for problem in [plain, rotated] {
                let choice = problem.choose(&Chip::typical(Target::SM_89)).unwrap();
                let declared = choice.kernel().program().unwrap().parameters;
                let strides = [Strides::default(); 8];
                bind_append(&choice.launches[0], &declared, &problem, &strides).unwrap();
            }
        }
    }
}
