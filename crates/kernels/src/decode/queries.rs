//! The queries of a sequence, as A fragments of the products with keys.
//!
//! 8-bit keys are widened to `f16`, which holds all of their values, so queries become `f16` too.
//! `bf16` queries have fewer digits than `f16` and more range: each row is multiplied by the power
//! of two that brings its largest element just below the largest `f16`, and its scores are divided
//! by it. Elements that underflow `f16` are then below 2^-40 of the row's largest, less than the
//! precision that a sum in `f32` keeps.

use ptx::{Builder, Expression, F32, FragmentA, GlobalAddress, Packed, Reg, U32, Value};

use super::schedule::Cursor;
use super::{Decode, Numbers};
use crate::strides::Strides;

/// The query fragments of a warp, and the factors that their scores still need.
pub(super) struct Queries {
    /// Fragments by sixteen query rows, then by sixteen columns.
    pub(super) fragments: Vec<Vec<FragmentA>>,
    /// Factors of the scores of the thread's row, for each eight query rows.
    pub(super) factors: Vec<Option<Reg<F32>>>,
}

/// The thread's row among eight query rows.
pub(super) struct Row {
    pub(super) query: Reg<U32>,
    pub(super) head: Reg<U32>,
    /// Whether the row is one of the sequence's.
    pub(super) exists: Reg<ptx::Pred>,
}

impl Row {
    /// Returns the thread's row of a group of eight. Row `query * group + member` is query head
    /// `member` of the group at `query`.
    pub(super) fn of(k: &mut Builder, numbers: &Numbers, cursor: &Cursor, eight: u32) -> Self {
        let index = k.eval(numbers.first_row + 8 * eight + numbers.lane / 4);
        let (query, member) = numbers.group.divide(k, index);
        Row {
            query,
            head: k.eval(numbers.key_head * numbers.group.number + member),
            exists: k.eval(query.less(cursor.queries)),
        }
    }
}

impl Queries {
    pub(super) const NONE: Queries = Queries { fragments: Vec::new(), factors: Vec::new() };

    /// Loads the queries of the cursor's sequence; rows beyond the last are zeros.
    pub(super) fn load(
        k: &mut Builder,
        decode: &Decode,
        numbers: &Numbers,
        (address, strides): (Reg<GlobalAddress>, &Strides),
        cursor: &Cursor,
    ) -> Self {
        let rows = (0..decode.rows / 8).map(|eight| {
            let row = Row::of(k, numbers, cursor, eight);
            let words = load_row(k, decode, numbers, (address, strides), cursor, &row);
            match decode.cache.is_8_bit() && decode.element != decode.operand() {
                true => to_f16(k, words),
                false => (words, None),
            }
        });
        let (words, factors): (Vec<_>, Vec<_>) = rows.unzip();
        let nothing = k.packed_zero(decode.operand());
        let fragment = |eights: &[Vec<[Packed; 2]>], step: usize| {
            let first = eights[0][step];
            let second = eights.get(1).map_or([nothing; 2], |eight| eight[step]);
            FragmentA([first[0], second[0], first[1], second[1]])
        };
        let steps = 0..words[0].len();
        let sixteen = |eights| steps.clone().map(|step| fragment(eights, step)).collect();
        Queries { fragments: words.chunks(2).map(sixteen).collect(), factors }
    }
}

/// Loads the thread's two packed pairs of each step of sixteen columns.
fn load_row(
    k: &mut Builder,
    decode: &Decode,
    numbers: &Numbers,
    (address, strides): (Reg<GlobalAddress>, &Strides),
    cursor: &Cursor,
    row: &Row,
) -> Vec<[Packed; 2]> {
    // `ldmatrix` gives a thread four neighbouring columns of 8-bit keys, so the pairs of a step are
    // neighbours; with 16-bit keys they are eight columns apart.
    let (apart, thread_bytes) = if decode.cache.is_8_bit() { (4, 8) } else { (16, 4) };
    let steps = decode.head_dim.div_ceil(16);
    let words: Vec<[Packed; 2]> =
        (0..steps).map(|_| [0, 1].map(|_| k.packed_zero(decode.element))).collect();
    k.if_(row.exists, |k| {
        let place = k.eval(cursor.first_query + row.query);
        let at = [cursor.sequence(), place, row.head];
        let address = strides.row_address(k, address, decode.element, at);
        let column = k.eval(numbers.lane % 4 * thread_bytes);
        let address = k.eval(address + column.convert::<ptx::U64>());
        for (step, pair) in (0u32..).zip(&words) {
            for (half, word) in (0u32..).zip(pair) {
                // With 16-bit keys the last step may have only eight columns.
                if 16 * step + 8 * half < decode.head_dim {
                    k.load_packed_into(*word, address + (32 * step + apart * half));
                }
            }
        }
    });
    words
}

/// The largest exponent of `f16`.
const LARGEST: u32 = 15;

/// Converts a row of `bf16` to `f16` times a power of two; returns the row and the inverse power.
fn to_f16(k: &mut Builder, words: Vec<[Packed; 2]>) -> (Vec<[Packed; 2]>, Option<Reg<F32>>) {
    const MANTISSA: u32 = 23;
    const BIAS: u32 = 127;
    let mut largest = k.eval::<F32>(0.0);
    for word in words.iter().flatten() {
        for number in k.unpack_as_f32(*word) {
            let size = k.absolute(number);
            largest = k.eval(largest.maximum(size));
        }
    }
    // Four neighbouring lanes share a row.
    let largest = k.reduce_lanes(largest, 4, |a, b| a.maximum(b));
    // Clamped so that both powers of two are normal numbers. The clamp changes only rows whose
    // largest element is below 2^-110, whose scores are negligible.
    let exponent = k.eval((largest.reinterpret::<U32>() >> MANTISSA).maximum(LARGEST + 1));
    let up = Value::<U32>::from(LARGEST + 2 * BIAS) - exponent;
    let up = k.eval((up << MANTISSA).reinterpret::<F32>());
    let down = k.eval(((exponent - LARGEST) << MANTISSA).reinterpret::<F32>());
    let rounded = words.iter().map(|pair| {
        pair.map(|word| {
            let [low, high] = k.unpack_as_f32(word);
            k.pack_as(ptx::Element::F16, low * up, high * up)
        })
    });
    (rounded.collect(), Some(down))
}
