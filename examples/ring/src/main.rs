//! Ring attention over NCCL, one thread for each GPU of this machine: the steps are those of
//! `flashcore::distributed`, the transport is cudarc's. With one GPU it is a ring of one.
//!
//!     cargo run --release [LENGTH]
//!
//! Every rank compares its rows with attention over the whole sequence on one GPU.

use std::error::Error;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use cudarc::nccl::{Comm, Id, group_end, group_start};
use flashcore::distributed::{Block, Distribution, Heads, Order, Sequences, Variant};
use flashcore::gpu::{CombineProblem, CombineTensors, DeviceAddress, Gpu, Stream, Tensors};
use flashcore::{DType, InputTensors, Mask, Problem, Shape, Tensor, attend};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const HEADS: Heads = Heads { query: 8, key: 2, dim: 128, value_dim: 128, element_bytes: 2 };

fn main() -> Result<()> {
    let length = match std::env::args().nth(1) {
        Some(length) => length.parse().map_err(|error| format!("LENGTH {length}: {error}"))?,
        None => 4096,
    };
    // cudarc panics where a library is missing.
    // SAFETY: loads a library that loads nothing of ours.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err("there is no CUDA driver (libcuda.so.1)".into());
    }
    // SAFETY: as above.
    if !unsafe { cudarc::nccl::sys::is_culib_present() } {
        return Err("there is no NCCL (libnccl.so): put its folder into LD_LIBRARY_PATH".into());
    }
    let ranks = CudaContext::device_count()? as usize;
    // Processes on several machines would send it to each other.
    let id = Id::new().map_err(nccl)?;
    std::thread::scope(|scope| -> Result<()> {
        let run = |rank| scope.spawn(move || Rank::join(rank, ranks, id)?.check(length));
        let started: Vec<_> = (0..ranks).map(run).collect();
        for (rank, thread) in started.into_iter().enumerate() {
            let worst = thread.join().map_err(|_| format!("rank {rank} panicked"))??;
            println!("rank {rank} of {ranks}: off by {worst:.1e} at most");
        }
        Ok(())
    })
}

fn nccl(error: cudarc::nccl::result::NcclError) -> String {
    format!("NCCL: {error:?}")
}

/// One GPU, and the way to the others.
struct Rank {
    rank: usize,
    ranks: usize,
    gpu: Gpu,
    comm: Comm,
    /// Where attention is computed.
    compute: Arc<CudaStream>,
    /// Where keys travel.
    travel: Arc<CudaStream>,
}

impl Rank {
    fn join(rank: usize, ranks: usize, id: Id) -> Result<Rank> {
        let context = CudaContext::new(rank)?;
        let (compute, travel) = (context.new_stream()?, context.new_stream()?);
        let comm = Comm::from_rank(travel.clone(), rank, ranks, id).map_err(nccl)?;
        Ok(Rank { rank, ranks, gpu: Gpu::open(rank as u32)?, comm, compute, travel })
    }

    /// How far this rank's rows are from those of one GPU.
    fn check(&self, length: usize) -> Result<f32> {
        let problem = problem(length, length, Mask::CAUSAL);
        // The same on every rank.
        let whole = InputTensors::random(&problem, 0)?;
        let sequences = Sequences::Batch { count: 1, length };
        let distribution = Distribution::new(
            self.ranks,
            sequences,
            problem.mask,
            Variant::Ring,
            Order::ZigZag,
            HEADS,
        )?;
        let own: Vec<Range<usize>> =
            distribution.pieces(self.rank).into_iter().map(|piece| piece.rows).collect();
        let take = |tensor: &Tensor| -> Result<CudaSlice<u8>> {
            let row = tensor.bytes().len() / length;
            let rows = own.iter().map(|rows| &tensor.bytes()[rows.start * row..rows.end * row]);
            Ok(self.compute.clone_htod(&rows.collect::<Vec<_>>().concat())?)
        };
        let inputs = [take(&whole.query)?, take(&whole.key)?, take(&whole.value)?];
        let found = self.attend(&distribution, &inputs)?;

        let expected = attend(&problem, whole.inputs())?.output.to_f32();
        let row = HEADS.query * HEADS.value_dim;
        let expected = own.iter().flat_map(|rows| &expected[rows.start * row..rows.end * row]);
        let apart = found.iter().zip(expected).map(|(found, expected)| (found - expected).abs());
        Ok(apart.fold(0.0, f32::max))
    }

    /// Attention of own queries over all keys.
    fn attend(
        &self,
        distribution: &Distribution,
        [query, key, value]: &[CudaSlice<u8>; 3],
    ) -> Result<Vec<f32>> {
        let rows = distribution.owned_rows(self.rank);
        let steps = distribution.steps(self.rank);
        let parts: usize = steps.iter().map(|step| step.launches.len()).sum();
        let shape = Shape::new(1, rows, HEADS.query, HEADS.value_dim);
        let combine = CombineProblem::new(parts, shape, DType::F32).with_partial(DType::BF16);
        let (row, sums) = (HEADS.query * HEADS.value_dim, HEADS.query * rows);
        let mut outputs = self.compute.alloc_zeros::<u8>(parts * rows * row * 2)?;
        // What a part leaves out has seen no key.
        let mut lses = self.compute.clone_htod(&vec![f32::NEG_INFINITY; parts * sums])?;

        let mut part = 0;
        let mut held: Option<[CudaSlice<u8>; 2]> = None;
        for (index, step) in steps.iter().enumerate() {
            // The keys of the next step are on their way while this one is computed.
            let next = steps.get(index + 1);
            let next = next.map(|next| self.fetch(next, [key, value])).transpose()?;
            let [key, value] = held.as_ref().map_or([key, value], |[key, value]| [key, value]);
            for launch in &step.launches {
                // One sequence: one block.
                for block in &launch.blocks {
                    let lse = self.launch(
                        block,
                        launch.mask,
                        [query, key, value],
                        (&mut outputs, part * rows * row * 2),
                    )?;
                    let count = block.queries.len();
                    for head in 0..HEADS.query {
                        let at = part * sums + head * rows + block.queries.start;
                        let from = lse.slice(head * count..(head + 1) * count);
                        self.compute.memcpy_dtod(&from, &mut lses.slice_mut(at..at + count))?;
                    }
                }
                part += 1;
            }
            self.compute.join(&self.travel)?;
            // What was held goes back to the stream that it came from, which waits for this one before
            // it hands out memory again.
            held = next;
        }

        let mut output = self.compute.alloc_zeros::<f32>(rows * row)?;
        let mut lse = self.compute.alloc_zeros::<f32>(sums)?;
        let tensors = CombineTensors::stacked(
            &combine,
            [address(&outputs, &self.compute), address(&lses, &self.compute)],
            [address_mut(&mut output, &self.compute), address_mut(&mut lse, &self.compute)],
        )?;
        self.gpu.combine(&self.stream(), &combine, &tensors)?;
        Ok(self.compute.clone_dtoh(&output)?)
    }

    /// Begins to get the keys and values of a step, and to give own ones away.
    fn fetch(
        &self,
        step: &flashcore::distributed::Step,
        own: [&CudaSlice<u8>; 2],
    ) -> Result<[CudaSlice<u8>; 2]> {
        let row = HEADS.key * HEADS.dim * HEADS.element_bytes;
        let count: usize = step.receive.iter().map(|from| from.count()).sum();
        // What is sent was written, and what is overwritten was read, before.
        self.travel.join(&self.compute)?;
        let mut received =
            [self.travel.alloc_zeros(count * row)?, self.travel.alloc_zeros::<u8>(count * row)?];
        group_start().map_err(nccl)?;
        for (own, received) in own.into_iter().zip(&mut received) {
            for to in &step.send {
                for rows in &to.rows {
                    let rows = own.slice(rows.start * row..rows.end * row);
                    self.comm.send(&rows, to.rank as i32).map_err(nccl)?;
                }
            }
            let mut at = 0;
            for from in &step.receive {
                for rows in &from.rows {
                    let end = at + rows.len() * row;
                    let mut room = received.slice_mut(at..end);
                    self.comm.recv(&mut room, from.rank as i32).map_err(nccl)?;
                    at = end;
                }
            }
        }
        group_end().map_err(nccl)?;
        Ok(received)
    }

    /// Puts one block on the stream: the output goes to its rows, the log-sum-exps are returned.
    fn launch(
        &self,
        block: &Block,
        mask: Mask,
        inputs: [&CudaSlice<u8>; 3],
        (outputs, at): (&mut CudaSlice<u8>, usize),
    ) -> Result<CudaSlice<f32>> {
        let problem = problem(block.queries.len(), block.keys.len(), mask);
        let mut lse = self.compute.alloc_zeros::<f32>(HEADS.query * block.queries.len())?;
        let row = |heads: usize| heads * HEADS.dim * HEADS.element_bytes;
        let starts = [
            block.queries.start * row(HEADS.query),
            block.keys.start * row(HEADS.key),
            block.keys.start * row(HEADS.key),
        ];
        let [query, key, value] = std::array::from_fn(|at| {
            let DeviceAddress(begin) = address(inputs[at], &self.compute);
            DeviceAddress(begin + starts[at] as u64)
        });
        let DeviceAddress(output) = address_mut(outputs, &self.compute);
        let output = DeviceAddress(output + (at + starts[0]) as u64);
        let sums = address_mut(&mut lse, &self.compute);
        let tensors = Tensors::contiguous(&problem, [query, key, value, output], Some(sums))?;
        self.gpu.attend(&self.stream(), &problem, &tensors)?;
        Ok(lse)
    }

    fn stream(&self) -> Stream {
        // SAFETY: the stream is of this device and lives as long as the rank.
        unsafe { Stream::borrow(self.gpu.device(), self.compute.cu_stream() as u64) }
    }
}

fn problem(queries: usize, keys: usize, mask: Mask) -> Problem {
    Problem::new(1, HEADS.query, queries, HEADS.dim)
        .with_kv_heads(HEADS.key)
        .with_key_length(keys)
        .with_dtype(DType::BF16)
        .with_mask(mask)
}

/// Where memory is. All that uses it is on streams that wait for each other.
fn address<T>(memory: &CudaSlice<T>, stream: &CudaStream) -> DeviceAddress {
    DeviceAddress(memory.device_ptr(stream).0)
}

fn address_mut<T>(memory: &mut CudaSlice<T>, stream: &CudaStream) -> DeviceAddress {
    DeviceAddress(memory.device_ptr_mut(stream).0)
}
