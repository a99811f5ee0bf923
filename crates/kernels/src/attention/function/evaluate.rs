//! Evaluates a function on the host for one query and one key, with floats in `f64`.

use std::fmt;

use super::Function;
use super::node::{Binary, Comparison, Constant, Kind, Node, Stored, Symbol, TensorSpec, Unary};

/// A tensor in host memory, for functions that load from it.
///
/// ```
/// use flashcore_kernels::attention::function::HostTensor;
///
/// let table = HostTensor::floats("bias", &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], &[2, 3]);
/// // The same for every first index.
/// let row = HostTensor::floats("bias", &[0.0, 1.0, 2.0], &[2, 3]).with_strides(&[0, 1]);
/// assert_ne!(table, row);
/// ```
#[derive(Clone, PartialEq)]
pub struct HostTensor {
    /// The name by which functions load from it.
    pub name: String,
    /// The element type.
    pub stored: Stored,
    /// The extent of each dimension.
    pub extents: Vec<usize>,
    /// The stride of each dimension, in elements.
    pub strides: Vec<usize>,
    /// The elements in memory, little-endian.
    pub bytes: Vec<u8>,
}

impl fmt::Debug for HostTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HostTensor { name, stored, extents, strides, .. } = self;
        write!(f, "{name}: {} {extents:?} by {strides:?}", stored.name())
    }
}

impl HostTensor {
    /// Takes contiguous elements as bytes.
    pub fn new(name: &str, stored: Stored, extents: &[usize], bytes: Vec<u8>) -> Self {
        let inner = |dimension: usize| extents[dimension + 1..].iter().product();
        let strides = (0..extents.len()).map(inner).collect();
        HostTensor { name: name.to_owned(), stored, extents: extents.to_vec(), strides, bytes }
    }

    /// Takes contiguous `f32` elements.
    pub fn floats(name: &str, values: &[f32], extents: &[usize]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        HostTensor::new(name, Stored::F32, extents, bytes)
    }

    /// Takes contiguous `i32` elements.
    pub fn integers(name: &str, values: &[i32], extents: &[usize]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        HostTensor::new(name, Stored::I32, extents, bytes)
    }

    /// Takes contiguous boolean elements.
    pub fn truths(name: &str, values: &[bool], extents: &[usize]) -> Self {
        let bytes = values.iter().map(|value| u8::from(*value)).collect();
        HostTensor::new(name, Stored::Bool, extents, bytes)
    }

    /// Returns the same memory with other strides.
    pub fn with_strides(self, strides: &[usize]) -> Self {
        HostTensor { strides: strides.to_vec(), ..self }
    }

    /// Returns why a function with this declaration cannot load from the tensor, if it cannot.
    pub fn fault(&self, spec: &TensorSpec) -> Option<String> {
        let TensorSpec { name, stored, rank } = spec;
        if self.stored != *stored {
            let (given, expected) = (self.stored.name(), stored.name());
            return Some(format!("tensor {name} is made of {given}, expected {expected}"));
        }
        if self.extents.len() != *rank || self.strides.len() != *rank {
            let given = self.extents.len();
            return Some(format!("tensor {name} has {given} dimensions, expected {rank}"));
        }
        // Kernels load at a clamped index and then check whether the requested one is inside.
        if self.extents.contains(&0) {
            return Some(format!("tensor {name} is empty"));
        }
        if self.extents.iter().any(|extent| i32::try_from(*extent).is_err()) {
            return Some(format!("tensor {name} has a dimension beyond 32 bits"));
        }
        let mut steps = self.extents.iter().zip(&self.strides);
        let last = steps.try_fold(0usize, |sum, (extent, stride)| {
            sum.checked_add((extent - 1).checked_mul(*stride)?)
        });
        let end = last.and_then(|last| last.checked_add(1)?.checked_mul(stored.bytes()));
        match end.is_some_and(|end| end <= self.bytes.len()) {
            true => None,
            false => Some(format!("tensor {name} reaches beyond its memory")),
        }
    }

    /// Returns the bytes of an element, if the indices are inside of the tensor.
    pub(super) fn element(&self, indices: impl Iterator<Item = i32>) -> Option<&[u8]> {
        let mut offset = 0;
        for ((index, extent), stride) in indices.zip(&self.extents).zip(&self.strides) {
            let index = usize::try_from(index).ok().filter(|index| index < extent)?;
            offset += index * stride;
        }
        self.bytes.get(offset * self.stored.bytes()..)?.get(..self.stored.bytes())
    }
}

/// The place of a row of scores: everything but the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Here {
    /// The index of the sequence.
    pub batch: i32,
    /// The index of the query head.
    pub head: i32,
    /// The index of the query in its sequence.
    pub query: i32,
    /// The number of queries of the sequence.
    pub query_length: i32,
    /// The number of keys of the sequence.
    pub key_length: i32,
}

/// The value of a node.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value {
    Float(f64),
    Integer(i32),
    Bool(bool),
}

impl Value {
    fn float(self) -> f64 {
        match self {
            Value::Float(value) => value,
            _ => unreachable!("types were checked"),
        }
    }

    fn integer(self) -> i32 {
        match self {
            Value::Integer(value) => value,
            _ => unreachable!("types were checked"),
        }
    }

    fn boolean(self) -> bool {
        match self {
            Value::Bool(value) => value,
            _ => unreachable!("types were checked"),
        }
    }
}

/// Evaluates a function along the keys of one row: what does not depend on the key is computed
/// once.
#[derive(Debug, Clone)]
pub struct Row<'a> {
    function: Function,
    tensors: Vec<&'a HostTensor>,
    here: Here,
    values: Vec<Value>,
    /// The nodes that depend on the key or the score.
    changing: Vec<u32>,
}

impl<'a> Row<'a> {
    /// Prepares the row of a query. `tensors` must contain those of [`Function::tensors`], without
    /// a [fault](HostTensor::fault).
    ///
    /// # Panics
    ///
    /// If a tensor is missing.
    pub fn new(function: Function, tensors: &'a [HostTensor], here: Here) -> Self {
        let named = |spec: &TensorSpec| {
            let found = tensors.iter().find(|tensor| tensor.name == spec.name);
            found.unwrap_or_else(|| panic!("there is no tensor {}", spec.name))
        };
        let tensors = function.tensors().iter().map(named).collect();
        let nodes = &function.body().nodes;
        let mut changes: Vec<bool> = Vec::new();
        for node in nodes {
            let leaf = matches!(node, Node::Symbol(Symbol::Key | Symbol::Score));
            changes.push(leaf || node.inputs().iter().any(|input| changes[*input as usize]));
        }
        let changing = (0..nodes.len() as u32).filter(|id| changes[*id as usize]).collect();
        let values = vec![Value::Bool(false); nodes.len()];
        let mut row = Row { function, tensors, here, values, changing };
        for id in (0..nodes.len()).filter(|id| !changes[*id]) {
            row.values[id] = row.evaluate(&nodes[id], 0, 0.0);
        }
        row
    }

    /// Returns whether the query sees a key; of masks.
    pub fn sees(&mut self, key: usize) -> bool {
        debug_assert_eq!(self.function.kind(), Kind::Mask);
        self.at(key, 0.0).boolean()
    }

    /// Returns what a score becomes; of score functions.
    pub fn score(&mut self, key: usize, score: f64) -> f64 {
        debug_assert_eq!(self.function.kind(), Kind::Score);
        self.at(key, score).float()
    }

    fn at(&mut self, key: usize, score: f64) -> Value {
        let body = self.function.body();
        for index in 0..self.changing.len() {
            let id = self.changing[index] as usize;
            self.values[id] = self.evaluate(&body.nodes[id], key as i32, score);
        }
        self.values[body.root as usize]
    }

    fn evaluate(&self, node: &Node, key: i32, score: f64) -> Value {
        use Value::{Bool, Float, Integer};
        let of = |id: u32| self.values[id as usize];
        match node {
            Node::Symbol(Symbol::Score) => Float(score),
            Node::Symbol(symbol) => Integer(match symbol {
                Symbol::Batch => self.here.batch,
                Symbol::Head => self.here.head,
                Symbol::Query => self.here.query,
                Symbol::QueryLength => self.here.query_length,
                Symbol::KeyLength => self.here.key_length,
                _ => key,
            }),
            Node::Constant(Constant::F32(bits)) => Float(f32::from_bits(*bits).into()),
            Node::Constant(Constant::I32(value)) => Integer(*value),
            Node::Constant(Constant::Bool(value)) => Bool(*value),
            Node::Unary(operation, a) => unary(*operation, of(*a)),
            Node::Binary(operation, a, b) => match (of(*a), of(*b)) {
                (Float(a), Float(b)) => Float(float_binary(*operation, a, b)),
                (Integer(a), Integer(b)) => Integer(integer_binary(*operation, a, b)),
                (a, b) => Bool(match operation {
                    Binary::And => a.boolean() & b.boolean(),
                    Binary::Or => a.boolean() | b.boolean(),
                    _ => a.boolean() ^ b.boolean(),
                }),
            },
            Node::Compare(comparison, a, b) => Bool(match (of(*a), of(*b)) {
                (Float(a), Float(b)) => compare(*comparison, a, b),
                (a, b) => compare(*comparison, a.integer(), b.integer()),
            }),
            Node::Select(condition, a, b) => {
                if of(*condition).boolean() {
                    of(*a)
                } else {
                    of(*b)
                }
            }
            Node::Load(tensor, indices) => {
                let tensor = self.tensors[*tensor as usize];
                let indices = indices.iter().map(|index| of(*index).integer());
                load(tensor.stored, tensor.element(indices))
            }
        }
    }
}

fn unary(operation: Unary, a: Value) -> Value {
    let float = |of: fn(f64) -> f64| Value::Float(of(a.float()));
    match (operation, a) {
        (Unary::Negate, Value::Integer(a)) => Value::Integer(a.wrapping_neg()),
        (Unary::Absolute, Value::Integer(a)) => Value::Integer(a.wrapping_abs()),
        (Unary::Not, Value::Integer(a)) => Value::Integer(!a),
        (Unary::Not, a) => Value::Bool(!a.boolean()),
        (Unary::Negate, _) => float(|a| -a),
        (Unary::Absolute, _) => float(f64::abs),
        (Unary::Tanh, _) => float(f64::tanh),
        (Unary::Exp2, _) => float(f64::exp2),
        (Unary::Log2, _) => float(f64::log2),
        (Unary::ToFloat, a) => Value::Float(a.integer().into()),
        (Unary::ToInteger, a) => Value::Integer(a.float() as i32),
    }
}

fn float_binary(operation: Binary, a: f64, b: f64) -> f64 {
    match operation {
        Binary::Add => a + b,
        Binary::Subtract => a - b,
        Binary::Multiply => a * b,
        Binary::Divide => a / b,
        Binary::Minimum => a.min(b),
        Binary::Maximum => a.max(b),
        _ => unreachable!("types were checked"),
    }
}

/// Computes an integer operation as the language defines it.
pub(super) fn integer_binary(operation: Binary, a: i32, b: i32) -> i32 {
    match operation {
        Binary::Add => a.wrapping_add(b),
        Binary::Subtract => a.wrapping_sub(b),
        Binary::Multiply => a.wrapping_mul(b),
        Binary::Divide => floor_divide(a, b).0,
        Binary::Remainder => floor_divide(a, b).1,
        Binary::Minimum => a.min(b),
        Binary::Maximum => a.max(b),
        Binary::And => a & b,
        Binary::Or => a | b,
        Binary::Xor => a ^ b,
        Binary::ShiftLeft => a.wrapping_shl(b as u32),
        Binary::ShiftRight => a.wrapping_shr(b as u32),
    }
}

/// Returns the quotient rounded down, and the remainder.
fn floor_divide(a: i32, b: i32) -> (i32, i32) {
    if b == 0 {
        return (0, a);
    }
    let (quotient, rest) = (a.wrapping_div(b), a.wrapping_rem(b));
    match rest != 0 && (rest < 0) != (b < 0) {
        true => (quotient - 1, rest + b),
        false => (quotient, rest),
    }
}

fn compare<T: PartialOrd>(comparison: Comparison, a: T, b: T) -> bool {
    match comparison {
        Comparison::Equal => a == b,
        Comparison::NotEqual => a != b,
        Comparison::Less => a < b,
        Comparison::AtMost => a <= b,
        Comparison::Greater => a > b,
        Comparison::AtLeast => a >= b,
    }
}

/// Returns the result of a load from an element's bytes; `None`, outside of the tensor, is zero.
pub(super) fn load(stored: Stored, bytes: Option<&[u8]>) -> Value {
    let byte = |index: usize| bytes.map_or(0, |bytes| bytes[index]);
    let half = || u16::from_le_bytes([byte(0), byte(1)]);
    let word = || u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)]);
    match stored {
        Stored::F32 => Value::Float(f32::from_bits(word()).into()),
        Stored::BF16 => Value::Float(f32::from_bits(u32::from(half()) << 16).into()),
        Stored::F16 => Value::Float(from_f16(half()).into()),
        Stored::I32 | Stored::I64 => Value::Integer(word() as i32),
        Stored::U8 => Value::Integer(byte(0).into()),
        Stored::Bool => Value::Bool(byte(0) != 0),
    }
}

/// Converts the bits of a half-precision float.
fn from_f16(bits: u16) -> f32 {
    let (exponent, fraction) = ((bits >> 10) & 0x1f, u32::from(bits & 0x3ff));
    let magnitude = match exponent {
        0 => fraction as f32 * (1.0 / 16_777_216.0),
        0x1f => f32::from_bits(0x7f80_0000 | (fraction << 13)),
        _ => f32::from_bits(((u32::from(exponent) + 112) << 23) | (fraction << 13)),
    };
    if bits >> 15 == 1 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Here = Here { batch: 1, head: 2, query: 5, query_length: 8, key_length: 10 };

    fn sees(function: Function, tensors: &[HostTensor], keys: usize) -> Vec<usize> {
        let mut row = Row::new(function, tensors, HERE);
        (0..keys).filter(|key| row.sees(*key)).collect()
    }

    #[test]
    fn a_mask_says_which_keys_are_seen() {
        let causal = Function::mask("causal", |at| at.query().ge(at.key()));
        assert_eq!(sees(causal, &[], 10), [0, 1, 2, 3, 4, 5]);
        let at_the_end = Function::mask("position", |at| at.position().eq(at.key()));
        assert_eq!(sees(at_the_end, &[], 10), [7]);
        let chunks = Function::mask("chunks", |at| (at.key() / 4).eq(at.query() / 4));
        assert_eq!(sees(chunks, &[], 10), [4, 5, 6, 7]);
    }

    #[test]
    fn loads_are_zero_outside() {
        let ids = HostTensor::integers("ids", &[7, 7, 7, 0, 7, 0], &[6]);
        let function = Function::mask("same", |at| {
            let ids = at.integers("ids");
            ids.load([at.query()]).eq(ids.load([at.key() - 1]))
        });
        // Query 5 has id 0, and so have loads before the first and behind the last element.
        assert_eq!(sees(function, &[ids], 10), [0, 4, 6, 7, 8, 9]);
    }

    #[test]
    fn scores_are_changed_with_tensors_of_any_strides() {
        let bias =
            |stored, bytes| HostTensor::new("bias", stored, &[3, 4], bytes).with_strides(&[0, 2]);
        let floats: Vec<f32> = (0..8).map(|it| it as f32 * 0.5).collect();
        let single = floats.iter().flat_map(|it| it.to_le_bytes()).collect();
        let upper = floats.iter().flat_map(|it| ((it.to_bits() >> 16) as u16).to_le_bytes());
        // 0, 0.5, 1, ... in half precision.
        let halves = [0, 0x3800, 0x3c00, 0x3e00, 0x4000, 0x4100, 0x4200, 0x4300u16];
        let half = halves.into_iter().flat_map(u16::to_le_bytes).collect();
        for (stored, bytes) in
            [(Stored::F32, single), (Stored::BF16, upper.collect()), (Stored::F16, half)]
        {
            let function = Function::score("biased", |score, at| {
                score + at.floats("bias").stored(stored).load([at.head(), at.key()])
            });
            let tensors = [bias(stored, bytes)];
            assert_eq!(tensors[0].fault(&function.tensors()[0]), None);
            let mut row = Row::new(function, &tensors, HERE);
            let scores: Vec<f64> = (0..5).map(|key| row.score(key, 10.0)).collect();
            assert_eq!(scores, [10.0, 11.0, 12.0, 13.0, 10.0]);
        }
    }

    #[test]
    fn integers_are_divided_downwards_and_by_zero() {
        for (a, b, quotient, rest) in [
            (7, 3, 2, 1),
            (-7, 3, -3, 2),
            (7, -3, -3, -2),
            (-7, -3, 2, -1),
            (6, -3, -2, 0),
            (5, 0, 0, 5),
            (i32::MIN, -1, i32::MIN, 0),
            (i32::MIN, 0, 0, i32::MIN),
        ] {
            assert_eq!(floor_divide(a, b), (quotient, rest), "{a} by {b}");
        }
    }

    #[test]
    fn tensors_that_do_not_answer_are_refused() {
        let spec = TensorSpec { name: "x".to_owned(), stored: Stored::I32, rank: 2 };
        let good = HostTensor::integers("x", &[0; 6], &[2, 3]);
        assert_eq!(good.fault(&spec), None);
        let fault = |tensor: HostTensor| tensor.fault(&spec).unwrap();
        assert_eq!(
            fault(HostTensor::floats("x", &[0.0; 6], &[2, 3])),
            "tensor x is made of f32, expected i32"
        );
        assert_eq!(
            fault(HostTensor::integers("x", &[0; 6], &[6])),
            "tensor x has 1 dimensions, expected 2"
        );
        assert_eq!(fault(HostTensor::integers("x", &[], &[0, 3])), "tensor x is empty");
        assert_eq!(fault(good.clone().with_strides(&[4, 1])), "tensor x reaches beyond its memory");
        assert_eq!(
            fault(good.with_strides(&[usize::MAX, 1])),
            "tensor x reaches beyond its memory"
        );
    }
}
