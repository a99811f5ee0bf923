//! Values of tensor copies: out-of-bounds fill, swizzles, additions, more than two dimensions.

use flashcore_sim as sim;
use ptx::{
    Builder, CopyHint, Element, Expression, GlobalAddress, Instruction, Mbarriers, Scope, Swizzle,
    Target, TensorBox, U32, U64,
};
use sim::{Argument, Memory, TensorMapArgument};

use crate::execute;

/// Loads a 3-dimensional box that is partly outside the tensor, in a swizzle, and returns the words
/// of shared memory.
fn box_in_shared_memory(swizzle: Swizzle, corner: [i32; 3]) -> Vec<u32> {
    let extent = vec![swizzle.width() / 4, 8, 2];
    let words = extent.iter().product::<u32>();
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let tensor_box = TensorBox { element: Element::F32, swizzle, extent };
    let map = k.tensor_map("tensor", tensor_box.clone());
    let out = k.parameter::<GlobalAddress>("out");
    let offset = k.shared("tile", words * 4, 1024);
    let barriers = Mbarriers::new(&mut k, "loaded", 1, 1);
    let tile = k.shared_address(offset);
    let lane = k.lane();
    k.if_(lane.equals(0), |k| barriers.init(k));
    k.barriers_ready();
    let barrier = barriers.at(&mut k, 0);
    k.if_(lane.equals(0), |k| {
        k.mbarrier_arrive_expect(barrier, words * 4);
        let corner = corner.map(ptx::Value::from);
        k.tensor_load(tile, map, &corner, barrier, CopyHint::default());
    });
    k.mbarrier_wait(barrier, 0, Scope::Block);
    k.for_range(lane, words, 32, |k, index| {
        let value = k.load::<U32, _>(tile + index * 4);
        k.store(out + index.convert::<U64>() * 4, value);
    });
    let program = k.finish().unwrap();
    let mut memory = Memory::new();
    // Element (x, y, z) is 1 + x + 100 y + 10000 z.
    let dimensions = [40u32, 12, 3];
    let mut values = Vec::new();
    for z in 0..dimensions[2] {
        for y in 0..dimensions[1] {
            values.extend((0..dimensions[0]).map(|x| 1 + x + 100 * y + 10_000 * z));
        }
    }
    let argument = TensorMapArgument {
        buffer: memory.input_u32("tensor", &values),
        offset: 0,
        dimensions: dimensions.map(u64::from).to_vec(),
        strides: vec![160, 160 * 12],
        tensor_box,
    };
    let output = memory.output("out", 4 * words as usize);
    let arguments = vec![Argument::TensorMap(argument), Argument::Address(output, 0)];
    execute(&program, arguments, &mut memory);
    memory.u32(output)
}

#[test]
fn boxes_are_filled_and_swizzled() {
    for swizzle in Swizzle::ALL {
        let columns = swizzle.width() / 4;
        for corner in [[0, 0, 0], [36, 8, 1], [-2, -3, 2]] {
            let found = box_in_shared_memory(swizzle, corner);
            for (index, word) in found.iter().enumerate() {
                // Undo the swizzle as the tile layout describes it.
                let byte = 4 * index as u32;
                let linear = byte ^ ((byte >> 3) & swizzle.chunk_mask());
                let (x, y, z) =
                    (linear / 4 % columns, linear / 4 / columns % 8, linear / 4 / columns / 8);
                let at = [x, y, z].map(|c| c as i32);
                let [x, y, z] = std::array::from_fn(|i| corner[i] + at[i]);
                let inside = (0..40).contains(&x) && (0..12).contains(&y) && (0..3).contains(&z);
                let expected = if inside { 1 + x + 100 * y + 10_000 * z } else { 0 };
                assert_eq!(*word, expected as u32, "{swizzle:?} {corner:?} word {index}");
            }
        }
    }
}

#[test]
fn boxes_are_added() {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let tensor_box =
        TensorBox { element: Element::F32, swizzle: Swizzle::None, extent: vec![32, 1] };
    let map = k.tensor_map("tensor", tensor_box.clone());
    let offset = k.shared("tile", 128, 128);
    let tile = k.shared_address(offset);
    let lane = k.lane();
    k.store(tile + lane * 4, lane.convert::<ptx::F32>());
    k.fence(ptx::Fence::ProxyAsyncShared);
    k.block_sync();
    k.if_(lane.equals(0), |k| {
        let src = ptx::Address { base: tile.register(), offset: 0 };
        let coordinates = vec![ptx::Operand::u32(8), ptx::Operand::u32(1)];
        for _ in 0..2 {
            k.push(Instruction::TensorReduceAdd {
                map: map.address.register(),
                coordinates: coordinates.clone(),
                src,
            });
        }
        k.push(Instruction::BulkCommit);
        k.push(Instruction::BulkWait { pending: 0, read_only: false });
    });
    let program = k.finish().unwrap();
    let mut memory = Memory::new();
    let buffer = memory.input_f32("tensor", &[1.0; 2 * 32]);
    let argument = TensorMapArgument {
        buffer,
        offset: 0,
        dimensions: vec![32, 2],
        strides: vec![128],
        tensor_box,
    };
    execute(&program, vec![Argument::TensorMap(argument)], &mut memory);
    let found = memory.f32(buffer);
    for x in 0..32 {
        assert_eq!(found[x], 1.0);
        // Columns from 8 on are written; those outside the tensor are dropped.
        let expected = if x < 8 { 1.0 } else { 1.0 + 2.0 * (x as f32 - 8.0) };
        assert_eq!(found[32 + x], expected);
    }
}
