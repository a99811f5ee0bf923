//! Values of conversions between types.

use flashcore_sim::float;
use ptx::{BF16x2, E4M3x2, E5M2x2, Element, Expression, F16x2, F32, Instruction, Int8, S32, U32};

use crate::{each, map_words, word};

#[test]
fn integers_and_floats() {
    let values = [0.0f32, 1.5, -1.5, 1e10, -1e10, f32::NAN, 4294967040.0, 0.999];
    let a = each(|lane| values[lane as usize % 8].to_bits());
    let n = each(|lane| 0xFFFF_FF00u32.wrapping_add(9 * lane));
    let results = map_words([a, n], |k, [a, n]| {
        let x = k.eval(a.reinterpret::<F32>());
        let unsigned = k.eval(x.convert::<U32>());
        let signed = k.eval(x.convert::<S32>());
        let from_unsigned = k.eval(n.convert::<F32>());
        let n = k.eval(n.reinterpret::<S32>());
        let from_signed = k.eval(n.convert::<F32>());
        vec![unsigned, word(k, signed), word(k, from_unsigned), word(k, from_signed)]
    });
    for lane in 0..32 {
        let x = f32::from_bits(a[lane]);
        assert_eq!(results[0][lane], x as u32);
        assert_eq!(results[1][lane], x as i32 as u32);
        assert_eq!(results[2][lane], (n[lane] as f32).to_bits());
        assert_eq!(results[3][lane], (n[lane] as i32 as f32).to_bits());
    }
}

#[test]
fn pairs() {
    let a = each(|lane| (1.0 + lane as f32 / 7.0).to_bits());
    let b = each(|lane| (-0.3 * lane as f32).to_bits());
    let results = map_words([a, b], |k, [a, b]| {
        let (a, b) = (k.eval(a.reinterpret::<F32>()), k.eval(b.reinterpret::<F32>()));
        let half = k.pack::<F16x2>(a, b);
        let brain = k.pack::<BF16x2>(a, b);
        let sum = k.add_packed(half, half);
        let product = k.multiply_packed(brain, brain);
        let [low, high] = k.unpack(half);
        let mut out = vec![word(k, half), word(k, brain), word(k, sum), word(k, product)];
        out.extend([word(k, low), word(k, high)]);
        // 8-bit pairs have no conversion to f32; they go through f16.
        let small = k.pack::<E4M3x2>(a, b);
        let wide = k.register::<F16x2>();
        k.push(Instruction::ConvertPacked { dst: wide.register(), src: small.register() });
        out.push(word(k, wide));
        let small = k.register::<E5M2x2>();
        k.push(Instruction::ConvertPacked { dst: small.register(), src: half.register() });
        let wide = k.register::<F16x2>();
        k.push(Instruction::ConvertPacked { dst: wide.register(), src: small.register() });
        out.push(word(k, wide));
        out
    });
    let pack = |low: u16, high: u16| low as u32 | (high as u32) << 16;
    for lane in 0..32 {
        let (x, y) = (f32::from_bits(a[lane]), f32::from_bits(b[lane]));
        let (hx, hy) = (float::f16_bits(x), float::f16_bits(y));
        let (bx, by) = (float::bf16_bits(x), float::bf16_bits(y));
        assert_eq!(results[0][lane], pack(hx, hy));
        assert_eq!(results[1][lane], pack(bx, by));
        let double = |h: u16| float::f16_bits(2.0 * float::from_f16(h));
        assert_eq!(results[2][lane], pack(double(hx), double(hy)));
        let square = |b: u16| float::bf16_bits(float::from_bf16(b) * float::from_bf16(b));
        assert_eq!(results[3][lane], pack(square(bx), square(by)));
        assert_eq!(f32::from_bits(results[4][lane]), float::from_f16(hx));
        assert_eq!(f32::from_bits(results[5][lane]), float::from_f16(hy));
        let e4m3 = |x: f32| float::f16_bits(float::from_e4m3(float::e4m3_bits(x)));
        assert_eq!(results[6][lane], pack(e4m3(x), e4m3(y)));
        let e5m2 = |h: u16| float::f16_bits(float::from_e5m2(float::e5m2_bits(float::from_f16(h))));
        assert_eq!(results[7][lane], pack(e5m2(hx), e5m2(hy)));
    }
}

/// Every byte value in every position, and in another order.
#[test]
fn integers_of_8_bits_widen_exactly() {
    let a = each(|lane| u32::from_le_bytes([0, 1, 2, 3].map(|at| (4 * lane + at) as u8)));
    let b = a.map(|word| word | 0x8080_8080);
    for order in [[0, 1, 2, 3], [0, 2, 1, 3], [3, 3, 0, 2]] {
        let results = map_words([a, b], |k, words| {
            let pairs = words.map(|word| {
                let four = k.packed(Element::Int8);
                k.push(Instruction::Move { dst: four.register(), src: word.into() });
                k.widen(four, order)
            });
            let pairs = pairs.into_iter().flatten();
            pairs.flat_map(|it| k.unpack_as_f32(it).map(|it| word(k, it))).collect()
        });
        for (lane, word) in (0..32).flat_map(|lane| [(lane, a[lane]), (lane, b[lane])]) {
            let found = if word == a[lane] { &results[..4] } else { &results[4..] };
            for (place, byte) in order.into_iter().enumerate() {
                let exact = word.to_le_bytes()[byte as usize] as i8;
                assert_eq!(found[place][lane], f32::from(exact).to_bits());
            }
        }
    }
}

#[test]
fn numbers_are_rounded_to_integers_of_8_bits() {
    let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 126.5, -127.5, -128.0, 1e30, -0.0];
    let numbers: Vec<f32> = (-131..131)
        .flat_map(|whole| {
            let tie = whole as f32 + 0.5;
            [whole as f32, tie, tie.next_up(), tie.next_down()]
        })
        .chain(odd)
        .collect();
    for numbers in numbers.chunks(64) {
        let number = |index: usize| numbers[index % numbers.len()];
        let inputs = [0, 32].map(|first| each(|lane| number(first + lane as usize).to_bits()));
        let results = map_words(inputs, |k, [a, b]| {
            let [a, b] = [a, b].map(|it| k.eval(it.reinterpret::<F32>()));
            let half = k.pack_int8(a, b);
            let joined = k.register::<U32>();
            let (low, high) = (half.into(), half.into());
            k.push(Instruction::Join { dst: joined.register(), low, high });
            vec![joined]
        });
        for lane in 0..32 {
            let exact = [lane, 32 + lane].map(|index| {
                let whole = f64::from(number(index)).clamp(-127.0, 127.0).round_ties_even();
                // The cast turns NaN into 0.
                whole as i8 as u8
            });
            assert_eq!(
                (results[0][lane] as u16).to_le_bytes(),
                exact,
                "{:?}",
                [0, 32].map(|it| number(it + lane))
            );
            assert_eq!([lane, 32 + lane].map(|it| Int8.encode(number(it))), exact);
        }
    }
}
