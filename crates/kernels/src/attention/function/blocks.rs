//! Block masks: which key blocks a tile of queries sees at all, and for which of them the mask
//! function must be evaluated.
//!
//! Block masks are found on the host by interval arithmetic ([`Function::seen`]), once for a plan,
//! or on the device ([`BlockFinder`]). Each tile of queries has a list of the key blocks that it
//! walks. A block that is in no list is never loaded; one that every row sees whole is walked
//! without the function. For gradients lists are transposed: each block of keys has a list of the
//! query blocks that see it.

use std::ops::Range;

use ptx::Target;

use super::{Depends, Function, HostTensor, KnownContents, Region, Seen};
use crate::attention::{MaskKind, Window};
use crate::finder::{BlockFinder, BlockLister};
use crate::parameter::Number;

/// The problem that block masks are found for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockMask {
    /// The mask function.
    pub function: Function,
    /// The mask by name, which hides keys too.
    pub window: Window,
    /// Query length and key length of every sequence.
    pub lengths: [u32; 2],
    /// Number of query heads.
    pub heads: u32,
    /// Number of query heads that share a list: one, or those of a key head where keys have lists.
    pub group: u32,
    /// Number of sequences.
    pub batch: u32,
    /// Query rows per tile.
    pub query_rows: u32,
    /// Keys per block.
    pub key_block: u32,
    /// Whether tiles of queries or blocks of keys have lists.
    pub lists: ListsOf,
}

/// Which side has lists, and of what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ListsOf {
    /// Each tile of queries has a list of the key blocks that it sees.
    Queries,
    /// Each block of keys has a list of the query blocks that see it.
    Keys {
        /// Whether each entry also has its turn, for deterministic gradients: how many key blocks
        /// before this one see the entry's queries.
        turns: bool,
    },
}

/// The most list words for which heads and sequences get lists of their own: about a second's work
/// on the host. Beyond, one list is found that holds for all of them.
const MOST_PAIRS: u64 = 1 << 22;

/// Lists are found on the device where intervals leave undecided more than one block in this many.
const OPEN: u32 = 8;

impl BlockMask {
    /// Returns the tiles of queries and the blocks of keys of a head.
    fn counts_of_blocks(&self) -> [u32; 2] {
        [self.lengths[0].div_ceil(self.query_rows), self.lengths[1].div_ceil(self.key_block)]
    }

    /// Returns the number of lists of a head.
    fn tiles(&self) -> u32 {
        let [queries, keys] = self.counts_of_blocks();
        match self.lists {
            ListsOf::Queries => queries,
            ListsOf::Keys { .. } => keys,
        }
    }

    /// Returns the words of a list. The first word is the number of entries; then come the entries
    /// in ascending order, each twice the block's number, plus one where the block needs the
    /// function; then the entries' turns, where there are any.
    pub fn list_words(&self) -> u32 {
        let [queries, keys] = self.counts_of_blocks();
        match self.lists {
            ListsOf::Queries => keys.max(1) + 1,
            ListsOf::Keys { turns } => queries.max(1) * (1 + u32::from(turns)) + 1,
        }
    }

    /// Returns how many sequences and how many heads have lists of their own; 1 where all share
    /// them.
    fn apart(&self) -> [u32; 2] {
        let Depends { batch, head } = self.function.depends();
        let pairs = u64::from(self.tiles()) * u64::from(self.list_words());
        let heads = self.heads / self.group.max(1);
        let heads = if head && pairs * u64::from(heads) <= MOST_PAIRS { heads } else { 1 };
        let all = pairs * u64::from(heads) * u64::from(self.batch);
        [if batch && all <= MOST_PAIRS { self.batch } else { 1 }, heads]
    }

    /// Returns the words of all lists.
    pub fn size(&self) -> u64 {
        let [batch, heads] = self.apart();
        u64::from(batch) * u64::from(heads) * u64::from(self.tiles()) * u64::from(self.list_words())
    }

    /// Returns the strides, in words, from one sequence's lists to the next and from one head's
    /// lists to the next; zero where they share lists.
    pub fn strides(&self) -> [u32; 2] {
        let [batch, heads] = self.apart();
        let head = self.tiles() * self.list_words();
        let apart = |count: u32, stride: u32| if count > 1 { stride } else { 0 };
        [apart(batch, head * heads), apart(heads, head)]
    }

    /// Finds the lists, by sequence, head and tile.
    ///
    /// ```
    /// use flashcore_kernels::Window;
    /// use flashcore_kernels::attention::function::{BlockMask, Function, ListsOf};
    ///
    /// let mask = BlockMask {
    ///     function: Function::mask("causal", |at| at.query().ge(at.key())),
    ///     window: Window::DENSE,
    ///     lengths: [128, 128],
    ///     heads: 8,
    ///     group: 1,
    ///     batch: 2,
    ///     query_rows: 64,
    ///     key_block: 64,
    ///     lists: ListsOf::Queries,
    /// };
    /// // The first tile sees a part of block 0; the second all of it, and a part of block 1.
    /// assert_eq!(mask.words(), [1, 1, 0, 2, 0, 3]);
    /// // So block 0 is seen by both, and block 1 by a part of the second.
    /// let lists = ListsOf::Keys { turns: false };
    /// assert_eq!(BlockMask { lists, ..mask }.words(), [2, 1, 2, 1, 3, 0]);
    /// ```
    pub fn words(&self) -> Vec<u32> {
        self.words_over(&[])
    }

    /// Finds the lists where the contents of some tensors are known.
    pub fn words_over(&self, contents: &[HostTensor]) -> Vec<u32> {
        let known = KnownContents::new(contents);
        let [batch, heads] = self.apart();
        let range = |index: u32, apart: u32, all: u32, each: u32| match apart {
            1 => 0..all.max(1),
            _ => index * each..(index + 1) * each,
        };
        let [tiles, _] = self.counts_of_blocks();
        let mut words = Vec::with_capacity(self.size() as usize);
        for sequence in 0..batch {
            for head in 0..heads {
                for tile in 0..tiles {
                    let region = self.region([
                        range(sequence, batch, self.batch, 1),
                        range(head, heads, self.heads, self.group.max(1)),
                    ]);
                    self.push_list(tile, region, &known, &mut words);
                }
            }
        }
        match self.lists {
            ListsOf::Queries => words,
            ListsOf::Keys { turns } => self.transposed(&words, turns),
        }
    }

    /// Transposes the lists of tiles of queries into those of key blocks.
    fn transposed(&self, words: &[u32], turns: bool) -> Vec<u32> {
        let [queries, keys] = self.counts_of_blocks().map(|count| count as usize);
        let each = self.list_words() as usize;
        let room = queries.max(1);
        let mut found = vec![0; self.size() as usize];
        let of_heads = words.chunks(queries.max(1) * self.query_list_words());
        for (of_head, lists) in of_heads.zip(found.chunks_mut((keys * each).max(1))) {
            for (tile, list) in of_head.chunks(self.query_list_words()).enumerate() {
                for (turn, entry) in list[1..][..list[0] as usize].iter().enumerate() {
                    let list = &mut lists[(entry >> 1) as usize * each..][..each];
                    let index = list[0] as usize;
                    list[0] += 1;
                    list[1 + index] = 2 * tile as u32 + (entry & 1);
                    if turns {
                        list[1 + room + index] = turn as u32;
                    }
                }
            }
        }
        found
    }

    /// Returns the words of the list of a tile of queries.
    fn query_list_words(&self) -> usize {
        self.counts_of_blocks()[1].max(1) as usize + 1
    }

    /// Appends the list of a tile of queries.
    fn push_list(
        &self,
        tile: u32,
        region: Region,
        known: &KnownContents<'_>,
        words: &mut Vec<u32>,
    ) {
        let [queries, keys] = self.lengths;
        let first = tile * self.query_rows;
        let end = (first + self.query_rows).min(queries);
        let offset = i64::from(keys) - i64::from(queries);
        let visible =
            self.window.tile_keys(i64::from(first) + offset, i64::from(end) - 1 + offset, keys);
        let begin = words.len();
        words.push(0);
        let blocks = match visible.is_empty() {
            true => 0..0,
            false => visible.start / self.key_block..visible.end.div_ceil(self.key_block),
        };
        for block in blocks {
            let (from, to) = (block * self.key_block, ((block + 1) * self.key_block).min(keys));
            let region = Region {
                queries: first as i32..end as i32,
                keys: from as i32..to as i32,
                ..region.clone()
            };
            match self.function.seen_over(&region, known) {
                Seen::None => {}
                Seen::Some => words.push(2 * block + 1),
                Seen::All => words.push(2 * block),
            }
        }
        words[begin] = (words.len() - begin - 1) as u32;
        // Kernels that always walk at least one block find block 0 here, with the function that
        // hides it.
        if words[begin] == 0 {
            words.push(1);
        }
        words.resize(begin + self.query_list_words(), 0);
    }

    /// Returns the kernels that find the lists on the device, where that is worth it: where the
    /// contents of tensors decide over many blocks.
    pub fn finder(&self, target: Target, mask: MaskKind) -> Option<(BlockFinder, BlockLister)> {
        let BlockMask { function, query_rows, key_block, lists, .. } = *self;
        let finder = BlockFinder { target, function, mask, query_rows, key_block };
        let lister = BlockLister { target, lists };
        let worth = !function.tensors().is_empty() && self.leaves_open();
        worth.then_some((finder, lister))
    }

    /// Returns whether intervals leave a good part of the blocks undecided, judged from a sample of
    /// tiles.
    fn leaves_open(&self) -> bool {
        let [tiles, _] = self.counts_of_blocks();
        let of_queries = BlockMask { lists: ListsOf::Queries, ..*self };
        let (mut words, known) = (Vec::new(), KnownContents::new(&[]));
        for tile in [0, tiles / 3, tiles / 3 * 2, tiles.saturating_sub(1)] {
            if tile < tiles {
                let region = self.region([0..self.batch.max(1), 0..self.heads.max(1)]);
                of_queries.push_list(tile, region, &known, &mut words);
            }
        }
        let counts = of_queries.counts(&words).counts;
        let sum = |of: fn(&BlockCount) -> u32| counts.iter().map(of).sum::<u32>();
        let (blocks, open) = (sum(|it| it.blocks), sum(|it| it.evaluated));
        OPEN * open > blocks
    }

    /// Returns the region of these sequences and heads; the caller sets queries and keys.
    fn region(&self, [batch, heads]: [Range<u32>; 2]) -> Region {
        Region {
            batch: batch.start as i32..batch.end as i32,
            heads: heads.start as i32..heads.end as i32,
            queries: 0..1,
            keys: 0..1,
            query_length: self.lengths[0] as i32,
            key_length: self.lengths[1] as i32,
        }
    }

    /// Returns the number of lists.
    pub fn lists(&self) -> u32 {
        let [batch, heads] = self.apart();
        batch * heads * self.tiles()
    }

    /// Returns the number of pairs of tiles and blocks that the finder evaluates.
    pub fn pairs(&self) -> u32 {
        let [batch, heads] = self.apart();
        self.counts_of_blocks().into_iter().product::<u32>() * batch * heads
    }

    /// Returns the words of the finder's table: a state for each pair, and a cost for each list.
    pub fn found_words(&self) -> u64 {
        u64::from(self.pairs()) + u64::from(self.lists())
    }

    /// Returns the launch parameters by which kernels read lists.
    pub fn numbers(&self) -> [(Number, u32); 3] {
        let [batch, head] = self.strides();
        [
            (Number::BlockListWords, self.list_words()),
            (Number::BlockListBatchStride, batch),
            (Number::BlockListHeadStride, head),
        ]
    }

    /// Returns the further launch parameters of the finder and the lister.
    pub fn finder_numbers(&self) -> [(Number, u32); 7] {
        let [queries, keys] = self.counts_of_blocks();
        let Depends { batch, head } = self.function.depends();
        let [own_batch, own_heads] = self.apart();
        let each = |depends: bool, all: u32, own: u32| if depends { (all / own).max(1) } else { 1 };
        [
            (Number::QueryBlocks, queries),
            (Number::KeyBlocks, keys),
            (Number::BlockPairs, self.pairs()),
            (Number::AllLists, self.lists()),
            (Number::ListHeads, own_heads),
            (Number::HeadsPerList, each(head, self.heads, own_heads)),
            (Number::SequencesPerList, each(batch, self.batch, own_batch)),
        ]
    }

    /// Counts the blocks of each list in `words`, which must be lists of this mask.
    pub fn counts(&self, words: &[u32]) -> BlockCounts {
        let [batch, heads] = self.apart();
        let walked = |list: &[u32]| {
            let entries = &list[1..][..list[0] as usize];
            let evaluated = entries.iter().filter(|entry| **entry & 1 == 1).count() as u32;
            BlockCount { blocks: list[0], evaluated }
        };
        let counts = words.chunks(self.list_words() as usize).map(walked).collect();
        BlockCounts { counts, apart: [batch, heads].map(|it| it as usize), heads: self.heads }
    }
}

/// The number of key blocks of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCount {
    /// Blocks that the tile walks.
    pub blocks: u32,
    /// Those of them for which the function is evaluated.
    pub evaluated: u32,
}

/// The number of key blocks that the tiles of each head and sequence walk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockCounts {
    /// Counts by sequence, head and tile.
    counts: Vec<BlockCount>,
    /// How many sequences and heads have counts of their own; 1 where all share them.
    apart: [usize; 2],
    heads: u32,
}

impl BlockCounts {
    /// Returns the counts of a head's tiles; heads are numbered over all sequences.
    pub fn of_head(&self, head: u64) -> &[BlockCount] {
        let [batch, heads] = self.apart;
        let tiles = self.counts.len() / (batch * heads).max(1);
        let all_heads = u64::from(self.heads.max(1));
        let own = |index: u64, apart: usize| if apart > 1 { index as usize } else { 0 };
        let index = own(head / all_heads, batch) * heads + own(head % all_heads, heads);
        &self.counts[index * tiles..][..tiles]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(function: Function) -> BlockMask {
        BlockMask {
            function,
            window: Window::DENSE,
            lengths: [100, 130],
            heads: 3,
            group: 1,
            batch: 2,
            query_rows: 64,
            key_block: 32,
            lists: ListsOf::Queries,
        }
    }

    /// Every pair is in the lists of both sides, once, and turns count the pairs of a tile of
    /// queries.
    #[test]
    fn keys_have_the_queries_that_see_them() {
        let lists = ListsOf::Keys { turns: true };
        let causal = mask(Function::mask("causal", |at| at.key().le(at.position())));
        let of_keys = BlockMask { lists, ..causal };
        // Two tiles of queries: five lists of up to two, with as many turns.
        assert_eq!((of_keys.list_words(), of_keys.size()), (5, 25));
        let words = of_keys.words();
        assert_eq!(words[..10], [2, 1, 2, 0, 0, 2, 1, 2, 1, 1]);
        assert_eq!(words[10..], [2, 1, 3, 2, 2, 1, 3, 0, 3, 0, 1, 3, 0, 4, 0]);
        // What the heads of a group see differently is walked by all of them.
        let of_head = mask(Function::mask("head", |at| at.key().lt(32 * at.head())));
        let of_head =
            BlockMask { heads: 4, group: 2, lists: ListsOf::Keys { turns: false }, ..of_head };
        assert_eq!((of_head.strides(), of_head.size()), ([0, 15], 30));
        let words = of_head.words();
        let counts: Vec<u32> = words.chunks(3).map(|list| list[0]).collect();
        assert_eq!(counts, [2, 0, 0, 0, 0, 2, 2, 2, 0, 0]);
        assert_eq!(words[1..3], [1, 3]);
        assert_eq!(words[15..24], [2, 0, 2, 2, 0, 2, 2, 1, 3]);
        let nobody = BlockMask { lists, lengths: [0, 100], ..causal };
        assert_eq!(nobody.words(), [0; 12]);
    }

    #[test]
    fn lists_are_shared_unless_the_function_differs() {
        let causal = mask(Function::mask("causal", |at| at.key().le(at.position())));
        assert_eq!((causal.strides(), causal.list_words()), ([0, 0], 6));
        // Query 0 has position 30: the first tile sees up to key 93, whole up to 30.
        assert_eq!(causal.words(), [3, 1, 3, 5, 0, 0, 5, 0, 2, 5, 7, 9]);
        let counts = causal.counts(&causal.words());
        let walked = [(3, 3), (5, 3)].map(|(blocks, evaluated)| BlockCount { blocks, evaluated });
        assert!((0..6).all(|head| counts.of_head(head) == walked));
        let of_head = mask(Function::mask("head", |at| at.key().lt(32 * at.head())));
        assert_eq!((of_head.strides(), of_head.size()), ([0, 12], 36));
        assert_eq!(
            of_head.words()[12..],
            [1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 2, 0, 2, 0, 0, 0, 2, 0, 2, 0, 0, 0]
        );
        let counts = of_head.counts(&of_head.words());
        assert_eq!([0, 1, 4, 5].map(|head| counts.of_head(head)[0].blocks), [0, 1, 1, 2]);
        let both = mask(Function::mask("both", |at| at.batch().eq(at.head())));
        let counts = both.counts(&both.words());
        assert_eq!([0, 1, 3, 4].map(|head| counts.of_head(head)[1].blocks), [5, 0, 0, 5]);
        assert_eq!((both.strides(), both.words().len() as u64), ([36, 12], both.size()));
    }

    #[test]
    fn known_contents_hide_blocks() {
        let documents = mask(Function::mask("documents", |at| {
            let ids = at.integers("ids");
            ids.load([at.batch(), at.query()]).eq(ids.load([at.batch(), at.key()]))
        }));
        let documents = BlockMask { window: Window::CAUSAL, lengths: [130, 130], ..documents };
        // The first sequence is one document, the second has another one from key 64 on.
        let ids: Vec<i32> = (0..2 * 130).map(|at| i32::from(at >= 130 + 64)).collect();
        let contents = [HostTensor::integers("ids", &ids, &[2, 130])];
        let words = documents.words_over(&contents);
        assert_eq!(words.len() as u64, documents.size());
        assert_eq!(words[..18], [2, 0, 2, 0, 0, 0, 4, 0, 2, 4, 6, 0, 5, 0, 2, 4, 6, 8]);
        assert_eq!(words[18..], [2, 0, 2, 0, 0, 0, 2, 4, 6, 0, 0, 0, 3, 4, 6, 8, 0, 0]);
        assert_eq!(documents.words()[..6], [2, 1, 3, 0, 0, 0]);
        // Loads outside of the tensor are zero, which is the id of the first document.
        let short = [HostTensor::integers("ids", &ids[130..], &[1, 130])];
        assert_eq!(documents.words_over(&short)[18..], words[..18]);
    }

    #[test]
    fn a_window_hides_blocks_too() {
        let function = Function::mask("always", |at| at.boolean(true));
        let window = Window { left: 10, ..Window::CAUSAL };
        let local = BlockMask { window, ..mask(function) };
        assert_eq!(local.words(), [3, 0, 2, 4, 0, 0, 3, 4, 6, 8, 0, 0]);
        let unseen = BlockMask { lengths: [100, 0], ..mask(function) };
        assert_eq!(unseen.words(), [0, 1, 0, 1]);
    }
}
