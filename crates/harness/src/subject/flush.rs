//! Flushing the L2 cache before a measurement.
//!
//! A larger buffer is written, so that nothing of a call's tensors is left. That alone leaves the
//! cache full of dirty lines, which must be written back before they can be replaced, in the time
//! of the call: at 4.8 TB/s an H200 takes 10 us for its 50 MB. In a model, the work before
//! attention mostly reads, its weights above all. So as much is read afterwards. `bench/driver.py`
//! does the same.

use std::sync::Arc;

use cuda::{Arguments, Buffer, Stream};
use flashcore::gpu::{Gpu, Kernel};
use ptx::{Builder, Expression, GlobalAddress, LoadHint, Program, Reg, Target, U32, U64};

use crate::Error;

/// Threads of a block, and words of 16 bytes that each reads.
const THREADS: u32 = 256;
const READS: u32 = 8;

/// Bytes that a block reads.
const BLOCK_BYTES: u64 = 16 * THREADS as u64 * READS as u64;

/// What takes the cache's place, and how it is read.
#[derive(Debug)]
pub(crate) struct Flush {
    written: Buffer,
    /// Zeros.
    read: Buffer,
    kernel: Arc<Kernel>,
}

impl Flush {
    pub(crate) fn new(gpu: &Gpu) -> Result<Self, Error> {
        let [written, read] = [(); 2].map(|()| Buffer::new(gpu.device(), flush_bytes(gpu)));
        let (written, read) = (written?, read?);
        gpu.stream().fill(read.all(), 0)?;
        let kernel = gpu.compiled_program(program(gpu.target())?)?;
        Ok(Flush { written, read, kernel })
    }

    /// Empties the cache. Does not wait.
    pub(crate) fn run(&self, stream: &Stream) -> Result<(), Error> {
        stream.fill(self.written.all(), 0)?;
        let blocks = (self.read.bytes() / BLOCK_BYTES) as u32;
        let mut arguments = Arguments::new();
        arguments.push(self.read.address());
        Ok(self.kernel.launch(stream, blocks, &arguments)?)
    }
}

/// Four times the second-level cache.
pub(crate) fn flush_bytes(gpu: &Gpu) -> u64 {
    4 * gpu.info().l2_bytes.max(16 << 20)
}

/// Builds a kernel that reads zeros, [`BLOCK_BYTES`] for each block. It would write wherever it
/// found anything else, so that the reads cannot be removed as dead code.
fn program(target: Target) -> Result<Program, Error> {
    let mut k = Builder::new("read", target, THREADS);
    let memory = k.parameter::<GlobalAddress>("memory");
    let (block, thread) = (k.block_index(), k.thread_index());
    let first = block.convert::<U64>() * BLOCK_BYTES + thread.convert::<U64>() * 16;
    let first = k.eval(memory + first);
    let words: Vec<Reg<U32>> = (0..READS)
        .flat_map(|read| {
            k.load_vector::<U32, _, 4>(first + 16 * THREADS * read, LoadHint::default())
        })
        .collect();
    let any = k.variable::<U32>(0);
    for word in words {
        k.set(any, any | word);
    }
    k.if_(any.differs(0), |k| k.store(first, any));
    Ok(k.finish().map_err(kernels::Error::from)?)
}

#[cfg(test)]
mod tests {
    use sim::{Argument, Launch, Memory, Options, Policy};

    use super::*;

    /// Every word is read, whoever reads it: one that is no zero shows.
    #[test]
    fn all_is_read_and_nothing_is_written() {
        let program = program(Target::SM_90A).unwrap();
        let words = 2 * BLOCK_BYTES as usize / 4;
        for odd in [None, Some(0), Some(1), Some(words / 2 + 1029), Some(words - 1)] {
            let mut zeros = vec![0u32; words];
            if let Some(odd) = odd {
                zeros[odd] = 7;
            }
            let mut memory = Memory::new();
            let bytes = zeros.iter().flat_map(|word| word.to_le_bytes()).collect();
            let buffer = memory.result("memory", bytes);
            let arguments = vec![Argument::Address(buffer, 0)];
            let launch = Launch { program: &program, grid: 2, arguments };
            sim::run(&launch, &mut memory, &Options::values(Policy::Random, 1)).unwrap();
            let sevens = memory.u32(buffer).iter().filter(|it| **it == 7).count();
            assert_eq!(
                sevens,
                match odd {
                    None => 0,
                    // Where a thread's first word is the odd one, it is written over itself.
                    Some(0) => 1,
                    Some(_) => 2,
                }
            );
        }
    }
}
