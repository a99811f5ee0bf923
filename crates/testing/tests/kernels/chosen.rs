//! Problems from their text through the planner to the simulator: every family that serves a
//! problem, on several chips.

use std::collections::BTreeMap;

use flashcore::Problem;
use flashcore::gpu::Chip;
use flashcore::plan::{Arrangement, candidates};
use flashcore_testing::scene::Call;
use kernels::shipped;
use ptx::Target;
use sim::{Mode, Policy};

use crate::some_schedules;

#[test]
fn every_family_is_right_as_it_is_launched() {
    let texts = [
        "b=2,h=4,hk=2,s=70,d=64,bf16",
        "b=1,h=4,hk=1,s=65,sk=129,d=40,f16,causal",
        "b=2,h=2,s=33,sk=20,d=64,dv=72,f16,causal,sinks",
        "b=1,h=2,s=40,sk=90,d=64,bf16,window=20:3",
        "b=2,h=2,s=70,sk=64,d=64,f16,window=30:0,chunk=25,softcap=2,alibi=sequences,sinks",
        "b=2,h=6,hk=2,s=2,sk=300,d=64,bf16,causal,softcap=3,alibi",
        // A softcap well above all scores.
        "b=1,h=2,s=70,sk=140,d=64,f16,causal,softcap=50",
        // Few tiles over many keys, so that keys are split.
        "b=1,h=1,s=1,sk=2000,d=64,bf16",
        "b=2,h=2,s=9,d=7,dv=33,f32,window=3:1,chunk=4,softcap=2,alibi,sinks",
        "b=1,h=2,s=5,sk=0,d=64,f16,sinks",
    ];
    // A chip so small that not all tiles run at once, so that a sequencer orders them.
    let small = Chip { multiprocessors: 2, ..Chip::H200 };
    let chips = [Chip::H200, small, Chip::typical(Target::SM_89), Chip::typical(Target::SM_75)];
    let mut served = BTreeMap::new();
    for text in texts {
        let problem: Problem = text.parse().unwrap();
        let arrangement = Arrangement::contiguous(&problem).unwrap();
        for chip in &chips {
            for candidate in candidates(chip, &problem, &arrangement) {
                let Some(choice) = candidate.choice else { continue };
                let scene = Call::chosen(chip, &problem, &choice).scene().unwrap();
                some_schedules(&scene, Mode::Values, &[(Policy::Random, 3)]);
                *served.entry((candidate.kernel, choice.launches.len())).or_insert(0) += 1;
            }
        }
    }
    let kernels: Vec<_> = served.keys().copied().collect();
    let all = [
        ("decode", 1),
        ("forward", 1),
        ("mma", 1),
        ("mma", 2),
        ("mma-half", 1),
        ("prefill", 1),
        ("prefill", 2),
        ("scalar", 1),
    ];
    assert_eq!(kernels, all, "{served:?}");
}

/// The arguments of every launch fit into the space that the driver has for them.
#[test]
fn arguments_of_a_launch_suffice() {
    for target in Target::NAMED {
        for configuration in shipped(target) {
            let program = configuration.program().unwrap();
            let count = program.parameters.len();
            assert!(count <= cuda::MAX_ARGUMENTS, "{}: {count}", program.name);
        }
    }
}
