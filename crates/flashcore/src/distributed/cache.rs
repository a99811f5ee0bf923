//! A KV cache for decoding, spread over ranks by position.

/// Assignment of the keys of a growing sequence to ranks: blocks of positions are dealt out in
/// turn, so that at any length the ranks have equally many positions to within one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpreadCache {
    ranks: usize,
    block: usize,
}

impl SpreadCache {
    /// Returns a cache over `ranks` ranks, dealt out in blocks of `block` positions. `None` where
    /// one of them is zero.
    pub fn new(ranks: usize, block: usize) -> Option<Self> {
        (ranks > 0 && block > 0 && ranks.checked_mul(block).is_some())
            .then_some(SpreadCache { ranks, block })
    }

    /// Returns the rank that owns a position, and the row of that rank's part that holds it.
    ///
    /// ```
    /// use flashcore::distributed::SpreadCache;
    ///
    /// let cache = SpreadCache::new(2, 16).unwrap();
    /// assert_eq!(cache.owner(0), (0, 0));
    /// assert_eq!(cache.owner(17), (1, 1));
    /// assert_eq!(cache.owner(32), (0, 16));
    /// ```
    pub fn owner(&self, position: usize) -> (usize, usize) {
        let round = self.ranks * self.block;
        let within = position % round;
        (within / self.block, position / round * self.block + within % self.block)
    }

    /// Returns how many of the first `positions` positions a rank owns.
    pub fn rows(&self, rank: usize, positions: usize) -> usize {
        let round = self.ranks * self.block;
        let rest = (positions % round).saturating_sub(rank * self.block);
        positions / round * self.block + rest.min(self.block)
    }
}
