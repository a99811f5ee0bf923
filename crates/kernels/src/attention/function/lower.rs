//! A function in a kernel, over the scores that a thread has.
//!
//! A thread's scores are those of some rows and some columns. What depends on neither is computed
//! once, what depends on the row once for each row, and what depends on the column once for each
//! column; only the rest is computed for each score. Columns come one after the other, so that
//! little is kept in registers.

use std::collections::HashMap;
use std::f32::consts::LOG2_E;

use ptx::{
    BF16x2, Builder, Choose, Element, Expression, F16x2, F32, GlobalAddress, LoadHint, Pred, Reg,
    S32, U32, U64, Value,
};

use super::Function;
use super::node::{Binary, Comparison, Constant, Id, Kind, Node, Stored, Symbol, Unary};
use super::scale::Unscaled;
use super::window::Sum;
use crate::attention::{Rules, Score};
use crate::element::load_as_f32;
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

/// A tensor that is loaded from.
#[derive(Clone)]
struct TensorRegisters {
    stored: Stored,
    address: Reg<GlobalAddress>,
    extents: Vec<Reg<U32>>,
    strides: Vec<Reg<U64>>,
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

/// Where an element lies, as far as some of its indices say.
#[derive(Clone)]
struct Place {
    /// From here on; of a column, which stands beside the row's, nowhere yet.
    address: Option<Reg<GlobalAddress>>,
    /// Bytes on.
    offset: Option<Value<U64>>,
    /// Whether these indices are inside.
    within: Option<Value<Pred>>,
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

    /// Whether pairs can be loaded as they lie, in the whole warp: the tensors have no gaps between
    /// neighbours, every row begins at an even place, and no index is outside.
    fn pairs_lie_together(
        &self,
        k: &mut Builder,
        run: &Run<'_>,
        scores: &[Score],
    ) -> Option<Reg<Pred>> {
        if !(0..self.nodes.len()).any(|id| self.is_pair(id)) {
            return None;
        }
        let last_column = scores.iter().map(|score| score.column).max()?;
        let last_key = k.eval(run.standing.first_key.reinterpret::<U32>() + last_column);
        let mut all: Option<Value<Pred>> = None;
        let mut and = |it: Value<Pred>| {
            all = Some(match all.take() {
                Some(all) => all & it,
                None => it,
            });
        };
        for (id, node) in self.nodes.iter().enumerate().filter(|(id, _)| self.is_pair(*id)) {
            let Node::Load(tensor, _) = node else { continue };
            let TensorRegisters { stored, address, extents, strides } =
                &self.tensors[*tensor as usize];
            let (Some((last, outer)), Some(extent)) = (strides.split_last(), extents.last()) else {
                continue;
            };
            let odd = outer.iter().fold(Value::<U64>::from(0u64), |all, it| all | *it);
            and((odd & 1).equals(0) & last.equals(1u64));
            and((address.reinterpret::<U64>() & (2 * stored.bytes() as u64 - 1)).equals(0));
            and(last_key.less(*extent));
            for values in run.rows.iter().chain([&run.tile]) {
                if let Some(Computed::Place(Place { within: Some(within), .. })) = &values[id] {
                    and(within.clone());
                }
            }
        }
        all.map(|all| k.all(all))
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
        match self.pairs_lie_together(k, &run, &scores) {
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

/// The values of nodes; nothing where a level has not come to them.
type Values = Vec<Option<Computed>>;

/// A function over one thread's scores.
#[derive(Clone)]
struct Run<'a> {
    function: &'a FunctionRegisters,
    standing: &'a Standing<'a>,
    tile: Values,
    rows: Vec<Values>,
    /// Where pairs of neighbours are loaded together, in whose row.
    pairs: Option<HashMap<Pair, Reg<GlobalAddress>>>,
    /// The second of each pair, until its column comes.
    second: HashMap<Pair, Computed>,
}

/// A load of two neighbours, and the row it is of, unless it is the same in all.
type Pair = (usize, Option<usize>);

impl<'a> Run<'a> {
    /// What depends on no column is computed.
    fn new(k: &mut Builder, function: &'a FunctionRegisters, standing: &'a Standing<'a>) -> Self {
        let tile = function.nothing();
        let (rows, pairs, second) = (Vec::new(), None, HashMap::new());
        let mut run = Run { function, standing, tile, rows, pairs, second };
        run.compute(k, Level::Tile, &mut function.nothing(), None, None);
        for row in 0..standing.rows.len() {
            let mut values = function.nothing();
            run.compute(k, Level::Row, &mut values, Some(row), None);
            run.rows.push(values);
        }
        run
    }

    /// With the addresses of the first column's pairs: the others are so many bytes on.
    fn with_pairs(self, k: &mut Builder) -> Self {
        let mut pairs = HashMap::new();
        for (id, node) in self.function.nodes.iter().enumerate() {
            let Node::Load(tensor, _) = node else { continue };
            if !self.function.is_pair(id) {
                continue;
            }
            let tensor = &self.function.tensors[*tensor as usize];
            let rows = match self.function.levels[id] {
                Level::Score => (0..self.standing.rows.len()).map(Some).collect(),
                _ => vec![None],
            };
            for row in rows {
                let place =
                    self.place_before(id, tensor, Level::Score, &self.function.nothing(), row);
                let column = self.standing.first_key.reinterpret::<U32>().convert::<U64>();
                let begin = place.address.expect("a tensor lies somewhere");
                pairs.insert((id, row), k.eval(begin + column * tensor.stored.bytes()));
            }
        }
        Run { pairs: Some(pairs), ..self }
    }

    /// Gives what comes of each score to somebody, column after column.
    fn each(
        mut self,
        k: &mut Builder,
        scores: &[Score],
        mut body: impl FnMut(&mut Builder, &Score, &[Computed]),
    ) {
        for of_column in scores.chunk_by(|a, b| a.column == b.column) {
            let mut column = self.function.nothing();
            self.compute(k, Level::Column, &mut column, None, Some(&of_column[0]));
            for score in of_column {
                let mut values = column.clone();
                self.compute(k, Level::Score, &mut values, Some(score.row), Some(score));
                let roots = self.function.roots.iter();
                let results: Vec<Computed> =
                    roots.map(|it| self.find(*it, &values, Some(score.row))).collect();
                body(k, score, &results);
            }
        }
    }

    /// An element of a pair: with the first comes the second.
    fn of_pair(
        &mut self,
        k: &mut Builder,
        id: usize,
        row: Option<usize>,
        score: &Score,
    ) -> Computed {
        if let Some(second) = self.second.remove(&(id, row)) {
            return second;
        }
        let Node::Load(tensor, _) = &self.function.nodes[id] else { unreachable!("a load") };
        let tensor = &self.function.tensors[*tensor as usize];
        let pairs = self.pairs.as_ref().expect("pairs lie together");
        let [first, second] = load_pair(k, tensor.stored, pairs[&(id, row)], score.column);
        self.second.insert((id, row), second);
        first
    }

    /// Computes the nodes of a level, of one row, column or score.
    fn compute(
        &mut self,
        k: &mut Builder,
        level: Level,
        values: &mut Values,
        row: Option<usize>,
        score: Option<&Score>,
    ) {
        let FunctionRegisters { nodes, levels, needed, moving, transposed, .. } = self.function;
        let asked = |id: &usize| needed[*id] && levels[*id] >= level;
        for (id, node) in nodes.iter().enumerate().filter(|(id, _)| asked(id)) {
            let whole = levels[id] == level;
            let computed = match node {
                _ if let Some((inverse, register)) = self.function.inverse
                    && inverse as usize == id =>
                {
                    Computed::Float(register.into())
                }
                _ if let Some(moving) = moving[id] => match (whole, score) {
                    (true, Some(score)) => self.moved(k, id, moving, row, score),
                    _ if moving.level(*transposed) == level => {
                        Computed::First(self.in_first_column(k, moving.sum, row))
                    }
                    _ => continue,
                },
                Node::Load(..) if self.pairs.is_some() && self.function.is_pair(id) => {
                    match (whole, score) {
                        (true, Some(score)) => self.of_pair(k, id, row, score),
                        _ => continue,
                    }
                }
                Node::Load(tensor, indices) => {
                    let here = indices.iter().any(|index| levels[*index as usize] == level);
                    if !whole && !here {
                        continue;
                    }
                    let tensor = &self.function.tensors[*tensor as usize];
                    let mut place = self.place_before(id, tensor, level, values, row);
                    for (dimension, index) in indices.iter().enumerate() {
                        if levels[*index as usize] == level {
                            let index = self.find(*index, values, row).integer();
                            place.step(k, tensor, dimension, index);
                        }
                    }
                    match whole {
                        true => place.load(k, tensor),
                        false => Computed::Place(place.computed(k)),
                    }
                }
                _ if !whole => continue,
                node => self.node(k, node, values, row, score),
            };
            match level {
                Level::Tile => self.tile[id] = Some(computed),
                _ => values[id] = Some(computed),
            }
        }
    }

    /// What indices of other levels have come to.
    fn place_before(
        &self,
        id: usize,
        tensor: &TensorRegisters,
        level: Level,
        values: &Values,
        row: Option<usize>,
    ) -> Place {
        let placed = |values: &Values| match &values[id] {
            Some(Computed::Place(place)) => Some(place.clone()),
            _ => None,
        };
        let none = Place { address: None, offset: None, within: None };
        let whole = self.function.levels[id] == level;
        if level == Level::Column && !whole {
            return none;
        }
        let of_row = row.and_then(|row| self.rows.get(row)).and_then(placed);
        let from = of_row.or_else(|| placed(&self.tile));
        let from = from.unwrap_or(Place { address: Some(tensor.address), ..none });
        match placed(values) {
            None => from,
            Some(column) => from.and(column),
        }
    }

    /// A sum of places as a float, in the first column.
    fn in_first_column(&self, k: &mut Builder, sum: Sum, row: Option<usize>) -> Value<F32> {
        let Standing { first_query, first_key, rows, query_length, key_length, .. } =
            *self.standing;
        let below = row.map_or(0, |row| rows[row] as i32);
        let constant = sum.constant as i32
            + below * (if self.function.transposed { sum.key } else { sum.query }) as i32;
        let [query_length, key_length] =
            [query_length, key_length].map(|it| k.eval(it.reinterpret::<S32>()));
        let terms = [
            (sum.query, first_query),
            (sum.key, first_key),
            (sum.query_length, query_length),
            (sum.key_length, key_length),
        ];
        let mut all: Value<S32> = constant.into();
        for (times, term) in terms {
            match times {
                0 => {}
                1 => all = all + term,
                _ => all = all - term,
            }
        }
        k.eval(all.convert::<F32>()).into()
    }

    /// The same in the column of a score.
    fn moved(
        &self,
        k: &mut Builder,
        id: usize,
        moving: Moving,
        row: Option<usize>,
        score: &Score,
    ) -> Computed {
        let of_row = row.and_then(|row| self.rows.get(row)).and_then(|values| values[id].as_ref());
        let first = match of_row.or(self.tile[id].as_ref()) {
            Some(Computed::First(first)) => first.clone(),
            _ => unreachable!("the first column comes first"),
        };
        let step = (moving.step(self.function.transposed) * i64::from(score.column)) as f32;
        let value = k.eval(first + step);
        match moving.absolute {
            true => Computed::Float(k.absolute(value).into()),
            false => Computed::Float(value.into()),
        }
    }

    fn find(&self, id: Id, values: &Values, row: Option<usize>) -> Computed {
        let of_row = row.and_then(|row| self.rows.get(row));
        let levels = [Some(values), of_row, Some(&self.tile)];
        let mut found = levels.into_iter().flatten().filter_map(|it| it[id as usize].clone());
        let whole = found.find(|it| !matches!(it, Computed::Place(_) | Computed::First(_)));
        whole.expect("a node comes after those that it is made of")
    }

    fn node(
        &self,
        k: &mut Builder,
        node: &Node,
        values: &Values,
        row: Option<usize>,
        score: Option<&Score>,
    ) -> Computed {
        use Computed::{Float, Integer, Truth};
        let of = |id: &Id| self.find(*id, values, row);
        let Standing { batch, head, first_query, rows, first_key, .. } = *self.standing;
        let Standing { query_length, key_length, .. } = *self.standing;
        match node {
            Node::Symbol(symbol) => {
                let signed = |register: Reg<U32>| Integer(register.reinterpret::<S32>());
                let plus = |k: &mut Builder, first: Reg<S32>, distance: u32| match distance {
                    0 => Integer(first.into()),
                    _ => Integer(k.eval(first + distance as i32).into()),
                };
                match symbol {
                    Symbol::Batch => signed(batch),
                    Symbol::Head => signed(head),
                    Symbol::QueryLength => signed(query_length),
                    Symbol::KeyLength => signed(key_length),
                    Symbol::Query | Symbol::Key => {
                        let is_query = *symbol == Symbol::Query;
                        let first = if is_query { first_query } else { first_key };
                        match is_query != self.function.transposed {
                            true => plus(k, first, rows[row.expect("of a row")]),
                            false => plus(k, first, score.expect("of a column").column),
                        }
                    }
                    Symbol::Score => Float(score.expect("of a score").register.into()),
                }
            }
            Node::Constant(Constant::F32(bits)) => Float(f32::from_bits(*bits).into()),
            Node::Constant(Constant::I32(value)) => Integer((*value).into()),
            Node::Constant(Constant::Bool(value)) => Truth((*value).into()),
            Node::Unary(operation, a) => unary(k, *operation, of(a)),
            Node::Binary(operation, a, b) => match (of(a), of(b)) {
                (Float(a), Float(b)) => Float(float_binary(k, *operation, a, b)),
                (Integer(left), Integer(right)) => {
                    let constant = self.constant(*b);
                    Integer(self.integer_binary(k, *operation, *a, left, right, constant))
                }
                (a, b) => {
                    let (a, b) = (a.truth(), b.truth());
                    let result = match operation {
                        Binary::And => a & b,
                        Binary::Or => a | b,
                        _ => a ^ b,
                    };
                    Truth(k.eval(result).into())
                }
            },
            Node::Compare(comparison, a, b) => {
                let result = match (of(a), of(b)) {
                    (Float(a), Float(b)) => compare(*comparison, a, b),
                    (a, b) => compare(*comparison, a.integer(), b.integer()),
                };
                Truth(k.eval(result).into())
            }
            Node::Select(condition, a, b) => {
                let condition = of(condition).truth();
                match (of(a), of(b)) {
                    (Float(a), Float(b)) => Float(k.eval(condition.choose::<F32>(a, b)).into()),
                    (a, b) => {
                        let chosen = condition.choose::<S32>(a.integer(), b.integer());
                        Integer(k.eval(chosen).into())
                    }
                }
            }
            Node::Load(..) => unreachable!("loads are put together level by level"),
        }
    }

    fn constant(&self, id: Id) -> Option<i32> {
        match self.function.nodes[id as usize] {
            Node::Constant(Constant::I32(value)) => Some(value),
            _ => None,
        }
    }

    fn integer_binary(
        &self,
        k: &mut Builder,
        operation: Binary,
        a_id: Id,
        a: Value<S32>,
        b: Value<S32>,
        constant: Option<i32>,
    ) -> Value<S32> {
        let value = match operation {
            Binary::Add => a + b,
            Binary::Subtract => a - b,
            Binary::Multiply => a * b,
            Binary::Minimum => a.minimum(b),
            Binary::Maximum => a.maximum(b),
            Binary::And => a & b,
            Binary::Or => a | b,
            Binary::Xor => a ^ b,
            Binary::ShiftLeft => a << (b & 31).reinterpret::<U32>(),
            Binary::ShiftRight => a >> (b & 31).reinterpret::<U32>(),
            Binary::Divide | Binary::Remainder => {
                let a = k.eval(a);
                let [quotient, rest] = match constant {
                    Some(by) if by > 0 && (by as u32).is_power_of_two() => {
                        [a >> by.trailing_zeros(), a & (by - 1)]
                    }
                    Some(by) if by > 0 && self.is_positive(a_id) => {
                        let whole = k.eval(a.reinterpret::<U32>() / by as u32);
                        let whole = k.eval(whole.reinterpret::<S32>());
                        [whole.into(), a - whole * by]
                    }
                    _ => {
                        let b = k.eval(b);
                        floor_divide(k, a, b)
                    }
                };
                if operation == Binary::Divide { quotient } else { rest }
            }
        };
        k.eval(value).into()
    }

    /// Whether a node is known never to be negative: places are not, nor what is left of them.
    fn is_positive(&self, id: Id) -> bool {
        match self.function.nodes[id as usize] {
            Node::Symbol(symbol) => symbol != Symbol::Score,
            Node::Constant(Constant::I32(value)) => value >= 0,
            Node::Binary(Binary::Divide | Binary::Remainder, a, b) => {
                // One step is looked at, so that this ends soon.
                let place = matches!(self.function.nodes[a as usize], Node::Symbol(_));
                place && self.constant(b).is_some_and(|by| by > 0)
            }
            _ => false,
        }
    }
}

/// The quotient rounded down, and what is left; by zero, zero and all of it.
fn floor_divide(k: &mut Builder, a: Reg<S32>, b: Reg<S32>) -> [Value<S32>; 2] {
    // Neither zero nor minus one, for which the hardware's result is not defined.
    let special = k.eval((b + 1).reinterpret::<U32>().less(2u32));
    let divisor = k.eval(special.choose::<S32>(1, b));
    let truncated = k.eval(a / divisor);
    let rest = k.eval(a - truncated * divisor);
    let wrong = k.eval(rest.differs(0) & (rest ^ divisor).less(0));
    let down = k.eval(wrong.choose::<S32>(truncated - 1, truncated));
    let left = k.eval(wrong.choose::<S32>(rest + divisor, rest));
    let by_zero = k.eval(b.equals(0));
    let of_special = k.eval(by_zero.choose::<S32>(0, -a));
    let rest_of_special = k.eval(by_zero.choose::<S32>(a, 0));
    [special.choose::<S32>(of_special, down), special.choose::<S32>(rest_of_special, left)]
}

fn unary(k: &mut Builder, operation: Unary, a: Computed) -> Computed {
    use Computed::{Float, Integer, Truth};
    match (operation, a) {
        (Unary::Negate, Integer(a)) => Integer(k.eval(-a).into()),
        (Unary::Negate, a) => Float(k.eval(-a.float()).into()),
        (Unary::Absolute, Integer(a)) => {
            let a = k.eval(a);
            Integer(k.eval(a.maximum(-a)).into())
        }
        (Unary::Absolute, a) => Float(k.absolute(a.float()).into()),
        (Unary::Not, Integer(a)) => Integer(k.eval(!a).into()),
        (Unary::Not, a) => Truth(k.eval(!a.truth()).into()),
        (Unary::Tanh, a) => {
            // The hardware's own is good to 11 bits only.
            let power = k.exp2(a.float() * (2.0 * LOG2_E));
            let fraction = k.reciprocal(power + 1.0);
            Float(k.fma(fraction, -2.0, 1.0).into())
        }
        (Unary::Exp2, a) => Float(k.exp2(a.float()).into()),
        (Unary::Log2, a) => Float(k.log2(a.float()).into()),
        (Unary::ToFloat, a) => Float(k.eval(a.integer().convert::<F32>()).into()),
        (Unary::ToInteger, a) => Integer(k.eval(a.float().convert::<S32>()).into()),
    }
}

fn float_binary(k: &mut Builder, operation: Binary, a: Value<F32>, b: Value<F32>) -> Value<F32> {
    let value = match operation {
        Binary::Add => a + b,
        Binary::Subtract => a - b,
        Binary::Multiply => a * b,
        Binary::Divide => a / b,
        Binary::Minimum => a.minimum(b),
        Binary::Maximum => a.maximum(b),
        _ => unreachable!("types were checked"),
    };
    k.eval(value).into()
}

fn compare<T: ptx::Number>(comparison: Comparison, a: Value<T>, b: Value<T>) -> Value<Pred> {
    match comparison {
        Comparison::Equal => a.equals(b),
        // True where one is NaN.
        Comparison::NotEqual => !a.equals(b),
        Comparison::Less => a.less(b),
        Comparison::AtMost => a.at_most(b),
        Comparison::Greater => a.greater(b),
        Comparison::AtLeast => a.at_least(b),
    }
}

impl Place {
    /// One more index.
    fn step(
        &mut self,
        k: &mut Builder,
        tensor: &TensorRegisters,
        dimension: usize,
        index: Value<S32>,
    ) {
        // Those below zero are beyond every extent.
        let index = k.eval(index.reinterpret::<U32>());
        let inside = k.eval(index.less(tensor.extents[dimension]));
        // There is an element to be loaded all the same: no branch.
        let near = k.eval(inside.choose::<U32>(index, 0u32));
        let stride = tensor.strides[dimension] * tensor.stored.bytes();
        let step = k.eval(near.convert::<U64>() * stride);
        let step = Place { address: None, offset: Some(step.into()), within: Some(inside.into()) };
        *self = self.clone().and(step);
    }

    /// With further indices.
    fn and(self, other: Place) -> Place {
        let both = |a: Option<Value<U64>>, b: Option<Value<U64>>| match (a, b) {
            (Some(a), Some(b)) => Some(a + b),
            (a, b) => a.or(b),
        };
        Place {
            address: self.address.or(other.address),
            offset: both(self.offset, other.offset),
            within: match (self.within, other.within) {
                (Some(a), Some(b)) => Some(a & b),
                (a, b) => a.or(b),
            },
        }
    }

    /// The same in as few registers as can be.
    fn computed(self, k: &mut Builder) -> Place {
        let (address, offset) = match (self.address, self.offset) {
            (Some(address), Some(offset)) => (Some(k.eval(address + offset)), None),
            (address, offset) => (address, offset.map(|offset| k.eval(offset).into())),
        };
        Place { address, offset, within: self.within.map(|within| k.eval(within).into()) }
    }

    /// Its address, and whether it is inside of its tensor.
    fn found(self, k: &mut Builder) -> (Value<GlobalAddress>, Reg<Pred>) {
        let Place { address, offset, within } = self;
        let address = address.expect("a tensor lies somewhere");
        let place: Value<GlobalAddress> = match offset {
            Some(offset) => address + offset,
            None => address.into(),
        };
        (place, k.eval(within.expect("a tensor has dimensions")))
    }

    /// The element, zero where an index is outside.
    fn load(self, k: &mut Builder, tensor: &TensorRegisters) -> Computed {
        let (place, within) = self.found(k);
        match tensor.stored {
            Stored::I32 | Stored::I64 => {
                let loaded = k.load::<S32, _>(place);
                Computed::Integer(k.eval(within.choose::<S32>(loaded, 0)).into())
            }
            Stored::U8 => {
                let loaded = k.load_byte(place).reinterpret::<S32>();
                Computed::Integer(k.eval(within.choose::<S32>(loaded, 0)).into())
            }
            Stored::Bool => {
                let loaded = k.load_byte(place);
                Computed::Truth(k.eval(within & loaded.differs(0)).into())
            }
            floats => {
                let element = match floats {
                    Stored::F16 => Element::F16,
                    Stored::BF16 => Element::BF16,
                    _ => Element::F32,
                };
                let loaded = load_as_f32(k, element, place);
                Computed::Float(k.eval(within.choose::<F32>(loaded, 0.0)).into())
            }
        }
    }
}

/// Two neighbours, so many columns on.
fn load_pair(
    k: &mut Builder,
    stored: Stored,
    first: Reg<GlobalAddress>,
    column: u32,
) -> [Computed; 2] {
    let place = first + column * stored.bytes() as u32;
    let floats = match stored {
        Stored::F16 => {
            let pair = k.load::<F16x2, _>(place);
            k.unpack(pair)
        }
        Stored::BF16 => {
            let pair = k.load::<BF16x2, _>(place);
            k.unpack(pair)
        }
        Stored::F32 => k.load_vector::<F32, _, 2>(place, LoadHint::default()),
        _ => {
            let pair = k.load_vector::<S32, _, 2>(place, LoadHint::default());
            return pair.map(|it| Computed::Integer(it.into()));
        }
    };
    floats.map(|it| Computed::Float(it.into()))
}
