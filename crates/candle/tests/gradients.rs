//! Gradients through attention against candle's own through the plain algorithm.

mod common;

use candle_core::{DType, Device, Result, Tensor, Var};
use flashcore_candle::{Mask, Options, Placement, Sequences, attend, attend_sequences, flash_attn};

use common::{SIZES, distance, gradients, plain, refusal, relative, tensors, variables};

/// Every mask, and every rule of scores under a causal one.
fn options(heads: usize) -> Result<Vec<Options>> {
    let numbers = |scale: f32| {
        let numbers: Vec<f32> = (1..=heads).map(|head| scale * head as f32).collect();
        Tensor::new(numbers, &Device::Cpu)
    };
    let masked = |mask| Options { mask, ..Options::default() };
    let causal = masked(Mask::CAUSAL);
    Ok(vec![
        masked(Mask::NONE),
        masked(Mask::window(Some(30), Some(4))),
        masked(Mask::CAUSAL.with_chunk(16)),
        Options { softmax_scale: Some(0.3), ..causal.clone() },
        Options { softcap: Some(2.5), ..causal.clone() },
        Options { slopes: Some(numbers(0.02)?), ..causal.clone() },
        Options { sinks: Some(numbers(0.3)?), ..causal.clone() },
        causal,
    ])
}

#[test]
fn agree_with_candles_own() -> Result<()> {
    for (dtype, bound) in [(DType::F32, 1e-5), (DType::F16, 3e-3), (DType::BF16, 2e-2)] {
        for (sizes, heads, dims) in SIZES {
            let inputs = tensors(dtype, sizes, heads, dims)?;
            let [query, key, value] = inputs.each_ref().map(|tensor| tensor.to_dtype(DType::F64));
            let wide = [query?, key?, value?];
            for options in options(heads[0])? {
                let found = gradients(&inputs, |[query, key, value]| {
                    Ok(attend(query, key, value, &options)?.output)
                })?;
                let expected = gradients(&wide, |wide| Ok(plain(wide, &options)?.0))?;
                for ((found, expected), name) in
                    found.iter().zip(&expected).zip(["query", "key", "value"])
                {
                    assert_eq!((found.dtype(), found.dims()), (dtype, expected.dims()));
                    let error = relative(found, expected)?;
                    let place = format!("{dtype:?} {sizes:?} {options:?}: {name}");
                    assert!(error < bound, "{place} off by {error}");
                }
            }
        }
    }
    Ok(())
}

/// Packed sequences, one of them empty, and padded ones of other lengths than their place.
#[test]
fn of_sequences_are_those_of_each() -> Result<()> {
    let [query, key, value] = tensors(DType::F32, [1, 23, 31], [4, 2], [32, 32])?;
    let packed = [query.squeeze(0)?, key.squeeze(0)?, value.squeeze(0)?];
    let list = |numbers: &[u32]| Tensor::new(numbers, &Device::Cpu);
    let (queries, keys) = ([0, 10, 10, 23], [0, 12, 15, 31]);
    let sequences = Sequences::ragged((&list(&queries)?, 13), (&list(&keys)?, 16));
    for mask in [Mask::NONE, Mask::CAUSAL, Mask::window(Some(4), Some(0))] {
        let options = Options { mask, ..Options::default() };
        let found = gradients(&packed, |[query, key, value]| {
            Ok(attend_sequences(query, key, value, &sequences, &options)?.output)
        })?;
        let expected = gradients(&packed, |[query, key, value]| {
            let part = |tensor: &Tensor, starts: &[u32; 4], index: usize| {
                let (begin, end) = (starts[index] as usize, starts[index + 1] as usize);
                tensor.narrow(0, begin, end - begin)?.unsqueeze(0)
            };
            let mut parts = Vec::new();
            for index in [0, 2] {
                let key = part(key, &keys, index)?;
                let own = [part(query, &queries, index)?, key, part(value, &keys, index)?];
                parts.push(plain(&own, &options)?.0.squeeze(0)?.to_dtype(DType::F32)?);
            }
            Tensor::cat(&parts, 0)
        })?;
        for (found, expected) in found.iter().zip(&expected) {
            assert!(relative(found, expected)? < 1e-5, "{mask:?}");
        }
        // The keys of the sequence that has no queries.
        assert_eq!(found[1].narrow(0, 12, 3)?.abs()?.sum_all()?.to_scalar::<f32>()?, 0.);
    }
    let inputs = tensors(DType::F32, [2, 5, 9], [2, 1], [16, 16])?;
    let padded = Placement::padded().with_lengths(&list(&[9, 6])?);
    let keys = padded.with_left_padding(&list(&[0, 2])?);
    let sequences = Sequences { queries: Placement::padded(), keys };
    let found = gradients(&inputs, |[query, key, value]| {
        Ok(attend_sequences(query, key, value, &sequences, &Options::default())?.output)
    })?;
    let expected = gradients(&inputs, |[query, key, value]| {
        let all = plain(
            &[query.narrow(0, 0, 1)?, key.narrow(0, 0, 1)?, value.narrow(0, 0, 1)?],
            &Options::default(),
        )?;
        let few = |tensor: &Tensor| tensor.narrow(0, 1, 1)?.narrow(1, 2, 4);
        let some = plain(&[query.narrow(0, 1, 1)?, few(key)?, few(value)?], &Options::default())?;
        Tensor::cat(&[all.0, some.0], 0)?.to_dtype(DType::F32)
    })?;
    for (found, expected) in found.iter().zip(&expected) {
        assert!(relative(found, expected)? < 1e-5);
    }
    Ok(())
}

/// Views of one variable, as a fused projection gives them, with the heads before the positions.
#[test]
fn go_through_views_to_one_variable() -> Result<()> {
    let fused = Var::randn(0f32, 1., (2, 21, 3, 4, 32), &Device::Cpu)?;
    let weights = Tensor::randn(0f32, 1., (2, 21, 4, 32), &Device::Cpu)?;
    let through = |heads_first: bool, attention: &dyn Fn([Tensor; 3]) -> Result<Tensor>| {
        let [query, key, value] = [0, 1, 2].map(|index| {
            let tensor = fused.narrow(2, index, 1)?.squeeze(2)?;
            match heads_first {
                true => tensor.transpose(1, 2)?.contiguous()?.transpose(1, 2),
                false => Ok(tensor),
            }
        });
        let loss = attention([query?, key?, value?])?.mul(&weights)?.sum_all()?;
        Ok::<_, candle_core::Error>(loss.backward()?.get(&fused).expect("a gradient").clone())
    };
    let expected = through(false, &|inputs| {
        let options = Options { mask: Mask::CAUSAL, ..Options::default() };
        plain(&inputs, &options)?.0.to_dtype(DType::F32)
    })?;
    for heads_first in [false, true] {
        let found = through(heads_first, &|[query, key, value]| {
            flash_attn(&query, &key, &value, 1. / 32f32.sqrt(), true)
        })?;
        assert!(relative(&found, &expected)? < 1e-5);
    }
    Ok(())
}

/// Candle may walk a graph more than once, and asks only for what depends on a variable.
#[test]
fn can_be_had_again_and_only_where_they_are_needed() -> Result<()> {
    let [query, key, value] = tensors(DType::F32, [1, 30, 40], [2, 2], [16, 16])?;
    let key = Var::from_tensor(&key)?;
    let output = flash_attn(&query, &key, &value, 0.25, true)?;
    let loss = output.sqr()?.sum_all()?;
    let (first, second) = (loss.backward()?, loss.backward()?);
    let of_key = |store: &candle_core::backprop::GradStore| store.get(&key).unwrap().clone();
    assert_eq!(distance(&of_key(&first), &of_key(&second))?, 0.);
    assert!(first.get(&query).is_none() && first.get(&value).is_none());
    Ok(())
}

#[test]
fn are_zero_where_nothing_is_seen() -> Result<()> {
    // More queries than keys: the first ones see none.
    let inputs = tensors(DType::F32, [1, 6, 4], [2, 2], [16, 16])?;
    let causal = |[query, key, value]: &[Tensor; 3]| flash_attn(query, key, value, 0.25, true);
    let [query, ..] = gradients(&inputs, causal)?;
    assert_eq!(query.narrow(1, 0, 2)?.abs()?.sum_all()?.to_scalar::<f32>()?, 0.);
    assert!(query.narrow(1, 3, 3)?.abs()?.sum_all()?.to_scalar::<f32>()? > 0.);
    let inputs = tensors(DType::F32, [1, 6, 0], [2, 2], [16, 16])?;
    let [query, key, _] = gradients(&inputs, causal)?;
    assert_eq!(query.abs()?.sum_all()?.to_scalar::<f32>()?, 0.);
    assert_eq!(key.dims(), [1, 0, 2, 16]);
    Ok(())
}

#[test]
fn of_a_cache_are_refused() -> Result<()> {
    let [query, cache, _] = tensors(DType::F32, [2, 1, 16], [2, 2], [16, 16])?;
    let [query, cache, _] = variables(&[query, cache.clone(), cache])?;
    let lengths = Tensor::new(&[20u32, 3], &Device::Cpu)?;
    let table = Tensor::new(&[[0u32, 1], [1, 1]], &Device::Cpu)?;
    let sequences = Sequences::paged(&lengths, &table);
    let attention = attend_sequences(&query, &cache, &cache, &sequences, &Options::default())?;
    assert_eq!(
        refusal(attention.output.sum_all()?.backward()),
        "attention: the placement of keys is of a cache, which has no gradients, expected padded or \
         packed"
    );
    Ok(())
}
