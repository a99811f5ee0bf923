//! `ldmatrix`, `stmatrix`, `mma.sync`.

use flashcore_sim::float;
use ptx::{BF16x2, Element, Expression, F32, Instruction, MmaShape, Register, U32};

use crate::{each, map_words, word};

#[test]
fn matrices_come_back_as_they_went() {
    let a = each(|lane| (2 * lane) | (2 * lane + 1) << 16);
    let results = map_words([a], |k, [a]| {
        let offset = k.shared("tile", 512, 16);
        let tile = k.shared_address(offset);
        let lane = k.lane();
        let row = k.eval(tile + lane % 8 * 16);
        k.store_matrix(row, &[a], false);
        k.push(Instruction::WarpSync);
        let [same] = k.load_matrix::<U32, 1>(row, false);
        let [turned] = k.load_matrix::<U32, 1>(row, true);
        let plain = k.load::<U32, _>(tile + lane * 4);
        vec![same, turned, plain]
    });
    assert_eq!(results[0], a);
    assert_eq!(results[2], a);
    // Element (r, c) is 8 r + c; transposed, lane l holds (2 (l % 4), l / 4).
    for lane in 0..32u32 {
        let (row, column) = (2 * (lane % 4), lane / 4);
        let expected = (8 * row + column) | (8 * (row + 1) + column) << 16;
        assert_eq!(results[1][lane as usize], expected);
    }
}

#[test]
fn mma_multiplies() {
    // a is 16 x 16 with a[r][c] = r + c / 16, b is the identity's first 8 columns.
    let bits = |x: f32| float::bf16_bits(x) as u32;
    let pair = |x: f32, y: f32| bits(x) | bits(y) << 16;
    let a = |row: u32, column: u32| row as f32 + column as f32 / 16.0;
    let fragment = |lane: u32, index: u32| {
        let row = lane / 4 + 8 * (index % 2);
        let column = 2 * (lane % 4) + 8 * (index / 2);
        pair(a(row, column), a(row, column + 1))
    };
    let identity = |lane: u32, index: u32| {
        let (k, n) = (2 * (lane % 4) + 8 * index, lane / 4);
        let one = |k: u32| if k == n { 1.0 } else { 0.0 };
        pair(one(k), one(k + 1))
    };
    let inputs = [
        each(|lane| fragment(lane, 0)),
        each(|lane| fragment(lane, 1)),
        each(|lane| fragment(lane, 2)),
        each(|lane| fragment(lane, 3)),
        each(|lane| identity(lane, 0)),
        each(|lane| identity(lane, 1)),
    ];
    let results = map_words(inputs, |k, words| {
        let packed: Vec<Register> =
            words.iter().map(|w| k.eval(w.reinterpret::<BF16x2>()).register()).collect();
        let d: Vec<_> = (0..4).map(|_| k.register::<F32>()).collect();
        let c: Vec<Register> = (0..4).map(|_| k.eval::<F32>(0.5).register()).collect();
        k.push(Instruction::Mma {
            shape: MmaShape::M16N8K16,
            element: Element::BF16,
            accumulator: Element::F32,
            d: d.iter().map(|r| r.register()).collect(),
            a: packed[..4].to_vec(),
            b: packed[4..].to_vec(),
            c,
        });
        d.into_iter().map(|r| word(k, r)).collect()
    });
    for lane in 0..32u32 {
        for index in 0..4u32 {
            let row = lane / 4 + 8 * (index / 2);
            let column = 2 * (lane % 4) + index % 2;
            let rounded = float::from_bf16(float::bf16_bits(a(row, column)));
            let found = f32::from_bits(results[index as usize][lane as usize]);
            assert_eq!(found, rounded + 0.5);
        }
    }
}
