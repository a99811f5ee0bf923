//! Attention as a custom operation of candle's.
//!
//! An operation has one output, which candle keeps for the backward pass together with the
//! arguments. The log-sum-exp, where it is wanted, is stored in the operation, which candle keeps
//! as well: the caller takes it from there, or the backward pass reads it.

use std::sync::{Mutex, PoisonError};

use candle_core::{
    CpuStorage, CudaStorage, CustomOp3, Device, Layout, Result, Shape, Storage, Tensor,
};

use crate::arguments::{Call, no_device};
use crate::cpu;

pub(crate) struct Operation {
    call: Call,
    /// The log-sum-exp of the forward pass, once it has run.
    lse: Mutex<Option<Tensor>>,
}

impl Operation {
    pub(crate) fn new(call: Call) -> Self {
        Operation { call, lse: Mutex::default() }
    }

    /// Returns the log-sum-exp of the forward pass.
    pub(crate) fn lse(&self) -> Result<Tensor> {
        let lse = self.lse.lock().unwrap_or_else(PoisonError::into_inner).clone();
        lse.ok_or_else(|| candle_core::Error::Msg("attention left no log-sum-exp".to_owned()))
    }

    fn leave(&self, lse: Option<Storage>) {
        let lse = lse.map(|lse| crate::tensor(lse, self.call.lse_shape()));
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

    /// Returns the gradients of the tensors that depend on a variable.
    fn bwd(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        output: &Tensor,
        output_gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (inputs, lse) = ([query, key, value], self.lse()?);
        self.call.check_gradients()?;
        // Candle's gradients are contiguous, except for one with which a caller starts.
        let saved = Saved { output, lse: &lse, output_gradient: &output_gradient.contiguous()? };
        let gradients = match query.device() {
            Device::Cpu => cpu::differentiate(&self.call, inputs, saved)?,
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => crate::cuda::differentiate(&self.call, inputs, saved, device)?,
            other => return Err(no_device(other)),
        };
        let [query, key, value] = std::array::from_fn(|index| inputs[index].track_op());
        let [of_query, of_key, of_value] = gradients;
        Ok((query.then_some(of_query), key.then_some(of_key), value.then_some(of_value)))
    }
}

/// What the backward pass reads besides the inputs. All of it is contiguous.
pub(crate) struct Saved<'a> {
    pub(crate) output: &'a Tensor,
    pub(crate) lse: &'a Tensor,
    pub(crate) output_gradient: &'a Tensor,
}
