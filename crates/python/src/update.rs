//! An append to a KV cache: new keys and values, the cache and its lists, and the queries to be
//! rotated with them; read and checked here, run by `gpu::append` or `cpu::append`.

use flashcore::Descale;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::descale::Factors;
use crate::library::{Library, Named};
use crate::numbers::Flags;
use crate::view::{Element, Form, Memory, Order, Place, View};

/// The number of tensor arguments of an append, given or not.
pub(crate) const TENSORS: usize = 15;

/// The argument names of the tensors, in the order that [`Update::read`] takes them.
pub(crate) const NAMES: [&str; TENSORS] = [
    "k_cache",
    "v_cache",
    "k",
    "v",
    "q",
    "cache_seqlens",
    "cu_seqlens_k_new",
    "cu_seqlens_q",
    "cache_batch_idx",
    "page_table",
    "rotary_cos",
    "rotary_sin",
    "rotary_seqlens",
    "k_descale",
    "v_descale",
];

/// Returns [`NAMES`], with the page table called `block_table` if `blocks` is set.
pub(crate) fn names(blocks: bool) -> [&'static str; TENSORS] {
    let mut names = NAMES;
    if blocks {
        names[9] = "block_table";
    }
    names
}

/// The checked tensors of an append.
#[derive(Debug)]
pub(crate) struct Update {
    pub(crate) key_cache: View,
    pub(crate) value_cache: View,
    /// New keys; packed rows have one batch entry, here and in `value` and `query`.
    pub(crate) key: View,
    pub(crate) value: View,
    pub(crate) query: View,
    /// The queries in the caller's dimension order.
    pub(crate) given: Memory,
    /// The maximum number of queries of a sequence.
    pub(crate) most_queries: usize,
    /// The maximum number of new rows of a sequence.
    pub(crate) most_new: usize,
    /// The length of each sequence before the append.
    pub(crate) lengths: Memory,
    pub(crate) key_starts: Option<Memory>,
    pub(crate) query_starts: Option<Memory>,
    pub(crate) entries: Option<Memory>,
    pub(crate) pages: Option<Memory>,
    /// The argument name of the page table.
    pub(crate) pages_name: &'static str,
    pub(crate) rotary: Option<Rotary>,
    /// The descale factors of 8-bit key and value caches by which new rows are divided: either given
    /// for each sequence and head, or computed for each token during the append and written.
    pub(crate) descales: [Option<(Descale, View)>; 2],
    factors: [Option<Memory>; 2],
    /// The number of sequences.
    pub(crate) sequences: usize,
    /// The capacity of each sequence, in positions.
    pub(crate) room: usize,
}

/// The rotary embedding of the new keys and of the queries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rotary {
    pub(crate) cosines: Memory,
    pub(crate) sines: Memory,
    /// The position of each sequence's first new key, if it is not the length before the append.
    pub(crate) positions: Option<Memory>,
    /// Whether rotary pairs are neighbouring columns (GPT-J style) rather than halves of the row.
    pub(crate) interleaved: bool,
    /// Whether the queries of a sequence have successive positions; otherwise all have the first
    /// one.
    pub(crate) advancing: bool,
}

impl Rotary {
    /// Returns the number of positions in the tables, and the number of rotated columns.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        (self.cosines.sizes[0] as usize, 2 * self.cosines.sizes[1] as usize)
    }
}

/// How the memory of a tensor is used.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Access {
    /// Read, with any strides.
    Read,
    /// Read, and contiguous.
    Whole,
    /// Written.
    Written,
}

impl Access {
    /// Reads the memory of a tensor of a library.
    pub(crate) fn of<'py>(
        self,
        library: &Library<'py>,
        tensor: &Bound<'py, PyAny>,
        name: &str,
    ) -> PyResult<Memory> {
        match self {
            Access::Read => library.read(tensor, name),
            Access::Whole => library.read_whole(tensor, name),
            Access::Written => library.read_mutable(tensor, name),
        }
    }
}

impl Update {
    /// Reads the tensors of a call. `read` gets a tensor, its name, and how it is used.
    pub(crate) fn read<'py>(
        tensors: &[Named<'py>; TENSORS],
        Flags { interleaved, advancing, blocks, most_queries, most_new }: Flags,
        read: impl Fn(&Bound<'py, PyAny>, &str, Access) -> PyResult<Memory>,
    ) -> PyResult<Update> {
        let optional = |at: usize, access: Access| -> PyResult<Option<Memory>> {
            let (name, tensor) = &tensors[at];
            tensor.as_ref().map(|tensor| read(tensor, name, access)).transpose()
        };
        let list = |at: usize| optional(at, Access::Whole);
        let needed = |at: usize| {
            let (name, tensor) = &tensors[at];
            tensor.as_ref().ok_or_else(|| {
                PyValueError::new_err(format!("{name} is None, expected a tensor with k and v"))
            })
        };
        let view = |at: usize, packed: bool| {
            Order::of(packed).view(NAMES[at], &read(needed(at)?, NAMES[at], Access::Read)?)
        };
        let cache = |at: usize| {
            Order::Padded.view(NAMES[at], &read(needed(at)?, NAMES[at], Access::Written)?)
        };
        let (key_starts, query_starts) = (list(6)?, list(7)?);
        let rotary = match (list(10)?, list(11)?, list(12)?) {
            (Some(cosines), Some(sines), positions) => {
                Some(Rotary { cosines, sines, positions, interleaved, advancing })
            }
            (None, None, None) => None,
            (cosines, sines, _) => {
                let missing = if cosines.is_none() { NAMES[10] } else { NAMES[11] };
                let given = match (cosines, sines) {
                    (None, None) => NAMES[12],
                    (None, Some(_)) => NAMES[11],
                    _ => NAMES[10],
                };
                return Err(PyValueError::new_err(format!(
                    "{missing} is None, expected a tensor with {given}"
                )));
            }
        };
        let given = read(needed(4)?, NAMES[4], Access::Read)?;
        let query = Order::of(query_starts.is_some()).view(NAMES[4], &given)?;
        let queries = query.form.sizes[1];
        let most_queries = most_queries.filter(|_| query_starts.is_some()).unwrap_or(queries);
        let lengths = read(needed(5)?, NAMES[5], Access::Whole)?;
        let key = view(2, key_starts.is_some())?;
        let rows = key.form.sizes[1];
        let most_new = most_new.filter(|_| key_starts.is_some()).unwrap_or(rows);
        let mut update = Update {
            key_cache: cache(0)?,
            value_cache: cache(1)?,
            key,
            value: view(3, key_starts.is_some())?,
            query,
            given,
            most_queries: most_queries.clamp(0, queries) as usize,
            most_new: most_new.clamp(0, rows) as usize,
            lengths,
            key_starts,
            query_starts,
            entries: list(8)?,
            pages: list(9)?.map(|table| table.first_rows(lengths.sizes[0])),
            pages_name: names(blocks)[9],
            rotary,
            descales: [None; 2],
            factors: [optional(13, Access::Written)?, optional(14, Access::Written)?],
            sequences: 0,
            room: 0,
        };
        update.check()?;
        Ok(update)
    }

    /// Refuses tensors that do not fit together; sets `sequences`, `room` and `descales`.
    fn check(&mut self) -> PyResult<()> {
        self.check_tensors()?;
        let sequences = self.check_lists()?;
        let room = self.check_room(sequences)?;
        self.descales = [self.factors_of(0, sequences)?, self.factors_of(1, sequences)?];
        if self.is_copied() {
            // Rows of 8 bits were divided by the factors before.
            self.descales = [None; 2];
        }
        if let Some(rotary) = &self.rotary {
            self.check_rotary(rotary)?;
        }
        (self.sequences, self.room) = (sequences as usize, room as usize);
        Ok(())
    }

    /// Returns whether the key cache and the value cache have 8-bit elements.
    fn rounded(&self) -> [bool; 2] {
        [&self.key_cache, &self.value_cache].map(|it| it.form.dtype.is_8_bit())
    }

    /// Returns whether new rows are copied bit for bit: they have the element types of their caches
    /// and are not rotated.
    pub(crate) fn is_copied(&self) -> bool {
        let same = |row: &View, cache: &View| row.form.dtype == cache.form.dtype;
        self.rotary.is_none()
            && same(&self.key, &self.key_cache)
            && same(&self.value, &self.value_cache)
    }

    /// Refuses head dims that are not appended. Those of values may be wider than attention takes at
    /// once. On a GPU two columns of 16 bits are moved together; a copy moves as many bytes of any
    /// type.
    fn check_dim(&self, name: &str, form: &Form, widest: i64) -> PyResult<()> {
        let dim = form.sizes[3];
        if !(1..=widest).contains(&dim) {
            return Err(PyValueError::new_err(format!(
                "{name} has head dim {dim}, expected 1 to {widest}"
            )));
        }
        let bytes = if self.is_copied() { form.dtype.bytes() as i64 } else { 2 };
        if form.place != Place::Host && dim * bytes % 4 != 0 {
            return Err(PyValueError::new_err(format!(
                "{name} has head dim {dim}, expected a multiple of {}",
                4 / bytes
            )));
        }
        Ok(())
    }

    /// Checks element types, devices, heads and head dims of caches, new rows and queries.
    fn check_tensors(&self) -> PyResult<()> {
        let cache = &self.key_cache.form;
        let place = cache.place;
        let floats = [&self.key_cache, &self.value_cache, &self.key, &self.value, &self.query];
        const WIDEST: [i64; 5] = [256, 1 << 16, 256, 1 << 16, 256];
        for ((name, view), widest) in NAMES.into_iter().zip(floats).zip(WIDEST) {
            view.form.usable_strides(name)?;
            self.check_dim(name, &view.form, widest)?;
            match self.rounded().contains(&true) {
                true => view.form.place.same(name, place, NAMES[0])?,
                false => view.form.like(name, cache, NAMES[0])?,
            }
        }
        self.query.form.query(NAMES[4])?;
        // An 8-bit cache takes rows of its own type, or quantizes wider ones.
        for ((name, row), (of, it)) in [
            ((NAMES[2], &self.key.form), (NAMES[0], &self.key_cache.form)),
            ((NAMES[3], &self.value.form), (NAMES[1], &self.value_cache.form)),
        ] {
            if !it.dtype.is_8_bit() || row.dtype.is_8_bit() {
                row.like(name, it, of)?;
            }
        }
        if !self.is_copied() {
            // They are rotated or rounded by one kernel.
            self.value.form.like(NAMES[3], &self.key.form, NAMES[2])?;
        }
        let shapes = [
            (NAMES[1], &self.value_cache.form, cache, NAMES[0], false),
            (NAMES[2], &self.key.form, cache, NAMES[0], true),
            (NAMES[3], &self.value.form, &self.value_cache.form, NAMES[1], true),
        ];
        for (name, form, other, first, rows) in shapes {
            // The value cache must match the key cache in entries, positions and heads; new rows
            // must match their cache in heads and head dim.
            let (given, expected) = match rows {
                false => (&form.sizes[..3], &other.sizes[..3]),
                true => (&form.sizes[2..], &other.sizes[2..]),
            };
            if given != expected {
                let what = if rows { "heads and head dim" } else { "entries, positions and heads" };
                return Err(PyValueError::new_err(format!(
                    "{name} has {given:?} as {what}, expected the {expected:?} of {first}"
                )));
            }
        }
        if self.value.form.sizes[..2] != self.key.form.sizes[..2] {
            return Err(PyValueError::new_err(format!(
                "v has {:?} entries and rows, expected the {:?} of k",
                &self.value.form.sizes[..2],
                &self.key.form.sizes[..2]
            )));
        }
        let ([_, _, heads, dim], [_, _, shared, width]) = (self.query.form.sizes, cache.sizes);
        if dim != width {
            return Err(PyValueError::new_err(format!(
                "k_cache has head dim {width}, expected the {dim} of q"
            )));
        }
        if shared == 0 || heads % shared != 0 {
            return Err(PyValueError::new_err(format!(
                "q has {heads} heads, expected a multiple of the {shared} of k_cache"
            )));
        }
        Ok(())
    }

    /// Checks the integer lists; returns the number of sequences.
    fn check_lists(&self) -> PyResult<i64> {
        let place = self.key_cache.form.place;
        let sequences = self.lengths.list(NAMES[5])?;
        let lists = [
            (NAMES[5], Some(&self.lengths), sequences),
            (NAMES[6], self.key_starts.as_ref(), sequences + 1),
            (NAMES[7], self.query_starts.as_ref(), sequences + 1),
            (NAMES[8], self.entries.as_ref(), sequences),
            (NAMES[12], self.rotary.as_ref().and_then(|it| it.positions.as_ref()), sequences),
        ];
        for (name, list, expected) in lists {
            let Some(list) = list else { continue };
            list.entries(name, expected, sequences, NAMES[5])?;
            list.on(name, place, NAMES[0])?;
        }
        for (name, view, packed) in [
            (NAMES[2], &self.key, self.key_starts.is_some()),
            (NAMES[4], &self.query, self.query_starts.is_some()),
        ] {
            let given = view.form.sizes[0];
            if !packed && given != sequences {
                return Err(PyValueError::new_err(format!(
                    "{name} has {given} batch entries, expected {sequences} as cache_seqlens has"
                )));
            }
        }
        Ok(sequences)
    }

    /// Returns the capacity of each sequence in the cache.
    fn check_room(&self, sequences: i64) -> PyResult<i64> {
        let cache = &self.key_cache.form;
        let mut room = cache.sizes[1];
        if let Some(pages) = &self.pages {
            let columns = pages.pages(self.pages_name, sequences, cache.place, NAMES[0])?;
            if self.entries.is_some() {
                return Err(PyValueError::new_err(format!(
                    "cache_batch_idx was given with {}, expected one of the two",
                    self.pages_name
                )));
            }
            room = room.saturating_mul(columns);
        } else if self.entries.is_none() && cache.sizes[0] != sequences {
            return Err(PyValueError::new_err(format!(
                "k_cache has {} batch entries, expected {sequences}, one for each sequence",
                cache.sizes[0]
            )));
        }
        Ok(room)
    }

    /// Checks the descale factors of the key cache (`at` = 0) or of the value cache (`at` = 1).
    fn factors_of(&self, at: usize, sequences: i64) -> PyResult<Option<(Descale, View)>> {
        let Form { sizes: [entries, positions, heads, _], place, .. } = self.key_cache.form;
        let [name, of, given] = [NAMES[13 + at], NAMES[at], NAMES[2 + at]];
        let Some(memory) = &self.factors[at] else { return Ok(None) };
        if !self.rounded()[at] {
            return Err(PyValueError::new_err(format!(
                "{name} was given with a {of} of {}, expected one of 8 bits",
                [&self.key_cache, &self.value_cache][at].form.dtype
            )));
        }
        let factors = Factors {
            sequences,
            keys: [entries, positions, heads],
            packed: false,
            tokens: true,
            place,
            first: NAMES[0],
        };
        let found = factors.read(name, memory)?;
        if found.0 == Descale::PerToken && [&self.key, &self.value][at].form.dtype.is_8_bit() {
            return Err(PyValueError::new_err(format!(
                "{given} has 8 bits already, expected a wider type: the {name} of each token is \
                 found when it is rounded"
            )));
        }
        Ok(Some(found))
    }

    /// Checks the rotary tables.
    fn check_rotary(&self, rotary: &Rotary) -> PyResult<()> {
        let cache = &self.key_cache.form;
        let dtype = self.key.form.dtype;
        if dtype.is_8_bit() {
            return Err(PyTypeError::new_err(format!(
                "k has element type {dtype}, expected a wider one with rotary_cos: it is rounded \
                 after it is rotated"
            )));
        }
        let first = if self.rounded()[0] { NAMES[2] } else { NAMES[0] };
        self.query.form.like(NAMES[4], &self.key.form, first)?;
        for (name, table) in [(NAMES[10], &rotary.cosines), (NAMES[11], &rotary.sines)] {
            table.whole(name, Element::Float(dtype), &format!("{dtype} like {first}"))?;
            table.on(name, cache.place, NAMES[0])?;
            let dim = cache.sizes[3];
            match table.sizes() {
                [rows, half] if *rows > 0 && *half > 0 && 2 * half <= dim => {}
                other => {
                    return Err(PyValueError::new_err(format!(
                        "{name} has shape {other:?}, expected (positions, half the rotary dim) \
                         of at most {dim} / 2 columns"
                    )));
                }
            }
        }
        if rotary.sines.sizes() != rotary.cosines.sizes() {
            return Err(PyValueError::new_err(format!(
                "rotary_sin has shape {:?}, expected {:?} like rotary_cos",
                rotary.sines.sizes(),
                rotary.cosines.sizes()
            )));
        }
        Ok(())
    }
}
