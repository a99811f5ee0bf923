//! The same calls on a GPU as on the CPU. Each test passes over itself where there is no GPU.
#![cfg(feature = "cuda")]

mod common;

use candle_core::{DType, Device, Result, Tensor, Var};
use flashcore_candle::candle_flash_attn::{flash_attn_alibi, flash_attn_varlen_paged_windowed};
use flashcore_candle::{
    Attention, Mask, Options, Placement, Rotary, Sequences, append, append_scaled, attend,
    attend_sequences, combine, flash_attn, plan, plan_sequences,
};

use common::{distance, gradients, refusal, relative};

/// The GPU, or a word on why not.
fn gpu() -> Option<Device> {
    if let Err(error) = flashcore::gpu::Device::count() {
        eprintln!("skipped: {error}");
        return None;
    }
    Some(Device::new_cuda(0).expect("there is a GPU"))
}

fn random<const N: usize>(dtype: DType, shape: [usize; N]) -> Result<Tensor> {
    Tensor::randn(0f32, 1., shape.as_slice(), &Device::Cpu)?.to_dtype(dtype)
}

#[test]
fn agrees_with_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for (dtype, bound) in [(DType::F32, 1e-4), (DType::F16, 4e-3), (DType::BF16, 4e-2)] {
        for (mask, softcap) in [
            (Mask::NONE, None),
            (Mask::CAUSAL, None),
            (Mask::window(Some(100), Some(0)), None),
            (Mask::CAUSAL.with_chunk(128), None),
            (Mask::CAUSAL, Some(2.0)),
        ] {
            for (batch, queries, keys, heads, kv_heads, dim) in
                [(2, 300, 300, 4, 4, 64), (1, 1, 515, 8, 2, 128), (1, 130, 131, 2, 2, 256)]
            {
                let query = random(dtype, [batch, queries, heads, dim])?;
                let key = random(dtype, [batch, keys, kv_heads, dim])?;
                let value = random(dtype, [batch, keys, kv_heads, dim])?;
                let options = Options { mask, softcap, lse: true, ..Options::default() };
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
                // Without the log-sum-exp the output is the same, bit for bit.
                let without = Options { lse: false, ..options.clone() };
                let again = attend(&query, &key, &value, &without)?;
                assert!(again.lse.is_none());
                assert_eq!(distance(&again.output, &found.output)?, 0.);
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

/// Query, key and value on a device.
fn on(device: &Device, tensors: &[Tensor; 3]) -> Result<[Tensor; 3]> {
    let [query, key, value] = tensors.each_ref().map(|tensor| tensor.to_device(device));
    Ok([query?, key?, value?])
}

#[test]
fn gradients_agree_with_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for (dtype, bound) in [(DType::F16, 5e-3), (DType::BF16, 4e-2)] {
        let list = Tensor::new(&[0.5f32, 0.25, 0.125, 0.0625], &Device::Cpu)?;
        for (mask, softcap, slopes, sinks) in [
            (Mask::NONE, None, None, None),
            (Mask::CAUSAL, None, None, None),
            (Mask::window(Some(100), Some(0)), None, None, None),
            (Mask::CAUSAL.with_chunk(128), None, None, None),
            (Mask::CAUSAL, Some(2.0), None, None),
            (Mask::CAUSAL, None, Some(&list), None),
            (Mask::CAUSAL, None, None, Some(&list)),
        ] {
            for (batch, queries, keys, kv_heads, dim) in
                [(2, 300, 300, 4, 64), (1, 200, 515, 2, 128), (1, 70, 131, 1, 80)]
            {
                let inputs = [
                    random(dtype, [batch, queries, 4, dim])?,
                    random(dtype, [batch, keys, kv_heads, dim])?,
                    random(dtype, [batch, keys, kv_heads, dim])?,
                ];
                let found = |device: &Device| {
                    let there =
                        |list: Option<&Tensor>| list.map(|it| it.to_device(device)).transpose();
                    let (slopes, sinks) = (there(slopes)?, there(sinks)?);
                    let options = Options { mask, softcap, slopes, sinks, ..Options::default() };
                    gradients(&on(device, &inputs)?, |[query, key, value]| {
                        Ok(attend(query, key, value, &options)?.output)
                    })
                };
                for (found, expected) in found(&gpu)?.iter().zip(&found(&Device::Cpu)?) {
                    assert!(found.device().is_cuda());
                    let error = relative(found, expected)?;
                    assert!(error < bound, "{dtype:?} {mask:?} {keys} {dim}: off by {error}");
                }
            }
        }
    }
    Ok(())
}

/// Views of one variable; a step of training runs on the stream of candle's other operations.
#[test]
fn gradients_go_through_views_to_one_variable() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let fused = random(DType::BF16, [2, 200, 3, 4, 64])?;
    let through = |device: &Device| {
        let fused = Var::from_tensor(&fused.to_device(device)?)?;
        let [query, key, value] = [0, 1, 2].map(|index| fused.narrow(2, index, 1)?.squeeze(2));
        let output = flash_attn(&query?, &key?, &value?, 0.125, true)?;
        let store = output.to_dtype(DType::F32)?.sqr()?.sum_all()?.backward()?;
        Ok::<_, candle_core::Error>(store.get(&fused).expect("a gradient").clone())
    };
    let error = relative(&through(&gpu)?, &through(&Device::Cpu)?)?;
    assert!(error < 4e-2, "off by {error}");
    Ok(())
}

/// Candle's f32 tensors have no gradients on a GPU, and that is said.
#[test]
fn gradients_that_no_kernel_computes_are_refused() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let query = Var::from_tensor(&random(DType::F32, [1, 8, 2, 64])?.to_device(&gpu)?)?;
    let output = flash_attn(&query, &query, &query, 0.125, true)?;
    let message = refusal(output.sum_all()?.backward());
    assert!(message.contains("no kernel can serve this problem"), "{message}");
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

/// Each way in which rows can lie, with every rule of scores, on a device.
fn attend_to_sequences(tensors: &[Tensor], device: &Device) -> Result<Vec<Attention>> {
    let tensors: Vec<_> =
        tensors.iter().map(|tensor| tensor.to_device(device)).collect::<Result<_>>()?;
    let [packed, padded, rows, pages, slopes, sinks] = &tensors[..] else { unreachable!() };
    let list = |numbers: &[u32]| Tensor::new(numbers, device);
    let queries = Placement::packed(&list(&[0, 90, 90, 140])?, 90);
    let ragged = Placement::packed(&list(&[0, 170, 230, 400])?, 170);
    let table = Tensor::new(&[[7u32, 0, 2, 5], [3, 3, 9, 9], [1, 8, 4, 4]], device)?;
    let paged = Placement::paged(&list(&[250, 2, 130])?, &table);
    let slots = Placement::entries(&list(&[4, 0, 3])?)
        .with_lengths(&list(&[60, 11, 9])?)
        .with_left_padding(&list(&[3, 0, 7])?);
    let plain = Options { lse: true, ..Options::default() };
    let causal = Options { mask: Mask::CAUSAL, ..plain.clone() };
    let window =
        Options { mask: Mask::window(Some(60), Some(0)), softcap: Some(2.0), ..plain.clone() };
    let chunk = Options { mask: Mask::CAUSAL.with_chunk(50), ..plain.clone() };
    let alibi = Options { slopes: Some(slopes.clone()), ..causal.clone() };
    let sinks = Options { sinks: Some(sinks.clone()), ..causal.clone() };
    let padding = Placement::padded;
    let mut results = Vec::new();
    for (query, keys, queries, placement) in [
        (packed, rows, queries.clone(), ragged),
        (packed, pages, queries, paged.clone()),
        (padded, pages, padding(), paged),
        (padded, pages, padding(), slots),
    ] {
        let sequences = Sequences { queries, keys: placement };
        for options in [&plain, &causal, &window, &chunk, &alibi, &sinks] {
            let plan = plan_sequences(query, keys, keys, &sequences, options)?;
            println!("{}: {}", plan.problem, plan.chosen.full_name());
            results.push(attend_sequences(query, keys, keys, &sequences, options)?);
        }
    }
    Ok(results)
}

#[test]
fn sequences_agree_with_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for (dtype, bound) in [(DType::F16, 4e-3), (DType::BF16, 4e-2)] {
        let tensors = [
            random(dtype, [140, 8, 128])?,
            random(dtype, [3, 2, 8, 128])?,
            random(dtype, [400, 2, 128])?,
            random(dtype, [10, 64, 2, 128])?,
            random(DType::F32, [3, 8])?.abs()?,
            random(DType::F32, [8])?,
        ];
        let expected = attend_to_sequences(&tensors, &Device::Cpu)?;
        let found = attend_to_sequences(&tensors, &gpu)?;
        for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(found.output.device().is_cuda());
            let error = distance(&found.output, &expected.output)?;
            assert!(error < bound, "{dtype:?} {number}: output off by {error}");
            let lse = |attention: &Attention| attention.lse.clone().expect("it was asked for");
            let error = distance(&lse(found), &lse(expected))?;
            assert!(error < 1e-3, "{dtype:?} {number}: lse off by {error}");
        }
        // The same queries over other keys are parts of a whole.
        let parts = |results: &[Attention]| combine(&[results[0].clone(), results[6].clone()]);
        let error = distance(&parts(&found)?.output, &parts(&expected)?.output)?;
        assert!(error < bound, "{dtype:?}: combined output off by {error}");
    }
    Ok(())
}

/// What candle-flash-attn has of it.
#[test]
fn slopes_and_pages_are_served() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let (query, key) = (random(DType::BF16, [2, 60, 8, 64])?, random(DType::BF16, [2, 70, 2, 64])?);
    let pages = key.reshape((5, 28, 2, 64))?;
    let slopes = random(DType::F32, [8])?.abs()?;
    let call = |device: &Device| {
        let there = |tensor: &Tensor| tensor.to_device(device);
        let (query, key, pages) = (there(&query)?, there(&key)?, there(&pages)?);
        let plain = flash_attn_alibi(&query, &key, &key, &there(&slopes)?, 0.125, true)?;
        let rows = query.flatten(0, 1)?;
        let queries = Tensor::new(&[0u32, 60, 120], device)?;
        let keys = Tensor::new(&[0u32, 65, 130], device)?;
        let table = Tensor::new(&[[0u32, 1, 4], [2, 3, 4]], device)?;
        let paged = flash_attn_varlen_paged_windowed(
            &rows,
            &pages,
            &pages,
            &queries,
            &keys,
            &table,
            None,
            60,
            65,
            0.125,
            None,
            Some(0),
            28,
            None,
        )?;
        Ok::<_, candle_core::Error>([plain.flatten(0, 1)?, paged])
    };
    for (found, expected) in call(&gpu)?.iter().zip(&call(&Device::Cpu)?) {
        let error = distance(found, expected)?;
        assert!(error < 4e-2, "off by {error}");
    }
    Ok(())
}

/// New tokens into pages, into batch entries, and into a cache of keys and values in one tensor.
#[test]
fn new_keys_are_written_as_on_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let angles = Tensor::rand(0f32, 6., (64, 32), &Device::Cpu)?;
    let (cosines, sines) = (angles.cos()?, angles.sin()?);
    for (dtype, interleaved) in [(DType::F16, true), (DType::BF16, false)] {
        let both = random(dtype, [9, 2, 16, 2, 64])?;
        let new = random(dtype, [2, 6, 2, 64])?;
        let [cosines, sines] =
            [&cosines, &sines].map(|table| table.to_dtype(dtype).expect("a table"));
        let write = |device: &Device| {
            // On a device of its own, since it is written to.
            let there = |tensor: &Tensor| tensor.copy()?.to_device(device);
            let both = there(&both)?;
            let caches = (both.get_on_dim(1, 0)?, both.get_on_dim(1, 1)?);
            let other = (there(&caches.0.contiguous()?)?, there(&caches.1.contiguous()?)?);
            let new = (there(&new.get(0)?)?, there(&new.get(1)?)?);
            let list = |numbers: &[u32]| Tensor::new(numbers, device);
            let table = Tensor::new(&[[7u32, 0], [3, 1], [5, 4]], device)?;
            let pages = Placement::paged(&list(&[6, 0, 29])?, &table);
            let entries = Placement::entries(&list(&[4, 8, 2])?).with_lengths(&list(&[6, 0, 12])?);
            let packed = Placement::packed(&list(&[0, 3, 5, 6])?, 3);
            let rotary = Rotary { cosines: there(&cosines)?, sines: there(&sines)?, interleaved };
            let lengths = [
                append((&caches.0, &caches.1), &pages, (&new.0, &new.1), &packed, Some(&rotary))?,
                append((&other.0, &other.1), &entries, (&new.0, &new.1), &packed, None)?,
            ];
            Ok::<_, candle_core::Error>((lengths, [both, other.0, other.1]))
        };
        let (lengths, expected) = write(&Device::Cpu)?;
        let (found_lengths, found) = write(&gpu)?;
        for (found, expected) in found_lengths.iter().zip(&lengths) {
            assert_eq!(found.to_vec1::<u32>()?, expected.to_vec1::<u32>()?);
        }
        // Turned keys are rounded once; the others are copied.
        assert!(distance(&found[0], &expected[0])? < 4e-2);
        assert_eq!(distance(&found[1], &expected[1])?, 0.);
        assert_eq!(distance(&found[2], &expected[2])?, 0.);
        assert!(distance(&expected[0], &both)? > 0.5);
    }
    Ok(())
}

/// Rows rounded into an 8-bit cache are those of the CPU bit for bit, and so are the factors that are
/// found; attention over them agrees.
#[test]
fn caches_of_8_bits_are_filled_and_read() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let (heads, kv_heads, dim) = (8, 2, 64);
    for (dtype, bound) in [(DType::F16, 4e-3), (DType::BF16, 4e-2)] {
        for (per_key, per_value) in [(false, false), (true, true), (true, false)] {
            let query = random(dtype, [3, 1, heads, dim])?;
            let new =
                [random(dtype, [3, 40, kv_heads, dim])?, random(dtype, [3, 40, kv_heads, dim])?];
            let of_tokens = Tensor::ones((2, 12, 16, kv_heads), DType::F32, &Device::Cpu)?;
            let of_heads = Tensor::rand(0.01f32, 0.02, (3, kv_heads), &Device::Cpu)?;
            let write = |device: &Device| {
                // Written to, so nobody else's.
                let there = |tensor: &Tensor| tensor.copy()?.to_device(device);
                let table: Vec<u32> = (0..12).map(|page| page * 5 % 12).collect();
                let table = Tensor::new(table.as_slice(), device)?.reshape((3, 4))?;
                let cache = || Tensor::zeros((12, 16, kv_heads, dim), DType::F8E4M3, device);
                let caches = [cache()?, cache()?];
                let (new, of_tokens) = ([there(&new[0])?, there(&new[1])?], there(&of_tokens)?);
                let factors = |per_token: bool, side: usize| match per_token {
                    true => of_tokens.get(side),
                    false => there(&of_heads),
                };
                let descales = [factors(per_key, 0)?, factors(per_value, 1)?];
                let lengths = append_scaled(
                    (&caches[0], &caches[1]),
                    &Placement::paged(&Tensor::new(&[0u32, 7, 24], device)?, &table),
                    (&new[0], &new[1]),
                    &Placement::padded(),
                    None,
                    (&descales[0], &descales[1]),
                )?;
                let options = Options {
                    mask: Mask::CAUSAL,
                    k_descale: Some(descales[0].clone()),
                    v_descale: Some(descales[1].clone()),
                    ..Options::default()
                };
                let sequences = Sequences::paged(&lengths, &table);
                let [key, value] = &caches;
                let found = attend_sequences(&there(&query)?, key, value, &sequences, &options)?;
                Ok::<_, candle_core::Error>((caches, descales, found.output))
            };
            let (caches, descales, expected) = write(&Device::Cpu)?;
            let (found, found_descales, output) = write(&gpu)?;
            for (found, expected) in found.iter().zip(&caches) {
                assert_eq!(distance(found, expected)?, 0.);
            }
            for (found, expected) in found_descales.iter().zip(&descales) {
                assert_eq!(distance(found, expected)?, 0.);
            }
            let error = distance(&output, &expected)?;
            assert!(error < bound, "{dtype:?} {per_key} {per_value}: off by {error}");
            assert!(distance(&output, &output.zeros_like()?)? > 0.1);
        }
    }
    Ok(())
}

/// Decode on many threads: plans of one size, each with the workspace of its thread's stream.
#[test]
fn each_thread_has_its_own_workspace() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    std::thread::scope(|scope| {
        let work = || -> Result<()> {
            let query = random(DType::F16, [2, 1, 8, 64])?;
            let cache = random(DType::F16, [100, 64, 2, 64])?;
            let numbers: Vec<u32> = (0..100).map(|page| page * 7 % 100).collect();
            let call = |query: &Tensor, cache: &Tensor| {
                let device = query.device();
                let table = Tensor::new(numbers.as_slice(), device)?.reshape((2, 50))?;
                let sequences = Sequences::paged(&Tensor::new(&[3000u32, 1700], device)?, &table);
                attend_sequences(query, cache, cache, &sequences, &Options::default())
            };
            let expected = call(&query, &cache)?.output;
            let (query, cache) = (query.to_device(&gpu)?, cache.to_device(&gpu)?);
            for _ in 0..200 {
                assert!(distance(&call(&query, &cache)?.output, &expected)? < 4e-3);
            }
            Ok(())
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(work)).collect();
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
    // A list as well.
    let query = query.to_device(&gpu)?;
    let lengths = Tensor::new(&[8u32], &Device::Cpu)?;
    let keys = Placement::padded().with_lengths(&lengths);
    let sequences = Sequences { queries: Placement::padded(), keys };
    let error = attend_sequences(&query, &query, &query, &sequences, &Options::default());
    let text = error.unwrap_err().to_string();
    assert!(text.contains("list of lengths is on Cpu, expected Cuda { gpu_id: 0 }"), "{text}");
    Ok(())
}
