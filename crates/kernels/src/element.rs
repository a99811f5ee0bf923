//! Elements of global memory as `f32`.

use ptx::{BF16, Builder, Element, Expression, F16, F32, GlobalAddress, Reg, Value};

/// Loads one element and widens it. The 8-bit types have no scalar form.
#[track_caller]
pub(crate) fn load_as_f32(
    k: &mut Builder,
    element: Element,
    address: Value<GlobalAddress>,
) -> Reg<F32> {
    match element {
        Element::F32 | Element::E4M3 | Element::E5M2 => k.load::<F32, _>(address),
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

/// Rounds one element and stores it.
#[track_caller]
pub(crate) fn store_from_f32(
    k: &mut Builder,
    element: Element,
    address: Value<GlobalAddress>,
    value: Reg<F32>,
) {
    match element {
        Element::F32 | Element::E4M3 | Element::E5M2 => k.store(address, value),
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
