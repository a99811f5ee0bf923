//! Mutation scenes of the append kernel, which writes new tokens to caches, and of the widen
//! kernel, which converts 8-bit caches to 16 bits.

use kernels::{Append, Widen};

use super::{AppendSize, Call, PlacementKind, Ragged, Scene, SceneError};

pub(super) fn append(it: &Append) -> Result<Vec<Scene>, SceneError> {
    let unordered = AppendSize { in_order: false, ..AppendSize::small() };
    let hostile = AppendSize {
        lengths: vec![0, 5, 9, 6],
        hostile: true,
        in_place: false,
        ..AppendSize::small()
    };
    // The first sequence has no new tokens, so that the second starts at 0 too.
    let late = AppendSize {
        lengths: vec![3, 0, 5, 9],
        new: vec![0, 4, 0, 2],
        queries: vec![0, 3, 0, 1],
        ..hostile.clone()
    };
    let unlisted =
        AppendSize { new: vec![3; 4], queries: vec![2; 4], listed: false, ..AppendSize::small() };
    let long = AppendSize {
        lengths: vec![0, 5, 9, 7, 31, 2],
        new: vec![40, 1, 0, 4, 3, 17],
        key_heads: 2,
        page_size: 3,
        capacity: 33,
        heads: 4,
        queries: vec![7, 3, 0, 2, 5, 33],
        in_place: false,
        ..AppendSize::small()
    };
    let used = AppendSize { listed: false, hostile: true, ..AppendSize::small() };
    // One token per sequence and one head, so that there are divisions by 1.
    let single = AppendSize {
        lengths: vec![3, 0],
        new: vec![1, 1],
        queries: vec![1, 1],
        key_heads: 1,
        heads: 1,
        page_size: 1,
        listed: false,
        ..AppendSize::small()
    };
    // Rows before it and after the last sequence belong to none.
    let begun = AppendSize { hostile: false, spare: 2, ..late.clone() };
    let many = AppendSize { key_heads: 1, heads: 2, ..AppendSize::many() };
    [unordered, hostile, late, begun, unlisted, used, single, long, many]
        .iter()
        .map(|size| Scene::append(*it, size))
        .collect()
}

/// Returns scenes of the widen kernel: sequences that end within a page or a block of positions, or
/// exactly with it.
pub(super) fn widen(it: &Widen) -> Result<Vec<Scene>, SceneError> {
    let call = Call::widened(it)?;
    let place = if it.paged { PlacementKind::Paged(16) } else { PlacementKind::Entries };
    let ragged = Ragged::new(vec![1, 2, 1], vec![128, 65, 16]).over(place);
    let padded = Ragged { padding: vec![0, 3, 5], ..ragged.clone() };
    let apart = Call::ragged(call.kernel, ragged, [2, 2]).over_cache(it.cache);
    let behind = Call::ragged(call.kernel, padded, [4, 2]).over_cache(it.cache);
    let hostile = Call { hostile: true, ..call };
    [apart, behind, hostile].iter().map(|call| call.scene_of(1)).collect()
}
