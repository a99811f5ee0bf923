//! The rules of attention that a kernel is built for, namely the kind of mask and the score rules,
//! and the numbers of a mask on the host.

use std::ops::Range;

use super::function::Function;

/// The kind of a mask: what it hides. The last query has the position of the last key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MaskKind {
    /// Hides nothing.
    Dense,
    /// Hides keys after the query's position.
    Causal,
    /// Hides keys too far before or after the query's position. The window is passed at launch.
    Local,
    /// Hides the same, and keys of other chunks of positions than the query's own.
    Chunked,
}

impl MaskKind {
    /// Returns the name that configurations use.
    pub const fn name(self) -> &'static str {
        match self {
            MaskKind::Dense => "dense",
            MaskKind::Causal => "causal",
            MaskKind::Local => "local",
            MaskKind::Chunked => "chunked",
        }
    }

    /// Returns whether the mask is a window, which may also hide keys at the beginning.
    pub const fn is_window(self) -> bool {
        matches!(self, MaskKind::Local | MaskKind::Chunked)
    }
}

/// The rules of attention that a kernel is built for. Their numbers are passed at launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rules {
    /// The kind of mask.
    pub mask: MaskKind,
    /// Whether scores are capped: `cap * tanh(score / cap)`.
    pub softcap: bool,
    /// Whether scores decrease linearly with the distance between query and key (ALiBi).
    pub alibi: bool,
    /// Whether each query head has a sink: a logit that is part of the softmax's sum and adds
    /// nothing to the output.
    pub sinks: bool,
    /// A mask function, which hides further keys.
    pub mask_function: Option<Function>,
    /// A score function, which is applied after scale, softcap and ALiBi.
    pub score_function: Option<Function>,
}

impl Rules {
    /// Every key is visible, and scores are only scaled.
    pub const DENSE: Rules = Rules {
        mask: MaskKind::Dense,
        softcap: false,
        alibi: false,
        sinks: false,
        mask_function: None,
        score_function: None,
    };
    /// A query sees the keys up to its position.
    pub const CAUSAL: Rules = Rules { mask: MaskKind::Causal, ..Rules::DENSE };
    /// A query sees a window of keys.
    pub const LOCAL: Rules = Rules { mask: MaskKind::Local, ..Rules::DENSE };
    /// A window with softcap, ALiBi and sinks.
    pub const EVERY: Rules = Rules { softcap: true, alibi: true, sinks: true, ..Rules::LOCAL };

    /// Returns the same rules with a softcap.
    pub const fn capped(self) -> Rules {
        Rules { softcap: true, ..self }
    }

    /// Returns whether anything but the scale changes scores. A sink does not.
    pub const fn changes_scores(&self) -> bool {
        self.softcap || self.alibi || self.score_function.is_some()
    }

    /// Returns whether the derivative of a score with respect to QK^T is more than the scale: with
    /// a softcap, or with a score function that does more than add.
    pub fn has_score_derivative(&self) -> bool {
        self.softcap || self.score_function.is_some_and(|function| !function.has_slope_one())
    }

    /// Returns whether the softcap is the last rule that changes scores.
    pub fn caps_last(&self) -> bool {
        self.softcap && !self.alibi && self.score_function.is_none()
    }

    /// Returns whether scores have gradients: kernels differentiate a softcap or a score function,
    /// not one after the other.
    pub const fn has_gradients(&self) -> bool {
        !(self.softcap && self.score_function.is_some())
    }

    /// Returns the functions, the mask's first.
    pub fn functions(&self) -> impl Iterator<Item = Function> + use<> {
        self.mask_function.into_iter().chain(self.score_function)
    }

    /// Returns whether the rules are a dense or a causal mask and nothing else.
    pub fn is_plain(&self) -> bool {
        [Rules::DENSE, Rules::CAUSAL].contains(self)
    }

    /// Returns the name that configurations use.
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

    /// Returns the part of the name that comes after the mask's.
    pub(crate) fn extras(&self) -> String {
        let extras = [(self.softcap, "_softcap"), (self.alibi, "_alibi"), (self.sinks, "_sinks")];
        let extras: String = extras.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
        let functions = self.functions().map(|function| format!("_{}", function.label()));
        extras + &functions.collect::<String>()
    }
}

/// How the sequences of a batch are stored in their tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Batch {
    /// Equal lengths, each sequence in a batch entry of its own.
    Equal,
    /// Ragged: each sequence has its own length and first row. Tiles come from the schedule that
    /// the [`Sequencer`](crate::Sequencer) wrote.
    Ragged,
    /// Ragged, with keys and values in pages that a block table names.
    Paged,
}

impl Batch {
    /// Returns the name that configurations use.
    pub const fn name(self) -> &'static str {
        match self {
            Batch::Equal => "equal",
            Batch::Ragged => "ragged",
            Batch::Paged => "paged",
        }
    }

    /// Returns the suffix of a kernel's name for this kind of batch.
    pub(crate) const fn suffix(self) -> &'static str {
        match self {
            Batch::Equal => "",
            Batch::Ragged => "_ragged",
            Batch::Paged => "_paged",
        }
    }
}

/// The numbers of a mask: its window and chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    /// Number of keys before its position that a query sees.
    pub left: i32,
    /// Number of keys after its position that a query sees.
    pub right: i32,
    /// Length of a chunk in positions: a query sees only keys of its own chunk.
    pub chunk: Option<u32>,
}

impl Window {
    /// A reach beyond every position. Positions, reaches and chunks are at most this, so that their
    /// sums fit 32 bits.
    pub const OPEN: i32 = 1 << 29;
    /// Every key is seen.
    pub const DENSE: Window = Window { left: Window::OPEN, right: Window::OPEN, chunk: None };
    /// Keys up to the position are seen.
    pub const CAUSAL: Window = Window { right: 0, ..Window::DENSE };

    /// Returns the keys that a query at a position sees, of `keys` keys.
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

    /// Returns the keys from the first that a row at position `first` sees to the last that one at
    /// `last` sees: the keys of a tile of rows, since neither end decreases with the position.
    pub fn tile_keys(&self, first: i64, last: i64, keys: u32) -> Range<u32> {
        let chunk = self.chunk.map(|chunk| i64::from(chunk.max(1)));
        let chunk_begin = chunk.map_or(0, |chunk| first.div_euclid(chunk) * chunk);
        let chunk_end = chunk.map_or(i64::MAX, |chunk| (last.div_euclid(chunk) + 1) * chunk);
        let begin = (first - i64::from(self.left)).max(chunk_begin).max(0);
        let end = (last + i64::from(self.right) + 1).min(chunk_end).min(keys.into());
        if begin < end { begin as u32..end as u32 } else { 0..0 }
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
