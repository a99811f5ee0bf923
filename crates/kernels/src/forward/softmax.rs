//! The softmax of a warpgroup's rows: the guarded softmax, with its slow path in the block's own
//! registers and the output rescaled when the products in flight have landed.

use ptx::{Accumulator, Builder, Expression, F32, Fragment, Pred, Reg, Value};

use super::Forward;
use crate::attention::rows::Finished;
use crate::attention::{ACCUMULATOR_ROWS, Score, softmax};

/// The state of a thread's two rows.
pub(super) struct Softmax {
    /// A block's sum beyond this is too large for the element.
    bound: f32,
    slow_path_apart: bool,
    rows: softmax::Softmax,
}

/// How the output must be rescaled, where the guard tripped.
pub(super) struct Rescale {
    needed: Reg<Pred>,
    factors: [Reg<F32>; 2],
}

impl Softmax {
    pub(super) fn new(k: &mut Builder, forward: &Forward, scale_log2: Reg<F32>) -> Self {
        Softmax {
            bound: softmax::bound(forward.element),
            slow_path_apart: forward.form.slow_path_apart,
            rows: softmax::Softmax::new(k, ACCUMULATOR_ROWS.len(), scale_log2),
        }
    }

    /// Starts the rows: their exact maximum becomes their reference.
    pub(super) fn first_block(&self, k: &mut Builder, scores: &[Score], p: &Fragment) {
        self.rows.begin(k, scores);
        let sums = self.exponentials(k, scores, p);
        self.rows.start(k, &sums);
    }

    /// Adds a block.
    pub(super) fn block(&self, k: &mut Builder, scores: &[Score], p: &Fragment) -> Rescale {
        let factors = [k.variable(1.0), k.variable(1.0)];
        let (sums, needed) = if self.slow_path_apart {
            let sums = self.exponentials(k, scores, p);
            let sums: Vec<Reg<F32>> = sums.into_iter().map(|sum| k.variable(sum)).collect();
            let needed = self.rows.exceeds(k, &sums, self.bound);
            k.if_(needed, |k| {
                self.rows.raise(k, scores, &factors);
                let again = self.exponentials(k, scores, p);
                set(k, &sums, &again);
            });
            (sums, needed)
        } else {
            let sums = vec![k.register::<F32>(), k.register()];
            let raised = k.variable(Value::<Pred>::from(false));
            let bound = k.variable(self.bound);
            // The exit stands last, or the assembler would copy what is before it.
            k.loop_(|k| {
                k.if_(raised, |k| {
                    self.rows.raise(k, scores, &factors);
                    // Once is enough: nothing is beyond infinity.
                    k.set(bound, f32::INFINITY);
                });
                let found = self.exponentials(k, scores, p);
                set(k, &sums, &found);
                let beyond = self.rows.exceeds(k, &sums, bound);
                k.break_if(!beyond);
                k.set(raised, true);
            });
            (sums, raised)
        };
        self.rows.add(k, &sums);
        Rescale { needed, factors }
    }

    /// The exponentials of a block, rounded into `p`, and the thread's sums of them.
    fn exponentials(&self, k: &mut Builder, scores: &[Score], p: &Fragment) -> Vec<Reg<F32>> {
        self.rows.exponentials(k, scores, |k, pair, [low, high]| p.set_pair(k, pair, low, high))
    }

    /// The references of the thread's rows, and its parts of their sums.
    pub(super) fn state(&self) -> Vec<Reg<F32>> {
        self.rows.state()
    }

    /// Takes in rows over other keys: how the output must be rescaled, and what that over the other
    /// keys must be multiplied with before it is added.
    pub(super) fn take_in(
        &self,
        k: &mut Builder,
        others: [Reg<F32>; 4],
    ) -> (Rescale, [Reg<F32>; 2]) {
        let [first, second] =
            [0, 1].map(|row| self.rows.take_in(k, row, [others[row], others[row + 2]]));
        let needed = k.any(first[0].differs(1.0) | second[0].differs(1.0));
        (Rescale { needed, factors: [first[0], second[0]] }, [first[1], second[1]])
    }

    /// Ends the rows.
    pub(super) fn finish(&self, k: &mut Builder, sink: Option<Reg<F32>>) -> Vec<Finished> {
        self.rows.finish(k, sink)
    }
}

impl Rescale {
    /// Rescales the output, once the products that were in flight have landed.
    pub(super) fn apply(&self, k: &mut Builder, output: &Accumulator) {
        k.if_(self.needed, |k| {
            for (index, element) in output.registers().iter().enumerate() {
                k.set(*element, *element * self.factors[Accumulator::row_of(index)]);
            }
        });
    }
}

fn set(k: &mut Builder, registers: &[Reg<F32>], values: &[Reg<F32>]) {
    for (register, value) in registers.iter().zip(values) {
        k.set(*register, *value);
    }
}
