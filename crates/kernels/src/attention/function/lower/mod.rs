//! Lowering of mask and score functions: emits the instructions that apply a function to the scores
//! of a thread.
//!
//! A thread's scores lie in some rows and some columns. Nodes of the expression that depend on
//! neither row nor column are computed once, those that depend on the row once per row, and those
//! that depend on the column once per column; only the rest is computed for each score. Columns are
//! processed one after the other, which keeps few values in registers.
//!
//! | file | subject |
//! | --- | --- |
//! | `run` | evaluates the nodes level by level over one thread's scores |
//! | `arithmetic` | the instructions of one operation |
//! | `address` | addresses and loads of elements of captured tensors |

mod address;
mod arithmetic;
mod run;

use ptx::{Builder, F32, Pred, Reg, S32, Select, U32, Value};

use self::address::{ElementAddress, TensorRegisters};
use self::run::{Run, Values};
use super::Function;
use super::node::{Id, Kind, Node, Stored, Symbol, Unary};
use super::scale::Unscaled;
use super::window::Sum;
use crate::attention::{Rules, Score};
use crate::parameter::{Captured, CapturedPart};

/// The mask function and the score function of a kernel's rules.
#[derive(Clone)]
pub(crate) struct Functions {
    pub(crate) mask: Option<FunctionRegisters>,
    pub(crate) score: Option<FunctionRegisters>,
}

impl Functions {
    /// Declares the launch parameters of the functions.
    pub(crate) fn parameters(k: &mut Builder, rules: &Rules) -> Self {
        let mut declared = |it: Option<Function>| it.map(|it| FunctionRegisters::parameters(k, it));
        Functions { mask: declared(rules.mask_function), score: declared(rules.score_function) }
    }

    /// Rewrites the score function to take scores before the softmax scale, if it only adds to
    /// them. `inverse` is the reciprocal of the scale.
    pub(crate) fn unscaled(self, rules: &Rules, inverse: Option<Reg<F32>>) -> Self {
        let (Some(function), Some(inverse)) = (rules.score_function, inverse) else { return self };
        Functions { score: self.score.map(|it| it.unscaled(function, inverse)), ..self }
    }

    /// Adapts the functions to threads whose columns come in pairs that begin at an even key.
    pub(crate) fn in_pairs(self) -> Self {
        let in_pairs = |it: Option<FunctionRegisters>| it.map(FunctionRegisters::in_pairs);
        Functions { mask: in_pairs(self.mask), score: in_pairs(self.score) }
    }

    /// Returns whether there is a mask function or a score function.
    pub(crate) fn exist(&self) -> bool {
        self.mask.is_some() || self.score.is_some()
    }

    /// Declares the launch parameters of the functions for a backward kernel, whose score tiles
    /// have keys as rows and queries as columns. The score function also computes its derivative
    /// with respect to the score.
    pub(crate) fn of_gradients(k: &mut Builder, rules: &Rules) -> Self {
        let mut declared = |it: Option<Function>| {
            it.map(|it| FunctionRegisters::declared(k, it, it.kind() == Kind::Score, true))
        };
        Functions { mask: declared(rules.mask_function), score: declared(rules.score_function) }
    }
}

/// A function inside a kernel: its expression, what was found out about each node, and the captured
/// tensors that it loads from. The vectors by node are indexed by [`Id`].
#[derive(Clone)]
pub(crate) struct FunctionRegisters {
    kind: Kind,
    nodes: Vec<Node>,
    /// The node of the result, then that of the derivative where it was requested.
    roots: Vec<Id>,
    /// By node: what it depends on.
    levels: Vec<Level>,
    /// By node: how it changes from column to column, if it is a position converted to a float.
    induction_variables: Vec<Option<InductionVariable>>,
    /// By node: whether a root depends on it.
    needed: Vec<bool>,
    tensors: Vec<TensorRegisters>,
    /// Whether rows are keys and columns are queries.
    transposed: bool,
    /// With scores before the softmax scale, the node that stands for the reciprocal of the scale,
    /// and its register.
    inverse: Option<(Id, Reg<F32>)>,
    /// By node: whether it is a load whose elements for a pair of columns can be loaded by one
    /// instruction, if the tensor's layout allows it.
    pairs: Vec<bool>,
}

/// A position converted to a float, which changes by 1 or -1 from column to column: it is converted
/// for the first column only, and the others are float additions. The result is exact wherever the
/// conversion is.
#[derive(Clone, Copy)]
struct InductionVariable {
    /// The integer that is converted.
    sum: Sum,
    /// Whether its absolute value is taken.
    absolute: bool,
}

impl InductionVariable {
    fn of(nodes: &[Node], id: usize, transposed: bool) -> Option<Self> {
        let Node::Unary(Unary::ToFloat, integer) = nodes[id] else { return None };
        let (integer, absolute) = match nodes[integer as usize] {
            Node::Unary(Unary::Absolute, inner) => (inner, true),
            _ => (integer, false),
        };
        let variable = InductionVariable { sum: Sum::of(nodes, integer)?, absolute };
        (variable.step(transposed) != 0).then_some(variable)
    }

    /// Returns the change from one column to the next.
    fn step(&self, transposed: bool) -> i64 {
        if transposed { self.sum.query } else { self.sum.key }
    }

    /// Returns the level at which the value in the first column is computed.
    fn level(&self, transposed: bool) -> Level {
        let of_row = if transposed { self.sum.key } else { self.sum.query };
        if of_row == 0 { Level::Tile } else { Level::Row }
    }
}

/// The position of a thread's scores in the problem.
#[derive(Clone, Copy)]
pub(crate) struct ScoreCoordinates<'a> {
    pub(crate) batch: Reg<U32>,
    pub(crate) head: Reg<U32>,
    /// The query of the thread's first row, or of its first column where rows are keys.
    pub(crate) first_query: Reg<S32>,
    /// The offsets of the thread's rows from its first row.
    pub(crate) rows: &'a [u32],
    /// The key of the thread's first column, or of its first row where rows are keys.
    pub(crate) first_key: Reg<S32>,
    pub(crate) query_length: Reg<U32>,
    pub(crate) key_length: Reg<U32>,
}

/// What a node's value depends on, and so how often it is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    /// Neither the row nor the column.
    Tile,
    Row,
    Column,
    Score,
}

impl Level {
    /// Returns the level of a node with inputs of these levels.
    fn of(inputs: impl Iterator<Item = Level>) -> Level {
        inputs.fold(Level::Tile, |all, input| match (all, input) {
            (Level::Row, Level::Column) | (Level::Column, Level::Row) => Level::Score,
            (all, input) => all.max(input),
        })
    }
}

/// The value of a node as far as it has been computed.
#[derive(Clone)]
enum Computed {
    Float(Value<F32>),
    Integer(Value<S32>),
    Bool(Value<Pred>),
    /// For a load that also depends on later levels, the part of its address that is known so far.
    ElementAddress(ElementAddress),
    /// For an [`InductionVariable`], its value in the first column, before the absolute value is
    /// taken.
    First(Value<F32>),
}

impl Computed {
    fn float(&self) -> Value<F32> {
        match self {
            Computed::Float(value) => value.clone(),
            _ => unreachable!("types were checked"),
        }
    }

    fn integer(&self) -> Value<S32> {
        match self {
            Computed::Integer(value) => value.clone(),
            _ => unreachable!("types were checked"),
        }
    }

    fn boolean(&self) -> Value<Pred> {
        match self {
            Computed::Bool(value) => value.clone(),
            _ => unreachable!("types were checked"),
        }
    }
}

impl FunctionRegisters {
    /// Declares the launch parameters of a function.
    pub(crate) fn parameters(k: &mut Builder, function: Function) -> Self {
        FunctionRegisters::declared(k, function, false, false)
    }

    fn declared(k: &mut Builder, function: Function, derivative: bool, transposed: bool) -> Self {
        let body = function.body();
        let (nodes, roots) = match derivative {
            true => function.with_derivative(),
            false => (body.nodes.clone(), [body.root; 2]),
        };
        let roots = roots[..1 + usize::from(derivative)].to_vec();
        let tensors = body.tensors.iter().enumerate().map(|(index, spec)| {
            let of = |part| Captured { kind: body.kind, index: index as u8, part };
            let dimensions = 0..spec.rank as u8;
            TensorRegisters {
                stored: spec.stored,
                address: of(CapturedPart::Address).address(k),
                extents: (dimensions.clone())
                    .map(|it| of(CapturedPart::Extent(it)).extent(k))
                    .collect(),
                strides: dimensions.map(|it| of(CapturedPart::Stride(it)).stride(k)).collect(),
            }
        });
        let tensors = tensors.collect();
        FunctionRegisters {
            kind: body.kind,
            nodes,
            roots,
            levels: Vec::new(),
            induction_variables: Vec::new(),
            needed: Vec::new(),
            tensors,
            transposed,
            inverse: None,
            pairs: Vec::new(),
        }
        .analysed()
    }

    /// Marks the loads that can be done for two columns at once, for threads whose columns come in
    /// pairs that begin at an even key: those of tensors whose last index is the key.
    fn in_pairs(self) -> Self {
        let is_pair = |node: &Node| match node {
            Node::Load(tensor, indices) => {
                let Some((last, outer)) = indices.split_last() else { return false };
                let stored = self.tensors[*tensor as usize].stored;
                let fits = matches!(stored, Stored::F16 | Stored::BF16 | Stored::F32 | Stored::I32);
                // Both elements of a pair must be in the same row of the tensor.
                let of_row =
                    |index: &Id| matches!(self.levels[*index as usize], Level::Tile | Level::Row);
                let is_key = self.nodes[*last as usize] == Node::Symbol(Symbol::Key);
                fits && is_key && outer.iter().all(of_row)
            }
            _ => false,
        };
        let pairs = self.nodes.iter().map(is_pair).collect();
        FunctionRegisters { pairs, ..self }
    }

    fn is_pair(&self, id: usize) -> bool {
        self.needed[id] && self.pairs.get(id).is_some_and(|is_pair| *is_pair)
    }

    /// Rewrites the function to take scores before the softmax scale, if it only adds to them.
    /// `inverse` is the reciprocal of the scale.
    fn unscaled(self, function: Function, inverse: Reg<F32>) -> Self {
        match function.unscaled() {
            None => self,
            Some(Unscaled { nodes, root, inverse: id }) => {
                FunctionRegisters { nodes, roots: vec![root], inverse: Some((id, inverse)), ..self }
                    .analysed()
            }
        }
    }

    /// Returns values of which none has been computed yet.
    fn nothing(&self) -> Values {
        vec![None; self.nodes.len()]
    }

    /// Finds the level of each node, the nodes that are an [`InductionVariable`], and
    /// the nodes that are needed.
    fn analysed(self) -> Self {
        let FunctionRegisters { nodes, transposed, .. } = &self;
        let mut levels: Vec<Level> = Vec::new();
        let [of_query, of_key] = match transposed {
            true => [Level::Column, Level::Row],
            false => [Level::Row, Level::Column],
        };
        for node in nodes {
            levels.push(match node {
                Node::Symbol(Symbol::Query) => of_query,
                Node::Symbol(Symbol::Key) => of_key,
                Node::Symbol(Symbol::Score) => Level::Score,
                node => Level::of(node.inputs().iter().map(|input| levels[*input as usize])),
            });
        }
        let variables = (0..nodes.len()).map(|id| InductionVariable::of(nodes, id, *transposed));
        let induction_variables: Vec<Option<InductionVariable>> = variables.collect();
        let mut needed = vec![false; nodes.len()];
        self.roots.iter().for_each(|root| needed[*root as usize] = true);
        for id in (0..nodes.len()).rev().filter(|id| induction_variables[*id].is_none()) {
            if needed[id] {
                nodes[id].inputs().iter().for_each(|input| needed[*input as usize] = true);
            }
        }
        FunctionRegisters { levels, induction_variables, needed, ..self }
    }

    /// Applies the function to the scores in place: a score function replaces them, and a mask sets
    /// those it hides to minus infinity.
    pub(crate) fn apply(
        &self,
        k: &mut Builder,
        scores: &[Score],
        coordinates: &ScoreCoordinates<'_>,
    ) {
        let body = |k: &mut Builder, score: &Score, results: &[Computed]| {
            let register = score.register;
            match self.kind {
                Kind::Score => k.set(register, results[0].float()),
                Kind::Mask => {
                    let seen = results[0].boolean();
                    k.set(register, seen.select::<F32>(register, f32::NEG_INFINITY));
                }
            }
        };
        let scores = in_order_of_columns(scores);
        let run = Run::new(k, self, coordinates);
        match run.pairs_lie_together(k, &scores) {
            None => run.each(k, &scores, body),
            Some(together) => k.if_else(
                together,
                |k| run.clone().with_pairs(k).each(k, &scores, body),
                |k| run.clone().each(k, &scores, body),
            ),
        }
    }

    /// Calls `body` for each score, column by column, with the result of the score function and its
    /// derivative.
    pub(crate) fn each_with_derivative(
        &self,
        k: &mut Builder,
        scores: &[Score],
        coordinates: &ScoreCoordinates<'_>,
        mut body: impl FnMut(&mut Builder, &Score, [Value<F32>; 2]),
    ) {
        let scores = in_order_of_columns(scores);
        Run::new(k, self, coordinates).each(k, &scores, |k, score, results| {
            body(k, score, [0, 1].map(|index| results[index].float()));
        });
    }

    /// Calls `body` for each pair of query and key, column by column, with whether the mask leaves
    /// it visible.
    pub(crate) fn each_seen(
        &self,
        k: &mut Builder,
        pairs: &[Score],
        coordinates: &ScoreCoordinates<'_>,
        mut body: impl FnMut(&mut Builder, &Score, Value<Pred>),
    ) {
        let pairs = in_order_of_columns(pairs);
        Run::new(k, self, coordinates).each(k, &pairs, |k, pair, results| {
            body(k, pair, results[0].boolean());
        });
    }
}

fn in_order_of_columns(scores: &[Score]) -> Vec<Score> {
    let mut scores = scores.to_vec();
    scores.sort_by_key(|score| score.column);
    scores
}
