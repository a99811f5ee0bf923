//! Three kernels with many, some and no bank conflicts, to compare the simulator's counts with a
//! profiler's.
//!
//! Each fills a tile of shared memory, then loads and stores in loops whose addresses change in
//! every iteration, so that the assembler can neither hoist an access out of its loop nor merge two
//! of them. Every warp has its own part of the tile.

use kernels::Error;
use ptx::{
    Builder, Expression, GlobalAddress, LoadHint, Reg, SharedAddress, StoreHint, Target, U32, U64,
    Value,
};

use super::{KernelLaunch, Scene, SceneError};
use sim::{Argument, Memory};

/// The number of iterations of each loop, large enough that the rest of the kernel does not matter.
const ROUNDS: u32 = 1024;
/// The number of threads of the block.
const THREADS: u32 = 128;
/// The size in bytes of a warp's part of the tile.
const PART: u32 = 8192;

impl Scene {
    /// Creates scenes of kernels with many, some and no bank conflicts. Each thread stores one
    /// word, a hash of all that it loaded.
    pub fn bank_conflicts() -> Result<[Self; 3], SceneError> {
        let scenes =
            [scene("banks_many", many), scene("banks_some", some), scene("banks_none", none)];
        let [many, some, none] = scenes;
        Ok([many?, some?, none?])
    }
}

/// The builder of a kernel with the registers that its loops use.
struct Parts {
    k: Builder,
    /// The warp's part of the tile.
    tile: Reg<SharedAddress>,
    lane: Reg<U32>,
    rounds: Reg<U32>,
    /// A hash of all that was loaded so far.
    seen: Reg<U32>,
}

/// Accesses columns with a stride of 32 words: the words of all 32 lanes are in one bank.
fn many(parts: &mut Parts) {
    parts.load(|k, tile, lane, round| {
        let address = tile + lane * 128 + ((round * 5) & 31) * 4;
        vec![k.load::<U32, _>(address)]
    });
    parts.store(|k, tile, lane, round| {
        let address = tile + lane * 128 + ((round * 3) & 31) * 4;
        k.store(address, round + lane);
    });
}

/// Accesses matrices with rows 64 bytes apart (4-way conflicts), pairs of words 16 bytes apart and
/// words 8 bytes apart (2-way conflicts).
fn some(parts: &mut Parts) {
    parts.load(|k, tile, lane, round| {
        let row = k.eval(tile + lane * 64 + (round & 3) * 16);
        k.load_matrix::<U32, 4>(row, false).to_vec()
    });
    parts.load(|k, tile, lane, round| {
        let address = tile + lane * 16 + (round & 7) * 512;
        k.load_vector::<U32, _, 2>(address, LoadHint::default()).to_vec()
    });
    parts.store(|k, tile, lane, round| {
        let address = tile + lane * 8 + (round & 15) * 256;
        k.store(address, round + lane);
    });
}

/// Accesses matrices with a swizzle, columns with padding, and vectors of neighbouring words: no
/// conflicts.
fn none(parts: &mut Parts) {
    parts.load(|k, tile, lane, round| {
        let row = k.eval(tile + lane * 128 + ((round ^ lane) & 7) * 16);
        k.load_matrix::<U32, 4>(row, false).to_vec()
    });
    parts.load(|k, tile, lane, round| {
        let address = tile + lane * (33 * 4) + ((round * 5) & 31) * 4;
        vec![k.load::<U32, _>(address)]
    });
    parts.store(|k, tile, lane, round| {
        let value = k.eval(round + lane);
        let address = tile + lane * 16 + (round & 7) * 512;
        k.store_vector(address, &[value, round, lane, value], StoreHint::default());
    });
}

impl Parts {
    /// Loads in a loop.
    #[track_caller]
    fn load(
        &mut self,
        body: impl Fn(&mut Builder, Reg<SharedAddress>, Reg<U32>, Reg<U32>) -> Vec<Reg<U32>>,
    ) {
        let Parts { tile, lane, rounds, seen, .. } = *self;
        self.k.for_range(0, rounds, 1, |k, round| {
            for word in body(k, tile, lane, round) {
                k.set(seen, seen * 31 + word);
            }
        });
    }

    /// Stores in a loop, after a block barrier.
    fn store(&mut self, body: impl Fn(&mut Builder, Reg<SharedAddress>, Reg<U32>, Reg<U32>)) {
        let Parts { tile, lane, rounds, .. } = *self;
        self.k.block_sync();
        self.k.for_range(0, rounds, 1, |k, round| body(k, tile, lane, round));
    }
}

fn scene(name: &str, body: impl FnOnce(&mut Parts)) -> Result<Scene, SceneError> {
    let mut k = Builder::new(name, Target::SM_80, THREADS);
    let out = k.parameter::<GlobalAddress>("out");
    let rounds = k.parameter::<U32>("rounds");
    let (thread, lane) = (k.thread_index(), k.lane());
    let offset = k.shared("tile", THREADS / 32 * PART, 1024);
    let start = k.shared_address(offset);
    let tile = k.eval(start + thread / 32 * PART);
    // Neighbouring lanes store neighbouring words, without conflicts.
    k.for_range(0, PART / 128, 1, |k, row| {
        k.store(tile + row * 128 + lane * 4, Value::from(row) * 77 + lane);
    });
    k.block_sync();
    let seen = k.variable::<U32>(0);
    let mut parts = Parts { k, tile, lane, rounds, seen };
    body(&mut parts);
    let Parts { mut k, .. } = parts;
    k.store(out + thread.convert::<U64>() * 4, seen);
    let program = k.finish().map_err(Error::from)?;

    let mut memory = Memory::new();
    let out = memory.output("out", 4 * THREADS as usize);
    let arguments = vec![Argument::Address(out, 0), Argument::U32(ROUNDS)];
    let size = format!("{ROUNDS} rounds");
    Ok(Scene::single_launch(KernelLaunch { program, grid: 1, arguments }, memory, Vec::new(), size))
}
