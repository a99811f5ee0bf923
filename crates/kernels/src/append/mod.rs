//! Appends new keys and values to a KV cache, with rotary embeddings of the keys; in the same
//! launch, rotates the queries that will attend to them.
//!
//! Each warp takes one row: a new token of a sequence and a key head, or a query and a query head.
//! Lengths and tables are read on the device; rows beyond the cache are not written.
//!
//! In an 8-bit cache a row is rounded once, after it is rotated and multiplied by the reciprocal of
//! its scale. Per-token scales are computed here: the largest magnitude of the row over the largest
//! number of the 8-bit type.

mod narrow;

use ptx::{
    Builder, Capability, Element, Expression, F32, GlobalAddress, Pred, Program, Reg, S32, Target,
    U32, U64,
};

use crate::attention::sequences::{Places, Span, clamp, entry_of, search};
use crate::cache::{Cache, ScaleSource};
use crate::dependent_launch::wait_for_earlier_grids;
use crate::divisor::DivisorRegisters;
use crate::element::{load_as_f32, store_from_f32};
use crate::parameter::{List, Number, Tensor};
use crate::strides::Strided;
use crate::{Error, build, first_fault, is_16_bit};

/// Rows per block, one for each of its warps.
pub const ROWS: u32 = 4;

/// The configuration of the append kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Append {
    /// The target architecture.
    pub target: Target,
    /// The element of new keys and values and of queries: `F16` or `BF16`.
    pub element: Element,
    /// The element and scales of the cache: the same element, or one of 8 bits.
    pub cache: Cache,
    /// Head dim of keys: even.
    pub head_dim: u32,
    /// Head dim of values: even.
    pub value_head_dim: u32,
    /// Whether the cache is in pages.
    pub paged: bool,
    /// The rotary embedding of keys and queries.
    pub rotary: Option<Rotary>,
}

/// Rotary embedding: pairs of columns are rotated by an angle that grows with the position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rotary {
    /// Number of leading columns that are rotated; the others are copied. Even.
    pub dim: u32,
    /// Whether pairs are neighbouring columns (interleaved); otherwise column `i` is paired with
    /// column `dim / 2 + i`.
    pub interleaved: bool,
}

impl Append {
    /// Returns the name of this configuration.
    pub fn name(&self) -> String {
        let Append { element, head_dim, value_head_dim, .. } = self;
        let paged = if self.paged { "_paged" } else { "" };
        let rotary = self.rotary.map_or(String::new(), |Rotary { dim, interleaved }| {
            format!("_rotary{dim}{}", if interleaved { "i" } else { "" })
        });
        let cache = self.cache.suffix(self.element);
        format!("append_{element}{cache}_d{head_dim}x{value_head_dim}{paged}{rotary}")
    }

    /// Returns the threads per block.
    pub const fn threads(&self) -> u32 {
        32 * ROWS
    }

    /// Returns the blocks for so many rows, new and rotated ones.
    pub const fn blocks(&self, rows: u32) -> u32 {
        rows.div_ceil(ROWS)
    }

    /// Builds the kernel. Parameters by name ([`Parameter`](crate::Parameter)):
    ///
    /// | parameters | |
    /// | --- | --- |
    /// | `NewKey`, `NewValue` | addresses, with batch, row and head strides in elements |
    /// | `Key`, `Value` | the cache; with pages the batch stride is from page to page |
    /// | `KeyDescale`, `ValueDescale` | scales of 8-bit caches, as in [`Decode`](crate::Decode): read for each sequence and key head, or written for each token |
    /// | `AllNewRows` | new rows times key heads, at least one for each sequence: as many rows of each sequence as the most of any, or where they are packed, those of the tensor |
    /// | `Batch` | the number of sequences |
    /// | `KeyHeads`, `NewTokens` | [`Divisor`](crate::Divisor)s; `NewTokens` is the most new tokens of a sequence |
    /// | `NewRows` | rows of the tensors of new keys, which bound the starts |
    /// | `KeyLength` | positions that a sequence has room for |
    /// | `KeyLengths` | keys of each sequence before, or 0 |
    /// | `NewLengths` | new tokens of each sequence, or 0 |
    /// | `NewStarts` | where each sequence's new tokens begin and the last end, or 0 |
    /// | `LengthsAfter` | where the lengths with the new tokens go, or 0; not the memory of `KeyLengths` |
    /// | `BatchIndex`, `Entries`, `BlockTable`, `PageColumns`, `PageSize` | as in [`Decode`](crate::Decode) |
    ///
    /// and with rotary embeddings:
    ///
    /// | parameters | |
    /// | --- | --- |
    /// | `Cosines`, `Sines`, `RotaryPositions` | tables of `dim / 2` numbers for each position, in the tensors' element, and their number of positions |
    /// | `RotaryStarts` | the rotary position of each sequence's first new token, or 0: its length before |
    /// | `Query`, `RotatedQuery` | addresses with strides; may be the same memory |
    /// | `QueryHeads`, `QueryLength` | [`Divisor`](crate::Divisor)s; `QueryLength` is the most queries of a sequence |
    /// | `AllRotatedRows` | rows of queries, likewise, times query heads, or 0 |
    /// | `QueryRows`, `QueryStarts`, `QueryLengths` | as in [`Decode`](crate::Decode) |
    /// | `QueryStep` | 1 where the queries of a sequence have consecutive positions, 0 where all have the first |
    pub fn program(&self) -> Result<Program, Error> {
        let builder = |name| Builder::new(name, self.target, self.threads());
        build(self.name(), self.fault(), builder, |k| self.write(k))
    }

    /// Returns why this configuration is not supported, or `None` if it is.
    fn fault(&self) -> Option<&'static str> {
        let narrow = self.cache.is_8_bit();
        let wrong = |dim: u32| dim == 0 || !dim.is_multiple_of(2);
        first_fault([
            (!is_16_bit(self.element), "the element is not f16 or bf16"),
            (wrong(self.head_dim) || wrong(self.value_head_dim), "a head dimension is not even"),
            (
                self.rotary.is_some_and(|it| wrong(it.dim) || it.dim > self.head_dim),
                "the rotary dimension is not even or wider than the keys",
            ),
            (!self.target.has(Capability::AsyncCopies), "the target is older than decode"),
            (
                !narrow && self.cache != Cache::plain(self.element),
                "the cache has an element or scales of its own, and not 8 bits",
            ),
            (
                !self.cache.is_converted_by(self.target),
                "the target does not convert numbers of 8 bits",
            ),
            (
                // Columns are stored in pairs of neighbours.
                narrow
                    && self.rotary.is_some_and(|it| !it.interleaved && !it.dim.is_multiple_of(4)),
                "over 8 bits, halves of the rotary dimension are even",
            ),
        ])
    }

    fn write(&self, k: &mut Builder) {
        wait_for_earlier_grids(k);
        let [new_keys, new_values, keys, values] =
            [Tensor::NewKey, Tensor::NewValue, Tensor::Key, Tensor::Value]
                .map(|tensor| Strided::parameters(k, tensor));
        let scales = [
            ScaleSource::parameters(k, self.cache.key_scales, Tensor::KeyDescale),
            ScaleSource::parameters(k, self.cache.value_scales, Tensor::ValueDescale),
        ];
        let rows: Reg<U32> = Number::AllNewRows.read(k);
        let batch: Reg<U32> = Number::Batch.read(k);
        let new = Rows {
            heads: DivisorRegisters::parameters(k, Number::KeyHeads),
            most: DivisorRegisters::parameters(k, Number::NewTokens),
            rows: Number::NewRows.read(k),
            lengths: List::NewLengths.address(k),
            starts: List::NewStarts.address(k),
        };
        let before =
            Before { lengths: List::KeyLengths.address(k), capacity: Number::KeyLength.read(k) };
        let after: Reg<GlobalAddress> = List::LengthsAfter.address(k);
        let places = Places::parameters(k, self.paged);
        let angles = self.rotary.map(|rotary| RotaryRegisters::parameters(k, rotary));
        let queries = self.rotary.map(|_| Queries::parameters(k));

        let (block, thread) = (k.block_index(), k.thread_index());
        let index = k.eval(block * ROWS + thread / 32);
        k.if_(index.less(rows), |k| {
            let Row { head, sequence, token, source, exists } = new.find(k, index, batch);
            let length = before.length(k, sequence);
            let position = k.eval(length + token);
            k.if_(exists & position.less(before.capacity), |k| {
                let entry = places.entry(k, sequence);
                let (entry, row) = places.locate(k, entry, position);
                let (from, to) = ([sequence, source, head], [entry, row, head]);
                let ends = |k: &mut Builder, from_tensor: &Strided, to_tensor: &Strided| {
                    let from = from_tensor.row(k, self.element, from);
                    [from, to_tensor.row(k, self.cache.element, to)]
                };
                let key = ends(k, &new_keys, &keys);
                let value = ends(k, &new_values, &values);
                let rotated = angles.as_ref().map(|angles| {
                    let start = angles.start(k, sequence, length);
                    (angles, k.eval(start + token))
                });
                if self.cache.is_8_bit() {
                    let [of_keys, of_values] = &scales;
                    let keys = narrow::Rounded { scales: of_keys, rotated, columns: self.head_dim };
                    keys.store(k, self, key, sequence, to);
                    let columns = self.value_head_dim;
                    let values = narrow::Rounded { scales: of_values, rotated: None, columns };
                    values.store(k, self, value, sequence, to);
                    return;
                }
                match rotated {
                    Some((angles, position)) => self.rotate(k, angles, key, position),
                    None => copy(k, self.element, key, 0..self.head_dim),
                }
                copy(k, self.element, value, 0..self.value_head_dim);
            });
        });
        // There are at least as many warps as sequences.
        k.if_(after.reinterpret::<U64>().differs(0) & index.less(batch), |k| {
            let (_, count) = new.span().of(k, index);
            let length = before.length(k, index);
            let length = k.eval((length + count).minimum(before.capacity));
            let lane = k.lane();
            k.if_(lane.equals(0), |k| k.store(after + index.convert::<U64>() * 4, length));
        });
        if let (Some(angles), Some(queries)) = (angles, queries) {
            // Indices of key rows wrap around to beyond every query row.
            let index = k.eval(index - rows);
            k.if_(index.less(queries.rotated_rows), |k| {
                let Row { head, sequence, token, source, exists } =
                    queries.rows.find(k, index, batch);
                k.if_(exists, |k| {
                    let length = before.length(k, sequence);
                    let start = angles.start(k, sequence, length);
                    let position = k.eval(start + token * queries.step);
                    let at = [sequence, source, head];
                    let ends = [&queries.from, &queries.to].map(|it| it.row(k, self.element, at));
                    self.rotate(k, &angles, ends, position);
                });
            });
        }
    }

    /// Copies a row, rotating its leading columns.
    fn rotate(
        &self,
        k: &mut Builder,
        angles: &RotaryRegisters,
        ends: [Reg<GlobalAddress>; 2],
        position: Reg<U32>,
    ) {
        angles.rotate(k, self.element, ends, position);
        copy(k, self.element, ends, angles.rotary.dim..self.head_dim);
    }
}

/// The lengths of sequences before the new tokens are appended.
struct Before {
    lengths: Reg<GlobalAddress>,
    /// Positions that a sequence has room for.
    capacity: Reg<U32>,
}

impl Before {
    fn length(&self, k: &mut Builder, sequence: Reg<U32>) -> Reg<U32> {
        let length = entry_of(k, self.lengths, sequence, 0);
        clamp(k, length, self.capacity)
    }
}

/// The rows of new tokens or of queries, all heads of one after the other: of each sequence as many
/// as the most of any, or where sequences are packed, those of the tensor.
struct Rows {
    heads: DivisorRegisters,
    /// The most rows of a sequence.
    most: DivisorRegisters,
    rows: Reg<U32>,
    starts: Reg<GlobalAddress>,
    lengths: Reg<GlobalAddress>,
}

/// One of the rows, and a head.
struct Row {
    head: Reg<U32>,
    sequence: Reg<U32>,
    /// Its number in its sequence.
    token: Reg<U32>,
    /// Its row in the tensor, or in its batch entry.
    source: Reg<U32>,
    /// Whether its sequence has so many rows.
    exists: Reg<Pred>,
}

impl Rows {
    fn span(&self) -> Span {
        let Rows { rows, starts, lengths, most, .. } = *self;
        Span { starts, rows, most: most.number, lengths }
    }

    /// Returns the row and head of a warp.
    fn find(&self, k: &mut Builder, index: Reg<U32>, batch: Reg<U32>) -> Row {
        let (row, head) = self.heads.divide(k, index);
        let (sequence, token) = self.most.divide(k, row);
        let (sequence, token) = (k.variable(sequence), k.variable(token));
        let packed = k.eval(self.starts.reinterpret::<U64>().differs(0));
        k.if_(packed, |k| {
            let found = search(k, batch, row, |k, sequence| {
                // An empty sequence may start after its end.
                let [start, end] = [0, 1].map(|it| entry_of(k, self.starts, sequence + it, 0));
                let begin = k.eval(start.minimum(end));
                clamp(k, begin, self.rows).into()
            });
            k.set(sequence, found);
        });
        let (first, count) = self.span().of(k, sequence);
        // Before the first sequence there are no rows: the number wraps around to beyond them all.
        k.if_(packed, |k| k.set(token, row - first));
        let exists = k.eval(token.less(count));
        Row { head, sequence, token, source: k.eval(first + token), exists }
    }
}

/// The queries to be rotated, as launch parameters.
struct Queries {
    from: Strided,
    to: Strided,
    rotated_rows: Reg<U32>,
    rows: Rows,
    step: Reg<U32>,
}

impl Queries {
    fn parameters(k: &mut Builder) -> Self {
        Queries {
            from: Strided::parameters(k, Tensor::Query),
            to: Strided::parameters(k, Tensor::RotatedQuery),
            rotated_rows: Number::AllRotatedRows.read(k),
            rows: Rows {
                heads: DivisorRegisters::parameters(k, Number::QueryHeads),
                most: DivisorRegisters::parameters(k, Number::QueryLength),
                rows: Number::QueryRows.read(k),
                starts: List::QueryStarts.address(k),
                lengths: List::QueryLengths.address(k),
            },
            step: Number::QueryStep.read(k),
        }
    }
}

/// Copies columns of a row, two at a time, without changing a bit.
fn copy(
    k: &mut Builder,
    element: Element,
    [from, to]: [Reg<GlobalAddress>; 2],
    columns: std::ops::Range<u32>,
) {
    let lane = k.lane();
    k.for_range(lane + columns.start / 2, columns.end / 2, 32, |k, word| {
        let offset = k.eval((word * 4).convert::<U64>());
        let (from, to) = (k.eval(from + offset), k.eval(to + offset));
        let pair = k.load_packed(element, from);
        k.store_packed(to, &[pair]);
    });
}

/// Rotates a pair of columns.
fn rotate_pair(
    k: &mut Builder,
    [x, y]: [Reg<F32>; 2],
    [cosine, sine]: [Reg<F32>; 2],
) -> [Reg<F32>; 2] {
    [k.eval(x * cosine - y * sine), k.eval(x * sine + y * cosine)]
}

/// The rotary embedding's tables, as launch parameters.
struct RotaryRegisters {
    rotary: Rotary,
    cosines: Reg<GlobalAddress>,
    sines: Reg<GlobalAddress>,
    positions: Reg<U32>,
    starts: Reg<GlobalAddress>,
}

impl RotaryRegisters {
    fn parameters(k: &mut Builder, rotary: Rotary) -> Self {
        RotaryRegisters {
            rotary,
            cosines: List::Cosines.address(k),
            sines: List::Sines.address(k),
            positions: Number::RotaryPositions.read(k),
            starts: List::RotaryStarts.address(k),
        }
    }

    /// Returns the rotary position of a sequence's first new token; by default the sequence's
    /// `length` before.
    fn start(&self, k: &mut Builder, sequence: Reg<U32>, length: Reg<U32>) -> Reg<U32> {
        let start = entry_of(k, self.starts, sequence, length.reinterpret::<S32>());
        clamp(k, start, self.positions)
    }

    /// Clamps a position to the tables: beyond them the last angles are used.
    fn bounded(&self, k: &mut Builder, position: Reg<U32>) -> Reg<U32> {
        k.eval(position.minimum(self.positions - 1))
    }

    /// Rotates the leading columns of a row on the way from one address to another.
    fn rotate(
        &self,
        k: &mut Builder,
        element: Element,
        [from, to]: [Reg<GlobalAddress>; 2],
        position: Reg<U32>,
    ) {
        let (half, bytes) = (self.rotary.dim / 2, element.bytes());
        let position = self.bounded(k, position);
        let lane = k.lane();
        k.for_range(lane, half, 32, |k, pair| {
            let angle = position.convert::<U64>() * half + pair.convert::<U64>();
            let angle = k.eval(angle * bytes);
            let cosine = load_as_f32(k, element, self.cosines + angle);
            let sine = load_as_f32(k, element, self.sines + angle);
            let (first, second) = match self.rotary.interleaved {
                true => (k.eval(pair * 2), k.eval(pair * 2 + 1)),
                false => (k.eval(pair), k.eval(pair + half)),
            };
            let offset = |column: Reg<U32>| (column * bytes).convert::<U64>();
            let x = load_as_f32(k, element, from + offset(first));
            let y = load_as_f32(k, element, from + offset(second));
            let rotated = rotate_pair(k, [x, y], [cosine, sine]);
            for (column, value) in [first, second].into_iter().zip(rotated) {
                store_from_f32(k, element, to + offset(column), value);
            }
        });
    }
}
