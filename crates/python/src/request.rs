//! The forward attention call: its tensors, checked, and the [`Problem`] that they pose. Every
//! front end (Python functions, PyTorch's dispatcher, XLA) builds a [`Request`]; `gpu` and `cpu`
//! run it.

use cuda::DeviceAddress;
use flashcore::gpu::Tensors;
use flashcore::{Alibi, DType, DTypes, Descale, Descales, Lists, Mask, Problem, Storage};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::descale::Factors;
use crate::error;
use crate::library::Named;
use crate::numbers::Numbers;
use crate::rules::Captured;
use crate::view::{Element, Form, Memory, Optional, Order, View};

/// The number of tensor arguments of an attention call, given or not.
pub(crate) const TENSORS: usize = 16;

/// The index of the tensor that the output is written to; backward calls have none.
pub(crate) const OUT: usize = 15;

/// The Python function that was called. Errors use its argument names, and the request follows its
/// conventions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Function {
    Plain,
    /// Queries, keys and values are packed into one tensor.
    QkvPacked,
    /// Keys and values are packed into one tensor.
    KvPacked,
    /// PyTorch's `scaled_dot_product_attention`: a causal mask is anchored at the first query and
    /// key, not at the last ones.
    PyTorch,
    /// `flex_attention`: PyTorch's conventions, with masks and scores given as functions.
    Flex,
    Varlen,
    VarlenQkvPacked,
    VarlenKvPacked,
    KvCache,
    /// FlashAttention-2's signature, which calls the page table `block_table`.
    KvCacheInBlocks,
}

/// A function, and whether it was called with `batch_invariant`. The textual name then ends in `,
/// batch_invariant`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Called {
    pub(crate) function: Function,
    pub(crate) batch_invariant: bool,
}

impl FromPyObject<'_, '_> for Called {
    type Error = PyErr;

    fn extract(name: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        Called::named(name.extract()?)
    }
}

impl Called {
    /// Parses a function name with its optional `, batch_invariant` suffix.
    pub(crate) fn named(name: &str) -> PyResult<Self> {
        let (name, batch_invariant) = match name.strip_suffix(", batch_invariant") {
            Some(name) => (name, true),
            None => (name, false),
        };
        Ok(Called { function: Function::named(name)?, batch_invariant })
    }
}

impl Function {
    /// Parses a function name.
    fn named(name: &str) -> PyResult<Self> {
        match name {
            "flash_attn_func" => Ok(Function::Plain),
            "flash_attn_qkvpacked_func" => Ok(Function::QkvPacked),
            "flash_attn_kvpacked_func" => Ok(Function::KvPacked),
            "scaled_dot_product_attention" => Ok(Function::PyTorch),
            "flex_attention" => Ok(Function::Flex),
            "flash_attn_varlen_func" => Ok(Function::Varlen),
            "flash_attn_varlen_qkvpacked_func" => Ok(Function::VarlenQkvPacked),
            "flash_attn_varlen_kvpacked_func" => Ok(Function::VarlenKvPacked),
            "flash_attn_with_kvcache" => Ok(Function::KvCache),
            "flash_attn_with_kvcache, block_table" => Ok(Function::KvCacheInBlocks),
            other => Err(error::value(format!("there is no function `{other}`"))),
        }
    }

    /// Returns the argument names of the tensors, in the order that [`Request::new`] reads them.
    pub(crate) fn names(self) -> &'static [&'static str; TENSORS] {
        const fn names_with(
            [query, key, value]: [&'static str; 3],
            [query_starts, key_starts]: [&'static str; 2],
            lengths: &'static str,
            pages: &'static str,
        ) -> [&'static str; TENSORS] {
            [
                query,
                key,
                value,
                query_starts,
                key_starts,
                "seqused_q",
                lengths,
                "cache_leftpad",
                "cache_batch_idx",
                pages,
                "alibi_slopes",
                "s_aux",
                "q_descale",
                "k_descale",
                "v_descale",
                "out",
            ]
        }
        const fn names(
            tensors: [&'static str; 3],
            lengths: &'static str,
            pages: &'static str,
        ) -> [&'static str; TENSORS] {
            names_with(tensors, ["cu_seqlens_q", "cu_seqlens_k"], lengths, pages)
        }
        const CACHE: [&str; 3] = ["q", "k_cache", "v_cache"];
        match self {
            Function::KvCache => const { &names(CACHE, "cache_seqlens", "page_table") },
            Function::KvCacheInBlocks => const { &names(CACHE, "cache_seqlens", "block_table") },
            Function::PyTorch | Function::Flex => {
                const { &names(["query", "key", "value"], "seqused_k", "block_table") }
            }
            Function::QkvPacked => {
                const { &names(["qkv", "qkv", "qkv"], "seqused_k", "block_table") }
            }
            // Queries and keys are packed together and share one list of cumulative lengths.
            Function::VarlenQkvPacked => {
                const { &names_with(["qkv"; 3], ["cu_seqlens"; 2], "seqused_k", "block_table") }
            }
            Function::KvPacked | Function::VarlenKvPacked => {
                const { &names(["q", "kv", "kv"], "seqused_k", "block_table") }
            }
            Function::Plain | Function::Varlen => {
                const { &names(["q", "k", "v"], "seqused_k", "block_table") }
            }
        }
    }

    /// Returns whether queries, keys and values may be packed into fewer tensors.
    pub(crate) fn is_packed(self) -> bool {
        use Function::{KvPacked, QkvPacked, VarlenKvPacked, VarlenQkvPacked};
        matches!(self, KvPacked | QkvPacked | VarlenKvPacked | VarlenQkvPacked)
    }

    /// Returns the argument names of the maximum query and key lengths.
    pub(crate) fn most_names(self) -> [&'static str; 2] {
        match self {
            Function::VarlenQkvPacked => ["max_seqlen"; 2],
            _ => ["max_seqlen_q", "max_seqlen_k"],
        }
    }

    /// Returns whether sequences may differ in length and storage (ragged batches and KV caches).
    fn has_sequences(self) -> bool {
        use Function::{KvCache, KvCacheInBlocks, Varlen, VarlenKvPacked, VarlenQkvPacked};
        matches!(self, Varlen | VarlenQkvPacked | VarlenKvPacked | KvCache | KvCacheInBlocks)
    }

    /// Returns the name of the flag that asks for the log-sum-exps.
    pub(crate) fn sums_name(self) -> &'static str {
        match self {
            Function::KvCache | Function::KvCacheInBlocks => "return_softmax_lse",
            Function::Flex => "return_lse",
            _ => "return_attn_probs",
        }
    }

    pub(crate) fn order(self, packed: bool) -> Order {
        match self {
            Function::PyTorch | Function::Flex => Order::HeadsFirst,
            _ => Order::of(packed),
        }
    }
}

/// The tensors and scalars of one attention call, read but not yet checked against each other:
/// [`Request::problem`] does that.
#[derive(Debug)]
pub(crate) struct Request {
    function: Function,
    /// The queries in the caller's dimension order.
    pub(crate) given: Memory,
    /// Packed (variable-length) queries, keys and values have one batch entry.
    pub(crate) query: View,
    pub(crate) key: View,
    pub(crate) value: View,
    pub(crate) query_starts: Optional,
    pub(crate) key_starts: Optional,
    pub(crate) query_lengths: Optional,
    pub(crate) key_lengths: Optional,
    pub(crate) left_padding: Optional,
    pub(crate) entries: Optional,
    pub(crate) pages: Optional,
    pub(crate) slopes: Optional,
    pub(crate) sinks: Optional,
    descales: Descales<Optional>,
    /// The mask and score functions of the call, and the tensors that they load from.
    pub(crate) captured: Captured,
    numbers: Numbers,
}

/// Pairs the tensors of a call with their argument names; `None` and missing ones stay empty.
#[inline]
pub(crate) fn named<'py, const COUNT: usize>(
    names: &[&'static str; COUNT],
    tensors: &Bound<'py, PyTuple>,
) -> PyResult<[Named<'py>; COUNT]> {
    // Trailing tensors may be left out.
    if tensors.len() > COUNT {
        let given = tensors.len();
        return Err(PyTypeError::new_err(format!("{given} tensors, expected {COUNT}")));
    }
    let mut named = names.map(|name| (name, None));
    for (to, tensor) in named.iter_mut().zip(tensors.iter_borrowed()) {
        if !tensor.is_none() {
            to.1 = Some(tensor.to_owned());
        }
    }
    Ok(named)
}

/// Returns a required tensor, or an error that names it.
pub(crate) fn needed<'a, 'py>((name, tensor): &'a Named<'py>) -> PyResult<&'a Bound<'py, PyAny>> {
    tensor.as_ref().ok_or_else(|| missing(name))
}

#[cold]
fn missing(name: &str) -> PyErr {
    PyTypeError::new_err(format!("{name} is a <class 'NoneType'>, expected a tensor"))
}

impl Request {
    /// Reads the tensors of a call. `read` gets a tensor, its name, and whether it must be
    /// contiguous.
    pub(crate) fn read<'py>(
        function: Function,
        tensors: &[Named<'py>; TENSORS],
        numbers: Numbers,
        read: impl Fn(&Bound<'py, PyAny>, &str, bool) -> PyResult<Memory>,
    ) -> PyResult<Request> {
        let is_given = |at: usize| tensors[at].1.is_some();
        Request::new(function, is_given, numbers, |at, whole| {
            let tensor = &tensors[at];
            read(needed(tensor)?, tensor.0, whole)
        })
    }

    /// Builds a request from the tensors that are given, by their indices. `memory` gets a tensor's
    /// index and whether it must be contiguous.
    pub(crate) fn new(
        function: Function,
        is_given: impl Fn(usize) -> bool,
        numbers: Numbers,
        memory: impl Fn(usize, bool) -> PyResult<Memory>,
    ) -> PyResult<Request> {
        // Most optional tensors are not given; `memory` is not called for them.
        let optional = |at: usize, whole: bool| -> PyResult<Optional> {
            let read = || memory(at, whole).map(Box::new);
            is_given(at).then(read).transpose()
        };
        let list = |at: usize| optional(at, true);
        let (query_starts, key_starts) = (list(3)?, list(4)?);
        let needed = |at: usize| match is_given(at) {
            true => memory(at, false),
            false => Err(missing(function.names()[at])),
        };
        let view = |at: usize, packed: bool, memory: &Memory| {
            function.order(packed).view(function.names()[at], memory)
        };
        let rows = |at: usize, packed: bool| match needed(at) {
            Ok(ref memory) => view(at, packed, memory),
            Err(error) => Err(error),
        };
        let factors = |at: usize| optional(at, false);
        let mut pages = list(9)?;
        let given = needed(0)?;
        let query = view(0, query_starts.is_some(), &given)?;
        let sequences = query_starts.as_ref().map(|starts| starts.sizes[0] - 1);
        let sequences = sequences.unwrap_or(query.form.sizes[0]);
        if let Some(table) = &mut pages {
            **table = table.first_rows(sequences);
        }
        Ok(Request {
            function,
            given,
            query,
            key: rows(1, key_starts.is_some())?,
            value: rows(2, key_starts.is_some())?,
            query_starts,
            key_starts,
            query_lengths: list(5)?,
            key_lengths: list(6)?,
            left_padding: list(7)?,
            entries: list(8)?,
            pages,
            slopes: list(10)?,
            sinks: list(11)?,
            descales: Descales { query: factors(12)?, key: factors(13)?, value: factors(14)? },
            captured: Captured::default(),
            numbers,
        })
    }

    /// Returns whether the queries, keys or values are f32.
    pub(crate) fn has_f32(&self) -> bool {
        [&self.query, &self.key, &self.value].iter().any(|view| view.form.dtype == DType::F32)
    }

    /// Returns the argument names of the tensors.
    pub(crate) fn names(&self) -> &'static [&'static str; TENSORS] {
        self.function.names()
    }

    /// Returns the argument names of the maximum query and key lengths.
    pub(crate) fn most_names(&self) -> [&'static str; 2] {
        self.function.most_names()
    }

    /// Checks the tensors against each other and returns the problem that they pose.
    pub(crate) fn problem(&self) -> PyResult<Problem> {
        let [q, k, v, cu_q, ..] = *self.names();
        let (query, key, value) = (&self.query.form, &self.key.form, &self.value.form);
        query.query(q)?;
        let unequal = || {
            PyValueError::new_err(format!(
                "{k} has head dim {}, expected the {} of {q}",
                key.sizes[3], query.sizes[3]
            ))
        };
        // Reported before the errors that the Python package handles by padding head dims to a
        // multiple of 8: padding must not hide that the head dims differ.
        let odd = |form: &Form| form.sizes[3] % 8 != 0;
        if key.sizes[3] != query.sizes[3] && (odd(query) || odd(key)) {
            return Err(unequal());
        }
        for (name, form) in [(q, query), (k, key), (v, value)] {
            form.like_or_small(name, query, q)?;
            form.usable(name)?;
        }
        let [batch, _, heads, dim] = query.sizes;
        let [_, keys, shared, _] = key.sizes;
        if !self.function.has_sequences() {
            self.expect(k, key, [batch, keys, shared, dim])?;
            self.expect(v, value, [batch, keys, shared, value.sizes[3]])?;
        }
        if key.sizes[3] != dim {
            return Err(unequal());
        }
        if value.sizes[..3] != key.sizes[..3] {
            return Err(PyValueError::new_err(format!(
                "{v} has {:?} entries, positions and heads, expected the {:?} of {k}",
                &value.sizes[..3],
                &key.sizes[..3]
            )));
        }
        if heads == 0 || shared == 0 || heads % shared != 0 {
            return Err(PyValueError::new_err(format!(
                "{q} has {heads} heads, expected a multiple of the {shared} of {k}"
            )));
        }

        let sequences = match &self.query_starts {
            None => batch,
            Some(starts) => starts.starts(cu_q)?,
        };
        let lists = [
            &self.query_starts,
            &self.key_starts,
            &self.query_lengths,
            &self.key_lengths,
            &self.left_padding,
            &self.entries,
        ];
        for (at, list) in lists.into_iter().enumerate() {
            let Some(list) = list else { continue };
            let (name, is_starts) = (self.names()[3 + at], at < 2);
            list.entries(name, sequences + i64::from(is_starts), sequences, self.first())?;
            list.on(name, query.place, q)?;
        }

        let Numbers { causal, window, chunk, most_queries, .. } = self.numbers;
        let queries = match &self.query_starts {
            None => query.sizes[1],
            Some(_) => most(self.most_names()[0], most_queries, query.sizes[1])?,
        };
        let mut problem =
            Problem::new(sequences as usize, heads as usize, queries as usize, dim as usize)
                .with_kv_heads(shared as usize)
                .with_value_head_dim(value.sizes[3] as usize);
        problem.dtypes =
            DTypes { key: key.dtype, value: value.dtype, ..DTypes::inputs(query.dtype) };
        problem.descales =
            self.factors(sequences)?.map(|found| found.map_or(Descale::None, |it| it.0));
        (problem.keys, problem.key_length) = self.keys(sequences)?;
        if self.query_starts.is_some() {
            problem.queries = Storage::Packed(query.sizes[1] as usize);
        }
        problem.lists = Lists {
            query_lengths: self.query_lengths.is_some(),
            key_lengths: self.key_lengths.is_some(),
            left_padding: self.left_padding.is_some(),
            batch_index: self.entries.is_some(),
        };
        // FlashAttention's convention: a causal mask sets the right side of the window to 0.
        let (left, mut right) = (window.0, if causal { Some(0) } else { window.1 });
        if causal && self.function == Function::PyTorch {
            // PyTorch's mask is anchored at the first key, ours at the last one. Keys beyond the
            // last query are visible to no query; queries beyond the last key see all keys.
            problem.key_length = queries.min(keys) as usize;
            right = Some((queries - keys).max(0) as usize);
        }
        problem.mask = Mask::window(left, right).with_chunk(chunk);
        problem.scores = self.numbers.scores();
        if self.numbers.batch_invariant {
            problem = problem.batch_invariant();
        }
        if let Some(memory) = &self.slopes {
            let slopes = self.names()[10];
            memory.floats(slopes, query.place, q)?;
            problem.scores.alibi = match memory.sizes() {
                [given] if *given == heads => Alibi::PerHead,
                [given, of] if [*given, *of] == [sequences, heads] => Alibi::PerSequence,
                given => {
                    return Err(PyValueError::new_err(format!(
                        "{slopes} has shape {given:?}, expected [{heads}] or [{sequences}, {heads}]"
                    )));
                }
            };
        }
        if let Some(memory) = &self.sinks {
            let sinks = self.names()[11];
            memory.floats(sinks, query.place, q)?;
            if memory.sizes() != [heads] {
                return Err(PyValueError::new_err(format!(
                    "{sinks} has shape {:?}, expected [{heads}]",
                    memory.sizes()
                )));
            }
            problem = problem.with_sinks();
        }
        self.captured.join(&mut problem, query.place, q)?;
        Ok(problem)
    }

    /// Returns the descale factors, each with its granularity.
    fn factors(&self, sequences: i64) -> PyResult<Descales<Option<(Descale, View)>>> {
        if self.descales.each_ref().into_array().into_iter().all(Option::is_none) {
            return Ok(Descales::default());
        }
        let [first, .., q, k, v, _] = *self.names();
        let [count, rows, heads, _] = self.key.form.sizes;
        let factors = Factors {
            sequences,
            keys: [count, rows, heads],
            packed: self.key_starts.is_some(),
            tokens: true,
            place: self.query.form.place,
            first,
        };
        let [query, key, value, ..] = *self.names();
        let names = Descales {
            query: (q, false, query, &self.query),
            key: (k, true, key, &self.key),
            value: (v, true, value, &self.value),
        };
        names.zip(self.descales.each_ref()).try_map(|((name, tokens, of, view), memory)| {
            let Some(memory) = memory else { return Ok(None) };
            let dtype = view.form.dtype;
            let found = Factors { tokens, ..factors }.read(name, memory)?;
            match dtype.is_8_bit() {
                true => Ok(Some(found)),
                false => Err(PyValueError::new_err(format!(
                    "{name} was given with a {of} of {dtype}, expected one of 8 bits"
                ))),
            }
        })
    }

    /// Returns the descale factors; [`Request::problem`] has checked them.
    pub(crate) fn descales(&self, problem: &Problem) -> PyResult<Descales<Option<View>>> {
        Ok(self.factors(problem.batch as i64)?.map(|found| found.map(|(_, view)| view)))
    }

    /// Returns how the keys are stored, and the maximum number of keys of a sequence.
    fn keys(&self, sequences: i64) -> PyResult<(Storage, usize)> {
        let [q, k, _, _, cu_k, _, _, _, entries, table, ..] = *self.names();
        let [count, rows, ..] = self.key.form.sizes;
        let both = |name: &str, other: &str| {
            Err(PyValueError::new_err(format!(
                "{name} was given with {other}, expected one of the two"
            )))
        };
        if let Some(pages) = &self.pages {
            let columns = pages.pages(table, sequences, self.query.form.place, q)?;
            if self.key_starts.is_some() {
                return both(cu_k, table);
            }
            if self.entries.is_some() {
                return both(entries, table);
            }
            let [size, columns, pages] = [rows, columns, count].map(|it| it as usize);
            return Ok((Storage::Paged { size, columns, pages }, size.saturating_mul(columns)));
        }
        if self.key_starts.is_some() {
            if self.entries.is_some() {
                return both(entries, cu_k);
            }
            let most = most(self.most_names()[1], self.numbers.most_keys, rows)?;
            return Ok((Storage::Packed(rows as usize), most as usize));
        }
        if self.entries.is_some() {
            return Ok((Storage::Entries(count as usize), rows as usize));
        }
        if count != sequences {
            return Err(PyValueError::new_err(format!(
                "{k} has {count} batch entries, expected {sequences}, one for each sequence of {}",
                self.first()
            )));
        }
        Ok((Storage::Padded, rows as usize))
    }

    /// Returns the name of the tensor that determines the number of sequences.
    fn first(&self) -> &'static str {
        let [q, _, _, cu_q, ..] = *self.names();
        if self.query_starts.is_some() { cu_q } else { q }
    }

    fn expect(&self, name: &str, form: &Form, expected: [i64; 4]) -> PyResult<()> {
        if form.sizes == expected {
            return Ok(());
        }
        let order = self.function.order(false);
        let [given, expected] = [form.sizes, expected].map(|sizes| order.back(sizes));
        Err(PyValueError::new_err(format!(
            "{name} has shape {given:?}, expected {expected:?} to go with the other tensors"
        )))
    }

    /// Returns the output tensor in the caller's dimension order, without an address.
    pub(crate) fn output(&self) -> Memory {
        let element = Element::Float(DTypes::inputs(self.query.form.dtype).output);
        Memory { element, ..self.given.like(self.value.form.sizes[3]) }
    }

    /// Returns the output as (batch, length, heads, dim) at an address.
    pub(crate) fn output_at(&self, address: u64) -> PyResult<View> {
        self.as_output(&Memory { address, ..self.output() })
    }

    /// Returns the output as (batch, length, heads, dim) in a tensor of the caller's dimension order.
    pub(crate) fn as_output(&self, memory: &Memory) -> PyResult<View> {
        self.function.order(self.query_starts.is_some()).view("out", memory)
    }

    /// Returns the output as (batch, length, heads, dim) in the caller's `out`, or why `out` does
    /// not fit.
    pub(crate) fn output_in(&self, out: &Memory) -> PyResult<View> {
        let expected = self.output();
        out.on("out", expected.place, self.names()[0])?;
        if out.element != expected.element {
            return Err(PyTypeError::new_err(format!(
                "out has element type {}, expected {}",
                out.element, expected.element
            )));
        }
        if out.sizes() != expected.sizes() {
            return Err(PyValueError::new_err(format!(
                "out has shape {:?}, expected {:?}",
                out.sizes(),
                expected.sizes()
            )));
        }
        let view = self.as_output(out)?;
        view.form.usable("out")?;
        Ok(view)
    }

    /// Returns the sizes of the log-sum-exps as (batch, heads, rows), and how many leading
    /// dimensions the caller does not see: 1 for packed queries, otherwise 0.
    pub(crate) fn sums(&self) -> ([i64; 3], usize) {
        let [batch, rows, heads, _] = self.query.form.sizes;
        ([batch, heads, rows], usize::from(self.query_starts.is_some()))
    }

    /// Returns the tensors in the form that the GPU library takes.
    pub(crate) fn tensors(
        &self,
        descales: Descales<Option<View>>,
        output: &View,
        lse: Option<u64>,
    ) -> Tensors {
        let all = [&self.query, &self.key, &self.value, output];
        let all = all.map(|view| view.on_device(self.query.address));
        // Changed in place: the captured tensors take a kilobyte, which calls without functions need
        // not write again.
        let mut tensors = Tensors::new(all, lse.map(DeviceAddress));
        tensors.descales = descales.map(|it| it.map(|view| view.on_device(self.query.address)));
        tensors.query_starts = address(self.query_starts.as_deref());
        tensors.query_lengths = address(self.query_lengths.as_deref());
        tensors.key_starts = address(self.key_starts.as_deref());
        tensors.key_lengths = address(self.key_lengths.as_deref());
        tensors.left_padding = address(self.left_padding.as_deref());
        tensors.batch_index = address(self.entries.as_deref());
        tensors.block_table = address(self.pages.as_deref());
        tensors.slopes = address(self.slopes.as_deref());
        tensors.sinks = address(self.sinks.as_deref());
        if !self.captured.is_empty() {
            tensors.captured = self.captured.on_device();
        }
        tensors
    }
}

/// Returns the device address of an optional tensor.
pub(crate) fn address(list: Option<&Memory>) -> Option<DeviceAddress> {
    list.map(|list| DeviceAddress(list.address))
}

/// Returns the maximum length of a packed sequence: all rows if the caller does not give it.
fn most(name: &str, given: Option<i64>, rows: i64) -> PyResult<i64> {
    match given {
        None => Ok(rows),
        Some(most) if most < 0 => {
            Err(PyValueError::new_err(format!("{name}={most}, expected no negative number")))
        }
        // No sequence is longer than all of them.
        Some(most) => Ok(most.min(rows)),
    }
}
