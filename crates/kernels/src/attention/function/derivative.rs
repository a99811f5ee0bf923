//! The derivative (slope) of a score function with respect to the score, by the chain rule on its
//! nodes.
//!
//! Where a node has no derivative, PyTorch's is taken: half of each operand's for `min` and `max`
//! of equal operands, zero for `abs` at zero, and that of the chosen value for `select`. Integers,
//! comparisons and loads do not depend on the score.

use std::f32::consts::LN_2;

use super::Function;
use super::node::{self, Binary, Comparison, Constant, Id, Kind, Node, Symbol, Type, Unary};

/// The nodes of a function, to which those of derivatives are added.
struct Derivatives {
    nodes: Vec<Node>,
}

impl Function {
    /// Returns the derivative of a score function by the score, as a function of the same inputs.
    ///
    /// ```
    /// use flashcore_kernels::attention::function::Function;
    ///
    /// let biased = Function::score("biased", |score, at| 2.0 * score + at.key().to_f32());
    /// assert_eq!(biased.slope().text(), "(score biased.slope 2.0)");
    /// let capped = Function::score("capped", |score, _| (score / 4.0).tanh() * 4.0);
    /// assert_eq!(
    ///     capped.slope().text(),
    ///     "(score capped.slope (let $0 (tanh (div score 4.0))) (sub 1.0 (mul $0 $0)))"
    /// );
    /// ```
    pub fn slope(&self) -> Function {
        let (nodes, [_, slope]) = self.with_derivative();
        let name: String = self.body().name.chars().take(58).collect();
        let tensors = self.body().tensors.clone();
        Function::intern(Kind::Score, format!("{name}.slope"), tensors, &nodes, slope)
    }

    /// Returns whether the slope is one everywhere, as where other terms are only added to the
    /// score.
    pub fn has_slope_one(&self) -> bool {
        let (nodes, [_, slope]) = self.with_derivative();
        nodes[slope as usize] == ONE
    }

    /// Returns the nodes of result and slope together, which share much, and the roots of both.
    pub(super) fn with_derivative(&self) -> (Vec<Node>, [Id; 2]) {
        let body = self.body();
        let mut derivatives = Derivatives { nodes: body.nodes.clone() };
        let mut found: Vec<Option<Id>> = Vec::new();
        for (id, ty) in body.types.iter().enumerate() {
            let slope = match ty {
                Type::F32 => derivatives.of(id as Id, &found),
                _ => None,
            };
            found.push(slope);
        }
        let slope = found[body.root as usize];
        let slope = slope.unwrap_or_else(|| derivatives.push(constant(0.0)));
        let (nodes, roots) = node::canonical(&derivatives.nodes, &[body.root, slope]);
        (nodes, [roots[0], roots[1]])
    }
}

const ONE: Node = constant(1.0);

const fn constant(value: f32) -> Node {
    Node::Constant(Constant::F32(value.to_bits()))
}

impl Derivatives {
    /// Returns the slope of a node from those of its operands; `None` where it is zero.
    fn of(&mut self, id: Id, found: &[Option<Id>]) -> Option<Id> {
        let slope = |id: Id| found[id as usize];
        match self.nodes[id as usize].clone() {
            Node::Symbol(Symbol::Score) => Some(self.push(ONE)),
            Node::Unary(operation, a) => {
                let inner = slope(a)?;
                Some(match operation {
                    Unary::Negate => self.negate(inner),
                    Unary::Absolute => {
                        let zero = self.push(constant(0.0));
                        let negative = self.negate(inner);
                        let below = self.choose(Comparison::Less, [a, zero], negative, zero);
                        self.choose(Comparison::Greater, [a, zero], inner, below)
                    }
                    Unary::Tanh => {
                        let [one, square] = [ONE, Node::Binary(Binary::Multiply, id, id)]
                            .map(|node| self.push(node));
                        let own = self.push(Node::Binary(Binary::Subtract, one, square));
                        self.multiply(own, inner)
                    }
                    Unary::Exp2 => {
                        let factor = self.push(constant(LN_2));
                        let own = self.multiply(id, factor);
                        self.multiply(own, inner)
                    }
                    Unary::Log2 => {
                        let factor = self.push(constant(LN_2));
                        let below = self.multiply(a, factor);
                        self.divide(inner, below)
                    }
                    Unary::Not | Unary::ToFloat | Unary::ToInteger => return None,
                })
            }
            Node::Binary(operation, a, b) => match operation {
                Binary::Add => self.add(slope(a), slope(b)),
                Binary::Subtract => {
                    let second = slope(b).map(|it| self.negate(it));
                    self.add(slope(a), second)
                }
                Binary::Multiply => {
                    let first = slope(a).map(|it| self.multiply(it, b));
                    let second = slope(b).map(|it| self.multiply(it, a));
                    self.add(first, second)
                }
                Binary::Divide => {
                    let first = slope(a).map(|it| self.divide(it, b));
                    let second = slope(b).map(|it| {
                        let share = self.divide(it, b);
                        let change = self.multiply(share, id);
                        self.negate(change)
                    });
                    self.add(first, second)
                }
                Binary::Minimum => self.extreme(Comparison::Less, [a, b], [slope(a), slope(b)]),
                Binary::Maximum => self.extreme(Comparison::Greater, [a, b], [slope(a), slope(b)]),
                _ => None,
            },
            Node::Select(condition, a, b) => {
                if (slope(a), slope(b)) == (None, None) {
                    return None;
                }
                let [yes, no] = [slope(a), slope(b)].map(|it| self.whole(it));
                Some(self.select(condition, yes, no))
            }
            Node::Symbol(_) | Node::Constant(_) | Node::Compare(..) | Node::Load(..) => None,
        }
    }

    fn push(&mut self, node: Node) -> Id {
        self.nodes.push(node);
        self.nodes.len() as Id - 1
    }

    /// Returns the value of a constant node.
    fn number(&self, id: Id) -> Option<f32> {
        match self.nodes[id as usize] {
            Node::Constant(Constant::F32(bits)) => Some(f32::from_bits(bits)),
            _ => None,
        }
    }

    /// Returns a slope as a node, where `None` is zero.
    fn whole(&mut self, slope: Option<Id>) -> Id {
        slope.unwrap_or_else(|| self.push(constant(0.0)))
    }

    fn add(&mut self, a: Option<Id>, b: Option<Id>) -> Option<Id> {
        match (a, b) {
            (Some(a), Some(b)) => match (self.number(a), self.number(b)) {
                (Some(a), Some(b)) => Some(self.push(constant(a + b))),
                _ => Some(self.push(Node::Binary(Binary::Add, a, b))),
            },
            (a, b) => a.or(b),
        }
    }

    fn negate(&mut self, a: Id) -> Id {
        match (self.number(a), self.nodes[a as usize].clone()) {
            (Some(number), _) => self.push(constant(-number)),
            (None, Node::Unary(Unary::Negate, inner)) => inner,
            (None, _) => self.push(Node::Unary(Unary::Negate, a)),
        }
    }

    fn multiply(&mut self, a: Id, b: Id) -> Id {
        match (self.number(a), self.number(b)) {
            (Some(a), Some(b)) => self.push(constant(a * b)),
            (Some(1.0), None) => b,
            (None, Some(1.0)) => a,
            (Some(_), None) => self.multiply(b, a),
            (None, Some(factor)) => match self.nodes[a as usize] {
                // Folds two constant factors into one.
                Node::Binary(Binary::Multiply, inner, other) if self.number(other).is_some() => {
                    let both = factor * self.number(other).unwrap_or(1.0);
                    let both = self.push(constant(both));
                    self.multiply(inner, both)
                }
                _ => self.push(Node::Binary(Binary::Multiply, a, b)),
            },
            (None, None) => self.push(Node::Binary(Binary::Multiply, a, b)),
        }
    }

    fn divide(&mut self, a: Id, b: Id) -> Id {
        match self.number(b) {
            Some(number) if number != 0.0 => {
                let inverse = self.push(constant(1.0 / number));
                self.multiply(a, inverse)
            }
            _ => self.push(Node::Binary(Binary::Divide, a, b)),
        }
    }

    fn select(&mut self, condition: Id, yes: Id, no: Id) -> Id {
        match self.nodes[yes as usize] == self.nodes[no as usize] {
            true => yes,
            false => self.push(Node::Select(condition, yes, no)),
        }
    }

    fn choose(&mut self, comparison: Comparison, [a, b]: [Id; 2], yes: Id, no: Id) -> Id {
        let condition = self.push(Node::Compare(comparison, a, b));
        self.select(condition, yes, no)
    }

    /// Returns the slope of a minimum or maximum: that of the operand that is taken, and half of
    /// each where they are equal.
    fn extreme(
        &mut self,
        beyond: Comparison,
        [a, b]: [Id; 2],
        slopes: [Option<Id>; 2],
    ) -> Option<Id> {
        let sum = self.add(slopes[0], slopes[1])?;
        let half = self.push(constant(0.5));
        let half = self.multiply(sum, half);
        let [first, second] = slopes.map(|it| self.whole(it));
        let no = self.choose(beyond, [b, a], second, half);
        Some(self.choose(beyond, [a, b], first, no))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Here, HostTensor, Row};
    use super::*;

    const HERE: Here = Here { batch: 0, head: 1, query: 5, query_length: 8, key_length: 10 };

    fn parsed(body: &str) -> Function {
        let text = format!("(score it (tensor bias f32 1) {body})");
        text.parse().unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// Compares slopes with finite differences of the function.
    #[test]
    fn slopes_are_what_differences_say() {
        let bias = [HostTensor::floats("bias", &[0.5, -1.0, 2.0], &[3])];
        for body in [
            "score",
            "(mul 0.3 score)",
            "(neg (sub (load bias key) score))",
            "(mul 30.0 (tanh (div score 30.0)))",
            "(add (mul score score) (div 2.0 (add (abs score) 1.0)))",
            "(exp2 (mul score (load bias key)))",
            "(log2 (add (mul score score) 0.5))",
            "(min (max score -1.0) (mul 2.0 (load bias key)))",
            "(select (gt score 0.0) (mul 2.0 score) (mul 0.1 score))",
            "(div (tanh score) (add 2.0 (tanh (neg score))))",
            "(f32 (i32 score))",
            "(load bias key)",
        ] {
            let function = parsed(body);
            let slope = function.slope();
            let [mut value, mut change] =
                [function, slope].map(|function| Row::new(function, &bias, HERE));
            for key in 0..4 {
                for score in [-2.3, -0.7, 0.4, 1.1, 2.6] {
                    let step = 1e-6;
                    let difference =
                        value.score(key, score + step) - value.score(key, score - step);
                    let expected = difference / (2.0 * step);
                    let found = change.score(key, score);
                    assert!((found - expected).abs() < 1e-5, "{slope}: {found}, not {expected}");
                }
            }
        }
    }

    #[test]
    fn where_there_is_no_slope_it_is_that_of_pytorch() {
        let slope = |body: &str, score: f64| {
            let bias = [HostTensor::floats("bias", &[0.0], &[1])];
            Row::new(parsed(body).slope(), &bias, HERE).score(0, score)
        };
        assert_eq!(slope("(abs score)", 0.0), 0.0);
        assert_eq!(slope("(max score 1.0)", 1.0), 0.5);
        assert_eq!(slope("(min (mul 3.0 score) (neg score))", 0.0), 1.0);
        assert_eq!(slope("(select (gt score 0.0) score 0.0)", 0.0), 0.0);
    }

    #[test]
    fn sums_have_a_slope_of_one() {
        assert!(parsed("(add score (load bias key))").has_slope_one());
        assert!(parsed("(sub score (mul 0.5 (f32 (abs (sub query key)))))").has_slope_one());
        assert!(parsed("(select (lt key 3) score (add score 1.0))").has_slope_one());
        assert!(!parsed("(mul 2.0 score)").has_slope_one());
        assert!(!parsed("(tanh score)").has_slope_one());
        assert_eq!(
            parsed("(load bias key)").slope().text(),
            "(score it.slope (tensor bias f32 1) 0.0)"
        );
    }
}
