//! Which problems and tensors the `mma.sync` kernel serves, and in which configuration.

use kernels::mma::{Tuned, tuned};
use ptx::{Capability, Element};

use crate::dtype::DType;
use crate::gpu::forward::{COPY_BYTES, ForwardTensors, ROLES, tensor_core_workload};
use crate::gpu::{Chip, GpuError};
use crate::inputs::InputLayouts;
use crate::problem::Problem;
use crate::tensor::{Shape, Strides};

/// What the tensor cores add products up in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Sums {
    /// As exact as it gets.
    #[default]
    F32,
    /// Within a key block in f16: twice as fast on GPUs whose tensor cores are slower with f32,
    /// such as GeForce, and less exact (docs/architectures.md). Never chosen unless asked for.
    F16,
}

impl Sums {
    /// The name under which a kernel with these sums is asked for.
    pub const fn kernel(self) -> &'static str {
        match self {
            Sums::F32 => "mma",
            Sums::F16 => "mma-half",
        }
    }
}

/// The configuration for a problem, or why the kernel does not serve it.
pub fn choose(chip: &Chip, problem: &Problem, sums: Sums) -> Result<Tuned, String> {
    let target = chip.target;
    if !(target.has(Capability::Mma) && target.has(Capability::AsyncCopies)) {
        return Err(format!("{target} has no mma.sync for 16-bit floats, or no cp.async"));
    }
    if sums == Sums::F16 && problem.dtype != DType::F16 {
        return Err(format!("sums in f16 are for f16 tensors, not {}", problem.dtype));
    }
    let workload = tensor_core_workload(chip, problem)?;
    let sums = match sums {
        Sums::F32 => Element::F32,
        Sums::F16 if problem.head_dim.max(problem.value_head_dim) > 128 => {
            return Err("sums in f16 are for head dims up to 128".to_owned());
        }
        Sums::F16 => Element::F16,
    };
    tuned(target, &workload, sums).ok_or_else(|| "no configuration is tuned for it".to_owned())
}

/// Whether the kernel can read tensors that lie like this.
pub fn check_layouts(problem: &Problem, layouts: &InputLayouts) -> Result<(), String> {
    let tensors = [layouts.query, layouts.key, layouts.value];
    for (name, layout) in ROLES.into_iter().zip(tensors) {
        check_strides(problem.dtype, layout.shape(), layout.strides())
            .map_err(|reason| format!("the {name} tensor: {reason}"))?;
    }
    Ok(())
}

/// Whether the kernel can read and write these very tensors: their strides, and their addresses.
pub fn check_tensors(problem: &Problem, tensors: &ForwardTensors) -> Result<(), GpuError> {
    let shapes =
        [problem.query_shape(), problem.key_shape(), problem.value_shape(), problem.output_shape()];
    for ((name, shape), tensor) in ROLES.into_iter().zip(shapes).zip(tensors.tensors()) {
        let refused = |reason| GpuError::Tensor { tensor: name, reason };
        check_strides(problem.dtype, shape, tensor.strides).map_err(refused)?;
        let address = tensor.address;
        if !address.0.is_multiple_of(COPY_BYTES) {
            let reason = format!("its address {address} is not a multiple of {COPY_BYTES}");
            return Err(refused(reason));
        }
    }
    Ok(())
}

/// Copies take 16 bytes at a time, and the bytes from row to row are counted in 32 bits.
fn check_strides(dtype: DType, shape: Shape, strides: Strides) -> Result<(), String> {
    let dimensions = [
        ("length", shape.length, strides.length),
        ("heads", shape.heads, strides.heads),
        ("batch", shape.batch, strides.batch),
    ];
    for (name, size, stride) in dimensions {
        // Nobody takes a step along a dimension of one, and its stride may be anything.
        let bytes = if size == 1 { 0 } else { stride as u64 * dtype.bytes() as u64 };
        if !bytes.is_multiple_of(COPY_BYTES) {
            return Err(format!(
                "its {name} stride of {bytes} bytes is not a multiple of {COPY_BYTES}"
            ));
        }
        if name == "length" && bytes > u32::MAX as u64 {
            return Err(format!("its {name} stride of {bytes} bytes is not below 4 GiB"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use ptx::Target;

    use super::*;
    use crate::problem::Mask;

    #[test]
    fn what_is_served_has_a_configuration_of_its_own_dimensions() {
        for target in [Target::SM_80, Target::SM_86, Target::SM_89, Target::SM_90A, Target::SM_120]
        {
            let chip = Chip::typical(target);
            for dim in (8..=256).step_by(8) {
                let problem = Problem::new(1, 2, 100, dim).with_dtype(DType::BF16);
                let configuration = choose(&chip, &problem, Sums::F32).unwrap().configuration;
                assert_eq!((configuration.target, configuration.head_dim as usize), (target, dim));
                assert_eq!(configuration.accumulate, Element::F32);
            }
        }
        let chip = Chip::typical(Target::SM_89);
        let causal = Problem::new(1, 2, 100, 96).with_value_head_dim(128).with_mask(Mask::Causal);
        let configuration = choose(&chip, &causal, Sums::F16).unwrap().configuration;
        assert_eq!((configuration.head_dim, configuration.value_head_dim), (96, 128));
        assert!(configuration.causal && configuration.accumulate == Element::F16);
        // A row that sees nothing is served, and so is a problem of such rows.
        assert!(choose(&chip, &Problem::new(1, 2, 9, 64).with_key_length(0), Sums::F32).is_ok());
    }

    #[test]
    fn what_is_not_served_is_refused_with_the_reason() {
        let good = Problem::new(1, 2, 100, 64);
        let refusal = |target, problem: &Problem, sums| {
            choose(&Chip::typical(target), problem, sums).unwrap_err()
        };
        assert_eq!(
            refusal(Target::SM_75, &good, Sums::F32),
            "sm_75 has no mma.sync for 16-bit floats, or no cp.async"
        );
        assert_eq!(
            refusal(Target::SM_80, &good.clone().with_dtype(DType::F32), Sums::F32),
            "the tensor cores take f16 and bf16, not f32"
        );
        assert_eq!(
            refusal(Target::SM_80, &good.clone().with_dtype(DType::BF16), Sums::F16),
            "sums in f16 are for f16 tensors, not bf16"
        );
        assert_eq!(
            refusal(Target::SM_80, &Problem::new(1, 2, 100, 136), Sums::F16),
            "sums in f16 are for head dims up to 128"
        );
        assert_eq!(
            refusal(Target::SM_80, &Problem::new(1, 2, 100, 100), Sums::F32),
            "head dim 100 is not a multiple of 8 up to 256"
        );
    }

    #[test]
    fn strides_are_those_of_the_copies() {
        let shape = Shape::new(2, 100, 4, 64);
        let check = |strides| check_strides(DType::F16, shape, strides);
        let strides = Strides { batch: 25_600, length: 256, heads: 64 };
        assert_eq!(check(strides), Ok(()));
        assert_eq!(check(Strides { heads: 0, ..strides }), Ok(()));
        assert_eq!(
            check(Strides { heads: 68, ..strides }).unwrap_err(),
            "its heads stride of 136 bytes is not a multiple of 16"
        );
        assert_eq!(
            check(Strides { length: 1 << 31, ..strides }).unwrap_err(),
            "its length stride of 4294967296 bytes is not below 4 GiB"
        );
        assert_eq!(check(Strides { batch: 1 << 40, ..strides }), Ok(()));
    }
}
