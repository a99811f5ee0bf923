//! The gate's `counters` step: hardware counters, measured by Nsight Compute.

use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

use super::{Outcome, Rule};
use crate::Error;

/// The metrics that are collected, and what each means on Hopper.
pub const METRICS: [(&str, &str); 6] = [
    ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "tensor cores busy"),
    ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active", "exponentials' unit busy"),
    ("dram__throughput.avg.pct_of_peak_sustained_elapsed", "memory bandwidth used"),
    ("lts__t_sectors_op_read_lookup_hit.sum", "sectors found in the second-level cache"),
    ("l1tex__data_bank_conflicts_pipe_lsu.sum", "bank conflicts of loads and stores"),
    ("sm__warps_active.avg.pct_of_peak_sustained_active", "warps resident"),
];

/// Bounds of one counter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Threshold {
    /// Kernels whose names begin like this.
    pub kernels: String,
    /// The counter.
    pub metric: String,
    /// The least it may be.
    pub at_least: Option<f64>,
    /// The most it may be.
    pub at_most: Option<f64>,
}

/// Bounds of counters, from a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Thresholds {
    /// The bounds.
    pub thresholds: Vec<Threshold>,
}

impl Default for Thresholds {
    /// Returns the bounds that ship with the harness.
    fn default() -> Self {
        serde_json::from_str(include_str!("thresholds.json")).expect("a test reads it")
    }
}

impl Thresholds {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let what = path.display().to_string();
        let text =
            std::fs::read_to_string(path).map_err(Error::io(format!("cannot read {what}")))?;
        let malformed = |error: serde_json::Error| Error::Malformed {
            what,
            reason: format!("these are no thresholds: {error}"),
        };
        serde_json::from_str(&text).map_err(malformed)
    }

    /// Judges what was counted for a kernel.
    pub fn judge(&self, kernel: &str, counted: &[(String, f64)]) -> Outcome {
        let its = self.thresholds.iter().filter(|it| kernel.starts_with(&it.kernels));
        let mut found = Vec::new();
        for threshold in its {
            let metric = &threshold.metric;
            let Some((_, value)) = counted.iter().find(|(name, _)| name == metric) else {
                return Outcome::skip(format!("{metric} was not counted"));
            };
            let low = threshold.at_least.is_some_and(|least| *value < least);
            let high = threshold.at_most.is_some_and(|most| *value > most);
            if low || high {
                let bounds = match (threshold.at_least, threshold.at_most) {
                    (Some(least), Some(most)) => format!("between {least} and {most}"),
                    (Some(least), None) => format!("at least {least}"),
                    (None, most) => format!("at most {}", most.unwrap_or_default()),
                };
                let reason = format!("{metric} is {value}, and must be {bounds}");
                return Outcome::reject(Rule::Counter, reason);
            }
            found.push(format!("{} {value}", about(metric)));
        }
        Outcome::accept(found.join(", "))
    }
}

fn about(metric: &str) -> &str {
    METRICS.iter().find(|(name, _)| *name == metric).map_or(metric, |(_, about)| about)
}

/// Returns the Nsight Compute command that collects [`METRICS`] for a kernel that `command`
/// launches.
pub fn ncu_command(entry: &str, command: &[String]) -> Vec<String> {
    let metrics = METRICS.map(|(name, _)| name).join(",");
    let fixed = ["ncu", "--csv", "--launch-count", "1", "--clock-control", "none", "--metrics"];
    let mut line: Vec<String> = fixed.map(str::to_owned).to_vec();
    line.extend([metrics, "--kernel-name".to_owned(), entry.to_owned()]);
    line.extend(command.iter().cloned());
    line
}

/// Collects the counters of a kernel and judges them.
pub fn counters(kernel: &str, entry: &str, command: &[String], thresholds: &Thresholds) -> Outcome {
    let line = ncu_command(entry, command);
    let output = match Command::new(&line[0]).args(&line[1..]).output() {
        Ok(output) => output,
        Err(error) => return Outcome::skip(format!("ncu cannot be run: {error}")),
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let counted = parse(&text);
    if counted.is_empty() {
        let told = text.lines().chain(std::str::from_utf8(&output.stderr).unwrap_or("").lines());
        let told: Vec<&str> = told.filter(|line| line.contains("ERR")).collect();
        let reason = told.first().copied().unwrap_or("it counted nothing");
        return Outcome::skip(format!("ncu: {}", reason.trim_start_matches("==ERROR== ")));
    }
    thresholds.judge(kernel, &counted)
}

/// Parses names and values from Nsight Compute's CSV.
fn parse(text: &str) -> Vec<(String, f64)> {
    let rows: Vec<Vec<String>> =
        text.lines().filter(|line| line.starts_with('"')).map(fields).collect();
    let Some(heading) = rows.first() else { return Vec::new() };
    let column = |name: &str| heading.iter().position(|it| it == name);
    let (Some(name), Some(value)) = (column("Metric Name"), column("Metric Value")) else {
        return Vec::new();
    };
    let row = |row: &Vec<String>| {
        let number = row.get(value)?.replace(',', "").parse().ok()?;
        Some((row.get(name)?.clone(), number))
    };
    rows[1..].iter().filter_map(row).collect()
}

/// The fields of a line, each between quotes.
fn fields(line: &str) -> Vec<String> {
    line.trim().trim_matches('"').split("\",\"").map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CSV: &str = "==PROF== Connected\n\
        \"ID\",\"Kernel Name\",\"Metric Name\",\"Metric Unit\",\"Metric Value\"\n\
        \"0\",\"forward\",\"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active\",\"%\",\"97.90\"\n\
        \"0\",\"forward\",\"l1tex__data_bank_conflicts_pipe_lsu.sum\",\"\",\"1,234,567\"\n";

    #[test]
    fn counters_are_read_and_judged() {
        let counted = parse(CSV);
        assert_eq!(counted[0].1, 97.9);
        assert_eq!(counted[1].1, 1_234_567.0);
        let judge = |least, most| {
            let metric = counted[0].0.clone();
            let threshold =
                Threshold { kernels: "forward".to_owned(), metric, at_least: least, at_most: most };
            Thresholds { thresholds: vec![threshold] }.judge("forward_bf16", &counted)
        };
        assert_eq!(judge(Some(90.0), None), Outcome::accept("tensor cores busy 97.9"));
        let Outcome::Reject { rule, reason } = judge(Some(99.0), None) else { panic!() };
        assert_eq!(rule, Rule::Counter);
        assert!(reason.ends_with("is 97.9, and must be at least 99"), "{reason}");
        assert!(matches!(judge(None, Some(50.0)), Outcome::Reject { .. }));
    }

    #[test]
    fn the_shipped_thresholds_are_of_counters_that_are_asked() {
        let shipped = Thresholds::default();
        assert!(!shipped.thresholds.is_empty());
        for threshold in shipped.thresholds {
            assert!(METRICS.iter().any(|(name, _)| *name == threshold.metric), "{threshold:?}");
        }
    }
}
