//! What the machine code of a kernel does in its loops over products, where it costs most.

use std::collections::{BTreeSet, HashMap};

use serde::Serialize;

/// What stands in the innermost loops that have instructions of the tensor cores.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct InLoops {
    /// Moves to uniform registers (`R2UR`), such as of descriptors that `ptxas` does not recognise as
    /// uniform: docs/kernels.md says what they cost and what removes them.
    uniform_moves: usize,
    /// Accesses to local memory, such as of spilled registers.
    local_accesses: usize,
}

impl InLoops {
    /// Counts in a text of `nvdisasm`.
    pub(super) fn count(sass: &str) -> Self {
        let code = Code::parse(sass);
        let is_product = |at: &usize| code.names[*at].contains("MMA");
        let mut loops = code.loops();
        loops.retain(|body| body.iter().any(is_product));
        let innermost = |body: &&BTreeSet<usize>| {
            !loops.iter().any(|other| other != *body && other.is_subset(body))
        };
        let inside: BTreeSet<usize> = loops.iter().filter(innermost).flatten().copied().collect();
        let count =
            |names: &[&str]| inside.iter().filter(|at| names.contains(&code.names[**at])).count();
        InLoops { uniform_moves: count(&["R2UR"]), local_accesses: count(&["LDL", "STL"]) }
    }
}

impl std::fmt::Display for InLoops {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.uniform_moves, self.local_accesses) {
            (0, 0) => write!(f, "none"),
            (moves, 0) => write!(f, "{moves} R2UR"),
            (0, local) => write!(f, "{local} local"),
            (moves, local) => write!(f, "{moves} R2UR, {local} local"),
        }
    }
}

/// The instructions of a text and where control goes from each.
#[derive(Default)]
struct Code<'a> {
    /// Names without modifiers: `LDL` of `LDL.64`.
    names: Vec<&'a str>,
    next: Vec<Vec<usize>>,
}

impl<'a> Code<'a> {
    fn parse(sass: &'a str) -> Self {
        let (mut code, mut labels, mut branches) = (Code::default(), HashMap::new(), Vec::new());
        for line in sass.lines().map(str::trim) {
            if let Some(label) = line.strip_suffix(':') {
                labels.insert(label, code.names.len());
            }
            // `/*0050*/  @P0 BRA `(.L_x_1) ;`
            let Some((_, text)) = line.strip_prefix("/*").and_then(|it| it.split_once("*/")) else {
                continue;
            };
            let mut words = text.split_whitespace().peekable();
            let conditional = words.next_if(|word| word.starts_with('@')).is_some();
            let Some(operation) = words.next() else { continue };
            let at = code.names.len();
            let name = operation.split('.').next().unwrap_or_default();
            let ends = ["BRA", "EXIT", "RET", "BRX", "JMP"].contains(&name);
            // `BRA.U.ANY` and `BRA P1, `(.L)` have conditions of their own.
            let leaves =
                ends && !conditional && (name != "BRA" || text.trim_start().starts_with("BRA `"));
            code.names.push(name);
            code.next.push(if leaves { Vec::new() } else { vec![at + 1] });
            if name == "BRA"
                && let Some((_, label)) = text.split_once("`(")
            {
                branches.push((at, label.split(')').next().unwrap_or_default()));
            }
        }
        for (at, label) in branches {
            code.next[at].extend(labels.get(label));
        }
        // The last instruction is followed by none.
        let count = code.names.len();
        code.next.iter_mut().for_each(|next| next.retain(|to| *to < count));
        code
    }

    /// The natural loops: for each branch back to an instruction without which it is not reached, what
    /// lies between the two. (Rare paths stand at the end of a kernel, and a branch from there back to
    /// the middle makes no loop.)
    fn loops(&self) -> Vec<BTreeSet<usize>> {
        let mut previous = vec![Vec::new(); self.next.len()];
        let mut back = Vec::new();
        for (from, next) in self.next.iter().enumerate() {
            for to in next {
                previous[*to].push(from);
                back.extend((*to <= from).then_some((from, *to)));
            }
        }
        back.retain(|(from, to)| !reached(&self.next, 0, *to).contains(from));
        let mut loops: Vec<(usize, BTreeSet<usize>)> = Vec::new();
        for (from, to) in back {
            let mut body = reached(&previous, from, to);
            body.insert(to);
            // Of loops that begin at one instruction, those that end later contain the others.
            let inner = loops.iter().rev().find(|(begin, _)| *begin == to);
            body.extend(inner.into_iter().flat_map(|(_, inner)| inner));
            loops.push((to, body));
        }
        loops.into_iter().map(|(_, body)| body).collect()
    }
}

/// What is reached from a place in a graph without passing another.
fn reached(next: &[Vec<usize>], from: usize, without: usize) -> BTreeSet<usize> {
    let (mut reached, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(at) = open.pop() {
        if at != without && reached.insert(at) {
            open.extend(&next[at]);
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A loop over key blocks in a loop over tiles, a wait whose rare path stands at the end, and moves
    /// before, between and in them.
    const NESTED: &str = "
        /*0000*/                   R2UR UR1, R1 ;
.L_x_0:
        /*0010*/                   R2UR UR2, R1 ;
.L_x_1:
        /*0020*/              @!P0 BRA `(.L_x_3) ;
.L_x_2:
        /*0030*/                   R2UR UR8, R2 ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0050*/                   LDL.64 R2, [R1] ;
        /*0060*/               @P0 BRA `(.L_x_1) ;
        /*0070*/                   STL [R1], R2 ;
        /*0080*/               @P1 BRA `(.L_x_0) ;
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/                   SYNCS.PHASECHK.TRANS64 P0, [R4], R5 ;
        /*00b0*/              @!P0 BRA `(.L_x_3) ;
        /*00c0*/                   R2UR UR9, R2 ;
        /*00d0*/                   BRA `(.L_x_2) ;
.L_x_4:
        /*00e0*/                   BRA `(.L_x_4) ;
";

    /// A loop over tiles that begins with the one over key blocks.
    const TOGETHER: &str = "
.L_x_0:
        /*0000*/               @P0 BRA `(.L_x_1) ;
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0020*/                   BRA `(.L_x_0) ;
.L_x_1:
        /*0030*/                   R2UR UR8, R2 ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0050*/               @P1 BRA `(.L_x_0) ;
        /*0060*/                   EXIT ;
";

    #[test]
    fn the_innermost_loop_with_products_is_counted() {
        let found = InLoops::count(NESTED);
        assert_eq!(found, InLoops { uniform_moves: 2, local_accesses: 1 });
        assert_eq!(found.to_string(), "2 R2UR, 1 local");
        let straight = NESTED.replace("BRA `(.L_x_1)", "NOP").replace("BRA `(.L_x_0)", "NOP");
        assert_eq!(InLoops::count(&straight).to_string(), "none");
        assert_eq!(InLoops::count(TOGETHER).to_string(), "none");
        let copies = NESTED.replace("HGMMA.64x64x16.F32.BF16", "UTMALDG.4D");
        assert_eq!(InLoops::count(&copies), InLoops::default());
    }
}
