//! `flashcore man`: pages of the manual.

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use clap::{Args, CommandFactory};

use crate::{Answer, terminal};

/// Write a manual page for each command
#[derive(Args)]
#[command(after_help = "For this user: flashcore man ~/.local/share/man/man1")]
pub(crate) struct Arguments {
    /// The folder that the pages go to
    folder: PathBuf,
}

pub(crate) fn run(arguments: &Arguments) -> Result<Answer, Box<dyn Error>> {
    let folder = &arguments.folder;
    let wrong = |error: std::io::Error| format!("cannot write to {}: {error}", folder.display());
    fs::create_dir_all(folder).map_err(wrong)?;
    clap_mangen::generate_to(crate::Arguments::command(), folder).map_err(wrong)?;
    let written = format!("flashcore.1 and a page for each command in {}", folder.display());
    Ok(Answer { text: terminal::fields(&[("written", written)]), passed: true })
}
