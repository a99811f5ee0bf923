//! Differential tests of the kernels, from simple to complex: scalar attention, one `wgmma`,
//! products, forward attention, attention with `mma.sync`, and the serving kernels (decode, prefill
//! and its sequencer, append).

use std::sync::Arc;

use flashcore::Mask;
use flashcore::gpu::{Gpu, Kernel};
use flashcore_testing::scene::{Call, Expected, Scene, decode};
use kernels::decode::every_tuned as every_decode;
use kernels::product::{Contiguous, Source};
use kernels::{Batch, Configuration, MaskKind, Product, Rules, Scalar, Single, shipped};
use ptx::{Capability, Element, Swizzle, Target};
use rayon::prelude::*;

use crate::{compiled, gpu, hopper, on_gpu, simulated};

/// The largest difference of a value: a share of the sum of the magnitudes of its terms, plus a
/// number of units in its own last place.
struct Bound {
    share: f64,
    units: f64,
}

impl Bound {
    /// For products: tensor cores add in an order and with a truncation of their own.
    const ACCUMULATION: Bound = Bound { share: 1e-6, units: 0.0 };

    /// For scalar attention: order and rounding are those of the program, except for `ex2`, `lg2`
    /// and `rcp`. Each is accurate to 2^-22, so the GPU's and the simulator's differ by 2^-21. A
    /// weight is multiplied by a further `ex2` each time the maximum moves; eight times are more
    /// than 21 random keys ever take. Where the result is then rounded to 16 bits, the two may
    /// round to different sides.
    fn approximations(element: Element) -> Self {
        let units = if element == Element::F32 { 0.0 } else { 1.0 };
        Bound { share: 8.0 / (1 << 21) as f64, units }
    }

    /// For fused attention: scores differ as sums of the tensor cores do. P is rounded to 16 bits
    /// before the second product, and each element may round to either side: all of them to the
    /// same side is one unit of every summand. Then the output is rounded too, unless it is a
    /// partial output in f32. Log-sum-exps have no such rounding.
    fn fused(result: &Expected, weights: Element) -> Self {
        let units = if result.element == Element::F32 { 0.0 } else { 1.0 };
        match result.name {
            "lse" => Bound::approximations(Element::F32),
            _ => Bound { share: epsilon(weights), units },
        }
    }

    /// For accumulation in f16: every step of a product is rounded to f16, to either side. Scores
    /// of 32 and more before scaling have a unit of 2^-5, of which a quarter is left after scaling
    /// at the narrowest head; a few such steps to the same side move a weight by this much.
    const HALF_SUMS: Bound = Bound { share: 1.0 / 32.0, units: 1.0 };
}

fn epsilon(element: Element) -> f64 {
    match element {
        Element::F16 => 2f64.powi(-10),
        Element::BF16 => 2f64.powi(-7),
        _ => f32::EPSILON as f64,
    }
}

/// Runs a scene on the GPU and in the simulator, and checks that every result agrees within its
/// bound and that nothing else was written.
fn agree(gpu: &Gpu, scene: &Scene, bound: impl Fn(&Expected) -> Bound) {
    compiled_agree(gpu, scene, &compiled(gpu, scene), bound);
}

fn compiled_agree(
    gpu: &Gpu,
    scene: &Scene,
    kernels: &[Arc<Kernel>],
    bound: impl Fn(&Expected) -> Bound,
) {
    let (ours, theirs) = (simulated(scene), on_gpu(gpu, scene, kernels));
    let name = format!("{}, {}", scene.program.name, scene.size);
    for (index, id) in scene.memory.ids().enumerate() {
        let Some(result) = scene.results.iter().find(|result| result.buffer == id) else {
            // Buffers that were uninitialised, or that the simulator wrote, are scratch, whose
            // contents depend on the order of thread blocks.
            if scene.memory.unwritten(id) > 0 || ours[index] != scene.memory.bytes(id) {
                continue;
            }
            assert_eq!(theirs[index], scene.memory.bytes(id), "{name}: an input was written");
            continue;
        };
        let Bound { share, units } = bound(result);
        let values = [&ours[index], &theirs[index]].map(|it| decode(result.element, it));
        let (mut equal, mut worst) = (0, 0f64);
        for (at, (ours, theirs)) in values[0].iter().zip(&values[1]).enumerate() {
            if ours == theirs {
                equal += 1;
                continue;
            }
            // A log-sum-exp near zero still comes from scores around one.
            let floor = if result.name == "lse" { 1.0 } else { 0.0 };
            let size = result.magnitude[at].max(floor);
            let unit = epsilon(result.element) * ours.abs().max(theirs.abs());
            let allowed = share * size + units * unit;
            let difference = (ours - theirs).abs();
            assert!(
                difference <= allowed,
                "{name}: element {at} of {} is {theirs} on the GPU and {ours} in the simulator, \
                 {difference:.1e} apart, {allowed:.1e} allowed",
                result.name
            );
            worst = worst.max(difference / size);
        }
        let percent = 100.0 * equal as f64 / values[0].len() as f64;
        println!("{name}: {} {percent:.1} % equal bits, at most {worst:.1e} apart", result.name);
    }
}

/// Checks scenes one after the other, after compiling their kernels on all cores.
fn all_agree(gpu: &Gpu, scenes: Vec<Scene>, bound: impl Fn(&Expected) -> Bound) {
    each_agrees(gpu, scenes.into_iter().map(|scene| ((), scene)).collect(), |(), it| bound(it));
}

/// Checks scenes like [`all_agree`], with a bound that depends on a value attached to each.
fn each_agrees<T: Copy + Sync>(
    gpu: &Gpu,
    scenes: Vec<(T, Scene)>,
    bound: impl Fn(T, &Expected) -> Bound,
) {
    let kernels: Vec<_> = scenes.par_iter().map(|(_, scene)| compiled(gpu, scene)).collect();
    for ((of, scene), kernels) in scenes.iter().zip(&kernels) {
        compiled_agree(gpu, scene, kernels, |result| bound(*of, result));
    }
}

fn scalars(gpu: &Gpu, element: Element) -> impl Iterator<Item = Scalar> {
    let target = gpu.target();
    let every = Rules { softcap: true, alibi: true, sinks: true, ..Rules::LOCAL };
    let cases = [
        (64, 64, Rules::DENSE),
        (80, 80, Rules::CAUSAL),
        (7, 33, Rules::CAUSAL),
        (64, 64, every),
        (7, 33, Rules { mask: MaskKind::Chunked, ..every }),
    ];
    cases.into_iter().map(move |(head_dim, value_head_dim, rules)| Scalar {
        target,
        element,
        head_dim,
        value_head_dim,
        rules,
    })
}

#[test]
fn scalar_attention() {
    let Some(gpu) = gpu() else { return };
    for element in [Element::F32, Element::F16, Element::BF16] {
        for scalar in scalars(&gpu, element) {
            for queries in [11, 40] {
                let kernel = Configuration::Scalar(scalar);
                let scene = Call::new(kernel, 1, [queries, 21], [2, 1]).scene().unwrap();
                agree(&gpu, &scene, |_| Bound::approximations(element));
            }
        }
    }
}

/// With one key and no sink the weight is `ex2(0)` and its sum 1, which every approximation gives
/// exactly. The remaining arithmetic has a defined order, so that results agree bit for bit.
#[test]
fn scalar_attention_to_one_key() {
    let Some(gpu) = gpu() else { return };
    for element in [Element::F32, Element::F16, Element::BF16] {
        for scalar in scalars(&gpu, element).filter(|it| !it.rules.sinks) {
            let kernel = Configuration::Scalar(scalar);
            let scene = Call::new(kernel, 1, [11, 1], [2, 1]).scene().unwrap();
            agree(&gpu, &scene, |_| Bound { share: 0.0, units: 0.0 });
        }
    }
}

#[test]
fn one_wgmma() {
    let Some(gpu) = hopper() else { return };
    let scenes = [Element::F16, Element::BF16].map(|element| Scene::single(Single { element }));
    all_agree(&gpu, scenes.map(Result::unwrap).into(), |_| Bound::ACCUMULATION);
}

#[test]
fn products() {
    let Some(gpu) = hopper() else { return };
    let mut configurations = vec![Product::PLAIN];
    for swizzle in Swizzle::ALL {
        let plain = Product { swizzle, columns: 64, stages: 3, ..Product::PLAIN };
        let (a, b) = (Contiguous::Outer, Contiguous::Outer);
        configurations.extend([
            Product { b, ..plain },
            Product { a, ..plain },
            Product { a, b, cluster: 2, ..plain },
            Product { cluster: 2, ..plain },
            Product { source: Source::Registers, ..plain },
            Product { source: Source::Registers, cluster: 2, element: Element::F16, b, ..plain },
        ]);
    }
    configurations.extend([8, 104, 256].map(|columns| Product { columns, ..Product::PLAIN }));
    let (rows, inner) = (200, 328);
    let scenes = configurations.into_iter().map(|it| Scene::product(it, rows, inner).unwrap());
    all_agree(&gpu, scenes.collect(), |_| Bound::ACCUMULATION);
}

/// Every shipped configuration on its smallest problem, two of them with more tiles than thread
/// blocks.
#[test]
fn forward_attention() {
    let Some(gpu) = hopper() else { return };
    let mut scenes = Vec::new();
    for kernel in shipped(Target::SM_90A) {
        let Configuration::Forward(forward) = kernel else { continue };
        scenes.push((forward.element, Scene::small(&kernel).unwrap()));
        if forward.head_dim == 64 && forward.element == Element::BF16 {
            let larger = Call::new(kernel, 2, [300, 200], [2, 1]);
            scenes.push((forward.element, larger.scene().unwrap()));
        }
    }
    each_agrees(&gpu, scenes, |element, result| Bound::fused(result, element));
}

/// Every configuration shipped for this GPU, on its smallest problem, and on one with several
/// tiles, grouped heads and, where keys are split, several splits.
#[test]
fn mma_attention() {
    let Some(gpu) = gpu() else { return };
    let mut scenes = Vec::new();
    for kernel in shipped(gpu.target()) {
        let Configuration::Mma(mma) = kernel else { continue };
        let mut calls = vec![Call::small(kernel)];
        if mma.batch == Batch::Equal {
            calls.push(Call::new(kernel, 2, [150, 333], [2, 1]));
        }
        for call in calls {
            scenes.push(((mma.element, mma.accumulate), call.scene().unwrap()));
        }
    }
    each_agrees(&gpu, scenes, |(element, sums), result| match sums {
        Element::F16 => Bound::HALF_SUMS,
        _ => Bound::fused(result, element),
    });
}

/// The combine kernel: weights from `ex2`, and sums in the program's order.
#[test]
fn combined_parts() {
    let Some(gpu) = gpu() else { return };
    let scenes = shipped(gpu.target()).into_iter().filter_map(|configuration| {
        let Configuration::Combine(combine) = configuration else { return None };
        Some(Scene::combine(combine, [2, 7, 3], Scene::COMBINE_PARTS).unwrap())
    });
    all_agree(&gpu, scenes.collect(), |result| Bound::approximations(result.element));
}

/// Sequences of several tiles, of one key and of none, over several teams whose parts the last
/// thread block combines; also several queries under a window, over groups of heads.
#[test]
fn decode_attention() {
    let Some(gpu) = gpu() else { return };
    if !(gpu.target().has(Capability::Mma) && gpu.target().has(Capability::AsyncCopies)) {
        return eprintln!("skipped: {} has no mma.sync or no cp.async", gpu.info().name);
    }
    let mut scenes = Vec::new();
    for decode in every_decode(gpu.target()) {
        let small = Call::small(Configuration::Decode(decode));
        for call in [small.clone(), windowed(small, [6, 2], 0)] {
            scenes.push((decode.element, call.scene().unwrap()));
        }
    }
    each_agrees(&gpu, scenes, |element, result| Bound::fused(result, element));
}

/// The same over groups of heads, under a window of 40 keys and some.
fn windowed(call: Call, [heads, key_heads]: [usize; 2], right: usize) -> Call {
    call.with(|mut problem| {
        (problem.query_heads, problem.kv_heads) = (heads, key_heads);
        let chunk = problem.mask.chunk.map_or(0, usize::from);
        problem.with_mask(Mask::window(Some(40), Some(right)).with_chunk(chunk))
    })
}

/// Ragged batches, whose tiles thread blocks claim in any order.
#[test]
fn prefill_attention() {
    let Some(gpu) = hopper() else { return };
    let mut scenes = Vec::new();
    for kernel in shipped(Target::SM_90A) {
        let Configuration::Prefill(prefill) = kernel else { continue };
        let small = Call::small(kernel);
        for call in [small.clone(), windowed(small, [4, 2], 3)] {
            scenes.push((prefill.tile.element, call.scene().unwrap()));
        }
    }
    each_agrees(&gpu, scenes, |element, result| Bound::fused(result, element));
}

/// The sequencer's lists of tiles, which agree bit for bit, and keys that are copied or rotated
/// into caches. In a rotation the assembler may fuse a product and a sum, and the result may then
/// round to 16 bits to either side.
#[test]
fn order_and_append() {
    let Some(gpu) = gpu() else { return };
    let scenes = shipped(gpu.target())
        .into_iter()
        .filter(|kernel| matches!(kernel, Configuration::Sequencer(_) | Configuration::Append(_)));
    let scenes = scenes.map(|kernel| Scene::small(&kernel).unwrap());
    all_agree(&gpu, scenes.collect(), |result| match result.element {
        Element::F32 => Bound { share: 0.0, units: 0.0 },
        _ => Bound { share: 0.0, units: 1.0 },
    });
}
