//! Tests which kernels candle calls would run on GPUs that need not be present, against the table
//! that all front ends are tested with.

use candle_core::{CpuStorage, DType, Result, Storage as Memory, Tensor};
use flashcore::family::tuning::TuningFile;
use flashcore::plan::{Chip, target_of};
use flashcore::{Alibi, Plan, Preference, Problem, Shape, Storage};
use half::{bf16, f16};

use crate::arguments::Call;
use crate::{Options, Placement, Sequences};

/// Returns a tensor whose elements are never read.
fn tensor(dtype: DType, dims: &[usize]) -> Tensor {
    let memory = match dtype {
        DType::F16 => CpuStorage::F16(Vec::<f16>::new()),
        DType::BF16 => CpuStorage::BF16(Vec::<bf16>::new()),
        DType::U32 => CpuStorage::U32(Vec::new()),
        _ => CpuStorage::F32(Vec::new()),
    };
    crate::tensor(Memory::Cpu(memory), dims)
}

/// Returns a view of a larger tensor, in the memory order that the table names.
fn view(
    dtype: DType,
    Shape { batch, length, heads, dim }: Shape,
    storage: Storage,
    order: &str,
) -> Result<Tensor> {
    let all = match order {
        "contiguous" => tensor(dtype, &[batch, length, heads, dim]),
        "heads first" => tensor(dtype, &[batch, heads, length, dim]).transpose(1, 2)?,
        "address + 8" => {
            let (before, elements) = (8 / dtype.size_in_bytes(), batch * length * heads * dim);
            let all = tensor(dtype, &[before + elements]).narrow(0, before, elements)?;
            all.reshape((batch, length, heads, dim))?
        }
        gaps => {
            let gap: usize = gaps.strip_prefix("gaps of ").unwrap().parse().unwrap();
            let all = tensor(dtype, &[batch, length, heads + 1, dim + gap]);
            all.narrow(2, 0, heads)?.narrow(3, 0, dim)?
        }
    };
    if storage.is_packed() { all.squeeze(0) } else { Ok(all) }
}

/// Returns the call that poses a problem.
fn call(problem: &Problem, order: &str) -> Result<Call> {
    let dtype = match problem.dtype() {
        flashcore::DType::F16 => DType::F16,
        flashcore::DType::BF16 => DType::BF16,
        _ => DType::F32,
    };
    let list = |length: usize| tensor(DType::U32, &[length]);
    let batch = problem.batch;
    let place = |storage: Storage, longest: usize| match storage {
        Storage::Packed(_) => Placement::packed(&list(batch + 1), longest),
        Storage::Paged { columns, .. } => {
            Placement::paged(&list(batch), &tensor(DType::U32, &[batch, columns]))
        }
        _ if problem.lists.batch_index => Placement::entries(&list(batch)),
        _ => Placement::padded(),
    };
    let mut queries = match problem.queries {
        Storage::Packed(_) => place(problem.queries, problem.query_length),
        _ => Placement::padded(),
    };
    let mut keys = place(problem.keys, problem.key_length);
    if problem.lists.query_lengths {
        queries = queries.with_lengths(&list(batch));
    }
    if problem.lists.key_lengths {
        keys = keys.with_lengths(&list(batch));
    }
    if problem.lists.left_padding {
        keys = keys.with_left_padding(&list(batch));
    }
    let tensors = [
        view(dtype, problem.query_shape(), problem.queries, order)?,
        view(dtype, problem.key_shape(), problem.keys, order)?,
        view(dtype, problem.value_shape(), problem.keys, order)?,
    ];
    let heads = problem.query_heads;
    let options = Options {
        mask: problem.mask,
        softmax_scale: problem.scores.scale,
        softcap: problem.scores.softcap,
        slopes: match problem.scores.alibi {
            Alibi::None => None,
            Alibi::PerHead => Some(tensor(DType::F32, &[heads])),
            Alibi::PerSequence => Some(tensor(DType::F32, &[batch, heads])),
        },
        sinks: problem.scores.sinks.then(|| tensor(DType::F32, &[heads])),
        lse: problem.lse,
        ..Options::default()
    };
    Call::new(tensors.each_ref(), &Sequences { queries, keys }, &options)
}

/// Tells whether a candle call can pose the problem.
fn is_candles(problem: &Problem) -> bool {
    let lengths = problem.lists.key_lengths;
    let keys = match problem.keys {
        Storage::Entries(_) => lengths || problem.lists.batch_index,
        Storage::Paged { size, columns, .. } => lengths && size * columns == problem.key_length,
        Storage::Padded => !problem.lists.batch_index,
        Storage::Packed(_) => true,
    };
    keys && problem.dtypes.uniform().is_ok()
}

#[test]
fn calls_run_what_the_table_says() {
    if TuningFile::location().is_some_and(|path| path.exists()) {
        return eprintln!("skipped: what was tuned on this machine changes choices");
    }
    let (mut checked, mut others) = (0, 0);
    let table = include_str!("../../testing/data/choices.txt");
    for line in table.lines().filter(|line| !line.starts_with('#')) {
        let (asked, expected) = line.split_once(" -> ").unwrap();
        let [chip, order, text] = asked.split(" | ").collect::<Vec<_>>()[..] else {
            panic!("{line}");
        };
        let chip = match chip.strip_prefix("sm_") {
            Some(number) => Chip::typical(target_of(number.parse().unwrap())),
            None => Chip::H200,
        };
        let problem: Problem = text.parse().unwrap();
        if !is_candles(&problem) {
            others += 1;
            continue;
        }
        let call = call(&problem, order).unwrap_or_else(|error| panic!("{line}: {error}"));
        assert_eq!(call.problem, problem, "{line}");
        let arrangement = call.arrangement().unwrap();
        let plan = Plan::on_gpu(&chip, &call.problem, &arrangement, &Preference::default());
        let chosen = plan.map_or("none".to_owned(), |Plan { chosen, .. }| {
            format!("{}, {}", chosen.kernel, chosen.configuration.unwrap_or_default())
        });
        assert_eq!(chosen, expected, "{line}");
        checked += 1;
    }
    assert!(checked >= 400 && others < checked / 10, "{checked}, and {others} are not candle's");
}
