//! Bank conflicts, for a profiler to count beside us:
//!
//! ```text
//! cargo test --release -p flashcore --test differential --no-run
//! ncu --kernel-name regex:^(banks|mma)_ --metrics \
//!   l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum,\
//!   l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum,\
//!   smsp__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum \
//!   target/release/deps/differential-* bank_conflicts --nocapture --test-threads 1
//! ```

use flashcore::gpu::mma::{Sums, choose};
use flashcore::gpu::{Buffer, ForwardTensors, MmaPlan};
use flashcore::{DType, InputTensors, Mask, Problem};
use ptx::{Instruction, Program, Statement, StatementKind};
use sim::scene::{AttentionSize, Scene};
use sim::{Measure, Options, Policy, mutate};

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

/// Attention with `mma.sync` as it is launched, without its copies, and without its `ldmatrix`:
/// where both are there, what a profiler counts may be one waiting for the other. The simulator
/// counts no conflict in any of them.
#[test]
fn bank_conflicts_of_attention() {
    let Some(gpu) = gpu() else { return };
    for (head_dim, mask) in
        [(64, Mask::None), (64, Mask::Causal), (128, Mask::None), (128, Mask::Causal)]
    {
        let problem = Problem::new(1, 2048 / head_dim, 2048, head_dim)
            .with_dtype(DType::BF16)
            .with_mask(mask);
        let mma = match choose(&gpu.chip(), &problem, Sums::F32) {
            Ok(chosen) => chosen.configuration,
            Err(reason) => return eprintln!("skipped: {reason}"),
        };
        let scene = Scene::mma(mma, &AttentionSize::small_mma(&mma)).unwrap();
        let (_, report) = scene.run(&Options::values(Policy::Earliest, 0)).unwrap();
        assert_eq!(report.counts.get(Measure::BankConflicts), 0, "{}", scene.program.name);

        let tensors = InputTensors::random(&problem, 0).unwrap();
        let upload = |bytes: &[u8]| Buffer::from_slice(gpu.stream(), bytes).unwrap();
        let [query, key, value] =
            [&tensors.query, &tensors.key, &tensors.value].map(|it| upload(it.bytes()));
        let output = Buffer::new(gpu.device(), query.bytes()).unwrap();
        let lse = Buffer::new(gpu.device(), 4 * problem.rows() as u64).unwrap();
        let addresses = [&query, &key, &value, &output].map(Buffer::address);
        let tensors = ForwardTensors::contiguous(&problem, addresses, lse.address()).unwrap();
        let copies = |it: &Instruction| matches!(it, Instruction::CopyAsync { .. });
        let matrices = |it: &Instruction| matches!(it, Instruction::LoadMatrix { .. });
        for program in [
            scene.program.clone(),
            without(&scene.program, "copies", copies),
            without(&scene.program, "ldmatrix", matrices),
        ] {
            // The plan asks for the kernel by its name, and takes the one that is there.
            let Some(other) = self::gpu() else { return };
            other.kernel(&mma.name(), || Ok(program)).unwrap();
            let mut plan = MmaPlan::new(&other, &problem, Sums::F32).unwrap();
            plan.launch(other.stream(), &tensors).unwrap();
            other.device().synchronize().unwrap();
        }
    }
}

/// A program without some of its instructions, under a name that says so.
fn without(program: &Program, what: &str, gone: impl Fn(&Instruction) -> bool) -> Program {
    let mut keep = |statement: &mut Statement| match &statement.kind {
        StatementKind::Instruction(instruction) => !gone(instruction),
        _ => true,
    };
    let name = format!("banks_{}_without_{what}", program.name);
    Program { name, ..mutate::edit(program, &mut keep) }
}
