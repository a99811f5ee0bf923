//! The faults injected into a soak, and the checks that each is survived: every answer is right or
//! a clear error, and everything works as before once the fault is repaired.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cuda::Buffer;
use serde::Serialize;

use super::case::Case;
use super::device::{DeviceSession, is_out_of_memory};
use super::session::{Session, Texts};
use super::shortage::Shortage;
use super::{Checked, check};
use crate::Error;
use crate::statistics::Random;

/// Something that goes wrong around the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// Files of the cache are cut short and changed.
    Corrupted,
    /// The cache's directory is deleted.
    Deleted,
    /// Nothing can be written to the cache's directory.
    ReadOnly,
    /// There is no space for the files of the cache.
    Full,
    /// A process that writes to the same cache is killed.
    KilledSibling,
    /// A kernel writes where no memory is, which ends a process's use of the device.
    LostContext,
    /// Somebody else takes the memory of the device.
    OutOfMemory,
}

impl Fault {
    /// All of them.
    pub const ALL: [Fault; 7] = [
        Fault::Corrupted,
        Fault::Deleted,
        Fault::ReadOnly,
        Fault::Full,
        Fault::KilledSibling,
        Fault::LostContext,
        Fault::OutOfMemory,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Fault::Corrupted => "corrupted",
            Fault::Deleted => "deleted",
            Fault::ReadOnly => "read-only",
            Fault::Full => "full",
            Fault::KilledSibling => "killed-sibling",
            Fault::LostContext => "lost-context",
            Fault::OutOfMemory => "out-of-memory",
        }
    }

    /// What happens.
    pub fn about(self) -> &'static str {
        match self {
            Fault::Corrupted => "files of the cache cut short and changed",
            Fault::Deleted => "the cache's directory deleted",
            Fault::ReadOnly => "a cache that cannot be written to",
            Fault::Full => "no space for the files of the cache",
            Fault::KilledSibling => "a process that writes to the same cache killed",
            Fault::LostContext => "a device context lost in a process beside this one",
            Fault::OutOfMemory => "all device memory taken",
        }
    }

    /// Whether it is one of a GPU.
    pub(crate) fn needs_gpu(self) -> bool {
        matches!(self, Fault::LostContext | Fault::OutOfMemory)
    }

    /// Whether it happens in a process of its own.
    pub(crate) fn needs_sibling(self) -> bool {
        matches!(self, Fault::Full | Fault::KilledSibling | Fault::LostContext)
    }
}

/// How often a fault was injected, and how often it was survived.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FaultReport {
    /// The fault.
    pub fault: Fault,
    /// How often.
    pub times: u64,
    /// How often it was survived.
    pub survived: u64,
    /// What was last seen of it, or what was first wrong.
    pub told: String,
}

/// The cache and the program that faults are injected into.
pub(super) struct FaultInjector<'a> {
    /// The cache's directory.
    pub(super) cache: PathBuf,
    pub(super) gpu: bool,
    pub(super) seed: u64,
    pub(super) texts: &'a Texts,
    /// The program that soaks, for processes beside this one.
    pub(super) program: Option<&'a Path>,
    pub(super) shortage: &'a Shortage,
}

/// Problems with which a session is tried.
const TRIED: usize = 3;
/// From among the first ones, whose kernels are compiled already.
const FIRST: usize = 256;
/// How long a process beside this one may take.
const PATIENCE: Duration = Duration::from_secs(180);

impl FaultInjector<'_> {
    /// Injects a fault, observes its effect, and repairs it; returns what was seen, or what is
    /// wrong.
    pub(super) fn inject(&self, fault: Fault, random: &mut Random) -> Result<String, String> {
        match fault {
            Fault::Corrupted => self.corrupted(random),
            Fault::Deleted => self.deleted(random),
            Fault::ReadOnly => self.read_only(random),
            Fault::Full => self.full(random),
            Fault::KilledSibling => self.killed_sibling(random),
            Fault::LostContext => self.lost_context(random),
            Fault::OutOfMemory => self.out_of_memory(random),
        }
    }

    fn corrupted(&self, random: &mut Random) -> Result<String, String> {
        let numbers = numbers(random);
        // So that there is something to be corrupted.
        self.try_anew(&numbers)?;
        let files = self.files();
        for (index, path) in files.iter().enumerate() {
            let Ok(mut bytes) = fs::read(path) else { continue };
            match index % 3 {
                0 => bytes.truncate(random.below(bytes.len() + 1)),
                1 if !bytes.is_empty() => {
                    let place = random.below(bytes.len());
                    bytes[place] ^= 1 << random.below(8);
                }
                _ => bytes.push(0),
            }
            // A file that went meanwhile need not be corrupted.
            let _ = fs::write(path, bytes);
        }
        let warnings = self.try_anew(&numbers)?;
        self.check_repaired(&numbers)?;
        Ok(format!("{} files, {} warnings", files.len(), warnings.len()))
    }

    fn deleted(&self, random: &mut Random) -> Result<String, String> {
        let numbers = numbers(random);
        let files = self.files().len();
        self.clear()?;
        self.try_anew(&numbers)?;
        self.check_repaired(&numbers)?;
        Ok(format!("{files} files gone, {} there again", self.files().len()))
    }

    fn read_only(&self, random: &mut Random) -> Result<String, String> {
        let numbers = numbers(random);
        self.clear()?;
        let closed =
            Closed::close(&self.cache).map_err(|error| format!("cannot close: {error}"))?;
        let tried = self.try_anew(&numbers);
        drop(closed);
        let warnings = tried?;
        self.check_repaired(&numbers)?;
        Ok(format!("{} warnings", warnings.len()))
    }

    /// Runs a process that may write only the first kilobytes of a file, so that writing any cubin
    /// fails.
    fn full(&self, random: &mut Random) -> Result<String, String> {
        let numbers = numbers(random);
        self.clear()?;
        let mut command = Command::new("sh");
        command.args(["-c", "trap '' XFSZ; ulimit -f 4; exec \"$@\"", "sh"]);
        command.arg(self.program.ok_or("there is no program to start")?);
        self.arguments(&mut command, &["--problems", "8"]);
        let (code, output, complaint) = finish(command)?;
        if code != Some(0) {
            return Err(format!("a process without space ended with {code:?}: {complaint}"));
        }
        let summary: serde_json::Value = serde_json::from_str(&output)
            .map_err(|error| format!("a process without space gave no summary: {error}"))?;
        self.check_repaired(&numbers)?;
        Ok(format!("{} warnings in a process without space", summary["cache_warnings"]))
    }

    fn killed_sibling(&self, random: &mut Random) -> Result<String, String> {
        let numbers = numbers(random);
        self.clear()?;
        let mut command = Command::new(self.program.ok_or("there is no program to start")?);
        self.arguments(&mut command, &["--for", "60s"]);
        let mut sibling = Sibling::start(command)?;
        let begun = Instant::now();
        // In the midst of writing, as far as that can be seen.
        while self.files().is_empty() && begun.elapsed() < PATIENCE {
            if sibling.ended() {
                return Err("the process beside this one ended before it was killed".to_owned());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(random.below(30_000) as u64));
        drop(sibling);
        let warnings = self.try_anew(&numbers)?;
        if let Some(warning) = warnings.iter().find(|it| it.contains("damaged")) {
            return Err(format!("a killed process left a file behind: {warning}"));
        }
        self.check_repaired(&numbers)?;
        Ok(format!("killed after {} ms", begun.elapsed().as_millis()))
    }

    fn lost_context(&self, random: &mut Random) -> Result<String, String> {
        let numbers = numbers(random);
        let mut command = Command::new(self.program.ok_or("there is no program to start")?);
        self.arguments(&mut command, &["--problems", "3", "--lose-context"]);
        let (code, _, complaint) = finish(command)?;
        let clear = complaint.lines().count() == 1 && complaint.contains("CUDA_ERROR");
        if code != Some(1) || !clear {
            return Err(format!("a process without its context ended with {code:?}: {complaint}"));
        }
        // Ours goes on.
        self.check_repaired(&numbers)?;
        Ok(complaint.trim().to_owned())
    }

    fn out_of_memory(&self, random: &mut Random) -> Result<String, String> {
        let numbers = numbers(random);
        let own =
            DeviceSession::open(cuda::Cache::disabled()).map_err(|error| error.to_string())?;
        let period = self.shortage.begin();
        let taken = take_memory(&own);
        let bytes: u64 = taken.iter().map(Buffer::bytes).sum();
        let tried = self.try_answers(&numbers);
        drop(taken);
        drop(period);
        let told = match tried {
            Ok(_) => "every answer right".to_owned(),
            Err(Refused::Error(error)) if is_out_of_memory(&error) => error.to_string(),
            Err(refused) => return Err(refused.to_string()),
        };
        self.check_repaired(&numbers)?;
        Ok(format!("{} GB taken: {told}", bytes >> 30))
    }

    /// Options of a process that soaks in the same cache, without faults of its own.
    fn arguments(&self, command: &mut Command, options: &[&str]) {
        command.arg("soak").arg("--cache").arg(&self.cache);
        command.args(["--seed", &self.seed.to_string(), "--faults", "none", "--json"]);
        command.args(["--backend", if self.gpu { "gpu" } else { "cpu" }]).args(options);
    }

    /// Answers problems in a new session; returns the cache's warnings, or what is wrong.
    fn try_anew(&self, numbers: &[u64]) -> Result<Vec<String>, String> {
        self.try_answers(numbers).map_err(|refused| refused.to_string())
    }

    fn try_answers(&self, numbers: &[u64]) -> Result<Vec<String>, Refused> {
        let session = Session::open(&self.cache, self.gpu, self.texts).map_err(Refused::Error)?;
        let mut warnings = Vec::new();
        for number in numbers {
            let case = Case::of(self.seed, *number);
            match check(&session, &case).map_err(Refused::Error)? {
                Checked { wrong: Some(reason), kernel, .. } => {
                    let problem = case.problem.text();
                    return Err(Refused::Wrong(format!("{problem} by {kernel}: {reason}")));
                }
                checked => warnings.extend(checked.warnings),
            }
        }
        Ok(warnings)
    }

    /// Checks that nothing is left of a fault: the first use repairs the damage, and the next one
    /// finds nothing to warn about.
    fn check_repaired(&self, numbers: &[u64]) -> Result<(), String> {
        self.try_anew(numbers)?;
        let warnings = self.try_anew(numbers)?;
        // A compiler's remark is no complaint of the cache.
        match warnings.iter().find(|it| it.contains("cubin")) {
            Some(warning) => Err(format!("after it was repaired: {warning}")),
            None => Ok(()),
        }
    }

    /// The finished files of the cache.
    fn files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.cache).into_iter().flatten().flatten();
        let paths = entries.map(|entry| entry.path());
        paths.filter(|path| path.extension().is_some_and(|it| it == "cubin")).collect()
    }

    /// Removes the cache's directory, also while others write to it.
    fn clear(&self) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            match fs::remove_dir_all(&self.cache) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
                Err(error) if begun.elapsed() > Duration::from_secs(5) => {
                    return Err(format!("cannot delete {}: {error}", self.cache.display()));
                }
                // Somebody wrote a file in between.
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}

/// Why problems were not answered as they must be.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("{0}")]
    Error(Error),
    #[error("{0}")]
    Wrong(String),
}

fn numbers(random: &mut Random) -> Vec<u64> {
    (0..TRIED).map(|_| random.below(FIRST) as u64).collect()
}

/// Allocates all of the device's memory, in pieces.
fn take_memory(device: &DeviceSession) -> Vec<Buffer> {
    let device = device.gpu().device();
    let mut taken = Vec::new();
    let mut bytes = device.free_memory().unwrap_or(0);
    while bytes >= 1 << 20 {
        match Buffer::new(device, bytes) {
            Ok(buffer) => taken.push(buffer),
            Err(_) => bytes /= 2,
        }
    }
    taken
}

/// A directory that cannot be written to, as long as this lives.
struct Closed<'a> {
    directory: &'a Path,
    /// Where it is meanwhile, if a link to elsewhere stands in its place.
    aside: Option<PathBuf>,
}

impl<'a> Closed<'a> {
    fn close(directory: &'a Path) -> std::io::Result<Self> {
        fs::create_dir_all(directory)?;
        let mut closed = Closed { directory, aside: None };
        closed.permit(0o555)?;
        // A privileged user ignores permissions and is stopped by a file system that takes no
        // files.
        if fs::write(directory.join("trial"), "").is_ok() {
            closed.permit(0o755)?;
            let aside = directory.with_extension("aside");
            let _ = fs::remove_dir_all(&aside);
            fs::rename(directory, &aside)?;
            closed.aside = Some(aside);
            #[cfg(unix)]
            std::os::unix::fs::symlink("/proc", directory)?;
        }
        Ok(closed)
    }

    #[cfg(unix)]
    fn permit(&self, mode: u32) -> std::io::Result<()> {
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
        fs::set_permissions(self.directory, permissions)
    }

    #[cfg(not(unix))]
    fn permit(&self, mode: u32) -> std::io::Result<()> {
        let mut permissions = fs::metadata(self.directory)?.permissions();
        permissions.set_readonly(mode & 0o200 == 0);
        fs::set_permissions(self.directory, permissions)
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        // What cannot be opened again shows in the next answers.
        let _ = match &self.aside {
            Some(aside) => {
                fs::remove_file(self.directory).and_then(|()| fs::rename(aside, self.directory))
            }
            None => self.permit(0o755),
        };
    }
}

/// A process beside this one, killed when this is dropped.
struct Sibling(Child);

impl Sibling {
    fn start(mut command: Command) -> Result<Self, String> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn();
        child.map(Sibling).map_err(|error| format!("cannot start {command:?}: {error}"))
    }

    fn ended(&mut self) -> bool {
        self.0.try_wait().is_ok_and(|status| status.is_some())
    }
}

impl Drop for Sibling {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Exit code, output and complaint of a process that ends by itself.
fn finish(command: Command) -> Result<(Option<i32>, String, String), String> {
    let what = format!("{command:?}");
    let mut sibling = Sibling::start(command)?;
    // What it prints fits into a pipe: it need not be read while it runs.
    let begun = Instant::now();
    while !sibling.ended() {
        if begun.elapsed() > PATIENCE {
            return Err(format!("{what} does not end"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let code = sibling.0.wait().ok().and_then(|status| status.code());
    let read = |stream: Option<&mut dyn Read>| {
        let mut text = String::new();
        stream.map(|stream| stream.read_to_string(&mut text));
        text
    };
    let output = read(sibling.0.stdout.as_mut().map(|it| it as &mut dyn Read));
    let complaint = read(sibling.0.stderr.as_mut().map(|it| it as &mut dyn Read));
    Ok((code, output, complaint))
}
