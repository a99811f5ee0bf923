//! Attention on candle tensors in host memory.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result};
use flashcore::{
    Backend, CpuBackend, Elements, Inputs, Plan, Preference, Problem, RunOptions, Tensor,
};

use crate::arguments::{Arguments, layout};
use crate::wrap;

/// Output and log-sum-exp.
pub(crate) fn attend(
    problem: &Problem,
    tensors: [(&CpuStorage, &Layout); 3],
) -> Result<(CpuStorage, Vec<f32>)> {
    let [query, key, value] = tensors.map(|(storage, layout)| tensor(storage, layout));
    let (query, key, value) = (query?, key?, value?);
    let inputs = Inputs::new(&query, &key, &value);
    let result = CpuBackend::new().run(problem, inputs, &RunOptions::default()).map_err(wrap)?;
    let output = match result.output.into_elements() {
        Elements::F32(elements) => CpuStorage::F32(elements),
        Elements::F16(elements) => CpuStorage::F16(elements),
        Elements::BF16(elements) => CpuStorage::BF16(elements),
        other => candle_core::bail!("candle has no storage for {} on the CPU", other.dtype()),
    };
    Ok((output, result.lse))
}

pub(crate) fn plan(arguments: &Arguments) -> Result<Plan> {
    let Arguments { problem, layouts } = arguments;
    // The tensors are here, so no preference for another back end can be meant for them.
    Plan::among(&[&CpuBackend::new()], problem, layouts, &Preference::default()).map_err(wrap)
}

/// A tensor of ours with the elements of one of candle's.
fn tensor(storage: &CpuStorage, of: &Layout) -> Result<Tensor> {
    let layout = layout("tensor", of)?;
    let elements = of.start_offset()..of.start_offset() + layout.span();
    let elements: Elements = match storage {
        CpuStorage::F32(all) => all[elements].to_vec().into(),
        CpuStorage::F16(all) => all[elements].to_vec().into(),
        CpuStorage::BF16(all) => all[elements].to_vec().into(),
        other => candle_core::bail!("attention takes no {:?}", other.dtype()),
    };
    Tensor::new(layout, elements).map_err(wrap)
}
