//! Tiles against the layouts as NVIDIA documents them, written down a second
//! time: element by element instead of by formula.

use flashcore_ptx::*;

fn layout(swizzle: Swizzle, rows: u32, columns: u32) -> TileLayout {
    TileLayout { element: Element::BF16, rows, columns, swizzle }
}

/// The 128-byte swizzle: in each group of eight rows of 128 bytes, chunk `c`
/// of row `r` lies where chunk `c ^ r` would.
#[test]
fn the_widest_swizzle_exchanges_chunks_by_row() {
    let tile = layout(Swizzle::B128, 64, 64);
    for row in 0..64 {
        for chunk in 0..8 {
            let expected = row * 128 + (chunk ^ (row % 8)) * 16;
            assert_eq!(tile.byte_of(row, chunk * 8), expected);
            assert_eq!(tile.byte_of(row, chunk * 8 + 3), expected + 6);
        }
    }
}

/// The narrower ones keep the rows that share 128 bytes together.
#[test]
fn narrow_swizzles_exchange_chunks_by_pairs_and_fours_of_rows() {
    let tile = layout(Swizzle::B64, 16, 32);
    for row in 0..16 {
        for chunk in 0..4 {
            let expected = row * 64 + (chunk ^ (row / 2 % 4)) * 16;
            assert_eq!(tile.byte_of(row, chunk * 8), expected);
        }
    }
    let tile = layout(Swizzle::B32, 16, 16);
    for row in 0..16 {
        for chunk in 0..2 {
            let expected = row * 32 + (chunk ^ (row / 4 % 2)) * 16;
            assert_eq!(tile.byte_of(row, chunk * 8), expected);
        }
    }
}

/// Without a swizzle a panel is a column of 8x8 core matrices, 128 bytes each.
#[test]
fn unswizzled_tiles_are_core_matrices() {
    let tile = layout(Swizzle::None, 64, 16);
    assert_eq!((tile.panels(), tile.panel_bytes()), (2, 1024));
    for row in 0..64 {
        for column in 0..16 {
            let matrix = column / 8 * 8 + row / 8;
            let expected = matrix * 128 + row % 8 * 16 + column % 8 * 2;
            assert_eq!(tile.byte_of(row, column), expected);
        }
    }
}

/// Every element has a place of its own inside the tile.
#[test]
fn layouts_are_one_to_one() {
    for swizzle in Swizzle::ALL {
        for element in [Element::F32, Element::BF16, Element::E4M3] {
            let tile = TileLayout { element, rows: 24, columns: 256 / element.bytes(), swizzle };
            let mut taken = vec![false; tile.bytes() as usize];
            for row in 0..tile.rows {
                for column in 0..tile.columns {
                    let byte = tile.byte_of(row, column) as usize;
                    assert!(!taken[byte], "{tile:?}: two elements at {byte}");
                    taken[byte] = true;
                }
            }
        }
    }
}

#[test]
fn the_widest_swizzle_that_divides_a_row_is_chosen() {
    let widest = |columns| TileLayout::widest(Element::F16, 64, columns).swizzle;
    assert_eq!(widest(128), Swizzle::B128);
    assert_eq!(widest(96), Swizzle::B64);
    assert_eq!(widest(80), Swizzle::B32);
    assert_eq!(widest(8), Swizzle::None);
}

#[test]
fn boxes_are_panels() {
    let tile = layout(Swizzle::B128, 96, 128);
    assert_eq!((tile.panels(), tile.bytes(), tile.alignment()), (2, 96 * 256, 1024));
    assert_eq!(tile.tensor_box(4).extent, [64, 96, 1, 1]);
}

/// The constants a kernel adds to the addresses of its operands, from the
/// descriptors that were tried on a GPU.
#[test]
fn descriptors() {
    // (swizzle, transposed) of b, as printed for the first two steps.
    let constants = |swizzle, transposed| {
        let mut k = Builder::new("k", Target::SM_90A, 128);
        let tile = layout(swizzle, 64, 64);
        let a = SharedTiles::new(&mut k, "a", tile, 1).at(&mut k, 0);
        let b = SharedTiles::new(&mut k, "b", tile, 1).at(&mut k, 0);
        let b = if transposed { b.transposed() } else { b.matrix() };
        k.wgmma(a.matrix(), b).wait(&mut k);
        let program = k.finish().unwrap();
        let mut constants = Vec::new();
        let mut last = None;
        program.visit(&mut |statement| {
            if let StatementKind::Instruction(instruction) = &statement.kind {
                match instruction {
                    // The descriptor of b is made right before its use.
                    Instruction::Binary { b: Operand::Immediate(bits), ty: Type::U64, .. } => {
                        last = Some(*bits);
                    }
                    Instruction::Wgmma { .. } => constants.extend(last),
                    _ => {}
                }
            }
        });
        constants.truncate(2);
        constants
    };
    let descriptor = |code: u64, leading: u64, stride: u64, offset: u64| {
        (code << 62) | ((stride / 16) << 32) | ((leading / 16) << 16) | (offset / 16)
    };
    // Inner extent contiguous: 32 bytes a step, or the next panels.
    let wide = [descriptor(1, 16, 1024, 0), descriptor(1, 16, 1024, 32)];
    assert_eq!(constants(Swizzle::B128, true), wide);
    let narrow = [descriptor(3, 16, 256, 0), descriptor(3, 16, 256, 64 * 32)];
    assert_eq!(constants(Swizzle::B32, true), narrow);
    let plain = [descriptor(0, 1024, 128, 0), descriptor(0, 1024, 128, 2 * 1024)];
    assert_eq!(constants(Swizzle::None, true), plain);
    // Outer extent contiguous: sixteen rows a step.
    let wide = [descriptor(1, 8192, 1024, 0), descriptor(1, 8192, 1024, 16 * 128)];
    assert_eq!(constants(Swizzle::B128, false), wide);
    let plain = [descriptor(0, 128, 1024, 0), descriptor(0, 128, 1024, 16 * 16)];
    assert_eq!(constants(Swizzle::None, false), plain);
}

/// An accumulator's registers cover the 64 rows of the warpgroup once.
#[test]
fn accumulators_cover_the_matrix() {
    let columns = 24usize;
    let mut taken = vec![false; 64 * columns];
    for thread in 0..128 {
        let (warp, lane) = (thread / 32, thread % 32);
        for index in 0..columns / 2 {
            let row = 16 * warp + lane / 4 + 8 * Accumulator::row_of(index);
            let column = 2 * (lane % 4) + Accumulator::column_of(index) as usize;
            assert!(!taken[row * columns + column]);
            taken[row * columns + column] = true;
        }
    }
    assert!(taken.into_iter().all(|taken| taken));
}

/// In a cluster a shared address says in its upper bits whose it is, which a
/// descriptor must not: they ran into its other fields once, on a GPU.
#[test]
fn descriptors_in_clusters_keep_only_the_address() {
    let text = |cluster| {
        let mut k = Builder::new("k", Target::SM_90A, 128).cluster(cluster);
        let tile = layout(Swizzle::B128, 64, 64);
        let a = SharedTiles::new(&mut k, "a", tile, 1).at(&mut k, 0);
        let b = SharedTiles::new(&mut k, "b", tile, 1).at(&mut k, 0);
        k.wgmma(a.matrix(), b.transposed()).wait(&mut k);
        print(&k.finish().unwrap())
    };
    let masked = |text: String| text.lines().filter(|line| line.contains(", 262143;")).count();
    assert_eq!(masked(text(1)), 0);
    assert_eq!(masked(text(2)), 2, "one for each operand");
}
