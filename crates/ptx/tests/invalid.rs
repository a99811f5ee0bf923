//! Programs that the validator refuses, and its messages.

use flashcore_ptx::*;

/// Returns the validator's message about the kernel that `write` writes, without the place.
fn fault_on(target: Target, write: impl FnOnce(&mut Builder)) -> String {
    let mut k = Builder::new("kernel", target, 128);
    write(&mut k);
    let invalid = k.finish().expect_err("the kernel is not valid");
    if let Some(place) = invalid.place {
        assert_eq!(place.file(), file!(), "the place is in the kernel's source");
    }
    invalid.fault.to_string()
}

fn fault(write: impl FnOnce(&mut Builder)) -> String {
    fault_on(Target::SM_90A, write)
}

/// Returns two tiles that can be multiplied.
fn tiles(k: &mut Builder) -> (SharedTile, SharedTile) {
    let layout = TileLayout::widest(Element::BF16, 64, 64);
    (SharedTiles::new(k, "a", layout, 1).at(k, 0), SharedTiles::new(k, "b", layout, 1).at(k, 0))
}

#[test]
fn launches() {
    let text = |k: Builder| k.finish().unwrap_err().to_string();
    let new = |name, threads| Builder::new(name, Target::SM_90A, threads);
    assert_eq!(text(new("2 words", 32)), "\"2 words\" is not a name for an entry point");
    assert_eq!(text(new("k", 48)), "a block of 48 threads: not 32 to 1024 in whole warps");
    assert_eq!(text(new("k", 32).cluster(9)), "a cluster of 9 blocks: not 1 to 8");
    assert_eq!(
        text(Builder::new("k", Target::SM_80, 32).cluster(2)),
        "clusters is not available on sm_80"
    );
    assert_eq!(
        text(new("k", 1024).blocks_per_multiprocessor(3)),
        "3 blocks of 1024 threads do not fit a multiprocessor"
    );
    let mut k = new("k", 32);
    k.shared("too much", 300_000, 16);
    assert_eq!(text(k), "300000 bytes of shared memory, sm_90a has 232448 for a block");
}

#[test]
fn capabilities() {
    let elect = |k: &mut Builder| _ = k.elect();
    assert_eq!(fault_on(Target::SM_80, elect), "elect.sync is not available on sm_80");
    let wgmma = |k: &mut Builder| {
        let (a, b) = tiles(k);
        k.wgmma(a.matrix(), b.transposed()).wait(k);
    };
    assert_eq!(fault_on(Target::SM_90, wgmma), "wgmma is not available on sm_90");
}

#[test]
fn types_and_constants() {
    assert_eq!(
        fault(|k| {
            let float = k.variable::<F32>(1.0);
            let dst = k.register::<U32>().register();
            let (operation, ty) = (BinaryOperation::Add, Type::U32);
            let (a, b) = (float.into(), Operand::u32(1));
            k.push(Instruction::Binary { operation, ty, dst, a, b });
        }),
        "register 0 is F32, expected U32"
    );
    assert_eq!(
        fault(|k| {
            let dst = k.register::<F16x2>().register();
            let (operation, ty) = (BinaryOperation::Add, Type::F16x2);
            let a = Operand::u32(0);
            k.push(Instruction::Binary { operation, ty, dst, a, b: a });
        }),
        "a constant cannot stand here, expected a register of F16x2"
    );
    assert_eq!(
        fault(|k| {
            let dst = k.register::<U32>().register();
            k.push(Instruction::Move { dst, src: Operand::Immediate(1 << 40) });
        }),
        "the constant 0x10000000000 does not fit 32 bits"
    );
    assert_eq!(
        fault(|k| k.push(Instruction::WgmmaWait { pending: 9 })),
        "there is no such instruction: 9 groups in flight"
    );
    assert_eq!(
        fault(|k| {
            let foreign = Register(77);
            k.push(Instruction::Move { dst: foreign, src: Operand::u32(0) });
        }),
        "register 77 is not one of this program's"
    );
}

#[test]
fn assignment_on_every_path() {
    assert_eq!(
        fault(|k| {
            let x = k.register::<U32>();
            k.eval(x + 1);
        }),
        "register 0 (U32) is read but not written on every path"
    );
    assert_eq!(
        fault(|k| {
            let thread = k.thread_index();
            let x = k.register::<U32>();
            k.if_(thread.equals(0), |k| k.set(x, 1));
            k.eval(x + 1);
        }),
        "register 1 (U32) is read but not written on every path"
    );
    assert_eq!(
        fault(|k| {
            let thread = k.thread_index();
            let x = k.register::<U32>();
            k.loop_(|k| {
                k.break_if(thread.equals(0));
                k.set(x, 1);
            });
            k.eval(x + 1);
        }),
        "register 1 (U32) is read but not written on every path"
    );
    // Both branches write the register, and so does every path out of the loop.
    let mut k = Builder::new("fine", Target::SM_75, 32);
    let thread = k.thread_index();
    let x = k.register::<U32>();
    k.loop_(|k| {
        k.if_else(thread.equals(0), |k| k.set(x, 1), |k| k.set(x, 2));
        k.break_if(x.equals(1));
    });
    k.eval(x + 1);
    k.finish().unwrap();
}

#[test]
fn control_flow() {
    assert_eq!(
        fault(|k| {
            let thread = k.thread_index();
            k.break_if(thread.equals(0));
        }),
        "a break outside of any loop"
    );
    assert_eq!(
        fault(|k| k.role(Role::warps("too many", 2..9), |_| {})),
        "a role of warps 2 to 9 in a block of 4"
    );
}

#[test]
fn register_budgets() {
    let roles = |producer, consumer| {
        let mut k = Builder::new("k", Target::SM_90A, 384).blocks_per_multiprocessor(1);
        k.role(Role::warpgroups("producer", 0..1).registers(producer), |_| {});
        k.role(Role::warpgroups("consumer", 1..3).registers(consumer), |_| {});
        k.finish().map(|_| ()).map_err(|invalid| invalid.fault.to_string())
    };
    assert_eq!(roles(24, 240), Ok(()));
    // With 168 registers per thread at entry, the remaining 1,024 of the multiprocessor do not
    // belong to the block, and a warp that requested them would wait forever.
    assert_eq!(
        roles(32, 240),
        Err("the roles hold 65536 registers, the block has 64512".to_owned())
    );
    assert_eq!(
        roles(24, 236),
        Err("there is no such instruction: a budget of 236 registers: not 24 to 256 in eights"
            .to_owned())
    );
    assert_eq!(
        fault(|k| k.role(Role::warps("half", 0..2).registers(24), |_| {})),
        "register budgets need a number of blocks per multiprocessor"
    );
}

#[test]
fn products_in_flight() {
    assert!(
        fault(|k| {
            let (a, b) = tiles(k);
            let mut o = Accumulator::zeros(k, 64);
            let first = o.registers()[0];
            let update = k.wgmma_into(&mut o, Accumulate::Yes, a.matrix(), b.transposed());
            k.eval(first + 1.0);
            update.wait(k);
        })
        .contains("which has not been waited for")
    );
    assert!(
        fault(|k| {
            let (a, b) = tiles(k);
            let _ = k.wgmma(a.matrix(), b.transposed());
        })
        .contains("is never waited for")
    );
    // The fence that `wgmma` issues first is removed.
    let mut k = Builder::new("k", Target::SM_90A, 128);
    let (a, b) = tiles(&mut k);
    let mut o = Accumulator::zeros(&mut k, 64);
    k.wgmma_into(&mut o, Accumulate::Yes, a.matrix(), b.transposed()).wait(&mut k);
    let mut program = k.finish().unwrap();
    program.body.retain(|s| !matches!(s.kind, StatementKind::Instruction(Instruction::WgmmaFence)));
    let text = validate(&program).unwrap_err().fault.to_string();
    assert!(text.contains("was touched after the last wgmma.fence"), "{text}");

    // A product is left in flight by a loop iteration and touched in the next.
    assert!(
        fault(|k| {
            let (a, b) = tiles(k);
            let thread = k.thread_index();
            let o = Accumulator::zeros(k, 64);
            k.loop_(|k| {
                k.break_if(thread.equals(0));
                k.set(o.registers()[0], 1.0);
                k.start_product(&o, Accumulate::Yes, a.matrix(), b.transposed());
            });
            k.wait_products(0);
        })
        .contains("which has not been waited for")
    );
    // One path has one product more in flight than the other, and a wait counts from the newest.
    assert!(
        fault(|k| {
            let (a, b) = tiles(k);
            let thread = k.thread_index();
            let [o, p] = [(); 2].map(|_| Accumulator::zeros(k, 64));
            k.start_product(&o, Accumulate::Yes, a.matrix(), b.transposed());
            k.if_(thread.equals(0), |k| {
                k.start_product(&p, Accumulate::Yes, a.matrix(), b.transposed());
            });
            k.wait_products(1);
            k.eval(o.registers()[0] + 1.0);
            k.wait_products(0);
        })
        .contains("which has not been waited for")
    );
    // A loop leaves a product in flight at the end of an iteration and waits for it in time.
    let mut k = Builder::new("fine", Target::SM_90A, 128);
    let (a, b) = tiles(&mut k);
    let thread = k.thread_index();
    let [o, p] = [(); 2].map(|_| Accumulator::zeros(&mut k, 64));
    k.loop_(|k| {
        k.start_product(&p, Accumulate::No, a.matrix(), b.transposed());
        k.wait_products(1);
        k.set(o.registers()[0], o.registers()[0] * 2.0);
        k.start_product(&o, Accumulate::Yes, a.matrix(), b.transposed());
        k.wait_products(1);
        k.eval(p.registers()[0] + 1.0);
        k.break_if(thread.equals(0));
    });
    k.wait_products(0);
    k.finish().unwrap();
    // Two products in flight, waited for one after the other, as in attention.
    let mut k = Builder::new("fine", Target::SM_90A, 128);
    let (a, b) = tiles(&mut k);
    k.for_range(0, 4, 1, |k, _| {
        let first = k.wgmma(a.matrix(), b.transposed());
        let second = k.wgmma(a.matrix(), b.transposed());
        let first = first.wait(k);
        k.eval(first.registers()[0] + 1.0);
        second.wait(k);
    });
    k.finish().unwrap();
}

#[test]
fn tiles_that_do_not_fit() {
    assert_eq!(
        fault(|k| {
            let (a, _) = tiles(k);
            let wide = TileLayout::widest(Element::BF16, 64, 128);
            let wide = SharedTiles::new(k, "wide", wide, 1).at(k, 0);
            k.wgmma(a.matrix(), wide.transposed()).wait(k);
        }),
        "a product of 64 columns with 128 rows"
    );
    assert_eq!(
        fault(|k| {
            let (a, b) = tiles(k);
            let a = a.rows(k, 0, 32);
            k.wgmma(a.matrix(), b.transposed()).wait(k);
        }),
        "the first operand has 32 rows, not 64"
    );
    assert_eq!(
        fault(|k| {
            let layout = TileLayout::widest(Element::F16, 512, 64);
            k.tensor_map("long", layout.tensor_box(2));
        }),
        "tensor map long: a box extent of 512: not 1 to 256"
    );
    assert_eq!(
        fault(|k| {
            let layout = TileLayout::widest(Element::F16, 64, 64);
            let map = k.tensor_map("map", layout.tensor_box(3));
            let tile = SharedTiles::new(k, "tile", layout, 1).at(k, 0);
            let barrier = k.shared_address(0);
            tile.load(k, map, &[0.into(), 0.into()], barrier, CopyHint::default());
        }),
        "2 coordinates for a tensor map of 3 dimensions"
    );
    assert_eq!(
        fault(|k| {
            let layout = TileLayout::widest(Element::E4M3, 64, 64);
            let map = k.tensor_map("map", layout.tensor_box(2)).address.register();
            let tile = k.shared("tile", 4096, 128);
            let src = Address { base: k.shared_address(tile).register(), offset: 0 };
            let zero = k.eval::<S32>(0).register();
            let coordinates = vec![zero.into(); 2];
            k.push(Instruction::TensorReduceAdd { map, coordinates, src });
        }),
        "there is no such instruction: adding e4m3 to a tensor"
    );
}

/// Numbers that no hardware supports are refused with a message, without a panic, an endless loop
/// or a huge allocation.
#[test]
fn numbers_that_cannot_be() {
    const MOST: u32 = u32::MAX;
    let huge = |rows, columns| TileLayout::widest(Element::F16, rows, columns);
    assert_eq!(fault(|k| _ = k.shared("x", 16, 0)), "x: 16 bytes of shared memory aligned to 0");
    assert_eq!(
        fault(|k| _ = k.shared("x", 16, 3)),
        "x: an alignment of 3, which is no power of two"
    );
    assert_eq!(
        fault(|k| {
            k.shared("all", MOST, 1);
            k.shared("more", 16, 16);
        }),
        "more: 16 bytes of shared memory aligned to 16"
    );
    for (rank, count) in [(0, 0), (6, 6), (usize::MAX, 6)] {
        assert_eq!(
            fault(|k| _ = k.tensor_map("map", huge(64, 64).tensor_box(rank))),
            format!("tensor map map: {count} dimensions: not 1 to 5")
        );
    }
    for lanes in [0, 3, 64, MOST] {
        assert_eq!(
            fault(|k| {
                let lane = k.lane();
                k.reduce_lanes(lane, lanes, |a, b| a + b);
            }),
            format!("a reduction over {lanes} lanes: not 1, 2, 4, 8, 16 or 32")
        );
    }
    for (rows, columns) in [(MOST, 64), (64, MOST), (MOST, MOST), (0, MOST), (MOST, 0)] {
        let layout = huge(rows, columns);
        assert_eq!(layout.bytes(), if rows == 0 || columns == 0 { 0 } else { MOST });
        let text =
            format!("tile: a tile of {rows} x {columns} is nothing, or no shared memory has it");
        // A whole kernel is written with it before it is refused.
        let kernel = |k: &mut Builder| {
            let tile = SharedTiles::new(k, "tile", layout, MOST).at(k, 0);
            let map = k.tensor_map("map", layout.tensor_box(2));
            let barrier = k.shared_address(0);
            tile.load(k, map, &[0.into(), 0.into()], barrier, CopyHint::default());
            k.wgmma(tile.transposed(), tile.matrix()).wait(k);
            Fragment::load(k, &tile, 0).store(k, &tile, 0);
        };
        assert_eq!(fault(kernel), text);
        let ring = |k: &mut Builder| {
            let layout = TileLayout { swizzle: Swizzle::B128, ..layout };
            let ring = TileRing::new(k, "tile", layout, MOST);
            ring.rotate(k);
            let lane = k.lane();
            let lanes = MatrixLanes::rows_first(k, lane);
            TileReader::new(k, layout, ring.at(0), lanes).a(k, MOST, MOST);
        };
        assert_eq!(fault(ring), text);
    }
    assert_eq!(
        fault(|k| _ = TileRing::new(k, "ring", huge(64, 64), 0)),
        "ring: 0 tiles of 8192 bytes"
    );
    assert_eq!(
        fault(|k| Pipeline::new(k, "stages", MOST, 1).init(k)),
        format!("stages full: {MOST} barriers are more than shared memory has room for")
    );
    for columns in [0, 4, 264, MOST] {
        let text = format!("an accumulator of {columns} columns: not 8 to 256 in eights");
        assert_eq!(fault(|k| _ = Accumulator::zeros(k, columns).registers()[0]), text);
    }
    assert_eq!(
        fault(|k| _ = WarpAccumulator::zeros(k, 1 << 31, 1 << 31).cell(0, 0)),
        "2147483648 x 2147483648 elements do not fit the registers of a warp"
    );
    assert_eq!(
        fault(|k| assert_eq!(WarpAccumulator::new(k, 16, 0).tiles(), 1)),
        "16 x 0 is not made of cells of 16 x 8"
    );
    assert_eq!(
        fault(|k| {
            let one = k.variable(1.0);
            Fragment::new(k, Element::F16, 16).set_pair(k, 4, one, one);
        }),
        "register 4 of 4"
    );
    assert_eq!(
        fault(|k| {
            let one = k.variable(1.0);
            WarpFragment::new(k, Element::F16, 16, 16).set_pair(k, 2, 0, [one, one]);
        }),
        "row 2 and group 0 of a smaller operand"
    );
    for row in [1, 12] {
        let text = format!("a block from row {row} of a tile on: not a multiple of 8");
        let read = |k: &mut Builder| {
            let layout = huge(64, 64);
            let ring = TileRing::new(k, "tile", layout, 1);
            let lane = k.lane();
            let lanes = MatrixLanes::rows_first(k, lane);
            TileReader::new(k, layout, ring.at(0), lanes).a(k, row, 0);
        };
        assert_eq!(fault(read), text);
    }
    for warps in [0..MOST, MOST - 1..MOST] {
        let role = Role::warpgroups("many", warps.clone()).registers(MOST);
        let mut k = Builder::new("k", Target::SM_90A, 128).blocks_per_multiprocessor(1);
        k.role(role, |_| {});
        assert!(k.finish().is_err());
        let text = fault(|k| k.role(Role::warps("many", warps), |_| {}));
        assert!(text.starts_with("a role of warps"), "{text}");
    }
    let mut k = Builder::new("k", Target::SM_90A, MOST).blocks_per_multiprocessor(MOST);
    k.role(Role::warps("all", 0..1), |_| {});
    assert!(k.finish().unwrap_err().to_string().starts_with("a block of 4294967295 threads"));
}

/// Constants that their type cannot hold, and expressions that are nested too deeply.
#[test]
fn values_that_cannot_be() {
    let text = fault(|k| {
        let thread = k.thread_index();
        k.eval(thread + usize::MAX);
    });
    assert_eq!(text, format!("the constant {} does not fit U32", usize::MAX));
    assert_eq!(fault(|k| _ = k.variable::<U64>(-1)), "the constant -1 does not fit U64");
    let sum = |k: &mut Builder, count: u32| {
        let thread = k.thread_index();
        let mut sum: Value<U32> = thread.into();
        for _ in 0..count {
            sum = sum + thread;
        }
        k.eval(sum);
    };
    assert_eq!(fault(|k| sum(k, 100_000)), "more than 256 operators inside one another: eval some");
    let mut k = Builder::new("k", Target::SM_90A, 128);
    sum(&mut k, 256);
    k.finish().unwrap();
}

/// Names are printed as comments, one on a line.
#[test]
fn names_that_are_more_than_a_line() {
    let refused = |name: &str| format!("{name:?} is no name: it has more than printable ASCII");
    for name in ["two\nlines", "carriage\rreturn", "nothing\0", "\u{85}", "größer"] {
        assert_eq!(fault(|k| _ = k.shared(name, 16, 16)), refused(name));
        assert_eq!(fault(|k| _ = k.parameter::<U32>(name)), refused(name));
        assert_eq!(fault(|k| k.role(Role::warps(name, 0..1), |_| {})), refused(name));
    }
}

/// Targets that no assembler supports.
#[test]
fn targets_that_are_not_there() {
    let specific = |architecture| Target { architecture, specific: true };
    for target in [Target::portable(70), Target::portable(77), specific(80), Target::portable(999)]
    {
        let invalid = Builder::new("k", target, 32).finish().unwrap_err();
        assert_eq!(invalid.to_string(), format!("there is no target {target}, or it is too old"));
    }
}

/// The validator's analysis terminates for a loop that issues one more product in each iteration
/// and waits for none.
#[test]
fn a_loop_that_only_starts_products() {
    let write = |k: &mut Builder| {
        let (a, b) = tiles(k);
        let thread = k.thread_index();
        let o = Accumulator::zeros(k, 64);
        k.loop_(|k| {
            k.break_if(thread.equals(0));
            k.start_product(&o, Accumulate::Yes, a.matrix(), b.transposed());
        });
        o
    };
    let mut k = Builder::new("k", Target::SM_90A, 128);
    write(&mut k);
    k.wait_products(0);
    k.finish().unwrap();
    assert!(fault(|k| _ = write(k)).contains("is never waited for"));
    assert!(
        fault(|k| {
            let o = write(k);
            k.wait_products(1);
            k.eval(o.registers()[0] + 1.0);
        })
        .contains("which has not been waited for")
    );
    // A product of one kernel is waited for in another.
    let mut other = Builder::new("other", Target::SM_90A, 128);
    let (a, b) = tiles(&mut other);
    let product = other.wgmma(a.matrix(), b.transposed());
    assert_eq!(fault(|k| _ = product.wait(k)), "a product of another kernel is waited for");
}
