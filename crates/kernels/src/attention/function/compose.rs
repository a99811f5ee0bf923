//! Composition of functions: conjunction and disjunction of masks, and chains of scores. Tensors of
//! the same name are the same tensor.

use super::Function;
use super::node::{Binary, Id, Kind, Node, Symbol};
use super::trace::declare;

impl Function {
    /// Returns a mask that sees what both masks see. An error names a tensor that the two declare
    /// differently, or the function that is not a mask.
    pub fn and(self, other: Function) -> Result<Function, String> {
        self.joined(other, Kind::Mask, "and")
    }

    /// Returns a mask that sees what at least one of the masks sees.
    pub fn or(self, other: Function) -> Result<Function, String> {
        self.joined(other, Kind::Mask, "or")
    }

    /// Returns a score function that applies this function, then the other.
    ///
    /// ```
    /// use flashcore_kernels::attention::function::Function;
    ///
    /// let doubled = Function::score("doubled", |score, _| 2.0 * score);
    /// let moved = Function::score("moved", |score, at| score + at.key().to_f32());
    /// assert_eq!(
    ///     doubled.then(moved)?.text(),
    ///     "(score doubled-then-moved (add (mul 2.0 score) (f32 key)))"
    /// );
    /// # Ok::<(), String>(())
    /// ```
    pub fn then(self, other: Function) -> Result<Function, String> {
        self.joined(other, Kind::Score, "then")
    }

    fn joined(self, other: Function, kind: Kind, how: &str) -> Result<Function, String> {
        for function in [self, other] {
            if function.kind() != kind {
                return Err(format!("{} is no {}", function.name(), kind.name()));
            }
        }
        let (first, second) = (self.body(), other.body());
        let mut tensors = first.tensors.clone();
        let numbers: Vec<u32> = (second.tensors.iter())
            .map(|spec| declare(&mut tensors, spec.clone()))
            .collect::<Result<_, _>>()?;
        let mut nodes = first.nodes.clone();
        let mut moved: Vec<Id> = Vec::new();
        for node in &second.nodes {
            if *node == Node::Symbol(Symbol::Score) {
                // The second function's score is the first one's result.
                moved.push(first.root);
                continue;
            }
            let node = match node.map(|id| moved[id as usize]) {
                Node::Load(tensor, indices) => Node::Load(numbers[tensor as usize], indices),
                node => node,
            };
            nodes.push(node);
            moved.push(nodes.len() as Id - 1);
        }
        let mut root = moved[second.root as usize];
        if kind == Kind::Mask {
            let operation = if how == "and" { Binary::And } else { Binary::Or };
            nodes.push(Node::Binary(operation, first.root, root));
            root = nodes.len() as Id - 1;
        }
        let name = format!("{}-{how}-{}", first.name, second.name);
        let name = name.chars().take(64).collect();
        Ok(Function::intern(kind, name, tensors, &nodes, root))
    }
}

#[cfg(test)]
mod tests {
    use super::super::rules;
    use super::*;

    #[test]
    fn tensors_of_one_name_are_one() {
        let both = rules::documents().and(rules::documents_by_starts()).unwrap();
        let names: Vec<&str> = both.tensors().iter().map(|it| it.name.as_str()).collect();
        assert_eq!(names, ["ids", "starts"]);
        assert_eq!(rules::documents().or(rules::documents()).unwrap().tensors().len(), 1);
        let other = Function::mask("other", |at| at.integers("ids").load([at.key()]).gt(0));
        let refusal = rules::documents().and(other).unwrap_err();
        assert_eq!(refusal, "there are two different tensors ids");
        assert_eq!(rules::alibi().and(other).unwrap_err(), "alibi is no mask");
        assert_eq!(both.text().parse::<Function>().unwrap(), both);
    }
}
