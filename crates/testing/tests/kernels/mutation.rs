//! Every fence, wait, arrival and announcement of the product kernel is
//! missed when it is taken out.

use flashcore_testing::scene::Scene;
use kernels::Product;
use kernels::product::Source;
use ptx::{Fence, Instruction};
use sim::{HazardKind, Options, Policy, mutate};

/// Returns the hazards that may be reported when a statement is missing, under any schedule.
fn expected(cluster: u32, site: &mutate::Site) -> &'static [HazardKind] {
    use HazardKind as H;
    match (&site.instruction, cluster) {
        (Instruction::Fence(Fence::ProxyAsyncShared), _) => &[H::MissingProxyFence],
        (Instruction::Fence(_), _) => &[H::MbarrierInitNotVisible],
        (Instruction::WgmmaFence, _) => &[H::MissingWgmmaFence],
        (Instruction::WgmmaCommit | Instruction::WgmmaWait { .. }, _) => {
            &[H::OverwrittenInFlight, H::AccumulatorInFlight, H::OperandInFlight, H::NeverWaited]
        }
        // The stage is filled without waiting for the threads that read it.
        (Instruction::BarrierSync { threads: Some(_), .. }, _) => {
            &[H::OverwrittenInFlight, H::MissingProxyFence]
        }
        // The barrier before the roles; the cluster's own stands for it below.
        (Instruction::BarrierSync { threads: None, .. }, _) => {
            &[H::MbarrierUninitialised, H::MbarrierInitNotVisible]
        }
        (Instruction::ClusterWait, _) => &[
            H::MbarrierUninitialised,
            H::MbarrierInitNotVisible,
            H::MbarrierUnfinished,
            H::ExitedBlock,
        ],
        (Instruction::ClusterArrive { .. }, _) => &[H::ClusterBarrierOrder],
        // The producer fills a stage in use, or the consumer uses one not full.
        (Instruction::MbarrierWait { .. }, _) => &[
            H::OverwrittenInFlight,
            H::TouchedBeforeArrival,
            H::UninitialisedMemory,
            H::MbarrierOverArrived,
        ],
        (Instruction::MbarrierArriveExpect { .. }, _) => &[H::TransactionCount],
        (Instruction::MbarrierArrive { .. }, _) => &[H::Deadlock],
        other => panic!("no expectation for {other:?}"),
    }
}

#[test]
fn no_site_can_be_left_out() {
    for (source, cluster) in
        [(Source::Shared, 1), (Source::Shared, 2), (Source::Registers, 1), (Source::Registers, 2)]
    {
        let configuration = Product { columns: 16, stages: 2, source, cluster, ..Product::PLAIN };
        let scene = Scene::product(configuration, 128, 384).unwrap();
        for site in mutate::sites(&scene.program) {
            // In the model a product ends for all four warps at once, so that with both operands in
            // shared memory the warpgroup's barrier is not needed.
            let meets =
                matches!(site.instruction, Instruction::BarrierSync { threads: Some(_), .. });
            if meets && source == Source::Shared {
                continue;
            }
            let program = mutate::without(&scene.program, site.index);
            for policy in Policy::HOSTILE {
                for seed in 0..4 {
                    let result = scene.run_program(&program, &Options::checked(policy, seed));
                    let what = format!("{:?} taken out from {}", site.instruction, site.place);
                    let failure = result.err().unwrap_or_else(|| panic!("{what} is not missed"));
                    let kind = failure.hazard().expect("a hazard").kind;
                    let right = expected(cluster, &site).contains(&kind);
                    assert!(right, "{what} gives, by {policy} {seed}: {failure}");
                }
            }
        }
    }
}
