//! A kernel as it is written: configuration, parameters, shared memory, instructions.

use std::collections::BTreeMap;

use kernels::Configuration;
use ptx::{Parameter, ParameterKind, Program, StatementKind};
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::terminal;

/// What a kernel is made of.
#[derive(Serialize)]
pub(super) struct Anatomy {
    kernel: String,
    family: &'static str,
    summary: &'static str,
    target: String,
    /// The lowest PTX version that knows everything in it.
    ptx_version: String,
    #[serde(serialize_with = "as_object")]
    configuration: Vec<Setting>,
    /// Threads in a block.
    threads: u32,
    /// Blocks in a cluster.
    cluster: u32,
    roles: Vec<Role>,
    parameters: Vec<ParameterFound>,
    shared_memory: SharedMemory,
    instructions: Instructions,
}

/// One field of the configuration.
struct Setting {
    name: String,
    value: Value,
}

/// Warps that do something of their own.
#[derive(Serialize)]
struct Role {
    name: String,
    first_warp: u32,
    warps: u32,
}

#[derive(Serialize)]
struct ParameterFound {
    name: String,
    kind: String,
}

#[derive(Serialize)]
struct SharedMemory {
    /// What a launch asks for.
    bytes: u32,
    /// What a block may have on this target.
    limit: u32,
    regions: Vec<Region>,
}

#[derive(Serialize)]
struct Region {
    name: String,
    offset: u32,
    bytes: u32,
    alignment: u32,
}

#[derive(Serialize)]
struct Instructions {
    /// Written out once each, whatever loops repeat.
    total: usize,
    /// By the names that the kernel language gives them.
    families: BTreeMap<String, usize>,
}

impl Anatomy {
    pub(super) fn of(shipped: &Configuration, program: &Program, ptx: &str) -> Self {
        let version = ptx.lines().find_map(|line| line.strip_prefix(".version "));
        let mut roles = Vec::new();
        let mut families = BTreeMap::new();
        program.visit(&mut |statement| match &statement.kind {
            StatementKind::Role { name, warps, .. } => {
                let (first_warp, warps) = (warps.start, warps.end - warps.start);
                roles.push(Role { name: name.clone(), first_warp, warps });
            }
            StatementKind::Instruction(instruction) => {
                *families.entry(terminal::words(&format!("{instruction:?}"))).or_insert(0) += 1;
            }
            _ => {}
        });
        let regions = program.shared.iter().map(|region| Region {
            name: region.name.clone(),
            offset: region.offset,
            bytes: region.bytes,
            alignment: region.alignment,
        });
        Anatomy {
            kernel: shipped.name(),
            family: shipped.family(),
            summary: shipped.summary(),
            target: program.target.to_string(),
            ptx_version: version.unwrap_or_default().to_owned(),
            configuration: settings(shipped),
            threads: program.threads,
            cluster: program.cluster,
            roles,
            parameters: program.parameters.iter().map(ParameterFound::from).collect(),
            shared_memory: SharedMemory {
                bytes: program.shared_bytes(),
                limit: program.target.shared_memory_limit(),
                regions: regions.collect(),
            },
            instructions: Instructions { total: program.instruction_count(), families },
        }
    }

    pub(super) fn describe(&self) -> String {
        let settings = self.configuration.iter().map(|setting| match &setting.value {
            Value::String(text) => {
                format!("{} {}", setting.name.replace('_', " "), terminal::debug_words(text))
            }
            value => format!("{} {value}", setting.name.replace('_', " ")),
        });
        let mut threads = format!("{} in a block", self.threads);
        for role in &self.roles {
            let last = role.first_warp + role.warps - 1;
            threads += &match role.warps {
                1 => format!(", warp {last} is the {}", role.name),
                _ => format!(", warps {} to {last} are the {}", role.first_warp, role.name),
            };
        }
        let cluster = match self.cluster {
            1 => "none".to_owned(),
            blocks => format!("{blocks} blocks"),
        };
        let mut families: Vec<_> = self.instructions.families.iter().collect();
        families.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        let families: Vec<_> =
            families.into_iter().map(|(name, count)| format!("{count} {name}")).collect();
        let instructions = format!("{}: {}", self.instructions.total, families.join(", "));
        let mut text = terminal::fields(&[
            ("kernel", terminal::paint(terminal::HEADING, &self.kernel)),
            ("computes", self.summary.to_owned()),
            ("target", format!("{}, PTX {}", self.target, self.ptx_version)),
            ("configuration", settings.collect::<Vec<_>>().join(", ")),
            ("threads", threads),
            ("cluster", cluster),
            ("instructions", instructions),
        ]);
        text += &format!("\n{}\n", terminal::paint(terminal::HEADING, "parameters"));
        let parameters: Vec<_> =
            self.parameters.iter().map(|it| (it.name.as_str(), it.kind.clone())).collect();
        text += &terminal::fields(&parameters);
        text + &self.shared_memory.describe()
    }
}

impl SharedMemory {
    fn describe(&self) -> String {
        let heading = if self.bytes == 0 {
            "no shared memory".to_owned()
        } else {
            format!("shared memory: {} of {} bytes", self.bytes, self.limit)
        };
        let mut text = format!("\n{}\n", terminal::paint(terminal::HEADING, &heading));
        if !self.regions.is_empty() {
            let rows: Vec<_> = self
                .regions
                .iter()
                .map(|region| {
                    vec![
                        terminal::plain(&region.name),
                        terminal::plain(region.offset),
                        terminal::plain(region.bytes),
                        terminal::plain(region.alignment),
                    ]
                })
                .collect();
            text += &terminal::table(&["region", "offset", "bytes", "alignment"], &rows);
        }
        text
    }
}

impl From<&Parameter> for ParameterFound {
    fn from(parameter: &Parameter) -> Self {
        let kind = match &parameter.kind {
            ParameterKind::Scalar(ty) => format!("{ty:?}").to_lowercase(),
            ParameterKind::Address => "address".to_owned(),
            ParameterKind::TensorMap(tile) => {
                let extent: Vec<_> = tile.extent.iter().map(u32::to_string).collect();
                let swizzle = match tile.swizzle {
                    ptx::Swizzle::None => "no swizzle".to_owned(),
                    swizzle => format!("swizzle over {} bytes", swizzle.width()),
                };
                format!("tensor map, box {} of {}, {swizzle}", extent.join(" x "), tile.element)
            }
        };
        ParameterFound { name: parameter.name.clone(), kind }
    }
}

fn as_object<S: Serializer>(settings: &[Setting], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(settings.iter().map(|setting| (&setting.name, &setting.value)))
}

/// The fields of a configuration, from what `{:#?}` writes, so that a kernel need not list them
/// a second time:
///
/// ```text
/// Product(
///     Product {
///         element: BF16,
/// ```
fn settings(shipped: &Configuration) -> Vec<Setting> {
    const INDENTATION: usize = 8;
    let mut fields: Vec<String> = Vec::new();
    for line in format!("{shipped:#?}").lines() {
        let text = line.trim_start();
        match line.len() - text.len() {
            INDENTATION if !text.starts_with(['}', ')', ']']) => fields.push(text.to_owned()),
            // The inside and the end of a field that takes several lines.
            INDENTATION.. => {
                fields.last_mut().into_iter().for_each(|it| *it += &format!(" {text}"))
            }
            _ => {}
        }
    }
    // As `{:?}` writes it: no comma before a closing brace.
    fields.iter_mut().for_each(|field| *field = field.replace(", }", " }"));
    let settings = fields.iter().filter_map(|field| field.split_once(": "));
    settings
        // The target has a line of its own.
        .filter(|(name, _)| *name != "target")
        .map(|(name, value)| {
            let value = value.trim_end_matches(',');
            // Numbers and truth values are written as in JSON, names are not.
            let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
            Setting { name: name.to_owned(), value }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_of_a_configuration_is_found() {
        for shipped in kernels::shipped(ptx::Target::SM_90A) {
            // A field that takes several lines has other spaces in one, and more commas.
            let squeezed = |text: &str| text.replace(' ', "").replace(",}", "}").replace(",)", ")");
            let compact = squeezed(&format!("{shipped:?}"));
            for setting in settings(&shipped) {
                let value = setting.value.to_string();
                let field = squeezed(&format!("{}: {}", setting.name, value.trim_matches('"')));
                assert!(compact.contains(&field), "no `{field}` in {compact}");
            }
        }
        let product = Configuration::Product(kernels::Product::PLAIN);
        let names: Vec<_> = settings(&product).into_iter().map(|setting| setting.name).collect();
        let expected = ["element", "columns", "swizzle", "a", "b", "source", "stages", "cluster"];
        assert_eq!(names, expected);
    }
}
