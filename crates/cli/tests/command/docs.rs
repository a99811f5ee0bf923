//! The pages about the command line say what is so.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use cuda::toolkit::Toolkit;

use crate::{json, succeed};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn page(name: &str) -> String {
    fs::read_to_string(repository().join("docs").join(name)).unwrap()
}

/// The fields that a section's table names.
fn fields(page: &str, section: &str) -> BTreeSet<String> {
    let heading = format!("\n## {section}\n");
    let (_, rest) = page.split_once(&heading).unwrap_or_else(|| panic!("no section {section}"));
    let section = rest.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    rows.map(str::to_owned).collect()
}

/// Every field of an answer is described, and every field that is described is there.
#[test]
fn json_is_as_the_page_says() {
    let page = page("json.md");
    let mut commands: Vec<(&str, Vec<&str>)> = vec![
        ("attend", vec!["attend", "--seq", "9", "--backend", "cpu"]),
        ("bench", vec!["bench", "--plan", "--problem", "s=64"]),
        ("check", vec!["check", "--problem", "s=9", "--backend", "cpu"]),
        ("doctor", vec!["doctor"]),
        ("gate", vec!["gate", "single", "--without", "simulate,correct,fast,counters"]),
        ("inspect", vec!["inspect"]),
        ("inspect KERNEL", vec!["inspect", "single", "--target", "sm_90a"]),
        ("inspect --problem", vec!["inspect", "--problem", "h=2,s=64,d=64"]),
        ("profile", vec!["profile", "--problem", "b=1,h=1,s=64,d=64"]),
        ("scale", vec!["scale", "--ranks", "8"]),
        ("sim", vec!["sim", "single", "--seeds", "1", "--policy", "latest"]),
        ("soak", vec!["soak", "--problems", "2", "--faults", "none", "--backend", "cpu"]),
        ("tune", vec!["tune", "--model", "--problem", "s=64,d=64", "--show", "1"]),
    ];
    if Toolkit::for_tests().is_some() {
        commands.push(("warm", vec!["warm", "--chip", "sm_80", "--problem", "s=64,d=64"]));
    }
    for (section, command) in commands {
        let answer = json(&[&command[..], &["--json"]].concat());
        let answer = answer.as_object().unwrap_or_else(|| panic!("{section} is no object"));
        assert_eq!(answer["version"], 1, "{section}");
        let found = answer.keys().filter(|key| *key != "version").cloned();
        assert_eq!(found.collect::<BTreeSet<_>>(), fields(&page, section), "{section}");
    }
}

/// Names of variables in a text, where `before` and `after` stand around them.
fn variables(text: &str, before: &str, after: &str) -> BTreeSet<String> {
    let is_name = |letter: char| letter.is_ascii_uppercase() || letter == '_';
    let of = |rest: &str| {
        let rest = rest.strip_prefix("FLASHCORE_")?;
        let end = rest.find(|letter| !is_name(letter))?;
        rest[end..].starts_with(after).then(|| format!("FLASHCORE_{}", &rest[..end]))
    };
    text.split(before).filter_map(of).filter(|name| name != "FLASHCORE_").collect()
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            sources(&path, found);
        } else if name.ends_with(".rs") || name.ends_with(".py") {
            found.push(path);
        }
    }
}

/// The page lists exactly the variables that the code reads.
#[test]
fn every_variable_has_a_line() {
    let listed = variables(&page("environment.md"), "`", "`");
    let (mut read, mut files) = (BTreeSet::new(), Vec::new());
    for folder in ["bench", "crates", "python", "xtask"] {
        sources(&repository().join(folder), &mut files);
    }
    assert!(files.len() > 100);
    for file in files {
        let text = fs::read_to_string(file).unwrap();
        read.extend(variables(&text, "\"", "\""));
    }
    assert_eq!(listed, read);
}

/// What people read fits into 100 columns, but for commands to be copied and other programs' words.
#[test]
fn lines_fit_into_100_columns() {
    let long = "b=4,h=8,s=900,d=128,bf16,causal,softcap=30,alibi,sinks,queries=packed:2000,keys=packed:2000";
    let commands: [&[&str]; 14] = [
        &["--help"],
        &["attend", "--help"],
        &["soak", "--help"],
        &["attend", "--problem", "b=2,h=2,s=33,d=16,alibi,sinks,causal", "--backend", "cpu"],
        &["bench", "--plan", "--problem", long],
        &["bench", "sets"],
        &["check", "--problem", "s=9,h=1"],
        &["doctor"],
        &["inspect"],
        &["inspect", "scalar", "--target", "sm_80"],
        &["scale", "--help"],
        &["scale", "--lengths", "128k,10m"],
        &["sim", "--problem", "h=1,s=20,d=64,bf16,causal", "--seeds", "1", "--policy", "latest"],
        &["soak", "--problems", "2", "--faults", "deleted", "--backend", "cpu"],
    ];
    for command in commands {
        for line in succeed(command).lines() {
            let columns = line.chars().count();
            assert!(columns <= 100, "{command:?}: {columns} columns in\n{line}");
        }
    }
}
