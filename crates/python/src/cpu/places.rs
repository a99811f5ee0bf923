//! Where the rows of each sequence are stored, from the caller's lists, whose entries are checked
//! first.

use flashcore::serving::{Pages, Placement};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::boundary::collect;
use crate::error;
use crate::view::Form;

/// The rows of queries or of new keys, padded or packed, of `count` sequences.
pub(super) struct Rows<'a> {
    pub(super) name: &'a str,
    pub(super) form: &'a Form,
    pub(super) count: usize,
}

impl Rows<'_> {
    /// Returns where the rows are. Cumulative lengths, lengths and the maximum length come with
    /// their argument names.
    pub(super) fn placement(
        &self,
        (starts_name, starts): (&str, Option<Vec<i32>>),
        (lengths_name, lengths): (&str, Option<Vec<i32>>),
        (what, most_name, most): (&str, &str, usize),
    ) -> PyResult<Placement> {
        let rows = self.form.sizes[1] as usize;
        let Some(starts) = starts else {
            return Ok(Placement::padded(match lengths {
                Some(lengths) => lengths_within(lengths_name, &lengths, |_| rows)?,
                None => repeated(rows, self.count)?,
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
        }
        let end = starts.last().map_or(0, |end| (*end).max(0) as usize);
        if end > rows {
            return Err(PyValueError::new_err(format!(
                "{starts_name} ends at {end}, expected at most the {rows} rows of {}",
                self.name
            )));
        }
        for (sequence, pair) in starts.windows(2).enumerate() {
            if (pair[1] - pair[0]) as usize > most {
                return Err(PyValueError::new_err(format!(
                    "{starts_name} gives sequence {sequence} {} {what}, expected at most \
                     {most_name}={most}",
                    pair[1] - pair[0]
                )));
            }
        }
        let starts = collect(starts.into_iter().map(|start| Ok(start.max(0) as usize)))?;
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

/// Returns where sequences of these lengths are in a cache, by its list of batch entries or its
/// page table. The names are those of the cache, the list and the table.
pub(super) fn in_cache(
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
        // Page entries beyond the end of a sequence may hold anything.
        let pages = collect(pages.into_iter().map(|page| Ok(page.max(0) as u32)))?;
        let pages = Pages::new(size, columns, pages).map_err(error::value)?;
        return Ok(Placement::paged(ends, pages));
    }
    let Some(entries) = entries else {
        return Ok(Placement::padded(ends));
    };
    if let Some(sequence) = entries.iter().position(|entry| !inside(*entry)) {
        return Err(outside(list, sequence, entries[sequence]));
    }
    let entries = collect(entries.into_iter().map(|entry| Ok(entry as usize)))?;
    Ok(Placement::entries(ends, entries))
}

/// Checks a list of lengths, each against the room of its sequence.
pub(super) fn lengths_within(
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
    collect(lengths.iter().enumerate().map(check))
}

/// Returns a list of equal lengths.
pub(super) fn repeated(length: usize, count: usize) -> PyResult<Vec<usize>> {
    collect((0..count).map(|_| Ok(length)))
}
