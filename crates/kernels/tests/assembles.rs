//! Every shipped configuration assembles under every assembler, and under the
//! newest without a spill, a stack frame or a note about slow tensor-core code.
//! The older ones serialise no products of the text that drivers of their
//! releases are given.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::sync::Mutex;

use cuda::toolkit::{Assembled, Error, Options, Ptxas, Toolkit};
use flashcore_kernels::{Configuration, shipped, with_functions};
use ptx::{Compiler, Target};
use rayon::prelude::*;
use sha2::{Digest, Sha256};

/// Whether every assembler is asked about every text, and makes code of it.
fn asks_all() -> bool {
    std::env::var("FLASHCORE_ASSEMBLE").is_ok_and(|it| it == "all")
}

/// What assemblers were asked about, for those that need not be asked again: minutes that
/// `FLASHCORE_ASSEMBLE=all`, before a release, takes.
#[derive(Default)]
struct Asked(Mutex<HashSet<[u8; 32]>>);

impl Asked {
    /// An old assembler says whether it knows the instructions, and whether it has to serialise products.
    /// Both are the same for f16 as for bf16, for every target and for other constants, where the texts
    /// are but for these: one of each is enough.
    fn is_new(&self, text: &str) -> bool {
        let (_, text) = text.split_once(".address_size").expect("it follows the target");
        // A float is written `0f` and eight digits.
        let mut pieces = text.split(" 0f");
        let mut digest = Sha256::new();
        digest.update(pieces.next().unwrap_or_default().replace("bf16", "f16"));
        pieces.for_each(|it| digest.update(it.get(8..).unwrap_or_default().replace("bf16", "f16")));
        self.0.lock().unwrap().insert(digest.finalize().into())
    }

    /// The new one says how many registers there are, and whether they are enough. It says the same of
    /// texts that are the same but for
    ///
    /// - f16 and bf16: of 488 such pairs the only six that differed were scalar kernels, by two
    ///   registers of thirty-six;
    /// - sm_90 and sm_90a, or sm_86 and sm_89: none differed of 90 pairs each.
    fn is_twin(&self, text: &str) -> bool {
        let (_, text) = text.split_once(".target").expect("each text has one");
        let text = text.replace("bf16", "f16").replacen(" sm_90a", " sm_90", 1);
        let digest = Sha256::digest(text.replacen(" sm_86", " sm_89", 1));
        !self.0.lock().unwrap().insert(digest.into())
    }
}

/// What an old assembler has too few registers for, and serialises: slower with drivers of its
/// release (docs/architectures.md).
const SLOWER: [(&str, (u32, u32)); 2] =
    [("backward_bf16_d64x64_dense_64x256", (12, 4)), ("backward_f16_d64x64_dense_64x256", (12, 4))];

#[test]
fn shipped_configurations_assemble_cleanly() {
    let Some(toolkit) = Toolkit::for_tests() else {
        eprintln!("skipped: no ptxas; `cargo xtask tools` brings it");
        return;
    };
    let newest = toolkit.assemblers.iter().map(|p| p.version).max();
    let all = Target::NAMED.into_iter().flat_map(shipped).chain(with_functions());
    let all: Vec<Configuration> = all.collect();
    // Those for f16 come when their twins were.
    let (later, first): (Vec<_>, Vec<_>) = (all.iter()).partition(|it| it.name().contains("_f16"));
    let stand_ins: HashSet<Configuration> = all.iter().filter_map(Configuration::compact).collect();
    let asked = Asked::default();
    let faults_of = |configuration: &Configuration| {
        let name = configuration.name();
        let program = configuration.program().unwrap_or_else(|e| panic!("{name}: {e}"));
        let mut faults = Vec::new();
        for ptxas in &toolkit.assemblers {
            // 12.4 is older than these targets.
            if ptxas.version.major == 12 && program.target.architecture >= 100 {
                continue;
            }
            // The old assembler is asked for acceptance, and whether it serialises products,
            // which it says at any level; the new one for all that makes a kernel slow. The
            // lowest level is not the quickest: it sends every register through memory.
            let level = if Some(ptxas.version) == newest { 3 } else { 1 };
            let release = (ptxas.version.major, ptxas.version.minor);
            let compiler = Compiler::of_cuda(ptxas.version.major, ptxas.version.minor);
            let text = ptx::print_for(&program, compiler);
            // Of what stands in for a kernel until its full form is compiled, the old assembler reads
            // the same instructions there, and how fast it makes the stand-in hardly matters.
            let again = match level {
                3 => asked.is_twin(&text),
                _ => stand_ins.contains(configuration) || !asked.is_new(&text),
            };
            if again && !asks_all() {
                continue;
            }
            let of = |fault| format!("{name} for {} by {}: {fault}", program.target, ptxas.version);
            // Products that it could serialise are in programs for one architecture alone. Others it
            // reads and makes no code of.
            let reads = level < 3 && !program.target.specific && !asks_all();
            let arch = program.target.to_string();
            let arch = if reads { arch.replace("sm_", "compute_") } else { arch };
            match assembled(ptxas, &text, level, arch) {
                Err(error) => faults.push(of(error.to_string())),
                Ok(assembled) if level == 3 => {
                    faults.extend(assembled.faults().into_iter().map(of));
                }
                Ok(_) if SLOWER.contains(&(&name, release)) => {}
                Ok(assembled) => {
                    let notes = assembled.notes.into_iter();
                    faults.extend(notes.filter(|note| note.starts_with("(C75")).map(of));
                }
            }
        }
        faults
    };
    let mut faults: Vec<String> = first.into_par_iter().flat_map_iter(&faults_of).collect();
    faults.par_extend(later.into_par_iter().flat_map_iter(&faults_of));
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

/// What an assembler makes of a text. It makes the same of the same text again, so what it said is
/// kept beside what the build left: only kernels that changed since are assembled.
fn assembled(ptxas: &Ptxas, text: &str, level: u8, arch: String) -> Result<Assembled, Error> {
    let digest = Sha256::digest(format!("{} {level} {arch}\n{text}", ptxas.version));
    let name: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("assembled");
    let kept = folder.join(&name);
    if let Ok(log) = fs::read_to_string(&kept) {
        return Ok(Assembled::from_log(log));
    }
    let assembled =
        ptxas.assemble(text, &Options { level, arch: Some(arch), keep_cubin: false })?;
    // Whole or not at all: other processes read it too. Where it cannot be kept, it is made again.
    let beside = folder.join(format!("{name}.{}", std::process::id()));
    let written = fs::create_dir_all(&folder).and_then(|()| fs::write(&beside, &assembled.log));
    let _ = written.and_then(|()| fs::rename(&beside, &kept));
    Ok(assembled)
}
