//! Follows the documentation page about writing one's own kernel: builds and runs its crate outside
//! of the workspace.

use std::fs;
use std::path::Path;

use crate::process::{CommandOutput, cargo, run_separate_streams};
use crate::{root, target};

/// Builds and runs the page's crate. Its output must be what the page shows, except for the last
/// line if there is a GPU.
pub(crate) fn outside() -> Result<(), String> {
    let page = root().join("docs/outside.md");
    let text = fs::read_to_string(&page).map_err(|error| format!("{}: {error}", page.display()))?;
    let folder = target().join("outside");
    let write = |path: &str, text: &str| {
        let path = folder.join(path);
        let parent = path.parent().unwrap_or(&folder);
        let written = fs::create_dir_all(parent).and_then(|()| fs::write(&path, text));
        written.map_err(|error| format!("{}: {error}", path.display()))
    };
    // A workspace of its own, though it lies below another.
    write("Cargo.toml", &format!("{}\n[workspace]\n", local(&blocks(&text, "toml"), &root())))?;
    write("src/main.rs", &blocks(&text, "rust"))?;
    // What was fetched for the workspace is enough.
    let lock = fs::read_to_string(root().join("Cargo.lock")).map_err(|error| error.to_string())?;
    write("Cargo.lock", &lock)?;
    let mut command = cargo(&["run", "--quiet", "--offline", "--manifest-path"]);
    command.arg(folder.join("Cargo.toml"));
    // Crates from elsewhere as the tests build them: what has the same features is built once.
    command.env("CARGO_TARGET_DIR", target()).env("CARGO_PROFILE_DEV_DEBUG", "0");
    let CommandOutput { success, stdout, log } = run_separate_streams(command)?;
    let expected = blocks(&text, "text");
    if success && agree(&stdout, &expected) {
        return Ok(());
    }
    Err(format!("{}: it prints\n{log}\nand should print\n{expected}", page.display()))
}

/// What the code blocks of one kind hold, with empty lines between them.
fn blocks(page: &str, kind: &str) -> String {
    let fence = format!("```{kind}\n");
    let texts = page.split(fence.as_str()).skip(1).filter_map(|rest| rest.split_once("```"));
    texts.map(|(text, _)| text).collect::<Vec<_>>().join("\n")
}

/// A manifest with our crates by path where it has them by version.
fn local(manifest: &str, root: &Path) -> String {
    let line = |line: &str| match line.split_once(" = ") {
        Some((name, _)) if name.starts_with("flashcore-") => {
            let folder = root.join("crates").join(name.trim_start_matches("flashcore-"));
            format!("{name} = {{ path = \"{}\" }}\n", folder.display())
        }
        _ => format!("{line}\n"),
    };
    manifest.lines().map(line).collect()
}

/// Whether the lines are those expected; a launch is as good as none.
fn agree(found: &str, expected: &str) -> bool {
    let line = |line: &str| match line.split_once(':') {
        Some(("not launched", _)) => "launched: the same".to_owned(),
        _ => line.to_owned(),
    };
    let (found, expected) = (found.trim().lines().map(line), expected.trim().lines().map(line));
    found.eq(expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_a_crate() {
        let page = "a\n```toml\n[dependencies]\nflashcore-ptx = \"0.1\"\nhalf = \"2\"\n```\n\
                    b\n```rust\nfn one() {}\n```\nc\n```rust\nfn two() {}\n```\n";
        assert_eq!(blocks(page, "rust"), "fn one() {}\n\nfn two() {}\n");
        assert_eq!(
            local(&blocks(page, "toml"), Path::new("/here")),
            "[dependencies]\nflashcore-ptx = { path = \"/here/crates/ptx\" }\nhalf = \"2\"\n"
        );
        assert!(agree("a\nlaunched: the same\n", "a\nnot launched: no driver\n"));
        assert!(!agree("a\nlaunched: WRONG\n", "a\nnot launched: no driver\n"));
        assert!(!agree("b\nnot launched: x\n", "a\nnot launched: x\n"));
    }
}
