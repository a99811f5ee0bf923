//! Whether a file can be written, asked before the work whose result it gets.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

/// Refuses a file that cannot be written. What is there stays as it is.
pub(crate) fn admit(path: &Path) -> Result<(), String> {
    trial(path).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

/// The same of a file whose folder is made where there is none.
pub(crate) fn admit_with_folder(path: &Path) -> Result<(), String> {
    // What is wrong here is what the trial says.
    let _ = path.parent().map(fs::create_dir_all);
    admit(path)
}

fn trial(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_file() => OpenOptions::new().append(true).open(path).map(drop),
        Ok(found) if found.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        // A link may lead nowhere yet, and opening a pipe would wait for its reader.
        Ok(_) => Ok(()),
        Err(_) => fs::write(path, "").and_then(|()| fs::remove_file(path)),
    }
}
