//! Where the keys of sequences lie: in pages or batch entries in an order of their own, or packed.

use super::Random;
use super::arguments::Arguments;
use crate::Memory;

/// The place of each sequence in a cache.
pub(super) struct Cache {
    /// Batch entries or pages, and rows of one.
    pub(super) entries: usize,
    pub(super) rows: usize,
    /// Positions that a sequence has room for.
    pub(super) capacity: usize,
    order: Order,
}

enum Order {
    /// Which page, or which batch entry, holds which rows of which sequence.
    Table { columns: usize, paged: bool, table: Vec<u32> },
    /// Where each sequence begins, and the last ends.
    Packed { starts: Vec<u32> },
}

impl Cache {
    /// Pages of `page_size` positions, none of them shared and one of nobody; or without, a batch
    /// entry for each sequence.
    pub(super) fn new(
        random: &mut Random,
        sequences: usize,
        capacity: usize,
        page_size: Option<usize>,
    ) -> Self {
        let rows = page_size.unwrap_or(capacity);
        let columns = capacity.div_ceil(rows);
        let entries = sequences * columns + 1;
        let mut order: Vec<u32> = (0..entries as u32).collect();
        for index in (1..entries).rev() {
            let other = (random.number().abs() * 1e6) as usize % (index + 1);
            order.swap(index, other);
        }
        order.truncate(sequences * columns);
        let order = Order::Table { columns, paged: page_size.is_some(), table: order };
        Cache { entries, rows, capacity, order }
    }

    /// Sequences of these lengths one after the other, with a row between them that is of none.
    pub(super) fn packed(lengths: &[usize]) -> Self {
        let start = |sequence: usize| lengths[..sequence].iter().sum::<usize>() + sequence;
        let capacity = lengths.iter().copied().max().unwrap_or(0).max(1);
        let starts = (0..=lengths.len()).map(|sequence| start(sequence) as u32).collect();
        let rows = start(lengths.len());
        Cache { entries: 1, rows, capacity, order: Order::Packed { starts } }
    }

    /// The row of a position of a sequence, counted over all batch entries or pages.
    pub(super) fn row(&self, sequence: usize, position: usize) -> usize {
        match &self.order {
            Order::Table { columns, table, .. } => {
                let entry = table[sequence * columns + position / self.rows] as usize;
                entry * self.rows + position % self.rows
            }
            Order::Packed { starts } => starts[sequence] as usize + position,
        }
    }

    /// The stride from batch entry to batch entry.
    pub(super) fn batch_stride(&self, row: usize) -> usize {
        match self.order {
            Order::Table { .. } => self.rows * row,
            Order::Packed { .. } => 0,
        }
    }

    /// The lists and numbers by which a kernel finds its way.
    pub(super) fn describe(&self, memory: &mut Memory, known: Arguments) -> Arguments {
        let known = known.number("Entries", self.entries).number("KeyLength", self.capacity);
        let packed = |known: Arguments, rows, starts| {
            known.number("KeyRows", rows).list("KeyStarts", starts)
        };
        match &self.order {
            Order::Table { columns, paged, table } => {
                let table = memory.input_u32("block table", table);
                packed(known, self.capacity, None)
                    .list("BatchIndex", (!paged).then_some(table))
                    .address("BlockTable", table)
                    .number("PageColumns", *columns)
                    .divisor("PageSize", self.rows)
            }
            Order::Packed { starts } => {
                let starts = memory.input_u32("key starts", starts);
                packed(known, self.rows, Some(starts)).list("BatchIndex", None)
            }
        }
    }
}
