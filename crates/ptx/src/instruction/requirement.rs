//! The hardware feature and the PTX version that each instruction needs.

use super::{
    BinaryOperation, Instruction, LoadCache, LoadOrder, MmaShape, Scope, SpecialRegister,
    StoreCache, StoreOrder, UnaryOperation,
};
use crate::{Capability, Element, Register, Space, Type, Version};

/// The requirements for assembling an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// The hardware feature, or `None` if every target supports the instruction.
    pub capability: Option<Capability>,
    /// The lowest PTX version that has the printed form.
    pub version: Version,
}

impl Requirement {
    const NOTHING: Requirement = Requirement { capability: None, version: Version::LOWEST };

    const fn version(major: u8, minor: u8) -> Self {
        Requirement { capability: None, version: Version { major, minor } }
    }

    const fn new(capability: Capability, major: u8, minor: u8) -> Self {
        Requirement { capability: Some(capability), version: Version { major, minor } }
    }
}

impl Instruction {
    /// Returns what this instruction needs beyond the lowest target and version.
    ///
    /// Versions are those in which the *printed* form was introduced, which is
    /// later than the operation itself where the printer writes a newer
    /// spelling (`.shared::cta` came with 7.8).
    pub fn requirement(&self, type_of: &dyn Fn(Register) -> Type) -> Requirement {
        use Capability as C;
        use Instruction as I;
        match self {
            I::Unary { operation, ty, .. } => match (operation, ty) {
                (UnaryOperation::Exp2, Type::BF16 | Type::BF16x2) => {
                    Requirement::new(C::Bf16Arithmetic, 7, 8)
                }
                (UnaryOperation::Exp2, Type::F16 | Type::F16x2) => Requirement::version(7, 0),
                (UnaryOperation::Absolute, Type::F16 | Type::F16x2) => Requirement::version(6, 5),
                (UnaryOperation::Tanh, Type::BF16 | Type::BF16x2) => {
                    Requirement::new(C::Bf16Arithmetic, 7, 8)
                }
                (UnaryOperation::Tanh, _) => Requirement::version(7, 0),
                (UnaryOperation::Negate | UnaryOperation::Absolute, Type::BF16 | Type::BF16x2) => {
                    Requirement::new(C::Bf16, 7, 0)
                }
                _ => Requirement::NOTHING,
            },
            I::Binary { operation, ty: Type::BF16 | Type::BF16x2, .. } => match operation {
                BinaryOperation::Minimum | BinaryOperation::Maximum => {
                    Requirement::new(C::Bf16, 7, 0)
                }
                _ => Requirement::new(C::Bf16Arithmetic, 7, 8),
            },
            I::Binary {
                operation: BinaryOperation::Minimum | BinaryOperation::Maximum,
                ty: Type::F16 | Type::F16x2,
                ..
            } => Requirement::new(C::HalfMinMax, 7, 0),
            I::MultiplyAdd { ty: Type::BF16 | Type::BF16x2, .. } => Requirement::new(C::Bf16, 7, 0),
            I::Compare { ty: Type::BF16, .. } => Requirement::new(C::Bf16Arithmetic, 7, 8),
            I::Convert { dst, src } => match (type_of(*dst), type_of(*src)) {
                (Type::BF16, _) => Requirement::new(C::Bf16, 7, 0),
                // A conversion from bfloat16 is printed as a shift, which every target has.
                _ => Requirement::NOTHING,
            },
            I::ConvertPair { dst, .. } => match type_of(*dst) {
                Type::E4M3x2 | Type::E5M2x2 => Requirement::new(C::Fp8Conversion, 8, 1),
                _ => Requirement::new(C::PairConversion, 7, 0),
            },
            I::ConvertPacked { .. } => Requirement::new(C::Fp8Conversion, 8, 1),
            I::ReadSpecial {
                special:
                    SpecialRegister::Cluster(_)
                    | SpecialRegister::ClusterGridExtent(_)
                    | SpecialRegister::ClusterRank
                    | SpecialRegister::ClusterSize,
                ..
            } => Requirement::new(C::Clusters, 7, 8),
            I::TensorMapAddress { .. } => Requirement::new(C::TensorCopies, 8, 0),

            I::Load { space, order, cache, .. } => {
                let cluster_scope = matches!(
                    order,
                    LoadOrder::Relaxed(Scope::Cluster) | LoadOrder::Acquire(Scope::Cluster)
                );
                if *space == Space::Cluster || cluster_scope {
                    Requirement::new(C::Clusters, 7, 8)
                } else {
                    match cache {
                        LoadCache::ReadOnlyOnce | LoadCache::EvictFirst | LoadCache::EvictLast => {
                            Requirement::version(7, 4)
                        }
                        _ => Requirement::NOTHING,
                    }
                }
            }
            I::Store { space, order, cache, .. } => {
                let cluster_scope = matches!(
                    order,
                    StoreOrder::Relaxed(Scope::Cluster) | StoreOrder::Release(Scope::Cluster)
                );
                if *space == Space::Cluster || cluster_scope {
                    Requirement::new(C::Clusters, 7, 8)
                } else if *cache == StoreCache::NoAllocate {
                    Requirement::version(7, 4)
                } else {
                    Requirement::NOTHING
                }
            }
            I::Atomic { ty, space, scope, .. } => atomic(*ty, 1, *space, *scope),
            I::CompareAndSwap { ty, space, scope, .. } => atomic(*ty, 1, *space, *scope),
            I::Reduce { ty, src, space, scope, .. } => atomic(*ty, src.len(), *space, *scope),
            I::LoadMatrix { .. } => Requirement::new(C::MatrixLoad, 6, 5),
            I::StoreMatrix { .. } => Requirement::new(C::MatrixStore, 7, 8),

            I::Elect { .. } => Requirement::new(C::Elect, 8, 0),
            I::Mma { shape, element, .. } => match (shape, element) {
                (MmaShape::M16N8K8, Element::F16) => Requirement::new(C::MmaHalfK8, 6, 5),
                (MmaShape::M16N8K32, _) => Requirement::new(C::MmaFp8, 8, 4),
                _ => Requirement::new(C::Mma, 7, 0),
            },
            I::Wgmma { .. } | I::WgmmaFence | I::WgmmaCommit | I::WgmmaWait { .. } => {
                Requirement::new(C::Wgmma, 8, 0)
            }

            I::ClusterArrive { .. } | I::ClusterWait => Requirement::new(C::Clusters, 8, 0),
            I::MapShared { .. } => Requirement::new(C::Clusters, 7, 8),
            I::MbarrierInit { .. } | I::MbarrierInvalidate { .. } => {
                Requirement::new(C::Mbarrier, 7, 8)
            }
            I::MbarrierArriveOnCopies { .. } => Requirement::new(C::Mbarrier, 7, 8),
            I::MbarrierArrive { .. }
            | I::MbarrierArriveExpect { .. }
            | I::MbarrierExpect { .. }
            | I::MbarrierTryWait { .. }
            | I::MbarrierWait { .. } => Requirement::new(C::MbarrierTransactions, 8, 0),

            I::CopyAsync { .. } | I::CopyAsyncCommit | I::CopyAsyncWait { .. } => {
                Requirement::new(C::AsyncCopies, 7, 8)
            }
            I::BulkLoad { .. }
            | I::BulkStore { .. }
            | I::TensorLoad { .. }
            | I::TensorStore { .. }
            | I::TensorReduceAdd { .. }
            | I::BulkCommit
            | I::BulkWait { .. }
            | I::BulkReduceAdd { .. }
            | I::TensorMapPrefetch { .. } => Requirement::new(C::TensorCopies, 8, 0),

            I::Fence(fence) => match fence {
                super::Fence::AcquireRelease(Scope::Cluster)
                | super::Fence::SequentiallyConsistent(Scope::Cluster) => {
                    Requirement::new(C::Clusters, 7, 8)
                }
                super::Fence::AcquireRelease(_) | super::Fence::SequentiallyConsistent(_) => {
                    Requirement::NOTHING
                }
                super::Fence::MbarrierInit => Requirement::new(C::Clusters, 8, 0),
                super::Fence::ProxyAsyncShared
                | super::Fence::ProxyAsyncGlobal
                | super::Fence::ProxyAsync => Requirement::new(C::TensorCopies, 8, 0),
            },
            I::SetMaxRegisters { .. } => Requirement::new(C::RegisterReallocation, 8, 0),
            I::GridDependencyWait | I::GridDependencyLaunch => {
                Requirement::new(C::GridDependency, 7, 8)
            }

            // All targets have the other instructions. If one were missing above, the tests would
            // notice: they assemble every form for the lowest target that this table claims to
            // support it.
            _ => Requirement::NOTHING,
        }
    }
}

fn atomic(ty: Type, width: usize, space: Space, scope: Scope) -> Requirement {
    if width > 1 {
        Requirement::new(Capability::VectorReductions, 8, 1)
    } else if space == Space::Cluster || scope == Scope::Cluster {
        Requirement::new(Capability::Clusters, 7, 8)
    } else if ty == Type::BF16x2 {
        Requirement::new(Capability::Bf16Arithmetic, 7, 8)
    } else {
        Requirement::NOTHING
    }
}
