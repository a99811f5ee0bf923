//! Attention over candle tensors against candle's own operations, and the words of every refusal.

mod common;

use candle_core::{DType, Device, Result, Tensor, Var};
use flashcore_candle::{Attention, Mask, Options, attend, flash_attn, plan};

use common::{SIZES, distance, plain, refusal, tensors};

#[test]
fn agrees_with_the_plain_algorithm() -> Result<()> {
    for (dtype, bound) in [(DType::F32, 1e-5), (DType::F16, 2e-3), (DType::BF16, 2e-2)] {
        let masks = [
            Mask::NONE,
            Mask::CAUSAL,
            Mask::window(Some(30), Some(4)),
            Mask::CAUSAL.with_chunk(16),
        ];
        for mask in masks {
            for (sizes, heads, dims) in SIZES {
                let inputs = tensors(dtype, sizes, heads, dims)?;
                for (softmax_scale, softcap) in [(None, None), (Some(0.3), None), (None, Some(2.5))]
                {
                    let lse = true;
                    let options =
                        Options { mask, softmax_scale, softcap, lse, ..Options::default() };
                    let [query, key, value] = &inputs;
                    let Attention { output, lse } = attend(query, key, value, &options)?;
                    let (expected, expected_lse) = plain(&inputs, &options)?;
                    let lse = lse.expect("it was asked for");
                    assert_eq!(output.dims(), expected.dims());
                    assert_eq!((output.dtype(), lse.dtype()), (dtype, DType::F32));
                    let error = distance(&output, &expected)?;
                    assert!(error < bound, "{dtype:?} {sizes:?} {mask:?}: output off by {error}");
                    let error = distance(&lse, &expected_lse)?;
                    assert!(error < 1e-5, "{dtype:?} {sizes:?} {mask:?}: lse off by {error}");
                    // Without the log-sum-exp the output is the same, bit for bit.
                    let without = Options { lse: false, ..options };
                    let again = attend(query, key, value, &without)?;
                    assert!(again.lse.is_none());
                    assert_eq!(distance(&again.output, &output)?, 0.);
                }
            }
        }
    }
    Ok(())
}

/// Views of larger tensors are read where they lie.
#[test]
fn any_strides_will_do() -> Result<()> {
    let [query, key, value] = tensors(DType::F32, [2, 40, 50], [4, 2], [32, 32])?;
    let expected = flash_attn(&query, &key, &value, 0.2, true)?;
    // Heads before positions, as caches are kept.
    let heads_first = |tensor: &Tensor| tensor.transpose(1, 2)?.contiguous()?.transpose(1, 2);
    let (key_view, value_view) = (heads_first(&key)?, heads_first(&value)?);
    assert!(!key_view.is_contiguous());
    let output = flash_attn(&heads_first(&query)?, &key_view, &value_view, 0.2, true)?;
    assert_eq!(distance(&output, &expected)?, 0.);
    // A slice that begins in the middle of its memory.
    let padded = key.pad_with_zeros(1, 7, 5)?.pad_with_zeros(0, 1, 0)?;
    let slice = padded.narrow(0, 1, 2)?.narrow(1, 7, 50)?;
    let output = flash_attn(&query, &slice, &value, 0.2, true)?;
    assert_eq!(distance(&output, &expected)?, 0.);
    Ok(())
}

#[test]
fn nothing_to_compute_is_no_error() -> Result<()> {
    let [query, key, value] = tensors(DType::F32, [1, 3, 0], [2, 2], [8, 8])?;
    let options = Options { lse: true, ..Options::default() };
    let attention = attend(&query, &key, &value, &options)?;
    assert_eq!(attention.output.flatten_all()?.to_vec1::<f32>()?, [0.; 48]);
    let lse = attention.lse.expect("it was asked for").flatten_all()?.to_vec1::<f32>()?;
    assert_eq!(lse, [f32::NEG_INFINITY; 6]);
    let [query, key, value] = tensors(DType::F32, [1, 0, 3], [2, 2], [8, 8])?;
    assert_eq!(attend(&query, &key, &value, &options)?.output.dims(), [1, 0, 2, 8]);
    // Slices of a projection of no tokens, which begin behind the end of its memory.
    let fused = Var::zeros((1, 0, 6, 8), DType::F32, query.device())?;
    let [query, key, value] =
        [fused.narrow(2, 0, 2)?, fused.narrow(2, 2, 2)?, fused.narrow(2, 4, 2)?];
    let output = flash_attn(&query, &key, &value, 0.2, true)?;
    assert_eq!(output.dims(), [1, 0, 2, 8]);
    let gradients = output.sum_all()?.backward()?;
    assert_eq!(gradients.get(&fused).expect("it is a variable").dims(), fused.dims());
    Ok(())
}

#[test]
fn wrong_use_names_the_tensor_and_what_was_expected() -> Result<()> {
    let [query, key, value] = tensors(DType::F32, [2, 3, 5], [4, 2], [16, 16])?;
    let call = |query: &Tensor, key: &Tensor, value: &Tensor| {
        refusal(attend(query, key, value, &Options::default()))
    };
    assert_eq!(
        call(&query.squeeze(0)?.flatten(0, 1)?, &key, &value),
        "attention: the query has shape [6, 4, 16], expected four dimensions: (batch, length, \
         heads, dim)"
    );
    assert_eq!(
        call(&query, &key.to_dtype(DType::F16)?, &value),
        "attention: the key has dtype F16, expected F32 like the query"
    );
    assert_eq!(
        call(&query.to_dtype(DType::F64)?, &key, &value),
        "attention: the query has dtype F64, expected F32, F16, BF16 or F8E4M3"
    );
    assert_eq!(
        call(&query, &key.narrow(3, 0, 7)?.contiguous()?, &value),
        "attention: the key has shape [2, 5, 2, 7], expected batch 2 and head dim 16 like the \
         query's [2, 3, 4, 16]"
    );
    assert_eq!(
        call(&query, &key, &value.narrow(1, 0, 4)?),
        "attention: the value has shape [2, 4, 2, 16], expected batch, length and heads of the \
         key's [2, 5, 2, 16]"
    );
    assert_eq!(
        call(&query.transpose(1, 3)?, &key, &value),
        "attention: the query has strides [192, 1, 16, 64], expected the last dimension without \
         gaps: call `contiguous` on it"
    );
    let [_, key, value] = tensors(DType::F32, [2, 3, 5], [4, 3], [16, 16])?;
    assert_eq!(
        call(&query, &key, &value),
        "4 query heads cannot be divided among 3 key/value heads"
    );
    let scale = Options { softmax_scale: Some(f32::NAN), ..Options::default() };
    assert_eq!(
        refusal(attend(&query, &query, &query, &scale)),
        "the softmax scale must be finite, not NaN"
    );
    Ok(())
}

/// A gradient that cannot be had is an error and not a zero.
#[test]
fn gradients_that_cannot_be_had_are_refused() -> Result<()> {
    let [query, key, value] = tensors(DType::F32, [1, 3, 5], [2, 2], [16, 16])?;
    let variable = Var::from_tensor(&key)?;
    let lse = Options { lse: true, ..Options::default() };
    assert_eq!(
        refusal(attend(&query, variable.as_tensor(), &value, &lse)),
        "the log-sum-exp has no gradient, and the key depends on a variable: detach it, or do \
         without the log-sum-exp"
    );
    assert!(attend(&query, &variable.as_detached_tensor(), &value, &lse).is_ok());
    Ok(())
}

#[test]
fn the_plan_says_what_runs() -> Result<()> {
    let [query, key, value] = tensors(DType::BF16, [1, 3, 5], [2, 2], [16, 16])?;
    let plan = plan(&query, &key, &value, &Options::default())?;
    assert_eq!(plan.chosen.full_name(), "cpu/blocked");
    Ok(())
}

/// Tensors of 8 bits are what they stand for, under every kind of factors.
#[test]
fn tensors_of_8_bits_come_with_factors() -> Result<()> {
    let device = &Device::Cpu;
    let random = |shape: (usize, usize, usize, usize)| Tensor::randn(0f32, 20., shape, device);
    let (query, key) = (random((2, 5, 4, 16))?.affine(0.05, 0.)?, random((2, 9, 2, 16))?);
    let value = random((2, 9, 2, 16))?;
    let [small_key, small_value] =
        [&key, &value].map(|tensor| tensor.to_dtype(DType::F8E4M3).unwrap());
    let wide =
        |small: &Tensor, factors: &Tensor| small.to_dtype(DType::F32)?.broadcast_mul(factors);
    let one = Tensor::new(0.05f32, device)?;
    let heads = Tensor::new(&[0.05f32, 0.02], device)?;
    let each = Tensor::new(&[[0.05f32, 0.02], [0.01, 0.03]], device)?;
    let tokens = Tensor::rand(0.01f32, 0.05, (2, 9, 2), device)?;
    for (factors, shape) in [
        (one.clone(), vec![1, 1, 1, 1]),
        (heads.clone(), vec![1, 1, 2, 1]),
        (each, vec![2, 1, 2, 1]),
        (heads.expand((2, 2))?, vec![2, 1, 2, 1]),
        (tokens, vec![2, 9, 2, 1]),
    ] {
        let options = Options {
            k_descale: Some(factors.clone()),
            v_descale: Some(factors.clone()),
            ..Options::default()
        };
        let found = attend(&query, &small_key, &small_value, &options)?.output;
        let factors = factors.contiguous()?.reshape(shape)?;
        let [key, value] = [&small_key, &small_value].map(|small| wide(small, &factors).unwrap());
        let expected = attend(&query, &key, &value, &Options::default())?.output;
        let error = (found - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(error < 1e-5, "{error}");
    }
    // Queries too: the output is BF16 then.
    let small_query = query.to_dtype(DType::F8E4M3)?;
    let options = Options { q_descale: Some(one.clone()), ..Options::default() };
    let found = attend(&small_query, &small_query, &small_query, &options)?.output;
    assert_eq!(found.dtype(), DType::BF16);
    let refusal = |options: Options, key: &Tensor| {
        attend(&query, key, &small_value, &options).unwrap_err().to_string()
    };
    let three = Tensor::ones(3, DType::F32, device)?;
    let wrong = Options { k_descale: Some(three), ..Options::default() };
    let text = refusal(wrong, &small_key);
    assert!(text.contains("k_descale has shape [3]") && text.contains("[2, 2]"), "{text}");
    let unused = Options { k_descale: Some(one), ..Options::default() };
    let text = refusal(unused, &key);
    assert!(text.contains("descale factors are of 8-bit tensors"), "{text}");
    Ok(())
}
