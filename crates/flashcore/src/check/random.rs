//! Sequences and caches at random, under a seed.

use crate::error::Error;
use crate::serving::{Pages, Placement};
use crate::tensor::Shape;
use crate::tensor::random::mix;

const PAGE_SIZES: [usize; 8] = [1, 4, 16, 48, 64, 64, 128, 256];

/// Numbers under a seed, one after the other.
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Self {
        Dice(seed)
    }

    pub(super) fn below(&mut self, most: usize) -> usize {
        self.0 = mix(self.0);
        (self.0 >> 33) as usize % most.max(1)
    }

    pub(super) fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    pub(super) fn one_in(&mut self, chances: usize) -> bool {
        self.below(chances) == 0
    }

    /// The numbers below `count` in another order.
    pub(super) fn shuffled(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for index in (1..count).rev() {
            order.swap(index, self.below(index + 1));
        }
        order
    }

    /// A cache for sequences of these lengths, in pages or batch entries in an order of their own.
    pub(super) fn cache(
        &mut self,
        lengths: Vec<usize>,
        heads: usize,
        dim: usize,
    ) -> Result<(Placement, Shape), Error> {
        let (batch, longest) = (lengths.len(), lengths.iter().copied().max().unwrap_or(0));
        if self.one_in(3) {
            let entries = self.shuffled(batch + 1)[..batch].to_vec();
            let room = (longest + self.of(&[0, 0, 3])).max(1);
            return Ok((
                Placement::entries(lengths, entries),
                Shape::new(batch + 1, room, heads, dim),
            ));
        }
        let size = self.of(&PAGE_SIZES);
        let columns = longest.div_ceil(size).max(1) + self.below(2);
        let pages = batch * columns + 3;
        let mut table: Vec<u32> =
            self.shuffled(pages)[..batch * columns].iter().map(|page| *page as u32).collect();
        // Pages beyond a sequence's end are nonsense.
        for (row, length) in table.chunks_mut(columns).zip(&lengths) {
            row[length.div_ceil(size)..].fill(u32::MAX - 7);
        }
        let shape = Shape::new(pages, size, heads, dim);
        Ok((Placement::paged(lengths, Pages::new(size, columns, table)?), shape))
    }

    /// Rows of so many for each sequence, packed or in a batch entry for each.
    pub(super) fn rows(
        &mut self,
        counts: &[usize],
        heads: usize,
        dim: usize,
    ) -> (Placement, Shape) {
        if self.one_in(2) {
            let starts: Vec<usize> =
                (0..=counts.len()).map(|count| counts[..count].iter().sum()).collect();
            let shape = Shape::new(1, starts[counts.len()], heads, dim);
            return (Placement::packed(starts), shape);
        }
        let room = counts.iter().copied().max().unwrap_or(0).max(1);
        (Placement::padded(counts.to_vec()), Shape::new(counts.len(), room, heads, dim))
    }
}
