//! Differential tests of instructions with exactly one right result: integer and float arithmetic
//! and conversions, bit for bit.

use flashcore_testing::scene::{KernelLaunch, Scene};
use ptx::{
    BF16x2, BinaryOperation, Builder, E4M3x2, E5M2x2, Element, Expression, F16x2, F32,
    GlobalAddress, Instruction, Reg, S32, Scalar, Target, Type, U32, U64,
};
use sim::Memory;

use crate::{compiled, gpu, on_gpu, simulated};

const LANES: u32 = 1024;

/// Returns words that are zeros, infinities, NaNs, the ends of every range, and many in between.
fn inputs(salt: u32) -> Vec<u32> {
    let edges = [
        0.0f32,
        -0.0,
        1.0,
        -1.0,
        65504.0,
        65520.0,
        448.0,
        465.0,
        57344.0,
        61440.0,
        3.0e-8,
        6.0e-8,
        0.001_953_125,
        1.4e-45,
        1.2e-38,
        3.4e38,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    (0..LANES)
        .map(|index| {
            let mixed = (index ^ salt.wrapping_mul(0x9E37_79B9)).wrapping_mul(0x85EB_CA6B);
            let mixed = (mixed ^ mixed >> 13).wrapping_mul(0xC2B2_AE35);
            match index % 4 {
                0 => edges[(mixed >> 8) as usize % edges.len()].to_bits(),
                // Magnitudes within the range of 8-bit and 16-bit floats.
                1 => (mixed & 0x87FF_FFFF) | 0x3800_0000,
                2 => (mixed & 0x83FF_FFFF) | 0x3C00_0000,
                _ => mixed,
            }
        })
        .collect()
}

/// Returns the bits of a result as a word.
fn word<T: Scalar>(k: &mut Builder, value: Reg<T>) -> Reg<U32> {
    k.eval(value.reinterpret::<U32>())
}

/// Computes all results from two words, as integers and as floats.
fn results(k: &mut Builder, [a, b]: [Reg<U32>; 2]) -> Vec<Reg<U32>> {
    let mut words = Vec::new();
    for operation in [
        BinaryOperation::Add,
        BinaryOperation::Subtract,
        BinaryOperation::Multiply,
        BinaryOperation::MultiplyHigh,
        BinaryOperation::Minimum,
        BinaryOperation::Maximum,
        BinaryOperation::ShiftLeft,
        BinaryOperation::ShiftRight,
        BinaryOperation::Xor,
    ] {
        let dst = k.register::<U32>();
        let (a, b) = (a.into(), b.into());
        k.push(Instruction::Binary { operation, ty: Type::U32, dst: dst.register(), a, b });
        words.push(dst);
    }
    let [x, y] = [a, b].map(|it| k.eval(it.reinterpret::<F32>()));
    let floats = [
        k.eval(x + y),
        k.eval(x - y),
        k.eval(x * y),
        k.eval(x.maximum(y)),
        k.eval(x.minimum(y)),
        k.fma(x, y, x),
        k.eval(a.convert::<F32>()),
    ];
    words.extend(floats.map(|it| word(k, it)));
    words.push(k.eval(x.convert::<U32>()));
    let signed = k.eval(x.convert::<S32>());
    words.push(word(k, signed));

    let (half, brain) = (k.pack::<F16x2>(x, y), k.pack::<BF16x2>(x, y));
    let halves = [half, k.add_packed(half, half), k.multiply_packed(half, half)];
    words.extend(halves.map(|it| word(k, it)));
    let brains = [brain, k.add_packed(brain, brain), k.multiply_packed(brain, brain)];
    words.extend(brains.map(|it| word(k, it)));
    words.extend(k.unpack(half).map(|it| word(k, it)));
    words.extend(k.unpack(brain).map(|it| word(k, it)));
    // 8-bit pairs have no conversion to f32; they go through f16.
    let wide = k.register::<F16x2>();
    let small = k.pack::<E4M3x2>(x, y);
    k.push(Instruction::ConvertPacked { dst: wide.register(), src: small.register() });
    words.push(word(k, wide));
    let wide = k.register::<F16x2>();
    let small = k.pack::<E5M2x2>(x, y);
    k.push(Instruction::ConvertPacked { dst: wide.register(), src: small.register() });
    words.push(word(k, wide));
    let four = k.packed(Element::Int8);
    k.push(Instruction::Move { dst: four.register(), src: a.into() });
    for pair in k.widen(four, [0, 2, 1, 3]) {
        words.extend(k.unpack_as_f32(pair).map(|it| word(k, it)));
    }
    // The product must not become part of the rounding.
    let [low, high] = [x, y].map(|it| k.eval(it * x));
    let bytes = k.pack_int8(low, high);
    let twice = k.register::<U32>();
    let (low, high) = (bytes.into(), bytes.into());
    k.push(Instruction::Join { dst: twice.register(), low, high });
    words.push(twice);
    words
}

/// Returns the scene of the kernel, and its inputs.
fn scene() -> (Scene, [Vec<u32>; 2]) {
    let mut k = Builder::new("words", Target::SM_90, LANES);
    let [left, right, out] =
        ["left", "right", "out"].map(|name| k.parameter::<GlobalAddress>(name));
    let thread = k.thread_index();
    let offset = k.eval(thread.convert::<U64>() * 4);
    let (a, b) = (k.load::<U32, _>(left + offset), k.load::<U32, _>(right + offset));
    let words = results(&mut k, [a, b]);
    for (index, word) in words.iter().enumerate() {
        k.store(out + offset + 4 * LANES * index as u32, *word);
    }
    let program = k.finish().unwrap();

    let inputs = [inputs(1), inputs(2)];
    let mut memory = Memory::new();
    let left = memory.input_u32("left", &inputs[0]);
    let right = memory.input_u32("right", &inputs[1]);
    let out = memory.output("out", 4 * LANES as usize * words.len());
    let arguments = [left, right, out].map(|it| sim::Argument::Address(it, 0)).to_vec();
    let size = format!("{LANES} pairs of words");
    (
        Scene::single_launch(
            KernelLaunch { program, grid: 1, arguments },
            memory,
            Vec::new(),
            size,
        ),
        inputs,
    )
}

#[test]
fn words_agree_bit_for_bit() {
    let (scene, [left, right]) = scene();
    let mut ours = simulated(&scene);
    let Some(gpu) = gpu() else { return };
    if gpu.info().compute_capability.major < 9 {
        return eprintln!("skipped: {} has no 8-bit floats", gpu.info().name);
    }
    let (ours, theirs) = (ours.remove(2), on_gpu(&gpu, &scene, &compiled(&gpu, &scene)).remove(2));
    let differences: Vec<String> = (ours.chunks_exact(4).zip(theirs.chunks_exact(4)).enumerate())
        .filter(|(_, (ours, theirs))| ours != theirs)
        .map(|(index, (ours, theirs))| {
            let (result, lane) = (index / LANES as usize, index % LANES as usize);
            let [ours, theirs] =
                [ours, theirs].map(|it| u32::from_le_bytes(it.try_into().unwrap()));
            let (a, b) = (left[lane], right[lane]);
            format!(
                "result {result} of {a:#010x} and {b:#010x}: {theirs:#010x}, simulated {ours:#010x}"
            )
        })
        .collect();
    let shown = &differences[..differences.len().min(40)];
    assert!(differences.is_empty(), "{} differ:\n{}", differences.len(), shown.join("\n"));
}
