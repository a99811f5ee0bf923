//! The backward kernel for Hopper over ragged batches in the simulator, and the sequencer that
//! orders its tiles.

use flashcore_testing::scene::{Call, PlacementKind, Ragged, Scene};
use kernels::backward::{sharing_backward, tuned_backward};
use kernels::sequencer::Tiles;
use kernels::{Backward, Batch, Configuration, MaskKind, Rules, Sequencer};
use ptx::{Element, Target};
use sim::{Argument, Budget, Measure, Mode, Options, Policy};

use crate::every_schedule;

fn tuned(head_dim: u32, value_head_dim: u32, rules: Rules) -> Backward {
    let equal = tuned_backward(Element::BF16, head_dim, value_head_dim, rules).unwrap();
    Backward { batch: Batch::Ragged, ..equal }
}

/// Returns the configuration whose tiles clear and round shares of the dQ sums: for heads that do
/// not share keys.
fn sharing(head_dim: u32, value_head_dim: u32, rules: Rules) -> Backward {
    sharing_backward(tuned(head_dim, value_head_dim, rules)).unwrap()
}

fn call(backward: Backward, queries: &[usize], keys: &[usize], heads: [usize; 2]) -> Call {
    let places = Ragged::new(queries.to_vec(), keys.to_vec()).over(PlacementKind::Packed);
    let ragged = Ragged { query_place: PlacementKind::Packed, ..places };
    Call::ragged(Configuration::Backward(backward), ragged, heads)
}

pub(crate) fn is_right(call: &Call) {
    let scene = call.scene().unwrap_or_else(|error| panic!("{}: {error}", call.problem));
    let (memory, _) = scene.run(&Options::default()).unwrap_or_else(|failure| {
        panic!("{}, {}: {failure}", call.kernel.name(), scene.size);
    });
    let accuracy = scene.judge(&memory);
    assert!(accuracy.passed(), "{}, {}: {accuracy}", call.kernel.name(), scene.size);
}

/// Lengths around the edges of tiles, empty sequences, more queries than keys and fewer.
#[test]
fn gradients_are_right() {
    let chunked = Rules { mask: MaskKind::Chunked, ..Rules::LOCAL };
    for (backward, queries, keys, heads) in [
        (tuned(128, 128, Rules::CAUSAL), vec![1], vec![1], [1, 1]),
        (tuned(64, 64, Rules::DENSE), vec![0, 1, 0], vec![0, 1, 0], [2, 1]),
        (tuned(128, 128, Rules::CAUSAL), vec![65, 0, 129, 1, 63], vec![65, 7, 129, 1, 63], [2, 1]),
        (tuned(64, 64, Rules::CAUSAL), vec![127, 128, 129, 5], vec![127, 128, 129, 0], [1, 1]),
        (tuned(96, 64, Rules::CAUSAL), vec![200, 3, 64], vec![60, 130, 64], [3, 1]),
        (tuned(128, 64, Rules::LOCAL), vec![70, 0, 140], vec![300, 9, 140], [4, 2]),
        (tuned(64, 128, chunked), vec![140, 33, 300], vec![300, 9, 90], [2, 2]),
        (tuned(40, 72, Rules::EVERY), vec![130, 0, 50], vec![129, 60, 131], [2, 1]),
        (tuned(128, 128, Rules::EVERY), vec![130, 0, 50], vec![129, 60, 131], [2, 1]),
        (tuned(192, 128, Rules::CAUSAL), vec![70, 0, 129], vec![65, 63, 129], [2, 1]),
        (sharing(128, 128, Rules::CAUSAL), vec![1], vec![1], [1, 1]),
        (sharing(64, 64, Rules::DENSE), vec![0, 1, 0], vec![0, 1, 0], [2, 2]),
        (sharing(128, 128, Rules::CAUSAL), vec![65, 0, 129, 63], vec![65, 7, 129, 63], [2, 2]),
        (sharing(64, 64, Rules::CAUSAL), vec![127, 128, 129, 5], vec![127, 128, 129, 0], [1, 1]),
        (sharing(96, 64, Rules::CAUSAL), vec![200, 3, 64], vec![60, 130, 64], [3, 3]),
        (sharing(64, 128, chunked), vec![140, 33, 300], vec![300, 9, 90], [2, 2]),
        (sharing(40, 72, Rules::LOCAL), vec![130, 0, 50], vec![129, 60, 131], [2, 2]),
        // Built, but not chosen.
        (
            Backward { shares: true, ..tuned(96, 96, Rules::EVERY) },
            vec![130, 0, 50],
            vec![129, 60, 131],
            [2, 2],
        ),
    ] {
        is_right(&call(backward, &queries, &keys, heads));
    }
}

/// Rows of no sequence lie between sequences and stay as they are.
#[test]
fn sequences_lie_anywhere() {
    let (queries, keys) = (vec![65, 0, 129, 3], vec![128, 7, 60, 130]);
    for (query_place, key_place) in [
        (PlacementKind::PackedWithGaps, PlacementKind::PackedWithGaps),
        (PlacementKind::PackedWithGaps, PlacementKind::Padded),
        (PlacementKind::Padded, PlacementKind::Packed),
        (PlacementKind::Padded, PlacementKind::Padded),
    ] {
        let ragged = Ragged::new(queries.clone(), keys.clone()).over(key_place);
        for padding in [vec![], vec![3, 0, 130, 1]] {
            let ragged = Ragged { padding, query_place, ..ragged.clone() };
            let kernel = Configuration::Backward(tuned(64, 64, Rules::CAUSAL));
            is_right(&Call::ragged(kernel, ragged.clone(), [2, 1]));
            let kernel = Configuration::Backward(sharing(64, 64, Rules::CAUSAL));
            is_right(&Call::ragged(kernel, ragged, [2, 2]));
        }
    }
}

/// More sequences than a warp examines in one step, and in two.
#[test]
fn many_short_sequences() {
    let rules = Rules { sinks: true, ..Rules::CAUSAL };
    for (count, every) in [(33, 1), (50, 2), (1030, 103)] {
        let length = |it: usize| if it.is_multiple_of(every) { 1 + it * 7 % 5 } else { 0 };
        let lengths: Vec<usize> = (0..count).map(length).collect();
        for backward in [tuned(64, 64, rules), sharing(64, 64, rules)] {
            is_right(&call(backward, &lengths, &lengths, [1, 1]));
        }
    }
}

#[test]
fn numbers_beyond_their_bounds_mean_the_bounds() {
    let (queries, keys) = ([128, 0, 1, 127], [128, 0, 130, 1]);
    for (backward, heads) in
        [(tuned(64, 64, Rules::CAUSAL), [2, 1]), (sharing(64, 64, Rules::CAUSAL), [2, 2])]
    {
        let ragged = call(backward, &queries, &keys, heads);
        is_right(&Call { hostile: true, ..ragged });
    }
}

#[test]
fn gradients_under_many_schedules() {
    for (backward, queries, keys) in [
        (tuned(128, 128, Rules::CAUSAL), [130, 0, 65], [130, 9, 65]),
        (tuned(64, 64, Rules::LOCAL), [200, 1, 129], [60, 0, 140]),
    ] {
        let scene = call(backward, &queries, &keys, [2, 1]).scene().unwrap();
        every_schedule(&scene, Mode::Checked, 2);
    }
}

/// On one multiprocessor, tiles clear the share of the tile one further than the longest sequence
/// has tiles, and round that of the tile two further back: of heads and sequences with one tile,
/// several, and a tile without keys; shares have several query blocks, one, or none.
#[test]
fn tiles_clear_and_round_the_shares_of_others() {
    let sinks = Rules { sinks: true, ..Rules::CAUSAL };
    for (backward, queries, keys, heads) in [
        (
            sharing(128, 128, Rules::CAUSAL),
            vec![130, 0, 65, 40, 129],
            vec![130, 9, 65, 0, 300],
            [3, 3],
        ),
        (sharing(64, 64, sinks), vec![300, 9, 0, 129, 1], vec![60, 0, 200, 129, 260], [3, 3]),
        (sharing(96, 128, Rules::DENSE), vec![3, 200, 64, 70], vec![1, 129, 64, 0], [3, 3]),
        (sharing(40, 40, Rules::LOCAL), vec![129, 0, 1, 7], vec![129, 0, 130, 70], [4, 4]),
    ] {
        let call = call(backward, &queries, &keys, heads).with_multiprocessors(1);
        every_schedule(&call.scene().unwrap(), Mode::Checked, 2);
    }
}

/// Sequences that overlap have more tiles than the schedule has room for. The results mean nothing,
/// but no tile waits for one that does not exist.
#[test]
fn lists_that_make_no_sense_come_to_an_end() {
    let lengths = [300, 0, 30, 5, 0, 0];
    let starts = [0, 335, 0, 335, 0, 335, 0];
    for dim in [64, 128] {
        let call = call(sharing(dim, dim, Rules::CAUSAL), &lengths, &lengths, [2, 2]);
        let mut scene = call.with_multiprocessors(1).without_expected().unwrap();
        let list = Argument::Address(scene.memory.input_u32("senseless starts", &starts), 0);
        let Scene { before, after, program, arguments, .. } = &mut scene;
        let launches = before.iter_mut().chain(after).map(|it| (&it.program, &mut it.arguments));
        for (program, arguments) in launches.chain([(&*program, arguments)]) {
            let passed = program.parameters.iter().zip(arguments);
            let starts = passed.filter(|(it, _)| it.name.ends_with("Starts"));
            starts.for_each(|(_, argument)| *argument = list.clone());
        }
        for policy in Policy::HOSTILE {
            let options = Options { mode: Mode::Values, policy, ..Options::default() };
            scene.run(&options).unwrap_or_else(|failure| panic!("{dim}, {policy}: {failure}"));
        }
    }
}

/// The records that an earlier batch with more tiles left in the schedule are ignored.
#[test]
fn what_a_longer_batch_left_behind_is_not_read() {
    for backward in [tuned(64, 64, Rules::DENSE), sharing(64, 64, Rules::DENSE)] {
        let kernel = Configuration::Backward(backward);
        let scene = |lengths: [usize; 3]| {
            let lengths = lengths.to_vec();
            let ragged = Ragged::new(lengths.clone(), lengths).over(PlacementKind::Padded);
            Call::ragged(kernel, ragged, [1, 1]).scene().unwrap()
        };
        let (left, _) = scene([129, 129, 128]).run(&Options::default()).unwrap();
        let mut shorter = scene([129, 1, 0]);
        let [schedule] = shorter.restored[..] else { panic!("one schedule") };
        shorter.memory.restore(schedule, &left);
        let (memory, _) = shorter.run(&Options::default()).unwrap();
        let accuracy = shorter.judge(&memory);
        assert!(accuracy.passed(), "{}: {accuracy}", backward.name());
    }
}

/// In the deterministic mode the bits of dQ do not depend on the order of thread blocks.
#[test]
fn gradients_in_one_order() {
    let ordered = |backward| Backward { deterministic: true, ..backward };
    for (backward, queries, keys) in [
        (tuned(64, 64, Rules::CAUSAL), [300, 0, 129], [300, 9, 129]),
        (tuned(128, 128, Rules::LOCAL), [140, 1, 65], [260, 0, 300]),
    ] {
        let scene = call(ordered(backward), &queries, &keys, [2, 1]).scene().unwrap();
        let mut seen: Option<Vec<u8>> = None;
        for policy in Policy::HOSTILE {
            let options = Options { policy, ..Options::default() };
            let (memory, _) = scene.run(&options).unwrap_or_else(|failure| panic!("{failure}"));
            let accuracy = scene.judge(&memory);
            assert!(accuracy.passed(), "{}: {accuracy}", scene.size);
            let bytes = memory.bytes(scene.results[0].buffer).to_vec();
            assert!(seen.get_or_insert(bytes.clone()) == &bytes, "{}, {policy}", scene.size);
        }
    }
}

#[test]
fn shared_memory_has_no_bank_conflicts() {
    let of = |dim| [tuned(dim, dim, Rules::CAUSAL), sharing(dim, dim, Rules::CAUSAL)];
    for backward in [64, 128].into_iter().flat_map(of) {
        let call = call(backward, &[140, 65], &[130, 65], [1, 1]).with_multiprocessors(1);
        let scene = call.scene().unwrap();
        let budget = Budget::default().at_most(Measure::BankConflicts, 0);
        let (memory, _) = scene.run(&Options { budget, ..Options::default() }).unwrap();
        assert!(scene.judge(&memory).passed());
    }
}

/// Each of two sequences with two heads has five rows more than a query block here. The rounding
/// kernel reads these rows, padded to eight, and none of the rest of the block.
#[test]
fn sums_of_rows_that_nobody_has_are_not_read() {
    let of = |dim| [tuned(dim, dim, Rules::CAUSAL), sharing(dim, dim, Rules::CAUSAL)];
    for backward in [64, 128].into_iter().flat_map(of) {
        let (dim, rounding) = (backward.head_dim, backward.pass().rounding());
        let scene = Scene::small(&Configuration::Rounding(rounding)).unwrap();
        let (memory, report) = scene.run(&Options::default()).unwrap();
        assert!(scene.judge(&memory).passed());
        let rows = 2 * (rounding.sums.query_block + 8);
        let sums = u64::from(2 * rows * dim * 4);
        let read = report.counts.get(Measure::GlobalBytesRead);
        // Every thread also reads where its sequence lies, or its tile's record and twice the number
        // of records.
        let looked_up = if backward.shares { 40 } else { 20 };
        let looked_up = u64::from(scene.grid * scene.program.threads) * looked_up;
        let name = backward.name();
        assert!((sums..=sums + looked_up).contains(&read), "{read} bytes for {sums}, {name}");
    }
}

/// Sequences are ordered from many queries to few, and the tiles of each stay together.
#[test]
fn tiles_of_keys_are_put_in_order() {
    let batch = |queries, keys| Ragged { queries, keys, ..Scene::sequencer_batch() };
    let every = |of: usize, rows: fn(usize) -> usize| {
        (0..1100).map(|it: usize| if it.is_multiple_of(of) { rows(it) } else { 0 }).collect()
    };
    for tiles in [Tiles::Keys, Tiles::KeysOrQueries] {
        let sequencer = Sequencer { target: Target::SM_90A, tiles };
        let small = Scene::small(&Configuration::Sequencer(sequencer)).unwrap();
        every_schedule(&small, Mode::Checked, 4);
        for ragged in [
            batch(vec![1], vec![1]),
            batch(vec![0, 5], vec![0, 0]),
            batch(vec![5, 9, 7], vec![700, 0, 300]),
            // More than are sorted together; of the few that have queries, no two are alike.
            batch(every(171, |it| 1 + it / 171), every(342, |_| 300)),
        ] {
            let scene = Scene::sequencer(sequencer, &ragged, 128).unwrap();
            for policy in Policy::HOSTILE {
                let options = Options { mode: Mode::Values, policy, ..Options::default() };
                let (memory, _) = scene.run(&options).unwrap_or_else(|failure| panic!("{failure}"));
                let accuracy = scene.judge(&memory);
                assert!(accuracy.passed(), "{}: {accuracy}", scene.size);
            }
        }
    }
}
