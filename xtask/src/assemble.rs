//! Registers, spills and the assembler's notes of kernels, for PTX in files.

use std::path::{Path, PathBuf};

use crate::table::table;
use crate::toolkit::{Error, Options, Ptxas, Toolkit};
use crate::{Outcome, tools};

/// Assembles every file with every assembler, prints a table and then each fault in full.
pub(crate) fn assemble(paths: &[&str]) -> Outcome {
    let mut files = Vec::new();
    for path in paths {
        collect(Path::new(path), &mut files)?;
    }
    if files.is_empty() {
        return Err(match paths {
            [] => "assemble wants .ptx files, or folders of them".to_owned(),
            _ => format!("no .ptx file in {}", paths.join(", ")),
        });
    }
    tools::tools()?;
    // The pair that the tests use, whatever else is installed.
    let assemblers = Toolkit::at(tools::folder()).assemblers;

    let (mut rows, mut complaints) = (Vec::new(), Vec::new());
    for file in &files {
        let ptx = std::fs::read_to_string(file);
        let ptx = ptx.map_err(|error| format!("cannot read {}: {error}", file.display()))?;
        for ptxas in &assemblers {
            let (row, faults) = row(file, ptxas, &ptx);
            rows.push(row);
            let place = format!("{} under ptxas {}", file.display(), ptxas.version);
            complaints.extend(faults.into_iter().map(|fault| format!("{place}: {fault}")));
        }
    }
    let head =
        ["file", "ptxas", "registers", "shared", "stack", "spilled", "barriers", "ms", "verdict"];
    print!("{}", table(&head, &rows));
    for complaint in &complaints {
        println!("\n{complaint}");
    }
    Ok(complaints.is_empty())
}

fn row(file: &Path, ptxas: &Ptxas, ptx: &str) -> (Vec<String>, Vec<String>) {
    let mut row = vec![file.display().to_string(), ptxas.version.to_string()];
    let faults = match ptxas.assemble(ptx, &Options::default()) {
        Ok(assembled) => {
            row.extend([
                assembled.registers.to_string(),
                assembled.shared_bytes.to_string(),
                assembled.stack_frame_bytes.to_string(),
                (assembled.spill_store_bytes + assembled.spill_load_bytes).to_string(),
                assembled.barriers.map(|count| count.to_string()).unwrap_or_default(),
                format!("{:.0}", assembled.seconds * 1e3),
            ]);
            assembled.faults()
        }
        Err(error) => {
            row.extend([const { String::new() }; 6]);
            row.push("refused".to_owned());
            let log = if let Error::Failed { log, .. } = error { log } else { error.to_string() };
            return (row, vec![log.trim_end().to_owned()]);
        }
    };
    row.push(if faults.is_empty() { "clean" } else { "slow" }.to_owned());
    (row, faults)
}

/// A file as it is; a folder as every `.ptx` below it, in order.
fn collect(path: &Path, files: &mut Vec<PathBuf>) -> Result<(), String> {
    let unread = |error| format!("cannot read {}: {error}", path.display());
    if !std::fs::metadata(path).map_err(unread)?.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    let entries = std::fs::read_dir(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let mut below: Vec<PathBuf> =
        entries.map_err(unread)?.iter().map(|entry| entry.path()).collect();
    below.sort();
    for path in below {
        if path.is_dir() || path.extension().is_some_and(|extension| extension == "ptx") {
            collect(&path, files)?;
        }
    }
    Ok(())
}
