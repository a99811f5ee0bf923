//! Attention forward with `mma.sync`, on Ampere and everything after it.
//!
//! A block of threads takes some query rows of one head; each of its warps has
//! 16 or 32 of them to itself and walks the key blocks from the last to the
//! first. Keys and values come by `cp.async`, some blocks ahead:
//!
//! ```text
//! for j = n-1 down to 0:
//!     wait for K(j), V(j); send for K(j - ahead), V(j - ahead)
//!     S = Q K(j)^T;  P = softmax(S);  O += P V(j)
//! normalise; store
//! ```
//!
//! A warp does one step after the other: while it computes exponentials, the
//! tensor cores have the products of another warp, of this block of threads or
//! of a second one on the same multiprocessor. Probabilities stay in registers.
//!
//! The parts have a file each: `place` says which rows and keys, `copies`
//! brings tiles, `products` multiplies them, `softmax` and `mask` do what their
//! names say, `walk` is the loop above, `epilogue` stores, and `tuned` says
//! what serves which problem.

mod copies;
mod epilogue;
mod mask;
mod place;
mod products;
mod softmax;
mod tuned;
mod walk;

pub use tuned::{Tuned, Workload, every_tuned, tuned};

use ptx::{Builder, Capability, Element, F32, Program, Reg, Swizzle, Target, TileLayout, U32};

use crate::Error;
use crate::parameter::{Number, Scale, Tensor};
use crate::product::Source;
use crate::strides::Strides;
use copies::{Blocks, Ring};
use epilogue::Epilogue;
use place::Place;
use walk::Warp;

/// What the kernel is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mma {
    /// The architecture: Ampere or later.
    pub target: Target,
    /// The element of all four tensors: `F16` or `BF16`.
    pub element: Element,
    /// The width of queries and keys: a multiple of 8 up to 256.
    pub head_dim: u32,
    /// The width of values and outputs: a multiple of 8 up to 256.
    pub value_head_dim: u32,
    /// Whether query `i` sees only keys up to `i + keys - queries`.
    pub causal: bool,
    /// Warps of a block: 2, 4 or 8.
    pub warps: u32,
    /// Tiles of 16 query rows that each warp takes: 1 or 2. With two, what is
    /// loaded of keys and values serves twice.
    pub row_tiles: u32,
    /// Keys that are copied and multiplied at a time: a multiple of 16.
    pub key_block: u32,
    /// How many key blocks copies run ahead.
    pub ahead: u32,
    /// Where the tensor cores take queries from.
    pub query_source: Source,
    /// Blocks of threads that shall fit on a multiprocessor: bounds registers.
    pub residents: u32,
    /// What products are added up in: `F32`, or `F16` for elements of `F16`.
    pub accumulate: Element,
    /// Whether keys are split over blocks of threads: outputs are then partial,
    /// in `f32`, for the combining kernel to put together.
    pub split: bool,
}

/// The parameters that are numbers.
struct Numbers {
    query_length: Reg<U32>,
    key_length: Reg<U32>,
    scale_log2: Reg<F32>,
}

impl Mma {
    /// The name of this configuration.
    pub fn name(&self) -> String {
        let Mma { element, head_dim, value_head_dim, causal, key_block, ahead, .. } = self;
        let mask = if *causal { "causal" } else { "dense" };
        let (rows, warps, residents) = (self.query_rows(), self.warps, self.residents);
        let source = match self.query_source {
            Source::Shared => "",
            Source::Registers => "q",
        };
        let half = if self.accumulate == Element::F16 { "_half" } else { "" };
        let split = if self.split { "_split" } else { "" };
        format!(
            "mma_{element}_d{head_dim}x{value_head_dim}_{mask}_{rows}x{key_block}_w{warps}a{ahead}r{residents}{source}{half}{split}"
        )
    }

    /// Query rows of a block of threads.
    pub fn query_rows(&self) -> u32 {
        self.warps * self.warp_rows()
    }

    /// Query rows of a warp.
    fn warp_rows(&self) -> u32 {
        16 * self.row_tiles
    }

    fn threads(&self) -> u32 {
        32 * self.warps
    }

    /// Key blocks in shared memory: the one that is read, and those under way.
    fn slots(&self) -> u32 {
        self.ahead + 1
    }

    /// The width of queries and keys in whole steps of the tensor cores.
    fn padded_dim(&self) -> u32 {
        self.head_dim.next_multiple_of(16)
    }

    fn layout(&self, rows: u32, columns: u32) -> TileLayout {
        TileLayout { element: self.element, rows, columns, swizzle: Swizzle::B128 }
    }

    fn query_layout(&self) -> TileLayout {
        self.layout(self.query_rows(), self.padded_dim())
    }

    fn key_layout(&self) -> TileLayout {
        self.layout(self.key_block, self.padded_dim())
    }

    fn value_layout(&self) -> TileLayout {
        self.layout(self.key_block, self.value_head_dim)
    }

    /// The shared memory of a block of threads.
    pub fn shared_bytes(&self) -> u32 {
        self.query_layout().bytes()
            + self.slots() * (self.key_layout().bytes() + self.value_layout().bytes())
    }

    /// Why there is no such kernel, if so.
    fn fault(&self) -> Option<&'static str> {
        if !(self.target.has(Capability::Mma) && self.target.has(Capability::AsyncCopies)) {
            return Some("the target has no mma.sync on 16-bit floats or no cp.async");
        }
        if !matches!(self.element, Element::F16 | Element::BF16) {
            return Some("the element is not f16 or bf16");
        }
        for dim in [self.head_dim, self.value_head_dim] {
            if dim == 0 || dim > 256 || !dim.is_multiple_of(8) {
                return Some("a head dimension is not a multiple of 8 up to 256");
            }
        }
        if ![2, 4, 8].contains(&self.warps) {
            return Some("there are two, four or eight warps");
        }
        if ![1, 2].contains(&self.row_tiles) {
            return Some("a warp takes one or two tiles of 16 rows");
        }
        if self.key_block == 0 || !self.key_block.is_multiple_of(16) {
            return Some("the key block is not a multiple of 16");
        }
        // Each pass of the copying threads takes as many rows as there are
        // groups of eight threads.
        if !self.key_block.is_multiple_of(4 * self.warps) {
            return Some("the key block is not a multiple of four rows a warp");
        }
        if self.ahead == 0 || self.residents == 0 {
            return Some("copies run at least one block ahead, and one block is resident");
        }
        match (self.accumulate, self.element) {
            (Element::F32, _) | (Element::F16, Element::F16) => None,
            _ => Some("products are added up in f32, or in f16 if the element is f16"),
        }
    }

    /// Builds the kernel.
    ///
    /// Parameters, in order: the addresses of queries, keys, values, output
    /// and log-sum-exps; the batch, row and head strides in elements of
    /// queries, keys, values and output; query length, key length; the scale
    /// times log2(e), which must be positive; then the
    /// [`Divisor`](crate::Divisor)s (number, multiplier, shift) of query tiles
    /// of a head, of query heads, and of query heads per key head. Addresses
    /// and strides are multiples of 16 bytes. Log-sum-exps are (batch, head,
    /// query) in `f32`. One block of threads for each tile of query rows.
    ///
    /// Split, there are a divisor of splits and the key blocks of a split
    /// after these, and as many blocks of threads for each tile; the output
    /// is (split, batch, head, query, dimension) in `f32` and the log-sum-exps
    /// (split, batch, head, query), both without gaps and the output's strides
    /// unused.
    pub fn program(&self) -> Result<Program, Error> {
        if let Some(reason) = self.fault() {
            return Err(Error::configuration(self.name(), reason));
        }
        let mut k = Builder::new(self.name(), self.target, self.threads())
            .blocks_per_multiprocessor(self.residents);
        self.write(&mut k);
        Ok(k.finish()?)
    }

    fn write(&self, k: &mut Builder) {
        let results = match self.split {
            true => [Tensor::PartialOutput, Tensor::PartialLse],
            false => [Tensor::Output, Tensor::Lse],
        };
        let [queries, keys, values] =
            [Tensor::Query, Tensor::Key, Tensor::Value].map(|tensor| tensor.address(k));
        let [output, lse] = results.map(|tensor| tensor.address(k));
        let [query_strides, key_strides, value_strides, output_strides] =
            [Tensor::Query, Tensor::Key, Tensor::Value, Tensor::Output]
                .map(|tensor| Strides::parameters(k, tensor));
        let numbers = Numbers {
            query_length: Number::QueryLength.read(k),
            key_length: Number::KeyLength.read(k),
            scale_log2: Scale::Log2.read(k),
        };
        let place = Place::new(k, self, &numbers);

        let query_room = Ring::new(k, "queries", self.query_layout(), 1);
        let key_ring = Ring::new(k, "keys", self.key_layout(), self.slots());
        let value_ring = Ring::new(k, "values", self.value_layout(), self.slots());

        let zero = k.eval(0);
        let blocks = |k: &mut Builder, layout, columns, tensor, strides: &Strides, head| {
            let at = [place.batch, zero, head];
            let source = strides.row_address(k, tensor, self.element, at);
            Blocks::new(k, self, layout, columns, source, strides.row)
        };
        let key_blocks =
            blocks(k, self.key_layout(), self.head_dim, keys, &key_strides, place.key_head);
        let (layout, columns) = (self.value_layout(), self.value_head_dim);
        let value_blocks = blocks(k, layout, columns, values, &value_strides, place.key_head);
        let query_blocks =
            blocks(k, self.query_layout(), self.head_dim, queries, &query_strides, place.head);
        query_blocks.clear_padding(k, &query_room);
        key_blocks.clear_padding(k, &key_ring);
        let rows = k.eval(numbers.query_length - place.first_row);
        query_blocks.copy(k, query_room.at(0), place.first_row, Some(rows));

        let mut warp = Warp::new(k, self, &numbers, &place, query_room, key_ring, value_ring);
        warp.walk(k, &place, &key_blocks, &value_blocks, &numbers);
        let epilogue = Epilogue { output, strides: output_strides, lse };
        epilogue.store(k, self, &numbers, &place, &warp);
    }
}
