//! Mutation scenes of the forward kernel for Hopper, over batches of equal lengths.

use flashcore::Mask;
use kernels::{Configuration, Forward, MaskKind};

use super::{Call, KeyMagnitudes, alternation_periods, second_block_ends};

pub(super) fn calls(it: &Forward) -> Vec<Call> {
    let kernel = Configuration::Forward(*it);
    let (rows, block) = (it.query_rows() as usize, it.key_block as usize);
    let stages = it.stages as usize;
    let call = |lengths, heads| Call::new(kernel, 1, lengths, heads);
    let mut all = vec![
        // Several tiles per thread block, each of a single key block, partial and full.
        call([rows, block - 12], [7, 1]),
        call([rows / 2, block], [5, 5]),
        // Tiles of two key blocks, and of several.
        call([rows + 5, 2 * block], [3, 1]),
        Call::new(kernel, 2, [rows + 5, 3 * block + 1], [2, 1]),
        Call::new(kernel, 3, [rows + 5, block + 1], [6, 2]).with_multiprocessors(5),
        Call::new(kernel, 2, [rows + 5, block + 1], [1, 1]),
        // Row maxima that rise during the walk.
        call([rows - 1, 4 * block], [3, 1]).with_keys(KeyMagnitudes::Valley),
        call([rows - 1, 3 * block], [3, 1]).with_keys(KeyMagnitudes::Spikes),
        call([rows - 1, 7 * block], [3, 1]).with_keys(KeyMagnitudes::Peaks),
        // More thread blocks than tiles.
        call([rows, 2 * block - 3], [1, 1]).with_multiprocessors(3),
    ];
    if stages > 2 {
        all.push(call([rows, stages * block - 3], [5, 1]));
    }
    all.extend(
        alternation_periods(block).map(|of| {
            call([rows - 1, 3 * block], [1, 1]).with_keys(KeyMagnitudes::Alternating(of))
        }),
    );
    all.push(call([rows, 2], [3, 1]).with_keys(KeyMagnitudes::Large));
    if it.stream_k {
        // One tile in parts of three thread blocks; a thread block with the end of one tile and the
        // beginning of the next.
        all.push(call([rows - 1, 10 * block - 3], [1, 1]).with_multiprocessors(3));
        all.push(
            call([rows, 10 * block], [5, 1])
                .with_multiprocessors(3)
                .with_keys(KeyMagnitudes::Peaks),
        );
    }
    if it.rules.functions().next().is_some() {
        // Every divisor in a function is used in every part of the walk.
        all.push(call([rows + 5, 2 * block], [7, 1]));
        all.push(call([rows, 5 * block - 3], [7, 1]));
    }
    if it.takes_block_lists() {
        // Lists of no, one and more key blocks, for several heads and sequences.
        all.push(Call::new(kernel, 2, [5 * rows + 1, 3 * rows + 5], [3, 1]));
        all.push(call([2 * rows - 1, 5 * rows], [2, 2]));
        // Thread blocks beyond the last tile, for which there is no list.
        all.push(Call::new(kernel, 2, [rows, rows], [2, 1]).with_multiprocessors(7));
    }
    if it.rules.mask != MaskKind::Dense {
        // Rows that see no key; more keys than queries.
        all.push(call([rows + 20, block + 3], [2, 1]));
        all.push(call([rows / 2 + 1, 5 * block], [2, 1]));
        // A whole tile that sees no key; the mask's edge at the edges of key blocks, for the first
        // tile of a thread block and for later ones.
        all.push(call([2 * rows + 20, block + 3], [2, 1]));
        all.push(call([2 * rows + 20, block + 3], [2, 1]).with_multiprocessors(8));
        for (further, multiprocessors) in
            [(0, 1), (0, 8), (1, 1), (1, 8), (block - 2, 1), (block - 2, 8)]
        {
            all.push(
                call([2 * rows, 2 * rows + further], [2, 1]).with_multiprocessors(multiprocessors),
            );
        }
        all.extend(
            [KeyMagnitudes::Valley, KeyMagnitudes::Peaks]
                .map(|key_magnitudes| call([2 * rows, 2 * rows], [2, 1]).with_keys(key_magnitudes)),
        );
        if it.rules.mask == MaskKind::Local {
            // Windows within a key block, and windows that end at the edges of key blocks.
            let window = |left, right| Mask::window(Some(left), Some(right));
            for mask in [window(5, 2), window(block - 1, 0), window(block, 1), window(1, block)] {
                all.push(call([rows + 9, 4 * block], [3, 1]).with(|it| it.with_mask(mask)));
                for multiprocessors in [1, 8] {
                    let even =
                        call([2 * rows, 2 * rows], [2, 1]).with_multiprocessors(multiprocessors);
                    all.push(even.with(|it| it.with_mask(mask)));
                }
            }
        }
    } else {
        // The last keys weigh most. With a list of key blocks, the last queries see them, so there
        // are as many queries as keys.
        let (listed, few) = (it.takes_block_lists(), rows / 2);
        let shape = |keys| if listed { ([keys, keys], [9, 1]) } else { ([few, keys], [3, 1]) };
        all.extend(second_block_ends(block).map(|keys| {
            let (lengths, heads) = shape(keys);
            call(lengths, heads).with_keys(KeyMagnitudes::Valley)
        }));
    }
    all
}
