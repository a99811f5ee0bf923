//! The backward kernel for Hopper in the simulator.

use flashcore_testing::check::Order;
use flashcore_testing::scene::{Call, Scene, schedules};
use kernels::backward::{tall_backward, tuned_backward};
use kernels::{Backward, Configuration, MaskKind, Rules};
use ptx::Element;
use sim::{Budget, Measure, Mode, Options, Policy};

use crate::{every_schedule, is_right_with_cap};

fn tuned(head_dim: u32, value_head_dim: u32, rules: Rules) -> Backward {
    tuned_backward(Element::BF16, head_dim, value_head_dim, rules).unwrap()
}

fn sunk(dim: u32, mask: MaskKind) -> Backward {
    tuned(dim, dim, Rules { mask, sinks: true, ..Rules::DENSE })
}

fn tall(dim: u32, element: Element) -> Backward {
    tall_backward(tuned_backward(element, dim, dim, Rules::DENSE).unwrap()).unwrap()
}

/// A problem's size: the number of sequences, `[queries, keys]`, `[query heads, key heads]`.
type Size = (usize, [usize; 2], [usize; 2]);

fn scene(backward: Backward, (batch, lengths, heads): Size) -> Scene {
    Call::new(Configuration::Backward(backward), batch, lengths, heads).scene().unwrap()
}

#[test]
fn gradients_are_right() {
    let chunked = Rules { mask: MaskKind::Chunked, ..Rules::LOCAL };
    for (backward, size) in [
        (tuned(128, 128, Rules::DENSE), (1, [1, 1], [1, 1])),
        (tuned(64, 64, Rules::DENSE), (1, [1, 1], [1, 1])),
        // Enough steps to go around all stages, and one more.
        (tuned(128, 128, Rules::CAUSAL), (1, [450, 450], [1, 1])),
        (tuned(64, 64, Rules::CAUSAL), (1, [650, 200], [1, 1])),
        // Rows that see no key, keys that no row sees, a group of heads, two sequences.
        (tuned(96, 64, Rules::CAUSAL), (2, [200, 60], [3, 1])),
        (tuned(128, 64, Rules::LOCAL), (1, [70, 400], [2, 1])),
        (tuned(64, 128, chunked), (1, [140, 300], [4, 2])),
        (tuned(40, 72, Rules::EVERY), (2, [130, 129], [2, 1])),
        // Sinks of rows that see no key, over more query blocks than one round of threads takes.
        (sunk(128, MaskKind::Causal), (1, [1100, 60], [2, 1])),
        (sunk(64, MaskKind::Dense), (5, [260, 40], [2, 2])),
        (sunk(64, MaskKind::Chunked), (2, [200, 100], [2, 1])),
        (tuned(128, 128, Rules::EVERY), (2, [130, 129], [2, 1])),
        // Narrow heads, with twice 64 keys per warpgroup.
        (tall(64, Element::BF16), (1, [1, 1], [1, 1])),
        (tall(64, Element::F16), (2, [330, 300], [2, 1])),
        (tall(40, Element::BF16), (1, [130, 600], [1, 1])),
        // Wide heads: one warpgroup has weights, the other their gradients.
        (tuned(256, 256, Rules::DENSE), (1, [1, 1], [1, 1])),
        (tuned(256, 256, Rules::CAUSAL), (1, [330, 330], [1, 1])),
        (tuned(192, 128, Rules::CAUSAL), (2, [330, 60], [3, 1])),
        (tuned(56, 200, Rules::EVERY), (2, [130, 129], [2, 1])),
        (tuned(136, 40, chunked), (1, [140, 300], [4, 2])),
    ] {
        let scene = scene(backward, size);
        let (memory, _) = scene.run(&Options::default()).unwrap_or_else(|failure| {
            panic!("{}, {}: {failure}", backward.name(), scene.size);
        });
        let accuracy = scene.judge(&memory);
        assert!(accuracy.passed(), "{}, {}: {accuracy}", backward.name(), scene.size);
    }
}

/// Inputs and the gradient of the output lie in other orders than the gradients that are written.
#[test]
fn gradients_of_strided_tensors_are_right() {
    for order in [Order::HeadsFirst, Order::Padded] {
        for backward in [
            tuned(64, 64, Rules::CAUSAL),
            tuned(128, 64, Rules::DENSE),
            tuned(256, 256, Rules::CAUSAL),
        ] {
            let configuration = Configuration::Backward(backward);
            let call = Call { order, ..Call::new(configuration, 2, [130, 129], [2, 1]) };
            let scene = call.scene().unwrap();
            let (memory, _) = scene.run(&Options::default()).unwrap_or_else(|failure| {
                panic!("{}, {order:?}: {failure}", backward.name());
            });
            let accuracy = scene.judge(&memory);
            assert!(accuracy.passed(), "{}, {order:?}: {accuracy}", backward.name());
        }
    }
}

/// Caps beyond all scores, amid them, and so low that all scores are as good as zero.
#[test]
fn gradients_of_capped_scores_are_right() {
    let rules = [Rules::CAUSAL, Rules::DENSE, Rules { alibi: true, ..Rules::LOCAL }];
    let rules = rules.map(Rules::capped);
    for (dim, rules, cap) in [
        (64, rules[0], 20.0),
        (64, rules[1], 0.8),
        (64, rules[1], 20.0),
        (64, rules[2], 20.0),
        (64, rules[0], 1e-20),
        (64, rules[0], 1e20),
        (128, rules[0], 20.0),
        (128, rules[0], 1e-20),
    ] {
        let kernel = Configuration::Backward(tuned(dim, dim, rules));
        is_right_with_cap(Call::new(kernel, 1, [150, 140], [2, 1]), cap);
    }
}

#[test]
fn gradients_under_many_schedules() {
    for (backward, lengths) in [
        (tuned(128, 128, Rules::CAUSAL), [330, 200]),
        (tuned(64, 64, Rules::DENSE), [400, 130]),
        (tuned(80, 80, Rules::LOCAL), [260, 140]),
        (tuned(256, 256, Rules::CAUSAL), [330, 100]),
        (tuned(192, 128, Rules::DENSE), [330, 64]),
        (tall(64, Element::BF16), [330, 200]),
        (tuned(64, 64, Rules::CAUSAL.capped()), [300, 130]),
    ] {
        every_schedule(&scene(backward, (1, lengths, [2, 1])), Mode::Checked, 2);
    }
}

#[test]
fn heads_are_taken_together_under_a_causal_mask() {
    for (backward, heads) in
        [(tuned(64, 64, Rules::CAUSAL), [3, 3]), (tuned(128, 128, Rules::CAUSAL), [4, 2])]
    {
        let call = Call::new(Configuration::Backward(backward), 1, [200, 300], heads);
        let scene = call.with_multiprocessors(8).scene().unwrap();
        every_schedule(&scene, Mode::Values, 1);
    }
}

/// Walks of several rounds that alternate their direction, with heads that share keys: more queries
/// than keys, and fewer.
#[test]
fn walks_go_down_and_up_by_turns() {
    for (backward, (lengths, heads), multiprocessors) in [
        (tuned(128, 128, Rules::CAUSAL), ([330, 400], [3, 1]), 1),
        (tuned(64, 64, Rules::CAUSAL), ([500, 300], [4, 2]), 2),
        (tuned(256, 256, Rules::CAUSAL), ([200, 200], [2, 1]), 3),
    ] {
        let call = Call::new(Configuration::Backward(backward), 1, lengths, heads);
        let scene = call.with_multiprocessors(multiprocessors).scene().unwrap();
        every_schedule(&scene, Mode::Checked, 1);
    }
}

/// So many heads that idle warps clear the dQ sums of later heads and round those of earlier ones
/// while the products run: also with head dims that fill no whole panels, with groups of heads, and
/// with tiles that no query sees.
#[test]
fn sums_are_cleared_and_rounded_beside_the_products() {
    for (backward, (lengths, heads)) in [
        (tuned(128, 128, Rules::CAUSAL), ([70, 140], [6, 6])),
        (persistent(tuned(64, 64, Rules::CAUSAL)), ([140, 130], [7, 7])),
        (tuned(40, 72, Rules::DENSE), ([130, 60], [5, 5])),
        (tall(64, Element::F16), ([70, 40], [12, 6])),
        (tuned(256, 256, Rules::CAUSAL), ([70, 100], [5, 5])),
        (tuned(192, 128, Rules::LOCAL), ([10, 300], [4, 4])),
        (split(tuned(128, 128, Rules::DENSE)), ([130, 60], [7, 7])),
    ] {
        let call = Call::new(Configuration::Backward(backward), 1, lengths, heads);
        every_schedule(&call.scene().unwrap(), Mode::Checked, 1);
    }
}

fn persistent(backward: Backward) -> Backward {
    Backward { persistent: true, ..backward }
}

/// One or two thread blocks process all tiles: walks that end at every stage, and tiles that no
/// query sees.
#[test]
fn blocks_take_tile_after_tile() {
    for (backward, (batch, lengths, heads), multiprocessors) in [
        (tuned(128, 128, Rules::CAUSAL), (1, [330, 400], [2, 1]), 1),
        (tuned(64, 64, Rules::CAUSAL), (1, [400, 300], [2, 2]), 2),
        (tuned(40, 72, Rules::EVERY), (1, [200, 260], [1, 1]), 1),
        (tuned(80, 80, Rules::LOCAL), (1, [40, 700], [1, 1]), 1),
        (tall(64, Element::BF16), (1, [200, 300], [2, 2]), 1),
    ] {
        let kernel = Configuration::Backward(persistent(backward));
        let scene = Call::new(kernel, batch, lengths, heads)
            .with_multiprocessors(multiprocessors)
            .scene()
            .unwrap();
        every_schedule(&scene, Mode::Checked, 1);
    }
}

fn split(backward: Backward) -> Backward {
    Backward { split: true, ..backward }
}

/// One tile more than whole rounds of thread blocks, or fewer tiles than one round; parts that
/// begin within the query heads of a group, and parts without steps.
#[test]
fn the_last_tiles_are_cut_into_parts() {
    for (backward, (lengths, heads), multiprocessors) in [
        (tuned(128, 128, Rules::DENSE), ([300, 400], [1, 1]), 3),
        (persistent(tuned(128, 128, Rules::DENSE)), ([140, 400], [3, 1]), 3),
        (tall(64, Element::BF16), ([330, 300], [2, 1]), 3),
        (persistent(tuned(64, 128, Rules::DENSE)), ([40, 200], [1, 1]), 3),
    ] {
        let kernel = Configuration::Backward(split(backward));
        let scene = Call::new(kernel, 1, lengths, heads)
            .with_multiprocessors(multiprocessors)
            .scene()
            .unwrap();
        every_schedule(&scene, Mode::Checked, 1);
    }
}

/// Runs a scene under every policy, with some seeds, and with one, two or four resident thread
/// blocks; returns the bits of all results of the first run, and whether all other runs agree.
pub(crate) fn bits_of_schedules(scene: &Scene) -> (Vec<Vec<u8>>, bool) {
    let mut all = Vec::new();
    let mode = Mode::Values;
    for resident in [1, 4] {
        for (policy, seed) in schedules(&Policy::HOSTILE, 0..2) {
            let options = Options { policy, seed, resident, mode, ..Options::default() };
            let (memory, _) = scene.run(&options).unwrap_or_else(|failure| {
                panic!("{}, {}, {policy} {seed}: {failure}", scene.program.name, scene.size);
            });
            let accuracy = scene.judge(&memory);
            assert!(accuracy.passed(), "{}, {}: {accuracy}", scene.program.name, scene.size);
            all.push(scene.results.iter().map(|it| memory.bytes(it.buffer).to_vec()).collect());
        }
    }
    let first: Vec<Vec<u8>> = all.swap_remove(0);
    let same = all.iter().all(|bits| *bits == first);
    (first, same)
}

fn deterministic(backward: Backward) -> Backward {
    Backward { deterministic: true, ..backward }
}

#[test]
fn deterministic_gradients_under_many_schedules() {
    for (backward, lengths) in [
        (tuned(128, 128, Rules::CAUSAL), [200, 300]),
        (tuned(64, 64, Rules::LOCAL), [300, 300]),
        (tuned(256, 256, Rules::DENSE), [140, 130]),
    ] {
        every_schedule(&scene(deterministic(backward), (1, lengths, [2, 1])), Mode::Checked, 2);
    }
}

#[test]
fn deterministic_gradients_have_the_same_bits_under_every_schedule() {
    let chunked = Rules { mask: MaskKind::Chunked, ..Rules::LOCAL };
    for (backward, (batch, lengths, heads), multiprocessors) in [
        // Heads taken one at a time; in pairs, with one left over that comes first; all together.
        (tuned(128, 128, Rules::CAUSAL), (1, [330, 400], [3, 3]), 1),
        (tuned(128, 128, Rules::CAUSAL), (1, [330, 400], [3, 3]), 3),
        (tuned(64, 64, Rules::DENSE), (3, [140, 300], [1, 1]), 9),
        // Query heads that share a key head.
        (tuned(64, 64, Rules::CAUSAL), (1, [300, 300], [6, 2]), 2),
        // Key blocks that see other queries than those before them.
        (tuned(80, 80, Rules::LOCAL), (1, [300, 500], [2, 1]), 2),
        (tuned(128, 64, chunked), (2, [200, 450], [1, 1]), 1),
        (tuned(40, 72, Rules::EVERY), (1, [300, 260], [2, 2]), 1),
        (tuned(256, 256, Rules::CAUSAL), (1, [200, 200], [2, 1]), 1),
        // Sums in one part, and in three.
        (tuned(64, 192, Rules::CAUSAL), (1, [130, 200], [1, 1]), 1),
        (tuned(192, 128, Rules::EVERY), (1, [150, 200], [2, 2]), 2),
    ] {
        let backward = deterministic(backward);
        let call = Call::new(Configuration::Backward(backward), batch, lengths, heads);
        let scene = call.with_multiprocessors(multiprocessors).scene().unwrap();
        let (_, same) = bits_of_schedules(&scene);
        assert!(same, "{}, {}", backward.name(), scene.size);
    }
}

/// The dQ sums of the fast mode depend on the order of thread blocks, which shows that the
/// comparison of bits in the deterministic tests can fail.
#[test]
fn fast_gradients_have_other_bits_under_other_schedules() {
    let scene = scene(tuned(64, 64, Rules::DENSE), (1, [140, 400], [1, 1]));
    let (_, same) = bits_of_schedules(&scene);
    assert!(!same);
}

#[test]
fn shared_memory_has_no_bank_conflicts() {
    for dim in [64, 128, 256] {
        let backward = tuned(dim, dim, Rules::CAUSAL);
        let rounding = Configuration::Rounding(backward.pass().rounding());
        let products = scene(backward, (1, [200, 130], [1, 1]));
        for scene in [products, Scene::small(&rounding).unwrap()] {
            let budget = Budget::default().at_most(Measure::BankConflicts, 0);
            let (memory, _) = scene.run(&Options { budget, ..Options::default() }).unwrap();
            assert!(scene.judge(&memory).passed());
        }
    }
}
