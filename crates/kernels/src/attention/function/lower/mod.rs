//! A function in a kernel, over the scores that a thread has.
//!
//! A thread's scores are those of some rows and some columns. What depends on neither is computed
//! once, what depends on the row once for each row, and what depends on the column once for each
//! column; only the rest is computed for each score. Columns come one after the other, so that
//! little is kept in registers.
//!
//! | file | its subject |
//! | --- | --- |
//! | `run` | level after level, of one thread's scores |
//! | `arithmetic` | one operation in instructions |
//! | `place` | elements of the tensors that a function loads from |

mod arithmetic;
mod place;
mod run;

use ptx::{Builder, Choose, F32, Pred, Reg, S32, U32, Value};

use self::place::{Place, TensorRegisters};
use self::run::{Run, Values};
use super::Function;
use super::node::{Id, Kind, Node, Stored, Symbol, Unary};
use super::scale::Unscaled;
use super::window::Sum;
use crate::attention::{Rules, Score};
use crate::parameter::{Captured, CapturedPart};

/// The functions of a kernel's rules.
#[derive(Clone)]
pub(crate) struct Functions {
    pub(crate) mask: Option<FunctionRegisters>,
    pub(crate) score: Option<FunctionRegisters>,
}

impl Functions {
    /// Declares what they are passed at launch.
    pub(crate) fn parameters(k: &mut Builder, rules: &Rules) -> Self {
        let mut declared = |it: Option<Function>| it.map(|it| FunctionRegisters::parameters(k, it));
        Functions { mask: declared(rules.mask_function), score: declared(rules.score_function) }
    }

    /// The same where scores come before their scale, if the score function only adds to them:
    /// `inverse` is one over it.
    pub(crate) fn unscaled(self, rules: &Rules, inverse: Option<Reg<F32>>) -> Self {
        let (Some(function), Some(inverse)) = (rules.score_function, inverse) else { return self };
        Functions { score: self.score.map(|it| it.unscaled(function, inverse)), ..self }
    }

    /// The same where a thread's columns are pairs, the first of which is an even key.
    pub(crate) fn in_pairs(self) -> Self {
        let in_pairs = |it: Option<FunctionRegisters>| it.map(FunctionRegisters::in_pairs);
        Functions { mask: in_pairs(self.mask), score: in_pairs(self.score) }
    }

    /// Whether there is one.
    pub(crate) fn exist(&self) -> bool {
        self.mask.is_some() || self.score.is_some()
    }

    /// The same for gradients: scores whose rows are keys and whose columns are queries, and the
    /// slope of the score beside it.
    pub(crate) fn of_gradients(k: &mut Builder, rules: &Rules) -> Self {
        let mut declared = |it: Option<Function>| {
            it.map(|it| FunctionRegisters::declared(k, it, it.kind() == Kind::Score, true))
        };
        Functions { mask: declared(rules.mask_function), score: declared(rules.score_function) }
    }
}

/// A function inside a kernel, with the tensors that it loads from.
#[derive(Clone)]
pub(crate) struct FunctionRegisters {
    kind: Kind,
    nodes: Vec<Node>,
    /// The result, and the slope where it is asked for.
    roots: Vec<Id>,
    levels: Vec<Level>,
    /// Nodes that are floats of places, and others that are found from one column to the next.
    moving: Vec<Option<Moving>>,
    /// Nodes that somebody asks for.
    needed: Vec<bool>,
    tensors: Vec<TensorRegisters>,
    /// Whether rows are keys and columns are queries.
    transposed: bool,
    /// Where scores come before their scale, the node that is one over it.
    inverse: Option<(Id, Reg<F32>)>,
    /// Loads of two neighbours that one instruction can do, where tensors lie so.
    pairs: Vec<bool>,
}

/// A float that changes by one from column to column: it is converted for the first column alone,
/// and exact wherever the conversion is.
#[derive(Clone, Copy)]
struct Moving {
    sum: Sum,
    absolute: bool,
}

impl Moving {
    fn of(nodes: &[Node], id: usize, transposed: bool) -> Option<Self> {
        let Node::Unary(Unary::ToFloat, integer) = nodes[id] else { return None };
        let (integer, absolute) = match nodes[integer as usize] {
            Node::Unary(Unary::Absolute, inner) => (inner, true),
            _ => (integer, false),
        };
        let moving = Moving { sum: Sum::of(nodes, integer)?, absolute };
        (moving.step(transposed) != 0).then_some(moving)
    }

    /// What it changes by from column to column.
    fn step(&self, transposed: bool) -> i64 {
        if transposed { self.sum.query } else { self.sum.key }
    }

    /// Where it is found for the first column.
    fn level(&self, transposed: bool) -> Level {
        let of_row = if transposed { self.sum.key } else { self.sum.query };
        if of_row == 0 { Level::Tile } else { Level::Row }
    }
}

/// Where a thread's scores stand.
#[derive(Clone, Copy)]
pub(crate) struct Standing<'a> {
    pub(crate) batch: Reg<U32>,
    pub(crate) head: Reg<U32>,
    /// The query of its first row; of its first column, where rows are keys.
    pub(crate) first_query: Reg<S32>,
    /// How far below the first its rows lie.
    pub(crate) rows: &'a [u32],
    /// The key of its first column; of its first row, where rows are keys.
    pub(crate) first_key: Reg<S32>,
    pub(crate) query_length: Reg<U32>,
    pub(crate) key_length: Reg<U32>,
}

/// What a node depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    /// Neither row nor column.
    Tile,
    Row,
    Column,
    Score,
}

impl Level {
    fn of(inputs: impl Iterator<Item = Level>) -> Level {
        inputs.fold(Level::Tile, |all, input| match (all, input) {
            (Level::Row, Level::Column) | (Level::Column, Level::Row) => Level::Score,
            (all, input) => all.max(input),
        })
    }
}

/// What a node has come to.
#[derive(Clone)]
enum Computed {
    Float(Value<F32>),
    Integer(Value<S32>),
    Truth(Value<Pred>),
    /// Of a load that depends on more: what the indices of this level come to.
    Place(Place),
    /// Of a float that moves: what it is in the first column.
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

    fn truth(&self) -> Value<Pred> {
        match self {
            Computed::Truth(value) => value.clone(),
            _ => unreachable!("types were checked"),
        }
    }
}

impl FunctionRegisters {
    /// Declares what a function is passed at launch.
    pub(crate) fn parameters(k: &mut Builder, function: Function) -> Self {
        FunctionRegisters::declared(k, function, false, false)
    }

    fn declared(k: &mut Builder, function: Function, slope: bool, transposed: bool) -> Self {
        let body = function.body();
        let (nodes, roots) = match slope {
            true => function.with_slope(),
            false => (body.nodes.clone(), [body.root; 2]),
        };
        let roots = roots[..1 + usize::from(slope)].to_vec();
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
            moving: Vec::new(),
            needed: Vec::new(),
            tensors,
            transposed,
            inverse: None,
            pairs: Vec::new(),
        }
        .analysed()
    }

    /// The same for threads whose columns are pairs, the first of which is an even key: where a
    /// tensor's last index is the key, neighbours are loaded together.
    fn in_pairs(self) -> Self {
        let is_pair = |node: &Node| match node {
            Node::Load(tensor, indices) => {
                let Some((last, outer)) = indices.split_last() else { return false };
                let stored = self.tensors[*tensor as usize].stored;
                let fits = matches!(stored, Stored::F16 | Stored::BF16 | Stored::F32 | Stored::I32);
                // Neighbours are of one row of the tensor.
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

    /// The same function over scores before their scale, where it only adds to them: `inverse` is
    /// one over the scale.
    fn unscaled(self, function: Function, inverse: Reg<F32>) -> Self {
        match function.unscaled() {
            None => self,
            Some(Unscaled { nodes, root, inverse: id }) => {
                FunctionRegisters { nodes, roots: vec![root], inverse: Some((id, inverse)), ..self }
                    .analysed()
            }
        }
    }

    /// No node has come to anything yet.
    fn nothing(&self) -> Values {
        vec![None; self.nodes.len()]
    }

    /// Finds what nodes depend on, and which are needed.
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
        let moving = (0..nodes.len()).map(|id| Moving::of(nodes, id, *transposed));
        let moving: Vec<Option<Moving>> = moving.collect();
        let mut needed = vec![false; nodes.len()];
        self.roots.iter().for_each(|root| needed[*root as usize] = true);
        for id in (0..nodes.len()).rev().filter(|id| moving[*id].is_none()) {
            if needed[id] {
                nodes[id].inputs().iter().for_each(|input| needed[*input as usize] = true);
            }
        }
        FunctionRegisters { levels, moving, needed, ..self }
    }

    /// Scores become what a score function says, or minus infinity where a mask hides their key.
    pub(crate) fn apply(&self, k: &mut Builder, scores: &[Score], standing: &Standing<'_>) {
        let body = |k: &mut Builder, score: &Score, results: &[Computed]| {
            let register = score.register;
            match self.kind {
                Kind::Score => k.set(register, results[0].float()),
                Kind::Mask => {
                    let seen = results[0].truth();
                    k.set(register, seen.choose::<F32>(register, f32::NEG_INFINITY));
                }
            }
        };
        let scores = in_order_of_columns(scores);
        let run = Run::new(k, self, standing);
        match run.pairs_lie_together(k, &scores) {
            None => run.each(k, &scores, body),
            Some(together) => k.if_else(
                together,
                |k| run.clone().with_pairs(k).each(k, &scores, body),
                |k| run.clone().each(k, &scores, body),
            ),
        }
    }

    /// Gives what a score function makes of each score, and its slope there, to somebody who does
    /// something with them; column after column.
    pub(crate) fn each_with_slope(
        &self,
        k: &mut Builder,
        scores: &[Score],
        standing: &Standing<'_>,
        mut body: impl FnMut(&mut Builder, &Score, [Value<F32>; 2]),
    ) {
        let scores = in_order_of_columns(scores);
        Run::new(k, self, standing).each(k, &scores, |k, score, results| {
            body(k, score, [0, 1].map(|index| results[index].float()));
        });
    }

    /// Gives what a mask says of each pair of query and key to somebody who does something with it.
    pub(crate) fn each_seen(
        &self,
        k: &mut Builder,
        pairs: &[Score],
        standing: &Standing<'_>,
        mut body: impl FnMut(&mut Builder, &Score, Value<Pred>),
    ) {
        let pairs = in_order_of_columns(pairs);
        Run::new(k, self, standing).each(k, &pairs, |k, pair, results| {
            body(k, pair, results[0].truth());
        });
    }
}

fn in_order_of_columns(scores: &[Score]) -> Vec<Score> {
    let mut scores = scores.to_vec();
    scores.sort_by_key(|score| score.column);
    scores
}
