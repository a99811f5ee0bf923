//! Block-sparse patterns: for each block of queries, the list of key blocks that it sees, as the
//! caller has it.
//!
//! A pattern is a mask like any other ([`rules::blocks`]), which loads a byte for each pair of
//! blocks from a tensor. So it works with every family, with masks by name and with other
//! functions. Where kernels walk lists, hidden blocks are not loaded; where a kernel's tile crosses
//! the edge of a block of the pattern, the byte is looked up pair by pair.

use super::node::Stored;
use super::{Function, HostTensor, rules};

/// Which blocks of keys each block of queries sees.
///
/// ```
/// use flashcore_kernels::attention::function::BlockPattern;
///
/// // Blocks of 64 queries and 32 keys: the first row sees block 0, the second blocks 1 and 2.
/// let pattern = BlockPattern::from_bcsr([64, 32], [128, 96], &[0, 1, 3], &[0, 1, 2])?;
/// assert_eq!(pattern.blocks(), 3);
/// let (mask, tensor) = (pattern.mask(), pattern.tensor());
/// assert_eq!((mask.tensors()[0].name.as_str(), &tensor.extents[..]), ("blocks", &[1, 1, 2, 3][..]));
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockPattern {
    /// Queries and keys per block.
    size: [usize; 2],
    /// Number of sequences, heads, blocks of queries and blocks of keys.
    extents: [usize; 4],
    /// The state of each pair of blocks: [`HIDDEN`], [`BY_FUNCTION`] or [`WHOLE`].
    states: Vec<u8>,
}

/// A block that is not seen.
const HIDDEN: u8 = 0;
/// A block in which another function decides which pairs are seen.
const BY_FUNCTION: u8 = 1;
/// A block that is seen whole.
const WHOLE: u8 = 2;

/// Lists of key blocks in FlexAttention's format: for each sequence, head and block of queries, the
/// number of key blocks and their indices, in a row of `columns` of which the first ones count.
#[derive(Clone, Copy, Debug)]
pub struct KeyBlocks<'a> {
    /// Number of key blocks, by (sequence, head, block of queries).
    pub counts: &'a [i32],
    /// Indices of key blocks, by (sequence, head, block of queries, column).
    pub indices: &'a [i32],
    /// Row length of `indices`.
    pub columns: usize,
}

impl BlockPattern {
    /// Returns a pattern that hides everything.
    fn hidden(
        size: [usize; 2],
        lengths: [usize; 2],
        [batch, heads]: [usize; 2],
    ) -> Result<Self, String> {
        if size.contains(&0) {
            return Err(format!("blocks of {} queries and {} keys are empty", size[0], size[1]));
        }
        let extents = [
            batch.max(1),
            heads.max(1),
            lengths[0].div_ceil(size[0]).max(1),
            lengths[1].div_ceil(size[1]).max(1),
        ];
        let states = vec![HIDDEN; extents.iter().product()];
        Ok(BlockPattern { size, extents, states })
    }

    /// Takes compressed rows of blocks (BCSR), the same for all sequences and heads: the row of
    /// query blocks `row` sees the key blocks `indices[indptr[row]..indptr[row + 1]]`. `size` and
    /// `lengths` are those of queries and of keys. An error says what is out of bounds.
    pub fn from_bcsr(
        size: [usize; 2],
        lengths: [usize; 2],
        indptr: &[i32],
        indices: &[i32],
    ) -> Result<Self, String> {
        let mut pattern = BlockPattern::hidden(size, lengths, [1, 1])?;
        let rows = lengths[0].div_ceil(size[0]);
        if indptr.len() != rows + 1 {
            return Err(format!("indptr has {} numbers, expected {}", indptr.len(), rows + 1));
        }
        for (row, ends) in indptr.windows(2).enumerate() {
            let range = usize::try_from(ends[0]).ok().zip(usize::try_from(ends[1]).ok());
            let columns = range.and_then(|(begin, end)| indices.get(begin..end));
            let Some(columns) = columns else {
                let [begin, end] = [ends[0], ends[1]];
                let count = indices.len();
                return Err(format!("row {row} has indices {begin} to {end}, of {count}"));
            };
            for column in columns {
                pattern.set([0, 0, row], *column, WHOLE)?;
            }
        }
        Ok(pattern)
    }

    /// Takes FlexAttention's lists by sequence and head, where `batch` or `heads` of 1 means one
    /// list for all: blocks in which a function decides, and blocks that are seen whole.
    pub fn from_key_blocks(
        size: [usize; 2],
        lengths: [usize; 2],
        [batch, heads]: [usize; 2],
        by_function: KeyBlocks<'_>,
        whole: Option<KeyBlocks<'_>>,
    ) -> Result<Self, String> {
        let mut pattern = BlockPattern::hidden(size, lengths, [batch, heads])?;
        let rows = batch.max(1) * heads.max(1) * lengths[0].div_ceil(size[0]);
        let lists = [(Some(by_function), BY_FUNCTION), (whole, WHOLE)];
        for (KeyBlocks { counts, indices, columns }, state) in
            lists.into_iter().filter_map(|(lists, state)| lists.map(|lists| (lists, state)))
        {
            if counts.len() != rows || indices.len() != rows * columns {
                return Err(format!(
                    "there are {} counts and {} indices, expected {rows} and {}",
                    counts.len(),
                    indices.len(),
                    rows * columns
                ));
            }
            for (row, count) in counts.iter().enumerate() {
                let list = &indices[row * columns..][..columns];
                let count = usize::try_from(*count).ok();
                let Some(list) = count.and_then(|count| list.get(..count)) else {
                    return Err(format!("row {row} has {} blocks, of {columns}", counts[row]));
                };
                let blocks = pattern.extents[2];
                let (head, row) = (row / blocks, row % blocks);
                for column in list {
                    pattern.set([head / heads.max(1), head % heads.max(1), row], *column, state)?;
                }
            }
        }
        Ok(pattern)
    }

    fn set(
        &mut self,
        [batch, head, row]: [usize; 3],
        column: i32,
        state: u8,
    ) -> Result<(), String> {
        let [_, heads, rows, columns] = self.extents;
        match usize::try_from(column).ok().filter(|column| *column < columns) {
            Some(column) => {
                let at = &mut self.states[((batch * heads + head) * rows + row) * columns + column];
                *at = (*at).max(state);
                Ok(())
            }
            None => Err(format!("row {row} has block {column}, of {columns}")),
        }
    }

    /// Returns how many pairs of blocks are seen, whole or in part.
    pub fn blocks(&self) -> usize {
        self.states.iter().filter(|state| **state != HIDDEN).count()
    }

    /// Returns the mask that sees these blocks.
    pub fn mask(&self) -> Function {
        rules::blocks(self.block_size(), self.apart())
    }

    /// Returns the mask that sees the whole blocks, and of the others the pairs that another mask
    /// sees.
    pub fn with_mask(&self, other: Function) -> Result<Function, String> {
        let whole = rules::whole_blocks(self.block_size(), self.apart());
        whole.or(self.mask().and(other)?)
    }

    /// Returns the tensor that the mask loads from: `blocks`, u8, (batch, head, query block, key
    /// block).
    pub fn tensor(&self) -> HostTensor {
        HostTensor::new("blocks", Stored::U8, &self.extents, self.states.clone())
    }

    fn block_size(&self) -> [i32; 2] {
        self.size.map(|size| i32::try_from(size).unwrap_or(i32::MAX))
    }

    /// Returns whether sequences, and whether heads, have patterns of their own.
    fn apart(&self) -> [bool; 2] {
        [self.extents[0] > 1, self.extents[1] > 1]
    }
}

#[cfg(test)]
mod tests {
    use super::super::{BlockMask, Here, ListsOf, Row};
    use super::*;
    use crate::attention::Window;

    /// FlexAttention's lists: for one head a block by a function and a whole one, for the other one
    /// block.
    #[test]
    fn lists_say_what_is_seen() {
        let by_function = KeyBlocks { counts: &[1, 0, 0, 1], indices: &[1, 0, 0, 2], columns: 1 };
        let whole = KeyBlocks { counts: &[0, 1, 0, 0], indices: &[7, 0, 9, 9], columns: 1 };
        let pattern =
            BlockPattern::from_key_blocks([4, 3], [7, 8], [1, 2], by_function, Some(whole))
                .unwrap();
        assert_eq!(pattern.tensor().bytes, [0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1]);
        let odd = Function::mask("odd", |at| (at.key() % 2).eq(1));
        let (mask, tensors) = (pattern.with_mask(odd).unwrap(), [pattern.tensor()]);
        for (head, query, expected) in [
            (0, 0, vec![3, 5]),
            (0, 6, vec![0, 1, 2]),
            (1, 1, vec![]),
            // The last block has only two keys.
            (1, 4, vec![7]),
        ] {
            let here = Here { batch: 0, head, query, query_length: 7, key_length: 8 };
            let mut row = Row::new(mask, &tensors, here);
            let seen: Vec<usize> = (0..8).filter(|key| row.sees(*key)).collect();
            assert_eq!(seen, expected, "head {head}, query {query}");
        }
    }

    /// Tiles that divide blocks need the function nowhere; others where they cross an edge.
    #[test]
    fn kernels_walk_the_blocks_of_a_pattern() {
        let pattern =
            BlockPattern::from_bcsr([128, 64], [256, 256], &[0, 2, 3], &[0, 3, 2]).unwrap();
        let mask = |key_block| BlockMask {
            function: pattern.mask(),
            window: Window::DENSE,
            lengths: [256, 256],
            heads: 2,
            group: 1,
            batch: 3,
            query_rows: 128,
            key_block,
            lists: ListsOf::Queries,
        };
        let contents = [pattern.tensor()];
        // One pattern for all sequences and heads.
        assert_eq!(mask(64).words_over(&contents), [2, 0, 6, 0, 0, 1, 4, 0, 0, 0]);
        assert_eq!(mask(96).words_over(&contents), [2, 1, 4, 0, 1, 3, 0, 0]);
        assert_eq!(mask(96).strides(), [0, 0]);
    }

    #[test]
    fn what_is_out_of_bounds_is_refused() {
        let bcsr = |indptr: &[i32], indices: &[i32]| {
            BlockPattern::from_bcsr([64, 64], [128, 100], indptr, indices).unwrap_err()
        };
        assert_eq!(bcsr(&[0, 1], &[0]), "indptr has 2 numbers, expected 3");
        assert_eq!(bcsr(&[0, 1, 3], &[0, 1]), "row 1 has indices 1 to 3, of 2");
        assert_eq!(bcsr(&[0, -1, 1], &[0, 1]), "row 0 has indices 0 to -1, of 2");
        assert_eq!(bcsr(&[0, 1, 2], &[0, 2]), "row 1 has block 2, of 2");
        let empty = BlockPattern::from_bcsr([0, 64], [128, 128], &[0], &[]).unwrap_err();
        assert_eq!(empty, "blocks of 0 queries and 64 keys are empty");
        let lists = |counts: &[i32]| {
            let lists = KeyBlocks { counts, indices: &[0, 0], columns: 1 };
            BlockPattern::from_key_blocks([64, 64], [128, 128], [1, 1], lists, None).unwrap_err()
        };
        assert_eq!(lists(&[1]), "there are 1 counts and 2 indices, expected 2 and 2");
        assert_eq!(lists(&[1, 2]), "row 1 has 2 blocks, of 1");
    }
}
