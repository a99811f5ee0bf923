//! Attention over sequences: what a call gives, checked, and the size of the plan that it needs.

use flashcore::gpu::ServingSize;
use flashcore::{Mask, Problem};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::library::{Library, Named};
use crate::error;
use crate::view::{Form, Memory, View};

/// How many tensors a call can have.
pub(crate) const TENSORS: usize = 12;

/// The function that was called: errors name its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Function {
    Plain,
    Varlen,
    KvCache,
}

impl FromPyObject<'_, '_> for Function {
    type Error = PyErr;

    fn extract(name: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        match name.extract::<&str>()? {
            "flash_attn_func" => Ok(Function::Plain),
            "flash_attn_varlen_func" => Ok(Function::Varlen),
            "flash_attn_with_kvcache" => Ok(Function::KvCache),
            other => Err(error::value(format!("there is no function `{other}`"))),
        }
    }
}

impl Function {
    /// The names of its tensors, in the order of [`Request`]'s fields.
    pub(crate) fn names(self) -> [&'static str; TENSORS] {
        let (key, value, lengths, pages) = match self {
            Function::KvCache => ("k_cache", "v_cache", "cache_seqlens", "page_table"),
            Function::Plain | Function::Varlen => ("k", "v", "seqused_k", "block_table"),
        };
        [
            "q",
            key,
            value,
            "cu_seqlens_q",
            "cu_seqlens_k",
            "seqused_q",
            lengths,
            "cache_leftpad",
            "cache_batch_idx",
            pages,
            "alibi_slopes",
            "s_aux",
        ]
    }
}

/// What a call gives besides tensors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Numbers {
    most_queries: Option<i64>,
    most_keys: Option<i64>,
    scale: Option<f64>,
    causal: bool,
    /// Keys before and after a query's own; all of them if negative.
    left: i64,
    right: i64,
    /// None if zero.
    softcap: f64,
}

impl<'a, 'py> FromPyObject<'a, 'py> for Numbers {
    type Error = PyErr;

    fn extract(numbers: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let (most_queries, most_keys, scale, causal, left, right, softcap) = numbers.extract()?;
        Ok(Numbers { most_queries, most_keys, scale, causal, left, right, softcap })
    }
}

/// A call.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) names: [&'static str; TENSORS],
    /// Packed queries, and packed keys and values, have one batch entry.
    pub(crate) query: View,
    pub(crate) key: View,
    pub(crate) value: View,
    pub(crate) query_starts: Option<Memory>,
    pub(crate) key_starts: Option<Memory>,
    pub(crate) query_lengths: Option<Memory>,
    pub(crate) key_lengths: Option<Memory>,
    pub(crate) left_padding: Option<Memory>,
    pub(crate) entries: Option<Memory>,
    pub(crate) pages: Option<Memory>,
    pub(crate) slopes: Option<Memory>,
    pub(crate) sinks: Option<Memory>,
    pub(crate) numbers: Numbers,
}

/// A call's tensors with their names.
pub(crate) fn named<'py, const COUNT: usize>(
    names: [&'static str; COUNT],
    tensors: &Bound<'py, PyTuple>,
) -> PyResult<[Named<'py>; COUNT]> {
    if tensors.len() != COUNT {
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

impl Request {
    /// Reads the tensors of a call.
    pub(crate) fn read<'py>(
        library: &Library<'py>,
        tensors: &[Named<'py>; TENSORS],
        numbers: Numbers,
    ) -> PyResult<Request> {
        let names = tensors.each_ref().map(|(name, _)| *name);
        let list = |at: usize| -> PyResult<Option<Memory>> {
            let (name, tensor) = &tensors[at];
            tensor.as_ref().map(|tensor| library.read_whole(tensor, name)).transpose()
        };
        let (query_starts, key_starts) = (list(3)?, list(4)?);
        let view = |at: usize, packed: bool| -> PyResult<View> {
            let (name, tensor) = &tensors[at];
            let Some(tensor) = tensor else {
                return Err(PyTypeError::new_err(format!("{name} is None, expected a tensor")));
            };
            rows(name, &library.read(tensor, name)?, packed)
        };
        Ok(Request {
            names,
            query: view(0, query_starts.is_some())?,
            key: view(1, key_starts.is_some())?,
            value: view(2, key_starts.is_some())?,
            query_starts,
            key_starts,
            query_lengths: list(5)?,
            key_lengths: list(6)?,
            left_padding: list(7)?,
            entries: list(8)?,
            pages: list(9)?,
            slopes: list(10)?,
            sinks: list(11)?,
            numbers,
        })
    }

    /// The size of the plan that answers it, or what is wrong with it.
    pub(crate) fn size(&self) -> PyResult<ServingSize> {
        let [q, k, v, cu_q, cu_k, used_q, used_k, leftpad, entries, table, slopes, sinks] =
            self.names;
        let (query, key, value) = (&self.query.form, &self.key.form, &self.value.form);
        for (name, form) in [(q, query), (k, key), (v, value)] {
            form.usable(name)?;
            form.like(name, query, q)?;
        }
        let [_, _, heads, dim] = query.sizes;
        let shared = key.sizes[2];
        if key.sizes[3] != dim {
            return Err(PyValueError::new_err(format!(
                "{k} has head dim {}, expected the {dim} of {q}",
                key.sizes[3]
            )));
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
            None => query.sizes[0],
            Some(starts) => starts.list(cu_q)?.checked_sub(1).ok_or_else(|| {
                PyValueError::new_err(format!("{cu_q} is empty, expected a start at least"))
            })?,
        };
        let list = |name: &str, memory: &Option<Memory>, expected: i64| -> PyResult<()> {
            let Some(memory) = memory else { return Ok(()) };
            let given = memory.list(name)?;
            if given != expected {
                return Err(PyValueError::new_err(format!(
                    "{name} has {given} entries, expected {expected} for {sequences} sequences"
                )));
            }
            memory.on(name, query.place, q)
        };
        list(cu_q, &self.query_starts, sequences + 1)?;
        list(cu_k, &self.key_starts, sequences + 1)?;
        list(used_q, &self.query_lengths, sequences)?;
        list(used_k, &self.key_lengths, sequences)?;
        list(leftpad, &self.left_padding, sequences)?;
        list(entries, &self.entries, sequences)?;

        let problem = self.problem(sequences)?;
        let mut size = ServingSize::new(problem);
        if self.query_starts.is_some() {
            size = size.with_packed_queries(query.sizes[1] as usize);
        }
        if let Some(pages) = &self.pages {
            let [rows, columns] = pages.table(table, query.place, q)?;
            if rows != sequences {
                return Err(PyValueError::new_err(format!(
                    "{table} has {rows} rows, expected {sequences}, one for each sequence"
                )));
            }
            for (name, given) in [(cu_k, &self.key_starts), (entries, &self.entries)] {
                if given.is_some() {
                    return Err(PyValueError::new_err(format!(
                        "{name} was given with {table}, expected one of the two"
                    )));
                }
            }
            let [count, page, ..] = key.sizes;
            size = size.with_pages(page as usize, columns as usize, count as usize);
        } else if self.key_starts.is_some() {
            if self.entries.is_some() {
                return Err(PyValueError::new_err(format!(
                    "{entries} was given with {cu_k}, expected one of the two"
                )));
            }
            size = size.with_packed_keys(key.sizes[1] as usize);
        } else {
            if self.entries.is_none() && key.sizes[0] != sequences {
                return Err(PyValueError::new_err(format!(
                    "{k} has {} batch entries, expected {sequences}, one for each sequence",
                    key.sizes[0]
                )));
            }
            size = size.with_entries(key.sizes[0] as usize);
        }
        if let Some(memory) = &self.slopes {
            memory.floats(slopes, query.place, q)?;
            match memory.sizes() {
                [given] if *given == heads => {}
                [given, of] if [*given, *of] == [sequences, heads] => {
                    size = size.with_slopes_of_sequences();
                }
                given => {
                    return Err(PyValueError::new_err(format!(
                        "{slopes} has shape {given:?}, expected [{heads}] or [{sequences}, {heads}]"
                    )));
                }
            }
        }
        if let Some(memory) = &self.sinks {
            memory.floats(sinks, query.place, q)?;
            if memory.sizes() != [heads] {
                return Err(PyValueError::new_err(format!(
                    "{sinks} has shape {:?}, expected [{heads}]",
                    memory.sizes()
                )));
            }
        }
        Ok(size)
    }

    /// Heads, dims, mask and scores; the most queries and keys of a sequence.
    fn problem(&self, sequences: i64) -> PyResult<Problem> {
        let (query, key) = (&self.query.form, &self.key.form);
        let most = |packed: &Option<Memory>, name, of, given: Option<i64>, rows: i64| {
            if packed.is_none() {
                return Ok(rows);
            }
            match given {
                None => {
                    Err(PyValueError::new_err(format!("{name} is None, expected it with {of}")))
                }
                Some(most) if most < 0 => Err(PyValueError::new_err(format!(
                    "{name}={most}, expected no negative number"
                ))),
                // No sequence is longer than all of them.
                Some(most) => Ok(most.min(rows)),
            }
        };
        let Numbers { most_queries, most_keys, scale, causal, left, right, softcap } = self.numbers;
        let queries =
            most(&self.query_starts, "max_seqlen_q", self.names[3], most_queries, query.sizes[1])?;
        let keys = most(&self.key_starts, "max_seqlen_k", self.names[4], most_keys, key.sizes[1])?;
        let mut problem = Problem::new(
            sequences as usize,
            query.sizes[2] as usize,
            queries as usize,
            query.sizes[3] as usize,
        )
        .with_kv_heads(key.sizes[2] as usize)
        .with_key_length(keys as usize)
        .with_value_head_dim(self.value.form.sizes[3] as usize)
        .with_dtype(query.dtype)
        .with_mask(mask(causal, left, right));
        if let Some(scale) = scale {
            problem = problem.with_scale(scale as f32);
        }
        if softcap != 0.0 {
            problem = problem.with_softcap(softcap as f32);
        }
        problem.alibi = self.slopes.is_some();
        problem.sinks = self.sinks.is_some();
        problem.validate().map_err(error::value)?;
        Ok(problem)
    }

    /// The sizes of output and log-sum-exps in the caller's dimensions.
    pub(crate) fn results(&self) -> ([i64; 4], [i64; 3]) {
        let [batch, rows, heads, _] = self.query.form.sizes;
        ([batch, rows, heads, self.value.form.sizes[3]], [batch, heads, rows])
    }

    /// How many of the first of those dimensions the caller does not have.
    pub(crate) fn hidden(&self) -> usize {
        usize::from(self.query_starts.is_some())
    }
}

/// FlashAttention's words for a mask in ours: a causal window ends at the query.
pub(crate) fn mask(causal: bool, left: i64, right: i64) -> Mask {
    let side = |keys: i64| usize::try_from(keys).ok();
    Mask::window(side(left), if causal { Some(0) } else { side(right) })
}

/// Queries, keys or values in four dimensions; packed ones have three and get one batch entry.
pub(crate) fn rows(name: &str, memory: &Memory, packed: bool) -> PyResult<View> {
    let dtype = memory.float(name)?;
    let (sizes, strides) = (memory.sizes(), memory.strides());
    let (sizes, strides) = match (sizes, strides, packed) {
        (&[a, b, c], &[x, y, z], true) => ([1, a, b, c], [0, x, y, z]),
        (&[a, b, c, d], &[x, y, z, w], false) => ([a, b, c, d], [x, y, z, w]),
        _ => {
            let (count, expected) = match packed {
                true => (3, "(rows of all sequences, heads, head dim)"),
                false => (4, "(batch, length, heads, head dim)"),
            };
            let given = memory.dimensions;
            return Err(PyValueError::new_err(format!(
                "{name} has {given} dimensions, expected {count}: {expected}"
            )));
        }
    };
    let form = Form { sizes, strides, dtype, place: memory.place };
    Ok(View { address: memory.address, form })
}
