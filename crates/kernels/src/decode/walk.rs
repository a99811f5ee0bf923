//! One warp's way through its tiles of a sequence.

use std::f32::consts::LN_2;

use ptx::{Builder, Expression, F32, GlobalAddress, Reg, S32, SteppedLanes, U32};

use super::copies::Ring;
use super::mask::Mask;
use super::products::{self, Output};
use super::queries::{Queries, Row};
use super::scales::{Scaling, Unit};
use super::schedule::Cursor;
use super::softmax::Softmax;
use super::{Decode, Numbers};
use crate::attention::Score;
use crate::attention::function::lower::{Functions, Standing};
use crate::attention::scores::{ScoreRule, Slopes, alibi};
use crate::attention::visibility::Seen;
use crate::strides::Strides;

pub(super) struct Walk<'a> {
    decode: &'a Decode,
    numbers: &'a Numbers,
    lanes: SteppedLanes,
    queries: Queries,
    pub(super) softmax: Softmax,
    pub(super) output: Output,
    /// What the output is a multiple of.
    pub(super) unit: Option<Unit>,
}

/// What is known of the scores of the thread's row among eight.
struct ScoreRow {
    /// The first key that it sees, and the last.
    seen: [Reg<S32>; 2],
    /// Its slope, in natural units where a function takes the scores and else in units of log2; and
    /// its position.
    alibi: Option<(Reg<F32>, Reg<S32>)>,
    /// Its query and its head, where there are functions.
    place: Option<[Reg<U32>; 2]>,
}

impl ScoreRow {
    /// Where its scores stand in the tile from `first_key` on, for functions.
    fn standing(
        &self,
        k: &mut Builder,
        numbers: &Numbers,
        cursor: &Cursor,
        first_key: Reg<U32>,
    ) -> Standing<'static> {
        let [query, head] = self.place.expect("there are functions");
        Standing {
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

/// What the rows of a warp see of a sequence, and what changes their scores.
pub(super) struct Sight {
    mask: Mask,
    rows: Vec<ScoreRow>,
}

/// The key of the thread's first column in the tile from `first_key` on.
fn first_column(k: &mut Builder, numbers: &Numbers, first_key: Reg<U32>) -> Reg<S32> {
    let column = k.eval(first_key + numbers.lane % 4 * 2);
    k.eval(column.reinterpret::<S32>())
}

impl<'a> Walk<'a> {
    pub(super) fn new(
        k: &mut Builder,
        decode: &'a Decode,
        numbers: &'a Numbers,
        lanes: SteppedLanes,
    ) -> Self {
        Walk {
            decode,
            numbers,
            lanes,
            queries: Queries::NONE,
            softmax: Softmax::new(k, decode),
            output: Output::zeros(k, decode),
            unit: Unit::new(k, decode),
        }
    }

    /// Loads the queries of the cursor's sequence, and the scale of its keys.
    pub(super) fn load_queries(
        &mut self,
        k: &mut Builder,
        queries: (Reg<GlobalAddress>, &Strides),
        cursor: &Cursor,
        scaling: &Scaling,
    ) {
        let (decode, numbers) = (self.decode, self.numbers);
        self.queries = Queries::load(k, decode, numbers, queries, cursor);
        if let Some(scale) = scaling.keys.of_head(k, cursor.sequence(), numbers.key_head) {
            for factor in &mut self.queries.factors {
                *factor = Some(factor.map_or(scale, |factor| k.eval(factor * scale)));
            }
        }
    }

    /// Begins with other keys of the same sequence.
    pub(super) fn reset(&self, k: &mut Builder) {
        self.softmax.reset(k);
        self.output.reset(k);
    }

    /// Walks the warp's tiles of the cursor's sequence.
    pub(super) fn keys(
        &mut self,
        k: &mut Builder,
        ring: &Ring,
        cursor: &Cursor,
        (rule, slopes): (ScoreRule, Option<Slopes>),
        functions: &Functions,
    ) {
        let sight = self.sight(k, cursor, slopes, functions);
        let tile = k.variable(ring.warp());
        self.tiles(k, ring, cursor, &sight, (tile, cursor.count), rule, functions);
    }

    /// What is to be known of the warp's rows of the cursor's sequence.
    pub(super) fn sight(
        &self,
        k: &mut Builder,
        cursor: &Cursor,
        slopes: Option<Slopes>,
        functions: &Functions,
    ) -> Sight {
        let (decode, numbers) = (self.decode, self.numbers);
        let mask = Mask::new(k, decode, numbers, cursor);
        let rows: Vec<ScoreRow> = (0..decode.rows / 8)
            .map(|eight| {
                let row = Row::of(k, numbers, cursor, eight);
                let last = k.eval(cursor.queries.maximum(1) - 1);
                let query = k.eval(row.query.minimum(last));
                let [first, end] = cursor.visible(k, query);
                let alibi = slopes.map(|slopes| {
                    let slope = slopes.log2(k, cursor.sequence(), row.head);
                    let slope = match &functions.score {
                        None => slope,
                        Some(_) => k.eval(slope * LN_2),
                    };
                    (slope, cursor.position(k, query))
                });
                let place = functions.exist().then_some([query, row.head]);
                ScoreRow { seen: [first, k.eval(end - 1)], alibi, place }
            })
            .collect();
        Sight { mask, rows }
    }

    /// Walks the warp's tiles from `tile` on, which is left at the first that is not before `end`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn tiles(
        &mut self,
        k: &mut Builder,
        ring: &Ring,
        cursor: &Cursor,
        Sight { mask, rows }: &Sight,
        (tile, end): (Reg<U32>, Reg<U32>),
        rule: ScoreRule,
        functions: &Functions,
    ) {
        let (decode, numbers) = (self.decode, self.numbers);
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
                    let standing = row.standing(k, numbers, cursor, first_key);
                    function.apply(k, scores, &standing);
                    rule.scale(k, scores);
                }
            }
            k.if_(mask.touches(decode, first_key), |k| {
                for (row, scores) in rows.iter().zip(&scores) {
                    let column = first_column(k, numbers, first_key);
                    let [first, last] = row.seen.map(|end| k.eval(end - column));
                    Seen { first: Some(vec![first]), last: vec![last] }.hide_others(k, scores);
                }
                mask.clear(k, decode, numbers, (ring, values), first_key);
            });
            if let Some(function) = &functions.mask {
                for (row, scores) in rows.iter().zip(&scores) {
                    let standing = row.standing(k, numbers, cursor, first_key);
                    function.apply(k, scores, &standing);
                }
            }
            let scales = ring.scales.values(k, ring.stage);
            let in_units = self.unit.as_ref().zip(scales).map(|(unit, it)| unit.take(k, &it));
            let (scales, growth) = in_units.unzip();
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

    /// Multiplies products of 8-bit keys with what they were scaled by.
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
