//! A cache of cubins on disk, so that a kernel is compiled once per machine.
//!
//! There is one file per cubin, named after a SHA-256 over everything the cubin depends on. A file
//! is written under a temporary name and renamed into place, so that readers in other threads and
//! processes see all of it or none. Two processes that compile the same kernel at once do the work
//! twice, and either result stands. There are no locks that a killed process could leave behind.
//!
//! The cache must never be the reason that a kernel does not run. Whatever goes wrong with it is a
//! [`CacheWarning`], in the result and through `tracing`, and the kernel is compiled as if there
//! were no cache.

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::compiler::OPTIMIZATION_LEVEL;
use crate::{ComputeCapability, Driver, Error, Result};

/// The version of the key's inputs and of the file layout.
const FORMAT: u32 = 2;

/// The first bytes of every file.
const MAGIC: [u8; 8] = *b"FLASHCUB";

/// The bytes of a file's header: magic, format, length of the cubin, checksum.
const HEADER_BYTES: usize = 8 + 4 + 8 + 32;

/// The file extension of finished files.
const FINISHED: &str = "cubin";
/// The file extension of files that are being written.
const UNFINISHED: &str = "partial";

/// The name of a cubin: a hash over everything that its bytes depend on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CacheKey([u8; 32]);

impl CacheKey {
    /// Computes the key of the cubin that a driver compiles from a PTX text for a compute
    /// capability.
    pub fn new(ptx: &str, driver: &Driver, capability: ComputeCapability) -> CacheKey {
        let mut hash = Sha256::new();
        hash.update(FORMAT.to_le_bytes());
        hash.update(driver.version.major.to_le_bytes());
        hash.update(driver.version.minor.to_le_bytes());
        // Each text follows its length, so that different inputs never hash the same bytes.
        let release = driver.release.as_deref().unwrap_or_default();
        hash.update((release.len() as u64).to_le_bytes());
        hash.update(release);
        hash.update(capability.major.to_le_bytes());
        hash.update(capability.minor.to_le_bytes());
        hash.update(OPTIMIZATION_LEVEL.to_le_bytes());
        hash.update((ptx.len() as u64).to_le_bytes());
        hash.update(ptx);
        CacheKey(hash.finalize().into())
    }

    /// Returns the checksum over the key and the cubin, which also detects a file under a wrong
    /// name.
    fn checksum(&self, bytes: &[u8]) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(self.0);
        hash.update(bytes);
        hash.finalize().into()
    }
}

impl fmt::Display for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CacheKey({self})")
    }
}

/// A problem with the cache that did not keep the kernel from running.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CacheWarning {
    /// A file was cut short or changed; it is compiled anew and replaced.
    #[error("the cached cubin {} is damaged ({reason}) and is compiled anew", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with the file.
        reason: String,
    },
    /// A file exists but could not be read.
    #[error("the cached cubin {} cannot be read: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        reason: String,
    },
    /// A cubin could not be stored, and will be compiled again next time.
    #[error("the cubin cannot be kept in {}: {reason}", path.display())]
    Unwritable {
        /// The directory.
        path: PathBuf,
        /// The error of the operating system.
        reason: String,
    },
}

/// The result of a lookup in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheEntry {
    /// The cubin.
    pub bytes: Vec<u8>,
    /// Whether it was on disk already.
    pub cached: bool,
    /// Problems with the cache on the way.
    pub warnings: Vec<CacheWarning>,
}

/// The size of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheSize {
    /// The number of files.
    pub files: u64,
    /// The total bytes of the files.
    pub bytes: u64,
}

/// A directory of cubins, or a disabled cache.
///
/// ```
/// use flashcore_cuda::{Cache, CacheKey, ComputeCapability, Driver, DriverVersion};
///
/// let driver = Driver { version: DriverVersion { major: 12, minor: 4 }, release: None };
/// let capability = ComputeCapability { major: 9, minor: 0 };
/// let key = CacheKey::new(".version 8.0 ...", &driver, capability);
///
/// let entry = Cache::disabled().get_or_compile(&key, || Ok::<_, flashcore_cuda::Error>(vec![1, 2, 3]))?;
/// assert!(!entry.cached && entry.warnings.is_empty());
/// # Ok::<_, flashcore_cuda::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    place: Place,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// The cache is disabled.
    Disabled,
    /// A directory in the user's home, or one that the user named.
    Directory(PathBuf),
    /// A directory in the system's temporary directory, where anyone may write. It is used only if
    /// no other user owns it or may write to it, since a cubin is executable code.
    Temporary(PathBuf),
}

impl Cache {
    /// Returns the cache that the environment selects: `$FLASHCORE_CACHE` (a directory, or `off`
    /// for none), else `$XDG_CACHE_HOME/flashcore`, else `~/.cache/flashcore`, else a directory of
    /// this user in the system's temporary directory.
    pub fn from_environment() -> Cache {
        let place = place(|name| std::env::var_os(name), &std::env::temp_dir());
        Cache { place }
    }

    /// Returns a cache in this directory, which is created when the first cubin is stored.
    pub fn at(directory: impl Into<PathBuf>) -> Cache {
        Cache { place: Place::Directory(directory.into()) }
    }

    /// Returns a disabled cache: every process compiles every kernel.
    pub fn disabled() -> Cache {
        Cache { place: Place::Disabled }
    }

    /// Returns the directory of the cubins, unless the cache is disabled.
    pub fn directory(&self) -> Option<&Path> {
        match &self.place {
            Place::Disabled => None,
            Place::Directory(path) | Place::Temporary(path) => Some(path),
        }
    }

    /// Returns the path of a key's cubin, which need not exist yet.
    pub fn path(&self, key: &CacheKey) -> Option<PathBuf> {
        Some(self.directory()?.join(format!("{key}.{FINISHED}")))
    }

    /// Returns the cubin of this key: from disk, or else compiled and then stored.
    ///
    /// The only errors are those of `compile`.
    pub fn get_or_compile<E>(
        &self,
        key: &CacheKey,
        compile: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<CacheEntry, E> {
        let mut warnings = Vec::new();
        if let Some(bytes) = self.load(key, &mut warnings) {
            return Ok(CacheEntry { bytes, cached: true, warnings });
        }
        let bytes = compile()?;
        self.store(key, &bytes, &mut warnings);
        Ok(CacheEntry { bytes, cached: false, warnings })
    }

    /// Removes one cubin, such as one that the driver would not load.
    pub fn forget(&self, key: &CacheKey) -> Result<()> {
        let Some(path) = self.path(key) else {
            return Ok(());
        };
        match fs::remove_file(&path) {
            Err(error) if !is_absent(&error) => Err(failure(&path, &error)),
            _ => Ok(()),
        }
    }

    /// Removes every cubin and every half-written file, and returns how much that was. Files that
    /// the cache did not write stay.
    pub fn clear(&self) -> Result<CacheSize> {
        let mut removed = CacheSize::default();
        for (path, bytes) in self.files()? {
            match fs::remove_file(&path) {
                Ok(()) => {
                    removed.files += 1;
                    removed.bytes += bytes;
                }
                // Another process cleared it at the same time.
                Err(error) if is_absent(&error) => {}
                Err(error) => return Err(failure(&path, &error)),
            }
        }
        Ok(removed)
    }

    /// Returns the size of the cache.
    pub fn size(&self) -> Result<CacheSize> {
        let files = self.files()?;
        let bytes = files.iter().map(|(_, bytes)| bytes).sum();
        Ok(CacheSize { files: files.len() as u64, bytes })
    }

    /// Returns the files that the cache wrote, and their sizes.
    fn files(&self) -> Result<Vec<(PathBuf, u64)>> {
        let Some(directory) = self.directory() else {
            return Ok(Vec::new());
        };
        let entries = match fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(error) if is_absent(&error) => return Ok(Vec::new()),
            Err(error) => return Err(failure(directory, &error)),
        };
        let mut files = Vec::new();
        for entry in entries {
            let path = entry.map_err(|error| failure(directory, &error))?.path();
            if !is_ours(&path) {
                continue;
            }
            match fs::symlink_metadata(&path) {
                Ok(metadata) if metadata.is_file() => files.push((path, metadata.len())),
                // Not a regular file, or removed in the meantime.
                _ => {}
            }
        }
        Ok(files)
    }

    fn load(&self, key: &CacheKey, warnings: &mut Vec<CacheWarning>) -> Option<Vec<u8>> {
        let path = self.path(key)?;
        if let Place::Temporary(directory) = &self.place
            && let Err(reason) = belongs_to_this_user(directory)
        {
            warn(warnings, CacheWarning::Unreadable { path, reason });
            return None;
        }
        let file = match fs::read(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            Err(error) => {
                warn(warnings, CacheWarning::Unreadable { path, reason: error.to_string() });
                return None;
            }
        };
        match unpack(key, file) {
            Ok(bytes) => Some(bytes),
            Err(reason) => {
                warn(warnings, CacheWarning::Damaged { path, reason });
                None
            }
        }
    }

    fn store(&self, key: &CacheKey, bytes: &[u8], warnings: &mut Vec<CacheWarning>) {
        let (Some(directory), Some(path)) = (self.directory(), self.path(key)) else {
            return;
        };
        let stored = make_directory(directory)
            .map_err(|error| error.to_string())
            .and_then(|()| match &self.place {
                Place::Temporary(directory) => belongs_to_this_user(directory),
                _ => Ok(()),
            })
            .and_then(|()| write(directory, &path, key, bytes).map_err(|error| error.to_string()));
        if let Err(reason) = stored {
            warn(warnings, CacheWarning::Unwritable { path: directory.to_owned(), reason });
        }
    }
}

impl Default for Cache {
    /// Returns the cache that the environment selects.
    fn default() -> Cache {
        Cache::from_environment()
    }
}

/// Chooses the cache's place. Environment and temporary directory are arguments so that tests can
/// set them.
fn place(variable: impl Fn(&str) -> Option<OsString>, temporary: &Path) -> Place {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    if let Some(value) = set("FLASHCORE_CACHE") {
        if value.eq_ignore_ascii_case("off") {
            return Place::Disabled;
        }
        return Place::Directory(value.into());
    }
    // The XDG specification requires that relative paths are ignored.
    let absolute = |name: &str| set(name).map(PathBuf::from).filter(|path| path.is_absolute());
    if let Some(path) = absolute("XDG_CACHE_HOME") {
        return Place::Directory(path.join("flashcore"));
    }
    if let Some(path) = absolute("HOME") {
        return Place::Directory(path.join(".cache").join("flashcore"));
    }
    let user = set("USER").unwrap_or_default().to_string_lossy().into_owned();
    let user: String = user.chars().filter(char::is_ascii_alphanumeric).collect();
    Place::Temporary(temporary.join(format!("flashcore-{user}")))
}

fn warn(warnings: &mut Vec<CacheWarning>, warning: CacheWarning) {
    tracing::warn!("{warning}");
    warnings.push(warning);
}

fn failure(path: &Path, error: &io::Error) -> Error {
    Error::Cache { path: path.display().to_string(), reason: error.to_string() }
}

fn is_absent(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound
}

/// Returns whether a file has a name that the cache gives to its files.
fn is_ours(path: &Path) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
        return false;
    };
    let Some((name, end)) = name.rsplit_once('.') else {
        return false;
    };
    let key = match end {
        FINISHED => name,
        UNFINISHED => name.split('.').next().unwrap_or_default(),
        _ => return false,
    };
    key.len() == 64 && key.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Creates the directory if it does not exist, accessible to this user only.
fn make_directory(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// Returns an error if another user owns the directory or may write to it. A directory that does
/// not exist is fine.
#[cfg(unix)]
fn belongs_to_this_user(directory: &Path) -> Result<(), String> {
    use std::os::unix::fs::MetadataExt;
    let Ok(metadata) = fs::symlink_metadata(directory) else {
        return Ok(());
    };
    // A process's own entry in /proc belongs to its user. Other systems than Linux have no such
    // entry, and there only the permissions are checked.
    let owned = fs::metadata("/proc/self").map_or(true, |me| me.uid() == metadata.uid());
    if owned && metadata.is_dir() && metadata.mode() & 0o022 == 0 {
        return Ok(());
    }
    Err("the directory is not this user's alone".to_owned())
}

#[cfg(not(unix))]
fn belongs_to_this_user(_: &Path) -> Result<(), String> {
    Ok(())
}

/// Writes a file under a unique name and renames it into place.
fn write(directory: &Path, path: &Path, key: &CacheKey, bytes: &[u8]) -> io::Result<()> {
    // The name is random instead of the process id, since containers that share a directory may
    // have the same process ids. `RandomState` is seeded at random.
    let random = std::hash::RandomState::new().build_hasher().finish();
    let partial = directory.join(format!("{key}.{random:016x}.{UNFINISHED}"));
    let result = File::create_new(&partial)
        .and_then(|mut file| {
            file.write_all(&header(key, bytes))?;
            file.write_all(bytes)
        })
        .and_then(|()| fs::rename(&partial, path));
    if result.is_err() {
        let _ = fs::remove_file(&partial);
    }
    result
}

fn header(key: &CacheKey, bytes: &[u8]) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&FORMAT.to_le_bytes());
    header[12..20].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    header[20..].copy_from_slice(&key.checksum(bytes));
    header
}

/// Returns the cubin in a file's bytes, or what is wrong with the file.
fn unpack(key: &CacheKey, mut file: Vec<u8>) -> Result<Vec<u8>, String> {
    if file.len() < HEADER_BYTES {
        return Err(format!("{} bytes are less than a header", file.len()));
    }
    let bytes = file.split_off(HEADER_BYTES);
    if file[..8] != MAGIC {
        return Err("it is not a FlashCore cubin".to_owned());
    }
    if file[8..12] != FORMAT.to_le_bytes() {
        return Err("it has another format".to_owned());
    }
    if file[12..20] != (bytes.len() as u64).to_le_bytes() {
        return Err("it is cut short or too long".to_owned());
    }
    if file[20..] != key.checksum(&bytes) {
        return Err("its checksum does not fit".to_owned());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::DriverVersion;

    const CUBIN: &[u8] = b"\x7fELF not really a cubin";

    fn driver() -> Driver {
        let version = DriverVersion { major: 12, minor: 4 };
        Driver { version, release: Some("550.54".to_owned()) }
    }

    fn key(ptx: &str) -> CacheKey {
        let capability = ComputeCapability { major: 9, minor: 0 };
        CacheKey::new(ptx, &driver(), capability)
    }

    fn compile() -> Result<Vec<u8>, Infallible> {
        Ok(CUBIN.to_vec())
    }

    fn must_not_compile() -> Result<Vec<u8>, Infallible> {
        panic!("compiled although the cubin is in the cache")
    }

    /// Returns a cache in a directory of its own, with one cubin in it.
    fn filled() -> (tempfile::TempDir, Cache, CacheKey) {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path().join("a").join("b"));
        let key = key("kernel");
        let entry = cache.get_or_compile(&key, compile).unwrap();
        assert_eq!(entry, CacheEntry { bytes: CUBIN.into(), cached: false, warnings: vec![] });
        (directory, cache, key)
    }

    /// Damages the file, and expects one warning, the right bytes and a repair.
    fn damaged(change: impl FnOnce(&mut Vec<u8>), expected: &str) {
        let (_directory, cache, key) = filled();
        let path = cache.path(&key).unwrap();
        let mut file = fs::read(&path).unwrap();
        change(&mut file);
        fs::write(&path, file).unwrap();

        let entry = cache.get_or_compile(&key, compile).unwrap();
        assert!(!entry.cached);
        assert_eq!(entry.bytes, CUBIN);
        let [CacheWarning::Damaged { path: named, reason }] = &entry.warnings[..] else {
            panic!("{:?}", entry.warnings)
        };
        assert_eq!(named, &path);
        assert!(reason.contains(expected), "{reason}");

        let entry = cache.get_or_compile(&key, must_not_compile).unwrap();
        assert_eq!(entry, CacheEntry { bytes: CUBIN.into(), cached: true, warnings: vec![] });
    }

    #[test]
    fn the_second_time_comes_from_disk() {
        let (_directory, cache, key) = filled();
        let entry = cache.get_or_compile(&key, must_not_compile).unwrap();
        assert_eq!(entry, CacheEntry { bytes: CUBIN.into(), cached: true, warnings: vec![] });
    }

    #[test]
    fn damage_is_found_and_repaired() {
        damaged(|file| file.truncate(0), "less than a header");
        damaged(|file| file.truncate(HEADER_BYTES - 1), "less than a header");
        damaged(|file| file.truncate(HEADER_BYTES), "cut short");
        damaged(|file| file.truncate(file.len() - 1), "cut short");
        damaged(|file| file.push(0), "too long");
        damaged(|file| file[0] ^= 1, "not a FlashCore cubin");
        damaged(|file| file[8] ^= 1, "another format");
        damaged(|file| file[20] ^= 1, "checksum");
        damaged(|file| *file.last_mut().unwrap() ^= 1, "checksum");
    }

    #[test]
    fn a_file_under_a_wrong_name_is_found_out() {
        let (_directory, cache, first) = filled();
        let second = key("another kernel");
        fs::rename(cache.path(&first).unwrap(), cache.path(&second).unwrap()).unwrap();
        let entry = cache.get_or_compile(&second, compile).unwrap();
        assert!(matches!(&entry.warnings[..], [CacheWarning::Damaged { .. }]));
    }

    #[test]
    fn a_failed_compilation_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path());
        let result = cache.get_or_compile(&key("bad"), || Err("syntax error"));
        assert_eq!(result, Err("syntax error"));
        assert_eq!(cache.size().unwrap(), CacheSize::default());
    }

    #[test]
    fn a_file_in_the_place_of_the_directory_is_a_warning() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "in the way").unwrap();
        let cache = Cache::at(&file);
        let entry = cache.get_or_compile(&key("kernel"), compile).unwrap();
        assert_eq!(entry.bytes, CUBIN);
        assert!(!entry.warnings.is_empty());
        assert!(entry.warnings.iter().all(|warning| !warning.to_string().contains('\n')));
        assert_eq!(fs::read(&file).unwrap(), b"in the way");
    }

    #[test]
    fn a_directory_in_the_place_of_a_file_is_a_warning() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path());
        let key = key("kernel");
        fs::create_dir(cache.path(&key).unwrap()).unwrap();
        let entry = cache.get_or_compile(&key, compile).unwrap();
        assert_eq!(entry.bytes, CUBIN);
        assert!(matches!(
            &entry.warnings[..],
            [CacheWarning::Unreadable { .. }, CacheWarning::Unwritable { .. }]
        ));
        // It is neither counted nor cleared, and no half-written file is left beside it.
        assert_eq!(cache.clear().unwrap(), CacheSize::default());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_directory_that_cannot_be_made_is_a_warning() {
        // Not even root can create a directory there.
        let cache = Cache::at("/proc/self/flashcore");
        let entry = cache.get_or_compile(&key("kernel"), compile).unwrap();
        assert_eq!(entry.bytes, CUBIN);
        assert!(matches!(&entry.warnings[..], [CacheWarning::Unwritable { .. }]));
    }

    #[test]
    #[cfg(unix)]
    fn a_directory_that_is_read_only_still_serves() {
        use std::os::unix::fs::PermissionsExt;
        let (_directory, cache, first) = filled();
        let path = cache.directory().unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o500)).unwrap();
        // Root may write anywhere; the rest of the test is for other users.
        let root = fs::write(path.join("probe"), "").is_ok();
        let entry = cache.get_or_compile(&first, must_not_compile).unwrap();
        assert!(entry.cached && entry.warnings.is_empty());
        let entry = cache.get_or_compile(&key("another kernel"), compile).unwrap();
        assert_eq!(entry.bytes, CUBIN);
        if !root {
            assert!(matches!(&entry.warnings[..], [CacheWarning::Unwritable { .. }]));
        }
        fs::set_permissions(path, fs::Permissions::from_mode(0o700)).unwrap();
    }

    #[test]
    #[cfg(unix)]
    fn a_temporary_directory_that_others_may_write_to_is_not_used() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("flashcore-user");
        let cache = Cache { place: Place::Temporary(path.clone()) };
        let key = key("kernel");
        assert!(cache.get_or_compile(&key, compile).unwrap().warnings.is_empty());
        assert!(cache.get_or_compile(&key, must_not_compile).unwrap().cached);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        let entry = cache.get_or_compile(&key, compile).unwrap();
        assert!(!entry.cached);
        assert_eq!(entry.warnings.len(), 2);
    }

    #[test]
    fn size_and_clear_count_only_our_files() {
        let (_directory, cache, first) = filled();
        cache.get_or_compile(&key("another kernel"), compile).unwrap();
        let directory = cache.directory().unwrap();
        let left_behind = directory.join(format!("{first}.0123456789abcdef.{UNFINISHED}"));
        fs::write(&left_behind, "half").unwrap();
        let theirs = directory.join("notes.txt");
        fs::write(&theirs, "mine").unwrap();

        let file = (HEADER_BYTES + CUBIN.len()) as u64;
        let size = CacheSize { files: 3, bytes: 2 * file + 4 };
        assert_eq!(cache.size().unwrap(), size);
        assert_eq!(cache.clear().unwrap(), size);
        assert_eq!(cache.size().unwrap(), CacheSize::default());
        assert!(theirs.exists() && !left_behind.exists());
    }

    #[test]
    fn forgetting_removes_one() {
        let (_directory, cache, key) = filled();
        cache.forget(&key).unwrap();
        cache.forget(&key).unwrap();
        assert!(!cache.get_or_compile(&key, compile).unwrap().cached);
    }

    #[test]
    fn a_disabled_cache_touches_nothing() {
        let cache = Cache::disabled();
        assert_eq!(cache.directory(), None);
        let entry = cache.get_or_compile(&key("kernel"), compile).unwrap();
        assert!(!entry.cached && entry.warnings.is_empty());
        assert_eq!(cache.clear().unwrap(), CacheSize::default());
        cache.forget(&key("kernel")).unwrap();
    }

    #[test]
    fn the_environment_chooses_the_place() {
        let choose = |variables: &[(&str, &str)]| {
            let variable = |name: &str| {
                let found = variables.iter().find(|(variable, _)| *variable == name);
                found.map(|(_, value)| OsString::from(value))
            };
            place(variable, Path::new("/tmp"))
        };
        let directory = |path: &str| Place::Directory(path.into());
        let home = ("HOME", "/home/u");
        let xdg = ("XDG_CACHE_HOME", "/xdg");
        assert_eq!(choose(&[home, xdg, ("FLASHCORE_CACHE", "/c")]), directory("/c"));
        assert_eq!(choose(&[home, ("FLASHCORE_CACHE", "off")]), Place::Disabled);
        assert_eq!(choose(&[home, ("FLASHCORE_CACHE", "OFF")]), Place::Disabled);
        assert_eq!(choose(&[home, xdg]), directory("/xdg/flashcore"));
        assert_eq!(choose(&[home, xdg, ("FLASHCORE_CACHE", "")]), directory("/xdg/flashcore"));
        let relative = ("XDG_CACHE_HOME", "relative");
        assert_eq!(choose(&[home, relative]), directory("/home/u/.cache/flashcore"));
        assert_eq!(choose(&[("USER", "a/../b")]), Place::Temporary("/tmp/flashcore-ab".into()));
        assert_eq!(choose(&[]), Place::Temporary("/tmp/flashcore-".into()));
    }

    #[test]
    fn everything_that_matters_is_in_the_key() {
        let capability = ComputeCapability { major: 9, minor: 0 };
        let same = CacheKey::new("kernel", &driver(), capability);
        assert_eq!(same, key("kernel"));
        let version = DriverVersion { major: 13, minor: 0 };
        let other_version = Driver { version, ..driver() };
        let other_release = Driver { release: Some("550.60".to_owned()), ..driver() };
        let others = [
            CacheKey::new("kernel ", &driver(), capability),
            CacheKey::new("kernel", &other_version, capability),
            CacheKey::new("kernel", &other_release, capability),
            CacheKey::new("kernel", &driver(), ComputeCapability { major: 8, minor: 0 }),
        ];
        assert!(others.iter().all(|other| *other != same));
    }

    #[test]
    fn keys_stay_the_same_between_builds() {
        // A key that changes without a new FORMAT would orphan every cache.
        let expected = "a637d9f9ba2e7fc843905096d03aece5b9174fadf9605590d5820cf03c15087c";
        assert_eq!(key("kernel").to_string(), expected);
    }

    /// Reads and writes a few keys repeatedly, and expects every result to be complete.
    fn hammer(cache: &Cache, rounds: usize) {
        for round in 0..rounds {
            let name = format!("kernel {}", round % 4);
            let cubin = name.repeat(5000).into_bytes();
            let key = key(&name);
            if round % 7 == 0 {
                cache.forget(&key).unwrap();
            }
            let entry = cache.get_or_compile(&key, || Ok::<_, Infallible>(cubin.clone()));
            let entry = entry.unwrap();
            assert_eq!(entry.bytes, cubin);
            assert_eq!(entry.warnings, []);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes longer than all others together")]
    fn threads_share_a_cache() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| hammer(&cache, 50));
            }
        });
        assert_eq!(cache.size().unwrap().files, 4);
    }

    #[test]
    #[cfg_attr(miri, ignore = "starts processes")]
    fn processes_share_a_cache() {
        const CHILD: &str = "FLASHCORE_TEST_CACHE_CHILD";
        if let Some(directory) = std::env::var_os(CHILD) {
            hammer(&Cache::at(directory), 50);
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let children: Vec<_> = (0..4)
            .map(|_| {
                std::process::Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", "cache::tests::processes_share_a_cache"])
                    .env(CHILD, directory.path())
                    .stdout(std::process::Stdio::null())
                    .spawn()
                    .unwrap()
            })
            .collect();
        for mut child in children {
            assert!(child.wait().unwrap().success());
        }
        assert_eq!(Cache::at(directory.path()).size().unwrap().files, 4);
    }
}
