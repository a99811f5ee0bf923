//! Targets: the architecture that a program is compiled for, and the hardware features it offers.
//!
//! Kernels ask for features by name ([`Capability`]) and never compare
//! architecture numbers. The table in [`Capability::available`] is the only
//! place where the two meet.

use std::fmt;

/// A GPU architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    /// The compute capability as one number: 90 is 9.0.
    pub architecture: u32,
    /// Whether the program uses features of exactly this architecture, such as `sm_90a`; it then
    /// runs on no other.
    pub specific: bool,
}

impl Target {
    /// The lowest target any program is printed for (Turing).
    pub const SM_75: Target = Target::portable(75);
    /// Ampere, A100.
    pub const SM_80: Target = Target::portable(80);
    /// Ampere, GeForce and workstation.
    pub const SM_86: Target = Target::portable(86);
    /// Ada.
    pub const SM_89: Target = Target::portable(89);
    /// Hopper without its architecture-specific features.
    pub const SM_90: Target = Target::portable(90);
    /// Hopper with `wgmma` and `setmaxnreg`.
    pub const SM_90A: Target = Target { architecture: 90, specific: true };
    /// Blackwell, GeForce.
    pub const SM_120: Target = Target::portable(120);
    /// All of the above.
    pub const NAMED: [Target; 7] = [
        Target::SM_75,
        Target::SM_80,
        Target::SM_86,
        Target::SM_89,
        Target::SM_90,
        Target::SM_90A,
        Target::SM_120,
    ];

    /// Returns an architecture without its architecture-specific features.
    pub const fn portable(architecture: u32) -> Self {
        Target { architecture, specific: false }
    }

    /// Returns whether the target has a feature.
    pub fn has(self, capability: Capability) -> bool {
        capability.available(self)
    }

    /// Returns the largest amount of shared memory that a block can have, in bytes.
    ///
    /// The numbers are those of the CUDA programming guide's table of compute capabilities. 101 and
    /// 110 are the old and the new name of one architecture (Thor).
    pub const fn shared_memory_limit(self) -> u32 {
        match self.architecture {
            80 | 87 => 163 * 1024,
            90 | 100 | 101 | 103 | 110 => 227 * 1024,
            75 => 64 * 1024,
            _ => 99 * 1024,
        }
    }

    /// Returns the lowest PTX version that supports this target.
    pub const fn version(self) -> Version {
        match self.architecture {
            0..=75 => Version { major: 6, minor: 3 },
            76..=80 => Version { major: 7, minor: 0 },
            81..=86 => Version { major: 7, minor: 1 },
            87 => Version { major: 7, minor: 4 },
            // Younger than its number: the PTX ISA lists it with Thor's, CUDA 13.0.
            88 => Version { major: 9, minor: 0 },
            89..=90 if self.specific => Version { major: 8, minor: 0 },
            89..=90 => Version { major: 7, minor: 8 },
            91..=101 => Version { major: 8, minor: 6 },
            120 => Version { major: 8, minor: 7 },
            102..=103 | 121 => Version { major: 8, minor: 8 },
            _ => Version { major: 9, minor: 0 },
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.architecture, if self.specific { "a" } else { "" })
    }
}

/// A version of the PTX language.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version {
    /// The number before the point.
    pub major: u8,
    /// The number after the point.
    pub minor: u8,
}

impl Version {
    /// The lowest version that the printer writes.
    pub const LOWEST: Version = Version { major: 6, minor: 3 };

    /// Returns the newest PTX version that a release of CUDA accepts: the version of its toolkit's
    /// assembler and of the compiler in the driver that supports this release.
    ///
    /// ```
    /// use flashcore_ptx::Version;
    ///
    /// assert_eq!(Version::of_cuda(12, 0).to_string(), "8.0");
    /// assert_eq!(Version::of_cuda(12, 9).to_string(), "8.8");
    /// assert_eq!(Version::of_cuda(13, 0).to_string(), "9.0");
    /// ```
    pub const fn of_cuda(major: u32, minor: u32) -> Self {
        // CUDA 12.6 brought no new PTX version: 12.5 and 12.6 both have 8.5.
        let minor = if major == 12 && minor >= 6 { minor - 1 } else { minor };
        Version { major: (major.saturating_sub(4)) as u8, minor: minor as u8 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A hardware feature that not every target has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Capability {
    /// `ldmatrix`.
    MatrixLoad,
    /// `stmatrix`.
    MatrixStore,
    /// `mma.sync` m16n8k8 on `f16`.
    MmaHalfK8,
    /// `mma.sync` m16n8k16 on `f16` and `bf16`.
    Mma,
    /// `mma.sync` m16n8k32 on 8-bit floats.
    MmaFp8,
    /// Rounding two `f32` into one packed register with one instruction.
    PairConversion,
    /// `bf16` conversion, negation, minimum, maximum and fused multiply-add.
    Bf16,
    /// `bf16` addition, multiplication, comparison and functions.
    Bf16Arithmetic,
    /// Minimum and maximum of `f16`.
    HalfMinMax,
    /// Conversions to and from the 8-bit floats.
    Fp8Conversion,
    /// `cp.async`.
    AsyncCopies,
    /// `mbarrier` objects.
    Mbarrier,
    /// `mbarrier` objects that count transaction bytes, and blocking waits on them.
    MbarrierTransactions,
    /// Bulk copies and tensor maps (TMA), and fences of the async proxy.
    TensorCopies,
    /// Thread-block clusters and their shared memory.
    Clusters,
    /// `elect.sync`.
    Elect,
    /// Vector reductions: `red` on several values at once.
    VectorReductions,
    /// Programmatic dependent launch.
    GridDependency,
    /// `wgmma`.
    Wgmma,
    /// `setmaxnreg`.
    RegisterReallocation,
}

impl Capability {
    /// Every capability.
    pub const ALL: [Capability; 20] = [
        Capability::MatrixLoad,
        Capability::MatrixStore,
        Capability::MmaHalfK8,
        Capability::Mma,
        Capability::MmaFp8,
        Capability::PairConversion,
        Capability::Bf16,
        Capability::Bf16Arithmetic,
        Capability::HalfMinMax,
        Capability::Fp8Conversion,
        Capability::AsyncCopies,
        Capability::Mbarrier,
        Capability::MbarrierTransactions,
        Capability::TensorCopies,
        Capability::Clusters,
        Capability::Elect,
        Capability::VectorReductions,
        Capability::GridDependency,
        Capability::Wgmma,
        Capability::RegisterReallocation,
    ];

    /// Returns whether a target has this feature.
    pub fn available(self, target: Target) -> bool {
        use Capability as C;
        let at_least = |architecture| target.architecture >= architecture;
        match self {
            C::MatrixLoad | C::MmaHalfK8 => at_least(75),
            C::Mma | C::PairConversion | C::Bf16 | C::HalfMinMax | C::AsyncCopies | C::Mbarrier => {
                at_least(80)
            }
            C::MmaFp8 | C::Fp8Conversion => at_least(89),
            C::MatrixStore
            | C::Bf16Arithmetic
            | C::MbarrierTransactions
            | C::TensorCopies
            | C::Clusters
            | C::Elect
            | C::VectorReductions
            | C::GridDependency => at_least(90),
            C::Wgmma => target == Target::SM_90A,
            C::RegisterReallocation => target.specific && at_least(90),
        }
    }

    /// Returns the name in messages and tables.
    pub const fn name(self) -> &'static str {
        use Capability as C;
        match self {
            C::MatrixLoad => "ldmatrix",
            C::MatrixStore => "stmatrix",
            C::MmaHalfK8 => "mma.sync f16 k8",
            C::Mma => "mma.sync f16/bf16",
            C::MmaFp8 => "mma.sync fp8",
            C::PairConversion => "pair conversion",
            C::Bf16 => "bf16",
            C::Bf16Arithmetic => "bf16 arithmetic",
            C::HalfMinMax => "f16 min/max",
            C::Fp8Conversion => "fp8 conversion",
            C::AsyncCopies => "cp.async",
            C::Mbarrier => "mbarrier",
            C::MbarrierTransactions => "mbarrier transactions",
            C::TensorCopies => "TMA",
            C::Clusters => "clusters",
            C::Elect => "elect.sync",
            C::VectorReductions => "vector reductions",
            C::GridDependency => "programmatic dependent launch",
            C::Wgmma => "wgmma",
            C::RegisterReallocation => "setmaxnreg",
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The PTX ISA's release notes and the CUDA programming guide, row by row.
    #[test]
    fn targets_have_their_version_and_shared_memory() {
        let expected = [
            (75, "6.3", 64),
            (80, "7.0", 163),
            (86, "7.1", 99),
            (87, "7.4", 163),
            (88, "9.0", 99),
            (89, "7.8", 99),
            (90, "7.8", 227),
            (100, "8.6", 227),
            (101, "8.6", 227),
            (103, "8.8", 227),
            (110, "9.0", 227),
            (120, "8.7", 99),
            (121, "8.8", 99),
        ];
        for (architecture, version, kibibytes) in expected {
            let target = Target::portable(architecture);
            assert_eq!(target.version().to_string(), version, "{target}");
            assert_eq!(target.shared_memory_limit(), kibibytes * 1024, "{target}");
        }
        assert_eq!(Target::SM_90A.version().to_string(), "8.0");
    }
}
