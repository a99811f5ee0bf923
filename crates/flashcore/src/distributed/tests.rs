//! For any number of ranks, lengths and mask: every pair is computed once, what is sent is
//! received, and the numbers in the documentation are right.

use std::collections::HashMap;
use std::ops::Range;

use proptest::prelude::*;

use super::*;

const HEADS: Heads = Heads { query: 32, key: 8, dim: 128, value_dim: 128, element_bytes: 2 };

fn distribution(
    ranks: usize,
    lengths: &[usize],
    mask: Mask,
    variant: Variant,
    order: Order,
) -> Distribution {
    let sequences = Sequences::Ragged(lengths.to_vec());
    Distribution::new(ranks, sequences, mask, variant, order, HEADS).unwrap()
}

/// Returns the sequence and row of each row of a tensor.
fn rows(pieces: impl IntoIterator<Item = Piece>) -> Vec<(usize, usize)> {
    let rows = |piece: Piece| piece.rows.map(move |row| (piece.sequence, row));
    pieces.into_iter().flat_map(rows).collect()
}

fn take<T: Copy>(rows: &[T], ranges: &[Range<usize>]) -> Vec<T> {
    ranges.iter().flat_map(|range| &rows[range.clone()]).copied().collect()
}

/// Counts how often each query meets each key, with the keys of each step as tensors would hold
/// them.
fn meetings(of: &Distribution, rank: usize) -> HashMap<(usize, usize, usize), usize> {
    let (_, member) = of.place(rank);
    let queries = rows(of.held(member));
    let mut met = HashMap::new();
    for (index, step) in of.steps(rank).iter().enumerate() {
        let keys = match of.variant {
            Variant::AllGather => rows(of.gathered(rank).into_iter().map(|it| it.piece)),
            _ if index == 0 => queries.clone(),
            _ => {
                let [from] = &step.receive[..] else {
                    assert!(step.receive.is_empty() && step.launches.is_empty());
                    continue;
                };
                take(&rows(of.held(of.place(from.rank).1)), &from.rows)
            }
        };
        let mut fresh = vec![true; queries.len()];
        for launch in &step.launches {
            for block in &launch.blocks {
                for (at, query) in block.queries.clone().enumerate() {
                    fresh[query] = false;
                    let (lengths, mask) = ((block.queries.len(), block.keys.len()), launch.mask);
                    for key in mask.visible_keys(at, lengths.0, lengths.1) {
                        let ((sequence, row), key) = (queries[query], keys[block.keys.start + key]);
                        assert_eq!((sequence, sequence), (key.0, block.sequence));
                        *met.entry((sequence, row, key.1)).or_default() += 1;
                    }
                }
            }
        }
        assert!(index > 0 || fresh.iter().all(|fresh| !fresh), "the first step leaves rows out");
    }
    met
}

fn check(of: &Distribution) {
    let lengths = of.sequences.lengths();
    // Every row has one owner.
    let mut owned = rows((0..of.ranks).flat_map(|rank| of.pieces(rank)));
    owned.sort_unstable();
    let all: Vec<(usize, usize)> =
        (0..lengths.len()).flat_map(|it| (0..lengths[it]).map(move |row| (it, row))).collect();
    assert_eq!(owned, all);
    for node in 0..of.nodes {
        // The members of a node together hold the rows of all ranks.
        let mut met: HashMap<_, usize> = HashMap::new();
        for member in 0..of.members() {
            let together = (0..of.nodes).flat_map(|node| of.pieces(of.rank_at(node, member)));
            let (mut together, mut held) = (rows(together), rows(of.held(member)));
            assert!(held.is_sorted());
            let of_node = |node| rows(of.pieces(of.rank_at(node, member)));
            let taken =
                of.exchanged(member).into_iter().map(|(node, rows)| of_node(node)[rows].to_vec());
            assert_eq!(taken.collect::<Vec<_>>().concat(), held);
            together.sort_unstable();
            held.sort_unstable();
            assert_eq!(together, held);
            for (pair, times) in meetings(of, of.rank_at(node, member)) {
                *met.entry(pair).or_default() += times;
            }
        }
        let mut expected = HashMap::new();
        for (sequence, length) in lengths.iter().enumerate() {
            for query in 0..*length {
                for key in of.mask.visible_keys(query, *length, *length) {
                    expected.insert((sequence, query, key), 1);
                }
            }
        }
        assert_eq!(met, expected);
    }
    if of.variant == Variant::AllGather {
        for rank in 0..of.ranks {
            received_rows_are_those_of_their_places(of, rank);
        }
    }
    // What one rank sends, the other receives in the same step.
    let all: Vec<Vec<Step>> = (0..of.ranks).map(|rank| of.steps(rank)).collect();
    let mut sent: Vec<_> = Vec::new();
    let mut received: Vec<_> = Vec::new();
    for (rank, steps) in all.iter().enumerate() {
        assert_eq!(steps.len(), all[0].len());
        for (at, step) in steps.iter().enumerate() {
            sent.extend(step.send.iter().map(|to| (at, rank, to.rank, to.rows.clone())));
            received.extend(step.receive.iter().map(|it| (at, it.rank, rank, it.rows.clone())));
        }
    }
    sent.sort_by_key(|it| (it.0, it.1, it.2));
    received.sort_by_key(|it| (it.0, it.1, it.2));
    assert_eq!(sent, received);
}

fn received_rows_are_those_of_their_places(of: &Distribution, rank: usize) {
    let [step] = &of.steps(rank)[..] else { panic!("an all-gather has one step") };
    for gathered in of.gathered(rank) {
        let mut theirs = rows(of.pieces(gathered.rank));
        if let Some(received) = step.receive.iter().find(|it| it.rank == gathered.rank) {
            theirs = take(&theirs, &received.rows);
        }
        assert_eq!(theirs[gathered.rows], rows([gathered.piece]));
    }
}

fn variants(ranks: usize) -> impl Strategy<Value = Variant> {
    let nodes: Vec<usize> = (1..=ranks).filter(|nodes| ranks.is_multiple_of(*nodes)).collect();
    prop_oneof![
        Just(Variant::Ring),
        Just(Variant::AllGather),
        Just(Variant::AllToAll),
        prop::sample::select(nodes).prop_map(|nodes| Variant::Hybrid { nodes }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn every_pair_is_computed_once(
        (ranks, variant) in (1usize..9).prop_flat_map(|ranks| (Just(ranks), variants(ranks))),
        lengths in prop::collection::vec(0usize..40, 1..4),
        left in prop::option::of(0usize..50),
        right in prop::option::of(0usize..50),
        causal in any::<bool>(),
        zigzag in any::<bool>(),
    ) {
        let mask = Mask::window(left, if causal { Some(0) } else { right });
        let order = if zigzag { Order::ZigZag } else { Order::Contiguous };
        check(&distribution(ranks, &lengths, mask, variant, order));
    }

    #[test]
    fn heads_are_shared_out(nodes in 1usize..9, key in 1usize..7, group in 1usize..7) {
        let heads = Heads { query: key * group, key, ..HEADS };
        let made = Distribution::new(
            nodes, Sequences::Ragged(vec![3]), Mask::NONE, Variant::AllToAll, Order::ZigZag, heads,
        );
        let Ok(of) = made else {
            prop_assert!(heads.query < nodes);
            return Ok(());
        };
        let mut next = 0;
        for node in 0..nodes {
            let share = of.head_share(node);
            prop_assert_eq!(share.query.start, next);
            next = share.query.end;
            prop_assert!(!share.query.is_empty());
            // Query heads of a node read the same key heads as in the whole.
            prop_assert_eq!(share.query.len() % share.key.len(), 0);
            let own = share.query.len() / share.key.len();
            for (index, head) in share.query.enumerate() {
                prop_assert_eq!(share.key[index / own], head / group);
            }
        }
        prop_assert_eq!(next, heads.query);
    }

    #[test]
    fn a_position_of_a_cache_has_one_owner(ranks in 1usize..6, block in 1usize..6, length in 0usize..80) {
        let cache = SpreadCache::new(ranks, block).unwrap();
        let mut rows = vec![0; ranks];
        for position in 0..length {
            let (rank, row) = cache.owner(position);
            prop_assert_eq!(row, rows[rank], "rows of a rank are in the order of positions");
            rows[rank] += 1;
        }
        for (rank, rows) in rows.into_iter().enumerate() {
            prop_assert_eq!(cache.rows(rank, length), rows);
        }
    }
}

fn long(ranks: usize, mask: Mask, variant: Variant, order: Order) -> Distribution {
    let sequences = Sequences::Batch { count: 1, length: 65536 };
    Distribution::new(ranks, sequences, mask, variant, order, HEADS).unwrap()
}

#[test]
fn the_ranks_of_a_causal_ring_have_as_much_to_do() {
    for variant in [Variant::Ring, Variant::AllGather, Variant::Hybrid { nodes: 2 }] {
        let of = long(8, Mask::CAUSAL, variant, Order::ZigZag);
        let tiles: Vec<u64> = (0..8).map(|rank| of.tiles(rank, [128, 128])).collect();
        let (least, most) = (tiles.iter().min().unwrap(), tiles.iter().max().unwrap());
        assert!(*most as f64 <= 1.03 * *least as f64, "{variant:?}: {tiles:?}");
        // As many as one rank would compute: 512 by 512 tiles of 32 heads, on and below the
        // diagonal.
        assert_eq!(tiles.iter().sum::<u64>(), 32 * 512 * 513 / 2);
    }
    let unbalanced = long(8, Mask::CAUSAL, Variant::Ring, Order::Contiguous);
    assert!(unbalanced.tiles(7, [128, 128]) > 10 * unbalanced.tiles(0, [128, 128]));
}

/// One launch per step: own keys under the causal mask, then halves without a mask.
#[test]
fn a_causal_ring_takes_one_launch_a_step() {
    let of = long(8, Mask::CAUSAL, Variant::Ring, Order::ZigZag);
    for rank in 0..8 {
        let steps = of.steps(rank);
        assert_eq!(steps.len(), 8);
        for (index, step) in steps.iter().enumerate() {
            let [launch] = &step.launches[..] else { panic!("{step:?}") };
            assert_eq!(launch.mask, if index == 0 { Mask::CAUSAL } else { Mask::NONE });
        }
    }
    let dense = long(8, Mask::NONE, Variant::Ring, Order::ZigZag);
    assert!(dense.steps(3).iter().all(|step| step.launches.len() == 1));
}

/// The formulae of docs/distributed.md, to within 2 %.
#[test]
fn bytes_are_those_of_the_documentation() {
    let (n, h, h_kv, d, e) = (65536.0, 32.0, 8.0, 128.0, 2.0);
    let near = |found: f64, expected: f64, what: &str| {
        assert!(
            (found - expected).abs() <= 0.02 * expected,
            "{what}: {found}, expected {expected}"
        );
    };
    let mean = |of: &Distribution, pass: fn(Volume) -> u64| {
        (0..of.ranks).map(|rank| pass(of.sent(rank)) as f64).sum::<f64>() / of.ranks as f64
    };
    for ranks in [2usize, 3, 4, 8] {
        let r = ranks as f64;
        let keys = (r - 1.0) / r * n * h_kv * 2.0 * d * e;
        for (mask, variant, share) in [
            (Mask::NONE, Variant::Ring, 1.0),
            (Mask::CAUSAL, Variant::Ring, 0.75),
            (Mask::CAUSAL, Variant::AllGather, 1.0),
        ] {
            let of = long(ranks, mask, variant, Order::ZigZag);
            near(mean(&of, |volume| volume.forward), share * keys, "forward");
            near(mean(&of, |volume| volume.backward), 2.0 * share * keys, "backward");
        }
    }
    for ranks in [2usize, 4, 8] {
        let r = ranks as f64;
        let of = long(ranks, Mask::CAUSAL, Variant::AllToAll, Order::ZigZag);
        let heads = (r - 1.0) / r * n / r * (2.0 * h + 2.0 * h_kv) * d * e;
        near(mean(&of, |volume| volume.forward), heads, "forward");
        near(mean(&of, |volume| volume.backward), heads, "backward");
    }
    let of = long(8, Mask::CAUSAL, Variant::Hybrid { nodes: 2 }, Order::ZigZag);
    let heads = 0.5 * n / 8.0 * (2.0 * h + 2.0 * h_kv) * d * e;
    let keys = 0.75 * 3.0 / 4.0 * n * h_kv / 2.0 * 2.0 * d * e;
    near(mean(&of, |volume| volume.forward), heads + keys, "forward");
    near(mean(&of, |volume| volume.backward), heads + 2.0 * keys, "backward");
    // A window over contiguous pieces: only the visible rows of the previous neighbour are sent.
    let of = long(8, Mask::window(Some(1024), Some(0)), Variant::Ring, Order::Contiguous);
    near(mean(&of, |volume| volume.forward), 7.0 / 8.0 * 1024.0 * h_kv * 2.0 * d * e, "window");
}

#[test]
fn ranks_that_see_nothing_of_each_other_exchange_nothing() {
    for variant in [Variant::Ring, Variant::AllGather] {
        let of = long(8, Mask::window(Some(1024), Some(512)), variant, Order::Contiguous);
        for rank in 0..8 {
            for step in of.steps(rank) {
                let rows = |other: usize| match other as i64 - rank as i64 {
                    -1 => 1024,
                    1 => 512,
                    _ => 0,
                };
                for from in &step.receive {
                    assert_eq!(from.count(), rows(from.rank), "{rank} from {}", from.rank);
                    assert!(from.count() > 0);
                }
                for to in &step.send {
                    assert!(rank.abs_diff(to.rank) == 1, "{rank} to {}", to.rank);
                }
            }
        }
        let of = long(8, Mask::window(Some(1024), Some(0)), variant, Order::Contiguous);
        assert!(of.steps(0).iter().all(|step| step.receive.is_empty()));
        assert!(of.steps(7).iter().all(|step| step.send.is_empty()));
    }
}

#[test]
fn what_cannot_be_spread_is_refused() {
    let make = |ranks, mask, variant, heads| {
        let sequences = Sequences::Batch { count: 1, length: 8 };
        Distribution::new(ranks, sequences, mask, variant, Order::ZigZag, heads)
            .unwrap_err()
            .to_string()
    };
    let none = Mask::NONE;
    assert_eq!(make(0, none, Variant::Ring, HEADS), "there are 0 ranks, expected one at least");
    assert_eq!(
        make(8, none, Variant::Hybrid { nodes: 3 }, HEADS),
        "8 ranks do not divide into 3 nodes"
    );
    assert_eq!(
        make(33, none, Variant::AllToAll, HEADS),
        "32 heads cannot be spread over 33 ranks: a rank needs one at least"
    );
    assert_eq!(
        make(2, none, Variant::Ring, Heads { key: 5, ..HEADS }),
        "32 heads are no multiple of 5 key heads"
    );
    assert_eq!(
        make(2, none.with_chunk(4), Variant::Ring, HEADS),
        "the mask chunk=4 is not one that can be spread: expected a window or a causal mask"
    );
}
