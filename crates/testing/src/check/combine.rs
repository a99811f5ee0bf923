//! Checks of the combine kernel: random partial results, each case described by a seed.

use std::fmt;

use super::sequences::{check_alone, run_alone};
use super::{Checked, Outcome};
use crate::reference::{self, Combined, Row, vector};
use crate::rng::Rng;
use crate::verdict::{ComparedValue, Judge, Verdict};
use flashcore::gpu::{
    AttentionState, CombineProblem, CombineTensors, DeviceLists, DeviceTensor, Gpu, GpuError,
    GuardedBuffer,
};
use flashcore::random::{mix, normal};
use flashcore::{DType, Error, Layout, Progress, Shape, Strides, Tensor};

/// The relative error of weights, which are quotients of approximate exponentials.
const WEIGHT_ERROR: f64 = 1.0 / (1 << 18) as f64;

/// Partial results, all determined by a seed.
#[derive(Debug)]
struct CombineCase {
    seed: u64,
    problem: CombineProblem,
    parts: Vec<(Tensor, Vec<f32>)>,
    /// Whether two parts lie in separate tensors, in any order in memory.
    apart: bool,
}

/// Runs the kernel for the cases of the first `seeds` seeds, against sums in f64.
pub fn run_combines(gpu: &Gpu, dtype: DType, seeds: u64, progress: &dyn Progress) -> Vec<Checked> {
    let random = |seed| CombineCase::random(dtype, seed);
    run_alone("combine", seeds, progress, random, |case| case.check(gpu))
}

/// Runs the kernel for the case of one seed.
pub fn check_combine(gpu: &Gpu, dtype: DType, seed: u64) -> Checked {
    let random = |seed| CombineCase::random(dtype, seed);
    check_alone("combine", seed, random, |case| case.check(gpu))
}

impl CombineCase {
    fn random(dtype: DType, seed: u64) -> Result<Self, Error> {
        let mut rng = Rng::new(mix(seed ^ 0x0e26_e5a1));
        let shape = Shape::new(
            rng.choose(&[1, 1, 2, 5]),
            rng.choose(&[1, 1, 3, 17]),
            rng.choose(&[1, 2, 7]),
            rng.choose(&[64, 128, 192, 256, 2, 40]),
        );
        let count = rng.choose(&[1, 2, 2, 3, 5, 9, 33]);
        let partial = rng.choose(&[DType::F32, dtype]);
        let problem = CombineProblem::new(count, shape, dtype).with_partial(partial);
        let rows = shape.batch * shape.length * shape.heads;
        let spread = rng.choose(&[1.0, 10.0, 100.0]);
        let wrong = rng.one_in(8);
        let parts = (0..count as u64)
            .map(|part| {
                let stream = mix(seed).wrapping_add(part);
                let output = Tensor::random(partial, shape, stream)?;
                let log_sum = |row: usize| match rng.below(8) {
                    // A row that saw nothing in some parts; some rows saw nothing in any part.
                    0 | 1 => f32::NEG_INFINITY,
                    _ if row % 5 == 2 => f32::NEG_INFINITY,
                    // Log-sum-exps that no attention gives must show in the result.
                    2 if wrong => rng.choose(&[f32::INFINITY, f32::NAN]),
                    _ => spread * normal(stream, row as u64),
                };
                Ok((output, (0..rows).map(log_sum).collect()))
            })
            .collect::<Result<_, Error>>()?;
        Ok(CombineCase { seed, problem, parts, apart: count == 2 && rng.one_in(2) })
    }

    fn reference(&self) -> Combined {
        let double = |numbers: &[f32]| numbers.iter().map(|&it| it.into()).collect::<Vec<f64>>();
        let parts: Vec<_> =
            self.parts.iter().map(|(part, lse)| (double(&part.to_f32()), double(lse))).collect();
        let parts: Vec<_> = parts.iter().map(|(part, lse)| (&part[..], &lse[..])).collect();
        reference::combined(self.problem.shape, &parts)
    }

    /// Runs the kernel twice and judges it.
    fn check(&self, gpu: &Gpu) -> Result<Outcome, Error> {
        let exact = self.reference();
        let (found, again) = (self.on_the_gpu(gpu)?, self.on_the_gpu(gpu)?);
        let shape @ Shape { length, heads, dim, .. } = self.problem.shape;
        let (mut output, mut lse) = (Judge::new(self.problem.output), Judge::new(DType::F32));
        let mut values = vec![0.0; dim];
        for (index, reference) in exact.lse.iter().enumerate() {
            let (outer, query) = (index / length, index % length);
            let row = Row { batch: outer / heads, head: outer % heads, query };
            let result = f64::from(found.1[index]);
            let reference = *reference;
            lse.look_at(ComparedValue { row, element: 0, result, reference }, reference);
            found.0.head(row.batch, row.head).read(query, &mut values);
            for (element, value) in values.iter().enumerate() {
                let reference = exact.output[vector(shape, index) * dim + element];
                let place = ComparedValue { row, element, result: f64::from(*value), reference };
                output.look_at(place, reference);
            }
        }
        // The error of weights computed from f32 log-sum-exps of up to the largest magnitude.
        let known = WEIGHT_ERROR.max(f64::from(f32::EPSILON) * lse.largest());
        let rounding =
            (self.problem.output.epsilon() + 2.0 * known) * 4.0 * output.largest().max(1.0);
        let lse_rounding = WEIGHT_ERROR * lse.largest().max(1.0);
        let (output, lse) = (output.conclude(rounding), lse.conclude(lse_rounding));
        let bits = |lse: &[f32]| lse.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
        let repeats = found.0.bytes() == again.0.bytes() && bits(&found.1) == bits(&again.1);
        let passed = output.passed && lse.passed && repeats;
        let rows = exact.lse.len();
        let verdict = Verdict { passed, output, lse, rows, total_rows: rows };
        Ok(Outcome { passed, verdict, repeats, holes: 0 })
    }

    fn on_the_gpu(&self, gpu: &Gpu) -> Result<(Tensor, Vec<f32>), Error> {
        let CombineProblem { shape, output: dtype, .. } = self.problem;
        let mut output = Tensor::zeros(dtype, shape)?;
        let mut lse = vec![0.0; shape.batch * shape.length * shape.heads];
        let buffer = GuardedBuffer::new(gpu, output.bytes().len())?;
        let lse_buffer = GuardedBuffer::new(gpu, 4 * lse.len())?;
        let mut lists = DeviceLists::new(gpu);
        let result = [buffer.address(), lse_buffer.address()];
        let tensors = match self.apart {
            true => {
                let strides = Layout::contiguous(shape)?.strides();
                let lse_strides =
                    Strides { batch: shape.heads * shape.length, length: 1, heads: shape.length };
                let state = |[output, lse]: [_; 2]| AttentionState {
                    output: DeviceTensor { address: output, strides },
                    lse: DeviceTensor { address: lse, strides: lse_strides },
                };
                let mut part = |(output, lse): &(Tensor, Vec<f32>)| -> Result<_, GpuError> {
                    Ok(state([lists.bytes(output.bytes())?, lists.floats(lse)?]))
                };
                let second = part(&self.parts[1])?;
                let first = part(&self.parts[0])?;
                CombineTensors::pair(&self.problem, [first, second], state(result))?
            }
            false => {
                let outputs: Vec<u8> =
                    self.parts.iter().flat_map(|(output, _)| output.bytes().to_vec()).collect();
                let log_sums: Vec<f32> =
                    self.parts.iter().flat_map(|(_, lse)| lse.clone()).collect();
                let parts = [lists.bytes(&outputs)?, lists.floats(&log_sums)?];
                CombineTensors::stacked(&self.problem, parts, result)?
            }
        };
        gpu.combine(gpu.stream(), &self.problem, &tensors)?;
        buffer.read(gpu, output.bytes_mut())?;
        lse_buffer.read(gpu, &mut lse)?;
        for (name, buffer) in [("output", &buffer), ("log-sum-exp", &lse_buffer)] {
            buffer.look_for_trespasses(gpu, name)?;
        }
        Ok((output, lse))
    }
}

impl fmt::Display for CombineCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CombineProblem { parts, shape, partial, output } = self.problem;
        let apart = if self.apart { ", apart" } else { "" };
        write!(f, "{parts} parts of {shape} in {partial} to {output}{apart}, seed {}", self.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::serving;

    /// The reference agrees with the host's combine, also for values that are not finite.
    #[test]
    fn the_reference_is_what_the_host_combines() {
        let mut cases = 0;
        for seed in 0..80 {
            let case = CombineCase::random(DType::F32, seed).unwrap();
            let Combined { output: exact, lse: exact_lse, .. } = case.reference();
            let parts: Vec<_> =
                case.parts.iter().map(|(part, lse)| (part.view(), &lse[..])).collect();
            let (output, lse) = serving::combine(&parts).unwrap();
            let shape @ Shape { length, heads, dim, .. } = case.problem.shape;
            for (index, exact_lse) in exact_lse.iter().enumerate() {
                let (outer, query) = (index / length, index % length);
                let row = output.head(outer / heads, outer % heads).row(query);
                let found = row.iter().zip(&exact[vector(shape, index) * dim..][..dim]);
                for (found, exact) in found.chain([(&lse[index], exact_lse)]) {
                    let found = f64::from(*found);
                    let near = (found - exact).abs() < 1e-4 * exact.abs().max(1.0);
                    let same = near || found == *exact || (found.is_nan() && exact.is_nan());
                    assert!(same, "{case}: {found} {exact}");
                }
            }
            cases += usize::from(exact_lse.iter().any(|lse| lse.is_nan()));
        }
        assert!(cases > 2, "{cases}");
    }
}
