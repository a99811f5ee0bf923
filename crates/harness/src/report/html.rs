//! The report as one self-contained HTML page.

use std::fmt::Write;

use super::svg::escape;
use super::{Results, chart};
use crate::statistics::geometric_mean;

const STYLE: &str = "
body { font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', sans-serif; color: #1f2328;
  background: #ffffff; max-width: 1040px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p.lead { color: #4b5563; margin-top: 0; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .22rem .7rem; border-bottom: 1px solid #e5e7eb; text-align: right; }
th:first-child, td:first-child { text-align: left; }
th { color: #6b7280; font-weight: 600; }
td.best { font-weight: 700; } td.wrong { color: #b91c1c; font-weight: 700; }
.noise { color: #6b7280; }
ul.trouble { color: #b91c1c; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: 13px; }
dt { color: #6b7280; } dd { margin: 0; overflow-wrap: anywhere; }
@media print { body { margin: 0; } h2 { break-after: avoid; } svg { break-inside: avoid; } }
";

/// The page.
pub fn page(results: &Results) -> String {
    let mut body = String::new();
    let gpu = results.provenance.gpu.as_ref().map_or("no GPU", |gpu| gpu.name.as_str());
    let title = format!("FlashCore bench: {} on {gpu}", results.method.set);
    let _ = writeln!(body, "<h1>{}</h1>", escape(&title));
    let _ = writeln!(body, "<p class=\"lead\">{}</p>", escape(&lead(results)));
    trouble(&mut body, results);
    let drawings = [
        (!results.ratios().is_empty()).then(|| chart::ratios(results)),
        Some(chart::speed(results)),
        chart::roofline(results),
        Some(chart::spread(results)),
    ];
    for drawing in drawings.into_iter().flatten() {
        let _ = writeln!(body, "<figure style=\"margin: 1.2rem 0\">\n{drawing}</figure>");
    }
    table(&mut body, results);
    provenance(&mut body, results);
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n",
        escape(&title)
    )
}

/// The result in a sentence or two.
fn lead(results: &Results) -> String {
    let ratios = results.ratios();
    let method = &results.method;
    let cache = results.shown_cache().name();
    let calls = match method.calls {
        1 => "one call to a sample".to_owned(),
        calls => format!("{calls} calls in a graph to a sample"),
    };
    let how = format!(
        "{} rounds of candidates in alternation in one process, order reversed from round to \
         round, {calls}, caches {cache}, fresh random contents each round, medians.",
        method.rounds
    );
    if ratios.is_empty() {
        return how;
    }
    let numbers = || ratios.iter().map(|(_, ratio)| ratio.ratio);
    let our_candidate = results.our_candidate().unwrap_or_default();
    format!(
        "{our_candidate} is {:.3} times as fast as the best peer in the geometric mean of {} problems \
         ({:.3} to {:.3}). {how}",
        geometric_mean(numbers()),
        ratios.len(),
        numbers().fold(f64::INFINITY, f64::min),
        numbers().fold(0.0, f64::max),
    )
}

fn trouble(body: &mut String, results: &Results) {
    let wrong = results.wrong_outputs().into_iter().map(|it| format!("Wrong output: {it}"));
    let above_roofline = results.above_roofline().into_iter();
    let above_roofline = above_roofline.map(|it| format!("Above the roofline, not believed: {it}"));
    let all: Vec<String> = wrong.chain(above_roofline).collect();
    if all.is_empty() {
        return;
    }
    body.push_str("<ul class=\"trouble\">\n");
    for line in all {
        let _ = writeln!(body, "<li>{}</li>", escape(&line));
    }
    body.push_str("</ul>\n");
}

fn table(body: &mut String, results: &Results) {
    let cache = results.shown_cache();
    body.push_str(
        "<h2>Numbers</h2>\n<p>TFLOP/s, with the noise of the median; ratio of the first \
                   candidate to the best peer, round by round. A difference below its noise is \
                   none.</p>\n<table>\n<tr><th>problem</th>",
    );
    for note in &results.candidates {
        let _ = write!(body, "<th>{}</th>", escape(&note.name));
    }
    body.push_str("<th>ratio</th><th>kernel</th></tr>\n");
    for cell in &results.cells {
        let _ = write!(body, "<tr><td>{}</td>", escape(&cell.problem));
        let medians = cell.measurements.iter().filter(|it| it.cache == cache);
        let best = medians.map(|it| it.median()).fold(f64::INFINITY, f64::min);
        for note in &results.candidates {
            let Some(found) = cell.find(&note.name, cache) else {
                body.push_str("<td class=\"noise\">-</td>");
                continue;
            };
            let class = match (found.right, found.median() == best) {
                (Some(false), _) => " class=\"wrong\"",
                (_, true) => " class=\"best\"",
                _ => "",
            };
            let speed = found.tflops(cell).unwrap_or_default();
            let noise = found.summary.map_or(0.0, |summary| 100.0 * summary.noise);
            let _ = write!(
                body,
                "<td{class}>{speed:.0} <span class=\"noise\">± {noise:.1} %</span></td>"
            );
        }
        let our_candidate = results.our_candidate().unwrap_or_default();
        let ratio = results.ratio(cell, our_candidate, cache);
        let ratio = ratio.map_or("-".to_owned(), |it| format!("{:.3}", it.ratio));
        let kernel =
            cell.find(our_candidate, cache).and_then(|it| it.kernel.clone()).unwrap_or_default();
        let _ = writeln!(body, "<td>{ratio}</td><td class=\"noise\">{}</td></tr>", escape(&kernel));
    }
    body.push_str("</table>\n");
}

fn provenance(body: &mut String, results: &Results) {
    let provenance = &results.provenance;
    let mut lines: Vec<(String, String)> = vec![
        ("date".to_owned(), provenance.date.clone()),
        ("command".to_owned(), provenance.command.clone()),
        ("FlashCore".to_owned(), provenance.flashcore.clone()),
        ("system".to_owned(), provenance.system.clone()),
        ("process".to_owned(), results.method.process.clone()),
        ("took".to_owned(), format!("{:.0} s", results.method.seconds)),
    ];
    if let Some(gpu) = &provenance.gpu {
        lines.push(("GPU".to_owned(), format!("{} ({})", gpu.name, gpu.uuid)));
        lines.push(("driver".to_owned(), gpu.driver.clone()));
    }
    for condition in &provenance.conditions {
        let values: Vec<String> =
            condition.values.iter().map(|(name, value)| format!("{name} {value}")).collect();
        lines.push((condition.when.clone(), values.join(", ")));
    }
    lines.extend(provenance.versions.iter().cloned());
    for note in &results.candidates {
        lines.push((note.name.clone(), note.about.clone()));
    }
    body.push_str("<h2>Where the numbers come from</h2>\n<dl>\n");
    for (name, value) in lines {
        let _ = writeln!(body, "<dt>{}</dt><dd>{}</dd>", escape(&name), escape(&value));
    }
    body.push_str("</dl>\n");
}

#[cfg(test)]
mod tests {
    use super::super::tests::results;
    use super::*;

    /// `FLASHCORE_SHOW_REPORT=FOLDER` keeps the page and its plots, to be looked at.
    #[test]
    fn the_page_needs_nothing_else_and_says_everything() {
        let results = results(&[("flashcore", 1.0), ("cudnn", 1.3), ("fa3", 1.1)], 9);
        let page = page(&results);
        if let Some(folder) = std::env::var_os("FLASHCORE_SHOW_REPORT") {
            let folder = std::path::Path::new(&folder);
            std::fs::write(folder.join("report.html"), &page).unwrap();
            let drawings = [
                ("speed", chart::speed(&results)),
                ("ratios", chart::ratios(&results)),
                ("roofline", chart::roofline(&results).unwrap()),
                ("spread", chart::spread(&results)),
            ];
            for (name, drawing) in drawings {
                std::fs::write(folder.join(format!("{name}.svg")), drawing).unwrap();
            }
        }
        assert_eq!(page.matches("<svg ").count(), 4);
        assert!(page.len() < 1 << 20, "{} bytes are not light", page.len());
        for foreign in ["<script", "<link", "src=", "@import", "url("] {
            assert!(!page.contains(foreign), "`{foreign}` would fetch something");
        }
        for cell in &results.cells {
            assert!(page.contains(&cell.problem));
        }
        assert!(page.contains("NVIDIA H200") && page.contains("geometric mean of 36"));
    }

    #[test]
    fn what_is_wrong_is_said_first() {
        let mut results = results(&[("flashcore", 1.0)], 9);
        results.cells[3].measurements[0].right = Some(false);
        let page = page(&results);
        let problem = &results.cells[3].problem;
        assert!(page.contains(&format!("Wrong output: flashcore on {problem}")));
    }
}
