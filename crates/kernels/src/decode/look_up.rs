//! Where the rows of a warp's tiles are. With pages, the block table is read ahead of the copies that
//! need it: memory answers in order, so an entry that is requested behind copies arrives behind them.
//!
//! Where each sixteen keys lie in one page, one entry is enough for them. Each lane then looks up the
//! entry of other sixteen keys of the warp's next tiles, 32 entries at once, and the 32 after those are
//! requested as soon as the first are in use. In other pages every row may be somewhere else, and each
//! lane looks up its own row of the next tile.

use ptx::{Builder, Expression, Reg, U32, Value};

use super::Decode;
use super::schedule::Cursor;
use crate::attention::sequences::Places;

/// Where the rows of a tile are: batch entries or pages, and rows in them.
pub(super) enum TilePlace {
    /// Of the first row of each run, the same in all lanes. The rows of a run are neighbours, and all
    /// runs of a tile have the same number of rows.
    Runs(Vec<[Reg<U32>; 2]>),
    /// Of the lane's own row.
    OwnRow([Reg<U32>; 2]),
}

impl TilePlace {
    /// Clamps pages to those that exist.
    pub(super) fn bounded(&self, k: &mut Builder, places: &Places) -> Self {
        let mut bounded = |[entry, row]: [Reg<U32>; 2]| [places.bounded(k, entry), row];
        match self {
            TilePlace::Runs(runs) => TilePlace::Runs(runs.iter().copied().map(bounded).collect()),
            TilePlace::OwnRow(place) => TilePlace::OwnRow(bounded(*place)),
        }
    }
}

/// Looks up the places of a warp's tiles, in their order.
pub(super) struct LookUp<'a> {
    decode: &'a Decode,
    places: &'a Places,
    ahead: Ahead,
    lane: Reg<U32>,
}

/// What is known of tiles that are not copied yet. Pages are words of the block table as loaded, not
/// yet bounded, so that nothing waits for a load before its turn.
enum Ahead {
    /// Nothing: places are calculated, not read.
    Nothing,
    /// The lane's own row of the next tile.
    Tile([Reg<U32>; 2]),
    /// The pages of the next tiles.
    Entries(Entries),
}

/// 32 entries of the block table, one in each lane.
struct Entries {
    /// The entries in use, and those that come after them.
    now: Reg<U32>,
    next: Reg<U32>,
    /// The index of the next tile among those that the entries in use are for.
    index: Reg<U32>,
}

/// Keys that share an entry of the block table where pages allow it.
pub(super) const RUN: u32 = 16;

/// Returns how many tiles of a warp the entries of its 32 lanes are for.
pub(super) const fn tiles_of_entries(tile_keys: u32) -> u32 {
    32 * RUN / tile_keys
}

impl<'a> LookUp<'a> {
    pub(super) fn new(
        k: &mut Builder,
        decode: &'a Decode,
        places: &'a Places,
        lane: Reg<U32>,
    ) -> Self {
        let mut pair = || [k.variable(0), k.variable(0)];
        let ahead = match decode.page_rows {
            None => Ahead::Nothing,
            Some(rows) if rows < RUN => Ahead::Tile(pair()),
            Some(_) => {
                let [now, next] = pair();
                Ahead::Entries(Entries { now, next, index: k.variable(0) })
            }
        };
        LookUp { decode, places, ahead, lane }
    }

    /// Begins a sequence: returns the places of `first`, its first tiles, each `warps` tiles after
    /// the one before.
    pub(super) fn begin(
        &self,
        k: &mut Builder,
        cursor: &Cursor,
        first: &[Reg<U32>],
    ) -> Vec<TilePlace> {
        let warps = self.decode.warps;
        match &self.ahead {
            Ahead::Nothing => first.iter().map(|tile| self.run_of(k, cursor, *tile)).collect(),
            Ahead::Tile(next) => {
                let found =
                    first.iter().map(|tile| self.own_row(k, cursor, *tile)).collect::<Vec<_>>();
                let after = k.eval(first[first.len() - 1] + warps);
                let after = self.own_row(k, cursor, after);
                set(k, next, after);
                found.into_iter().map(TilePlace::OwnRow).collect()
            }
            Ahead::Entries(entries) => {
                for (number, pages) in (0..).zip([entries.now, entries.next]) {
                    let begin = k.eval(first[0] + number * self.tiles() * warps);
                    let found = self.page_of_lane(k, cursor, begin);
                    k.set(pages, found);
                }
                k.set(entries.index, first.len() as u32);
                let places = (0u32..).zip(first);
                places
                    .map(|(index, tile)| self.of_entries(k, entries, cursor, *tile, index))
                    .collect()
            }
        }
    }

    /// Returns the place of the next tile, and looks further ahead. Call it once for each tile after
    /// the first ones.
    pub(super) fn next(&self, k: &mut Builder, cursor: &Cursor, tile: Reg<U32>) -> TilePlace {
        let warps = self.decode.warps;
        match &self.ahead {
            Ahead::Nothing => self.run_of(k, cursor, tile),
            Ahead::Tile(next) => {
                let found = next.map(|number| k.variable(number));
                let after = k.eval(tile + warps);
                let after = self.own_row(k, cursor, after);
                set(k, next, after);
                TilePlace::OwnRow(found)
            }
            Ahead::Entries(entries) => {
                let found = self.of_entries(k, entries, cursor, tile, entries.index);
                k.set(entries.index, entries.index + 1);
                k.if_(entries.index.equals(self.tiles()), |k| {
                    k.set(entries.index, 0);
                    k.set(entries.now, entries.next);
                    let begin = k.eval(tile + (self.tiles() + 1) * warps);
                    let after = self.page_of_lane(k, cursor, begin);
                    k.set(entries.next, after);
                });
                found
            }
        }
    }

    fn tiles(&self) -> u32 {
        tiles_of_entries(self.decode.tile_keys)
    }

    /// Returns the place of a tile without pages.
    fn run_of(&self, k: &mut Builder, cursor: &Cursor, tile: Reg<U32>) -> TilePlace {
        TilePlace::Runs(vec![self.look_up(k, cursor, tile, 0)])
    }

    /// Looks up the lane's own row of a tile.
    fn own_row(&self, k: &mut Builder, cursor: &Cursor, tile: Reg<U32>) -> [Reg<U32>; 2] {
        self.look_up(k, cursor, tile, self.lane % self.decode.tile_keys)
    }

    /// Looks up the lane's entry, of the 32 whose first tile is `begin`.
    fn page_of_lane(&self, k: &mut Builder, cursor: &Cursor, begin: Reg<U32>) -> Reg<U32> {
        let runs = self.decode.tile_keys / RUN;
        let tile = k.eval(begin + self.lane / runs * self.decode.warps);
        let [page, _] = self.look_up(k, cursor, tile, self.lane % runs * RUN);
        page
    }

    /// Returns the place of a tile that has this index in the entries.
    fn of_entries(
        &self,
        k: &mut Builder,
        entries: &Entries,
        cursor: &Cursor,
        tile: Reg<U32>,
        index: impl Into<Value<U32>>,
    ) -> TilePlace {
        let runs = self.decode.tile_keys / RUN;
        let first = k.eval(index.into() * runs);
        let of_run = |run| {
            let page = k.shuffle_index(entries.now, first + run);
            let row = self.row(k, cursor, tile, run * RUN);
            [page, self.places.row_in_page(k, row)]
        };
        TilePlace::Runs((0..runs).map(of_run).collect())
    }

    fn look_up(
        &self,
        k: &mut Builder,
        cursor: &Cursor,
        tile: Reg<U32>,
        row: impl Into<Value<U32>>,
    ) -> [Reg<U32>; 2] {
        let row = self.row(k, cursor, tile, row);
        let (entry, row) = self.places.look_up(k, cursor.entry, row);
        [entry, row]
    }

    /// Returns which row of the sequence's a row of a tile is.
    fn row(
        &self,
        k: &mut Builder,
        cursor: &Cursor,
        tile: Reg<U32>,
        row: impl Into<Value<U32>>,
    ) -> Reg<U32> {
        let first = cursor.first_row + cursor.first_key + tile * self.decode.tile_keys;
        k.eval(first + row)
    }
}

fn set(k: &mut Builder, variables: &[Reg<U32>; 2], values: [Reg<U32>; 2]) {
    variables.iter().zip(values).for_each(|(variable, value)| k.set(*variable, value));
}
