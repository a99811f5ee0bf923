//! Attention over parts of the keys, put together by the log-sum-exps of the parts.

use candle_core::{DType, Result, Tensor};

use crate::Attention;

/// What attention over all keys would have given, from attention of the same queries over parts of
/// them: a shared prefix and what follows it, levels of a cascade, slices of a context. Each part
/// must have its log-sum-exp ([`Options::lse`](crate::Options::lse)).
///
/// It is made of candle's operations, in f32, wherever the tensors are.
pub fn merge(parts: &[Attention]) -> Result<Attention> {
    let Some(first) = parts.first() else {
        candle_core::bail!("merge: there are no parts, expected at least one");
    };
    let dtype = first.output.dtype();
    let mut lses = Vec::with_capacity(parts.len());
    for (number, part) in parts.iter().enumerate() {
        let Some(lse) = &part.lse else {
            candle_core::bail!("merge: part {number} has no log-sum-exp, expected one");
        };
        if part.output.shape() != first.output.shape() || part.output.dtype() != dtype {
            candle_core::bail!(
                "merge: part {number} has shape {:?} and dtype {:?}, expected {:?} and {dtype:?} \
                 like part 0",
                part.output.dims(),
                part.output.dtype(),
                first.output.dims()
            );
        }
        lses.push(lse);
    }
    let lse = Tensor::stack(&lses, 0)?;
    let top = lse.max_keepdim(0)?;
    // A row that sees no key anywhere has no largest score.
    let anything = top.gt(f64::from(f32::MIN))?;
    let base = anything.where_cond(&top, &top.zeros_like()?)?;
    let weights = lse.broadcast_sub(&base)?.exp()?;
    let total = weights.sum_keepdim(0)?;
    let shares = weights.broadcast_div(&anything.where_cond(&total, &total.ones_like()?)?)?;
    // Like the outputs, (.., length, heads, 1).
    let shares = shares.transpose(candle_core::D::Minus1, candle_core::D::Minus2)?;
    let shares = shares.unsqueeze(candle_core::D::Minus1)?.contiguous()?;
    let mut output = first.output.to_dtype(DType::F32)?.zeros_like()?;
    for (number, part) in parts.iter().enumerate() {
        let share = shares.get(number)?.broadcast_as(output.shape())?;
        // The output of a part that saw nothing may be anything.
        let part =
            share.gt(0.)?.where_cond(&part.output.to_dtype(DType::F32)?, &output.zeros_like()?)?;
        output = (output + (part * share)?)?;
    }
    let lse = (base + total.log()?)?.squeeze(0)?;
    Ok(Attention { output: output.to_dtype(dtype)?, lse: Some(lse) })
}
