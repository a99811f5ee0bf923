//! Hostile lists: lengths, starts, paddings and entries that are out of bounds, which kernels must
//! clamp without a change of results.

use flashcore::Problem;
use kernels::parameter::List;

/// Replaces numbers at the bounds of a list by numbers beyond them.
pub(super) fn exceed(list: List, words: &mut [u32], problem: &Problem, entries: usize) {
    let most = match list {
        List::KeyLengths => problem.key_length as u32,
        List::QueryLengths => problem.query_length as u32,
        List::BatchIndex | List::BlockTable => entries as u32 - 1,
        List::QueryStarts | List::KeyStarts => words.last().copied().unwrap_or(0),
        List::LeftPadding => u32::MAX,
        _ => return,
    };
    out_of_bounds(words, most);
}

/// Makes the lengths of sequences that fill their room (from one start to the next) far too long,
/// and also that of a first sequence without room.
pub(super) fn fill(list: List, words: &mut [u32], other: impl Fn(List) -> Option<Vec<u32>>) {
    let starts = match list {
        List::QueryLengths => other(List::QueryStarts),
        List::KeyLengths => other(List::KeyStarts),
        _ => None,
    };
    let starts = starts.unwrap_or_default();
    for (index, (word, room)) in words.iter_mut().zip(starts.windows(2)).enumerate() {
        if (*word > 0 || index == 0) && *word == room[1] - room[0] {
            *word += 1_000_000;
        }
    }
}

/// Makes each sequence that is empty by its list of lengths start after its end.
pub(super) fn cross(words: &mut [u32], list: List, other: impl Fn(List) -> Option<Vec<u32>>) {
    let lengths = match list {
        List::QueryStarts => other(List::QueryLengths),
        List::KeyStarts => other(List::KeyLengths),
        _ => None,
    };
    for (sequence, length) in lengths.unwrap_or_default().into_iter().enumerate() {
        // The room of the sequence before it grows by one row, which it does not use.
        if length == 0 && sequence > 0 && sequence + 2 < words.len() {
            words[sequence] += 1;
        }
    }
}

/// Replaces 0 by a negative number, and `most` by a far larger one.
pub(in crate::scene) fn out_of_bounds(words: &mut [u32], most: u32) {
    for word in words {
        if *word == most {
            *word += 1_000_000;
        } else if *word == 0 {
            *word = -5i32 as u32;
        }
    }
}
