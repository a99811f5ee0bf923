//! A small SVG writer.

use std::fmt::Write;

/// A drawing, in pixels.
pub(crate) struct Drawing {
    width: f64,
    height: f64,
    body: String,
}

/// The alignment of a text at its point.
#[derive(Clone, Copy)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

pub(crate) const INK: &str = "#1f2328";
pub(crate) const FAINT: &str = "#6b7280";
pub(crate) const GRID: &str = "#e5e7eb";

impl Drawing {
    pub(crate) fn new(width: f64, height: f64) -> Self {
        Drawing { width, height, body: String::new() }
    }

    pub(crate) fn line(
        &mut self,
        [x1, y1]: [f64; 2],
        [x2, y2]: [f64; 2],
        colour: &str,
        width: f64,
    ) {
        let _ = writeln!(
            self.body,
            r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" stroke="{colour}" stroke-width="{width}"/>"#
        );
    }

    /// A line through points.
    pub(crate) fn path(&mut self, points: &[[f64; 2]], colour: &str, width: f64, dashed: bool) {
        let points: Vec<String> = points.iter().map(|[x, y]| format!("{x:.1},{y:.1}")).collect();
        let dash = if dashed { r#" stroke-dasharray="5 4""# } else { "" };
        let _ = writeln!(
            self.body,
            r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"{dash}/>"#,
            points.join(" ")
        );
    }

    /// A dot with a tooltip.
    pub(crate) fn dot(&mut self, [x, y]: [f64; 2], radius: f64, colour: &str, title: &str) {
        let title = escape(title);
        let _ = writeln!(
            self.body,
            r#"<circle cx="{x:.1}" cy="{y:.1}" r="{radius}" fill="{colour}"><title>{title}</title></circle>"#
        );
    }

    pub(crate) fn rectangle(
        &mut self,
        [x, y]: [f64; 2],
        [width, height]: [f64; 2],
        colour: &str,
        title: &str,
    ) {
        let title = escape(title);
        let _ = writeln!(
            self.body,
            r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" rx="2" fill="{colour}"><title>{title}</title></rect>"#
        );
    }

    pub(crate) fn text(
        &mut self,
        [x, y]: [f64; 2],
        anchor: Anchor,
        size: f64,
        colour: &str,
        text: &str,
    ) {
        self.write_text([x, y], anchor, size, colour, "normal", text);
    }

    pub(crate) fn heading(&mut self, [x, y]: [f64; 2], size: f64, text: &str) {
        self.write_text([x, y], Anchor::Start, size, INK, "600", text);
    }

    fn write_text(
        &mut self,
        [x, y]: [f64; 2],
        anchor: Anchor,
        size: f64,
        colour: &str,
        weight: &str,
        text: &str,
    ) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let text = escape(text);
        let _ = writeln!(
            self.body,
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{colour}">{text}</text>"#
        );
    }

    /// A row of names with their colours.
    pub(crate) fn legend(&mut self, [mut x, y]: [f64; 2], names: &[(String, &str)]) {
        for (name, colour) in names {
            self.dot([x, y - 4.0], 5.0, colour, name);
            self.text([x + 10.0, y], Anchor::Start, 13.0, INK, name);
            x += 30.0 + 7.4 * name.chars().count() as f64;
        }
    }

    pub(crate) fn finish(self) -> String {
        let Drawing { width, height, body } = self;
        format!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0} {height:.0}" width="{width:.0}" height="{height:.0}" font-family="system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif">
<rect width="100%" height="100%" fill="#ffffff"/>
{body}</svg>
"##
        )
    }
}

/// Escapes text for XML.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
