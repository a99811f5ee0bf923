//! The gradients of attention with mma.sync.

use flashcore_testing::scene::{Call, Scene};
use kernels::mma::{BackwardMma, tuned_backward};
use kernels::{Configuration, MaskKind, Rules};
use ptx::{Element, Target};
use sim::{Budget, Measure, Mode, Options};

use crate::every_schedule;

fn tuned(target: Target, head_dim: u32, value_head_dim: u32, rules: Rules) -> BackwardMma {
    tuned_backward(target, Element::BF16, head_dim, value_head_dim, rules).unwrap()
}

/// Warps that have all columns of their keys, so that weights stay in registers.
fn unshared(target: Target, rules: Rules) -> BackwardMma {
    let it = tuned(target, 64, 64, rules);
    BackwardMma { key_tiles: 2, key_warps: 4, column_warps: 1, part: 32, ..it }
}

/// Sequences, queries and keys, query and key heads.
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
        // Rows that see nothing, keys that nobody sees, a group of heads, two sequences.
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
        let scene = scene(backward, size);
        let (memory, _) = scene.run(&Options::default()).unwrap_or_else(|failure| {
            panic!("{}, {}: {failure}", backward.name(), scene.size);
        });
        let accuracy = scene.judge(&memory);
        assert!(accuracy.passed(), "{}, {}: {accuracy}", backward.name(), scene.size);
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
