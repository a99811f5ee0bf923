//! New keys and values into a cache, where they belong, keys turned by rotary embeddings.
//!
//! A warp takes one row: a new token of a sequence and a key head. Lengths and
//! tables are read on the device; what would lie beyond the cache is not written.

use ptx::{
    Address, Builder, Capability, Element, Expression, GlobalAddress, Instruction, LoadCache,
    LoadOrder, Program, Reg, S32, Space, StoreCache, StoreOrder, Target, U32, U64,
};

use crate::Error;
use crate::decode::place::Places;
use crate::decode::{clamp, entry_of};
use crate::divisor::DivisorRegisters;
use crate::element::{load_as_f32, store_from_f32};
use crate::strides::Strides;

/// Warps of a block: rows that it takes.
pub const ROWS: u32 = 4;

/// What the kernel is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Append {
    /// The architecture.
    pub target: Target,
    /// The element of all tensors: `F16` or `BF16`.
    pub element: Element,
    /// The width of keys: even.
    pub head_dim: u32,
    /// The width of values: even.
    pub value_head_dim: u32,
    /// Whether the cache lies in pages.
    pub paged: bool,
    /// How keys are turned.
    pub rotary: Option<Rotary>,
}

/// Rotary embedding: pairs of columns are turned by an angle that grows with the position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rotary {
    /// The first so many columns are turned, the others stay: even.
    pub dim: u32,
    /// Whether neighbours are pairs; else column `i` and column `dim / 2 + i`.
    pub interleaved: bool,
}

impl Append {
    /// The name of this configuration.
    pub fn name(&self) -> String {
        let Append { element, head_dim, value_head_dim, .. } = self;
        let paged = if self.paged { "_paged" } else { "" };
        let rotary = self.rotary.map_or(String::new(), |Rotary { dim, interleaved }| {
            format!("_rotary{dim}{}", if interleaved { "i" } else { "" })
        });
        format!("append_{element}_d{head_dim}x{value_head_dim}{paged}{rotary}")
    }

    /// Threads of a block.
    pub const fn threads(&self) -> u32 {
        32 * ROWS
    }

    /// Blocks for so many rows: sequences times new tokens of each at most times key heads.
    pub const fn blocks(&self, rows: u32) -> u32 {
        rows.div_ceil(ROWS)
    }

    /// Builds the kernel. Parameters by name:
    ///
    /// | parameters | |
    /// | --- | --- |
    /// | `new keys`, `new values` | addresses, with batch, row and head strides in elements |
    /// | `keys`, `values` | the cache; a batch entry may be a page |
    /// | `rows` | sequences times new tokens times key heads |
    /// | `key heads`, `new tokens` | [`Divisor`](crate::Divisor)s; the most new tokens of a sequence |
    /// | `new rows` | of the tensors of new keys: bounds the starts |
    /// | `key length` | positions that a sequence has room for |
    /// | `lengths` | keys of each sequence before, or 0 |
    /// | `new starts` | where each sequence's new tokens begin and the last end, or 0 |
    /// | `batch entries`, `batch entries there are`, `block table`, `pages of a sequence`, `page size` | as decode has them |
    /// | `cosines`, `sines`, `rotary positions` | tables of `dim / 2` for each position, in the tensors' element |
    pub fn program(&self) -> Result<Program, Error> {
        let refuse = |reason| Err(Error::configuration(self.name(), reason));
        if !matches!(self.element, Element::F16 | Element::BF16) {
            return refuse("the element is not f16 or bf16");
        }
        if [self.head_dim, self.value_head_dim].iter().any(|dim| *dim == 0 || dim % 2 != 0) {
            return refuse("a head dimension is not even");
        }
        if self.rotary.is_some_and(|it| it.dim == 0 || it.dim % 2 != 0 || it.dim > self.head_dim) {
            return refuse("the rotary dimension is not even or wider than the keys");
        }
        if !self.target.has(Capability::AsyncCopies) {
            return refuse("the target is older than decode");
        }
        let mut k = Builder::new(self.name(), self.target, self.threads());
        self.write(&mut k);
        Ok(k.finish()?)
    }

    fn write(&self, k: &mut Builder) {
        let [new_keys, new_values, keys, values] =
            ["new keys", "new values", "keys", "values"].map(|name| Tensor::parameters(k, name));
        let rows: Reg<U32> = k.parameter("rows");
        let key_heads = DivisorRegisters::parameters(k, "key heads");
        let tokens = DivisorRegisters::parameters(k, "new tokens");
        let new_rows: Reg<U32> = k.parameter("new rows");
        let capacity: Reg<U32> = k.parameter("key length");
        let lengths: Reg<GlobalAddress> = k.parameter("lengths");
        let starts: Reg<GlobalAddress> = k.parameter("new starts");
        let places = Places::parameters(k, self.paged);
        let angles = self.rotary.map(|rotary| Angles::parameters(k, rotary));

        let (block, thread) = (k.block_index(), k.thread_index());
        let index = k.eval(block * ROWS + thread / 32);
        k.if_(index.less(rows), |k| {
            let (rest, head) = key_heads.divide(k, index);
            let (sequence, token) = tokens.divide(k, rest);
            let signed = |value: Reg<U32>| value.reinterpret::<S32>();
            let start = entry_of(k, starts, sequence, 0);
            let first = clamp(k, start, new_rows);
            let all = k.eval(first + tokens.number);
            let end = entry_of(k, starts, sequence + 1, signed(all));
            let end = clamp(k, end, new_rows);
            let length = entry_of(k, lengths, sequence, 0);
            let length = clamp(k, length, capacity);
            let source = k.eval(first + token);
            let position = k.eval(length + token);
            k.if_(source.less(end) & position.less(capacity), |k| {
                let entry = places.entry(k, sequence);
                let (entry, row) = places.locate(k, entry, position);
                let (from, to) = ([sequence, source, head], [entry, row, head]);
                let key = [new_keys.row(k, self.element, from), keys.row(k, self.element, to)];
                let turned = angles.as_ref().map_or(0, |angles| {
                    angles.turn(k, self.element, key, position);
                    angles.rotary.dim
                });
                copy(k, self.element, key, turned..self.head_dim);
                let value =
                    [new_values.row(k, self.element, from), values.row(k, self.element, to)];
                copy(k, self.element, value, 0..self.value_head_dim);
            });
        });
    }
}

struct Tensor {
    address: Reg<GlobalAddress>,
    strides: Strides,
}

impl Tensor {
    fn parameters(k: &mut Builder, name: &str) -> Self {
        Tensor { address: k.parameter(name), strides: Strides::parameters(k, name) }
    }

    fn row(&self, k: &mut Builder, element: Element, at: [Reg<U32>; 3]) -> Reg<GlobalAddress> {
        self.strides.row_address(k, self.address, element, at)
    }
}

/// Copies columns of a row, two at a time, bit by bit.
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
        let pair = k.register_of(element.packed());
        k.push(Instruction::Load {
            dst: vec![pair],
            space: Space::Global,
            address: Address { base: from.register(), offset: 0 },
            order: LoadOrder::Weak,
            cache: LoadCache::Default,
            policy: None,
        });
        k.push(Instruction::Store {
            src: vec![pair],
            space: Space::Global,
            address: Address { base: to.register(), offset: 0 },
            order: StoreOrder::Weak,
            cache: StoreCache::Default,
            policy: None,
        });
    });
}

/// The tables of angles.
struct Angles {
    rotary: Rotary,
    cosines: Reg<GlobalAddress>,
    sines: Reg<GlobalAddress>,
    positions: Reg<U32>,
}

impl Angles {
    fn parameters(k: &mut Builder, rotary: Rotary) -> Self {
        Angles {
            rotary,
            cosines: k.parameter("cosines"),
            sines: k.parameter("sines"),
            positions: k.parameter("rotary positions"),
        }
    }

    /// Turns the first columns of a row on their way.
    fn turn(
        &self,
        k: &mut Builder,
        element: Element,
        [from, to]: [Reg<GlobalAddress>; 2],
        position: Reg<U32>,
    ) {
        let (half, bytes) = (self.rotary.dim / 2, element.bytes());
        // Beyond the tables: the last angles.
        let position = k.eval(position.minimum(self.positions - 1));
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
            let turned = [k.eval(x * cosine - y * sine), k.eval(x * sine + y * cosine)];
            for (column, value) in [first, second].into_iter().zip(turned) {
                store_from_f32(k, element, to + offset(column), value);
            }
        });
    }
}
