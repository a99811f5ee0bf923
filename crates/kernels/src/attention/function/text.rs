//! Functions as text: nested lists, as in Lisp.
//!
//! ```text
//! (mask NAME
//!   (tensor NAME f32|f16|bf16|i32|i64|u8|bool DIMENSIONS) ...
//!   (let $0 EXPRESSION) ...
//!   EXPRESSION)
//! ```
//!
//! An expression is a symbol (`batch`, `head`, `query`, `key`, `query_length`, `key_length`, and in
//! score functions `score`), a constant (floats with a point or an exponent, integers without,
//! `true`, `false`), a name that a `let` has defined, or an operation in brackets with its
//! operands. What is used more than once has a name, so that the text is not longer than the
//! function.

use std::collections::HashMap;
use std::fmt::Write;
use std::str::FromStr;

use super::Function;
use super::node::{
    self, Binary, Comparison, Constant, Id, Kind, Node, Stored, Symbol, TensorSpec, Type, Unary,
};
use super::trace::declare;

/// The reason why a text is not a [`Function`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no function: {0}; one is written like (mask causal (ge query key))")]
pub struct FunctionTextError(String);

/// Returns whether a text may be the name of a function or a tensor.
pub(super) fn is_word(text: &str) -> bool {
    let letter = |it: char| it.is_ascii_alphanumeric() || "_-.".contains(it);
    !text.is_empty() && text.len() <= 64 && text.chars().all(letter)
}

/// Returns the text of nodes, which must be in canonical order.
pub(super) fn print(
    kind: Kind,
    name: &str,
    tensors: &[TensorSpec],
    nodes: &[Node],
    root: Id,
) -> String {
    let mut text = format!("({} {name}", kind.name());
    for TensorSpec { name, stored, rank } in tensors {
        write!(text, " (tensor {name} {} {rank})", stored.name()).expect("a string takes it");
    }
    let mut uses = vec![0; nodes.len()];
    for input in nodes.iter().flat_map(Node::inputs) {
        uses[input as usize] += 1;
    }
    let mut printed: Vec<String> = Vec::new();
    let mut names = 0;
    for (node, uses) in nodes.iter().zip(uses) {
        let leaf = matches!(node, Node::Symbol(_) | Node::Constant(_));
        let expression = print_node(tensors, node, |id| printed[id as usize].clone());
        // Names also bound the nesting, which the parser follows by recursion.
        if !leaf && (uses > 1 || expression.len() > LONGEST) {
            write!(text, " (let ${names} {expression})").expect("a string takes it");
            printed.push(format!("${names}"));
            names += 1;
        } else {
            printed.push(expression);
        }
    }
    write!(text, " {})", printed[root as usize]).expect("a string takes it");
    text
}

/// Expressions with more characters get a name.
const LONGEST: usize = 200;

/// Returns the text of one expression.
pub(super) fn expression(tensors: &[TensorSpec], nodes: &[Node], id: Id) -> String {
    let (nodes, roots) = node::canonical(nodes, &[id]);
    let text = print(Kind::Mask, "", tensors, &nodes, roots[0]);
    text.trim_start_matches("(mask ").trim().to_owned()
}

fn print_node(tensors: &[TensorSpec], node: &Node, of: impl Fn(Id) -> String) -> String {
    match node {
        Node::Symbol(symbol) => symbol.name().to_owned(),
        Node::Constant(Constant::F32(bits)) => format!("{:?}", f32::from_bits(*bits)),
        Node::Constant(Constant::I32(value)) => value.to_string(),
        Node::Constant(Constant::Bool(value)) => value.to_string(),
        Node::Unary(operation, a) => format!("({} {})", operation.name(), of(*a)),
        Node::Binary(operation, a, b) => format!("({} {} {})", operation.name(), of(*a), of(*b)),
        Node::Compare(comparison, a, b) => {
            format!("({} {} {})", comparison.name(), of(*a), of(*b))
        }
        Node::Select(a, b, c) => format!("(select {} {} {})", of(*a), of(*b), of(*c)),
        Node::Load(tensor, indices) => {
            let indices: Vec<String> = indices.iter().map(|id| of(*id)).collect();
            format!("(load {} {})", tensors[*tensor as usize].name, indices.join(" "))
        }
    }
}

impl FromStr for Function {
    type Err = FunctionTextError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Reader::new(text).function().map_err(FunctionTextError)
    }
}

/// The state of the parser.
struct Reader<'a> {
    words: Vec<&'a str>,
    /// Number of words that have been read.
    read: usize,
    tensors: Vec<TensorSpec>,
    nodes: Vec<Node>,
    types: Vec<Type>,
    names: HashMap<&'a str, Id>,
    kind: Kind,
}

/// The deepest nesting of expressions, since the parser is recursive.
const DEEPEST: usize = 200;

impl<'a> Reader<'a> {
    fn new(text: &'a str) -> Self {
        let mut words = Vec::new();
        let mut rest = text.trim_start();
        while let Some(first) = rest.chars().next() {
            let end = match first {
                '(' | ')' => 1,
                _ => rest
                    .find(|it: char| it.is_whitespace() || it == '(' || it == ')')
                    .unwrap_or(rest.len()),
            };
            words.push(&rest[..end]);
            rest = rest[end..].trim_start();
        }
        Reader {
            words,
            read: 0,
            tensors: Vec::new(),
            nodes: Vec::new(),
            types: Vec::new(),
            names: HashMap::new(),
            kind: Kind::Mask,
        }
    }

    /// Returns the word `distance` after the next, without reading it.
    fn ahead(&self, distance: usize) -> Option<&'a str> {
        self.words.get(self.read + distance).copied()
    }

    fn word(&mut self) -> Result<&'a str, String> {
        let word = self.ahead(0).ok_or_else(|| "it ends too early".to_owned());
        self.read += 1;
        word
    }

    fn expect(&mut self, expected: &str) -> Result<(), String> {
        match self.word()? {
            word if word == expected => Ok(()),
            word => Err(format!("`{word}` stands where `{expected}` must")),
        }
    }

    fn name(&mut self) -> Result<&'a str, String> {
        let word = self.word()?;
        if is_word(word) { Ok(word) } else { Err(format!("`{word}` is no name")) }
    }

    fn function(&mut self) -> Result<Function, String> {
        self.expect("(")?;
        let kind = self.word()?;
        self.kind = (Kind::ALL.into_iter().find(|it| it.name() == kind))
            .ok_or_else(|| format!("`{kind}` is neither a mask nor a score"))?;
        let name = self.name()?.to_owned();
        let root = loop {
            match self.definition()? {
                Some(root) => break root,
                None => continue,
            }
        };
        self.expect(")")?;
        if let Some(word) = self.ahead(0) {
            return Err(format!("`{word}` comes after its end"));
        }
        let (given, expected) = (self.types[root as usize], self.kind.result());
        if given != expected {
            return Err(format!("a {} is {expected}, not {given}", self.kind.name()));
        }
        let tensors = std::mem::take(&mut self.tensors);
        Ok(Function::intern(self.kind, name, tensors, &self.nodes, root))
    }

    /// Reads a tensor or a `let`, which give `None`, or finally the result.
    fn definition(&mut self) -> Result<Option<Id>, String> {
        match (self.ahead(0), self.ahead(1)) {
            (Some("("), Some("tensor")) => {
                self.read += 2;
                let name = self.name()?.to_owned();
                let stored = self.word()?;
                let stored = (Stored::ALL.into_iter().find(|it| it.name() == stored))
                    .ok_or_else(|| format!("`{stored}` is nothing that a tensor is made of"))?;
                let rank = self.word()?;
                let rank = rank.parse().map_err(|_| format!("`{rank}` is no number"))?;
                let count = self.tensors.len();
                let number = declare(&mut self.tensors, TensorSpec { name, stored, rank })?;
                if (number as usize) < count {
                    return Err(format!("there are two tensors {}", self.tensors[count - 1].name));
                }
                self.expect(")").map(|()| None)
            }
            (Some("("), Some("let")) => {
                self.read += 2;
                let name = self.word()?;
                if !name.starts_with('$') {
                    return Err(format!("the name `{name}` does not begin with a $"));
                }
                let id = self.expression(0)?;
                self.names.insert(name, id);
                self.expect(")").map(|()| None)
            }
            _ => self.expression(0).map(Some),
        }
    }

    fn push(&mut self, node: Node) -> Result<Id, String> {
        let ty = node.ty(&self.tensors, |id| self.types[id as usize])?;
        self.nodes.push(node);
        self.types.push(ty);
        Ok(self.nodes.len() as Id - 1)
    }

    fn expression(&mut self, depth: usize) -> Result<Id, String> {
        if depth == DEEPEST {
            return Err(format!("more than {DEEPEST} operations inside one another"));
        }
        let word = self.word()?;
        if word != "(" {
            return self.leaf(word);
        }
        let operation = self.word()?;
        let id = if operation == "load" {
            let name = self.word()?;
            let tensor = (self.tensors.iter().position(|it| it.name == name))
                .ok_or_else(|| format!("there is no tensor {name}"))?;
            let mut indices = Vec::new();
            while self.ahead(0) != Some(")") {
                indices.push(self.expression(depth + 1)?);
            }
            self.push(Node::Load(tensor as u32, indices))?
        } else {
            let mut operands = Vec::new();
            while self.ahead(0) != Some(")") {
                operands.push(self.expression(depth + 1)?);
            }
            self.operation(operation, &operands)?
        };
        self.expect(")")?;
        Ok(id)
    }

    fn operation(&mut self, name: &str, operands: &[Id]) -> Result<Id, String> {
        let unary = Unary::ALL.iter().find(|it| it.name() == name);
        let binary = Binary::ALL.iter().find(|it| it.name() == name);
        let comparison = Comparison::ALL.iter().find(|it| it.name() == name);
        let node = match (operands, unary, binary, comparison) {
            ([a], Some(operation), ..) => Node::Unary(*operation, *a),
            ([a, b], _, Some(operation), _) => Node::Binary(*operation, *a, *b),
            ([a, b], _, _, Some(comparison)) => Node::Compare(*comparison, *a, *b),
            ([a, b, c], ..) if name == "select" => Node::Select(*a, *b, *c),
            _ => return Err(format!("there is no `{name}` of {} operands", operands.len())),
        };
        self.push(node)
    }

    fn leaf(&mut self, word: &str) -> Result<Id, String> {
        if word.starts_with('$') {
            return self
                .names
                .get(word)
                .copied()
                .ok_or_else(|| format!("{word} has no meaning yet"));
        }
        if let Some(symbol) = Symbol::ALL.iter().find(|it| it.name() == word) {
            return match (symbol, self.kind) {
                (Symbol::Score, Kind::Mask) => Err("a mask knows no score".to_owned()),
                _ => self.push(Node::Symbol(*symbol)),
            };
        }
        let constant = if let Ok(value) = word.parse::<bool>() {
            Constant::Bool(value)
        } else if let Ok(value) = word.parse::<i32>() {
            Constant::I32(value)
        } else if let (Ok(value), true) = (word.parse::<f32>(), is_float(word)) {
            Constant::F32(value.to_bits())
        } else {
            return Err(format!("`{word}` means nothing"));
        };
        self.push(Node::Constant(constant))
    }
}

/// Returns whether a number is written as a float. An integer that is too large is not one.
fn is_float(word: &str) -> bool {
    word.contains(['.', 'e', 'E'])
        || word.trim_start_matches(['-', '+']).starts_with(['i', 'N', 'n'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_twice_has_a_name() {
        let function = Function::score("near", |score, at| {
            let apart = (at.query() - at.key()).abs().to_f32();
            score - apart * apart
        });
        let text = "(score near (let $0 (f32 (abs (sub query key)))) (sub score (mul $0 $0)))";
        assert_eq!(function.text(), text);
        assert_eq!(text.parse::<Function>().unwrap(), function);
        // Spaces and names do not matter.
        let other = "( score near\n(let $x (f32 (abs (sub query key)))) (sub score (mul $x $x)) )";
        assert_eq!(other.parse::<Function>().unwrap(), function);
    }

    #[test]
    fn constants_keep_their_bits() {
        for value in [0.1, -0.0, 1e-30, 16_777_216.0, 3e38, f32::INFINITY, f32::NEG_INFINITY] {
            let function = Function::score("added", |score, _| score + value);
            let back: Function = function.text().parse().unwrap();
            assert_eq!(back, function);
            let constant = Node::Constant(Constant::F32(value.to_bits()));
            assert!(back.body().nodes.contains(&constant), "{}", function.text());
        }
        let nan = Function::score("nan", |score, _| score + f32::NAN);
        assert_eq!(nan.text().parse::<Function>().unwrap().text(), nan.text());
        let least = Function::mask("least", |at| at.query().gt(i32::MIN));
        assert_eq!(least.text().parse::<Function>().unwrap(), least);
    }

    #[test]
    fn deep_functions_travel() {
        let deep = Function::score("deep", |score, _| (0..5000).fold(score, |sum, _| sum.tanh()));
        assert_eq!(deep.text().parse::<Function>().unwrap(), deep);
        let chain = Function::score("chain", |score, _| (0..100).fold(score, |sum, _| sum + sum));
        assert!(chain.text().len() < 4000, "{}", chain.text().len());
    }

    #[test]
    fn what_is_no_function_is_refused_with_the_reason() {
        for (text, reason) in [
            ("", "it ends too early"),
            ("(mask a (ge query key)", "it ends too early"),
            ("(masks a (ge query key))", "`masks` is neither a mask nor a score"),
            ("(mask a b (ge query key))", "`b` means nothing"),
            ("(mask a (ge query key)) x", "`x` comes after its end"),
            ("(mask a (add query key))", "a mask is bool, not i32"),
            ("(mask a (ge score 1.0))", "a mask knows no score"),
            ("(mask a (ge query 1.0))", "there is no ge of i32 and f32"),
            ("(mask a (ge query 99999999999))", "`99999999999` means nothing"),
            ("(mask a (not 1.0))", "there is no not of f32"),
            ("(mask a (ge query))", "there is no `ge` of 1 operands"),
            ("(mask a (ge query (load x key)))", "there is no tensor x"),
            (
                "(mask a (tensor x i32 2) (ge query (load x key)))",
                "tensor x takes 2 indices, not 1",
            ),
            ("(mask a (tensor x i8 1) (ge query (load x key)))", "`i8` is nothing that a tensor"),
            ("(mask a (tensor x i32 9) true)", "tensor x has 9 dimensions, and may have 1 to 4"),
            ("(mask a (let x 1) true)", "the name `x` does not begin with a $"),
            ("(mask a $0)", "$0 has no meaning yet"),
            ("(score a (rem score 2.0))", "there is no rem of f32 and f32"),
            ("(mask a (select true true false))", "there is no select of bool and bool and bool"),
        ] {
            let error = text.parse::<Function>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("no function: {reason}")), "{text}: {error}");
        }
        let deep = "(not ".repeat(10_000);
        assert!(format!("(mask a {deep}").parse::<Function>().is_err());
    }
}
