//! Timelines of warps, copies and tensor cores, which open in Perfetto or Chrome.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// A timeline in cycles of a simple cost model.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    spans: Vec<Span>,
    /// The index of the last running span of each warp, which later turns extend.
    running: BTreeMap<(u32, u32), usize>,
}

/// A row of the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Track {
    /// A warp of the block.
    Warp(u32),
    /// The copy engine.
    Copies,
    /// The tensor cores.
    TensorCores,
}

/// A time span on a row.
#[derive(Clone, Debug)]
pub struct Span {
    /// The block's index in the grid.
    pub block: u32,
    /// The row of the timeline.
    pub track: Track,
    /// A label of the activity.
    pub name: String,
    /// The first cycle.
    pub start: u64,
    /// The cycle after the last.
    pub end: u64,
    /// Whether the span shows a warp running, rather than a wait, a copy or a product.
    pub runs: bool,
}

impl Trace {
    /// Adds a span, or extends the last one of a warp that goes on running.
    pub(crate) fn push(&mut self, span: Span) {
        if let Track::Warp(warp) = span.track {
            let key = (span.block, warp);
            if let Some(last) = self.running.get(&key)
                && span.runs
                && self.spans[*last].end == span.start
            {
                self.spans[*last].end = span.end;
                return;
            }
            if span.runs {
                self.running.insert(key, self.spans.len());
            } else {
                self.running.remove(&key);
            }
        }
        self.spans.push(span);
    }

    /// Returns every span, in the order they were recorded.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Returns the timeline in the Chrome trace format, with a cycle as a microsecond.
    pub fn to_json(&self) -> String {
        let mut events = Vec::new();
        let mut rows: Vec<(u32, Track)> = self.spans.iter().map(|s| (s.block, s.track)).collect();
        rows.sort();
        rows.dedup();
        for (block, track) in rows {
            let name = match track {
                Track::Warp(warp) => format!("warp {warp}"),
                Track::Copies => "copies".to_owned(),
                Track::TensorCores => "tensor cores".to_owned(),
            };
            let process = json!({ "name": format!("block {block}") });
            let (ph, pid, tid) = ("M", block, row(track));
            events.push(json!({ "ph": ph, "pid": pid, "name": "process_name", "args": process }));
            let args = json!({ "name": name });
            events.push(
                json!({ "ph": ph, "pid": pid, "tid": tid, "name": "thread_name", "args": args }),
            );
        }
        for span in &self.spans {
            let duration = (span.end - span.start).max(1);
            let (pid, tid) = (span.block, row(span.track));
            match span.track {
                // Copies overlap, so each is an asynchronous span of its own.
                Track::Copies => {
                    let id = events.len();
                    for (ph, ts) in [("b", span.start), ("e", span.start + duration)] {
                        events.push(json!({
                            "ph": ph, "cat": "copy", "id": id, "pid": pid, "tid": tid,
                            "name": span.name, "ts": ts,
                        }));
                    }
                }
                Track::Warp(_) | Track::TensorCores => events.push(json!({
                    "ph": "X", "pid": pid, "tid": tid, "name": span.name,
                    "ts": span.start, "dur": duration,
                })),
            }
        }
        let trace: Value = json!({ "traceEvents": events, "displayTimeUnit": "ns" });
        trace.to_string()
    }
}

fn row(track: Track) -> u32 {
    match track {
        Track::Warp(warp) => warp,
        Track::Copies => 1000,
        Track::TensorCores => 1001,
    }
}
