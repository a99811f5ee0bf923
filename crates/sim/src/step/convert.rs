//! Conversions between types, and the packing of pairs and halves.

use ptx::{Instruction, Type};

use crate::float;
use crate::warp::{Warp, Wide, Word};

/// Executes one of the instructions of this family.
pub(super) fn execute(warp: &mut Warp<'_>, instruction: &Instruction) {
    let type_of = |register: &ptx::Register| warp.code.slots[register.0 as usize].0;
    match instruction {
        Instruction::Convert { dst, src } => {
            let (to, from) = (type_of(dst), type_of(src));
            if to.bits() == 64 {
                let result: Wide = if from.bits() == 64 {
                    *warp.wide_of(*src)
                } else {
                    let a = *warp.word_of(*src);
                    match (to, from) {
                        (Type::U64, Type::F32) => a.map(|x| f32::from_bits(x) as u64),
                        (_, Type::F32) => a.map(|x| f32::from_bits(x) as i64 as u64),
                        (_, Type::S32) => a.map(|x| x as i32 as i64 as u64),
                        _ => a.map(|x| x as u64),
                    }
                };
                return warp.set_wide(*dst, &result);
            }
            let result: Word = if from.bits() == 64 {
                let a = *warp.wide_of(*src);
                match (to, from) {
                    (Type::F32, Type::S64) => a.map(|x| (x as i64 as f32).to_bits()),
                    (Type::F32, _) => a.map(|x| (x as f32).to_bits()),
                    _ => a.map(|x| x as u32),
                }
            } else {
                let a = *warp.word_of(*src);
                match (to, from) {
                    (Type::F32, Type::U32) => a.map(|x| (x as f32).to_bits()),
                    (Type::F32, Type::S32) => a.map(|x| (x as i32 as f32).to_bits()),
                    (Type::F32, Type::F16) => a.map(|x| float::bits(float::from_f16(x as u16))),
                    // The conversion is printed as a shift, so a NaN keeps its bits.
                    (Type::F32, Type::BF16) => a.map(|x| x << 16),
                    (Type::F16, Type::F32) => a.map(|x| float::f16_bits(f32::from_bits(x)) as u32),
                    (Type::BF16, Type::F32) => {
                        a.map(|x| float::bf16_bits(f32::from_bits(x)) as u32)
                    }
                    // Rust's casts round toward zero, saturate, and turn NaN into 0, as the
                    // instruction does.
                    (Type::U32, Type::F32) => a.map(|x| f32::from_bits(x) as u32),
                    (Type::S32, Type::F32) => a.map(|x| f32::from_bits(x) as i32 as u32),
                    _ => a,
                }
            };
            warp.set_word(*dst, &result);
        }
        Instruction::ConvertPair { dst, high, low } => {
            let ty = type_of(dst);
            let (high, low) = (warp.word(*high), warp.word(*low));
            let pack = |f: fn(f32) -> u32, bits: u32| -> Word {
                std::array::from_fn(|i| {
                    f(f32::from_bits(low[i])) | f(f32::from_bits(high[i])) << bits
                })
            };
            let result = match ty {
                Type::F16x2 => pack(|x| float::f16_bits(x) as u32, 16),
                Type::BF16x2 => pack(|x| float::bf16_bits(x) as u32, 16),
                Type::E4M3x2 => pack(|x| float::e4m3_bits(x) as u32, 8),
                _ => pack(|x| float::e5m2_bits(x) as u32, 8),
            };
            warp.set_word(*dst, &result);
        }
        Instruction::ConvertPacked { dst, src } => {
            let (to, from) = (type_of(dst), type_of(src));
            let a = *warp.word_of(*src);
            let result = a.map(|x| match (to, from) {
                (_, Type::E4M3x2 | Type::E5M2x2) => {
                    let decode =
                        if from == Type::E4M3x2 { float::from_e4m3 } else { float::from_e5m2 };
                    let half = |byte: u32| float::f16_bits(decode(byte as u8)) as u32;
                    half(x) | half(x >> 8) << 16
                }
                _ => {
                    let encode =
                        if to == Type::E4M3x2 { float::e4m3_bits } else { float::e5m2_bits };
                    let byte = |half: u32| encode(float::from_f16(half as u16)) as u32;
                    byte(x) | byte(x >> 16) << 8
                }
            });
            warp.set_word(*dst, &result);
        }
        Instruction::Split { low, high, src } => {
            if type_of(src).bits() == 64 {
                let a = *warp.wide_of(*src);
                warp.set_word(*low, &a.map(|x| x as u32));
                warp.set_word(*high, &a.map(|x| (x >> 32) as u32));
            } else {
                let a = *warp.word_of(*src);
                warp.set_word(*low, &a.map(|x| x & 0xFFFF));
                warp.set_word(*high, &a.map(|x| x >> 16));
            }
        }
        Instruction::Join { dst, low, high } => {
            let (low, high) = (warp.word(*low), warp.word(*high));
            if type_of(dst).bits() == 64 {
                let result: Wide = std::array::from_fn(|i| low[i] as u64 | (high[i] as u64) << 32);
                warp.set_wide(*dst, &result);
            } else {
                let result: Word = std::array::from_fn(|i| (low[i] & 0xFFFF) | high[i] << 16);
                warp.set_word(*dst, &result);
            }
        }
        other => unreachable!("not of this family: {other:?}"),
    }
}
