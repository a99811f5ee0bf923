//! Values of instructions across the lanes of a warp.

use ptx::{Expression, Instruction, Operand, Pred, Select, ShuffleMode, U32};

use crate::{each, map_words};

#[test]
fn shuffles() {
    let a = each(|lane| 100 + lane);
    let modes = [
        (ShuffleMode::Butterfly, 3, 31),
        (ShuffleMode::Down, 5, 31),
        (ShuffleMode::Up, 5, 0),
        (ShuffleMode::Index, 7, 31),
        // Segments of eight lanes, by the mask in the upper bits.
        (ShuffleMode::Down, 2, 0x181F),
        (ShuffleMode::Index, 3, 0x181F),
    ];
    let results = map_words([a], |k, [a]| {
        let mut out = Vec::new();
        for (mode, lane, clamp) in modes {
            let (dst, valid) = (k.register::<U32>(), k.register::<Pred>());
            k.push(Instruction::Shuffle {
                mode,
                dst: dst.register(),
                valid: Some(valid.register()),
                src: a.register(),
                lane: Operand::u32(lane),
                clamp,
            });
            let seen = k.eval(valid.select::<U32>(1, 0));
            out.extend([dst, seen]);
        }
        out
    });
    for lane in 0..32u32 {
        let at = lane as usize;
        let found = |index: usize| (results[2 * index][at], results[2 * index + 1][at]);
        assert_eq!(found(0), (100 + (lane ^ 3), 1));
        assert_eq!(found(1), if lane + 5 < 32 { (105 + lane, 1) } else { (100 + lane, 0) });
        assert_eq!(found(2), if lane >= 5 { (95 + lane, 1) } else { (100 + lane, 0) });
        assert_eq!(found(3), (107, 1));
        let inside = lane % 8 + 2 < 8;
        assert_eq!(found(4), if inside { (102 + lane, 1) } else { (100 + lane, 0) });
        assert_eq!(found(5), (100 + lane / 8 * 8 + 3, 1));
    }
}

#[test]
fn votes_and_elections() {
    let a = each(|lane| lane);
    let results = map_words([a], |k, [a]| {
        let odd = k.eval((a & 1).equals(1));
        let all = k.all(odd);
        let any = k.any(odd);
        let ballot = k.register::<U32>();
        k.push(Instruction::Ballot { dst: ballot.register(), predicate: odd.register() });
        let elected = k.elect();
        let one = |k: &mut ptx::Builder, p: ptx::Reg<Pred>| k.eval(p.select::<U32>(1, 0));
        vec![one(k, all), one(k, any), ballot, one(k, elected)]
    });
    assert_eq!(results[0], [0; 32]);
    assert_eq!(results[1], [1; 32]);
    assert_eq!(results[2], [0xAAAA_AAAA; 32]);
    assert_eq!(results[3].iter().sum::<u32>(), 1);
}
