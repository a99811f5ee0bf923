//! What an attention kernel is built for, and the smallest call that exercises it.

use flashcore::{Alibi, Descale, Mask, Problem};
use kernels::mma::BackwardMma;
use kernels::{Backward, Batch, Cache, Configuration, MaskKind, Rules, Scales};
use ptx::{Element, Target};

use super::call::dtype;
use super::{Call, PlacementKind, Ragged};

/// The properties that a kernel is built for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    pub(super) target: Target,
    pub(super) element: Element,
    cache: Cache,
    dims: [u32; 2],
    /// The mask and score rules of its scenes, unless a call changes them.
    rules: Rules,
}

/// The softcap of scenes that have one.
const SOFTCAP: f32 = 1.5;

impl Kernel {
    /// Returns the properties of an attention kernel. Other kernels get a placeholder, for which
    /// the plan refuses the call.
    pub(super) fn of(kernel: &Configuration) -> Self {
        let plain = |target, element, dims, rules| Kernel {
            target,
            element,
            cache: Cache::plain(element),
            dims,
            rules,
        };
        match *kernel {
            Configuration::Scalar(it) => {
                plain(it.target, it.element, [it.head_dim, it.value_head_dim], it.rules)
            }
            Configuration::Mma(it) => {
                plain(it.target, it.element, [it.head_dim, it.value_head_dim], it.rules)
            }
            Configuration::Forward(it) => {
                plain(Target::SM_90A, it.element, [it.head_dim, it.value_head_dim], it.rules)
            }
            Configuration::Prefill(it) => {
                // A prefill kernel treats every mask as a window.
                let mask = match it.tile.rules.mask {
                    MaskKind::Local => MaskKind::Causal,
                    other => other,
                };
                Kernel {
                    rules: Rules { mask, ..it.tile.rules },
                    ..Kernel::of(&Configuration::Forward(it.tile))
                }
            }
            Configuration::Decode(it) => {
                let mask = match it.rules.mask {
                    MaskKind::Local => MaskKind::Dense,
                    other => other,
                };
                let rules = Rules { mask, ..it.rules };
                let dims = [it.head_dim, it.value_head_dim];
                Kernel { cache: it.cache, ..plain(it.target, it.element, dims, rules) }
            }
            Configuration::Backward(it) => {
                plain(Target::SM_90A, it.element, [it.head_dim, it.value_head_dim], it.rules)
            }
            Configuration::BackwardMma(it) => {
                plain(it.target, it.element, [it.head_dim, it.value_head_dim], it.rules)
            }
            _ => plain(Target::SM_80, Element::F32, [8, 8], Rules::DENSE),
        }
    }

    /// Returns a problem of equal lengths, `[queries, keys]`, with `[query heads, key heads]`. A
    /// window spans a little more than half of the keys before a query and some after it; chunks
    /// are a third of the keys.
    pub(super) fn problem(
        &self,
        batch: usize,
        [queries, keys]: [usize; 2],
        [heads, key_heads]: [usize; 2],
    ) -> Problem {
        let [dim, value_dim] = self.dims.map(|dim| dim as usize);
        let window = Mask::window(Some(keys / 2 + 1), Some(keys / 9));
        let mask = match self.rules.mask {
            MaskKind::Dense => Mask::NONE,
            MaskKind::Causal => Mask::CAUSAL,
            MaskKind::Local => window,
            MaskKind::Chunked => window.with_chunk(keys / 3 + 1),
        };
        let mut problem = Problem::new(batch, heads, queries, dim)
            .with_kv_heads(key_heads)
            .with_key_length(keys)
            .with_value_head_dim(value_dim)
            .with_dtype(dtype(self.element))
            .with_kv_dtype(dtype(self.cache.element))
            .with_mask(mask);
        problem.descales.key = descale(self.cache.key_scales);
        problem.descales.value = descale(self.cache.value_scales);
        problem.scores.softcap = self.rules.softcap.then_some(SOFTCAP);
        if self.rules.alibi {
            problem.scores.alibi = Alibi::PerSequence;
        }
        problem.scores.sinks = self.rules.sinks;
        problem.mask.function = self.rules.mask_function;
        problem.scores.function = self.rules.score_function;
        problem
    }
}

impl Call {
    /// Creates the smallest call that takes an attention kernel around its loops and has partial
    /// tiles at the ends.
    pub fn small(kernel: Configuration) -> Self {
        match kernel {
            // One partial query tile over three key blocks, of which the last is nearly empty; with
            // stream-K more key blocks, enough for two thread blocks.
            Configuration::Forward(it) => {
                let blocks = if it.stream_k { 6 } else { 2 };
                let lengths = [it.query_rows() as usize - 3, blocks * it.key_block as usize + 5];
                Call::new(kernel, 1, lengths, [1, 1])
            }
            Configuration::Mma(it) if it.batch != Batch::Equal => {
                let place = match it.batch {
                    Batch::Paged => PlacementKind::Paged(it.key_block as usize / 2 - 1),
                    _ => PlacementKind::PackedWithGaps,
                };
                let rows = it.query_rows() as usize;
                Call::ragged(kernel, tiles_of_queries(rows).over(place), [2, 1])
            }
            Configuration::Mma(it) => {
                let lengths = [it.query_rows() as usize - 3, 2 * it.key_block as usize + 5];
                Call::new(kernel, 1, lengths, [1, 1])
            }
            // A sequence long enough for several splits, so that parts are combined; and sequences
            // of one tile, of one key and of none.
            Configuration::Decode(it) => {
                let tile = it.tile_keys as usize;
                let long = (2 * it.warps as usize + 1) * tile + 3;
                let place = match it.page_rows {
                    None => PlacementKind::Entries,
                    Some(1) => PlacementKind::Paged(tile - 3),
                    Some(_) => PlacementKind::Paged(tile),
                };
                let ragged = Ragged::new(vec![1; 4], vec![long, 0, 1, tile]).over(place);
                Call::ragged(kernel, ragged, [3, 1]).with_multiprocessors(3)
            }
            Configuration::Prefill(it) => {
                let rows = it.tile.query_rows() as usize;
                let place = it.page_rows.map_or(PlacementKind::PackedWithGaps, |it| {
                    PlacementKind::Paged(2 * it as usize)
                });
                Call::ragged(kernel, tiles_of_queries(rows).over(place), [2, 1])
            }
            Configuration::Backward(it) => {
                Call::small_backward(kernel, [it.query_block, it.key_block()], it.batch)
            }
            Configuration::BackwardMma(it) => {
                Call::small_backward(kernel, [it.query_block, it.key_block()], it.batch)
            }
            // Slightly more than one block.
            _ => Call::new(kernel, 1, [11, 21], [2, 1]),
        }
    }

    /// Creates a call of three query blocks for each of two heads that share a key head, and of two
    /// key blocks; in a ragged batch with short and empty sequences as well.
    fn small_backward(kernel: Configuration, [rows, block]: [u32; 2], batch: Batch) -> Self {
        let [queries, keys] = [2 * rows as usize + 5, block as usize + 3];
        let heads = small_heads(&kernel);
        if batch == Batch::Equal {
            return Call::new(kernel, 1, [queries, keys], heads);
        }
        let ragged = Ragged::new(vec![2, queries, 0, 1], vec![1, keys, 7, 0])
            .over(PlacementKind::PackedWithGaps);
        let ragged = Ragged { query_place: PlacementKind::PackedWithGaps, ..ragged };
        Call::ragged(kernel, ragged, heads)
    }

    /// Creates a call for a companion kernel of the backward pass, with `queries` queries of
    /// several heads and sequences. Every query sees every key, so that no gradient is zero.
    pub(super) fn for_companion(kernel: Configuration, queries: usize) -> Self {
        let rules = Rules::DENSE;
        let kernel = match kernel {
            Configuration::Backward(it) => Configuration::Backward(Backward { rules, ..it }),
            Configuration::BackwardMma(it) => {
                Configuration::BackwardMma(BackwardMma { rules, ..it })
            }
            other => other,
        };
        Call::new(kernel, 2, [queries, 21], small_heads(&kernel))
    }
}

impl Call {
    /// Creates calls for a companion kernel of the backward pass whose tiles have shares of query
    /// blocks of `rows` rows: shares of more query blocks than there are thread blocks for, of one
    /// and of none, of queries without keys. The companion clears or rounds some of them, or all.
    pub(super) fn for_shares(kernel: Configuration, rows: usize) -> impl Iterator<Item = Self> {
        let batches = [
            (vec![4 * rows + 5, 1, 0, 3], vec![5, 300, 300, 0], 2),
            (vec![9, rows + 1, 2 * rows - 3, 1], vec![1, 0, 130, 7], 3),
            (vec![3 * rows, 2 * rows + 1], vec![3 * rows, 2 * rows + 1], 2),
        ];
        batches.into_iter().flat_map(move |(queries, keys, heads)| {
            let ragged = Ragged {
                query_place: PlacementKind::Packed,
                ..Ragged::new(queries, keys).over(PlacementKind::Packed)
            };
            let call = Call::ragged(kernel, ragged, [heads, heads]);
            [1, 8].map(|it| call.clone().with_multiprocessors(it))
        })
    }
}

/// Returns the `[query heads, key heads]` of small calls of a backward kernel: two that share keys,
/// if the kernel allows it.
fn small_heads(kernel: &Configuration) -> [usize; 2] {
    match kernel {
        Configuration::Backward(Backward { shares: true, .. }) => [2, 2],
        _ => [2, 1],
    }
}

/// Returns the kind of descale factors of a problem for a cache's scales.
pub(super) fn descale(scales: Scales) -> Descale {
    match scales {
        Scales::One => Descale::None,
        Scales::PerHead => Descale::PerHead,
        Scales::PerToken => Descale::PerToken,
    }
}

/// Returns sequences of two tiles of `rows` queries, of less than one, of one query and of none;
/// the longest has one key more than queries.
fn tiles_of_queries(rows: usize) -> Ragged {
    Ragged::new(vec![2, rows + 3, 1, 0], vec![1, rows + 4, 0, 5])
}
