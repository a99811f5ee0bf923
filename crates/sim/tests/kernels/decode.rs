//! Decode: sequences of unequal lengths over caches.

use flashcore_sim as sim;
use kernels::Decode;
use ptx::{Element, Target};
use sim::scene::{DecodeSize, Scene};
use sim::{Budget, Measure, Mode, Options, Policy};

use crate::{can_be_launched_again, every_schedule};

/// A small configuration that has every part.
fn small() -> Decode {
    Decode {
        target: Target::SM_80,
        element: Element::BF16,
        head_dim: 64,
        value_head_dim: 64,
        rows: 8,
        paged: false,
        softcap: false,
        alibi: false,
        sinks: false,
        warps: 2,
        tile_keys: 16,
        stages: 2,
        blocks: 1,
    }
}

#[test]
fn decode_is_attention() {
    let size = DecodeSize::small(&small());
    let causal = DecodeSize { queries: 3, window: (1 << 29, 0), ..size.clone() };
    let window = DecodeSize { window: (20, 0), teams: 2, ..size.clone() };
    let everything =
        DecodeSize { queries: 2, heads: 8, key_heads: 2, window: (25, 3), ..size.clone() };
    for (decode, size) in [
        (small(), size.clone()),
        (small(), DecodeSize { teams: 1, ..size.clone() }),
        (small(), DecodeSize { teams: 9, ..size.clone() }),
        (small(), causal.clone()),
        (small(), window),
        (Decode { paged: true, ..small() }, DecodeSize { page_size: 1, ..size.clone() }),
        (Decode { paged: true, ..small() }, DecodeSize { page_size: 5, ..size.clone() }),
        (Decode { paged: true, ..small() }, DecodeSize { page_size: 32, ..size.clone() }),
        (small(), DecodeSize { packed_keys: true, ..size.clone() }),
        (small(), DecodeSize { used: vec![2, 3, 0, 1], packed_keys: true, ..causal.clone() }),
        (
            Decode { paged: true, ..small() },
            DecodeSize { used: vec![2, 3, 0, 1], ..causal.clone() },
        ),
        (Decode { softcap: true, ..small() }, size.clone()),
        (Decode { alibi: true, ..small() }, causal.clone()),
        (Decode { sinks: true, ..small() }, size.clone()),
        (
            Decode { softcap: true, alibi: true, sinks: true, paged: true, rows: 16, ..small() },
            everything.clone(),
        ),
        // More rows than a block has.
        (small(), DecodeSize { queries: 5, ..causal }),
        (
            Decode { rows: 16, tile_keys: 32, stages: 3, ..small() },
            DecodeSize { heads: 22, ..size.clone() },
        ),
        (
            Decode { element: Element::F16, head_dim: 40, value_head_dim: 72, ..small() },
            size.clone(),
        ),
        (Decode { head_dim: 72, value_head_dim: 40, ..small() }, size.clone()),
        (Decode { head_dim: 128, value_head_dim: 128, rows: 16, warps: 4, ..small() }, size),
    ] {
        every_schedule(&Scene::decode(decode, &size).unwrap(), Mode::Checked, 1);
    }
}

#[test]
fn decode_under_many_schedules() {
    for decode in [small(), Decode { paged: true, stages: 3, ..small() }] {
        let scene = Scene::decode(decode, &DecodeSize::small(&decode)).unwrap();
        every_schedule(&scene, Mode::Values, 32);
        every_schedule(&scene, Mode::Checked, 4);
    }
}

/// The counters are as they were found, so that the next launch finds them so.
#[test]
fn a_second_launch_finds_everything_in_order() {
    let scene = Scene::decode(small(), &DecodeSize::small(&small())).unwrap();
    can_be_launched_again(&scene);
}

#[test]
fn no_two_lanes_meet_at_a_bank() {
    // With one team: the factors of parts are written once, and not for speed.
    let size = |decode: &Decode| DecodeSize { teams: 1, ..DecodeSize::small(decode) };
    for decode in [small(), Decode { head_dim: 128, value_head_dim: 128, ..small() }] {
        let scene = Scene::decode(decode, &size(&decode)).unwrap();
        let budget = Budget::default().at_most(Measure::BankConflicts, 0);
        let options = Options { budget, ..Options::values(Policy::Earliest, 0) };
        scene.run(&options).unwrap_or_else(|failure| panic!("{}: {failure}", scene.program.name));
    }
}
