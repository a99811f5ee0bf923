//! Ready-made mask and score functions, a few lines each. What differs from call to call is loaded
//! from tensors, by the names that each rule states. Tensors of four dimensions are (batch, head,
//! query, key); a stride of zero shares one element along a dimension.
//!
//! ```
//! use flashcore_kernels::attention::function::rules;
//!
//! let mask = rules::documents().and(rules::chunked(512))?;
//! assert_eq!(mask.name(), "documents-and-chunked");
//! let score = rules::softcap(30.0).then(rules::alibi())?;
//! assert_eq!(score.tensors()[0].name, "slopes");
//! # Ok::<(), String>(())
//! ```

use super::node::Stored;
use super::{At, Function, Traced};

/// A query sees the keys up to its position.
pub fn causal() -> Function {
    Function::mask("causal", |at| at.key().le(at.position()))
}

/// A query sees the key at its position and `keys_before` keys before it.
pub fn window(keys_before: i32) -> Function {
    Function::mask("window", |at| {
        let before = at.position() - at.key();
        before.ge(0) & before.le(keys_before)
    })
}

/// Prefix-LM: every query sees the first `length` keys, and those up to its position.
pub fn prefix(length: i32) -> Function {
    Function::mask("prefix", |at| at.key().lt(length) | at.key().le(at.position()))
}

/// Prefix-LM with a length for each sequence: `prefixes`, i32, (batch).
pub fn prefixes() -> Function {
    Function::mask("prefixes", |at| {
        let length = at.integers("prefixes").load([at.batch()]);
        at.key().lt(length) | at.key().le(at.position())
    })
}

/// Documents packed into a sequence, by the document id of each position: `ids`, i32, (batch, key).
pub fn documents() -> Function {
    Function::mask("documents", |at| {
        let ids = at.integers("ids");
        ids.load([at.batch(), at.position()]).eq(ids.load([at.batch(), at.key()]))
    })
}

/// Documents packed into a sequence, by the first key of each position's document: `starts`, i32,
/// (batch, key). Keys after the position are hidden as well.
pub fn documents_by_starts() -> Function {
    Function::mask("documents_by_starts", |at| {
        let start = at.integers("starts").load([at.batch(), at.position()]);
        at.key().ge(start) & at.key().le(at.position())
    })
}

/// A query sees the keys of its own chunk of `positions` positions.
pub fn chunked(positions: i32) -> Function {
    Function::mask("chunked", |at| (at.key() / positions).eq(at.position() / positions))
}

/// A query sees every `step`th key, counted from its position.
pub fn dilated(step: i32) -> Function {
    Function::mask("dilated", |at| ((at.position() - at.key()) % step).eq(0))
}

/// Speculative decoding: a tree of tokens that are not accepted yet. All keys before the last
/// `query_length` are seen, and of these last ones those whose bit is set. `tree`, u8, (batch,
/// byte): the bits of a sequence, in rows of `query_length`, the lowest bit of a byte first.
pub fn tree() -> Function {
    Function::mask("tree", |at| {
        let among = at.key() - (at.key_length() - at.query_length());
        let bit = at.query() * at.query_length() + among;
        let byte = at.integers("tree").stored(Stored::U8).load([at.batch(), bit / 8]);
        among.lt(0) | ((byte >> (bit % 8)) & 1).ne(0)
    })
}

/// Any mask as a tensor: `seen`, bool, (batch, head, query, key).
pub fn seen() -> Function {
    Function::mask("seen", |at| at.truths("seen").load(everywhere(at)))
}

/// A block-sparse pattern with blocks of `size` queries and keys: those whose byte is not zero are
/// seen. `blocks`, u8, (batch, head, query block, key block). `apart` says whether sequences, and
/// whether heads, have patterns of their own. [`BlockPattern`](super::BlockPattern) makes the
/// tensor.
pub fn blocks(size: [i32; 2], apart: [bool; 2]) -> Function {
    Function::mask("blocks", |at| block(at, size, apart).ge(1))
}

/// The same for blocks whose byte is two or more.
pub fn whole_blocks(size: [i32; 2], apart: [bool; 2]) -> Function {
    Function::mask("whole_blocks", |at| block(at, size, apart).ge(2))
}

fn block<'t>(at: At<'t>, [rows, columns]: [i32; 2], apart: [bool; 2]) -> Traced<'t, i32> {
    let own = |place: Traced<'t, i32>, apart: bool| if apart { place } else { at.integer(0) };
    let place = [own(at.batch(), apart[0]), own(at.head(), apart[1])];
    let states = at.integers("blocks").stored(Stored::U8);
    states.load([place[0], place[1], at.query() / rows, at.key() / columns])
}

/// T5's relative positions: adds the bias of a head and a bucket of distances. `buckets`, f32,
/// (bucket, head). Distances beyond `most` share the last bucket. With `both_directions`, half of
/// the buckets are for keys after the position; otherwise such keys have distance zero.
pub fn t5(buckets: i32, most: i32, both_directions: bool) -> Function {
    Function::score("t5", |score, at| {
        let after = at.key() - at.position();
        let own = if both_directions { buckets / 2 } else { buckets };
        let distance = if both_directions { after.abs() } else { (-after).max(0) };
        let exact = own / 2;
        // Beyond the exact buckets, bucket sizes grow geometrically: counts those that have begun.
        let begun = t5_begins(exact, own, most).into_iter();
        let larger =
            begun.fold(at.integer(exact), |bucket, from| bucket + distance.ge(from).to_i32());
        let bucket = distance.lt(exact).select(distance, larger);
        let bucket = match both_directions {
            true => bucket + after.gt(0).select(at.integer(own), 0),
            false => bucket,
        };
        score + at.floats("buckets").load([bucket, at.head()])
    })
}

/// Returns the distances at which the buckets after the first inexact one begin.
fn t5_begins(exact: i32, buckets: i32, most: i32) -> Vec<i32> {
    let inexact = f64::from(buckets - exact);
    let bucket = |distance: i32| {
        let share = (f64::from(distance) / f64::from(exact.max(1))).ln()
            / (f64::from(most) / f64::from(exact.max(1))).ln();
        // Whole numbers must not be rounded down.
        (share * inexact + 1e-9) as i32
    };
    let begin = |number: i32| (exact..=most).find(|distance| bucket(*distance) >= number);
    (1..buckets - exact).filter_map(begin).collect()
}

/// ALiBi: scores decrease with the distance, by a slope for each head: `slopes`, f32, (head).
pub fn alibi() -> Function {
    Function::score("alibi", |score, at| {
        let distance = (at.position() - at.key()).abs().to_f32();
        score - at.floats("slopes").load([at.head()]) * distance
    })
}

/// Softcap: scores are limited to between `-cap` and `cap`.
pub fn softcap(cap: f32) -> Function {
    Function::score("softcap", |score, _| cap * (score / cap).tanh())
}

/// Adds a bias: `bias`, of element type `stored`, (batch, head, query, key).
///
/// # Panics
///
/// If `stored` is not a float type.
pub fn bias(stored: Stored) -> Function {
    Function::score("bias", |score, at| {
        score + at.floats("bias").stored(stored).load(everywhere(at))
    })
}

/// Multiplies scores by a factor for each head: `temperatures`, f32, (head).
pub fn temperatures() -> Function {
    Function::score("temperatures", |score, at| score * at.floats("temperatures").load([at.head()]))
}

fn everywhere(at: At<'_>) -> [Traced<'_, i32>; 4] {
    [at.batch(), at.head(), at.query(), at.key()]
}

#[cfg(test)]
mod tests {
    use super::super::{Here, HostTensor, Row};
    use super::*;

    /// The bucket of a distance as the paper's code computes it.
    fn t5_bucket(after: i32, buckets: i32, most: i32, both_directions: bool) -> usize {
        let own = if both_directions { buckets / 2 } else { buckets };
        let base = if both_directions && after > 0 { own } else { 0 };
        let distance = if both_directions { after.abs() } else { (-after).max(0) };
        let exact = own / 2;
        if distance < exact {
            return (base + distance) as usize;
        }
        let [distance, exact_buckets, most] = [distance, exact, most].map(f64::from);
        let share = (distance / exact_buckets).ln() / (most / exact_buckets).ln();
        let larger = exact + (share * f64::from(own - exact) + 1e-9) as i32;
        (base + larger.min(own - 1)) as usize
    }

    #[test]
    fn t5_has_the_buckets_of_the_paper() {
        for (buckets, most, both_directions) in
            [(32, 128, true), (32, 128, false), (8, 40, true), (6, 9, false)]
        {
            let biases: Vec<f32> = (0..buckets).map(|it| it as f32).collect();
            let tensors = [HostTensor::floats("buckets", &biases, &[buckets as usize, 1])];
            let function = t5(buckets, most, both_directions);
            for query in [0, 7, 150, 299] {
                let here = Here { batch: 0, head: 0, query, query_length: 300, key_length: 300 };
                let mut row = Row::new(function, &tensors, here);
                for key in 0..300 {
                    let expected = t5_bucket(key - query, buckets, most, both_directions);
                    assert_eq!(row.score(key as usize, 0.0), expected as f64, "{}", key - query);
                }
            }
        }
    }

    /// The prefix is seen, and of the last tokens what the bits say.
    #[test]
    fn a_tree_is_read_bit_by_bit() {
        let seen = [[1, 0, 0], [1, 1, 0], [1, 0, 1]];
        let bits: Vec<u8> = seen.concat();
        let bytes = bits
            .chunks(8)
            .map(|bits| bits.iter().enumerate().fold(0, |byte, (index, bit)| byte | bit << index));
        let tensors = [HostTensor::new("tree", Stored::U8, &[1, 2], bytes.collect())];
        for (query, row) in seen.iter().enumerate() {
            let here =
                Here { batch: 0, head: 0, query: query as i32, query_length: 3, key_length: 8 };
            let mut found = Row::new(tree(), &tensors, here);
            let expected: Vec<bool> =
                [true; 5].into_iter().chain(row.iter().map(|bit| *bit == 1)).collect();
            assert_eq!((0..8).map(|key| found.sees(key)).collect::<Vec<_>>(), expected);
        }
    }
}
