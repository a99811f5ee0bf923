//! One warp's way through its tiles of a sequence.

use ptx::{
    Address, Builder, Expression, GlobalAddress, Instruction, LoadCache, LoadOrder, Operand, Reg,
    Register, S32, Space, U32,
};

use super::copies::Ring;
use super::mask::Mask;
use super::place::Places;
use super::products::{self, Lanes, Output};
use super::schedule::Cursor;
use super::scores::{RowRule, Rule};
use super::softmax::Softmax;
use super::{Decode, Numbers};
use crate::strides::Strides;

pub(super) struct Walk<'a> {
    decode: &'a Decode,
    numbers: &'a Numbers,
    lanes: Lanes,
    /// By sixteen query rows and by sixteen columns.
    queries: Vec<Vec<[Register; 4]>>,
    pub(super) softmax: Softmax,
    pub(super) output: Output,
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
        lanes: Lanes,
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
        let packed = decode.element.packed();
        let zeros = |k: &mut Builder| {
            let dst = k.register_of(packed);
            k.push(Instruction::Move { dst, src: Operand::Immediate(0) });
            dst
        };
        let nothing = zeros(k);
        let steps = decode.head_dim.div_ceil(16);
        // The two words of each step, at columns from 0 and from 8 on.
        let words: Vec<Vec<[Register; 2]>> = (0..decode.rows / 8)
            .map(|eight| {
                let row = self.row(k, cursor, eight);
                let words: Vec<[Register; 2]> = (0..steps)
                    .map(|step| {
                        [0, 8].map(|half| match 16 * step + half < decode.head_dim {
                            true => zeros(k),
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
                            let offset = (32 * step + 16 * half) as i32;
                            k.push(Instruction::Load {
                                dst: vec![*dst],
                                space: Space::Global,
                                address: Address { base: address.register(), offset },
                                order: LoadOrder::Weak,
                                cache: LoadCache::Default,
                                policy: None,
                            });
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
                        [first[0], second[0], first[1], second[1]]
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
        places: &Places,
        rule: &Rule,
    ) {
        let (decode, numbers) = (self.decode, self.numbers);
        let mask = Mask::new(k, cursor);
        let rows: Vec<([Reg<S32>; 2], RowRule)> = (0..decode.rows / 8)
            .map(|eight| {
                let row = self.row(k, cursor, eight);
                let last = k.eval(cursor.queries.maximum(1) - 1);
                let query = k.eval(row.query.minimum(last));
                let visible = cursor.visible(k, query);
                let position = cursor.position(k, query);
                // Heads beyond the last row's are not there: any head will do.
                let group = numbers.group.number;
                let head = k.eval(row.head.minimum(numbers.key_head * group + (group - 1)));
                (visible, rule.row(k, numbers, cursor.sequence(), head, position))
            })
            .collect();
        let tile = k.variable(ring.warp());
        k.loop_(|k| {
            k.break_if(tile.at_least(cursor.count));
            let keys = ring.wait(k, decode);
            let values = k.eval(keys + decode.key_layout().bytes());
            let first_key = k.eval(cursor.first_key + tile * decode.tile_keys);
            let scores = products::scores(k, decode, self.lanes, &self.queries, keys);
            let eights = 0..decode.rows as usize / 8;
            let scores: Vec<_> = eights.map(|eight| scores.row(eight)).collect();
            for ((_, row), scores) in rows.iter().zip(&scores) {
                rule.apply(k, row, scores, first_key);
            }
            k.if_(mask.touches(decode, first_key), |k| {
                for ((visible, _), scores) in rows.iter().zip(&scores) {
                    mask.hide(k, numbers, *visible, scores, first_key);
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
            ring.release(k, decode, cursor, places, tile);
            k.set(tile, tile + decode.warps);
        });
    }
}
