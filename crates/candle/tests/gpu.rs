//! The same calls on a GPU as on the CPU. Each test passes over itself where there is no GPU.
#![cfg(feature = "cuda")]

use candle_core::{DType, Device, Result, Tensor};
use flashcore_candle::{Mask, Options, attend, flash_attn, plan};

/// The GPU, or a word on why not.
fn gpu() -> Option<Device> {
    if let Err(error) = flashcore::gpu::Device::count() {
        eprintln!("skipped: {error}");
        return None;
    }
    // Nothing in these tests needs a kernel of candle's.
    Some(Device::new_cuda(0).expect("there is a GPU"))
}

fn random(dtype: DType, shape: [usize; 4]) -> Result<Tensor> {
    Tensor::randn(0f32, 1., shape.as_slice(), &Device::Cpu)?.to_dtype(dtype)
}

fn distance(one: &Tensor, other: &Tensor) -> Result<f64> {
    let wide = |tensor: &Tensor| tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64);
    (wide(one)? - wide(other)?)?.abs()?.flatten_all()?.max(0)?.to_scalar()
}

#[test]
fn agrees_with_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for (dtype, bound) in [(DType::F32, 1e-4), (DType::F16, 4e-3), (DType::BF16, 4e-2)] {
        for mask in [Mask::None, Mask::Causal] {
            for (batch, queries, keys, heads, kv_heads, dim) in
                [(2, 300, 300, 4, 4, 64), (1, 1, 515, 8, 2, 128), (1, 130, 131, 2, 2, 256)]
            {
                let query = random(dtype, [batch, queries, heads, dim])?;
                let key = random(dtype, [batch, keys, kv_heads, dim])?;
                let value = random(dtype, [batch, keys, kv_heads, dim])?;
                let options = Options { mask, lse: true, ..Options::default() };
                let expected = attend(&query, &key, &value, &options)?;
                let [query, key, value] =
                    [&query, &key, &value].map(|tensor| tensor.to_device(&gpu));
                let (query, key, value) = (query?, key?, value?);
                let found = attend(&query, &key, &value, &options)?;
                assert!(found.output.device().is_cuda());
                let error = distance(&found.output, &expected.output)?;
                assert!(error < bound, "{dtype:?} {mask:?} {keys} {dim}: output off by {error}");
                let error = distance(&found.lse.unwrap(), &expected.lse.unwrap())?;
                assert!(error < 1e-3, "{dtype:?} {mask:?} {keys} {dim}: lse off by {error}");
                let plan = plan(&query, &key, &value, &options)?;
                println!("{dtype:?} {mask:?} {keys} {dim}: {}", plan.chosen.full_name());
            }
        }
    }
    Ok(())
}

/// Views are read where they lie, or by a kernel that can.
#[test]
fn any_strides_will_do() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let query = random(DType::BF16, [1, 100, 4, 64])?;
    let cache = random(DType::BF16, [1, 4, 200, 64])?;
    let expected = {
        let key = cache.narrow(2, 50, 100)?.transpose(1, 2)?;
        flash_attn(&query, &key, &key, 0.125, true)?
    };
    let key = cache.to_device(&gpu)?.narrow(2, 50, 100)?.transpose(1, 2)?;
    let found = flash_attn(&query.to_device(&gpu)?, &key, &key, 0.125, true)?;
    assert!(distance(&found, &expected)? < 4e-2);
    Ok(())
}

/// Many calls at once from many threads, each with its own tensors: one kernel without memory of
/// its own, and one that puts split keys together there.
#[test]
fn threads_share_what_was_planned() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    std::thread::scope(|scope| {
        let work = |seed: usize| -> Result<()> {
            let query = random(DType::F16, [1, 64 + seed % 3, 4, 64])?;
            let key = random(DType::F16, [1, 5000, 4, 64])?;
            let expected = flash_attn(&query, &query, &query, 0.125, false)?;
            let last = query.narrow(1, 0, 1)?;
            let expected_of_many = flash_attn(&last, &key, &key, 0.125, false)?;
            // Candle's stream is another one on each thread, under one handle.
            let (query, key) = (query.to_device(&gpu)?, key.to_device(&gpu)?);
            let last = query.narrow(1, 0, 1)?;
            for _ in 0..500 {
                let found = flash_attn(&query, &query, &query, 0.125, false)?;
                let found_of_many = flash_attn(&last, &key, &key, 0.125, false)?;
                assert!(distance(&found, &expected)? < 4e-3);
                assert!(distance(&found_of_many, &expected_of_many)? < 4e-3);
            }
            Ok(())
        };
        let threads: Vec<_> = (0..8).map(|seed| scope.spawn(move || work(seed))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("a thread that ends"))
    })
}

#[test]
fn mixed_devices_are_refused() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let query = random(DType::F16, [1, 8, 2, 64])?;
    let error = attend(&query.to_device(&gpu)?, &query, &query, &Options::default()).unwrap_err();
    let text = error.to_string();
    let text = text.lines().next().unwrap_or_default();
    assert_eq!(text, "attention: the key is on Cpu, expected Cuda { gpu_id: 0 } like the query");
    Ok(())
}
