//! Which problems and tensors the forward kernel serves, and in which configuration.

use std::ops::RangeInclusive;

use kernels::forward::{Workload, tuned};
use ptx::{Capability, Element};

use super::ForwardTensors;
use super::tuning::{Choice, Tunings};
use crate::dtype::DType;
use crate::gpu::Chip;
use crate::inputs::InputLayouts;
use crate::problem::{Mask, Problem};
use crate::tensor::{Shape, Strides};

/// Scales for which the kernel's reference for "nothing seen", -1e30, stays finite and does not
/// vanish when it is multiplied by them. A scale of zero and negative scales are outside: the
/// maximum of unscaled scores would not be the maximum of scaled ones.
const SCALES: RangeInclusive<f32> = 1e-20..=1e6;

/// The copy engine takes steps of this many bytes.
pub(in crate::gpu) const COPY_BYTES: u64 = 16;

/// The configuration for a problem, or why the kernel does not serve it.
pub fn choose(chip: &Chip, problem: &Problem) -> Result<Choice, String> {
    let workload = workload(chip, problem)?;
    let rules = tuned(&workload).ok_or_else(|| "no configuration is tuned for it".to_owned())?;
    Ok(Tunings::of_this_process().choose(chip, &workload, rules))
}

/// What a choice depends on, or why the kernel does not serve a problem.
pub fn workload(chip: &Chip, problem: &Problem) -> Result<Workload, String> {
    if !chip.target.has(Capability::Wgmma) {
        return Err(format!("{} has no wgmma", chip.target));
    }
    let workload = tensor_core_workload(chip, problem)?;
    if problem.key_length == 0 {
        return Err("there are no keys".to_owned());
    }
    Ok(workload)
}

/// The element of a problem whose type and head dims the tensor cores take, or why they do not.
pub(in crate::gpu) fn tensor_core_element(problem: &Problem) -> Result<Element, String> {
    let element = match problem.dtype {
        DType::F16 => Element::F16,
        DType::BF16 => Element::BF16,
        other => return Err(format!("the tensor cores take f16 and bf16, not {other}")),
    };
    for (name, dim) in [("head dim", problem.head_dim), ("value head dim", problem.value_head_dim)]
    {
        if dim == 0 || dim > 256 || !dim.is_multiple_of(8) {
            return Err(format!("{name} {dim} is not a multiple of 8 up to 256"));
        }
    }
    Ok(element)
}

/// What the choice among configurations depends on in every kernel with tensor cores, or why none
/// serves a problem.
pub(in crate::gpu) fn tensor_core_workload(
    chip: &Chip,
    problem: &Problem,
) -> Result<Workload, String> {
    let element = tensor_core_element(problem)?;
    if let Some(extra) = problem.beyond_plain() {
        return Err(format!("{extra} are not served"));
    }
    check_scale(problem)?;
    if problem.rows() == 0 {
        return Err("there are no queries".to_owned());
    }
    Ok(Workload {
        element,
        head_dim: problem.head_dim as u32,
        value_head_dim: problem.value_head_dim as u32,
        causal: problem.mask == Mask::Causal,
        query_length: problem.query_length as u64,
        key_length: problem.key_length as u64,
        heads: problem.batch as u64 * problem.query_heads as u64,
        multiprocessors: chip.multiprocessors,
    })
}

/// Refuses scales for which the softmax's references leave the range of numbers.
pub(in crate::gpu) fn check_scale(problem: &Problem) -> Result<(), String> {
    let scale = problem.scale();
    if SCALES.contains(&scale) {
        return Ok(());
    }
    let (least, most) = (SCALES.start(), SCALES.end());
    Err(format!("scale {scale} is not between {least:e} and {most:e}"))
}

/// Whether the copy engine can read tensors that lie like this.
pub fn check_layouts(problem: &Problem, layouts: &InputLayouts) -> Result<(), String> {
    let tensors = [("query", layouts.query), ("key", layouts.key), ("value", layouts.value)];
    for (name, layout) in tensors {
        map_strides(problem.dtype, layout.shape(), layout.strides())
            .map_err(|reason| format!("the {name} tensor: {reason}"))?;
    }
    Ok(())
}

/// Whether the copy engine can read and write these very tensors: their strides, and their
/// addresses.
pub fn check_tensors(problem: &Problem, tensors: &ForwardTensors) -> Result<(), String> {
    let shapes =
        [problem.query_shape(), problem.key_shape(), problem.value_shape(), problem.output_shape()];
    for ((name, shape), tensor) in super::ROLES.into_iter().zip(shapes).zip(tensors.tensors()) {
        map_strides(problem.dtype, shape, tensor.strides)
            .map_err(|reason| format!("the {name} tensor: {reason}"))?;
        let address = tensor.address;
        if !address.0.is_multiple_of(COPY_BYTES) {
            return Err(format!(
                "the {name} tensor: its address {address} is not a multiple of {COPY_BYTES}"
            ));
        }
    }
    Ok(())
}

/// The strides of a tensor map over (dim, length, heads, batch), in bytes, or why there is none.
pub(super) fn map_strides(
    dtype: DType,
    shape: Shape,
    strides: Strides,
) -> Result<[u64; 3], String> {
    let dimensions = [
        ("length", shape.length, strides.length),
        ("heads", shape.heads, strides.heads),
        ("batch", shape.batch, strides.batch),
    ];
    let mut bytes = [0; 3];
    for (to, (name, size, stride)) in bytes.iter_mut().zip(dimensions) {
        // Nobody takes a step along a dimension of one, and its stride may be anything.
        let stride = if size == 1 { shape.dim } else { stride };
        *to = (stride as u64).saturating_mul(dtype.bytes() as u64);
        if !to.is_multiple_of(COPY_BYTES) {
            let bytes = *to;
            return Err(format!(
                "its {name} stride of {bytes} bytes is not a multiple of {COPY_BYTES}"
            ));
        }
        if *to == 0 {
            return Err(format!("its {name} stride is zero"));
        }
        if *to >= 1 << 40 {
            return Err(format!("its {name} stride of {to} bytes is too large"));
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use cuda::DeviceAddress;
    use ptx::Target;

    use super::*;

    fn refusal(problem: &Problem) -> String {
        choose(&Chip::H200, problem).unwrap_err()
    }

    #[test]
    fn what_is_served_has_a_configuration_of_its_own_dimensions() {
        for dim in (8..=256).step_by(8) {
            let problem = Problem::new(1, 2, 100, dim).with_dtype(DType::BF16);
            let configuration = choose(&Chip::H200, &problem).unwrap().configuration;
            assert_eq!(configuration.head_dim as usize, dim);
            assert!(!configuration.causal);
        }
        let problem = Problem::new(1, 2, 100, 192).with_value_head_dim(128).with_mask(Mask::Causal);
        let configuration = choose(&Chip::H200, &problem).unwrap().configuration;
        assert_eq!((configuration.head_dim, configuration.value_head_dim), (192, 128));
        assert!(configuration.causal);
    }

    #[test]
    fn what_is_not_served_is_refused_with_the_reason() {
        let good = Problem::new(1, 2, 100, 64);
        let older = Chip::typical(Target::SM_80);
        assert_eq!(choose(&older, &good).unwrap_err(), "sm_80 has no wgmma");
        assert_eq!(
            refusal(&good.clone().with_dtype(DType::F32)),
            "the tensor cores take f16 and bf16, not f32"
        );
        assert_eq!(
            refusal(&Problem::new(1, 2, 100, 100)),
            "head dim 100 is not a multiple of 8 up to 256"
        );
        assert_eq!(
            refusal(&good.clone().with_value_head_dim(264)),
            "value head dim 264 is not a multiple of 8 up to 256"
        );
        for scale in [0.0, -1.0, 1e7] {
            let reason = refusal(&good.clone().with_scale(scale));
            assert!(reason.ends_with("is not between 1e-20 and 1e6"), "{reason}");
        }
        assert_eq!(refusal(&good.clone().with_sinks()), "sinks are not served");
        let window = good.clone().with_mask(Mask::window(Some(5), Some(0)));
        assert_eq!(refusal(&window), "windows are not served");
        assert_eq!(refusal(&good.clone().with_key_length(0)), "there are no keys");
        assert_eq!(refusal(&Problem::new(0, 2, 100, 64)), "there are no queries");
        assert_eq!(refusal(&Problem::new(1, 2, 0, 64)), "there are no queries");
    }

    #[test]
    fn strides_are_those_of_the_copy_engine() {
        let shape = Shape::new(2, 100, 4, 64);
        let map = |strides| map_strides(DType::F16, shape, strides);
        let strides = Strides { batch: 25_600, length: 256, heads: 64 };
        assert_eq!(map(strides), Ok([512, 128, 51_200]));
        assert_eq!(
            map(Strides { heads: 68, ..strides }).unwrap_err(),
            "its heads stride of 136 bytes is not a multiple of 16"
        );
        assert_eq!(map(Strides { batch: 0, ..strides }).unwrap_err(), "its batch stride is zero");
        assert!(map(Strides { batch: 1 << 40, ..strides }).unwrap_err().contains("too large"));
        // A dimension of one has no stride to speak of.
        let single = Shape::new(1, 100, 4, 64);
        let odd = Strides { batch: 7, ..strides };
        assert_eq!(map_strides(DType::F16, single, odd), Ok([512, 128, 128]));
    }

    #[test]
    fn tensors_are_those_of_the_copy_engine() {
        let problem = Problem::new(1, 2, 100, 64);
        let addresses = [0x1000, 0x2000, 0x3000, 0x4000].map(DeviceAddress);
        let good = ForwardTensors::contiguous(&problem, addresses, DeviceAddress(0x5004)).unwrap();
        assert_eq!(check_tensors(&problem, &good), Ok(()));
        let mut moved = good;
        moved.value.address = DeviceAddress(0x3008);
        assert_eq!(
            check_tensors(&problem, &moved).unwrap_err(),
            "the value tensor: its address 0x3008 is not a multiple of 16"
        );
        let mut strided = good;
        strided.output.strides.length = 129;
        assert_eq!(
            check_tensors(&problem, &strided).unwrap_err(),
            "the output tensor: its length stride of 258 bytes is not a multiple of 16"
        );
    }
}
