//! The scenes of a kernel that leave a mutant no place to hide.
//!
//! Each is there for something that can be wrong and shows nowhere else: blocks that go through
//! several tiles, tiles of one, two or as many blocks of keys as there are stages, whole blocks and
//! ragged ones, blocks of threads with nothing to do, maxima that rise late. The smallest is first:
//! most mutants fall there.

use flashcore::Mask;
use kernels::decode::Splits;
use kernels::sequencer::Tiles;
use kernels::{
    Append, Batch, Configuration, Decode, Forward, MaskKind, Mma, Prefill, Sequencer, Widen,
};

use super::{AppendSize, Call, Place, Ragged, Scene, SceneError, Weights};

impl Scene {
    /// Every scene that a mutant of a kernel is shown, the smallest first. A family that has none
    /// of its own gets its small one.
    pub fn unkind(kernel: &Configuration) -> Result<Vec<Scene>, SceneError> {
        let small = Scene::small(kernel)?;
        let more = match kernel {
            Configuration::Forward(it) => scenes(forward(it)),
            Configuration::Prefill(it) => scenes(prefill(it)),
            Configuration::Mma(it) => scenes(mma(it)),
            Configuration::Decode(it) => scenes(decode(it)),
            Configuration::Append(it) => append(it),
            Configuration::Combine(it) => {
                // More parts than a warp has lanes; one; more rows than a block takes.
                let sizes = [([1, 3, 2], 70), ([2, 19, 3], 1), ([1, 5, 1], 33), ([2, 7, 3], 5)];
                sizes.into_iter().map(|(size, parts)| Scene::combine(*it, size, parts)).collect()
            }
            Configuration::Sequencer(it) => sequencer(it),
            Configuration::Backward(it) => {
                let tile = [it.query_block, it.key_block()];
                scenes(backward(*kernel, tile, it.head_dim, (it.rules.mask, it.batch)))
            }
            Configuration::BackwardMma(it) => {
                let tile = [it.query_block, it.key_block()];
                scenes(backward(*kernel, tile, it.head_dim, (it.rules.mask, it.batch)))
            }
            // Pages that end within a block and at its end; more sequences and heads.
            Configuration::Widen(it) => widen(it),
            // Queries that end in every round of stores.
            Configuration::Rounding(it) => {
                let (after, ends) = (it.after().unwrap_or(*kernel), (2..64).step_by(4));
                ends.map(|queries| Call::beside(after, queries).scene_of(2)).collect()
            }
            Configuration::SinkGradients(it) => {
                // More blocks of rows than one round takes, of several sequences; rows without keys.
                let after = it.after().unwrap_or(*kernel);
                // Few rows, so that each of them weighs; all warps; rows of another round.
                let few = [(1, [1, 1]), (1, [8, 7]), (1, [5, 3]), (1, [6, 3]), (2, [9, 11])];
                let many = [(1, [70, 66]), (8, [66, 66]), (1, [1100, 60]), (3, [700, 40])];
                let sizes = few.into_iter().chain(many);
                let calls = sizes.map(|(batch, lengths)| Call::new(after, batch, lengths, [2, 1]));
                calls.map(|call| Call { hostile: true, ..call }.scene_of(3)).collect()
            }
            _ => Ok(Vec::new()),
        };
        Ok([small].into_iter().chain(more?).collect())
    }
}

/// What scores are capped at where keys weigh more than others: a low cap would make them alike, and a
/// higher one would take too many digits of them.
const HIGH_CAP: f32 = 200.0;

fn scenes(calls: Vec<Call>) -> Result<Vec<Scene>, SceneError> {
    let uncapped = |mut call: Call| {
        if call.weights != Weights::Even && call.problem.scores.softcap.is_some() {
            call.problem.scores.softcap = Some(HIGH_CAP);
        }
        call.scene()
    };
    calls.into_iter().map(uncapped).collect()
}

/// One step alone, steps around the stages more than once, keys that nobody sees.
fn backward(
    kernel: Configuration,
    tile: [u32; 2],
    head_dim: u32,
    (mask, batch): (MaskKind, Batch),
) -> Vec<Call> {
    let [rows, keys] = tile.map(|it| it as usize);
    if batch != Batch::Equal {
        return ragged_backward(kernel, rows, keys);
    }
    let call = |lengths, heads| Call::new(kernel, 1, lengths, heads);
    let scale = 2.0 / (head_dim as f32).sqrt();
    let mut all = vec![
        call([rows - 1, keys + 40], [2, 1]),
        // As many keys as queries, so that no mask leaves few steps; numbers of blocks and of stages
        // that have no divisor in common, so that every stage sees full blocks. Each query has few
        // keys that weigh, so that one wrong number is no small part of a sum.
        call([2 * rows + 70, 2 * rows + 70], [2, 1]).with(|it| it.with_scale(scale)),
        // Heads and sequences that lie beside each other; whole blocks.
        Call::new(kernel, 2, [rows, 70], [2, 2]).with(|it| it.with_scale(scale)),
        Call::new(kernel, 2, [rows + 3, keys + 1], [4, 2]).with(|it| it.with_scale(scale)),
        // One block for each head: every step of the loop comes to the edge of a mask, in every column.
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
        // More heads than go together, and some left over.
        all.push(call([rows + 3, 2 * keys + 1], [5, 5]).on(4));
        all.push(call([rows + 3, 2 * keys + 1], [3, 3]).on(1));
        all.push(Call::new(kernel, 2, [rows + 3, 2 * keys + 1], [7, 7]));
    }
    if let Configuration::Backward(it) = kernel {
        if it.persistent && mask == MaskKind::Local {
            // Tiles that nobody sees before, between and after others, of one block of threads; an even
            // and an odd number of them.
            let window = Mask::window(Some(5), Some(2));
            for (blocks, heads) in [(2, [2, 2]), (3, [3, 3]), (4, [2, 1])] {
                let few = call([rows / 2, blocks * keys], heads).on(1);
                all.push(few.with(|it| it.with_scale(scale).with_mask(window)));
            }
        }
        if it.split {
            // A tile in many parts; in parts of unequal numbers of steps, some of them of none, behind
            // whole tiles; of heads that parts end within.
            all.push(call([12 * rows - 5, keys], [1, 1]).on(5).with(|it| it.with_scale(scale)));
            all.push(call([rows, 5 * keys], [1, 1]).on(3).with(|it| it.with_scale(scale)));
            all.push(call([3 * rows + 5, 2 * keys], [5, 1]).on(7).with(|it| it.with_scale(scale)));
            all.push(Call::new(kernel, 3, [7 * rows, keys - 3], [2, 1]).on(2));
        }
    }
    let listed = match kernel {
        Configuration::Backward(it) => it.pass().takes_block_lists(),
        Configuration::BackwardMma(it) => it.pass().takes_block_lists(),
        _ => false,
    };
    if listed {
        // Lists of one, two, three and more entries, of heads that differ; blocks of queries and of keys
        // that are not as many; a last block of one row, and of one key; an only one that is not whole.
        for (lengths, heads) in [
            ([rows - 1, keys - 1], [5, 1]),
            ([5 * rows - 7, 5 * rows - 7], [4, 2]),
            ([4 * rows + 1, 2 * keys + 1], [3, 1]),
            ([2 * rows, 5 * keys - 1], [2, 2]),
        ] {
            all.push(call(lengths, heads).with(|it| it.with_scale(scale)));
        }
        // As many blocks as it takes until what is found of a query's block, its half or its double differs;
        // of wide windows the edges weigh most.
        let edges = call([6 * rows - 3, 6 * rows - 3], [2, 1]).with(|it| it.with_scale(scale));
        all.push(Call { weights: Weights::Apart(rows + 2), ..edges });
        // Scores far below zero, beside which a key beyond the last, whose score is 0, weighs more than a
        // float holds.
        // In walks of one step and of several, of either warpgroup, of either row that a thread has.
        let long = [[3 * rows + 9, 3 * keys - 9], [2 * rows + 5, keys + 70]];
        let short = [[3 * rows / 4, 3 * keys / 4], [rows + 9, keys + 9]];
        for (batch, lengths) in short.map(|it| (8, it)).into_iter().chain(long.map(|it| (3, it))) {
            let few = Call::new(kernel, batch, lengths, [2, 1]).on(4);
            let few = few.with(|it| it.with_scale(4.0 * scale));
            all.push(Call { weights: Weights::Heavy, ..few });
        }
    }
    match mask {
        MaskKind::Dense => {}
        // Queries that see nothing; keys that all see.
        MaskKind::Causal => all.extend([
            call([2 * rows + 9, keys / 2], [1, 1]),
            call([rows + 9, 3 * keys], [1, 1]).with(|it| it.with_scale(scale)),
            call([3 * rows + 5, 3 * rows + 5], [3, 1]).with(|it| it.with_scale(scale)),
        ]),
        // Few keys for each query, so that each of them weighs: within a block, at both its ends, and
        // further on.
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

/// Sequences that end within a page and within a block of positions, or with it.
fn widen(it: &Widen) -> Result<Vec<Scene>, SceneError> {
    let call = Call::widened(it)?;
    let place = if it.paged { Place::Paged(16) } else { Place::Entries };
    let ragged = Ragged::new(vec![1, 2, 1], vec![128, 65, 16]).over(place);
    let padded = Ragged { padding: vec![0, 3, 5], ..ragged.clone() };
    let apart = Call::ragged(call.kernel, ragged, [2, 2]).over_cache(it.cache);
    let behind = Call::ragged(call.kernel, padded, [4, 2]).over_cache(it.cache);
    let hostile = Call { hostile: true, ..call };
    [apart, behind, hostile].iter().map(|call| call.scene_of(1)).collect()
}

/// The same in sequences of their own, some of them empty on one side or on both.
fn ragged_backward(kernel: Configuration, rows: usize, block: usize) -> Vec<Call> {
    let call = |queries: Vec<usize>, keys: Vec<usize>, query_place, key_place, heads| {
        let ragged = Ragged::new(queries, keys).over(key_place);
        Call::ragged(kernel, Ragged { query_place, ..ragged }, heads)
    };
    let (packed, apart, padded) = (Place::Packed, Place::Apart, Place::Padded);
    let hostile =
        call(vec![rows, 0, 1, rows - 1], vec![block, 0, 2 * block, 1], packed, apart, [2, 1]);
    vec![
        call(vec![1, 5 * rows - 7, 0, 3], vec![1, block, 9, 0], packed, packed, [2, 2]),
        call(vec![rows - 1, 2 * rows, rows + 1], vec![block + 40, 70, 3], apart, padded, [4, 2]),
        call(vec![7, rows + 1], vec![2 * block + 1, 5], padded, apart, [3, 1]),
        call(vec![rows, 17, rows - 8], vec![rows, 25, rows], packed, packed, [5, 1]),
        Call { hostile: true, ..hostile },
    ]
}

fn forward(it: &Forward) -> Vec<Call> {
    let kernel = Configuration::Forward(*it);
    let (rows, block) = (it.query_rows() as usize, it.key_block as usize);
    let stages = it.stages as usize;
    let call = |lengths, heads| Call::new(kernel, 1, lengths, heads);
    let mut all = vec![
        // Several tiles for each block of threads, of one block of keys, whole and not.
        call([rows, block - 12], [7, 1]),
        call([rows / 2, block], [5, 5]),
        // Of two, and of several in turn.
        call([rows + 5, 2 * block], [3, 1]),
        Call::new(kernel, 2, [rows + 5, 3 * block + 1], [2, 1]),
        Call::new(kernel, 3, [rows + 5, block + 1], [6, 2]).on(5),
        Call::new(kernel, 2, [rows + 5, block + 1], [1, 1]),
        // Maxima that rise.
        Call { weights: Weights::Valley, ..call([rows - 1, 4 * block], [3, 1]) },
        Call { weights: Weights::Spikes, ..call([rows - 1, 3 * block], [3, 1]) },
        Call { weights: Weights::Peaks, ..call([rows - 1, 7 * block], [3, 1]) },
        // A block of threads more than there are tiles.
        call([rows, 2 * block - 3], [1, 1]).on(3),
    ];
    if stages > 2 {
        all.push(call([rows, stages * block - 3], [5, 1]));
    }
    all.extend(
        turns(block)
            .map(|of| Call { weights: Weights::Turns(of), ..call([rows - 1, 3 * block], [1, 1]) }),
    );
    all.push(Call { weights: Weights::Heavy, ..call([rows, 2], [3, 1]) });
    if it.stream_k {
        // Three blocks of threads have parts of a tile; one has the end of a tile and the begin of
        // the next.
        all.push(call([rows - 1, 10 * block - 3], [1, 1]).on(3));
        all.push(Call { weights: Weights::Peaks, ..call([rows, 10 * block], [5, 1]).on(3) });
    }
    if it.rules.functions().next().is_some() {
        // Every divisor in every part of the walk.
        all.push(call([rows + 5, 2 * block], [7, 1]));
        all.push(call([rows, 5 * block - 3], [7, 1]));
    }
    if it.takes_block_lists() {
        // Lists of none, of one and of more, of heads and sequences.
        all.push(Call::new(kernel, 2, [5 * rows + 1, 3 * rows + 5], [3, 1]));
        all.push(call([2 * rows - 1, 5 * rows], [2, 2]));
        // Blocks of threads beyond the last tile, where there is no list.
        all.push(Call::new(kernel, 2, [rows, rows], [2, 1]).on(7));
    }
    if it.rules.mask != MaskKind::Dense {
        // Rows that see nothing; more keys than queries.
        all.push(call([rows + 20, block + 3], [2, 1]));
        all.push(call([rows / 2 + 1, 5 * block], [2, 1]));
        // A whole tile that sees nothing; the rows' edges at the edges of blocks, for the first tile of
        // a block of threads and for later ones.
        all.push(call([2 * rows + 20, block + 3], [2, 1]));
        all.push(call([2 * rows + 20, block + 3], [2, 1]).on(8));
        for (further, processors) in
            [(0, 1), (0, 8), (1, 1), (1, 8), (block - 2, 1), (block - 2, 8)]
        {
            all.push(call([2 * rows, 2 * rows + further], [2, 1]).on(processors));
        }
        all.extend(
            [Weights::Valley, Weights::Peaks]
                .map(|weights| Call { weights, ..call([2 * rows, 2 * rows], [2, 1]) }),
        );
        if it.rules.mask == MaskKind::Local {
            // Windows within a block, and at the edges of blocks.
            let window = |left, right| Mask::window(Some(left), Some(right));
            for mask in [window(5, 2), window(block - 1, 0), window(block, 1), window(1, block)] {
                all.push(call([rows + 9, 4 * block], [3, 1]).with(|it| it.with_mask(mask)));
                for processors in [1, 8] {
                    let even = call([2 * rows, 2 * rows], [2, 1]).on(processors);
                    all.push(even.with(|it| it.with_mask(mask)));
                }
            }
        }
    } else {
        // The last keys weigh more than others. By a list, the last queries see them.
        let (listed, few) = (it.takes_block_lists(), rows / 2);
        let shape = |keys| if listed { ([keys, keys], [9, 1]) } else { ([few, keys], [3, 1]) };
        all.extend(ends(block).map(|keys| {
            let (lengths, heads) = shape(keys);
            Call { weights: Weights::Valley, ..call(lengths, heads) }
        }));
    }
    all
}

/// Which keys are heavy by turns: those of lanes, of a lane's columns, of blocks.
fn turns(block: usize) -> impl Iterator<Item = usize> {
    [1, 2, 4, 8, 16].into_iter().filter(move |of| *of < block).chain([block])
}

/// Keys that end at each of the columns that a lane has of a block.
fn ends(block: usize) -> impl Iterator<Item = usize> {
    (block..2 * block).filter(|keys| keys % 8 < 2)
}

fn prefill(it: &Prefill) -> Vec<Call> {
    let kernel = Configuration::Prefill(*it);
    let (rows, block) = (it.tile.query_rows() as usize, it.tile.key_block as usize);
    let place = it.page_rows.map_or(Place::Apart, |it| Place::Paged(2 * it as usize));
    let call = |queries: Vec<usize>, keys: Vec<usize>, heads| {
        Call::ragged(kernel, Ragged::new(queries, keys).over(place), heads)
    };
    let open = |call: Call| call.with(|it| it.with_mask(Mask::NONE));
    let window = Mask::window(Some(2 * block + 3), Some(3));
    let mut all = vec![
        // More tiles of one block of keys than there are blocks of threads.
        open(call(vec![1, 5, rows, 3, 9, 7, 2], vec![block, 3, 1, block - 1, 9, 2, block], [2, 1])),
        // Of two and of several blocks; windows; several heads of keys.
        open(call(vec![rows + 3, 2, 1], vec![2 * block, 4 * block + 1, 3 * block], [2, 2])),
        call(vec![rows + 3, 2, 0, 7], vec![4 * block + 5, block, 7, 0], [4, 2])
            .with(|it| it.with_mask(window)),
        // A window within a block.
        call(vec![rows + 9, 3 * rows, 1], vec![4 * block + 5, 3 * rows, block], [1, 1])
            .with(|it| it.with_mask(Mask::window(Some(5), Some(2)))),
        // One that is behind the first block, for the first tile and for a later one.
        call(vec![1, 2], vec![4 * block + 9, 3 * block + 12], [1, 1])
            .with(|it| it.with_mask(Mask::window(Some(5), Some(2)))),
        call(vec![1, 2, 1], vec![4 * block + 9, 3 * block + 12, 2 * block + 20], [1, 1])
            .with(|it| it.with_mask(Mask::window(Some(5), Some(2))))
            .on(1),
        // Blocks of threads with nothing to do.
        call(vec![3, 1], vec![block + 1, 2], [1, 1]).on(5),
        call(vec![2 * rows + 1, 0, 0], vec![block, 7, 2 * block], [1, 1]).on(5),
        Call {
            weights: Weights::Valley,
            ..open(call(vec![rows, 1], vec![4 * block, 5 * block], [1, 1]))
        },
        Call {
            weights: Weights::Spikes,
            ..open(call(vec![rows, 1], vec![3 * block, block + 1], [1, 1]))
        },
        Call {
            weights: Weights::Peaks,
            ..open(call(vec![rows, 1], vec![7 * block, 3 * block + 1], [1, 1]))
        },
        Call { weights: Weights::Peaks, ..call(vec![2 * rows], vec![2 * rows], [2, 1]) },
        Call { hostile: true, ..call(vec![rows, 0, 1], vec![block, 0, 2 * block], [1, 1]) },
    ];
    for of in turns(block) {
        let call = open(call(vec![rows, 1], vec![3 * block, block + 1], [1, 1]));
        all.push(Call { weights: Weights::Turns(of), ..call });
    }
    // The rows' edges at the edges of blocks; a tile that sees nothing.
    for [left, right] in [[block - 1, 0], [block, 1], [1, block], [5, 0], [3, block - 2]] {
        let even =
            call(vec![2 * rows, 2 * rows, 2 * rows + 9], vec![2 * rows, 2 * rows + 1, 5], [1, 1]);
        let even = even.with(|it| it.with_mask(Mask::window(Some(left), Some(right))));
        // For the first tile of a block of threads and for later ones.
        all.extend([even.clone().on(8), even]);
    }
    // Few keys for each row: the last rows of a tile that is not full, and the first rows of others,
    // end with a block of keys or just before.
    for left in [1, 5] {
        let keys = vec![2 * block, 2 * rows + block - 2, 2 * rows + block - 1];
        let narrow = call(vec![rows - 8, 2 * rows, 2 * rows], keys, [1, 1]);
        let narrow = narrow.with(|it| it.with_mask(Mask::window(Some(left), Some(0))));
        all.extend([narrow.clone().on(8), narrow]);
    }
    if it.tile.rules.mask == MaskKind::Dense {
        all.retain(|call| call.problem.mask == Mask::NONE);
    }
    if let Some(page_rows) = it.page_rows.map(|it| it as usize) {
        // Pages that end within a block of keys, and a table that ends there.
        for page in [page_rows, 3 * page_rows] {
            let call = |queries: Vec<usize>, keys: Vec<usize>| {
                let ragged = Ragged::new(queries, keys).over(Place::Paged(page));
                Call::ragged(kernel, ragged, [2, 1])
            };
            all.push(call(vec![3, rows + 1], vec![page, 3 * page - 5]));
            all.push(call(vec![1, 2, 1], vec![3, 1, page - 1]).on(1));
        }
        // Every page is the first or the last, and the table says that it is one beyond.
        let shared = Ragged::new(vec![rows + 1, 2, 3, 1], vec![5 * block, 3 * block, 2 * block, 9]);
        let shared = shared.over(Place::Shared(page_rows));
        for processors in [1, 8] {
            let call = Call::ragged(kernel, shared.clone(), [2, 1]).on(processors);
            all.push(Call { hostile: true, ..call });
        }
    } else {
        // Equal lengths, of which no list tells.
        all.push(Call::new(kernel, 2, [rows / 2 + 1, block + 3], [2, 1]));
        // Keys behind positions of nobody, in entries.
        let padding = vec![3, block, 1];
        let ragged = Ragged::new(vec![rows + 1, 2, 3], vec![2 * block, 5, block]);
        let behind = Ragged { padding, ..ragged.over(Place::Entries) };
        all.push(Call::ragged(kernel, behind, [2, 1]));
    }
    all
}

fn mma(it: &Mma) -> Vec<Call> {
    let kernel = Configuration::Mma(*it);
    let (rows, block) = (it.query_rows() as usize, it.key_block as usize);
    if it.batch != Batch::Equal {
        let place = match it.batch {
            Batch::Paged => Place::Paged(block / 2 - 1),
            _ => Place::Apart,
        };
        let call = |queries: Vec<usize>, keys: Vec<usize>| {
            Call::ragged(kernel, Ragged::new(queries, keys).over(place), [4, 2])
        };
        let mut all = vec![
            call(vec![rows, 1, 5, 0], vec![block, 3 * block, 1, 7]),
            Call { hostile: true, ..call(vec![rows, 0, 3], vec![block, 0, 2 * block]) },
            Call { hostile: true, ..call(vec![0, 2, 0], vec![0, block + 1, 3]) },
            Call { weights: Weights::Spikes, ..call(vec![rows, 3], vec![3 * block, 2 * block]) },
            call(vec![2 * rows + 3], vec![6 * block + 5]),
            call(vec![2 * rows, 3 * rows], vec![2 * rows, 2 * rows + 1]),
            call(vec![2 * rows, 1], vec![4 * rows, rows])
                .with(|it| it.with_mask(Mask::window(Some(block), Some(1)))),
            Call { weights: Weights::Peaks, ..call(vec![rows, 3], vec![7 * block, 2 * block]) },
            Call {
                weights: Weights::Valley,
                ..call(vec![rows + 1, 2], vec![4 * block + 1, 2 * block])
            },
        ];
        // Queries that end in every pass of copies; windows within a block, and at the edges of blocks.
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
        call([rows, (it.ahead as usize + 2) * block - 1], [1, 1]),
    ];
    // Sums in f16 are not good enough for such scores.
    if it.accumulate == ptx::Element::F32 {
        all.push(Call { weights: Weights::Spikes, ..call([rows - 1, 3 * block], [1, 1]) });
        all.push(Call { weights: Weights::Valley, ..call([rows - 1, 5 * block], [1, 1]) });
        all.push(Call { weights: Weights::Peaks, ..call([rows - 1, 7 * block], [1, 1]) });
    }
    if it.takes_block_lists() {
        // Lists of none, of one and of more, of heads and sequences.
        all.push(Call::new(kernel, 2, [5 * rows + 1, 3 * rows + 5], [3, 1]));
        all.push(call([2 * rows - 1, 5 * rows], [2, 2]));
        // The edges of wide windows weigh most, in as many blocks as it takes until all that is found of a
        // query's block differs.
        let edges = call([12 * rows - 3, 12 * rows - 3], [2, 1]);
        all.push(Call { weights: Weights::Apart(rows + 2), ..edges });
    }
    if it.rules.mask != MaskKind::Dense {
        all.push(call([rows + 20, block / 2], [2, 1]));
        all.push(call([2 * rows + 20, block + 3], [2, 1]));
        for weights in [Weights::Even, Weights::Valley, Weights::Peaks] {
            all.extend([0, 1, block - 2].map(|further| {
                let call = call([3 * rows, 3 * rows + further], [1, 1]);
                Call { weights, ..call }
            }));
        }
    } else {
        all.push(call([3, 0], [1, 1]));
        // By a list, the last queries see the last keys.
        let (listed, few) = (it.takes_block_lists(), rows / 2);
        let shape = |keys| if listed { ([keys, keys], [9, 1]) } else { ([few, keys], [1, 1]) };
        all.extend(ends(block).map(|keys| {
            let (lengths, heads) = shape(keys);
            Call { weights: Weights::Valley, ..call(lengths, heads) }
        }));
    }
    all
}

fn decode(it: &Decode) -> Vec<Call> {
    let kernel = Configuration::Decode(*it);
    let tile = it.tile_keys as usize;
    let round = tile * it.warps as usize;
    let place = if it.paged { Place::Paged(tile - 3) } else { Place::Entries };
    let call = |queries: Vec<usize>, keys: Vec<usize>, heads| {
        Call::ragged(kernel, Ragged::new(queries, keys).over(place), heads)
    };
    let group = it.rows as usize;
    let behind = Ragged {
        padding: vec![7, 0, tile, 1],
        ..Ragged::new(vec![1; 4], vec![2 * round + 3, 0, tile, 5]).over(place)
    };
    let mut many: Vec<usize> = (0..37).map(|index| index * 7 % 23).collect();
    many[35] = 3 * round + 3;
    let stages = it.stages as usize * round;
    let listed = |query_place, key_place| {
        let ragged = Ragged::new(vec![2, 0, 1, 3], vec![round + 3, 0, tile, 2 * round]);
        let padding = vec![0, 0, 3, 0];
        let ragged = Ragged { query_place, padding, ..ragged.over(key_place) };
        Call { hostile: true, ..Call::ragged(kernel, ragged, [2, 1]).on(2) }
    };
    // A first sequence of nothing, so that lists hold a 0, or less, where others begin.
    let late = |query_place, key_place| {
        let ragged = Ragged::new(vec![0, 2, 1], vec![0, round + 3, tile]);
        let ragged = Ragged { query_place, padding: vec![0, 2, 0], ..ragged.over(key_place) };
        Call { hostile: true, ..Call::ragged(kernel, ragged, [2, 1]).on(2) }
    };
    let mut all = vec![
        listed(Place::Packed, place),
        late(Place::Packed, place),
        // More blocks of threads than there is work, and fewer.
        call(vec![1, 1], vec![3, tile], [1, 1]).on(9),
        call(vec![1; 3], vec![stages, 2 * stages + 1, stages - tile], [2, 1]).on(1),
        // A window, several queries, more rows than a block has.
        call(vec![3, 1, 2], vec![3 * round + 5, 2, round], [group, 2])
            .on(5)
            .with(|it| it.with_mask(Mask::window(Some(2 * round + 3), Some(1)))),
        Call::ragged(kernel, behind, [3, 1]).on(3),
        // Parts of many teams.
        call(vec![1, 1], vec![20 * round + 5, 7], [3, 1]).on(9),
        call(vec![1, 2], vec![3, 40 * round + 5], [2, 1]).on(19),
        // More of them than a warp has lanes; rows whose slopes differ, so that each part weighs in one.
        call(vec![1], vec![35 * round + 5], [group, 1]).on(40),
        call(vec![1], vec![17 * round + 5], [group, 1]).on(40),
        // Parts of as many tiles as are worth it, which the longest of the sequences decides.
        call(vec![1; 3], vec![3, 2 * round, 5], [1, 1]).on(9),
        // A few keys, all of them far below zero for some rows.
        Call { weights: Weights::Heavy, ..call(vec![1; 5], vec![1, 2, 1, 3, 1], [6, 2]) },
        // More sequences than a warp has lanes.
        call(vec![1; 37], many, [2, 1]).on(4),
        Call {
            weights: Weights::Valley,
            ..call(vec![1, 1], vec![6 * round, 3 * round + 1], [2, 1]).on(3)
        },
        Call {
            weights: Weights::Spikes,
            ..call(vec![2, 1], vec![3 * round, round + 1], [2, 1]).on(3)
        },
        Call {
            weights: Weights::Peaks,
            ..call(vec![2, 1], vec![7 * round, round + 1], [2, 1]).on(3)
        },
    ];
    // Rows of every part of a tile, whose parts are far apart: of tiles, of warps and of teams.
    for (weights, keys, teams) in [
        (Weights::Valley, 7 * round, 1),
        (Weights::Spikes, 3 * round, 2),
        (Weights::Peaks, 7 * round, 3),
        (Weights::Peaks, 17 * round, 40),
        (Weights::Turns(1), 2 * round, 1),
        (Weights::Turns(2), 2 * round, 1),
        (Weights::Turns(4), 2 * round, 1),
        (Weights::Turns(8), 2 * round, 1),
        (Weights::Turns(tile), 3 * round, 1),
        (Weights::Turns(round), 5 * round, 1),
        (Weights::Turns(round), 17 * round, 40),
    ] {
        let call = call(vec![1, 2], vec![keys + 5, round + 1], [group, 1]).on(teams);
        all.push(Call { weights, ..call });
    }
    // Parts of which any may have the key that weighs.
    for weights in [Weights::Heavy, Weights::Turns(2 * round), Weights::Turns(4 * round)] {
        let call = call(vec![1; 2], vec![17 * round + 5, 16 * round], [group, 1]).on(40);
        all.push(Call { weights, ..call });
    }
    // Several queries in every part of a tile, whose windows begin and end at all its columns; a
    // window that begins in a later tile of a sequence that a team comes to from another.
    let window = Mask::window(Some(round + 3), Some(0));
    all.push(
        call(vec![4, 4, 4], vec![2 * round + 4, 2 * round + 12, 2 * round + 3], [group / 4, 1])
            .on(3)
            .with(|it| it.with_mask(window)),
    );
    all.push(
        call(vec![1, 1, 2], vec![3 * round, 5 * round + 3, 4 * round + 7], [2, 1])
            .on(1)
            .with(|it| it.with_mask(window)),
    );
    // Paddings below zero where one key more would be one tile more.
    let ragged = Ragged::new(vec![1, 2, 1], vec![2 * round, tile, round + 3]).over(place);
    let ragged = Ragged { padding: vec![0, 0, 3], ..ragged };
    all.push(Call { hostile: true, ..Call::ragged(kernel, ragged, [2, 1]).on(3) });
    // Keys behind a window, in each of the rounds that clear them.
    for left in [2, 5, 6, 11, 14] {
        let behind = call(vec![1, 2], vec![3 * round + 5, round + left], [2, 1]).on(3);
        let window = Mask::window(Some(round + left), Some(0));
        all.push(Call { unseen: true, ..behind.with(|it| it.with_mask(window)) });
    }
    // Queries with something between them.
    all.push(listed(Place::Apart, place));
    all.push(late(Place::Apart, place));
    // A narrow window, so that the number of queries decides which tiles there are.
    for call in [listed(Place::Apart, place), listed(Place::Packed, place)] {
        all.push(call.with(|it| it.with_mask(Mask::window(Some(1), Some(0)))));
    }
    if it.paged {
        // Every page is the first or the last, and the table says that it is one beyond.
        let shared = Ragged::new(vec![1, 2, 1], vec![stages + round, 2 * stages + 5, 3 * round]);
        for processors in [1, 5] {
            let shared = shared.over(Place::Shared(tile - 3));
            let call = Call::ragged(kernel, shared, [2, 1]).on(processors);
            all.push(Call { hostile: true, ..call });
        }
    } else {
        // Packed keys; equal lengths, of which no list tells.
        all.push(listed(Place::Padded, Place::Packed));
        all.push(late(Place::Packed, Place::Packed));
        // The same with a query, which sees no key.
        let none = Ragged::new(vec![1, 2, 1], vec![0, round + 3, tile]).over(Place::Packed);
        all.push(Call { hostile: true, ..Call::ragged(kernel, none, [2, 1]) });
        // Behind the last key of the last sequence there is no memory.
        all.push(call(vec![1, 1], vec![3, round + 3], [1, 1]));
        // A last sequence without keys, and ones that a team comes to from another.
        let none = Ragged::new(vec![1, 1], vec![3, 0]).over(Place::Padded);
        all.push(Call { hostile: true, ..Call::ragged(kernel, none, [1, 1]) });
        for (end, keys) in [(0, 3), (0, 6), (0, 9), (0, 14), (round, 6), (round, 14)] {
            let next = Ragged::new(vec![1, 2], vec![3 * round, end + keys]).over(Place::Packed);
            all.push(Call::ragged(kernel, next, [1, 1]).on(1));
        }
        for end in [0, tile, round, 2 * round, 3 * round + tile, 4 * round] {
            for keys in [3, 6, 9, 14] {
                let last = Ragged::new(vec![1, 2], vec![3, end + keys]).over(Place::Padded);
                all.push(Call::ragged(kernel, last, [1, 1]));
            }
        }
        all.push(Call::new(kernel, 2, [2, 2 * round + 5], [4, 2]).on(3));
    }
    if it.splits != Splits::Shares {
        all.extend(fixed_splits(it, place));
    }
    all
}

/// Splits of a group, and groups that are loaded at a time.
const GROUP: usize = 16;

/// Groups and sequences that one team has, that several have, and that a team comes to from another.
fn fixed_splits(it: &Decode, place: Place) -> Vec<Call> {
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
    // Groups of every number of splits, each split of another team, the last of them ragged.
    for (few, many) in [(2, 11), (12, GROUP)] {
        let keys: Vec<usize> = (few..=many).map(|splits| splits * split - splits % 7 * 4).collect();
        let teams = (few..=many).sum::<usize>() as u32;
        all.push(call(vec![1; keys.len()], keys, [it.rows as usize, 1]).on(teams));
    }
    if it.running_parts() == 0 {
        // Sequences of every number of groups, each of several teams: in registers each of them is
        // folded by statements of its own.
        let keys = (2..=GROUP).map(|groups| groups * group - groups % 5 * split);
        let keys: Vec<usize> = keys.collect();
        all.push(call(vec![1; keys.len()], keys, [it.rows as usize, 1]).on(61));
    }
    // Sequences of several groups: of one team; of teams that have whole groups, and parts of them.
    for teams in [1, 2, 3, 5] {
        let heads = it.rows as usize;
        all.push(call(vec![1, 2, 1], vec![split, long, group + 1], [heads, 1]).on(teams));
    }
    // Blocks of a team with other heads, other queries and none.
    let several = |left| {
        let keys = vec![group + 2, long, 2 * split + 5];
        window(call(vec![5, 1, 2], keys, [8, 2]), left)
    };
    all.push(several(long).on(6));
    all.push(several(long).on(30));
    all.push(several(3 * split + 1).on(30));
    // Windows that begin within a split of a later group.
    for teams in [1, 3, 21] {
        all.push(window(call(vec![2, 1], vec![long, group], [2, 1]).on(teams), 20 * split + 5));
    }
    // Parts whose maxima are far apart, whoever folds them.
    for (weights, teams) in [
        (Weights::Spikes, 1),
        (Weights::Spikes, 2),
        (Weights::Spikes, 40),
        (Weights::Peaks, 1),
        (Weights::Peaks, 2),
        (Weights::Valley, 3),
        (Weights::Turns(split), 1),
        (Weights::Turns(split), 40),
        (Weights::Turns(group), 1),
        (Weights::Turns(group), 2),
        (Weights::First(split), 1),
        (Weights::First(split), 40),
        (Weights::First(group), 1),
        (Weights::First(group), 2),
    ] {
        let heads = it.rows as usize;
        all.push(Call { weights, ..call(vec![1, 1], vec![long, split], [heads, 1]).on(teams) });
    }
    // More groups than are loaded at a time.
    for (weights, heads) in [(Weights::Even, 1), (Weights::First(group), it.rows as usize)] {
        let many = call(vec![1], vec![GROUP * group + 3], [heads, 1]).on(20);
        all.push(Call { weights, ..many });
    }
    all
}

fn append(it: &Append) -> Result<Vec<Scene>, SceneError> {
    let unordered = AppendSize { in_order: false, ..AppendSize::small() };
    let hostile = AppendSize {
        lengths: vec![0, 5, 9, 6],
        hostile: true,
        in_place: false,
        ..AppendSize::small()
    };
    // A first sequence of nothing: others begin at 0 too.
    let late = AppendSize {
        lengths: vec![3, 0, 5, 9],
        new: vec![0, 4, 0, 2],
        queries: vec![0, 3, 0, 1],
        ..hostile.clone()
    };
    let unlisted =
        AppendSize { new: vec![3; 4], queries: vec![2; 4], listed: false, ..AppendSize::small() };
    let long = AppendSize {
        lengths: vec![0, 5, 9, 7, 31, 2],
        new: vec![40, 1, 0, 4, 3, 17],
        key_heads: 2,
        page_size: 3,
        capacity: 33,
        heads: 4,
        queries: vec![7, 3, 0, 2, 5, 33],
        in_place: false,
        ..AppendSize::small()
    };
    let used = AppendSize { listed: false, hostile: true, ..AppendSize::small() };
    // As many sequences as tokens, one head: numbers that are divided by 1.
    let single = AppendSize {
        lengths: vec![3, 0],
        new: vec![1, 1],
        queries: vec![1, 1],
        key_heads: 1,
        heads: 1,
        page_size: 1,
        listed: false,
        ..AppendSize::small()
    };
    let begun = AppendSize { hostile: false, ..late.clone() };
    [unordered, hostile, late, begun, unlisted, used, single, long]
        .iter()
        .map(|size| Scene::append(*it, size))
        .collect()
}

/// Tiles are in one order only where no two cost the same: lengths beyond 1024 count in steps.
fn sequencer(it: &Sequencer) -> Result<Vec<Scene>, SceneError> {
    let batch = Scene::sequencer_batch();
    let of = |queries: Vec<usize>, keys: Vec<usize>| Ragged { queries, keys, ..batch.clone() };
    // The one long sequence in each of the lanes and warps that tell each other the longest length.
    let one_in = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].map(|last| {
        let only = |length: usize| [vec![0; last], vec![length]].concat();
        (only(1), only(1100))
    });
    // Starts and lengths of both, with something between sequences or nothing, and a first one of none.
    let lists = |place, queries: Vec<usize>, keys: Vec<usize>| Ragged {
        query_place: place,
        padding: vec![0, 2, 0, 1],
        ..Ragged::new(queries, keys).over(place)
    };
    let apart = [Place::Apart, Place::Packed, Place::Padded].into_iter().flat_map(|place| {
        let first = lists(place, vec![0, 5, 0, 70], vec![0, 9, 0, 200]);
        [first, lists(place, vec![3, 0, 66, 9], vec![140, 0, 70, 7])]
    });
    // The largest cost there is, and one for each of the lanes and warps that sums come from.
    let far = [1023usize, 991, 959, 895, 767, 511, 1022, 1021, 1019, 1015, 1007];
    if it.tiles == Tiles::Keys {
        // The same of sequences: of those with keys, no two have as many queries.
        let few =
            |every: usize| move |index: usize| if index.is_multiple_of(every) { 300 } else { 0 };
        let mut all = vec![
            of(vec![1], vec![1]),
            of(vec![0, 2], vec![7, 0]),
            of(vec![5, 9, 7], vec![700, 128, 4500]),
            of(vec![600, 601], vec![1, 1]),
            of((0..45).collect(), (0..45).map(|index| index * 7 % 300).collect()),
            of((0..1100).map(|it| 1 + it / 128).collect(), (0..1100).map(few(128)).collect()),
            of(vec![1500, 3100, 1100, 2700], vec![9, 300, 130, 1]),
        ];
        all.extend(one_in.map(|(keys, queries)| of(queries, keys)));
        all.extend(apart);
        all.push(of(far.into(), vec![130, 1, 300, 9, 200, 7, 130, 3, 129, 5, 2]));
        all.push(of(vec![3, 0, 66], vec![140, 0, 70]).over(Place::Entries));
        return all.iter().map(|ragged| Scene::sequencer(*it, ragged, 128)).collect();
    }
    let long = of(vec![1, 9, 64, 3, 40, 2, 17], vec![1500, 3100, 1100, 2700, 2000, 600, 2400]);
    // More sequences than one round takes, of which few have queries; the first key is not at 0.
    let many = of(
        (0..1100usize).map(|index| index.is_multiple_of(128).into()).collect(),
        (0..1100).map(|index| 3 + index / 128 * 5).collect(),
    );
    let padding = (0..1100).map(|index| if index == 0 { 2 } else { 0 }).collect();
    let many = Ragged { padding, ..many };
    let none = of(vec![0, 0], vec![7, 0]);
    let one = of(vec![1], vec![1]);
    // More than a warp has lanes, of as many lengths, and of none where they begin.
    let mixed = Ragged {
        queries: (0..45).map(|index| index % 4).collect(),
        keys: (0..45).map(|index| index * 7 % 47 + 1).collect(),
        query_place: Place::Padded,
        padding: (0..45).map(|index| index % 3).collect(),
        ..batch.clone()
    };
    let entries = batch.over(Place::Entries);
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
        // More tiles than a warp has lanes; in chunks some would cost the same.
        all.push((of(vec![2200], vec![2200]), 64));
    }
    all.iter().map(|(ragged, rows)| Scene::sequencer(*it, ragged, *rows)).collect()
}
