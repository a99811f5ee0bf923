//! Plans of attention over tensors on the device, forward and backward.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use cuda::{DeviceAddress, Stream};
use kernels::parameter::{Captured, Tensor};

use super::executable::{Addresses, Executable, Part};
use super::plans::Kept;
use super::tensors::Tensors;
use super::{Compilation, Gpu, GpuError};
use crate::error::Error;
use crate::family::Choice;
use crate::plan::{Arrangement, Plan, Preference, Source, Workspace, bind};
use crate::problem::{Problem, Storage};

/// A plan for a problem with given strides, ready to launch on the caller's stream.
///
/// Creating a plan chooses among the GPU kernels, as [`Machine`](crate::Machine) does for tensors
/// in host memory, and compiles the chosen one if necessary (first in a form that compiles fast:
/// see [`Policy`](super::Policy)). A launch neither compiles nor synchronizes; where the plan has a
/// workspace, each stream gets its own, which the first launch there allocates.
///
/// The grid of a launch does not depend on the contents of lists: a captured CUDA graph is valid
/// for all lengths up to the problem's, which it reads when it runs. Lengths and table entries out
/// of range are clamped on the device, so that no launch reads or writes outside of its tensors.
///
/// Threads may share a plan. It must outlive its launches and the graphs that captured them;
/// [`Gpu::attention`] keeps plans for that long.
///
/// ```no_run
/// use flashcore::gpu::{AttentionPlan, Buffer, Gpu, Stream, Tensors};
/// use flashcore::{DType, InputTensors, Mask, Preference, Problem};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let gpu = Gpu::open(0)?;
/// let stream = Stream::new(gpu.device())?;
/// let problem = Problem::new(1, 16, 4096, 128).with_dtype(DType::BF16).with_mask(Mask::CAUSAL);
///
/// let host = InputTensors::random(&problem, 0)?;
/// let query = Buffer::from_slice(&stream, host.query.bytes())?;
/// let key = Buffer::from_slice(&stream, host.key.bytes())?;
/// let value = Buffer::from_slice(&stream, host.value.bytes())?;
/// let output = Buffer::new(gpu.device(), query.bytes())?;
/// let lse = Buffer::new(gpu.device(), 4 * problem.rows() as u64)?;
/// let addresses = [&query, &key, &value, &output].map(Buffer::address);
/// let tensors = Tensors::contiguous(&problem, addresses, Some(lse.address()))?;
///
/// let arrangement = tensors.arrangement();
/// let plan = AttentionPlan::new(&gpu, &problem, &arrangement, &Preference::default())?;
/// println!("{}: {}", plan.plan().chosen.full_name(), plan.plan().reason());
/// plan.launch(&stream, &tensors)?;
/// stream.synchronize()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AttentionPlan {
    plan: Plan,
    arrangement: Arrangement,
    executable: Executable,
}

/// What a plan depends on: two calls with the same key differ only in addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Key {
    problem: Problem,
    arrangement: Arrangement,
}

impl Hash for Key {
    /// Hashes the sizes that tell most calls of a program apart. The comparison covers the whole
    /// key, and takes less time than hashing all of it would.
    fn hash<H: Hasher>(&self, state: &mut H) {
        let Problem { batch, query_heads, query_length, key_length, head_dim, mask, pass, .. } =
            &self.problem;
        for number in [*batch, *query_heads, *query_length, *key_length, *head_dim] {
            state.write_usize(number);
        }
        state.write_usize(mask.left.unwrap_or(usize::MAX));
        state.write_usize(mask.right.unwrap_or(usize::MAX));
        state.write_usize(*pass as usize);
        state.write_usize(self.arrangement.query.batch);
        state.write_usize(self.arrangement.key.batch);
    }
}

impl AttentionPlan {
    /// Chooses and compiles a kernel for tensors with these strides and alignments.
    pub fn new(
        gpu: &Gpu,
        problem: &Problem,
        arrangement: &Arrangement,
        preference: &Preference,
    ) -> Result<Self, Error> {
        let plan = Plan::on_gpu(&gpu.chip(), problem, arrangement, preference)?;
        AttentionPlan::of(gpu, plan, *arrangement)
    }

    /// Compiles the kernels that a plan chose.
    pub fn of(gpu: &Gpu, plan: Plan, arrangement: Arrangement) -> Result<Self, Error> {
        let Some(choice) = &plan.chosen.choice else {
            let kernel = plan.chosen.full_name();
            return Err(GpuError::Binding(format!("{kernel} is no kernel of a GPU")).into());
        };
        let executable = Executable::new(gpu, choice, |launch, declared| {
            bind(launch, declared, &plan.problem, &arrangement)
        })?;
        Ok(AttentionPlan { plan, arrangement, executable })
    }

    /// Enqueues attention on a stream of the plan's device. Does not synchronize.
    ///
    /// The caller is responsible for valid addresses: a fault on the device is reported by the
    /// stream when it is next waited for.
    pub fn launch(&self, stream: &Stream, tensors: &Tensors) -> Result<(), GpuError> {
        self.launch_part(stream, tensors, Part::All)
    }

    /// Enqueues only the launches that depend on lengths and masks, for a later
    /// [`attend`](AttentionPlan::attend): layers that share these need them once. Most plans have
    /// no such launches. Block lists that are found on the device go to the [memory that comes with
    /// the tensors](Tensors::block_lists), where there is some.
    pub fn prepare(&self, stream: &Stream, tensors: &Tensors) -> Result<(), GpuError> {
        self.launch_part(stream, tensors, Part::Preparation)
    }

    /// Enqueues the rest of a [`launch`](AttentionPlan::launch), after
    /// [`prepare`](AttentionPlan::prepare) with the same lengths on the same stream.
    pub fn attend(&self, stream: &Stream, tensors: &Tensors) -> Result<(), GpuError> {
        self.launch_part(stream, tensors, Part::Computation)
    }

    fn launch_part(&self, stream: &Stream, tensors: &Tensors, part: Part) -> Result<(), GpuError> {
        tensors.validate(&self.plan.problem)?;
        let given = tensors.arrangement();
        // A plan for unaligned addresses serves aligned ones too.
        let aligned = given.aligned && self.arrangement.aligned;
        if (Arrangement { aligned, ..given }) != self.arrangement {
            return Err(GpuError::Arrangement);
        }
        self.executable.launch(stream, part, tensors)
    }

    /// Returns the plan: the problem, the chosen kernel, and why the others were not chosen.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns the launches of a plan that finds its lists on the device.
    /// [`prepare`](AttentionPlan::prepare) finds them into memory that comes with the tensors, and
    /// later calls need not.
    pub fn with_found_lists(&self) -> Option<&Choice> {
        let found = |choice: &&Choice| choice.found_bytes(Workspace::BlockLists).is_some();
        self.plan.chosen.choice.as_ref().filter(found)
    }

    /// Returns how its binary was obtained.
    pub fn compilation(&self) -> &Compilation {
        self.executable.compilation()
    }
}

impl Kept for AttentionPlan {
    fn device_bytes(&self) -> u64 {
        self.executable.device_bytes()
    }

    fn is_captured(&self) -> bool {
        self.executable.is_captured()
    }
}

impl Gpu {
    /// Returns the plan for a call, which is made at the first call of its kind and cached.
    /// `FLASHCORE_KERNEL` applies as it is set at that first call.
    pub fn attention(
        &self,
        problem: &Problem,
        tensors: &Tensors,
    ) -> Result<Arc<AttentionPlan>, Error> {
        let problem = for_many_lengths(problem);
        let key = Key { problem, arrangement: tensors.arrangement() };
        self.attention.find_or_make(key, |Key { problem, arrangement }| {
            problem.validate()?;
            let preference = Preference::from_environment(problem.pass);
            AttentionPlan::new(self, problem, arrangement, &preference)
        })
    }

    /// Enqueues attention on a stream, with the cached plan for such calls. Log-sum-exps that the
    /// caller does not want go to scratch memory.
    pub fn attend(
        &self,
        stream: &Stream,
        problem: &Problem,
        tensors: &Tensors,
    ) -> Result<Arc<AttentionPlan>, Error> {
        let plan = self.attention(problem, tensors)?;
        let lse = match tensors.lse {
            Some(lse) => lse,
            None => self.unread(4 * problem.rows() as u64)?,
        };
        // The arrangement need not be compared: the plan was looked up by it.
        tensors.validate(&plan.plan.problem)?;
        plan.executable.launch(stream, Part::All, &WithSums { tensors, lse })?;
        Ok(plan)
    }
}

/// The tensors of a call, and where its log-sum-exps go.
struct WithSums<'a> {
    tensors: &'a Tensors,
    lse: DeviceAddress,
}

impl Addresses for WithSums<'_> {
    fn address(&self, source: Source) -> Option<DeviceAddress> {
        match source {
            Source::Tensor(Tensor::Lse) => Some(self.lse),
            other => self.tensors.address(other),
        }
    }

    fn captured(&self, captured: Captured) -> u64 {
        self.tensors.captured(captured)
    }
}

/// Returns the problem that a plan is made for. The maximum lengths of packed sequences are rounded
/// up: a plan for longer ones serves as well, since lists hold the actual lengths. Lengths that
/// change from call to call thus need few plans, none for much more than is asked.
fn for_many_lengths(problem: &Problem) -> Problem {
    // Rounds up to three significant binary digits.
    let rounded = |length: usize| {
        let zeros = length.max(1).ilog2().saturating_sub(2);
        length.max(1).checked_next_multiple_of(1 << zeros).unwrap_or(length)
    };
    let mut problem = Problem { lse: false, ..problem.clone() };
    if let Storage::Packed(rows) = problem.queries {
        problem.query_length = rounded(problem.query_length).min(rows.max(1));
    }
    if let Storage::Packed(rows) = problem.keys {
        problem.key_length = rounded(problem.key_length).min(rows);
    }
    problem
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::dtype::DType;
    use crate::problem::Mask;

    #[test]
    fn no_maximum_is_too_large_to_be_rounded() {
        let packed = |length, rows| {
            let problem = Problem::new(1, 1, length, 64);
            let problem = problem.with_storage(Storage::Packed(rows), Storage::Packed(rows));
            let Problem { query_length, key_length, .. } = for_many_lengths(&problem);
            [query_length, key_length]
        };
        assert_eq!(packed(9, 100), [10; 2]);
        assert_eq!(packed(99, 100), [100; 2]);
        assert_eq!(packed(usize::MAX, 100), [100; 2]);
    }

    #[test]
    fn keys_that_hash_alike_are_told_apart() {
        let key = |problem: &Problem, aligned: bool| Key {
            problem: for_many_lengths(problem),
            arrangement: Arrangement {
                aligned,
                ..Arrangement::contiguous(problem).expect("a small problem")
            },
        };
        let plain = Problem::new(2, 8, 512, 64);
        let problems = [
            plain.clone(),
            plain.clone().with_dtype(DType::BF16),
            plain.clone().with_scale(0.5),
            plain.clone().with_kv_heads(2),
            plain.clone().with_mask(Mask::CAUSAL),
            plain.clone().with_mask(Mask::NONE.with_chunk(64)),
            plain.clone().batch_invariant(),
            plain.clone().backward(),
        ];
        let keys = problems.iter().flat_map(|it| [key(it, true), key(it, false)]);
        let found: HashMap<Key, usize> = keys.clone().zip(0..).collect();
        assert_eq!(found.len(), 2 * problems.len());
        for (index, key) in keys.enumerate() {
            assert_eq!(found[&key], index);
        }
        // Calls with and without log-sum-exps share a plan.
        let silent = Problem { lse: false, ..plain.clone() };
        assert_eq!(found[&key(&silent, true)], 0);
    }
}
