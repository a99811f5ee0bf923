//! Bank conflicts as the simulator counts them, to be compared with a profiler's counts:
//!
//! ```text
//! cargo test --release -p flashcore-testing --test differential --no-run
//! ncu --kernel-name regex:^(banks|mma)_ --metrics \
//!   l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum,\
//!   l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum,\
//!   smsp__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum \
//!   target/release/deps/differential-* bank_conflicts --nocapture --test-threads 1
//! ```

use flashcore::{DType, Mask, Plan, Preference, Problem};
use flashcore_testing::scene::{Call, Scene};
use ptx::{Instruction, Program, Statement, StatementKind};
use sim::{Measure, Options, Policy, mutate};

use crate::{compiled, gpu, on_gpu, simulated};

/// The kernels consist of integer arithmetic and copies only, so that GPU and simulator must agree
/// bit for bit. The simulator's counts are printed.
#[test]
fn bank_conflicts() {
    let Some(gpu) = gpu() else { return };
    for scene in Scene::bank_conflicts().unwrap() {
        let found = on_gpu(&gpu, &scene, &compiled(&gpu, &scene));
        assert_eq!(found, simulated(&scene), "{}", scene.program.name);
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

/// Attention with `mma.sync` as it is launched, without its copies, and without its `ldmatrix`:
/// with both, the profiler may also count the one waiting for the other as conflicts. The simulator
/// counts no conflict in any of the three.
#[test]
fn bank_conflicts_of_attention() {
    let Some(gpu) = gpu() else { return };
    for (head_dim, mask) in
        [(64, Mask::NONE), (64, Mask::CAUSAL), (128, Mask::NONE), (128, Mask::CAUSAL)]
    {
        let problem = Problem::new(1, 2048 / head_dim, 2048, head_dim)
            .with_dtype(DType::BF16)
            .with_mask(mask);
        let plan = Plan::on_chip(&gpu.chip(), &problem, &Preference::named("gpu/mma"));
        let chosen = match plan {
            Ok(plan) => plan.chosen.choice.unwrap(),
            Err(reason) => return eprintln!("skipped: {reason}"),
        };
        let scene = Call::small(*chosen.kernel()).scene().unwrap();
        let (_, report) = scene.run(&Options::values(Policy::Earliest, 0)).unwrap();
        assert_eq!(report.counts.get(Measure::BankConflicts), 0, "{}", scene.program.name);

        let scene = Call::chosen(&gpu.chip(), &problem, &chosen).without_expected().unwrap();
        let copies = |it: &Instruction| matches!(it, Instruction::CopyAsync { .. });
        let matrices = |it: &Instruction| matches!(it, Instruction::LoadMatrix { .. });
        for program in [
            scene.program.clone(),
            without(&scene.program, "copies", copies),
            without(&scene.program, "ldmatrix", matrices),
        ] {
            let scene = Scene { program, ..scene.clone() };
            on_gpu(&gpu, &scene, &compiled(&gpu, &scene));
        }
    }
}

/// Returns the program without some of its instructions, under a name that says so.
fn without(program: &Program, what: &str, gone: impl Fn(&Instruction) -> bool) -> Program {
    let mut keep = |statement: &mut Statement| match &statement.kind {
        StatementKind::Instruction(instruction) => !gone(instruction),
        _ => true,
    };
    let name = format!("banks_{}_without_{what}", program.name);
    Program { name, ..mutate::edit(program, &mut keep) }
}
