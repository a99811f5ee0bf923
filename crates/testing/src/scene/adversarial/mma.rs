//! Mutation scenes of the forward kernel with `mma.sync`.

use flashcore::Mask;
use kernels::{Batch, Configuration, MaskKind, Mma};

use super::{Call, KeyMagnitudes, PlacementKind, Ragged, second_block_ends};

pub(super) fn calls(it: &Mma) -> Vec<Call> {
    let kernel = Configuration::Mma(*it);
    let (rows, block) = (it.query_rows() as usize, it.key_block as usize);
    if it.batch != Batch::Equal {
        let place = match it.batch {
            Batch::Paged => PlacementKind::Paged(block / 2 - 1),
            _ => PlacementKind::PackedWithGaps,
        };
        let call = |queries: Vec<usize>, keys: Vec<usize>| {
            Call::ragged(kernel, Ragged::new(queries, keys).over(place), [4, 2])
        };
        let mut all = vec![
            call(vec![rows, 1, 5, 0], vec![block, 3 * block, 1, 7]),
            Call { hostile: true, ..call(vec![rows, 0, 3], vec![block, 0, 2 * block]) },
            Call { hostile: true, ..call(vec![0, 2, 0], vec![0, block + 1, 3]) },
            call(vec![rows, 3], vec![3 * block, 2 * block]).with_keys(KeyMagnitudes::Spikes),
            call(vec![2 * rows + 3], vec![6 * block + 5]),
            call(vec![2 * rows, 3 * rows], vec![2 * rows, 2 * rows + 1]),
            call(vec![2 * rows, 1], vec![4 * rows, rows])
                .with(|it| it.with_mask(Mask::window(Some(block), Some(1)))),
            call(vec![rows, 3], vec![7 * block, 2 * block]).with_keys(KeyMagnitudes::Peaks),
            call(vec![rows + 1, 2], vec![4 * block + 1, 2 * block])
                .with_keys(KeyMagnitudes::Valley),
        ];
        // Query lengths that end in each pass of copies; windows within a key block, and windows
        // that end at the edges of key blocks.
        let ends = || (1..4).map(|pass| pass * rows / 4 + 5);
        for [left, right] in [[rows, rows], [5, 2], [block - 1, 0], [block, 1], [1, block]] {
            let even = call(ends().collect(), ends().map(|queries| queries + 2 * block).collect());
            all.push(even.with(|it| it.with_mask(Mask::window(Some(left), Some(right)))));
        }
        return all;
    }
    let call = |lengths, heads| Call::new(kernel, 1, lengths, heads);
    let mut all = vec![
        call([rows / 2, block], [2, 1]),
        call([rows, 2 * block], [1, 1]),
        Call::new(kernel, 2, [rows + 5, 3 * block + 3], [4, 2]),
        Call::new(kernel, 2, [5, block - 3], [2, 2]),
        call([rows, 3 * block - 1], [1, 1]),
    ];
    // Accumulation in f16 is not accurate enough for such scores.
    if it.accumulate == ptx::Element::F32 {
        all.push(call([rows - 1, 3 * block], [1, 1]).with_keys(KeyMagnitudes::Spikes));
        all.push(call([rows - 1, 5 * block], [1, 1]).with_keys(KeyMagnitudes::Valley));
        all.push(call([rows - 1, 7 * block], [1, 1]).with_keys(KeyMagnitudes::Peaks));
    }
    if it.takes_block_lists() {
        // Lists of no, one and more key blocks, for several heads and sequences.
        all.push(Call::new(kernel, 2, [5 * rows + 1, 3 * rows + 5], [3, 1]));
        all.push(call([2 * rows - 1, 5 * rows], [2, 2]));
        // Keys at the edges of wide windows weigh most, in so many blocks that what was found for
        // one query block differs from what was found for others.
        let edges = call([12 * rows - 3, 12 * rows - 3], [2, 1]);
        all.push(edges.with_keys(KeyMagnitudes::AtDistance(rows + 2)));
    }
    if it.rules.mask != MaskKind::Dense {
        all.push(call([rows + 20, block / 2], [2, 1]));
        all.push(call([2 * rows + 20, block + 3], [2, 1]));
        for key_magnitudes in [KeyMagnitudes::Uniform, KeyMagnitudes::Valley, KeyMagnitudes::Peaks]
        {
            all.extend([0, 1, block - 2].map(|further| {
                let call = call([3 * rows, 3 * rows + further], [1, 1]);
                call.with_keys(key_magnitudes)
            }));
        }
    } else {
        all.push(call([3, 0], [1, 1]));
        // With a list of key blocks, the last queries see the last keys, so there are as many
        // queries as keys.
        let (listed, few) = (it.takes_block_lists(), rows / 2);
        let shape = |keys| if listed { ([keys, keys], [9, 1]) } else { ([few, keys], [1, 1]) };
        all.extend(second_block_ends(block).map(|keys| {
            let (lengths, heads) = shape(keys);
            call(lengths, heads).with_keys(KeyMagnitudes::Valley)
        }));
    }
    all
}
