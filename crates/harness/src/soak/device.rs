//! Problems on a GPU, as fast as they can be had: one copy to the device, one back, memory and plans
//! that are used again, a stream for each thread.

use std::sync::Mutex;

use cuda::{Buffer, Cache, DeviceAddress, Stream};
use flashcore::gpu::{AttentionPlan, Gpu, Tensors};
use flashcore::plan::{Arrangement, candidates};
use flashcore::{DType, Error as LibraryError, Inputs, Plan, Preference};
use kernels::parameter::List;
use testing::check::{check_append, check_combine};

use super::case::Case;
use super::session::{Answer, lock, on_the_cpu};
use crate::Error;
use crate::given::tensor_bytes;
use crate::verify::POISON;

/// Bytes before, between and after the results that no kernel may touch.
const GUARD: usize = 4096;
/// What addresses are multiples of.
const ALIGNMENT: usize = 256;
/// Of so many problems, one is asked whether its inputs are as they were.
const LOOK_AT_INPUTS: u64 = 16;
/// Of so many problems, one goes with an append, and one with a combine.
const BESIDE: u64 = 16;

/// A GPU and what its threads use again.
pub(super) struct OnDevice {
    gpu: Gpu,
    rooms: Mutex<Vec<Room>>,
}

/// What one thread uses.
struct Room {
    stream: Stream,
    memory: Buffer,
    staged: Vec<u8>,
}

impl OnDevice {
    pub(super) fn open(cache: Cache) -> Result<Self, Error> {
        Ok(OnDevice { gpu: Gpu::with_cache(0, cache)?, rooms: Mutex::default() })
    }

    pub(super) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub(super) fn answer(&self, case: &Case, inputs: Inputs<'_>) -> Result<Answer, Error> {
        let problem = &case.problem;
        let arrangement = Arrangement::contiguous(problem).map_err(LibraryError::from)?;
        let able = candidates(&self.gpu.chip(), problem, &arrangement);
        let able: Vec<_> = able.iter().filter(|it| it.accepted && !it.on_request).collect();
        if able.is_empty() || problem.rows() == 0 {
            return on_the_cpu(case, inputs);
        }
        let kernel = able[case.rank.min(able.len() - 1)].kernel;
        let room = lock(&self.rooms).pop();
        let mut room = match room {
            Some(room) => room,
            None => Room::new(&self.gpu)?,
        };
        let answer = room.attend(&self.gpu, case, inputs, (case.rank > 0).then_some(kernel));
        lock(&self.rooms).push(room);
        answer
    }

    /// What goes with attention, now and then: new tokens for a cache, or parts put together. What is
    /// wrong with it, if something is.
    pub(super) fn beside(&self, case: &Case) -> Option<(&'static str, Result<(), String>)> {
        let dtype = match case.contents % 2 {
            0 => DType::F16,
            _ => DType::BF16,
        };
        let checked = match case.number % BESIDE {
            5 => check_append(&self.gpu, dtype, case.contents),
            11 => check_combine(&self.gpu, dtype, case.contents),
            _ => return None,
        };
        let verdict = match checked.outcome {
            Ok(outcome) if outcome.passed => Ok(()),
            Ok(outcome) => Err(format!("{}: {outcome}", checked.case)),
            Err(error) => Err(format!("{}: {error}", checked.case)),
        };
        Some((checked.kernel, verdict))
    }

    /// Writes where no memory is. The driver ends everything that this process has on the device.
    pub(super) fn lose_context(&self, case: &Case, inputs: Inputs<'_>) -> Result<(), Error> {
        let nowhere = Some(DeviceAddress(1 << 12));
        let mut room = Room::new(&self.gpu)?;
        let (tensors, _) = room.stage(&self.gpu, case, inputs)?;
        let mut lost = Tensors { lse: nowhere, ..tensors };
        lost.output.address = DeviceAddress(1 << 12);
        self.gpu.attend(&room.stream, &case.problem, &lost)?;
        Ok(room.stream.synchronize()?)
    }
}

impl Room {
    fn new(gpu: &Gpu) -> Result<Self, Error> {
        let memory = Buffer::new(gpu.device(), 1 << 22)?;
        Ok(Room { stream: Stream::new(gpu.device())?, memory, staged: Vec::new() })
    }

    /// By the product's own path with its cache of plans, or by a kernel that is insisted on.
    fn attend(
        &mut self,
        gpu: &Gpu,
        case: &Case,
        inputs: Inputs<'_>,
        kernel: Option<&str>,
    ) -> Result<Answer, Error> {
        let problem = &case.problem;
        let (tensors, results) = self.stage(gpu, case, inputs)?;
        let (name, warnings, found) = match kernel {
            None => {
                let plan = gpu.attend(&self.stream, problem, &tensors)?;
                (
                    plan.plan().chosen.full_name(),
                    plan.compilation().warnings.clone(),
                    self.read(&results)?,
                )
            }
            Some(kernel) => {
                let preference = Preference { backend: None, kernel: Some(kernel.to_owned()) };
                let arrangement = tensors.arrangement();
                let plan = Plan::on_gpu(&gpu.chip(), problem, &arrangement, &preference)?;
                let plan = AttentionPlan::of(gpu, plan, arrangement)?;
                plan.launch(&self.stream, &tensors)?;
                // Before the plan goes, and with it what the launch reads.
                (
                    plan.plan().chosen.full_name(),
                    plan.compilation().warnings.clone(),
                    self.read(&results)?,
                )
            }
        };
        let [output, lse] = found;
        if case.number.is_multiple_of(LOOK_AT_INPUTS) {
            let staged = self.memory.slice(0..self.staged.len() as u64)?;
            if self.stream.download_vec::<u8>(staged)? != self.staged {
                return Err(Error::Impossible(format!("{name} wrote to its inputs")));
            }
        }
        Ok(Answer { kernel: name, output, lse, warnings })
    }

    /// Puts the inputs on the device and poisons the results.
    fn stage(
        &mut self,
        gpu: &Gpu,
        case: &Case,
        inputs: Inputs<'_>,
    ) -> Result<(Tensors, Results), Error> {
        let problem = &case.problem;
        self.staged.clear();
        let operands = [inputs.query, inputs.key, inputs.value];
        let operands = operands.map(|tensor| append(&mut self.staged, tensor.bytes()));
        let lists = List::OF_ATTENTION.map(|list| {
            let words = inputs.list(problem, list)?;
            let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
            Some(append(&mut self.staged, &bytes))
        });
        self.staged.resize(self.staged.len().next_multiple_of(ALIGNMENT), 0);
        let too_large = || Error::Impossible("the problem is too large".to_owned());
        let [.., output, lse] = tensor_bytes(problem).ok_or_else(too_large)?;
        let results = Results::after(self.staged.len(), output, lse);
        if self.memory.bytes() < results.end as u64 {
            self.memory = Buffer::new(gpu.device(), 2 * results.end as u64)?;
        }
        self.stream.upload(&self.staged, self.memory.slice(0..self.staged.len() as u64)?)?;
        let poisoned = self.memory.slice(results.begin as u64..results.end as u64)?;
        self.stream.fill(poisoned, POISON)?;
        let at = |offset: usize| self.memory.address().offset(offset as u64);
        let [query, key, value] = operands.map(at);
        let addresses = [query, key, value, at(results.output)];
        let tensors = Tensors::contiguous(problem, addresses, Some(at(results.lse)));
        let mut tensors = tensors.map_err(LibraryError::from)?;
        for (list, place) in tensors.lists_mut().into_iter().zip(lists) {
            *list = place.map(at);
        }
        Ok((tensors, results))
    }

    /// Output and log-sum-exps; an error where something beside them was written.
    fn read(&self, results: &Results) -> Result<[Vec<u8>; 2], Error> {
        let all = self.memory.slice(results.begin as u64..results.end as u64)?;
        let all = self.stream.download_vec::<u8>(all)?;
        let [output, lse] = [results.output, results.lse].map(|place| place - results.begin);
        let [output, lse] = [output..output + results.output_bytes, lse..lse + results.lse_bytes];
        let beside = [0..output.start, output.end..lse.start, lse.end..all.len()];
        if beside.into_iter().any(|zone| all[zone].iter().any(|byte| *byte != POISON)) {
            return Err(Error::Impossible("the kernel wrote beside its results".to_owned()));
        }
        Ok([all[output].to_vec(), all[lse].to_vec()])
    }
}

/// Where the results lie in a room's memory, with guard zones around each.
struct Results {
    begin: usize,
    output: usize,
    output_bytes: usize,
    lse: usize,
    lse_bytes: usize,
    end: usize,
}

impl Results {
    fn after(begin: usize, output_bytes: usize, lse_bytes: usize) -> Self {
        let output = begin + GUARD;
        let lse = (output + output_bytes + GUARD).next_multiple_of(ALIGNMENT);
        Results { begin, output, output_bytes, lse, lse_bytes, end: lse + lse_bytes + GUARD }
    }
}

/// Appends bytes at the next aligned place, and says where that is.
fn append(staged: &mut Vec<u8>, bytes: &[u8]) -> usize {
    let place = staged.len().next_multiple_of(ALIGNMENT);
    staged.resize(place, 0);
    staged.extend_from_slice(bytes);
    place
}

/// Whether there was too little device memory, which passes.
pub(super) fn is_out_of_memory(error: &Error) -> bool {
    let driver = match error {
        Error::Gpu(flashcore::gpu::GpuError::Driver(error)) => error,
        Error::Library(LibraryError::Driver(error)) => error,
        Error::Library(LibraryError::Gpu(flashcore::gpu::GpuError::Driver(error))) => error,
        _ => return false,
    };
    // 2 is the driver's number for it.
    matches!(driver, cuda::Error::OutOfMemory { .. } | cuda::Error::Call { code: 2, .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_lie_apart_and_aligned() {
        let results = Results::after(512, 100, 20);
        assert_eq!(results.output, 512 + GUARD);
        assert!(results.lse >= results.output + 100 + GUARD);
        assert!(results.lse.is_multiple_of(ALIGNMENT));
        assert_eq!(results.end, results.lse + 20 + GUARD);
        let mut staged = vec![1];
        assert_eq!((append(&mut staged, &[7, 7]), staged.len()), (256, 258));
    }

    #[test]
    fn too_little_memory_is_told_from_other_errors() {
        let full = cuda::Error::OutOfMemory { bytes: 1 };
        assert!(is_out_of_memory(&Error::from(full.clone())));
        assert!(is_out_of_memory(&Error::Library(LibraryError::Driver(full))));
        assert!(!is_out_of_memory(&Error::from(cuda::Error::NoDevice)));
        assert!(!is_out_of_memory(&Error::Impossible("memory".to_owned())));
    }
}
