//! The CPU back end under callers who ask too much, or lose patience.

use std::time::{Duration, Instant};

use flashcore::serving::{combine, combine_until};
use flashcore::{
    Backend, BackendError, Cancellation, CpuBackend, DType, Error, InputTensors, Inputs, Layout,
    Problem, RunOptions, Shape, Strides, Tensor, TensorError,
};

/// One vector, again and again: many rows in little memory.
fn repeated(shape: Shape) -> Tensor {
    let layout = Layout::strided(shape, Strides::default()).unwrap();
    Tensor::new(layout, vec![0f32; shape.dim]).unwrap()
}

fn run(inputs: Inputs<'_>, cancellation: &Cancellation) -> Result<(), Error> {
    let options = RunOptions { cancellation: Some(cancellation), ..RunOptions::default() };
    CpuBackend::new().run(&inputs.problem()?, inputs, &options).map(drop)
}

#[test]
fn results_that_no_memory_holds_are_an_error() {
    let key = repeated(Shape::new(1, 1, 1, 8));
    for shape in [Shape::new(1, 1 << 44, 1, 8), Shape::new(1, 1, 1 << 44, 8)] {
        let query = repeated(shape);
        let refused = run(Inputs::new(&query, &key, &key), &Cancellation::new());
        assert!(
            matches!(refused, Err(Error::Tensor(TensorError::OutOfMemory { .. }))),
            "{refused:?}"
        );
        let refused = combine(&[(query.view(), &[0.0])]);
        assert!(refused.is_err(), "{refused:?}");
    }
    let bytes = [0; 32];
    let layout = Layout::contiguous(Shape::new(1, 1 << 60, 1, 1)).unwrap();
    assert!(Tensor::from_bytes(DType::F32, layout, &bytes).is_err());
}

/// Runs until somebody cancels, and says how long that took.
fn cancelled(work: impl FnOnce(&Cancellation) -> Result<(), Error> + Send) -> Duration {
    let cancellation = Cancellation::new();
    let mut since = None;
    let watch = || {
        cancellation.cancel();
        since.get_or_insert_with(Instant::now);
    };
    let result =
        CpuBackend::new().watched(|| work(&cancellation), Duration::from_millis(50), watch);
    assert!(
        matches!(result.unwrap(), Err(Error::Backend(BackendError::Cancelled))),
        "it was not cancelled"
    );
    since.expect("somebody watched").elapsed()
}

#[test]
fn long_runs_end_when_they_are_cancelled() {
    // Many queries, and few queries over more keys than anybody can wait for.
    let long = repeated(Shape::new(1, 1 << 17, 1, 64));
    let many = cancelled(|cancellation| run(Inputs::new(&long, &long, &long), cancellation));
    let (query, keys) =
        (repeated(Shape::new(1, 1, 8, 64)), repeated(Shape::new(1, 1 << 40, 2, 64)));
    let few = cancelled(|cancellation| run(Inputs::new(&query, &keys, &keys), cancellation));
    // A tile takes milliseconds in a build for tests, a task several seconds. The machine may have
    // other things to do.
    assert!(many.max(few) < Duration::from_secs(2), "{many:?}, {few:?}");

    let rows = Shape::new(1, 1 << 20, 4, 8);
    let part = Tensor::zeros(DType::F32, rows).unwrap();
    let sums = vec![0.0; rows.length * rows.heads];
    let cancellation = Cancellation::new();
    cancellation.cancel();
    let refused = combine_until(&[(part.view(), &sums)], DType::F32, &cancellation);
    assert!(matches!(refused, Err(Error::Backend(BackendError::Cancelled))), "{refused:?}");
}

#[test]
fn a_batch_entry_is_what_it_is_alone() {
    // More chunks of keys than are held at once: they end in the middle of a batch entry.
    let problem = Problem::new(3, 4, 2, 16).with_kv_heads(2).with_key_length(100_000);
    let tensors = InputTensors::random(&problem, 0).unwrap();
    let run = |problem: &Problem, inputs: Inputs<'_>| {
        CpuBackend::new().run(problem, inputs, &RunOptions::default()).unwrap()
    };
    let together = run(&problem, tensors.inputs());
    let mut single = problem.clone();
    single.batch = 1;
    for entry in 0..problem.batch {
        let part = |tensor: &Tensor, shape: Shape| {
            let size = tensor.bytes().len() / problem.batch;
            let bytes = &tensor.bytes()[entry * size..][..size];
            Tensor::from_bytes(tensor.dtype(), Layout::contiguous(shape).unwrap(), bytes).unwrap()
        };
        let query = part(&tensors.query, single.query_shape());
        let key = part(&tensors.key, single.key_shape());
        let value = part(&tensors.value, single.value_shape());
        let alone = run(&single, Inputs::new(&query, &key, &value));
        let output = part(&together.output, single.output_shape());
        assert_eq!(output.bytes(), alone.output.bytes(), "entry {entry}");
        assert_eq!(together.lse[entry * single.rows()..][..single.rows()], alone.lse[..]);
    }
}
