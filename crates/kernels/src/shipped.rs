//! The configurations that FlashCore ships: every one of them is assembled,
//! simulated and checked.

use ptx::{Capability, Element, Program, Swizzle, Target};

use crate::append::{Append, Rotary};
use crate::forward::{Form, Workload, every_prefill, every_tuned, tuned};
use crate::product::{Contiguous, Source};
use crate::{
    Ceiling, Combine, Decode, Error, Forward, Mma, Prefill, Product, Scalar, Sequencer, Single,
    decode, mma,
};

/// One configuration of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Shipped {
    /// Attention with ordinary arithmetic.
    Scalar(Scalar),
    /// Attention with `mma.sync`.
    Mma(Mma),
    /// Attention on Hopper.
    Forward(Forward),
    /// Attention on Hopper over ragged batches.
    Prefill(Prefill),
    /// The tiles of a ragged batch in order.
    Sequencer(Sequencer),
    /// Partial attention put together.
    Combine(Combine),
    /// Attention of few queries over a cache.
    Decode(Decode),
    /// New keys and values into a cache.
    Append(Append),
    /// One `wgmma`.
    Single(Single),
    /// A matrix product.
    Product(Product),
    /// The ceiling loop.
    Ceiling(Ceiling),
}

impl Shipped {
    /// The name of the kernel, without its configuration.
    pub fn family(&self) -> &'static str {
        match self {
            Shipped::Scalar(_) => "scalar",
            Shipped::Mma(_) => "mma",
            Shipped::Forward(_) => "forward",
            Shipped::Prefill(_) => "prefill",
            Shipped::Sequencer(_) => "sequencer",
            Shipped::Combine(_) => "combine",
            Shipped::Decode(_) => "decode",
            Shipped::Append(_) => "append",
            Shipped::Single(_) => "single",
            Shipped::Product(_) => "product",
            Shipped::Ceiling(_) => "ceiling",
        }
    }

    /// The name of the configuration: also the entry point's.
    pub fn name(&self) -> String {
        match self {
            Shipped::Scalar(configuration) => configuration.name(),
            Shipped::Mma(configuration) => configuration.name(),
            Shipped::Forward(configuration) => configuration.name(),
            Shipped::Prefill(configuration) => configuration.name(),
            Shipped::Sequencer(configuration) => configuration.name(),
            Shipped::Combine(configuration) => configuration.name(),
            Shipped::Decode(configuration) => configuration.name(),
            Shipped::Append(configuration) => configuration.name(),
            Shipped::Single(configuration) => configuration.name(),
            Shipped::Product(configuration) => configuration.name(),
            Shipped::Ceiling(configuration) => configuration.name(),
        }
    }

    /// What it computes, in a few words.
    pub fn summary(&self) -> &'static str {
        match self {
            Shipped::Scalar(_) => "attention with ordinary arithmetic, on any GPU",
            Shipped::Mma(_) => "attention with mma.sync and cp.async, on Ampere and later",
            Shipped::Forward(_) => "attention with wgmma and TMA, on Hopper",
            Shipped::Prefill(_) => "attention over ragged batches, with windows, on Hopper",
            Shipped::Sequencer(_) => "the tiles of a ragged batch in the order they are taken",
            Shipped::Combine(_) => "partial attention over parts of the keys, put together",
            Shipped::Decode(_) => "attention of few queries over a long cache, Ampere and later",
            Shipped::Append(_) => "new keys and values into a cache, keys and queries turned",
            Shipped::Single(_) => "one 64x64x16 wgmma",
            Shipped::Product(_) => "a matrix product with TMA, a pipeline and wgmma",
            Shipped::Ceiling(_) => "wgmma m64n256k16 in a loop: the tensor cores' ceiling",
        }
    }

    /// Builds it.
    pub fn program(&self) -> Result<Program, Error> {
        match self {
            Shipped::Scalar(configuration) => configuration.program(),
            Shipped::Mma(configuration) => configuration.program(),
            Shipped::Forward(configuration) => configuration.program(),
            Shipped::Prefill(configuration) => configuration.program(),
            Shipped::Sequencer(configuration) => configuration.program(),
            Shipped::Combine(configuration) => configuration.program(),
            Shipped::Decode(configuration) => configuration.program(),
            Shipped::Append(configuration) => configuration.program(),
            Shipped::Single(configuration) => configuration.program(),
            Shipped::Product(configuration) => configuration.program(),
            Shipped::Ceiling(configuration) => configuration.program(),
        }
    }
}

/// Every shipped configuration for a target.
///
/// Attention is built for whatever a problem asks; the ones listed stand for
/// the rest: each element, wide and odd head dimensions, both masks.
pub fn shipped(target: Target) -> Vec<Shipped> {
    let mut all = Vec::new();
    for element in [Element::F32, Element::F16, Element::BF16] {
        for (head_dim, value_head_dim) in [(64, 64), (80, 80), (128, 128), (192, 128), (7, 33)] {
            for causal in [false, true] {
                all.push(Shipped::Scalar(Scalar {
                    target,
                    element,
                    head_dim,
                    value_head_dim,
                    causal,
                }));
            }
        }
    }
    if target.has(Capability::Mma) {
        all.extend(mmas(target).into_iter().map(Shipped::Mma));
        all.extend(combines(target).into_iter().map(Shipped::Combine));
    }
    if [Target::SM_80, Target::SM_89, Target::SM_90A].contains(&target) {
        // One for each size of shared memory: the kernel is the same on all of them.
        all.extend(decode::every_tuned(target).into_iter().map(Shipped::Decode));
        all.extend(appends(target).into_iter().map(Shipped::Append));
    }
    if target == Target::SM_90A {
        all.extend(forwards().into_iter().map(Shipped::Forward));
        all.extend(every_prefill().into_iter().map(Shipped::Prefill));
        all.push(Shipped::Sequencer(Sequencer { target }));
        for element in [Element::F16, Element::BF16] {
            all.push(Shipped::Single(Single { element }));
        }
        all.extend(products().into_iter().map(Shipped::Product));
        for (unroll, warpgroups) in [(1, 1), (4, 1), (4, 2)] {
            for element in [Element::F16, Element::BF16] {
                all.push(Shipped::Ceiling(Ceiling { element, unroll, warpgroups }));
            }
        }
    }
    all
}

/// Forward attention: every tuned configuration, head dimensions that are not
/// a whole number of panels or of tensor core steps, and of each its compact form.
fn forwards() -> Vec<Forward> {
    let mut all = every_tuned();
    for (index, dim) in [8, 40, 72, 136, 200, 248].into_iter().enumerate() {
        let workload = Workload {
            element: if index % 2 == 0 { Element::BF16 } else { Element::F16 },
            head_dim: dim,
            value_head_dim: dim,
            causal: index % 2 == 0,
            query_length: 512,
            key_length: 512,
            heads: 8,
            multiprocessors: 132,
        };
        all.extend(tuned(&workload).map(|tuned| tuned.configuration));
    }
    for full in all.clone() {
        let compact = Forward { form: Form::COMPACT, ..full };
        if !all.contains(&compact) {
            all.push(compact);
        }
    }
    all
}

/// Attention with `mma.sync`: what a target gets for narrow, wide and widest
/// heads, for few queries and for keys that are split, and with sums in `f16`.
/// Elements and masks take turns.
fn mmas(target: Target) -> Vec<Mma> {
    use Element::{BF16, F16, F32};
    let cases = [
        (BF16, (64, 64), true, 4096, 1024, F32),
        (F16, (64, 64), false, 4096, 1024, F16),
        (BF16, (128, 128), false, 4096, 1024, F32),
        (F16, (128, 128), true, 4096, 1024, F32),
        (F16, (128, 128), true, 4096, 1024, F16),
        (BF16, (256, 256), true, 4096, 1024, F32),
        (BF16, (128, 128), false, 1, 8, F32),
    ];
    let chosen = |(element, (head_dim, value_head_dim), causal, query_length, heads, sums)| {
        let workload = Workload {
            element,
            head_dim,
            value_head_dim,
            causal,
            query_length,
            key_length: 4096,
            heads,
            multiprocessors: 128,
        };
        mma::tuned(target, &workload, sums).map(|tuned| tuned.configuration)
    };
    cases.into_iter().filter_map(chosen).collect()
}

/// New tokens: both memory orders, without and with rotary embeddings of whole and part of a key.
fn appends(target: Target) -> Vec<Append> {
    let rotary = |dim, interleaved| Some(Rotary { dim, interleaved });
    let cases = [
        (Element::BF16, (128, 128), false, None),
        (Element::F16, (64, 64), true, None),
        (Element::BF16, (128, 128), true, rotary(128, false)),
        (Element::F16, (192, 128), false, rotary(64, true)),
    ];
    cases
        .map(|(element, (head_dim, value_head_dim), paged, rotary)| Append {
            target,
            element,
            head_dim,
            value_head_dim,
            paged,
            rotary,
        })
        .into()
}

/// From what split attention leaves, and from each element to itself.
fn combines(target: Target) -> Vec<Combine> {
    let value_head_dim = 128;
    [Element::F16, Element::BF16]
        .into_iter()
        .flat_map(|element| [(Element::F32, element), (element, element)])
        .chain([(Element::F32, Element::F32)])
        .map(|(partial, element)| Combine { target, partial, element, value_head_dim })
        .collect()
}

/// Products: every width once, then every combination of the rest at a few widths.
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
                            for columns in [64, 256] {
                                let stages = 3;
                                let product = Product {
                                    element,
                                    columns,
                                    swizzle,
                                    a,
                                    b,
                                    source,
                                    stages,
                                    cluster,
                                };
                                if source == Source::Shared || a == Contiguous::Inner {
                                    all.push(product);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    all
}
