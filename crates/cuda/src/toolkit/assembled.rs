//! The assembler's report on a kernel, parsed from its log.

/// The result of assembling a module. If the module has several kernels, each number is the largest
/// of theirs.
#[derive(Debug, Clone, Default)]
pub struct Assembled {
    /// The machine code, if it was requested.
    pub cubin: Option<Vec<u8>>,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of local memory per thread for arrays and spilled registers.
    pub stack_frame_bytes: u32,
    /// Bytes of spill stores per thread: stored to local memory because registers ran out.
    pub spill_store_bytes: u32,
    /// Bytes of spill loads per thread.
    pub spill_load_bytes: u32,
    /// Bytes of static shared memory per block.
    pub shared_bytes: u32,
    /// Named barriers in use; `ptxas` 12.x does not report them.
    pub barriers: Option<u32>,
    /// Bytes in all constant banks, where the assembler counts them: parameters on sm_80 but not
    /// on sm_90, and the module's own constants.
    pub constant_bytes: u32,
    /// Every note with a code (`(C7514) Potential Performance Loss: ...`) and every warning.
    pub notes: Vec<String>,
    /// Everything that the assembler printed.
    pub log: String,
    /// Wall-clock seconds that assembling took.
    pub seconds: f64,
}

impl Assembled {
    /// Parses a log in the format of `ptxas --verbose`, which the driver's compiler writes too. The
    /// result has no cubin and no time.
    pub fn from_log(log: impl Into<String>) -> Assembled {
        let log = log.into();
        let mut assembled = Assembled::default();
        let (mut module_constants, mut kernel_constants) = (0, 0);
        for line in log.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            if let Some(note) = note(&words) {
                assembled.notes.push(note);
                continue;
            }
            let mut constants = 0;
            // Every count precedes its name: `228 bytes spill stores`, `Used 58 registers`.
            for (at, word) in words.iter().enumerate() {
                let Ok(count) = word.parse::<u32>() else {
                    continue;
                };
                let name: Vec<&str> =
                    words[at + 1..].iter().take(3).map(|word| word.trim_end_matches(',')).collect();
                let most = |field: &mut u32| *field = count.max(*field);
                match name[..] {
                    ["registers", ..] => most(&mut assembled.registers),
                    ["barriers", ..] => {
                        assembled.barriers = Some(count.max(assembled.barriers.unwrap_or(0)))
                    }
                    ["bytes", "stack", "frame"] => most(&mut assembled.stack_frame_bytes),
                    ["bytes", "spill", "stores"] => most(&mut assembled.spill_store_bytes),
                    ["bytes", "spill", "loads"] => most(&mut assembled.spill_load_bytes),
                    ["bytes", "smem", ..] => most(&mut assembled.shared_bytes),
                    ["bytes", bank, ..] if bank.starts_with("cmem[") => constants += count,
                    _ => {}
                }
            }
            let of_module = words.iter().any(|word| word.trim_end_matches(',') == "gmem");
            let total = if of_module { &mut module_constants } else { &mut kernel_constants };
            *total = constants.max(*total);
        }
        assembled.constant_bytes = module_constants + kernel_constants;
        assembled.log = log;
        assembled
    }

    /// Returns what makes the kernel slow and fails tests in this project, one sentence each:
    /// spilled registers, a stack frame, and the assembler's C75xx notes, which say that it
    /// serialised `wgmma`, injected waits or ignored `setmaxnreg`.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if self.spill_store_bytes > 0 || self.spill_load_bytes > 0 {
            let (stores, loads) = (self.spill_store_bytes, self.spill_load_bytes);
            faults.push(format!(
                "registers spill: {stores} bytes stored, {loads} bytes loaded per thread"
            ));
        }
        if self.stack_frame_bytes > 0 {
            faults.push(format!("a stack frame of {} bytes per thread", self.stack_frame_bytes));
        }
        let slow = |note: &&String| {
            note.starts_with("(C75") || note.contains("Potential Performance Loss")
        };
        faults.extend(self.notes.iter().filter(slow).cloned());
        faults
    }
}

/// Returns the text of a log line that has a code or is a warning.
fn note(words: &[&str]) -> Option<String> {
    let is_code = |word: &&str| {
        let digits = word.strip_prefix("(C").and_then(|rest| rest.strip_suffix(')'));
        digits.is_some_and(|digits| {
            !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
        })
    };
    if words.first() != Some(&"ptxas") && words.first() != Some(&"info") {
        return None;
    }
    if let Some(code) = words.iter().position(is_code) {
        return Some(words[code..].join(" "));
    }
    words.contains(&"warning").then(|| words[1..].join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_of_both_releases_are_read() {
        let old = Assembled::from_log(
            "\
ptxas info    : 0 bytes gmem, 64 bytes cmem[3]
ptxas info    : Compiling entry function 'k' for 'sm_80'
ptxas info    : Function properties for k
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 8 registers, 8 bytes cumulative stack size, 128 bytes smem, 360 bytes cmem[0]
",
        );
        assert_eq!((old.registers, old.shared_bytes, old.barriers), (8, 128, None));
        assert_eq!(
            (old.stack_frame_bytes, old.spill_store_bytes, old.spill_load_bytes),
            (8, 4, 12)
        );
        assert_eq!(old.constant_bytes, 424);
        assert!(old.notes.is_empty());

        let new = Assembled::from_log(
            "\
ptxas warning : Too many maxnreg specified for entry k, will be ignored
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a' for 'sm_90'
ptxas info    : Function properties for a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 58 registers, used 4 barriers, 4096 bytes smem
ptxas info    : Compile time = 2.273 ms
ptxas info    : Compiling entry function 'b' for 'sm_90'
ptxas info    : Function properties for b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers
ptxas info    : Compile time = 7.460 ms
",
        );
        assert_eq!((new.registers, new.shared_bytes, new.barriers), (58, 4096, Some(4)));
        assert_eq!(
            new.notes,
            [
                "warning : Too many maxnreg specified for entry k, will be ignored",
                "(C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.",
            ]
        );
        assert_eq!(new.faults(), new.notes[1..]);
    }
}
