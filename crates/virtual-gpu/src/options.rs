//! The options of the virtual GPU, from one environment variable.

use ptx::Target;
use sim::{Mode, Policy};

/// The variable that holds the options.
const VARIABLE: &str = "FLASHCORE_VIRTUAL_GPU";

/// The words of the variable, separated by commas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// `sm=80`: the architecture.
    pub(crate) target: Target,
    /// `multiprocessors=4`.
    pub(crate) multiprocessors: u32,
    /// `policy=random`: the schedule of every launch; `earliest`, `latest` or `random`.
    pub(crate) policy: Policy,
    /// `seed=1`: the seed of the first launch; each further launch has the next one.
    pub(crate) seed: u64,
    /// `checked` or `values`.
    pub(crate) mode: Mode,
    /// `driver=12.9`: the CUDA version that the driver says it has, as 12090.
    pub(crate) driver: u32,
    /// `memory=2`: the size of the device's memory, in GiB. What is allocated takes twice as much of
    /// the host's.
    pub(crate) memory: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            target: Target::SM_90A,
            multiprocessors: 4,
            policy: Policy::Earliest,
            seed: 0,
            mode: Mode::Values,
            driver: 12090,
            memory: 2,
        }
    }
}

impl Options {
    /// Reads the variable; options that are not in it have their defaults.
    pub(crate) fn from_environment() -> Result<Options, String> {
        let text = std::env::var(VARIABLE).unwrap_or_default();
        Options::parse(&text).map_err(|reason| format!("{VARIABLE}={text:?}: {reason}"))
    }

    fn parse(text: &str) -> Result<Options, String> {
        let mut options = Options::default();
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            let wrong = |wanted: &str| format!("{word:?}: {wanted} is wanted");
            let number = || value.parse::<u32>().map_err(|_| wrong("a number"));
            match name {
                "sm" => options.target = target(value).ok_or_else(|| wrong(&targets()))?,
                "multiprocessors" => match number()? {
                    0 => return Err(wrong("at least one")),
                    count => options.multiprocessors = count,
                },
                "policy" => {
                    let policy = Policy::HOSTILE.into_iter().find(|it| it.to_string() == value);
                    options.policy = policy.ok_or_else(|| wrong("earliest, latest or random"))?;
                }
                "seed" => options.seed = value.parse().map_err(|_| wrong("a number"))?,
                "driver" => {
                    let (major, minor) = value.split_once('.').ok_or_else(|| wrong("12.9"))?;
                    let number = |text: &str| text.parse::<u32>().map_err(|_| wrong("12.9"));
                    options.driver = number(major)? * 1000 + number(minor)? * 10;
                }
                "memory" => options.memory = number()?.into(),
                "checked" if value.is_empty() => options.mode = Mode::Checked,
                "values" if value.is_empty() => options.mode = Mode::Values,
                _ => return Err(format!("{word:?} is no option")),
            }
        }
        Ok(options)
    }
}

/// Returns the target of a number; 90 is Hopper with its own features, as the GPU has them.
fn target(text: &str) -> Option<Target> {
    let name = if text == "90" { "sm_90a".to_owned() } else { format!("sm_{text}") };
    Target::NAMED.into_iter().find(|target| target.to_string() == name)
}

fn targets() -> String {
    let names = Target::NAMED.map(|target| target.to_string().replace("sm_", ""));
    format!("one of {}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read() {
        assert_eq!(Options::parse(""), Ok(Options::default()));
        let text = "sm=80, multiprocessors=2,policy=random,seed=7,checked,driver=12.3,memory=1";
        let options = Options {
            target: Target::SM_80,
            multiprocessors: 2,
            policy: Policy::Random,
            seed: 7,
            mode: Mode::Checked,
            driver: 12030,
            memory: 1,
        };
        assert_eq!(Options::parse(text), Ok(options));
        assert_eq!(Options::parse("sm=90").map(|it| it.target), Ok(Target::SM_90A));
    }

    #[test]
    fn wrong_options_are_named() {
        let cases = [
            ("sm=91", "one of 75, 80, 86, 89, 90, 90a, 120"),
            ("multiprocessors=0", "at least one"),
            ("multiprocessors=many", "a number"),
            ("policy=modelled", "earliest, latest or random"),
            ("driver=12", "12.9"),
            ("check", "\"check\" is no option"),
            ("checked=1", "\"checked=1\" is no option"),
        ];
        for (text, expected) in cases {
            let error = Options::parse(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
