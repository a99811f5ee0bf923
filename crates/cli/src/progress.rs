//! Progress on standard error, for what takes longer than a second.

use std::io::IsTerminal;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use flashcore::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How long work may take before progress is shown.
const PATIENCE: Duration = Duration::from_millis(500);

/// A progress bar, shown only on a terminal and only when the work takes long. Until the total is
/// known, it shows the elapsed time.
pub(crate) struct Bar {
    bar: ProgressBar,
    terminal: bool,
    /// Ends the thread that waits until it is time to show something.
    waiting: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Bar {
    pub(crate) fn new(what: &'static str) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let bar = bar.with_style(style("{spinner} {msg} {elapsed}")).with_message(what);
        let terminal = std::io::stderr().is_terminal();
        Bar { waiting: terminal.then(|| show_later(bar.clone())), bar, terminal }
    }

    /// A line above the bar.
    pub(crate) fn note(&self, text: &str) {
        if self.terminal {
            self.warn(text);
        }
    }

    /// Prints a line even without a terminal: it may be why there are no results.
    pub(crate) fn warn(&self, text: &str) {
        self.bar.suspend(|| eprintln!("{text}"));
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

fn show_later(bar: ProgressBar) -> (Sender<()>, JoinHandle<()>) {
    let (done, waits) = channel();
    let thread = std::thread::spawn(move || {
        if waits.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            bar.set_draw_target(ProgressDrawTarget::stderr());
            bar.enable_steady_tick(Duration::from_millis(200));
        }
    });
    (done, thread)
}

impl Progress for Bar {
    fn begin(&self, total: u64) {
        self.bar.set_style(style("{msg} {wide_bar} {percent:>3} % {eta}"));
        self.bar.reset();
        self.bar.set_length(total);
    }

    fn advance(&self, steps: u64) {
        self.bar.inc(steps);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some((done, thread)) = self.waiting.take() {
            drop(done);
            let _ = thread.join();
        }
        self.bar.finish_and_clear();
    }
}
