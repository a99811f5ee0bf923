//! The random problems of a soak. Each is a function of the soak's seed and of its own number, so
//! that any of them can be had again alone.

use flashcore::random::mix;
use flashcore::{Alibi, DType, Lists, Mask, Pass, Problem, Scores, Storage};
use testing::check::DIMS;

use crate::statistics::Random;

/// A problem with the seed of its tensors.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Case {
    /// Its number in the soak.
    pub(super) number: u64,
    /// What is computed.
    pub(super) problem: Problem,
    /// The seed of its tensors.
    pub(super) tensor_seed: u64,
    /// Which of the kernels that accept it: the best is the first.
    pub(super) rank: usize,
}

/// The properties of a problem that decide which kernels serve it, and so what is compiled; sizes
/// are drawn anew for each problem of a kind.
struct Kind {
    dtype: DType,
    dims: (usize, usize),
    mask: MaskKind,
    scores: Scores,
    storage: StorageKind,
    lists: Lists,
    rank: usize,
    /// Whether gradients are asked for, and the same bits from run to run.
    pass: Pass,
    deterministic: bool,
}

#[derive(Clone, Copy)]
enum MaskKind {
    None,
    Causal,
    Left,
    Window,
    Chunk,
}

#[derive(Clone, Copy)]
enum StorageKind {
    Padded,
    Packed,
    Entries,
    Pages(usize),
    PackedOverPages(usize),
}

/// The number of kinds at the beginning, and of problems until one more kind is added: compiling
/// takes time.
const KINDS: u64 = 16;
const PROBLEMS_FOR_A_KIND: u64 = 256;
/// Kinds at most: what is compiled for them stays in memory, which must not grow for ever.
const MOST_KINDS: u64 = 96;

/// Elements of the query tensor, and of the key tensor, at most. The reference is on the CPU, and
/// many small problems find more than a few large ones.
const ELEMENTS: usize = 1 << 17;
/// The maximum elements where gradients are computed, which are compared completely.
const ELEMENTS_OF_GRADIENTS: usize = 1 << 15;

/// Around the edges of tiles.
const EDGES: [usize; 12] = [1, 16, 32, 63, 64, 65, 127, 128, 129, 191, 256, 257];

impl Case {
    /// The problem of a number.
    pub(super) fn of(seed: u64, number: u64) -> Self {
        let mut random = Random::new(mix(seed ^ mix(number)));
        // Half of the problems have the sizes of an earlier one: plans are found again.
        let sizes = match random.below(2) {
            0 => number,
            _ => random.below(number as usize + 1) as u64,
        };
        let (problem, rank) = problem(seed, sizes);
        Case { number, problem, tensor_seed: random.bits() >> 33, rank }
    }

    /// The command that soaks in this problem alone, with what goes with it.
    pub(super) fn replay_soaking(&self, seed: u64) -> String {
        let number = self.number;
        format!("flashcore soak --seed {seed} --first {number} --problems 1 --faults none")
    }

    /// The command that computes it again, and says what is wrong with it.
    pub(super) fn replay(&self, kernel: &str) -> String {
        let (text, seed) = (self.problem.text(), self.tensor_seed);
        format!("flashcore attend --problem {text} --seed {seed} --kernel {kernel}")
    }
}

fn problem(seed: u64, number: u64) -> (Problem, usize) {
    let mut random = Random::new(mix(seed.wrapping_add(0x51ce) ^ mix(number)));
    let kinds = (KINDS + number / PROBLEMS_FOR_A_KIND).min(MOST_KINDS);
    let kind = Kind::of(seed, random.below(kinds as usize) as u64);
    (kind.problem(&mut random), kind.rank)
}

impl Kind {
    fn of(seed: u64, number: u64) -> Self {
        let random = &mut Random::new(mix(seed.wrapping_add(0x0c1d) ^ mix(number)));
        // Properties cycle with coprime periods, so that the first kinds cover all of their values.
        let turn = |length: usize| (number % length as u64) as usize;
        let page = random.choose(&[1, 16, 16, 48, 64, 128, 256]);
        let storage = [
            StorageKind::Padded,
            StorageKind::Packed,
            StorageKind::Pages(page),
            StorageKind::Padded,
            StorageKind::PackedOverPages(page),
            StorageKind::Entries,
            StorageKind::Padded,
            StorageKind::Pages(page),
            StorageKind::Packed,
        ][turn(9)];
        let mask =
            [MaskKind::Causal, MaskKind::None, MaskKind::Left, MaskKind::Window, MaskKind::Chunk]
                [turn(5)];
        let slopes = random.choose(&[Alibi::PerHead, Alibi::PerSequence]);
        let mut scores = [
            Scores::default(),
            Scores::default().with_sinks(),
            Scores::default(),
            Scores::default().with_softcap(random.choose(&[5.0, 30.0])),
            Scores::default(),
            Scores::default().with_alibi(slopes),
            Scores::EVERY_RULE,
        ][turn(7)];
        let types = [DType::BF16, DType::BF16, DType::BF16, DType::F16, DType::F16, DType::F32];
        let (dtype, dims) = (random.choose(&types), random.choose(&DIMS));
        // In f32 the rounding of large scores shows in the output. The rule by which results pass
        // takes a row's log-sum-exp for its largest score, which it is not where a sink outweighs
        // the keys: such problems fail by the rule whoever computes them.
        let scales: &[f32] = match dtype {
            DType::F32 => &[0.02, -0.05],
            _ => &[0.02, 0.5, -0.1, 1.0],
        };
        scores.scale = random.one_in(4).then(|| random.choose(scales));
        let plain = matches!(storage, StorageKind::Padded) && !random.one_in(3);
        let lists = Lists {
            query_lengths: !plain && random.one_in(4),
            key_lengths: !plain && !matches!(storage, StorageKind::Packed),
            left_padding: !plain && random.one_in(6),
            batch_index: matches!(storage, StorageKind::Entries),
        };
        let rank = random.choose(&[0, 0, 0, 1, 2]);
        // Those of keys in pages are not computed.
        let differentiable = matches!(storage, StorageKind::Padded | StorageKind::Packed);
        let pass = match differentiable && random.one_in(2) {
            true => Pass::Backward,
            false => Pass::Forward,
        };
        let deterministic = pass == Pass::Backward && random.one_in(3);
        Kind { dtype, dims, mask, scores, storage, lists, rank, pass, deterministic }
    }

    /// A problem of this kind.
    fn problem(&self, random: &mut Random) -> Problem {
        let (head_dim, value_head_dim) = self.dims;
        let dim = head_dim.max(value_head_dim);
        let (queries, keys) = lengths(random);
        let (elements, most) = match self.pass {
            Pass::Forward => (ELEMENTS, usize::MAX),
            Pass::Backward => (ELEMENTS_OF_GRADIENTS, ELEMENTS_OF_GRADIENTS / dim),
        };
        let (queries, keys) = (queries.min(most), keys.min(most));
        // What fits: as many heads and sequences as were drawn, or fewer.
        let room = |row: usize| (elements / (row * dim).max(1)).max(1);
        let kv_heads = random.choose(&[1, 1, 2, 3]).min(room(keys.max(1)));
        let group = random.choose(&[1, 1, 2, 4, 6, 8, 16]).min(room(queries.max(1) * kv_heads));
        let sequences = random.choose(&[1, 1, 2, 3, 5, 9]);
        let batch = sequences.min(room(keys.max(queries * group).max(1) * kv_heads));
        let mask = match self.mask {
            MaskKind::None => Mask::NONE,
            MaskKind::Causal => Mask::CAUSAL,
            MaskKind::Left => Mask::window(Some(random.below(keys + 1)), Some(0)),
            MaskKind::Window => Mask::window(Some(random.below(200)), Some(random.below(9))),
            MaskKind::Chunk => Mask::CAUSAL.with_chunk(1 + random.below(200)),
        };
        let pages = |random: &mut Random, size: usize| {
            let columns = keys.div_ceil(size).max(1) + random.choose(&[0, 0, 1]);
            Storage::Paged { size, columns, pages: batch * columns + random.choose(&[0, 3]) }
        };
        let packed = |random: &mut Random, length: usize| {
            Storage::Packed(1 + batch * length / random.choose(&[1, 2, 2]))
        };
        let (queries_lie, keys_lie) = match self.storage {
            StorageKind::Padded => (Storage::Padded, Storage::Padded),
            StorageKind::Packed => (packed(random, queries), packed(random, keys)),
            StorageKind::Entries => (Storage::Padded, Storage::Entries(batch + random.below(3))),
            StorageKind::Pages(size) => (Storage::Padded, pages(random, size)),
            StorageKind::PackedOverPages(size) => (packed(random, queries), pages(random, size)),
        };
        let problem = Problem::new(batch, kv_heads * group, queries, head_dim)
            .with_kv_heads(kv_heads)
            .with_key_length(keys)
            .with_value_head_dim(value_head_dim)
            .with_dtype(self.dtype)
            .with_mask(mask)
            .with_scores(self.scores)
            .with_storage(queries_lie, keys_lie)
            .with_lists(self.lists);
        match self.pass {
            Pass::Forward => problem,
            Pass::Backward if self.deterministic => problem.backward().deterministic(),
            Pass::Backward => problem.backward(),
        }
    }
}

/// Queries and keys: one query over a cache, a few, or many; lengths at the edges of tiles as often
/// as others; now and then none.
fn lengths(random: &mut Random) -> (usize, usize) {
    let length = |random: &mut Random| match random.below(3) {
        0 => random.choose(&EDGES),
        1 => 1 + random.below(40),
        _ => 1 + random.below(600),
    };
    if random.one_in(100) {
        return random.choose(&[(0, 3), (3, 0), (0, 0)]);
    }
    match random.below(4) {
        0 => (1, 1 + random.below(2000)),
        1 => (1 + random.below(8), length(random)),
        _ => (length(random), length(random)),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::auxiliary_inputs::AuxiliaryInputs;

    #[test]
    fn every_problem_makes_sense_and_its_text_is_the_problem() {
        for number in 0..3000 {
            let Case { problem, .. } = Case::of(5, number);
            problem.validate().unwrap_or_else(|error| panic!("{}: {error}", problem.text()));
            assert_eq!(problem.text().parse::<Problem>().unwrap(), problem);
            let auxiliary = AuxiliaryInputs::of(&problem);
            auxiliary.unwrap_or_else(|error| panic!("{}: {error}", problem.text()));
            let elements = problem.key_shape().elements().unwrap();
            // Pages of 256 positions hold few keys of short sequences.
            assert!(elements <= 32 * ELEMENTS, "{}", problem.text());
        }
    }

    #[test]
    fn problems_are_of_all_sorts_and_come_again() {
        let all: Vec<Case> = (0..3000).map(|number| Case::of(1, number)).collect();
        let texts: HashSet<String> = all.iter().map(|it| it.problem.text()).collect();
        assert!((1200..2600).contains(&texts.len()), "{}", texts.len());
        for word in [
            "packed",
            "pages",
            "entries",
            "window",
            "chunk",
            "softcap",
            "alibi",
            "sinks",
            "backward",
            "deterministic",
        ] {
            assert!(texts.iter().any(|text| text.contains(word)), "{word}");
        }
        assert_eq!(Case::of(1, 77), all[77]);
        assert_ne!(Case::of(2, 77), all[77]);
    }
}
