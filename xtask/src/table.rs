//! Tables for the terminal.

/// Columns as wide as their widest cell; numbers to the right, words to the left.
pub(crate) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([head[column].len()]).max().unwrap_or(0)
    };
    let numeric = |column: usize| {
        let mut cells =
            rows.iter().filter_map(|row| row.get(column)).filter(|cell| !cell.is_empty());
        !rows.is_empty() && cells.all(|cell| cell.starts_with(|first: char| first.is_ascii_digit()))
    };
    let columns: Vec<(usize, bool)> = (0..head.len()).map(|at| (width(at), numeric(at))).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded = cells.zip(&columns).map(|(cell, &(width, right))| match right {
            true => format!("{cell:>width$}"),
            false => format!("{cell:<width$}"),
        });
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    let mut text = line(&mut head.iter().copied());
    let total: usize = columns.iter().map(|(width, _)| width + 2).sum();
    text += &("-".repeat(total.saturating_sub(2)) + "\n");
    for row in rows {
        text += &line(&mut row.iter().map(String::as_str));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [["a", "ok", "1.0"], ["longer", "failed", "12.5"]];
        let rows = rows.map(|row| row.map(str::to_owned).to_vec());
        let expected = "\
check   verdict  seconds
------------------------
a       ok           1.0
longer  failed      12.5
";
        assert_eq!(table(&["check", "verdict", "seconds"], &rows), expected);
    }
}
