//! The configurations that stand for all others in tests: each one of [`shipped`] is assembled,
//! simulated and checked.

use ptx::{Capability, Element, Swizzle, Target};

use crate::append::{Append, Rotary};
use crate::attention::function::{ListsOf, Stored, rules};
use crate::backward::{
    BackwardPass, RowSums, SinkGradients, every_backward, sharing_backward, tuned_backward,
};
use crate::cache::{Cache, Scales};
use crate::forward::{
    Form, Workload, every_fp8, every_fp8_prefill, every_prefill, every_tuned, tuned,
};
use crate::mma::every_tuned_backward;
use crate::product::{Contiguous, Source};
use crate::sequencer::Tiles;
use crate::{
    Backward, Batch, BlockFinder, BlockLister, Combine, Configuration, Forward, MaskKind, Mma,
    Prefill, Product, Rules, Scalar, Sequencer, Single, TileSharer, Widen, decode, mma,
};

/// Returns every shipped configuration for a target.
///
/// Attention kernels are built for whatever a problem asks for. The configurations listed here
/// stand for all of them: each element, wide and odd head dimensions, each mask.
pub fn shipped(target: Target) -> Vec<Configuration> {
    let mut all = Vec::new();
    let scalar = |element, (head_dim, value_head_dim), rules| {
        Configuration::Scalar(Scalar { target, element, head_dim, value_head_dim, rules })
    };
    for element in [Element::F32, Element::F16, Element::BF16] {
        for dims in [(64, 64), (80, 80), (128, 128), (192, 128), (7, 33)] {
            all.extend([Rules::DENSE, Rules::CAUSAL].map(|rules| scalar(element, dims, rules)));
        }
    }
    for mask in [MaskKind::Local, MaskKind::Chunked] {
        all.push(scalar(Element::F16, (64, 64), Rules { mask, ..Rules::EVERY }));
    }
    if target.has(Capability::Mma) {
        all.extend(mmas(target).into_iter().map(Configuration::Mma));
        all.extend(combines(target).into_iter().map(Configuration::Combine));
        all.extend(backward_mmas(target));
    }
    if [Target::SM_80, Target::SM_89, Target::SM_90A].contains(&target) {
        // One target for each size of shared memory: the kernels are the same on all targets.
        all.extend(ragged_mmas(target).into_iter().map(Configuration::Mma));
        all.extend(decode::every_tuned(target).into_iter().map(Configuration::Decode));
        all.extend(appends(target).into_iter().map(Configuration::Append));
        all.extend(widens(target).into_iter().map(Configuration::Widen));
    }
    if target == Target::SM_90A {
        all.extend(forwards().into_iter().map(Configuration::Forward));
        all.extend(every_prefill().into_iter().map(Configuration::Prefill));
        all.extend(every_fp8_prefill().into_iter().map(Configuration::Prefill));
        all.extend(chunked_prefills().into_iter().map(Configuration::Prefill));
        // Pre- and postprocessing may be the same as with `mma.sync`.
        add_new(&mut all, backwards());
        let [local, chunked] = [MaskKind::Local, MaskKind::Chunked].map(Tiles::Queries);
        for tiles in [local, chunked, Tiles::Keys, Tiles::KeysOrQueries] {
            all.push(Configuration::Sequencer(Sequencer { target, tiles }));
        }
        for element in [Element::F16, Element::BF16] {
            all.push(Configuration::Single(Single { element }));
        }
        all.extend(products().into_iter().map(Configuration::Product));
    }
    all
}

/// Returns configurations of the forward kernel: every tuned one, head dimensions that are not
/// whole panels or whole `wgmma` steps, score rules, 8-bit inputs and stream-K, and the compact
/// form of each.
fn forwards() -> Vec<Forward> {
    let mut all = every_tuned();
    for (index, dim) in [8, 40, 72, 136, 200, 248].into_iter().enumerate() {
        let (element, rules) =
            [(Element::BF16, Rules::CAUSAL), (Element::F16, Rules::DENSE)][index % 2];
        let workload = Workload { heads: 8, ..workload(element, dim, rules, 512) };
        all.extend(tuned(&workload).map(|tuned| tuned.configuration));
    }
    all.extend(ruled_forwards());
    all.extend(every_fp8());
    // Stream-K, at the head dimensions where the planner uses it.
    let elements = [Element::BF16, Element::F16];
    for (dim, element) in [64, 128, 256].into_iter().flat_map(|dim| elements.map(|it| (dim, it))) {
        let chosen =
            tuned(&workload(element, dim, Rules::DENSE, 4096)).map(|tuned| tuned.configuration);
        all.extend(chosen.map(|chosen| Forward { stream_k: true, ..chosen }));
    }
    for full in all.clone() {
        let compact = Forward { form: Form::COMPACT, ..full };
        if !all.contains(&compact) {
            all.push(compact);
        }
    }
    all
}

/// Returns kernels with ready-made mask and score functions, and the kernels that find the blocks
/// of mask functions. They stand for the functions that callers write. They are not part of
/// [`shipped`], since whatever runs a kernel by itself has no tensors for the functions to load
/// from.
pub fn with_functions() -> Vec<Configuration> {
    use Element::{BF16, F16};
    let score = |function| Rules { score_function: Some(function), ..Rules::CAUSAL };
    let mask = |function| Rules { mask_function: Some(function), ..Rules::CAUSAL };
    let [narrow, wide] = [Stored::BF16, Stored::F32].map(|stored| score(rules::bias(stored)));
    let documents = mask(rules::documents());
    let forwards = [
        (BF16, 64, narrow),
        (BF16, 128, narrow),
        (BF16, 256, narrow),
        // From head dim 128 on, an `f32` bias makes a thread spill two words between tiles.
        (F16, 64, wide),
        (BF16, 64, documents),
        (BF16, 128, documents),
    ];
    let forwards = forwards.into_iter().filter_map(chosen).map(Configuration::Forward);
    let capped = Rules::CAUSAL.capped();
    let backwards = [(64, capped), (128, capped), (64, score(rules::softcap(30.0))), (64, narrow)];
    let backwards = backwards
        .into_iter()
        .filter_map(|(dim, rules)| tuned_backward(BF16, dim, dim, rules))
        .map(Configuration::Backward);
    forwards.chain(backwards).chain(finders()).collect()
}

/// Returns the kernels that find the blocks of mask functions, for tiles of a few sizes.
fn finders() -> impl Iterator<Item = Configuration> {
    let target = Target::SM_90A;
    let cases = [
        (rules::documents(), MaskKind::Causal, [128, 128]),
        (rules::prefixes(), MaskKind::Dense, [192, 128]),
        (rules::tree(), MaskKind::Local, [64, 64]),
        (rules::seen(), MaskKind::Chunked, [128, 176]),
    ];
    let finders = cases.map(|(function, mask, [query_rows, key_block])| {
        let finder = BlockFinder { target, function, mask, query_rows, key_block };
        Configuration::BlockFinder(finder)
    });
    let lists = [ListsOf::Queries, ListsOf::Keys { turns: false }, ListsOf::Keys { turns: true }];
    let listers = lists.map(|lists| Configuration::BlockLister(BlockLister { target, lists }));
    let sharer = Configuration::TileSharer(TileSharer { target });
    finders.into_iter().chain(listers).chain([sharer])
}

/// Returns configurations of the forward kernel with rules beyond a causal mask, in tiles where
/// registers are scarce.
fn ruled_forwards() -> Vec<Forward> {
    use Element::{BF16, F16};
    let local = Rules::LOCAL;
    let chunked = Rules { mask: MaskKind::Chunked, ..local };
    let cases = [
        (BF16, 64, local),
        (BF16, 128, local),
        (BF16, 192, local),
        (BF16, 256, local),
        (BF16, 128, Rules { sinks: true, ..local.capped() }),
        (BF16, 64, local.capped()),
        (BF16, 128, chunked.capped()),
        (F16, 256, Rules::CAUSAL.capped()),
        (F16, 128, Rules { alibi: true, sinks: true, ..local }),
        (F16, 64, Rules { alibi: true, sinks: true, ..local }),
        (F16, 128, Rules { mask: MaskKind::Causal, ..Rules::EVERY }),
        (F16, 64, Rules { mask: MaskKind::Dense, ..Rules::EVERY }),
        (BF16, 64, chunked),
        (BF16, 128, chunked),
        (F16, 128, Rules { mask: MaskKind::Chunked, ..Rules::EVERY }),
        (F16, 256, Rules::EVERY),
    ];
    cases.into_iter().filter_map(chosen).collect()
}

/// Returns the forward configuration that is chosen for long sequences.
fn chosen((element, dim, rules): (Element, u32, Rules)) -> Option<Forward> {
    tuned(&workload(element, dim, rules, 8192)).map(|tuned| tuned.configuration)
}

/// Returns self-attention of sequences of a length, with 64 heads in all, on an H200.
fn workload(element: Element, dim: u32, rules: Rules, length: u64) -> Workload {
    Workload {
        element,
        head_dim: dim,
        value_head_dim: dim,
        rules,
        query_length: length,
        key_length: length,
        heads: 64,
        multiprocessors: 132,
    }
}

/// Returns ragged configurations with a chunked mask: plain, with pages, and with all score rules.
fn chunked_prefills() -> Vec<Prefill> {
    let chunked = |prefill: &Prefill| {
        let rules = Rules { mask: MaskKind::Chunked, ..prefill.tile.rules };
        Prefill { tile: Forward { rules, ..prefill.tile }, ..*prefill }
    };
    let windowed = |prefill: &&Prefill| {
        let Forward { head_dim, warpgroups, rules, .. } = prefill.tile;
        head_dim == 128 && warpgroups == 2 && rules.mask.is_window()
    };
    every_prefill().iter().filter(windowed).map(chunked).collect()
}

/// The elements and rules that the backward kernels are listed with.
const BACKWARD_KINDS: [(Element, Rules); 6] = [
    (Element::BF16, Rules::DENSE),
    (Element::BF16, Rules::CAUSAL),
    (Element::F16, Rules::CAUSAL),
    (Element::F16, Rules::LOCAL),
    (Element::F16, Rules::EVERY),
    (Element::BF16, Rules { mask: MaskKind::Chunked, ..Rules::LOCAL }),
];

/// Returns the kernels of the backward pass on Hopper: every tuned configuration, some also in the
/// deterministic mode, each with its pre- and postprocessing.
fn backwards() -> Vec<Configuration> {
    let tuned = |(element, rules)| every_backward(element, rules);
    let mut all = Vec::new();
    let equal: Vec<Backward> = BACKWARD_KINDS.into_iter().flat_map(tuned).collect();
    // Ragged batches do not use the tall shape.
    let tuned = |it: &&Backward| {
        let Backward { element, head_dim, value_head_dim, rules, .. } = **it;
        tuned_backward(element, head_dim, value_head_dim, rules) == Some(**it)
    };
    let ragged = equal.iter().filter(tuned).map(|it| Backward { batch: Batch::Ragged, ..*it });
    let ragged = ragged.flat_map(|it| [it].into_iter().chain(sharing_backward(it)));
    for it in equal.iter().copied().chain(ragged) {
        all.push(Configuration::Backward(it));
        if it.persistent || it.split {
            // Pre- and postprocessing are those of the plain configuration.
            continue;
        }
        let ordered = Backward { deterministic: true, shares: false, ..it };
        let dims = (it.head_dim, it.value_head_dim);
        // In the deterministic mode, over ragged batches and with every rule, a thread spills three
        // words. The kernel is correct, but not representative of the others.
        let spills = it.batch != Batch::Equal && it.rules == Rules::EVERY;
        let representative = [(64, 64), (128, 128), (192, 128), (256, 256)].contains(&dims);
        if representative && !spills && !it.shares {
            all.push(Configuration::Backward(ordered));
        }
        let row_sums = it.pass().row_sums();
        let beside = [
            Configuration::RowSums(row_sums),
            Configuration::RowSums(RowSums { lse_gradient: true, ..row_sums }),
            Configuration::RowSums(ordered.pass().row_sums()),
            Configuration::Rounding(it.pass().rounding()),
        ];
        add_new(&mut all, beside.into_iter().chain(sink_gradients(&it.pass())));
    }
    all
}

/// Returns the kernels of the backward pass with `mma.sync`: every tuned configuration, each with
/// its pre- and postprocessing.
fn backward_mmas(target: Target) -> Vec<Configuration> {
    let tuned = |(element, rules)| every_tuned_backward(target, element, rules);
    let mut all = Vec::new();
    for it in BACKWARD_KINDS.into_iter().flat_map(tuned) {
        all.push(Configuration::BackwardMma(it));
        let row_sums = it.pass().row_sums();
        let beside = [
            Configuration::RowSums(row_sums),
            Configuration::RowSums(RowSums { lse_gradient: true, ..row_sums }),
            Configuration::Rounding(it.pass().rounding()),
        ];
        add_new(&mut all, beside.into_iter().chain(sink_gradients(&it.pass())));
    }
    all
}

/// Returns the kernels that sum the gradients of sinks in a pass, without and with a gradient of the
/// log-sum-exps.
fn sink_gradients(pass: &BackwardPass) -> impl Iterator<Item = Configuration> {
    let with = |it| [false, true].map(|lse_gradient| SinkGradients { lse_gradient, ..it });
    pass.sink_gradients().into_iter().flat_map(with).map(Configuration::SinkGradients)
}

/// Appends those kernels that are not in the list yet.
fn add_new(all: &mut Vec<Configuration>, kernels: impl IntoIterator<Item = Configuration>) {
    for kernel in kernels {
        if !all.contains(&kernel) {
            all.push(kernel);
        }
    }
}

/// Returns configurations of attention with `mma.sync`: what a target gets for narrow, wide and the
/// widest heads, for few queries with split keys, and with sums in `f16`, in alternating elements
/// and masks.
fn mmas(target: Target) -> Vec<Mma> {
    use Element::{BF16, F16, F32};
    let cases = [
        (BF16, 64, Rules::CAUSAL, 4096, 1024, F32),
        (F16, 64, Rules::DENSE, 4096, 1024, F16),
        (BF16, 128, Rules::DENSE, 4096, 1024, F32),
        (F16, 128, Rules::CAUSAL, 4096, 1024, F32),
        (F16, 128, Rules::CAUSAL, 4096, 1024, F16),
        (BF16, 256, Rules::CAUSAL, 4096, 1024, F32),
        (BF16, 128, Rules::DENSE, 1, 8, F32),
    ];
    let chosen = |(element, dim, rules, query_length, heads, sums)| {
        let all = workload(element, dim, rules, 4096);
        let workload = Workload { query_length, heads, multiprocessors: 128, ..all };
        mma::tuned(target, &workload, sums).map(|tuned| tuned.configuration)
    };
    cases.into_iter().filter_map(chosen).collect()
}

/// Returns configurations of attention with `mma.sync` with windows, chunks and score rules, and
/// over ragged batches, packed and in pages.
fn ragged_mmas(target: Target) -> Vec<Mma> {
    use Element::{BF16, F16};
    let chunked = Rules { mask: MaskKind::Chunked, ..Rules::LOCAL };
    let cases = [
        (BF16, 128, Rules::LOCAL, Batch::Equal),
        (F16, 64, Rules::EVERY, Batch::Equal),
        (BF16, 128, Rules::EVERY, Batch::Equal),
        (F16, 128, chunked, Batch::Equal),
        (BF16, 128, Rules::LOCAL, Batch::Ragged),
        (BF16, 64, Rules::LOCAL, Batch::Ragged),
        (F16, 128, chunked, Batch::Ragged),
        (BF16, 256, Rules::EVERY, Batch::Ragged),
        (BF16, 128, Rules::LOCAL, Batch::Paged),
        (F16, 64, Rules::LOCAL, Batch::Paged),
        (F16, 128, Rules { mask: MaskKind::Chunked, ..Rules::EVERY }, Batch::Paged),
        (BF16, 256, Rules::LOCAL, Batch::Paged),
    ];
    let chosen = |(element, dim, rules, batch)| {
        let all = workload(element, dim, rules, 4096);
        let workload = Workload { heads: 1024, multiprocessors: 128, ..all };
        mma::tuned_batch(target, &workload, Element::F32, batch).map(|tuned| tuned.configuration)
    };
    cases.into_iter().filter_map(chosen).collect()
}

/// Returns configurations that append new tokens: to batch entries and to pages, without rotary
/// embeddings and with embeddings of a whole key or a part of it, into 16-bit and 8-bit caches.
fn appends(target: Target) -> Vec<Append> {
    let rotary = |dim, interleaved| Some(Rotary { dim, interleaved });
    let cases = [
        (Element::BF16, (128, 128), false, None),
        (Element::F16, (64, 64), true, None),
        (Element::BF16, (128, 128), true, rotary(128, false)),
        (Element::F16, (192, 128), false, rotary(64, true)),
    ];
    let plain = |(element, (head_dim, value_head_dim), paged, rotary)| {
        let cache = Cache::plain(element);
        Append { target, element, cache, head_dim, value_head_dim, paged, rotary }
    };
    let mut all: Vec<Append> = cases.map(plain).into();
    all.extend(narrow_appends(&all));
    all
}

/// Returns configurations that convert 8-bit caches to 16 bits: each element and each kind of
/// scales, in batch entries and in pages.
fn widens(target: Target) -> Vec<Widen> {
    use Element::{BF16, E4M3, E5M2, F16, Int8};
    let cases = [
        (BF16, E4M3, Scales::PerHead, 128, true),
        (F16, E5M2, Scales::One, 64, false),
        (BF16, E4M3, Scales::PerToken, 192, false),
        (F16, E4M3, Scales::PerToken, 80, true),
        (BF16, Int8, Scales::PerToken, 128, false),
    ];
    let widen = |(element, narrow, scales, dim, paged)| Widen {
        target,
        element,
        cache: Cache { element: narrow, key_scales: scales, value_scales: scales },
        head_dim: dim,
        value_head_dim: if dim == 192 { 128 } else { dim },
        paged,
    };
    cases.map(widen).into_iter().filter(|it| it.cache.is_converted_by(target)).collect()
}

/// Returns the given configurations with 8-bit caches, one with each element and kind of scales.
fn narrow_appends(wide: &[Append]) -> Vec<Append> {
    use Scales::{One, PerHead, PerToken};
    let elements = [Element::E4M3, Element::E5M2, Element::Int8].into_iter().cycle();
    let scales = [PerHead, One, PerToken, PerToken].into_iter();
    let caches = elements.zip(scales).map(|(element, scales)| Cache {
        element,
        key_scales: scales,
        value_scales: scales,
    });
    let narrow = wide.iter().zip(caches).map(|(append, cache)| Append { cache, ..*append });
    narrow.filter(|it| it.cache.is_converted_by(it.target)).collect()
}

/// Returns configurations that combine partial results: from the `f32` that split attention leaves,
/// and from each element to itself.
fn combines(target: Target) -> Vec<Combine> {
    let value_head_dim = 128;
    [Element::F16, Element::BF16]
        .into_iter()
        .flat_map(|element| [(Element::F32, element), (element, element)])
        .chain([(Element::F32, Element::F32)])
        .map(|(partial, element)| Combine { target, partial, element, value_head_dim })
        .collect()
}

/// Returns matrix products: every number of columns once, then every combination of the other
/// fields at a few of them.
fn products() -> Vec<Product> {
    let mut all = Vec::new();
    for columns in (8..=256).step_by(8) {
        all.push(Product { columns, ..Product::PLAIN });
    }
    for element in [Element::F16, Element::BF16] {
        for swizzle in Swizzle::ALL {
            for a in [Contiguous::Inner, Contiguous::Outer] {
                for b in [Contiguous::Inner, Contiguous::Outer] {
                    for source in [Source::Shared, Source::Registers] {
                        for cluster in [1, 2] {
                            if source == Source::Registers && a == Contiguous::Outer {
                                continue;
                            }
                            all.extend([64, 256].map(|columns| {
                                let stages = 3;
                                Product { element, columns, swizzle, a, b, source, stages, cluster }
                            }));
                        }
                    }
                }
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forward::tuned_prefill;

    /// Names are entry points and cache keys, so no two configurations may share one.
    #[test]
    fn names_are_unique() {
        for target in Target::NAMED {
            let mut names: Vec<String> = shipped(target).iter().map(Configuration::name).collect();
            names.sort();
            let again: Vec<_> = names.windows(2).filter(|it| it[0] == it[1]).collect();
            assert!(again.is_empty(), "{target}: {again:?}");
        }
    }

    /// On Hopper the kernels of the forward pass are launched before those before them have ended; all
    /// others, and every kernel of older GPUs, after it.
    #[test]
    fn the_forward_pass_waits_for_earlier_grids() {
        for target in [Target::SM_90A, Target::SM_80] {
            let mut kinds = std::collections::HashMap::new();
            for configuration in shipped(target) {
                kinds.entry(std::mem::discriminant(&configuration)).or_insert(configuration);
            }
            for configuration in kinds.values() {
                use Configuration as C;
                let forward = matches!(
                    configuration,
                    C::Forward(_)
                        | C::Prefill(_)
                        | C::Decode(_)
                        | C::Append(_)
                        | C::Widen(_)
                        | C::Combine(_)
                        | C::Sequencer(_)
                        | C::BlockFinder(_)
                        | C::BlockLister(_)
                        | C::TileSharer(_)
                );
                let waits = configuration.program().unwrap().waits_for_grids();
                assert_eq!(waits, forward && target == Target::SM_90A, "{}", configuration.name());
            }
        }
    }

    /// Every ragged configuration that is shipped is one that [`tuned_prefill`] chooses for some
    /// length. Tiles with a mask for which no length chooses them may spill, and nobody would run
    /// them.
    #[test]
    fn ragged_batches_of_some_length_have_each_of_their_kernels() {
        let shipped = shipped(Target::SM_90A);
        let prefills = shipped.iter().filter_map(|it| match it {
            Configuration::Prefill(it) => Some(it.tile),
            _ => None,
        });
        for tile in prefills {
            let Forward { element, head_dim, value_head_dim, rules, form, output, .. } = tile;
            let is_chosen = [(1, 1), (1024, 64), (8192, 64)].into_iter().any(|(length, heads)| {
                let square = workload(element, head_dim, rules, length);
                let workload = Workload { value_head_dim, heads, ..square };
                [rules.mask, MaskKind::Causal].into_iter().any(|mask| {
                    let rules = Rules { mask, ..rules };
                    let chosen = tuned_prefill(&Workload { rules, ..workload });
                    let chosen = chosen.map(|it| it.configuration);
                    chosen.is_some_and(|it| Forward { form, output, ..it } == tile)
                })
            });
            assert!(is_chosen, "{tile:?}");
        }
    }
}
