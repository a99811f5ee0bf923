//! Masks and scores as functions, and the tensors that they load from.

use kernels::attention::function::{Function, Here, HostTensor, Kind, Row, TensorSpec};
use serde::{Serialize, Serializer};

use super::Problem;

/// A function in JSON is its text.
pub(super) fn as_text<S: Serializer>(
    function: &Option<Function>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    function.map(|function| function.text()).serialize(serializer)
}

impl Problem {
    /// The functions that there are, mask first.
    pub fn functions(&self) -> impl Iterator<Item = Function> + use<> {
        self.mask.function.into_iter().chain(self.scores.function)
    }

    /// The tensors that functions load from, each once.
    pub fn captured(&self) -> Vec<&'static TensorSpec> {
        let mut all: Vec<&TensorSpec> = Vec::new();
        for spec in self.functions().flat_map(|function| function.tensors()) {
            if !all.iter().any(|it| it.name == spec.name) {
                all.push(spec);
            }
        }
        all
    }

    /// Refuses a function in the place of the other kind, and tensors that cannot be told apart.
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

    /// The functions of a row, over tensors in host memory that were validated.
    pub fn row_functions<'a>(&self, tensors: &'a [HostTensor], here: Here) -> RowFunctions<'a> {
        let row = |function| Row::new(function, tensors, here);
        RowFunctions { mask: self.mask.function.map(row), score: self.scores.function.map(row) }
    }
}

/// The functions of one row.
#[derive(Debug, Clone)]
pub struct RowFunctions<'a> {
    mask: Option<Row<'a>>,
    score: Option<Row<'a>>,
}

impl RowFunctions<'_> {
    /// Whether the row sees a key, as far as the mask function says.
    pub fn sees(&mut self, key: usize) -> bool {
        self.mask.as_mut().is_none_or(|row| row.sees(key))
    }

    /// What a score becomes, which everything else has changed already.
    pub fn score(&mut self, key: usize, score: f64) -> f64 {
        self.score.as_mut().map_or(score, |row| row.score(key, score))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{Mask, Scores};

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
