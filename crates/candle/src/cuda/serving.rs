//! Attention over sequences of unequal lengths, and with slopes or sinks.

use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{Result, Tensor};
use flashcore::gpu::{
    ForwardTensors, ServingPlan, ServingSize, ServingTensors, Stream, StreamIdentity,
};

use super::lists::{Held, addresses};
use super::{Place, lock};
use crate::arguments::Call;
use crate::{Sequences, wrap};

/// What a plan depends on. Its workspace is for launches that follow each other, on one stream.
#[derive(PartialEq)]
pub(super) struct Key {
    size: ServingSize,
    stream: StreamIdentity,
}

/// Puts attention over sequences on candle's stream.
pub(super) fn launch(
    call: &Call,
    tensors: ForwardTensors,
    place: &Place,
    stream: &Stream,
    candle_stream: &CudaStream,
) -> Result<()> {
    let held = lists(call).map(Held::new);
    let (addresses, _guards) = addresses(&held, candle_stream)?;
    let ForwardTensors { query, key, value, output, lse } = tensors;
    let [
        lengths,
        left_padding,
        entries,
        query_starts,
        query_lengths,
        key_starts,
        block_table,
        slopes,
        sinks,
    ] = addresses;
    let tensors = ServingTensors {
        lengths,
        left_padding,
        entries,
        query_starts,
        query_lengths,
        key_starts,
        block_table,
        slopes,
        sinks,
        ..ServingTensors::new(query, key, value, output, lse)
    };
    let size = size(call);
    let key = Key { size: size.clone(), stream: stream.identity() };
    let make = || ServingPlan::new(&place.gpu, &size).map_err(wrap);
    let plan = place.serving.get(key, stream, make)?;
    lock(&plan).launch(stream, &tensors).map_err(wrap)
}

/// The most that a call can ask for, whatever its lists hold.
fn size(call: &Call) -> ServingSize {
    let (query, key) = (call.layouts.query.shape(), call.layouts.key.shape());
    let mut size = ServingSize::new(call.problem.clone()).with_entries(key.batch);
    if let Some(Sequences { queries, keys }) = &call.sequences {
        if queries.is_packed() {
            size = size.with_packed_queries(query.length);
        }
        size = keys.size(size, key);
    }
    match call.slopes.as_ref().is_some_and(|slopes| slopes.rank() == 2) {
        true => size.with_slopes_of_sequences(),
        false => size,
    }
}

/// What a call has besides query, key and value, in the order in which it is taken apart again.
fn lists(call: &Call) -> [Option<&Tensor>; 9] {
    let (slopes, sinks) = (call.slopes.as_ref(), call.sinks.as_ref());
    let Some(Sequences { queries, keys }) = &call.sequences else {
        return [None, None, None, None, None, None, None, slopes, sinks];
    };
    [
        keys.lengths.as_ref(),
        keys.left_padding.as_ref(),
        keys.batch_entries(),
        queries.starts(),
        queries.lengths.as_ref(),
        keys.starts(),
        keys.table(),
        slopes,
        sinks,
    ]
}
