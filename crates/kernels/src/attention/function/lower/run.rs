//! Evaluation of a function over one thread's scores.
//!
//! Nodes of the tile and row levels are computed first, when a [`Run`] is created; then each column
//! is visited in order, and within it each score. A load whose indices belong to several levels is
//! put together step by step: each level adds its indices' part of the address.

use std::collections::HashMap;

use ptx::{Builder, Expression, F32, GlobalAddress, Pred, Reg, S32, Select, U32, U64, Value};

use super::address::{ElementAddress, TensorRegisters, load_pair};
use super::arithmetic::{compare, float_binary, integer_binary, unary};
use super::{Computed, FunctionRegisters, InductionVariable, Level, ScoreCoordinates};
use crate::attention::Score;
use crate::attention::function::node::{Binary, Constant, Id, Node, Symbol};
use crate::attention::function::window::Sum;

/// Values by node; `None` where nothing was computed at this level.
pub(super) type Values = Vec<Option<Computed>>;

/// A function being evaluated over one thread's scores.
#[derive(Clone)]
pub(super) struct Run<'a> {
    function: &'a FunctionRegisters,
    coordinates: &'a ScoreCoordinates<'a>,
    /// Values of the tile level.
    tile: Values,
    /// Values of the row level, by row.
    rows: Vec<Values>,
    /// Where neighbours are loaded in pairs, the address of each pair load in the first column.
    pairs: Option<HashMap<Pair, Reg<GlobalAddress>>>,
    /// The second element of each pair that was loaded, until its column is visited.
    second: HashMap<Pair, Computed>,
}

/// The node of a pair load and its row; `None` if the load is the same in all rows.
type Pair = (usize, Option<usize>);

impl<'a> Run<'a> {
    /// Starts an evaluation: computes the nodes that do not depend on the column.
    pub(super) fn new(
        k: &mut Builder,
        function: &'a FunctionRegisters,
        coordinates: &'a ScoreCoordinates<'a>,
    ) -> Self {
        let tile = function.nothing();
        let (rows, pairs, second) = (Vec::new(), None, HashMap::new());
        let mut run = Run { function, coordinates, tile, rows, pairs, second };
        run.compute(k, Level::Tile, &mut function.nothing(), None, None);
        for row in 0..coordinates.rows.len() {
            let mut values = function.nothing();
            run.compute(k, Level::Row, &mut values, Some(row), None);
            run.rows.push(values);
        }
        run
    }

    /// Returns whether all lanes of the warp can load neighbours in pairs: elements of a row are
    /// contiguous, every row is aligned to a pair, and no index is out of bounds. `None` if the
    /// function has no load that could be done in pairs.
    pub(super) fn pairs_lie_together(
        &self,
        k: &mut Builder,
        scores: &[Score],
    ) -> Option<Reg<Pred>> {
        let function = self.function;
        if !(0..function.nodes.len()).any(|id| function.is_pair(id)) {
            return None;
        }
        let last_column = scores.iter().map(|score| score.column).max()?;
        let last_key = k.eval(self.coordinates.first_key.reinterpret::<U32>() + last_column);
        let mut all: Option<Value<Pred>> = None;
        let mut and = |it: Value<Pred>| {
            all = Some(match all.take() {
                Some(all) => all & it,
                None => it,
            });
        };
        for (id, node) in function.nodes.iter().enumerate().filter(|(id, _)| function.is_pair(*id))
        {
            let Node::Load(tensor, _) = node else { continue };
            let TensorRegisters { stored, address, extents, strides } =
                &function.tensors[*tensor as usize];
            let (Some((last, outer)), Some(extent)) = (strides.split_last(), extents.last()) else {
                continue;
            };
            let odd = outer.iter().fold(Value::<U64>::from(0u64), |all, it| all | *it);
            and((odd & 1).equals(0) & last.equals(1u64));
            and((address.reinterpret::<U64>() & (2 * stored.bytes() as u64 - 1)).equals(0));
            and(last_key.less(*extent));
            for values in self.rows.iter().chain([&self.tile]) {
                if let Some(Computed::ElementAddress(ElementAddress {
                    within: Some(within), ..
                })) = &values[id]
                {
                    and(within.clone());
                }
            }
        }
        all.map(|all| k.all(all))
    }

    /// Switches to loading in pairs: computes the addresses of the pairs in the first column, from
    /// which those in other columns have constant offsets.
    pub(super) fn with_pairs(self, k: &mut Builder) -> Self {
        let mut pairs = HashMap::new();
        for (id, node) in self.function.nodes.iter().enumerate() {
            let Node::Load(tensor, _) = node else { continue };
            if !self.function.is_pair(id) {
                continue;
            }
            let tensor = &self.function.tensors[*tensor as usize];
            let rows = match self.function.levels[id] {
                Level::Score => (0..self.coordinates.rows.len()).map(Some).collect(),
                _ => vec![None],
            };
            for row in rows {
                let address =
                    self.address_before(id, tensor, Level::Score, &self.function.nothing(), row);
                let column = self.coordinates.first_key.reinterpret::<U32>().convert::<U64>();
                let begin = address.address.expect("a tensor lies somewhere");
                pairs.insert((id, row), k.eval(begin + column * tensor.stored.bytes()));
            }
        }
        Run { pairs: Some(pairs), ..self }
    }

    /// Calls `body` for each score, column by column, with the values of the roots. `scores` are
    /// sorted by column.
    pub(super) fn each(
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

    /// Returns an element that is loaded as one of a pair: in the first column both are loaded, and
    /// the second is kept for the next column.
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

    /// Computes what can be computed at one level, for one row, column or score: the nodes of that
    /// level, and the parts of addresses and induction variables that later levels complete.
    fn compute(
        &mut self,
        k: &mut Builder,
        level: Level,
        values: &mut Values,
        row: Option<usize>,
        score: Option<&Score>,
    ) {
        let FunctionRegisters { nodes, levels, needed, induction_variables, transposed, .. } =
            self.function;
        let asked = |id: &usize| needed[*id] && levels[*id] >= level;
        for (id, node) in nodes.iter().enumerate().filter(|(id, _)| asked(id)) {
            let whole = levels[id] == level;
            let computed = match node {
                _ if let Some((inverse, register)) = self.function.inverse
                    && inverse as usize == id =>
                {
                    Computed::Float(register.into())
                }
                _ if let Some(variable) = induction_variables[id] => match (whole, score) {
                    (true, Some(score)) => self.induction_variable(k, id, variable, row, score),
                    _ if variable.level(*transposed) == level => {
                        Computed::First(self.in_first_column(k, variable.sum, row))
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
                    let mut address = self.address_before(id, tensor, level, values, row);
                    for (dimension, index) in indices.iter().enumerate() {
                        if levels[*index as usize] == level {
                            let index = self.find(*index, values, row).integer();
                            address.step(k, tensor, dimension, index);
                        }
                    }
                    match whole {
                        true => address.load(k, tensor),
                        false => Computed::ElementAddress(address.computed(k)),
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

    /// Returns the part of a load's address that indices of earlier levels determine; without any,
    /// the start of the tensor. A column's part has no base address until it is combined with a
    /// row's.
    fn address_before(
        &self,
        id: usize,
        tensor: &TensorRegisters,
        level: Level,
        values: &Values,
        row: Option<usize>,
    ) -> ElementAddress {
        let placed = |values: &Values| match &values[id] {
            Some(Computed::ElementAddress(address)) => Some(address.clone()),
            _ => None,
        };
        let none = ElementAddress { address: None, offset: None, within: None };
        let whole = self.function.levels[id] == level;
        if level == Level::Column && !whole {
            return none;
        }
        let of_row = row.and_then(|row| self.rows.get(row)).and_then(placed);
        let from = of_row.or_else(|| placed(&self.tile));
        let from = from.unwrap_or(ElementAddress { address: Some(tensor.address), ..none });
        match placed(values) {
            None => from,
            Some(column) => from.and(column),
        }
    }

    /// Computes a sum of positions in the first column and converts it to a float.
    fn in_first_column(&self, k: &mut Builder, sum: Sum, row: Option<usize>) -> Value<F32> {
        let ScoreCoordinates { first_query, first_key, rows, query_length, key_length, .. } =
            *self.coordinates;
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

    /// Returns an induction variable in the column of a score: its value in the first column plus
    /// the column's offset.
    fn induction_variable(
        &self,
        k: &mut Builder,
        id: usize,
        variable: InductionVariable,
        row: Option<usize>,
        score: &Score,
    ) -> Computed {
        let of_row = row.and_then(|row| self.rows.get(row)).and_then(|values| values[id].as_ref());
        let first = match of_row.or(self.tile[id].as_ref()) {
            Some(Computed::First(first)) => first.clone(),
            _ => unreachable!("the first column comes first"),
        };
        let step = (variable.step(self.function.transposed) * i64::from(score.column)) as f32;
        let value = k.eval(first + step);
        match variable.absolute {
            true => Computed::Float(k.absolute(value).into()),
            false => Computed::Float(value.into()),
        }
    }

    /// Returns the value of a node that was completely computed at this or an earlier level.
    fn find(&self, id: Id, values: &Values, row: Option<usize>) -> Computed {
        let of_row = row.and_then(|row| self.rows.get(row));
        let levels = [Some(values), of_row, Some(&self.tile)];
        let mut found = levels.into_iter().flatten().filter_map(|it| it[id as usize].clone());
        let whole =
            found.find(|it| !matches!(it, Computed::ElementAddress(_) | Computed::First(_)));
        whole.expect("a node comes after those that it is made of")
    }

    /// Computes a node other than a load from the values of its inputs.
    fn node(
        &self,
        k: &mut Builder,
        node: &Node,
        values: &Values,
        row: Option<usize>,
        score: Option<&Score>,
    ) -> Computed {
        use Computed::{Bool, Float, Integer};
        let of = |id: &Id| self.find(*id, values, row);
        let ScoreCoordinates { batch, head, first_query, rows, first_key, .. } = *self.coordinates;
        let ScoreCoordinates { query_length, key_length, .. } = *self.coordinates;
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
            Node::Constant(Constant::Bool(value)) => Bool((*value).into()),
            Node::Unary(operation, a) => unary(k, *operation, of(a)),
            Node::Binary(operation, a, b) => match (of(a), of(b)) {
                (Float(a), Float(b)) => Float(float_binary(k, *operation, a, b)),
                (Integer(left), Integer(right)) => {
                    let constant = self.constant(*b);
                    let positive = self.is_positive(*a);
                    Integer(integer_binary(k, *operation, left, right, constant, positive))
                }
                (a, b) => {
                    let (a, b) = (a.boolean(), b.boolean());
                    let result = match operation {
                        Binary::And => a & b,
                        Binary::Or => a | b,
                        _ => a ^ b,
                    };
                    Bool(k.eval(result).into())
                }
            },
            Node::Compare(comparison, a, b) => {
                let result = match (of(a), of(b)) {
                    (Float(a), Float(b)) => compare(*comparison, a, b),
                    (a, b) => compare(*comparison, a.integer(), b.integer()),
                };
                Bool(k.eval(result).into())
            }
            Node::Select(condition, a, b) => {
                let condition = of(condition).boolean();
                match (of(a), of(b)) {
                    (Float(a), Float(b)) => Float(k.eval(condition.select::<F32>(a, b)).into()),
                    (a, b) => {
                        let chosen = condition.select::<S32>(a.integer(), b.integer());
                        Integer(k.eval(chosen).into())
                    }
                }
            }
            Node::Load(..) => unreachable!("loads are put together level by level"),
        }
    }

    /// Returns the value of a node that is an integer constant.
    fn constant(&self, id: Id) -> Option<i32> {
        match self.function.nodes[id as usize] {
            Node::Constant(Constant::I32(value)) => Some(value),
            _ => None,
        }
    }

    /// Returns whether an integer node is known not to be negative: symbols are not, nor are their
    /// quotients and remainders by positive constants.
    fn is_positive(&self, id: Id) -> bool {
        match self.function.nodes[id as usize] {
            Node::Symbol(symbol) => symbol != Symbol::Score,
            Node::Constant(Constant::I32(value)) => value >= 0,
            Node::Binary(Binary::Divide | Binary::Remainder, a, b) => {
                // Only the direct operand is examined, which bounds the search.
                let place = matches!(self.function.nodes[a as usize], Node::Symbol(_));
                place && self.constant(b).is_some_and(|by| by > 0)
            }
            _ => false,
        }
    }
}
