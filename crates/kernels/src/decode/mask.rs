//! Which tiles need masking, and clearing of values that no query sees.

use ptx::{Builder, Expression, Pred, Reg, RowCopies, S32, SharedAddress, U32, Value};

use super::copies::Ring;
use super::schedule::{Cursor, own_queries};
use super::{Decode, Numbers};

/// The keys that the queries of a sequence see, over the queries that the block counts
/// ([`own_queries`]).
pub(super) struct Mask {
    /// Begin and end (exclusive) of the keys that every query sees.
    inner: [Reg<S32>; 2],
    /// Begin and end (exclusive) of the keys that some query sees.
    outer: [Reg<S32>; 2],
}

impl Mask {
    pub(super) fn new(
        k: &mut Builder,
        decode: &Decode,
        numbers: &Numbers,
        cursor: &Cursor,
    ) -> Self {
        let [first, last] = own_queries(k, decode, numbers, cursor.queries);
        let [outer_begin, inner_end] = cursor.visible(k, first);
        let [inner_begin, outer_end] = cursor.visible(k, last);
        Mask { inner: [inner_begin, inner_end], outer: [outer_begin, outer_end] }
    }

    /// Returns whether some query does not see some key of the tile from `first_key` on.
    pub(super) fn touches(&self, decode: &Decode, first_key: Reg<U32>) -> Value<Pred> {
        let first = || first_key.reinterpret::<S32>();
        let [begin, end] = self.inner;
        first().less(begin) | (first() + decode.tile_keys as i32).greater(end)
    }

    /// Zeroes the values that no query sees, and their scales. Memory beyond a sequence may hold
    /// NaN or infinity, which a probability of zero does not cancel.
    pub(super) fn clear(
        &self,
        k: &mut Builder,
        decode: &Decode,
        numbers: &Numbers,
        (ring, values): (&Ring<'_>, Reg<SharedAddress>),
        first_key: Reg<U32>,
    ) {
        let copies = RowCopies::new(decode.value_layout(), decode.value_head_dim);
        let zero = [0; 4].map(|zero| k.eval::<U32>(zero));
        let [begin, end] = self.outer;
        let hidden = |key: Reg<S32>| key.less(begin) | key.at_least(end);
        for pass in 0..decode.tile_keys / 4 {
            let row = k.eval(numbers.lane / 8 + 4 * pass);
            let key = k.eval((first_key + row).reinterpret::<S32>());
            k.if_(hidden(key), |k| {
                copies.clear_row(k, values, (row, numbers.lane % 8), &zero);
            });
        }
        ring.scales.clear(k, ring.stage, first_key, hidden);
        k.warp_sync();
    }
}
