//! Rewrites score functions that only add something, so that they take scores before their scale.
//!
//! Functions are defined on scaled scores. One that only adds a term to them can add the term
//! divided by the scale to the unscaled score instead. The softmax then folds the scale into its
//! exponents, as it does without a function, and the division is done once, in a factor that is the
//! same for a whole tile, where the term has one.

use super::Function;
use super::node::{Binary, Constant, Id, Kind, Node, Symbol};

/// The most nested sums that are searched: a function may be deep.
const MOST_DEPTH: u32 = 16;

/// The nodes of a function over unscaled scores.
pub(super) struct Unscaled {
    pub(super) nodes: Vec<Node>,
    pub(super) root: Id,
    /// The node that stands for the reciprocal of the scale.
    pub(super) inverse: Id,
}

/// The state of the rewriting.
struct Rewriting {
    nodes: Vec<Node>,
    /// For each node of the function: whether it depends on the score, and whether it depends on
    /// none of query, key and score.
    of_score: Vec<bool>,
    fixed: Vec<bool>,
    inverse: Id,
}

impl Function {
    /// Returns whether the function only adds to the score, so that it can take scores before their
    /// scale.
    pub(crate) fn takes_unscaled(&self) -> bool {
        self.unscaled().is_some()
    }

    /// Returns the same function over scores before their scale, if it only adds to them.
    pub(super) fn unscaled(&self) -> Option<Unscaled> {
        let body = self.body();
        if body.kind != Kind::Score {
            return None;
        }
        let mut nodes = body.nodes.clone();
        let (mut of_score, mut fixed) = (Vec::new(), Vec::new());
        for node in &nodes {
            let inputs = node.inputs();
            let score = *node == Node::Symbol(Symbol::Score);
            let place = matches!(node, Node::Symbol(Symbol::Query | Symbol::Key));
            of_score.push(score || inputs.iter().any(|it| of_score[*it as usize]));
            fixed.push(!score && !place && inputs.iter().all(|it| fixed[*it as usize]));
        }
        // A placeholder: its value is never used.
        nodes.push(Node::Constant(Constant::F32(1f32.to_bits())));
        let inverse = nodes.len() as Id - 1;
        let mut rewriting = Rewriting { nodes, of_score, fixed, inverse };
        let root = rewriting.sum(body.root, MOST_DEPTH)?;
        Some(Unscaled { nodes: rewriting.nodes, root, inverse })
    }
}

impl Rewriting {
    fn push(&mut self, node: Node) -> Id {
        self.nodes.push(node);
        self.nodes.len() as Id - 1
    }

    /// Rewrites a sum of the score and other terms; returns `None` for anything else.
    fn sum(&mut self, id: Id, depth: u32) -> Option<Id> {
        let depth = depth.checked_sub(1)?;
        match self.nodes[id as usize] {
            Node::Symbol(Symbol::Score) => Some(id),
            Node::Binary(operation @ (Binary::Add | Binary::Subtract), a, b) => {
                let [in_a, in_b] = [a, b].map(|it| self.of_score[it as usize]);
                let (a, b) = match (in_a, in_b, operation) {
                    (true, false, _) => (self.sum(a, depth)?, self.divided(b)),
                    (false, true, Binary::Add) => (self.divided(a), self.sum(b, depth)?),
                    _ => return None,
                };
                Some(self.push(Node::Binary(operation, a, b)))
            }
            _ => None,
        }
    }

    /// Divides a term that does not depend on the score by the scale. Of a product, the factor that
    /// is the same for a whole tile is divided.
    fn divided(&mut self, id: Id) -> Id {
        let fixed = |it: Id| self.fixed[it as usize];
        match self.nodes[id as usize] {
            Node::Binary(Binary::Multiply, a, b) if !fixed(id) && (fixed(a) || fixed(b)) => {
                let (a, b) = if fixed(a) { (a, b) } else { (b, a) };
                let a = self.push(Node::Binary(Binary::Multiply, a, self.inverse));
                self.push(Node::Binary(Binary::Multiply, a, b))
            }
            _ => self.push(Node::Binary(Binary::Multiply, id, self.inverse)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the text of the rewritten function, with a constant for the reciprocal of the scale.
    fn unscaled(text: &str) -> Option<String> {
        let function: Function = text.parse().unwrap();
        let Unscaled { mut nodes, root, inverse } = function.unscaled()?;
        nodes[inverse as usize] = Node::Constant(Constant::F32(8f32.to_bits()));
        let tensors = function.body().tensors.clone();
        Some(Function::intern(Kind::Score, "a".to_owned(), tensors, &nodes, root).text().to_owned())
    }

    #[test]
    fn what_is_added_is_divided_by_the_scale() {
        let slopes = "(tensor slopes f32 1)";
        assert_eq!(
            unscaled(&format!(
                "(score a {slopes} (sub score (mul (load slopes head) (f32 (sub query key)))))"
            )),
            Some(format!(
                "(score a {slopes} (sub score (mul (mul (load slopes head) 8.0) (f32 (sub query \
                 key)))))"
            ))
        );
        let bias = "(tensor bias f32 2)";
        assert_eq!(
            unscaled(&format!(
                "(score a {bias} (add (neg (load bias query key)) (add score 2.0)))"
            )),
            Some(format!(
                "(score a {bias} (add (mul (neg (load bias query key)) 8.0) (add score (mul 2.0 \
                 8.0))))"
            ))
        );
    }

    #[test]
    fn others_take_scaled_scores() {
        for text in [
            "(score a (mul 2.0 score))",
            "(score a (sub 1.0 score))",
            "(score a (add score score))",
            "(score a (add score (tanh score)))",
            "(score a (select (gt score 1.0) score 0.0))",
        ] {
            assert_eq!(unscaled(text), None, "{text}");
        }
    }
}
