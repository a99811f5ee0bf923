//! Hazards of `wgmma` products.

use flashcore_sim::HazardKind as H;
use flashcore_sim::mutate;
use ptx::{
    Accumulate, BF16x2, Builder, CopyHint, Element, Expression, F32, Fence, GlobalAddress,
    Instruction, Mbarriers, Operand, Register, Scope, SharedTiles, StatementKind, Swizzle, Target,
    TensorBox, TileLayout, U32, U64, WgmmaA,
};

use crate::{fails, passes};

const LAYOUT: TileLayout =
    TileLayout { element: Element::BF16, rows: 64, columns: 64, swizzle: Swizzle::B128 };

/// Returns a kernel that loads a tile by TMA in a swizzle and multiplies it with itself.
fn square(swizzle: Swizzle) -> ptx::Program {
    let mut k = Builder::new("kernel", Target::SM_90A, 128);
    let out = k.parameter::<GlobalAddress>("out");
    let map = k.tensor_map("a", TensorBox { swizzle, ..LAYOUT.tensor_box(2) });
    let tile = SharedTiles::new(&mut k, "tile", LAYOUT, 1).at(&mut k, 0);
    let barriers = Mbarriers::new(&mut k, "loaded", 1, 1);
    let thread = k.thread_index();
    k.if_(thread.equals(0), |k| barriers.init(k));
    k.barriers_ready();
    let barrier = barriers.at(&mut k, 0);
    k.if_(thread.equals(0), |k| {
        k.mbarrier_arrive_expect(barrier, LAYOUT.bytes());
        tile.load(k, map, &[0.into(), 0.into()], barrier, CopyHint::default());
    });
    k.mbarrier_wait(barrier, 0, Scope::Block);
    let product = k.wgmma(tile.matrix(), tile.transposed()).wait(&mut k);
    let sum = product.registers()[0];
    k.store(out + thread.convert::<U64>() * 4, sum);
    k.finish().unwrap()
}

fn without(program: &ptx::Program, unwanted: fn(&Instruction) -> bool) -> ptx::Program {
    mutate::edit(
        program,
        &mut |statement| !matches!(&statement.kind, StatementKind::Instruction(i) if unwanted(i)),
    )
}

#[test]
fn accumulator_in_flight() {
    let program = square(Swizzle::B128);
    passes(&program);
    let program = without(&program, |i| matches!(i, Instruction::WgmmaWait { .. }));
    fails("accumulator_in_flight", H::AccumulatorInFlight, &program);
}

#[test]
fn missing_wgmma_fence() {
    let program = square(Swizzle::B128);
    let program = without(&program, |i| matches!(i, Instruction::WgmmaFence));
    fails("missing_wgmma_fence", H::MissingWgmmaFence, &program);
}

/// A product that is in no group is not waited for by any wait.
#[test]
fn product_not_committed() {
    let program = square(Swizzle::B128);
    let program = without(&program, |i| matches!(i, Instruction::WgmmaCommit));
    fails("product_not_committed", H::AccumulatorInFlight, &program);
}

/// A wait that leaves the product's own group pending.
#[test]
fn one_group_too_many_pending() {
    let program = mutate::edit(&square(Swizzle::B128), &mut |statement| {
        if let StatementKind::Instruction(Instruction::WgmmaWait { pending }) = &mut statement.kind
        {
            *pending += 1;
        }
        true
    });
    fails("one_group_too_many_pending", H::AccumulatorInFlight, &program);
}

/// The tensor cores read what threads have stored: through another proxy.
#[test]
fn product_of_unfenced_stores() {
    let program = by_hand(|_, _| {}, |_, _| {}, None);
    passes(&program);
    let program = without(&program, |i| matches!(i, Instruction::Fence(_)));
    fails("product_of_unfenced_stores", H::MissingProxyFence, &program);
}

#[test]
fn product_of_uninitialised_memory() {
    let program = by_hand(|_, _| {}, |_, _| {}, None);
    let program = without(&program, |i| matches!(i, Instruction::Store { .. }));
    fails("product_of_uninitialised_memory", H::UninitialisedMemory, &program);
}

#[test]
fn never_waited() {
    let program = square(Swizzle::B128);
    let program = without(&program, |i| {
        matches!(i, Instruction::WgmmaWait { .. } | Instruction::Store { .. })
    });
    fails("never_waited", H::NeverWaited, &program);
}

#[test]
fn swizzle_mismatch() {
    // The boxes of a tile in 128-byte rows, written without its swizzle.
    fails("swizzle_mismatch", H::SwizzleMismatch, &square(Swizzle::None));
}

/// Every warp of a warpgroup reads all of the right operand, also what other warps stored.
#[test]
fn product_of_what_other_warps_store() {
    let kernel = |meet: fn(&mut Builder)| {
        let mut k = Builder::new("kernel", Target::SM_90A, 128);
        let out = k.parameter::<GlobalAddress>("out");
        let tile = SharedTiles::new(&mut k, "tile", LAYOUT, 1).at(&mut k, 0);
        let thread = k.thread_index();
        let zero = [0; 4].map(|zero| k.eval::<U32>(zero));
        for chunk in 0..4 {
            k.store_vector(tile.address() + thread * 64 + 16 * chunk, &zero, Default::default());
        }
        k.fence(Fence::ProxyAsyncShared);
        meet(&mut k);
        let product = k.wgmma(tile.matrix(), tile.transposed()).wait(&mut k);
        let sum = product.registers()[0];
        k.store(out + thread.convert::<U64>() * 4, sum);
        k.finish().unwrap()
    };
    passes(&kernel(|k| k.block_sync()));
    // A store after the first warp has issued the product overwrites its operand; a store before is
    // not ordered before the product. Either is a hazard.
    for policy in flashcore_sim::Policy::HOSTILE {
        for seed in 0..8 {
            let options = flashcore_sim::Options::checked(policy, seed);
            let found = crate::hazard(&kernel(|k| k.warp_sync()), &options);
            assert!(matches!(found.kind, H::DataRace | H::OverwrittenInFlight), "{found}");
        }
    }
}

#[test]
fn a_product_reads_what_has_not_arrived() {
    let program = square(Swizzle::B128);
    let program = without(&program, |i| matches!(i, Instruction::MbarrierWait { .. }));
    let options = flashcore_sim::Options::checked(flashcore_sim::Policy::Latest, 0);
    let found = crate::hazard(&program, &options);
    assert_eq!(found.kind, H::TouchedBeforeArrival);
    insta::assert_snapshot!("product_before_arrival", crate::show(&found.to_string()));
}

/// The registers of a product that is issued instruction by instruction, with its first operand in
/// registers.
struct ByHand {
    a: [Register; 4],
    d: Vec<Register>,
}

/// Returns a kernel that fills a small tile with ordinary stores and multiplies registers with it.
fn by_hand(
    before: impl FnOnce(&mut Builder, &ByHand),
    after: impl FnOnce(&mut Builder, &ByHand),
    descriptor: Option<u64>,
) -> ptx::Program {
    let mut k = Builder::new("kernel", Target::SM_90A, 128);
    let layout = TileLayout { rows: 8, columns: 16, swizzle: Swizzle::None, ..LAYOUT };
    let tile = SharedTiles::new(&mut k, "tile", layout, 1).at(&mut k, 0);
    let thread = k.thread_index();
    k.if_(thread.less(64), |k| k.store(tile.address() + thread * 4, 0.0));
    k.fence(Fence::ProxyAsyncShared);
    k.block_sync();
    let a = [0; 4].map(|_| {
        let zero = k.eval::<U32>(0);
        k.eval(zero.reinterpret::<BF16x2>()).register()
    });
    let d: Vec<Register> = (0..4).map(|_| k.register::<F32>().register()).collect();
    let hand = ByHand { a, d };
    let address = tile.address().reinterpret::<U32>();
    let start = k.eval(((address & 0x3_FFFF) >> 4).convert::<U64>());
    let fields = descriptor.unwrap_or((128 >> 4) << 16 | (128 >> 4) << 32);
    let b = k.eval(start + ptx::Value::from(fields));
    k.push(Instruction::WgmmaFence);
    before(&mut k, &hand);
    k.push(Instruction::Wgmma {
        n: 8,
        a_element: Element::BF16,
        b_element: Element::BF16,
        accumulator: Element::F32,
        d: hand.d.clone(),
        accumulate: Accumulate::No,
        a: WgmmaA::Registers(hand.a),
        b: b.register(),
        b_transpose: false,
        negate_a: false,
        negate_b: false,
    });
    k.push(Instruction::WgmmaCommit);
    k.push(Instruction::WgmmaWait { pending: 0 });
    after(&mut k, &hand);
    k.push(Instruction::WgmmaWait { pending: 0 });
    k.finish().unwrap()
}

/// Returns the program without the first of its two `wgmma` waits.
fn without_first_wait(program: &ptx::Program) -> ptx::Program {
    let sites = mutate::sites(program);
    let wait = sites.iter().find(|s| matches!(s.instruction, Instruction::WgmmaWait { .. }));
    mutate::without(program, wait.expect("there are two").index)
}

#[test]
fn operand_register_in_flight() {
    let program = by_hand(
        |_, _| {},
        |k, hand| k.push(Instruction::Move { dst: hand.a[1], src: Operand::u32(1) }),
        None,
    );
    passes(&program);
    let program = without_first_wait(&program);
    fails("operand_register_in_flight", H::OperandInFlight, &program);
}

#[test]
fn bad_descriptor() {
    let program = by_hand(|_, _| {}, |_, _| {}, Some(1 << 14));
    fails("bad_descriptor", H::BadDescriptor, &program);
    let outside = by_hand(|_, _| {}, |_, _| {}, Some((4096 >> 4) << 16));
    fails("descriptor_out_of_bounds", H::BadDescriptor, &outside);
}

#[test]
fn shared_operand_overwritten_in_flight() {
    let program = by_hand(
        |_, _| {},
        |k, _| {
            let tile = k.shared_address(0);
            k.store(tile, 0.0);
        },
        None,
    );
    let program = without_first_wait(&program);
    fails("shared_operand_overwritten", H::OverwrittenInFlight, &program);
}

#[test]
fn three_warps_multiply() {
    // One warp skips the product.
    let mut program = square(Swizzle::B128);
    let first = program.body.iter().position(|statement| {
        matches!(statement.kind, StatementKind::Instruction(Instruction::WgmmaFence))
    });
    let first = first.expect("there is a product");
    let then = program.body.split_off(first);
    let place = then[0].place;
    // thread < 96
    program.registers.push(ptx::Type::Pred);
    let condition = Register(program.registers.len() as u32 - 1);
    program.registers.push(ptx::Type::U32);
    let thread = Register(program.registers.len() as u32 - 1);
    for instruction in [
        Instruction::ReadSpecial {
            dst: thread,
            special: ptx::SpecialRegister::Thread(ptx::Axis::X),
        },
        Instruction::Compare {
            comparison: ptx::Comparison::Less,
            ty: ptx::Type::U32,
            dst: condition,
            a: Operand::Register(thread),
            b: Operand::u32(96),
        },
    ] {
        program.body.push(ptx::Statement { kind: StatementKind::Instruction(instruction), place });
    }
    let kind = StatementKind::If { condition, then, otherwise: Vec::new() };
    program.body.push(ptx::Statement { kind, place });
    fails("three_warps_multiply", H::WarpgroupMismatch, &program);
}
