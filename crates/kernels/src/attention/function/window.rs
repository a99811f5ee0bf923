//! Recognises windows in mask functions: bounds on the distance between query and key.
//!
//! `query >= key` is the causal mask by name, and `query - key < 1024` a window. Kernels know where
//! masks by name begin and end without evaluating blocks, so that less is left for the function, or
//! nothing.

use super::Function;
use super::node::{Binary, Comparison, Constant, Id, Kind, Node, Symbol, Type, Unary};

/// The window of a mask function, and the rest of the mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windowed {
    /// Number of visible keys before the position; `None` where there is no bound.
    pub left: Option<u32>,
    /// Number of visible keys after the position; `None` where there is no bound.
    pub right: Option<u32>,
    /// The mask without these bounds; `None` where nothing is left of it.
    pub rest: Option<Function>,
}

/// Largest lengths and constants for which no sum in a bound wraps around.
const MOST_LENGTH: u32 = 1 << 26;
const MOST_CONSTANT: i64 = 1 << 28;
/// The most nested sums that are searched: a function may be deep.
const MOST_DEPTH: u32 = 8;

/// A linear combination of symbols with coefficients of -1, 0 and 1, and a constant.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Sum {
    pub(super) query: i64,
    pub(super) key: i64,
    pub(super) query_length: i64,
    pub(super) key_length: i64,
    pub(super) constant: i64,
}

impl Sum {
    /// Returns an integer node as such a sum, if it is one.
    pub(super) fn of(nodes: &[Node], id: Id) -> Option<Sum> {
        Sum::within(nodes, id, MOST_DEPTH)
    }

    fn within(nodes: &[Node], id: Id, depth: u32) -> Option<Sum> {
        let zero = Sum::default();
        let of = |id: Id| Sum::within(nodes, id, depth.checked_sub(1)?);
        match nodes[id as usize] {
            Node::Symbol(Symbol::Query) => Some(Sum { query: 1, ..zero }),
            Node::Symbol(Symbol::Key) => Some(Sum { key: 1, ..zero }),
            Node::Symbol(Symbol::QueryLength) => Some(Sum { query_length: 1, ..zero }),
            Node::Symbol(Symbol::KeyLength) => Some(Sum { key_length: 1, ..zero }),
            Node::Constant(Constant::I32(value)) => {
                let constant = i64::from(value);
                (constant.abs() <= MOST_CONSTANT).then_some(Sum { constant, ..zero })
            }
            Node::Unary(Unary::Negate, a) => of(a)?.negated(),
            Node::Binary(Binary::Subtract, a, b) => of(a)?.minus(of(b)?),
            Node::Binary(Binary::Add, a, b) => of(a)?.minus(of(b)?.negated()?),
            _ => None,
        }
    }

    fn minus(self, other: Sum) -> Option<Sum> {
        let sum = Sum {
            query: self.query - other.query,
            key: self.key - other.key,
            query_length: self.query_length - other.query_length,
            key_length: self.key_length - other.key_length,
            constant: self.constant - other.constant,
        };
        let Sum { query, key, query_length, key_length, constant } = sum;
        let once = [query, key, query_length, key_length].iter().all(|it| it.abs() <= 1);
        (once && constant.abs() <= MOST_CONSTANT).then_some(sum)
    }

    fn negated(self) -> Option<Sum> {
        Sum::default().minus(self)
    }
}

/// A bound on the distance `key - position`.
#[derive(Clone, Copy)]
enum Bound {
    AtMost(i64),
    AtLeast(i64),
}

impl Function {
    /// Takes the bounds of a window out of a mask. `lengths` are the query and the key length where
    /// all sequences have the same.
    ///
    /// ```
    /// use flashcore_kernels::attention::function::Function;
    ///
    /// let local = Function::mask("local", |at| {
    ///     at.query().ge(at.key()) & (at.query() - at.key()).lt(1024)
    /// });
    /// let window = local.windowed(Some([4096, 4096]));
    /// assert_eq!((window.left, window.right, window.rest), (Some(1023), Some(0), None));
    /// ```
    pub fn windowed(&self, lengths: Option<[u32; 2]>) -> Windowed {
        let body = self.body();
        let mut found = Windowed { left: None, right: None, rest: Some(*self) };
        let small = lengths.is_none_or(|lengths| lengths.iter().all(|it| *it <= MOST_LENGTH));
        if body.kind != Kind::Mask || !small {
            return found;
        }
        let mut left = Vec::new();
        let mut open = vec![body.root];
        while let Some(id) = open.pop() {
            if let Node::Binary(Binary::And, a, b) = body.nodes[id as usize]
                && body.types[id as usize] == Type::Bool
            {
                open.extend([b, a]);
                continue;
            }
            match self.bounds(id, lengths) {
                Some(bounds) => bounds.iter().for_each(|bound| found.take(*bound)),
                None => left.push(id),
            }
        }
        if (found.left, found.right) != (None, None) {
            found.rest = self.of_conjuncts(&left);
        }
        found
    }

    /// Returns the conjunction of these nodes as a mask with the same tensors in the same order.
    fn of_conjuncts(&self, conjuncts: &[Id]) -> Option<Function> {
        let body = self.body();
        let mut nodes = body.nodes.clone();
        let mut push = |node: Node| {
            nodes.push(node);
            nodes.len() as Id - 1
        };
        let all = conjuncts.iter().copied().reduce(|a, b| push(Node::Binary(Binary::And, a, b)));
        let root = match all {
            Some(root) => root,
            None if body.tensors.is_empty() => return None,
            None => push(Node::Constant(Constant::Bool(true))),
        };
        let (name, tensors) = (body.name.clone(), body.tensors.clone());
        Some(Function::intern(Kind::Mask, name, tensors, &nodes, root))
    }

    /// Returns the bounds that a conjunct states, or `None` if it states anything else, or bounds
    /// that a window cannot have.
    fn bounds(&self, id: Id, lengths: Option<[u32; 2]>) -> Option<Vec<Bound>> {
        let nodes = &self.body().nodes;
        let (id, negated) = match nodes[id as usize] {
            Node::Unary(Unary::Not, inner) => (inner, true),
            _ => (id, false),
        };
        let Node::Compare(comparison, a, b) = nodes[id as usize] else { return None };
        let comparison = if negated { opposite(comparison)? } else { comparison };
        // Rewrites every comparison as "a sum is at most zero".
        let (small, large, strict) = match comparison {
            Comparison::Less => (a, b, 1),
            Comparison::AtMost => (a, b, 0),
            Comparison::Greater => (b, a, 1),
            Comparison::AtLeast => (b, a, 0),
            Comparison::Equal | Comparison::NotEqual => return None,
        };
        let strict = Sum { constant: -strict, ..Sum::default() };
        let large = Sum::of(nodes, large)?;
        let sums = match nodes[small as usize] {
            Node::Unary(Unary::Absolute, inner) => {
                let inner = Sum::of(nodes, inner)?;
                vec![inner, inner.negated()?]
            }
            _ => vec![Sum::of(nodes, small)?],
        };
        let bound = |sum: Sum| distance(sum.minus(large)?.minus(strict)?, lengths);
        sums.into_iter().map(bound).collect()
    }
}

/// Returns the bound on the distance that "this sum is at most zero" states.
fn distance(sum: Sum, lengths: Option<[u32; 2]>) -> Option<Bound> {
    // distance = key - query - (keys - queries)
    let sign = match (sum.query, sum.key) {
        (-1, 1) => 1,
        (1, -1) => -1,
        _ => return None,
    };
    let beyond = match (lengths, sum.query_length * sign, sum.key_length * sign) {
        (_, 1, -1) => 0,
        (Some([queries, keys]), queries_times, keys_times) => {
            let [queries, keys] = [queries, keys].map(i64::from);
            (queries_times - 1) * queries + (keys_times + 1) * keys
        }
        (None, ..) => return None,
    };
    // sign * (distance + beyond) + constant <= 0
    match sign {
        1 => Some(Bound::AtMost(-sum.constant - beyond)),
        _ => Some(Bound::AtLeast(sum.constant - beyond)),
    }
    .filter(|bound| match bound {
        Bound::AtMost(most) => (0..=MOST_CONSTANT).contains(most),
        Bound::AtLeast(least) => (-MOST_CONSTANT..=0).contains(least),
    })
}

impl Windowed {
    fn take(&mut self, bound: Bound) {
        let closer = |held: Option<u32>, new: i64| {
            Some(held.map_or(new as u32, |held| held.min(new as u32)))
        };
        match bound {
            Bound::AtMost(most) => self.right = closer(self.right, most),
            Bound::AtLeast(least) => self.left = closer(self.left, -least),
        }
    }
}

fn opposite(comparison: Comparison) -> Option<Comparison> {
    match comparison {
        Comparison::Less => Some(Comparison::AtLeast),
        Comparison::AtMost => Some(Comparison::Greater),
        Comparison::Greater => Some(Comparison::AtMost),
        Comparison::AtLeast => Some(Comparison::Less),
        Comparison::Equal | Comparison::NotEqual => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Here, HostTensor, Row};
    use super::*;

    /// The window and the rest see what the mask sees, pair by pair.
    fn check(mask: Function, [queries, keys]: [u32; 2], lengths: Option<[u32; 2]>) -> Windowed {
        let found = mask.windowed(lengths);
        let ids: Vec<i32> = (0..40).map(|it| it / 7).collect();
        let ids = [HostTensor::integers("ids", &ids, &[40])];
        for query in 0..queries as i32 {
            let (query_length, key_length) = (queries as i32, keys as i32);
            let here = Here { batch: 0, head: 0, query, query_length, key_length };
            let mut whole = Row::new(mask, &ids, here);
            let mut rest = found.rest.map(|rest| Row::new(rest, &ids, here));
            for key in 0..keys as i32 {
                let distance = i64::from(key) - i64::from(query + key_length - query_length);
                let within = found.left.is_none_or(|left| distance >= -i64::from(left))
                    && found.right.is_none_or(|right| distance <= i64::from(right));
                let split = within && rest.as_mut().is_none_or(|rest| rest.sees(key as usize));
                assert_eq!(split, whole.sees(key as usize), "{mask}: {query}, {key}");
            }
        }
        found
    }

    #[test]
    fn bounds_of_the_distance_are_windows() {
        let function = |name: &str| -> Function {
            let text = match name {
                "causal" => "(mask causal (ge query key))",
                "window" => "(mask window (and (le key query) (lt (sub query key) 9)))",
                "near" => "(mask near (le (abs (sub query key)) 5))",
                "position" => {
                    "(mask position (not (gt key (add query (sub key_length query_length)))))"
                }
                "shifted" => "(mask shifted (lt (sub key 3) query))",
                _ => {
                    "(mask documents (tensor ids i32 1) (and (and (ge query key) (lt key 11)) \
                     (eq (load ids query) (load ids key))))"
                }
            };
            text.parse().unwrap()
        };
        let bounds = |it: Windowed| (it.left, it.right, it.rest.is_some());
        for lengths in [[20, 20], [13, 20]] {
            let offset = lengths[1] - lengths[0];
            let split = |name| bounds(check(function(name), lengths, Some(lengths)));
            let apart = |name| bounds(check(function(name), lengths, None));
            if offset == 0 {
                assert_eq!(split("causal"), (None, Some(0), false));
                assert_eq!(split("window"), (Some(8), Some(0), false));
                assert_eq!(split("near"), (Some(5), Some(5), false));
                assert_eq!(split("shifted"), (None, Some(2), false));
                assert_eq!(split("documents"), (None, Some(0), true));
            } else {
                // The position is beyond the query by the difference of the lengths.
                assert_eq!(split("causal"), (None, None, true));
                assert_eq!(split("window"), (Some(15), None, true));
            }
            assert_eq!(split("position"), (None, Some(0), false));
            assert_eq!(apart("position"), (None, Some(0), false));
            assert_eq!(apart("causal"), (None, None, true));
        }
    }

    #[test]
    fn other_masks_stay_functions() {
        for text in [
            "(mask a (or (ge query key) (lt key 4)))",
            "(mask a (eq query key))",
            "(mask a (ge (mul 2 query) key))",
            "(mask a (ge (add query query) key))",
            "(mask a (ge (sub query 2147483647) key))",
            "(mask a (ge query (rem key 7)))",
            "(mask a (lt key 4))",
            "(mask a true)",
        ] {
            let mask: Function = text.parse().unwrap();
            let found = check(mask, [9, 9], Some([9, 9]));
            assert_eq!(found, Windowed { left: None, right: None, rest: Some(mask) }, "{text}");
        }
    }
}
