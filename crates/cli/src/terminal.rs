//! Aligned, coloured text for people.

use std::io::{IsTerminal, Write};

use anstyle::{AnsiColor, Style};

/// For names.
pub(crate) const NAME: Style = Style::new().dimmed();
/// For headings.
pub(crate) const HEADING: Style = Style::new().bold();
/// For what is right.
pub(crate) const GOOD: Style = AnsiColor::Green.on_default().bold();
/// For what is wrong.
pub(crate) const BAD: Style = AnsiColor::Red.on_default().bold();
/// For ordinary text.
pub(crate) const PLAIN: Style = Style::new();

/// A cell of a table in ordinary text.
pub(crate) fn plain(text: impl Into<String>) -> (Style, String) {
    (PLAIN, text.into())
}

/// Text in a style, if standard output is a terminal that wants colours.
pub(crate) fn paint(style: Style, text: &str) -> String {
    if wants_colour(&std::io::stdout()) {
        format!("{style}{text}{style:#}")
    } else {
        text.to_owned()
    }
}

/// One line on standard error.
pub(crate) fn error(message: &str) {
    let message = message.lines().collect::<Vec<_>>().join(" ");
    let mut stderr = std::io::stderr().lock();
    // Nobody is left to tell if this fails.
    let _ = if wants_colour(&stderr) {
        writeln!(stderr, "{BAD}error:{BAD:#} {message}")
    } else {
        writeln!(stderr, "error: {message}")
    };
}

fn wants_colour(stream: &impl IsTerminal) -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
        || std::env::var_os("TERM").is_some_and(|value| value == "dumb");
    stream.is_terminal() && !refused
}

/// The word for a verdict, in its colour.
pub(crate) fn verdict(passed: bool) -> String {
    if passed { paint(GOOD, "passed") } else { paint(BAD, "failed") }
}

/// Lines of name and value, the values aligned.
pub(crate) fn fields(fields: &[(&str, String)]) -> String {
    let width = fields.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    fields
        .iter()
        .map(|(name, value)| format!("{} {value}\n", paint(NAME, &format!("{name:<width$}"))))
        .collect()
}

/// A table with a heading; columns but the first are aligned to the right.
pub(crate) fn table(heading: &[&str], rows: &[Vec<(Style, String)>]) -> String {
    let widths: Vec<usize> = (0..heading.len())
        .map(|column| {
            let cells = rows.iter().map(|row| row[column].1.chars().count());
            cells.chain([heading[column].len()]).max().unwrap_or(0)
        })
        .collect();
    let line = |cells: &mut dyn Iterator<Item = (Style, &str)>| {
        let cells: Vec<String> = cells
            .zip(&widths)
            .enumerate()
            .map(|(column, ((style, text), &width))| {
                let padded =
                    if column == 0 { format!("{text:<width$}") } else { format!("{text:>width$}") };
                paint(style, &padded)
            })
            .collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    let mut text = line(&mut heading.iter().map(|name| (NAME, *name)));
    for row in rows {
        text += &line(&mut row.iter().map(|(style, text)| (*style, text.as_str())));
    }
    text
}

/// A duration in the unit that suits it.
pub(crate) fn duration(duration: std::time::Duration) -> String {
    let seconds = duration.as_secs_f64();
    match seconds {
        1.0.. => format!("{seconds:.2} s"),
        1e-3.. => format!("{:.2} ms", seconds * 1e3),
        _ => format!("{:.1} us", seconds * 1e6),
    }
}

/// A number of bytes in the unit that suits it.
pub(crate) fn bytes(bytes: u128) -> String {
    let units = ["KB", "MB", "GB", "TB", "PB", "EB"];
    let mut size = bytes as f64;
    let mut unit = "bytes";
    for larger in units {
        if size < 1000.0 {
            break;
        }
        size /= 1000.0;
        unit = larger;
    }
    if unit == "bytes" { format!("{bytes} bytes") } else { format!("{size:.1} {unit}") }
}
