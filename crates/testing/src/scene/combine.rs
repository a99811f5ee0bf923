//! Scenes of the combine kernel, which merges partial results of attention; some rows saw nothing.

use flashcore::Shape;
use flashcore::gpu::{Chip, CombineProblem, CombineTensors, DeviceAddress};
use flashcore::plan::Source;
use kernels::Combine;
use kernels::parameter::Tensor;
use ptx::Element;
use sim::{BufferId, Memory};

use super::call::{Buffers, dtype};
use super::{Expected, KernelLaunch, Scene, SceneError, admit, encode, numbers};
use crate::reference::{self, Combined};

/// The factor by which the log-sum-exps of some rows are further apart than the others'.
const SPREAD: f64 = 8.0;

impl Scene {
    /// The number of parts of the small scene.
    pub const COMBINE_PARTS: usize = 3;

    /// Creates a scene of the kernel over partial results of `[batch entries, queries, heads]`.
    pub fn combine(
        combine: Combine,
        [batch, queries, heads]: [usize; 3],
        parts: usize,
    ) -> Result<Self, SceneError> {
        let refused = |text: String| SceneError::Size(text);
        let dim = combine.value_head_dim as usize;
        let counts = [batch, queries, heads, parts, dim];
        let all = counts.into_iter().try_fold(1, usize::checked_mul);
        if all == Some(0) {
            return Err(refused("there is nothing to combine".to_owned()));
        }
        admit([all])?;
        let rows = batch * queries * heads;
        let problem = CombineProblem {
            parts,
            shape: Shape::new(batch, queries, heads, dim),
            partial: dtype(combine.partial),
            output: dtype(combine.element),
        };
        let chip =
            Chip { target: combine.target, multiprocessors: 2, l2_bytes: 1 << 20, ..Chip::H200 };
        let choice = problem.choose(&chip).map_err(|error| refused(error.to_string()))?;
        let launch = &choice.launches[0];
        let program = launch.kernel.program()?;
        let anywhere = [DeviceAddress(16); 2];
        let tensors = CombineTensors::stacked(&problem, anywhere, anywhere)
            .map_err(|error| refused(error.to_string()))?;
        let values = tensors.bind(launch, &program.parameters).map_err(refused)?;

        let partial = numbers(7, combine.partial, parts * rows * dim, 2.0);
        // Every third part of a row saw nothing, and every fourth row saw nothing in any part; in
        // every fifth row the log-sum-exps of the parts are so far apart that exponentials
        // underflow.
        let mut partial_lse = numbers(8, Element::F32, parts * rows, 20.0);
        for (index, log_sum) in partial_lse.iter_mut().enumerate() {
            if (index % rows) % 5 == 2 {
                *log_sum *= SPREAD;
            }
            if (index / rows + index).is_multiple_of(3) || (index % rows).is_multiple_of(4) {
                *log_sum = f64::NEG_INFINITY;
            }
        }
        let mut memory = Memory::new();
        let output = memory.output("output", combine.element.bytes() as usize * rows * dim);
        let lse = memory.output("lse", 4 * rows);
        let buffers = [
            (Tensor::PartialOutput, memory.input("parts", encode(combine.partial, &partial))),
            (Tensor::PartialLse, memory.input("parts' lse", encode(Element::F32, &partial_lse))),
            (Tensor::Output, output),
            (Tensor::Lse, lse),
        ];
        let buffers: Buffers =
            buffers.into_iter().map(|(tensor, id)| (Source::Tensor(tensor), id)).collect();
        let step = KernelLaunch::bound(program, launch.blocks, &values, &buffers)?;
        let parts_of: Vec<_> = partial.chunks(rows * dim).zip(partial_lse.chunks(rows)).collect();
        let reference = reference::combined(problem.shape, &parts_of);
        let results = expected(reference, combine.element, [output, lse]);
        let size = format!("batch {batch}, {queries} queries, {heads} heads, {parts} parts");
        let written_once = vec![output, lse];
        Ok(Scene { written_once, ..Scene::single_launch(step, memory, results, size) })
    }
}

/// Returns the results to expect. The tolerance of an output is its own rounding and that of the
/// weights.
fn expected(reference: Combined, element: Element, [output, lse]: [BufferId; 2]) -> Vec<Expected> {
    let Combined { output: exact, magnitude, lse: exact_lse } = reference;
    let unit = match element {
        Element::F16 => 2f64.powi(-11),
        Element::BF16 => 2f64.powi(-8),
        _ => 0.0,
    };
    // Log-sum-exps of up to 20 are known to 24 bits, so that weights are known to 18 bits; larger
    // ones to fewer.
    let weights = 2f64.powi(-18) * SPREAD;
    let tolerance = exact.iter().zip(&magnitude).map(|(x, m)| unit * x.abs() + weights * m);
    let tolerance = tolerance.collect();
    vec![
        Expected { name: "output", buffer: output, element, exact, magnitude, tolerance },
        Expected::within(20.0 * weights, "lse", lse, Element::F32, exact_lse),
    ]
}
