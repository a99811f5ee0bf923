//! The pages as a book.
//!
//! Rendering needs `mdbook`, which takes minutes to build: the tests look at the pages themselves, and
//! compile the Rust in them (`crates/testing/src/pages.rs`).

use crate::Outcome;
use crate::process::{program, run_captured, run_in_terminal};

/// Renders the book into `target/book`.
pub(crate) fn book() -> Outcome {
    let mut version = program("mdbook");
    version.arg("--version");
    if !run_captured(version).is_ok_and(|done| done.success) {
        return Err("there is no mdbook: `cargo install mdbook --locked` brings it".to_owned());
    }
    let mut command = program("mdbook");
    command.arg("build");
    run_in_terminal(command)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use crate::root;

    fn pages() -> Vec<PathBuf> {
        pages_of(&root().join("docs"))
    }

    fn pages_of(folder: &Path) -> Vec<PathBuf> {
        let mut pages = Vec::new();
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                pages.extend(pages_of(&path));
            } else if path.extension().is_some_and(|extension| extension == "md") {
                pages.push(path);
            }
        }
        pages
    }

    /// What `[words](target)` lead to, outside of code.
    fn links(text: &str) -> Vec<&str> {
        let mut code = false;
        let mut links = Vec::new();
        for line in text.lines() {
            code ^= line.trim_start().starts_with("```");
            let parts = line.split("](").skip(1).filter(|_| !code);
            links.extend(parts.filter_map(|part| Some(part.split_once(')')?.0)));
        }
        links
    }

    /// The fragment that GitHub and mdbook make of a heading.
    fn fragment(heading: &str) -> String {
        let kept = |letter: &char| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_');
        heading.to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")
    }

    fn has_heading(page: &Path, wanted: &str) -> bool {
        let text = fs::read_to_string(page).unwrap();
        let headings = text.lines().filter(|line| line.starts_with('#'));
        let headings = headings.map(|line| line.trim_start_matches('#').trim());
        headings.map(fragment).any(|heading| heading == wanted)
    }

    #[test]
    fn links_lead_somewhere() {
        let root = root();
        let others = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"];
        let mut broken = Vec::new();
        for page in pages().into_iter().chain(others.map(|name| root.join(name))) {
            let text = fs::read_to_string(&page).unwrap();
            for link in links(&text).into_iter().filter(|link| !link.contains("://")) {
                let (path, heading) = link.split_once('#').unwrap_or((link, ""));
                let target = match path {
                    "" => page.clone(),
                    path => page.parent().unwrap().join(path),
                };
                let there =
                    target.exists() && (heading.is_empty() || has_heading(&target, heading));
                if !there {
                    broken.push(format!("{}: {link}", page.display()));
                }
            }
        }
        assert!(broken.is_empty(), "{}", broken.join("\n"));
    }

    /// What is outside of docs/ is no part of the book.
    #[test]
    fn pages_lead_to_pages() {
        let docs = root().join("docs").canonicalize().unwrap();
        for page in pages() {
            let text = fs::read_to_string(&page).unwrap();
            for link in links(&text).into_iter().filter(|link| !link.contains("://")) {
                let path = link.split_once('#').map_or(link, |(path, _)| path);
                let target = page.parent().unwrap().join(path).canonicalize().unwrap();
                assert!(target.starts_with(&docs), "{}: {link}", page.display());
            }
        }
    }

    #[test]
    fn the_book_has_every_page_once() {
        let docs = root().join("docs");
        let summary = fs::read_to_string(docs.join("SUMMARY.md")).unwrap();
        let mut listed: Vec<PathBuf> = links(&summary).iter().map(|link| docs.join(link)).collect();
        let mut there = pages();
        there.retain(|page| *page != docs.join("SUMMARY.md"));
        listed.sort_unstable();
        there.sort_unstable();
        assert_eq!(listed, there);
    }

    /// The files that a part of docs/architecture.md names, without those it says in one.
    fn files(text: &str) -> Vec<&str> {
        let quoted = text.split('`').skip(1).step_by(2);
        quoted.filter(|it| it.ends_with(".rs") && !it.contains('{')).collect()
    }

    #[test]
    fn the_way_of_a_call_is_as_drawn() {
        let page = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
        for file in files(&page) {
            let of_library = root().join("crates/flashcore/src").join(file);
            assert!(root().join(file).exists() || of_library.exists(), "{file}");
        }
        let (_, way) = page.split_once("`flashcore attend` passes these 14 files").unwrap();
        let (way, _) = way.split_once("\nOn a machine without a GPU").unwrap();
        assert_eq!(files(way).len(), 14);
    }
}
