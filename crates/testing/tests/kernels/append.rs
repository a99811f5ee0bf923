//! New keys and values into caches.

use flashcore_testing::scene::{AppendSize, Scene};
use kernels::append::{Append, Rotary};
use ptx::{Element, Target};
use sim::Mode;

use crate::every_schedule;

#[test]
fn new_tokens_are_where_they_belong() {
    let plain = Append {
        target: Target::SM_80,
        element: Element::BF16,
        head_dim: 64,
        value_head_dim: 40,
        paged: false,
        rotary: None,
    };
    let rotary = |dim, interleaved| Some(Rotary { dim, interleaved });
    for append in [
        plain,
        Append { paged: true, ..plain },
        Append { rotary: rotary(64, false), ..plain },
        Append { rotary: rotary(64, true), paged: true, ..plain },
        Append { rotary: rotary(16, false), element: Element::F16, paged: true, ..plain },
        Append { rotary: rotary(48, true), element: Element::F16, head_dim: 128, ..plain },
    ] {
        for in_order in [true, false] {
            let size = AppendSize { in_order, ..AppendSize::small() };
            every_schedule(&Scene::append(append, &size).unwrap(), Mode::Checked, 1);
        }
    }
}

#[test]
fn widths_that_make_no_pairs_are_refused() {
    let good = Append {
        target: Target::SM_80,
        element: Element::F16,
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
    ] {
        assert!(bad.program().is_err(), "{}", bad.name());
    }
}
