//! A kernel that tabulates a function: it applies the function to every score of a matrix, to test
//! a function by itself.

use ptx::{Builder, Expression, F32, Program, Reg, S32, Target, U32, U64};

use super::Function;
use super::lower::{FunctionRegisters, ScoreCoordinates};
use crate::Error;
use crate::attention::Score;
use crate::parameter::{Number, Tensor};

/// Rows and columns of a thread, as in the fragments of the tensor cores.
const ROWS: [u32; 2] = [0, 8];
const COLUMNS: [u32; 4] = [0, 1, 8, 9];
const TILE: u32 = 16;

impl Function {
    /// Builds the kernel, to be launched as one block of one warp. `Query` is the address of the
    /// scores before the function and `Output` that of the scores after it, both (`Batch`,
    /// `QueryHeads`, `QueryLength`, `KeyLength`) in contiguous `f32`.
    pub fn table(&self, target: Target) -> Result<Program, Error> {
        let mut k = Builder::new(format!("table_{}", self.label()), target, 32);
        self.write_table(&mut k);
        Ok(k.finish()?)
    }

    fn write_table(&self, k: &mut Builder) {
        let [before, after] = [Tensor::Query, Tensor::Output].map(|tensor| tensor.address(k));
        let [batches, heads] = [Number::Batch, Number::QueryHeads].map(|number| number.read(k));
        let [query_length, key_length] =
            [Number::QueryLength, Number::KeyLength].map(|number| number.read(k));
        let function = FunctionRegisters::parameters(k, *self);
        let lane = k.lane();
        let [row, column] = [k.eval(lane / 4), k.eval(lane % 4 * 2)];
        let [zero, all_heads] = [k.eval(0u32), k.eval(batches * heads)];
        k.for_range(zero, all_heads, 1, |k, of_all| {
            let [batch, head] = [k.eval(of_all / heads), k.eval(of_all % heads)];
            k.for_range(zero, query_length, TILE, |k, first_row| {
                k.for_range(zero, key_length, TILE, |k, first_column| {
                    let first = |k: &mut Builder, first: Reg<U32>, own: Reg<U32>| {
                        k.eval((first + own).reinterpret::<S32>())
                    };
                    let coordinates = ScoreCoordinates {
                        batch,
                        head,
                        first_query: first(k, first_row, row),
                        rows: &ROWS,
                        first_key: first(k, first_column, column),
                        query_length,
                        key_length,
                    };
                    let mut scores = Vec::new();
                    let mut places = Vec::new();
                    for (index, below) in ROWS.into_iter().enumerate() {
                        for right in COLUMNS {
                            let query = k.eval(first_row + row + below);
                            let key = k.eval(first_column + column + right);
                            let of_row = k.eval(of_all * query_length + query);
                            let place = of_row.convert::<U64>() * key_length.convert::<U64>()
                                + key.convert::<U64>();
                            let place = k.eval(place * 4);
                            let exists = query.less(query_length) & key.less(key_length);
                            let exists = k.eval(exists);
                            let register = k.variable(0.0);
                            k.if_(exists, |k| {
                                let loaded = k.load::<F32, _>(before + place);
                                k.set(register, loaded);
                            });
                            scores.push(Score { row: index, column: right, register });
                            places.push((exists, place));
                        }
                    }
                    function.apply(k, &scores, &coordinates);
                    for (Score { register, .. }, (exists, place)) in scores.iter().zip(places) {
                        k.if_(exists, |k| k.store(after + place, *register));
                    }
                });
            });
        });
    }
}
