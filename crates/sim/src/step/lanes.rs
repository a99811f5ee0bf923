//! Across the lanes of a warp.

use ptx::{Operand, Register, ShuffleMode, VoteMode};

use crate::warp::{Warp, Word};

pub(super) fn shuffle(
    warp: &mut Warp<'_>,
    mode: ShuffleMode,
    dst: Register,
    valid: Option<Register>,
    src: Register,
    lane: Operand,
    clamp: u32,
) {
    let source = *warp.word_of(src);
    let operand = warp.word(lane);
    // As the PTX manual has it: bits 0 to 4 bound the lane, bits 8 to 12 fix
    // the segment.
    let (bound, segment) = (clamp & 0x1F, clamp >> 8 & 0x1F);
    let mut in_range = 0u32;
    let result: Word = std::array::from_fn(|index| {
        let own = index as u32;
        let distance = operand[index] & 0x1F;
        let max = (own & segment) | (bound & !segment & 0x1F);
        let min = own & segment;
        let (from, inside) = match mode {
            ShuffleMode::Up => {
                let from = own.wrapping_sub(distance);
                (from, (from as i32) >= max as i32)
            }
            ShuffleMode::Down => (own + distance, own + distance <= max),
            ShuffleMode::Butterfly => (own ^ distance, own ^ distance <= max),
            ShuffleMode::Index => {
                let from = min | (distance & !segment & 0x1F);
                (from, from <= max)
            }
        };
        in_range |= (inside as u32) << index;
        source[if inside { from as usize % 32 } else { index }]
    });
    warp.set_word(dst, &result);
    if let Some(valid) = valid {
        warp.set_predicate(valid, in_range);
    }
}

pub(super) fn vote(warp: &mut Warp<'_>, mode: VoteMode, dst: Register, predicate: Register) {
    let lanes = warp.predicate(predicate);
    let result = match mode {
        VoteMode::All => lanes == u32::MAX,
        VoteMode::Any => lanes != 0,
    };
    warp.set_predicate(dst, if result { u32::MAX } else { 0 });
}
