//! Attention as an operation of candle's.
//!
//! An operation of candle's has one output. The log-sum-exp, where it is wanted, is left in the
//! operation for the caller to take.

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, CudaStorage, CustomOp3, Layout, Result, Shape, Storage, Tensor};

use crate::arguments::Call;
use crate::cpu;

pub(crate) struct Operation {
    call: Call,
    /// Where the log-sum-exp is left.
    lse: Mutex<Option<Storage>>,
}

impl Operation {
    pub(crate) fn new(call: Call) -> Self {
        Operation { call, lse: Mutex::default() }
    }

    /// The log-sum-exp of the run that was.
    pub(crate) fn into_lse(self) -> Result<Tensor> {
        let lse = self.lse.into_inner().unwrap_or_else(PoisonError::into_inner);
        let lse =
            lse.ok_or_else(|| candle_core::Error::Msg("attention left no log-sum-exp".to_owned()))?;
        Ok(crate::tensor(lse, self.call.lse_shape()))
    }

    fn leave(&self, lse: Option<Storage>) {
        *self.lse.lock().unwrap_or_else(PoisonError::into_inner) = lse;
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
        self.leave(Some(Storage::Cpu(CpuStorage::F32(lse))));
        Ok((output, self.call.output_shape()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        query: &CudaStorage,
        _: &Layout,
        key: &CudaStorage,
        _: &Layout,
        value: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (output, lse) = crate::cuda::attend(&self.call, [query, key, value])?;
        self.leave(lse.map(Storage::Cuda));
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
