//! Masks and scores as functions, and the tensors that they load from.

use kernels::attention::LEAST_SCORE;
use kernels::attention::function::{
    Function, Here, HostTensor, Kind, Region, Row, Seen, TensorSpec, Windowed,
};
use serde::{Serialize, Serializer};

use super::{Mask, Problem};

/// Serializes a function as its text.
pub(super) fn as_text<S: Serializer>(
    function: &Option<Function>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    function.map(|function| function.text()).serialize(serializer)
}

impl Problem {
    /// Returns the problem's functions, the mask function first.
    pub fn functions(&self) -> impl Iterator<Item = Function> + use<> {
        self.mask.function.into_iter().chain(self.scores.function)
    }

    /// Returns the tensors that the functions load from, each once.
    pub fn captured(&self) -> Vec<&'static TensorSpec> {
        let mut all: Vec<&TensorSpec> = Vec::new();
        for spec in self.functions().flat_map(|function| function.tensors()) {
            if !all.iter().any(|it| it.name == spec.name) {
                all.push(spec);
            }
        }
        all
    }

    /// Refuses a function of the wrong kind, and tensors that share a name but differ otherwise.
    pub(super) fn validate_functions(&self) -> Result<(), String> {
        let places = [(Kind::Mask, self.mask.function), (Kind::Score, self.scores.function)];
        for (kind, function) in places {
            if let Some(function) = function.filter(|function| function.kind() != kind) {
                return Err(format!("{} is no {}", function.name(), kind.name()));
            }
        }
        let all = self.captured();
        for spec in self.functions().flat_map(|function| function.tensors()) {
            if !all.contains(&spec) {
                return Err(format!("mask and score have different tensors {}", spec.name));
            }
        }
        Ok(())
    }

    /// Returns an equivalent problem in which the parts of its functions that are rules with
    /// a name (windows, caps of scores) are replaced by fields of [`Mask`] and
    /// [`Scores`](super::Scores), which kernels evaluate faster. The captured tensors stay the same.
    pub(crate) fn with_rules_by_name(&self) -> Problem {
        self.with_windows_by_name().with_caps_by_name()
    }

    /// Replaces the part of the mask function that is a window by [`Mask::left`] and
    /// [`Mask::right`]: kernels derive the key blocks of a window without evaluating the function
    /// block by block.
    fn with_windows_by_name(&self) -> Problem {
        let Some(function) = self.mask.function else { return self.clone() };
        let lengths = [self.query_length, self.key_length].map(|it| u32::try_from(it).ok());
        let lengths = match (self.has_equal_lengths(), lengths) {
            (true, [Some(queries), Some(keys)]) => Some([queries, keys]),
            _ => None,
        };
        let Windowed { left, right, rest } = function.windowed(lengths);
        let closer = |held: Option<usize>, found: Option<u32>| {
            held.into_iter().chain(found.map(|it| it as usize)).min()
        };
        let [left, right] = [closer(self.mask.left, left), closer(self.mask.right, right)];
        Problem { mask: Mask { left, right, function: rest, ..self.mask }, ..self.clone() }
    }

    /// Counts the pairs that are visible under both the mask function and the rest of the mask,
    /// over all heads and sequences. The count is an estimate where the function loads from
    /// tensors, whose elements may be anything (an undecided pair counts as visible), and where the
    /// search takes too long (half of the pairs of an undecided region count).
    pub(super) fn pairs_by_function(&self, function: Function) -> u128 {
        let depends = function.depends();
        let apart = |depends: bool, count: usize| if depends { count.clamp(1, 64) } else { 1 };
        let [sequences, heads] =
            [apart(depends.batch, self.batch), apart(depends.head, self.query_heads)];
        let (mut pairs, mut left) = (0, MOST_REGIONS);
        for (batch, head) in (0..sequences).flat_map(|it| (0..heads).map(move |head| (it, head))) {
            let int = |it: usize| i32::try_from(it).unwrap_or(i32::MAX);
            let region = Region {
                batch: int(batch)..int(batch) + 1,
                heads: int(head)..int(head) + 1,
                queries: 0..int(self.query_length),
                keys: 0..int(self.key_length),
                query_length: int(self.query_length),
                key_length: int(self.key_length),
            };
            pairs += pairs_of_region(self.mask, function, region, &mut left);
        }
        let all = self.batch as u128 * self.query_heads as u128;
        pairs.saturating_mul(all) / (sequences * heads) as u128
    }

    /// Returns the functions of one row, over validated tensors in host memory.
    pub fn row_functions<'a>(&self, tensors: &'a [HostTensor], here: Here) -> RowFunctions<'a> {
        let row = |function| Row::new(function, tensors, here);
        RowFunctions {
            mask: self.mask.function.map(row),
            score: self.scores.function.map(row),
            slope: None,
        }
    }

    /// Like [`Problem::row_functions`], with the derivative of the score function, for gradients.
    pub fn row_functions_with_slope<'a>(
        &self,
        tensors: &'a [HostTensor],
        here: Here,
    ) -> RowFunctions<'a> {
        let slope = self.scores.function.filter(|function| !function.has_slope_one());
        let slope = slope.map(|function| Row::new(function.slope(), tensors, here));
        RowFunctions { slope, ..self.row_functions(tensors, here) }
    }
}

/// Regions that are examined before the rest is estimated: about a tenth of a second.
const MOST_REGIONS: usize = 1 << 18;

/// Counts the visible pairs of a region, by halving every region in which only some pairs are
/// visible.
fn pairs_of_region(mask: Mask, function: Function, whole: Region, left: &mut usize) -> u128 {
    let mut pairs = 0;
    let mut open = vec![whole];
    while let Some(region) = open.pop() {
        let Region { queries, keys, .. } = region.clone();
        let (height, width) = (queries.len() as u128, keys.len() as u128);
        if height * width == 0 {
            continue;
        }
        *left = left.saturating_sub(1);
        let seen = match seen_by_name(mask, &region) {
            Seen::None => Seen::None,
            Seen::Some if function.seen(&region) == Seen::None => Seen::None,
            Seen::Some => Seen::Some,
            Seen::All => function.seen(&region),
        };
        let middle = |range: &std::ops::Range<i32>| range.start + range.len() as i32 / 2;
        match seen {
            Seen::None => {}
            Seen::All => pairs += height * width,
            // A single pair is undecided only where the function loads from a tensor.
            Seen::Some if height * width == 1 => pairs += 1,
            Seen::Some if *left == 0 => pairs += height * width / 2,
            Seen::Some if height >= width => {
                let cut = middle(&queries);
                open.push(Region { queries: queries.start..cut, ..region.clone() });
                open.push(Region { queries: cut..queries.end, ..region });
            }
            Seen::Some => {
                let cut = middle(&keys);
                open.push(Region { keys: keys.start..cut, ..region.clone() });
                open.push(Region { keys: cut..keys.end, ..region });
            }
        }
    }
    pairs
}

/// Tells how much of a region is visible under the mask without its function. Both ends of the
/// range of visible keys move monotonically with the query, so the first and last query suffice.
fn seen_by_name(mask: Mask, region: &Region) -> Seen {
    let row = |query: i32| {
        let lengths = [region.query_length, region.key_length].map(|it| it as usize);
        mask.visible_keys(query as usize, lengths[0], lengths[1])
    };
    let keys = region.keys.start as usize..region.keys.end as usize;
    let (first, last) = (row(region.queries.start), row(region.queries.end - 1));
    let empty = first.is_empty() || last.is_empty();
    if empty && region.queries.len() == 1 {
        return Seen::None;
    }
    if empty {
        return Seen::Some;
    }
    match (first.start.max(last.start), first.end.min(last.end)) {
        _ if keys.end <= first.start || last.end <= keys.start => Seen::None,
        (start, end) if start <= keys.start && keys.end <= end => Seen::All,
        _ => Seen::Some,
    }
}

/// The mask and score functions of one row, ready to be evaluated key by key.
#[derive(Debug, Clone)]
pub struct RowFunctions<'a> {
    mask: Option<Row<'a>>,
    score: Option<Row<'a>>,
    /// Derivative of the score function with respect to the score; `None` where it is constant 1.
    slope: Option<Row<'a>>,
}

impl RowFunctions<'_> {
    /// Tells whether the mask function lets the row see a key.
    pub fn sees(&mut self, key: usize) -> bool {
        self.mask.as_mut().is_none_or(|row| row.sees(key))
    }

    /// Applies the score function to a score that is already scaled, capped and biased. A result
    /// below [`LEAST_SCORE`] hides the key: it is minus infinity.
    pub fn score(&mut self, key: usize, score: f64) -> f64 {
        let Some(row) = &mut self.score else { return score };
        match row.score(key, score) {
            hidden if hidden < LEAST_SCORE.into() => f64::NEG_INFINITY,
            seen => seen,
        }
    }

    /// Returns the derivative of the score function at a key and score.
    pub fn slope(&mut self, key: usize, score: f64) -> f64 {
        self.slope.as_mut().map_or(1.0, |row| row.score(key, score))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Scores;

    #[test]
    fn functions_stand_in_their_places() {
        let mask = Function::mask("mask", |at| at.query().ge(at.key()));
        let score = Function::score("score", |score, _| score * 2.0);
        let problem = Problem::new(1, 2, 16, 64);
        let mut wrong = problem.clone();
        wrong.mask.function = Some(score);
        assert_eq!(wrong.validate().unwrap_err().to_string(), "score is no mask");
        let wrong = problem.with_scores(Scores::default().with_function(mask));
        assert_eq!(wrong.validate().unwrap_err().to_string(), "mask is no score");
    }

    #[test]
    fn a_tensor_has_one_meaning() {
        let mask = Mask::from_fn("table", |at| at.integers("table").load([at.key()]).gt(0));
        let scores = |rank: usize| {
            Scores::from_fn("table", |score, at| match rank {
                1 => score + at.integers("table").load([at.query()]).to_f32(),
                _ => score + at.floats("table").load([at.query(), at.key()]),
            })
        };
        let problem = Problem::new(1, 2, 16, 64).with_mask(mask);
        let good = problem.clone().with_scores(scores(1));
        assert_eq!(good.validate(), Ok(()));
        assert_eq!(good.captured().len(), 1);
        assert_eq!(
            problem.with_scores(scores(2)).validate().unwrap_err().to_string(),
            "mask and score have different tensors table"
        );
    }

    #[test]
    fn windows_in_functions_are_windows_by_name() {
        let local = Mask::from_fn("local", |at| {
            at.query().ge(at.key()) & (at.query() - at.key()).le(9) & at.key().ne(3)
        });
        let problem = Problem::new(1, 2, 16, 64);
        let named = problem.clone().with_mask(Mask::window(Some(20), Some(1)));
        let named = Problem { mask: named.mask.with_function(local.function.unwrap()), ..named };
        let found = named.with_windows_by_name().mask;
        assert_eq!((found.left, found.right), (Some(9), Some(0)));
        assert_eq!(found.function.unwrap().text(), "(mask local (ne key 3))");
        let causal = Mask::from_fn("causal", |at| at.query().ge(at.key()));
        let causal = problem.with_mask(causal);
        assert_eq!(causal.with_windows_by_name().mask, Mask::CAUSAL);
        // With fewer queries than keys, query indices differ from positions.
        let ragged = Problem { query_length: 8, ..causal };
        assert_eq!(ragged.with_windows_by_name(), ragged);
    }

    #[test]
    fn pairs_that_a_function_hides_are_not_counted() {
        let masks = [
            Mask::from_fn("prefix", |at| at.key().lt(5) | at.key().le(at.query())),
            Mask::from_fn("heads", |at| at.key().lt(7 * at.head()) & (at.key() % 3).ne(at.query())),
            Mask::from_fn("chunks", |at| (at.key() / 8).eq(at.query() / 8)),
        ];
        for mask in masks {
            for by_name in [Mask::NONE, Mask::CAUSAL, Mask::window(Some(3), Some(9)).with_chunk(11)]
            {
                let mask = by_name.with_function(mask.function.unwrap());
                for (queries, keys) in [(33, 33), (12, 40), (40, 12)] {
                    let problem = Problem { query_length: queries, ..Problem::new(2, 3, keys, 64) };
                    let problem = problem.with_mask(mask);
                    let mut pairs = 0;
                    for (head, query) in (0..3).flat_map(|it| (0..queries).map(move |q| (it, q))) {
                        let here = Here {
                            batch: 0,
                            head,
                            query: query as i32,
                            query_length: queries as i32,
                            key_length: keys as i32,
                        };
                        let mut row = problem.row_functions(&[], here);
                        let visible = mask.visible_keys(query, queries, keys);
                        pairs += 2 * visible.filter(|key| row.sees(*key)).count();
                    }
                    assert_eq!(problem.visible_pairs(), pairs as u128, "{problem}");
                }
            }
        }
        // The contents of captured tensors are unknown: every pair counts.
        let loads = Mask::from_fn("loads", |at| at.truths("seen").load([at.query(), at.key()]));
        assert_eq!(Problem::new(1, 1, 20, 8).with_mask(loads).visible_pairs(), 400);
        // A pattern too fine to search is estimated.
        let dotted = Mask::from_fn("dotted", |at| ((at.query() * 7 + at.key()) % 2).eq(0));
        let problem = Problem::new(1, 1, 20_000, 8).with_mask(dotted);
        assert!((1.5e8..2.5e8).contains(&(problem.visible_pairs() as f64)));
    }

    #[test]
    fn functions_travel_in_texts() {
        let mask = Mask::from_fn("near", |at| (at.query() - at.key()).abs().le(3));
        let scores = Scores::from_fn("half", |score, _| 0.5 * score);
        let problem = Problem::new(1, 2, 16, 64).with_mask(mask).with_scores(scores);
        let text = "b=1,h=2,s=16,d=64,f16,mask=(mask near (le (abs (sub query key)) 3)),\
                    score=(score half (mul 0.5 score))";
        assert_eq!(problem.text(), text);
        assert_eq!(text.parse::<Problem>().unwrap(), problem);
        let json = serde_json::to_value(&problem).unwrap();
        assert_eq!(json["mask"]["function"], "(mask near (le (abs (sub query key)) 3))");
        let refusal = "mask=(score half (mul 0.5 score))".parse::<Problem>().unwrap_err();
        assert!(refusal.to_string().starts_with("half is no mask"), "{refusal}");
    }
}
