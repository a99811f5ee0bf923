//! The long list: more than a thousand problems for each element type.

use super::{Case, Contents, Order, each_mixture};
use flashcore::{DType, Mask, Problem};

/// Lengths of 1, primes, and one below, at and one above the edges of every tile: 64, 96, 128 and
/// 192 rows or keys, and small multiples of them.
const LENGTHS: [usize; 20] =
    [1, 2, 17, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 255, 257, 383, 384, 385];

/// The head dims that kernels are tuned for, of queries and of values.
const TUNED: [(usize, usize); 6] =
    [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)];

/// Returns what a kernel must get right before it is trusted: every head dim that is a multiple of
/// 8, every length around the edges of tiles, unequal lengths down to rows that see nothing,
/// grouped heads, odd batches and head counts, more tiles than a GPU has multiprocessors, all
/// contents and memory orders, each with both masks; windows, chunks and score rules.
///
/// Problems are as small as their purpose allows: the reference is computed on a CPU.
pub fn thorough(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for mask in [Mask::NONE, Mask::CAUSAL] {
        let list = List { dtype, mask };
        cases.extend(list.head_dims());
        cases.extend(list.lengths());
        cases.extend(list.unequal_lengths());
        cases.extend(list.long());
        cases.extend(list.heads_and_batches());
        cases.extend(list.contents());
        cases.extend(list.orders());
        cases.extend(list.many_tiles());
        cases.extend(list.scales());
    }
    cases.extend(rules(dtype));
    // Without a mask: whether a masked NaN is read is up to the kernel.
    let unmasked = List { dtype, mask: Mask::NONE };
    for contents in [Contents::NanKey, Contents::InfiniteValue] {
        for dim in [64, 128, 256] {
            cases.push(Case::new(unmasked.problem(1, 2, 150, dim)).with_contents(contents));
        }
    }
    // Each case has its own contents, so that no two cases make the same mistake.
    for (seed, case) in cases.iter_mut().enumerate() {
        case.seed = seed as u64 + 1;
    }
    each_mixture(cases, dtype)
}

/// Returns windows, chunks and score rules, at lengths around the edges of tiles and for each head
/// dim that has tiles of its own.
fn rules(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    let lengths = [(1, 300), (65, 65), (129, 257), (200, 97), (385, 385), (130, 515)];
    for (index, (queries, keys)) in lengths.into_iter().enumerate() {
        for (dim, value_dim) in TUNED {
            let problem = |mask| {
                Problem::new(2, 4, queries, dim)
                    .with_kv_heads(2)
                    .with_key_length(keys)
                    .with_value_head_dim(value_dim)
                    .with_dtype(dtype)
                    .with_mask(mask)
            };
            let window = Mask::window(Some(keys / 3), Some(index));
            for mask in [
                Mask::window(Some(63), Some(0)),
                Mask::window(Some(64), Some(65)),
                Mask::window(None, Some(3)),
                Mask::CAUSAL.with_chunk(64),
                Mask::NONE.with_chunk(97),
                window.with_chunk(129),
            ] {
                cases.push(Case::new(problem(mask)));
            }
            cases.push(Case::new(problem(Mask::CAUSAL).with_softcap(3.0)));
            cases.push(Case::new(problem(Mask::NONE).with_alibi()));
            cases.push(Case::new(problem(window).with_sinks()));
            let all = problem(window.with_chunk(70)).with_softcap(20.0).with_alibi().with_sinks();
            cases.push(Case::new(all.clone()));
            cases.push(Case::new(all).with_contents(Contents::FINITE[index]));
        }
    }
    cases
}

/// The element type and the mask of a list of cases.
struct List {
    dtype: DType,
    mask: Mask,
}

impl List {
    fn problem(&self, batch: usize, heads: usize, length: usize, dim: usize) -> Problem {
        Problem::new(batch, heads, length, dim).with_dtype(self.dtype).with_mask(self.mask)
    }

    /// Returns every multiple of 8 as a head dim, and value head dims that differ.
    fn head_dims(&self) -> Vec<Case> {
        let equal = (8..=256).step_by(8).map(|dim| (dim, dim));
        let unequal = [8, 32, 96, 128, 192, 256].into_iter().map(|dim| (dim, 64));
        let others = [(192, 128), (64, 128), (64, 256), (128, 8), (40, 72), (72, 40), (136, 248)];
        let mut cases = Vec::new();
        for (dim, value_dim) in equal.chain(unequal).chain(others) {
            for (queries, keys) in [(65, 65), (129, 191), (200, 97), (1, 129)] {
                let problem = self.problem(1, 2, queries, dim).with_key_length(keys);
                cases.push(Case::new(problem.with_value_head_dim(value_dim)));
            }
        }
        cases
    }

    fn lengths(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for (dim, value_dim) in TUNED {
            for length in LENGTHS {
                let problem = self.problem(1, 1, length, dim).with_value_head_dim(value_dim);
                cases.push(Case::new(problem));
            }
        }
        cases
    }

    /// Returns few queries over many keys, and many over few: with a causal mask whole tiles see
    /// nothing, and in other tiles the first key blocks to be visited are fully masked.
    fn unequal_lengths(&self) -> Vec<Case> {
        let lengths = [
            (1, 1),
            (1, 64),
            (1, 300),
            (3, 1000),
            (64, 65),
            (127, 1024),
            (97, 640),
            (100, 31),
            (129, 128),
            (200, 1),
            (200, 64),
            (260, 255),
            (300, 129),
            (450, 96),
            (513, 100),
            (640, 97),
        ];
        let mut cases = Vec::new();
        for (queries, keys) in lengths {
            for dim in [40, 64, 96, 128, 256] {
                let problem = self.problem(1, 2, queries, dim).with_key_length(keys);
                cases.push(Case::new(problem));
            }
        }
        cases
    }

    /// Returns problems long enough for the tiles that are chosen for long sequences.
    fn long(&self) -> Vec<Case> {
        let lengths: &[usize] = match self.mask {
            Mask::NONE => &[1025, 1151, 1152, 1153, 1249],
            _ => &[2049, 2111, 2112, 2113, 2305],
        };
        let mut cases = Vec::new();
        for &length in lengths {
            for dim in [64, 40] {
                cases.push(Case::new(self.problem(1, 1, length, dim)));
                let longer = self.problem(1, 2, length, dim).with_kv_heads(1);
                cases.push(Case::new(longer.with_key_length(length + 77)));
            }
        }
        for contents in Contents::FINITE {
            cases.push(Case::new(self.problem(1, 1, lengths[1], 64)).with_contents(contents));
        }
        // Enough heads that a large GPU does not prefer small tiles.
        let (heads, lengths): (usize, &[usize]) = match self.mask {
            Mask::NONE => (4, &[2049, 2112, 2113, 4097, 4161]),
            _ => (3, &[4097, 4225]),
        };
        for &length in lengths {
            cases.push(Case::new(self.problem(1, heads, length, 64)));
        }
        for length in [1025, 1153] {
            cases.push(Case::new(self.problem(1, 9, length, 128)));
        }
        for contents in [Contents::GrowingLogits, Contents::LateHugeKey] {
            let problem = self.problem(1, heads, lengths[1] - 1, 40);
            cases.push(Case::new(problem).with_contents(contents));
        }
        cases
    }

    fn heads_and_batches(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        let shared = [(8, 4), (8, 2), (8, 1), (6, 3), (5, 1), (7, 7), (12, 4), (9, 3)];
        for (heads, kv_heads) in shared {
            for batch in [1, 3] {
                for dim in [64, 128] {
                    let problem = self.problem(batch, heads, 70, dim).with_kv_heads(kv_heads);
                    cases.push(Case::new(problem.with_key_length(130)));
                }
            }
        }
        for (batch, heads) in [(3, 5), (7, 3), (2, 11), (13, 1), (1, 17)] {
            for dim in [64, 96, 192] {
                cases.push(Case::new(self.problem(batch, heads, 77, dim)));
            }
        }
        cases
    }

    fn contents(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for contents in Contents::FINITE {
            for dim in [40, 64, 96, 128, 192, 256] {
                for (queries, keys) in [(300, 300), (130, 515)] {
                    let problem = self.problem(1, 1, queries, dim).with_key_length(keys);
                    cases.push(Case::new(problem).with_contents(contents));
                }
            }
        }
        cases
    }

    fn orders(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for order in [Order::HeadsFirst, Order::Padded] {
            for dim in [8, 40, 64, 72, 128, 200, 256] {
                for (queries, keys) in [(90, 90), (33, 161)] {
                    let problem = self.problem(3, 4, queries, dim).with_kv_heads(2);
                    cases.push(Case::new(problem.with_key_length(keys)).with_order(order));
                }
            }
        }
        cases
    }

    /// Returns problems of more tiles than multiprocessors, so that persistent blocks process
    /// several tiles.
    fn many_tiles(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for (batch, heads, queries, keys, dim) in [
            (5, 57, 40, 40, 64),
            (3, 60, 129, 129, 64),
            (2, 150, 20, 200, 64),
            (5, 57, 33, 65, 128),
            (4, 40, 130, 60, 128),
            (2, 100, 17, 129, 192),
            (3, 70, 65, 65, 256),
            (200, 2, 9, 130, 96),
        ] {
            let problem = self.problem(batch, heads, queries, dim).with_key_length(keys);
            cases.push(Case::new(problem));
        }
        // Enough heads that the tiles of large problems are chosen, at the edges of those tiles.
        for length in [63, 65, 97, 127, 130, 193] {
            for dim in [64, 128] {
                cases.push(Case::new(self.problem(1, 70, length, dim)));
            }
        }
        for contents in Contents::FINITE {
            cases.push(Case::new(self.problem(1, 68, 140, 128)).with_contents(contents));
        }
        cases
    }

    fn scales(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for scale in [0.01, 1.0, 3.0] {
            for dim in [64, 128] {
                cases.push(Case::new(self.problem(1, 2, 140, dim).with_scale(scale)));
            }
        }
        cases
    }
}

#[cfg(test)]
mod tests {
    use flashcore::gpu::Chip;
    use flashcore::plan;
    use kernels::Configuration;
    use kernels::forward::every_tuned;

    use super::*;

    #[test]
    fn there_are_two_thousand_and_none_twice() {
        let mut all: Vec<String> = Vec::new();
        for dtype in [DType::F16, DType::BF16] {
            let mut cases = thorough(dtype);
            assert!(cases.len() >= 1000, "{}", cases.len());
            for case in &mut cases {
                case.problem.validate().unwrap();
                case.seed = 0;
                all.push(case.to_string());
            }
        }
        let count = all.len();
        all.sort();
        let twice = all.windows(2).find(|pair| pair[0] == pair[1]);
        assert_eq!(twice, None);
        assert!(count >= 2000, "{count}");
    }

    /// The forward kernel accepts every case, and the cases reach each of its tuned tiles.
    #[test]
    fn the_forward_kernel_takes_every_case_in_every_tile() {
        let mut tiles = std::collections::HashSet::new();
        for case in [thorough(DType::F16), thorough(DType::BF16)].concat() {
            let arrangement = case.arrangement().unwrap();
            let candidates = plan::candidates(&Chip::H200, &case.problem, &arrangement);
            let forward = candidates.into_iter().find(|it| it.kernel == "forward").unwrap();
            assert!(forward.accepted, "{case}: {}", forward.reason);
            let Some(Configuration::Forward(it)) = forward.choice.map(|it| *it.kernel()) else {
                panic!("{case}");
            };
            tiles.insert((it.query_rows(), it.key_block));
        }
        for tuned in every_tuned() {
            let tile = (tuned.query_rows(), tuned.key_block);
            assert!(tiles.contains(&tile), "{}", tuned.name());
        }
    }
}
