//! Combining attention over parts of the keys, weighted by the log-sum-exps of the parts.

use candle_core::{Device, Result};
use flashcore::Shape;

use crate::Attention;
use crate::arguments::{check_alike, check_detached, check_numbers, element, no_device, refusal};
use crate::placement::check_place;

/// Computes attention over all keys from attention of the same queries over parts of them: a shared
/// prefix and what follows it, levels of a cascade, slices of a context. Each part must have its
/// log-sum-exp ([`Options::lse`](crate::Options::lse)).
///
/// A row that no part saw has an output of zeros and a log-sum-exp of minus infinity.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use flashcore_candle::{Options, attend, combine};
///
/// # fn main() -> candle_core::Result<()> {
/// let query = Tensor::randn(0f32, 1., (1, 3, 8, 64), &Device::Cpu)?;
/// let key = Tensor::randn(0f32, 1., (1, 50, 2, 64), &Device::Cpu)?;
/// let options = Options { lse: true, ..Options::default() };
/// let part = |begin: usize, length: usize| {
///     let key = key.narrow(1, begin, length)?;
///     attend(&query, &key, &key, &options)
/// };
/// let whole = combine(&[part(0, 20)?, part(20, 30)?])?;
/// assert_eq!(whole.output.dims(), query.dims());
/// # Ok(())
/// # }
/// ```
pub fn combine(parts: &[Attention]) -> Result<Attention> {
    let Some(Attention { output: first, .. }) = parts.first() else {
        candle_core::bail!("combine: there are no parts, expected at least one");
    };
    let (shape, lse_shape) = match *first.dims() {
        [rows, heads, dim] => (Shape::new(1, rows, heads, dim), vec![heads, rows]),
        [batch, length, heads, dim] => {
            (Shape::new(batch, length, heads, dim), vec![batch, heads, length])
        }
        ref dims => {
            let expected = "that of an attention's";
            return Err(refusal("output of part 0", format!("has shape {dims:?}"), expected));
        }
    };
    element("output of part 0", first)?;
    let (mut outputs, mut lses) = (Vec::new(), Vec::new());
    for (number, Attention { output, lse }) in parts.iter().enumerate() {
        let Some(lse) = lse else {
            candle_core::bail!("combine: part {number} has no log-sum-exp, expected one");
        };
        let name = format!("output of part {number}");
        check_alike((&name, output), ("output of part 0", first))?;
        check_detached(&name, output)?;
        check_place(&name, output, first.dims(), first.device())?;
        check_numbers(&format!("log-sum-exp of part {number}"), lse, &lse_shape, first.device())?;
        outputs.push(output);
        lses.push(lse);
    }
    let (output, lse) = match first.device() {
        Device::Cpu => crate::cpu::combine(shape, &outputs, &lses)?,
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => crate::cuda::combine(shape, &outputs, &lses, device)?,
        other => return Err(no_device(other)),
    };
    let (output, lse) = (crate::tensor(output, first.shape()), crate::tensor(lse, lse_shape));
    Ok(Attention { output, lse: Some(lse) })
}
