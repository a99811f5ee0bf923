//! The CPU side of the machine.

use std::fs;

use flashcore::Machine;
use serde::Serialize;

/// Cores and what they can do.
#[derive(Serialize)]
pub(super) struct Cpu {
    model: Option<String>,
    /// Threads that this process may use.
    threads: usize,
    /// Vector instructions found, of those that matter here.
    features: Vec<&'static str>,
    /// The description of the CPU back end.
    backend: String,
}

impl Cpu {
    pub(super) fn look(machine: &Machine) -> Self {
        let backend = machine.backends().iter().find(|backend| backend.name() == "cpu");
        Cpu {
            model: model(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            features: features(),
            backend: backend.map_or_else(String::new, |backend| backend.describe()),
        }
    }

    pub(super) fn fields(&self) -> Vec<(&'static str, String)> {
        let model = self.model.as_deref().unwrap_or(std::env::consts::ARCH);
        let features = if self.features.is_empty() {
            "no vector extensions".to_owned()
        } else {
            self.features.join(" ")
        };
        vec![
            ("cpu", format!("{model}, {} threads, {features}", self.threads)),
            ("cpu back end", self.backend.clone()),
        ]
    }
}

fn model() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    let found = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
    ];
    let present = found.into_iter().filter(|(_, present)| *present);
    present.map(|(name, _)| name).collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn features() -> Vec<&'static str> {
    if cfg!(target_feature = "neon") { vec!["neon"] } else { Vec::new() }
}
