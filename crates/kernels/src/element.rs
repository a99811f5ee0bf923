//! Elements of global memory as `f32`.

use ptx::{
    AddressOf, BF16, BF16x2, Builder, Element, Expression, F16, F16x2, F32, GlobalAddress,
    LoadHint, Reg, U32, Value,
};

/// Loads one element and widens it. The 8-bit types have no scalar form.
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

/// Loads eight neighbours of 16 bits, aligned to 16 bytes, and widens them.
#[track_caller]
pub(crate) fn load_eight_as_f32(
    k: &mut Builder,
    element: Element,
    address: Value<GlobalAddress>,
) -> Vec<Reg<F32>> {
    let pairs = k.load_vector::<U32, _, 4>(address, LoadHint::default());
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

/// Rounds one element and stores it.
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
