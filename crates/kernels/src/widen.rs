//! Widens a cache of 8-bit keys and values to 16-bit numbers, times their scales, for attention of
//! many queries by kernels that take 16 bits: their products cost far more than one more pass over
//! the cache.
//!
//! The output has the sequences one after the other, each with room for the longest, or packed as
//! they were. Positions that no sequence uses are not written.

use ptx::{Builder, Element, Expression, F32, Packed, Program, Reg, Target, U32, U64};

use crate::attention::sequences::{Places, Span};
use crate::cache::{Cache, ScaleSource};
use crate::dependent_launch::wait_for_earlier_grids;
use crate::divisor::DivisorRegisters;
use crate::parameter::{List, Number, Tensor};
use crate::strides::Strided;
use crate::{Error, build, first_fault, is_16_bit};

/// Positions of a sequence that a block widens.
pub const POSITIONS: u32 = 64;

/// Threads per block.
const THREADS: u32 = 256;

/// Numbers that a thread widens at a time: 16 bytes of the cache.
const CHUNK: u32 = 16;

/// The configuration of the widening kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Widen {
    /// The target architecture.
    pub target: Target,
    /// The element of the output: `F16` or `BF16`.
    pub element: Element,
    /// The element and scales of the cache: 8 bits.
    pub cache: Cache,
    /// Head dim of keys: a multiple of 16.
    pub head_dim: u32,
    /// Head dim of values: a multiple of 16.
    pub value_head_dim: u32,
    /// Whether the cache is in pages.
    pub paged: bool,
}

impl Widen {
    /// Returns the name of this configuration.
    pub fn name(&self) -> String {
        let Widen { element, head_dim, value_head_dim, .. } = self;
        let paged = if self.paged { "_paged" } else { "" };
        let cache = self.cache.suffix(self.element);
        format!("widen_{element}{cache}_d{head_dim}x{value_head_dim}{paged}")
    }

    /// Builds the kernel. The grid has a block for every [`POSITIONS`] of each sequence. Parameters
    /// by name ([`Parameter`](crate::Parameter)):
    ///
    /// | parameters | |
    /// | --- | --- |
    /// | `Key`, `Value`, `KeyDescale`, `ValueDescale` | the cache, as in [`Decode`](crate::Decode) |
    /// | `WideKey`, `WideValue` | the destination, with batch, row and head strides in elements |
    /// | `KeyBlocks`, `KeyHeads` | [`Divisor`](crate::Divisor)s; `KeyBlocks` is the blocks of a sequence |
    /// | `KeyLength`, `KeyRows`, `KeyStarts`, `KeyLengths` | as in [`Decode`](crate::Decode) |
    /// | `BatchIndex`, `Entries`, `BlockTable`, `PageColumns`, `PageSize` | as in [`Decode`](crate::Decode) |
    pub fn program(&self) -> Result<Program, Error> {
        let odd = |dim: u32| dim == 0 || !dim.is_multiple_of(CHUNK);
        let fault = first_fault([
            (!is_16_bit(self.element) || !self.cache.is_8_bit(), "it makes f16 or bf16 of 8 bits"),
            (
                odd(self.head_dim) || odd(self.value_head_dim),
                "a head dimension is not whole chunks of 16 bytes",
            ),
            (
                !self.cache.is_converted_by(self.target),
                "the target does not convert numbers of 8 bits",
            ),
        ]);
        let builder = |name| Builder::new(name, self.target, THREADS);
        build(self.name(), fault, builder, |k| self.write(k))
    }

    fn write(&self, k: &mut Builder) {
        wait_for_earlier_grids(k);
        let sides = [
            (Tensor::Key, Tensor::KeyDescale, Tensor::WideKey),
            (Tensor::Value, Tensor::ValueDescale, Tensor::WideValue),
        ];
        let scales = [self.cache.key_scales, self.cache.value_scales];
        let dims = [self.head_dim, self.value_head_dim];
        let mut tensors = Vec::new();
        for (((from, descale, to), scales), dim) in sides.into_iter().zip(scales).zip(dims) {
            tensors.push(Side {
                from: Strided::parameters(k, from),
                scales: ScaleSource::parameters(k, scales, descale),
                to: Strided::parameters(k, to),
                chunks: dim / CHUNK,
            });
        }
        let blocks = DivisorRegisters::parameters(k, Number::KeyBlocks);
        let heads = DivisorRegisters::parameters(k, Number::KeyHeads);
        let span = Span {
            starts: List::KeyStarts.address(k),
            rows: Number::KeyRows.read(k),
            most: Number::KeyLength.read(k),
            lengths: List::KeyLengths.address(k),
        };
        let places = Places::parameters(k, self.paged);

        let block = k.block_index();
        let (sequence, block) = blocks.divide(k, block);
        let (first, length) = span.of(k, sequence);
        let entry = places.entry(k, sequence);
        let begin = k.eval((block * POSITIONS).minimum(length));
        let count = k.eval((length - begin).minimum(POSITIONS));
        let thread = k.thread_index();
        for side in &tensors {
            let items = k.eval(count * heads.number * side.chunks);
            k.for_range(thread, items, THREADS, |k, item| {
                let vector = k.eval(item / side.chunks);
                let chunk = k.eval(item - vector * side.chunks);
                let (position, head) = heads.divide(k, vector);
                let row = k.eval(first + begin + position);
                let (page, within) = places.locate(k, entry, row);
                let (from, to) = ([page, within, head], [sequence, row, head]);
                self.chunk(k, side, (from, to), chunk);
            });
        }
    }

    /// Widens one chunk of a row.
    fn chunk(
        &self,
        k: &mut Builder,
        side: &Side,
        (from, to): ([Reg<U32>; 3], [Reg<U32>; 3]),
        chunk: Reg<U32>,
    ) {
        let source = side.from.row(k, self.cache.element, from);
        let fours: [Packed; 4] =
            k.load_packed_vector(self.cache.element, source + (chunk * CHUNK).convert::<U64>());
        let scale: Option<Reg<F32>> = match &side.scales {
            ScaleSource::PerToken(scales) => {
                let address = scales.row(k, Element::F32, from);
                Some(k.load(address))
            }
            scales => scales.of_head(k, to[0], from[2]),
        };
        let target = side.to.row(k, self.element, to);
        let bytes = k.eval((chunk * (CHUNK * self.element.bytes())).convert::<U64>());
        let target = k.eval(target + bytes);
        for (half, fours) in (0u32..).zip(fours.chunks_exact(2)) {
            let pairs: Vec<Packed> = (fours.iter().flat_map(|four| k.widen(*four, [0, 1, 2, 3])))
                .collect::<Vec<Packed>>()
                .into_iter()
                .map(|pair| self.scaled(k, pair, scale))
                .collect();
            k.store_packed(target + 16 * half, &pairs);
        }
    }

    /// Returns two numbers times their scale, rounded to the output's element.
    fn scaled(&self, k: &mut Builder, pair: Packed, scale: Option<Reg<F32>>) -> Packed {
        if scale.is_none() && pair.element() == self.element {
            return pair;
        }
        let mut numbers = k.unpack_as_f32(pair);
        if let Some(scale) = scale {
            numbers = numbers.map(|number| k.eval(number * scale));
        }
        k.pack_as(self.element, numbers[0], numbers[1])
    }
}

/// The keys or the values: source, scales and destination.
struct Side {
    from: Strided,
    scales: ScaleSource,
    to: Strided,
    /// Chunks per row.
    chunks: u32,
}
