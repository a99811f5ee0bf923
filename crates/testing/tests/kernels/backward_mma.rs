//! The backward kernel with `mma.sync` in the simulator.

use flashcore_testing::scene::{Call, PlacementKind, Ragged, Scene};
use kernels::mma::{BackwardMma, tuned_backward};
use kernels::{Batch, Configuration, MaskKind, Rules};
use ptx::{Element, Target};
use sim::{Budget, Measure, Mode, Options};

use crate::backward::bits_of_schedules;
use crate::every_schedule;
use crate::ragged_backward::is_right;

fn tuned(target: Target, head_dim: u32, value_head_dim: u32, rules: Rules) -> BackwardMma {
    let element = Element::BF16;
    tuned_backward(target, element, head_dim, value_head_dim, rules, false, Batch::Equal).unwrap()
}

/// Returns the configuration for another mode, which may have other tiles.
fn in_mode(it: BackwardMma, deterministic: bool, batch: Batch) -> BackwardMma {
    let BackwardMma { target, element, head_dim, value_head_dim, rules, .. } = it;
    tuned_backward(target, element, head_dim, value_head_dim, rules, deterministic, batch).unwrap()
}

fn ragged(backward: BackwardMma, queries: &[usize], keys: &[usize], heads: [usize; 2]) -> Call {
    let places = Ragged::new(queries.to_vec(), keys.to_vec()).over(PlacementKind::Packed);
    let ragged = Ragged { query_place: PlacementKind::Packed, ..places };
    Call::ragged(Configuration::BackwardMma(backward), ragged, heads)
}

/// Returns a configuration whose warps have all columns of their keys, so that P stays in
/// registers.
fn unshared(target: Target, rules: Rules) -> BackwardMma {
    let it = tuned(target, 64, 64, rules);
    BackwardMma { key_tiles: 2, key_warps: 4, column_warps: 1, part: 32, ..it }
}

/// A problem's size: the number of sequences, `[queries, keys]`, `[query heads, key heads]`.
type Size = (usize, [usize; 2], [usize; 2]);

fn scene(backward: BackwardMma, (batch, lengths, heads): Size) -> Scene {
    Call::new(Configuration::BackwardMma(backward), batch, lengths, heads).scene().unwrap()
}

#[test]
fn gradients_are_right() {
    use Target as T;
    let chunked = Rules { mask: MaskKind::Chunked, ..Rules::LOCAL };
    for (backward, size) in [
        (tuned(T::SM_80, 64, 64, Rules::DENSE), (1, [1, 1], [1, 1])),
        (tuned(T::SM_90, 128, 128, Rules::DENSE), (1, [1, 1], [1, 1])),
        (tuned(T::SM_90, 64, 64, Rules::CAUSAL), (1, [300, 200], [1, 1])),
        (tuned(T::SM_80, 128, 128, Rules::CAUSAL), (1, [250, 250], [1, 1])),
        (tuned(T::SM_89, 64, 64, Rules::CAUSAL), (1, [150, 150], [2, 1])),
        (tuned(T::SM_89, 128, 128, Rules::CAUSAL), (1, [100, 150], [2, 1])),
        (unshared(T::SM_90, Rules::CAUSAL), (1, [150, 150], [2, 1])),
        (unshared(T::SM_80, Rules::EVERY), (1, [70, 200], [2, 1])),
        // Rows that see no key, keys that no row sees, a group of heads, two sequences.
        (tuned(T::SM_80, 96, 64, Rules::CAUSAL), (2, [150, 60], [3, 1])),
        (tuned(T::SM_90, 128, 64, Rules::LOCAL), (1, [70, 300], [2, 1])),
        (tuned(T::SM_89, 64, 128, chunked), (1, [140, 200], [4, 2])),
        (tuned(T::SM_80, 40, 24, Rules::EVERY), (2, [130, 129], [2, 1])),
        (tuned(T::SM_90, 128, 120, Rules::EVERY), (2, [130, 129], [2, 1])),
        (tuned(T::SM_90, 256, 256, Rules::CAUSAL), (1, [140, 130], [2, 1])),
        (tuned(T::SM_80, 192, 128, chunked), (1, [100, 130], [1, 1])),
        (tuned(T::SM_80, 200, 256, Rules::EVERY), (1, [70, 70], [2, 1])),
        (tuned(T::SM_89, 248, 192, Rules::LOCAL), (1, [70, 70], [2, 1])),
    ] {
        let (batch, lengths, heads) = size;
        is_right(&Call::new(Configuration::BackwardMma(backward), batch, lengths, heads));
    }
}

#[test]
fn gradients_under_many_schedules() {
    for (backward, lengths) in [
        (tuned(Target::SM_90, 128, 128, Rules::CAUSAL), [200, 150]),
        (tuned(Target::SM_80, 64, 64, Rules::DENSE), [200, 130]),
        (unshared(Target::SM_90, Rules::DENSE), [140, 130]),
        (tuned(Target::SM_89, 256, 192, Rules::LOCAL), [70, 40]),
    ] {
        every_schedule(&scene(backward, (1, lengths, [2, 1])), Mode::Checked, 2);
    }
}

/// Lengths around the edges of tiles, empty sequences, more queries than keys and fewer.
#[test]
fn ragged_gradients_are_right() {
    use Target as T;
    let chunked = Rules { mask: MaskKind::Chunked, ..Rules::LOCAL };
    let sinks = Rules { sinks: true, ..Rules::CAUSAL };
    let many: Vec<usize> = (0..50).map(|it| it * 7 % 5).collect();
    for (backward, queries, keys, heads) in [
        (tuned(T::SM_90, 128, 128, Rules::CAUSAL), vec![1], vec![1], [1, 1]),
        (tuned(T::SM_80, 64, 64, Rules::DENSE), vec![0, 1, 0], vec![0, 1, 0], [2, 1]),
        (
            tuned(T::SM_90, 128, 128, Rules::CAUSAL),
            vec![65, 0, 129, 1],
            vec![65, 7, 129, 1],
            [2, 1],
        ),
        (
            tuned(T::SM_80, 128, 128, Rules::CAUSAL),
            vec![65, 0, 129, 1],
            vec![65, 7, 129, 0],
            [2, 1],
        ),
        (tuned(T::SM_89, 96, 64, Rules::CAUSAL), vec![200, 3, 64], vec![60, 130, 64], [3, 1]),
        (tuned(T::SM_90, 128, 64, Rules::LOCAL), vec![70, 0, 140], vec![300, 9, 140], [4, 2]),
        (tuned(T::SM_80, 64, 128, chunked), vec![140, 33, 300], vec![300, 9, 90], [2, 2]),
        (tuned(T::SM_90, 40, 72, Rules::EVERY), vec![130, 0, 50], vec![129, 60, 131], [2, 1]),
        (tuned(T::SM_80, 128, 128, Rules::EVERY), vec![130, 0, 50], vec![129, 60, 131], [2, 1]),
        (tuned(T::SM_90, 256, 256, Rules::CAUSAL), vec![70, 0, 129], vec![65, 63, 129], [2, 1]),
        (tuned(T::SM_89, 256, 200, Rules::LOCAL), vec![70, 0, 29], vec![65, 63, 29], [2, 1]),
        (unshared(T::SM_90, Rules::CAUSAL), vec![70, 0, 129], vec![65, 63, 129], [2, 1]),
        (tuned(T::SM_80, 64, 64, sinks), many.clone(), many, [1, 1]),
    ] {
        // Those that share no keys are not chosen.
        let backward = match backward.column_warps == 1 {
            true => BackwardMma { batch: Batch::Ragged, ..backward },
            false => in_mode(backward, false, Batch::Ragged),
        };
        is_right(&ragged(backward, &queries, &keys, heads));
    }
}

/// Rows of no sequence lie between sequences and stay as they are; lists hold hostile numbers.
#[test]
fn sequences_lie_anywhere() {
    let backward = in_mode(tuned(Target::SM_80, 64, 64, Rules::CAUSAL), false, Batch::Ragged);
    let kernel = Configuration::BackwardMma(backward);
    let batch = |query_place, key_place| Ragged {
        query_place,
        ..Ragged::new(vec![65, 0, 129, 3], vec![128, 7, 60, 130]).over(key_place)
    };
    for (query_place, key_place) in [
        (PlacementKind::PackedWithGaps, PlacementKind::PackedWithGaps),
        (PlacementKind::PackedWithGaps, PlacementKind::Padded),
        (PlacementKind::Padded, PlacementKind::Packed),
        (PlacementKind::Padded, PlacementKind::Padded),
    ] {
        is_right(&Call::ragged(kernel, batch(query_place, key_place), [2, 1]));
    }
    let hostile = ragged(backward, &[128, 0, 1, 127], &[128, 0, 130, 1], [2, 1]);
    is_right(&Call { hostile: true, ..hostile });
}

#[test]
fn other_modes_under_many_schedules() {
    let ordered = |it| in_mode(it, true, Batch::Equal);
    for (backward, lengths) in [
        (tuned(Target::SM_90, 128, 128, Rules::CAUSAL), [200, 300]),
        (tuned(Target::SM_80, 64, 64, Rules::LOCAL), [200, 300]),
        (tuned(Target::SM_89, 256, 192, Rules::CAUSAL), [70, 70]),
    ] {
        every_schedule(&scene(ordered(backward), (1, lengths, [2, 1])), Mode::Checked, 2);
    }
    for (deterministic, target) in [(false, Target::SM_80), (true, Target::SM_90)] {
        let backward = tuned(target, 128, 128, Rules::CAUSAL);
        let backward = in_mode(backward, deterministic, Batch::Ragged);
        let call = ragged(backward, &[130, 0, 65], &[300, 9, 65], [2, 1]);
        every_schedule(&call.scene().unwrap(), Mode::Checked, 2);
    }
}

#[test]
fn deterministic_gradients_have_the_same_bits_under_every_schedule() {
    let chunked = Rules { mask: MaskKind::Chunked, ..Rules::LOCAL };
    for (backward, (batch, lengths, heads), multiprocessors) in [
        (tuned(Target::SM_90, 128, 128, Rules::CAUSAL), (1, [200, 400], [3, 3]), 1),
        (tuned(Target::SM_80, 64, 64, Rules::DENSE), (3, [140, 300], [1, 1]), 9),
        (tuned(Target::SM_80, 64, 64, Rules::CAUSAL), (1, [300, 300], [6, 2]), 2),
        (tuned(Target::SM_90, 80, 80, Rules::LOCAL), (1, [200, 400], [2, 1]), 2),
        (tuned(Target::SM_89, 128, 64, chunked), (2, [100, 250], [1, 1]), 1),
        (tuned(Target::SM_80, 40, 72, Rules::EVERY), (1, [300, 260], [2, 2]), 1),
        (tuned(Target::SM_90, 256, 256, Rules::CAUSAL), (1, [100, 200], [2, 1]), 1),
    ] {
        let backward = in_mode(backward, true, Batch::Equal);
        let call = Call::new(Configuration::BackwardMma(backward), batch, lengths, heads);
        let scene = call.with_multiprocessors(multiprocessors).scene().unwrap();
        let (_, same) = bits_of_schedules(&scene);
        assert!(same, "{}, {}", backward.name(), scene.size);
    }
    let backward = in_mode(tuned(Target::SM_90, 64, 64, Rules::CAUSAL), true, Batch::Ragged);
    let scene = ragged(backward, &[300, 0, 129], &[300, 9, 300], [2, 1]).scene().unwrap();
    let (_, same) = bits_of_schedules(&scene);
    assert!(same, "{}", scene.size);
}

/// The bits of the fast mode differ between schedules, which shows that the comparison in the
/// deterministic tests can fail.
#[test]
fn fast_gradients_have_other_bits_under_other_schedules() {
    let scene = scene(tuned(Target::SM_80, 64, 64, Rules::DENSE), (1, [140, 400], [1, 1]));
    let (_, same) = bits_of_schedules(&scene);
    assert!(!same);
}

#[test]
fn shared_memory_has_no_bank_conflicts() {
    for dim in [64, 128, 256] {
        let backward = tuned(Target::SM_90, dim, dim, Rules::CAUSAL);
        let scene = scene(backward, (1, [130, 130], [1, 1]));
        let budget = Budget::default().at_most(Measure::BankConflicts, 0);
        let (memory, _) = scene.run(&Options { budget, ..Options::default() }).unwrap();
        assert!(scene.judge(&memory).passed());
    }
}
