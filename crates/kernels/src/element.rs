//! Loads and stores of elements in memory as `f32`.

use ptx::{
    AddressOf, BF16, BF16x2, Builder, Element, Expression, F16, F16x2, F32, GlobalAddress,
    LoadHint, Reg, U32, Value,
};

use crate::is_16_bit;

/// Loads one element and converts it to `f32`. There is no scalar form of the 8-bit types: they
/// must not be passed.
#[track_caller]
pub(crate) fn load_as_f32(
    k: &mut Builder,
    element: Element,
    address: Value<GlobalAddress>,
) -> Reg<F32> {
    match element {
        Element::F32 | Element::E4M3 | Element::E5M2 | Element::Int8 => k.load::<F32, _>(address),
        Element::F16 => {
            let half = k.load::<F16, _>(address);
            k.eval(half.convert::<F32>())
        }
        Element::BF16 => {
            let half = k.load::<BF16, _>(address);
            k.eval(half.convert::<F32>())
        }
    }
}

/// Loads two neighbouring elements of 16 or 32 bits and converts them to `f32`.
#[track_caller]
pub(crate) fn load_pair_as_f32(
    k: &mut Builder,
    element: Element,
    address: Value<GlobalAddress>,
) -> [Reg<F32>; 2] {
    if !is_16_bit(element) {
        return k.load_vector(address, LoadHint::default());
    }
    let pair = k.load_packed(element, address);
    k.unpack_as_f32(pair)
}

/// Loads eight neighbouring 16-bit elements, aligned to 16 bytes, as four packed pairs.
#[track_caller]
pub(crate) fn load_eight(k: &mut Builder, address: Value<GlobalAddress>) -> [Reg<U32>; 4] {
    k.load_vector(address, LoadHint::default())
}

/// Converts four packed pairs of `F16` or `BF16` to eight `f32`.
#[track_caller]
pub(crate) fn eight_as_f32(
    k: &mut Builder,
    element: Element,
    pairs: [Reg<U32>; 4],
) -> Vec<Reg<F32>> {
    let widen = |pair: Reg<U32>| match element {
        Element::F16 => {
            let pair = k.eval(pair.reinterpret::<F16x2>());
            k.unpack(pair)
        }
        _ => {
            let pair = k.eval(pair.reinterpret::<BF16x2>());
            k.unpack(pair)
        }
    };
    pairs.into_iter().flat_map(widen).collect()
}

/// Rounds an `f32` to an element and stores it. The 8-bit types must not be passed.
#[track_caller]
pub(crate) fn store_from_f32<A: AddressOf>(
    k: &mut Builder,
    element: Element,
    address: Value<A>,
    value: Reg<F32>,
) {
    match element {
        Element::F32 | Element::E4M3 | Element::E5M2 | Element::Int8 => k.store(address, value),
        Element::F16 => {
            let half = k.round_to_f16(value);
            k.store(address, half);
        }
        Element::BF16 => {
            let half = k.round_to_bf16(value);
            k.store(address, half);
        }
    }
}

/// Rounds two neighbouring numbers to an element of 16 or 32 bits and stores them.
#[track_caller]
pub(crate) fn store_pair_from_f32(
    k: &mut Builder,
    element: Element,
    address: Value<GlobalAddress>,
    [low, high]: [Reg<F32>; 2],
) {
    if !is_16_bit(element) {
        return k.store_vector(address, &[low, high], Default::default());
    }
    let pair = k.pack_as(element, low, high);
    k.store_packed(address, &[pair]);
}
