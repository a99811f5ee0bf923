//! `flashcore doctor`: what is here, what is missing, what would run and why.

mod cache;
mod cpu;
mod gpu;
mod toolkit;

use std::error::Error;

use clap::Args;
use flashcore::{DType, Machine, Mask, Pass, Plan, Preference, Problem};
use serde::Serialize;

use self::cache::CacheFound;
use self::cpu::Cpu;
use self::gpu::Gpu;
use self::toolkit::Tool;
use crate::progress::Bar;
use crate::{Answer, memory, terminal};

/// Say what this machine has, what would run and why
#[derive(Args)]
pub(crate) struct Arguments {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Findings {
    /// The version of this program.
    #[serde(rename = "flashcore")]
    version: &'static str,
    gpu: Gpu,
    cache: CacheFound,
    toolkit: Vec<Tool>,
    cpu: Cpu,
    /// Bytes of memory that are free, where the system says so.
    memory_available: Option<u64>,
    /// What `FLASHCORE_KERNEL` insists on, if it is set.
    insisted: Option<String>,
    /// The choice of kernel for a few usual problems.
    plans: Vec<Plan>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<Answer, Box<dyn Error>> {
    let _bar = Bar::new("looking");
    let machine = Machine::discover();
    let plans = usual_problems()
        .iter()
        .map(|problem| {
            // If the environment asks for a kernel that cannot serve the problem, show what could.
            let insisted = machine.plan(problem, &Preference::from_environment(problem.pass));
            insisted.or_else(|_| machine.plan(problem, &Preference::default()))
        })
        .collect::<Result<_, _>>()?;
    let findings = Findings {
        version: env!("CARGO_PKG_VERSION"),
        gpu: Gpu::look(&machine),
        cache: CacheFound::look(),
        toolkit: toolkit::look(),
        cpu: Cpu::look(&machine),
        memory_available: memory::available().and_then(|bytes| u64::try_from(bytes).ok()),
        insisted: insisted(),
        plans,
    };
    Answer::of(arguments.json, &findings, true, || describe(&findings))
}

/// What the environment insists on, and for which pass.
fn insisted() -> Option<String> {
    let name = std::env::var("FLASHCORE_KERNEL").ok().filter(|name| !name.trim().is_empty())?;
    let counts = |pass| Preference::from_environment(pass) != Preference::default();
    Some(match (counts(Pass::Forward), counts(Pass::Backward)) {
        (true, false) => format!("{name}, in the forward pass alone"),
        (false, true) => format!("{name}, for gradients alone"),
        _ => name,
    })
}

/// Training, its gradients, prefill with shared heads, one step of decoding, and single precision.
fn usual_problems() -> Vec<Problem> {
    vec![
        Problem::new(4, 16, 4096, 128).with_dtype(DType::BF16).with_mask(Mask::CAUSAL),
        Problem::new(4, 16, 4096, 128).with_dtype(DType::BF16).with_mask(Mask::CAUSAL).backward(),
        Problem::new(1, 64, 8192, 128)
            .with_kv_heads(8)
            .with_dtype(DType::BF16)
            .with_mask(Mask::CAUSAL),
        Problem::new(64, 32, 1, 128)
            .with_kv_heads(8)
            .with_key_length(4096)
            .with_dtype(DType::BF16)
            .with_mask(Mask::CAUSAL),
        Problem::new(1, 8, 512, 64).with_dtype(DType::F32),
    ]
}

fn describe(findings: &Findings) -> String {
    let mut fields = vec![("flashcore", findings.version.to_owned())];
    fields.extend(findings.gpu.fields());
    fields.extend(findings.cache.fields());
    for tool in &findings.toolkit {
        fields.push((tool.name, tool.to_string()));
    }
    fields.extend(findings.cpu.fields());
    if let Some(bytes) = findings.memory_available {
        fields.push(("memory", format!("{} free", terminal::bytes(bytes.into()))));
    }
    fields.extend(findings.insisted.iter().map(|name| ("kernel", name.clone())));
    let mut text = terminal::fields(&fields);
    text += &format!("\n{}\n", terminal::paint(terminal::HEADING, "what would run"));
    for plan in &findings.plans {
        text += &terminal::paragraph(&plan.to_string());
    }
    text
}
