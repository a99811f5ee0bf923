//! The scales of 8-bit keys and values.
//!
//! Per-head scales are factors of a sequence's scores and outputs. Per-token scales are copied
//! beside the tiles, one for each key: those of keys multiply the columns of S, those of values
//! multiply the probabilities. The scaled probabilities are rounded to `f16`, so a warp holds its
//! outputs in units of a power of two that follows the largest value scale that it has met.

use ptx::{Builder, Expression, F32, Pred, Reg, S32, Select, SharedAddress, StoreHint, U32, Value};

use super::copies::RowSource;
use super::look_up::TilePlace;
use super::{Decode, Numbers};
use crate::cache::{ScaleSource, Scales};
use crate::parameter::Tensor;

/// The scales of keys and values, as launch parameters.
pub(super) struct Scaling {
    pub(super) keys: ScaleSource,
    pub(super) values: ScaleSource,
}

impl Scaling {
    pub(super) fn parameters(k: &mut Builder, decode: &Decode) -> Self {
        let cache = &decode.cache;
        Scaling {
            keys: ScaleSource::parameters(k, cache.key_scales, Tensor::KeyDescale),
            values: ScaleSource::parameters(k, cache.value_scales, Tensor::ValueDescale),
        }
    }
}

/// The per-token scales of one warp's tiles, in shared memory.
pub(super) struct TokenScales {
    keys: Option<TokenScale>,
    values: Option<TokenScale>,
    /// Keys per tile.
    rows: u32,
    lane: Reg<U32>,
}

/// The scales of one tensor: an array of `f32` for each stage.
struct TokenScale {
    source: RowSource,
    base: Reg<SharedAddress>,
}

impl TokenScales {
    pub(super) fn new(
        k: &mut Builder,
        decode: &Decode,
        numbers: &Numbers,
        scaling: &Scaling,
    ) -> Self {
        let mut of = |name: &str, source: &ScaleSource| {
            let ScaleSource::PerToken(strided) = source else { return None };
            let warp_bytes = decode.stages * decode.token_bytes();
            let offset = k.shared(name, decode.warps * warp_bytes, 16);
            let base = k.shared_address(offset);
            Some(TokenScale {
                source: RowSource::new(k, strided, 4, numbers.key_head),
                base: k.eval(base + numbers.warp * warp_bytes),
            })
        };
        TokenScales {
            keys: of("key scales", &scaling.keys),
            values: of("value scales", &scaling.values),
            rows: decode.tile_keys,
            lane: numbers.lane,
        }
    }

    /// Issues the copies of a tile's scales into a stage. The first `valid` exist; the others
    /// become zeros.
    pub(super) fn copy(
        &self,
        k: &mut Builder,
        stage: Reg<U32>,
        place: &TilePlace,
        valid: Reg<U32>,
    ) {
        let [entry, row] = self.own_row(k, place);
        for scale in [&self.keys, &self.values].into_iter().flatten() {
            k.if_(self.lane.less(self.rows), |k| {
                let within = scale.source.row(k, entry, row);
                let there = k.eval(self.lane.less(valid).select::<U32>(4, 0));
                let to = self.row(scale, stage) + self.lane * 4;
                k.copy_async_word(to, scale.source.address + within, Some(there));
            });
        }
    }

    /// Returns the place of the lane's own row.
    fn own_row(&self, k: &mut Builder, place: &TilePlace) -> [Reg<U32>; 2] {
        let runs = match place {
            TilePlace::OwnRow(place) => return *place,
            TilePlace::Runs(runs) => runs,
        };
        // Of one run, or of two.
        let run = self.rows / runs.len() as u32;
        let first = k.eval(self.lane.less(run));
        let [one, other] = [runs[0], runs[runs.len() - 1]];
        let [entry, row] = [0, 1].map(|it| k.eval(first.select::<U32>(one[it], other[it])));
        [entry, k.eval(row + self.lane % run)]
    }

    /// Returns the shared address of a stage's scales.
    fn row(&self, scale: &TokenScale, stage: Reg<U32>) -> Value<SharedAddress> {
        scale.base + stage * (4 * self.rows)
    }

    /// Loads the key scales of the thread's columns of the tile in a stage.
    pub(super) fn keys(&self, k: &mut Builder, stage: Reg<U32>) -> Option<Vec<Reg<F32>>> {
        self.keys.as_ref().map(|scale| self.columns(k, scale, stage))
    }

    /// Loads the value scales of the thread's columns of the tile in a stage.
    pub(super) fn values(&self, k: &mut Builder, stage: Reg<U32>) -> Option<Vec<Reg<F32>>> {
        self.values.as_ref().map(|scale| self.columns(k, scale, stage))
    }

    fn columns(&self, k: &mut Builder, scale: &TokenScale, stage: Reg<U32>) -> Vec<Reg<F32>> {
        let mine = k.eval(self.row(scale, stage) + self.lane % 4 * 8);
        let groups = 0..self.rows / 8;
        let pair = |group| k.load_vector::<F32, _, 2>(mine + 32 * group, Default::default());
        groups.flat_map(pair).collect()
    }

    /// Zeroes the scales of values that no query sees, as the values themselves are.
    pub(super) fn clear(
        &self,
        k: &mut Builder,
        stage: Reg<U32>,
        first_key: Reg<U32>,
        hidden: impl Fn(Reg<S32>) -> Value<Pred>,
    ) {
        let Some(scale) = &self.values else { return };
        let key = k.eval((first_key + self.lane).reinterpret::<S32>());
        k.if_(self.lane.less(self.rows) & hidden(key), |k| {
            let zero = k.eval::<F32>(0.0);
            let to = self.row(scale, stage) + self.lane * 4;
            k.store_vector(to, &[zero], StoreHint::default());
        });
    }
}

/// The scale of a warp's output accumulators where each token has a value scale: the bits of a
/// power of two as an `f32`.
pub(super) struct OutputScale(Reg<U32>);

impl OutputScale {
    /// Bits of the smallest and of the largest scale, for which both the scale and its reciprocal
    /// are normal numbers.
    const EXPONENTS: [u32; 2] = [1 << 23, 253 << 23];

    pub(super) fn new(k: &mut Builder, decode: &Decode) -> Option<Self> {
        let tokens = decode.cache.value_scales == Scales::PerToken;
        tokens.then(|| OutputScale(k.variable(Self::EXPONENTS[0])))
    }

    /// Raises the scale to the largest one of a tile. Returns the tile's scales divided by the
    /// new scale, and the factor by which earlier outputs shrink.
    pub(super) fn take(&self, k: &mut Builder, scales: &[Reg<F32>]) -> (Vec<Reg<F32>>, Reg<F32>) {
        let mut largest = k.absolute(scales[0]);
        for scale in &scales[1..] {
            let size = k.absolute(*scale);
            largest = k.eval(largest.maximum(size));
        }
        let largest = k.reduce_lanes(largest, 4, |a, b| a.maximum(b));
        let [_, most] = Self::EXPONENTS;
        let exponent = (largest.reinterpret::<U32>() & 0x7F80_0000u32).minimum(most);
        let new = k.eval(exponent.maximum(self.0));
        let inverse = k.eval((Value::<U32>::from(254u32 << 23) - new).reinterpret::<F32>());
        let shrink = k.eval(self.0.reinterpret::<F32>() * inverse);
        k.set(self.0, new);
        (scales.iter().map(|scale| k.eval(*scale * inverse)).collect(), shrink)
    }

    /// Returns the scale as a number.
    pub(super) fn value(&self, k: &mut Builder) -> Reg<F32> {
        k.eval(self.0.reinterpret::<F32>())
    }
}
