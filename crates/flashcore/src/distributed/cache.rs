//! A cache for decoding, spread by positions.

/// Keys of one sequence that grows, spread over ranks in turn, so many positions at a time: whatever
/// its length, ranks have as much of it to within that many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpreadCache {
    ranks: usize,
    block: usize,
}

impl SpreadCache {
    /// A cache over so many ranks, of which each gets so many positions at a time. None where one of
    /// them is zero.
    pub fn new(ranks: usize, block: usize) -> Option<Self> {
        (ranks > 0 && block > 0 && ranks.checked_mul(block).is_some())
            .then_some(SpreadCache { ranks, block })
    }

    /// The rank that owns a position, and the row of its part that this is.
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

    /// How many of the first positions a rank owns.
    pub fn rows(&self, rank: usize, positions: usize) -> usize {
        let round = self.ranks * self.block;
        let rest = (positions % round).saturating_sub(rank * self.block);
        positions / round * self.block + rest.min(self.block)
    }
}
