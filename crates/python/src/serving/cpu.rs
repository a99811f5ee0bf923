//! Sequences, caches and parts in host memory, by the library's CPU back end.
//!
//! What a call uses of a cache is gathered into tensors of the library, in which sequences lie one
//! after the other. Unlike a device, the host sees all lists: nonsense in them is refused.

use flashcore::backend::Report;
use flashcore::gpu::ServingSize;
use flashcore::serving::{self, Pages, Placement, Sequences};
use flashcore::{Backend, CpuBackend, DType, Inputs, Layout, RunOptions, Shape, Tensor};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::parts::Parts;
use super::request::Request;
use super::update::{NAMES, Update};
use crate::view::{Form, Memory, View};
use crate::{cpu, error};

/// Attention over sequences; waits for the answer.
///
/// # Safety
///
/// The request must be of host memory that stays as it is meanwhile, `output` and `lse` memory for
/// the sizes that [`Request::results`] gives, which nobody else uses.
pub(crate) unsafe fn attend(
    request: &Request,
    size: &ServingSize,
    output: u64,
    lse: u64,
) -> PyResult<Report> {
    // SAFETY: the caller's promise, here and below.
    let integers = |list: &Option<Memory>| list.as_ref().map(|it| unsafe { integers(it) });
    // SAFETY: the same.
    let floats = |list: &Option<Memory>| list.as_ref().map(|it| unsafe { floats(it) });
    let names = &request.names;
    let count = size.problem.batch;

    let most = ("queries", "max_seqlen_q", size.problem.query_length);
    let queries = Rows { name: names[0], form: &request.query.form, count };
    let queries = queries.placement(
        (names[3], integers(&request.query_starts)),
        (names[5], integers(&request.query_lengths)),
        most,
    )?;

    let form = &request.key.form;
    let keys = if request.key_starts.is_some() {
        let most = ("keys", "max_seqlen_k", size.problem.key_length);
        Rows { name: names[1], form, count }.placement(
            (names[4], integers(&request.key_starts)),
            (names[6], integers(&request.key_lengths)),
            most,
        )?
    } else {
        let room = size.problem.key_length;
        let ends = match integers(&request.key_lengths) {
            Some(lengths) => lengths_within(names[6], &lengths, |_| room)?,
            None => vec![room; count],
        };
        let lists = (integers(&request.entries), integers(&request.pages));
        in_cache(form, ends, lists, [names[1], names[8], names[9]])?
    };
    let keys = match integers(&request.left_padding) {
        None => keys,
        Some(skipped) => {
            let ends = keys.ends().to_vec();
            keys.with_left_padding(lengths_within(names[7], &skipped, |at| ends[at])?)
        }
    };

    // SAFETY: as above; the placements are inside of the tensors.
    let (query, key, value) = unsafe {
        (
            gather(&request.query, &queries)?,
            gather(&request.key, &keys)?,
            gather(&request.value, &keys)?,
        )
    };
    let packed = |placement: &Placement| Placement::packed(starts(placement));
    let sequences = Sequences::new(size.problem.clone(), packed(&queries), packed(&keys))
        .map_err(error::value)?;
    let (slopes, sinks) = (floats(&request.slopes), floats(&request.sinks));
    let inputs = Inputs {
        slopes: slopes.as_deref(),
        sinks: sinks.as_deref(),
        ..Inputs::new(&query, &key, &value)
    };
    let result = CpuBackend::new()
        .run_sequences(&sequences, inputs, &RunOptions::default())
        .map_err(error::library)?;

    let (sizes, [_, heads, rows]) = request.results();
    let form = Form { sizes, strides: contiguous(sizes), ..request.query.form };
    let (heads, rows) = (heads as usize, rows as usize);
    let total = query.shape().length;
    // SAFETY: as above. Rows of no sequence are zero, as if they saw no key.
    unsafe {
        let bytes = sizes.iter().product::<i64>() as usize * form.dtype.bytes();
        std::ptr::write_bytes(output as *mut u8, 0, bytes);
        scatter(&result.output, &View { address: output, form }, &queries);
        let lse = std::slice::from_raw_parts_mut(lse as *mut f32, heads * rows * sizes[0] as usize);
        lse.fill(f32::NEG_INFINITY);
        let mut from = 0;
        for sequence in 0..count {
            for position in 0..queries.length(sequence) {
                let (entry, row) = queries.locate(sequence, position);
                for head in 0..heads {
                    lse[(entry * heads + head) * rows + row] = result.lse[head * total + from];
                }
                from += 1;
            }
        }
    }
    Ok(result.report)
}

/// Writes new keys and values into a cache, the new lengths to `after`, and queries turned as its
/// keys are to `turned`.
///
/// # Safety
///
/// The update must be of host memory, of which nobody else uses the caches meanwhile; `after`
/// memory for a list, `turned` for the queries where there is an embedding.
pub(crate) unsafe fn append(update: &Update, turned: Option<u64>, after: u64) -> PyResult<()> {
    // SAFETY: the caller's promise, here and below.
    let integers = |list: &Option<Memory>| list.as_ref().map(|it| unsafe { integers(it) });
    let (count, room) = (update.sequences, update.room);
    let lengths = integers(&Some(update.lengths)).unwrap_or_default();
    let lengths = lengths_within(NAMES[5], &lengths, |_| room)?;
    let rows = |name, view: &View, starts: &Option<Memory>, list| {
        let form = &view.form;
        let most = ("rows", name, form.sizes[1] as usize);
        Rows { name, form, count }.placement((list, integers(starts)), ("", None), most)
    };
    let new = rows(NAMES[2], &update.key, &update.key_starts, NAMES[6])?;
    let mut grown = Vec::with_capacity(count);
    for (sequence, length) in lengths.iter().enumerate() {
        let added = new.length(sequence);
        if length + added > room {
            return Err(PyValueError::new_err(format!(
                "k has {added} rows for sequence {sequence} behind the {length} there are, \
                 expected no more than the {room} positions of k_cache"
            )));
        }
        grown.push(length + added);
    }
    let lists = (integers(&update.entries), integers(&update.pages));
    let cache = in_cache(&update.key_cache.form, grown, lists, [NAMES[0], NAMES[8], NAMES[9]])?;

    // SAFETY: as above.
    let (mut key, value) = unsafe { (gather(&update.key, &new)?, gather(&update.value, &new)?) };
    if let Some(rotary) = &update.rotary {
        let (positions, dim) = rotary.sizes();
        // SAFETY: as above.
        let (cosines, sines) = unsafe {
            let dtype = update.key.form.dtype;
            (table(&rotary.cosines, dtype)?, table(&rotary.sines, dtype)?)
        };
        let turn = serving::Rotary {
            dim,
            interleaved: rotary.interleaved,
            cosines: &cosines,
            sines: &sines,
        };
        let first = match integers(&rotary.positions) {
            Some(list) => lengths_within(NAMES[12], &list, |_| positions)?,
            None => lengths,
        };
        let rotate = |tensor: &Tensor, rows: &Placement, advancing: bool| {
            let mut at = Vec::with_capacity(tensor.shape().length);
            for (sequence, first) in first.iter().enumerate() {
                let step = usize::from(advancing);
                at.extend((0..rows.length(sequence)).map(|index| first + step * index));
            }
            if let Some(position) = at.iter().find(|position| **position >= positions) {
                return Err(PyValueError::new_err(format!(
                    "rotary_cos has {positions} positions, expected more than {position}"
                )));
            }
            turn.rotate(tensor, &at).map_err(error::library)
        };
        key = rotate(&key, &new, true)?;
        if let Some(address) = turned {
            let queries = rows(NAMES[4], &update.query, &update.query_starts, NAMES[7])?;
            // SAFETY: as above.
            unsafe {
                let query = rotate(&gather(&update.query, &queries)?, &queries, rotary.advancing)?;
                let sizes = update.query.form.sizes;
                let form = Form { sizes, strides: contiguous(sizes), ..update.query.form };
                scatter(&query, &View { address, form }, &queries);
            }
        }
    }
    for (tensor, to) in [(&key, &update.key_cache), (&value, &update.value_cache)] {
        let mut from = vectors(tensor);
        for sequence in 0..count {
            let before = cache.length(sequence) - new.length(sequence);
            for index in 0..new.length(sequence) {
                let place = cache.locate(sequence, before + index);
                // SAFETY: as above; the place is inside of the cache.
                unsafe { copy_row(&mut from, to, place) };
            }
        }
    }
    for (sequence, end) in cache.ends().iter().enumerate() {
        // SAFETY: as above. Lengths were 32 bits before, and are at most the room.
        unsafe { *(after as *mut i32).add(sequence) = *end as i32 };
    }
    Ok(())
}

/// Puts parts together; log-sum-exps go to (batch, heads, length).
///
/// # Safety
///
/// The parts must be of host memory that stays as it is meanwhile, `output` memory of their shape
/// and `lse` for their rows, which nobody else uses.
pub(crate) unsafe fn merge(parts: &Parts, output: &View, lse: u64) -> PyResult<()> {
    let [batch, length, heads, dim] = parts.outputs[0].form.sizes.map(|size| size as usize);
    let shape = Shape::new(batch, length, heads, dim);
    let mut tensors = Vec::new();
    for (part, sums) in parts.outputs.iter().zip(&parts.lses) {
        // SAFETY: the caller's promise.
        let tensor = unsafe { cpu::copy(shape, part) }.map_err(error::library)?;
        let mut list = Vec::with_capacity(batch * heads * length);
        let [by_batch, by_row, by_head] = sums.strides;
        for entry in 0..batch as i64 {
            for head in 0..heads as i64 {
                for row in 0..length as i64 {
                    let offset = entry * by_batch + row * by_row + head * by_head;
                    // SAFETY: the caller's promise.
                    list.push(unsafe { *(sums.address as *const f32).offset(offset as isize) });
                }
            }
        }
        tensors.push((tensor, list));
    }
    let borrowed: Vec<(&Tensor, &[f32])> =
        tensors.iter().map(|(tensor, list)| (tensor, &list[..])).collect();
    let (mut merged, sums) = serving::merge(&borrowed).map_err(error::library)?;
    if merged.dtype() != parts.dtype {
        let rounded = Tensor::from_f32(parts.dtype, shape, &merged.to_f32());
        merged = rounded.map_err(|error| error::library(error.into()))?;
    }
    // SAFETY: the caller's promise.
    unsafe {
        cpu::write(&merged, output.address, &output.form);
        std::ptr::copy_nonoverlapping(sums.as_ptr(), lse as *mut f32, sums.len());
    }
    Ok(())
}

/// Rows of queries, or of new keys, padded or packed.
struct Rows<'a> {
    name: &'a str,
    form: &'a Form,
    count: usize,
}

impl Rows<'_> {
    /// Where they are. Starts and lengths come with their names, and so does the most of a
    /// sequence.
    fn placement(
        &self,
        (starts_name, starts): (&str, Option<Vec<i32>>),
        (lengths_name, lengths): (&str, Option<Vec<i32>>),
        (what, most_name, most): (&str, &str, usize),
    ) -> PyResult<Placement> {
        let rows = self.form.sizes[1] as usize;
        let Some(starts) = starts else {
            return Ok(Placement::padded(match lengths {
                Some(lengths) => lengths_within(lengths_name, &lengths, |_| rows)?,
                None => vec![rows; self.count],
            }));
        };
        for (sequence, pair) in starts.windows(2).enumerate() {
            if pair[0] < 0 || pair[1] < pair[0] {
                return Err(PyValueError::new_err(format!(
                    "{starts_name} goes from {} to {} in sequence {sequence}, expected cumulative \
                     lengths",
                    pair[0], pair[1]
                )));
            }
            if (pair[1] - pair[0]) as usize > most {
                return Err(PyValueError::new_err(format!(
                    "{starts_name} gives sequence {sequence} {} {what}, expected at most \
                     {most_name}={most}",
                    pair[1] - pair[0]
                )));
            }
        }
        let starts: Vec<usize> = starts.into_iter().map(|start| start.max(0) as usize).collect();
        if let Some(last) = starts.last().filter(|last| **last > rows) {
            return Err(PyValueError::new_err(format!(
                "{starts_name} ends at {last}, expected at most the {rows} rows of {}",
                self.name
            )));
        }
        let placement = Placement::packed(starts);
        Ok(match lengths {
            None => placement,
            Some(lengths) => {
                let room = |at| placement.length(at);
                let lengths = lengths_within(lengths_name, &lengths, room)?;
                placement.with_lengths(lengths)
            }
        })
    }
}

/// Where sequences of these lengths are in a cache, by its list of batch entries or its table of
/// pages; names are of the cache, the list and the table.
fn in_cache(
    form: &Form,
    ends: Vec<usize>,
    (entries, pages): (Option<Vec<i32>>, Option<Vec<i32>>),
    [cache, list, table]: [&str; 3],
) -> PyResult<Placement> {
    let [there, size, ..] = form.sizes.map(|size| size as usize);
    let outside = |name: &str, sequence: usize, given: i32| {
        PyValueError::new_err(format!(
            "{name} has {given} for sequence {sequence}, expected from 0 to below the {there} of \
             {cache}"
        ))
    };
    let inside = |given: i32| usize::try_from(given).is_ok_and(|given| given < there);
    if let Some(pages) = pages {
        let columns = pages.len().checked_div(ends.len()).unwrap_or(0);
        for (sequence, end) in ends.iter().enumerate() {
            let used = &pages[sequence * columns..][..end.div_ceil(size.max(1))];
            if let Some(given) = used.iter().find(|page| !inside(**page)) {
                return Err(outside(table, sequence, *given));
            }
        }
        // What is behind a sequence's end may be anything.
        let pages = pages.into_iter().map(|page| page.max(0) as u32).collect();
        let pages = Pages::new(size, columns, pages).map_err(error::value)?;
        return Ok(Placement::paged(ends, pages));
    }
    let Some(entries) = entries else {
        return Ok(Placement::padded(ends));
    };
    if let Some(sequence) = entries.iter().position(|entry| !inside(*entry)) {
        return Err(outside(list, sequence, entries[sequence]));
    }
    Ok(Placement::entries(ends, entries.into_iter().map(|entry| entry as usize).collect()))
}

/// A list of lengths, each at most what there is room for.
fn lengths_within(
    name: &str,
    lengths: &[i32],
    room: impl Fn(usize) -> usize,
) -> PyResult<Vec<usize>> {
    let check = |(sequence, length): (usize, &i32)| {
        let room = room(sequence);
        usize::try_from(*length).ok().filter(|length| *length <= room).ok_or_else(|| {
            PyValueError::new_err(format!(
                "{name} has {length} for sequence {sequence}, expected from 0 to {room}"
            ))
        })
    };
    lengths.iter().enumerate().map(check).collect()
}

/// Where sequences begin when they lie one after the other.
fn starts(placement: &Placement) -> Vec<usize> {
    let mut starts = vec![0];
    for sequence in 0..placement.sequences() {
        starts.push(starts[sequence] + placement.length(sequence));
    }
    starts
}

/// The rows of a placement, sequence after sequence.
///
/// # Safety
///
/// The placement must be inside of the view, and the view of memory that stays as it is.
unsafe fn gather(view: &View, placement: &Placement) -> PyResult<Tensor> {
    let Form { sizes: [_, _, heads, dim], dtype, .. } = view.form;
    let rows = (0..placement.sequences()).map(|sequence| placement.length(sequence)).sum();
    let shape = Shape::new(1, rows, heads as usize, dim as usize);
    let mut tensor = Tensor::zeros(dtype, shape).map_err(|error| error::library(error.into()))?;
    let bytes = (dim as usize * dtype.bytes()).max(1);
    let mut to = tensor.bytes_mut().chunks_exact_mut(bytes);
    for sequence in 0..placement.sequences() {
        for position in 0..placement.length(sequence) {
            let place = placement.locate(sequence, position);
            for (head, to) in (0..heads as usize).zip(&mut to) {
                let from = vector(view, place, head) as *const u8;
                // SAFETY: the caller's promise.
                unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), bytes) };
            }
        }
    }
    Ok(tensor)
}

/// Writes what [`gather`] would give to where it would take it from.
///
/// # Safety
///
/// As for [`gather`]; nobody else may use the memory.
unsafe fn scatter(tensor: &Tensor, view: &View, placement: &Placement) {
    let mut from = vectors(tensor);
    for sequence in 0..placement.sequences() {
        for position in 0..placement.length(sequence) {
            // SAFETY: the caller's promise.
            unsafe { copy_row(&mut from, view, placement.locate(sequence, position)) };
        }
    }
}

/// The vectors of a tensor without gaps.
fn vectors(tensor: &Tensor) -> std::slice::ChunksExact<'_, u8> {
    let bytes = tensor.shape().dim * tensor.dtype().bytes();
    tensor.bytes().chunks_exact(bytes.max(1))
}

/// Writes the next vectors, one for each head, to a row of a view.
///
/// # Safety
///
/// The row must be inside of the view.
unsafe fn copy_row(from: &mut std::slice::ChunksExact<'_, u8>, view: &View, place: (usize, usize)) {
    for (head, from) in (0..view.form.sizes[2] as usize).zip(from) {
        let to = vector(view, place, head) as *mut u8;
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
    }
}

/// The address of a vector.
fn vector(view: &View, (entry, row): (usize, usize), head: usize) -> u64 {
    let [by_entry, by_row, by_head, _] = view.form.strides.map(|stride| stride as usize);
    let offset = entry * by_entry + row * by_row + head * by_head;
    view.address + (offset * view.form.dtype.bytes()) as u64
}

fn contiguous(sizes: [i64; 4]) -> [i64; 4] {
    crate::view::contiguous(crate::view::Convention::FlashAttention, sizes)
}

/// The numbers of a list.
///
/// # Safety
///
/// It must be a list of `i32` without gaps in host memory.
unsafe fn integers(list: &Memory) -> Vec<i32> {
    let count = list.sizes().iter().product::<i64>() as usize;
    if count == 0 {
        return Vec::new();
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(list.address as *const i32, count) }.to_vec()
}

/// As [`integers`], of `f32`.
unsafe fn floats(list: &Memory) -> Vec<f32> {
    let count = list.sizes().iter().product::<i64>() as usize;
    if count == 0 {
        return Vec::new();
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(list.address as *const f32, count) }.to_vec()
}

/// A table without gaps of any element type.
///
/// # Safety
///
/// It must be in host memory.
unsafe fn table(table: &Memory, dtype: DType) -> PyResult<Vec<f32>> {
    let [rows, columns] = [table.sizes[0] as usize, table.sizes[1] as usize];
    let layout = Layout::contiguous(Shape::new(1, rows, 1, columns));
    let layout = layout.map_err(|error| error::library(error.into()))?;
    // SAFETY: the caller's promise.
    let bytes = unsafe {
        std::slice::from_raw_parts(table.address as *const u8, layout.span() * dtype.bytes())
    };
    let tensor = Tensor::from_bytes(dtype, layout, bytes);
    Ok(tensor.map_err(|error| error::library(error.into()))?.to_f32())
}
