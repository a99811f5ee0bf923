//! Interval arithmetic on mask functions: what a mask can be over ranges of queries and keys.
//!
//! Every node gets a range that contains all its values; ranges may be too wide, never too narrow.
//! So "none" and "all" are certain, and "some" means that the function must be evaluated pair by
//! pair. A loaded value may be anything, unless the contents of its tensor are
//! [known](KnownContents).

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

use super::evaluate::{HostTensor, Value, integer_binary, load};
use super::node::{Binary, Comparison, Constant, Node, Symbol, Type, Unary};
use super::{Function, TensorSpec};

/// Ranges of the places of scores; none is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Indices of sequences.
    pub batch: Range<i32>,
    /// Indices of query heads.
    pub heads: Range<i32>,
    /// Indices of queries.
    pub queries: Range<i32>,
    /// Indices of keys.
    pub keys: Range<i32>,
    /// The number of queries of the sequence.
    pub query_length: i32,
    /// The number of keys of the sequence.
    pub key_length: i32,
}

/// Which keys of a region its queries see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// No query sees any key.
    None,
    /// Undecided: the function must be evaluated for each pair.
    Some,
    /// Every query sees every key.
    All,
}

/// The range of a node's values.
#[derive(Clone, Copy, Debug)]
enum Span {
    /// Integers from the first to the last, inclusive.
    Integer(i32, i32),
    /// Floats from the first to the last, never NaN.
    Float(f64, f64),
    /// Whether the value can be false, and whether it can be true.
    Bool(bool, bool),
}

const ANY_INTEGER: Span = Span::Integer(i32::MIN, i32::MAX);
/// A float that may be NaN has no range. It is marked by bounds of NaN.
const ANY_FLOAT: Span = Span::Float(f64::NAN, f64::NAN);
const ANY_BOOL: Span = Span::Bool(true, true);

impl Function {
    /// Returns what queries of a region see of its keys by this mask, as far as its text decides.
    ///
    /// ```
    /// use flashcore_kernels::attention::function::{Function, Region, Seen};
    ///
    /// let causal = Function::mask("causal", |at| at.query().ge(at.key()));
    /// let tile = |keys| Region {
    ///     batch: 0..1,
    ///     heads: 0..1,
    ///     queries: 128..256,
    ///     keys,
    ///     query_length: 1024,
    ///     key_length: 1024,
    /// };
    /// assert_eq!(causal.seen(&tile(0..128)), Seen::All);
    /// assert_eq!(causal.seen(&tile(128..256)), Seen::Some);
    /// assert_eq!(causal.seen(&tile(256..384)), Seen::None);
    /// ```
    pub fn seen(&self, region: &Region) -> Seen {
        self.seen_over(region, &KnownContents::new(&[]))
    }

    /// Returns the same where the contents of some tensors are known.
    pub fn seen_over(&self, region: &Region, known: &KnownContents<'_>) -> Seen {
        let body = self.body();
        let mut spans: Vec<Span> = Vec::with_capacity(body.nodes.len());
        for (node, ty) in body.nodes.iter().zip(&body.types) {
            let span = match node {
                Node::Load(tensor, indices) => {
                    let spec = &body.tensors[*tensor as usize];
                    known.span(spec, indices.iter().map(|index| spans[*index as usize]))
                }
                _ => None,
            };
            spans.push(span.unwrap_or_else(|| self::span(node, *ty, region, &spans)));
        }
        match spans[body.root as usize] {
            Span::Bool(true, false) => Seen::None,
            Span::Bool(false, true) => Seen::All,
            _ => Seen::Some,
        }
    }
}

/// The contents of tensors that functions load from, by name. Ranges that were looked up are
/// cached.
///
/// ```
/// use flashcore_kernels::attention::function::{Function, HostTensor, KnownContents, Region, Seen};
///
/// let documents = Function::mask("documents", |at| {
///     let ids = at.integers("ids");
///     ids.load([at.query()]).eq(ids.load([at.key()]))
/// });
/// let ids = [HostTensor::integers("ids", &[0, 0, 0, 0, 1, 1, 1, 2], &[8])];
/// let known = KnownContents::new(&ids);
/// let tile = |keys| Region {
///     batch: 0..1,
///     heads: 0..1,
///     queries: 4..6,
///     keys,
///     query_length: 8,
///     key_length: 8,
/// };
/// assert_eq!(documents.seen_over(&tile(0..4), &known), Seen::None);
/// assert_eq!(documents.seen_over(&tile(4..6), &known), Seen::All);
/// assert_eq!(documents.seen_over(&tile(6..8), &known), Seen::Some);
/// assert_eq!(documents.seen(&tile(0..4)), Seen::Some);
/// ```
#[derive(Debug)]
pub struct KnownContents<'a> {
    tensors: &'a [HostTensor],
    found: RefCell<HashMap<(usize, Bounds), Span>>,
}

/// The first and the last index in each dimension.
type Bounds = [(i32, i32); TensorSpec::MOST_DIMENSIONS];

/// The most elements that are searched for a range; beyond, it may be anything.
const MOST_ELEMENTS: i64 = 1 << 14;

impl<'a> KnownContents<'a> {
    /// Takes these tensors, which must have no [fault](HostTensor::fault).
    pub fn new(tensors: &'a [HostTensor]) -> Self {
        KnownContents { tensors, found: RefCell::default() }
    }

    /// Returns the range of loads at these ranges of indices, if it is known.
    fn span(&self, spec: &TensorSpec, indices: impl Iterator<Item = Span>) -> Option<Span> {
        let number = self.tensors.iter().position(|tensor| tensor.name == spec.name)?;
        let tensor = &self.tensors[number];
        let mut bounds = [(0, 0); TensorSpec::MOST_DIMENSIONS];
        let mut elements = 1_i64;
        for (index, bound) in indices.zip(&mut bounds) {
            let Span::Integer(low, high) = index else { return None };
            *bound = (low, high);
            elements = elements.saturating_mul(i64::from(high) - i64::from(low) + 1);
        }
        if elements > MOST_ELEMENTS {
            return None;
        }
        let mut found = self.found.borrow_mut();
        let span = found.entry((number, bounds)).or_insert_with(|| span_of(tensor, &bounds));
        Some(*span)
    }
}

/// Returns the range of a tensor's elements within bounds.
fn span_of(tensor: &HostTensor, bounds: &Bounds) -> Span {
    let bounds = &bounds[..tensor.extents.len()];
    let mut at: Vec<i32> = bounds.iter().map(|(low, _)| *low).collect();
    let mut all: Option<Span> = None;
    loop {
        let one = match load(tensor.stored, tensor.element(at.iter().copied())) {
            Value::Integer(value) => Span::Integer(value, value),
            Value::Float(value) if value.is_nan() => ANY_FLOAT,
            Value::Float(value) => Span::Float(value, value),
            Value::Bool(value) => Span::Bool(!value, value),
        };
        let joined = all.map_or(one, |all| union(all, one));
        all = Some(joined);
        // Advances the index, the last dimension first.
        let Some(dimension) = (0..at.len()).rev().find(|it| at[*it] < bounds[*it].1) else {
            return joined;
        };
        at[dimension] += 1;
        for inner in dimension + 1..at.len() {
            at[inner] = bounds[inner].0;
        }
    }
}

fn span(node: &Node, ty: Type, region: &Region, spans: &[Span]) -> Span {
    let of = |id: u32| spans[id as usize];
    let within = |range: &Range<i32>| Span::Integer(range.start, range.end - 1);
    let float = |value: f64| if value.is_nan() { ANY_FLOAT } else { Span::Float(value, value) };
    match node {
        Node::Symbol(Symbol::Batch) => within(&region.batch),
        Node::Symbol(Symbol::Head) => within(&region.heads),
        Node::Symbol(Symbol::Query) => within(&region.queries),
        Node::Symbol(Symbol::Key) => within(&region.keys),
        Node::Symbol(Symbol::QueryLength) => {
            Span::Integer(region.query_length, region.query_length)
        }
        Node::Symbol(Symbol::KeyLength) => Span::Integer(region.key_length, region.key_length),
        Node::Symbol(Symbol::Score) => ANY_FLOAT,
        Node::Constant(Constant::I32(value)) => Span::Integer(*value, *value),
        Node::Constant(Constant::F32(bits)) => float(f32::from_bits(*bits).into()),
        Node::Constant(Constant::Bool(value)) => Span::Bool(!value, *value),
        Node::Unary(operation, a) => unary(*operation, of(*a)),
        Node::Binary(operation, a, b) => binary(*operation, of(*a), of(*b)),
        Node::Compare(comparison, a, b) => compare(*comparison, of(*a), of(*b)),
        Node::Select(condition, a, b) => match of(*condition) {
            Span::Bool(false, true) => of(*a),
            Span::Bool(true, false) => of(*b),
            _ => union(of(*a), of(*b)),
        },
        Node::Load(..) => anything(ty),
    }
}

fn anything(ty: Type) -> Span {
    match ty {
        Type::F32 => ANY_FLOAT,
        Type::I32 => ANY_INTEGER,
        Type::Bool => ANY_BOOL,
    }
}

fn union(a: Span, b: Span) -> Span {
    match (a, b) {
        (Span::Integer(a, b), Span::Integer(c, d)) => Span::Integer(a.min(c), b.max(d)),
        // `min` and `max` would drop a NaN.
        (Span::Float(a, b), Span::Float(c, d)) if !(a.is_nan() || c.is_nan()) => {
            Span::Float(a.min(c), b.max(d))
        }
        (Span::Bool(a, b), Span::Bool(c, d)) => Span::Bool(a | c, b | d),
        _ => ANY_FLOAT,
    }
}

/// Returns a range of integers, or any integer where the bounds wrap around.
fn integers(low: i64, high: i64) -> Span {
    match (i32::try_from(low), i32::try_from(high)) {
        (Ok(low), Ok(high)) => Span::Integer(low, high),
        _ => ANY_INTEGER,
    }
}

/// Returns a range of floats, a little wider than computed, since kernels round.
fn floats(low: f64, high: f64) -> Span {
    if low.is_nan() || high.is_nan() {
        return ANY_FLOAT;
    }
    let margin = |value: f64| value.abs() * 1e-5 + 1e-30;
    let down = if low.is_finite() { low - margin(low) } else { low };
    let up = if high.is_finite() { high + margin(high) } else { high };
    Span::Float(down, up)
}

/// Returns the same with an absolute margin, for operations whose error near zero is not relative.
fn around(low: f64, high: f64) -> Span {
    floats(low - 1e-5, high + 1e-5)
}

fn unary(operation: Unary, a: Span) -> Span {
    match (operation, a) {
        (Unary::Negate, Span::Integer(low, high)) => integers(-i64::from(high), -i64::from(low)),
        (Unary::Negate, Span::Float(low, high)) => Span::Float(-high, -low),
        (Unary::Absolute, Span::Integer(low, high)) => {
            let sizes = [i64::from(low).abs(), i64::from(high).abs()];
            let least = if low <= 0 && high >= 0 { 0 } else { sizes[0].min(sizes[1]) };
            integers(least, sizes[0].max(sizes[1]))
        }
        (Unary::Absolute, Span::Float(low, high)) if !low.is_nan() => {
            let least = if low <= 0.0 && high >= 0.0 { 0.0 } else { low.abs().min(high.abs()) };
            Span::Float(least, low.abs().max(high.abs()))
        }
        (Unary::Not, Span::Integer(low, high)) => Span::Integer(!high, !low),
        (Unary::Not, Span::Bool(no, yes)) => Span::Bool(yes, no),
        (Unary::Tanh, Span::Float(low, high)) => around(low.tanh(), high.tanh()),
        (Unary::Exp2, Span::Float(low, high)) => floats(low.exp2(), high.exp2()),
        (Unary::Log2, Span::Float(low, high)) if low > 0.0 => around(low.log2(), high.log2()),
        // Integers beyond 2^24 are rounded.
        (Unary::ToFloat, Span::Integer(low, high)) => floats(low.into(), high.into()),
        (Unary::ToInteger, Span::Float(low, high)) if !low.is_nan() => {
            Span::Integer(low as i32, high as i32)
        }
        (Unary::ToInteger, _) => ANY_INTEGER,
        _ => ANY_FLOAT,
    }
}

fn binary(operation: Binary, a: Span, b: Span) -> Span {
    match (a, b) {
        (Span::Integer(a, b), Span::Integer(c, d)) => integer_span(operation, [a, b], [c, d]),
        (Span::Float(a, b), Span::Float(c, d)) => {
            if [a, b, c, d].iter().any(|it| it.is_nan()) {
                return ANY_FLOAT;
            }
            let corners = |of: fn(f64, f64) -> f64| {
                let corners = [of(a, c), of(a, d), of(b, c), of(b, d)];
                match corners.iter().any(|it| it.is_nan()) {
                    true => ANY_FLOAT,
                    false => floats(
                        corners.into_iter().fold(f64::INFINITY, f64::min),
                        corners.into_iter().fold(f64::NEG_INFINITY, f64::max),
                    ),
                }
            };
            match operation {
                Binary::Add => corners(|a, b| a + b),
                Binary::Subtract => corners(|a, b| a - b),
                // Zero times infinity within the ranges would be NaN.
                Binary::Multiply if [a, b, c, d].iter().all(|it| it.is_finite()) => {
                    corners(|a, b| a * b)
                }
                Binary::Divide if c > 0.0 || d < 0.0 => corners(|a, b| a / b),
                Binary::Minimum => Span::Float(a.min(c), b.min(d)),
                Binary::Maximum => Span::Float(a.max(c), b.max(d)),
                _ => ANY_FLOAT,
            }
        }
        (Span::Bool(no_a, yes_a), Span::Bool(no_b, yes_b)) => match operation {
            Binary::And => Span::Bool(no_a | no_b, yes_a & yes_b),
            Binary::Or => Span::Bool(no_a & no_b, yes_a | yes_b),
            _ => Span::Bool((no_a & no_b) | (yes_a & yes_b), (no_a & yes_b) | (yes_a & no_b)),
        },
        _ => ANY_FLOAT,
    }
}

fn integer_span(operation: Binary, [a, b]: [i32; 2], [c, d]: [i32; 2]) -> Span {
    let wide = |value: i32| i64::from(value);
    // For operations whose extremes are at the ends of both ranges.
    let corners = |of: fn(i64, i64) -> i64| {
        let mut corners = [(a, c), (a, d), (b, c), (b, d)].map(|(a, b)| of(wide(a), wide(b)));
        corners.sort_unstable();
        integers(corners[0], corners[3])
    };
    if a == b && c == d {
        let value = integer_binary(operation, a, c);
        return Span::Integer(value, value);
    }
    match operation {
        Binary::Add => integers(wide(a) + wide(c), wide(b) + wide(d)),
        Binary::Subtract => integers(wide(a) - wide(d), wide(b) - wide(c)),
        Binary::Multiply => corners(|a, b| a * b),
        Binary::Divide if c > 0 => corners(i64::div_euclid),
        // Within one period the remainder increases with the dividend.
        Binary::Remainder if c > 0 && c == d && a.div_euclid(c) == b.div_euclid(c) => {
            Span::Integer(a.rem_euclid(c), b.rem_euclid(c))
        }
        Binary::Remainder if c > 0 => Span::Integer(0, d - 1),
        Binary::Minimum => Span::Integer(a.min(c), b.min(d)),
        Binary::Maximum => Span::Integer(a.max(c), b.max(d)),
        Binary::And if a >= 0 && c >= 0 => Span::Integer(0, b.min(d)),
        Binary::And if a >= 0 => Span::Integer(0, b),
        Binary::And if c >= 0 => Span::Integer(0, d),
        Binary::ShiftRight if c == d => {
            Span::Integer(a.wrapping_shr(c as u32), b.wrapping_shr(c as u32))
        }
        Binary::ShiftLeft if c == d && (0..31).contains(&c) => integers(wide(a) << c, wide(b) << c),
        _ => ANY_INTEGER,
    }
}

fn compare(comparison: Comparison, a: Span, b: Span) -> Span {
    let [less, equal, greater] = match (a, b) {
        (Span::Integer(a, b), Span::Integer(c, d)) => relations([a, b], [c, d]),
        (Span::Float(a, b), Span::Float(c, d)) if !(a.is_nan() || c.is_nan()) => {
            relations([a, b], [c, d])
        }
        _ => return ANY_BOOL,
    };
    let not = |(can, must): (bool, bool)| (!must, !can);
    let (can, must) = match comparison {
        Comparison::Equal => equal,
        Comparison::NotEqual => not(equal),
        Comparison::Less => less,
        Comparison::AtLeast => not(less),
        Comparison::Greater => greater,
        Comparison::AtMost => not(greater),
    };
    Span::Bool(!must, can)
}

/// Returns for each of less, equal and greater whether a value of the first range can be so, and
/// whether it must be so, compared with one of the second.
fn relations<T: PartialOrd>([a, b]: [T; 2], [c, d]: [T; 2]) -> [(bool, bool); 3] {
    let same = a == b && c == d && a == c;
    [(a < d, b < c), (a <= d && c <= b, same), (b > c, a > d)]
}

#[cfg(test)]
mod tests {
    use super::super::{Here, Row};
    use super::*;

    /// Evaluates every pair of a region.
    fn by_pairs(function: Function, region: &Region) -> Seen {
        let [mut none, mut all] = [true; 2];
        for query in region.queries.clone() {
            let (query_length, key_length) = (region.query_length, region.key_length);
            let here = Here { batch: 0, head: 0, query, query_length, key_length };
            let mut row = Row::new(function, &[], here);
            for key in region.keys.clone() {
                let sees = row.sees(key as usize);
                (none, all) = (none && !sees, all && sees);
            }
        }
        match (none, all) {
            (true, _) => Seen::None,
            (_, true) => Seen::All,
            _ => Seen::Some,
        }
    }

    /// Common masks, for which ranges decide exactly what pairs do.
    #[test]
    fn ranges_decide_common_masks() {
        let masks = [
            Function::mask("causal", |at| at.query().ge(at.key())),
            Function::mask("window", |at| {
                let before = at.query() - at.key();
                before.ge(0) & before.lt(40)
            }),
            Function::mask("distance", |at| (at.query() - at.key()).abs().le(30)),
            Function::mask("prefix", |at| at.key().lt(50) | at.query().ge(at.key())),
            Function::mask("chunks", |at| (at.query() / 48).eq(at.key() / 48)),
            Function::mask("negated", |at| !at.key().gt(at.query())),
            Function::mask("position", |at| at.key().le(at.position())),
            Function::mask("shifted", |at| (at.key() >> 5).ne(at.query() >> 5)),
            Function::mask("always", |at| at.boolean(true)),
            Function::mask("floats", |at| at.key().to_f32().lt(at.query().to_f32() * 0.5 - 3.3)),
        ];
        for mask in masks {
            for queries in (0..200).step_by(32) {
                for keys in (0..200).step_by(16) {
                    let region = Region {
                        batch: 0..1,
                        heads: 0..1,
                        queries: queries..queries + 32,
                        keys: keys..keys + 16,
                        query_length: 224,
                        key_length: 208,
                    };
                    let (found, exact) = (mask.seen(&region), by_pairs(mask, &region));
                    assert_eq!(found, exact, "{mask} at {region:?}");
                }
            }
        }
    }

    #[test]
    fn what_is_loaded_may_be_anything() {
        let documents = Function::mask("documents", |at| {
            let ids = at.integers("ids");
            at.query().ge(at.key()) & ids.load([at.query()]).eq(ids.load([at.key()]))
        });
        let tile = |keys| Region {
            batch: 0..1,
            heads: 0..1,
            queries: 64..128,
            keys,
            query_length: 256,
            key_length: 256,
        };
        assert_eq!(documents.seen(&tile(0..64)), Seen::Some);
        assert_eq!(documents.seen(&tile(128..192)), Seen::None);
    }
}
