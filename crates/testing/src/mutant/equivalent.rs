//! The list of mutants that are equivalent to the original, with reasons.
//!
//! An entry identifies a change by the kernel, by the mutation, and by the text of the source line
//! it applies to, so that the list stays valid while lines move. It applies only to mutants that
//! nothing noticed, since others at the same line may be noticed, and to a limited number of them.
//! Where the sources cannot be read, as for an installed command, the list is empty.

use std::path::Path;
use std::sync::OnceLock;

use ptx::SourceLocation;

use super::{Kind, Mutant};

/// A change that makes no difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Equivalent {
    /// A substring of the names of the configurations in which the change is equivalent.
    pub kernel: &'static str,
    /// The kind of the change.
    pub kind: Kind,
    /// The beginning of "operator: detail" of the mutant, or of the detail for a deletion.
    pub change: &'static str,
    /// A suffix of the path of the source file.
    pub file: &'static str,
    /// A substring of the source line.
    pub line: &'static str,
    /// The largest number of such mutants in a configuration; any more are survivors.
    pub at_most: usize,
    /// The reason why the change makes no difference.
    pub reason: &'static str,
}

/// Returns the list, which is stored in `equivalents.txt`.
pub fn equivalents() -> &'static [Equivalent] {
    static ALL: OnceLock<Vec<Equivalent>> = OnceLock::new();
    ALL.get_or_init(|| parse(include_str!("equivalents.txt")))
}

/// Parses the list: lines with a reason, each followed by indented entries to which it applies.
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

/// Changes that only cost time at these places. They apply only to mutants that executed more
/// instructions than the kernel in some scene and fewer in none.
const SLOWER: &[Equivalent] = &[
    slower("attention/visibility.rs", "", MASKED),
    slower("/rule.rs", "k.if_(", MASKED),
    slower("decode/mask.rs", "", MASKED),
    slower("decode/walk.rs", "k.if_(mask.touches", MASKED),
    slower("mma/walk.rs", "", MASKED),
    slower("mma/backward/weights.rs", "k.if_(", MASKED),
    slower("backward/warpgroup.rs", "k.if_(needs_mask", MASKED),
    slower("/softmax.rs", "", "what is multiplied by a factor of 1 stays as it is"),
];

/// The reason for changes that decide where a mask is applied.
const MASKED: &str = "a mask where nothing is hidden changes nothing";

const fn slower(file: &'static str, line: &'static str, reason: &'static str) -> Equivalent {
    let (kernel, change) = ("", "");
    Equivalent { kernel, kind: Kind::Value, change, file, line, at_most: usize::MAX, reason }
}

/// Returns the entry of the list that applies to a mutant of a kernel; `slower` is whether it
/// executed more instructions than the kernel.
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

/// Returns the source line at a place.
fn source(place: SourceLocation) -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = std::fs::read_to_string(root.join(place.file())).ok()?;
    text.lines().nth(place.line() as usize - 1).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every entry must match a line of a kernel: an entry whose line is gone is stale.
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
        let mut stale = Vec::new();
        for it in equivalents() {
            assert!(!it.reason.is_empty() && it.at_most > 0, "{it:?}");
            let named = |(text, path): &(String, std::path::PathBuf)| {
                path.to_string_lossy().ends_with(it.file)
                    && text.lines().any(|line| line.contains(it.line))
            };
            if !sources.iter().any(named) {
                stale.push(it);
            }
        }
        assert!(stale.is_empty(), "no such lines: {stale:#?}");
    }
}
