//! Where a key is: the batch entry or page, and the row in it.
//!
//! This is all that a memory order has to say. A tile's rows are looked up a
//! tile ahead, so that the block table's latency is not in the way of copies.

use ptx::{Builder, Expression, GlobalAddress, Reg, S32, U32, U64};

use super::{clamp, entry_of};

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
    size: Reg<U32>,
}

impl Places {
    pub(crate) fn parameters(k: &mut Builder, paged: bool) -> Self {
        Places {
            entries: k.parameter("batch entries"),
            count: k.parameter("batch entries there are"),
            pages: paged.then(|| Pages {
                table: k.parameter("block table"),
                columns: k.parameter("pages of a sequence"),
                size: k.parameter("page size"),
            }),
        }
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
        let index = k.eval(row / *size);
        let within = k.eval(row - index * *size);
        let column = index.minimum(*columns - 1);
        let at = entry.convert::<U64>() * columns.convert::<U64>() + column.convert::<U64>();
        let page = k.load::<S32, _>(*table + at * 4);
        let last = k.eval(self.count - 1);
        (clamp(k, page, last), within)
    }
}
