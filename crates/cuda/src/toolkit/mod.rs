//! NVIDIA's command line tools, where they are installed: `ptxas` to assemble a kernel without a
//! GPU and read what it costs, `nvdisasm` to see the machine code.
//!
//! Nothing at run time needs them (the driver has its own compiler); tests, `inspect` and `doctor`
//! do. [`Toolkit::find`] looks, in this order, in
//!
//! 1. `$FLASHCORE_TOOLS`,
//! 2. `.tools/` in the current folder or the nearest one above it (`cargo xtask tools` fills it),
//! 3. `$CUDA_HOME/bin`, `$CUDA_PATH/bin`, `/usr/local/cuda/bin`,
//! 4. every folder of `$PATH`.
//!
//! This module uses the standard library alone: `xtask` compiles it too, so that its tasks run
//! while the crates they check do not build.
//!
//! ```no_run
//! use flashcore_cuda::toolkit::{Options, Toolkit};
//!
//! let toolkit = Toolkit::find();
//! let ptx = std::fs::read_to_string("kernel.ptx")?;
//! let assembled = toolkit.ptxas()?.assemble(&ptx, &Options::default())?;
//! println!("{} registers", assembled.registers);
//! for fault in assembled.faults() {
//!     println!("slow: {fault}");
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod assembled;

use std::ffi::OsStr;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use std::{env, fmt, fs, io, thread};

pub use self::assembled::Assembled;

/// The tools found on this machine; there may be none.
#[derive(Debug, Clone, Default)]
pub struct Toolkit {
    /// The assemblers, in the order of the places searched, newest first within a place.
    pub assemblers: Vec<Ptxas>,
    /// The assemblers that were found but do not tell their version.
    pub unusable: Vec<Unusable>,
    /// The disassembler that [`Toolkit::disassemble`] runs.
    pub nvdisasm: Option<PathBuf>,
    /// The lister of fat binaries and cubins. It cannot disassemble without `nvdisasm`.
    pub cuobjdump: Option<PathBuf>,
    /// The folders that were searched.
    pub searched: Vec<PathBuf>,
}

/// A tool that cannot be used.
#[derive(Debug, Clone)]
pub struct Unusable {
    /// The executable.
    pub path: PathBuf,
    /// What came of running it, in a line.
    pub reason: String,
}

impl Toolkit {
    /// Searches for the tools in the places that the module documentation lists.
    pub fn find() -> Toolkit {
        Toolkit::find_in(places())
    }

    /// Searches one folder only: the folder itself, its `bin`, and the `bin` of each folder in it.
    pub fn at(folder: impl AsRef<Path>) -> Toolkit {
        Toolkit::find_in(vec![folders_of(folder.as_ref())])
    }

    /// Returns the preferred assembler: the newest of the first place that has one.
    pub fn ptxas(&self) -> Result<&Ptxas, Error> {
        self.assemblers.first().ok_or_else(|| self.missing("ptxas"))
    }

    /// Returns the first assembler of one major release of CUDA, such as 12 or 13.
    pub fn ptxas_of(&self, major: u32) -> Result<&Ptxas, Error> {
        let found = self.assemblers.iter().find(|ptxas| ptxas.version.major == major);
        found.ok_or_else(|| self.missing(&format!("ptxas {major}.x")))
    }

    /// Disassembles a cubin to text (SASS), with labels resolved and without encodings.
    pub fn disassemble(&self, cubin: &[u8]) -> Result<String, Error> {
        let nvdisasm = self.disassembler()?;
        let scratch = Scratch::new()?;
        scratch.write("kernel.cubin", cubin)?;
        let arguments = ["--print-code", "kernel.cubin"];
        let output = run(nvdisasm, &arguments, Some(&scratch.0), WORK_LIMIT)?;
        if !output.status.success() {
            return Err(failed(nvdisasm, &output));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Returns the tools for a test, or `None` if no assembler is installed, so that the test skips
    /// itself.
    ///
    /// # Panics
    /// When `FLASHCORE_REQUIRE_TOOLS` is set, as `cargo xtask test` does, and a 12.x or 13.x
    /// `ptxas` or `nvdisasm` is missing: there a skipped test would count as passed.
    pub fn for_tests() -> Option<Toolkit> {
        let toolkit = Toolkit::find();
        let wanted =
            [toolkit.ptxas_of(12).err(), toolkit.ptxas_of(13).err(), toolkit.disassembler().err()];
        match wanted.into_iter().flatten().next() {
            Some(missing) if env::var_os(REQUIRE_TOOLS).is_some() => panic!("{missing}"),
            _ if toolkit.assemblers.is_empty() => {
                eprintln!("skipped: no ptxas (`cargo xtask tools` fetches it)");
                None
            }
            _ => Some(toolkit),
        }
    }

    fn disassembler(&self) -> Result<&Path, Error> {
        self.nvdisasm.as_deref().ok_or_else(|| self.missing("nvdisasm"))
    }

    /// Searches the given places, each a group of folders among which the newest assembler comes
    /// first.
    fn find_in(places: Vec<Vec<PathBuf>>) -> Toolkit {
        let mut toolkit = Toolkit::default();
        // One file found under two names (through `$PATH` and `/usr/local/cuda`, say) counts once.
        let mut seen = Vec::new();
        for place in places {
            let mut here = Vec::new();
            for folder in &place {
                if let Some(path) = tool_in(folder, "ptxas") {
                    let real = fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
                    if !seen.contains(&real) {
                        seen.push(real);
                        match Ptxas::at(&path) {
                            Ok(ptxas) => here.push(ptxas),
                            Err(error) => {
                                let reason =
                                    error.to_string().lines().collect::<Vec<_>>().join(" ");
                                toolkit.unusable.push(Unusable { path, reason });
                            }
                        }
                    }
                }
                let first = |found: &mut Option<PathBuf>, name| {
                    if found.is_none() {
                        *found = tool_in(folder, name);
                    }
                };
                first(&mut toolkit.nvdisasm, "nvdisasm");
                first(&mut toolkit.cuobjdump, "cuobjdump");
            }
            here.sort_by_key(|ptxas| std::cmp::Reverse(ptxas.version));
            toolkit.assemblers.append(&mut here);
            toolkit.searched.extend(place);
        }
        toolkit
    }

    fn missing(&self, tool: &str) -> Error {
        let unusable = if tool.starts_with("ptxas") { self.unusable.clone() } else { Vec::new() };
        Error::Missing { tool: tool.to_owned(), searched: self.searched.clone(), unusable }
    }
}

/// The environment variable that names the folder to search first.
const TOOLS: &str = "FLASHCORE_TOOLS";
/// The environment variable that makes a missing tool a failure of the tests that need it.
const REQUIRE_TOOLS: &str = "FLASHCORE_REQUIRE_TOOLS";

/// How long a tool may take to tell its version: it takes milliseconds, or a second from a cold disk.
const VERSION_LIMIT: Duration = Duration::from_secs(10);
/// How long a tool may work on one kernel: ours take seconds.
const WORK_LIMIT: Duration = Duration::from_secs(600);

/// Returns the folders to search, grouped by place, in order.
fn places() -> Vec<Vec<PathBuf>> {
    let mut places = Vec::new();
    places.extend(variable(TOOLS).map(|root| folders_of(Path::new(&root))));
    if let Ok(current) = env::current_dir() {
        let project = current.ancestors().map(|folder| folder.join(".tools"));
        places.extend(
            project.into_iter().find(|tools| tools.is_dir()).map(|tools| folders_of(&tools)),
        );
    }
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        places.extend(variable(name).map(|root| vec![Path::new(&root).join("bin")]));
    }
    places.push(vec![PathBuf::from("/usr/local/cuda/bin")]);
    if let Some(path) = env::var_os("PATH") {
        places.extend(env::split_paths(&path).map(|folder| vec![folder]));
    }
    places
}

/// Returns the value of an environment variable; `None` if it is empty, since it then names no
/// folder.
fn variable(name: &str) -> Option<std::ffi::OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// Returns the folders under a folder of tools that may have the binaries: the folder itself, its
/// `bin`, and the `bin` of each folder in it, which `cargo xtask tools` makes one per release.
fn folders_of(root: &Path) -> Vec<PathBuf> {
    let mut releases: Vec<PathBuf> = fs::read_dir(root)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().join("bin"))
        .filter(|bin| bin.is_dir())
        .collect();
    releases.sort();
    let mut folders = vec![root.to_owned(), root.join("bin")];
    folders.append(&mut releases);
    folders
}

fn tool_in(folder: &Path, name: &str) -> Option<PathBuf> {
    let path = folder.join(format!("{name}{}", env::consts::EXE_SUFFIX));
    path.is_file().then_some(path)
}

/// A release of a tool, such as 13.0.88.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// The major version of the CUDA release.
    pub major: u32,
    /// The minor version of the CUDA release.
    pub minor: u32,
    /// The build number of the tool.
    pub patch: u32,
}

impl Version {
    /// Parses the `V13.0.88` that every tool prints for `--version`.
    fn from_banner(banner: &str) -> Option<Version> {
        banner.split_whitespace().find_map(|word| {
            let mut numbers = word.strip_prefix('V')?.split('.').map(|number| number.parse().ok());
            Some(Version {
                major: numbers.next()??,
                minor: numbers.next()??,
                patch: numbers.next()??,
            })
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// An assembler (`ptxas`), which compiles PTX to machine code.
#[derive(Debug, Clone)]
pub struct Ptxas {
    /// The executable.
    pub path: PathBuf,
    /// The release that it reports.
    pub version: Version,
}

/// Options of the assembler.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Options {
    /// The optimisation level, 0 to 3.
    pub level: u8,
    /// The architecture, such as `sm_90a`; if absent, the one that the PTX's `.target` names.
    pub arch: Option<String>,
    /// Whether to return the cubin.
    pub keep_cubin: bool,
}

impl Default for Options {
    /// Returns full optimisation for the PTX's own target, without the cubin.
    fn default() -> Options {
        Options { level: 3, arch: None, keep_cubin: false }
    }
}

impl Ptxas {
    /// Returns the assembler at a path. It is run to get its version, so that one that cannot run
    /// is an error.
    pub fn at(path: impl Into<PathBuf>) -> Result<Ptxas, Error> {
        let path = path.into();
        let output = run(&path, &["--version"], None, VERSION_LIMIT)?;
        match Version::from_banner(&String::from_utf8_lossy(&output.stdout)) {
            Some(version) => Ok(Ptxas { path, version }),
            None => Err(failed(&path, &output)),
        }
    }

    /// Assembles a module and parses what its kernels cost.
    pub fn assemble(&self, ptx: &str, options: &Options) -> Result<Assembled, Error> {
        let arch = match &options.arch {
            Some(arch) => arch,
            None => target(ptx).ok_or(Error::NoTarget)?,
        };
        let scratch = Scratch::new()?;
        scratch.write("kernel.ptx", ptx.as_bytes())?;
        let level = options.level.to_string();
        let arguments = [
            "--verbose",
            "--opt-level",
            &level,
            "--gpu-name",
            arch,
            "--output-file",
            "kernel.cubin",
            "kernel.ptx",
        ];
        let begin = Instant::now();
        let output = run(&self.path, &arguments, Some(&scratch.0), WORK_LIMIT)?;
        let seconds = begin.elapsed().as_secs_f64();
        if !output.status.success() {
            return Err(failed(&self.path, &output));
        }
        let cubin = if options.keep_cubin { Some(scratch.read("kernel.cubin")?) } else { None };
        Ok(Assembled { cubin, seconds, ..Assembled::from_log(log_of(&output)) })
    }
}

/// Returns the architecture that a module's `.target` line names.
fn target(ptx: &str) -> Option<&str> {
    let arguments = ptx.lines().find_map(|line| line.trim_start().strip_prefix(".target"))?;
    let arch = arguments.split([',', '/', ';']).next()?.trim();
    (!arch.is_empty()).then_some(arch)
}

/// An error of a tool.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The tool is in none of the places searched.
    Missing {
        /// The tool.
        tool: String,
        /// The folders that were searched.
        searched: Vec<PathBuf>,
        /// What was found there but cannot be used.
        unusable: Vec<Unusable>,
    },
    /// The tool exists but the operating system could not start it.
    NotStarted {
        /// The tool.
        tool: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The tool had not ended after as long as it may take, and was stopped.
    TimedOut {
        /// The tool.
        tool: PathBuf,
        /// How long it may take.
        limit: Duration,
    },
    /// The tool ran and reported failure.
    Failed {
        /// The tool.
        tool: PathBuf,
        /// Everything that it printed.
        log: String,
    },
    /// The PTX has no `.target` line and no architecture was given.
    NoTarget,
    /// A temporary file could not be written or read.
    Scratch {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Missing { tool, searched, unusable } => {
                let folders = searched.len();
                write!(
                    f,
                    "{tool} not found in the {folders} folders searched; `cargo xtask tools` fetches it, or set ${TOOLS}"
                )?;
                unusable.iter().try_for_each(|it| write!(f, "; {}", it.reason))
            }
            Error::TimedOut { tool, limit } => {
                write!(f, "{} has not ended within {} s", tool.display(), limit.as_secs_f64())
            }
            Error::NotStarted { tool, source } => {
                write!(f, "cannot start {}: {source}", tool.display())
            }
            Error::Failed { tool, log } => {
                write!(f, "{} failed:\n{}", tool.display(), log.trim_end())
            }
            Error::NoTarget => {
                write!(f, "the PTX has no .target line, and no architecture was given")
            }
            Error::Scratch { path, source } => {
                write!(f, "temporary file {}: {source}", path.display())
            }
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::NotStarted { source, .. } | Error::Scratch { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// Runs a tool in a folder, so that its messages name files without the path of the temporary
/// folder. It is stopped after `limit`.
fn run(
    tool: &Path,
    arguments: &[impl AsRef<OsStr>],
    folder: Option<&Path>,
    limit: Duration,
) -> Result<Output, Error> {
    // A relative path would be resolved from the folder that the tool runs in.
    let absolute = std::path::absolute(tool).unwrap_or_else(|_| tool.to_owned());
    let mut command = Command::new(absolute);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    if let Some(folder) = folder {
        command.current_dir(folder);
    }
    let not_started = |source| Error::NotStarted { tool: tool.to_owned(), source };
    let deadline = Instant::now() + limit;
    let mut child = command.spawn().map_err(not_started)?;
    let stdout = child.stdout.take().map(read_all);
    let stderr = child.stderr.take().map(read_all);
    // A tool closes both streams when it ends.
    let text = |stream: Option<Receiver<Vec<u8>>>| {
        stream?.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
    };
    let (Some(stdout), Some(stderr)) = (text(stdout), text(stderr)) else {
        // It may have ended just now.
        let _ = child.kill();
        let _ = child.wait();
        return Err(Error::TimedOut { tool: tool.to_owned(), limit });
    };
    Ok(Output { status: child.wait().map_err(not_started)?, stdout, stderr })
}

/// Reads a stream to its end, on a thread that nobody has to wait for.
fn read_all(mut stream: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // What came before an error is all there is to tell.
        let _ = stream.read_to_end(&mut bytes);
        let _ = sender.send(bytes);
    });
    receiver
}

fn failed(tool: &Path, output: &Output) -> Error {
    let mut log = log_of(output);
    if log.trim().is_empty() {
        log = output.status.to_string();
    }
    Error::Failed { tool: tool.to_owned(), log }
}

fn log_of(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

/// A temporary folder, removed when dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Scratch, Error> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = env::temp_dir().join(format!("flashcore-{}-{number}", std::process::id()));
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Scratch(path)),
                // A folder that a dead process with the same id left behind.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(source) => return Err(Error::Scratch { path, source }),
            }
        }
    }

    fn write(&self, name: &str, contents: &[u8]) -> Result<(), Error> {
        let path = self.0.join(name);
        fs::write(&path, contents).map_err(|source| Error::Scratch { path, source })
    }

    fn read(&self, name: &str) -> Result<Vec<u8>, Error> {
        let path = self.0.join(name);
        fs::read(&path).map_err(|source| Error::Scratch { path, source })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A folder left behind in the system's temporary folder is no reason to fail.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a module with one 64x64x16 product; `while_in_flight` goes between its commit and
    /// its wait.
    fn product(while_in_flight: &str) -> String {
        let each = |line: &dyn Fn(usize) -> String| (0..32).map(line).collect::<String>();
        let zeroes = each(&|i| format!("\tmov.f32 %f{i}, 0f00000000;\n"));
        let stores = each(&|i| format!("\tst.global.f32 [%rd2+{}], %f{i};\n", 4 * i));
        let accumulator = (0..32).map(|i| format!("%f{i}")).collect::<Vec<_>>().join(", ");
        format!(
            "\
.version 8.0
.target sm_90a
.address_size 64

.visible .entry product(.param .u64 out)
.maxntid 128, 1, 1
{{
	.reg .f32 %f<32>;
	.reg .b64 %rd<3>;
	.reg .pred %p<1>;
	.shared .align 1024 .b8 tiles[4096];
	mov.u64 %rd1, 0x4000000010000;
	ld.param.u64 %rd2, [out];
	setp.ne.b64 %p0, %rd2, 0;
{zeroes}\
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {{{accumulator}}}, %rd1, %rd1, %p0, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
{while_in_flight}\
	wgmma.wait_group.sync.aligned 0;
{stores}\
	ret;
}}
"
        )
    }

    /// Returns a module with 64 values live at once in 24 registers.
    fn crowded() -> String {
        let each = |line: &dyn Fn(usize) -> String| (0..64).map(line).collect::<String>();
        let loads = each(&|i| format!("\tld.volatile.global.f32 %f{i}, [%rd1+{}];\n", 4 * i));
        let stores =
            each(&|i| format!("\tst.volatile.global.f32 [%rd1+{}], %f{};\n", 4 * i, 63 - i));
        format!(
            "\
.version 8.0
.target sm_90
.address_size 64

.visible .entry crowded(.param .u64 values)
.maxnreg 24
{{
	.reg .f32 %f<64>;
	.reg .b64 %rd<2>;
	ld.param.u64 %rd1, [values];
{loads}\
	bar.sync 0;
{stores}\
	ret;
}}
"
        )
    }

    /// A module with `setmaxnreg` but without a limit on the registers at entry.
    const UNCAPPED: &str = "\
.version 8.0
.target sm_90a
.address_size 64

.visible .entry uncapped()
{
	setmaxnreg.inc.sync.aligned.u32 240;
	ret;
}
";

    fn assemblers() -> Vec<Ptxas> {
        Toolkit::for_tests().map(|toolkit| toolkit.assemblers).unwrap_or_default()
    }

    #[test]
    fn a_clean_kernel_has_no_faults() {
        for ptxas in assemblers() {
            let options = Options { keep_cubin: true, ..Options::default() };
            let assembled = ptxas.assemble(&product(""), &options).unwrap();
            assert_eq!(assembled.faults(), Vec::<String>::new(), "{}", ptxas.version);
            assert_eq!(assembled.shared_bytes, 4096);
            assert!((32..=255).contains(&assembled.registers), "{}", assembled.log);
            assert!(assembled.cubin.is_some_and(|cubin| cubin.starts_with(b"\x7fELF")));
            assert!(assembled.seconds > 0.0);
        }
    }

    #[test]
    fn spills_are_counted() {
        for ptxas in assemblers() {
            let assembled = ptxas.assemble(&crowded(), &Options::default()).unwrap();
            assert_eq!(assembled.registers, 24);
            assert!(
                assembled.spill_store_bytes >= 128 && assembled.spill_load_bytes >= 128,
                "{}",
                assembled.log
            );
            assert!(assembled.stack_frame_bytes >= 128, "{}", assembled.log);
            assert_eq!(assembled.cubin, None);
            let faults = assembled.faults();
            assert_eq!(faults.len(), 2, "{faults:?}");
            assert!(
                faults[0].starts_with("registers spill: ")
                    && faults[1].starts_with("a stack frame of ")
            );
        }
    }

    #[test]
    fn an_accumulator_touched_in_flight_is_a_fault() {
        let touched = product("\tadd.f32 %f0, %f0, 0f3F800000;\n\tst.global.f32 [%rd2], %f0;\n");
        for ptxas in assemblers() {
            let faults = ptxas.assemble(&touched, &Options::default()).unwrap().faults();
            assert_eq!(faults.len(), 1, "{}: {faults:?}", ptxas.version);
            // 12.x serialises the instructions, 13.x injects a wait.
            assert!(
                ["(C7514)", "(C7517)"].iter().any(|code| faults[0].starts_with(code)),
                "{faults:?}"
            );
        }
    }

    #[test]
    fn an_ignored_setmaxnreg_is_a_fault() {
        for ptxas in assemblers() {
            let faults = ptxas.assemble(UNCAPPED, &Options::default()).unwrap().faults();
            assert!(
                faults.len() == 1 && faults[0].starts_with("(C7508)"),
                "{}: {faults:?}",
                ptxas.version
            );
        }
    }

    #[test]
    fn refused_ptx_comes_back_with_the_log() {
        // A second accumulator list, as if the sum had its own operand: PTX has no such form.
        let wrong = product("").replace(", %rd1, %rd1, %p0, 1, 1, 0, 0;", ", %rd1, %rd1, {%f0};");
        for ptxas in assemblers() {
            let error = ptxas.assemble(&wrong, &Options::default()).unwrap_err();
            let Error::Failed { log, .. } = &error else { panic!("{error}") };
            assert!(log.contains("wgmma.mma_async") && log.contains("kernel.ptx, line "), "{log}");
        }
    }

    #[test]
    fn the_options_reach_the_assembler() {
        for ptxas in assemblers() {
            let cubin = |level| {
                let options = Options { level, arch: Some("sm_90a".into()), keep_cubin: true };
                ptxas.assemble(&product(""), &options).unwrap().cubin.unwrap()
            };
            assert_ne!(cubin(0), cubin(3));
            let options = Options { arch: Some("sm_80".into()), ..Options::default() };
            assert!(matches!(ptxas.assemble(&product(""), &options), Err(Error::Failed { .. })));
        }
    }

    #[test]
    fn machine_code_shows_the_tensor_core_instruction() {
        let Some(toolkit) = Toolkit::for_tests() else {
            return;
        };
        if toolkit.nvdisasm.is_none() {
            return;
        }
        for ptxas in &toolkit.assemblers {
            let options = Options { keep_cubin: true, ..Options::default() };
            let cubin = ptxas.assemble(&product(""), &options).unwrap().cubin.unwrap();
            let sass = toolkit.disassemble(&cubin).unwrap();
            assert!(sass.contains("HGMMA.64x64x16.F32"), "{sass}");
            assert!(matches!(toolkit.disassemble(b"not a cubin"), Err(Error::Failed { .. })));
        }
    }

    #[test]
    fn versions_and_targets_are_read() {
        let banner =
            "Built on Wed_Aug_20\nCuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0";
        let version = Version::from_banner(banner).unwrap();
        assert_eq!(version.to_string(), "13.0.88");
        assert!(version > Version { major: 12, minor: 9, patch: 100 });
        assert_eq!(Version::from_banner("Very V13 V1.x.3"), None);

        assert_eq!(target(".version 8.0\n .target sm_90a, debug\n"), Some("sm_90a"));
        assert_eq!(target(".target sm_80 // Ampere\n"), Some("sm_80"));
        assert_eq!(target(".target\n"), None);
        assert_eq!(target(""), None);
    }

    #[test]
    #[cfg(unix)]
    fn a_tool_that_hangs_is_stopped() {
        let (begin, limit) = (Instant::now(), Duration::from_millis(100));
        let error = run(Path::new("/bin/sleep"), &["60"], None, limit).unwrap_err();
        assert!(matches!(error, Error::TimedOut { .. }), "{error}");
        assert_eq!(error.to_string(), "/bin/sleep has not ended within 0.1 s");
        assert!(begin.elapsed() < Duration::from_secs(30));
        let output = run(Path::new("/bin/sleep"), &["0"], None, Duration::from_secs(30)).unwrap();
        assert!(output.status.success());
    }

    #[test]
    fn missing_tools_are_errors() {
        let nowhere = Toolkit::find_in(vec![vec![PathBuf::from("/nowhere/bin")]]);
        assert!(matches!(nowhere.ptxas_of(13), Err(Error::Missing { .. })));
        assert!(matches!(nowhere.disassemble(b""), Err(Error::Missing { .. })));
        let message = nowhere.ptxas().unwrap_err().to_string();
        assert!(message.starts_with("ptxas not found"), "{message}");
        assert!(matches!(Ptxas::at("/nowhere/bin/ptxas"), Err(Error::NotStarted { .. })));
    }
}
