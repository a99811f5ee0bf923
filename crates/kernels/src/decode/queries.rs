//! The queries of a sequence, as A fragments of the products with keys, and what else belongs to its
//! rows: slopes, and the scale of its keys.
//!
//! All are requested before the sequence's second tile is copied: memory answers in order, so behind
//! those copies they would arrive last, when all the tiles have long been there to be computed. The
//! loads stand in a branch, since the assembler moves others behind the copies.
//!
//! 8-bit keys are widened to `f16`, which holds all of their values, so queries become `f16` too.
//! `bf16` queries have fewer digits than `f16` and more range: each row is multiplied by the power
//! of two that brings its largest element just below the largest `f16`, and its scores are divided
//! by it. Elements that underflow `f16` are then below 2^-40 of the row's largest, less than the
//! precision that a sum in `f32` keeps.

use ptx::{Builder, Expression, F32, FragmentA, GlobalAddress, Packed, Reg, U32, U64, Value};

use super::scales::Scaling;
use super::schedule::Cursor;
use super::{Decode, Numbers};
use crate::attention::scores::Slopes;
use crate::cache::{HeadScales, ScaleSource};
use crate::parameter::Tensor;
use crate::strides::Strides;

/// What a block reads of a sequence for each query row: where it lies, and the registers that it is
/// loaded into.
pub(super) struct Inputs {
    queries: Reg<GlobalAddress>,
    strides: Strides,
    slopes: Option<Slopes>,
    /// Where the scales of keys are, and that of the sequence.
    key_scale: Option<(HeadScales, Reg<F32>)>,
    rows: Vec<InputRow>,
}

/// The inputs of the thread's row among eight query rows.
struct InputRow {
    /// Two packed pairs of each step of sixteen columns.
    words: Vec<[Packed; 2]>,
    /// The ALiBi slope, in natural units.
    slope: Option<Reg<F32>>,
}

impl Inputs {
    pub(super) fn parameters(k: &mut Builder, decode: &Decode, scaling: &Scaling) -> Self {
        let queries = Tensor::Query.address(k);
        let strides = Strides::parameters(k, Tensor::Query);
        let slopes = decode.rules.alibi.then(|| Slopes::parameters(k));
        let steps = decode.head_dim.div_ceil(16);
        let rows = (0..decode.rows / 8).map(|_| InputRow {
            words: (0..steps).map(|_| [0, 1].map(|_| k.packed(decode.element))).collect(),
            slope: slopes.map(|_| k.variable(0.0)),
        });
        let rows = rows.collect();
        let key_scale = match scaling.keys {
            ScaleSource::PerHead(scales) => Some((scales, k.variable(0.0))),
            ScaleSource::One | ScaleSource::PerToken(_) => None,
        };
        Inputs { queries, strides, slopes, key_scale, rows }
    }

    /// Sets all rows to zeros, before `request`, and where it may follow: otherwise the rows of before
    /// would keep their registers until then.
    pub(super) fn clear(&self, k: &mut Builder) {
        for InputRow { words, slope } in &self.rows {
            words.iter().flatten().for_each(|word| k.clear_packed(*word));
            if let Some(slope) = slope {
                k.set(*slope, 0.0);
            }
        }
        if let Some((_, scale)) = &self.key_scale {
            k.set(*scale, 0.0);
        }
    }

    /// Requests the rows of the cursor's sequence; those beyond the last remain zeros.
    pub(super) fn request(
        &self,
        k: &mut Builder,
        decode: &Decode,
        numbers: &Numbers,
        cursor: &Cursor,
    ) {
        for (eight, InputRow { words, slope }) in (0..).zip(&self.rows) {
            let row = Row::of(k, numbers, cursor, eight);
            k.if_(row.exists, |k| {
                // A thread that has a later row has this one.
                if let (0, Some((scales, scale))) = (eight, &self.key_scale) {
                    let loaded = scales.of(k, cursor.sequence(), numbers.key_head);
                    k.set(*scale, loaded);
                }
                if let Some((slope, slopes)) = slope.zip(self.slopes) {
                    let loaded = slopes.load(k, cursor.sequence(), row.head);
                    k.set(slope, loaded);
                }
                self.load_row(k, decode, numbers, cursor, &row, words);
            });
        }
    }

    /// Loads the thread's pairs of a row.
    fn load_row(
        &self,
        k: &mut Builder,
        decode: &Decode,
        numbers: &Numbers,
        cursor: &Cursor,
        row: &Row,
        words: &[[Packed; 2]],
    ) {
        // `ldmatrix` gives a thread four neighbouring columns of 8-bit keys, so the pairs of a step
        // are neighbours; with 16-bit keys they are eight columns apart.
        let (apart, thread_bytes) = if decode.cache.is_8_bit() { (4, 8) } else { (16, 4) };
        let place = k.eval(cursor.first_query + row.query);
        let at = [cursor.sequence(), place, row.head];
        let address = self.strides.row_address(k, self.queries, decode.element, at);
        let column = k.eval(numbers.lane % 4 * thread_bytes);
        let address = k.eval(address + column.convert::<U64>());
        for (step, pair) in (0u32..).zip(words) {
            for (half, word) in (0u32..).zip(pair) {
                // With 16-bit keys the last step may have only eight columns.
                if 16 * step + 8 * half < decode.head_dim {
                    k.load_packed_into(*word, address + (32 * step + apart * half));
                }
            }
        }
    }

    /// Returns the slope of the thread's row among the eight rows from `8 * eight` on.
    pub(super) fn slope(&self, eight: u32) -> Option<Reg<F32>> {
        self.rows[eight as usize].slope
    }
}

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
    /// Returns the queries that were requested, with the per-head key scale among their factors.
    pub(super) fn new(k: &mut Builder, decode: &Decode, inputs: &Inputs) -> Self {
        let key_scale = inputs.key_scale.as_ref().map(|(_, scale)| *scale);
        let rows = inputs.rows.iter().map(|InputRow { words, .. }| {
            let (words, factor) =
                match decode.cache.is_8_bit() && decode.element != decode.operand() {
                    true => to_f16(k, words),
                    false => (words.clone(), None),
                };
            let factors = [factor, key_scale].into_iter().flatten();
            (words, factors.reduce(|a, b| k.eval(a * b)))
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

/// The largest exponent of `f16`.
const LARGEST: u32 = 15;

/// Converts a row of `bf16` to `f16` times a power of two; returns the row and the inverse power.
fn to_f16(k: &mut Builder, words: &[[Packed; 2]]) -> (Vec<[Packed; 2]>, Option<Reg<F32>>) {
    const MANTISSA: u32 = 23;
    const BIAS: u32 = 127;
    // The eight exponent bits of the largest magnitude, at the top of a word. Of integers, so that the
    // numbers as `f32` need no registers before the scale is known; one maximum for each half of the
    // words, so that the two do not wait for each other.
    let mut largest = [0, 0].map(|zero| k.eval::<U32>(zero));
    for word in words.iter().flatten() {
        let bits = k.packed_bits(*word);
        for (largest, sign) in largest.iter_mut().zip([17u32, 1]) {
            *largest = k.eval((bits << sign).maximum(*largest));
        }
    }
    let largest = k.eval(largest[0].maximum(largest[1]));
    // Four neighbouring lanes share a row.
    let largest = k.reduce_lanes(largest, 4, |a, b| a.maximum(b));
    // Clamped so that both powers of two are normal numbers. The clamp changes only rows whose
    // largest element is below 2^-110, whose scores are negligible.
    let exponent = k.eval((largest >> (MANTISSA + 1)).maximum(LARGEST + 1));
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
