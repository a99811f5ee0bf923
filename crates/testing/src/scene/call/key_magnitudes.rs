//! Magnitudes of keys: distributions that move row maxima in every way that a softmax must handle.

use flashcore::Shape;
use flashcore::serving::Placement;

use super::inputs::{KEYS, QUERIES};

/// The magnitude of each key, which its scores follow: a factor on its elements, by its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyMagnitudes {
    /// All keys have the same.
    Uniform,
    /// Keys grow towards both ends: from whichever end a kernel walks, maxima rise in the second
    /// half, while the sums of the first half still count.
    Valley,
    /// One key in seven is far larger than its neighbours, so that exponentials relative to
    /// anything but the maximum overflow.
    Spikes,
    /// Like [`Spikes`](KeyMagnitudes::Spikes), but larger towards both ends, so that later spikes
    /// also exceed earlier ones by far.
    Peaks,
    /// All keys are as large as a spike: with few keys, every score of a row may be far below zero.
    Large,
    /// So many plain keys and so many large ones alternate: of two parts that are combined, the
    /// maximum of one exceeds the other's by far.
    Alternating(usize),
    /// The first so many keys are large, and the others plain: no later part exceeds the first.
    LargeFirst(usize),
    /// The keys at this distance from a query, before and after it, have the largest scores: those
    /// at the edge of a wide window.
    AtDistance(usize),
    /// The fourth key is NaN.
    Nan,
}

impl KeyMagnitudes {
    fn of(self, position: usize, length: usize) -> f32 {
        match self {
            KeyMagnitudes::Uniform | KeyMagnitudes::AtDistance(_) => 1.0,
            KeyMagnitudes::Valley => {
                1.0 + 3.0 * (2.0 * position as f32 / length as f32 - 1.0).abs()
            }
            KeyMagnitudes::Spikes if position % 7 == 3 => 60.0,
            KeyMagnitudes::Peaks if position % 7 == 3 => {
                25.0 * KeyMagnitudes::Valley.of(position, length)
            }
            KeyMagnitudes::Spikes | KeyMagnitudes::Peaks => 1.0,
            KeyMagnitudes::Large => 60.0,
            KeyMagnitudes::Alternating(of) if position / of % 2 == 1 => 60.0,
            KeyMagnitudes::LargeFirst(of) if position < of => 60.0,
            KeyMagnitudes::Alternating(_) | KeyMagnitudes::LargeFirst(_) => 1.0,
            KeyMagnitudes::Nan if position == 3 => f32::NAN,
            KeyMagnitudes::Nan => 1.0,
        }
    }

    /// With [`KeyMagnitudes::AtDistance`], returns an element of a query or key: elements are waves
    /// over the position, shifted so that those of a query and a key are in phase only at the
    /// distance. Half of the waves are for keys before a query, the others for keys after it.
    pub(super) fn wave(
        self,
        seed: u64,
        position: usize,
        column: usize,
        columns: usize,
    ) -> Option<f32> {
        let KeyMagnitudes::AtDistance(distance) = self else { return None };
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
