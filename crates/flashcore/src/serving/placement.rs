//! Where the rows of each sequence are in a tensor.

use super::ServingError;
use crate::tensor::Shape;

/// How long each sequence is and where its rows are in a tensor (batch, length, heads, dim).
///
/// | constructor | location of position `p` of sequence `i` | the tensor |
/// | --- | --- | --- |
/// | [`padded`](Placement::padded) | batch entry `i`, row `p` | (sequences, room, heads, dim) |
/// | [`packed`](Placement::packed) | batch entry 0, row `starts[i] + p` | (1, all rows, heads, dim) |
/// | [`paged`](Placement::paged) | page `table[i][p / size]`, row `p % size` | (pages, size, heads, dim) |
///
/// Lengths count from the beginning of a sequence's place. With [left
/// padding](Placement::with_left_padding), the first rows of the place do not belong to the
/// sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    storage: Storage,
    /// Rows of each sequence's place that are used, left padding included.
    ends: Vec<usize>,
    /// Left padding of each sequence; empty where there is none.
    skipped: Vec<usize>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Storage {
    /// Each sequence has its own batch entry: the listed one, or without a list the one of its
    /// index.
    Padded { entries: Vec<usize> },
    /// Sequences one after the other; there is one more start than sequences.
    Packed { starts: Vec<usize> },
    /// Sequences in pages of a cache.
    Paged { pages: Pages },
}

/// The block table: which pages hold which sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pages {
    size: usize,
    columns: usize,
    table: Vec<u32>,
}

impl Pages {
    /// Takes a table with a row of `columns` page numbers per sequence, for pages of `size`
    /// positions.
    pub fn new(size: usize, columns: usize, table: Vec<u32>) -> Result<Self, ServingError> {
        if size == 0 {
            return Err(ServingError::PageSize);
        }
        if table.len().checked_rem(columns).unwrap_or(table.len()) != 0 {
            let expected = table.len().next_multiple_of(columns.max(1));
            let (list, given) = ("the block table", table.len());
            return Err(ServingError::Entries { list, given, expected });
        }
        Ok(Pages { size, columns, table })
    }

    /// Returns the number of positions per page.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the maximum number of pages per sequence.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the table, one row after the other.
    pub fn table(&self) -> &[u32] {
        &self.table
    }

    /// Returns the pages of a sequence.
    fn row(&self, sequence: usize) -> &[u32] {
        &self.table[sequence * self.columns..][..self.columns]
    }
}

impl Placement {
    /// Places sequence `i` in the first `lengths[i]` rows of batch entry `i`.
    pub fn padded(lengths: Vec<usize>) -> Self {
        Placement {
            storage: Storage::Padded { entries: Vec::new() },
            ends: lengths,
            skipped: Vec::new(),
        }
    }

    /// Places sequence `i` in the first `lengths[i]` rows of batch entry `entries[i]`.
    pub fn entries(lengths: Vec<usize>, entries: Vec<usize>) -> Self {
        Placement { storage: Storage::Padded { entries }, ends: lengths, skipped: Vec::new() }
    }

    /// Places sequence `i` in the rows from `starts[i]` to `starts[i + 1]`: cumulative lengths.
    pub fn packed(starts: Vec<usize>) -> Self {
        let ends = starts.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect();
        Placement { storage: Storage::Packed { starts }, ends, skipped: Vec::new() }
    }

    /// Places sequence `i` in the first `lengths[i]` positions of the pages in row `i` of the
    /// table.
    pub fn paged(lengths: Vec<usize>, pages: Pages) -> Self {
        Placement { storage: Storage::Paged { pages }, ends: lengths, skipped: Vec::new() }
    }

    /// Uses only the first `lengths[i]` rows of each sequence's place.
    pub fn with_lengths(self, lengths: Vec<usize>) -> Self {
        Placement { ends: lengths, ..self }
    }

    /// Skips the first `skipped[i]` rows of each sequence's place.
    pub fn with_left_padding(self, skipped: Vec<usize>) -> Self {
        Placement { skipped, ..self }
    }

    /// Returns the number of sequences.
    pub fn sequences(&self) -> usize {
        self.ends.len()
    }

    /// Returns the length of a sequence without padding; zero where the padding exceeds it.
    pub fn length(&self, sequence: usize) -> usize {
        self.ends[sequence].saturating_sub(self.skip(sequence))
    }

    /// Returns the length of the longest sequence.
    pub fn longest(&self) -> usize {
        (0..self.sequences()).map(|sequence| self.length(sequence)).max().unwrap_or(0)
    }

    /// Returns the block table of a paged placement.
    pub fn pages(&self) -> Option<&Pages> {
        match &self.storage {
            Storage::Paged { pages } => Some(pages),
            _ => None,
        }
    }

    /// Returns the cumulative lengths of a packed placement.
    pub fn starts(&self) -> Option<&[usize]> {
        match &self.storage {
            Storage::Packed { starts } => Some(starts),
            _ => None,
        }
    }

    /// Returns the batch entry of a padded sequence.
    pub fn entry(&self, sequence: usize) -> Option<usize> {
        match &self.storage {
            Storage::Padded { entries } => Some(*entries.get(sequence).unwrap_or(&sequence)),
            _ => None,
        }
    }

    /// Returns the used rows of each sequence's place, left padding included.
    pub fn ends(&self) -> &[usize] {
        &self.ends
    }

    /// Returns the left padding of each sequence; empty where there is none.
    pub fn left_padding(&self) -> &[usize] {
        &self.skipped
    }

    /// Tells whether every sequence fills its place, in a tensor with `rows` rows per batch entry.
    pub(super) fn is_full(&self, rows: usize) -> bool {
        match self.starts() {
            Some(starts) => {
                starts.windows(2).map(|pair| pair[1] - pair[0]).eq(self.ends.iter().copied())
            }
            None => self.ends.iter().all(|length| *length == rows),
        }
    }

    /// Returns the location of a position: the batch entry or page, and the row in it.
    ///
    /// # Panics
    ///
    /// If there is no such sequence or the position is beyond its place.
    pub fn locate(&self, sequence: usize, position: usize) -> (usize, usize) {
        let row = self.skip(sequence) + position;
        match &self.storage {
            Storage::Padded { entries } => (*entries.get(sequence).unwrap_or(&sequence), row),
            Storage::Packed { starts } => (0, starts[sequence] + row),
            Storage::Paged { pages } => {
                let page = pages.row(sequence)[row / pages.size];
                (page as usize, row % pages.size)
            }
        }
    }

    fn skip(&self, sequence: usize) -> usize {
        self.skipped.get(sequence).copied().unwrap_or(0)
    }

    /// Refuses lists that contradict each other.
    pub fn validate(&self) -> Result<(), ServingError> {
        let expected = self.sequences();
        let entries = |list, given| match given == expected {
            true => Ok(()),
            false => Err(ServingError::Entries { list, given, expected }),
        };
        match &self.storage {
            Storage::Padded { entries: list } if !list.is_empty() => {
                entries("the list of batch entries", list.len())?;
            }
            Storage::Padded { .. } => {}
            Storage::Packed { starts } => {
                entries("the list of lengths", starts.len().saturating_sub(1))?;
                for (sequence, pair) in starts.windows(2).enumerate() {
                    let (from, to) = (pair[0], pair[1]);
                    if to < from {
                        return Err(ServingError::Falling { sequence, from, to });
                    }
                    self.has_room(sequence, to - from)?;
                }
            }
            Storage::Paged { pages } => {
                let rows = pages.table.len().checked_div(pages.columns).unwrap_or(expected);
                entries("the block table", rows)?;
                for sequence in 0..expected {
                    self.has_room(sequence, pages.columns.saturating_mul(pages.size))?;
                }
            }
        }
        if !self.skipped.is_empty() {
            entries("the left padding", self.skipped.len())?;
        }
        for (sequence, &length) in self.ends.iter().enumerate() {
            let skipped = self.skip(sequence);
            if skipped > length {
                return Err(ServingError::Padding { sequence, length, skipped });
            }
        }
        Ok(())
    }

    /// Refuses a tensor that has no room for the sequences, and lists that contradict each other.
    pub fn fits(&self, tensor: Shape) -> Result<(), ServingError> {
        self.validate()?;
        let inside = |sequence, what, given, existing| match given < existing {
            true => Ok(()),
            false => Err(ServingError::Outside { sequence, what, given, existing }),
        };
        for (sequence, &length) in self.ends.iter().enumerate() {
            match &self.storage {
                Storage::Padded { entries } => {
                    let entry = *entries.get(sequence).unwrap_or(&sequence);
                    inside(sequence, "batch entry", entry, tensor.batch)?;
                    self.has_room(sequence, tensor.length)?;
                }
                Storage::Packed { starts } => {
                    if length > 0 {
                        inside(sequence, "batch entry", 0, tensor.batch)?;
                        let last = starts[sequence] + length - 1;
                        inside(sequence, "row", last, tensor.length)?;
                    }
                }
                Storage::Paged { pages } => {
                    if tensor.length != pages.size {
                        let (given, expected) = (tensor.length, pages.size);
                        return Err(ServingError::PageMismatch { given, expected });
                    }
                    for page in &pages.row(sequence)[..length.div_ceil(pages.size)] {
                        inside(sequence, "page", *page as usize, tensor.batch)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn has_room(&self, sequence: usize, room: usize) -> Result<(), ServingError> {
        let length = self.ends[sequence];
        if length > room {
            return Err(ServingError::TooLong { sequence, length, room });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_where_the_table_says() {
        let shape = Shape::new(9, 4, 2, 8);
        let pages = || Pages::new(4, 2, vec![8, 3, 0, 0]).unwrap();
        let paged = Placement::paged(vec![7, 2], pages()).with_left_padding(vec![1, 0]);
        assert_eq!(paged.validate(), Ok(()));
        assert_eq!(paged.fits(shape), Ok(()));
        assert_eq!((paged.length(0), paged.longest()), (6, 6));
        assert_eq!((paged.locate(0, 0), paged.locate(0, 3)), ((8, 1), (3, 0)));
        assert_eq!(paged.locate(1, 1), (0, 1));

        let packed = Placement::packed(vec![0, 3, 3, 10]).with_lengths(vec![3, 0, 5]);
        assert_eq!(packed.validate(), Ok(()));
        assert_eq!(packed.fits(Shape::new(1, 10, 2, 8)), Ok(()));
        assert_eq!((packed.length(1), packed.locate(2, 4)), (0, (0, 7)));

        let entries = Placement::entries(vec![4, 4], vec![5, 5]);
        assert_eq!(entries.locate(1, 2), (5, 2));
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let refusal = |placement: Placement, shape: Shape| {
            let verdict = placement.validate().and_then(|()| placement.fits(shape));
            verdict.unwrap_err().to_string()
        };
        let shape = Shape::new(2, 10, 1, 8);
        assert_eq!(
            refusal(Placement::packed(vec![0, 5, 3]), shape),
            "cumulative lengths fall from 5 to 3 after sequence 1"
        );
        assert_eq!(
            refusal(Placement::packed(vec![0, 5]).with_lengths(vec![6]), shape),
            "sequence 0 has 6 positions, and there is room for 5"
        );
        assert_eq!(
            refusal(Placement::packed(vec![0, 5, 11]), shape),
            "sequence 1 is in row 10, and there are 10"
        );
        assert_eq!(
            refusal(Placement::padded(vec![3, 11]), shape),
            "sequence 1 has 11 positions, and there is room for 10"
        );
        assert_eq!(
            refusal(Placement::padded(vec![3, 3]).with_left_padding(vec![0, 4]), shape),
            "sequence 1 has 3 positions, of which 4 are padding"
        );
        assert_eq!(
            refusal(Placement::entries(vec![3, 3], vec![0, 2]), shape),
            "sequence 1 is in batch entry 2, and there are 2"
        );
        let pages = |size, table| Pages::new(size, 2, table).unwrap();
        assert_eq!(
            refusal(Placement::paged(vec![20, 21], pages(10, vec![0; 4])), shape),
            "sequence 1 has 21 positions, and there is room for 20"
        );
        assert_eq!(
            refusal(Placement::paged(vec![20, 11], pages(10, vec![0, 1, 0, 2])), shape),
            "sequence 1 is in page 2, and there are 2"
        );
        assert_eq!(
            refusal(Placement::paged(vec![4, 4], pages(16, vec![0; 4])), shape),
            "pages have 10 positions in the cache and 16 in the block table"
        );
        assert_eq!(
            refusal(Placement::paged(vec![4], pages(16, vec![0; 4])), shape),
            "the block table has 2 entries, expected 1"
        );
        assert!(Pages::new(0, 1, vec![]).is_err() && Pages::new(4, 3, vec![0; 4]).is_err());
    }
}
