//! Mutation scenes of the sequencer, the kernel that lists the tiles of ragged batches.

use kernels::sequencer::Tiles;
use kernels::{MaskKind, Sequencer};

use super::{PlacementKind, Ragged, Scene, SceneError};

/// Returns scenes in which no two tiles of a sequencer cost the same, since only then their order
/// is defined. Costs beyond 1024 are counted in steps.
pub(super) fn scenes(it: &Sequencer) -> Result<Vec<Scene>, SceneError> {
    let batch = Scene::sequencer_batch();
    let of = |queries: Vec<usize>, keys: Vec<usize>| Ragged { queries, keys, ..batch.clone() };
    // The only long sequence is in each of the lanes and warps that exchange the longest length.
    let one_in = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].map(|last| {
        let only = |length: usize| [vec![0; last], vec![length]].concat();
        (only(1), only(1100))
    });
    // Lists of starts and lengths of queries and keys, with and without gaps between sequences, and
    // with an empty first sequence.
    let lists = |place, queries: Vec<usize>, keys: Vec<usize>| Ragged {
        query_place: place,
        padding: vec![0, 2, 0, 1],
        ..Ragged::new(queries, keys).over(place)
    };
    let apart = [PlacementKind::PackedWithGaps, PlacementKind::Packed, PlacementKind::Padded]
        .into_iter()
        .flat_map(|place| {
            let first = lists(place, vec![0, 5, 0, 70], vec![0, 9, 0, 200]);
            [first, lists(place, vec![3, 0, 66, 9], vec![140, 0, 70, 7])]
        });
    // The largest cost, and one cost for each of the lanes and warps that contribute to the sums.
    let far = [1023usize, 991, 959, 895, 767, 511, 1022, 1021, 1019, 1015, 1007];
    if matches!(it.tiles, Tiles::Keys | Tiles::KeysOrQueries) {
        // Tiles of keys are ordered by sequence: of the sequences with tiles, no two have the same
        // number of queries.
        let few = |every: usize, rows: fn(usize) -> usize| {
            move |index: usize| if index.is_multiple_of(every) { rows(index) } else { 0 }
        };
        let mut all = vec![
            of(vec![1], vec![1]),
            of(vec![0, 2], vec![7, 0]),
            of(vec![5, 9, 7], vec![700, 128, 4500]),
            of(vec![600, 601], vec![1, 1]),
            of((0..45).collect(), (0..45).map(|index| index * 7 % 300).collect()),
            of(
                (0..1100).map(few(128, |it| 1 + it / 128)).collect(),
                (0..1100).map(few(256, |_| 300)).collect(),
            ),
            of(vec![1500, 3100, 1100, 2700], vec![9, 300, 130, 1]),
        ];
        all.extend(one_in.map(|(keys, queries)| of(queries, keys)));
        all.extend(apart);
        all.push(of(far.into(), vec![130, 1, 300, 9, 200, 7, 130, 3, 129, 5, 2]));
        all.push(of(vec![3, 0, 66], vec![140, 0, 70]).over(PlacementKind::Entries));
        return all.iter().map(|ragged| Scene::sequencer(*it, ragged, 128)).collect();
    }
    let long = of(vec![1, 9, 64, 3, 40, 2, 17], vec![1500, 3100, 1100, 2700, 2000, 600, 2400]);
    // More sequences than one round takes, few of them with queries; the first key is not at 0.
    let many = of(
        (0..1100usize).map(|index| index.is_multiple_of(128).into()).collect(),
        (0..1100).map(|index| 3 + index / 128 * 5).collect(),
    );
    let padding = (0..1100).map(|index| if index == 0 { 2 } else { 0 }).collect();
    let many = Ragged { padding, ..many };
    let none = of(vec![0, 0], vec![7, 0]);
    let one = of(vec![1], vec![1]);
    // More sequences than a warp has lanes, all of different lengths; the first has no queries.
    let mixed = Ragged {
        queries: (0..45).map(|index| index % 4).collect(),
        keys: (0..45).map(|index| index * 7 % 47 + 1).collect(),
        query_place: PlacementKind::Padded,
        padding: (0..45).map(|index| index % 3).collect(),
        ..batch.clone()
    };
    let entries = batch.over(PlacementKind::Entries);
    let spread = of(vec![1; 60], (0..60).map(|index| index * 7 % 60 * 17 + 4).collect());
    let near = of(vec![1; 2], vec![600, 601]);
    let mut all = vec![
        (one, 128),
        (none, 128),
        (entries, 64),
        (near, 64),
        (mixed, 64),
        (many, 64),
        (spread, 64),
        (long, 64),
    ];
    all.extend(one_in.map(|(queries, keys)| (of(queries, keys), 64)));
    all.extend(apart.map(|ragged| (ragged, 64)));
    if it.tiles == Tiles::Queries(MaskKind::Local) {
        all.push((of(vec![1; far.len()], far.into()), 64));
    }
    if it.tiles != Tiles::Queries(MaskKind::Chunked) {
        // More tiles than a warp has lanes; with chunks some of them would cost the same.
        all.push((of(vec![2200], vec![2200]), 64));
    }
    all.iter().map(|(ragged, rows)| Scene::sequencer(*it, ragged, *rows)).collect()
}
