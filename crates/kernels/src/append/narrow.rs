//! Stores rows into an 8-bit cache: rotated, divided by their scale and rounded once.

use ptx::{
    Builder, E4M3x2, E5M2x2, Element, Expression, F32, GlobalAddress, Int8, Pair, Reg, StoreHint,
    U32, U64,
};

use super::{Append, RotaryRegisters, rotate_pair};
use crate::cache::{LEAST_MAGNITUDE, ScaleSource};
use crate::element::load_pair_as_f32;

/// How a row of keys or values is scaled and rotated.
pub(super) struct Rounded<'a> {
    pub(super) scales: &'a ScaleSource,
    /// The tables of its rotation and its position, for keys with rotary embeddings.
    pub(super) rotated: Option<(&'a RotaryRegisters, Reg<U32>)>,
    pub(super) columns: u32,
}

/// A callback for two neighbouring columns; its first number is the index of the pair in the row.
type Body<'a> = dyn FnMut(&mut Builder, Reg<U32>, [Reg<F32>; 2]) + 'a;

/// Returns the largest finite number of an 8-bit element.
const fn largest(element: Element) -> f32 {
    match element {
        Element::E5M2 => 57344.0,
        Element::Int8 => Int8::LARGEST,
        _ => 448.0,
    }
}

impl Rounded<'_> {
    /// Rounds a row of a sequence from its address in the new tensor to that in the cache. `place`
    /// is the row's batch entry or page, row and head in the cache.
    pub(super) fn store(
        &self,
        k: &mut Builder,
        append: &Append,
        [from, to]: [Reg<GlobalAddress>; 2],
        sequence: Reg<U32>,
        place: [Reg<U32>; 3],
    ) {
        let scale = match self.scales {
            ScaleSource::One => None,
            ScaleSource::PerHead(_) => self.scales.of_head(k, sequence, place[2]),
            ScaleSource::PerToken(scales) => {
                let scale = self.find(k, append, from);
                let address = scales.row(k, Element::F32, place);
                let lane = k.lane();
                k.if_(lane.equals(0), |k| k.store(address, scale));
                Some(scale)
            }
        };
        let reciprocal = scale.map(|scale| {
            let one = k.eval::<F32>(1.0);
            k.divide_rounded(one, scale)
        });
        self.each_pair(k, append.element, from, &mut |k, word, pair| {
            let pair = match reciprocal {
                Some(reciprocal) => pair.map(|number| k.eval(number * reciprocal)),
                None => pair,
            };
            let at = k.eval(to + (word * 2).convert::<U64>());
            match append.cache.element {
                Element::E5M2 => store_pair::<E5M2x2>(k, at, pair),
                Element::Int8 => {
                    let pair = k.pack_int8(pair[0], pair[1]);
                    k.store(at, pair);
                }
                _ => store_pair::<E4M3x2>(k, at, pair),
            }
        });
    }

    /// Returns the scale of a row, with which its largest magnitude becomes the largest number of
    /// the 8-bit element.
    fn find(&self, k: &mut Builder, append: &Append, from: Reg<GlobalAddress>) -> Reg<F32> {
        let most = k.variable(0.0);
        self.each_pair(k, append.element, from, &mut |k, _, pair| {
            for number in pair {
                let size = k.absolute(number);
                k.set(most, most.maximum(size));
            }
        });
        let most = k.reduce_lanes(most, 32, |a, b| a.maximum(b));
        k.eval(most.maximum(LEAST_MAGNITUDE) * (1.0 / largest(append.cache.element)))
    }

    /// Calls `body` for the pairs of neighbouring columns of a row, rotated; the lanes of the warp
    /// share them.
    fn each_pair(
        &self,
        k: &mut Builder,
        element: Element,
        from: Reg<GlobalAddress>,
        body: &mut Body<'_>,
    ) {
        let load = |k: &mut Builder, base: Reg<GlobalAddress>, word: Reg<U32>| {
            load_pair_as_f32(k, element, base + (word * 4).convert::<U64>())
        };
        let lane = k.lane();
        let rotated = self.rotated.map_or(0, |(angles, _)| angles.rotary.dim);
        if let Some((angles, position)) = self.rotated {
            let half = rotated / 2;
            let position = angles.bounded(k, position);
            let first = position.convert::<U64>() * (half * element.bytes());
            let first = k.eval(first);
            let [cosines, sines] = [angles.cosines, angles.sines].map(|it| k.eval(it + first));
            if angles.rotary.interleaved {
                k.for_range(lane, half, 32, |k, word| {
                    let angle = k.eval((word * element.bytes()).convert::<U64>());
                    let cosine = super::load_as_f32(k, element, cosines + angle);
                    let sine = super::load_as_f32(k, element, sines + angle);
                    let pair = load(k, from, word);
                    let rotated = rotate_pair(k, pair, [cosine, sine]);
                    body(k, word, rotated);
                });
            } else {
                k.for_range(lane, half / 2, 32, |k, word| {
                    let other = k.eval(word + half / 2);
                    let [x, y] = [word, other].map(|word| load(k, from, word));
                    let [cosine, sine] = [cosines, sines].map(|table| load(k, table, word));
                    let pairs =
                        [0, 1].map(|it| rotate_pair(k, [x[it], y[it]], [cosine[it], sine[it]]));
                    body(k, word, pairs.map(|[x, _]| x));
                    body(k, other, pairs.map(|[_, y]| y));
                });
            }
        }
        k.for_range(lane + rotated / 2, self.columns / 2, 32, |k, word| {
            let pair = load(k, from, word);
            body(k, word, pair);
        });
    }
}

fn store_pair<T: Pair>(k: &mut Builder, at: Reg<GlobalAddress>, [low, high]: [Reg<F32>; 2]) {
    let pair = k.pack::<T>(low, high);
    k.store_vector(at, &[pair], StoreHint::default());
}
