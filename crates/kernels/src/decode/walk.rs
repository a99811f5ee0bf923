//! The main loop of a warp: its tiles of one sequence, from scores to the update of the output.

use std::f32::consts::LOG2_E;

use ptx::{Builder, Expression, F32, Reg, S32, SteppedLanes, U32};

use super::copies::Ring;
use super::mask::Mask;
use super::products::{self, Output};
use super::queries::{Inputs, Queries, Row};
use super::scales::OutputScale;
use super::schedule::Cursor;
use super::softmax::Softmax;
use super::{Decode, Numbers};
use crate::attention::Score;
use crate::attention::function::lower::{Functions, ScoreCoordinates};
use crate::attention::scores::{ScoreRule, alibi, hide_least};
use crate::attention::visibility::VisibleColumns;

/// A warp's state while it goes through its tiles of a sequence: the query fragments, the running
/// softmax and the output accumulators.
pub(super) struct Walk<'a> {
    decode: &'a Decode,
    numbers: &'a Numbers,
    lanes: SteppedLanes,
    inputs: &'a Inputs,
    rule: ScoreRule,
    functions: &'a Functions,
    queries: Queries,
    pub(super) softmax: Softmax,
    pub(super) output: Output,
    /// The scale of the output, with per-token value scales.
    pub(super) output_scale: Option<OutputScale>,
}

/// What the scores of the thread's row among eight need: the visible keys, ALiBi and the place of
/// the row for functions.
struct ScoreRow {
    /// The first and the last key that the row sees.
    seen: [Reg<S32>; 2],
    /// The row's ALiBi slope and position. The slope is in natural units where a score function
    /// follows, otherwise in units of log2.
    alibi: Option<(Reg<F32>, Reg<S32>)>,
    /// The row's query and query head, where there are functions.
    place: Option<[Reg<U32>; 2]>,
}

impl ScoreRow {
    /// Returns the place of the row's scores in the tile from `first_key` on, for functions.
    fn coordinates(
        &self,
        k: &mut Builder,
        numbers: &Numbers,
        cursor: &Cursor,
        first_key: Reg<U32>,
    ) -> ScoreCoordinates<'static> {
        let [query, head] = self.place.expect("there are functions");
        ScoreCoordinates {
            batch: cursor.sequence(),
            head,
            first_query: k.eval(query.reinterpret::<S32>()),
            rows: &[0],
            first_key: first_column(k, numbers, first_key),
            query_length: cursor.queries,
            key_length: cursor.keys,
        }
    }
}

/// What the rows of a warp see of a sequence, and the per-row inputs of its score rules.
pub(super) struct ScoreRows {
    mask: Mask,
    rows: Vec<ScoreRow>,
}

/// Returns the key of the thread's first column in the tile from `first_key` on.
fn first_column(k: &mut Builder, numbers: &Numbers, first_key: Reg<U32>) -> Reg<S32> {
    let column = k.eval(first_key + numbers.lane % 4 * 2);
    k.eval(column.reinterpret::<S32>())
}

impl<'a> Walk<'a> {
    /// Begins the cursor's sequence.
    pub(super) fn new(
        k: &mut Builder,
        decode: &'a Decode,
        numbers: &'a Numbers,
        lanes: SteppedLanes,
        inputs: &'a Inputs,
        (rule, functions): (ScoreRule, &'a Functions),
    ) -> Self {
        Walk {
            decode,
            numbers,
            lanes,
            inputs,
            rule,
            functions,
            queries: Queries::new(k, decode, inputs),
            softmax: Softmax::new(k, decode),
            output: Output::zeros(k, decode),
            output_scale: OutputScale::new(k, decode),
        }
    }

    /// Clears softmax and output, to begin with other keys of the same sequence.
    pub(super) fn reset(&self, k: &mut Builder) {
        self.softmax.reset(k);
        self.output.reset(k);
    }

    /// Processes all of the warp's tiles of the cursor's sequence.
    pub(super) fn keys(&self, k: &mut Builder, ring: &Ring<'_>, cursor: &Cursor) {
        let score_rows = self.score_rows(k, cursor);
        let tile = k.variable(ring.warp());
        self.tiles(k, ring, cursor, &score_rows, (tile, cursor.count));
    }

    /// Computes the visible keys and score inputs of the warp's rows of the cursor's sequence.
    pub(super) fn score_rows(&self, k: &mut Builder, cursor: &Cursor) -> ScoreRows {
        let Walk { decode, numbers, functions, .. } = *self;
        let mask = Mask::new(k, decode, numbers, cursor);
        let rows: Vec<ScoreRow> = (0..decode.rows / 8)
            .map(|eight| {
                let row = Row::of(k, numbers, cursor, eight);
                let last = k.eval(cursor.queries.maximum(1) - 1);
                let query = k.eval(row.query.minimum(last));
                let [first, end] = cursor.visible(k, query);
                let alibi = self.inputs.slope(eight).map(|slope| {
                    let slope = match &functions.score {
                        None => k.eval(slope * LOG2_E),
                        Some(_) => slope,
                    };
                    (slope, cursor.position(k, query))
                });
                let place = functions.exist().then_some([query, row.head]);
                ScoreRow { seen: [first, k.eval(end - 1)], alibi, place }
            })
            .collect();
        ScoreRows { mask, rows }
    }

    /// Processes the warp's tiles from `tile` up to `end`. `tile` advances by the number of warps
    /// and is left at the warp's first tile that is not before `end`.
    pub(super) fn tiles(
        &self,
        k: &mut Builder,
        ring: &Ring<'_>,
        cursor: &Cursor,
        ScoreRows { mask, rows }: &ScoreRows,
        (tile, end): (Reg<U32>, Reg<U32>),
    ) {
        let Walk { decode, numbers, rule, functions, .. } = *self;
        k.loop_(|k| {
            k.break_if(tile.at_least(end));
            let keys = ring.wait(k);
            let values = k.eval(keys + decode.key_layout().bytes());
            let first_key = k.eval(cursor.first_key + tile * decode.tile_keys);
            let scores = products::scores(k, decode, self.lanes, &self.queries.fragments, keys);
            let eights = 0..decode.rows as usize / 8;
            let scores: Vec<Vec<Score>> =
                eights.map(|eight| Score::of_warp_row(&scores, eight)).collect();
            self.dequantise(k, ring, &scores);
            for (row, scores) in rows.iter().zip(&scores) {
                rule.cap(k, scores);
                match &functions.score {
                    None => rule.scale(k, scores),
                    Some(_) => rule.in_natural_units(k, scores),
                }
                if let Some((slope, position)) = row.alibi {
                    let column = first_column(k, numbers, first_key);
                    alibi(k, scores, &[0], position - column, slope);
                }
                if let Some(function) = &functions.score {
                    let coordinates = row.coordinates(k, numbers, cursor, first_key);
                    function.apply(k, scores, &coordinates);
                    hide_least(k, scores);
                    rule.scale(k, scores);
                }
            }
            k.if_(mask.touches(decode, first_key), |k| {
                for (row, scores) in rows.iter().zip(&scores) {
                    let column = first_column(k, numbers, first_key);
                    let [first, last] = row.seen.map(|end| k.eval(end - column));
                    VisibleColumns { first: Some(vec![first]), last: vec![last] }
                        .hide_others(k, scores);
                }
                mask.clear(k, decode, numbers, (ring, values), first_key);
            });
            if let Some(function) = &functions.mask {
                for (row, scores) in rows.iter().zip(&scores) {
                    let coordinates = row.coordinates(k, numbers, cursor, first_key);
                    function.apply(k, scores, &coordinates);
                }
            }
            let scales = ring.scales.values(k, ring.stage);
            let scaled =
                self.output_scale.as_ref().zip(scales).map(|(scale, it)| scale.take(k, &it));
            let (scales, growth) = scaled.unzip();
            let (probabilities, mut shrinks): (Vec<_>, Vec<_>) = scores
                .iter()
                .enumerate()
                .map(|(eight, scores)| {
                    self.softmax.row(k, decode, eight, scores, scales.as_deref())
                })
                .unzip();
            if let Some(growth) = growth {
                shrinks.iter_mut().for_each(|shrink| *shrink = k.eval(*shrink * growth));
            }
            self.softmax.rescale(k, numbers, &self.output, &shrinks);
            products::update(k, decode, self.lanes, &self.output, &probabilities, values);
            ring.release(k, cursor, tile);
            k.set(tile, tile + decode.warps);
        });
    }

    /// Multiplies the scores of 8-bit keys by the scales of the keys and the factors of the query
    /// rows.
    fn dequantise(&self, k: &mut Builder, ring: &Ring, scores: &[Vec<Score>]) {
        let of_tokens = ring.scales.keys(k, ring.stage);
        for (factor, scores) in self.queries.factors.iter().zip(scores) {
            for (index, Score { register, .. }) in scores.iter().enumerate() {
                let of_token = of_tokens.as_ref().map(|scales| scales[index]);
                for factor in of_token.into_iter().chain(*factor) {
                    k.set(*register, *register * factor);
                }
            }
        }
    }
}
