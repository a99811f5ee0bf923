//! Batch invariance in the simulator: each query of a batch gives the same bits as alone.

use flashcore::serving::Sequences;
use flashcore::{DType, InputTensors, Layout, Mask, Problem, Scores, Tensor};
use flashcore_testing::check::Invariance;
use flashcore_testing::scene::Call;
use kernels::decode::Splits;
use kernels::{Configuration, Decode, Rules};
use sim::{Mode, Options, Policy};

use crate::decode::{fixed, small};

/// Runs a batch by one of two kernels, with 8 or with 16 rows, on some number of multiprocessors.
fn run(
    decode: Decode,
    batch: u64,
    sequences: &Sequences,
    tensors: &InputTensors,
) -> Result<(Tensor, Vec<f32>), String> {
    let padded = sequences.problem().lists.left_padding;
    let pages = sequences.keys().pages();
    let page_rows = pages.map(|pages| kernels::decode::rows_in_one_page(pages.size(), padded));
    let rows = if batch.is_multiple_of(2) { 8 } else { 16 };
    let kernel = Configuration::Decode(Decode { page_rows, rows, ..decode });
    let call =
        Call::new(kernel, 1, [1, 1], [1, 1]).with_multiprocessors(1 + (batch * 5 % 13) as u32);
    let (scene, [output, lse]) =
        call.over(sequences, tensors).map_err(|error| error.to_string())?;
    let policy = Policy::HOSTILE[batch as usize % Policy::HOSTILE.len()];
    let options = Options { mode: Mode::Values, ..Options::values(policy, batch) };
    let (memory, _) = scene.run(&options).map_err(|failure| failure.to_string())?;
    let problem = sequences.problem();
    let shape = flashcore::Shape { dim: problem.value_head_dim, ..tensors.query.shape() };
    let layout = Layout::contiguous(shape).map_err(|error| error.to_string())?;
    let bytes = memory.bytes(output);
    let output = Tensor::from_bytes(problem.dtypes.output, layout, bytes);
    Ok((output.map_err(|error| error.to_string())?, memory.f32(lse)))
}

fn problem(mask: Mask) -> Problem {
    Problem::new(1, 4, 1, 64).with_kv_heads(2).with_dtype(DType::BF16).with_mask(mask)
}

/// Returns the first violation of batch invariance among some batches.
fn complaint(decode: Decode, problem: Problem, longest: usize, batches: u64) -> Option<String> {
    let mut invariance = Invariance::new(problem, 2, longest).unwrap();
    let mut count = 0;
    let mut run = |sequences: &Sequences, tensors: &InputTensors| {
        count += 1;
        run(decode, count, sequences, tensors)
    };
    let mut all = || {
        invariance.alone(&mut run)?;
        (0..batches).try_for_each(|seed| invariance.batch(seed, [5, 40], &mut run))?;
        Ok::<_, String>(invariance.compared())
    };
    match all() {
        Ok(compared) => {
            assert!(compared > batches as usize, "{compared}");
            None
        }
        Err(complaint) => Some(complaint),
    }
}

#[test]
fn bits_do_not_depend_on_the_batch() {
    let one_warp = Decode { warps: 1, ..fixed() };
    for (decode, mask, longest, batches) in [
        (fixed(), Mask::CAUSAL, 140, 24),
        // Several groups of splits.
        (one_warp, Mask::CAUSAL, 300, 8),
        (fixed(), Mask::window(Some(50), Some(0)), 140, 8),
        (Decode { splits: Splits::Fixed { tiles_per_warp: 2 }, ..fixed() }, Mask::CAUSAL, 200, 8),
    ] {
        let complaint = complaint(decode, problem(mask), longest, batches);
        assert_eq!(complaint, None, "{}", decode.name());
    }
}

/// A softcap has two ways for small and for large scores, which here are of about the size of the cap.
#[test]
fn bits_of_capped_scores_do_not_depend_on_the_batch() {
    let decode = Decode { rules: Rules::LOCAL.capped(), ..fixed() };
    let problem = problem(Mask::CAUSAL).with_scores(Scores::default().with_softcap(4.0));
    assert_eq!(complaint(decode, problem, 140, 24), None);
}

/// Without splits of a fixed size bits depend on the batch, which shows that the check can fail.
#[test]
fn without_fixed_splits_bits_do_depend_on_the_batch() {
    let complaint = complaint(small(), problem(Mask::CAUSAL), 140, 24);
    assert!(complaint.is_some_and(|it| it.contains("has other bits")));
}
