//! Which argument goes to which parameter of a kernel that reads tensors by address: by the
//! parameter's name, so that a kernel with another order or with more of them is refused and not
//! run with the wrong numbers.

use cuda::{Argument, DeviceAddress};
use kernels::Divisor;

use super::DeviceTensor;

/// What an argument depends on. `L` names the kernel's addresses that are no tensor's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Slot<L> {
    /// The plan.
    Fixed(Number),
    /// The address of a tensor, by its place among the kernel's.
    Tensor(usize),
    /// A stride of one of them.
    Stride(usize, Stride),
    /// A list on the device, or nothing.
    List(L),
}

/// An argument that stays.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Number {
    U32(u32),
    I32(i32),
    U64(u64),
    F32(f32),
    Address(DeviceAddress),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Stride {
    Batch,
    Row,
    Head,
}

impl From<Number> for Argument {
    fn from(number: Number) -> Self {
        match number {
            Number::U32(value) => value.into(),
            Number::I32(value) => value.into(),
            Number::U64(value) => value.into(),
            Number::F32(value) => value.into(),
            Number::Address(value) => value.into(),
        }
    }
}

impl<L> Slot<L> {
    /// A number, unless it has more than 32 bits.
    pub(super) fn number(value: usize) -> Option<Self> {
        Some(Slot::Fixed(Number::U32(u32::try_from(value).ok()?)))
    }

    /// The address of one of the tensors, or a stride of it.
    pub(super) fn tensor(roles: &[&str], name: &str) -> Option<Self> {
        let role = roles.iter().position(|role| name.starts_with(role))?;
        Some(match name[roles[role].len()..].trim() {
            "" => Slot::Tensor(role),
            "batch stride" => Slot::Stride(role, Stride::Batch),
            "row stride" => Slot::Stride(role, Stride::Row),
            "head stride" => Slot::Stride(role, Stride::Head),
            _ => return None,
        })
    }

    /// A number that the kernel divides by, or a part of it.
    pub(super) fn divisor(name: &str, number: impl Fn(&str) -> Option<u32>) -> Option<Self> {
        let (name, part) = name.split_once(", ").unwrap_or((name, "number"));
        let divisor = Divisor::new(number(name)?);
        let number = match part {
            "number" => divisor.number,
            "multiplier" => divisor.multiplier,
            "shift" => divisor.shift,
            _ => return None,
        };
        Some(Slot::Fixed(Number::U32(number)))
    }

    /// The argument for a launch.
    pub(super) fn argument(
        self,
        tensors: &[DeviceTensor],
        list: impl FnOnce(L) -> Option<DeviceAddress>,
    ) -> Argument {
        match self {
            Slot::Fixed(number) => number.into(),
            Slot::Tensor(role) => tensors[role].address.into(),
            Slot::Stride(role, stride) => {
                let strides = tensors[role].strides;
                let elements = match stride {
                    Stride::Batch => strides.batch,
                    Stride::Row => strides.length,
                    Stride::Head => strides.heads,
                };
                Argument::U64(elements as u64)
            }
            Slot::List(which) => list(which).unwrap_or(DeviceAddress(0)).into(),
        }
    }
}

impl DeviceTensor {
    /// Packed: one batch entry for all sequences.
    pub(super) fn packed(mut self, packed: bool) -> Self {
        if packed {
            self.strides.batch = 0;
        }
        self
    }

    /// Refuses an address or strides that are no multiple of so many bytes.
    pub(super) fn aligned(
        &self,
        tensor: &'static str,
        element: usize,
        bytes: usize,
    ) -> Result<(), super::GpuError> {
        let DeviceTensor { address, strides } = self;
        let refuse = |reason: String| Err(super::GpuError::Tensor { tensor, reason });
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

/// An error unless every parameter of a program gets an argument of its kind.
#[cfg(test)]
pub(super) fn check_kinds<L: Copy + std::fmt::Debug>(
    program: &ptx::Program,
    slot: impl Fn(&str) -> Option<Slot<L>>,
) -> Result<(), String> {
    use ptx::{ParameterKind, Type};
    let count = program.parameters.len();
    if count > cuda::MAX_ARGUMENTS {
        return Err(format!("{count} parameters"));
    }
    for parameter in &program.parameters {
        let Some(slot) = slot(&parameter.name) else {
            return Err(format!("nobody sets `{}`", parameter.name));
        };
        let fits = match (&parameter.kind, slot) {
            (ParameterKind::Address, slot) => {
                matches!(slot, Slot::Fixed(Number::Address(_)) | Slot::Tensor(_) | Slot::List(_))
            }
            (ParameterKind::Scalar(Type::U64), slot) => {
                matches!(slot, Slot::Stride(..) | Slot::Fixed(Number::U64(_)))
            }
            (ParameterKind::Scalar(ty), Slot::Fixed(number)) => matches!(
                (ty, number),
                (Type::U32, Number::U32(_))
                    | (Type::S32, Number::I32(_))
                    | (Type::F32, Number::F32(_))
            ),
            _ => false,
        };
        if !fits {
            return Err(format!("{parameter:?} gets {slot:?}"));
        }
    }
    Ok(())
}
