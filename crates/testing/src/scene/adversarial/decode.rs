//! Mutation scenes of the decode kernel, few queries over a cache: lists, windows, sequences split
//! among teams of thread blocks.

use flashcore::Mask;
use kernels::decode::Splits;
use kernels::{Configuration, Decode};

use super::{Call, KeyMagnitudes, PlacementKind, Ragged};

pub(super) fn calls(it: &Decode) -> Vec<Call> {
    let calls = Calls::of(it);
    let mut all = calls.of_teams();
    all.extend(calls.far_apart());
    all.extend(calls.windows());
    all.extend(calls.between());
    all.extend(match it.page_rows {
        Some(_) => calls.shared_pages(),
        None => calls.packed(),
    });
    if it.splits != Splits::Balanced {
        all.extend(fixed_splits(it, calls.place));
    }
    all
}

/// The dimensions of a kernel, from which its calls are made.
struct Calls {
    kernel: Configuration,
    /// The storage of keys, and the size of its pages.
    place: PlacementKind,
    page: usize,
    /// Whether sequences may have padding on the left.
    padded: bool,
    /// Keys of a tile.
    tile: usize,
    /// Keys of a round, one tile for each warp.
    round: usize,
    /// Keys of all stages, one round for each.
    stages: usize,
    /// Query rows of a thread block.
    group: usize,
}

impl Calls {
    fn of(it: &Decode) -> Self {
        let tile = it.tile_keys as usize;
        let round = tile * it.warps as usize;
        let aligned = it.page_rows == Some(16);
        let page = if aligned { 48 } else { tile - 3 };
        Calls {
            kernel: Configuration::Decode(*it),
            place: match it.page_rows {
                None => PlacementKind::Entries,
                Some(_) => PlacementKind::Paged(page),
            },
            page,
            padded: !aligned,
            tile,
            round,
            stages: it.stages as usize * round,
            group: it.rows as usize,
        }
    }

    fn call(&self, queries: Vec<usize>, keys: Vec<usize>, heads: [usize; 2]) -> Call {
        Call::ragged(self.kernel, Ragged::new(queries, keys).over(self.place), heads)
    }

    /// Returns padding on the left, where the kernel serves it.
    fn padding(&self, rows: &[usize]) -> Vec<usize> {
        rows.iter().map(|rows| if self.padded { *rows } else { 0 }).collect()
    }

    fn listed(&self, query_place: PlacementKind, key_place: PlacementKind) -> Call {
        let &Calls { kernel, tile, round, .. } = self;
        let ragged = Ragged::new(vec![2, 0, 1, 3], vec![round + 3, 0, tile, 2 * round]);
        let padding = self.padding(&[0, 0, 3, 0]);
        let ragged = Ragged { query_place, padding, ..ragged.over(key_place) };
        Call { hostile: true, ..Call::ragged(kernel, ragged, [2, 1]).with_multiprocessors(2) }
    }

    /// Returns a call whose first sequence is empty, so that lists hold a 0, or a negative number,
    /// at the start of the second.
    fn late(&self, query_place: PlacementKind, key_place: PlacementKind) -> Call {
        let &Calls { kernel, tile, round, .. } = self;
        let ragged = Ragged::new(vec![0, 2, 1], vec![0, round + 3, tile]);
        let padding = self.padding(&[0, 2, 0]);
        let ragged = Ragged { query_place, padding, ..ragged.over(key_place) };
        Call { hostile: true, ..Call::ragged(kernel, ragged, [2, 1]).with_multiprocessors(2) }
    }

    /// Returns calls with more teams than sequences and with fewer.
    fn of_teams(&self) -> Vec<Call> {
        let &Calls { kernel, place, tile, round, stages, group, .. } = self;
        let call = |queries, keys, heads| self.call(queries, keys, heads);
        let behind = Ragged {
            padding: self.padding(&[7, 0, tile, 1]),
            ..Ragged::new(vec![1; 4], vec![2 * round + 3, 0, tile, 5]).over(place)
        };
        let mut many: Vec<usize> = (0..37).map(|index| index * 7 % 23).collect();
        many[35] = 3 * round + 3;
        vec![
            self.listed(PlacementKind::Packed, place),
            self.late(PlacementKind::Packed, place),
            // More thread blocks than there is work for, and fewer.
            call(vec![1, 1], vec![3, tile], [1, 1]).with_multiprocessors(9),
            call(vec![1; 3], vec![stages, 2 * stages + 1, stages - tile], [2, 1])
                .with_multiprocessors(1),
            // A window, several queries, more rows than a thread block has.
            call(vec![3, 1, 2], vec![3 * round + 5, 2, round], [group, 2])
                .with_multiprocessors(5)
                .with(|it| it.with_mask(Mask::window(Some(2 * round + 3), Some(1)))),
            Call::ragged(kernel, behind, [3, 1]).with_multiprocessors(3),
            // Sequences in parts of many teams.
            call(vec![1, 1], vec![20 * round + 5, 7], [3, 1]).with_multiprocessors(9),
            call(vec![1, 2], vec![3, 40 * round + 5], [2, 1]).with_multiprocessors(19),
            // More parts than a warp has lanes; rows with different slopes, so that each part has
            // weight in one of them.
            call(vec![1], vec![35 * round + 5], [group, 1]).with_multiprocessors(40),
            call(vec![1], vec![17 * round + 5], [group, 1]).with_multiprocessors(40),
            // Parts of the fewest tiles that are worth a part, which the longest sequence decides.
            call(vec![1; 3], vec![3, 2 * round, 5], [1, 1]).with_multiprocessors(9),
            // A few keys, all of whose scores are far below zero for some rows.
            call(vec![1; 5], vec![1, 2, 1, 3, 1], [6, 2]).with_keys(KeyMagnitudes::Large),
            // More sequences than a warp has lanes.
            call(vec![1; 37], many, [2, 1]).with_multiprocessors(4),
            call(vec![1, 1], vec![6 * round, 3 * round + 1], [2, 1])
                .with_multiprocessors(3)
                .with_keys(KeyMagnitudes::Valley),
            call(vec![2, 1], vec![3 * round, round + 1], [2, 1])
                .with_multiprocessors(3)
                .with_keys(KeyMagnitudes::Spikes),
            call(vec![2, 1], vec![7 * round, round + 1], [2, 1])
                .with_multiprocessors(3)
                .with_keys(KeyMagnitudes::Peaks),
        ]
    }

    /// Returns calls in which the maxima of parts are far apart.
    fn far_apart(&self) -> Vec<Call> {
        let &Calls { tile, round, group, .. } = self;
        let call = |queries, keys, heads| self.call(queries, keys, heads);
        let mut all = Vec::new();
        // Rows in every part of a tile, and maxima that differ between tiles, warps and teams.
        for (key_magnitudes, keys, teams) in [
            (KeyMagnitudes::Valley, 7 * round, 1),
            (KeyMagnitudes::Spikes, 3 * round, 2),
            (KeyMagnitudes::Peaks, 7 * round, 3),
            (KeyMagnitudes::Peaks, 17 * round, 40),
            (KeyMagnitudes::Alternating(1), 2 * round, 1),
            (KeyMagnitudes::Alternating(2), 2 * round, 1),
            (KeyMagnitudes::Alternating(4), 2 * round, 1),
            (KeyMagnitudes::Alternating(8), 2 * round, 1),
            (KeyMagnitudes::Alternating(tile), 3 * round, 1),
            (KeyMagnitudes::Alternating(round), 5 * round, 1),
            (KeyMagnitudes::Alternating(round), 17 * round, 40),
        ] {
            let call =
                call(vec![1, 2], vec![keys + 5, round + 1], [group, 1]).with_multiprocessors(teams);
            all.push(call.with_keys(key_magnitudes));
        }
        // Any of the parts may have the key that dominates a row.
        for key_magnitudes in [
            KeyMagnitudes::Large,
            KeyMagnitudes::Alternating(2 * round),
            KeyMagnitudes::Alternating(4 * round),
        ] {
            let call = call(vec![1; 2], vec![17 * round + 5, 16 * round], [group, 1])
                .with_multiprocessors(40);
            all.push(call.with_keys(key_magnitudes));
        }
        all
    }

    /// Returns calls with windows, and with values before the window that must not be read.
    fn windows(&self) -> Vec<Call> {
        let &Calls { kernel, place, tile, round, group, .. } = self;
        let call = |queries, keys, heads| self.call(queries, keys, heads);
        let mut all = Vec::new();
        // Several queries in every part of a tile, whose windows begin and end at all its columns;
        // a window that begins in a later tile of a sequence which is not the team's first.
        let window = Mask::window(Some(round + 3), Some(0));
        all.push(
            call(vec![4, 4, 4], vec![2 * round + 4, 2 * round + 12, 2 * round + 3], [group / 4, 1])
                .with_multiprocessors(3)
                .with(|it| it.with_mask(window)),
        );
        all.push(
            call(vec![1, 1, 2], vec![3 * round, 5 * round + 3, 4 * round + 7], [2, 1])
                .with_multiprocessors(1)
                .with(|it| it.with_mask(window)),
        );
        // More sequences than a warp has lanes; the last query of a thread block of the last sequence
        // alone sees a key of one more tile.
        for (teams, left) in [(4, round + 3), (9, 5)] {
            let mut queries = vec![1; 33];
            queries[32] = group + 1;
            let mut keys: Vec<usize> = (0..33).map(|index| index * 7 % 23 + 3).collect();
            let mut padding: Vec<usize> = (0..33).map(|index| index % 4).collect();
            (keys[32], padding[32]) = (3 * round + tile + 5, 3);
            if !self.padded {
                keys[32] -= 3;
            }
            let ragged = Ragged { padding: self.padding(&padding), ..Ragged::new(queries, keys) };
            let call = Call::ragged(kernel, ragged.over(place), [1, 1]).with_multiprocessors(teams);
            all.push(call.with(|it| it.with_mask(Mask::window(Some(left), Some(0)))));
        }
        // Negative paddings, where one key more would be one tile more.
        let ragged = Ragged::new(vec![1, 2, 1], vec![2 * round, tile, round + 3]).over(place);
        let ragged = Ragged { padding: self.padding(&[0, 0, 3]), ..ragged };
        all.push(Call {
            hostile: true,
            ..Call::ragged(kernel, ragged, [2, 1]).with_multiprocessors(3)
        });
        // Keys before a window, in each of the rounds that clear them.
        for left in [2, 5, 6, 11, 14] {
            let behind =
                call(vec![1, 2], vec![3 * round + 5, round + left], [2, 1]).with_multiprocessors(3);
            let window = Mask::window(Some(round + left), Some(0));
            all.push(Call { unseen: true, ..behind.with(|it| it.with_mask(window)) });
        }
        all
    }

    /// Returns calls with gaps between the queries of sequences.
    fn between(&self) -> Vec<Call> {
        let &Calls { place, .. } = self;
        let mut all = vec![
            self.listed(PlacementKind::PackedWithGaps, place),
            self.late(PlacementKind::PackedWithGaps, place),
        ];
        // A narrow window, so that the number of queries determines which tiles there are.
        for call in [
            self.listed(PlacementKind::PackedWithGaps, place),
            self.listed(PlacementKind::Packed, place),
        ] {
            all.push(call.with(|it| it.with_mask(Mask::window(Some(1), Some(0)))));
        }
        all
    }

    /// Returns calls that only paged kernels serve.
    fn shared_pages(&self) -> Vec<Call> {
        let &Calls { kernel, round, stages, .. } = self;
        let mut all = Vec::new();
        // Every page is the first or the last one of the cache, and the block table holds numbers
        // out of bounds instead, which are clamped to these.
        let shared = Ragged::new(vec![1, 2, 1], vec![stages + round, 2 * stages + 5, 3 * round]);
        for multiprocessors in [1, 5] {
            let shared = shared.over(PlacementKind::SharedPages(self.page));
            let call = Call::ragged(kernel, shared, [2, 1]).with_multiprocessors(multiprocessors);
            all.push(Call { hostile: true, ..call });
        }
        if !self.padded {
            all.push(self.looked_up_again());
        }
        all
    }

    /// Returns a call of one team whose sequences have more keys than the 32 entries are for that each
    /// warp looks up at once: as many as the next 32 are for too, and the 32 after those.
    fn looked_up_again(&self) -> Call {
        let &Calls { tile, round, .. } = self;
        let entries = 32 * 16 * (round / tile);
        let keys = vec![3 * entries + round + 5, 0, 2 * entries];
        self.call(vec![1; 3], keys, [1, 1]).with_multiprocessors(1)
    }

    /// Returns calls that only kernels without pages serve.
    fn packed(&self) -> Vec<Call> {
        let &Calls { kernel, tile, round, .. } = self;
        let call = |queries, keys, heads| self.call(queries, keys, heads);
        // Packed keys.
        let mut all = vec![
            self.listed(PlacementKind::Padded, PlacementKind::Packed),
            self.late(PlacementKind::Packed, PlacementKind::Packed),
        ];
        // A first sequence with a query but without keys.
        let none = Ragged::new(vec![1, 2, 1], vec![0, round + 3, tile]).over(PlacementKind::Packed);
        all.push(Call { hostile: true, ..Call::ragged(kernel, none, [2, 1]) });
        // There is no memory after the last key of the last sequence.
        all.push(call(vec![1, 1], vec![3, round + 3], [1, 1]));
        // A last sequence without keys, and last sequences that are not their team's first.
        let none = Ragged::new(vec![1, 1], vec![3, 0]).over(PlacementKind::Padded);
        all.push(Call { hostile: true, ..Call::ragged(kernel, none, [1, 1]) });
        for (end, keys) in [(0, 3), (0, 6), (0, 9), (0, 14), (round, 6), (round, 14)] {
            let next =
                Ragged::new(vec![1, 2], vec![3 * round, end + keys]).over(PlacementKind::Packed);
            all.push(Call::ragged(kernel, next, [1, 1]).with_multiprocessors(1));
        }
        for end in [0, tile, round, 2 * round, 3 * round + tile, 4 * round] {
            for keys in [3, 6, 9, 14] {
                let last = Ragged::new(vec![1, 2], vec![3, end + keys]).over(PlacementKind::Padded);
                all.push(Call::ragged(kernel, last, [1, 1]));
            }
        }
        // Equal lengths, without a list of them.
        all.push(Call::new(kernel, 2, [2, 2 * round + 5], [4, 2]).with_multiprocessors(3));
        all
    }
}

/// The number of splits of a group, and of groups that are loaded at a time.
const GROUP: usize = 16;

/// Returns calls of kernels with splits of a fixed size: groups of splits and sequences that belong
/// to one team or to several, as the team's first or a later one.
fn fixed_splits(it: &Decode, place: PlacementKind) -> Vec<Call> {
    let kernel = Configuration::Decode(*it);
    let split = (it.unit_tiles() * it.tile_keys) as usize;
    let group = GROUP * split;
    let call = |queries: Vec<usize>, keys: Vec<usize>, heads| {
        let call = Call::ragged(kernel, Ragged::new(queries, keys).over(place), heads);
        call.with(|it| it.with_mask(Mask::NONE))
    };
    let window =
        |call: Call, left: usize| call.with(|it| it.with_mask(Mask::window(Some(left), Some(0))));
    let long = 2 * group + 5 * split + 3;
    let mut all = Vec::new();
    // Groups of every number of splits, each split in another team, the last split partial.
    for (few, many) in [(2, 11), (12, GROUP)] {
        let keys: Vec<usize> = (few..=many).map(|splits| splits * split - splits % 7 * 4).collect();
        let teams = (few..=many).sum::<usize>() as u32;
        all.push(
            call(vec![1; keys.len()], keys, [it.rows as usize, 1]).with_multiprocessors(teams),
        );
    }
    if it.running_parts() == 0 {
        // Sequences of every number of groups, each in several teams: where parts are summed in
        // registers, each number is folded by statements of its own.
        let keys = (2..=GROUP).map(|groups| groups * group - groups % 5 * split);
        let keys: Vec<usize> = keys.collect();
        all.push(call(vec![1; keys.len()], keys, [it.rows as usize, 1]).with_multiprocessors(61));
    }
    // Sequences of several groups, in one team, and in teams that have whole groups and parts of
    // groups.
    for teams in [1, 2, 3, 5] {
        let heads = it.rows as usize;
        all.push(
            call(vec![1, 2, 1], vec![split, long, group + 1], [heads, 1])
                .with_multiprocessors(teams),
        );
    }
    // Thread blocks of a team with different heads, with different queries, and with none.
    let several = |left| {
        let keys = vec![group + 2, long, 2 * split + 5];
        window(call(vec![5, 1, 2], keys, [8, 2]), left)
    };
    all.push(several(long).with_multiprocessors(6));
    all.push(several(long).with_multiprocessors(30));
    all.push(several(3 * split + 1).with_multiprocessors(30));
    // Windows that begin within a split of a later group.
    for teams in [1, 3, 21] {
        all.push(window(
            call(vec![2, 1], vec![long, group], [2, 1]).with_multiprocessors(teams),
            20 * split + 5,
        ));
    }
    // Parts whose maxima are far apart, whichever team folds them.
    for (key_magnitudes, teams) in [
        (KeyMagnitudes::Spikes, 1),
        (KeyMagnitudes::Spikes, 2),
        (KeyMagnitudes::Spikes, 40),
        (KeyMagnitudes::Peaks, 1),
        (KeyMagnitudes::Peaks, 2),
        (KeyMagnitudes::Valley, 3),
        (KeyMagnitudes::Alternating(split), 1),
        (KeyMagnitudes::Alternating(split), 40),
        (KeyMagnitudes::Alternating(group), 1),
        (KeyMagnitudes::Alternating(group), 2),
        (KeyMagnitudes::LargeFirst(split), 1),
        (KeyMagnitudes::LargeFirst(split), 40),
        (KeyMagnitudes::LargeFirst(group), 1),
        (KeyMagnitudes::LargeFirst(group), 2),
    ] {
        let heads = it.rows as usize;
        all.push(
            call(vec![1, 1], vec![long, split], [heads, 1])
                .with_multiprocessors(teams)
                .with_keys(key_magnitudes),
        );
    }
    // More groups than are loaded at a time.
    for (key_magnitudes, heads) in
        [(KeyMagnitudes::Uniform, 1), (KeyMagnitudes::LargeFirst(group), it.rows as usize)]
    {
        let many = call(vec![1], vec![GROUP * group + 3], [heads, 1]).with_multiprocessors(20);
        all.push(many.with_keys(key_magnitudes));
    }
    all
}
