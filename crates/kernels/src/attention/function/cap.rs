//! Recognises caps in score functions: `cap * tanh(score / cap)`, however it is written.
//!
//! The rule by name ([`Rules`](crate::attention::Rules)) is faster: the scale is folded into it, and
//! scores well below the cap take a polynomial.

use super::Function;
use super::node::{Binary, Constant, Id, Kind, Node, Symbol, Unary};

/// The cap of scores, and the rest of a score function.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capped {
    /// The cap: scores `s` become `cap * tanh(s / cap)` first.
    pub cap: f32,
    /// The function that is applied to capped scores; `None` where there is nothing else.
    pub rest: Option<Function>,
}

impl Function {
    /// Takes the cap out of a score function whose every use of the score is through it.
    ///
    /// ```
    /// use flashcore_kernels::attention::function::Function;
    ///
    /// let capped = Function::score("capped", |score, _| 30.0 * (score / 30.0).tanh());
    /// let found = capped.capped().unwrap();
    /// assert_eq!((found.cap, found.rest), (30.0, None));
    /// let moved = capped.then(Function::score("moved", |score, at| score + at.key().to_f32()))?;
    /// let rest = moved.capped().unwrap().rest.unwrap();
    /// assert_eq!(rest.text(), "(score capped-then-moved (add score (f32 key)))");
    /// # Ok::<(), String>(())
    /// ```
    pub fn capped(&self) -> Option<Capped> {
        let body = self.body();
        if body.kind != Kind::Score {
            return None;
        }
        let cap_of = |id: &Id| self.cap(*id).map(|cap| (*id, cap));
        let (id, cap) = (0..body.nodes.len() as Id).find_map(|id| cap_of(&id))?;
        // Replaces the capped score by the score itself.
        let mut nodes = body.nodes.clone();
        nodes[id as usize] = Node::Symbol(Symbol::Score);
        let is_score = |id: Id| nodes[id as usize] == Node::Symbol(Symbol::Score);
        if is_score(body.root) && body.tensors.is_empty() {
            return Some(Capped { cap, rest: None });
        }
        // Any other use of the original score would now read the capped one.
        let mut open = vec![body.root];
        let mut seen = vec![false; nodes.len()];
        while let Some(it) = open.pop() {
            if it != id && is_score(it) {
                return None;
            }
            if !std::mem::replace(&mut seen[it as usize], true) {
                open.extend(nodes[it as usize].inputs());
            }
        }
        let (name, tensors) = (body.name.clone(), body.tensors.clone());
        let rest = Function::intern(Kind::Score, name, tensors, &nodes, body.root);
        Some(Capped { cap, rest: Some(rest) })
    }

    /// Returns the cap, where a node is the capped score.
    fn cap(&self, id: Id) -> Option<f32> {
        let nodes = &self.body().nodes;
        let constant = |id: Id| match nodes[id as usize] {
            Node::Constant(Constant::F32(bits)) => Some(f32::from_bits(bits)),
            _ => None,
        };
        let is_score = |id: Id| nodes[id as usize] == Node::Symbol(Symbol::Score);
        // Matches a product with a constant on either side.
        let product = |id: Id| match nodes[id as usize] {
            Node::Binary(Binary::Multiply, a, b) => match (constant(a), constant(b)) {
                (Some(factor), _) => Some((factor, b)),
                (None, Some(factor)) => Some((factor, a)),
                _ => None,
            },
            _ => None,
        };
        let (cap, tanh) = product(id)?;
        let Node::Unary(Unary::Tanh, inner) = nodes[tanh as usize] else { return None };
        let matches = match nodes[inner as usize] {
            Node::Binary(Binary::Divide, a, b) => is_score(a) && constant(b) == Some(cap),
            _ => product(inner).is_some_and(|(factor, of)| {
                is_score(of) && (factor * cap - 1.0).abs() <= 2.0 * f32::EPSILON
            }),
        };
        (matches && cap.is_finite() && cap > 0.0).then_some(cap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Option<(f32, Option<&'static str>)> {
        let found = text.parse::<Function>().unwrap().capped()?;
        Some((found.cap, found.rest.map(|rest| rest.text())))
    }

    #[test]
    fn caps_are_found_however_they_are_written() {
        assert_eq!(found("(score a (mul (tanh (div score 5.0)) 5.0))"), Some((5.0, None)));
        assert_eq!(found("(score a (mul 4.0 (tanh (mul 0.25 score))))"), Some((4.0, None)));
        let text = "(score a (tensor t f32 1) (sub (mul 3.0 (tanh (div score 3.0))) (load t key)))";
        let rest = "(score a (tensor t f32 1) (sub score (load t key)))";
        assert_eq!(found(text), Some((3.0, Some(rest))));
    }

    #[test]
    fn what_is_no_cap_stays_a_function() {
        for text in [
            "(score a (mul 5.0 (tanh (div score 4.0))))",
            "(score a (mul -5.0 (tanh (div score -5.0))))",
            "(score a (mul 5.0 (tanh (div 5.0 score))))",
            "(score a (tanh score))",
            "(score a (add score (mul 5.0 (tanh (div score 5.0)))))",
            "(score a (mul 5.0 (tanh (div (add score 1.0) 5.0))))",
            "(mask a true)",
        ] {
            assert_eq!(found(text), None, "{text}");
        }
    }
}
