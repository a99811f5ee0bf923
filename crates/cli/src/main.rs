//! The command `flashcore`: attention from a terminal.
//!
//! One file or folder per subcommand. Each returns its [`Answer`] as text instead of printing it,
//! so that closed pipes, colours and exit codes are handled here, once; so is the meaning of
//! `--kernel`.

mod attend;
mod bench;
mod check;
mod completions;
mod destination;
mod doctor;
mod gate;
mod inspect;
mod man;
mod memory;
mod mutate;
mod profile;
mod progress;
mod scale;
mod sim;
mod soak;
mod terminal;
mod tune;
mod warm;

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use clap::{Args, ColorChoice, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use flashcore::{Pass, Preference};
use harness::bench::Candidate;

/// Fused attention for NVIDIA GPUs in pure Rust.
#[derive(Parser)]
#[command(name = "flashcore", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Whether text has colours: auto means on a terminal, unless $NO_COLOR is set
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = ColorChoice::Auto, global = true,
          display_order = 1000)]
    color: ColorChoice,
}

#[derive(Subcommand)]
enum Command {
    Attend(attend::Arguments),
    Bench(bench::Arguments),
    Check(check::Arguments),
    Completions(completions::Arguments),
    Doctor(doctor::Arguments),
    Gate(gate::Arguments),
    Inspect(inspect::Arguments),
    Man(man::Arguments),
    Mutate(mutate::Arguments),
    Profile(profile::Arguments),
    Scale(scale::Arguments),
    Sim(sim::Arguments),
    Soak(soak::Arguments),
    Tune(tune::Arguments),
    Warm(warm::Arguments),
}

/// Which kernel a subcommand shall take: on the command line, else by the environment.
#[derive(Args)]
struct Preferred {
    /// Back end to use
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    backend: BackendChoice,
    /// Kernel to use, such as `forward` or `gpu/scalar` [default: $FLASHCORE_KERNEL, or the best for
    /// the problem]
    #[arg(long = "kernel", id = "preferred", value_name = "NAME")]
    kernel: Option<String>,
}

impl Preferred {
    fn preference(&self, pass: Pass) -> Preference {
        let named = self.kernel.as_deref().map(Preference::named);
        let preference = named.unwrap_or_else(|| Preference::from_environment(pass));
        let backend = self.backend.name().map(str::to_owned);
        Preference { backend: backend.or(preference.backend), ..preference }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BackendChoice {
    Auto,
    Cpu,
    Gpu,
}

impl BackendChoice {
    fn name(self) -> Option<&'static str> {
        match self {
            BackendChoice::Auto => None,
            BackendChoice::Cpu => Some("cpu"),
            BackendChoice::Gpu => Some("gpu"),
        }
    }
}

/// A kernel of ours by the name of its family or of its configuration.
#[derive(Args)]
struct KernelChoice {
    /// A kernel or a configuration by name [default: $FLASHCORE_KERNEL, or what the planner chooses]
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
}

impl KernelChoice {
    fn candidate(&self, pass: Pass) -> Result<Candidate, String> {
        match &self.kernel {
            Some(name) => Candidate::parse(name.strip_prefix("gpu/").unwrap_or(name)),
            None => Candidate::from_environment(pass),
        }
    }
}

/// The version of the JSON output. It is incremented when a field is removed or changes its
/// meaning; new fields leave it as it is.
const JSON_VERSION: u32 = 1;

/// The output of a subcommand.
struct Answer {
    /// Goes to standard output.
    text: String,
    /// Whether the exit code is zero.
    passed: bool,
}

impl Answer {
    /// An answer in JSON where that is asked for, and in text where not.
    fn of(
        json: bool,
        value: &impl serde::Serialize,
        passed: bool,
        text: impl FnOnce() -> String,
    ) -> Result<Self, Box<dyn Error>> {
        match json {
            true => Answer::json(value, passed),
            false => Ok(Answer { text: text(), passed }),
        }
    }

    /// An answer in JSON: an object, in the form that docs/json.md describes.
    fn json(value: &impl serde::Serialize, passed: bool) -> Result<Self, Box<dyn Error>> {
        #[derive(serde::Serialize)]
        struct Versioned<'a, T> {
            version: u32,
            #[serde(flatten)]
            answer: &'a T,
        }
        let versioned = Versioned { version: JSON_VERSION, answer: value };
        let mut text = serde_json::to_string_pretty(&versioned)?;
        text.push('\n');
        Ok(Answer { text, passed })
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::command()
        .color(colour_of_help())
        .try_get_matches()
        .and_then(|matches| Arguments::from_arg_matches(&matches));
    let arguments = match arguments {
        Ok(arguments) => arguments,
        Err(error) => return usage(&error),
    };
    terminal::colour(arguments.color);
    let answer = match &arguments.command {
        Command::Attend(arguments) => attend::run(arguments),
        Command::Bench(arguments) => bench::run(arguments),
        Command::Check(arguments) => check::run(arguments),
        Command::Completions(arguments) => completions::run(arguments),
        Command::Doctor(arguments) => doctor::run(arguments),
        Command::Gate(arguments) => gate::run(arguments),
        Command::Inspect(arguments) => inspect::run(arguments),
        Command::Man(arguments) => man::run(arguments),
        Command::Mutate(arguments) => mutate::run(arguments),
        Command::Profile(arguments) => profile::run(arguments),
        Command::Scale(arguments) => scale::run(arguments),
        Command::Sim(arguments) => sim::run(arguments),
        Command::Soak(arguments) => soak::run(arguments),
        Command::Tune(arguments) => tune::run(arguments),
        Command::Warm(arguments) => warm::run(arguments),
    };
    match answer {
        Ok(answer) => print(&answer),
        Err(error) => {
            terminal::error(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

/// Reads `--color` for help and usage errors, which are printed before all options are parsed.
fn colour_of_help() -> ColorChoice {
    let words = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
    let words: Vec<String> = words.collect();
    let pairs = words.windows(2).filter(|pair| pair[0] == "--color").map(|pair| pair[1].as_str());
    let joined = words.iter().filter_map(|word| word.strip_prefix("--color="));
    let choice = pairs.chain(joined).find_map(|word| word.parse().ok()).unwrap_or_default();
    terminal::colour(choice);
    choice
}

/// Write the answer. A reader that has gone away (`| head`) is no failure.
fn print(answer: &Answer) -> ExitCode {
    let mut output = std::io::stdout().lock();
    let written = output.write_all(answer.text.as_bytes()).and_then(|()| output.flush());
    match written {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            terminal::error(&format!("cannot write to standard output: {error}"));
            ExitCode::FAILURE
        }
        _ if answer.passed => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

/// Help and version as clap prints them; mistakes as one line.
fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        // Only a closed pipe can go wrong here.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.to_string();
    if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = std::io::stderr().write_all(text.as_bytes());
        return ExitCode::from(2);
    }
    let paragraph = text.split("\n\n").next().unwrap_or_default();
    // An option whose value may be negative takes it as it is: how to pass one is no help.
    let is_tip = |line: &&str| line.trim().starts_with("tip:") && !line.contains(" as a value");
    let tip = text.lines().find(is_tip);
    let mut line = paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some(tip) = tip {
        line += &format!("; {}", tip.trim());
    }
    terminal::error(line.trim_start_matches("error: "));
    ExitCode::from(2)
}
