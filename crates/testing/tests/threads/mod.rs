//! How many threads compute does not show.

use std::fmt::Display;

/// The same comes out of one thread, of a few and of more than there are cores.
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
