//! Tests that `docs/support.md` is true.

use std::fs;
use std::path::{Path, PathBuf};

use crate::root;

/// The files of a folder and of those in it, but for what is built.
fn files(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") {
            files(&path, extension, found);
        } else if path.extension().is_some_and(|it| it == extension) {
            found.push(path);
        }
    }
}

/// The Rust that a crate declares, or that of the workspace.
fn declared(manifest: &str, workspace: &str) -> String {
    let line = manifest.lines().find_map(|line| line.strip_prefix("rust-version = "));
    line.map_or(workspace.to_owned(), |version| version.trim_matches('"').to_owned())
}

/// Each crate is built with the oldest compiler that it declares, by the workflow, and the page names
/// these.
#[test]
fn every_declared_compiler_is_tried() {
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
    let workspace = declared(&read("Cargo.toml"), "");
    let (workflow, page) = (read(".github/workflows/ci.yml"), read("docs/support.md"));
    let rest = format!("cargo +{workspace} check --workspace --exclude flashcore-candle");
    assert!(workflow.contains(&rest), "{rest}");
    assert!(page.contains(&format!("| Rust | {workspace};")));
    let mut others = Vec::new();
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let path = entry.unwrap().path();
        let manifest = fs::read_to_string(path.join("Cargo.toml")).unwrap();
        let version = declared(&manifest, &workspace);
        if version != workspace {
            let name = format!("flashcore-{}", path.file_name().unwrap().to_str().unwrap());
            let check = format!("cargo +{version} check --package {name}");
            assert!(workflow.contains(&check), "{check}");
            assert!(page.contains(&format!("`{name}` {version}")), "{name} {version}");
            others.push(name);
        }
    }
    assert_eq!(others, ["flashcore-candle"]);
}

/// The tests that hold what was found by trying are there.
#[test]
fn the_tests_that_the_page_names_exist() {
    let page = fs::read_to_string(root().join("docs/support.md")).unwrap();
    let (_, table) = page.split_once("## Found by trying").unwrap();
    let (mut sources, mut text) = (Vec::new(), String::new());
    files(&root().join("crates"), "rs", &mut sources);
    files(&root().join("xtask"), "rs", &mut sources);
    files(&root().join("python"), "py", &mut sources);
    for source in sources {
        text += &fs::read_to_string(source).unwrap();
    }
    let mut count = 0;
    for row in table.lines().filter(|line| line.starts_with("| ")).skip(2) {
        let (_, tests) = row.trim_end_matches(" |").rsplit_once(" | ").unwrap();
        let names = tests.split('`').skip(1).step_by(2).filter(|name| name.contains('_'));
        for name in names {
            let there =
                text.contains(&format!("fn {name}(")) || text.contains(&format!("def {name}("));
            assert!(there, "{name}");
            count += 1;
        }
    }
    assert!(count > 20, "{count}");
}
