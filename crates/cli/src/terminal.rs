//! Aligned, coloured text for people, in lines of at most 100 columns.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU8, Ordering};

use anstyle::{AnsiColor, Style};
use clap::ColorChoice;

/// Columns of a line, as far as what is in it can be broken.
pub(crate) const WIDTH: usize = 100;

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
pub(crate) fn plain(content: impl std::fmt::Display) -> (Style, String) {
    (PLAIN, content.to_string())
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

/// What `--color` says: 0 auto, 1 always, 2 never. All text of the process is meant for one reader.
static COLOUR: AtomicU8 = AtomicU8::new(0);

/// Obeys `--color` from now on.
pub(crate) fn colour(choice: ColorChoice) {
    let number = match choice {
        ColorChoice::Auto => 0,
        ColorChoice::Always => 1,
        ColorChoice::Never => 2,
    };
    COLOUR.store(number, Ordering::Relaxed);
}

fn wants_colour(stream: &impl IsTerminal) -> bool {
    match COLOUR.load(Ordering::Relaxed) {
        1 => return true,
        2 => return false,
        _ => {}
    }
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
        || std::env::var_os("TERM").is_some_and(|value| value == "dumb");
    stream.is_terminal() && !refused
}

/// The word for a verdict, in its colour.
pub(crate) fn verdict(passed: bool) -> String {
    if passed { paint(GOOD, "passed") } else { paint(BAD, "failed") }
}

/// Lines of name and value, the values aligned and broken between words.
pub(crate) fn fields(fields: &[(&str, String)]) -> String {
    let width = fields.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let field = |(name, value): &(&str, String)| {
        let name = paint(NAME, &format!("{name:<width$}"));
        let indentation = format!("\n{}", " ".repeat(width + 1));
        format!("{name} {}\n", wrap(value, WIDTH - width - 1).join(&indentation))
    };
    fields.iter().map(field).collect()
}

/// Sentences in lines. What is indented goes on further to the right.
pub(crate) fn paragraph(text: &str) -> String {
    let line = |line: &str| {
        let words = line.trim_start();
        let indentation = " ".repeat(line.len() - words.len());
        let hanging =
            if indentation.is_empty() { String::new() } else { indentation.clone() + "  " };
        let lines = wrap(words, WIDTH - hanging.len());
        format!("{indentation}{}\n", lines.join(&format!("\n{hanging}")))
    };
    text.lines().map(line).collect()
}

/// Text broken between words. A word that is longer than a line stays whole: it may be a name to be
/// copied.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut column = 0;
    for word in text.split(' ') {
        let length = visible(word);
        if column > 0 && column + 1 + length > width {
            lines.push(String::new());
            column = 0;
        }
        let line = lines.last_mut().expect("there is a first line");
        if column > 0 {
            line.push(' ');
            column += 1;
        }
        line.push_str(word);
        column += length;
    }
    lines
}

/// Columns that a text takes: escape sequences of colours take none.
fn visible(text: &str) -> usize {
    let mut escaped = false;
    text.chars()
        .filter(|letter| {
            let shown = !escaped && *letter != '\u{1b}';
            escaped = !shown && (*letter == '\u{1b}' || escaped) && *letter != 'm';
            shown
        })
        .count()
}

/// A table with a heading; columns but the first are aligned to the right. Where it is too wide, the
/// last column has lines of its own, and if need be the first as well.
pub(crate) fn table(heading: &[&str], rows: &[Vec<(Style, String)>]) -> String {
    let widths: Vec<usize> = (0..heading.len())
        .map(|column| {
            let cells = rows.iter().map(|row| row[column].1.chars().count());
            cells.chain([heading[column].len()]).max().unwrap_or(0)
        })
        .collect();
    let columns = heading.len();
    let takes =
        |from: usize, to: usize| widths[from..to].iter().sum::<usize>() + 2 * (to - from) - 2;
    // From which column to which there is a table.
    let (from, to) = match columns {
        0..3 => (0, columns),
        _ if takes(0, columns) <= WIDTH => (0, columns),
        _ if takes(0, columns - 1) <= WIDTH => (0, columns - 1),
        _ => (1, columns - 1),
    };
    let line = |cells: &[(Style, &str)]| {
        let padded = |column: usize| {
            let ((style, text), width) = (cells[column], widths[column]);
            let left = column == 0 || column < from || column >= to;
            paint(style, &if left { format!("{text:<width$}") } else { format!("{text:>width$}") })
        };
        let part = |columns: std::ops::Range<usize>| {
            columns.map(padded).collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        let indentation = if from > 0 { "  " } else { "" };
        let mut text = format!("{indentation}{}\n", part(from..to));
        if from > 0 {
            text = format!("{}\n{text}", part(0..from));
        }
        if to < columns && !cells[to].1.is_empty() {
            text += &format!("{indentation}  {}\n", part(to..columns));
        }
        text
    };
    let names: Vec<_> = heading.iter().map(|name| (NAME, *name)).collect();
    let mut text = line(&names);
    for row in rows {
        let cells: Vec<_> = row.iter().map(|(style, text)| (*style, text.as_str())).collect();
        text += &line(&cells);
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

/// What `Debug` writes of a variant, in words: `TileLists` is "tile lists".
pub(crate) fn words(debug: &str) -> String {
    let mut words = String::new();
    let mut before = ' ';
    for letter in debug.chars().take_while(char::is_ascii_alphanumeric) {
        if letter.is_ascii_uppercase() && before.is_ascii_lowercase() {
            words.push(' ');
        }
        words.push(letter.to_ascii_lowercase());
        before = letter;
    }
    words
}

/// What `Debug` writes of a value, in words: `Form { ping_pong: true }` is "(ping pong true)".
pub(crate) fn debug_words(debug: &str) -> String {
    let mut text = String::new();
    let mut rest = debug;
    while let Some(first) = rest.chars().next() {
        let name = rest.find(|it: char| !it.is_ascii_alphanumeric() && it != '_');
        let (name, after) = rest.split_at(name.unwrap_or(rest.len()));
        if name.is_empty() {
            match first {
                '{' => text.push('('),
                '}' => text.push(')'),
                ':' | '"' => {}
                other => text.push(other),
            }
            rest = &rest[first.len_utf8()..];
        } else {
            // A struct's own name says less than its fields.
            rest = after.strip_prefix(" { ").map_or(after, |_| &after[1..]);
            if rest.len() == after.len() {
                let parts: Vec<String> = name.split('_').map(words).collect();
                text += parts.join(" ").trim();
            }
        }
    }
    text.replace("( ", "(").replace(" )", ")")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_broken_between_words() {
        assert_eq!(wrap("a quick brown fox", 8), ["a quick", "brown", "fox"]);
        assert_eq!(wrap("a verylongword b", 5), ["a", "verylongword", "b"]);
        assert_eq!(wrap("", 5), [""]);
        let painted = format!("{GOOD}passed{GOOD:#} it is");
        assert_eq!(wrap(&painted, 12), [painted.as_str()]);
        assert_eq!(visible(&painted), 12);
    }

    #[test]
    fn tables_that_are_too_wide_are_taken_apart() {
        let cell = |text: &str| plain(text);
        let narrow = table(&["name", "ms", "kernel"], &[vec![cell("a"), cell("1"), cell("x")]]);
        assert_eq!(narrow, "name  ms  kernel\na      1       x\n");
        let long = "k".repeat(90);
        let rows = [vec![cell("problem"), cell("1"), cell(&long)]];
        let wide = table(&["name", "ms", "kernel"], &rows);
        assert_eq!(wide, format!("name     ms\n  kernel\nproblem   1\n  {long}\n"));
        let rows = [vec![cell(&long), cell("123456789012"), cell("x")]];
        let wider = table(&["name", "ms", "kernel"], &rows);
        let lines: Vec<&str> = wider.lines().collect();
        assert_eq!(lines[3..], [&long, "  123456789012", "    x"]);
    }

    #[test]
    fn variants_are_words() {
        assert_eq!(words("TileLists"), "tile lists");
        assert_eq!(words("Wgmma { rows: 64 }"), "wgmma");
        assert_eq!(words("BF16"), "bf16");
        let debug = "Form { ping_pong: true, mask: Window, of: Some(3), in: Rules { a: BF16 } }";
        let told = "(ping pong true, mask window, of some(3), in (a bf16))";
        assert_eq!(debug_words(debug), told);
    }
}
