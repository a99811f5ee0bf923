//! The tensors and lists that a launch of attention reads and writes.

use cuda::DeviceAddress;
use kernels::attention::function::{Kind, TensorSpec};
use kernels::parameter::{Captured, CapturedPart, List, Tensor, Workspace};

use super::GpuError;
use super::executable::Addresses;
use crate::plan::arrangement::COPY_BYTES;
use crate::plan::{Arrangement, GradientStrides, Source};
use crate::problem::{Descale, Descales, Pass, Problem, Storage};
use crate::tensor::{Layout, Strides, TensorError, TensorView};

/// A tensor on the device, logically (batch, length, heads, dim). The last dimension is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct DeviceTensor {
    /// Address of its first element.
    pub address: DeviceAddress,
    /// Distances between neighbours along the first three dimensions, in elements.
    pub strides: Strides,
}

impl DeviceTensor {
    /// Describes a copy of a tensor in host memory.
    pub(super) fn like(address: DeviceAddress, tensor: TensorView<'_>) -> Self {
        DeviceTensor { address, strides: tensor.layout().strides() }
    }

    /// Refuses an address or strides that are not a multiple of `bytes`.
    pub(super) fn aligned(
        &self,
        tensor: &'static str,
        element: usize,
        bytes: usize,
    ) -> Result<(), GpuError> {
        let DeviceTensor { address, strides } = self;
        let refuse = |reason: String| Err(GpuError::Tensor { tensor, reason });
        if address.0 == 0 || !address.0.is_multiple_of(bytes as u64) {
            return refuse(format!("its address {address} is not a multiple of {bytes}"));
        }
        for (name, stride) in
            [("batch", strides.batch), ("length", strides.length), ("heads", strides.heads)]
        {
            let given = stride.saturating_mul(element);
            if !given.is_multiple_of(bytes) {
                return refuse(format!(
                    "its {name} stride of {given} bytes is not a multiple of {bytes}"
                ));
            }
        }
        Ok(())
    }
}

/// The tensors and lists of one call, on the device.
///
/// Lists hold one 32-bit number per sequence, lists of starts one more. They are read on the device
/// when the launch runs, and out-of-range entries are clamped there to the bounds of the problem.
/// The problem's [`Storage`] and [`Lists`](crate::Lists) determine which lists must be given.
///
/// | here | in FlashAttention |
/// | --- | --- |
/// | `query_starts`, `key_starts` | `cu_seqlens_q`, `cu_seqlens_k` |
/// | `query_lengths`, `key_lengths` | `seqused_q`, `seqused_k` or `cache_seqlens` |
/// | `left_padding` | `leftpad_k` |
/// | `batch_index` | `cache_batch_idx` |
/// | `block_table` | `block_table` or `page_table` |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tensors {
    /// The queries, with the shape [`Problem::query_shape`].
    pub query: DeviceTensor,
    /// The keys, with the shape [`Problem::key_shape`].
    pub key: DeviceTensor,
    /// The values, with the keys' shape but for the dim.
    pub value: DeviceTensor,
    /// Receives the output, of the queries' shape with the value head dim; it must not overlap the
    /// other tensors. Rows that are not a query of a sequence are not written.
    pub output: DeviceTensor,
    /// Receives the log-sum-exps, contiguous in f32: (sequences, query heads, queries), or (query
    /// heads, rows) for packed queries, as in FlashAttention. `None` where the problem does not
    /// want them.
    pub lse: Option<DeviceAddress>,
    /// Start of each sequence's queries, and the end of the last.
    pub query_starts: Option<DeviceAddress>,
    /// Number of queries of each sequence. The last query has the position of the last key.
    pub query_lengths: Option<DeviceAddress>,
    /// Start of each sequence's keys, and the end of the last.
    pub key_starts: Option<DeviceAddress>,
    /// Number of keys of each sequence, left padding included.
    pub key_lengths: Option<DeviceAddress>,
    /// Number of positions at the start of each sequence that are skipped.
    pub left_padding: Option<DeviceAddress>,
    /// Batch entry of each sequence.
    pub batch_index: Option<DeviceAddress>,
    /// Pages of each sequence, one row per sequence.
    pub block_table: Option<DeviceAddress>,
    /// ALiBi slopes in f32: one per query head, or one per sequence and query head.
    pub slopes: Option<DeviceAddress>,
    /// Sinks in f32, one per query head.
    pub sinks: Option<DeviceAddress>,
    /// Descale factors of 8-bit queries, keys and values, in f32, with the shapes
    /// [`Problem::descale_shapes`].
    pub descales: Descales<Option<DeviceTensor>>,
    /// The gradients, in the backward pass. The output and the log-sum-exps are then read, not
    /// written.
    pub gradients: Option<Gradients>,
    /// The tensors that functions load from.
    pub captured: CapturedTensors,
    /// Lists of key blocks to use instead of the plan's own, made by
    /// [`Choice::lists_over`](crate::family::Choice::lists_over) from the contents of captured
    /// tensors. For a plan that [finds its lists](crate::gpu::AttentionPlan::with_found_lists), the
    /// memory into which a preparation writes them.
    pub block_lists: Option<DeviceAddress>,
    /// The lists of tiles that belong to `block_lists`.
    pub tile_lists: Option<DeviceAddress>,
}

/// A tensor on the device that a function loads from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CapturedTensor {
    /// Address of its first element.
    pub address: DeviceAddress,
    /// Size of each dimension, from 1 to 2^31 - 1.
    pub extents: [u32; TensorSpec::MOST_DIMENSIONS],
    /// Distance between neighbours along each dimension, in elements.
    pub strides: [u64; TensorSpec::MOST_DIMENSIONS],
}

/// The tensors that the functions of a problem load from, in the order in which each function
/// declares them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct CapturedTensors {
    /// Tensors of the mask function.
    pub mask: [Option<CapturedTensor>; TensorSpec::MOST_TENSORS],
    /// Tensors of the score function.
    pub score: [Option<CapturedTensor>; TensorSpec::MOST_TENSORS],
}

impl CapturedTensors {
    fn of(&self, kind: Kind, index: u8) -> Option<&CapturedTensor> {
        let tensors = match kind {
            Kind::Mask => &self.mask,
            Kind::Score => &self.score,
        };
        tensors.get(usize::from(index))?.as_ref()
    }

    /// Sets a tensor wherever the problem's functions declare its name.
    pub(super) fn insert(&mut self, problem: &Problem, name: &str, tensor: CapturedTensor) {
        for function in problem.functions() {
            let tensors = match function.kind() {
                Kind::Mask => &mut self.mask,
                Kind::Score => &mut self.score,
            };
            for (place, spec) in tensors.iter_mut().zip(function.tensors()) {
                if spec.name == name {
                    *place = Some(tensor);
                }
            }
        }
    }
}

/// The gradients of the results, which are read, and the gradients to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gradients {
    /// Gradient of the output (dO), of the output's shape.
    pub output: DeviceTensor,
    /// Receives the gradient of the queries (dQ).
    pub query: DeviceTensor,
    /// Receives the gradient of the keys (dK).
    pub key: DeviceTensor,
    /// Receives the gradient of the values (dV).
    pub value: DeviceTensor,
    /// Receives the gradients of the sinks in f32, one per query head, where the problem has sinks.
    pub sinks: Option<DeviceAddress>,
    /// Gradient of the log-sum-exps (dLSE), which is read, in their layout, where the problem has
    /// [`lse_gradient`](Problem::lse_gradient).
    pub lse: Option<DeviceAddress>,
}

impl Tensors {
    /// Takes tensors, without any list.
    pub fn new([query, key, value, output]: [DeviceTensor; 4], lse: Option<DeviceAddress>) -> Self {
        Tensors {
            query,
            key,
            value,
            output,
            lse,
            query_starts: None,
            query_lengths: None,
            key_starts: None,
            key_lengths: None,
            left_padding: None,
            batch_index: None,
            block_table: None,
            slopes: None,
            sinks: None,
            descales: Descales::default(),
            gradients: None,
            captured: CapturedTensors::default(),
            block_lists: None,
            tile_lists: None,
        }
    }

    /// Returns the lists, in the order of [`List::OF_ATTENTION`].
    pub fn lists_mut(&mut self) -> [&mut Option<DeviceAddress>; 9] {
        [
            &mut self.query_starts,
            &mut self.query_lengths,
            &mut self.key_starts,
            &mut self.key_lengths,
            &mut self.left_padding,
            &mut self.batch_index,
            &mut self.block_table,
            &mut self.slopes,
            &mut self.sinks,
        ]
    }

    /// Takes contiguous query, key, value and output in the order (batch, length, heads, dim).
    pub fn contiguous(
        problem: &Problem,
        addresses: [DeviceAddress; 4],
        lse: Option<DeviceAddress>,
    ) -> Result<Self, TensorError> {
        let shapes = [
            problem.query_shape(),
            problem.key_shape(),
            problem.value_shape(),
            problem.output_shape(),
        ];
        let mut tensors =
            addresses.map(|address| DeviceTensor { address, strides: Strides::default() });
        for (tensor, shape) in tensors.iter_mut().zip(shapes) {
            tensor.strides = Layout::contiguous(shape)?.strides();
        }
        Ok(Tensors::new(tensors, lse))
    }

    /// Returns the strides and alignments, on which the plan depends.
    pub fn arrangement(&self) -> Arrangement {
        let Tensors { query, key, value, output, .. } = self;
        let aligned = |tensor: &DeviceTensor| tensor.address.0.is_multiple_of(COPY_BYTES);
        let gradients = self.gradients.map(|gradients| GradientStrides {
            query: gradients.query.strides,
            key: gradients.key.strides,
            value: gradients.value.strides,
            output: gradients.output.strides,
        });
        let of_gradients = |Gradients { output, query, key, value, .. }: Gradients| {
            [output, query, key, value].iter().all(aligned)
        };
        Arrangement {
            query: query.strides,
            key: key.strides,
            value: value.strides,
            output: output.strides,
            gradients,
            descales: self.descales.map(|it| it.map_or_else(Strides::default, |it| it.strides)),
            aligned: [query, key, value, output].into_iter().all(aligned)
                && self.gradients.is_none_or(of_gradients),
        }
    }

    /// Refuses missing, unexpected or misaligned tensors and lists, as far as the host can tell.
    pub(super) fn validate(&self, problem: &Problem) -> Result<(), GpuError> {
        let Problem { queries, keys, lists, scores, .. } = problem;
        let check = |tensor: &'static str, given: Option<DeviceAddress>, expected: bool| {
            let fits = match given {
                None => !expected,
                Some(address) => expected && address.0.is_multiple_of(4),
            };
            if fits { Ok(()) } else { Err(misfit(tensor, given, expected)) }
        };
        check("list of query starts", self.query_starts, queries.is_packed())?;
        check("list of query lengths", self.query_lengths, lists.query_lengths)?;
        check("list of key starts", self.key_starts, keys.is_packed())?;
        check("list of key lengths", self.key_lengths, lists.key_lengths)?;
        check("list of left paddings", self.left_padding, lists.left_padding)?;
        check("batch index", self.batch_index, lists.batch_index)?;
        check("block table", self.block_table, matches!(keys, Storage::Paged { .. }))?;
        check("list of slopes", self.slopes, scores.has_alibi())?;
        check("list of sinks", self.sinks, scores.sinks)?;
        for function in problem.functions() {
            for (index, spec) in function.tensors().iter().enumerate() {
                let refuse = |reason: &str| {
                    let reason = format!("{}: {reason}", spec.name);
                    Err(GpuError::Tensor { tensor: "captured", reason })
                };
                let Some(tensor) = self.captured.of(function.kind(), index as u8) else {
                    return refuse("it is missing");
                };
                let within = |extent: &u32| (1..=i32::MAX as u32).contains(extent);
                if !tensor.extents[..spec.rank].iter().all(within) {
                    return refuse("it is empty, or a dimension is beyond 31 bits");
                }
                if !tensor.address.0.is_multiple_of(spec.stored.bytes() as u64) {
                    return refuse("its address is no multiple of its elements' size");
                }
            }
        }
        let names = Descales { query: "q_descale", key: "k_descale", value: "v_descale" };
        let given = names.zip(self.descales).zip(problem.descales);
        for ((name, given), expected) in given.into_array() {
            check(name, given.map(|it| it.address), expected != Descale::None)?;
        }
        let backward = problem.pass == Pass::Backward;
        let output_gradient = self.gradients.map(|gradients| gradients.output.address);
        check("output gradient", output_gradient, backward)?;
        let sinks = self.gradients.and_then(|gradients| gradients.sinks);
        check("gradient of the sinks", sinks, backward && scores.sinks)?;
        let lse = self.gradients.and_then(|gradients| gradients.lse);
        check("gradient of the log-sum-exps", lse, problem.lse_gradient)?;
        check("log-sum-exp", self.lse, self.lse.is_some() || problem.lse)
    }
}

/// Makes the error for a list that is missing, unexpected or misaligned.
#[cold]
fn misfit(tensor: &'static str, given: Option<DeviceAddress>, expected: bool) -> GpuError {
    let reason = match given {
        None => "it is missing".to_owned(),
        Some(_) if !expected => "the problem has none".to_owned(),
        Some(address) => format!("its address {address} is not a multiple of 4"),
    };
    GpuError::Tensor { tensor, reason }
}

impl Addresses for Tensors {
    fn address(&self, source: Source) -> Option<DeviceAddress> {
        match source {
            Source::Tensor(Tensor::Query) => Some(self.query.address),
            Source::Tensor(Tensor::Key) => Some(self.key.address),
            Source::Tensor(Tensor::Value) => Some(self.value.address),
            Source::Tensor(Tensor::Output) => Some(self.output.address),
            Source::Tensor(Tensor::Lse) => self.lse,
            Source::Tensor(Tensor::QueryDescale) => self.descales.query.map(|it| it.address),
            Source::Tensor(Tensor::KeyDescale) => self.descales.key.map(|it| it.address),
            Source::Tensor(Tensor::ValueDescale) => self.descales.value.map(|it| it.address),
            Source::Tensor(tensor) => {
                let gradients = self.gradients.as_ref()?;
                match tensor {
                    Tensor::OutputGradient => Some(gradients.output.address),
                    Tensor::QueryGradient => Some(gradients.query.address),
                    Tensor::KeyGradient => Some(gradients.key.address),
                    Tensor::ValueGradient => Some(gradients.value.address),
                    Tensor::SinkGradient => gradients.sinks,
                    Tensor::LseGradient => gradients.lse,
                    _ => None,
                }
            }
            Source::List(list) => match list {
                List::QueryStarts => self.query_starts,
                List::QueryLengths => self.query_lengths,
                List::KeyStarts => self.key_starts,
                List::KeyLengths => self.key_lengths,
                List::LeftPadding => self.left_padding,
                List::BatchIndex => self.batch_index,
                List::BlockTable => self.block_table,
                List::Slopes => self.slopes,
                List::Sinks => self.sinks,
                _ => None,
            },
            Source::Workspace(Workspace::BlockLists) => self.block_lists,
            Source::Workspace(Workspace::TileLists) => self.tile_lists,
            Source::Captured(kind, index) => self.captured.of(kind, index).map(|it| it.address),
            _ => None,
        }
    }

    fn captured(&self, captured: Captured) -> u64 {
        let Some(tensor) = self.captured.of(captured.kind, captured.index) else { return 0 };
        match captured.part {
            CapturedPart::Address => tensor.address.0,
            CapturedPart::Extent(dimension) => tensor.extents[usize::from(dimension)].into(),
            CapturedPart::Stride(dimension) => tensor.strides[usize::from(dimension)],
        }
    }
}
