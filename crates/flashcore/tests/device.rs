//! Calls over tensors on a GPU. Every test prints "skipped" and passes where there is none.
#![cfg(feature = "cuda")]

use flashcore::gpu::{Buffer, Gpu, Tensors};
use flashcore::{DType, Error, InputTensors, Mask, Problem};

/// The plan's lists are copied to the device while the stream that belongs to the `Gpu` is captured.
#[test]
fn the_first_call_may_be_captured_on_the_gpus_own_stream() {
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) => return println!("skipped: no GPU ({error})"),
    };
    let stream = gpu.stream();
    let problem = Problem::new(1, 1, 200, 64).with_dtype(DType::BF16).with_mask(Mask::CAUSAL);
    let host = InputTensors::random(&problem, 0).unwrap();
    let upload = |bytes: &[u8]| Buffer::from_slice(stream, bytes).unwrap();
    let inputs = [&host.query, &host.key, &host.value].map(|tensor| upload(tensor.bytes()));
    let output = upload(&vec![0xff; host.query.bytes().len()]);
    let [query, key, value] = inputs.each_ref().map(Buffer::address);
    let tensors = Tensors::contiguous(&problem, [query, key, value, output.address()], None);
    let tensors = tensors.unwrap();

    let attend = || -> Result<(), Error> { gpu.attend(stream, &problem, &tensors).map(drop) };
    let graph = stream.capture(|_| attend()).unwrap();
    let untouched = stream.download_vec::<u8>(output.all()).unwrap();
    assert!(untouched.iter().all(|byte| *byte == 0xff));
    graph.instantiate().unwrap().launch(stream).unwrap();
    let replayed = stream.download_vec::<u8>(output.all()).unwrap();
    attend().unwrap();
    assert_eq!(stream.download_vec::<u8>(output.all()).unwrap(), replayed);
    assert_ne!(replayed, untouched);
}
