//! The properties of a GPU that planning depends on, so that plans can be made without one.

use ptx::{Target, Version};

/// The properties of a GPU that the choice and the configuration of a kernel depend on.
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
    /// The PTX target that programs are built for.
    pub target: Target,
    /// Number of streaming multiprocessors (SMs).
    pub multiprocessors: u32,
    /// Size of the L2 cache in bytes.
    pub l2_bytes: u64,
    /// The newest PTX version that the compiler in the driver accepts.
    pub ptx: Version,
}

/// PTX version assumed for GPUs that are not present: that of a current driver.
const CURRENT: Version = Version::of_cuda(13, 0);

impl Chip {
    /// An H200, or an H100 with as many multiprocessors.
    pub const H200: Chip =
        Chip { target: Target::SM_90A, multiprocessors: 132, l2_bytes: 50 << 20, ptx: CURRENT };

    /// Returns the properties of a GPU that is present.
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

    /// Returns the properties of a data-centre GPU of a target, for planning without one.
    pub fn typical(target: Target) -> Self {
        match target {
            Target::SM_90A => Chip::H200,
            target => Chip { target, multiprocessors: 108, l2_bytes: 40 << 20, ptx: CURRENT },
        }
    }
}

/// Returns the target with the most features for a compute capability given as one number (90 for
/// 9.0).
pub fn target_of(architecture: u32) -> Target {
    match architecture {
        90 => Target::SM_90A,
        other => Target::portable(other),
    }
}
