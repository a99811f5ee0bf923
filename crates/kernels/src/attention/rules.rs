//! What a kernel of attention is built for: its mask and what changes scores; and on the host the
//! numbers of a mask.

use std::ops::Range;

use super::function::Function;
use crate::Divisor;

/// What a mask hides. A query stands at its position among the keys: the last query at the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MaskKind {
    /// Nothing.
    Dense,
    /// Keys after the query's position.
    Causal,
    /// Keys too far before or after the query's position: a window, passed at launch.
    Local,
    /// The same, and keys of other chunks of positions than the query's own.
    Chunked,
}

impl MaskKind {
    /// For names of configurations.
    pub const fn name(self) -> &'static str {
        match self {
            MaskKind::Dense => "dense",
            MaskKind::Causal => "causal",
            MaskKind::Local => "local",
            MaskKind::Chunked => "chunked",
        }
    }

    /// Whether it is a window, so that keys before some first are hidden too.
    pub const fn is_window(self) -> bool {
        matches!(self, MaskKind::Local | MaskKind::Chunked)
    }
}

/// The rules of attention that a kernel is built for; their numbers are passed at launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rules {
    /// Which keys a query does not see.
    pub mask: MaskKind,
    /// Whether scores are capped: `cap * tanh(score / cap)`.
    pub softcap: bool,
    /// Whether scores fall with the distance between query and key.
    pub alibi: bool,
    /// Whether each head has a sink: a score that takes its part of the sum and adds nothing to
    /// the output.
    pub sinks: bool,
    /// A function that hides further keys.
    pub mask_function: Option<Function>,
    /// A function that changes scores after everything else has.
    pub score_function: Option<Function>,
}

impl Rules {
    /// Every key as it is.
    pub const DENSE: Rules = Rules {
        mask: MaskKind::Dense,
        softcap: false,
        alibi: false,
        sinks: false,
        mask_function: None,
        score_function: None,
    };
    /// A query sees keys up to its position.
    pub const CAUSAL: Rules = Rules { mask: MaskKind::Causal, ..Rules::DENSE };
    /// A query sees a window of keys.
    pub const LOCAL: Rules = Rules { mask: MaskKind::Local, ..Rules::DENSE };
    /// A window, and every rule of the scores.
    pub const EVERY: Rules = Rules { softcap: true, alibi: true, sinks: true, ..Rules::LOCAL };

    /// The same rules over capped scores.
    pub const fn capped(self) -> Rules {
        Rules { softcap: true, ..self }
    }

    /// Whether products with keys are more than scaled. A sink leaves them as they are.
    pub const fn changes_scores(&self) -> bool {
        self.softcap || self.alibi || self.score_function.is_some()
    }

    /// Whether the gradient of a score is more than that of its product with the scale: that of a
    /// cap, or of a function that does more than add.
    pub fn has_slopes(&self) -> bool {
        self.softcap || self.score_function.is_some_and(|function| !function.has_slope_one())
    }

    /// The functions, mask first.
    pub fn functions(&self) -> impl Iterator<Item = Function> + use<> {
        self.mask_function.into_iter().chain(self.score_function)
    }

    /// Whether there is nothing beyond a causal mask.
    pub fn is_plain(&self) -> bool {
        [Rules::DENSE, Rules::CAUSAL].contains(self)
    }

    /// For names of configurations.
    ///
    /// ```
    /// use flashcore_kernels::attention::Rules;
    ///
    /// assert_eq!(Rules::CAUSAL.name(), "causal");
    /// assert_eq!(Rules { sinks: true, ..Rules::LOCAL }.capped().name(), "local_softcap_sinks");
    /// ```
    pub fn name(&self) -> String {
        self.mask.name().to_owned() + &self.extras()
    }

    /// What there is beside the mask.
    pub(crate) fn extras(&self) -> String {
        let extras = [(self.softcap, "_softcap"), (self.alibi, "_alibi"), (self.sinks, "_sinks")];
        let extras: String = extras.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
        let functions = self.functions().map(|function| format!("_{}", function.label()));
        extras + &functions.collect::<String>()
    }
}

/// How the sequences of a batch lie in their tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Batch {
    /// All of the same length, each in a batch entry of its own.
    Equal,
    /// Of lengths of their own, from rows of their own on: tiles come from the schedule that the
    /// [`Sequencer`](crate::Sequencer) wrote.
    Ragged,
    /// The same, with keys and values in pages that a block table names.
    Paged,
}

impl Batch {
    /// For names of configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Batch::Equal => "equal",
            Batch::Ragged => "ragged",
            Batch::Paged => "paged",
        }
    }
}

/// The numbers of a mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    /// Keys before its position that a query sees.
    pub left: i32,
    /// Keys after its position that a query sees.
    pub right: i32,
    /// Positions of a chunk: a query sees only keys of its own.
    pub chunk: Option<u32>,
}

impl Window {
    /// A reach beyond every position. Positions, reaches and chunks are no more than this, so that
    /// their sums fit 32 bits.
    pub const OPEN: i32 = 1 << 29;
    /// Every key is seen.
    pub const DENSE: Window = Window { left: Window::OPEN, right: Window::OPEN, chunk: None };
    /// Keys up to the position are seen.
    pub const CAUSAL: Window = Window { right: 0, ..Window::DENSE };

    /// The keys that a query at a position sees.
    ///
    /// ```
    /// use flashcore_kernels::attention::Window;
    ///
    /// assert_eq!(Window::CAUSAL.keys(4, 100), 0..5);
    /// assert_eq!(Window { left: 2, ..Window::CAUSAL }.keys(4, 100), 2..5);
    /// assert_eq!(Window { chunk: Some(4), ..Window::DENSE }.keys(5, 100), 4..8);
    /// ```
    pub fn keys(&self, position: i64, keys: u32) -> Range<u32> {
        self.tile_keys(position, position, keys)
    }

    /// The keys from the first that a row at the position `first` sees to the last that one at
    /// `last` sees: those of a tile of rows, for both ends only move on with the position.
    pub fn tile_keys(&self, first: i64, last: i64, keys: u32) -> Range<u32> {
        let chunk = self.chunk.map(|chunk| i64::from(chunk.max(1)));
        let chunk_begin = chunk.map_or(0, |chunk| first.div_euclid(chunk) * chunk);
        let chunk_end = chunk.map_or(i64::MAX, |chunk| (last.div_euclid(chunk) + 1) * chunk);
        let begin = (first - i64::from(self.left)).max(chunk_begin).max(0);
        let end = (last + i64::from(self.right) + 1).min(chunk_end).min(keys.into());
        if begin < end { begin as u32..end as u32 } else { 0..0 }
    }

    /// What a launch passes for the chunk.
    pub fn chunk_divisor(&self) -> Divisor {
        let open = Window::OPEN as u32;
        Divisor::new(self.chunk.unwrap_or(open).clamp(1, open))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every condition as FlashAttention writes it, key by key.
    fn sees(window: &Window, position: i64, key: i64) -> bool {
        let chunk = window.chunk.map(i64::from);
        key >= position - i64::from(window.left)
            && key <= position + i64::from(window.right)
            && chunk.is_none_or(|chunk| key.div_euclid(chunk) == position.div_euclid(chunk))
    }

    fn windows() -> impl Iterator<Item = Window> {
        let reaches = [-2, 0, 1, 5, Window::OPEN];
        let chunks = [None, Some(1), Some(3), Some(8), Some(100)];
        reaches.into_iter().flat_map(move |left| {
            reaches.into_iter().flat_map(move |right| {
                chunks.into_iter().map(move |chunk| Window { left, right, chunk })
            })
        })
    }

    #[test]
    fn a_row_sees_what_the_definition_says() {
        for window in windows() {
            for keys in [0, 1, 7, 20] {
                for position in -10..25 {
                    let seen: Vec<u32> =
                        (0..keys).filter(|key| sees(&window, position, (*key).into())).collect();
                    let range = window.keys(position, keys);
                    assert!(!range.is_empty() || range == (0..0));
                    assert_eq!(range.collect::<Vec<_>>(), seen, "{window:?}, {position}, {keys}");
                }
            }
        }
    }

    #[test]
    fn a_tile_sees_what_its_rows_see() {
        for window in windows() {
            for (first, last) in [(-9, 3), (-9, -2), (0, 0), (2, 12), (9, 19)] {
                let tile = window.tile_keys(first, last, 20);
                for position in first..=last {
                    let row = window.keys(position, 20);
                    assert!(row.clone().all(|key| tile.contains(&key)), "{window:?}, {position}");
                }
            }
        }
    }
}
