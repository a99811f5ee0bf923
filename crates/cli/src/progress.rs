//! A progress bar on standard error, for what takes longer than a second.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use flashcore::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How long something may take before it has to show itself.
const PATIENCE: Duration = Duration::from_millis(500);

/// Shows itself only on a terminal, and only when the work is not done soon.
pub(crate) struct Bar {
    bar: ProgressBar,
    begin: Instant,
    terminal: bool,
}

impl Bar {
    pub(crate) fn new(what: &'static str) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let style = ProgressStyle::with_template("{msg} {wide_bar} {percent:>3} % {eta}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        Bar {
            bar: bar.with_style(style).with_message(what),
            begin: Instant::now(),
            terminal: std::io::stderr().is_terminal(),
        }
    }
}

impl Bar {
    /// A line above the bar.
    pub(crate) fn note(&self, text: &str) {
        if self.terminal {
            self.bar.suspend(|| eprintln!("{text}"));
        }
    }
}

impl Progress for Bar {
    fn begin(&self, total: u64) {
        self.bar.reset();
        self.bar.set_length(total);
    }

    fn advance(&self, steps: u64) {
        if self.terminal && self.bar.is_hidden() && self.begin.elapsed() > PATIENCE {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.inc(steps);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
