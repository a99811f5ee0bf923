//! The results of each family of instructions, compared with direct computations.

mod arithmetic;
mod conversion;
mod copies;
mod lanes;
mod matrices;
mod products;

use flashcore_sim as sim;
use ptx::{Builder, Expression, GlobalAddress, Program, Reg, Scalar, Target, U32, U64};
use sim::{Argument, Launch, Memory, Options, Policy};

/// Runs a kernel of one warp that maps words to words, and returns its output. Each lane gets its
/// word of every input.
pub(crate) fn map_words<const N: usize>(
    inputs: [[u32; 32]; N],
    body: impl FnOnce(&mut Builder, [Reg<U32>; N]) -> Vec<Reg<U32>>,
) -> Vec<[u32; 32]> {
    let mut k = Builder::new("kernel", Target::SM_90A, 32);
    let addresses: [Reg<GlobalAddress>; N] =
        std::array::from_fn(|index| k.parameter(&format!("input {index}")));
    let out = k.parameter::<GlobalAddress>("out");
    let lane = k.lane();
    let mine = k.eval(lane.convert::<U64>() * 4);
    let values = addresses.map(|address| k.load::<U32, _>(address + mine));
    let results = body(&mut k, values);
    for (index, result) in results.iter().enumerate() {
        k.store(out + mine + 128 * index, *result);
    }
    let program = k.finish().expect("valid");
    let mut memory = Memory::new();
    let mut arguments: Vec<Argument> =
        inputs.iter().map(|words| Argument::Address(memory.input_u32("input", words), 0)).collect();
    let output = memory.output("out", 128 * results.len());
    arguments.push(Argument::Address(output, 0));
    execute(&program, arguments, &mut memory);
    let words = memory.u32(output);
    words.chunks(32).map(|chunk| chunk.try_into().expect("32 words")).collect()
}

pub(crate) fn execute(program: &Program, arguments: Vec<Argument>, memory: &mut Memory) {
    let launch = Launch { program, grid: 1, arguments };
    if let Err(failure) = sim::run(&launch, memory, &Options::checked(Policy::Random, 1)) {
        panic!("{failure}");
    }
}

/// Returns the bits of a register as a word.
pub(crate) fn word<T: Scalar>(k: &mut Builder, register: Reg<T>) -> Reg<U32> {
    k.eval(register.reinterpret::<U32>())
}

pub(crate) fn each(f: impl Fn(u32) -> u32) -> [u32; 32] {
    std::array::from_fn(|lane| f(lane as u32))
}
