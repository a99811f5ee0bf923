//! What a measurement shows while it runs: a bar with the time left, and a line for each problem
//! as it is done. On a terminal alone.

use std::io::IsTerminal;

use harness::bench::Observer;
use harness::report::{Cell, Results};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::table;

pub(crate) struct Screen {
    bar: ProgressBar,
}

impl Screen {
    pub(crate) fn new() -> Self {
        let target = match std::io::stderr().is_terminal() {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let template = "measuring {wide_bar} {pos}/{len}, {eta} left";
        let style = ProgressStyle::with_template(template);
        let bar = ProgressBar::with_draw_target(None, target);
        Screen { bar: bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())) }
    }
}

impl Observer for Screen {
    fn begin(&mut self, cells: usize) {
        self.bar.reset();
        self.bar.set_length(cells as u64);
        self.bar.enable_steady_tick(std::time::Duration::from_millis(250));
    }

    fn note(&mut self, text: &str) {
        self.bar.println(text);
    }

    fn cell(&mut self, results: &Results, cell: &Cell) {
        self.bar.println(table::line(results, cell));
        self.bar.inc(1);
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
