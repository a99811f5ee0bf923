//! Mutation scenes of the prefill kernel, the forward kernel for Hopper over ragged batches and
//! pages.

use flashcore::Mask;
use kernels::{Configuration, MaskKind, Prefill};

use super::{Call, KeyMagnitudes, PlacementKind, Ragged, alternation_periods};

pub(super) fn calls(it: &Prefill) -> Vec<Call> {
    let kernel = Configuration::Prefill(*it);
    let (rows, block) = (it.tile.query_rows() as usize, it.tile.key_block as usize);
    let place = it
        .page_rows
        .map_or(PlacementKind::PackedWithGaps, |it| PlacementKind::Paged(2 * it as usize));
    let call = |queries: Vec<usize>, keys: Vec<usize>, heads| {
        Call::ragged(kernel, Ragged::new(queries, keys).over(place), heads)
    };
    let open = |call: Call| call.with(|it| it.with_mask(Mask::NONE));
    let window = Mask::window(Some(2 * block + 3), Some(3));
    let mut all = vec![
        // More tiles of one key block than there are thread blocks.
        open(call(vec![1, 5, rows, 3, 9, 7, 2], vec![block, 3, 1, block - 1, 9, 2, block], [2, 1])),
        // Tiles of two and of several key blocks; a window; several key heads.
        open(call(vec![rows + 3, 2, 1], vec![2 * block, 4 * block + 1, 3 * block], [2, 2])),
        call(vec![rows + 3, 2, 0, 7], vec![4 * block + 5, block, 7, 0], [4, 2])
            .with(|it| it.with_mask(window)),
        // A window within a key block.
        call(vec![rows + 9, 3 * rows, 1], vec![4 * block + 5, 3 * rows, block], [1, 1])
            .with(|it| it.with_mask(Mask::window(Some(5), Some(2)))),
        // A window that begins after the first key block, for the first tile and for a later one.
        call(vec![1, 2], vec![4 * block + 9, 3 * block + 12], [1, 1])
            .with(|it| it.with_mask(Mask::window(Some(5), Some(2)))),
        call(vec![1, 2, 1], vec![4 * block + 9, 3 * block + 12, 2 * block + 20], [1, 1])
            .with(|it| it.with_mask(Mask::window(Some(5), Some(2))))
            .with_multiprocessors(1),
        // Thread blocks without a tile.
        call(vec![3, 1], vec![block + 1, 2], [1, 1]).with_multiprocessors(5),
        call(vec![2 * rows + 1, 0, 0], vec![block, 7, 2 * block], [1, 1]).with_multiprocessors(5),
        open(call(vec![rows, 1], vec![4 * block, 5 * block], [1, 1]))
            .with_keys(KeyMagnitudes::Valley),
        open(call(vec![rows, 1], vec![3 * block, block + 1], [1, 1]))
            .with_keys(KeyMagnitudes::Spikes),
        open(call(vec![rows, 1], vec![7 * block, 3 * block + 1], [1, 1]))
            .with_keys(KeyMagnitudes::Peaks),
        call(vec![2 * rows], vec![2 * rows], [2, 1]).with_keys(KeyMagnitudes::Peaks),
        Call { hostile: true, ..call(vec![rows, 0, 1], vec![block, 0, 2 * block], [1, 1]) },
    ];
    for of in alternation_periods(block) {
        let call = open(call(vec![rows, 1], vec![3 * block, block + 1], [1, 1]));
        all.push(call.with_keys(KeyMagnitudes::Alternating(of)));
    }
    // The mask's edges at the edges of key blocks; a tile that sees no key.
    for [left, right] in [[block - 1, 0], [block, 1], [1, block], [5, 0], [3, block - 2]] {
        let even =
            call(vec![2 * rows, 2 * rows, 2 * rows + 9], vec![2 * rows, 2 * rows + 1, 5], [1, 1]);
        let even = even.with(|it| it.with_mask(Mask::window(Some(left), Some(right))));
        // For the first tile of a thread block and for later ones.
        all.extend([even.clone().with_multiprocessors(8), even]);
    }
    // Few keys per row: the windows of the last rows of a partial tile, and of the first rows of
    // others, end with a key block or just before.
    for left in [1, 5] {
        let keys = vec![2 * block, 2 * rows + block - 2, 2 * rows + block - 1];
        let narrow = call(vec![rows - 8, 2 * rows, 2 * rows], keys, [1, 1]);
        let narrow = narrow.with(|it| it.with_mask(Mask::window(Some(left), Some(0))));
        all.extend([narrow.clone().with_multiprocessors(8), narrow]);
    }
    if it.tile.rules.mask == MaskKind::Dense {
        all.retain(|call| call.problem.mask == Mask::NONE);
    }
    if let Some(page_rows) = it.page_rows.map(|it| it as usize) {
        // Pages that end within a key block, and a block table that ends there.
        for page in [page_rows, 3 * page_rows] {
            let call = |queries: Vec<usize>, keys: Vec<usize>| {
                let ragged = Ragged::new(queries, keys).over(PlacementKind::Paged(page));
                Call::ragged(kernel, ragged, [2, 1])
            };
            all.push(call(vec![3, rows + 1], vec![page, 3 * page - 5]));
            all.push(call(vec![1, 2, 1], vec![3, 1, page - 1]).with_multiprocessors(1));
        }
        // Every page is the first or the last one of the cache, and the block table holds numbers
        // out of bounds instead, which are clamped to these.
        let shared = Ragged::new(vec![rows + 1, 2, 3, 1], vec![5 * block, 3 * block, 2 * block, 9]);
        let shared = shared.over(PlacementKind::SharedPages(page_rows));
        for multiprocessors in [1, 8] {
            let call =
                Call::ragged(kernel, shared.clone(), [2, 1]).with_multiprocessors(multiprocessors);
            all.push(Call { hostile: true, ..call });
        }
    } else {
        // Equal lengths, without a list of them.
        all.push(Call::new(kernel, 2, [rows / 2 + 1, block + 3], [2, 1]));
        // Keys after left padding, in batch entries.
        let padding = vec![3, block, 1];
        let ragged = Ragged::new(vec![rows + 1, 2, 3], vec![2 * block, 5, block]);
        let behind = Ragged { padding, ..ragged.over(PlacementKind::Entries) };
        all.push(Call::ragged(kernel, behind, [2, 1]));
    }
    all
}
