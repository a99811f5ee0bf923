//! New keys and values into a cache that is on the device, in one launch with the rotary embedding
//! of the new keys and of the queries that will look at them.

use std::sync::Arc;

use cuda::{DeviceAddress, Stream};
use kernels::append::{Append, Rotary};
use kernels::parameter::{List, Number, Tensor};
use kernels::{Cache, Configuration};
use ptx::{Capability, Element};

use super::executable::{Addresses, Executable, Part};
use super::plans::Kept;
use super::{Chip, DeviceTensor, Gpu, GpuError};
use crate::family::{Choice, narrow_cache};
use crate::plan::{Arrangement, Launch, Source, Value, arrangement, axis_of, bind_with};
use crate::problem::{Descale, Descales, Mask, Problem};
use crate::serving::ServingError;
use crate::tensor::Strides;

/// What is appended to which cache: the most that a launch will ask for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AppendProblem {
    /// The cache, and the queries that will look at it: heads, dims and storage.
    pub cache: Problem,
    /// The most new tokens of a sequence.
    pub new_tokens: usize,
    /// Rows of a batch entry of the new keys and values: all rows, where they are packed.
    pub new_rows: usize,
    /// Whether new keys and values are packed: sequence after sequence in one batch entry.
    pub packed_new: bool,
    /// How new keys are rotated.
    pub rotary: Option<RotarySize>,
    /// Whether queries are rotated as well. Where the mask hides something, query `i` of a sequence
    /// stands at the position of its new key `i`; where it hides nothing, all stand at the first.
    pub rotated_queries: bool,
}

/// Rotary embeddings, by tables on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RotarySize {
    /// The first so many columns are rotated, the others stay.
    pub dim: usize,
    /// Whether neighbours are pairs; else column `i` and column `dim / 2 + i`.
    pub interleaved: bool,
    /// Positions of the tables. What stands beyond is rotated as the last.
    pub positions: usize,
}

impl AppendProblem {
    /// Up to so many new tokens for each sequence of a cache, in a batch entry for each.
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

    /// The same with new keys and values packed into so many rows.
    pub fn with_packed_new(self, rows: usize) -> Self {
        AppendProblem { packed_new: true, new_rows: rows, ..self }
    }

    /// The same with new keys rotated.
    pub fn with_rotary(self, dim: usize, interleaved: bool, positions: usize) -> Self {
        AppendProblem { rotary: Some(RotarySize { dim, interleaved, positions }), ..self }
    }

    /// The same with queries rotated as well.
    pub fn with_rotated_queries(self) -> Self {
        AppendProblem { rotated_queries: true, ..self }
    }

    /// The element of what is new, and what the cache is made of.
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

    /// What runs, or why nothing does.
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
        let (element, made_of) = match self.elements() {
            Ok(elements) => elements,
            Err(reason) => return refuse(reason),
        };
        if !made_of.is_converted_by(chip.target) {
            return refuse(format!("{} does not convert {}", chip.target, made_of.element));
        }
        for dim in [cache.head_dim, cache.value_head_dim] {
            if !dim.is_multiple_of(2) {
                return refuse(format!("head dim {dim} is not even"));
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
                if made_of.is_narrow() && dim % 4 != 0 =>
            {
                return refuse(format!("halves of a rotary dim of {dim} are not even"));
            }
            Some(RotarySize { positions: 0, .. }) => {
                return refuse("the rotary tables have no positions".to_owned());
            }
            Some(RotarySize { positions, .. }) => positions,
        };
        let all_rows = |tokens: usize, heads: usize| {
            cache.batch.checked_mul(tokens).and_then(|rows| rows.checked_mul(heads))
        };
        let new = all_rows(self.new_tokens, cache.kv_heads);
        let rotated = match self.rotated_queries {
            true => all_rows(cache.query_length, cache.query_heads),
            false => Some(0),
        };
        let query_rows = cache.query_shape().length;
        let counted = [new, rotated, Some(self.new_rows), Some(positions), Some(query_rows)];
        let counted = counted.map(|count| count.filter(|count| *count <= MOST));
        let [Some(new), Some(rotated), Some(new_rows), Some(positions), Some(_)] = counted else {
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
            (Number::NewTokens, self.new_tokens),
            (Number::RotaryPositions, positions),
            (Number::QueryStep, usize::from(cache.mask != Mask::NONE)),
        ];
        let blocks = append.blocks((new + rotated) as u32);
        let mut choice = Choice::of(Configuration::Append(append), blocks, "");
        choice.launches[0].numbers = numbers.map(|(number, value)| (number, value as u32)).to_vec();
        Ok(choice)
    }
}

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
    pub key_lengths: Option<DeviceAddress>,
    /// Where the lengths with the new tokens go: what the attention that follows takes. Not the
    /// memory of `key_lengths`.
    pub lengths_after: Option<DeviceAddress>,
    /// Where each sequence's new tokens begin, and where the last end: packed.
    pub new_starts: Option<DeviceAddress>,
    /// New tokens of each sequence; without, as many as its place has.
    pub new_lengths: Option<DeviceAddress>,
    /// The batch entry of each sequence; its index without. Not with pages.
    pub batch_index: Option<DeviceAddress>,
    /// The pages of each sequence, row after row.
    pub block_table: Option<DeviceAddress>,
    /// The descale factors of an 8-bit cache of keys: given for each sequence and key head, or
    /// found for each token and written here.
    pub key_descale: Option<DeviceTensor>,
    /// Those of values.
    pub value_descale: Option<DeviceTensor>,
    /// The angles of positions.
    pub rotary: Option<RotaryTables>,
    /// Queries to be rotated.
    pub queries: Option<RotatedQueries>,
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
pub struct RotatedQueries {
    /// The queries.
    pub from: DeviceTensor,
    /// Where they go; may be where they are.
    pub to: DeviceTensor,
    /// Where each sequence's queries begin, and where the last end: packed queries.
    pub starts: Option<DeviceAddress>,
    /// Queries of each sequence; without, as many as its place has.
    pub lengths: Option<DeviceAddress>,
}

/// The tensors of a launch.
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
    /// Tensors without lists.
    pub fn new([new_key, new_value, key, value]: [DeviceTensor; 4]) -> Self {
        AppendTensors {
            new_key,
            new_value,
            key,
            value,
            key_lengths: None,
            lengths_after: None,
            new_starts: None,
            new_lengths: None,
            batch_index: None,
            block_table: None,
            key_descale: None,
            value_descale: None,
            rotary: None,
            queries: None,
        }
    }

    /// A tensor; where no queries are rotated or nothing is scaled, something in their place.
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

    /// What a launch is passed, whatever the addresses.
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

    /// Refuses what can be seen from the host.
    fn validate(&self, problem: &AppendProblem) -> Result<(), GpuError> {
        let refuse =
            |tensor, reason: &str| Err(GpuError::Tensor { tensor, reason: reason.to_owned() });
        let Problem { dtypes, descales, .. } = problem.cache;
        for tensor in TENSORS {
            // Two elements are copied at a time, and one factor.
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

/// Writing new keys and values behind the sequences of a cache: everything that does not depend on
/// where tensors are and how long sequences have become.
///
/// A launch neither allocates nor waits, and has the same shape whatever the lengths are: a CUDA
/// graph that captured it is right for all of them. What a sequence has no room for is not written;
/// nonsense in lists and tables stays inside the cache. Without rotary embeddings the bits are those
/// given.
///
/// The plan must outlive its launches, and graphs that captured them; [`Gpu::append`] keeps plans.
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

/// What a plan depends on.
pub(super) type Key = (AppendProblem, [Strides; 8]);

impl AppendPlan {
    fn new(gpu: &Gpu, (problem, strides): &Key) -> Result<Self, GpuError> {
        let choice = problem.choose(&gpu.chip())?;
        let executable = Executable::new(gpu, &choice, |launch, declared| {
            bind_append(launch, declared, problem, strides)
        })?;
        Ok(AppendPlan { problem: problem.clone(), executable })
    }

    /// Puts it on a stream of the plan's device. Neither allocates nor waits.
    ///
    /// That the addresses are right is the caller's business: what goes wrong on the device is
    /// reported by the stream, when it is next waited for.
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
    let nothing = Arrangement {
        query: Strides::default(),
        key: Strides::default(),
        value: Strides::default(),
        output: Strides::default(),
        gradients: None,
        descales: Descales::default(),
        aligned: true,
    };
    bind_with(launch, declared, &problem.cache, &nothing, &others)
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
    /// Puts appending on a stream, by the plan that is kept for such calls.
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
    use ptx::Target;

    use super::*;
    use crate::dtype::DType;
    use crate::problem::Storage;

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

    /// Every parameter of every shape of the kernel gets an argument of its kind.
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
