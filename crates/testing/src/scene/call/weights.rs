//! How much keys weigh in the scores: distributions that move row maxima in every way that a
//! softmax must handle.

use flashcore::Shape;
use flashcore::serving::Placement;

use super::given::{KEYS, QUERIES};

/// How much each key weighs in the scores: a factor on its elements, by its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// All keys weigh the same.
    Even,
    /// Keys weigh more towards both ends: from whichever end a kernel walks, maxima rise in the
    /// second half, while the sums of the first half still count.
    Valley,
    /// One key in seven weighs far more than its neighbours, so that exponentials relative to
    /// anything but the maximum overflow.
    Spikes,
    /// Like [`Spikes`](Weights::Spikes), but larger towards both ends, so that later spikes also
    /// exceed earlier ones by far.
    Peaks,
    /// All keys weigh as much as a spike: with few keys, every score of a row may be far below
    /// zero.
    Heavy,
    /// So many even keys and so many heavy ones alternate: of two parts that are combined, the
    /// maximum of one exceeds the other's by far.
    Turns(usize),
    /// The first so many keys are heavy, and the others even: no later part exceeds the first.
    First(usize),
    /// The keys at this distance from a query, before and after it, weigh most: those at the edge
    /// of a wide window.
    Apart(usize),
    /// The fourth key is NaN.
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

    /// With [`Weights::Apart`], returns an element of a query or key: elements are waves over the
    /// position, shifted so that those of a query and a key are in phase only at the distance. Half
    /// of the waves are for keys before a query, the others for keys after it.
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
        // Wavelengths range from a block down to a few keys, none a multiple of another.
        let share = (number % waves) as f32 / waves as f32;
        let angle = 0.05 * 17_f32.powf(share) * (position as f32 + later);
        Some(2.0 * if column.is_multiple_of(2) { angle.cos() } else { angle.sin() })
    }

    /// Returns the factor of each row of a tensor, by the row's position in its sequence.
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
