//! What a release needs besides the crates: a list of what is inside, and what changed.

use std::collections::BTreeMap;
use std::fs;

use crate::process::{cargo, run_separate_streams};
use crate::{Outcome, root};

/// What is delivered as a binary: the command and the Python extension.
const DELIVERED: [&str; 2] = ["flashcore-cli", "flashcore-python"];

/// A package that goes into a binary.
#[derive(Debug, PartialEq)]
struct Component {
    name: String,
    version: String,
    licence: String,
    /// SHA-256 of what the registry delivers; our own have none.
    checksum: Option<String>,
}

/// Writes a bill of materials in the form of CycloneDX for everything that is delivered, into
/// `dist/`.
pub(crate) fn bill_of_materials() -> Outcome {
    let lock = root().join("Cargo.lock");
    let lock = fs::read_to_string(&lock).map_err(|error| format!("{}: {error}", lock.display()))?;
    let checksums = checksums(&lock);
    let folder = root().join("dist");
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for package in DELIVERED {
        let mut command = cargo(&["tree", "--locked", "--package", package, "--edges", "normal"]);
        command.args(["--target", "all", "--prefix", "none", "--format", "{p}|{l}"]);
        let done = run_separate_streams(command)?;
        if !done.success {
            return Err(done.log);
        }
        let components = components(&done.stdout, &checksums);
        let path = folder.join(format!("{package}.cdx.json"));
        let text = cyclonedx(&components);
        fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
        println!("{}: {} packages", path.display(), components.len());
    }
    Ok(true)
}

/// The checksums of a lock file, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let value = |package: &str, key: &str| {
        let mut lines = package.lines();
        let line = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "))?;
        Some(line.trim_matches('"').to_owned())
    };
    let packages = lock.split("[[package]]").skip(1);
    let known = packages.filter_map(|package| {
        let key = (value(package, "name")?, value(package, "version")?);
        Some((key, value(package, "checksum")?))
    });
    known.collect()
}

/// From the lines `name v1.2.3 (where)|licence` of `cargo tree`, each package once, the first first.
fn components(tree: &str, checksums: &BTreeMap<(String, String), String>) -> Vec<Component> {
    let mut components: Vec<Component> = Vec::new();
    for line in tree.lines() {
        let line = line.trim_end_matches(" (*)");
        let Some((package, licence)) = line.split_once('|') else { continue };
        let mut words = package.split(' ');
        let (Some(name), Some(version)) = (words.next(), words.next()) else { continue };
        let version = version.trim_start_matches('v');
        if components.iter().any(|known| known.name == name && known.version == version) {
            continue;
        }
        let checksum = checksums.get(&(name.to_owned(), version.to_owned())).cloned();
        // An old way of writing "or".
        let licence = licence.replace('/', " OR ");
        let (name, version) = (name.to_owned(), version.to_owned());
        components.push(Component { name, version, licence, checksum });
    }
    components
}

/// The first component contains the others.
fn cyclonedx(components: &[Component]) -> String {
    let written = components.iter().enumerate().map(|(index, component)| {
        let Component { name, version, licence, checksum } = component;
        let purl = format!("pkg:cargo/{name}@{version}");
        let hashes = checksum.as_ref().map_or(String::new(), |checksum| {
            format!(", \"hashes\": [{{\"alg\": \"SHA-256\", \"content\": \"{checksum}\"}}]")
        });
        let kind = if index == 0 { "application" } else { "library" };
        format!(
            "{{\"type\": \"{kind}\", \"name\": \"{name}\", \"version\": \"{version}\", \
             \"purl\": \"{purl}\", \"licenses\": [{{\"expression\": \"{licence}\"}}]{hashes}}}"
        )
    });
    let written: Vec<String> = written.collect();
    let (whole, parts) =
        written.split_first().map_or(("{}", &[][..]), |(whole, parts)| (whole.as_str(), parts));
    format!(
        "{{\n  \"bomFormat\": \"CycloneDX\",\n  \"specVersion\": \"1.5\",\n  \"version\": 1,\n  \
         \"metadata\": {{\"component\": {whole}}},\n  \"components\": [\n    {}\n  ]\n}}\n",
        parts.join(",\n    ")
    )
}

/// Prints what the changelog says of a version, or of what is to come.
pub(crate) fn notes(version: Option<&str>) -> Outcome {
    let path = root().join("CHANGELOG.md");
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let version = version.map_or("Unreleased", |version| version.trim_start_matches('v'));
    match section(&text, version) {
        Some(section) => {
            println!("{section}");
            Ok(true)
        }
        None => Err(format!("{} has no section [{version}]", path.display())),
    }
}

/// The text below the heading `## [version]`, up to the next of its kind.
fn section<'a>(changelog: &'a str, version: &str) -> Option<&'a str> {
    let begin = changelog.find(&format!("## [{version}]"))?;
    let text = &changelog[begin..];
    let text = &text[text.find('\n')?..];
    let end = text.find("\n## ").unwrap_or(text.len());
    Some(text[..end].trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bill_names_each_package_once() {
        let lock = "\
[[package]]
name = \"half\"
version = \"2.7.1\"
source = \"registry\"
checksum = \"abc\"
dependencies = [
 \"cfg-if\",
]
";
        let tree = "\
flashcore-cli v0.1.0 (/somewhere/crates/cli)|MIT OR Apache-2.0
half v2.7.1|MIT/Apache-2.0
half v2.7.1|MIT/Apache-2.0 (*)
";
        let components = components(tree, &checksums(lock));
        assert_eq!(components.len(), 2);
        assert_eq!(
            (components[0].name.as_str(), &components[0].checksum),
            ("flashcore-cli", &None)
        );
        let half = Component {
            name: "half".to_owned(),
            version: "2.7.1".to_owned(),
            licence: "MIT OR Apache-2.0".to_owned(),
            checksum: Some("abc".to_owned()),
        };
        assert_eq!(components[1], half);
        let bill = cyclonedx(&components);
        assert!(bill.contains("\"pkg:cargo/half@2.7.1\"") && !bill.contains("somewhere"), "{bill}");
        assert!(bill.contains("{\"alg\": \"SHA-256\", \"content\": \"abc\"}"), "{bill}");
    }

    #[test]
    fn notes_are_the_section_of_a_version() {
        let text = "# Changelog\n\n## [Unreleased]\n\n- new\n\n## [0.1.0] - 2026-11-16\n\n- old\n";
        assert_eq!(section(text, "Unreleased"), Some("- new"));
        assert_eq!(section(text, "0.1.0"), Some("- old"));
        assert_eq!(section(text, "0.2.0"), None);
    }
}
