//! One warp's way through its tiles of a sequence.

use ptx::{
    Builder, Expression, F32, FragmentA, GlobalAddress, Packed, Reg, S32, SteppedLanes, U32,
};

use super::copies::Ring;
use super::mask::Mask;
use super::products::{self, Output};
use super::schedule::Cursor;
use super::softmax::Softmax;
use super::{Decode, Numbers};
use crate::attention::Score;
use crate::attention::scores::{ScoreRule, Slopes, alibi};
use crate::attention::visibility::Seen;
use crate::strides::Strides;

pub(super) struct Walk<'a> {
    decode: &'a Decode,
    numbers: &'a Numbers,
    lanes: SteppedLanes,
    /// By sixteen query rows and by sixteen columns.
    queries: Vec<Vec<FragmentA>>,
    pub(super) softmax: Softmax,
    pub(super) output: Output,
}

/// What is known of the scores of the thread's row among eight.
struct ScoreRow {
    /// The first key that it sees, and the last.
    seen: [Reg<S32>; 2],
    /// Its slope in units of log2, and its position.
    alibi: Option<(Reg<F32>, Reg<S32>)>,
}

/// The key of the thread's first column in the tile from `first_key` on.
fn first_column(k: &mut Builder, numbers: &Numbers, first_key: Reg<U32>) -> Reg<S32> {
    let column = k.eval(first_key + numbers.lane % 4 * 2);
    k.eval(column.reinterpret::<S32>())
}

/// The thread's row among eight query rows.
struct Row {
    query: Reg<U32>,
    head: Reg<U32>,
    /// Whether there is such a row.
    exists: Reg<ptx::Pred>,
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
            queries: Vec::new(),
            softmax: Softmax::new(k, decode),
            output: Output::zeros(k, decode),
        }
    }

    /// Query rows go through the queries of a sequence, and for each through the heads of the group.
    fn row(&self, k: &mut Builder, cursor: &Cursor, eight: u32) -> Row {
        let numbers = self.numbers;
        let index = k.eval(numbers.first_row + 8 * eight + numbers.lane / 4);
        let (query, member) = numbers.group.divide(k, index);
        Row {
            query,
            head: k.eval(numbers.key_head * numbers.group.number + member),
            exists: k.eval(query.less(cursor.queries)),
        }
    }

    /// Loads the queries of the cursor's sequence as the first operands of products; rows that
    /// there are not become zeros.
    pub(super) fn load_queries(
        &mut self,
        k: &mut Builder,
        queries: Reg<GlobalAddress>,
        strides: &Strides,
        cursor: &Cursor,
    ) {
        let decode = self.decode;
        let nothing = k.packed_zero(decode.element);
        let steps = decode.head_dim.div_ceil(16);
        // The two words of each step, at columns from 0 and from 8 on.
        let words: Vec<Vec<[Packed; 2]>> = (0..decode.rows / 8)
            .map(|eight| {
                let row = self.row(k, cursor, eight);
                let words: Vec<[Packed; 2]> = (0..steps)
                    .map(|step| {
                        [0, 8].map(|half| match 16 * step + half < decode.head_dim {
                            true => k.packed_zero(decode.element),
                            false => nothing,
                        })
                    })
                    .collect();
                k.if_(row.exists, |k| {
                    let place = k.eval(cursor.first_query + row.query);
                    let at = [cursor.sequence(), place, row.head];
                    let address = strides.row_address(k, queries, decode.element, at);
                    let column = k.eval(self.numbers.lane % 4 * 4);
                    let address = k.eval(address + column.convert::<ptx::U64>());
                    for (step, pair) in words.iter().enumerate() {
                        for (half, dst) in pair.iter().enumerate() {
                            if 16 * step as u32 + 8 * half as u32 >= decode.head_dim {
                                continue;
                            }
                            k.load_packed_into(*dst, address + (32 * step + 16 * half));
                        }
                    }
                });
                words
            })
            .collect();
        self.queries = words
            .chunks(2)
            .map(|eights| {
                (0..steps as usize)
                    .map(|step| {
                        let first = eights[0][step];
                        let second = eights.get(1).map_or([nothing; 2], |eight| eight[step]);
                        FragmentA([first[0], second[0], first[1], second[1]])
                    })
                    .collect()
            })
            .collect();
    }

    /// Walks the warp's tiles of the cursor's sequence.
    pub(super) fn keys(
        &mut self,
        k: &mut Builder,
        ring: &Ring,
        cursor: &Cursor,
        rule: ScoreRule,
        slopes: Option<Slopes>,
    ) {
        let (decode, numbers) = (self.decode, self.numbers);
        let mask = Mask::new(k, cursor);
        let rows: Vec<ScoreRow> = (0..decode.rows / 8)
            .map(|eight| {
                let row = self.row(k, cursor, eight);
                let last = k.eval(cursor.queries.maximum(1) - 1);
                let query = k.eval(row.query.minimum(last));
                let [first, end] = cursor.visible(k, query);
                // Heads beyond the last row's are not there: any head will do.
                let group = numbers.group.number;
                let head = k.eval(row.head.minimum(numbers.key_head * group + (group - 1)));
                let alibi = slopes.map(|slopes| {
                    let slope = slopes.log2(k, cursor.sequence(), head);
                    (slope, cursor.position(k, query))
                });
                ScoreRow { seen: [first, k.eval(end - 1)], alibi }
            })
            .collect();
        let tile = k.variable(ring.warp());
        k.loop_(|k| {
            k.break_if(tile.at_least(cursor.count));
            let keys = ring.wait(k);
            let values = k.eval(keys + decode.key_layout().bytes());
            let first_key = k.eval(cursor.first_key + tile * decode.tile_keys);
            let scores = products::scores(k, decode, self.lanes, &self.queries, keys);
            let eights = 0..decode.rows as usize / 8;
            let scores: Vec<Vec<Score>> =
                eights.map(|eight| Score::of_warp_row(&scores, eight)).collect();
            for (row, scores) in rows.iter().zip(&scores) {
                rule.cap(k, scores);
                rule.scale(k, scores);
                if let Some((slope, position)) = row.alibi {
                    let column = first_column(k, numbers, first_key);
                    alibi(k, scores, &[0], position - column, slope);
                }
            }
            k.if_(mask.touches(decode, first_key), |k| {
                for (row, scores) in rows.iter().zip(&scores) {
                    let column = first_column(k, numbers, first_key);
                    let [first, last] = row.seen.map(|end| k.eval(end - column));
                    Seen { first: Some(vec![first]), last: vec![last] }.hide_others(k, scores);
                }
                mask.clear(k, decode, numbers, values, first_key);
            });
            let (probabilities, shrinks): (Vec<_>, Vec<_>) = scores
                .iter()
                .enumerate()
                .map(|(eight, scores)| self.softmax.row(k, decode, eight, scores))
                .unzip();
            self.softmax.rescale(k, numbers, &self.output, &shrinks);
            products::update(k, decode, self.lanes, &self.output, &probabilities, values);
            ring.release(k, cursor, tile);
            k.set(tile, tile + decode.warps);
        });
    }
}
