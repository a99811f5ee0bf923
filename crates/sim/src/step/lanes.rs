//! Exchanges between the lanes of a warp.

use ptx::{Register, ShuffleMode, VoteMode};

use crate::warp::{Warp, Word};

/// Returns what each lane receives, and the lanes whose source is in range.
pub(super) fn shuffle(mode: ShuffleMode, source: &Word, lane: &Word, clamp: u32) -> (Word, u32) {
    // As the PTX manual defines it: bits 0 to 4 bound the lane, bits 8 to 12 select the segment.
    let (bound, segment) = (clamp & 0x1F, clamp >> 8 & 0x1F);
    let mut in_range = 0u32;
    let result = std::array::from_fn(|index| {
        let own = index as u32;
        let distance = lane[index] & 0x1F;
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
    (result, in_range)
}

pub(super) fn vote(warp: &mut Warp<'_>, mode: VoteMode, dst: Register, predicate: Register) {
    let lanes = warp.predicate(predicate);
    let result = match mode {
        VoteMode::All => lanes == u32::MAX,
        VoteMode::Any => lanes != 0,
    };
    warp.set_predicate(dst, if result { u32::MAX } else { 0 });
}
