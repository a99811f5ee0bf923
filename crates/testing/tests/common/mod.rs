//! Shared by the tests of both passes: random problems, and checks over numbers of threads.

use std::fmt::Display;

use flashcore::Mask;
use flashcore_testing::check::{Contents, Order};
use proptest::prelude::*;

pub(crate) fn any_mask() -> impl Strategy<Value = Mask> {
    let side = || prop::option::of(0usize..150);
    prop_oneof![
        Just(Mask::NONE),
        Just(Mask::CAUSAL),
        (side(), side(), 0usize..100)
            .prop_map(|(left, right, chunk)| Mask::window(left, right).with_chunk(chunk)),
    ]
}

pub(crate) fn any_contents() -> impl Strategy<Value = (Contents, Order)> {
    let contents = prop::sample::select(vec![
        Contents::Normal,
        Contents::HugeLogits,
        Contents::TinyLogits,
        Contents::GrowingLogits,
        Contents::LateHugeKey,
        Contents::Outliers,
    ]);
    let order = prop::sample::select(vec![Order::Contiguous, Order::HeadsFirst, Order::Padded]);
    (contents, order)
}

/// Checks that the result is the same with one thread, with a few, and with more than there are
/// cores.
pub(crate) fn any_number_gives_the_same<T: PartialEq + Send>(
    what: impl Display,
    compute: impl Fn() -> T + Sync,
) {
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(&compute)
    };
    let one = on(1);
    for threads in [2, 3, 40] {
        assert!(on(threads) == one, "{what}, {threads} threads");
    }
}
