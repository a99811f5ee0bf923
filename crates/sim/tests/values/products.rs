//! `wgmma` in the forms the shipped kernels do not use: 8-bit elements, `f16`
//! accumulators, negation, transposition without a swizzle.

use flashcore_sim as sim;
use ptx::{
    Accumulate, Builder, Element, Expression, F16x2, F32, Fence, GlobalAddress, Instruction,
    Operand, Reg, Register, Target, Type, U32, U64, WgmmaA,
};
use sim::{Argument, Memory, float};

use crate::execute;

/// One product of 64 x 8 over 32 bytes of inner extent.
#[derive(Clone, Copy)]
struct Form {
    element: Element,
    accumulator: Element,
    a_in_registers: bool,
    /// Whether both operands have their outer extent contiguous.
    outer: bool,
    negate_a: bool,
}

fn bits(element: Element, x: f32) -> u32 {
    match element {
        Element::F16 => float::f16_bits(x) as u32,
        Element::BF16 => float::bf16_bits(x) as u32,
        Element::E4M3 => float::e4m3_bits(x) as u32,
        Element::E5M2 => float::e5m2_bits(x) as u32,
        Element::Int8 => ptx::Int8.encode(x) as u32,
        Element::F32 => x.to_bits(),
    }
}

fn a(row: usize, k: usize) -> f32 {
    ((row * 7 + k * 3) % 9) as f32 - 4.0
}

fn b(k: usize, column: usize) -> f32 {
    ((k * 5 + column * 11) % 7) as f32 - 3.0
}

/// Returns the bytes of `rows` rows of the inner extent in the canonical layout without a swizzle:
/// core matrices of 8 rows by 16 bytes, one after the other.
fn lay(form: Form, rows: usize, value: impl Fn(usize, usize) -> f32) -> Vec<u8> {
    let width = form.element.bytes() as usize;
    let inner = 32 / width;
    let mut bytes = vec![0u8; rows * 32];
    for row in 0..rows {
        for k in 0..inner {
            let at = if form.outer {
                // Chunks of 8 rows; groups of 8 inner rows 128 bytes apart.
                row / 8 * 256 + k / 8 * 128 + k % 8 * 16 + row % 8 * 2
            } else {
                row / 8 * 256 + k * width / 16 * 128 + row % 8 * 16 + k * width % 16
            };
            let value = bits(form.element, value(row, k)).to_le_bytes();
            bytes[at..at + width].copy_from_slice(&value[..width]);
        }
    }
    bytes
}

/// Builds the descriptor of an operand, the same for both layouts: the 128 bytes in `lay` are the
/// leading offset in either.
fn descriptor(k: &mut Builder, offset: u32) -> Register {
    let (leading, stride) = (128u64, 256u64);
    let address = k.shared_address(offset);
    let start = k.eval(((address.reinterpret::<U32>() & 0x3_FFFF) >> 4).convert::<U64>());
    k.eval(start + ptx::Value::from((leading >> 4) << 16 | (stride >> 4) << 32)).register()
}

fn multiply(form: Form) -> Vec<f32> {
    let mut k = Builder::new("kernel", Target::SM_90A, 128);
    let input = k.parameter::<GlobalAddress>("input");
    let out = k.parameter::<GlobalAddress>("out");
    let tiles = k.shared("tiles", 64 * 32 + 8 * 32, 128);
    let tile = k.shared_address(tiles);
    let thread = k.thread_index();
    k.for_range(thread, (64 * 32 + 8 * 32) / 4, 128, |k, index| {
        let word = k.load::<U32, _>(input + index.convert::<U64>() * 4);
        k.store(tile + index * 4, word);
    });
    k.fence(Fence::ProxyAsyncShared);
    k.block_sync();
    let b = descriptor(&mut k, tiles + 64 * 32);
    let operand = if form.a_in_registers {
        // Row l / 4 of the warp's 16 and the one 8 below; then 16 bytes on.
        let first = k.eval(thread / 32 * 16 + thread % 32 / 4);
        let registers = [0u32, 1, 2, 3].map(|index| {
            let row = k.eval(first + 8 * (index % 2));
            let at = k.eval(row / 8 * 256 + row % 8 * 16 + thread % 4 * 4 + 128 * (index / 2));
            let word = k.load::<U32, _>(tile + at);
            match form.element {
                Element::F16 => k.eval(word.reinterpret::<F16x2>()).register(),
                Element::BF16 => k.eval(word.reinterpret::<ptx::BF16x2>()).register(),
                _ => word.register(),
            }
        });
        WgmmaA::Registers(registers)
    } else {
        WgmmaA::Shared { descriptor: descriptor(&mut k, tiles), transpose: form.outer }
    };
    let half = form.accumulator == Element::F16;
    let d: Vec<Register> =
        (0..if half { 2 } else { 4 })
            .map(|_| {
                if half { k.register::<F16x2>().register() } else { k.register::<F32>().register() }
            })
            .collect();
    k.push(Instruction::WgmmaFence);
    for accumulate in [Accumulate::No, Accumulate::Yes] {
        k.push(Instruction::Wgmma {
            n: 8,
            a_element: form.element,
            b_element: form.element,
            accumulator: form.accumulator,
            d: d.clone(),
            accumulate,
            a: operand,
            b,
            b_transpose: form.outer,
            negate_a: form.negate_a,
            negate_b: false,
        });
    }
    k.push(Instruction::WgmmaCommit);
    k.push(Instruction::WgmmaWait { pending: 0 });
    for (index, register) in d.iter().enumerate() {
        let word: Reg<U32> = k.register();
        k.push(Instruction::Move { dst: word.register(), src: Operand::Register(*register) });
        k.store(out + (thread.convert::<U64>() * 16 + 4 * index), word);
    }
    let program = k.finish().unwrap();
    assert_eq!(program.type_of(b), Type::U64);
    let mut memory = Memory::new();
    let mut bytes = lay(form, 64, a);
    bytes.extend(lay(form, 8, |column, k| self::b(k, column)));
    let input = memory.input("input", bytes);
    let output = memory.output("out", 128 * 16);
    let arguments = vec![Argument::Address(input, 0), Argument::Address(output, 0)];
    execute(&program, arguments, &mut memory);
    // By rows and columns, from the accumulator's layout.
    let words = memory.u32(output);
    let mut result = vec![0.0; 64 * 8];
    for thread in 0..128 {
        for index in 0..4 {
            let row = thread / 32 * 16 + thread % 32 / 4 + 8 * (index / 2);
            let column = 2 * (thread % 4) + index % 2;
            result[row * 8 + column] = if half {
                let pair = words[thread * 4 + index / 2];
                float::from_f16((pair >> (16 * (index % 2))) as u16)
            } else {
                f32::from_bits(words[thread * 4 + index])
            };
        }
    }
    result
}

#[test]
fn every_form_multiplies() {
    for element in [Element::F16, Element::BF16, Element::E4M3, Element::E5M2] {
        for accumulator in [Element::F32, Element::F16] {
            for a_in_registers in [false, true] {
                for outer in [false, true] {
                    for negate_a in [false, true] {
                        let small = element.bytes() == 1;
                        let exists = !(element == Element::BF16 && accumulator == Element::F16);
                        if !exists || (outer && (small || a_in_registers)) {
                            continue;
                        }
                        let form = Form { element, accumulator, a_in_registers, outer, negate_a };
                        let found = multiply(form);
                        let inner = 32 / element.bytes() as usize;
                        for row in 0..64 {
                            for column in 0..8 {
                                let sum: f32 = (0..inner).map(|k| a(row, k) * b(k, column)).sum();
                                // The product is computed twice and accumulated; small integers
                                // are exact.
                                let sign = if negate_a { -2.0 } else { 2.0 };
                                assert_eq!(
                                    found[row * 8 + column],
                                    sign * sum,
                                    "{element} into {accumulator}, registers {a_in_registers}, \
                                     outer {outer}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }
}
