//! The parameters of kernels. Each one says what it is, and so where its argument comes from.
//!
//! All kernels but `single` and `product` declare their parameters by these names and no
//! others. Whoever launches a kernel, on a GPU or in the simulator, reads the declarations back
//! ([`Parameter::of`]) and has one place to look each of them up.

use std::collections::HashMap;
use std::fmt;
use std::sync::OnceLock;

use ptx::{Builder, F32, GlobalAddress, Reg, S32, TensorBox, TensorMap, U32, U64};

use crate::attention::function::{Kind, TensorSpec};

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Parameter {
    /// A tensor: its address, or a TMA tensor map over it.
    Tensor(Tensor),
    /// A stride of a tensor, in elements; a 64-bit number.
    Stride(Tensor, Axis),
    /// The total rows of a tensor whose batch entries are taken as one list of rows.
    Rows(Tensor),
    /// The rows from one batch entry or page of a tensor to the next.
    EntryRows(Tensor),
    /// The rows from the start of one sequence in a tensor to that of the next; 0 where a list or a
    /// block table says where sequences are.
    SequenceRows(Tensor),
    /// The address of a list of numbers on the device, such as one for each sequence or head; 0
    /// where the list is absent.
    List(List),
    /// The address of a workspace, which belongs to the plan.
    Workspace(Workspace),
    /// An unsigned 32-bit number; of a divisor, the number itself.
    Number(Number),
    /// The rounded reciprocal of a divisor ([`Divisor::multiplier`](crate::Divisor::multiplier)).
    Multiplier(Number),
    /// How far the product with the reciprocal is shifted
    /// ([`Divisor::shift`](crate::Divisor::shift)).
    Shift(Number),
    /// A signed 32-bit number: how far a query sees.
    Reach(Reach),
    /// A scale factor of the scores.
    Scale(Scale),
    /// The address, an extent or a stride of a tensor that a mask or score function loads from.
    Captured(Captured),
}

/// A parameter that describes a tensor which a mask or score function loads from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Captured {
    /// Whether the mask function or the score function loads from it.
    pub kind: Kind,
    /// The index of the tensor among those of the function.
    pub index: u8,
    /// What the parameter says of the tensor.
    pub part: CapturedPart,
}

/// What a [`Captured`] parameter says of its tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CapturedPart {
    /// Its address.
    Address,
    /// The extent of a dimension, a 32-bit number.
    Extent(u8),
    /// The stride of a dimension in elements, a 64-bit number.
    Stride(u8),
}

/// Declares enumerations with a list of all their variants, for the table of names.
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
    /// The tensors of attention, its gradients and its cache.
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
        /// Partial outputs, each over a part of the keys (split-KV).
        PartialOutput,
        /// Log-sum-exps of the partial outputs.
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
        /// The gradient of the log-sum-exps, with their layout.
        LseGradient,
        /// The descale factors of 8-bit queries, in `f32`, over (sequence, key head).
        QueryDescale,
        /// The descale factors of 8-bit keys, in `f32`, over (sequence, key head), or over (batch
        /// entry or page, row, key head).
        KeyDescale,
        /// The descale factors of 8-bit values, with the same dimensions as those of keys.
        ValueDescale,
        /// The keys of an 8-bit cache converted to 16 bits, in the plan's workspace.
        WideKey,
        /// The values of an 8-bit cache converted to 16 bits, in the plan's workspace.
        WideValue,
    }

    /// A dimension of a tensor that has a stride.
    pub enum Axis {
        /// From one batch entry or page to the next.
        Batch,
        /// From one row to the next.
        Row,
        /// From one row to the next, where batch entries are taken as one list of rows.
        FlatRow,
        /// From one head to the next.
        Head,
        /// From one part of a split to the next.
        Part,
    }

    /// Lists of numbers on the device; of 32 bits each but for the tables of rotary embeddings.
    pub enum List {
        /// Where each sequence's packed queries begin, and where the last ones end
        /// (`cu_seqlens_q`).
        QueryStarts,
        /// The number of queries that each sequence uses (`seqused_q`).
        QueryLengths,
        /// Where each sequence's packed keys begin, and where the last ones end (`cu_seqlens_k`).
        KeyStarts,
        /// The number of keys that each sequence uses (`seqused_k`, `cache_seqlens`).
        KeyLengths,
        /// The number of positions to skip before each sequence's first key (`leftpad_k`).
        LeftPadding,
        /// The batch entry of each sequence (`cache_batch_idx`).
        BatchIndex,
        /// The page table: the pages of each sequence (`block_table`).
        BlockTable,
        /// ALiBi slopes in `f32`.
        Slopes,
        /// The sinks of the query heads in `f32`.
        Sinks,
        /// Where each sequence's new keys begin in their tensor, and where the last ones end.
        NewStarts,
        /// The number of new keys of each sequence.
        NewLengths,
        /// Where the lengths of the sequences after appending are written.
        LengthsAfter,
        /// The cosines of rotary embeddings.
        Cosines,
        /// The sines of rotary embeddings.
        Sines,
        /// The rotary position of each sequence's first new key.
        RotaryStarts,
    }

    /// Workspaces: device memory that belongs to a plan.
    pub enum Workspace {
        /// The tile lists of the forward kernel, one for each thread block
        /// ([`TileLists`](crate::forward::TileLists)).
        TileLists,
        /// The schedule of a ragged batch, which the [`Sequencer`](crate::Sequencer) writes.
        Schedule,
        /// The block lists of a mask function
        /// ([`BlockMask`](crate::attention::function::BlockMask)).
        BlockLists,
        /// What the [`BlockFinder`](crate::BlockFinder) found for each pair of a query tile and a
        /// key block, where block lists are made on the device.
        FoundBlocks,
        /// Partial results, where several thread blocks share the work of a tile or of a sequence.
        Partials,
        /// Counters and flags between thread blocks: partial results that have been written, or
        /// tiles that have been claimed. Zero between launches.
        Counters,
        /// Timestamps from inside the kernel.
        Probe,
        /// Two numbers of each query row for the backward pass, from its log-sum-exp and the row
        /// sum of `dO * O` (delta), one block of rows after the other.
        RowStatistics,
        /// The sums of `dQ` in `f32`, while they are accumulated.
        QueryGradientSums,
        /// Counters that order accesses to the sums of `dQ` (FlashAttention's `dq_semaphore`). In
        /// the deterministic backward pass, for each block of query rows, how many key tiles
        /// have added to its sums of `dQ`. Otherwise, for each key head, how many tiles have
        /// cleared sums and how many have added to them; in a ragged batch, at the index of the
        /// head's first tile.
        Turns,
    }

    /// Numbers that follow from a problem or from the shape of a launch.
    pub enum Number {
        /// The number of sequences.
        Batch,
        /// The queries of a sequence; the most, where lengths differ.
        QueryLength,
        /// The keys of a sequence; the most, where lengths differ.
        KeyLength,
        /// Query heads.
        QueryHeads,
        /// Key heads.
        KeyHeads,
        /// Query heads that share a key head.
        GroupSize,
        /// Rows of a batch entry of the query tensor; of the whole tensor where queries are packed.
        QueryRows,
        /// Rows of the whole key tensor where keys are packed, else the key length; bounds where a
        /// sequence's keys may begin.
        KeyRows,
        /// Batch entries or pages of the cache.
        Entries,
        /// Positions of a page.
        PageSize,
        /// Columns of the block table: the most pages of a sequence.
        PageColumns,
        /// Elements from the log-sum-exps of one head to those of the next.
        LseHeadStride,
        /// Elements from the log-sum-exps of one sequence to those of the next; 0 where queries are
        /// packed.
        LseBatchStride,
        /// Elements from the slopes of one sequence to those of the next; 0 where all share them.
        SlopesStride,
        /// Positions of a chunk, with a chunked mask.
        Chunk,
        /// The total number of tiles.
        Tiles,
        /// The number of tiles that are not split into parts; they come first.
        WholeTiles,
        /// Tiles of a wave of the backward kernel: those that run at the same time.
        TilesOfRound,
        /// Query tiles per head.
        TilesPerHead,
        /// Tiles of a group of heads that are scheduled together to share L2.
        TilesPerGroup,
        /// Heads of a group that are scheduled together to share L2.
        HeadsPerGroup,
        /// Heads of the first group, which may have fewer than the others.
        FirstHeads,
        /// The first head of the last group.
        LastHeads,
        /// The number of parts that a tile's key blocks (in the backward kernel, its query blocks)
        /// are split into.
        Splits,
        /// Key blocks of a part of a split tile.
        BlocksPerSplit,
        /// The number of partial results that are combined for each row.
        Parts,
        /// Query rows over all heads and sequences.
        AllRows,
        /// Teams of thread blocks of the decode kernel.
        Teams,
        /// Thread blocks of a team.
        BlocksPerTeam,
        /// The fewest key tiles that a team takes.
        LeastTiles,
        /// The partial results of sequences that a thread block has room for.
        PartsPerBlock,
        /// Key blocks per head.
        KeyBlocks,
        /// Blocks of query rows per head.
        QueryBlocks,
        /// Key tiles over all heads.
        KeyTiles,
        /// Key tiles whose shares of the sums of `dQ` are cleared before the backward kernel runs.
        ClearedTiles,
        /// Blocks of query rows whose sums of `dQ` are cleared before the backward kernel runs.
        ClearedBlocks,
        /// Key tiles whose shares of the sums of `dQ` are rounded while the backward kernel runs.
        RoundedTiles,
        /// In a ragged batch, how many key tiles later a tile's share of the sums of `dQ` is
        /// rounded; the shares of as many last tiles are rounded after the backward kernel.
        RoundedAfter,
        /// In a ragged batch, how many thread blocks clear or round the share of one key tile
        /// before or after the backward kernel: as many as a share has blocks of query rows, on
        /// average.
        BlocksPerShare,
        /// Blocks of query rows whose sums of `dQ` are rounded while the backward kernel runs.
        RoundedBlocks,
        /// Rows of a tile in the schedule of a ragged batch: queries, or keys in the backward pass.
        TileRows,
        /// Words from the block list of one tile to that of the next.
        BlockListWords,
        /// Words from the block lists of one sequence to those of the next; 0 where sequences share
        /// them.
        BlockListBatchStride,
        /// Words from the block lists of one head to those of the next; 0 where heads share them.
        BlockListHeadStride,
        /// Thread blocks of the forward kernel that the tile sharer distributes tiles to.
        SharingBlocks,
        /// Words from the tile list of one such thread block to that of the next.
        ListRoom,
        /// Query heads over all sequences.
        AllHeads,
        /// Pairs of a query tile and a key block that the block finder evaluates.
        BlockPairs,
        /// The total number of block lists.
        AllLists,
        /// The number of heads that have block lists of their own.
        ListHeads,
        /// Query heads over which one block list is found.
        HeadsPerList,
        /// Sequences over which one block list is found.
        SequencesPerList,
        /// The number of tiles that a schedule has room for.
        MaxTiles,
        /// The most new keys of a sequence.
        NewTokens,
        /// Rows of the tensors of new keys and values.
        NewRows,
        /// Rows of new keys over all heads and sequences.
        AllNewRows,
        /// Rows of rotated queries over all heads and sequences.
        AllRotatedRows,
        /// Positions of the rotary tables.
        RotaryPositions,
        /// Rotary positions from one query to the next: 1, or 0 where all queries are at the
        /// position of the first new key.
        QueryStep,
    }

    /// How far a query sees.
    pub enum Reach {
        /// The number of keys before its position.
        Left,
        /// The number of keys after its position.
        Right,
    }

    /// Scale factors of the scores.
    pub enum Scale {
        /// The softmax scale times log2(e).
        Log2,
        /// The softmax scale divided by the cap of scores: the factor inside the hyperbolic tangent.
        Inner,
        /// The cap of scores times log2(e): the factor outside the hyperbolic tangent.
        Outer,
        /// The softmax scale itself.
        Natural,
        /// The first coefficient of capped scores as a polynomial
        /// ([`CapPolynomial`](crate::attention::CapPolynomial)),
        CapLinear,
        /// its second,
        CapCubic,
        /// its third,
        CapQuintic,
        /// its fourth,
        CapSeptic,
        /// and the largest absolute value that it serves.
        CapMost,
    }
}

impl fmt::Display for Parameter {
    /// Writes the parameter's name in a program.
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
    /// Returns what the declared parameters of a program are, in order. The error names the first
    /// that is not known.
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

/// Declares a parameter and reads it into a register of its type.
#[track_caller]
fn declare<T: ptx::Scalar + ptx::ParameterType>(k: &mut Builder, parameter: Parameter) -> Reg<T> {
    k.parameter(&parameter.to_string())
}

impl Tensor {
    /// Declares the tensor's address.
    #[track_caller]
    pub(crate) fn address(self, k: &mut Builder) -> Reg<GlobalAddress> {
        declare(k, Parameter::Tensor(self))
    }

    /// Declares a tensor map over the tensor.
    #[track_caller]
    pub(crate) fn map(self, k: &mut Builder, tensor_box: TensorBox) -> TensorMap {
        k.tensor_map(&Parameter::Tensor(self).to_string(), tensor_box)
    }

    /// Declares one of the tensor's strides.
    #[track_caller]
    pub(crate) fn stride(self, k: &mut Builder, axis: Axis) -> Reg<U64> {
        declare(k, Parameter::Stride(self, axis))
    }

    /// Declares the tensor's total rows.
    #[track_caller]
    pub(crate) fn rows(self, k: &mut Builder) -> Reg<U32> {
        declare(k, Parameter::Rows(self))
    }

    /// Declares the rows from the start of one sequence in the tensor to that of the next.
    #[track_caller]
    pub(crate) fn sequence_rows(self, k: &mut Builder) -> Reg<U32> {
        declare(k, Parameter::SequenceRows(self))
    }

    /// Declares the rows from one batch entry or page of the tensor to the next.
    #[track_caller]
    pub(crate) fn entry_rows(self, k: &mut Builder) -> Reg<U32> {
        declare(k, Parameter::EntryRows(self))
    }
}

impl List {
    /// The lists that attention may be given beside its tensors; the others belong to appending.
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

    /// Declares the list's address.
    #[track_caller]
    pub(crate) fn address(self, k: &mut Builder) -> Reg<GlobalAddress> {
        declare(k, Parameter::List(self))
    }
}

impl Workspace {
    /// Declares the workspace's address.
    #[track_caller]
    pub(crate) fn address(self, k: &mut Builder) -> Reg<GlobalAddress> {
        declare(k, Parameter::Workspace(self))
    }
}

impl Number {
    /// Declares the number. For divisors see
    /// [`DivisorRegisters`](crate::divisor::DivisorRegisters).
    #[track_caller]
    pub(crate) fn read(self, k: &mut Builder) -> Reg<U32> {
        declare(k, Parameter::Number(self))
    }
}

impl Reach {
    /// Declares the reach.
    #[track_caller]
    pub(crate) fn read(self, k: &mut Builder) -> Reg<S32> {
        declare(k, Parameter::Reach(self))
    }
}

impl Captured {
    /// Returns every parameter of this kind, for the table of names.
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

    /// Declares this parameter as an address.
    #[track_caller]
    pub(crate) fn address(self, k: &mut Builder) -> Reg<GlobalAddress> {
        declare(k, Parameter::Captured(self))
    }

    /// Declares this parameter as an extent.
    #[track_caller]
    pub(crate) fn extent(self, k: &mut Builder) -> Reg<U32> {
        declare(k, Parameter::Captured(self))
    }

    /// Declares this parameter as a stride.
    #[track_caller]
    pub(crate) fn stride(self, k: &mut Builder) -> Reg<U64> {
        declare(k, Parameter::Captured(self))
    }
}

impl Scale {
    /// Declares the scale.
    #[track_caller]
    pub(crate) fn read(self, k: &mut Builder) -> Reg<F32> {
        declare(k, Parameter::Scale(self))
    }
}
