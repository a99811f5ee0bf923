//! Where sequences begin and end in their tensors, and where a key is: the batch entry or page, and
//! the row in it.
//!
//! For kernels that read rows by address, padded, packed and paged storage differ only here. Lists
//! (starts, lengths, batch entries) may be absent, and whatever they or the block table hold,
//! results are clamped to the bounds of the launch.

use ptx::{Builder, Expression, GlobalAddress, Reg, S32, Select, SharedAddress, U32, U64, Value};

use crate::divisor::DivisorRegisters;
use crate::parameter::{List, Number, Tensor};

/// The storage of keys and values.
#[derive(Clone, Copy)]
pub(crate) struct Places {
    /// Address of the list of batch entries, 0 if absent; `None` where everything is in pages.
    entries: Option<Reg<GlobalAddress>>,
    /// Number of batch entries or pages of the cache.
    count: Reg<U32>,
    pages: Option<Pages>,
}

#[derive(Clone, Copy)]
struct Pages {
    table: Reg<GlobalAddress>,
    /// Columns of the block table: the most pages of a sequence.
    columns: Reg<U32>,
    size: DivisorRegisters,
}

impl Pages {
    fn parameters(k: &mut Builder) -> Self {
        Pages {
            table: List::BlockTable.address(k),
            columns: Number::PageColumns.read(k),
            size: DivisorRegisters::parameters(k, Number::PageSize),
        }
    }
}

impl Places {
    pub(crate) fn parameters(k: &mut Builder, paged: bool) -> Self {
        Places {
            entries: Some(List::BatchIndex.address(k)),
            count: Number::Entries.read(k),
            pages: paged.then(|| Pages::parameters(k)),
        }
    }

    /// Declares the parameters of paged storage alone, without batch entries.
    pub(crate) fn in_pages(k: &mut Builder) -> Self {
        let count = Number::Entries.read(k);
        Places { entries: None, count, pages: Some(Pages::parameters(k)) }
    }

    /// Touches a line of the block table, or its last one, so that it comes into L2 and its address
    /// is translated once on this multiprocessor, while lengths are still being read. The word goes
    /// to shared memory, where nobody reads it: the assembler drops loads into registers that nothing
    /// reads, and `prefetch.global.L2` holds up the loads behind it.
    pub(crate) fn touch_block_table(
        &self,
        k: &mut Builder,
        sequences: Reg<U32>,
        line: impl Into<Value<U32>>,
        to: impl Into<Value<SharedAddress>>,
    ) {
        const LINE: u32 = 128;
        let Some(Pages { table, columns, .. }) = &self.pages else { return };
        let last = k.eval(sequences * *columns - 1);
        let word = k.eval((line.into() * (LINE / 4)).minimum(last));
        k.copy_async_word(to, *table + word.convert::<U64>() * 4, None);
    }

    /// Returns the batch entry of a sequence; with pages, its row of the block table.
    pub(crate) fn entry(&self, k: &mut Builder, sequence: Reg<U32>) -> Reg<U32> {
        match self.entries {
            None => sequence,
            Some(_) if self.pages.is_some() => sequence,
            Some(entries) => {
                let entry = entry_of(k, entries, sequence, sequence.reinterpret::<S32>());
                let last = k.eval(self.count - 1);
                clamp(k, entry, last)
            }
        }
    }

    /// Returns the batch entry or page, and the row in it, of a row of a sequence. `entry` is the
    /// result of [`entry`](Places::entry). Rows beyond the table map to its last page: no query
    /// sees them.
    pub(crate) fn locate(
        &self,
        k: &mut Builder,
        entry: Reg<U32>,
        row: Reg<U32>,
    ) -> (Reg<U32>, Reg<U32>) {
        let (found, within) = self.look_up(k, entry, row);
        (self.bounded(k, found), within)
    }

    /// Returns the same as [`locate`](Places::locate), but with the word of the block table as
    /// loaded, so that a caller with no use for it yet does not wait for it.
    /// [`bounded`](Places::bounded) makes it a valid page.
    pub(crate) fn look_up(
        &self,
        k: &mut Builder,
        entry: Reg<U32>,
        row: Reg<U32>,
    ) -> (Reg<U32>, Reg<U32>) {
        let Some(Pages { table, columns, size }) = &self.pages else {
            return (entry, row);
        };
        let (index, within) = size.divide(k, row);
        let column = index.minimum(*columns - 1);
        let found = read_table(k, *table, *columns, entry, column);
        (k.eval(found.reinterpret::<U32>()), within)
    }

    /// Returns which row of its page a row of a sequence is.
    pub(crate) fn row_in_page(&self, k: &mut Builder, row: Reg<U32>) -> Reg<U32> {
        self.pages.map_or(row, |pages| pages.size.divide(k, row).1)
    }

    /// Clamps the result of [`look_up`](Places::look_up) to the pages that exist.
    pub(crate) fn bounded(&self, k: &mut Builder, found: Reg<U32>) -> Reg<U32> {
        match self.pages {
            None => found,
            Some(_) => {
                let (found, last) = (k.eval(found.reinterpret::<S32>()), k.eval(self.count - 1));
                clamp(k, found, last)
            }
        }
    }
}

/// Returns the page in a column of a sequence's row of the block table, clamped to the `count`
/// pages that exist.
pub(crate) fn page_of(
    k: &mut Builder,
    table: Reg<GlobalAddress>,
    columns: Reg<U32>,
    count: Reg<U32>,
    sequence: Reg<U32>,
    column: Value<U32>,
) -> Reg<U32> {
    let page = read_table(k, table, columns, sequence, column);
    let last = k.eval(count - 1);
    clamp(k, page, last)
}

fn read_table(
    k: &mut Builder,
    table: Reg<GlobalAddress>,
    columns: Reg<U32>,
    sequence: Reg<U32>,
    column: Value<U32>,
) -> Reg<S32> {
    let at = sequence.convert::<U64>() * columns.convert::<U64>() + column.convert::<U64>();
    k.load(table + at * 4)
}

/// The rows of sequences in a tensor, packed or each in a batch entry of its own. Lists may be
/// absent (address 0); whatever they hold, results are clamped to the bounds.
pub(crate) struct Span {
    /// List of where each sequence begins and where the last ends, for packed tensors.
    pub(crate) starts: Reg<GlobalAddress>,
    /// Rows of the tensor, per batch entry.
    pub(crate) rows: Reg<U32>,
    /// The most rows of a sequence.
    pub(crate) most: Reg<U32>,
    /// List of how many of its rows each sequence uses.
    pub(crate) lengths: Reg<GlobalAddress>,
}

impl Span {
    /// Declares the parameters of the queries' rows.
    pub(crate) fn queries(k: &mut Builder) -> Self {
        Span {
            starts: List::QueryStarts.address(k),
            rows: Tensor::Query.rows(k),
            most: Number::QueryLength.read(k),
            lengths: List::QueryLengths.address(k),
        }
    }

    /// Returns the first row of a sequence and how many rows it has.
    pub(crate) fn of(&self, k: &mut Builder, sequence: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        self.from(k, sequence, 0)
    }

    /// Returns the same as [`of`](Span::of); without a list of starts, a sequence begins at
    /// `otherwise`.
    pub(crate) fn from(
        &self,
        k: &mut Builder,
        sequence: Reg<U32>,
        otherwise: impl Into<Value<S32>>,
    ) -> (Reg<U32>, Reg<U32>) {
        let Span { starts, rows, most, lengths } = *self;
        let signed = |value: Reg<U32>| value.reinterpret::<S32>();
        let start = entry_of(k, starts, sequence, otherwise);
        let first = clamp(k, start, rows);
        let all = k.eval(first + most);
        let next = entry_of(k, starts, sequence + 1, signed(all));
        let next = clamp(k, next, rows);
        let room = k.eval(signed(next) - signed(first));
        let room = clamp(k, room, most);
        let length = entry_of(k, lengths, sequence, signed(room));
        (first, clamp(k, length, room))
    }
}

/// Returns the last of `count` sequences that begins no later than `place`, or the first one. `begin`
/// returns where a sequence begins, no earlier than the one before. The lanes of a warp
/// search 32 sequences at a time.
pub(crate) fn search(
    k: &mut Builder,
    count: Reg<U32>,
    place: Reg<U32>,
    begin: impl Fn(&mut Builder, Reg<U32>) -> Value<U32>,
) -> Reg<U32> {
    let lane = k.lane();
    let (first, left) = (k.variable::<U32>(0), k.variable(count));
    k.loop_(|k| {
        let step = k.eval((left + 31) / 32);
        let ahead = k.eval(lane * step);
        let begins = k.variable::<U32>(u32::MAX);
        k.if_(ahead.less(left), |k| {
            let sequence = k.eval(first + ahead);
            let found = begin(k, sequence);
            k.set(begins, found);
        });
        let passed = k.count_lanes(begins.at_most(place));
        let ahead = k.eval((passed.maximum(1) - 1) * step);
        k.set(first, first + ahead);
        k.set(left, (left - ahead).minimum(step));
        k.break_if(step.at_most(1));
    });
    first
}

/// Clamps a signed number from memory to `0..=most`.
#[track_caller]
pub(crate) fn clamp(k: &mut Builder, value: Reg<S32>, most: Reg<U32>) -> Reg<U32> {
    let most = most.reinterpret::<S32>();
    let bounded = k.eval(value.minimum(most).maximum(0));
    k.eval(bounded.reinterpret::<U32>())
}

/// Loads the 32-bit number at `index` of a list, or returns `otherwise` where the list is absent
/// (address 0).
#[track_caller]
pub(crate) fn entry_of(
    k: &mut Builder,
    list: Reg<GlobalAddress>,
    index: impl Into<Value<U32>>,
    otherwise: impl Into<Value<S32>>,
) -> Reg<S32> {
    // A register of its own, so that the load does not wait for `otherwise`, which may depend on
    // other loads.
    let value = k.variable(0);
    let index = k.eval(index);
    let present = k.eval(list.reinterpret::<U64>().differs(0));
    k.if_(present, |k| {
        let loaded = k.load::<S32, _>(list + index.convert::<U64>() * 4);
        k.set(value, loaded);
    });
    k.eval(present.select::<S32>(value, otherwise))
}

/// Returns the inclusive prefix sum over the lanes of the warp.
pub(crate) fn inclusive_sum(k: &mut Builder, value: Reg<U32>) -> Reg<U32> {
    let mut sum = value;
    for distance in [1, 2, 4, 8, 16] {
        let (other, exists) = k.shuffle_up(sum, distance);
        sum = k.eval(sum + exists.select::<U32>(other, 0));
    }
    sum
}
