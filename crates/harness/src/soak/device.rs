//! Problems of a soak on a GPU at the highest rate: one copy to the device and one back, reused
//! memory and plans, and a stream for each thread.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use cuda::{Buffer, Cache, DeviceAddress, Stream};
use flashcore::gpu::{AttentionPlan, DeviceTensor, Gpu, Gradients, Tensors};
use flashcore::plan::{Arrangement, candidates};
use flashcore::{DType, Error as LibraryError, Plan, Preference};
use kernels::parameter::List;
use testing::check::{check_append, check_combine};

use super::case::Case;
use super::session::{Answer, PassInputs, lock, on_the_cpu};
use crate::Error;
use crate::auxiliary_inputs::tensor_bytes;
use crate::verify::POISON;

/// Bytes before, between and after the results that no kernel may touch.
const GUARD: usize = 4096;
/// What addresses are multiples of.
const ALIGNMENT: usize = 256;
/// One in so many problems is checked for unchanged inputs.
const CHECK_INPUTS_EVERY: u64 = 16;
/// One in so many problems is accompanied by an append, and one by a combine.
const EXTRA_CHECK_EVERY: u64 = 16;

/// A GPU, and the resources of threads for reuse.
pub(super) struct DeviceSession {
    gpu: Gpu,
    idle: Mutex<Vec<ThreadResources>>,
}

/// The stream and memory of one thread.
struct ThreadResources {
    stream: Stream,
    memory: Buffer,
    staged: Vec<u8>,
}

impl DeviceSession {
    pub(super) fn open(cache: Cache) -> Result<Self, Error> {
        Ok(DeviceSession { gpu: Gpu::with_cache(0, cache)?, idle: Mutex::default() })
    }

    pub(super) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub(super) fn answer(&self, case: &Case, inputs: PassInputs<'_>) -> Result<Answer, Error> {
        let problem = &case.problem;
        let arrangement = Arrangement::contiguous(problem).map_err(LibraryError::from)?;
        let able = candidates(&self.gpu.chip(), problem, &arrangement);
        let able: Vec<_> = able.iter().filter(|it| it.accepted && !it.on_request).collect();
        if able.is_empty() || problem.rows() == 0 {
            return on_the_cpu(case, inputs);
        }
        let kernel = able[case.rank.min(able.len() - 1)].kernel;
        let resources = lock(&self.idle).pop();
        let mut resources = match resources {
            Some(resources) => resources,
            None => ThreadResources::new(&self.gpu)?,
        };
        let answer = resources.attend(&self.gpu, case, inputs, (case.rank > 0).then_some(kernel));
        lock(&self.idle).push(resources);
        answer
    }

    /// Runs an append or a combine beside some of the problems; returns what is wrong with it, if
    /// anything.
    pub(super) fn check_append_or_combine(
        &self,
        case: &Case,
    ) -> Option<(&'static str, Result<(), String>)> {
        let dtype = match case.tensor_seed % 2 {
            0 => DType::F16,
            _ => DType::BF16,
        };
        let checked = match case.number % EXTRA_CHECK_EVERY {
            5 => check_append(&self.gpu, dtype, case.tensor_seed),
            11 => check_combine(&self.gpu, dtype, case.tensor_seed),
            _ => return None,
        };
        let verdict = match checked.outcome {
            Ok(outcome) if outcome.passed => Ok(()),
            Ok(outcome) => Err(format!("{}: {outcome}", checked.case)),
            Err(error) => Err(format!("{}: {error}", checked.case)),
        };
        Some((checked.kernel, verdict))
    }

    /// Launches a kernel that writes to an invalid address, after which the driver refuses all work
    /// of this process on the device.
    pub(super) fn lose_context(&self, case: &Case, inputs: PassInputs<'_>) -> Result<(), Error> {
        let nowhere = Some(DeviceAddress(1 << 12));
        let mut resources = ThreadResources::new(&self.gpu)?;
        let (tensors, _) = resources.stage(&self.gpu, case, inputs)?;
        let mut lost = Tensors { lse: nowhere, ..tensors };
        lost.output.address = DeviceAddress(1 << 12);
        self.gpu.attend(&resources.stream, &case.problem, &lost)?;
        Ok(resources.stream.synchronize()?)
    }
}

impl ThreadResources {
    fn new(gpu: &Gpu) -> Result<Self, Error> {
        let memory = Buffer::new(gpu.device(), 1 << 22)?;
        Ok(ThreadResources { stream: Stream::new(gpu.device())?, memory, staged: Vec::new() })
    }

    /// By the product's own path with its cache of plans, or by a kernel that is insisted on.
    fn attend(
        &mut self,
        gpu: &Gpu,
        case: &Case,
        inputs: PassInputs<'_>,
        kernel: Option<&str>,
    ) -> Result<Answer, Error> {
        let problem = &case.problem;
        let (tensors, regions) = self.stage(gpu, case, inputs)?;
        let insisted_on = kernel.map(|kernel| {
            let preference = Preference { backend: None, kernel: Some(kernel.to_owned()) };
            let arrangement = tensors.arrangement();
            let plan = Plan::on_gpu(&gpu.chip(), problem, &arrangement, &preference)?;
            Ok::<_, LibraryError>(Arc::new(AttentionPlan::of(gpu, plan, arrangement)?))
        });
        let insisted_on = insisted_on.transpose()?;
        let run = |resources: &ThreadResources| -> Result<_, Error> {
            let plan = match &insisted_on {
                None => gpu.attend(&resources.stream, problem, &tensors)?,
                Some(plan) => {
                    plan.launch(&resources.stream, &tensors)?;
                    plan.clone()
                }
            };
            // Before the plan goes, and with it what the launch reads.
            let results = resources.read(&regions)?;
            let warnings = plan.compilation().warnings.clone();
            Ok(Answer { kernel: plan.plan().chosen.full_name(), results, warnings })
        };
        let answer = run(self)?;
        if problem.deterministic {
            self.poison(&regions)?;
            if run(self)?.results != answer.results {
                let kernel = &answer.kernel;
                return Err(Error::Impossible(format!("{kernel} gave other bits again")));
            }
        }
        if case.number.is_multiple_of(CHECK_INPUTS_EVERY) {
            let staged = self.memory.slice(0..self.staged.len() as u64)?;
            if self.stream.download_vec::<u8>(staged)? != self.staged {
                let kernel = &answer.kernel;
                return Err(Error::Impossible(format!("{kernel} wrote to its inputs")));
            }
        }
        Ok(answer)
    }

    /// Puts what is given on the device and poisons the results.
    fn stage(
        &mut self,
        gpu: &Gpu,
        case: &Case,
        pass_inputs: PassInputs<'_>,
    ) -> Result<(Tensors, ResultRegions), Error> {
        let (problem, inputs) = (&case.problem, pass_inputs.inputs());
        self.staged.clear();
        let operands = [inputs.query, inputs.key, inputs.value];
        let operands = operands.map(|tensor| append(&mut self.staged, tensor.bytes()));
        let lists = List::OF_ATTENTION.map(|list| {
            let words = inputs.list(problem, list)?;
            let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
            Some(append(&mut self.staged, &bytes))
        });
        let saved = pass_inputs.backward().map(|backward| {
            let lse: Vec<u8> = backward.lse.iter().flat_map(|it| it.to_le_bytes()).collect();
            [backward.output.bytes(), &lse, backward.output_gradient.bytes()]
                .map(|bytes| append(&mut self.staged, bytes))
        });
        self.staged.resize(self.staged.len().next_multiple_of(ALIGNMENT), 0);
        let too_large = || Error::Impossible("the problem is too large".to_owned());
        let [query, key, value, output, lse] = tensor_bytes(problem).ok_or_else(too_large)?;
        let results = match saved {
            None => vec![output, lse],
            Some(_) if problem.scores.sinks => vec![query, key, value, 4 * problem.query_heads],
            Some(_) => vec![query, key, value],
        };
        let regions = ResultRegions::after(self.staged.len(), &results);
        if self.memory.bytes() < regions.end as u64 {
            self.memory = Buffer::new(gpu.device(), 2 * regions.end as u64)?;
        }
        self.stream.upload(&self.staged, self.memory.slice(0..self.staged.len() as u64)?)?;
        self.poison(&regions)?;
        let at = |offset: usize| self.memory.address().offset(offset as u64);
        let result = |index: usize| at(regions.results[index].start);
        let [query, key, value] = operands.map(at);
        let [output, lse] = match saved {
            None => [result(0), result(1)],
            Some([output, lse, _]) => [output, lse].map(at),
        };
        let tensors = Tensors::contiguous(problem, [query, key, value, output], Some(lse));
        let mut tensors = tensors.map_err(LibraryError::from)?;
        tensors.gradients = saved.map(|[_, _, gradient]| {
            let like = |it: DeviceTensor, address| DeviceTensor { address, ..it };
            Gradients {
                output: like(tensors.output, at(gradient)),
                query: like(tensors.query, result(0)),
                key: like(tensors.key, result(1)),
                value: like(tensors.value, result(2)),
                sinks: problem.scores.sinks.then(|| result(3)),
                lse: None,
            }
        });
        for (list, place) in tensors.lists_mut().into_iter().zip(lists) {
            *list = place.map(at);
        }
        Ok((tensors, regions))
    }

    /// Fills the results and what is around them.
    fn poison(&self, regions: &ResultRegions) -> Result<(), Error> {
        let all = self.memory.slice(regions.begin as u64..regions.end as u64)?;
        Ok(self.stream.fill(all, POISON)?)
    }

    /// The results; an error where something beside them was written.
    fn read(&self, regions: &ResultRegions) -> Result<Vec<Vec<u8>>, Error> {
        let all = self.memory.slice(regions.begin as u64..regions.end as u64)?;
        let all = self.stream.download_vec::<u8>(all)?;
        let (mut results, mut before) = (Vec::new(), regions.begin);
        let untouched = |zone: Range<usize>| {
            all[zone.start - regions.begin..zone.end - regions.begin].iter().all(|it| *it == POISON)
        };
        let mut apart = true;
        for place in &regions.results {
            apart &= untouched(before..place.start);
            results.push(all[place.start - regions.begin..place.end - regions.begin].to_vec());
            before = place.end;
        }
        match apart && untouched(before..regions.end) {
            true => Ok(results),
            false => Err(Error::Impossible("the kernel wrote beside its results".to_owned())),
        }
    }
}

/// Where the results lie in a thread's device memory, with guard zones around each.
struct ResultRegions {
    begin: usize,
    results: Vec<Range<usize>>,
    end: usize,
}

impl ResultRegions {
    fn after(begin: usize, bytes: &[usize]) -> Self {
        let mut end = begin + GUARD;
        let place = |bytes: &usize| {
            let place = end..end + bytes;
            end = (place.end + GUARD).next_multiple_of(ALIGNMENT);
            place
        };
        let results = bytes.iter().map(place).collect();
        ResultRegions { begin, results, end }
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
        let ResultRegions { results, end, .. } = ResultRegions::after(512, &[100, 20, 0]);
        assert_eq!(results[0], 512 + GUARD..612 + GUARD);
        assert!(results.windows(2).all(|two| two[1].start >= two[0].end + GUARD));
        assert!(results.iter().all(|it| it.start.is_multiple_of(ALIGNMENT)));
        assert!(end >= results[2].end + GUARD);
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
