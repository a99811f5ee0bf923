//! `flashcore completions`: the command's words, for a shell to complete.

use std::error::Error;

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::Answer;

/// Print a script that completes commands and options in a shell
#[derive(Args)]
#[command(after_help = "For bash: flashcore completions bash > \
    ~/.local/share/bash-completion/completions/flashcore")]
pub(crate) struct Arguments {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

pub(crate) fn run(arguments: &Arguments) -> Result<Answer, Box<dyn Error>> {
    let mut script = Vec::new();
    let mut command = crate::Arguments::command();
    clap_complete::generate(arguments.shell, &mut command, "flashcore", &mut script);
    Ok(Answer { text: String::from_utf8(script)?, passed: true })
}
