//! Results and comparisons as text.

use harness::report::compare::Comparison;
use harness::report::{Cache, Cell, Measurement, Results};
use harness::statistics::geometric_mean;

use crate::terminal::{self, BAD, GOOD, NAME, PLAIN};

/// A problem in one line, as it is done.
pub(crate) fn line(results: &Results, cell: &Cell) -> String {
    let speeds: Vec<String> = cell
        .measurements
        .iter()
        .filter_map(|it| {
            let wrong = if it.right == Some(false) { " WRONG" } else { "" };
            Some(match memory_bound(cell) {
                true => format!("{} {:.1}{wrong}", it.candidate, 1e3 * it.summary?.median),
                false => format!("{} {:.0}{wrong}", it.candidate, it.tflops(cell)?),
            })
        })
        .collect();
    let cache = cell.measurements.first().map_or(Cache::Cold, |it| it.cache);
    let our_candidate = results.our_candidate().unwrap_or_default();
    let ratio = results.ratio(cell, our_candidate, cache);
    let ratio = ratio.map_or_else(String::new, |it| format!("  ratio {:.3}", it.ratio));
    let unit = if memory_bound(cell) { "us" } else { "TFLOP/s" };
    format!("{:<40} {} {unit}{ratio}", cell.problem, speeds.join("  "))
}

/// Returns whether to show microseconds rather than operations per second: where launches dominate,
/// and where memory bounds every problem.
fn in_microseconds(results: &Results) -> bool {
    let few = !results.cells.is_empty() && results.cells.iter().all(memory_bound);
    results.method.calls > 1 || few
}

/// Returns whether the arithmetic intensity is too low to keep any current GPU busy.
fn memory_bound(cell: &Cell) -> bool {
    cell.flops < 50.0 * cell.bytes
}

/// Everything that was measured.
pub(super) fn results(results: &Results) -> String {
    let mut text = String::new();
    let mut caches: Vec<Cache> =
        results.cells.iter().flat_map(|cell| &cell.measurements).map(|it| it.cache).collect();
    caches.sort();
    caches.dedup();
    for cache in caches {
        if !text.is_empty() {
            text += "\n";
        }
        text += &one_cache(results, cache);
    }
    for note in notes(results) {
        text += &format!("{note}\n");
    }
    let troubles =
        [("wrong output", results.wrong_outputs()), ("not believed", results.above_roofline())];
    for (what, lines) in troubles {
        for line in lines {
            text += &format!("{}: {line}\n", terminal::paint(BAD, what));
        }
    }
    text
}

fn one_cache(results: &Results, cache: Cache) -> String {
    let micro = in_microseconds(results);
    let unit = if micro { "us" } else { "TFLOP/s" };
    let first = format!("{unit}, caches {}", cache.name());
    let mut heading: Vec<&str> = vec![&first];
    for note in &results.candidates {
        heading.extend([note.name.as_str(), "noise"]);
    }
    let our_candidate = results.our_candidate().unwrap_or_default();
    let has_ratio = !results.ratios().is_empty();
    if has_ratio {
        heading.extend(["ratio", "noise"]);
    }
    heading.push("kernel");
    let mut rows = Vec::new();
    let mut ratios = Vec::new();
    for cell in &results.cells {
        let mut row = vec![(PLAIN, cell.problem.clone())];
        let found = |name: &str| cell.find(name, cache);
        let medians = results.candidates.iter().filter_map(|it| found(&it.name));
        let best = medians.map(Measurement::median).fold(f64::INFINITY, f64::min);
        for note in &results.candidates {
            let Some(it) = found(&note.name) else {
                row.extend([(NAME, "-".to_owned()), (NAME, String::new())]);
                continue;
            };
            let style = match (it.right, it.median() == best) {
                (Some(false), _) => BAD,
                (_, true) => GOOD,
                _ => PLAIN,
            };
            let number = match micro {
                true => format!("{:.2}", 1e3 * it.median()),
                false => format!("{:.0}", it.tflops(cell).unwrap_or_default()),
            };
            let noise = it.summary.map_or(0.0, |summary| 100.0 * summary.noise);
            row.extend([(style, number), (NAME, format!("{noise:.1} %"))]);
        }
        if has_ratio {
            match results.ratio(cell, our_candidate, cache) {
                Some(ratio) => {
                    ratios.push(ratio.ratio);
                    let style = if ratio.ratio.ln() < -ratio.noise { BAD } else { PLAIN };
                    row.push((style, format!("{:.3}", ratio.ratio)));
                    row.push((NAME, format!("{:.1} %", 100.0 * ratio.noise)));
                }
                None => row.extend([(NAME, "-".to_owned()), (NAME, String::new())]),
            }
        }
        let kernel = found(our_candidate).and_then(|it| it.kernel.clone()).unwrap_or_default();
        row.push((NAME, kernel));
        rows.push(row);
    }
    let mut text = terminal::table(&heading, &rows);
    if !ratios.is_empty() {
        let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let most = ratios.iter().copied().fold(0.0, f64::max);
        let mean = geometric_mean(ratios.iter().copied());
        let count = ratios.len();
        text += &format!(
            "{our_candidate} against the best peer: geometric mean {mean:.3}, lowest {least:.3}, \
             highest {most:.3}, {count} problems\n"
        );
    }
    text
}

/// Why candidates are missing, each reason once.
fn notes(results: &Results) -> Vec<String> {
    let mut notes: Vec<String> = Vec::new();
    for cell in &results.cells {
        for it in &cell.measurements {
            let Some(note) = &it.note else { continue };
            let line = format!("{}: {note}", it.candidate);
            if !notes.contains(&line) {
                notes.push(line);
            }
        }
    }
    notes
}

/// Two runs side by side.
pub(super) fn comparison(comparison: &Comparison) -> String {
    let rows: Vec<_> = comparison
        .changes
        .iter()
        .map(|change| {
            let (style, verdict) = match (change.real, change.speedup > 1.0) {
                (false, _) => (NAME, "noise"),
                (true, true) => (GOOD, "faster"),
                (true, false) => (BAD, "slower"),
            };
            vec![
                (PLAIN, change.problem.clone()),
                (PLAIN, change.candidate.clone()),
                (PLAIN, change.cache.name().to_owned()),
                (PLAIN, format!("{:.4}", change.milliseconds[0])),
                (PLAIN, format!("{:.4}", change.milliseconds[1])),
                (PLAIN, format!("{:+.1} %", 100.0 * (change.speedup - 1.0))),
                (NAME, format!("{:.1} %", 100.0 * change.noise)),
                (style, verdict.to_owned()),
            ]
        })
        .collect();
    let heading =
        ["problem", "candidate", "caches", "ms before", "ms after", "speed", "noise", "verdict"];
    let mut text = terminal::table(&heading, &rows);
    let real = comparison.changes.iter().filter(|it| it.real).count();
    text += &format!("{real} of {} differences exceed the noise\n", comparison.changes.len());
    if comparison.anchors > 0 {
        text += &format!(
            "the peers of both runs took {:.3} times as long in the second: taken out\n",
            comparison.drift
        );
    }
    for warning in &comparison.warnings {
        text += &format!("{}: {warning}\n", terminal::paint(BAD, "careful"));
    }
    text
}
