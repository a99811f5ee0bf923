//! Masks by name inside kernels: which keys a row sees, which key blocks a tile of rows needs, and
//! how scores of hidden keys are masked.
//!
//! For every mask kind, the first and the last visible key never decrease with the row's position.
//! So the first and the last row of a tile determine everything: the tile needs the blocks from the
//! first row's first key to the last row's last key, and every row sees all keys between the last
//! row's first key and the first row's last key, which need no mask.

use ptx::{Builder, Expression, F32, Pred, Reg, S32, Select, U32, Value};

use super::{MaskKind, Score, Window};
use crate::divisor::DivisorRegisters;
use crate::parameter::{Number, Reach};

/// A mask kind with its launch parameters.
#[derive(Clone, Copy)]
pub(crate) enum Visibility {
    /// Every key is visible.
    Dense,
    /// Keys up to the row's position are visible.
    Causal,
    /// A window around the row's position is visible.
    Window(WindowRegisters),
}

/// The launch parameters of a window: its reach before and after the position.
#[derive(Clone, Copy)]
pub(crate) struct WindowRegisters {
    left: Reg<S32>,
    right: Reg<S32>,
    /// Length of a chunk, where the mask is chunked.
    chunk: Option<DivisorRegisters>,
}

/// A tile of consecutive query rows of a sequence.
#[derive(Clone, Copy)]
pub(crate) struct RowTile {
    pub(crate) first_row: Reg<U32>,
    /// Rows of the tile; those beyond the sequence's queries do not count.
    pub(crate) rows: u32,
    pub(crate) query_length: Reg<U32>,
    pub(crate) key_length: Reg<U32>,
}

/// The block size of the keys, and the registers that receive the blocks that a tile needs.
#[derive(Clone, Copy)]
pub(crate) struct Blocks {
    /// Keys per block.
    pub(crate) size: u32,
    /// The fewest blocks that a tile gets: 1 where the kernel also walks tiles that see nothing.
    pub(crate) least: u32,
    /// Receives the first block that the tile needs; only with a window.
    pub(crate) first: Option<Reg<U32>>,
    /// Receives the end (exclusive) of the blocks that the tile needs.
    pub(crate) end: Reg<U32>,
}

/// The blocks of a tile that need masking, because some row does not see all of their keys.
pub(crate) struct Masked {
    /// Blocks from this one on need masking.
    pub(crate) from: Value<U32>,
    /// With a window, so do blocks before this one.
    pub(crate) before: Option<Value<U32>>,
}

/// A tile of consecutive keys of a sequence, and the block size of its queries.
#[derive(Clone, Copy)]
pub(crate) struct KeyTile {
    pub(crate) first_key: Reg<U32>,
    /// Keys of the tile; those beyond the sequence's keys do not count.
    pub(crate) keys: u32,
    /// Queries per block.
    pub(crate) query_block: u32,
    pub(crate) query_length: Reg<U32>,
    pub(crate) key_length: Reg<U32>,
}

/// The query blocks that see some key of a tile.
#[derive(Clone, Copy)]
pub(crate) struct QueryBlocks {
    pub(crate) first: Reg<U32>,
    /// End (exclusive); no larger than `first` where no block sees the tile.
    pub(crate) end: Reg<U32>,
    /// First block of those whose every query sees all of the tile,
    pub(crate) whole_from: Reg<U32>,
    /// and their end (exclusive).
    pub(crate) whole_end: Reg<U32>,
}

impl QueryBlocks {
    /// Returns whether some query of a block does not see all of the tile.
    pub(crate) fn needs_mask(&self, block: Reg<U32>) -> Value<Pred> {
        block.less(self.whole_from) | block.at_least(self.whole_end)
    }
}

/// The columns that a thread's rows see, `first..=last` counted from the thread's first column;
/// without `first`, from the beginning on.
pub(crate) struct VisibleColumns {
    pub(crate) first: Option<Vec<Reg<S32>>>,
    pub(crate) last: Vec<Reg<S32>>,
}

impl Visibility {
    /// Declares the launch parameters of a mask.
    pub(crate) fn parameters(k: &mut Builder, mask: MaskKind) -> Self {
        let chunked = match mask {
            MaskKind::Dense => return Visibility::Dense,
            MaskKind::Causal => return Visibility::Causal,
            MaskKind::Local => false,
            MaskKind::Chunked => true,
        };
        Visibility::Window(WindowRegisters {
            left: Reach::Left.read(k),
            right: Reach::Right.read(k),
            chunk: chunked.then(|| DivisorRegisters::parameters(k, Number::Chunk)),
        })
    }

    /// Returns whether the blocks of a tile may begin after the first key.
    pub(crate) fn is_window(&self) -> bool {
        matches!(self, Visibility::Window(_))
    }

    /// Returns the keys that a row at a position sees, as the first and the end (exclusive). The
    /// row sees none where the end is no larger than the first; the end may be negative.
    pub(crate) fn keys(
        &self,
        k: &mut Builder,
        position: Reg<S32>,
        key_length: Reg<U32>,
    ) -> [Reg<S32>; 2] {
        let all = key_length.reinterpret::<S32>();
        match self {
            Visibility::Dense => [k.eval(0), k.eval(all)],
            Visibility::Causal => [k.eval(0), k.eval((position + 1).minimum(all))],
            Visibility::Window(window) => {
                let chunk = window.chunk_of(k, position);
                let begin = k.eval(window.begin(position.into(), chunk));
                [begin, k.eval(window.end(position + window.right + 1, chunk).minimum(all))]
            }
        }
    }

    /// Returns how many keys lie from the first that the first row of a tile sees to the last that
    /// its last row sees; `end_row` is exclusive.
    pub(crate) fn tile_keys(
        &self,
        k: &mut Builder,
        first_row: Reg<U32>,
        end_row: Value<U32>,
        [query_length, key_length]: [Reg<U32>; 2],
    ) -> Reg<U32> {
        let signed = |value: Reg<U32>| value.reinterpret::<S32>();
        let offset = k.eval(signed(key_length) - signed(query_length));
        let end_row = k.eval(end_row);
        let clip = |end: Value<S32>| end.minimum(signed(key_length)).maximum(0);
        let seen = match self {
            Visibility::Dense => k.eval(signed(key_length)),
            Visibility::Causal => k.eval(clip(signed(end_row) + offset)),
            Visibility::Window(window) => {
                let [first, last] = match window.chunk {
                    None => [None; 2],
                    Some(_) => {
                        let first = k.eval(signed(first_row) + offset);
                        let last = k.eval(signed(end_row) + offset - 1);
                        [window.chunk_of(k, first), window.chunk_of(k, last)]
                    }
                };
                let end = clip(window.end(signed(end_row) + offset + window.right, last));
                let begin = window.begin(signed(first_row) + offset, first);
                k.eval((end - begin).maximum(0))
            }
        };
        k.eval(seen.reinterpret::<U32>())
    }

    /// Sets the registers of `blocks` to the key blocks that a tile needs; returns which of them
    /// need masking.
    pub(crate) fn find_blocks(&self, k: &mut Builder, tile: &RowTile, blocks: Blocks) -> Masked {
        if let Visibility::Window(window) = self {
            return window.find_blocks(k, tile, blocks);
        }
        let RowTile { first_row, rows, query_length, key_length } = *tile;
        let Blocks { size, least, end, .. } = blocks;
        let all = k.eval((key_length + (size - 1)) / size);
        let whole = k.eval(key_length / size);
        if let Visibility::Dense = self {
            k.set(end, all);
            return Masked { from: whole.into(), before: None };
        }
        let signed = |value: Value<U32>| value.reinterpret::<S32>();
        // Number of keys that the first and the last row of the tile see.
        let offset = k.eval(signed(key_length - query_length));
        let first_sees = k.eval((signed(first_row + 1) + offset).maximum(0));
        let last_sees = (signed(first_row + rows) + offset).maximum(0);
        let needed = (last_sees.reinterpret::<U32>() + (size - 1)) / size;
        k.set(end, at_least(needed.minimum(all), least));
        Masked { from: (first_sees.reinterpret::<U32>() / size).minimum(whole), before: None }
    }

    /// Returns what a thread's rows see, as columns from its `first_column` on. `position` is that
    /// of the thread's first row; `rows` are the offsets of its rows from that.
    pub(crate) fn seen(
        &self,
        k: &mut Builder,
        rows: &[u32],
        position: Value<S32>,
        first_column: Reg<S32>,
        key_length: Reg<U32>,
    ) -> VisibleColumns {
        let end = (key_length - 1).reinterpret::<S32>() - first_column;
        let below = |k: &mut Builder, from: Reg<S32>, row: u32| match row {
            0 => from,
            row => k.eval(from + row as i32),
        };
        match self {
            Visibility::Dense => {
                let end = k.eval(end);
                VisibleColumns { first: None, last: vec![end; rows.len()] }
            }
            Visibility::Causal => {
                let end = k.eval(end);
                let diagonal = k.eval(position - first_column);
                let last = rows.iter().map(|row| k.eval(plus(diagonal, *row).minimum(end)));
                VisibleColumns { first: None, last: last.collect() }
            }
            Visibility::Window(window) => {
                let chunks: Option<Vec<_>> = window.chunk.map(|_| {
                    let position = k.eval(position.clone());
                    let chunk = |row: &u32| {
                        let position = below(k, position, *row);
                        let [begin, end] = window.chunk_of(k, position).expect("there are chunks");
                        [k.eval(begin - first_column), k.eval(end - 1 - first_column)]
                    };
                    rows.iter().map(chunk).collect()
                });
                let position = k.eval(position - first_column);
                let end = k.eval(end);
                let first = k.eval(position - window.left);
                let last = k.eval(position + window.right);
                let mut firsts: Vec<_> = rows.iter().map(|row| below(k, first, *row)).collect();
                let mut lasts: Vec<_> =
                    rows.iter().map(|row| k.eval(plus(last, *row).minimum(end))).collect();
                for (row, [begin, end]) in chunks.into_iter().flatten().enumerate() {
                    firsts[row] = k.eval(firsts[row].maximum(begin));
                    lasts[row] = k.eval(lasts[row].minimum(end));
                }
                VisibleColumns { first: Some(firsts), last: lasts }
            }
        }
    }
}

/// The transpose, for gradients: which queries see a key.
///
/// Key `j` is visible from the positions `j - right` to `j + left` of its own chunk.
impl Visibility {
    /// Returns the query blocks that see a tile of keys.
    pub(crate) fn query_blocks(&self, k: &mut Builder, tile: &KeyTile) -> QueryBlocks {
        let KeyTile { first_key, keys, query_block, query_length, key_length } = *tile;
        let signed = |value: Reg<U32>| value.reinterpret::<S32>();
        let offset = k.eval(signed(key_length) - signed(query_length));
        let end_key = k.eval((first_key + keys).minimum(key_length));
        let last_key = k.eval(signed(end_key) - 1);
        let first_key_signed = k.eval(signed(first_key));
        // Converts a position to a query, clamped to `0..=query_length`.
        let query = |k: &mut Builder, position: Value<S32>| {
            let query = (position - offset).maximum(0).minimum(signed(query_length));
            k.eval(query.reinterpret::<U32>())
        };
        let none = k.eval(0u32);
        let ([first, end], [whole_first, whole_end]) = match self {
            Visibility::Dense => ([none, query_length], [none, query_length]),
            Visibility::Causal => {
                let first = query(k, first_key_signed.into());
                ([first, query_length], [query(k, last_key.into()), query_length])
            }
            Visibility::Window(window) => {
                let first_chunk = window.chunk_of(k, first_key_signed);
                let last_chunk = window.chunk_of(k, last_key);
                let begin = |key: Reg<S32>, chunk: Option<[Reg<S32>; 2]>| match chunk {
                    None => key - window.right,
                    Some([begin, _]) => (key - window.right).maximum(begin),
                };
                let end = |key: Reg<S32>, chunk| window.end(key + window.left + 1, chunk);
                let some = [begin(first_key_signed, first_chunk), end(last_key, last_chunk)];
                let all = [begin(last_key, last_chunk), end(first_key_signed, first_chunk)];
                (some.map(|position| query(k, position)), all.map(|position| query(k, position)))
            }
        };
        let up = query_block - 1;
        let first_block = k.eval(first / query_block);
        let found = k.eval((end + up) / query_block);
        let sees = end.greater(first);
        let end_block = k.eval(sees.select::<U32>(found, first_block));
        // Rows beyond the last query contribute nothing whatever they see, but keys beyond the last
        // must be masked for all queries.
        let to_the_end = whole_end.equals(query_length);
        let whole = to_the_end.select::<U32>(end_block, whole_end / query_block);
        let complete = (first_key + keys).at_most(key_length);
        QueryBlocks {
            first: first_block,
            end: end_block,
            whole_from: k.eval((whole_first + up) / query_block),
            whole_end: k.eval(complete.select::<U32>(whole, 0u32)),
        }
    }

    /// Returns from which queries a thread's keys are visible, as columns from its `first_column`
    /// on. `key` is that of the thread's first row; `rows` are the offsets of its rows from that.
    pub(crate) fn seen_from(
        &self,
        k: &mut Builder,
        rows: &[u32],
        key: Reg<S32>,
        first_column: Reg<S32>,
        [query_length, key_length]: [Reg<U32>; 2],
    ) -> VisibleColumns {
        let signed = |value: Reg<U32>| value.reinterpret::<S32>();
        // Subtracted from a position, gives a column.
        let shift = k.eval(signed(key_length) - signed(query_length) + first_column);
        let (mut first, mut last) = (Vec::new(), Vec::new());
        for row in rows {
            let key = if *row == 0 { key } else { k.eval(key + *row as i32) };
            let exists = k.eval(key.less(signed(key_length)));
            let end: Value<S32> = match self {
                Visibility::Dense => Window::OPEN.into(),
                Visibility::Causal => {
                    first.push(k.eval(key - shift));
                    Window::OPEN.into()
                }
                Visibility::Window(window) => {
                    let chunk = window.chunk_of(k, key);
                    let begin = match chunk {
                        None => key - window.right,
                        Some([begin, _]) => (key - window.right).maximum(begin),
                    };
                    first.push(k.eval(begin - shift));
                    window.end(key + window.left + 1, chunk) - 1 - shift
                }
            };
            last.push(k.eval(exists.select::<S32>(end, -1)));
        }
        let first = (!first.is_empty()).then_some(first);
        VisibleColumns { first, last }
    }
}

impl VisibleColumns {
    /// Sets the scores of hidden keys to minus infinity.
    pub(crate) fn hide_others(&self, k: &mut Builder, scores: &[Score]) {
        self.set_others(k, scores, f32::NEG_INFINITY);
    }

    /// Sets the scores of hidden keys to `hidden`.
    pub(crate) fn set_others(&self, k: &mut Builder, scores: &[Score], hidden: f32) {
        for Score { row, column, register } in scores {
            let mut seen = self.last[*row].at_least(*column as i32);
            if let Some(first) = &self.first {
                seen = seen & first[*row].at_most(*column as i32);
            }
            k.set(*register, seen.select::<F32>(*register, hidden));
        }
    }

    /// Does the same as [`hide_others`](VisibleColumns::hide_others) for the columns of a `wgmma`
    /// accumulator: two neighbours, then eight columns on. Each row has a bit mask with a bit for
    /// each score. The assembler turns seven bits at a time into predicates (`R2P`), so that a
    /// score costs little more than its select, where two comparisons cost two instructions. A
    /// single comparison is as cheap as a bit, and is used for rows without a first column.
    pub(crate) fn hide_others_by_bits(&self, k: &mut Builder, scores: &[Score]) {
        let Some(first) = &self.first else { return self.hide_others(k, scores) };
        debug_assert!(scores.iter().all(|score| score.column % 8 < 2));
        let bit = |column: u32| column / 8 * 2 + column % 8;
        let words = scores.iter().map(|score| bit(score.column) / 32 + 1).max().unwrap_or(0);
        // Row by row, so that all bits of a word are used together.
        for row in 0..self.last.len() {
            let words = bits(k, first[row], self.last[row], words);
            for Score { column, register, .. } in scores.iter().filter(|score| score.row == row) {
                let bit = bit(*column);
                let seen = (words[(bit / 32) as usize] & (1u32 << (bit % 32))).differs(0u32);
                k.set(*register, seen.select::<F32>(*register, f32::NEG_INFINITY));
            }
        }
    }
}

/// Returns bit masks of a row's scores, set for the columns `first..=last`.
fn bits(k: &mut Builder, first: Reg<S32>, last: Reg<S32>, words: u32) -> Vec<Reg<U32>> {
    // Number of the thread's scores before a column; negative where the column is.
    let before = |k: &mut Builder, column: Value<S32>| {
        let column = k.eval(column);
        k.eval((column >> 3) * 2 + (column & 7).minimum(2))
    };
    let (end, first) = (before(k, last + 1), before(k, first.into()));
    // Shifts by more than 31 give zero.
    let shifted = |k: &mut Builder, bits: u32, score: Reg<S32>, word: u32| {
        let bits = k.eval(bits);
        bits << (score - 32 * word as i32).maximum(0).reinterpret::<U32>()
    };
    let word = |word: u32| {
        // `(1 << end) - 1` instead of `!(MAX << end)`, which the assembler would evaluate bit by
        // bit.
        let before_end = shifted(k, 1, end, word) - 1;
        let seen = before_end & shifted(k, u32::MAX, first, word);
        k.eval(seen)
    };
    (0..words).map(word).collect()
}

impl WindowRegisters {
    /// Returns the begin and the end (exclusive) of the chunk of a position. Positions before the
    /// first key are in an empty chunk.
    fn chunk_of(&self, k: &mut Builder, position: Reg<S32>) -> Option<[Reg<S32>; 2]> {
        let chunk = self.chunk?;
        let among_keys = k.eval(position.maximum(0).reinterpret::<U32>());
        let (_, within) = chunk.divide(k, among_keys);
        let begin = k.eval((among_keys - within).reinterpret::<S32>());
        let end = begin + chunk.number.reinterpret::<S32>();
        Some([begin, k.eval(position.less(0).select::<S32>(0, end))])
    }

    /// Returns the first key that a row at a position in this chunk sees.
    fn begin(&self, position: Value<S32>, chunk: Option<[Reg<S32>; 2]>) -> Value<S32> {
        match chunk {
            None => (position - self.left).maximum(0),
            Some([begin, _]) => (position - self.left).maximum(begin),
        }
    }

    /// Clips an end to that of the chunk.
    fn end(&self, end: Value<S32>, chunk: Option<[Reg<S32>; 2]>) -> Value<S32> {
        match chunk {
            None => end,
            Some([_, chunk_end]) => end.minimum(chunk_end),
        }
    }

    fn find_blocks(&self, k: &mut Builder, tile: &RowTile, blocks: Blocks) -> Masked {
        let RowTile { first_row, rows, query_length, key_length } = *tile;
        let Blocks { size, least, first, end } = blocks;
        // Positions of the tile's first and last row, and the chunks that they are in.
        let signed = |value: Reg<U32>| value.reinterpret::<S32>();
        let offset = k.eval(signed(key_length) - signed(query_length));
        let first_position = k.eval(signed(first_row) + offset);
        let end_row = (first_row + rows).minimum(query_length);
        let last_position = k.eval((end_row - 1).reinterpret::<S32>() + offset);
        let first_chunk = self.chunk_of(k, first_position);
        let last_chunk = self.chunk_of(k, last_position);
        let end_of = |k: &mut Builder, position: Reg<S32>, chunk| {
            let end = self.end(position + self.right + 1, chunk);
            let end = end.minimum(signed(key_length)).maximum(0);
            k.eval(end.reinterpret::<U32>())
        };
        let begin_of = |k: &mut Builder, position: Reg<S32>, chunk| {
            k.eval(self.begin(position.into(), chunk).reinterpret::<U32>())
        };
        let last_end = end_of(k, last_position, last_chunk);
        k.set(end, at_least((last_end + (size - 1)) / size, least));
        if let Some(first) = first {
            let first_begin = begin_of(k, first_position, first_chunk);
            // At most the end, so that a loop from the end down to `first` terminates.
            let furthest = if least == 0 { end.into() } else { end - 1 };
            k.set(first, (first_begin / size).minimum(furthest));
        }
        let first_end = end_of(k, first_position, first_chunk);
        let from = k.eval(first_end / size);
        let last_begin = begin_of(k, last_position, last_chunk);
        let before = k.eval((last_begin + (size - 1)) / size);
        Masked { from: from.into(), before: Some(before.into()) }
    }
}

fn plus(value: Reg<S32>, distance: u32) -> Value<S32> {
    if distance == 0 { value.into() } else { value + distance as i32 }
}

fn at_least(count: Value<U32>, least: u32) -> Value<U32> {
    if least == 0 { count } else { count.maximum(least) }
}
