//! What the choice and the shape of a kernel depend on, so that both can be had without a GPU.

use ptx::{Target, Version};

/// The size of a GPU.
///
/// ```
/// use flashcore::plan::Chip;
/// use flashcore::{Plan, Preference, Problem};
///
/// // What would an H200 run?
/// let problem = Problem::new(1, 16, 4096, 128);
/// let plan = Plan::on_chip(&Chip::H200, &problem, &Preference::default())?;
/// assert_eq!(plan.chosen.kernel, "forward");
/// # Ok::<(), flashcore::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Chip {
    /// What programs can be built for.
    pub target: Target,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// The second-level cache in bytes.
    pub l2_bytes: u64,
    /// The newest PTX that the compiler in the driver knows.
    pub ptx: Version,
}

/// What the drivers of today know.
const CURRENT: Version = Version::of_cuda(13, 0);

impl Chip {
    /// An H200, and an H100 of the same form.
    pub const H200: Chip =
        Chip { target: Target::SM_90A, multiprocessors: 132, l2_bytes: 50 << 20, ptx: CURRENT };

    /// The size of a GPU that is there.
    #[cfg(feature = "cuda")]
    pub fn of(info: &cuda::DeviceInfo) -> Self {
        let capability = info.compute_capability;
        Chip {
            target: target_of(capability.major * 10 + capability.minor),
            multiprocessors: info.multiprocessors,
            l2_bytes: info.l2_bytes,
            ptx: Version::of_cuda(info.driver.version.major, info.driver.version.minor),
        }
    }

    /// A data-centre GPU of a target, where none is there to be asked.
    pub fn typical(target: Target) -> Self {
        match target {
            Target::SM_90A => Chip::H200,
            target => Chip { target, multiprocessors: 108, l2_bytes: 40 << 20, ptx: CURRENT },
        }
    }
}

/// The richest target of a compute capability, as one number (90 for 9.0).
pub fn target_of(architecture: u32) -> Target {
    match architecture {
        90 => Target::SM_90A,
        other => Target::portable(other),
    }
}
