//! Where a key is: the batch entry or page, and the row in it; and where sequences begin and end.
//!
//! This is all that a memory order has to say. A tile's rows are looked up a
//! tile ahead, so that the block table's latency is not in the way of copies.

use ptx::{
    Builder, Expression, GlobalAddress, LoadHint, LoadOrder, Reg, S32, Scope, U32, U64, Value,
};

use super::{clamp, entry_of};
use crate::divisor::DivisorRegisters;
use crate::parameter::{List, Number};

/// The memory order of keys and values.
pub(crate) struct Places {
    /// The batch entry of each sequence, or 0.
    entries: Reg<GlobalAddress>,
    /// Batch entries or pages that there are.
    count: Reg<U32>,
    pages: Option<Pages>,
}

struct Pages {
    table: Reg<GlobalAddress>,
    /// Pages of a sequence in the table.
    columns: Reg<U32>,
    size: DivisorRegisters,
}

impl Places {
    pub(crate) fn parameters(k: &mut Builder, paged: bool) -> Self {
        Places {
            entries: List::BatchIndex.address(k),
            count: Number::Entries.read(k),
            pages: paged.then(|| Pages {
                table: List::BlockTable.address(k),
                columns: Number::PageColumns.read(k),
                size: DivisorRegisters::parameters(k, Number::PageSize),
            }),
        }
    }

    /// Brings the block table into the second-level cache while lengths are still being read: each
    /// `thread` of the grid asks for a line of it and waits for nothing.
    pub(crate) fn warm(&self, k: &mut Builder, sequences: Reg<U32>, thread: Reg<U32>) {
        const LINE: u32 = 128;
        let Some(Pages { table, columns, .. }) = &self.pages else { return };
        let first = k.eval(thread * (LINE / 4));
        k.if_(first.less(sequences * *columns), |k| {
            // An ordinary load that nobody uses would be left out.
            let hint = LoadHint { order: LoadOrder::Relaxed(Scope::Gpu), ..Default::default() };
            let at = *table + first.convert::<U64>() * 4;
            let [_unused] = k.load_vector::<U32, _, 1>(at, hint);
        });
    }

    /// The batch entry of a sequence; with pages, its row of the block table.
    pub(crate) fn entry(&self, k: &mut Builder, sequence: Reg<U32>) -> Reg<U32> {
        match &self.pages {
            Some(_) => sequence,
            None => {
                let entry = entry_of(k, self.entries, sequence, sequence.reinterpret::<S32>());
                let last = k.eval(self.count - 1);
                clamp(k, entry, last)
            }
        }
    }

    /// The batch entry or page, and the row in it, of a row of a sequence's place; `entry` is what
    /// [`entry`](Places::entry) gave. Rows beyond the table are taken from its last page: nobody
    /// sees them.
    pub(crate) fn locate(
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
        let at = entry.convert::<U64>() * columns.convert::<U64>() + column.convert::<U64>();
        let page = k.load::<S32, _>(*table + at * 4);
        let last = k.eval(self.count - 1);
        (clamp(k, page, last), within)
    }
}

/// The rows of sequences in a tensor, packed or each in a batch entry of its own. Lists may be
/// absent (their address is 0); whatever they hold, what comes out is within the bounds.
pub(crate) struct Span {
    /// Where each sequence begins, and where the last ends.
    pub(crate) starts: Reg<GlobalAddress>,
    /// Of the tensor.
    pub(crate) rows: Reg<U32>,
    /// Of a sequence.
    pub(crate) most: Reg<U32>,
    /// How many of its rows each sequence uses.
    pub(crate) lengths: Reg<GlobalAddress>,
}

impl Span {
    /// The first row of a sequence, and how many it has.
    pub(crate) fn of(&self, k: &mut Builder, sequence: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        self.from(k, sequence, 0)
    }

    /// The same where a sequence begins at `otherwise` if there is no list that says where.
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
