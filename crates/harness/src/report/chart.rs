//! The plots: speed, ratio to the best peer, roofline, spread. Each is one SVG document.

use flashcore::{DType, Mask, Problem};

use super::svg::{Anchor, Drawing, FAINT, GRID, INK};
use super::{Cache, Cell, Results};

/// Colours that people with any colour vision can tell apart (Okabe and Ito, 2008).
const COLOURS: [(&str, &str); 7] = [
    ("flashcore", "#d55e00"),
    ("cudnn", "#0072b2"),
    ("fa3", "#009e73"),
    ("fa2", "#cc79a7"),
    ("efficient", "#e69f00"),
    ("flex", "#56b4e9"),
    ("jax", "#7f7f7f"),
];
const OTHERS: [&str; 4] = ["#332288", "#882255", "#117733", "#999933"];

/// The colour of the candidate at an index.
fn colour(results: &Results, index: usize) -> &'static str {
    let name = &results.candidates[index].name;
    let known = COLOURS.iter().find(|(known, _)| known == name);
    known.map_or(OTHERS[index % OTHERS.len()], |(_, colour)| colour)
}

/// Problems that differ in their lengths alone, a line in a plot.
struct Group<'a> {
    title: String,
    cells: Vec<(String, &'a Cell)>,
}

fn groups(results: &Results) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    let many_heads = {
        let mut ratios: Vec<_> = (results.cells.iter().filter_map(Cell::parsed))
            .map(|it| it.query_heads / it.kv_heads.max(1))
            .collect();
        ratios.dedup();
        ratios.len() > 1
    };
    for cell in &results.cells {
        let Some(problem) = cell.parsed() else { continue };
        let title = title(&problem, many_heads || problem.kv_heads != problem.query_heads);
        let label = label(&problem);
        match groups.iter_mut().find(|group| group.title == title) {
            Some(group) => group.cells.push((label, cell)),
            None => groups.push(Group { title, cells: vec![(label, cell)] }),
        }
    }
    groups
}

fn title(problem: &Problem, with_heads: bool) -> String {
    let mut title = format!("head dim {}", problem.head_dim);
    if problem.value_head_dim != problem.head_dim {
        title += &format!("/{}", problem.value_head_dim);
    }
    title += if problem.mask == Mask::CAUSAL { ", causal" } else { ", dense" };
    if with_heads {
        title += &format!(", heads {}/{}", problem.query_heads, problem.kv_heads);
    }
    title
}

fn label(problem: &Problem) -> String {
    let short = |length: usize| match length {
        1024.. if length.is_multiple_of(1024) => format!("{}k", length / 1024),
        _ => length.to_string(),
    };
    let (queries, keys) = (problem.query_length, problem.key_length);
    if queries == keys { short(queries) } else { format!("{}x{}", short(queries), short(keys)) }
}

/// A round number not below `most`, and a step that divides it.
fn scale(most: f64) -> (f64, f64) {
    let magnitude = 10f64.powf(most.max(1e-9).log10().floor());
    let step = [0.2, 0.5, 1.0, 2.0].into_iter().find(|step| most / (step * magnitude) <= 5.5);
    let step = step.unwrap_or(2.0) * magnitude;
    ((most / step).ceil() * step, step)
}

fn candidates(results: &Results) -> Vec<(String, &'static str)> {
    let name = |index: usize| (results.candidates[index].name.clone(), colour(results, index));
    (0..results.candidates.len()).map(name).collect()
}

/// TFLOP/s by length, a panel for each head dim and mask.
pub fn speed(results: &Results) -> String {
    const PANEL: [f64; 2] = [330.0, 220.0];
    const MARGIN: f64 = 46.0;
    let (groups, cache) = (groups(results), results.shown_cache());
    let columns = match groups.len() {
        1 => 1,
        count if count.is_multiple_of(2) => 2,
        _ => 3,
    };
    let rows = groups.len().div_ceil(columns);
    let width = (columns as f64 * PANEL[0] + 20.0).max(520.0);
    let mut drawing = Drawing::new(width, rows as f64 * PANEL[1] + 60.0);
    drawing.heading([16.0, 26.0], 16.0, "TFLOP/s by sequence length");
    drawing.legend([width - 40.0 - legend_width(results), 26.0], &candidates(results));
    let speeds = groups
        .iter()
        .flat_map(|group| &group.cells)
        .flat_map(|(_, cell)| cell.measurements.iter().filter_map(|it| it.tflops(cell)));
    // Files may hold numbers that are not finite.
    let (top, step) = scale(speeds.filter(|it| it.is_finite()).fold(1.0, f64::max));
    let ticks = (top / step).round().clamp(0.0, 12.0) as u32;
    for (index, group) in groups.iter().enumerate() {
        let left = (index % columns) as f64 * PANEL[0] + MARGIN;
        let upper = (index / columns) as f64 * PANEL[1] + 76.0;
        let (inner, height) = (PANEL[0] - MARGIN - 14.0, PANEL[1] - 72.0);
        drawing.text([left, upper - 12.0], Anchor::Start, 13.0, INK, &group.title);
        let y = |speed: f64| upper + height * (1.0 - speed / top);
        for tick in (0..=ticks).map(|tick| f64::from(tick) * step) {
            drawing.line([left, y(tick)], [left + inner, y(tick)], GRID, 1.0);
            let text = format!("{tick}");
            drawing.text([left - 6.0, y(tick) + 4.0], Anchor::End, 11.0, FAINT, &text);
        }
        let count = group.cells.len();
        let x = |place: usize| left + inner * (place as f64 + 0.5) / count as f64;
        for (place, (label, _)) in group.cells.iter().enumerate() {
            let at = [x(place), upper + height + 16.0];
            drawing.text(at, Anchor::Middle, 11.0, FAINT, label);
        }
        // Ours last, on top.
        for (number, note) in results.candidates.iter().enumerate().rev() {
            let colour = colour(results, number);
            let mut points = Vec::new();
            for (place, (_, cell)) in group.cells.iter().enumerate() {
                let Some(found) = cell.find(&note.name, cache) else { continue };
                let (Some(speed), Some(summary)) = (found.tflops(cell), found.summary) else {
                    continue;
                };
                let at = [x(place), y(speed)];
                let noise = summary.noise.min(1.0);
                drawing.line(
                    [at[0], y(speed * (1.0 + noise))],
                    [at[0], y(speed * (1.0 - noise))],
                    colour,
                    1.0,
                );
                let title = format!("{}: {speed:.0} TFLOP/s, {:.4} ms", note.name, summary.median);
                drawing.dot(at, 3.2, colour, &title);
                points.push(at);
            }
            drawing.path(&points, colour, if note.peer { 1.5 } else { 2.4 }, false);
        }
    }
    drawing.finish()
}

fn legend_width(results: &Results) -> f64 {
    let names = results.candidates.iter().map(|it| 30.0 + 7.4 * it.name.chars().count() as f64);
    names.sum::<f64>() - 20.0
}

/// Our first candidate against the best peer, a coloured field for each problem.
pub fn ratios(results: &Results) -> String {
    const FIELD: [f64; 2] = [84.0, 34.0];
    const LEFT: f64 = 210.0;
    let (groups, cache) = (groups(results), results.shown_cache());
    let our_candidate = results.our_candidate().unwrap_or_default();
    let columns = groups.iter().map(|group| group.cells.len()).max().unwrap_or(0);
    let width = (LEFT + columns as f64 * FIELD[0] + 20.0).max(520.0);
    let mut drawing = Drawing::new(width, groups.len() as f64 * FIELD[1] + 76.0);
    let heading = format!("{our_candidate}: speed over that of the best peer");
    drawing.heading([16.0, 26.0], 16.0, &heading);
    // Groups of the same lengths share a heading.
    let mut before: Vec<&str> = Vec::new();
    for (row, group) in groups.iter().enumerate() {
        let upper = 64.0 + row as f64 * FIELD[1];
        let title = group.title.as_str();
        drawing.text([16.0, upper + 22.0], Anchor::Start, 13.0, INK, title);
        let labels: Vec<&str> = group.cells.iter().map(|(label, _)| label.as_str()).collect();
        for (column, (label, cell)) in group.cells.iter().enumerate() {
            let x = LEFT + column as f64 * FIELD[0];
            if labels != before && row == 0 {
                let at = [x + FIELD[0] / 2.0 - 2.0, upper - 8.0];
                drawing.text(at, Anchor::Middle, 11.0, FAINT, label);
            }
            let Some(ratio) = results.ratio(cell, our_candidate, cache) else { continue };
            let text = if labels == before || row == 0 {
                format!("{:.2}", ratio.ratio)
            } else {
                format!("{label}: {:.2}", ratio.ratio)
            };
            let title = format!(
                "{}: {:.3} of {}, within {:.1} %",
                cell.problem,
                ratio.ratio,
                ratio.peer,
                100.0 * ratio.noise
            );
            let size = [FIELD[0] - 4.0, FIELD[1] - 4.0];
            drawing.rectangle([x, upper], size, &diverging(ratio.ratio), &title);
            let at = [x + FIELD[0] / 2.0 - 2.0, upper + 20.0];
            drawing.text(at, Anchor::Middle, 13.0, INK, &text);
        }
        if row == 0 {
            before = labels;
        }
    }
    drawing.finish()
}

/// White at 1, blue above, red below; full at a fifth.
fn diverging(ratio: f64) -> String {
    let share = (ratio.ln() / 1.2f64.ln()).clamp(-1.0, 1.0);
    let far = if share > 0.0 { [102.0, 171.0, 221.0] } else { [232.0, 124.0, 100.0] };
    let mix = |channel: usize| 246.0 + (far[channel] - 246.0) * share.abs();
    format!("rgb({:.0},{:.0},{:.0})", mix(0), mix(1), mix(2))
}

/// Speed by operations per byte, under what the hardware can do.
pub fn roofline(results: &Results) -> Option<String> {
    let gpu = results.provenance.gpu.as_ref()?;
    let (peak, bandwidth) = (gpu.peak_tflops(DType::BF16), gpu.memory_bandwidth());
    let cache = results.shown_cache();
    const SIZE: [f64; 2] = [680.0, 380.0];
    let (left, upper) = (56.0, 56.0);
    let (inner, height) = (SIZE[0] - left - 20.0, SIZE[1] - upper - 50.0);
    let intensities = results.cells.iter().map(|cell| cell.flops / cell.bytes);
    let intensities = intensities.filter(|it| it.is_normal() && *it > 0.0);
    let (least, most) =
        intensities.fold((f64::INFINITY, 0f64), |(least, most), it| (least.min(it), most.max(it)));
    if !least.is_finite() {
        return None;
    }
    let (first, last) = ((least / 2.0).log2().floor(), (most * 2.0).log2().ceil());
    let top = (peak * 1.3).log2();
    let bottom = top - 6.0;
    let x = |intensity: f64| left + inner * (intensity.log2() - first) / (last - first);
    let y = |speed: f64| {
        let share = (speed.log2() - bottom) / (top - bottom);
        upper + height * (1.0 - share.max(0.0))
    };
    let mut drawing = Drawing::new(SIZE[0], SIZE[1]);
    drawing.heading([16.0, 26.0], 16.0, "Roofline");
    drawing.legend([SIZE[0] - 40.0 - legend_width(results), 26.0], &candidates(results));
    for power in first as i32..=last as i32 {
        let at = x(2f64.powi(power));
        drawing.line([at, upper], [at, upper + height], GRID, 1.0);
        let text = 2f64.powi(power).to_string();
        drawing.text([at, upper + height + 16.0], Anchor::Middle, 11.0, FAINT, &text);
    }
    for speed in [16.0, 32.0, 64.0, 125.0, 250.0, 500.0, 1000.0, 2000.0] {
        if (bottom..=top).contains(&f64::log2(speed)) {
            drawing.line([left, y(speed)], [left + inner, y(speed)], GRID, 1.0);
            let text = format!("{speed}");
            drawing.text([left - 6.0, y(speed) + 4.0], Anchor::End, 11.0, FAINT, &text);
        }
    }
    let middle = [left + inner / 2.0, SIZE[1] - 10.0];
    drawing.text(middle, Anchor::Middle, 12.0, FAINT, "operations per byte that must be moved");
    let at = |intensity: f64| {
        let memory = bandwidth.map_or(f64::INFINITY, |bandwidth| intensity * bandwidth / 1e3);
        [x(intensity), y(memory.min(peak))]
    };
    let steps = 200;
    let roof: Vec<[f64; 2]> = (0..=steps)
        .map(|step| at(2f64.powf(first + (last - first) * step as f64 / steps as f64)))
        .filter(|point| point[1] <= upper + height)
        .collect();
    drawing.path(&roof, INK, 1.6, true);
    let text = format!("{peak:.0} TFLOP/s at {:.0} MHz", gpu.clock_megahertz);
    drawing.text([left + inner, y(peak) - 6.0], Anchor::End, 11.0, INK, &text);
    for (number, note) in results.candidates.iter().enumerate().rev() {
        for cell in &results.cells {
            let found = cell.find(&note.name, cache);
            let Some(speed) = found.and_then(|it| it.tflops(cell)) else { continue };
            let intensity = cell.flops / cell.bytes;
            let title = format!("{}: {}, {speed:.0} TFLOP/s", note.name, cell.problem);
            drawing.dot([x(intensity), y(speed)], 3.2, colour(results, number), &title);
        }
    }
    Some(drawing.finish())
}

/// Every sample, relative to its candidate's median.
pub fn spread(results: &Results) -> String {
    const ROW: f64 = 19.0;
    const LEFT: f64 = 290.0;
    const INNER: f64 = 420.0;
    let cache = results.shown_cache();
    let deviations = |cell: &Cell, name: &str, cache: Cache| -> Vec<f64> {
        let found = cell.find(name, cache);
        let relative = |it: &super::Measurement| {
            let median = it.median();
            it.samples.iter().map(|sample| sample / median - 1.0).collect()
        };
        found.map(relative).unwrap_or_default()
    };
    let mut drawing = Drawing::new(LEFT + INNER + 30.0, results.cells.len() as f64 * ROW + 84.0);
    drawing.heading([16.0, 26.0], 16.0, "Every sample against its median");
    let right = LEFT + INNER + 10.0;
    drawing.legend([right - legend_width(results), 26.0], &candidates(results));
    // Wide enough for nine samples of ten; what lies beyond is drawn at the edge.
    let all: Vec<f64> = (results.cells.iter())
        .flat_map(|cell| results.candidates.iter().flat_map(|it| deviations(cell, &it.name, cache)))
        .map(f64::abs)
        .collect();
    let usual = crate::statistics::quantile(&all, 0.9) * 1.5;
    let limit = [0.01, 0.02, 0.05].into_iter().find(|limit| usual <= *limit).unwrap_or(0.1);
    let x = |share: f64| LEFT + INNER * (share.clamp(-limit, limit) / limit + 1.0) / 2.0;
    let bottom = 64.0 + results.cells.len() as f64 * ROW;
    for share in [-1.0, -0.5, 0.0, 0.5, 1.0] {
        let at = x(share * limit);
        drawing.line([at, 58.0], [at, bottom], if share == 0.0 { FAINT } else { GRID }, 1.0);
        let text = match 100.0 * share * limit {
            0.0 => "median".to_owned(),
            percent => format!("{percent:+} %"),
        };
        drawing.text([at, 50.0], Anchor::Middle, 11.0, FAINT, &text);
    }
    for (row, cell) in results.cells.iter().enumerate() {
        let upper = 64.0 + row as f64 * ROW;
        drawing.text([16.0, upper + 12.0], Anchor::Start, 11.0, INK, &cell.problem);
        let count = results.candidates.len().max(1) as f64;
        for (number, note) in results.candidates.iter().enumerate() {
            let y = upper + (ROW - 3.0) * (number as f64 + 0.5) / count;
            let samples = deviations(cell, &note.name, cache);
            let (Some(least), Some(most)) = (
                samples.iter().copied().reduce(f64::min),
                samples.iter().copied().reduce(f64::max),
            ) else {
                continue;
            };
            let colour = colour(results, number);
            drawing.line([x(least), y], [x(most), y], colour, 0.8);
            for sample in samples {
                let title = format!("{}: {:+.2} %", note.name, 100.0 * sample);
                drawing.dot([x(sample), y], 1.6, colour, &title);
            }
        }
    }
    drawing.finish()
}

#[cfg(test)]
mod tests {
    use super::super::tests::results;
    use super::*;

    #[test]
    fn every_plot_has_every_candidate_and_problem() {
        let results = results(&[("flashcore", 1.0), ("cudnn", 1.3), ("fa3", 1.1)], 9);
        let drawings =
            [speed(&results), ratios(&results), roofline(&results).unwrap(), spread(&results)];
        for drawing in &drawings {
            assert!(drawing.starts_with("<svg ") && drawing.ends_with("</svg>\n"));
            assert!(!drawing.contains("NaN") && !drawing.contains("inf"), "{drawing}");
        }
        for name in ["flashcore", "cudnn", "fa3"] {
            assert!(drawings[0].contains(&format!(">{name}</text>")));
        }
        for title in ["head dim 64, dense", "head dim 256, causal"] {
            assert!(drawings[0].contains(title) && drawings[1].contains(title));
        }
        assert_eq!(drawings[0].matches("<circle").count(), 3 + 36 * 3);
        assert_eq!(drawings[1].matches("<rect x").count(), 36);
    }

    #[test]
    fn scales_are_round() {
        assert_eq!(scale(834.0), (1000.0, 200.0));
        assert_eq!(scale(412.0), (500.0, 100.0));
        assert_eq!(scale(7.0), (8.0, 2.0));
    }
}
