//! How much keys weigh in the scores.

use flashcore::Shape;
use flashcore::serving::Placement;

use super::given::{KEYS, QUERIES};

/// How much keys weigh in the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// All the same.
    Even,
    /// More towards both ends: from wherever a kernel walks, maxima rise once it is half through,
    /// and what it has so far still counts.
    Valley,
    /// Some far more than their neighbours, so that exponentials of anything but the maximum
    /// overflow.
    Spikes,
    /// The same, more towards both ends: later ones are far beyond earlier ones too.
    Peaks,
    /// All as much as those: of few keys, every score of a row may be far below zero.
    Heavy,
    /// So many even and so many as much as those, by turns: of two parts that become one, one is
    /// far beyond the other.
    Turns(usize),
    /// So many as much as those, and the others even: no part that comes later is beyond the first.
    First(usize),
    /// Those so far from a query, before it and behind it, more than all others: the edge of a wide window.
    Apart(usize),
    /// The fourth is not a number.
    Nan,
}

impl Weights {
    fn of(self, position: usize, length: usize) -> f32 {
        match self {
            Weights::Even | Weights::Apart(_) => 1.0,
            Weights::Valley => 1.0 + 3.0 * (2.0 * position as f32 / length as f32 - 1.0).abs(),
            Weights::Spikes if position % 7 == 3 => 60.0,
            Weights::Peaks if position % 7 == 3 => 25.0 * Weights::Valley.of(position, length),
            Weights::Spikes | Weights::Peaks => 1.0,
            Weights::Heavy => 60.0,
            Weights::Turns(of) if position / of % 2 == 1 => 60.0,
            Weights::First(of) if position < of => 60.0,
            Weights::Turns(_) | Weights::First(_) => 1.0,
            Weights::Nan if position == 3 => f32::NAN,
            Weights::Nan => 1.0,
        }
    }

    /// An element of a query or of a key, where scores are to depend on how far apart the two are: waves,
    /// which meet at the distance alone. Half of them are for keys before a query.
    pub(super) fn wave(
        self,
        seed: u64,
        position: usize,
        column: usize,
        columns: usize,
    ) -> Option<f32> {
        let Weights::Apart(distance) = self else { return None };
        let waves = (columns / 4).max(1);
        let number = column / 2;
        let later = match seed {
            QUERIES => 0.0,
            KEYS if number < waves => distance as f32,
            KEYS => -(distance as f32),
            _ => return None,
        };
        // From waves as long as a block down to a few keys, none a multiple of another.
        let share = (number % waves) as f32 / waves as f32;
        let angle = 0.05 * 17_f32.powf(share) * (position as f32 + later);
        Some(2.0 * if column.is_multiple_of(2) { angle.cos() } else { angle.sin() })
    }

    /// Those of a tensor's rows, by where each is in its sequence.
    pub(super) fn of_rows(self, shape: Shape, placement: Option<&Placement>) -> Vec<f32> {
        let rows = 0..shape.batch * shape.length;
        let mut all: Vec<f32> = rows.map(|row| self.of(row % shape.length, shape.length)).collect();
        let sequences = placement.map_or(0, Placement::sequences);
        for (sequence, placement) in (0..sequences).zip(placement.into_iter().cycle()) {
            let length = placement.length(sequence);
            for position in 0..length {
                let (entry, row) = placement.locate(sequence, position);
                all[entry * shape.length + row] = self.of(position, length);
            }
        }
        all
    }
}
