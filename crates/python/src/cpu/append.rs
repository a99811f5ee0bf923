//! Appending new keys and values to a KV cache in host memory.

use flashcore::quantize;
use flashcore::serving::{self, Placement};
use flashcore::{Cancellation, Descale, Tensor};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::memory::{copy_row, floats, gather, list, optional, scatter, vector, vectors, wide};
use super::places::{Rows, in_cache, lengths_within};
use crate::boundary::room_for;
use crate::error;
use crate::update::{NAMES, Update};
use crate::view::{Form, Memory, View, contiguous};

/// Writes new keys and values to the cache, the new lengths to `after`, and the queries, rotated
/// like the keys, to `rotated`.
///
/// # Safety
///
/// The update must refer to host memory, and nothing else may use the caches meanwhile; `after`
/// must have room for the lengths, and `rotated` for the queries if there are rotary tables.
pub(crate) unsafe fn append(
    update: &Update,
    rotated: Option<u64>,
    after: u64,
    cancellation: &Cancellation,
) -> PyResult<()> {
    // SAFETY: the caller's promise, here and below.
    let integers = |memory: Option<&Memory>| unsafe { optional::<i32>(memory) };
    let (count, room) = (update.sequences, update.room);
    // SAFETY: the same.
    let lengths = lengths_within(NAMES[5], &unsafe { list(&update.lengths)? }, |_| room)?;
    let rows = |name, view: &View, starts: Option<&Memory>, list| {
        let form = &view.form;
        let most = ("rows", name, form.sizes[1] as usize);
        Rows { name, form, count }.placement((list, integers(starts)?), ("", None), most)
    };
    let new = rows(NAMES[2], &update.key, update.key_starts.as_ref(), NAMES[6])?;
    let mut grown = room_for(count)?;
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
    let lists = (integers(update.entries.as_ref())?, integers(update.pages.as_ref())?);
    let cache =
        in_cache(&update.key_cache.form, grown, lists, [NAMES[0], NAMES[8], update.pages_name])?;

    // SAFETY: as above.
    let gather = |view: &View, rows: &Placement| unsafe { gather(view, rows, cancellation) };
    let (mut key, value) = (gather(&update.key, &new)?, gather(&update.value, &new)?);
    let key_type = key.dtype();
    if update.rotary.is_some() && key_type != update.key_cache.form.dtype {
        // Kept in f32, so that keys are rounded only once, after the rotation.
        key = wide(&key)?;
    }
    if let Some(rotary) = &update.rotary {
        let (positions, dim) = rotary.sizes();
        // SAFETY: as above.
        let (cosines, sines) =
            unsafe { (floats(&rotary.cosines, key_type)?, floats(&rotary.sines, key_type)?) };
        let turn = serving::Rotary {
            dim,
            interleaved: rotary.interleaved,
            cosines: &cosines,
            sines: &sines,
        };
        let first = match integers(rotary.positions.as_ref())? {
            Some(list) => lengths_within(NAMES[12], &list, |_| positions)?,
            None => lengths,
        };
        let rotate = |tensor: &Tensor, rows: &Placement, advancing: bool| {
            let mut at = room_for(tensor.shape().length)?;
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
        if let Some(address) = rotated {
            let queries = rows(NAMES[4], &update.query, update.query_starts.as_ref(), NAMES[7])?;
            let query = rotate(&gather(&update.query, &queries)?, &queries, rotary.advancing)?;
            let sizes = update.query.form.sizes;
            let form = Form { sizes, strides: contiguous(sizes), ..update.query.form };
            // SAFETY: as above.
            unsafe { scatter(&query, &View { address, form }, &queries) };
        }
    }
    for (name, tensor, to, descale) in [
        (NAMES[13], key, &update.key_cache, &update.descales[0]),
        (NAMES[14], value, &update.value_cache, &update.descales[1]),
    ] {
        let tensor = match tensor.dtype() == to.form.dtype {
            true => tensor,
            // SAFETY: as above.
            false => unsafe { rounded(name, &tensor, to, descale, (&cache, &new))? },
        };
        let mut from = vectors(&tensor);
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

/// Quantizes new rows, sequence after sequence, to the 8-bit type of the cache. Per-token factors
/// are computed here and written to the positions that the rows will have.
///
/// # Safety
///
/// The factors must be in host memory, which nothing else may use if they are written; the
/// placement of the cache, including the new rows, must be inside of it.
unsafe fn rounded(
    name: &str,
    tensor: &Tensor,
    to: &View,
    descale: &Option<(Descale, View)>,
    (cache, new): (&Placement, &Placement),
) -> PyResult<Tensor> {
    let dtype = to.form.dtype;
    let wrong = |error: flashcore::TensorError| error::library(error.into());
    let mut small = Tensor::zeros(dtype, tensor.shape()).map_err(wrong)?;
    let mut row = vec![0.0; tensor.shape().dim];
    let mut index = 0;
    for sequence in 0..new.sequences() {
        let before = cache.length(sequence) - new.length(sequence);
        for position in 0..new.length(sequence) {
            for head in 0..tensor.shape().heads {
                tensor.head(0, head).read(index, &mut row);
                let factor = match descale {
                    None => 1.0,
                    Some((Descale::PerToken, view)) => {
                        let found = quantize::row_factor(&row, dtype);
                        let place = cache.locate(sequence, before + position);
                        // SAFETY: the caller's promise.
                        unsafe { *(vector(view, place, head) as *mut f32) = found };
                        found
                    }
                    Some((_, view)) => {
                        // SAFETY: the caller's promise.
                        unsafe { *(vector(view, (sequence, 0), head) as *const f32) }
                    }
                };
                if !(factor.is_finite() && factor > 0.0) {
                    return Err(PyValueError::new_err(format!(
                        "{name} has {factor} for sequence {sequence} and head {head}, expected a \
                         finite number above zero"
                    )));
                }
                quantize::divide(&mut row, factor);
                small.set_row([0, index, head], &row);
            }
            index += 1;
        }
    }
    Ok(small)
}
