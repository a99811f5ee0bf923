//! Scenes of the sequencer, the kernel that orders the tiles of a ragged batch, as launched before
//! prefill and before the backward pass.
//!
//! Tiles of equal cost may come in any order, but a scene expects one: only batches without equal
//! costs are certain to pass.

use std::cmp::Reverse;

use flashcore::plan::Source;
use flashcore::{Mask, Problem};
use kernels::backward::tuned_backward;
use kernels::forward::every_prefill;
use kernels::parameter::Workspace;
use kernels::sequencer::{CHUNK as TOGETHER, Tiles};
use kernels::{
    Backward, Batch, Configuration, Forward, MaskKind, Prefill, Rules, Sequencer, Window,
};
use ptx::Element;

use super::call::Staged;
use super::{Call, Expected, PlacementKind, Ragged, Scene, SceneError};

/// The chunk sizes for a kernel with a chunked mask: for short sequences, and for long ones, whose
/// tiles would otherwise have equal costs.
const CHUNK: usize = 50;
const LONG_CHUNK: usize = 1700;

impl Scene {
    /// Returns a small batch with sequences without queries and without keys, and no two tiles of
    /// equal cost.
    pub fn sequencer_batch() -> Ragged {
        let keys = vec![5, 9, 130, 64, 0, 143, 70];
        Ragged {
            query_place: PlacementKind::Packed,
            ..Ragged::new(vec![3, 0, 129, 64, 1, 200, 65], keys).over(PlacementKind::Padded)
        }
    }

    /// Creates a scene that orders the query tiles of a batch, under a causal mask or one that
    /// looks a little ahead; tiles have 64 or 128 rows.
    pub fn sequencer(
        sequencer: Sequencer,
        ragged: &Ragged,
        tile_rows: u32,
    ) -> Result<Self, SceneError> {
        let mask = match sequencer.tiles {
            Tiles::Queries(mask) => mask,
            Tiles::Keys | Tiles::KeysOrQueries => return Scene::key_sequencer(sequencer, ragged),
        };
        let Prefill { tile, .. } = every_prefill()[0];
        let rules = Rules { mask, ..Rules::LOCAL };
        // Heads are narrow because the sequencer never reads the keys.
        let (head_dim, value_head_dim) = (16, 16);
        let tile = Forward { head_dim, value_head_dim, ..tile };
        let tile = Forward { warpgroups: tile_rows / 64, ping_pong: false, rules, ..tile };
        let prefill = Configuration::Prefill(Prefill { tile, page_rows: None, single_tile: false });
        let chunk = match mask {
            MaskKind::Chunked if ragged.keys.iter().any(|keys| *keys > 500) => LONG_CHUNK,
            MaskKind::Chunked => CHUNK,
            _ => 0,
        };
        // In short chunks rows see ahead, so that the end of a chunk matters.
        let right = if chunk == CHUNK { 7 } else { 0 };
        let mask = Mask::window(None, Some(right)).with_chunk(chunk);
        let call = Call::ragged(prefill, ragged.clone(), [1, 1]).with(|it| it.with_mask(mask));
        let (right, chunk) = (right as i32, (chunk > 0).then_some(chunk as u32));
        let window = Window { right, chunk, ..Window::CAUSAL };
        let words = schedule(tile_rows, &window, &slices(ragged)?);
        Scene::first_launch(sequencer, call, words, format!("{ragged}, tiles of {tile_rows}"))
    }

    /// Creates a scene that orders key tiles of 128 keys, as before the backward pass.
    fn key_sequencer(sequencer: Sequencer, ragged: &Ragged) -> Result<Self, SceneError> {
        let shares = sequencer.tiles == Tiles::KeysOrQueries;
        let backward = tuned_backward(Element::BF16, 64, 64, Rules::CAUSAL)
            .map(|it| Backward { batch: Batch::Ragged, shares, ..it })
            .ok_or_else(|| SceneError::Size("no backward pass is tuned".to_owned()))?;
        let call = Call::ragged(Configuration::Backward(backward), ragged.clone(), [1, 1]);
        let words = key_schedule(backward.key_block(), shares, &slices(ragged)?);
        Scene::first_launch(sequencer, call, words, format!("{ragged}, tiles of keys"))
    }

    /// Creates a scene of the first launch of a call, which writes a schedule.
    fn first_launch(
        sequencer: Sequencer,
        call: Call,
        mut words: Vec<u32>,
        size: String,
    ) -> Result<Self, SceneError> {
        // List entries that equal their bound are replaced by values beyond it, which kernels must
        // clamp.
        let call = Call { hostile: true, ..call };
        let inputs = call.inputs()?;
        let Staged { memory, buffers, mut steps, .. } = call.stage(&inputs)?;
        let schedule = buffers[&Source::Workspace(Workspace::Schedule)];
        let step = steps.swap_remove(0);
        if step.program.name != sequencer.name() {
            let (name, other) = (sequencer.name(), step.program.name);
            return Err(SceneError::Size(format!("{name}: {other} is launched first")));
        }
        words.resize(memory.bytes(schedule).len() / 4, 0);
        // Words are compared by their bits, read as f32: they are distinct small floats.
        let exact: Vec<f64> = words.iter().map(|word| f32::from_bits(*word).into()).collect();
        let results = vec![Expected::within(0.0, "schedule", schedule, Element::F32, exact)];
        Ok(Scene::single_launch(step, memory, results, size))
    }
}

/// Where the rows of a sequence are; the words of a record after the sequence and the first row.
struct Slice {
    query_start: u32,
    queries: u32,
    key_start: u32,
    keys: u32,
    output_start: u32,
    lse_start: u32,
}

impl Slice {
    /// Returns the record of the tile that begins at `first_row`.
    fn record(&self, sequence: u32, first_row: u32) -> [u32; 8] {
        let Slice { query_start, queries, key_start, keys, output_start, lse_start } = *self;
        [sequence, first_row, query_start, queries, key_start, keys, output_start, lse_start]
    }
}

/// Returns the schedule of tiles of `tile_rows` queries that see keys through a window, in 32-bit words.
fn schedule(tile_rows: u32, window: &Window, sequences: &[Slice]) -> Vec<u32> {
    let mut records: Vec<[u32; 8]> = Vec::new();
    for (chunk, sequences) in (0..).zip(sequences.chunks(TOGETHER as usize)) {
        let top = sequences.iter().map(|slice| slice.keys).max().unwrap_or(0);
        let mut tiles = Vec::new();
        for (index, slice) in (chunk * TOGETHER..).zip(sequences) {
            let Slice { queries, keys, .. } = *slice;
            for first_row in (0..queries).step_by(tile_rows as usize) {
                let offset = i64::from(keys) - i64::from(queries);
                let last = i64::from((first_row + tile_rows).min(queries)) - 1 + offset;
                let seen = window.tile_keys(i64::from(first_row) + offset, last, keys);
                let bin = seen.len() as u32 / (top / TOGETHER + 1);
                tiles.push((bin, slice.record(index, first_row)));
            }
        }
        tiles.sort_by_key(|(bin, _)| Reverse(*bin));
        records.extend(tiles.into_iter().map(|(_, record)| record));
    }
    with_header(&records)
}

/// Returns the schedule of tiles of `tile_rows` keys; `or_queries` as in [`Tiles::KeysOrQueries`].
fn key_schedule(tile_rows: u32, or_queries: bool, sequences: &[Slice]) -> Vec<u32> {
    let mut records: Vec<[u32; 8]> = Vec::new();
    for (chunk, sequences) in (0..).zip(sequences.chunks(TOGETHER as usize)) {
        let top = sequences.iter().map(|slice| slice.queries).max().unwrap_or(0);
        let mut order: Vec<(u32, &Slice)> = (chunk * TOGETHER..).zip(sequences).collect();
        order.sort_by_key(|(_, slice)| Reverse(slice.queries / (top / TOGETHER + 1)));
        for (index, slice) in order {
            let least = if or_queries { slice.queries.min(1) } else { 0 };
            let first_rows = (0..slice.keys.max(least)).step_by(tile_rows as usize);
            records.extend(first_rows.map(|first_row| slice.record(index, first_row)));
        }
    }
    with_header(&records)
}

/// Returns a schedule of these records, with none claimed.
fn with_header(records: &[[u32; 8]]) -> Vec<u32> {
    [vec![records.len() as u32, 0, 0, 0], records.concat()].concat()
}

/// Returns where the queries and keys of each sequence are, with one head and not in pages.
fn slices(ragged: &Ragged) -> Result<Vec<Slice>, SceneError> {
    let Ragged { queries, keys, query_place, key_place, padding } = ragged;
    if matches!(query_place, PlacementKind::Entries | PlacementKind::Paged(_))
        || matches!(key_place, PlacementKind::Paged(_))
    {
        return Err(SceneError::Size("queries and keys are not in pages".to_owned()));
    }
    let longest = |lengths: &[usize]| lengths.iter().copied().max().unwrap_or(0).max(1);
    let skipped = |sequence: usize| padding.get(sequence).copied().unwrap_or(0);
    let ends: Vec<usize> = (0..).zip(keys).map(|(at, keys)| keys + skipped(at)).collect();
    let refused = |error: flashcore::Error| SceneError::Size(error.to_string());
    let (_, (places, _)) = ragged.placements(&Problem::new(1, 1, 1, 8)).map_err(refused)?;
    let start = |place: PlacementKind, lengths: &[usize], entry: usize, sequence: usize| match place
    {
        PlacementKind::Packed => lengths[..sequence].iter().sum(),
        PlacementKind::PackedWithGaps => lengths[..sequence].iter().sum::<usize>() + sequence,
        _ => entry * longest(lengths),
    };
    let slice = |sequence: usize| {
        let entry = places.entry(sequence).unwrap_or(sequence);
        let keys = start(*key_place, &ends, entry, sequence) + skipped(sequence);
        let start = start(*query_place, queries, sequence, sequence) as u32;
        Slice {
            query_start: start,
            queries: ragged.queries[sequence] as u32,
            key_start: keys as u32,
            keys: ragged.keys[sequence] as u32,
            output_start: start,
            lse_start: start,
        }
    };
    Ok((0..ragged.queries.len()).map(slice).collect())
}
