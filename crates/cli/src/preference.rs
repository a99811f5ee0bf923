//! Which kernel is meant: on the command line, else by the environment.

use clap::{Args, ValueEnum};
use flashcore::{Pass, Preference};
use harness::bench::Candidate;

/// What the caller insists on.
#[derive(Args)]
pub(crate) struct Preferred {
    /// Back end to use
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    backend: BackendChoice,
    /// Kernel to use, such as `forward` or `gpu/scalar` [default: $FLASHCORE_KERNEL, or the best for
    /// the problem]
    #[arg(long = "kernel", id = "preferred", value_name = "NAME")]
    kernel: Option<String>,
}

impl Preferred {
    pub(crate) fn preference(&self, pass: Pass) -> Preference {
        let named = self.kernel.as_deref().map(Preference::named);
        let preference = named.unwrap_or_else(|| Preference::from_environment(pass));
        let backend = self.backend.name().map(str::to_owned);
        Preference { backend: backend.or(preference.backend), ..preference }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendChoice {
    Auto,
    Cpu,
    Gpu,
}

impl BackendChoice {
    pub(crate) fn name(self) -> Option<&'static str> {
        match self {
            BackendChoice::Auto => None,
            BackendChoice::Cpu => Some("cpu"),
            BackendChoice::Gpu => Some("gpu"),
        }
    }
}

/// A kernel of ours by the name of its family or of its configuration.
#[derive(Args)]
pub(crate) struct Ours {
    /// A kernel or a configuration by name [default: $FLASHCORE_KERNEL, or what the planner chooses]
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
}

impl Ours {
    pub(crate) fn candidate(&self, pass: Pass) -> Result<Candidate, String> {
        match &self.kernel {
            Some(name) => Candidate::parse(name.strip_prefix("gpu/").unwrap_or(name)),
            None => Candidate::from_environment(pass),
        }
    }
}
