//! Mutation scenes of the backward kernels, over batches of equal lengths and ragged ones.

use flashcore::Mask;
use kernels::{Backward, Batch, Configuration, MaskKind};

use super::{Call, KeyMagnitudes, PlacementKind, Ragged};

/// Returns calls of a backward kernel with tiles of `[queries, keys]`: walks of a single step,
/// walks around the pipeline's stages more than once, keys that no query sees.
pub(super) fn calls(
    kernel: Configuration,
    tile: [u32; 2],
    head_dim: u32,
    (mask, batch): (MaskKind, Batch),
) -> Vec<Call> {
    let [rows, keys] = tile.map(|it| it as usize);
    let scale = 2.0 / (head_dim as f32).sqrt();
    if batch != Batch::Equal {
        return ragged(kernel, rows, keys, scale);
    }
    let call = |lengths, heads| Call::new(kernel, 1, lengths, heads);
    let mut all = vec![
        call([rows - 1, keys + 40], [2, 1]),
        // As many keys as queries, so that no mask leaves few steps; coprime numbers of blocks and
        // stages, so that every stage gets full blocks. Few keys of each query have weight, so that
        // one wrong number is no small part of a sum.
        call([2 * rows + 70, 2 * rows + 70], [2, 1]).with(|it| it.with_scale(scale)),
        // Several heads and sequences; full blocks.
        Call::new(kernel, 2, [rows, 70], [2, 2]).with(|it| it.with_scale(scale)),
        Call::new(kernel, 2, [rows + 3, keys + 1], [4, 2]).with(|it| it.with_scale(scale)),
        // One block per head, so that every step of the loop is at the edge of a mask, in every
        // column.
        call([rows, rows], [5, 1]).with(|it| it.with_scale(scale)),
        call([rows - 8, rows], [5, 1]).with(|it| it.with_scale(scale)),
        call([rows + 1, keys], [3, 1]).with(|it| it.with_scale(scale)),
    ];
    let together = match kernel {
        Configuration::Backward(it) => it.pass().takes_heads_together(),
        Configuration::BackwardMma(it) => it.pass().takes_heads_together(),
        _ => false,
    };
    if together {
        // More heads than are taken together, with some left over.
        all.push(call([rows + 3, 2 * keys + 1], [5, 5]).with_multiprocessors(4));
        all.push(call([rows + 3, 2 * keys + 1], [3, 3]).with_multiprocessors(1));
        all.push(Call::new(kernel, 2, [rows + 3, 2 * keys + 1], [7, 7]));
    }
    if let Configuration::Backward(it) = kernel {
        if it.persistent && mask == MaskKind::Local {
            // Tiles that no query sees, before, between and after others of the same thread block;
            // an even and an odd number of them.
            let window = Mask::window(Some(5), Some(2));
            for (blocks, heads) in [(2, [2, 2]), (3, [3, 3]), (4, [2, 1])] {
                let few = call([rows / 2, blocks * keys], heads).with_multiprocessors(1);
                all.push(few.with(|it| it.with_scale(scale).with_mask(window)));
            }
        }
        if it.split {
            // A tile in many parts; in parts of unequal numbers of steps, some without any, after
            // whole tiles; parts that end within a head.
            all.push(
                call([12 * rows - 5, keys], [1, 1])
                    .with_multiprocessors(5)
                    .with(|it| it.with_scale(scale)),
            );
            all.push(
                call([rows, 5 * keys], [1, 1])
                    .with_multiprocessors(3)
                    .with(|it| it.with_scale(scale)),
            );
            all.push(
                call([3 * rows + 5, 2 * keys], [5, 1])
                    .with_multiprocessors(7)
                    .with(|it| it.with_scale(scale)),
            );
            all.push(Call::new(kernel, 3, [7 * rows, keys - 3], [2, 1]).with_multiprocessors(2));
        }
    }
    let listed = match kernel {
        Configuration::Backward(it) => it.pass().takes_block_lists(),
        Configuration::BackwardMma(it) => it.pass().takes_block_lists(),
        _ => false,
    };
    if listed {
        // Lists of one, two, three and more entries, which differ between heads; unequal numbers of
        // query and key blocks; a last block of one row, and of one key; a single, partial block.
        for (lengths, heads) in [
            ([rows - 1, keys - 1], [5, 1]),
            ([5 * rows - 7, 5 * rows - 7], [4, 2]),
            ([4 * rows + 1, 2 * keys + 1], [3, 1]),
            ([2 * rows, 5 * keys - 1], [2, 2]),
        ] {
            all.push(call(lengths, heads).with(|it| it.with_scale(scale)));
        }
        // So many blocks that looking up half or twice a query's block gives another list; keys at
        // the edges of wide windows weigh most.
        let edges = call([6 * rows - 3, 6 * rows - 3], [2, 1]).with(|it| it.with_scale(scale));
        all.push(edges.with_keys(KeyMagnitudes::AtDistance(rows + 2)));
        // Scores far below zero, next to which a key beyond the last one, whose score is 0, would
        // weigh more than a float holds: in walks of one step and of several, in either warpgroup,
        // in either row of a thread.
        let long = [[3 * rows + 9, 3 * keys - 9], [2 * rows + 5, keys + 70]];
        let short = [[3 * rows / 4, 3 * keys / 4], [rows + 9, keys + 9]];
        for (batch, lengths) in short.map(|it| (8, it)).into_iter().chain(long.map(|it| (3, it))) {
            let few = Call::new(kernel, batch, lengths, [2, 1]).with_multiprocessors(4);
            let few = few.with(|it| it.with_scale(4.0 * scale));
            all.push(few.with_keys(KeyMagnitudes::Large));
        }
    }
    match mask {
        MaskKind::Dense => {}
        // Queries that see no key; keys that all queries see.
        MaskKind::Causal => all.extend([
            call([2 * rows + 9, keys / 2], [1, 1]),
            call([rows + 9, 3 * keys], [1, 1]).with(|it| it.with_scale(scale)),
            call([3 * rows + 5, 3 * rows + 5], [3, 1]).with(|it| it.with_scale(scale)),
        ]),
        // Few keys per query, so that each has weight: within a block, at both its ends, and
        // beyond.
        MaskKind::Local | MaskKind::Chunked => {
            let windows = [(Some(5), Some(2)), (Some(1), Some(0)), (Some(0), Some(rows))];
            for (left, right) in windows {
                for (length, heads) in [(2 * rows + 70, 1), (3 * rows + 5, 3)] {
                    let call = call([length, length], [heads, 1]).with(|it| it.with_scale(scale));
                    all.push(call.with(|it| it.with_mask(Mask::window(left, right))));
                }
            }
        }
    }
    all
}

/// Returns calls over ragged batches, in which some sequences have no queries, no keys, or neither.
fn ragged(kernel: Configuration, rows: usize, block: usize, scale: f32) -> Vec<Call> {
    let shares = matches!(kernel, Configuration::Backward(Backward { shares: true, .. }));
    let call = |queries: Vec<usize>, keys: Vec<usize>, query_place, key_place, heads| {
        let ragged = Ragged::new(queries, keys).over(key_place);
        let [query_heads, key_heads] = heads;
        let heads = [query_heads, if shares { query_heads } else { key_heads }];
        Call::ragged(kernel, Ragged { query_place, ..ragged }, heads)
    };
    let (packed, apart, padded) =
        (PlacementKind::Packed, PlacementKind::PackedWithGaps, PlacementKind::Padded);
    let hostile =
        call(vec![rows, 0, 1, rows - 1], vec![block, 0, 2 * block, 1], packed, apart, [2, 1]);
    let mut all = vec![
        call(vec![1, 5 * rows - 7, 0, 3], vec![1, block, 9, 0], packed, packed, [2, 2]),
        call(vec![rows - 1, 2 * rows, rows + 1], vec![block + 40, 70, 3], apart, padded, [4, 2]),
        call(vec![7, rows + 1], vec![2 * block + 1, 5], padded, apart, [3, 1]),
        call(vec![rows, 17, rows - 8], vec![rows, 25, rows], packed, packed, [5, 1]),
        Call { hostile: true, ..hostile },
    ];
    if shares {
        // Tiles that clear and round shares of other tiles: of several query blocks, of one and of
        // none, of heads with several tiles and with one, of queries without keys.
        for (queries, keys, heads) in [
            (vec![3 * rows - 5, 9, 0, rows + 1, 1], vec![60, 0, 3, block + 1, 7], [3, 3]),
            (vec![2 * rows, 5, 70, 33], vec![2 * block + 2, 0, 70, 5], [4, 4]),
        ] {
            all.push(call(queries, keys, packed, packed, heads).with_multiprocessors(1));
        }
        // Without grouped heads, walks around the pipeline's stages take long sequences. Few keys of
        // each query have weight, so that one wrong number is no small part of a sum.
        let long = call(vec![4 * rows + 9], vec![4 * rows + 9], packed, packed, [1, 1]);
        all.push(long.with(|it| it.with_scale(scale)));
    }
    all
}
