//! Selection of a kernel and a target by name.

use cuda::DeviceInfo;
use flashcore::gpu::target_of;
use kernels::{Configuration, Product, shipped};
use ptx::{Element, Target};
use serde::Serialize;

/// Targets that can be named.
const TARGETS: [Target; 9] = [
    Target::SM_75,
    Target::SM_80,
    Target::SM_86,
    Target::portable(87),
    Target::SM_89,
    Target::SM_90,
    Target::SM_90A,
    Target::portable(100),
    Target::SM_120,
];

/// How many names a refusal suggests.
const SUGGESTIONS: usize = 5;

/// The target of a name as PTX writes it.
pub(crate) fn parse_target(name: &str) -> Result<Target, String> {
    TARGETS.into_iter().find(|target| target.to_string() == name).ok_or_else(|| {
        let known = TARGETS.map(|target| target.to_string()).join(", ");
        format!("`{name}` is no known target; known are {known}")
    })
}

/// The target of this machine's first GPU, else the one that has every kernel.
pub(super) fn default_target() -> Target {
    DeviceInfo::query(0).map_or(Target::SM_90A, |info| {
        let capability = info.compute_capability;
        target_of(capability.major * 10 + capability.minor)
    })
}

/// A kernel and its configurations.
#[derive(Serialize)]
pub(super) struct Family {
    pub(super) name: &'static str,
    pub(super) summary: &'static str,
    pub(super) configurations: Vec<String>,
}

/// Every kernel of a target, in the order in which they are shipped.
pub(super) fn families(target: Target) -> Vec<Family> {
    let mut families: Vec<Family> = Vec::new();
    for configuration in shipped(target) {
        let name = configuration.family();
        let index = families.iter().position(|family| family.name == name).unwrap_or_else(|| {
            let summary = configuration.summary();
            families.push(Family { name, summary, configurations: Vec::new() });
            families.len() - 1
        });
        families[index].configurations.push(configuration.name());
    }
    families
}

/// The configuration of this name, or the one that stands for the family of this name.
pub(crate) fn kernel(name: &str, target: Target) -> Result<Configuration, String> {
    let configurations = shipped(target);
    if let Some(found) = find(name, &configurations) {
        return Ok(found);
    }
    let has = |target: &Target| find(name, &shipped(*target)).is_some();
    let others: Vec<String> =
        TARGETS.into_iter().filter(has).map(|target| target.to_string()).collect();
    if !others.is_empty() {
        let others = others.join(", ");
        return Err(format!("kernel `{name}` is not for {target}, only for {others}"));
    }
    let text = name.to_lowercase();
    let names: Vec<String> = configurations.iter().map(Configuration::name).collect();
    let near: Vec<&str> =
        names.iter().map(String::as_str).filter(|name| name.contains(&text)).collect();
    let hint = match near.len() {
        0 => {
            let families: Vec<_> = families(target).iter().map(|family| family.name).collect();
            format!("only configurations of {}", families.join(", "))
        }
        count if count <= SUGGESTIONS => format!("but {}", near.join(", ")),
        count => {
            let shown = near[..SUGGESTIONS].join(", ");
            format!("but {shown} and {} more", count - SUGGESTIONS)
        }
    };
    Err(format!("there is no kernel `{name}` for {target}, {hint}"))
}

fn find(name: &str, configurations: &[Configuration]) -> Option<Configuration> {
    let mut family = configurations.iter().filter(|it| it.family() == name);
    let exact = configurations.iter().find(|it| it.name() == name);
    exact.or_else(|| family.clone().find(|it| is_plain(it))).or_else(|| family.next()).copied()
}

/// Returns whether this configuration represents its family.
fn is_plain(configuration: &Configuration) -> bool {
    match configuration {
        // What a problem of head dim 128 gets.
        Configuration::Forward(forward) => {
            forward.head_dim == 128 && forward.element == Element::BF16
        }
        Configuration::Mma(mma) => {
            mma.head_dim == 128 && mma.element == Element::BF16 && !mma.split
        }
        Configuration::Product(product) => *product == Product::PLAIN,
        _ => false,
    }
}
