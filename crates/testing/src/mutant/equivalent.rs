//! Mutants that are as good as the original, and why.
//!
//! An entry names a change by the kernel, by what is done and by the line of the kernel's source
//! that it is done to: as text, so that the list holds while lines move. It speaks only for mutants
//! that nobody noticed, and for so many of them: at the same line others are noticed. Where sources
//! are not there to be read, as for an installed command, nothing is on the list.

use std::path::Path;
use std::sync::OnceLock;

use ptx::Place;

use super::{Kind, Mutant};

/// A change that changes nothing that matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Equivalent {
    /// Something in the names of the configurations that it is one in.
    pub kernel: &'static str,
    /// What kind of change.
    pub kind: Kind,
    /// What is done, and what becomes of what: the beginning of "operator: detail", or of what is
    /// deleted.
    pub change: &'static str,
    /// The end of the file's path.
    pub file: &'static str,
    /// What stands in the line.
    pub line: &'static str,
    /// How many a configuration has at most: one more is a survivor.
    pub at_most: usize,
    /// Why nobody can notice.
    pub reason: &'static str,
}

/// Every one: the list in `equivalents.txt`.
pub fn equivalents() -> &'static [Equivalent] {
    static ALL: OnceLock<Vec<Equivalent>> = OnceLock::new();
    ALL.get_or_init(|| parse(include_str!("equivalents.txt")))
}

/// Reasons, and below each, further in, what it is the reason for.
fn parse(text: &'static str) -> Vec<Equivalent> {
    let (mut all, mut reason) = (Vec::new(), "");
    for line in text.lines().filter(|it| !it.is_empty() && !it.starts_with('#')) {
        let Some(entry) = line.strip_prefix("    ") else {
            reason = line;
            continue;
        };
        let words: Vec<&str> =
            entry.split(" | ").map(|it| if it == "*" { "" } else { it }).collect();
        let (&[kernel, kind, change, file, line], most) = words.split_at(5) else {
            unreachable!("split at five: {entry}")
        };
        let kind = Kind::ALL.into_iter().find(|it| it.name() == kind);
        let at_most = most.first().map_or(usize::MAX, |it| it.parse().expect("a number"));
        let kind = kind.unwrap_or_else(|| panic!("no kind of change: {entry}"));
        all.push(Equivalent { kernel, kind, change, file, line, at_most, reason });
    }
    all
}

/// Changes that cost time and nothing else, where they are made: only of mutants that took more
/// instructions than the kernel in some scene, and in none fewer.
const SLOWER: &[Equivalent] = &[
    slower("attention/visibility.rs", "", MASKED),
    slower("/rule.rs", "k.if_(", MASKED),
    slower("decode/mask.rs", "", MASKED),
    slower("decode/walk.rs", "k.if_(mask.touches", MASKED),
    slower("mma/walk.rs", "", MASKED),
    slower("mma/backward/weights.rs", "k.if_(", MASKED),
    slower("backward/consumer.rs", "k.if_(needs_mask", MASKED),
    slower("/softmax.rs", "", "what is multiplied by a factor of 1 stays as it is"),
];

/// Of changes that decide what is masked.
const MASKED: &str = "a mask where nothing is hidden changes nothing";

const fn slower(file: &'static str, line: &'static str, reason: &'static str) -> Equivalent {
    let (kernel, change) = ("", "");
    Equivalent { kernel, kind: Kind::Value, change, file, line, at_most: usize::MAX, reason }
}

/// The line of the list that a mutant of a kernel is on, which took more instructions than the kernel
/// or not.
pub(super) fn find(kernel: &str, mutant: &Mutant, slower: bool) -> Option<&'static Equivalent> {
    let all = equivalents().iter().chain(SLOWER.iter().filter(|_| slower));
    let mut named = all.filter(|it| it.names(kernel, mutant)).peekable();
    named.peek()?;
    let source = source(mutant.place)?;
    named.find(|it| source.contains(it.line))
}

impl Equivalent {
    fn names(&self, kernel: &str, mutant: &Mutant) -> bool {
        let change = match mutant.kind {
            Kind::Delete => mutant.detail.clone(),
            Kind::Weaken | Kind::Value => format!("{}: {}", mutant.operator, mutant.detail),
        };
        kernel.contains(self.kernel)
            && self.kind == mutant.kind
            && change.starts_with(self.change)
            && mutant.place.file().ends_with(self.file)
    }
}

/// The line of source at a place.
fn source(place: Place) -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = std::fs::read_to_string(root.join(place.file())).ok()?;
    text.lines().nth(place.line() as usize - 1).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the list names is there: a line that has gone speaks for nobody.
    #[test]
    fn every_line_of_the_list_is_a_line_of_a_kernel() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut sources = Vec::new();
        let mut folders = vec![root.join("kernels/src"), root.join("ptx/src")];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => folders.push(path),
                    false => sources.push((std::fs::read_to_string(&path).unwrap(), path)),
                }
            }
        }
        for it in equivalents() {
            assert!(!it.reason.is_empty() && it.at_most > 0, "{it:?}");
            let named = |(text, path): &(String, std::path::PathBuf)| {
                path.to_string_lossy().ends_with(it.file)
                    && text.lines().any(|line| line.contains(it.line))
            };
            assert!(sources.iter().any(named), "no such line: {it:?}");
        }
    }
}
