//! Scenes of the kernel that puts the tiles of a ragged batch in order, under a causal mask.
//!
//! Tiles that cost the same come in any order, and a scene expects one: it passes for certain only
//! where there are none.

use kernels::Sequencer;
use kernels::sequencer::Slice;
use ptx::Element;

use super::arguments::Arguments;
use super::{Expected, Scene, SceneError};
use crate::{Argument, Memory};

/// All keys up to a query's position.
const WINDOW: [i32; 2] = [1 << 29, 0];

/// The lengths of a batch; queries are packed, and keys lie in batch entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RaggedSize {
    /// Queries of each sequence.
    pub queries: Vec<u32>,
    /// Keys of each sequence.
    pub keys: Vec<u32>,
    /// Rows of a tile.
    pub tile_rows: u32,
}

impl RaggedSize {
    /// Small: sequences without queries and without keys, and no two tiles that cost the same.
    pub fn small() -> Self {
        RaggedSize {
            queries: vec![3, 0, 129, 64, 1, 200, 65],
            keys: vec![5, 9, 130, 64, 0, 143, 70],
            tile_rows: 64,
        }
    }
}

impl Scene {
    /// The tiles of a batch in order.
    pub fn sequencer(sequencer: Sequencer, size: &RaggedSize) -> Result<Self, SceneError> {
        let program = sequencer.program()?;
        let RaggedSize { queries, keys, tile_rows } = size;
        if queries.is_empty() || queries.len() != keys.len() || *tile_rows == 0 {
            return Err(SceneError::Size("there are no sequences".to_owned()));
        }
        let batch = queries.len() as u32;
        let starts: Vec<u32> =
            (0..=queries.len()).map(|sequence| queries[..sequence].iter().sum()).collect();
        let rows = starts[queries.len()];
        let most = |lengths: &[u32]| lengths.iter().copied().max().unwrap_or(0);
        let capacity = most(keys) + 2;
        let slice = |sequence: usize| Slice {
            query_start: starts[sequence],
            queries: queries[sequence],
            key_start: capacity * sequence as u32,
            keys: keys[sequence],
            output_start: starts[sequence],
            lse_start: starts[sequence],
        };
        let slices: Vec<Slice> = (0..queries.len()).map(slice).collect();
        let words = Sequencer::schedule(*tile_rows, WINDOW, &slices);
        let room = Sequencer::records(batch.into(), rows.into(), (*tile_rows).into());

        let mut memory = Memory::new();
        let schedule = memory.output("schedule", 4 * words.len());
        let query_starts = memory.input_u32("query starts", &starts);
        let lengths = memory.input_u32("lengths", keys);
        let arguments = Arguments::default()
            .address("Schedule", schedule)
            .number("MaxTiles", room as usize)
            .number("TileRows", *tile_rows as usize)
            .with("ReachLeft", Argument::S32(WINDOW[0]))
            .with("ReachRight", Argument::S32(WINDOW[1]))
            .number("Batch", queries.len())
            .number("Entries", queries.len())
            .number("QueryLength", most(queries) as usize)
            .number("KeyLength", capacity as usize)
            .number("Key rows of a sequence", capacity as usize)
            .number("Query rows", rows as usize)
            .number("Key rows", (capacity * batch) as usize)
            .address("QueryStarts", query_starts)
            .address("KeyLengths", lengths)
            .list("QueryLengths", None)
            .list("KeyStarts", None)
            .list("LeftPadding", None)
            .list("BatchIndex", None)
            .number("Query rows of a sequence", 0)
            .number("Output rows of a sequence", 0)
            .number("LseBatchStride", 0)
            .of(&program)?;
        // Words are compared by their bits, which are those of small floats.
        let exact: Vec<f64> = words.iter().map(|word| f32::from_bits(*word).into()).collect();
        let results = vec![Expected {
            name: "schedule",
            buffer: schedule,
            element: Element::F32,
            magnitude: exact.clone(),
            tolerance: vec![0.0; exact.len()],
            exact,
        }];
        let size = format!("{queries:?} queries, {keys:?} keys, tiles of {tile_rows}");
        Ok(Scene { program, grid: 1, arguments, memory, results, size })
    }
}
