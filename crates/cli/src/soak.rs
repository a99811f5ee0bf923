//! `flashcore soak`: random problems for a long time, while things go wrong.

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use harness::soak::{self, Fault, Options, Summary};

use crate::progress::Bar;
use crate::{Answer, BackendChoice, terminal};

/// Answer random problems for a long time, check every answer, and let things go wrong meanwhile
#[derive(Args)]
pub(crate) struct Arguments {
    /// For how long, such as 90s, 8m or 1h [default: 1m, or until the problems are answered]
    #[arg(long = "for", value_name = "DURATION", value_parser = duration)]
    duration: Option<Duration>,
    /// How many problems at most
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..MOST_PROBLEMS))]
    problems: Option<u64>,
    /// Makes it the same problems again [default: new ones]
    #[arg(long)]
    seed: Option<u64>,
    /// The number of the first problem
    #[arg(long, value_name = "NUMBER", default_value_t = 0,
          value_parser = clap::value_parser!(u64).range(..MOST_PROBLEMS))]
    first: u64,
    /// What goes wrong: all, none, or some of corrupted, deleted, read-only, full, killed-sibling,
    /// lost-context, out-of-memory
    #[arg(long, value_name = "FAULTS", default_value = "all", value_parser = faults)]
    faults: Faults,
    /// Back end to use
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    backend: BackendChoice,
    /// The cache's directory [default: one that is deleted afterwards]
    #[arg(long, value_name = "FOLDER", hide = true)]
    cache: Option<PathBuf>,
    /// Lose the device context at the end
    #[arg(long, hide = true)]
    lose_context: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// So many problems can be counted, from any of as many first ones on.
const MOST_PROBLEMS: u64 = 1 << 62;

#[derive(Debug, Clone)]
struct Faults(Vec<Fault>);

fn faults(text: &str) -> Result<Faults, String> {
    let find = |name: &str| {
        Fault::ALL.into_iter().find(|fault| fault.name() == name).ok_or_else(|| {
            let known = Fault::ALL.map(Fault::name).join(", ");
            format!("there is no fault `{name}`; there are {known}")
        })
    };
    match text {
        "all" => Ok(Faults(Fault::ALL.to_vec())),
        "none" => Ok(Faults(Vec::new())),
        names => Ok(Faults(names.split(',').map(find).collect::<Result<_, _>>()?)),
    }
}

/// A number and a unit: 500ms, 90s, 8m, 1h.
fn duration(text: &str) -> Result<Duration, String> {
    let number = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let seconds = match &text[number.len()..] {
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(format!("`{text}` is no duration such as 90s, 8m or 1h")),
    };
    let given: f64 = number.parse().map_err(|_| format!("`{number}` is no number"))?;
    let duration = Duration::try_from_secs_f64(given * seconds);
    let duration = duration.map_err(|_| format!("`{text}` is longer than a clock counts"))?;
    if duration.is_zero() {
        return Err("no problem is answered in no time".to_owned());
    }
    Ok(duration)
}

pub(crate) fn run(arguments: &Arguments) -> Result<Answer, Box<dyn Error>> {
    let gpu = match arguments.backend {
        BackendChoice::Cpu => false,
        BackendChoice::Gpu => true,
        BackendChoice::Auto => cuda::DeviceInfo::query(0).is_ok(),
    };
    let now =
        || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_millis() as u64);
    let minute = arguments.problems.is_none().then_some(Duration::from_secs(60));
    let options = Options {
        duration: arguments.duration.or(minute),
        problems: arguments.problems,
        first: arguments.first,
        seed: arguments.seed.unwrap_or_else(now),
        gpu,
        faults: arguments.faults.0.clone(),
        program: std::env::current_exe().ok(),
        cache: arguments.cache.clone(),
        lose_context: arguments.lose_context,
    };
    let summary = {
        let bar = Bar::new("soaking");
        soak::run(&options, &bar, &|text| bar.note(text))?
    };
    let passed = summary.passed;
    Answer::of(arguments.json, &summary, passed, || describe(&summary))
}

fn describe(summary: &Summary) -> String {
    let Summary { problems, rows, seconds, seed, .. } = summary;
    let rate = *problems as f64 / seconds.max(1e-9);
    let kernels: Vec<String> =
        summary.kernels.iter().map(|(kernel, count)| format!("{count} by {kernel}")).collect();
    let wrong = match summary.failures.len() {
        0 => terminal::paint(terminal::GOOD, "none"),
        count => terminal::paint(terminal::BAD, &count.to_string()),
    };
    let mut fields = vec![
        ("problems", format!("{problems} in {seconds:.0} s, {rate:.0} a second, seed {seed}")),
        ("kernels", kernels.join(", ")),
        ("compared", format!("{rows} rows with the reference")),
        ("wrong answers", wrong),
        ("cache", format!("{} complaints", summary.cache_warnings)),
    ];
    if summary.waited_for_memory > 0 {
        fields.push(("waited", format!("{} times for device memory", summary.waited_for_memory)));
    }
    match &summary.held {
        Some(held) => {
            let bytes = [held.start, held.settled, held.end]
                .map(|it| terminal::bytes(it.memory_bytes.into()));
            let [start, settled, end] = bytes;
            fields.push((
                "memory",
                format!("{start} at the start, {settled} settled, {end} at the end"),
            ));
            let handles = [held.start, held.settled, held.end].map(|it| it.handles);
            let [start, settled, end] = handles;
            fields.push((
                "handles",
                format!("{start} at the start, {settled} settled, {end} at the end"),
            ));
            fields.extend(
                held.growth.iter().map(|it| ("growth", terminal::paint(terminal::BAD, it))),
            );
        }
        None => fields.push(("memory", "this system does not say".to_owned())),
    }
    let mut text = terminal::fields(&fields);
    if !summary.faults.is_empty() {
        let lines: Vec<_> = summary
            .faults
            .iter()
            .map(|report| {
                let (times, survived) = (report.times, report.survived);
                let count = format!("survived {survived} of {times}");
                let style = if times == survived { terminal::GOOD } else { terminal::BAD };
                let count = terminal::paint(style, &count);
                (
                    report.fault.name(),
                    format!("{count}: {} ({})", report.fault.about(), report.told),
                )
            })
            .collect();
        text += &format!("\n{}\n", terminal::paint(terminal::HEADING, "faults"));
        text += &terminal::fields(&lines);
    }
    for failure in &summary.failures {
        let head = terminal::paint(terminal::BAD, "failed");
        text += &format!("\n{head} {}: {}\n", failure.problem, failure.reason);
        text += &format!("  replay: {}\n", failure.replay);
    }
    text + &format!("\n{}\n", terminal::verdict(summary.passed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        assert_eq!(duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("1h"), Ok(Duration::from_secs(3600)));
        for wrong in ["", "8", "m", "-1s", "8 m", "1e30h", "nans", "8d", "0s"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}
