//! Attention as an operation of candle's.
//!
//! An operation of candle's has one output. The log-sum-exp, where it is wanted, is left in the
//! operation for the caller to take.

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, CudaStorage, CustomOp3, Layout, Result, Shape, Storage};

use crate::arguments::Call;
use crate::cpu;

pub(crate) struct Operation {
    call: Call,
    /// Where the log-sum-exp is left, if it is wanted.
    lse: Option<Mutex<Option<Storage>>>,
}

impl Operation {
    pub(crate) fn new(call: Call, lse: bool) -> Self {
        Operation { call, lse: lse.then(Mutex::default) }
    }

    /// The log-sum-exp of the run that was.
    pub(crate) fn into_lse(self) -> Result<Storage> {
        let lse = self.lse.and_then(|lse| lse.into_inner().unwrap_or_else(PoisonError::into_inner));
        lse.ok_or_else(|| candle_core::Error::Msg("attention left no log-sum-exp".to_owned()))
    }

    fn leave(&self, lse: Storage) {
        if let Some(place) = &self.lse {
            *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(lse);
        }
    }
}

impl CustomOp3 for Operation {
    fn name(&self) -> &'static str {
        "flashcore-attention"
    }

    fn cpu_fwd(
        &self,
        query: &CpuStorage,
        query_layout: &Layout,
        key: &CpuStorage,
        key_layout: &Layout,
        value: &CpuStorage,
        value_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let tensors = [(query, query_layout), (key, key_layout), (value, value_layout)];
        let (output, lse) = cpu::attend(&self.call, tensors)?;
        self.leave(Storage::Cpu(CpuStorage::F32(lse)));
        Ok((output, self.call.output_shape()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        query: &CudaStorage,
        query_layout: &Layout,
        key: &CudaStorage,
        key_layout: &Layout,
        value: &CudaStorage,
        value_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let tensors = [(query, query_layout), (key, key_layout), (value, value_layout)];
        let (output, lse) = crate::cuda::attend(&self.call, tensors)?;
        self.leave(Storage::Cuda(lse));
        Ok((output, self.call.output_shape()))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        candle_core::bail!("FlashCore was built without its feature `cuda`")
    }
}
