//! Random sequences, caches and choices, determined by a seed.

use flashcore::random::mix;
use flashcore::serving::{Pages, Placement};
use flashcore::{Error, Shape};

const PAGE_SIZES: [usize; 8] = [1, 4, 16, 48, 64, 64, 128, 256];

/// A sequence of random numbers, determined by a seed.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Rng(seed)
    }

    pub(crate) fn below(&mut self, most: usize) -> usize {
        self.0 = mix(self.0);
        (self.0 >> 33) as usize % most.max(1)
    }

    pub(crate) fn choose<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    pub(crate) fn one_in(&mut self, chances: usize) -> bool {
        self.below(chances) == 0
    }

    /// Returns the numbers below `count` in a random order.
    pub(crate) fn shuffled(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for index in (1..count).rev() {
            order.swap(index, self.below(index + 1));
        }
        order
    }

    /// Returns a cache for sequences of these lengths, in pages or batch entries in random order.
    pub(crate) fn cache(
        &mut self,
        lengths: Vec<usize>,
        heads: usize,
        dim: usize,
    ) -> Result<(Placement, Shape), Error> {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if self.one_in(3) {
            let room = (longest + self.choose(&[0, 0, 3])).max(1);
            return Ok(self.entries(lengths, room, heads, dim));
        }
        let size = self.choose(&PAGE_SIZES);
        let room = longest.max(1) + self.choose(&[0, size]);
        self.paged(lengths, size, room, heads, dim)
    }

    /// Places sequences in batch entries in random order; one entry belongs to no sequence.
    pub(crate) fn entries(
        &mut self,
        lengths: Vec<usize>,
        room: usize,
        heads: usize,
        dim: usize,
    ) -> (Placement, Shape) {
        let batch = lengths.len();
        let entries = self.shuffled(batch + 1)[..batch].to_vec();
        (Placement::entries(lengths, entries), Shape::new(batch + 1, room, heads, dim))
    }

    /// Places sequences in pages in random order; some pages belong to no sequence.
    pub(crate) fn paged(
        &mut self,
        lengths: Vec<usize>,
        size: usize,
        room: usize,
        heads: usize,
        dim: usize,
    ) -> Result<(Placement, Shape), Error> {
        let columns = room.div_ceil(size);
        let count = lengths.len() * columns;
        let pages = count + 3;
        let mut table: Vec<u32> =
            self.shuffled(pages)[..count].iter().map(|page| *page as u32).collect();
        // Page-table entries beyond the end of a sequence are invalid page numbers.
        for (row, length) in table.chunks_mut(columns).zip(&lengths) {
            row[length.div_ceil(size)..].fill(u32::MAX - 7);
        }
        let shape = Shape::new(pages, size, heads, dim);
        Ok((Placement::paged(lengths, Pages::new(size, columns, table)?), shape))
    }

    /// Places `counts[i]` rows of sequence `i`, either packed or with a batch entry for each
    /// sequence.
    pub(crate) fn rows(
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
