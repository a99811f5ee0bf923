//! A plot of predictions: time over ranks, a panel for each length.

use super::{Prediction, Variant};
use crate::report::svg::{Anchor, Drawing, FAINT, GRID, INK};

const PANEL: [f64; 2] = [360.0, 260.0];

fn colour(variant: Variant) -> &'static str {
    match variant {
        Variant::Ring => "#d55e00",
        Variant::AllGather => "#0072b2",
        Variant::AllToAll => "#009e73",
        Variant::Hybrid => "#cc79a7",
    }
}

/// Milliseconds of both passes over ranks, on logarithmic axes. Hollow dots do not fit into memory;
/// the dashed line is ideal scaling, one GPU's time divided by the ranks.
pub fn plot(predictions: &[Prediction]) -> String {
    let mut problems: Vec<&str> = predictions.iter().map(|it| it.problem.as_str()).collect();
    problems.dedup();
    let width = (problems.len() as f64 * PANEL[0] + 20.0).max(460.0);
    let mut drawing = Drawing::new(width, PANEL[1] + 90.0);
    drawing.heading([16.0, 26.0], 16.0, "Milliseconds of attention by GPUs");
    let names = Variant::ALL.map(|it| (it.name().to_owned(), colour(it)));
    drawing.legend([16.0, 48.0], &names);
    for (index, problem) in problems.iter().enumerate() {
        let its: Vec<&Prediction> =
            predictions.iter().filter(|it| it.problem == *problem).collect();
        panel(&mut drawing, index as f64 * PANEL[0] + 56.0, problem, &its);
    }
    drawing.finish()
}

fn panel(drawing: &mut Drawing, left: f64, problem: &str, its: &[&Prediction]) {
    let (upper, inner, height) = (84.0, PANEL[0] - 76.0, PANEL[1] - 50.0);
    let ideal = |it: &Prediction| it.total * it.efficiency;
    let ranks = its.iter().map(|it| (it.ranks as f64).log2());
    let (first, last) = bounds(ranks);
    let (least, most) = bounds(its.iter().flat_map(|it| [it.total, ideal(it)]).map(f64::log10));
    let (bottom, top) = (least.floor(), most.ceil().max(least.floor() + 1.0));
    let x = |ranks: usize| left + inner * ((ranks as f64).log2() - first) / (last - first).max(1.0);
    let y = |time: f64| upper + height * (1.0 - (time.log10() - bottom) / (top - bottom));
    drawing.text([left, upper - 10.0], Anchor::Start, 12.0, INK, problem);
    for power in bottom as i32..=top as i32 {
        let at = y(10f64.powi(power));
        drawing.line([left, at], [left + inner, at], GRID, 1.0);
        let text = 10f64.powi(power).to_string();
        drawing.text([left - 6.0, at + 4.0], Anchor::End, 11.0, FAINT, &text);
    }
    let mut shown: Vec<usize> = its.iter().map(|it| it.ranks).collect();
    shown.dedup();
    for ranks in &shown {
        let at = [x(*ranks), upper + height + 16.0];
        drawing.text(at, Anchor::Middle, 11.0, FAINT, &ranks.to_string());
    }
    let line: Vec<[f64; 2]> = (shown.iter())
        .filter_map(|ranks| its.iter().find(|it| it.ranks == *ranks))
        .map(|it| [x(it.ranks), y(ideal(it))])
        .collect();
    drawing.path(&line, FAINT, 1.0, true);
    for variant in Variant::ALL {
        let of: Vec<&&Prediction> = its.iter().filter(|it| it.variant == variant).collect();
        let points: Vec<[f64; 2]> = of.iter().map(|it| [x(it.ranks), y(it.total)]).collect();
        drawing.path(&points, colour(variant), 1.8, false);
        for (it, at) in of.iter().zip(points) {
            let title = format!("{variant}, {} GPUs: {:.3} ms", it.ranks, it.total);
            drawing.dot(at, 3.4, colour(variant), &title);
            if !it.fits {
                drawing.dot(at, 1.8, "#ffffff", &format!("{title}, more than the memory"));
            }
        }
    }
}

fn bounds(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), it| (least.min(it), most.max(it)))
}
