//! Bank conflicts, for a profiler to count beside us:
//!
//! ```text
//! cargo test --release -p flashcore --test differential --no-run
//! ncu --kernel-name regex:banks_ --metrics \
//!   l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum,\
//!   l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum \
//!   target/release/deps/differential-* bank_conflicts --nocapture
//! ```

use sim::scene::Scene;
use sim::{Measure, Options, Policy};

use crate::{gpu, on_gpu, simulated};

/// The kernels are of integers and copies alone: the same bits. What the simulator counts is
/// printed.
#[test]
fn bank_conflicts() {
    let Some(gpu) = gpu() else { return };
    for scene in Scene::bank_conflicts().unwrap() {
        assert_eq!(on_gpu(&gpu, &scene), simulated(&scene), "{}", scene.program.name);
        let (_, report) = scene.run(&Options::values(Policy::Earliest, 0)).unwrap();
        println!(
            "{}: {} bank conflicts, {} wavefronts",
            scene.program.name,
            report.counts.get(Measure::BankConflicts),
            report.counts.get(Measure::SharedWavefronts)
        );
        for (place, traffic) in report.counts.bank_traffic() {
            let place = place.map(|place| place.to_string()).unwrap_or_default();
            let (conflicts, passes) = (traffic.conflicts(), traffic.wavefronts);
            println!("  {conflicts} in {passes} wavefronts at {place}");
        }
    }
}
