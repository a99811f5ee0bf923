//! What kernels are passed: each parameter says what it is, and so where its argument comes from.
//!
//! A kernel declares parameters by these names and no others. Whoever launches it, on a GPU, in the
//! simulator or from a description, reads the declaration back ([`Parameter::of`]) and has one
//! place to look each of them up.

use std::collections::HashMap;
use std::fmt;
use std::sync::OnceLock;

use ptx::{Builder, F32, GlobalAddress, Reg, S32, TensorBox, TensorMap, U32, U64};

use crate::attention::function::{Kind, TensorSpec};

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Parameter {
    /// A tensor: its address, or a tensor map over it.
    Tensor(Tensor),
    /// A stride of a tensor, in elements of 64 bits.
    Stride(Tensor, Axis),
    /// The rows of a tensor in all, where its batch entries are taken for one list of rows.
    Rows(Tensor),
    /// The rows from a batch entry or page of a tensor to the next.
    EntryRows(Tensor),
    /// The rows from the place of a sequence in a tensor to that of the next; 0 where a list or a
    /// block table says where sequences are.
    SequenceRows(Tensor),
    /// The address of numbers on the device, one for each sequence or head; 0 where there are none.
    List(List),
    /// The address of memory that belongs to the plan.
    Workspace(Workspace),
    /// A number of 32 bits; for a number that is divided by, the number itself.
    Number(Number),
    /// The rounded reciprocal of a number that is divided by ([`Divisor`](crate::Divisor)).
    Multiplier(Number),
    /// How far the product with it is shifted.
    Shift(Number),
    /// A signed number of 32 bits: how far a query sees.
    Reach(Reach),
    /// A factor of the scores.
    Scale(Scale),
    /// Of a tensor that a function loads from.
    Captured(Captured),
}

/// What a kernel knows of a tensor that a function loads from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Captured {
    /// Whose tensor it is.
    pub kind: Kind,
    /// Which of the function's tensors.
    pub index: u8,
    /// What of it.
    pub part: CapturedPart,
}

/// A part of what is known of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CapturedPart {
    /// Its address.
    Address,
    /// How far a dimension goes: 32 bits.
    Extent(u8),
    /// Elements from an index of a dimension to the next: 64 bits.
    Stride(u8),
}

/// Enumerations with a list of what they have, for the table of names.
macro_rules! listed {
    ($($(#[$of_enum:meta])* pub enum $name:ident { $($(#[$of_one:meta])* $one:ident,)* })*) => {$(
        $(#[$of_enum])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name {
            $($(#[$of_one])* $one,)*
        }

        impl $name {
            const EVERY: &[$name] = &[$($name::$one),*];
        }
    )*};
}

listed! {
    /// The tensors of attention and of what goes with it.
    pub enum Tensor {
        /// The queries.
        Query,
        /// The keys, or their cache.
        Key,
        /// The values, or their cache.
        Value,
        /// The output.
        Output,
        /// The log-sum-exps.
        Lse,
        /// Outputs over parts of the keys.
        PartialOutput,
        /// Log-sum-exps over parts of the keys.
        PartialLse,
        /// Keys that are appended to a cache.
        NewKey,
        /// Values that are appended to a cache.
        NewValue,
        /// Queries with rotary embeddings.
        RotatedQuery,
        /// The gradient of the output.
        OutputGradient,
        /// The gradient of the queries.
        QueryGradient,
        /// The gradient of the keys.
        KeyGradient,
        /// The gradient of the values.
        ValueGradient,
        /// The gradients of the sinks, in `f32`.
        SinkGradient,
        /// What 8-bit queries are multiplied with, in `f32`, over (sequence, key head).
        QueryDescale,
        /// What 8-bit keys are multiplied with: like the queries', or over (batch entry or page,
        /// row, key head).
        KeyDescale,
        /// What 8-bit values are multiplied with.
        ValueDescale,
        /// The keys of an 8-bit cache as 16-bit numbers, in memory of the plan.
        WideKey,
        /// The values of an 8-bit cache as 16-bit numbers, in memory of the plan.
        WideValue,
    }

    /// A dimension of a tensor along which there is a stride.
    pub enum Axis {
        /// From batch entry (or page) to batch entry.
        Batch,
        /// From row to row.
        Row,
        /// From row to row, where batch entries are taken for one list of rows.
        FlatRow,
        /// From head to head.
        Head,
        /// From part to part.
        Part,
    }

    /// Lists of 32-bit numbers on the device.
    pub enum List {
        /// Where each sequence's packed queries begin, and where the last end (`cu_seqlens_q`).
        QueryStarts,
        /// Queries that each sequence uses (`seqused_q`).
        QueryLengths,
        /// Where each sequence's packed keys begin, and where the last end (`cu_seqlens_k`).
        KeyStarts,
        /// Keys that each sequence uses (`seqused_k`, `cache_seqlens`).
        KeyLengths,
        /// Positions before each sequence that are no part of it (`leftpad_k`).
        LeftPadding,
        /// The batch entry of each sequence (`cache_batch_idx`).
        BatchIndex,
        /// The pages of each sequence (`block_table`).
        BlockTable,
        /// ALiBi slopes in `f32`.
        Slopes,
        /// Sinks in `f32`.
        Sinks,
        /// Where each sequence's new keys begin, and where the last end.
        NewStarts,
        /// New keys of each sequence.
        NewLengths,
        /// Where the lengths with the new keys go.
        LengthsAfter,
        /// Cosines of rotary embeddings.
        Cosines,
        /// Sines of rotary embeddings.
        Sines,
        /// The position of each sequence's first new key for its angle.
        RotaryStarts,
    }

    /// Memory that belongs to a plan.
    pub enum Workspace {
        /// The tiles of each block of the forward kernel.
        TileLists,
        /// The tiles of a ragged batch, in order.
        Schedule,
        /// The key blocks of each tile, where a mask is a function.
        BlockLists,
        /// What was found of each pair of a tile and a block, where lists are found on the device.
        FoundBlocks,
        /// Partial results of sequences that are split.
        Partials,
        /// How many parts of each sequence are there; zero between launches.
        Counters,
        /// Timestamps from inside the kernel.
        Probe,
        /// Two numbers of each query row that the backward pass needs, a block of rows after the
        /// other.
        RowStatistics,
        /// The gradient of the queries in `f32`, while it is added up.
        QueryGradientSums,
        /// For each block of query rows, how many have added to its sums, where they take turns; else,
        /// for each key head, how many have cleared its sums and how many have added to them.
        Turns,
    }

    /// Numbers that a problem or the shape of a launch has.
    pub enum Number {
        /// Sequences.
        Batch,
        /// Queries of a sequence, at most.
        QueryLength,
        /// Keys of a sequence, at most.
        KeyLength,
        /// Query heads.
        QueryHeads,
        /// Key heads.
        KeyHeads,
        /// Query heads that share a key head.
        GroupSize,
        /// Rows of a batch entry of the query tensor: all of them, where queries are packed.
        QueryRows,
        /// Rows of the key tensor that sequences may begin at.
        KeyRows,
        /// Batch entries or pages of the cache.
        Entries,
        /// Positions of a page.
        PageSize,
        /// Pages of a sequence in the block table.
        PageColumns,
        /// Log-sum-exps from a head to the next, in elements.
        LseHeadStride,
        /// Log-sum-exps from a sequence to the next, in elements; 0 where queries are packed.
        LseBatchStride,
        /// From the slopes of a sequence to the next's; 0 where all have the same.
        SlopesStride,
        /// Positions of a chunk, where attention is chunked.
        Chunk,
        /// Tiles in all.
        Tiles,
        /// Tiles that are not cut into parts.
        WholeTiles,
        /// Tiles that run at the same time.
        TilesOfRound,
        /// Tiles of query rows of a head.
        TilesPerHead,
        /// Tiles of a group of heads that share the second-level cache.
        TilesPerGroup,
        /// Heads of such a group.
        HeadsPerGroup,
        /// Heads of the first group, which may have fewer.
        FirstHeads,
        /// The first head of the last group.
        LastHeads,
        /// Parts that the keys of a tile are split into.
        Splits,
        /// Key blocks of such a part.
        BlocksPerSplit,
        /// Parts of the keys that are combined.
        Parts,
        /// Rows over all heads and sequences.
        AllRows,
        /// Teams of blocks.
        Teams,
        /// Blocks of a team.
        BlocksPerTeam,
        /// The fewest tiles of keys that a team takes.
        LeastTiles,
        /// Parts of sequences that a block has room for.
        PartsPerBlock,
        /// Blocks of keys of a head.
        KeyBlocks,
        /// Blocks of query rows of a head.
        QueryBlocks,
        /// Tiles of keys, of all heads.
        KeyTiles,
        /// Those of them whose shares of the sums of `dQ` are cleared before the products.
        ClearedTiles,
        /// Blocks of query rows whose sums are.
        ClearedBlocks,
        /// Tiles of keys whose shares of the sums are rounded while products run.
        RoundedTiles,
        /// Blocks of query rows whose sums are.
        RoundedBlocks,
        /// Query rows of a tile.
        TileRows,
        /// Words from the key blocks of a tile to those of the next.
        BlockListWords,
        /// Words from the key blocks of a sequence to those of the next; 0 where they share them.
        BlockListBatchStride,
        /// Words from the key blocks of a head to those of the next; 0 where they share them.
        BlockListHeadStride,
        /// Blocks of the grid that share tiles.
        SharingBlocks,
        /// Words from the tiles of such a block to those of the next, at most.
        ListRoom,
        /// Query heads over all sequences.
        AllHeads,
        /// Pairs of a tile of queries and a block of keys that are looked at.
        BlockPairs,
        /// Lists of blocks in all.
        AllLists,
        /// Heads that have lists of blocks of their own.
        ListHeads,
        /// Query heads that one list of blocks is found for.
        HeadsPerList,
        /// Sequences that one list of blocks is found for.
        SequencesPerList,
        /// Tiles that a schedule has room for.
        MaxTiles,
        /// New keys of a sequence, at most.
        NewTokens,
        /// Rows of the tensors of new keys.
        NewRows,
        /// Rows of new keys over all heads and sequences.
        AllNewRows,
        /// Rows of rotated queries over all heads and sequences.
        AllRotatedRows,
        /// Positions of the rotary tables.
        RotaryPositions,
        /// Positions from a query to the next: 1, or 0 where all stand at the first new key.
        QueryStep,
    }

    /// How far a query sees.
    pub enum Reach {
        /// Keys before its position.
        Left,
        /// Keys after its position.
        Right,
    }

    /// Factors of the scores.
    pub enum Scale {
        /// The softmax scale times log2(e).
        Log2,
        /// The softmax scale over the cap of scores: what is inside of the hyperbolic tangent.
        Inner,
        /// The cap times log2(e): what is outside of it.
        Outer,
        /// The softmax scale itself.
        Natural,
    }
}

impl fmt::Display for Parameter {
    /// The name in a program.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Parameter::Tensor(tensor) => write!(f, "{tensor:?}"),
            Parameter::Stride(tensor, axis) => {
                let axis = match axis {
                    Axis::Batch => "batch",
                    Axis::Row => "row",
                    Axis::FlatRow => "flat row",
                    Axis::Head => "head",
                    Axis::Part => "part",
                };
                write!(f, "{tensor:?} {axis} stride")
            }
            Parameter::Rows(tensor) => write!(f, "{tensor:?} rows"),
            Parameter::EntryRows(tensor) => write!(f, "{tensor:?} rows of an entry"),
            Parameter::SequenceRows(tensor) => write!(f, "{tensor:?} rows of a sequence"),
            Parameter::List(list) => write!(f, "{list:?}"),
            Parameter::Workspace(workspace) => write!(f, "{workspace:?}"),
            Parameter::Number(number) => write!(f, "{number:?}"),
            Parameter::Multiplier(number) => write!(f, "{number:?}, multiplier"),
            Parameter::Shift(number) => write!(f, "{number:?}, shift"),
            Parameter::Reach(reach) => write!(f, "Reach{reach:?}"),
            Parameter::Scale(scale) => write!(f, "Scale{scale:?}"),
            Parameter::Captured(Captured { kind, index, part }) => {
                write!(f, "{} tensor {index}", kind.name())?;
                match part {
                    CapturedPart::Address => Ok(()),
                    CapturedPart::Extent(dimension) => write!(f, " extent {dimension}"),
                    CapturedPart::Stride(dimension) => write!(f, " stride {dimension}"),
                }
            }
        }
    }
}

impl Parameter {
    /// What declared parameters are, in order; an error names one that is none of these.
    pub fn of(declared: &[ptx::Parameter]) -> Result<Vec<Parameter>, String> {
        let of = |it: &ptx::Parameter| {
            let unknown = || format!("nobody knows what to pass for the parameter `{}`", it.name);
            Parameter::named(&it.name).ok_or_else(unknown)
        };
        declared.iter().map(of).collect()
    }

    fn named(name: &str) -> Option<Parameter> {
        static NAMES: OnceLock<HashMap<String, Parameter>> = OnceLock::new();
        let names = NAMES.get_or_init(|| {
            let mut all = Vec::new();
            for tensor in Tensor::EVERY {
                let it = *tensor;
                all.extend([Parameter::Tensor(it), Parameter::Rows(it)]);
                all.extend([Parameter::EntryRows(it), Parameter::SequenceRows(it)]);
                all.extend(Axis::EVERY.iter().map(|axis| Parameter::Stride(it, *axis)));
            }
            for number in Number::EVERY {
                let it = *number;
                all.extend([Parameter::Number(it), Parameter::Multiplier(it)]);
                all.push(Parameter::Shift(it));
            }
            all.extend(List::EVERY.iter().map(|it| Parameter::List(*it)));
            all.extend(Workspace::EVERY.iter().map(|it| Parameter::Workspace(*it)));
            all.extend(Reach::EVERY.iter().map(|it| Parameter::Reach(*it)));
            all.extend(Scale::EVERY.iter().map(|it| Parameter::Scale(*it)));
            all.extend(Captured::every().map(Parameter::Captured));
            all.into_iter().map(|it| (it.to_string(), it)).collect()
        });
        names.get(name).copied()
    }
}

/// Declaring parameters: each is read into a register of its type.
#[track_caller]
fn declare<T: ptx::Scalar + ptx::Passed>(k: &mut Builder, parameter: Parameter) -> Reg<T> {
    k.parameter(&parameter.to_string())
}

impl Tensor {
    /// Declares its address.
    #[track_caller]
    pub(crate) fn address(self, k: &mut Builder) -> Reg<GlobalAddress> {
        declare(k, Parameter::Tensor(self))
    }

    /// Declares a tensor map over it.
    #[track_caller]
    pub(crate) fn map(self, k: &mut Builder, tensor_box: TensorBox) -> TensorMap {
        k.tensor_map(&Parameter::Tensor(self).to_string(), tensor_box)
    }

    /// Declares one of its strides.
    #[track_caller]
    pub(crate) fn stride(self, k: &mut Builder, axis: Axis) -> Reg<U64> {
        declare(k, Parameter::Stride(self, axis))
    }

    /// Declares its rows in all.
    #[track_caller]
    pub(crate) fn rows(self, k: &mut Builder) -> Reg<U32> {
        declare(k, Parameter::Rows(self))
    }

    /// Declares its rows from the place of a sequence to that of the next.
    #[track_caller]
    pub(crate) fn sequence_rows(self, k: &mut Builder) -> Reg<U32> {
        declare(k, Parameter::SequenceRows(self))
    }

    /// Declares its rows from a batch entry or page to the next.
    #[track_caller]
    pub(crate) fn entry_rows(self, k: &mut Builder) -> Reg<U32> {
        declare(k, Parameter::EntryRows(self))
    }
}

impl List {
    /// What attention may be given beside its tensors; the others go with appending.
    pub const OF_ATTENTION: [List; 9] = [
        List::QueryStarts,
        List::QueryLengths,
        List::KeyStarts,
        List::KeyLengths,
        List::LeftPadding,
        List::BatchIndex,
        List::BlockTable,
        List::Slopes,
        List::Sinks,
    ];

    /// Declares its address.
    #[track_caller]
    pub(crate) fn address(self, k: &mut Builder) -> Reg<GlobalAddress> {
        declare(k, Parameter::List(self))
    }
}

impl Workspace {
    /// Declares its address.
    #[track_caller]
    pub(crate) fn address(self, k: &mut Builder) -> Reg<GlobalAddress> {
        declare(k, Parameter::Workspace(self))
    }
}

impl Number {
    /// Declares it. For a number that is divided by, see
    /// [`DivisorRegisters`](crate::divisor::DivisorRegisters).
    #[track_caller]
    pub(crate) fn read(self, k: &mut Builder) -> Reg<U32> {
        declare(k, Parameter::Number(self))
    }
}

impl Reach {
    /// Declares it.
    #[track_caller]
    pub(crate) fn read(self, k: &mut Builder) -> Reg<S32> {
        declare(k, Parameter::Reach(self))
    }
}

impl Captured {
    fn every() -> impl Iterator<Item = Captured> {
        let parts = (0..TensorSpec::MOST_DIMENSIONS as u8)
            .flat_map(|it| [CapturedPart::Extent(it), CapturedPart::Stride(it)])
            .chain([CapturedPart::Address]);
        let tensors = Kind::ALL
            .into_iter()
            .flat_map(|kind| (0..TensorSpec::MOST_TENSORS as u8).map(move |index| (kind, index)));
        tensors.flat_map(move |(kind, index)| {
            parts.clone().map(move |part| Captured { kind, index, part })
        })
    }

    /// Declares the address.
    #[track_caller]
    pub(crate) fn address(self, k: &mut Builder) -> Reg<GlobalAddress> {
        declare(k, Parameter::Captured(self))
    }

    /// Declares an extent.
    #[track_caller]
    pub(crate) fn extent(self, k: &mut Builder) -> Reg<U32> {
        declare(k, Parameter::Captured(self))
    }

    /// Declares a stride.
    #[track_caller]
    pub(crate) fn stride(self, k: &mut Builder) -> Reg<U64> {
        declare(k, Parameter::Captured(self))
    }
}

impl Scale {
    /// Declares it.
    #[track_caller]
    pub(crate) fn read(self, k: &mut Builder) -> Reg<F32> {
        declare(k, Parameter::Scale(self))
    }
}
