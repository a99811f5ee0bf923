//! The documentation of the simulator mentions every hazard and every measure.

use flashcore_sim::{HazardKind, Measure};

const PAGE: &str = include_str!("../../../docs/simulator.md");

#[test]
fn every_hazard_has_a_row() {
    for kind in HazardKind::ALL {
        assert!(PAGE.contains(&format!("\n| {kind} |")), "no row for `{kind}`");
    }
}

#[test]
fn every_measure_is_explained() {
    let rows: Vec<&str> = PAGE.lines().filter(|line| line.starts_with('|')).collect();
    for measure in Measure::ALL {
        // Measures that differ in their last word share a row.
        let mut words = measure.name().split(' ');
        let (Some(first), last) = (words.next(), words.next_back().unwrap_or_default()) else {
            continue;
        };
        let explained = rows.iter().any(|row| row.contains(first) && row.contains(last));
        assert!(explained, "nothing on `{measure}`");
    }
}
