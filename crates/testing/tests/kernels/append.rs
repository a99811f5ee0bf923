//! The append kernel in the simulator: new keys and values into caches.

use flashcore_testing::scene::{AppendSize, Scene};
use kernels::append::{Append, Rotary};
use kernels::{Cache, Scales};
use ptx::{Element, Target};
use sim::Mode;

use crate::every_schedule;

#[test]
fn new_tokens_are_where_they_belong() {
    let plain = Append {
        target: Target::SM_80,
        element: Element::BF16,
        cache: Cache::plain(Element::BF16),
        head_dim: 64,
        value_head_dim: 40,
        paged: false,
        rotary: None,
    };
    let half = |append| {
        let element = Element::F16;
        Append { element, cache: Cache::plain(element), ..append }
    };
    let rotary = |dim, interleaved| Some(Rotary { dim, interleaved });
    for append in [
        plain,
        Append { paged: true, ..plain },
        // Head dims that attention takes filled up, or in pieces.
        Append { head_dim: 62, value_head_dim: 318, ..plain },
        Append { rotary: rotary(64, false), ..plain },
        Append { rotary: rotary(64, true), paged: true, ..plain },
        Append { rotary: rotary(16, false), paged: true, ..half(plain) },
        Append { rotary: rotary(48, true), head_dim: 128, ..half(plain) },
    ] {
        for in_order in [true, false] {
            let size = AppendSize { in_order, ..AppendSize::small() };
            every_schedule(&Scene::append(append, &size).unwrap(), Mode::Checked, 1);
        }
    }
}

#[test]
fn packed_tokens_find_their_sequences() {
    for paged in [false, true] {
        let append = Append {
            target: Target::SM_80,
            element: Element::BF16,
            cache: Cache::plain(Element::BF16),
            head_dim: 8,
            value_head_dim: 8,
            paged,
            rotary: Some(Rotary { dim: 8, interleaved: false }),
        };
        for (hostile, spare) in [(false, 0), (false, 3), (true, 0)] {
            let size = AppendSize { hostile, spare, ..AppendSize::many() };
            every_schedule(&Scene::append(append, &size).unwrap(), Mode::Checked, 1);
        }
    }
}

#[test]
fn new_tokens_are_rounded_to_8_bits() {
    use Element::{BF16, E4M3, E5M2, F16, Int8};
    use Scales::{One, PerHead, PerToken};
    let rotary = |dim, interleaved| Some(Rotary { dim, interleaved });
    for (element, narrow, [key_scales, value_scales], paged, rotary) in [
        (BF16, E4M3, [One, One], false, None),
        (BF16, E4M3, [PerHead, PerHead], true, None),
        (F16, E5M2, [PerToken, PerHead], false, rotary(64, false)),
        (BF16, E4M3, [PerToken, PerToken], true, rotary(64, true)),
        (BF16, E4M3, [PerHead, PerToken], true, rotary(16, false)),
        (F16, E5M2, [PerToken, PerToken], false, rotary(50, true)),
        (BF16, Int8, [PerToken, PerHead], true, None),
        (F16, Int8, [One, PerToken], false, rotary(64, false)),
    ] {
        let append = Append {
            target: Target::SM_89,
            element,
            cache: Cache { element: narrow, key_scales, value_scales },
            head_dim: 64,
            value_head_dim: 40,
            paged,
            rotary,
        };
        every_schedule(&Scene::append(append, &AppendSize::small()).unwrap(), Mode::Checked, 1);
        let hostile = AppendSize { hostile: true, ..AppendSize::small() };
        every_schedule(&Scene::append(append, &hostile).unwrap(), Mode::Checked, 1);
    }
}

#[test]
fn widths_that_make_no_pairs_are_refused() {
    let good = Append {
        target: Target::SM_80,
        element: Element::F16,
        cache: Cache::plain(Element::F16),
        head_dim: 64,
        value_head_dim: 64,
        paged: false,
        rotary: None,
    };
    for bad in [
        Append { head_dim: 7, ..good },
        Append { rotary: Some(Rotary { dim: 66, interleaved: false }), ..good },
        Append { rotary: Some(Rotary { dim: 5, interleaved: true }), ..good },
        Append { element: Element::F32, ..good },
        Append { cache: Cache::plain(Element::BF16), ..good },
        Append { cache: Cache::plain(Element::E4M3), ..good },
    ] {
        assert!(bad.program().is_err(), "{}", bad.name());
    }
}
