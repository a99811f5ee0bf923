//! Random compositions of the ready-made mask and score functions, with the tensors that they load
//! from.

use flashcore::function::{Function, HostTensor, Stored, rules};
use flashcore::random::mix;
use flashcore::{Mask, Problem, Scores};

use crate::rng::Rng;

/// A mask and a score, composed of ready-made functions at random.
#[derive(Debug, Clone)]
pub struct Composition {
    /// The mask, if the composition has one.
    pub mask: Option<Function>,
    /// The score, if the composition has one.
    pub score: Option<Function>,
    /// The tensors that the functions load from.
    pub tensors: Vec<HostTensor>,
}

/// Returns every ready-made mask, with parameters for problems of some tens of positions.
pub fn masks() -> Vec<Function> {
    vec![
        rules::causal(),
        rules::window(9),
        rules::prefix(7),
        rules::prefixes(),
        rules::documents(),
        rules::documents_by_starts(),
        rules::chunked(11),
        rules::dilated(3),
        rules::tree(),
        rules::seen(),
    ]
}

/// Returns every ready-made score.
pub fn scores() -> Vec<Function> {
    vec![
        rules::softcap(1.5),
        rules::alibi(),
        rules::t5(8, 20, true),
        rules::t5(6, 30, false),
        rules::bias(Stored::F32),
        rules::temperatures(),
    ]
}

impl Composition {
    /// Returns the composition of a seed. `sizes` are the numbers of sequences, query heads,
    /// queries and keys of the problem.
    ///
    /// ```
    /// use flashcore_testing::composition::Composition;
    ///
    /// let composition = Composition::of(4, [2, 2, 20, 30]);
    /// assert!(composition.mask.is_some() || composition.score.is_some());
    /// ```
    pub fn of(seed: u64, sizes: [usize; 4]) -> Self {
        let mut rng = Rng::new(seed);
        // At least one of the two is present.
        let masks_count = rng.below(4);
        let scores_count = rng.below(3).max(usize::from(masks_count == 0));
        let mask = joined(&mut rng, &masks(), masks_count, &[Function::and, Function::or]);
        let score = joined(&mut rng, &scores(), scores_count, &[Function::then]);
        Composition { mask, score, tensors: tensors_of(mask.into_iter().chain(score), sizes) }
    }

    /// Returns the problem with this mask and this score.
    pub fn over(&self, problem: Problem) -> Problem {
        let problem = match self.mask {
            Some(mask) => problem.with_mask(Mask::NONE.with_function(mask)),
            None => problem,
        };
        match self.score {
            Some(score) => problem.with_scores(Scores::default().with_function(score)),
            None => problem,
        }
    }
}

/// A way to combine two functions into one.
type Join = fn(Function, Function) -> Result<Function, String>;

/// Combines `count` random functions of `all`, each time in a random way of `how`.
fn joined(rng: &mut Rng, all: &[Function], count: usize, how: &[Join]) -> Option<Function> {
    let mut joined: Option<Function> = None;
    for _ in 0..count {
        let (next, how) = (rng.choose(all), rng.choose(how));
        let next = joined.map_or(Ok(next), |so_far| how(so_far, next));
        joined = Some(next.expect("ready-made rules go together"));
    }
    joined
}

/// Returns the tensors that ready-made functions load from, for the given numbers of sequences,
/// query heads, queries and keys.
pub fn tensors_of(
    functions: impl Iterator<Item = Function>,
    [batch, heads, queries, keys]: [usize; 4],
) -> Vec<HostTensor> {
    let whole = |index: usize, most: u64| (mix(index as u64) % most) as i32;
    let part = |index: usize| (mix(index as u64 ^ 0x5eed) % 1000) as f32 / 500.0 - 1.0;
    let floats = |name: &str, extents: &[usize], of: fn(f32) -> f32| {
        let values: Vec<f32> =
            (0..extents.iter().product::<usize>()).map(|it| of(part(it))).collect();
        HostTensor::floats(name, &values, extents)
    };
    let integers = |name: &str, extents: &[usize], of: &dyn Fn(usize) -> i32| {
        let values: Vec<i32> = (0..extents.iter().product::<usize>()).map(of).collect();
        HostTensor::integers(name, &values, extents)
    };
    // Documents of unequal lengths, different in each sequence.
    let document = move |it: usize| (it % keys + 5 * (it / keys)) / 13;
    let start = move |it: usize| {
        (0..keys).find(|key| document(it / keys * keys + key) == document(it)).unwrap_or(0) as i32
    };
    let tree = (batch, (queries * queries).div_ceil(8).max(1));
    let mut all = vec![
        integers("prefixes", &[batch], &|it| whole(it, keys as u64 + 2)),
        integers("ids", &[batch, keys], &|it| document(it) as i32),
        integers("starts", &[batch, keys], &start),
        floats("buckets", &[32, heads], |it| it),
        floats("slopes", &[heads], |it| 0.05 + 0.05 * it.abs()),
        floats("temperatures", &[heads], |it| 1.0 + 0.5 * it),
    ];
    let bytes = (0..tree.0 * tree.1).map(|it| whole(it, 256) as u8).collect();
    all.push(HostTensor::new("tree", Stored::U8, &[tree.0, tree.1], bytes));
    let truths: Vec<bool> = (0..batch * queries * keys).map(|it| whole(it, 3) > 0).collect();
    let extents = [batch, heads, queries, keys];
    // Strides of 0 share `seen` between heads, and `bias` between sequences.
    let of_heads = [queries * keys, 0, keys, 1];
    all.push(HostTensor::truths("seen", &truths, &extents).with_strides(&of_heads));
    let bias: Vec<f32> = (0..heads * queries * keys).map(part).collect();
    let of_sequences = [0, queries * keys, keys, 1];
    all.push(HostTensor::floats("bias", &bias, &extents).with_strides(&of_sequences));
    let functions: Vec<Function> = functions.collect();
    let loaded = |it: &HostTensor| {
        functions.iter().flat_map(Function::tensors).any(|spec| spec.name == it.name)
    };
    all.into_iter().filter(loaded).collect()
}
