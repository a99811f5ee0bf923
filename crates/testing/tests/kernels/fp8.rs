//! The forward kernel for Hopper with 8-bit inputs in the simulator.

use flashcore::{Descale, Descales};
use flashcore_testing::check::Order;
use flashcore_testing::scene::{
    Call, KeyMagnitudes, PlacementKind, Ragged, Scene, decode, schedules,
};
use kernels::forward::{every_fp8, every_fp8_prefill};
use kernels::{Configuration, Forward, MaskKind, Prefill, Rules};
use ptx::Element;
use sim::{Fp8Accumulation, Measure, Mode, Options, Policy};

use crate::{can_be_launched_again, every_schedule, some_schedules};

/// Returns a small configuration; fields that it does not set are as shipped.
fn small() -> Forward {
    Forward {
        head_dim: 64,
        value_head_dim: 64,
        rules: Rules::DENSE,
        warpgroups: 2,
        key_block: 64,
        stages: 2,
        query_buffers: 1,
        ..every_fp8()[0]
    }
}

/// Descale factors per head for all three inputs.
const DESCALES: Descales =
    Descales { query: Descale::PerHead, ..Descales::of_cache(Descale::PerHead) };

/// A problem's size: the number of sequences, `[queries, keys]`, `[query heads, key heads]`.
type Size = (usize, [usize; 2], [usize; 2]);

fn call(forward: Forward, (batch, lengths, heads): Size) -> Call {
    Call::new(Configuration::Forward(forward), batch, lengths, heads)
        .with(|problem| problem.with_descales(DESCALES))
}

fn scene(forward: Forward, size: Size) -> Scene {
    call(forward, size).scene().unwrap()
}

#[test]
fn fp8_is_attention() {
    let with = |rules| Forward { rules, ..small() };
    let one = |rules| Forward { warpgroups: 1, query_buffers: 2, ..with(rules) };
    let wide = Forward { head_dim: 128, value_head_dim: 256, key_block: 96, ..small() };
    let sinks = Rules { sinks: true, ..Rules::LOCAL };
    let chunked = Rules { mask: MaskKind::Chunked, ..Rules::LOCAL };
    for (forward, size) in [
        (Forward { head_dim: 80, value_head_dim: 208, ..small() }, (1, [65, 97], [2, 1])),
        (small(), (1, [130, 70], [2, 1])),
        (with(Rules::CAUSAL), (2, [150, 200], [2, 1])),
        // More queries than keys, so that some rows see no key.
        (with(Rules::CAUSAL), (1, [150, 40], [1, 1])),
        (Forward { key_block: 32, stages: 3, ..one(Rules::CAUSAL) }, (1, [200, 65], [2, 2])),
        (wide, (1, [65, 200], [1, 1])),
        (Forward { head_dim: 80, value_head_dim: 48, ..small() }, (1, [65, 97], [2, 1])),
        (one(sinks), (1, [130, 130], [2, 1])),
        (one(Rules::EVERY), (2, [130, 130], [2, 1])),
        (with(Rules::CAUSAL.capped()), (1, [70, 97], [2, 1])),
        (with(Rules { alibi: true, ..Rules::DENSE }), (1, [70, 97], [2, 1])),
        (with(chunked), (1, [129, 161], [2, 1])),
    ] {
        every_schedule(&scene(forward, size), Mode::Checked, 1);
    }
}

/// Without factors, with those of keys alone, in f16, and tensors with gaps.
#[test]
fn fp8_is_attention_however_it_is_asked() {
    let size = (2, [70, 97], [4, 2]);
    let none = call(small(), size).with(|it| it.with_descales(Descales::NONE));
    let keys = Descales { key: Descale::PerHead, ..Descales::NONE };
    let halves = call(Forward { output: Element::F16, ..small() }, size);
    for call in [
        none,
        call(small(), size).with(|it| it.with_descales(keys)),
        halves,
        Call { order: Order::HeadsFirst, ..call(small(), size) },
        call(small(), (1, [64, 300], [1, 1])).with_keys(KeyMagnitudes::Valley),
        call(small(), (1, [64, 300], [1, 1])).with_keys(KeyMagnitudes::Spikes),
    ] {
        every_schedule(&call.scene().unwrap(), Mode::Checked, 1);
    }
}

/// Ragged batches with gaps between sequences, packed, and in pages.
#[test]
fn fp8_prefill_is_attention() {
    let tile = Forward { rules: Rules::LOCAL, warpgroups: 1, ..small() };
    let ragged = || Ragged::new(vec![2, 70, 1, 0], vec![1, 71, 0, 5]);
    for (page_rows, place) in [
        (None, PlacementKind::PackedWithGaps),
        (None, PlacementKind::Entries),
        (Some(16), PlacementKind::Paged(32)),
    ] {
        let kernel = Configuration::Prefill(Prefill { tile, page_rows, single_tile: false });
        let call = Call::ragged(kernel, ragged().over(place), [4, 2])
            .with(|problem| problem.with_descales(DESCALES));
        let scene = call.scene().unwrap();
        every_schedule(&scene, Mode::Checked, 1);
        can_be_launched_again(&scene);
    }
}

#[test]
fn fp8_under_many_schedules() {
    for rules in [Rules::DENSE, Rules::CAUSAL] {
        for (warpgroups, ping_pong) in [(2, true), (2, false), (3, true)] {
            let forward = Forward { rules, warpgroups, ping_pong, key_block: 32, ..small() };
            let scene = scene(forward, (1, [129, 97], [1, 1]));
            every_schedule(&scene, Mode::Values, 16);
            every_schedule(&scene, Mode::Checked, 2);
        }
    }
}

/// Hopper accumulates 8-bit products with few bits, as the simulator models it. Still the error
/// does not grow with the number of keys, since no such sum is longer than a key block. Values have
/// a mean, so that the errors do not cancel.
#[test]
fn fp8_stays_accurate_over_many_keys() {
    let forward = Forward { head_dim: 128, value_head_dim: 128, warpgroups: 1, ..small() };
    let forward = Forward { key_block: 192, ..forward };
    let options = Options {
        fp8_accumulation: Fp8Accumulation::Truncated,
        ..Options::values(Policy::Earliest, 0)
    };
    for keys in [1024, 4096] {
        let call = Call { value_mean: 0.5, ..call(forward, (1, [64, keys], [1, 1])) };
        let scene = call.scene().unwrap();
        let (memory, _) = scene.run(&options).unwrap();
        let accuracy = scene.judge(&memory);
        assert!(accuracy.passed(), "{keys} keys: {accuracy}");
        let output = &scene.results[0];
        let found = decode(output.element, memory.bytes(output.buffer));
        let square = |sum: f64, x: f64| sum + x * x;
        let error = found.iter().zip(&output.exact).map(|(a, b)| a - b).fold(0.0, square);
        let size = output.exact.iter().copied().fold(0.0, square);
        let relative = (error / size).sqrt();
        assert!(relative < 8e-3, "{keys} keys: {relative}");
    }
}

/// Log-sum-exps lose only what the tensor cores truncate from scores: with one key a log-sum-exp is
/// a score, and with one row no other row has a larger error. One in eight of such problems had a
/// log-sum-exp beyond the accuracy rule while its baseline did not truncate the sums of steps.
#[test]
fn fp8_log_sum_exps_lose_what_the_tensor_cores_cut() {
    let options = Options {
        fp8_accumulation: Fp8Accumulation::Truncated,
        ..Options::values(Policy::Earliest, 0)
    };
    for head_dim in (32..=256).step_by(32) {
        let forward = Forward { head_dim, warpgroups: 1, ..small() };
        for keys in [1, 3] {
            let scene = scene(forward, (1, [1, keys], [1, 1]));
            let (memory, _) = scene.run(&options).unwrap();
            let accuracy = scene.judge(&memory);
            assert!(accuracy.passed(), "head dim {head_dim}, {keys} keys: {accuracy}");
        }
    }
}

/// Every shipped configuration, with partial blocks at the ends, is right and has no bank
/// conflicts, also in the transposition of V.
#[test]
fn every_shipped_fp8_kernel() {
    let forwards = every_fp8().into_iter().map(Configuration::Forward);
    let prefills = every_fp8_prefill().into_iter().map(Configuration::Prefill);
    for (index, kernel) in forwards.chain(prefills).enumerate() {
        let scene = Scene::small(&kernel).unwrap();
        every_schedule(&scene, Mode::Values, 2);
        let checked = schedules(&Policy::HOSTILE, index as u64..index as u64 + 1);
        some_schedules(&scene, Mode::Checked, &checked);
        let (_, report) = scene.run(&Options::default()).unwrap();
        assert_eq!(report.counts.get(Measure::BankConflicts), 0, "{}", kernel.name());
    }
}
